//! Bugs that the matrix, or reading for it, has found, each by the shortest way to it.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tollgate_store::{Cost, Failure, PostgresOptions, PostgresStore, Store, StoredCharge};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};

use super::callers::new_hold;
use super::{DEADLINE, connect, hourly, item, options};
use crate::{items, start};

fn through(proxy: &FaultProxy, timeout: Duration, connections: usize) -> PostgresOptions {
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    PostgresOptions { timeout, connections, ..options(&url) }
}

/// Tries until it works, and says which failures came before.
async fn failures_until_it_works(store: &PostgresStore, within: Duration) -> Vec<Failure> {
    let (limit, start) = (hourly("api", 1_000_000), Instant::now());
    let mut failures = Vec::new();
    while let Err(error) = store.charge(&[item(&limit, "after")], None).await {
        assert!(start.elapsed() < within, "does not recover: {error}; before that {failures:?}");
        failures.extend(error.failure());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    failures
}

/// All that was known of the server's clock had come by answers that took longer than the deadline. So every call was late by
/// that clock, was turned away, brought no better knowledge, and the next was late too, for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_was_slow_once_is_not_held_against_it() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    proxy.set(Mode::Latency(Duration::from_millis(120)));
    let store = connect(through(&proxy, DEADLINE, 2)).await;
    let limit = hourly("api", 1_000_000);
    let error = store.charge(&[item(&limit, "k")], None).await.unwrap_err();
    assert_eq!(error.failure(), Some(Failure::Timeout), "{error}");
    // Until the connection that this call began is there.
    while store.connections() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    proxy.set(Mode::Pass);
    let failures = failures_until_it_works(&store, Duration::from_secs(5)).await;
    assert!(failures.contains(&Failure::Late), "{failures:?}: this is how it begins");
}

/// The first attempt took effect and its answer was lost, the second found no connection; and the caller was told that nothing
/// had been charged.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_attempt_that_fails_does_not_hide_that_the_first_may_have_charged() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let store = connect(through(&proxy, Duration::from_secs(10), 8)).await;
    let limit = hourly("api", 1_000);
    assert!(store.charge(&[item(&limit, "other")], Some(new_hold())).await.unwrap().allowed);
    proxy.set(Mode::CutReply { after_bytes: 0 });
    let error = store.charge(&[item(&limit, "k")], Some(new_hold())).await.unwrap_err();
    assert_eq!(server.psql("select count(*) from tollgate_hold"), "2", "it was charged");
    assert!(error.is_ambiguous(), "{error}");
}

/// The same held charge, sent twice at once: the second waited for the first, found no room, and was denied what it had.
#[tokio::test(flavor = "multi_thread")]
async fn a_held_charge_that_took_the_last_unit_is_not_denied_to_whoever_sent_it_twice() {
    let (_server, store) = start().await;
    for round in 0..10 {
        let (limit, hold) = (hourly(&format!("one-{round}"), 1), new_hold());
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            let (store, limit) = (store.clone(), limit.clone());
            tasks.spawn(async move { store.charge(&[item(&limit, "k")], Some(hold)).await.unwrap() });
        }
        let answers = tasks.join_all().await;
        assert!(answers.iter().all(|answer| answer.allowed && *answer == answers[0]), "{answers:?}");
        assert!(!store.charge(&[item(&limit, "k")], Some(new_hold())).await.unwrap().allowed);
    }
}

