//! Pings: answered by a server that can serve anybody, whatever is wrong with some calls, and by no other.

use std::time::Duration;

use tollgate_store::{Failure, NodeId, RedisOptions, Store};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::{hourly, item, patient, store_with};

const SOON: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_server_that_can_serve_anybody_answers() {
    let server = RedisServer::start();
    let store = store_with(RedisOptions::new(server.url()), "p:", SOON);
    let ping = async || store.ping(NodeId::ONLY).await.map_err(|error| error.failure());
    assert_eq!(ping().await, Ok(()));
    // Full, and without a right: what is wrong with some calls is theirs.
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).expect("full");
    assert_eq!(ping().await, Ok(()));
    server.command(&["ACL", "SETUSER", "default", "-pexpireat"]).expect("taken away");
    assert_eq!(ping().await, Ok(()));
    assert_eq!(server.command(&["DBSIZE"]).expect("size").int(), Some(0), "it leaves nothing behind");
}

#[tokio::test]
async fn a_server_that_can_serve_nobody_does_not() {
    let server = RedisServer::start();
    let store = store_with(RedisOptions::new(server.url()), "p:", SOON);
    let ping = async || store.ping(NodeId::ONLY).await.map_err(|error| error.failure());
    assert_eq!(ping().await, Ok(()));
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).expect("set");
    assert_eq!(ping().await, Err(Some(Failure::NotReady)), "too few replicas");
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]).expect("set");
    server.command(&["REPLICAOF", "127.0.0.1", "1"]).expect("follows");
    assert_eq!(ping().await, Err(Some(Failure::NotReady)), "a replica");
    server.command(&["REPLICAOF", "NO", "ONE"]).expect("leads");
    assert_eq!(ping().await, Ok(()));
    server.stop();
    assert_eq!(ping().await, Err(Some(Failure::Timeout)), "hung");
    server.resume();
    assert_eq!(ping().await, Ok(()));
    server.kill();
    assert_eq!(ping().await, Err(Some(Failure::Connection)), "gone");
    server.restart();
    assert_eq!(ping().await, Ok(()), "the connection that broke is made anew");
    server.command(&["CONFIG", "SET", "requirepass", "secret"]).expect("set");
    server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).expect("hung up");
    assert_eq!(ping().await, Err(Some(Failure::Refused)), "a password");
}

#[tokio::test]
async fn the_nodes_of_a_cluster_are_told_apart() {
    let cluster = RedisCluster::start();
    let mut options = patient(RedisOptions::new(cluster.urls()[0].clone()));
    options.cluster = true;
    options.timeout = SOON;
    let store = tollgate_store::RedisStore::new(options).expect("sound options");
    assert_eq!(store.nodes()[..], [NodeId::ONLY], "nobody has said yet where the slots are");
    store.ping(NodeId::ONLY).await.expect("somebody says it");
    let nodes = store.nodes();
    assert_eq!(nodes.len(), 3);
    assert!(!nodes.contains(&NodeId::ONLY));
    let limit = hourly("api", 5);
    let mut seen: Vec<NodeId> = Vec::new();
    for number in 0..60 {
        let key = format!("user:{number}");
        let node = store.node_of(&item(&limit, &key));
        assert!(nodes.contains(&node));
        seen.push(node);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 3, "keys are spread over all of them");

    cluster.nodes()[0].stop();
    let mut failed = Vec::new();
    for node in &nodes {
        failed.push(store.ping(*node).await.err().and_then(|error| error.failure()));
    }
    cluster.nodes()[0].resume();
    failed.sort_by_key(|failure| failure.is_some());
    assert_eq!(failed, [None, None, Some(Failure::Timeout)]);
    store.ping(NodeId::new(999)).await.expect("what is none of the store's nodes is nobody's concern");
}
