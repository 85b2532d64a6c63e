//! SIGTERM under load, over all faces, with the counters in Redis: what was acknowledged is counted, and nobody gets half an
//! answer.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use tollgate_testkit::hostile::{Answered, CLIENTS, Faces};
use tollgate_testkit::redis::RedisServer;

use crate::redis::over;

const POLICY: &str = r#"
[limits.many]
strategy = "fixed_window"
limit = 1_000_000
window = "1d"

[[envoy]]
domain = "edge"
entries = ["many"]
shared = ["many"]
limit = "many"
"#;

#[test]
fn what_was_acknowledged_over_any_face_is_counted() {
    let redis = RedisServer::start();
    let server = over(&redis, POLICY);
    let faces = Faces { http: server.http(), resp: server.resp(), grpc: server.grpc() };
    // A key for each face, so that each is held to its own.
    let keys = ["user:http", "user:resp", "edge:many*="];
    let is_busy = [const { AtomicBool::new(false) }; 3];
    let (acknowledged, ended) = std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for (index, (face, make)) in CLIENTS.iter().enumerate() {
            for _ in 0..2 {
                let mut client = make(&faces, "many", keys[index]);
                let is_busy = &is_busy[index];
                let charge = move || {
                    let mut acknowledged = 0;
                    loop {
                        match client.charge() {
                            Ok(Answered::Allowed) => acknowledged += 1,
                            Ok(Answered::HungUp) => return acknowledged,
                            other => panic!("{face}: {other:?}"),
                        }
                        is_busy.store(acknowledged > 10, Ordering::Relaxed);
                    }
                };
                clients.push((index, scope.spawn(charge)));
            }
        }
        // A request that has started, and is answered once the server is not ready any more.
        let mut readiness = server.connect();
        readiness.send(b"GET /readyz HTTP/1.1\r\n").unwrap();
        let mut idle = server.connect();
        assert_eq!(idle.ask("GET", "/readyz", &[]).body, "ready\n");
        while !is_busy.iter().all(|is_busy| is_busy.load(Ordering::Relaxed)) {
            assert!(!clients.iter().any(|(_, client)| client.is_finished()), "a client was not served");
            std::thread::yield_now();
        }
        server.signal(Signal::TERM);
        // Who is idle is hung up on, which says that the signal has arrived.
        assert!(idle.receive(false).is_err());
        readiness.send(b"host: x\r\n\r\n").unwrap();
        let answer = readiness.receive(false).unwrap();
        assert_eq!((answer.status, &*answer.body), (503, "draining\n"));
        let mut acknowledged = [0_u64; 3];
        for (index, client) in clients {
            acknowledged[index] += client.join().expect("no failure");
        }
        (acknowledged, server.ended())
    });
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.output.contains("still busy"), "{ended:?}");
    let after = over(&redis, POLICY);
    for ((face, _), (key, acknowledged)) in CLIENTS.iter().zip(keys.iter().zip(acknowledged)) {
        let status = after.get(&format!("/v1/status?limit=many&key={key}")).body;
        assert!(
            status.ends_with(&format!("\"used\":{acknowledged}}}")),
            "{face}, {acknowledged} acknowledged: {status}"
        );
    }
}
