//! The tower layer: asks the gate, and then runs the handler or answers for it.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use apalis::prelude::{BoxDynError, ExecutionContext, Status, Task};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower_layer::Layer;
use tower_service::Service;

use super::ahead::read_ahead;
use super::response::{GateResponse, Gated};
use crate::gate::JobGate;
use crate::gate::decision::{Delay, JobDecision, RATE_LIMIT_EXCEEDED};
use crate::job::Job;
use crate::plan::{Plan, shown};

/// How long a job waits whose type or cost cannot be found out, because that code panics.
const PANICKED_WAIT: Duration = Duration::from_secs(60);

/// Arguments of jobs that say which type of job they are.
pub trait JobArgs: Serialize {
    /// The type, as policies name it: `send_email`.
    fn job_type(&self) -> Cow<'_, str>;
}

/// What a handler returns as its error, or as a cause of it, when the remote side asked to be left alone (a 429): the key of its type is closed for
/// all workers, and the job goes back without using up an attempt. Where its type has no policy, that job waits alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimited {
    /// How long.
    pub retry_after: Duration,
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the remote side asked to be left alone for {:?}", self.retry_after)
    }
}

impl std::error::Error for RateLimited {}

/// Puts a [`JobGate`] before a handler. To be the first layer of a worker: metrics, retries and timeouts that are added after it then
/// see runs alone.
#[derive(Clone, Debug)]
pub struct GateLayer {
    gate: JobGate,
}

impl GateLayer {
    /// The layer of a gate that was [prepared](super::prepare).
    pub fn new(gate: &JobGate) -> GateLayer {
        GateLayer { gate: gate.clone() }
    }
}

impl<S> Layer<S> for GateLayer {
    type Service = GateService<S>;

    fn layer(&self, inner: S) -> GateService<S> {
        GateService { gate: self.gate.clone(), inner }
    }
}

/// A handler behind a gate.
#[derive(Clone, Debug)]
pub struct GateService<S> {
    gate: JobGate,
    inner: S,
}

impl<S, Args> Service<Task<Args>> for GateService<S>
where
    Args: JobArgs + DeserializeOwned + Send + 'static,
    S: Service<Task<Args>> + Clone + Send + 'static,
    S::Error: Into<BoxDynError>,
    S::Future: Send,
    S::Response: Send,
{
    type Response = GateResponse<S::Response>;
    type Error = BoxDynError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxDynError>>;

    /// Whether the handler is ready. Limits are asked for each job: a `Pending` here would hold up all others.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxDynError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, task: Task<Args>) -> Self::Future {
        // The one that was ready is called, and a fresh one takes its place.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let (gate, context) = (self.gate.clone(), task.ctx().clone());
        let plan = plan(&gate, &task);
        async move {
            let plan = match plan {
                Ok(plan) => plan,
                Err(Panicked) => {
                    let wait = PANICKED_WAIT;
                    return Ok(delayed(&context, Delay { wait, until_us: None, limit: String::new() }));
                }
            };
            let permit = match &plan {
                None => None,
                Some(plan) => match gate.enter(plan).await {
                    JobDecision::Run(permit) => Some(permit),
                    JobDecision::Delay(delay) => {
                        if delay.until_us.is_some() {
                            read_ahead::<Args>(&gate, plan.queue());
                        }
                        return Ok(delayed(&context, delay));
                    }
                    JobDecision::Reject => {
                        // `Failed` is fetched again; what is killed is not.
                        context.raw_status().store(Status::Killed);
                        return Err(RATE_LIMIT_EXCEEDED.into());
                    }
                    JobDecision::Skip { limit } => {
                        context.raw_status().store(Status::Killed);
                        return Ok(gated("skipped", limit, None, None));
                    }
                },
            };
            let response = inner.call(task).await.map_err(Into::into);
            if let Some(permit) = permit {
                permit.release().await;
            }
            match response {
                Ok(response) => Ok(GateResponse::Ran(response)),
                Err(error) => match rate_limited(&*error) {
                    Some(RateLimited { retry_after }) => {
                        Ok(delayed(&context, gate.close_for(plan.as_ref(), retry_after).await))
                    }
                    None => {
                        // A layer in between ended the run, such as a timeout. apalis would leave the job as running for as long as its
                        // worker lives.
                        if matches!(context.raw_status().load(), Status::Running) {
                            context.raw_status().store(Status::Failed);
                        }
                        Err(error)
                    }
                },
            }
        }
        .boxed()
    }
}

/// What a handler's error says of the remote side: itself, or one that it was caused by.
fn rate_limited(error: &(dyn Error + 'static)) -> Option<RateLimited> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(asked) = error.downcast_ref() {
            return Some(*asked);
        }
        cause = error.source();
    }
    None
}

/// The code that says what a job is to be charged panicked: its type, its cost, or its arguments as JSON.
pub(super) struct Panicked;

fn plan<Args: JobArgs>(gate: &JobGate, task: &Task<Args>) -> Result<Option<Plan>, Panicked> {
    let id = task.task_id().map_or_else(String::new, ToString::to_string);
    let queue = task.queue().map_or_else(String::new, ToString::to_string);
    let metadata = |name: &str| task.metadata().get(name).map(str::to_owned);
    plan_of(gate, &id, &queue, &task.args, &metadata)
}

/// A panic there would take the worker with it, at each fetch of the job, so that no other job of the queue ran.
pub(super) fn plan_of<Args: JobArgs>(
    gate: &JobGate,
    id: &str,
    queue: &str,
    args: &Args,
    metadata: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Plan>, Panicked> {
    let caught = |job_type: &str| {
        tracing::error!(
            job_type = shown(job_type),
            arguments = std::any::type_name::<Args>(),
            "the type or the cost of a job panicked; the job is delayed, and its attempts stay as they are"
        );
        Panicked
    };
    let job_type = catch_unwind(AssertUnwindSafe(|| args.job_type())).map_err(|_| caught(""))?;
    let to_json = || serde_json::to_value(args).unwrap_or_default();
    let plan = || gate.plan(&Job::new(id, &job_type, queue).with_arguments(&to_json).with_metadata(metadata));
    catch_unwind(AssertUnwindSafe(plan)).map_err(|_| caught(&job_type))
}

/// Back to the queue: the ack is turned into a reschedule by the trigger.
fn delayed<R>(context: &Arc<ExecutionContext>, delay: Delay) -> GateResponse<R> {
    context.raw_status().store(Status::Pending);
    let wait_us = u64::try_from(delay.wait.as_micros()).unwrap_or(u64::MAX);
    gated("delayed", delay.limit, delay.until_us, delay.until_us.is_none().then_some(wait_us))
}

fn gated<R>(what: &str, limit: String, until_us: Option<u64>, wait_us: Option<u64>) -> GateResponse<R> {
    GateResponse::Gated(Gated::new(what, limit, until_us, wait_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Wrapped(BoxDynError);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the invoice could not be sent")
        }
    }

    impl Error for Wrapped {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&*self.0)
        }
    }

    #[test]
    fn a_429_is_found_as_the_cause_of_an_error() {
        let asked = RateLimited { retry_after: Duration::from_secs(5) };
        assert_eq!(rate_limited(&asked), Some(asked));
        assert_eq!(rate_limited(&Wrapped(Wrapped(asked.into()).into())), Some(asked));
        assert_eq!(rate_limited(&Wrapped("it failed".into())), None);
    }
}
