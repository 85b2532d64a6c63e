//! Limits that change while jobs wait.

use std::path::Path;
use std::time::{Duration, Instant};

use apalis_postgres::PostgresStorage;
use tollgate::Charge;
use tollgate::config::{OverrideFields, StoredOverride};
use tollgate::store::{Record, RecordKind};
use tollgate_jobs::adapter::prepare;
use tollgate_jobs::{JobGate, JobsConfig, JobsReader};
use tollgate_testkit::postgres::PostgresServer;

use crate::world::*;

#[tokio::test(flavor = "multi_thread")]
async fn s24_waiting_jobs_follow_a_changed_limit() {
    let world = World::new(only("mail", rate(1, 60 * SECOND))).await;
    world.push("q", jobs("mail", 51)).await;
    let _workers = (world.worker("q"), world.worker_with("two", "q", WorkerOptions::default()));
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 50).await;
    // One of them is just in a worker's hands, which will put it off by the old limit; in full, none is.
    world.until("select count(*) from apalis.jobs where status = 'Pending' and run_at > now()", 50).await;
    let late = in_full("(null)", "(select max(id) from apalis.jobs where status = 'Pending')");
    world.server.psql(&format!(
        "create table late as select id, run_at from apalis.jobs where id = {late};
         update apalis.jobs set status = 'Queued', lock_by = (select min(id) from apalis.workers) where id in (select id from late)"
    ));
    let clock = "select (extract(epoch from clock_timestamp()) * 1000000)::bigint";
    let raised = world.number(clock).await;
    world.gate.reload(only("mail", rate(100, SECOND))).await.unwrap();
    let reloaded = world.number(clock).await;
    // All others are called: nobody sleeps until the time that the old limit gave.
    let asleep = "select count(*) from apalis.jobs where status = 'Pending' and run_at > clock_timestamp() + interval '2 seconds'";
    assert_eq!(world.number(asleep).await, 0);
    world.until_done(in_full(51, 50)).await;
    // They run at the pace of the new limit: fifty at a hundred a second fit at once, so that none is put off by more than a window. How soon
    // they have run is up to the machine: three seconds, in full.
    let put_off = format!(
        "select coalesce(max(extract(epoch from run_at - logged) * 1000)::bigint, 0) from delays
         where extract(epoch from logged) * 1000000 > {reloaded} and job not in (select id from late)"
    );
    let put_off = world.number(&put_off).await;
    assert!(put_off <= 1_000, "put off by {put_off} ms");
    let took = world.number(&format!("select max(at_us) - {raised} from permits")).await;
    println!("s24: the last waiting job ran {took} µs after the limit was raised");
    assert!(took <= in_full(3_000_000, 60_000_000), "{took} µs; the old limit would take 50 minutes");
    // The one in a worker's hands is put back, for a time in minutes.
    world.server.psql(
        "update apalis.jobs j set status = 'Pending', lock_by = null, run_at = l.run_at + interval '5 minutes' from late l where l.id = j.id",
    );
    world.until_done(51).await;
    // Lowered while four wait, whose slots by the old limit are one and the same: no start beyond the new limit.
    world.gate.reload(only("post", rate(6, 20 * SECOND))).await.unwrap();
    world.push("q", jobs("post", 10)).await;
    world.until("select count(*) from tollgate_job_waiting where delays > 0 and job_type = 'post'", 4).await;
    world.until("select count(*) from starts where kind = 'post'", 6).await;
    let text = "[jobs.types.post]\nlimit = 1\nwindow = '1s'\n";
    let mut section = JobsConfig::default();
    let config = tollgate::config::Config::parse_with(text, [], &mut [&mut section]).unwrap();
    world.gate.reload_config(&config, &section).await.unwrap();
    let lowered = world.number(clock).await;
    world.until_done(61).await;
    world.server.psql(&format!("delete from permits where at_us <= {lowered}"));
    let limit = "jobs.type.post";
    let permits = format!("select count(*) from permits where limit_name = '{limit}'");
    assert_eq!((world.number(&permits).await, world.most_permits(limit, SECOND).await), (4, 1));
    let refused = world.gate.reload(only("post", rate(0, SECOND))).await.unwrap_err().to_string();
    assert!(refused.contains("the job type `post`"), "{refused}");
    assert_eq!(world.gate.status("job:post").await.unwrap().limit, 1, "the last good one stays");
}

