//! The queues of waiters: first come, first served, over several limits; nothing is lost when a waiter gives up.
//!
//! A waiter has one ticket, taken under one lock, and waits for several pairs of limit and key. It may try when no earlier ticket
//! is in the queue of one of its pairs. Tickets are global, so waiters never block each other in a cycle: the earliest ticket may
//! always try. A waiter is only in the queues of the limits that denied it, and in those with an earlier ticket. So a waiter that
//! one limit blocks does not block the waiters of its other limits.
//!
//! When this process gives something back (a settled reservation, a released permit, a reset key), the first waiter of every
//! queue tries again. Callers that do not wait are not queued and may be admitted between two waiters. This module knows who is
//! next; `engine/waiting.rs` tries.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_store::Alarm;

/// A limit, by its name, and the canonical text of a key.
pub(crate) type Pair = (&'static str, Box<str>);

/// All lines of an engine.
#[derive(Default)]
pub(crate) struct Lines {
    state: Mutex<State>,
    /// How many wait, to be read without the lock.
    count: AtomicUsize,
}

#[derive(Default)]
struct State {
    last_ticket: u64,
    /// The tickets in each queue, the earliest first.
    lines: HashMap<Pair, BTreeSet<u64>>,
    wakers: HashMap<u64, Waker>,
    /// How often waiters were woken to try again.
    nudges: u64,
}

impl Lines {
    /// Takes a ticket.
    pub(crate) fn join(&self, pairs: SmallVec<[Pair; 4]>) -> Turn<'_> {
        let mut state = self.state.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        self.count.fetch_add(1, Ordering::Release);
        // The counters are read without this lock. Either they show what `nudge` was called for, or it sees the waiter.
        fence(Ordering::SeqCst);
        Turn { lines: self, ticket, pairs }
    }

    /// Wakes the first waiter of every queue: something was given back.
    pub(crate) fn nudge(&self) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.nudges += 1;
        let first: BTreeSet<u64> = state.lines.values().filter_map(|line| line.first().copied()).collect();
        let wakers: Vec<Waker> = first.iter().filter_map(|ticket| state.wakers.remove(ticket)).collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.lines.is_empty() && state.wakers.is_empty() && self.count.load(Ordering::Acquire) == 0
    }
}

impl State {
    /// Leaves a queue. Returns the waker of the waiter that is first now.
    fn leave(&mut self, pair: &Pair, ticket: u64) -> Option<Waker> {
        let line = self.lines.get_mut(pair)?;
        let was_first = line.first() == Some(&ticket);
        line.remove(&ticket);
        match line.first().copied() {
            Some(next) if was_first => self.wakers.remove(&next),
            Some(_) => None,
            None => {
                self.lines.remove(pair);
                None
            }
        }
    }
}

/// A ticket and the pairs it waits for; dropping it leaves all queues.
pub(crate) struct Turn<'a> {
    lines: &'a Lines,
    ticket: u64,
    pairs: SmallVec<[Pair; 4]>,
}

impl Turn<'_> {
    /// Ready, with the count of nudges, when no earlier ticket waits for one of the pairs and there were more nudges than `seen`.
    fn poll_turn(&self, seen: Option<u64>, context: &mut Context<'_>) -> Poll<u64> {
        let mut state = self.lines.state.lock();
        let mut is_next = true;
        for pair in &self.pairs {
            if let Some(line) = state.lines.get_mut(pair)
                && line.first().is_some_and(|first| *first < self.ticket)
            {
                is_next = false;
                // Woken when that one leaves.
                line.insert(self.ticket);
            }
        }
        if is_next && seen.is_none_or(|seen| state.nudges > seen) {
            return Poll::Ready(state.nudges);
        }
        let replaced = state.wakers.insert(self.ticket, context.waker().clone());
        // A waker may be the last reference to a task, which is dropped with it: not under the lock.
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Waits until this ticket may try (again), or the alarm rings: then `None`.
    pub(crate) async fn or_alarm(&self, seen: Option<u64>, alarm: Alarm) -> Option<u64> {
        let mut alarm = pin!(alarm);
        poll_fn(|context| match self.poll_turn(seen, context) {
            Poll::Ready(nudges) => Poll::Ready(Some(nudges)),
            Poll::Pending => Pin::as_mut(&mut alarm).poll(context).map(|()| None),
        })
        .await
    }

    /// Queues for the pairs that denied, and for no others. `denied` answers for each pair, in order.
    pub(crate) fn stand_in(&self, denied: impl Fn(usize) -> bool) {
        let mut state = self.lines.state.lock();
        let mut wakers: SmallVec<[Waker; 4]> = SmallVec::new();
        for (index, pair) in self.pairs.iter().enumerate() {
            if denied(index) {
                state.lines.entry(pair.clone()).or_default().insert(self.ticket);
            } else {
                wakers.extend(state.leave(pair, self.ticket));
            }
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.lines.state.lock();
        let own = state.wakers.remove(&self.ticket);
        let wakers: SmallVec<[Waker; 4]> =
            self.pairs.iter().filter_map(|pair| state.leave(pair, self.ticket)).collect();
        self.lines.count.fetch_sub(1, Ordering::Release);
        drop(state);
        drop(own);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(names: &[&'static str]) -> SmallVec<[Pair; 4]> {
        names.iter().map(|name| (*name, Box::from("key"))).collect()
    }

    fn may_try(turn: &Turn<'_>) -> bool {
        turn.poll_turn(None, &mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_waiter_of_one_limit_holds_up_nobody_who_waits_for_another() {
        let lines = Lines::default();
        let first = lines.join(pairs(&["x", "y"]));
        assert!(may_try(&first));
        first.stand_in(|index| index == 0); // denied by x
        let (of_x, of_y) = (lines.join(pairs(&["x"])), lines.join(pairs(&["y"])));
        let of_both = lines.join(pairs(&["y", "x"]));
        assert!(!may_try(&of_x) && may_try(&of_y) && !may_try(&of_both));
        // Denied by y now: waiters for x alone may go.
        first.stand_in(|index| index == 1);
        assert!(may_try(&of_x) && !may_try(&of_y));
        assert!(!may_try(&of_both), "the first is still before it");
        drop(first);
        assert!(may_try(&of_y));
        drop((of_x, of_y));
        assert!(may_try(&of_both));
        drop(of_both);
        assert!(lines.is_empty());
    }

    #[test]
    fn nobody_waits_in_a_ring_and_the_earliest_may_always_try() {
        let lines = Lines::default();
        let turns: Vec<Turn<'_>> = [&["x", "y"][..], &["y", "z"], &["z", "x"]]
            .into_iter()
            .map(|names| {
                let turn = lines.join(pairs(names));
                let _ = may_try(&turn);
                turn.stand_in(|_| true);
                turn
            })
            .collect();
        for (index, turn) in turns.into_iter().enumerate() {
            assert!(may_try(&turn), "{index}");
        }
        assert!(lines.is_empty());
    }

    #[test]
    fn a_nudge_has_the_first_of_a_line_look_again() {
        let lines = Lines::default();
        let turn = lines.join(pairs(&["x"]));
        turn.stand_in(|_| true);
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(seen) = turn.poll_turn(None, &mut context) else { panic!("nobody is before it") };
        assert!(turn.poll_turn(Some(seen), &mut context).is_pending());
        lines.nudge();
        assert!(turn.poll_turn(Some(seen), &mut context).is_ready());
    }
}
