//! The pending work in the remote store, by the id of a charge: cancel a charge without a holder, release the leases of a dropped
//! permit, renew the leases of a held permit.
//!
//! All of it is idempotent by id, so it is repeated until the store answers. A cancel may overtake its charge, so `Unknown` is
//! final only when the charge is too old to arrive. After the time to live the store has forgotten the id, and the charge stays
//! charged. The list is bounded; a charge that does not fit in stays charged too. Both cases are counted as abandoned: they deny
//! too much for a while and never admit too much. A lease that could not be renewed in time is lost.
//!
//! This module knows which id is due when. `remote/background.rs` calls the store.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Clock, Hold, Settled, Settlement};

use crate::lease::Lease;

/// How many cancels are remembered at most; cancels and releases together, twice as many.
const MOST: usize = 10_000;
/// How long after it was sent a charge may still arrive: far longer than the deadline that it carries into the store.
const ARRIVES_WITHIN: Micros = Micros::from_secs(5);
/// How long after an attempt the next one follows: at first, and at most.
const FIRST_PAUSE: Micros = Micros::from_millis(50);
const LONGEST_PAUSE: Micros = Micros::from_secs(1);

/// The fingerprints of the keys of a charge.
pub(super) type Fingerprints = SmallVec<[u128; 2]>;

/// The pending work.
#[derive(Default)]
pub(super) struct Tasks {
    list: Mutex<List>,
    /// The number of tasks, of tasks other than renewals, and of cancels: readable without the lock.
    count: AtomicUsize,
    unfinished: AtomicUsize,
    cancels: AtomicUsize,
    abandoned: AtomicU64,
}

#[derive(Default)]
struct List {
    by_id: HashMap<u128, Task>,
    /// When each id is due.
    due: BTreeSet<(Micros, u128)>,
    cancels: usize,
    renewals: usize,
    is_running: bool,
    /// The background task, while it sleeps.
    sleeping: Option<Waker>,
}

struct Task {
    work: Work,
    sent: Micros,
    /// The store has forgotten the id by then, or ended its leases.
    end: Micros,
    due: Micros,
    attempts: u32,
}

enum Work {
    Cancel { keys: Fingerprints },
    Release { settlement: Settlement },
    Renew { every: Micros, lease: Micros, holder: Arc<Lease> },
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Cancel(ChargeId),
    Release(ChargeId, Settlement),
    Renew(ChargeId),
    WaitUntil(Micros),
    Nothing,
}

/// The result of one attempt.
#[derive(Clone, Copy)]
pub(super) enum Answer {
    Settled(Settled),
    /// The store or its node could not be reached. Other nodes may be up, so only this id waits.
    Failed,
    /// The call itself was refused, and always will be.
    Refused,
}

/// What follows from an answer.
#[derive(Default)]
pub(super) struct Follows {
    /// Keys that may have got something back.
    pub(super) keys: Fingerprints,
    /// Whether a lease was found to be lost.
    pub(super) is_lost: bool,
    /// Whether this is the last word: a cancel or a release is over, a renewal was made or never will be.
    pub(super) is_final: bool,
}

/// A pause that doubles with every attempt.
fn pause(attempts: u32) -> Micros {
    Micros::new(FIRST_PAUSE.get() << attempts.min(10)).min(LONGEST_PAUSE)
}

