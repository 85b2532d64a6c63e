//! The rights that the store needs, no more and no fewer, and what it says when one is missing.

use std::time::{Duration, Instant};

use tollgate_store::{
    ChargeId, Failure, Hold, Limit, Micros, Record, RecordKind, RedisOptions, RedisStore, Settlement, Store,
    StoreError, StoredCharge, StoredLimit,
};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::all_of;
use crate::{PATIENCE, beside_others, costing, hourly, item, one_of_each, patient};

/// The ACL rule of docs/operations.md, as it is after the user's name and password.
const RULE: &str = "~tollgate:* +evalsha +script|load +time +get +set +setrange +del +pttl +pexpireat \
     +hget +hset +hdel +lrange +zrange";

/// What a cluster needs besides.
const CLUSTER_RULE: &str = "+cluster|slots +asking";

/// What a probe would like to ask besides; without it, it says that it could not look.
const PROBE_RULE: &str = "+info +config|get";

/// What records need besides.
const RECORDS_RULE: &str =
    "+eval +hgetall +hlen +hexists +zadd +zrem +zcard +zscore +zrange +zrangebyscore +persist";

fn options(server: &RedisServer) -> RedisOptions {
    let mut options = patient(RedisOptions::new(server.url()));
    "tollgate:".clone_into(&mut options.prefix);
    (options.username, options.password) = (Some("tollgate".to_owned()), Some("secret".to_owned()));
    options
}

/// Gives the user these rights and no others.
fn grant(server: &RedisServer, rule: &str) {
    let mut words = vec!["ACL", "SETUSER", "tollgate", "reset", "on", ">secret"];
    words.extend(rule.split_whitespace());
    server.command(&words).unwrap_or_else(|error| panic!("{rule}: {error}"));
}

/// Everything that the store can be asked, in every way that uses another command.
async fn everything(store: &RedisStore, servers: &[RedisServer]) -> Result<(), StoreError> {
    let hold = || Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
    for limit in one_of_each(9) {
        let charge =
            async |cost: u64, hold: Option<Hold>| store.charge(&[costing(&limit, "k", cost)], hold).await;
        let settle = async |id: ChargeId, settlement: Settlement| store.settle(id, &settlement).await;
        let [one, two, three] = [hold(), hold(), hold()];
        charge(1, None).await?;
        charge(1, None).await?;
        charge(2, Some(one)).await?;
        charge(2, Some(two)).await?;
        charge(1, Some(three)).await?;
        charge(9, None).await?;
        store.peek(&[costing(&limit, "k", 1)]).await?;
        settle(one.id, Settlement::Actual(1)).await?;
        settle(two.id, Settlement::Cancel).await?;
        settle(three.id, Settlement::Renew).await?;
        settle(three.id, Settlement::Actual(2)).await?;
        store.forget(&limit, "k").await?;
    }
    // More than fits a single block, and what goes of it.
    let sound = |limit: Result<Limit, _>| limit.expect("a sound limit");
    let large = StoredLimit::new("large", sound(Limit::sliding_window(1_000, Micros::from_secs(3_600))));
    for _ in 0..300 {
        store.charge(&[costing(&large, "k", 1)], None).await?;
    }
    store.refund(&[costing(&large, "k", 60)]).await?;
    store.forget(&large, "k").await?;
    // What the format before this one kept as a list and as a sorted set.
    let old: [(Limit, &[&str]); 2] = [
        (sound(Limit::sliding_window(9, Micros::from_secs(3_600))), &["RPUSH", "", "1", "1", "1"]),
        (sound(Limit::concurrency(9, Micros::from_secs(3_600))), &["ZADD", "", "-2", "=", "1", "@1:1"]),
    ];
    for (limit, kept) in old {
        let limit = StoredLimit::new("old", limit);
        store.charge(&[costing(&limit, "k", 1)], None).await?;
        for server in servers {
            for key in crate::keys(server, "tollgate:").iter().filter(|key| key.ends_with(":old")) {
                let mut words = kept.to_vec();
                words[1] = key;
                // Not on a replica.
                if server.command(&["DEL", key]).is_ok() {
                    server.command(&words).expect("what format 1 kept");
                }
            }
        }
        store.peek(&[costing(&limit, "k", 1)]).await?;
        store.forget(&limit, "k").await?;
    }
    let several: Vec<StoredLimit> = one_of_each(9);
    let items: Vec<StoredCharge<'_>> = several.iter().map(|limit| costing(limit, "several", 1)).collect();
    store.charge(&items, Some(hold())).await?;
    Ok(())
}

