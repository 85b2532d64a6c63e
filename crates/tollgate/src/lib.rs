//! Rate limiting that is exact, fast and the same on every store.
//!
//! ```
//! use tollgate::{Limit, Limiter};
//!
//! let limiter = Limiter::new(Limit::token_bucket("10/s", 20)?);
//! let outcome = limiter.check("user:42");
//! assert!(outcome.is_allowed());
//! assert_eq!(outcome.remaining(), 19);
//! # Ok::<(), tollgate::Error>(())
//! ```
//!
//! A [`Limiter`] is one limit in this process: six strategies, millions of keys in bounded memory, no allocation and, for
//! refusals, no lock. It is synchronous; async code can call it directly.
//!
//! A [`Tollgate`] has all limits of a program, on any store. Its calls are async, because a store may be remote, and they mean
//! the same on every store:
//!
//! ```
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tollgate::{Charge, Limit, Tollgate};
//!
//! let gate = Tollgate::builder()
//!     .limit("global", Limit::token_bucket("1000/s", 1000)?)
//!     .limit("per-user", Limit::sliding_window(100, Duration::from_secs(60))?)
//!     .limit("workers", Limit::concurrency(4, Duration::from_secs(30))?)
//!     .build()?; // or .redis(url).connect().await?
//!
//! // Both are charged, or neither is.
//! let charges = [Charge::new("global", "all"), Charge::new("per-user", "user:42").cost(3)];
//! println!("{}", gate.charge(&charges).await?);
//!
//! // Held until it is dropped.
//! let permit = gate.acquire("workers", "user:42").await??;
//! # drop(permit);
//! # Ok(())
//! # }
//! # use std::future::Future;
//! # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
//! # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
//! ```
//!
//! Which handle to use:
//!
//! | you have | use |
//! |---|---|
//! | one limit, in this process, in plain or async code | [`Limiter`] |
//! | several limits, or counters in Redis or PostgreSQL | [`Tollgate`] |
//! | an axum, tonic or hyper service | `http::LimitLayer` with `route::RouteLimit` (feature `http`) |
//! | limits in a file | `config::Config` (feature `config`) |
//! | tests | [`ManualClock`] |
//!
//! Which call to use:
//!
//! | to | call |
//! |---|---|
//! | charge one unit under one limit | [`Tollgate::check`] |
//! | charge several limits, all or none | [`Tollgate::charge`] |
//! | charge many, each by itself | [`Tollgate::charge_each`] |
//! | look without charging | [`Tollgate::peek`], [`Tollgate::status`] |
//! | charge an estimate and correct it later | [`Tollgate::reserve`] |
//! | hold a place at a concurrency limit | [`Tollgate::acquire`] |
//! | wait until there is room | [`Tollgate::wait`], [`Tollgate::reserve_within`], [`Tollgate::acquire_within`] |
//! | charge once however often it is sent | [`Call::id`] on `charge`, `reserve`, `acquire` and the calls that wait |
//! | charge in plain code, in this process | [`Tollgate::local`], [`Limiter::check`], [`Limiter::charge`] |
//! | charge a limit whose numbers the application has | [`Tollgate::ad_hoc`] |
//! | give back what was charged, forget a key | [`Tollgate::refund`], [`Tollgate::reset`] |
//!
//! An `Err` always means that the call could not be decided. A refusal is a [`Decision`], or [`Denied`] where the call would
//! return a reservation or a permit; [`Outcome::reason`] says why.
//!
//! The path of a call through this crate: the charges ([`Charge`]), the limits by name ([`policy`]), the engine (`engine.rs`;
//! read this file first), the store ([`store`]; `remote.rs` for remote stores), the answer ([`Decision`], [`Outcome`]), what the
//! caller sees ([`response`]) and what the operator sees ([`telemetry`]).

mod builder;
mod call;
mod charge;
#[cfg(any(feature = "redis", feature = "postgres", feature = "config"))]
mod connect;
mod decision;
mod engine;
mod error;
mod health;
#[cfg(feature = "http")]
pub mod http;
pub mod key;
mod lease;
mod limiter;
#[cfg(feature = "config")]
mod open;
mod outcome;
mod permit;
pub mod policy;
mod quiet;
mod remote;
mod reservation;
pub mod response;
#[cfg(feature = "http")]
pub mod route;
pub mod store;
pub mod telemetry;
mod tollgate;
mod wait;

#[cfg(feature = "config")]
pub use policy::config;

pub use builder::TollgateBuilder;
pub use call::Call;
pub use charge::{Charge, LimitRef, NamedLimit};
pub use decision::{Decision, Denied};
pub use error::Error;
pub use key::{Key, KeyRef};
pub use limiter::Limiter;
pub use outcome::{Fallback, Outcome, Reason};
pub use permit::Permit;
pub use policy::{Allowance, Policy, Rule};
pub use reservation::Reservation;
pub use response::{grpc, headers, problem};
pub use tollgate::Tollgate;
pub use tollgate_kernel::{Limit, Rate, Strategy};
pub use tollgate_store::{ChargeId, Clock, ManualClock, Settled, Settlement};

/// The README's examples are tests, with all the features that they need.
#[cfg(all(doctest, feature = "config", feature = "http"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
