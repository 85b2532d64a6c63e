//! The engine: charges all limits of a call, or none. Every handle and every API goes through [`Engine::charge`].
//!
//! A [`Request`] holds the charges, the [`Mode`], what the caller keeps of an admitted charge (its [`Take`]), an optional id and
//! an optional time to wait. The engine finds the limits, parses each key once (not again for a call that waits and tries several
//! times), charges the counters, applies the fallback when a remote store cannot answer, and reports the decision. With local counters all of that runs at once ([`Step::Done`]). A call
//! that needs a remote store, or that waits, is a boxed future ([`Step::Waits`]).
//!
//! The walk of a request:
//!
//! 1. `engine/request.rs`: the request and its answer, as data.
//! 2. `engine/fast_path.rs`: charges keys that already have local counters.
//! 3. `engine/resolve.rs`: all other requests: finds the limits and parses the keys that are not canonical yet.
//! 4. `engine/local.rs` or `engine/remote_call.rs`: charges the counters. `engine/waiting.rs` repeats this for callers that wait.
//! 5. `conclude` (below) makes the decision, `engine/report.rs` reports it, and `engine/held.rs` is what the caller keeps.
//!
//! `engine/settle.rs` corrects and releases charges later. `engine/status.rs` reads and resets one key. `engine/limits.rs` holds
//! the limits by name and reloads them. `engine/ad_hoc.rs` makes limits from numbers that come with a call. `remote.rs` holds
//! everything that only a remote store needs. The arithmetic is in the kernel and the state is in the store.

mod ad_hoc;
mod fast_path;
mod held;
mod limits;
mod local;
mod operate;
mod remote_call;
mod report;
mod request;
mod resolve;
mod settle;
mod status;
mod waiting;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use tollgate_kernel as kernel;
use tollgate_store::{Clock, MemoryStore, Store};

use self::ad_hoc::AdHocs;
pub(crate) use self::held::Held;
use self::held::held;
pub(crate) use self::limits::Limits;
pub(crate) use self::request::{Answer, Charges, Mode, Request, Step, Take};
use crate::decision::Decision;
use crate::health::StoreHealth;
use crate::lease::{Listeners, LostLeases};
use crate::outcome::{Fallback, Outcome, Source};
use crate::policy::entry::{FallbackDefaults, KeyLimit, Resolved};
use crate::policy::names::MAX_NAMES;
use crate::quiet::Quiet;
use crate::remote::{Answered, Identity, Remote};
use crate::telemetry::Watch;
use crate::telemetry::{Observers, Started};
use crate::wait::Lines;

/// How many limits one charge may name. A charge compares all of its pairs, so there must be an end to them.
pub(crate) const MOST_LIMITS: usize = 64;

/// Where the counters are.
pub(crate) enum Backend {
    Memory(MemoryStore),
    Remote(Box<Remote>),
}

/// All limits of a gate on their store, and all that is needed to charge them.
pub(crate) struct Engine {
    /// Distinguishes handles of this engine from handles of other engines.
    id: u64,
    limits: RwLock<Limits>,
    pub(crate) backend: Backend,
    /// The clock for waiting; it is the clock of the memory store.
    pub(crate) clock: Clock,
    observers: Arc<Observers>,
    watch: Arc<Watch>,
    lines: Arc<Lines>,
    lost_leases: Arc<LostLeases>,
    /// Woken when a key is reset, for permits in this process that are then lost.
    resets: Listeners,
    malformed: Quiet,
    needs_permit: Quiet,
    defaults: FallbackDefaults,
    max_names: usize,
    ad_hocs: AdHocs,
}

/// The parts that an engine is built from.
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
    /// An engine without limits. [`reload`](Self::reload) adds them.
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
            resets: Listeners::default(),
            malformed: Quiet::default(),
            needs_permit: Quiet::default(),
            defaults,
            max_names,
            ad_hocs: AdHocs::default(),
        }
    }

    /// An engine on a memory store, without observers and telemetry.
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

    /// Whether the counters are in this process, so that every call is done at once.
    #[inline]
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.backend, Backend::Memory(_))
    }

    /// The store itself, for calls that no decision depends on.
    pub(crate) fn store(&self) -> &dyn Store {
        match &self.backend {
            Backend::Memory(store) => store,
            Backend::Remote(remote) => remote.store(),
        }
    }

    /// Runs a request: at once if the counters are local or the store is not needed, as a future in all other cases.
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

    /// Reports the decision and returns it with what the caller keeps.
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
        Answer { held, ..Answer::of(decision) }
    }

    /// The health of the store.
    pub(crate) fn health(&self) -> StoreHealth {
        let mut health = match &self.backend {
            Backend::Memory(_) => StoreHealth::always_up(self.clock.now()),
            Backend::Remote(remote) => remote.health(),
        };
        health.leases_lost = self.lost_leases.count();
        health
    }
}

/// Makes the decision from the outcomes of the counters. The outcomes are in the order of the charges that have counters.
fn conclude(charges: &[Resolved<'_, '_>], counted: crate::remote::Answers) -> Decision {
    let mut counted = counted.into_iter();
    let outcome = |charge: &Resolved<'_, '_>| {
        let (numbers, source) = match charge.key_limit() {
            Some(key_limit @ KeyLimit::Counted { .. }) => {
                counted.next().unwrap_or((kernel::Outcome::BLOCKED, key_limit.source()))
            }
            Some(key_limit @ KeyLimit::Unlimited) => (kernel::Outcome::UNLIMITED, key_limit.source()),
            Some(key_limit @ KeyLimit::Blocked) => (kernel::Outcome::BLOCKED, key_limit.source()),
            None => (kernel::Outcome::BLOCKED, Source::Malformed),
        };
        let is_shadow = charge.is_shadow() && source != Source::NeedsPermit;
        Outcome::new(charge.entry.name, numbers, source).shadowed(is_shadow)
    };
    Decision::new(charges.iter().map(outcome).collect())
}
