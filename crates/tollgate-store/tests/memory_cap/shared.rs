//! No key ever gets more than its limit, wherever it is remembered: random lives of a few keys in a store that has room for
//! fewer, so that keys come and go between a state of their own and the one that they share.
//!
//! Beside the store, each key has a state of its own in the kernel that is reported of everything the key was admitted for, settled
//! and forgotten, and of nothing else. What the store admits must fit there, too: a key that shares is held to more than its
//! own charges, never to less. The windows of a fixed window that begin at the first charge are another matter: a key that
//! shares joins windows that others opened. Its bound is that of the strategy: at most twice the limit in any span of a window.

use std::collections::HashMap;
use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tollgate_kernel::{Align, State, Taken};
use tollgate_store::{
    ChargeId, Cost, Hold, Limit, ManualClock, MemoryCharge, MemoryLimit, MemoryStore, Micros, Outcome,
    Settled, Settlement, StoredLimit, WhenFull,
};

use crate::{SECOND, START, limits, store};

const KINDS: usize = 8;
const KEYS: usize = 4;
const CAPACITY: u64 = 4;
const SPAN: Micros = SECOND;

#[derive(Clone)]
struct Life {
    when_full: WhenFull,
    cap: usize,
    /// Which of the kinds of limits it is about; each step picks among them.
    kinds: Vec<usize>,
    steps: Vec<(Micros, Step)>,
}

#[derive(Clone, Debug)]
enum Step {
    /// What is asked for together, and how long it can be settled.
    Charge(Vec<Ask>, Option<Micros>),
    /// The last hold but so many.
    Settle(usize, Settlement),
    Forget(usize, usize),
    Sweep,
}

#[derive(Clone, Copy, Debug)]
struct Ask {
    kind: usize,
    key: usize,
    cost: u64,
    shadow: bool,
}

/// A life prints as one line for each step, at the time since the start.
impl fmt::Debug for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, room for {}, limits {:?}", self.when_full, self.cap, self.kinds)?;
        let mut at = Micros::ZERO;
        for (gap, step) in &self.steps {
            at = at.saturating_add(*gap);
            writeln!(f, "at {at}  {step:?}")?;
        }
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = (Micros, Step)> {
    let quarter = SPAN.get() / 4;
    let gap = prop_oneof![
        8 => Just(0),
        2 => 1..quarter,
        3 => Just(quarter),
        1 => Just(4 * quarter - 1),
        1 => Just(4 * quarter),
        1 => quarter..12 * quarter,
    ];
    let cost = prop_oneof![Just(1), Just(CAPACITY), 1..=CAPACITY];
    let ask = (0..3usize, 0..KEYS, cost, prop::bool::weighted(0.1))
        .prop_map(|(kind, key, cost, shadow)| Ask { kind, key, cost, shadow });
    let ttl = prop_oneof![3 => Just(None), 1 => Just(Some(SPAN)), 1 => Just(Some(Micros::from_secs(3)))];
    let settlement = prop_oneof![
        2 => (0..3 * CAPACITY).prop_map(Settlement::Actual),
        1 => Just(Settlement::Cancel),
        1 => Just(Settlement::Renew),
    ];
    let step = prop_oneof![
        12 => (vec(ask.clone(), 1..=1), ttl.clone()).prop_map(|(asked, ttl)| Step::Charge(asked, ttl)),
        2 => (vec(ask, 2..=3), ttl).prop_map(|(asked, ttl)| Step::Charge(asked, ttl)),
        4 => (0..4usize, settlement).prop_map(|(back, settlement)| Step::Settle(back, settlement)),
        1 => (0..3usize, 0..KEYS).prop_map(|(kind, key)| Step::Forget(kind, key)),
        4 => Just(Step::Sweep),
    ];
    (gap.prop_map(Micros::new), step)
}

