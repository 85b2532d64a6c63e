//! A server of the virtual store: a primary, a replica that follows it some time behind, and a queue before both.
//!
//! The primary takes calls one after the other, as Redis does, and each takes it some microseconds. A replica does what its primary did,
//! some time later, at the primary's times. When the primary dies, what the replica has not done by then is lost.

use tollgate_store::Micros;
use tollgate_store::simulated::{Answer, Call, Operation, Reply, SimulatedServer};

use crate::virtual_time::START;

/// What a call takes the server, and what each charge of it takes: about what docs/benchmarks.md has for Redis.
const CALL_US: u64 = 2;
const CHARGE_US: u64 = 4;

/// What the clock of a new process shows until its first call: before anything that its own clock may show.
const LONG_AGO: Micros = Micros::new(START.get() - 3_600_000_000);

/// A charge that a server admitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    pub(crate) key: u64,
    pub(crate) cost: u64,
    /// The true time.
    pub(crate) at_us: u64,
    /// The time that the server decided by.
    pub(crate) store_us: u64,
}

/// One server process and its state.
pub(crate) struct Process {
    server: SimulatedServer,
    /// How far its clock is ahead of the true time.
    ahead_us: i64,
    /// The latest time that it decided by.
    seen_us: u64,
    /// All that changed its state, its own charges and those of its primary.
    pub(crate) held: Vec<Admission>,
}

impl Process {
    fn new(now: Micros, run: u64, ahead_us: i64) -> Process {
        Process { server: SimulatedServer::new(now, run), ahead_us, seen_us: 0, held: Vec::new() }
    }

    fn clock(&self, now_us: u64) -> Micros {
        Micros::new(now_us.saturating_add_signed(self.ahead_us))
    }

    fn note(&mut self, operation: &Operation, answer: &Answer, at_us: u64, clock: Micros) -> Vec<Admission> {
        self.seen_us = self.seen_us.max(clock.get());
        let admissions = admissions(operation, answer, at_us, self.seen_us);
        self.held.extend(&admissions);
        admissions
    }
}

/// One primary of the store, whichever process it is at the time.
pub(crate) struct Server {
    pub(crate) region: usize,
    primary: Process,
    /// While a region has been cut off with the old primary.
    split: Option<(usize, Process)>,
    /// How much the old primary held when they were split.
    held_at_split: usize,
    /// What was done since the beginning and is not lost: the time by the clock that decided, the true time, and what.
    history: Vec<(Micros, u64, Operation)>,
    /// Processes that are gone, for the checks.
    pub(crate) gone: Vec<Process>,
    pub(crate) is_down: bool,
    /// Counts what breaks connections: a call that began before has no reply.
    pub(crate) epoch: u64,
    busy_until_us: u64,
    runs: u64,
    /// All that any process of it admitted, as a primary.
    pub(crate) admitted: Vec<Admission>,
    /// How many admissions were lost with a process.
    pub(crate) lost: u64,
}

impl Server {
    pub(crate) fn new(region: usize) -> Server {
        Server {
            region,
            primary: Process::new(LONG_AGO, 1, 0),
            split: None,
            held_at_split: 0,
            history: Vec::new(),
            gone: Vec::new(),
            is_down: false,
            epoch: 0,
            busy_until_us: 0,
            runs: 1,
            admitted: Vec::new(),
            lost: 0,
        }
    }

    /// Takes a call into the queue: until when the server is busy with it.
    pub(crate) fn enqueue(&mut self, call: &Call, now_us: u64) -> u64 {
        let charges = match &call.operation {
            Operation::Each { keys, .. } => keys.len() as u64,
            Operation::Charge { charges, .. } | Operation::Peek(charges) | Operation::Refund(charges) => {
                charges.len() as u64
            }
            Operation::Settle(..) | Operation::Forget(_) => 1,
            Operation::Time => 0,
        };
        self.busy_until_us = self.busy_until_us.max(now_us) + CALL_US + CHARGE_US * charges;
        self.busy_until_us
    }

