//! `tollgate suggest`: the smallest limits for recorded traffic.

use serde_json::Value;

use crate::binary::Scratch;

const POLICY: &str = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1m'\n\
                      [limits.bucket]\nstrategy = 'token_bucket'\nrate = '1/s'\nburst = 1\n\
                      [limits.unmet]\nblocked = true\n";

/// User n asks n times in one second, a hundred users; user 1 also meets the bucket.
fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("policy.toml", POLICY);
    let mut log = String::from("time,limit,key\n");
    for user in 1..=100 {
        for _ in 0..user {
            log.push_str(&format!("1,api,user:{user}\n"));
        }
    }
    log.push_str("1,bucket,user:1\n1,bucket,user:1\n2,bucket,user:1\n2,bucket,user:1\n");
    scratch.write("log.csv", log);
    scratch
}

fn suggest(scratch: &Scratch, args: &[&str]) -> Value {
    let ended = scratch.run(&[&["suggest", "--config", "policy.toml", "log.csv", "--json"], args].concat());
    ended.done(&args.join(" "));
    serde_json::from_str(&ended.stdout).expect("JSON")
}

#[test]
fn the_smallest_limits_are_found() {
    let scratch = scratch("suggest");
    // One of a hundred keys may be denied: the second hungriest needs 99, and one request of the hungriest is denied.
    let found = suggest(&scratch, &["--limit", "api"]);
    assert_eq!((&found["denied"], &found["per_cent"]), (&"keys".into(), &"1".into()));
    for strategy in found["limits"][0]["strategies"].as_array().expect("a list") {
        assert_eq!(
            (&strategy["number"], &strategy["denied_keys"], &strategy["denied_requests"]),
            (&99.into(), &1.into(), &1.into()),
            "{strategy}"
        );
        let curve: Vec<u64> = strategy["curve"]
            .as_array()
            .expect("a curve")
            .iter()
            .map(|point| point["number"].as_u64().expect("a number"))
            .collect();
        assert_eq!(curve, [100, 100, 100, 99, 98, 95, 90, 75], "{strategy}");
    }
    // 5,050 requests; at 90, 1 + … + 10 = 55 are denied, 1.09 %; at 91 45, 0.89 %.
    let found = suggest(&scratch, &["--limit", "api", "--requests", "1"]);
    for strategy in found["limits"][0]["strategies"].as_array().expect("a list") {
        assert_eq!(
            (&strategy["number"], &strategy["denied_requests"], &strategy["denied_keys"]),
            (&91.into(), &45.into(), &9.into()),
            "{strategy}"
        );
    }
    // The bucket's own rate: two at once, then two where one has come back.
    let found = suggest(&scratch, &["--keys", "0"]);
    let limits = found["limits"].as_array().expect("limits");
    assert_eq!(limits.len(), 2, "nobody met the third");
    let own = limits[1]["strategies"].as_array().expect("a list").last().expect("one");
    assert_eq!(
        (&own["rule"], &own["number"], &own["rate"]),
        (&"1/s, bursts of 3".into(), &3.into(), &"1/s".into())
    );
}

#[test]
fn people_get_a_table_and_a_curve() {
    let scratch = scratch("suggest-text");
    let ended =
        scratch.run(&["suggest", "--config", "policy.toml", "log.csv", "--limit", "api", "--window", "30s"]);
    ended.done("text");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(
        lines[0],
        "api: 5,050 requests of 100 keys; at most 1 % of keys are denied anything, counted in 30s"
    );
    assert!(
        lines[2].starts_with("fixed_window            99 per 30s window")
            && lines[2].ends_with("1 (1.0 %)       1 (<0.1 %)"),
        "{}",
        lines[2]
    );
    assert!(lines[5].starts_with("token_bucket            "), "{}", lines[5]);
    let curve: Vec<&str> = lines[8].split_whitespace().collect();
    assert_eq!(curve, ["fixed_window", "100", "100", "100", "99", "98", "95", "90", "75"]);
}

