//! What format 1 kept for keys is still read.

use tollgate_store::{Limit, Store, StoredLimit};
use tollgate_testkit::redis::RedisServer;

use super::{HOUR, beside_others, costing, item, keys, one_of_each, store_on, used};

fn now_us() -> u64 {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    u64::try_from(now.as_micros()).expect("a time")
}

/// What format 1 kept for 5 of 9, under each strategy of `one_of_each`.
fn kept_before(limit: &StoredLimit, key: &str) -> Vec<Vec<String>> {
    let now = now_us();
    let end = now + HOUR.get() / 2;
    let texts = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    match limit.limit {
        Limit::TokenBucket(_) | Limit::LeakyBucket(_) => {
            vec![texts(&["SET", key, &(now + 5 * HOUR.get()).to_string()])]
        }
        Limit::FixedWindow(_) => vec![texts(&["SET", key, &format!("{end}:5")])],
        Limit::SlidingWindow(_) => {
            let (one, two) = ((now - 2_000).to_string(), (now - 1_000).to_string());
            vec![texts(&["RPUSH", key, "5", &one, "2", &two, "3"])]
        }
        Limit::SlidingWindowCounter(window) => {
            vec![texts(&["SET", key, &format!("{}:0:5", now - now % window.window().get())])]
        }
        Limit::Concurrency(_) => {
            let (holder, end) = (format!("{:032x}:2", 0xabc), end.to_string());
            vec![texts(&["ZADD", key, "-6", "=", &end, &holder, &end, &format!("@{end}:3")])]
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_format_1_kept_is_read_and_charged() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in one_of_each(9) {
        let store = store_on(&server, None);
        assert!(store.charge(&[item(&limit, "k")], None).await.expect("a charge").allowed);
        let key = keys(&server, store.prefix()).remove(0);
        for asked in [None, Some(5), Some(4)] {
            server.command(&["DEL", &key]).expect("del");
            for command in kept_before(&limit, &key) {
                let words: Vec<&str> = command.iter().map(String::as_str).collect();
                server.command(&words).expect("what format 1 kept");
            }
            if let Some(cost) = asked {
                let charged = store.charge(&[costing(&limit, "k", cost)], None).await;
                let charged = charged.unwrap_or_else(|error| panic!("{}: {error}", limit.name));
                assert_eq!(charged.allowed, cost == 4, "{}, {cost}", limit.name);
            }
            let expected = if asked == Some(4) { 9 } else { 5 };
            assert_eq!(used(&store, &limit, "k").await, expected, "{}, {asked:?}", limit.name);
        }
        let left = server.command(&["PTTL", &key]).expect("pttl").int().expect("a number");
        assert!(left > 0, "{} runs out", limit.name);
    }
}
