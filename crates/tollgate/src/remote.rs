//! A charge whose counters are in a remote store.
//!
//! 1. `remote/denial_cache.rs`: a charge that is known to be denied is answered at once.
//! 2. `remote/breaker.rs`: are the nodes of its keys up?
//! 3. `remote/store_call.rs`: if so, they are called, and their answer is the answer.
//! 4. `remote/fallback.rs`: if a node is down or fails, the fallback answers.
//!
//! An invalid call is the caller's error and counts as no failure of the store. This module calls the store and records its
//! health; it chooses no policy and counts nothing. No call is sent twice unless it has an id: a charge whose answer is lost is
//! cancelled by its id (`remote/in_flight.rs`). `remote/each.rs` charges many by themselves, `remote/settle.rs` ends what is held.
//! Callers are `engine/remote_call.rs` and `engine/settle.rs`.

mod background;
mod breaker;
mod denial_cache;
mod each;
mod fallback;
mod fingerprint;
mod in_flight;
mod numbers;
mod ping;
mod refund;
mod reservations;
mod settle;
mod store_call;
mod tasks;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smallvec::SmallVec;
use tollgate_kernel::{Micros, Outcome};
use tollgate_store::{ChargeId, Charged, Clock, Hold, MemoryOptions, Store, StoredCharge};

use self::background::Runtime;
use self::breaker::Breakers;
use self::denial_cache::{Denials, Sent};
use self::fallback::{Act, FallbackStore};
use self::fingerprint::Seeds;
use self::in_flight::InFlight;
pub(crate) use self::numbers::Numbering;
use self::numbers::Numbers;
use self::reservations::{Reservations, ReservedCharge};
use self::store_call::Missed;
use self::tasks::Tasks;
use crate::error::Error;
use crate::health::{NodeReading, StoreHealth, Tally};
use crate::lease::LostLeases;
use crate::outcome::Source;
use crate::policy::entry::Resolved;
use crate::telemetry::{Observers, Trouble, Watch};
use crate::wait::Lines;

/// Whether a charge may be answered by the denial cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DenialCache {
    Use,
    /// Calls the store even if a denial is cached, because other processes may have given something back, or the charge may have
    /// been admitted before.
    Bypass,
}

impl DenialCache {
    /// For the first try of a charge with this id, if its caller chose one: the store may have admitted it already, and then it
    /// answers as it did.
    pub(crate) fn of(id: Option<ChargeId>) -> DenialCache {
        if id.is_some() { DenialCache::Bypass } else { DenialCache::Use }
    }
}

/// The outcome and source of each charge that has counters, in the order of the charges.
pub(crate) type Answers = SmallVec<[(Outcome, Source); 4]>;

/// The answers to a charge, and the failure of the store, if any.
#[derive(Default)]
pub(crate) struct Answered {
    pub(crate) answers: Answers,
    pub(crate) trouble: Trouble,
}

impl Answered {
    /// By a store.
    pub(crate) fn by_store(outcomes: &[Outcome]) -> Answered {
        let answers = outcomes.iter().map(|outcome| (*outcome, Source::Store)).collect();
        Answered { answers, trouble: Trouble::default() }
    }
}

/// How a charge is known to the store.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) hold: Hold,
    /// Whether the caller will settle it, so that the fallback must remember it too.
    pub(crate) is_held: bool,
    /// Whether the caller chose the id. Then only the caller may cancel the charge.
    pub(crate) is_callers: bool,
}

/// A remote store and its observers.
#[derive(Clone)]
pub(crate) struct Remote {
    observers: Arc<Observers>,
    watch: Arc<Watch>,
    lines: Arc<Lines>,
    lost_leases: Arc<LostLeases>,
    shared: Arc<Shared>,
}

/// The state of this process about the store.
struct Shared {
    store: Arc<dyn Store>,
    clock: Clock,
    seeds: Seeds,
    numbers: Numbers,
    breakers: Breakers,
    denials: Denials,
    fallback: FallbackStore,
    tasks: Tasks,
    reservations: Reservations,
    runtime: Runtime,
    tally: Tally,
    /// Whether the last call failed.
    is_failing: AtomicBool,
}

