//! Tests of limits whose numbers change, and of keys that move between their tables.

use tollgate_kernel::{Cost, Micros, Rate};

use super::*;
use crate::{ManualClock, MemoryOptions, MemoryStore, Store, StoredCharge};

fn store(max_keys: usize) -> (MemoryStore, ManualClock) {
    let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
    let options = MemoryOptions { clock: hands.clock(), max_keys, sweep_every: None, ..Default::default() };
    (MemoryStore::new(options), hands)
}

/// A bucket that takes ten hours to fill, with this rate per hour. Most of these have different units, and all keep the
/// instant at which they are full.
fn hourly(count: u64) -> StoredLimit {
    let tokens = tokens(count);
    StoredLimit { limit: tokens.limit.keeping_instant(), ..tokens }
}

/// The same, keeping the missing tokens.
fn tokens(count: u64) -> StoredLimit {
    let rate = Rate::new(count, Micros::from_secs(3_601)).unwrap();
    StoredLimit::new("api", Limit::token_bucket(rate, 10 * count).unwrap())
}

fn sets(store: &MemoryStore) -> usize {
    store.inner.tables.lock().by_name.values().map(|named| named.sets.len()).sum()
}

/// A thousand changes, each to units that no other has: few tables are left, and every key is where it is looked for.
#[test]
fn many_changes_leave_few_tables_and_every_key() {
    let (store, hands) = store(10_000);
    let all = Cost::new(10).unwrap();
    let mut held = store.open(&hourly(1));
    assert!(held.charge("first", all).allowed);
    for (count, keys) in (2..1_000).zip(2..) {
        held = store.open(&hourly(count));
        assert!(held.charge(&format!("key {count}"), Cost::ONE).allowed);
        assert!(sets(&store) <= MOST_IDLE_SIBLINGS + 2, "{} tables", sets(&store));
        assert_eq!((store.keys(), store.used()), (keys, keys));
    }
    assert!(!held.charge("first", Cost::ONE).allowed, "it was emptied a thousand changes ago");
    for count in 2..1_000 {
        assert!(held.peek(&format!("key {count}"), Cost::MAX).remaining < 9_990, "key {count}");
    }
    assert_eq!((store.keys(), store.used()), (999, 999), "moving takes no room and leaves none behind");
    hands.advance(Micros::from_secs(36_010));
    store.sweep();
    store.sweep();
    assert_eq!((sets(&store), store.keys(), store.used()), (1, 0, 0), "what is empty is dropped");
    drop(held);
    store.sweep();
    assert_eq!(sets(&store), 0, "and so is what nobody holds");
}

/// Regression: with all limits held, as ad-hoc limits are, each had a table, and a new key was searched in all of them, one
/// by one under one lock.
#[test]
fn many_held_limits_leave_few_tables_and_every_key() {
    let (store, hands) = store(10_000);
    let held: Vec<_> = (1..2_000).map(|count| store.open(&hourly(count))).collect();
    assert!(held[0].charge("first", Cost::new(10).unwrap()).allowed);
    for (limit, count) in held.iter().zip(1..) {
        assert!(limit.charge(&format!("key {count}"), Cost::new(5 * count).unwrap()).allowed, "{count}");
        assert!(!limit.charge("first", Cost::ONE).allowed, "it was emptied by other numbers");
    }
    assert!(sets(&store) <= MOST_HELD_SIBLINGS + MOST_IDLE_SIBLINGS + 1, "{} tables", sets(&store));
    assert_eq!((store.keys(), store.used()), (2_000, 2_000));
    // Half of ten hours is used up, by whichever numbers one looks, and whole again after five.
    for (limit, count) in held.iter().rev().zip((1..2_000).rev()) {
        for key in [1, 7, 8, 9, 10, 1_000, 1_999] {
            let left = limit.peek(&format!("key {key}"), Cost::MAX).remaining;
            assert!((5 * count - 1..=5 * count).contains(&left), "key {key} by {count}: {left}");
        }
    }
    hands.advance(Micros::from_secs(18_006));
    store.sweep();
    store.sweep();
    assert_eq!((store.keys(), store.used()), (1, 1), "all but the first");
    drop(held);
    hands.advance(Micros::from_secs(18_006));
    store.sweep();
    store.sweep();
    assert_eq!(sets(&store), 0);
}

