//! The handle on all limits of a program, by name, on any store: the same calls with the same meaning on every store.
//!
//! Calls are async because a store may be remote; on the memory store they are ready at their first poll. For one local limit in
//! synchronous code, [`Tollgate::local`] returns a [`Limiter`]. The engine (`engine.rs`) does the work; this file has no logic.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, PutRecord, Record, RecordKind, Records, Settled, Settlement};

use crate::call::Call;
use crate::charge::{Charge, LimitRef, NamedLimit};
use crate::decision::{Decision, Denied};
use crate::engine::{Backend, Charges, Engine, Mode, Request, Take};
use crate::error::Error;
use crate::health::StoreHealth;
use crate::key::KeyRef;
use crate::limiter::Limiter;
use crate::outcome::Outcome;
use crate::permit::Permit;
use crate::policy::{Allowance, Policy, Rule};
use crate::reservation::Reservation;

/// All limits of a program. Cheap to clone; clones share their counters.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limit, Tollgate};
///
/// # async fn run() -> Result<(), tollgate::Error> {
/// let gate = Tollgate::builder()
///     .limit("api", Limit::token_bucket("10/s", 20)?)
///     .limit("login", Limit::fixed_window(5, Duration::from_secs(60))?)
///     .build()?;
/// assert!(gate.check("api", "user:42").await?.is_allowed());
///
/// let error = gate.check("logon", "user:42").await.unwrap_err();
/// assert!(error.to_string().contains("login"));
/// # Ok(())
/// # }
/// # use std::future::Future;
/// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
/// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
/// ```
///
/// An `Err` always means that the call could not be decided. A call that charges returns a [`Decision`]. A call that returns a
/// reservation or a permit returns [`Denied`] if it is refused.
#[derive(Clone)]
pub struct Tollgate {
    pub(crate) engine: Arc<Engine>,
}

