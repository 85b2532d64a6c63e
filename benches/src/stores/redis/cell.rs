//! redis-cell: a Redis module in Rust that decides in one command, `CL.THROTTLE`. The Redis that is measured has it loaded.
//!
//! crates.io has it as a library, so it is a dependency of a crate that is written and built here, beside what cargo builds.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use redis::aio::MultiplexedConnection;
use serde_json::Value;
use tollgate_testkit::redis::RedisServer;

use super::{BURST, PER_SECOND, raw};
use crate::server::target;
use crate::stores::load::{Answer, Caller, Draw};

/// The version that is measured, the newest on crates.io.
pub(crate) const VERSION: &str = "0.2.2";

pub(crate) const NAME: &str = "redis-cell";

/// How many connections race for one key, how often each asks, and how much fits.
const RACERS: usize = 16;
const ASKED_EACH: usize = 50;
const FITS: u32 = 100;

/// What stands beside its speed: how it is asked, and how much it admitted in a race for one key.
pub(super) async fn about(server: &RedisServer) -> Result<String, String> {
    let admitted = admitted_in_a_race(server).await?;
    let asked = RACERS * ASKED_EACH;
    Ok(format!(
        "one CL.THROTTLE a check; tells whole seconds; {admitted} of {FITS} admitted when {asked} raced"
    ))
}

async fn admitted_in_a_race(server: &RedisServer) -> Result<u32, String> {
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..RACERS {
        let mut connection = raw::connect(server).await?;
        racers.spawn(async move {
            let mut admitted = 0;
            for _ in 0..ASKED_EACH {
                let mut cmd = redis::cmd("CL.THROTTLE");
                // One a day, so that none comes back meanwhile.
                cmd.arg("cell-race").arg(FITS - 1).arg(1).arg(86_400);
                let answer: Vec<i64> =
                    cmd.query_async(&mut connection).await.map_err(|error| error.to_string())?;
                admitted += u32::from(answer.first() == Some(&0));
            }
            Ok::<u32, String>(admitted)
        });
    }
    racers.join_all().await.into_iter().sum()
}

/// Builds the module, and finds it.
pub(super) fn module() -> Result<String, String> {
    let module = build(&target()?.join("peers/redis-cell"))?;
    module.into_os_string().into_string().map_err(|_| "the path of redis-cell is not text".into())
}

fn build(folder: &Path) -> Result<PathBuf, String> {
    let write = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).map_err(|error| format!("writing {name}: {error}"))
    };
    std::fs::create_dir_all(folder.join("src")).map_err(|error| format!("making a folder: {error}"))?;
    write("src/lib.rs", "")?;
    write(
        "Cargo.toml",
        &format!(
            "[package]\nname = \"peer\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n[workspace]\n\n\
             [dependencies]\nredis-cell = \"={VERSION}\"\n"
        ),
    )?;
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(["build", "--release", "-p", "redis-cell", "--message-format", "json-render-diagnostics"]);
    command.arg("--manifest-path").arg(folder.join("Cargo.toml"));
    command.arg("--target-dir").arg(folder.join("target"));
    let built = command.stderr(Stdio::null()).output();
    let built = built.map_err(|error| format!("building redis-cell: {error}"))?;
    if !built.status.success() {
        return Err(format!("building redis-cell: {command:?} ended with {}", built.status));
    }
    module_of(&String::from_utf8_lossy(&built.stdout))
        .ok_or_else(|| "building redis-cell: cargo named no shared library".into())
}

/// The shared library of redis-cell, from what cargo says of all that it builds, a line each.
fn module_of(messages: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut files = messages
        .filter(|message| {
            message["target"]["name"] == "redis_cell" || message["target"]["name"] == "redis-cell"
        })
        .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default());
    files.find_map(|file| file.as_str().filter(|file| file.ends_with(".so")).map(PathBuf::from))
}

/// Asks the module, with the numbers of our own bucket.
#[derive(Clone)]
pub(super) struct Throttle(pub(super) MultiplexedConnection);

impl Caller for Throttle {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let mut cmd = redis::cmd("CL.THROTTLE");
        // It admits one more than its burst says.
        cmd.arg(draw.one()).arg(BURST - 1).arg(PER_SECOND).arg(1);
        let answered: Result<Vec<i64>, _> = cmd.query_async(&mut self.0).await;
        answered.map(|answer| Answer::one(answer.first() == Some(&0))).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_is_found_in_what_cargo_says() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"libc"},"filenames":["/t/liblibc.rlib"]}
not json
{"reason":"compiler-artifact","target":{"name":"redis_cell"},"filenames":["/t/libredis_cell-1.so"]}"#;
        assert_eq!(module_of(messages), Some("/t/libredis_cell-1.so".into()));
        assert_eq!(module_of(&messages[..80]), None);
    }
}
