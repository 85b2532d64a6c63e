//! HTTP: a tower layer that stands before a service.

mod client;
mod path;

pub use client::{ClientAddress, canonical};
pub use ipnet::IpNet;
pub use path::{BadPath, EncodedSeparators, Params, Templates, decoded, normalized};
