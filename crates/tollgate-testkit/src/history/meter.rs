//! The strategies once more, as plainly as possible: how full is a key, given what was admitted when?
//!
//! This is the checker's own understanding of the limits and shares no code with the kernel, so that a mistake there is not
//! repeated here. Times must not go back from call to call.

use std::collections::VecDeque;

use super::Bound;

/// How full a key is. Levels count in units of which a cost of one has `per_unit`, so that everything stays whole.
pub(super) struct Meter {
    kind: Kind,
    pub(super) capacity: i128,
    pub(super) per_unit: i128,
}

enum Kind {
    Bucket { drain_per_us: i128, level: i128, at_us: u64 },
    Window { window_us: u64, entries: VecDeque<(u64, u64)>, sum: u64 },
    Aligned { window_us: u64, index: u64, sum: u64 },
    First { window_us: u64, end_us: u64, sum: u64 },
    Counter { window_us: u64, index: u64, current: u64, previous: u64 },
}

impl Meter {
    /// The meter of a bound that holds `times` over: a state that was lost once may be filled twice.
    pub(super) fn new(bound: Bound, times: u64) -> Meter {
        let (kind, limit, per_unit) = match bound {
            Bound::Bucket { burst, count, period_us } => {
                let drain_per_us = i128::from(count) * i128::from(times);
                (Kind::Bucket { drain_per_us, level: 0, at_us: 0 }, burst, period_us)
            }
            Bound::Window { limit, window_us } => {
                (Kind::Window { window_us, entries: VecDeque::new(), sum: 0 }, limit, 1)
            }
            Bound::FixedWindow { limit, window_us } => {
                (Kind::Aligned { window_us, index: 0, sum: 0 }, limit, 1)
            }
            Bound::FirstWindow { limit, window_us } => {
                (Kind::First { window_us, end_us: 0, sum: 0 }, limit, 1)
            }
            Bound::WindowCounter { limit, window_us } => {
                (Kind::Counter { window_us, index: 0, current: 0, previous: 0 }, limit, window_us)
            }
        };
        let per_unit = i128::from(per_unit);
        Meter { kind, capacity: i128::from(limit) * i128::from(times) * per_unit, per_unit }
    }

    /// How full the key is at this time.
    pub(super) fn level(&mut self, now_us: u64) -> i128 {
        match &mut self.kind {
            Kind::Bucket { drain_per_us, level, at_us } => {
                let passed = i128::from(now_us.saturating_sub(*at_us));
                *at_us = now_us.max(*at_us);
                *level = (*level - passed * *drain_per_us).max(0);
                *level
            }
            Kind::Window { window_us, entries, sum } => {
                while let Some(&(at, cost)) = entries.front()
                    && now_us >= at.saturating_add(*window_us)
                {
                    *sum -= cost;
                    entries.pop_front();
                }
                i128::from(*sum)
            }
            Kind::Aligned { window_us, index, sum } => {
                if now_us / *window_us != *index {
                    (*index, *sum) = (now_us / *window_us, 0);
                }
                i128::from(*sum)
            }
            Kind::First { end_us, sum, .. } => {
                if now_us >= *end_us {
                    *sum = 0;
                }
                i128::from(*sum)
            }
            Kind::Counter { window_us, index, current, previous } => {
                let now_index = now_us / *window_us;
                if now_index != *index {
                    *previous = if now_index == *index + 1 { *current } else { 0 };
                    (*index, *current) = (now_index, 0);
                }
                let left = *window_us - now_us % *window_us;
                i128::from(*previous) * i128::from(left) + i128::from(*current) * i128::from(*window_us)
            }
        }
    }

    /// Adds an admission, and gives the level after it.
    pub(super) fn add(&mut self, now_us: u64, cost: u64) -> i128 {
        self.level(now_us);
        match &mut self.kind {
            Kind::Bucket { level, .. } => *level += i128::from(cost) * self.per_unit,
            Kind::Window { entries, sum, .. } => {
                entries.push_back((now_us, cost));
                *sum += cost;
            }
            Kind::Aligned { sum, .. } => *sum += cost,
            Kind::First { window_us, end_us, sum } => {
                if now_us >= *end_us {
                    *end_us = now_us + *window_us;
                }
                *sum += cost;
            }
            Kind::Counter { current, .. } => *current += cost,
        }
        self.level(now_us)
    }

    /// A level in whole units of cost, rounded up.
    pub(super) fn units(&self, level: i128) -> u64 {
        u64::try_from((level + self.per_unit - 1) / self.per_unit).unwrap_or(u64::MAX)
    }
}
