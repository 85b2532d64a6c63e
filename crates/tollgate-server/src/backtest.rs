//! `tollgate backtest`: what a policy would have done to recorded traffic.
//!
//! The walk: `log` opens each file and finds out its format; `from_csv`, `from_jsonl` and `from_combined` split it into fields, with
//! `lines` counting physical lines; `intake` makes requests of them, or says what is wrong with a line; `traffic` holds them in
//! order; `replay` charges them on a virtual clock through the library; `decisions` writes what was said to each; `summary` and
//! `timeline` count; `report` prints and `html` draws. Files are written through `output`, each as a `draft` until it is whole. Nothing in here decides.

mod decisions;
mod draft;
mod from_combined;
mod from_csv;
mod from_jsonl;
mod html;
mod instant;
mod intake;
mod lines;
mod log;
mod output;
mod replay;
mod report;
mod summary;
mod timeline;
mod traffic;

use std::io::{self, Write};
use std::path::PathBuf;

use tollgate::config::Config;

use self::decisions::Decisions;
use self::html::Sources;
use self::intake::{BadLines, Intake};
use self::output::Output;
use self::replay::Gate;
use self::summary::Summary;
use crate::cli::BacktestArgs;
use crate::failure::Failure;
use crate::screen::Ink;
use crate::{source, validate};

/// Does what was asked.
pub(crate) fn run(asked: &BacktestArgs) -> Result<(), Failure> {
    let inputs = std::iter::once(&asked.config).chain(&asked.logs);
    if inputs.filter(|path| source::is_stdin(path)).count() > 1 {
        return Err(Failure::new("stdin can be read once; name - for one input only"));
    }
    if let (Some(decisions), Some(report)) = (&asked.decisions, &asked.report)
        && output::is_same(decisions, report)
    {
        let name = if source::is_stdin(report) { "stdout".to_string() } else { source::name(report) };
        return Err(Failure::new(format!("--decisions and --report both name {name}; name two files")));
    }
    let config = validate::load(&asked.config)?.gate;
    let open = |path: &PathBuf| Output::open(path, &asked.config, &asked.logs);
    let decisions = Decisions::to(asked.decisions.as_ref().map(open).transpose()?);
    let page = asked.report.as_ref().map(open).transpose()?;
    let summary_to_stderr = decisions.fill_stdout() || page.as_ref().is_some_and(Output::fills_stdout);
    let sources = Sources::of(asked, &config);
    let summary = replayed(asked, config, decisions)?;
    if let Some(mut page) = page {
        page.write(|out| out.write_all(html::page(&summary, &sources).as_bytes()))?;
        page.finish()?;
    }
    let told = if summary_to_stderr {
        print(&summary, asked.json, &mut io::stderr().lock(), Ink::of(&io::stderr()))
    } else {
        print(&summary, asked.json, &mut io::BufWriter::new(io::stdout().lock()), Ink::of(&io::stdout()))
    };
    told.map_err(Failure::answering)
}

/// Reads all logs, replays them and counts.
fn replayed(asked: &BacktestArgs, config: Config, decisions: Decisions) -> Result<Summary, Failure> {
    let files: Vec<String> = asked.logs.iter().map(|path| source::name(path)).collect();
    let names: Vec<String> = config.policy.rules().iter().map(|rule| rule.name().to_string()).collect();
    let bad_lines = if asked.skip_bad { BadLines::Skip } else { BadLines::Refuse };
    let mut intake = Intake::new(&names, &config, bad_lines)?;
    for (index, (path, name)) in asked.logs.iter().zip(&files).enumerate() {
        let index = u16::try_from(index).map_err(|_| Failure::new("a backtest takes at most 65,536 logs"))?;
        intake.begin_file(index, name);
        log::read(path, asked, &mut intake)?;
    }
    let mut harvest = intake.finish()?;
    harvest.traffic.order();
    let gate = Gate::new(config, &names, &harvest.traffic.requests)?;
    gate.replay(&harvest, &files, decisions)
}

fn print(summary: &Summary, json: bool, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    if json {
        serde_json::to_writer(&mut *out, summary)?;
        writeln!(out)?;
    } else {
        report::print(summary, out, ink)?;
    }
    out.flush()
}
