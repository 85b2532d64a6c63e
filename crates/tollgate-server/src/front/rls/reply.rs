//! The response to a call: one status for each descriptor, in order, and the rate-limit headers.

use prost_types::Duration;
use tollgate::headers::{self, Field, Format, ReportedLimit};
use tollgate::store::{Micros, Outcome as Numbers};
use tollgate::{Allowance, Outcome};

use super::Answers;
use super::descriptors::{DescriptorCharge, Hits, Matched, UNITS};
use super::proto::HeaderValue;
use super::proto::service::RateLimitResponse;
use super::proto::service::rate_limit_response::{Code, DescriptorStatus, RateLimit};

/// What is answered.
pub(super) fn response(matched: &[Matched], answers: &Answers) -> RateLimitResponse {
    let outcomes = matched.iter().zip(&answers.each).map(|(matched, answer)| {
        let (charge, outcome) = (matched.charge()?, answer.as_ref()?);
        Some(MatchedOutcome {
            charge,
            outcome,
            allowance: charge.limit.allowance_for(&charge.key),
            is_denied: answers.is_denied,
        })
    });
    let outcomes: Vec<Option<MatchedOutcome<'_>>> = outcomes.collect();
    let statuses = matched.iter().zip(&outcomes).map(|(matched, one)| match (matched, one) {
        (_, Some(one)) => one.status(),
        (Matched::Unlimited, None) => DescriptorStatus { limit_remaining: u32::MAX, ..ok() },
        (_, None) => ok(),
    });
    RateLimitResponse {
        overall_code: i32::from(if answers.is_denied { Code::OverLimit } else { Code::Ok }),
        statuses: statuses.collect(),
        response_headers_to_add: headers(&outcomes),
    }
}

pub(super) fn is_over_limit(response: &RateLimitResponse) -> bool {
    response.overall_code() == Code::OverLimit
}

fn ok() -> DescriptorStatus {
    DescriptorStatus { code: i32::from(Code::Ok), ..DescriptorStatus::default() }
}

/// A descriptor that matched a limit, and what the limit answered.
struct MatchedOutcome<'a> {
    charge: &'a DescriptorCharge,
    outcome: &'a Outcome,
    allowance: Allowance,
    /// Whether the whole call is denied, so that nothing was charged.
    is_denied: bool,
}

impl MatchedOutcome<'_> {
    fn status(&self) -> DescriptorStatus {
        let MatchedOutcome { outcome, allowance, .. } = self;
        let numbers = outcome.numbers();
        if outcome.is_unlimited() {
            return DescriptorStatus { limit_remaining: u32::MAX, ..ok() };
        }
        let code = if self.denies() { Code::OverLimit } else { Code::Ok };
        // Where the store failed there is a time to try again, and no reset.
        let wait = numbers.retry_after.filter(|_| !numbers.allowed).unwrap_or_default();
        let window = match allowance {
            Allowance::Limited(limit) => Some(limit.window_us()),
            _ => None,
        };
        DescriptorStatus {
            code: i32::from(code),
            current_limit: Some(RateLimit {
                requests_per_unit: saturated(numbers.capacity),
                unit: window.map(unit_of).unwrap_or_default(),
                name: outcome.limit().to_owned(),
            }),
            limit_remaining: saturated(self.after_call().remaining),
            duration_until_reset: Some(duration(numbers.reset_after.max(wait))),
        }
    }

    /// What is given back is always in order.
    fn denies(&self) -> bool {
        !self.outcome.is_allowed() && !matches!(self.charge.hits, Hits::GiveBack(_))
    }

    /// The limit's answer as it stands after the call.
    fn after_call(&self) -> Numbers {
        let outcome = *self.outcome.numbers();
        let uncharged = match self.charge.hits {
            Hits::Charge(hits) if self.is_denied => hits,
            Hits::Charge(_) => 0,
            Hits::Look | Hits::GiveBack(_) => 1,
        };
        if !outcome.allowed {
            return outcome;
        }
        Numbers { remaining: outcome.remaining.saturating_add(uncharged).min(outcome.capacity), ..outcome }
    }

    fn reported(&self, outcome: Numbers) -> ReportedLimit<'_> {
        ReportedLimit {
            name: self.outcome.limit(),
            limit: match &self.allowance {
                Allowance::Limited(limit) => Some(limit),
                _ => None,
            },
            cost: match self.charge.hits {
                Hits::Charge(hits) => hits,
                Hits::Look | Hits::GiveBack(_) => 1,
            },
            outcome,
            shadow: self.outcome.is_shadow(),
            unit: None,
        }
    }
}

/// The header fields of the limits that may be reported.
fn headers(outcomes: &[Option<MatchedOutcome<'_>>]) -> Vec<HeaderValue> {
    let is_reported =
        |one: &&MatchedOutcome<'_>| one.charge.is_reported && !matches!(one.charge.hits, Hits::GiveBack(_));
    let ones = || outcomes.iter().flatten().filter(is_reported);
    // Where one of them denies, it is worked out over there what the others would have left.
    let one_denies = ones().any(MatchedOutcome::denies);
    let reported =
        ones().map(|one| one.reported(if one_denies { *one.outcome.numbers() } else { one.after_call() }));
    let reported: Vec<ReportedLimit<'_>> = reported.collect();
    let mut headers = Vec::with_capacity(Field::ALL.len());
    // In this format the reset is a time from now, and the time of day is not asked for.
    headers::render(
        &Format::default(),
        reported.iter().copied(),
        std::time::Duration::ZERO,
        |field, value| {
            headers.push(HeaderValue { key: field.name().to_owned(), value: value.to_owned() });
        },
    );
    headers
}

/// The unit that a window is one of; the two enumerations have the same numbers.
fn unit_of(window: Micros) -> i32 {
    UNITS.iter().find(|(_, length, _)| *length == window).map_or(0, |(unit, ..)| i32::from(*unit))
}

fn saturated(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn duration(span: Micros) -> Duration {
    let (seconds, micros) = (span.get() / 1_000_000, span.get() % 1_000_000);
    Duration {
        seconds: i64::try_from(seconds).unwrap_or(i64::MAX),
        nanos: i32::try_from(micros * 1_000).unwrap_or_default(),
    }
}
