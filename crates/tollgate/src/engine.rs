//! The heart: charge them all, or none. Every handle and every face comes through [`Engine::charge`].
//!
//! A [`Request`] says what is charged, how (its [`Mode`]), what the caller keeps of it (its [`Take`]), by which id, and for how
//! long it may wait. The engine finds the limits, parses the keys once, asks the counters, lets the fallback answer where a remote
//! store cannot, and reports the decision. On counters in this process that is done at once ([`Step::Done`]); what has to ask a
//! remote store, or to wait, is a boxed future ([`Step::Waits`]).
//!
//! `engine/limits.rs` has the limits by name and their reloads, `engine/ad_hoc.rs` limits whose numbers come with the call,
//! `engine/waiting.rs` what waits for room, `engine/report.rs` the reports. What a remote store needs is in `remote.rs`. Arithmetic
//! is the kernel's, and state the store's.

mod ad_hoc;
mod limits;
mod report;
mod waiting;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::{Cost, Micros};
use tollgate_store::{ChargeId, Clock, Hold, MemoryCharge, MemoryLimit, MemoryStore, Settled, Settlement};
use tracing::Instrument;

use self::ad_hoc::AdHocs;
pub(crate) use self::limits::Limits;
use crate::charge::{Charge, Given, LimitRef, NamedLimit};
use crate::decision::{Decision, Outcomes};
use crate::error::Error;
use crate::health::StoreHealth;
use crate::key::reference::KeyText;
use crate::key::{Key, KeyError};
use crate::lease::{Lease, LostLeases};
use crate::outcome::{Fallback, Outcome, Source};
use crate::policy::entry::{Entry, EntryRef, FallbackDefaults, KeyLimit, Path, Resolved, ResolvedAll};
use crate::policy::names::MAX_NAMES;
use crate::quiet::Quiet;
use crate::remote::{Answered, DenialCache, Identity, Remote, Way};
use crate::telemetry::watch::{Watch, is_sampled};
use crate::telemetry::{Observers, Started, Trouble};
use crate::wait::Lines;

/// How many limits one charge may name. A charge compares all of its pairs, so there must be an end to them.
pub(crate) const MOST_LIMITS: usize = 64;

/// Texts longer than this are parsed before they are hashed: a hostile one may be of any length.
const KNOWN_BYTES: usize = 1_024;

/// How long the id of a plain charge is remembered.
const ID_TTL: Micros = Micros::from_secs(600);

/// How long the id of a charge is remembered that nobody settles, to cancel it if its answer never comes.
const IN_FLIGHT_TTL: Micros = Micros::from_secs(10);

/// How long a settlement in the background is tried again.
#[cfg(feature = "http")]
const SETTLED_WITHIN: Micros = Micros::from_secs(30);

/// What is done with the charges of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All are charged, or none.
    AllOrNone,
    /// Each is charged by itself, in order.
    Each,
    /// Answered as a charge would be, and nothing is changed.
    Peek,
    /// Given back, of what counts now.
    Refund,
}

/// What the caller keeps of an admitted charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    Nothing,
    /// It can be settled for so long.
    Reservation(Micros),
    /// Leases are held until they are released.
    Permit,
}

/// The charges of a request.
pub(crate) enum Charges<'a> {
    One(Charge<'a>),
    All(&'a [Charge<'a>]),
}

impl<'a> Charges<'a> {
    #[inline]
    fn as_slice(&self) -> &[Charge<'a>] {
        match self {
            Charges::One(charge) => std::slice::from_ref(charge),
            Charges::All(charges) => charges,
        }
    }

    fn take(&mut self) -> Charges<'a> {
        std::mem::replace(self, Charges::All(&[]))
    }
}

/// One call of the engine.
pub(crate) struct Request<'a> {
    pub(crate) charges: Charges<'a>,
    pub(crate) mode: Mode,
    pub(crate) take: Take,
    /// Chosen by the caller.
    pub(crate) id: Option<ChargeId>,
    /// How long to wait for room, if at all.
    pub(crate) within: Option<Duration>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(charges: Charges<'a>, mode: Mode) -> Request<'a> {
        Request { charges, mode, take: Take::Nothing, id: None, within: None }
    }

    /// The word for it in events, logs and spans.
    fn operation(&self) -> &'static str {
        match (self.mode, self.take) {
            _ if self.within.is_some() => "wait",
            (Mode::Peek, _) => "peek",
            (_, Take::Nothing) => "charge",
            (_, Take::Reservation(_)) => "reserve",
            (_, Take::Permit) => "acquire",
        }
    }

    /// The call to name where a concurrency limit is charged and nothing would be held; `None` if something is.
    fn holds_nothing(&self) -> Option<&'static str> {
        match (self.mode, self.take) {
            (Mode::AllOrNone | Mode::Each, Take::Nothing) if self.within.is_some() => Some("waiting"),
            (Mode::AllOrNone | Mode::Each, Take::Nothing) => Some("a plain charge"),
            _ => None,
        }
    }
}

