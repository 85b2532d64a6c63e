//! Charges of several limits without a hold: one statement makes them, each all or none by itself, and the function only where it must.

use std::time::Duration;

use futures_util::future::join_all;
use tollgate_store::{Limit, Micros, PostgresStore, Store, StoredCharge, StoredLimit};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, hourly, item, options};

const CALLERS: usize = 64;

/// One limit of each strategy that keeps its state in one row.
fn limits() -> [StoredLimit; 5] {
    let hour = Micros::from_secs(3_600);
    [
        ("bucket", Limit::token_bucket("1/h", 20)),
        ("leaky", Limit::leaky_bucket("1/h", 20)),
        ("window", Limit::fixed_window(20, hour)),
        ("log", Limit::sliding_window(20, hour)),
        ("counter", Limit::sliding_window_counter(20, hour)),
    ]
    .map(|(name, limit)| StoredLimit::new(name, limit.unwrap()))
}

/// How often the functions for charges were called. A session reports what it called when it ends, if not before.
async fn function_calls(server: &PostgresServer, store: PostgresStore) -> u64 {
    drop(store);
    let sessions = "select count(*) from pg_stat_activity \
                    where backend_type = 'client backend' and pid <> pg_backend_pid()";
    while server.psql(sessions) != "0" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let calls = "select coalesce(sum(calls), 0) from pg_stat_user_functions \
                 where funcname in ('tollgate_charge', 'tollgate_charge_each')";
    server.psql(calls).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_statement_charges_every_strategy_and_leaves_changed_limits_to_the_function() {
    let server = PostgresServer::builder().setting("track_functions", "all").start();
    let store = connect(options(&server.url("postgres"))).await;
    let limits = limits();
    let keys: Vec<String> = (0..CALLERS).map(|number| format!("k{number}")).collect();
    let charge = |store: &PostgresStore, limits: &[StoredLimit], key: &str| {
        let (store, limits, key) = (store.clone(), limits.to_vec(), key.to_owned());
        async move {
            let items: Vec<StoredCharge<'_>> = limits.iter().map(|limit| item(limit, &key)).collect();
            store.charge(&items, None).await.unwrap_or_else(|error| panic!("{key}: {error}"))
        }
    };
    for used in 1..=21_u64 {
        for charged in join_all(keys.iter().map(|key| charge(&store, &limits, key))).await {
            assert_eq!(charged.allowed, used <= 20);
            for outcome in &charged.outcomes {
                assert_eq!((outcome.allowed, outcome.remaining), (used <= 20, 20_u64.saturating_sub(used)));
            }
        }
    }
    assert_eq!(function_calls(&server, store).await, 0);
    // A bucket under other numbers, and a log that is to be kept for longer.
    let store = connect(options(&server.url("postgres"))).await;
    let mut changed = limits;
    changed[0] = StoredLimit::new("bucket", Limit::token_bucket("1/h", 30).unwrap());
    let charged = charge(&store, &changed, "k0").await;
    assert!(!charged.allowed && charged.outcomes[0].allowed, "{charged:?}");
    assert_eq!(function_calls(&server, store).await, 1);
}

/// Two callers want each key. Their charges go in different statements, and none to the function.
#[tokio::test(flavor = "multi_thread")]
async fn charges_of_one_key_do_not_keep_others_from_their_statement() {
    let server = PostgresServer::builder().setting("track_functions", "all").start();
    // One call at a time, so that what comes during the first goes together.
    let store =
        connect(tollgate_store::PostgresOptions { connections: 2, ..options(&server.url("postgres")) }).await;
    let (first, second) = (hourly("first", 5), hourly("second", 1_000));
    for round in 1..=4_u64 {
        let calls = (0..CALLERS).map(|number| {
            let (store, first, second) = (&store, &first, &second);
            async move {
                let key = format!("k{}", number / 2);
                store.charge(&[item(first, &key), item(second, &key)], None).await
            }
        });
        let charged = join_all(calls).await.into_iter();
        let admitted =
            charged.filter(|charged| charged.as_ref().unwrap_or_else(|error| panic!("{error}")).allowed);
        let expected = if round < 3 { 2 } else { 4 - round } * CALLERS as u64 / 2;
        assert_eq!(admitted.count() as u64, expected, "round {round}");
    }
    assert_eq!(server.psql("select distinct b from tollgate_state"), "5");
    assert_eq!(function_calls(&server, store).await, 0);
}

/// Many callers of two processes begin the same keys at the same time, with their limits in opposite orders. Nobody is admitted beyond a
/// limit, and nobody waits in a ring.
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_are_begun_by_many_at_once_are_charged_exactly() {
    const MOST: u64 = 10;
    let server = PostgresServer::builder().setting("fsync", "off").start();
    let url = server.url("postgres");
    let stores = [connect(options(&url)).await, connect(options(&url)).await];
    let (first, second) = (hourly("first", MOST), hourly("second", 1_000));
    for round in 0..20 {
        let key = format!("k{round}");
        let calls = (0..CALLERS / 2).map(|number| {
            let (store, first, second, key) = (&stores[number % 2], &first, &second, &key);
            async move {
                let mut items = [item(first, key), item(second, key)];
                if number % 2 == 1 {
                    items.reverse();
                }
                store.charge(&items, None).await
            }
        });
        let admitted = join_all(calls).await.into_iter();
        let admitted =
            admitted.filter(|charged| charged.as_ref().unwrap_or_else(|error| panic!("{error}")).allowed);
        assert_eq!(admitted.count(), usize::try_from(MOST).unwrap(), "round {round}");
    }
    let counted = "select limit_name, sum(b) from tollgate_state group by 1 order by 1";
    assert_eq!(server.psql(counted), "first|200\nsecond|200");
    assert_eq!(server.psql("select deadlocks from pg_stat_database where datname = current_database()"), "0");
}

/// Another process makes the row of a new key after the statement has begun, and commits while the statement waits to insert it: what that
/// process counted stays counted, and none of the charge is made twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_made_meanwhile_is_not_overwritten() {
    let (server, store) = crate::start().await;
    let (first, second) = (hourly("first", 10), hourly("second", 10));
    let asked = [item(&first, "k"), item(&second, "k")];
    assert!(store.charge(&asked, None).await.unwrap().allowed);
    server.psql(
        "create table kept as select * from tollgate_state where limit_name = 'second';
         delete from tollgate_state where limit_name = 'second'",
    );
    let (other, connection) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    other.batch_execute("begin; insert into tollgate_state select * from kept").await.unwrap();
    let commit = async {
        while server.psql("select count(*) from pg_locks where not granted") == "0" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        other.batch_execute("commit").await.unwrap();
    };
    let (charged, ()) = tokio::join!(store.charge(&asked, None), commit);
    assert_eq!(charged.unwrap().outcomes[1].used(), 2);
    let counted = "select limit_name, b from tollgate_state order by 1";
    assert_eq!(server.psql(counted), "first|2\nsecond|2");
}
