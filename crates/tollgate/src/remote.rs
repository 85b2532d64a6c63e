//! The walk of a charge whose counters are elsewhere.
//!
//! Is it known to be denied (`denials.rs`), or was it paid for already (`slices.rs`)? Then it is answered at once. Are the nodes
//! that hold its keys to be asked at all (`breaker.rs`)? If they answer, that is the answer. If they fail, in whichever way, or
//! are not to be asked, `fallback.rs` answers. A call that was wrong is the caller's error and nobody's failure.
//!
//! This room asks the store and keeps the books on it; no policy is chosen and nothing is counted here. Nothing is sent twice,
//! but for what carries an id: a charge whose answer never came is cancelled by its id (`remote/in_flight.rs`).

mod background;
mod cancels;
mod in_flight;
mod ping;
mod refund;
mod reservations;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};
use tollgate_store::{
    Charged, Clock, Failure, Hold, HoldId, Item, MemoryOptions, Nodes, Settled, Settlement, Store,
    StoreError, StoreFuture, StoredLimit,
};
use tracing::Instrument;

use crate::breaker::{Breakers, NodeReading, Notice, TurnedAway};
use crate::denials::{Denials, Sent};
use crate::error::Error;
use crate::fallback::{Act, Stead};
use crate::fingerprint::Seeds;
use crate::gate::{self, Answered, Away, Resolved};
use crate::health::{StoreChange, StoreHealth, StoreState, Tally};
use crate::numbers::{Numbering, Numbers};
use crate::report::watch::Watch;
use crate::report::{Observers, Source, Trouble};
use crate::slices::{Slices, Taking, Unused};

use cancels::Cancels;
use in_flight::InFlight;
use reservations::Reservations;

/// How long the id of a charge that was waited for is remembered, to cancel it if its answer never comes.
const WAIT_TTL: Micros = Micros::from_secs(10);

/// Whether a charge may be answered by the denial cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DenialCache {
    Use,
    /// The store is asked, because other processes may have given something back.
    Bypass,
}

/// A store elsewhere, and who is told of it.
#[derive(Clone)]
pub(crate) struct Remote {
    observers: Arc<Observers>,
    watch: Arc<Watch>,
    kept: Arc<Kept>,
}

/// All that this process does so as not to need the store. It lasts from one registry to those that continue it.
struct Kept {
    store: Arc<dyn Store>,
    clock: Clock,
    seeds: Seeds,
    numbers: Numbers,
    breakers: Breakers,
    denials: Denials,
    slices: Slices,
    stead: Stead,
    cancels: Cancels,
    reservations: Reservations,
    tally: Tally,
    /// Whether the last call failed.
    is_failing: AtomicBool,
}

/// Why the store did not answer.
enum Missed {
    /// The call was wrong.
    Wrong(StoreError),
    /// It failed in this way, for the first time since it last answered or not.
    Failed { failure: Failure, error: StoreError, is_first: bool },
    /// It is down and was not asked.
    TurnedAway(TurnedAway),
}

impl Missed {
    /// The error for whom nobody can stand in for the store.
    fn into_error(self) -> Error {
        match self {
            Missed::Wrong(error) | Missed::Failed { error, .. } => error.into(),
            Missed::TurnedAway(TurnedAway { failure, retry_after }) => {
                let message = format!("the store is down ({failure}) and not asked again for {retry_after}");
                StoreError::failed(failure, message).into()
            }
        }
    }

    fn trouble(&self) -> Trouble {
        match self {
            Missed::Wrong(_) => Trouble::default(),
            Missed::Failed { failure, error, is_first } => {
                Trouble { failure: Some(*failure), is_ambiguous: error.is_ambiguous(), is_first: *is_first }
            }
            Missed::TurnedAway(away) => Trouble { failure: Some(away.failure), ..Trouble::default() },
        }
    }

    /// When the store is tried next, if that is known.
    fn retry_after(&self) -> Option<Micros> {
        match self {
            Missed::TurnedAway(away) => Some(away.retry_after),
            Missed::Wrong(_) | Missed::Failed { .. } => None,
        }
    }
}

/// How a charge goes on.
enum Way<'a> {
    Answered(Answered),
    Ask(Plan<'a>),
}

/// How the store is asked for a charge that is not answered at once.
struct Plan<'a> {
    /// What to remember its denial by, if that is worth it.
    sent: Option<Sent>,
    slice: Option<(Taking<'a>, Option<Unused>)>,
}

