//! Waiting for a clock. One thread of the process wakes all waiters of the system clock, so waiting needs no async runtime; a manual
//! clock wakes its waiters when it is moved.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};
use std::thread;

use parking_lot::{Condvar, Mutex};
use tollgate_kernel::Micros;

use super::{Clock, Source, system_now};

/// Waits until a clock shows a certain time. Dropping it stops the waiting.
///
/// ```
/// use std::future::Future;
/// use std::pin::pin;
/// use std::task::{Context, Waker};
/// use tollgate_store::{ManualClock, Micros};
///
/// let hands = ManualClock::at(Micros::ZERO);
/// let mut alarm = pin!(hands.clock().alarm(Micros::from_secs(5)));
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(alarm.as_mut().poll(&mut context).is_pending());
/// hands.advance(Micros::from_secs(5));
/// assert!(alarm.as_mut().poll(&mut context).is_ready());
/// ```
#[derive(Debug)]
pub struct Alarm {
    clock: Clock,
    at: Micros,
    /// Distinguishes it from other alarms for the same time, once it is set.
    number: Option<u64>,
}

impl Alarm {
    pub(super) fn new(clock: Clock, at: Micros) -> Alarm {
        Alarm { clock, at, number: None }
    }
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Alarm { clock, at, number } = &mut *self;
        if clock.now() >= *at {
            return Poll::Ready(());
        }
        match &clock.exact().source {
            Source::System | Source::Coarse(_) => TIMER.set(*at, number, context.waker()),
            Source::Manual(manual) => manual.set_alarm(*at, number, context.waker()),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => skewed.manual.set_alarm(skewed.true_time(*at), number, context.waker()),
        }
    }
}

/// A dropped alarm leaves nothing behind: most waiters finish long before their alarm.
impl Drop for Alarm {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        // Dropped after the lock is released: a waker may be the last reference to a task, which may have alarms of its own.
        let waker = match &self.clock.exact().source {
            Source::System | Source::Coarse(_) => TIMER.alarms.lock().unset(self.at, number),
            Source::Manual(manual) => manual.state.lock().alarms.unset(self.at, number),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => {
                skewed.manual.state.lock().alarms.unset(skewed.true_time(self.at), number)
            }
        };
        drop(waker);
    }
}

/// The alarms that were set and have not rung, the soonest first.
#[derive(Debug, Default)]
pub(super) struct Alarms {
    set: BTreeMap<(Micros, u64), Waker>,
    last_number: u64,
}

impl Alarms {
    /// Sets an alarm; if it is set already, replaces its waker and returns the one before.
    pub(super) fn set(&mut self, at: Micros, number: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let number = *number.get_or_insert_with(|| {
            self.last_number += 1;
            self.last_number
        });
        self.set.insert((at, number), waker.clone())
    }

    fn unset(&mut self, at: Micros, number: u64) -> Option<Waker> {
        self.set.remove(&(at, number))
    }

    /// The time of the soonest.
    pub(super) fn next(&self) -> Option<Micros> {
        self.set.first_key_value().map(|((at, _), _)| *at)
    }

    /// Removes the alarms whose time has come.
    pub(super) fn take_expired(&mut self, now: Micros) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(first) = self.set.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        due
    }
}

/// The thread that waits for all alarms of the process, started with the first of them.
struct Timer {
    alarms: Mutex<Alarms>,
    sooner: Condvar,
}

static TIMER: LazyLock<&'static Timer> = LazyLock::new(|| {
    let timer: &'static Timer =
        Box::leak(Box::new(Timer { alarms: Mutex::default(), sooner: Condvar::new() }));
    // Without a thread no waiter would be woken: better to fail at the first wait than to hang at every one.
    thread::Builder::new()
        .name("tollgate-timer".into())
        .spawn(|| timer.run())
        .expect("the system can start one thread for timers");
    timer
});

impl Timer {
    fn set(&self, at: Micros, number: &mut Option<u64>, waker: &Waker) -> Poll<()> {
        let mut alarms = self.alarms.lock();
        let is_first = alarms.next().is_none_or(|next| at < next);
        let replaced = alarms.set(at, number, waker);
        if is_first {
            self.sooner.notify_one();
        }
        drop(alarms);
        drop(replaced);
        // If its time has come meanwhile, the thread rings it.
        Poll::Pending
    }

