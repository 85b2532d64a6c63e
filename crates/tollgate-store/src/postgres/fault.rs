//! Maps errors of the driver and the server to store errors, and decides what may be done about them.
//!
//! A fault says three things: the kind of failure, whether the call may have taken effect, and whether it may be sent again. A
//! call that was sent and not answered is ambiguous; a call that the server rejected is not, whatever the reason. `call.rs` and
//! `pool.rs` make faults; no message contains a key or a value.

use std::error::Error as _;
use std::io;

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::{Failure, StoreError};

/// A failed attempt.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) error: StoreError,
    /// Nothing was changed, and the same call may succeed in a moment.
    pub(super) again: bool,
    /// The connection can no longer be used.
    pub(super) broken: bool,
}

/// The progress of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not sent yet: nothing can have changed.
    Before,
    /// Sent, but it changes nothing.
    Looking,
    /// Sent, and it may have changed something.
    Changing,
}

/// The SQLSTATE that our functions raise when a call is late.
const LATE: &str = "TG001";

impl Fault {
    pub(super) fn new(failure: Failure, message: impl Into<String>) -> Fault {
        Fault { error: StoreError::failed(failure, message), again: false, broken: false }
    }

    /// The deadline passed while waiting for the server.
    pub(super) fn timeout(stage: Stage, doing: &str, place: &str) -> Fault {
        let error = StoreError::failed(
            Failure::Timeout,
            format!("PostgreSQL at {place} did not answer in time ({doing})"),
        );
        let error = if stage == Stage::Changing { error.ambiguous() } else { error };
        Fault { error, again: false, broken: true }
    }

    /// The meaning of an error of the driver or the server.
    pub(super) fn of(error: Error, stage: Stage, doing: &str, place: &str) -> Fault {
        let (failure, again) = match error.as_db_error() {
            Some(db_error) => of_state(db_error.code()),
            None => of_driver(&error),
        };
        // An error of the server means that nothing was changed, unless it is shutting down or does not know.
        let knows = error.code().is_some_and(|code| {
            !matches!(
                *code,
                SqlState::ADMIN_SHUTDOWN
                    | SqlState::CRASH_SHUTDOWN
                    | SqlState::T_R_STATEMENT_COMPLETION_UNKNOWN
            ) && !code.code().starts_with("08")
        });
        let reason = match error.as_db_error() {
            Some(db_error) => format!("{} ({})", db_error.message(), db_error.code().code()),
            None => error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}")),
        };
        let hint = match failure {
            Failure::State if !error.code().is_some_and(is_of_the_caller) => {
                "; the tables are not as this version left them: see docs/storage.md"
            }
            _ if is_schema(error.code()) => "; the schema is missing or incomplete: run migrate",
            _ => "",
        };
        let message = format!("PostgreSQL at {place}, {doing}: {reason}{hint}");
        let is_ambiguous = stage == Stage::Changing && !knows;
        let stored = match error.code().is_some_and(is_of_the_caller) {
            true => StoreError::invalid(message),
            false => StoreError::failed(failure, message),
        };
        let stored = stored.caused_by(error);
        Fault {
            error: if is_ambiguous { stored.ambiguous() } else { stored },
            // A connection that broke before anything was sent cost only time.
            again: if knows { again } else { stage == Stage::Before && failure == Failure::Connection },
            broken: !knows,
        }
    }
}

/// Whether the server rejects a value that no column can hold: text with a zero byte, in another encoding, or too long. Only a
/// value from a caller can be like this, since stored values were accepted before.
fn is_of_the_caller(code: &SqlState) -> bool {
    [
        SqlState::CHARACTER_NOT_IN_REPERTOIRE,
        SqlState::UNTRANSLATABLE_CHARACTER,
        SqlState::INVALID_TEXT_REPRESENTATION,
        SqlState::STRING_DATA_RIGHT_TRUNCATION,
    ]
    .contains(code)
}

