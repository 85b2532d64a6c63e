//! What strangers send, and settings that nobody should choose: a defined answer each time, no panic, nothing charged on a
//! refusal.

use tollgate_store::{
    ChargeId, Cost, Hold, Limit, ManualClock, MemoryCharge, MemoryLimit, MemoryStore, Micros, Outcome,
    Settled, Settlement, StoredLimit, WhenFull,
};

use crate::{HOUR, START, YEAR, admitted_of, charge_many, is_kept_by_entry, limits, store};

const CAPACITY: u64 = 5;

/// The end of time.
const NEVER: Micros = Micros::new(u64::MAX);

/// One limit in a store of its own.
struct Scene {
    clock: ManualClock,
    store: MemoryStore,
    stored: StoredLimit,
    limit: MemoryLimit,
}

impl Scene {
    fn name(&self) -> &str {
        &self.stored.name
    }

    fn is_lease(&self) -> bool {
        matches!(self.stored.limit, Limit::Concurrency(_))
    }

    fn item<'a>(&'a self, key: &'a str, cost: u64) -> MemoryCharge<'a> {
        item(&self.limit, key, cost)
    }

    /// How often the key can be charged now, out of twice as often as it may be.
    fn admitted(&self, key: &str) -> u64 {
        admitted_of(&self.limit, key, 2 * CAPACITY)
    }
}

/// A scene for every kind of limit.
fn scenes(start: Micros, max_keys: usize, when_full: WhenFull) -> impl Iterator<Item = Scene> {
    limits(CAPACITY, HOUR).into_iter().map(move |stored| {
        let clock = ManualClock::at(start);
        let store = store(&clock, max_keys, when_full);
        let limit = store.open(&stored);
        Scene { clock, store, stored, limit }
    })
}

fn cost(units: u64) -> Cost {
    Cost::new(units).expect("a cost")
}

fn item<'a>(limit: &'a MemoryLimit, key: &'a str, units: u64) -> MemoryCharge<'a> {
    MemoryCharge { limit, key, cost: cost(units), shadow: false }
}

fn hold(id: ChargeId, ttl: Micros) -> Option<Hold> {
    Some(Hold { id, ttl })
}

#[test]
fn whatever_a_key_is_made_of_it_has_a_state_of_its_own() {
    let long = "k".repeat(1 << 20);
    let keys = [
        "",
        "\0",
        "\0\0",
        " ",
        "{",
        "}",
        "{}",
        "{a}",
        "{a}b",
        ":",
        "::",
        "a:b",
        "a\0b",
        "a\nb",
        "a\r\nb",
        "%00",
        "\u{7f}",
        "\u{200b}",
        "é",
        "e\u{301}",
        "𝕜",
        "../../etc",
        "' or 1=1 --",
        &long,
        &long[1..],
    ];
    for scene in scenes(START, 1_000, WhenFull::Deny) {
        for (before, key) in keys.iter().enumerate() {
            assert_eq!(scene.limit.keys(), before);
            assert_eq!(scene.admitted(key), CAPACITY, "{} {key:.40?}", scene.name());
        }
        for key in keys {
            assert!(!scene.limit.charge(key, Cost::ONE).allowed, "{} {key:.40?}", scene.name());
            assert!(scene.limit.forget(key) && !scene.limit.forget(key), "{} {key:.40?}", scene.name());
        }
        assert_eq!((scene.store.keys(), scene.store.used()), (0, 0));
    }
}

#[test]
fn costs_that_never_fit_are_refused_for_ever_and_leave_no_trace() {
    for scene in scenes(START, 1_000, WhenFull::Share) {
        let refused = |outcome: Outcome| {
            assert!(!outcome.allowed && outcome.retry_after.is_none(), "{} {outcome:?}", scene.name());
            assert_eq!(outcome.remaining, CAPACITY, "{}", scene.name());
        };
        let (store, id) = (&scene.store, ChargeId::random());
        for units in [CAPACITY + 1, (1 << 53) - 1, 1 << 53, 1 << 63, u64::MAX - 1, u64::MAX] {
            refused(scene.limit.charge("key", cost(units)));
            refused(scene.limit.peek("key", cost(units)));
            // Twice in one charge: the sum may be more than there are numbers.
            let twice = [scene.item("key", units); 2];
            for hold in [None, hold(id, HOUR)] {
                let charged = store.charge_all(&twice, hold).expect("there is room");
                charged.outcomes.iter().for_each(|outcome| refused(*outcome));
                assert!(!charged.allowed && !store.peek_all(&twice).allowed);
            }
        }
        assert_eq!(store.settle(id, &Settlement::Cancel).expect("an answer"), Settled::Unknown);
        assert_eq!((store.keys(), store.used()), (0, 0), "{}", scene.name());
    }
}