/// The answer to a request.
pub(crate) struct Answer {
    /// Under [`Mode::Each`] one outcome for each charge, and nothing that binds; under [`Mode::Refund`] none.
    pub(crate) decision: Decision,
    /// What the caller keeps, if the charge was admitted and something was to be kept.
    pub(crate) held: Option<Box<Held>>,
}

/// An admitted charge that is known to the store by its id.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) id: ChargeId,
    /// How long its shortest lease lasts, if it has any.
    pub(crate) lease: Option<Micros>,
    pub(crate) parts: SmallVec<[HeldPart; 2]>,
}

/// One charge of those that are held.
#[derive(Clone, Copy)]
pub(crate) struct HeldPart {
    pub(crate) limit: &'static str,
    /// The first charge of the same limit and key: repeated pairs add up.
    pub(crate) first: usize,
    /// Whether it was charged: an unlimited key is not, nor one whose shadow limit would have denied it.
    pub(crate) is_charged: bool,
    is_lease: bool,
}

impl Held {
    fn new(identity: Identity, charges: &[Resolved<'_, '_>], decision: &Decision) -> Held {
        let is_same = |one: &Resolved<'_, '_>, other: &Resolved<'_, '_>| {
            std::ptr::eq(&*one.entry, &*other.entry) && one.canonical() == other.canonical()
        };
        let part = |(index, (charge, outcome)): (usize, (&Resolved<'_, '_>, &Outcome))| HeldPart {
            limit: charge.entry.name,
            first: charges[..index].iter().position(|other| is_same(charge, other)).unwrap_or(index),
            is_charged: outcome.numbers().allowed && !outcome.is_unlimited(),
            is_lease: charge.lease().is_some(),
        };
        let parts: SmallVec<[HeldPart; 2]> =
            charges.iter().zip(decision.outcomes()).enumerate().map(part).collect();
        let is_nothing = !identity.is_callers && parts.iter().all(|part| !part.is_charged);
        let id = if is_nothing { ChargeId::of_nothing() } else { identity.hold.id };
        Held { id, lease: charges.iter().filter_map(Resolved::lease).min(), parts }
    }

    /// Whether nothing was charged, so that there is nothing to settle.
    pub(crate) fn is_nothing(&self) -> bool {
        self.parts.iter().all(|part| !part.is_charged)
    }

    /// Ends the leases and leaves what else was charged as it is.
    pub(crate) fn release(&self) -> Settlement {
        let leases = self.parts.iter().filter(|part| part.is_lease && part.is_charged);
        Settlement::Each(leases.map(|part| (part.limit.to_owned(), 0)).collect())
    }
}

/// What becomes of a request.
pub(crate) enum Step<'a> {
    Done(Result<Answer, Error>),
    Waits(Pin<Box<dyn Future<Output = Result<Answer, Error>> + Send + 'a>>),
}

/// Where the counters are.
pub(crate) enum Backend {
    Memory(MemoryStore),
    Remote(Box<Remote>),
}

/// All limits of a gate on their store, and all that is needed to charge them.
pub(crate) struct Engine {
    /// Tells handles of this engine from those of others.
    id: u64,
    limits: RwLock<Limits>,
    pub(crate) backend: Backend,
    /// The clock that waiting goes by: the memory store's own.
    pub(crate) clock: Clock,
    observers: Arc<Observers>,
    watch: Arc<Watch>,
    lines: Arc<Lines>,
    lost_leases: Arc<LostLeases>,
    /// Woken when a key is reset, for permits in this process that are then lost.
    resets: Lease,
    malformed: Quiet,
    needs_permit: Quiet,
    defaults: FallbackDefaults,
    max_names: usize,
    ad_hocs: AdHocs,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub(crate) backend: Backend,
    pub(crate) clock: Clock,
    pub(crate) observers: Arc<Observers>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) lines: Arc<Lines>,
    pub(crate) lost_leases: Arc<LostLeases>,
    pub(crate) defaults: FallbackDefaults,
    pub(crate) max_names: usize,
}

impl Engine {
    /// An engine without limits; [`reload`](Self::reload) puts some in place.
    pub(crate) fn new(parts: Parts) -> Engine {
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let Parts { backend, clock, observers, watch, lines, lost_leases, defaults, max_names } = parts;
        Engine {
            id: LAST_ID.fetch_add(1, Ordering::Relaxed) + 1,
            limits: RwLock::default(),
            backend,
            clock,
            observers,
            watch,
            lines,
            lost_leases,
            resets: Lease::default(),
            malformed: Quiet::default(),
            needs_permit: Quiet::default(),
            defaults,
            max_names,
            ad_hocs: AdHocs::default(),
        }
    }

