//! `tollgate jobs`: the counts of limits on background jobs and the waiting jobs, from the database that has the jobs.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tollgate::Key;
use tollgate_jobs::{ClosedKey, JobGate, JobStatus, JobsReader};
use tollgate_kernel::Micros;

use crate::cli::{JobsArgs, JobsCommand};
use crate::config::Config;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};
use crate::{source, validate};

/// Runs the command.
pub(crate) fn run(args: &JobsArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        match &args.command {
            JobsCommand::Status { config, json } => {
                let gate = attach(config).await?;
                gate.read_overrides().await;
                let statuses = gate.statuses().await.map_err(failed)?;
                let closed = gate.closed().await.map_err(failed)?;
                let answered = if *json { answer(&statuses, &closed) } else { print(&statuses, &closed) };
                answered.map_err(Failure::answering)
            }
            JobsCommand::Close { key, wait, config } => {
                let span = wait.parse::<Micros>();
                let span =
                    span.map_err(|error| Failure::new(format!("{wait:?} is no duration: {}", error.fix())))?;
                let in_force = attach(config).await?.close(key, span.into()).await.map_err(failed)?;
                match Micros::from(in_force) > span {
                    true => print_result(format_args!(
                        "was closed for longer, and stays so for {}",
                        seconds(in_force)
                    )),
                    false => print_result(format_args!("closed for {span}")),
                }
            }
            JobsCommand::Open { key, config } => {
                let config = load(config)?;
                let reader = JobsReader::of(&config.gate, &config.jobs).map_err(failed)?;
                reader.reach().await.map_err(failed)?;
                // The status shows what is closed by its label: what a label has closed is opened by it.
                let is_label = Key::parse(key).is_ok_and(|key| key.version().is_none());
                let opened = reader.open(key, is_label, &config.jobs).await.map_err(failed)?;
                match (opened.opened, opened.called) {
                    (0, _) => print_result(format_args!("was not closed")),
                    (_, None) => print_result(format_args!(
                        "open; waiting jobs look again when their slot or their longest sleep has passed"
                    )),
                    (_, Some(called)) => print_result(format_args!("open; {called} waiting jobs are called")),
                }
            }
        }
    })
}

fn failed(error: tollgate_jobs::Error) -> Failure {
    Failure::new(error.to_string())
}

fn print_result(words: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    writeln!(io::stdout().lock(), "{words}").map_err(Failure::answering)
}

/// A config that says something of jobs.
fn load(path: &Path) -> Result<Config, Failure> {
    let config = validate::load(path)?;
    if config.jobs.is_empty() {
        let name = source::name(path);
        return Err(Failure::new(format!(
            "{name} says nothing of jobs; write [jobs.types.NAME] with limit and window"
        )));
    }
    Ok(config)
}

/// The gate of a config, which makes no tables.
async fn attach(path: &Path) -> Result<JobGate, Failure> {
    let config = load(path)?;
    JobGate::from_config(&config.gate, &config.jobs).await.map_err(failed)?.attach().map_err(failed)
}

#[derive(Serialize)]
struct Answer<'a> {
    keys: Vec<AnswerKey<'a>>,
    closed: Vec<AnswerClosed<'a>>,
}

#[derive(Serialize)]
struct AnswerKey<'a> {
    key: &'a str,
    limit_name: &'a str,
    count: u64,
    limit: u64,
    remaining: u64,
    resets_after_ms: u64,
    waiting: u64,
    next_slot_ms: Option<u64>,
    backlog_ends_ms: Option<u64>,
}

impl<'a> AnswerKey<'a> {
    fn of(status: &'a JobStatus) -> AnswerKey<'a> {
        AnswerKey {
            key: &status.key,
            limit_name: &status.limit_name,
            count: status.count,
            limit: status.limit,
            remaining: status.remaining,
            resets_after_ms: ms(status.resets_after),
            waiting: status.waiting,
            next_slot_ms: status.next_slot.map(ms),
            backlog_ends_ms: status.backlog_ends.map(ms),
        }
    }
}

#[derive(Serialize)]
struct AnswerClosed<'a> {
    key: &'a str,
    wait_ms: u64,
    reason: &'a str,
}

/// Rounded up, as everywhere.
fn ms(span: Duration) -> u64 {
    Micros::from(span).get().div_ceil(1_000)
}

fn answer(statuses: &[JobStatus], closed: &[ClosedKey]) -> io::Result<()> {
    let keys = statuses.iter().map(AnswerKey::of).collect();
    let closed =
        closed.iter().map(|key| AnswerClosed { key: &key.label, wait_ms: ms(key.wait), reason: &key.reason });
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &Answer { keys, closed: closed.collect() })?;
    writeln!(out)?;
    out.flush()
}

/// In whole seconds, rounded up.
fn seconds(span: Duration) -> String {
    Micros::from_secs(Micros::from(span).as_secs_ceil()).to_string()
}

fn print(statuses: &[JobStatus], closed: &[ClosedKey]) -> io::Result<()> {
    let (mut out, ink) = (io::BufWriter::new(io::stdout().lock()), Ink::of(&io::stdout()));
    let mut table = Table::new(&[
        ("KEY", Side::Left),
        ("COUNT", Side::Right),
        ("LIMIT", Side::Right),
        ("LEFT", Side::Right),
        ("RESETS IN", Side::Right),
        ("WAITING", Side::Right),
        ("NEXT IN", Side::Right),
        ("BACKLOG DONE IN", Side::Right),
    ]);
    let or_dash = |span: Option<Duration>| span.map_or_else(|| "-".to_owned(), seconds);
    for status in statuses {
        table.row([
            Cell::toned(Tone::Strong, &*status.key),
            grouped(status.count).into(),
            grouped(status.limit).into(),
            grouped(status.remaining).into(),
            seconds(status.resets_after).into(),
            grouped(status.waiting).into(),
            or_dash(status.next_slot).into(),
            or_dash(status.backlog_ends).into(),
        ]);
    }
    table.print(&mut out, ink, 0)?;
    for key in closed {
        writeln!(out, "{} is closed for {}: {}", key.label, seconds(key.wait), key.reason)?;
    }
    out.flush()
}
