//! `tollgate import`: the configuration of other rate limiters as ours, and a list of what could not be carried over.

mod envoy;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod kong;
mod limitador;
mod litellm;
mod name;
mod nginx;
mod written;
mod yaml;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use tollgate::config::Mistake;

use self::written::Imported;
use crate::cli::{ImportArgs, ImportFileArgs, ImportFrom};
use crate::config::Config;
use crate::failure::{Failure, print_line};
use crate::figures::counted;
use crate::source;

/// Runs the command.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    match &args.from {
        ImportFrom::Envoy(args) => import(args, "envoyproxy/ratelimit", envoy::import),
        ImportFrom::Kong(args) => import(args, "Kong", kong::import),
        ImportFrom::Limitador(args) => import(args, "limitador", limitador::import),
        ImportFrom::Litellm(args) => import(args, "LiteLLM", litellm::import),
        ImportFrom::Nginx(args) => import(args, "nginx", nginx::import),
    }
}

fn import(
    args: &ImportFileArgs,
    from: &str,
    read: fn(&str) -> Result<Imported, String>,
) -> Result<(), Failure> {
    let name = source::name(&args.file);
    let imported = read(&source::read_text(&args.file)?)
        .map_err(|why| Failure::new(format!("cannot import {name}: {why}")))?;
    let text = format!("# Made from {name:?} of {from}.\n{}", imported.toml);
    // What is handed over is sound, or it is not handed over.
    Config::parse(&text).map_err(|mistakes| {
        // Lines of the config that is not written would help nobody.
        let located = |mistake: &Mistake| match imported.line_of(&mistake.field) {
            Some(line) => format!("{name}:{line}: {}", mistake.message()),
            None => format!("{name}: {}", mistake.message()),
        };
        Failure::with_details(
            mistakes.iter().map(located).collect(),
            format!("cannot import {name}: what came of it is not valid"),
        )
    })?;
    match &args.output {
        Some(file) if !source::is_stdin(file) => write(file, &text, args.force)?,
        _ => {
            let mut out = io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::answering)?;
        }
    }
    let notes: Vec<String> = imported.notes.iter().map(|note| format!("{name}:{note}")).collect();
    let summary = format!(
        "{} and {}; {} could not be carried over",
        counted(imported.limits as u64, "limit"),
        counted(imported.rules as u64, "rule"),
        counted(notes.len() as u64, "thing"),
    );
    // A script that goes on as if all of it were there would let pass what was limited before.
    if !notes.is_empty() && !args.partial {
        let message = format!("{summary}: look at the config, and say --partial once that is as you want it");
        return Err(Failure::with_details(notes, message));
    }
    for note in &notes {
        print_line(format_args!("{note}"));
    }
    print_line(format_args!("{summary}"));
    Ok(())
}

/// Writes a config. An existing file is replaced only with `--force`: it may have been edited.
fn write(file: &Path, text: &str, is_forced: bool) -> Result<(), Failure> {
    let name = source::name(file);
    let mut options = OpenOptions::new();
    match is_forced {
        true => options.write(true).create(true).truncate(true),
        false => options.write(true).create_new(true),
    };
    let written = options.open(file).and_then(|mut open| open.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::new(format!(
            "cannot write {name}: it is there already; name another file, or say --force to replace it"
        )),
        _ => Failure::writing(&name, &error),
    })
}
