//! What each strategy promises: how much it may admit at most, and how much it owes at least.
//!
//! A bound is checked on the admissions alone, with none of the kernels' arithmetic: over every interval from one admission to
//! another, in whole numbers.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tollgate_kernel::{Align, Limit, Micros, Rate};

use crate::life::Life;

/// What was admitted, when by the key's own time, and the delay it got.
#[derive(Clone, Copy)]
pub(crate) struct Admission {
    pub(crate) at: u64,
    pub(crate) cost: u64,
    pub(crate) delay: u64,
}

/// The promise of each strategy, over every interval from one admission to another.
pub(crate) fn within_bound(limit: &Limit, admitted: &[Admission]) -> TestCaseResult {
    let capacity = limit.capacity();
    match limit {
        Limit::TokenBucket(bucket) => within_bucket(bucket.rate(), capacity, admitted),
        Limit::LeakyBucket(bucket) => {
            within_bucket(bucket.rate(), capacity, admitted)?;
            let outputs: Vec<Admission> =
                admitted.iter().map(|one| Admission { at: one.at + one.delay, ..*one }).collect();
            spaced_out(bucket.rate(), &outputs)
        }
        Limit::FixedWindow(window) => {
            within_windows(window.align(), window.window().get(), capacity, admitted)?;
            within_every_span(window.window().get(), 2 * capacity, admitted)
        }
        Limit::SlidingWindow(window) => within_every_span(window.window().get(), capacity, admitted),
        Limit::Concurrency(leases) => within_every_span(leases.lease().get(), capacity, admitted),
        Limit::SlidingWindowCounter(window) => {
            within_estimate(window.window().get(), capacity, admitted)?;
            within_every_span(window.window().get(), 2 * capacity - 1, admitted)
        }
    }
}

/// At most B + c * t / p in any interval t, in whole numbers: costs * p ≤ B * p + t * c.
fn within_bucket(rate: Rate, burst: u64, admitted: &[Admission]) -> TestCaseResult {
    let (count, period) = (u128::from(rate.count()), u128::from(rate.period_us().get()));
    for (index, first) in admitted.iter().enumerate() {
        let mut sum = 0;
        for last in &admitted[index..] {
            sum += u128::from(last.cost);
            let elapsed = u128::from(last.at - first.at);
            prop_assert!(
                sum * period <= u128::from(burst) * period + elapsed * count,
                "{sum} from {}us to {}us",
                first.at,
                last.at
            );
        }
    }
    Ok(())
}

/// Callers who honour their delays come out in turn, each after what was ahead of it had the time that the rate gives it;
/// rounding to whole microseconds moves one against another by less than one.
fn spaced_out(rate: Rate, outputs: &[Admission]) -> TestCaseResult {
    let (count, period) = (u128::from(rate.count()), u128::from(rate.period_us().get()));
    for (index, first) in outputs.iter().enumerate() {
        let mut ahead = 0;
        for pair in outputs[index..].windows(2) {
            prop_assert!(pair[0].at <= pair[1].at, "out of turn: {}us after {}us", pair[1].at, pair[0].at);
            ahead += u128::from(pair[0].cost);
            let elapsed = u128::from(pair[1].at - first.at);
            prop_assert!(
                ahead * period < (elapsed + 1) * count,
                "{ahead} out from {}us to {}us",
                first.at,
                pair[1].at
            );
        }
    }
    Ok(())
}

fn within_windows(align: Align, length: u64, limit: u64, admitted: &[Admission]) -> TestCaseResult {
    let (mut start, mut sum) = (0, 0);
    for (index, one) in admitted.iter().enumerate() {
        if index == 0 || one.at - start >= length {
            start = if align == Align::First { one.at } else { one.at - one.at % length };
            sum = 0;
        }
        sum += one.cost;
        prop_assert!(sum <= limit, "{sum} in the window from {start}us");
    }
    Ok(())
}

/// No half-open span holds more, wherever it begins; it is enough to look at those that begin with an admission.
fn within_every_span(length: u64, limit: u64, admitted: &[Admission]) -> TestCaseResult {
    for first in admitted {
        let span = first.at..first.at + length;
        let sum: u64 = admitted.iter().filter(|one| span.contains(&one.at)).map(|one| one.cost).sum();
        prop_assert!(sum <= limit, "{sum} within {length}us from {}us", first.at);
    }
    Ok(())
}

fn within_estimate(length: u64, limit: u64, admitted: &[Admission]) -> TestCaseResult {
    for (index, last) in admitted.iter().enumerate() {
        let sum = |window: u64| {
            let there = admitted[..=index].iter().filter(|one| one.at / length == window);
            there.map(|one| u128::from(one.cost)).sum::<u128>()
        };
        let window = last.at / length;
        let previous = window.checked_sub(1).map_or(0, sum);
        let left = u128::from(length - last.at % length);
        let estimate = previous * left + sum(window) * u128::from(length);
        prop_assert!(
            estimate <= u128::from(limit) * u128::from(length),
            "{estimate}/{length} at {}us",
            last.at
        );
    }
    Ok(())
}

