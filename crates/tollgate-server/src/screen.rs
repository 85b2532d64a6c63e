//! Where an answer is printed: colour, and progress while it is worked out.
//!
//! Colour is for people: only on a terminal, and never where `NO_COLOR` is set or the terminal is dumb. What a program reads
//! (`--json`, a pipe, a file) is plain text.

use std::cell::Cell;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::rc::Rc;
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
    began: Instant,
    next: Instant,
    whole: Whole,
}

/// How much there is to do in all.
#[derive(Debug)]
enum Whole {
    Unknown,
    /// So many steps.
    Steps(u64),
    /// So many bytes, of which so many have been read.
    Bytes(u64, Rc<Cell<u64>>),
}

/// How often the line is renewed, and how long a command may take before it appears.
const RENEW: Duration = Duration::from_millis(200);

/// How many steps pass between two looks at the clock.
const STEPS_A_LOOK: u64 = 8_192;

impl Progress {
    pub(crate) fn new() -> Self {
        Progress::of(Whole::Unknown)
    }

    /// Of so many steps.
    pub(crate) fn of_steps(count: u64) -> Self {
        Progress::of(Whole::Steps(count))
    }

    /// Of so many bytes, if it is known how many, of which `read` says how many have been read.
    pub(crate) fn of_bytes(total: Option<u64>, read: Rc<Cell<u64>>) -> Self {
        Progress::of(total.map_or(Whole::Unknown, |total| Whole::Bytes(total, read)))
    }

    fn of(whole: Whole) -> Self {
        let now = Instant::now();
        Progress { shown: false, enabled: io::stderr().is_terminal(), began: now, next: now + RENEW, whole }
    }

    /// `count` things are done; `doing` says what to them.
    pub(crate) fn at(&mut self, doing: &str, count: u64) {
        if self.enabled && count.is_multiple_of(STEPS_A_LOOK) && Instant::now() >= self.next {
            let done = match &self.whole {
                Whole::Unknown => None,
                Whole::Steps(total) => Some((count, *total)),
                Whole::Bytes(total, read) => Some((read.get(), *total)),
            };
            self.show(&progress_line(doing, count, self.began.elapsed(), done));
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

/// How long the bar is.
const BAR: u64 = 20;

/// `reading ━━━━────  1,000,000 lines, 2,000,000/s, 40 %, 2s left`; without a bar where it is not known how much there is.
fn progress_line(doing: &str, lines: u64, took: Duration, done: Option<(u64, u64)>) -> String {
    let micros = took.as_micros().max(1);
    let a_second = u64::try_from(u128::from(lines) * 1_000_000 / micros).unwrap_or(u64::MAX);
    let counted = format!("{} lines, {}/s", grouped(lines), grouped(a_second));
    let Some((done, total)) = done.filter(|&(done, total)| done > 0 && total > 0) else {
        return format!("{doing} … {counted}");
    };
    let (done, total) = (u128::from(done.min(total)), u128::from(total));
    let filled = usize::try_from(done * u128::from(BAR) / total).unwrap_or(0);
    let bar = "━".repeat(filled) + &"─".repeat(usize::try_from(BAR).unwrap_or(0) - filled);
    let left = (micros * (total - done) / done).div_ceil(1_000_000);
    format!("{doing} {bar} {counted}, {} %, {left}s left", done * 100 / total)
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
    fn progress_says_how_fast_and_how_long() {
        let second = Duration::from_secs(1);
        assert_eq!(progress_line("reading", 8_192, second, None), "reading … 8,192 lines, 8,192/s");
        let bar = |filled| "━".repeat(filled) + &"─".repeat(20 - filled);
        for (lines, took, done, expected) in [
            (
                2_000_000,
                second,
                (400, 1_000),
                format!("reading {} 2,000,000 lines, 2,000,000/s, 40 %, 2s left", bar(8)),
            ),
            (10, 4 * second, (999, 1_000), format!("reading {} 10 lines, 2/s, 99 %, 1s left", bar(19))),
            // A file that grew while it was read.
            (10, second, (7, 5), format!("reading {} 10 lines, 10/s, 100 %, 0s left", bar(20))),
            (10, second, (0, 5), "reading … 10 lines, 10/s".to_owned()),
            (
                u64::MAX,
                Duration::ZERO,
                (u64::MAX, u64::MAX),
                format!(
                    "reading {} 18,446,744,073,709,551,615 lines, 18,446,744,073,709,551,615/s, 100 %, 0s left",
                    bar(20)
                ),
            ),
        ] {
            assert_eq!(progress_line("reading", lines, took, Some(done)), expected);
        }
    }

    #[test]
    fn colour_is_an_addition() {
        assert_eq!(Ink::Plain.paint(Tone::Bad, "denied"), "denied");
        assert_eq!(Ink::Colour.paint(Tone::Plain, "rows"), "rows");
        assert_eq!(Ink::Colour.paint(Tone::Bad, "denied"), "\x1b[31mdenied\x1b[0m");
    }
}
