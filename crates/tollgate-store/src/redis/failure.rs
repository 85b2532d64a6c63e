//! Maps errors of the client and the server to store errors: the kind of failure, whether the call may have taken effect, and
//! whether it may be sent again.
//!
//! `node.rs` reports every failed command through this module; `route.rs` acts on the [`Remedy`]. No message contains a key or
//! an argument.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::{Failure, StoreError};

/// What to do after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Nothing was done; load the scripts and send it again.
    LoadScripts,
    /// Nothing was done; another server has the slot.
    Redirect,
    /// Nothing was done; wait a little and send it again, to another server if there is one.
    Retry,
    /// Nothing was done, and sending it again would not help.
    GiveUp,
    /// It may have been done. Only a call with an id may be sent again.
    Ambiguous,
}

/// What an error means.
#[derive(Debug)]
pub(crate) struct CallError {
    pub(crate) remedy: Remedy,
    /// Whether the connection can no longer be used.
    pub(crate) is_broken: bool,
    /// Where to send it instead.
    pub(crate) redirection: Option<Redirection>,
    pub(crate) error: StoreError,
}

/// The server of a slot.
#[derive(Clone, Debug)]
pub(crate) struct Redirection {
    pub(crate) address: String,
    /// Valid for this call only (ASK), while the slot migrates.
    pub(crate) is_asking: bool,
}

impl CallError {
    fn new(remedy: Remedy, failure: Failure, message: impl Into<String>) -> CallError {
        CallError::of(remedy, StoreError::failed(failure, message))
    }

    fn of(remedy: Remedy, error: StoreError) -> CallError {
        let error = if remedy == Remedy::Ambiguous { error.ambiguous() } else { error };
        CallError { remedy, is_broken: false, redirection: None, error }
    }

    fn broken(self) -> CallError {
        CallError { is_broken: true, ..self }
    }

    /// No answer in time. `sent` says whether the command may have been sent.
    pub(crate) fn timeout(sent: bool) -> CallError {
        let remedy = if sent { Remedy::Ambiguous } else { Remedy::GiveUp };
        CallError::new(remedy, Failure::Timeout, "Redis did not answer in time")
    }

    /// No connection in time, so nothing was sent.
    pub(crate) fn unconnected(address: &str) -> CallError {
        let message = format!("could not connect to Redis at {address} in time");
        CallError::new(Remedy::GiveUp, Failure::Timeout, message)
    }
}

/// The meaning of an error reply, or of a connection that broke during a call.
pub(crate) fn of_call(error: RedisError) -> CallError {
    use Failure::{Connection, NotReady, Overloaded, Refused, Reply};
    use Remedy::{Ambiguous, GiveUp, LoadScripts, Redirect, Retry};
    let detail = error.detail().unwrap_or_default();
    let call_error = match (error.kind(), error.code().unwrap_or_default()) {
        (ErrorKind::Server(ServerErrorKind::NoScript), _) => {
            CallError::new(LoadScripts, NotReady, "Redis lost our scripts")
        }
        (ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask), _) => CallError::new(
            Redirect,
            NotReady,
            "the slot is on another server; is this a cluster that was not said to be one?",
        ),
        (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => {
            CallError::new(Retry, NotReady, "this Redis server is a replica and cannot write").broken()
        }
        (
            ErrorKind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::TryAgain
                | ServerErrorKind::BusyLoading,
            ),
            code,
        ) => CallError::new(Retry, NotReady, format!("Redis is not ready ({code})")),
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => lacks_a_right(detail),
        (ErrorKind::AuthenticationFailed, _) | (_, "NOAUTH" | "WRONGPASS") => {
            CallError::new(GiveUp, Refused, "Redis refused the user or the password").broken()
        }
        (_, "OOM") => CallError::of(GiveUp, no_room()),
        (_, "BUSY") => CallError::new(GiveUp, Overloaded, "Redis is busy with a script"),
        (_, "NOREPLICAS") => {
            CallError::new(GiveUp, NotReady, "Redis has too few replicas to write (min-replicas-to-write)")
        }
        (_, "MISCONF") => {
            CallError::new(GiveUp, NotReady, "Redis does not accept writes: its snapshots fail (MISCONF)")
        }
        (_, "WRONGTYPE") => foreign(),
        (ErrorKind::Server(ServerErrorKind::CrossSlot), _) => CallError::new(
            GiveUp,
            Reply,
            "Redis says that the keys of one call are in different slots: please report this",
        ),
        (ErrorKind::Server(_) | ErrorKind::Extension, code) => {
            let text = format!("{code} {detail}");
            if text.contains("TOLLGATE_STATE") || text.contains("WRONGTYPE") {
                foreign()
            } else if text.contains("cluster support disabled") {
                CallError::new(
                    GiveUp,
                    Refused,
                    "this Redis server is no cluster's and was said to be one; set `cluster` to false",
                )
            } else if text.contains("max number of clients") {
                CallError::new(GiveUp, Overloaded, "Redis has no connection left for us (maxclients)")
                    .broken()
            } else if text.contains("OOM ") {
                CallError::of(GiveUp, no_room())
            } else if text.contains("READONLY") {
                CallError::new(Retry, NotReady, "this Redis server is a replica and cannot write").broken()
            } else if text.contains("NOREPLICAS") {
                CallError::new(
                    GiveUp,
                    NotReady,
                    "Redis has too few replicas to write (min-replicas-to-write)",
                )
            } else if ["NOPERM", "can't run this command", "can't access at least one of the keys"]
                .iter()
                .any(|words| text.contains(words))
            {
                lacks_a_right(detail)
            } else {
                CallError::new(GiveUp, Reply, format!("Redis answered with the error {code}"))
            }
        }
        (ErrorKind::Io, _) if error.is_connection_refusal() => {
            CallError::new(Retry, Connection, "Redis refused the connection").broken()
        }
        (ErrorKind::Io, _) => CallError::new(Ambiguous, Connection, "the connection to Redis broke").broken(),
        (ErrorKind::Parse, _) => {
            CallError::new(Ambiguous, Reply, "Redis answered what is no answer").broken()
        }
        (kind, _) => CallError::new(Ambiguous, Reply, format!("the Redis client failed ({kind:?})")).broken(),
    };
    let is_asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    let redirection =
        error.redirect_node().map(|(address, _)| Redirection { address: address.to_owned(), is_asking });
    CallError { redirection, error: call_error.error.caused_by(Shown::of(&error)), ..call_error }
}

