//! Behind pgbouncer in transaction mode, where two statements of one connection may meet two sessions of the server: everything
//! works, nothing of a session is relied upon, and nothing of one is left behind.

use std::time::Duration;

use tokio::task::JoinSet;
use tollgate_store::{ChargeId, Hold, Limit, Micros, Settled, Settlement, Store, StoreError, StoredLimit};
use tollgate_testkit::pgbouncer::Pgbouncer;
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, hourly, item, options};

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_works_behind_pgbouncer_in_transaction_mode() {
    let server = PostgresServer::start();
    let pooler = Pgbouncer::builder().setting("default_pool_size", "3").start(&server);
    // Two processes, as good as: each numbers its statements for itself.
    let stores =
        [connect(options(&pooler.url("postgres"))).await, connect(options(&pooler.url("postgres"))).await];
    let (api, log) = (
        hourly("api", 1_000_000),
        StoredLimit::new("log", Limit::sliding_window(10_000, Micros::from_secs(3_600)).unwrap()),
    );
    let mut callers = JoinSet::new();
    for caller in 0..12_usize {
        let (store, api, log) = (stores[caller % 2].clone(), api.clone(), log.clone());
        callers.spawn(async move {
            for round in 0..20 {
                assert!(store.charge(&[item(&api, "shared")], None).await?.allowed);
                assert!(store.charge(&[item(&log, "shared"), item(&api, "other")], None).await?.allowed);
                let held = hold();
                assert!(store.charge(&[item(&api, "held")], Some(held)).await?.allowed);
                store.peek(&[item(&log, "shared")]).await?;
                let settlement = if round % 2 == 0 { Settlement::Cancel } else { Settlement::Actual(1) };
                assert_eq!(store.settle(held.id, &settlement).await?, Settled::Done);
                store.refund(&[item(&api, "other")]).await?;
                let own = format!("own-{caller}");
                assert!(store.charge(&[item(&api, &own)], None).await?.allowed);
                assert!(store.forget(&api, &own).await?);
                for charged in store.charge_each(&[item(&api, "many-1"), item(&api, "many-2")]).await {
                    charged?;
                }
            }
            Ok::<(), StoreError>(())
        });
    }
    for done in callers.join_all().await {
        done.unwrap_or_else(|error| panic!("{error}; pgbouncer's log:\n{}", pooler.log()));
    }
    let used = async |limit: &StoredLimit, key: &str| {
        let most = tollgate_store::StoredCharge { cost: tollgate_store::Cost::MAX, ..item(limit, key) };
        stores[0].peek(&[most]).await.unwrap().outcomes[0].used()
    };
    assert_eq!(used(&api, "shared").await, 240);
    assert_eq!(used(&log, "shared").await, 240);
    assert_eq!(used(&api, "held").await, 120, "every other one was cancelled");
    assert_eq!(used(&api, "other").await, 0);
    assert_eq!(used(&api, "many-2").await, 240);
    stores[1].cleanup().await.unwrap();
    stores[1].migrate().await.unwrap();
    let warnings = stores[1].probe().await.unwrap();
    assert!(warnings.iter().any(|warning| warning.contains("pooler")), "{warnings:?}");
    assert_eq!(stores.map(|store| store.losses_possible()), [0, 0]);
}

/// What other programs find in the sessions that they get after us.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_session_is_left_behind() {
    let server = PostgresServer::start();
    let pooler = Pgbouncer::builder().setting("default_pool_size", "1").start(&server);
    let store = connect(options(&pooler.url("postgres"))).await;
    let api = hourly("api", 1_000);
    assert!(store.charge(&[item(&api, "k")], None).await.unwrap().allowed);
    assert!(store.charge(&[item(&api, "k")], Some(hold())).await.unwrap().allowed);
    store.cleanup().await.unwrap();
    store.probe().await.unwrap();
    let (client, connection) =
        tokio_postgres::connect(&pooler.url("postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let names = "lock_timeout statement_timeout synchronous_commit plan_cache_mode jit client_min_messages \
                 default_transaction_isolation";
    for name in names.split_whitespace() {
        let text = format!("select setting = reset_val, setting from pg_settings where name = '{name}'");
        let row = client.query_typed_one(&text, &[]).await.unwrap();
        assert!(row.get::<_, bool>(0), "{name} is {}", row.get::<_, String>(1));
    }
    let row = client.query_typed_one("select count(*) from pg_prepared_statements", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0, "prepared statements");
}

/// A pooler keeps our connections over a crash of the server, so no new connection tells of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_behind_a_pooler_is_counted() {
    let server = PostgresServer::start();
    let pooler = Pgbouncer::builder().setting("server_login_retry", "1").start(&server);
    let store = connect(options(&pooler.url("postgres"))).await;
    let api = hourly("api", 1_000_000);
    assert!(store.charge(&[item(&api, "k")], None).await.unwrap().allowed);
    assert_eq!(store.losses_possible(), 0);
    server.restart();
    let start = std::time::Instant::now();
    while store.losses_possible() == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "the crash is not noticed");
        let _ = store.charge(&[item(&api, "k")], None).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(store.losses_possible(), 1);
}
