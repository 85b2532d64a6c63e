//! Virtual time: a runtime that runs everything that can run, then moves the clocks to the next instant at which something happens.
//!
//! There are two clocks, moved in one step: the [`ManualClock`] that the library, the servers and the network go by, in microseconds, and
//! the paused clock of tokio, which the deadlines of store calls go by. Timers of tokio count whole milliseconds, so no step passes one of
//! them without letting timers fire.
//!
//! One thread runs all tasks in the order in which they were woken, alarms of one instant ring in the order in which they were set, and
//! random bytes come from the seed: two runs of one seed do the same.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::ManualClock;
use tollgate::store::Micros;
use tollgate_store::simulated::SeededThread;

/// The instant at which every simulation begins, in µs since 1970: the first second of 2026, a whole millisecond.
pub const START: Micros = Micros::from_secs(1_767_225_600);

const MILLISECOND_US: u64 = 1_000;

/// Runs a simulation to its end, in virtual time. Random bytes of the library come from `seed`.
///
/// # Panics
/// If the simulation does, or no runtime can be made.
pub fn run<F, T>(seed: u64, simulation: impl FnOnce(ManualClock) -> F) -> T
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let _seeded = SeededThread::new(seed);
    let idle = Arc::new(Idle::default());
    let hook = idle.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .on_thread_park(move || hook.is_idle())
        .build()
        .expect("a runtime of one thread can be made");
    let hands = ManualClock::at(START);
    let simulated = {
        let _context = runtime.enter();
        // A task, as all others: the future that a runtime blocks on is not run in their order.
        tokio::spawn(simulation(hands.clone()))
    };
    runtime.spawn(move_clocks(hands, idle));
    runtime.block_on(simulated).expect("a simulation does not panic")
}

/// Wakes the task that moves the clocks when no other task can run.
#[derive(Default)]
struct Idle(Mutex<Option<Waker>>);

impl Idle {
    fn is_idle(&self) {
        if let Some(waker) = self.0.lock().take() {
            waker.wake();
        }
    }

    fn wait(&self) -> impl Future<Output = ()> + '_ {
        UntilIdle { idle: self, has_waited: false }
    }
}

struct UntilIdle<'a> {
    idle: &'a Idle,
    has_waited: bool,
}

impl Future for UntilIdle<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.has_waited, true) {
            return Poll::Ready(());
        }
        *self.idle.0.lock() = Some(context.waker().clone());
        Poll::Pending
    }
}

async fn move_clocks(hands: ManualClock, idle: Arc<Idle>) {
    loop {
        idle.wait().await;
        let now = hands.now();
        let timers_fire = Micros::new((now.get() / MILLISECOND_US + 1) * MILLISECOND_US);
        let next = hands.next_alarm().unwrap_or(timers_fire).min(timers_fire).max(now);
        hands.set(next);
        tokio::time::advance(Duration::from(next.saturating_sub(now))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Alarms ring on their microsecond and in the order in which they were set; timers of tokio on the next millisecond.
    #[test]
    fn everything_happens_at_its_time_and_in_order() {
        let seen = run(1, async |hands| {
            let seen: Arc<Mutex<Vec<(&str, u64)>>> = Arc::default();
            let note = |name| {
                let (seen, hands) = (seen.clone(), hands.clone());
                move || seen.lock().push((name, hands.now().saturating_sub(START).get()))
            };
            let mut tasks = Vec::new();
            for (name, at_us) in [("b", 1_500), ("c", 1_500), ("a", 7), ("d", 2_700)] {
                let (alarm, note) =
                    (hands.clock().alarm(START.saturating_add(Micros::new(at_us))), note(name));
                tasks.push(tokio::spawn(async move {
                    alarm.await;
                    note();
                }));
            }
            let note = note("timer");
            tasks.push(tokio::spawn(async move {
                tokio::time::sleep(Duration::from_micros(1_501)).await;
                note();
            }));
            for task in tasks {
                task.await.expect("no panic");
            }
            seen.lock().clone()
        });
        assert_eq!(seen, [("a", 7), ("b", 1_500), ("c", 1_500), ("timer", 2_000), ("d", 2_700)]);
    }

    #[test]
    fn a_minute_of_nothing_passes_at_once() {
        let passed = run(1, async |hands| {
            let start = tokio::time::Instant::now();
            hands.clock().alarm(START.saturating_add(Micros::from_secs(60))).await;
            start.elapsed()
        });
        assert_eq!(passed, Duration::from_secs(60));
    }
}
