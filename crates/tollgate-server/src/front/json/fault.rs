//! Errors of a call, as `application/problem+json`.

use std::fmt;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use serde_json::json;
use tollgate::Error;
use tollgate::store::Micros;

use super::body::{Body, full};
use super::requests::ListEntry;
use crate::front::undecided::words;

/// An error of a call.
#[derive(Debug)]
pub(crate) struct Fault {
    status: StatusCode,
    detail: String,
    /// All limits, if the call named an unknown one.
    known: Option<Vec<String>>,
    /// The allowed methods, if the call used another.
    allow: Option<&'static str>,
    /// When to come again, where it is too early.
    retry_after: Option<Micros>,
}

/// What an admin call presented instead of the admin token.
#[derive(Clone, Copy)]
pub(crate) enum ShownToken {
    None,
    OtherScheme,
    Wrong,
}

impl Fault {
    fn new(status: StatusCode, detail: impl Into<String>) -> Fault {
        Fault { status, detail: detail.into(), known: None, allow: None, retry_after: None }
    }

    pub(crate) fn malformed(detail: impl Into<String>) -> Fault {
        Fault::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(crate) fn unknown_limit(detail: impl Into<String>, known: Vec<String>) -> Fault {
        Fault { known: Some(known), ..Fault::new(StatusCode::NOT_FOUND, detail) }
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> Fault {
        Fault::new(StatusCode::NOT_FOUND, detail)
    }

    pub(crate) fn method(allow: &'static str) -> Fault {
        let detail = format!("this address answers to {allow}");
        Fault { allow: Some(allow), ..Fault::new(StatusCode::METHOD_NOT_ALLOWED, detail) }
    }

    pub(crate) fn too_large(most: usize) -> Fault {
        Fault::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {most} bytes"))
    }

    pub(crate) fn too_slow() -> Fault {
        Fault::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time")
    }

    pub(crate) fn not_json() -> Fault {
        let detail = "send JSON, and say so: Content-Type: application/json";
        Fault::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
    }

    /// An admin call without the admin token, or with another one.
    pub(crate) fn no_token(shown: ShownToken) -> Fault {
        let detail = match shown {
            ShownToken::None => "this call needs the admin token: Authorization: Bearer …",
            ShownToken::OtherScheme => {
                "the field Authorization is not of the form `Bearer …`, with the admin token in it"
            }
            ShownToken::Wrong => "the admin token is wrong",
        };
        Fault::new(StatusCode::UNAUTHORIZED, detail)
    }

    pub(crate) fn too_many_guesses(wait: Micros) -> Fault {
        let detail = "too many wrong tokens came from this address; try again later";
        Fault { retry_after: Some(wait), ..Fault::new(StatusCode::TOO_MANY_REQUESTS, detail) }
    }

    pub(crate) fn forbidden(detail: impl Into<String>) -> Fault {
        Fault::new(StatusCode::FORBIDDEN, detail)
    }

    /// Why a call could not be decided: it was invalid, or the store failed.
    pub(crate) fn undecided(error: &Error) -> Fault {
        match error.failure() {
            None if error.needs_permit().is_some() => {
                Fault::needs_reserve(error.needs_permit().unwrap_or_default())
            }
            None => Fault::malformed(words(error)),
            Some(_) => Fault::unavailable(words(error)),
        }
    }

    /// A check of a concurrency limit would take a lease that the caller could not release.
    pub(crate) fn needs_reserve(limit: &str) -> Fault {
        Fault::malformed(format!(
            "`{limit}` is a concurrency limit, and a check would hold nothing that could be released; ask /v1/reserve, then \
             /v1/renew and /v1/cancel"
        ))
    }

    pub(crate) fn unavailable(detail: impl Into<String>) -> Fault {
        Fault::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }

    /// The same with the field that it is about, in a request that has several charges: `checks[3].limit: …`.
    pub(crate) fn at(self, entry: ListEntry, field: &str) -> Fault {
        let ListEntry { list, index } = entry;
        Fault { detail: format!("{list}[{index}].{field}: {}", self.detail), ..self }
    }

    /// The same with another status, for a proxy that accepts only some.
    pub(crate) fn with_status(self, status: StatusCode) -> Fault {
        Fault { status, ..self }
    }

    /// The entry of a fault in a list of results.
    pub(crate) fn in_place(&self) -> String {
        json!({ "error": { "status": self.status.as_u16(), "detail": self.detail } }).to_string()
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let mut problem = json!({
            "type": "about:blank", "title": title, "status": self.status.as_u16(), "detail": self.detail,
        });
        if let Some(known) = self.known {
            problem["known-limits"] = known.into();
        }
        let mut response = Response::new(full(Bytes::from(problem.to_string())));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(tollgate::problem::CONTENT_TYPE));
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if let Some(wait) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(wait.get().div_ceil(1_000_000)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}
