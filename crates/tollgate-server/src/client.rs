//! Asking a running server: HTTP to the same machine or a sidecar, one request a connection.
//!
//! The commands that ask a server need one request and one answer, both short. So it is plain HTTP/1.0, whose answers end with
//! the connection; what an answer may take, in time and in bytes, is bounded. There is no TLS here: `https://` is refused in
//! clear words, never quietly spoken without.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::failure::{Failure, reason};

/// How long a question may take, all of it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest answer that is read: /metrics is the longest there is, and its series are bounded.
const MOST_BYTES: u64 = 16 * 1024 * 1024;

/// Where a server is, and what to show it.
pub(crate) struct Client {
    /// As it was named, for messages.
    url: String,
    /// Host and port, as they are connected to.
    address: String,
    /// What stands before every path, where a proxy wants it.
    prefix: String,
    token: Option<String>,
}

/// What a server answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Client {
    /// For the server at `http://host[:port][/prefix]`.
    pub(crate) fn new(url: &str) -> Result<Client, Failure> {
        let wrong = |why: &str| Failure::new(format!("cannot ask {url:?}: {why}"));
        if url.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
            return Err(wrong("an address has no blanks in it"));
        }
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(wrong(match url.starts_with("https://") {
                true => "this command speaks http:// only; ask a server or a proxy on this machine",
                false => "write it as http://127.0.0.1:8080",
            }));
        };
        let (host, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if host.is_empty() || host.contains(['@', '?', '#']) || prefix.contains(['?', '#']) {
            return Err(wrong("write it as http://127.0.0.1:8080"));
        }
        // An IPv6 address has colons of its own, inside of brackets.
        let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
        Ok(Client {
            url: url.to_owned(),
            address: if has_port { host.to_owned() } else { format!("{host}:80") },
            prefix: prefix.trim_end_matches('/').to_owned(),
            token: None,
        })
    }

    /// Shows the admin token with every question.
    pub(crate) fn token(mut self, token: Option<&str>) -> Result<Client, Failure> {
        if token.is_some_and(|token| token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(Failure::new("the admin token has something in it that is no visible ASCII"));
        }
        self.token = token.map(str::to_owned);
        Ok(self)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn get(&self, path: &str) -> Result<Reply, Failure> {
        self.ask("GET", path, "")
    }

    /// The answer to a question in JSON, if the server gave one.
    pub(crate) fn post_json(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask("POST", path, &body.to_string())?.json()
    }

    pub(crate) fn get_json(&self, path: &str) -> Result<Value, Failure> {
        self.get(path)?.json()
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Result<Reply, Failure> {
        self.exchange(method, path, body).map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => {
                    "; start one with `tollgate serve`, or name it with --server"
                }
                _ => "",
            };
            Failure::new(format!("cannot ask the server at {}: {}{hint}", self.url, reason(&error)))
        })
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> io::Result<Reply> {
        let end = Instant::now() + PATIENCE;
        let mut stream = self.connect(end)?;
        let mut request = format!("{method} {}{path} HTTP/1.0\r\nhost: {}\r\n", self.prefix, self.address);
        if let Some(token) = &self.token {
            request.push_str(&format!("authorization: Bearer {token}\r\n"));
        }
        if method == "POST" {
            request
                .push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
        }
        request.push_str("\r\n");
        request.push_str(body);
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut piece = vec![0; 16 * 1024];
        loop {
            stream.set_read_timeout(Some(left(end)?))?;
            match stream.read(&mut piece)? {
                0 => return read(&answer),
                length => answer.extend_from_slice(&piece[..length]),
            }
            if answer.len() as u64 > MOST_BYTES {
                return Err(io::Error::other("the answer is longer than 16 MiB"));
            }
        }
    }

    /// A name may stand for several addresses, of which some may be dead.
    fn connect(&self, end: Instant) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name stands for no address");
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(end)?) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long")) } else { Ok(left) }
}

