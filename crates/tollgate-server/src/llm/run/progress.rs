//! How far a run is: a bar on a terminal that overwrites itself, and a line every ten seconds where there is none.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::figures::grouped;

/// How often the bar is drawn anew, and how often a line is written.
const REDRAW: Duration = Duration::from_millis(200);
const LINE: Duration = Duration::from_secs(10);

/// How wide the bar is.
const BAR: usize = 24;

pub(super) struct Progress {
    is_terminal: bool,
    began: Instant,
    next: Instant,
    state: State,
}

/// What is shown.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    total: usize,
    /// Done in earlier runs.
    before: usize,
    done: usize,
    failed: usize,
    tokens: u64,
}

impl Progress {
    pub(super) fn new(total: usize, before: usize) -> Progress {
        let is_terminal = io::stderr().is_terminal();
        let began = Instant::now();
        let progress =
            Progress { is_terminal, began, next: began, state: State { total, before, ..State::default() } };
        if before > 0 && !is_terminal {
            progress.print();
        }
        progress
    }

    /// A request has ended.
    pub(super) fn done(&mut self, tokens: u64, is_answered: bool) {
        self.state.done += 1;
        self.state.failed += usize::from(!is_answered);
        self.state.tokens = self.state.tokens.saturating_add(tokens);
    }

    /// Waits until it is to be shown again, and shows it.
    pub(super) async fn tick(&mut self) {
        tokio::time::sleep_until(self.next.into()).await;
        self.next = Instant::now() + if self.is_terminal { REDRAW } else { LINE };
        self.print();
    }

    /// Nothing more is sent.
    pub(super) fn stopping(&self, running: usize) {
        let mut stderr = io::stderr().lock();
        let end = if self.is_terminal { "\r\x1b[K" } else { "" };
        let _ = writeln!(
            stderr,
            "{end}stopping: what waits is not sent, and up to {running} that were sent are finished"
        );
    }

    fn print(&self) {
        let took = self.began.elapsed();
        let mut stderr = io::stderr().lock();
        let _ = match self.is_terminal {
            true => write!(stderr, "\r{}\x1b[K", self.state.bar(took)),
            false => writeln!(stderr, "{}", self.state.line(took)),
        };
    }
}

/// The bar is wiped at the end: the summary says the rest.
impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_terminal {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

impl State {
    fn bar(&self, took: Duration) -> String {
        let full = BAR * (self.before + self.done) / self.total.max(1);
        let mut bar = String::from("[");
        (0..BAR).for_each(|at| bar.push(if at < full { '#' } else { '.' }));
        let _ = write!(bar, "] {}", self.line(took));
        bar
    }

    fn line(&self, took: Duration) -> String {
        let done = self.before + self.done;
        let mut line = format!("{} of {} done", grouped(done as u64), grouped(self.total as u64));
        if self.failed > 0 {
            let _ = write!(line, ", {} failed", grouped(self.failed as u64));
        }
        let _ = write!(line, ", {} tokens", grouped(self.tokens));
        let micros = took.as_micros().max(1);
        let rate = u128::from(self.tokens) * 60_000_000 / micros;
        let _ = write!(line, ", {} tokens/min", grouped(u64::try_from(rate).unwrap_or(u64::MAX)));
        let left = self.total.saturating_sub(done) as u128;
        if self.done > 0 && left > 0 {
            let seconds = (micros * left / self.done as u128).div_ceil(1_000_000);
            let (minutes, seconds) = (seconds / 60, seconds % 60);
            let _ = match minutes {
                0 => write!(line, ", {seconds} s left"),
                1..60 => write!(line, ", {minutes} min {seconds} s left"),
                _ => write!(line, ", {} h {} min left", minutes / 60, minutes % 60),
            };
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_is_done_and_when_the_rest_will_be() {
        let state = State { total: 1_000, before: 200, done: 300, failed: 2, tokens: 60_000 };
        let minute = Duration::from_secs(60);
        assert_eq!(
            state.line(minute),
            "500 of 1,000 done, 2 failed, 60,000 tokens, 60,000 tokens/min, 1 min 40 s left"
        );
        assert!(state.bar(minute).starts_with("[############............] 500 of"));
        let fresh = State { total: 10, ..State::default() };
        assert_eq!(fresh.line(Duration::ZERO), "0 of 10 done, 0 tokens, 0 tokens/min");
        let done = State { total: 10, done: 10, tokens: 5, ..State::default() };
        assert_eq!(done.line(minute), "10 of 10 done, 5 tokens, 5 tokens/min");
        let slow = State { total: 1_000, done: 1, ..State::default() };
        assert!(slow.line(minute).ends_with("16 h 39 min left"), "{}", slow.line(minute));
    }
}
