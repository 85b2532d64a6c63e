//! Reservations and settlements that come at the same time: they share transactions, each is all or none by itself, what is refused
//! waits for no disk, and a row that another program locks holds up nobody but those who need it.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinSet;
use tollgate_store::{
    ChargeId, Cost, Hold, Limit, Micros, PostgresOptions, PostgresStore, Settled, Settlement, Store,
    StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, hourly, item, options, start};

const CALLERS: usize = 64;

/// How many transactions that many calls take at most where one goes at a time: the first by itself, and the others in batches of up
/// to 32, of which one may have gone before all callers had come.
const MOST_TRANSACTIONS: usize = 8;

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) }
}

/// How many transactions wrote the held charges that there are.
fn transactions(server: &PostgresServer) -> usize {
    server.psql("select count(distinct xmin::text) from tollgate_hold").parse().unwrap()
}

fn used(server: &PostgresServer, limit: &str) -> String {
    server.psql(&format!("select coalesce(sum(b), 0) from tollgate_state where limit_name = '{limit}'"))
}

#[tokio::test(flavor = "multi_thread")]
async fn reservations_and_settlements_that_come_together_share_transactions() {
    let server = PostgresServer::start();
    // One call at a time, so that what comes during the first goes together, however busy the machine is. Calls at the same time
    // would meet each other's locks, and what is left out of a batch goes by itself.
    let store = narrow(&server, 2).await;
    let (window, bucket) = (hourly("window", 1_000), hourly("other", 1_000));
    for (name, keys) in [("of many keys", CALLERS), ("of one key", 1)] {
        let keys: Vec<String> = (0..CALLERS).map(|number| format!("{name} {}", number % keys)).collect();
        let holds: Vec<Hold> = keys.iter().map(|_| hold()).collect();
        let reserved = keys.iter().zip(&holds).map(|(key, hold)| {
            let (store, window, bucket) = (&store, &window, &bucket);
            async move { store.charge(&[item(window, key), item(bucket, key)], Some(*hold)).await }
        });
        for charged in join_all(reserved).await {
            assert!(charged.unwrap_or_else(|error| panic!("{name}: {error}")).allowed);
        }
        assert_eq!((used(&server, "window"), used(&server, "other")), ("64".into(), "64".into()), "{name}");
        let wrote = transactions(&server);
        assert!(wrote <= MOST_TRANSACTIONS, "{name}: {CALLERS} reservations in {wrote} transactions");
        let settled = holds.iter().enumerate().map(|(number, hold)| {
            let store = &store;
            // Every kind of settlement goes with the others.
            let settlement = match number % 4 {
                0 => Settlement::Cancel,
                1 => Settlement::Actual(0),
                2 => Settlement::Each(vec![0, 0]),
                _ => Settlement::Named(vec![("window".into(), 0), ("other".into(), 0)]),
            };
            async move { store.settle(hold.id, &settlement).await }
        });
        for settled in join_all(settled).await {
            assert_eq!(settled.unwrap_or_else(|error| panic!("{name}: {error}")), Settled::Done);
        }
        assert_eq!((used(&server, "window"), used(&server, "other")), ("0".into(), "0".into()), "{name}");
        let wrote = transactions(&server);
        assert!(wrote <= MOST_TRANSACTIONS, "{name}: {CALLERS} settlements in {wrote} transactions");
        for hold in holds {
            assert_eq!(store.settle(hold.id, &Settlement::Cancel).await.unwrap(), Settled::Already);
        }
        server.psql("truncate tollgate_hold, tollgate_state");
    }
}

