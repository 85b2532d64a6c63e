//! What a layer costs an HTTP service: the same axum service without one, behind ours, and behind tower_governor.
//!
//! `contestant.rs` says who takes part. `network.rs` measures them over loopback, where `server.rs` serves them all from one
//! core and `client.rs` loads them from another; `direct.rs` calls them without a network, so that the layer is seen by
//! itself. `rounds.rs` keeps what was measured, `goals.rs` and `report.rs` tell. Nothing is ever denied here, and every answer is
//! looked at: it must be a 200, with the header fields that its layer promises.

mod client;
pub(crate) mod contestant;
pub(crate) mod direct;
mod goals;
mod network;
mod report;
mod rounds;
mod server;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use self::rounds::{Cell, Plan};
use crate::machine::{self, Facts};

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds that every contestant runs in both parts [default: 15]
    #[arg(long, value_parser = clap::value_parser!(u16).range(3..=99))]
    rounds: Option<u16>,
    /// A smoke run: 3 short rounds. Its numbers mean little
    #[arg(long)]
    quick: bool,
    /// Also write the results and the facts of the machine to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// All that a run found out.
struct Results {
    network: Vec<Cell>,
    direct: Vec<Cell>,
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let (rounds, turn, calls) = if options.quick {
        (3, Duration::from_millis(100), 5_000)
    } else {
        (15, Duration::from_millis(300), 40_000)
    };
    let plan = Plan { rounds: options.rounds.map_or(rounds, usize::from), turn, calls };
    let json = options
        .json
        .as_ref()
        .map(|path| File::create(path).map_err(|error| crate::unwritable(path, &error)))
        .transpose()?;
    let contestants = contestant::all()?;
    let facts = Facts::read();
    report::print_head(&facts, &plan, &contestants);

    let cores = machine::cores();
    let network = network::measure(&plan, &cores, &contestants)?;
    report::print_network(&network);
    let direct = direct::measure(&plan, &cores, &contestants)?;
    report::print_direct(&direct);
    let results = Results { network, direct };
    let goals = goals::judge(&results);
    crate::report::print_goals(&goals);
    let load_after = machine::load_average();
    println!("load before {}, after {load_after}", facts.load);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        let json = report::to_json(&facts, &load_after, &plan, &results, &goals);
        writeln!(file, "{json:#}").map_err(|error| crate::unwritable(path, &error))?;
    }
    crate::goals::strictly(crate::goals::Strict::of(is_strict, options.quick), &goals)
}
