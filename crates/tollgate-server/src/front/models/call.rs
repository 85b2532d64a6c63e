//! One call: read, admitted, sent, and sent again where that may help.
//!
//! Every attempt is admitted by itself, because providers count attempts. An attempt that the provider refused before it ran is
//! settled as a request without tokens; one whose fate is unknown stays charged as reserved. Nothing is tried again after the first
//! byte of an answer has gone to the client.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tollgate::ChargeId;
use tollgate_llm::count::Counted;
use tollgate_llm::{Admission, Api, Caller, EventKind, EventReader, ModelRequest, Refusal, TrailLine};
use tracing::Instrument;

use super::super::json::Body;
use super::fault::Fault;
use super::pump::{self, Answer, End};
use super::upstream::{SendError, Upstream, passed_back};
use super::{InFlight, Models, report};
use crate::serve::timeouts::Progress;

/// How often a call is sent at most.
const MOST_ATTEMPTS: u32 = 3;

/// How long the head of an answer is waited for. A whole answer that is not streamed comes with it.
const HEAD: Duration = Duration::from_secs(900);

/// How long the first event of a stream is waited for.
const FIRST_EVENT: Duration = Duration::from_secs(300);

/// How much earlier than its caller the gateway gives up.
const MARGIN: Duration = Duration::from_secs(2);

/// How long after a provider said that it is overloaded it is tried again, if it does not say.
const OVERLOADED: Duration = Duration::from_millis(500);

/// How many bytes of a stream are kept back until its first event.
const MOST_BEGUN: usize = 64 * 1024;

/// The longest refusal that is looked into.
const MOST_REFUSAL: usize = 64 * 1024;

/// Refusals that no waiting mends: the bill is not paid.
const BILLING: [&str; 6] = [
    "insufficient_quota",
    "credit_balance_exhausted",
    "organization_spend_limit_exceeded",
    "project_spend_limit_exceeded",
    "organization_usage_limit_exceeded",
    "enforced_spend_limit_reached",
];

/// The id of a request: the caller's, if it is sound, else a new one.
pub(super) fn request_id(headers: &HeaderMap) -> String {
    let is_sound =
        |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    let shown = headers.get("x-request-id").and_then(|value| value.to_str().ok()).filter(is_sound);
    shown.map_or_else(|| format!("req_{}", ChargeId::random()), str::to_owned)
}

/// What all lines of a call's trail have in common.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) model: String,
    /// The configured model, as metrics may show it.
    pub(super) label: String,
    pub(super) agent_id: String,
    pub(super) request_id: String,
}

impl Named {
    pub(super) fn line(&self, status: &'static str) -> TrailLine {
        TrailLine {
            timestamp: report::timestamp(SystemTime::now(), true),
            model: self.model.clone(),
            agent_id: self.agent_id.clone(),
            request_id: self.request_id.clone(),
            status,
            ..TrailLine::default()
        }
    }
}

impl Models {
    pub(super) fn write(&self, line: &TrailLine) {
        self.trail.iter().for_each(|trail| trail.write(line));
    }

    /// Notes that a request has to wait or is refused.
    fn note_limited(&self, named: &Named, refusal: &Refusal) {
        self.write(&TrailLine {
            reason: Some(refusal.reason.clone()),
            wait_seconds: refusal.retry_after.map(|wait| wait.as_secs_f64()),
            ..named.line("rate_limited")
        });
    }
}

fn counted(name: &'static str, named: &Named, outcome: &'static str) {
    metrics::counter!(name, "model" => named.label.clone(), "outcome" => outcome).increment(1);
}

