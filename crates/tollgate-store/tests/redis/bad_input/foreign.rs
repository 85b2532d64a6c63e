//! Things under our names that are not ours, and things of other versions beside them: nothing of them is read, believed or
//! changed.

use std::collections::{BTreeMap, BTreeSet};

use tollgate_store::{
    ChargeId, Failure, Hold, Micros, RedisStore, Settled, Settlement, Store, StoreError, StoredCharge,
};
use tollgate_testkit::redis::RedisServer;

use super::all_of;
use crate::{beside_others, costing, item, keys, one_of_each, store_on, used};

/// How to make something of each type under a name.
const FOREIGN: [&[&str]; 12] = [
    &["SET", "", "garbage"],
    &["SET", "", ""],
    &["SET", "", "12:x"],
    &["SET", "", "1:2:3:4:5"],
    // Digits, and more of them than a number of ours has.
    &["SET", "", "999999999999999999999999999999:1:1"],
    &["SET", "", "1:999999999999999999999999999999:1"],
    &["SET", "", "999999999999999999999999999999:1:1:1"],
    &["SET", "", "9007199254740991:1:1:9007199254740991"],
    &["RPUSH", "", "a", "b", "c"],
    &["HSET", "", "field", "value"],
    &["ZADD", "", "1", "member"],
    &["SADD", "", "member"],
];

fn make(server: &RedisServer, how: &[&str], key: &str) {
    let mut words = how.to_vec();
    words[1] = key;
    server.command(&["DEL", key]).expect("del");
    server.command(&words).expect("something foreign");
}

/// What the server has, whole.
fn contents(server: &RedisServer) -> BTreeMap<String, String> {
    let dump = |key: String| {
        let dumped = server.command(&["DUMP", &key]).expect("dump");
        let left = server.command(&["PTTL", &key]).expect("pttl").int() == Some(-1);
        (key, format!("{dumped:?} {left}"))
    };
    keys(server, "").into_iter().map(dump).collect()
}

#[track_caller]
fn unchanged(server: &RedisServer, before: &BTreeMap<String, String>, what: &str) {
    let now = contents(server);
    let all: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let changed: Vec<_> = all.into_iter().filter(|key| before.get(*key) != now.get(*key)).collect();
    assert!(changed.is_empty(), "{what}: {changed:?} changed");
}

fn not_ours(error: &StoreError, what: &str) {
    assert_eq!(error.failure(), Some(Failure::State), "{what}: {}", all_of(error));
    assert!(error.to_string().contains("not ours"), "{what}: {error}");
    assert!(!error.is_ambiguous(), "{what}: {error:?}");
}

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_is_neither_believed_nor_changed() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let limits = one_of_each(9);
    for limit in &limits {
        let store = store_on(&server, None);
        assert!(store.charge(&[item(limit, "k")], None).await.expect("a charge").allowed);
        let key = keys(&server, store.prefix()).remove(0);
        for how in FOREIGN {
            let what = format!("{} {how:?}", limit.name);
            make(&server, how, &key);
            // What is beside it, in the same charge.
            let other = limits.iter().find(|other| other.name != limit.name).expect("another limit");
            assert!(store.charge(&[item(other, "k")], None).await.expect("a charge").allowed, "{what}");
            let before = contents(&server);
            let one = [item(limit, "k")];
            not_ours(&store.charge(&one, None).await.expect_err(&what), &what);
            not_ours(&store.charge(&[costing(limit, "k", 9)], None).await.expect_err(&what), &what);
            not_ours(&store.charge(&one, Some(hold())).await.expect_err(&what), &what);
            not_ours(&store.peek(&one).await.expect_err(&what), &what);
            for both in [[item(limit, "k"), item(other, "k")], [item(other, "k"), item(limit, "k")]] {
                not_ours(&store.charge(&both, None).await.expect_err(&what), &what);
            }
            unchanged(&server, &before, &what);
            // Those that only watch may be charged each for itself, and then it is not said that nothing was.
            let watching = [limit, other].map(|limit| StoredCharge { shadow: true, ..item(limit, "k") });
            let error = store.charge(&watching, None).await.expect_err(&what);
            assert_eq!(error.failure(), Some(Failure::State), "{what}: {error:?}");
            if !error.is_ambiguous() {
                unchanged(&server, &before, &what);
            }
            assert!(store.charge(&[item(limit, "another")], None).await.expect("another key").allowed);
            store.forget(other, "k").await.expect("a reset");
            store.forget(limit, "another").await.expect("a reset");
        }
        // A reset takes away whatever is there, and all is well again.
        assert!(store.forget(limit, "k").await.expect("a reset"));
        assert!(store.charge(&[item(limit, "k")], None).await.expect("a charge").allowed);
    }
}

