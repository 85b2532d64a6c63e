//! The cluster really is one, survives losing a primary, and can be put behind proxies.

use std::time::{Duration, Instant};

use tollgate_testkit::proxy::Mode;
use tollgate_testkit::redis::{Client, RedisCluster, slot_of};

#[test]
fn a_cluster_fails_over_by_request_and_by_loss() {
    let start = Instant::now();
    let cluster = RedisCluster::start();
    println!("the cluster took {:?} to start", start.elapsed());
    let slot = slot_of("key");
    let primary = cluster.primary_of(slot).unwrap();
    let other = (0..3).find(|&node| node != primary).unwrap();
    let nodes = cluster.nodes();
    assert_eq!(nodes[primary].command(&["CLUSTER", "KEYSLOT", "key"]).unwrap().int(), Some(i64::from(slot)));
    assert_eq!(nodes[primary].command(&["SET", "key", "1"]).unwrap().text(), "OK");
    assert_eq!(nodes[primary].command(&["WAIT", "1", "5000"]).unwrap().int(), Some(1));
    let moved = nodes[other].command(&["GET", "key"]).unwrap_err();
    assert_eq!(moved, format!("MOVED {slot} 127.0.0.1:{}", nodes[primary].port()));

    // By request: the replica takes over, the old primary follows it, nothing is lost.
    let replica = cluster.replica_of(primary).unwrap();
    cluster.failover(replica);
    assert_eq!(cluster.primary_of(slot), Some(replica));
    cluster.wait_until_ok();
    assert_eq!(cluster.replica_of(replica), Some(primary));
    assert_eq!(nodes[replica].command(&["INCR", "key"]).unwrap().int(), Some(2));
    assert_eq!(nodes[replica].command(&["WAIT", "1", "5000"]).unwrap().int(), Some(1));

    // By loss: the new primary dies, the old one takes over again; the dead one comes back as its replica.
    nodes[replica].kill();
    cluster.wait_until_primary(primary);
    assert_eq!(nodes[primary].command(&["INCR", "key"]).unwrap().int(), Some(3));
    nodes[replica].restart();
    cluster.wait_until_ok();
    assert_eq!(cluster.primary_of(slot), Some(primary));
    assert_eq!(cluster.replica_of(primary), Some(replica));
}

#[test]
fn clients_are_sent_through_the_proxies_and_replicas_pass_them() {
    let cluster = RedisCluster::start_with_proxies();
    let (nodes, proxies) = (cluster.nodes(), cluster.proxies());
    let slot = slot_of("key");
    let primary = cluster.primary_of(slot).unwrap();
    let other = (0..3).find(|&node| node != primary).unwrap();
    assert_eq!(cluster.urls()[primary], format!("redis://127.0.0.1:{}", proxies[primary].port()));
    let moved = nodes[other].command(&["GET", "key"]).unwrap_err();
    assert_eq!(moved, format!("MOVED {slot} 127.0.0.1:{}", proxies[primary].port()));

    let mut client = Client::connect(proxies[primary].port(), Duration::from_secs(5)).unwrap();
    assert_eq!(client.call(&["SET", "key", "1"]).unwrap().unwrap().text(), "OK");
    proxies[primary].set(Mode::Blackhole);
    let mut client = Client::connect(proxies[primary].port(), Duration::from_millis(100)).unwrap();
    client.call(&["INCR", "key"]).unwrap_err();
    // Past the proxy the node is well, its replica still follows it, and nobody fails over.
    assert_eq!(nodes[primary].command(&["INCR", "key"]).unwrap().int(), Some(2));
    if nodes[primary].version() >= (7, 0, 0) {
        assert_eq!(nodes[primary].command(&["WAIT", "1", "5000"]).unwrap().int(), Some(1));
    }
    assert_eq!(cluster.primary_of(slot), Some(primary));
}
