//! What becomes of jobs over several limits with different behaviours while others wait.

use tollgate_jobs::{Job, JobDecision, Jobs, OnExceeded};

use crate::world::*;

/// A queue that delays has a long line. Jobs of types that skip or reject end at once if they are over their own limit, whether a worker
/// claims them or they are found behind others; those that are under it stand in line.
#[tokio::test(flavor = "multi_thread")]
async fn the_strictest_behaviour_decides_behind_a_line_too() {
    let policies = Jobs::new()
        .job("cache", rate(2, HOUR).on_exceeded(OnExceeded::Skip))
        .job("call", rate(2, HOUR).on_exceeded(OnExceeded::Reject))
        .job("sync", rate(100, HOUR).on_exceeded(OnExceeded::Reject))
        .queue("q", rate(4, HOUR));
    let world = World::new(policies).await;
    world.push("q", jobs("cache", 2)).await;
    world.push("q", jobs("call", 2)).await;
    let _worker = world.worker("q");
    world.until_done(4).await;
    // All limits but that of `sync` are full. A line of sixty is a crowd: jobs that would only wait are put off without being looked at.
    world.push_all("q", jobs("mail", 60)).await;
    let waiting = "select count(*) from tollgate_job_waiting where until_us > 0";
    world.until(waiting, 60).await;
    let mixed = (100..130)
        .flat_map(|number| ["cache", "mail", "call", "sync"].map(|kind| TestJob::new(kind, number)));
    world.push_all("q", mixed).await;
    world.until("select count(*) from apalis.jobs where status = 'Killed'", 60).await;
    world.until(waiting, 120).await;
    // Their times are written before the worker that held some of them has put those back.
    world.until("select count(*) from apalis.jobs where status = 'Pending'", 120).await;
    let by_kind = "select kind || ' ' || what, count(*) from (
          select convert_from(job, 'UTF8')::json ->> 'kind' as kind, status || ' ' || attempts || ' ' || coalesce(
            last_result ->> 'Err', last_result -> 'Ok' ->> 'tollgate', 'ran') as what from apalis.jobs) as x group by 1";
    let expected = [
        ("cache Done 1 ran", 2),
        ("cache Killed 0 skipped", 30),
        ("call Done 1 ran", 2),
        ("call Killed 0 Rate limit exceeded", 30),
        ("mail Pending 0 delayed", 90),
        ("sync Pending 0 delayed", 30),
    ];
    assert_eq!(world.counts(by_kind).await, expected.map(|(words, count)| (words.to_owned(), count)).into());
    let delayed =
        "select count(*) from delays d join apalis.jobs j on j.id = d.job where j.status = 'Killed'";
    assert_eq!(world.number(delayed).await, 0, "they ended at once");
}

/// One that asks alone, and finds a short line, a closed key, or the limits away.
#[tokio::test(flavor = "multi_thread")]
async fn a_newcomer_ends_only_by_a_limit_that_denies_it() {
    let policies =
        Jobs::new().job("call", rate(1, HOUR).on_exceeded(OnExceeded::Reject)).queue("q", rate(1, HOUR));
    let world = World::new(policies).await;
    let enter = async |id: &str, kind: &str| {
        let plan = world.gate.plan(&tollgate_jobs::Job::new(id, kind, "q")).unwrap();
        let decision: JobDecision = world.gate.enter(&plan).await;
        decision.name()
    };
    assert_eq!(enter("1", "mail").await, "run");
    assert_eq!(enter("2", "mail").await, "delay", "the line of the queue begins");
    assert_eq!(enter("3", "call").await, "delay", "its own limit has room");
    assert_eq!(
        world.gate.tollgate().status("jobs.type.call", "job:call").await.unwrap().used(),
        0,
        "nothing is charged"
    );
    let charge = tollgate::Charge::new("jobs.type.call", "job:call");
    assert!(world.gate.tollgate().charge(&[charge]).await.unwrap().is_allowed());
    assert_eq!(enter("4", "call").await, "reject", "its own limit is full");
    assert_eq!(enter("3", "call").await, "delay", "who waits is judged when its turn comes");
    world.gate.close("job:call", HOUR).await.unwrap();
    assert_eq!(enter("5", "call").await, "reject", "its own limit is full, whoever closed the key");
    assert!(world.gate.open("job:call").await.unwrap());
    world.server.psql("alter table tollgate_state rename to away");
    assert_eq!(enter("6", "call").await, "delay", "a limit that cannot be asked ends nothing");
    let waiting = "select string_agg(job, ' ' order by job) from tollgate_job_waiting";
    assert_eq!(world.server.psql(waiting), "2 3 6");
}

/// The result of a skipped job names the limit that skipped it: here that of the queue, which is charged after that of the type.
#[tokio::test(flavor = "multi_thread")]
async fn a_skipped_job_says_which_limit_skipped_it() {
    let policies = Jobs::new()
        .job("cache", rate(100, HOUR))
        .queue("q", rate(1, HOUR).on_exceeded(OnExceeded::Skip))
        .global(rate(100, HOUR));
    let world = World::new(policies).await;
    world.push("q", jobs("cache", 3)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from apalis.jobs where status = 'Killed'", 2).await;
    let skipped = "select last_result -> 'Ok' ->> 'limit', count(*) from apalis.jobs where status = 'Killed' group by 1";
    assert_eq!(world.counts(skipped).await, [("jobs.queue.q".to_owned(), 2)].into());
    let plan = world.gate.plan(&Job::new("x", "cache", "q")).unwrap();
    let JobDecision::Skip { limit } = world.gate.enter(&plan).await else { panic!("it is not skipped") };
    assert_eq!(limit, "jobs.queue.q");
}
