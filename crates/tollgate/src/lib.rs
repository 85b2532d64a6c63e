//! Rate limiting that is exact, fast and the same everywhere.
//!
//! ```
//! use tollgate::{Limit, Limiter};
//!
//! let limiter = Limiter::new(Limit::token_bucket("10/s", 20)?);
//! let outcome = limiter.check("user:42");
//! assert!(outcome.allowed);
//! assert_eq!(outcome.remaining, 19);
//! # Ok::<(), tollgate::Error>(())
//! ```
//!
//! A [`Limiter`] is one limit in this process: six strategies, millions of keys in bounded memory, no allocation and, for
//! refusals, no lock. It works in plain code; async code calls it as it is.
//!
//! A [`Tollgate`] is the registry of all limits of a program, over any store. Its calls are async, because a store may be
//! elsewhere:
//!
//! ```
//! # async fn run() -> Result<(), tollgate::Error> {
//! use tollgate::{Ask, Limit, Micros, Tollgate};
//!
//! let gate = Tollgate::builder()
//!     .limit("global", Limit::token_bucket("1000/s", 1000)?)
//!     .limit("per-user", Limit::sliding_window(100, Micros::from_secs(60))?)
//!     .build()?;
//!
//! // Both are charged, or neither is.
//! let decision = gate.charge(&[Ask::new("global", "all"), Ask::new("per-user", "user:42")]).await?;
//! println!("{decision}");
//! # Ok(())
//! # }
//! ```
//!
//! The walk of a charge through this crate: who pays ([`Key`]), which limits apply ([`policy`]), charge them all or none
//! (`limiter.rs`, the heart), what they say together ([`Decision`]), and who is told ([`Observer`]).
//!
//! A charge whose counters are elsewhere goes through `remote.rs`: is it known to be denied (`denials.rs`), was it paid for
//! already (`slices.rs`), is the store to be asked at all (`breaker.rs`), and what is answered if it cannot (`fallback.rs`).

mod ad_hoc;
mod batch;
mod breaker;
mod builder;
mod decision;
mod denials;
mod error;
mod fallback;
mod fingerprint;
#[cfg(feature = "http")]
mod front;
mod gate;
mod health;
mod key;
mod limiter;
mod numbers;
#[cfg(feature = "config")]
mod open;
pub mod policy;
mod quiet;
mod registry;
mod remote;
mod report;
mod reservation;
mod slices;
#[cfg(feature = "telemetry")]
pub mod telemetry;
mod wait;

#[cfg(feature = "http")]
pub use front::http;
#[cfg(feature = "config")]
pub use policy::config;

pub use ad_hoc::AdHoc;
pub use builder::TollgateBuilder;
pub use decision::{Decision, LimitOutcome};
pub use error::Error;
pub use health::{StoreChange, StoreHealth, StoreState};
pub use key::{Key, KeyError};
pub use limiter::{Charge, Limiter, charge, peek, reserve};
pub use policy::{Allowance, Fallback, Policy, PolicyError, Rule, Slice};
pub use registry::{Ask, Tollgate};
pub use report::{Admissions, Event, Observer, Payer, Source};
pub use report::{grpc, headers, problem};
pub use reservation::{Permit, Reservation, Reserved};
pub use tollgate_kernel::{
    Align, Concurrency, FixedWindow, LeakyBucket, Limit, LimitError, Micros, Outcome, Rate, SlidingWindow,
    SlidingWindowCounter, Strategy, TokenBucket,
};
pub use tollgate_store::{
    Charged, Clock, Cost, Failure, Hold, HoldId, Item, ManualClock, MemoryOptions, MemoryStore, NodeId,
    Nodes, Outcomes, Scope, Settled, Settlement, Store, StoreError, StoreFuture, StoreTask, StoredLimit,
    Subject, WhenFull,
};
#[cfg(feature = "postgres")]
pub use tollgate_store::{PostgresOptions, PostgresStore, PostgresTls};
#[cfg(feature = "redis")]
pub use tollgate_store::{RedisOptions, RedisReport, RedisStore};
pub use wait::WaitError;

/// The README's examples are tests, with all the features that they need.
#[cfg(all(doctest, feature = "config", feature = "http"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
