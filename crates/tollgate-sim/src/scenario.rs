//! What is simulated: how many processes ask whom, how often, under which limit, and what goes wrong when.

use std::fmt;
use std::time::Duration;

use tollgate::store::Micros;
use tollgate::{Fallback, Limit, Rate};
use tollgate_testkit::history::Bound;

/// One simulation.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// How many processes there are, spread evenly over the regions.
    pub nodes: usize,
    /// How many regions there are. A central store is in the first.
    pub regions: usize,
    /// Where the counters are.
    pub layout: Layout,
    /// How many servers share the keys of a store.
    pub primaries: usize,
    /// For how long there is traffic.
    pub seconds: u64,
    /// How many keys there are.
    pub keys: usize,
    /// Which of them are charged how often.
    pub traffic: Traffic,
    /// How many requests a process has in a thousand seconds.
    pub requests_per_1000s: u64,
    /// The limit of each key.
    pub limit: LimitNumbers,
    /// What processes answer while the store does not.
    pub fallback: Fallback,
    /// Among how many processes a limit is divided meanwhile.
    pub instances: u64,
    /// The deadline of a call.
    pub timeout: Duration,
    /// For how long a denial is believed.
    pub denial_cache: Duration,
    /// How many packets in a million are lost, and sent again.
    pub loss_ppm: u64,
    /// How far the clocks of processes are wrong, at most.
    pub node_skew: Duration,
    /// By how many parts in a million they go wrong, at most.
    pub node_drift_ppm: u64,
    /// What goes wrong.
    pub faults: Vec<(Duration, Fault)>,
    /// A promise that is broken on purpose.
    pub sabotage: Option<Sabotage>,
}

/// Where the counters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In one store, in the first region.
    Central,
    /// In a store for each region, with an equal share of the limit.
    Shares,
    /// In one store, from which a server in each region leases so many units at a time and hands them out.
    Leased {
        /// How many units a region leases at a time.
        units: u64,
        /// After how long it gives back what is left of them.
        ttl: Duration,
    },
}

/// Which keys are charged how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// All alike.
    Uniform,
    /// The k-th a k-th as often as the first.
    Zipf,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// A region and the others do not reach each other for so long.
    Partition {
        /// Which region.
        region: usize,
        /// For how long.
        lasts: Duration,
    },
    /// A server of the (first) store takes no connections for so long.
    Down {
        /// Which server.
        server: usize,
        /// For how long.
        lasts: Duration,
    },
    /// A server dies, and its replica takes its place.
    FailOver {
        /// Which server.
        server: usize,
        /// How long it takes until the replica answers.
        takes: Duration,
        /// How far the replica is behind: what was charged in that time is lost.
        lag: Duration,
        /// How far the replica's clock is ahead of the true time, in µs.
        ahead_us: i64,
    },
    /// A server is cut off with one region and goes on to answer it, while its replica answers the others; then it is gone, and
    /// what it charged meanwhile is lost.
    Split {
        /// Which server.
        server: usize,
        /// The region that stays with it.
        region: usize,
        /// For how long.
        lasts: Duration,
    },
    /// The clock of a server is set forward or back by so many µs.
    StepClock {
        /// Which server.
        server: usize,
        /// By how much.
        by_us: i64,
    },
}

/// A promise that is broken on purpose, to see the checks fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// A call whose reply is lost is sent again, as some clients do by themselves.
    Resend,
    /// Servers carry calls out however late they come.
    LateCalls,
    /// A server forgets everything half-way, and nobody counts that as a loss.
    SilentLoss,
    /// Processes that fall back count with the whole limit, though it is to be divided.
    WholeShare,
}

/// The numbers of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitNumbers {
    /// `count` every `period`, `burst` at once.
    TokenBucket {
        /// How much at once.
        burst: u64,
        /// How much comes back every period.
        count: u64,
        /// The period.
        period: Duration,
    },
    /// `limit` in any `window`.
    SlidingWindow {
        /// How much.
        limit: u64,
        /// In which time.
        window: Duration,
    },
    /// `limit` in each `window`, which opens at the first charge.
    FixedWindow {
        /// How much.
        limit: u64,
        /// In which time.
        window: Duration,
    },
    /// `limit` in a `window`, by an estimate.
    SlidingWindowCounter {
        /// How much.
        limit: u64,
        /// In which time.
        window: Duration,
    },
}

