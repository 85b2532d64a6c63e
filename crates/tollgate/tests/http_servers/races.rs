//! Many connections at once for one key: nobody is reported what another was reported, and nobody gets through who should not. The
//! stores go by their own clocks here, as in production, with windows of an hour.

use std::sync::atomic::{AtomicU64, Ordering};

use std::time::Duration;
use tollgate::Limit;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate_testkit::http::Connection;

use crate::scene::{ALL, Scene, number};

const CONNECTIONS: usize = 32;
const REQUESTS: u64 = 500;
const MOST: u64 = 200;

/// Every admission is reported another remainder, from the limit less one down to zero.
fn check(scene: &Scene, name: &str) {
    let route_limit = RouteLimit::new(name, KeyExtractor::constant("all"));
    let layer = LimitLayer::builder(&scene.gate).limit(route_limit).build().expect("a layer");
    let address = scene.serve(layer);
    let sent = AtomicU64::new(0);
    let caller = || {
        let mut connection = Connection::open(address);
        let mut reported = Vec::new();
        while sent.fetch_add(1, Ordering::Relaxed) < REQUESTS {
            let answer = connection.ask("GET", "/", &[]);
            reported.push((answer.status, number(&answer, "x-ratelimit-remaining")));
        }
        reported
    };
    let reported: Vec<(u16, Option<u64>)> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(caller)).collect();
        callers.into_iter().flat_map(|caller| caller.join().expect("a caller")).collect()
    });
    let mut admitted: Vec<u64> =
        reported.iter().filter(|(status, _)| *status == 200).filter_map(|(_, left)| *left).collect();
    admitted.sort_unstable();
    assert_eq!(admitted, (0..MOST).collect::<Vec<u64>>());
    let denied = reported.iter().filter(|reported| **reported == (429, Some(0))).count() as u64;
    assert_eq!(denied, REQUESTS - MOST, "{reported:?}");
}

#[test]
fn every_admission_is_told_another_remainder() {
    let hour = Duration::from_secs(3_600);
    let hourly = "1/h";
    let limits = [
        ("tokens", Limit::token_bucket(hourly, MOST).expect("a limit")),
        ("window", Limit::fixed_window(MOST, hour).expect("a limit")),
        ("log", Limit::sliding_window(MOST, hour).expect("a limit")),
    ];
    for on in ALL {
        let scene = Scene::on_own_clock(on, |gate| {
            limits.iter().fold(gate, |gate, (name, limit)| gate.limit(name, *limit))
        });
        for (name, _) in &limits {
            println!("{on:?}: {name}");
            check(&scene, name);
        }
    }
}
