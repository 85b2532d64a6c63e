//! What is answered to calls.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::client::{ask, call, channel, reported, resets};
use crate::server;

const CONFIG: &str = r#"
[limits]
api = { strategy = "fixed_window", limit = 5, window = "1d" }
log = { strategy = "sliding_window", limit = 10, window = "36h" }
huge = { strategy = "fixed_window", limit = 9_000_000_000, window = "7d" }
watched = { strategy = "fixed_window", limit = 1, window = "1h", shadow = true }
wall = { blocked = true }

[[envoy]]
domain = "edge"
entries = ["user"]
limit = "api"

[[envoy]]
domain = "edge"
entries = ["user=vip-*"]
unlimited = true

[[envoy]]
domain = "edge"
entries = ["path", "user"]
limit = "log"

[[envoy]]
domain = "edge"
entries = ["path=/quiet"]
limit = "api"
headers = false

[[envoy]]
domain = "edge"
entries = ["all"]
shared = ["all"]
limit = "api"

[[envoy]]
domain = "edge"
entries = ["huge"]
limit = "huge"

[[envoy]]
domain = "edge"
entries = ["watched"]
limit = "watched"

[[envoy]]
domain = "edge"
entries = ["wall"]
limit = "wall"
"#;

/// Asks a fresh server, call by call: (hits of the call, descriptors, answer in short).
async fn check(calls: &[(u32, &str, &str)]) {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    for (index, (hits, descriptors, expected)) in calls.iter().enumerate() {
        let response = ask(&channel, call(descriptors, *hits)).await.expect("an answer");
        assert_eq!(reported(&response), *expected, "call {}, {descriptors}", index + 1);
    }
    drop(channel);
    assert_eq!(server::stop(server).await.code, Some(0));
}

#[tokio::test]
async fn all_descriptors_are_one_charge() {
    check(&[
        (0, "user=a", "OK: OK 4/5 DAY api"),
        (3, "user=a", "OK: OK 1/5 DAY api"),
        (0, "user=b", "OK: OK 4/5 DAY api"),
        (0, "user=vip-1", "OK: OK unlimited"),
        (0, "colour=red", "OK: OK"),
        (0, "path=/a user=a; user=a", "OK: OK 9/10 log; OK 0/5 DAY api"),
        // One denies, and nothing is charged: the log has as much left as before.
        (0, "path=/a user=a; user=a; colour=red", "OVER_LIMIT: OK 9/10 log; OVER_LIMIT 0/5 DAY api; OK"),
        (0, "path=/a user=a; user=b", "OK: OK 8/10 log; OK 3/5 DAY api"),
        // The same descriptor twice adds up.
        (0, "user=c; user=c", "OK: OK 3/5 DAY api; OK 3/5 DAY api"),
        (0, "user=c +2; user=c +2", "OVER_LIMIT: OVER_LIMIT 3/5 DAY api; OVER_LIMIT 3/5 DAY api"),
        // More than there ever is.
        (6, "user=d", "OVER_LIMIT: OVER_LIMIT 5/5 DAY api"),
        (0, "huge=1", "OK: OK 4294967295/4294967295 WEEK huge"),
        (0, "wall=1", "OVER_LIMIT: OVER_LIMIT 0/0 wall"),
        (0, "watched=1", "OK: OK 0/1 HOUR watched"),
        (0, "watched=1; user=e", "OK: OK 0/1 HOUR watched; OK 4/5 DAY api"),
        (0, "all=1", "OK: OK 4/5 DAY api"),
        (0, "all=2", "OK: OK 3/5 DAY api"),
        // Joined by `_`, these would be one.
        (5, "path=a_b user=c", "OK: OK 5/10 log"),
        (5, "path=a user=b_c", "OK: OK 5/10 log"),
    ])
    .await;
}

#[tokio::test]
async fn each_descriptor_may_say_its_hits() {
    check(&[
        (3, "user=a +2; path=/ user=a", "OK: OK 3/5 DAY api; OK 7/10 log"),
        // Nothing is charged for a look, and it says whether one more would fit.
        (9, "user=a +0", "OK: OK 3/5 DAY api"),
        (9, "user=a +0; path=/ user=b +4", "OK: OK 3/5 DAY api; OK 6/10 log"),
        (0, "user=a +3", "OK: OK 0/5 DAY api"),
        (0, "user=a +0", "OVER_LIMIT: OVER_LIMIT 0/5 DAY api"),
        (0, "user=a +0; path=/ user=b +4", "OVER_LIMIT: OVER_LIMIT 0/5 DAY api; OK 6/10 log"),
        (0, "path=/ user=b +0", "OK: OK 6/10 log"),
        // What is given back is always in order, and never more than there was.
        (0, "user=a -2", "OK: OK 2/5 DAY api"),
        (0, "user=a -", "OK: OK 3/5 DAY api"),
        (2, "user=a -", "OK: OK 5/5 DAY api"),
        (0, "user=a -9", "OK: OK 5/5 DAY api"),
        (0, "user=nobody -9", "OK: OK 5/5 DAY api"),
        (0, "user=a +5", "OK: OK 0/5 DAY api"),
        (0, "path=/ user=b -1; user=a", "OVER_LIMIT: OK 7/10 log; OVER_LIMIT 0/5 DAY api"),
        (0, "wall=1 -1", "OK: OK 0/0 wall"),
    ])
    .await;
}

