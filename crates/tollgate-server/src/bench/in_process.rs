//! The memory store, as threads of this process use it.
//!
//! `load` makes keys and has threads check them for a while; `memory` asks the system how much the process holds. The limit
//! that is measured always allows, so each check does all its work and writes what it decided. Latency is sampled: reading
//! the clock twice costs as much as a check, so one call in many is timed and the rest run free.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use tollgate::Tollgate;
use tollgate::config::Config;

use super::load::{self, Keys, Latency, Load};
use super::{GROUP, answer, distinct, memory, nanos, of_group};
use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::screen::{Ink, Progress, Tone};
use crate::table::{Cell, Side, Table};

/// How many keys the largest run has by default.
const MANY_KEYS: u32 = 1_000_000;

/// How many keys the middle runs have.
const SOME_KEYS: u32 = 1_000;

/// A limit that never runs out: a day of fifty million checks a second would not empty it.
const ENDLESS: &str =
    "[limits.bench]\nstrategy = \"token_bucket\"\nrate = \"1/ms\"\nburst = 4_000_000_000_000\n";

/// How many keys there is room for beyond those that are measured.
const ROOM: usize = 1024;

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    store: &'static str,
    keys: u32,
    threads: u16,
    group: usize,
    memory: Memory,
    runs: Vec<Run>,
}

/// What the keys cost.
#[derive(Debug, Serialize)]
struct Memory {
    keys: u32,
    /// `null` where the system does not tell.
    bytes: Option<u64>,
    bytes_per_key: Option<u64>,
}

/// One line of the table.
#[derive(Debug, Serialize)]
struct Run {
    keys: u32,
    call: &'static str,
    threads: u16,
    checks: u64,
    /// Of all threads together; what one thread spends on one check is its own line.
    checks_per_second: u64,
    ns_per_check: f64,
    /// One call in so many is timed.
    sampled_every: u32,
    /// Of one call, which in groups is many checks.
    latency_ns: Latency,
}

/// Runs the command.
pub(super) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.callers.is_some() {
        return Err(Failure::new(
            "--callers is for a shared store; the memory store is measured with --threads",
        ));
    }
    let time = Duration::from_secs(u64::from(args.seconds));
    let report = measure(args.keys.unwrap_or(MANY_KEYS), super::threads(args), time)?;
    answer(args, &report, print)
}

/// All runs, which together take about `time`.
fn measure(most: u32, threads: u16, time: Duration) -> Result<Report, Failure> {
    let failed = |error: tollgate::Error| Failure::new(error.to_string());
    let config = Config::parse(ENDLESS).map_err(|mistakes| Failure::new(mistakes.to_string()))?;
    // Nothing is swept: keys that were forgotten meanwhile would make the many look like few.
    let builder = Tollgate::builder().policy(config.policy).max_keys(most as usize + ROOM).sweep_every(None);
    let limiter = builder.build().and_then(|gate| gate.local("bench")).map_err(failed)?;
    let mut progress = Progress::new();

    let (sizes, crews) = (distinct([1, SOME_KEYS.min(most), most]), distinct([1, threads]));
    let shapes = sizes.len() * crews.len() * 2;
    let each = time / u32::try_from(shapes).unwrap_or(1);

    let keys = Keys::new(most);
    progress.step("filling the store …");
    let before = memory::resident_bytes();
    keys.each(|key| {
        let _ = std::hint::black_box(limiter.check(key));
    });
    let after = memory::resident_bytes();
    let bytes = before.zip(after).map(|(before, after)| after.saturating_sub(before));

    let mut runs = Vec::new();
    for &size in &sizes {
        for (call, group) in [("check", 1), ("check_many", GROUP)] {
            for &crew in &crews {
                progress.step(&format!("measuring {call}, {} keys, {crew} threads …", grouped(size.into())));
                let load = Load { limiter: &limiter, keys: &keys, size, group };
                let measured = load.run(crew, each);
                runs.push(Run {
                    keys: size,
                    call,
                    threads: crew,
                    checks: measured.checks,
                    checks_per_second: measured.checks_per_second,
                    ns_per_check: measured.busy.as_secs_f64() * 1e9 / (measured.checks.max(1) as f64),
                    sampled_every: load::sampled_every(group),
                    latency_ns: measured.latency,
                });
            }
        }
    }
    Ok(Report {
        store: "memory",
        keys: most,
        threads,
        group: GROUP,
        memory: Memory { keys: most, bytes, bytes_per_key: bytes.map(|bytes| bytes / u64::from(most)) },
        runs,
    })
}

fn print(report: &Report, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let mut table = Table::new(&[
        ("KEYS", Side::Right),
        ("CALL", Side::Left),
        ("THREADS", Side::Right),
        ("CHECKS/S", Side::Right),
        ("NS/CHECK", Side::Right),
        ("P50", Side::Right),
        ("P95", Side::Right),
        ("P99", Side::Right),
        ("P99.9", Side::Right),
        ("MAX", Side::Right),
    ]);
    for run in &report.runs {
        let call = of_group(run.call);
        let latency = &run.latency_ns;
        table.row(
            [grouped(run.keys.into()), call, run.threads.to_string()]
                .into_iter()
                .map(Cell::from)
                .chain([
                    Cell::toned(Tone::Strong, grouped(run.checks_per_second)),
                    format!("{:.1}", run.ns_per_check).into(),
                ])
                .chain(
                    [latency.p50, latency.p95, latency.p99, latency.p999, latency.max]
                        .map(|ns| nanos(ns).into()),
                ),
        );
    }
    table.print(out, ink, 0)?;
    let note = format!(
        "NS/CHECK is what one thread spends on one check. Latency is that of one call, and a group is one call. It is\n\
         sampled: one check in {} and one group in {} are timed, the clock's own cost included.",
        load::sampled_every(1),
        load::sampled_every(GROUP),
    );
    writeln!(out, "\n{}", ink.paint(Tone::Faint, note))?;
    match report.memory.bytes_per_key {
        Some(bytes) => {
            writeln!(out, "Memory: {bytes} bytes a key with {} keys.", grouped(report.memory.keys.into()))
        }
        None => writeln!(out, "Memory: this system does not tell."),
    }
}
