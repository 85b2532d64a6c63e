//! What an on-call engineer gets, against a real Prometheus: the alerts of `deploy/prometheus` and the dashboard of
//! `deploy/grafana` speak of metrics that the library has, and the numbers they show are what was decided.

#[path = "watch/board.rs"]
mod board;
#[path = "watch/service.rs"]
mod service;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tollgate_testkit::prometheus::{Prometheus, promtool};

use board::Board;
use service::{Service, described};

/// How long a scrape may let us wait, on a machine that is busy with other tests.
const TIMEOUT: Duration = Duration::from_secs(60);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

fn rules() -> PathBuf {
    let path = root().join("deploy/prometheus/alerts.yml");
    path.canonicalize().unwrap_or_else(|error| panic!("cannot find {}: {error}", path.display()))
}

/// The metrics that an expression speaks of: those of the library by the names that it gives them, and recorded ones.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_:".contains(letter);
    let is_ours = |word: &&str| word.contains("rate_limiter_") || word.starts_with("tollgate_llm_");
    let words = expression.split(|letter| !is_part(letter)).filter(is_ours);
    let of_histogram = |word: &str| {
        let ends = ["_bucket", "_count", "_sum"];
        let stem = ends.iter().find_map(|end| word.strip_suffix(end));
        let stem = stem.filter(|stem| stem.ends_with("_ms") || stem.ends_with("_seconds"));
        stem.unwrap_or(word).to_owned()
    };
    words.map(of_histogram).collect()
}

/// The metrics of the library, and those of the gateway, whose own tests ask a running one for them.
fn known() -> BTreeSet<String> {
    let of_models = [
        "requests_total",
        "attempts_total",
        "tokens_total",
        "wait_seconds",
        "queue",
        "usage",
        "trail_dropped_total",
    ];
    described().into_iter().chain(of_models.map(|name| format!("tollgate_llm_{name}"))).collect()
}

/// Asserts that every expression is worth so much, as soon as Prometheus has scraped it.
fn check(prometheus: &Prometheus, expected: &[(&str, f64)]) {
    for (expression, value) in expected {
        prometheus.wait_for(TIMEOUT, |prometheus| match prometheus.number(expression)? {
            Some(number) if number == *value => Ok(()),
            other => Err(format!("{expression} is {other:?} and should be {value}")),
        });
    }
}

/// Waits until these alerts, and maybe others, are at least on their way.
fn check_alerts(prometheus: &Prometheus, expected: &[&str]) {
    prometheus.wait_for(TIMEOUT, |prometheus| {
        let rules = prometheus.rules()?;
        let active: Vec<&str> = rules
            .iter()
            .filter(|rule| ["pending", "firing"].iter().any(|state| rule["state"] == *state))
            .filter_map(|rule| rule["name"].as_str())
            .collect();
        let is_complete = expected.iter().all(|name| active.contains(name));
        is_complete.then_some(()).ok_or_else(|| format!("active are {active:?}, and {expected:?} should be"))
    });
}

#[test]
fn alerts_are_well_formed_and_fire_when_they_should() {
    let folder = root().join("deploy/prometheus");
    for arguments in [&["check", "rules", "alerts.yml"][..], &["test", "rules", "alerts_test.yml"]] {
        promtool(&folder, arguments)
            .unwrap_or_else(|said| panic!("promtool {}:\n{said}", arguments.join(" ")));
    }
}

