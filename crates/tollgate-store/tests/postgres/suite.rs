//! The suite, and the same race from several processes.

use std::sync::Arc;
use std::time::Instant;

use tollgate_store::conformance::{self, Counting, Effort, Subject, Traces};
use tollgate_store::{ManualClock, PostgresOptions, Store};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::processes::{self, Child};

use crate::{connect, hourly, item, options};

/// Makes an empty store by a clock, on a server that is used again and again.
async fn subject(server: &Arc<PostgresServer>, clock: ManualClock) -> Subject {
    let of_clock = PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) };
    let store = connect(of_clock).await;
    server.psql(
        "truncate tollgate_state, tollgate_execution, tollgate_hold, tollgate_record, tollgate_record_revision",
    );
    let counted = (server.clone(), store.clone());
    let remembered = Box::new(move || -> Counting {
        let (server, store) = counted.clone();
        Box::pin(async move {
            store.cleanup().await.unwrap_or_else(|error| panic!("{error}"));
            server.psql("select count(*) from tollgate_state").parse().unwrap()
        })
    });
    Subject { store: Arc::new(store), remembered }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_postgres_store_means_what_a_store_must() {
    // Nothing crashes here, so nothing need be on disk; a third of the calls would wait for that.
    let server = Arc::new(PostgresServer::builder().setting("fsync", "off").start());
    let started = Instant::now();
    // As many racers as make sure of waiting for connections, and as many charges as a slow machine does in a minute.
    let effort = Effort { traces: Traces::default(), racers: 16, charges_each: 300 };
    conformance::run(effort, async |clock| subject(&server, clock).await).await;
    println!("the suite took {:?}", started.elapsed());
}

/// By itself, so that it is quick to run.
#[tokio::test(flavor = "multi_thread")]
async fn time_stands_still_while_the_servers_clock_is_behind() {
    let server = Arc::new(PostgresServer::builder().setting("fsync", "off").start());
    conformance::clock_steps_back(async |clock| subject(&server, clock).await).await;
}

/// By itself, so that it is quick to run.
#[tokio::test(flavor = "multi_thread")]
async fn records_are_kept_in_postgres() {
    let server = Arc::new(PostgresServer::builder().setting("fsync", "off").start());
    conformance::shared_records(async |clock| subject(&server, clock).await).await;
}

#[test]
fn processes_that_race_for_one_key_are_admitted_up_to_its_limit() {
    const MOST: u64 = 500;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let limit = hourly("shared", MOST);
    let name = "suite::processes_that_race_for_one_key_are_admitted_up_to_its_limit";
    if let Some(child) = Child::here() {
        let admitted = runtime.block_on(async {
            let store = connect(options(child.parameters())).await;
            child.wait_for_start();
            let mut racers = tokio::task::JoinSet::new();
            for _ in 0..8 {
                let (store, limit) = (store.clone(), limit.clone());
                racers.spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..50 {
                        admitted +=
                            u64::from(store.charge(&[item(&limit, "hot")], None).await.unwrap().allowed);
                    }
                    admitted
                });
            }
            racers.join_all().await.into_iter().sum::<u64>()
        });
        return child.report(&admitted.to_string());
    }
    let server = PostgresServer::start();
    // They migrate at once, too: whoever is first makes the schema.
    let reports = processes::run(name, 4, &server.url("postgres"));
    let admitted: Vec<u64> = reports.iter().map(|lines| lines[lines.len() - 1].parse().unwrap()).collect();
    assert_eq!(admitted.iter().sum::<u64>(), MOST, "{admitted:?} of 1600 charges");
}
