//! Many clients and one limiter, in simulated time: the same seed, the same history.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tollgate_testkit::Random;
use tollgate_testkit::history::{Call, History, Outcome, Promises};

/// A limiter of one key. Those that decide in one step answer `check`; those that do not are asked again a moment later.
pub(crate) trait Limiter {
    /// The first step, at a time of the store's clock, for a client.
    fn check(&mut self, now_us: u64, client: u64, cost: u64) -> Step;

    /// The second step of those who did not answer at once.
    fn act(&mut self, _now_us: u64, _client: u64, _cost: u64) -> bool {
        unreachable!("this limiter decides at once")
    }

    /// The state is lost.
    fn lose_state(&mut self) {}
}

pub(crate) enum Step {
    Answer(bool),
    ActLater,
}

/// What is done to the limiter, and by how many.
#[derive(Clone, Copy)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    pub(crate) clients: u64,
    pub(crate) calls: usize,
    /// A client rests up to this long between two calls.
    pub(crate) rest_us: u64,
    pub(crate) max_cost: u64,
    /// How many replies in a thousand are lost.
    pub(crate) lost_per_mille: u16,
    /// What a client does whose reply was lost.
    pub(crate) when_lost: WhenLost,
    /// How many calls in a thousand are carried out this much too late, after their client has given up.
    pub(crate) late: Option<(u16, u64)>,
    /// After how many admissions the state is lost, once.
    pub(crate) lose_state_after: Option<u64>,
    /// How many calls in a thousand are answered this much too late.
    pub(crate) slow: Option<(u16, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenLost {
    GiveUp,
    SendAgain,
}

pub(crate) const DEADLINE_US: u64 = 20_000;

impl Schedule {
    pub(crate) fn new(seed: u64) -> Schedule {
        Schedule {
            seed,
            clients: 8,
            calls: 6000,
            rest_us: 60_000,
            max_cost: 1,
            lost_per_mille: 0,
            when_lost: WhenLost::GiveUp,
            late: None,
            lose_state_after: None,
            slow: None,
        }
    }
}

/// What happened, and what only the simulation knows.
pub(crate) struct Run {
    pub(crate) history: History,
    /// What the store has admitted altogether and not forgotten.
    pub(crate) stored: u64,
    /// Ambiguous calls that did take effect.
    pub(crate) applied_ambiguous: u64,
}

impl Run {
    /// The same, seen by somebody whom the store reported nothing but its answers.
    pub(crate) fn without_store_times(self) -> Run {
        let calls = self.history.calls().iter().cloned();
        let history = calls.map(|call| Call { store_time_us: None, version: None, ..call }).collect();
        Run { history, ..self }
    }

    /// The promises, and the store at rest.
    pub(crate) fn check(&self, promises: Promises) -> tollgate_testkit::history::Report {
        self.history.check(&promises.at_rest(0, self.stored))
    }
}

/// The store's clock is not the clients'.
const STORE_OFFSET_US: u64 = 1_700_000_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Arrive { again: bool },
    Act { again: bool },
    Begin,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at_us: u64,
    client: u64,
    phase: Phase,
    start_us: u64,
    cost: u64,
    fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Answered { slow_us: u64 },
    Lost,
    Late,
}

pub(crate) struct Simulation<'a> {
    schedule: Schedule,
    limiter: &'a mut dyn Limiter,
    random: Random,
    events: BinaryHeap<Reverse<Event>>,
    calls: Vec<Call>,
    version: u64,
    stored: u64,
    applied_ambiguous: u64,
}

pub(crate) fn run(schedule: Schedule, limiter: &mut dyn Limiter) -> Run {
    let random = Random::seeded(schedule.seed);
    let (events, calls) = (BinaryHeap::new(), Vec::new());
    let mut simulation =
        Simulation { schedule, limiter, random, events, calls, version: 0, stored: 0, applied_ambiguous: 0 };
    for client in 0..schedule.clients {
        simulation.begin_later(client, 1);
    }
    while let Some(Reverse(event)) = simulation.events.pop() {
        simulation.step(event);
    }
    let Simulation { calls, stored, applied_ambiguous, .. } = simulation;
    Run { history: calls.into_iter().collect(), stored, applied_ambiguous }
}

