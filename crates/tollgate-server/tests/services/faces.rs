//! Whatever a caller can put into a name, a key, a cost, an id or a time to live, over every face, on real stores: it is answered,
//! well formed, and never taken for a failure of the store.
//!
//! A failure that callers can provoke would have the server leave its store alone, and limits fall back for everybody else.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};
use tollgate_testkit::http::{Answer, Connection};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;
use tonic::Code;
use tonic::transport::Channel;

use crate::client::{Entry, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, ask, channel};
use crate::server::{self, Tollgate};

/// How many requests each store gets.
const REQUESTS: u32 = 300;

const LIMITS: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "1000/s"
burst = 1000

[limits.queue]
strategy = "leaky_bucket"
rate = "10/s"
capacity = 5

[limits.login]
strategy = "fixed_window"
limit = 5
window = "1h"

[limits.log]
strategy = "sliding_window"
limit = 20
window = "1h"

[limits.counter]
strategy = "sliding_window_counter"
limit = 20
window = "1h"

[limits.busy]
strategy = "concurrency"
limit = 9
lease = "1m"

[limits.free]
unlimited = true

[limits.shut]
blocked = true

[[envoy]]
domain = "edge"
entries = ["x-user"]
limit = "login"

[[envoy]]
domain = "edge"
entries = ["x-user", "path=/a*"]
limit = "log"
"#;

const NAMES: [&str; 8] = ["api", "queue", "login", "log", "counter", "busy", "free", "shut"];

/// One request over one face.
#[derive(Clone, Debug)]
enum Asked {
    Json(&'static str, Value),
    Get(String),
    Resp(Vec<Vec<u8>>),
    Envoy(Vec<u8>, Vec<RateLimitDescriptor>, u32),
}

/// Text that has come to grief somewhere before.
fn nasty() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => any::<String>(),
        1 => prop::sample::select(vec![
            "", "a\0b", "\0", "'", "\"", "\\", "%", "%00", "%zz", ":", "::", "a:b:c", "a:b:c:d", "{x}", "{", "}:a", "\r\n", "\u{202e}",
            "\u{fffd}", "\u{85}", "'; drop table tollgate_state; --", "$1", "NaN", "null", "\u{10ffff}",
        ]).prop_map(str::to_owned),
        // As long as a part may be, and one more, of what is one, two and three bytes, or becomes three.
        1 => (prop::sample::select(vec!["a", ":", "%", "é", "\u{20ac}", "0"]), prop::sample::select(vec![64_usize, 65, 341, 512, 1_024, 1_025, 3_000]))
            .prop_map(|(text, count)| text.repeat(count)),
    ]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![6 => prop::sample::select(NAMES.to_vec()).prop_map(str::to_owned), 1 => "[a-z0-9_.-]{1,64}", 2 => nasty()]
}

fn key() -> impl Strategy<Value = Value> {
    let parts =
        (nasty(), nasty(), prop::option::of(nasty())).prop_map(|(namespace, key, version)| match version {
            Some(version) => json!({ "namespace": namespace, "key": key, "version": version }),
            None => json!({ "namespace": namespace, "key": key }),
        });
    // As long as a key can be in all: every byte of its three parts is encoded.
    let longest = [":", "%", "é", "a"].map(|text| {
        let part = text.repeat(1_024 / text.len());
        json!({ "namespace": part, "key": part, "version": part })
    });
    prop_oneof![
        3 => "user:[a-c]{1}".prop_map(Value::from),
        3 => nasty().prop_map(Value::from),
        3 => parts,
        1 => prop::sample::select(longest.to_vec()),
    ]
}

/// Whole numbers, most of all where something ends.
fn number() -> impl Strategy<Value = u64> {
    let edges = [
        0,
        1,
        2,
        9,
        1 << 31,
        1 << 32,
        (1 << 53) - 1,
        1 << 53,
        (1 << 53) + 1,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
    ];
    prop_oneof![4 => 1..20_u64, 4 => prop::sample::select(edges.to_vec()), 1 => any::<u64>()]
}

/// What stands where a number should.
fn amount() -> impl Strategy<Value = Value> {
    prop_oneof![
        8 => number().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => nasty().prop_map(Value::from),
        1 => Just(Value::Null),
    ]
}

fn id() -> impl Strategy<Value = String> {
    // `last` is replaced with the reservation that was made last.
    prop_oneof![4 => Just("last".to_owned()), 2 => "[0-9a-fA-F]{32}", 1 => "[0-9a-f]{0,40}", 1 => nasty(), 1 => Just("0".repeat(32))]
}

