//! One call: read, admitted, sent, and sent again where that may help.
//!
//! Every attempt is admitted by itself, because providers count attempts. An attempt that the provider refused before it ran is
//! settled as a request without tokens; one whose fate is unknown stays charged as reserved. Nothing is tried again after the first
//! byte of an answer has gone to the client.
//!
//! A 429 parks the quota group whose key was used: the next attempt takes another group at once, or waits in line until the first
//! returns. An overload waits at the breaker. Both are bounded by the caller's deadline and by three attempts, those included that
//! the SDK has made already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tollgate::ChargeId;
use tollgate_llm::count::Counted;
use tollgate_llm::provider::{Failure, Hints, classify, classify_event};
use tollgate_llm::{Admission, Api, Caller, EventReader, ModelRequest, Refusal, ReportedLeft, TrailLine};
use tracing::Instrument;

use super::super::json::Body;
use super::begin::{Begun, first_bytes, first_event};
use super::breaker::Pass;
use super::fault::Fault;
use super::pump::{self, Answer};
use super::upstream::{Cause, SendError, Upstream, passed_back};
use super::{InFlight, Models, report};
use crate::serve::timeouts::Progress;

/// How often a call is sent at most, with the SDK's own retries. An attempt that a quota group refuses while another one is free
/// does not count.
const MOST_ATTEMPTS: u32 = 3;

/// How much earlier than its caller the gateway gives up.
const MARGIN: Duration = Duration::from_secs(2);

