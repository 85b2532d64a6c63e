//! The answer to a request that may not pass.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode, Version};
use tollgate_kernel::Micros;

use super::rate_limit_headers::RateLimitHeaders;
use crate::grpc;
use crate::headers::ReportedLimit;
use crate::problem::{self, Reason};
use crate::route::BadPath;

/// Writes refusals in a service's own way.
pub(super) type Responder = Arc<dyn Fn(&Refusal<'_>) -> Response<Bytes> + Send + Sync>;

/// In which protocol a caller wants to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

impl Protocol {
    /// Only a real gRPC call is answered as one: its refusal is a 200 to clients that know nothing of gRPC.
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

    /// Of a request about which nobody could decide.
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

    /// How long to wait before the same request may pass; `None` if it never can, as it stands.
    pub fn retry_after(&self) -> Option<Micros> {
        problem::longest_wait(self.limits.iter().copied())
    }

    /// Whether the caller speaks gRPC.
    pub fn is_grpc(&self) -> bool {
        self.protocol == Protocol::Grpc
    }

    /// The answer that is given unless a service writes its own: problem+json, or the status of a gRPC call.
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

    /// The answer, with the fields that tell the caller how it stands.
    pub(super) fn answer(
        &self,
        responder: Option<&Responder>,
        rate_limit_headers: RateLimitHeaders,
    ) -> Response<Bytes> {
        let mut answer = responder.map_or_else(|| self.plain(), |write| write(self));
        if self.limits.is_empty() && self.reason == Reason::ReducedCapacity {
            // Nobody could say how long; whatever it was may have passed by then.
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        rate_limit_headers.write(answer.headers_mut());
        answer
    }
}

/// The answer to a request whose path has no one spelling.
pub(super) fn bad_path(error: &BadPath) -> Response<Bytes> {
    let body = format!(
        "{{\"type\":\"about:blank\",\"title\":\"Bad Request\",\"status\":400,\"detail\":\"{error}\"}}"
    );
    let mut answer = Response::new(Bytes::from(body));
    *answer.status_mut() = StatusCode::BAD_REQUEST;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
    answer
}
