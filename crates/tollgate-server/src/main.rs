//! The binary `tollgate`: a thin `main` over the library of this crate, which `fuzz/` uses too.

use std::process::ExitCode;

fn main() -> ExitCode {
    tollgate_server::run()
}
