//! What could not be done, for the person who asked.
//!
//! Every command ends in `Ok` or in one [`Failure`], which `main` reports: first the details, one line each (the bad lines of
//! a log, the mistakes of a config), then one line that says what was attempted and what to do. A denial is an answer and
//! never comes here. A reader of our output that went away, as `head` does, is no fault of anybody: it ends the command in
//! silence.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// The exit code of a command that could not do what was asked; 1 is kept for denials.
const COULD_NOT: u8 = 2;

/// Why a command stopped.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It could not do what was asked.
    CouldNot { details: Vec<String>, message: String },
    /// Nobody reads our output any more.
    ReaderLeft,
    /// The answer has been given already and it is a refusal, as with `validate --json`.
    Answered,
}

impl Failure {
    /// A failure with a message of one line.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Failure::CouldNot { details: Vec::new(), message: message.into() }
    }

    /// A failure with a line for each thing that was wrong, and one for them all.
    pub(crate) fn with_details(details: Vec<String>, message: impl Into<String>) -> Self {
        Failure::CouldNot { details, message: message.into() }
    }

    /// Reading `name` failed.
    pub(crate) fn reading(name: &str, error: &io::Error) -> Self {
        Failure::new(format!("cannot read {name}: {}", reason(error)))
    }

    /// Writing `name` failed.
    pub(crate) fn writing(name: &str, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ReaderLeft,
            _ => Failure::new(format!("cannot write {name}: {}", reason(error))),
        }
    }

    /// Writing the answer to stdout failed.
    pub(crate) fn answering(error: io::Error) -> Self {
        Failure::writing("to stdout", &error)
    }

    /// Writes the message to stderr and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Failure::ReaderLeft => ExitCode::SUCCESS,
            Failure::Answered => ExitCode::from(COULD_NOT),
            Failure::CouldNot { details, message } => {
                for detail in details {
                    print_line(format_args!("{detail}"));
                }
                print_line(format_args!("tollgate: error: {message}"));
                ExitCode::from(COULD_NOT)
            }
        }
    }
}

/// What `main` would say, in one line.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::CouldNot { message, .. } => f.write_str(message),
            Failure::ReaderLeft | Failure::Answered => Ok(()),
        }
    }
}

/// A line on stderr, in one write: the log writes there too, and neither is to end up in the middle of the other. When stderr is
/// closed there is nobody left to tell, and no reason to panic.
pub(crate) fn print_line(line: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// What the system said, without the number of its error code.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_in_words() {
        let missing = std::fs::File::open("no such file anywhere").unwrap_err();
        assert_eq!(reason(&missing), "No such file or directory");
        assert_eq!(reason(&io::Error::other("plain")), "plain");
    }

    #[test]
    fn a_reader_that_left_is_no_fault() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(matches!(Failure::answering(closed), Failure::ReaderLeft));
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert!(matches!(Failure::answering(full), Failure::CouldNot { .. }));
    }
}