/// A table was known to its siblings by the first of its limits, and lost to them when that went and another stayed: a key in it was
/// begun a second time by the others.
#[test]
fn a_table_is_found_by_its_siblings_after_the_limit_that_registered_it_goes() {
    // By which of its limits a table is known is drawn by lot.
    for _ in 0..20 {
        let (store, _) = store(10);
        let of = |count: u64, hours: u64| {
            let rate = Rate::new(count, Micros::from_secs(3_601)).unwrap();
            store.open(&StoredLimit::new("api", Limit::token_bucket(rate, hours * count).unwrap()))
        };
        let [first, second, other] = [of(10, 10), of(10, 20), of(7, 10)];
        drop(first);
        let third = of(7, 20);
        assert!(second.charge("a", Cost::new(200).unwrap()).allowed);
        for limit in [other, third] {
            assert!(!limit.charge("a", Cost::ONE).allowed, "it was emptied by other numbers");
        }
    }
}

/// Regression: a sweep removed the limit that a table was registered by before it registered another, and keys of that table
/// were started again in between.
#[test]
fn a_table_is_found_by_its_siblings_while_limits_go() {
    let (store, _) = store(1_000_000);
    let of = |count: u64, tokens: u64| {
        let rate = Rate::new(count, Micros::from_secs(3_601)).unwrap();
        store.open(&StoredLimit::new("api", Limit::token_bucket(rate, tokens).unwrap()))
    };
    let (one, other) = (of(10, 100), of(7, 70));
    for round in 0..50 {
        let keys: Vec<String> = (0..2_000).map(|key| format!("{round}/{key}")).collect();
        for key in &keys {
            assert!(one.charge(key, Cost::new(100).unwrap()).allowed);
        }
        std::thread::scope(|scope| {
            let charging = scope.spawn(|| {
                keys.iter().filter(|key| other.charge(key, Cost::new(70).unwrap()).allowed).count()
            });
            while !charging.is_finished() {
                // The first sweep makes one of many known, and the second lets go of it.
                let many: Vec<_> = (101..400).map(|tokens| of(10, tokens)).collect();
                drop(of(10, 400));
                store.sweep();
                drop(many);
                store.sweep();
            }
            assert_eq!(charging.join().unwrap(), 0, "keys that were empty were begun anew");
        });
    }
}

/// A caller that makes numbers up, and drops them, moves few keys: a table with many is not emptied into a new one again and again.
#[test]
fn the_largest_table_stays_where_it_is() {
    let (store, _) = store(10_000);
    let held = store.open(&hourly(1));
    for key in 0..100 {
        assert!(held.charge(&format!("key {key}"), Cost::ONE).allowed);
    }
    drop(held);
    let largest = || {
        let tables = store.inner.tables.lock();
        let sets = tables.by_name.values().flat_map(|named| &named.sets);
        sets.map(|set| set.any()).max_by_key(|table| table.len()).map(|table| table.address())
    };
    let before = largest();
    for count in 2..200 {
        assert!(store.open(&hourly(count)).charge(&format!("other {count}"), Cost::ONE).allowed);
    }
    assert_eq!(largest(), before);
    assert!(sets(&store) <= MOST_IDLE_SIBLINGS + 2, "{} tables", sets(&store));
    assert_eq!((store.keys(), store.used()), (298, 298));
}

/// The same where the limit is named with every charge.
#[tokio::test]
async fn so_it_is_where_limits_are_named_with_every_charge() {
    let (store, _) = store(10_000);
    for count in 1..1_000 {
        let limit = hourly(count);
        let cost = Cost::new(10 * count).unwrap();
        let charge = StoredCharge { limit: &limit, key: "a", cost, shadow: false };
        assert_eq!(Store::charge(&store, &[charge], None).await.unwrap().allowed, count == 1, "{count}");
        assert!(sets(&store) <= MOST_IDLE_SIBLINGS + 2, "{} tables", sets(&store));
        let windows = StoredLimit::new("log", Limit::sliding_window(1, Micros::from_secs(count)).unwrap());
        let charge = StoredCharge { limit: &windows, cost: Cost::ONE, ..charge };
        assert_eq!(Store::charge(&store, &[charge], None).await.unwrap().allowed, count == 1);
    }
    let tables = store.inner.tables.lock();
    let limits = tables.by_name["log"].sets.iter().map(|set| set.limits.len()).sum::<usize>();
    assert!(limits <= MOST_BY_CALL + 1, "{limits} limits");
}

