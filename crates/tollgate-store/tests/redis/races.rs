//! Four processes, one key, the server's own clock: exactly as much as there is, whichever strategy, and nothing by halves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tollgate_store::{
    ChargeId, Hold, Micros, RedisOptions, RedisStore, Settled, Settlement, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::processes::{self, Child};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::{HOUR, PATIENCE, costing, hourly, item, one_of_each, store_with, used};

/// What the names of all children begin with.
const NAMES: &str = "race:";

const PROCESSES: u64 = 4;

/// How many calls each process makes under each of the seven limits.
const CALLS: u64 = 7_500;

/// How much there is of each: reached by all, and not by one alone.
const MOST: u64 = 8_000;

/// How many calls of a process are under way at a time.
const TASKS: u64 = 32;

/// The store of a child, from `url[ url…]`; several are a cluster. All children must use the same names.
fn store_of(child: &Child) -> RedisStore {
    let urls: Vec<&str> = child.parameters().split(' ').collect();
    let options = match urls[..] {
        [url] => RedisOptions::new(url),
        _ => RedisOptions::cluster(urls),
    };
    store_with(options, NAMES, PATIENCE)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Makes `calls` calls, some at a time, and gives what each returned.
async fn storm<T: Send + 'static, F>(calls: u64, call: impl Fn(u64) -> F + Send + Sync + 'static) -> Vec<T>
where
    F: Future<Output = T> + Send,
{
    let (call, next) = (Arc::new(call), Arc::new(AtomicU64::new(0)));
    let tasks = (0..TASKS).map(|_| {
        let (call, next) = (call.clone(), next.clone());
        tokio::spawn(async move {
            let mut results = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= calls {
                    return results;
                }
                results.push(call(number).await);
            }
        })
    });
    let mut results = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        results.extend(task.await.expect("a caller"));
    }
    results
}

/// Of 30,000 calls under each limit exactly 8,000 pass, and each is told another number of what remains.
#[test]
fn four_processes_get_exactly_what_there_is() {
    if let Some(child) = Child::here() {
        return runtime().block_on(async {
            let store = store_of(&child);
            used(&store, &hourly("warm", 1), "warm").await;
            child.wait_for_start();
            for limit in one_of_each(MOST) {
                let (store, charged) = (store.clone(), limit.clone());
                let remaining = storm(CALLS, move |_| {
                    let (store, limit) = (store.clone(), charged.clone());
                    async move {
                        let charged = store.charge(&[item(&limit, "one key")], None).await.expect("a charge");
                        charged.allowed.then_some(charged.outcomes[0].remaining)
                    }
                })
                .await;
                let remaining: Vec<String> =
                    remaining.into_iter().flatten().map(|left| left.to_string()).collect();
                child.report(&format!("{} {}", limit.name, remaining.join(" ")));
            }
        });
    }
    let _turn = super::MACHINE.blocking_write();
    let server = RedisServer::start();
    let start = std::time::Instant::now();
    let reports = processes::run("races::four_processes_get_exactly_what_there_is", 4, &server.url());
    let mut told: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut shares: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for line in reports.iter().flatten() {
        let (name, remaining) = line.split_once(' ').expect("a report");
        let remaining = remaining.split_whitespace().map(|left| left.parse::<u64>().expect("a number"));
        let told = told.entry(name.to_owned()).or_default();
        let before = told.len();
        told.extend(remaining);
        shares.entry(name.to_owned()).or_default().push(told.len() - before);
    }
    assert_eq!(told.len(), 7);
    for (name, mut told) in told {
        told.sort_unstable();
        assert_eq!(told.len() as u64, MOST, "{name}: as much as there is, shared as {:?}", shares[&name]);
        assert!(told.iter().copied().eq(0..MOST), "{name}: no two got the same");
    }
    let calls = 7 * PROCESSES * CALLS;
    println!("{calls} calls from four processes in {:?}; shares {shares:?}", start.elapsed());
}

