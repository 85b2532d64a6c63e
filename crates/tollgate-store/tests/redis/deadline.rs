//! Deadlines: whatever breaks, every call is back in time, says rightly whether it may have been done, and what the server comes
//! to see too late it does not do. Afterwards the store recovers by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tollgate_store::{
    ChargeId, Failure, Hold, Limit, Micros, RedisOptions, RedisStore, Settled, Settlement, Store, StoreError,
    StoredLimit,
};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;

use super::{PATIENCE, alone, costing, hourly, item, log, prefix, store_with, used};

const DEADLINE: Duration = Duration::from_millis(100);

/// What a loaded machine may add to a call. One that does not keep its deadline waits for seconds, or for ever; how close to it
/// calls usually are is printed, and not judged.
const HARD: Duration = Duration::from_secs(1);

/// How long the store may take to recover, on a loaded machine.
const RECOVERY: Duration = Duration::from_secs(20);

/// A server with a proxy before it, a store that goes through the proxy, and one that does not and has time.
struct Bench {
    server: RedisServer,
    proxy: FaultProxy,
    store: RedisStore,
    aside: RedisStore,
    limit: StoredLimit,
    took: Arc<Mutex<Vec<Duration>>>,
}

/// A limit that every call is sent under by itself.
fn window() -> StoredLimit {
    hourly("window", 1_000_000)
}

/// A limit whose calls go together when many come at a time.
fn bucket() -> StoredLimit {
    let limit = Limit::token_bucket("1/h", 1_000_000);
    StoredLimit::new("bucket", limit.expect("a sound limit"))
}

/// What many calls at a time came to.
#[derive(Debug, Default)]
struct Tally {
    admitted: u64,
    ambiguous: u64,
    failed: u64,
    failures: Vec<Failure>,
    said: std::collections::BTreeSet<String>,
}

impl Bench {
    fn new(limit: StoredLimit) -> Bench {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(server.port());
        let names = prefix();
        let through = RedisOptions::new(format!("redis://127.0.0.1:{}", proxy.port()));
        let store = store_with(through, &names, DEADLINE);
        let aside = store_with(RedisOptions::new(server.url()), &names, PATIENCE);
        Bench { server, proxy, store, aside, limit, took: Arc::default() }
    }

    /// A store that has never connected.
    fn stranger(&self) -> RedisStore {
        let through = RedisOptions::new(format!("redis://127.0.0.1:{}", self.proxy.port()));
        store_with(through, self.store.prefix(), DEADLINE)
    }

    async fn charge(&self, store: &RedisStore) -> Result<bool, StoreError> {
        let start = Instant::now();
        let charged = store.charge(&[item(&self.limit, "k")], None).await;
        let took = start.elapsed();
        assert!(took < DEADLINE + HARD, "a call took {took:?}: {charged:?}");
        self.took.lock().push(took);
        charged.map(|charged| charged.allowed)
    }

    /// Eight calls at a time, `rounds` times.
    async fn charges(&self, store: &RedisStore, rounds: usize) -> Tally {
        let mut tally = Tally::default();
        for _ in 0..rounds {
            for result in futures_util::future::join_all((0..8).map(|_| self.charge(store))).await {
                match result {
                    Ok(allowed) => tally.admitted += u64::from(allowed),
                    Err(error) => {
                        tally.failed += 1;
                        tally.ambiguous += u64::from(error.is_ambiguous());
                        tally.said.insert(error.to_string());
                        tally.failures.push(error.failure().expect("the store failed, and not the call"));
                    }
                }
            }
        }
        tally
    }

    /// What the store has, whatever the way to it.
    async fn stored(&self) -> u64 {
        used(&self.aside, &self.limit, "k").await
    }

