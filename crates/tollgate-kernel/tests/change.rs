//! Two versions of one limit that are live at the same time, as in a rolling deploy: whatever they are asked in turn, neither
//! makes quota.
//!
//! The promise is checked on the admissions alone, with none of the kernels' arithmetic. Each check runs over 10,000 random
//! histories, or over as many as `PROPTEST_CASES` says.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tollgate_kernel::{Cost, Limit, Micros, Rate, State, Taken};

/// A charge: how long after the one before, by which version, how much of its capacity in sixteenths, and whether it is a
/// reservation that the next but so many charges settle for so many sixteenths of it.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    gap: u64,
    version: usize,
    share: u64,
    settle: Option<(usize, u64)>,
}

/// What was admitted: when, by which version, how much, and how much of it was given back since.
#[derive(Clone, Copy, Debug)]
struct Admission {
    at: u64,
    version: usize,
    cost: u64,
    given_back: u64,
}

fn drawn(longest_gap: u64) -> impl Strategy<Value = Vec<Drawn>> {
    let gap = prop_oneof![3 => Just(0u64), 4 => 1..=(longest_gap / 50).max(1), 2 => 1..=longest_gap];
    let settle = proptest::option::weighted(0.3, (1..6usize, 0..=16u64));
    let one = (gap, 0..2usize, 1..=16u64, settle);
    vec(one.prop_map(|(gap, version, share, settle)| Drawn { gap, version, share, settle }), 1..60)
}

/// Plays a history and gives each admission to `check`, with all before it.
fn play(
    versions: &[Limit; 2],
    drawn: &[Drawn],
    settles: bool,
    mut check: impl FnMut(&[Admission], &State, u64) -> TestCaseResult,
) -> TestCaseResult {
    let mut state = versions[0].fresh();
    let mut now = 1_000_000_000;
    let mut admitted: Vec<Admission> = Vec::new();
    let mut open: Vec<(usize, usize, Taken, u64)> = Vec::new();
    for (index, one) in drawn.iter().enumerate() {
        now += one.gap;
        let (due, later): (Vec<_>, Vec<_>) = open.into_iter().partition(|(due, ..)| *due <= index);
        open = later;
        for (_, number, taken, amount) in due {
            let version = admitted[number].version;
            versions[version].give_back(&mut state, taken, amount, Micros::new(now));
            admitted[number].given_back += amount;
        }
        let limit = versions[one.version];
        let cost = Cost::new((limit.capacity() * one.share / 16).max(1)).unwrap();
        let before = state.clone();
        let foreseen = limit.peek(&before, cost, Micros::new(now));
        let outcome = limit.charge(&mut state, cost, Micros::new(now));
        prop_assert_eq!(foreseen, outcome, "a look and a charge");
        if !outcome.allowed {
            let again = limit.peek(&state, cost, Micros::new(now));
            prop_assert_eq!(again, outcome, "what a refusal adopts answers the same");
            if let Some(wait) = outcome.retry_after {
                let then = Micros::new(now).saturating_add(wait);
                prop_assert!(limit.peek(&state, cost, then).allowed, "waiting {wait} is enough");
                let too_soon = then.saturating_sub(Micros::new(1));
                prop_assert!(!limit.peek(&state, cost, too_soon).allowed, "and {wait} less 1us is not");
            }
            continue;
        }
        admitted.push(Admission { at: now, version: one.version, cost: cost.get(), given_back: 0 });
        check(&admitted, &before, now)?;
        if let Some((after, used)) = one.settle.filter(|_| settles) {
            let taken = Taken { cost: cost.get(), at: limit.charged_at(&state, Micros::new(now)) };
            let amount = cost.get() - cost.get() * used / 16;
            open.push((index + after, admitted.len() - 1, taken, amount));
        }
    }
    Ok(())
}

fn in_histories<V: Strategy<Value = ([Limit; 2], Vec<Drawn>)>>(
    histories: V,
    check: impl Fn(&[Limit; 2], &[Drawn]) -> TestCaseResult,
) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 10_000;
    }
    let outcome = TestRunner::new(config).run(&histories, |(versions, drawn)| check(&versions, &drawn));
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

