//! The wait until a cost fits if a number of units ahead of it go first.
//!
//! `retry_after` is the same instant for everybody who is denied, so a queue of waiting jobs that follows it wakes all at once. A
//! turn is the wait of one position in that queue: the units ahead are charged one by one, each as soon as it fits, and then the
//! cost, as a whole. Nothing else comes in between.
//!
//! No state is needed, so that a turn can be computed for a key in a remote store: the caller peeks at the cost that
//! `Limit::turn_probe` returns, and `Limit::turn` (`limit/turn.rs`) computes the wait from the outcome. `start` is for a key that is closed for
//! a while: nothing of the queue goes before it.
//!
//! | strategy | turn |
//! |---|---|
//! | token bucket, leaky bucket | what is missing now, plus all units of the line, less the burst, at the rate: exact, at most 1 µs late |
//! | sliding window | the i-th unit goes one window after the (i - limit)-th: whole windows, plus the wait of the remainder; exact |
//! | fixed window | what is left of the open window, then windows full of those ahead; a cost that does not fit beside them waits for the next; exact |
//! | concurrency | as a sliding window of one lease: those ahead hold their leases to the end; releases make it sooner |
//! | sliding window counter | as a sliding window that after the first admits one unit less in each (a window of 1: one in two); an estimate |
//!
//! Rounding: up. Bounds: a turn saturates at 2^64 - 1 µs. Known weakness: costs ahead are taken apart into units, so where they are
//! large and leave room over, the true turn may be later. Cases: turn.cases.

use super::{Align, FixedWindow, TokenBucket};
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// For strategies whose units come back a while after they were taken: how long whole rounds of the line take, and the rest of the
/// line, which waits for what is charged now.
pub(crate) struct Rounds {
    pub(crate) wait: Micros,
    /// The units of the line that are left, the cost's included: at most the capacity, where there are rounds.
    pub(crate) last: Cost,
}

impl Rounds {
    /// No rounds: a probe of more than fits is answered with the state as it stands.
    pub(crate) const NONE: Rounds = Rounds { wait: Micros::ZERO, last: Cost::MAX };

    /// Of a log or of leases, which come back after `span`.
    pub(crate) fn of_entries(capacity: u64, span: Micros, cost: Cost, ahead: u64) -> Rounds {
        Rounds::of(capacity, (span, capacity), cost, ahead)
    }

    /// Of two counters. A window that follows another admits one unit less, because something of that one still counts at its end.
    pub(crate) fn of_counters(capacity: u64, window: Micros, cost: Cost, ahead: u64) -> Rounds {
        let round = if capacity == 1 { (times(window, 2), 1) } else { (window, capacity - 1) };
        Rounds::of(capacity, round, cost, ahead)
    }

    /// Rounds of so many units, each after so long.
    fn of(capacity: u64, (span, each): (Micros, u64), cost: Cost, ahead: u64) -> Rounds {
        let total = ahead.saturating_add(cost.get());
        let whole = total.saturating_sub(capacity).div_ceil(each);
        let last = Cost::new(total - whole.saturating_mul(each).min(total - 1)).unwrap_or(Cost::ONE);
        Rounds { wait: times(span, whole), last }
    }

    /// The wait for the rounds and then for the rest, from the answer to a probe of the rest.
    pub(crate) fn turn(&self, probe: &Outcome, start: Micros) -> Micros {
        self.wait.saturating_add(probe.retry_after.unwrap_or(Micros::ZERO).max(start))
    }
}

fn times(span: Micros, count: u64) -> Micros {
    Micros::new(span.get().saturating_mul(count))
}

/// The turn under a bucket.
pub(crate) fn bucket_turn(
    bucket: &TokenBucket,
    probe: &Outcome,
    cost: Cost,
    ahead: u64,
    start: Micros,
) -> Micros {
    let numbers = bucket.numbers();
    let (tokens, period) = (u128::from(numbers.tokens), u128::from(numbers.period_us));
    let total = u128::from(ahead) + u128::from(cost.get());
    let burst = u128::from(numbers.burst);
    // The time until all is back that is missing when the line may begin.
    let missing = u128::from(probe.reset_after.saturating_sub(start).get());
    let wait = match total.checked_sub(burst) {
        Some(over) => missing + (over * period).div_ceil(tokens),
        // Of a bucket that is nearly full not all that is missing must come back. Rounded down: better late than early.
        None => missing.saturating_sub((burst - total) * period / tokens),
    };
    start.saturating_add(Micros::new(u64::try_from(wait).unwrap_or(u64::MAX)))
}

/// The turn under a fixed window.
pub(crate) fn window_turn(
    window: &FixedWindow,
    probe: &Outcome,
    cost: Cost,
    ahead: u64,
    start: Micros,
) -> Micros {
    let (limit, length) = (window.limit(), window.window());
    let left = probe.reset_after;
    let (room, end) = if start < left {
        (probe.remaining, left)
    } else {
        // None is open by then: one opens with the first of the line, or is the clock's.
        let into = match window.align() {
            Align::First => 0,
            Align::Clock => (start.get() - left.get()) % length.get(),
        };
        (limit, start.saturating_add(length).saturating_sub(Micros::new(into)))
    };
    if ahead.saturating_add(cost.get()) <= room {
        return start;
    }
    let rest = ahead.saturating_sub(room);
    let (full, in_last) = (rest / limit, rest % limit);
    let full = if in_last + cost.get() <= limit { full } else { full.saturating_add(1) };
    end.saturating_add(times(length, full))
}
