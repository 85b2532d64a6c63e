//! Addresses, passwords, versions and settings: what a probe at start says about them.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::time::Duration;

use tollgate_store::{Failure, RedisOptions, RedisStore, Store, StoreError};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::all_of;
use crate::{beside_others, hourly, item, patient};

const CANARY: &str = "c4n4ry";

/// What a probe of these options says, or what is wrong with them before.
async fn probe(options: RedisOptions) -> Result<Vec<String>, StoreError> {
    Ok(RedisStore::new(options)?.probe().await?.warnings)
}

/// A probe fails, in this way, with these words, and with no secret.
async fn refused(options: RedisOptions, failure: Failure, words: &[&str]) {
    let error = probe(options).await.expect_err("a failure");
    assert_eq!(error.failure(), Some(failure), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is not in {error:?}");
    }
    assert!(!error.is_ambiguous(), "{error:?}");
    assert!(!all_of(&error).contains(CANARY), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_that_will_not_do_are_refused_at_once() {
    for (url, words) in [
        (format!("http://u:{CANARY}@127.0.0.1:1"), "must begin with redis://"),
        (format!("unix:///tmp/x?pass={CANARY}"), "must begin with redis://"),
        (format!("REDIS//{CANARY}@x"), "must begin with redis://"),
        (format!("redis://:{CANARY}@127.0.0.1:99999"), "is not of the form"),
        (format!("redis://:{CANARY}@127.0.0.1:port"), "is not of the form"),
        (format!("redis://:{CANARY}@127.0.0.1:6379/notadb"), "is not of the form"),
        (format!("redis://:{CANARY}@"), "is not of the form"),
        (format!("rediss://:{CANARY}@127.0.0.1:6379/#insecure"), "remove #insecure"),
        // Where a password begins and ends cannot always be said, so then nothing is shown.
        (format!("http://host/?password=x@{CANARY}"), "must begin with redis://"),
        (format!("http://:{CANARY}?{CANARY}#{CANARY}@{CANARY}@host"), "must begin with redis://"),
    ] {
        refused(RedisOptions::new(url), Failure::Refused, &[words]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_not_there_is_named() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let port = server.port();
    drop(server);
    let mut options = patient(RedisOptions::new(format!("redis://:{CANARY}@127.0.0.1:{port}")));
    options.timeout = Duration::from_millis(100);
    let place = format!("127.0.0.1:{port}");
    refused(options, Failure::Connection, &["could not connect", &place, "refused the connection"]).await;
    let mut options = patient(RedisOptions::new("redis://no-such-host.invalid"));
    options.timeout = Duration::from_millis(500);
    let error = probe(options).await.expect_err("a failure");
    // Where there is no name server at all, finding that out can take longer than the probe.
    assert!(matches!(error.failure(), Some(Failure::Connection | Failure::Timeout)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_passwords_and_users_are_refused_without_being_told() {
    let _turn = beside_others().await;
    let server = RedisServer::builder().password("right").start();
    let with = |username: Option<&str>, password: Option<&str>| {
        let mut options = patient(RedisOptions::new(server.url()));
        (options.username, options.password) = (username.map(Into::into), password.map(Into::into));
        options
    };
    let words = ["refused the user or the password"];
    refused(with(None, Some(CANARY)), Failure::Refused, &words).await;
    refused(with(Some(CANARY), Some("right")), Failure::Refused, &words).await;
    refused(with(None, None), Failure::Refused, &words).await;
    let url = server.url().replace("redis://", &format!("redis://:{CANARY}@"));
    refused(patient(RedisOptions::new(url.clone())), Failure::Refused, &words).await;
    assert_eq!(probe(with(None, Some("right"))).await.expect("the right password"), [""; 0]);
    // A call says the same as the probe, and quickly; what is shown of a store holds no password either.
    let store = RedisStore::new(with(None, Some(CANARY))).expect("sound options");
    let error = store.charge(&[item(&hourly("api", 1), "k")], None).await.expect_err("refused");
    assert_eq!(error.failure(), Some(Failure::Refused));
    assert!(!all_of(&error).contains(CANARY) && !format!("{store:?}").contains(CANARY));
    let store = RedisStore::new(patient(RedisOptions::new(url))).expect("sound options");
    assert!(!format!("{store:?}").contains(CANARY) && format!("{store:?}").contains("127.0.0.1"));
}

/// A server that says to be of this version, and answers everything else with OK, or what keeps a client content.
fn impostor(version: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let (mut reader, mut writer) =
                    (BufReader::new(stream.try_clone().expect("a stream")), stream);
                while let Some(words) = request(&mut reader) {
                    let info = format!("redis_version:{version}\r\ncluster_enabled:0\r\nrole:master\r\n");
                    let answer = match words[0].to_uppercase().as_str() {
                        "INFO" => format!("${}\r\n{info}\r\n", info.len()),
                        "TIME" => "*2\r\n$1\r\n1\r\n$1\r\n0\r\n".to_owned(),
                        "EVALSHA" => ":0\r\n".to_owned(),
                        "SCRIPT" => "$1\r\nx\r\n".to_owned(),
                        _ => "+OK\r\n".to_owned(),
                    };
                    if writer.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn request(reader: &mut impl BufRead) -> Option<Vec<String>> {
    let mut line = |sign: char| -> Option<usize> {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        line.trim_end().strip_prefix(sign)?.parse().ok()
    };
    let count = line('*')?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut head = String::new();
        reader.read_line(&mut head).ok()?;
        let length: usize = head.trim_end().strip_prefix('$')?.parse().ok()?;
        let mut word = vec![0; length + 2];
        reader.read_exact(&mut word).ok()?;
        words.push(String::from_utf8_lossy(&word[..length]).into_owned());
    }
    Some(words)
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_are_too_old_are_refused() {
    let _turn = beside_others().await;
    for (version, is_old) in [("6.0.9", true), ("5.0.14", true), ("6.2.0", false), ("8.0.1", false)] {
        let port = impostor(version);
        let options = patient(RedisOptions::new(format!("redis://127.0.0.1:{port}")));
        if is_old {
            let place = format!("Redis {version} at 127.0.0.1:{port} is too old");
            refused(options, Failure::Refused, &[&place, "6.2 is needed"]).await;
        } else {
            // It cannot charge, but that is another matter.
            let said = probe(options).await.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(!said.contains("too old"), "{version}: {said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_and_a_server_are_not_taken_for_each_other() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    for node in &cluster.urls()[..2] {
        let place = node.replace("redis://", "");
        refused(
            patient(RedisOptions::new(node.clone())),
            Failure::Refused,
            &[&place, "is a cluster's server and was said not to be one", "`cluster`"],
        )
        .await;
    }
    let single = RedisServer::start();
    let place = single.url().replace("redis://", "");
    refused(
        patient(RedisOptions::cluster([single.url()])),
        Failure::Refused,
        &[&place, "is not a cluster's server and was said to be one", "`cluster`"],
    )
    .await;
    // One seed is enough, and a replica will do as one.
    for seed in [&cluster.urls()[0], &cluster.urls()[5]] {
        let warnings = probe(patient(RedisOptions::cluster([seed.clone()]))).await.expect("a sound cluster");
        assert_eq!(warnings.len(), 3, "each primary has replicas that it does not wait for: {warnings:?}");
        assert!(warnings.iter().all(|warning| warning.contains("min-replicas-to-write is 0")));
    }
    // A charge to the wrong kind of server says what is wrong too.
    let store =
        RedisStore::new(patient(RedisOptions::new(cluster.urls()[0].clone()))).expect("sound options");
    let limit = hourly("api", 100);
    let mut failed = 0;
    for key in 0..20 {
        if let Err(error) = store.charge(&[item(&limit, &key.to_string())], None).await {
            assert!(error.to_string().contains("is this a cluster"), "{error}");
            assert!(!error.is_ambiguous());
            failed += 1;
        }
    }
    assert!(failed > 0, "twenty keys on one of three servers");
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_will_hurt_are_warned_of() {
    let _turn = beside_others().await;
    let server = RedisServer::builder().arguments(["--maxmemory-policy", "volatile-ttl"]).start();
    let place = server.url().replace("redis://", "");
    let warnings = probe(patient(RedisOptions::new(server.url()))).await.expect("it works");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for word in [&place, "maxmemory-policy is volatile-ttl", "noeviction"] {
        assert!(warnings[0].contains(word), "{warnings:?}");
    }
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).expect("config");
    assert_eq!(probe(patient(RedisOptions::new(server.url()))).await.expect("it works"), [""; 0]);
    let replica =
        RedisServer::builder().arguments(["--replicaof", &format!("127.0.0.1 {}", server.port())]).start();
    let start = std::time::Instant::now();
    while server.info("replication", "connected_slaves").as_deref() != Some("1")
        || replica.info("replication", "master_link_status").as_deref() != Some("up")
    {
        assert!(start.elapsed() < Duration::from_secs(20), "the replica does not connect");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let warnings = probe(patient(RedisOptions::new(server.url()))).await.expect("it works");
    assert!(warnings.len() == 1 && warnings[0].contains("min-replicas-to-write is 0"), "{warnings:?}");
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).expect("config");
    while server.info("replication", "min_slaves_good_slaves").as_deref() != Some("1") {
        assert!(start.elapsed() < Duration::from_secs(20), "the replica does not answer");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(probe(patient(RedisOptions::new(server.url()))).await.expect("it works"), [""; 0]);
    // The replica itself cannot decide anything.
    let place = replica.url().replace("redis://", "");
    refused(
        patient(RedisOptions::new(replica.url())),
        Failure::NotReady,
        &[&place, "is a replica", "give the primary's address"],
    )
    .await;
    // A primary that has lost its replicas says so, and was not written to.
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "2"]).expect("config");
    let store = RedisStore::new(patient(RedisOptions::new(server.url()))).expect("sound options");
    let error = store.charge(&[item(&hourly("api", 1), "k")], None).await.expect_err("too few replicas");
    assert_eq!(error.failure(), Some(Failure::NotReady));
    assert!(error.to_string().contains("min-replicas-to-write") && !error.is_ambiguous(), "{error}");
}