/// A strategy that can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StrategyName {
    /// Token bucket.
    TokenBucket,
    /// Sliding window: an exact log.
    SlidingWindow,
    /// Fixed window, opened by the first charge.
    FixedWindow,
    /// Sliding window counter.
    SlidingWindowCounter,
}

fn us(span: Duration) -> u64 {
    Micros::from(span).get()
}

impl LimitNumbers {
    /// The limit as the library knows it.
    ///
    /// # Errors
    /// If the library refuses the numbers.
    pub fn limit(&self) -> Result<Limit, tollgate::Error> {
        Ok(match *self {
            LimitNumbers::TokenBucket { burst, count, period } => {
                Limit::token_bucket(Rate::new(count, period)?, burst)?
            }
            LimitNumbers::SlidingWindow { limit, window } => Limit::sliding_window(limit, window)?,
            LimitNumbers::FixedWindow { limit, window } => Limit::fixed_window(limit, window)?,
            LimitNumbers::SlidingWindowCounter { limit, window } => {
                Limit::sliding_window_counter(limit, window)?
            }
        })
    }

    /// The same limit by another strategy: as much at once, and in its period as much as before.
    #[must_use]
    pub fn by(&self, strategy: StrategyName) -> LimitNumbers {
        let (LimitNumbers::TokenBucket { burst: limit, .. }
        | LimitNumbers::SlidingWindow { limit, .. }
        | LimitNumbers::FixedWindow { limit, .. }
        | LimitNumbers::SlidingWindowCounter { limit, .. }) = *self;
        let window = match *self {
            LimitNumbers::TokenBucket { burst, count, period } => {
                let us = u128::from(us(period)) * u128::from(burst) / u128::from(count.max(1));
                Duration::from_micros(u64::try_from(us).unwrap_or(u64::MAX))
            }
            LimitNumbers::SlidingWindow { window, .. }
            | LimitNumbers::FixedWindow { window, .. }
            | LimitNumbers::SlidingWindowCounter { window, .. } => window,
        };
        match strategy {
            StrategyName::TokenBucket => match *self {
                bucket @ LimitNumbers::TokenBucket { .. } => bucket,
                _ => LimitNumbers::TokenBucket { burst: limit, count: limit, period: window },
            },
            StrategyName::SlidingWindow => LimitNumbers::SlidingWindow { limit, window },
            StrategyName::FixedWindow => LimitNumbers::FixedWindow { limit, window },
            StrategyName::SlidingWindowCounter => LimitNumbers::SlidingWindowCounter { limit, window },
        }
    }

    /// An n-th of it, rounded down, at least one unit: what one of n processes or regions holds itself to.
    #[must_use]
    pub fn share(&self, n: u64) -> LimitNumbers {
        let part = |limit: u64| (limit / n).max(1);
        match *self {
            LimitNumbers::TokenBucket { burst, count, period } => {
                let period = Duration::from_micros(us(period).saturating_mul(n));
                LimitNumbers::TokenBucket { burst: part(burst), count, period }
            }
            LimitNumbers::SlidingWindow { limit, window } => {
                LimitNumbers::SlidingWindow { limit: part(limit), window }
            }
            LimitNumbers::FixedWindow { limit, window } => {
                LimitNumbers::FixedWindow { limit: part(limit), window }
            }
            LimitNumbers::SlidingWindowCounter { limit, window } => {
                LimitNumbers::SlidingWindowCounter { limit: part(limit), window }
            }
        }
    }

    /// What the contract promises of one state by one clock.
    pub fn bound(&self) -> Bound {
        match *self {
            LimitNumbers::TokenBucket { burst, count, period } => {
                Bound::Bucket { burst, count, period_us: us(period) }
            }
            LimitNumbers::SlidingWindow { limit, window } => Bound::Window { limit, window_us: us(window) },
            LimitNumbers::FixedWindow { limit, window } => {
                Bound::FirstWindow { limit, window_us: us(window) }
            }
            LimitNumbers::SlidingWindowCounter { limit, window } => {
                Bound::WindowCounter { limit, window_us: us(window) }
            }
        }
    }