#[test]
fn the_dashboard_is_complete_and_speaks_of_what_there_is() {
    let board = Board::read(&read("deploy/grafana/tollgate.json"));
    let known = known();
    let ids: BTreeSet<u64> = board.panels.iter().map(|panel| panel.id).collect();
    assert_eq!(ids.len(), board.panels.len(), "two panels have the same id");
    let mut shown = BTreeSet::new();
    for panel in &board.panels {
        let title = &panel.title;
        assert!(!title.is_empty(), "panel {} has no title", panel.id);
        if panel.is_row {
            continue;
        }
        assert!(!panel.unit.is_empty(), "{title} has no unit");
        assert!(panel.description.len() > 20, "{title} has no description");
        assert!(!panel.queries.is_empty(), "{title} shows nothing");
        for query in &panel.queries {
            let metrics = metrics_in(&query.expression);
            assert!(!metrics.is_empty(), "{title} shows no metric of ours: {}", query.expression);
            assert!(metrics.is_subset(&known), "{title} shows what is not there: {metrics:?}");
            shown.extend(metrics);
        }
    }
    assert_eq!(shown, known, "every metric is on the dashboard");
    assert!(!board.sources.is_empty(), "panels say where their data comes from");
    for source in &board.sources {
        assert_eq!(source, "${datasource}", "a data source is written down");
    }
    for (row, next) in board.panels.iter().zip(&board.panels[1..]) {
        let is_after = (next.y, next.x) >= (row.y, row.x + row.width) || next.y >= row.y + row.height;
        assert!(is_after, "{} lies on {}", next.title, row.title);
    }
}

