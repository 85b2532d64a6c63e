//! Charges from the decision log of a server (`[server] log`): lines with the target `tollgate::decision`.
//!
//! A line has the limit that bound and the hash of the key, not the key: the replay counts by that hash, as `hash:…`, so overrides of
//! single keys do not apply. Of a decision over several limits there is the one that bound. By default the log has denials only, and
//! not all of them; a replay of all traffic needs `log = "debug"` and `log_all = true`. A call that waited is a charge at the end of its wait. Logs of
//! earlier versions have no cost, so each is 1 there. Other lines of a server's log are passed over.

use std::borrow::Cow;
use std::io::BufRead;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::from_jsonl::{given, invalid_json, text_or_number};
use super::intake::{Entry, Intake};
use super::lines::{Line, Lines, TOO_LONG};
use super::mistake::Mistake;
use crate::failure::Failure;

/// The target of the lines of decisions.
const TARGET: &str = "tollgate::decision";

/// What a line says, as far as a backtest reads it.
#[derive(Deserialize)]
struct Logged<'a> {
    #[serde(borrow)]
    timestamp: Cow<'a, str>,
    #[serde(borrow)]
    target: Cow<'a, str>,
    #[serde(borrow, default)]
    operation: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    limiter: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    key_hash: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    cost: Option<&'a RawValue>,
    #[serde(default)]
    suppressed: Option<u64>,
    #[serde(default)]
    left_out: Option<u64>,
}

/// Reads a whole file into `intake`.
pub(super) fn read<R: BufRead>(mut lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    let mut key = String::new();
    while let Some(line) = lines.next_line().map_err(|error| Failure::reading(name, &error))? {
        let (line, bytes) = match line {
            Line::Whole(line, bytes) => (line, bytes.trim_ascii()),
            Line::TooLong(line, start) => {
                intake.take(line, Err(Mistake::new("line", &String::from_utf8_lossy(start), TOO_LONG)))?;
                continue;
            }
        };
        if bytes.is_empty() {
            continue;
        }
        let logged = match logged(bytes) {
            Ok(logged) => logged,
            Err(mistake) => {
                intake.take(line, Err(mistake))?;
                continue;
            }
        };
        intake.note_left_out(logged.suppressed.unwrap_or(0).saturating_add(logged.left_out.unwrap_or(0)));
        match logged.entry(&mut key) {
            Some(entry) => intake.take(line, entry)?,
            None => intake.pass_over(),
        }
    }
    Ok(())
}

/// Whether a line is one of a server's log.
pub(super) fn is_log(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Any<'a> {
        #[serde(borrow)]
        target: Cow<'a, str>,
        #[serde(rename = "level")]
        _level: Cow<'a, str>,
        #[serde(rename = "timestamp")]
        _timestamp: Cow<'a, str>,
    }
    serde_json::from_slice::<Any<'_>>(line).is_ok_and(|line| line.target.starts_with("tollgate"))
}

fn logged(bytes: &[u8]) -> Result<Logged<'_>, Mistake> {
    let text = str::from_utf8(bytes).map_err(|_| Mistake::not_utf8("line", bytes))?;
    serde_json::from_str(text).map_err(|error| invalid_json(text, &error))
}

impl<'a> Logged<'a> {
    /// The charge; `None` for a line that is none.
    fn entry<'k>(&'a self, key: &'k mut String) -> Option<Result<Entry<'k>, Mistake>>
    where
        'a: 'k,
    {
        const CHARGES: [&str; 4] = ["charge", "reserve", "acquire", "wait"];
        let operation = self.operation.as_deref().unwrap_or("charge");
        if self.target != TARGET || !CHARGES.contains(&operation) {
            return None;
        }
        // A key that was malformed has no hash, and charged nothing.
        let (limiter, hash) = (self.limiter.as_deref()?, self.key_hash.as_deref()?);
        key.clear();
        key.push_str("hash:");
        key.push_str(hash);
        let cost = given(self.cost).map(|raw| text_or_number("cost", raw)).transpose();
        Some(cost.map(|cost| Entry {
            time: Some(Cow::Borrowed(&*self.timestamp)),
            limit: Some(Cow::Borrowed(limiter)),
            key: Some(Cow::Borrowed(key)),
            cost,
        }))
    }
}