pub(super) async fn answer(
    models: &Arc<Models>,
    api: Api,
    request: Request<Incoming>,
    progress: Progress,
    id: &str,
) -> Result<Response<Body>, Fault> {
    if request.method() != Method::POST {
        return Err(Fault::method("POST"));
    }
    progress.takes_long();
    let setup = models.setup();
    let (head, body) = request.into_parts();
    let caller = models.caller(&setup, &head.headers)?;
    let held = models.budget.read(body).await?;
    let request = ModelRequest::read(api, &held.bytes)?;
    let upstream = setup.upstream(request.model(), api)?;
    let known = setup.config.model(request.model());
    let named = Named {
        model: request.model().to_owned(),
        label: known.map_or_else(|| "other".to_owned(), |model| model.name.clone()),
        agent_id: agent_id(&head.headers, &request, &caller),
        request_id: id.to_owned(),
    };
    let within = within(&head.headers, setup.config.max_wait);
    let call = Call {
        models,
        upstream,
        request: &request,
        counted: models.limits.count(&request).await,
        headers: &head.headers,
        caller: &caller,
        named: &named,
        deadline: Instant::now() + within,
    };
    let span = tracing::info_span!("llm_call", model = named.label, request_id = id);
    let answered = call.run(progress, &held.bytes).instrument(span).await;
    counted("tollgate_llm_requests_total", &named, if answered.is_ok() { "answered" } else { "refused" });
    answered
}

/// For how long the caller waits in line: no longer than it waits for an answer.
fn within(headers: &HeaderMap, max_wait: Duration) -> Duration {
    let seconds = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let timeout = seconds("x-stainless-read-timeout").or_else(|| seconds("x-stainless-timeout"));
    let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    timeout.map_or(max_wait, |timeout| max_wait.min(timeout.saturating_sub(MARGIN.min(timeout / 4))))
}

fn agent_id(headers: &HeaderMap, request: &ModelRequest<'_>, caller: &Caller) -> String {
    let shown =
        headers.get("x-agent-id").and_then(|value| value.to_str().ok()).filter(|agent| !agent.is_empty());
    let agent = shown.map(str::to_owned).or_else(|| request.agent());
    let agent = agent.or_else(|| caller.client.clone()).unwrap_or_else(|| "default".to_owned());
    agent.chars().filter(|letter| !letter.is_control()).take(128).collect()
}

struct Call<'a> {
    models: &'a Arc<Models>,
    upstream: &'a Upstream,
    request: &'a ModelRequest<'a>,
    counted: Counted,
    headers: &'a HeaderMap,
    caller: &'a Caller,
    named: &'a Named,
    deadline: Instant,
}

/// An attempt that failed before anything of it was passed on.
struct Failed {
    /// The client's answer if nothing else is tried.
    response: Result<Response<Bytes>, Fault>,
    /// After how long it may be tried again, if it may.
    again: Option<Duration>,
}

