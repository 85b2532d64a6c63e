//! Tollgate beside its peers, in one run on one machine.
//!
//! `cargo run --release -p tollgate-benches -- in-process` measures what one check costs a caller inside the same process,
//! and how much memory a key takes. The walk: `scene.rs` says what is measured, `workload.rs` draws the keys,
//! `contestant.rs` knows who takes part, `harness.rs` and `memory.rs` measure, `report.rs` and `goals.rs` tell. `-- stores`
//! measures the shared stores, on servers that it starts: `stores.rs`; `-- latency` fails where their latency is not what is asked for:
//! `stores/latency.rs`. `-- http` measures what a layer costs an HTTP service:
//! `http.rs`. `-- server` measures the server beside others: `server.rs`; `-- hostile` how honest clients of it fare among attackers:
//! `hostile.rs`; `-- soak` whether it stays as it is for hours: `soak.rs`; `-- jobs` what limits cost background jobs: `jobs.rs`; `-- gateway` what the gateway of language models adds:
//! `gateway.rs`; `-- count` the counting of tokens: `count.rs`; `-- instructions` counts the instructions of a check and of a layer:
//! `instructions.rs`; `-- backtest` how fast logs are replayed, beside `wc -l`: `backtest.rs`. Absolute numbers belong to the machine and its neighbours; ratios from one run are the result.

mod backtest;
mod contestant;
mod count;
mod gateway;
mod goals;
mod harness;
mod hostile;
mod http;
mod instructions;
mod jobs;
mod machine;
mod memory;
mod report;
mod scene;
mod server;
mod soak;
mod stores;
mod workload;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::contestant::{BATCH, ENTRANTS, Entrant};
use crate::harness::Plan;
use crate::machine::Facts;
use crate::report::Results;
use crate::scene::Selection;
use crate::workload::KeySet;

#[derive(Parser)]
#[command(about = "Tollgate beside its peers, in one run on one machine")]
struct CommandLine {
    /// Ends with an error where a goal was missed, or was not measured in a whole run; `latency` and `soak` always do for a missed one
    #[arg(long, global = true)]
    strict: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Time per check and bytes per key inside one process
    InProcess(InProcess),
    /// Checks per second, latency and bytes per key on Redis and PostgreSQL, which it starts
    Stores(stores::Options),
    /// Whether Redis and PostgreSQL decide as fast as is asked for; fails where they do not
    Latency(stores::latency::Options),
    /// What a layer costs an axum service, over loopback and by itself
    Http(http::Options),
    /// The server under load, beside Redis, throttlecrab-server and servers that answer always the same
    Server(server::Options),
    #[command(name = server::constant::COMMAND, hide = true)]
    Constant(server::constant::Options),
    /// What the gateway of language models adds to a call, beside the upstream itself and LiteLLM's proxy
    Gateway(gateway::Options),
    /// How long honest clients of `tollgate serve` wait while others attack it
    Hostile(hostile::Options),
    /// Jobs per second, drains and waiting jobs in apalis on PostgreSQL, which it starts
    Jobs(jobs::Options),
    /// Memory and latency of `tollgate serve` on Redis for hours, under load, reloads and faults; fails where they grow
    Soak(soak::Options),
    /// Megabytes of text a second that are counted in tokens, beside tiktoken-rs
    Count(count::Options),
    /// Lines a second that `tollgate backtest` replays, beside `wc -l`
    Backtest(backtest::Options),
    /// Instructions of one check and of one call of a layer, counted by callgrind
    Instructions(instructions::Options),
    #[command(name = instructions::COMMAND, hide = true)]
    RunOperation { operation: String, contestant: String },
    #[command(name = memory::COMMAND, hide = true)]
    GrowByKeys { contestant: String, keys: u32 },
}

