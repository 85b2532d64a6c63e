//! Every strategy, with answers worked out by hand from the rules of the documentation, in every way to write a log.
//!
//! A row is: seconds since the start, cost, then the answer: allowed or not, remaining, retry after, reset after and delay in
//! microseconds. The start is a multiple of the windows, so that aligned windows can be followed by eye.

use crate::binary::Scratch;

/// 2023-11-14T22:13:20Z, a multiple of ten seconds.
const START: u64 = 1_700_000_000;

const POLICY: &str = r#"
[limits.token]
strategy = "token_bucket"
rate = "2/s"
burst = 4

[limits.sevenths]
strategy = "token_bucket"
rate = "7/s"
burst = 1

[limits.leaky]
strategy = "leaky_bucket"
rate = "2/s"
capacity = 3

[limits.first]
strategy = "fixed_window"
limit = 3
window = "10s"

[limits.clock]
strategy = "fixed_window"
limit = 3
window = "10s"
align = "clock"

[limits.log]
strategy = "sliding_window"
limit = 3
window = "10s"
overrides = { "user:vip" = { limit = 5 }, "user:banned" = { blocked = true }, "user:free" = { unlimited = true } }

[limits.counter]
strategy = "sliding_window_counter"
limit = 10
window = "10s"

[limits.leases]
strategy = "concurrency"
limit = 2
lease = "10s"

[limits.open]
unlimited = true

[limits.shut]
blocked = true

[limits.watching]
strategy = "fixed_window"
limit = 1
window = "10s"
shadow = true
"#;

/// (limit, key, rows)
const GOLDEN: &[(&str, &str, &str)] = &[
    // A token weighs 500,000 µs; the bucket holds four. At 0.499999 a microsecond is missing.
    (
        "token",
        "user:1",
        "0         3  yes 1    0        1500000  0
         0         2  no  1    500000   1500000  0
         0.499999  2  no  1    1        1000001  0
         0.5       2  yes 0    0        2000000  0
         0.75      5  no  0    null     1750000  0
         10        1  yes 3    0        500000   0",
    ),
    // Seven a second: 1,000,000 / 7 is no whole number, and the waits round up.
    (
        "sevenths",
        "user:1",
        "0         1  yes 0    0        142858   0
         0.142857  1  no  0    1        1        0
         0.142858  1  yes 0    0        142858   0",
    ),
    // The delay is what is ahead: each of three waits half a second longer than the one before.
    (
        "leaky",
        "user:1",
        "0         1  yes 2    0        500000   0
         0         1  yes 1    0        1000000  500000
         0         1  yes 0    0        1500000  1000000
         0         1  no  0    500000   1500000  0
         0.25      1  no  0    250000   1250000  0
         1         2  yes 0    0        1500000  500000
         1         4  no  0    null     1500000  0",
    ),
    // The window opens with the first charge, at 5, and is over at exactly 15.
    (
        "first",
        "user:1",
        "5         2  yes 1    0        10000000 0
         7         2  no  1    8000000  8000000  0
         14.999999 1  yes 0    0        1        0
         15        1  yes 2    0        10000000 0
         16        4  no  2    null     9000000  0",
    ),
    // Windows start at multiples of ten seconds, whenever the first charge comes.
    (
        "clock",
        "user:1",
        "5         2  yes 1    0        5000000  0
         9.999999  2  no  1    1        1        0
         10        3  yes 0    0        10000000 0
         12        1  no  0    8000000  8000000  0",
    ),
    // An entry is gone at exactly its time plus the window: at 9.999999 it still counts, at 10 it does not.
    (
        "log",
        "user:1",
        "0         1  yes 2    0        10000000 0
         4         2  yes 0    0        10000000 0
         5         1  no  0    5000000  9000000  0
         9.999999  1  no  0    1        4000001  0
         10        1  yes 0    0        10000000 0
         11        3  no  0    9000000  9000000  0
         20        3  yes 0    0        10000000 0
         21        4  no  0    null     9000000  0",
    ),
    // Overrides: more, nothing, anything.
    ("log", "user:vip", "1         5  yes 0    0        10000000 0"),
    ("log", "user:banned", "1         1  no  0    null     0        0"),
    ("log", "user:free", "1         9  yes null 0        0        0"),
    // At 12, eight tenths of the eight from the last window count: 6.4 + 3 fits, 6.4 + 4 fits half a second later. Seven more
    // than the four of this window fit in the next one, once a quarter of those four has slid out.
    (
        "counter",
        "user:1",
        "2         8  yes 2    0        18000000 0
         12        3  yes 0    0        18000000 0
         12        1  no  0    500000   18000000 0
         12.5      1  yes 0    0        17500000 0
         13        7  no  0    9500000  17000000 0
         13        11 no  0    null     17000000 0",
    ),
    // Nobody gives a lease back here, so each lasts ten seconds and is over at exactly its end.
    (
        "leases",
        "user:1",
        "0         1  yes 1    0        10000000 0
         1         1  yes 0    0        10000000 0
         2         1  no  0    8000000  9000000  0
         10        1  yes 0    0        10000000 0
         10        3  no  0    null     10000000 0",
    ),
    ("open", "user:1", "3         5  yes null 0        0        0"),
    ("shut", "user:1", "3         5  no  0    null     0        0"),
    // A shadow limit lets the second one through, and says that it would not have.
    (
        "watching",
        "user:1",
        "3         1  yes 0    0        10000000 0
         4         1  would 0  9000000  9000000  0
         13        1  yes 0    0        10000000 0",
    ),
];

