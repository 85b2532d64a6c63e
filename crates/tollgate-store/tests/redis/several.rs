//! Several limits of one key in one charge: every mixture of strategies that has a script for itself, in an order that is not the
//! script's, answers each limit by its own numbers.

use tollgate_store::{
    ChargeId, Hold, Micros, RedisOptions, RedisStore, Settled, Settlement, Store, StoredCharge, StoredLimit,
    Subject,
};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::{beside_others, costing, hourly, one_of_each, patient, store_on, used};

/// Which limits are charged together: all ways to choose so many of seven, with repetition.
fn mixtures(count: usize, from: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let with = |first: usize| {
        mixtures(count - 1, first).into_iter().map(move |mut rest| {
            rest.push(first);
            rest
        })
    };
    (from..7).flat_map(with).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_mixture_of_strategies_is_charged_all_or_none() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = store_on(&server, None);
    for (number, mixture) in [2, 3, 4].into_iter().flat_map(|count| mixtures(count, 0)).enumerate() {
        let key = format!("k{number}");
        // Names differ, so that a strategy may come more than once; they come in descending order of their numbers.
        let limits: Vec<StoredLimit> = mixture
            .iter()
            .enumerate()
            .map(|(place, which)| {
                let limit = one_of_each(9).remove(*which);
                StoredLimit { name: format!("{place}-{}", limit.name), ..limit }
            })
            .collect();
        let items: Vec<StoredCharge<'_>> =
            limits.iter().zip(1..).map(|(limit, cost)| costing(limit, &key, cost)).collect();
        let what = format!("{:?}", limits.iter().map(|limit| &*limit.name).collect::<Vec<_>>());
        let count = items.len() as u64;
        // Two fit of the dearest, at most: 4 of 9.
        for turn in 1..=2 {
            let hold = (turn == 2).then(|| Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) });
            let charged = store.charge(&items, hold).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(charged.allowed, "{what}");
            let counted: Vec<u64> = charged.outcomes.iter().map(|outcome| outcome.used()).collect();
            let expected: Vec<u64> = (1..=count).map(|cost| cost * turn).collect();
            assert_eq!(counted, expected, "{what}, charge {turn}");
            if let Some(hold) = hold {
                let again = store.charge(&items, Some(hold)).await.expect("the same again");
                assert_eq!(again.outcomes, charged.outcomes, "{what}, sent again");
                let settled = store.settle(hold.id, &Settlement::Cancel).await.expect("a cancel");
                assert_eq!(settled, Settled::Done, "{what}");
            }
        }
        // One that does not fit keeps the others from being charged.
        let dear: Vec<StoredCharge<'_>> = items
            .iter()
            .enumerate()
            .map(|(place, item)| costing(item.limit, item.key, if place == 0 { 9 } else { 1 }))
            .collect();
        assert!(!store.charge(&dear, None).await.expect("a charge").allowed, "{what}");
        for item in &items {
            assert_eq!(
                used(&store, item.limit, item.key).await,
                item.cost.get(),
                "{what}: {}",
                item.limit.name
            );
        }
        server.command(&["FLUSHALL"]).expect("a fresh start");
    }
}

/// How many scripts the servers of a cluster have run.
fn scripts(cluster: &RedisCluster) -> u64 {
    let on_server = |server: &RedisServer| -> u64 {
        let stats = server.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
        let calls = stats.split(',').find_map(|field| field.strip_prefix("calls="));
        calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
    };
    cluster.nodes().iter().map(on_server).sum()
}

/// The limits of jobs have keys of three namespaces. A charge over all of them is one script.
#[tokio::test(flavor = "multi_thread")]
async fn limits_of_the_subject_all_are_one_script_on_a_cluster() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    let store = RedisStore::new(patient(RedisOptions::cluster(cluster.urls()))).expect("sound options");
    let limits = ["jobs.type.email", "jobs.queue.mail", "jobs.global"]
        .map(|name| StoredLimit { subject: Subject::All, ..hourly(name, 1_000) });
    // The first charge loads the script.
    let mut before = 0;
    for number in 0..=20 {
        let keys = [format!("job:email-{number}"), format!("queue:mail-{number}"), "global".to_owned()];
        let items: Vec<StoredCharge<'_>> =
            limits.iter().zip(&keys).map(|(limit, key)| costing(limit, key, 1)).collect();
        assert!(store.charge(&items, None).await.expect("a charge").allowed);
        if number == 0 {
            before = scripts(&cluster);
        }
    }
    assert_eq!(scripts(&cluster) - before, 20);
    assert_eq!(used(&store, &limits[2], "global").await, 21);
}