/// Up to the larger burst, and refilled at the faster rate: in any interval, less what was given back of it.
#[test]
fn two_buckets_admit_no_more_than_the_larger_and_faster() {
    let version = (1..=40u64, prop_oneof![1..=12u64, 1..=2_000u64], 1..=3_000_000u64);
    let histories = [version.clone(), version].prop_flat_map(|versions| {
        let bucket = |(burst, count, period)| {
            Limit::token_bucket(Rate::new(count, Micros::new(period)).unwrap(), burst).unwrap()
        };
        (Just(versions.map(bucket)), drawn(8_000_000))
    });
    in_histories(histories, |versions, drawn| {
        let rates = versions.map(|limit| match limit {
            Limit::TokenBucket(bucket) => bucket.rate(),
            _ => unreachable!("only buckets"),
        });
        let (count, period) = rates
            .map(|rate| (u128::from(rate.count()), u128::from(rate.period_us().get())))
            .into_iter()
            .max_by(|(a, b), (c, d)| (a * d).cmp(&(c * b)))
            .unwrap();
        let burst = u128::from(versions[0].capacity().max(versions[1].capacity()));
        play(versions, drawn, true, |admitted, _, now| {
            let mut sum = 0;
            for first in admitted.iter().rev() {
                sum += u128::from(first.cost - first.given_back);
                let elapsed = u128::from(now - first.at);
                prop_assert!(sum * period <= burst * period + elapsed * count, "{sum} in {elapsed}us");
            }
            Ok(())
        })
    });
}

fn windows(build: fn(u64, Micros) -> Limit) -> impl Strategy<Value = ([Limit; 2], Vec<Drawn>)> {
    let version = (1..=30u64, 1..=2_000_000u64);
    [version.clone(), version].prop_flat_map(move |versions| {
        let longest = versions.iter().map(|(_, span)| *span).max().unwrap_or(1);
        let limits = versions.map(|(limit, span)| build(limit, Micros::new(span)));
        (Just(limits), drawn(longest * 3))
    })
}

/// Each version counts all that was admitted in its window since it first asked in the life of the log.
#[test]
fn two_logs_each_hold_to_their_window() {
    in_histories(
        windows(|limit, window| Limit::sliding_window(limit, window).unwrap()),
        |versions, drawn| {
            let mut first_asked = [None, None];
            play(versions, drawn, true, |admitted, before, now| {
                let last = *admitted.last().unwrap();
                let limit = versions[last.version];
                if limit.is_fresh(before, Micros::new(now)) {
                    first_asked = [None, None];
                }
                let since = *first_asked[last.version].get_or_insert(now);
                let counts = |one: &&Admission| now - one.at < limit.window_us().get() && one.at >= since;
                let sum: u64 = admitted.iter().filter(counts).map(|one| one.cost - one.given_back).sum();
                prop_assert!(sum <= limit.capacity(), "{sum} in a window of {}", limit.capacity());
                Ok(())
            })
        },
    );
}

/// The estimate of each version counts what both admitted, each by its own windows.
#[test]
fn two_counters_admit_no_more_than_both_estimates_leave() {
    let counter = |limit, window| Limit::sliding_window_counter(limit, window).unwrap();
    in_histories(windows(counter), |versions, drawn| {
        play(versions, drawn, false, |admitted, _, now| {
            let last = *admitted.last().unwrap();
            let estimate = |version: usize| {
                let window = versions[version].window_us().get();
                let sum = |from: u64| {
                    let there =
                        admitted.iter().filter(|one| one.version == version && one.at / window == from);
                    there.map(|one| u128::from(one.cost)).sum::<u128>()
                };
                let (current, left) = (now / window, u128::from(window - now % window));
                (sum(current - 1) * left).div_ceil(u128::from(window)) + sum(current)
            };
            let both = match versions[0].window_us() == versions[1].window_us() {
                true => return Ok(()),
                false => estimate(0) + estimate(1),
            };
            let limit = u128::from(versions[last.version].capacity());
            prop_assert!(both <= limit, "{both} of {limit}");
            Ok(())
        })
    });
}

