//! HTTP: a tower layer that stands before a service.
//!
//! The walk of a request: which tolls are on its way (`route.rs`), who pays each (`payer.rs`, `client.rs` for addresses) and how
//! much (`toll.rs`); all of it charged at once (`charge.rs`); then it is refused (`refusal.rs`), held back or let through
//! (`service.rs`, `future.rs`); and when its answer is there, what was reserved is settled (`after.rs`, `body.rs`, and `lease.rs` for
//! connections that become another protocol) and the caller is told how it stands (`marks.rs`).
//!
//! This room translates. It counts nothing, and what it tells of a decision is rendered in `report/`, where the other faces
//! find it too. Where the store is the memory of this process a plain charge neither waits nor is boxed; what is settled later is one
//! box, and a store elsewhere one boxed future. `axum.rs` spares axum's answers another.

mod after;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod charge;
mod client;
mod future;
mod head;
mod layer;
mod lease;
mod marks;
mod path;
mod payer;
mod refusal;
mod route;
mod service;
mod toll;

#[cfg(feature = "axum")]
pub use axum::{AxumLimitFuture, AxumLimitLayer, AxumLimitService};
pub use body::LimitedBody;
#[cfg(feature = "config")]
pub(crate) use client::canonical_network;
pub use client::{ClientAddress, address, canonical};
pub use future::LimitFuture;
pub use head::{Head, PeerAddress};
pub use ipnet::IpNet;
pub use layer::{LimitLayer, LimitLayerBuilder};
pub use lease::Lease;
pub use path::{BadPath, EncodedSeparators, decoded, normalized};
pub use payer::{Missing, Payer};
pub use refusal::Refusal;
pub use route::Route;
#[cfg(feature = "config")]
pub(crate) use route::{Asked, Matcher};
pub use service::LimitService;
pub use toll::{Answer, Toll};
