//! Lines in which jobs stand whom another limit holds up much longer: they keep their places, and hold up nobody.

use tollgate_jobs::{JobPolicy, Jobs};

use crate::world::*;

/// Pushes a job of another type, and answers after how many ms it was started.
async fn start_of_another(world: &World) -> i64 {
    let pushed = world.number(CLOCK).await;
    world.push("q", [TestJob::new("b", 1)]).await;
    world.until("select count(*) from starts where kind = 'b'", 1).await;
    world.last_start("b", pushed).await
}

/// A thousand jobs of one type wait for one of ten places of all jobs. A hundred of them run, and then their own limit denies the others for an
/// hour, while nothing runs.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_their_type_denies_hold_up_no_others_in_the_line_of_all() {
    let policies =
        Jobs::new().job("a", rate(100, HOUR)).global(JobPolicy::new().concurrency(10).lease(30 * SECOND));
    let world = World::new(policies).await;
    world.push_all("q", jobs("a", 1_000)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from apalis.jobs where status = 'Done'", 100).await;
    let waited = start_of_another(&world).await;
    println!("another type waited {waited} ms behind 900 jobs that cannot run");
    assert!(waited <= if full() { 10_000 } else { 60_000 }, "{waited} ms");
    // None of them has lost its place, and each has a time of its own type: nine hours in all.
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 900).await;
    let own =
        "select count(distinct l.job) from tollgate_job_line l where l.label = 'job:a' and not l.parked";
    world.until(own, 900).await;
    assert_eq!(
        world.number("select count(*) from tollgate_job_line where label = 'global' and not parked").await,
        0
    );
    let ends = world.gate.status("job:a").await.unwrap().backlog_ends.unwrap();
    assert!(ends > 8 * HOUR && ends < 10 * HOUR, "{ends:?}");
    assert_eq!(world.starts("a").await, 100);
}

/// The line of a queue is long when the key of those who stand in it is closed. When it is opened they go on, in their order and at the queue's
/// pace.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_closed_key_hold_up_no_others_in_the_line_of_their_queue() {
    let policies = Jobs::new().job("a", rate(10_000, HOUR)).queue("q", rate(4, 2 * SECOND));
    let world = World::new(policies).await;
    world.push_all("q", jobs("a", 300)).await;
    let _worker = world.worker("q");
    // Somebody else's job would wait for two minutes.
    world.until("select least(250, count(*)) from tollgate_job_waiting where delays > 0", 250).await;
    world.gate.close("job:a", HOUR).await.unwrap();
    let waited = start_of_another(&world).await;
    println!("another type waited {waited} ms behind jobs of a closed key");
    // Two seconds on a machine that does nothing else: those before it are called ten by ten. Where calls are lost they look by themselves.
    assert!(waited <= if full() { 10_000 } else { 60_000 }, "{waited} ms");
    let before = world.starts("a").await;
    assert!(world.gate.open("job:a").await.unwrap());
    world
        .until(&format!("select least({}, count(*)) from starts where kind = 'a'", before + 20), before + 20)
        .await;
    assert!(world.most_permits("jobs.queue.q", 2 * SECOND).await <= 4);
    // They are behind each other again: the last of those who are left has a time of its own.
    let ends = world.gate.status("queue:q").await.unwrap().backlog_ends.unwrap();
    assert!(ends > 60 * SECOND && ends < 240 * SECOND, "{ends:?}");
}