/// No more is held than the version that admits allows, whatever lease the holders were given.
#[test]
fn two_lease_times_admit_no_more_than_the_limit() {
    in_histories(windows(|limit, lease| Limit::concurrency(limit, lease).unwrap()), |versions, drawn| {
        play(versions, drawn, false, |admitted, _, now| {
            let last = admitted.last().unwrap();
            let lasts = |one: &&Admission| now - one.at < versions[one.version].window_us().get();
            let held: u64 = admitted.iter().filter(lasts).map(|one| one.cost).sum();
            let limit = versions[last.version].capacity();
            prop_assert!(held <= limit, "{held} of {limit}");
            Ok(())
        })
    });
}

/// A state is adopted without a charge: what has refilled until then did so by the old numbers, what comes later by the new.
#[test]
fn what_is_adopted_refills_by_the_new_numbers_from_then_on() {
    let ten = Cost::new(10).unwrap();
    for (fast, slow) in [
        (Limit::token_bucket("10/s", 10), Limit::token_bucket("1/s", 10)),
        (Limit::leaky_bucket("10/s", 10), Limit::leaky_bucket("1/s", 10)),
    ] {
        let (fast, slow) = (fast.unwrap(), slow.unwrap());
        let mut state = fast.fresh();
        assert!(fast.charge(&mut state, ten, Micros::from_secs(1)).allowed);
        slow.adopt(&mut state, Micros::from_millis(1_500));
        let left = |at| slow.peek(&state, Cost::MAX, Micros::from_millis(at)).remaining;
        assert_eq!((left(1_500), left(2_500), left(3_500)), (5, 6, 7), "{slow}");
        // A key that was never charged stays so.
        let mut never = slow.fresh();
        slow.adopt(&mut never, Micros::from_secs(9));
        assert_eq!(never, slow.fresh());
    }
    let second = Micros::from_secs(1);
    for limit in [
        Limit::fixed_window(10, second),
        Limit::sliding_window(10, second),
        Limit::sliding_window_counter(10, second),
        Limit::concurrency(10, second),
    ] {
        let limit = limit.unwrap();
        let mut state = limit.fresh();
        assert!(limit.charge(&mut state, ten, Micros::from_secs(1)).allowed);
        let charged = state.clone();
        assert_ne!(charged, limit.fresh());
        limit.adopt(&mut state, Micros::from_millis(1_500));
        assert_eq!(state, charged, "windows and leases keep their entries as they are: {limit}");
    }
}

/// A version with a longer window makes the log keep entries for it. The version with the short window merges what only the other
/// counts, so that the log does not grow; nothing that was charged is lost, and nothing counts twice.
#[test]
fn a_log_that_is_kept_for_a_longer_window_stays_short() {
    let (short, long) = (
        Limit::sliding_window(4, Micros::from_secs(1)).unwrap(),
        Limit::sliding_window(10_000, Micros::from_secs(3_600)).unwrap(),
    );
    let mut state = long.fresh();
    let start = 10_000_000_000;
    assert!(long.charge(&mut state, Cost::ONE, Micros::new(start)).allowed);
    let mut longest = 0;
    for number in 1..=1_000u64 {
        let now = Micros::new(start + number * 300_000);
        assert!(short.charge(&mut state, Cost::ONE, now).allowed, "four of 300 ms fit a second");
        let State::Log(log) = &state else { panic!("{state:?}") };
        longest = longest.max(log.len());
        assert_eq!(long.peek(&state, Cost::MAX, now).remaining, 10_000 - 1 - number);
        assert_eq!(short.peek(&state, Cost::MAX, now).remaining, 4 - (1 + number).min(4));
    }
    assert_eq!(longest, 4 + 64, "as many as the limit and some to spare");
}
