//! The one suite that says what a [`Store`] means. A store is right when it passes; an outsider's store runs the same suite.
//!
//! Give [`run`] a function that makes an empty store which goes by the clock it is handed. The suite replays the kernel's
//! tables of cases, feeds random traces to the store and to a plain model side by side and demands equal answers, also where charges
//! are each made by themselves in one call (each.rs) and for every combination of strategies (combinations.rs), races many
//! callers for one key, checks that charges over several limits are never halved and that quota is conserved through
//! reservations and refunds, that nothing is left of a key that has gone idle, that a limit whose numbers are changed neither
//! loses nor makes quota (changes.rs), that what is given back cannot be spent twice (settlement.rs), and that no caller changes what
//! another is answered (isolation.rs), and that a server's clock that steps back stands still for a key (steps_back.rs). Records, which servers share beside counters, are in records.rs. A failure panics with what was asked, what came and what should have come.

mod beside;
pub mod cases;
mod changes;
mod combinations;
mod each;
mod holds;
mod isolation;
mod model;
mod plain;
mod races;
mod random;
mod records;
mod refunds;
mod replay;
mod settlement;
mod steps_back;
mod traces;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

pub use plain::PlainStore;
pub use traces::Traces;

use crate::{ManualClock, Micros, Store};

/// An empty store under test.
pub struct Subject {
    /// The store. It goes by the clock that it was made with.
    pub store: Arc<dyn Store>,
    /// How many keys the store holds, once it has been given the chance to forget idle ones.
    pub remembered: Box<dyn Fn() -> Counting + Send + Sync>,
}

/// The future of a count.
pub type Counting = Pin<Box<dyn Future<Output = usize> + Send>>;

/// How thorough to be.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The random traces.
    pub traces: Traces,
    /// How many callers race, and how often each charges.
    pub racers: usize,
    /// How often each racer charges.
    pub charges_each: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Effort { traces: Traces::default(), racers: 64, charges_each: 15_625 }
    }
}

/// Runs the whole suite. `make` is called for each part of it. Needs a multi-threaded tokio runtime.
pub async fn run(effort: Effort, make: impl AsyncFn(ManualClock) -> Subject) {
    replay::cases(&make).await;
    traces::traces(effort.traces, &make).await;
    each::each(&make).await;
    combinations::combinations(&make).await;
    holds::holds(&make).await;
    holds::idle_keys_vanish(&make).await;
    changes::changes(&make).await;
    settlement::settlement(&make).await;
    isolation::isolation(&make).await;
    steps_back::steps_back(&make).await;
    refunds::refunds(&make).await;
    records::records(&make).await;
    races::one_key(effort, &make).await;
    races::several_limits(effort, &make).await;
    races::reservations(effort, &make).await;
    refunds::races(effort, &make).await;
}

/// The part of [`run`] in which the clock of a shared store's server steps back ([`ManualClock::step_server`]): a store that goes by
/// [`Clock::server_now`](crate::Clock::server_now) is held to standing still until the clock has caught up with what a key has seen.
pub async fn clock_steps_back(make: impl AsyncFn(ManualClock) -> Subject) {
    steps_back::steps_back(&make).await;
}

/// The part of [`run`] that is about records, which servers share beside counters.
pub async fn shared_records(make: impl AsyncFn(ManualClock) -> Subject) {
    records::records(&make).await;
}

/// A clock that shows the instant from which the tables of cases count.
fn clock() -> ManualClock {
    ManualClock::at(cases::ORIGIN)
}

fn limit(name: &str, limit: Result<crate::Limit, tollgate_kernel::LimitError>) -> crate::StoredLimit {
    match limit {
        Ok(limit) => crate::StoredLimit::new(name, limit),
        Err(error) => panic!("the suite's own limit `{name}`: {error}"),
    }
}

fn cost(units: u64) -> crate::Cost {
    crate::Cost::new(units).unwrap_or(crate::Cost::ONE)
}

/// A time to live that never runs out in a test: the longest that a store keeps a reservation for.
const FOR_LONG: Micros = crate::Hold::MAX_TTL;
