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
            assert_eq!(state.wider_full_at, 0, "one instant says all of a bucket that was never changed");
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

#[test]
fn a_second_instant_is_remembered_only_where_it_says_more() {
    let mut state = BucketState { full_at: 10, ..BucketState::default() };
    for (wider, now, remembered) in [(11, 5, 11), (10, 5, 0), (9, 5, 0), (12, 12, 0), (13, 12, 13)] {
        state.set_wider(wider, now);
        assert_eq!(state.wider_full_at, remembered, "{wider} at {now}");
    }
}

/// A faster version was live between the charge and its settlement: what it may have refilled is not given back, whichever
/// version wrote the state before it and after it.
#[test]
fn the_fastest_of_several_versions_says_what_has_refilled() {
    let (fast, slow, slower) = (bucket("100/s", 100), bucket("2/s", 100), bucket("1/s", 100));
    let ms = Micros::from_millis;
    for (first, second) in [(fast, slower), (slower, fast)] {
        let mut state = BucketState::default();
        assert!(first.charge(&mut state, Cost::ONE, ms(1_000)).allowed);
        let at = ms(1_001);
        assert!(slower.charge(&mut state, Cost::new(30).unwrap(), at).allowed);
        second.adopt(&mut state, ms(1_100));
        slow.adopt(&mut state, ms(1_200));
        let later = ms(2_000);
        let left = |state: &BucketState| slow.peek(state, Cost::MAX, later).remaining;
        let before = left(&state);
        slower.give_back(&mut state, Taken { cost: 30, at }, 30, later);
        assert_eq!(left(&state), before, "99 may have refilled at 100/s");
    }
}

/// A change is remembered until a whole bucket has refilled since, and then dropped by the next charge.
#[test]
fn a_change_is_over_when_the_bucket_has_refilled() {
    let odd = bucket("7/s", 14);
    let changed = Changed { at: Micros::from_secs(10), tokens: 1, period_us: 1 };
    for (us, is_over) in [(9_000_000, false), (11_999_999, false), (12_000_000, true)] {
        let now = Micros::new(us);
        assert_eq!(changed.is_over(odd.numbers(), now), is_over, "{now}");
        let state =
            BucketState { changed: Some(changed), under: Some(odd.numbers()), ..BucketState::default() };
        assert_eq!(odd.adopted(&state, now).changed.is_none(), is_over, "{now}");
    }
    // What a smaller burst keeps of a bucket is all that is missing of it: one instant says so.
    let mut state = BucketState::default();
    assert!(odd.charge(&mut state, Cost::new(3).unwrap(), Micros::from_secs(1)).allowed);
    assert_eq!(bucket("7/s", 7).adopted(&state, Micros::from_secs(1)).wider_full_at, 0);
    assert!(odd.charge(&mut state, Cost::new(11).unwrap(), Micros::from_secs(1)).allowed);
    assert!(
        bucket("7/s", 7).adopted(&state, Micros::from_secs(1)).wider_full_at > 0,
        "14 are missing, 7 count"
    );
}

/// What only a larger burst misses is not owed by a smaller one, when its rate changes and its burst does not.
#[test]
fn a_new_rate_owes_no_more_than_the_same_burst_missed() {
    let second = Micros::from_secs(1);
    let mut state = BucketState::default();
    assert!(bucket("1/s", 14).charge(&mut state, Cost::new(14).unwrap(), second).allowed);
    let small = bucket("1/s", 7);
    small.adopt(&mut state, second);
    let later = Micros::from_secs(5);
    assert_eq!(small.peek(&state, Cost::MAX, later).remaining, 4);
    assert_eq!(bucket("2/s", 7).peek(&state, Cost::MAX, later).remaining, 4, "10 are missing of 14, 3 of 7");
}

