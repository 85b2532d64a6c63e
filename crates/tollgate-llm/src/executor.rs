//! The executor: calls go in, each caller gets its own answer or its own error.
//!
//! A call waits for a place in the executor, is admitted by [`ModelLimits`], sent through a [`Transport`], settled with what the answer
//! reports, and sent again where [`RetryPolicy`] says that it may help. Each attempt is admitted and charged by itself, because
//! providers count attempts. A place is taken before a call is admitted, so that it is sent as soon as it is charged. A full line and a store
//! that does not answer are waited out.
//!
//! A batch is either admitted as capacity allows, or as a whole ([`Admit::AllOrNothing`]): then one reservation is made for all of it.
//! A call that is wrong fails alone. What is cancelled and was not sent costs nothing; what was sent is settled with its true usage, even if
//! nobody waits for it any more.
//!
//! `call.rs` has what goes in and what comes out, `run.rs` what becomes of a call in between, `retry.rs` when it is sent again, `route.rs` the
//! way back to its caller.

mod call;
mod retry;
mod route;
mod run;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

pub use self::call::{
    BatchReport, CallError, CallErrorKind, CallResult, Completed, ModelCall, Outgoing, Reply, SendError,
    Transport,
};
pub use self::retry::RetryPolicy;
pub use self::route::{Batch, Pending};
use self::run::Inner;
use crate::limits::{Caller, Check, ModelLimits};
use crate::request::ModelRequest;

/// How many calls are on their way at once, by default.
const IN_FLIGHT: usize = 256;

/// How long a call waits for its limits by default: batches have time.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3_600);

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
        checked.map_err(|refusal| CallError::not_admitted(refusal, 0))
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
