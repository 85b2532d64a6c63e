//! Building a registry: its rules, its store, and what it does when the store cannot answer.

use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::{Limit, Micros};
use tollgate_store::{Clock, MemoryOptions, MemoryStore, Store, WhenFull};

use crate::error::Error;
use crate::gate::{Backend, ByName, Entry, Gate, Otherwise};
use crate::policy::{Fallback, Policy, PolicyError, Rule};
use crate::registry::Tollgate;
use crate::remote::Remote;
use crate::report::watch::{Telemetry, Watch};
use crate::report::{Observer, Observers};
use crate::wait::Queues;

/// For how long a denial of a store elsewhere is believed, unless said otherwise.
pub(crate) const DENIAL_CACHE: Micros = Micros::from_millis(100);

/// Builds a [`Tollgate`].
pub struct TollgateBuilder {
    rules: Vec<Result<Rule, PolicyError>>,
    memory: MemoryOptions,
    /// Whether the clock was named.
    has_clock: bool,
    old: Option<Arc<Gate>>,
    store: Option<Arc<dyn Store>>,
    observers: Observers,
    telemetry: Option<Telemetry>,
    otherwise: Otherwise,
    denial_cache: Micros,
    /// Namespaces that metrics show by name.
    namespaces: Vec<String>,
}

impl Default for TollgateBuilder {
    fn default() -> TollgateBuilder {
        TollgateBuilder {
            rules: Vec::new(),
            memory: MemoryOptions::default(),
            has_clock: false,
            old: None,
            store: None,
            observers: Observers::default(),
            telemetry: None,
            otherwise: Otherwise { fallback: Fallback::default(), instances: 1 },
            denial_cache: DENIAL_CACHE,
            namespaces: Vec::new(),
        }
    }
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

    /// All that a configuration says of limits and of how they are counted. The store that it names is for the caller to
    /// connect and to hand to [`store`](Self::store).
    ///
    /// ```
    /// use tollgate::Tollgate;
    /// use tollgate::config::Config;
    ///
    /// let config = Config::parse("[store]\nmax_keys = 1_000\n[limits.api]\nunlimited = true\n")?;
    /// let gate = Tollgate::builder().config(&config).build()?;
    /// assert_eq!(gate.rules()[0].name(), "api");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "config")]
    #[must_use]
    pub fn config(mut self, config: &crate::config::Config) -> Self {
        let store = &config.store;
        let domains = config.envoy.rules().iter().map(|rule| &rule.domain);
        self.namespaces.extend(config.server.namespaces.iter().chain(domains).cloned());
        self.policy(config.policy.clone())
            .max_keys(store.max_keys)
            .when_full(store.when_full)
            .fallback(store.fallback)
            .instances(store.fallback_instances)
            .denial_cache(store.denial_cache.into())
    }

    /// Where the memory store's time comes from; the system clock, unless said. Whatever else this process measures (waiting,
    /// outages, denials, slices) goes by it too; a store elsewhere has its own.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.memory.clock = clock;
        self.has_clock = true;
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
    ///
    /// A store that does not answer is left alone for a while, and limits fall back: see [`fallback`](Self::fallback) and
    /// [`Tollgate::store_health`]. The options of the memory store are then those of the local fallback.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Counts where another registry does: a changed policy over the same counters, with nothing that was consumed lost or
    /// counted twice.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use tollgate::{Ask, Limit, Micros, Tollgate};
    ///
    /// let minute = Micros::from_secs(60);
    /// let old = Tollgate::builder().limit("login", Limit::fixed_window(5, minute)?).build()?;
    /// old.charge(&[Ask::new("login", "user:42").cost(4)]).await?;
    ///
    /// let new = Tollgate::builder().continuing(&old).limit("login", Limit::fixed_window(9, minute)?).build()?;
    /// assert_eq!(new.status("login", "user:42").await?.remaining, 5);
    /// # Ok(())
    /// # }
    /// # std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # use std::future::Future;
    /// ```
    ///
    /// A limit goes on from what was consumed as long as its name and its strategy stay (a token bucket may become a leaky
    /// one), whatever becomes of its numbers, and so does a key that gains or loses an override. Buckets keep the instant at
    /// which they are full, windows and counters what was counted and when it ends, logs and leases their entries. A limit
    /// of another strategy begins afresh; one that is left out is forgotten as its keys run out. Open reservations are settled
    /// by the numbers that they were made under.
    ///
    /// Of a store elsewhere, all that this process knows goes on too: whether it is down, what was answered without it, the
    /// counters of the local fallback, and the denials and slices of limits that stay as they are. The clock, the
    /// observers and the telemetry are the old ones unless others are named here; the size of the memory store is the old
    /// one's. A [`store`](Self::store) besides is an error.
    ///
    /// The old registry goes on working, by its own limits. Those who wait on it are served in the order in which they came,
    /// together with those who wait on the new one, and by the new limits. Let nobody charge the old one once the new one is
    /// in use, as with a lock around the one in use: in the memory store a key that is charged for the first time by both at
    /// once, under bucket rates that are not kept in the same units, may be counted in each alone.
    #[must_use]
    pub fn continuing(mut self, old: &Tollgate) -> Self {
        self.old = Some(old.gate.clone());
        self
    }