#[derive(Args)]
struct InProcess {
    /// Rounds that every contestant runs in every cell [default: 9]
    #[arg(long, value_parser = clap::value_parser!(u16).range(3..=30))]
    rounds: Option<u16>,
    /// A smoke run: 3 short rounds, at most a million keys. Its numbers mean little
    #[arg(long)]
    quick: bool,
    /// Contestants to run; ratios need `governor`
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Cells to run, by their words in any order: `1T/1M/uniform/allow/check`, `2T/deny`, `pair`, `memory/5M`
    #[arg(long, value_name = "WORD/WORD..", value_delimiter = ',')]
    cells: Vec<String>,
    /// Also write the results and the facts of the machine to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let CommandLine { strict, command } = CommandLine::parse();
    let done = match command {
        Command::InProcess(options) => in_process(&options, strict),
        Command::Stores(options) => stores::run(&options, strict),
        Command::Latency(options) => stores::latency::run(&options),
        Command::Http(options) => http::run(&options, strict),
        Command::Server(options) => server::run(&options, strict),
        Command::Constant(options) => server::constant::run(&options),
        Command::Gateway(options) => gateway::run(&options, strict),
        Command::Hostile(options) => hostile::run(&options, strict),
        Command::Jobs(options) => jobs::run(&options, strict),
        Command::Soak(options) => soak::run(&options),
        Command::Count(options) => count::run(&options, strict),
        Command::Backtest(options) => backtest::run(&options, strict),
        Command::Instructions(options) => instructions::run(&options),
        Command::RunOperation { operation, contestant } => {
            instructions::run_operation(&operation, &contestant)
        }
        Command::GrowByKeys { contestant, keys } => find(&contestant).map(|entrant| {
            println!("{}", memory::growth(entrant, KeySet { count: keys }));
        }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn in_process(options: &InProcess, is_strict: bool) -> Result<(), String> {
    let mut selection = Selection::parse(&options.cells)?;
    if options.quick {
        selection = selection.up_to(scene::MILLION);
    }
    // A slice, and the eighth of it that warms up, are whole batches.
    let (rounds, slice) = if options.quick { (3, BATCH * 1024) } else { (9, BATCH * 4096) };
    let plan = Plan { rounds: options.rounds.map_or(rounds, usize::from), slice, cores: machine::cores() };
    let entrants: Vec<&'static Entrant> = if options.only.is_empty() {
        ENTRANTS.iter().collect()
    } else {
        options.only.iter().map(|name| find(name)).collect::<Result<_, _>>()?
    };
    // Opened before minutes of measuring, not after.
    let json = options
        .json
        .as_ref()
        .map(|path| File::create(path).map_err(|error| unwritable(path, &error)))
        .transpose()?;
    let facts = Facts::read();
    report::print_head(&facts, &plan, &entrants);

    let mut results = Results::default();
    for group in scene::groups(&selection) {
        let prepared = harness::prepare(&group, &entrants);
        for (scene, threads) in &group.scenes {
            let threads: Vec<usize> = threads.iter().copied().filter(|&n| n <= plan.cores.len()).collect();
            let start = results.measurements.len();
            results.measurements.extend(harness::run_scene(&plan, *scene, &threads, &prepared));
            report::print_scene(&results, &results.measurements[start..]);
        }
    }
    if plan.cores.len() < 2 {
        println!("Two threads need two cores, and this process has {}.\n", plan.cores.len());
    }
    for keys in scene::memory_sizes(&selection) {
        results.memory.extend(memory::measure(keys, &entrants)?);
    }
    report::print_memory(&results);
    let goals = goals::judge(&results);
    report::print_goals(&goals);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        let json = report::to_json(&facts, &machine::load_average(), &plan, &results, &goals);
        writeln!(file, "{json:#}").map_err(|error| unwritable(path, &error))?;
    }
    let is_partial = options.quick || !options.only.is_empty() || !options.cells.is_empty();
    goals::strictly(goals::Strict::of(is_strict, is_partial), &goals)
}

fn unwritable(path: &Path, error: &std::io::Error) -> String {
    format!("writing the results to {}: {error}", path.display())
}

fn find(name: &str) -> Result<&'static Entrant, String> {
    ENTRANTS.iter().find(|entrant| entrant.name == name).ok_or_else(|| {
        let names: Vec<&str> = ENTRANTS.iter().map(|entrant| entrant.name).collect();
        format!("no contestant is called '{name}'; they are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_can_be_strict() {
        use clap::CommandFactory;

        let commands: Vec<String> = CommandLine::command()
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(|command| command.get_name().to_owned())
            .collect();
        assert!(commands.len() >= 12, "{commands:?}");
        for command in commands {
            let parsed = CommandLine::try_parse_from(["benches", &command, "--strict"]);
            assert!(parsed.is_ok_and(|line| line.strict), "{command}");
            assert!(
                CommandLine::try_parse_from(["benches", &command]).is_ok_and(|line| !line.strict),
                "{command}"
            );
        }
    }
}
