//! The handle on one local limit: synchronous, without allocating, and by its type never on a remote store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::{Cost, Limit};
use tollgate_store::{MemoryOptions, MemoryStore};

use crate::call::Output;
use crate::charge::{Charge, LimitRef, NamedLimit};
use crate::decision::{Decision, Denied};
use crate::engine::{Charges, Engine, Mode, Request, Step, Take};
use crate::error::Error;
use crate::key::KeyRef;
use crate::outcome::Outcome;
use crate::permit::Permit;
#[cfg(feature = "http")]
use crate::policy::entry::Path;
use crate::policy::{Policy, Rule};
use crate::reservation::Reservation;

/// How long a reservation can be settled by default.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// One limit in this process. Cheap to clone; clones share their counters. It follows reloads of its gate.
///
/// ```
/// use tollgate::{Limit, Limiter};
///
/// let limiter = Limiter::new(Limit::token_bucket("10/s", 20)?);
/// assert!(limiter.check("user:42").is_allowed());
/// assert_eq!(limiter.charge("user:42", 5)?.remaining(), 14);
/// assert_eq!(limiter.peek("user:7", 1)?.remaining(), 19);
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone)]
pub struct Limiter {
    engine: Arc<Engine>,
    limit: NamedLimit,
}

impl Limiter {
    /// A limiter with its own memory store, for one limit with the name `default`.
    pub fn new(limit: Limit) -> Limiter {
        let engine = Arc::new(Engine::in_memory(MemoryStore::new(MemoryOptions::default())));
        let placed = Rule::new("default", limit)
            .and_then(|rule| Policy::new([rule]))
            .map_err(Error::from)
            .and_then(|policy| engine.reload(policy))
            .and_then(|()| engine.entry("default"));
        match placed {
            Ok(entry) => Limiter { engine, limit: NamedLimit { entry } },
            Err(error) => unreachable!("one limit with a proper name: {error}"),
        }
    }

    /// A handle on one limit of a gate in this process.
    pub(crate) fn on(engine: Arc<Engine>, limit: NamedLimit) -> Limiter {
        Limiter { engine, limit }
    }

