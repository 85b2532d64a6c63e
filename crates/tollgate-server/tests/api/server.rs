//! A server process of a test's own, on a port of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};
use tollgate_testkit::http::{Answer, Connection};

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

/// A running server. Dropping it kills it.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    #[allow(dead_code)] // Not asked by every test, as some of what follows.
    pub(crate) resp: Option<SocketAddr>,
    #[allow(dead_code)]
    pub(crate) grpc: Option<SocketAddr>,
    pub(crate) home: PathBuf,
    stderr: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

/// How a server ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stderr: String,
}

impl Server {
    /// With the limits above, counting in memory.
    pub(crate) fn start() -> Server {
        Server::with(POLICY, &[], &[])
    }

    pub(crate) fn with(config: &str, args: &[&str], env: &[(&str, &str)]) -> Server {
        let home = home();
        std::fs::write(home.join("tollgate.toml"), config).unwrap();
        let serve = ["serve", "--config", "tollgate.toml", "--listen", "127.0.0.1:0"];
        let args = [&serve[..], &["--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], args].concat();
        Server::spawn(home, &args, env)
    }

    /// As it is told to, whatever that is.
    pub(crate) fn spawn(home: PathBuf, args: &[&str], env: &[(&str, &str)]) -> Server {
        let mut child = command(&home, args, env).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let mut faces = [("API    http://", None), ("RESP   redis://", None), ("Envoy  grpc://", None)];
        loop {
            let start = said.len();
            assert_ne!(lines.read_line(&mut said).unwrap(), 0, "it ended: {said}");
            let line = said[start..].trim();
            for (mark, address) in &mut faces {
                if let Some(rest) = line.strip_prefix(*mark) {
                    *address = Some(rest.split('/').next().unwrap().parse().expect("an address"));
                }
            }
            if line.starts_with("try ") {
                break;
            }
        }
        let [address, resp, grpc] = faces.map(|(_, address)| address);
        let address = address.expect("it says where it is");
        let stderr = Arc::new(Mutex::new(said));
        let reader = std::thread::spawn({
            let stderr = stderr.clone();
            move || {
                let mut line = String::new();
                while lines.read_line(&mut line).is_ok_and(|length| length > 0) {
                    stderr.lock().unwrap().push_str(&line);
                    line.clear();
                }
            }
        });
        Server { child, address, resp, grpc, home, stderr, reader: Some(reader) }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// One request on a connection of its own.
    pub(crate) fn ask(&self, method: &str, path: &str, lines: &[&str], body: &str) -> Answer {
        self.connect().ask_with_body(method, path, lines, body)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.ask("POST", path, &["content-type: application/json"], body)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// What it has said on stderr so far.
    #[allow(dead_code)]
    pub(crate) fn said(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    #[allow(dead_code)]
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for it to end by itself.
    pub(crate) fn ended(mut self) -> Ended {
        let code = self.child.wait().unwrap().code();
        self.reader.take().unwrap().join().unwrap();
        let stderr = self.stderr.lock().unwrap().clone();
        Ended { code, stderr }
    }

    /// Runs the binary against this server.
    pub(crate) fn tollgate(&self, args: &[&str], env: &[(&str, &str)]) -> std::process::Output {
        let url = self.url();
        let env = [&[("TOLLGATE_SERVER", &*url)], env].concat();
        command(&self.home, args, &env).output().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

/// The binary, in this directory and with nothing of the caller's environment that it would heed.
pub(crate) fn command(home: &Path, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    for (name, _) in std::env::vars_os() {
        let is_heeded = ["TOLLGATE_", "RL_", "REDIS_", "OTEL_"]
            .iter()
            .any(|start| name.to_str().is_some_and(|name| name.starts_with(start)));
        if is_heeded {
            command.env_remove(name);
        }
    }
    command.current_dir(home).args(args).envs(env.iter().copied()).stdin(Stdio::null());
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
