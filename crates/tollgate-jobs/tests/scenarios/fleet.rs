//! Many jobs, many tenants, several workers.

use std::time::{Duration, Instant};

use tollgate_jobs::adapter::prepare;
use tollgate_jobs::{Job, JobDecision, Jobs};

use crate::world::*;

#[tokio::test(flavor = "multi_thread")]
async fn s26_no_job_is_overtaken_by_one_that_came_more_than_a_window_later() {
    // Twenty a second; on a busy machine in a longer window, because a handler may start a second after its permit.
    let (seconds, window) = in_full((60, SECOND), (6, 3 * SECOND));
    let limit = 20 * window.as_secs();
    let world = World::new(only("mail", rate(limit, window))).await;
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
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    for tick in 0..seconds * 10 {
        ticks.tick().await;
        world.push_all("q", (tick * 4..tick * 4 + 4).map(|number| TestJob::new("mail", number))).await;
    }
    world.until_done(seconds * 40).await;
    let overtaken = format!(
        "with runs as (select s.number, s.at as started, p.at as pushed from starts s join pushed p using (number))
        select count(*) from runs a join runs b on b.pushed > a.pushed + interval '{} seconds' and b.started < a.started",
        window.as_secs()
    );
    assert_eq!(world.number(&overtaken).await, 0);
    assert_eq!(world.starts("mail").await, seconds * 40);
    let most = world.most_permits("jobs.type.mail", window).await;
    assert!(most <= i64::try_from(limit).unwrap(), "{most} in a window");
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
    // In full that is less than a second; on any machine it is a tenth of them at most, and later next to none.
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
    assert!(!full() || waits.iter().all(|wait| *wait <= 1_000), "{waits:?} ms");
    let put_off = "select case when bool_or(until_us = 0) then 0 else least(count(*), 9000) end from tollgate_job_waiting";
    world.until(put_off, 9_000).await;
    let waiting = world.gate.status("job:call").await.unwrap().waiting;
    assert!((9_000..10_000).contains(&waiting), "{waiting} wait");
    assert!(claimed < 2_000, "{claimed} of 10,000 jobs were claimed one by one");
    // Else polls would read all jobs that wait, by apalis's own index, until autovacuum comes round.
    world.until("select least(analyze_count, 1) from pg_stat_user_tables where relname = 'jobs'", 1).await;
    // The first come while the ten thousand are put off; most wait for what two workers have in their hands, though nearly all of those jobs
    // are still there.
    before.sort_unstable();
    assert!(before[7] <= 1_000, "{before:?} of 10,000 jobs of one tenant went before another's");
    assert!(before[4] <= 100, "{before:?} jobs of one tenant went before another's");
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

/// Jobs that take places in a line wait without a connection while it is locked, as it is when many are put off: the pool has twenty, and
/// workers fetch through it.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_line_keeps_no_connection() {
    let world = World::new(only("call", rate(1, HOUR))).await;
    let enter = |number: usize| {
        let gate = world.gate.clone();
        let plan = gate.plan(&Job::new(&format!("job-{number}"), "call", "q")).unwrap();
        async move { matches!(gate.enter(&plan).await, JobDecision::Delay(_)) }
    };
    assert!(!enter(1).await, "the first runs");
    assert!(enter(2).await, "the second stands in line");
    let mut writer = world.pool.begin().await.unwrap();
    let lock = "select tollgate_job_lock_lines(array(select distinct key from tollgate_job_line))";
    sqlx::query(lock).execute(&mut *writer).await.unwrap();
    let waiting: Vec<_> = (3..43).map(|number| tokio::spawn(enter(number))).collect();
    // They look every 20 ms. One that waited in the database would be seen in one of these looks.
    for _ in 0..20 {
        let waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted";
        assert_eq!(world.server.psql(waits), "0", "a connection waits for the line");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    assert!(waiting.iter().all(|job| !job.is_finished()), "the line is locked");
    writer.commit().await.unwrap();
    for job in waiting {
        assert!(job.await.unwrap(), "it is put off");
    }
}

/// Jobs that workers have claimed at the same time are charged a few at a time until one is denied. The others take their places with it, in few
/// transactions: they neither ask the limiter nor stand in line one by one.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_come_together_take_their_places_together() {
    let world = World::new(only("call", rate(5, HOUR))).await;
    world.server.psql("alter system set log_statement = 'all'");
    world.server.psql("select pg_reload_conf()");
    while world.server.psql("show log_statement") != "all" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // On connections of its own, which log from the start.
    let pool = pool_at(&world.url).await;
    let gate = gate_at(&world.url, &pool, only("call", rate(5, HOUR)), |builder| builder).await;
    let enter = |number: usize| {
        let gate = gate.clone();
        tokio::spawn(async move {
            let plan = gate.plan(&Job::new(&format!("job-{number:03}"), "call", "q")).unwrap();
            gate.enter(&plan).await.name()
        })
    };
    let entered: Vec<_> = (0..300).map(enter).collect();
    let mut names = Vec::new();
    for job in entered {
        names.push(job.await.unwrap());
    }
    let count = |name: &str| names.iter().filter(|other| **other == name).count();
    assert_eq!((count("run"), count("delay")), (5, 295));
    let log = world.server.log();
    let calls = |function: &str| {
        log.lines().filter(|line| line.contains("LOG:  execute ") && line.contains(function)).count()
    };
    // Five that run, and eight at most that are charged when the first is denied; those that come at the same time share a call.
    let charges = calls("tollgate_charge(") + calls("tollgate_charge_each(");
    assert!((1..=20).contains(&charges), "{charges} calls charged 300 jobs");
    assert_eq!(calls("tollgate_job_look("), 300, "the log has every statement");
    let (alone, together) = (calls("tollgate_job_stand("), calls("tollgate_job_put_off("));
    assert!(alone == 0 && together <= 150, "{alone} stood alone, {together} transactions");
    let line = "select count(distinct place), count(*), max(place) from tollgate_job_line";
    assert_eq!(world.server.psql(line), "295|295|295", "each has a place of its own");
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

#[tokio::test(flavor = "multi_thread")]
async fn s25_a_429_closes_the_key_for_all_and_costs_no_attempt() {
    let policies = || only("call", rate(100, SECOND));
    let world = World::new(policies()).await;
    // The other worker has a gate and connections of its own, as another process has.
    let pool = pool_at(&world.url).await;
    let other = gate_at(&world.url, &pool, policies(), |builder| builder).await;
    prepare(&other).await.unwrap();
    world.push("q", [TestJob::new("call", 1).act(Act::AskForRestMs(2_000))]).await;
    let _workers = (world.worker("q"), work(&other, &pool, "other", "others", WorkerOptions::default()));
    world.until("select count(*) from tollgate_job_closed", 1).await;
    // Three for the worker whose job was sent away, and three for the one that knows of it from the database.
    world.push("q", (2..5).map(|number| TestJob::new("call", number))).await;
    world.push("others", (5..8).map(|number| TestJob::new("call", number))).await;
    let until = world.number("select until_us from tollgate_job_closed").await;
    world.until_done(7).await;
    let early = format!(
        "select count(*) from starts where extract(epoch from at) * 1000000 < {until} and at > (select min(at) from starts)"
    );
    assert_eq!(world.number(&early).await, 0);
    assert_eq!(world.starts("call").await, 8, "the one that was sent away ran again");
    let workers = "select count(distinct job_type) from apalis.jobs where status = 'Done'";
    assert_eq!(world.number(workers).await, 2, "each worker has a queue");
    assert_eq!(world.number("select max(attempts)::bigint from apalis.jobs").await, 1);
}

/// The remote side of a type without a policy asks for rest. Its queue and all jobs have limits, which are not closed for that.
#[tokio::test(flavor = "multi_thread")]
async fn a_429_of_a_type_without_a_policy_holds_up_that_job_alone() {
    let world = World::new(Jobs::new().queue("q", rate(100, SECOND)).global(rate(100, SECOND))).await;
    let _worker = world.worker("q");
    world.push("q", [TestJob::new("call", 1).act(Act::AskForRestMs(3_600_000))]).await;
    let asleep = "select count(*) from apalis.jobs where status = 'Pending' and attempts = 0 and run_at > now() + interval '50 minutes'";
    world.until(asleep, 1).await;
    assert_eq!(world.number("select count(*) from tollgate_job_closed").await, 0);
    world.push("q", jobs("call", 5)).await;
    world.push("q", jobs("other", 5)).await;
    world.until_done(10).await;
    assert_eq!(world.number(asleep).await, 1);
}

/// A second page that is put off shortly after the first, whose jobs were all due by the planner's statistics: a poll would read all of them.
#[tokio::test(flavor = "multi_thread")]
async fn statistics_are_renewed_after_the_last_jobs_that_were_put_off() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    // The database does not do it by itself meanwhile.
    world.server.psql("alter table apalis.jobs set (autovacuum_enabled = off)");
    let _worker = world.worker("q");
    let renewed = "select coalesce(max(analyze_count), 0) from pg_stat_user_tables where schemaname = 'apalis' and relname = 'jobs'";
    let waiting = "select count(*) from apalis.jobs where status = 'Pending' and run_at > now()";
    for round in 1..=2 {
        world.push_all("q", jobs("mail", 1_500)).await;
        world.until(waiting, 1_500 * round - 1).await;
        world.until(renewed, round).await;
    }
    // Twenty thousand jobs wait, and one has ended long ago, by which some of the others seem to be due. apalis polls by a plan that is made once
    // and for any batch.
    world.server.psql(
        "insert into apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at)
           select 'w' || n, 'q', '{}', 'Pending', 0, 25, now() + n * interval '1 ms' + interval '1 hour' from generate_series(1, 17000) n;
         update apalis.jobs set run_at = now() - interval '1 day' where status = 'Done'; analyze apalis.jobs",
    );
    let due = "select id from apalis.jobs where (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) and run_at < now()
        and job_type = $1 order by priority desc, run_at limit $2 for update skip locked";
    let plan = world.server.psql(&format!(
        "set plan_cache_mode = force_generic_plan; prepare due(text, integer) as {due}; explain execute due('q', 10)"
    ));
    assert!(plan.contains("tollgate_job_due"), "{plan}");
}