/// How long a group is parked after a 429 that does not say for how long. Each attempt that follows doubles it.
const NO_HINT: Duration = Duration::from_millis(500);

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
    fn note_limited(&self, named: &Named, reason: &str, wait: Option<Duration>) {
        self.write(&TrailLine {
            reason: Some(reason.to_owned()),
            wait_seconds: wait.map(|wait| wait.as_secs_f64()),
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
        retries: retries(&head.headers),
        is_noted: AtomicBool::new(false),
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

/// How often the SDK has tried this call already.
fn retries(headers: &HeaderMap) -> u32 {
    let count =
        headers.get("x-stainless-retry-count").and_then(|value| value.to_str().ok()?.trim().parse().ok());
    count.unwrap_or(0).min(MOST_ATTEMPTS)
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
    /// How often the SDK has tried before.
    retries: u32,
    /// Whether the trail says that it had to wait or was refused, which is one line for all attempts.
    is_noted: AtomicBool,
}

/// An attempt that failed before anything of it was passed on.
struct Failed {
    /// The client's answer if nothing else is tried.
    response: Result<Response<Bytes>, Fault>,
    again: Again,
    /// How long the provider asks to wait.
    hint: Option<Duration>,
}

/// Why a call is not sent.
enum NotEntered {
    Overloaded(Fault),
    Limited(Fault),
}

/// Whether an attempt is followed by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Again {
    /// It would fail again, or may have run.
    Never,
    /// It would fail again, though the SDK does not know.
    NorByTheSdk,
    /// When the quota group is no longer parked, or with another one.
    Parked,
    /// When this time is over.
    After(Duration),
    /// When the provider is no longer overloaded.
    Recovered,
}

impl Call<'_> {
    async fn run(&self, progress: Progress, sent: &Bytes) -> Result<Response<Body>, Fault> {
        let (body, hides_usage) = match self.request.body() {
            tollgate_llm::Body::AsSent => (sent.clone(), false),
            tollgate_llm::Body::AskingForUsage(body) => (Bytes::from(body), true),
        };
        let most = MOST_ATTEMPTS.saturating_sub(self.retries).max(1);
        let (mut attempt, mut counted) = (0, 0);
        let mut last: Option<Failed> = None;
        let mut refused: Vec<String> = Vec::new();
        loop {
            attempt += 1;
            let in_flight = InFlight::of(self.models);
            let (admission, pass) = match (self.enter().await, last.take()) {
                (Ok(entered), _) => entered,
                (Err(NotEntered::Overloaded(_)), Some(failed)) => return self.give_up(failed, false),
                (Err(NotEntered::Overloaded(fault) | NotEntered::Limited(fault)), _) => return Err(fault),
            };
            let standing = admission.standing();
            let group = admission.group().map(str::to_owned);
            refused.extend_from_slice(admission.left_out());
            // In a box, so that calls in line do not hold the room for it.
            let attempting = Box::pin(self.attempt(admission, attempt, pass, body.clone(), hides_usage));
            let attempting = attempting.instrument(tracing::info_span!("attempt", attempt));
            let mut failed = match attempting.await {
                Ok((mut head, answer)) => {
                    report::set_limits(&mut head.headers, &standing, self.request.api().is_anthropic());
                    let body = pump::start(self.models.clone(), answer, progress, in_flight);
                    return Ok(Response::from_parts(head, body));
                }
                Err(failed) => failed,
            };
            match &mut failed.response {
                Ok(response) => {
                    let headers = response.headers_mut();
                    report::set_limits(headers, &standing, self.request.api().is_anthropic());
                }
                Err(fault) => fault.stands(standing),
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if failed.again == Again::Parked {
                refused.extend(group);
            }
            // Another group of keys is another quota: to try it is no retry. Each group is such another one once, so this ends.
            let is_free =
                !left.is_zero() && self.models.limits.has_free_group(self.request.model(), &refused);
            counted += u32::from(!(failed.again == Again::Parked && is_free));
            let is_used_up = counted >= most;
            let hint = failed.hint.unwrap_or_default();
            match failed.again {
                Again::Never | Again::NorByTheSdk => return self.give_up(failed, is_used_up),
                _ if is_used_up => return self.give_up(failed, true),
                Again::Parked if is_free || hint < left => {}
                Again::Recovered if hint < left => {}
                // A provider may ask for more than can be added to an instant.
                Again::After(wait) if wait < left => tokio::time::sleep(wait).await,
                _ => return self.give_up(failed, false),
            }
            last = Some(failed);
        }
    }

    /// The provider's own answer, or ours, with a hint that SDKs follow as it is meant.
    fn give_up(&self, failed: Failed, is_used_up: bool) -> Result<Response<Body>, Fault> {
        let mut response = failed.response?;
        if response.status() == StatusCode::TOO_MANY_REQUESTS && failed.again != Again::NorByTheSdk {
            self.models.limits.passed_on();
        }
        let headers = response.headers_mut();
        if let Some(wait) = failed.hint {
            report::set_hint(headers, wait);
        }
        // The SDK's own retries on top of ours would make nine of three.
        if is_used_up || failed.again == Again::NorByTheSdk {
            headers.insert("x-should-retry", http::HeaderValue::from_static("false"));
        }
        Ok(response.map(super::full))
    }

    /// Notes that the call has to wait or is refused, the first time.
    fn note_limited(&self, reason: &str, wait: Option<Duration>) {
        if !self.is_noted.swap(true, Ordering::Relaxed) {
            self.models.note_limited(self.named, reason, wait);
        }
    }

    /// Admits the call, once the provider is not known to be overloaded.
    async fn enter(&self) -> Result<(Admission, Pass), NotEntered> {
        let (breaker, label) = (self.upstream.breaker(), &self.named.label);
        loop {
            while let Some(wait) = breaker.wait(label, Instant::now()) {
                self.note_limited("the provider is overloaded", Some(wait));
                if wait >= self.deadline.saturating_duration_since(Instant::now()) {
                    return Err(NotEntered::Overloaded(Fault::overloaded(wait)));
                }
                tokio::time::sleep(wait).await;
            }
            let admission = self.admit().await.map_err(NotEntered::Limited)?;
            match breaker.enter(label, Instant::now()) {
                Ok(pass) => return Ok((admission, pass)),
                // It was overloaded while this call waited in line: nothing was sent, so nothing is charged.
                Err(_) => drop(admission.cancel().await),
            }
        }
    }

    async fn admit(&self) -> Result<Admission, Fault> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let noting = |refusal: &Refusal| self.note_limited(&refusal.reason, refusal.retry_after);
        let limits = &self.models.limits;
        let admitting = limits.admit_counted(self.request, self.counted, self.caller, Some(left), noting);
        match admitting.await {
            Ok(admission) => {
                let label = self.named.label.clone();
                metrics::histogram!("tollgate_llm_wait_seconds", "model" => label)
                    .record(admission.waited().as_secs_f64());
                Ok(admission)
            }
            Err(refusal) => {
                self.note_limited(&refusal.reason, refusal.retry_after);
                Err(refusal.into())
            }
        }
    }

    /// Sends the call once. What is passed on is an answer that has begun well.
    async fn attempt(
        &self,
        admission: Admission,
        attempt: u32,
        pass: Pass,
        body: Bytes,
        hides_usage: bool,
    ) -> Result<(http::response::Parts, Answer), Failed> {
        let began = Instant::now();
        let sent = Sent {
            call: self,
            attempt,
            began,
            group: admission.group().map(str::to_owned),
            reserved: admission.reserved(),
            is_noted: AtomicBool::new(false),
        };
        let sending = self.upstream.send(self.request.api(), self.headers, admission.group(), body);
        let response = tokio::time::timeout(self.upstream.timeout(), sending).await;
        let response = match response {
            Ok(Ok(response)) => response,
            Ok(Err(SendError::NotSent(why))) => {
                let _ = admission.cancel().await;
                return Err(sent.failed(None, StatusCode::BAD_GATEWAY, &why));
            }
            Ok(Err(SendError::Lost(why))) => return Err(sent.lost(admission, &why).await),
            Err(_) => return Err(sent.timed_out(admission).await),
        };
        let (mut head, incoming) = response.into_parts();
        let hints = Hints::read(&head.headers, SystemTime::now());
        head.headers = passed_back(&head.headers);
        head.version = http::Version::HTTP_11;
        // Such as 101: it would make another protocol of the client's connection.
        if head.status.is_informational() {
            let cause = Cause::new("the upstream did not answer", format!("its status was {}", head.status));
            return Err(sent.lost(admission, &cause).await);
        }
        if !head.status.is_success() {
            return Err(sent.refused(admission, pass, head, incoming, &hints).await);
        }
        let reports = ReportedLeft::all(&hints, self.request.api().is_anthropic());
        warn_untaken(admission.reported(&reports).await);
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
            api: self.request.api(),
            attempt,
            began,
            silence: self.upstream.timeout(),
            http_status: head.status.as_u16(),
        };
        if is_stream {
            // Its length changes where something is hidden.
            if hides_usage {
                head.headers.remove(http::header::CONTENT_LENGTH);
            }
            match first_event(&mut answer).await {
                Begun::Well => {}
                Begun::Error { data, bytes } => {
                    let failure = classify_event(data.as_bytes());
                    head.headers.remove(http::header::CONTENT_LENGTH);
                    let response = Response::from_parts(head, bytes);
                    return Err(sent.not_run(answer.admission, pass, failure, response, &hints).await);
                }
                // Nothing of it has been passed on, so the client can be answered in a shape that it knows.
                Begun::Cut => return Err(sent.cut(answer.admission).await),
                Begun::Silent => return Err(sent.timed_out(answer.admission).await),
            }
        } else {
            match first_bytes(&mut answer, self.request.is_stream()).await {
                Begun::Cut => return Err(sent.cut(answer.admission).await),
                Begun::Silent => return Err(sent.timed_out(answer.admission).await),
                Begun::Well | Begun::Error { .. } => {}
            }
        }
        pass.answered();
        // The end of the answer writes its line.
        sent.is_noted.store(true, Ordering::Relaxed);
        Ok((head, answer))
    }
}

