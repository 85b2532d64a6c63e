//! Random lives of a key: a limit, and what is asked of it when.
//!
//! Arrivals are drawn as what makes them interesting (a Poisson gap, the same instant, a microsecond around an edge, a clock
//! stepping back) and only then turned into times and costs under the limit that was drawn, so that a life shrinks to few
//! calls, small costs and short gaps. A life prints as a table of the `*.cases` format, without the answers.

use std::fmt;
use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use tollgate_kernel::{
    Align, Cost, Limit, MAX_COUNT, MAX_FILL, MAX_PRODUCT, MAX_RATE_NUMERATOR, MAX_SPAN, Micros, Rate,
};

/// What to draw limits of: the strategies, with the two alignments of a fixed window apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    TokenBucket,
    LeakyBucket,
    FirstWindow,
    ClockWindow,
    SlidingWindow,
    SlidingWindowCounter,
    Concurrency,
}

pub(crate) const KINDS: [Kind; 7] = [
    Kind::TokenBucket,
    Kind::LeakyBucket,
    Kind::FirstWindow,
    Kind::ClockWindow,
    Kind::SlidingWindow,
    Kind::SlidingWindowCounter,
    Kind::Concurrency,
];

impl Kind {
    pub(crate) fn is_bucket(self) -> bool {
        matches!(self, Kind::TokenBucket | Kind::LeakyBucket)
    }

    /// Buckets and leases leave it to the store that time does not go back; every other state knows a time that it counts as.
    fn leaves_time_to_the_store(self) -> bool {
        self.is_bucket() || self == Kind::Concurrency
    }

    /// Up to `capacity`, renewed every `span` (in a bucket: `count` every `span`), or what comes closest within the bounds.
    /// A bucket fills within `longest_fill`.
    fn limit(self, capacity: u64, count: u64, span: u64, longest_fill: u64) -> Limit {
        let most = capacity.min(MAX_PRODUCT / span).min(longest_fill / span).max(1);
        let is_long = self.is_bucket() && u128::from(capacity) * u128::from(span) > u128::from(longest_fill);
        let tries = [(if is_long { most } else { capacity }, count), (most, count), (most, 1)];
        tries
            .into_iter()
            .find_map(|(capacity, count)| self.accepted(capacity, count, Micros::new(span)))
            .unwrap()
    }

    fn accepted(self, capacity: u64, count: u64, span: Micros) -> Option<Limit> {
        let rate = Rate::new(count, span).ok()?;
        match self {
            Kind::TokenBucket => Limit::token_bucket(rate, capacity),
            Kind::LeakyBucket => Limit::leaky_bucket(rate, capacity),
            Kind::FirstWindow => Limit::fixed_window(capacity, span),
            Kind::ClockWindow => Limit::clock_window(capacity, span),
            Kind::SlidingWindow => Limit::sliding_window(capacity, span),
            Kind::SlidingWindowCounter => Limit::sliding_window_counter(capacity, span),
            Kind::Concurrency => Limit::concurrency(capacity, span),
        }
        .ok()
    }
}

/// One key's life.
#[derive(Clone)]
pub(crate) struct Life {
    pub(crate) limit: Limit,
    pub(crate) calls: Vec<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) at: Micros,
    pub(crate) ask: Ask,
}

impl Call {
    /// Which reservation this settles, and at what cost.
    pub(crate) fn settles(&self) -> Option<(usize, u64)> {
        match self.ask {
            Ask::Settle { id, actual } => Some((id, actual)),
            _ => None,
        }
    }
}

/// What is asked. A reservation or a lease is known by a small number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ask {
    Take(Cost),
    Peek(Cost),
    Reserve { id: usize, cost: Cost },
    Settle { id: usize, actual: u64 },
    Hold { id: u128, cost: Cost },
    Release { id: u128 },
    Renew { id: u128 },
}

/// Charges and peeks under a clock that may step back, except for buckets and leases.
pub(crate) fn charges_whatever_the_clock(kind: Kind) -> BoxedStrategy<Life> {
    lives(everyday(kind), Just(!kind.leaves_time_to_the_store()), arrivals(0..6))
}

/// Charges, peeks, and reservations that are settled for less, as much or more; time never goes back.
pub(crate) fn settlements(kind: Kind) -> BoxedStrategy<Life> {
    lives(everyday(kind), Just(false), arrivals(0..16))
}