fn charge() -> impl Strategy<Value = Value> {
    (name(), key(), prop::option::of(amount())).prop_map(|(limit, key, cost)| match cost {
        Some(cost) => json!({ "limit": limit, "key": key, "cost": cost }),
        None => json!({ "limit": limit, "key": key }),
    })
}

fn posted() -> impl Strategy<Value = Asked> {
    let request =
        prop_oneof![charge(), vec(charge(), 0..6).prop_map(|charges| json!({ "charges": charges }))];
    let ttl = prop::option::of(prop_oneof![
        Just(json!(60_000)),
        Just(json!(86_400_000_u64)),
        Just(json!(86_400_001_u64)),
        amount()
    ]);
    let reserve = (request.clone(), ttl).prop_map(|(mut body, ttl)| {
        if let Some(ttl) = ttl {
            body["ttl_ms"] = ttl;
        }
        Asked::Json("/v1/reserve", body)
    });
    let actual = prop_oneof![
        amount(),
        vec((name(), amount()), 0..5).prop_map(|each| Value::Object(each.into_iter().collect())),
    ];
    let settle = (
        id(),
        prop::option::of(actual),
        prop::sample::select(vec!["/v1/settle", "/v1/settle", "/v1/cancel", "/v1/renew"]),
    );
    let settle = settle.prop_map(|(id, actual, path)| {
        let mut body = json!({ "reservation": id });
        if let Some(actual) = actual.filter(|_| path == "/v1/settle") {
            body["actual"] = actual;
        }
        Asked::Json(path, body)
    });
    let reset = (name(), key())
        .prop_map(|(limit, key)| Asked::Json("/v1/reset", json!({ "limit": limit, "key": key })));
    prop_oneof![
        3 => (prop::sample::select(vec!["/v1/check", "/v1/peek"]), request).prop_map(|(path, body)| Asked::Json(path, body)),
        1 => vec(charge(), 0..20).prop_map(|checks| Asked::Json("/v1/checks", json!({ "checks": checks }))),
        3 => reserve,
        4 => settle,
        1 => reset,
    ]
}

/// Any bytes in a URL.
fn encoded(bytes: &[u8]) -> String {
    percent_encoding::percent_encode(bytes, percent_encoding::NON_ALPHANUMERIC).to_string()
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![2 => nasty().prop_map(String::into_bytes), 1 => vec(any::<u8>(), 0..40), 1 => vec(any::<u8>(), 300..1_100)]
}

fn looked() -> impl Strategy<Value = Asked> {
    let limit = prop_oneof![3 => name().prop_map(String::into_bytes), 1 => bytes()];
    let query = prop_oneof![
        Just(String::new()),
        number().prop_map(|cost| format!("?cost={cost}")),
        bytes().prop_map(|namespace| format!("?namespace={}", encoded(&namespace))),
        Just("?as=ip".to_owned()),
    ];
    prop_oneof![
        3 => (limit.clone(), bytes(), query)
            .prop_map(|(limit, key, query)| Asked::Get(format!("/v1/gate/{}/{}{query}", encoded(&limit), encoded(&key)))),
        1 => (limit, bytes()).prop_map(|(limit, key)| Asked::Get(format!("/v1/status?limit={}&key={}", encoded(&limit), encoded(&key)))),
    ]
}

fn commanded() -> impl Strategy<Value = Asked> {
    let digits =
        || prop_oneof![6 => number().prop_map(|number| number.to_string().into_bytes()), 1 => bytes()];
    let throttle = (bytes(), digits(), digits(), digits(), prop::option::of(digits())).prop_map(
        |(key, burst, count, period, quantity)| {
            let command = [b"CL.THROTTLE".to_vec(), key, burst, count, period];
            Asked::Resp(command.into_iter().chain(quantity).collect())
        },
    );
    let limit = prop_oneof![3 => name().prop_map(String::into_bytes), 1 => bytes()];
    let check = (limit, bytes(), prop::option::of(digits())).prop_map(|(limit, key, cost)| {
        Asked::Resp([b"TOLLGATE.CHECK".to_vec(), limit, key].into_iter().chain(cost).collect())
    });
    prop_oneof![throttle, check]
}

