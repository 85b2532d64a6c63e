//! `tollgate bench`: that it measures every shape and says what it measured. How fast is not tested here.

use crate::binary::Scratch;

#[test]
fn every_shape_is_measured() {
    let scratch = Scratch::new("bench");
    let ended = scratch.run(&["bench", "--keys", "2000", "--threads", "2", "--seconds", "1", "--json"]);
    ended.done("bench");
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let runs = report["runs"].as_array().unwrap();
    let shapes: Vec<(u64, &str, u64)> = runs
        .iter()
        .map(|run| {
            (run["keys"].as_u64().unwrap(), run["call"].as_str().unwrap(), run["threads"].as_u64().unwrap())
        })
        .collect();
    let mut expected = Vec::new();
    for keys in [1, 1000, 2000] {
        for call in ["check", "check_many"] {
            expected.extend([(keys, call, 1), (keys, call, 2)]);
        }
    }
    assert_eq!(shapes, expected);
    for run in runs {
        let latency = &run["latency_ns"];
        assert!(run["checks"].as_u64().unwrap() > 0, "{run}");
        assert!(latency["samples"].as_u64().unwrap() > 0, "{run}");
        let order: Vec<u64> =
            ["p50", "p95", "p99", "p999", "max"].iter().map(|p| latency[p].as_u64().unwrap()).collect();
        assert!(order.is_sorted(), "{run}");
    }
    assert_eq!(report["memory"]["keys"], 2000);
}

/// A config that counts in memory is measured as memory is.
#[test]
fn the_store_of_a_config_is_measured() {
    let scratch = Scratch::new("bench-config");
    scratch.write("policy.toml", "[store]\nmode = \"memory\"\n[limits.api]\nunlimited = true\n");
    for args in [&["--config", "policy.toml"][..], &["--store", "memory"]] {
        let few = ["bench", "--keys", "10", "--threads", "1", "--seconds", "1", "--json"];
        let ended = scratch.run(&[&few, args].concat());
        ended.done("bench");
        let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!((&report["store"], &report["keys"]), (&"memory".into(), &10.into()), "{args:?}");
    }
}

#[test]
fn people_are_told_how_it_was_measured() {
    let scratch = Scratch::new("bench-people");
    let ended = scratch.run(&["bench", "--keys", "100", "--threads", "1", "--seconds", "1"]);
    ended.done("bench");
    for said in
        ["CHECKS/S", "P99.9", "check_many of 16", "sampled: one check in 101 and one group in 11", "Memory: "]
    {
        assert!(ended.stdout.contains(said), "{said}: {}", ended.stdout);
    }
}
