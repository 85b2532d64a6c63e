//! Which limits there are: from names and numbers to tables.
//!
//! Limits of one name whose states are written alike are one set of nodes, each with its own numbers over it: a limit that was
//! changed, and a key that gains or loses an override, find what was consumed. Buckets of different numbers, and counters of
//! different windows, are siblings (kin.rs), and a limit of another strategy begins afresh. So it is with the stores elsewhere, too.
//!
//! What nobody holds a limit of any more, and is empty, is dropped when another is opened or the store is swept; siblings that
//! nobody charges any more are merged when there are too many of them to ask, and where many are held, all further ones share one
//! set of nodes (whole.rs). So whoever is new asks few, however many limits of one name there are.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use tollgate_kernel::Limit;

use super::limit_table::LimitTable;
use super::shape::{AnyNodes, Family, Making, Shape};
use super::sibling_tables::{Moving, SiblingTables};
use super::whole::WholeNodes;
use crate::StoredLimit;

/// How many tables of a limit that nobody holds are asked before they are merged.
const MOST_IDLE_SIBLINGS: usize = 8;

/// How many sets of numbers have a table of their own at once, of those that somebody holds.
const MOST_HELD_SIBLINGS: usize = 8;

/// How many limits are kept ready for callers who name them with every charge.
const MOST_BY_CALL: usize = 64;

/// Who asks for a limit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    /// One who holds it from now on.
    ToHold,
    /// One who names it again with every charge.
    ByCall,
}

#[derive(Default)]
pub(super) struct Tables {
    by_name: HashMap<String, Named>,
    /// With how many names the empty ones are looked for next.
    tidy_at: usize,
}

/// All tables of one name.
#[derive(Default)]
struct Named {
    sets: Vec<NodeSet>,
    buckets: FamilyTables,
    counters: FamilyTables,
    /// With how many limits those are looked for next that nobody holds.
    tidy_at: usize,
}

/// What the tables of one family have in common.
#[derive(Default)]
struct FamilyTables {
    siblings: Arc<SiblingTables>,
    whole: Option<WholeStates>,
}

/// The states of a family that are written whole.
struct WholeStates {
    nodes: Arc<WholeNodes>,
    /// A table over them, by the numbers of any limit.
    limit_table: Arc<dyn LimitTable>,
}

/// One set of nodes, and the limits over it. There is always at least one.
struct NodeSet {
    shape: Shape,
    nodes: AnyNodes,
    limits: HashMap<Limit, Opening>,
}

struct Opening {
    limit_table: Arc<dyn LimitTable>,
    by_call: bool,
}

impl Tables {
    /// The table of a limit.
    pub(super) fn open(
        &mut self,
        stored: &StoredLimit,
        opened: Opened,
        making: &Making,
    ) -> Arc<dyn LimitTable> {
        let by_call = opened == Opened::ByCall;
        if let Some(known) = self.by_name.get_mut(&stored.name).and_then(|named| named.known(&stored.limit)) {
            known.by_call |= by_call;
            return known.limit_table.clone();
        }
        if self.by_name.len() >= self.tidy_at {
            self.tidy();
            self.tidy_at = 64.max(2 * self.by_name.len());
        }
        let named = self.by_name.entry(stored.name.clone()).or_default();
        named.add(stored.limit, by_call, making)
    }

    /// One limit of every set of nodes.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<dyn LimitTable>> {
        self.by_name.values().flat_map(Named::all)
    }

    /// How many keys a limit has in its table and in those of its siblings.
    pub(super) fn keys_of(&self, name: &str, limit_table: &dyn LimitTable) -> usize {
        let Some(named) = self.by_name.get(name) else { return limit_table.len() };
        let own = named.sets.iter().find(|set| set.any().address() == limit_table.address());
        match own.and_then(|own| own.shape.family()) {
            Some(family) => named.tables_of(family).map(|table| table.len()).sum(),
            None => limit_table.len(),
        }
    }

    /// Lets go of limits that nobody holds, and of what is empty besides.
    pub(super) fn tidy(&mut self) {
        self.by_name.retain(|_, named| {
            named.tidy();
            !named.sets.is_empty()
        });
    }
}

impl Named {
    fn family_tables(&self, family: Family) -> &FamilyTables {
        match family {
            Family::Buckets => &self.buckets,
            Family::Counters => &self.counters,
        }
    }

