//! TLS: the right authority works, with and without a certificate of our own; everything else is refused with the reason.

use std::path::PathBuf;
use std::time::Duration;

use tollgate_store::{Failure, RedisOptions, RedisStore, Store, StoreError};
use tollgate_testkit::redis::{RedisCluster, RedisServer};
use tollgate_testkit::tls::Certificates;

use crate::{beside_others, hourly, item, patient};

async fn charge(options: RedisOptions) -> Result<bool, StoreError> {
    let store = RedisStore::new(options)?;
    store.probe().await?;
    Ok(store.charge(&[item(&hourly("api", 9), "k")], None).await?.allowed)
}

fn options(server: &RedisServer, change: impl FnOnce(&mut RedisOptions)) -> RedisOptions {
    let mut options = patient(RedisOptions::new(server.tls_url()));
    options.timeout = Duration::from_secs(2);
    change(&mut options);
    options
}

async fn refused(options: RedisOptions, words: &[&str]) {
    is_refusal(&charge(options).await.expect_err("refused"), words);
}

/// A server that misses a certificate says so after our side of the handshake is done, and hangs up: what we sent
/// meanwhile may meet the hang-up before its word is read. Then the connection broke, and nothing worse; the reason is
/// told by one of the next tries.
async fn refused_in_the_end(options: &RedisOptions, words: &[&str]) {
    for _ in 0..100 {
        let error = charge(options.clone()).await.expect_err("refused");
        if error.failure() != Some(Failure::Connection) {
            return is_refusal(&error, words);
        }
        assert!(error.to_string().contains("could not connect") && !error.is_ambiguous(), "{error:?}");
    }
    panic!("100 tries, and never the reason");
}

fn is_refusal(error: &StoreError, words: &[&str]) {
    assert_eq!(error.failure(), Some(Failure::Refused), "{error:?}");
    for word in words {
        assert!(
            error.to_string().to_lowercase().contains(&word.to_lowercase()),
            "{word:?} is not in {error}"
        );
    }
    assert!(!error.is_ambiguous(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_certificate_is_verified() {
    let _turn = beside_others().await;
    let certificates = Certificates::generate();
    let server = RedisServer::builder().tls(&certificates).start();
    let right = options(&server, |options| options.ca_file = Some(certificates.authority()));
    assert!(charge(right).await.expect("the right authority"));
    // By its number as well as by its name: both are in the certificate.
    let by_number = options(&server, |options| {
        options.urls = vec![options.urls[0].replace("localhost", "127.0.0.1")];
        options.ca_file = Some(certificates.authority());
    });
    assert!(charge(by_number).await.expect("the right authority"));
    let place = server.tls_url().replace("rediss://", "");
    let unrelated = options(&server, |options| options.ca_file = Some(certificates.other_authority()));
    refused(unrelated, &["could not connect", &place, "TLS failed", "certificate"]).await;
    // The machine's own authorities do not know it.
    refused(options(&server, |_| {}), &["TLS failed", "certificate"]).await;
    // A file that is no certificate, or none at all.
    let no_certificate = options(&server, |options| options.ca_file = Some(certificates.server_key()));
    refused(no_certificate, &["certificate"]).await;
    refused(
        options(&server, |options| options.ca_file = Some("/nowhere/ca.pem".into())),
        &["/nowhere/ca.pem"],
    )
    .await;
    // A server without TLS, spoken to in TLS.
    let plain = options(&server, |options| {
        options.urls = vec![server.url().replace("redis://", "rediss://")];
        options.ca_file = Some(certificates.authority());
    });
    let error = charge(plain).await.expect_err("no TLS there");
    assert!(!error.is_ambiguous() && error.to_string().contains("could not connect"), "{error}");
    // A server with TLS, spoken to without.
    let mut naked = patient(RedisOptions::new(server.tls_url().replace("rediss://", "redis://")));
    naked.timeout = Duration::from_millis(500);
    let error = charge(naked).await.expect_err("TLS there");
    assert!(!error.is_ambiguous(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_our_own_is_given_where_it_is_asked_for() {
    let _turn = beside_others().await;
    let certificates = Certificates::generate();
    let server = RedisServer::builder().tls(&certificates).arguments(["--tls-auth-clients", "yes"]).start();
    let with = options(&server, |options| {
        options.ca_file = Some(certificates.authority());
        options.cert_file = Some(certificates.client_certificate());
        options.key_file = Some(certificates.client_key());
    });
    assert!(charge(with).await.expect("our certificate"));
    let without = options(&server, |options| options.ca_file = Some(certificates.authority()));
    refused_in_the_end(&without, &["could not connect", "TLS failed", "certificate"]).await;
    let swapped = options(&server, |options| {
        options.ca_file = Some(certificates.authority());
        options.cert_file = Some(certificates.client_key());
        options.key_file = Some(certificates.client_certificate());
    });
    refused(swapped, &[]).await;
}

/// How many clients are connected to a node's TLS port, and how many to its plain one.
fn clients(node: &RedisServer) -> (usize, usize) {
    let list = node.command(&["CLIENT", "LIST"]).expect("the clients").text();
    let count = |port: Option<u16>| {
        let address = port.map(|port| format!(" laddr=127.0.0.1:{port} ")).unwrap_or_default();
        list.lines().filter(|line| line.contains(&address) && !line.contains(" flags=S ")).count()
    };
    (count(node.tls_port()), count(Some(node.port())))
}

/// Every node is reached by TLS and with the password, those included that only the cluster told of, before and after a fail-over.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_by_tls_and_with_a_password() {
    let _turn = beside_others().await;
    let certificates = Certificates::generate();
    let builder = RedisServer::builder().tls(&certificates).password("right");
    let cluster = RedisCluster::start_from(builder, false);
    // One address alone: the other nodes are found by asking it.
    let with = |password: &str, authority: PathBuf| {
        let url = cluster.tls_urls()[0].replace("rediss://", &format!("rediss://{password}"));
        let mut options = patient(RedisOptions::cluster([url]));
        options.ca_file = Some(authority);
        options
    };
    let store = RedisStore::new(with(":right@", certificates.authority())).expect("sound options");
    store.probe().await.expect("the right authority and the right password");
    let limit = hourly("api", 2);
    let charge_all = async |expected: bool| {
        for number in 0..60 {
            let key = format!("k{number}");
            let charged = store.charge(&[item(&limit, &key)], None).await.expect("a charge");
            assert_eq!(charged.allowed, expected, "{key}");
        }
    };
    charge_all(true).await;
    for node in &cluster.nodes()[..3] {
        let (by_tls, plain) = clients(node);
        assert!(by_tls > 0 && plain == 1, "{by_tls} by TLS, and {plain} in the clear, of which one is ours");
    }
    let primary = cluster.primary_of(0).expect("a primary");
    cluster.failover(cluster.replica_of(primary).expect("a replica"));
    charge_all(true).await;
    charge_all(false).await;
    for (password, authority, words) in [
        (":wrong@", certificates.authority(), "refused the user or the password"),
        ("", certificates.authority(), "password"),
        (":right@", certificates.other_authority(), "TLS failed"),
    ] {
        let mut options = with(password, authority);
        options.timeout = Duration::from_secs(2);
        refused(options, &[words]).await;
    }
}
