//! Whatever is wrong is reported with its file, line, field, value and fix; nothing is replayed and no file is left behind.

use crate::binary::Scratch;

const POLICY: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "10/s"
burst = 20

[limits.login]
strategy = "fixed_window"
limit = 5
window = "1m"
"#;

/// Runs a backtest of one log that cannot be replayed, and gives stderr.
fn refused(name: &str, file: &str, log: &[u8]) -> String {
    let scratch = Scratch::new("bad");
    scratch.write("policy.toml", POLICY);
    scratch.write(file, log);
    let ended =
        scratch.run(&["backtest", "--strict", "--config", "policy.toml", file, "--decisions", "out.jsonl"]);
    ended.could_not(name);
    assert_eq!(scratch.files(), [file, "policy.toml"], "{name}: a file was left behind");
    ended.stderr
}

#[test]
fn bad_lines_of_csv_are_reported() {
    let long_key = format!("1,api,{}", "k".repeat(1025));
    for (line, reported) in [
        (
            "yesterday,api,a,1",
            "log.csv:3: time = \"yesterday\": write RFC 3339, such as 2024-05-01T12:00:00Z, or UNIX",
        ),
        (",api,a,1", "log.csv:3: time = \"\": write RFC 3339"),
        (
            "1700000000.1234567,api,a,1",
            "log.csv:3: time = \"1700000000.1234567\": write at most six decimals",
        ),
        (
            "2024-05-01T12:00:00.1234567Z,api,a,1",
            "log.csv:3: time = \"2024-05-01T12:00:00.1234567Z\": write at most six",
        ),
        (
            "2024-05-01T12:00:00,api,a,1",
            "log.csv:3: time = \"2024-05-01T12:00:00\": end it with Z or an offset",
        ),
        (
            "2024-02-30T12:00:00Z,api,a,1",
            "log.csv:3: time = \"2024-02-30T12:00:00Z\": write a day and an hour that exist",
        ),
        ("-5,api,a,1", "log.csv:3: time = \"-5\": write a time in 1970 or later"),
        (
            "1700000000000,api,a,1",
            "log.csv:3: time = \"1700000000000\": write UNIX seconds; a number this large",
        ),
        ("1.7e9,api,a,1", "log.csv:3: time = \"1.7e9\": write the digits out"),
        ("1,api,a,0", "log.csv:3: cost = \"0\": must be at least 1: a charge of nothing is a peek"),
        ("1,api,a,-1", "log.csv:3: cost = \"-1\": write a whole number, at least 1"),
        ("1,api,a,1.5", "log.csv:3: cost = \"1.5\": write a whole number, at least 1"),
        ("1,api,a,many", "log.csv:3: cost = \"many\": write a whole number, at least 1"),
        (
            "1,api,a,9223372036854775808",
            "log.csv:3: cost = \"9223372036854775808\": must be at most 9007199254740991",
        ),
        (
            "1,api,a,99999999999999999999",
            "log.csv:3: cost = \"99999999999999999999\": must be at most 9007199254740991",
        ),
        ("1,api,,1", "log.csv:3: key = \"\": "),
        ("1,api,a:b:c:d,1", "log.csv:3: key = \"a:b:c:d\": "),
        ("1,api,:,1", "log.csv:3: key = \":\": "),
        ("1,api,100%,1", "log.csv:3: key = \"100%\": "),
        ("1,api,a\tb,1", "log.csv:3: key = \"a\\tb\": "),
        (&long_key, "log.csv:3: key = \"kkkkk"),
        ("1,api", "log.csv:3: key is missing: write the key"),
        ("1", "log.csv:3: limit is missing: name a limit of the config: api, login"),
        ("1,,a,1", "log.csv:3: limit is missing: name a limit of the config: api, login"),
        ("1,apy,a,1", "log.csv:3: limit = \"apy\": name a limit of the config: api, login"),
        ("1,api,a,1,extra", "log.csv:3: line = \"extra\": stands beyond the 4 columns of the header"),
        (
            "1,api,a,\"1",
            "log.csv:3: line = \"1,api,a,\\\"1\": has a quote that is not closed within 16 lines or 64 KiB",
        ),
    ] {
        let log = format!("time,limit,key,cost\n1,api,a,1\n{line}\n5,login,b,1\n");
        let stderr = refused(line, "log.csv", log.as_bytes());
        assert!(stderr.starts_with(reported), "{line}: {stderr}");
        assert!(stderr.contains("tollgate: error: 1 bad line in the log; nothing was replayed"), "{stderr}");
        assert_eq!(stderr.lines().count(), 2, "{stderr}");
    }
    let stderr = refused("not UTF-8", "log.csv", b"time,limit,key\n1,api,a\n\n1,api,\xff\xfe\n");
    assert!(stderr.starts_with("log.csv:4: key = \"\u{fffd}\u{fffd}\": is not UTF-8"), "{stderr}");
}

