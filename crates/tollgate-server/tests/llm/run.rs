//! `tollgate llm run`: a file of requests against a provider that judges (F6), wrong input, and runs that are ended and go on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tollgate_testkit::Random;
use tollgate_testkit::provider::{Allowed, Arrival, Provider, Reply, openai};

use crate::{gateway, until};

/// A directory with a config for this provider and a file of requests.
struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new(provider: &Provider, llm: &str, requests: &str) -> Files {
        let directory = tempfile::tempdir().expect("a directory");
        let config = format!(
            "{llm}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\napi_key = 'provider-key'\n",
            provider.address()
        );
        std::fs::write(directory.path().join("tollgate.toml"), config).expect("written");
        std::fs::write(directory.path().join("requests.jsonl"), requests).expect("written");
        Files { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.current_dir(self.directory.path()).args([
            "llm",
            "run",
            "requests.jsonl",
            "--out",
            "results.jsonl",
        ]);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.start(arguments).wait_with_output().expect("it ends")
    }

    /// The results by `custom_id`. Panics if one is there twice, or if a line that has ended is no result.
    fn results(&self) -> BTreeMap<String, Value> {
        results(&self.path("results.jsonl"))
    }
}

fn results(path: &Path) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut results = BTreeMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let result: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let id = result["custom_id"].as_str().expect("an id").to_owned();
        assert!(results.insert(id.clone(), result).is_none(), "{id} is there twice");
    }
    results
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn request(id: &str) -> String {
    let body = json!({
        "model": "gpt-4o", "max_tokens": 92, "messages": [{ "role": "user", "content": "hi" }], "metadata": { "input_tokens": "8" },
        "user": id,
    });
    json!({ "custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body }).to_string()
}

fn requests(count: usize) -> String {
    (0..count).map(|number| request(&format!("r-{number}")) + "\n").collect()
}

fn id_of(arrival: &Arrival) -> String {
    arrival.body["user"].as_str().unwrap_or_default().to_owned()
}

/// Killed at random points and started again: every request has one result, nothing that had one is sent again, and the limit is kept
/// over all runs, because a run waits for what the one before may have sent.
#[test]
fn f6_a_run_that_is_killed_goes_on_and_repeats_nothing() {
    let window = Duration::from_secs(1);
    let provider = Provider::judging(Allowed { requests: 12, tokens: 1_200, window }, openai);
    let files = Files::new(
        &provider,
        "llm.window = '1s'\nllm.margin = '300ms'\n[llm.models.gpt-4o]\nrpm = 12\ntpm = 1200",
        &requests(60),
    );
    let mut random = Random::seeded(u64::from(std::process::id()));
    let mut finished: Vec<(usize, BTreeSet<String>)> = Vec::new();
    for _ in 0..4 {
        let before = provider.arrivals().len();
        let mut run = files.start(&["--config", "tollgate.toml"]);
        let more = usize::try_from(1 + random.below(11)).expect("small");
        until("it sends", || provider.arrivals().len() >= before + more);
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        run.kill().expect("killed");
        run.wait().expect("it has ended");
        finished.push((provider.arrivals().len(), files.results().into_keys().collect()));
    }
    let last = files.run(&["--config", "tollgate.toml"]);
    assert!(last.status.success(), "{last:?}");
    let results = files.results();
    assert_eq!(results.len(), 60);
    for (id, result) in &results {
        assert_eq!(
            (&result["response"]["status_code"], &result["error"]),
            (&json!(200), &Value::Null),
            "{id}"
        );
        assert_eq!(result["response"]["body"]["object"], "chat.completion", "{id}");
    }
    let arrivals = provider.arrivals();
    for (arrived, had_result) in &finished {
        let again: Vec<String> =
            arrivals[*arrived..].iter().map(id_of).filter(|id| had_result.contains(id)).collect();
        assert!(again.is_empty(), "{again:?} had results and were sent again");
    }
    assert!(
        finished.iter().any(|(_, had_result)| !had_result.is_empty()),
        "no run had a result when it was killed"
    );
    provider.assert_clean();
    // Once more: there is nothing to do.
    let again = files.run(&["--config", "tollgate.toml", "--json"]);
    let summary: Value = serde_json::from_slice(&again.stdout).expect("JSON");
    assert_eq!((&summary["answered"], &summary["sent_now"]), (&json!(60), &json!(0)), "{summary}");
    assert_eq!(provider.arrivals().len(), arrivals.len());
}

#[test]
fn f6_what_a_killed_run_has_left_of_a_line_is_cut_off_and_foreign_files_stay() {
    let provider = Provider::start(openai);
    let files = Files::new(&provider, "[llm.models.gpt-4o]\nrpm = 100", &requests(3));
    let out = files.path("results.jsonl");
    assert!(files.run(&["--config", "tollgate.toml"]).status.success());
    let whole = std::fs::read_to_string(&out).expect("results");
    let cut = whole.trim_end().rfind('\n').expect("lines") + 30;
    std::fs::write(&out, &whole[..cut]).expect("written");
    // An hour ago, so that nobody waits for it.
    let old = std::time::SystemTime::now() - Duration::from_secs(3_600);
    std::fs::File::options().append(true).open(&out).and_then(|file| file.set_modified(old)).expect("aged");
    assert!(files.run(&["--config", "tollgate.toml"]).status.success());
    assert_eq!((files.results().len(), provider.arrivals().len()), (3, 4));

    for foreign in ["my notes", "my notes\n", "{\"id\":\"line_1\"}\n", "{\"custom_id\":\"r-1\"}\n"] {
        std::fs::write(&out, foreign).expect("written");
        let output = files.run(&["--config", "tollgate.toml"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains("line 1 of results.jsonl is not a result"), "{}", stderr(&output));
        assert_eq!(std::fs::read_to_string(&out).expect("it is there"), foreign, "it is left as it is");
    }
    let other = whole.replace("r-1", "other");
    std::fs::write(&out, other).expect("written");
    let output = files.run(&["--config", "tollgate.toml"]);
    assert!(stderr(&output).contains("\"other\", which is not in requests.jsonl"), "{}", stderr(&output));
    assert_eq!(provider.arrivals().len(), 4, "nothing was sent");
}

#[test]
fn wrong_input_is_named_by_its_line_and_nothing_is_sent() {
    let provider = Provider::start(openai);
    let lines = [
        request("a"),
        "{\"custom_id\":".to_owned(),
        request("a"),
        request("b").replace("\"model\":\"gpt-4o\",", ""),
        request("c"),
    ];
    let files = Files::new(&provider, "[llm.models.gpt-4o]\nrpm = 100", &lines.join("\n"));
    let output = files.run(&["--config", "tollgate.toml"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = stderr(&output);
    for expected in [
        "requests.jsonl:2: is not a JSON object",
        "requests.jsonl:3: custom_id: \"a\" is that of line 1 too",
        "requests.jsonl:4: body: you must provide a model parameter",
        "3 lines are wrong in requests.jsonl; nothing was sent",
    ] {
        assert!(stderr.contains(expected), "{expected} is not in\n{stderr}");
    }
    assert!(provider.arrivals().is_empty() && !files.path("results.jsonl").exists());
    for (arguments, expected) in [
        (&["--config", "none.toml"][..], "none.toml"),
        (&["--config", "tollgate.toml", "--client", "x"], "has no client \"x\""),
        (&["--base-url", "ftp://x"], "is no address of a gateway"),
        (&[], "nothing says where the requests go; write --config FILE"),
    ] {
        let output = files.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(self::stderr(&output).contains(expected), "{arguments:?}: {}", self::stderr(&output));
    }
}

/// Refusals and failures are results too; they can be sent again when that is asked for.
#[test]
fn what_fails_is_a_result_and_can_be_sent_again() {
    let provider = Provider::start(|arrival| match (id_of(arrival).as_str(), arrival.number) {
        ("r-1", 0..4) => {
            Reply::json(400, &json!({ "error": { "message": "no", "type": "invalid_request_error" } }))
        }
        ("r-2", 0..4) => Reply::json(429, &json!({ "error": { "code": "insufficient_quota" } })),
        _ => openai(arrival),
    });
    let files = Files::new(&provider, "[llm.models.gpt-4o]\nrpm = 100", &requests(4));
    let output = files.run(&["--config", "tollgate.toml"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).starts_with("2 of 4 requests answered, 2 failed"),
        "{output:?}"
    );
    let results = files.results();
    assert_eq!(
        (&results["r-1"]["error"]["code"], &results["r-1"]["response"]["status_code"]),
        (&json!("refused"), &json!(400))
    );
    assert_eq!(
        (&results["r-2"]["error"]["code"], &results["r-2"]["attempts"]),
        (&json!("billing"), &json!(1))
    );
    assert_eq!(provider.arrivals().len(), 4);
    let old = std::time::SystemTime::now() - Duration::from_secs(3_600);
    let out = files.path("results.jsonl");
    std::fs::File::options().append(true).open(&out).and_then(|file| file.set_modified(old)).expect("aged");
    // A run that was killed while it replaced the results has left this.
    let draft = files.path("results.jsonl.tollgate-draft");
    std::fs::write(&draft, "{\"id\":\"line_1\",\"cust").expect("a draft");
    let output = files.run(&["--config", "tollgate.toml", "--retry-failed"]);
    assert!(output.status.success() && !draft.exists(), "{output:?}");
    assert_eq!(
        (files.results().len(), provider.arrivals().len()),
        (4, 6),
        "only those that failed were sent"
    );
}

/// Stopped by SIGTERM: what was sent is finished, the rest is left to the next run, which a second one at the same time cannot be.
#[test]
fn a_run_that_is_stopped_finishes_what_it_has_sent() {
    let provider = Provider::start(|arrival| openai(arrival).paced(Duration::from_millis(100)));
    let files = Files::new(&provider, "llm.window = '2s'\n[llm.models.gpt-4o]\nrpm = 5", &requests(20));
    let run = files.start(&["--config", "tollgate.toml"]);
    until("it sends", || provider.arrivals().len() >= 5);
    let second = files.run(&["--config", "tollgate.toml"]);
    assert!(stderr(&second).contains("another run writes results.jsonl"), "{second:?}");
    let pid = rustix::process::Pid::from_child(&run);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("signalled");
    let output = run.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let sent = provider.arrivals().len();
    assert_eq!((files.results().len(), sent < 20), (sent, true), "what was sent has a result");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("the same command goes on with them"),
        "{output:?}"
    );
    assert!(files.run(&["--config", "tollgate.toml"]).status.success());
    assert_eq!((files.results().len(), provider.arrivals().len()), (20, 20));
}

/// Through a gateway, which keeps the limits: its waiting and its hints are enough.
#[test]
fn a_run_through_a_gateway_keeps_the_gateways_limits() {
    let window = Duration::from_secs(1);
    let provider = Provider::judging(Allowed { requests: 10, tokens: 100_000, window }, openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.window = '1s'\nllm.margin = '300ms'\n[llm.models.gpt-4o]\nrpm = 10",
    );
    let files = Files::new(&provider, "", &requests(25));
    let base = format!("http://{}", server.http());
    let output = files.run(&["--base-url", &base]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(files.results().len(), 25);
    provider.assert_clean();
}

/// The trail is the gateway's. A run that a config with `log_dir` is given says that it writes none.
#[test]
fn a_run_says_that_it_writes_no_trail() {
    let provider = Provider::start(openai);
    for (settings, says) in [("llm.log_dir = 'logs'", true), ("", false)] {
        let files =
            Files::new(&provider, &format!("{settings}\n[llm.models.gpt-4o]\nrpm = 100"), &requests(1));
        let output = files.run(&["--config", "tollgate.toml"]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(stderr(&output).contains("a run writes no trail"), says, "{}", stderr(&output));
        assert!(!files.path("logs").exists());
    }
}
