//! Charges that the store may hold though nobody counts on them: the reply was lost and the fallback answered, or the caller left.
//!
//! Each is remembered by its id until the store has cancelled it, and the store is asked again and again: a cancel is idempotent by
//! id. A cancel may overtake its charge, so `Unknown` is the last word only once the charge is too old to arrive. After its time
//! to live the store has forgotten the id, and what was charged stays charged. The list is bounded; what does not fit in stays
//! charged too. Both are counted as abandoned: it denies too much for a while, and never admits too much.
//!
//! This module knows which id is due when. The store is asked in `remote/background.rs`.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::Micros;
use tollgate_store::{Clock, Hold, HoldId, Settled};

/// How many ids are remembered at most.
const MOST: usize = 10_000;
/// How long after it was sent a charge may still arrive: far longer than the deadline that it carries into the store.
const ARRIVES_WITHIN: Micros = Micros::from_secs(5);
/// How long after an attempt the next one follows: at first, and at most.
const FIRST_PAUSE: Micros = Micros::from_millis(50);
const LONGEST_PAUSE: Micros = Micros::from_secs(1);

/// The fingerprints of the keys of a charge.
pub(super) type Fingerprints = SmallVec<[u128; 2]>;

/// The charges to be cancelled.
#[derive(Default)]
pub(super) struct Cancels {
    list: Mutex<List>,
    /// How many there are, to be read without the lock.
    count: AtomicUsize,
    abandoned: AtomicU64,
}

#[derive(Default)]
struct List {
    by_id: HashMap<u128, Pending>,
    /// When each id is due.
    due: BTreeSet<(Micros, u128)>,
    is_running: bool,
    /// The background task, while it sleeps.
    sleeping: Option<Waker>,
}

struct Pending {
    sent: Micros,
    /// The store has forgotten the id by then.
    end: Micros,
    due: Micros,
    attempts: u32,
    keys: Fingerprints,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Cancel(HoldId),
    WaitUntil(Micros),
    Nothing,
}

/// What the store answered to a cancel.
pub(super) enum Answer {
    Settled(Settled),
    /// It could not be asked, or its node could not. Others may be able to, so only this id waits.
    Failed,
    /// The call itself was refused, and always will be.
    Refused,
}

/// A pause that doubles with every attempt.
fn pause(attempts: u32) -> Micros {
    Micros::new(FIRST_PAUSE.get() << attempts.min(10)).min(LONGEST_PAUSE)
}

impl Cancels {
    /// How many charges are still to be cancelled.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Remembers a charge that was sent at `sent` and is to be cancelled.
    pub(super) fn add(&self, hold: Hold, keys: Fingerprints, sent: Micros, now: Micros) {
        let (id, end) = (hold.id.get(), sent.saturating_add(hold.ttl));
        let mut list = self.list.lock();
        if now >= end || list.by_id.len() >= MOST {
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            return;
        }
        list.by_id.insert(id, Pending { sent, end, due: now, attempts: 0, keys });
        list.due.insert((now, id));
        self.count.store(list.by_id.len(), Ordering::Release);
        list.wake();
    }

    /// Whether a charge is still to be cancelled.
    pub(super) fn contains(&self, id: HoldId) -> bool {
        self.count() > 0 && self.list.lock().by_id.contains_key(&id.get())
    }

