//! The API with its counters in Redis.

use rustix::process::Signal;
use tollgate_testkit::http::Connection;
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;

use crate::server::{self, POLICY, Tollgate};

/// A server that counts in this Redis.
pub(crate) fn over(redis: &RedisServer, policy: &str) -> Tollgate {
    at(&redis.url(), policy)
}

fn at(url: &str, policy: &str) -> Tollgate {
    let config = format!(
        "[store]\nmode = \"redis\"\nfallback = \"closed\"\ntimeout = \"5s\"\nredis = {{ url = \"{url}\" }}\n{policy}"
    );
    server::with(&config, &[], &[])
}

#[test]
fn the_same_answers_from_redis() {
    let redis = RedisServer::start();
    let [one, other] = [over(&redis, POLICY), over(&redis, POLICY)];
    let ask = r#"{"limit":"login","key":"user:1"}"#;
    for (server, said) in [
        (&one, "\"remaining\":1,"),
        (&other, "\"remaining\":0,"),
        (&one, "\"allowed\":false,"),
        (&other, "\"allowed\":false,"),
    ] {
        let answer = server.post("/v1/check", ask);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(answer.body.contains(said) && answer.body.contains("\"degraded\":false"), "{}", answer.body);
    }
    let held = one.post("/v1/reserve", r#"{"limit":"api","key":"user:1","cost":3}"#).body;
    let (_, rest) = held.split_once("\"reservation\":\"").expect("a reservation");
    let settle = format!(r#"{{"reservation":"{}","actual":1}}"#, &rest[..32]);
    assert_eq!(other.post("/v1/settle", &settle).body, r#"{"settled":"done"}"#);
    assert!(one.get("/v1/status?limit=api&key=user:1").body.contains("\"remaining\":2,"));
    assert_eq!(one.get("/v1/gate/login/user:1?deny=403").status, 403);
    assert_eq!(other.post("/v1/reset", ask).body, r#"{"reset":true}"#);
    // The other may still know for a moment that it was denied (`denial_cache`).
    assert_eq!(other.get("/v1/gate/login/user:1").status, 200);
    let batch =
        r#"{"checks":[{"limit":"free","key":"a"},{"limit":"even","key":"a"},{"limit":"shut","key":"a"}]}"#;
    let results: serde_json::Value = serde_json::from_str(&one.post("/v1/checks", batch).body).unwrap();
    let allowed: Vec<_> = results["results"].as_array().unwrap().iter().map(|one| &one["allowed"]).collect();
    assert_eq!(allowed, [true, true, false]);
    assert!(one.get("/v1/limits").body.contains("\"store\":\"redis\""));
}

/// A store that is back is known to be, though nobody asks for a decision.
#[test]
fn a_store_that_is_back_is_up_without_a_call() {
    let redis = RedisServer::start();
    let config = format!(
        "[store]\nmode = \"redis\"\ntimeout = \"300ms\"\nredis = {{ url = \"{}\" }}\n{POLICY}",
        redis.url()
    );
    let server = server::with(&config, &[], &[]);
    let until = |expected: &str, ask: bool| {
        let start = std::time::Instant::now();
        loop {
            if ask {
                server.post("/v1/check", r#"{"limit":"login","key":"user:1"}"#);
            }
            let answer = server.get("/readyz").body;
            if answer == expected {
                return;
            }
            assert!(start.elapsed() < std::time::Duration::from_secs(30), "{answer}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    };
    until("ready\n", true);
    redis.stop();
    until("ready, without the store: limits fall back\n", true);
    redis.resume();
    until("ready\n", false);
}

/// How often Redis was asked to decide.
fn calls(redis: &RedisServer) -> usize {
    let stat = redis.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
    let calls = stat.split(',').find_map(|field| field.strip_prefix("calls="));
    calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
}

/// A batch is few calls to Redis, and what concerns one key is decided in its order, in whichever way the key is written.
#[test]
fn a_batch_is_asked_for_together_and_told_in_order() {
    let redis = RedisServer::start();
    let policy = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"1/d\"\nburst = 3\n";
    let server = over(&redis, policy);
    let keys: Vec<String> = (0..200)
        .map(|number| format!("user:{number}"))
        .chain((0..6).map(|turn| if turn % 2 == 0 { "default:again".into() } else { "again".into() }))
        .collect();
    let checks: Vec<String> =
        keys.iter().map(|key| format!("{{\"limit\":\"api\",\"key\":\"{key}\"}}")).collect();
    let batch = format!("{{\"checks\":[{}]}}", checks.join(","));
    let before = calls(&redis);
    let answer = server.post("/v1/checks", &batch);
    let made = calls(&redis) - before;
    // 64 checks go into one call of the store, and that is one script for 32 keys.
    assert_eq!(made, 7, "calls for {} checks", keys.len());
    let results: serde_json::Value = serde_json::from_str(&answer.body).expect("results");
    let results = results["results"].as_array().expect("a list");
    let reported: Vec<_> = results
        .iter()
        .map(|one| (one["allowed"].as_bool().unwrap(), one["limits"][0]["remaining"].as_u64().unwrap()))
        .collect();
    assert_eq!(reported[..200], [(true, 2); 200]);
    assert_eq!(reported[200..], [(true, 2), (true, 1), (true, 0), (false, 0), (false, 0), (false, 0)]);
}

/// A pipeline is few calls to Redis, in the order of its commands, with mistakes answered in their place.
#[test]
fn a_pipeline_is_charged_together_and_answered_in_order() {
    let redis = RedisServer::start();
    let policy = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"1/d\"\nburst = 3\n";
    let server = over(&redis, policy);
    let mut stream = std::net::TcpStream::connect(server.resp()).expect("connected");
    let command = |words: &[&str]| {
        let words: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        format!("*{}\r\n{words}", words.matches('$').count())
    };
    let mut ask = |commands: &[String]| {
        use std::io::{Read, Write};
        stream.write_all(commands.concat().as_bytes()).expect("written");
        stream.write_all(command(&["PING"]).as_bytes()).expect("written");
        let (mut text, mut bytes) = (String::new(), [0; 4096]);
        while !text.ends_with("+PONG\r\n") {
            let size = stream.read(&mut bytes).expect("an answer");
            assert!(size > 0, "the connection has ended: {text}");
            text.push_str(std::str::from_utf8(&bytes[..size]).expect("text"));
        }
        text
    };
    let check = |key: &str| command(&["TOLLGATE.CHECK", "api", key]);
    let warm = ask(&[check("warm")]);
    assert!(warm.starts_with("*"), "{warm}");
    let before = calls(&redis);
    let keys: Vec<String> = (0..30).map(|number| check(&format!("user:{number}"))).collect();
    let answers = ask(&keys);
    assert_eq!(answers.matches("*6\r\n:1\r\n").count(), 30, "{answers}");
    assert!(calls(&redis) - before <= 2, "{} calls for 30 commands", calls(&redis) - before);
    // One key in order, a key that makes no sense between them, and one that only looks.
    let before = calls(&redis);
    let mixed: Vec<String> = ["again", "again", "a:b:c:d", "default:again", "again"].map(check).to_vec();
    let answers = ask(&mixed);
    let reported: Vec<&str> = answers.split("\r\n").filter(|line| line.starts_with(['*', '-'])).collect();
    assert_eq!(reported.len(), 5, "{answers}");
    assert!(reported[2].starts_with("-ERR malformed key"), "{answers}");
    let allowed = |answer: &str| answer.split("\r\n").next() == Some(":1");
    let answered: Vec<bool> = answers.split("*6\r\n").skip(1).map(allowed).collect();
    assert_eq!(answered, [true, true, true, false], "{answers}");
    assert!(calls(&redis) - before <= 2, "{} calls for four charges", calls(&redis) - before);
    let throttle = |quantity: &str| command(&["CL.THROTTLE", "k", "2", "1", "3600", quantity]);
    let answers = ask(&["1", "0", "2", "1"].map(throttle));
    let remaining: Vec<&str> =
        answers.split("*5\r\n").skip(1).filter_map(|answer| answer.split("\r\n").nth(2)).collect();
    assert_eq!(remaining, [":2", ":2", ":0", ":0"], "{answers}");
}

/// What a batch of single checks is reported of each: allowed, remaining, and whether that was decided without the store.
fn batch(server: &Tollgate, keys: &[&str]) -> Vec<(bool, u64, bool)> {
    let check = |key: &&str| {
        let limit = if key.starts_with("free") { "free" } else { "api" };
        format!("{{\"limit\":\"{limit}\",\"key\":\"{key}\"}}")
    };
    let checks: Vec<String> = keys.iter().map(check).collect();
    let answer = server.post("/v1/checks", &format!("{{\"checks\":[{}]}}", checks.join(",")));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let results: serde_json::Value = serde_json::from_str(&answer.body).expect("results");
    let reported = |one: &serde_json::Value| {
        let remaining = one["limits"][0]["remaining"].as_u64();
        (one["allowed"] == true, remaining.unwrap_or(u64::MAX), one["degraded"] == true)
    };
    results["results"].as_array().expect("a list").iter().map(reported).collect()
}

/// The answer to one check of a batch is lost on its way back: that one is reported so in its place, and the others what they are.
#[test]
fn a_check_that_fails_within_a_batch_is_told_in_its_place() {
    let redis = RedisServer::start();
    let proxy = FaultProxy::start(redis.port());
    // Of the store there is more to say: one connection, so that all that is answered comes over it.
    let policy = "connections = 1\n[limits.api]\nstrategy = \"token_bucket\"\nrate = \"1/d\"\nburst = 9\n\
        [limits.free]\nunlimited = true\n";
    let server = at(&format!("redis://127.0.0.1:{}", proxy.port()), policy);
    assert_eq!(batch(&server, &["a", "b"]), [(true, 8, false), (true, 8, false)]);
    // 64 checks go into one call, of which only the first asks the store; the two after them go into the next. The first is carried
    // out, its answer does not arrive, and then the connection breaks.
    proxy.set(Mode::SwallowReplies);
    let before = calls(&redis);
    let keys: Vec<&str> = ["a"].into_iter().chain(["free"; 63]).chain(["a", "b"]).collect();
    let reported = std::thread::scope(|scope| {
        let reported = scope.spawn(|| batch(&server, &keys));
        while calls(&redis) == before || proxy.swallowed() == 0 {
            std::thread::yield_now();
        }
        proxy.set(Mode::Pass);
        proxy.reset_connections();
        reported.join().expect("no panic")
    });
    assert_eq!(reported[0], (false, 0, true), "its answer is lost, and nobody else may let it pass");
    assert_eq!(reported[1..64], [(true, u64::MAX, false); 63], "these ask nobody");
    assert_eq!(reported[64..], [(true, 6, false), (true, 7, false)], "the lost one was charged");
    // Where nobody answers at all, each is reported so.
    proxy.set(Mode::Refuse);
    assert_eq!(batch(&server, &["a", "b", "a"]), [(false, 0, true); 3]);
    proxy.set(Mode::Pass);
    while batch(&server, &["c"])[0].2 {
        std::thread::yield_now();
    }
    assert_eq!(batch(&server, &["a", "b", "a"]), [(true, 5, false), (true, 6, false), (true, 4, false)]);
}

/// What was acknowledged is in Redis, and what is in Redis was acknowledged.
#[test]
fn ending_under_load_loses_no_decision() {
    let redis = RedisServer::start();
    let policy = "[limits.many]\nstrategy = \"fixed_window\"\nlimit = 1000000\nwindow = \"1d\"\n";
    let server = over(&redis, policy);
    let address = server.http();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            // Before anybody is served: who came after the end would be turned away.
            let mut connection = Connection::open(address);
            std::thread::spawn(move || {
                let body = r#"{"limit":"many","key":"user:1"}"#;
                let request = format!(
                    "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                let mut acknowledged = 0;
                while connection.send(request.as_bytes()).is_ok() {
                    let Ok(answer) = connection.receive(false) else { break };
                    assert!(answer.body.contains("\"allowed\":true"), "{answer:?}");
                    acknowledged += 1;
                }
                acknowledged
            })
        })
        .collect();
    while !server.get("/v1/status?limit=many&key=user:1").body.contains("\"used\":1") {
        assert!(!workers.iter().any(|worker| worker.is_finished()), "the server hung up");
        std::thread::yield_now();
    }
    server.signal(Signal::TERM);
    let acknowledged: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let after = over(&redis, policy);
    let status = after.get("/v1/status?limit=many&key=user:1").body;
    assert!(status.ends_with(&format!("\"used\":{acknowledged}}}")), "{acknowledged} acknowledged: {status}");
}
