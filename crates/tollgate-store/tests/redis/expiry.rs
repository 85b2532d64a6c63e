//! Everything that is stored runs out by itself: after any operation, after somebody removed the expiry, and soon.

use std::time::{Duration, Instant};

use tollgate_kernel::Rate;
use tollgate_store::{ChargeId, Hold, Limit, Micros, RedisStore, Settled, Settlement, Store, StoredLimit};
use tollgate_testkit::redis::RedisServer;

use super::{beside_others, costing, item, keys, one_of_each, store_on, used};

const LONG: Micros = Micros::from_secs(600);

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: LONG }
}

/// No key of the store is without an expiry; gives how many there are.
#[track_caller]
fn all_run_out(server: &RedisServer, store: &RedisStore, after: &str) -> usize {
    let keys = keys(server, store.prefix());
    for key in &keys {
        let left = server.command(&["PTTL", key]).expect("pttl").int().expect("a number");
        assert_ne!(left, -1, "after {after}, {key} never runs out");
        assert!(left < 50 * 3_600_000, "after {after}, {key} lasts for {left} ms");
    }
    keys.len()
}

/// Takes the expiry of every key away.
fn persist(server: &RedisServer, store: &RedisStore) {
    for key in keys(server, store.prefix()) {
        server.command(&["PERSIST", &key]).expect("persist");
    }
}

async fn settle(store: &RedisStore, id: ChargeId, settlement: Settlement) -> Settled {
    store.settle(id, &settlement).await.unwrap_or_else(|error| panic!("{settlement:?}: {error}"))
}

/// Everything that a store can be asked, under one limit of 9.
async fn every_operation(server: &RedisServer, store: &RedisStore, limit: &StoredLimit) {
    let check = |after: &str| {
        assert!(all_run_out(server, store, &format!("{after}, {}", limit.name)) > 0, "{after}");
    };
    let charge = async |cost: u64, hold: Option<Hold>| {
        let charged = store.charge(&[costing(limit, "k", cost)], hold).await;
        charged.unwrap_or_else(|error| panic!("{}: {error}", limit.name)).allowed
    };
    let [less, more, cancelled, renewed] = [(); 4].map(|()| hold());
    assert!(charge(1, None).await);
    check("a charge");
    assert!(charge(2, Some(less)).await);
    check("a hold");
    assert_eq!(settle(store, less.id, Settlement::Actual(1)).await, Settled::Done);
    check("a settlement for less");
    assert_eq!(settle(store, less.id, Settlement::Actual(1)).await, Settled::Already);
    check("a second settlement");
    assert!(charge(1, Some(more)).await);
    assert_eq!(settle(store, more.id, Settlement::Each(vec![2])).await, Settled::Done);
    check("a settlement for more");
    assert!(charge(1, Some(cancelled)).await);
    check("another hold");
    assert_eq!(settle(store, cancelled.id, Settlement::Cancel).await, Settled::Done);
    check("a cancel");
    assert!(charge(1, Some(renewed)).await);
    check("a third hold");
    assert_eq!(settle(store, renewed.id, Settlement::Renew).await, Settled::Done);
    check("a renewal");
    assert!(!charge(9, None).await);
    check("a denial");
    assert!(!charge(9, Some(hold())).await);
    check("a denied hold");
    assert!(!charge(10, None).await);
    check("a charge that never fits");
    let watching = [tollgate_store::StoredCharge { shadow: true, ..item(limit, "k") }, item(limit, "other")];
    assert!(store.charge(&watching, None).await.expect("a charge").allowed);
    check("a charge of two");
    store.peek(&watching).await.expect("a peek");
    assert!(charge(1, None).await);
    check("a peek and a charge");
    for key in ["k", "other"] {
        assert!(store.forget(limit, key).await.expect("a reset"));
    }
    all_run_out(server, store, "a reset");
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_stored_runs_out() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in one_of_each(9) {
        let store = store_on(&server, None);
        every_operation(&server, &store, &limit).await;
    }
}

/// Somebody removes every expiry between any two operations.
#[tokio::test(flavor = "multi_thread")]
async fn an_expiry_that_was_removed_comes_back_with_the_next_touch() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in one_of_each(9) {
        let store = store_on(&server, None);
        // Holds that nobody touches again keep what was done to them, so only what a charge touches is looked at.
        let touched = async |cost: u64, allowed: bool| {
            persist(&server, &store);
            let charged = store.charge(&[costing(&limit, "k", cost)], None).await.expect("a charge");
            assert_eq!(charged.allowed, allowed, "{}", limit.name);
            all_run_out(&server, &store, &format!("a charge of {cost}, {}", limit.name));
        };
        touched(4, true).await;
        touched(4, true).await;
        touched(4, false).await;
        touched(10, false).await;
        touched(1, true).await;
        touched(1, false).await;
        // A hold comes back with its key.
        store.forget(&limit, "k").await.expect("a reset");
        for settlement in [Settlement::Renew, Settlement::Actual(1), Settlement::Cancel] {
            // Only leases are touched by a renewal.
            if settlement == Settlement::Renew && limit.name != "concurrency" {
                continue;
            }
            let (kept, held) = (hold(), hold());
            assert!(store.charge(&[costing(&limit, "k", 2)], Some(kept)).await.expect("a hold").allowed);
            let before = keys(&server, store.prefix());
            assert!(store.charge(&[costing(&limit, "k", 2)], Some(held)).await.expect("a hold").allowed);
            for key in keys(&server, store.prefix())
                .iter()
                .filter(|key| !key.contains("hold:") || !before.contains(key))
            {
                server.command(&["PERSIST", key]).expect("persist");
            }
            assert_eq!(settle(&store, held.id, settlement.clone()).await, Settled::Done);
            all_run_out(&server, &store, &format!("{settlement:?}, {}", limit.name));
            store.forget(&limit, "k").await.expect("a reset");
        }
    }
}

