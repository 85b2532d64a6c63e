//! The changes of a new config, as data and in words.
//!
//! `reload/changes.rs` finds them. A reload logs them, `POST /v1/compare` returns them, and `tollgate validate --against URL` shows
//! them before the file is in place.

use serde::{Deserialize, Serialize};

/// All that differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Difference {
    /// The changes that a reload applies, one line each: `+` added, `-` removed, `~` changed.
    pub(crate) changes: Vec<String>,
    /// Fields that changed and need a restart.
    pub(crate) restart: Vec<String>,
}

/// How many changes go into one log line.
const LOGGED: usize = 20;

impl Difference {
    /// All changes in one line, up to a bound.
    pub(crate) fn in_one_line(&self) -> String {
        let more = match self.changes.len().saturating_sub(LOGGED) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        self.changes[..self.changes.len().min(LOGGED)].join("; ") + &more
    }

    /// All of it, one line each.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        let restart = |field: &String| format!("! {field} needs a restart");
        self.changes.iter().cloned().chain(self.restart.iter().map(restart))
    }
}