/// Leases taken, released, renewed and run out.
pub(crate) fn leases() -> BoxedStrategy<Life> {
    lives(everyday(Kind::Concurrency), Just(false), arrivals(16..24))
}

/// Limits at their bounds, any cost and any time up to 2^52, back and forth.
pub(crate) fn extremes(kind: Kind) -> BoxedStrategy<Life> {
    lives(bounds(kind), any::<bool>(), vec((extreme_drawn(), 0..16u8), 1..16).boxed())
}

/// One a call, evenly spaced: up to 150 polls, from eight a unit to one every other window.
pub(crate) fn polls(kind: Kind) -> BoxedStrategy<Life> {
    let every = prop_oneof![(1..=8u64, Just(true)), (1..=8u64, Just(false))];
    (everyday(kind), start(), every, any::<u16>(), 1..150u64)
        .prop_map(|(limit, start, (part, of_unit), jitter, polls)| {
            let length = if of_unit { unit(&limit) } else { 2 * limit.window_us().get().min(LONGEST_GAP) };
            let every = (length / part + u64::from(jitter) * length / (8 * 65_536)).max(1);
            let call = |poll| Call { at: Micros::new(start + poll * every), ask: Ask::Take(Cost::ONE) };
            Life { limit, calls: (0..polls).map(call).collect() }
        })
        .boxed()
}

/// A bucket that fills within this cannot be so deep in debt that the debt is cut: what the model says is then what it is.
const FAR_FROM_DEBTS_END: u64 = MAX_SPAN.get() / 8;

/// Limits as people write them, and small ones whose edges are hit often.
fn everyday(kind: Kind) -> BoxedStrategy<Limit> {
    let capacity =
        prop_oneof![6 => 1..=12u64, 1 => 1..=1_000u64, 1 => Just(1_000_000u64), 1 => Just(10_000_000u64)];
    let count =
        prop_oneof![6 => 1..=12u64, 1 => 1..=1_000u64, 1 => Just(1_000_000u64), 1 => Just(10_000_000u64)];
    let span = prop_oneof![
        2 => 1..=20u64,
        2 => 1..=10_000u64,
        2 => 1..=10_000_000u64,
        1 => Just(1_000_000u64),
        1 => Just(60_000_000u64),
        1 => Just(86_400_000_000u64),
        1 => Just(604_800_000_000u64),
    ];
    (capacity, count, span)
        .prop_map(move |(capacity, count, span)| kind.limit(capacity, count, span, FAR_FROM_DEBTS_END))
        .prop_map(move |limit| match kind.is_bucket() {
            true => limit.with_max_debt(MAX_SPAN).unwrap(),
            false => limit,
        })
        .boxed()
}

/// Limits at, or a random way below, the bounds of what is accepted.
fn bounds(kind: Kind) -> BoxedStrategy<Limit> {
    let count = prop_oneof![
        Just(1u64),
        Just(MAX_RATE_NUMERATOR),
        Just(MAX_RATE_NUMERATOR - 5),
        1..=MAX_RATE_NUMERATOR,
        Just(MAX_COUNT)
    ];
    let span = prop_oneof![Just(1u64), Just(MAX_SPAN.get()), Just(MAX_SPAN.get() - 1), 1..=MAX_SPAN.get()];
    let capacity = prop_oneof![Just(1u64), Just(MAX_COUNT), 1..=MAX_COUNT];
    (capacity, count, span)
        .prop_map(move |(capacity, count, span)| kind.limit(capacity, count, span, MAX_FILL.get()))
        .boxed()
}

/// When a life begins: at zero, at a round time, anywhere.
fn start() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0u64), Just(1_700_092_800_000_000u64), 0..=1u64 << 51]
}

/// One call as it is drawn: how it comes after the one before and what it costs.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    gap: Gap,
    price: Price,
}

#[derive(Clone, Copy, Debug)]
enum Gap {
    /// At the same instant.
    Same,
    /// As far as in a Poisson process of the limit's own rate; the number is uniform.
    Poisson(u32),
    /// Within two windows; the number is uniform.
    Within(u32),
    /// Some windows or units on from the call before, or at an edge of the clock, a microsecond more or less.
    Edge(Edge, u8, i8),
    /// The clock steps back by up to a window, where it may.
    Back(u32),
    /// At this very time, be it earlier or later, where it may be earlier.
    At(u64),
    /// A year on.
    Year,
}

