//! Setups that cannot work are refused with a message that says what to do.

use tollgate_store::{Failure, PostgresOptions, PostgresStore, PostgresTls, Store, StoreError};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::tls::Certificates;

use crate::{connect, hourly, item, options, start};

/// That an attempt is refused, in this way and with these words, and without the password.
fn check<T>(result: Result<T, StoreError>, failure: Failure, words: &[&str]) {
    let Err(error) = result else { panic!("was not refused: {words:?}") };
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text += &format!(" / {inner}");
        cause = inner.source();
    }
    assert_eq!(error.failure(), Some(failure), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert!(!text.contains("toll-gate") && !text.contains("wrong-password"), "a password in: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_place_or_password_is_named() {
    let server = PostgresServer::builder().scram().start();
    let url = server.url("postgres");
    drop(connect(options(&url)).await);
    let bare = format!("postgres://postgres@127.0.0.1:{}/postgres", server.port());
    let with_password =
        |password: &str| PostgresOptions { password: Some(password.into()), ..options(&bare) };
    drop(connect(with_password(PostgresServer::PASSWORD)).await);
    let refused = |options| async { PostgresStore::connect(options).await };
    check(refused(with_password("wrong-password")).await, Failure::Refused, &["connecting", "password"]);
    check(refused(options(&bare)).await, Failure::Refused, &["password"]);
    check(refused(options(&server.url("nowhere"))).await, Failure::Refused, &["nowhere"]);
    let free = tollgate_testkit::free_port();
    let nobody = format!("postgres://postgres:toll-gate@127.0.0.1:{free}/postgres");
    check(refused(options(&nobody)).await, Failure::Connection, &["connecting", &free.to_string()]);
    let unknown = options("postgres://postgres@no-such-host.invalid/postgres");
    check(refused(unknown).await, Failure::Connection, &["no-such-host.invalid"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_always_verified() {
    let certificates = Certificates::generate();
    let access =
        "host all postgres 127.0.0.1/32 trust\nhostssl all app 127.0.0.1/32 trust clientcert=verify-ca\n";
    let server = PostgresServer::builder().tls(&certificates).access(access).start();
    let url = |host: &str, user: &str, query: &str| {
        format!("postgres://{user}@{host}:{}/postgres{query}", server.port())
    };
    let trusting = |ca| PostgresTls { ca_file: Some(ca), ..PostgresTls::default() };
    let with = |url: String, tls| PostgresOptions { tls, ..options(&url) };
    let ca = || trusting(certificates.authority());
    server.psql("create role app login; grant create on schema public to app");

    let store = connect(with(url("localhost", "postgres", ""), ca())).await;
    assert!(store.charge(&[item(&hourly("api", 5), "k")], None).await.unwrap().allowed);
    let plain = "select count(*) from pg_stat_ssl join pg_stat_activity using (pid) where not ssl and application_name = 'tollgate'";
    assert_eq!(server.psql(plain), "0", "every connection is encrypted");
    assert_ne!(server.psql(&plain.replace("not ssl", "ssl")), "0");

    let refused = |options| async { PostgresStore::connect(options).await };
    let other = trusting(certificates.other_authority());
    check(refused(with(url("localhost", "postgres", ""), other)).await, Failure::Refused, &["certificate"]);
    let machine = with(url("localhost", "postgres", "?sslmode=require"), PostgresTls::default());
    let unknown = refused(machine).await.unwrap_err();
    assert_eq!(unknown.failure(), Some(Failure::Refused), "{unknown}");
    // 127.0.0.2 is the same server under a name that its certificate does not hold, if it listened there; a name that is not
    // in the certificate is refused before anything is sent.
    let missing = trusting("/nowhere/ca.pem".into());
    check(
        refused(with(url("localhost", "postgres", ""), missing)).await,
        Failure::Refused,
        &["/nowhere/ca.pem"],
    );
    let empty = trusting(certificates.server_key());
    check(
        refused(with(url("localhost", "postgres", ""), empty)).await,
        Failure::Refused,
        &["no certificate"],
    );

    check(refused(with(url("localhost", "app", ""), ca())).await, Failure::Refused, &["certificate"]);
    let shown = PostgresTls {
        client_cert_file: Some(certificates.client_certificate()),
        client_key_file: Some(certificates.client_key()),
        ..ca()
    };
    let named = PostgresOptions { prefix: "app_".into(), ..with(url("localhost", "app", ""), shown) };
    assert!(connect(named).await.charge(&[item(&hourly("api", 5), "k")], None).await.unwrap().allowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_refused_by_who_asks_for_it() {
    let server = PostgresServer::start();
    let certificates = Certificates::generate();
    let tls = PostgresTls { ca_file: Some(certificates.authority()), ..PostgresTls::default() };
    let asking = PostgresOptions { tls, ..options(&server.url("postgres")) };
    check(PostgresStore::connect(asking).await, Failure::Refused, &["TLS"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_is_not_ours_is_refused() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let fresh = || PostgresStore::new(options(&url)).unwrap();
    let limit = hourly("api", 5);

    // None yet.
    check(fresh().probe().await, Failure::Refused, &["no schema", "tollgate_", "migrate"]);
    check(fresh().charge(&[item(&limit, "k")], None).await, Failure::Refused, &["migrate"]);
    // Two at once, and then again: the second finds nothing to do.
    let (one, two) = (fresh(), fresh());
    let (one, two) = tokio::join!(one.migrate(), two.migrate());
    one.and(two).unwrap();
    fresh().migrate().await.unwrap();
    assert_eq!(fresh().probe().await.unwrap(), Vec::<String>::new());
    assert!(fresh().charge(&[item(&limit, "k")], None).await.unwrap().allowed);

    // Functions of another build of the same version are made afresh.
    server.psql("update tollgate_schema set functions = 'other'; drop function tollgate_cleanup");
    check(fresh().probe().await, Failure::Refused, &["half there", "function tollgate_cleanup"]);
    fresh().migrate().await.unwrap();
    assert!(fresh().probe().await.is_ok());

    // A newer Tollgate was here.
    server.psql("update tollgate_schema set version = 99");
    check(fresh().probe().await, Failure::Refused, &["version 99", "upgrade this one"]);
    check(fresh().migrate().await, Failure::Refused, &["version 99"]);
    // An older one.
    server.psql("update tollgate_schema set version = 0");
    check(fresh().probe().await, Failure::Refused, &["version 0", "run migrate"]);
    check(fresh().migrate().await, Failure::Refused, &["half there"]);
    // Something is missing.
    server.psql("update tollgate_schema set version = 5; drop table tollgate_execution");
    check(fresh().probe().await, Failure::Refused, &["half there", "tollgate_execution"]);
    server.psql("delete from tollgate_schema");
    check(fresh().probe().await, Failure::Refused, &["half there", "no version"]);
    check(fresh().migrate().await, Failure::Refused, &["half there"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_are_named() {
    let (server, _store) = start().await;
    server.psql("create role app login");
    let url = format!("postgres://app@127.0.0.1:{}/postgres", server.port());
    let app = || PostgresStore::new(options(&url)).unwrap();
    check(app().migrate().await, Failure::Refused, &["permission denied", "tollgate_schema"]);
    server.psql("grant select on tollgate_schema to app");
    app().migrate().await.unwrap_or_else(|error| panic!("there is nothing to do: {error}"));
    check(app().probe().await, Failure::Refused, &["user app lacks", "tollgate_state", "DELETE", "grant"]);
    let limit = hourly("api", 5);
    check(
        app().charge(&[item(&limit, "k")], None).await,
        Failure::Refused,
        &["permission denied", "tollgate_life"],
    );
    server.psql("grant select, insert, update, delete on tollgate_life to app");
    check(
        app().charge(&[item(&limit, "k")], None).await,
        Failure::Refused,
        &["permission denied", "tollgate_state"],
    );
    server.psql("grant select, insert, update, delete on all tables in schema public to app");
    assert!(app().probe().await.is_ok());
    assert!(app().charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    server.psql("revoke execute on all functions in schema public from public");
    check(app().probe().await, Failure::Refused, &["user app lacks EXECUTE", "function tollgate_"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dangerous_settings_are_told_and_a_standby_is_refused() {
    let risky =
        [("fsync", "off"), ("full_page_writes", "off"), ("default_transaction_isolation", "serializable")];
    let builder =
        risky.iter().fold(PostgresServer::builder(), |builder, (name, value)| builder.setting(name, value));
    let server = builder.start();
    let store = connect(options(&server.url("postgres"))).await;
    let warnings = store.probe().await.unwrap();
    for (name, value) in risky {
        assert!(
            warnings.iter().any(|said| said.contains(name) && said.contains(value)),
            "{name}: {warnings:?}"
        );
    }
    // Our sessions are read committed all the same.
    assert!(store.charge(&[item(&hourly("api", 5), "k")], None).await.unwrap().allowed);
    server.psql("alter system set default_transaction_read_only = on");
    server.psql("select pg_reload_conf()");
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let fresh = PostgresStore::new(options(&server.url("postgres"))).unwrap();
    check(fresh.probe().await, Failure::NotReady, &["takes no writes"]);
    check(fresh.charge(&[item(&hourly("api", 5), "k")], None).await, Failure::NotReady, &["read-only"]);
}