impl Tasks {
    /// How many things are to be done.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The number of tasks that have an end: cancels and releases.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// How many charges are still to be cancelled.
    pub(super) fn cancels(&self) -> usize {
        self.cancels.load(Ordering::Acquire)
    }

    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// A charge that was sent at `sent` is to be cancelled.
    pub(super) fn cancel(&self, hold: Hold, keys: Fingerprints, sent: Micros, now: Micros) {
        let end = sent.saturating_add(hold.ttl);
        let mut list = self.list.lock();
        if now >= end || list.cancels >= MOST {
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let task = Task { work: Work::Cancel { keys }, sent, end, due: now, attempts: 0 };
        self.add(&mut list, hold.id, task);
    }

    /// Schedules the release of a permit's leases; they expire at `end`.
    pub(super) fn release(&self, id: ChargeId, settlement: Settlement, lease: Micros, now: Micros) {
        let end = now.saturating_add(lease);
        let mut list = self.list.lock();
        if list.by_id.len() - list.renewals >= 2 * MOST {
            // The leases have expired, and the charge stays as it was reserved.
            self.remove(&mut list, id.get());
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let task = Task { work: Work::Release { settlement }, sent: now, end, due: now, attempts: 0 };
        self.add(&mut list, id, task);
    }

    /// Schedules renewals of a permit's leases for as long as it is held.
    pub(super) fn renew(&self, id: ChargeId, lease: Micros, holder: Arc<Lease>, now: Micros) {
        let every = Micros::new((lease.get() / 3).max(1));
        let (end, due) = (now.saturating_add(lease), now.saturating_add(every));
        let work = Work::Renew { every, lease, holder };
        self.add(&mut self.list.lock(), id, Task { work, sent: now, end, due, attempts: 0 });
    }

    /// Removes the work for an id.
    pub(super) fn forget(&self, id: ChargeId) {
        self.remove(&mut self.list.lock(), id.get());
    }

    /// Whether a charge is still to be cancelled.
    pub(super) fn will_cancel(&self, id: ChargeId) -> bool {
        let is_cancel = |task: &Task| matches!(task.work, Work::Cancel { .. });
        self.cancels() > 0 && self.list.lock().by_id.get(&id.get()).is_some_and(is_cancel)
    }

    /// The work that is due now. It is due again after a pause, so that a dropped attempt is repeated.
    pub(super) fn next(&self, now: Micros) -> Next {
        let mut list = self.list.lock();
        loop {
            let Some((due, id)) = list.due.first().copied() else { return Next::Nothing };
            let Some(task) = list.by_id.get_mut(&id) else {
                list.due.remove(&(due, id));
                continue;
            };
            let is_renewal = matches!(task.work, Work::Renew { .. });
            if now >= task.end && !is_renewal {
                // A lease that was not released has expired.
                let is_cancel = matches!(task.work, Work::Cancel { .. });
                self.abandoned.fetch_add(u64::from(is_cancel), Ordering::Relaxed);
                self.remove(&mut list, id);
                continue;
            }
            if now < due {
                return Next::WaitUntil(due);
            }
            let next_due = now.saturating_add(pause(task.attempts));
            task.due = if is_renewal { next_due } else { next_due.min(task.end) };
            task.attempts += 1;
            let next_due = task.due;
            let next = ChargeId::new(id).map(|id| match &task.work {
                Work::Cancel { .. } => Next::Cancel(id),
                Work::Release { settlement } => Next::Release(id, settlement.clone()),
                Work::Renew { .. } => Next::Renew(id),
            });
            list.due.remove(&(due, id));
            list.due.insert((next_due, id));
            if let Some(next) = next {
                return next;
            }
        }
    }

    /// Records the result of an attempt.
    pub(super) fn answered(&self, id: ChargeId, answer: Answer, now: Micros) -> Follows {
        let mut list = self.list.lock();
        let Some(task) = list.by_id.get_mut(&id.get()) else { return Follows::default() };
        let (is_over, is_lost) = match (&task.work, answer) {
            (Work::Renew { every, lease, .. }, Answer::Settled(Settled::Done | Settled::Pending)) => {
                let (before, next_due) = (task.due, now.saturating_add(*every));
                (task.end, task.due, task.attempts) = (now.saturating_add(*lease), next_due, 0);
                list.due.remove(&(before, id.get()));
                list.due.insert((next_due, id.get()));
                (false, false)
            }
            (Work::Renew { .. }, Answer::Failed) if now < task.end => (false, false),
            (Work::Renew { holder, .. }, _) => (true, holder.lose()),
            (_, Answer::Failed) => (false, false),
            (Work::Cancel { .. }, Answer::Settled(Settled::Unknown | Settled::Pending)) => {
                (now >= task.sent.saturating_add(ARRIVES_WITHIN), false)
            }
            (Work::Cancel { .. }, Answer::Refused) => {
                self.abandoned.fetch_add(1, Ordering::Relaxed);
                (true, false)
            }
            (Work::Release { .. }, Answer::Refused) | (_, Answer::Settled(_)) => (true, false),
        };
        let keys = match is_over.then(|| self.remove(&mut list, id.get())).flatten() {
            Some(Task { work: Work::Cancel { keys }, .. }) => keys,
            _ => Fingerprints::new(),
        };
        let is_renewed = matches!(answer, Answer::Settled(Settled::Done));
        Follows { keys, is_lost, is_final: is_over || is_renewed }
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

    /// Gives the place back if there is nothing left to do. A caller that adds an id afterwards starts another task.
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

    fn add(&self, list: &mut List, id: ChargeId, task: Task) {
        self.remove(list, id.get());
        list.due.insert((task.due, id.get()));
        list.cancels += usize::from(matches!(task.work, Work::Cancel { .. }));
        list.renewals += usize::from(matches!(task.work, Work::Renew { .. }));
        list.by_id.insert(id.get(), task);
        self.publish(list);
        if let Some(waker) = list.sleeping.take() {
            waker.wake();
        }
    }

    fn remove(&self, list: &mut List, id: u128) -> Option<Task> {
        let task = list.by_id.remove(&id)?;
        list.due.remove(&(task.due, id));
        list.cancels -= usize::from(matches!(task.work, Work::Cancel { .. }));
        list.renewals -= usize::from(matches!(task.work, Work::Renew { .. }));
        self.publish(list);
        Some(task)
    }

    fn publish(&self, list: &List) {
        self.count.store(list.by_id.len(), Ordering::Release);
        self.unfinished.store(list.by_id.len() - list.renewals, Ordering::Release);
        self.cancels.store(list.cancels, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    fn id(number: u128) -> ChargeId {
        ChargeId::new(number).unwrap()
    }

    fn added(ids: &[u128]) -> Tasks {
        let tasks = Tasks::default();
        for number in ids {
            let hold = Hold { id: id(*number), ttl: Micros::from_secs(60) };
            tasks.cancel(hold, Fingerprints::new(), at(0), at(0));
        }
        tasks
    }

    #[test]
    fn an_unknown_id_is_asked_for_with_growing_pauses_until_its_charge_is_too_old() {
        let tasks = added(&[7]);
        let (mut attempts, mut now) = (Vec::new(), 0);
        loop {
            match tasks.next(at(now)) {
                Next::Cancel(_) => {
                    attempts.push(now);
                    tasks.answered(id(7), Answer::Settled(Settled::Unknown), at(now));
                }
                Next::WaitUntil(next) => now = next.get() / 1_000 - 1_000_000,
                Next::Nothing => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(attempts, [0, 50, 150, 350, 750, 1_550, 2_550, 3_550, 4_550, 5_550]);
    }

    /// One node of the store may be down while the others answer.
    #[test]
    fn an_id_whose_node_fails_waits_and_holds_up_no_other() {
        let tasks = added(&[7, 8]);
        assert_eq!(tasks.next(at(0)), Next::Cancel(id(7)));
        tasks.answered(id(7), Answer::Failed, at(0));
        assert_eq!(tasks.next(at(0)), Next::Cancel(id(8)));
        tasks.answered(id(8), Answer::Settled(Settled::Done), at(0));
        assert_eq!((tasks.next(at(0)), tasks.count()), (Next::WaitUntil(at(50)), 1));
        assert_eq!(tasks.next(at(50)), Next::Cancel(id(7)));
        tasks.answered(id(7), Answer::Settled(Settled::Done), at(50));
        assert_eq!((tasks.next(at(50)), tasks.count()), (Next::Nothing, 0));
    }

    #[test]
    fn an_attempt_that_nobody_answers_for_is_made_again() {
        let tasks = added(&[7]);
        assert_eq!(tasks.next(at(0)), Next::Cancel(id(7)));
        assert_eq!(tasks.next(at(0)), Next::WaitUntil(at(50)));
        assert_eq!(tasks.next(at(50)), Next::Cancel(id(7)));
    }

    #[test]
    fn what_was_refused_or_has_run_out_is_abandoned() {
        let tasks = added(&[7, 8]);
        assert_eq!(tasks.next(at(0)), Next::Cancel(id(7)));
        tasks.answered(id(7), Answer::Refused, at(0));
        assert_eq!((tasks.count(), tasks.abandoned()), (1, 1));
        assert_eq!(tasks.next(at(60_000)), Next::Nothing);
        assert_eq!((tasks.count(), tasks.abandoned()), (0, 2));
    }

    #[test]
    fn one_task_runs_at_a_time_and_only_while_there_is_something_to_do() {
        let tasks = added(&[]);
        assert!(!tasks.start(), "nothing to do");
        let tasks = added(&[7]);
        assert!(tasks.start() && !tasks.start());
        assert!(!tasks.stop_if_empty());
        tasks.answered(id(7), Answer::Settled(Settled::Already), at(0));
        assert!(tasks.stop_if_empty());
    }

    #[test]
    fn a_held_lease_is_renewed_at_a_third_of_it_and_lost_when_the_store_says_so_or_fails_for_too_long() {
        let holder = Arc::new(Lease::default());
        let tasks = Tasks::default();
        tasks.renew(id(7), Micros::from_millis(300), holder.clone(), at(0));
        assert_eq!((tasks.next(at(99)), tasks.unfinished()), (Next::WaitUntil(at(100)), 0));
        assert_eq!(tasks.next(at(100)), Next::Renew(id(7)));
        tasks.answered(id(7), Answer::Settled(Settled::Done), at(100));
        assert_eq!(tasks.next(at(150)), Next::WaitUntil(at(200)));
        assert_eq!(tasks.next(at(200)), Next::Renew(id(7)));
        tasks.answered(id(7), Answer::Failed, at(200));
        assert_eq!(tasks.next(at(250)), Next::Renew(id(7)), "it is tried again soon");
        tasks.answered(id(7), Answer::Failed, at(399));
        assert!(!holder.is_lost());
        assert_eq!(tasks.next(at(500)), Next::Renew(id(7)), "the store has the last word");
        assert!(tasks.answered(id(7), Answer::Failed, at(500)).is_lost && holder.is_lost());
        assert_eq!((tasks.next(at(500)), tasks.count()), (Next::Nothing, 0));
        let holder = Arc::new(Lease::default());
        tasks.renew(id(8), Micros::from_millis(300), holder.clone(), at(0));
        assert!(
            tasks.answered(id(8), Answer::Settled(Settled::Unknown), at(100)).is_lost && holder.is_lost()
        );
    }

    /// While a store is down, every dropped permit leaves a release behind.
    #[test]
    fn only_so_many_releases_are_remembered() {
        let tasks = Tasks::default();
        let most = 2 * MOST as u128;
        tasks.renew(id(most + 1), Micros::from_secs(9), Arc::default(), at(0));
        for number in 1..=most + 1 {
            tasks.release(id(number), Settlement::Cancel, Micros::from_secs(9), at(0));
        }
        assert_eq!((tasks.count(), tasks.abandoned()), (2 * MOST, 1), "nor is it renewed any more");
    }

    #[test]
    fn a_release_takes_the_place_of_renewals_and_ends_with_the_lease() {
        let tasks = Tasks::default();
        tasks.renew(id(7), Micros::from_millis(300), Arc::default(), at(0));
        tasks.release(id(7), Settlement::Cancel, Micros::from_millis(300), at(50));
        assert_eq!((tasks.count(), tasks.unfinished(), tasks.cancels()), (1, 1, 0));
        assert_eq!(tasks.next(at(50)), Next::Release(id(7), Settlement::Cancel));
        tasks.answered(id(7), Answer::Failed, at(50));
        assert_eq!(tasks.next(at(100)), Next::Release(id(7), Settlement::Cancel));
        assert_eq!((tasks.next(at(350)), tasks.abandoned()), (Next::Nothing, 0));
    }
}
