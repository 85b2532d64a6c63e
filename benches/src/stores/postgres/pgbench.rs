//! What PostgreSQL can do at most: its own load generator, which spends next to nothing on itself.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::CONNECTIONS;
use crate::stores::rounds::Contestant;

const MISSING: &str = "pgbench is not installed beside postgres: run apt-get install -y postgresql";

/// Nothing but the protocol.
pub(super) const SELECT: &str = "select 1;\n";

/// One row of `bare`; see raw.rs.
pub(super) fn upsert(keys: u32) -> String {
    format!(
        "\\set key random(1, {keys})\n\
         insert into bare as t (key, n) values (:key, 1) on conflict (key) do update set n = t.n + 1 returning n;\n"
    )
}

#[derive(Clone)]
pub(super) struct Pgbench {
    program: PathBuf,
}

impl Pgbench {
    /// Beside the newest server, which is the one that is started; or on the path, where that comes from there too.
    pub(super) fn find() -> Result<Pgbench, String> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().filter_map(Result::ok);
        let servers = versions.filter_map(|entry| {
            let version: u32 = entry.file_name().to_str()?.parse().ok()?;
            let dir = entry.path().join("bin");
            dir.join("initdb").is_file().then_some((version, dir))
        });
        let on_the_path = || {
            let path = std::env::var_os("PATH")?;
            std::env::split_paths(&path).find(|dir| dir.join("initdb").is_file())
        };
        let dir = servers.max().map(|(_, dir)| dir).or_else(on_the_path);
        let program = dir.map(|dir| dir.join("pgbench")).filter(|program| program.is_file());
        program.map(|program| Pgbench { program }).ok_or_else(|| MISSING.to_owned())
    }

    /// A contestant that runs a script for a second, the least that pgbench knows.
    pub(super) fn contestant(&self, name: &'static str, about: &str, url: &str, script: &str) -> Contestant {
        let (pgbench, url, script) = (self.clone(), url.to_owned(), script.to_owned());
        Contestant::program(name, about, move || pgbench.run(&url, &script, CONNECTIONS, "off"))
    }

    /// The same, each on disk before it is answered, on so many connections.
    pub(super) fn durable_contestant(
        &self,
        name: &'static str,
        about: &str,
        url: &str,
        script: &str,
        clients: usize,
    ) -> Contestant {
        let (pgbench, url, script) = (self.clone(), url.to_owned(), script.to_owned());
        Contestant::program(name, about, move || pgbench.run(&url, &script, clients, "on"))
    }

    fn run(
        &self,
        url: &str,
        script: &str,
        clients: usize,
        synchronous_commit: &str,
    ) -> Result<(u64, Duration), String> {
        let failed = |error: std::io::Error| format!("running {}: {error}", self.program.display());
        let clients = clients.to_string();
        let mut child = Command::new(&self.program)
            .args(["--no-vacuum", "--protocol=prepared", "--time=1", "--client", &clients, "--file=-"])
            .arg(url)
            .env("PGOPTIONS", format!("-c synchronous_commit={synchronous_commit}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(script.as_bytes()).map_err(failed)?;
        }
        let output = child.wait_with_output().map_err(failed)?;
        let text = String::from_utf8_lossy(&output.stdout);
        match parse(&text) {
            Some(found) if output.status.success() => Ok(found),
            _ => Err(format!("pgbench: {}{text}", String::from_utf8_lossy(&output.stderr))),
        }
    }
}

/// How many transactions, in how long.
fn parse(text: &str) -> Option<(u64, Duration)> {
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next();
    let transactions: u64 = value("number of transactions actually processed: ")?.parse().ok()?;
    let per_second: f64 = value("tps = ")?.parse().ok()?;
    (per_second > 0.0).then(|| (transactions, Duration::from_secs_f64(transactions as f64 / per_second)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pgbench_says_is_read() {
        let text = "transaction type: -\nnumber of transactions actually processed: 500\nlatency average = 1 ms\n\
                    tps = 1000.0 (without initial connection time)\n";
        assert_eq!(parse(text), Some((500, Duration::from_millis(500))));
        assert_eq!(parse("pgbench: error"), None);
    }
}