#[tokio::test]
async fn a_limit_may_come_with_a_descriptor() {
    check(&[
        (0, "user=a @2/WEEK", "OK: OK 1/2 WEEK envoy.per_week"),
        (0, "user=a @2/WEEK", "OK: OK 0/2 WEEK envoy.per_week"),
        (0, "user=a @2/WEEK; user=a", "OVER_LIMIT: OVER_LIMIT 0/2 WEEK envoy.per_week; OK 5/5 DAY api"),
        (0, "user=b @2/WEEK", "OK: OK 1/2 WEEK envoy.per_week"),
        (0, "user=vip-1 @1/WEEK", "OK: OK 0/1 WEEK envoy.per_week"),
        (0, "user=vip-1 @1/WEEK", "OVER_LIMIT: OVER_LIMIT 0/1 WEEK envoy.per_week"),
        (0, "colour=red @0/DAY", "OVER_LIMIT: OVER_LIMIT 0/0 envoy.per_day"),
        (0, "user=a", "OK: OK 4/5 DAY api"),
    ])
    .await;
}

/// A limit of 0 that came first once gave its label, `none`, to all that came after it.
#[tokio::test]
async fn decisions_are_counted_by_the_strategy_that_made_them_and_so_are_refunds() {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    for descriptors in ["a=1 @0/WEEK", "a=1 @2/WEEK", "a=1 @3/WEEK", "user=a -2", "user=a -1; user=b -1"] {
        ask(&channel, call(descriptors, 0)).await.expect("an answer");
    }
    let metrics = server.get("/metrics").body;
    let count = |labels: &[&str]| -> f64 {
        let lines = metrics.lines().filter(|line| labels.iter().all(|label| line.contains(label)));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let decisions = ["rate_limiter_decisions_total{", "limiter=\"envoy.per_week\""];
    for (strategy, expected) in [("none", 1.0), ("fixed_window", 2.0)] {
        let label = format!("strategy=\"{strategy}\"");
        assert_eq!(count(&[&decisions[..], &[&label]].concat()), expected, "{strategy}: {metrics}");
    }
    assert_eq!(count(&["tollgate_envoy_refunds_total "]), 3.0, "{metrics}");
}

/// The first charge of a key meets no time that has passed, so the time until its reset is known to the microsecond.
#[tokio::test]
async fn the_time_until_a_reset_is_exact() {
    let config = r#"
        [limits]
        window = { strategy = "fixed_window", limit = 5, window = "36h" }
        log = { strategy = "sliding_window", limit = 10, window = "90s" }
        bucket = { strategy = "token_bucket", rate = "10/s", burst = 10 }
        thirds = { strategy = "token_bucket", rate = "3/s", burst = 10 }
        slow = { strategy = "token_bucket", rate = "1/h", burst = 1 }
        leaky = { strategy = "leaky_bucket", rate = "4/s", capacity = 10 }
        watched = { strategy = "fixed_window", limit = 1, window = "1h", shadow = true }
        wall = { blocked = true }
    "#;
    let names = ["window", "log", "bucket", "thirds", "slow", "leaky", "watched", "wall"];
    let matches = names
        .map(|name| format!("[[envoy]]\ndomain = \"edge\"\nentries = [\"{name}\"]\nlimit = \"{name}\"\n"));
    let server = server::start(&format!("{config}\n{}", matches.concat()));
    let channel = channel(&server).await;
    let began = Instant::now();
    for (descriptors, expected) in [
        ("window=a", "OK 129600.000000000"),
        ("window=b +5", "OK 129600.000000000"),
        // A look is answered as a charge of one would be.
        ("window=c +0", "OK 129600.000000000"),
        ("log=a +3", "OK 90.000000000"),
        ("bucket=a +3", "OK 0.300000000"),
        ("bucket=b +10", "OK 1.000000000"),
        // Rounded up to the microsecond: who waits so long has waited long enough.
        ("thirds=a", "OK 0.333334000"),
        ("thirds=b +2", "OK 0.666667000"),
        ("slow=a", "OK 3600.000000000"),
        ("leaky=a +3", "OK 0.750000000"),
        ("watched=a", "OK 3600.000000000"),
        ("wall=a", "OVER_LIMIT 0.000000000"),
    ] {
        let response = ask(&channel, call(descriptors, 0)).await.expect("an answer");
        assert_eq!(resets(&response), [expected], "{descriptors}");
    }
    // A denied call says when it can pass: not before the moment at which the server answered the first one.
    let asked = Instant::now();
    let response = ask(&channel, call("slow=a", 0)).await.expect("an answer");
    let [reset] = &resets(&response)[..] else { panic!("one status") };
    let left: f64 = reset.strip_prefix("OVER_LIMIT ").expect("denied").parse().expect("a number");
    let passed = asked.elapsed() + asked.duration_since(began);
    assert!(left < 3_600.0 && left >= 3_600.0 - passed.as_secs_f64(), "{left} s are left after {passed:?}");
}

/// What is aligned to the clock ends at an edge of the clock: windows by the clock, sliding counters, and limits that come with the call.
#[tokio::test]
async fn the_time_until_an_edge_of_the_clock_is_exact() {
    /// How far the clock of the process may be from the system's, which other programs correct.
    const SLACK_US: u64 = 100_000;
    let config = r#"
        [limits]
        clock = { strategy = "fixed_window", limit = 5, window = "1h", align = "clock" }
        counter = { strategy = "sliding_window_counter", limit = 10, window = "30m" }
        window = { strategy = "fixed_window", limit = 5, window = "36h" }
    "#;
    let matches = ["clock", "counter", "window"]
        .map(|name| format!("[[envoy]]\ndomain = \"edge\"\nentries = [\"{name}\"]\nlimit = \"{name}\"\n"));
    let server = server::start(&format!("{config}\n{}", matches.concat()));
    let channel = channel(&server).await;
    let now_us = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        u64::try_from(since.as_micros()).expect("a time")
    };
    // By status: the window in seconds, and at the end of which window from now on nothing is counted any more. 0 windows: not aligned.
    let calls: [(&str, &[(u64, u64)]); 7] = [
        ("clock=a +2", &[(3_600, 1)]),
        // What was counted in this window is a part of the estimate until the end of the next one.
        ("counter=a +3", &[(1_800, 2)]),
        ("user=a @2/MINUTE", &[(60, 1)]),
        ("user=a @2/HOUR", &[(3_600, 1)]),
        ("user=a @2/DAY", &[(86_400, 1)]),
        ("user=a @2/WEEK", &[(604_800, 1)]),
        ("clock=b; counter=b; window=b; user=b @9/DAY", &[(3_600, 1), (1_800, 2), (129_600, 0), (86_400, 1)]),
    ];
    for (number, (descriptors, expected)) in calls.into_iter().enumerate() {
        for turn in 0.. {
            // Keys of their own, if the first call met an edge between the looks at the clock.
            let fresh =
                descriptors.replace("=a", &format!("=a{number}-{turn}")).replace("=b", &format!("=b{turn}"));
            let before = now_us();
            let response = ask(&channel, call(&fresh, 0)).await.expect("an answer");
            let after = now_us();
            let edge = |at: u64, (window, edges): (u64, u64)| match edges {
                0 => at + window * 1_000_000,
                _ => (at / (window * 1_000_000) + edges) * window * 1_000_000,
            };
            let is_edge = |&each: &(u64, u64)| {
                each.1 > 0 && edge(before - SLACK_US, each) != edge(after + SLACK_US, each)
            };
            if expected.iter().any(is_edge) {
                continue;
            }
            let resets = resets(&response);
            assert_eq!(resets.len(), expected.len(), "{fresh}");
            for (reset, &each) in resets.iter().zip(expected) {
                let text = reset.strip_prefix("OK ").expect("allowed").replace('.', "");
                let reset_us = text.parse::<u64>().expect("a time") / 1_000;
                let most = edge(before, each) - before + SLACK_US;
                let least = edge(after, each) - after - SLACK_US;
                assert!((least..=most).contains(&reset_us), "{fresh}: {reset_us} is not {least} to {most}");
            }
            break;
        }
    }
}

