//! The health of the store, node by node: whether it answers, since when, and how many calls were answered without it.
//!
//! [`StoreHealth`] is a reading for dashboards and metrics; [`StoreChange`] is the event of a node going down or coming back.
//! These counts change no decision: `breaker.rs` decides whether a node is called, and `fallback.rs` answers without it.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tollgate_kernel::Micros;
use tollgate_store::Failure;

use crate::outcome::{Fallback, Source};

/// Whether the store is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreState {
    /// It is.
    Up,
    /// Some nodes are up and some are down. Keys of the nodes that are down fall back; all others are decided as usual.
    Partial,
    /// It does not answer and is left alone for a while; every call falls back.
    Down,
    /// It does not answer, and a ping is on its way to test it.
    Probing,
}

impl StoreState {
    /// The name used in metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            StoreState::Up => "up",
            StoreState::Partial => "partial",
            StoreState::Down => "down",
            StoreState::Probing => "probing",
        }
    }
}

impl fmt::Display for StoreState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A node of the store went down or came back. A store on one server is one node; a Redis Cluster has one for each primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreChange {
    /// It does not answer. From now on calls for its keys fall back without a store call.
    Down {
        /// How its ping failed.
        failure: Failure,
    },
    /// It answers again.
    Up {
        /// How long it was down.
        down_for: Duration,
        /// How many calls fell back in that time.
        fallen_back: u64,
    },
}

/// The health of a store, and what was answered without it. Counts cover the life of the engine.
///
/// ```
/// # use tollgate::store::StoreState;
/// # use tollgate::{Limit, Tollgate};
/// let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 20)?).build()?;
/// let health = gate.store_health();
/// assert_eq!(health.state, StoreState::Up); // the memory store always is
/// assert_eq!(health.fallen_back, 0);
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreHealth {
    /// Whether the store is called.
    pub state: StoreState,
    /// How many of its nodes are up.
    pub nodes_up: usize,
    /// How many nodes it has: one, or the primaries of a cluster.
    pub nodes: usize,
    /// The start of this state: the time since 1970, by the engine's clock.
    pub since: Duration,
    /// How it failed last, if it ever did.
    pub last_failure: Option<Failure>,
    /// How many calls were sent to it.
    pub calls: u64,
    /// How many of the failed calls may have been charged although no answer came.
    pub ambiguous: u64,
    /// How often a node of it was taken to be down.
    pub outages: u64,
    /// How many calls were answered without it because it failed or was down.
    pub fallen_back: u64,
    /// How many answers the denial cache gave.
    pub denial_cache_hits: u64,
    /// How many charges the store may hold without a holder, and are still to be cancelled there.
    pub pending_cancels: u64,
    /// How many such charges were given up: there was no room to remember them, or their time was up before the store answered.
    /// They stay charged.
    pub abandoned_cancels: u64,
    /// How many leases were gone when their holder renewed them.
    pub leases_lost: u64,
    failures: [u64; Failure::ALL.len()],
    answers: [u64; Fallback::ALL.len()],
}

impl StoreHealth {
    /// Of a store that cannot fail.
    pub(crate) fn always_up(since: Micros) -> StoreHealth {
        Tally::default().health(&[NodeReading { state: StoreState::Up, since }], 0)
    }

    /// How many calls failed with this failure.
    pub fn failures(&self, failure: Failure) -> u64 {
        self.failures[index_of(&Failure::ALL, failure)]
    }

    /// How many answers of single limits a fallback gave.
    pub fn answers(&self, fallback: Fallback) -> u64 {
        self.answers[index_of(&Fallback::ALL, fallback)]
    }
}

/// The state of one breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeReading {
    pub(crate) state: StoreState,
    pub(crate) since: Micros,
}

fn index_of<T: PartialEq, const N: usize>(all: &[T; N], one: T) -> usize {
    all.iter().position(|other| *other == one).unwrap_or_default()
}

/// The counters behind [`StoreHealth`].
#[derive(Default)]
pub(crate) struct Tally {
    calls: AtomicU64,
    ambiguous: AtomicU64,
    fallen_back: AtomicU64,
    denial_cache_hits: AtomicU64,
    /// The index of the last failure among all, from 1; 0 if there was none.
    last_failure: AtomicUsize,
    failures: [AtomicU64; Failure::ALL.len()],
    answers: [AtomicU64; Fallback::ALL.len()],
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

impl Tally {
    /// A call is sent to the store.
    pub(crate) fn called(&self) {
        add(&self.calls);
    }

    pub(crate) fn failed(&self, failure: Failure, is_ambiguous: bool) {
        self.ping_failed(failure);
        add(&self.failures[index_of(&Failure::ALL, failure)]);
        if is_ambiguous {
            add(&self.ambiguous);
        }
    }

    /// A ping failed. A ping belongs to no call.
    pub(crate) fn ping_failed(&self, failure: Failure) {
        self.last_failure.store(index_of(&Failure::ALL, failure) + 1, Ordering::Relaxed);
    }

    /// A call is answered without the store.
    pub(crate) fn fell_back(&self) {
        add(&self.fallen_back);
    }

    /// How many calls were answered without the store.
    pub(crate) fn fallen_back(&self) -> u64 {
        self.fallen_back.load(Ordering::Relaxed)
    }

    /// One limit of a call was answered with this source.
    pub(crate) fn answered(&self, source: Source) {
        match source {
            Source::DenialCache => add(&self.denial_cache_hits),
            Source::FallbackOpen => add(&self.answers[index_of(&Fallback::ALL, Fallback::Open)]),
            Source::FallbackClosed => add(&self.answers[index_of(&Fallback::ALL, Fallback::Closed)]),
            Source::FallbackLocal => add(&self.answers[index_of(&Fallback::ALL, Fallback::Local)]),
            Source::Store | Source::Unlimited | Source::Blocked | Source::Malformed | Source::NeedsPermit => {
            }
        }
    }

    /// The health of a store with these node states and this number of outages.
    pub(crate) fn health(&self, nodes: &[NodeReading], outages: u64) -> StoreHealth {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let nodes_up = nodes.iter().filter(|node| node.state == StoreState::Up).count();
        let state = match nodes_up {
            up if up == nodes.len() => StoreState::Up,
            0 if nodes.iter().any(|node| node.state == StoreState::Probing) => StoreState::Probing,
            0 => StoreState::Down,
            _ => StoreState::Partial,
        };
        StoreHealth {
            state,
            nodes_up,
            nodes: nodes.len(),
            since: nodes.iter().map(|node| node.since).max().unwrap_or_default().into(),
            last_failure: self
                .last_failure
                .load(Ordering::Relaxed)
                .checked_sub(1)
                .map(|index| Failure::ALL[index]),
            calls: read(&self.calls),
            ambiguous: read(&self.ambiguous),
            outages,
            fallen_back: read(&self.fallen_back),
            denial_cache_hits: read(&self.denial_cache_hits),
            pending_cancels: 0,
            abandoned_cancels: 0,
            leases_lost: 0,
            failures: self.failures.each_ref().map(read),
            answers: self.answers.each_ref().map(read),
        }
    }
}
