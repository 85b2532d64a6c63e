//! What becomes of a job that does not run now: it is put off, or it ends.

use std::time::Duration;

use super::charge::{Charged, Denial, judge};
use super::decision::{Delay, JobDecision};
use super::turn::{Turn, jitter, micros};
use super::{JobGate, OUTAGE_WAIT, OUTAGE_WAIT_LONGEST, SHORT_WAIT};
use crate::limits::OnExceeded;
use crate::line::{Look, Taken};
use crate::metrics;
use crate::plan::{Plan, PlannedCharge};

/// The limit that a job is over, and what is shown of its key.
#[derive(Clone, Copy)]
pub(super) struct Over<'a> {
    pub(super) limit: &'a str,
    pub(super) label: &'a str,
}

impl<'a> Over<'a> {
    pub(super) fn of(charge: &'a PlannedCharge) -> Over<'a> {
        Over { limit: &charge.limit, label: &charge.label }
    }
}

impl JobGate {
    /// Closes the key of a job whose remote side asked for that, and puts the job off, whatever its limits do with jobs that are over them: they
    /// have let it run. It stands in line like all others that wait for the key, and is called with them when somebody opens it. Where no key is
    /// that of its type alone, the job waits alone.
    #[cfg(feature = "apalis")]
    pub(crate) async fn close_for(&self, plan: Option<&Plan>, retry_after: Duration) -> Delay {
        let (retry_after, mut limit) = (retry_after.min(crate::limits::LONGEST_SLEEP), String::new());
        if let Some((plan, closing)) = plan.and_then(|plan| Some((plan, plan.closed_by_handler.as_ref()?))) {
            limit.clone_from(&closing.limit);
            let line = &self.inner.line;
            match line.close(closing.name, &closing.label, retry_after, crate::line::REMOTE_SIDE).await {
                Ok(_) => {
                    if let JobDecision::Delay(delay) = self.decide(&plan.that_waits()).await {
                        return delay;
                    }
                }
                Err(error) => tracing::warn!(%error, key = closing.label, "a key cannot be closed"),
            }
        }
        self.inner.wakes.push(retry_after);
        Delay { wait: retry_after, until_us: None, limit }
    }

    /// Writes when a job expects its turn, and puts it off until then, or as long as it may sleep. If it was in line before, the next jobs
    /// of lines in which it does not count any more are called.
    pub(super) async fn delay(&self, plan: &Plan, look: &Look, turn: Turn, was_in_line: bool) -> JobDecision {
        let now_us = look.now_us();
        let slot_us = now_us.saturating_add(micros(turn.wait));
        let sleep = turn.sleep(plan, now_us, look.since_us);
        let until_us = now_us.saturating_add(micros(sleep));
        let charge = &plan.charges[turn.binding];
        let parked = turn.parked(plan);
        match self.inner.line.set_slot(&plan.job, slot_us, until_us, &charge.limit, &parked).await {
            Ok(()) if was_in_line => {
                let left = parked.into_iter().filter(|line| turn.has_room(plan, *line));
                self.call_behind(&left.map(|line| (line, 1)).collect()).await;
            }
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(%error, "a slot cannot be written; the job keeps its place as long as that lasts");
            }
        }
        self.delayed(plan, sleep, Some(until_us), turn.binding, sleep >= turn.sleep)
    }

    /// Takes a job out of its lines while it is charged.
    pub(super) async fn take(&self, plan: &Plan) -> Taken {
        self.inner.line.take(plan).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "a job cannot be taken out of the line; its place runs out by itself");
            Taken::default()
        })
    }

    /// Puts a job off that could not be decided, and gives it back the place that it had.
    pub(super) async fn put_off_in_line(&self, plan: &Plan, had: Taken, wait: Duration) -> JobDecision {
        if had.is_some() {
            let nowhere = vec![false; plan.charges.len()];
            if let Err(error) = self.inner.line.stand(plan, &nowhere, had).await {
                tracing::warn!(%error, "a place in line cannot be taken");
            }
        }
        self.put_off(plan, wait, 0)
    }

    /// Puts a job off that has no place in line.
    pub(super) fn put_off(&self, plan: &Plan, wait: Duration, binding: usize) -> JobDecision {
        let wait = wait.max(SHORT_WAIT);
        let most =
            if wait > OUTAGE_WAIT_LONGEST { plan.max_delay } else { plan.max_delay.min(OUTAGE_WAIT_LONGEST) };
        let spread = wait.min(most) / 4;
        let wait = wait.min(most.saturating_sub(spread)).saturating_add(jitter(&plan.job, spread));
        self.delayed(plan, wait, None, binding, true)
    }

    pub(super) fn delayed(
        &self,
        plan: &Plan,
        wait: Duration,
        until_us: Option<u64>,
        binding: usize,
        is_its_turn: bool,
    ) -> JobDecision {
        let limit = self.note_delay(plan, wait, binding, is_its_turn);
        JobDecision::Delay(Delay { wait, until_us, limit })
    }

    /// Reports a delay, and remembers when the job is due, unless it would only be put off again then: that may as well be at the next
    /// poll. Answers the limit that holds it up.
    pub(super) fn note_delay(
        &self,
        plan: &Plan,
        wait: Duration,
        binding: usize,
        is_its_turn: bool,
    ) -> String {
        let (limit, label) = match plan.charges.get(binding) {
            Some(charge) => (charge.limit.clone(), charge.label.as_str()),
            None => (String::new(), ""),
        };
        tracing::debug!(job_type = plan.job_type, delay_ms = wait.as_millis(), limit, "job delayed");
        metrics::hit(label, OnExceeded::Delay);
        self.inner.history.held_up(plan, label, OnExceeded::Delay, wait);
        metrics::delayed(wait);
        if is_its_turn {
            self.inner.wakes.push(wait);
        }
        limit
    }

    /// Ends a job that may not run, and takes it out of its lines.
    pub(super) async fn end(
        &self,
        plan: &Plan,
        behaviour: OnExceeded,
        over: Over<'_>,
        is_waiting: bool,
    ) -> JobDecision {
        let Over { limit, label } = over;
        if is_waiting {
            self.leave(plan).await;
        }
        metrics::hit(label, behaviour);
        self.inner.history.held_up(plan, label, behaviour, Duration::ZERO);
        tracing::debug!(
            job_type = plan.job_type,
            key = label,
            limit,
            behaviour = behaviour.name(),
            "job over its limit"
        );
        match behaviour {
            OnExceeded::Skip => JobDecision::Skip { limit: limit.to_owned() },
            OnExceeded::Reject | OnExceeded::Delay => JobDecision::Reject,
        }
    }

    pub(super) async fn leave(&self, plan: &Plan) {
        if let Err(error) = self.inner.line.leave(&plan.job).await {
            tracing::warn!(%error, "a job cannot be taken out of the line; its place runs out by itself");
        }
    }

    /// While the line cannot be read, the limits hold all the same.
    pub(super) async fn enter_without_line(&self, plan: &Plan) -> JobDecision {
        match self.charge(plan).await {
            Charged::Admitted(permit) => JobDecision::Run(permit),
            Charged::Unknown => self.put_off(plan, OUTAGE_WAIT, 0),
            Charged::Denied(decision) => match judge(plan, &decision) {
                Denial::Outage(wait) => self.put_off(plan, wait, 0),
                Denial::Ends(behaviour, index) => {
                    self.end(plan, behaviour, Over::of(&plan.charges[index]), false).await
                }
                Denial::Waits(_, binding) => {
                    self.put_off(plan, decision.retry_after().unwrap_or(OUTAGE_WAIT), binding)
                }
            },
        }
    }
}
