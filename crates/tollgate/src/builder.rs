//! Builds a gate: its limits, its store, and its fallback.

use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::{Limit, Micros};
#[cfg(feature = "postgres")]
use tollgate_store::PostgresOptions;
#[cfg(feature = "redis")]
use tollgate_store::RedisOptions;
use tollgate_store::{Clock, MemoryOptions, MemoryStore, Store, WhenFull};

use crate::engine::{Backend, Engine, Parts};
use crate::error::Error;
use crate::lease::LostLeases;
use crate::outcome::Fallback;
use crate::policy::entry::FallbackDefaults;
use crate::policy::names::MAX_NAMES;
use crate::policy::{Policy, PolicyError, Rule};
use crate::remote::Remote;
use crate::telemetry::{Observer, Observers};
use crate::telemetry::{Recorder, Telemetry, Watch};
use crate::tollgate::Tollgate;
use crate::wait::Lines;

/// How long a denial of a remote store is cached by default.
pub(crate) const DENIAL_CACHE: Micros = Micros::from_millis(100);

/// Builds a [`Tollgate`].
#[must_use]
pub struct TollgateBuilder {
    rules: Vec<Result<Rule, PolicyError>>,
    memory: MemoryOptions,
    store: StoreChoice,
    observers: Observers,
    telemetry: Option<Telemetry>,
    defaults: FallbackDefaults,
    denial_cache: Micros,
    max_names: usize,
    /// Namespaces that metrics show by name.
    pub(crate) namespaces: Vec<String>,
}

/// Where the gate counts.
enum StoreChoice {
    Memory,
    Ready(Arc<dyn Store>),
    #[cfg(feature = "redis")]
    Redis(Box<RedisOptions>),
    #[cfg(feature = "postgres")]
    Postgres(Box<PostgresOptions>),
}

impl Default for TollgateBuilder {
    fn default() -> TollgateBuilder {
        TollgateBuilder {
            rules: Vec::new(),
            memory: MemoryOptions::default(),
            store: StoreChoice::Memory,
            observers: Observers::default(),
            telemetry: None,
            defaults: FallbackDefaults { fallback: Fallback::default(), instances: 1 },
            denial_cache: DENIAL_CACHE,
            max_names: MAX_NAMES,
            namespaces: Vec::new(),
        }
    }
}

impl Tollgate {
    /// Starts a gate without limits, on the memory store of this process.
    pub fn builder() -> TollgateBuilder {
        TollgateBuilder::default()
    }
}

impl TollgateBuilder {
    /// Registers a limit by name. A name that will not do is reported by [`build`](Self::build).
    pub fn limit(mut self, name: &str, limit: Limit) -> Self {
        self.rules.push(Rule::new(name, limit));
        self
    }

