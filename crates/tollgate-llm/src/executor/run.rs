//! The life of a call: a slot, the limits, an attempt, its settlement, and perhaps another attempt.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tollgate::store::Micros;

use super::call::{
    CallError, CallErrorKind, CallResult, Completed, ModelCall, Outgoing, Reply, SendError, Transport,
};
use super::retry::RetryPolicy;
use super::route::{Cancelled, Route};
use crate::count::Counted;
use crate::limits::{Admission, Caller, ModelLimits, Refusal, RefusalKind, ReportedLeft};
use crate::provider::{self, Failure, Hints};
use crate::request::{Api, Body, ModelRequest};
use crate::stream::EventReader;
use crate::usage::{Usage, of_answer};

/// The pauses between attempts when the limits could not decide.
const ASKING: RetryPolicy = RetryPolicy {
    first: Duration::from_millis(500),
    longest: Duration::from_secs(10),
    ..RetryPolicy::never()
};

/// The state that all clones of an executor share.
pub(super) struct Inner<T> {
    pub(super) limits: ModelLimits,
    pub(super) transport: T,
    pub(super) retry: RetryPolicy,
    pub(super) caller: Caller,
    pub(super) max_wait: Duration,
    pub(super) in_flight: usize,
    pub(super) places: Arc<Semaphore>,
}

/// A call that may be sent, and its place.
pub(super) struct Admitted {
    admission: Admission,
    place: OwnedSemaphorePermit,
}

impl<T: Transport> Inner<T> {
    /// Executes a call and routes its result.
    pub(super) async fn execute(
        self: Arc<Self>,
        call: ModelCall,
        admitted: Option<Admitted>,
        route: Route,
        cancelled: Cancelled,
    ) {
        let result = self.run(&call, admitted, cancelled).await;
        route.answer(result);
    }

    /// Admits a batch as a whole, and executes its calls.
    pub(super) async fn execute_whole(
        self: Arc<Self>,
        calls: Vec<ModelCall>,
        routes: Vec<Route>,
        mut cancelled: Cancelled,
    ) {
        // A call that cannot be read fails alone, before anything is reserved.
        let mut sound = Vec::new();
        for (call, route) in calls.into_iter().zip(routes) {
            match ModelRequest::read(call.api, &call.body) {
                Ok(_) => sound.push((call, route)),
                Err(error) => route.answer(Err(CallError::new(CallErrorKind::Invalid, error.to_string(), 0))),
            }
        }
        let admitted = tokio::select! {
            biased;
            () = is_cancelled(&mut cancelled) => Err(CallError::cancelled()),
            admitted = self.admit_whole(&sound) => admitted,
        };
        match admitted {
            Ok(admitted) => {
                for ((call, route), admitted) in sound.into_iter().zip(admitted) {
                    tokio::spawn(self.clone().execute(call, Some(admitted), route, cancelled.clone()));
                }
            }
            Err(error) => sound.into_iter().for_each(|(_, route)| route.answer(Err(error.clone()))),
        }
    }

    async fn admit_whole(&self, calls: &[(ModelCall, Route)]) -> Result<Vec<Admitted>, CallError> {
        let most = self.in_flight;
        let too_many = || {
            let reason = format!(
                "a batch that is admitted as a whole is sent at once: it has {} calls, and at most {most} are in flight",
                calls.len()
            );
            CallError::new(CallErrorKind::NotAdmitted(RefusalKind::Never), reason, 0)
        };
        let count = u32::try_from(calls.len()).ok().filter(|_| calls.len() <= most).ok_or_else(too_many)?;
        let mut places =
            self.places.clone().acquire_many_owned(count).await.map_err(|_| CallError::cancelled())?;
        let mut requests = Vec::with_capacity(calls.len());
        for (call, _) in calls {
            let read = ModelRequest::read(call.api, &call.body);
            requests
                .push(read.map_err(|error| CallError::new(CallErrorKind::Invalid, error.to_string(), 0))?);
        }
        let ask = |within| self.limits.admit_batch(&requests, &self.caller, Some(within));
        let admissions =
            self.until_decided(ask).await.map_err(|refusal| CallError::not_admitted(refusal, 0))?;
        // Each call has its own slot, which it gives up between two attempts.
        let admitted = |admission| Some(Admitted { admission, place: places.split(1)? });
        Ok(admissions.into_iter().map_while(admitted).collect())
    }