/// The driver of a connection that nobody needed any more waited for the lost answer for ever, and the server kept its side
/// open as well, until it had no connection left.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_does_not_cost_the_server_a_connection() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let store = connect(through(&proxy, DEADLINE, 2)).await;
    let limit = hourly("api", 1_000_000);
    for _ in 0..20 {
        proxy.swallow_next(1);
        for _ in 0..2 {
            let _ = store.charge(&[item(&limit, "k")], None).await;
        }
    }
    let ours = "select count(*) from pg_stat_activity where application_name = 'tollgate'";
    let start = Instant::now();
    while server.psql(ours).parse::<usize>().unwrap() > 2 {
        assert!(start.elapsed() < Duration::from_secs(5), "{} connections are left", server.psql(ours));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Attempts to connect that the network had swallowed kept all places among the connections for five seconds.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_will_never_open_do_not_keep_others_from_opening() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let store = connect(through(&proxy, DEADLINE, 4)).await;
    let limit = hourly("api", 1_000_000);
    proxy.set(Mode::Blackhole);
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (store, limit) = (store.clone(), limit.clone());
        tasks.spawn(async move {
            for _ in 0..4 {
                assert!(store.charge(&[item(&limit, "k")], None).await.is_err());
            }
        });
    }
    tasks.join_all().await;
    proxy.set(Mode::Pass);
    failures_until_it_works(&store, Duration::from_secs(3)).await;
}

/// Of several keys in one statement some were charged, and one waited for a lock until it was late; and the callers were told,
/// all of them, that nothing had been charged.
#[tokio::test(flavor = "multi_thread")]
async fn of_keys_in_one_statement_only_those_that_were_late_are_said_to_be() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let patient = connect(options(&server.url("postgres"))).await;
    let (limit, keys) = (hourly("api", 1_000), ["a", "b", "c"]);
    for charged in patient.charge_each(&items(&limit, &keys, Cost::ONE)).await {
        charged.unwrap();
    }
    server.psql(
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$;
         create trigger refuse before insert on tollgate_state for each row when (new.limit_name = 'first')
           execute function refuse()",
    );
    let charges = || server.psql("select sum(b) from tollgate_state where limit_name = 'api'");
    for go_together in [false, true] {
        // All that is known of the server's clock came a second late, so calls of 1.5 s are late after half a second; the
        // server waits for a lock for 1.2 s.
        proxy.set(Mode::Latency(Duration::from_millis(1_000)));
        let store = PostgresStore::new(through(&proxy, Duration::from_millis(1_500), 1)).unwrap();
        store.charge(&[item(&hourly("other", 1), "k")], None).await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(6_000)).await;
        proxy.set(Mode::Pass);
        let stranger = super::connect_stranger(&server).await.unwrap();
        let last = "(select key from tollgate_state where limit_name = 'api' order by key desc limit 1)";
        let lock = format!("begin; select * from tollgate_state where key = {last} for update");
        stranger.batch_execute(&lock).await.unwrap();
        let unlock = async {
            tokio::time::sleep(Duration::from_millis(850)).await;
            stranger.batch_execute("commit").await.unwrap();
        };
        let before: u64 = charges().parse().unwrap();
        let answers = if go_together {
            let (first, other) = (hourly("first", 1_000), |key| (item(&limit, key), store.clone()));
            let charge =
                async |(item, store): (StoredCharge<'_>, PostgresStore)| store.charge(&[item], None).await;
            // The first goes by itself, and the others after it. It fails, for an answer would show the server's clock.
            let (alone, a, b, c, ()) = tokio::join!(
                charge((item(&first, "k"), store.clone())),
                charge(other("a")),
                charge(other("b")),
                charge(other("c")),
                unlock
            );
            assert_eq!(alone.unwrap_err().failure(), Some(Failure::Reply));
            vec![a.map(drop), b.map(drop), c.map(drop)]
        } else {
            let items = items(&limit, &keys, Cost::ONE);
            let (answers, ()) = tokio::join!(store.charge_each(&items), unlock);
            answers.into_iter().map(|answer| answer.map(drop)).collect()
        };
        // A statement of many waits for a lock for a while only; then those that need not wait are charged without it, and so show
        // the server's clock to the one that does.
        let errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        let charged = before + 3 - u64::try_from(errors.len()).unwrap();
        assert_eq!(charges().parse::<u64>().unwrap(), charged, "who was late, and nobody else: {errors:?}");
        assert!(errors.len() <= 1, "{errors:?}");
        for error in errors {
            // Late at the server, or not sent again because it would have been.
            assert!(matches!(error.failure(), Some(Failure::Late | Failure::Overloaded)), "{error}");
            assert!(!error.is_ambiguous(), "{error}");
        }
    }
}
