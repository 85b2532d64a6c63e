//! How the states of a limit are stored: its shape, the nodes with room for it, and the table over them.
//!
//! `tables.rs` decides which limits share their nodes; `cell.rs` and its neighbours convert states to words.

use std::sync::Arc;

use tollgate_kernel::{BucketNumbers, LeaseState, Limit, LogState, Micros, TokenBucket};

use super::budget::Budget;
use super::cell::{InWords, Numbered, OneWord, PlainCell, ThreeWords};
use super::contention::Contention;
use super::indirect::{IndirectCell, IndirectStates};
use super::limit_table::LimitTable;
use super::nodes::Nodes;
use super::sibling_tables::SiblingTables;
use super::table::Table;
use super::wall::{Wall, WallWindow};
use super::whole::{WholeNodes, WholeWords};
use crate::clock::Clock;

/// The table of a token bucket whose states are one word, as nearly all are.
pub(super) type TokenTable = Table<PlainCell<TokenBucket, OneWord>, 1, 6>;

/// What every table of a store is made with.
pub(super) struct Making {
    pub(super) clock: Clock,
    /// When the store was made: buckets count from here.
    pub(super) start: Micros,
    pub(super) budget: Arc<Budget>,
    pub(super) contention: Arc<Contention>,
    pub(super) wall: Arc<Wall>,
}

/// Limits of the same shape write their states alike.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// With these numbers, which the words do not contain.
    Bucket(BucketNumbers),
    /// With this window, which the words do not contain.
    Counter(Micros),
    /// With the numbers that they are written under.
    Whole(Family),
    Window,
    Log,
    Leases,
}

/// States of one family can be handed over from one table to another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Buckets,
    Counters,
}

impl Family {
    pub(super) const ALL: [Family; 2] = [Family::Buckets, Family::Counters];
}

#[derive(Clone)]
pub(super) enum AnyNodes {
    Narrow(Arc<Nodes<1, 6>>),
    Wide(Arc<Nodes<3, 3>>),
    Whole(Arc<WholeNodes>),
    Logs(Arc<Nodes<1, 6>>, Arc<IndirectStates<LogState>>),
    Leases(Arc<Nodes<1, 6>>, Arc<IndirectStates<LeaseState>>),
}

impl Shape {
    pub(super) fn of(limit: &Limit) -> Shape {
        match limit {
            Limit::TokenBucket(bucket) => Shape::Bucket(bucket.numbers()),
            Limit::LeakyBucket(bucket) => Shape::Bucket(bucket.room().numbers()),
            Limit::FixedWindow(_) => Shape::Window,
            Limit::SlidingWindow(_) => Shape::Log,
            Limit::SlidingWindowCounter(window) => Shape::Counter(window.window()),
            Limit::Concurrency(_) => Shape::Leases,
        }
    }

    /// The family of shapes whose states can be handed over to a table of this shape.
    pub(super) fn family(self) -> Option<Family> {
        match self {
            Shape::Bucket(_) => Some(Family::Buckets),
            Shape::Counter(_) => Some(Family::Counters),
            Shape::Whole(family) => Some(family),
            Shape::Window | Shape::Log | Shape::Leases => None,
        }
    }

    pub(super) fn is_whole(self) -> bool {
        matches!(self, Shape::Whole(_))
    }
}

impl Making {
    /// Nodes of the shape that a limit's strategy needs.
    pub(super) fn nodes(&self, limit: &Limit) -> AnyNodes {
        match limit {
            Limit::TokenBucket(bucket) => self.bucket_nodes(bucket),
            Limit::LeakyBucket(bucket) => self.bucket_nodes(bucket),
            Limit::FixedWindow(_) | Limit::SlidingWindowCounter(_) => AnyNodes::Wide(self.empty()),
            Limit::SlidingWindow(_) => AnyNodes::Logs(self.empty(), Arc::new(IndirectStates::new())),
            Limit::Concurrency(_) => AnyNodes::Leases(self.empty(), Arc::new(IndirectStates::new())),
        }
    }

    fn bucket_nodes(&self, bucket: &impl Numbered) -> AnyNodes {
        match OneWord::new(bucket, self.start) {
            Some(_) => AnyNodes::Narrow(self.empty()),
            None => AnyNodes::Wide(self.empty()),
        }
    }

    pub(super) fn empty<const W: usize, const S: usize>(&self) -> Arc<Nodes<W, S>> {
        Arc::new(Nodes::new(self.contention.clone()))
    }

    /// A limit's table over its nodes.
    pub(super) fn table(
        &self,
        limit: Limit,
        nodes: &AnyNodes,
        siblings: Option<Arc<SiblingTables>>,
    ) -> Arc<dyn LimitTable> {
        let budget = self.budget.clone();
        match (limit, nodes) {
            (Limit::TokenBucket(bucket), nodes) => self.bucket_table(bucket, nodes, siblings),
            (Limit::LeakyBucket(bucket), nodes) => self.bucket_table(bucket, nodes, siblings),
            (Limit::FixedWindow(window), AnyNodes::Wide(nodes)) => {
                self.wide_table(WallWindow::new(window, &self.wall), nodes, None)
            }
            (Limit::SlidingWindowCounter(window), AnyNodes::Wide(nodes)) => {
                self.wide_table(window, nodes, siblings)
            }
            (Limit::SlidingWindowCounter(window), AnyNodes::Whole(nodes)) => {
                self.whole_table(window, nodes, siblings)
            }
            (Limit::SlidingWindow(window), AnyNodes::Logs(nodes, list)) => {
                let cell = IndirectCell::new(window, budget.clone(), list.clone());
                Arc::new(Table::new(cell, budget, nodes.clone(), None))
            }
            (Limit::Concurrency(leases), AnyNodes::Leases(nodes, list)) => {
                let cell = IndirectCell::new(leases, budget.clone(), list.clone());
                Arc::new(Table::new(cell, budget, nodes.clone(), None))
            }
            (limit, _) => unreachable!("the nodes of another strategy were found for {limit}"),
        }
    }

    fn bucket_table<B: Numbered>(
        &self,
        bucket: B,
        nodes: &AnyNodes,
        siblings: Option<Arc<SiblingTables>>,
    ) -> Arc<dyn LimitTable> {
        match (OneWord::new(&bucket, self.start), nodes) {
            (_, AnyNodes::Whole(nodes)) => self.whole_table(bucket, nodes, siblings),
            (Some(packing), AnyNodes::Narrow(nodes)) => {
                let cell = PlainCell { algorithm: bucket, packing };
                Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), siblings))
            }
            (None, AnyNodes::Wide(nodes)) => self.wide_table(bucket, nodes, siblings),
            _ => unreachable!("the nodes of other numbers were found for a bucket"),
        }
    }

    fn wide_table<A: InWords>(
        &self,
        algorithm: A,
        nodes: &Arc<Nodes<3, 3>>,
        siblings: Option<Arc<SiblingTables>>,
    ) -> Arc<dyn LimitTable> {
        let cell = PlainCell { algorithm, packing: ThreeWords };
        Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), siblings))
    }

    fn whole_table<A: InWords>(
        &self,
        algorithm: A,
        nodes: &Arc<WholeNodes>,
        siblings: Option<Arc<SiblingTables>>,
    ) -> Arc<dyn LimitTable> {
        let cell = PlainCell { algorithm, packing: WholeWords };
        Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), siblings))
    }
}