/// A limit with a window of a minute shares its nodes with one of a second.
#[test]
fn what_one_limit_has_done_with_stays_for_another() {
    type Make = fn(u64, Micros) -> Result<Limit, tollgate_kernel::LimitError>;
    for make in [Limit::sliding_window as Make, Limit::sliding_window_counter as Make] {
        let (store, hands) = store(2);
        let of = |secs| StoredLimit::new("api", make(5, Micros::from_secs(secs)).unwrap());
        let [short, long] = [1, 60].map(|secs| store.open(&of(secs)));
        assert!(long.charge("a", Cost::new(5).unwrap()).allowed);
        hands.advance(Micros::from_secs(30));
        store.sweep();
        short.charge("b", Cost::ONE);
        short.charge("c", Cost::ONE);
        assert!(!long.peek("a", Cost::ONE).allowed, "{}", of(60).limit);
        drop(long);
        hands.advance(Micros::from_secs(3));
        store.sweep();
        assert_eq!(
            short.keys(),
            1,
            "what was charged by a longer window is kept for as long as that counts it"
        );
        hands.advance(Micros::from_secs(120));
        store.sweep();
        store.sweep();
        assert_eq!(short.keys(), 0);
    }
}

/// New keys that share a state for lack of room continue from it when the units change.
#[test]
fn the_state_that_newcomers_share_is_taken_over() {
    let (store, _) = store(1);
    let (old, all) = (store.open(&hourly(1)), Cost::new(10).unwrap());
    assert!(old.charge("a", Cost::ONE).allowed);
    assert!(old.charge("b", all).allowed, "in the state that newcomers share");
    let new = store.open(&hourly(7));
    assert!(!new.charge("c", Cost::ONE).allowed);
    assert!(!new.charge("b", Cost::ONE).allowed);
    assert!(new.charge("a", Cost::ONE).allowed);
    assert_eq!(store.used(), 1);
}

/// After a change a key is written whole for as long as its history counts; then it is back in one word, and nothing is left of the
/// table of whole states.
#[test]
fn a_changed_key_is_written_whole_until_its_history_has_passed() {
    let (store, hands) = store(100);
    let whole = || {
        let tables = store.inner.tables.lock();
        tables.by_name["api"].buckets.whole.as_ref().map(|whole| whole.limit_table.len())
    };
    let keys: Vec<String> = (0..10).map(|key| format!("key {key}")).collect();
    let old = store.open(&tokens(1));
    keys.iter().for_each(|key| assert!(old.charge(key, Cost::new(10).unwrap()).allowed));
    assert_eq!(whole(), None);
    let new = store.open(&tokens(7));
    drop(old);
    let sixty = Cost::new(60).unwrap();
    for key in &keys {
        assert_eq!(new.peek(key, Cost::MAX).remaining, 60, "ten stay consumed");
        assert_eq!(
            whole(),
            Some(keys.iter().position(|other| other == key).unwrap()),
            "a look moves nothing"
        );
        assert!(new.charge(key, sixty).allowed && !new.charge(key, Cost::ONE).allowed);
    }
    assert_eq!((whole(), new.keys(), store.used()), (Some(10), 10, 10));
    // Ten hours later all is refilled, and the first charge finds the key plain.
    hands.advance(Micros::from_secs(36_010));
    for key in &keys[..5] {
        assert!(new.charge(key, sixty).allowed);
    }
    assert_eq!((whole(), new.keys(), store.used()), (Some(5), 10, 10));
    store.sweep();
    store.sweep();
    assert_eq!((whole(), new.keys(), store.used()), (None, 5, 5));
    assert_eq!(new.charge(&keys[0], Cost::new(10).unwrap()).remaining, 0);
}