#[test]
fn nothing_is_charged_on_a_refusal() {
    for scene in scenes(START, 1_000, WhenFull::Share) {
        let (store, limit) = (&scene.store, &scene.limit);
        let roomy = store.open(&StoredLimit::new("roomy", limits(1_000, HOUR)[0].limit));
        assert!(limit.charge("key", cost(CAPACITY)).allowed && roomy.charge("key", Cost::ONE).allowed);
        let standing = || [limit, &roomy].map(|limit| limit.peek("key", Cost::MAX));
        let (before, used) = (standing(), store.used());
        let items = [item(&roomy, "key", 1), item(limit, "key", 1), item(&roomy, "newcomer", 1)];
        for _ in 0..10 {
            assert!(!limit.charge("key", Cost::ONE).allowed);
            for hold in [None, hold(ChargeId::random(), HOUR)] {
                for items in [&items[..2], &items] {
                    assert!(!store.charge_all(items, hold).expect("there is room").allowed);
                }
            }
            let outcomes = charge_many(limit, &["key"; 20]);
            assert!(outcomes.iter().all(|outcome| !outcome.allowed));
        }
        assert_eq!((standing(), store.used()), (before, used), "{}", scene.name());
    }
}

#[test]
fn amounts_that_nobody_reserved_are_settled_within_bounds() {
    for actual in [CAPACITY + 1, 1 << 53, u64::MAX] {
        for scene in scenes(START, 1_000, WhenFull::Share) {
            let (store, id) = (&scene.store, ChargeId::random());
            let settle = |settlement| store.settle(id, &settlement);
            let charged = store.charge_all(&[scene.item("key", 1)], hold(id, HOUR));
            assert!(charged.expect("there is room").allowed);
            let error = settle(Settlement::Named(vec![("no such limit".to_owned(), 1)]));
            assert!(error.expect_err("nothing is held there").is_invalid());
            assert!(settle(Settlement::Each(vec![1, 1])).expect_err("one charge").is_invalid());
            assert_eq!(settle(Settlement::Actual(actual)).expect("one limit"), Settled::Done);
            assert_eq!(settle(Settlement::Actual(0)).expect("one limit"), Settled::Already);
            // A lease is released, whatever it is said to have cost; a debt is waited out.
            let left = if scene.is_lease() { CAPACITY } else { 0 };
            assert_eq!(scene.limit.peek("key", Cost::MAX).remaining, left, "{}", scene.name());
            assert!(scene.limit.forget("key"));
            assert_eq!(scene.admitted("key"), CAPACITY, "{}", scene.name());
        }
    }
}

#[test]
fn holds_end_when_they_should_whatever_their_time() {
    for (ttl, expected) in [(Micros::ZERO, Settled::Unknown), (NEVER, Settled::Done)] {
        for scene in scenes(START, 1_000, WhenFull::Share) {
            let id = ChargeId::new(u128::MAX).expect("a name");
            let charged = scene.store.charge_all(&[scene.item("key", 1)], hold(id, ttl));
            assert!(charged.expect("there is room").allowed);
            // A lease is held at least as long as it lasts.
            let expected = if scene.is_lease() { Settled::Done } else { expected };
            let settled = scene.store.settle(id, &Settlement::Cancel).expect("an answer");
            assert_eq!(settled, expected, "{} for {ttl}", scene.name());
        }
    }
}

/// Whatever the clock shows at first and then, a key has all of its limit at that instant, and no more.
#[test]
fn a_clock_that_leaps_grants_the_limit_and_no_more() {
    let starts = [Micros::ZERO, Micros::new(1), START, NEVER.saturating_sub(Micros::new(50 * YEAR.get()))];
    for start in starts {
        for years in [1, 30] {
            for scene in scenes(start, 1_000, WhenFull::Share) {
                assert_eq!(scene.admitted("key"), CAPACITY, "{} at {start}", scene.name());
                scene.clock.advance(Micros::new(years * YEAR.get()));
                assert_eq!(scene.admitted("key"), CAPACITY, "{} after {years} years", scene.name());
                scene.clock.set(start);
                assert_eq!(scene.admitted("key"), 0, "{}: there is no way back", scene.name());
            }
        }
    }
}

