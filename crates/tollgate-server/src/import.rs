//! `tollgate import`: the configuration of other rate limiters as ours, and a list of what could not be carried over.

mod envoy;
mod name;
mod yaml;

use std::io::{self, Write};

use crate::cli::{ImportArgs, ImportEnvoyArgs, ImportFrom};
use crate::failure::{Failure, print_line};
use crate::figures::counted;
use crate::{source, validate};

/// Does what was asked.
pub(crate) fn run(asked: &ImportArgs) -> Result<(), Failure> {
    match &asked.from {
        ImportFrom::Envoy(asked) => from_envoy(asked),
    }
}

fn from_envoy(asked: &ImportEnvoyArgs) -> Result<(), Failure> {
    let name = source::name(&asked.file);
    let imported = envoy::import(&source::read_text(&asked.file)?)
        .map_err(|why| Failure::new(format!("cannot import {name}: {why}")))?;
    let text = format!("# Made from {name:?} of envoyproxy/ratelimit.\n{}", imported.toml);
    // What is handed over is sound, or it is not handed over.
    validate::parse(&text).map_err(|mistakes| {
        Failure::with_details(
            mistakes.iter().map(ToString::to_string).collect(),
            format!("cannot import {name}: what came of it is not valid"),
        )
    })?;
    match &asked.output {
        Some(file) if !source::is_stdin(file) => {
            std::fs::write(file, &text).map_err(|error| Failure::writing(&source::name(file), &error))?;
        }
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
    if !notes.is_empty() && !asked.partial {
        let message = format!("{summary}: look at the config, and say --partial once that is as you want it");
        return Err(Failure::with_details(notes, message));
    }
    for note in &notes {
        print_line(format_args!("{note}"));
    }
    print_line(format_args!("{summary}"));
    Ok(())
}