    /// What several states promise in one: `(times, numbers)` of each kind. All are of one strategy and one rate or window, but for
    /// their shares. Windows of several states do not begin at the same time, so of windows that begin somewhere, any span of their
    /// length holds up to twice the limit. `early_us` is how far clocks may have been set forward: a bucket has refilled as much.
    pub fn bound_of_all(states: &[(u64, LimitNumbers)], early_us: u64) -> Bound {
        let (mut units, mut window_us) = (0, 0);
        // The rates in units of 1/2^32 a µs, rounded up.
        let mut rate: u128 = 0;
        let mut is_bucket = false;
        for (times, numbers) in states {
            match *numbers {
                LimitNumbers::TokenBucket { burst, count, period } => {
                    units += times * burst;
                    let one = (u128::from(count) << 32).div_ceil(u128::from(us(period).max(1)));
                    rate += u128::from(*times) * one;
                    is_bucket = true;
                }
                LimitNumbers::SlidingWindow { limit, window } => {
                    (units, window_us) = (units + times * limit, us(window));
                }
                LimitNumbers::FixedWindow { limit, window }
                | LimitNumbers::SlidingWindowCounter { limit, window } => {
                    (units, window_us) = (units + 2 * times * limit, us(window));
                }
            }
        }
        if !is_bucket {
            return Bound::Window { limit: units, window_us };
        }
        let early = u64::try_from((rate * u128::from(early_us)).div_ceil(1 << 32)).unwrap_or(u64::MAX);
        // A period of 2^20 µs keeps the checker's products small; the rate is rounded up once more.
        let count = u64::try_from(rate.div_ceil(1 << 12)).unwrap_or(u64::MAX);
        Bound::Bucket { burst: units + early, count, period_us: 1 << 20 }
    }
}