/// All that is done with records, in every way that uses another command.
async fn all_of_records(store: &RedisStore) -> Result<(), StoreError> {
    let kind = RecordKind::Override;
    let record = |id: &str, ends: Option<Micros>| Record { id: id.to_owned(), payload: "x".to_owned(), ends };
    let now = store.records(kind, None).await?.now;
    store.put_record(kind, &record("past", Some(now))).await?;
    store.put_record(kind, &record("ends", Some(now.saturating_add(Micros::from_secs(60))))).await?;
    store.put_record(kind, &record("stays", None)).await?;
    store.records(kind, None).await?;
    store.remove_record(kind, "stays").await?;
    store.remove_record(kind, "ends").await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_of_records_are_enough_and_none_is_too_many() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = RedisStore::new(options(&server)).expect("sound options");
    grant(&server, &format!("{RULE} {RECORDS_RULE}"));
    all_of_records(&store).await.unwrap_or_else(|error| panic!("{error}: {:?}", all_of(&error)));
    for right in RECORDS_RULE.split_whitespace() {
        server.command(&["FLUSHALL"]).expect("a fresh start");
        // The right to read what versions before format 2 kept is one of these too.
        let words = RULE.split_whitespace().chain(RECORDS_RULE.split_whitespace());
        let others: Vec<&str> = words.filter(|word| *word != right).collect();
        grant(&server, &others.join(" "));
        let refused = all_of_records(&store).await;
        assert!(refused.is_err(), "{right} is not needed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough_and_none_is_too_many() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let servers = std::slice::from_ref(&server);
    grant(&server, RULE);
    let store = RedisStore::new(options(&server)).expect("sound options");
    everything(&store, servers).await.unwrap_or_else(|error| panic!("{error}: {:?}", all_of(&error)));
    let report = store.probe().await.expect("a probe");
    assert!(report.warnings.len() == 1 && report.warnings[0].contains("may not ask INFO"), "{report:?}");
    grant(&server, &format!("{RULE} {PROBE_RULE}"));
    server.command(&["FLUSHALL"]).expect("a fresh start");
    assert_eq!(store.probe().await.expect("a probe").warnings, [""; 0]);
    let left = format!("{:?}", server.command(&["KEYS", "tollgate:*"]).expect("what is left"));
    assert!(!left.contains("tollgate:"), "a probe leaves nothing: {left}");
    // Each right by itself: without it something fails, and says why, and touches nobody else's key.
    for right in RULE.split_whitespace().filter(|word| word.starts_with('+')) {
        server.command(&["FLUSHALL"]).expect("a fresh start");
        let others: Vec<&str> = RULE.split_whitespace().filter(|word| *word != right).collect();
        grant(&server, &others.join(" "));
        let error =
            match everything(&RedisStore::new(options(&server)).expect("sound options"), servers).await {
                Err(error) => error,
                Ok(()) => panic!("{right} is not needed"),
            };
        if right == "+get" && error.failure() == Some(Failure::State) {
            // The short way cannot tell a key that it may not read from one that is not ours.
            continue;
        }
        assert_eq!(error.failure(), Some(Failure::Refused), "without {right}: {error:?}");
        assert!(error.to_string().contains("lacks a right"), "without {right}: {error}");
        assert!(error.to_string().contains("docs/operations.md"), "without {right}: {error}");
        assert!(!error.is_ambiguous() && !all_of(&error).contains("secret"), "{error:?}");
    }
    // What every charge needs is missed at the start, before anybody is charged.
    for right in ["+evalsha", "+time", "+get", "+set", "+del", "+pttl"] {
        server.command(&["FLUSHALL"]).expect("a fresh start");
        let others: Vec<&str> = RULE.split_whitespace().filter(|word| *word != right).collect();
        grant(&server, &others.join(" "));
        let store = RedisStore::new(options(&server)).expect("sound options");
        let error = store.probe().await.err().unwrap_or_else(|| panic!("{right} is not missed"));
        assert_eq!(error.failure(), Some(Failure::Refused), "without {right}: {error:?}");
    }
    // Rights to other names only.
    grant(&server, &RULE.replace("tollgate:", "other:"));
    let error = everything(&RedisStore::new(options(&server)).expect("sound options"), servers)
        .await
        .expect_err("not our keys");
    assert_eq!(error.failure(), Some(Failure::Refused), "{error:?}");
    assert!(error.to_string().contains("lacks a right"), "{error}");
}

/// The server is asked how it is about once a second. Who may not ask that charges all the same.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_info_only_the_time_of_scripts_is_not_known() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    grant(&server, RULE);
    let store = RedisStore::new(options(&server)).expect("sound options");
    let limit = hourly("api", 1_000_000);
    let until = async |what: &str, holds: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < 2 * PATIENCE, "{what}");
            store.charge(&[item(&limit, "k")], None).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The mark is written after INFO was asked.
    let is_marked = || !server.command(&["KEYS", "*:mark:*"]).expect("keys").items().is_empty();
    until("a look without the right", &is_marked).await;
    assert_eq!(store.script_time(), None);
    grant(&server, &format!("{RULE} {PROBE_RULE}"));
    until("a look with the right", &|| store.script_time().is_some_and(|time| time.calls > 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough_on_a_cluster() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    for node in cluster.nodes() {
        grant(node, &format!("{RULE} {CLUSTER_RULE}"));
    }
    let mut asked = options(&cluster.nodes()[0]);
    (asked.cluster, asked.urls) = (true, cluster.urls());
    let store = RedisStore::new(asked.clone()).expect("sound options");
    everything(&store, cluster.nodes()).await.unwrap_or_else(|error| panic!("{:?}", all_of(&error)));
    for node in cluster.nodes() {
        grant(node, RULE);
    }
    let store = RedisStore::new(asked).expect("sound options");
    let error = store.probe().await.expect_err("it may not ask where the slots are");
    assert_eq!(error.failure(), Some(Failure::Refused), "{error:?}");
    assert!(error.to_string().contains("lacks a right"), "{error}");
}
