//! The share of a limit for one of several processes while each counts locally.

use tollgate_kernel::{Align, Limit, LimitError, Micros, Rate};

/// The limit of one of several instances, so that all of them stay within the whole limit: capacity and rate are divided and
/// rounded down, but are at least one unit. If a limit is below the number of instances, the total is one unit per instance.
pub(crate) fn share_of(limit: &Limit, instances: u64) -> Result<Limit, LimitError> {
    let share = |count: u64| (count / instances).max(1);
    let slower = |rate: Rate| match rate.count() % instances {
        0 => Rate::new(rate.count() / instances, rate.period()),
        _ => Rate::new(rate.count(), Micros::new(rate.period_us().get().saturating_mul(instances)))
            .or_else(|_| Rate::new(rate.count() / instances, rate.period())),
    };
    match limit {
        Limit::TokenBucket(bucket) => Limit::token_bucket(slower(bucket.rate())?, share(bucket.burst())),
        Limit::LeakyBucket(bucket) => Limit::leaky_bucket(slower(bucket.rate())?, share(bucket.capacity())),
        Limit::FixedWindow(window) => match window.align() {
            Align::First => Limit::fixed_window(share(window.limit()), window.window()),
            Align::Clock => Limit::clock_window(share(window.limit()), window.window()),
        },
        Limit::SlidingWindow(window) => Limit::sliding_window(share(window.limit()), window.window()),
        Limit::SlidingWindowCounter(window) => {
            Limit::sliding_window_counter(share(window.limit()), window.window())
        }
        Limit::Concurrency(leases) => Limit::concurrency(share(leases.limit()), leases.lease()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_together_are_at_most_the_whole() {
        let minute = Micros::from_secs(60);
        let rate = |text: &str| text.parse::<Rate>().unwrap();
        for (limit, instances, share) in [
            (Limit::token_bucket(rate("10/s"), 20), 1, "10/s, bursts of 20"),
            (Limit::token_bucket(rate("10/s"), 20), 5, "2/s, bursts of 4"),
            (Limit::token_bucket(rate("10/s"), 20), 3, "10/3s, bursts of 6"),
            (Limit::token_bucket(rate("1/d"), 2), 10, "1/10d, bursts of 1"),
            (Limit::leaky_bucket(rate("9/m"), 10), 3, "3/m evenly, up to 3 waiting"),
            (Limit::fixed_window(100, minute), 3, "33 per 1m window"),
            (Limit::clock_window(2, minute), 3, "1 per 1m window of the clock"),
            (Limit::sliding_window(100, minute), 7, "14 in any 1m"),
            (Limit::sliding_window_counter(100, minute), 7, "about 14 in any 1m"),
            (Limit::concurrency(7, minute), 2, "3 at once, leases of 1m"),
            // A period that is too long to multiply stays, and the count is rounded down.
            (Limit::token_bucket(rate("15/3000d"), 20), 2, "7/3000d, bursts of 10"),
        ] {
            assert_eq!(share_of(&limit.unwrap(), instances).unwrap().to_string(), share);
        }
        let slow = Limit::token_bucket(rate("1/3000d"), 2).unwrap();
        assert!(share_of(&slow, 2).is_err(), "nothing slower can be kept exact");
    }
}
