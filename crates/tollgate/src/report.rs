//! How the operator is told: an event for every limit of every decision, and a word whenever the store goes or comes back.
//!
//! An [`Observer`] sees them all, in the thread that decided, after the decision is made: it cannot change it. Events show a
//! key's namespace; whoever turns that into labels must still bound how many there are. The key itself is shown only to whoever
//! asks for it by [`Payer::reveal`]. How the store fares is in `health.rs`.
//!
//! With the feature `telemetry` the same is measured, logged and traced here (`watch.rs`): metrics in `meter.rs` and
//! `store_meter.rs`, the decision log in `log.rs`, spans in `spans.rs`. What the host chooses of it is in `telemetry.rs`.
//! Callers are told in `headers.rs` and its neighbours.

pub mod grpc;
pub mod headers;
#[cfg(feature = "telemetry")]
mod key_hash;
#[cfg(feature = "telemetry")]
mod log;
#[cfg(feature = "telemetry")]
mod meter;
#[cfg(feature = "telemetry")]
mod metrics;
#[cfg(feature = "telemetry")]
mod namespaces;
mod observers;
mod payer;
pub mod problem;
#[cfg(feature = "telemetry")]
mod spans;
mod started;
#[cfg(feature = "telemetry")]
mod store_meter;
#[cfg(feature = "telemetry")]
mod storm;
#[cfg(feature = "telemetry")]
mod stripes;
mod tell;
#[cfg_attr(not(feature = "telemetry"), path = "report/unwatched.rs")]
pub(crate) mod watch;

use std::time::Duration;

use tollgate_kernel::{Micros, Outcome, Strategy};
use tollgate_store::Failure;

use crate::health::StoreChange;

#[cfg(feature = "telemetry")]
pub(crate) use self::key_hash::KeyHasher;
#[cfg(feature = "telemetry")]
pub(crate) use self::metrics::Sink;
pub(crate) use self::observers::Observers;
pub use self::payer::Payer;
pub(crate) use self::started::Started;
#[cfg(feature = "telemetry")]
pub(crate) use self::store_meter::Reading;
pub(crate) use self::tell::Told;

/// Where a limit's answer came from. Every answer has exactly one source, so events counted by source add up to all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Source {
    /// The store counted.
    #[default]
    Store,
    /// The store denied the same a moment ago, and until when; it was not asked again.
    DenialCache,
    /// Admitted from units that this process had taken from the store beforehand.
    Slice,
    /// The store failed, and the limit is set to let everything through then. Nothing was charged.
    FallbackOpen,
    /// The store failed, and the limit is set to let nothing through then.
    FallbackClosed,
    /// The store failed, and the memory of this process counted.
    FallbackLocal,
    /// The limit is set to let everything through.
    Unlimited,
    /// The limit is set to let nothing through.
    Blocked,
    /// The key was empty or malformed, and nothing was asked.
    Malformed,
}

impl Source {
    /// All of them, in the order of the documentation.
    pub const ALL: [Source; 9] = [
        Source::Store,
        Source::DenialCache,
        Source::Slice,
        Source::FallbackOpen,
        Source::FallbackClosed,
        Source::FallbackLocal,
        Source::Unlimited,
        Source::Blocked,
        Source::Malformed,
    ];

    /// The name used in metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::DenialCache => "denial_cache",
            Source::Slice => "slice",
            Source::FallbackOpen => "fallback_open",
            Source::FallbackClosed => "fallback_closed",
            Source::FallbackLocal => "fallback_local",
            Source::Unlimited => "unlimited",
            Source::Blocked => "blocked",
            Source::Malformed => "malformed",
        }
    }

    /// Whether the store should have answered, and could not.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Source::FallbackOpen | Source::FallbackClosed | Source::FallbackLocal)
    }
}

/// What went wrong between a decision and its store, if anything did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trouble {
    pub(crate) failure: Option<Failure>,
    pub(crate) is_ambiguous: bool,
    /// Whether this is the first failure since the store last answered.
    pub(crate) is_first: bool,
}

/// What a limit said, as metrics and logs have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    Denied,
    /// The limit only watches, and would have denied.
    WouldDeny,
}

impl Verdict {
    #[cfg(feature = "telemetry")]
    pub(crate) const ALL: [Verdict; 3] = [Verdict::Allowed, Verdict::Denied, Verdict::WouldDeny];

    #[inline]
    pub(crate) const fn of(allowed: bool, shadow: bool) -> Verdict {
        match (allowed, shadow) {
            (true, _) => Verdict::Allowed,
            (false, false) => Verdict::Denied,
            (false, true) => Verdict::WouldDeny,
        }
    }

    #[cfg(feature = "telemetry")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Verdict::Allowed => "allowed",
            Verdict::Denied => "denied",
            Verdict::WouldDeny => "would_deny",
        }
    }
}

