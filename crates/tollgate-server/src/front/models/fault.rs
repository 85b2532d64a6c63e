//! What is wrong with a call, in the shape in which its provider would say it.

use std::time::Duration;

use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::json;
use tollgate_llm::Counts;
use tollgate_llm::{Refusal, RefusalKind, RequestError, Standing};

use super::super::json::{Body, full};
use super::report;

/// Beyond this, SDKs of OpenAI do not retry at all and those of Anthropic sleep for as long as they are told.
const LONGEST_HINT: Duration = Duration::from_secs(120);

/// `error.type` in the shape of OpenAI and in that of Anthropic.
type Kinds = (&'static str, &'static str);

/// What is wrong with a call.
#[derive(Debug)]
pub(super) struct Fault {
    status: StatusCode,
    message: String,
    /// `error.type` for OpenAI and for Anthropic.
    kinds: &'static Kinds,
    code: Option<&'static str>,
    param: Option<&'static str>,
    retry_after: Option<Duration>,
    is_final: bool,
    standing: Box<[Standing]>,
    allow: Option<&'static str>,
}

const INVALID: &Kinds = &("invalid_request_error", "invalid_request_error");

impl Fault {
    fn new(status: StatusCode, kinds: &'static Kinds, message: impl Into<String>) -> Fault {
        Fault {
            status,
            message: message.into(),
            kinds,
            code: None,
            param: None,
            retry_after: None,
            is_final: false,
            standing: Box::default(),
            allow: None,
        }
    }

    pub(super) fn malformed(message: impl Into<String>) -> Fault {
        Fault { is_final: true, ..Fault::new(StatusCode::BAD_REQUEST, INVALID, message) }
    }

    pub(super) fn invalid(param: &'static str, message: impl Into<String>) -> Fault {
        Fault { param: Some(param), ..Fault::malformed(message) }
    }

    pub(super) fn no_model(message: impl Into<String>) -> Fault {
        let kinds = &("invalid_request_error", "not_found_error");
        Fault { code: Some("model_not_found"), ..Fault::new(StatusCode::NOT_FOUND, kinds, message) }
    }

    pub(super) fn no_key(message: impl Into<String>) -> Fault {
        let kinds = &("invalid_request_error", "authentication_error");
        Fault { code: Some("invalid_api_key"), ..Fault::new(StatusCode::UNAUTHORIZED, kinds, message) }
    }

    pub(super) fn method(allow: &'static str) -> Fault {
        let message = format!("this address answers to {allow}");
        Fault { allow: Some(allow), ..Fault::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, message) }
    }

    pub(super) fn too_large(most: usize) -> Fault {
        let kinds = &("invalid_request_error", "request_too_large");
        Fault::new(StatusCode::PAYLOAD_TOO_LARGE, kinds, format!("the body is longer than {most} bytes"))
    }

    pub(super) fn too_slow() -> Fault {
        Fault::new(StatusCode::REQUEST_TIMEOUT, INVALID, "the body did not come in time")
    }

    pub(super) fn no_memory() -> Fault {
        let kinds = &("server_error", "overloaded_error");
        let message = "the gateway holds as many requests as it has memory for (llm.memory_mib)";
        Fault {
            retry_after: Some(Duration::from_secs(1)),
            ..Fault::new(StatusCode::SERVICE_UNAVAILABLE, kinds, message)
        }
    }

    /// The upstream did not answer. The gateway has made all attempts that there are.
    pub(super) fn upstream(status: StatusCode, message: impl Into<String>) -> Fault {
        Fault { is_final: true, ..Fault::new(status, &("server_error", "api_error"), message) }
    }

    pub(super) fn into_response(self, is_anthropic: bool, request_id: &str) -> Response<Body> {
        let body = match is_anthropic {
            true => json!({
                "type": "error",
                "error": { "type": self.kinds.1, "message": self.message },
                "request_id": request_id,
            }),
            false => json!({ "error": {
                "message": self.message, "type": self.kinds.0, "param": self.param, "code": self.code,
            } }),
        };
        let mut response = Response::new(full(body.to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        let mut set = |name: HeaderName, value: String| {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(name, value);
            }
        };
        set(CONTENT_TYPE, "application/json".to_owned());
        if let Some(allow) = self.allow {
            set(ALLOW, allow.to_owned());
        }
        let mut is_final = self.is_final;
        if let Some(wait) = self.retry_after {
            // Rounded up: who comes at that very moment must find room.
            let ms = wait.as_micros().div_ceil(1_000).max(1);
            set(RETRY_AFTER, ms.div_ceil(1_000).to_string());
            set(HeaderName::from_static("retry-after-ms"), ms.to_string());
            is_final |= wait > LONGEST_HINT;
        }
        if is_final {
            set(HeaderName::from_static("x-should-retry"), "false".to_owned());
        }
        report::set_limits(response.headers_mut(), &self.standing, is_anthropic);
        response
    }
}

impl From<RequestError> for Fault {
    fn from(error: RequestError) -> Fault {
        Fault { param: error.field(), ..Fault::malformed(error.to_string()) }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        let Refusal { kind, reason, retry_after, standing } = refusal;
        let is_of_requests = standing.iter().any(|one| one.counts == Counts::Requests && one.remaining == 0);
        let fault = match kind {
            RefusalKind::Limited | RefusalKind::LineFull => Fault {
                code: Some("rate_limit_exceeded"),
                retry_after,
                ..Fault::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    if is_of_requests {
                        &("requests", "rate_limit_error")
                    } else {
                        &("tokens", "rate_limit_error")
                    },
                    reason,
                )
            },
            RefusalKind::Never => {
                Fault { code: Some("request_too_large_for_limit"), ..Fault::malformed(reason) }
            }
            RefusalKind::UnknownModel => Fault::no_model(reason),
            RefusalKind::Undecided => Fault {
                retry_after,
                ..Fault::new(StatusCode::SERVICE_UNAVAILABLE, &("server_error", "api_error"), reason)
            },
        };
        Fault { standing: standing.into(), ..fault }
    }
}