impl Call<'_> {
    async fn run(&self, progress: Progress, sent: &Bytes) -> Result<Response<Body>, Fault> {
        let (body, hides_usage) = match self.request.body() {
            tollgate_llm::Body::AsSent => (sent.clone(), false),
            tollgate_llm::Body::AskingForUsage(body) => (Bytes::from(body), true),
        };
        let mut attempt = 1;
        loop {
            let in_flight = InFlight::of(self.models);
            let admission = self.admit().await?;
            let is_anthropic = self.request.api().is_anthropic();
            let standing = admission.standing();
            let attempting = self.attempt(admission, attempt, body.clone(), hides_usage);
            let failed = match attempting.instrument(tracing::info_span!("attempt", attempt)).await {
                Ok((mut head, answer)) => {
                    report::set_limits(&mut head.headers, &standing, is_anthropic);
                    let body = pump::start(self.models.clone(), answer, progress, in_flight);
                    return Ok(Response::from_parts(head, body));
                }
                Err(failed) => failed,
            };
            let again = failed.again.filter(|_| attempt < MOST_ATTEMPTS);
            // A provider may ask for more than can be added to an instant.
            let left = self.deadline.saturating_duration_since(Instant::now());
            match again.filter(|again| *again < left) {
                Some(again) => tokio::time::sleep(again).await,
                None => {
                    let mut response = failed.response?;
                    report::set_limits(response.headers_mut(), &standing, is_anthropic);
                    if attempt > 1 {
                        // The SDK's own retries on top of ours would make nine of three.
                        let never = http::HeaderValue::from_static("false");
                        response.headers_mut().insert("x-should-retry", never);
                    }
                    return Ok(response.map(super::full));
                }
            }
            attempt += 1;
        }
    }

    async fn admit(&self) -> Result<Admission, Fault> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let on_wait = |refusal: &Refusal| self.models.note_limited(self.named, refusal);
        let is_noted = std::sync::atomic::AtomicBool::new(false);
        let noting = |refusal: &Refusal| {
            is_noted.store(true, std::sync::atomic::Ordering::Relaxed);
            on_wait(refusal);
        };
        let limits = &self.models.limits;
        let admitting = limits.admit_counted(self.request, self.counted, self.caller, Some(left), noting);
        let admitted = admitting.instrument(tracing::info_span!("wait")).await;
        match admitted {
            Ok(admission) => {
                let label = self.named.label.clone();
                metrics::histogram!("tollgate_llm_wait_seconds", "model" => label)
                    .record(admission.waited().as_secs_f64());
                Ok(admission)
            }
            Err(refusal) => {
                if !is_noted.load(std::sync::atomic::Ordering::Relaxed) {
                    self.models.note_limited(self.named, &refusal);
                }
                Err(refusal.into())
            }
        }
    }

    /// Sends the call once. What is passed on is an answer that has begun well.
    async fn attempt(
        &self,
        admission: Admission,
        attempt: u32,
        body: Bytes,
        hides_usage: bool,
    ) -> Result<(http::response::Parts, Answer), Failed> {
        let api = self.request.api();
        let left = Left { call: self, attempt, is_left: true };
        let sending = self.upstream.send(api, self.headers, admission.group(), body);
        let response = tokio::time::timeout(HEAD, sending).await;
        left.not_left();
        let response = match response {
            Ok(Ok(response)) => response,
            Ok(Err(SendError::NotSent(why))) => {
                let _ = admission.cancel().await;
                return Err(self.failed(attempt, None, Fault::upstream(StatusCode::BAD_GATEWAY, why)));
            }
            Ok(Err(SendError::Lost(why))) => {
                let _ = admission.settle_estimated(0, false).await;
                return Err(self.failed(attempt, None, Fault::upstream(StatusCode::BAD_GATEWAY, why)));
            }
            Err(_) => {
                let _ = admission.settle_estimated(0, false).await;
                let why = "the upstream did not answer in time";
                return Err(self.failed(attempt, None, Fault::upstream(StatusCode::GATEWAY_TIMEOUT, why)));
            }
        };
        let (mut head, incoming) = response.into_parts();
        head.headers = passed_back(&head.headers);
        head.version = http::Version::HTTP_11;
        if !head.status.is_success() {
            return Err(self.refused(attempt, admission, head, incoming).await);
        }
        let is_stream = head
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let mut answer = Answer {
            incoming,
            reader: is_stream.then(|| EventReader::new(admission.encoding())),
            begun: Vec::new(),
            end: None,
            hides_usage,
            admission,
            named: self.named.clone(),
            attempt,
            http_status: head.status.as_u16(),
        };
        if is_stream {
            // Its length changes where something is hidden.
            if hides_usage {
                head.headers.remove(http::header::CONTENT_LENGTH);
            }
            if let Some(error) = first_event(&mut answer).await {
                let _ = answer.admission.refused().await;
                counted("tollgate_llm_attempts_total", self.named, "overloaded");
                let mut response = Response::new(error);
                response
                    .headers_mut()
                    .insert(CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
                self.note_failed(attempt, Some(200), "the stream began with an error");
                return Err(Failed { response: Ok(response), again: Some(OVERLOADED) });
            }
        }
        Ok((head, answer))
    }

    fn note_failed(&self, attempt: u32, http_status: Option<u16>, reason: &str) {
        let line = self.named.line("error");
        self.models.write(&TrailLine {
            reason: Some(reason.to_owned()),
            attempt: Some(attempt),
            http_status,
            ..line
        });
    }

    fn failed(&self, attempt: u32, again: Option<Duration>, fault: Fault) -> Failed {
        counted("tollgate_llm_attempts_total", self.named, "failed");
        self.note_failed(attempt, None, "the upstream could not be reached or did not answer");
        Failed { response: Err(fault), again }
    }

    /// The provider answered that it will not.
    async fn refused(
        &self,
        attempt: u32,
        admission: Admission,
        head: http::response::Parts,
        incoming: Incoming,
    ) -> Failed {
        let limited = http_body_util::Limited::new(incoming, super::body::MOST_BYTES);
        let gathering = tokio::time::timeout(FIRST_EVENT, limited.collect());
        let body = match gathering.await {
            Ok(Ok(whole)) => whole.to_bytes(),
            _ => Bytes::new(),
        };
        let group = admission.group().map(str::to_owned);
        // A refusal of the caller's request is proof that it did not run; a failure of the provider is not.
        let settled = match head.status.is_client_error() {
            true => admission.refused().await,
            false => admission.settle_estimated(0, false).await,
        };
        if let Err(error) = settled {
            tracing::warn!(%error, "a refused call could not be settled");
        }
        let text = String::from_utf8_lossy(&body[..body.len().min(MOST_REFUSAL)]);
        let is_billing = BILLING.iter().any(|code| text.contains(code));
        let (outcome, again) = match head.status.as_u16() {
            429 if is_billing => ("billing", None),
            429 => ("limited", hint(&head.headers).or(Some(OVERLOADED * 2_u32.pow(attempt - 1)))),
            529 | 503 => ("overloaded", hint(&head.headers).or(Some(OVERLOADED))),
            400..=499 => ("refused", None),
            _ => ("failed", None),
        };
        if let ("limited", Some(group)) = (outcome, &group) {
            self.models.limits.note_limited(group, hint(&head.headers).unwrap_or_default());
        }
        counted("tollgate_llm_attempts_total", self.named, outcome);
        self.note_failed(attempt, Some(head.status.as_u16()), "the provider refused the call");
        let mut response = Response::from_parts(head, body);
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        Failed { response: Ok(response), again }
    }
}

