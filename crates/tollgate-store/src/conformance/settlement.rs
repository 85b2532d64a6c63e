//! What is given back cannot be spent twice, a settlement touches only what it was charged to, and a debt has a bound.

use tollgate_kernel::{Limit, LimitError, Rate};

use super::beside::Beside;
use super::random::Random;
use super::{Subject, limit};
use crate::{ChargeId, ManualClock, Micros, Settled, Settlement, StoredLimit};

const KEY: &str = "user:42";

fn named(built: Result<Limit, LimitError>) -> StoredLimit {
    limit("settled", built)
}

fn rate(text: &str) -> Rate {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

pub(super) async fn settlement(make: &impl AsyncFn(ManualClock) -> Subject) {
    cancelled_reservations(make).await;
    under_another_window(make).await;
    a_huge_debt(make).await;
    under_another_burst(make).await;
    for seed in 0..4 {
        for built in [
            Limit::token_bucket(rate("10/s"), 10),
            Limit::token_bucket(rate("7/1300ms"), 13),
            Limit::leaky_bucket(rate("10007/1000s"), 9),
        ] {
            history(seed, &named(built), make).await;
        }
    }
}

/// Six reservations of 10 on 10/s, one a second, then all cancelled and spent, admitted 70 within 9 ms.
async fn cancelled_reservations(make: &impl AsyncFn(ManualClock) -> Subject) {
    for limit in [named(Limit::token_bucket(rate("10/s"), 10)), named(Limit::leaky_bucket(rate("10/s"), 10))]
    {
        let mut pair = Beside::new("cancelled reservations", make).await;
        let mut reserved = Vec::new();
        for second in 0..6 {
            pair.advance_ms(if second == 0 { 0 } else { 1_000 });
            reserved.extend(pair.reserve(&limit, KEY, 10).await);
        }
        assert_eq!(reserved.len(), 6, "each second brings back all");
        let mut spent = 0;
        for id in reserved {
            pair.advance_ms(1);
            assert_eq!(pair.settle(id, &Settlement::Cancel).await, Some(Settled::Done));
            while pair.charge(&limit, KEY, 1, None).await.allowed {
                spent += 1;
            }
        }
        assert!((9..=10).contains(&spent), "{spent} spent within 6 ms, where 10 may be");
    }
}

/// A reservation that was made by one window and is settled when the key is charged by another.
async fn under_another_window(make: &impl AsyncFn(ManualClock) -> Subject) {
    type Make = fn(u64, Micros) -> Result<Limit, LimitError>;
    let kinds: [(&str, Make); 4] = [
        ("fixed", Limit::fixed_window),
        ("clock", Limit::clock_window),
        ("log", Limit::sliding_window),
        ("counter", Limit::sliding_window_counter),
    ];
    for (kind, build) in kinds {
        for (old_secs, new_secs) in [(60, 5), (5, 60), (60, 7), (10, 20)] {
            for settlement in [Settlement::Cancel, Settlement::Actual(1), Settlement::Actual(9)] {
                let [old, new] = [old_secs, new_secs].map(|secs| named(build(10, Micros::from_secs(secs))));
                let what = format!("{kind}, {old_secs} s to {new_secs} s, {settlement:?}");
                let mut pair = Beside::new(&what, make).await;
                let first = pair.reserve(&old, KEY, 4).await.unwrap_or_else(|| panic!("{what}: a fresh key"));
                assert!(pair.charge(&old, KEY, 6, None).await.allowed, "{what}");
                // Neither within the old window nor after it does a settlement make room that it was not charged for.
                pair.advance_ms(4_000);
                let denied = pair.charge(&new, KEY, 1, None).await;
                assert!(!denied.allowed, "{what}: all of it is used");
                pair.settle(first, &settlement).await;
                let most = if settlement == Settlement::Cancel { 4 } else { 3 };
                for limit in [&new, &old] {
                    let left = pair.remaining(limit, KEY).await;
                    assert!(left <= most, "{what}: {left} left by {}", limit.limit);
                }
                // A window later the key is charged by the new numbers, and what was reserved before is settled then.
                let late = pair.reserve(&old, KEY, 2).await;
                for _ in 0..4 {
                    pair.advance_ms(new_secs.max(old_secs) * 500);
                    pair.charge(&new, KEY, 3, None).await;
                    pair.remaining(&old, KEY).await;
                }
                pair.charge(&new, KEY, 10, None).await;
                let before = pair.remaining(&new, KEY).await;
                if let Some(late) = late {
                    pair.settle(late, &Settlement::Cancel).await;
                    let after = pair.remaining(&new, KEY).await;
                    assert_eq!(after, before, "{what}: nothing is given back into a later window");
                }
            }
        }
    }
}

/// A settlement of 2^53 locked a bucket of 10/s for 190 years.
async fn a_huge_debt(make: &impl AsyncFn(ManualClock) -> Subject) {
    let (day, hour) = (Micros::from_secs(86_400), Micros::from_secs(3_600));
    let bucket = Limit::token_bucket(rate("10/s"), 10);
    let short = bucket.clone().and_then(|bucket| bucket.with_max_debt(hour));
    for (built, longest) in [(bucket, day), (Limit::leaky_bucket(rate("10/s"), 10), day), (short, hour)] {
        let limit = named(built);
        for actual in [1 << 53, u64::MAX] {
            let mut pair = Beside::new("a huge debt", make).await;
            for _ in 0..3 {
                let Some(id) = pair.reserve(&limit, KEY, 1).await else { continue };
                pair.settle(id, &Settlement::Actual(actual)).await;
            }
            let denied = pair.charge(&limit, KEY, 1, None).await;
            let wait = denied.outcomes[0].retry_after.unwrap_or(Micros::new(u64::MAX));
            let most = longest.saturating_add(Micros::from_secs(1));
            assert!(!denied.allowed && wait <= most, "{} for {wait}", limit.limit);
            pair.clock.advance(wait);
            assert!(pair.charge(&limit, KEY, 1, None).await.allowed, "{}", limit.limit);
        }
    }
}

/// Versions of a bucket with different bursts: 35 reservations that were each settled with 30 passed a burst of 40, and a cancelled
/// reservation did not come back whole.
async fn under_another_burst(make: &impl AsyncFn(ManualClock) -> Subject) {
    let [large, small] = [40, 5].map(|burst| named(Limit::token_bucket(rate("1/d"), burst)));
    for (settlement, left) in
        [(Settlement::Actual(30), 10), (Settlement::Cancel, 40), (Settlement::Actual(3), 37)]
    {
        let mut pair = Beside::new(&format!("{settlement:?} under another burst"), make).await;
        let id = pair.reserve(&large, KEY, 10).await.unwrap_or_else(|| panic!("a fresh key"));
        assert!(!pair.charge(&small, KEY, 1, None).await.allowed, "all of the smaller burst is used");
        pair.settle(id, &settlement).await;
        assert_eq!(pair.remaining(&large, KEY).await, left, "{settlement:?}");
    }
    let mut pair = Beside::new("two versions in turn", make).await;
    let mut settled = 0;
    while let Some(id) = pair.reserve(&large, KEY, 1).await {
        pair.charge(&small, KEY, 1, None).await;
        pair.settle(id, &Settlement::Actual(30)).await;
        settled += 30;
    }
    assert_eq!(settled, 60, "of a burst of 40, the last of them as a debt");
    // Random versions, charges, settlements and pauses: the store says what the model says.
    for seed in 0..8 {
        let mut pair = Beside::new(&format!("versions in turn, seed {seed}"), make).await;
        let mut random = Random::new(700 + seed);
        let bursts = [3, 5, 40, 100].map(|burst| named(Limit::token_bucket(rate("7/1300ms"), burst)));
        let bursts = bursts.map(|one| match one.limit.with_max_debt(Micros::from_secs(2)) {
            Ok(limit) => StoredLimit { limit, ..one },
            Err(error) => panic!("{error}"),
        });
        let mut open = Vec::new();
        for _ in 0..60 {
            let version = random.pick(&bursts);
            match random.below(3) {
                0 => drop(pair.charge(version, KEY, 1 + random.below(4), None).await),
                1 => open.extend(pair.reserve(version, KEY, 1 + random.below(9)).await),
                _ => {
                    if let Some(id) = open.pop() {
                        let actual = Settlement::Actual(random.below(60));
                        let settlement = if random.one_in(3) { Settlement::Cancel } else { actual };
                        pair.settle(id, &settlement).await;
                    }
                }
            }
            pair.remaining(random.pick(&bursts), KEY).await;
            pair.advance_ms(random.below(700));
        }
    }
}

/// What was admitted: when, and how much of it in the end.
struct Admission {
    at: Micros,
    units: u64,
}

/// Many reservations open at once, settled late and in any order. What was admitted in the end keeps the bucket's promise in every
/// interval: no more than the burst, and the rate times the time.
async fn history(seed: u64, limit: &StoredLimit, make: &impl AsyncFn(ManualClock) -> Subject) {
    let mut random = Random::new(seed);
    let mut pair = Beside::new(&format!("a history by {}, seed {seed}", limit.limit), make).await;
    let mut admissions: Vec<Admission> = Vec::new();
    let mut open: Vec<(ChargeId, usize)> = Vec::new();
    for _ in 0..300 {
        let ms = match random.below(10) {
            0..5 => 0,
            5..9 => random.below(400),
            _ => random.below(3_000),
        };
        pair.advance_ms(ms);
        let units = 1 + random.below(limit.limit.capacity());
        let (at, index) = (pair.clock.now(), admissions.len());
        match random.below(5) {
            0 if pair.charge(limit, KEY, units, None).await.allowed => {
                admissions.push(Admission { at, units });
            }
            1 | 2 => {
                if let Some(id) = pair.reserve(limit, KEY, units).await {
                    open.push((id, index));
                    admissions.push(Admission { at, units });
                }
            }
            // Not before there are some, so that there are many.
            3 | 4 if open.len() > 4 => {
                let chosen = usize::try_from(random.below(open.len() as u64)).unwrap_or(0);
                let (id, index) = open.swap_remove(chosen);
                let reserved = admissions[index].units;
                let actual = if random.one_in(3) { 0 } else { random.below(reserved + 3) };
                assert_eq!(pair.settle(id, &Settlement::Actual(actual)).await, Some(Settled::Done));
                // More than was reserved was not admitted, but done: it is a debt.
                admissions[index].units = reserved.min(actual);
            }
            _ => drop(pair.remaining(limit, KEY).await),
        }
    }
    promise(limit, &admissions);
}

/// In any interval t a bucket admits at most its burst and c*t/p.
fn promise(limit: &StoredLimit, admissions: &[Admission]) {
    let (c, p, burst) = match limit.limit {
        Limit::TokenBucket(bucket) => numbers(bucket.numbers()),
        Limit::LeakyBucket(bucket) => numbers(bucket.room().numbers()),
        other => panic!("{other} is no bucket"),
    };
    for (index, first) in admissions.iter().enumerate() {
        let mut units = 0;
        for last in &admissions[index..] {
            units += u128::from(last.units);
            let t = u128::from(last.at.saturating_sub(first.at).get());
            assert!(units * p <= burst * p + c * t, "{}: {units} admitted in {t} us", limit.limit);
        }
    }
}

fn numbers(numbers: tollgate_kernel::BucketNumbers) -> (u128, u128, u128) {
    (u128::from(numbers.tokens), u128::from(numbers.period_us), u128::from(numbers.burst))
}
