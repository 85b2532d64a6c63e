//! Random traces: the same calls to the store and to the model, step by step, and equal answers demanded.

use super::model::Model;
use super::random::Random;
use super::{FOR_LONG, Subject, limit};
use crate::{ChargeId, Hold, ManualClock, Micros, Settlement, StoredCharge, StoredLimit};

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

/// Limits at, or near, the bounds of what can be held exact: products past 2^53 and 2^64, odd fractions of large numbers, windows
/// of years, debts that saturate. A twin in another language gets these wrong first.
fn wide_limits() -> Vec<StoredLimit> {
    use tollgate_kernel::{Limit, MAX_COUNT, MAX_SPAN, Rate};
    let (minute, day) = (Micros::from_secs(60), Micros::from_secs(86_400));
    let rate = |count, period| Rate::new(count, period).unwrap_or_else(|error| panic!("{error}"));
    vec![
        limit("token-fast", Limit::token_bucket(rate(4_294_967_291, Micros::from_secs(1)), 1 << 40)),
        limit("token-slow", Limit::token_bucket(rate(1, Micros::from_secs(3_600)), 1_000_000)),
        limit("token-models", Limit::token_bucket(rate(10_000_000, minute), 10_000_000)),
        limit("leaky-prime", Limit::leaky_bucket(rate(999_983, day), 999_983)),
        limit("fixed-wide", Limit::fixed_window(MAX_COUNT, MAX_SPAN)),
        limit("clock-day", Limit::clock_window(1_000_000, day)),
        limit("log-wide", Limit::sliding_window(MAX_COUNT, day)),
        limit("counter-day", Limit::sliding_window_counter(1_000_000, day)),
        limit("counter-years", Limit::sliding_window_counter(14_000, MAX_SPAN)),
        limit("counter-prime", Limit::sliding_window_counter(9_999_991, Micros::new(59_999_999))),
        limit("leases-wide", Limit::concurrency(MAX_COUNT, MAX_SPAN)),
    ]
}

/// Limits whose numbers change from one call to the next, over the same counters: two or three versions of each that are live at
/// the same time.
fn changing_limits() -> Vec<StoredLimit> {
    use tollgate_kernel::{Limit, Rate};
    let (ms, s) = (Micros::from_millis, Micros::from_secs);
    let rate = |count, period| Rate::new(count, period).unwrap_or_else(|error| panic!("{error}"));
    vec![
        limit("bucket", Limit::token_bucket(rate(5, s(1)), 10)),
        limit("bucket", Limit::token_bucket(rate(10, s(1)), 7)),
        limit("bucket", Limit::leaky_bucket(rate(4, s(1)), 12)),
        limit("odd", Limit::leaky_bucket(rate(7, ms(1300)), 13)),
        limit("odd", Limit::token_bucket(rate(10_007, s(1_000)), 6)),
        limit("odd", Limit::token_bucket(rate(999_983, s(86_400)), 20)),
        limit("window", Limit::fixed_window(8, s(2))),
        limit("window", Limit::fixed_window(12, s(3))),
        limit("clock", Limit::clock_window(5, ms(1500))),
        limit("clock", Limit::clock_window(8, s(1))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("log", Limit::sliding_window(6, ms(300))),
        limit("counter", Limit::sliding_window_counter(11, ms(1700))),
        limit("counter", Limit::sliding_window_counter(15, ms(600))),
        limit("counter", Limit::sliding_window_counter(13, s(2))),
        limit("leases", Limit::concurrency(4, ms(2500))),
        limit("leases", Limit::concurrency(6, ms(400))),
    ]
}

const KEYS: [&str; 3] = ["a", "user:b", "user:c:v2"];

pub(super) async fn traces(traces: Traces, make: &impl AsyncFn(ManualClock) -> Subject) {
    run(traces, &limits(), Kind::Everyday, make).await;
    // A tenth of the steps at the bounds.
    run(Traces { steps: traces.steps / 10, ..traces }, &wide_limits(), Kind::Wide, make).await;
    run(Traces { steps: traces.steps / 2, ..traces }, &changing_limits(), Kind::Changing, make).await;
}

/// What a trace is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Limits as people write them.
    Everyday,
    /// Amounts and times are as large as the limits are.
    Wide,
    /// Each name has several sets of numbers. A charge over several limits is on one key, so that it is one step on every store:
    /// over several slots of a cluster, a refused charge may have been made on some of them and undone, which adopts their states.
    Changing,
}

