//! The decision log: a line for each decision, by the binding limit, as an event of `tracing`.
//!
//! The level is INFO; WARN if the store failed and limits fell back; ERROR for the first decision with such a failure. Peeks are
//! not logged. `storm.rs` decides which lines are suppressed; keys are hashed only for lines that are written.

use metrics::Counter;
use tollgate_kernel::Micros;

use super::LogDecisions;
use super::spans::millis;
use super::storm::{Line, Storm};
use super::{DecisionReport, KeyHasher, OutcomeKind, strategy_name};

pub(crate) struct DecisionLog {
    logs_all: bool,
    storm: Storm,
    suppressed: Option<Counter>,
}

/// The target of all lines, for filters.
macro_rules! line {
    ($level:ident, $($fields:tt)*) => { tracing::$level!(target: "tollgate::decision", $($fields)*) };
}

impl DecisionLog {
    /// Of which decisions, and how many lines in a second.
    pub(crate) fn new(
        decisions: LogDecisions,
        lines: Option<u64>,
        suppressed: Option<Counter>,
    ) -> Option<DecisionLog> {
        let logs_all = match decisions {
            LogDecisions::Off => return None,
            LogDecisions::Denials => false,
            LogDecisions::All => true,
        };
        Some(DecisionLog { logs_all, storm: Storm::new(lines), suppressed })
    }

    /// Whether admissions are not logged, except for the first one after a failure.
    pub(crate) fn logs_denials_only(&self) -> bool {
        !self.logs_all
    }

    /// Logs a decision, if it is to be logged.
    pub(crate) fn write(
        &self,
        decision_report: &DecisionReport<'_>,
        storage_mode: &'static str,
        hasher: &KeyHasher,
        now: Micros,
    ) {
        let binding = &decision_report.binding;
        let is_denial = binding.kind != OutcomeKind::Allowed;
        let is_wanted = self.logs_all || is_denial || decision_report.is_first;
        if decision_report.operation == "peek" || !is_wanted {
            return;
        }
        let line = match is_denial && !decision_report.is_first {
            true => self.storm.denial(decision_report.limiter, binding.key, now),
            false => self.storm.other(now),
        };
        match line {
            Some(line) => write_line(decision_report, &line, storage_mode, hasher),
            None => self.count_suppressed(),
        }
    }

    /// Logs a denial by counters in this process, if it is to be logged. Its report is made only then.
    pub(crate) fn write_denial<'a>(
        &self,
        limiter: &str,
        key: &str,
        report: impl FnOnce() -> DecisionReport<'a>,
        storage_mode: &'static str,
        hasher: &KeyHasher,
        now: Micros,
    ) {
        match self.storm.denial(limiter, Some(key), now) {
            Some(line) => write_line(&report(), &line, storage_mode, hasher),
            None => self.count_suppressed(),
        }
    }

    fn count_suppressed(&self) {
        self.suppressed.iter().for_each(|counter| counter.increment(1));
    }

    /// Logs the number of suppressed lines, once the second is over.
    pub(crate) fn write_left_out(&self, now: Micros) {
        write_left_out(self.storm.left_out(now));
    }
}

#[cold]
fn write_line(
    decision_report: &DecisionReport<'_>,
    line: &Line,
    storage_mode: &'static str,
    hasher: &KeyHasher,
) {
    let binding = &decision_report.binding;
    write_left_out(line.left_out);
    macro_rules! decided {
        ($level:ident) => {
            line!(
                $level,
                decision = binding.kind.name(),
                operation = decision_report.operation,
                limiter = decision_report.limiter,
                strategy = strategy_name(binding.strategy),
                cost = binding.cost,
                storage_mode,
                source = binding.source.name(),
                failure = binding.failure.map(|failure| failure.name()),
                latency_ms = binding.took.map(|took| took.as_secs_f64() * 1e3),
                retry_after_ms = decision_report.retry_after.map(millis),
                key_hash = binding.key.map(|key| hasher.hash(key)),
                suppressed = line.suppressed,
                "decided"
            )
        };
    }
    match (decision_report.is_degraded, decision_report.is_first) {
        (true, true) => decided!(error),
        (true, false) => decided!(warn),
        (false, _) => decided!(info),
    }
}

fn write_left_out(left_out: u64) {
    if left_out > 0 {
        line!(warn, left_out, "too many decisions to log each");
    }
}