/// The next step of a charge.
#[expect(clippy::large_enum_variant, reason = "an answer that is known is the case that must be quick")]
pub(crate) enum NextStep {
    Answered(Answered),
    /// Call the store. The value is needed to cache a denial, if that is worthwhile.
    CallStore(Option<Sent>),
}

impl Remote {
    /// The store itself, for calls that no decision depends on.
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.shared.store
    }

    pub(crate) fn new(
        store: Arc<dyn Store>,
        memory: MemoryOptions,
        denial_cache: Micros,
        observers: Arc<Observers>,
        watch: Arc<Watch>,
        lines: Arc<Lines>,
        lost_leases: Arc<LostLeases>,
    ) -> Remote {
        let clock = memory.clock.clone();
        let shared = Shared {
            store,
            seeds: Seeds::random(),
            numbers: Numbers::default(),
            breakers: Breakers::new(clock.clone()),
            denials: Denials::new(denial_cache),
            fallback: FallbackStore::new(memory),
            tasks: Tasks::default(),
            reservations: Reservations::new(),
            runtime: Runtime::current(),
            tally: Tally::default(),
            is_failing: AtomicBool::new(false),
            clock,
        };
        Remote { observers, watch, lines, lost_leases, shared: Arc::new(shared) }
    }

    /// Numbers for the limits of a new policy.
    pub(crate) fn numbering(&self) -> Numbering<'_> {
        self.shared.numbers.begin()
    }

    /// A new policy is active; limits may have new numbers from now on.
    pub(crate) fn renumbered(&self) {
        self.shared.reservations.renumbered();
    }

    /// The health of the store. Reading the health of a store with a node that is down also pings that node, so that it comes
    /// back up without a caller's charge.
    pub(crate) fn health(&self) -> StoreHealth {
        // A ping needs a background task. Without one the ping would be dropped, and the node would stay down for longer.
        let can_ping = || self.shared.store.spawn(Box::pin(async {})).is_none();
        if self.shared.breakers.is_any_down() && can_ping() {
            self.look_after_nodes();
        }
        let nodes = self.shared.store.nodes();
        let nodes: SmallVec<[NodeReading; 4]> =
            nodes.iter().map(|node| self.shared.breakers.of(*node).reading()).collect();
        let mut health = self.shared.tally.health(&nodes, self.shared.breakers.outages());
        health.pending_cancels = self.shared.tasks.cancels() as u64;
        health.abandoned_cancels = self.shared.tasks.abandoned();
        health
    }

    /// How often the store may have lost its counters.
    #[cfg(feature = "telemetry")]
    pub(crate) fn losses_possible(&self) -> u64 {
        self.shared.store.losses_possible()
    }

    /// How long scripts ran inside of the store, if it says so.
    #[cfg(feature = "telemetry")]
    pub(crate) fn script_time(&self) -> Option<tollgate_store::ScriptTime> {
        self.shared.store.script_time()
    }

    /// Answers a charge without the store, if possible. `is_held` says whether it has an id.
    pub(crate) fn next_step(
        &self,
        charges: &[Resolved<'_, '_>],
        is_held: bool,
        cache: DenialCache,
    ) -> NextStep {
        let mut counted = charges.iter().filter(|charge| charge.remote().is_some());
        let (Some(charge), next) = (counted.next(), counted.next()) else {
            // A reservation of nothing is known to the fallback by its id all the same.
            return if is_held { NextStep::CallStore(None) } else { NextStep::Answered(Answered::default()) };
        };
        if next.is_some() || charge.is_shadow() {
            return NextStep::CallStore(None);
        }
        self.next_step_of_one(charge, cache)
    }

    fn next_step_of_one(&self, charge: &Resolved<'_, '_>, cache: DenialCache) -> NextStep {
        let Some((key, stored, remote)) = charge.remote() else {
            return NextStep::Answered(Answered::default());
        };
        if charge.is_shadow() || !self.shared.denials.covers(&stored.limit) {
            return NextStep::CallStore(None);
        }
        let fingerprint = self.shared.seeds.fingerprint(remote.number, key);
        let now = self.shared.clock.now();
        if cache == DenialCache::Bypass {
            return NextStep::CallStore(Some(self.shared.denials.sent(fingerprint, now)));
        }
        match self.shared.denials.find(fingerprint, charge.cost, now) {
            Ok(outcome) => {
                self.shared.tally.answered(Source::DenialCache);
                let answers = [(outcome, Source::DenialCache)].into_iter().collect();
                NextStep::Answered(Answered { answers, trouble: Trouble::default() })
            }
            Err(sent) => NextStep::CallStore(Some(sent)),
        }
    }

    /// Charges all, or none.
    pub(crate) async fn charge(
        &self,
        charges: &[Resolved<'_, '_>],
        identity: Option<Identity>,
        sent: Option<Sent>,
    ) -> Result<Answered, Error> {
        let stored: SmallVec<[StoredCharge<'_>; 4]> =
            charges.iter().filter_map(Resolved::stored_charge).collect();
        let hold = identity.filter(|identity| identity.is_held).map(|identity| identity.hold);
        let sent_at = self.shared.clock.now();
        match self.charge_store(charges, &stored, identity).await {
            Ok(charged) => {
                self.learn(charges, sent, sent_at, &charged);
                let took = |index: usize| charged.outcomes.get(index).is_none_or(|outcome| outcome.allowed);
                self.remember(charges, hold.filter(|_| charged.allowed), took);
                Ok(Answered::by_store(&charged.outcomes))
            }
            Err(missed) => {
                let answered = self.fall_back(charges, Act::Charge(hold), missed)?;
                let is_admitted = answered.answers.iter().all(|(outcome, _)| outcome.allowed);
                self.remember(charges, hold.filter(|_| is_admitted), |_| true);
                Ok(answered)
            }
        }
    }

    /// Remembers the charges of a reservation. `took` says which charges with counters took something.
    fn remember(&self, charges: &[Resolved<'_, '_>], hold: Option<Hold>, took: impl Fn(usize) -> bool) {
        let Some(hold) = hold else { return };
        let counted = charges.iter().filter(|charge| charge.remote().is_some()).enumerate();
        let reserved = counted.map(|(index, charge)| {
            let is_covered =
                charge.remote().is_some_and(|(_, stored, _)| self.shared.denials.covers(&stored.limit));
            let key = self.fingerprint(charge).filter(|_| is_covered && took(index));
            ReservedCharge { name: charge.entry.name, cost: charge.cost.get(), key }
        });
        let lease = in_flight::longest_lease(charges);
        self.shared.reservations.add(hold, reserved.collect(), lease, self.shared.clock.now());
    }

    /// Whether a reservation of this process is a lease.
    pub(crate) fn is_lease(&self, id: ChargeId) -> bool {
        self.shared.reservations.find(id).is_some_and(|known| known.is_lease)
    }

    /// The fingerprint of a charge's key in the denial cache.
    fn fingerprint(&self, charge: &Resolved<'_, '_>) -> Option<u128> {
        charge.remote().map(|(key, _, remote)| self.shared.seeds.fingerprint(remote.number, key))
    }

    async fn charge_store(
        &self,
        charges: &[Resolved<'_, '_>],
        stored: &[StoredCharge<'_>],
        identity: Option<Identity>,
    ) -> Result<Charged, Missed> {
        let hold = identity.map(|identity| identity.hold);
        let own = identity.filter(|identity| !identity.is_callers).map(|identity| identity.hold);
        let in_flight = InFlight::new(self, charges, own);
        let nodes = self.nodes_of(stored, hold);
        let answer = self.call("charge", nodes, |store| store.charge(stored, hold)).await;
        if answer.is_ok() {
            // Still in flight: the caller has not seen the answer.
            self.answered().await;
        }
        // A lost answer counts as no answer.
        if !matches!(&answer, Err(Missed::Failed { error, .. }) if error.is_ambiguous()) {
            in_flight.answered();
        }
        answer
    }

    /// Answers as a charge would, and changes nothing.
    pub(crate) async fn peek(&self, charges: &[Resolved<'_, '_>]) -> Result<Answered, Error> {
        match self.look(charges).await {
            Ok(answered) => Ok(answered),
            Err(missed) => self.fall_back(charges, Act::Peek, missed),
        }
    }

    /// The state of a key: what is left, and whether one more unit would fit. If the store fails, this is an error; there is no
    /// fallback.
    pub(crate) async fn status(&self, charge: &Resolved<'_, '_>) -> Result<Option<Outcome>, Error> {
        let Some(stored) = charge.stored_charge() else { return Ok(None) };
        let nodes = self.nodes_of(&[stored], None);
        let outcome = self.call("peek", nodes, |store| store.status(stored.limit, stored.key)).await;
        let outcome = outcome.map_err(Missed::into_error)?;
        self.answered().await;
        Ok(Some(outcome))
    }

    async fn look(&self, charges: &[Resolved<'_, '_>]) -> Result<Answered, Missed> {
        let stored: SmallVec<[StoredCharge<'_>; 4]> =
            charges.iter().filter_map(Resolved::stored_charge).collect();
        if stored.is_empty() {
            return Ok(Answered::default());
        }
        let nodes = self.nodes_of(&stored, None);
        let charged = self.call("peek", nodes, |store| store.peek(&stored)).await?;
        self.answered().await;
        Ok(Answered::by_store(&charged.outcomes))
    }

    /// The fallback's answer to a failed call, unless the call itself was invalid.
    #[cold]
    fn fall_back(&self, charges: &[Resolved<'_, '_>], act: Act, missed: Missed) -> Result<Answered, Error> {
        if let Missed::Wrong(error) = missed {
            return Err(error.into());
        }
        self.shared.tally.fell_back();
        Ok(self.answer_by_fallback(charges, act, &missed))
    }

    fn answer_by_fallback(&self, charges: &[Resolved<'_, '_>], act: Act, missed: &Missed) -> Answered {
        let now = self.shared.clock.now();
        let last_denial = |charge: &Resolved<'_, '_>| {
            let fingerprint = self.fingerprint(charge)?;
            self.shared.denials.last(fingerprint, charge.cost, now)
        };
        let answers = self.shared.fallback.answer(charges, act, missed.retry_after(), last_denial);
        for (_, source) in &answers {
            self.shared.tally.answered(*source);
        }
        Answered { answers, trouble: missed.trouble() }
    }

    /// Updates the denial cache with the store's answer to a charge.
    fn learn(&self, charges: &[Resolved<'_, '_>], sent: Option<Sent>, sent_at: Micros, charged: &Charged) {
        let counted =
            charges.iter().find_map(|charge| charge.remote().map(|(_, stored, _)| (stored, charge.cost)));
        match (sent, counted, charged.outcomes.first()) {
            (Some(sent), Some((stored, cost)), Some(outcome)) => {
                self.shared.denials.learn(sent, &stored.limit, cost, outcome);
            }
            _ if charged.allowed => self.changed(charges),
            _ => self.note_denials(charges, sent_at, charged),
        }
    }

    /// Notes which limits of a charge have denied it.
    fn note_denials(&self, charges: &[Resolved<'_, '_>], sent_at: Micros, charged: &Charged) {
        let counted = || charges.iter().filter(|charge| charge.remote().is_some());
        for (charge, outcome) in counted().zip(&charged.outcomes).filter(|(_, outcome)| !outcome.allowed) {
            let Some((_, stored, _)) = charge.remote() else { continue };
            let fingerprint = self.fingerprint(charge);
            // If two charges of a call have the same key, neither outcome describes the key by itself.
            let is_only = counted().filter(|other| self.fingerprint(other) == fingerprint).count() == 1;
            if let Some(fingerprint) = fingerprint
                && is_only
                && !charge.is_shadow()
                && self.shared.denials.covers(&stored.limit)
            {
                self.shared.denials.note(fingerprint, sent_at, charge.cost, outcome);
            }
        }
    }

    /// Removes the cached denials of the keys of a charge.
    fn changed(&self, charges: &[Resolved<'_, '_>]) {
        for (key, stored, remote) in charges.iter().filter_map(Resolved::remote) {
            if self.shared.denials.covers(&stored.limit) {
                self.shared.denials.changed(self.shared.seeds.fingerprint(remote.number, key));
            }
        }
    }
}
