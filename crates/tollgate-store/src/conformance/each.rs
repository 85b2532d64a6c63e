//! Charges that are each made by themselves, and how a key stands.
//!
//! A batch of random charges, with pairs that are named again, goes to the store in one call and to the model one by one. Beside
//! them the status of a key equals what the model says of two looks.

use tollgate_kernel::Limit;

use super::beside::Beside;
use super::random::Random;
use super::{Subject, cost, limit};
use crate::{ManualClock, Micros, StoredCharge};

pub(super) async fn each(make: &impl AsyncFn(ManualClock) -> Subject) {
    let s = Micros::from_secs;
    let rate = |text: &str| text.parse::<tollgate_kernel::Rate>().expect("a rate");
    let limits = [
        limit("token", Limit::token_bucket(rate("5/s"), 10)),
        limit("leaky", Limit::leaky_bucket(rate("7/1300ms"), 6)),
        limit("fixed", Limit::fixed_window(8, s(2))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("counter", Limit::sliding_window_counter(11, s(2))),
    ];
    let keys = ["a", "b", "c", "d"];
    let mut pair = Beside::new("each by itself", make).await;
    let mut random = Random::new(11);
    pair.charge_each(&[]).await;
    for turn in 0..80 {
        let count = if turn % 10 == 9 { 64 } else { random.below(7) };
        let charges: Vec<StoredCharge<'_>> = (0..count)
            .map(|_| {
                // Mostly alike, so that stores that send those together do so; a cost of 20 never fits.
                let units = if random.one_in(4) { *random.pick(&[2, 3, 20]) } else { 1 };
                let limit =
                    if random.one_in(2) { &limits[turn % limits.len()] } else { random.pick(&limits) };
                StoredCharge {
                    limit,
                    key: random.pick::<&str>(&keys),
                    cost: cost(units),
                    shadow: random.one_in(8),
                }
            })
            .collect();
        pair.charge_each(&charges).await;
        pair.status(random.pick(&limits), random.pick::<&str>(&keys)).await;
        pair.clock.advance(Micros::new(random.below(300_000)));
    }
    pair.status(&limits[0], "nobody").await;
}
