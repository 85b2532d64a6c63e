//! The registry: all limits of a program by name, on whichever store, built in code or from a policy.
//!
//! Calls here are async because a store may be elsewhere; on the memory store they are ready at once. For the shortest way
//! take a [`Limiter`] out of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::{Cost, Limit, Micros, Outcome};
use tollgate_store::{Hold, HoldId, MemoryStore, Settled, Settlement};
use tracing::Instrument;

use crate::ad_hoc::AdHoc;
use crate::builder::TollgateBuilder;
use crate::decision::{Decision, LimitOutcome};
use crate::error::Error;
use crate::gate::{self, Answered, Backend, Entry, Gate, Place, Resolved, ResolvedAll};
use crate::health::StoreHealth;
use crate::limiter::{self, Limiter};
use crate::policy::Rule;
use crate::report::{Source, Started};
use crate::reservation::{Reservation, Reserved};
use crate::slices::{Slices, Unused};
use crate::wait::{self, WaitError};

/// All limits of a program. Cheap to clone; clones share their counters.
///
/// ```
/// use tollgate::{Limit, Micros, Tollgate};
///
/// # async fn run() -> Result<(), tollgate::Error> {
/// let gate = Tollgate::builder()
///     .limit("api", Limit::token_bucket("10/s", 20)?)
///     .limit("login", Limit::fixed_window(5, Micros::from_secs(60))?)
///     .build()?;
/// assert!(gate.acquire("user:42", "api").await?.allowed());
///
/// let error = gate.acquire("user:42", "logon").await.unwrap_err();
/// assert!(error.to_string().contains("login"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tollgate {
    pub(crate) gate: Arc<Gate>,
}

/// One limit of a charge, by name.
///
/// ```
/// use tollgate::Ask;
/// let ask = Ask::new("tokens", "model:gpt").cost(1500);
/// ```
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    limit: &'a str,
    key: &'a str,
    cost: u64,
    ad_hoc: Option<&'a AdHoc>,
}

impl<'a> Ask<'a> {
    /// One unit, under `limit`, paid by `key`.
    pub fn new(limit: &'a str, key: &'a str) -> Ask<'a> {
        Ask { limit, key, cost: 1, ad_hoc: None }
    }

    pub(crate) fn ad_hoc(bucket: &'a AdHoc, key: &'a str) -> Ask<'a> {
        Ask { limit: bucket.name(), key, cost: 1, ad_hoc: Some(bucket) }
    }

    /// The name of the limit.
    pub fn limit(&self) -> &'a str {
        self.limit
    }

    /// How much to charge.
    #[must_use]
    pub fn cost(self, cost: u64) -> Ask<'a> {
        Ask { cost, ..self }
    }
}

/// Without the key, as everywhere.
impl fmt::Debug for Ask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("limit", &self.limit).field("cost", &self.cost).finish_non_exhaustive()
    }
}

impl Tollgate {
    /// Starts an empty registry on a memory store.
    pub fn builder() -> TollgateBuilder {
        TollgateBuilder::default()
    }

    /// A limiter of its own.
    pub(crate) fn of_one(name: &str, limit: Limit) -> Limiter {
        let built = Rule::new(name, limit).map_err(Error::from).and_then(|rule| {
            let gate = Tollgate::builder().rule(rule).build()?;
            gate.limiter(name)
        });
        match built {
            Ok(limiter) => limiter,
            Err(error) => unreachable!("a registry of one limit with a proper name: {error}"),
        }
    }

    /// The short way to a limit in this process. The error lists the limits there are.
    pub fn limiter(&self, name: &str) -> Result<Limiter, Error> {
        let entry = self.entry(name)?.clone();
        match self.gate.backend {
            Backend::Memory(_) => Ok(Limiter::on(self.gate.clone(), entry)),
            Backend::Remote(_) => Err(Error::call(format!(
                "the counters of `{name}` are not in this process; use Tollgate's async calls"
            ))),
        }
    }

    /// The limit named `default`; the only one, if there is only one.
    pub fn default_limiter(&self) -> Result<Limiter, Error> {
        match self.gate.policy.rules() {
            [only] => self.limiter(only.name()),
            _ => self.limiter("default"),
        }
    }