/// The same where a hold is kept, and where its parts are when it is settled.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_is_no_hold() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = store_on(&server, None);
    let settlements = [
        Settlement::Actual(1),
        Settlement::Cancel,
        Settlement::Renew,
        Settlement::Release,
        Settlement::Each(vec![3]),
    ];
    for limit in one_of_each(9) {
        let held = hold();
        assert!(store.charge(&[costing(&limit, "k", 2)], Some(held)).await.expect("a hold").allowed);
        let find = |part: &str| {
            keys(&server, store.prefix()).into_iter().find(|key| key.contains(part)).expect("a key")
        };
        let (hold_key, part_key) = (find("1:hold:"), find(&format!(":{}", limit.name)));
        let sound = server.command(&["COPY", &hold_key, "copy", "REPLACE"]);
        assert_eq!(sound.expect("a copy").int(), Some(1));
        for how in FOREIGN {
            let what = format!("{} {how:?}", limit.name);
            make(&server, how, &hold_key);
            let before = contents(&server);
            for settlement in &settlements {
                not_ours(&store.settle(held.id, settlement).await.expect_err(&what), &what);
            }
            not_ours(&store.charge(&[item(&limit, "k")], Some(held)).await.expect_err(&what), &what);
            unchanged(&server, &before, &what);
        }
        server.command(&["COPY", "copy", &hold_key, "REPLACE"]).expect("the hold again");
        for how in FOREIGN {
            let what = format!("{} {how:?}", limit.name);
            make(&server, how, &part_key);
            let before = contents(&server);
            for settlement in [Settlement::Actual(1), Settlement::Actual(3), Settlement::Cancel] {
                not_ours(&store.settle(held.id, &settlement).await.expect_err(&what), &what);
            }
            unchanged(&server, &before, &what);
        }
        server.command(&["FLUSHALL"]).expect("a fresh start");
    }
}

/// Settlements that go in one script: the first fails by what is kept for it, and the others are carried out.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_is_not_ours_is_no_other_holds_failure() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in one_of_each(90) {
        for is_hold in [true, false] {
            let (store, mut held, mut held_keys) = (store_on(&server, None), Vec::new(), Vec::new());
            assert!(store.charge(&[item(&limit, "broken")], None).await.expect("a charge").allowed);
            let broken = keys(&server, store.prefix()).remove(0);
            let is_broken = |number: usize| number % 3 != 2;
            for number in 0..60 {
                let (key, hold) = (if is_broken(number) { "broken" } else { "sound" }, hold());
                assert!(store.charge(&[item(&limit, key)], Some(hold)).await.expect("a hold").allowed);
                held.push(hold.id);
                let is_new = |key: &String| key.contains("1:hold:") && !held_keys.contains(key);
                held_keys.extend(keys(&server, store.prefix()).into_iter().find(is_new));
            }
            // Of most holds their own key is replaced, or the key that they charged.
            let replaced = match is_hold {
                true => held_keys,
                false => vec![broken],
            };
            for (_, key) in replaced.iter().enumerate().filter(|(number, _)| is_broken(*number)) {
                make(&server, FOREIGN[0], key);
            }
            let settle = held.iter().map(|id| store.settle(*id, &Settlement::Cancel));
            let settled = futures_util::future::join_all(settle).await;
            for (number, settled) in settled.into_iter().enumerate() {
                let what = format!("{}, settlement {number}, the hold: {is_hold}", limit.name);
                match is_broken(number) {
                    true => not_ours(&settled.expect_err(&what), &what),
                    false => {
                        assert_eq!(settled.unwrap_or_else(|error| panic!("{what}: {error}")), Settled::Done)
                    }
                }
            }
            server.command(&["FLUSHALL"]).expect("a fresh start");
        }
    }
}

/// A hold over several limits, one of whose keys somebody has replaced: it is settled under all, or under none.
#[tokio::test(flavor = "multi_thread")]
async fn a_settlement_is_not_halved_by_what_is_not_ours() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let limits = one_of_each(9);
    for broken in &limits {
        let store = store_on(&server, None);
        let held = hold();
        let items: Vec<StoredCharge<'_>> = limits.iter().map(|limit| costing(limit, "k", 2)).collect();
        assert!(store.charge(&items, Some(held)).await.expect("a hold").allowed);
        let name = format!(":{}", broken.name);
        let key = keys(&server, store.prefix()).into_iter().find(|key| key.ends_with(&name)).expect("a key");
        make(&server, &["HSET", "", "field", "value"], &key);
        let before = contents(&server);
        for settlement in [Settlement::Actual(1), Settlement::Actual(4), Settlement::Cancel] {
            let what = format!("{} {settlement:?}", broken.name);
            not_ours(&store.settle(held.id, &settlement).await.expect_err(&what), &what);
            unchanged(&server, &before, &what);
        }
    }
}

/// Two versions of Tollgate on one server whose names are made in another way: neither sees what the other keeps.
#[tokio::test(flavor = "multi_thread")]
async fn another_version_is_neither_read_nor_touched() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in one_of_each(9) {
        let store: RedisStore = store_on(&server, None);
        assert!(store.charge(&[costing(&limit, "k", 9)], None).await.expect("a charge").allowed);
        let ours = keys(&server, store.prefix()).remove(0);
        assert!(ours.starts_with(&format!("{}1:", store.prefix())), "{ours} names the version of its format");
        // What a later version might keep under the same name, and we would not understand.
        let theirs = ours.replacen("1:", "2:", 1);
        let theirs = if theirs.starts_with(store.prefix()) {
            theirs
        } else {
            ours.replacen(&format!("{}1:", store.prefix()), &format!("{}2:", store.prefix()), 1)
        };
        make(&server, &["HSET", "", "of", "another version"], &theirs);
        server.command(&["RENAME", &ours, "aside"]).expect("ours aside");
        assert_eq!(used(&store, &limit, "k").await, 0, "{}: the other's is not read", limit.name);
        assert!(store.charge(&[item(&limit, "k")], None).await.expect("a charge").allowed);
        assert!(store.forget(&limit, "k").await.expect("a reset"));
        let kept = server.command(&["HGET", &theirs, "of"]).expect("theirs").text();
        assert_eq!(kept, "another version", "{}: nor touched", limit.name);
        server.command(&["FLUSHALL"]).expect("a fresh start");
    }
}
