//! Warns on stderr when lines of the log are dropped, once for each burst: the log itself is what is not read.
//!
//! A separate thread looks once a second and writes the warning, so that a stderr that blocks holds up nothing else. It is not joined
//! at the end of the process for the same reason. `/metrics` reads the count itself (`front/json/look.rs`).

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use tollgate::telemetry::DroppedLines;

use crate::failure::print_line;

/// How often the count is looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// A burst is over after this many looks without another dropped line.
const QUIET_LOOKS: u32 = 10;

/// Keeps the thread running.
pub(super) struct Warnings {
    _end: mpsc::Sender<()>,
}

impl Warnings {
    pub(super) fn start(dropped: DroppedLines) -> io::Result<Warnings> {
        let (end, ended) = mpsc::channel();
        let watch = move || {
            let mut bursts = Bursts::default();
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Some(count) = bursts.look(dropped.count()) {
                    print_line(format_args!(
                        "tollgate: WARN: {count} lines of the log were dropped within a second, because its output is too slow or \
                         closed; tollgate_log_lines_dropped_total counts them"
                    ));
                }
            }
        };
        std::thread::Builder::new().name("tollgate-dropped".to_owned()).spawn(watch)?;
        Ok(Warnings { _end: end })
    }
}

/// Tells the first look of a burst from the others.
#[derive(Default)]
struct Bursts {
    count: u64,
    /// How many looks are left before a dropped line is one of another burst.
    looks_left: u32,
}

impl Bursts {
    /// How many lines were dropped since the last look, if a burst began since then.
    fn look(&mut self, count: u64) -> Option<u64> {
        let dropped = count - self.count;
        self.count = count;
        if dropped == 0 {
            self.looks_left = self.looks_left.saturating_sub(1);
            return None;
        }
        let is_new = self.looks_left == 0;
        self.looks_left = QUIET_LOOKS;
        is_new.then_some(dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_one_warning_however_long_it_lasts() {
        let mut bursts = Bursts::default();
        let mut look =
            |counts: &[u64]| counts.iter().filter_map(|count| bursts.look(*count)).collect::<Vec<_>>();
        assert!(look(&[0, 0]).is_empty());
        assert_eq!(look(&[5, 9, 9, 9, 1_000, 1_000]), [5]);
        // Nine quiet looks are not enough, and ten are.
        assert!(look(&[&[1_000; 8][..], &[1_001]].concat()).is_empty());
        assert_eq!(look(&[&[1_001; 10][..], &[1_003, 1_004]].concat()), [2]);
    }
}
