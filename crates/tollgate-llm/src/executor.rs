//! The executor: calls go in, each caller gets its own answer or its own error.
//!
//! A call waits for a place in the executor, is admitted by [`ModelLimits`], sent through a [`Transport`], settled with what the answer
//! reports, and sent again where [`RetryPolicy`] says that it may help (`retry.rs`). Each attempt is admitted and charged by itself, because
//! providers count attempts. A place is taken before a call is admitted, so that it is sent as soon as it is charged. A full line and a store
//! that does not answer are waited out.
//!
//! A batch is either admitted as capacity allows, or as a whole ([`Admit::AllOrNothing`]): then one reservation is made for all of it.
//! A call that is wrong fails alone. What is cancelled and was not sent costs nothing; what was sent is settled with its true usage, even if
//! nobody waits for it any more.

mod retry;
mod route;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tollgate::store::Micros;

pub use self::retry::RetryPolicy;
pub use self::route::{Batch, Pending};
use self::route::{Cancelled, Route};
use crate::count::Counted;
use crate::limits::{Admission, Caller, Check, ModelLimits, Refusal, RefusalKind, ReportedLeft};
use crate::provider::{self, Failure, Hints};
use crate::request::{Api, Body, ModelRequest};
use crate::stream::EventReader;
use crate::usage::{Usage, of_answer};

/// How many calls are on their way at once, by default.
const IN_FLIGHT: usize = 256;

/// After how long limits that could not decide are asked again.
const ASKING: RetryPolicy = RetryPolicy {
    first: Duration::from_millis(500),
    longest: Duration::from_secs(10),
    ..RetryPolicy::never()
};

/// How long a call waits for its limits by default: batches have time.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3_600);

/// A call to be executed.
#[derive(Clone, Debug)]
pub struct ModelCall {
    /// The route.
    pub api: Api,
    /// The request, as the provider's API has it.
    pub body: Vec<u8>,
}

/// What is sent in one attempt.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The route.
    pub api: Api,
    /// The model that is asked.
    pub model: &'a str,
    /// The quota group whose keys are charged, if any is.
    pub group: Option<&'a str>,
    /// The request.
    pub body: Vec<u8>,
    /// Which attempt it is, from 1.
    pub attempt: u32,
}

/// An answer of a provider.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The header fields.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Vec<u8>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendError {
    /// Nothing was sent, so the call costs nothing.
    NotSent(String),
    /// The call was sent, and what became of it is not known. It stays charged as reserved.
    Lost(String),
}

/// Sends a call to its provider and waits for the whole answer. It must not send anything twice: whether a call is sent again is decided
/// by the executor, which charges every attempt.
pub trait Transport: Send + Sync + 'static {
    /// Sends a call once.
    fn send(&self, outgoing: Outgoing<'_>) -> impl Future<Output = Result<Reply, SendError>> + Send;
}

/// A call that was answered.
#[derive(Clone, Debug)]
pub struct Completed {
    /// The answer.
    pub reply: Reply,
    /// What the call has used.
    pub usage: Usage,
    /// Whether the usage is an estimate, because the provider reported none.
    pub is_estimated: bool,
    /// How often it was sent.
    pub attempts: u32,
    /// How often the provider refused it for its limits before.
    pub limited: u32,
}

/// A call that has no answer.
#[derive(Clone, Debug)]
pub struct CallError {
    /// Why, for programs.
    pub kind: CallErrorKind,
    /// Why, for people.
    pub reason: String,
    /// How often it was sent.
    pub attempts: u32,
    /// How often the provider refused it for its limits.
    pub limited: u32,
    /// The refusal of the provider, if it was one.
    pub reply: Option<Box<Reply>>,
}

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallErrorKind {
    /// The request cannot be read.
    Invalid,
    /// The limits did not admit it.
    NotAdmitted(RefusalKind),
    /// The provider refused it or failed, at the last attempt.
    Provider(Failure),
    /// The provider could not be reached, or did not answer.
    Unreachable,
    /// It was cancelled before it was sent, or before it was sent again.
    Cancelled,
}

impl CallError {
    fn new(kind: CallErrorKind, reason: impl Into<String>, attempts: u32) -> CallError {
        CallError { kind, reason: reason.into(), attempts, limited: 0, reply: None }
    }
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for CallError {}

/// What each call of a batch or a caller gets.
pub type CallResult = Result<Completed, CallError>;

/// What became of the calls of a batch, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchReport {
    /// Calls that were answered.
    pub answered: usize,
    /// Calls that were not, for whichever reason but a cancellation.
    pub failed: usize,
    /// Of those, calls that the limits did not admit, so that they were never sent or not sent again.
    pub not_admitted: usize,
    /// Calls that were cancelled.
    pub cancelled: usize,
    /// Calls that were sent more than once.
    pub retried: usize,
    /// How often calls were sent, all together.
    pub attempts: u64,
    /// How often the provider refused one for its limits.
    pub limited: u64,
    /// The tokens of those that were answered.
    pub tokens: u64,
}

