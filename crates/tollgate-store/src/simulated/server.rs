//! A virtual server: a memory store that carries out calls from a virtual network.
//!
//! A server uses the time that comes with each call, which is the time of its own clock: a time that goes back is ignored. A call
//! that arrives after its deadline changes nothing. Two servers that carry out the same calls at the same times have the same
//! state, which is how a simulation makes a replica.

use std::fmt;

use smallvec::SmallVec;

use crate::{
    ChargeId, Charged, Cost, Hold, ManualClock, MemoryCharge, MemoryLimit, MemoryOptions, MemoryStore,
    Micros, Settled, Settlement, StoreError, StoredCharge, StoredLimit,
};

/// A call to a server.
#[derive(Clone, Debug)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The time of the server's clock after which it is to do nothing.
    pub not_after: Micros,
}

/// The operations of a server.
#[derive(Clone)]
pub enum Operation {
    /// Charges each key separately.
    Each {
        /// Under which limit.
        limit: StoredLimit,
        /// How much each.
        cost: Cost,
        /// Whether the limit is in shadow mode.
        shadow: bool,
        /// The keys.
        keys: Vec<String>,
    },
    /// Charges all, or none.
    Charge {
        /// The charges.
        charges: Vec<OwnedCharge>,
        /// Whether it is remembered.
        hold: Option<Hold>,
    },
    /// Answers as a charge would.
    Peek(Vec<OwnedCharge>),
    /// Settles a held charge.
    Settle(ChargeId, Settlement),
    /// Gives back.
    Refund(Vec<OwnedCharge>),
    /// Forgets a key.
    Forget(OwnedCharge),
    /// Shows its clock: a ping, and how its clock is measured.
    Time,
}

/// Omits the keys, which must not appear in logs.
impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Each { .. } => "Each",
            Operation::Charge { .. } => "Charge",
            Operation::Peek(_) => "Peek",
            Operation::Settle(..) => "Settle",
            Operation::Refund(_) => "Refund",
            Operation::Forget(_) => "Forget",
            Operation::Time => "Time",
        })
    }
}

/// A [`StoredCharge`] that can be sent.
#[derive(Clone)]
pub struct OwnedCharge {
    /// Which limit.
    pub limit: StoredLimit,
    /// The key.
    pub key: String,
    /// How much.
    pub cost: Cost,
    /// Whether the limit is in shadow mode.
    pub shadow: bool,
}

impl OwnedCharge {
    /// A copy.
    pub fn of(charge: &StoredCharge<'_>) -> OwnedCharge {
        let StoredCharge { limit, key, cost, shadow } = *charge;
        OwnedCharge { limit: limit.clone(), key: key.to_owned(), cost, shadow }
    }
}

/// Omits the key, which must not appear in logs.
impl fmt::Debug for OwnedCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedCharge")
            .field("limit", &self.limit)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}

/// The reply of a server.
#[derive(Debug)]
pub struct Reply {
    /// What its clock showed.
    pub now: Micros,
    /// Which start of the server it is: another number after it was replaced.
    pub run: u64,
    /// The result of the call.
    pub answer: Result<Answer, StoreError>,
}

/// The result of a call.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are charges")]
pub enum Answer {
    /// Of each charge.
    Each(Vec<Charged>),
    /// Of a charge or a peek.
    Charged(Charged),
    /// Of a settlement.
    Settled(Settled),
    /// A refund was carried out.
    Refunded,
    /// Whether there was something to forget.
    Forgotten(bool),
    /// Nothing but the time.
    Time,
    /// The call came too late, and nothing was done.
    Late,
}

/// A virtual server: see the [module](super).
#[derive(Debug)]
pub struct SimulatedServer {
    hands: ManualClock,
    store: MemoryStore,
    run: u64,
}

impl SimulatedServer {
    /// An empty server whose clock shows `now`. `run` distinguishes its starts.
    pub fn new(now: Micros, run: u64) -> SimulatedServer {
        let hands = ManualClock::at(now);
        let options = MemoryOptions { clock: hands.clock(), sweep_every: None, ..MemoryOptions::default() };
        SimulatedServer { store: MemoryStore::new(options), hands, run }
    }

    /// Its counters.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// Carries a call out while its clock shows `now`, unless it comes too late.
    pub fn carry_out(&self, call: &Call, now: Micros) -> Reply {
        let answer = match now > call.not_after {
            true => Ok(Answer::Late),
            false => self.replicate(&call.operation, now),
        };
        Reply { now, run: self.run, answer }
    }

    /// Does what another server did when its clock showed `now`.
    pub fn replicate(&self, operation: &Operation, now: Micros) -> Result<Answer, StoreError> {
        self.hands.set(now);
        match operation {
            Operation::Each { limit, cost, shadow, keys } => {
                let limit = self.store.open(limit);
                let charge = |key| MemoryCharge { limit: &limit, key, cost: *cost, shadow: *shadow };
                let charged = keys.iter().map(|key| self.store.charge_all(&[charge(key)], None));
                Ok(Answer::Each(charged.collect::<Result<_, _>>()?))
            }
            Operation::Charge { charges, hold } => {
                self.with(charges, |charges| self.store.charge_all(charges, *hold)).map(Answer::Charged)
            }
            Operation::Peek(charges) => {
                Ok(Answer::Charged(self.with(charges, |charges| self.store.peek_all(charges))))
            }
            Operation::Settle(id, settlement) => self.store.settle(*id, settlement).map(Answer::Settled),
            Operation::Refund(charges) => {
                self.with(charges, |charges| {
                    for charge in charges {
                        charge.limit.refund(charge.key, charge.cost);
                    }
                });
                Ok(Answer::Refunded)
            }
            Operation::Forget(charge) => {
                Ok(Answer::Forgotten(self.store.open(&charge.limit).forget(&charge.key)))
            }
            Operation::Time => Ok(Answer::Time),
        }
    }

    fn with<R>(&self, charges: &[OwnedCharge], run: impl FnOnce(&[MemoryCharge<'_>]) -> R) -> R {
        let limits: SmallVec<[MemoryLimit; 4]> =
            charges.iter().map(|charge| self.store.open(&charge.limit)).collect();
        let charges: SmallVec<[MemoryCharge<'_>; 4]> = (charges.iter().zip(&limits))
            .map(|(charge, limit)| MemoryCharge {
                limit,
                key: &charge.key,
                cost: charge.cost,
                shadow: charge.shadow,
            })
            .collect();
        run(&charges)
    }
}
