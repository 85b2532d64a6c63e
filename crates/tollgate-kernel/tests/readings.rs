//! What is answered from the reading of a twin is what the kernel answers from the state itself. The readings are made here as
//! the twins make them, from the entries and the instants that a state shows, with none of the kernel's arithmetic.

use tollgate_kernel::{Cost, EntriesReading, Limit, Micros, Outcome, Reading, State};

fn cost(units: u64) -> Cost {
    Cost::new(units).unwrap()
}

/// Entries as (instant at which it runs out, cost), soonest first: what counts at `now`, and when a charge fits.
fn look(entries: &[(u64, u64)], limit: u64, cost: Cost, now: u64) -> EntriesReading {
    let counted = || entries.iter().filter(|(end, _)| *end > now);
    let used: u64 = counted().map(|(_, cost)| cost).sum();
    let mut free = limit.saturating_sub(used);
    let fits = counted().find(|(_, given_back)| {
        free += given_back;
        free >= cost.get()
    });
    let does_not_fit = cost.get() <= limit && used + cost.get() > limit;
    EntriesReading {
        used,
        wait: fits.filter(|_| does_not_fit).map_or(Micros::ZERO, |(end, _)| Micros::new(end - now)),
        last: counted().next_back().map_or(Micros::ZERO, |(end, _)| Micros::new(end - now)),
    }
}

fn reading(limit: &Limit, state: &State, cost: Cost, now: u64) -> Reading {
    let bucket = |full_at: u128, tokens: u64| {
        let missing = full_at.saturating_sub(u128::from(now) * u128::from(tokens));
        let part = |units: u128| u64::try_from(units).unwrap();
        let tokens = u128::from(tokens);
        Reading::Bucket { us: Micros::new(part(missing / tokens)), rest: part(missing % tokens) }
    };
    match (limit, state) {
        (Limit::TokenBucket(tokens), State::Bucket(state)) => bucket(state.full_at, tokens.numbers().tokens),
        (Limit::LeakyBucket(leaky), State::Bucket(state)) => {
            bucket(state.full_at, leaky.room().numbers().tokens)
        }
        (_, State::Window(state)) => Reading::Window(*state),
        (_, State::Counter(state)) => Reading::Counter(*state),
        (Limit::SlidingWindow(window), State::Log(log)) => {
            let ends: Vec<_> =
                log.entries().map(|entry| (entry.at.get() + window.window().get(), entry.cost)).collect();
            Reading::Log(look(&ends, window.limit(), cost, now))
        }
        (Limit::Concurrency(held), State::Leases(leases)) => {
            let ends: Vec<_> = leases.leases().map(|lease| (lease.end.get(), lease.cost)).collect();
            Reading::Leases(look(&ends, held.limit(), cost, now))
        }
        (limit, state) => panic!("{limit:?} and {state:?}"),
    }
}

#[test]
fn a_reading_is_answered_as_the_state_is() {
    let second = Micros::from_secs(1);
    let limits = [
        Limit::token_bucket("7/s", 10),
        Limit::leaky_bucket("7/s", 10),
        Limit::fixed_window(10, second),
        Limit::clock_window(10, second),
        Limit::sliding_window(10, second),
        Limit::sliding_window_counter(10, second),
        Limit::concurrency(10, second),
    ];
    for limit in limits.map(Result::unwrap) {
        let mut random = 1u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let (mut state, mut now, mut denied) = (limit.fresh(), 5_000_000_000, 0);
        for _ in 0..2_000 {
            now += draw(400_000);
            let at = Micros::new(now);
            let asked = cost(1 + draw(12));
            let answered = limit.peek(&state, asked, at);
            let found = reading(&limit, &state, asked, now);
            assert_eq!(limit.answer(&found, asked, at), answered, "{limit} {state:?} {asked:?}");

            let found = reading(&limit, &state, Cost::ONE, now);
            let (one, whole) =
                (limit.peek(&state, Cost::ONE, at), limit.peek(&state, cost(limit.capacity() + 1), at));
            let standing = Outcome { allowed: one.allowed, retry_after: one.retry_after, ..whole };
            assert_eq!(limit.status(&found, at), standing, "{limit} {state:?}");

            denied += u32::from(!limit.charge(&mut state, asked, at).allowed);
        }
        assert!((200..1_900).contains(&denied), "{limit}: {denied} of 2,000 denied");
    }
}

#[test]
fn a_price_is_what_a_charge_takes() {
    let leaky = Limit::leaky_bucket("7/s", 14).unwrap();
    assert_eq!(leaky.price(cost(1)), Some((142_857, 1)));
    assert_eq!((leaky.price(cost(14)), leaky.price(cost(15))), (Some((2_000_000, 0)), None));
    let leases = Limit::concurrency(5, Micros::from_secs(1)).unwrap();
    assert_eq!((leases.price(cost(5)), leases.price(cost(6))), (Some((5, 0)), None));
}
