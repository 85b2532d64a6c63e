//! `tollgate llm`: counts the tokens of a request, and runs a file of requests within the limits of their models.

mod count;
mod run;

use std::process::ExitCode;

use crate::cli::{LlmArgs, LlmCommand};
use crate::failure::Failure;

/// Does what was asked. The exit code is 1 where requests failed.
pub(crate) fn run(asked: &LlmArgs) -> Result<ExitCode, Failure> {
    match &asked.what {
        LlmCommand::Count(asked) => count::run(asked).map(|()| ExitCode::SUCCESS),
        LlmCommand::Run(asked) => run::run(asked),
    }
}
