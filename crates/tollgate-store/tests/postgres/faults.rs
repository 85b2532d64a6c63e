//! The fault matrix: sixteen callers with a deadline of 100 ms, half of them through a proxy, while the network and the server
//! fail in every way that this machine can make them, and one judge over all that they were told.
//!
//! Two series share one server. In the first nothing crashes, and nothing may be lost or counted twice. In the second the
//! server is killed again and again; plain charges may lose their last moments then, held ones nothing. Whatever happens:
//! every call ends in time, nothing happens late, and the store recovers by itself. Bugs found on the way are in lost.rs.

mod callers;
mod lost;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tollgate_store::{Cost, Failure, PostgresStore, Store, StoredCharge, StoredLimit};
use tollgate_testkit::history::{Bound, Call, History, Outcome, Promises, Report, now_us};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};

use self::callers::{BURST, Callers, KEYS, Kind, Limits, MOST, RATE, Work, call, key_of, new_hold, store_at};
use crate::{connect, hourly, item, options};

const DEADLINE: Duration = Duration::from_millis(100);
const RECOVERY: Duration = Duration::from_secs(20);

/// How much later than the deadline nearly all calls may end, and the very last.
const SLACK_US: [u64; 2] = [10_000, 60_000];

/// What PostgreSQL may forget of what it acknowledged before it was on disk: three rounds of its writer, 0.6 s, and what a loaded
/// machine adds.
const LAST_MOMENTS_US: u64 = 2_000_000;

const SECOND_US: u64 = 1_000_000;

/// The sets of keys: all that crashes do not touch, and what is held while they happen.
const GENTLE: u64 = 0;
const HELD_IN_CRASHES: u64 = 99;

#[test]
fn through_every_fault_bounds_versions_and_deadlines_hold() {
    let started = Instant::now();
    let mut matrix = Matrix::start();
    matrix.gentle_phases();
    matrix.judge_gentle();
    matrix.crash_phases();
    matrix.judge_all();
    println!("the matrix took {:?}", started.elapsed());
}

/// The server, the two ways to it, and all that happened so far.
struct Matrix {
    runtime: Runtime,
    server: PostgresServer,
    proxy: FaultProxy,
    /// Straight to the server, and through the proxy.
    ways: [PostgresStore; 2],
    gentle: Arc<Work>,
    history: History,
    stalls: Stalls,
    /// How many calls were tried that could only come late.
    late: u64,
    /// Whether the server was heard to turn one of them away.
    turned_away: bool,
    crashes: u64,
}

impl Matrix {
    fn start() -> Matrix {
        let runtime = Runtime::new().unwrap();
        // Few enough connections that strangers can take them all.
        let server = PostgresServer::builder().setting("max_connections", "50").start();
        let proxy = FaultProxy::start(server.port());
        // Fewer connections than callers, so that these wait for each other too.
        let ways = [server.port(), proxy.port()].map(|port| runtime.block_on(store_at(port, 4)));
        // Takes down every admission with the instant of its decision, in the transaction that makes it.
        server.psql(
            "create unlogged table audit (limit_name text, at_us bigint, xid xid8);
             create function audit() returns trigger language plpgsql as
               $$ begin insert into audit values (new.limit_name, new.at_us, pg_current_xact_id()); return null; end $$;
             create trigger audit after insert or update on tollgate_state for each row
               when (new.admitted and new.limit_name in ('version-0', 'bucket-0', 'log-0')) execute function audit()",
        );
        let (limits, held) = (Limits::of(GENTLE), (GENTLE, Limits::of(GENTLE)));
        let gentle = Arc::new(Work { set: GENTLE, limits, held, shares: [60, 10, 15] });
        let history = History::default();
        let stalls = Stalls::watch(&runtime);
        Matrix {
            runtime,
            server,
            proxy,
            ways,
            gentle,
            history,
            stalls,
            late: 0,
            turned_away: false,
            crashes: 0,
        }
    }