/// Regression: a window by the clock was suggested the number of one that begins with the first charge, and keys with an override were counted.
#[test]
fn what_is_suggested_is_for_the_limit_of_the_config() {
    let scratch = Scratch::new("suggest-clock");
    let limit = |align: &str| {
        format!(
            "[limits.api]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1m'\n{align}overrides = {{ \"tenant:vip\" = {{ limit = 1000 }} }}\n"
        )
    };
    // Three in the last seconds of a minute, and three in the first of the next one.
    let mut log = String::from("time,limit,key\n");
    for time in [57, 58, 59, 60, 61, 62] {
        log.push_str(&format!("{time},api,user:1\n"));
    }
    log.push_str(&"57,api,tenant:vip\n".repeat(500));
    scratch.write("log.csv", log);
    let fixed = |align: &str| {
        scratch.write("policy.toml", limit(align));
        let found = suggest(&scratch, &["--keys", "0"]);
        let limit = &found["limits"][0];
        assert_eq!([&limit["requests"], &limit["keys"], &limit["with_override"]], [6, 1, 1], "{limit}");
        let strategies = limit["strategies"].as_array().expect("a list").clone();
        // A sliding window knows no edge.
        assert_eq!(
            (&strategies[1]["strategy"], &strategies[1]["number"]),
            (&"sliding_window".into(), &6.into())
        );
        (strategies[0]["number"].clone(), strategies[0]["rule"].clone())
    };
    let (number, of_clock) = fixed("align = 'clock'\n");
    assert_eq!(number, 3, "{of_clock}");
    let (number, of_first) = fixed("");
    assert_eq!(number, 6, "{of_first}");
    let ended = scratch.run(&["suggest", "--config", "policy.toml", "log.csv"]);
    ended.done("text");
    assert!(
        ended.stdout.starts_with("api: 6 requests of 1 key (1 key with an override not counted); "),
        "{}",
        ended.stdout
    );
}

#[test]
fn what_cannot_be_suggested_is_refused() {
    let scratch = scratch("suggest-bad");
    for (args, said) in [
        (&["log.csv", "--limit", "apy"][..], "there is no limit \"apy\"; the config has api, bucket, unmet"),
        (&["log.csv", "--limit", "unmet"], "no request of the log meets one of these limits"),
        (&["log.csv", "--keys", "101"], "\"101\" is no share"),
        (&["log.csv", "--requests", "0.0001"], "\"0.0001\" is no share"),
        (&["log.csv", "--window", "0s"], "--window 0"),
        (&["log.csv", "--window", "soon"], "--window soon: "),
        (&["log.csv", "--keys", "1", "--requests", "1"], "cannot be used with"),
        (&["none.csv"], "cannot read none.csv: No such file"),
    ] {
        let ended = scratch.run(&[&["suggest", "--config", "policy.toml"], args].concat());
        ended.could_not(said);
        assert!(ended.stderr.contains(said), "{args:?}: {}", ended.stderr);
    }
}

#[test]
fn a_key_has_the_hash_that_logs_have() {
    let scratch = Scratch::new("hash");
    let hash = |salt: &str, keys: &[&str]| {
        scratch.command(&[&["hash"], keys].concat()).env("RL_LOG_SALT", salt).output().unwrap()
    };
    let one = hash("pepper", &["user:42"]);
    let text = String::from_utf8(one.stdout).unwrap();
    assert_eq!((one.status.code(), text.len()), (Some(0), 33), "{text}");
    // A key of the default namespace by both of its names.
    let both = String::from_utf8(hash("pepper", &["42", "default:42"]).stdout).unwrap();
    let hashes: Vec<&str> =
        both.lines().map(|line| line.split_once("  ").expect("a hash and a key").0).collect();
    assert_eq!(hashes[0], hashes[1]);
    assert_ne!(hash("salt", &["user:42"]).stdout, text.as_bytes());
    let none = hash("", &["user:42"]);
    assert!(
        none.status.code() == Some(2)
            && String::from_utf8_lossy(&none.stderr).contains("RL_LOG_SALT is not set"),
        "{none:?}"
    );
    let bad = hash("pepper", &["a:b:c:d"]);
    assert!(
        bad.status.code() == Some(2)
            && String::from_utf8_lossy(&bad.stderr).contains("\"a:b:c:d\" is no key: "),
        "{bad:?}"
    );
}
