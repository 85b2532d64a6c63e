//! The binary `tollgate` as a server, for tests of its clients.
//!
//! It serves on free ports, in a directory of its own, and heeds nothing of the caller's environment. Where it listens is read
//! from what it says at start.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::process::Signal;

use crate::daemon::send;
use crate::home::Home;
use crate::http::{Answer, Connection};

/// The name of its config, in its directory.
const CONFIG: &str = "tollgate.toml";

/// What a server is to be like.
pub struct TollgateBuilder {
    binary: PathBuf,
    home: Home,
    has_config: bool,
    command: &'static str,
    args: Vec<String>,
    env: Vec<(String, String)>,
}

/// A running server. Dropping it kills it.
pub struct Tollgate {
    pid: u32,
    child: Mutex<Child>,
    binary: PathBuf,
    home: Home,
    addresses: Addresses,
    output: Arc<Mutex<String>>,
    readers: Mutex<Vec<JoinHandle<()>>>,
}

/// How a server ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code, if it was not killed.
    pub code: Option<i32>,
    /// All that it wrote to stdout (the log) and stderr.
    pub output: String,
}

/// Where it listens, as far as it says so.
#[derive(Clone, Copy, Debug, Default)]
struct Addresses {
    http: Option<SocketAddr>,
    resp: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
}

impl Addresses {
    fn note(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let (Some(face), Some(url)) = (words.next(), words.next()) else { return };
        let address = || url.split("//").nth(1)?.split('/').next()?.parse().ok();
        match face {
            "API" => self.http = address(),
            "RESP" => self.resp = address(),
            "Envoy" => self.grpc = address(),
            _ => {}
        }
    }
}

impl TollgateBuilder {
    /// With this policy; otherwise it brings its own.
    #[must_use]
    pub fn config(mut self, text: &str) -> Self {
        write(&self.home.path().join(CONFIG), text);
        self.has_config = true;
        self
    }

    /// Another command than `serve`.
    #[must_use]
    pub fn command(self, command: &'static str) -> Self {
        TollgateBuilder { command, ..self }
    }

    /// More arguments.
    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// With this in its environment.
    #[must_use]
    pub fn envs(mut self, env: &[(&str, &str)]) -> Self {
        self.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// Starts it, and waits until it has received where it is.
    pub fn start(self) -> Tollgate {
        let TollgateBuilder { binary, home, has_config, command, args, env } = self;
        let mut start = program(&binary, home.path());
        start.arg(command);
        for face in ["--listen", "--resp", "--grpc"] {
            if !args.iter().any(|arg| arg == face) {
                start.args([face, "127.0.0.1:0"]);
            }
        }
        if has_config {
            start.args(["--config", CONFIG]);
        }
        let start = start.args(args).envs(env).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = start.spawn().expect("the binary starts");
        home.server_runs(child.id());
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let (mut received, mut addresses) = (String::new(), Addresses::default());
        // The line to try is the last that it says of itself.
        loop {
            let start = received.len();
            assert_ne!(lines.read_line(&mut received).expect("text"), 0, "it ended: {received}");
            let line = &received[start..];
            addresses.note(line);
            if line.trim_start().starts_with("try ") {
                break;
            }
        }
        let output = Arc::new(Mutex::new(received));
        let log = BufReader::new(child.stdout.take().expect("piped"));
        let readers = vec![keep(lines, output.clone()), keep(log, output.clone())];
        Tollgate {
            pid: child.id(),
            child: Mutex::new(child),
            binary,
            home,
            addresses,
            output,
            readers: Mutex::new(readers),
        }
    }
}

/// Reads lines as they come, so that the server never waits, and keeps them.
fn keep(mut lines: impl BufRead + Send + 'static, output: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|length| length > 0) {
            output.lock().push_str(&line);
            line.clear();
        }
    })
}

impl Tollgate {
    /// To start the binary at this path: `env!("CARGO_BIN_EXE_tollgate")`.
    pub fn builder(binary: impl Into<PathBuf>) -> TollgateBuilder {
        TollgateBuilder {
            binary: binary.into(),
            home: Home::new("server"),
            has_config: false,
            command: "serve",
            args: Vec::new(),
            env: Vec::new(),
        }
    }

    /// The address of the API and the page.
    pub fn http(&self) -> SocketAddr {
        self.addresses.http.expect("it says where its API is")
    }

    /// Where the protocol of Redis is spoken.
    pub fn resp(&self) -> SocketAddr {
        self.addresses.resp.expect("it speaks RESP")
    }

    /// Where Envoy asks.
    pub fn grpc(&self) -> SocketAddr {
        self.addresses.grpc.expect("it speaks gRPC")
    }

    /// Where the API is, as people write it.
    pub fn url(&self) -> String {
        format!("http://{}", self.http())
    }

    /// Its directory.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Its number among the processes.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A connection to the API.
    pub fn connect(&self) -> Connection {
        Connection::open(self.http())
    }

    /// One request on a connection of its own.
    pub fn ask(&self, method: &str, path: &str, lines: &[&str], body: &str) -> Answer {
        self.connect().ask_with_body(method, path, lines, body)
    }

    /// One GET.
    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "")
    }

    /// One POST of JSON.
    pub fn post(&self, path: &str, body: &str) -> Answer {
        self.ask("POST", path, &["content-type: application/json"], body)
    }

    /// Writes another config into its file.
    pub fn write_config(&self, text: &str) {
        write(&self.home.path().join(CONFIG), text);
    }

    /// Changes the config, and comes back when the server has.
    pub fn reload(&self, text: &str) {
        self.write_config(text);
        let answer = self.post("/v1/reload", "");
        assert_eq!(answer.status, 200, "{answer:?}");
    }

    /// What it has written so far to stdout (the log) and stderr.
    pub fn output(&self) -> String {
        self.output.lock().clone()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send(self.pid, signal);
    }

    /// Waits for it to end by itself.
    pub fn ended(&self) -> Ended {
        let code = self.child.lock().wait().expect("it ends").code();
        self.home.server_is_gone();
        for reader in self.readers.lock().drain(..) {
            reader.join().expect("its output is read");
        }
        Ended { code, output: self.output() }
    }

    /// Asks it to end, and waits until it has.
    pub fn stop(&self) -> Ended {
        self.signal(Signal::TERM);
        self.ended()
    }

    /// Runs the binary against this server, in its directory.
    pub fn tollgate(&self, args: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = program(&self.binary, self.home());
        command.args(args).env("TOLLGATE_SERVER", self.url()).envs(env.iter().copied());
        command.output().expect("the binary starts")
    }
}

impl Drop for Tollgate {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        let _ = child.kill();
        let _ = child.wait();
        self.home.server_is_gone();
    }
}

/// The binary, in this directory and with nothing of the caller's environment that it would heed.
pub fn program(binary: &Path, home: &Path) -> Command {
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars_os() {
        let heeded = ["TOLLGATE_", "RL_", "REDIS_", "OTEL_"];
        if heeded.iter().any(|start| name.to_str().is_some_and(|name| name.starts_with(start))) {
            command.env_remove(name);
        }
    }
    command.current_dir(home).stdin(Stdio::null());
    command
}

/// Written beside it and put in its place, as editors do, so that nobody reads half of it.
fn write(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
    written.unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