    /// Lets the callers call while `fault` comes and goes, and demands that each way works again soon. Gives the calls.
    fn phase(&mut self, name: &str, work: &Arc<Work>, fault: impl FnOnce(&mut Matrix)) -> Vec<Call> {
        let callers = {
            let _runtime = self.runtime.enter();
            Callers::start(&self.ways, work)
        };
        pause(100);
        fault(self);
        let healed = Instant::now();
        let mut recovered = [Duration::ZERO; 2];
        for (store, recovered) in self.ways.iter().zip(&mut recovered) {
            loop {
                // Where the others are, and not on this thread, which wakes as late as the machine likes.
                let (store, work) = (store.clone(), work.clone());
                let call = self.runtime.spawn(async move { call(&store, &work, Kind::Version, 0).await });
                let call = self.runtime.block_on(call).unwrap();
                let (works, label) = (call.outcome == Outcome::Admitted, call.label.clone());
                callers.recorder.record(call);
                if works {
                    break;
                }
                assert!(healed.elapsed() < RECOVERY, "after {name}: does not recover, says {label}");
            }
            *recovered = healed.elapsed();
        }
        pause(200);
        let history = self.runtime.block_on(callers.stop());
        let report = history.check(&Promises::default());
        let Report { calls, admitted, denied, ambiguous, not_applied, labels, .. } = &report;
        println!(
            "{name}: {calls} calls, {admitted} admitted, {denied} denied, {ambiguous} ambiguous, {not_applied} not applied, \
             longest {} ms, works after {recovered:?}; {labels:?}",
            report.worst_call_us / 1000
        );
        assert!(admitted + denied > 0, "{name}");
        let calls = history.calls().to_vec();
        self.history.extend(calls.clone());
        calls
    }

    /// A phase of the first series.
    fn gentle(&mut self, name: &str, fault: impl FnOnce(&mut Matrix)) {
        let work = self.gentle.clone();
        self.phase(name, &work, fault);
    }

    /// A phase in which the proxy does this for so many milliseconds.
    fn network(&mut self, mode: Mode, ms: u64) {
        self.gentle(&format!("{mode:?}"), |matrix| {
            matrix.proxy.set(mode);
            pause(ms);
            matrix.proxy.set(Mode::Pass);
        });
    }

    fn gentle_phases(&mut self) {
        let admin = self.runtime.block_on(connect_stranger(&self.server)).unwrap();
        self.gentle("nothing", |_| pause(3_000));
        self.network(Mode::Latency(Duration::from_millis(15)), 1_500);
        // More, there and back, than the deadline.
        self.network(Mode::Latency(Duration::from_millis(70)), 2_500);
        self.network(Mode::Blackhole, 1_000);
        self.network(Mode::Reset, 500);
        self.network(Mode::SwallowReplies, 700);
        self.network(Mode::CutReply { after_bytes: 0 }, 500);
        self.network(Mode::CutReply { after_bytes: 70 }, 500);
        self.network(Mode::Refuse, 700);
        let delay = Duration::from_millis(30);
        self.network(Mode::Faulty { swallow_per_mille: 10, delay_per_mille: 20, delay }, 2_500);
        self.gentle("connections reset", |matrix| {
            for _ in 0..20 {
                matrix.proxy.reset_connections();
                pause(50);
            }
        });
        self.gentle("a stalled network", |matrix| {
            matrix.nothing_happens_late("stall", matrix.proxy.port(), |matrix, stalled| {
                matrix.proxy.set(if stalled { Mode::Stall } else { Mode::Pass });
            });
        });
        for name in ["freeze", "refreeze"] {
            self.gentle("a frozen server", |matrix| {
                matrix.nothing_happens_late(name, matrix.server.port(), |matrix, frozen| {
                    if frozen { matrix.server.stop() } else { matrix.server.resume() }
                });
            });
        }
        self.gentle("rows locked by a stranger", |matrix| {
            matrix.nothing_happens_late("lock", matrix.server.port(), |matrix, locked| {
                let lock = "begin; select * from tollgate_state where limit_name <> 'warm' for update";
                let sql = if locked { lock } else { "commit" };
                matrix.runtime.block_on(admin.batch_execute(sql)).unwrap();
            });
        });
        self.gentle("backends terminated", |matrix| {
            let one = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tollgate' \
                       order by random() limit 1";
            for _ in 0..20 {
                matrix.runtime.block_on(admin.batch_execute(one)).unwrap();
                pause(75);
            }
        });
        self.gentle("too many clients", |matrix| matrix.too_many_clients(&admin));
        self.gentle("a server that takes no writes", |matrix| {
            for (on, ms) in [("on", 700), ("off", 0)] {
                let set = format!("alter system set default_transaction_read_only = {on}");
                matrix.runtime.block_on(admin.batch_execute(&set)).unwrap();
                matrix.runtime.block_on(admin.batch_execute("select pg_reload_conf()")).unwrap();
                pause(ms);
            }
        });
    }

