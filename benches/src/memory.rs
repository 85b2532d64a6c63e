//! Bytes per key: how much a process grows when a contestant takes in a key set.
//!
//! Each number comes from a process of its own, because an allocator that has served someone before hides part of the growth.
//! The process is this program again, with a hidden command; it prints the bytes and ends. Keys pass through one buffer, so
//! that only what the contestant keeps is counted.

use std::process::Command;

use crate::contestant::{Call, Entrant, Regime};
use crate::machine::resident_bytes;
use crate::workload::KeySet;

/// The hidden command.
pub(crate) const COMMAND: &str = "grow-by-keys";

/// What one contestant takes for one key.
pub(crate) struct BytesPerKey {
    pub(crate) contestant: &'static str,
    pub(crate) keys: KeySet,
    pub(crate) bytes: f64,
}

/// Measures everyone who keeps keys of their own, each in a new process.
pub(crate) fn measure(keys: KeySet, entrants: &[&'static Entrant]) -> Result<Vec<BytesPerKey>, String> {
    let keeps_keys = |entrant: &&&'static Entrant| entrant.calls.contains(&Call::Check);
    entrants.iter().filter(keeps_keys).map(|entrant| measure_one(keys, entrant)).collect()
}

fn measure_one(keys: KeySet, entrant: &'static Entrant) -> Result<BytesPerKey, String> {
    let failed =
        |why: String| format!("measuring the memory of {} with {} keys: {why}", entrant.name, keys.count);
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let output = Command::new(program)
        .args([COMMAND, entrant.name, &keys.count.to_string()])
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_string()));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let bytes: f64 =
        printed.trim().parse().map_err(|_| failed(format!("it printed '{}'", printed.trim())))?;
    Ok(BytesPerKey { contestant: entrant.name, keys, bytes: bytes / f64::from(keys.count) })
}

/// The hidden command's work: the growth of this process, in bytes.
pub(crate) fn growth(entrant: &Entrant, keys: KeySet) -> u64 {
    let contestant = (entrant.build)(Regime::Allow);
    let before = resident_bytes();
    contestant.prepare(keys);
    resident_bytes().saturating_sub(before)
}
