//! Clients of good will, one for each face. They ask one thing after another on one connection, and tell half an answer from none.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::frames::{self, ACK, DATA, END_HEADERS, END_STREAM, GO_AWAY, HEADERS, PING, RESET, SETTINGS};

/// How long an answer may take on a loaded machine before a test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where a server is asked.
#[derive(Clone, Copy, Debug)]
pub struct Faces {
    /// The JSON API.
    pub http: SocketAddr,
    /// The protocol of Redis.
    pub resp: SocketAddr,
    /// Envoy's service.
    pub grpc: SocketAddr,
}

/// What a server answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// It passes.
    Allowed,
    /// It does not.
    Denied,
    /// Nothing: the server hung up, before the first byte of an answer.
    HungUp,
}

/// Charges one to a key, again and again. An error is half an answer, or a wrong one.
pub trait Client: Send {
    /// Charges, and reads the answer.
    fn charge(&mut self) -> io::Result<Answered>;
}

/// How clients are made: from a server, the name of a limit (for gRPC an entry `limit=…` that meets it) and a key.
pub type Make = fn(&Faces, &str, &str) -> Box<dyn Client>;

/// One client of each face, by its name.
pub const CLIENTS: [(&str, Make); 3] = [
    ("HTTP", |faces, limit, key| Box::new(Http::new(faces, limit, key))),
    ("RESP", |faces, limit, key| Box::new(Resp::new(faces, limit, key))),
    ("gRPC", |faces, limit, key| {
        Box::new(GrpcCalls { connection: Grpc::connect(faces.grpc), call: frames::call(limit, key) })
    }),
];

fn dial(address: SocketAddr) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(TIMEOUT)).expect("an option");
    stream.set_nodelay(true).expect("an option");
    BufReader::new(stream)
}

fn wrong(received: impl AsRef<[u8]>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("`{}`", received.as_ref().escape_ascii()))
}

/// Sends a request; true if an answer begins.
fn ask(stream: &mut BufReader<TcpStream>, request: &[u8]) -> io::Result<bool> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let began =
        stream.get_mut().write_all(request).and_then(|()| stream.fill_buf().map(|bytes| !bytes.is_empty()));
    match began {
        Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => Ok(false),
        began => began,
    }
}

fn line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    line.strip_suffix("\r\n").map(str::to_owned).ok_or_else(|| wrong(&line))
}

struct Http {
    stream: BufReader<TcpStream>,
    request: Vec<u8>,
}

impl Http {
    fn new(faces: &Faces, limit: &str, key: &str) -> Http {
        let body = format!(r#"{{"limit":"{limit}","key":"{key}"}}"#);
        let request = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        Http { stream: dial(faces.http), request: request.into_bytes() }
    }
}

impl Client for Http {
    fn charge(&mut self) -> io::Result<Answered> {
        if !ask(&mut self.stream, &self.request)? {
            return Ok(Answered::HungUp);
        }
        let status = line(&mut self.stream)?;
        let mut length = 0;
        loop {
            let line = line(&mut self.stream)?;
            match line.strip_prefix("content-length: ") {
                Some(text) => length = text.parse().map_err(|_| wrong(&line))?,
                None if line.is_empty() => break,
                None => {}
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).map_err(|error| wrong(error.to_string()))?;
        if status.starts_with("HTTP/1.1 200 ") && body.starts_with(b"{\"allowed\":true,") {
            Ok(Answered::Allowed)
        } else if status.starts_with("HTTP/1.1 200 ") && body.starts_with(b"{\"allowed\":false,") {
            Ok(Answered::Denied)
        } else {
            Err(wrong([status.as_bytes(), &body].concat()))
        }
    }
}

struct Resp {
    stream: BufReader<TcpStream>,
    request: Vec<u8>,
}

impl Resp {
    fn new(faces: &Faces, limit: &str, key: &str) -> Resp {
        let words = ["TOLLGATE.CHECK", limit, key].map(|word| format!("${}\r\n{word}\r\n", word.len()));
        Resp { stream: dial(faces.resp), request: format!("*3\r\n{}", words.concat()).into_bytes() }
    }
}

impl Client for Resp {
    fn charge(&mut self) -> io::Result<Answered> {
        if !ask(&mut self.stream, &self.request)? {
            return Ok(Answered::HungUp);
        }
        let mut lines = Vec::new();
        // Six values, of which the last has two lines, after a line that says so.
        for _ in 0..8 {
            lines.push(line(&mut self.stream)?);
            if lines[0] != "*6" {
                return Err(wrong(&lines[0]));
            }
        }
        match &*lines[1] {
            ":1" => Ok(Answered::Allowed),
            ":0" => Ok(Answered::Denied),
            other => Err(wrong(other)),
        }
    }
}

/// Envoy's service on one connection, one call after the other.
pub(crate) struct Grpc {
    stream: BufReader<TcpStream>,
    next: u32,
}

impl Grpc {
    pub(crate) fn connect(address: SocketAddr) -> Grpc {
        let mut stream = dial(address);
        stream.get_mut().write_all(&frames::greeting()).expect("room");
        Grpc { stream, next: 1 }
    }