    /// What to answer when a store elsewhere cannot, for rules that do not say themselves; local by default.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use std::sync::Arc;
    /// use tollgate::*;
    ///
    /// /// A store that nobody reaches.
    /// struct Nowhere;
    ///
    /// fn fails<'a, T>() -> StoreFuture<'a, T> {
    ///     Box::pin(async { Err(StoreError::failed(Failure::Connection, "there is nothing there")) })
    /// }
    ///
    /// impl Store for Nowhere {
    ///     fn charge<'a>(&'a self, _: &'a [Item<'a>], _: Option<Hold>) -> StoreFuture<'a, Charged> {
    ///         fails()
    ///     }
    ///     fn settle<'a>(&'a self, _: HoldId, _: &'a Settlement) -> StoreFuture<'a, Settled> {
    ///         fails()
    ///     }
    ///     fn peek<'a>(&'a self, _: &'a [Item<'a>]) -> StoreFuture<'a, Charged> {
    ///         fails()
    ///     }
    ///     fn forget<'a>(&'a self, _: &'a StoredLimit, _: &'a str) -> StoreFuture<'a, bool> {
    ///         fails()
    ///     }
    /// }
    ///
    /// let login = Rule::new("login", Limit::fixed_window(5, Micros::from_secs(60))?)?;
    /// let gate = Tollgate::builder()
    ///     .limit("api", Limit::token_bucket("10/s", 20)?)
    ///     .rule(login.fallback(Fallback::Closed))
    ///     .fallback(Fallback::Local)
    ///     .store(Arc::new(Nowhere))
    ///     .build()?;
    /// let api = gate.acquire("user:42", "api").await?;
    /// assert!(api.allowed() && api.degraded());
    /// assert_eq!(api.binding().source, Source::FallbackLocal);
    /// assert!(!gate.acquire("user:42", "login").await?.allowed());
    /// # Ok(())
    /// # }
    /// # std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # use std::future::Future;
    /// ```
    ///
    /// *Open* allows and charges nothing. *Closed* denies, to be tried again when the store is. *Local* counts in this process:
    /// afresh, knowing nothing of what was charged before, and forgotten by the store afterwards. A charge over several limits
    /// is admitted if each of them allows it by its own fallback, and only then is anything charged.
    #[must_use]
    pub fn fallback(mut self, fallback: Fallback) -> Self {
        self.otherwise.fallback = fallback;
        self
    }

    /// Among how many instances of this program a limit is divided while each counts locally, so that all of them together
    /// admit at most the limit; one, unless said. Capacities and rates are divided and rounded down, but each instance has at
    /// least one unit: where a limit is below *n*, *n* instances admit up to *n*.
    #[must_use]
    pub fn instances(mut self, instances: u64) -> Self {
        self.otherwise.instances = instances;
        self
    }

    /// For how long at most a denial of a store elsewhere is believed without asking again; 100 ms unless said, and zero asks
    /// every time.
    ///
    /// A key that the store denied until some time is denied until then with the answer that the store would give, at no round
    /// trip. What this process resets or settles ends that at once; what *another* process gives back or resets is noticed
    /// after this long at the latest. Only charges on one limit are answered so, and none under a concurrency limit or one that
    /// only watches; a denial of more than one unit over what is left is believed only in a fixed window.
    #[must_use]
    pub fn denial_cache(mut self, at_most: Duration) -> Self {
        self.denial_cache = at_most.into();
        self
    }