impl BatchReport {
    /// Of these results.
    ///
    /// ```
    /// use tollgate_llm::executor::BatchReport;
    /// assert_eq!(BatchReport::of(&[]).answered, 0);
    /// ```
    pub fn of(results: &[CallResult]) -> BatchReport {
        let mut report = BatchReport::default();
        for result in results {
            let (attempts, limited) = match result {
                Ok(completed) => {
                    report.answered += 1;
                    report.tokens = report.tokens.saturating_add(completed.usage.total());
                    (completed.attempts, completed.limited)
                }
                Err(error) => {
                    match error.kind {
                        CallErrorKind::Cancelled => report.cancelled += 1,
                        CallErrorKind::NotAdmitted(_) => {
                            (report.failed, report.not_admitted) =
                                (report.failed + 1, report.not_admitted + 1);
                        }
                        _ => report.failed += 1,
                    }
                    (error.attempts, error.limited)
                }
            };
            report.retried += usize::from(attempts > 1);
            report.attempts += u64::from(attempts);
            report.limited += u64::from(limited);
        }
        report
    }
}

/// How a batch is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admit {
    /// Each call as soon as there is room for it.
    #[default]
    AsCapacityAllows,
    /// No call before there is room for all of them.
    AllOrNothing,
}

/// Executes calls within their limits. Cheap to clone; clones share their places.
///
/// ```
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use tollgate::Tollgate;
/// use tollgate::config::Config;
/// use tollgate_llm::executor::{Admit, Executor, ModelCall, Outgoing, Reply, SendError, Transport};
/// use tollgate_llm::{Api, LlmSection, ModelLimits};
///
/// /// Sends calls with whichever HTTP client the program has.
/// struct Echo;
/// impl Transport for Echo {
///     async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
///         let body = br#"{"usage":{"prompt_tokens":9,"completion_tokens":3}}"#.to_vec();
///         Ok(Reply { status: 200, body, ..Reply::default() })
///     }
/// }
///
/// let text = "[llm.upstreams.openai]\nkind = 'openai'\nbase_url = 'https://api.openai.com/v1'\n\
///             [llm.models.gpt-4o]\nrpm = 500\ntpm = 30_000\n";
/// let mut llm = LlmSection::default();
/// let config = Config::parse_with(text, [], &mut [&mut llm])?;
/// let limits = ModelLimits::new(Tollgate::open(&config).await?, llm.config.unwrap_or_default());
/// let executor = Executor::new(limits, Echo);
/// let call = |text: &str| ModelCall {
///     api: Api::ChatCompletions,
///     body: format!(r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"{text}"}}]}}"#).into(),
/// };
/// let results = executor.submit_batch(vec![call("one"), call("two")], Admit::AsCapacityAllows).all().await;
/// assert_eq!(results[0].as_ref().unwrap().usage.output, 3);
/// # Ok(())
/// # }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(run()).unwrap();
/// ```
pub struct Executor<T> {
    inner: Arc<Inner<T>>,
}

struct Inner<T> {
    limits: ModelLimits,
    transport: T,
    retry: RetryPolicy,
    caller: Caller,
    max_wait: Duration,
    in_flight: usize,
    places: Arc<Semaphore>,
}

impl<T> Clone for Executor<T> {
    fn clone(&self) -> Self {
        Executor { inner: self.inner.clone() }
    }
}

impl<T> std::fmt::Debug for Executor<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("in_flight", &self.inner.in_flight).finish_non_exhaustive()
    }
}

/// Builds an [`Executor`].
#[derive(Debug)]
pub struct ExecutorBuilder {
    retry: RetryPolicy,
    caller: Caller,
    max_wait: Duration,
    in_flight: usize,
}

impl Default for ExecutorBuilder {
    fn default() -> ExecutorBuilder {
        ExecutorBuilder {
            retry: RetryPolicy::default(),
            caller: Caller::default(),
            max_wait: MAX_WAIT,
            in_flight: IN_FLIGHT,
        }
    }
}

impl ExecutorBuilder {
    /// When and how often a call is sent again.
    #[must_use]
    pub fn retry(mut self, retry: RetryPolicy) -> ExecutorBuilder {
        self.retry = retry;
        self
    }

    /// Whose weight, priority and limits the calls have.
    #[must_use]
    pub fn caller(mut self, caller: Caller) -> ExecutorBuilder {
        self.caller = caller;
        self
    }

    /// How long a call waits for its limits at most; a day by default.
    #[must_use]
    pub fn max_wait(mut self, max_wait: Duration) -> ExecutorBuilder {
        self.max_wait = max_wait;
        self
    }

    /// How many calls stand in line or are on their way at once; 256 by default.
    #[must_use]
    pub fn in_flight(mut self, in_flight: usize) -> ExecutorBuilder {
        self.in_flight = in_flight.clamp(1, Semaphore::MAX_PERMITS);
        self
    }

    /// The executor.
    pub fn build<T: Transport>(self, limits: ModelLimits, transport: T) -> Executor<T> {
        let ExecutorBuilder { retry, caller, max_wait, in_flight } = self;
        let places = Arc::new(Semaphore::new(in_flight));
        Executor { inner: Arc::new(Inner { limits, transport, retry, caller, max_wait, in_flight, places }) }
    }
}