    fn run(&self) {
        let mut alarms = self.alarms.lock();
        loop {
            let now = system_now();
            let due = alarms.take_expired(now);
            if !due.is_empty() {
                drop(alarms);
                due.into_iter().for_each(Waker::wake);
                alarms = self.alarms.lock();
                continue;
            }
            match alarms.next() {
                Some(at) => drop(self.sooner.wait_for(&mut alarms, at.saturating_sub(now).into())),
                None => self.sooner.wait(&mut alarms),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::ManualClock;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_manual_clock_rings_what_is_due() {
        let hands = ManualClock::at(Micros::new(10));
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let rung = || count.0.load(Ordering::SeqCst);
        let mut at = [5, 20, 30, 40].map(|at| Box::pin(hands.clock().alarm(Micros::new(at))));
        let ready = at.each_mut().map(|alarm| alarm.as_mut().poll(&mut context).is_ready());
        assert_eq!(ready, [true, false, false, false]);
        hands.advance(Micros::new(9));
        assert_eq!(rung(), 0, "nothing is due yet, and what was due needed no ringing");
        hands.advance(Micros::new(1));
        assert_eq!(rung(), 1);
        let [_, _, third, fourth] = at;
        drop(third);
        hands.set(Micros::new(1000));
        assert_eq!(rung(), 2, "a dropped alarm rings nobody");
        drop(fourth);
    }

    /// An alarm of a skewed clock rings when that clock shows its time, neither earlier nor a step later.
    #[cfg(feature = "simulation")]
    #[test]
    fn an_alarm_of_a_skewed_clock_rings_at_its_own_time() {
        for (ahead_us, drift_ppm) in [(0, 0), (5_000_000, 0), (-5_000_000, 300), (7, -300), (-1, 999_999)] {
            let hands = ManualClock::at(Micros::from_secs(100));
            let skewed = hands.skewed(ahead_us, drift_ppm);
            let at = skewed.now().saturating_add(Micros::new(1_234_567));
            let mut alarm = Box::pin(skewed.alarm(at));
            let mut context = Context::from_waker(Waker::noop());
            assert!(alarm.as_mut().poll(&mut context).is_pending());
            let rings = hands.next_alarm().expect("it is set");
            hands.set(rings.saturating_sub(Micros::new(1)));
            assert!(skewed.now() < at && alarm.as_mut().poll(&mut context).is_pending(), "{drift_ppm}");
            hands.set(rings);
            assert!(skewed.now() >= at && alarm.as_mut().poll(&mut context).is_ready(), "{drift_ppm}");
            assert_eq!(hands.next_alarm(), None);
        }
    }

    #[test]
    fn nothing_is_left_of_a_dropped_alarm() {
        let hands = ManualClock::at(Micros::ZERO);
        let mut context = Context::from_waker(Waker::noop());
        for clock in [hands.clock(), Clock::system(), Clock::coarse()] {
            let at = clock.now().saturating_add(Micros::from_secs(3600));
            for _ in 0..100 {
                let mut alarm = clock.alarm(at);
                for _ in 0..2 {
                    assert!(Pin::new(&mut alarm).poll(&mut context).is_pending());
                }
            }
            let left = match &clock.source {
                Source::System | Source::Coarse(_) => {
                    TIMER.alarms.lock().set.range((at, 0)..=(at, u64::MAX)).count()
                }
                Source::Manual(manual) => manual.state.lock().alarms.set.len(),
                #[cfg(feature = "simulation")]
                Source::Skewed(_) => unreachable!("none of the clocks above"),
            };
            assert_eq!(left, 0);
        }
    }

    #[test]
    fn the_system_clock_rings_the_sooner_alarm_first() {
        struct Unpark(thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        let clock = Clock::system();
        let start = clock.now();
        let after = |ms| Box::pin(clock.alarm(start.saturating_add(Micros::from_millis(ms))));
        let (mut later, mut sooner) = (after(3_600_000), after(2));
        while sooner.as_mut().poll(&mut context).is_pending() {
            thread::park();
        }
        assert!(clock.now() >= start.saturating_add(Micros::from_millis(2)));
        assert!(later.as_mut().poll(&mut context).is_pending());
    }
}