    /// Waits for a place, and for the limits.
    async fn admit(
        &self,
        request: &ModelRequest<'_>,
        counted: &mut Option<Counted>,
        attempt: u32,
    ) -> Result<Admitted, CallError> {
        let place = self.places.clone().acquire_owned().await.map_err(|_| CallError::cancelled())?;
        let counted = match counted {
            Some(counted) => *counted,
            None => *counted.insert(self.limits.count(request).await),
        };
        let ask = |within| self.limits.admit_counted(request, counted, &self.caller, Some(within), |_| ());
        let admission = self.until_decided(ask).await;
        let admission = admission.map_err(|refusal| CallError::not_admitted(refusal, attempt - 1))?;
        Ok(Admitted { admission, place })
    }

    /// Calls the limits until they decide, for as long as a call may wait: a full queue and a store that does not answer say
    /// nothing about the call.
    async fn until_decided<A, F: Future<Output = Result<A, Refusal>>>(
        &self,
        ask: impl Fn(Duration) -> F,
    ) -> Result<A, Refusal> {
        let clock = self.limits.clock();
        let deadline = clock.now().saturating_add(Micros::from(self.max_wait));
        let mut asked = 0_u32;
        loop {
            let left = deadline.saturating_sub(clock.now());
            let refusal = match ask(left.into()).await {
                Ok(admitted) => return Ok(admitted),
                Err(refusal) => refusal,
            };
            asked = asked.saturating_add(1);
            let passes = matches!(refusal.kind, RefusalKind::LineFull | RefusalKind::Undecided);
            let until = clock.now().saturating_add(Micros::from(ASKING.back_off(asked, random())));
            if !passes || until >= deadline {
                return Err(refusal);
            }
            clock.alarm(until).await;
        }
    }

    async fn run(
        &self,
        call: &ModelCall,
        mut admitted: Option<Admitted>,
        mut cancelled: Cancelled,
    ) -> CallResult {
        let request = ModelRequest::read(call.api, &call.body)
            .map_err(|error| CallError::new(CallErrorKind::Invalid, error.to_string(), 0))?;
        let stopped =
            |attempts: u32, limited: u32| Err(CallError { attempts, limited, ..CallError::cancelled() });
        let clock = self.limits.clock();
        let deadline = clock.now().saturating_add(Micros::from(self.max_wait));
        let mut counted = None;
        let (mut attempt, mut limited) = (1, 0);
        let (mut failures, mut refusals) = (0, 0);
        // The groups of keys that the provider asked to leave alone, since this call waited last.
        let mut refused: Vec<String> = Vec::new();
        loop {
            let Admitted { admission, place } = match admitted.take() {
                Some(admitted) => admitted,
                None => tokio::select! {
                    biased;
                    () = is_cancelled(&mut cancelled) => return stopped(attempt - 1, limited),
                    admitted = self.admit(&request, &mut counted, attempt) =>
                        admitted.map_err(|error| CallError { limited, ..error })?,
                },
            };
            if cancelled.has_changed().is_err() || *cancelled.borrow() {
                warn_unsettled(admission.cancel().await);
                return stopped(attempt - 1, limited);
            }
            let group = admission.group().map(str::to_owned);
            refused.extend_from_slice(admission.left_out());
            let (mut error, failure, hints) = match self.attempt(&request, call, admission, attempt).await {
                Ok(completed) => return Ok(Completed { limited, ..completed }),
                Err(failed) => failed,
            };
            limited += u32::from(failure == Failure::Limited);
            error.limited = limited;
            // Others may use the place while this call waits to be sent again.
            drop(place);
            // A provider that says when to come back has not failed. It is asked less and less often all the same, and not for ever.
            let is_put_off = failure == Failure::Limited && hints.wait().is_some();
            refused.extend(group.filter(|_| is_put_off));
            // Another group of keys is another quota, whatever this one was asked to wait for. Each is tried once before the call waits.
            let is_free = is_put_off && self.retry.attempts > 1;
            if is_free && self.limits.has_free_group(request.model(), &refused) {
                attempt += 1;
                continue;
            }
            refused.clear();
            (failures, refusals) = if is_put_off { (failures, refusals + 1) } else { (failures + 1, 0) };
            let wait = self.retry.wait(failures.max(1), failure, &hints, random());
            let Some(mut wait) = wait else { return Err(self.passed_on(error)) };
            if is_put_off {
                wait = wait.max(self.retry.back_off(refusals, random()));
            }
            let until = clock.now().saturating_add(Micros::from(wait));
            if is_put_off && until > deadline {
                return Err(self.passed_on(error));
            }
            tokio::select! {
                biased;
                () = is_cancelled(&mut cancelled) => return stopped(attempt, limited),
                () = clock.alarm(until) => {}
            }
            attempt += 1;
        }
    }

