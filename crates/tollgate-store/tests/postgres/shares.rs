//! Fair shares: whoever waits for a share of its own key or limit is nobody else's timeout, and a pool that cannot grow makes do
//! with the connections that it has.
//!
//! Time does not decide here: the rows of the attacker stay locked until the bystander was answered.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate_store::{
    ChargeId, Charged, Failure, Hold, Micros, PostgresOptions, PostgresStore, Settlement, Store, StoreError,
    StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, hourly, item, options};

/// More than a default pool has connections, several times over.
const ATTACKERS: usize = 48;

/// Far more than the bystander's calls take on a loaded machine. The attackers wait for a lock for most of it.
const DEADLINE: Duration = Duration::from_secs(20);

async fn store_on(server: &PostgresServer) -> PostgresStore {
    connect(PostgresOptions { timeout: DEADLINE, ..options(&server.url("postgres")) }).await
}

/// Locks the rows of a limit from another session, until it is dropped.
pub(crate) async fn lock(server: &PostgresServer, limit: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let rows = format!("begin; select * from tollgate_state where limit_name = '{limit}' for update");
    client.batch_execute(&rows).await.unwrap();
    client
}

/// Waits until so many calls wait for a lock.
async fn until_locked(server: &PostgresServer, calls: u32) {
    let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'";
    while server.psql(waiting).parse::<u32>().unwrap() < calls {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) }
}

/// Asks an exhausted key again and again while the attackers wait.
async fn bystander(store: &PostgresStore, limit: &StoredLimit) {
    for round in 0..20 {
        let plain = store.charge(&[item(limit, "bystander")], None).await;
        let reserved = store.charge(&[item(limit, "bystander")], Some(hold())).await;
        let peeked = store.peek(&[item(limit, "bystander")]).await;
        for answer in [plain, reserved, peeked] {
            let answer = answer.unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert!(!answer.allowed, "round {round}: the key is exhausted");
        }
    }
}

type Answers = JoinSet<Result<Charged, StoreError>>;

/// Whoever did not get its turn was not charged for it, or at least says so.
async fn end(attack: Answers) {
    for answer in attack.join_all().await {
        if let Err(error) = answer {
            assert!(matches!(error.failure(), Some(Failure::Overloaded | Failure::Timeout)), "{error}");
        }
    }
}

