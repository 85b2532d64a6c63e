//! What is found when a program starts: policies that cannot be, and a database that is not as it was tested with.

use std::time::Duration;

use tollgate::Limit;
use tollgate_jobs::adapter::prepare;
use tollgate_jobs::{JobGate, JobPolicy, Jobs};
use tollgate_testkit::postgres::PostgresServer;

use crate::world::*;

#[tokio::test(flavor = "multi_thread")]
async fn s19_policies_in_code_are_checked_by_name() {
    let minute = Duration::from_secs(60);
    let good = Jobs::new()
        .job("send_email", rate(100, HOUR))
        .job("call_api", rate(60, minute).max_delay(10 * minute))
        .queue("external-api", rate(30, minute))
        .global(rate(1_000, minute));
    assert_eq!(good.rules().unwrap().len(), 4);
    for (jobs, message) in [
        (only("mail", rate(0, minute)), "the job type `mail`: limit = 0"),
        (only("mail", rate(5, Duration::ZERO)), "the job type `mail`: window = 0"),
        (only("mail", JobPolicy::new().concurrency(0)), "the job type `mail`: limit = 0"),
        (only("mail", JobPolicy::new()), "the job type `mail`: limits nothing"),
        (
            only("mail", JobPolicy::new().charges("stripe").limit_key("account:{tenant")),
            "the job type `mail`: limit_key \"account:{tenant\" is not a key: it has a `{` without a `}`; write limit_key = ",
        ),
        (
            only("mail", JobPolicy::new().charges("stripe").limit_key("a:b:c:d")),
            "limit_key \"a:b:c:d\" is not a key",
        ),
        (Jobs::new().queue("q", rate(1, minute).cost(|_| 2)), "the queue `q`: a cost is a job type's"),
        (only("mail", rate(1, minute)).job("mail", rate(2, minute)), "two policies for the job type `mail`"),
        (Jobs::new().global(rate(1, minute)).global(rate(1, minute)), "two policies for all jobs"),
    ] {
        let error = jobs.rules().unwrap_err().to_string();
        assert!(error.contains(message), "{error}\nlacks\n{message}");
    }
    let server = PostgresServer::start();
    let pool = pool_at(&server.url("postgres")).await;
    let tollgate = tollgate::Tollgate::builder()
        .limit("stripe", Limit::token_bucket("1/s", 1).unwrap())
        .build()
        .unwrap();
    let builder = JobGate::builder(tollgate, pool).jobs(only("mail", rate(1, minute).charges("strpe")));
    let error = builder.connect().await.unwrap_err().to_string();
    assert!(
        error.contains("the job type `mail`: unknown limit `strpe`")
            && error.contains("did you mean `stripe`?"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn s20_what_differs_from_what_was_tested_is_found_at_start() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let pool = pool_at(&url).await;
    let gate = gate_at(&url, &pool, Jobs::new(), |builder| builder).await;
    let error = async |gate: &JobGate| prepare(gate).await.unwrap_err().to_string();
    assert!(error(&gate).await.contains("run PostgresStorage::setup"), "{}", error(&gate).await);
    apalis_postgres::PostgresStorage::<()>::setup(&pool).await.unwrap();
    prepare(&gate).await.unwrap();
    prepare(&gate).await.unwrap();
    // A trigger that was dropped is made again.
    server.psql("drop trigger tollgate_job_defer on apalis.jobs");
    prepare(&gate).await.unwrap();
    // A poll that finds nothing does not read the jobs that wait.
    server.psql(
        "insert into apalis.jobs (job, id, job_type, run_at) select '', 'waits-' || n, 'q', now() + interval '1 hour' from generate_series(1, 5000) n;
         insert into apalis.workers (id, worker_type, storage_name) values ('w', 'q', 's'); analyze apalis.jobs",
    );
    let plan = server.psql(
        "explain select id from apalis.jobs where (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) and run_at < now()
           and job_type = 'q' order by priority desc, run_at limit 10 for update skip locked",
    );
    assert!(plan.contains("tollgate_job_due"), "{plan}");
    server.psql("delete from apalis.jobs");
    // Another trigger that keeps the time.
    server.psql(
        "create function keep() returns trigger language plpgsql as $$ begin new.run_at := old.run_at; return new; end $$;
         create trigger zz_keep before update on apalis.jobs for each row execute function keep()",
    );
    assert!(
        error(&gate).await.contains("the ack of a delayed job left it Pending"),
        "{}",
        error(&gate).await
    );
    server.psql(
        "drop trigger zz_keep on apalis.jobs; alter table apalis.jobs rename column lock_by to locked_by",
    );
    assert!(error(&gate).await.contains("apalis.jobs has no column lock_by"), "{}", error(&gate).await);
    server.psql("alter table apalis.jobs rename column locked_by to lock_by");
    // A role that may make the trigger and no index: workers work, only slower.
    server.psql("drop index apalis.tollgate_job_due; drop trigger tollgate_job_defer on apalis.jobs; drop function tollgate_job_defer_on_ack;
        create role middle login; grant all on schema apalis, public to middle;
        grant all on all tables in schema apalis, public to middle");
    let middle = pool_at(&url.replace("postgres@", "middle@")).await;
    let tollgate = tollgate::Tollgate::builder().build().unwrap();
    let gate = JobGate::builder(tollgate, middle).connect().await.unwrap();
    prepare(&gate).await.unwrap();
    assert_eq!(server.psql("select to_regclass('apalis.tollgate_job_due')").trim(), "");
    let made = "select r.rolname from pg_trigger t join pg_proc p on p.oid = t.tgfoid join pg_roles r on r.oid = p.proowner
        where t.tgname = 'tollgate_job_defer'";
    assert_eq!(server.psql(made).trim(), "middle");
    prepare(&gate).await.unwrap();
    // One that may not make the trigger, where it is gone and its function is another role's.
    server.psql("create role few login; grant all on schema apalis, public to few; grant all on all tables in schema public to few;
        grant select, insert, update, delete on all tables in schema apalis to few; drop trigger tollgate_job_defer on apalis.jobs");
    let few = pool_at(&url.replace("postgres@", "few@")).await;
    let tollgate = tollgate::Tollgate::builder().build().unwrap();
    let gate_of_few = JobGate::builder(tollgate, few).connect().await.unwrap();
    let refused = error(&gate_of_few).await;
    for words in [
        "making the trigger on apalis.jobs",
        "permission denied for table jobs",
        "the database role lacks a right",
    ] {
        assert!(refused.contains(words), "{refused}");
    }
    // What is there need not be made.
    prepare(&gate).await.unwrap();
    prepare(&gate_of_few).await.unwrap();
    // A role that may not.
    server.psql("create role weak login; grant usage on schema apalis to weak; grant select on all tables in schema apalis to weak");
    let weak = pool_at(&url.replace("postgres@", "weak@")).await;
    let tollgate = tollgate::Tollgate::builder().build().unwrap();
    let refused = JobGate::builder(tollgate, weak).connect().await.unwrap_err().to_string();
    assert!(refused.contains("the database role lacks a right"), "{refused}");
}
