//! Why a store could not decide.

use std::error::Error;
use std::fmt;

/// A store could not decide. What it was asked for and what to do is in the message; the cause, if any, in `source()`.
#[derive(Debug)]
pub struct StoreError {
    kind: Kind,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Invalid,
    Full,
    Unavailable,
}

impl StoreError {
    /// The call itself was wrong; sending it again does not help.
    pub fn invalid(message: impl Into<String>) -> StoreError {
        StoreError { kind: Kind::Invalid, message: message.into(), source: None }
    }

    /// There is no room to remember it; nothing was charged.
    pub fn full(message: impl Into<String>) -> StoreError {
        StoreError { kind: Kind::Full, message: message.into(), source: None }
    }

    /// The store could not be asked, or did not answer.
    pub fn unavailable(
        message: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> StoreError {
        StoreError { kind: Kind::Unavailable, message: message.into(), source: Some(source.into()) }
    }

    /// Whether the call itself was wrong.
    pub fn is_invalid(&self) -> bool {
        self.kind == Kind::Invalid
    }

    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        self.kind != Kind::Invalid
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source.as_ref() as &(dyn Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_answer_questions_and_keep_their_cause() {
        let error = StoreError::unavailable("could not ask", "refused");
        assert!(error.is_transient() && !error.is_invalid());
        assert_eq!(error.to_string(), "could not ask");
        assert_eq!(error.source().unwrap().to_string(), "refused");
        assert!(StoreError::full("full").is_transient());
        assert!(StoreError::full("full").source().is_none());
        assert!(!StoreError::invalid("wrong").is_transient());
    }
}
