//! How the states of a limit are written: its shape, the nodes that have room for it, and the table that is made over them.
//!
//! Which limits share their nodes is for `tables.rs`; how each state is words, for `cell.rs` and its neighbours.

use std::sync::Arc;

use tollgate_kernel::{Algorithm, Bucket, LeaseState, Limit, LogState, Micros};

use super::budget::Budget;
use super::cell::{InThreeWords, OneWord, PlainCell, ThreeWords};
use super::contention::Contention;
use super::kept::{Kept, KeptCell};
use super::kin::Kin;
use super::ledger::Ledger;
use super::mixed::MixedUnits;
use super::nodes::Nodes;
use super::table::Table;

/// What every table of a store is made with.
pub(super) struct Making {
    /// When the store was made: buckets count from here.
    pub(super) start: Micros,
    pub(super) budget: Arc<Budget>,
    pub(super) contention: Arc<Contention>,
}

/// Limits of the same shape write their states alike.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Bucket {
        units_per_us: u64,
    },
    /// Buckets of any units.
    Mixed,
    Window,
    Log,
    Counter,
    Leases,
}

#[derive(Clone)]
pub(super) enum AnyNodes {
    Narrow(Arc<Nodes<1, 5>>),
    Wide(Arc<Nodes<3, 3>>),
    Mixed(Arc<Nodes<3, 3>>),
    Logs(Arc<Nodes<1, 5>>, Arc<Kept<LogState>>),
    Leases(Arc<Nodes<1, 5>>, Arc<Kept<LeaseState>>),
}

impl Shape {
    pub(super) fn of(limit: &Limit) -> Shape {
        match limit {
            Limit::TokenBucket(bucket) => Shape::Bucket { units_per_us: bucket.units_per_us() },
            Limit::LeakyBucket(bucket) => Shape::Bucket { units_per_us: bucket.units_per_us() },
            Limit::FixedWindow(_) => Shape::Window,
            Limit::SlidingWindow(_) => Shape::Log,
            Limit::SlidingWindowCounter(_) => Shape::Counter,
            Limit::Concurrency(_) => Shape::Leases,
        }
    }

    /// Whether states of another shape may be written in this one.
    pub(super) fn is_mixed_of(self, other: Shape) -> bool {
        self == Shape::Mixed && other.is_bucket()
    }

    pub(super) fn is_bucket(self) -> bool {
        matches!(self, Shape::Bucket { .. } | Shape::Mixed)
    }
}

/// How far a limit looks back, where the state alone does not tell when it has run out.
pub(super) fn span(limit: &Limit) -> Micros {
    match limit {
        Limit::SlidingWindow(window) => window.window(),
        Limit::SlidingWindowCounter(window) => window.window(),
        Limit::TokenBucket(_) | Limit::LeakyBucket(_) | Limit::FixedWindow(_) | Limit::Concurrency(_) => {
            Micros::ZERO
        }
    }
}

impl AnyNodes {
    pub(super) fn set_span(&self, span: Micros) {
        match self {
            AnyNodes::Narrow(nodes) | AnyNodes::Logs(nodes, _) | AnyNodes::Leases(nodes, _) => {
                nodes.set_span(span);
            }
            AnyNodes::Wide(nodes) | AnyNodes::Mixed(nodes) => nodes.set_span(span),
        }
    }

    /// One more limit looks back so far.
    pub(super) fn raise_span(&self, span: Micros) {
        let before = match self {
            AnyNodes::Narrow(nodes) | AnyNodes::Logs(nodes, _) | AnyNodes::Leases(nodes, _) => nodes.span(),
            AnyNodes::Wide(nodes) | AnyNodes::Mixed(nodes) => nodes.span(),
        };
        self.set_span(before.max(span));
    }
}