    /// Charges until it works, through the same store; at most so long.
    async fn recovers(&self, what: &str) {
        let start = Instant::now();
        loop {
            while let Err(error) = self.charge(&self.store).await {
                assert!(start.elapsed() < RECOVERY, "{what}: no recovery: {error}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            println!("{what}: recovered after {:?}", start.elapsed());
            // And it stays so, unless the machine itself was too slow for a deadline.
            let tally = self.charges(&self.store, 4).await;
            if tally.admitted == 32 {
                return;
            }
            let is_late = tally.failures.iter().all(|failure| *failure == Failure::Timeout);
            assert!(is_late && start.elapsed() < RECOVERY, "{what}: {tally:?}");
        }
    }

    /// Prints how long calls took.
    fn tell(&self) {
        let mut took = self.took.lock().clone();
        took.sort_unstable();
        let at = |share: usize| took[(took.len() - 1) * share / 100];
        println!(
            "{} calls: median {:?}, 95 % {:?}, 99 % {:?}, longest {:?}",
            took.len(),
            at(50),
            at(95),
            at(99),
            at(100)
        );
    }
}

/// What a fault of the network does to calls that are under way, and to the first ones of a store that must connect.
async fn a_broken_network(limit: StoredLimit) {
    let bench = Bench::new(limit);
    bench.charge(&bench.aside).await.expect("a charge");
    // Whether the server carries out what it is sent, and whether all connections fail at once.
    for (mode, is_done, is_quick) in [
        (Mode::Blackhole, false, false),
        (Mode::Stall, false, false),
        (Mode::Latency(Duration::from_millis(150)), false, false),
        (Mode::SwallowReplies, true, false),
        (Mode::CutReply { after_bytes: 0 }, true, true),
        (Mode::CutReply { after_bytes: 2 }, true, true),
        (Mode::Reset, false, true),
        (Mode::Refuse, false, true),
    ] {
        bench.recovers("before").await;
        let before = bench.stored().await;
        bench.proxy.set(mode);
        let first = bench.charges(&bench.store, 1).await;
        assert_eq!(first.admitted, 0, "{mode:?}: {first:?}");
        // On a reset connection it cannot be known what had been sent. Everywhere else a question surely left; others may have
        // waited for it to come back, or have come when the connection was gone.
        let is_cut = matches!(mode, Mode::CutReply { .. });
        let least = match mode {
            Mode::Reset | Mode::Refuse => 0,
            _ => 1,
        };
        assert!((least..=8).contains(&first.ambiguous), "{mode:?}: {first:?}");
        let expected = if is_quick { Failure::Connection } else { Failure::Timeout };
        // What is left of half an answer makes no sense.
        let half = is_cut.then_some(Failure::Reply);
        // Those that wait for others to come back, or connect again and again, may do so until their time is over.
        let waited = [Failure::Timeout, Failure::Overloaded];
        let is_expected =
            |failure: &Failure| *failure == expected || half == Some(*failure) || waited.contains(failure);
        assert!(first.failures.iter().all(is_expected), "{mode:?}: {first:?}");
        // From now on there is no connection, so nothing is sent.
        let next = bench.charges(&bench.store, 3).await;
        assert_eq!((next.admitted, next.ambiguous), (0, 0), "{mode:?}: {next:?}");
        let stranger = bench.stranger();
        let connecting = bench.charges(&stranger, 3).await;
        assert_eq!((connecting.admitted, connecting.ambiguous), (0, 0), "{mode:?}: {connecting:?}");
        bench.proxy.set(Mode::Pass);
        // What was held back arrives now, and is too late.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let done = bench.stored().await - before;
        let possible = match is_done {
            false => 0..=0,
            true if is_cut => 1..=first.ambiguous,
            true => first.ambiguous..=first.ambiguous,
        };
        assert!(possible.contains(&done), "{mode:?}: {done} were done, {first:?}");
        bench.recovers(&format!("{mode:?}")).await;
        let start = Instant::now();
        while bench.charge(&stranger).await.is_err() {
            assert!(start.elapsed() < RECOVERY, "{mode:?}: the stranger does not recover");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    bench.tell();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_network_costs_a_deadline_and_nothing_more() {
    let _alone = alone().await;
    a_broken_network(window()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_network_costs_those_who_go_together_no_more() {
    let _alone = alone().await;
    a_broken_network(bucket()).await;
}

/// A call that has a name is sent again; if the first try may have been done, then so may the call, however the last one failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_sent_again_stays_ambiguous() {
    let _alone = alone().await;
    let bench = Bench::new(window());
    for (mode, is_done) in
        [(Mode::CutReply { after_bytes: 0 }, true), (Mode::SwallowReplies, true), (Mode::Refuse, false)]
    {
        bench.recovers("before").await;
        let before = bench.stored().await;
        bench.proxy.set(mode);
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
        let start = Instant::now();
        let error = bench.store.charge(&[item(&bench.limit, "k")], Some(hold)).await.expect_err("no answer");
        assert!(start.elapsed() < DEADLINE + HARD, "{mode:?}: {:?}", start.elapsed());
        let done = bench.stored().await - before;
        assert_eq!(done, u64::from(is_done), "{mode:?}: {error}");
        assert!(error.is_ambiguous() || !is_done, "{mode:?}: {error:?}");
        bench.proxy.set(Mode::Pass);
        bench.recovers(&format!("{mode:?}")).await;
        // Under its name it is charged once, however often it is sent.
        let before = bench.stored().await;
        assert!(bench.store.charge(&[item(&bench.limit, "k")], Some(hold)).await.expect("again").allowed);
        assert_eq!(bench.stored().await - before, u64::from(!is_done), "{mode:?}");
        assert_eq!(bench.store.settle(hold.id, &Settlement::Cancel).await.expect("a cancel"), Settled::Done);
        assert_eq!(
            bench.store.settle(hold.id, &Settlement::Cancel).await.expect("a cancel"),
            Settled::Already
        );
    }
}

/// Sixty-four callers at a time, each at a cost of its own, over a network that takes its time: all are answered, because none
/// waits for those that it cannot go together with.
#[tokio::test(flavor = "multi_thread")]
async fn callers_at_different_costs_do_not_hold_each_other_up() {
    let _alone = alone().await;
    let bench = Bench::new(bucket());
    bench.recovers("before").await;
    bench.proxy.set(Mode::Latency(Duration::from_millis(5)));
    let costs: Vec<_> = (1..=64).map(|cost| [costing(&bench.limit, "k", cost)]).collect();
    for _ in 0..5 {
        let charges = costs.iter().map(|items| bench.store.charge(items, None));
        let failed =
            futures_util::future::join_all(charges).await.iter().filter(|charged| charged.is_err()).count();
        assert_eq!(failed, 0, "of 64 calls");
    }
}

/// How often the server has begun one of our scripts.
pub(super) fn scripts_run(server: &RedisServer) -> u64 {
    let stat = server.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
    let calls = stat.split(',').find_map(|field| field.strip_prefix("calls="));
    calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
}

/// The server stands still, and then does what it finds: by then the callers have gone, and nothing may be charged.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_finds_too_late_changes_nothing() {
    let _alone = alone().await;
    let bench = Bench::new(window());
    bench.charge(&bench.aside).await.expect("a charge");
    for fault in ["SIGSTOP", "CLIENT PAUSE", "DEBUG SLEEP"] {
        bench.recovers("before").await;
        let (before, run_before) = (bench.stored().await, scripts_run(&bench.server));
        let sleeper = match fault {
            "SIGSTOP" => {
                bench.server.stop();
                None
            }
            "CLIENT PAUSE" => {
                bench.server.command(&["CLIENT", "PAUSE", "400", "WRITE"]).expect("a pause");
                None
            }
            _ => {
                let mut client = bench.server.connect().expect("a connection");
                client.send(&["DEBUG", "SLEEP", "0.4"]).expect("a nap");
                // The nap must have begun.
                tokio::time::sleep(Duration::from_millis(20)).await;
                Some(client)
            }
        };
        let tally = bench.charges(&bench.store, 3).await;
        assert_eq!(tally.admitted, 0, "{fault}: {tally:?}");
        // One batch or two are in flight, and what waits behind them is not sent.
        assert!((1..=24).contains(&tally.ambiguous), "{fault}: {tally:?}");
        let is_late = |failure: &Failure| matches!(failure, Failure::Timeout | Failure::Overloaded);
        assert!(tally.failures.iter().all(is_late), "{fault}: {tally:?}");
        bench.server.resume();
        // Waits until the server is back, and has done what it found.
        let stored = bench.stored().await;
        drop(sleeper);
        bench.recovers(fault).await;
        assert_eq!(stored, before, "{fault}: late calls were charged");
        let run = scripts_run(&bench.server) - run_before;
        println!(
            "{fault}: {} calls in vain, {run} scripts run since, none of them charged late",
            tally.failed
        );
    }
    bench.tell();
}

/// The same with the connections kept: the proxy holds the requests back and delivers them whole, long after.
#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_too_late_is_turned_away_by_the_script() {
    let _alone = alone().await;
    let bench = Bench::new(window());
    bench.recovers("before").await;
    let before = bench.stored().await;
    let run_before = scripts_run(&bench.server);
    bench.proxy.set(Mode::Latency(Duration::from_millis(130)));
    let tally = bench.charges(&bench.store, 1).await;
    // One batch or two are in flight, and what waits behind them is not sent.
    assert!((1..=8).contains(&tally.ambiguous), "{tally:?}");
    let start = Instant::now();
    while scripts_run(&bench.server) == run_before {
        assert!(start.elapsed() < RECOVERY, "the requests do not arrive");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(bench.stored().await, before, "the script ran, and nothing was charged");
    bench.proxy.set(Mode::Pass);
    bench.recovers("late arrivals").await;
}

/// The scripts vanish in mid-traffic: no call fails, and the log says so.
#[tokio::test(flavor = "multi_thread")]
async fn lost_scripts_are_loaded_again_and_nobody_notices() {
    let _alone = alone().await;
    log::listen();
    let bench = Arc::new(Bench::new(window()));
    bench.recovers("before").await;
    let before = bench.stored().await;
    // With time enough, because this is not about deadlines.
    let through = RedisOptions::new(format!("redis://127.0.0.1:{}", bench.proxy.port()));
    let patient = store_with(through, bench.store.prefix(), PATIENCE);
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (bench, store, stop) = (bench.clone(), patient.clone(), stop.clone());
            let answered = answered.clone();
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let charged = store.charge(&[item(&bench.limit, "k")], None).await;
                    assert!(charged.unwrap_or_else(|error| panic!("{error}")).allowed);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for _ in 0..20 {
        // Each flush meets traffic that has got over the one before: flushed faster than scripts are loaded, tries run out.
        let (start, enough) = (Instant::now(), answered.load(Ordering::Relaxed) + 200);
        while answered.load(Ordering::Relaxed) < enough && callers.iter().all(|caller| !caller.is_finished())
        {
            assert!(start.elapsed() < PATIENCE, "the traffic does not go on");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bench.server.command(&["SCRIPT", "FLUSH"]).expect("a flush");
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.expect("no call fails");
    }
    let calls = answered.load(Ordering::Relaxed);
    assert_eq!(bench.stored().await, before + calls, "each was charged once");
    let address = format!("127.0.0.1:{}", bench.proxy.port());
    let warnings = log::warnings(&["WARN", "lost our scripts", &address]);
    assert!(!warnings.is_empty(), "it is logged");
    println!("{calls} calls through 20 flushes, {} warnings", warnings.len());
}