/// How often the server has run a command, since its start.
fn runs_of(server: &RedisServer, command: &str) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).expect("info").text();
    let start = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&start));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

/// Somebody makes every expiry shorter between two charges.
#[tokio::test(flavor = "multi_thread")]
async fn an_expiry_that_is_too_short_becomes_long_enough_with_the_next_charge() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let limits = one_of_each(9);
    let all: Vec<_> = limits.iter().map(|limit| item(limit, "k")).collect();
    let alone = all.iter().map(std::slice::from_ref);
    for charge in alone.chain([&all[..3], &all[2..6]]) {
        let store = store_on(&server, None);
        for _ in 0..3 {
            assert!(store.charge(charge, None).await.expect("a charge").allowed);
            for key in keys(&server, store.prefix()) {
                // Every state is needed for more than ten minutes.
                let left = server.command(&["PTTL", &key]).expect("pttl").int().expect("a number");
                assert!(left > 500_000, "{key} lasts for {left} ms");
                server.command(&["PEXPIRE", &key, "60000"]).expect("pexpire");
            }
        }
    }
}

/// The count of an open window changes in place, alone and with other limits.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_window_changes_in_place() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let limits = one_of_each(1_000);
    for charge in [&["fixed-window"][..], &["sliding-counter"], &["token-bucket", "clock-window"]] {
        let store = store_on(&server, None);
        let limits = limits.iter().filter(|limit| charge.contains(&limit.name.as_str()));
        let parts: Vec<_> = limits.map(|limit| item(limit, "k")).collect();
        let before = runs_of(&server, "setrange");
        for _ in 0..50 {
            assert!(store.charge(&parts, None).await.expect("a charge").allowed);
        }
        // Not all of them: where the ms changes while the script runs, the state is written with its expiry.
        assert!(runs_of(&server, "setrange") > before + 5, "{charge:?}");
        for part in &parts {
            assert_eq!(used(&store, part.limit, "k").await, 50, "{charge:?}");
        }
    }
}

/// To ask for an expiry costs as much as to change a count, so one of the charges that go together asks.
#[tokio::test(flavor = "multi_thread")]
async fn charges_that_go_together_ask_for_the_expiry_once() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let names: Vec<String> = (0..24).map(|number| format!("k{number}")).collect();
    for limit in
        one_of_each(1_000).iter().filter(|limit| ["fixed-window", "sliding-counter"].contains(&&*limit.name))
    {
        let store = store_on(&server, None);
        let items: Vec<_> = names.iter().map(|key| item(limit, key)).collect();
        let charge = async || {
            assert!(
                store.charge_each(&items).await.into_iter().all(|charged| charged.expect("a charge").allowed)
            );
        };
        charge().await;
        let before = ["pttl", "setrange"].map(|command| runs_of(&server, command));
        charge().await;
        let asked = runs_of(&server, "pttl") - before[0];
        let changed = runs_of(&server, "setrange") - before[1];
        assert!(changed >= 20 && asked <= 4, "{}: {asked} of {changed} asked", limit.name);
        for key in ["k0", "k23"] {
            assert_eq!(used(&store, limit, key).await, 2, "{}", limit.name);
        }
        all_run_out(&server, &store, "charges that go together");
    }
}

fn wait_until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "waited in vain");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Twice the window after the last call, nothing is left of a key on the server, nor of a hold after its time.
#[tokio::test(flavor = "multi_thread")]
async fn short_windows_vanish_from_the_server() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for window_ms in [50, 120, 200] {
        let window = Micros::from_millis(window_ms);
        let rate = rate_of(9, window);
        let limits = [
            ("token-bucket", Limit::token_bucket(rate, 9)),
            ("leaky-bucket", Limit::leaky_bucket(rate, 9)),
            ("odd-bucket", Limit::token_bucket(rate_of(7, window), 7)),
            ("fixed-window", Limit::fixed_window(9, window)),
            ("clock-window", Limit::clock_window(9, window)),
            ("sliding-window", Limit::sliding_window(9, window)),
            ("sliding-counter", Limit::sliding_window_counter(9, window)),
            ("concurrency", Limit::concurrency(9, window)),
        ];
        for (name, limit) in limits {
            let limit = StoredLimit::new(name, limit.expect("a sound limit"));
            let store = store_on(&server, None);
            // The connection is made before the clock is looked at.
            store.peek(&[item(&limit, "k")]).await.expect("a peek");
            let start = Instant::now();
            let held = Hold { id: ChargeId::random(), ttl: window };
            assert!(store.charge(&[costing(&limit, "k", 4)], Some(held)).await.expect("a hold").allowed);
            let _ = store.charge(&[costing(&limit, "k", 2)], None).await.expect("a charge");
            let _ = store.charge(&[costing(&limit, "k", 9)], None).await.expect("a denial");
            assert!(!keys(&server, store.prefix()).is_empty(), "{name} is remembered at all");
            wait_until(|| keys(&server, store.prefix()).is_empty().then_some(()));
            let gone = start.elapsed();
            let most = Duration::from_millis(2 * window_ms + 1) + Duration::from_millis(150);
            assert!(gone < most, "{name} of {window_ms} ms was there for {gone:?}");
        }
    }
}

fn rate_of(count: u64, period: Micros) -> Rate {
    Rate::new(count, period).expect("a sound rate")
}