async fn run(
    traces: Traces,
    limits: &[StoredLimit],
    kind: Kind,
    make: &impl AsyncFn(ManualClock) -> Subject,
) {
    for seed in 0..traces.seeds {
        let clock = super::clock();
        let subject = make(clock.clone()).await;
        let mut trace = Trace {
            subject: &subject,
            clock,
            model: Model::default(),
            random: Random::new(seed),
            limits,
            kind,
            holds: Vec::new(),
            last_held: Vec::new(),
            admitted: 0,
            denied: 0,
        };
        for step in 0..traces.steps {
            if let Err(mistake) = trace.step().await {
                panic!("{kind:?}, seed {seed}, step {step}: {mistake}");
            }
        }
        // Wide limits take longer to be exhausted than a short trace lasts.
        let some = traces.steps / if kind == Kind::Wide { 60 } else { 25 };
        assert!(trace.admitted > some, "{kind:?}, seed {seed}: only {} admitted", trace.admitted);
        assert!(trace.denied > some, "{kind:?}, seed {seed}: only {} denied", trace.denied);
    }
}

struct Trace<'a> {
    subject: &'a Subject,
    clock: ManualClock,
    model: Model,
    random: Random,
    limits: &'a [StoredLimit],
    kind: Kind,
    /// What the last hold was made for.
    last_held: Vec<StoredCharge<'a>>,
    /// Holds that may still be open, and how much each reserved under its first limit.
    holds: Vec<(ChargeId, u64, usize)>,
    admitted: usize,
    denied: usize,
}

