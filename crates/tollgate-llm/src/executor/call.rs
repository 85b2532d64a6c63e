//! A call of the executor: what goes in, what is sent, and what its caller gets.

use http::HeaderMap;

use crate::limits::{Refusal, RefusalKind};
use crate::provider::Failure;
use crate::request::Api;
use crate::usage::Usage;

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
    pub(super) fn new(kind: CallErrorKind, reason: impl Into<String>, attempts: u32) -> CallError {
        CallError { kind, reason: reason.into(), attempts, limited: 0, reply: None }
    }

    pub(super) fn cancelled() -> CallError {
        CallError::new(CallErrorKind::Cancelled, "the call was cancelled", 0)
    }

    pub(super) fn not_admitted(refusal: Refusal, attempts: u32) -> CallError {
        CallError::new(CallErrorKind::NotAdmitted(refusal.kind), refusal.reason, attempts)
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
