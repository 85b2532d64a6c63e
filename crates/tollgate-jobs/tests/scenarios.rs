//! Jobs on a real PostgreSQL, in apalis: what is promised, one scenario each. Counts are on the database's clock.
//!
//! With `TOLLGATE_JOBS_FULL=1` (`just job-scenarios`) they have as many jobs, and are held to the times, that are promised on a machine that does
//! nothing else. Otherwise they are short, and nothing depends on how fast the machine is.

#[path = "scenarios/by_hand.rs"]
mod by_hand;
#[path = "scenarios/change.rs"]
mod change;
#[path = "scenarios/fleet.rs"]
mod fleet;
#[path = "scenarios/hostile.rs"]
mod hostile;
#[path = "scenarios/kills.rs"]
mod kills;
#[path = "scenarios/leases.rs"]
mod leases;
#[path = "scenarios/policies.rs"]
mod policies;
#[path = "scenarios/shared_lines.rs"]
mod shared_lines;
#[path = "scenarios/start.rs"]
mod start;
#[path = "scenarios/strictest.rs"]
mod strictest;
#[path = "scenarios/tables.rs"]
mod tables;
#[path = "scenarios/telemetry.rs"]
mod telemetry;
#[path = "scenarios/world.rs"]
mod world;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tollgate::Fallback;
use tollgate_jobs::adapter::prepare;
use tollgate_jobs::{Job, JobDecision, JobPolicy, Jobs, OnExceeded};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::processes::{self, Child};
use world::*;

