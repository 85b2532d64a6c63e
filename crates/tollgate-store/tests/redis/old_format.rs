//! What format 1 kept is still read, and settled.

use tollgate_store::{ChargeId, Hold, Limit, Micros, Settled, Settlement, Store, StoredCharge, StoredLimit};
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

/// A hold of format 1: MessagePack.
const OLD_HOLD: &str = "local part = {key = KEYS[2], strategy = ARGV[1] + 0, name = 'n', cost = 2, at_us = ARGV[2] + 0, \
     ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]} \
     local hold = {question = '', answer = {1, 1, 0, 0, 0}, parts = {part}, holder = ARGV[8], ttl_us = 600000000, \
     end_us = ARGV[2] + 600000000, settled = 0} \
     return redis.call('SET', KEYS[1], cmsgpack.pack(hold), 'PX', 600000)";

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_of_format_1_is_settled() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let id = ChargeId::new(0xabc).expect("a name");
    let hour = HOUR.get().to_string();
    for limit in one_of_each(9) {
        let store = store_on(&server, None);
        let hold_key = format!("{}1:hold:{{{id}}}", store.prefix());
        assert!(store.charge(&[item(&limit, "k")], None).await.expect("a charge").allowed);
        let key = keys(&server, store.prefix()).remove(0);
        server.command(&["DEL", &key]).expect("del");
        for command in kept_before(&limit, &key) {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            server.command(&words).expect("what format 1 kept");
        }
        let window = limit.limit.window().get().to_string();
        let at = now_us();
        let (strategy, at, numbers) = match limit.limit {
            Limit::TokenBucket(_) | Limit::LeakyBucket(_) => (
                "1",
                at,
                ["1", &hour, &(9 * HOUR.get()).to_string(), "0", "315360000000000"].map(str::to_owned),
            ),
            Limit::FixedWindow(_) => ("3", at, ["9", &hour, "0", "0", "0"].map(str::to_owned)),
            Limit::SlidingWindow(_) => {
                let first = server.command(&["LINDEX", &key, "1"]).expect("lindex").text();
                ("4", first.parse().expect("a time"), ["9", &hour, "0", "0", "0"].map(str::to_owned))
            }
            Limit::SlidingWindowCounter(_) => ("5", at, ["9", &window, "0", "0", "0"].map(str::to_owned)),
            // As if it had been renewed since.
            Limit::Concurrency(_) => ("6", at - 1, ["9", &hour, "0", "0", "0"].map(str::to_owned)),
        };
        let at = at.to_string();
        let holder = id.to_string();
        let mut words = vec!["EVAL", OLD_HOLD, "2", &hold_key, &key, strategy, &at];
        words.extend(numbers.iter().map(String::as_str));
        words.push(&holder);
        server.command(&words).unwrap_or_else(|error| panic!("{error:?}"));
        let settled = store.settle(id, &Settlement::Cancel).await;
        assert_eq!(settled.unwrap_or_else(|error| panic!("{}: {error}", limit.name)), Settled::Done);
        // The window of the calendar was opened before; the other one is half over, and this was charged in it.
        assert_eq!(used(&store, &limit, "k").await, 3, "{}", limit.name);
        assert_eq!(store.settle(id, &Settlement::Cancel).await.expect("again"), Settled::Already);
    }
}

/// Holds that do not say which part of the charge each of theirs is: limits in shadow mode refused the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_does_not_number_its_parts_gives_back_no_more_than_was_charged() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let watch = StoredLimit::new("watch", Limit::fixed_window(5, HOUR).expect("a limit"));
    let count = StoredLimit::new("count", Limit::fixed_window(9, HOUR).expect("a limit"));
    let shadow = |key| StoredCharge { shadow: true, ..costing(&watch, key, 4) };
    let (one_of_two, same_limit) = ([shadow("a"), costing(&count, "a", 4)], [shadow("a"), shadow("b")]);
    for (items, actuals, expected) in [
        (one_of_two, [0, 4], 4),
        (one_of_two, [4, 1], 1),
        (one_of_two, [0, 6], 6),
        // Which of the two was charged is not known.
        (same_limit, [0, 3], 3),
        (same_limit, [3, 0], 3),
    ] {
        let store = store_on(&server, None);
        assert!(store.charge(&[costing(&watch, "a", 5)], None).await.expect("a charge").allowed);
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
        assert!(store.charge(&items, Some(hold)).await.expect("a hold").allowed);
        let key = format!("{}1:hold:{{{}}}", store.prefix(), hold.id);
        let new = server.command(&["GET", &key]).expect("get").text();
        let (parts, question) = new.split_once("\n\n").expect("parts and question");
        let old = parts.strip_suffix(" 2").expect("the second part alone");
        server.command(&["SET", &key, &format!("{old}\n\n{question}"), "KEEPTTL"]).expect("set");
        let settled = store.settle(hold.id, &Settlement::Each(actuals.to_vec())).await;
        assert_eq!(settled.expect("a settlement"), Settled::Done);
        let charged = items[1];
        assert_eq!(used(&store, charged.limit, charged.key).await, expected, "{actuals:?}");
        assert_eq!(used(&store, &watch, "a").await, 5);
        server.command(&["FLUSHALL"]).expect("a fresh start");
    }
}
