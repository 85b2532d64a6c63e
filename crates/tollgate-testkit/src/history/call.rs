//! One call, and the recorder that takes down what many threads do.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use super::History;

/// What is known of a call's effect on the store. What the caller saw is separate, in [`Call::label`]:
/// a call that timed out is `Ambiguous` even if a fallback then let the caller through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store admitted it and was heard to say so.
    Admitted,
    /// The store denied it and was heard to say so.
    Denied,
    /// It may have been carried out, now or later, or not.
    Ambiguous,
    /// It failed, and for certain changed nothing.
    NotApplied,
    /// The store was not asked.
    FellBack,
}

/// One call. Times are of [`now_us`]; the store's time may be of any clock of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Who paid: tests number their keys.
    pub key: u64,
    /// When the call began.
    pub start_us: u64,
    /// When its answer was there.
    pub end_us: u64,
    /// How much was asked for.
    pub cost: u64,
    /// What became of it in the store.
    pub outcome: Outcome,
    /// The version of the key's state that an admission made.
    pub version: Option<u64>,
    /// When the store decided, by the clock that it decides by.
    pub store_time_us: Option<u64>,
    /// Who answered the caller: `store`, `fallback_open` and the like.
    pub label: Cow<'static, str>,
}

/// Microseconds of the machine's monotonic clock, which all its processes share.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanos.unwrap_or(0) / 1000
}

const SHARDS: usize = 16;

/// Takes down calls from many threads; each thread mostly finds its own list unlocked.
#[derive(Debug, Default)]
pub struct Recorder {
    shards: [Mutex<Vec<Call>>; SHARDS],
}

impl Recorder {
    /// An empty recorder.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// Takes down one call.
    pub fn record(&self, call: Call) {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static SHARD: Cell<usize> = Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        self.shards[SHARD.get()].lock().push(call);
    }

    /// All that was taken down so far; the recorder is empty afterwards.
    pub fn take(&self) -> History {
        self.shards.iter().flat_map(|shard| std::mem::take(&mut *shard.lock())).collect()
    }
}

/// One line of text, for a child process to report: `key start end cost outcome version store_time label`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome =
            OUTCOMES.iter().find(|(outcome, _)| *outcome == self.outcome).map_or("?", |(_, name)| name);
        write!(f, "{} {} {} {} {outcome} ", self.key, self.start_us, self.end_us, self.cost)?;
        for optional in [self.version, self.store_time_us] {
            match optional {
                Some(number) => write!(f, "{number} ")?,
                None => write!(f, "- ")?,
            }
        }
        f.write_str(&self.label)
    }
}

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Admitted, "admitted"),
    (Outcome::Denied, "denied"),
    (Outcome::Ambiguous, "ambiguous"),
    (Outcome::NotApplied, "not-applied"),
    (Outcome::FellBack, "fell-back"),
];

impl FromStr for Call {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let mut fields = line.splitn(8, ' ');
        let mut next = || fields.next().ok_or_else(|| format!("not a call: {line:?}"));
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| format!("not a number: {text:?} in {line:?}"));
        let optional = |text: &str| if text == "-" { Ok(None) } else { number(text).map(Some) };
        let (key, start_us, end_us, cost) =
            (number(next()?)?, number(next()?)?, number(next()?)?, number(next()?)?);
        let name = next()?;
        let outcome = OUTCOMES.iter().find(|(_, known)| *known == name).map(|(outcome, _)| *outcome);
        let outcome = outcome.ok_or_else(|| format!("not an outcome: {name:?} in {line:?}"))?;
        let (version, store_time_us) = (optional(next()?)?, optional(next()?)?);
        let label = Cow::Owned(next()?.to_owned());
        Ok(Call { key, start_us, end_us, cost, outcome, version, store_time_us, label })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_survive_the_way_through_text() {
        for (outcome, _) in OUTCOMES {
            for version in [None, Some(7)] {
                let label = Cow::Borrowed("fallback open");
                let call = Call {
                    key: 1,
                    start_us: 2,
                    end_us: 3,
                    cost: 4,
                    outcome,
                    version,
                    store_time_us: None,
                    label,
                };
                assert_eq!(call.to_string().parse(), Ok(call));
            }
        }
        "1 2 3 4 admitted - -".parse::<Call>().unwrap_err();
        "1 2 3 4 perhaps - - store".parse::<Call>().unwrap_err();
    }
}