/// What came and went in a bucket with settlements, in order: each admission, and what was given back of it so far.
#[derive(Default)]
pub(crate) struct Flow(Vec<(Admission, u64)>);

impl Flow {
    /// Enters an admission and says under which number.
    pub(crate) fn admitted(&mut self, admission: Admission) -> usize {
        self.0.push((admission, 0));
        self.0.len() - 1
    }

    /// Counted with the admission that it is of.
    pub(crate) fn given_back(&mut self, number: usize, amount: u64) {
        self.0[number].1 += amount;
    }

    /// costs * p ≤ (B + given back of them) * p + t * c, in every interval that ends with the last admission: what was given back
    /// of charges before the interval admits nothing more in it.
    pub(crate) fn stays_within_bucket(&self, limit: &Limit) -> TestCaseResult {
        let rate = match limit {
            Limit::TokenBucket(bucket) => bucket.rate(),
            Limit::LeakyBucket(bucket) => bucket.rate(),
            _ => return Ok(()),
        };
        let (count, period) = (u128::from(rate.count()), u128::from(rate.period_us().get()));
        let Some((last, earlier)) = self.0.split_last() else { return Ok(()) };
        let (mut sum, mut given_back) = (u128::from(last.0.cost), 0);
        for (first, after) in earlier.iter().rev() {
            sum += u128::from(first.cost);
            given_back += u128::from(*after);
            let elapsed = u128::from(last.0.at - first.at);
            let most = (u128::from(limit.capacity()) + given_back) * period + elapsed * count;
            prop_assert!(sum * period <= most, "{sum} from {}us to {}us", first.at, last.0.at);
        }
        Ok(())
    }
}

/// How many of evenly spaced polls, each for one, must be admitted on a fresh key.
///
/// A limit that renews r a second owes r * T, less what the polls themselves miss by not coming when there is room.
pub(crate) fn owed_to_polls(life: &Life) -> usize {
    let polls = life.calls.len();
    let at = |index: usize| u128::from(life.calls[index].at.get());
    if polls < 2 {
        return polls;
    }
    let every = at(1) - at(0);
    let total = at(polls - 1) - at(0);
    let capacity = usize::try_from(life.limit.capacity()).unwrap_or(usize::MAX);
    // Admitted until full, then denied until the first of them is gone: `capacity` in each round of polls.
    let rounds = |length: u128| {
        let round = usize::try_from(length.div_ceil(every)).unwrap_or(usize::MAX);
        (0..polls).filter(|poll| poll % round < capacity).count()
    };
    let bucket = |rate: Rate| {
        let (count, period) = (u128::from(rate.count()), u128::from(rate.period_us().get()));
        if capacity == 1 {
            // There is no room to save what refills between one poll and the next.
            return rounds(period.div_ceil(count));
        }
        // Polls slower than the rate are all admitted; those that are faster leave nothing unspent.
        let refilled = usize::try_from(total * count / period).unwrap_or(usize::MAX);
        if every * count >= period { polls } else { polls.min(capacity.saturating_add(refilled)) }
    };
    let in_clock_windows = |window: Micros| {
        let window = |index: usize| at(index) / u128::from(window.get());
        let mut counts: Vec<usize> = Vec::new();
        for poll in 0..polls {
            if poll == 0 || window(poll) != window(poll - 1) {
                counts.push(0);
            }
            *counts.last_mut().expect("the first poll opened one") += 1;
        }
        counts
    };
    match life.limit {
        Limit::TokenBucket(limit) => bucket(limit.rate()),
        Limit::LeakyBucket(limit) => bucket(limit.rate()),
        Limit::FixedWindow(limit) if limit.align() == Align::Clock => {
            in_clock_windows(limit.window()).iter().map(|offered| capacity.min(*offered)).sum()
        }
        Limit::SlidingWindowCounter(limit) => {
            // Nothing weighs on the first window. Over each whole one after it the weight of the one before slides out; two
            // may be missed, by the last poll of either window not coming at its very end.
            let counts = in_clock_windows(limit.window());
            let whole = counts.get(1..counts.len() - 1).unwrap_or(&[]);
            capacity.min(counts[0])
                + whole.iter().map(|offered| capacity.saturating_sub(2).min(*offered)).sum::<usize>()
        }
        Limit::FixedWindow(_) | Limit::SlidingWindow(_) | Limit::Concurrency(_) => {
            rounds(u128::from(life.limit.window_us().get()))
        }
    }
}