    /// Carries a call of a region out.
    pub(crate) fn carry_out(&mut self, from: usize, call: &Call, now_us: u64) -> Reply {
        let (process, is_split) = match &mut self.split {
            Some((region, old)) if *region == from => (old, true),
            _ => (&mut self.primary, false),
        };
        let clock = process.clock(now_us);
        let reply = process.server.carry_out(call, clock);
        if let Ok(answer) = &reply.answer
            && !matches!(answer, Answer::Late | Answer::Time)
        {
            let admissions = process.note(&call.operation, answer, now_us, clock);
            self.admitted.extend(admissions);
            if !is_split {
                self.history.push((clock, now_us, call.operation.clone()));
            }
        }
        reply
    }

    /// A process that did what is in the history up to a true time; the rest is lost.
    fn replica(&mut self, up_to_us: u64, ahead_us: i64) -> Process {
        self.runs += 1;
        let mut process = Process::new(LONG_AGO, self.runs, ahead_us);
        let known = self.history.partition_point(|(_, at_us, _)| *at_us <= up_to_us);
        self.history.truncate(known);
        for (clock, at_us, operation) in &self.history {
            if let Ok(answer) = process.server.replicate(operation, *clock) {
                process.note(operation, &answer, *at_us, *clock);
            }
        }
        process
    }

    fn replace_primary(&mut self, process: Process) -> Process {
        let old = std::mem::replace(&mut self.primary, process);
        self.lost += (old.held.len() - self.primary.held.len()) as u64;
        old
    }

    /// The primary dies.
    pub(crate) fn die(&mut self) {
        self.is_down = true;
        self.epoch += 1;
    }

    /// It answers again, as it was.
    pub(crate) fn recover(&mut self, now_us: u64) {
        self.is_down = false;
        self.epoch += 1;
        self.busy_until_us = now_us;
    }

    /// Its replica, which had done what was done up to a true time, takes its place.
    pub(crate) fn fail_over(&mut self, up_to_us: u64, ahead_us: i64, now_us: u64) {
        let process = self.replica(up_to_us, ahead_us);
        let old = self.replace_primary(process);
        self.gone.push(old);
        self.recover(now_us);
    }

    /// Its replica takes its place for all regions but one.
    pub(crate) fn split(&mut self, region: usize, now_us: u64) {
        let process = self.replica(now_us, self.primary.ahead_us);
        let old = self.replace_primary(process);
        self.held_at_split = old.held.len();
        self.split = Some((region, old));
        self.epoch += 1;
    }

    /// The old primary is gone, and what it charged meanwhile.
    pub(crate) fn join(&mut self) {
        if let Some((_, old)) = self.split.take() {
            self.lost += (old.held.len() - self.held_at_split) as u64;
            self.gone.push(old);
            self.epoch += 1;
        }
    }

    pub(crate) fn step_clock(&mut self, by_us: i64) {
        self.primary.ahead_us += by_us;
    }

    /// Forgets everything.
    pub(crate) fn forget(&mut self) {
        self.history.clear();
        let process = self.replica(0, self.primary.ahead_us);
        let old = self.replace_primary(process);
        self.gone.push(old);
    }

    /// All processes that ever were, for the checks.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &Process> {
        self.gone.iter().chain(self.split.as_ref().map(|(_, old)| old)).chain([&self.primary])
    }
}

/// What an operation admitted.
fn admissions(operation: &Operation, answer: &Answer, at_us: u64, store_us: u64) -> Vec<Admission> {
    let admission = |key: &str, cost: u64| Admission { key: key_number(key), cost, at_us, store_us };
    match (operation, answer) {
        (Operation::Each { keys, cost, .. }, Answer::Each(charged)) => {
            let admitted = keys.iter().zip(charged).filter(|(_, charged)| charged.allowed);
            admitted.map(|(key, _)| admission(key, cost.get())).collect()
        }
        (Operation::Charge { charges, .. }, Answer::Charged(charged)) if charged.allowed => {
            charges.iter().map(|charge| admission(&charge.key, charge.cost.get())).collect()
        }
        _ => Vec::new(),
    }
}

/// The name of a key in the simulation, and its number.
pub(crate) fn key_name(number: usize) -> String {
    format!("user:{number}")
}

pub(crate) fn key_number(name: &str) -> u64 {
    name.rsplit(':').next().and_then(|digits| digits.parse().ok()).unwrap_or(u64::MAX)
}
