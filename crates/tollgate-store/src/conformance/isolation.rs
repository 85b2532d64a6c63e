//! What one caller sends never changes the answer that another key gets.
//!
//! A bystander and an attacker use one store. The model sees the bystander alone, and every answer that the bystander gets
//! must equal the model's. The attacker's calls may be refused as wrong or for want of room, and fail in no other way: what a caller
//! can provoke is not the store's failure.

use tollgate_kernel::Limit;

use super::beside::Beside;
use super::random::Random;
use super::{FOR_LONG, Subject, cost, limit};
use crate::{
    ChargeId, Failure, Hold, ManualClock, Micros, Settlement, Store, StoreError, StoredCharge, StoredLimit,
};

const BYSTANDER: &str = "user:42";

/// Keys that are easily taken for the bystander's.
const ATTACKERS: [&str; 5] = ["user:4", "user:42:v2", "user:421", "{user:42}", "USER:42"];

/// How many entries and leases the attacker piles up on one key.
const PILE: u64 = 1_000;

pub(super) async fn isolation(make: &impl AsyncFn(ManualClock) -> Subject) {
    let s = Micros::from_secs;
    let rate = |text: &str| text.parse::<tollgate_kernel::Rate>().expect("a rate");
    let limits = [
        limit("token", Limit::token_bucket(rate("5/s"), 10)),
        limit("leaky", Limit::leaky_bucket(rate("7/1300ms"), 6)),
        limit("fixed", Limit::fixed_window(8, s(2))),
        limit("clock", Limit::clock_window(8, s(2))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("counter", Limit::sliding_window_counter(11, s(2))),
        limit("leases", Limit::concurrency(4, s(2))),
    ];
    // Limits of the attacker's own, under names like the others', and the same names with other numbers.
    let foreign = [
        limit("log-long", Limit::sliding_window(1 << 40, s(3_600))),
        limit("leases-many", Limit::concurrency(1 << 40, s(3_600))),
        limit("token", Limit::token_bucket(rate("1/m"), 1 << 20)),
        limit("log", Limit::sliding_window(1 << 40, s(3_600))),
        limit("counter", Limit::sliding_window_counter(1 << 20, s(3_600))),
        limit("leases", Limit::concurrency(1 << 40, s(3_600))),
    ];
    let mut pair = Beside::new("a bystander", make).await;
    let mut random = Random::new(7);
    pile_up(&*pair.subject.store, &pair.clock, &foreign[..2]).await;
    let mut held: Vec<ChargeId> = Vec::new();
    for turn in 0..250u64 {
        attack(&*pair.subject.store, &mut random, &limits, &foreign).await;
        pair.clock.advance(Micros::new(random.below(120_000)));
        let limit = random.pick(&limits);
        match random.below(6) {
            0..3 => drop(pair.charge(limit, BYSTANDER, 1 + random.below(3), None).await),
            3 => held.extend(pair.reserve(limit, BYSTANDER, 1 + random.below(3)).await),
            4 => drop(pair.remaining(limit, BYSTANDER).await),
            _ => {
                if let Some(id) = held.pop() {
                    pair.settle(id, &Settlement::Actual(turn % 4)).await;
                }
            }
        }
    }
    for limit in &limits {
        pair.remaining(limit, BYSTANDER).await;
        let attacker = StoredCharge { limit, key: ATTACKERS[0], cost: cost(1), shadow: false };
        provoked("forget", pair.subject.store.forget(limit, ATTACKERS[0]).await);
        provoked("peek", pair.subject.store.peek(&[attacker]).await);
        pair.remaining(limit, BYSTANDER).await;
    }
}

/// A refusal as wrong or for want of room is the caller's own; anything else would count as the store's failure.
fn provoked<T>(call: &str, answer: Result<T, StoreError>) {
    if let Err(error) = answer {
        let is_own = error.is_invalid() || error.failure() == Some(Failure::Full);
        assert!(is_own, "a caller provoked a failure of the store: {call}: {error}");
    }
}

/// Thousands of entries of a log and of leases on one key, each of its own instant, and costs that have to look past all of them.
async fn pile_up(store: &dyn Store, clock: &ManualClock, limits: &[StoredLimit]) {
    for _ in 0..PILE {
        let charges: Vec<StoredCharge<'_>> = (limits.iter())
            .map(|limit| StoredCharge { limit, key: ATTACKERS[0], cost: cost(1), shadow: false })
            .collect();
        provoked("charge", store.charge(&charges, None).await);
        clock.advance(Micros::new(1));
    }
    for limit in limits {
        for units in [limit.limit.capacity(), limit.limit.capacity() - PILE / 2, u64::MAX] {
            let charge = StoredCharge { limit, key: ATTACKERS[0], cost: cost(units), shadow: false };
            provoked("charge", store.charge(&[charge], None).await);
        }
    }
}

/// One call of a caller that charges its own keys in any way, and names that no caller uses.
async fn attack(store: &dyn Store, random: &mut Random, limits: &[StoredLimit], foreign: &[StoredLimit]) {
    let limit = if random.one_in(2) { random.pick(limits) } else { random.pick(foreign) };
    let key = *random.pick(&ATTACKERS);
    let units = *random.pick(&[1, 2, limit.limit.capacity(), limit.limit.capacity() + 1, 1 << 53, u64::MAX]);
    let charge = StoredCharge { limit, key, cost: cost(units), shadow: random.one_in(8) };
    let huge = Settlement::Actual(*random.pick(&[0, 1 << 53, u64::MAX]));
    match random.below(6) {
        0 | 1 => provoked("charge", store.charge(&[charge, charge], None).await),
        2 => {
            let hold = Hold { id: ChargeId::random(), ttl: *random.pick(&[Micros::ZERO, FOR_LONG]) };
            provoked("reserve", store.charge(&[StoredCharge { cost: cost(1), ..charge }], Some(hold)).await);
            provoked("settle", store.settle(hold.id, &huge).await);
            provoked("settle again", store.settle(hold.id, &huge).await);
        }
        3 => {
            let names = ["a\0b", "", "token", "no such limit", "'; drop table x; --", "\u{202e}"];
            let each = names.map(|name| (name.to_owned(), u64::MAX)).to_vec();
            let by_position = Settlement::Each(vec![u64::MAX; 65]);
            for settlement in [
                huge,
                by_position,
                Settlement::Named(each),
                Settlement::Cancel,
                Settlement::Release,
                Settlement::Renew,
            ] {
                provoked("settle what is unknown", store.settle(ChargeId::random(), &settlement).await);
            }
        }
        4 => provoked("refund", store.refund(&[charge]).await),
        _ => provoked("peek", store.peek(&[charge]).await),
    }
}