/// Waits until a gate counts by this limit.
async fn until_limit(gate: &JobGate, wanted: u64) {
    let begun = Instant::now();
    while gate.status("job:mail").await.unwrap().limit != wanted {
        assert!(begun.elapsed() < Duration::from_secs(60), "the gate did not follow its file");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn until_allowed(gate: &JobGate, wanted: bool) {
    let (begun, charges) = (Instant::now(), [Charge::new("jobs.type.mail", "job:mail")]);
    while gate.tollgate().peek(&charges).await.unwrap().is_allowed() != wanted {
        assert!(begun.elapsed() < Duration::from_secs(60), "the gate did not follow the override");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_follow_their_config_file() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let pool = pool_at(&url).await;
    PostgresStorage::<()>::setup(&pool).await.unwrap();
    let file = std::env::temp_dir().join(format!("tollgate-jobs-{}.toml", std::process::id()));
    let write = |limit: &str| {
        let store = format!(
            "[store]\nmode = 'postgres'\ntimeout = '2s'\nfallback = 'closed'\npostgres = {{ url = '{url}' }}\n"
        );
        // Put in its place whole, as editors and deployments do.
        let draft = file.with_extension("draft");
        std::fs::write(&draft, format!("{store}[jobs.types.mail]\n{limit}\n")).unwrap();
        std::fs::rename(&draft, &file).unwrap();
    };
    write("limit = 1\nwindow = '1h'");
    // Two workers, each with a gate of its own, as two processes have.
    let gates = [JobGate::open_file(&file).await.unwrap(), JobGate::open_file(&file).await.unwrap()];
    for gate in &gates {
        prepare(gate).await.unwrap();
    }
    let world = World::of(server, url.clone(), pool.clone(), gates[0].clone());
    let _workers = [
        work(&gates[0], &pool, "one", "q", WorkerOptions::default()),
        work(&gates[1], &pool, "two", "q", WorkerOptions::default()),
    ];
    world.push("q", jobs("mail", 21)).await;
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 20).await;
    // Raised: those who wait, up to a day, are called.
    write("limit = 100\nwindow = '1s'");
    world.until_done(21).await;
    // Lowered: it holds, with both.
    write("limit = 2\nwindow = '1s'");
    for gate in &gates {
        until_limit(gate, 2).await;
    }
    world.server.psql("truncate permits");
    world.push("q", jobs("mail", 8)).await;
    world.until_done(29).await;
    assert_eq!(world.most_permits("jobs.type.mail", SECOND).await, 2);
    // A mistake, an empty file and none at all change nothing.
    write("limit = 0\nwindow = '1s'");
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    assert_eq!(gates[0].status("job:mail").await.unwrap().limit, 2);
    std::fs::write(&file, "").unwrap();
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    assert_eq!(gates[1].status("job:mail").await.unwrap().limit, 2);
    std::fs::remove_file(&file).unwrap();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    write("limit = 3\nwindow = '1s'");
    until_limit(&gates[0], 3).await;
    std::fs::remove_file(&file).unwrap();
    let refused = JobGate::open_file(&file).await.unwrap_err().to_string();
    assert!(refused.contains("cannot read") && refused.contains("No such file"), "{refused}");
    std::fs::write(&file, "[jobs.types.mail]\nlimit = 0\nwindow = '1s'\n").unwrap();
    let refused = JobGate::open_file(Path::new(&file)).await.unwrap_err().to_string();
    assert!(refused.contains("1 mistake in") && refused.contains("tollgate validate"), "{refused}");
    std::fs::remove_file(&file).unwrap();
}

/// Limits are raised while hundreds of jobs are being put off together by the old ones, which nobody else sees yet: they are called too.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_are_put_off_together_while_a_limit_changes_follow_it() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    let _worker = world.worker("q");
    // The last of them is written only when the test lets it.
    world.server.psql(
        "create table last (id text);
         create function hold() returns trigger language plpgsql as $$ begin
           if new.job in (select id from last) then perform pg_advisory_xact_lock_shared(77); end if; return new; end $$;
         create trigger hold before insert on tollgate_job_waiting for each row execute function hold();
         create function note_last() returns trigger language plpgsql as $$ begin
           if convert_from(new.job, 'UTF8')::json ->> 'number' = '399' then insert into last values (new.id); end if; return null; end $$;
         create trigger note_last after insert on apalis.jobs for each row execute function note_last();",
    );
    let mut holder = world.pool.acquire().await.unwrap();
    sqlx::query("select pg_advisory_lock(77)").execute(&mut *holder).await.unwrap();
    world.push_all("q", jobs("mail", 400)).await;
    world
        .until("select count(*) from pg_locks where locktype = 'advisory' and objid = 77 and not granted", 1)
        .await;
    world.gate.reload(only("mail", rate(1_000, SECOND))).await.unwrap();
    sqlx::query("select pg_advisory_unlock(77)").execute(&mut *holder).await.unwrap();
    world.until_done(400).await;
}

/// The line cannot be read while limits are raised: the new ones are in place all the same, and the jobs are called when it can.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_made_also_if_waiting_jobs_cannot_be_called_yet() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    world.push("q", jobs("mail", 21)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 20).await;
    world.server.psql("alter table tollgate_job_waiting rename to away");
    let text = "[jobs.types.mail]\nlimit = 100\nwindow = '1s'\n";
    let mut section = JobsConfig::default();
    let config = tollgate::config::Config::parse_with(text, [], &mut [&mut section]).unwrap();
    world.gate.reload_config(&config, &section).await.expect("the config is good");
    assert_eq!(
        world.gate.tollgate().status("jobs.type.mail", "job:mail").await.unwrap().capacity(),
        100,
        "the new limit"
    );
    world.server.psql("alter table away rename to tollgate_job_waiting");
    // They sleep for five minutes by themselves, which is longer than is waited for here.
    world.until_done(21).await;
}