/// Numbers that come with every call keep the instant of being full, also where something is given back by other numbers.
#[test]
fn what_is_given_back_by_other_numbers_keeps_the_instant() {
    let (fast, slow) = (bucket("10/s", 10).keeping_instant(), bucket("5/s", 10).keeping_instant());
    let (mut state, at) = (BucketState::default(), Micros::from_secs(1));
    assert!(fast.charge(&mut state, Cost::new(10).unwrap(), at).allowed);
    assert_eq!(slow.peek(&state, Cost::MAX, at).remaining, 5, "full in a second, in which 5 come");
    slow.give_back(&mut state, Taken { cost: 5, at }, 5, at);
    assert_eq!(slow.peek(&state, Cost::MAX, at).remaining, 10);
    assert_eq!(state.under, Some(slow.numbers()));
}

/// A charge that is older than a change may have refilled by the rate before it, of which the count may differ alone.
#[test]
fn what_refilled_by_the_rate_before_a_change_is_not_given_back() {
    let (fast, slow) = (bucket("7/s", 20), bucket("3/s", 20));
    let (mut state, at) = (BucketState::default(), Micros::from_secs(1));
    assert!(fast.charge(&mut state, Cost::new(14).unwrap(), at).allowed);
    let now = Micros::from_secs(2);
    assert!(slow.charge(&mut state, Cost::new(10).unwrap(), now).allowed);
    assert_eq!(slow.peek(&state, Cost::MAX, now).remaining, 3);
    slow.give_back(&mut state, Taken { cost: 14, at }, 14, now);
    assert_eq!(slow.peek(&state, Cost::MAX, now).remaining, 10, "7 of 14 refilled at 7/s, so 7 come back");
}

/// A debt is owed by a larger burst too, whichever version of the limit settles.
#[test]
fn a_debt_of_a_smaller_burst_is_owed_by_a_larger_one() {
    let (small, large) = (bucket("1/s", 5), bucket("1/s", 20));
    let (mut state, now) = (BucketState::default(), Micros::from_secs(1));
    assert!(large.charge(&mut state, Cost::new(10).unwrap(), now).allowed);
    small.adopt(&mut state, now);
    assert_eq!(large.peek(&state, Cost::MAX, now).remaining, 10);
    small.debit(&mut state, 4, now);
    assert_eq!(large.peek(&state, Cost::MAX, now).remaining, 6);
}

/// What a larger burst misses is kept up to so many times its burst and its longest debt, whatever callers settle.
#[test]
fn what_only_a_larger_burst_misses_has_an_end() {
    let (small, large) = (bucket("2/s", 10), bucket("2/s", 20));
    let (mut state, now) = (BucketState::default(), Micros::from_secs(1));
    assert!(small.charge(&mut state, Cost::ONE, now).allowed);
    for _ in 0..9 {
        large.debit(&mut state, u64::MAX, now);
    }
    // A day at 2/s is 172,800 tokens of half a second.
    let most = (20 + 172_800) * u128::from(WIDER_TIMES) * 500_000;
    assert_eq!(state.wider_full_at, 1_000_000 + most);
}

#[test]
fn a_denied_charge_fits_within_its_wait_and_no_less() {
    for (bucket, cost) in [(bucket("7/s", 14), 3), (bucket("1/m", 5), 5), (bucket("1000003/h", 20), 20)] {
        let cost = Cost::new(cost).unwrap();
        let mut full_at = 0;
        while bucket.charge_short(&mut full_at, cost, Micros::ZERO).is_allowed() {}
        for elapsed in [0, 1, 7, 59_999] {
            let fit = bucket.charge_short(&mut full_at, cost, Micros::new(elapsed));
            let wait = bucket.outcome_of(fit, cost).retry_after.unwrap();
            assert!(bucket.fits_within(fit, cost, wait), "{bucket:?} after {elapsed}");
            assert!(
                !bucket.fits_within(fit, cost, Micros::new(wait.get() - 1)),
                "{bucket:?} after {elapsed}"
            );
        }
        let never = Cost::new(21).unwrap();
        let fit = bucket.charge_short(&mut full_at, never, Micros::ZERO);
        assert!(!bucket.fits_within(fit, never, Micros::new(u64::MAX)), "more than the burst never fits");
    }
}