impl Trace<'_> {
    async fn step(&mut self) -> Result<(), String> {
        self.pass_time();
        match self.random.below(22) {
            0..10 => self.charge(false).await,
            10..13 => self.charge(true).await,
            13..15 => self.peek().await,
            15..19 => self.settle().await,
            19..21 => self.refund().await,
            _ => self.forget().await,
        }
    }

    /// Often no time at all, so that charges share an instant; mostly a little; now and then enough to empty everything; at
    /// times to the very edge of a window.
    fn pass_time(&mut self) {
        if self.kind == Kind::Wide {
            // Seldom enough to stay within the years for which everything is exact.
            let day = 86_400_000_000;
            let span = match self.random.below(300) {
                0 => self.random.below(8 * 365 * day),
                1..7 => self.random.below(80 * day),
                7..100 => 0,
                _ => {
                    let most = *self.random.pick(&[2, 1_000, 60_000_000, day]);
                    self.random.below(most)
                }
            };
            return self.clock.advance(Micros::new(span));
        }
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

    /// One to three limits, at times the same pair twice, at times a shadow limit, at times a cost that never fits.
    fn charges<'b>(random: &mut Random, limits: &'b [StoredLimit], kind: Kind) -> Vec<StoredCharge<'b>> {
        let is_wide = kind == Kind::Wide;
        let count = if random.one_in(3) { 1 + random.below(3) } else { 1 };
        let mut charges: Vec<StoredCharge<'b>> = Vec::new();
        for _ in 0..count {
            let (limit, key) = match charges.last() {
                Some(last) if random.one_in(4) => (last.limit, last.key),
                Some(last) if kind == Kind::Changing => (random.pick(limits), last.key),
                _ => (random.pick(limits), *random.pick(&KEYS)),
            };
            // One charge asks a limit by one set of numbers.
            let same = charges.iter().find(|charge| charge.limit.name == limit.name && charge.key == key);
            let limit = same.map_or(limit, |charge| charge.limit);
            let capacity = limit.limit.capacity();
            let units = match random.below(8) {
                0 if is_wide => capacity,
                1 if is_wide => capacity / (1 + random.below(9)),
                2..5 if is_wide => random.below(capacity / 3 + 1),
                5 if is_wide => *random.pick(&[capacity + 1, u64::MAX, 1 << 53]),
                _ if random.one_in(50) => random.below(1 << 40),
                _ => random.below(4),
            };
            // A pair that is named twice watches both times or neither.
            let twin = charges.iter().find(|charge| charge.limit == limit && charge.key == key);
            let shadow = twin.map_or_else(|| random.one_in(8), |twin| twin.shadow);
            charges.push(StoredCharge {
                limit,
                key,
                cost: super::cost(units.saturating_add(u64::from(!is_wide)).max(1)),
                shadow,
            });
        }
        charges
    }

    async fn charge(&mut self, held: bool) -> Result<(), String> {
        let mut charges = Self::charges(&mut self.random, self.limits, self.kind);
        let hold = held.then(|| {
            let ttl =
                if self.random.one_in(3) { Micros::new(self.random.below(3_000_000)) } else { FOR_LONG };
            // Now and then a name that was used before: the call was sent again, or another call by mistake.
            let again = self.holds.last().filter(|_| self.random.one_in(8)).map(|(id, ..)| *id);
            // A shadow limit that took nothing says nothing of its key, on some stores.
            let is_any_shadow = charges.iter().chain(&self.last_held).any(|charge| charge.shadow);
            if again.is_some() && (is_any_shadow || !self.random.one_in(4)) {
                charges.clone_from(&self.last_held);
            }
            Hold { id: again.unwrap_or_else(ChargeId::random), ttl }
        });
        if self.model.is_id_taken(&charges, hold, self.clock.now()) {
            return match self.subject.store.charge(&charges, hold).await {
                Err(error) if error.is_invalid() => Ok(()),
                got => Err(format!("charge {charges:?} by the id of another charge: {got:?}")),
            };
        }
        let expected = self.model.charge(&charges, hold, self.clock.now());
        let got = self.subject.store.charge(&charges, hold).await;
        let got = got.map_err(|error| format!("charge {charges:?}: {error}"))?;
        if expected.allowed {
            self.admitted += 1;
            // What a store says of a hold on nothing is left to it: all limits only watched, and refused.
            let now = self.clock.now();
            let held = hold.filter(|hold| self.model.is_held(hold.id, now));
            if let Some(not_held) = hold.filter(|_| held.is_none()) {
                self.holds.retain(|(id, ..)| *id != not_held.id);
            }
            if held.is_some() {
                self.last_held.clone_from(&charges);
            }
            self.holds.extend(held.map(|hold| (hold.id, charges[0].cost.get(), charges.len())));
        } else {
            self.denied += 1;
        }
        equal("charge", &(charges, hold), &expected, &got)
    }

    async fn peek(&mut self) -> Result<(), String> {
        let charges = Self::charges(&mut self.random, self.limits, self.kind);
        let expected = self.model.peek(&charges, self.clock.now());
        let got = self.subject.store.peek(&charges).await;
        let got = got.map_err(|error| format!("peek {charges:?}: {error}"))?;
        equal("peek", &charges, &expected, &got)
    }

    /// Settles one of the last few holds: mostly once, at times again, at times one that never was.
    async fn settle(&mut self) -> Result<(), String> {
        let recent = self.holds.len().saturating_sub(6);
        let (id, reserved, charges) = match &self.holds[recent..] {
            [] => (ChargeId::random(), 1, 1),
            _ if self.random.one_in(20) => (ChargeId::random(), 1, 1),
            holds => *self.random.pick(holds),
        };
        let settlement = match self.random.below(10) {
            0 if self.kind == Kind::Wide => {
                Settlement::Actual(*self.random.pick(&[u64::MAX, (1 << 53) - 1, 1 << 52]))
            }
            1 | 2 if self.kind == Kind::Wide => {
                Settlement::Actual(self.random.below(reserved.saturating_mul(2).max(1)))
            }
            0..3 => Settlement::Actual(self.random.below(2 * reserved.min(8))),
            3 => Settlement::Named(vec![(self.random.pick(self.limits).name.clone(), self.random.below(5))]),
            4 => Settlement::Release,
            5 => Settlement::Cancel,
            6 | 7 => {
                // Mostly as many as there are charges.
                let count = charges + usize::from(self.random.one_in(8));
                let most = if self.kind == Kind::Wide { reserved.saturating_mul(2).max(1) } else { 8 };
                Settlement::Each((0..count).map(|_| self.random.below(most)).collect())
            }
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

    /// What it comes to, the calls that follow tell.
    async fn refund(&mut self) -> Result<(), String> {
        let charges = Self::charges(&mut self.random, self.limits, self.kind);
        self.model.refund(&charges, self.clock.now());
        self.subject.store.refund(&charges).await.map_err(|error| format!("refund {charges:?}: {error}"))
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