/// Somebody else has the table locked when the statistics are to be renewed, as a vacuum does: that is passed over by the database, and done
/// when the table is free.
#[tokio::test(flavor = "multi_thread")]
async fn statistics_that_could_not_be_renewed_are_renewed_later() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    world.server.psql("alter table apalis.jobs set (autovacuum_enabled = off)");
    let mut vacuum = world.pool.begin().await.unwrap();
    sqlx::query("lock table apalis.jobs in share update exclusive mode").execute(&mut *vacuum).await.unwrap();
    let _worker = world.worker("q");
    world.push_all("q", jobs("mail", 1_500)).await;
    world.until("select count(*) from apalis.jobs where status = 'Pending' and run_at > now()", 1_499).await;
    let begun = Instant::now();
    while !world.server.log().contains("skipping analyze of \"jobs\"") {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody tried");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    vacuum.rollback().await.unwrap();
    let renewed = "select count(*) from pg_stat_user_tables where schemaname = 'apalis' and relname = 'jobs' and analyze_count > 0";
    world.until(renewed, 1).await;
}

/// The sleep of a job whose slot stays goes on by a new time in apalis's row alone. The line has an old one then, and those who sleep are called
/// all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_that_goes_on_is_written_once_and_called_like_any_other() {
    let world = World::new(only("mail", rate(1, HOUR).max_delay(8 * SECOND))).await;
    world.push_all("q", jobs("mail", 41)).await;
    let _worker = world.worker("q");
    // Those that were put off more often than the line says, and whose sleep would be over by what it says.
    let went_on = "select least(count(*), 20) from tollgate_job_waiting w join apalis.jobs j on j.id = w.job
        where w.delays < (select count(*) from delays d where d.job = w.job) and w.until_us < tollgate_job_now_us()
          and j.run_at > now() + interval '3 seconds' and j.lock_by is null";
    world.until(went_on, 20).await;
    world.gate.reload(only("mail", rate(1_000, SECOND))).await.unwrap();
    let asleep = "select count(*) from apalis.jobs where status = 'Pending' and run_at > clock_timestamp() + interval '2 seconds'";
    assert_eq!(world.number(asleep).await, 0);
    world.until_done(41).await;
}
