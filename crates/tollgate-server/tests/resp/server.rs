//! A server of our own process, and a client that shows every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;
use tollgate_testkit::http::Connection;

/// How long anything may take, on a machine that is busy with other tests.
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Server {
    child: std::cell::RefCell<Child>,
    pub(crate) address: SocketAddr,
    http: SocketAddr,
    config: PathBuf,
}

impl Server {
    /// Serves a config, on free ports.
    pub(crate) fn start(config: &str) -> Server {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("resp-{}-{}.toml", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&file, config).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["serve", "--listen", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut after = |mark: &str| -> SocketAddr {
            let found = lines.by_ref().map(Result::unwrap).find_map(|line| {
                let rest = line.split_once(mark)?.1;
                rest.split('/').next().unwrap_or(rest).parse().ok()
            });
            found.unwrap_or_else(|| panic!("the server says no {mark}"))
        };
        let (http, address) = (after("http://"), after("redis://"));
        // What else it says is nobody's concern, but must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Server { child: child.into(), address, http, config: file }
    }

    pub(crate) fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client(BufReader::new(stream))
    }

    /// Changes the config, and comes back when the server has.
    pub(crate) fn reload(&self, config: &str) {
        std::fs::write(&self.config, config).unwrap();
        let answer = Connection::open(self.http).ask_with_body("POST", "/v1/reload", &[], "");
        assert_eq!(answer.status, 200, "{answer:?}");
    }

    /// What the page is told.
    pub(crate) fn snapshot(&self) -> Value {
        serde_json::from_str(&Connection::open(self.http).ask("GET", "/v1/snapshot", &[]).body).unwrap()
    }

    /// Asks it to stop, and gives its exit code.
    pub(crate) fn stop(&self) -> Option<i32> {
        let mut child = self.child.borrow_mut();
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        child.wait().unwrap().code()
    }

    /// What a server says that does not start.
    pub(crate) fn refused(args: &[&str]) -> String {
        let output =
            Command::new(env!("CARGO_BIN_EXE_tollgate")).args(args).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.borrow_mut().kill();
        let _ = self.child.borrow_mut().wait();
        let _ = std::fs::remove_file(&self.config);
    }
}

pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        // Answers wait in the kernel meanwhile, and there must be room for them: a test sends at most what fits.
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// A server that has hung up already is no fault here.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) {
        let _ = self.0.get_mut().write_all(bytes);
    }

    pub(crate) fn finish(&mut self) {
        let _ = self.0.get_mut().shutdown(std::net::Shutdown::Write);
    }

    pub(crate) fn take(&mut self, size: usize) -> Vec<u8> {
        let mut bytes = vec![0; size];
        let mut filled = 0;
        while filled < size {
            match self.0.read(&mut bytes[filled..]) {
                Ok(read @ 1..) => filled += read,
                end => panic!("{end:?} after {}", bytes[..filled].escape_ascii()),
            }
        }
        bytes
    }

    /// A line, without its end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.strip_suffix("\r\n").unwrap_or_else(|| panic!("{line:?} has no end")).to_owned()
    }

    /// All that comes until the server hangs up.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.0.read_to_end(&mut bytes).unwrap();
        bytes
    }
}

/// A command in bytes.
pub(crate) fn command<A: AsRef<[u8]>>(arguments: impl IntoIterator<Item = A>) -> Vec<u8> {
    let arguments: Vec<A> = arguments.into_iter().collect();
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in &arguments {
        let argument = argument.as_ref();
        bytes.extend(format!("${}\r\n", argument.len()).into_bytes());
        bytes.extend_from_slice(argument);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
