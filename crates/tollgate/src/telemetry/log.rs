//! The decision log: a line for each decision, by the limit that bound, as an event of `tracing`.
//!
//! INFO as a rule, WARN where the store failed and limits fell back, ERROR for the first decision to meet such a failure. Peeks
//! decide nothing and are not logged. `storm.rs` says which lines are left out; keys are hashed only for lines that are not.

use metrics::Counter;
use tollgate_kernel::Micros;

use super::LogDecisions;
use super::spans::millis;
use super::storm::Storm;
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

    /// Whether decisions that let a charge pass are left out, but for the first to meet a failure.
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
        let told = &decision_report.told;
        let is_denial = told.verdict != OutcomeKind::Allowed;
        let is_wanted = self.logs_all || is_denial || decision_report.is_first;
        if decision_report.operation == "peek" || !is_wanted {
            return;
        }
        let line = match is_denial && !decision_report.is_first {
            true => self.storm.denial(decision_report.limiter, told.key, now),
            false => self.storm.other(now),
        };
        let Some(line) = line else {
            self.suppressed.iter().for_each(|counter| counter.increment(1));
            return;
        };
        write_left_out(line.left_out);
        macro_rules! decided {
            ($level:ident) => {
                line!(
                    $level,
                    decision = told.verdict.name(),
                    operation = decision_report.operation,
                    limiter = decision_report.limiter,
                    strategy = strategy_name(told.strategy),
                    storage_mode,
                    source = told.source.name(),
                    failure = told.failure.map(|failure| failure.name()),
                    latency_ms = told.took.map(|took| took.as_secs_f64() * 1e3),
                    retry_after_ms = decision_report.retry_after.map(millis),
                    key_hash = told.key.map(|key| hasher.hash(key)),
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

    /// Tells of lines that were left out, if a second of them is over.
    pub(crate) fn write_left_out(&self, now: Micros) {
        write_left_out(self.storm.left_out(now));
    }
}

fn write_left_out(left_out: u64) {
    if left_out > 0 {
        line!(warn, left_out, "too many decisions to log each");
    }
}
