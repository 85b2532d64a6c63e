//! `tollgate jobs`: what the database says of all workers.

use tollgate::Tollgate;
use tollgate::config::{Config, OverrideFields, StoredOverride};
use tollgate::store::{Record, RecordKind};
use tollgate_jobs::{Job, JobDecision, JobGate, JobsConfig};
use tollgate_testkit::postgres::PostgresServer;

use crate::binary::Scratch;

/// Nobody listens there, somebody does who says nothing, and a database that is not there: each is said with the address.
#[test]
fn a_database_that_is_away_is_named_with_the_cause() {
    let scratch = Scratch::new("jobs-away");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = (silent.local_addr().unwrap().port(), silent);
    let server = PostgresServer::start();
    let nobody = tollgate_testkit::free_port();
    for (url, address, cause) in [
        (
            format!("postgres://app:hushhush@127.0.0.1:{nobody}/jobs"),
            format!("127.0.0.1:{nobody}/jobs as app"),
            "Connection refused",
        ),
        (
            format!("postgres://app:hushhush@127.0.0.1:{}/jobs", silent.0),
            format!("127.0.0.1:{}/jobs as app", silent.0),
            "no answer within 3 s",
        ),
        (
            server.url("nowhere").replace("postgres@", "postgres:hushhush@"),
            format!("127.0.0.1:{}/nowhere as postgres", server.port()),
            "database \"nowhere\" does not exist",
        ),
    ] {
        let text = format!("[jobs]\ndatabase = '{url}'\n[jobs.types.send_email]\nlimit = 2\nwindow = '1h'\n");
        scratch.write("jobs.toml", &text);
        for command in [&["status"][..], &["open", "job:send_email"], &["close", "job:send_email", "5m"]] {
            let ended = scratch.run(&[&["jobs"], command, &["--config", "jobs.toml"]].concat());
            assert_eq!(ended.code, Some(2), "{command:?}");
            let said = &ended.stderr;
            assert!(said.contains(&address) && said.contains(cause), "{command:?}: {said}");
            assert!(!said.contains("hushhush"), "{said}");
            assert!(!said.contains("pool"), "{said}");
        }
    }
}

#[test]
fn status_is_what_the_database_says_and_keys_are_closed_and_opened() {
    let server = PostgresServer::start();
    let scratch = Scratch::new("jobs");
    let text = format!(
        "[store]\nmode = 'postgres'\ntimeout = '2s'\npostgres = {{ url = '{}' }}\n\
         [jobs.types.send_email]\nlimit = 2\nwindow = '1h'\n[jobs.queues.mail]\nlimit = 10\nwindow = '1h'\n",
        server.url("postgres")
    );
    scratch.write("jobs.toml", &text);
    scratch.write("none.toml", "[limits.a]\nblocked = true\n");
    let status = ["jobs", "status", "--config", "jobs.toml"];

    let ended = scratch.run(&["jobs", "status", "--config", "none.toml"]);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("none.toml says nothing of jobs; write [jobs.types.NAME]"),
        "{}",
        ended.stderr
    );
    let ended = scratch.run(&status);
    assert_eq!(ended.code, Some(2));
    // What it means and what to do, and no word of SQL.
    for words in ["no worker has prepared this database yet", "start one", "[store.postgres] prefix"] {
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("relation"), "{}", ended.stderr);

    let mut jobs = JobsConfig::default();
    let config = Config::parse_with(&text, [], &mut [&mut jobs]).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let gate = JobGate::from_config(&config, &jobs).await.unwrap().connect().await.unwrap();
        for number in 0..5 {
            let id = number.to_string();
            let plan = gate.plan(&Job::new(&id, "send_email", "mail")).unwrap();
            let is_run = matches!(gate.enter(&plan).await, JobDecision::Run(_));
            assert_eq!(is_run, number < 2);
        }
    });

    let ended = scratch.run(&["jobs", "close", "job:send_email", "10m", "--config", "jobs.toml"]);
    ended.done("close");
    // What is in force is said, and a key that nothing is charged to is a mistake.
    let ended = scratch.run(&["jobs", "close", "job:send_email", "5m", "--config", "jobs.toml"]);
    ended.done("close for less");
    assert!(ended.stdout.starts_with("was closed for longer, and stays so for "), "{}", ended.stdout);
    let ended = scratch.run(&["jobs", "close", "job:send_emial", "5m", "--config", "jobs.toml"]);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("no policy of jobs has the key job:send_emial; did you mean job:send_email?"),
        "{}",
        ended.stderr
    );
    // The status shows a value by its label, and the label opens it.
    scratch
        .run(&["jobs", "close", "job:send_email:acme", "10m", "--config", "jobs.toml"])
        .done("close a value");
    let ended = scratch.run(&["jobs", "close", "job:send_email", "soon", "--config", "jobs.toml"]);
    assert_eq!(ended.code, Some(2));
    let ended = scratch.run(&[&status[..], &["--json"]].concat());
    ended.done("status --json");
    let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let email = &answer["keys"][0];
    assert_eq!(
        (email["key"].as_str(), email["limit_name"].as_str()),
        (Some("job:send_email"), Some("jobs.type.send_email"))
    );
    let number = |name: &str| email[name].as_u64().unwrap();
    assert_eq!((number("count"), number("limit"), number("remaining"), number("waiting")), (2, 2, 0, 3));
    let hour = 3_600_000;
    assert!(
        number("next_slot_ms") <= hour && number("backlog_ends_ms") > hour,
        "two go in an hour, one in two: {email}"
    );
    assert_eq!(
        (answer["keys"][1]["key"].as_str(), answer["keys"][1]["count"].as_u64()),
        (Some("queue:mail"), Some(2))
    );
    assert_eq!(answer["closed"][0]["key"], "job:send_email");
    assert!(answer["closed"][0]["wait_ms"].as_u64().unwrap() <= 600_000);

    let ended = scratch.run(&status);
    ended.done("status");
    let first = ended.stdout.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(
        (first[0], first[1], first[2], first[3], first[5]),
        ("job:send_email", "2", "2", "0", "3"),
        "{}",
        ended.stdout
    );
    assert!(ended.stdout.contains("job:send_email is closed for 10m"), "{}", ended.stdout);
    // What was set at run time holds here too, as on the page.
    let fields = OverrideFields { limit: Some(5), ..OverrideFields::default() };
    let (limit, key) = ("jobs.type.send_email".to_owned(), "job:send_email".to_owned());
    let one = StoredOverride { limit, key, fields, reason: None, by: None, at_us: 0 };
    let record = Record { id: "mail".to_owned(), payload: one.to_payload(), ends: None };
    runtime.block_on(async {
        let server = Tollgate::open(&config).await.unwrap();
        assert!(server.put_record(RecordKind::Override, &record).await.unwrap().is_kept);
    });
    let ended = scratch.run(&[&status[..], &["--json"]].concat());
    ended.done("status --json");
    let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        (&answer["keys"][0]["limit"], &answer["keys"][0]["remaining"]),
        (&5.into(), &3.into()),
        "{answer}"
    );

    for said in
        ["open; waiting jobs look again when their slot or their longest sleep has passed", "was not closed"]
    {
        let ended = scratch.run(&["jobs", "open", "job:send_email", "--config", "jobs.toml"]);
        ended.done("open");
        assert_eq!(ended.stdout.trim(), said);
    }
    let ended = scratch.run(&[&status[..], &["--json"]].concat());
    let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(answer["closed"], serde_json::json!([]));
}
