//! Which limits there are: from names and numbers to tables.
//!
//! Limits of one name whose states are written alike are one set of nodes, each with its own numbers over it: a limit that was
//! changed, and a key that gains or loses an override, find what was consumed. Buckets of different units are kin (kin.rs),
//! and a limit of another strategy begins afresh. So it is with the stores elsewhere, too.
//!
//! What nobody holds a limit of any more, and is empty, is dropped when another is opened or the store is swept; kin that
//! nobody charges any more are merged when there are too many of them to ask.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate_kernel::{Algorithm, Bucket, LeaseState, Limit, LogState, Micros};

use super::budget::Budget;
use super::cell::{InThreeWords, Kept, KeptCell, OneWord, PlainCell, ThreeWords};
use super::contention::Contention;
use super::kin::Kin;
use super::ledger::Ledger;
use super::nodes::Nodes;
use super::table::Table;
use crate::StoredLimit;

/// How many tables of a limit that nobody holds are asked before they are merged.
const MOST_IDLE_KIN: usize = 8;

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

/// What every table of a store is made with.
pub(super) struct Making {
    /// When the store was made: buckets count from here.
    pub(super) start: Micros,
    pub(super) budget: Arc<Budget>,
    pub(super) contention: Arc<Contention>,
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
    stocks: Vec<Stock>,
    kin: Arc<Kin>,
}

/// One set of nodes, and the limits over it. There is always at least one.
struct Stock {
    shape: Shape,
    nodes: AnyNodes,
    limits: Vec<Opening>,
}

struct Opening {
    limit: Limit,
    ledger: Arc<dyn Ledger>,
    by_call: bool,
}

/// Limits of the same shape write their states alike.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Bucket { units_per_us: u64 },
    Window,
    Log,
    Counter,
    Leases,
}

#[derive(Clone)]
enum AnyNodes {
    Narrow(Arc<Nodes<1, 5>>),
    Wide(Arc<Nodes<3, 3>>),
    Logs(Arc<Nodes<1, 5>>, Arc<Kept<LogState>>),
    Leases(Arc<Nodes<1, 5>>, Arc<Kept<LeaseState>>),
}

impl Shape {
    fn of(limit: &Limit) -> Shape {
        match limit {
            Limit::TokenBucket(bucket) => Shape::Bucket { units_per_us: bucket.units_per_us() },
            Limit::LeakyBucket(bucket) => Shape::Bucket { units_per_us: bucket.units_per_us() },
            Limit::FixedWindow(_) => Shape::Window,
            Limit::SlidingWindow(_) => Shape::Log,
            Limit::SlidingWindowCounter(_) => Shape::Counter,
            Limit::Concurrency(_) => Shape::Leases,
        }
    }

    fn is_bucket(self) -> bool {
        matches!(self, Shape::Bucket { .. })
    }
}

/// How far a limit looks back, where the state alone does not tell when it has run out.
fn span(limit: &Limit) -> Micros {
    match limit {
        Limit::SlidingWindow(window) => window.window(),
        Limit::SlidingWindowCounter(window) => window.window(),
        Limit::TokenBucket(_) | Limit::LeakyBucket(_) | Limit::FixedWindow(_) | Limit::Concurrency(_) => {
            Micros::ZERO
        }
    }
}

impl Tables {
    /// The table of a limit.
    pub(super) fn open(&mut self, stored: &StoredLimit, opened: Opened, making: &Making) -> Arc<dyn Ledger> {
        let by_call = opened == Opened::ByCall;
        if let Some(known) = self.by_name.get_mut(&stored.name).and_then(|named| named.known(&stored.limit)) {
            known.by_call |= by_call;
            return known.ledger.clone();
        }
        if self.by_name.len() >= self.tidy_at {
            self.tidy();
            self.tidy_at = 64.max(2 * self.by_name.len());
        }
        let named = self.by_name.entry(stored.name.clone()).or_default();
        named.add(stored.limit, by_call, making)
    }

    /// One limit of every set of nodes.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<dyn Ledger>> {
        self.by_name.values().flat_map(|named| &named.stocks).map(Stock::any)
    }

    /// Lets go of limits that nobody holds, and of what is empty besides.
    pub(super) fn tidy(&mut self) {
        self.by_name.retain(|_, named| {
            named.tidy();
            !named.stocks.is_empty()
        });
    }
}

