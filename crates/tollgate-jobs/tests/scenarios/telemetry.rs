//! What operators see: every metric through an exporter. Spans and lines are in `watch.rs`, where nobody else logs.

use tollgate_jobs::METRICS;
use tollgate_jobs::OnExceeded;

use crate::world::*;

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
    for metric in METRICS {
        assert!(text.contains(&format!("# HELP {metric} ")), "{metric} is not described\n{text}");
    }
    assert!(!text.contains("acme-corporation"), "a tenant is in the metrics");
}