#[tokio::test]
async fn headers_say_how_the_caller_stands() {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    for (descriptors, expected) in [
        (
            "user=a +4",
            "x-ratelimit-limit=5 x-ratelimit-remaining=1 x-ratelimit-reset=86400 \
                       ratelimit-policy=\"api\";q=5;w=86400 ratelimit=\"api\";r=1;t=86400",
        ),
        ("user=a +0", "x-ratelimit-limit=5 x-ratelimit-remaining=1"),
        ("user=a +1", "x-ratelimit-remaining=0"),
        ("user=a; path=/ user=a", "x-ratelimit-remaining=0"),
        ("user=a; path=/ user=a", "retry-after=86"),
        ("user=a; path=/ user=a", "ratelimit=\"api\";r=0;t="),
        ("user=a; path=/ user=a", ", \"log\";r=10;t="),
        ("user=b; watched=1", "ratelimit-policy=\"api\";q=5;w=86400 "),
        ("path=/quiet", ""),
        ("colour=red", ""),
        ("user=vip-1", ""),
        ("watched=1", ""),
        ("wall=1", "x-ratelimit-limit=0 x-ratelimit-remaining=0"),
    ] {
        let response = ask(&channel, call(descriptors, 0)).await.expect("an answer");
        let headers =
            response.response_headers_to_add.iter().map(|field| format!("{}={}", field.key, field.value));
        let headers = headers.collect::<Vec<_>>().join(" ");
        // The time that is left may be a second less when the machine is slow.
        let headers = headers.replace("86399", "86400").replace("86398", "86400");
        assert!(headers.contains(expected), "{descriptors}: {headers}");
        assert!(!expected.is_empty() || headers.is_empty(), "{descriptors}: {headers}");
    }
}