fn lives(kinds: impl Strategy<Value = Vec<usize>>) -> impl Strategy<Value = Life> {
    let when_full = prop_oneof![4 => Just(WhenFull::Share), 1 => Just(WhenFull::Deny)];
    let cap = prop_oneof![4 => 0..=3usize, 1 => 4..=8usize];
    (when_full, cap, kinds, vec(steps(), 1..120)).prop_map(|(when_full, cap, kinds, steps)| Life {
        when_full,
        cap,
        kinds,
        steps,
    })
}

#[test]
fn no_key_gets_more_than_its_limit_wherever_it_is_remembered() {
    for kind in 0..KINDS {
        check(lives(Just(vec![kind])));
    }
    check(lives(vec(0..KINDS, 2..=3)));
}

fn check(lives: impl Strategy<Value = Life>) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 2_500;
    }
    if let Err(failure) = TestRunner::new(config).run(&lives, |life| live(&life)) {
        panic!("{failure}");
    }
}

/// Lives that went wrong once, reported as what is charged when; `live` checks each of them.
#[test]
fn lives_that_went_wrong_once() {
    let ask = |key, cost| vec![Ask { kind: 0, key, cost, shadow: false }];
    let charge = |key, cost| Step::Charge(ask(key, cost), None);
    let reserve = |key, cost| Step::Charge(ask(key, cost), Some(Micros::from_secs(3)));
    let actual = |cost| Step::Settle(0, Settlement::Actual(cost));
    let of =
        |name: &str| limits(CAPACITY, SPAN).iter().position(|limit| limit.name == name).expect("a limit");
    let lives = [
        // A window of its own, then the end of one that another key had opened, and then the next: three within one length.
        (
            1,
            of("fixed"),
            vec![
                (0, charge(0, 1)),
                (500, charge(1, 1)),
                (900, charge(0, 3)),
                (1_000, Step::Sweep),
                (1_000, charge(2, 1)),
                (1_000, charge(0, 3)),
                (1_500, charge(0, 4)),
            ],
        ),
        // What one key reserved long ago in the shared state was given back out of what another had used since.
        (
            2,
            of("token"),
            vec![
                (0, charge(3, 4)),
                (0, reserve(0, 4)),
                (900, charge(3, 3)),
                (1_000, charge(1, 4)),
                (1_000, actual(0)),
                (1_000, charge(1, 4)),
            ],
        ),
        // A debt from the shared state stayed there when the key had found room of its own.
        (
            2,
            of("clock"),
            vec![
                (0, charge(3, 4)),
                (0, reserve(0, 1)),
                (0, Step::Forget(0, 3)),
                (0, charge(0, 1)),
                (0, actual(9)),
                (0, charge(0, 1)),
            ],
        ),
        // A debt that came after the key was forgotten gave it a state of its own, without what it had been charged since.
        (
            2,
            of("clock"),
            vec![
                (0, reserve(0, 1)),
                (1_000, Step::Sweep),
                (1_000, charge(1, 4)),
                (1_000, charge(0, 4)),
                (1_000, actual(2)),
                (1_000, charge(0, 3)),
            ],
        ),
    ];
    for (cap, kind, steps) in lives {
        let mut now = 0u64;
        let since_last = |(at, step): (u64, Step)| {
            let gap = Micros::from_millis(at - now);
            now = at;
            (gap, step)
        };
        let steps = steps.into_iter().map(since_last).collect();
        let life = Life { when_full: WhenFull::Share, cap, kinds: vec![kind], steps };
        live(&life).unwrap_or_else(|error| panic!("{error}\n{life:?}"));
    }
}

/// What one key was admitted for under one limit.
struct Witness {
    limit: Limit,
    state: State,
    admitted: Vec<Admission>,
}

struct Admission {
    hold: Option<ChargeId>,
    at: Micros,
    cost: u64,
}

