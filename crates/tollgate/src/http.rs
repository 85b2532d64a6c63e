//! The tower layer: limits before an HTTP or gRPC service.
//!
//! The walk of a request: `route/` finds its charges (`charges.rs`), all of them are charged together (`charge.rs`); then it is
//! refused (`refusal.rs`), delayed or let through (`service.rs`, `future.rs`); and when its response is there, what was reserved
//! is settled (`after.rs`, `body.rs`, and `lease.rs` for connections that become another protocol) and the rate-limit headers are
//! written (`rate_limit_headers.rs`).
//!
//! This module translates. It counts nothing, and what it shows of a decision is rendered in `response/`, which the other faces
//! use too. On the memory store a plain charge neither waits nor allocates a future; what is settled later is one box, and a
//! remote store one boxed future. `axum.rs` saves axum's responses another.

mod after;
mod applied;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod charge;
mod charges;
mod future;
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
