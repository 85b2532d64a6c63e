//! When a charge behind others has its turn, whichever the strategy. The arithmetic, and what a turn is, are in `algorithm/turn.rs`.

use super::Limit;
use crate::algorithm::turn::{Rounds, bucket_turn, window_turn};
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// # When is it my turn?
impl Limit {
    /// The cost to peek at for [`turn`](Self::turn), for a charge of `cost` behind `ahead` units.
    pub fn turn_probe(&self, cost: Cost, ahead: u64) -> Cost {
        self.rounds(cost, ahead).last
    }

    /// The wait until `cost` fits if `ahead` units go first and nothing goes before `start`; `None` if it never can. `probe` is the
    /// answer to a peek at the cost that [`turn_probe`](Self::turn_probe) names.
    ///
    /// ```
    /// use tollgate_kernel::{Cost, Limit, Micros};
    ///
    /// let limit = Limit::sliding_window(5, Micros::from_secs(1))?;
    /// let mut state = limit.fresh();
    /// assert!(limit.charge(&mut state, Cost::new(5).unwrap(), Micros::ZERO).allowed);
    ///
    /// // The thirteenth in line, 300 ms later: five go at 1 s, five at 2 s, and then it.
    /// let now = Micros::from_millis(300);
    /// let probe = limit.peek(&state, limit.turn_probe(Cost::ONE, 12), now);
    /// assert_eq!(limit.turn(&probe, Cost::ONE, 12, Micros::ZERO), Some(Micros::from_millis(2_700)));
    /// # Ok::<(), tollgate_kernel::LimitError>(())
    /// ```
    pub fn turn(&self, probe: &Outcome, cost: Cost, ahead: u64, start: Micros) -> Option<Micros> {
        if cost.get() > self.capacity() {
            return None;
        }
        Some(match self {
            Limit::TokenBucket(bucket) => bucket_turn(bucket, probe, cost, ahead, start),
            Limit::LeakyBucket(bucket) => bucket_turn(bucket.room(), probe, cost, ahead, start),
            Limit::FixedWindow(window) => window_turn(window, probe, cost, ahead, start),
            Limit::SlidingWindow(_) | Limit::SlidingWindowCounter(_) | Limit::Concurrency(_) => {
                self.rounds(cost, ahead).turn(probe, start)
            }
        })
    }

    fn rounds(&self, cost: Cost, ahead: u64) -> Rounds {
        match self {
            Limit::SlidingWindow(window) => Rounds::of_entries(window.limit(), window.window(), cost, ahead),
            Limit::Concurrency(leases) => Rounds::of_entries(leases.limit(), leases.lease(), cost, ahead),
            Limit::SlidingWindowCounter(window) => {
                Rounds::of_counters(window.limit(), window.window(), cost, ahead)
            }
            Limit::TokenBucket(_) | Limit::LeakyBucket(_) | Limit::FixedWindow(_) => Rounds::NONE,
        }
    }
}
