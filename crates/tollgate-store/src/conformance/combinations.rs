//! Every sequence of one to three strategies in one charge: stores may have a way of their own for each.

use tollgate_kernel::Limit;

use super::beside::Beside;
use super::random::Random;
use super::{FOR_LONG, Subject, cost, limit};
use crate::{ChargeId, Hold, ManualClock, Micros, Settlement, StoredCharge, StoredLimit};

pub(super) async fn combinations(make: &impl AsyncFn(ManualClock) -> Subject) {
    let s = Micros::from_secs;
    let rate = |text: &str| text.parse::<tollgate_kernel::Rate>().expect("a rate");
    let limits = [
        limit("token", Limit::token_bucket(rate("5/s"), 10)),
        // Its instants are not whole microseconds.
        limit("leaky", Limit::leaky_bucket(rate("7/1300ms"), 9)),
        limit("fixed", Limit::fixed_window(8, s(2))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("counter", Limit::sliding_window_counter(11, s(2))),
        limit("slots", Limit::concurrency(7, s(2))),
    ];
    let mut pair = Beside::new("every combination", make).await;
    let mut random = Random::new(29);
    for length in 1..=3 {
        for number in 0..limits.len().pow(length) {
            let of = |place: u32| &limits[number / limits.len().pow(place) % limits.len()];
            let limits: Vec<&StoredLimit> = (0..length).map(of).collect();
            charges(&mut pair, &mut random, &limits, &format!("{length}-{number}")).await;
        }
    }
}

/// Charges of these limits, mostly of one key, some of them held and settled.
async fn charges(pair: &mut Beside, random: &mut Random, limits: &[&StoredLimit], key: &str) {
    let other = format!("{key}-other");
    let mut held: Vec<ChargeId> = Vec::new();
    for _ in 0..8 {
        let charges: Vec<StoredCharge<'_>> = limits
            .iter()
            .map(|limit| StoredCharge {
                limit,
                key: if random.one_in(8) { &other } else { key },
                // A cost of 20 never fits.
                cost: cost(if random.one_in(12) { 20 } else { 1 + random.below(3) }),
                shadow: random.one_in(6),
            })
            .collect();
        let hold = random.one_in(3).then(|| Hold { id: ChargeId::random(), ttl: FOR_LONG });
        let charged = pair.charge_all(&charges, hold).await;
        held.extend(hold.filter(|_| charged.allowed).map(|hold| hold.id));
        if random.one_in(3)
            && let Some(id) = held.pop()
        {
            let settlement = match random.below(4) {
                0 => Settlement::Cancel,
                1 => Settlement::Release,
                2 => Settlement::Renew,
                _ => Settlement::Each(limits.iter().map(|_| random.below(5)).collect()),
            };
            pair.settle(id, &settlement).await;
        }
        pair.clock.advance(Micros::new(random.below(500_000)));
    }
}