    /// An error that goes to the caller, noted where it is a refusal for the provider's limits.
    fn passed_on(&self, error: CallError) -> CallError {
        if error.kind == CallErrorKind::Provider(Failure::Limited) {
            self.limits.passed_on();
        }
        error
    }

    /// Sends a call once, and settles it.
    async fn attempt(
        &self,
        request: &ModelRequest<'_>,
        call: &ModelCall,
        admission: Admission,
        attempt: u32,
    ) -> Result<Completed, (CallError, Failure, Hints)> {
        let body = match request.body() {
            Body::AsSent => call.body.clone(),
            Body::AskingForUsage(body) => body,
        };
        let group = admission.group().map(str::to_owned);
        let outgoing =
            Outgoing { api: call.api, model: request.model(), group: group.as_deref(), body, attempt };
        let unreachable = |reason: String| {
            let error = CallError::new(CallErrorKind::Unreachable, reason, attempt);
            (error, Failure::Failed, Hints::default())
        };
        let reply = match self.transport.send(outgoing).await {
            Ok(reply) => reply,
            Err(SendError::NotSent(why)) => {
                let _ = admission.cancel().await;
                return Err(unreachable(why));
            }
            Err(SendError::Lost(why)) => {
                let _ = admission.settle_estimated(0, false).await;
                return Err(unreachable(why));
            }
        };
        if !(200..300).contains(&reply.status) {
            let failure = provider::classify(reply.status, &reply.body);
            let hints = Hints::read(&reply.headers, SystemTime::now());
            if failure == Failure::Limited {
                let reports = ReportedLeft::all(&hints, call.api.is_anthropic());
                warn_untaken(admission.reported_refusing(&reports).await);
                if let Some(wait) = hints.wait() {
                    admission.park(wait, "the provider refused a call for its limits and asked to wait");
                }
            }
            let settled = match failure.proves_unused(reply.status) {
                true => admission.refused().await,
                false => admission.settle_estimated(0, false).await,
            };
            warn_unsettled(settled);
            let reason = format!("the provider answered {} ({})", reply.status, failure.name());
            let error = CallError {
                reply: Some(Box::new(reply)),
                ..CallError::new(CallErrorKind::Provider(failure), reason, attempt)
            };
            return Err((error, failure, hints));
        }
        let hints = Hints::read(&reply.headers, SystemTime::now());
        let reports = ReportedLeft::all(&hints, call.api.is_anthropic());
        warn_untaken(admission.reported(&reports).await);
        let (usage, is_estimated) = settle(admission, call.api, &reply).await;
        Ok(Completed { reply, usage, is_estimated, attempts: attempt, limited: 0 })
    }
}

/// Settles an answered call, and says with what.
async fn settle(admission: Admission, api: Api, reply: &Reply) -> (Usage, bool) {
    let is_stream = reply.headers.get(http::header::CONTENT_TYPE);
    let is_stream = is_stream.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let (usage, is_estimated) = if is_stream {
        let mut reader = EventReader::new(admission.encoding());
        reader.feed(&reply.body);
        let _ = reader.rest();
        let streamed = reader.streamed();
        match streamed.reported() {
            Some(usage) => (Some(usage), false),
            // More may have come than was counted, so nothing is proven unused.
            None if streamed.has_unread() => (None, true),
            None => (Some(admission.estimate(streamed.output())), true),
        }
    } else {
        match of_answer(api, &reply.body, admission.encoding()) {
            Some((usage, false)) => (Some(usage), false),
            Some((usage, true)) => (Some(admission.estimate(usage.output)), true),
            None => (None, true),
        }
    };
    let as_reserved = Usage {
        input: admission.estimated_input(),
        cached: 0,
        output: admission.reserved().saturating_sub(admission.estimated_input()),
    };
    let shown = usage.map_or(as_reserved, |usage| admission.completed(usage));
    let settled = match usage {
        Some(usage) if !is_estimated => admission.settle(usage).await,
        Some(usage) => admission.settle_estimated(usage.output, true).await,
        None => admission.settle_estimated(0, false).await,
    };
    warn_unsettled(settled);
    (shown, is_estimated)
}

fn warn_untaken(taken: Result<(), tollgate::Error>) {
    if let Err(error) = taken {
        tracing::warn!(%error, "what the provider reports of its limits could not be charged");
    }
}

fn warn_unsettled(settled: Result<(), tollgate::Error>) {
    if let Err(error) = settled {
        tracing::warn!(%error, "a call could not be settled and stays charged as reserved");
    }
}

/// Ready once it is cancelled, or once nobody can take the result any more.
async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) {
    let _ = cancelled.wait_for(|is_cancelled| *is_cancelled).await;
}

fn random() -> u64 {
    getrandom::u64().unwrap_or_default()
}
