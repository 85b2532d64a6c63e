//! A real Envoy that asks a real `tollgate serve`, with the files of `deploy/envoy`; and what is answered when the store is
//! gone.
//!
//! `./test` fetches Envoy; `TOLLGATE_ENVOY` names another one. Without any these tests fail: they never skip.

#[path = "../rls/client.rs"]
#[allow(dead_code)] // It serves another test too.
mod client;
mod envoy;
#[path = "../rls/server.rs"]
mod server;
mod store;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::envoy::Envoy;

const TOLLGATE: &str = include_str!("../../../../deploy/envoy/tollgate.toml");

/// A service that says hello to everybody.
fn hello() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || greet(stream));
        }
    });
    address
}

fn greet(mut stream: TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
        head.push(byte[0]);
    }
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello");
}

/// What is answered to a GET: its status, and its head in lower case.
pub(crate) fn get(address: SocketAddr, path: &str, header: &str) -> (u16, String) {
    get_bytes(address, path, header.as_bytes())
}

/// The same with a header that need not be text.
fn get_bytes(address: SocketAddr, path: &str, header: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let start = format!("GET {path} HTTP/1.1\r\nhost: edge\r\n");
    let request = [start.as_bytes(), header, b"connection: close\r\n\r\n"].concat();
    stream.write_all(&request).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer.to_lowercase())
}

/// The value of a field, or nothing.
fn field<'a>(head: &'a str, name: &str) -> &'a str {
    let mut fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.find(|(other, _)| *other == name).map_or("", |(_, value)| value)
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_lets_through_what_fits_and_refuses_the_rest() {
    let service = hello();
    let server = server::start(TOLLGATE);
    let closed = Envoy::start(service, server.grpc(), |config| config);
    let open = Envoy::start(service, server.grpc(), |config| {
        config.replace("failure_mode_deny: true", "failure_mode_deny: false")
    });

    for left in (0..5).rev() {
        let (status, head) = get(closed.listener, "/login", "");
        assert_eq!(status, 200, "{head}");
        assert_eq!(field(&head, "x-ratelimit-limit"), "5", "{head}");
        assert_eq!(field(&head, "x-ratelimit-remaining"), left.to_string(), "{head}");
        assert_eq!(field(&head, "ratelimit-policy"), "\"login\";q=5;w=3600", "{head}");
        assert!(head.ends_with("hello"), "{head}");
    }
    for envoy in [&closed, &open] {
        let (status, head) = get(envoy.listener, "/login", "");
        assert_eq!(status, 429, "{head}");
        assert_eq!(field(&head, "x-ratelimit-remaining"), "0", "{head}");
        assert!((3_500..=3_600).contains(&field(&head, "retry-after").parse().unwrap_or(0)), "{head}");
        assert!(!head.contains("hello"), "{head}");
    }
    // A refused request is charged nowhere; another path meets no rule.
    let (status, head) = get(closed.listener, "/login", "x-user: bob\r\n");
    assert_eq!(status, 429, "{head}");
    let (status, head) = get(closed.listener, "/", "x-user: bob\r\n");
    assert_eq!((status, field(&head, "x-ratelimit-remaining")), (200, "99"), "{head}");
    for header in ["", "x-user: probe-1\r\n"] {
        let (status, head) = get(closed.listener, "/", header);
        assert_eq!((status, field(&head, "x-ratelimit-limit")), (200, ""), "{head}");
    }

    // A header that is no text is a user like any other, for an Envoy that lets pass what is not answered, too.
    for (envoy, left) in [(&open, "99"), (&open, "98"), (&closed, "97")] {
        let (status, head) = get_bytes(envoy.listener, "/", b"x-user: \xff\r\n");
        assert_eq!((status, field(&head, "x-ratelimit-remaining")), (200, left), "{head}");
    }

    assert_eq!(server::stop(server).await.code, Some(0));
    assert_eq!(get(closed.listener, "/", "").0, 500, "nobody answers, and it is configured to refuse then");
    assert_eq!(
        get(open.listener, "/login", "").0,
        200,
        "nobody answers, and it is configured to let pass then"
    );
}