/// Two limits, of which the second has room for some keys only: what is refused takes nothing from the first, whatever else is in the
/// same transaction, and leaves no state behind.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_those_that_come_together_is_all_or_none_by_itself() {
    let (server, store) = start().await;
    let (first, second) = (hourly("first", 1_000), hourly("second", 1));
    let full: Vec<String> = (0..CALLERS).step_by(2).map(|number| format!("k{number}")).collect();
    for key in &full {
        assert!(store.charge(&[item(&second, key)], None).await.unwrap().allowed);
    }
    for is_held in [true, false] {
        let reserved = (0..CALLERS).map(|number| {
            let (store, first, second) = (&store, &first, &second);
            async move {
                let key = format!("k{number}");
                let items = [item(first, &key), item(second, &key)];
                (number, store.charge(&items, is_held.then(hold)).await)
            }
        });
        for (number, charged) in join_all(reserved).await {
            let charged = charged.unwrap_or_else(|error| panic!("{number}: {error}"));
            assert_eq!(charged.allowed, number % 2 == 1 && is_held, "{number}");
            assert!(charged.outcomes[0].allowed, "{number}");
        }
        assert_eq!(used(&server, "first"), "32");
        let states = "select count(*) from tollgate_state where limit_name = 'first'";
        assert_eq!(server.psql(states), "32", "what was refused left nothing");
    }
    assert_eq!(server.psql("select count(*) from tollgate_hold"), "32");
}

/// Never more than there is room for, of one key that all callers want, and the same charge twice is one.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_everybody_wants_is_never_charged_too_much() {
    let (server, store) = start().await;
    let limits = [
        StoredLimit::new("log", Limit::sliding_window(20, Micros::from_secs(3_600)).unwrap()),
        StoredLimit::new("long", Limit::sliding_window(2_000, Micros::from_secs(3_600)).unwrap()),
        StoredLimit::new("leases", Limit::concurrency(20, Micros::from_secs(3_600)).unwrap()),
    ];
    for limit in &limits {
        let cost = Cost::new(if limit.name == "long" { 100 } else { 1 }).unwrap();
        let holds: Vec<Hold> = (0..CALLERS).map(|_| hold()).collect();
        let reserve = |hold: Hold| {
            let store = &store;
            async move { store.charge(&[StoredCharge { cost, ..item(limit, "k") }], Some(hold)).await }
        };
        let reserved = join_all(holds.iter().map(|hold| reserve(*hold))).await;
        let allowed: Vec<bool> = reserved.into_iter().map(|charged| charged.unwrap().allowed).collect();
        assert_eq!(allowed.iter().filter(|allowed| **allowed).count(), 20, "{}", limit.name);
        // What is sent again under its name is answered as before, though there is no room any more.
        for (hold, allowed) in holds.iter().zip(&allowed).take(8) {
            assert_eq!(reserve(*hold).await.unwrap().allowed, *allowed, "{}", limit.name);
        }
        let held = format!("select count(*) from tollgate_hold where limit_names = '{{{}}}'", limit.name);
        assert_eq!(server.psql(&held), "20");
        let settled = holds.iter().map(|hold| store.settle(hold.id, &Settlement::Cancel));
        let settled = join_all(settled).await;
        assert_eq!(settled.iter().filter(|settled| matches!(settled, Ok(Settled::Done))).count(), 20);
        assert_eq!(used(&server, &limit.name), "0", "{}", limit.name);
    }
}

/// Locks the row of one key from another program, until it is dropped.
async fn lock_key(server: &PostgresServer, condition: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let row = format!("begin; select * from tollgate_state where {condition} for update");
    client.batch_execute(&row).await.unwrap();
    client
}

