//! The load: some connections that are kept, and on each so many requests at once, as fast as they are answered.
//!
//! One thread, plain blocking sockets and ready-made requests, the same for everybody who speaks a protocol, so that the client
//! costs less than any server and the server is what is measured. The connections are served in turn, which is also the order
//! in which the server finds them. How a protocol is spoken is the business of a [`Speech`].

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// An answer takes longer only if there is none.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// How much is read at once.
const ROOM: usize = 64 * 1024;

/// How requests are written and answers read, on one connection.
pub(crate) trait Speech {
    /// Adds what the connection begins with.
    fn greet(&mut self, _out: &mut Vec<u8>) {}

    /// Adds the next requests, by their number, and says how many there are.
    fn ask(&mut self, number: usize, out: &mut Vec<u8>) -> usize;

    /// Reads the whole answers that `bytes` begin with, and says how many bytes they were. What is to be said back goes to `out`.
    fn hear(&mut self, bytes: &[u8], heard: &mut Heard, out: &mut Vec<u8>) -> usize;
}

/// The answers of a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) answers: u64,
    /// Those that were not as they should be.
    pub(crate) astray: u64,
    /// What the first answer said.
    pub(crate) first: Option<Vec<u8>>,
}

impl Heard {
    pub(crate) fn note(&mut self, is_as_wanted: bool, content: &[u8]) {
        self.answers += 1;
        self.astray += u64::from(!is_as_wanted);
        self.first.get_or_insert_with(|| content.to_vec());
    }
}

/// The connections to one server.
pub(crate) struct Client {
    connections: Vec<Connection>,
    sent: usize,
}

struct Connection {
    stream: TcpStream,
    speech: Box<dyn Speech>,
    /// What was read, of which so much is there, and so much of it was heard.
    input: Box<[u8]>,
    filled: usize,
    output: Vec<u8>,
    /// Answers that are still to come.
    open: usize,
}

impl Client {
    pub(crate) fn connect(
        address: SocketAddr,
        connections: usize,
        speech: impl Fn() -> Box<dyn Speech>,
    ) -> Result<Client, String> {
        let connections =
            (0..connections).map(|_| Connection::open(address, speech())).collect::<Result<_, _>>();
        let connections = connections.map_err(|error| format!("connecting to {address}: {error}"))?;
        Ok(Client { connections, sent: 0 })
    }

    /// Sends requests for a while, and waits for all the answers; says what came and how long it took.
    pub(crate) fn run(&mut self, duration: Duration) -> Result<(Heard, Duration), String> {
        let started = Instant::now();
        self.run_while(|_| started.elapsed() < duration).map(|heard| (heard, started.elapsed()))
    }

    /// Sends at least so many requests.
    pub(crate) fn run_through(&mut self, requests: usize) -> Result<Heard, String> {
        self.run_while(|answers| answers < requests as u64)
    }

    fn run_while(&mut self, goes_on: impl Fn(u64) -> bool) -> Result<Heard, String> {
        let mut heard = Heard::default();
        self.each(|connection, next| connection.send(next))?;
        while goes_on(heard.answers) {
            self.each(|connection, next| {
                connection.receive(&mut heard)?;
                connection.send(next)
            })?;
        }
        self.each(|connection, _| connection.receive(&mut heard))?;
        Ok(heard)
    }

    fn each(
        &mut self,
        mut work: impl FnMut(&mut Connection, usize) -> std::io::Result<()>,
    ) -> Result<(), String> {
        for connection in &mut self.connections {
            self.sent = self.sent.wrapping_add(1);
            work(connection, self.sent).map_err(|error| format!("asking the server: {error}"))?;
        }
        Ok(())
    }
}

impl Connection {
    fn open(address: SocketAddr, mut speech: Box<dyn Speech>) -> std::io::Result<Connection> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LONGEST_WAIT))?;
        let mut output = Vec::new();
        speech.greet(&mut output);
        stream.write_all(&output)?;
        let input = vec![0; ROOM].into_boxed_slice();
        Ok(Connection { stream, speech, input, filled: 0, output, open: 0 })
    }

    fn send(&mut self, number: usize) -> std::io::Result<()> {
        self.output.clear();
        self.open = self.speech.ask(number, &mut self.output);
        self.stream.write_all(&self.output)
    }

    /// Reads until all is answered.
    fn receive(&mut self, heard: &mut Heard) -> std::io::Result<()> {
        let wanted = heard.answers + self.open as u64;
        while heard.answers < wanted {
            match self.stream.read(&mut self.input[self.filled..])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                read => self.filled += read,
            }
            self.output.clear();
            let used = self.speech.hear(&self.input[..self.filled], heard, &mut self.output);
            if !self.output.is_empty() {
                self.stream.write_all(&self.output)?;
            }
            self.input.copy_within(used..self.filled, 0);
            self.filled -= used;
            if self.filled == self.input.len() {
                return Err(std::io::ErrorKind::OutOfMemory.into());
            }
        }
        Ok(())
    }
}