/// An attempt that has been sent. Dropped without its line, because the client has left before its answer began, it writes one that says so;
/// what was reserved for it stays charged.
struct Sent<'a> {
    call: &'a Call<'a>,
    attempt: u32,
    began: Instant,
    group: Option<String>,
    reserved: u64,
    /// Whether the trail has its line.
    is_noted: AtomicBool,
}

impl Sent<'_> {
    fn note_failed(&self, http_status: Option<u16>, reserved: Option<u64>, reason: &str) {
        self.is_noted.store(true, Ordering::Relaxed);
        let line = self.call.named.line("error");
        self.call.models.write(&TrailLine {
            reason: Some(reason.to_owned()),
            attempt: Some(self.attempt),
            http_status,
            reserved,
            group: self.group.clone(),
            seconds: Some(self.began.elapsed().as_secs_f64()),
            ..line
        });
    }

    fn failed(&self, reserved: Option<u64>, status: StatusCode, cause: &Cause) -> Failed {
        counted("tollgate_llm_attempts_total", self.call.named, "failed");
        self.call.upstream.failed(&self.call.named.label, cause);
        self.note_failed(None, reserved, cause.what);
        Failed { response: Err(Fault::upstream(status, cause.what)), again: Again::Never, hint: None }
    }

    /// What became of it is not known: it stays charged as reserved.
    async fn lost(&self, admission: Admission, cause: &Cause) -> Failed {
        let reserved = Some(admission.reserved());
        let _ = admission.settle_estimated(0, false).await;
        self.failed(reserved, StatusCode::BAD_GATEWAY, cause)
    }

    async fn cut(&self, admission: Admission) -> Failed {
        let what = "the upstream broke off before its answer began";
        let cause = Cause::new(what, "its connection ended after the head of the answer");
        self.lost(admission, &cause).await
    }

    async fn timed_out(&self, admission: Admission) -> Failed {
        let reserved = Some(admission.reserved());
        let _ = admission.settle_estimated(0, false).await;
        let silence = format!("nothing came for {:?}", self.call.upstream.timeout());
        let cause = Cause::new("the upstream did not answer in time", silence);
        self.failed(reserved, StatusCode::GATEWAY_TIMEOUT, &cause)
    }

    /// The provider answered that it will not.
    async fn refused(
        &self,
        admission: Admission,
        pass: Pass,
        head: http::response::Parts,
        incoming: Incoming,
        hints: &Hints,
    ) -> Failed {
        let limited = http_body_util::Limited::new(incoming, super::body::MOST_BYTES);
        let gathering = tokio::time::timeout(self.call.upstream.timeout(), limited.collect());
        let body = match gathering.await {
            Ok(Ok(whole)) => whole.to_bytes(),
            _ => Bytes::new(),
        };
        let failure = classify(head.status.as_u16(), &body);
        let mut response = Response::from_parts(head, body);
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        self.not_run(admission, pass, failure, response, hints).await
    }

    /// The provider refused the call, or failed, and said so.
    async fn not_run(
        &self,
        admission: Admission,
        pass: Pass,
        failure: Failure,
        response: Response<Bytes>,
        hints: &Hints,
    ) -> Failed {
        if failure == Failure::Limited {
            let reports = ReportedLeft::all(hints, self.call.request.api().is_anthropic());
            warn_untaken(admission.reported_refusing(&reports).await);
        }
        let (again, hint) = self.follow(failure, &admission, pass, hints);
        self.settle(failure, response.status(), admission).await;
        Failed { response: Ok(response), again, hint }
    }

    /// What follows from a failure: for the group of keys, for the provider, and for this call.
    fn follow(
        &self,
        failure: Failure,
        admission: &Admission,
        pass: Pass,
        hints: &Hints,
    ) -> (Again, Option<Duration>) {
        if failure == Failure::Overloaded {
            pass.overloaded(Instant::now(), hints.retry_after);
            return (Again::Recovered, hints.retry_after);
        }
        pass.answered();
        match failure {
            Failure::Limited => {
                let doubled = NO_HINT.saturating_mul(2_u32.saturating_pow(self.attempt - 1));
                let wait = hints.wait().unwrap_or(doubled);
                let again = match admission.group() {
                    Some(_) => Again::Parked,
                    None => Again::After(wait),
                };
                admission.park(wait, "the provider refused a call for its limits and asked to wait");
                (again, Some(wait))
            }
            // SDKs retry every 429, and nothing but a payment helps.
            Failure::Billing => (Again::NorByTheSdk, None),
            Failure::Failed | Failure::Refused | Failure::Overloaded => (Again::Never, None),
        }
    }

    /// Settles a refused call: as a request without tokens where the refusal proves that it did not run, else as reserved.
    async fn settle(&self, failure: Failure, status: StatusCode, admission: Admission) {
        let proves = failure.proves_unused(status.as_u16());
        let reserved = (!proves).then(|| admission.reserved());
        let settled = match proves {
            true => admission.refused().await,
            false => admission.settle_estimated(0, false).await,
        };
        if let Err(error) = settled {
            tracing::warn!(%error, "a refused call could not be settled");
        }
        counted("tollgate_llm_attempts_total", self.call.named, failure.name());
        self.note_failed(Some(status.as_u16()), reserved, "the provider refused the call");
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if !*self.is_noted.get_mut() {
            counted("tollgate_llm_attempts_total", self.call.named, "left");
            let reason = "the client left before its answer began; charged as reserved";
            self.note_failed(None, Some(self.reserved), reason);
        }
    }
}

fn warn_untaken(taken: Result<(), tollgate::Error>) {
    if let Err(error) = taken {
        tracing::warn!(%error, "what the provider reports of its limits could not be charged");
    }
}
