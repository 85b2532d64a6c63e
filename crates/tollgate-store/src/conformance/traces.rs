//! Random traces: the same calls to the store and to the model, step by step, and equal answers demanded.

use super::model::Model;
use super::random::Random;
use super::{FOR_LONG, Subject, limit};
use crate::{Hold, HoldId, Item, ManualClock, Micros, Settlement, StoredLimit};

/// How many traces, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Traces {
    /// How many; each has its own seed.
    pub seeds: u64,
    /// How many calls in each.
    pub steps: usize,
}

impl Default for Traces {
    fn default() -> Self {
        Traces { seeds: 20, steps: 10_000 }
    }
}

/// One of each kind, some with odd fractions, small enough to be exhausted and short enough to come back within a trace.
fn limits() -> Vec<StoredLimit> {
    use tollgate_kernel::{Limit, Rate};
    let (ms, s) = (Micros::from_millis, Micros::from_secs);
    let rate = |count, period| Rate::new(count, period).unwrap_or_else(|error| panic!("{error}"));
    vec![
        limit("token", Limit::token_bucket(rate(5, s(1)), 10)),
        limit("token-odd", Limit::token_bucket(rate(7, ms(1300)), 13)),
        limit("token-wide", Limit::token_bucket(rate(999_983, s(86_400)), 50)),
        limit("leaky", Limit::leaky_bucket(rate(3, s(1)), 6)),
        limit("leaky-wide", Limit::leaky_bucket(rate(10_007, s(1_000)), 9)),
        limit("fixed", Limit::fixed_window(8, s(2))),
        limit("clock", Limit::clock_window(8, ms(1500))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("counter", Limit::sliding_window_counter(11, ms(1700))),
        limit("leases", Limit::concurrency(4, ms(2500))),
    ]
}

const KEYS: [&str; 3] = ["a", "user:b", "user:c:v2"];

pub(super) async fn traces(traces: Traces, make: &impl AsyncFn(ManualClock) -> Subject) {
    let limits = limits();
    for seed in 0..traces.seeds {
        let clock = super::clock();
        let subject = make(clock.clone()).await;
        let mut trace = Trace {
            subject: &subject,
            clock,
            model: Model::default(),
            random: Random::new(seed),
            limits: &limits,
            holds: Vec::new(),
            admitted: 0,
            denied: 0,
        };
        for step in 0..traces.steps {
            if let Err(mistake) = trace.step().await {
                panic!("seed {seed}, step {step}: {mistake}");
            }
        }
        assert!(trace.admitted > traces.steps / 20, "seed {seed}: hardly anything was admitted");
        assert!(trace.denied > traces.steps / 20, "seed {seed}: hardly anything was denied");
    }
}

struct Trace<'a> {
    subject: &'a Subject,
    clock: ManualClock,
    model: Model,
    random: Random,
    limits: &'a [StoredLimit],
    /// Holds that may still be open, and how much each reserved under its first limit.
    holds: Vec<(HoldId, u64)>,
    admitted: usize,
    denied: usize,
}

