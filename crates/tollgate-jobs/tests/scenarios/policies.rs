//! Policies that give jobs up, and that are in shadow mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate::telemetry::{Event, Observer};
use tollgate_jobs::{JobPolicy, Jobs, RATE_LIMIT_EXCEEDED};

use crate::world::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_was_delayed_too_long_is_rejected() {
    let policy = rate(1, HOUR).max_delay(Duration::from_millis(700)).give_up_after(2 * SECOND);
    let world = World::new(only("mail", policy)).await;
    world.server.psql(
        "create table waited (job text, us bigint);
         create function log_waited() returns trigger language plpgsql as $$ begin
           insert into waited values (old.job, tollgate_job_now_us() - old.since_us); return null; end $$;
         create trigger log_waited after delete on tollgate_job_waiting for each row execute function log_waited();",
    );
    world.push("q", jobs("mail", 4)).await;
    let _worker = world.worker("q");
    world.until_done(1).await;
    let rejected = format!(
        "select count(*) from apalis.jobs where status = 'Killed' and attempts = 0 and done_at is not null
        and last_result = '{{\"Err\": \"{RATE_LIMIT_EXCEEDED}\"}}'"
    );
    world.until(&rejected, 3).await;
    assert_eq!(RATE_LIMIT_EXCEEDED, "Rate limit exceeded");
    assert_eq!(world.starts("mail").await, 1);
    let early =
        "select count(*) from (select max(us) as us from waited group by job) as x where us < 2000000";
    assert_eq!(world.number(early).await, 0, "a job was given up before its time");
    assert_eq!(world.number("select count(distinct job) from waited").await, 3);
    assert!(
        world.number("select min(n) from (select count(*) as n from delays group by job) as x").await >= 2
    );
    let left =
        "select (select count(*) from tollgate_job_waiting) + (select count(*) from tollgate_job_line)";
    assert_eq!(world.number(left).await, 0, "it stands in line no more");
}

/// Counts what a limit in shadow mode would have denied.
#[derive(Default)]
struct WouldDeny(AtomicU64);

impl Observer for WouldDeny {
    fn decided(&self, event: &Event<'_>) {
        let is_counted = event.shadow && event.outcome.would_deny() && event.operation != "peek";
        self.0.fetch_add(u64::from(is_counted), Ordering::Relaxed);
    }
}

/// A limit in shadow mode counts and holds up nobody. It is made real while jobs wait for another: from then on it holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_limit_is_made_real_under_a_backlog() {
    let policies = |mail| only("mail", mail).queue("q", rate(3, SECOND));
    let would_deny = Arc::new(WouldDeny::default());
    let observer = would_deny.clone();
    let world = World::with(policies(rate(5, HOUR).shadow()), |builder| builder.observer(observer)).await;
    world.push_all("q", jobs("mail", 40)).await;
    let _worker = world.worker("q");
    world.until("select least(count(*), 9) from starts", 9).await;
    let status = world.gate.status("job:mail").await.unwrap();
    assert_eq!((status.count, status.limit), (5, 5), "it counts");
    assert!(would_deny.0.load(Ordering::Relaxed) >= 4, "and says what it would have denied");
    world.gate.reload(policies(rate(5, HOUR))).await.unwrap();
    let reloaded = world.number(CLOCK).await;
    // All others wait for it now, though their queue would let one run every third of a second.
    let held = "select (select count(*) from apalis.jobs where status = 'Done')
        + (select count(*) from tollgate_job_waiting where binding = 'jobs.type.mail' and until_us > 0)";
    world.until(held, 40).await;
    let late = format!(
        "select count(*) from permits where limit_name = 'jobs.queue.q' and at_us > ({reloaded} + 1000) * 1000"
    );
    assert_eq!(world.number(&late).await, 0, "a job ran over the limit");
    assert!(world.starts("mail").await < 40, "the backlog was gone before the limit was made real");
}

/// A type without a limit of its own, as the one that shares a limit with the web tier, has a status like any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_type_that_only_shares_a_limit_has_a_status_and_metrics() {
    let exporter = exporter();
    let policies = Jobs::new()
        .job("invoice", JobPolicy::new().charges("stripe").limit_key("account:1"))
        .job("refund", JobPolicy::new().charges("stripe").limit_key("account:{tenant}"));
    let stripe = tollgate::Limit::sliding_window(5, HOUR).unwrap();
    let world = World::with(policies, |builder| builder.limit("stripe", stripe)).await;
    world.push("q", jobs("invoice", 8)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 3).await;
    world.until_done(5).await;
    let status = world.gate.status("job:invoice").await.unwrap();
    assert_eq!((&*status.limit_name, &*status.key), ("stripe", "job:invoice"));
    assert_eq!((status.count, status.limit, status.remaining, status.waiting), (5, 5, 0, 3));
    // Each job of the other names a key, so that there is no one count.
    let refund = world.gate.status("job:refund").await.unwrap();
    assert_eq!((&*refund.limit_name, refund.count, refund.limit, refund.waiting), ("stripe", 0, 5, 0));
    let keys: Vec<String> =
        world.gate.statuses().await.unwrap().into_iter().map(|status| status.key).collect();
    assert_eq!(keys, ["job:invoice", "job:refund"]);
    let text = exporter.render();
    for line in [
        "tollgate_job_rate_limit_usage{key=\"job:invoice\"} 1",
        "tollgate_job_waiting{key=\"job:invoice\"} 3",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
    }
}
