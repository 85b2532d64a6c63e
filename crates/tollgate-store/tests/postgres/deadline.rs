//! Deadlines, lost answers, crashes: every call returns in time, nothing that comes late changes anything, and the store
//! recovers by itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate_store::{
    ChargeId, Cost, Failure, Hold, Limit, Micros, PostgresOptions, PostgresStore, Settled, Settlement, Store,
    StoreError, StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};

use crate::{connect, hourly, item, options};

const DEADLINE: Duration = Duration::from_millis(300);

/// Far more than the deadline and what a loaded machine adds, far less than any of the timeouts beneath.
const IN_TIME: Duration = Duration::from_secs(2);

/// A store with a short deadline, reached by a port, whose connections are open.
async fn short(port: u16) -> PostgresStore {
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let store = connect(PostgresOptions { timeout: DEADLINE, connections: 2, ..options(&url) }).await;
    let warm = hourly("warm", 1_000);
    for _ in 0..3 {
        // The first answers show how the clocks differ.
        let _ = store.charge(&[item(&warm, "warm")], None).await;
    }
    store
}

/// What is used of a limit, by a store that nothing is wrong with.
async fn used(server: &PostgresServer, limit: &StoredLimit, key: &str) -> u64 {
    let store = connect(options(&server.url("postgres"))).await;
    let most = StoredCharge { cost: Cost::MAX, ..item(limit, key) };
    store.peek(&[most]).await.unwrap().outcomes[0].used()
}

async fn timed<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let start = Instant::now();
    let result = call.await;
    let took = start.elapsed();
    assert!(took < IN_TIME, "a call took {took:?}");
    result
}

