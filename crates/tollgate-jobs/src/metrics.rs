//! What operators see of jobs. Labels are `job:<type>`, `queue:<name>` and `global`, never a tenant.

use crate::limits::OnExceeded;

use std::time::Duration;

pub(crate) const HITS: &str = "tollgate_job_rate_limit_hits_total";
pub(crate) const USAGE: &str = "tollgate_job_rate_limit_usage";
pub(crate) const WAITING: &str = "tollgate_job_waiting";
pub(crate) const DELAY: &str = "tollgate_job_delay_seconds";
pub(crate) const CLEANUP: &str = "tollgate_job_cleanup_rows_total";

/// The metrics of jobs, by name.
pub const METRICS: [&str; 5] = [HITS, USAGE, WAITING, DELAY, CLEANUP];

/// Says what each of them is, to the exporter that is installed.
pub(crate) fn describe() {
    metrics::describe_counter!(HITS, "Jobs that were over a limit, by key and what became of them");
    metrics::describe_gauge!(USAGE, "The share of a limit on jobs that is used");
    metrics::describe_gauge!(WAITING, "Jobs that wait under a key");
    metrics::describe_histogram!(DELAY, metrics::Unit::Seconds, "How long jobs were put off for at a time");
    metrics::describe_counter!("tollgate_reloads_total", "Reloads of the config, by what became of them");
    metrics::describe_gauge!(
        "tollgate_config_refused",
        "1 while the config on disk is refused and an older one holds, else 0"
    );
    metrics::describe_counter!(CLEANUP, "Rows of the line of waiting jobs that were removed");
}

pub(crate) fn cleaned(rows: u64) {
    metrics::counter!(CLEANUP).increment(rows);
}

pub(crate) fn hit(label: &str, behaviour: OnExceeded) {
    metrics::counter!(HITS, "key" => label.to_owned(), "behavior" => behaviour.name()).increment(1);
}

pub(crate) fn delayed(wait: Duration) {
    metrics::histogram!(DELAY).record(wait.as_secs_f64());
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float, and no decision")]
pub(crate) fn status(label: &str, count: u64, limit: u64, waiting: u64) {
    let share = if limit == 0 { 0.0 } else { count as f64 / limit as f64 };
    metrics::gauge!(USAGE, "key" => label.to_owned()).set(share);
    metrics::gauge!(WAITING, "key" => label.to_owned()).set(waiting as f64);
}