impl Simulation<'_> {
    fn push(&mut self, event: Event) {
        self.events.push(Reverse(event));
    }

    fn begin_later(&mut self, client: u64, now_us: u64) {
        let at_us = now_us + 1 + self.random.below(self.schedule.rest_us);
        let fate = Fate::Answered { slow_us: 0 };
        self.push(Event { at_us, client, phase: Phase::Begin, start_us: at_us, cost: 1, fate });
    }

    fn step(&mut self, event: Event) {
        match event.phase {
            Phase::Begin => self.begin(event),
            Phase::Arrive { again } => {
                match self.limiter.check(event.at_us + STORE_OFFSET_US, event.client, event.cost) {
                    Step::Answer(admitted) => self.decided(event, admitted, again),
                    Step::ActLater => {
                        let at_us = event.at_us + 50 + self.random.below(500);
                        self.push(Event { at_us, phase: Phase::Act { again }, ..event });
                    }
                }
            }
            Phase::Act { again } => {
                let admitted = self.limiter.act(event.at_us + STORE_OFFSET_US, event.client, event.cost);
                self.decided(event, admitted, again);
            }
        }
    }

    fn begin(&mut self, event: Event) {
        if self.calls.len() >= self.schedule.calls {
            return;
        }
        let cost = 1 + self.random.below(self.schedule.max_cost);
        let late = self.schedule.late.filter(|(chance, _)| self.random.chance(*chance));
        let slow = self.schedule.slow.filter(|(chance, _)| self.random.chance(*chance));
        let fate = if late.is_some() {
            Fate::Late
        } else if self.random.chance(self.schedule.lost_per_mille) {
            Fate::Lost
        } else {
            Fate::Answered { slow_us: slow.map_or(0, |(_, by_us)| by_us) }
        };
        let way_us = 20 + self.random.below(400) + late.map_or(0, |(_, by_us)| by_us);
        let arrival =
            Event { at_us: event.at_us + way_us, phase: Phase::Arrive { again: false }, cost, fate, ..event };
        self.push(arrival);
        if fate == Fate::Late {
            self.give_up(arrival);
        }
    }

    /// The client waits until its deadline and knows nothing.
    fn give_up(&mut self, event: Event) {
        let end_us = event.start_us + DEADLINE_US;
        self.record(event, Outcome::Ambiguous, end_us, None);
    }

    fn decided(&mut self, event: Event, admitted: bool, again: bool) {
        if admitted {
            self.version += 1;
            self.stored += event.cost;
        }
        let version = self.version;
        match event.fate {
            Fate::Lost if !again && self.schedule.when_lost == WhenLost::SendAgain => {
                let at_us = event.at_us + 1000;
                self.push(Event { at_us, phase: Phase::Arrive { again: true }, ..event });
            }
            Fate::Lost if !again => {
                self.applied_ambiguous += u64::from(admitted);
                self.give_up(event);
            }
            Fate::Late => self.applied_ambiguous += u64::from(admitted),
            Fate::Lost | Fate::Answered { .. } => {
                let slow_us = if let Fate::Answered { slow_us } = event.fate { slow_us } else { 0 };
                let end_us = event.at_us + 20 + self.random.below(400) + slow_us;
                let outcome = if admitted { Outcome::Admitted } else { Outcome::Denied };
                self.record(event, outcome, end_us, admitted.then_some(version));
            }
        }
        if admitted && self.schedule.lose_state_after == Some(self.version) {
            self.schedule.lose_state_after = None;
            (self.version, self.stored) = (0, 0);
            self.limiter.lose_state();
        }
    }

    fn record(&mut self, event: Event, outcome: Outcome, end_us: u64, version: Option<u64>) {
        let definite = matches!(outcome, Outcome::Admitted | Outcome::Denied);
        let store_time_us = definite.then_some(event.at_us + STORE_OFFSET_US);
        let label = Cow::Borrowed(if definite { "store" } else { "fallback_open" });
        let (start_us, cost) = (event.start_us, event.cost);
        self.calls.push(Call { key: 0, start_us, end_us, cost, outcome, version, store_time_us, label });
        self.begin_later(event.client, end_us);
    }
}
