//! The commands of the binary `tollgate`: one module for each, behind [`run`].
//!
//! `cli` parses the arguments. `serve`, `validate`, `backtest` (also `suggest`), `hash`, `bench`, `import` and `llm` use the
//! library that programs embed, so their results hold for those programs too. `remote` calls a running server. Nothing here
//! counts or decides. An error is a [`Failure`](failure::Failure): one clear line on stderr and exit code 2.

mod app;
mod backtest;
mod bench;
mod cli;
mod client;
mod config;
mod demo;
mod difference;
mod failure;
mod figures;
mod fleet;
mod front;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod hash;
mod import;
mod jobs;
mod llm;
mod overrides;
mod peer_prefix;
mod reload;
mod remote;
mod screen;
mod serve;
mod source;
mod stats;
mod table;
mod token;
mod validate;

use std::process::ExitCode;

use cli::Command;

/// Runs the command of the command line.
pub fn run() -> ExitCode {
    let command = match cli::parse() {
        Ok(command) => command,
        Err(code) => return code,
    };
    let done = match &command {
        Command::Serve(args) => serve::run(args),
        Command::Demo(args) => demo::run(args),
        // The command whose result is its exit code.
        Command::Check(args) => {
            return remote::check(args).unwrap_or_else(failure::Failure::report);
        }
        Command::Status(args) => remote::status(args),
        Command::Reset(args) => remote::reset(args),
        Command::Override(args) => remote::overrides::run(args),
        Command::Limits(args) => remote::limits(args),
        Command::Top(args) => remote::top::run(args),
        Command::Validate(args) => validate::run(args),
        Command::Jobs(args) => jobs::run(args),
        Command::Backtest(args) => backtest::run(args),
        Command::Suggest(args) => backtest::suggest::run(args),
        Command::Hash(args) => hash::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Import(args) => import::run(args),
        // Failed requests of a file have their own exit code.
        Command::Llm(args) => return llm::run(args).unwrap_or_else(failure::Failure::report),
        Command::Completions(args) => cli::completions(args),
        Command::Man(args) => cli::man(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
