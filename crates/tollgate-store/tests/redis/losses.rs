//! What was counted may be lost although the server was never restarted: FLUSHALL, eviction, and data taken over from a peer that
//! is behind. Each is counted, while there is traffic.

use std::time::{Duration, Instant};

use tollgate_store::{Failure, Limit, RedisOptions, RedisStore, Scope, Store, StoredLimit};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::{beside_others, hourly, item, store_on};

/// The store looks about once a second; this is long enough for a loaded machine.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);

/// Calls until a condition holds.
async fn until(store: &RedisStore, limit: &StoredLimit, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < NOTICED_WITHIN, "not noticed: {what}");
        let _ = store.charge(&[item(limit, "k")], None).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether the store has left its mark on the server, by which it will know it again.
fn is_marked(server: &RedisServer) -> bool {
    !server.command(&["KEYS", "*:mark:*"]).expect("keys").items().is_empty()
}

async fn watched(server: &RedisServer) -> (RedisStore, StoredLimit) {
    let (store, limit) = (store_on(server, None), hourly("api", 1_000_000));
    until(&store, &limit, "the mark", || is_marked(server)).await;
    assert_eq!(store.losses_possible(), 0);
    (store, limit)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_is_counted_once() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let (store, limit) = watched(&server).await;
    server.command(&["FLUSHALL"]).expect("flushed");
    until(&store, &limit, "FLUSHALL", || store.losses_possible() > 0).await;
    until(&store, &limit, "the mark", || is_marked(&server)).await;
    assert_eq!(store.losses_possible(), 1);
    server.command(&["FLUSHALL", "ASYNC"]).expect("flushed");
    until(&store, &limit, "the second FLUSHALL", || store.losses_possible() > 1).await;
    assert_eq!(store.losses_possible(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn eviction_is_counted() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let (store, limit) = watched(&server).await;
    let used: u64 = server.info("memory", "used_memory").expect("a field").parse().expect("a number");
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).expect("set");
    server.command(&["CONFIG", "SET", "maxmemory", &(used + 200_000).to_string()]).expect("set");
    let mut number = 0_u64;
    while server.info("stats", "evicted_keys").expect("a field") == "0" {
        number += 1;
        let key = format!("filler-{number}");
        let _ = store.charge(&[item(&limit, &key)], None).await;
    }
    until(&store, &limit, "eviction", || store.losses_possible() > 0).await;
}

/// The server keeps its run_id and takes over the data of one that is behind.
#[tokio::test(flavor = "multi_thread")]
async fn data_of_a_stale_peer_are_counted() {
    let _turn = beside_others().await;
    let (server, peer) = (RedisServer::start(), RedisServer::start());
    let (store, limit) = watched(&server).await;
    let follow = |follower: &RedisServer, followed: &RedisServer| {
        let port = followed.port().to_string();
        follower.command(&["REPLICAOF", "127.0.0.1", &port]).expect("follows");
        let start = Instant::now();
        while follower.info("replication", "master_link_status").as_deref() != Some("up") {
            assert!(start.elapsed() < Duration::from_secs(60), "the replica does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        follower.command(&["REPLICAOF", "NO", "ONE"]).expect("leads");
    };
    follow(&peer, &server);
    // The peer has the mark as it was, and the server goes on.
    let mark = || {
        let keys = server.command(&["KEYS", "*:mark:*"]).expect("keys");
        keys.items().first().map(|key| server.command(&["GET", &key.text()]).expect("a value").text())
    };
    let old = mark();
    until(&store, &limit, "the mark moves on", || mark() != old).await;
    assert_eq!(store.losses_possible(), 0);
    follow(&server, &peer);
    until(&store, &limit, "stale data", || store.losses_possible() > 0).await;
    assert_eq!(store.losses_possible(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_of_one_server_of_a_cluster_is_counted() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    let store = RedisStore::new(super::patient(tollgate_store::RedisOptions::cluster(cluster.urls())))
        .expect("sound options");
    let limit = hourly("api", 1_000_000);
    let all = |store: RedisStore, limit: StoredLimit| async move {
        for key in 0..32 {
            let key = format!("k{key}");
            let _ = store.charge(&[item(&limit, &key)], None).await;
        }
    };
    let primaries: Vec<_> = cluster
        .nodes()
        .iter()
        .filter(|server| server.info("replication", "role").as_deref() == Some("master"))
        .collect();
    let start = Instant::now();
    while !primaries.iter().all(|server| is_marked(server)) {
        assert!(start.elapsed() < NOTICED_WITHIN, "some server has no mark");
        all(store.clone(), limit.clone()).await;
    }
    assert_eq!(store.losses_possible(), 0);
    primaries[1].command(&["FLUSHALL"]).expect("flushed");
    let start = Instant::now();
    while store.losses_possible() == 0 {
        assert!(start.elapsed() < NOTICED_WITHIN, "not noticed: FLUSHALL of one server");
        all(store.clone(), limit.clone()).await;
    }
    assert_eq!(store.losses_possible(), 1);
}

/// Keys under numbers that come with the call may be made up; they filled the server until ordinary users found no room.
#[tokio::test(flavor = "multi_thread")]
async fn a_nearly_full_server_begins_no_key_under_numbers_that_come_with_the_call() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let mut options = RedisOptions::new(server.url());
    (options.max_keys, options.timeout) = (Some(50), NOTICED_WITHIN);
    let store = RedisStore::new(options).expect("options");
    let limit = Limit::token_bucket("1/h", 100).expect("a limit");
    let (ordinary, with_the_call) =
        (StoredLimit::new("api", limit), StoredLimit::new("cl", limit.keeping_instant()));
    for number in 0..60 {
        let key = format!("invented:{number}");
        assert!(store.charge(&[item(&with_the_call, &key)], None).await.expect("room").allowed);
    }
    until(&store, &ordinary, "that it is nearly full", || !store.takes_new_keys()).await;
    let error = store.charge(&[item(&with_the_call, "invented:new")], None).await.expect_err("no room");
    assert!(error.failure() == Some(Failure::Full) && error.scope() == Scope::Call, "{error}");
    let known = store.charge(&[item(&with_the_call, "invented:1")], None).await.expect("known");
    assert_eq!((known.allowed, known.outcomes[0].remaining), (true, 98));
    assert!(store.charge(&[item(&ordinary, "user:new")], None).await.expect("room").allowed);
}
