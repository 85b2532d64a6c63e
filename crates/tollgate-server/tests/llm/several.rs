//! Several gateways on one store: one truth, also while one is killed, restarted, or cut off.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tollgate_testkit::http::Connection;
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::provider::{Allowed, Provider, openai};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, left, until};

/// Gateways on one store, before one provider.
fn gateways(count: usize, store: &str, provider: &Provider, rest: &str) -> Vec<Tollgate> {
    let config = format!(
        "{rest}\n{store}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\napi_key = 'x'\n",
        provider.address()
    );
    (0..count).map(|_| Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start()).collect()
}

fn redis(url: &str, more: &str) -> String {
    format!("[store]\nmode = 'redis'\ntimeout = '2s'\nredis = {{ url = '{url}' }}\n{more}")
}

/// Sends until so many were answered or the time is over; how many were.
fn send(gateways: &[&Tollgate], clients: usize, calls: usize, during: Duration) -> usize {
    let (sent, answered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..clients {
            let (sent, answered) = (&sent, &answered);
            let gateway = gateways[client % gateways.len()];
            scope.spawn(move || {
                let mut connection = Connection::open(gateway.http());
                let (body, lines) = (chat(20, ""), "content-type: application/json");
                let request = format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                while began.elapsed() < during && sent.fetch_add(1, Ordering::Relaxed) < calls {
                    if connection.send(request.as_bytes()).is_err() {
                        return;
                    }
                    let Ok(answer) = connection.receive(false) else { return };
                    assert_eq!(answer.status, 200, "{answer:?}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    answered.load(Ordering::Relaxed)
}

fn postgres(server: &PostgresServer, port: u16, more: &str) -> String {
    let url = server.url("gateways").replace(&server.port().to_string(), &port.to_string());
    format!("[store]\nmode = 'postgres'\ntimeout = '5s'\npostgres = {{ url = '{url}' }}\n{more}")
}

/// A PostgreSQL server with an empty database.
fn empty_postgres() -> PostgresServer {
    let server = PostgresServer::start();
    server.psql("CREATE DATABASE gateways");
    server
}

/// Three gateways keep one limit, of which one is killed with calls on their way and places in line: what it has reserved lapses, and no
/// call of the others fails.
fn check_three_of_which_one_is_killed(store: &str, requests: u64, margin: &str, calls: usize) {
    let window = Duration::from_secs(2);
    let provider = Provider::judging(Allowed { requests, tokens: 1_000_000, window }, openai);
    let rest = format!(
        "llm.window = '2s'\nllm.margin = '{margin}'\n[llm.models.gpt-4o]\nrpm = {requests}\ntpm = 1000000"
    );
    let mut gateways = gateways(3, store, &provider, &rest);
    let killed = gateways.pop().expect("three");
    let long = Duration::from_secs(60);
    std::thread::scope(|scope| {
        let of_killed = scope.spawn(|| send(&[&killed], 8, usize::MAX, long));
        let others: Vec<&Tollgate> = gateways.iter().collect();
        let of_others = scope.spawn(move || send(&others, 16, calls, long));
        let some = usize::try_from(requests * 3 / 2).expect("a number");
        until("the first window is used", || provider.arrivals().len() >= some);
        killed.signal(Signal::KILL);
        of_killed.join().expect("its clients see the connection end");
        assert_eq!(of_others.join().expect("no call of the others fails"), calls);
    });
    provider.assert_clean();
}

#[test]
fn g2_three_gateways_on_one_redis_keep_one_limit_and_one_may_be_killed() {
    let server = RedisServer::start();
    check_three_of_which_one_is_killed(&redis(&server.url(), ""), 40, "300ms", 100);
}

/// At 50 requests a second.
#[test]
fn g2_three_gateways_on_one_postgres_keep_one_limit_and_one_may_be_killed() {
    let server = empty_postgres();
    let store = postgres(&server, server.port(), "");
    check_three_of_which_one_is_killed(&store, 100, "500ms", 300);
}

/// A gateway is killed while its calls are under way at the provider: what it has reserved is charged to the others until it leaves the window, and not
/// longer. The judge counts the calls of both.
fn check_what_a_killed_gateway_has_reserved(store: &str) {
    let window = Duration::from_secs(10);
    let provider = Provider::judging(Allowed { requests: 1_000, tokens: 1_000, window }, |arrival| {
        match arrival.body["user"].as_str() {
            // Long after the kill.
            Some("slow") => openai(arrival).paced(Duration::from_secs(60)),
            _ => openai(arrival),
        }
    });
    let rest = "llm.window = '10s'\nllm.margin = '300ms'\n[llm.models.gpt-4o]\nrpm = 1000\ntpm = 1000";
    let gateways = gateways(2, store, &provider, rest);
    let (killed, other) = (&gateways[0], &gateways[1]);
    let ask = |gateway: &Tollgate, tokens: u64, more: &str| {
        let mut connection = Connection::open(gateway.http());
        let (body, lines) = (chat(tokens, more), "x-stainless-read-timeout: 60");
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        connection.send(request.as_bytes()).expect("sent");
        connection
    };
    let slow: Vec<Connection> = (0..2).map(|_| ask(killed, 400, ",\"user\":\"slow\"")).collect();
    until("both are under way", || provider.arrivals().len() == 2);
    killed.signal(Signal::KILL);
    for mut connection in slow {
        assert!(connection.receive(false).is_err(), "its clients see the connection end");
    }
    assert_eq!(left(other, "llm.gpt-4o.tpm"), 200, "as reserved, though nobody will settle it");
    let check: serde_json::Value =
        serde_json::from_str(&other.post("/v1/llm/check", &chat(300, "")).body).expect("JSON");
    assert_eq!(
        (&check["can_proceed"], check["wait_seconds"].as_f64().is_some()),
        (&false.into(), true),
        "{check}"
    );
    assert_eq!(ask(other, 150, "").receive(false).expect("an answer").status, 200, "there is room for it");
    // It needs what the killed gateway has reserved, and waits until that has left the window.
    assert_eq!(ask(other, 820, "").receive(false).expect("an answer").status, 200);
    provider.assert_clean();
    let arrivals = provider.arrivals();
    assert_eq!(arrivals.iter().map(|arrival| arrival.tokens).collect::<Vec<_>>(), [400, 400, 150, 820]);
    assert!(arrivals[3].at - arrivals[1].at >= window, "{:?}", arrivals[3].at - arrivals[1].at);
}

#[test]
fn g2_what_a_killed_gateway_has_reserved_on_redis_stays_charged_until_it_lapses() {
    let server = RedisServer::start();
    check_what_a_killed_gateway_has_reserved(&redis(&server.url(), ""));
}

#[test]
fn g2_what_a_killed_gateway_has_reserved_on_postgres_stays_charged_until_it_lapses() {
    let server = empty_postgres();
    check_what_a_killed_gateway_has_reserved(&postgres(&server, server.port(), ""));
}

/// Three gateways whose store is cut off: they let nothing through, or each a third of the limit.
fn check_a_store_that_is_cut_off(port: u16, store: impl Fn(u16, &str) -> String) {
    for (more, expected) in [("fallback = 'closed'", 0), ("fallback = 'local'\nfallback_instances = 3", 3)] {
        let provider = Provider::start(openai);
        let proxies: Vec<FaultProxy> = (0..3).map(|_| FaultProxy::start(port)).collect();
        let rest = "llm.max_wait = '100ms'\n[llm.models.gpt-4o]\nrpm = 9";
        let gateways: Vec<Tollgate> = proxies
            .iter()
            .flat_map(|proxy| gateways(1, &store(proxy.port(), more), &provider, rest))
            .collect();
        for gateway in &gateways {
            assert_eq!(gateway.get("/readyz").status, 200);
        }
        proxies.iter().for_each(|proxy| proxy.set(Mode::Refuse));
        let mut admitted = 0;
        for gateway in &gateways {
            for _ in 0..12 {
                let answer = gateway.post("/v1/chat/completions", &chat(20, ""));
                match answer.status {
                    200 => admitted += 1,
                    429 | 503 => {
                        assert!(answer.body.contains("\"error\""), "{answer:?}");
                        assert!(answer.field("retry-after-ms").is_some(), "{answer:?}");
                    }
                    _ => panic!("{answer:?}"),
                }
            }
        }
        assert_eq!((admitted, provider.arrivals().len()), (3 * expected, 3 * expected), "{more}");
    }
}

#[test]
fn g2_a_redis_that_is_cut_off_refuses_or_divides() {
    let server = RedisServer::start();
    check_a_store_that_is_cut_off(server.port(), |port, more| {
        let url = format!("redis://127.0.0.1:{port}");
        format!("[store]\nmode = 'redis'\ntimeout = '200ms'\n{more}\nredis = {{ url = '{url}' }}")
    });
}

#[test]
fn g2_a_postgres_that_is_cut_off_refuses_or_divides() {
    let server = empty_postgres();
    check_a_store_that_is_cut_off(server.port(), |port, more| postgres(&server, port, more));
}

#[test]
fn g3_a_restart_inside_a_window_is_no_second_allowance() {
    let provider = Provider::start(openai);
    let server = RedisServer::start();
    let rest = "llm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 4\ntpm = 100000";
    let start = || gateways(1, &redis(&server.url(), ""), &provider, rest).pop().expect("one");
    let ask = |gateway: &Tollgate| gateway.post("/v1/chat/completions", &chat(20, "")).status;
    let first = start();
    assert_eq!([ask(&first), ask(&first), ask(&first)], [200; 3]);
    first.signal(Signal::KILL);
    first.ended();
    let second = start();
    assert_eq!([ask(&second), ask(&second)], [200, 429]);
    assert_eq!(second.stop().code, Some(0));
    assert_eq!(ask(&start()), 429);
    assert_eq!(provider.arrivals().len(), 4);
}

/// A store that is away when calls end: what they have used is settled once it is back, less and more than was
/// reserved.
fn check_settlements_of_an_outage(port: u16, store: impl Fn(u16, &str) -> String) {
    let provider = Provider::start(|arrival| match arrival.body["user"].as_str() {
        Some("slow") => openai(arrival).paced(Duration::from_millis(1_500)),
        _ => openai(arrival),
    });
    let proxy = FaultProxy::start(port);
    let config = store(proxy.port(), "fallback = 'closed'");
    let gateway =
        gateways(1, &config, &provider, "[llm.models.gpt-4o]\nrpm = 100\ntpm = 10000").pop().expect("one");
    let used = |reserved: u64, output: u64| {
        let said = format!("\"input_tokens\":\"8\",\"output_tokens\":\"{output}\"");
        chat(reserved, ",\"user\":\"slow\"").replace("\"input_tokens\":\"8\"", &said)
    };
    std::thread::scope(|scope| {
        let calls = [(900, 12), (100, 492)].map(|(reserved, output)| {
            let (gateway, body) = (&gateway, used(reserved, output));
            scope.spawn(move || gateway.post("/v1/chat/completions", &body).status)
        });
        until("both are under way", || provider.arrivals().len() == 2);
        proxy.set(Mode::Refuse);
        let answered = calls.map(|call| call.join().expect("an answer"));
        assert_eq!(answered, [200, 200], "clients do not see it");
    });
    // Long enough that each has been tried in vain.
    std::thread::sleep(Duration::from_millis(500));
    proxy.set(Mode::Pass);
    let status = || {
        let body = gateway.get("/v1/status?limit=llm.gpt-4o.tpm&key=llm:up").body;
        serde_json::from_str::<serde_json::Value>(&body).ok()?["remaining"].as_u64()
    };
    until("both are settled", || status() == Some(10_000 - 20 - 500));
}

#[test]
fn g2_what_calls_used_is_settled_when_redis_is_back() {
    let server = RedisServer::start();
    check_settlements_of_an_outage(server.port(), |port, more| {
        let url = format!("redis://127.0.0.1:{port}");
        format!("[store]\nmode = 'redis'\ntimeout = '200ms'\n{more}\nredis = {{ url = '{url}' }}")
    });
}

#[test]
fn g2_what_calls_used_is_settled_when_postgres_is_back() {
    let server = empty_postgres();
    check_settlements_of_an_outage(server.port(), |port, more| postgres(&server, port, more));
}
