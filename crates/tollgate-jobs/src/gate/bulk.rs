//! Many jobs that are due are put off at once.
//!
//! A job that finds others in line goes to the line's end without a charge. If a tenant has thousands of them, each would be claimed,
//! looked at and put back one by one, in front of the jobs of all others; so the adapter reads ahead, and what it finds is put off here
//! together: one look at all lines, one peek for each probe that the kernel asks for, one write. Jobs that sleep only as long as they may
//! at most, and whose turn is later, are put off again in the same way; and so are those that workers have claimed all the same (`batch.rs`).
//!
//! Nothing is charged here, and no job ends here: what might run, is over a limit that ends it, or is to be given up, is left for a worker to
//! claim.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use sqlx::postgres::PgConnection;
use tollgate::{Charge, Limit};
use tollgate_kernel::Outcome;
use uuid::Uuid;

use super::turn::{Closed, Turn, micros, reckon};
use super::{JobGate, SHORT_WAIT};
use crate::line::{NewPlace, NewSlot, Survey, Waits};
use crate::plan::{Plan, PlannedCharge};

/// A limit is asked about at most so many costs for one page of jobs, and those of jobs that are the first in line. Probes in between are rounded
/// up: a slot may then be late by this share of a window, never early.
const PROBES: u64 = 64;

/// In how many lines jobs may stand that are put off together, unless the first of them stands in more: each is locked meanwhile.
const MOST_LINES: usize = 256;

/// How many charges a peek takes.
const CHARGES: usize = 64;

/// A slot that moves by less than this is left as it was.
const SLOT_STAYS_US: u64 = 500_000;

/// How long the limits may take to answer for one page, whose rows and lines are locked meanwhile.
const ANSWERS_TIMEOUT: Duration = Duration::from_secs(2);

/// A job that was put off.
pub(crate) struct PutOff {
    /// Which of the plans.
    pub(crate) index: usize,
    /// Until when it sleeps, on the database's clock.
    pub(crate) until_us: u64,
    /// How long that is.
    pub(crate) sleep: Duration,
    /// Whether its turn is so soon that the worker that has claimed it waits for it.
    pub(crate) is_soon: bool,
    /// The limit that holds it up.
    pub(crate) limit: String,
    /// Which of its charges that is.
    binding: usize,
    /// Whether it is its turn then, as far as is known.
    is_its_turn: bool,
}

/// Jobs that were put off together.
#[derive(Default)]
pub(crate) struct PutOffs {
    pub(crate) jobs: Vec<PutOff>,
    /// The lines with room in which some of them counted and do not any more, and how many.
    left: BTreeMap<Uuid, usize>,
}

/// Whether jobs sleep yet that are put off together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep<'a> {
    /// They are due.
    #[cfg_attr(not(feature = "apalis"), allow(dead_code, reason = "only apalis's queues are read ahead in"))]
    IsOver,
    /// They are due, and a worker has claimed them. Each has the limits that have denied it just now, if that was asked.
    IsOverAndClaimed(&'a [Vec<bool>]),
    /// They would wake at these times, on the database's clock. One that has more than half of its sleep before it is left alone: it would
    /// be written again and again.
    #[cfg_attr(not(feature = "apalis"), allow(dead_code, reason = "only apalis's queues are read ahead in"))]
    GoesOn(&'a [u64]),
}

impl Sleep<'_> {
    /// When the sleep of one of them ends, if it goes on.
    fn ends_us(&self, index: usize) -> Option<u64> {
        match self {
            Sleep::GoesOn(ends_us) => ends_us.get(index).copied(),
            Sleep::IsOver | Sleep::IsOverAndClaimed(_) => None,
        }
    }

    /// The limits that have denied one of them.
    fn denied(&self, index: usize) -> &[bool] {
        match self {
            Sleep::IsOverAndClaimed(denied) => denied.get(index).map_or(&[], Vec::as_slice),
            Sleep::IsOver | Sleep::GoesOn(_) => &[],
        }
    }
}

/// Limits by their lines, each with the costs that it is asked about.
type Asked<'a> = BTreeMap<Uuid, (&'a PlannedCharge, BTreeSet<u64>)>;

/// A job that stays in line, or takes a place in it.
struct Waiter<'a> {
    index: usize,
    plan: &'a Plan,
    ahead: Vec<u64>,
    closed: Closed,
    since_us: u64,
    /// What is written of it, if it waited already.
    waited: Option<Waits>,
    /// The lines in which it takes a place.
    takes: Vec<Uuid>,
}

