//! A server process of a test's own, on a port of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tollgate_testkit::tollgate::{TollgateBuilder, program};

pub(crate) use tollgate_testkit::tollgate::Tollgate;

/// Limits that answer slowly enough for a test to know what they say.
pub(crate) const POLICY: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "1/h"
burst = 3
overrides = { "user:vip" = { burst = 30 } }

[limits.login]
strategy = "fixed_window"
limit = 2
window = "1h"

[limits.watched]
strategy = "fixed_window"
limit = 1
window = "1h"
shadow = true

[limits.uploads]
strategy = "concurrency"
limit = 2
lease = "1h"

[limits.even]
strategy = "leaky_bucket"
rate = "1/h"
capacity = 2

[limits.free]
unlimited = true

[limits.shut]
blocked = true
"#;

/// With the limits above, counting in memory.
pub(crate) fn start() -> Tollgate {
    with(POLICY, &[], &[])
}

pub(crate) fn with(config: &str, args: &[&str], env: &[(&str, &str)]) -> Tollgate {
    builder().config(config).args(args.iter().copied()).envs(env).start()
}

pub(crate) fn builder() -> TollgateBuilder {
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate"))
}

/// The binary, in this directory and with nothing of the caller's environment that it would heed.
pub(crate) fn command(home: &Path, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = program(Path::new(env!("CARGO_BIN_EXE_tollgate")), home);
    command.args(args).envs(env.iter().copied());
    command
}

/// An empty directory.
pub(crate) fn home() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("server-{}-{count}", std::process::id()));
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir_all(&home).unwrap();
    home
}

/// What the repository has at this path.
pub(crate) fn of_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A body with what depends on the moment taken out: times that are not 0, and names of reservations.
pub(crate) fn steady(body: &str) -> String {
    let mut steady = String::new();
    let mut rest = body;
    while let Some(at) = ["_after_ms\":", "delay_ms\":", "reservation\":\""]
        .iter()
        .filter_map(|mark| rest.find(mark).map(|at| at + mark.len()))
        .min()
    {
        steady.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        match &rest[..end] {
            same @ ("0" | "null") => steady.push_str(same),
            _ => steady.push('~'),
        }
        rest = &rest[end..];
    }
    steady + rest
}