/// Tries until it works, for as long as a server may take to recover.
async fn recovers(store: &PostgresStore, limit: &StoredLimit) {
    let start = Instant::now();
    while let Err(error) = timed(store.charge(&[item(limit, "after")], None)).await {
        assert!(start.elapsed() < Duration::from_secs(30), "does not recover: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// There is time enough to send a refund again, and it must not be; and one that waits for a row until it is late changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_refund_is_made_once_or_not_at_all() {
    let server = Arc::new(PostgresServer::start());
    let proxy = FaultProxy::start(server.port());
    let limit = hourly("api", 1_000);
    let ten = [StoredCharge { cost: Cost::new(10).unwrap(), ..item(&limit, "k") }];
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let patient = connect(PostgresOptions { timeout: Duration::from_secs(20), ..options(&url) }).await;
    patient.charge(&ten, None).await.unwrap();
    patient.refund(&[item(&limit, "k")]).await.unwrap();
    assert_eq!(used(&server, &limit, "k").await, 9);
    proxy.set(Mode::SwallowReplies);
    let cut = async {
        let start = Instant::now();
        while used(&server, &limit, "k").await == 9 {
            assert!(start.elapsed() < Duration::from_secs(20), "the request does not arrive");
        }
        proxy.set(Mode::Pass);
        proxy.reset_connections();
    };
    let back = [item(&limit, "k")];
    let (refunded, ()) = tokio::join!(patient.refund(&back), cut);
    let error = refunded.unwrap_err();
    assert!(error.is_ambiguous(), "{error}");
    assert_eq!(used(&server, &limit, "k").await, 8, "{error}");
    patient.refund(&back).await.unwrap();
    assert_eq!(used(&server, &limit, "k").await, 7);

    let store = short(server.port()).await;
    let locked = lock_all(&server).await;
    timed(store.refund(&back)).await.unwrap_err();
    locked.await.unwrap();
    assert_eq!(used(&server, &limit, "k").await, 7, "it was given up while it waited");
    let late = |seconds: i32| {
        format!(
            "select from tollgate_refund((select array_agg(key) from tollgate_state where limit_name = 'api'), '{{3}}', \
             '{{1000, 3600000000, 0, 0, 0}}', '{{1}}', null, now() - interval '{seconds} s')"
        )
    };
    let error = server.try_psql(&late(1)).unwrap_err();
    assert!(error.contains("the call came after its deadline"), "{error}");
    assert_eq!(used(&server, &limit, "k").await, 7);
    server.psql(&late(-60));
    assert_eq!(used(&server, &limit, "k").await, 6, "the same in time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_network_costs_a_deadline_and_nothing_more() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let store = short(proxy.port()).await;
    let limit = hourly("api", 1_000);
    for mode in [Mode::Blackhole, Mode::Stall, Mode::SwallowReplies] {
        proxy.set(mode);
        for _ in 0..4 {
            let error = timed(store.charge(&[item(&limit, "k")], None)).await.unwrap_err();
            let failure = error.failure().unwrap();
            assert!(matches!(failure, Failure::Timeout | Failure::Overloaded), "{mode:?}: {error}");
        }
        assert!(timed(store.peek(&[item(&limit, "k")])).await.is_err());
        proxy.set(Mode::Pass);
        recovers(&store, &limit).await;
    }
    proxy.set(Mode::Refuse);
    // Each of the two connections may still take a call before it is known to be cut; from then on there is nobody to send to.
    let mut refused = None;
    for _ in 0..3 {
        let error = timed(store.charge(&[item(&limit, "k")], None)).await.unwrap_err();
        assert_eq!(error.failure(), Some(Failure::Connection), "{error}");
        refused = Some(error);
    }
    let refused = refused.unwrap();
    assert!(!refused.is_ambiguous(), "nothing was sent: {refused}");
    proxy.set(Mode::Pass);
    recovers(&store, &limit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_answer_was_lost_is_ambiguous_and_not_sent_again() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let store = short(proxy.port()).await;
    let limit = hourly("api", 1_000);
    proxy.set(Mode::CutReply { after_bytes: 0 });
    let error = timed(store.charge(&[item(&limit, "lost")], None)).await.unwrap_err();
    assert!(error.is_ambiguous(), "{error}");
    proxy.set(Mode::Pass);
    assert_eq!(used(&server, &limit, "lost").await, 1, "charged once, although no caller got the answer");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_charge_whose_answer_was_lost_is_sent_again_and_charged_once() {
    let server = Arc::new(PostgresServer::start());
    let proxy = FaultProxy::start(server.port());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let store = connect(options(&url)).await;
    let limit = hourly("api", 1_000);
    assert!(store.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    let locked = lock_all(&server).await;
    let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
    let call = {
        let (store, limit) = (store.clone(), limit.clone());
        tokio::spawn(async move { store.charge(&[item(&limit, "k")], Some(hold)).await })
    };
    let plain = {
        let (store, limit) = (store.clone(), limit.clone());
        tokio::spawn(async move { store.charge(&[item(&limit, "k")], None).await })
    };
    // Both wait for the lock; then their connections break.
    while server.psql("select count(*) from pg_stat_activity where wait_event_type = 'Lock'") != "2" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.reset_connections();
    let error = plain.await.unwrap().unwrap_err();
    assert!(error.is_ambiguous(), "{error}");
    assert_eq!(error.failure(), Some(Failure::Connection));
    let charged =
        call.await.unwrap().unwrap_or_else(|error| panic!("has a name, and was not sent again: {error}"));
    locked.await.unwrap();
    assert_eq!(store.charge(&[item(&limit, "k")], Some(hold)).await.unwrap(), charged);
    let used = used(&server, &limit, "k").await;
    assert!(used == 2 || used == 3, "{used}: before, held once, and perhaps the one whose answer was lost");
}

/// Locks all rows from another session for a while; what comes back is done when they are free again.
async fn lock_all(server: &Arc<PostgresServer>) -> tokio::task::JoinHandle<()> {
    let locking = server.clone();
    let locked = tokio::task::spawn_blocking(move || {
        locking.psql("begin; select * from tollgate_state for update; select pg_sleep(1.5); commit");
    });
    let sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
    while server.psql(sleeping) != "1" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    locked
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_changes_nothing_once_it_goes_on() {
    let server = PostgresServer::start();
    let store = short(server.port()).await;
    let (limit, log) = (
        hourly("api", 1_000),
        StoredLimit::new("log", Limit::sliding_window(5, Micros::from_secs(60)).unwrap()),
    );
    server.stop();
    let single = timed(store.charge(&[item(&limit, "late")], None)).await.unwrap_err();
    let several = timed(store.charge(&[item(&limit, "late2"), item(&log, "late2")], None)).await.unwrap_err();
    for error in [&single, &several] {
        assert!(matches!(error.failure(), Some(Failure::Timeout | Failure::Overloaded)), "{error}");
    }
    // Long enough that the deadline has passed by the server's clock too, when it gets to look.
    tokio::time::sleep(DEADLINE).await;
    server.resume();
    recovers(&store, &limit).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(used(&server, &limit, "late").await, 0);
    assert_eq!(used(&server, &limit, "late2").await + used(&server, &log, "late2").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_holds_nobody_up_for_longer_than_the_deadline() {
    let server = Arc::new(PostgresServer::start());
    let store = short(server.port()).await;
    let (limit, other) = (hourly("api", 1_000), hourly("other", 1_000));
    assert!(store.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    let locked = lock_all(&server).await;
    let held = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
    for (items, hold) in [
        (vec![item(&limit, "k")], None),
        (vec![item(&limit, "k"), item(&other, "k")], None),
        (vec![item(&limit, "k")], Some(held)),
    ] {
        let error = timed(store.charge(&items, hold)).await.unwrap_err();
        let failure = error.failure().unwrap();
        assert!(matches!(failure, Failure::Timeout | Failure::Overloaded), "{error}");
        assert!(!error.is_ambiguous(), "the server said so itself: {error}");
    }
    // Others are not held up.
    assert!(timed(store.charge(&[item(&limit, "free")], None)).await.unwrap().allowed);
    locked.await.unwrap();
    assert_eq!(used(&server, &limit, "k").await, 1, "nothing was charged when the lock was let go");
    assert_eq!(used(&server, &other, "k").await, 0);
    recovers(&store, &limit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_and_a_killed_backend_are_survived_and_counted() {
    let server = PostgresServer::start();
    let store = short(server.port()).await;
    let limit = hourly("api", 1_000);
    let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
    assert!(store.charge(&[item(&limit, "held")], Some(hold)).await.unwrap().allowed);
    assert_eq!(store.losses_possible(), 0);

    server.kill();
    let error = timed(store.charge(&[item(&limit, "k")], None)).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    server.restart();
    recovers(&store, &limit).await;
    assert_eq!(store.losses_possible(), 1);
    // A held charge was on disk before it was acknowledged.
    assert_eq!(store.settle(hold.id, &Settlement::Actual(0)).await.unwrap(), Settled::Done);

    server.kill_one_backend();
    server.wait_until_ready();
    recovers(&store, &limit).await;
    assert_eq!(store.losses_possible(), 2, "all backends were ended, and the server recovered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_stops_waiting_leaves_no_half_used_connection() {
    let server = PostgresServer::start();
    let store = short(server.port()).await;
    let limit = hourly("api", 1_000_000);
    for round in 0..50 {
        let items = [item(&limit, "k")];
        let _ = tokio::time::timeout(Duration::from_micros(round * 20), store.charge(&items, None)).await;
    }
    recovers(&store, &limit).await;
    let before = used(&server, &limit, "k").await;
    for _ in 0..20 {
        assert!(store.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    }
    assert_eq!(used(&server, &limit, "k").await, before + 20, "every answer belonged to its question");
}