impl Named {
    fn known(&mut self, limit: &Limit) -> Option<&mut Opening> {
        let shape = Shape::of(limit);
        let stock = self.stocks.iter_mut().find(|stock| stock.shape == shape)?;
        stock.limits.iter_mut().find(|opening| opening.limit == *limit)
    }

    /// A limit with numbers that are not known here yet.
    fn add(&mut self, limit: Limit, by_call: bool, making: &Making) -> Arc<dyn Ledger> {
        let shape = Shape::of(&limit);
        let known = self.stocks.iter().find(|stock| stock.shape == shape).map(|stock| stock.nodes.clone());
        let is_new = known.is_none();
        let nodes = known.unwrap_or_else(|| making.nodes(&limit));
        let ledger = making.table(limit, &nodes, &self.kin);
        let opening = Opening { limit, ledger: ledger.clone(), by_call };
        match self.stocks.iter_mut().find(|stock| stock.shape == shape) {
            Some(stock) => stock.limits.push(opening),
            None => self.stocks.push(Stock { shape, nodes, limits: vec![opening] }),
        }
        if is_new && shape.is_bucket() {
            self.welcome(&*ledger);
        }
        self.tidy();
        ledger
    }

    /// Makes a new table known to its kin. Its newcomers start from what theirs share, and kin that nobody holds are merged into
    /// it if they have become too many.
    fn welcome(&mut self, ledger: &dyn Ledger) {
        let is_other = |stock: &&Stock| stock.shape.is_bucket() && stock.any().address() != ledger.address();
        let mut moving = self.kin.moving();
        for stock in self.stocks.iter().filter(is_other) {
            moving.share(&**stock.any(), ledger);
        }
        moving.set(buckets(&self.stocks));
        let idle: Vec<usize> = self
            .stocks
            .iter()
            .filter(is_other)
            .filter(|stock| !stock.is_held())
            .map(|stock| stock.any().address())
            .collect();
        if idle.len() > MOST_IDLE_KIN {
            self.stocks.retain(|stock| {
                let is_idle = idle.contains(&stock.any().address());
                if is_idle {
                    moving.merge(&**stock.any(), ledger);
                }
                !is_idle
            });
            moving.set(buckets(&self.stocks));
        }
    }

    fn tidy(&mut self) {
        let before = self.stocks.len();
        self.stocks.retain_mut(|stock| {
            stock.tidy();
            stock.is_held() || stock.limits.iter().any(|opening| opening.by_call) || stock.any().len() > 0
        });
        if self.stocks.len() != before {
            self.kin.moving().set(buckets(&self.stocks));
        }
    }
}

fn buckets(stocks: &[Stock]) -> Vec<std::sync::Weak<dyn Ledger>> {
    let of_buckets = stocks.iter().filter(|stock| stock.shape.is_bucket());
    of_buckets.map(|stock| Arc::downgrade(stock.any())).collect()
}

impl Stock {
    /// Any limit over these nodes.
    fn any(&self) -> &Arc<dyn Ledger> {
        &self.limits[0].ledger
    }

    /// Whether somebody holds a limit over these nodes.
    fn is_held(&self) -> bool {
        self.limits.iter().any(Opening::is_held)
    }

    /// Lets go of limits that nobody holds, but for the last.
    fn tidy(&mut self) {
        let mut by_call = self.limits.iter().filter(|opening| opening.by_call).count();
        let mut left = self.limits.len();
        self.limits.retain(|opening| {
            let goes = !opening.is_held() && (!opening.by_call || by_call > MOST_BY_CALL) && left > 1;
            by_call -= usize::from(goes && opening.by_call);
            left -= usize::from(goes);
            !goes
        });
        let longest = self.limits.iter().map(|opening| span(&opening.limit)).max();
        self.nodes.set_span(longest.unwrap_or_default());
    }
}

impl Opening {
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.ledger) > 1
    }
}

impl AnyNodes {
    fn set_span(&self, span: Micros) {
        match self {
            AnyNodes::Narrow(nodes) | AnyNodes::Logs(nodes, _) | AnyNodes::Leases(nodes, _) => {
                nodes.set_span(span);
            }
            AnyNodes::Wide(nodes) => nodes.set_span(span),
        }
    }
}

impl Making {
    /// Nodes of the shape that a limit's strategy needs.
    fn nodes(&self, limit: &Limit) -> AnyNodes {
        match limit {
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
    fn table(&self, limit: Limit, nodes: &AnyNodes, kin: &Arc<Kin>) -> Arc<dyn Ledger> {
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
