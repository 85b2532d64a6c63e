//! What the proto files say, as Rust. The texts of a call are bytes: see `build.rs`.

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

pub(super) use generated::envoy::config::core::v3::HeaderValue;
pub(super) use generated::envoy::extensions::common::ratelimit::v3 as common;
pub(super) use generated::envoy::service::ratelimit::v3 as service;
pub(super) use generated::envoy::r#type::v3::RateLimitUnit;

/// The proto files themselves, for reflection.
pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/envoy.descriptors"));

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::common::RateLimitDescriptor;
    use super::common::rate_limit_descriptor::{Entry, RateLimitOverride};
    use super::service::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
    use super::service::{RateLimitRequest, RateLimitResponse};
    use super::*;

    /// The bytes as they go over the wire, worked out by hand from the published numbers: our own client would not notice a
    /// wrong one.
    fn check(message: &(impl Message + std::fmt::Debug), expected: &str) {
        let bytes: Vec<String> = message.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(bytes.join(" "), expected, "{message:?}");
    }

    #[test]
    fn fields_have_their_published_numbers() {
        let descriptor = RateLimitDescriptor {
            entries: vec![Entry { key: "k".into(), value: "v".into() }],
            limit: Some(RateLimitOverride { requests_per_unit: 5, unit: i32::from(RateLimitUnit::Minute) }),
            hits_addend: Some(0),
            is_negative_hits: true,
        };
        check(
            &RateLimitRequest { domain: "d".into(), descriptors: vec![descriptor], hits_addend: 7 },
            "0a 01 64 12 12 0a 06 0a 01 6b 12 01 76 12 04 08 05 10 02 1a 00 20 01 18 07",
        );
        let limit =
            RateLimit { requests_per_unit: 5, unit: i32::from(rate_limit::Unit::Week), name: "n".to_owned() };
        let status = DescriptorStatus {
            code: i32::from(Code::OverLimit),
            current_limit: Some(limit),
            limit_remaining: 3,
            duration_until_reset: Some(prost_types::Duration { seconds: 1, nanos: 2 }),
        };
        check(
            &RateLimitResponse {
                overall_code: i32::from(Code::OverLimit),
                statuses: vec![status],
                response_headers_to_add: vec![HeaderValue { key: "a".to_owned(), value: "b".to_owned() }],
            },
            "08 02 12 13 08 02 12 07 08 05 10 07 1a 01 6e 18 03 22 04 08 01 10 02 1a 06 0a 01 61 12 01 62",
        );
    }
}
