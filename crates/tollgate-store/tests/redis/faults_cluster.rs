//! The fault matrix on a cluster of six with a proxy before each: what breaks is one primary, and then another.

use std::time::Duration;

use tollgate_store::{RedisOptions, RedisStore};
use tollgate_testkit::proxy::Mode;
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::faults::NETWORK;
use super::matrix::{DEADLINE, Traffic};
use super::{PATIENCE, alone, log, prefix, store_with};

/// How many calls are answered between two faults.
const BETWEEN: u64 = 3_000;

const LASTS: Duration = Duration::from_millis(250);

/// Longer than the time after which the nodes give a silent neighbour up, and choose another.
const FAIL_OVER: Duration = Duration::from_secs(15);
const RECOVERY: Duration = Duration::from_secs(20);

fn stores(cluster: &RedisCluster) -> (RedisStore, RedisStore) {
    let (names, options) = (prefix(), || RedisOptions::cluster(cluster.urls()));
    (store_with(options(), &names, DEADLINE), store_with(options(), &names, PATIENCE))
}

/// One slot of each primary.
const SLOTS: [u16; 3] = [100, 8_000, 16_000];

/// The place of the primary of a slot.
fn primary(cluster: &RedisCluster, slot: u16) -> usize {
    cluster.primary_of(slot).expect("somebody has the slot")
}

/// Whatever breaks, some calls meet it.
fn everywhere(cluster: &RedisCluster) {
    for node in &cluster.nodes()[..3] {
        let keys = super::keys(node, "").iter().filter(|key| key.contains(":counted-")).count();
        assert!(keys > 1, "{keys} of the keys that are counted are on this server");
    }
}

fn ask(server: &RedisServer, words: &[&str]) {
    server.command(words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cluster_keeps_its_promises_through_faults_without_loss() {
    let _alone = alone().await;
    log::listen();
    let cluster = RedisCluster::start_with_proxies();
    let (store, aside) = stores(&cluster);
    let noticed = store.clone();
    let judged = Traffic::run(store, &aside, true, 0, async |traffic: &Traffic| {
        traffic.healthy(BETWEEN).await;
        everywhere(&cluster);
        for (round, mode) in NETWORK.into_iter().enumerate() {
            let proxy = &cluster.proxies()[primary(&cluster, SLOTS[round % 3])];
            let (come, go) = (async || proxy.set(mode), async || proxy.set(Mode::Pass));
            traffic.fault(&format!("{mode:?}"), LASTS, RECOVERY, come, go).await;
            traffic.healthy(BETWEEN).await;
        }
        for slot in SLOTS {
            let at = primary(&cluster, slot);
            let (server, proxy) = (&cluster.nodes()[at], &cluster.proxies()[at]);
            proxy.swallow_next(1);
            traffic.healthy(BETWEEN / 3).await;
            proxy.reset_connections();
            traffic.healthy(BETWEEN / 3).await;
            ask(server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            traffic.healthy(BETWEEN / 3).await;
            ask(server, &["SCRIPT", "FLUSH"]);
            traffic.healthy(BETWEEN / 3).await;
            let (come, go) = (async || server.stop(), async || server.resume());
            traffic.fault("SIGSTOP", LASTS, RECOVERY, come, go).await;
            traffic.healthy(BETWEEN / 3).await;
            let come = async || ask(server, &["CLIENT", "PAUSE", "200", "WRITE"]);
            traffic.fault("CLIENT PAUSE", LASTS, RECOVERY, come, async || {}).await;
            // A fail-over in good order loses nothing.
            let replica = cluster.replica_of(at).expect("a replica");
            let come = async || cluster.failover(replica);
            traffic
                .fault("a manual fail-over", LASTS, RECOVERY, come, async || cluster.wait_until_ok())
                .await;
            traffic.healthy(BETWEEN).await;
        }
    })
    .await;
    judged.assert_clean();
    judged.assert_seen(&["timeout", "connection"]);
    assert!(judged.sum(|report| report.ambiguous) > 0 && judged.sum(|report| report.gaps) > 0);
    assert_eq!(judged.sum(|report| report.losses_seen), 0);
    assert!(noticed.losses_possible() > 0, "the fail-overs are noticed");
    assert!(!log::warnings(&["slots of the Redis cluster have another server"]).is_empty());
    assert!(judged.sum(|report| report.calls) > 12 * BETWEEN, "too few calls");
}

/// Fail-overs that nobody prepared: what the replica had not heard is lost, which the bound allows once for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cluster_keeps_its_promises_through_fail_overs() {
    let _alone = alone().await;
    let cluster = RedisCluster::start_with_proxies();
    let (store, aside) = stores(&cluster);
    let noticed = store.clone();
    let judged = Traffic::run(store, &aside, true, 4, async |traffic: &Traffic| {
        traffic.healthy(BETWEEN).await;
        everywhere(&cluster);
        for (slot, fault) in [(SLOTS[0], "kill -9"), (SLOTS[1], "a hung primary"), (SLOTS[2], "kill -9")] {
            let at = primary(&cluster, slot);
            let replica = cluster.replica_of(at).expect("a replica");
            let server = &cluster.nodes()[at];
            let come = async || if fault == "kill -9" { server.kill() } else { server.stop() };
            // It recovers without the one that is gone.
            traffic.fault(fault, LASTS, FAIL_OVER, come, async || {}).await;
            traffic.healthy(BETWEEN).await;
            if fault == "kill -9" {
                server.restart();
            } else {
                // One that comes back and does not know yet that it has been replaced.
                server.resume();
            }
            cluster.wait_until_primary(replica);
            cluster.wait_until_ok();
            traffic.healthy(BETWEEN).await;
        }
        ask(&cluster.nodes()[primary(&cluster, SLOTS[0])], &["FLUSHALL"]);
        traffic.healthy(BETWEEN).await;
    })
    .await;
    judged.assert_clean();
    judged.assert_seen(&["timeout"]);
    assert!(noticed.losses_possible() >= 3, "{} fail-overs were noticed", noticed.losses_possible());
}