    /// Makes one call, and gives the message that answers it: nothing if the call failed, `None` if the server hung up.
    pub(crate) fn call(&mut self, message: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let id = self.next;
        self.next += 2;
        let request = [
            frames::frame(HEADERS, END_HEADERS, id, &frames::head()),
            frames::frame(DATA, END_STREAM, id, &frames::message(message.len(), message)),
        ];
        if !ask(&mut self.stream, &request.concat())? {
            return Ok(None);
        }
        let mut data = Vec::new();
        loop {
            let frame = match frames::read(&mut self.stream) {
                Ok(frame) => frame,
                Err(_) if data.is_empty() => return Ok(None),
                Err(error) => return Err(error),
            };
            let answer = match (frame.kind, frame.flags & ACK) {
                (SETTINGS, 0) => frames::frame(SETTINGS, ACK, 0, &[]),
                (PING, 0) => frames::frame(PING, ACK, 0, &frame.payload),
                (DATA, _) if frame.stream == id => {
                    data.extend_from_slice(&frame.payload);
                    let length = u32::try_from(frame.payload.len()).expect("a short frame").to_be_bytes();
                    frames::frame(frames::WINDOW_UPDATE, 0, 0, &length)
                }
                (HEADERS, END_STREAM) if frame.stream == id => {
                    return Ok(Some(data.split_off(data.len().min(5))));
                }
                // The call was not looked at, or will not be: the server goes.
                (RESET, _) if data.is_empty() && frame.payload == 7_u32.to_be_bytes() => return Ok(None),
                (RESET, _) => return Err(wrong(&frame.payload)),
                (GO_AWAY, _) if frame.payload[4..8] != [0; 4] => return Err(wrong(&frame.payload)),
                (GO_AWAY, _) if frame.payload[..4] < id.to_be_bytes()[..] => return Ok(None),
                _ => continue,
            };
            // A peer that goes may not be there any more.
            let _ = self.stream.get_mut().write_all(&answer);
        }
    }
}

/// What a message of the service says. Its first field is the code: OK is 1, OVER_LIMIT 2.
pub(crate) fn answered(message: &[u8]) -> io::Result<Answered> {
    match message {
        [8, 1, ..] => Ok(Answered::Allowed),
        [8, 2, ..] => Ok(Answered::Denied),
        _ => Err(wrong(message)),
    }
}

/// The same call again and again.
struct GrpcCalls {
    connection: Grpc,
    call: Vec<u8>,
}

impl Client for GrpcCalls {
    fn charge(&mut self) -> io::Result<Answered> {
        match self.connection.call(&self.call)? {
            Some(message) => answered(&message),
            None => Ok(Answered::HungUp),
        }
    }
}