impl Trace<'_> {
    async fn step(&mut self) -> Result<(), String> {
        self.pass_time();
        match self.random.below(20) {
            0..10 => self.charge(false).await,
            10..13 => self.charge(true).await,
            13..15 => self.peek().await,
            15..19 => self.settle().await,
            _ => self.forget().await,
        }
    }

    /// Often no time at all, so that charges share an instant; mostly a little; now and then enough to empty everything; at
    /// times to the very edge of a window.
    fn pass_time(&mut self) {
        let now = self.clock.now().get();
        let edge = *self.random.pick(&[2_000_000, 1_500_000, 1_700_000]);
        let span = match self.random.below(100) {
            0..50 => 0,
            50..94 => self.random.below(50_000),
            94 | 95 => edge - now % edge,
            96 | 97 => (edge - now % edge).saturating_sub(1),
            _ => self.random.below(4_000_000),
        };
        self.clock.advance(Micros::new(span));
    }

    /// One to three limits, at times the same pair twice, at times one that only watches, at times a cost that never fits.
    fn items<'b>(random: &mut Random, limits: &'b [StoredLimit]) -> Vec<Item<'b>> {
        let count = if random.one_in(3) { 1 + random.below(3) } else { 1 };
        let mut items: Vec<Item<'b>> = Vec::new();
        for _ in 0..count {
            let (limit, key) = match items.last() {
                Some(last) if random.one_in(4) => (last.limit, last.key),
                _ => (random.pick(limits), *random.pick(&KEYS)),
            };
            let units = if random.one_in(50) { random.below(1 << 40) } else { random.below(4) } + 1;
            // A pair that is named twice watches both times or neither.
            let twin = items.iter().find(|item| item.limit == limit && item.key == key);
            let shadow = twin.map_or_else(|| random.one_in(8), |twin| twin.shadow);
            items.push(Item { limit, key, cost: super::cost(units), shadow });
        }
        items
    }

    async fn charge(&mut self, held: bool) -> Result<(), String> {
        let items = Self::items(&mut self.random, self.limits);
        let hold = held.then(|| {
            let ttl =
                if self.random.one_in(3) { Micros::new(self.random.below(3_000_000)) } else { FOR_LONG };
            // Now and then a name that was used before: the call was sent again.
            let again = self.holds.last().filter(|_| self.random.one_in(8)).map(|(id, _)| *id);
            Hold { id: again.unwrap_or_else(HoldId::random), ttl }
        });
        let expected = self.model.charge(&items, hold, self.clock.now());
        let got = self.subject.store.charge(&items, hold).await;
        let got = got.map_err(|error| format!("charge {items:?}: {error}"))?;
        if expected.allowed {
            self.admitted += 1;
            self.holds.extend(hold.map(|hold| (hold.id, items[0].cost.get())));
        } else {
            self.denied += 1;
        }
        equal("charge", &(items, hold), &expected, &got)
    }

    async fn peek(&mut self) -> Result<(), String> {
        let items = Self::items(&mut self.random, self.limits);
        let expected = self.model.peek(&items, self.clock.now());
        let got = self.subject.store.peek(&items).await;
        let got = got.map_err(|error| format!("peek {items:?}: {error}"))?;
        equal("peek", &items, &expected, &got)
    }

    /// Settles one of the last few holds: mostly once, at times again, at times one that never was.
    async fn settle(&mut self) -> Result<(), String> {
        let recent = self.holds.len().saturating_sub(6);
        let (id, reserved) = match &self.holds[recent..] {
            [] => (HoldId::random(), 1),
            _ if self.random.one_in(20) => (HoldId::random(), 1),
            holds => *self.random.pick(holds),
        };
        let settlement = match self.random.below(8) {
            0..3 => Settlement::Actual(self.random.below(2 * reserved.min(8))),
            3 => Settlement::Each(vec![(self.random.pick(self.limits).name.clone(), self.random.below(5))]),
            4 => Settlement::Each(Vec::new()),
            5 => Settlement::Cancel,
            _ => Settlement::Renew,
        };
        let expected = self.model.settle(id, &settlement, self.clock.now());
        let got = self.subject.store.settle(id, &settlement).await;
        let got = match got {
            Err(error) if error.is_invalid() => None,
            Err(error) => return Err(format!("settle {settlement:?}: {error}")),
            Ok(settled) => Some(settled),
        };
        equal("settle", &(id, settlement), &expected, &got)
    }

    async fn forget(&mut self) -> Result<(), String> {
        let (limit, key) = (self.random.pick(self.limits), *self.random.pick(&KEYS));
        self.model.forget(&limit.name, key);
        self.subject.store.forget(limit, key).await.map(drop).map_err(|error| format!("forget: {error}"))
    }
}

fn equal<C: std::fmt::Debug, A: std::fmt::Debug + PartialEq>(
    verb: &str,
    call: &C,
    expected: &A,
    got: &A,
) -> Result<(), String> {
    if expected == got {
        return Ok(());
    }
    Err(format!("{verb} {call:?}\n expected {expected:?}\n but got {got:?}"))
}
