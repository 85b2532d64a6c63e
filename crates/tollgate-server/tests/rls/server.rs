//! A `tollgate serve` of one's own, on free ports, ended with the test.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub(crate) struct Server {
    child: Child,
    _dir: TempDir,
    #[allow(dead_code)] // Not by every test.
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
}

impl Server {
    /// Starts a server and waits until it says where it is.
    pub(crate) fn start(config: &str) -> Server {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("tollgate.toml");
        std::fs::write(&file, config).expect("a file");
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["serve", "--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stderr.take().expect("its words")).lines().map_while(Result::ok);
        let (mut http, mut grpc, mut said) = (None, None, String::new());
        for line in lines.by_ref() {
            let after = |start: &str| line.trim_start().strip_prefix(start).map(str::to_owned);
            if let Some(rest) = after("API    http://") {
                http = rest.split('/').next().and_then(|address| address.parse().ok());
            } else if let Some(address) = after("Envoy  grpc://") {
                grpc = address.parse().ok();
            } else if line.trim_start().starts_with("try") {
                break;
            }
            said.push_str(&line);
            said.push('\n');
        }
        let (Some(http), Some(grpc)) = (http, grpc) else { panic!("it did not say where it is:\n{said}") };
        // Somebody has to read what else it says.
        thread::spawn(move || lines.for_each(drop));
        Server { child, _dir: dir, http, grpc }
    }

    /// Asks it to end, and waits until it has. Its clients can go on meanwhile.
    pub(crate) async fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        tokio::task::spawn_blocking(move || self.child.wait()).await.expect("no panic").expect("it ends")
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}
