//! One call: read, admitted, sent, and sent again where that may help.
//!
//! Every attempt is admitted by itself, because providers count attempts. An attempt that the provider refused before it ran is
//! settled as a request without tokens; one whose fate is unknown stays charged as reserved. Nothing is tried again after the first
//! byte of an answer has gone to the client.
//!
//! A 429 parks the quota group whose key was used: the next attempt takes another group at once, or waits in line until the first
//! returns. An overload waits at the breaker. Both are bounded by the caller's deadline and by three attempts, those included that
//! the SDK has made already. What becomes of one attempt is in `call/attempt.rs`.

mod attempt;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tollgate::ChargeId;
use tollgate_llm::count::Counted;
use tollgate_llm::{Admission, Api, Caller, ModelRequest, Refusal, TrailLine};
use tracing::Instrument;

use self::attempt::{Again, Failed, Outgoing};
use super::super::json::Body;
use super::breaker::Pass;
use super::fault::Fault;
use super::pump;
use super::upstream::Upstream;
use super::{InFlight, Models, report};
use crate::serve::timeouts::Progress;

/// How often a call is sent at most, with the SDK's own retries. An attempt that a quota group refuses while another one is free
/// does not count.
const MOST_ATTEMPTS: u32 = 3;

/// How much earlier than its caller the gateway gives up.
const MARGIN: Duration = Duration::from_secs(2);

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
    let (mut head, body) = request.into_parts();
    let caller = models.caller(&setup, &head.headers)?;
    if !setup.clients.is_empty() {
        // A key of the gateway goes no further, whatever the upstream's config says by the time that the call is sent.
        for name in ["authorization", "x-api-key"] {
            head.headers.remove(name);
        }
    }
    let held = models.budget.read(body).await?;
    let request = ModelRequest::read(api, &held.bytes)?;
    setup.upstream(request.model(), api)?;
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
        request: &request,
        counted: models.limits.count(&request).await,
        headers: &head.headers,
        query: head.uri.query(),
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
    request: &'a ModelRequest<'a>,
    counted: Counted,
    headers: &'a HeaderMap,
    /// What stands behind the path, which is the caller's.
    query: Option<&'a str>,
    caller: &'a Caller,
    named: &'a Named,
    deadline: Instant,
    /// How often the SDK has tried before.
    retries: u32,
    /// Whether the trail says that it had to wait or was refused, which is one line for all attempts.
    is_noted: AtomicBool,
}

/// A call that may be sent now, and where.
struct Entered {
    upstream: Arc<Upstream>,
    admission: Admission,
    pass: Pass,
}

/// Why a call is not sent.
enum NotEntered {
    Overloaded(Fault),
    Limited(Fault),
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
            let Entered { upstream, admission, pass } = match (self.enter().await, last.take()) {
                (Ok(entered), _) => entered,
                (Err(NotEntered::Overloaded(_)), Some(failed)) => return self.give_up(failed, false),
                (Err(NotEntered::Overloaded(fault) | NotEntered::Limited(fault)), _) => return Err(fault),
            };
            let standing = admission.standing();
            let group = admission.group().map(str::to_owned);
            refused.extend_from_slice(admission.left_out());
            // In a box, so that calls in line do not hold the room for it.
            let sending = Outgoing { attempt, body: body.clone(), hides_usage };
            let attempting = Box::pin(self.attempt(&upstream, admission, pass, sending));
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
            let may_change = matches!(failed.again, Again::Parked | Again::OtherGroup);
            if may_change {
                refused.extend(group);
            }
            // Another group of keys is another quota: to try it is no retry. Each group is such another one once, so this ends.
            let is_free =
                !left.is_zero() && self.models.limits.has_free_group(self.request.model(), &refused);
            counted += u32::from(!(may_change && is_free));
            let is_used_up = counted >= most;
            let hint = failed.hint.unwrap_or_default();
            match failed.again {
                Again::Never | Again::NorByTheSdk => return self.give_up(failed, is_used_up),
                _ if is_used_up => return self.give_up(failed, true),
                Again::Parked | Again::OtherGroup if is_free => {}
                Again::Parked if hint < left => {}
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

    /// Where the call goes by the config in place.
    fn upstream(&self) -> Result<Arc<Upstream>, NotEntered> {
        let setup = self.models.setup();
        let found = setup.upstream(self.request.model(), self.request.api());
        found.cloned().map_err(NotEntered::Limited)
    }

    /// Admits the call, once the provider is not known to be overloaded.
    async fn enter(&self) -> Result<Entered, NotEntered> {
        let label = &self.named.label;
        loop {
            while let Some(wait) = self.upstream()?.breaker().wait(label, Instant::now()) {
                self.note_limited("the provider is overloaded", Some(wait));
                if wait >= self.deadline.saturating_duration_since(Instant::now()) {
                    return Err(NotEntered::Overloaded(Fault::overloaded(wait)));
                }
                tokio::time::sleep(wait).await;
            }
            let admission = self.admit().await.map_err(NotEntered::Limited)?;
            // The config may have changed while it waited.
            let found = self.upstream();
            if let Ok(upstream) = &found
                && upstream.has_group(admission.group())
                && let Ok(pass) = upstream.breaker().enter(label, Instant::now())
            {
                return Ok(Entered { upstream: upstream.clone(), admission, pass });
            }
            // It was overloaded while this call waited in line, or the keys or the upstream that it was admitted for are gone: nothing was
            // sent, so nothing is charged.
            drop(admission.cancel().await);
            found?;
        }
    }

    async fn admit(&self) -> Result<Admission, Fault> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let noting = |refusal: &Refusal| {
            self.note_limited(&refusal.reason, refusal.retry_after);
        };
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
                noting(&refusal);
                Err(refusal.into())
            }
        }
    }
}
