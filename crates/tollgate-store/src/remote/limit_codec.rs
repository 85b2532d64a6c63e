//! The encoding of a limit beside a reservation, in every shared store: the number of its strategy and three numbers. They are
//! part of the stored format: see docs/storage.md.

use tollgate_kernel::{Align, Limit, Micros, Rate, Strategy};

/// The number of a strategy in scripts, functions and stored charges.
pub(crate) fn number(strategy: Strategy) -> u8 {
    match strategy {
        Strategy::TokenBucket => 1,
        Strategy::LeakyBucket => 2,
        Strategy::FixedWindow => 3,
        Strategy::SlidingWindow => 4,
        Strategy::SlidingWindowCounter => 5,
        Strategy::Concurrency => 6,
    }
}

/// The strategy's number; then the rate's count and period and the burst of a bucket, or the limit, the window or lease, and 1 for
/// windows of the clock.
pub(crate) fn write(limit: &Limit) -> [u64; 4] {
    let strategy = u64::from(number(limit.strategy()));
    let bucket = |rate: Rate, burst| [strategy, rate.count(), rate.period_us().get(), burst];
    let window = |most, span: Micros, third| [strategy, most, span.get(), third];
    match limit {
        Limit::TokenBucket(tokens) => bucket(tokens.rate(), tokens.burst()),
        Limit::LeakyBucket(leaky) => bucket(leaky.rate(), leaky.capacity()),
        Limit::FixedWindow(fixed) => {
            window(fixed.limit(), fixed.window(), u64::from(fixed.align() == Align::Clock))
        }
        Limit::SlidingWindow(log) => window(log.limit(), log.window(), 0),
        Limit::SlidingWindowCounter(counter) => window(counter.limit(), counter.window(), 0),
        Limit::Concurrency(leases) => window(leases.limit(), leases.lease(), 0),
    }
}

/// The limit that was written so; `None` if there is no such limit.
pub(crate) fn read([strategy, count, span, third]: [u64; 4]) -> Option<Limit> {
    let span = Micros::new(span);
    let limit = match strategy {
        1 => Rate::new(count, span).and_then(|rate| Limit::token_bucket(rate, third)),
        2 => Rate::new(count, span).and_then(|rate| Limit::leaky_bucket(rate, third)),
        3 if third == 1 => Limit::clock_window(count, span),
        3 => Limit::fixed_window(count, span),
        4 => Limit::sliding_window(count, span),
        5 => Limit::sliding_window_counter(count, span),
        6 => Limit::concurrency(count, span),
        _ => return None,
    };
    limit.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_read_as_it_was_written() {
        let second = Micros::from_secs(1);
        let rate: Rate = "7/s".parse().unwrap();
        for (limit, numbers) in [
            (Limit::token_bucket(rate, 9), [1, 7, 1_000_000, 9]),
            (Limit::leaky_bucket(rate, 9), [2, 7, 1_000_000, 9]),
            (Limit::fixed_window(9, second), [3, 9, 1_000_000, 0]),
            (Limit::clock_window(9, second), [3, 9, 1_000_000, 1]),
            (Limit::sliding_window(9, second), [4, 9, 1_000_000, 0]),
            (Limit::sliding_window_counter(9, second), [5, 9, 1_000_000, 0]),
            (Limit::concurrency(9, second), [6, 9, 1_000_000, 0]),
        ] {
            let limit = limit.unwrap();
            assert_eq!(write(&limit), numbers, "{limit}");
            assert_eq!(read(numbers), Some(limit));
        }
        for nonsense in [[0, 1, 1, 1], [7, 1, 1, 1], [1, 0, 1, 1], [4, 1, 0, 0]] {
            assert_eq!(read(nonsense), None, "{nonsense:?}");
        }
    }
}