/// A missing privilege for one command. The login itself succeeded, so calls that need other commands may succeed.
fn lacks_a_right(detail: &str) -> CallError {
    // The rest of the message is a position in the script.
    let text = detail.split(" script: ").next().unwrap_or_default().lines().next().unwrap_or_default();
    let message = format!("the Redis user lacks a right ({text}); docs/operations.md has the ACL rule");
    CallError::of(Remedy::GiveUp, StoreError::failed(Failure::Refused, message).of_this_call())
}

fn foreign() -> CallError {
    CallError::of(Remedy::GiveUp, not_ours())
}

/// The value under one of our names was not written by us.
pub(super) fn not_ours() -> StoreError {
    StoreError::failed(
        Failure::State,
        "what Redis keeps under one of our keys is not ours; give Tollgate a prefix of its own, or remove what is there",
    )
}

/// A new key, and no room for it. Existing keys need no more room, and are charged as usual.
pub(super) fn no_room() -> StoreError {
    StoreError::failed(Failure::Full, "Redis is out of memory (maxmemory) and takes no new keys")
}

/// The meaning of an error while connecting: nothing was sent yet.
pub(crate) fn of_connect(error: RedisError, address: &str) -> CallError {
    let call_error = of_call(error);
    let remedy = match call_error.remedy {
        Remedy::Ambiguous => Remedy::Retry,
        remedy => remedy,
    };
    let text = call_error.error.to_string();
    let failure = call_error.error.failure().unwrap_or(Failure::Connection);
    let source = std::error::Error::source(&call_error.error).map(ToString::to_string).unwrap_or_default();
    let lower = source.to_lowercase();
    let is_tls = ["certificate", "tls", "fatal alert"].iter().any(|word| lower.contains(word));
    let (failure, text) = match failure {
        Failure::Connection if is_tls => (Failure::Refused, format!("TLS failed: {source}")),
        Failure::Connection if lower.contains("lookup address") => {
            (failure, "the host name cannot be resolved; check its spelling and the name server".to_owned())
        }
        failure => (failure, text),
    };
    CallError::new(remedy, failure, format!("could not connect to Redis at {address}: {text}")).broken()
}

/// The client's error as text, without anything that a server may have quoted from the call.
#[derive(Debug)]
struct Shown(String);

impl Shown {
    fn of(error: &RedisError) -> Shown {
        match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension => {
                Shown(format!("Redis error {}", error.code().unwrap_or("without a code")))
            }
            _ => Shown(error.to_string()),
        }
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Shown {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: an unknown host was reported as "the connection to Redis broke".
    #[test]
    fn a_host_name_that_cannot_be_resolved_is_reported_as_such() {
        let lookup = std::io::Error::other("failed to lookup address information: Name or service not known");
        let call_error = of_connect(RedisError::from(lookup), "no-such-host:6379");
        assert_eq!(
            (call_error.remedy, call_error.error.failure()),
            (Remedy::Retry, Some(Failure::Connection))
        );
        let text = call_error.error.to_string();
        assert!(text.contains("at no-such-host:6379: the host name cannot be resolved"), "{text}");
        let broke = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let text = of_connect(RedisError::from(broke), "a:1").error.to_string();
        assert!(text.contains("the connection to Redis broke"), "{text}");
    }
}
