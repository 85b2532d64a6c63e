//! Many jobs, many tenants, several workers.

use std::time::Duration;

use crate::world::*;

/// The database's clock, in ms.
const CLOCK: &str = "select (extract(epoch from clock_timestamp()) * 1000)::bigint";

#[tokio::test(flavor = "multi_thread")]
async fn s26_no_job_is_overtaken_by_one_that_came_more_than_a_window_later() {
    // Twenty a second, in a window that is long enough for a busy machine, where a handler may start a second after its permit.
    let world = World::new(only("mail", rate(60, 3 * SECOND))).await;
    world.server.psql(
        "create table pushed (number bigint primary key, at timestamptz);
         create function log_push() returns trigger language plpgsql as $$ begin
           insert into pushed values ((convert_from(new.job, 'UTF8')::json ->> 'number')::bigint, clock_timestamp()); return null; end $$;
         create trigger log_push after insert on apalis.jobs for each row execute function log_push();",
    );
    let _workers = (
        world.worker_with("one", "q", WorkerOptions::default()),
        world.worker_with("two", "q", WorkerOptions::default()),
    );
    // At twice the limit.
    let seconds: i64 =
        std::env::var("TOLLGATE_ORDER_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    for tick in 0..seconds * 10 {
        ticks.tick().await;
        world.push_all("q", (tick * 4..tick * 4 + 4).map(|number| TestJob::new("mail", number))).await;
    }
    world.until_done(seconds * 40).await;
    let overtaken = "with runs as (select s.number, s.at as started, p.at as pushed from starts s join pushed p using (number))
        select count(*) from runs a join runs b on b.pushed > a.pushed + interval '3 seconds' and b.started < a.started";
    assert_eq!(world.number(overtaken).await, 0);
    assert_eq!(world.starts("mail").await, seconds * 40);
    assert!(world.most_permits("jobs.type.mail", 3 * SECOND).await <= 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn s27_a_tenant_with_ten_thousand_jobs_does_not_delay_another() {
    let world = World::new(only("call", rate(5, SECOND).key("tenant"))).await;
    let _workers = (
        world.worker_with("one", "q", WorkerOptions::default()),
        world.worker_with("two", "q", WorkerOptions::default()),
    );
    for chunk in 0..4 {
        let of_one =
            (chunk * 2_500..(chunk + 1) * 2_500).map(|number| TestJob::new("call", number).of("one"));
        world.push_all("q", of_one).await;
    }
    // While those are put off, and after. How long it waits is how many go before it: each that a worker claims costs it a look at the line.
    // Whether that is less than a second is measured by `-- jobs` of the benches; here it is a tenth of them at most, and later next to none.
    let (mut waits, mut before) = (Vec::new(), Vec::new());
    for number in 0..8 {
        let pushed = world.number(CLOCK).await;
        world.push("q", [TestJob::new("call", 100_000 + number).of("two")]).await;
        let started = format!("select count(*) from starts where number = {}", 100_000 + number);
        world.until(&started, 1).await;
        let at = "select (extract(epoch from max(at)) * 1000)::bigint from starts where tenant = 'two'";
        let at = world.number(at).await;
        let between = |column| format!("extract(epoch from {column}) * 1000 between {pushed} and {at}");
        let claimed = format!(
            "select (select count(*) from delays where was_claimed and {}) + (select count(*) from starts where tenant = 'one' and {})",
            between("logged"),
            between("at")
        );
        before.push(world.number(&claimed).await);
        waits.push(at - pushed);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let claimed = world.number("select count(*) from delays where was_claimed").await;
    let put_off = world.number("select count(*) from delays where not was_claimed").await;
    println!(
        "the other tenant waited {waits:?} ms behind {before:?} jobs; {claimed} jobs were claimed to be put off, {put_off} were not"
    );
    world.until("select count(*) from tollgate_job_waiting where until_us = 0", 0).await;
    let waiting = world.gate.status("job:call").await.unwrap().waiting;
    assert!((9_000..10_000).contains(&waiting), "{waiting} wait");
    assert!(claimed < 2_000, "{claimed} of 10,000 jobs were claimed one by one");
    // The first comes while the ten thousand are put off; the others wait for what two workers have in their hands, though nearly all of
    // those jobs are still there.
    let others = before.split_off(1);
    assert!(before[0] <= 1_000, "{before:?} of 10,000 jobs of one tenant went before another's");
    assert!(others.iter().all(|jobs| *jobs <= 100), "{others:?} jobs of one tenant went before another's");
    let most = "select max(n)::bigint from (select (select count(*) from starts b where b.tenant = 'one' and b.at <= a.at
        and b.at > a.at - interval '900 milliseconds') as n from starts a where a.tenant = 'one') as x";
    assert!(world.number(most).await <= 6, "five in a second, and the jitter of a handler's start");
    // Each has a slot of its own, five a second: the last one's is in more than half an hour.
    let ends = world.gate.status("job:call").await.unwrap().backlog_ends.unwrap();
    assert!(ends > Duration::from_secs(1_800) && ends < Duration::from_secs(2_100), "{ends:?}");
}

/// One who takes the first place of a line holds its lock; who puts off many waits for it, and then sees that place. Without that both would
/// take the same one, and a job would lose its place.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_was_empty_is_locked_before_it_is_looked_at() {
    let world = World::new(only("call", rate(1, HOUR))).await;
    let key = "'00000000-0000-0000-0000-000000000001'::uuid";
    let mut first = world.pool.begin().await.unwrap();
    let stands = format!(
        "select now_us from tollgate_job_stand('first', 'q', 'call', array[{key}], array['job:call'], array[1::bigint], array[true],
           array[null::bigint], null, null, array[]::uuid[], 2000000, true)"
    );
    sqlx::query(sqlx::AssertSqlSafe(stands)).execute(&mut *first).await.unwrap();
    let pool = world.pool.clone();
    let many = tokio::spawn(async move {
        let mut many = pool.begin().await.unwrap();
        let lock = format!("select tollgate_job_lock_lines(array[{key}])");
        sqlx::query(sqlx::AssertSqlSafe(lock)).execute(&mut *many).await.unwrap();
        let ends = format!("select last from tollgate_job_line_ends(array[{key}], 2000000)");
        let ends: Option<i64> =
            sqlx::query_scalar(sqlx::AssertSqlSafe(ends)).fetch_optional(&mut *many).await.unwrap();
        ends
    });
    let waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted";
    while world.number(waits).await == 0 {
        assert!(!many.is_finished(), "an empty line was looked at without its lock: {:?}", many.await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    first.commit().await.unwrap();
    assert_eq!(many.await.unwrap(), Some(1), "the place that was taken meanwhile");
}

/// A thousand jobs of as many tenants are put off in pages that lock few lines each.
#[tokio::test(flavor = "multi_thread")]
async fn many_tenants_are_put_off_together_with_few_locks() {
    let world = World::new(only("call", rate(5, SECOND).also(100, HOUR).key("tenant"))).await;
    world.server.psql(
        "create table locks (number bigint);
         create function log_locks() returns trigger language plpgsql as $$ begin
           insert into locks select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid(); return null; end $$;
         create trigger log_locks after insert on tollgate_job_waiting for each statement execute function log_locks();",
    );
    // All of them have to wait.
    world.gate.close("job:call", HOUR).await.unwrap();
    world
        .push_all("q", (0..1_000).map(|number| TestJob::new("call", number).of(&format!("tenant-{number}"))))
        .await;
    let _worker = world.worker("q");
    world.until("select count(*) from tollgate_job_waiting where until_us > 0", 1_000).await;
    let claimed = world.number("select count(*) from delays where was_claimed").await;
    assert!(claimed <= 300, "{claimed} of 1,000 jobs were claimed one by one");
    let locks = world.number("select max(number) from locks").await;
    // 256 lines, and that of the queue.
    assert!((200..=257).contains(&locks), "{locks} advisory locks at once");
    assert_eq!(
        world.number("select count(*) from tollgate_job_line").await,
        2_000,
        "each in both of its lines"
    );
}