struct Row {
    us: u64,
    limit: &'static str,
    key: &'static str,
    cost: &'static str,
    /// The decision from `time_us` on.
    decision: String,
}

/// All rows in the order of time; those of one instant as they stand above.
fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for &(limit, key, text) in GOLDEN {
        for line in text.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [time, cost, answer, remaining, retry, reset, delay] = fields[..] else { panic!("{line}") };
            let (seconds, decimals) = time.split_once('.').unwrap_or((time, ""));
            let us = seconds.parse::<u64>().unwrap() * 1_000_000
                + format!("{decimals:0<6}").parse::<u64>().unwrap();
            let time_us = START * 1_000_000 + us;
            let allowed = answer != "no";
            let would = if answer == "would" { ",\"would_deny\":true" } else { "" };
            let decision = format!(
                "\"time_us\":{time_us},\"limit\":\"{limit}\",\"key\":\"{key}\",\"cost\":{cost},\"allowed\":{allowed},\
                 \"remaining\":{remaining},\"retry_after_us\":{retry},\"reset_after_us\":{reset},\"delay_us\":{delay}{would}}}"
            );
            rows.push(Row { us, limit, key, cost, decision });
        }
    }
    rows.sort_by_key(|row| row.us);
    rows
}

fn decisions(rows: &[Row], first_line: usize) -> String {
    (first_line..).zip(rows).map(|(line, row)| format!("{{\"line\":{line},{}\n", row.decision)).collect()
}

fn unix(us: u64) -> String {
    format!("{}.{:06}", START + us / 1_000_000, us % 1_000_000)
}

/// The start is 00:13:20 at two hours east.
fn rfc3339(us: u64) -> String {
    format!("2023-11-15T00:13:{:02}.{:06}+02:00", 20 + us / 1_000_000, us % 1_000_000)
}

