//! Logs as they come: packed, as JSON of web servers and proxies, and what Tollgate itself writes.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::Value;

use crate::binary::Scratch;

const POLICY: &str = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 2\nwindow = '1m'\n\n\
                      [[routes]]\nlimit = 'api'\npath = '/api/*'\n";

const CSV: &str = "time,limit,key\n1,api,user:1\n2,api,user:1\n3,api,user:1\n4,api,user:2\n";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("policy.toml", POLICY);
    scratch
}

/// (requests, denied, keys, met no route, bad lines) of a log.
fn counts(scratch: &Scratch, args: &[&str]) -> [u64; 5] {
    let ended = scratch.run(&[&["backtest", "--config", "policy.toml", "--json"], args].concat());
    ended.done(&args.join(" "));
    let summary: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    ["requests", "denied", "keys", "unmet", "skipped_lines"]
        .map(|field| summary[field].as_u64().expect("a count"))
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn packed_logs_are_unpacked_whatever_they_are_called() {
    let scratch = scratch("packed");
    let zstd = compress_to_vec(CSV.as_bytes(), CompressionLevel::Fastest);
    for (name, bytes) in
        [("a.csv.gz", gzip(CSV.as_bytes())), ("a.csv.zst", zstd.clone()), ("access.log.1", zstd)]
    {
        scratch.write(name, bytes);
        assert_eq!(counts(&scratch, &[name]), [4, 1, 2, 0, 0], "{name}");
    }
    let ended = scratch.run_with(&["backtest", "--config", "policy.toml", "-"], &gzip(CSV.as_bytes()));
    ended.done("gzip on stdin");
    assert!(ended.stdout.starts_with("4 requests of 2 keys"), "{}", ended.stdout);
    // One member for each day, as `cat` makes it; the header stands once.
    let rest = "5,api,user:2\n6,api,user:2\n";
    scratch.write("two.csv.gz", [gzip(CSV.as_bytes()), gzip(rest.as_bytes())].concat());
    assert_eq!(counts(&scratch, &["two.csv.gz"]), [6, 2, 2, 0, 0]);
}

#[test]
fn a_packed_log_that_is_cut_off_is_refused_with_its_line() {
    let scratch = scratch("cut");
    let lines: String = (0..100_000u64).map(|n| format!("{n},api,user:{}\n", n * n % 9973)).collect();
    let packed = gzip(format!("time,limit,key\n{lines}").as_bytes());
    scratch.write("a.csv.gz", &packed[..packed.len() / 2]);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "a.csv.gz"]);
    ended.could_not("half of a file");
    let said = "tollgate: error: cannot read a.csv.gz: after line ";
    assert!(ended.stderr.starts_with(said), "{}", ended.stderr);
    assert!(ended.stderr.contains(": its gzip data is damaged or cut off ("), "{}", ended.stderr);
}

/// 256 MiB of one line, of which nobody needs a byte, are a quarter of a megabyte in gzip.
#[test]
fn a_bomb_is_streamed_and_its_line_is_left_out() {
    let scratch = scratch("bomb");
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let good = "{\"time\":1,\"limit\":\"api\",\"key\":\"user:1\"}\n";
    encoder.write_all(good.as_bytes()).unwrap();
    for _ in 0..256 {
        encoder.write_all(&[b'x'; 1 << 20]).unwrap();
    }
    encoder.write_all(format!("\n{good}").as_bytes()).unwrap();
    scratch.write("bomb.jsonl.gz", encoder.finish().unwrap());
    let command = scratch.command(&["backtest", "--config", "policy.toml", "--json", "bomb.jsonl.gz"]);
    // 128 MiB of address space are not enough to hold it.
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-c", "ulimit -v 600000 && exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args());
    let output = shell.current_dir(scratch.path("")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let summary: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!((&summary["requests"], &summary["skipped_lines"]), (&2.into(), &1.into()));
    let first = summary["first_skipped"][0].as_str().expect("a line");
    assert!(
        first.starts_with("bomb.jsonl.gz:2: line = \"xxx") && first.contains("longer than 1 MiB"),
        "{first}"
    );
}

