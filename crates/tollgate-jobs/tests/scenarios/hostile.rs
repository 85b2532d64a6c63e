//! Arguments that nobody meant, rights that are missing, a clock that steps.

use std::time::Duration;

use tollgate_jobs::{Job, JobGate, MissingField, OnExceeded};

use crate::world::*;

/// Tenants that no key can have, or that look like something else.
fn tenants() -> Vec<String> {
    let mut tenants: Vec<String> = [
        "",
        "a:b",
        "a%3Ab",
        "%",
        "\u{0}",
        "line\nbreak",
        "\u{1b}[31m",
        "{curly}",
        "'; drop table x; --",
        "ü𝄞",
    ]
    .map(str::to_owned)
    .to_vec();
    tenants.push("x".repeat(100_000));
    tenants.push("x".repeat(10_000_000));
    tenants.push("\u{7}".repeat(1_000));
    tenants
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_arguments_lose_no_job_and_open_no_limit() {
    let world = World::new(only("call", rate(2, 2 * SECOND).key("tenant"))).await;
    let _worker = world.worker("q");
    let tenants = tenants();
    for (number, tenant) in (0_i64..).zip(&tenants) {
        let job = |n| TestJob::new("call", number * 10 + n).of(tenant);
        world.push("q", (0..3).map(job)).await;
    }
    // Types that no policy has, and that could not be a name.
    for (number, kind) in (1_000..).zip(["", "CALL", "call ", "nul\u{0}", &"k".repeat(100_000)]) {
        world.push("q", [TestJob::new(kind, number)]).await;
    }
    let all = i64::try_from(tenants.len()).unwrap() * 3 + 5;
    world.until_done(all).await;
    assert_eq!(world.number("select count(*) from starts").await, all, "each ran once");
    // Those that no key can be made of share one counter: five tenants of three jobs, two in two seconds.
    let shared = "select (extract(epoch from max(at) - min(at)) * 1000)::bigint from starts where tenant ~ '^x' or tenant is null or tenant ~ '[[:cntrl:]]'";
    let span = world.number(shared).await;
    assert!(span >= 6_000, "{span} ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_without_the_field_that_splits_a_limit_share_or_are_denied_and_none_is_lost_in_silence() {
    let shared = rate(2, HOUR).key("tenant").on_exceeded(OnExceeded::Reject);
    let denied =
        |behaviour| rate(2, HOUR).key("tenant").if_missing(MissingField::Deny).on_exceeded(behaviour);
    let policies = only("shared", shared)
        .job("delay", denied(OnExceeded::Delay))
        .job("reject", denied(OnExceeded::Reject))
        .job("skip", denied(OnExceeded::Skip));
    let world = World::new(policies).await;
    let _worker = world.worker("q");
    world.push("q", jobs("shared", 3)).await;
    for kind in ["delay", "reject", "skip"] {
        world.push("q", jobs(kind, 1)).await;
        world.push("q", [TestJob::new(kind, 1).of("acme")]).await;
    }
    world.until("select count(*) from apalis.jobs where status in ('Done', 'Killed')", 9).await;
    let by_kind = "select convert_from(job, 'UTF8')::json ->> 'kind' || ' ' || status || ' ' || coalesce(last_result ->> 'Err', ''), count(*)
        from apalis.jobs group by 1";
    let expected = [
        ("delay Done ", 1),
        // Waiting would not bring the field, and a job that must happen does not end in silence.
        ("delay Killed Rate limit exceeded", 1),
        ("reject Done ", 1),
        ("reject Killed Rate limit exceeded", 1),
        ("shared Done ", 2),
        ("shared Killed Rate limit exceeded", 1),
        ("skip Done ", 1),
        ("skip Killed ", 1),
    ];
    let expected: std::collections::BTreeMap<String, i64> =
        expected.into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    assert_eq!(world.counts(by_kind).await, expected);
}

/// Somebody pushes a job that costs more than its limit ever holds, by a number in its arguments, while others wait. It is rejected at once,
/// and takes no place: those behind it do not wait for all its units.
#[tokio::test(flavor = "multi_thread")]
async fn a_cost_that_never_fits_holds_up_no_others() {
    let cost = |job: &Job<'_>| if job.arguments()["number"] == i64::MAX { u64::MAX } else { 1 };
    let world = World::new(only("mail", rate(5, 2 * SECOND).cost(cost))).await;
    let _worker = world.worker("q");
    world.push_all("q", jobs("mail", 20)).await;
    world.until("select least(1, count(*)) from tollgate_job_waiting where delays > 0", 1).await;
    world.push_all("q", [TestJob::new("mail", i64::MAX)].into_iter().chain(jobs("mail", 10))).await;
    world.until("select count(*) from apalis.jobs where status = 'Killed' and last_result ->> 'Err' = 'Rate limit exceeded'", 1).await;
    world.until_done(30).await;
    assert!(world.most_permits("jobs.type.mail", 2 * SECOND).await <= 5);
}

/// The cost of one job, and the type of another, panic. Each is delayed, and all others run by the same worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_cost_or_a_type_that_panics_takes_no_worker_down() {
    let cost = |job: &Job<'_>| {
        assert_ne!(job.arguments()["number"], 13, "it panics");
        1
    };
    let world = World::new(only("mail", rate(1_000, SECOND).cost(cost))).await;
    let _worker = world.worker("q");
    world.push("q", [TestJob::new("without a type", 1)]).await;
    world.push("q", (10..30).map(|number| TestJob::new("mail", number))).await;
    world.until_done(19).await;
    let asleep = "select count(*) from apalis.jobs where status = 'Pending' and attempts = 0 and run_at > now() + interval '20 seconds'";
    world.until(asleep, 2).await;
    assert_eq!(world.number("select count(*) from apalis.workers").await, 1, "the worker goes on");
    assert_eq!(world.number("select count(distinct number) from starts").await, 19);
}

