//! The values of the rate-limit headers: computed once, written by each API in its own way.

#[cfg(feature = "http")]
use tollgate_kernel::{Cost, Outcome};
use tollgate_kernel::{Limit, Micros, Strategy};

use super::line::{Line, visible};
use super::{
    Field, Format, MAX_INTEGER, ReportedLimit, ResetAs, Unit, binding, reset_after, seconds_to_wait,
};

/// The values: numbers, and the lists of the draft.
pub(crate) struct HeaderFields<I> {
    reported: I,
    legacy: Option<[u64; 3]>,
    retry_after: Option<u64>,
}

impl<'a, I: Iterator<Item = ReportedLimit<'a>> + Clone> HeaderFields<I> {
    /// The values, if there are any.
    pub(crate) fn new(
        format: &Format,
        limits: I,
        now: Micros,
    ) -> Option<HeaderFields<impl Iterator<Item = ReportedLimit<'a>> + Clone + use<'a, I>>> {
        if !format.legacy && !format.draft && !limits.clone().any(|limit| limit.denies()) {
            return None;
        }
        let reported = limits.filter(ReportedLimit::is_reported);
        let bound = binding(reported.clone())?;
        let denies = bound.denies();
        let legacy = format.legacy.then(|| {
            let reset_after = reset_after(bound.limit, &bound.outcome, bound.more_after());
            let reset = reset_as(format.reset, reset_after, now);
            [bound.outcome.capacity, bound.outcome.remaining, reset]
        });
        let retry_after = bound.outcome.retry_after.filter(|_| denies).map(seconds_to_wait);
        let reported = reported.map(move |limit| if denies { limit.uncharged() } else { limit });
        Some(HeaderFields { reported, legacy, retry_after })
    }

    /// The fields that are numbers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (Field, u64)> + use<I> {
        let fields = [Field::Limit, Field::Remaining, Field::Reset];
        let legacy = self.legacy.into_iter().flat_map(move |numbers| fields.into_iter().zip(numbers));
        legacy.chain(self.retry_after.map(|wait| (Field::RetryAfter, wait)))
    }

    /// How many seconds to wait, where the charge is denied.
    #[cfg(feature = "http")]
    pub(crate) fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    pub(crate) fn write_policy(&self, line: &mut Line) {
        write_list(line, self.reported.clone(), write_policy);
    }

    pub(crate) fn write_quota(&self, line: &mut Line) {
        write_list(line, self.reported.clone(), write_quota);
    }
}

fn write_list<'a>(
    line: &mut Line,
    reported: impl Iterator<Item = ReportedLimit<'a>>,
    write: impl Fn(&mut Line, &ReportedLimit<'_>),
) {
    for (index, limit) in reported.enumerate() {
        if index > 0 {
            line.text(", ");
        }
        write(line, &limit);
    }
}

/// `"api";q=20;w=2`.
pub(super) fn write_policy(line: &mut Line, reported: &ReportedLimit<'_>) {
    line.text("\"")
        .text(&visible(reported.name))
        .text("\";q=")
        .number(reported.outcome.capacity.min(MAX_INTEGER));
    let unit = reported.unit();
    if unit != Unit::Requests {
        line.text(";qu=\"").text(unit.name()).text("\"");
    }
    // A lease ends when its holder releases it, so its length is no window. A blocked key has no window.
    let windowed =
        |limit: &&Limit| limit.strategy() != Strategy::Concurrency && reported.outcome.capacity > 0;
    if let Some(limit) = reported.limit.filter(windowed) {
        // At least 1, because no window is empty, and far from the largest integer.
        line.text(";w=").number(limit.window_us().as_secs_ceil());
    }
}

/// `"api";r=19;t=1`.
fn write_quota(line: &mut Line, reported: &ReportedLimit<'_>) {
    line.text("\"").text(&visible(reported.name)).text("\";r=");
    write_left(line, reported.outcome.remaining, reported.more_after());
}

/// `19;t=1`.
fn write_left(line: &mut Line, remaining: u64, more_after: Option<Micros>) {
    line.number(remaining.min(MAX_INTEGER));
    if let Some(more) = more_after {
        line.text(";t=").number(more.as_secs_ceil());
    }
}

/// The values that change with each charge, for one limit that was charged alone and admitted: for templates that have the rest.
#[cfg(feature = "http")]
pub(crate) struct QuotaNumbers {
    pub(crate) remaining: u64,
    /// The value of `X-RateLimit-Reset`.
    pub(crate) reset: u64,
    more_after: Option<Micros>,
}

#[cfg(feature = "http")]
impl QuotaNumbers {
    #[inline]
    pub(crate) fn new(
        limit: &Limit,
        outcome: &Outcome,
        cost: Cost,
        reset: ResetAs,
        now: Micros,
    ) -> QuotaNumbers {
        let more_after = super::more_after(Some(limit), outcome, cost.get());
        let reset_after = reset_after(Some(limit), outcome, more_after);
        QuotaNumbers { remaining: outcome.remaining, reset: reset_as(reset, reset_after, now), more_after }
    }

    /// The rest of an item in `RateLimit`, after [`quota_start`].
    pub(crate) fn write_quota(&self, line: &mut Line) {
        write_left(line, self.remaining, self.more_after);
    }
}

/// How an item in `RateLimit` begins: `"api";r=`.
#[cfg(feature = "http")]
pub(crate) fn quota_start(name: &str) -> String {
    format!("\"{}\";r=", visible(name))
}

fn reset_as(reset: ResetAs, reset_after: Micros, now: Micros) -> u64 {
    match reset {
        ResetAs::Seconds => reset_after.as_secs_ceil(),
        ResetAs::UnixTime => now.saturating_add(reset_after).as_secs_ceil(),
    }
}