    fn family_tables_mut(&mut self, family: Family) -> &mut FamilyTables {
        match family {
            Family::Buckets => &mut self.buckets,
            Family::Counters => &mut self.counters,
        }
    }

    /// One limit of every set of nodes.
    fn all(&self) -> impl Iterator<Item = &Arc<dyn LimitTable>> {
        let whole = [&self.buckets, &self.counters]
            .into_iter()
            .filter_map(|family_tables| family_tables.whole.as_ref());
        let others = self.sets.iter().filter(|set| !set.shape.is_whole()).map(NodeSet::any);
        others.chain(whole.map(|whole| &whole.limit_table))
    }

    /// One limit of every set of nodes of a family.
    fn tables_of(&self, family: Family) -> impl Iterator<Item = &Arc<dyn LimitTable>> {
        let whole = self.family_tables(family).whole.as_ref().map(|whole| &whole.limit_table);
        let is_plain = move |set: &&NodeSet| set.shape.family() == Some(family) && !set.shape.is_whole();
        self.sets.iter().filter(is_plain).map(NodeSet::any).chain(whole)
    }

    fn known(&mut self, limit: &Limit) -> Option<&mut Opening> {
        let shape = Shape::of(limit);
        let whole = shape.family().map(Shape::Whole);
        let may_know = |set: &&mut NodeSet| set.shape == shape || Some(set.shape) == whole;
        self.sets.iter_mut().filter(may_know).find_map(|set| set.limits.get_mut(limit))
    }

    /// A limit with numbers that are not known here yet.
    fn add(&mut self, limit: Limit, by_call: bool, making: &Making) -> Arc<dyn LimitTable> {
        let shape = self.shape_for(&limit);
        let family = shape.family();
        if let Some(family) = family.filter(|family| shape.is_whole() || self.has_other(*family, shape)) {
            self.ensure_whole(family, limit, making);
        }
        let known = self.sets.iter().find(|set| set.shape == shape).map(|set| set.nodes.clone());
        let is_new = known.is_none();
        let whole =
            family.filter(|_| shape.is_whole()).and_then(|family| self.family_tables(family).whole.as_ref());
        let nodes = match (known, whole) {
            (Some(nodes), _) => nodes,
            (None, Some(whole)) => AnyNodes::Whole(whole.nodes.clone()),
            (None, None) => making.nodes(&limit),
        };
        let siblings = family.map(|family| self.family_tables(family).siblings.clone());
        let limit_table = making.table(limit, &nodes, siblings);
        let opening = Opening { limit_table: limit_table.clone(), by_call };
        match self.sets.iter_mut().find(|set| set.shape == shape) {
            Some(set) => drop(set.limits.insert(limit, opening)),
            None => self.sets.push(NodeSet { shape, nodes, limits: HashMap::from([(limit, opening)]) }),
        }
        if let Some(family) = family.filter(|_| is_new) {
            self.welcome(family, &*limit_table, making);
        }
        // Looking through all of them whenever one is added would take the longer the more there are.
        if self.limits() >= self.tidy_at {
            self.tidy();
            let left = self.limits();
            self.tidy_at = left + left / 64 + 1;
        }
        limit_table
    }

    /// Whether a family has a table of another shape.
    fn has_other(&self, family: Family, shape: Shape) -> bool {
        self.sets.iter().any(|set| set.shape.family() == Some(family) && set.shape != shape)
    }

    fn ensure_whole(&mut self, family: Family, limit: Limit, making: &Making) {
        let family_tables = self.family_tables_mut(family);
        if family_tables.whole.is_none() {
            let nodes: Arc<WholeNodes> = making.empty();
            let limit_table = making.table(limit, &AnyNodes::Whole(nodes.clone()), None);
            family_tables.whole = Some(WholeStates { nodes, limit_table });
        }
    }

    /// How the states of a limit will be written that is not known here yet.
    fn shape_for(&self, limit: &Limit) -> Shape {
        let own = Shape::of(limit);
        let Some(family) = own.family() else { return own };
        let of_family = |set: &&NodeSet| set.shape.family() == Some(family) && !set.shape.is_whole();
        let has_own = self.sets.iter().any(|set| set.shape == own);
        let held = self.sets.iter().filter(of_family).filter(|set| set.is_held()).count();
        if !has_own && held >= MOST_HELD_SIBLINGS { Shape::Whole(family) } else { own }
    }

