//! `tollgate bench`: throughput and latency on this machine, of the store that is named, and what memory costs.
//!
//! `target.rs` says which store is meant. The memory store is measured by `in_process.rs`, as threads use it; a remote one by
//! `shared.rs`, through the gate, as the tasks of a service use it. `load.rs` has what both need: keys, and which of them
//! comes next.

mod callers;
mod in_process;
mod load;
mod memory;
mod shared;
mod target;

use std::io::{self, Write};

use serde::Serialize;
use tollgate::config::StoreMode;

use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::screen::Ink;

/// How many checks a group has.
const GROUP: usize = 16;

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let config = target::config(args)?;
    match config.store.mode {
        StoreMode::Memory => in_process::run(args),
        StoreMode::Redis | StoreMode::Postgres => shared::run(args, config),
    }
}

/// How many threads are at work.
fn threads(args: &BenchArgs) -> u16 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    args.threads.unwrap_or(u16::try_from(cores).unwrap_or(u16::MAX))
}

/// What is measured in turn: neighbours that are the same are one.
fn distinct<T: PartialEq, const N: usize>(all: [T; N]) -> Vec<T> {
    let mut distinct = Vec::from(all);
    distinct.dedup();
    distinct
}

/// A call, for the table.
fn of_group(call: &str) -> String {
    if call == "check" { call.to_string() } else { format!("{call} of {GROUP}") }
}

/// Answers a program or a person.
fn answer<R: Serialize>(
    args: &BenchArgs,
    report: &R,
    print: impl FnOnce(&R, &mut io::BufWriter<io::StdoutLock<'static>>, Ink) -> io::Result<()>,
) -> Result<(), Failure> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let report = if args.json {
        serde_json::to_writer(&mut out, report).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        print(report, &mut out, Ink::of(&io::stdout()))
    };
    report.and_then(|()| out.flush()).map_err(Failure::answering)
}

/// `85ns`, `1.2us`, `3.4ms`: three digits say enough.
fn nanos(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns}ns"),
        1_000..1_000_000 => format!("{}.{}us", ns / 1_000, ns / 100 % 10),
        _ => format!("{}.{}ms", ns / 1_000_000, ns / 100_000 % 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        for (ns, text) in
            [(0, "0ns"), (999, "999ns"), (1_250, "1.2us"), (999_999, "999.9us"), (3_450_000, "3.4ms")]
        {
            assert_eq!(nanos(ns), text);
        }
    }
}
