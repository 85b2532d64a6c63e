//! The tables of the line: under another prefix, and made by an older Tollgate.

use apalis_postgres::PostgresStorage;
use tollgate::Tollgate;
use tollgate_jobs::adapter::prepare;
use tollgate_jobs::{Job, JobDecision, JobGate};
use tollgate_testkit::postgres::PostgresServer;

use crate::world::*;

/// All tables, functions, triggers and indexes of the line have the prefix that was chosen, and all that is done with them uses it.
#[tokio::test(flavor = "multi_thread")]
async fn another_prefix_is_that_of_everything() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let pool = pool_at(&url).await;
    PostgresStorage::<()>::setup(&pool).await.unwrap();
    let tollgate = tollgate_at(&url, |builder| builder).await;
    let gate = JobGate::builder(tollgate, pool.clone()).jobs(only("mail", rate(2, HOUR))).prefix("app_2_");
    let gate = gate.connect().await.unwrap();
    prepare(&gate).await.unwrap();
    let world = World::of(server, url, pool, gate);
    let _worker = world.worker("q");
    world.push_all("q", jobs("mail", 62)).await;
    world.until("select count(*) from app_2_job_waiting where until_us > 0", 60).await;
    assert_eq!(world.gate.status("job:mail").await.unwrap().waiting, 60);
    world.gate.close("job:mail", HOUR).await.unwrap();
    world.gate.reload(only("mail", rate(100, SECOND))).await.unwrap();
    assert!(world.gate.open("job:mail").await.unwrap());
    world.until_done(62).await;
    world.until("select coalesce(sum(started), 0)::bigint from app_2_job_history where label = ''", 62).await;
    world.server.psql("insert into app_2_job_waiting values ('old', 'q', 'mail', 0, 1, 1, 1, '')");
    assert_eq!(world.gate.cleanup().await.unwrap(), 1);
    let others = "select count(*) from (
        select relname as name from pg_class union all select proname from pg_proc union all select tgname from pg_trigger) as x
        where name like 'tollgate\\_job%'";
    assert_eq!(world.number(others).await, 0);
    assert_eq!(world.number("select count(*) from pg_trigger where tgname = 'app_2_job_defer'").await, 1);
}

/// The migrations, by number.
const MIGRATIONS: [&str; 6] = [
    include_str!("../../src/line/1.sql"),
    include_str!("../../src/line/2.sql"),
    include_str!("../../src/line/3.sql"),
    include_str!("../../src/line/4.sql"),
    include_str!("../../src/line/5.sql"),
    include_str!("../../src/line/6.sql"),
];

/// Jobs that wait in tables of every older version keep their places, their times and the key that is closed, and newcomers stand behind
/// them; the tables are then as those that were made anew.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_line_is_brought_up_to_date_with_its_jobs() {
    let server = PostgresServer::start();
    let pool = pool_at(&server.url("postgres")).await;
    let gate = async |prefix: &str| {
        let tollgate = Tollgate::builder().build().unwrap();
        let policies = only("mail", rate(1, HOUR)).job("call", rate(1, HOUR));
        JobGate::builder(tollgate, pool.clone()).jobs(policies).prefix(prefix).connect().await.unwrap()
    };
    let enter = async |gate: &JobGate, id: &str| {
        let decision: JobDecision = gate.enter(&gate.plan(&Job::new(id, "mail", "q")).unwrap()).await;
        decision.name()
    };
    let new = gate("tollgate_").await;
    assert_eq!(
        [enter(&new, "1").await, enter(&new, "2").await, enter(&new, "3").await],
        ["run", "delay", "delay"]
    );
    new.close("job:call", HOUR).await.unwrap();
    for version in 1..MIGRATIONS.len() {
        let prefix = format!("v{version}_");
        let text: String = MIGRATIONS[..version].concat();
        let schema = "create table {prefix}job_schema (
              one boolean primary key default true check (one), version integer not null, functions text not null);
            insert into {prefix}job_schema (version, functions) values ({version}, 'others')";
        // Columns that came later have their defaults.
        let copies = [("waiting", "*"), ("line", "key, place, job, label, units, slot_us"), ("closed", "*")]
            .map(|(table, columns)| {
                format!("insert into {{prefix}}job_{table} select {columns} from tollgate_job_{table};")
            });
        let text = format!("{text};{schema};{}", copies.concat());
        server.psql(&text.replace("{prefix}", &prefix).replace("{version}", &version.to_string()));
        let gate = gate(&prefix).await;
        let all = |prefix: &str| {
            let rows = ["waiting", "line", "closed"]
                .map(|table| server.psql(&format!("select * from {prefix}job_{table} order by 1, 2")));
            let shape = format!(
                "select table_name, column_name, data_type, is_nullable from information_schema.columns where table_name like '{prefix}job%'
                   union all select tablename, indexname, indexdef, '' from pg_indexes where tablename like '{prefix}job%'
                   union all select relname, reloptions::text, '', '' from pg_class where relname like '{prefix}job%'
                   union all select proname, pg_get_function_identity_arguments(oid), prosrc, '' from pg_proc where proname like '{prefix}job%'"
            );
            let schema =
                server.psql(&format!("select version, functions <> 'others' from {prefix}job_schema"));
            let shape = server.psql(&shape).replace(prefix, "");
            let mut lines: Vec<String> = shape.lines().map(str::to_owned).collect();
            lines.sort_unstable();
            (rows, lines, schema)
        };
        let (found, expected) = (all(&prefix), all("tollgate_"));
        assert_eq!(found.0, expected.0, "from {version}: what waits and what is closed");
        assert_eq!(found.1, expected.1, "from {version}: tables, indexes and functions");
        assert_eq!(found.2, "6|t");
        assert_eq!(enter(&gate, "4").await, "delay", "the line is found");
        let order = format!("select string_agg(job, ' ' order by place) from {prefix}job_line");
        assert_eq!(server.psql(&order), "2 3 4", "from {version}");
        assert_eq!(gate.status("job:mail").await.unwrap().waiting, 3);
    }
}
