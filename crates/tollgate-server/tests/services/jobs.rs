//! One limit for the web tier and for jobs: HTTP calls through `tollgate serve` and runs of jobs are counted together, in one store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tollgate::config::Config;
use tollgate_jobs::{Job, JobDecision, JobGate, JobsConfig};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;
use tollgate_testkit::tollgate::Tollgate;

/// When something was admitted: between these two instants.
type Admissions = Arc<Mutex<Vec<(Instant, Instant)>>>;

fn config(store: &str, database: &str, stripe: &str) -> String {
    format!(
        "[store]\n{store}\ntimeout = '2s'\n[limits.stripe]\nstrategy = 'sliding_window'\n{stripe}\n\
         [jobs]\ndatabase = '{database}'\n[jobs.types.invoice]\nlimits = ['stripe']\nlimit_key = 'account:1'\n"
    )
}

/// Calls over HTTP until it is over.
fn calls(server: &Tollgate, over: &AtomicBool, admitted: &Admissions) {
    let mut connection = server.connect();
    while !over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let body = r#"{"limit":"stripe","key":"account:1"}"#;
        let answer = connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        if answer.body.contains(r#""allowed":true"#) {
            admitted.lock().push((sent, Instant::now()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Jobs one after the other until it is over, each put off as long as the gate says.
async fn runs(gate: JobGate, worker: usize, over: Arc<AtomicBool>, admitted: Admissions) {
    let number = AtomicU64::new(0);
    while !over.load(Ordering::Relaxed) {
        let id = format!("{worker}-{}", number.fetch_add(1, Ordering::Relaxed));
        let plan = gate.plan(&Job::new(&id, "invoice", "billing")).expect("a plan");
        while !over.load(Ordering::Relaxed) {
            let sent = Instant::now();
            match gate.enter(&plan).await {
                JobDecision::Run(permit) => {
                    admitted.lock().push((sent, Instant::now()));
                    permit.release().await;
                    break;
                }
                JobDecision::Delay(delay) => {
                    tokio::time::sleep(delay.wait.min(Duration::from_millis(200))).await
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Both for a while; answers when each was admitted.
fn together(config: &str, span: Duration) -> [Vec<(Instant, Instant)>; 2] {
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(config).start();
    let over = Arc::new(AtomicBool::new(false));
    let (by_http, by_jobs) = (Admissions::default(), Admissions::default());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| calls(&server, &over, &by_http));
        }
        runtime.block_on(async {
            let mut section = JobsConfig::default();
            let config = Config::parse_with(config, [], &mut [&mut section]).expect("a config");
            let gate = JobGate::from_config(&config, &section)
                .await
                .expect("a builder")
                .connect()
                .await
                .expect("a gate");
            let workers: Vec<_> = (0..3)
                .map(|worker| tokio::spawn(runs(gate.clone(), worker, over.clone(), by_jobs.clone())))
                .collect();
            tokio::time::sleep(span).await;
            over.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.await.expect("a worker");
            }
        });
    });
    [&by_http, &by_jobs].map(|admitted| std::mem::take(&mut *admitted.lock()))
}

fn check(store: &str, database: &str, flush: impl Fn()) {
    // In an hour: as many as there are, by HTTP or by jobs.
    let [by_http, by_jobs] =
        together(&config(store, database, "limit = 30\nwindow = '1h'"), Duration::from_secs(3));
    assert_eq!(by_http.len() + by_jobs.len(), 30, "{} and {}", by_http.len(), by_jobs.len());
    flush();
    // In any second: those whose calls began and ended within one cannot be more.
    let [by_http, by_jobs] =
        together(&config(store, database, "limit = 20\nwindow = '1s'"), Duration::from_secs(4));
    assert!(!by_http.is_empty() && !by_jobs.is_empty(), "{} and {}", by_http.len(), by_jobs.len());
    let all: Vec<_> = by_http.into_iter().chain(by_jobs).collect();
    let most = all.iter().map(|(from, _)| {
        let within = |(sent, answered): &&(Instant, Instant)| {
            sent >= from && *answered < *from + Duration::from_secs(1)
        };
        all.iter().filter(within).count()
    });
    let most = most.max().unwrap_or(0);
    assert!(most <= 20, "{most} in a second");
    assert!(all.len() >= 20, "{} in four seconds", all.len());
}

#[test]
fn s23_http_calls_and_jobs_share_a_limit_on_postgres() {
    let postgres = PostgresServer::start();
    let url = postgres.url("postgres");
    check(&format!("mode = 'postgres'\npostgres = {{ url = '{url}' }}"), &url, || {
        postgres.psql("truncate tollgate_state");
    });
}

#[test]
fn s23_http_calls_and_jobs_share_a_limit_on_redis() {
    let (postgres, redis) = (PostgresServer::start(), RedisServer::start());
    let store = format!("mode = 'redis'\nredis = {{ url = '{}' }}", redis.url());
    check(&store, &postgres.url("postgres"), || {
        redis.command(&["FLUSHALL"]).expect("flushed");
    });
}