/// Whether an object is missing that migrate would have created.
fn is_schema(code: Option<&SqlState>) -> bool {
    code.is_some_and(|code| {
        [
            SqlState::UNDEFINED_TABLE,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::UNDEFINED_COLUMN,
            SqlState::UNDEFINED_OBJECT,
            SqlState::INVALID_SCHEMA_NAME,
        ]
        .contains(code)
    })
}

/// The kind of failure, and whether another attempt may help at once.
fn of_state(code: &SqlState) -> (Failure, bool) {
    match code {
        code if code.code() == LATE => (Failure::Late, false),
        code if is_schema(Some(code)) => (Failure::Refused, false),
        &SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED => {
            (Failure::Overloaded, true)
        }
        &SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED => (Failure::Timeout, false),
        &SqlState::CANNOT_CONNECT_NOW => (Failure::NotReady, true),
        &SqlState::READ_ONLY_SQL_TRANSACTION => (Failure::NotReady, false),
        &SqlState::DISK_FULL => (Failure::Full, false),
        &SqlState::INSUFFICIENT_PRIVILEGE | &SqlState::INVALID_CATALOG_NAME => (Failure::Refused, false),
        // A pooler mixed up the sessions; a new connection has its own statements.
        &SqlState::INVALID_SQL_STATEMENT_NAME => (Failure::Connection, true),
        code => match &code.code()[..2] {
            "08" | "57" => (Failure::Connection, false),
            "28" => (Failure::Refused, false),
            "53" => (Failure::Overloaded, false),
            // A value or a row that is too large, or that violates a constraint: it concerns this call and its keys only.
            "54" => (Failure::Full, false),
            "22" | "23" => (Failure::State, false),
            _ => (Failure::Reply, false),
        },
    }
}

/// The same for errors without an answer of the server.
fn of_driver(error: &Error) -> (Failure, bool) {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if inner.is::<rustls::Error>() {
            return (Failure::Refused, false);
        }
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            if io.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) {
                return (Failure::Refused, false);
            }
            return (Failure::Connection, io.kind() == io::ErrorKind::ConnectionRefused);
        }
        cause = inner.source();
    }
    // The driver does not distinguish further: what it rejects itself is the setup (a missing password) or the server (no TLS).
    let text = error.to_string();
    let is_refusal =
        ["TLS", "authentication", "invalid configuration"].iter().any(|word| text.contains(word));
    (if is_refusal { Failure::Refused } else { Failure::Connection }, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_say_in_which_way_and_whether_again() {
        for (code, failure, again) in [
            ("40001", Failure::Overloaded, true),
            ("40P01", Failure::Overloaded, true),
            ("55P03", Failure::Timeout, false),
            ("57014", Failure::Timeout, false),
            ("57P03", Failure::NotReady, true),
            ("25006", Failure::NotReady, false),
            ("53300", Failure::Overloaded, false),
            ("53100", Failure::Full, false),
            ("42501", Failure::Refused, false),
            ("28P01", Failure::Refused, false),
            ("3D000", Failure::Refused, false),
            ("42P01", Failure::Refused, false),
            ("57P01", Failure::Connection, false),
            ("08006", Failure::Connection, false),
            ("22003", Failure::State, false),
            ("23505", Failure::State, false),
            ("54000", Failure::Full, false),
            ("TG001", Failure::Late, false),
            ("XX000", Failure::Reply, false),
        ] {
            assert_eq!(of_state(&SqlState::from_code(code)), (failure, again), "{code}");
        }
    }

    #[test]
    fn a_value_that_no_column_holds_is_the_callers() {
        for (code, is_its) in [
            ("22021", true),
            ("22P05", true),
            ("22P02", true),
            ("22001", true),
            ("22003", false),
            ("23505", false),
        ] {
            assert_eq!(is_of_the_caller(&SqlState::from_code(code)), is_its, "{code}");
        }
    }
}