    fn limits(&self) -> usize {
        self.sets.iter().map(|set| set.limits.len()).sum()
    }

    /// Says to a family which tables it has.
    fn announce(&self, family: Family, moving: &mut Moving<'_>) {
        let tables: Vec<Weak<dyn LimitTable>> = self.tables_of(family).map(Arc::downgrade).collect();
        let whole = self.family_tables(family).whole.as_ref().map(|whole| whole.nodes.clone());
        moving.set(tables, whole);
    }

    /// Makes a new table known to its siblings. Its newcomers start from what theirs share, and siblings that nobody holds are merged if they
    /// have become too many: all but the one that has most keys, so that few are moved by whoever makes numbers up.
    fn welcome(&mut self, family: Family, limit_table: &dyn LimitTable, making: &Making) {
        let now = making.clock.now();
        let siblings = self.family_tables(family).siblings.clone();
        let mut moving = siblings.moving();
        for table in self.tables_of(family).filter(|table| table.address() != limit_table.address()) {
            moving.share(&**table, limit_table, now);
        }
        self.announce(family, &mut moving);
        let is_idle = |set: &&NodeSet| {
            let is_plain = set.shape.family() == Some(family) && !set.shape.is_whole();
            is_plain && set.any().address() != limit_table.address() && !set.is_held()
        };
        let idle: Vec<Arc<dyn LimitTable>> =
            self.sets.iter().filter(is_idle).map(|set| set.any().clone()).collect();
        let whole = self.family_tables(family).whole.as_ref().map(|whole| whole.limit_table.clone());
        if idle.len() > MOST_IDLE_SIBLINGS
            && let (Some(largest), Some(whole)) = (idle.iter().max_by_key(|table| table.len()), whole)
        {
            self.sets.retain(|set| {
                let address = set.any().address();
                let goes =
                    address != largest.address() && idle.iter().any(|table| table.address() == address);
                if goes {
                    moving.merge(&**set.any(), &*whole, now);
                }
                !goes
            });
            self.announce(family, &mut moving);
        }
    }

    /// Nobody may begin a key of a family meanwhile: a table is known to its siblings by one of its limits, and while that is gone and no
    /// other named, it would look as if the table were.
    fn tidy(&mut self) {
        self.sets.retain_mut(|set| set.shape.family().is_some() || set.is_kept());
        for family in Family::ALL {
            let siblings = self.family_tables(family).siblings.clone();
            let mut moving = siblings.moving();
            let before = self.limits();
            self.sets.retain_mut(|set| set.shape.family() != Some(family) || set.is_kept());
            let mut is_changed = self.limits() != before;
            // One table whose keys are all its own needs no other.
            let of_family = |set: &&NodeSet| set.shape.family() == Some(family);
            let is_alone = self.sets.iter().filter(of_family).count() <= 1
                && !self.sets.iter().any(|set| set.shape == Shape::Whole(family));
            if is_alone
                && self.family_tables(family).whole.as_ref().is_some_and(|whole| whole.limit_table.len() == 0)
            {
                self.family_tables_mut(family).whole = None;
                let openings = self.sets.iter().filter(of_family).flat_map(|set| set.limits.values());
                openings.for_each(|opening| opening.limit_table.let_go_of_whole());
                is_changed = true;
            }
            if is_changed {
                self.announce(family, &mut moving);
            }
        }
    }
}

impl NodeSet {
    /// Any limit over these nodes.
    fn any(&self) -> &Arc<dyn LimitTable> {
        &self.limits.values().next().expect("the last limit stays").limit_table
    }

    /// Whether somebody holds a limit over these nodes.
    fn is_held(&self) -> bool {
        self.limits.values().any(Opening::is_held)
    }

    /// Lets go of limits that nobody holds, and says whether the rest is of use.
    fn is_kept(&mut self) -> bool {
        self.tidy();
        self.is_held() || self.limits.values().any(|opening| opening.by_call) || self.any().len() > 0
    }

