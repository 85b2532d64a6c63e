//! A client of the service, and calls and answers in short.

use std::net::IpAddr;

use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::server::Tollgate;

#[allow(clippy::all, dead_code, rust_2018_idioms, unreachable_pub)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/envoy.rs"));
}

pub(crate) use generated::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
pub(crate) use generated::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use generated::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus;
pub(crate) use generated::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
pub(crate) use generated::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use generated::envoy::r#type::v3::RateLimitUnit;

pub(crate) async fn channel(server: &Tollgate) -> Channel {
    channel_from(server, None).await
}

/// The same from an address of one's own.
pub(crate) async fn channel_from(server: &Tollgate, address: Option<IpAddr>) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc())).expect("an address");
    endpoint.local_address(address).connect().await.expect("it listens")
}

pub(crate) async fn ask(channel: &Channel, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
    let answered = RateLimitServiceClient::new(channel.clone()).should_rate_limit(request).await;
    answered.map(tonic::Response::into_inner)
}

/// A call whose message comes when it likes, and whose end does: its headers are sent before.
pub(crate) async fn ask_slowly(
    channel: Channel,
    message: impl Stream<Item = RateLimitRequest> + Send + 'static,
) -> Result<RateLimitResponse, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.expect("it is there");
    let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let codec = tonic_prost::ProstCodec::default();
    let answered = client.client_streaming(Request::new(message), path, codec).await;
    answered.map(tonic::Response::into_inner)
}

/// A call in the domain `edge`: descriptors with `; ` between, of entries with blanks between. After the entries, `+3` and `-3`
/// are their hits, and `@3/MINUTE` is a limit of their own.
pub(crate) fn call(text: &str, hits_addend: u32) -> RateLimitRequest {
    RateLimitRequest {
        domain: "edge".into(),
        descriptors: text.split("; ").map(descriptor).collect(),
        hits_addend,
    }
}

pub(crate) fn descriptor(text: &str) -> RateLimitDescriptor {
    let mut descriptor = RateLimitDescriptor::default();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let hits = || word[1..].parse().expect("a number");
        match (&word[..1], word.split_once('=')) {
            ("+", _) => descriptor.hits_addend = Some(hits()),
            ("-", _) if word.len() == 1 => descriptor.is_negative_hits = true,
            ("-", _) => (descriptor.hits_addend, descriptor.is_negative_hits) = (Some(hits()), true),
            ("@", _) => {
                let (count, unit) = word[1..].split_once('/').expect("a rate");
                let unit = RateLimitUnit::from_str_name(unit).expect("a unit");
                let requests_per_unit = count.parse().expect("a number");
                descriptor.limit = Some(RateLimitOverride { requests_per_unit, unit: i32::from(unit) });
            }
            (_, Some((key, value))) => {
                descriptor.entries.push(Entry { key: key.into(), value: value.into() });
            }
            _ => panic!("{word}"),
        }
    }
    descriptor
}

/// An answer in short: `OK: OK 4/5 DAY api; OVER_LIMIT 0/3 wall`.
pub(crate) fn reported(response: &RateLimitResponse) -> String {
    let statuses: Vec<String> = response.statuses.iter().map(status).collect();
    format!("{}: {}", response.overall_code().as_str_name(), statuses.join("; "))
}

/// The code and the seconds until the reset of each status.
pub(crate) fn resets(response: &RateLimitResponse) -> Vec<String> {
    let reset = |status: &DescriptorStatus| {
        let reset = status.duration_until_reset.expect("a limit has a reset");
        format!("{} {}.{:09}", status.code().as_str_name(), reset.seconds, reset.nanos)
    };
    response.statuses.iter().map(reset).collect()
}

fn status(status: &DescriptorStatus) -> String {
    let code = status.code().as_str_name();
    match &status.current_limit {
        Some(limit) => {
            assert!(status.duration_until_reset.is_some(), "{status:?}");
            let unit = match limit.unit().as_str_name() {
                "UNKNOWN" => String::new(),
                unit => format!("{unit} "),
            };
            format!("{code} {}/{} {unit}{}", status.limit_remaining, limit.requests_per_unit, limit.name)
        }
        None if status.limit_remaining == u32::MAX => format!("{code} unlimited"),
        None => {
            assert_eq!((status.limit_remaining, status.duration_until_reset), (0, None));
            code.to_owned()
        }
    }
}
