//! The response to a request that is refused.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode, Version};

use super::rate_limit_headers::RateLimitHeaders;
use crate::grpc;
use crate::headers::ReportedLimit;
use crate::problem::{self, Reason};
use crate::route::BadPath;

/// A service's own rendering of refusals.
pub(super) type Responder = Arc<dyn Fn(&Refusal<'_>) -> Response<Bytes> + Send + Sync>;

/// In which protocol a caller wants to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

impl Protocol {
    /// Only a real gRPC call gets a gRPC status: other clients would see a 200.
    pub(super) fn of<B>(request: &Request<B>) -> Protocol {
        let is_grpc = |value: &HeaderValue| {
            let rest = value.as_bytes().strip_prefix(b"application/grpc");
            rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
        };
        let is_call = request.method() == Method::POST && request.version() >= Version::HTTP_2;
        match is_call && request.headers().get(CONTENT_TYPE).is_some_and(is_grpc) {
            true => Protocol::Grpc,
            false => Protocol::Http,
        }
    }
}

/// Why a request may not pass, for the code that writes the answer.
pub struct Refusal<'a> {
    protocol: Protocol,
    limits: &'a [ReportedLimit<'a>],
    reason: Reason,
}

impl<'a> Refusal<'a> {
    pub(super) fn new(protocol: Protocol, limits: &'a [ReportedLimit<'a>], reason: Reason) -> Refusal<'a> {
        Refusal { protocol, limits, reason }
    }

    /// For a request that could not be decided.
    pub(super) fn undecided(protocol: Protocol) -> Refusal<'static> {
        Refusal { protocol, limits: &[], reason: Reason::ReducedCapacity }
    }

    /// Why, in short.
    pub fn why(&self) -> Reason {
        self.reason
    }

    /// What each limit of the charge reported.
    pub fn limits(&self) -> &[ReportedLimit<'a>] {
        self.limits
    }

    /// How long to wait before the same request may pass; `None` if it never can.
    pub fn retry_after(&self) -> Option<Duration> {
        problem::longest_wait(self.limits.iter().copied()).map(Duration::from)
    }

    /// Whether the caller speaks gRPC.
    pub fn is_grpc(&self) -> bool {
        self.protocol == Protocol::Grpc
    }

    /// The default response: problem+json, or the status of a gRPC call.
    pub fn plain(&self) -> Response<Bytes> {
        match self.protocol {
            Protocol::Http => {
                let status =
                    StatusCode::from_u16(self.reason.status()).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
                let mut answer =
                    Response::new(Bytes::from(problem::body(self.reason, self.limits.iter().copied())));
                *answer.status_mut() = status;
                let headers = answer.headers_mut();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
                // A refusal is for this caller and this moment.
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                answer
            }
            Protocol::Grpc => {
                let status = grpc::status(self.reason, self.limits.iter().copied());
                let mut answer = Response::new(Bytes::new());
                let headers = answer.headers_mut();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                headers.insert(grpc::STATUS, HeaderValue::from(status.code));
                // Both are visible ASCII.
                for (name, text) in [(grpc::MESSAGE, status.message), (grpc::DETAILS, status.details)] {
                    headers.extend(
                        HeaderValue::try_from(text).map(|text| (HeaderName::from_static(name), text)),
                    );
                }
                answer
            }
        }
    }

    /// The response, with the rate-limit headers.
    pub(super) fn answer(
        &self,
        responder: Option<&Responder>,
        rate_limit_headers: RateLimitHeaders,
    ) -> Response<Bytes> {
        let mut answer = responder.map_or_else(|| self.plain(), |write| write(self));
        if self.limits.is_empty() && self.reason == Reason::ReducedCapacity {
            // The time is not known; one second is a guess.
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        rate_limit_headers.write(answer.headers_mut());
        answer
    }
}

/// The response to a request whose path cannot be normalised.
pub(super) fn bad_path(error: &BadPath) -> Response<Bytes> {
    let body = format!(
        "{{\"type\":\"about:blank\",\"title\":\"Bad Request\",\"status\":400,\"detail\":\"{error}\"}}"
    );
    let mut answer = Response::new(Bytes::from(body));
    *answer.status_mut() = StatusCode::BAD_REQUEST;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
    answer
}
