//! A remote store, as the tasks of a service use it.
//!
//! The limit has a random name, so that its keys meet nobody's; it always allows, and a key that is not removed is as good as
//! new within half a minute, which in Redis means gone. A store that is not there when the measuring begins is an error. One
//! that fails meanwhile is shown in the table, and as an error after it.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tollgate::config::{Config, StoreMode};
use tollgate::store::{Failure as StoreFailure, StoreHealth, StoreState};
use tollgate::{ChargeId, Tollgate};

use super::callers::{Load, Scene};
use super::load::Latency;
use super::{GROUP, answer, distinct, nanos, of_group};
use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::figures::{counted, grouped};
use crate::screen::{Ink, Progress, Tone};
use crate::table::{Cell, Side, Table};

/// How many keys the larger runs have by default: they are removed one by one.
const MANY_KEYS: u32 = 10_000;

/// How many callers there are at once by default.
const CALLERS: u16 = 64;

/// Never empty at less than a million checks a second of one key, and full again after twenty seconds.
const ENDLESS: &str = "strategy = \"token_bucket\"\nrate = \"1000/ms\"\nburst = 20_000_000\n";

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    store: &'static str,
    /// Under which the keys were written.
    limit: String,
    keys: u32,
    callers: u16,
    threads: u16,
    group: usize,
    runs: Vec<Run>,
    /// Whether somebody ended it before all was measured.
    interrupted: bool,
    keys_written: u64,
    keys_left: u64,
    /// How calls to the store failed, and how often.
    failures: Vec<Failed>,
}

#[derive(Debug, Serialize)]
struct Failed {
    failure: &'static str,
    calls: u64,
}

/// One line of the table.
#[derive(Debug, Serialize)]
struct Run {
    keys: u32,
    call: &'static str,
    callers: u16,
    /// Answered by the store.
    checks: u64,
    checks_per_second: u64,
    /// Handed to the store, which may send several as one.
    store_calls_per_second: u64,
    fallbacks: u64,
    errors: u64,
    /// Of one call that the store answered, which in groups is many checks.
    latency_ns: Latency,
}

/// Runs the command.
pub(super) fn run(args: &BenchArgs, config: Config) -> Result<(), Failure> {
    let threads = super::threads(args);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads.into()).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start the runtime: {error}")))?;
    let (report, failure) = runtime.block_on(measure(args, config, threads))?;
    answer(args, &report, print)?;
    failure.map_or(Ok(()), Err)
}

/// All runs, and what went wrong with the store meanwhile.
async fn measure(
    args: &BenchArgs,
    mut config: Config,
    threads: u16,
) -> Result<(Report, Option<Failure>), Failure> {
    let (most, callers) = (args.keys.unwrap_or(MANY_KEYS), args.callers.unwrap_or(CALLERS));
    let mode = config.store.mode;
    let mut progress = Progress::new();
    progress.step(&format!("connecting to {mode} …"));
    let limit = format!("tollgate-bench-{}", ChargeId::random());
    let policy = Config::parse(&format!("[limits.{limit}]\n{ENDLESS}"));
    config.policy = policy.map_err(|mistakes| Failure::new(mistakes.to_string()))?.policy;
    let cannot = |error: tollgate::Error| Failure::new(format!("cannot measure {mode}: {error}"));
    let gate = Tollgate::open(&config).await.map_err(cannot)?;
    // Unlike a charge, this does not fall back.
    let _ = gate.status(&limit, "user:0").await.map_err(cannot)?;
    let scene = Arc::new(Scene::new(gate, limit, most));
    stop_on_signal(&scene)?;

    let (sizes, crews) = (distinct([1, most]), distinct([1, callers]));
    let shapes = sizes.len() * crews.len() * 2;
    let each = Duration::from_secs(args.seconds.into()) / u32::try_from(shapes).unwrap_or(1);
    let (mut runs, mut error) = (Vec::new(), None);
    'runs: for &size in &sizes {
        for (call, group) in [("check", 1), ("check_many", GROUP)] {
            for &crew in &crews {
                progress.step(&format!("measuring {call}, {} keys, {crew} callers …", grouped(size.into())));
                let measured = scene.run(Load { size, group }, crew, each).await;
                if scene.is_stopped() {
                    break 'runs;
                }
                error = error.or(measured.error);
                runs.push(Run {
                    keys: size,
                    call,
                    callers: crew,
                    checks: measured.checks,
                    checks_per_second: measured.checks_per_second,
                    store_calls_per_second: measured.calls_per_second,
                    fallbacks: measured.fallbacks,
                    errors: measured.errors,
                    latency_ns: measured.latency,
                });
                if scene.gate.store_health().state != StoreState::Up {
                    break 'runs;
                }
            }
        }
    }
    let health = scene.gate.store_health();
    progress.step("removing the keys …");
    let removed = scene.remove().await;
    let report = Report {
        store: mode.name(),
        limit: scene.limit.clone(),
        keys: most,
        callers,
        threads,
        group: GROUP,
        runs,
        interrupted: scene.is_stopped(),
        keys_written: removed.written,
        keys_left: removed.left,
        failures: failures(&health),
    };
    let failure = report.failure(error);
    Ok((report, failure))
}

