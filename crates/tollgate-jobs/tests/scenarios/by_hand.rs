//! What people do to jobs that wait: they remove them, end them, put them off, run them again, or rename their type.

use tollgate_jobs::Jobs;
use tollgate_jobs::adapter::prepare;

use crate::world::*;

/// How many jobs wait, as the line has it.
const WAITING: &str = "select count(*) from tollgate_job_waiting where delays > 0";

/// Jobs that were deleted or killed while they waited are taken out of the line, and those behind them are given their turns.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_are_removed_while_they_wait_hold_up_no_others() {
    let world = World::new(only("mail", rate(2, HOUR))).await;
    let _worker = world.worker("q");
    world.push("q", jobs("mail", 42)).await;
    world.until(WAITING, 40).await;
    assert_eq!(world.gate.forget_ended().await.unwrap(), 0, "all of them are to run");
    let last = "(select job from tollgate_job_line order by place desc limit 1)";
    let slot = format!(
        "select (slot_us - tollgate_job_now_us()) / 1000000 from tollgate_job_waiting where job = {last}"
    );
    assert!(world.number(&slot).await > 18 * 3_600, "forty stand in line for two an hour");
    world.server.psql(&format!(
        "delete from apalis.jobs where status = 'Pending' and convert_from(job, 'UTF8')::json ->> 'number' < '3' and id <> {last};
         update apalis.jobs set status = 'Killed' where status = 'Pending' and id <> {last}"
    ));
    assert_eq!(world.gate.forget_ended().await.unwrap(), 39);
    assert_eq!(world.gate.status("job:mail").await.unwrap().waiting, 1);
    // The one that is left is the next.
    let next = "select count(*) from tollgate_job_waiting where slot_us < tollgate_job_now_us() + 3600000000";
    world.until(next, 1).await;
    assert_eq!(world.number("select count(*) from tollgate_job_line").await, 1);
}

/// One of them is put off by hand to a time behind its slot. The others go on, and it runs when it comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_put_off_by_hand_holds_up_no_others() {
    let world = World::new(only("mail", rate(2, SECOND))).await;
    let worker = world.worker("q");
    world.push("q", jobs("mail", 12)).await;
    world.until("select least(1, count(*)) from tollgate_job_waiting where delays > 0", 1).await;
    drop(worker);
    let first = world
        .server
        .psql("update apalis.jobs set run_at = now() + interval '20 seconds', status = 'Pending', lock_by = null where id =
            (select job from tollgate_job_line order by place limit 1) returning convert_from(job, 'UTF8')::json ->> 'number'");
    let first: i64 =
        first.lines().next().and_then(|line| line.trim().parse().ok()).expect("a job that waits");
    world.server.psql(
        "update apalis.jobs set status = 'Pending', lock_by = null where status in ('Queued', 'Running')",
    );
    let _worker = world.worker_with("two", "q", WorkerOptions::default());
    world.until_done(12).await;
    assert!(world.most_permits("jobs.type.mail", SECOND).await <= 2);
    let last = world.number("select number from starts order by at desc limit 1").await;
    assert_eq!(last, first, "it came after all others");
}

/// A job that ran is run again under its id: it is charged again, as one that comes anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_run_again_under_its_id_is_charged_again() {
    let world = World::new(only("mail", rate(2, HOUR))).await;
    let _worker = world.worker("q");
    world.push("q", jobs("mail", 3)).await;
    world.until_done(2).await;
    world.until(WAITING, 1).await;
    world.server.psql(
        "update apalis.jobs set status = 'Pending', attempts = 0, run_at = now(), lock_by = null, done_at = null where status = 'Done'",
    );
    world.until(WAITING, 3).await;
    assert_eq!(world.starts("mail").await, 2);
    assert_eq!(world.number("select count(*) from permits").await, 2);
}

/// The type of jobs that wait is renamed, in the program and in its policies: they run by the new policy, and leave nothing behind. The same
/// if there is no policy any more.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_type_that_is_renamed_go_by_its_new_name() {
    for (jobs_then, left) in [(only("letter", rate(100, SECOND)), 0), (Jobs::new(), 9)] {
        let world = World::new(only("mail", rate(1, HOUR))).await;
        let worker = world.worker("q");
        world.push("q", jobs("mail", 10)).await;
        world.until(WAITING, 9).await;
        world.until("select count(*) from apalis.jobs where status = 'Pending'", 9).await;
        drop(worker);
        world.server.psql(
            "update apalis.jobs set job = convert_to(replace(convert_from(job, 'UTF8'), '\"mail\"', '\"letter\"'), 'UTF8')",
        );
        let gate = gate_at(&world.url, &world.pool, jobs_then.clone(), |builder| builder).await;
        prepare(&gate).await.unwrap();
        let _worker = work(&gate, &world.pool, "renamed", "q", WorkerOptions::default());
        gate.reload(jobs_then).await.unwrap();
        world.until_done(10).await;
        // Who meets no policy does not look at the line. What it left there is found to have ended.
        assert_eq!(world.number("select count(*) from tollgate_job_waiting").await, left);
        assert_eq!(gate.forget_ended().await.unwrap(), u64::try_from(left).unwrap());
        assert_eq!(world.number("select count(*) from tollgate_job_line").await, 0);
    }
}

/// Two workers have two versions of the policies for a while: other numbers, and a limit that only one of them knows. The larger number bounds
/// both, no job is lost, and each runs once.
#[tokio::test(flavor = "multi_thread")]
async fn workers_with_two_versions_of_the_policies_keep_the_larger_limit() {
    let window = 2 * SECOND;
    let world = World::new(only("mail", rate(4, window))).await;
    let newer = only("mail", rate(8, window)).queue("q", rate(6, window));
    let newer = gate_at(&world.url, &world.pool, newer, |builder| builder).await;
    prepare(&newer).await.unwrap();
    world.push_all("q", jobs("mail", 40)).await;
    let _workers = (world.worker("q"), work(&newer, &world.pool, "newer", "q", WorkerOptions::default()));
    world.until_done(40).await;
    assert!(world.most_permits("jobs.type.mail", window).await <= 8);
    assert!(world.most_permits("jobs.queue.q", window).await <= 6);
    assert_eq!(world.number("select count(*) from starts").await, 40);
    assert_eq!(world.number("select count(distinct number) from starts").await, 40);
    assert_eq!(world.number("select count(*) from tollgate_job_line").await, 0);
}
