//! Why jobs could not be set up or inspected. The result of a single job is never an error.

use std::error::Error as StdError;
use std::fmt;

/// Jobs could not be set up or inspected. The message says what was attempted and what to do.
#[derive(Debug)]
pub struct Error {
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), source: None }
    }

    pub(crate) fn caused(
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Error {
        Error { message: message.into(), source: Some(source.into()) }
    }

    /// A statement that the database refused or did not answer. A right that is missing is said as such.
    pub(crate) fn database(doing: &str, error: sqlx::Error) -> Error {
        let code = error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned());
        let fix = match code.as_deref() {
            Some("42501") => {
                "; the database role lacks a right: grant it, or run the migration as the owner of the tables"
            }
            // What the database says of it would only name the first table or function that was asked for.
            Some("42P01" | "42883" | "3F000") => {
                return Error::caused(
                    format!(
                        "{doing}: the job tables are not there, so no worker has prepared this database yet; start one \
                         (JobGate::open_file or JobGateBuilder::connect make them), or if one runs, give it and this program the \
                         same [jobs] database and [store.postgres] prefix"
                    ),
                    error,
                );
            }
            _ => "",
        };
        Error::caused(format!("{doing}: {error}{fix}"), error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().and_then(|source| source.source())
    }
}

impl From<tollgate::Error> for Error {
    fn from(error: tollgate::Error) -> Error {
        Error::caused(error.to_string(), error)
    }
}