/// At the end of time nothing ends later than now. What is asked then is answered, and that is all.
#[test]
fn the_end_of_time_is_survived() {
    for start in [Micros::ZERO, START, NEVER] {
        for scene in scenes(start, 10, WhenFull::Share) {
            scene.limit.charge("key", Cost::ONE);
            scene.clock.set(NEVER);
            let (store, id) = (&scene.store, ChargeId::random());
            for _ in 0..20 {
                assert!(scene.limit.charge("key", Cost::ONE).remaining <= CAPACITY);
                assert!(!scene.limit.peek("key", Cost::MAX).allowed);
                store.charge_all(&[scene.item("other", 2)], hold(id, NEVER)).expect("there is room");
                store.settle(id, &Settlement::Renew).expect("an answer");
                store.settle(id, &Settlement::Actual(9)).expect("an answer");
            }
            store.sweep();
        }
    }
}

#[test]
fn a_store_without_room_shares_or_denies() {
    let keys: Vec<String> = (0..20).map(|key| format!("key:{key}")).collect();
    for max_keys in [0, 1] {
        for when_full in [WhenFull::Deny, WhenFull::Share] {
            for scene in scenes(START, max_keys, when_full) {
                let what = format!("{} with room for {max_keys}, {when_full:?}", scene.name());
                let admitted: u64 = keys.iter().map(|key| scene.admitted(key)).sum();
                // The first key has the only room, and the others share; a log or a lease needs room for itself, too.
                let is_kept = is_kept_by_entry(&scene.stored.limit);
                let own = usize::from(max_keys == 1 && !is_kept);
                let shared = usize::from(when_full == WhenFull::Share && !is_kept);
                assert_eq!(admitted, CAPACITY * (own + shared) as u64, "{what}");
                assert_eq!((scene.store.keys(), scene.store.used()), (own, own), "{what}");
                let refused = scene.limit.charge("newcomer", Cost::ONE);
                assert!(!refused.allowed && refused.retry_after.is_some(), "{what}: {refused:?}");
                let held =
                    scene.store.charge_all(&[scene.item("newcomer", 1)], hold(ChargeId::random(), HOUR));
                assert!(held.map_or_else(|error| error.is_transient(), |charged| !charged.allowed), "{what}");
            }
        }
    }
}

/// Who finds no room makes some where there is any, without a thread that sweeps and without being asked to.
#[test]
fn newcomers_find_the_room_of_the_forgotten() {
    for when_full in [WhenFull::Deny, WhenFull::Share] {
        for scene in scenes(START, 100, when_full) {
            for round in 0..3 {
                let keys: Vec<String> = (0..40).map(|key| format!("{round}:{key}")).collect();
                let remaining = |key: &String| scene.limit.peek(key, Cost::MAX).remaining;
                // Each one tidies a little on its way, so it may take a few rounds until all have found room.
                for _ in 0..50 {
                    for key in keys.iter().filter(|key| remaining(key) == CAPACITY) {
                        scene.limit.charge(key, Cost::ONE);
                    }
                }
                assert!(keys.iter().all(|key| remaining(key) < CAPACITY), "{} {round}", scene.name());
                assert!(scene.store.used() <= 100);
                scene.clock.advance(Micros::new(3 * HOUR.get()));
            }
        }
    }
}

#[test]
fn many_items_in_one_charge_are_all_or_nothing() {
    let store = store(&ManualClock::at(START), 100_000, WhenFull::Share);
    let limits: Vec<MemoryLimit> = limits(1_000, HOUR).iter().map(|limit| store.open(limit)).collect();
    let keys: Vec<String> = (0..50).map(|key| format!("key:{key}")).collect();
    let items: Vec<MemoryCharge<'_>> =
        limits.iter().flat_map(|limit| keys.iter().flat_map(move |key| [item(limit, key, 1); 3])).collect();
    let charged = store.charge_all(&items, None).expect("no hold is asked for");
    assert!(charged.allowed && charged.outcomes.iter().all(|outcome| outcome.remaining == 997));
    let too_much: Vec<_> = items.iter().copied().chain([item(&limits[0], "key:0", 1_000)]).collect();
    assert!(!store.charge_all(&too_much, None).expect("no hold is asked for").allowed);
    for limit in &limits {
        keys.iter().for_each(|key| assert_eq!(limit.peek(key, Cost::MAX).remaining, 997));
    }
    let nothing = store.charge_all(&[], None).expect("no hold is asked for");
    assert!(nothing.allowed && nothing.outcomes.is_empty());
}
