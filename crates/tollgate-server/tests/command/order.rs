//! The order of replay: by time, ties as they came, over several files as if they were one.

use crate::binary::Scratch;

/// One token, and a new one every ten seconds: who is first is served.
const POLICY: &str = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"1/10s\"\nburst = 1\n";

/// (line, allowed, file) of each decision.
fn replayed(scratch: &Scratch, logs: &[&str]) -> Vec<(u64, bool, Option<String>)> {
    let mut args = vec!["backtest", "--config", "policy.toml", "--decisions", "out.jsonl"];
    args.extend(logs);
    scratch.run(&args).done(&logs.join(" "));
    let decisions = scratch.read("out.jsonl");
    decisions
        .lines()
        .map(|line| {
            let decision: serde_json::Value = serde_json::from_str(line).unwrap();
            let file = decision.get("file").map(|file| file.as_str().unwrap().to_string());
            (decision["line"].as_u64().unwrap(), decision["allowed"].as_bool().unwrap(), file)
        })
        .collect()
}

#[test]
fn lines_are_replayed_in_time_order_and_ties_keep_theirs() {
    for (name, log, expected) in [
        ("in order", "1,api,a\n2,api,a\n11,api,a\n", vec![(2, true), (3, false), (4, true)]),
        ("out of order", "11,api,a\n2,api,a\n1,api,a\n", vec![(4, true), (3, false), (2, true)]),
        (
            "ties",
            "5,api,a\n5,api,b\n5.0,api,a\n1970-01-01T00:00:05Z,api,b\n5.000000,api,c\n",
            vec![(2, true), (3, true), (4, false), (5, false), (6, true)],
        ),
        (
            "a tie after a later line",
            "7,api,a\n5,api,a\n7,api,a\n5,api,a\n",
            vec![(3, true), (5, false), (2, false), (4, false)],
        ),
        ("microseconds apart", "1.000001,api,a\n1.000000,api,a\n", vec![(3, true), (2, false)]),
        ("the beginning of time", "0,api,a\n0,api,a\n10,api,a\n", vec![(2, true), (3, false), (4, true)]),
        ("the end of time", "253402207200,api,a\n0,api,a\n", vec![(3, true), (2, true)]),
    ] {
        let scratch = Scratch::new("order");
        scratch.write("policy.toml", POLICY);
        scratch.write("log.csv", format!("time,limit,key\n{log}"));
        let found: Vec<(u64, bool)> =
            replayed(&scratch, &["log.csv"]).into_iter().map(|(line, allowed, _)| (line, allowed)).collect();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn spellings_of_a_key_share_its_state_and_are_shown_as_written() {
    let scratch = Scratch::new("spellings");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,limit,key\n1,api,a\n1,api,default:a\n1,api,x:%3a\n1,api,x:%3A\n");
    let ended = scratch.run(&[
        "backtest",
        "--config",
        "policy.toml",
        "log.csv",
        "--json",
        "--decisions",
        "out.jsonl",
    ]);
    ended.done("spellings");
    let decisions = scratch.read("out.jsonl");
    for (line, said) in decisions.lines().zip([
        "\"key\":\"a\",\"cost\":1,\"allowed\":true",
        "\"key\":\"default:a\",\"cost\":1,\"allowed\":false",
        "\"key\":\"x:%3a\",\"cost\":1,\"allowed\":true",
        "\"key\":\"x:%3A\",\"cost\":1,\"allowed\":false",
    ]) {
        assert!(line.contains(said), "{said}: {line}");
    }
    assert!(ended.stdout.contains("\"requests\":4,\"keys\":2,"), "{}", ended.stdout);
}

/// Where lines end with a carriage return alone, a file is one physical line. Taken for one charge its records would cost two
/// together, and both be denied.
#[test]
fn records_on_one_physical_line_are_charged_by_themselves() {
    let scratch = Scratch::new("returns");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,limit,key\r1,api,a\r1,api,a\r");
    let found: Vec<bool> =
        replayed(&scratch, &["log.csv"]).into_iter().map(|(_, allowed, _)| allowed).collect();
    assert_eq!(found, [true, false]);
}

#[test]
fn several_files_are_one_stream() {
    let scratch = Scratch::new("files");
    scratch.write("policy.toml", POLICY);
    scratch.write("b.csv", "time,limit,key\n3,api,a\n1,api,a\n");
    scratch.write(
        "a.jsonl",
        "{\"time\":3,\"limit\":\"api\",\"key\":\"a\"}\n\n{\"time\":1,\"limit\":\"api\",\"key\":\"a\"}\n",
    );
    let file = |name: &str| Some(name.to_string());
    // Ties keep the order of the files on the command line, then of their lines.
    assert_eq!(
        replayed(&scratch, &["b.csv", "a.jsonl"]),
        [
            (3, true, file("b.csv")),
            (3, false, file("a.jsonl")),
            (2, false, file("b.csv")),
            (1, false, file("a.jsonl"))
        ]
    );
    assert_eq!(
        replayed(&scratch, &["a.jsonl", "b.csv"]),
        [
            (3, true, file("a.jsonl")),
            (3, false, file("b.csv")),
            (1, false, file("a.jsonl")),
            (2, false, file("b.csv"))
        ]
    );
    // The field comes last; with one file there is none.
    assert!(
        scratch
            .read("out.jsonl")
            .lines()
            .all(|line| line.ends_with(".csv\"}") || line.ends_with(".jsonl\"}"))
    );
    assert!(replayed(&scratch, &["b.csv"]).iter().all(|(_, _, file)| file.is_none()));
}

#[test]
fn physical_lines_are_counted_as_an_editor_does() {
    let scratch = Scratch::new("lines");
    scratch.write("policy.toml", POLICY);
    for (name, log, lines) in [
        ("CRLF", "time,limit,key\r\n1,api,a\r\n2,api,b\r\n", vec![2, 3]),
        ("blank lines", "\n\ntime,limit,key\n\n1,api,a\n\r\n\n2,api,b", vec![5, 8]),
        ("a field over three lines", "time,note,limit,key\n1,\"x\ny\n\nz\",api,a\n2,,api,b\n", vec![2, 6]),
        ("a byte order mark", "\u{feff}time,limit,key\n1,api,a\n", vec![2]),
    ] {
        scratch.write("log.csv", log);
        let found: Vec<u64> = replayed(&scratch, &["log.csv"]).into_iter().map(|(line, _, _)| line).collect();
        assert_eq!(found, lines, "{name}");
    }
    scratch.write(
        "log",
        "\n{\"time\":1,\"limit\":\"api\",\"key\":\"a\"}\r\n  \n{\"time\":2,\"limit\":\"api\",\"key\":\"a\"}",
    );
    let found: Vec<u64> = replayed(&scratch, &["log"]).into_iter().map(|(line, _, _)| line).collect();
    assert_eq!(found, [2, 4], "JSONL");
}
