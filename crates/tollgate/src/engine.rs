//! The heart: charge them all, or none. Every handle and every face comes through [`Engine::charge`].
//!
//! A [`Request`] says what is charged, how (its [`Mode`]), what the caller keeps of it (its [`Take`]), by which id, and for how
//! long it may wait. The engine finds the limits, parses the keys once, asks the counters, lets the fallback answer where a remote
//! store cannot, and reports the decision. On counters in this process that is done at once ([`Step::Done`]); what has to ask a
//! remote store, or to wait, is a boxed future ([`Step::Waits`]).
//!
//! The walk of a request: `engine/request.rs` is the request and its answer as data; `engine/fast_path.rs` charges keys that are known
//! in this process; for all others `engine/resolve.rs` finds limits and parses keys, then `engine/local.rs` or `engine/remote_call.rs`
//! asks the counters (`engine/waiting.rs` again and again, for those who wait); `conclude` makes the decision, `engine/report.rs` reports
//! it, and `engine/held.rs` is what the caller keeps. `engine/settle.rs` corrects and releases that later, `engine/status.rs` looks at
//! one key and forgets it. `engine/limits.rs` has the limits by name and their reloads, `engine/ad_hoc.rs` limits whose numbers come with
//! the call. What a remote store needs is in `remote.rs`. Arithmetic is the kernel's, and state the store's.

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
use tollgate_store::{Clock, MemoryStore};

use self::ad_hoc::AdHocs;
pub(crate) use self::held::Held;
use self::held::held;
pub(crate) use self::limits::Limits;
pub(crate) use self::request::{Answer, Charges, Mode, Request, Step, Take};
use crate::decision::Decision;
use crate::health::StoreHealth;
use crate::lease::{Lease, LostLeases};
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
        Answer { held, ..Answer::of(decision) }
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