    /// Registers a rule: a limit with overrides, one in shadow mode, an unlimited or a blocked one.
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(Ok(rule));
        self
    }

    /// Registers all rules of a policy.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.rules.extend(policy.rules().iter().cloned().map(Ok));
        self
    }

    /// The clock of the memory store; the system clock by default. This process also uses it for waiting, outages and cached
    /// denials; a remote store has its own clock.
    pub fn clock(mut self, clock: Clock) -> Self {
        self.memory.clock = clock;
        self
    }

    /// How many keys the memory store remembers at most; ten million by default.
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.memory.max_keys = max_keys;
        self
    }

    /// How many bytes reservations and permits take at most in the memory store, apart from the keys that they charge; by default a
    /// quarter of what `max_keys` take.
    pub fn reservation_bytes(mut self, bytes: usize) -> Self {
        self.memory.reservation_bytes = Some(bytes);
        self
    }

    /// What happens to keys that the memory store has no room for.
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.memory.when_full = when_full;
        self
    }

    /// How often a thread of the memory store forgets a tenth of the keys that are full again; `None` starts no thread.
    pub fn sweep_every(mut self, every: Option<Duration>) -> Self {
        self.memory.sweep_every = every;
        self
    }

    /// Counts in another store than the memory store.
    ///
    /// A store that does not answer gets no calls for a while, and limits fall back: see [`fallback`](Self::fallback) and
    /// [`Tollgate::store_health`]. The options of the memory store then apply to the local fallback.
    pub fn store(mut self, store: impl Store) -> Self {
        self.store = StoreChoice::Ready(Arc::new(store));
        self
    }

    /// Counts in Redis, at this address: `redis://127.0.0.1:6379`, or `rediss://` for TLS. Build it with
    /// [`connect`](Self::connect). [`redis_with`](Self::redis_with) takes all other options.
    #[cfg(feature = "redis")]
    pub fn redis(self, url: impl Into<String>) -> Self {
        self.redis_with(RedisOptions::new(url.into()))
    }

    /// Counts in Redis or Redis Cluster, set up like this.
    #[cfg(feature = "redis")]
    pub fn redis_with(mut self, options: RedisOptions) -> Self {
        self.store = StoreChoice::Redis(Box::new(options));
        self
    }

    /// Counts in PostgreSQL, at this address: `postgres://localhost/app`. Build it with [`connect`](Self::connect), which creates
    /// the tables. [`postgres_with`](Self::postgres_with) takes all other options.
    #[cfg(feature = "postgres")]
    pub fn postgres(self, url: impl Into<String>) -> Self {
        self.postgres_with(PostgresOptions::new(url.into()))
    }

    /// Counts in PostgreSQL, set up like this.
    #[cfg(feature = "postgres")]
    pub fn postgres_with(mut self, options: PostgresOptions) -> Self {
        self.store = StoreChoice::Postgres(Box::new(options));
        self
    }

    /// The fallback of rules that do not set their own; local by default.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use std::time::Duration;
    /// use tollgate::store::{Charged, Failure, Hold, StoredCharge, Store, StoreError, StoreFuture, StoredLimit};
    /// use tollgate::telemetry::Source;
    /// use tollgate::{ChargeId, Fallback, Limit, Rule, Settled, Settlement, Tollgate};
    ///
    /// /// A store that cannot be reached.
    /// struct Nowhere;
    ///
    /// fn fails<'a, T>() -> StoreFuture<'a, T> {
    ///     Box::pin(async { Err(StoreError::failed(Failure::Connection, "there is nothing there")) })
    /// }
    ///
    /// impl Store for Nowhere {
    ///     fn charge<'a>(&'a self, _: &'a [StoredCharge<'a>], _: Option<Hold>) -> StoreFuture<'a, Charged> {
    ///         fails()
    ///     }
    ///     fn settle<'a>(&'a self, _: ChargeId, _: &'a Settlement) -> StoreFuture<'a, Settled> {
    ///         fails()
    ///     }
    ///     fn peek<'a>(&'a self, _: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
    ///         fails()
    ///     }
    ///     fn forget<'a>(&'a self, _: &'a StoredLimit, _: &'a str) -> StoreFuture<'a, bool> {
    ///         fails()
    ///     }
    /// }
    ///
    /// let login = Rule::new("login", Limit::fixed_window(5, Duration::from_secs(60))?)?;
    /// let gate = Tollgate::builder()
    ///     .limit("api", Limit::token_bucket("10/s", 20)?)
    ///     .rule(login.fallback(Fallback::Closed))
    ///     .fallback(Fallback::Local)
    ///     .store(Nowhere)
    ///     .build()?;
    /// let api = gate.check("api", "user:42").await?;
    /// assert!(api.is_allowed() && api.is_degraded());
    /// assert_eq!(api.binding().source(), Source::FallbackLocal);
    /// assert!(!gate.check("login", "user:42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// # std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # use std::future::Future;
    /// ```
    ///
    /// *Open* allows and charges nothing. *Closed* denies until the next attempt to reach the store. *Local* counts in this
    /// process: the counters start empty, and the store never learns of these counts. A charge over several limits is admitted if
    /// each of them allows it by its own fallback, and only then is anything charged.
    pub fn fallback(mut self, fallback: Fallback) -> Self {
        self.defaults.fallback = fallback;
        self
    }

    /// Among how many instances of this program a limit is divided while each counts locally, so that all of them together
    /// admit at most the limit; one by default. Capacities and rates are divided and rounded down, but each instance has at
    /// least one unit: where a limit is below *n*, *n* instances admit up to *n*.
    pub fn instances(mut self, instances: u64) -> Self {
        self.defaults.instances = instances;
        self
    }

    /// How long at most a denial of a remote store is cached; 100 ms by default, zero disables the cache.
    ///
    /// A key that the store denied until some time is denied until then without a round trip, with the answer that the store
    /// would give. A reset or settlement in this process ends that at once; what *another* process gives back or resets is seen
    /// after this time at the latest. Only charges on one limit are cached, and none under a concurrency limit or a shadow limit.
    /// A denial of more than one unit over the rest is cached only in a fixed window.
    pub fn denial_cache(mut self, at_most: Duration) -> Self {
        self.denial_cache = at_most.into();
        self
    }

    /// Sees every decision. May be called several times: all see it. A panic of one is caught and changes no decision.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.add(observer);
        self
    }

    /// Measures, logs and traces decisions.
    #[cfg(feature = "telemetry")]
    pub fn telemetry(mut self, telemetry: Telemetry) -> Self {
        self.telemetry = Some(telemetry);
        self
    }

    /// The most names of limits in this process; 100,000 by default. Names are kept for the life of the process: a program with a
    /// limit for each tenant should use one name with overrides, or [`Tollgate::ad_hoc`].
    pub fn max_names(mut self, max_names: usize) -> Self {
        self.max_names = max_names;
        self
    }

    /// The gate, on the memory store of this process or a [`store`](Self::store) that is ready. Fails if a limit has no proper name
    /// or two have the same.
    pub fn build(self) -> Result<Tollgate, Error> {
        match self.store {
            StoreChoice::Memory | StoreChoice::Ready(_) => self.assemble(),
            #[cfg(feature = "redis")]
            StoreChoice::Redis(_) => Err(Error::call("a gate on Redis is built by `connect().await`")),
            #[cfg(feature = "postgres")]
            StoreChoice::Postgres(_) => {
                Err(Error::call("a gate on PostgreSQL is built by `connect().await`"))
            }
        }
    }

    /// The gate, connected to its store. A store that cannot be reached now is warned of, and limits fall back until it can.
    #[cfg_attr(
        not(any(feature = "redis", feature = "postgres")),
        expect(clippy::unused_async, reason = "with a remote store there is something to wait for")
    )]
    pub async fn connect(mut self) -> Result<Tollgate, Error> {
        self.store = match self.store {
            #[cfg(feature = "redis")]
            StoreChoice::Redis(options) => StoreChoice::Ready(crate::connect::redis(*options).await?),
            #[cfg(feature = "postgres")]
            StoreChoice::Postgres(options) => StoreChoice::Ready(crate::connect::postgres(*options).await?),
            ready => ready,
        };
        self.assemble()
    }

    fn assemble(self) -> Result<Tollgate, Error> {
        let rules = self.rules.into_iter().collect::<Result<Vec<Rule>, PolicyError>>()?;
        let policy = Policy::new(rules)?;
        if self.defaults.instances == 0 {
            return Err(Error::call(
                "a limit cannot be divided among 0 instances; write 1 to divide nothing",
            ));
        }
        #[cfg(feature = "telemetry")]
        if let Some(mistake) = self.telemetry.as_ref().and_then(Telemetry::wrong_label) {
            return Err(Error::call(mistake));
        }
        let store = match self.store {
            StoreChoice::Ready(store) => Some(store),
            _ => None,
        };
        let mode = store.as_ref().map_or("memory", |store| store.mode());
        let (observers, watch) =
            (Arc::new(self.observers), Arc::new(Watch::new(self.telemetry.as_ref(), mode)));
        // Before any limit counts: which namespaces are labels is settled when a key of them is first counted.
        self.namespaces.iter().for_each(|namespace| watch.declare(namespace));
        let (lines, lost_leases) = (Arc::<Lines>::default(), Arc::<LostLeases>::default());
        let clock = self.memory.clock.clone();
        let backend = match store {
            None => Backend::Memory(MemoryStore::new(self.memory)),
            Some(store) => Backend::Remote(Box::new(Remote::new(
                store,
                self.memory,
                self.denial_cache,
                observers.clone(),
                watch.clone(),
                lines.clone(),
                lost_leases.clone(),
            ))),
        };
        let (defaults, max_names) = (self.defaults, self.max_names);
        let parts = Parts { backend, clock, observers, watch, lines, lost_leases, defaults, max_names };
        let engine = Arc::new(Engine::new(parts));
        engine.reload(policy)?;
        Ok(Tollgate { engine })
    }
}