    /// An engine on a memory store that nobody watches.
    pub(crate) fn in_memory(store: MemoryStore) -> Engine {
        let clock = store.clock().clone();
        Engine::new(Parts {
            backend: Backend::Memory(store),
            clock,
            observers: Arc::default(),
            watch: Arc::new(Watch::new(None, "memory")),
            lines: Arc::default(),
            lost_leases: Arc::default(),
            defaults: FallbackDefaults { fallback: Fallback::default(), instances: 1 },
            max_names: MAX_NAMES,
        })
    }

    /// A handle, if it is of this engine.
    pub(crate) fn owned<'a>(&self, limit: &'a NamedLimit) -> Result<&'a NamedLimit, Error> {
        match limit.entry.engine == self.id {
            true => Ok(limit),
            false => Err(another_gate(limit.name())),
        }
    }

    /// Whether the counters are in this process, so that every call is done at once.
    #[inline]
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.backend, Backend::Memory(_))
    }

    /// Carries out a request: at once where the counters are in this process or the store need not be asked, else in a future.
    #[inline]
    pub(crate) fn charge<'a>(self: &Arc<Engine>, request: &mut Request<'a>) -> Step<'a> {
        if let Some(within) = request.within {
            return self.wait(request, within);
        }
        match &self.backend {
            Backend::Memory(store) => Step::Done(self.charge_local(store, request)),
            Backend::Remote(remote) => self.charge_remote(remote, request),
        }
    }

    /// Fast path of one plain charge: the key already has counters in this process, so it is valid and need not be parsed. The
    /// numbers are written into `outcome`, which is of this limit and by the store: a copy of what was just written has to wait for
    /// it. False, and nothing is charged, if it has to take the slow path.
    #[inline]
    pub(crate) fn charge_known(&self, entry: &Entry, text: &str, cost: Cost, outcome: &mut Outcome) -> bool {
        let Some(memory) = entry.memory().filter(|_| text.len() <= KNOWN_BYTES) else { return false };
        match entry.path {
            Path::Fast => memory.charge_known(text, cost, outcome.numbers_mut()),
            Path::FastCounted => {
                let started = is_sampled().then(Instant::now);
                let is_known = memory.charge_known(text, cost, outcome.numbers_mut());
                if is_known {
                    let took = started.map(|started| started.elapsed());
                    entry.meter.count_fast_path(text, outcome.is_allowed(), took);
                }
                is_known
            }
            Path::FastDenials => self.charge_known_reported(entry, memory, text, cost, outcome),
            Path::Slow => false,
        }
    }

    /// The same where denials are reported.
    fn charge_known_reported(
        &self,
        entry: &Entry,
        memory: &MemoryLimit,
        text: &str,
        cost: Cost,
        outcome: &mut Outcome,
    ) -> bool {
        let is_sampled = is_sampled();
        let started = (is_sampled || self.watch.times_all(false)).then(Instant::now);
        if !memory.charge_known(text, cost, outcome.numbers_mut()) {
            return false;
        }
        let is_denied = !outcome.is_allowed();
        // Reading the clock costs about as much as finding the key: an admission that is not sampled is not timed.
        let took = started.filter(|_| is_sampled || is_denied).map(|started| started.elapsed());
        entry.meter.count_fast_path(text, !is_denied, took.filter(|_| is_sampled));
        if is_denied {
            self.report_denial(entry, text, cost, outcome.numbers(), took);
        }
        true
    }

    /// One plain charge on a limit that is looked up already, in this process: the whole path of `Limiter::check`.
    #[inline]
    pub(crate) fn charge_one<'a>(
        self: &Arc<Engine>,
        entry: &Arc<Entry>,
        key: impl Into<crate::key::KeyRef<'a>>,
        cost: Cost,
    ) -> Outcome {
        let (key, entry) = (key.into(), entry.newest());
        let mut outcome = Outcome::new(entry.name, kernel::Outcome::BLOCKED, Source::Store);
        let is_known = match key.as_text() {
            Some(text) => self.charge_known(entry, text, cost, &mut outcome),
            None => self.charge_known(entry, key.text(&mut KeyText::new()), cost, &mut outcome),
        };
        if !is_known {
            outcome = self.charge_one_slowly(entry, key, cost);
        }
        outcome
    }

    /// Slow path: a key that is new or not canonical, overrides, a shadow limit, or somebody to report to.
    #[cold]
    fn charge_one_slowly(&self, entry: &Arc<Entry>, key: crate::key::KeyRef<'_>, cost: Cost) -> Outcome {
        let started = self.started("charge");
        let _within = started.enter();
        let limits = self.limits.read();
        let entry = entry.newest();
        let charge = [self.resolved(EntryRef::Borrowed(entry), key.parse(), cost)];
        let answered = match (&self.backend, charge[0].memory_charge()) {
            _ if entry.is_concurrency() && charge[0].key.is_some() => {
                if let Some(count) = self.needs_permit.count() {
                    let limit = entry.name;
                    tracing::warn!(
                        limit,
                        count,
                        "denied a check of a concurrency limit: use acquire instead"
                    );
                }
                let answers = [(kernel::Outcome::BLOCKED, Source::NeedsPermit)].into_iter().collect();
                Answered { answers, trouble: Trouble::default() }
            }
            (Backend::Memory(_), Some(item)) => Answered::by_store(&[item.limit.charge(item.key, cost)]),
            _ => Answered::default(),
        };
        drop(limits);
        let decision = conclude(&charge, answered.answers);
        self.report("charge", &charge, &decision, answered.trouble, &started);
        *decision.binding()
    }

    fn charge_local(
        self: &Arc<Engine>,
        store: &MemoryStore,
        request: &mut Request<'_>,
    ) -> Result<Answer, Error> {
        let is_plain = request.take == Take::Nothing && request.id.is_none();
        match request.mode {
            Mode::AllOrNone if is_plain => {
                let mut answer = Answer { decision: Decision::empty(), held: None };
                if !self.charge_all_known(store, request.charges.as_slice(), &mut answer.decision) {
                    answer = self.charge_local_slowly(store, request)?;
                }
                Ok(answer)
            }
            Mode::Each => self.charge_each_local(request),
            _ => self.charge_local_slowly(store, request),
        }
    }

    /// A plain charge of several limits in this process: the whole path of `Limiter::charge_all`.
    #[inline]
    pub(crate) fn charge_all(self: &Arc<Engine>, charges: &[Charge<'_>]) -> Result<Decision, Error> {
        let Backend::Memory(store) = &self.backend else { return Err(Error::not_local()) };
        let mut decision = Decision::empty();
        if !self.charge_all_known(store, charges, &mut decision) {
            let mut request = Request::new(Charges::All(charges), Mode::AllOrNone);
            decision = self.charge_local_slowly(store, &mut request)?.decision;
        }
        Ok(decision)
    }

    /// Fast path of a plain charge in this process, into an empty decision. False, and nothing is charged, if it has to take the
    /// slow path.
    #[inline]
    fn charge_all_known(&self, store: &MemoryStore, charges: &[Charge<'_>], decision: &mut Decision) -> bool {
        match charges {
            [charge] => self.charge_one_known(charge, decision).is_some(),
            _ => self.charge_several_known(store, charges, decision).is_some(),
        }
    }

    #[inline]
    fn charge_one_known(&self, charge: &Charge<'_>, decision: &mut Decision) -> Option<()> {
        let cost = Cost::new(charge.cost)?;
        let mut room = KeyText::new();
        let text = charge.key.as_text().unwrap_or_else(|| charge.key.text(&mut room));
        let mut known = |entry: &Entry| {
            let mut outcome = Outcome::new(entry.name, kernel::Outcome::BLOCKED, Source::Store);
            self.charge_known(entry, text, cost, &mut outcome).then(|| decision.push(outcome))
        };
        match charge.limit.0 {
            Given::Handle(limit) => known(self.own(limit.entry.newest())?),
            Given::Name(name) => {
                let limits = self.limits.read();
                let entry = limits.get(name)?;
                match entry.path {
                    // A denial is reported: an observer may charge, or reload.
                    Path::FastDenials => {
                        let entry = entry.clone();
                        drop(limits);
                        known(&entry)
                    }
                    _ => known(entry),
                }
            }
        }
    }

    #[inline]
    fn charge_several_known(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        decision: &mut Decision,
    ) -> Option<()> {
        if charges.is_empty() || charges.len() > MOST_LIMITS {
            return None;
        }
        let is_named = |charge: &Charge<'_>| matches!(charge.limit.0, Given::Name(_));
        let limits = charges.iter().any(is_named).then(|| self.limits.read());
        let mut items: SmallVec<[MemoryCharge<'_>; 4]> = SmallVec::new();
        let mut entries: SmallVec<[&Entry; 4]> = SmallVec::new();
        let mut is_counted = false;
        for charge in charges {
            let entry = match charge.limit.0 {
                Given::Handle(limit) => self.own(limit.entry.newest())?,
                Given::Name(name) => limits.as_ref()?.get(name)?,
            };
            let (text, cost) = (charge.key.as_text()?, Cost::new(charge.cost)?);
            if !matches!(entry.path, Path::Fast | Path::FastCounted) || text.len() > KNOWN_BYTES {
                return None;
            }
            is_counted |= entry.path == Path::FastCounted;
            items.push(MemoryCharge { limit: entry.memory()?, key: text, cost, shadow: false });
            entries.push(entry);
        }
        let started = (is_counted && is_sampled()).then(Instant::now);
        let mut names = entries.iter().map(|entry| entry.name);
        store.charge_known(&items, |numbers| {
            decision.push(Outcome::new(names.next().unwrap_or_default(), numbers, Source::Store));
        })?;
        if is_counted {
            let took = started.map(|started| started.elapsed());
            for ((entry, item), outcome) in entries.iter().zip(&items).zip(decision.outcomes()) {
                entry.meter.count_fast_path(item.key, outcome.is_allowed(), took);
            }
        }
        decision.bind();
        Some(())
    }

    /// Slow path in this process.
    fn charge_local_slowly(&self, store: &MemoryStore, request: &mut Request<'_>) -> Result<Answer, Error> {
        let operation = request.operation();
        let started = self.started(operation);
        let _within = started.enter();
        // Held while the counters are charged: a reload waits, so that no key is begun under old numbers and new ones at once. Not
        // while the decision is reported: an observer may charge, or reload.
        let limits = self.limits.read();
        let holds_nothing = request.holds_nothing();
        let charges = self.resolve(MOST_LIMITS, &limits, request.charges.take(), holds_nothing)?;
        if request.mode == Mode::Refund {
            for item in charges.iter().filter_map(Resolved::memory_charge) {
                item.limit.refund(item.key, item.cost);
            }
            drop(limits);
            self.lines.nudge();
            return Ok(Answer { decision: Decision::new(Outcomes::new()), held: None });
        }
        let identity = self.identity(&charges, request.take, request.id, false);
        let answered = run_local(store, &charges, request.mode, identity)?;
        drop(limits);
        Ok(self.finish(operation, &charges, answered, identity, request.take, &started))
    }

    /// Each by itself, in order, in this process. All limits are found before the first is charged.
    fn charge_each_local(self: &Arc<Engine>, request: &mut Request<'_>) -> Result<Answer, Error> {
        let holds_nothing = request.holds_nothing();
        {
            let limits = self.limits.read();
            for charge in request.charges.as_slice() {
                let entry = self.find(&limits, charge.limit)?;
                check(entry, charge.cost, holds_nothing)?;
            }
        }
        let mut outcomes = Outcomes::new();
        for charge in request.charges.as_slice() {
            let one = std::slice::from_ref(charge);
            outcomes.extend(self.charge_all(one)?.into_outcomes());
        }
        Ok(Answer { decision: Decision::new(outcomes), held: None })
    }

    fn charge_remote<'a>(self: &Arc<Engine>, remote: &Remote, request: &mut Request<'a>) -> Step<'a> {
        let operation = request.operation();
        let started = self.started(operation);
        let (mode, take, id) = (request.mode, request.take, request.id);
        let limit = if mode == Mode::Each { usize::MAX } else { MOST_LIMITS };
        let holds_nothing = request.holds_nothing();
        let charges = {
            let limits = self.limits.read();
            self.resolve(limit, &limits, request.charges.take(), holds_nothing)
        };
        let charges = match charges {
            Ok(charges) => charges,
            Err(error) => return Step::Done(Err(error)),
        };
        let identity = self.identity(&charges, take, id, false);
        let is_denied = charges.iter().any(Resolved::is_denied_outright);
        let mut sent = None;
        if mode == Mode::AllOrNone && !is_denied {
            match remote.way(&charges, identity.is_some(), DenialCache::Use) {
                Way::Answered(answered) => {
                    let answer = self.finish(operation, &charges, answered, identity, take, &started);
                    return Step::Done(Ok(answer));
                }
                Way::Ask(to_remember) => sent = to_remember,
            }
        }
        let engine = self.clone();
        Step::Waits(Box::pin(async move {
            let Backend::Remote(remote) = &engine.backend else {
                return Err(Error::call("the counters are local"));
            };
            let span = started.span().clone();
            let answered = match mode {
                Mode::Each => return engine.charge_each_remote(remote, charges, &started).await,
                Mode::Refund => {
                    let refunded = remote.refund(&charges).instrument(span).await;
                    // What failed may have been given back, in part or whole.
                    engine.lines.nudge();
                    refunded?;
                    return Ok(Answer { decision: Decision::new(Outcomes::new()), held: None });
                }
                Mode::AllOrNone if !is_denied => {
                    remote.charge(&charges, identity, sent).instrument(span).await?
                }
                Mode::Peek | Mode::AllOrNone => remote.peek(&charges).instrument(span).await?,
            };
            Ok(engine.finish(operation, &charges, answered, identity, take, &started))
        }))
    }

    /// Each by itself, up to 64 in one call.
    async fn charge_each_remote(
        &self,
        remote: &Remote,
        charges: ResolvedAll<'_, '_>,
        started: &Started,
    ) -> Result<Answer, Error> {
        started.span().record("keys", charges.len());
        if let Some(charge) = charges.first() {
            started.span().record("limiter", charge.entry.name);
        }
        let mut outcomes = Outcomes::new();
        for batch in charges.chunks(MOST_LIMITS) {
            let answers = remote.charge_each(batch).instrument(started.span().clone()).await?;
            let _within = started.enter();
            for (charge, Answered { answers, trouble }) in batch.iter().zip(answers) {
                let charge = std::slice::from_ref(charge);
                let decision = conclude(charge, answers);
                self.report("charge", charge, &decision, trouble, &started.of_one());
                outcomes.push(*decision.binding());
            }
        }
        Ok(Answer { decision: Decision::new(outcomes), held: None })
    }

    /// The decision, reported, and what the caller keeps of it.
    fn finish(
        &self,
        operation: &'static str,
        charges: &[Resolved<'_, '_>],
        answered: Answered,
        identity: Option<Identity>,
        take: Take,
        started: &Started,
    ) -> Answer {
        let _within = started.enter();
        let decision = conclude(charges, answered.answers);
        self.report(operation, charges, &decision, answered.trouble, started);
        let held = held(charges, &decision, identity, take);
        Answer { decision, held }
    }

    /// By which id the store knows a charge, if by any.
    fn identity(
        &self,
        charges: &[Resolved<'_, '_>],
        take: Take,
        id: Option<ChargeId>,
        is_waited: bool,
    ) -> Option<Identity> {
        let is_callers = id.is_some();
        let identity = |ttl, is_kept| {
            let hold = Hold { id: id.unwrap_or_else(ChargeId::random), ttl };
            Some(Identity { hold, is_kept, is_callers })
        };
        let longest_lease = charges.iter().filter_map(Resolved::lease).max();
        match (take, longest_lease) {
            (Take::Reservation(ttl), _) => identity(ttl, true),
            // In this process the holder releases its leases however it goes, so they need not end by themselves.
            (Take::Permit, Some(_)) if self.is_local() => identity(Hold::UNTIL_RELEASED, true),
            (Take::Permit, Some(lease)) => identity(lease, true),
            _ if is_callers => identity(ID_TTL, true),
            // Nothing is kept, but a caller who leaves before the answer leaves nothing charged.
            _ if !self.is_local() && (is_waited || take == Take::Permit) => identity(IN_FLIGHT_TTL, false),
            _ => None,
        }
    }

    /// Finds the limit of a charge.
    fn find<'e, 'a: 'e>(&self, limits: &'e Limits, limit: LimitRef<'a>) -> Result<&'e Arc<Entry>, Error> {
        match limit.0 {
            Given::Name(name) => limits.get(name).ok_or_else(|| limits.unknown(name)),
            Given::Handle(limit) => self.own(limit.entry.newest()).ok_or_else(|| another_gate(limit.name())),
        }
    }

    /// An entry, if it is of this engine.
    #[inline]
    fn own<'e>(&self, entry: &'e Arc<Entry>) -> Option<&'e Arc<Entry>> {
        (entry.engine == self.id).then_some(entry)
    }

    /// Finds the limits and parses the keys. An empty or malformed key is denied further on, and logged here.
    fn resolve<'a>(
        &self,
        most: usize,
        limits: &Limits,
        charges: Charges<'a>,
        holds_nothing: Option<&'static str>,
    ) -> Result<ResolvedAll<'static, 'a>, Error> {
        let count = charges.as_slice().len();
        if count == 0 && most == MOST_LIMITS {
            return Err(Error::call("a charge needs at least one limit"));
        }
        if count > most {
            return Err(Error::call(format!(
                "a charge may name at most {most} limits, and this one names {count}"
            )));
        }
        let one = |limit: LimitRef<'a>, key: Result<Key<'a>, KeyError>, cost: u64| {
            let entry = self.find(limits, limit)?;
            let cost = check(entry, cost, holds_nothing)?;
            Ok(self.resolved(EntryRef::Shared(entry.clone()), key, cost))
        };
        match charges {
            Charges::One(Charge { limit, key, cost }) => {
                Ok(std::iter::once(one(limit, key.parse(), cost)?).collect())
            }
            Charges::All(charges) => {
                charges.iter().map(|charge| one(charge.limit, charge.key.parse_ref(), charge.cost)).collect()
            }
        }
    }

    fn resolved<'e, 'k>(
        &self,
        entry: EntryRef<'e>,
        key: Result<Key<'k>, KeyError>,
        cost: Cost,
    ) -> Resolved<'e, 'k> {
        let key = key.map_err(|error| self.warn_malformed(entry.name, &error)).ok();
        Resolved::new(entry, key, cost)
    }

    /// Warns of malformed keys, at most once a second, with how many there were. The key itself is never shown.
    #[cold]
    fn warn_malformed(&self, limiter: &str, error: &KeyError) {
        if !error.is_reported()
            && let Some(count) = self.malformed.count()
        {
            tracing::warn!(limiter, count, "denied a malformed key: {error}");
        }
    }

    /// Settles, cancels or renews a charge by its id.
    pub(crate) async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, Error> {
        if let Some(settled) = self.settle_local(id, settlement) {
            return settled;
        }
        let Backend::Remote(remote) = &self.backend else { return Ok(Settled::Unknown) };
        let is_lease = *settlement == Settlement::Renew && remote.is_lease(id);
        let settled = Box::pin(remote.settle(id, settlement)).await;
        self.lines.nudge();
        let settled = settled?;
        Box::pin(remote.go_on()).await;
        if is_lease && settled == Settled::Unknown {
            self.lost_leases.report();
        }
        Ok(settled)
    }

    /// The same where it can be done at once: the counters are in this process, or nothing was charged.
    pub(crate) fn settle_local(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Option<Result<Settled, Error>> {
        if id.is_of_nothing() {
            return Some(Ok(Settled::Done));
        }
        let Backend::Memory(store) = &self.backend else { return None };
        let settled = store.settle(id, settlement);
        self.lines.nudge();
        Some(settled.map_err(Error::from))
    }

    /// Forgets a reservation that nobody will ask for again, where it is held in this process: its leases end, its charges stay.
    pub(crate) fn forget_local(&self, id: ChargeId) {
        if let Backend::Memory(store) = &self.backend {
            store.release(id);
            self.lines.nudge();
        }
    }

    /// Keeps the leases of a permit in a remote store renewed. In this process they do not end while they are held.
    pub(crate) fn keep_renewed(&self, held: &Held, holder: &Arc<Lease>) {
        if let (Backend::Remote(remote), Some(lease)) = (&self.backend, held.lease)
            && !held.is_nothing()
        {
            remote.keep_renewed(held.id, lease, holder.clone());
        }
    }

    /// Renews the leases of a charge no more; whoever has them settles it.
    pub(crate) fn stop_renewing(&self, id: ChargeId) {
        if let Backend::Remote(remote) = &self.backend {
            remote.stop_renewing(id);
        }
    }

    /// Releases the leases of a permit: at once in this process, else in the background.
    pub(crate) fn release_later(&self, held: &Held) {
        match (&self.backend, held.lease) {
            (Backend::Memory(_), Some(_)) => self.forget_local(held.id),
            (Backend::Remote(remote), Some(lease)) if !held.is_nothing() => {
                remote.release_later(held.id, held.release(), lease);
            }
            _ => {}
        }
    }

    /// Settles a charge in the background, with retries.
    #[cfg(feature = "http")]
    pub(crate) fn settle_later(&self, held: &Held, settlement: Settlement) {
        if let Backend::Remote(remote) = &self.backend
            && !held.is_nothing()
        {
            let ttl = held.lease.unwrap_or(SETTLED_WITHIN);
            remote.release_later(held.id, settlement, ttl);
        }
    }

    /// Releases the leases of a permit. If the store fails, that is tried again in the background.
    pub(crate) async fn release(&self, held: &Held) -> Result<(), Error> {
        let is_kept = held.lease.is_some() && !held.is_nothing();
        if self.is_local() || !is_kept {
            self.release_later(held);
            return Ok(());
        }
        self.stop_renewing(held.id);
        // Whoever drops this future has released it all the same.
        let later = ReleaseOnDrop { engine: self, held: Some(held) };
        let released = self.settle(held.id, &held.release()).await;
        if released.is_ok() {
            later.done();
        }
        released.map(drop)
    }

    /// Whether the leases of a permit in this process are gone, because their key was reset.
    pub(crate) fn is_gone_local(&self, held: &Held) -> bool {
        held.lease.is_some()
            && !held.is_nothing()
            && matches!(&self.backend, Backend::Memory(store) if !matches!(store.settle(held.id, &Settlement::Renew), Ok(Settled::Done)))
    }

    /// Counts a lease that was found to be lost.
    pub(crate) fn report_lost(&self) {
        self.lost_leases.report();
    }

    /// Ready when a key was reset since it was last asked.
    pub(crate) fn poll_reset(&self, context: &mut Context<'_>) -> Poll<()> {
        self.resets.poll_lost(context)
    }

    /// Waits until what is to be cancelled and released in a remote store is.
    pub(crate) async fn flush(&self) {
        if let Backend::Remote(remote) = &self.backend {
            Box::pin(remote.flush()).await;
        }
    }

    /// What a key has used and has left, as it stands. A remote store that fails is an error: nothing is made up.
    pub(crate) async fn status(
        &self,
        limit: LimitRef<'_>,
        key: crate::key::KeyRef<'_>,
    ) -> Result<Outcome, Error> {
        let entry = self.find(&self.limits.read(), limit)?.clone();
        let Backend::Remote(remote) = &self.backend else { return Ok(self.status_local(&entry, key)) };
        let charge = [self.resolved(EntryRef::Borrowed(&entry), key.parse(), Cost::ONE)];
        let numbers = Box::pin(remote.status(&charge[0])).await?;
        let answers = numbers.map(|numbers| (numbers, Source::Store)).into_iter().collect();
        Ok(*conclude(&charge, answers).binding())
    }

    /// The same where the counters are in this process.
    pub(crate) fn status_local(&self, entry: &Arc<Entry>, key: crate::key::KeyRef<'_>) -> Outcome {
        let charge = [self.resolved(EntryRef::Borrowed(entry.newest()), key.parse(), Cost::ONE)];
        let numbers = charge[0].memory_charge().map(|item| (item.limit.status(item.key), Source::Store));
        *conclude(&charge, numbers.into_iter().collect()).binding()
    }

    /// Forgets what a key was charged; false when nothing was remembered.
    pub(crate) async fn reset(
        &self,
        limit: LimitRef<'_>,
        key: crate::key::KeyRef<'_>,
    ) -> Result<bool, Error> {
        let entry = self.find(&self.limits.read(), limit)?.clone();
        let key = key.parse()?;
        let forgotten = match (entry.key_limit(&key), &self.backend) {
            (KeyLimit::Counted { memory: Some(memory), .. }, _) => memory.forget(key.canonical()),
            (KeyLimit::Counted { stored, remote: Some(limit), .. }, Backend::Remote(remote)) => {
                Box::pin(remote.forget(stored, limit, key.canonical())).await?
            }
            _ => false,
        };
        self.was_reset();
        Ok(forgotten)
    }

    /// The same where the counters are in this process. A malformed key was never charged.
    pub(crate) fn reset_local(&self, entry: &Arc<Entry>, key: crate::key::KeyRef<'_>) -> bool {
        let Ok(key) = key.parse() else { return false };
        let forgotten = match entry.newest().key_limit(&key) {
            KeyLimit::Counted { memory: Some(memory), .. } => memory.forget(key.canonical()),
            _ => false,
        };
        self.was_reset();
        forgotten
    }

    fn was_reset(&self) {
        self.resets.notify();
        self.lines.nudge();
    }

    /// How the store fares.
    pub(crate) fn health(&self) -> StoreHealth {
        let mut health = match &self.backend {
            Backend::Memory(_) => StoreHealth::always_up(self.clock.now()),
            Backend::Remote(remote) => remote.health(),
        };
        health.leases_lost = self.lost_leases.count();
        health
    }
}

