//! Many threads at once, while the table grows, is full, or forgets. The clock stands still where answers are counted, so what
//! may be admitted is known to the unit.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tollgate_store::{
    ChargeId, Cost, Hold, Limit, ManualClock, MemoryCharge, MemoryLimit, MemoryStore, Micros, Settlement,
    StoredLimit, WhenFull,
};

use crate::{HOUR, START, YEAR, admitted_of, charge_many, limits, store};

const EXHAUSTED: usize = 1_000;
const INSERTERS: usize = 4;
const INSERTED_EACH: usize = 250_000;

fn once_a_day(store: &MemoryStore) -> MemoryLimit {
    let limit = Limit::token_bucket("1/d", 1).expect("a limit");
    store.open(&StoredLimit::new("once", limit))
}

/// The table grows from nothing to a million keys while others check, charge over two limits, and reserve.
#[test]
fn growth_forgives_nobody_and_loses_no_key() {
    let clock = ManualClock::at(START);
    let store = store(&clock, 10_000_000, WhenFull::Share);
    let once = once_a_day(&store);
    for key in 0..EXHAUSTED {
        assert!(once.charge(&format!("exhausted:{key}"), Cost::ONE).allowed);
    }
    let pair = ["fixed", "counter"].map(|name| {
        let limits = limits(1 << 30, HOUR);
        store.open(limits.iter().find(|limit| limit.name == name).expect("a limit"))
    });
    let (is_grown, together) = (AtomicBool::new(false), AtomicU64::new(0));
    let reserved = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| check_exhausted(&once, &is_grown));
            scope.spawn(|| charge_together(&store, &pair, &is_grown, &together));
        }
        let reserver = scope.spawn(|| reserve(&store, &is_grown));
        let once = &once;
        let inserters: Vec<_> =
            (0..INSERTERS).map(|inserter| scope.spawn(move || insert(once, inserter))).collect();
        inserters.into_iter().for_each(|inserter| inserter.join().expect("an inserter"));
        is_grown.store(true, Ordering::Relaxed);
        reserver.join().expect("a reserver")
    });
    for key in (0..INSERTERS).flat_map(keys_of) {
        assert!(!once.charge(&key, Cost::ONE).allowed, "{key} is lost");
    }
    assert_eq!(once.keys(), EXHAUSTED + INSERTERS * INSERTED_EACH);
    for limit in &pair {
        let used = limit.peek("shared", Cost::MAX).used();
        assert_eq!(used, together.load(Ordering::Relaxed), "charged under both or under none");
    }
    let kept = once.keys() + pair.len() + reserved;
    assert_eq!(store.keys(), kept, "every key");

    clock.advance(YEAR);
    store.sweep();
    assert_eq!((store.keys(), store.used()), (0, 0), "no key, entry, lease or reservation is left");
}

fn keys_of(inserter: usize) -> impl Iterator<Item = String> {
    (0..INSERTED_EACH).map(move |key| format!("inserted:{inserter}:{key}"))
}

fn insert(once: &MemoryLimit, inserter: usize) {
    for key in keys_of(inserter) {
        assert!(once.charge(&key, Cost::ONE).allowed, "{key} is new");
        assert!(!once.charge(&key, Cost::ONE).allowed, "{key} is lost at once");
    }
}

fn check_exhausted(once: &MemoryLimit, is_grown: &AtomicBool) {
    let keys: Vec<String> = (0..EXHAUSTED).map(|key| format!("exhausted:{key}")).collect();
    while !is_grown.load(Ordering::Relaxed) {
        for key in &keys {
            assert!(!once.charge(key, Cost::ONE).allowed, "{key} is forgiven");
        }
        let outcomes = charge_many(once, &keys);
        assert!(outcomes.iter().all(|outcome| !outcome.allowed), "one of many is forgiven");
    }
}

fn charge_together(
    store: &MemoryStore,
    pair: &[MemoryLimit; 2],
    is_grown: &AtomicBool,
    together: &AtomicU64,
) {
    let items =
        pair.each_ref().map(|limit| MemoryCharge { limit, key: "shared", cost: Cost::ONE, shadow: false });
    while !is_grown.load(Ordering::Relaxed) {
        let charged = store.charge_all(&items, None).expect("no hold is asked for");
        assert!(charged.allowed);
        together.fetch_add(1, Ordering::Relaxed);
    }
}

/// Reserves, takes leases and settles some of them, on keys that are as many as it returns.
fn reserve(store: &MemoryStore, is_grown: &AtomicBool) -> usize {
    let limits: Vec<MemoryLimit> = limits(1 << 20, HOUR).iter().map(|limit| store.open(limit)).collect();
    let mut turn = 0;
    while !is_grown.load(Ordering::Relaxed) && turn < 10_000 {
        turn += 1;
        let key = format!("reserver:{}", turn % 10);
        let items: Vec<MemoryCharge<'_>> = limits
            .iter()
            .map(|limit| MemoryCharge { limit, key: &key, cost: Cost::ONE, shadow: false })
            .collect();
        let hold = Hold { id: ChargeId::random(), ttl: HOUR };
        assert!(store.charge_all(&items, Some(hold)).expect("there is room").allowed);
        match turn % 4 {
            0 => drop(store.settle(hold.id, &Settlement::Actual(3)).expect("one amount fits all")),
            1 => drop(store.settle(hold.id, &Settlement::Cancel).expect("all can be cancelled")),
            2 => store.release(hold.id),
            _ => {}
        }
    }
    limits.len() * turn.min(10)
}