impl Making {
    /// Nodes of the shape that a limit's strategy needs.
    pub(super) fn nodes(&self, shape: Shape, limit: &Limit) -> AnyNodes {
        match limit {
            _ if shape == Shape::Mixed => AnyNodes::Mixed(self.empty()),
            Limit::TokenBucket(bucket) => self.bucket_nodes(bucket),
            Limit::LeakyBucket(bucket) => self.bucket_nodes(bucket),
            Limit::FixedWindow(_) | Limit::SlidingWindowCounter(_) => AnyNodes::Wide(self.empty()),
            Limit::SlidingWindow(_) => AnyNodes::Logs(self.empty(), Arc::new(Kept::new())),
            Limit::Concurrency(_) => AnyNodes::Leases(self.empty(), Arc::new(Kept::new())),
        }
    }

    fn bucket_nodes(&self, bucket: &impl Bucket) -> AnyNodes {
        match OneWord::new(bucket, self.start) {
            Some(_) => AnyNodes::Narrow(self.empty()),
            None => AnyNodes::Wide(self.empty()),
        }
    }

    fn empty<const W: usize, const S: usize>(&self) -> Arc<Nodes<W, S>> {
        Arc::new(Nodes::new(self.contention.clone()))
    }

    /// A limit's table over its nodes.
    pub(super) fn table(&self, limit: Limit, nodes: &AnyNodes, kin: &Arc<Kin>) -> Arc<dyn Ledger> {
        let (budget, kin, span) = (self.budget.clone(), Some(kin.clone()), span(&limit));
        match (limit, nodes) {
            (Limit::TokenBucket(bucket), nodes) => self.bucket_table(bucket, nodes, kin),
            (Limit::LeakyBucket(bucket), nodes) => self.bucket_table(bucket, nodes, kin),
            (Limit::FixedWindow(window), AnyNodes::Wide(nodes)) => {
                self.wide_table(window, 0, span, nodes, None)
            }
            (Limit::SlidingWindowCounter(window), AnyNodes::Wide(nodes)) => {
                self.wide_table(window, 0, span, nodes, None)
            }
            (Limit::SlidingWindow(window), AnyNodes::Logs(nodes, kept)) => {
                let cell = KeptCell::new(window, span, budget.clone(), kept.clone());
                Arc::new(Table::new(cell, budget, nodes.clone(), None))
            }
            (Limit::Concurrency(leases), AnyNodes::Leases(nodes, kept)) => {
                let cell = KeptCell::new(leases, span, budget.clone(), kept.clone());
                Arc::new(Table::new(cell, budget, nodes.clone(), None))
            }
            (limit, _) => unreachable!("the nodes of another strategy were found for {limit}"),
        }
    }

    fn bucket_table<B>(&self, bucket: B, nodes: &AnyNodes, kin: Option<Arc<Kin>>) -> Arc<dyn Ledger>
    where
        B: Bucket + Send + Sync + 'static,
    {
        let units_per_us = bucket.units_per_us();
        match (OneWord::new(&bucket, self.start), nodes) {
            (_, AnyNodes::Mixed(nodes)) => {
                let cell =
                    PlainCell { algorithm: bucket, packing: MixedUnits { units_per_us }, span: Micros::ZERO };
                Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), kin))
            }
            (Some(packing), AnyNodes::Narrow(nodes)) => {
                let cell = PlainCell { algorithm: bucket, packing, span: Micros::ZERO };
                Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), kin))
            }
            (None, AnyNodes::Wide(nodes)) => self.wide_table(bucket, units_per_us, Micros::ZERO, nodes, kin),
            _ => unreachable!("the nodes of other units were found for a bucket of {units_per_us} a µs"),
        }
    }

    fn wide_table<A>(
        &self,
        algorithm: A,
        units_per_us: u64,
        span: Micros,
        nodes: &Arc<Nodes<3, 3>>,
        kin: Option<Arc<Kin>>,
    ) -> Arc<dyn Ledger>
    where
        A: Algorithm<State: InThreeWords> + Send + Sync + 'static,
    {
        let cell = PlainCell { algorithm, packing: ThreeWords { units_per_us }, span };
        Arc::new(Table::new(cell, self.budget.clone(), nodes.clone(), kin))
    }
}