impl Waiter<'_> {
    /// Whether it takes a place, or one that it has counts now and did not, or the other way round.
    fn has_changed(&self, turn: &Turn, survey: &Survey) -> bool {
        let is_other = |(index, charge): (usize, &PlannedCharge)| {
            let place = survey.place_of(self.plan, charge.line);
            place.is_some_and(|place| place.is_parked != turn.is_parked(index))
        };
        !self.takes.is_empty() || self.plan.charges.iter().enumerate().any(is_other)
    }
}

impl JobGate {
    /// Which of these jobs will have to wait, by a look without locks: those that are to be locked.
    #[cfg(feature = "apalis")]
    pub(crate) async fn have_to_wait(
        &self,
        connection: &mut PgConnection,
        plans: &[Plan],
    ) -> Result<Vec<bool>, sqlx::Error> {
        let mut survey = self.inner.line.glance(connection, plans).await?;
        let mut places = Vec::new();
        let waiters: Vec<Option<Waiter<'_>>> = plans
            .iter()
            .enumerate()
            .map(|(index, plan)| {
                let takes_place = self.too_large(plan).is_none();
                takes_place.then(|| wait_in_line(index, plan, &[], &mut survey, &mut places)).flatten()
            })
            .collect();
        // A newcomer that a limit may end is put off only if none does.
        let ends = |waiter: &Waiter<'_>| waiter.waited.is_none() && waiter.plan.may_end();
        let newcomers = waiters.iter().flatten().filter(|waiter| ends(waiter)).map(|waiter| waiter.plan);
        let fitting = tokio::time::timeout(ANSWERS_TIMEOUT, self.fitting(newcomers)).await.ok().flatten();
        let fits = |waiter: &Waiter<'_>| {
            let mut charges = waiter.plan.charges.iter().filter(|charge| charge.ends());
            fitting
                .as_ref()
                .is_some_and(|all| charges.all(|charge| all.contains(&(charge.line, charge.cost))))
        };
        let waits = |waiter: &Option<Waiter<'_>>| waiter.as_ref().is_some_and(|one| !ends(one) || fits(one));
        Ok(waiters.iter().map(waits).collect())
    }

    /// Which charges fit now, of those of these jobs that end a job; `None` if the limits cannot be asked.
    #[cfg(feature = "apalis")]
    async fn fitting<'a>(&self, plans: impl Iterator<Item = &'a Plan>) -> Option<HashSet<(Uuid, u64)>> {
        let mut asked: Asked<'a> = BTreeMap::new();
        for charge in plans.flat_map(|plan| &plan.charges).filter(|charge| charge.ends()) {
            asked.entry(charge.line).or_insert((charge, BTreeSet::new())).1.insert(charge.cost);
        }
        let outcomes = self.peek_each(asked).await?;
        Some(outcomes.into_iter().filter(|(_, outcome)| outcome.is_allowed()).map(|(pair, _)| pair).collect())
    }

    /// Puts off those of these jobs that have to wait, in the order in which they are given; the transaction is the caller's, who calls
    /// [`have_put_off`](Self::have_put_off) when it has ended. `None` if the limits cannot be asked, or not in time: then nothing was written.
    ///
    /// A sleep that only goes on, with the same slot, is not written in the line: that row would cost as much as the framework's own, which
    /// has the time.
    pub(crate) async fn put_off_many(
        &self,
        connection: &mut PgConnection,
        plans: &[Plan],
        sleep: Sleep<'_>,
    ) -> Result<Option<PutOffs>, sqlx::Error> {
        let mut survey = self.inner.line.survey(&mut *connection, plans).await?;
        let mut places = Vec::new();
        let mut waiters: Vec<Waiter<'_>> = plans
            .iter()
            .enumerate()
            .filter(|(_, plan)| self.too_large(plan).is_none())
            .filter_map(|(index, plan)| {
                let waiter = wait_in_line(index, plan, sleep.denied(index), &mut survey, &mut places)?;
                let closed = waiter.closed.clone().while_blocked(self.blocked(plan), plan);
                Some(Waiter { closed, ..waiter })
            })
            .collect();
        if waiters.is_empty() {
            return Ok(Some(PutOffs::default()));
        }
        let limits = self.limits_of(&waiters);
        let reckoning = tokio::time::timeout(ANSWERS_TIMEOUT, async {
            let turns = self.turns(&waiters, &limits).await?;
            match count_each_other(&mut waiters, &turns, &limits, &mut survey, &mut places) {
                true => self.turns(&waiters, &limits).await,
                false => Some(turns),
            }
        });
        let Ok(Some(turns)) = reckoning.await else { return Ok(None) };
        let now_us = survey.now_us();
        let (mut slots, mut put_offs) = (Vec::new(), PutOffs::default());
        let (mut stays_out, mut have_room) = (BTreeSet::new(), BTreeSet::new());
        for (waiter, turn) in waiters.iter().zip(turns) {
            let Some(turn) = turn else {
                // It can never run; a worker will say so.
                stays_out.insert(waiter.plan.job.as_str());
                continue;
            };
            let Turn { wait, binding, .. } = turn;
            if waiter.waited.is_some() && wait <= SHORT_WAIT {
                // Its turn has come after all: it is charged when it is claimed.
                stays_out.insert(waiter.plan.job.as_str());
                continue;
            }
            let span = turn.sleep(waiter.plan, now_us, Some(waiter.since_us));
            let until_us = now_us.saturating_add(micros(span));
            let ends_us = sleep.ends_us(waiter.index);
            let has_changed = waiter.has_changed(&turn, &survey);
            if ends_us.is_some_and(|ends_us| !is_worth_it(now_us, ends_us, until_us, span >= wait))
                && !has_changed
            {
                continue;
            }
            let is_claimed = matches!(sleep, Sleep::IsOverAndClaimed(_));
            let is_soon = is_claimed && wait <= SHORT_WAIT && waiter.closed.start_us == 0;
            let limit = waiter.plan.charges[binding].limit.clone();
            // A time that has hardly moved stays: to write it would cost as much as all the rest.
            let slot_us = now_us.saturating_add(micros(wait));
            let had = waiter.waited.as_ref().filter(|had| had.slot_us.abs_diff(slot_us) <= SLOT_STAYS_US);
            if ends_us.is_none() || has_changed || had.is_none_or(|had| had.binding != limit) {
                let slot_us = had.map_or(slot_us, |had| had.slot_us);
                let (binding, parked) = (limit.clone(), turn.parked(waiter.plan));
                slots.push(NewSlot { plan: waiter.plan, slot_us, until_us, binding, parked });
            }
            for line in turn.parked(waiter.plan) {
                if survey.place_of(waiter.plan, line).is_some_and(|place| !place.is_parked) {
                    *put_offs.left.entry(line).or_default() += 1;
                    if turn.has_room(waiter.plan, line) {
                        have_room.insert(line);
                    }
                }
            }
            let (index, is_its_turn) = (waiter.index, span >= turn.sleep);
            put_offs.jobs.push(PutOff { index, until_us, sleep: span, is_soon, limit, binding, is_its_turn });
        }
        put_offs.left.retain(|line, _| have_room.contains(line));
        places.retain(|place: &NewPlace<'_>| !stays_out.contains(place.job));
        if !slots.is_empty() {
            self.inner.line.write(connection, &slots, &places).await?;
        }
        Ok(Some(put_offs))
    }

    /// Reports jobs that were put off, when that is written, and calls the next jobs of lines in which these do not count any more. A sleep that
    /// only goes on is no delay.
    pub(crate) async fn have_put_off(&self, plans: &[Plan], sleep: Sleep<'_>, put_offs: &PutOffs) {
        for one in put_offs.jobs.iter().filter(|one| !one.is_soon) {
            match sleep {
                Sleep::GoesOn(_) if one.is_its_turn => self.inner.wakes.push(one.sleep),
                Sleep::GoesOn(_) => {}
                Sleep::IsOver | Sleep::IsOverAndClaimed(_) => {
                    self.note_delay(&plans[one.index], one.sleep, one.binding, one.is_its_turn);
                }
            }
        }
        if put_offs.left.is_empty() {
            return;
        }
        // The rows of those jobs may be locked by a page whose transaction waits for this caller.
        let (gate, left) = (self.downgrade(), put_offs.left.clone());
        tokio::spawn(async move {
            if let Some(gate) = gate.upgrade() {
                gate.call_behind(&left).await;
            }
        });
    }

    /// When it is the turn of each; `None` if the store cannot be asked, and for one that never has its turn.
    async fn turns(
        &self,
        waiters: &[Waiter<'_>],
        limits: &HashMap<Uuid, Option<Limit>>,
    ) -> Option<Vec<Option<Turn>>> {
        let answers = self.answers(waiters, limits).await?;
        let turn = |waiter: &Waiter<'_>| {
            let asked = (0..).zip(&waiter.plan.charges).filter_map(|(index, charge)| {
                let limit = limits.get(&charge.line)?.as_ref()?;
                let answer = answers.get(&(charge.line, probe(limit, charge, waiter.ahead[index])))?;
                Some((index, limit, answer))
            });
            reckon(waiter.plan, &waiter.ahead, &waiter.closed, asked)
        };
        Some(waiters.iter().map(turn).collect())
    }

    /// The numbers that the charges of these jobs go by.
    fn limits_of(&self, waiters: &[Waiter<'_>]) -> HashMap<Uuid, Option<Limit>> {
        let mut limits = HashMap::new();
        for charge in waiters.iter().flat_map(|waiter| &waiter.plan.charges) {
            limits.entry(charge.line).or_insert_with(|| self.numbers(charge));
        }
        limits
    }

    /// What each limit answers to each probe; `None` if the store cannot be asked.
    async fn answers(
        &self,
        waiters: &[Waiter<'_>],
        limits: &HashMap<Uuid, Option<Limit>>,
    ) -> Option<HashMap<(Uuid, u64), Outcome>> {
        let mut asked: Asked<'_> = BTreeMap::new();
        for waiter in waiters {
            for (charge, ahead) in waiter.plan.charges.iter().zip(&waiter.ahead) {
                if let Some(Some(limit)) = limits.get(&charge.line) {
                    let (_, probes) = asked.entry(charge.line).or_insert((charge, BTreeSet::new()));
                    probes.insert(probe(limit, charge, *ahead));
                }
            }
        }
        let outcomes = self.peek_each(asked).await?;
        Some(outcomes.into_iter().map(|(probe, outcome)| (probe, *outcome.numbers())).collect())
    }

    /// What each of these limits answers to each of these costs; `None` if the store cannot be asked.
    async fn peek_each(&self, mut asked: Asked<'_>) -> Option<HashMap<(Uuid, u64), tollgate::Outcome>> {
        let mut answers = HashMap::new();
        while !asked.is_empty() {
            // A pair of limit and key is in a call once: costs of the same pair would add up.
            let mut probes: Vec<(Uuid, u64)> = Vec::new();
            let mut charges = Vec::new();
            for (line, (charge, costs)) in asked.iter_mut().take(CHARGES) {
                if let Some(cost) = costs.pop_first() {
                    probes.push((*line, cost));
                    charges.push(Charge::new(&charge.limit, charge.key()).cost(cost));
                }
            }
            asked.retain(|_, (_, costs)| !costs.is_empty());
            let decision = self.inner.tollgate.peek(&charges).await.ok()?;
            if decision.outcomes().iter().any(|outcome| outcome.source().is_fallback()) {
                return None;
            }
            answers.extend(probes.into_iter().zip(decision.outcomes().iter().copied()));
        }
        Some(answers)
    }
}

/// What stands before a job, and the places that it takes; `None` if it is to be left for a worker to claim.
fn wait_in_line<'a>(
    index: usize,
    plan: &'a Plan,
    denied: &[bool],
    survey: &mut Survey,
    places: &mut Vec<NewPlace<'a>>,
) -> Option<Waiter<'a>> {
    if plan.lacks.is_some() || plan.charges.is_empty() {
        return None;
    }
    let now_us = survey.now_us();
    let closed_us = plan.closable.iter().filter_map(|key| survey.closed.get(key)).max().copied();
    let start_us = closed_us.map_or(0, |until_us| until_us.saturating_sub(now_us));
    let is_closed = |charge: &PlannedCharge| charge.is_closed_by(|key| survey.closed.contains_key(key));
    let closed = Closed::of(plan, start_us, is_closed);
    let waiting = survey.waiting.get(&plan.job).cloned();
    let ahead = |charge: &PlannedCharge| match survey.place_of(plan, charge.line) {
        Some(place) => place.ahead,
        None => survey.lines.get(&charge.line).map_or(0, |line| line.ahead),
    };
    let ahead: Vec<u64> = plan.charges.iter().map(ahead).collect();
    if let Some(waiting) = waiting {
        let is_due = waiting.slot_us <= now_us.saturating_add(micros(SHORT_WAIT));
        if (is_due && closed_us.is_none()) || plan.is_given_up(now_us, Some(waiting.since_us)) {
            return None;
        }
        return Some(Waiter {
            index,
            plan,
            ahead,
            closed,
            since_us: waiting.since_us,
            waited: Some(waiting),
            takes: Vec::new(),
        });
    }
    if closed_us.is_none() && ahead.iter().all(|ahead| *ahead == 0) && !denied.contains(&true) {
        return None;
    }
    let mut takes = Vec::new();
    for (index, (charge, ahead)) in plan.charges.iter().zip(&ahead).enumerate() {
        let is_denied = denied.get(index) == Some(&true);
        if *ahead == 0 && !is_denied && !charge.is_closed_by(|key| survey.closed.contains_key(key)) {
            continue;
        }
        takes.push(charge.line);
        places.push(survey.take_place(plan, charge));
    }
    Some(Waiter { index, plan, ahead, closed, since_us: now_us, waited: None, takes })
}

