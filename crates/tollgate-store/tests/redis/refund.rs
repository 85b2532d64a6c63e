//! Refunds over a network that fails, and where a key is not ours: what is said to have been given back was, once, and what is
//! said not to have been was not.

use std::time::{Duration, Instant};

use tollgate_store::{Failure, RedisOptions, RedisStore, Store, StoredCharge};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::deadline::scripts_run;
use super::{PATIENCE, alone, beside_others, costing, hourly, item, keys, patient, prefix, store_with, used};

/// A store through a proxy, and one beside it, of the same names.
fn through(server: &RedisServer, timeout: Duration) -> (FaultProxy, RedisStore, RedisStore) {
    let (proxy, names) = (FaultProxy::start(server.port()), prefix());
    let options = RedisOptions::new(format!("redis://127.0.0.1:{}", proxy.port()));
    let store = store_with(options, &names, timeout);
    (proxy, store, store_with(RedisOptions::new(server.url()), &names, PATIENCE))
}

/// There is time enough to send it again, and a way to; and it must not be.
#[tokio::test(flavor = "multi_thread")]
async fn a_refund_whose_answer_is_lost_is_ambiguous_and_made_once() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let (proxy, store, aside) = through(&server, PATIENCE);
    let limit = hourly("api", 1_000);
    store.charge(&[costing(&limit, "k", 10)], None).await.expect("a charge");
    let back = [costing(&limit, "k", 3)];
    proxy.set(Mode::SwallowReplies);
    let cut = async {
        let start = Instant::now();
        while used(&aside, &limit, "k").await == 10 {
            assert!(start.elapsed() < PATIENCE, "the request does not arrive");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.set(Mode::Pass);
        proxy.reset_connections();
    };
    let (refunded, ()) = tokio::join!(store.refund(&back), cut);
    let error = refunded.expect_err("no answer");
    assert!(error.is_ambiguous(), "{error}");
    assert_eq!(used(&aside, &limit, "k").await, 7, "{error}");
    store.refund(&back).await.expect("the network is back");
    assert_eq!(used(&aside, &limit, "k").await, 4);
    proxy.set(Mode::Refuse);
    let error = store.refund(&back).await.expect_err("nobody is there");
    assert_eq!(used(&aside, &limit, "k").await, 4, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refund_that_arrives_too_late_changes_nothing() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let (proxy, store, aside) = through(&server, Duration::from_millis(100));
    let limit = hourly("api", 1_000);
    aside.charge(&[costing(&limit, "k", 10)], None).await.expect("a charge");
    let start = Instant::now();
    while let Err(error) = store.refund(&[item(&limit, "k")]).await {
        assert!(start.elapsed() < PATIENCE, "no connection: {error}");
    }
    let before = used(&aside, &limit, "k").await;
    proxy.set(Mode::Latency(Duration::from_millis(130)));
    let run_before = scripts_run(&server);
    let error = store.refund(&[item(&limit, "k")]).await.expect_err("too late");
    assert_eq!((error.failure(), error.is_ambiguous()), (Some(Failure::Timeout), true), "{error}");
    while scripts_run(&server) == run_before {
        assert!(start.elapsed() < PATIENCE, "the request does not arrive");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(used(&aside, &limit, "k").await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_keeps_a_whole_script_from_refunding() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = store_with(RedisOptions::new(server.url()), &prefix(), PATIENCE);
    let (limit, foreign) = (hourly("api", 1_000), hourly("foreign", 1_000));
    let items = [item(&limit, "k"), item(&foreign, "k")];
    store.charge(&items, None).await.expect("a charge");
    let names = keys(&server, store.prefix());
    let name = names.iter().find(|name| name.ends_with("foreign")).expect("its name");
    server.command(&["SET", name, "something else"]).expect("set");
    let error = store.refund(&items).await.expect_err("not ours");
    assert_eq!((error.failure(), error.is_ambiguous()), (Some(Failure::State), false), "{error}");
    assert_eq!(used(&store, &limit, "k").await, 1, "the first was not refunded either");
}

/// On a cluster each slot is refunded for itself: what one gave back, no other's failure takes away, and the error says so.
#[tokio::test(flavor = "multi_thread")]
async fn slots_of_a_cluster_are_refunded_each_for_itself() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    let store = RedisStore::new(patient(RedisOptions::cluster(cluster.urls()))).expect("sound options");
    let limit = hourly("api", 1_000);
    let keys_of = |number: usize| format!("key:{number}");
    let texts: Vec<String> = (0..20).map(keys_of).collect();
    let items: Vec<StoredCharge<'_>> = texts.iter().map(|key| costing(&limit, key, 5)).collect();
    for item in &items {
        store.charge(&[*item], None).await.expect("a charge");
    }
    let back: Vec<StoredCharge<'_>> = texts.iter().map(|key| costing(&limit, key, 2)).collect();
    store.refund(&back).await.expect("a refund over twenty slots");
    for key in &texts {
        assert_eq!(used(&store, &limit, key).await, 3, "{key}");
    }
    let primary = &cluster.nodes()[cluster.primary_of(100).expect("a primary")];
    let name = keys(primary, store.prefix()).pop().expect("one of twenty keys is here");
    primary.command(&["SET", &name, "something else"]).expect("set");
    let error = store.refund(&back).await.expect_err("one is not ours");
    assert_eq!((error.failure(), error.is_ambiguous()), (Some(Failure::State), true), "{error}");
    let mut left = Vec::new();
    for key in &texts {
        if let Ok(charged) =
            store.peek(&[StoredCharge { cost: tollgate_store::Cost::MAX, ..item(&limit, key) }]).await
        {
            left.push(charged.outcomes[0].used());
        }
    }
    assert_eq!(left, [1; 19], "all but the one that is not ours");
}