#[derive(Clone, Copy, Debug)]
enum Edge {
    Window,
    Unit,
    Clock,
}

#[derive(Clone, Copy, Debug)]
enum Price {
    /// From one to two more than fits; the number is uniform.
    Any(u64),
    /// Around the capacity.
    Whole(i8),
    Exactly(u64),
}

/// The arrivals of one life: a Poisson stream, bursts with pauses, around the edges, or a bit of everything.
fn arrivals(asks: Range<u8>) -> BoxedStrategy<Vec<(Drawn, u8)>> {
    let calls = |same, poisson, edge, within, back| {
        let gap = prop_oneof![
            same => Just(Gap::Same),
            poisson => any::<u32>().prop_map(Gap::Poisson),
            edge => (edges(), 0..=3u8, -1..=1i8).prop_map(|(edge, count, off)| Gap::Edge(edge, count, off)),
            within => any::<u32>().prop_map(Gap::Within),
            back => any::<u32>().prop_map(Gap::Back),
        ];
        vec(((gap, price()).prop_map(|(gap, price)| Drawn { gap, price }), asks.clone()), 1..24)
    };
    prop_oneof![calls(1, 20, 1, 1, 1), calls(20, 1, 1, 3, 1), calls(3, 1, 20, 1, 2), calls(3, 3, 3, 3, 3)]
        .boxed()
}

fn edges() -> impl Strategy<Value = Edge> {
    prop_oneof![Just(Edge::Window), Just(Edge::Unit), Just(Edge::Clock)]
}

fn price() -> impl Strategy<Value = Price> {
    prop_oneof![
        4 => Just(Price::Exactly(1)),
        3 => any::<u64>().prop_map(Price::Any),
        1 => (-1..=1i8).prop_map(Price::Whole),
    ]
}

fn extreme_drawn() -> impl Strategy<Value = Drawn> {
    let gap = prop_oneof![
        2 => Just(Gap::Same),
        2 => (0..=1u64 << 52).prop_map(Gap::At),
        1 => Just(Gap::At(1 << 52)),
        1 => Just(Gap::Year),
        1 => (0..=2u8, -1..=1i8).prop_map(|(count, off)| Gap::Edge(Edge::Window, count, off)),
    ];
    let price = prop_oneof![
        1 => Just(Price::Exactly(1)),
        1 => Just(Price::Exactly(u64::MAX)),
        2 => any::<u64>().prop_map(Price::Exactly),
        2 => any::<u64>().prop_map(Price::Any),
        2 => (-1..=1i8).prop_map(Price::Whole),
    ];
    (gap, price).prop_map(|(gap, price)| Drawn { gap, price })
}

/// A large bucket of a slow rate takes ages to fill; no gap in a life is longer than some two years, twice or thrice.
const LONGEST_GAP: u64 = 1 << 46;

/// The time in which one unit comes back, roughly.
fn unit(limit: &Limit) -> u64 {
    (limit.window_us().get() / limit.capacity()).clamp(1, LONGEST_GAP)
}

fn lives(
    limit: BoxedStrategy<Limit>,
    may_step_back: impl Strategy<Value = bool> + 'static,
    drawn: BoxedStrategy<Vec<(Drawn, u8)>>,
) -> BoxedStrategy<Life> {
    (limit, start(), may_step_back, drawn)
        .prop_map(|(limit, start, may_step_back, drawn)| live(limit, start, may_step_back, &drawn))
        .boxed()
}

/// Turns what was drawn into calls under `limit`. The byte beside each says what is asked.
fn live(limit: Limit, start: u64, may_step_back: bool, drawn: &[(Drawn, u8)]) -> Life {
    let mut calls = Vec::new();
    let mut now = start;
    let mut reserved: Vec<(usize, Cost)> = Vec::new();
    let mut reservations = 0;
    for (index, &(Drawn { gap, price }, ask)) in drawn.iter().enumerate() {
        let next = after(&limit, now, gap);
        if may_step_back || next >= now {
            now = next;
        }
        let cost = cost(&limit, price);
        let holder = index as u128 % 5 + 1;
        let ask = match ask {
            0..=4 => Ask::Take(cost),
            5 => Ask::Peek(cost),
            6..=10 => {
                reservations += 1;
                reserved.push((reservations, cost));
                Ask::Reserve { id: reservations, cost }
            }
            11..=15 if !reserved.is_empty() => {
                let (id, estimate) = reserved.remove(index % reserved.len());
                Ask::Settle { id, actual: actual(price, ask, estimate.get()) }
            }
            11..=15 => Ask::Take(cost),
            16..=19 => Ask::Hold { id: holder, cost },
            20..=21 => Ask::Release { id: holder },
            _ => Ask::Renew { id: holder },
        };
        calls.push(Call { at: Micros::new(now), ask });
    }
    Life { limit, calls }
}