/// Lets jobs that are put off together count each other where that was not known before their turns were reckoned: one that a limit holds up
/// takes a place in its line, and one whose place was parked may count again, for those behind it. Answers whether their turns are others now.
fn count_each_other<'a>(
    waiters: &mut [Waiter<'a>],
    turns: &[Option<Turn>],
    limits: &HashMap<Uuid, Option<Limit>>,
    survey: &mut Survey,
    places: &mut Vec<NewPlace<'a>>,
) -> bool {
    let waits = |turn: &Option<Turn>| turn.as_ref().is_some_and(|turn| turn.wait > SHORT_WAIT);
    let mut counted: HashMap<Uuid, Vec<(u64, u64)>> = HashMap::new();
    for (waiter, turn) in waiters.iter().zip(turns) {
        let Some(turn) = turn else { continue };
        for (index, charge) in waiter.plan.charges.iter().enumerate() {
            let place = survey.place_of(waiter.plan, charge.line).filter(|place| place.is_parked);
            if let Some(place) = place.filter(|_| !turn.is_parked(index)) {
                counted.entry(charge.line).or_default().push((place.place, charge.cost));
            }
        }
    }
    for line in counted.values_mut() {
        line.sort_unstable();
        let mut sum = 0_u64;
        for (_, units) in line.iter_mut() {
            sum = sum.saturating_add(*units);
            *units = sum;
        }
    }
    let before = |line: Uuid, place: u64| {
        let line = counted.get(&line)?;
        let count = line.partition_point(|(other, _)| *other < place);
        Some(line[count.checked_sub(1)?].1)
    };
    for (line, units) in &counted {
        let end = survey.lines.entry(*line).or_default();
        end.ahead = end.ahead.saturating_add(units.last().map_or(0, |(_, sum)| *sum));
    }
    let mut are_others = false;
    for (waiter, turn) in waiters.iter_mut().zip(turns) {
        let binding = turn.as_ref().filter(|_| waits(turn)).map(|turn| turn.binding);
        for (index, charge) in waiter.plan.charges.iter().enumerate() {
            let units = match survey.place_of(waiter.plan, charge.line) {
                Some(place) => before(charge.line, place.place),
                None if waiter.takes.contains(&charge.line) => before(charge.line, u64::MAX),
                None => None,
            };
            if let Some(units) = units {
                waiter.ahead[index] = waiter.ahead[index].saturating_add(units);
                are_others = true;
            }
            let is_counted = limits.get(&charge.line).is_some_and(Option::is_some);
            let has_place =
                || survey.place_of(waiter.plan, charge.line).is_some() || waiter.takes.contains(&charge.line);
            // One that waits for a closed key is called with those in its line when that is opened.
            let is_held_up = binding == Some(index) || binding.is_some() && waiter.closed.is_of(index);
            if is_held_up && is_counted && !has_place() {
                waiter.ahead[index] = survey.lines.get(&charge.line).map_or(0, |line| line.ahead);
                waiter.takes.push(charge.line);
                places.push(survey.take_place(waiter.plan, charge));
                are_others = true;
            }
        }
    }
    are_others
}