    /// Strangers take every connection that the server has, again and again.
    fn too_many_clients(&self, admin: &tokio_postgres::Client) {
        let all =
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tollgate'";
        self.runtime.block_on(async {
            let (start, mut strangers, mut refused) = (Instant::now(), Vec::new(), 0);
            while start.elapsed() < Duration::from_millis(1_000) || refused < 20 {
                assert!(start.elapsed() < Duration::from_secs(20), "{} strangers", strangers.len());
                match connect_stranger(&self.server).await {
                    Ok(stranger) => strangers.push(stranger),
                    Err(_) => {
                        refused += 1;
                        admin.batch_execute(all).await.unwrap();
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            }
        });
    }

    /// Calls that are made while the server cannot answer, and whose deadline has passed before it can again, change nothing.
    fn nothing_happens_late(&mut self, name: &str, port: u16, hold_up: impl Fn(&Matrix, bool)) {
        const CALLS: usize = 12;
        // One key has a quarter of the connections: with four keys all calls are sent at once.
        const KEYS: [&str; 4] = ["k0", "k1", "k2", "k3"];
        let window = hourly(&format!("late-{name}-window"), 1_000);
        let log =
            StoredLimit { name: format!("late-{name}-log"), ..self.gentle.limits.get(Kind::Log).clone() };
        let patient = self.runtime.block_on(connect(options(&self.server.url("postgres"))));
        for (limit, key) in KEYS.into_iter().flat_map(|key| [(&window, key), (&log, key)]) {
            assert!(self.runtime.block_on(patient.charge(&[item(limit, key)], None)).unwrap().allowed);
        }
        let stored = format!(
            "select (select string_agg(b::text, ' ') from tollgate_state where limit_name like 'late-{name}-%') || ' ' || \
             (select count(*) from tollgate_hold where 'late-{name}-window' = any (limit_names))"
        );
        let before = "1 1 1 1 1 1 1 1 0";
        assert_eq!(self.server.psql(&stored), before);
        // A connection that has yet to prepare the statement cannot send it, and which connection a call gets is chance, the more so
        // on a busy machine: then nothing is shown, and it is tried again.
        const ATTEMPTS: usize = 5;
        for attempt in 1..=ATTEMPTS {
            let store = self.runtime.block_on(store_at(port, CALLS));
            hold_up(self, true);
            let (sent, not_sent) = self.runtime.block_on(async {
                let mut tasks = JoinSet::new();
                for number in 0..CALLS {
                    let limit = if number % 3 == 0 { log.clone() } else { window.clone() };
                    let hold = (number % 3 == 1).then(new_hold);
                    let store = store.clone();
                    let key = KEYS[number % KEYS.len()];
                    tasks.spawn(async move { store.charge(&[item(&limit, key)], hold).await.unwrap_err() });
                }
                let errors = tasks.join_all().await;
                errors.into_iter().partition::<Vec<_>, _>(|error| {
                    error.is_ambiguous() || (name == "lock" && error.failure() == Some(Failure::Timeout))
                })
            });
            self.late += CALLS as u64;
            pause(900);
            hold_up(self, false);
            pause(300);
            assert_eq!(self.server.psql(&stored), before, "{name}: a call took effect after its deadline");
            if sent.len() >= KEYS.len() {
                break;
            }
            assert!(attempt < ATTEMPTS, "{name}: nothing is shown by calls that were not sent: {not_sent:?}");
        }
        self.turned_away |= self.server.log().contains("the call came after its deadline");
    }

    fn judge_gentle(&self) {
        // A row's lock or a stop may fall between the decision and its end; then that is as late as the phase is long.
        let promises = || Promises::without_bound().ambiguous_close_after(3 * SECOND_US);
        for (kind, keys) in [(Kind::Version, KEYS), (Kind::Held, 1)] {
            for number in 0..keys {
                let key = key_of(kind, GENTLE, number);
                let stored = self.stored(&self.gentle.limits, kind, number);
                check(&format!("{kind:?} {number}"), &self.history, key, promises().at_rest(key, stored));
            }
        }
        let alone = "select count(*) || ' ' || count(distinct xid) from audit where limit_name = 'version-0'";
        println!("admissions and transactions: {}", self.server.psql(alone));
        let together = "select count(*) > count(distinct xid) from audit where limit_name = 'version-0'";
        assert_eq!(self.server.psql(together), "t", "no checks went together");
        let bucket = Bound::Bucket { burst: BURST, count: RATE, period_us: SECOND_US };
        let log = Bound::Window { limit: MOST, window_us: SECOND_US };
        for (kind, bound) in [(Kind::Bucket, bucket), (Kind::Log, log)] {
            let (key, name) = (key_of(kind, GENTLE, 0), &self.gentle.limits.get(kind).name);
            let times = self.server.psql(&format!("select at_us from audit where limit_name = '{name}'"));
            let decided: Vec<u64> = times.lines().map(|line| line.parse().unwrap()).collect();
            let promises = Promises::of(bound).at_rest(key, decided.len() as u64);
            let report = check(name, &self.history, key, promises.ambiguous_close_after(3 * SECOND_US));
            assert!(report.admitted > 0 && report.denied > 0, "{report}");
            // All that was ever admitted, whoever was told, by the server's own times.
            let admitted = decided.into_iter().map(|at_us| {
                let (outcome, label, store_time_us) = (Outcome::Admitted, "store".into(), Some(at_us));
                Call {
                    key,
                    start_us: at_us,
                    end_us: at_us,
                    cost: 1,
                    outcome,
                    version: None,
                    store_time_us,
                    label,
                }
            });
            check(&format!("{name}, exactly"), &admitted.collect(), key, Promises::of(bound));
        }
    }

    fn crash_phases(&mut self) {
        for set in 1..=7 {
            let (limits, held) = (Limits::of(set), (HELD_IN_CRASHES, Limits::of(HELD_IN_CRASHES)));
            // What is held takes all that came before it to the disk.
            let shares = if set % 2 == 0 { [50, 50, 0] } else { [100, 0, 0] };
            let work = Arc::new(Work { set, limits, held, shares });
            let (mut crash_us, name) = (0, if set <= 4 { "server killed" } else { "backend killed" });
            let calls = self.phase(name, &work, |matrix| {
                pause(600);
                if set <= 4 {
                    matrix.server.kill();
                    crash_us = now_us();
                    pause(200);
                    matrix.server.restart();
                } else {
                    matrix.server.kill_one_backend();
                    crash_us = now_us();
                    matrix.server.wait_until_ready();
                }
            });
            self.crashes += 1;
            for store in &self.ways {
                assert_eq!(store.losses_possible(), self.crashes, "every crash is noticed");
            }
            self.judge_crash(set, &calls, crash_us);
        }
        let key = key_of(Kind::Held, HELD_IN_CRASHES, 0);
        let stored = self.stored(&Limits::of(HELD_IN_CRASHES), Kind::Held, 0);
        let report = check("held", &self.history, key, Promises::without_bound().at_rest(key, stored));
        assert_eq!((report.losses_seen, report.lost_cost), (0, 0), "{report}");
        let holds =
            self.server.psql("select count(*) from tollgate_hold where 'held-99' = any (limit_names)");
        assert_eq!(holds, stored.to_string(), "each has a name, and is charged as often as it is held");
    }

    /// What is used of a limit, by a store that nothing is wrong with.
    fn stored(&self, limits: &Limits, kind: Kind, key: u64) -> u64 {
        self.runtime.block_on(async {
            let store = connect(options(&self.server.url("postgres"))).await;
            let (limit, key) = (limits.get(kind), key.to_string());
            let most = StoredCharge { cost: Cost::MAX, ..item(limit, &key) };
            store.peek(&[most]).await.unwrap().outcomes[0].used()
        })
    }

    /// What one crash cost: nothing that was older than some moments.
    fn judge_crash(&self, set: u64, calls: &[Call], crash_us: u64) {
        let limits = Limits::of(set);
        let mut lost = Vec::new();
        for number in 0..KEYS {
            let key = key_of(Kind::Version, set, number);
            let stored = self.stored(&limits, Kind::Version, number);
            let promises = Promises::without_bound().losses(1).at_rest(key, stored);
            check(&format!("crash {set}, {number}"), &self.history, key, promises);
            lost.extend(lost_of(key, calls).map(|end_us| crash_us.saturating_sub(end_us)));
        }
        let oldest = lost.iter().copied().max().unwrap_or(0);
        println!(
            "crash {set}: lost {} acknowledged charges, the oldest {} ms old",
            lost.len(),
            oldest / 1000
        );
        assert!(oldest <= LAST_MOMENTS_US, "a charge was forgotten that was {oldest} us old");
    }

    fn judge_all(&self) {
        // Keys were judged one by one; here only the sums count.
        let report = self.history.check(&Promises::default().losses(self.crashes));
        println!("{report}\n{} calls that could only come late", self.late);
        let [nearly_all, all] = SLACK_US.map(|slack_us| slack_us + 100 * 1000);
        let took = |call: &Call| call.end_us - call.start_us;
        let late = self.history.calls().iter().filter(|call| took(call) > nearly_all).count() as u64;
        println!("{late} calls took longer than {nearly_all} us; {}", self.stalls);
        assert!(
            late * 100 <= report.calls,
            "{late} of {} calls took longer than {nearly_all} us",
            report.calls
        );
        let far =
            |call: &&Call| took(call) - self.stalls.within(call.start_us, call.end_us).min(took(call)) > all;
        let far: Vec<&Call> = self.history.calls().iter().filter(far).collect();
        // A machine that lets nobody run for longer than the slack cannot show that a call or two was the store's fault.
        let excused = if self.stalls.longest() > SLACK_US[1] { report.calls / 10_000 } else { 0 };
        assert!(far.len() as u64 <= excused, "calls took longer than {all} us: {far:?}; {}", self.stalls);
        let seen = |failure: Failure| report.labels.get(failure.name()).copied().unwrap_or(0);
        for failure in [Failure::Timeout, Failure::Connection, Failure::NotReady, Failure::Overloaded] {
            assert!(seen(failure) > 0, "no call failed by {failure}");
        }
        assert!(report.ambiguous > 0 && report.not_applied > 0);
        assert!(seen(Failure::Late) > 0 || self.turned_away, "no call was turned away as late");
        for failure in [Failure::Refused, Failure::State, Failure::Full, Failure::Reply] {
            assert_eq!(seen(failure), 0, "{failure}: nothing of the kind was wrong");
        }
        assert!(report.calls >= 20_000, "{} calls", report.calls);
    }
}

/// When the calls ended that were told a version of a key which was told again later, or a lower one: they were forgotten.
fn lost_of(key: u64, calls: &[Call]) -> impl Iterator<Item = u64> {
    let mut told: Vec<(u64, u64, Option<u64>)> = calls
        .iter()
        .filter(|call| call.key == key && call.version.is_some())
        .map(|call| (call.start_us, call.end_us, call.version))
        .collect();
    told.sort_unstable();
    // From each call on, the lowest version that anybody was told.
    let mut lowest: Vec<Option<u64>> = told.iter().map(|(_, _, version)| *version).collect();
    for index in (1..lowest.len()).rev() {
        lowest[index - 1] = lowest[index - 1].min(lowest[index]);
    }
    let starts: Vec<u64> = told.iter().map(|(start_us, ..)| *start_us).collect();
    told.into_iter().filter_map(move |(_, end_us, version)| {
        let later = starts.partition_point(|start_us| *start_us <= end_us);
        lowest.get(later).is_some_and(|lowest| *lowest <= version).then_some(end_us)
    })
}

/// Holds the calls of one key to promises.
fn check(name: &str, history: &History, key: u64, promises: Promises) -> Report {
    let calls: History = history.calls().iter().filter(|call| call.key == key).cloned().collect();
    let report = calls.check(&promises);
    println!("{name}: {}", report.to_string().replace('\n', "; "));
    report.assert_clean();
    assert!(report.gaps <= report.ambiguous, "{report}");
    report
}

async fn connect_stranger(server: &PostgresServer) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let (client, connection) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// When this machine let nobody run: by how much a task that only sleeps, among those of the callers, wakes too late. The stores
/// have no other clock than the one that wakes it.
struct Stalls {
    stop: Arc<AtomicBool>,
    seen: Arc<parking_lot::Mutex<Vec<(u64, u64)>>>,
}

impl Stalls {
    fn watch(runtime: &Runtime) -> Stalls {
        let stalls = Stalls { stop: Arc::default(), seen: Arc::default() };
        let (stop, seen) = (stalls.stop.clone(), stalls.seen.clone());
        runtime.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let due = now_us() + 3_000;
                tokio::time::sleep(Duration::from_millis(2)).await;
                let now = now_us();
                if now > due + 5_000 {
                    seen.lock().push((due, now));
                }
            }
        });
        stalls
    }

    fn longest(&self) -> u64 {
        self.seen.lock().iter().map(|(from, to)| to - from).max().unwrap_or(0)
    }

    /// How long it was between two instants.
    fn within(&self, start_us: u64, end_us: u64) -> u64 {
        let overlap = |(from, to): &(u64, u64)| (*to).min(end_us).saturating_sub((*from).max(start_us));
        self.seen.lock().iter().map(overlap).sum()
    }
}

impl std::fmt::Display for Stalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let longest = self.longest();
        let count = self.seen.lock().len();
        write!(f, "the machine stood still {count} times, at most for {longest} us")
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
