//! Route limits: which requests are charged under which limits, by which key. One implementation for the tower layer, the
//! server's gate and backtest.
//!
//! A [`RouteLimit`] is a limit on the requests that match a [`Route`], with the [`KeyExtractor`] that finds the key in a request,
//! and the cost. `[[routes]]` of a config and the builder in code make the same `RouteLimit`s. [`Routes`] compiles them and
//! returns the charges of each [`RequestHead`].
//!
//! This module finds charges; it charges nothing and does not read responses. `pattern.rs` matches requests, `path.rs` normalises
//! a path, `client.rs` finds the client's address behind proxies, `key.rs` finds the key, and `routes.rs` combines them. The
//! tower layer (`http/`) and the server call [`Routes::charges`] and pass the charges to the engine.

mod client;
mod key;
mod limit;
mod path;
mod pattern;
mod request;
mod routes;
mod template;

pub use client::{ClientAddress, address, canonical};
pub use ipnet::IpNet;
pub use key::{KeyExtractor, MissingKey, NoKey};
pub use limit::{ChosenLimit, ResponseHead, RouteLimit};
pub use path::{BadPath, EncodedSeparators, decoded, normalized};
pub use pattern::Route;
pub use request::{AuthenticatedUser, Described, Peer, RequestHead, RequestReader};
pub use routes::{RequestLimit, RouteCharge, Routes};

pub(crate) use client::canonical_network;
pub(crate) use limit::{Choice, Settle};
pub(crate) use pattern::Matcher;
