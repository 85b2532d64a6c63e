//! Who calls while things go wrong: eight callers on each of two ways to the server, and the record of what they were told.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate_store::{
    ChargeId, Charged, Hold, Limit, Micros, PostgresOptions, PostgresStore, Store, StoredLimit,
};
use tollgate_testkit::Random;
use tollgate_testkit::history::{Call, History, Outcome, Recorder, now_us};

use super::{DEADLINE, connect, hourly, item, options};

const CALLERS: usize = 8;

/// What is charged, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A window too large to fill: what is used after an admission is the version of its state.
    Version,
    /// The same, by held charges.
    Held,
    Bucket,
    Log,
}

/// How many keys a version has, so that checks can go together.
pub(super) const KEYS: u64 = 8;

/// The number of a key in the history. A set is what is charged together: each crash has its own.
pub(super) fn key_of(kind: Kind, set: u64, key: u64) -> u64 {
    1_000 * set + 100 * key + kind as u64
}

pub(super) const BURST: u64 = 50;
pub(super) const RATE: u64 = 300;
pub(super) const MOST: u64 = 150;

/// The limits of a set, by kind.
#[derive(Debug)]
pub(super) struct Limits([StoredLimit; 4]);

impl Limits {
    pub(super) fn of(set: u64) -> Limits {
        let huge = |name: String| hourly(&name, 1_000_000_000);
        let second = Micros::from_secs(1);
        let bucket = Limit::token_bucket(format!("{RATE}/s"), BURST).unwrap();
        let log = Limit::sliding_window(MOST, second).unwrap();
        Limits([
            huge(format!("version-{set}")),
            huge(format!("held-{set}")),
            StoredLimit::new(format!("bucket-{set}"), bucket),
            StoredLimit::new(format!("log-{set}"), log),
        ])
    }

    pub(super) fn get(&self, kind: Kind) -> &StoredLimit {
        &self.0[kind as usize]
    }
}

/// What the callers of a phase charge.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) set: u64,
    pub(super) limits: Limits,
    /// Held charges are of this set, whatever the others are of.
    pub(super) held: (u64, Limits),
    /// How many in a hundred are of the version, held, and of the bucket; the others are of the log.
    pub(super) shares: [u64; 3],
}

impl Work {
    fn pick(&self, random: &mut Random) -> Kind {
        let [version, held, bucket] = self.shares;
        match random.below(100) {
            n if n < version => Kind::Version,
            n if n < version + held => Kind::Held,
            n if n < version + held + bucket => Kind::Bucket,
            _ => Kind::Log,
        }
    }
}

/// A store that reaches the server by some port, with connections that are open, statements that are prepared, and answers that
/// showed the server's clock.
pub(super) async fn store_at(port: u16, connections: usize) -> PostgresStore {
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let store = connect(PostgresOptions { timeout: DEADLINE, connections, ..options(&url) }).await;
    // One limit has only a part of the connections, and its checks would share statements.
    let warm: Vec<StoredLimit> =
        (0..connections).map(|limit| hourly(&format!("warm-{limit}"), 1_000_000)).collect();
    // Until each connection has prepared both kinds of statement: a call that is late, on a slow disk, costs its connection.
    let mut good_rounds = 0;
    for round in 0..200 {
        let mut tasks = JoinSet::new();
        for (number, warm) in warm.iter().cloned().enumerate() {
            let (store, hold) = (store.clone(), (round % 2 == 0).then(new_hold));
            tasks.spawn(async move { store.charge(&[item(&warm, &number.to_string())], hold).await.is_ok() });
        }
        let is_good =
            tasks.join_all().await.into_iter().all(|is_ok| is_ok) && store.connections() == connections;
        good_rounds = if is_good { good_rounds + 1 } else { 0 };
        if good_rounds == 12 {
            break;
        }
    }
    store
}

pub(super) fn new_hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) }
}

/// One call, and what is known of it.
pub(super) async fn call(store: &PostgresStore, work: &Work, kind: Kind, key: u64) -> Call {
    let (set, limits) =
        if kind == Kind::Held { (work.held.0, &work.held.1) } else { (work.set, &work.limits) };
    let hold = (kind == Kind::Held).then(new_hold);
    let name = key.to_string();
    let start_us = now_us();
    let answer = store.charge(&[item(limits.get(kind), &name)], hold).await;
    let end_us = now_us();
    let (outcome, label) = match &answer {
        Ok(Charged { allowed: true, .. }) => (Outcome::Admitted, "store"),
        Ok(_) => (Outcome::Denied, "store"),
        Err(error) => {
            let failure =
                error.failure().unwrap_or_else(|| panic!("nothing is wrong with the call: {error}"));
            let known = if error.is_ambiguous() { Outcome::Ambiguous } else { Outcome::NotApplied };
            (known, failure.name())
        }
    };
    let counts = outcome == Outcome::Admitted && matches!(kind, Kind::Version | Kind::Held);
    let version = answer.ok().filter(|_| counts).map(|charged| charged.outcomes[0].used());
    let (key, label) = (key_of(kind, set, key), Cow::Borrowed(label));
    Call { key, start_us, end_us, cost: 1, outcome, version, store_time_us: None, label }
}

/// Callers at work.
pub(super) struct Callers {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
    pub(super) recorder: Arc<Recorder>,
}

impl Callers {
    /// Must be called within a runtime.
    pub(super) fn start(ways: &[PostgresStore], work: &Arc<Work>) -> Callers {
        let (stop, recorder) = (Arc::new(AtomicBool::new(false)), Arc::new(Recorder::new()));
        let mut tasks = JoinSet::new();
        for number in 0..CALLERS * ways.len() {
            let (store, work) = (ways[number % ways.len()].clone(), work.clone());
            let (stop, recorder) = (stop.clone(), recorder.clone());
            tasks.spawn(async move {
                let mut random = Random::seeded(number as u64);
                while !stop.load(Ordering::Relaxed) {
                    let kind = work.pick(&mut random);
                    let key = if kind == Kind::Version { random.below(KEYS) } else { 0 };
                    let call = call(&store, &work, kind, key).await;
                    let failed = matches!(call.outcome, Outcome::Ambiguous | Outcome::NotApplied);
                    recorder.record(call);
                    if failed {
                        // Others would not come back at once either.
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                }
            });
        }
        Callers { tasks, stop, recorder }
    }

    pub(super) async fn stop(self) -> History {
        self.stop.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
        self.recorder.take()
    }
}
