//! HAProxy with the Lua of `deploy/haproxy`: only an explicit allow lets a request pass.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testkit::free_port;
use tollgate_testkit::http::{Answer, Connection};
use tollgate_testkit::redis::RedisServer;

use crate::server::{self, home, of_repository};

/// A running HAProxy. Dropping it ends it.
struct HaProxy {
    child: Child,
    address: SocketAddr,
}

impl HaProxy {
    /// With our configuration, its ports and addresses exchanged for those of this test.
    fn start(home: &Path, tollgate: SocketAddr, service: SocketAddr) -> HaProxy {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        // A loaded machine may be slower than production should be.
        exchanged(
            home,
            "haproxy.cfg",
            &[
                ("lua.session-timeout 1s", "lua.session-timeout 20s".to_owned()),
                ("127.0.0.1:9000", service.to_string()),
                ("bind :8000", format!("bind {address}")),
            ],
        );
        exchanged(
            home,
            "tollgate.lua",
            &[("127.0.0.1:8080", tollgate.to_string()), ("timeout = 500", "timeout = 15000".to_owned())],
        );
        let mut command = Command::new("haproxy");
        command
            .current_dir(home)
            .args(["-db", "-f", "haproxy.cfg"])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let child = command.spawn();
        let child = child.unwrap_or_else(|error| {
            panic!("haproxy is not installed, ./test does it (apt-get install haproxy): {error}")
        });
        let mut haproxy = HaProxy { child, address };
        let end = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).is_err() {
            assert!(haproxy.child.try_wait().unwrap().is_none(), "haproxy ended");
            assert!(Instant::now() < end, "haproxy does not listen");
            std::thread::yield_now();
        }
        haproxy
    }

    fn get(&self) -> Answer {
        self.ask("GET", "/", &[])
    }

    fn ask(&self, method: &str, path: &str, lines: &[&str]) -> Answer {
        Connection::open(self.address).ask(method, path, lines)
    }
}

impl Drop for HaProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a file of `deploy/haproxy` with some of it exchanged.
fn exchanged(home: &Path, file: &str, pairs: &[(&str, String)]) {
    let mut text = std::fs::read_to_string(of_repository("deploy/haproxy").join(file)).unwrap();
    for (from, to) in pairs {
        assert_eq!(text.matches(from).count(), 1, "{from}");
        text = text.replace(from, to);
    }
    std::fs::write(home.join(file), text).unwrap();
}

/// A server that gives everybody the same answer, as long as the test runs.
fn always(answer: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            while head.read_line(&mut line).is_ok_and(|length| length > 2) {
                line.clear();
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

fn hello() -> SocketAddr {
    always("HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
}

const ROUTES: &str = "[requests]\ntrusted_proxies = [\"127.0.0.1\"]\n[[routes]]\nlimit = \"api\"\n";

#[test]
fn haproxy_lets_pass_what_fits_and_refuses_the_rest() {
    let tollgate = server::with(
        &format!("[limits.api]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\n{ROUTES}"),
        &[],
        &[],
    );
    let haproxy = HaProxy::start(&home(), tollgate.http(), hello());
    for remaining in [1, 0] {
        let answer = haproxy.get();
        assert_eq!((answer.status, &*answer.body), (200, "hello"), "{answer:?}");
        let standing = answer.field("ratelimit").expect("it has the header");
        assert!(standing.starts_with(&format!("\"api\";r={remaining};t=")), "{answer:?}");
    }
    let answer = haproxy.get();
    assert_eq!(answer.status, 429, "{answer:?}");
    assert!(answer.body.contains("quota-exceeded"), "{answer:?}");
    let wait: u64 = answer.field("retry-after").and_then(|wait| wait.parse().ok()).expect("a wait");
    assert!((3_000..=3_600).contains(&wait), "{wait}");
    // Without Tollgate nobody says that a request may pass.
    let address = tollgate.http();
    drop(tollgate);
    assert!(TcpStream::connect(address).is_err());
    let answer = haproxy.get();
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("application/problem+json"));
}

/// The Lua denied on 429 alone, so a limit that is closed while its store is down (503) let every request through.
#[test]
fn a_closed_limit_stays_closed_while_its_store_is_down() {
    let redis = RedisServer::start();
    let tollgate = server::with(
        &format!(
            "[store]\nmode = \"redis\"\nfallback = \"closed\"\nredis = {{ url = \"{}\" }}\n\
             [limits.api]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\n{ROUTES}",
            redis.url()
        ),
        &[],
        &[],
    );
    let haproxy = HaProxy::start(&home(), tollgate.http(), hello());
    redis.stop();
    for _ in 0..5 {
        let answer = haproxy.get();
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(!answer.body.contains("hello"), "{answer:?}");
    }
}

#[test]
fn nothing_but_an_explicit_allow_lets_a_request_pass() {
    for (answer, expected) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 200),
        ("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n", 200),
        ("HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 503),
        ("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 503),
        ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 503),
        ("HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 429),
        ("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", 503),
        ("no HTTP at all\r\n", 503),
    ] {
        let haproxy = HaProxy::start(&home(), always(answer), hello());
        let found = haproxy.get();
        assert_eq!(found.status, expected, "{answer}: {found:?}");
    }
}

/// The routes of deploy/tollgate.toml, through HAProxy: a client chooses neither the route nor the key by what it sends, and its
/// own headers come along.
#[test]
fn a_client_cannot_choose_route_or_key_through_haproxy() {
    let policy = std::fs::read_to_string(of_repository("deploy/tollgate.toml")).unwrap();
    // Nothing comes back while the test runs, however slow the machine.
    let policy = policy
        .replace("rate = \"10/s\"\nburst = 20", "rate = \"1/h\"\nburst = 500")
        .replace("\"1m\"", "\"1h\"");
    let by_header = "[limits.user]\nstrategy = \"fixed_window\"\nlimit = 1\nwindow = \"1h\"\n\
                     [[routes]]\npath = \"/mine\"\nlimit = \"user\"\nkey = \"header:x-user\"\n";
    let tollgate = server::with(&format!("{policy}{by_header}"), &[], &[]);
    let haproxy = HaProxy::start(&home(), tollgate.http(), hello());
    for _ in 0..5 {
        assert_eq!(haproxy.ask("POST", "/login?next=/", &["content-length: 0"]).status, 200);
    }
    for (path, line) in [
        ("/login", "x-nothing: 1"),
        ("//login", "x-nothing: 1"),
        ("/%6Cogin", "x-nothing: 1"),
        ("/login", "X-Original-URI: /elsewhere"),
        ("/login", "X-Original-Method: GET"),
        ("/login", "X-Forwarded-Uri: /elsewhere"),
        ("/login", "X-Forwarded-For: 203.0.113.7"),
    ] {
        let answer = haproxy.ask("POST", path, &["content-length: 0", line]);
        assert_eq!(answer.status, 429, "{path} {line}: {answer:?}");
    }
    assert_eq!(haproxy.ask("GET", "/login", &[]).status, 200, "only POST is limited so");
    for (user, status) in [("ann", 200), ("ann", 429), ("bob", 200)] {
        assert_eq!(haproxy.ask("GET", "/mine", &[&format!("x-user: {user}")]).status, status, "{user}");
    }
    assert_eq!(haproxy.ask("GET", "/mine", &[]).status, 429, "without a key");
    let status = tollgate.get("/v1/status?limit=login&key=ip:127.0.0.1").body;
    assert!(status.contains("\"used\":5"), "{status}");
}
