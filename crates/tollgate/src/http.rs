//! The tower layer: limits in front of an HTTP or gRPC service.
//!
//! The walk of a request: `route/` finds its charges (`charges.rs`) and the engine charges them as one (`charge.rs`). The request
//! is then refused (`refusal.rs`), delayed, or passed on (`service.rs`, `future.rs`). When the response is there, reservations
//! are settled (`after.rs`, `body.rs`, and `lease.rs` for upgraded connections) and the rate-limit headers are written
//! (`rate_limit_headers.rs`).
//!
//! This module translates. It counts nothing, and `response/` renders what a decision looks like, for every API. On the memory
//! store a plain charge neither waits nor allocates a future. A later settlement costs one box; a remote store costs one boxed
//! future. `axum.rs` saves one box for axum's responses.

mod after;
mod applied;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod charge;
mod charges;
mod future;
mod header_template;
mod layer;
mod lease;
mod rate_limit_headers;
mod refusal;
mod service;

#[cfg(feature = "axum")]
pub use axum::{AxumLimitFuture, AxumLimitLayer, AxumLimitService};
pub use body::LimitedBody;
pub use future::LimitFuture;
pub use layer::{LimitLayer, LimitLayerBuilder};
pub use lease::Lease;
pub use refusal::Refusal;
pub use service::LimitService;

pub use crate::route::Peer;