/// Leaves the release of a permit to the background if its own call did not get there.
struct ReleaseOnDrop<'a> {
    engine: &'a Engine,
    held: Option<&'a Held>,
}

impl ReleaseOnDrop<'_> {
    fn done(mut self) {
        self.held = None;
    }
}

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.held {
            self.engine.release_later(held);
        }
    }
}

/// Asks the counters in this process: only looks where the charge is denied already.
fn run_local(
    store: &MemoryStore,
    charges: &[Resolved<'_, '_>],
    mode: Mode,
    identity: Option<Identity>,
) -> Result<Answered, Error> {
    let items: SmallVec<[MemoryCharge<'_>; 4]> = charges.iter().filter_map(Resolved::memory_charge).collect();
    let is_look = mode == Mode::Peek || charges.iter().any(Resolved::is_denied_outright);
    let counted = match is_look {
        true => store.peek_all(&items),
        false => store.charge_all(&items, identity.map(|identity| identity.hold))?,
    };
    Ok(Answered::by_store(&counted.outcomes))
}

/// The decision, from what the counters said, in the order of the charges that met any.
fn conclude(charges: &[Resolved<'_, '_>], counted: crate::remote::Answers) -> Decision {
    let mut counted = counted.into_iter();
    let outcome = |charge: &Resolved<'_, '_>| {
        let (numbers, source) = match charge.key_limit() {
            Some(place @ KeyLimit::Counted { .. }) => {
                counted.next().unwrap_or((kernel::Outcome::BLOCKED, place.source()))
            }
            Some(place @ KeyLimit::Unlimited) => (kernel::Outcome::UNLIMITED, place.source()),
            Some(place @ KeyLimit::Blocked) => (kernel::Outcome::BLOCKED, place.source()),
            None => (kernel::Outcome::BLOCKED, Source::Malformed),
        };
        let is_shadow = charge.is_shadow() && source != Source::NeedsPermit;
        Outcome::new(charge.entry.name, numbers, source).shadowed(is_shadow)
    };
    Decision::new(charges.iter().map(outcome).collect())
}

/// What the caller keeps of an admitted charge.
fn held(
    charges: &[Resolved<'_, '_>],
    decision: &Decision,
    identity: Option<Identity>,
    take: Take,
) -> Option<Box<Held>> {
    if take == Take::Nothing || !decision.is_allowed() {
        return None;
    }
    // A permit of a rate limit holds nothing: what was charged stays charged.
    let nothing = Identity {
        hold: Hold { id: ChargeId::of_nothing(), ttl: Micros::ZERO },
        is_kept: false,
        is_callers: false,
    };
    Some(Box::new(Held::new(
        identity.filter(|identity| identity.is_kept).unwrap_or(nothing),
        charges,
        decision,
    )))
}

/// The error for a handle that another engine made.
fn another_gate(limit: &str) -> Error {
    Error::call(format!("`{limit}` is a limit of another gate; look it up in this one"))
}

/// Refuses a cost of zero, and a concurrency limit where nothing would be held.
#[inline]
fn check(entry: &Entry, cost: u64, holds_nothing: Option<&'static str>) -> Result<Cost, Error> {
    let cost = Cost::new(cost).ok_or_else(Error::zero_cost)?;
    match holds_nothing {
        Some(call) if entry.is_concurrency() => Err(Error::holds_nothing(entry.name, call)),
        _ => Ok(cost),
    }
}