    /// Sees every decision. May be called several times: all are told. A panic of one is caught and changes no decision.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.add(observer);
        self
    }

    /// Measures, logs and traces decisions.
    #[cfg(feature = "telemetry")]
    #[must_use]
    pub fn telemetry(mut self, telemetry: Telemetry) -> Self {
        self.telemetry = Some(telemetry);
        self
    }

    /// The registry, if all rules have proper names and no two have the same.
    pub fn build(self) -> Result<Tollgate, Error> {
        let rules = self.rules.into_iter().collect::<Result<Vec<Rule>, PolicyError>>()?;
        let policy = Policy::new(rules)?;
        if self.otherwise.instances == 0 {
            return Err(Error::call(
                "a limit cannot be divided among 0 instances; write 1 to divide nothing",
            ));
        }
        let old = self.old.as_deref();
        if old.is_some() && self.store.is_some() {
            return Err(Error::call(
                "a registry that continues another counts where that one does; leave out the store, or what it continues",
            ));
        }
        let clock = old.filter(|_| !self.has_clock).map_or(&self.memory.clock, |old| &old.clock).clone();
        let observers = match old {
            Some(old) if self.observers.is_empty() => old.observers.clone(),
            _ => Arc::new(self.observers),
        };
        let store_mode = || self.store.as_ref().map_or("memory", |store| store.mode());
        let watch = match old {
            Some(old) if self.telemetry.is_none() => old.watch.clone(),
            _ => {
                let mode = old.map_or_else(store_mode, |old| old.backend.mode());
                let watch = Watch::new(self.telemetry.as_ref(), mode);
                Arc::new(match old {
                    Some(old) => watch.continuing(self.telemetry.as_ref(), &old.watch),
                    None => watch,
                })
            }
        };
        // Before any limit counts: which namespaces are labels is settled when a key of them is first counted.
        self.namespaces.iter().for_each(|namespace| watch.declare(namespace));
        let overrides = policy.rules().iter().flat_map(Rule::overrides);
        overrides.for_each(|(key, _)| watch.declare(&key.namespace()));
        let backend = match (old, self.store) {
            (Some(old), _) => old.backend.continued(&observers, &watch),
            (None, Some(store)) => Backend::Remote(Box::new(Remote::new(
                store,
                self.memory,
                self.denial_cache,
                observers.clone(),
                watch.clone(),
            ))),
            (None, None) => Backend::Memory(MemoryStore::new(self.memory)),
        };
        let mut numbering = match &backend {
            Backend::Remote(remote) => Some(remote.numbering()),
            Backend::Memory(_) => None,
        };
        let entries = policy
            .rules()
            .iter()
            .map(|rule| {
                let (rule, otherwise) = (rule.clone(), self.otherwise);
                let entry = Entry::new(rule, &backend, &mut numbering, otherwise, &watch, &observers)?;
                Ok(Arc::new(entry))
            })
            .collect::<Result<Vec<Arc<Entry>>, Error>>()?;
        let by_name: ByName =
            policy.rules().iter().enumerate().map(|(index, rule)| (rule.name().to_owned(), index)).collect();
        // From here on nothing can be refused, so nothing that lasts was changed for a policy that is.
        if let Some(numbering) = numbering {
            numbering.done();
        }
        if let Backend::Remote(remote) = &backend {
            remote.set_denial_cache(self.denial_cache);
            remote.renumbered();
        }
        let queues = old.map_or_else(Arc::<Queues>::default, |old| old.queues.clone());
        let is_of_policy = |name: &str| by_name.contains_key(name);
        let ad_hocs = old.map(|old| old.ad_hocs.continued(is_of_policy)).unwrap_or_default();
        let gate = Gate {
            entries,
            by_name,
            policy,
            backend,
            clock,
            observers,
            watch,
            queues,
            malformed: Default::default(),
            lost_leases: old.map(|old| old.lost_leases.clone()).unwrap_or_default(),
            otherwise: self.otherwise,
            ad_hocs,
        };
        let gate = Arc::new(gate);
        if self.old.is_some() {
            gate.queues.continue_with(&gate);
        }
        Ok(Tollgate { gate })
    }
}
