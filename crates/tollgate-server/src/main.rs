//! The binary `tollgate`: a thin `main` over one room for each command.
//!
//! `cli` says what may be asked; `serve`, `validate`, `backtest` (also `suggest`), `hash`, `bench`, `import` and `llm` answer, each through the library that
//! programs embed, so that what they tell holds for those programs too; `remote` asks a server that runs. Nothing here counts or
//! decides. What could not be done is a [`Failure`](failure::Failure): one clear line on stderr and exit code 2.

mod app;
mod backtest;
mod bench;
mod cli;
mod client;
mod config;
mod demo;
mod failure;
mod figures;
mod front;
mod hash;
mod import;
mod jobs;
mod llm;
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

fn main() -> ExitCode {
    let command = match cli::parse() {
        Ok(command) => command,
        Err(code) => return code,
    };
    let done = match &command {
        Command::Serve(asked) => serve::run(asked),
        Command::Demo(asked) => demo::run(asked),
        // The command whose answer is its exit code.
        Command::Check(asked) => {
            return remote::check(asked).unwrap_or_else(failure::Failure::report);
        }
        Command::Status(asked) => remote::status(asked),
        Command::Reset(asked) => remote::reset(asked),
        Command::Limits(asked) => remote::limits(asked),
        Command::Top(asked) => remote::top::run(asked),
        Command::Validate(asked) => validate::run(asked),
        Command::Jobs(asked) => jobs::run(asked),
        Command::Backtest(asked) => backtest::run(asked),
        Command::Suggest(asked) => backtest::suggest::run(asked),
        Command::Hash(asked) => hash::run(asked),
        Command::Bench(asked) => bench::run(asked),
        Command::Import(asked) => import::run(asked),
        // Requests of a file that failed are an exit code of their own.
        Command::Llm(asked) => return llm::run(asked).unwrap_or_else(failure::Failure::report),
        Command::Completions(asked) => cli::completions(asked),
        Command::Man(asked) => cli::man(asked),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
