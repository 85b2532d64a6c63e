//! A real Prometheus that scrapes what a test serves, and its companion `promtool`.
//!
//! The server listens on a free loopback port, keeps its data in a directory of its own, and scrapes and evaluates rules every
//! fifth of a second, so that a test need not wait for long. The service that Debian's package brings is neither used nor
//! touched.

use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::daemon::{Daemon, Readiness, poll};
use crate::home::Home;
use crate::port::free_port;

const MISSING: &str = "prometheus is not installed: run apt-get install -y prometheus";

/// How long the server may take to start, on a machine that is busy with other tests.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How long one query may take.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// How often targets are scraped and rules evaluated.
const INTERVAL: &str = "200ms";

/// How to start a [`Prometheus`].
#[derive(Clone, Debug, Default)]
pub struct PrometheusBuilder {
    targets: Vec<SocketAddr>,
    rules: Vec<PathBuf>,
}

impl PrometheusBuilder {
    /// Scrapes `/metrics` there, as an instance of the job `tollgate`.
    #[must_use]
    pub fn target(mut self, address: SocketAddr) -> Self {
        self.targets.push(address);
        self
    }

    /// Evaluates the rules of this file.
    #[must_use]
    pub fn rules(mut self, file: impl Into<PathBuf>) -> Self {
        self.rules.push(file.into());
        self
    }

    /// Starts the server and waits until it answers.
    pub fn start(self) -> Prometheus {
        for _ in 0..5 {
            if let Some(server) = self.try_start() {
                return server;
            }
        }
        panic!("prometheus lost the race for its port five times")
    }

    fn try_start(&self) -> Option<Prometheus> {
        let (port, home) = (free_port(), Home::new("prometheus"));
        let config = home.path().join("prometheus.yml");
        std::fs::write(&config, self.config())
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", config.display()));
        let mut command = found("prometheus");
        command.current_dir(home.path()).args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"]);
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let mut daemon = Daemon::spawn(&mut command, &home);
        let ready = "Server is ready to receive web requests";
        match daemon.wait_until_ready(ready, &["address already in use"], START_LIMIT) {
            Readiness::Ready => Some(Prometheus { port, daemon: Some(daemon), home }),
            Readiness::Failed(why) => panic!("prometheus did not start: {why}"),
            Readiness::PortTaken => {
                daemon.end(Signal::KILL, START_LIMIT, &home);
                None
            }
        }
    }

    /// JSON is YAML too, and quotes what needs it.
    fn config(&self) -> String {
        let targets: Vec<String> = self.targets.iter().map(SocketAddr::to_string).collect();
        let config = json!({
            "global": { "scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL },
            "rule_files": self.rules,
            "scrape_configs": [{ "job_name": "tollgate", "static_configs": [{ "targets": targets }] }],
        });
        config.to_string()
    }
}

/// A running Prometheus. Dropping it ends the process and removes its directory.
pub struct Prometheus {
    port: u16,
    daemon: Option<Daemon>,
    home: Home,
}

impl Prometheus {
    /// A server that scrapes nothing yet.
    pub fn builder() -> PrometheusBuilder {
        PrometheusBuilder::default()
    }

    /// The port of its pages and its API.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What an expression is worth now: one object with `metric` and `value` for each series. An error is what Prometheus says
    /// is wrong with it.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let data = self.ask(&format!("/api/v1/query?query={}", escaped(expression)))?;
        match (&data["resultType"], &data["result"]) {
            (kind, Value::Array(series)) if kind == "vector" => Ok(series.clone()),
            (kind, other) => Err(format!("{expression} is no vector but {kind}: {other}")),
        }
    }

    /// The value of an expression that is worth one number; `None` where there is nothing.
    pub fn number(&self, expression: &str) -> Result<Option<f64>, String> {
        match self.query(expression)?.as_slice() {
            [] => Ok(None),
            [one] => {
                let text = one["value"][1].as_str().unwrap_or_default();
                text.parse().map(Some).map_err(|_| format!("{expression} is {one}"))
            }
            several => Err(format!("{expression} is worth {} numbers", several.len())),
        }
    }

    /// All rules as Prometheus has read them, with what they say now: `name`, `type`, `query`, `health`, and of alerts `state`.
    pub fn rules(&self) -> Result<Vec<Value>, String> {
        let data = self.ask("/api/v1/rules")?;
        let groups = data["groups"].as_array().into_iter().flatten();
        Ok(groups.filter_map(|group| group["rules"].as_array()).flatten().cloned().collect())
    }

    /// All targets that are scraped, with `health` and `lastError`.
    pub fn targets(&self) -> Result<Vec<Value>, String> {
        let data = self.ask("/api/v1/targets")?;
        Ok(data["activeTargets"].as_array().cloned().unwrap_or_default())
    }

    /// Asks until the answer is the one that is waited for: scrapes come when they come. After `limit` it panics with the
    /// last reason why it was not.
    pub fn wait_for<T>(
        &self,
        limit: Duration,
        mut answer: impl FnMut(&Prometheus) -> Result<T, String>,
    ) -> T {
        let mut last = String::new();
        let right = poll(limit, || answer(self).map_err(|why| last = why).ok());
        right.unwrap_or_else(|| panic!("not so after {limit:?}: {last}"))
    }

    fn ask(&self, path: &str) -> Result<Value, String> {
        let reply = get((Ipv4Addr::LOCALHOST, self.port).into(), path)
            .map_err(|error| format!("prometheus on port {}: {error}", self.port))?;
        let mut reply: Value =
            serde_json::from_str(&reply).map_err(|error| format!("{path}: {error} in {reply}"))?;
        match reply["status"] == "success" {
            true => Ok(reply["data"].take()),
            false => Err(format!("{path}: {}", reply["error"])),
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.end(Signal::KILL, START_LIMIT, &self.home);
        }
    }
}

/// Runs `promtool` with these arguments in a directory: what it says, on either stream. An error is a verdict of red.
pub fn promtool(directory: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = found("promtool");
    let output = command.current_dir(directory).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run promtool: {error}"));
    let received =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if output.status.success() { Ok(received) } else { Err(received) }
}

/// A program of the package, if it is there.
fn found(program: &str) -> Command {
    match Command::new(program).arg("--version").output() {
        Ok(_) => Command::new(program),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => panic!("{MISSING}"),
        Err(error) => panic!("cannot run {program}: {error}"),
    }
}

/// The body of a page. Asked for in HTTP/1.0, whose answers end with the connection and come in one piece.
fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, REPLY_LIMIT)?;
    stream.set_read_timeout(Some(REPLY_LIMIT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (_, body) = reply.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::InvalidData)?;
    Ok(body.to_owned())
}

/// As a value in the query of a URL.
fn escaped(text: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_');
    utf8_percent_encode(text, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn expressions_are_escaped() {
        for (text, expected) in [
            ("up", "up"),
            ("sum(rate(a_b[1m])) > 0", "sum%28rate%28a_b%5B1m%5D%29%29%20%3E%200"),
            ("a{b=~\"ü+&\"}", "a%7Bb%3D%7E%22%C3%BC%2B%26%22%7D"),
        ] {
            assert_eq!(escaped(text), expected);
        }
    }
}
