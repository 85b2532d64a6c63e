//! What goes to `tracing`, as JSON, one object a line.
//!
//! A line is put together in the thread that has something to tell, and written by a thread of its own. If that falls behind,
//! or the output blocks, fails or panics, lines are dropped and counted: nobody waits for a log. Text is escaped as JSON asks,
//! control characters included, so a line is a line whatever is in it.

use std::fmt::{self, Write as _};
use std::io::Write;

use opentelemetry::trace::TraceContextExt;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::Context;

/// How many lines wait to be written before further ones are dropped.
const WAITING_LINES: usize = 16_384;

/// The names that a line has of its own. A field of the same name gets `field_` before it.
const OWN_NAMES: [&str; 5] = ["timestamp", "level", "target", "trace_id", "span_id"];

/// A layer of `tracing-subscriber` that writes JSON lines; made by [`json_lines`].
pub struct JsonLines {
    writer: NonBlocking,
}

/// Keeps the lines flowing. Dropped at the end of the program, it waits a moment for the last of them to be written.
#[must_use = "lines are written until this is dropped"]
pub struct JsonLinesGuard {
    dropped: ErrorCounter,
    _worker: WorkerGuard,
}

impl JsonLinesGuard {
    /// How many lines were dropped because the output did not take them fast enough.
    pub fn dropped_lines(&self) -> usize {
        self.dropped.dropped_lines()
    }
}

impl fmt::Debug for JsonLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLines").finish_non_exhaustive()
    }
}

impl fmt::Debug for JsonLinesGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLinesGuard").field("dropped_lines", &self.dropped_lines()).finish_non_exhaustive()
    }
}

/// JSON lines on standard output: `timestamp` (RFC 3339, UTC), `level`, `target`, `message`, the event's fields and, within an
/// OpenTelemetry span, its `trace_id` and `span_id`.
///
/// ```
/// use tollgate::telemetry::json_lines;
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let (lines, _guard) = json_lines();
/// let subscriber = tracing_subscriber::registry().with(lines);
/// tracing::subscriber::with_default(subscriber, || tracing::info!(answer = 42, "hello"));
/// // {"timestamp":"2026-01-31T12:00:00.123456Z","level":"INFO","target":"…","message":"hello","answer":42}
/// ```
pub fn json_lines() -> (JsonLines, JsonLinesGuard) {
    json_lines_to(std::io::stdout())
}

/// JSON lines to any writer.
pub fn json_lines_to(writer: impl Write + Send + 'static) -> (JsonLines, JsonLinesGuard) {
    let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(WAITING_LINES);
    let (writer, worker) = builder.thread_name("tollgate-log").finish(writer);
    let dropped = writer.error_counter();
    (JsonLines { writer }, JsonLinesGuard { dropped, _worker: worker })
}

impl<S: Subscriber> Layer<S> for JsonLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let line = Line::of(event).end();
        // It fails only if nobody writes any more, and then there is nobody to tell.
        let _ = self.writer.clone().write_all(line.as_bytes());
    }
}

/// An object, as far as it is written.
struct Line(String);

impl Line {
    fn of(event: &Event<'_>) -> Line {
        let mut timestamp = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
        let mut line = Line(String::with_capacity(512));
        line.text("timestamp", &timestamp);
        line.text("level", event.metadata().level().as_str());
        line.text("target", event.metadata().target());
        event.record(&mut line);
        let context = opentelemetry::Context::current();
        let span = context.span().span_context().clone();
        if span.is_valid() {
            line.text("trace_id", &span.trace_id().to_string());
            line.text("span_id", &span.span_id().to_string());
        }
        line
    }

    fn end(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }

    fn name(&mut self, name: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&quoted(name));
        self.0.push(':');
    }

    fn field_name(&mut self, field: &Field) {
        match OWN_NAMES.contains(&field.name()) {
            true => self.name(&format!("field_{}", field.name())),
            false => self.name(field.name()),
        }
    }

    fn text(&mut self, name: &str, text: &str) {
        self.name(name);
        self.0.push_str(&quoted(text));
    }

    fn number(&mut self, field: &Field, number: impl fmt::Display) {
        self.field_name(field);
        let _ = write!(self.0, "{number}");
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        // What is no number in JSON is null there.
        self.number(field, serde_json::Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.number(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.number(field, value);
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.number(field, value);
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.number(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.number(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.field_name(field);
        self.0.push_str(&quoted(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