/// It opened a field that swallowed all lines after it, with one bad line reported.
#[test]
fn a_stray_quote_or_an_endless_line_costs_one_line_of_a_csv_log() {
    let scratch = Scratch::new("stray");
    scratch.write("policy.toml", POLICY);
    let endless = format!("9,api,{}", "x".repeat(3 << 20));
    for bad in ["9,api,\"b", &endless] {
        for first in ["1,api,a", "1,api,\"a\""] {
            let good = |n: usize| format!("{n},api,user:{}\n", n % 7);
            let before: String = (2..9).map(good).collect();
            let after: String = (10..10_000).map(good).collect();
            scratch.write("log.csv", format!("time,limit,key\n{first}\n{before}{bad}\n{after}"));
            let ended = scratch.run(&["backtest", "--config", "policy.toml", "--json", "log.csv"]);
            ended.done(bad.get(..8).unwrap());
            let summary: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
            let counts = [&summary["requests"], &summary["skipped_lines"]];
            assert_eq!(counts, [9_998, 1], "{bad:.20} {first}: {}", ended.stderr);
            let line = summary["first_skipped"][0].as_str().unwrap();
            assert!(line.starts_with("log.csv:10: line = \"9,api,"), "{line}");
        }
    }
}

#[test]
fn bad_lines_of_jsonl_are_reported() {
    for (line, reported) in [
        (
            r#"{"time":1,"limit":"api","key":"a""#,
            "log.jsonl:3: line = {\"time\":1,\"limit\":\"api\",\"key\":\"a\": write one JSON object a line (EOF",
        ),
        (r#"{"time":1,"limit":"api","ke"#, "log.jsonl:3: line = {\"time\":1,"),
        ("[1]", "log.jsonl:3: line = [1]: write one JSON object a line ("),
        ("time,limit,key", "log.jsonl:3: line = time,limit,key: write one JSON object a line ("),
        (r#"{"time":1,"time":2,"limit":"api","key":"a"}"#, "log.jsonl:3: line = "),
        (r#"{"limit":"api","key":"a"}"#, "log.jsonl:3: time is missing: say when it happened"),
        (r#"{"time":null,"limit":"api","key":"a"}"#, "log.jsonl:3: time is missing: say when it happened"),
        (
            r#"{"time":1700000000.1234567,"limit":"api","key":"a"}"#,
            "log.jsonl:3: time = \"1700000000.1234567\": write at most six",
        ),
        (r#"{"time":1.7e9,"limit":"api","key":"a"}"#, "log.jsonl:3: time = \"1.7e9\": write the digits out"),
        (
            r#"{"time":-1,"limit":"api","key":"a"}"#,
            "log.jsonl:3: time = \"-1\": write a time in 1970 or later",
        ),
        (r#"{"time":true,"limit":"api","key":"a"}"#, "log.jsonl:3: time = true: write a number or a text"),
        (r#"{"time":1,"key":"a"}"#, "log.jsonl:3: limit is missing: name a limit of the config: api, login"),
        (
            r#"{"time":1,"limit":7,"key":"a"}"#,
            "log.jsonl:3: limit = 7: write a text in quotes, such as \"api\"",
        ),
        (
            r#"{"time":1,"limit":"nope","key":"a"}"#,
            "log.jsonl:3: limit = \"nope\": name a limit of the config: api, login",
        ),
        (r#"{"time":1,"limit":"api"}"#, "log.jsonl:3: key is missing: write the key"),
        (
            r#"{"time":1,"limit":"api","key":42}"#,
            "log.jsonl:3: key = 42: write a text in quotes, such as \"user:42\"",
        ),
        (r#"{"time":1,"limit":"api","key":""}"#, "log.jsonl:3: key = \"\": "),
        (r#"{"time":1,"limit":"api","key":{"key":""}}"#, "log.jsonl:3: key = {\"key\":\"\"}: "),
        (r#"{"time":1,"limit":"api","key":"a\u0000b"}"#, "log.jsonl:3: key = \"a\\0b\": "),
        (r#"{"time":1,"limit":"api","key":"a","cost":0}"#, "log.jsonl:3: cost = \"0\": must be at least 1"),
        (
            r#"{"time":1,"limit":"api","key":"a","cost":-3}"#,
            "log.jsonl:3: cost = \"-3\": write a whole number",
        ),
        (
            r#"{"time":1,"limit":"api","key":"a","cost":1.0}"#,
            "log.jsonl:3: cost = \"1.0\": write a whole number",
        ),
        (
            r#"{"time":1,"limit":"api","key":"a","cost":9223372036854775808}"#,
            "log.jsonl:3: cost = \"9223372036854775808\": must be at most",
        ),
        (
            r#"{"time":1,"limit":"api","key":"a","cost":{}}"#,
            "log.jsonl:3: cost = {}: write a number or a text",
        ),
    ] {
        let good = r#"{"time":1,"limit":"api","key":"a"}"#;
        let stderr = refused(line, "log.jsonl", format!("{good}\n\n{line}\n{good}\n").as_bytes());
        assert!(stderr.starts_with(reported), "{line}: {stderr}");
        assert_eq!(stderr.lines().count(), 2, "{stderr}");
    }
    let stderr = refused("not UTF-8", "log.jsonl", b"{\"time\":1,\"limit\":\"api\",\"key\":\"\xff\"}\n");
    assert!(stderr.starts_with("log.jsonl:1: line = "), "{stderr}");
    assert!(stderr.contains("is not UTF-8"), "{stderr}");
}

#[test]
fn files_that_are_no_logs_are_refused_in_one_line() {
    for (file, log, reported) in [
        ("log.csv", &b""[..], "log.csv is empty: CSV begins with the header time,limit,key,cost"),
        ("log.csv", b"\n\r\n\n", "log.csv is empty: CSV begins with the header"),
        ("log.jsonl", b"", "log.jsonl is empty: JSONL has an object a line"),
        ("log.jsonl", b"  \n\n", "log.jsonl is empty: JSONL has an object a line"),
        (
            "log.csv",
            b"time,limit,user\n1,api,a\n",
            "log.csv:1: no column key; name the columns time, limit, key",
        ),
        ("log.csv", b"\ntime,key\n1,a\n", "log.csv:2: no column limit; name the columns"),
        ("log.csv", b"1700000000,api,user:1\n", "log.csv:1: no column time; name the columns"),
        ("log.csv", b"time,limit,key,key\n", "log.csv:1: the column key stands twice"),
        ("log.bin", &[0u8; 2_000_000], "cannot read log.bin: line 1 is longer than 1 MiB"),
    ] {
        let stderr = refused(reported, file, log);
        assert!(stderr.starts_with(&format!("tollgate: error: {reported}")), "{reported}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn calls_that_cannot_be_answered_are_told_in_one_line() {
    let scratch = Scratch::new("calls");
    scratch.write("policy.toml", POLICY);
    scratch.write("broken.toml", "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 0\n");
    scratch.write("log.csv", "time,limit,key\n1,api,a\n");
    std::fs::create_dir(scratch.path("folder")).unwrap();
    let before = scratch.files();
    for (args, reported) in [
        (
            &["backtest", "--config", "policy.toml", "none.csv"][..],
            "cannot read none.csv: No such file or directory",
        ),
        (
            &["backtest", "--config", "none.toml", "log.csv"],
            "cannot read none.toml: No such file or directory",
        ),
        (
            &["backtest", "--config", "policy.toml", "folder"],
            "cannot read folder: it is a directory; name a file in it",
        ),
        (
            &["backtest", "--config", "folder", "log.csv"],
            "cannot read folder: it is a directory; name a file in it",
        ),
        (&["backtest", "--config", "broken.toml", "log.csv"], "1 mistake in broken.toml"),
        (&["backtest", "--config", "-", "-"], "stdin can be read once; name - for one input only"),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--format", "combined"],
            "cannot replay log.csv: an access log does not say which limits its requests meet, and policy.toml has no",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "none/out.jsonl"],
            "cannot write none/out.jsonl: No such file or directory",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "folder"],
            "cannot write folder: it is a directory; name a file in it",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "log.csv"],
            "cannot write log.csv: it is one of the logs; name another file",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "./folder/../policy.toml"],
            "cannot write ./folder/../policy.toml: it is the config; name another file",
        ),
        (
            &["backtest", "--config", "policy.toml"],
            "the following required arguments were not provided: <LOG>...; --help tells more",
        ),
        (
            &["backtest", "log.csv"],
            "the following required arguments were not provided: --config <FILE>; --help tells more",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--format", "xml"],
            "invalid value 'xml' for '--format <FORMAT>'",
        ),
        (
            &["backtest", "--confg", "policy.toml", "log.csv"],
            "unexpected argument '--confg' found; a similar argument exists: '--config'",
        ),
        (
            &["validat", "policy.toml"],
            "unrecognized subcommand 'validat'; a similar subcommand exists: 'validate'",
        ),
        (&["sreve"], "unrecognized subcommand 'sreve'; "),
        (
            &["bench", "--store", "redis"],
            "cannot measure the store \"redis\": write --store memory, redis://…, rediss://… or postgres://…, or name",
        ),
        (
            &["bench", "--store", "http://me:hunter2@there"],
            "cannot measure that store: write --store memory,",
        ),
        (&["bench", "--store", "redis://:hunter2@there:port"], "cannot measure redis: 1 mistake"),
        (
            &["bench", "--store", "redis://:hunter2@127.0.0.1:1"],
            "cannot measure redis: could not connect to Redis at 127.0.0.1:1",
        ),
        (
            &["bench", "--store", "postgres://me:hunter2@:x/app"],
            "cannot measure postgres: store.postgres.url: not a PostgreSQL URL",
        ),
        (
            &["bench", "--store", "postgres://me:hunter2@127.0.0.1:1/app"],
            "cannot measure postgres: PostgreSQL at 127.0.0.1:1/app",
        ),
        (
            &["bench", "--store", "memory", "--config", "policy.toml"],
            "the argument '--store <STORE>' cannot be used",
        ),
        (&["bench", "--config", "none.toml"], "cannot read none.toml: No such file or directory"),
        (&["bench", "--config", "broken.toml"], "1 mistake in broken.toml"),
        (
            &["bench", "--callers", "3"],
            "--callers is for a shared store; the memory store is measured with --threads",
        ),
        (&["bench", "--store", "redis://there", "--callers", "0"], "invalid value '0' for '--callers <N>'"),
        (&["bench", "--keys", "0"], "invalid value '0' for '--keys <N>'"),
    ] {
        let ended = scratch.run(args);
        ended.could_not(&args.join(" "));
        let last = ended.stderr.lines().last().unwrap();
        assert!(last.starts_with(&format!("tollgate: error: {reported}")), "{args:?}: {last}");
        assert!(!ended.stderr.contains("hunter2"), "{args:?}: {}", ended.stderr);
        assert_eq!(scratch.files(), before, "{args:?}: a file was left behind");
    }
    assert_eq!(scratch.read("log.csv"), "time,limit,key\n1,api,a\n");
}

#[test]
fn twenty_bad_lines_are_told_and_skipping_counts_them_all() {
    let scratch = Scratch::new("many-bad");
    scratch.write("policy.toml", POLICY);
    let mut log = "time,limit,key,cost\n1,api,a,1\n".to_string();
    log.push_str(&"1,api,a,0\n".repeat(30));
    log.push_str("2,api,b,1\n");
    scratch.write("log.csv", &log);

    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--strict"]);
    ended.could_not("thirty bad lines");
    let lines: Vec<&str> = ended.stderr.lines().collect();
    assert_eq!(lines.len(), 21);
    assert!(lines[0].starts_with("log.csv:3: cost = \"0\""), "{}", lines[0]);
    assert!(lines[19].starts_with("log.csv:22: cost = \"0\""), "{}", lines[19]);
    assert!(lines[20].contains("20 bad lines in the log, and the rest was not read"), "{}", lines[20]);

    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--json"]);
    ended.done("bad lines are counted");
    assert!(
        ended.stdout.starts_with("{\"requests\":2,\"keys\":2,\"allowed\":2,\"denied\":0,"),
        "{}",
        ended.stdout
    );
    assert!(ended.stdout.contains("\"skipped_lines\":30"), "{}", ended.stdout);
    // What scripts have that were written before this was the default.
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--skip-bad"]);
    let shown: Vec<&str> =
        ended.stdout.lines().skip_while(|line| *line != "30 bad lines left out:").skip(1).take(6).collect();
    assert!(shown[0].starts_with("  log.csv:3: cost = \"0\": must be at least 1"), "{}", ended.stdout);
    assert!(shown[4].starts_with("  log.csv:7: cost") && shown[5] == "  and 25 more", "{}", ended.stdout);
}

/// A file of which nothing can be read is no log, and an answer of no requests would look like one.
#[test]
fn a_log_without_a_good_line_is_refused() {
    let scratch = Scratch::new("all-bad");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,limit,key\nx,api,a\ny,api,a\n");
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv"]);
    ended.could_not("no good line");
    assert!(ended.stderr.starts_with("log.csv:2: time = \"x\": "), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("2 bad lines in the log; nothing was replayed, because no line could be read")
    );
}
