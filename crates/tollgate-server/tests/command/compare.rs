//! Several policies side by side, who was denied and when first, and keys as hashes.

use serde_json::Value;

use crate::binary::{Ended, Scratch};

fn policy(limit: u64) -> String {
    format!("[limits.api]\nstrategy = 'fixed_window'\nlimit = {limit}\nwindow = '1m'\n")
}

/// `a` asks four times in a minute, `b` twice, `c` once; `a` by two names.
const LOG: &str = "time,limit,key\n1,api,a\n2,api,default:a\n3,api,b\n4,api,a\n5,api,a\n6,api,b\n7,api,c\n";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    for (file, limit) in [("one.toml", 1), ("two.toml", 2), ("five.toml", 5)] {
        scratch.write(file, policy(limit));
    }
    scratch.write("log.csv", LOG);
    scratch
}

fn row(ended: &Ended, name: &str) -> Vec<String> {
    let line = ended.stdout.lines().find(|line| line.starts_with(&format!("{name}  ")));
    let line = line.unwrap_or_else(|| panic!("no row {name} in {}", ended.stdout));
    line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
}

#[test]
fn policies_stand_side_by_side() {
    let scratch = scratch("compare");
    let all =
        ["backtest", "--config", "two.toml", "--config", "one.toml", "--config", "five.toml", "log.csv"];
    let ended = scratch.run(&all);
    ended.done("three policies");
    assert_eq!(row(&ended, "requests"), ["requests", "7", "7", "7"]);
    assert_eq!(row(&ended, "denied"), ["denied", "2 (28.6 %)", "4 (57.1 %)", "0 (0.0 %)"]);
    assert_eq!(row(&ended, "keys denied"), ["keys denied", "1 (33.3 %)", "2 (66.7 %)", "0 (0.0 %)"]);
    let of_limit = row(&ended, "api");
    assert_eq!(of_limit[2], "1 per 1m window: 4 denied (57.1 %)", "{of_limit:?}");
    for said in [
        "one.toml beside two.toml\n1 key is newly denied: b\nNo key is no longer denied.\n",
        "five.toml beside two.toml\nNo key is newly denied.\n1 key is no longer denied: a\n",
    ] {
        assert!(ended.stdout.contains(said), "{said}\nis not in\n{}", ended.stdout);
    }
    let ended = scratch.run(&[&all[..], &["--json"]].concat());
    let policies: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let found: Vec<_> = policies["policies"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| (&one["config"], &one["denied"]))
        .collect();
    assert_eq!(
        found,
        [(&"two.toml".into(), &2.into()), (&"one.toml".into(), &4.into()), (&"five.toml".into(), &0.into())]
    );

    let ended = scratch.run(&[&all[..], &["--report", "out.html"]].concat());
    ended.done("a report of three");
    let page = scratch.read("out.html");
    assert!(page.contains("<h1>What two.toml and one.toml and five.toml would have done</h1>"));
    for id in ["compared", "limits-1", "limits-3", "denied-most-2"] {
        assert_eq!(page.matches(&format!(" id=\"{id}\"")).count(), 1, "{id}");
    }
    assert!(page.contains("<li><bdi>1 key is newly denied: b</bdi></li>"));
}

#[test]
fn what_is_of_one_policy_is_refused_for_several() {
    let scratch = scratch("compare-misuse");
    let two = ["backtest", "--config", "one.toml", "--config", "two.toml"];
    for (args, said) in [
        (&["log.csv", "--decisions", "out"][..], "--decisions is written for one policy"),
        (&["log.csv", "--denied-keys", "out"], "--denied-keys is written for one policy"),
        (&["-"], "several policies read the logs once each"),
    ] {
        let ended = scratch.run(&[&two[..], args].concat());
        ended.could_not(said);
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
    }
    let ended = scratch.run(&[
        "backtest",
        "--config",
        "one.toml",
        "log.csv",
        "--denied-keys",
        "out",
        "--report",
        "./out",
    ]);
    ended.could_not("one file for two");
    assert!(ended.stderr.contains("--denied-keys and --report both name ./out"), "{}", ended.stderr);
    assert!(!scratch.path("out").exists());
}

#[test]
fn every_key_that_was_denied_is_written_with_its_first_denial() {
    let scratch = scratch("denied-keys");
    scratch.write("more.csv", "time,limit,key\n0,api,c\n");
    scratch
        .run(&["backtest", "--config", "one.toml", "log.csv", "--denied-keys", "out.jsonl"])
        .done("one log");
    assert_eq!(
        scratch.read("out.jsonl"),
        "{\"key\":\"a\",\"requests\":4,\"denied\":3,\"first_denied_us\":2000000,\"first_denied_line\":3,\"by\":[{\"limit\":\"api\",\"denied\":3}]}\n\
         {\"key\":\"b\",\"requests\":2,\"denied\":1,\"first_denied_us\":6000000,\"first_denied_line\":7,\"by\":[{\"limit\":\"api\",\"denied\":1}]}\n"
    );
    let ended =
        scratch.run(&["backtest", "--config", "one.toml", "more.csv", "log.csv", "--denied-keys", "-"]);
    ended.done("two logs");
    assert!(
        ended.stdout.contains("\"first_denied_line\":8,\"first_denied_file\":\"log.csv\""),
        "{}",
        ended.stdout
    );
    assert!(ended.stderr.contains("1970-01-01T00:00:07Z (line 8 of log.csv)"), "{}", ended.stderr);
}

#[test]
fn keys_are_hashed_everywhere() {
    let scratch = scratch("hashed");
    scratch.write("one.toml", policy(1) + "overrides = { 'user:secret' = { limit = 9 } }\n");
    let log = LOG.replace(",a\n", ",user:alice\n").replace("default:a", "user:alice")
        + "7,api,100%:alice\nx alice,api,b\n";
    scratch.write("log.csv", log);
    let args = [
        "backtest",
        "--config",
        "one.toml",
        "log.csv",
        "--hash-keys",
        "--report",
        "out.html",
        "--decisions",
        "out.jsonl",
    ];
    let run = |salt: &str| {
        let output = scratch.command(&args).env("RL_LOG_SALT", salt).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        [out, err, scratch.read("out.html"), scratch.read("out.jsonl")]
    };
    let [out, err, page, decisions] = run("Jefe");
    for text in [&out, &err, &page, &decisions] {
        assert!(!text.contains("alice") && !text.contains("secret"), "{text}");
    }
    assert!(out.contains("log.csv:9: key is wrong (its value is not shown)"), "{out}");
    assert!(page.contains("Keys are shown as hashes."));
    // The hash by which the log of a server with this salt names the key.
    let hash = scratch.command(&["hash", "user:alice"]).env("RL_LOG_SALT", "Jefe").output().unwrap();
    let hash = String::from_utf8(hash.stdout).unwrap();
    assert_eq!(hash.trim().len(), 32, "{hash}");
    assert!(out.contains(hash.trim()) && decisions.contains(hash.trim()) && page.contains(hash.trim()));
    let [out, err, ..] = run("");
    assert!(!out.contains(hash.trim()) && err.contains("RL_LOG_SALT is not set"), "{err}");
}
