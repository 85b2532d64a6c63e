//! Polls for jobs when one is due.
//!
//! apalis fetches when it is woken. Its own interval strategy makes a new timer when the old one fires and does not poll the new one, so
//! that a tick which comes while a fetch is under way is the last: here a timer is polled until it is pending.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use apalis::prelude::{PollSnapshot, PollStrategy};
use tokio::time::Sleep;

use crate::gate::JobGate;
use crate::wake::Wakes;

/// Wakes a worker at the times of the jobs that this process put off, and every so often for all others.
#[derive(Debug)]
pub struct DuePoll {
    every: Duration,
    wakes: Wakes,
    timer: Option<Pin<Box<Sleep>>>,
}

impl DuePoll {
    /// Polls every `every`, which is how late a job may start that another process put off, and at the times that are known here.
    pub fn new(gate: &JobGate, every: Duration) -> DuePoll {
        DuePoll { every: every.max(Duration::from_millis(1)), wakes: gate.wakes().clone(), timer: None }
    }

    /// The next instant to poll at.
    fn next(&self, now: Instant) -> Instant {
        let regular = now + self.every;
        self.wakes.next(now).map_or(regular, |due| due.min(regular))
    }
}

impl Clone for DuePoll {
    fn clone(&self) -> DuePoll {
        DuePoll { every: self.every, wakes: self.wakes.clone(), timer: None }
    }
}

impl PollStrategy for DuePoll {
    fn poll_drive(&mut self, context: &mut Context<'_>, _: &PollSnapshot) -> Poll<Option<()>> {
        let mut fired = Poll::Pending;
        loop {
            let next = self.next(Instant::now()).into();
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next)));
            // A job may have been put off to an earlier time than the timer has.
            if next < timer.deadline() {
                timer.as_mut().reset(next);
            }
            if timer.as_mut().poll(context).is_pending() {
                return fired;
            }
            self.timer = None;
            fired = Poll::Ready(Some(()));
        }
    }
}
