//! The load: some connections that are kept, and on each one request at a time, as fast as they are answered.
//!
//! One thread, plain blocking sockets and ready-made requests, so that the client costs less than the server and the server is
//! what is measured. The connections are served in turn, which is also the order in which the server finds them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::contestant::{KEY, KEYS};
use super::direct::{key, place};

/// How many connections there are.
pub(crate) const CONNECTIONS: usize = 32;

/// An answer takes longer only if there is none.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Room for one answer.
const ROOM: usize = 4096;

/// The requests, ready to be sent: one for each key.
pub(crate) struct Requests(Vec<Vec<u8>>);

impl Requests {
    pub(crate) fn new() -> Requests {
        let request = |number| {
            format!("GET / HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n{KEY}: {}\r\n\r\n", key(number))
                .into_bytes()
        };
        Requests((0..KEYS).map(request).collect())
    }
}

/// What became of a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) astray: u64,
    pub(crate) wall: Duration,
}

/// The connections to one service.
pub(crate) struct Client {
    connections: Vec<Connection>,
    sent: usize,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Result<Client, String> {
        let connections = (0..CONNECTIONS).map(|_| Connection::open(address)).collect::<Result<_, _>>();
        let connections = connections.map_err(|error| format!("connecting to the server: {error}"))?;
        Ok(Client { connections, sent: 0 })
    }

    /// Sends requests for a while, and waits for all the answers.
    pub(crate) fn run(
        &mut self,
        requests: &Requests,
        duration: Duration,
        fields: usize,
    ) -> Result<Tally, String> {
        let started = Instant::now();
        let mut tally = Tally { requests: 0, astray: 0, wall: Duration::ZERO };
        self.each(|connection, next| connection.send(requests, next))?;
        while started.elapsed() < duration {
            self.each(|connection, next| {
                tally.note(connection.answer()?, fields);
                connection.send(requests, next)
            })?;
        }
        self.each(|connection, _| {
            tally.note(connection.answer()?, fields);
            Ok(())
        })?;
        tally.wall = started.elapsed();
        Ok(tally)
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

impl Tally {
    fn note(&mut self, answer: Answer, fields: usize) {
        self.requests += 1;
        self.astray += u64::from(!answer.is_ok || answer.fields != fields);
    }
}

struct Connection {
    stream: TcpStream,
    buffer: Box<[u8; ROOM]>,
}

impl Connection {
    fn open(address: SocketAddr) -> std::io::Result<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LONGEST_WAIT))?;
        Ok(Connection { stream, buffer: Box::new([0; ROOM]) })
    }

    fn send(&mut self, requests: &Requests, number: usize) -> std::io::Result<()> {
        self.stream.write_all(&requests.0[place(number)])
    }

    /// Reads one answer to its end.
    fn answer(&mut self) -> std::io::Result<Answer> {
        let mut filled = 0;
        loop {
            match self.stream.read(&mut self.buffer[filled..])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                read => filled += read,
            }
            if let Some(answer) = Answer::read(&self.buffer[..filled]) {
                return Ok(answer);
            }
        }
    }
}

/// What the client wants to know of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answer {
    is_ok: bool,
    /// The header fields that tell how the caller stands.
    fields: usize,
}

impl Answer {
    /// From all that has come; `None` if there is more to come.
    fn read(bytes: &[u8]) -> Option<Answer> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
        let (mut fields, mut length) = (0, 0);
        for line in bytes[..end].split(|&byte| byte == b'\n').skip(1) {
            // The server writes names in lower case.
            if line.starts_with(b"ratelimit") || line.starts_with(b"x-ratelimit") {
                fields += 1;
            } else if let Some(value) = line.strip_prefix(b"content-length:") {
                length = std::str::from_utf8(value).ok()?.trim().parse().ok()?;
            }
        }
        let is_ok = bytes.starts_with(b"HTTP/1.1 200 ");
        (bytes.len() >= end + 4 + length).then_some(Answer { is_ok, fields })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_when_all_of_it_is_there() {
        let text = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nratelimit: \"a\";r=1\r\nx-ratelimit-limit: 2\r\n\r\nhello";
        for short in 0..text.len() {
            assert_eq!(Answer::read(&text.as_bytes()[..short]), None, "{short}");
        }
        assert_eq!(Answer::read(text.as_bytes()), Some(Answer { is_ok: true, fields: 2 }));
        let refused = b"HTTP/1.1 429 Too Many Requests\r\n\r\n";
        assert_eq!(Answer::read(refused), Some(Answer { is_ok: false, fields: 0 }));
    }
}