/// Three limits in one charge, of different strategies and costs, some given back again, beside charges of one of them alone.
/// What is used in the end is what was admitted, under each: nothing was charged by halves.
fn charges_over_several_limits(child: &Child, keys: [&'static str; 3], calls: u64) {
    runtime().block_on(async {
        let store = store_of(child);
        used(&store, &hourly("warm", 1), "warm").await;
        child.wait_for_start();
        let limits = three();
        let results = storm(calls, move |number| {
            let (store, limits) = (store.clone(), limits.clone());
            async move {
                let three: Vec<StoredCharge<'_>> = items(&limits, keys);
                match number % 4 {
                    // The middle one by itself, so that it is the one to run out now and then.
                    0 => u64::from(store.charge(&three[1..2], None).await.expect("a charge").allowed) << 32,
                    // Held, and given back.
                    1 => {
                        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
                        if store.charge(&three, Some(hold)).await.expect("a hold").allowed {
                            let cancelled =
                                store.settle(hold.id, &Settlement::Cancel).await.expect("a cancel");
                            assert_eq!(cancelled, Settled::Done);
                        }
                        0
                    }
                    _ => u64::from(store.charge(&three, None).await.expect("a charge").allowed),
                }
            }
        })
        .await;
        let (alone, together) =
            results.iter().fold((0, 0), |(a, t), n| (a + (n >> 32), t + (n & 0xffff_ffff)));
        child.report(&format!("{alone} {together}"));
    });
}

fn three() -> [StoredLimit; 3] {
    let limit = |limit: Result<tollgate_store::Limit, _>| limit.expect("a sound limit");
    [
        StoredLimit::new("wide", limit(tollgate_store::Limit::sliding_window(6_000, HOUR))),
        StoredLimit::new("narrow", limit(tollgate_store::Limit::fixed_window(4_000, HOUR))),
        StoredLimit::new("bucket", limit(tollgate_store::Limit::token_bucket("1/h", 9_000))),
    ]
}

fn items<'a>(limits: &'a [StoredLimit; 3], keys: [&'a str; 3]) -> Vec<StoredCharge<'a>> {
    [2, 1, 3].iter().zip(limits).zip(keys).map(|((cost, limit), key)| costing(limit, key, *cost)).collect()
}

/// Sums up the reports, and compares with what the store has.
async fn nothing_by_halves(store: &RedisStore, reports: &[Vec<String>], keys: [&str; 3]) {
    let sum = |index: usize| -> u64 {
        let number = |line: &String| {
            line.split(' ').nth(index).expect("two numbers").parse::<u64>().expect("a number")
        };
        reports.iter().flatten().map(number).sum()
    };
    let (alone, together, limits) = (sum(0), sum(1), three());
    let mut stored = Vec::new();
    for (limit, key) in limits.iter().zip(keys) {
        stored.push(used(store, limit, key).await);
    }
    println!("{alone} alone, {together} together, stored {stored:?}");
    assert_eq!(stored[..2], [2 * together, together + alone]);
    // What refilled between a hold and its cancel is not given back: parts of a token, and what is used rounds up.
    let of_bucket = 3 * together..=3 * together + 1;
    assert!(of_bucket.contains(&stored[2]), "{stored:?} and {together} together");
    assert!(together <= 3_000 && together + alone <= 4_000, "no limit is passed");
    assert!(together + alone > 3_900 || together > 2_990, "one of the limits is reached");
}

#[test]
fn four_processes_charge_several_limits_all_or_none() {
    let keys = ["k", "k", "k"];
    if let Some(child) = Child::here() {
        return charges_over_several_limits(&child, keys, 4_000);
    }
    let _turn = super::MACHINE.blocking_write();
    let server = RedisServer::start();
    let reports = processes::run("races::four_processes_charge_several_limits_all_or_none", 4, &server.url());
    let store = store_with(RedisOptions::new(server.url()), NAMES, PATIENCE);
    runtime().block_on(nothing_by_halves(&store, &reports, keys));
}

/// The same where the three are on different servers of a cluster.
#[test]
fn four_processes_charge_several_servers_all_or_none() {
    let keys = ["a", "b", "d"];
    if let Some(child) = Child::here() {
        return charges_over_several_limits(&child, keys, 2_000);
    }
    let _turn = super::MACHINE.blocking_write();
    let cluster = RedisCluster::start();
    let urls = cluster.urls().join(" ");
    let reports = processes::run("races::four_processes_charge_several_servers_all_or_none", 4, &urls);
    let store = store_with(RedisOptions::cluster(cluster.urls()), NAMES, PATIENCE);
    runtime().block_on(async {
        nothing_by_halves(&store, &reports, keys).await;
    });
    let holders = cluster.nodes().iter().take(3).filter(|node| !super::keys(node, NAMES).is_empty()).count();
    assert!(holders > 1, "the keys are on several servers");
}
