use super::*;

#[test]
fn the_state_is_the_instant_of_being_full_in_finer_units() {
    let bucket = TokenBucket::new("7/s".parse().unwrap(), 14).unwrap();
    let mut state = BucketState::default();
    let now = Micros::from_secs(100);
    assert!(bucket.charge(&mut state, Cost::new(14).unwrap(), now).allowed);
    let full_at = now.saturating_add(bucket.time_to_fill());
    assert_eq!(full_at, Micros::from_secs(102));
    assert_eq!(state.full_at, u128::from(full_at.get()) * u128::from(bucket.units_per_us()));
}

#[test]
fn a_debt_takes_at_most_a_day_to_pay_or_what_was_set() {
    let bucket = TokenBucket::new("1/s".parse().unwrap(), 10).unwrap();
    let hour = Micros::from_secs(3_600);
    for (bucket, longest) in [(bucket, DEFAULT_MAX_DEBT), (bucket.with_max_debt(hour).unwrap(), hour)] {
        let mut state = BucketState::default();
        for _ in 0..3 {
            bucket.debit(&mut state, u64::MAX, Micros::ZERO);
            let denied = bucket.peek(&state, Cost::ONE, Micros::ZERO);
            assert_eq!(denied.retry_after, Some(longest.saturating_add(Micros::from_secs(1))));
        }
    }
    assert_eq!(bucket.with_max_debt(Micros::ZERO).unwrap_err().field(), "max_debt");
}

/// Six reservations of 10 on 10/s, one a second, then all cancelled, gave back 60 and admitted 70 within 9 ms.
#[test]
fn what_has_refilled_since_is_not_given_back() {
    let bucket = TokenBucket::new("10/s".parse().unwrap(), 10).unwrap();
    let mut state = BucketState::default();
    let ten = Cost::new(10).unwrap();
    let seconds: Vec<Micros> = (1..=6).map(Micros::from_secs).collect();
    assert!(seconds.iter().all(|at| bucket.charge(&mut state, ten, *at).allowed));
    let now = Micros::from_millis(6_200);
    for at in seconds {
        bucket.give_back(&mut state, Taken { cost: 10, at }, 10, now);
    }
    // Of the last one 2 have refilled and 8 come back; the others have refilled.
    assert_eq!(bucket.peek(&state, Cost::MAX, now).remaining, 10);
    assert!(
        bucket.charge(&mut state, ten, now).allowed && !bucket.charge(&mut state, Cost::ONE, now).allowed
    );
    // Half is used: the half that is not comes back while it has not refilled.
    let mut state = BucketState::default();
    let at = Micros::from_secs(9);
    assert!(bucket.charge(&mut state, ten, at).allowed);
    let later = Micros::from_millis(9_700);
    bucket.give_back(&mut state, Taken { cost: 10, at }, 5, later);
    assert_eq!(bucket.peek(&state, Cost::MAX, later).remaining, 10, "7 refilled and 3 of 5 came back");
}

fn bucket(rate: &str, burst: u64) -> TokenBucket {
    TokenBucket::new(rate.parse().unwrap(), burst).unwrap()
}

/// What is left at `now` under `to`, of a bucket that was charged `cost` under `from` at the same instant.
fn left_after_change(from: TokenBucket, to: TokenBucket, cost: u64) -> u64 {
    let now = Micros::from_secs(1_000);
    let mut state = BucketState::default();
    assert!(from.charge(&mut state, Cost::new(cost).unwrap(), now).allowed);
    to.peek(&state, Cost::MAX, now).remaining
}

#[test]
fn a_change_keeps_the_missing_tokens() {
    for (from, to, cost, left) in [
        (bucket("100/s", 1_000), bucket("1/s", 1_000), 1_000, 0),
        (bucket("1/s", 1_000), bucket("100/s", 1_000), 100, 900),
        (bucket("7/s", 7), bucket("10/s", 20), 5, 15),
        (bucket("7/s", 7), bucket("5/us", 20), 5, 15),
        (bucket("10/s", 100), bucket("10/s", 5), 99, 0),
        (bucket("10/s", 100), bucket("10/s", 5), 2, 3),
        (bucket("10/s", 100).keeping_instant(), bucket("1/s", 100).keeping_instant(), 50, 95),
    ] {
        assert_eq!(left_after_change(from, to, cost), left, "{from:?} to {to:?}");
    }
}