/// Every alert says how bad it is, what is wrong and what to do; the panels and the sections that it names exist.
#[test]
fn alerts_name_what_there_is() {
    let board = Board::read(&read("deploy/grafana/tollgate.json"));
    let operations = read("docs/operations.md");
    let headings = operations.lines().filter_map(|line| line.strip_prefix("## "));
    let titles = board.panels.iter().map(|panel| panel.title.as_str());
    let places: BTreeSet<&str> = headings.chain(titles).collect();
    let prometheus = Prometheus::builder().rules(rules()).start();
    let known = known();
    let all = prometheus.rules().unwrap_or_else(|error| panic!("{error}"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let recorded: BTreeSet<String> =
        all.iter().filter(|rule| rule["type"] == "recording").map(|rule| text(&rule["name"])).collect();
    assert!(all.len() > recorded.len(), "there are alerts");
    for rule in &all {
        let name = text(&rule["name"]);
        for metric in metrics_in(&text(&rule["query"])) {
            assert!(known.contains(&metric) || recorded.contains(&metric), "{name} asks for {metric}");
        }
        if recorded.contains(&name) {
            continue;
        }
        let (severity, annotations) = (text(&rule["labels"]["severity"]), &rule["annotations"]);
        assert!(
            ["info", "warning", "critical"].contains(&&*severity),
            "{name} has the severity {severity:?}"
        );
        assert!(text(&annotations["summary"]).contains("{{ $labels.job }}"), "{name}: whose trouble is it?");
        let description = text(&annotations["description"]);
        assert!(description.contains("See docs/operations.md, \""), "{name}: {description}");
        for quoted in description.split('"').skip(1).step_by(2) {
            assert!(places.contains(quoted), "{name} sends people to {quoted:?}, which is not there");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_prometheus_shows_is_what_was_decided() {
    let service = Service::start();
    let prometheus = Prometheus::builder().target(service.address()).rules(rules()).start();
    check(&prometheus, &[("up", 1.0), ("min(rate_limiter_store_up)", 1.0)]);

    service.decide().await;
    let of = |filter: &str| format!("sum(rate_limiter_decisions_total{{{filter}}})");
    check(
        &prometheus,
        &[
            (
                &of(
                    "limiter='pages', decision='allow', shadow='false', namespace='user', strategy='token_bucket'",
                ),
                5.0,
            ),
            (&of("limiter='pages', decision='deny', source='store', storage_mode='memory'"), 3.0),
            (&of("limiter='trial', decision='deny', shadow='true'"), 3.0),
            (
                &of(
                    "limiter='api', decision='allow', shadow='false', storage_mode='redis', namespace='user'",
                ),
                3.0,
            ),
            (&of("limiter='login', decision='deny', source='store'"), 2.0),
            (&of(""), 28.0),
            ("rate_limiter_operations_total{operation='reset', outcome='nothing'}", 1.0),
            ("rate_limiter_keys", 2.0),
            ("rate_limiter_log_suppressed_total", 4.0),
            ("sum(rate_limiter_latency_ms_count{storage_mode='redis'})", 15.0),
            ("sum(rate_limiter_script_duration_ms_count{operation='charge'})", 15.0),
            ("sum(rate_limiter_script_duration_ms_bucket{le='+Inf'})", 15.0),
            ("absent(rate_limiter_fallback_total)", 1.0),
        ],
    );

    service.redis.kill();
    for round in [1.0, 2.0] {
        service.fall_back().await;
        let sum = |filter: &str| format!("sum(rate_limiter_fallback_total{{reason='connection', {filter}}})");
        check(
            &prometheus,
            &[
                (&of("limiter='api', decision='fallback', source='fallback_open'"), 100.0 * round),
                (&of("limiter='login', decision='fallback', source='fallback_closed'"), 100.0 * round),
                (&of("limiter='jobs', decision='fallback', source='fallback_local'"), 100.0 * round),
                (&sum("limiter='jobs', decision='allow'"), 3.0),
                (&sum("limiter='jobs', decision='deny'"), 100.0 * round - 3.0),
                (&sum("limiter='api', fallback='open'"), 100.0 * round),
                (&sum("limiter='login', fallback='closed'"), 100.0 * round),
                (&sum("limiter='jobs', fallback='local'"), 100.0 * round),
                (&of("source='store'"), 28.0),
                ("rate_limiter_store_up{storage_mode='redis'}", 0.0),
                ("rate_limiter_store_up{storage_mode='memory'}", 1.0),
                // Those that were on their way until a ping had failed as well.
                ("sum(rate_limiter_backend_errors_total{failure='connection'}) >= bool 1", 1.0),
            ],
        );
    }
    check_alerts(&prometheus, &["TollgateStoreDown", "TollgateFallback", "TollgateFallbackMost"]);

    service.redis.restart();
    service.come_back().await;
    check(&prometheus, &[("min(rate_limiter_store_up)", 1.0), ("rate_limiter_state_losses_total", 1.0)]);
    check_alerts(&prometheus, &["TollgateStateLost"]);
    service.lose_an_answer().await;
    // The first call after the kill may have been sent before the end of its connection was seen, and is one too then.
    check(&prometheus, &[("rate_limiter_ambiguous_total >= bool 1", 1.0)]);

    everything_can_be_asked(&prometheus);
}

/// By now every metric has been counted, so that each panel and each choice on the dashboard has something to show.
fn everything_can_be_asked(prometheus: &Prometheus) {
    let board = Board::read(&read("deploy/grafana/tollgate.json"));
    for query in &board.choices {
        prometheus.wait_for(TIMEOUT, |prometheus| match prometheus.query(&query.expression)?.len() {
            0 => Err(format!("there is nothing to choose from: {}", query.expression)),
            _ => Ok(()),
        });
    }
    for (panel, query) in
        board.panels.iter().flat_map(|panel| panel.queries.iter().map(move |query| (panel, query)))
    {
        prometheus.wait_for(TIMEOUT, |prometheus| {
            let series = prometheus.query(&query.expression)?;
            // What the gateway for language models counts is not counted here; its own tests look at the figures.
            if series.is_empty() && query.expression.contains("tollgate_llm_") {
                return Ok(());
            }
            if series.is_empty() {
                return Err(format!("{} is empty: {}", panel.title, query.expression));
            }
            let lacks = |label: &&String| series.iter().any(|one| one["metric"][label.as_str()].is_null());
            match query.labels.iter().find(lacks) {
                Some(label) => Err(format!("{} has no {label}: {}", panel.title, query.expression)),
                None => Ok(()),
            }
        });
    }
    for rule in prometheus.rules().unwrap_or_else(|error| panic!("{error}")) {
        assert_eq!(rule["health"], "ok", "{}: {}", rule["name"], rule["lastError"]);
        let query = rule["query"].as_str().unwrap_or_default();
        prometheus.query(query).unwrap_or_else(|error| panic!("{}: {error}", rule["name"]));
    }
    for target in prometheus.targets().unwrap_or_else(|error| panic!("{error}")) {
        assert_eq!(target["health"], "up", "{}", target["lastError"]);
    }
}