    /// Charges a key one unit. An empty or malformed key is denied, and nothing is charged. A concurrency limit denies every
    /// check with [`Reason::NeedsPermit`](crate::Reason::NeedsPermit); use [`acquire`](Self::acquire) for it.
    #[inline]
    pub fn check<'k>(&self, key: impl Into<KeyRef<'k>>) -> Outcome {
        self.engine.charge_one(&self.limit.entry, &key.into(), Cost::ONE)
    }

    /// Charges a key `cost` units. Zero is an error: to look without charging, [`peek`](Self::peek).
    #[inline]
    pub fn charge<'k>(&self, key: impl Into<KeyRef<'k>>, cost: u64) -> Result<Outcome, Error> {
        let cost = Cost::new(cost).ok_or_else(Error::zero_cost)?;
        Ok(self.engine.charge_one(&self.limit.entry, &key.into(), cost))
    }

    #[cfg(feature = "http")]
    #[inline]
    pub(crate) fn charge_cost<'k>(&self, key: impl Into<KeyRef<'k>>, cost: Cost) -> Outcome {
        self.engine.charge_one(&self.limit.entry, &key.into(), cost)
    }

    /// Whether a charge needs only the counters, and the limit has not been reloaded since the lookup.
    #[cfg(feature = "http")]
    pub(crate) fn is_fast(&self) -> bool {
        let entry = &self.limit.entry;
        entry.is_current() && matches!(entry.path, Path::Fast | Path::FastCounted)
    }

    /// Charges several limits of this limiter's gate at once: all of them, or none. Repeated pairs of limit and key add up.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Charge, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder()
    ///     .limit("global", Limit::sliding_window(1_000, Duration::from_secs(60))?)
    ///     .limit("per-user", Limit::sliding_window(1, Duration::from_secs(60))?)
    ///     .build()?;
    /// let global = gate.local("global")?;
    /// let charges = [Charge::new("global", "all"), Charge::new("per-user", "user:42")];
    /// assert!(global.charge_all(&charges)?.is_allowed());
    /// assert_eq!(global.charge_all(&charges)?.binding().limit(), "per-user");
    /// assert_eq!(global.status("all").used(), 1); // the refused charge took nothing here
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn charge_all(&self, charges: &[Charge<'_>]) -> Result<Decision, Error> {
        self.engine.charge_all(charges)
    }

    /// Charges each of many keys one unit, at one reading of the clock, and adds the answers to `outcomes`, in order. With
    /// millions of keys this is about twice as fast as [`check`](Self::check) on each: memory is waited for only once a batch.
    pub fn check_many<K: AsRef<str>>(&self, keys: &[K], outcomes: &mut Vec<Outcome>) {
        self.engine.charge_many(&self.limit.entry, keys, outcomes);
    }

    /// Answers as a charge would, and changes nothing.
    pub fn peek<'k>(&self, key: impl Into<KeyRef<'k>>, cost: u64) -> Result<Outcome, Error> {
        let charge = Charge::new(&self.limit, key.into()).cost(cost);
        let decision: Decision = self.run(Request::new(Charges::One(charge), Mode::Peek))?;
        Ok(*decision.binding())
    }

    /// What a key has used and has left: [`Outcome::used`], `remaining`, `capacity`, and `reset_after` for the time left. It
    /// shows the current state, as a charge of zero would.
    pub fn status<'k>(&self, key: impl Into<KeyRef<'k>>) -> Outcome {
        self.engine.status_local(&self.limit.entry, key.into())
    }

    /// Forgets all charges of a key; false if the key has none.
    pub fn reset<'k>(&self, key: impl Into<KeyRef<'k>>) -> bool {
        self.engine.reset_local(&self.limit.entry, key.into())
    }

    /// Charges an estimate that can be settled with the true amount within a minute.
    /// [`Tollgate::reserve`](crate::Tollgate::reserve) takes several limits and a time to live.
    pub fn reserve<'k>(
        &self,
        key: impl Into<KeyRef<'k>>,
        cost: u64,
    ) -> Result<Result<Reservation, Denied>, Error> {
        let charge = Charge::new(&self.limit, key.into()).cost(cost);
        let take = Take::Reservation(DEFAULT_TTL.into());
        self.run(Request { take, ..Request::new(Charges::One(charge), Mode::AllOrNone) })
    }

    /// Charges an estimate under several limits of this limiter's gate, to be settled with the true amount within `ttl`.
    pub fn reserve_all(
        &self,
        charges: &[Charge<'_>],
        ttl: Duration,
    ) -> Result<Result<Reservation, Denied>, Error> {
        let take = Take::Reservation(ttl.into());
        self.run(Request { take, ..Request::new(Charges::All(charges), Mode::AllOrNone) })
    }

    /// Takes one unit and, under a concurrency limit, holds it until the permit is dropped.
    pub fn acquire<'k>(&self, key: impl Into<KeyRef<'k>>) -> Result<Result<Permit, Denied>, Error> {
        let charge = Charge::new(&self.limit, key.into());
        self.run(Request { take: Take::Permit, ..Request::new(Charges::One(charge), Mode::AllOrNone) })
    }

    /// Waits until `cost` fits, at most `within`. Waiters for the same key are served in order. The outcome is a denial if the
    /// cost can never fit, or did not fit in time. Dropping the future leaves nothing charged. For a concurrency limit use
    /// [`acquire_within`](Self::acquire_within).
    pub async fn wait<'k>(
        &self,
        key: impl Into<KeyRef<'k>>,
        cost: u64,
        within: Duration,
    ) -> Result<Outcome, Error> {
        let charge = Charge::new(&self.limit, key.into()).cost(cost);
        let within = Some(within);
        let decision: Decision = self
            .run_waiting(Request { within, ..Request::new(Charges::One(charge), Mode::AllOrNone) })
            .await?;
        Ok(*decision.binding())
    }

    /// Waits for what [`acquire`](Self::acquire) takes, at most `within`, in the same queue as [`wait`](Self::wait).
    pub async fn acquire_within<'k>(
        &self,
        key: impl Into<KeyRef<'k>>,
        within: Duration,
    ) -> Result<Result<Permit, Denied>, Error> {
        let charge = Charge::new(&self.limit, key.into());
        let (take, within) = (Take::Permit, Some(within));
        self.run_waiting(Request { take, within, ..Request::new(Charges::One(charge), Mode::AllOrNone) })
            .await
    }

    /// This limit and a key, as one of several charges.
    pub fn of<'a>(&'a self, key: impl Into<KeyRef<'a>>) -> Charge<'a> {
        Charge::new(&self.limit, key)
    }

    /// The limit's name.
    pub fn name(&self) -> &'static str {
        self.limit.name()
    }

    /// The rule that the limit follows now.
    pub fn rule(&self) -> Rule {
        self.limit.rule()
    }

    /// How many keys are remembered under this limit, those with an override included.
    pub fn keys(&self) -> usize {
        self.limit.entry.newest().memory().map_or(0, |memory| memory.keys())
    }

    fn run<T: Output>(&self, mut request: Request<'_>) -> Result<T, Error> {
        match self.engine.charge(&mut request) {
            Step::Done(answer) => answer.map(|answer| T::of(&self.engine, answer)),
            // A limiter is only made where the counters are in this process, and this does not wait.
            Step::Waits(_) => Err(Error::not_local()),
        }
    }

    async fn run_waiting<T: Output>(&self, mut request: Request<'_>) -> Result<T, Error> {
        let answer = match self.engine.charge(&mut request) {
            Step::Done(answer) => answer,
            Step::Waits(waiting) => waiting.await,
        };
        answer.map(|answer| T::of(&self.engine, answer))
    }
}

impl<'a> From<&'a Limiter> for LimitRef<'a> {
    fn from(limiter: &'a Limiter) -> LimitRef<'a> {
        (&limiter.limit).into()
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("rule", &self.rule()).finish_non_exhaustive()
    }
}