impl fmt::Display for LimitNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LimitNumbers::TokenBucket { burst, count, period } => {
                write!(f, "token bucket: {count} every {period:?}, {burst} at once")
            }
            LimitNumbers::SlidingWindow { limit, window } => {
                write!(f, "sliding window: {limit} in {window:?}")
            }
            LimitNumbers::FixedWindow { limit, window } => write!(f, "fixed window: {limit} in {window:?}"),
            LimitNumbers::SlidingWindowCounter { limit, window } => {
                write!(f, "sliding window counter: {limit} in {window:?}")
            }
        }
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl Scenario {
    fn base(name: &'static str, about: &'static str) -> Scenario {
        Scenario {
            name,
            about,
            nodes: 1_000,
            regions: 1,
            layout: Layout::Central,
            primaries: 1,
            seconds: 10,
            keys: 2_000,
            traffic: Traffic::Zipf,
            requests_per_1000s: 10_000,
            limit: LimitNumbers::TokenBucket { burst: 40, count: 20, period: Duration::from_secs(1) },
            fallback: Fallback::Local,
            instances: 1,
            timeout: ms(100),
            denial_cache: ms(100),
            loss_ppm: 0,
            node_skew: Duration::ZERO,
            node_drift_ppm: 0,
            faults: Vec::new(),
            sabotage: None,
        }
    }

    /// All of them.
    pub fn all() -> Vec<Scenario> {
        let base = Scenario::base;
        let fail_over = |server, takes, lag, ahead_us| Fault::FailOver {
            server,
            takes: ms(takes),
            lag: ms(lag),
            ahead_us,
        };
        let hundred =
            LimitNumbers::TokenBucket { burst: 2_000, count: 1_000, period: Duration::from_secs(1) };
        vec![
            base("steady", "processes that share one store, and nothing goes wrong"),
            Scenario {
                keys: 1,
                traffic: Traffic::Uniform,
                ..base("hot-key", "one key that is asked for far above its limit")
            },
            Scenario {
                nodes: 4,
                seconds: 2,
                requests_per_1000s: 30_000_000,
                ..base("busy", "few processes with much to ask: charges go in batches")
            },
            Scenario {
                keys: 50,
                loss_ppm: 10_000,
                ..base(
                    "loss",
                    "one packet in a hundred is lost: calls time out, and some of them were carried out",
                )
            },
            Scenario {
                regions: 3,
                limit: hundred,
                instances: 1_000,
                keys: 5,
                faults: vec![(ms(3_000), Fault::Partition { region: 2, lasts: ms(4_000) })],
                ..base(
                    "partition",
                    "a region loses the store for four seconds and counts locally, each process a share",
                )
            },
            Scenario {
                keys: 20,
                faults: vec![
                    (ms(3_000), fail_over(0, 500, 300, 0)),
                    (ms(6_000), fail_over(0, 500, 1_000, 0)),
                ],
                fallback: Fallback::Closed,
                ..base("failover", "the primary dies twice, and its replica is 0.3 and 1 s behind")
            },
            Scenario {
                regions: 2,
                keys: 20,
                faults: vec![(ms(3_000), Fault::Split { server: 0, region: 0, lasts: ms(2_000) })],
                fallback: Fallback::Closed,
                ..base(
                    "split",
                    "for two seconds the old primary answers one region, and the new one the other",
                )
            },
            Scenario {
                keys: 20,
                node_skew: Duration::from_secs(600),
                node_drift_ppm: 500,
                faults: vec![
                    (ms(2_000), Fault::StepClock { server: 0, by_us: -5_000_000 }),
                    (ms(5_000), Fault::StepClock { server: 0, by_us: 2_000_000 }),
                    (ms(7_000), fail_over(0, 300, 50, -1_500_000)),
                ],
                fallback: Fallback::Closed,
                ..base(
                    "skew",
                    "clocks of processes are ten minutes wrong, and the store's is set back, forward, and replaced",
                )
            },
            Scenario {
                limit: hundred,
                instances: 1_000,
                keys: 5,
                faults: vec![(ms(2_000), Fault::Down { server: 0, lasts: ms(6_000) })],
                ..base(
                    "fallback-local",
                    "the store is down for six seconds, and a thousand processes count a share each",
                )
            },
            Scenario {
                primaries: 6,
                keys: 5_000,
                limit: LimitNumbers::TokenBucket { burst: 10, count: 5, period: Duration::from_secs(1) },
                faults: vec![
                    (ms(3_000), fail_over(2, 800, 200, 0)),
                    (ms(5_000), Fault::Down { server: 4, lasts: ms(2_000) }),
                ],
                fallback: Fallback::Closed,
                ..base(
                    "cluster",
                    "six primaries: one fails over, another is down, and the keys of the others notice nothing",
                )
            },
            Scenario {
                regions: 3,
                layout: Layout::Shares,
                limit: hundred,
                instances: 334,
                keys: 5,
                faults: vec![(ms(3_000), Fault::Partition { region: 1, lasts: ms(4_000) })],
                ..base(
                    "region-shares",
                    "a store for each region with a third of the limit; a cut between regions changes nothing",
                )
            },
            Scenario {
                regions: 3,
                layout: Layout::Leased { units: 100, ttl: Duration::from_secs(1) },
                limit: hundred,
                fallback: Fallback::Closed,
                timeout: ms(250),
                keys: 5,
                faults: vec![(ms(3_000), Fault::Partition { region: 1, lasts: ms(4_000) })],
                ..base(
                    "leased",
                    "regions lease a hundred units at a time from one store, and hand them out by themselves",
                )
            },
        ]
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Scenario> {
        Scenario::all().into_iter().find(|scenario| scenario.name == name)
    }

    /// The region of a process.
    pub fn region_of(&self, node: usize) -> usize {
        node % self.regions.max(1)
    }

    /// How many stores there are.
    pub fn stores(&self) -> usize {
        if self.layout == Layout::Shares { self.regions } else { 1 }
    }

    /// The limit of each store.
    pub fn store_limit(&self) -> LimitNumbers {
        match self.layout {
            Layout::Shares => self.limit.share(self.regions as u64),
            Layout::Central | Layout::Leased { .. } => self.limit,
        }
    }

    /// How often a server of the first store loses state.
    pub fn losses(&self, server: usize) -> u64 {
        let loses = |fault: &Fault| match fault {
            Fault::FailOver { server: of, .. } | Fault::Split { server: of, .. } => *of == server,
            _ => false,
        };
        self.faults.iter().filter(|(_, fault)| loses(fault)).count() as u64
    }

    /// How far the clock of any server is set forward in all, in µs, whatever it is set back in between.
    pub fn early_us(&self) -> u64 {
        let mut faults = self.faults.clone();
        faults.sort_by_key(|(at, _)| *at);
        let of_server = |number: usize| {
            let (mut ahead, mut early) = (0_i64, 0_i64);
            for (_, fault) in &faults {
                let next = match *fault {
                    Fault::StepClock { server, by_us } if server == number => ahead + by_us,
                    Fault::FailOver { server, ahead_us, .. } if server == number => ahead_us,
                    _ => ahead,
                };
                early += (next - ahead).max(0);
                ahead = next;
            }
            u64::try_from(early).unwrap_or(0)
        };
        (0..self.primaries).map(of_server).max().unwrap_or(0)
    }
}