/// A store of few connections: three quarters of them, rounded down, carry calls of one limit.
async fn narrow(server: &PostgresServer, connections: usize) -> PostgresStore {
    let timeout = Duration::from_secs(20);
    connect(PostgresOptions { timeout, connections, ..options(&server.url("postgres")) }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_program_locks_holds_up_nobody_else() {
    let server = PostgresServer::start();
    // Two calls at a time: one waits for the locked row, and the other has all that came meanwhile.
    let store = narrow(&server, 3).await;
    let plain = hourly("plain", 1_000);
    let long = StoredLimit::new("long", Limit::sliding_window(1_000, Micros::from_secs(3_600)).unwrap());
    for (limit, is_held) in [(&plain, false), (&plain, true), (&long, false)] {
        server.psql("truncate tollgate_state, tollgate_hold");
        assert!(store.charge(&[item(limit, "locked")], None).await.unwrap().allowed);
        let locked = lock_key(&server, "true").await;
        let mut answers = JoinSet::new();
        for number in 0..24 {
            let (store, limit) = (store.clone(), limit.clone());
            answers.spawn(async move {
                let key = if number == 12 { "locked".to_owned() } else { number.to_string() };
                let charged = store.charge(&[item(&limit, &key)], is_held.then(hold)).await;
                (number, charged)
            });
        }
        for _ in 0..23 {
            let (number, charged) = answers.join_next().await.unwrap().unwrap();
            assert_ne!(number, 12, "its row is locked");
            assert!(charged.unwrap_or_else(|error| panic!("{number}: {error}")).allowed);
        }
        drop(locked);
        let (number, charged) = answers.join_next().await.unwrap().unwrap();
        assert!(number == 12 && charged.unwrap_or_else(|error| panic!("{error}")).allowed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_program_locks_holds_up_no_other_settlement() {
    let server = PostgresServer::start();
    let store = narrow(&server, 3).await;
    let limit = hourly("plain", 1_000);
    let holds: Vec<Hold> = (0..24).map(|_| hold()).collect();
    for (number, hold) in holds.iter().enumerate() {
        assert!(store.charge(&[item(&limit, &number.to_string())], Some(*hold)).await.unwrap().allowed);
    }
    let of_it = format!("key = (select keys[1] from tollgate_hold where id = '{:032x}')", holds[12].id.get());
    let locked = lock_key(&server, &of_it).await;
    let mut answers = JoinSet::new();
    for (number, hold) in holds.into_iter().enumerate() {
        let store = store.clone();
        answers.spawn(async move { (number, store.settle(hold.id, &Settlement::Cancel).await) });
    }
    for _ in 0..23 {
        let (number, settled) = answers.join_next().await.unwrap().unwrap();
        assert_ne!(number, 12, "its row is locked");
        assert_eq!(settled.unwrap_or_else(|error| panic!("{number}: {error}")), Settled::Done);
    }
    drop(locked);
    let (number, settled) = answers.join_next().await.unwrap().unwrap();
    assert!(number == 12 && settled.unwrap_or_else(|error| panic!("{error}")) == Settled::Done);
    assert_eq!(used(&server, "plain"), "0");
}

/// What a refused reservation, one that was held before and a settlement of nothing leave in the log of the server is not flushed:
/// nothing that they answered has to outlast a crash. A reservation that is admitted is flushed.
#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_held_waits_for_the_disk() {
    let server = PostgresServer::builder()
        .setting("wal_writer_delay", "10s")
        .setting("bgwriter_delay", "10s")
        .setting("autovacuum", "off")
        .start();
    let store = connect(options(&server.url("postgres"))).await;
    let limit = hourly("plain", 1);
    let held = hold();
    let flushed = || server.psql("select pg_current_wal_flush_lsn()");
    let before = flushed();
    assert!(store.charge(&[item(&limit, "k")], Some(held)).await.unwrap().allowed);
    let after = flushed();
    assert_ne!(after, before, "a reservation is on disk before it is acknowledged");
    assert!(!store.charge(&[item(&limit, "k")], Some(hold())).await.unwrap().allowed);
    assert!(store.charge(&[item(&limit, "k")], Some(held)).await.unwrap().allowed, "as before");
    assert_eq!(store.settle(ChargeId::random(), &Settlement::Cancel).await.unwrap(), Settled::Unknown);
    assert_eq!(flushed(), after, "nothing was promised");
    assert_eq!(store.settle(held.id, &Settlement::Cancel).await.unwrap(), Settled::Done);
    let settled = flushed();
    assert_ne!(settled, after, "a settlement is on disk before it is acknowledged");
    assert_eq!(store.settle(held.id, &Settlement::Cancel).await.unwrap(), Settled::Already);
    assert_eq!(flushed(), settled, "it was there already");
}
