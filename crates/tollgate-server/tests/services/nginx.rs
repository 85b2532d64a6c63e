//! nginx with `auth_request`, as `deploy/nginx/nginx.conf` has it.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testkit::free_port;
use tollgate_testkit::http::{Answer, Connection};

use crate::server::{self, home, of_repository};

/// A running nginx. Dropping it ends it.
struct Nginx {
    child: Child,
    address: SocketAddr,
}

impl Nginx {
    /// With our configuration, its ports and addresses exchanged for those of this test.
    fn start(home: &Path, tollgate: SocketAddr, service: SocketAddr) -> Nginx {
        let config = std::fs::read_to_string(of_repository("deploy/nginx/nginx.conf")).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let mut exchanged = config;
        let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {kind};"));
        for (from, to) in [
            ("127.0.0.1:8080", tollgate.to_string()),
            ("127.0.0.1:9000", service.to_string()),
            ("listen 8000", format!("listen {address}")),
            ("\nhttp {", format!("\nhttp {{ access_log off; {}", places.concat())),
            // A loaded machine may be slower than production should be.
            ("500ms", "20s".to_owned()),
            ("100ms", "20s".to_owned()),
        ] {
            assert_eq!(exchanged.matches(from).count(), 1, "{from}");
            exchanged = exchanged.replace(from, &to);
        }
        std::fs::write(home.join("nginx.conf"), exchanged).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-p").arg(home).args(["-c", "nginx.conf", "-e", "stderr"]);
        command.args(["-g", "daemon off; master_process off; pid nginx.pid;"]);
        let child = command.stdout(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("nginx is not installed, ./test does it: {error}"));
        let mut nginx = Nginx { child, address };
        let end = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).is_err() {
            assert!(nginx.child.try_wait().unwrap().is_none(), "nginx ended");
            assert!(Instant::now() < end, "nginx does not listen");
            std::thread::yield_now();
        }
        nginx
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[])
    }

    fn ask(&self, method: &str, path: &str, lines: &[&str]) -> Answer {
        Connection::open(self.address).ask(method, path, lines)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service that says hello to everybody, as long as the test runs.
fn service() -> SocketAddr {
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
            let _ =
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello");
        }
    });
    address
}

const POLICY: &str = "[limits.api]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\n\
                      [requests]\ntrusted_proxies = [\"127.0.0.1\"]\n[[routes]]\nlimit = \"api\"\n";

#[test]
fn nginx_lets_pass_what_fits_and_tells_how_the_client_stands() {
    let tollgate = server::with(POLICY, &[], &[]);
    let nginx = Nginx::start(&home(), tollgate.http(), service());
    let names = ["x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit-policy", "retry-after"];
    for remaining in [1, 0] {
        let answer = nginx.get("/");
        assert_eq!((answer.status, &*answer.body), (200, "hello"), "{answer:?}");
        let expected = [
            "X-RateLimit-Limit: 2".to_owned(),
            format!("X-RateLimit-Remaining: {remaining}"),
            "RateLimit-Policy: \"api\";q=2;w=3600".to_owned(),
        ];
        assert_eq!(answer.lines_of(&names), expected, "{answer:?}");
        assert!(
            answer
                .field("ratelimit")
                .is_some_and(|said| said.starts_with(&format!("\"api\";r={remaining};t=")))
        );
    }
    let answer = nginx.get("/");
    assert_eq!(answer.status, 429, "{answer:?}");
    assert!(answer.body.contains("quota-exceeded"), "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("application/problem+json"));
    assert_eq!(answer.field("x-ratelimit-remaining"), Some("0"));
    let wait: u64 = answer.field("retry-after").and_then(|wait| wait.parse().ok()).expect("a wait");
    assert!((3_000..=3_600).contains(&wait), "{wait}");
    // The body is JSON whatever the path looks like: it was said to be image/gif.
    for path in ["/x.gif", "/x.html", "/x.jpg"] {
        let answer = nginx.get(path);
        assert_eq!(
            (answer.status, answer.field("content-type")),
            (429, Some("application/problem+json")),
            "{path}"
        );
    }
    // The gate itself is not for clients.
    assert_eq!(nginx.get("/_tollgate").status, 404);
    // It was the client's address that paid.
    let status = tollgate.get("/v1/status?limit=api&key=ip:127.0.0.1").body;
    assert!(status.contains("\"used\":2"), "{status}");
    // Without Tollgate requests pass.
    let address = tollgate.http();
    drop(tollgate);
    assert!(TcpStream::connect(address).is_err());
    let answer = nginx.get("/");
    assert_eq!((answer.status, &*answer.body), (200, "hello"), "{answer:?}");
}

/// The routes of deploy/tollgate.toml, through nginx: a client chooses neither the route nor the key by what it sends.
#[test]
fn a_client_cannot_choose_route_or_key_through_nginx() {
    let policy = std::fs::read_to_string(of_repository("deploy/tollgate.toml")).unwrap();
    // Nothing comes back while the test runs, however slow the machine.
    let policy = policy
        .replace("rate = \"10/s\"\nburst = 20", "rate = \"1/h\"\nburst = 500")
        .replace("\"1m\"", "\"1h\"");
    let tollgate = server::with(&policy, &[], &[]);
    let nginx = Nginx::start(&home(), tollgate.http(), service());
    for _ in 0..5 {
        assert_eq!(nginx.ask("POST", "/login?next=/", &["content-length: 0"]).status, 200);
    }
    for (path, line) in [
        ("/login", "x-nothing: 1"),
        ("//login", "x-nothing: 1"),
        ("/%6Cogin", "x-nothing: 1"),
        ("/login/", "x-nothing: 1"),
        ("/login%2f", "x-nothing: 1"),
        ("/login", "X-Original-URI: /elsewhere"),
        ("/login", "X-Original-Method: GET"),
        ("/login", "X-Forwarded-Uri: /elsewhere"),
        ("/login", "X-Forwarded-Method: GET"),
        ("/login", "X-Forwarded-For: 203.0.113.7"),
        ("/login", "Forwarded: for=203.0.113.7"),
    ] {
        let answer = nginx.ask("POST", path, &["content-length: 0", line]);
        assert_eq!(answer.status, 429, "{path} {line}: {answer:?}");
    }
    assert_eq!(nginx.get("/login").status, 200, "only POST is limited so");
    let answer = nginx.get("/healthz");
    assert_eq!((answer.status, answer.field("ratelimit")), (200, None), "{answer:?}");
    let status = |key: &str| tollgate.get(&format!("/v1/status?limit=login&key={key}")).body;
    assert!(status("ip:127.0.0.1").contains("\"used\":5"), "{}", status("ip:127.0.0.1"));
    assert!(status("ip:203.0.113.7").contains("\"used\":0"));
}