    /// Lets go of limits that nobody holds, but for the last.
    fn tidy(&mut self) {
        let mut by_call = self.limits.values().filter(|opening| opening.by_call).count();
        let mut left = self.limits.len();
        self.limits.retain(|_, opening| {
            let goes = !opening.is_held() && (!opening.by_call || by_call > MOST_BY_CALL) && left > 1;
            by_call -= usize::from(goes && opening.by_call);
            left -= usize::from(goes);
            !goes
        });
        // Any of them is looked for from the first place on.
        if self.limits.capacity() > 4 * self.limits.len() + 64 {
            self.limits.shrink_to_fit();
        }
    }
}

impl Opening {
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.limit_table) > 1
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Cost, Micros, Rate};

    use super::*;
    use crate::{ManualClock, MemoryOptions, MemoryStore, Store, StoredCharge};

    fn store(max_keys: usize) -> (MemoryStore, ManualClock) {
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let options =
            MemoryOptions { clock: hands.clock(), max_keys, sweep_every: None, ..Default::default() };
        (MemoryStore::new(options), hands)
    }

    /// A bucket that takes ten hours to fill, at so many an hour. Most of these have units of their own, and all keep the instant at
    /// which they are full.
    fn hourly(count: u64) -> StoredLimit {
        let tokens = tokens(count);
        StoredLimit { limit: tokens.limit.keeping_instant(), ..tokens }
    }

    /// The same where what is missing stays missing.
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

    /// The same where all of them are held, as limits are whose numbers come with calls: each had a table, and whoever was new was
    /// looked for in all of them, one by one and under one lock.
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
    fn a_table_is_found_by_its_kin_though_the_limit_that_it_was_known_by_goes() {
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

    /// The same while limits go: a sweep that let go of the one that a table was known by, and then said by which it is known now, let
    /// keys of that table be begun anew in between.
    #[test]
    fn a_table_is_found_by_its_kin_while_limits_go() {
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

    /// Whoever makes numbers up, and lets them go, moves few keys: a table with many is not emptied into a new one again and again.
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
            let item = StoredCharge { limit: &limit, key: "a", cost, shadow: false };
            assert_eq!(Store::charge(&store, &[item], None).await.unwrap().allowed, count == 1, "{count}");
            assert!(sets(&store) <= MOST_IDLE_SIBLINGS + 2, "{} tables", sets(&store));
            let windows =
                StoredLimit::new("log", Limit::sliding_window(1, Micros::from_secs(count)).unwrap());
            let item = StoredCharge { limit: &windows, cost: Cost::ONE, ..item };
            assert_eq!(Store::charge(&store, &[item], None).await.unwrap().allowed, count == 1);
        }
        let tables = store.inner.tables.lock();
        let limits = tables.by_name["log"].sets.iter().map(|set| set.limits.len()).sum::<usize>();
        assert!(limits <= MOST_BY_CALL + 1, "{limits} limits");
    }

    /// A limit that looks back for a minute shares its nodes with one that looks back for a second.
    #[test]
    fn what_one_limit_has_done_with_is_kept_for_another() {
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

    /// Newcomers who share a state for lack of room go on from it when the units change.
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
        let item = |limit| MemoryCharge { limit, key: "a", cost: Cost::new(3).unwrap(), shadow: false };
        let charged = store.charge_all(&[item(&one), item(&seven)], None).unwrap();
        assert!(charged.allowed && charged.outcomes.iter().all(|outcome| outcome.remaining == 4));
        assert_eq!((store.keys(), store.used()), (1, 1));
        assert_eq!(seven.peek("a", Cost::MAX).remaining, 64);
    }

    /// Keys that go to and fro between units while they are charged, settled and looked at are never begun twice: all that was
    /// admitted comes to one bucket.
    #[test]
    fn keys_that_move_under_load_are_counted_once() {
        // Between tables of their own, between one of their own and that of all others, and within that one.
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
            let item = MemoryCharge { limit: &limits[which], key, cost: Cost::ONE, shadow: false };
            let allowed = match by_all {
                true => store.charge_all(&[item], None).unwrap().allowed,
                false => limits[which].charge(key, Cost::ONE).allowed,
            };
            admitted[which].fetch_add(u64::from(allowed), Ordering::Relaxed);
            allowed
        };
        let hold = |which: usize, (key, _): &(String, [AtomicU64; 3])| {
            let id = ChargeId::random();
            let item = MemoryCharge { limit: &limits[which], key, cost: Cost::ONE, shadow: false };
            store.charge_all(&[item], Some(Hold { id, ttl: Micros::from_secs(60) })).unwrap();
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
}