/// Notes a client that leaves before the head of its answer. What was reserved for its call stays charged.
struct Left<'a> {
    call: &'a Call<'a>,
    attempt: u32,
    is_left: bool,
}

impl Left<'_> {
    fn not_left(mut self) {
        self.is_left = false;
    }
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        if self.is_left {
            counted("tollgate_llm_attempts_total", self.call.named, "left");
            self.call.note_failed(
                self.attempt,
                None,
                "the client left before its answer began; charged as reserved",
            );
        }
    }
}

/// How long a provider asks to wait, as SDKs read it.
fn hint(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let ms = number("retry-after-ms").map(|ms| ms / 1_000.0);
    let seconds = ms.or_else(|| number("retry-after"))?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Reads up to the first event of a stream that says something; the bytes of an error, if it is one.
async fn first_event(answer: &mut Answer) -> Option<Bytes> {
    let reader = answer.reader.as_mut()?;
    loop {
        let frame = match tokio::time::timeout(FIRST_EVENT, answer.incoming.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => {
                answer.end = Some(End::Whole);
                return None;
            }
            Err(_) | Ok(Some(Err(_))) => {
                answer.end = Some(End::Broken);
                return None;
            }
        };
        let Ok(piece) = frame.into_data() else { continue };
        let events = reader.feed(&piece);
        let is_error = events.iter().any(|event| event.kind == EventKind::Error);
        let is_any = !events.is_empty();
        answer.begun.push((piece, events));
        if is_error && !reader.streamed().has_content() {
            let bytes: Vec<u8> = answer.begun.iter().flat_map(|(piece, _)| piece.iter().copied()).collect();
            return Some(bytes.into());
        }
        let begun: usize = answer.begun.iter().map(|(piece, _)| piece.len()).sum();
        if is_any || begun > MOST_BEGUN {
            return None;
        }
    }
}
