//! `tollgate hash KEY`: the hash by which logs, traces and the page name a key.

use std::io::{self, Write};

use tollgate::Key;
use tollgate::telemetry::Telemetry;

use crate::cli::HashArgs;
use crate::failure::Failure;

/// Prints the hash of each key, one a line. The salt must be that of the server: without one, a server draws its own at start, and nobody
/// else can know its hashes.
pub(crate) fn run(args: &HashArgs) -> Result<(), Failure> {
    if std::env::var_os("RL_LOG_SALT").is_none_or(|salt| salt.is_empty()) {
        return Err(Failure::new(
            "RL_LOG_SALT is not set, and without the salt of the server nobody gets its hashes; set it here as the server has it \
             (a server without one draws a new salt at each start)",
        ));
    }
    let telemetry = Telemetry::new();
    let mut text = String::new();
    for key in &args.keys {
        let parsed = Key::parse(key).map_err(|error| {
            let meant = error.suggestion().map(|meant| format!(", such as {meant:?}")).unwrap_or_default();
            Failure::new(format!("{key:?} is no key: {error}{meant}"))
        })?;
        text.push_str(&telemetry.key_hash(parsed.canonical()));
        if args.keys.len() > 1 {
            text.push_str("  ");
            text.push_str(key);
        }
        text.push('\n');
    }
    io::stdout().lock().write_all(text.as_bytes()).map_err(Failure::answering)
}
