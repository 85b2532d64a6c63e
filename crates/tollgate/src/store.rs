//! Stores: the [`Store`] trait and its types for authors of stores, the stores of this crate and their options, and the health of
//! a store.

pub use tollgate_kernel::{
    Align, Concurrency, Cost, FixedWindow, LeakyBucket, LimitError, Micros, Outcome, SlidingWindow,
    SlidingWindowCounter, TokenBucket,
};
pub use tollgate_store::{
    Charged, EachFuture, Failure, Hold, MemoryOptions, MemoryStore, NodeId, Nodes, Outcomes, PutRecord,
    Record, RecordKind, Records, Scope, ScriptTime, Store, StoreError, StoreFuture, StoreTask, StoredCharge,
    StoredLimit, Subject, WhenFull,
};
#[cfg(feature = "postgres")]
pub use tollgate_store::{PostgresOptions, PostgresStore, PostgresTls};
#[cfg(feature = "redis")]
pub use tollgate_store::{RedisOptions, RedisReport, RedisStore};

pub use crate::health::{StoreChange, StoreHealth, StoreState};