/// The remote side may ask for any time, and so may a policy and a person: none of them is one that PostgreSQL cannot have, which would
/// fail the ack and end the worker.
#[tokio::test(flavor = "multi_thread")]
async fn times_without_an_end_are_bounded() {
    let endless = rate(100, HOUR).max_delay(Duration::MAX);
    let world = World::new(only("mail", endless.clone()).job("call", endless)).await;
    let _worker = world.worker("q");
    let asleep = "select count(*) from apalis.jobs where status = 'Pending' and attempts = 0 and run_at > now() + interval '300 days'";
    // One with a policy, and one without.
    for kind in ["mail", "free"] {
        world.push("q", [TestJob::new(kind, 1).act(Act::AskForRestMs(u64::MAX))]).await;
    }
    world.until(asleep, 2).await;
    let error = world.gate.close("job:call", Duration::MAX).await.unwrap_err().to_string();
    assert!(error.contains("a key is closed for 366 days at most"), "{error}");
    world.gate.close("job:call", 366 * 24 * HOUR).await.unwrap();
    world.push("q", jobs("call", 1)).await;
    world.until(asleep, 3).await;
    assert_eq!(world.number("select count(*) from apalis.workers").await, 1, "the worker goes on");
    assert!(world.gate.open("job:call").await.unwrap());
    assert!(world.gate.open("job:mail").await.unwrap());
    world.until_done(2).await;
}

/// A type that no policy names runs without a call to the limiter: it runs while the limiter's tables are away.
#[tokio::test(flavor = "multi_thread")]
async fn a_type_that_nobody_declared_makes_no_call() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    let _worker = world.worker("q");
    world.server.psql(
        "alter table tollgate_state rename to away; alter table tollgate_job_waiting rename to waiting_away",
    );
    world.push("q", jobs("unknown", 20)).await;
    world.until_done(20).await;
    assert_eq!(world.number("select count(*) from permits").await, 0);
}

/// The clock of the database is what counts. Slots that were written by one that was an hour ahead are not waited for: who comes finds
/// its slot far away, and is given another; nothing starts beyond the limit.
#[tokio::test(flavor = "multi_thread")]
async fn slots_of_a_clock_that_stepped_are_mended_when_their_jobs_come() {
    let world = World::new(only("mail", rate(5, 3 * SECOND).max_delay(SECOND))).await;
    world.push("q", jobs("mail", 15)).await;
    let worker = world.worker("q");
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 10).await;
    drop(worker);
    // As after a step of an hour back: what was written lies an hour ahead.
    world.server.psql(
        "update tollgate_job_waiting set slot_us = slot_us + 3600000000, since_us = since_us + 3600000000;
         update tollgate_job_line set slot_us = slot_us + 3600000000",
    );
    let _worker = world.worker("q");
    world.until_done(15).await;
    assert!(world.most_permits("jobs.type.mail", 3 * SECOND).await <= 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_the_rights_is_named_at_start_and_loses_no_job_later() {
    let world = World::new(only("mail", rate(5, SECOND))).await;
    world.server.psql(
        "create role weak login; grant usage on schema apalis to weak; grant select, insert, update on all tables in schema apalis to weak",
    );
    let weak_url = world.url.replace("postgres@", "weak@");
    let weak = pool_at(&weak_url).await;
    let tollgate = tollgate::Tollgate::builder().build().unwrap();
    let gate = JobGate::builder(tollgate, weak.clone()).jobs(only("mail", rate(5, SECOND)));
    let refused = gate.connect().await.unwrap_err().to_string();
    assert!(refused.contains("the database role lacks a right: grant it"), "{refused}");
    // The right is taken away from a worker that runs: its jobs go by their limits alone.
    let tollgate = tollgate::Tollgate::builder().build().unwrap();
    let gate = JobGate::builder(tollgate, weak.clone()).jobs(only("mail", rate(5, SECOND))).attach().unwrap();
    let _worker = work(&gate, &weak, "weak", "q", WorkerOptions::default());
    world.server.psql("grant select, insert on starts, delays, permits to weak");
    world.push("q", jobs("mail", 12)).await;
    world.until_done(12).await;
    assert_eq!(world.starts("mail").await, 12);
    let error = gate.status("job:mail").await.unwrap_err().to_string();
    assert!(error.contains("the database role lacks a right"), "{error}");
    let most = "select max(n)::bigint from (select (select count(*) from starts b where b.at <= a.at
        and b.at > a.at - interval '800 milliseconds') as n from starts a) as x";
    assert!(world.number(most).await <= 6);
}
