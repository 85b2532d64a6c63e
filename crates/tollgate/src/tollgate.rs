//! All limits of a program by name, on whichever store: the same calls with the same meaning everywhere.
//!
//! Calls are async because a store may be remote; on the memory store they are ready at their first poll. For one limit in this
//! process, in plain code, take a [`Limiter`] out of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Settled, Settlement};

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
/// An `Err` always means that the call could not be decided. A call that leaves nothing in your hands answers a [`Decision`]; one
/// that hands you something answers that, or [`Denied`].
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

    /// Charges each by itself, in order, and answers for each. What is wrong with one (its limit is not known, its cost is 0, its limit
    /// is one of concurrency) is an error in its place, and the others are charged. On a remote store this is one call for up to 64
    /// different pairs of limit and key.
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

    /// Waits until all charges fit, at most `within`, first come, first served among those who wait for the same limit and key in
    /// this process. The answer is denied where the charge never can fit (no [`retry_after`](Decision::retry_after)) and where
    /// there was no room in time. What another process gives back is seen within 250 ms.
    ///
    /// Dropping the future leaves nothing charged: a charge that is on its way to a remote store is cancelled there.
    pub fn wait<'a>(&'a self, charges: &'a [Charge<'a>], within: Duration) -> Call<'a, Decision> {
        self.call(Charges::All(charges), Mode::AllOrNone, Take::Nothing, Some(within))
    }

    /// Gives back what was charged and need not have been, such as a request that was answered from a cache: the cost of each
    /// charge, of what counts now, the newest first, and never more than there is. Nothing is given back of leases, nor to a
    /// key that is not remembered. Shadow limits are charged, and refunded, like any other.
    ///
    /// While a remote store is down this is an error that may pass, and nothing is given back. If the error
    /// [is ambiguous](Error::is_ambiguous), it may have been; then it must not be asked for again, because a refund has no id
    /// under which the store would know it. On a cluster keys of different slots are refunded each for itself.
    ///
    /// A caller that knows beforehand that a charge may shrink reserves and settles it: that cannot give back too much, and can be
    /// sent again.
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

    /// Settles, cancels or renews a charge by its id, in whichever process it was made. By id, [`Settlement::Each`] has one amount
    /// for each charge that is counted: an unlimited key has none. [`Reservation::settle_each`] knows which those are.
    ///
    /// While a remote store is down this is an error that may pass, and the charge stays as it is. What was reserved while it was
    /// down is settled in this process, whatever has become of the store: limits that count locally are corrected, and the
    /// others, which charged nothing, have nothing to correct.
    ///
    /// If the reply to the reserve call was lost, what it reserved is settled in this process as well, and the store's copy is
    /// cancelled as soon as the store answers. Until then the answer is [`Settled::Pending`] instead of `Done`.
    ///
    /// A renewal that answers `Unknown` means that the lease is gone, and another holder may run beside this one. For a
    /// reservation of this gate that is logged and counted as well.
    pub async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, Error> {
        self.engine.settle(id, settlement).await
    }

    /// What a key has used and has left, as it stands. A remote store that fails is an error: nothing is made up.
    pub async fn status(
        &self,
        limit: impl Into<LimitRef<'_>>,
        key: impl Into<KeyRef<'_>>,
    ) -> Result<Outcome, Error> {
        let (limit, key) = (limit.into(), key.into());
        self.engine.status(limit, key).await
    }

    /// Forgets what a key was charged; false when nothing was remembered. If a remote store fails, that is an error and nothing is
    /// forgotten in this process either; the same call can be sent again.
    pub async fn reset(
        &self,
        limit: impl Into<LimitRef<'_>>,
        key: impl Into<KeyRef<'_>>,
    ) -> Result<bool, Error> {
        let (limit, key) = (limit.into(), key.into());
        self.engine.reset(limit, key).await
    }

    /// Waits until what is to be done in a remote store behind the callers' backs is done: releases of dropped permits and cancels
    /// of charges whose callers left. For the end of a program. A store that cannot be reached is given up after a few attempts.
    pub async fn flush(&self) {
        self.engine.flush().await;
    }

    /// A limit in this process, for plain code. The error lists the limits there are; a gate on a remote store has none in this
    /// process.
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

    /// A limit looked up once, for charges that are made often. The error lists the limits there are.
    pub fn limit(&self, name: &str) -> Result<NamedLimit, Error> {
        Ok(NamedLimit { entry: self.engine.entry(name)? })
    }

    /// A limit whose numbers come with the call, counted under `name`, which no limit of the policy may have. The name is the
    /// program's, and the numbers may be a stranger's: however many others there are, these are served. Limits of one name should
    /// be of one strategy, and windows of one length, as what is counted by one says little under another.
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
    pub fn find(&self, name: &str) -> Result<Rule, Error> {
        Ok(self.engine.entry(name)?.rule.clone())
    }

    /// Puts another policy in place over the same counters, with nothing that was consumed lost or counted twice. All handles
    /// follow it: limiters, named limits, layers, waiters. If anything of it is refused, the old one stays.
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
    /// A limit goes on from what was consumed as long as its name and its strategy stay (a token bucket may become a leaky
    /// one), whatever becomes of its numbers, and so does a key that gains or loses an override. A limit of another strategy begins
    /// afresh; one that is left out is forgotten as its keys run out, and handles on it go on by its last numbers. Open
    /// reservations are settled by the numbers that they were made under. Those who wait are served by the new limits, in the
    /// order in which they came.
    pub fn reload(&self, policy: Policy) -> Result<(), Error> {
        self.engine.reload(policy)
    }

    /// Lets namespaces of keys be labels of metrics, as [`Telemetry::namespaces`](crate::telemetry) does at the start.
    pub fn show_namespaces<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) {
        self.engine.show_namespaces(names);
    }

    /// How the store fares: whether it answers, how it failed, and what was answered without it.
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
    /// Sets the metrics that no decision sets by itself: whether the store is up, how many keys the memory store remembers, how
    /// often charges got in each other's way. It also makes the count of decisions exact, which over the memory store is handed
    /// on 64 at a time by each thread. To be called before each scrape, or every few seconds.
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
