//! Why a call could not be decided. A refusal is no error.

use std::error::Error as StdError;
use std::fmt;

use tollgate_kernel::LimitError;
use tollgate_store::{Failure, StoreError};

/// A call could not be decided, or a gate could not be built. The message says what was attempted and what to do.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Limit(LimitError),
    Store(StoreError),
    /// A concurrency limit was charged by a call that holds nothing.
    NeedsPermit {
        limit: String,
        call: String,
    },
    /// The call itself cannot be answered.
    Call(String),
}

impl Error {
    pub(crate) fn call(message: impl Into<String>) -> Error {
        Error { kind: Kind::Call(message.into()) }
    }

    /// A call that is done at once, on counters that are not in this process.
    pub(crate) fn not_local() -> Error {
        Error::call("the counters of this limit are not in this process")
    }

    pub(crate) fn zero_cost() -> Error {
        Error::call("a cost must be at least 1; to look without charging, peek")
    }

    /// A concurrency limit was charged by a call that holds nothing.
    pub(crate) fn holds_nothing(limit: &str, call: &str) -> Error {
        Error { kind: Kind::NeedsPermit { limit: limit.to_owned(), call: call.to_owned() } }
    }

    /// Whether the same call may succeed later without being changed.
    pub fn is_transient(&self) -> bool {
        matches!(&self.kind, Kind::Store(error) if error.is_transient())
    }

    /// How the store failed; `None` if the cause was not the store.
    pub fn failure(&self) -> Option<Failure> {
        match &self.kind {
            Kind::Store(error) => error.failure(),
            _ => None,
        }
    }

    /// The name of the concurrency limit, if a call that holds nothing charged one; `None` for other errors. Each API names its
    /// own call to use instead.
    pub fn needs_permit(&self) -> Option<&str> {
        match &self.kind {
            Kind::NeedsPermit { limit, .. } => Some(limit),
            _ => None,
        }
    }

    /// Whether the call may have taken effect although its answer is missing. A [refund](crate::Tollgate::refund) is then not to
    /// be sent again; a settlement may be, because a reservation is settled once.
    pub fn is_ambiguous(&self) -> bool {
        matches!(&self.kind, Kind::Store(error) if error.is_ambiguous())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Limit(error) => error.fmt(f),
            Kind::Store(error) => error.fmt(f),
            Kind::NeedsPermit { limit, call } => write!(
                f,
                "`{limit}` is a concurrency limit, and {call} would hold nothing that could be released; use acquire, or reserve"
            ),
            Kind::Call(message) => f.write_str(message),
        }
    }
}

impl StdError for Error {
    /// The message already is that of the error inside, so the source is what lies behind that.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.kind {
            Kind::Store(error) => error.source(),
            _ => None,
        }
    }
}

impl From<LimitError> for Error {
    fn from(error: LimitError) -> Error {
        Error { kind: Kind::Limit(error) }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        Error { kind: Kind::Store(error) }
    }
}
