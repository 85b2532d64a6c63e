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
    assert!(made <= 100, "{made} calls for {} checks", keys.len());
    let results: serde_json::Value = serde_json::from_str(&answer.body).expect("results");
    let results = results["results"].as_array().expect("a list");
    let told: Vec<_> = results
        .iter()
        .map(|one| (one["allowed"].as_bool().unwrap(), one["limits"][0]["remaining"].as_u64().unwrap()))
        .collect();
    assert_eq!(told[..200], [(true, 2); 200]);
    assert_eq!(told[200..], [(true, 2), (true, 1), (true, 0), (false, 0), (false, 0), (false, 0)]);
}

/// What a batch of single checks is told of each: allowed, remaining, and whether that was decided without the store.
fn batch(server: &Tollgate, keys: &[&str]) -> Vec<(bool, u64, bool)> {
    let checks: Vec<String> =
        keys.iter().map(|key| format!("{{\"limit\":\"api\",\"key\":\"{key}\"}}")).collect();
    let answer = server.post("/v1/checks", &format!("{{\"checks\":[{}]}}", checks.join(",")));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let results: serde_json::Value = serde_json::from_str(&answer.body).expect("results");
    let told = |one: &serde_json::Value| {
        let remaining = one["limits"][0]["remaining"].as_u64().expect("a number");
        (one["allowed"] == true, remaining, one["degraded"] == true)
    };
    results["results"].as_array().expect("a list").iter().map(told).collect()
}

/// The answer to one check of a batch is lost on its way back: that one is told so in its place, and the others what they are.
#[test]
fn a_check_that_fails_within_a_batch_is_told_in_its_place() {
    let redis = RedisServer::start();
    let proxy = FaultProxy::start(redis.port());
    // Of the store there is more to say: one connection, so that all that is answered comes over it.
    let policy = "connections = 1\n[limits.api]\nstrategy = \"token_bucket\"\nrate = \"1/d\"\nburst = 9\n";
    let server = at(&format!("redis://127.0.0.1:{}", proxy.port()), policy);
    assert_eq!(batch(&server, &["a", "b"]), [(true, 8, false), (true, 8, false)]);
    // What concerns one key is asked in order: the first by itself, the other two together after it. The first is carried out, its
    // answer does not arrive, and then the connection breaks.
    proxy.set(Mode::SwallowReplies);
    let before = calls(&redis);
    let told = std::thread::scope(|scope| {
        let told = scope.spawn(|| batch(&server, &["a", "a", "b"]));
        while calls(&redis) == before || proxy.swallowed() == 0 {
            std::thread::yield_now();
        }
        proxy.set(Mode::Pass);
        proxy.reset_connections();
        told.join().expect("no panic")
    });
    assert_eq!(told[0], (false, 0, true), "its answer is lost, and nobody else may let it pass");
    assert_eq!(told[1..], [(true, 6, false), (true, 7, false)], "the lost one was charged");
    // Where nobody answers at all, each is told so.
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