fn described() -> impl Strategy<Value = Asked> {
    let key = prop_oneof![4 => Just(b"x-user".to_vec()), 1 => Just(b"path".to_vec()), 1 => bytes()];
    let entry = (key, bytes()).prop_map(|(key, value)| Entry { key, value });
    let limit = (any::<u32>(), -1..9_i32)
        .prop_map(|(requests_per_unit, unit)| RateLimitOverride { requests_per_unit, unit });
    let descriptor =
        (vec(entry, 0..3), prop::option::weighted(0.3, limit), prop::option::of(number()), any::<bool>());
    let descriptor = descriptor.prop_map(|(entries, limit, hits_addend, is_negative_hits)| {
        RateLimitDescriptor { entries, limit, hits_addend, is_negative_hits }
    });
    let domain = prop_oneof![6 => Just(b"edge".to_vec()), 1 => bytes()];
    (domain, vec(descriptor, 0..4), any::<u32>())
        .prop_map(|(domain, descriptors, hits)| Asked::Envoy(domain, descriptors, hits))
}

/// A server, and a connection over each of its faces.
struct Faces {
    server: Tollgate,
    http: RefCell<Connection>,
    resp: RefCell<BufReader<TcpStream>>,
    grpc: Channel,
    runtime: tokio::runtime::Runtime,
    /// The reservation that was made last.
    reservation: RefCell<String>,
}

impl Faces {
    fn of(server: Tollgate) -> Faces {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let resp = TcpStream::connect(server.resp()).expect("it listens");
        resp.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        Faces {
            http: RefCell::new(server.connect()),
            resp: RefCell::new(BufReader::new(resp)),
            grpc: runtime.block_on(channel(&server)),
            reservation: RefCell::new("1".repeat(32)),
            runtime,
            server,
        }
    }

    fn check(&self, asked: &Asked) -> Result<(), TestCaseError> {
        match asked {
            Asked::Json(path, body) => {
                let body = body.to_string().replace(
                    "\"reservation\":\"last\"",
                    &format!("\"reservation\":\"{}\"", self.reservation.borrow()),
                );
                let answer = self.http.borrow_mut().ask_with_body(
                    "POST",
                    path,
                    &["content-type: application/json"],
                    &body,
                );
                self.check_json(&answer, &[200, 400, 404])?;
            }
            Asked::Get(path) => {
                let answer = self.http.borrow_mut().ask("GET", path, &[]);
                match path.starts_with("/v1/gate/") && answer.status == 200 {
                    true => prop_assert_eq!(&*answer.body, ""),
                    false => self.check_json(&answer, &[200, 400, 404, 429])?,
                }
            }
            Asked::Resp(command) => self.check_resp(command)?,
            Asked::Envoy(domain, descriptors, hits_addend) => {
                let (domain, descriptors) = (domain.clone(), descriptors.clone());
                let request = RateLimitRequest { domain, descriptors, hits_addend: *hits_addend };
                match self.runtime.block_on(ask(&self.grpc, request.clone())) {
                    Ok(answer) => prop_assert_eq!(answer.statuses.len(), request.descriptors.len()),
                    Err(status) => prop_assert_eq!(status.code(), Code::InvalidArgument, "{}", status),
                }
            }
        }
        self.check_store()
    }

    fn check_json(&self, answer: &Answer, statuses: &[u16]) -> Result<(), TestCaseError> {
        prop_assert!(statuses.contains(&answer.status), "{:?}", answer);
        let body: Value = serde_json::from_str(&answer.body)
            .map_err(|error| TestCaseError::fail(format!("{error}: {answer:?}")))?;
        prop_assert!(body.is_object() && body["degraded"] != true, "{:?}", answer);
        if let Some(id) = body["reservation"].as_str() {
            *self.reservation.borrow_mut() = id.to_owned();
        }
        let of_each = body["results"].as_array().into_iter().flatten();
        for one in of_each {
            prop_assert!(one["degraded"] == false || one["error"]["status"] == 400, "{}", one);
        }
        Ok(())
    }

