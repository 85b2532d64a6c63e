//! A small blocking client of HTTP/1.1: it sends exactly the bytes that the test gives it and shows exactly the lines that came back.
//!
//! Clients that people use put header fields in order, join those that are there twice and hide what they do not understand. A
//! test of what a server says on the wire wants none of that. A [`Connection`] is kept alive until either side closes it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long an answer may take on a loaded machine before the test fails.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One connection to a server.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
    host: String,
}

/// An answer, as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The header fields in the order in which they came, each as `name: value`, byte for byte.
    pub lines: Vec<String>,
    /// The body, chunks put together.
    pub body: String,
}

impl Connection {
    /// Connects, and panics if nobody listens there: a test can do nothing else.
    pub fn open(address: SocketAddr) -> Connection {
        let stream = TcpStream::connect(address).and_then(|stream| {
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        let stream = stream.unwrap_or_else(|error| panic!("cannot connect to {address}: {error}"));
        Connection { stream: BufReader::new(stream), host: address.to_string() }
    }

    /// A request without a body, with these header lines after `host`.
    pub fn ask(&mut self, method: &str, path: &str, lines: &[&str]) -> Answer {
        self.ask_with_body(method, path, lines, "")
    }

    /// A request with a body.
    pub fn ask_with_body(&mut self, method: &str, path: &str, lines: &[&str], body: &str) -> Answer {
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.host);
        for line in lines {
            request.push_str(line);
            request.push_str("\r\n");
        }
        if !body.is_empty() {
            request.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        request.push_str("\r\n");
        request.push_str(body);
        let answered = self.send(request.as_bytes()).and_then(|()| self.receive(method == "HEAD"));
        answered.unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    /// Sends these bytes and nothing else.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Whether some of an answer has come, or the end of the connection. Does not wait.
    pub fn has_answer(&self) -> bool {
        let stream = self.stream.get_ref();
        let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
        stream.set_nonblocking(false).is_ok_and(|()| !self.stream.buffer().is_empty() || peeked.is_ok())
    }

    /// Reads one answer. An answer to HEAD has no body, whatever its length says.
    pub fn receive(&mut self, is_to_head: bool) -> io::Result<Answer> {
        let start = self.line()?;
        let mut words = start.splitn(3, ' ');
        let status = match (words.next(), words.next().map(str::parse)) {
            (Some("HTTP/1.1" | "HTTP/1.0"), Some(Ok(status))) => status,
            _ => return Err(broken(format!("`{start}` does not begin an answer"))),
        };
        let mut answer = Answer { status, lines: Vec::new(), body: String::new() };
        loop {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            answer.lines.push(line);
        }
        let body = match (answer.field("transfer-encoding"), answer.field("content-length")) {
            _ if is_to_head || matches!(status, 100..=199 | 204 | 304) => Vec::new(),
            (Some("chunked"), _) => self.chunks()?,
            (Some(other), _) => return Err(broken(format!("the encoding `{other}` is not known here"))),
            (None, Some(length)) => {
                let length = length.parse().map_err(|_| broken(format!("`{length}` is no length")))?;
                self.bytes(length)?
            }
            (None, None) => {
                let mut rest = Vec::new();
                self.stream.read_to_end(&mut rest)?;
                rest
            }
        };
        answer.body = String::from_utf8(body).map_err(|error| broken(error.to_string()))?;
        Ok(answer)
    }

    /// A line without its end, which must be CR LF.
    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None if line.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            None => Err(broken(format!("`{}` does not end as a line does", line.escape_debug()))),
        }
    }

    fn bytes(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn chunks(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let size = self.line()?;
            let length =
                usize::from_str_radix(&size, 16).map_err(|_| broken(format!("`{size}` is no size")))?;
            body.extend(self.bytes(length)?);
            // Trailers would stand where the last chunk's empty line does.
            let end = self.line()?;
            if !end.is_empty() {
                return Err(broken(format!("a chunk is followed by `{end}`")));
            }
            if length == 0 {
                return Ok(body);
            }
        }
    }
}

impl Answer {
    /// The value of the first header field of this name, however it is written.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| {
            let (this, value) = line.split_once(':')?;
            this.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The lines of these header fields alone, in the order in which they came.
    pub fn lines_of(&self, names: &[&str]) -> Vec<&str> {
        let is_wanted = |line: &&str| {
            let this = line.split(':').next().unwrap_or_default();
            names.iter().any(|name| this.eq_ignore_ascii_case(name))
        };
        self.lines.iter().map(String::as_str).filter(is_wanted).collect()
    }
}

fn broken(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What is read of a server that sends this and hangs up: the status, the lines and the body, or the error.
    fn check(sent: &'static str, is_to_head: bool, expected: &str) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            stream.write_all(sent.as_bytes()).expect("it listens");
        });
        let mut connection = Connection::open(address);
        server.join().expect("it has sent");
        let read = match connection.receive(is_to_head) {
            Ok(answer) => format!("{} {} {}", answer.status, answer.lines.join("|"), answer.body),
            Err(error) => error.to_string(),
        };
        assert_eq!(read, expected, "{sent:?}");
    }

    #[test]
    fn answers_are_read_as_they_came() {
        check(
            "HTTP/1.1 200 OK\r\nB: 1\r\na:2\r\ncontent-length: 2\r\n\r\nhi",
            false,
            "200 B: 1|a:2|content-length: 2 hi",
        );
        check("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", true, "200 content-length: 2 ");
        check("HTTP/1.1 204 No Content\r\n\r\n", false, "204  ");
        check("HTTP/1.1 200 OK\r\n\r\nto the end", false, "200  to the end");
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\na\r\n0123456789\r\n0\r\n\r\n",
            false,
            "200 transfer-encoding: chunked ab0123456789",
        );
        check("HTTP/1.1 200 OK\r\nx: 1\n\r\n", false, "`x: 1\\n` does not end as a line does");
        check("SMTP 200\r\n\r\n", false, "`SMTP 200` does not begin an answer");
        check("", false, "unexpected end of file");
    }
}
