//! One attempt of a call: it is sent once, its answer is kept back until it is known to be one, and what becomes of it is settled and noted.
//!
//! An attempt that fails says what may follow ([`Again`]); `call.rs` decides whether it does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tollgate_llm::provider::{Failure, Hints, classify, classify_event};
use tollgate_llm::{Admission, EventReader, ReportedLeft, TrailLine};

use super::super::begin::{Begun, first_bytes, first_event};
use super::super::body::MOST_BYTES;
use super::super::breaker::Pass;
use super::super::fault::Fault;
use super::super::pump::Answer;
use super::super::upstream::{Cause, SendError, Upstream, passed_back};
use super::{Call, counted};

/// How long a group is parked after a 429 that does not say for how long, and how long a call waits whose upstream cannot be reached. Each
/// attempt that follows doubles it.
const NO_HINT: Duration = Duration::from_millis(500);

/// What is sent in one attempt.
pub(super) struct Outgoing {
    pub(super) attempt: u32,
    pub(super) body: Bytes,
    pub(super) hides_usage: bool,
}

/// An attempt that failed before anything of it was passed on.
pub(super) struct Failed {
    /// The client's answer if nothing else is tried.
    pub(super) response: Result<Response<Bytes>, Fault>,
    pub(super) again: Again,
    /// How long the provider asks to wait.
    pub(super) hint: Option<Duration>,
}

/// Whether an attempt is followed by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It would fail again, or may have run.
    Never,
    /// It would fail again, though the SDK does not know.
    NorByTheSdk,
    /// When the quota group is no longer parked, or with another one.
    Parked,
    /// With another quota group alone: the provider asks for no other attempt with this one.
    OtherGroup,
    /// When this time is over.
    After(Duration),
    /// When the provider is no longer overloaded.
    Recovered,
}

impl Call<'_> {
    /// Sends the call once. What is passed on is an answer that has begun well.
    pub(super) async fn attempt(
        &self,
        upstream: &Upstream,
        admission: Admission,
        pass: Pass,
        Outgoing { attempt, body, hides_usage }: Outgoing,
    ) -> Result<(http::response::Parts, Answer), Failed> {
        let began = Instant::now();
        let sent = Sent {
            call: self,
            upstream,
            attempt,
            began,
            group: admission.group().map(str::to_owned),
            reserved: admission.reserved(),
            is_noted: AtomicBool::new(false),
        };
        let sending = upstream.send(self.request.api(), self.query, self.headers, admission.group(), body);
        let response = tokio::time::timeout(upstream.timeout(), sending).await;
        let response = match response {
            Ok(Ok(response)) => response,
            Ok(Err(SendError::NotSent(why))) => {
                let _ = admission.cancel().await;
                // Nothing was sent, so another attempt repeats nothing.
                let again = Again::After(doubled(attempt));
                return Err(Failed { again, ..sent.failed(None, StatusCode::BAD_GATEWAY, &why) });
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
        // Nothing can be read in one that is compressed against our wish, so it is passed on as it comes.
        let is_stream = is_stream && !is_encoded(&head.headers);
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
            silence: upstream.timeout(),
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
    upstream: &'a Upstream,
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
        self.upstream.failed(&self.call.named.label, cause);
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
        let silence = format!("nothing came for {:?}", self.upstream.timeout());
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
        let limited = http_body_util::Limited::new(incoming, MOST_BYTES);
        let gathering = tokio::time::timeout(self.upstream.timeout(), limited.collect());
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
        let is_final = hints.should_retry == Some(false);
        if failure == Failure::Overloaded {
            pass.overloaded(Instant::now(), hints.retry_after);
            return (if is_final { Again::Never } else { Again::Recovered }, hints.retry_after);
        }
        pass.answered();
        match failure {
            Failure::Limited => {
                let wait = hints.wait().unwrap_or_else(|| doubled(self.attempt));
                let again = match admission.group() {
                    Some(_) if is_final => Again::OtherGroup,
                    Some(_) => Again::Parked,
                    None if is_final => Again::Never,
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

/// The wait after an attempt to which nobody has said how long it is.
fn doubled(attempt: u32) -> Duration {
    NO_HINT.saturating_mul(2_u32.saturating_pow(attempt - 1))
}

/// Whether an answer is compressed, though it was asked for as it is.
fn is_encoded(headers: &HeaderMap) -> bool {
    let is_plain = |coding: &http::HeaderValue| {
        let coding = coding.as_bytes().trim_ascii();
        coding.is_empty() || coding.eq_ignore_ascii_case(b"identity")
    };
    !headers.get_all(CONTENT_ENCODING).iter().all(is_plain)
}

fn warn_untaken(taken: Result<(), tollgate::Error>) {
    if let Err(error) = taken {
        tracing::warn!(%error, "what the provider reports of its limits could not be charged");
    }
}