#[test]
fn every_strategy_answers_as_worked_out_by_hand_in_every_format() {
    let rows = rows();
    let scratch = Scratch::new("golden");
    scratch.write("policy.toml", POLICY);
    let csv = |time: fn(u64) -> String| {
        rows.iter().fold("time,limit,key,cost\n".to_string(), |text, row| {
            text + &format!("{},{},{},{}\n", time(row.us), row.limit, row.key, row.cost)
        })
    };
    let shuffled_columns =
        rows.iter().fold("path,cost,\"key\",time,limit\r\n\r\n".to_string(), |text, row| {
            text + &format!("\"/a,b\",{},\"{}\",{},{}\r\n", row.cost, row.key, unix(row.us), row.limit)
        });
    let jsonl = |time: fn(u64) -> String| {
        rows.iter().fold(String::new(), |text, row| {
            let (key, limit, cost) = (row.key, row.limit, row.cost);
            text + &format!(
                "{{\"time\":{},\"limit\":\"{limit}\",\"key\":\"{key}\",\"cost\":{cost}}}\n",
                time(row.us)
            )
        })
    };
    let with_parts =
        jsonl(unix).replace("\"key\":\"user:1\"", "\"key\":{\"key\":\"1\",\"namespace\":\"user\"}");
    for (name, log, first_line) in [
        ("unix.csv", csv(unix), 2),
        ("rfc3339.csv", csv(rfc3339), 2),
        ("columns.csv", shuffled_columns, 3),
        ("unix.jsonl", jsonl(unix), 1),
        ("rfc3339.jsonl", jsonl(|us| format!("\"{}\"", rfc3339(us))), 1),
        ("parts.jsonl", with_parts, 1),
    ] {
        scratch.write(name, log);
        let ended = scratch.run(&["backtest", "--config", "policy.toml", name, "--decisions", "out.jsonl"]);
        ended.done(name);
        let (found, expected) = (scratch.read("out.jsonl"), decisions(&rows, first_line));
        for (found, expected) in found.lines().zip(expected.lines()) {
            assert_eq!(found, expected, "{name}");
        }
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn the_summary_counts_what_the_decisions_say() {
    let rows = rows();
    let scratch = Scratch::new("golden-summary");
    scratch.write("policy.toml", POLICY);
    let log = rows.iter().fold("time,limit,key,cost\n".to_string(), |text, row| {
        text + &format!("{},{},{},{}\n", unix(row.us), row.limit, row.key, row.cost)
    });
    scratch.write("log.csv", log);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--json"]);
    ended.done("--json");
    let summary: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let count = |text: &str| rows.iter().filter(|row| row.decision.contains(text)).count() as u64;
    let denied = count("\"allowed\":false");
    assert_eq!(summary["requests"], rows.len() as u64);
    assert_eq!(summary["keys"], 4);
    assert_eq!(summary["denied"], denied);
    assert_eq!(summary["allowed"], rows.len() as u64 - denied);
    assert_eq!(summary["would_deny"], 1);
    assert_eq!(summary["skipped_lines"], 0);
    assert_eq!(summary["from_us"], START * 1_000_000);
    assert_eq!(summary["to_us"], (START + 21) * 1_000_000);
    for limit in summary["limits"].as_array().unwrap() {
        let name = limit["limit"].as_str().unwrap();
        let of_limit = |more: &str| {
            let of = format!("\"limit\":\"{name}\"");
            rows.iter().filter(|row| row.decision.contains(&of) && row.decision.contains(more)).count() as u64
        };
        assert_eq!(limit["requests"], of_limit(""), "{name}");
        assert_eq!(limit["denied"], of_limit("\"allowed\":false"), "{name}");
        assert_eq!(limit["would_deny"], of_limit("would_deny"), "{name}");
        assert_eq!(limit["keys"], if name == "log" { 4 } else { 1 }, "{name}");
    }
    assert_eq!(summary["most_denied"][0]["key"], "user:1");
    assert_eq!(summary["most_denied"][0]["denied"], denied - 1);
    assert_eq!(summary["most_denied"][1]["key"], "user:banned");
    let buckets = summary["over_time"]["buckets"].as_array().unwrap();
    let sum = |field: &str| buckets.iter().map(|bucket| bucket[field].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("allowed"), sum("denied")), (rows.len() as u64 - denied, denied));

    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv"]);
    ended.done("for people");
    for said in [
        format!("{} requests of 4 keys, 2023-11-14T22:13:20Z to 2023-11-14T22:13:41Z (21s)", rows.len()),
        "shadow limits would have denied 1 more".to_string(),
        "Denied most".to_string(),
        "Over time, 1s a row".to_string(),
    ] {
        assert!(ended.stdout.contains(&said), "{said}: {}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\x1b'), "colour is for terminals");
}

#[test]
fn every_key_has_a_state_of_its_own_however_many_there_are() {
    const KEYS: u64 = 20_000;
    let scratch = Scratch::new("many-keys");
    let policy = [
        ("token", "strategy = \"token_bucket\"\nrate = \"1/h\"\nburst = 1"),
        ("first", "strategy = \"fixed_window\"\nlimit = 1\nwindow = \"1h\""),
        ("log", "strategy = \"sliding_window\"\nlimit = 1\nwindow = \"1h\""),
        ("counter", "strategy = \"sliding_window_counter\"\nlimit = 1\nwindow = \"1h\""),
        ("leases", "strategy = \"concurrency\"\nlimit = 1\nlease = \"1h\""),
    ];
    let text: String = policy.iter().map(|(name, fields)| format!("[limits.{name}]\n{fields}\n")).collect();
    scratch.write("policy.toml", text);
    // Each key comes twice under each limit: the first time it passes, the second time it is denied.
    let mut log = "time,limit,key\n".to_string();
    for round in 0..2 {
        for key in 0..KEYS {
            for (name, _) in policy {
                log.push_str(&format!("{}.{key:06},{name},user:{key}\n", START + round));
            }
        }
    }
    scratch.write("log.csv", log);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--json"]);
    ended.done("many keys");
    let summary: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(summary["keys"], KEYS);
    for limit in summary["limits"].as_array().unwrap() {
        assert_eq!(
            (&limit["keys"], &limit["allowed"], &limit["denied"]),
            (&KEYS.into(), &KEYS.into(), &KEYS.into())
        );
    }
}