/// Whether a job that sleeps is to sleep until another time: half of its sleep has passed, or it will not have to be put off again.
fn is_worth_it(now_us: u64, slept_until_us: u64, until_us: u64, is_its_turn: bool) -> bool {
    let (left, whole) = (slept_until_us.saturating_sub(now_us), until_us.saturating_sub(now_us));
    is_its_turn || left <= whole / 2
}

/// The cost to ask a limit about, of which there are not more than [`PROBES`].
fn probe(limit: &Limit, charge: &PlannedCharge, ahead: u64) -> u64 {
    let (probe, capacity) = (limit.turn_probe(charge.cost(), ahead).get(), limit.capacity());
    // Whether the first in line may run now is asked exactly: the last unit that is left is for it.
    if probe > capacity || ahead == 0 {
        return probe;
    }
    let step = capacity.div_ceil(PROBES).max(1);
    probe.div_ceil(step).saturating_mul(step).min(capacity)
}

/// How many jobs that stand in these lines are put off at once: at least one.
pub(crate) fn in_few_lines(lines: impl Iterator<Item = Vec<Uuid>>) -> usize {
    let mut all = HashSet::new();
    let fits = lines.enumerate().take_while(|(index, lines)| {
        all.extend(lines.iter().copied());
        *index == 0 || all.len() <= MOST_LINES
    });
    fits.count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::policy::{JobPolicy, Jobs};

    #[test]
    fn a_sleeper_is_written_again_when_half_of_its_sleep_has_passed() {
        let second = 1_000_000;
        // Longest sleep of five seconds: written a second ago, three seconds ago, and due now.
        assert!(!is_worth_it(100 * second, 104 * second, 105 * second, false));
        assert!(is_worth_it(100 * second, 102 * second, 105 * second, false));
        assert!(is_worth_it(100 * second, 100 * second, 105 * second, false));
        // Its turn is within the longest sleep now: it is written once more, and then it sleeps until its turn.
        assert!(is_worth_it(100 * second, 104 * second, 105 * second, true));
        assert!(is_worth_it(100 * second, 104 * second, 103 * second, true));
    }

    #[test]
    fn probes_are_few_and_never_too_small() {
        let second = Duration::from_secs(1);
        for limit in [1, 20, 64, 65, 200, 1_000, 100_000] {
            let jobs = Jobs::new().job("a", JobPolicy::new().with_rate_limit(limit, second));
            let plan = Plan::of(&jobs, &Job::new("1", "a", "q"), |_| false).unwrap();
            let (charge, limit) = (&plan.charges[0], Limit::sliding_window(limit, second).unwrap());
            let mut all = BTreeSet::new();
            for ahead in 0..3_000 {
                let exact = limit.turn_probe(charge.cost(), ahead).get();
                let rounded = probe(&limit, charge, ahead);
                assert!(rounded >= exact && rounded <= limit.capacity(), "{limit:?}: {rounded} for {exact}");
                all.insert(rounded);
            }
            assert!(all.len() <= 65, "{limit:?}: {} probes", all.len());
            assert_eq!(probe(&limit, charge, 0), 1, "the first in line is asked about exactly");
        }
        let bucket = Limit::token_bucket("5/s", 5).unwrap();
        let jobs = Jobs::new().job("a", JobPolicy::new().with_limit(bucket));
        let plan = Plan::of(&jobs, &Job::new("1", "a", "q"), |_| false).unwrap();
        let all: BTreeSet<u64> = (0..100).map(|ahead| probe(&bucket, &plan.charges[0], ahead)).collect();
        assert_eq!(all.len(), 1, "a bucket is asked once");
    }

    #[test]
    fn those_put_off_in_batch_stand_in_few_lines() {
        let line = |number: u128| Uuid::from_u128(number);
        assert_eq!(in_few_lines([].into_iter()), 0);
        assert_eq!(in_few_lines((0..1_000).map(|_| vec![line(1), line(2)])), 1_000, "all stand in the same");
        assert_eq!(in_few_lines((0..1_000).map(|number| vec![line(number)])), 256);
        assert_eq!(in_few_lines((1..1_000).map(|number| vec![line(0), line(number)])), 255);
        assert_eq!(in_few_lines((0..10).map(|_| (0..1_000).map(line).collect())), 1);
        assert_eq!(
            in_few_lines((0..1_000).map(|_| Vec::new())),
            1_000,
            "what meets no policy stands in none"
        );
    }
}