#[tokio::test(flavor = "multi_thread")]
async fn s01_delayed_jobs_wait_for_their_own_time_without_an_attempt() {
    let window = in_full(SECOND, 3 * SECOND);
    let world = World::new(only("mail", rate(5, window))).await;
    world.push("q", jobs("mail", 12)).await;
    let begun = world.number(CLOCK).await;
    let _worker = world.worker("q");
    // The other seven wait: due later, unlocked, no attempt used.
    let waiting = "select count(*) from apalis.jobs where status = 'Pending' and run_at > now() and attempts = 0
        and lock_by is null and lock_at is null and done_at is null and last_result->'Ok'->>'tollgate' = 'delayed'";
    world.until(waiting, 7).await;
    world.until("select count(*) from apalis.jobs where status = 'Done' and attempts = 1", 5).await;
    let slots =
        "select count(*) from tollgate_job_waiting w join apalis.jobs j on j.id = w.job where w.slot_us > 0
        and abs(extract(epoch from j.run_at) * 1000000 - w.until_us) < 2";
    assert_eq!(world.number(slots).await, 7);
    let split = world.number(CLOCK).await - begun;
    world.until("select count(*) from apalis.jobs where status = 'Done' and attempts = 1", 12).await;
    assert!(world.most_permits("jobs.type.mail", window).await <= 5);
    let last = world.last_start("mail", begun).await;
    println!("s01: five ran and seven waited after {split} ms; the last started after {last} ms");
    assert!(!full() || (split <= 600 && last <= 4_000), "{split} and {last} ms");
    assert_eq!(world.number("select count(*) from tollgate_job_waiting").await, 0);
    assert_eq!(world.number("select count(*) from tollgate_job_line").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn s02_rejected_jobs_fail_for_good_with_the_error() {
    let world = World::new(only("call", rate(5, HOUR).on_exceeded(OnExceeded::Reject))).await;
    world.push("q", jobs("call", 12)).await;
    let _worker = world.worker("q");
    let rejected =
        "select count(*) from apalis.jobs where status = 'Killed' and attempts = 0 and done_at is not null
        and last_result = '{\"Err\": \"Rate limit exceeded\"}'";
    world.until(rejected, 7).await;
    world.until_done(5).await;
    tokio::time::sleep(SECOND).await;
    assert_eq!((world.number(rejected).await, world.starts("call").await), (7, 5));
}

#[tokio::test(flavor = "multi_thread")]
async fn s04_type_queue_and_all_hold_at_once() {
    let policies = Jobs::new()
        .job("a", rate(5, SECOND))
        .job("b", rate(5, SECOND))
        .job("c", rate(5, SECOND))
        .queue("one", rate(8, SECOND))
        .global(rate(10, SECOND));
    let world = World::new(policies).await;
    for (queue, kind) in [("one", "a"), ("one", "b"), ("two", "c")] {
        world.push(queue, jobs(kind, 15)).await;
    }
    let _workers = (world.worker("one"), world.worker("two"));
    world.until_done(45).await;
    for (limit, most) in [("type.a", 5), ("type.b", 5), ("type.c", 5), ("queue.one", 8), ("global", 10)] {
        let found = world.most_permits(&format!("jobs.{limit}"), SECOND).await;
        assert!(found <= most, "{limit}: {found} in a second");
    }
    // Denied by one limit, charged to none: each run was charged once to each.
    let units = "select limit_name, sum(cost)::bigint from permits group by 1";
    let counts = world.counts(units).await;
    assert_eq!(counts["jobs.global"], 45, "{counts:?}");
    assert_eq!((counts["jobs.queue.one"], counts["jobs.type.a"]), (30, 15), "{counts:?}");
}

#[test]
fn s05_processes_that_race_admit_exactly_the_limit() {
    const ROUNDS: usize = 10;
    let policies = || {
        (0..ROUNDS).fold(Jobs::new(), |jobs, round| {
            jobs.job(format!("r{round}"), rate(5, HOUR).on_exceeded(OnExceeded::Reject))
        })
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Some(child) = Child::here() {
        let admitted = runtime.block_on(async {
            let pool = pool_at(child.parameters()).await;
            let gate = gate_at(child.parameters(), &pool, policies(), |builder| builder).await;
            child.wait_for_start();
            let mut admitted = Vec::new();
            for round in 0..ROUNDS {
                let enter = |number: usize| {
                    let (gate, index) = (gate.clone(), child.index());
                    tokio::spawn(async move {
                        let id = format!("{index}-{round}-{number}");
                        let plan = gate.plan(&Job::new(&id, &format!("r{round}"), "q")).unwrap();
                        matches!(gate.enter(&plan).await, JobDecision::Run(_))
                    })
                };
                let entered: Vec<_> = (0..16).map(enter).collect();
                let mut count = 0;
                for one in entered {
                    count += u64::from(one.await.unwrap());
                }
                admitted.push(count.to_string());
            }
            admitted.join(" ")
        });
        return child.report(&admitted);
    }
    let server = PostgresServer::start();
    let url = server.url("postgres");
    runtime.block_on(async {
        let pool = pool_at(&url).await;
        gate_at(&url, &pool, policies(), |builder| builder).await;
    });
    let reports = processes::run("s05_processes_that_race_admit_exactly_the_limit", 2, &url);
    let mut sums = vec![0; ROUNDS];
    for line in reports.iter().flatten() {
        for (sum, count) in sums.iter_mut().zip(line.split(' ')) {
            *sum += count.parse::<u64>().unwrap();
        }
    }
    assert_eq!(sums, vec![5; ROUNDS]);
}

#[tokio::test(flavor = "multi_thread")]
async fn s06_a_backlog_drains_without_a_herd() {
    let world = World::new(only("mail", rate(20, SECOND))).await;
    world.push("q", jobs("mail", 100)).await;
    let begun = world.number(CLOCK).await;
    let _workers = (
        world.worker_with("one", "q", WorkerOptions::default()),
        world.worker_with("two", "q", WorkerOptions::default()),
    );
    world.until_done(100).await;
    assert!(world.most_permits("jobs.type.mail", SECOND).await <= 20);
    assert_eq!(world.number("select count(distinct number) from starts").await, 100);
    assert_eq!(world.starts("mail").await, 100);
    let delays = world.number("select count(*) from delays").await;
    assert!(delays <= 200, "{delays} delays of 100 jobs");
    let (all, apart) = (delays, world.number("select count(distinct run_at) from delays").await);
    assert!(all - apart <= all / 10, "{apart} wake times of {all}");
    // Each has a time of its own from the first delay on: eighty at twenty a second are four windows.
    let first = "select (extract(epoch from max(first) - min(first)) * 1000)::bigint from (
        select distinct on (job) run_at as first from delays order by job, logged) as x";
    let first = world.number(first).await;
    assert!(first >= 2_000, "the first times of those who wait are within {first} ms");
    // And none of them is later than it must be: four windows follow the first, however long this machine takes to put all of them off. How
    // soon the backlog is done in the end is measured by `-- jobs` of the benches.
    let late = "select (extract(epoch from max(first) - max(logged)) * 1000)::bigint from (
        select distinct on (job) run_at as first, logged from delays order by job, logged) as x";
    let late = world.number(late).await;
    assert!(late <= 4_100, "the last of those who wait was given a time {late} ms away");
    // One and a half times what a limiter that loses nothing takes.
    let last = world.last_start("mail", begun).await;
    println!("s06: {delays} delays; the last of a hundred started after {last} ms");
    assert!(!full() || last <= 6_000, "{last} ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn s07_sleeps_are_capped_and_slots_kept() {
    let (count, window) = in_full((5, 4 * SECOND), (4, SECOND));
    let world = World::new(only("mail", rate(1, window).max_delay(window / 4))).await;
    world.push("q", jobs("mail", count)).await;
    let _worker = world.worker("q");
    world.until_done(count).await;
    let longest = "select (max(extract(epoch from run_at - logged)) * 1000)::bigint from delays";
    let longest = world.number(longest).await;
    let most = i64::try_from(window.as_millis() / 4).unwrap();
    assert!(longest <= most, "a job slept {longest} ms");
    assert!(
        world.number("select count(*) from delays").await >= 6,
        "slots are a window apart and sleeps a quarter"
    );
    assert_eq!(world.most_permits("jobs.type.mail", window).await, 1);
    // A slot is late by one more sleep at most.
    let apart =
        "select max(at_us - before) / 1000 from (select at_us, lag(at_us) over (order by at_us) as before
        from permits where limit_name = 'jobs.type.mail') as x";
    let apart = world.number(apart).await;
    println!("s07: starts are at most {apart} ms apart");
    assert!(!full() || apart <= 5_000, "{apart} ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn s08_slots_that_passed_while_workers_were_down_are_not_redeemed_at_once() {
    let world = World::new(only("mail", rate(5, SECOND))).await;
    let (count, down) = in_full((60, 12 * SECOND), (30, 6 * SECOND));
    world.push("q", jobs("mail", count)).await;
    let worker = world.worker("q");
    world.until("select least(count(*), 5) from starts", 5).await;
    world.until("select count(*) from apalis.jobs where status in ('Queued', 'Running')", 0).await;
    drop(worker);
    tokio::time::sleep(down).await;
    let _workers = (world.worker("q"), world.worker_with("two", "q", WorkerOptions::default()));
    world.until_done(count).await;
    assert!(world.most_permits("jobs.type.mail", SECOND).await <= 5);
    assert_eq!(world.starts("mail").await, count);
    assert_eq!(
        world.number("select sum(cost)::bigint from permits").await,
        count,
        "a slot that comes is charged"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn s09_retries_count() {
    let world = World::new(only("flaky", rate(5, SECOND))).await;
    world.push_tries("q", 12, [TestJob::new("flaky", 1).act(Act::Fail)]).await;
    let _worker = world.worker("q");
    world.until("select count(*) from apalis.jobs where status = 'Failed' and attempts = 12", 1).await;
    assert_eq!(world.starts("flaky").await, 12);
    assert!(world.most_permits("jobs.type.flaky", SECOND).await <= 5);
    assert_eq!(world.number("select sum(cost)::bigint from permits").await, 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn s10_jobs_that_wait_hold_up_no_others() {
    let world = World::new(only("slow", rate(5, HOUR))).await;
    world.push("q", jobs("slow", 60)).await;
    world.push("q", jobs("free", 60)).await;
    let begun = world.number(CLOCK).await;
    let _worker = world.worker("q");
    world.until("select count(*) from starts where kind = 'free'", 60).await;
    let last = world.last_start("free", begun).await;
    println!("s10: the last of sixty free jobs started after {last} ms");
    assert!(!full() || last <= 2_000, "{last} ms");
    // Those that wait do so in the table: no worker has one in its hands, and none came back before its time.
    let slow = "from apalis.jobs where convert_from(job, 'UTF8')::json ->> 'kind' = 'slow'";
    world.until(&format!("select count(*) {slow} and status = 'Done'"), 5).await;
    world
        .until(
            &format!("select count(*) {slow} and status = 'Pending' and run_at > now() and lock_by is null"),
            55,
        )
        .await;
    assert_eq!(world.starts("slow").await, 5);
    let delays = world.number("select count(*) from delays").await;
    assert_eq!(delays, 55, "each was put off once, and not again and again before others");
}

#[tokio::test(flavor = "multi_thread")]
async fn s11_every_job_starts_exactly_once() {
    let (rounds, count) = in_full((20, 100), (3, 40));
    for lock_tasks in [false, true] {
        let world = World::new(only("mail", rate(20, SECOND))).await;
        let options = WorkerOptions { lock_tasks, ..WorkerOptions::default() };
        let _workers =
            (world.worker_with("one", "q", options.clone()), world.worker_with("two", "q", options.clone()));
        for round in 0..rounds {
            world.push("q", (0..count).map(|number| TestJob::new("mail", round * 1_000 + number))).await;
            world.until_done((round + 1) * count).await;
        }
        let more = "select count(*) from (select from starts group by number having count(*) <> 1) as x";
        assert_eq!(
            (world.number(more).await, world.starts("mail").await),
            (0, rounds * count),
            "lock_tasks {lock_tasks}"
        );
    }
}

/// A worker in a process of its own, to be killed: the same test, called by name.
pub(crate) fn in_a_process(test: &str, url: &str) -> std::process::Child {
    let binary = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(binary);
    command.args([test, "--exact", "--nocapture"]).env("TOLLGATE_JOBS_WORKER", url);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn s12_a_worker_that_is_killed_leaves_nothing_held() {
    let policies = || only("mail", rate(100, SECOND).concurrency(1).lease(2 * SECOND));
    if let Ok(url) = std::env::var("TOLLGATE_JOBS_WORKER") {
        let pool = pool_at(&url).await;
        let gate = gate_at(&url, &pool, policies(), |builder| builder).await;
        prepare(&gate).await.unwrap();
        let _worker = work(&gate, &pool, "killed", "q", WorkerOptions::default());
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
    let world = World::new(policies()).await;
    world.push("q", [TestJob::new("mail", 1).act(Act::SleepMs(1_500))]).await;
    let mut child = in_a_process("s12_a_worker_that_is_killed_leaves_nothing_held", &world.url);
    world.until("select count(*) from starts", 1).await;
    assert_eq!(world.gate.tollgate().status("jobs.type.mail.running", "job:mail").await.unwrap().used(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = world.number(CLOCK).await;
    let _worker = world.worker("q");
    world.until_done(1).await;
    // Three heartbeats of a second without a sign of its worker, and one in which that is looked for. The lease is shorter.
    let again = world.last_start("mail", killed).await;
    println!("s12: it ran again {again} ms after the kill");
    assert!(!full() || again <= 5_000, "{again} ms");
    assert_eq!(world.starts("mail").await, 2);
    assert!(world.number("select attempts::bigint from apalis.jobs").await >= 2);
    assert_eq!(world.gate.tollgate().status("jobs.type.mail.running", "job:mail").await.unwrap().used(), 0);
}

/// The tables of the limits, and those with the line.
const LIMITS: &[&str] = &["tollgate_state"];
const LIMITS_AND_LINE: &[&str] = &["tollgate_state", "tollgate_job_line"];

/// Takes tables away, and gives them back.
fn are_away(server: &PostgresServer, tables: &[&str], away: bool) {
    let (from, to) = if away { ("", "_away") } else { ("_away", "") };
    for table in tables {
        server.psql(&format!("alter table {table}{from} rename to {table}{to}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s13_an_outage_of_the_limiter_loses_no_job() {
    for tables in [LIMITS, LIMITS_AND_LINE] {
        let policies = Jobs::new()
            .job("open", rate(5, HOUR).fallback(Fallback::Open))
            .job("closed", rate(20, HOUR).fallback(Fallback::Closed));
        let world = World::new(policies).await;
        let _worker = world.worker("q");
        are_away(&world.server, tables, true);
        world.push("q", jobs("open", 10)).await;
        world.push("q", jobs("closed", 10)).await;
        world.until("select count(*) from starts where kind = 'open'", 10).await;
        world.until("select count(distinct job) from delays", 10).await;
        assert_eq!(world.starts("closed").await, 0);
        are_away(&world.server, tables, false);
        world.until_done(20).await;
        assert_eq!(
            world.number("select count(*) from apalis.jobs where status in ('Queued', 'Running')").await,
            0
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s14_workers_survive_a_restart_of_the_database() {
    let world = World::new(only("mail", rate(20, SECOND))).await;
    world.push("q", jobs("mail", 60)).await;
    let _workers = (world.worker("q"), world.worker_with("two", "q", WorkerOptions::default()));
    world.until("select least(count(*), 10) from starts", 10).await;
    tokio::task::block_in_place(|| world.server.restart());
    let restarted = world.number(CLOCK).await;
    world.until_done(60).await;
    let resumed = format!(
        "select (min(extract(epoch from at)) * 1000)::bigint - {restarted} from starts where extract(epoch from at) * 1000 > {restarted}"
    );
    let resumed = world.number(&resumed).await;
    println!("s14: workers resumed {resumed} ms after the restart");
    // Without a restart of the workers, never.
    assert!(resumed <= in_full(10_000, 60_000), "workers resumed after {resumed} ms");
    assert_eq!(world.number("select count(distinct number) from starts").await, 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn s15_a_job_that_is_due_later_wakes_an_idle_worker() {
    for poll in [5, 100] {
        let world = World::new(Jobs::new()).await;
        // The heartbeat wakes a worker too, so it does not come within the test.
        let options = WorkerOptions {
            poll: Duration::from_millis(poll),
            heartbeat: Duration::from_secs(600),
            ..WorkerOptions::default()
        };
        let _worker = world.worker_with("idle", "q", options);
        let begun = world.number("select 1::bigint from (select pg_sleep(0.2)) x").await;
        assert_eq!(begun, 1);
        world.push("q", jobs("later", 1)).await;
        world.until_done(1).await;
        let pushed = world.number(CLOCK).await;
        world.push_later("q", 3 * SECOND, TestJob::new("later", 1)).await;
        // A worker that lost its timer would not poll any more, and this would wait in vain.
        world.until_done(2).await;
        let waited = world.last_start("later", pushed).await;
        println!("s15: with a poll of {poll} ms, a job that was due in 3 s started after {waited} ms");
        assert!(!full() || waited <= 3_500, "{waited} ms");
        let early =
            "select count(*) from starts where number = 1 and at < (select max(run_at) from apalis.jobs)";
        assert_eq!(world.number(early).await, 0, "poll {poll}: it started before its time");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s16_a_closed_key_starts_nothing_and_then_is_paced() {
    let world = World::new(Jobs::new().job("mail", rate(5, SECOND)).job("other", rate(100, SECOND))).await;
    world.gate.close("job:mail", 3 * SECOND).await.unwrap();
    let until = world.number("select until_us from tollgate_job_closed").await;
    world.push("q", jobs("mail", 12)).await;
    world.push("q", jobs("other", 12)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from starts where kind = 'other'", 12).await;
    world.until_done(24).await;
    let early = format!(
        "select count(*) from starts where kind = 'mail' and extract(epoch from at) * 1000000 < {until}"
    );
    assert_eq!(world.number(&early).await, 0);
    let others = "select count(*) from delays d join apalis.jobs j on j.id = d.job
        where convert_from(j.job, 'UTF8')::json ->> 'kind' = 'other'";
    assert_eq!(world.number(others).await, 0, "another key is not closed");
    assert!(world.most_permits("jobs.type.mail", SECOND).await <= 5);
    assert!(!world.gate.open("job:other").await.unwrap());
    world.gate.close("job:mail", HOUR).await.unwrap();
    assert!(world.gate.open("job:mail").await.unwrap());
    world.push("q", jobs("mail", 1)).await;
    world.until_done(25).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s17_status_and_metrics_are_what_the_database_says() {
    let exporter = exporter();
    let world = World::new(Jobs::new().job("s17", rate(5, HOUR)).queue("s17", rate(20, HOUR))).await;
    world.push("s17", jobs("s17", 12)).await;
    let _worker = world.worker("s17");
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 7).await;
    world.until_done(5).await;
    let status = world.gate.status("job:s17").await.unwrap();
    assert_eq!((status.count, status.limit, status.remaining, status.waiting), (5, 5, 0, 7));
    assert_eq!(status.limit_name, "jobs.type.s17");
    assert!(status.resets_after > Duration::from_secs(3_000) && status.resets_after <= HOUR, "{status:?}");
    let (next, last) = (status.next_slot.unwrap(), status.backlog_ends.unwrap());
    assert!(
        next > Duration::from_secs(3_000) && next <= HOUR,
        "the first place is free in an hour: {status:?}"
    );
    assert!(last > HOUR && last <= 2 * HOUR, "two of seven wait for another hour: {status:?}");
    let queue = world.gate.status("queue:s17").await.unwrap();
    assert_eq!((queue.count, queue.limit, queue.waiting), (5, 20, 0));
    let error = world.gate.status("job:s71").await.unwrap_err().to_string();
    assert!(error.contains("job:s17, queue:s17"), "{error}");
    assert_eq!(world.gate.statuses().await.unwrap().len(), 2);
    let text = exporter.render();
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    assert_eq!(
        value("tollgate_job_rate_limit_hits_total{key=\"job:s17\",behavior=\"delay\"}"),
        Some(7.0),
        "{text}"
    );
    assert_eq!(value("tollgate_job_rate_limit_usage{key=\"job:s17\"}"), Some(1.0));
    assert_eq!(value("tollgate_job_rate_limit_usage{key=\"queue:s17\"}"), Some(0.25));
    assert_eq!(value("tollgate_job_waiting{key=\"job:s17\"}"), Some(7.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn s18_old_rows_are_removed_in_batches_while_jobs_run() {
    let world = World::new(only("mail", rate(1_000, HOUR))).await;
    let count = in_full(100_000, 50_000);
    world.server.psql(&format!(
        "insert into tollgate_job_waiting select 'old-' || n, 'q', 'mail', 0, n, n, 1, '' from generate_series(1, {count}) n;
         insert into tollgate_job_line select md5('k')::uuid, n, 'old-' || n, 'job:old', 1, n from generate_series(1, {count}) n;
         insert into tollgate_job_closed values (md5('c')::uuid, 'job:old', 1, '');
         insert into apalis.jobs (job, id, job_type, run_at)
           select '', 'old-' || n, 'elsewhere', now() + interval '1 hour' from generate_series(1, {count}) n;
         insert into apalis.jobs (job, id, job_type, run_at) values ('', 'young', 'elsewhere', now() + interval '1 hour')",
    ));
    let young = "insert into tollgate_job_waiting values ('young', 'q', 'mail', 0, tollgate_job_now_us() - 3600000000, 0, 1, '')";
    world.server.psql(young);
    let entering = {
        let gate = world.gate.clone();
        tokio::spawn(async move {
            let mut took = Vec::new();
            for number in 0..200 {
                let id = number.to_string();
                let plan = gate.plan(&Job::new(&id, "mail", "q")).unwrap();
                let begun = Instant::now();
                assert!(matches!(gate.enter(&plan).await, JobDecision::Run(_)));
                took.push(begun.elapsed());
            }
            took.sort_unstable();
            took[197]
        })
    };
    assert_eq!(world.gate.cleanup().await.unwrap(), 2 * count + 1);
    let p99 = entering.await.unwrap();
    println!("s18: p99 of a decision while {} rows are removed: {p99:?}", 2 * count + 1);
    assert!(!full() || p99 < Duration::from_millis(50), "{p99:?}");
    assert_eq!(world.number("select count(*) from tollgate_job_waiting").await, 1, "an hour is not old");
    assert_eq!(world.number("select count(*) from tollgate_job_line").await, 0);
    assert_eq!(world.gate.cleanup().await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn s21_a_run_costs_what_its_policy_says() {
    let world = World::new(only("mail", rate(10, SECOND).cost(|_| 3))).await;
    world.push("q", jobs("mail", 9)).await;
    let _worker = world.worker("q");
    world.until_done(9).await;
    assert_eq!(world.most_permits("jobs.type.mail", SECOND).await, 9, "three runs of three");
    // More than the limit ever holds: no wait helps.
    let world = World::new(only("mail", rate(2, SECOND).cost(|_| 3))).await;
    world.push("q", jobs("mail", 1)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from apalis.jobs where status = 'Killed'", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s22_two_windows_hold_at_once() {
    let window = in_full(10, 4) * SECOND;
    let world = World::new(only("mail", rate(5, window).also(2, SECOND))).await;
    world.push("q", jobs("mail", 9)).await;
    let _worker = world.worker("q");
    world.until_done(9).await;
    assert_eq!(world.most_permits("jobs.type.mail", window).await, 5);
    assert_eq!(world.most_permits("jobs.type.mail.also-1", SECOND).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn s29_a_denial_that_only_an_outage_made_is_a_delay() {
    for (behaviour, tables) in
        [(OnExceeded::Reject, LIMITS_AND_LINE), (OnExceeded::Reject, LIMITS), (OnExceeded::Skip, LIMITS)]
    {
        let policy = rate(20, HOUR).fallback(Fallback::Closed).on_exceeded(behaviour);
        let world = World::new(only("call", policy)).await;
        let _worker = world.worker("q");
        are_away(&world.server, tables, true);
        world.push("q", jobs("call", 10)).await;
        world.until("select count(distinct job) from delays", 10).await;
        are_away(&world.server, tables, false);
        world.until_done(10).await;
        assert_eq!(
            world.number("select count(*) from apalis.jobs where status = 'Killed'").await,
            0,
            "{behaviour}"
        );
    }
}

/// Without its trigger apalis gives a delayed job back at once. That is noticed, and the trigger made again.
#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_that_is_dropped_while_workers_run_is_made_again() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    world.push("q", jobs("mail", 5)).await;
    let _worker = world.worker("q");
    let asleep =
        "select count(*) from apalis.jobs where status = 'Pending' and run_at > now() and lock_by is null";
    world.until(asleep, 4).await;
    tokio::time::sleep(SECOND).await;
    world.server.psql("drop trigger tollgate_job_defer on apalis.jobs; update apalis.jobs set run_at = now() where status = 'Pending'");
    world.until("select count(*) from pg_trigger where tgname = 'tollgate_job_defer'", 1).await;
    world.until(asleep, 4).await;
    assert_eq!(world.starts("mail").await, 1);
}

/// Runs that wait for another to end are called when one does, in the order of their places.
#[tokio::test(flavor = "multi_thread")]
async fn as_many_run_at_once_as_may_and_not_more() {
    let world = World::new(only("mail", JobPolicy::new().concurrency(2).lease(30 * SECOND))).await;
    world.push("q", jobs("mail", 10).map(|job| job.act(Act::SleepMs(100)))).await;
    let _workers = (world.worker("q"), world.worker_with("two", "q", WorkerOptions::default()));
    world.until_done(10).await;
    let overlap = "select max(n)::bigint from (select (select count(*) from starts b
        where b.at <= a.at and b.at > a.at - interval '90 milliseconds') as n from starts a) x";
    assert!(world.number(overlap).await <= 2);
    let kinds: BTreeSet<i64> = [world.starts("mail").await].into();
    assert_eq!(kinds, BTreeSet::from([10]));
}
