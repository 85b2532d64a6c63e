//! Caddy before the server, as `deploy/caddy/Caddyfile` has it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testkit::free_port;
use tollgate_testkit::http::{Answer, Connection};

use crate::server::{self, home, of_repository};

/// A running Caddy. Dropping it ends it.
struct Caddy {
    child: Child,
    address: SocketAddr,
}

impl Caddy {
    /// With our configuration, its ports and addresses exchanged for those of this test.
    fn start(home: &Path, tollgate: SocketAddr, service: SocketAddr) -> Caddy {
        let mut config = std::fs::read_to_string(of_repository("deploy/caddy/Caddyfile")).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        for (from, to) in [
            ("reverse_proxy 127.0.0.1:8080", format!("reverse_proxy {tollgate}")),
            ("reverse_proxy 127.0.0.1:9000", format!("reverse_proxy {service}")),
            ("\n:8000", format!("\n:{}", address.port())),
            // A loaded machine may be slower than production should be.
            ("500ms", "20s".to_owned()),
            ("100ms", "20s".to_owned()),
        ] {
            assert_eq!(config.matches(from).count(), 1, "{from}");
            config = config.replace(from, &to);
        }
        // Nothing but this one port: no API on 2019, no certificates.
        let options = "{\n\tadmin off\n\tauto_https off\n\tdefault_bind 127.0.0.1\n}\n";
        std::fs::write(home.join("Caddyfile"), format!("{options}{config}")).unwrap();
        let mut command = Command::new("caddy");
        command.args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"]).current_dir(home);
        // What it keeps between runs is below its home.
        command.env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME");
        let log = std::fs::File::create(home.join("caddy.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let child = child.unwrap_or_else(|error| panic!("caddy is not installed, ./test does it: {error}"));
        let mut caddy = Caddy { child, address };
        let end = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).is_err() {
            let log = || std::fs::read_to_string(home.join("caddy.log")).unwrap_or_default();
            assert!(caddy.child.try_wait().unwrap().is_none(), "caddy ended: {}", log());
            assert!(Instant::now() < end, "caddy does not listen: {}", log());
            std::thread::yield_now();
        }
        caddy
    }

    fn ask(&self, method: &str, path: &str, lines: &[&str], body: &str) -> Answer {
        Connection::open(self.address).ask_with_body(method, path, lines, body)
    }
}

impl Drop for Caddy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service that answers with the request as it received it: the request line, the rate-limit fields, the body.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut received, mut length, mut line) = (String::new(), 0, String::new());
            while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
                let lower = line.trim_end().to_ascii_lowercase();
                if received.is_empty() || lower.starts_with("ratelimit") {
                    received.push_str(line.trim_end());
                    received.push('|');
                }
                length = lower.strip_prefix("content-length: ").map_or(length, |n| n.parse().unwrap());
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            received.push_str(&String::from_utf8(body).unwrap());
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", received.len());
            let _ = stream.write_all((head + &received).as_bytes());
        }
    });
    address
}

const CONFIG: &str = "[limits.api]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\n\
                      [requests]\ntrusted_proxies = [\"127.0.0.1\"]\n\
                      [[routes]]\nexcept = [\"/healthz\"]\nlimit = \"api\"\n";