/// An answer from its bytes.
fn read(bytes: &[u8]) -> io::Result<Reply> {
    let strange = || io::Error::other("what answers there does not speak HTTP");
    let head_end = bytes.windows(4).position(|window| window == b"\r\n\r\n").ok_or_else(strange)?;
    let head = std::str::from_utf8(&bytes[..head_end]).map_err(|_| strange())?;
    let body = &bytes[head_end + 4..];
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().splitn(3, ' ');
    let status = match (words.next(), words.next().map(str::parse)) {
        (Some(version), Some(Ok(status))) if version.starts_with("HTTP/1.") => status,
        _ => return Err(strange()),
    };
    let length = lines.filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    if length.is_some_and(|length| length != body.len()) {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer ended early"));
    }
    let body = String::from_utf8(body.to_vec()).map_err(|_| strange())?;
    Ok(Reply { status, body })
}

impl Reply {
    /// The JSON of an answer; what the server says is wrong becomes a failure.
    pub(crate) fn json(self) -> Result<Value, Failure> {
        let parsed: Option<Value> = serde_json::from_str(&self.body).ok();
        match parsed {
            Some(value) if self.status == 200 => Ok(value),
            Some(Value::Object(problem)) if problem.get("detail").is_some_and(Value::is_string) => {
                let detail = problem["detail"].as_str().unwrap_or_default();
                Err(Failure::new(format!("the server said {}: {}", self.status, visible(detail))))
            }
            _ => Err(Failure::new(format!(
                "the server answered with status {} and no JSON of ours; is it a Tollgate?",
                self.status
            ))),
        }
    }
}

/// What a server says, without what would move a terminal's cursor.
pub(crate) fn visible(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}

/// As a part of a path or a query.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_named_by_a_plain_address() {
        for (url, expected) in [
            ("http://127.0.0.1:8080", Ok(("127.0.0.1:8080", ""))),
            ("http://localhost", Ok(("localhost:80", ""))),
            ("http://[::1]", Ok(("[::1]:80", ""))),
            ("http://[::1]:81/a/", Ok(("[::1]:81", "/a"))),
            ("https://a", Err("speaks http:// only")),
            ("127.0.0.1:8080", Err("write it as http://")),
            ("http://", Err("write it as http://")),
            ("http://user@a", Err("write it as http://")),
            ("http://a/?b", Err("write it as http://")),
            ("http://a\r\nx: y", Err("no blanks")),
        ] {
            match (Client::new(url), expected) {
                (Ok(client), Ok(parts)) => assert_eq!((&*client.address, &*client.prefix), parts, "{url}"),
                (Err(failure), Err(why)) => {
                    assert!(failure.to_string().contains(why), "{url}: {failure}");
                }
                (found, expected) => panic!("{url}: {:?} {expected:?}", found.map(|client| client.address)),
            }
        }
        assert!(Client::new("http://a").and_then(|client| client.token(Some("a\r\nb: c"))).is_err());
    }

    #[test]
    fn answers_are_read_whole_or_not_at_all() {
        for (bytes, expected) in [
            ("HTTP/1.1 200 OK\r\n\r\nhi", Ok((200, "hi"))),
            ("HTTP/1.0 404 No\r\nContent-Length: 2\r\n\r\nhi", Ok((404, "hi"))),
            ("HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nhi", Err("ended early")),
            ("HTTP/1.0 200 OK\r\n", Err("does not speak HTTP")),
            ("220 mail\r\n\r\n", Err("does not speak HTTP")),
            ("", Err("does not speak HTTP")),
        ] {
            match (read(bytes.as_bytes()), expected) {
                (Ok(reply), Ok(parts)) => assert_eq!((reply.status, &*reply.body), parts, "{bytes}"),
                (Err(error), Err(why)) => assert!(error.to_string().contains(why), "{bytes}: {error}"),
                (found, expected) => panic!("{bytes}: {found:?} {expected:?}"),
            }
        }
    }

    #[test]
    fn what_a_server_says_is_shown_and_nothing_more() {
        for (status, body, expected) in [
            (404, r#"{"detail":"unknown \u001b[2J"}"#, "the server said 404: unknown \u{fffd}[2J"),
            (502, "<html>", "status 502 and no JSON of ours"),
            (200, "ok", "status 200 and no JSON of ours"),
        ] {
            let reply = Reply { status, body: body.to_owned() };
            let Err(failure) = reply.json() else { panic!("{body} is an answer") };
            assert!(failure.to_string().contains(expected), "{body}: {failure}");
        }
        assert_eq!(escaped("user:4 2/ü?"), "user:4%202%2F%C3%BC%3F");
    }
}
