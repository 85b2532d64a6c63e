//! The fault matrix on one server: the network breaks, the server stands still, refuses, forgets and dies, in the middle of
//! traffic, and the history of all calls is held to what the store promises.

use std::time::Duration;

use tollgate_store::{RedisOptions, RedisStore};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;

use super::matrix::{DEADLINE, Traffic};
use super::{PATIENCE, alone, log, prefix, store_with};

/// How many calls are answered between two faults.
const BETWEEN: u64 = 7_000;

const LASTS: Duration = Duration::from_millis(250);
const RECOVERY: Duration = Duration::from_secs(20);

/// A store that goes through the proxy, with the deadline of production, and one that goes past it.
fn stores(server: &RedisServer, proxy: &FaultProxy) -> (RedisStore, RedisStore) {
    let names = prefix();
    let through = RedisOptions::new(format!("redis://127.0.0.1:{}", proxy.port()));
    let past = RedisOptions::new(server.url());
    (store_with(through, &names, DEADLINE), store_with(past, &names, PATIENCE))
}

fn ask(server: &RedisServer, words: &[&str]) {
    server.command(words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

/// The faults of the network, as a proxy makes them.
pub(super) const NETWORK: [Mode; 9] = [
    Mode::Latency(Duration::from_millis(20)),
    Mode::Latency(Duration::from_millis(150)),
    Mode::Blackhole,
    Mode::Stall,
    Mode::Reset,
    Mode::SwallowReplies,
    Mode::CutReply { after_bytes: 7 },
    Mode::Refuse,
    Mode::Faulty { swallow_per_mille: 20, delay_per_mille: 20, delay: Duration::from_millis(5) },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_server_keeps_its_promises_through_faults_without_loss() {
    let _alone = alone().await;
    log::listen();
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (store, aside) = stores(&server, &proxy);
    let judged = Traffic::run(store, &aside, false, 0, async |traffic: &Traffic| {
        traffic.healthy(BETWEEN).await;
        for mode in NETWORK {
            let (come, go) = (async || proxy.set(mode), async || proxy.set(Mode::Pass));
            traffic.fault(&format!("{mode:?}"), LASTS, RECOVERY, come, go).await;
            traffic.healthy(BETWEEN).await;
        }
        // Single replies that are lost, and connections that are cut, while all else is well.
        for _ in 0..5 {
            proxy.swallow_next(1);
            traffic.healthy(BETWEEN / 4).await;
            proxy.reset_connections();
            traffic.healthy(BETWEEN / 4).await;
            ask(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            traffic.healthy(BETWEEN / 4).await;
            ask(&server, &["SCRIPT", "FLUSH"]);
            traffic.healthy(BETWEEN / 4).await;
        }
        let (come, go) = (async || server.stop(), async || server.resume());
        traffic.fault("SIGSTOP", LASTS, RECOVERY, come, go).await;
        traffic.healthy(BETWEEN).await;
        let nothing = async || {};
        let come = async || ask(&server, &["CLIENT", "PAUSE", "250", "WRITE"]);
        traffic.fault("CLIENT PAUSE", LASTS, RECOVERY, come, nothing).await;
        traffic.healthy(BETWEEN).await;
        let come = async || ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
        let go = async || ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
        traffic.fault("no memory", LASTS, RECOVERY, come, go).await;
        traffic.healthy(BETWEEN).await;
        // Its data stay, because there is no primary at that port.
        let come = async || ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
        let go = async || ask(&server, &["REPLICAOF", "NO", "ONE"]);
        traffic.fault("READONLY", LASTS, RECOVERY, come, go).await;
        traffic.healthy(BETWEEN).await;
        let come = async || {
            ask(&server, &["CONFIG", "SET", "maxclients", "1"]);
            proxy.reset_connections();
        };
        let go = async || ask(&server, &["CONFIG", "SET", "maxclients", "1000"]);
        traffic.fault("maxclients", LASTS, RECOVERY, come, go).await;
        traffic.healthy(BETWEEN).await;
        busy(traffic, &server).await;
        traffic.healthy(BETWEEN).await;
    })
    .await;
    judged.assert_clean();
    // Not `full`: the keys of this test are known by the time the memory is used up, and are charged as ever.
    judged.assert_seen(&["timeout", "connection", "not_ready", "overloaded"]);
    assert!(judged.sum(|report| report.ambiguous) > 0 && judged.sum(|report| report.gaps) > 0);
    assert!(judged.sum(|report| report.ambiguous) > judged.sum(|report| report.gaps), "some came too late");
    assert_eq!(judged.sum(|report| report.losses_seen), 0);
    let address = format!("127.0.0.1:{}", proxy.port());
    assert!(!log::warnings(&["lost our scripts", &address]).is_empty(), "NOSCRIPT was seen");
    assert!(judged.sum(|report| report.calls) > 20 * BETWEEN, "too few calls");
}

/// A script of somebody else's that does not end.
async fn busy(traffic: &Traffic, server: &RedisServer) {
    ask(server, &["CONFIG", "SET", "lua-time-limit", "20"]);
    let mut client = server.connect().expect("a connection");
    let come = async || client.send(&["EVAL", "while true do end", "0"]).expect("a script");
    let go = async || ask(server, &["SCRIPT", "KILL"]);
    traffic.fault("BUSY", LASTS, RECOVERY, come, go).await;
}

/// Faults in which the server forgets everything: each may admit once more what there is, and no more than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_server_keeps_its_promises_through_losses() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (store, aside) = stores(&server, &proxy);
    let judged = Traffic::run(store, &aside, false, 4, async |traffic: &Traffic| {
        for round in 1..=2 {
            traffic.healthy(BETWEEN).await;
            ask(&server, &["FLUSHALL"]);
            traffic.healthy(BETWEEN).await;
            let (come, go) = (async || server.kill(), async || server.restart());
            traffic.fault("kill -9", LASTS, RECOVERY, come, go).await;
            traffic.healthy(BETWEEN).await;
            // A look once a second may or may not come between the flush and the end of the server.
            let noticed = traffic.losses_noticed();
            assert!((round..=2 * round).contains(&noticed), "a new server is noticed: {noticed}");
        }
    })
    .await;
    judged.assert_clean();
    judged.assert_seen(&["connection"]);
    assert!(judged.sum(|report| report.losses_seen) > 0, "the losses are real");
}
