//! Counters in a remote store: what is answered when it answers and when it does not, and how often it is asked.

use std::time::{Duration, Instant};

use tollgate_testkit::redis::RedisServer;

use crate::client::{ask, call, channel, reported};
use crate::get;
use crate::server;

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_is_never_unknown() {
    let redis = RedisServer::start();
    let server = server::start(&format!(
        "[store]\nmode = 'redis'\ntimeout = '2s'\nredis = {{ url = '{}' }}\n\
         [limits]\nclosed = {{ strategy = 'fixed_window', limit = 5, window = '1d', fallback = 'closed' }}\n\
         open = {{ strategy = 'fixed_window', limit = 5, window = '1d', fallback = 'open' }}\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['closed']\nlimit = 'closed'\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['open']\nlimit = 'open'\n",
        redis.url()
    ));
    let channel = channel(&server).await;
    for (descriptors, expected) in [
        ("closed=1 +2; open=1", "OK: OK 3/5 DAY closed; OK 4/5 DAY open"),
        ("closed=1 +0", "OK: OK 3/5 DAY closed"),
        ("closed=1 +4; open=1", "OVER_LIMIT: OVER_LIMIT 3/5 DAY closed; OK 4/5 DAY open"),
        ("open=2 @1/WEEK", "OK: OK 0/1 WEEK envoy.per_week"),
        ("open=2 @1/WEEK", "OVER_LIMIT: OVER_LIMIT 0/1 WEEK envoy.per_week"),
        // The newest charge first, and never more than there is.
        ("open=1 -1", "OK: OK 5/5 DAY open"),
        ("closed=1 -1; open=1 -9", "OK: OK 4/5 DAY closed; OK 5/5 DAY open"),
        ("open=nobody -9", "OK: OK 5/5 DAY open"),
        ("open=2 -1 @1/WEEK", "OK: OK 1/1 WEEK envoy.per_week"),
        // What is given back first can be charged in the same call.
        ("closed=1 -1; open=1 +5", "OK: OK 5/5 DAY closed; OK 0/5 DAY open"),
        ("open=1 -5; closed=1", "OK: OK 5/5 DAY open; OK 4/5 DAY closed"),
    ] {
        let response = ask(&channel, call(descriptors, 0)).await.expect("an answer");
        assert_eq!(reported(&response), expected, "{descriptors}");
    }
    let metrics = get(server.http(), "/metrics", "").1;
    assert!(!metrics.contains("tollgate_envoy_refunds_dropped_total"), "{metrics}");
    assert!(metrics.contains("tollgate_envoy_calls_total{code=\"over_limit\"} 2"), "{metrics}");

    redis.stop();
    for (descriptors, code) in [
        ("closed=1", "OVER_LIMIT"),
        ("open=1", "OK"),
        ("open=1; closed=1", "OVER_LIMIT"),
        ("open=1 -1; closed=1 -1", "OK"),
    ] {
        let response = ask(&channel, call(descriptors, 0)).await.expect("an answer");
        assert_eq!(response.overall_code().as_str_name(), code, "{descriptors}");
    }
    let metrics = get(server.http(), "/metrics", "").1;
    assert!(metrics.contains("tollgate_envoy_refunds_dropped_total 2"), "{metrics}");
    redis.resume();
    // Until the store is asked again. What could not be given back stays charged.
    let start = Instant::now();
    loop {
        let response = ask(&channel, call("closed=1 +0", 0)).await.expect("an answer");
        if reported(&response) == "OK: OK 4/5 DAY closed" {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{}", reported(&response));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_asks_the_store_once_for_each_kind_of_descriptor() {
    let redis = RedisServer::start();
    let server = server::start(&format!(
        "[store]\nmode = 'redis'\ntimeout = '2s'\nredis = {{ url = '{}' }}\n\
         [limits]\nwindow = {{ strategy = 'fixed_window', limit = 50, window = '1d' }}\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['user']\nlimit = 'window'\n",
        redis.url()
    ));
    let channel = channel(&server).await;
    let scripts = || -> u64 {
        let stat = redis.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
        let calls = stat.strip_prefix("calls=").and_then(|rest| rest.split(',').next());
        calls.map_or(0, |calls| calls.parse().unwrap())
    };
    let calls = [
        ("user=1; user=2; user=3", 1, "charges"),
        ("user=1 +0; user=2 +0", 1, "looks"),
        ("user=1 -1", 2, "given back, and how it stands then"),
        ("user=1 -1; user=2 +0; user=2 -1; user=3 +0", 2, "given back, and looks"),
        ("user=1 +0; user=2", 2, "looks, and charges"),
        ("user=1 -1; user=2 +0; user=3", 3, "all three"),
    ];
    // The first round loads the scripts.
    for round in ["first", "second"] {
        for (descriptors, expected, what) in calls {
            let before = scripts();
            ask(&channel, call(descriptors, 0)).await.expect("an answer");
            if round == "second" {
                assert_eq!(scripts() - before, expected, "{what}: {descriptors}");
            }
        }
    }
}