/// With the missing tokens cut to the smaller burst and nothing beside, each alternation made the difference anew.
#[test]
fn versions_with_different_bursts_count_all_that_was_charged() {
    let (large, small) = (bucket("10/s", 100), bucket("10/s", 50));
    let mut state = BucketState::default();
    let mut now = Micros::from_secs(1_000);
    assert!(large.charge(&mut state, Cost::new(100).unwrap(), now).allowed);
    assert!(!small.charge(&mut state, Cost::ONE, now).allowed);
    assert!(!large.charge(&mut state, Cost::ONE, now).allowed);
    for _ in 0..50 {
        assert!(!small.charge(&mut state, Cost::ONE, now).allowed);
        now = now.saturating_add(Micros::from_millis(100));
        assert!(small.charge(&mut state, Cost::ONE, now).allowed, "the smaller burst refills at once");
        assert!(!large.charge(&mut state, Cost::ONE, now).allowed, "the larger counts every charge");
    }
    // Ten seconds later the larger would be full as well, and what was charged before the change has refilled.
    let later = now.saturating_add(Micros::from_secs(10));
    assert_eq!(large.peek(&state, Cost::MAX, later).remaining, 100);
    assert!(large.is_fresh(&state, later) && small.is_fresh(&state, later));
}

/// Between a reservation and its cancellation a faster version had refilled the bucket, and the slower gave it back again.
#[test]
fn a_larger_burst_counts_a_debt_that_was_settled_under_a_smaller() {
    let now = Micros::from_secs(1_000);
    let (large, small) = (bucket("1/d", 40), bucket("1/d", 5));
    let cost = |units| Cost::new(units).unwrap();
    let mut state = BucketState::default();
    assert!(large.charge(&mut state, cost(5), now).allowed);
    assert!(!small.charge(&mut state, cost(5), now).allowed);
    large.debit(&mut state, 25, now);
    assert_eq!(large.peek(&state, Cost::ONE, now).remaining, 9);
    // Versions in turn never charge more than the larger allows, and its debt.
    let (mut state, mut charged) = (BucketState::default(), 0);
    while large.charge(&mut state, Cost::ONE, now).allowed {
        small.adopt(&mut state, now);
        large.debit(&mut state, 29, now);
        charged += 30;
    }
    assert_eq!(charged, 60);
}

#[test]
fn a_cancelled_charge_is_given_back_to_a_larger_burst_whole() {
    let now = Micros::from_secs(1_000);
    let (large, small) = (bucket("1/h", 40), bucket("1/h", 5));
    let cost = |units| Cost::new(units).unwrap();
    let mut state = BucketState::default();
    assert!(large.charge(&mut state, cost(30), now).allowed);
    assert!(!small.charge(&mut state, Cost::ONE, now).allowed);
    large.give_back(&mut state, Taken { cost: 30, at: now }, 30, now);
    assert_eq!(large.peek(&state, cost(40), now).remaining, 0, "all of it is there again");
    // Beside others that are enough to empty the smaller, it gives that nothing.
    let mut state = BucketState::default();
    assert!(large.charge(&mut state, cost(20), now).allowed);
    assert!(large.charge(&mut state, cost(10), now).allowed);
    small.adopt(&mut state, now);
    large.give_back(&mut state, Taken { cost: 10, at: now }, 10, now);
    assert!(!small.peek(&state, Cost::ONE, now).allowed);
    assert_eq!(large.peek(&state, Cost::ONE, now).remaining, 19);
}

