//! Envoy's messages, as our server has them.

/// The generated code, and its lints.
#[allow(
    clippy::all,
    clippy::cast_possible_truncation,
    dead_code,
    missing_docs,
    rust_2018_idioms,
    unreachable_pub,
    unused_qualifications
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/envoy.rs"));
}

pub(crate) use generated::envoy::extensions::common::ratelimit::v3 as common;
pub(crate) use generated::envoy::service::ratelimit::v3 as service;
