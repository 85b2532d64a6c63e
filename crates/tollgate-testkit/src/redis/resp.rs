//! A small blocking client for Redis: enough of RESP2 to ask a server anything, fast enough to be asked thousands of times.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing there.
    Nil,
    /// A whole number.
    Int(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// Several replies.
    Array(Vec<Value>),
    /// A word such as `OK`.
    Status(String),
    /// An error inside an array, as `EXEC` gives. An error that is the whole reply is an `Err` of the call.
    Error(String),
}

impl Value {
    /// The number, or the number that the text says.
    pub fn int(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bulk(_) | Value::Status(_) => self.text().parse().ok(),
            Value::Nil | Value::Array(_) | Value::Error(_) => None,
        }
    }

    /// The reply as text; the parts of an array one to a line.
    pub fn text(&self) -> String {
        self.to_string()
    }

    /// The parts of an array; nothing for anything else.
    pub fn items(&self) -> &[Value] {
        match self {
            Value::Array(items) => items,
            _ => &[],
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Nil => Ok(()),
            Value::Int(number) => write!(f, "{number}"),
            Value::Bulk(bytes) => f.write_str(&String::from_utf8_lossy(bytes)),
            Value::Status(text) | Value::Error(text) => f.write_str(text),
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    let separator = if index == 0 { "" } else { "\n" };
                    write!(f, "{separator}{item}")?;
                }
                Ok(())
            }
        }
    }
}

/// One connection to a Redis server.
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects to a port of the loopback address. Connecting, and each reply, may take `timeout` at most.
    pub fn connect(port: u16, timeout: Duration) -> io::Result<Client> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Sends one command and waits for its reply: the outer error is the connection's, the inner one the server's.
    pub fn call<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> io::Result<Result<Value, String>> {
        self.send(arguments)?;
        self.receive()
    }

    /// Sends one command without waiting.
    pub fn send<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> io::Result<()> {
        let mut request = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments {
            let argument = argument.as_ref();
            request.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
            request.extend_from_slice(argument);
            request.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&request)
    }

    /// Waits for the reply of a command that was sent.
    pub fn receive(&mut self) -> io::Result<Result<Value, String>> {
        Ok(match self.value()? {
            Value::Error(text) => Err(text),
            value => Ok(value),
        })
    }

    fn value(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = String::from_utf8_lossy(&line).into_owned();
        let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("not a Redis reply: {line:?}"));
        let text = line.get(1..).and_then(|rest| rest.strip_suffix("\r\n")).ok_or_else(bad)?;
        let number = || text.parse::<i64>().map_err(|_| bad());
        match line.as_bytes()[0] {
            b'+' => Ok(Value::Status(text.to_owned())),
            b'-' => Ok(Value::Error(text.to_owned())),
            b':' => Ok(Value::Int(number()?)),
            b'$' => match usize::try_from(number()?) {
                Err(_) => Ok(Value::Nil),
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    Ok(Value::Bulk(bytes))
                }
            },
            b'*' => match usize::try_from(number()?) {
                Err(_) => Ok(Value::Nil),
                Ok(count) => (0..count).map(|_| self.value()).collect::<io::Result<_>>().map(Value::Array),
            },
            _ => Err(bad()),
        }
    }
}