    /// Whether both are one registry: for those who keep what they took out of one that may be replaced.
    ///
    /// ```
    /// use tollgate::Tollgate;
    ///
    /// let gate = Tollgate::builder().build()?;
    /// assert!(gate.is(&gate.clone()));
    /// assert!(!gate.is(&Tollgate::builder().continuing(&gate).build()?));
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn is(&self, other: &Tollgate) -> bool {
        Arc::ptr_eq(&self.gate, &other.gate)
    }

    /// The rules, in the order in which they were registered.
    pub fn rules(&self) -> &[Rule] {
        self.gate.policy.rules()
    }

    /// The rule of this name. The error lists the limits there are.
    ///
    /// ```
    /// use tollgate::{Rule, Tollgate};
    ///
    /// let gate = Tollgate::builder().rule(Rule::unlimited("health")?).build()?;
    /// assert_eq!(gate.find("health")?.name(), "health");
    /// assert!(gate.find("helth").unwrap_err().to_string().contains("did you mean `health`?"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn find(&self, name: &str) -> Result<&Rule, Error> {
        Ok(&self.entry(name)?.rule)
    }

    /// Charges one unit under one limit.
    pub async fn acquire(&self, key: &str, limit: &str) -> Result<Decision<'_>, Error> {
        self.charge(&[Ask::new(limit, key)]).await
    }

    /// Charges several limits at once: all of them, or none.
    pub async fn charge(&self, asks: &[Ask<'_>]) -> Result<Decision<'_>, Error> {
        self.decide("charge", asks, None).await
    }

    /// What [`charge`](Self::charge) does, where it can be done at once because the counters are in this process; `None` where
    /// they are elsewhere. A future that may have to wait is large, and whoever need not wait need not carry it.
    ///
    /// ```
    /// use tollgate::{Ask, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("1/h", 1)?).build()?;
    /// let allowed = |gate: &Tollgate| {
    ///     let charged = gate.charge_at_once(&[Ask::new("api", "user:42")]).expect("in this process");
    ///     charged.map(|decision| decision.allowed())
    /// };
    /// assert_eq!((allowed(&gate)?, allowed(&gate)?), (true, false));
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn charge_at_once(&self, asks: &[Ask<'_>]) -> Option<Result<Decision<'_>, Error>> {
        let Backend::Memory(store) = &self.gate.backend else { return None };
        if let [Ask { limit, key, cost, ad_hoc: None }] = asks
            && let (Ok(entry), Some(cost)) = (self.entry(limit), Cost::new(*cost))
            && limiter::tells_denials_alone(&self.gate, entry)
            && let Some(outcome) = limiter::charge_telling(&self.gate, entry, key, cost)
        {
            let mut decision = Decision::open();
            let (name, source) = (entry.rule.name(), Source::Store);
            decision.add(LimitOutcome { name, outcome, shadow: false, source });
            decision.close();
            return Some(Ok(decision));
        }
        let started = self.gate.started("charge");
        let resolved = match self.resolve(asks) {
            Ok(resolved) => resolved,
            Err(error) => return Some(Err(error)),
        };
        Some(self.decide_here(store, "charge", &resolved, None, &started))
    }

    /// What [`peek`](Self::peek) does, where it can be done at once.
    pub fn peek_at_once(&self, asks: &[Ask<'_>]) -> Option<Result<Decision<'_>, Error>> {
        let Backend::Memory(store) = &self.gate.backend else { return None };
        let started = self.gate.started("peek");
        let _within = started.enter();
        let peeked = self.resolve(asks).map(|resolved| {
            let counted = store.peek_all(&gate::memory_items(&resolved));
            limiter::told(&self.gate, "peek", &resolved, &counted, &started)
        });
        Some(peeked)
    }

    /// Answers as [`charge`](Self::charge) would, and changes nothing.
    pub async fn peek(&self, asks: &[Ask<'_>]) -> Result<Decision<'_>, Error> {
        if let Some(peeked) = self.peek_at_once(asks) {
            return peeked;
        }
        let started = self.gate.started("peek");
        let resolved = self.resolve(asks)?;
        let Backend::Remote(remote) = &self.gate.backend else { unreachable!("that was answered at once") };
        let answered = Box::pin(remote.peek(&resolved).instrument(started.span().clone())).await?;
        Ok(self.told("peek", &resolved, answered, &started))
    }

    /// Charges an estimate, to be settled with the true amount within `ttl`.
    pub async fn reserve(&self, asks: &[Ask<'_>], ttl: Duration) -> Result<Reserved<'_>, Error> {
        let hold = Hold { id: HoldId::random(), ttl: Micros::from(ttl) };
        let decision = self.decide("reserve", asks, Some(hold)).await?;
        let reservation = decision.allowed().then(|| Reservation::new(self.gate.clone(), hold.id, &decision));
        Ok(Reserved { decision, reservation })
    }

    /// Settles, cancels or renews a reservation by its name.
    ///
    /// While a store elsewhere is down this is an error that may pass, and the reservation stays as it is. What was reserved
    /// while it was down is settled in this process, whatever has become of the store: limits that count locally are
    /// corrected, and the others, which charged nothing, have nothing to correct.
    ///
    /// If the reply to the reserve call was lost, what it reserved is settled in this process as well, and the store's copy is
    /// cancelled as soon as the store answers. Until then the answer is [`Settled::Pending`] instead of `Done`.
    ///
    /// A reservation that charged nothing, because its limits are unlimited or only shadow ones that would have refused, is kept
    /// nowhere: to settle it is always `Done`.
    ///
    /// A renewal that answers `Unknown` means that the lease is gone, and another holder may run beside this one. For a
    /// reservation of this registry that is logged and counted as well.
    pub async fn settle(&self, id: HoldId, settlement: &Settlement) -> Result<Settled, Error> {
        let is_lease = match &self.gate.backend {
            Backend::Remote(remote) if *settlement == Settlement::Renew => remote.is_lease(id),
            _ => false,
        };
        let settled = self.settle_unreported(id, settlement).await?;
        if is_lease && settled == Settled::Unknown {
            self.gate.lost_leases.report();
        }
        Ok(settled)
    }

    /// Renews the lease of a holder in this process; false, logged and counted, if it is gone.
    #[cfg(feature = "http")]
    pub(crate) async fn renew_lease(&self, id: HoldId) -> Result<bool, Error> {
        let settled = self.settle_unreported(id, &Settlement::Renew).await?;
        let is_renewed = matches!(settled, Settled::Done | Settled::Pending);
        if !is_renewed {
            self.gate.lost_leases.report();
        }
        Ok(is_renewed)
    }

    /// Forgets a reservation that nobody will ask for again, where it is held in this process: its leases end, and its charges stay.
    #[cfg(feature = "http")]
    pub(crate) fn forget_hold(&self, id: HoldId) {
        if let Backend::Memory(store) = &self.gate.backend {
            store.release(id);
        }
    }

    async fn settle_unreported(&self, id: HoldId, settlement: &Settlement) -> Result<Settled, Error> {
        if id.is_of_nothing() {
            return Ok(Settled::Done);
        }
        let settled = match &self.gate.backend {
            Backend::Memory(store) => store.settle(id, settlement)?,
            Backend::Remote(remote) => {
                let counts_locally = |name: &str| self.gate.counts_locally(name);
                Box::pin(remote.settle(id, settlement, counts_locally)).await?
            }
        };
        self.gate.queues.nudge();
        Ok(settled)
    }

    /// What a key has used and has left, as it stands. A store elsewhere that fails is an error: nothing is made up.
    pub async fn status(&self, limit: &str, key: &str) -> Result<Outcome, Error> {
        self.status_of(self.entry(limit)?, key).await
    }

    /// The same for a limit that is looked up already.
    pub(crate) async fn status_of(&self, entry: &Arc<Entry>, key: &str) -> Result<Outcome, Error> {
        let Backend::Remote(remote) = &self.gate.backend else {
            return Ok(Limiter::on(self.gate.clone(), entry.clone()).status(key));
        };
        // As in the memory store: a charge of all there could ever be shows the key as it stands.
        let [mut standing, mut one] = [Outcome::BLOCKED; 2];
        for (outcome, cost) in [(&mut standing, u64::MAX), (&mut one, 1)] {
            let resolved = [Resolved::new(&self.gate, entry, key, cost)?];
            let answered = Box::pin(remote.peek_store(&resolved)).await?;
            *outcome = gate::conclude(&resolved, answered.answers).binding().outcome;
        }
        Ok(Outcome { allowed: one.allowed, retry_after: one.retry_after, ..standing })
    }

    /// Gives back what was charged and need not have been, such as a request that was answered from a cache: the cost of each
    /// ask, of what counts now, the newest charge first, and never more than there is. Nothing is given back of leases, nor to a
    /// key that is not remembered. Limits that only watch are charged, and refunded, like any other.
    ///
    /// While a store elsewhere is down this is an error that may pass, and nothing is given back: not by anybody in its stead,
    /// either. If the error [is ambiguous](Error::is_ambiguous), it may have been; then it must not be asked for again, because a
    /// refund has no name under which the store would know it. On a cluster keys of different slots are refunded each for itself.
    ///
    /// Whoever knows beforehand that a charge may shrink reserves and settles it: that cannot give back too much, and can be
    /// sent again.
    ///
    /// ```
    /// use tollgate::{Ask, Limit, Micros, Tollgate};
    ///
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// let gate = Tollgate::builder().limit("api", Limit::fixed_window(5, Micros::from_secs(60))?).build()?;
    /// gate.charge(&[Ask::new("api", "user:42").cost(3)]).await?;
    /// gate.refund(&[Ask::new("api", "user:42").cost(2)]).await?;
    /// assert_eq!(gate.status("api", "user:42").await?.used(), 1);
    /// # Ok(())
    /// # }
    /// # std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # use std::future::Future;
    /// ```
    pub async fn refund(&self, asks: &[Ask<'_>]) -> Result<(), Error> {
        let resolved = self.resolve(asks)?;
        let refunded = match &self.gate.backend {
            Backend::Memory(_) => {
                for item in gate::memory_items(&resolved) {
                    item.limit.refund(item.key, item.cost);
                }
                Ok(())
            }
            Backend::Remote(remote) => Box::pin(remote.refund(&resolved)).await,
        };
        // What failed may have been given back, in part or whole.
        self.gate.queues.nudge();
        refunded
    }

    /// Forgets what a key was charged; false when nothing was remembered. If a remote store fails, that is an error and nothing is
    /// forgotten in this process either; the same call can be sent again.
    pub async fn reset(&self, limit: &str, key: &str) -> Result<bool, Error> {
        let entry = self.entry(limit)?;
        let key = crate::key::Key::parse(key)?;
        let forgotten = match (entry.place(&key), &self.gate.backend) {
            (Place::Counted { memory: Some(memory), .. }, _) => memory.forget(key.canonical()),
            (Place::Counted { stored, away: Some(away), .. }, Backend::Remote(remote)) => {
                Box::pin(remote.forget(stored, away, key.canonical())).await?
            }
            _ => false,
        };
        self.gate.queues.nudge();
        Ok(forgotten)
    }

    /// Waits until the charge fits, at most `within`, first come, first served among those who wait for the same key in this
    /// process. What another process gives back is seen within 250 ms. Dropping the future gives the place in the queue back; a
    /// charge that is on its way to the store then is cancelled there.
    pub async fn wait(&self, ask: Ask<'_>, within: Duration) -> Result<Outcome, WaitError> {
        if ask.ad_hoc.is_some() {
            return Err(Error::call(
                "a limit that comes with a call cannot be waited for; name it in the policy",
            )
            .into());
        }
        let entry = self.entry(ask.limit)?;
        wait::wait(&self.gate, entry, ask.key, ask.cost, within, None).await
    }

    /// How the store fares: whether it answers, how it failed, and what was answered without it.
    pub fn store_health(&self) -> StoreHealth {
        let mut health = match &self.gate.backend {
            Backend::Memory(_) => StoreHealth::always_up(self.gate.clock.now()),
            Backend::Remote(remote) => remote.health(),
        };
        health.leases_lost = self.gate.lost_leases.count();
        health
    }

    /// Gives back what is unused of slices whose time is up, and returns of how many: see [`Rule::slice`]. A key's next charge
    /// does the same for its own slice; whoever wants idle units back sooner calls this now and then.
    pub async fn give_back_ended_slices(&self) -> Result<usize, Error> {
        self.give_back(Slices::ended).await
    }

    /// Gives back what is unused of all slices, as before the process ends, and returns of how many.
    pub async fn give_back_slices(&self) -> Result<usize, Error> {
        self.give_back(Slices::all).await
    }

    async fn give_back(&self, which: fn(&Slices, Micros) -> Vec<Unused>) -> Result<usize, Error> {
        let given_back = match &self.gate.backend {
            Backend::Memory(_) => 0,
            Backend::Remote(remote) => Box::pin(remote.give_back(which)).await?,
        };
        self.gate.queues.nudge();
        Ok(given_back)
    }

    /// How many keys the memory store remembers; zero where the store is elsewhere.
    pub fn keys(&self) -> usize {
        match &self.gate.backend {
            Backend::Memory(store) => store.keys(),
            Backend::Remote(_) => 0,
        }
    }

    pub(crate) fn entry(&self, name: &str) -> Result<&Arc<Entry>, Error> {
        match self.gate.by_name.get(name) {
            Some(&index) => Ok(&self.gate.entries[index]),
            None => Err(self.gate.policy.unknown(name).into()),
        }
    }

    fn resolve<'a: 'k, 'k>(&'a self, asks: &[Ask<'k>]) -> Result<ResolvedAll<'a, 'k>, Error> {
        gate::check_count(asks.len())?;
        asks.iter()
            .map(|ask| match ask.ad_hoc {
                None => Resolved::new(&self.gate, self.entry(ask.limit)?, ask.key, ask.cost),
                Some(limit) => {
                    Resolved::named(&self.gate, limit.name(), limit.entry(self)?, ask.key, ask.cost)
                }
            })
            .collect()
    }

    async fn decide(
        &self,
        operation: &'static str,
        asks: &[Ask<'_>],
        hold: Option<Hold>,
    ) -> Result<Decision<'_>, Error> {
        let started = self.gate.started(operation);
        let resolved = self.resolve(asks)?;
        self.decide_resolved(operation, &resolved, hold, &started).await
    }

    /// The same for asks that are looked up already.
    pub(crate) async fn decide_resolved<'a>(
        &self,
        operation: &'static str,
        resolved: &[Resolved<'a, '_>],
        hold: Option<Hold>,
        started: &Started,
    ) -> Result<Decision<'a>, Error> {
        match &self.gate.backend {
            Backend::Memory(store) => self.decide_here(store, operation, resolved, hold, started),
            Backend::Remote(remote) => {
                let span = started.span().clone();
                let answered = match gate::is_denied_outright(resolved) {
                    true => Box::pin(remote.peek(resolved).instrument(span)).await?,
                    false => remote.charge(resolved, hold).instrument(span).await?,
                };
                Ok(self.told(operation, resolved, answered, started))
            }
        }
    }

    fn decide_here<'a>(
        &self,
        store: &MemoryStore,
        operation: &'static str,
        resolved: &[Resolved<'a, '_>],
        hold: Option<Hold>,
        started: &Started,
    ) -> Result<Decision<'a>, Error> {
        let _within = started.enter();
        let items = gate::memory_items(resolved);
        let counted = match gate::is_denied_outright(resolved) {
            true => store.peek_all(&items),
            false => store.charge_all(&items, hold)?,
        };
        Ok(limiter::told(&self.gate, operation, resolved, &counted, started))
    }

    /// Whether the counters are in this process, so that every call is ready at once.
    #[cfg(feature = "http")]
    pub(crate) fn is_in_process(&self) -> bool {
        matches!(self.gate.backend, Backend::Memory(_))
    }

    /// Notes what a store elsewhere, or whoever stood in for it, has answered.
    fn told<'a>(
        &self,
        operation: &'static str,
        resolved: &[Resolved<'a, '_>],
        answered: Answered,
        started: &Started,
    ) -> Decision<'a> {
        let _within = started.enter();
        let decision = gate::conclude(resolved, answered.answers);
        self.gate.tell_all(operation, resolved, &decision, answered.trouble, started);
        decision
    }
}

impl fmt::Debug for Tollgate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tollgate").field("rules", &self.rules()).finish_non_exhaustive()
    }
}