/// One charge that names one key of one limit by two sets of numbers is one part, by the first of them.
#[test]
fn a_key_named_by_two_sets_of_numbers_in_one_charge_is_charged_once() {
    use crate::MemoryCharge;
    let (store, _) = store(10);
    let [one, seven] = [1, 7].map(|count| store.open(&tokens(count)));
    let charge = |limit| MemoryCharge { limit, key: "a", cost: Cost::new(3).unwrap(), shadow: false };
    let charged = store.charge_all(&[charge(&one), charge(&seven)], None).unwrap();
    assert!(charged.allowed && charged.outcomes.iter().all(|outcome| outcome.remaining == 4));
    assert_eq!((store.keys(), store.used()), (1, 1));
    assert_eq!(seven.peek("a", Cost::MAX).remaining, 64);
}

/// Keys that go to and fro between units while they are charged, settled and looked at are never begun twice: all that was
/// admitted comes to one bucket.
#[test]
fn keys_that_move_under_load_are_counted_once() {
    // Between separate tables, between a separate table and the shared one, and within the shared one.
    for others in [0, MOST_HELD_SIBLINGS - 1, MOST_HELD_SIBLINGS] {
        // In parts of ten hours of which a whole bucket has 7,700,000; and in tokens, of which the largest has 1,100.
        let parts = |admitted, count| admitted * 770_000 / count;
        keys_that_move(others, hourly, parts, 7_692_900..=7_700_000);
        keys_that_move(others, tokens, |admitted, _| admitted, 1_100..=1_100);
    }
}

fn keys_that_move(
    others: usize,
    limit: fn(u64) -> StoredLimit,
    parts: impl Fn(u64, u64) -> u64,
    whole: std::ops::RangeInclusive<u64>,
) {
    use crate::{ChargeId, Hold, MemoryCharge, Settlement};
    use std::sync::atomic::{AtomicU64, Ordering};
    const COUNTS: [u64; 3] = [10, 70, 110];
    let (store, _) = store(10_000);
    let _others: Vec<_> = (201..).take(others).map(|count| store.open(&limit(count))).collect();
    let limits = COUNTS.map(|count| store.open(&limit(count)));
    let keys: Vec<(String, [AtomicU64; 3])> =
        (0..40).map(|key| (format!("key {key}"), Default::default())).collect();
    let charge = |which: usize, (key, admitted): &(String, [AtomicU64; 3]), by_all: bool| {
        let charge = MemoryCharge { limit: &limits[which], key, cost: Cost::ONE, shadow: false };
        let allowed = match by_all {
            true => store.charge_all(&[charge], None).unwrap().allowed,
            false => limits[which].charge(key, Cost::ONE).allowed,
        };
        admitted[which].fetch_add(u64::from(allowed), Ordering::Relaxed);
        allowed
    };
    let hold = |which: usize, (key, _): &(String, [AtomicU64; 3])| {
        let id = ChargeId::random();
        let charge = MemoryCharge { limit: &limits[which], key, cost: Cost::ONE, shadow: false };
        store.charge_all(&[charge], Some(Hold { id, ttl: Micros::from_secs(60) })).unwrap();
        store.settle(id, &Settlement::Cancel).unwrap();
        store.release(id);
    };
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let (limits, keys, charge, hold) = (&limits, &keys, &charge, &hold);
            scope.spawn(move || {
                for round in 0..4_000 {
                    let key = &keys[(worker * 13 + round) % keys.len()];
                    let which = (worker + round / 160) % limits.len();
                    match (worker + round / 40) % 4 {
                        0 => drop(limits[which].peek(&key.0, Cost::ONE)),
                        1 => drop(charge(which, key, false)),
                        2 => drop(charge(which, key, true)),
                        _ => hold(which, key),
                    }
                }
            });
        }
    });
    for key in &keys {
        while charge(2, key, false) {}
        let admitted = key.1.iter().zip(COUNTS);
        let sum = admitted.map(|(units, count)| parts(units.load(Ordering::Relaxed), count)).sum::<u64>();
        assert!(whole.contains(&sum), "{}: {sum}, not {whole:?}", key.0);
    }
    assert_eq!((store.keys(), store.used()), (40, 40), "beside {others}");
}
