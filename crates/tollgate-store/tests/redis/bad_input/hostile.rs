//! Keys that strangers choose: whatever they write, they get a state of their own and nobody else's, reach no slot of their
//! choosing, and read nothing of themselves in names or messages.

use std::collections::BTreeSet;
use std::time::Duration;

use tollgate_store::{
    ChargeId, Cost, Hold, Micros, RedisOptions, RedisStore, Settled, Settlement, Store, StoredCharge,
    StoredLimit, Subject,
};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{RedisCluster, RedisServer, Value};

use super::all_of;
use crate::{beside_others, costing, hourly, item, keys, log, one_of_each, patient, prefix, store_on, used};

/// A word that is in every hostile key, and must be nowhere else.
const CANARY: &str = "c4n4ry";

fn hostile() -> Vec<String> {
    let mut all: Vec<String> = [
        "",
        "{}",
        "{",
        "}",
        "{}{}",
        "{a}",
        "{a}b",
        "a{}",
        "}{",
        "{{a}}",
        "*",
        "?",
        "[a]",
        "\\",
        "\"",
        "'",
        " ",
        "  ",
        "\0",
        "\0\0",
        "a\0b",
        "\n",
        "\r\n",
        "\r\n$3\r\nDEL\r\n",
        "\t",
        "\u{1b}[31m",
        "\u{202e}",
        "\u{feff}",
        "é",
        "e\u{301}",
        "-1",
        "0",
        "1e9",
        "nil",
        "false",
        "KEYS[1]",
        "redis.call('FLUSHALL')",
        "${x}",
        "%00",
        "%",
        ":",
        "::",
        "a:b",
        "a%3Ab",
        "hold:{0}",
        "1:hold:",
        "../..",
        "tollgate:1:",
    ]
    .iter()
    .map(|text| format!("{CANARY}{text}"))
    .collect();
    all.push(format!("{CANARY}{}", "\u{1f600}".repeat(256)));
    all.push(format!("{CANARY}{}", "\u{1f600}".repeat(255)));
    all.push(format!("{{{CANARY}}}"));
    all.push(CANARY.to_uppercase());
    all
}

/// Each key is charged another amount, under each strategy and each subject, and each has that amount.
async fn each_has_its_own(store: &RedisStore) {
    let keys = hostile();
    for limit in one_of_each(1_000) {
        for subject in [Subject::Key, Subject::Namespace, Subject::All] {
            let limit = StoredLimit {
                subject,
                name: format!("{}-{subject:?}", limit.name).to_lowercase(),
                ..limit.clone()
            };
            for (index, key) in keys.iter().enumerate() {
                let charged = store.charge(&[costing(&limit, key, index as u64 + 1)], None).await;
                let charged = charged.unwrap_or_else(|error| panic!("{key:?}: {error}"));
                assert_eq!(charged.outcomes[0].used(), index as u64 + 1, "{key:?} under {}", limit.name);
            }
            for (index, key) in keys.iter().enumerate() {
                assert_eq!(used(store, &limit, key).await, index as u64 + 1, "{key:?} under {}", limit.name);
            }
        }
    }
    // All of them in one charge, wherever they are, and given back.
    let limit = hourly("all", 10);
    let items: Vec<StoredCharge<'_>> = keys.iter().map(|key| item(&limit, key)).collect();
    let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
    assert!(store.charge(&items, Some(hold)).await.unwrap_or_else(|error| panic!("{error}")).allowed);
    assert!(store.charge(&items, None).await.unwrap_or_else(|error| panic!("{error}")).allowed);
    assert_eq!(store.settle(hold.id, &Settlement::Cancel).await.expect("a cancel"), Settled::Done);
    for key in &keys {
        assert_eq!(used(store, &limit, key).await, 1, "{key:?}");
    }
    let tenth: Vec<StoredCharge<'_>> = items
        .iter()
        .enumerate()
        .map(|(at, item)| StoredCharge {
            cost: Cost::new(if at == 30 { 10 } else { 1 }).unwrap_or(Cost::ONE),
            ..*item
        })
        .collect();
    assert!(!store.charge(&tenth, None).await.expect("a charge").allowed);
    for key in &keys {
        assert_eq!(used(store, &limit, key).await, 1, "{key:?} after a denial");
    }
}

