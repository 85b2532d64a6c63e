//! The server under load, beside Redis, throttlecrab-server, and servers that answer always the same.
//!
//! `process.rs` starts them all, each on the core that servers have; `load.rs` asks from the other core, in the words of
//! `resp.rs`, `http1.rs` and `http2.rs`; `cast.rs` says who is asked what; `constant.rs` is who decides nothing. `rounds.rs`
//! keeps what was measured, `goals.rs` and `report.rs` tell. Every answer is looked at: a server that answers something else than
//! what the cell says is reported. One request at a time costs mostly the kernel, so no goal is about a multiple there.

mod cast;
pub(crate) mod constant;
mod goals;
mod http1;
mod http2;
mod load;
mod process;
mod proto;
mod report;
mod resp;
mod rounds;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

pub(crate) use self::process::{build_tollgate, free_address, on, target};
use self::rounds::{Cell, Plan};
use crate::machine::{self, Core, Facts};

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds that every contestant runs [default: 11]
    #[arg(long, value_parser = clap::value_parser!(u16).range(3..=99))]
    rounds: Option<u16>,
    /// A smoke run: 3 short rounds of a thousand keys. Its numbers mean little
    #[arg(long)]
    quick: bool,
    /// Some protocols only
    #[arg(long, value_delimiter = ',')]
    only: Vec<Which>,
    /// This program in place of the one that is built from here
    #[arg(long, value_name = "FILE")]
    tollgate: Option<PathBuf>,
    /// Also write the results and the facts of the machine to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    Resp,
    Http,
    Grpc,
}

impl Which {
    const fn title(self) -> &'static str {
        match self {
            Which::Resp => "RESP, 50 connections, 64 deep",
            Which::Http => "HTTP, 50 connections",
            Which::Grpc => "gRPC, connections x calls",
        }
    }

    fn measure(self, plan: &Plan, core: Option<Core>, programs: &Programs) -> Result<Vec<Cell>, String> {
        match self {
            Which::Resp => cast::resp(plan, core, programs),
            Which::Http => cast::http(plan, core, programs),
            Which::Grpc => cast::grpc(plan, core, programs),
        }
    }
}

/// The servers that are programs of their own.
struct Programs {
    tollgate: PathBuf,
    throttlecrab: PathBuf,
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let (rounds, turn, keys) = if options.quick {
        (3, Duration::from_millis(150), 1_000)
    } else {
        (11, Duration::from_millis(500), 10_000)
    };
    let plan = Plan { rounds: options.rounds.map_or(rounds, usize::from), turn, keys };
    let wants = |which: &Which| options.only.is_empty() || options.only.contains(which);
    if wants(&Which::Resp) {
        crate::stores::find_redis()?;
    }
    let json = options
        .json
        .as_ref()
        .map(|path| File::create(path).map_err(|error| crate::unwritable(path, &error)))
        .transpose()?;
    let programs = Programs {
        tollgate: options.tollgate.clone().map_or_else(process::build_tollgate, Ok)?,
        throttlecrab: process::install_throttlecrab()?,
    };
    let facts = Facts::read();
    report::print_head(&facts, &plan);

    let cores = machine::cores();
    let (server_core, client_core) = (cores.first().copied(), cores.get(1).or(cores.first()).copied());
    let mut cells = Vec::new();
    for which in [Which::Resp, Which::Http, Which::Grpc].into_iter().filter(wants) {
        let measured = process::on(client_core, || which.measure(&plan, server_core, &programs))?;
        report::print_cells(which.title(), &measured);
        cells.extend(measured);
    }
    let goals = goals::judge(&cells);
    crate::report::print_goals(&goals);
    let load_after = machine::load_average();
    println!("load before {}, after {load_after}", facts.load);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        let json = report::to_json(&facts, &load_after, &plan, &cells, &goals);
        writeln!(file, "{json:#}").map_err(|error| crate::unwritable(path, &error))?;
    }
    crate::goals::strictly(
        crate::goals::Strict::of(is_strict, options.quick || !options.only.is_empty()),
        &goals,
    )
}