/// One limit's part in one decision, as it is counted.
#[cfg_attr(not(feature = "telemetry"), allow(dead_code, reason = "without the feature nobody reads it"))]
pub(crate) struct LimitTold<'a> {
    /// The canonical text of its key, if that makes sense.
    pub(crate) key: Option<&'a str>,
    pub(crate) strategy: Option<Strategy>,
    pub(crate) verdict: Verdict,
    pub(crate) source: Source,
    pub(crate) failure: Option<Failure>,
    /// How long the whole decision took, if it was timed.
    pub(crate) took: Option<Duration>,
}

/// A whole decision, as it is logged and traced: by the limit that bound.
#[cfg_attr(not(feature = "telemetry"), allow(dead_code, reason = "without the feature nobody reads it"))]
pub(crate) struct Concluded<'a> {
    pub(crate) operation: &'static str,
    pub(crate) limiter: &'a str,
    pub(crate) told: LimitTold<'a>,
    /// How long to wait; `None` is never.
    pub(crate) retry_after: Option<Micros>,
    /// How many limits there were.
    pub(crate) limits: usize,
    /// Whether any of them answered without the store because that failed.
    pub(crate) is_degraded: bool,
    /// Whether this decision was the first to meet that failure.
    pub(crate) is_first: bool,
}

/// The name of a strategy in metrics, logs and traces; a limit that is unlimited or blocked has none.
#[cfg(feature = "telemetry")]
pub(crate) fn strategy_name(strategy: Option<Strategy>) -> &'static str {
    strategy.map_or("none", Strategy::name)
}

/// One limit's part in one decision.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// What was done: `charge`, `peek`, `reserve` or `wait`.
    pub operation: &'static str,
    /// The limit's name.
    pub limiter: &'a str,
    /// Its strategy; `None` for a limit that is unlimited or blocked.
    pub strategy: Option<Strategy>,
    /// The key's namespace; empty when the key is malformed.
    pub namespace: &'a str,
    /// Who paid, or was to.
    pub payer: Payer<'a>,
    /// What was asked for.
    pub cost: u64,
    /// Whether this limit let it pass; a limit that only watches always does.
    pub allowed: bool,
    /// Whether the limit only watches.
    pub shadow: bool,
    /// What the limit said.
    pub outcome: Outcome,
    /// Where the answer came from.
    pub source: Source,
    /// Why the store did not answer: how it failed this call or, while it is not asked because it is down, the one before.
    pub failure: Option<Failure>,
    /// Whether the call that failed may have been charged all the same: it was sent, and its answer never came.
    pub is_ambiguous: bool,
    /// How long the whole decision took.
    pub duration: Duration,
}

/// Admissions of one limit, told together: see [`Observer::takes_counts`].
#[derive(Clone, Copy, Debug)]
pub struct Admissions<'a> {
    /// The limit's name.
    pub limiter: &'a str,
    /// How many there were.
    pub count: u64,
    /// How long one of them took, if it was timed.
    pub duration: Option<Duration>,
}

/// Sees every decision.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tollgate::{Event, Limit, Observer, Tollgate};
///
/// #[derive(Default)]
/// struct Denials(AtomicU64);
///
/// impl Observer for Denials {
///     fn decided(&self, event: &Event<'_>) {
///         self.0.fetch_add(u64::from(!event.allowed), Ordering::Relaxed);
///     }
/// }
///
/// let denials = Arc::new(Denials::default());
/// let limit = Limit::token_bucket("1/h", 1)?;
/// let gate = Tollgate::builder().limit("api", limit).observer(denials.clone()).build()?;
/// let api = gate.limiter("api")?;
/// api.check("user:42");
/// api.check("user:42");
/// assert_eq!(denials.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), tollgate::Error>(())
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Called once for each limit of each decision.
    fn decided(&self, event: &Event<'_>);

    /// Whether it is content with numbers for what is nearly always all there is to tell: that counters in this process let a
    /// charge pass. Where decisions are counted for metrics, those are then told by [`admitted`](Self::admitted), many at once,
    /// and a check costs what it costs without an observer. Everything else still has an event. Events of decisions that were
    /// not timed, of which there is one in 64, have no duration then. All observers of a registry must agree, or nothing changes.
    fn takes_counts(&self) -> bool {
        false
    }

    /// Called now and then, and by [`Tollgate::hand_over_counts`](crate::Tollgate::hand_over_counts), if it takes counts.
    fn admitted(&self, admissions: &Admissions<'_>) {
        let _ = admissions;
    }

    /// Called once whenever the store is taken to be down, and once when it is back. Does nothing unless written.
    fn store_changed(&self, change: &StoreChange) {
        let _ = change;
    }
}