/// Names hold none of a key's bytes, are short, and print.
fn names_are_ours(names: &[String]) {
    for name in names {
        assert!(name.len() < 128 && name.bytes().all(|byte| byte.is_ascii_graphic()), "{name:?}");
        assert!(!name.to_lowercase().contains(CANARY), "{name:?}");
        assert_eq!(name.matches('{').count(), 1, "{name:?}");
        assert_eq!(name.matches('}').count(), 1, "{name:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_keys_have_their_own_state() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = store_on(&server, None);
    each_has_its_own(&store).await;
    let names = keys(&server, "");
    assert!(names.len() > 14 * hostile().len());
    names_are_ours(&names);
    // Nor is a key in what is stored.
    for name in names {
        let dumped = server.command(&["DUMP", &name]).expect("dump");
        let Value::Bulk(bytes) = dumped else { panic!("{name} is gone") };
        assert!(!bytes.windows(CANARY.len()).any(|window| window == CANARY.as_bytes()), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_keys_have_their_own_state_on_a_cluster() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    let store = RedisStore::new(patient(RedisOptions::cluster(cluster.urls()))).expect("sound options");
    each_has_its_own(&store).await;
    let mut slots = BTreeSet::new();
    for node in &cluster.nodes()[..3] {
        let names = keys(node, "");
        names_are_ours(&names);
        assert!(names.len() > 100, "the keys are spread over all servers");
        slots.extend(names.iter().map(|name| tollgate_testkit::redis::slot_of(name)));
    }
    assert!(slots.len() > hostile().len() / 2, "nobody chooses a slot: {} of them", slots.len());
}

/// Whatever goes wrong, what is said of it holds neither the key nor the password.
#[tokio::test(flavor = "multi_thread")]
async fn no_message_holds_a_key_or_a_password() {
    let _turn = beside_others().await;
    log::listen();
    let password = "p4ssw0rd-c4n4ry";
    let server = RedisServer::builder().password(password).start();
    let proxy = FaultProxy::start(server.port());
    let mut options = RedisOptions::new(format!("redis://:{password}@127.0.0.1:{}", proxy.port()));
    (options.prefix, options.timeout) = (prefix(), Duration::from_millis(100));
    let store = RedisStore::new(options.clone()).expect("sound options");
    let limit = hourly("api", 10);
    let key = format!("{{{CANARY}}}");
    let mut said = vec![format!("{options:?} {store:?}")];
    let mut try_it = async |what: &str| {
        for _ in 0..2 {
            let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
            let one = store.charge(&[item(&limit, &key)], None).await.map(drop);
            let two = store.charge(&[item(&limit, &key)], Some(hold)).await.map(drop);
            let three = store.peek(&[item(&limit, &key)]).await.map(drop);
            let four = store.forget(&limit, &key).await.map(drop);
            let five = store.probe().await.map(drop);
            for error in [one, two, three, four, five].into_iter().filter_map(Result::err) {
                said.push(format!("{what}: {}", all_of(&error)));
            }
        }
    };
    for mode in [
        Mode::Blackhole,
        Mode::Pass,
        Mode::SwallowReplies,
        Mode::CutReply { after_bytes: 1 },
        Mode::Reset,
        Mode::Refuse,
        Mode::Pass,
    ] {
        proxy.set(mode);
        try_it(&format!("{mode:?}")).await;
    }
    for (setting, value, before) in
        [("maxmemory", "1", "0"), ("min-replicas-to-write", "3", "0"), ("requirepass", "other", password)]
    {
        server.command(&["CONFIG", "SET", setting, value]).expect("config");
        proxy.reset_connections();
        try_it(setting).await;
        server.command(&["CONFIG", "SET", setting, before]).expect("config");
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    try_it("nothing").await;
    for name in keys(&server, "") {
        server.command(&["DEL", &name]).expect("del");
        server.command(&["HSET", &name, &key, password]).expect("something foreign");
    }
    try_it("something foreign").await;
    server.command(&["REPLICAOF", "127.0.0.1", "1"]).expect("a replica");
    try_it("a replica").await;
    assert!(said.len() > 40, "enough went wrong: {}", said.len());
    let place = format!("127.0.0.1:{}", proxy.port());
    said.extend(log::warnings(&[&place]));
    for line in &said {
        assert!(!line.to_lowercase().contains(CANARY), "{line}");
    }
}
