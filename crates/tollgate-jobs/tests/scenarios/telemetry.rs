//! What operators see: every metric through an exporter, and no error of a job that is skipped. Spans and lines are in `watch.rs`, where nobody
//! else logs.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tollgate_jobs::{Jobs, METRICS, OnExceeded};

use crate::world::*;

/// What this thread logged.
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

/// On one thread, whose subscriber sees all that the worker and the gate log; in a process of its own, because what other tests log first is not seen by a
/// subscriber of this one.
#[tokio::test]
async fn s03_skipped_jobs_end_without_an_error() {
    const ALONE: &str = "TOLLGATE_JOBS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "telemetry::s03_skipped_jobs_end_without_an_error";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args([name, "--exact", "--nocapture"]).env(ALONE, "1");
        let output = alone.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        assert!(text(&output.stdout).contains("1 passed"), "it was not run");
        return;
    }
    let (log, exporter) = (Log::default(), exporter());
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .with_max_level(tracing::Level::DEBUG)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let window = in_full(SECOND, HOUR);
    let world = World::new(only("s03", rate(5, window).on_exceeded(OnExceeded::Skip))).await;
    world.push("q", jobs("s03", 12)).await;
    let _worker = world.worker("q");
    let skipped =
        "select count(*) from apalis.jobs where status = 'Killed' and attempts = 0 and done_at is not null
        and last_result->'Ok'->>'tollgate' = 'skipped' and last_result->>'Err' is null";
    world.until(skipped, 7).await;
    world.until_done(5).await;
    assert_eq!(world.starts("s03").await, 5);
    let hits = "tollgate_job_rate_limit_hits_total{key=\"job:s03\",behavior=\"skip\"} 7";
    let text = exporter.render();
    assert!(text.lines().any(|line| line == hits), "{text}");
    let logged = String::from_utf8(log.0.lock().clone()).unwrap();
    let of = |words: &str| logged.lines().filter(|line| line.contains(words)).collect::<Vec<_>>();
    assert_eq!(of("job over its limit").len(), 7, "{logged}");
    assert!(of("ERROR").is_empty() && of("WARN").is_empty(), "{:?} {:?}", of("ERROR"), of("WARN"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_comes_through_the_exporter() {
    let exporter = exporter();
    let policies = only("metrics-delay", rate(2, HOUR).key("tenant"))
        .job("metrics-reject", rate(2, HOUR).on_exceeded(OnExceeded::Reject))
        .job("metrics-skip", rate(2, HOUR).on_exceeded(OnExceeded::Skip))
        .global(rate(1_000, HOUR));
    let world = World::new(policies).await;
    let _worker = world.worker("metrics");
    for kind in ["metrics-delay", "metrics-reject", "metrics-skip"] {
        world.push("metrics", (0..5).map(|number| TestJob::new(kind, number).of("acme-corporation"))).await;
    }
    world.until("select count(*) from apalis.jobs where status = 'Killed'", 6).await;
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 3).await;
    world.server.psql("insert into tollgate_job_waiting values ('old', 'q', 'mail', 0, 1, 1, 1, '')");
    assert_eq!(world.gate.cleanup().await.unwrap(), 1);
    world.gate.statuses().await.unwrap();
    let text = exporter.render();
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    for (key, behaviour) in [("delay", "delay"), ("reject", "reject"), ("skip", "skip")] {
        let name = format!(
            "tollgate_job_rate_limit_hits_total{{key=\"job:metrics-{key}\",behavior=\"{behaviour}\"}}"
        );
        assert_eq!(value(&name), Some(3.0), "{name}\n{text}");
    }
    assert_eq!(value("tollgate_job_waiting{key=\"job:metrics-delay\"}"), Some(3.0), "{text}");
    assert_eq!(value("tollgate_job_rate_limit_usage{key=\"job:metrics-reject\"}"), Some(1.0), "{text}");
    assert_eq!(value("tollgate_job_rate_limit_usage{key=\"global\"}"), Some(0.006), "{text}");
    assert!(value("tollgate_job_delay_seconds_count").is_some_and(|count| count >= 3.0), "{text}");
    assert!(value("tollgate_job_cleanup_rows_total").is_some_and(|rows| rows >= 1.0), "{text}");
    // A policy that is gone leaves no jobs behind that seem to wait.
    world.gate.reload(Jobs::new()).await.unwrap();
    let text = exporter.render();
    assert!(text.contains("tollgate_job_waiting{key=\"job:metrics-delay\"} 0\n"), "{text}");
    for metric in METRICS {
        assert!(text.contains(&format!("# HELP {metric} ")), "{metric} is not described\n{text}");
    }
    assert!(!text.contains("acme-corporation"), "a tenant is in the metrics");
}

/// What became of jobs is in a table, by label and for all of them together, and is forgotten after a day.
#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_jobs_is_written_down() {
    let policies = only("delay", rate(2, HOUR).key("tenant"))
        .job("reject", rate(2, HOUR).on_exceeded(OnExceeded::Reject))
        .job("skip", rate(2, HOUR).on_exceeded(OnExceeded::Skip))
        .global(rate(1_000, HOUR));
    let world = World::new(policies).await;
    world.server.psql(
        "insert into tollgate_job_history select n * 60, 'job:old', 1, 0, 0, 0 from generate_series(1, 5000) n",
    );
    let _worker = world.worker("q");
    for kind in ["delay", "reject", "skip"] {
        world.push("q", (0..5).map(|number| TestJob::new(kind, number).of("acme-corporation"))).await;
    }
    world.push("q", jobs("free", 3)).await;
    let written = "select label || ' ' || string_agg(what || '=' || count, ' ' order by what), 1::bigint from (
          select label, u.what, sum(u.count) as count from tollgate_job_history h,
            unnest(array['delayed', 'rejected', 'skipped', 'started'], array[h.delayed, h.rejected, h.skipped, h.started]) as u(what, count)
          where label <> 'job:old' group by 1, 2) as x group by label";
    world.until("select sum(started + delayed + rejected + skipped)::bigint from tollgate_job_history where label = ''", 18).await;
    let written = world.counts(written).await;
    let expected = [
        " delayed=3 rejected=3 skipped=3 started=9",
        "global delayed=0 rejected=0 skipped=0 started=9",
        "job:delay delayed=3 rejected=0 skipped=0 started=2",
        "job:reject delayed=0 rejected=3 skipped=0 started=2",
        "job:skip delayed=0 rejected=0 skipped=3 started=2",
    ];
    assert_eq!(
        written.keys().map(String::as_str).collect::<Vec<_>>(),
        expected,
        "no tenant, and no job twice"
    );
    // The last that were held up are named, whatever became of them, and no tenant.
    let lately = "select concat_ws(' ', job_type, label, behavior, wait_us > 0), count(*) from tollgate_job_lately group by 1";
    world.until("select count(*) from tollgate_job_lately", 9).await;
    let found = world.counts(lately).await;
    let expected =
        [("delay job:delay delay t", 3), ("reject job:reject reject f", 3), ("skip job:skip skip f", 3)];
    assert_eq!(found, expected.map(|(words, count)| (words.to_owned(), count)).into());
    // Of many, the last fifty are kept.
    world.server.psql("insert into tollgate_job_lately (at_us, job_type, label, behavior, wait_us) select n, 'old', '', 'skip', 0 from generate_series(1, 200) n");
    world.push("q", [TestJob::new("reject", 100).of("acme-corporation")]).await;
    world.until("select count(*) from tollgate_job_lately", 50).await;
    assert_eq!(world.counts(lately).await["reject job:reject reject f"], 4, "the newest are");
    assert_eq!(world.gate.cleanup().await.unwrap(), 5_000);
    assert_eq!(world.number("select count(*) from tollgate_job_history where label = 'job:old'").await, 0);
}
