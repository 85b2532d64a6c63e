//! When it is the turn of a job, and how long it sleeps until then. The formula is the kernel's (`Limit::turn`).

use std::time::Duration;

use tollgate::{Allowance, Charge, Key, Limit, Outcome};
use tollgate_kernel::{self as kernel, Micros};
use uuid::Uuid;

use super::{JobGate, OUTAGE_WAIT, SHORT_WAIT};
use crate::line::Look;
use crate::plan::{Plan, PlannedCharge, closable};

/// A run that waits for another to end is called when one does; should the call be lost, it looks again after this, and later
/// the more are ahead of it.
const LEASE_WAIT: Duration = Duration::from_secs(1);
const LEASE_WAIT_EACH: Duration = Duration::from_millis(100);

/// From which wait on places are parked: shorter ones are over before anybody is held up by them.
const PARKED_FROM: Duration = Duration::from_secs(2);

/// How long a job has to wait for its turn.
pub(super) struct Turn {
    /// As the limits reckon it, and as long as it sleeps at most.
    pub(super) wait: Duration,
    pub(super) sleep: Duration,
    /// Which charge makes it so long.
    pub(super) binding: usize,
    /// How long each charge alone would make it wait; what is not there makes it wait as long as all together.
    pub(super) own: Vec<Duration>,
}

impl JobGate {
    /// When it is the turn of a job, from one peek at all its limits; `None` if it never can be.
    pub(super) async fn turn(&self, plan: &Plan, look: &Look) -> Option<Turn> {
        let start_us = look.closed_us.map_or(0, |until_us| until_us.saturating_sub(look.now_us()));
        let closed = Closed::of(plan, start_us, |charge| charge.is_closed(&look.closed));
        let closed = closed.while_blocked(self.blocked(plan), plan);
        let limits: Vec<(usize, Limit)> =
            (0..).zip(&plan.charges).filter_map(|(i, c)| Some((i, self.numbers(c)?))).collect();
        let probe = |(index, limit): &(usize, Limit)| {
            let charge = &plan.charges[*index];
            let probe = limit.turn_probe(charge.cost(), look.ahead[*index]);
            Charge::new(&charge.limit, charge.key()).cost(probe.get())
        };
        let probes: Vec<Charge<'_>> = limits.iter().map(probe).collect();
        if probes.is_empty() {
            return Some(closed.turn());
        }
        let Ok(decision) = self.inner.tollgate.peek(&probes).await else {
            let mut turn = closed.turn();
            turn.wait = turn.wait.max(OUTAGE_WAIT);
            turn.sleep = turn.wait;
            // Which limit holds it up is not known.
            turn.own.clear();
            return Some(turn);
        };
        let outcomes = decision.outcomes().iter().map(Outcome::numbers);
        let answers = limits.iter().zip(outcomes).map(|((index, limit), outcome)| (*index, limit, outcome));
        reckon(plan, &look.ahead, &closed, answers)
    }

    /// Which charge of a job meets a blocked key.
    pub(super) fn blocked(&self, plan: &Plan) -> Option<usize> {
        plan.charges.iter().position(|charge| {
            let rule = self.inner.tollgate.find(&charge.limit).ok();
            let key = Key::parse(charge.key()).ok();
            rule.filter(|rule| !rule.is_shadow())
                .zip(key)
                .is_some_and(|(rule, key)| matches!(rule.allowance_for(&key), Allowance::Blocked))
        })
    }

    /// Which charge of a job is larger than its limit ever holds; of several the one that ends it most strictly. Such a job takes no place: those behind it would wait for all its units.
    pub(super) fn too_large<'a>(&self, plan: &'a Plan) -> Option<&'a PlannedCharge> {
        let never_fits = |charge: &&PlannedCharge| {
            charge.cost > 1 && self.numbers(charge).is_some_and(|limit| charge.cost > limit.capacity())
        };
        plan.charges.iter().filter(never_fits).max_by_key(|charge| charge.ends_as())
    }

    /// The numbers that a charge goes by; `None` where nothing is counted or no job has to wait.
    pub(super) fn numbers(&self, charge: &PlannedCharge) -> Option<Limit> {
        let rule = self.inner.tollgate.find(&charge.limit).ok()?;
        if rule.is_shadow() {
            return None;
        }
        let key = Key::parse(charge.key()).ok()?;
        match rule.allowance_for(&key) {
            Allowance::Limited(limit) => Some(*limit),
            Allowance::Unlimited | Allowance::Blocked => None,
        }
    }
}

/// Until when a key of a job is closed, from now, and which of its charges are charged to it.
#[derive(Clone)]
pub(super) struct Closed {
    pub(super) start_us: u64,
    binding: usize,
    charges: Vec<bool>,
}

