//! Where an answer is printed: colour, and progress while it is worked out.
//!
//! Colour is for people: only on a terminal, and never where `NO_COLOR` is set or the terminal is dumb. What a program reads
//! (`--json`, a pipe, a file) is plain text.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::figures::grouped;

/// What a piece of text says, which on a terminal is its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    /// A heading.
    Strong,
    /// An aside.
    Faint,
    /// Let through, or in order.
    Good,
    /// Denied, or a mistake.
    Bad,
}

impl Tone {
    const fn code(self) -> &'static str {
        match self {
            Tone::Plain => "",
            Tone::Strong => "1",
            Tone::Faint => "2",
            Tone::Good => "32",
            Tone::Bad => "31",
        }
    }
}

/// Whether to colour what is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ink {
    Colour,
    Plain,
}

impl Ink {
    /// For the stream that is, or is not, a terminal.
    pub(crate) fn of(stream: &impl IsTerminal) -> Ink {
        let forbidden = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        if stream.is_terminal() && !forbidden { Ink::Colour } else { Ink::Plain }
    }

    /// `text` in the colour of `tone`.
    pub(crate) fn paint(self, tone: Tone, text: impl Display) -> String {
        match (self, tone) {
            (Ink::Plain, _) | (_, Tone::Plain) => text.to_string(),
            (Ink::Colour, _) => format!("\x1b[{}m{text}\x1b[0m", tone.code()),
        }
    }
}

/// How far a long command has come: one line on stderr that overwrites itself, only on a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    enabled: bool,
    next: Instant,
}

/// How often the line is renewed, and how long a command may take before it appears.
const RENEW: Duration = Duration::from_millis(200);

/// How many steps pass between two looks at the clock.
const STEPS_A_LOOK: u64 = 8_192;

impl Progress {
    pub(crate) fn new() -> Self {
        Progress { shown: false, enabled: io::stderr().is_terminal(), next: Instant::now() + RENEW }
    }

    /// `count` things are done; `doing` says what to them.
    pub(crate) fn at(&mut self, doing: &str, count: u64) {
        if self.enabled && count.is_multiple_of(STEPS_A_LOOK) && Instant::now() >= self.next {
            self.show(&format!("{doing} … {}", grouped(count)));
        }
    }

    /// A step so long that each is worth showing.
    pub(crate) fn step(&mut self, doing: &str) {
        if self.enabled {
            self.show(doing);
        }
    }

    fn show(&mut self, line: &str) {
        let _ = write!(io::stderr().lock(), "\r{line}\x1b[K");
        self.shown = true;
        self.next = Instant::now() + RENEW;
    }
}

/// The line is wiped when the work is over, so that it is never mistaken for an answer.
impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_an_addition() {
        assert_eq!(Ink::Plain.paint(Tone::Bad, "denied"), "denied");
        assert_eq!(Ink::Colour.paint(Tone::Plain, "rows"), "rows");
        assert_eq!(Ink::Colour.paint(Tone::Bad, "denied"), "\x1b[31mdenied\x1b[0m");
    }
}