#[test]
fn what_a_faster_version_refilled_is_not_given_back_by_a_slower() {
    let (slow, fast) = (bucket("1/s", 4), bucket("1000/s", 4));
    let ms = Micros::from_millis;
    let four = Cost::new(4).unwrap();
    let mut state = BucketState::default();
    assert!(slow.charge(&mut state, four, ms(1_000)).allowed);
    assert!(!fast.charge(&mut state, Cost::ONE, ms(1_000)).allowed);
    assert!(slow.charge(&mut state, four, ms(1_010)).allowed);
    assert!(!slow.is_fresh(&state, ms(1_020)), "what it was is of use until all would have refilled");
    slow.give_back(&mut state, Taken { cost: 4, at: ms(1_000) }, 4, ms(1_020));
    assert!(!slow.charge(&mut state, Cost::ONE, ms(1_020)).allowed);
    slow.give_back(&mut state, Taken { cost: 4, at: ms(1_010) }, 4, ms(1_020));
    assert_eq!(slow.peek(&state, Cost::MAX, ms(1_020)).remaining, 4, "what was charged since comes back");
    assert!(state.changed.is_some() && !state.is_plain_under(slow.numbers(), ms(5_009)));
    assert!(state.is_plain_under(slow.numbers(), ms(5_010)) && slow.is_fresh(&state, ms(5_010)));
}

#[test]
fn a_debt_stays_a_debt_under_other_numbers() {
    let (from, to) = (bucket("10/s", 100), bucket("1/s", 10));
    let now = Micros::from_secs(1_000);
    let mut state = BucketState::default();
    from.debit(&mut state, 120, now);
    assert_eq!(to.peek(&state, Cost::ONE, now).retry_after, Some(Micros::from_secs(21)));
    // A settlement under the old numbers corrects the state as it is now.
    assert!(!to.charge(&mut state, Cost::ONE, now).allowed);
    from.give_back(&mut state, Taken { cost: 100, at: now }, 15, now);
    let left = to.peek(&state, Cost::ONE, now).retry_after;
    assert_eq!(left, Some(Micros::from_secs(11)), "at most the new burst was carried over, and comes back");
}

#[test]
fn whole_tokens_are_the_quotient_rounded_down() {
    for rate in ["1/us", "1000000/s", "7/s", "10/s", "100/m", "999983/d", "7/w", "1/3660d"] {
        for burst in [1, 2, 7, 20_000].into_iter().filter(|burst| *burst < 8 || rate != "1/3660d") {
            let bucket = TokenBucket::new(rate.parse().unwrap(), burst).unwrap();
            let (full, period) = (bucket.full, bucket.period_us);
            let edges = (1..=burst.min(100)).flat_map(|tokens| [tokens * period, tokens * period - 1]);
            for units in edges.chain([0, full, full - 1, full / 2, full / 3]) {
                assert_eq!(bucket.whole_tokens(units), units / period, "{units} of {bucket:?}");
            }
        }
    }
    let bucket = TokenBucket::new("1/us".parse().unwrap(), MAX_FILL.get()).unwrap();
    assert_eq!(bucket.whole_tokens(MAX_FILL.get()), MAX_FILL.get());
    let per_unit = u64::MAX / MAX_PRODUCT;
    let widest = TokenBucket { period_us: MAX_PRODUCT, full: MAX_PRODUCT, per_unit, ..bucket };
    assert_eq!([0, 1, MAX_PRODUCT - 1, MAX_PRODUCT].map(|units| widest.whole_tokens(units)), [0, 0, 0, 1]);
}

/// The short form, counted from a recent instant, answers as the long one does.
#[test]
fn the_short_state_answers_like_the_long_one() {
    for rate in ["10/s", "7/s", "8191/s", "3/250ms", "1/h"] {
        let rate: Rate = rate.parse().unwrap();
        short_answers_like_long(&TokenBucket::new(rate, 9).unwrap());
        short_answers_like_long(&crate::LeakyBucket::new(rate, 9).unwrap());
    }
}

fn short_answers_like_long(bucket: &(impl Bucket + std::fmt::Debug)) {
    assert!(bucket.units_per_us() > 0);
    let start = Micros::from_secs(1_700_000_000);
    let (mut long, mut short) = (BucketState::default(), 0);
    for step in 0..500u64 {
        let elapsed = Micros::new(step * step * 37 % 900_001 + step * 1_000);
        let cost = Cost::new(step % 11 + 1).unwrap();
        let expected = bucket.charge(&mut long, cost, start.saturating_add(elapsed));
        let fit = bucket.charge_short(&mut short, cost, elapsed);
        assert_eq!(bucket.outcome_of(fit, cost), expected, "{bucket:?}, step {step}");
    }
}
