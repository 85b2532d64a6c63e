//! Attacks, while honest clients go on: none of their requests fails, and the server's memory stays bounded.

use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::process::Signal;

use crate::server::{self, Tollgate};
use tollgate_testkit::hostile::{ATTACKS, Answered, CLIENTS, Faces};

/// The most memory that the server may ever have resident, in KiB. It starts with some 20 MiB; 200 peers that have each sent
/// 64 KB of something unfinished take 13 MiB, 2,700 silent ones about as much.
const MOST_MEMORY: u64 = 128 * 1024;

const POLICY: &str = r#"
[limits.free]
strategy = "fixed_window"
limit = 1_000_000_000
window = "1d"

[[envoy]]
domain = "edge"
entries = ["free"]
limit = "free"
"#;

pub(crate) fn faces(server: &Tollgate) -> Faces {
    Faces { http: server.http(), resp: server.resp(), grpc: server.grpc() }
}

/// The most memory that the process ever had resident, in KiB.
fn peak(server: &Tollgate) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().strip_suffix(" kB").and_then(|number| number.parse().ok()).expect("a number")
}

/// A gateway of language models that holds no more than 32 MiB of calls.
const GATEWAY: &str = r#"
[llm]
memory_mib = 32
[llm.upstreams.up]
kind = "openai"
base_url = "http://127.0.0.1:9/v1"
api_key = "x"
[llm.models.gpt-4o]
rpm = 1_000
"#;

static ENDS: [AtomicBool; 8] = [const { AtomicBool::new(false) }; 8];

/// Runs attacks one after the other, beside an honest client of each face.
fn check(place: usize, names: &[&str]) {
    let server = server::with(&[POLICY, GATEWAY].concat(), &[], &[]);
    let (faces, end) = (faces(&server), &ENDS[place]);
    let clients: Vec<(&str, JoinHandle<u64>)> = CLIENTS
        .iter()
        .map(|(face, make)| {
            let mut client = make(&faces, "free", "user:honest");
            let ask = move || {
                let mut asked = 0;
                while asked == 0 || !end.load(Ordering::Relaxed) {
                    match client.charge() {
                        Ok(Answered::Allowed) => asked += 1,
                        other => panic!("{face}: {other:?} after {asked} answers"),
                    }
                }
                asked
            };
            (*face, std::thread::spawn(ask))
        })
        .collect();
    for name in names {
        let attack = ATTACKS.iter().find(|attack| attack.name == *name).expect("an attack");
        (attack.run)(&faces);
        // A new client is served as well.
        for (face, make) in CLIENTS {
            let said = make(&faces, "free", "user:new").charge();
            assert!(matches!(said, Ok(Answered::Allowed)), "{face} after {name}: {said:?}");
        }
        let peak = peak(&server);
        assert!(peak <= MOST_MEMORY, "{peak} KiB after {name}");
    }
    end.store(true, Ordering::Relaxed);
    for (face, client) in clients {
        let asked = client.join().unwrap_or_else(|_| panic!("the client of {face} failed under {names:?}"));
        assert!(asked > 0, "{face}");
    }
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.output.contains("panicked"), "{ended:?}");
}

#[test]
fn slow_peers() {
    check(0, &["heads, a byte at a time", "bodies, a byte at a time"]);
}

#[test]
fn long_and_deep_bodies() {
    check(1, &["bodies of 64 MiB", "JSON 100,000 deep", "gRPC messages of 10 MiB"]);
}

/// The routes of models take bodies of up to 32 MiB, and all of them together within one budget.
#[test]
fn calls_of_models_without_end() {
    check(5, &["calls of models without end"]);
}

#[test]
fn floods_of_http_2() {
    check(
        2,
        &[
            "HTTP/2: streams opened and reset",
            "HTTP/2: streams and no end of them",
            "HTTP/2: calls that do not come whole",
            "HTTP/2: headers and no end of them",
            "HTTP/2: a header list of 1 MiB",
            "HTTP/2: pings and settings",
        ],
    );
}

#[test]
fn floods_of_resp() {
    check(
        3,
        &[
            "RESP: 1 GiB announced",
            "RESP: 1,000,000 arguments",
            "RESP: a line without end",
            "RESP: answers that nobody reads",
        ],
    );
}

#[test]
fn peers_that_say_nothing_and_peers_that_leave_at_once() {
    check(4, &["connections that say nothing", "100,000 connections opened and reset"]);
}

/// A connection that is kept is not one that is slow: it outlives the time that a head has, and is used again.
#[test]
fn an_idle_connection_outlives_a_slow_head() {
    let server = server::with(POLICY, &[], &[]);
    let faces = faces(&server);
    let mut kept: Vec<_> = CLIENTS.iter().map(|(_, make)| make(&faces, "free", "user:kept")).collect();
    for client in &mut kept {
        assert_eq!(client.charge().expect("an answer"), Answered::Allowed);
    }
    let mut slow = TcpStream::connect(faces.http).expect("it listens");
    std::io::Write::write_all(&mut slow, b"GET /healthz HTTP/1.1\r\nhost:").expect("room");
    assert_eq!(slow.read(&mut [0; 1]).expect("an end"), 0, "hung up on, after five seconds");
    for client in &mut kept {
        assert_eq!(client.charge().expect("an answer"), Answered::Allowed);
    }
}

/// There is room for so many, at each face by itself. Whom there is none for is hung up on and counted.
#[test]
fn there_is_room_for_so_many() {
    for (settings, reason) in
        [("max_connections = 3", "full"), ("max_connections = 100\nmax_connections_per_peer = 3", "peer")]
    {
        let server = server::with(&format!("[server]\n{settings}\n{POLICY}"), &[], &[]);
        let faces = faces(&server);
        let mut inside: Vec<_> = (0..3).map(|_| CLIENTS[1].1(&faces, "free", "user:in")).collect();
        for client in &mut inside {
            assert_eq!(client.charge().expect("an answer"), Answered::Allowed);
        }
        for _ in 0..2 {
            let said = CLIENTS[1].1(&faces, "free", "user:out").charge().expect("no answer");
            assert_eq!(said, Answered::HungUp, "{settings}");
        }
        // The other faces have doors of their own.
        let metrics = server.get("/metrics").body;
        for line in [
            format!("tollgate_connections_refused_total{{face=\"resp\",reason=\"{reason}\"}} 2"),
            "tollgate_connections{face=\"resp\"} 3".to_owned(),
        ] {
            assert!(metrics.contains(&line), "{line}: {metrics}");
        }
        // Who leaves makes room.
        drop(inside.pop());
        while CLIENTS[1].1(&faces, "free", "user:out").charge().expect("an answer") != Answered::Allowed {}
    }
}
