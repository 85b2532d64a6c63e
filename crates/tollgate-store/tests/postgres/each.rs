//! Charges that are each made by themselves: what is wrong with one key is no other key's answer, and all have one deadline.

use std::time::Duration;

use tollgate_store::{Failure, Limit, Micros, Outcome, PostgresOptions, Store, StoreError, StoredLimit};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};

use crate::shares::lock;
use crate::{connect, hourly, item, options, start};

const HOUR: Micros = Micros::from_secs(3_600);

/// A limit that one statement cannot carry out, for a key that fares ill, and another like it.
fn limits() -> [[StoredLimit; 2]; 2] {
    let log = |name| StoredLimit::new(name, Limit::sliding_window(1_000, HOUR).unwrap());
    let leases = |name| StoredLimit::new(name, Limit::concurrency(10, HOUR).unwrap());
    [[log("ill"), log("well")], [leases("ill"), leases("well")]]
}

fn failure(outcome: &Result<Outcome, StoreError>) -> Option<Failure> {
    outcome.as_ref().expect_err("a failure").failure()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_whose_state_is_not_ours_is_no_other_keys_failure() {
    for [ill, well] in limits() {
        let (server, store) = start().await;
        let items = [item(&well, "first"), item(&ill, "k"), item(&well, "k"), item(&well, "k")];
        for outcome in store.charge_each(&items).await {
            assert!(outcome.unwrap_or_else(|error| panic!("{error}")).allowed);
        }
        server.psql("update tollgate_state set b = 9223372036854775807 where limit_name = 'ill'");
        let outcomes = store.charge_each(&items).await;
        assert_eq!(failure(&outcomes[1]), Some(Failure::State), "{outcomes:?}");
        for index in [0, 2, 3] {
            let outcome = outcomes[index].as_ref().unwrap_or_else(|error| panic!("{index}: {error}"));
            assert!(outcome.allowed, "{index}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_row_is_no_other_keys_failure_under_its_limit() {
    let window = Micros::from_secs(3_600);
    let plain = [Limit::token_bucket("1000/h", 1_000), Limit::fixed_window(1_000, window)];
    for limit in plain.map(|limit| StoredLimit::new("plain", limit.unwrap())) {
        let (server, store) = start().await;
        let keys: Vec<String> = (0..40).map(|number| number.to_string()).collect();
        let items: Vec<_> = keys.iter().map(|key| item(&limit, key)).collect();
        assert!(store.charge(&items[..1], None).await.unwrap().allowed);
        server.psql("update tollgate_state set a = 9223372036854775807, b = 9223372036854775807");
        for round in 0..3 {
            let outcomes = store.charge_each(&items).await;
            assert_eq!(failure(&outcomes[0]), Some(Failure::State), "{}, {round}: {outcomes:?}", limit.limit);
            for outcome in &outcomes[1..] {
                assert!(outcome.as_ref().unwrap_or_else(|error| panic!("{round}: {error}")).allowed);
            }
        }
        // Single checks that come at the same time share statements too.
        let checks = items.iter().map(|item| store.charge(std::slice::from_ref(item), None));
        let charged = futures_util::future::join_all(checks).await;
        assert_eq!(charged[0].as_ref().expect_err("it is broken").failure(), Some(Failure::State));
        for charged in &charged[1..] {
            assert!(charged.as_ref().unwrap_or_else(|error| panic!("{error}")).allowed);
        }
        let rows = "select count(*) from tollgate_state where limit_name = 'plain'";
        assert_eq!(server.psql(rows), "40", "nobody was turned away");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_key_is_no_other_keys_timeout() {
    let server = PostgresServer::start();
    let timeout = Duration::from_secs(4);
    let store = connect(PostgresOptions { timeout, ..options(&server.url("postgres")) }).await;
    for [ill, well] in limits() {
        let items = [item(&ill, "k"), item(&well, "k"), item(&ill, "k"), item(&well, "k")];
        for outcome in store.charge_each(&items).await {
            assert!(outcome.unwrap_or_else(|error| panic!("{error}")).allowed);
        }
        let locked = lock(&server, "ill").await;
        let outcomes = store.charge_each(&items).await;
        drop(locked);
        for index in [0, 2] {
            assert_eq!(failure(&outcomes[index]), Some(Failure::Timeout), "{outcomes:?}");
        }
        for index in [1, 3] {
            let outcome = outcomes[index].as_ref().unwrap_or_else(|error| panic!("{index}: {error}"));
            assert!(outcome.allowed, "{index}");
        }
        server.psql("truncate tollgate_state, tollgate_execution");
    }
}

/// Every charge of a repeated key waited for the deadline, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn charges_of_one_call_have_one_deadline() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let timeout = Duration::from_millis(500);
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    connect(options(&server.url("postgres"))).await;
    let store = tollgate_store::PostgresStore::new(PostgresOptions { timeout, ..options(&url) }).unwrap();
    proxy.set(Mode::Blackhole);
    let log = StoredLimit::new("log", Limit::sliding_window(10, HOUR).unwrap());
    for limit in [hourly("plain", 100), log] {
        let items = [item(&limit, "k"); 64];
        let charged = tokio::time::timeout(16 * timeout, store.charge_each(&items)).await;
        let outcomes = charged.expect("the deadline of one charge, and not of 64");
        assert_eq!(outcomes.len(), items.len());
        for outcome in &outcomes {
            assert_eq!(failure(outcome), Some(Failure::Timeout));
        }
        assert!(!outcomes[63].as_ref().is_err_and(StoreError::is_ambiguous), "it was not sent");
    }
}