impl Closed {
    /// The same of a plan, with the charges that are charged to a closed key.
    pub(super) fn of(plan: &Plan, start_us: u64, is_closed: impl Fn(&PlannedCharge) -> bool) -> Closed {
        let charges: Vec<bool> = plan.charges.iter().map(is_closed).collect();
        let binding = charges.iter().position(|is_closed| *is_closed).unwrap_or(0);
        Closed { start_us, binding, charges }
    }

    /// The same, if this charge meets a blocked key: for as long as the job may sleep. No time is known, and a job that waits is called when the
    /// key is no longer blocked.
    pub(super) fn while_blocked(mut self, blocked: Option<usize>, plan: &Plan) -> Closed {
        let Some(binding) = blocked else { return self };
        self.charges[binding] = true;
        let start_us = self.start_us.max(micros(plan.max_delay).saturating_add(1));
        Closed { start_us, binding, charges: self.charges }
    }

    /// Whether the key of this charge is closed or blocked.
    pub(super) fn is_of(&self, index: usize) -> bool {
        self.charges.get(index) == Some(&true)
    }

    /// The turn of a job that waits for nothing else.
    fn turn(&self) -> Turn {
        let wait = Duration::from_micros(self.start_us);
        let own = |is_closed: &bool| if *is_closed { wait } else { Duration::ZERO };
        Turn { wait, sleep: wait, binding: self.binding, own: self.charges.iter().map(own).collect() }
    }
}

/// The turn of a job, from what its limits answered to their probes: the longest of all; `None` if it never can be.
pub(super) fn reckon<'a>(
    plan: &Plan,
    ahead: &[u64],
    closed: &Closed,
    answers: impl IntoIterator<Item = (usize, &'a Limit, &'a kernel::Outcome)>,
) -> Option<Turn> {
    let mut turn = closed.turn();
    for (index, limit, outcome) in answers {
        let (charge, ahead) = (&plan.charges[index], ahead[index]);
        let after = |start_us| limit.turn(outcome, charge.cost(), ahead, Micros::new(start_us));
        let wait = Duration::from(after(closed.start_us)?);
        turn.own[index] = turn.own[index].max(Duration::from(after(0)?));
        // A lease ends when its run does, which nobody knows.
        let sleep = match charge.is_concurrency {
            true => wait
                .min(LEASE_WAIT.saturating_add(
                    LEASE_WAIT_EACH.saturating_mul(u32::try_from(ahead).unwrap_or(u32::MAX)),
                )),
            false => wait,
        };
        if wait > turn.wait {
            (turn.wait, turn.binding) = (wait, index);
        }
        turn.sleep = turn.sleep.max(sleep);
    }
    Some(turn)
}

impl Turn {
    /// Whether the job's place in the line of this charge is parked: another limit makes it wait at least twice as long, so that those behind it
    /// there are not to wait for it.
    pub(super) fn is_parked(&self, index: usize) -> bool {
        let own = self.own.get(index).copied().unwrap_or(self.wait);
        self.wait >= PARKED_FROM && own <= self.wait / 2
    }

    /// The lines in which its place is parked.
    pub(super) fn parked(&self, plan: &Plan) -> Vec<Uuid> {
        let charges = plan.charges.iter().enumerate().filter(|(index, _)| self.is_parked(*index));
        charges.map(|(_, charge)| charge.line).collect()
    }

    /// Whether the limit of a line has room for the job now: where its place is parked, the next in line may run instead.
    pub(super) fn has_room(&self, plan: &Plan, line: Uuid) -> bool {
        let index = plan.charges.iter().position(|charge| charge.line == line);
        index.and_then(|index| self.own.get(index)).is_some_and(|own| *own <= SHORT_WAIT)
    }

    /// How long a job sleeps that waits since `since_us`: until its turn, at most as long as it may, and not beyond the time at which
    /// it gives up.
    pub(super) fn sleep(&self, plan: &Plan, now_us: u64, since_us: Option<u64>) -> Duration {
        let mut sleep = self.sleep;
        if sleep > plan.max_delay {
            // Without jitter all jobs with the longest sleep would wake at once. No job sleeps longer than `max_delay`.
            sleep = plan.max_delay.saturating_sub(jitter(&plan.job, plan.max_delay / 20));
        }
        if let (Some(give_up_after), Some(since_us)) = (plan.give_up_after, since_us) {
            let ends_us = since_us.saturating_add(micros(give_up_after));
            sleep = sleep.min(Duration::from_micros(ends_us.saturating_sub(now_us)));
        }
        sleep
    }
}

/// A part of `most` that is each job's own.
pub(super) fn jitter(job: &str, most: Duration) -> Duration {
    let hash = closable(job).as_u128();
    let most = most.as_micros();
    Duration::from_micros(u64::try_from(hash % most.max(1)).unwrap_or(0))
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