    fn check_resp(&self, command: &[Vec<u8>]) -> Result<(), TestCaseError> {
        let mut stream = self.resp.borrow_mut();
        let mut sent = format!("*{}\r\n", command.len()).into_bytes();
        for part in command {
            sent.extend(format!("${}\r\n", part.len()).into_bytes());
            sent.extend_from_slice(part);
            sent.extend_from_slice(b"\r\n");
        }
        stream.get_mut().write_all(&sent).expect("it reads");
        let mut line = || {
            let mut line = String::new();
            stream.read_line(&mut line).map(|_| line.trim_end().to_owned())
        };
        let head = line().map_err(|error| TestCaseError::fail(error.to_string()))?;
        let parts = match head.split_at(1) {
            ("*", count) => count.parse::<usize>().map_err(|error| TestCaseError::fail(error.to_string()))?,
            _ => 0,
        };
        prop_assert!(head.starts_with("-ERR ") || matches!(&*head, "*5" | "*6"), "{}", head);
        for _ in 0..parts {
            let part = line().map_err(|error| TestCaseError::fail(error.to_string()))?;
            if part.starts_with('$') {
                let name = line().map_err(|error| TestCaseError::fail(error.to_string()))?;
                prop_assert_eq!(part, format!("${}", name.len()));
            } else {
                prop_assert!(part.starts_with(':'), "{}", part);
            }
        }
        Ok(())
    }

    /// The store was never found wanting.
    fn check_store(&self) -> Result<(), TestCaseError> {
        let about: Value = serde_json::from_str(&self.http.borrow_mut().ask("GET", "/v1/server", &[]).body)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        let store = &about["store"];
        prop_assert_eq!(&store["state"], "up", "{}", store);
        prop_assert_eq!(&store["last_failure"], &Value::Null, "{}", store);
        for count in ["outages", "fallen_back", "ambiguous"] {
            prop_assert_eq!(&store[count], 0, "{}", store);
        }
        Ok(())
    }
}

fn check(server: Tollgate) {
    let faces = Faces::of(server);
    let asked = prop_oneof![4 => posted(), 2 => looked(), 2 => commanded(), 2 => described()];
    let config = Config { cases: REQUESTS, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&asked, |asked| faces.check(&asked));
    if let Err(error) = checked {
        panic!("{error}\n{}", faces.server.output());
    }
    let metrics = faces.server.get("/metrics").body;
    let failed = |line: &&str| {
        let is_failure = [
            "rate_limiter_backend_errors_total",
            "rate_limiter_fallback_total",
            "rate_limiter_ambiguous_total",
        ];
        is_failure.iter().any(|name| line.starts_with(name)) && !line.ends_with(" 0")
    };
    assert_eq!(metrics.lines().filter(failed).collect::<Vec<_>>(), Vec::<&str>::new());
}

fn on_redis(redis: &RedisServer, limits: &str) -> Tollgate {
    let store =
        format!("[store]\nmode = \"redis\"\ntimeout = \"5s\"\nredis = {{ url = \"{}\" }}\n", redis.url());
    server::with(&format!("{store}{limits}"), &[], &[])
}

fn on_postgres(postgres: &PostgresServer, limits: &str) -> Tollgate {
    let url = postgres.url("postgres");
    let store = format!("[store]\nmode = \"postgres\"\ntimeout = \"5s\"\npostgres = {{ url = \"{url}\" }}\n");
    server::with(&format!("{store}{limits}"), &[], &[])
}

#[test]
fn nothing_that_callers_send_is_a_failure_of_redis() {
    let redis = RedisServer::start();
    check(on_redis(&redis, LIMITS));
}

#[test]
fn nothing_that_callers_send_is_a_failure_of_postgres() {
    let postgres = PostgresServer::builder().setting("fsync", "off").start();
    check(on_postgres(&postgres, LIMITS));
}

/// A settlement with a zero in the name of a limit, by anybody: PostgreSQL refused the text, that counted as an outage, and the key
/// of somebody else, which had nothing left, was let through.
#[test]
fn a_settlement_of_nonsense_lets_nobody_else_through() {
    let limits = "[limits.login]\nstrategy = \"fixed_window\"\nlimit = 1\nwindow = \"1h\"\n";
    let (redis, postgres) = (RedisServer::start(), PostgresServer::builder().setting("fsync", "off").start());
    for server in [on_redis(&redis, limits), on_postgres(&postgres, limits)] {
        let bystander = r#"{"limit":"login","key":"user:1"}"#;
        assert!(server.post("/v1/check", bystander).body.contains("\"allowed\":true"));
        for _ in 0..20 {
            let attack = r#"{"reservation":"0123456789abcdef0123456789abcdef","actual":{"a\u0000b":1}}"#;
            assert_eq!(server.post("/v1/settle", attack).status, 400);
            let body = server.post("/v1/check", bystander).body;
            assert!(body.contains("\"allowed\":false") && body.contains("\"degraded\":false"), "{body}");
        }
    }
}