impl Tollgate {
    /// Charges one unit under one limit.
    #[inline]
    pub fn check<'a>(
        &'a self,
        limit: impl Into<LimitRef<'a>>,
        key: impl Into<KeyRef<'a>>,
    ) -> Call<'a, Decision> {
        self.call(Charges::One(Charge::new(limit, key)), Mode::AllOrNone, Take::Nothing, None)
    }

    /// Charges several limits at once: all of them, or none. Repeated pairs of limit and key add up. At most 64.
    pub fn charge<'a>(&'a self, charges: &'a [Charge<'a>]) -> Call<'a, Decision> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Nothing, None)
    }

    /// Charges each charge separately, in order, and returns one result for each. An invalid charge (unknown limit, cost 0, a
    /// concurrency limit) is an error at its position, and the others are charged. On a remote store this is one call for up to
    /// 64 different pairs of limit and key.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use tollgate::{Charge, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("1/h", 1)?).build()?;
    /// let charges = ["user:1", "user:2", "user:1"].map(|key| Charge::new("api", key));
    /// let mut admitted = Vec::new();
    /// for outcome in gate.charge_each(&charges).await? {
    ///     admitted.push(outcome?.is_allowed());
    /// }
    /// assert_eq!(admitted, [true, true, false]);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub fn charge_each<'a>(&'a self, charges: &'a [Charge<'a>]) -> Call<'a, Vec<Result<Outcome, Error>>> {
        self.call(Charges::All(charges), Mode::Each, Take::Nothing, None)
    }

    /// Answers as [`charge`](Self::charge) would, and changes nothing.
    pub fn peek<'a>(&'a self, charges: &'a [Charge<'a>]) -> Call<'a, Decision> {
        self.call(Charges::All(charges), Mode::Peek, Take::Nothing, None)
    }

    /// Charges an estimate, to be settled with the true amount within `ttl`.
    pub fn reserve<'a>(
        &'a self,
        charges: &'a [Charge<'a>],
        ttl: Duration,
    ) -> Call<'a, Result<Reservation, Denied>> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Reservation(Micros::from(ttl)), None)
    }

    /// Waits until an estimate fits, at most `within`, and reserves it as [`reserve`](Self::reserve) does.
    pub fn reserve_within<'a>(
        &'a self,
        charges: &'a [Charge<'a>],
        ttl: Duration,
        within: Duration,
    ) -> Call<'a, Result<Reservation, Denied>> {
        let take = Take::Reservation(Micros::from(ttl));
        self.call(Charges::All(charges), Mode::AllOrNone, take, Some(within))
    }

    /// Takes one unit and, under a concurrency limit, holds it until the permit is dropped.
    pub fn acquire<'a>(
        &'a self,
        limit: impl Into<LimitRef<'a>>,
        key: impl Into<KeyRef<'a>>,
    ) -> Call<'a, Result<Permit, Denied>> {
        self.call(Charges::One(Charge::new(limit, key)), Mode::AllOrNone, Take::Permit, None)
    }

    /// The same for several limits, all or none: one permit holds all leases of the charge.
    pub fn acquire_all<'a>(&'a self, charges: &'a [Charge<'a>]) -> Call<'a, Result<Permit, Denied>> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Permit, None)
    }

    /// Waits for what [`acquire`](Self::acquire) takes, at most `within`.
    pub fn acquire_within<'a>(
        &'a self,
        limit: impl Into<LimitRef<'a>>,
        key: impl Into<KeyRef<'a>>,
        within: Duration,
    ) -> Call<'a, Result<Permit, Denied>> {
        self.call(Charges::One(Charge::new(limit, key)), Mode::AllOrNone, Take::Permit, Some(within))
    }

    /// Waits for what [`acquire_all`](Self::acquire_all) takes, at most `within`.
    pub fn acquire_all_within<'a>(
        &'a self,
        charges: &'a [Charge<'a>],
        within: Duration,
    ) -> Call<'a, Result<Permit, Denied>> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Permit, Some(within))
    }

    /// Waits until all charges fit, at most `within`. Waiters for the same limit and key in this process are served in order. The
    /// decision is a denial if the charge can never fit (no [`retry_after`](Decision::retry_after)) or did not fit in time. What
    /// another process gives back is seen within 250 ms.
    ///
    /// Dropping the future leaves nothing charged: a charge that is on its way to a remote store is cancelled there.
    pub fn wait<'a>(&'a self, charges: &'a [Charge<'a>], within: Duration) -> Call<'a, Decision> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Nothing, Some(within))
    }

    /// Gives back charges that turned out to be unnecessary, for example of a request that was answered from a cache. Each charge
    /// gives back its cost, newest first, and never more than is charged now. Leases are not given back, and a key that the store
    /// does not remember gets nothing. Shadow limits are refunded like any other limit.
    ///
    /// While a remote store is down this is a transient error, and nothing is given back. If the error [is
    /// ambiguous](Error::is_ambiguous), the refund may have happened. Do not send it again then: a refund has no id, so the store
    /// would refund twice. On a cluster, keys of different slots are refunded separately.
    ///
    /// If a charge may shrink later, reserve and settle it instead: a settlement cannot give back too much, and it can be sent
    /// again.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use std::time::Duration;
    /// use tollgate::{Charge, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::fixed_window(5, Duration::from_secs(60))?).build()?;
    /// assert!(gate.charge(&[Charge::new("api", "user:42").cost(3)]).await?.is_allowed());
    /// gate.refund(&[Charge::new("api", "user:42").cost(2)]).await?;
    /// assert_eq!(gate.status("api", "user:42").await?.used(), 1);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub fn refund<'a>(&'a self, charges: &'a [Charge<'a>]) -> Call<'a, ()> {
        self.call(Charges::All(charges), Mode::Refund, Take::Nothing, None)
    }

    /// Settles, cancels or renews a charge by its id, in any process. [`Settlement::Each`] has one amount for each charge that is
    /// counted; a charge of an unlimited key is not. [`Reservation::settle_each`] handles that.
    ///
    /// While a remote store is down this is a transient error, and the charge stays as it is. A reservation that was made during
    /// the outage is settled in this process, even after the store is back: limits that counted locally are corrected, and the
    /// others charged nothing.
    ///
    /// If the reply to the reserve call was lost, the reservation is settled in this process too, and the store's copy is
    /// cancelled as soon as the store answers. Until then the result is [`Settled::Pending`] instead of `Done`.
    ///
    /// A renewal that returns `Unknown` means that the lease is gone and that another holder may run at the same time. If this
    /// gate made the reservation, the loss is also logged and counted.
    pub async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, Error> {
        self.engine.settle(id, settlement).await
    }

    /// What a key has used and has left. If a remote store fails, this is an error; there is no fallback.
    pub async fn status(
        &self,
        limit: impl Into<LimitRef<'_>>,
        key: impl Into<KeyRef<'_>>,
    ) -> Result<Outcome, Error> {
        let (limit, key) = (limit.into(), key.into());
        self.engine.status(limit, key).await
    }

    /// Forgets all charges of a key; false if the key has none. If a remote store fails, this is an error and nothing is
    /// forgotten in this process either; the same call can be sent again.
    pub async fn reset(
        &self,
        limit: impl Into<LimitRef<'_>>,
        key: impl Into<KeyRef<'_>>,
    ) -> Result<bool, Error> {
        let (limit, key) = (limit.into(), key.into());
        self.engine.reset(limit, key).await
    }

    /// Waits until all background work in a remote store is done: releases of dropped permits, and cancels of charges whose
    /// callers left. Call it at the end of a program. It gives up on an unreachable store after a few attempts.
    pub async fn flush(&self) {
        self.engine.flush().await;
    }

    /// A local limit, for synchronous code. Fails if the limit is unknown (the error lists all limits) or the gate's store is
    /// remote.
    pub fn local<'a>(&self, limit: impl Into<LimitRef<'a>>) -> Result<Limiter, Error> {
        let limit = limit.into();
        let limit = match limit.0 {
            crate::charge::Given::Name(name) => self.limit(name)?,
            crate::charge::Given::Handle(handle) => self.engine.owned(handle)?.clone(),
        };
        match self.engine.is_local() {
            true => Ok(Limiter::on(self.engine.clone(), limit)),
            false => Err(Error::call(format!(
                "the counters of `{}` are in a remote store and not in this process; use the async calls of Tollgate",
                limit.name()
            ))),
        }
    }

    /// Looks a limit up, for limits that are charged often. The error lists all limits.
    pub fn limit(&self, name: &str) -> Result<NamedLimit, Error> {
        Ok(NamedLimit { entry: self.engine.entry(name)? })
    }

    /// A limit whose numbers come with the call, counted under `name`. No limit of the policy may have the same name. The name
    /// should come from the program; the numbers may come from a client, and any number of different ones is served. Limits of
    /// one name should have the same strategy and the same window, because counts of one strategy mean little under another.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use tollgate::{Charge, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().build()?;
    /// let small = gate.ad_hoc("trial", Limit::token_bucket("30/m", 16)?)?;
    /// assert_eq!(gate.charge(&[Charge::new(&small, "user:42").cost(10)]).await?.binding().remaining(), 6);
    ///
    /// // Other numbers, the same key: what was consumed stays consumed.
    /// let large = gate.ad_hoc("trial", Limit::token_bucket("30/m", 20)?)?;
    /// assert_eq!(gate.check(&large, "user:42").await?.binding().remaining(), 9);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub fn ad_hoc(&self, name: &str, allowance: impl Into<Allowance>) -> Result<NamedLimit, Error> {
        Ok(NamedLimit { entry: self.engine.ad_hoc(name, allowance.into())? })
    }

    /// The names under which limits have come with calls, sorted.
    pub fn ad_hoc_names(&self) -> Vec<&'static str> {
        self.engine.ad_hoc_names()
    }

    /// The policy in place.
    pub fn policy(&self) -> Arc<Policy> {
        self.engine.policy()
    }

    /// The rule of this name. The error lists all limits.
    ///
    /// ```
    /// use tollgate::{Rule, Tollgate};
    ///
    /// let gate = Tollgate::builder().rule(Rule::unlimited("health")?).build()?;
    /// assert_eq!(gate.find("health")?.name(), "health");
    /// assert!(gate.find("helth").unwrap_err().to_string().contains("did you mean `health`?"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn find(&self, name: &str) -> Result<Rule, Error> {
        Ok(self.engine.entry(name)?.rule.clone())
    }

    /// Replaces the policy on the same counters: no charge is lost or counted twice. All handles follow it: limiters, named
    /// limits, layers, waiters. If any part of it is refused, the old policy stays.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use std::time::Duration;
    /// use tollgate::{Charge, Limit, Policy, Rule, Tollgate};
    ///
    /// let minute = Duration::from_secs(60);
    /// let gate = Tollgate::builder().limit("login", Limit::fixed_window(5, minute)?).build()?;
    /// assert!(gate.charge(&[Charge::new("login", "user:42").cost(4)]).await?.is_allowed());
    ///
    /// gate.reload(Policy::new([Rule::new("login", Limit::fixed_window(9, minute)?)?])?)?;
    /// assert_eq!(gate.status("login", "user:42").await?.remaining(), 5);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    ///
    /// A limit keeps its counts as long as its name and its strategy stay (a token bucket may become a leaky bucket), even if its
    /// numbers change. The same holds for a key that gains or loses an override. A limit with another strategy starts empty. A
    /// limit that the new policy removes is forgotten as its keys expire, and handles on it keep its last numbers. Open
    /// reservations are settled with the numbers that they were made with. Waiters are served by the new limits, in the same
    /// order.
    pub fn reload(&self, policy: Policy) -> Result<(), Error> {
        self.engine.reload(policy)
    }

    /// The records of a kind in the store, unless their revision is `known`. Records are what programs on the same store share
    /// beside counters. The memory store keeps them for the life of the process.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use tollgate::Tollgate;
    /// use tollgate::store::{Record, RecordKind};
    ///
    /// let gate = Tollgate::builder().build()?;
    /// let record = Record { id: "a".into(), payload: "up".into(), ends: None };
    /// gate.put_record(RecordKind::Server, &record).await?;
    /// let seen = gate.records(RecordKind::Server, None).await?;
    /// assert_eq!(seen.changed, Some(vec![record]));
    /// assert_eq!(gate.records(RecordKind::Server, Some(seen.revision)).await?.changed, None);
    /// assert!(gate.remove_record(RecordKind::Server, "a").await?);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub async fn records(&self, kind: RecordKind, known: Option<u64>) -> Result<Records, Error> {
        let records = self.engine.store().records(kind, known).await;
        if let (Backend::Remote(remote), Err(error)) = (&self.engine.backend, &records) {
            remote.failed_beside(error);
        }
        Ok(records?)
    }

    /// Stores a record. It replaces a record with the same id.
    pub async fn put_record(&self, kind: RecordKind, record: &Record) -> Result<PutRecord, Error> {
        Ok(self.engine.store().put_record(kind, record).await?)
    }

    /// Removes a record; false when there was none.
    pub async fn remove_record(&self, kind: RecordKind, id: &str) -> Result<bool, Error> {
        Ok(self.engine.store().remove_record(kind, id).await?)
    }

    /// Lets namespaces of keys be labels of metrics, as [`Telemetry::namespaces`](crate::telemetry) does at the start.
    pub fn show_namespaces<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) {
        self.engine.show_namespaces(names);
    }

    /// The health of the store: whether it answers, how it failed, and how many calls were answered without it.
    pub fn store_health(&self) -> StoreHealth {
        self.engine.health()
    }

    /// How many keys the memory store remembers; zero where the store is remote.
    pub fn keys(&self) -> usize {
        match &self.engine.backend {
            Backend::Memory(store) => store.keys(),
            Backend::Remote(_) => 0,
        }
    }

    #[inline]
    fn call<'a, T>(
        &'a self,
        charges: Charges<'a>,
        mode: Mode,
        take: Take,
        within: Option<Duration>,
    ) -> Call<'a, T> {
        Call::new(&self.engine, Request { charges, mode, take, id: None, within })
    }
}

#[cfg(feature = "telemetry")]
impl Tollgate {
    /// Updates the metrics that are not set by decisions: whether the store is up, how many keys the memory store holds, how
    /// often charges contended. Also makes the count of decisions exact: on the memory store each thread hands counts over in
    /// batches of 64. Call it before each scrape, or every few seconds.
    pub fn publish_metrics(&self) {
        self.engine.publish_metrics();
        self.hand_over_counts();
    }

    /// Makes the count of decisions exact, in metrics and for observers that take counts: over the memory store it is handed on
    /// 64 at a time by each thread. Costs little; [`publish_metrics`](Self::publish_metrics) does it as well.
    pub fn hand_over_counts(&self) {
        self.engine.hand_over_counts();
    }
}

impl fmt::Debug for Tollgate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tollgate").field("policy", &self.policy()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
