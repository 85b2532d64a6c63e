//! A server of our own process, and a client that shows every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

pub(crate) use tollgate_testkit::tollgate::Tollgate;

/// How long anything may take, on a machine that is busy with other tests.
const LIMIT: Duration = Duration::from_secs(30);

/// Serves a config, on free ports.
pub(crate) fn start(config: &str) -> Tollgate {
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(config).start()
}

pub(crate) fn client(server: &Tollgate) -> Client {
    let stream = TcpStream::connect(server.resp()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_nodelay(true).unwrap();
    Client(BufReader::new(stream))
}

/// What a server says that does not start.
pub(crate) fn refused(args: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_tollgate")).args(args).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
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
