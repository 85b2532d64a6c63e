//! The commands between `MULTI` and `EXEC`, as clients send a pipeline by default.
//!
//! They are answered in order, with nothing of the same connection between them, and that is all: a command that fails or is denied
//! takes nothing back of the others, as in Redis. What cannot be answered is refused while it is queued, and then none of them is.
//! A connection keeps at most so many commands and bytes; what is beyond that is refused, too.

use super::parse::Command;
use super::request::{Mistake, Request};
use super::session;

/// How many commands are queued, and how long they are in all.
const MOST_COMMANDS: usize = 1_024;
const MOST_BYTES: usize = 128 * 1024;

/// The commands of a transaction.
#[derive(Default)]
pub(super) struct Queue {
    bytes: Vec<u8>,
    count: usize,
    /// Whether one of them was refused, so that none is answered.
    is_aborted: bool,
}

impl Queue {
    /// Adds a command, or says why not.
    pub(super) fn add(&mut self, command: &Command<'_, '_>) -> Result<(), Mistake> {
        let added = self.check(command);
        match &added {
            Ok(()) => {
                self.count += 1;
                self.bytes.extend_from_slice(command.bytes());
            }
            Err(_) => {
                self.is_aborted = true;
                // They will not be executed.
                self.bytes = Vec::new();
            }
        }
        added
    }

    fn check(&self, command: &Command<'_, '_>) -> Result<(), Mistake> {
        let is = |name: &[u8]| command.name().eq_ignore_ascii_case(name);
        if is(b"AUTH") || is(b"HELLO") {
            return Err(Mistake::Borrowed("ERR Command not allowed inside a transaction"));
        }
        if let Some(Err(mistake)) = Request::read(command) {
            return Err(mistake);
        }
        if let Some(fault) = session::fault(command) {
            return Err(fault.into());
        }
        if self.count >= MOST_COMMANDS || self.bytes.len() + command.bytes().len() > MOST_BYTES {
            let most =
                format!("ERR a transaction has at most {MOST_COMMANDS} commands and {MOST_BYTES} bytes");
            return Err(most.into());
        }
        Ok(())
    }

    /// How many commands are to be answered, if none was refused.
    pub(super) fn count(&self) -> Result<usize, ()> {
        if self.is_aborted { Err(()) } else { Ok(self.count) }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}