impl Remote {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        memory: MemoryOptions,
        denial_cache: Micros,
        observers: Arc<Observers>,
        watch: Arc<Watch>,
    ) -> Remote {
        let clock = memory.clock.clone();
        let kept = Kept {
            store,
            seeds: Seeds::random(),
            numbers: Numbers::default(),
            breakers: Breakers::new(clock.clone()),
            denials: Denials::new(denial_cache),
            slices: Slices::new(),
            stead: Stead::new(memory),
            cancels: Cancels::default(),
            reservations: Reservations::new(),
            tally: Tally::default(),
            is_failing: AtomicBool::new(false),
            clock,
        };
        Remote { observers, watch, kept: Arc::new(kept) }
    }

    /// The same store, with all that is known of it, for a registry that continues another and may tell others.
    pub(crate) fn continued(&self, observers: Arc<Observers>, watch: Arc<Watch>) -> Remote {
        Remote { observers, watch, kept: self.kept.clone() }
    }

    /// The mode of the store.
    pub(crate) fn mode(&self) -> &'static str {
        self.kept.store.mode()
    }

    /// Numbers for the limits of a registry that is being built.
    pub(crate) fn numbering(&self) -> Numbering<'_> {
        self.kept.numbers.begin()
    }

    /// How long a denial is believed from now on.
    pub(crate) fn set_denial_cache(&self, at_most: Micros) {
        self.kept.denials.set_cap(at_most);
    }

    /// Another registry was built on this store, and limits may have other numbers from now on.
    pub(crate) fn renumbered(&self) {
        self.kept.reservations.renumbered();
    }

    /// How the store fares.
    pub(crate) fn health(&self) -> StoreHealth {
        let nodes = self.kept.store.nodes();
        let nodes: SmallVec<[NodeReading; 4]> =
            nodes.iter().map(|node| self.kept.breakers.of(*node).reading()).collect();
        let mut health = self.kept.tally.health(&nodes, self.kept.breakers.outages());
        health.pending_cancels = self.kept.cancels.count() as u64;
        health.abandoned_cancels = self.kept.cancels.abandoned();
        health
    }

    /// How often the store may have lost what it counted.
    #[cfg(feature = "telemetry")]
    pub(crate) fn losses_possible(&self) -> u64 {
        self.kept.store.losses_possible()
    }

    /// Charges all asks, or none. What has to ask the store is boxed, as the store's own future is, so that whoever calls this
    /// is no larger for it.
    pub(crate) async fn charge(
        &self,
        asks: &[Resolved<'_, '_>],
        hold: Option<Hold>,
    ) -> Result<Answered, Error> {
        match self.at_once(asks, hold, DenialCache::Use) {
            Way::Answered(answered) => Ok(answered),
            Way::Ask(plan) => Box::pin(self.ask(asks, hold, hold, plan)).await,
        }
    }

    /// Charges one ask that is waited for. In the store it carries an id, so that it can be cancelled if the waiter leaves before
    /// the answer or the reply is lost. Every attempt has another id: one that was cancelled stays cancelled.
    pub(crate) async fn charge_waited(
        &self,
        asks: &[Resolved<'_, '_>],
        cache: DenialCache,
    ) -> Result<Answered, Error> {
        match self.at_once(asks, None, cache) {
            Way::Answered(answered) => Ok(answered),
            Way::Ask(plan) => {
                let hold = Hold { id: HoldId::random(), ttl: WAIT_TTL };
                Box::pin(self.ask(asks, None, Some(hold), plan)).await
            }
        }
    }

    /// Answers a charge without asking the store, if that can be done.
    fn at_once(&self, asks: &[Resolved<'_, '_>], hold: Option<Hold>, cache: DenialCache) -> Way<'_> {
        let mut plan = Plan { sent: None, slice: None };
        let mut counted = asks.iter().filter(|ask| ask.away().is_some());
        let (ask, next) = (counted.next(), counted.next());
        let Some((key, stored, away)) = ask.and_then(Resolved::away) else {
            return if hold.is_none() { Way::Answered(Answered::default()) } else { Way::Ask(plan) };
        };
        let Some(ask) = ask.filter(|ask| next.is_none() && !ask.entry.rule.is_shadow()) else {
            return Way::Ask(plan);
        };
        let slice = away.slice.filter(|_| hold.is_none());
        let is_covered = self.kept.denials.covers(&stored.limit);
        if !is_covered && slice.is_none() {
            return Way::Ask(plan);
        }
        let fingerprint = self.kept.seeds.fingerprint(away.number, key);
        let now = self.kept.clock.now();
        if let Some(outcome) = slice.and_then(|_| self.kept.slices.admit(fingerprint, ask.cost, now)) {
            return Way::Answered(self.here(outcome, Source::Slice));
        }
        if is_covered && cache == DenialCache::Bypass {
            plan.sent = Some(self.kept.denials.sent(fingerprint, now));
        } else if is_covered {
            match self.kept.denials.find(fingerprint, ask.cost, now) {
                Ok(outcome) => return Way::Answered(self.here(outcome, Source::DenialCache)),
                Err(sent) => plan.sent = Some(sent),
            }
        }
        plan.slice = slice.and_then(|slice| self.kept.slices.take(fingerprint, slice, ask.cost, now));
        Way::Ask(plan)
    }

    fn here(&self, outcome: Outcome, source: Source) -> Answered {
        self.kept.tally.answered(source);
        Answered { answers: [(outcome, source)].into_iter().collect(), trouble: Trouble::default() }
    }

    /// Asks the store to charge. `hold` is the reservation that the caller gets, `sent_as` what the charge is held as in the store.
    async fn ask(
        &self,
        asks: &[Resolved<'_, '_>],
        hold: Option<Hold>,
        sent_as: Option<Hold>,
        plan: Plan<'_>,
    ) -> Result<Answered, Error> {
        let items = gate::store_items(asks);
        if let ([item], Some((taking, unused))) = (&items[..], plan.slice) {
            match self.take_slice(asks, item, taking, unused).await {
                Ok(Some(outcome)) => {
                    let answers = [(outcome, Source::Store)].into_iter().collect();
                    self.changed(asks);
                    return Ok(Answered { answers, trouble: Trouble::default() });
                }
                // There is less than a slice, and maybe enough for this charge.
                Ok(None) => {}
                Err(missed) => return self.fall_back(asks, Act::Charge(hold), missed),
            }
        }
        match self.charge_store(asks, &items, sent_as).await {
            Ok(charged) => {
                self.learn(asks, plan.sent, &charged);
                self.remember(asks, hold.filter(|_| charged.allowed));
                Ok(Answered::by_store(&charged.outcomes))
            }
            Err(missed) => {
                let answered = self.fall_back(asks, Act::Charge(hold), missed)?;
                let is_admitted = answered.answers.iter().all(|(outcome, _)| outcome.allowed);
                self.remember(asks, hold.filter(|_| is_admitted));
                Ok(answered)
            }
        }
    }

    /// Remembers which keys a reservation charged.
    fn remember(&self, asks: &[Resolved<'_, '_>], hold: Option<Hold>) {
        let Some(hold) = hold else { return };
        let (keys, lease) = (self.fingerprints(asks), in_flight::longest_lease(asks));
        self.kept.reservations.add(hold, keys, lease, self.kept.clock.now());
    }

    /// Whether a reservation of this process is a lease.
    pub(crate) fn is_lease(&self, id: HoldId) -> bool {
        self.kept.reservations.find(id).is_some_and(|known| known.is_lease)
    }

    /// The key of an ask, as the denial cache and the slices know it.
    fn fingerprint(&self, ask: &Resolved<'_, '_>) -> Option<u128> {
        ask.away().map(|(key, _, away)| self.kept.seeds.fingerprint(away.number, key))
    }

    async fn charge_store(
        &self,
        asks: &[Resolved<'_, '_>],
        items: &[Item<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, Missed> {
        let in_flight = InFlight::new(self, asks, hold);
        let nodes = self.nodes_of(items, hold);
        let answer = self.call("charge", nodes, |store| store.charge(items, hold)).await;
        if answer.is_ok() {
            // Still in flight: the caller has not seen the answer.
            self.answered().await;
        }
        // An answer that was lost on the way is as good as none.
        if !matches!(&answer, Err(Missed::Failed { error, .. }) if error.is_ambiguous()) {
            in_flight.answered();
        }
        answer
    }

    /// Answers as a charge would, and changes nothing.
    pub(crate) async fn peek(&self, asks: &[Resolved<'_, '_>]) -> Result<Answered, Error> {
        match self.look(asks).await {
            Ok(answered) => Ok(answered),
            Err(missed) => self.fall_back(asks, Act::Peek, missed),
        }
    }

    /// What the store itself would answer; its failure is an error.
    pub(crate) async fn peek_store(&self, asks: &[Resolved<'_, '_>]) -> Result<Answered, Error> {
        self.look(asks).await.map_err(Missed::into_error)
    }

    async fn look(&self, asks: &[Resolved<'_, '_>]) -> Result<Answered, Missed> {
        let items = gate::store_items(asks);
        if items.is_empty() {
            return Ok(Answered::default());
        }
        let nodes = self.nodes_of(&items, None);
        let charged = self.call("peek", nodes, |store| store.peek(&items)).await?;
        self.answered().await;
        Ok(Answered::by_store(&charged.outcomes))
    }

    /// Charges each of many asks by itself, in as few calls as there are keys for. No two asks of a call are on the same key.
    pub(crate) async fn charge_each(&self, asks: &[Resolved<'_, '_>]) -> Result<Vec<Answered>, Error> {
        let mut answers: Vec<Option<Answered>> = Vec::new();
        let mut open: SmallVec<[(usize, Option<Sent>); 4]> = SmallVec::new();
        for (index, ask) in asks.iter().enumerate() {
            let answered = self.at_once_unsliced(ask);
            open.extend(answered.as_ref().err().map(|sent| (index, *sent)));
            answers.push(answered.ok());
        }
        // What only watches holds nobody up: marked so, each ask of the call stands by itself.
        let items: SmallVec<[Item<'_>; 4]> = open
            .iter()
            .flat_map(|(index, _)| gate::store_items(std::slice::from_ref(&asks[*index])))
            .map(|item| Item { shadow: true, ..item })
            .collect();
        if !items.is_empty() {
            match self.charge_store(asks, &items, None).await {
                Ok(charged) => {
                    for ((index, sent), outcome) in open.iter().zip(&charged.outcomes) {
                        let ask = std::slice::from_ref(&asks[*index]);
                        let outcomes = [*outcome].into_iter().collect();
                        self.learn(ask, *sent, &Charged { allowed: outcome.allowed, outcomes });
                        answers[*index] = Some(Answered::by_store(&[*outcome]));
                    }
                }
                Err(Missed::Wrong(error)) => return Err(error.into()),
                Err(missed) => {
                    self.kept.tally.fell_back();
                    for (index, _) in &open {
                        let ask = std::slice::from_ref(&asks[*index]);
                        answers[*index] = Some(self.in_stead(ask, Act::Charge(None), &missed));
                    }
                }
            }
        }
        Ok(answers.into_iter().map(Option::unwrap_or_default).collect())
    }

    fn at_once_unsliced(&self, ask: &Resolved<'_, '_>) -> Result<Answered, Option<Sent>> {
        let Some((key, stored, away)) = ask.away() else { return Ok(Answered::default()) };
        if ask.entry.rule.is_shadow() || !self.kept.denials.covers(&stored.limit) {
            return Err(None);
        }
        let fingerprint = self.kept.seeds.fingerprint(away.number, key);
        match self.kept.denials.find(fingerprint, ask.cost, self.kept.clock.now()) {
            Ok(outcome) => Ok(self.here(outcome, Source::DenialCache)),
            Err(sent) => Err(Some(sent)),
        }
    }

    /// Settles a held charge, where it was held.
    ///
    /// A charge whose reply was lost may be held twice: here, by the fallback, whose answer counts, and in the store, where it is
    /// cancelled as soon as the store answers. Until then it is settled here and [pending](Settled::Pending).
    pub(crate) async fn settle(
        &self,
        id: HoldId,
        settlement: &Settlement,
        counts_locally: impl Fn(&str) -> bool,
    ) -> Result<Settled, Error> {
        if let Some(settled) = self.kept.stead.settle(id, settlement, counts_locally) {
            return Ok(match settled? {
                Settled::Done if self.kept.cancels.contains(id) => {
                    self.start_cancelling();
                    Settled::Pending
                }
                settled => settled,
            });
        }
        let is_renewal = *settlement == Settlement::Renew;
        let known = self.kept.reservations.find(id).and_then(|known| known.keys);
        // However the call ends, the keys of a reservation may have got something back. Ids that this process did not make
        // end nothing unless the store knows them: anybody can make ids up.
        let ended = known.filter(|_| !is_renewal).map(|keys| self.kept.denials.end(keys));
        let nodes = self.node_of_hold(id);
        let settled = self.call("settle", nodes, |store| store.settle(id, settlement)).await;
        let settled = settled.map_err(Missed::into_error)?;
        match settled {
            Settled::Done if is_renewal => self.kept.reservations.renewed(id, self.kept.clock.now()),
            Settled::Done if ended.is_none() => drop(self.kept.denials.end_all()),
            _ => {}
        }
        if !is_renewal || settled != Settled::Done {
            self.kept.reservations.remove(id);
        }
        self.answered().await;
        Ok(settled)
    }

    /// Forgets a key in the store and, once that has answered, here. If it fails, nothing is forgotten here.
    pub(crate) async fn forget(&self, stored: &StoredLimit, away: &Away, key: &str) -> Result<bool, Error> {
        let fingerprint = self.kept.seeds.fingerprint(away.number, key);
        let _ended = self.kept.denials.end([fingerprint].into_iter().collect());
        let item = Item { limit: stored, key, cost: Cost::ONE, shadow: false };
        let nodes = self.nodes_of(&[item], None);
        let forgotten = self.call("forget", nodes, |store| store.forget(stored, key)).await;
        let forgotten = forgotten.map_err(Missed::into_error)?;
        let was_here = self.kept.stead.forget(away, key);
        self.kept.slices.forget(fingerprint);
        drop(self.kept.denials.end_all());
        self.answered().await;
        Ok(forgotten || was_here)
    }

    /// Gives the unused units of slices back: of those that have ended, or of all. Returns how many slices.
    pub(crate) async fn give_back(&self, which: fn(&Slices, Micros) -> Vec<Unused>) -> Result<usize, Error> {
        let (mut given_back, mut failed) = (0, None);
        for unused in which(&self.kept.slices, self.kept.clock.now()) {
            match self.give_back_one(unused).await {
                Ok(_) => given_back += 1,
                Err(missed) => failed = failed.or(Some(missed)),
            }
        }
        failed.map_or(Ok(given_back), |missed| Err(missed.into_error()))
    }

    async fn give_back_one(&self, unused: Unused) -> Result<Settled, Missed> {
        let _ended = self.kept.denials.end([unused.fingerprint].into_iter().collect());
        let nodes = self.node_of_hold(unused.hold);
        self.call("settle", nodes, |store| {
            Box::pin(async move { store.settle(unused.hold, &Settlement::Actual(unused.used)).await })
        })
        .await
    }

    /// Takes a slice and uses the charge's part of it; `None` if there is less than a slice.
    async fn take_slice(
        &self,
        asks: &[Resolved<'_, '_>],
        item: &Item<'_>,
        taking: Taking<'_>,
        unused: Option<Unused>,
    ) -> Result<Option<Outcome>, Missed> {
        if let Some(unused) = unused {
            // If it does not come back, it is lost: that is what slices may cost.
            let _ = self.give_back_one(unused).await;
        }
        let hold = Hold { id: HoldId::random(), ttl: taking.hold_ttl() };
        let items = [Item { cost: taking.units(), ..*item }];
        // Counted from when it was sent, which is before the store gave it: it ends early rather than late.
        let sent = self.kept.clock.now();
        let charged = self.charge_store(asks, &items, Some(hold)).await?;
        Ok(match charged.outcomes.first() {
            Some(said) if charged.allowed => Some(taking.taken(hold.id, *said, item.cost, sent)),
            said => {
                taking.refused(said.and_then(|said| said.retry_after), sent);
                None
            }
        })
    }

    /// The nodes that a charge asks: those of its keys, and that of its hold.
    fn nodes_of(&self, items: &[Item<'_>], hold: Option<Hold>) -> Nodes {
        let of_items = items.iter().map(|item| self.kept.store.node_of(item));
        let of_hold = hold.map(|hold| self.kept.store.node_of_hold(hold.id));
        let mut nodes = Nodes::new();
        for node in of_items.chain(of_hold) {
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        nodes
    }

    fn node_of_hold(&self, id: HoldId) -> Nodes {
        Nodes::from_slice(&[self.kept.store.node_of_hold(id)])
    }

    /// Sends a call to the store, unless one of the nodes that it asks is down, and notes how that went.
    async fn call<'a, T>(
        &'a self,
        operation: &'static str,
        nodes: Nodes,
        ask: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T>,
    ) -> Result<T, Missed> {
        for node in &nodes {
            // Where the store cannot run a ping beside its callers, one of them waits for it.
            if let Some(ping) = self.ping_if_due(*node) {
                ping.await;
            }
        }
        for node in &nodes {
            self.kept.breakers.of(*node).admit().map_err(Missed::TurnedAway)?;
        }
        self.kept.tally.asked();
        let call = self.watch.store_call(operation);
        let answer = ask(&*self.kept.store).instrument(call.span()).await;
        call.done(&answer);
        match answer {
            Ok(answer) => {
                self.succeeded(&nodes);
                Ok(answer)
            }
            Err(error) => Err(self.failed(&nodes, error)),
        }
    }

    fn succeeded(&self, nodes: &Nodes) {
        if self.kept.is_failing.load(Ordering::Relaxed) {
            self.kept.is_failing.store(false, Ordering::Relaxed);
        }
        nodes.iter().for_each(|node| self.kept.breakers.of(*node).answered());
        self.look_after_nodes();
    }

    #[cold]
    fn failed(&self, nodes: &Nodes, error: StoreError) -> Missed {
        let Some(failure) = error.failure() else {
            // It took an answer to say so.
            nodes.iter().for_each(|node| self.kept.breakers.of(*node).answered());
            return Missed::Wrong(error);
        };
        self.kept.tally.failed(failure, error.is_ambiguous());
        for node in nodes {
            if let Some(notice) = self.kept.breakers.of(*node).failed(failure, error.scope()) {
                self.tell(&notice, Some(&error));
            }
            // Where the store cannot run it beside its callers, the next one waits for it: this one has waited enough.
            drop(self.ping_if_due(*node));
        }
        let is_first = !self.kept.is_failing.swap(true, Ordering::Relaxed);
        Missed::Failed { failure, error, is_first }
    }

    /// Tells the log and whoever watches, once for each change.
    #[cold]
    fn tell(&self, notice: &Notice, error: Option<&StoreError>) {
        let error = error.map(ToString::to_string).unwrap_or_default();
        if let Notice::Changed(change) = notice {
            self.kept.breakers.changed(change);
        }
        let StoreHealth { ambiguous, nodes_up, nodes, state, .. } = self.health();
        let change = match notice {
            Notice::Strays { failures, last } => {
                tracing::warn!(failures, %last, ambiguous, error, "the store fails now and then; those calls fell back");
                return;
            }
            Notice::Changed(change) => change,
        };
        match change {
            StoreChange::Down { failure } if nodes == 1 => {
                tracing::warn!(%failure, ambiguous, error, "the store is down; limits fall back until it answers again");
            }
            StoreChange::Down { failure } => {
                tracing::warn!(
                    %failure, ambiguous, error, nodes_up, nodes,
                    "a node of the store is down; its keys fall back until it answers again"
                );
            }
            StoreChange::Up { down_for, fallen_back } if nodes == 1 => {
                tracing::info!(%down_for, fallen_back, ambiguous, "the store answers again");
            }
            StoreChange::Up { down_for, fallen_back } => {
                tracing::info!(
                    %down_for, fallen_back, ambiguous, nodes_up, nodes,
                    "a node of the store answers again, or another has taken its place"
                );
            }
        }
        self.watch.store_changed(state == StoreState::Up);
        self.observers.store_changed(change);
    }

    /// Answers a call that the store did not, unless it was the call that was wrong.
    #[cold]
    fn fall_back(&self, asks: &[Resolved<'_, '_>], act: Act, missed: Missed) -> Result<Answered, Error> {
        if let Missed::Wrong(error) = missed {
            return Err(error.into());
        }
        self.kept.tally.fell_back();
        Ok(self.in_stead(asks, act, &missed))
    }

    fn in_stead(&self, asks: &[Resolved<'_, '_>], act: Act, missed: &Missed) -> Answered {
        let answers = self.kept.stead.answer(asks, act, missed.retry_after());
        for (_, source) in &answers {
            self.kept.tally.answered(*source);
        }
        Answered { answers, trouble: missed.trouble() }
    }

    /// Notes what a charge that the store answered says about denials.
    fn learn(&self, asks: &[Resolved<'_, '_>], sent: Option<Sent>, charged: &Charged) {
        let counted = asks.iter().find_map(|ask| ask.away().map(|(_, stored, _)| (stored, ask.cost)));
        match (sent, counted, charged.outcomes.first()) {
            (Some(sent), Some((stored, cost)), Some(outcome)) => {
                self.kept.denials.learn(sent, &stored.limit, cost, outcome);
            }
            _ if charged.allowed => self.changed(asks),
            _ => {}
        }
    }

    /// Ends what is believed about the keys of a charge.
    fn changed(&self, asks: &[Resolved<'_, '_>]) {
        for (key, stored, away) in asks.iter().filter_map(Resolved::away) {
            if self.kept.denials.covers(&stored.limit) {
                self.kept.denials.changed(self.kept.seeds.fingerprint(away.number, key));
            }
        }
    }
}
