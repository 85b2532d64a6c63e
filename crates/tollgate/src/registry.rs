//! The registry: all limits of a program by name, on whichever store, built in code or from a policy.
//!
//! Calls here are async because a store may be elsewhere; on the memory store they are ready at once. For the shortest way
//! take a [`Limiter`] out of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tollgate_kernel::{Limit, Micros, Outcome};
use tollgate_store::{
    Charged, Clock, Hold, HoldId, MemoryOptions, MemoryStore, Settled, Settlement, Store, WhenFull,
};

use crate::decision::Decision;
use crate::error::Error;
use crate::gate::{self, Backend, Entry, Gate, Resolved, ResolvedAll};
use crate::limiter::Limiter;
use crate::policy::{Policy, PolicyError, Rule};
use crate::report::Observer;
use crate::reservation::{Reservation, Reserved};
use crate::wait::{self, Queues, WaitError};

/// All limits of a program. Cheap to clone; clones share their counters.
///
/// ```
/// use tollgate::{Limit, Micros, Tollgate};
///
/// # async fn run() -> Result<(), tollgate::Error> {
/// let gate = Tollgate::builder()
///     .limit("api", Limit::token_bucket("10/s".parse()?, 20)?)
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
    gate: Arc<Gate>,
}

/// One limit of a charge, by name.
///
/// ```
/// use tollgate::Ask;
/// let ask = Ask::new("tokens", "model:gpt").cost(1500);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    limit: &'a str,
    key: &'a str,
    cost: u64,
}

impl<'a> Ask<'a> {
    /// One unit, under `limit`, paid by `key`.
    pub fn new(limit: &'a str, key: &'a str) -> Ask<'a> {
        Ask { limit, key, cost: 1 }
    }

    /// How much to charge.
    #[must_use]
    pub fn cost(self, cost: u64) -> Ask<'a> {
        Ask { cost, ..self }
    }
}

