//! What authors of stores need, and those who look after one: the [`Store`] trait and its types, the stores that come with this
//! crate and their options, and how a store fares.

pub use tollgate_kernel::{
    Align, Concurrency, Cost, FixedWindow, LeakyBucket, LimitError, Micros, Outcome, SlidingWindow,
    SlidingWindowCounter, TokenBucket,
};
pub use tollgate_store::{
    Charged, EachFuture, Failure, Hold, MemoryOptions, MemoryStore, NodeId, Nodes, Outcomes, Scope, Store,
    StoreError, StoreFuture, StoreTask, StoredCharge, StoredLimit, Subject, WhenFull,
};
#[cfg(feature = "postgres")]
pub use tollgate_store::{PostgresOptions, PostgresStore, PostgresTls};
#[cfg(feature = "redis")]
pub use tollgate_store::{RedisOptions, RedisReport, RedisStore};

pub use crate::health::{StoreChange, StoreHealth, StoreState};
