//! The log of the server: JSON lines on stdout (or stderr) and, if a collector is configured, spans to it.
//!
//! A separate thread writes the lines and drops them rather than blocking, so a stopped terminal, a full pipe or a reader that
//! went away delays no request. What is dropped is counted, and a line on stderr says so (`dropped.rs`). Events of other crates are
//! logged from WARN on. After the start nothing else writes to stdout or stderr, because that could block.

use std::os::fd::AsFd;

use tollgate::telemetry::{
    DroppedLines, JsonLinesGuard, LogDecisions, OtlpGuard, Telemetry, json_lines_to, otlp,
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};

use super::dropped::Warnings;
use crate::config::{LogLevel, LogTarget, ServerConfig};
use crate::failure::Failure;

/// Keeps lines and spans flowing. Dropping it at the end waits a moment for the last of them.
pub(crate) struct Log {
    lines: Option<JsonLinesGuard>,
    _spans: Option<OtlpGuard>,
    _warnings: Option<Warnings>,
}

impl Log {
    /// The count of lines that were dropped; none without a log.
    pub(crate) fn dropped(&self) -> Option<DroppedLines> {
        self.lines.as_ref().map(JsonLinesGuard::dropped)
    }
}

/// Starts the log of this process. Returns the telemetry that a gate reports to.
pub(crate) fn start(server: &ServerConfig) -> Result<(Log, Telemetry), Failure> {
    let level = server.log;
    let decisions = match level {
        LogLevel::Off => LogDecisions::Off,
        LogLevel::Debug => LogDecisions::All,
        _ => LogDecisions::Denials,
    };
    // Namespaces of our own: clients at the gate, and keys of `CL.THROTTLE`.
    let telemetry = Telemetry::new().metrics().namespaces(["ip", "cl"]).log(decisions);
    let telemetry = match (server.log_all, server.log_lines) {
        (true, _) => telemetry.log_lines(None),
        (false, Some(lines)) => telemetry.log_lines(Some(lines)),
        (false, None) => telemetry,
    };
    let (lines, lines_guard) = match level {
        LogLevel::Off => (None, None),
        _ => {
            // A separate handle, so that the process's lock of the stream is not held while a line waits.
            let (name, output) = match server.log_to {
                LogTarget::Stderr => ("stderr", std::io::stderr().as_fd().try_clone_to_owned()),
                _ => ("stdout", std::io::stdout().as_fd().try_clone_to_owned()),
            };
            let output = output.map_err(|error| Failure::new(format!("cannot log to {name}: {error}")))?;
            let (lines, guard) = json_lines_to(std::fs::File::from(output));
            (Some(lines.with_filter(wanted(level))), Some(guard))
        }
    };
    let (spans, spans_guard) = match names_collector(|name| std::env::var(name).ok()) {
        true => {
            let sender = match std::env::var_os("OTEL_SERVICE_NAME") {
                Some(_) => otlp(),
                None => otlp().service_name("tollgate"),
            };
            let (spans, guard) = sender.start().map_err(|error| Failure::new(error.to_string()))?;
            let ours = Targets::new().with_target("tollgate", LevelFilter::INFO);
            (Some(spans.with_filter(ours)), Some(guard))
        }
        false => (None, None),
    };
    let telemetry = if spans.is_some() { telemetry.spans() } else { telemetry };
    let subscriber = tracing_subscriber::registry().with(lines).with(spans);
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|error| Failure::new(format!("cannot log: {error}")))?;
    let warnings = lines_guard.as_ref().map(|lines| Warnings::start(lines.dropped())).transpose();
    let warnings = warnings.map_err(|error| Failure::new(format!("cannot log: {error}")))?;
    Ok((Log { lines: lines_guard, _spans: spans_guard, _warnings: warnings }, telemetry))
}

/// The targets and levels that are written.
fn wanted(level: LogLevel) -> Targets {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Debug => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("tollgate", level)
}

/// Whether the environment names a collector for spans.
fn names_collector(variable: impl Fn(&str) -> Option<String>) -> bool {
    ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
        .iter()
        .any(|name| variable(name).is_some_and(|value| !value.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn a_level_lets_pass_what_it_names_and_of_others_what_may_need_a_look() {
        for (level, target, passes) in [
            (LogLevel::Off, "tollgate_server::reload", None),
            (LogLevel::Error, "tollgate_server::reload", Some(Level::ERROR)),
            (LogLevel::Warn, "tollgate_store::redis", Some(Level::WARN)),
            (LogLevel::Info, "tollgate::decision", Some(Level::INFO)),
            (LogLevel::Info, "h2::proto", Some(Level::WARN)),
            (LogLevel::Debug, "tollgate::decision", Some(Level::DEBUG)),
            (LogLevel::Debug, "h2::proto", Some(Level::WARN)),
            (LogLevel::Error, "h2::proto", Some(Level::ERROR)),
        ] {
            let wanted = wanted(level);
            for event_level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
                let is_expected = passes.is_some_and(|most| event_level <= most);
                assert_eq!(
                    wanted.would_enable(target, &event_level),
                    is_expected,
                    "{level:?} {target} {event_level}"
                );
            }
        }
    }

    #[test]
    fn a_collector_is_named_by_either_variable() {
        for (set, value, names) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317", true),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:4317", true),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", " ", false),
            ("OTEL_SERVICE_NAME", "tollgate", false),
        ] {
            let variable = |name: &str| (name == set).then(|| value.to_owned());
            assert_eq!(names_collector(variable), names, "{set}={value}");
        }
    }
}