/// What a store would say of no limits at all; it need not be asked.
fn nothing_counted() -> Charged {
    Charged { allowed: true, outcomes: SmallVec::new() }
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

    /// The rules, in the order in which they were registered.
    pub fn rules(&self) -> &[Rule] {
        self.gate.policy.rules()
    }

    /// Charges one unit under one limit.
    pub async fn acquire(&self, key: &str, limit: &str) -> Result<Decision<'_>, Error> {
        self.charge(&[Ask::new(limit, key)]).await
    }

    /// Charges several limits at once: all of them, or none.
    pub async fn charge(&self, asks: &[Ask<'_>]) -> Result<Decision<'_>, Error> {
        self.decide("charge", asks, None).await
    }

    /// Answers as [`charge`](Self::charge) would, and changes nothing.
    pub async fn peek(&self, asks: &[Ask<'_>]) -> Result<Decision<'_>, Error> {
        let started = self.gate.started();
        let resolved = self.resolve(asks)?;
        let counted = self.peek_resolved(&resolved).await?;
        let decision = gate::conclude(&resolved, &counted.outcomes);
        self.gate.tell_all("peek", &resolved, &decision, started);
        Ok(decision)
    }

    /// Charges an estimate, to be settled with the true amount within `ttl`.
    pub async fn reserve(&self, asks: &[Ask<'_>], ttl: Duration) -> Result<Reserved<'_>, Error> {
        let hold = Hold { id: HoldId::random(), ttl: Micros::from(ttl) };
        let decision = self.decide("reserve", asks, Some(hold)).await?;
        let reservation = decision.allowed().then(|| Reservation::new(self.gate.clone(), hold.id, &decision));
        Ok(Reserved { decision, reservation })
    }

    /// Settles, cancels or renews a reservation by its name.
    pub async fn settle(&self, id: HoldId, settlement: &Settlement) -> Result<Settled, Error> {
        let settled = match &self.gate.backend {
            Backend::Memory(store) => store.settle(id, settlement)?,
            Backend::Remote(store) => store.settle(id, settlement).await?,
        };
        self.gate.queues.nudge();
        Ok(settled)
    }

    /// What a key has used and has left, as it stands.
    pub async fn status(&self, limit: &str, key: &str) -> Result<Outcome, Error> {
        if let Ok(limiter) = self.limiter(limit) {
            return Ok(limiter.status(key));
        }
        // As in the memory store: a charge of all there could ever be shows the key as it stands.
        let [mut standing, mut one] = [Outcome::BLOCKED; 2];
        for (outcome, cost) in [(&mut standing, u64::MAX), (&mut one, 1)] {
            let resolved = self.resolve(&[Ask { limit, key, cost }])?;
            let counted = self.peek_resolved(&resolved).await?;
            *outcome = gate::conclude(&resolved, &counted.outcomes).binding().outcome;
        }
        Ok(Outcome { allowed: one.allowed, retry_after: one.retry_after, ..standing })
    }

    /// Forgets what a key was charged; false when nothing was remembered.
    pub async fn reset(&self, limit: &str, key: &str) -> Result<bool, Error> {
        let entry = self.entry(limit)?;
        let key = crate::key::Key::parse(key)?;
        let forgotten = match (entry.place(&key), &self.gate.backend) {
            (gate::Place::Counted { memory: Some(memory), .. }, _) => memory.forget(key.canonical()),
            (gate::Place::Counted { stored, .. }, Backend::Remote(store)) => {
                store.forget(stored, key.canonical()).await?
            }
            _ => false,
        };
        self.gate.queues.nudge();
        Ok(forgotten)
    }

    /// Waits until the charge fits, at most `within`, first come, first served among those who wait for the same key in this
    /// process.
    pub async fn wait(&self, ask: Ask<'_>, within: Duration) -> Result<Outcome, WaitError> {
        let entry = self.entry(ask.limit)?;
        wait::wait(&self.gate, entry, ask.key, ask.cost, within, None).await
    }

    /// How many keys the memory store remembers; zero where the store is elsewhere.
    pub fn keys(&self) -> usize {
        match &self.gate.backend {
            Backend::Memory(store) => store.keys(),
            Backend::Remote(_) => 0,
        }
    }

    fn entry(&self, name: &str) -> Result<&Arc<Entry>, Error> {
        match self.gate.by_name.get(name) {
            Some(&index) => Ok(&self.gate.entries[index]),
            None => Err(self.gate.policy.unknown(name).into()),
        }
    }

    fn resolve<'a, 'k>(&'a self, asks: &[Ask<'k>]) -> Result<ResolvedAll<'a, 'k>, Error> {
        gate::check_count(asks.len())?;
        asks.iter().map(|ask| Resolved::new(&self.gate, self.entry(ask.limit)?, ask.key, ask.cost)).collect()
    }

    async fn decide(
        &self,
        operation: &'static str,
        asks: &[Ask<'_>],
        hold: Option<Hold>,
    ) -> Result<Decision<'_>, Error> {
        let started = self.gate.started();
        let resolved = self.resolve(asks)?;
        let counted = if gate::is_denied_outright(&resolved) {
            self.peek_resolved(&resolved).await?
        } else {
            match &self.gate.backend {
                Backend::Memory(store) => store.charge_all(&gate::memory_items(&resolved), hold)?,
                Backend::Remote(store) => match &gate::store_items(&resolved)[..] {
                    [] if hold.is_none() => nothing_counted(),
                    items => store.charge(items, hold).await?,
                },
            }
        };
        let decision = gate::conclude(&resolved, &counted.outcomes);
        self.gate.tell_all(operation, &resolved, &decision, started);
        Ok(decision)
    }

    async fn peek_resolved(&self, resolved: &[Resolved<'_, '_>]) -> Result<Charged, Error> {
        Ok(match &self.gate.backend {
            Backend::Memory(store) => store.peek_all(&gate::memory_items(resolved)),
            Backend::Remote(store) => match &gate::store_items(resolved)[..] {
                [] => nothing_counted(),
                items => store.peek(items).await?,
            },
        })
    }
}

impl fmt::Debug for Tollgate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tollgate").field("rules", &self.rules()).finish_non_exhaustive()
    }
}

/// Builds a [`Tollgate`].
#[derive(Default)]
pub struct TollgateBuilder {
    rules: Vec<Result<Rule, PolicyError>>,
    memory: MemoryOptions,
    store: Option<Arc<dyn Store>>,
    observer: Option<Arc<dyn Observer>>,
}

impl TollgateBuilder {
    /// Registers a limit by name. A name that will not do is reported by [`build`](Self::build).
    #[must_use]
    pub fn limit(mut self, name: &str, limit: Limit) -> Self {
        self.rules.push(Rule::new(name, limit));
        self
    }

    /// Registers a rule: a limit with overrides, or one that only watches, lets everything through, or nothing.
    #[must_use]
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(Ok(rule));
        self
    }

    /// Registers all rules of a policy.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.rules.extend(policy.rules().iter().cloned().map(Ok));
        self
    }

    /// Where the memory store's time comes from; the system clock, unless said.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.memory.clock = clock;
        self
    }

    /// How many keys the memory store remembers at most; ten million, unless said.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.memory.max_keys = max_keys;
        self
    }

    /// What happens to keys that the memory store has no room for.
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.memory.when_full = when_full;
        self
    }

    /// How often a thread of the memory store forgets a tenth of what is as good as new; `None` starts no thread.
    #[must_use]
    pub fn sweep_every(mut self, every: Option<Duration>) -> Self {
        self.memory.sweep_every = every;
        self
    }

    /// Counts in another store than the memory store.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sees every decision.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// The registry, if all rules have proper names and no two have the same.
    pub fn build(self) -> Result<Tollgate, Error> {
        let rules = self.rules.into_iter().collect::<Result<Vec<Rule>, PolicyError>>()?;
        let policy = Policy::new(rules)?;
        let clock = self.memory.clock.clone();
        let backend = match self.store {
            Some(store) => Backend::Remote(store),
            None => Backend::Memory(MemoryStore::new(self.memory)),
        };
        let entries: Vec<Arc<Entry>> =
            policy.rules().iter().map(|rule| Arc::new(Entry::new(rule.clone(), &backend))).collect();
        let by_name: HashMap<String, usize> =
            policy.rules().iter().enumerate().map(|(index, rule)| (rule.name().to_owned(), index)).collect();
        let queues = Queues::default();
        let gate = Gate {
            entries,
            by_name,
            policy,
            backend,
            clock,
            observer: self.observer,
            queues,
            malformed: Default::default(),
        };
        Ok(Tollgate { gate: Arc::new(gate) })
    }
}
