//! A cap on keys: near it no key is begun under numbers that come with the call, and everybody else is charged as ever.

use std::time::{Duration, Instant};

use tollgate_store::{
    ChargeId, Failure, Hold, Limit, Micros, PostgresOptions, PostgresStore, Scope, Store, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, item, options};

/// PostgreSQL reports what a session inserted when that session has been idle for ten seconds, or sooner; this is long enough
/// for a loaded machine.
const NOTICED_WITHIN: Duration = Duration::from_secs(60);

/// Calls until a condition holds.
async fn until(store: &PostgresStore, limit: &StoredLimit, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < NOTICED_WITHIN, "not noticed: {what}");
        assert!(store.charge(&[item(limit, "k")], None).await.is_ok());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn limits() -> (StoredLimit, StoredLimit) {
    let limit = Limit::token_bucket("1/h", 1_000_000).expect("a limit");
    (StoredLimit::new("api", limit), StoredLimit::new("cl", limit.keeping_instant()))
}

/// One connection sent tens of thousands of `CL.THROTTLE` with invented keys and a period of a year, and the database grew by all
/// of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_database_begins_no_key_under_numbers_that_come_with_the_call() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let store = connect(PostgresOptions { max_keys: Some(50), ..options(&url) }).await;
    let (ordinary, with_the_call) = limits();
    for number in 0..60 {
        let key = format!("invented:{number}");
        assert!(store.charge(&[item(&with_the_call, &key)], None).await.expect("room").allowed);
    }
    until(&store, &ordinary, "that it is full", || !store.takes_new_keys()).await;
    let rows = || server.psql("select count(*) from tollgate_state");
    let before = rows();

    // Alone, several at once, with another limit, held: no new key is begun, and that is evidence of nothing else.
    let new = item(&with_the_call, "invented:new");
    let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
    let refused = [
        store.charge(&[new], None).await.expect_err("no room"),
        store.charge(&[item(&ordinary, "k"), new], None).await.expect_err("no room"),
        store.charge(&[new], Some(hold)).await.expect_err("no room"),
        {
            let each = store.charge_each(&[item(&with_the_call, "invented:1"), new]).await;
            let [known, new] = each.try_into().expect("two answers");
            assert!(known.expect("a known key").allowed);
            new.expect_err("no room")
        },
    ];
    for error in refused {
        assert!(error.failure() == Some(Failure::Full) && error.scope() == Scope::Call, "{error}");
        assert!(!error.is_ambiguous(), "{error}");
    }
    let many = (0..64).map(|number| {
        let (store, limit) = (store.clone(), with_the_call.clone());
        async move { store.charge(&[item(&limit, &format!("invented:{number}"))], None).await }
    });
    let many = futures_util::future::join_all(many).await;
    assert!(many[..60].iter().all(|charged| charged.as_ref().is_ok_and(|charged| charged.allowed)));
    assert!(many[60..].iter().all(Result::is_err), "four of them are new");
    assert_eq!(rows(), before);

    // What is known goes on, and so does everybody under numbers of the configuration.
    let known = store.charge(&[item(&with_the_call, "invented:0")], None).await.expect("known");
    assert_eq!((known.allowed, known.outcomes[0].remaining), (true, 999_997));
    assert!(store.charge(&[item(&ordinary, "user:new")], None).await.expect("room").allowed);
    assert!(store.peek(&[new]).await.expect("a look makes nothing").allowed);

    // There is room again once enough has gone and the server knows it.
    server.psql("delete from tollgate_state where limit_name = 'cl'");
    server.psql("vacuum analyze tollgate_state");
    until(&store, &ordinary, "that there is room", || store.takes_new_keys()).await;
    assert!(store.charge(&[new], None).await.expect("room").allowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cap_every_key_is_welcome() {
    let (_server, store) = crate::start().await;
    let (_, with_the_call) = limits();
    for number in 0..60 {
        let key = format!("invented:{number}");
        assert!(store.charge(&[item(&with_the_call, &key)], None).await.expect("room").allowed);
    }
    assert!(store.takes_new_keys());
}
