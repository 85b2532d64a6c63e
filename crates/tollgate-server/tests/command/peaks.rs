//! `--peaks`: what each key needed at most, with the limit drawn in, and the sliding counter beside the exact log.

use serde_json::Value;

use crate::binary::Scratch;

#[test]
fn peaks_are_drawn_with_the_limit_between_them() {
    let scratch = Scratch::new("peaks");
    scratch.write(
        "policy.toml",
        "[limits.api]\nstrategy = 'sliding_window_counter'\nlimit = 3\nwindow = '1m'\noverrides = { 'user:9' = { limit = 50 } }\n",
    );
    // User n asks n times within a second, and once more an hour later.
    let mut log = String::from("time,limit,key\n");
    for user in 1..=9 {
        for _ in 0..user {
            log.push_str(&format!("1.{user},api,user:{user}\n"));
        }
        log.push_str(&format!("3600,api,user:{user}\n"));
    }
    scratch.write("log.csv", log);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--peaks"]);
    ended.done("--peaks");
    let drawn: Vec<&str> =
        ended.stdout.lines().skip_while(|line| !line.starts_with("What each key of api")).collect();
    let bar = |tenths: usize| "█".repeat(tenths);
    assert_eq!(
        drawn[1..8],
        [
            &*format!("     1  {} 1", bar(14)),
            &format!("     2  {} 1", bar(14)),
            &format!("     3  {} 1", bar(14)),
            "─────── limit: about 3 in any 1m; 5 keys above",
            &format!("4 to 5  {} 2", bar(27)),
            &format!("6 to 8  {} 3", bar(40)),
            "Half of 8 keys needed at most 4, 90 % 8, 99 % 8, all 8",
        ],
        "{}",
        ended.stdout
    );
    assert_eq!(drawn[8], "1 key with an override left out");
    assert!(ended.stdout.contains("sliding_window_counter beside the exact log of sliding_window"));
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--peaks", "--json"]);
    let summary: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(summary["peaks"][0]["above"], 5);
    assert_eq!(summary["counters"][0]["denied_by_log"], summary["counters"][0]["denied_by_counter"]);
    let plain = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--json"]);
    assert!(!plain.stdout.contains("\"peaks\""), "only where it is asked for: {}", plain.stdout);

    scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--report", "out.html"]).done("a report");
    let page = scratch.read("out.html");
    assert!(page.contains("<path class=\"limit-line\" d=\"M60 0V1000\"/>"), "after three steps of five");
    assert!(page.contains("The line is the limit, 3: 5 keys above; 1 key with an override left out."));
    assert!(page.contains(">Sliding counter beside the exact log</h2>"));
}