impl Witness {
    fn charge(&mut self, cost: u64, hold: Option<ChargeId>, now: Micros) -> Result<Micros, TestCaseError> {
        self.admitted.push(Admission { hold, at: now, cost });
        let units = Cost::new(cost).expect("a cost");
        if let Limit::FixedWindow(window) = self.limit
            && window.align() == Align::First
        {
            self.within_two_windows(window.window(), window.limit())?;
            return Ok(now);
        }
        let fits = match (self.limit, &mut self.state) {
            (Limit::Concurrency(limit), State::Leases(leases)) => {
                limit.acquire(leases, hold.map_or(0, ChargeId::get), units, now).allowed
            }
            (limit, state) => limit.charge(state, units, now).allowed,
        };
        prop_assert!(fits, "admitted {cost} more at {now}, on top of {:?}", self.state);
        Ok(match self.limit {
            Limit::Concurrency(limit) => limit.end(now),
            limit => limit.charged_at(&self.state, now),
        })
    }

    fn within_two_windows(&self, window: Micros, limit: u64) -> TestCaseResult {
        for first in &self.admitted {
            let end = first.at.saturating_add(window);
            let within = self.admitted.iter().filter(|one| first.at <= one.at && one.at < end);
            let sum: u64 = within.map(|one| one.cost).sum();
            prop_assert!(sum <= 2 * limit, "{sum} within a window from {}", first.at);
        }
        Ok(())
    }

    fn settle(&mut self, held: &HeldPart, id: ChargeId, actual: u64, now: Micros) {
        let admitted = self.admitted.iter_mut().find(|one| one.hold == Some(id));
        let (reserved, taken) = (held.cost, Taken { cost: held.cost, at: held.charged_at });
        if let Some(admitted) = admitted {
            admitted.cost = admitted.cost.min(actual);
        }
        match (self.limit, &mut self.state) {
            (Limit::Concurrency(limit), State::Leases(leases)) => {
                limit.release(leases, id.get(), held.charged_at, now);
            }
            (limit, state) if actual < reserved => limit.give_back(state, taken, reserved - actual, now),
            (limit, state) => limit.debit(state, actual - reserved, now),
        }
    }
}

#[derive(Clone)]
struct HeldPart {
    kind: usize,
    key: usize,
    cost: u64,
    /// Of a lease, when it ends.
    charged_at: Micros,
}

struct World {
    clock: ManualClock,
    store: MemoryStore,
    limits: Vec<MemoryLimit>,
    witnesses: HashMap<(usize, usize), Witness>,
    holds: Vec<(ChargeId, Vec<HeldPart>)>,
    /// Debts are never refused, so they may take more room than there is: for a key, and for an entry.
    over: usize,
}

fn live(life: &Life) -> TestCaseResult {
    let clock = ManualClock::at(START);
    let store = store(&clock, life.cap, life.when_full);
    let stored = limits(CAPACITY, SPAN);
    let limits = stored.iter().map(|limit| store.open(limit)).collect();
    let mut world = World { clock, store, limits, witnesses: HashMap::new(), holds: Vec::new(), over: 0 };
    for (kind, StoredLimit { limit, .. }) in stored.iter().enumerate() {
        for key in 0..KEYS {
            let witness = Witness { limit: *limit, state: limit.fresh(), admitted: Vec::new() };
            world.witnesses.insert((kind, key), witness);
        }
    }
    for (gap, step) in &life.steps {
        world.clock.advance(*gap);
        world.step(&life.kinds, step)?;
        let (keys, used) = (world.store.keys(), world.store.used());
        let most = life.cap + world.over;
        prop_assert!(used <= most && keys <= most, "{keys} keys, {used} used");
    }
    world.clock.advance(Micros::from_secs(100));
    world.store.sweep();
    prop_assert_eq!((world.store.keys(), world.store.used()), (0, 0), "all is forgotten in the end");
    Ok(())
}