/// Nothing, less, as much, more or anything.
fn actual(price: Price, ask: u8, estimate: u64) -> u64 {
    let any = match price {
        Price::Any(number) | Price::Exactly(number) => number,
        Price::Whole(off) => off.unsigned_abs().into(),
    };
    match ask {
        11 => 0,
        12 => any % estimate,
        13 => estimate,
        14 => estimate.saturating_add(any % estimate),
        _ => any % estimate.saturating_mul(3),
    }
}

fn cost(limit: &Limit, price: Price) -> Cost {
    let capacity = limit.capacity();
    let units = match price {
        Price::Any(number) => 1 + number % (capacity + 2),
        Price::Whole(off) => capacity.saturating_add_signed(off.into()),
        Price::Exactly(number) => number,
    };
    Cost::new(units).unwrap_or(Cost::ONE)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn after(limit: &Limit, now: u64, gap: Gap) -> u64 {
    let window = limit.window_us().get().min(LONGEST_GAP);
    let part = |number: u32, whole: u64| {
        u64::try_from((u128::from(number) * u128::from(whole)) >> 32).expect("less than the whole")
    };
    match gap {
        Gap::Same => now,
        Gap::Poisson(number) => {
            // A float is good enough to draw with; it decides nothing.
            let uniform = f64::from(number) / (f64::from(u32::MAX) + 1.0);
            now + (-(1.0 - uniform).ln() * unit(limit) as f64) as u64
        }
        Gap::Within(number) => now + part(number, 2 * window),
        Gap::Edge(edge, count, off) => {
            let base = match edge {
                Edge::Window => now + u64::from(count) * window,
                Edge::Unit => now + u64::from(count) * unit(limit),
                Edge::Clock => now - now % window + u64::from(count) * window,
            };
            base.saturating_add_signed(off.into())
        }
        Gap::Back(number) => now.saturating_sub(part(number, window)),
        Gap::At(time) => time,
        Gap::Year => now + 365 * 86_400_000_000,
    }
}

/// Pasted into a `*.cases` file, with the times moved to its origin, this only lacks the answers.
impl fmt::Debug for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let capacity = self.limit.capacity();
        let rate = |rate: Rate| format!("{}/{}us", rate.count(), rate.period_us().get());
        let name = self.limit.strategy();
        write!(f, "\nlimit {name} ")?;
        match self.limit {
            Limit::TokenBucket(bucket) => writeln!(f, "rate {} burst {capacity}", rate(bucket.rate())),
            Limit::LeakyBucket(bucket) => writeln!(f, "rate {} capacity {capacity}", rate(bucket.rate())),
            Limit::FixedWindow(window) => {
                let align = if window.align() == Align::First { "first" } else { "clock" };
                writeln!(f, "limit {capacity} window {}us align {align}", window.window().get())
            }
            Limit::Concurrency(leases) => writeln!(f, "limit {capacity} lease {}us", leases.lease().get()),
            limit => writeln!(f, "limit {capacity} window {}us", limit.window_us().get()),
        }?;
        for Call { at, ask } in &self.calls {
            write!(f, "at {}us ", at.get())?;
            match ask {
                Ask::Take(cost) => writeln!(f, "take {}", cost.get()),
                Ask::Peek(cost) => writeln!(f, "peek {}", cost.get()),
                Ask::Reserve { id, cost } => writeln!(f, "reserve {} as r{id}", cost.get()),
                Ask::Settle { id, actual } => writeln!(f, "settle r{id} {actual}"),
                Ask::Hold { id, cost } => writeln!(f, "hold h{id} {}", cost.get()),
                Ask::Release { id } => writeln!(f, "release h{id}"),
                Ask::Renew { id } => writeln!(f, "renew h{id}"),
            }?;
        }
        Ok(())
    }
}
