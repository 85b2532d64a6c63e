//! `tollgate llm`: counts the tokens of a request, and runs a file of requests within the limits of their models.

mod count;
mod run;

use std::process::ExitCode;

use crate::cli::{LlmArgs, LlmCommand};
use crate::failure::Failure;

/// Runs the command. The exit code is 1 where requests failed.
pub(crate) fn run(args: &LlmArgs) -> Result<ExitCode, Failure> {
    match &args.what {
        LlmCommand::Count(args) => count::run(args).map(|()| ExitCode::SUCCESS),
        LlmCommand::Run(args) => run::run(args),
    }
}
