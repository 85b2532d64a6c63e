//! `tollgate backtest`: what a policy would have done to recorded traffic.
//!
//! The walk: `log` opens each file, which `unpack` unpacks, and finds out its format; `from_csv`, `from_jsonl` (with `from_trail`), `from_combined`,
//! `from_json_access` and `from_decision_log` split it into fields, with
//! `lines` counting physical lines; `intake` makes requests of them, or says by a `mistake` what is wrong with a line; `traffic` holds them in
//! order; `replay` charges them on a virtual clock through the library; `decisions` writes what was said to each; `summary`, `denied` and
//! `timeline` count; `peaks` says what each key needed; `report` prints, `compare` prints several policies side by side and `html` draws; `shown` says how
//! keys are shown. Files are written through `output`, each as a `draft` until it is whole. Nothing in here decides.

mod compare;
mod decisions;
mod denied;
mod draft;
mod from_combined;
mod from_csv;
mod from_decision_log;
mod from_json_access;
mod from_jsonl;
mod from_trail;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod html;
pub(crate) mod instant;
mod intake;
mod lines;
mod log;
mod mistake;
mod output;
mod peaks;
mod replay;
mod report;
mod shown;
pub(crate) mod suggest;
mod summary;
mod timeline;
mod traffic;
mod unpack;

use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Value, json};
use tollgate::config::Config;
use tollgate_llm::LlmConfig;

use self::compare::Replayed;
use self::decisions::Decisions;
use self::denied::DeniedKeys;
use self::html::Sources;
use self::intake::{BadLines, BadValues, Harvest, Intake};
use self::output::Output;
use self::replay::Gate;
use self::shown::ShownKeys;
use crate::cli::{BacktestArgs, LogArgs};
use crate::failure::Failure;
use crate::screen::{Ink, Progress};
use crate::source::ReadBytes;
use crate::{source, validate};

/// Runs the command.
pub(crate) fn run(args: &BacktestArgs) -> Result<(), Failure> {
    refuse_misuse(args)?;
    let open = |path: &Option<PathBuf>| {
        path.as_ref().map(|path| Output::open(path, &args.config, &args.log.logs)).transpose()
    };
    let shown = ShownKeys::hashed(args.log.hash_keys);
    // All are checked before any of them is replayed, which may take long.
    let configs = args.config.iter().map(|path| validate::load(path)).collect::<Result<Vec<_>, _>>()?;
    let mut decisions = Some(Decisions::to(open(&args.decisions)?));
    let mut denied = Some(open(&args.denied_keys)?);
    let page = open(&args.report)?;
    let fills = |output: &Option<Output>| output.as_ref().is_some_and(Output::fills_stdout);
    let to_stderr = decisions.as_ref().is_some_and(Decisions::fill_stdout)
        || denied.as_ref().is_some_and(fills)
        || fills(&page);
    let has_peaks = args.peaks || page.is_some();
    let mut replayed = Vec::new();
    for (path, config) in args.config.iter().zip(configs) {
        let crate::config::Config { gate: config, llm, .. } = config;
        let sources = Sources::of(path, &args.log.logs, &config, &shown);
        let (harvest, gate, files) = read(&args.log, &source::name(path), config, llm)?;
        let decisions = decisions.take().unwrap_or_else(|| Decisions::to(None));
        let kept = (args.config.len() > 1).then(Vec::new);
        let denied = DeniedKeys { output: denied.take().flatten(), kept };
        let (mut summary, denied) = gate.replay(&harvest, &files, &shown, decisions, denied)?;
        if has_peaks {
            gate.add_peaks(&mut summary, &harvest);
        }
        replayed.push(Replayed::new(summary, sources, denied));
    }
    if let Some(mut page) = page {
        page.write(|out| out.write_all(html::page(&replayed).as_bytes()))?;
        page.finish()?;
    }
    let printed = if to_stderr {
        print(&replayed, args, &mut io::stderr().lock(), Ink::of(&io::stderr()))
    } else {
        print(&replayed, args, &mut io::BufWriter::new(io::stdout().lock()), Ink::of(&io::stdout()))
    };
    printed.map_err(Failure::answering)
}

/// What cannot be answered, whatever the files have.
fn refuse_misuse(args: &BacktestArgs) -> Result<(), Failure> {
    let inputs = || args.config.iter().chain(&args.log.logs);
    let from_stdin = inputs().filter(|path| source::is_stdin(path)).count();
    let logs_from_stdin = args.log.logs.iter().any(|path| source::is_stdin(path));
    if from_stdin > 1 {
        return Err(Failure::new("stdin can be read once; name - for one input only"));
    }
    if args.config.len() > 1 && logs_from_stdin {
        return Err(Failure::new(
            "several policies read the logs once each, and stdin can be read once; name a file",
        ));
    }
    let outputs =
        [("--decisions", &args.decisions), ("--denied-keys", &args.denied_keys), ("--report", &args.report)];
    for (index, (name, path)) in outputs.iter().enumerate() {
        if args.config.len() > 1 && path.is_some() && *name != "--report" {
            return Err(Failure::new(format!("{name} is written for one policy; name one --config")));
        }
        for (other, other_path) in &outputs[index + 1..] {
            if let (Some(one), Some(two)) = (path, other_path)
                && output::is_same(one, two)
            {
                let file = if source::is_stdin(two) { "stdout".to_string() } else { source::name(two) };
                return Err(Failure::new(format!("{name} and {other} both name {file}; name two files")));
            }
        }
    }
    Ok(())
}

/// Reads all logs for a policy, in the order of replay.
fn read(
    args: &LogArgs,
    config_name: &str,
    config: Config,
    llm: Option<LlmConfig>,
) -> Result<(Harvest, Gate, Vec<String>), Failure> {
    let files: Vec<String> = args.logs.iter().map(|path| source::name(path)).collect();
    let names: Vec<String> = config.policy.rules().iter().map(|rule| rule.name().to_string()).collect();
    let bad_lines = if args.strict { BadLines::Refuse } else { BadLines::Skip };
    let bad_values = if args.hash_keys { BadValues::Hidden } else { BadValues::Shown };
    let mut intake = Intake::new(&names, &config, llm, bad_lines, bad_values)?;
    let read = ReadBytes::default();
    let total = source::total_bytes(args.logs.iter().map(PathBuf::as_path));
    intake.follow(Progress::of_bytes(total, read.clone()));
    for (index, (path, name)) in args.logs.iter().zip(&files).enumerate() {
        let index = u16::try_from(index).map_err(|_| Failure::new("a backtest takes at most 65,536 logs"))?;
        intake.begin_file(index, name);
        log::read(path, args, config_name, &read, &mut intake)?;
    }
    let mut harvest = intake.finish()?;
    harvest.traffic.order();
    let gate = Gate::new(config, &names, &harvest.traffic.requests)?;
    Ok((harvest, gate, files))
}

fn print(replayed: &[Replayed], args: &BacktestArgs, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    match replayed {
        [only] if args.json => {
            serde_json::to_writer(&mut *out, &only.summary)?;
            writeln!(out)?;
        }
        [only] => report::print(&only.summary, out, ink)?,
        several if args.json => {
            let policy = |one: &Replayed| -> serde_json::Result<Value> {
                let mut value = serde_json::to_value(&one.summary)?;
                value["config"] = json!(one.sources.config);
                Ok(value)
            };
            let policies = several.iter().map(policy).collect::<Result<Vec<_>, _>>()?;
            serde_json::to_writer(&mut *out, &json!({ "policies": policies }))?;
            writeln!(out)?;
        }
        several => compare::print(several, out, ink)?,
    }
    out.flush()
}
