//! All limits of the store: from names and numbers to tables.
//!
//! Limits of one name with the same storage shape share one set of nodes, each with its own numbers: a limit that was changed,
//! and a key that gains or loses an override, keep what was consumed. Buckets with different numbers, and counters with different
//! windows, are siblings (sibling_tables.rs). A limit with another strategy starts empty. The remote stores behave in the same
//! way.
//!
//! An empty table without a holder is dropped when another is opened or the store is swept. Siblings without a holder are merged
//! when there are too many of them to search. If many are held, all further ones share one set of nodes (whole.rs). So a new key
//! searches few tables, however many limits of one name there are.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use tollgate_kernel::Limit;

use super::limit_table::LimitTable;
use super::shape::{AnyNodes, Family, Making, Shape};
use super::sibling_tables::{Moving, SiblingTables};
use super::whole::WholeNodes;
use crate::StoredLimit;

/// The most tables of a limit without a holder before they are merged.
const MOST_IDLE_SIBLINGS: usize = 8;

/// The most sets of numbers with their own table at once, of those with a holder.
const MOST_HELD_SIBLINGS: usize = 8;

/// The most limits that are cached for callers that name them with every charge.
const MOST_BY_CALL: usize = 64;

/// How the caller uses a limit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    /// It keeps the handle.
    ToHold,
    /// It names the limit again with every charge.
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
    /// The number of limits at which unused ones are removed next.
    tidy_at: usize,
}

/// The state that all tables of one family share.
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

    /// The number of keys of a limit in its table and in those of its siblings.
    pub(super) fn keys_of(&self, name: &str, limit_table: &dyn LimitTable) -> usize {
        let Some(named) = self.by_name.get(name) else { return limit_table.len() };
        let own = named.sets.iter().find(|set| set.any().address() == limit_table.address());
        match own.and_then(|own| own.shape.family()) {
            Some(family) => named.tables_of(family).map(|table| table.len()).sum(),
            None => limit_table.len(),
        }
    }

    /// Removes limits without a holder, and empty tables.
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

    /// Adds a limit with new numbers.
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
        // Checking all of them at every addition would take longer and longer.
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

    /// The storage shape of a new limit.
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

    /// Updates the tables of a family.
    fn announce(&self, family: Family, moving: &mut Moving<'_>) {
        let tables: Vec<Weak<dyn LimitTable>> = self.tables_of(family).map(Arc::downgrade).collect();
        let whole = self.family_tables(family).whole.as_ref().map(|whole| whole.nodes.clone());
        moving.set(tables, whole);
    }

    /// Registers a new table with its siblings. Its new keys start from their shared state. Siblings without a holder are merged
    /// if there are too many: all but the one with the most keys, so that a caller that invents numbers moves few keys.
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

    /// No key of a family may start meanwhile: a table is registered by one of its limits, and between the removal of that limit
    /// and the registration of another it would seem to be gone.
    fn tidy(&mut self) {
        self.sets.retain_mut(|set| set.shape.family().is_some() || set.is_in_use());
        for family in Family::ALL {
            let siblings = self.family_tables(family).siblings.clone();
            let mut moving = siblings.moving();
            let before = self.limits();
            self.sets.retain_mut(|set| set.shape.family() != Some(family) || set.is_in_use());
            let mut is_changed = self.limits() != before;
            // A single table needs no table of whole states.
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

    /// Whether a limit over these nodes has a holder.
    fn is_held(&self) -> bool {
        self.limits.values().any(Opening::is_held)
    }

    /// Removes limits without a holder, and returns whether the rest is in use.
    fn is_in_use(&mut self) -> bool {
        self.tidy();
        self.is_held() || self.limits.values().any(|opening| opening.by_call) || self.any().len() > 0
    }

    /// Removes limits without a holder, except for the last.
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
mod tests;
