//! Leases of runs that do not end well.

use std::time::{Duration, Instant};

use tollgate::{Settled, Settlement};
use tollgate_jobs::{JobPolicy, Jobs};

use crate::world::*;

/// How many leases of a type's limit on runs at once are held.
async fn held(world: &World, kind: &str) -> u64 {
    let limit = format!("jobs.type.{kind}.running");
    world.gate.tollgate().status(&limit, &format!("job:{kind}")).await.unwrap().used()
}

/// Waits until so many are.
async fn until_held(world: &World, kind: &str, wanted: u64) {
    let begun = Instant::now();
    while held(world, kind).await != wanted {
        assert!(begun.elapsed() < Duration::from_secs(60), "{kind}: not {wanted} leases are held");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// By an error, by a layer that ends it, by a 429 and by a panic: each time the next run finds the lease free. One that
/// nobody released would be held for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_released_however_its_run_ends() {
    let one = || JobPolicy::new().concurrency(1).lease(HOUR);
    let kinds = ["fails", "hangs", "rests", "panics"];
    let world = World::new(kinds.iter().fold(Jobs::new(), |jobs, kind| jobs.job(*kind, one()))).await;
    let options = WorkerOptions { timeout: 3 * SECOND, ..WorkerOptions::default() };
    let worker = world.worker_with("one", "q", options);
    let status = |kind: &str, what: &str| {
        format!(
            "select count(*) from apalis.jobs where convert_from(job, 'UTF8')::json ->> 'kind' = '{kind}' and {what}"
        )
    };
    for (kind, act, ended) in [
        ("fails", Act::Fail, "status = 'Failed' and attempts = 1"),
        ("hangs", Act::SleepMs(600_000), "status = 'Failed' and attempts = 1"),
        ("rests", Act::AskForRestMs(3_600_000), "status = 'Pending' and attempts = 0 and run_at > now()"),
        ("panics", Act::Panic, "status in ('Queued', 'Running')"),
    ] {
        world.push_tries("q", 1, [TestJob::new(kind, 1).act(act)]).await;
        if kind == "hangs" {
            until_held(&world, kind, 1).await;
        }
        world.until(&format!("select count(*) from starts where kind = '{kind}'"), 1).await;
        world.until(&status(kind, ended), 1).await;
        until_held(&world, kind, 0).await;
    }
    drop(worker);
    let _worker = world.worker_with("two", "q", WorkerOptions::default());
    assert!(world.gate.open("job:rests").await.unwrap());
    for kind in kinds {
        world.push("q", [TestJob::new(kind, 2)]).await;
        world.until(&format!("select count(*) from starts where kind = '{kind}' and number = 2"), 1).await;
        until_held(&world, kind, 0).await;
    }
}

/// A panic of a handler ends its worker, which is started again, and the job runs again as after a crash.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_handler_panics_is_started_again() {
    let world = World::new(only("mail", rate(100, HOUR).concurrency(1).lease(HOUR))).await;
    let _worker = world.worker("q");
    world.push("q", [TestJob::new("mail", 1).act(Act::Panic)]).await;
    world.until("select count(*) from starts", 1).await;
    world.push("q", [TestJob::new("mail", 2)]).await;
    world.until_done(2).await;
    assert_eq!(world.number("select count(*) from starts where number = 1").await, 2);
    assert_eq!(world.number("select count(*) from starts where number = 2").await, 1);
}

/// A lease that is released again changes nothing in the store, also when another run has the place.
#[tokio::test(flavor = "multi_thread")]
async fn s12_a_second_release_changes_nothing() {
    let world = World::new(Jobs::new().job("mail", JobPolicy::new().concurrency(1).lease(HOUR))).await;
    let (tollgate, limit, key) = (world.gate.tollgate(), "jobs.type.mail.running", "job:mail");
    let first = tollgate.acquire(limit, key).await.unwrap().unwrap();
    let id = first.id();
    first.release().await.unwrap();
    assert_eq!(held(&world, "mail").await, 0);
    let second = tollgate.acquire(limit, key).await.unwrap().unwrap();
    let again = tollgate.settle(id, &Settlement::Release).await.unwrap();
    assert_eq!((again, held(&world, "mail").await), (Settled::Already, 1));
    assert!(tollgate.acquire(limit, key).await.unwrap().is_err(), "the place is taken");
    second.release().await.unwrap();
    assert_eq!(held(&world, "mail").await, 0);
}
