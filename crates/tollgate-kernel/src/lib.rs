//! The arithmetic of rate limiting, and nothing else.
//!
//! This crate decides whether a charge fits. Each strategy is a pure function from
//! (state, limit, cost, now) to (outcome, next state), on whole numbers. No clock, no I/O, no async, no dependency and no
//! float ever enters: time is an argument, and the store that remembers the state decides where it lives.
//!
//! ```
//! use tollgate_kernel::{Algorithm, Cost, Limit, Micros, TokenBucket};
//!
//! let bucket = TokenBucket::new("10/s".parse()?, 20)?;
//! let mut state = Default::default();
//! let outcome = bucket.charge(&mut state, Cost::new(5).unwrap(), Micros::from_secs(1));
//! assert!(outcome.allowed);
//! assert_eq!(outcome.remaining, 15);
//!
//! // The same bucket as a limit of any strategy:
//! let limit: Limit = bucket.into();
//! assert_eq!(limit.capacity(), 20);
//! # Ok::<(), tollgate_kernel::LimitError>(())
//! ```

mod algorithm;
mod bounds;
mod error;
mod limit;
mod outcome;
mod rate;
mod time;
mod twin;

pub use algorithm::{
    Algorithm, Align, Bucket, BucketNumbers, BucketState, CASES, Changed, Concurrency, CounterState, Counts,
    EntriesReading, Fit, FixedWindow, LeakyBucket, Lease, LeaseState, LogEntry, LogState, SlidingWindow,
    SlidingWindowCounter, Taken, TokenBucket, WindowState,
};
pub use bounds::{MAX_COUNT, MAX_FILL, MAX_PRODUCT, MAX_RATE_NUMERATOR, MAX_SPAN};
pub use error::LimitError;
pub use limit::{Limit, State, Strategy};
pub use outcome::{Cost, Outcome};
pub use rate::Rate;
pub use time::Micros;
pub use twin::{LUA, Parameters, Reading, SQL};