#[test]
fn caddy_passes_on_what_fits_and_reports_the_limit_to_the_client() {
    let tollgate = server::with(CONFIG, &[], &[]);
    let caddy = Caddy::start(&home(), tollgate.http(), echo());
    let names = ["ratelimit-policy", "retry-after"];
    for remaining in [1, 0] {
        // The service gets the request as the client sent it. The query is not the gate's: its `deny` would be.
        let path = "/a%20b//c?deny=404&x=%2f";
        let answer = caddy.ask("POST", path, &[], "the body");
        let received = format!("POST {path} HTTP/1.1|the body");
        assert_eq!((answer.status, &answer.body), (200, &received), "{answer:?}");
        assert_eq!(answer.lines_of(&names), ["Ratelimit-Policy: \"api\";q=2;w=3600"], "{answer:?}");
        let quota = answer.field("ratelimit").unwrap_or_default();
        assert!(quota.starts_with(&format!("\"api\";r={remaining};t=")), "{answer:?}");
    }
    // A denial is Tollgate's own answer.
    let answer = caddy.ask("GET", "/x.gif?deny=404", &[], "");
    assert_eq!(answer.status, 429, "{answer:?}");
    assert!(answer.body.contains("quota-exceeded"), "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("application/problem+json"));
    assert_eq!(answer.field("x-ratelimit-remaining"), Some("0"));
    let wait: u64 = answer.field("retry-after").and_then(|wait| wait.parse().ok()).expect("a wait");
    assert!((3_000..=3_600).contains(&wait), "{wait}");
    // Where no limit applies nothing is reported, to the client or to the service.
    let answer = caddy.ask("GET", "/healthz", &[], "");
    assert_eq!((answer.status, &*answer.body), (200, "GET /healthz HTTP/1.1|"), "{answer:?}");
    assert_eq!(answer.field("ratelimit"), None, "{answer:?}");
    let status = tollgate.get("/v1/status?limit=api&key=ip:127.0.0.1").body;
    assert!(status.contains("\"used\":2"), "the client's address is charged: {status}");
    // Without Tollgate requests are refused.
    let address = tollgate.http();
    drop(tollgate);
    assert!(TcpStream::connect(address).is_err());
    assert_eq!(caddy.ask("GET", "/healthz", &[], "").status, 502);
}

/// The routes of deploy/tollgate.toml, through Caddy: a client chooses neither the route nor the key by what it sends.
#[test]
fn a_client_cannot_choose_route_or_key_through_caddy() {
    let config = std::fs::read_to_string(of_repository("deploy/tollgate.toml")).unwrap();
    // Nothing comes back while the test runs, however slow the machine.
    let config = config
        .replace("rate = \"10/s\"\nburst = 20", "rate = \"1/h\"\nburst = 500")
        .replace("\"1m\"", "\"1h\"");
    let tollgate = server::with(&config, &[], &[]);
    let caddy = Caddy::start(&home(), tollgate.http(), echo());
    for _ in 0..5 {
        assert_eq!(caddy.ask("POST", "/login?next=/", &[], "x").status, 200);
    }
    for (path, line) in [
        ("/login", "x-nothing: 1"),
        ("/login?deny=403", "x-nothing: 1"),
        ("//login", "x-nothing: 1"),
        ("/%6Cogin", "x-nothing: 1"),
        ("/login/", "x-nothing: 1"),
        ("/login", "X-Original-URI: /elsewhere"),
        ("/login", "X-Original-Method: GET"),
        ("/login", "X-Forwarded-Uri: /elsewhere"),
        ("/login", "X-Forwarded-Method: GET"),
        ("/login", "Connection: X-Forwarded-Method, X-Forwarded-Uri, X-Forwarded-For"),
        ("/login", "X-Forwarded-For: 203.0.113.7"),
        ("/login", "Forwarded: for=203.0.113.7"),
    ] {
        let answer = caddy.ask("POST", path, &[line], "x");
        assert_eq!(answer.status, 429, "{path} {line}: {answer:?}");
    }
    // An encoded separator may mean another route to the service.
    assert_eq!(caddy.ask("POST", "/login%2f", &[], "x").status, 400);
    assert_eq!(caddy.ask("GET", "/login", &[], "").status, 200, "only POST is limited so");
    let status = |key: &str| tollgate.get(&format!("/v1/status?limit=login&key={key}")).body;
    assert!(status("ip:127.0.0.1").contains("\"used\":5"), "{}", status("ip:127.0.0.1"));
    assert!(status("ip:203.0.113.7").contains("\"used\":0"));
}