impl<T: Transport> Executor<T> {
    /// An executor with the defaults of [`ExecutorBuilder`].
    pub fn new(limits: ModelLimits, transport: T) -> Executor<T> {
        ExecutorBuilder::default().build(limits, transport)
    }

    /// Whether all of these calls could proceed now, why not and how long until they can. Charges nothing.
    pub async fn check(&self, calls: &[ModelCall]) -> Result<Check, CallError> {
        let requests = read_all(calls)?;
        let checked = self.inner.limits.check_batch(&requests, &self.inner.caller).await;
        checked.map_err(|refusal| not_admitted(refusal, 0))
    }

    /// Executes one call. Its caller may leave: a call that was not sent by then is cancelled.
    pub fn submit(&self, call: ModelCall) -> Pending {
        let (pending, route, cancelled) = Pending::new();
        tokio::spawn(self.inner.clone().execute(call, None, route, cancelled));
        pending
    }

    /// Executes a batch.
    pub fn submit_batch(&self, calls: Vec<ModelCall>, admit: Admit) -> Batch {
        let (batch, routes, cancelled) = Batch::new(calls.len());
        match admit {
            Admit::AsCapacityAllows => {
                for (call, route) in calls.into_iter().zip(routes) {
                    tokio::spawn(self.inner.clone().execute(call, None, route, cancelled.clone()));
                }
            }
            Admit::AllOrNothing => {
                tokio::spawn(self.inner.clone().execute_whole(calls, routes, cancelled));
            }
        }
        batch
    }
}

/// Reads all calls, or says which one is wrong.
fn read_all(calls: &[ModelCall]) -> Result<Vec<ModelRequest<'_>>, CallError> {
    let mut requests = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        requests.push(
            ModelRequest::read(call.api, &call.body).map_err(|error| {
                CallError::new(CallErrorKind::Invalid, format!("call {index}: {error}"), 0)
            })?,
        );
    }
    Ok(requests)
}

fn cancelled_error() -> CallError {
    CallError::new(CallErrorKind::Cancelled, "the call was cancelled", 0)
}

fn not_admitted(refusal: Refusal, attempts: u32) -> CallError {
    CallError::new(CallErrorKind::NotAdmitted(refusal.kind), refusal.reason, attempts)
}

/// A call that may be sent, and its place.
struct Admitted {
    admission: Admission,
    place: OwnedSemaphorePermit,
}

impl<T: Transport> Inner<T> {
    /// Executes a call and routes its result.
    async fn execute(
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
    async fn execute_whole(
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
            () = is_cancelled(&mut cancelled) => Err(cancelled_error()),
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
            self.places.clone().acquire_many_owned(count).await.map_err(|_| cancelled_error())?;
        let mut requests = Vec::with_capacity(calls.len());
        for (call, _) in calls {
            let read = ModelRequest::read(call.api, &call.body);
            requests
                .push(read.map_err(|error| CallError::new(CallErrorKind::Invalid, error.to_string(), 0))?);
        }
        let ask = |within| self.limits.admit_batch(&requests, &self.caller, Some(within));
        let admissions = self.until_decided(ask).await.map_err(|refusal| not_admitted(refusal, 0))?;
        // Each call has a place of its own, which it gives up between two attempts.
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
        let place = self.places.clone().acquire_owned().await.map_err(|_| cancelled_error())?;
        let counted = match counted {
            Some(counted) => *counted,
            None => *counted.insert(self.limits.count(request).await),
        };
        let ask = |within| self.limits.admit_counted(request, counted, &self.caller, Some(within), |_| ());
        let admission = self.until_decided(ask).await;
        let admission = admission.map_err(|refusal| not_admitted(refusal, attempt - 1))?;
        Ok(Admitted { admission, place })
    }

    /// Asks the limits until they decide, for as long as a call may wait: a full line and a store that does not answer say nothing about
    /// the call.
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
        let stopped = |attempts: u32, limited: u32| Err(CallError { attempts, limited, ..cancelled_error() });
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
            let Some(mut wait) = wait else { return Err(error) };
            if is_put_off {
                wait = wait.max(self.retry.back_off(refusals, random()));
            }
            let until = clock.now().saturating_add(Micros::from(wait));
            if is_put_off && until > deadline {
                return Err(error);
            }
            tokio::select! {
                biased;
                () = is_cancelled(&mut cancelled) => return stopped(attempt, limited),
                () = clock.alarm(until) => {}
            }
            attempt += 1;
        }
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
    let settled = match usage {
        Some(usage) if !is_estimated => admission.settle(usage).await,
        Some(usage) => admission.settle_estimated(usage.output, true).await,
        None => admission.settle_estimated(0, false).await,
    };
    warn_unsettled(settled);
    (usage.unwrap_or(as_reserved), is_estimated)
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

/// Ready once it is cancelled, or once nobody is left who could take the result.
async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) {
    let _ = cancelled.wait_for(|is_cancelled| *is_cancelled).await;
}

fn random() -> u64 {
    getrandom::u64().unwrap_or_default()
}
