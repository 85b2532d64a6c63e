//! Logs whose format is found out: by what stands in them, and with empty files among them.

use crate::binary::Scratch;

const POLICY: &str =
    "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 20\n\n[[routes]]\nlimit = \"api\"\n";
const CSV: &str = "time,limit,key\n1,api,user:1\n2,api,user:2\n";
const JSONL: &str =
    "{\"time\":1,\"limit\":\"api\",\"key\":\"user:1\"}\n{\"time\":2,\"limit\":\"api\",\"key\":\"user:2\"}\n";
const ACCESS: &str = "192.0.2.1 - - [10/Oct/2000:13:55:36 -0700] \"GET / HTTP/1.1\" 200 9\n\
                      192.0.2.2 - - [10/Oct/2000:13:55:37 -0700] \"GET / HTTP/1.1\" 200 9\n";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("policy.toml", POLICY);
    scratch
}

/// The first line of a log that was cut at midnight is half a line, and the whole log was taken for CSV.
#[test]
fn lines_after_the_first_are_looked_at() {
    let scratch = scratch("later-lines");
    let half = "7 HTTP/1.1\" 200 9\n";
    // Longer than what is read at once.
    let long = format!(
        "192.0.2.1 - - [10/Oct/2000:13:55:36 -0700] \"GET /?{} HTTP/1.1\" 200 9\n",
        "x".repeat(300_000)
    );
    for (log, requests, skipped) in [
        (format!("{half}{ACCESS}"), 2, 1),
        (format!("\n\r\n{half}{half}\n{ACCESS}"), 2, 2),
        (format!("{long}{ACCESS}"), 3, 0),
        (format!("\"limit\":\"api\"}}\n{JSONL}"), 2, 1),
        // A header is a header, whatever comes after it.
        (format!("{CSV}{JSONL}{ACCESS}"), 2, 4),
    ] {
        scratch.write("some.log", &log);
        let ended = scratch.run(&["backtest", "--config", "policy.toml", "some.log", "--json"]);
        ended.done(&log);
        let summary: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(
            (&summary["requests"], &summary["skipped_lines"]),
            (&requests.into(), &skipped.into()),
            "{:.200}",
            log
        );
    }
}

#[test]
fn what_looks_like_nothing_is_told_with_the_formats() {
    let scratch = scratch("neither");
    let hint = "; if it is no CSV, say which with --format combined, json or jsonl\n";
    for (log, hinted) in [
        ("www.example.com:443 client.example.net - - [10/Oct/2000:13:55:36 -0700] \"GET /\" 200 1\n", true),
        ("nonsense\n", true),
        ("time,limit,user\n", false),
    ] {
        scratch.write("some.log", log);
        let ended = scratch.run(&["backtest", "--config", "policy.toml", "some.log"]);
        ended.could_not(log);
        assert!(ended.stderr.starts_with("tollgate: error: some.log:1: no column "), "{}", ended.stderr);
        assert_eq!(ended.stderr.ends_with(hint), hinted, "{}", ended.stderr);
    }
}

/// A log that was rotated and got no line yet ended everything.
#[test]
fn empty_logs_among_others_are_passed_over() {
    let scratch = scratch("empty");
    scratch.write("a.log", ACCESS);
    scratch.write("full.csv", CSV);
    for (name, text) in [("e.log", ""), ("e.csv", "\n\r\n"), ("e.jsonl", "\u{feff}  \n")] {
        scratch.write(name, text);
    }
    for (logs, reported) in [
        (&["e.log", "a.log"][..], "tollgate: note: passed over 1 empty log: e.log\n"),
        (&["full.csv", "e.csv"], "tollgate: note: passed over 1 empty log: e.csv\n"),
        (
            &["e.csv", "full.csv", "e.log", "e.jsonl"],
            "tollgate: note: passed over 3 empty logs: e.csv, e.log, e.jsonl\n",
        ),
    ] {
        let ended = scratch.run(&[&["backtest", "--config", "policy.toml"], logs].concat());
        ended.done(&logs.join(" "));
        assert!(ended.stdout.starts_with("2 requests of 2 keys"), "{logs:?}: {}", ended.stdout);
        assert_eq!(ended.stderr, reported, "{logs:?}");
    }
    for (args, reported) in [
        (&["e.log", "e.csv"][..], "all 2 logs are empty; there is nothing to replay"),
        (&["e.log"], "e.log is empty: CSV begins with the header"),
        // Who says what a log is means that there is one.
        (&["full.csv", "e.csv", "--format", "csv"], "e.csv is empty: CSV begins with the header"),
    ] {
        let ended = scratch.run(&[&["backtest", "--config", "policy.toml"], args].concat());
        ended.could_not(&args.join(" "));
        assert!(
            ended.stderr.starts_with(&format!("tollgate: error: {reported}")),
            "{args:?}: {}",
            ended.stderr
        );
    }
}