async fn attack(keys: usize, is_held: bool) {
    let server = PostgresServer::start();
    let store = store_on(&server).await;
    let (attacked, other) = (hourly("attacked", 1_000), hourly("other", 1));
    assert!(store.charge(&[item(&other, "bystander")], None).await.unwrap().allowed);
    for key in 0..keys {
        assert!(store.charge(&[item(&attacked, &format!("k{key}"))], None).await.unwrap().allowed);
    }
    let locked = lock(&server, "attacked").await;
    let mut answers = Answers::new();
    for number in 0..ATTACKERS {
        let (store, attacked) = (store.clone(), attacked.clone());
        answers.spawn(async move {
            let key = format!("k{}", number % keys);
            store.charge(&[item(&attacked, &key)], is_held.then(hold)).await
        });
    }
    // One key has a quarter of the eight connections, or one for reservations, which go together; one limit has three quarters.
    until_locked(
        &server,
        if keys > 1 {
            6
        } else if is_held {
            1
        } else {
            2
        },
    )
    .await;
    bystander(&store, &other).await;
    until_locked(&server, 1).await;
    drop(locked);
    end(answers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reservations_on_one_key_leave_connections_for_others() {
    attack(1, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_of_one_key_leave_connections_for_others() {
    attack(1, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reservations_under_one_limit_leave_connections_for_others() {
    attack(ATTACKERS, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_under_one_limit_leave_connections_for_others() {
    attack(ATTACKERS, false).await;
}

/// One key of a limit is attacked, and another key of the same limit is asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_under_attack_leaves_connections_for_others_of_its_limit() {
    let server = PostgresServer::start();
    let store = store_on(&server).await;
    let limit = hourly("api", 1);
    assert!(store.charge(&[item(&limit, "attacked")], None).await.unwrap().allowed);
    let locked = lock(&server, "api").await;
    assert!(store.charge(&[item(&limit, "bystander")], None).await.unwrap().allowed);
    for is_held in [true, false] {
        let mut answers = Answers::new();
        for _ in 0..ATTACKERS {
            let (store, limit) = (store.clone(), limit.clone());
            answers.spawn(async move { store.charge(&[item(&limit, "attacked")], is_held.then(hold)).await });
        }
        until_locked(&server, if is_held { 1 } else { 2 }).await;
        bystander(&store, &limit).await;
        until_locked(&server, 1).await;
        answers.abort_all();
        while answers.join_next().await.is_some() {}
    }
    drop(locked);
}

/// Settlements of one reservation, and of many that do not exist.
#[tokio::test(flavor = "multi_thread")]
async fn settlements_leave_connections_for_others() {
    let server = PostgresServer::start();
    let store = store_on(&server).await;
    let (attacked, other) = (hourly("attacked", 1_000), hourly("other", 1));
    assert!(store.charge(&[item(&other, "bystander")], None).await.unwrap().allowed);
    let mut holds = Vec::new();
    for key in 0..ATTACKERS {
        holds.push(hold());
        let key = format!("k{key}");
        assert!(store.charge(&[item(&attacked, &key)], Some(holds[holds.len() - 1])).await.unwrap().allowed);
    }
    let locked = lock(&server, "attacked").await;
    let mut answers = JoinSet::new();
    for hold in holds {
        let store = store.clone();
        answers.spawn(async move { store.settle(hold.id, &Settlement::Cancel).await });
    }
    until_locked(&server, 6).await;
    bystander(&store, &other).await;
    until_locked(&server, 1).await;
    drop(locked);
    for answer in answers.join_all().await {
        if let Err(error) = answer {
            assert!(matches!(error.failure(), Some(Failure::Overloaded | Failure::Timeout)), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_cannot_grow_waits_for_a_connection_of_its_own() {
    let few = PostgresServer::builder()
        .setting("max_connections", "6")
        .setting("superuser_reserved_connections", "0")
        .setting("max_wal_senders", "0");
    let server = few.start();
    let store = Arc::new(
        connect(PostgresOptions { timeout: Duration::from_secs(30), ..options(&server.url("postgres")) })
            .await,
    );
    let limits: Vec<StoredLimit> = (0..8).map(|limit| hourly(&format!("limit-{limit}"), 1_000)).collect();
    assert!(store.charge(&[item(&limits[0], "k")], None).await.unwrap().allowed);
    // Another program takes all that is left.
    let mut others = Vec::new();
    while let Ok((client, connection)) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await
    {
        tokio::spawn(connection);
        others.push(client);
        assert!(others.len() < 6, "the server has a limit");
    }
    for round in 0..5 {
        let mut answers = Answers::new();
        for number in 0..32 {
            let (store, limit) = (store.clone(), limits[number % limits.len()].clone());
            answers.spawn(async move {
                let key = format!("k{number}");
                store.charge(&[item(&limit, &key)], number.is_multiple_of(3).then(hold)).await
            });
        }
        for answer in answers.join_all().await {
            let answer = answer.unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert!(answer.allowed);
        }
    }
    // And grows again when there is room.
    drop(others);
    let start = std::time::Instant::now();
    while store.connections() < 2 {
        assert!(start.elapsed() < Duration::from_secs(20), "the pool does not grow again");
        let calls =
            limits.iter().map(|limit| async { store.charge(&[item(limit, "k")], Some(hold())).await });
        futures_util::future::join_all(calls).await;
    }
}

/// With no connection at all there is nothing to wait for.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_a_connection_says_so_at_once() {
    let few = PostgresServer::builder()
        .setting("max_connections", "3")
        .setting("superuser_reserved_connections", "0")
        .setting("max_wal_senders", "0");
    let server = few.start();
    let url = server.url("postgres");
    drop(connect(options(&url)).await);
    let mut others = Vec::new();
    while let Ok((client, connection)) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await {
        tokio::spawn(connection);
        others.push(client);
        assert!(others.len() < 4, "the server has a limit");
    }
    let store = PostgresStore::new(options(&url)).unwrap();
    let limit = hourly("api", 10);
    let most: Vec<StoredCharge<'_>> = vec![item(&limit, "k")];
    let answer = tokio::time::timeout(Duration::from_secs(8), store.charge(&most, None)).await;
    let error = answer.expect("before its deadline of 10 s").unwrap_err();
    assert_eq!(error.failure(), Some(Failure::Overloaded), "{error}");
    assert!(!error.is_ambiguous());
}