impl World {
    fn step(&mut self, kinds: &[usize], step: &Step) -> TestCaseResult {
        let now = self.clock.now();
        let kind_of = |kind: usize| kinds[kind % kinds.len()];
        match step {
            Step::Charge(asked, ttl) => {
                let asked: Vec<Ask> =
                    asked.iter().map(|ask| Ask { kind: kind_of(ask.kind), ..*ask }).collect();
                self.charge(&asked, *ttl, now)?;
            }
            Step::Settle(back, settlement) => self.settle(*back, settlement, now),
            Step::Forget(kind, key) => {
                let kind = kind_of(*kind);
                self.limits[kind].forget(&key.to_string());
                let witness = self.witnesses.get_mut(&(kind, *key)).expect("a witness");
                witness.state = witness.limit.fresh();
                witness.admitted.clear();
            }
            Step::Sweep => {
                self.store.sweep();
            }
        }
        Ok(())
    }

    fn charge(&mut self, asked: &[Ask], ttl: Option<Micros>, now: Micros) -> TestCaseResult {
        let hold = ttl.map(|ttl| Hold { id: ChargeId::random(), ttl });
        let Some((allowed, outcomes)) = self.ask(asked, hold) else { return Ok(()) };
        let fits = asked.iter().zip(&outcomes).all(|(ask, outcome)| ask.shadow || outcome.allowed);
        prop_assert_eq!(allowed, fits, "{:?} {:?}", asked, outcomes);
        if !allowed {
            return Ok(());
        }
        let mut parts: Vec<HeldPart> = Vec::new();
        for (ask, _) in asked.iter().zip(&outcomes).filter(|(_, outcome)| outcome.allowed) {
            match parts.iter_mut().find(|part| (part.kind, part.key) == (ask.kind, ask.key)) {
                Some(part) => part.cost += ask.cost,
                None => {
                    parts.push(HeldPart { kind: ask.kind, key: ask.key, cost: ask.cost, charged_at: now });
                }
            }
        }
        for part in &mut parts {
            let witness = self.witnesses.get_mut(&(part.kind, part.key)).expect("a witness");
            part.charged_at = witness.charge(part.cost, hold.map(|hold| hold.id), now)?;
        }
        self.holds.extend(hold.map(|hold| (hold.id, parts)));
        Ok(())
    }

    /// What the store says; nothing if it has no room for the reservation, and then nothing was charged.
    fn ask(&self, asked: &[Ask], hold: Option<Hold>) -> Option<(bool, Vec<Outcome>)> {
        let keys: Vec<String> = asked.iter().map(|ask| ask.key.to_string()).collect();
        let items: Vec<MemoryCharge<'_>> = (asked.iter().zip(&keys))
            .map(|(ask, key)| MemoryCharge {
                limit: &self.limits[ask.kind],
                key,
                cost: Cost::new(ask.cost).expect("a cost"),
                shadow: ask.shadow,
            })
            .collect();
        if let ([one], None) = (&items[..], hold) {
            let outcome = one.limit.charge(one.key, one.cost);
            return Some((outcome.allowed || one.shadow, vec![outcome]));
        }
        let charged = self.store.charge_all(&items, hold).ok()?;
        Some((charged.allowed, charged.outcomes.to_vec()))
    }

    fn settle(&mut self, back: usize, settlement: &Settlement, now: Micros) {
        let Some((id, mut parts)) = self.holds.iter().rev().nth(back).cloned() else { return };
        // One amount for limits that reserved different ones is refused; nothing is settled then.
        let Ok(Settled::Done) = self.store.settle(id, settlement) else { return };
        for part in &mut parts {
            let witness = self.witnesses.get_mut(&(part.kind, part.key)).expect("a witness");
            let actual = match settlement {
                Settlement::Actual(actual) => *actual,
                Settlement::Each(_) | Settlement::Named(_) | Settlement::Release | Settlement::Cancel => 0,
                Settlement::Renew => {
                    if let (Limit::Concurrency(limit), State::Leases(leases)) =
                        (witness.limit, &mut witness.state)
                    {
                        let end = limit.renew(leases, id.get(), part.charged_at, now);
                        part.charged_at = end.unwrap_or(part.charged_at);
                    }
                    continue;
                }
            };
            self.over += 2 * usize::from(actual > part.cost);
            witness.settle(part, id, actual, now);
        }
        let place = self.holds.len() - 1 - back;
        self.holds[place].1 = parts;
    }
}