/// Ctrl-c and SIGTERM end the measuring; what was written is removed all the same.
fn stop_on_signal(scene: &Arc<Scene>) -> Result<(), Failure> {
    let listen =
        |kind| signal(kind).map_err(|error| Failure::new(format!("cannot wait for signals: {error}")));
    let (mut term, mut int) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let scene = scene.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        scene.stop();
    });
    Ok(())
}

fn failures(health: &StoreHealth) -> Vec<Failed> {
    let failed = |failure: StoreFailure| Failed { failure: failure.name(), calls: health.failures(failure) };
    StoreFailure::ALL.map(failed).into_iter().filter(|failed| failed.calls > 0).collect()
}

impl Report {
    /// What to say if the store did not answer everything.
    fn failure(&self, error: Option<tollgate::Error>) -> Option<Failure> {
        let missed: u64 = self.runs.iter().map(|run| run.fallbacks + run.errors).sum();
        if missed == 0 {
            return None;
        }
        let mut reasons: Vec<String> = self
            .failures
            .iter()
            .map(|failed| format!("{} of the kind {}", counted(failed.calls, "failure"), failed.failure))
            .collect();
        reasons.extend(error.map(|error| error.to_string()));
        let checks = counted(missed, "check");
        Some(Failure::new(format!(
            "{} failed while it was measured: {checks} without an answer of its own ({})",
            self.store,
            reasons.join(", ")
        )))
    }

    /// What became of the keys.
    fn keys_in_words(&self) -> String {
        let wrote = format!("Wrote {} under the limit {}", counted(self.keys_written, "key"), self.limit);
        if self.keys_left == 0 {
            return format!("{wrote}, and removed them: 0 keys are left.");
        }
        let gone = match self.store == StoreMode::Redis.name() {
            true => "what is there of them expires within a minute",
            false => "the next cleanup of a process that uses this database deletes them",
        };
        format!("{wrote}; {} could not be removed: {gone}.", counted(self.keys_left, "key"))
    }
}

fn print(report: &Report, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let mut table = Table::new(&[
        ("KEYS", Side::Right),
        ("CALL", Side::Left),
        ("CALLERS", Side::Right),
        ("CHECKS/S", Side::Right),
        ("CALLS/S", Side::Right),
        ("P50", Side::Right),
        ("P95", Side::Right),
        ("P99", Side::Right),
        ("MAX", Side::Right),
        ("FALLBACKS", Side::Right),
        ("ERRORS", Side::Right),
    ]);
    for run in &report.runs {
        let latency = &run.latency_ns;
        let count = |count: u64| match count {
            0 => Cell::from("0"),
            some => Cell::toned(Tone::Bad, grouped(some)),
        };
        let mut row: Vec<Cell> = vec![
            grouped(run.keys.into()).into(),
            of_group(run.call).into(),
            run.callers.to_string().into(),
            Cell::toned(Tone::Strong, grouped(run.checks_per_second)),
            grouped(run.store_calls_per_second).into(),
        ];
        row.extend([latency.p50, latency.p95, latency.p99, latency.max].map(|ns| nanos(ns).into()));
        row.extend([run.fallbacks, run.errors].map(count));
        table.row(row);
    }
    table.print(out, ink, 0)?;
    let note = "CHECKS/S are those that the store has answered. Latency is that of one call, and a group is one call. CALLS/S\n\
        are handed to the store, which sends single checks together that come at the same time. A key that is in a\n\
        group more than once takes a call for each time, so groups on one key save nothing.";
    writeln!(out, "\n{}", ink.paint(Tone::Faint, note))?;
    if report.interrupted {
        writeln!(out, "Ended before everything was measured.")?;
    }
    writeln!(out, "Store: {}. {}", report.store, report.keys_in_words())
}