/// Jobs that wait for a closed key are called when it is opened, by a gate and by those who only look, and among them the one whose handler was sent
/// away.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_key_that_is_opened_are_called() {
    let policies = || only("mail", rate(100, SECOND).key("tenant")).job("call", rate(100, SECOND));
    let world = World::new(policies()).await;
    let config = format!(
        "[store]\nmode = 'postgres'\ntimeout = '3s'\npostgres = {{ url = '{}' }}\n\
         [jobs.types.mail]\nlimit = 100\nwindow = '1s'\nkey = 'tenant'\n[jobs.types.call]\nlimit = 100\nwindow = '1s'\n",
        world.url
    );
    let mut section = JobsConfig::default();
    let config = tollgate::config::Config::parse_with(&config, [], &mut [&mut section]).unwrap();
    let reader = JobsReader::of(&config, &section).unwrap();
    let _worker = world.worker("q");
    world.gate.close("job:mail", HOUR).await.unwrap();
    world.gate.close("job:mail:acme", HOUR).await.unwrap();
    world.push("q", (0..10).map(|number| TestJob::new("mail", number).of("acme"))).await;
    world.push("q", (10..20).map(|number| TestJob::new("mail", number))).await;
    world.push("q", [TestJob::new("call", 20).act(Act::AskForRestMs(3_600_000))]).await;
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 21).await;
    world.until("select count(*) from apalis.jobs where status = 'Pending' and run_at > now()", 21).await;
    // The type is open, and one of its tenants is not.
    assert!(world.gate.open("job:mail").await.unwrap());
    world.until_done(10).await;
    world.until("select count(*) from apalis.jobs where status = 'Pending' and run_at > now()", 11).await;
    // One tenant: only its jobs are called.
    let opened = reader.open("job:mail:acme", false, &section).await.unwrap();
    assert_eq!((opened.label.as_str(), opened.opened, opened.called), ("job:mail", 1, Some(10)));
    world.until_done(20).await;
    assert_eq!(world.starts("call").await, 1);
    // The one that was sent away.
    let opened = reader.open("job:call", true, &section).await.unwrap();
    assert_eq!((opened.opened, opened.called), (1, Some(1)));
    world.until_done(21).await;
    assert_eq!(world.number("select max(attempts)::bigint from apalis.jobs").await, 1);
    let opened = reader.open("job:call", true, &section).await.unwrap();
    assert_eq!((opened.opened, opened.called), (0, Some(0)));
    // Without the right, or without apalis, the key is opened all the same.
    world.gate.close("job:call", HOUR).await.unwrap();
    world.server.psql("alter table apalis.jobs rename to away");
    let opened = reader.open("job:call", false, &section).await.unwrap();
    assert_eq!((opened.opened, opened.called), (1, None));
    world.server.psql("alter table apalis.away rename to jobs");
}

