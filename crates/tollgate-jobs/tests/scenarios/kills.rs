//! Workers and the database are killed at random moments, and replies are lost: no job is lost, none runs twice without a crash in
//! between, nothing starts beyond its limit or before its time, no more run at once than may, and no lease outlives its time.
//!
//! `TOLLGATE_KILLS=50 cargo test --release -p tollgate-jobs --test scenarios kills:: -- --nocapture` is the long version; `TOLLGATE_SEED` chooses
//! other moments.

use std::process::Child;
use std::time::{Duration, Instant};

use sqlx::Row;
use tollgate_jobs::Jobs;
use tollgate_jobs::adapter::prepare;
use tollgate_testkit::Random;
use tollgate_testkit::proxy::{FaultProxy, Mode};

use crate::in_a_process;
use crate::world::*;

const LIMIT: u64 = 30;
const RUNNING: u64 = 4;
const LEASE: Duration = Duration::from_secs(4);

/// How long after an outage of the database a worker may start jobs before it ends because of it: those run again.
const LEARNS_WITHIN_US: i64 = 5_000_000;

/// Workers are not taken for dead because the machine is busy.
fn options() -> WorkerOptions {
    WorkerOptions { heartbeat: 3 * SECOND, ..WorkerOptions::default() }
}

fn policies() -> Jobs {
    only("mail", rate(LIMIT, SECOND).concurrency(RUNNING).lease(LEASE))
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Pushes jobs under ids of our own, so that a push whose answer was lost can be repeated.
async fn push(world: &World, numbers: std::ops::Range<i64>, act: impl Fn(i64) -> Act) {
    let ids: Vec<String> = numbers.clone().map(|number| format!("01{number:024}")).collect();
    let jobs: Vec<Vec<u8>> = numbers
        .map(|number| serde_json::to_vec(&TestJob::new("mail", number).act(act(number))).unwrap())
        .collect();
    let text = "insert into apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at, priority)
        select u.id, 'q', u.job, 'Pending', 0, 25, now(), 0 from unnest($1::text[], $2::bytea[]) as u(id, job) on conflict do nothing";
    let begun = Instant::now();
    while let Err(error) = sqlx::query(text).bind(&ids).bind(&jobs).execute(&world.pool).await {
        assert!(begun.elapsed() < Duration::from_secs(60), "cannot push: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// When something was killed, on the database's clock: between these two instants, in µs.
async fn clock(world: &World) -> i64 {
    loop {
        let text = "select (extract(epoch from clock_timestamp()) * 1000000)::bigint";
        if let Ok(row) = sqlx::query(text).fetch_one(&world.pool).await {
            return row.get(0);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many ran at once at most, where leases could be renewed: a run counts until the database was away next, and not if it started while that was so or
/// less than a lease later, when its own may have been another's already. A run that was killed has no end, and counts until the next kill.
async fn most_at_once(world: &World, kills: &[(i64, i64)], outages: &[(i64, i64)]) -> (i64, usize) {
    let us = |column| format!("(extract(epoch from {column}) * 1000000)::bigint");
    let runs = format!("select {}, {} from starts s left join ends e using (run)", us("s.at"), us("e.at"));
    let rows = sqlx::query(sqlx::AssertSqlSafe(runs)).fetch_all(&world.pool).await.unwrap();
    let lease = i64::try_from(LEASE.as_micros()).unwrap();
    let first_after = |spans: &[(i64, i64)], at: i64| {
        spans.iter().map(|(begin, _)| *begin).filter(|begin| *begin >= at).min()
    };
    let mut changes: Vec<(i64, i64)> = Vec::new();
    for row in &rows {
        let (start, end): (i64, Option<i64>) = (row.get(0), row.get(1));
        if outages.iter().any(|(begin, end)| (*begin..*end + lease).contains(&start)) {
            continue;
        }
        let end = end.or_else(|| first_after(kills, start)).unwrap_or(start);
        let end = first_after(outages, start).map_or(end, |outage| outage.min(end));
        changes.extend([(start, 1), (end.max(start) + 1, -1)]);
    }
    let count = changes.len() / 2;
    changes.sort_unstable();
    let running = changes.iter().scan(0, |running, (_, change)| {
        *running += change;
        Some(*running)
    });
    (running.max().unwrap_or(0), count)
}

/// How many runs started before the time until which their job was put off last, and were not called meanwhile.
const EARLY: &str = "select count(*) from starts s
    join apalis.jobs j on (convert_from(j.job, 'UTF8')::json ->> 'number')::bigint = s.number
    join lateral (select d.run_at, d.logged from delays d where d.job = j.id and d.logged < s.at order by d.logged desc limit 1) d on true
    where s.at < d.run_at and not exists (select from calls c where c.job = j.id and c.logged between d.logged and s.at)";

/// Logs when jobs that sleep are called.
const LOG_CALLS: &str = "create table calls (job text, logged timestamptz);
    create function log_call() returns trigger language plpgsql as $$ begin
      insert into calls values (new.id, clock_timestamp()); return new; end $$;
    create trigger log_call after update on apalis.jobs for each row
      when (old.status = 'Pending' and new.status = 'Pending' and new.run_at < old.run_at) execute function log_call()";

/// What must hold when all is over; `kills` are spans in which something was killed, and `outages` those in which it was the database.
async fn check(world: &World, pushed: i64, kills: &[(i64, i64)], outages: &[(i64, i64)]) {
    world.until_done(pushed).await;
    let rows = sqlx::query(
        "select number, (extract(epoch from at) * 1000000)::bigint from starts order by number, at",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    let starts: Vec<(i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let mut again = 0;
    for pair in starts.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        let (number, from, to) = (pair[0].0, pair[0].1, pair[1].1);
        let is_between = |(begin, end): &(i64, i64)| *end >= from && *begin <= to;
        let ends_soon = |(begin, end): &(i64, i64)| is_between(&(*begin, *end + LEARNS_WITHIN_US));
        let is_crash = kills.iter().any(is_between) || outages.iter().any(ends_soon);
        let before = kills.iter().map(|(_, end)| from - end).filter(|us| *us >= 0).min();
        assert!(
            is_crash,
            "job {number} ran twice, {} ms apart, and nothing was killed in between (its first start was {:?} ms after a kill)",
            (to - from) / 1_000,
            before.map(|us| us / 1_000)
        );
        again += 1;
    }
    let mut numbers: Vec<i64> = starts.iter().map(|(number, _)| *number).collect();
    numbers.dedup();
    assert_eq!(numbers.len(), usize::try_from(pushed).unwrap(), "every job ran");
    // Every start has a permit of its own, and no window has more permits than it may.
    let permits = world.number("select count(*) from permits where limit_name = 'jobs.type.mail'").await;
    assert!(permits >= i64::try_from(starts.len()).unwrap(), "{permits} permits, {} starts", starts.len());
    let most = world.most_permits("jobs.type.mail", SECOND).await;
    assert!(most <= i64::try_from(LIMIT).unwrap(), "{most} permits in a second");
    assert_eq!(world.number(EARLY).await, 0, "a job started before the time until which it was put off");
    let (at_once, counted) = most_at_once(world, kills, outages).await;
    assert!(at_once <= i64::try_from(RUNNING).unwrap(), "{at_once} ran at once");
    // No lease outlives its time.
    let begun = Instant::now();
    loop {
        // What counts is when it is asked: the answer may take its time.
        let asked = begun.elapsed();
        let status = world.gate.tollgate().status("jobs.type.mail.running", "job:mail").await;
        if status.as_ref().is_ok_and(|status| status.used() == 0) {
            break;
        }
        assert!(status.is_err() || asked < LEASE + SECOND, "a lease outlives its time");
        assert!(asked < LEASE + 60 * SECOND, "{status:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let delays = world.number("select count(*) from delays").await;
    println!(
        "{pushed} jobs, {} kills, {again} ran again, {permits} permits, {delays} delays, {at_once} at once at most ({counted} runs)",
        kills.len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_and_the_database_are_killed_at_random_moments() {
    const NAME: &str = "kills::workers_and_the_database_are_killed_at_random_moments";
    if let Ok(url) = std::env::var("TOLLGATE_JOBS_WORKER") {
        let pool = pool_at(&url).await;
        let gate = gate_at(&url, &pool, policies(), |builder| builder).await;
        prepare(&gate).await.unwrap();
        let _worker = work(&gate, &pool, "killed", "q", options());
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        return;
    }
    let (count, seed) = (setting("TOLLGATE_KILLS", 10), setting("TOLLGATE_SEED", 12));
    println!("{count} kills of seed {seed}");
    let mut random = Random::seeded(seed);
    let world = World::new(policies()).await;
    world.server.psql(LOG_CALLS);
    let mut workers: Vec<Child> = (0..2).map(|_| in_a_process(NAME, &world.url)).collect();
    world.push("q", []).await;
    let (mut pushed, mut kills, mut outages) = (0, Vec::new(), Vec::new());
    for _ in 0..count {
        let more = 4 + i64::try_from(random.below(12)).unwrap();
        push(&world, pushed..pushed + more, |number| match number % 3 {
            0 => Act::SleepMs(150),
            // It writes down when it ends, as each of them has to.
            _ => Act::SleepMs(0),
        })
        .await;
        pushed += more;
        tokio::time::sleep(Duration::from_millis(50 + random.below(1_200))).await;
        let begin = clock(&world).await;
        let is_outage = random.chance(300);
        if is_outage {
            tokio::task::block_in_place(|| world.server.restart());
        } else {
            let index = usize::try_from(random.below(2)).unwrap();
            workers[index].kill().unwrap();
            workers[index].wait().unwrap();
            workers[index] = in_a_process(NAME, &world.url);
        }
        let span = (begin, clock(&world).await);
        kills.push(span);
        outages.extend(is_outage.then_some(span));
    }
    // A worker that an error of the database ended may give its claims back some time later.
    check(&world, pushed, &kills, &outages).await;
    for mut worker in workers {
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
}

/// Between worker and database, replies are swallowed and connections reset: what was carried out and what was not is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn lost_replies_double_and_lose_nothing() {
    let world = World::new(policies()).await;
    world.server.psql(LOG_CALLS);
    let proxy = FaultProxy::start_seeded(world.server.port(), 7);
    let url = world.url.replace(&world.server.port().to_string(), &proxy.port().to_string());
    let pool = pool_at(&url).await;
    let gate = gate_at(&url, &pool, policies(), |builder| builder).await;
    prepare(&gate).await.unwrap();
    let _workers = [work(&gate, &pool, "one", "q", options()), work(&gate, &pool, "two", "q", options())];
    let mut random = Random::seeded(setting("TOLLGATE_SEED", 3));
    let (mut pushed, mut faults) = (0, Vec::new());
    for _ in 0..6 {
        // Each writes down when it ends.
        push(&world, pushed..pushed + 15, |_| Act::SleepMs(0)).await;
        pushed += 15;
        tokio::time::sleep(Duration::from_millis(100 + random.below(500))).await;
        let begin = clock(&world).await;
        match random.below(3) {
            0 => proxy.swallow_next(5),
            1 => proxy.reset_connections(),
            _ => {
                proxy.set(Mode::SwallowReplies);
                tokio::time::sleep(Duration::from_millis(200)).await;
                proxy.set(Mode::Reset);
            }
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
        faults.push((begin, clock(&world).await));
    }
    check(&world, pushed, &faults, &faults).await;
}
