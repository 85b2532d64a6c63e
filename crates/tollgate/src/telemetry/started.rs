//! The start of a decision, for its duration and its span.

use std::time::{Duration, Instant};

use tracing::Span;
use tracing::span::Entered;

/// When a decision started, if it is timed, and its span, if there is one.
pub(crate) struct Started {
    at: Option<Instant>,
    span: Span,
}

impl Started {
    #[inline]
    pub(crate) fn new(wants_time: bool, span: Span) -> Started {
        Started { at: wants_time.then(Instant::now), span }
    }

    /// How long ago that was.
    pub(crate) fn took(&self) -> Option<Duration> {
        self.at.map(|at| at.elapsed())
    }

    /// The decision's span; the disabled span if tracing is off.
    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// The same start of one of many decisions that are made in one call: the span is the call's, and not its own.
    pub(crate) fn of_one(&self) -> Started {
        Started { at: self.at, span: Span::none() }
    }

    /// What follows in this thread happens within the span.
    pub(crate) fn enter(&self) -> Entered<'_> {
        self.span.enter()
    }
}
