//! Counts at the speed of a plain store: each thread has its own stripe.
//!
//! With two or more threads, one shared counter would cost each of them more than the decision itself. So each live thread has a
//! number, and adds in the stripe of that number, which no other thread writes. The sum is handed to the real counter in batches
//! of 64 and by [`Stripes::hand_over`] when the exact count is needed. Threads beyond the last number share the last stripe,
//! which is slower.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// How much a stripe adds up before it is handed over.
const BATCH: u64 = 64;

/// The number of stripes: enough for the threads that a machine runs, and as many again for threads that come and go.
static STRIPES: LazyLock<usize> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (4 * cores).clamp(8, 128)
});

/// The numbers of ended threads, and the first number that was never used.
static NUMBERS: Mutex<(BTreeSet<usize>, usize)> = Mutex::new((BTreeSet::new(), 0));

const NONE: usize = usize::MAX;

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(NONE) };
    static LENT: Lent = Lent::next();
}

/// A thread's number, given back when the thread ends.
struct Lent(usize);

impl Lent {
    fn next() -> Lent {
        let mut numbers = NUMBERS.lock();
        Lent(numbers.0.pop_first().unwrap_or_else(|| {
            numbers.1 += 1;
            numbers.1 - 1
        }))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Counts of this thread while it ends go to the shared stripe.
        NUMBER.set(NONE - 1);
        NUMBERS.lock().0.insert(self.0);
    }
}

/// The number of this thread.
#[inline]
fn number() -> usize {
    match NUMBER.get() {
        NONE => first_number(),
        number => number,
    }
}

#[cold]
fn first_number() -> usize {
    let number = LENT.try_with(|lent| lent.0).unwrap_or(NONE - 1);
    NUMBER.set(number);
    number
}

/// Counts of two kinds.
pub(crate) struct Stripes(Box<[Stripe]>);

#[derive(Default)]
#[repr(align(128))] // Two lines, because processors fetch them in pairs.
struct Stripe {
    counts: [AtomicU64; 2],
    handed_over: [AtomicU64; 2],
}

impl Stripes {
    pub(crate) fn new() -> Stripes {
        Stripes((0..=*STRIPES).map(|_| Stripe::default()).collect())
    }

    /// Adds to the count of a kind. Now and then it is time to hand the stripe over, which `counted` is called for.
    #[inline]
    pub(crate) fn add(&self, kind: usize, count: u64, counted: impl FnOnce(u64)) {
        let (number, shared) = (number(), self.0.len() - 1);
        let stripe = &self.0[number.min(shared)];
        let cell = &stripe.counts[kind];
        let before = match number < shared {
            true => {
                let before = cell.load(Ordering::Relaxed);
                cell.store(before + count, Ordering::Relaxed);
                before
            }
            false => cell.fetch_add(count, Ordering::Relaxed),
        };
        let after = before + count;
        if before / BATCH != after / BATCH {
            counted(stripe.hand_over(kind, after));
        }
    }

    /// All that was counted of a kind since it was last handed over.
    pub(crate) fn hand_over(&self, kind: usize) -> u64 {
        let new = |stripe: &Stripe| stripe.hand_over(kind, stripe.counts[kind].load(Ordering::Relaxed));
        self.0.iter().map(new).sum()
    }
}

impl Stripe {
    /// Hands over the difference up to `count`. Counts only rise, so nothing is handed over twice.
    #[cold]
    fn hand_over(&self, kind: usize, count: u64) -> u64 {
        count.saturating_sub(self.handed_over[kind].fetch_max(count, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_or_counted_twice_however_many_threads_come_and_go() {
        let (stripes, handed_over) = (Stripes::new(), AtomicU64::new(0));
        let hand_over = |count| {
            handed_over.fetch_add(count, Ordering::Relaxed);
        };
        // More threads than there are stripes, so that some share one, and then fewer, which take over from them.
        for (threads, each) in [(*STRIPES + 20, 1_000), (2, 100_000), (1, 7)] {
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| (0..each).for_each(|_| stripes.add(1, 1, hand_over)));
                }
                (0..100).for_each(|_| hand_over(stripes.hand_over(1)));
            });
        }
        hand_over(stripes.hand_over(1));
        let expected = (*STRIPES as u64 + 20) * 1_000 + 200_000 + 7;
        assert_eq!(handed_over.into_inner(), expected);
        assert_eq!((stripes.hand_over(0), stripes.hand_over(1)), (0, 0));
    }

    #[test]
    fn what_a_thread_counts_is_handed_over_sixty_four_at_a_time() {
        let stripes = Stripes::new();
        let handed_over = Cell::new(0);
        for count in 1..=200 {
            stripes.add(0, 1, |new| handed_over.set(handed_over.get() + new));
            assert_eq!(handed_over.get(), count / 64 * 64);
        }
        stripes.add(0, 1_000, |new| handed_over.set(handed_over.get() + new));
        assert_eq!((handed_over.get(), stripes.hand_over(0)), (1_200, 0));
    }
}