#[test]
fn access_logs_in_json_meet_the_routes() {
    let scratch = scratch("json-access");
    let nginx = |at: &str, path: &str| {
        format!(
            "{{\"time_iso8601\":\"2023-11-14T22:13:{at}+00:00\",\"remote_addr\":\"192.0.2.1\",\"request\":\"GET {path} HTTP/1.1\",\"status\":\"200\"}}\n"
        )
    };
    let log = [
        nginx("20", "/api/a"),
        nginx("21", "/api/b"),
        nginx("22", "/api/c"),
        nginx("23", "/"),
        "{\"half\n".into(),
    ];
    scratch.write("nginx.log", log.concat());
    assert_eq!(counts(&scratch, &["nginx.log"]), [3, 1, 1, 1, 1]);
    let envoy = |at: &str, path: &str| {
        format!(
            "{{\"start_time\":\"2023-11-14T22:13:{at}.125Z\",\"downstream_remote_address\":\"192.0.2.1:40000\",\"method\":\"GET\",\"path\":\"{path}\",\"response_code\":200}}\n"
        )
    };
    scratch.write("envoy.jsonl", ["20", "21", "22"].map(|at| envoy(at, "/api/a?b=c")).concat());
    assert_eq!(counts(&scratch, &["envoy.jsonl"]), [3, 1, 1, 0, 0]);
    assert_eq!(counts(&scratch, &["nginx.log", "envoy.jsonl", "--format", "json"]), [6, 4, 1, 1, 1]);

    scratch.write("policy.toml", POLICY.split("[[routes]]").next().unwrap());
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "nginx.log"]);
    ended.could_not("no routes");
    assert!(
        ended.stderr.contains("an access log does not say which limits its requests meet"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_decision_log_and_decisions_can_be_replayed() {
    let scratch = scratch("own-logs");
    let line = |at: u32, rest: &str| {
        format!(
            "{{\"timestamp\":\"2026-01-31T12:00:{at:02}.123456Z\",\"level\":\"INFO\",\"target\":\"tollgate::decision\",\"message\":\"decided\",\"decision\":\"allowed\",{rest}}}\n"
        )
    };
    let charge = |at, hash: &str| {
        line(at, &format!("\"operation\":\"charge\",\"limiter\":\"api\",\"key_hash\":\"{hash}\""))
    };
    let log = [
        "{\"timestamp\":\"2026-01-31T11:59:00Z\",\"level\":\"INFO\",\"target\":\"tollgate\",\"message\":\"it serves\"}\n".to_owned(),
        charge(0, "aa"),
        charge(1, "aa"),
        charge(2, "aa"),
        charge(3, "bb"),
        // A key that was malformed, one that gave back, and what was left out.
        line(4, "\"operation\":\"charge\",\"limiter\":\"api\""),
        line(5, "\"operation\":\"settle\",\"limiter\":\"api\",\"key_hash\":\"aa\""),
        line(6, "\"operation\":\"charge\",\"limiter\":\"api\",\"key_hash\":\"bb\",\"suppressed\":7"),
        "{\"timestamp\":\"2026-01-31T12:00:07Z\",\"level\":\"WARN\",\"target\":\"tollgate::decision\",\"message\":\"too many\",\"left_out\":5}\n".to_owned(),
        charge(8, "aa").replace("api", "gone"),
        // One that waited, and one with a cost that takes all there is; a third is one too many.
        line(9, "\"operation\":\"wait\",\"limiter\":\"api\",\"key_hash\":\"cc\",\"cost\":1"),
        line(10, "\"operation\":\"reserve\",\"limiter\":\"api\",\"key_hash\":\"dd\",\"cost\":2"),
        line(11, "\"operation\":\"acquire\",\"limiter\":\"api\",\"key_hash\":\"dd\",\"cost\":1"),
        line(12, "\"operation\":\"charge\",\"limiter\":\"api\",\"key_hash\":\"dd\",\"cost\":0.5"),
    ];
    scratch.write("server.log", log.concat());
    assert_eq!(counts(&scratch, &["server.log"]), [8, 2, 4, 0, 2]);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "server.log"]);
    assert!(ended.stderr.contains("the decision log says that it left out 12 decisions"), "{}", ended.stderr);
    assert!(ended.stdout.contains("hash:aa"), "{}", ended.stdout);

    // What was decided is decided again from what was written of it.
    scratch.write("log.csv", CSV);
    let run = |log: &str, to: &str| {
        scratch.run(&["backtest", "--config", "policy.toml", log, "--decisions", to]).done(log);
        scratch
            .read(to)
            .replace("\"line\":", "")
            .lines()
            .map(|line| line.split_once(',').unwrap().1.to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(run("log.csv", "one.jsonl"), run("one.jsonl", "two.jsonl"));
}

/// The trail of the gateway: attempts charge the limits of their model, at the time at which they were sent and for what they used.
#[test]
fn the_trail_of_the_gateway_can_be_replayed() {
    let scratch = Scratch::new("trail");
    scratch.write(
        "policy.toml",
        "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://127.0.0.1:9'\n[llm.models.m]\nrpm = 2\ntpm = 100\n",
    );
    let line = |at: u32, model: &str, rest: &str| {
        format!(
            "{{\"timestamp\":\"2026-01-31T12:00:{at:02}Z\",\"model\":\"{model}\",\"agent_id\":\"a\",\"request_id\":\"r{at}\",{rest}}}\n"
        )
    };
    let attempt = |tokens: u32| {
        format!("\"input_tokens\":{tokens},\"output_tokens\":10,\"status\":\"success\",\"attempt\":1")
    };
    let waited = "\"status\":\"rate_limited\",\"wait_seconds\":1.5";
    let log = [
        line(1, "m", &attempt(20)),
        // Waited, then charged: one charge.
        line(2, "m", waited),
        // By its tokens: 90 of the 70 that are left.
        line(3, "m", &attempt(80)),
        line(4, "m", &attempt(5)),
        // Of a model that the policy does not have.
        line(5, "other", &attempt(500)),
        // By its number: the third in a minute.
        line(6, "m", &attempt(5)),
        "{\"timestamp\":\"noon\",\"model\":\"m\",\"status\":\"success\",\"attempt\":1}\n".to_owned(),
    ];
    scratch.write("rate_limits.jsonl", log.concat());
    assert_eq!(counts(&scratch, &["rate_limits.jsonl"]), [4, 2, 1, 0, 1]);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "--json", "rate_limits.jsonl"]);
    let summary: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let limits = summary["limits"].as_array().expect("a list");
    let of = |name: &str| {
        let limit = limits.iter().find(|limit| limit["limit"] == name);
        let limit = limit.unwrap_or_else(|| panic!("no {name}: {summary}"));
        [&limit["requests"], &limit["denied"]].map(|count| count.as_u64().expect("a count"))
    };
    assert_eq!((of("llm.m.rpm"), of("llm.m.tpm")), ([4, 1], [4, 1]));
    assert_eq!(summary["most_denied"][0]["first_denied_line"], 3, "{summary}");
}
