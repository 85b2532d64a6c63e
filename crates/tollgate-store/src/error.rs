//! Why a store could not decide.

use std::error::Error;
use std::fmt;

/// A store could not decide. The message says what was attempted and what to do; `source()` has the cause, if any.
#[derive(Debug)]
pub struct StoreError {
    kind: Kind,
    is_ambiguous: bool,
    /// Whether it concerns only this call and not the store, whatever its kind.
    is_of_call: bool,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Invalid,
    Failed(Failure),
}

/// What a failure is evidence of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// This call alone: its key, its limit, its strategy or its share. Another call may succeed.
    Call,
    /// Perhaps the node: it, or the network to it, may have failed. One call cannot show that, so the library pings the node
    /// ([`Store::ping`](crate::Store::ping)) before it concludes anything about other calls.
    Node,
}

/// How a store failed. Never an invalid input: the store, the network, or the setup failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// There was no answer in time.
    Timeout,
    /// There is no connection, or it broke.
    Connection,
    /// The store is there and not ready to write: it starts, follows another, or has lost its others.
    NotReady,
    /// The store, or the connection to it, is overloaded: no connection is free, or it is busy with a script.
    Overloaded,
    /// There is no room to remember more.
    Full,
    /// The store does not let us: password, rights, certificate, version or schema.
    Refused,
    /// The state under one of our names is not ours, or has another version.
    State,
    /// The call reached the store after its deadline and was turned away there.
    Late,
    /// The answer makes no sense.
    Reply,
}

impl Failure {
    /// All of them.
    pub const ALL: [Failure; 9] = [
        Failure::Timeout,
        Failure::Connection,
        Failure::NotReady,
        Failure::Overloaded,
        Failure::Full,
        Failure::Refused,
        Failure::State,
        Failure::Late,
        Failure::Reply,
    ];

    /// The name used in metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Failure::Timeout => "timeout",
            Failure::Connection => "connection",
            Failure::NotReady => "not_ready",
            Failure::Overloaded => "overloaded",
            Failure::Full => "full",
            Failure::Refused => "refused",
            Failure::State => "state",
            Failure::Late => "late",
            Failure::Reply => "reply",
        }
    }

    /// The default scope of a failure of this kind.
    pub const fn scope(self) -> Scope {
        match self {
            // The node answered: a key cannot be stored or read, or the call came too late.
            Failure::Full | Failure::State | Failure::Late => Scope::Call,
            Failure::Timeout
            | Failure::Connection
            | Failure::NotReady
            | Failure::Overloaded
            | Failure::Refused
            | Failure::Reply => Scope::Node,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl StoreError {
    /// A settlement that does not give one amount for each charge ([`Settlement::Each`](crate::Settlement::Each)).
    pub fn wrong_count(charges: usize, amounts: usize) -> StoreError {
        StoreError::invalid(format!(
            "the reservation has {charges} charges, and {amounts} amounts were given; give one for each, in their order"
        ))
    }

    /// A charge whose id belongs to another charge: other pairs of limit and key, or other costs.
    pub fn id_taken() -> StoreError {
        StoreError::invalid(
            "the id belongs to another charge, which had other limits, keys or costs; use an id for one charge only",
        )
    }

    /// The call itself was wrong; sending it again does not help.
    pub fn invalid(message: impl Into<String>) -> StoreError {
        StoreError {
            kind: Kind::Invalid,
            is_ambiguous: false,
            is_of_call: true,
            message: message.into(),
            source: None,
        }
    }

    /// There is no room to remember it; nothing was charged.
    pub fn full(message: impl Into<String>) -> StoreError {
        StoreError::failed(Failure::Full, message)
    }

    /// The calls of this one's own key or limit use up their share of the store. Nothing was sent, and nothing is wrong with
    /// the store.
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn own_share(message: impl Into<String>) -> StoreError {
        StoreError::failed(Failure::Overloaded, message).of_this_call()
    }

    /// The store failed, and nothing was charged.
    pub fn failed(failure: Failure, message: impl Into<String>) -> StoreError {
        let (kind, message) = (Kind::Failed(failure), message.into());
        StoreError { kind, is_ambiguous: false, is_of_call: false, message, source: None }
    }

    /// The store could not be reached, or did not answer.
    pub fn unavailable(
        message: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> StoreError {
        StoreError::failed(Failure::Connection, message).caused_by(source)
    }

    /// The same error with what caused it.
    #[must_use]
    pub fn caused_by(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
        StoreError { source: Some(source.into()), ..self }
    }

    /// The same error for a call that may have taken effect: it was sent, and its answer never came.
    #[must_use]
    pub fn ambiguous(self) -> StoreError {
        StoreError { is_ambiguous: true, ..self }
    }

    /// The same error as evidence of this call alone: the caller used up its own share, for example.
    #[must_use]
    pub fn of_this_call(self) -> StoreError {
        StoreError { is_of_call: true, ..self }
    }

    /// The same error for another call that failed with this one. It has no cause: that stays with the first.
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn for_another(&self) -> StoreError {
        let StoreError { kind, is_ambiguous, is_of_call, .. } = *self;
        StoreError { kind, is_ambiguous, is_of_call, message: self.message.clone(), source: None }
    }

    /// Whether the call itself was wrong.
    pub fn is_invalid(&self) -> bool {
        self.kind == Kind::Invalid
    }

    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        self.kind != Kind::Invalid
    }

    /// Whether the call may have taken effect. The caller gets no charge for it and must not send it again, unless it has an id
    /// (a [`Hold`](crate::Hold)).
    pub fn is_ambiguous(&self) -> bool {
        self.is_ambiguous
    }

    /// What this error is evidence of: an invalid call is no evidence about the store.
    pub fn scope(&self) -> Scope {
        match self.kind {
            Kind::Failed(failure) if !self.is_of_call => failure.scope(),
            Kind::Failed(_) | Kind::Invalid => Scope::Call,
        }
    }

    /// How the store failed; `None` if the call was invalid.
    pub fn failure(&self) -> Option<Failure> {
        match self.kind {
            Kind::Invalid => None,
            Kind::Failed(failure) => Some(failure),
        }
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
    fn errors_have_a_scope_and_keep_their_cause() {
        let error = StoreError::unavailable("could not ask", "refused");
        assert!(error.is_transient() && !error.is_invalid() && !error.is_ambiguous());
        assert_eq!(error.failure(), Some(Failure::Connection));
        assert_eq!(error.to_string(), "could not ask");
        assert_eq!(error.source().unwrap().to_string(), "refused");
        let full = StoreError::full("full");
        assert!(full.is_transient() && full.source().is_none());
        assert!(StoreError::failed(Failure::Timeout, "late").ambiguous().is_ambiguous());
        let invalid = StoreError::invalid("wrong");
        assert!(!invalid.is_transient() && invalid.failure().is_none());
    }

    #[test]
    fn a_failure_is_evidence_of_the_node_only_if_the_node_may_be_ill() {
        for failure in Failure::ALL {
            let error = StoreError::failed(failure, "failed");
            let is_of_call = matches!(failure, Failure::Full | Failure::State | Failure::Late);
            assert_eq!(error.scope() == Scope::Call, is_of_call, "{failure}");
            assert_eq!(error.of_this_call().scope(), Scope::Call, "{failure}");
        }
        assert_eq!(StoreError::invalid("wrong").scope(), Scope::Call);
    }

    #[test]
    fn every_failure_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = Failure::ALL.iter().map(Failure::to_string).collect();
        assert_eq!(names.len(), Failure::ALL.len());
    }
}