/// However often what is as good as new is forgotten meanwhile, exactly the limit is admitted. The keys were charged an age ago,
/// so each is there to be forgotten at the very moment at which it is charged again.
#[test]
fn sweeping_never_forgives() {
    const KEYS: usize = 500;
    let clock = ManualClock::at(START);
    for limit in limits(5, HOUR) {
        let store = store(&clock, 10_000_000, WhenFull::Share);
        let limit = store.open(&limit);
        let keys: Vec<String> = (0..KEYS).map(|key| format!("key:{key}")).collect();
        for _ in 0..4 {
            keys.iter().for_each(|key| assert!(limit.charge(key, Cost::ONE).allowed));
            clock.advance(YEAR);
            let is_over = AtomicBool::new(false);
            let admitted: u64 = thread::scope(|scope| {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        store.sweep();
                    }
                });
                let charge_all = || keys.iter().map(|key| admitted_of(&limit, key, 4)).sum::<u64>();
                let chargers: Vec<_> = (0..3).map(|_| scope.spawn(charge_all)).collect();
                let admitted = chargers.into_iter().map(|charger| charger.join().expect("a charger")).sum();
                is_over.store(true, Ordering::Relaxed);
                admitted
            });
            assert_eq!(admitted, 5 * KEYS as u64, "{limit:?}");
            assert_eq!(limit.keys(), KEYS, "{limit:?}");
            clock.advance(YEAR);
        }
    }
}

/// Charges over several limits, in any order and over the cap, never wait for each other in a ring; in the end all is
/// accounted for. A ring would be for ever, so the test waits for a while only.
#[test]
fn charges_over_the_cap_never_wait_in_a_ring() {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        cross();
        [0, 1, 2, 3, 8].into_iter().for_each(churn);
        done.send(()).expect("somebody waits");
    });
    let waited = is_done.recv_timeout(Duration::from_secs(120));
    assert!(waited.is_ok(), "the charges wait for each other, or one of them failed: {waited:?}");
}

/// Two limits, both full and so large that most keys are not neighbours, charged by two threads in opposite orders.
fn cross() {
    let store = store(&ManualClock::at(START), 2_000, WhenFull::Share);
    let limits: Vec<MemoryLimit> =
        limits(1 << 30, HOUR).iter().take(2).map(|limit| store.open(limit)).collect();
    for limit in &limits {
        (0..1_000).for_each(|key| assert!(limit.charge(&format!("there:{key}"), Cost::ONE).allowed));
    }
    thread::scope(|scope| {
        for crosser in 0..2usize {
            let (store, limits) = (&store, &limits);
            scope.spawn(move || {
                for turn in 0..200_000 {
                    let key = format!("newcomer:{crosser}:{}", turn % 1_000);
                    let items = [crosser, 1 - crosser].map(|limit| MemoryCharge {
                        limit: &limits[limit],
                        key: &key,
                        cost: Cost::ONE,
                        shadow: false,
                    });
                    assert!(store.charge_all(&items, None).expect("no hold is asked for").allowed);
                }
            });
        }
    });
    for limit in &limits {
        assert_eq!(limit.peek("anybody", Cost::MAX).used(), 400_000, "{limit:?}");
    }
}

fn churn(cap: usize) {
    let clock = ManualClock::at(START);
    let store = store(&clock, cap, WhenFull::Share);
    let limits: Vec<MemoryLimit> =
        limits(1_000_000, Micros::from_millis(10)).iter().map(|limit| store.open(limit)).collect();
    thread::scope(|scope| {
        for churner in 0..4usize {
            let (store, clock, limits) = (&store, &clock, &limits);
            scope.spawn(move || {
                for turn in 0..5_000usize {
                    let pick = |step: usize| &limits[(turn / 3 + step * (churner + 1)) % limits.len()];
                    let keys = [0, 1, 2].map(|step| format!("key:{}", (turn * (churner + 1) + step) % 7));
                    let items = [0, 1, 2].map(|step| MemoryCharge {
                        limit: pick(step),
                        key: &keys[step],
                        cost: Cost::ONE,
                        shadow: false,
                    });
                    let id = ChargeId::random();
                    let hold = (turn % 5 == 0).then_some(Hold { id, ttl: Micros::from_millis(2) });
                    let held = store.charge_all(&items, hold).is_ok_and(|charged| charged.allowed);
                    if held && hold.is_some() && turn % 2 == 0 {
                        store.settle(id, &Settlement::Cancel).expect("all can be cancelled");
                    }
                    if turn % 50 == 0 {
                        clock.advance(Micros::from_millis(1));
                    }
                    assert!(store.used() <= cap, "{} of {cap}", store.used());
                }
            });
        }
    });
    clock.advance(YEAR);
    store.sweep();
    assert_eq!((store.keys(), store.used()), (0, 0), "with room for {cap}");
}
