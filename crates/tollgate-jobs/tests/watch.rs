//! What operators see of jobs: a span for each decision and a line for each delay; and the dashboard and the alerts speak of metrics that
//! there are.

#[path = "../../tollgate/tests/watch/board.rs"]
#[allow(dead_code, reason = "not all of the dashboard is looked at here")]
mod board;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use board::Board;
use parking_lot::Mutex;
use sqlx::PgPool;
use tollgate::{Limit, Tollgate};
use tollgate_jobs::{Job, JobDecision, JobGate, JobPolicy, Jobs, METRICS, MissingField, OnExceeded};
use tollgate_testkit::postgres::PostgresServer;
use tracing_subscriber::fmt::format::FmtSpan;

fn read(path: &str) -> String {
    let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"))
}

/// The metrics of jobs in a text, a histogram by its own name.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words
        .filter(|word| word.starts_with("tollgate_job_"))
        .map(|word| {
            ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word)
        })
        .collect()
}

#[test]
fn the_dashboard_of_jobs_shows_every_metric_and_no_other() {
    let known: BTreeSet<&str> = METRICS.into();
    let text = read("deploy/grafana/tollgate-jobs.json");
    assert_eq!(metrics_in(&text), known);
    let board = Board::read(&text);
    let ids: BTreeSet<u64> = board.panels.iter().map(|panel| panel.id).collect();
    assert_eq!(ids.len(), board.panels.len(), "two panels have the same id");
    for panel in board.panels.iter().filter(|panel| !panel.is_row) {
        let title = &panel.title;
        assert!(!title.is_empty() && !panel.unit.is_empty() && panel.description.len() > 20, "{title:?}");
        assert!(!panel.queries.is_empty(), "{title} shows nothing");
        for query in &panel.queries {
            assert!(!metrics_in(&query.expression).is_empty(), "{title}: {}", query.expression);
        }
    }
    for (panel, next) in board.panels.iter().zip(&board.panels[1..]) {
        let is_after =
            (next.y, next.x) >= (panel.y, panel.x + panel.width) || next.y >= panel.y + panel.height;
        assert!(is_after, "{} lies on {}", next.title, panel.title);
    }
    assert!(board.sources.iter().all(|source| source == "${datasource}"), "{:?}", board.sources);
}

#[test]
fn alerts_and_docs_speak_of_metrics_that_there_are() {
    let known: BTreeSet<&str> = METRICS.into();
    let alerts = read("deploy/prometheus/alerts.yml");
    let used = metrics_in(&alerts);
    assert!(used.len() >= 2 && used.is_subset(&known), "{used:?}");
    for page in ["docs/jobs.md", "docs/operations.md"] {
        let text = read(page);
        let mut used = metrics_in(&text);
        // An index.
        used.remove("tollgate_job_due");
        assert_eq!(used, known, "{page}");
    }
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// On one thread, whose subscriber sees all of it.
#[tokio::test]
async fn each_decision_has_a_span_and_each_delay_a_line() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .with_max_level(tracing::Level::DEBUG)
        .with_span_events(FmtSpan::CLOSE)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let rate = || JobPolicy::new().with_rate_limit(1, Duration::from_secs(3_600));
    let policies = Jobs::new()
        .job("mail", rate().key("tenant"))
        .job("call", rate().on_exceeded(OnExceeded::Reject))
        .job("cache", rate().on_exceeded(OnExceeded::Skip))
        .job("sync", rate().key("region").if_missing(MissingField::Deny))
        .job("bill", rate().charges("stripe").limit_key("account:{account}").if_missing(MissingField::Deny));
    let server = PostgresServer::start();
    let pool = PgPool::connect(&server.url("postgres")).await.unwrap();
    let stripe = Limit::token_bucket("1/s", 1).unwrap();
    let tollgate = Tollgate::builder().limit("stripe", stripe).build().unwrap();
    let gate = JobGate::builder(tollgate, pool).jobs(policies).connect().await.unwrap();
    let arguments = || serde_json::json!({"tenant": "acme-corporation"});
    for (kind, expected) in [
        ("mail", ["run", "delay"]),
        ("call", ["run", "reject"]),
        ("cache", ["run", "skip"]),
        ("sync", ["reject", "reject"]),
        ("bill", ["reject", "reject"]),
    ] {
        for (number, expected) in expected.into_iter().enumerate() {
            let id = format!("{kind}-{number}");
            let job = Job::new(&id, kind, "q").with_arguments(&arguments);
            let decision: JobDecision = gate.enter(&gate.plan(&job).unwrap()).await;
            assert_eq!(decision.name(), expected, "{kind}");
        }
    }
    // Types that no policy names: one is nearly the name of one that has a policy.
    for kind in ["mial", "report", "mial", "report\n"] {
        assert!(gate.plan(&Job::new("1", kind, "q")).is_none());
    }
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    let undeclared: Vec<&str> =
        text.lines().filter(|line| line.contains("no policy names this type")).collect();
    assert_eq!(undeclared.len(), 3, "each once\n{text}");
    for words in [
        ["WARN", "job_type=\"mial\"", "did you mean `mail`?", "[jobs.types.mial]"],
        ["WARN", "job_type=\"report\"", "so nothing limits it", "write [jobs.types.report]"],
    ] {
        assert!(undeclared.iter().any(|line| words.iter().all(|word| line.contains(word))), "{undeclared:?}");
    }
    let closed = |words: &[&str]| {
        text.lines().any(|line| line.contains("close") && words.iter().all(|word| line.contains(word)))
    };
    for words in [
        &["job.enter{", "job_type=\"mail\"", "queue=\"q\"", "decision=\"run\""][..],
        &["job.enter{", "job_type=\"mail\"", "decision=\"delay\"", "limiter=\"jobs.type.mail\"", "delay_ms="],
        &["job.enter{", "job_type=\"call\"", "decision=\"reject\""],
        &["job.enter{", "job_type=\"cache\"", "decision=\"skip\""],
    ] {
        assert!(closed(words), "no span has {words:?}\n{text}");
    }
    let line =
        text.lines().find(|line| line.contains("job delayed")).unwrap_or_else(|| panic!("no line\n{text}"));
    for word in ["DEBUG", "job_type=\"mail\"", "delay_ms=", "limit=\"jobs.type.mail\""] {
        assert!(line.contains(word), "{line} lacks {word}");
    }
    // A field that is missing is named, with what to do about it.
    for (kind, field, fix) in
        [("sync", "region", "if_missing = \"shared\""), ("bill", "account:{account}", "`limit_key` names")]
    {
        let words = [
            "WARN",
            &format!("job_type=\"{kind}\""),
            &format!("field=\"{field}\""),
            &format!("key=\"job:{kind}\""),
            fix,
        ];
        let has_all = |line: &str| words.iter().all(|word| line.contains(word));
        assert!(text.lines().any(has_all), "no line has {words:?}\n{text}");
    }
    assert!(!text.contains("acme-corporation"), "a tenant is in the log");
}