/// An override that a server sets for a limit of jobs holds for workers too, on top of what their policies say, until it is removed.
#[tokio::test(flavor = "multi_thread")]
async fn workers_follow_overrides_that_are_set_at_run_time() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    world.push("q", jobs("mail", 5)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 4).await;
    // As a server has it, which shares the store and nothing else.
    let server = tollgate_at(&world.url, |builder| builder).await;
    let set = |fields: OverrideFields| {
        let (limit, key) = ("jobs.type.mail".to_owned(), "job:mail".to_owned());
        let one = StoredOverride { limit, key, fields, reason: None, by: None, at_us: 0 };
        Record { id: "mail".to_owned(), payload: one.to_payload(), ends: None }
    };
    let raised = set(OverrideFields { limit: Some(50), ..OverrideFields::default() });
    assert!(server.put_record(RecordKind::Override, &raised).await.unwrap().is_kept);
    // Those who wait, up to four hours, are called.
    world.until_done(5).await;
    until_limit(&world.gate, 50).await;
    // Other policies come under it.
    world.gate.reload(only("mail", rate(6, HOUR))).await.unwrap();
    assert_eq!(world.gate.status("job:mail").await.unwrap().limit, 50);
    assert!(server.remove_record(RecordKind::Override, "mail").await.unwrap());
    until_limit(&world.gate, 6).await;
    world.push("q", jobs("mail", 3)).await;
    world.until_done(6).await;
    world.until("select count(*) from tollgate_job_waiting where delays > 0", 2).await;
}

/// A config is read again in which only limits have changed that no job is charged to: nobody is called in vain.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_is_no_jobs_concern_calls_nobody() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    let read = |web: &str, mail: u64| {
        let text = format!(
            "[limits.web]\nlimit = {web}\nwindow = '1s'\nstrategy = 'sliding_window'\n[jobs.types.mail]\nlimit = {mail}\nwindow = '1h'\n"
        );
        let mut section = JobsConfig::default();
        let config = tollgate::config::Config::parse_with(&text, [], &mut [&mut section]).unwrap();
        (config, section)
    };
    let (config, section) = read("10", 1);
    world.gate.reload_config(&config, &section).await.unwrap();
    world.push("q", jobs("mail", 4)).await;
    let worker = world.worker("q");
    let asleep =
        "select count(*) from apalis.jobs where status = 'Pending' and run_at > now() + interval '1 minute'";
    world.until(asleep, 3).await;
    drop(worker);
    let (config, section) = read("20", 1);
    world.gate.reload_config(&config, &section).await.unwrap();
    assert_eq!(world.number(asleep).await, 3);
    let (config, section) = read("20", 2);
    world.gate.reload_config(&config, &section).await.unwrap();
    assert_eq!(world.number(asleep).await, 0, "this is theirs");
}

/// Jobs that failed and are put off before their next attempt, with others, keep their status. They are called like those that never ran.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_failed_before_are_called_forward_too() {
    let world = World::new(only("mail", rate(1, HOUR))).await;
    world.push("q", jobs("mail", 4)).await;
    let _worker = world.worker("q");
    world.until("select count(*) from apalis.jobs where status = 'Pending' and run_at > now()", 3).await;
    // As those are left that are put off without having been claimed; the last has no attempt left.
    let failed = "update apalis.jobs set status = 'Failed', attempts = 1, max_attempts = case when id = (
        select max(id) from apalis.jobs where status = 'Pending') then 1 else 25 end where status = 'Pending'";
    world.server.psql(failed);
    world.gate.reload(only("mail", rate(100, SECOND))).await.unwrap();
    world.until_done(3).await;
    assert_eq!(world.number("select max(attempts)::bigint from apalis.jobs where status = 'Done'").await, 2);
    assert_eq!(
        world.number("select count(*) from apalis.jobs where status = 'Failed' and run_at > now()").await,
        1
    );
}

/// A job under a blocked key waits as long as it may, and is called when the key is free again; it is not asked about all the time.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_blocked_key_sleep_until_it_is_free() {
    let world = World::new(only("mail", rate(100, HOUR))).await;
    let blocked = OverrideFields { blocked: true, ..OverrideFields::default() };
    let (limit, key) = ("jobs.type.mail".to_owned(), "job:mail".to_owned());
    let one = StoredOverride { limit, key, fields: blocked, reason: None, by: None, at_us: 0 };
    let record = Record { id: "mail".to_owned(), payload: one.to_payload(), ends: None };
    let server = tollgate_at(&world.url, |builder| builder).await;
    assert!(server.put_record(RecordKind::Override, &record).await.unwrap().is_kept);
    until_allowed(&world.gate, false).await;
    world.push("q", jobs("mail", 5)).await;
    let _worker = world.worker("q");
    // The longest sleep is five minutes by default.
    let asleep =
        "select count(*) from apalis.jobs where status = 'Pending' and run_at > now() + interval '4 minutes'";
    world.until(asleep, 5).await;
    assert_eq!(world.number("select count(*) from starts").await, 0);
    assert!(
        world.number("select count(*) from delays").await <= 10,
        "each sleeps, instead of asking again and again"
    );
    assert!(server.remove_record(RecordKind::Override, "mail").await.unwrap());
    world.until_done(5).await;
}