    /// The id to cancel now, which is then due again after a pause, so that an attempt that is dropped is not forgotten.
    pub(super) fn next(&self, now: Micros) -> Next {
        let mut list = self.list.lock();
        loop {
            let Some((due, id)) = list.due.first().copied() else { return Next::Nothing };
            let Some(pending) = list.by_id.get_mut(&id) else {
                list.due.remove(&(due, id));
                continue;
            };
            if now >= pending.end {
                self.remove(&mut list, id);
                self.abandoned.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if now < due {
                return Next::WaitUntil(due);
            }
            pending.due = now.saturating_add(pause(pending.attempts)).min(pending.end);
            pending.attempts += 1;
            let next_due = pending.due;
            list.due.remove(&(due, id));
            list.due.insert((next_due, id));
            if let Some(id) = HoldId::new(id) {
                return Next::Cancel(id);
            }
        }
    }

    /// Notes what the store answered. Returns the keys that may have got something back.
    pub(super) fn answered(&self, id: HoldId, answer: &Answer, now: Micros) -> Fingerprints {
        let mut list = self.list.lock();
        let is_too_old = |pending: &Pending| now >= pending.sent.saturating_add(ARRIVES_WITHIN);
        let is_over = match answer {
            Answer::Settled(Settled::Done | Settled::Already) => true,
            Answer::Settled(Settled::Unknown | Settled::Pending) => {
                list.by_id.get(&id.get()).is_some_and(is_too_old)
            }
            Answer::Refused => {
                self.abandoned.fetch_add(1, Ordering::Relaxed);
                true
            }
            Answer::Failed => false,
        };
        match is_over {
            true => self.remove(&mut list, id.get()).unwrap_or_default(),
            false => Fingerprints::new(),
        }
    }

    /// Takes the place of the one background task; false if it runs, or there is nothing to do.
    pub(super) fn start(&self) -> bool {
        let mut list = self.list.lock();
        !list.by_id.is_empty() && !std::mem::replace(&mut list.is_running, true)
    }

    /// Gives that place back.
    pub(super) fn stop(&self) {
        self.list.lock().is_running = false;
    }

    /// Gives the place back if there is nothing left to do. Whoever adds an id afterwards starts another task.
    pub(super) fn stop_if_empty(&self) -> bool {
        let mut list = self.list.lock();
        if list.by_id.is_empty() {
            list.is_running = false;
        }
        !list.is_running
    }

    /// Sleeps until `at`, or until there is something to do sooner.
    pub(super) async fn sleep(&self, clock: &Clock, at: Micros) {
        let mut alarm = pin!(clock.alarm(at));
        poll_fn(|context| {
            let mut list = self.list.lock();
            let is_sooner = list.due.first().is_none_or(|(due, _)| *due < at);
            if is_sooner {
                return Poll::Ready(());
            }
            list.sleeping = Some(context.waker().clone());
            drop(list);
            alarm.as_mut().poll(context)
        })
        .await;
    }

    fn remove(&self, list: &mut List, id: u128) -> Option<Fingerprints> {
        let pending = list.by_id.remove(&id)?;
        list.due.remove(&(pending.due, id));
        self.count.store(list.by_id.len(), Ordering::Release);
        Some(pending.keys)
    }
}

impl List {
    fn wake(&mut self) {
        if let Some(waker) = self.sleeping.take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    fn id(number: u128) -> HoldId {
        HoldId::new(number).unwrap()
    }

    fn added(ids: &[u128]) -> Cancels {
        let cancels = Cancels::default();
        for number in ids {
            let hold = Hold { id: id(*number), ttl: Micros::from_secs(60) };
            cancels.add(hold, Fingerprints::new(), at(0), at(0));
        }
        cancels
    }

    #[test]
    fn an_unknown_id_is_asked_for_with_growing_pauses_until_its_charge_is_too_old() {
        let cancels = added(&[7]);
        let (mut asked, mut now) = (Vec::new(), 0);
        loop {
            match cancels.next(at(now)) {
                Next::Cancel(_) => {
                    asked.push(now);
                    cancels.answered(id(7), &Answer::Settled(Settled::Unknown), at(now));
                }
                Next::WaitUntil(next) => now = next.get() / 1_000 - 1_000_000,
                Next::Nothing => break,
            }
        }
        assert_eq!(asked, [0, 50, 150, 350, 750, 1_550, 2_550, 3_550, 4_550, 5_550]);
    }

    /// One node of the store may be down while the others answer.
    #[test]
    fn an_id_whose_node_fails_waits_and_holds_up_no_other() {
        let cancels = added(&[7, 8]);
        assert_eq!(cancels.next(at(0)), Next::Cancel(id(7)));
        cancels.answered(id(7), &Answer::Failed, at(0));
        assert_eq!(cancels.next(at(0)), Next::Cancel(id(8)));
        cancels.answered(id(8), &Answer::Settled(Settled::Done), at(0));
        assert_eq!((cancels.next(at(0)), cancels.count()), (Next::WaitUntil(at(50)), 1));
        assert_eq!(cancels.next(at(50)), Next::Cancel(id(7)));
        cancels.answered(id(7), &Answer::Settled(Settled::Done), at(50));
        assert_eq!((cancels.next(at(50)), cancels.count()), (Next::Nothing, 0));
    }

    #[test]
    fn an_attempt_that_nobody_answers_for_is_made_again() {
        let cancels = added(&[7]);
        assert_eq!(cancels.next(at(0)), Next::Cancel(id(7)));
        assert_eq!(cancels.next(at(0)), Next::WaitUntil(at(50)));
        assert_eq!(cancels.next(at(50)), Next::Cancel(id(7)));
    }

    #[test]
    fn what_was_refused_or_has_run_out_is_abandoned() {
        let cancels = added(&[7, 8]);
        assert_eq!(cancels.next(at(0)), Next::Cancel(id(7)));
        cancels.answered(id(7), &Answer::Refused, at(0));
        assert_eq!((cancels.count(), cancels.abandoned()), (1, 1));
        assert_eq!(cancels.next(at(60_000)), Next::Nothing);
        assert_eq!((cancels.count(), cancels.abandoned()), (0, 2));
    }

    #[test]
    fn one_task_runs_at_a_time_and_only_while_there_is_something_to_do() {
        let cancels = added(&[]);
        assert!(!cancels.start(), "nothing to do");
        let cancels = added(&[7]);
        assert!(cancels.start() && !cancels.start());
        assert!(!cancels.stop_if_empty());
        cancels.answered(id(7), &Answer::Settled(Settled::Already), at(0));
        assert!(cancels.stop_if_empty());
    }
}
