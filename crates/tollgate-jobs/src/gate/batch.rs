//! Jobs that come at the same time and have to wait take their places together.
//!
//! A worker claims many jobs at once. If they are of one key that is over its limit, each of them would be charged, take a place, ask for its
//! turn and write its slot, all at one line and so one after the other, before whatever was claimed behind them. Three rules keep that short:
//!
//! - Of the jobs of one key, a few are charged at a time. If one of them is denied, those that have looked at the line before it stood there are
//!   not charged any more: they stand behind it.
//! - One transaction at a time puts jobs off, by the code that puts off what is read ahead (`bulk.rs`). Those that come meanwhile wait for it and then go
//!   together; they hold one connection between them, and none while their line is locked.
//! - A job of a key whose jobs are being put off by the hundred (`adapter/ahead.rs`), or where another has just found a long line, does not look or
//!   charge first: it goes there at once.
//!
//! A job that cannot be put off in this way goes alone, as without it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use uuid::Uuid;

use super::JobGate;
use super::bulk::{PutOff, Sleep, in_few_lines};
use super::decision::Delay;
use crate::plan::Plan;

/// How many jobs of one key are charged at once by one process. A store has two to four calls of one key in flight.
const CHARGED_AT_ONCE: usize = 8;

/// How many jobs are put off in one transaction.
const MOST_JOBS: usize = 2_000;

/// The pause before lines are tried again that others have locked, and how often they are tried before a job goes alone.
const PAUSE: Duration = Duration::from_millis(20);
const ATTEMPTS: u32 = 250;

/// How long one transaction may take: all that come meanwhile wait for it.
const PLACED_WITHIN: Duration = Duration::from_secs(5);

/// How many jobs of one line make a crowd, and for how long one is expected where a job found it.
const CROWD: usize = 50;
const EXPECTED: Duration = Duration::from_millis(250);

/// For how long a denial is remembered: longer than a job waits to be charged.
const REMEMBERED: Duration = Duration::from_secs(60);
const MOST_REMEMBERED: usize = 10_000;

/// Who is charged, who was denied, and who is about to take a place, in this process.
#[derive(Debug, Default)]
pub(super) struct Batcher {
    charging: Mutex<HashMap<Uuid, Arc<Semaphore>>>,
    denied: Mutex<HashMap<Uuid, Denials>>,
    /// Until when it is to be expected that a job of this line has to wait.
    crowded: Mutex<HashMap<Uuid, Instant>>,
    newcomers: Mutex<Newcomers>,
}

/// The jobs that were denied at one line.
#[derive(Clone, Copy, Debug)]
struct Denials {
    /// How many of them have no place yet.
    pending: usize,
    /// When the last of the others had it.
    placed: Instant,
}

#[derive(Debug, Default)]
struct Newcomers {
    waiting: Vec<Newcomer>,
    /// Those whose lines were locked, and when they are tried again: before others, which they do not hold up meanwhile.
    held_up: Vec<Newcomer>,
    again: Option<Instant>,
    is_served: bool,
}

/// What is to be done for newcomers.
enum Next {
    Place(Vec<Newcomer>),
    Pause(Instant),
    End,
}

/// A job that is to take its places.
#[derive(Debug)]
struct Newcomer {
    plan: Plan,
    /// The limits that have denied it.
    denied: Vec<bool>,
    attempts: u32,
    answer: oneshot::Sender<Placed>,
}

/// What became of a job that was to take its places.
#[derive(Debug)]
pub(super) enum Placed {
    /// It is put off.
    Delayed(Delay),
    /// It has its places, and its turn comes after this short wait.
    Soon(Duration),
    /// It may be its turn, or it is to end, or none of this could be found out.
    Alone,
}

/// A job's leave to be charged, until it is dropped.
pub(super) struct Charging<'a> {
    batcher: &'a Batcher,
    line: Option<Uuid>,
    permit: Option<OwnedSemaphorePermit>,
}

/// A job that was denied and has no place yet, until it is dropped.
pub(super) struct Denied<'a> {
    batcher: &'a Batcher,
    lines: Vec<Uuid>,
}

impl Drop for Denied<'_> {
    fn drop(&mut self) {
        let (now, mut all) = (Instant::now(), self.batcher.denied.lock());
        for line in &self.lines {
            if let Some(denials) = all.get_mut(line) {
                denials.pending = denials.pending.saturating_sub(1);
                denials.placed = now;
            }
        }
    }
}

impl Drop for Charging<'_> {
    fn drop(&mut self) {
        drop(self.permit.take());
        let Some(line) = self.line else { return };
        let mut charging = self.batcher.charging.lock();
        if charging.get(&line).is_some_and(|all| Arc::strong_count(all) == 1) {
            charging.remove(&line);
        }
    }
}

impl Batcher {
    /// Waits until a job may be charged. Its first limit counts: it is the most particular one.
    pub(super) async fn charging(&self, plan: &Plan) -> Charging<'_> {
        let line = plan.charges.first().map(|charge| charge.line);
        let mut charging = Charging { batcher: self, line, permit: None };
        if let Some(line) = line {
            let few = || Arc::new(Semaphore::new(CHARGED_AT_ONCE));
            let all = self.charging.lock().entry(line).or_insert_with(few).clone();
            charging.permit = all.acquire_owned().await.ok();
        }
        charging
    }

    /// Notes that a job was denied by these limits and is about to stand in their lines.
    pub(super) fn deny(&self, plan: &Plan, denied: &[bool]) -> Denied<'_> {
        let (now, mut all) = (Instant::now(), self.denied.lock());
        // Those that are forgotten cost a charge that is denied.
        forget(&mut all, |denials| denials.pending > 0 || now.duration_since(denials.placed) < REMEMBERED);
        let lines = plan.charges.iter().zip(denied).filter(|(_, is_denied)| **is_denied);
        let lines: Vec<Uuid> = lines.map(|(charge, _)| charge.line).collect();
        for line in &lines {
            all.entry(*line).or_insert(Denials { pending: 0, placed: now }).pending += 1;
        }
        Denied { batcher: self, lines }
    }

    /// Which limits of a job that looked at its lines at that time have denied another one, whose place it may not have seen; `None` if
    /// none has.
    pub(super) fn denied_since(&self, plan: &Plan, looked: Instant) -> Option<Vec<bool>> {
        let all = self.denied.lock();
        let is_denied = |line: &Uuid| all.get(line).is_some_and(|one| one.pending > 0 || one.placed > looked);
        let denied: Vec<bool> = plan.charges.iter().map(|charge| is_denied(&charge.line)).collect();
        denied.contains(&true).then_some(denied)
    }

    /// Notes that these jobs are about to be put off, or just were: for so long, more of their keys may be in the hands of workers.
    #[cfg(feature = "apalis")]
    pub(super) fn expect_crowd(&self, plans: &[Plan], span: Duration) {
        let mut counts: HashMap<Uuid, usize> = HashMap::new();
        for charge in plans.iter().flat_map(|plan| &plan.charges) {
            *counts.entry(charge.line).or_default() += 1;
        }
        let (now, mut all) = (Instant::now(), self.crowded.lock());
        forget(&mut all, |until| *until > now);
        let crowds = counts.into_iter().filter(|(_, count)| *count >= CROWD);
        all.extend(crowds.map(|(line, _)| (line, now + span)));
    }

    /// Notes that a newcomer found so many before it: others that were claimed with it will find them too.
    pub(super) fn found(&self, plan: &Plan, ahead: &[u64]) {
        let is_crowd = |ahead: &u64| usize::try_from(*ahead).is_ok_and(|ahead| ahead >= CROWD);
        let mut crowds = plan.charges.iter().zip(ahead).filter(|(_, ahead)| is_crowd(ahead)).peekable();
        if crowds.peek().is_some() {
            let (now, mut all) = (Instant::now(), self.crowded.lock());
            forget(&mut all, |until| *until > now);
            for (charge, _) in crowds {
                let until = all.entry(charge.line).or_insert(now);
                *until = (*until).max(now + EXPECTED);
            }
        }
    }

    /// Whether it is to be expected that a job has to wait. It is found out in the line, all the same.
    pub(super) fn is_crowded(&self, plan: &Plan) -> bool {
        let all = self.crowded.lock();
        let is_crowded = |line: &Uuid| all.get(line).is_some_and(|until| *until > Instant::now());
        !all.is_empty() && plan.charges.iter().any(|charge| is_crowded(&charge.line))
    }

    /// Adds a job; answers whether somebody has to serve them.
    fn join(&self, newcomer: Newcomer) -> bool {
        let mut newcomers = self.newcomers.lock();
        newcomers.waiting.push(newcomer);
        !std::mem::replace(&mut newcomers.is_served, true)
    }

    /// The next that go together, in the order in which they came.
    fn next(&self, now: Instant) -> Next {
        let mut all = self.newcomers.lock();
        if all.again.is_some_and(|again| again <= now) {
            let mut waiting = std::mem::take(&mut all.held_up);
            waiting.append(&mut all.waiting);
            (all.waiting, all.again) = (waiting, None);
        }
        let count = in_few_lines(all.waiting.iter().map(|newcomer| newcomer.plan.lines()).take(MOST_JOBS));
        match (count, all.again) {
            (0, None) => {
                all.is_served = false;
                Next::End
            }
            (0, Some(again)) => Next::Pause(again),
            _ => Next::Place(all.waiting.drain(..count).collect()),
        }
    }

    /// Keeps those whose lines are locked until they are tried again. One that was kept too often is dropped: it goes alone, and waits for
    /// the locks.
    fn keep(&self, mut held_up: Vec<Newcomer>, now: Instant) {
        held_up.iter_mut().for_each(|newcomer| newcomer.attempts += 1);
        held_up.retain(|newcomer| newcomer.attempts < ATTEMPTS);
        if !held_up.is_empty() {
            let mut all = self.newcomers.lock();
            all.held_up.append(&mut held_up);
            all.again = all.again.or(Some(now + PAUSE));
        }
    }
}

/// Bounds what is remembered.
fn forget<T>(all: &mut HashMap<Uuid, T>, is_kept: impl Fn(&T) -> bool) {
    if all.len() >= MOST_REMEMBERED {
        all.retain(|_, one| is_kept(one));
    }
    if all.len() >= MOST_REMEMBERED {
        all.clear();
    }
}

/// Serves newcomers. Should it be ended before its time, all of them go alone.
struct Service {
    gate: JobGate,
    is_over: bool,
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.is_over {
            *self.gate.inner.batcher.newcomers.lock() = Newcomers::default();
        }
    }
}

impl JobGate {
    /// See [`Batcher::expect_crowd`].
    #[cfg(feature = "apalis")]
    pub(crate) fn expect_crowd(&self, plans: &[Plan], span: Duration) {
        self.inner.batcher.expect_crowd(plans, span);
    }

    /// Gives a job that was denied by these limits, or finds others in line, its places and its time, together with others.
    pub(super) async fn put_off_in_batch(&self, plan: &Plan, denied: &[bool]) -> Placed {
        let (answer, answered) = oneshot::channel();
        let newcomer = Newcomer { plan: plan.clone(), denied: denied.to_vec(), attempts: 0, answer };
        if self.inner.batcher.join(newcomer) {
            let service = Service { gate: self.clone(), is_over: false };
            tokio::spawn(async move { service.serve().await });
        }
        answered.await.unwrap_or(Placed::Alone)
    }

    /// Puts off those of these jobs whose lines nobody has locked; answers the others.
    async fn place(&self, newcomers: Vec<Newcomer>) -> Result<Vec<Newcomer>, sqlx::Error> {
        let line = &self.inner.line;
        let lines: BTreeSet<Uuid> = newcomers.iter().flat_map(|newcomer| newcomer.plan.lines()).collect();
        let lines: Vec<Uuid> = lines.into_iter().collect();
        let mut transaction = line.pool.begin().await?;
        let locked: HashSet<Uuid> = line.try_lock(&mut transaction, &lines).await?.into_iter().collect();
        let is_free = |newcomer: &Newcomer| newcomer.plan.lines().iter().all(|line| locked.contains(line));
        let (free, held_up): (Vec<_>, Vec<_>) = newcomers.into_iter().partition(is_free);
        if free.is_empty() {
            return Ok(held_up);
        }
        let (mut plans, mut denied, mut answers) = (Vec::new(), Vec::new(), Vec::new());
        for newcomer in free {
            plans.push(newcomer.plan);
            denied.push(newcomer.denied);
            answers.push(Some(newcomer.answer));
        }
        let sleep = Sleep::IsOverAndClaimed(&denied);
        let put_offs = self.put_off_many(&mut transaction, &plans, sleep).await?.unwrap_or_default();
        transaction.commit().await?;
        for PutOff { index, until_us, sleep, is_soon, limit, .. } in &put_offs.jobs {
            let placed = match is_soon {
                true => Placed::Soon(*sleep),
                false => {
                    Placed::Delayed(Delay { wait: *sleep, until_us: Some(*until_us), limit: limit.clone() })
                }
            };
            if let Some(answer) = answers[*index].take() {
                // A worker that was stopped meanwhile does not hear it; its job keeps the place.
                let _ = answer.send(placed);
            }
        }
        self.have_put_off(&plans, sleep, &put_offs).await;
        Ok(held_up)
    }
}

impl Service {
    async fn serve(mut self) {
        loop {
            let batcher = &self.gate.inner.batcher;
            match batcher.next(Instant::now()) {
                Next::Place(newcomers) => {
                    match tokio::time::timeout(PLACED_WITHIN, self.gate.place(newcomers)).await {
                        Ok(Ok(held_up)) => batcher.keep(held_up, Instant::now()),
                        Ok(Err(error)) => {
                            tracing::debug!(%error, "jobs cannot take their places together; each goes alone");
                        }
                        Err(_) => tracing::debug!("jobs wait long for their places; each goes alone"),
                    }
                }
                Next::Pause(until) => tokio::time::sleep_until(until.into()).await,
                Next::End => break,
            }
        }
        self.is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::job::Job;
    use crate::policy::{JobPolicy, Jobs};

    fn plan(job: &str, tenant: &str) -> Plan {
        let second = Duration::from_secs(1);
        let policies = Jobs::new()
            .job("a", JobPolicy::new().with_rate_limit(5, second).key("tenant"))
            .queue("q", JobPolicy::new().with_rate_limit(50, second));
        let metadata = |name: &str| (name == "tenant").then(|| tenant.to_owned());
        Plan::of(&policies, &Job::new(job, "a", "q").with_metadata(&metadata), |_| false).unwrap()
    }

    fn ready<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn a_few_jobs_of_a_key_are_charged_at_once() {
        let batcher = Batcher::default();
        let (one, other) = (plan("1", "one"), plan("2", "other"));
        let mut first: Vec<_> = Vec::new();
        for _ in 0..CHARGED_AT_ONCE {
            first.push(batcher.charging(&one).await);
        }
        let mut waiting = pin!(batcher.charging(&one));
        assert!(ready(waiting.as_mut()).is_none(), "eight are charged at once");
        let of_other = ready(pin!(batcher.charging(&other))).expect("another key is charged");
        first.pop();
        let waited = ready(waiting.as_mut()).expect("the next is charged");
        drop((first, waited, of_other));
        assert!(batcher.charging.lock().is_empty(), "nothing is kept of keys that nobody is charged by");
    }

    #[test]
    fn a_denial_counts_for_those_that_looked_before_its_job_stood_in_line() {
        let batcher = Batcher::default();
        let (one, other) = (plan("1", "one"), plan("2", "other"));
        let before = Instant::now();
        assert_eq!(batcher.denied_since(&one, before), None);
        let denied = batcher.deny(&one, &[true, false]);
        let meanwhile = Instant::now();
        assert_eq!(batcher.denied_since(&one, meanwhile), Some(vec![true, false]), "it has no place yet");
        assert_eq!(batcher.denied_since(&other, meanwhile), None, "another key");
        drop(denied);
        assert_eq!(batcher.denied_since(&one, before), Some(vec![true, false]), "it may not have been seen");
        let after = Instant::now() + Duration::from_millis(1);
        assert_eq!(batcher.denied_since(&one, after), None, "its place is seen");
        let _denied = batcher.deny(&one, &[false, true]);
        assert_eq!(batcher.denied_since(&other, after), Some(vec![false, true]), "the queue is both's");
    }

    #[cfg(feature = "apalis")]
    #[test]
    fn a_crowd_is_one_of_a_line_and_not_of_many() {
        let batcher = Batcher::default();
        let of = |tenant: &str, count: usize| vec![plan("1", tenant); count];
        batcher.expect_crowd(&of("one", CROWD - 1), Duration::from_secs(60));
        assert!(!batcher.is_crowded(&plan("2", "one")));
        let queue = Jobs::new().queue("other", JobPolicy::new().with_rate_limit(1, Duration::from_secs(1)));
        let alone = Plan::of(&queue, &Job::new("3", "b", "other"), |_| false).unwrap();
        batcher.expect_crowd(&of("one", CROWD), Duration::from_secs(60));
        assert!(batcher.is_crowded(&plan("2", "one")));
        assert!(batcher.is_crowded(&plan("2", "other")), "the queue's line is both's");
        assert!(!batcher.is_crowded(&alone));
        batcher.found(&alone, &[49]);
        assert!(!batcher.is_crowded(&alone));
        batcher.found(&alone, &[50]);
        assert!(batcher.is_crowded(&alone), "a job found as many before it");
    }

    #[test]
    fn newcomers_go_in_their_order_and_those_that_were_held_up_go_first() {
        let batcher = Batcher::default();
        let now = Instant::now();
        let join = |job: &str| {
            let (answer, _) = oneshot::channel();
            batcher.join(Newcomer { plan: plan(job, job), denied: Vec::new(), attempts: 0, answer })
        };
        let next = |now| match batcher.next(now) {
            Next::Place(newcomers) => newcomers,
            Next::Pause(_) | Next::End => Vec::new(),
        };
        let jobs = |newcomers: &[Newcomer]| {
            newcomers.iter().map(|newcomer| newcomer.plan.job.clone()).collect::<Vec<String>>()
        };
        assert!(join("1") && !join("2"), "the first has all of them served");
        let newcomers = next(now);
        assert_eq!(jobs(&newcomers), ["1", "2"]);
        batcher.keep(newcomers, now);
        assert!(matches!(batcher.next(now), Next::Pause(until) if until == now + PAUSE));
        assert!(!join("3"));
        assert_eq!(jobs(&next(now)), ["3"], "one that comes meanwhile is not held up");
        assert!(!join("4"));
        let newcomers = next(now + PAUSE);
        assert_eq!(jobs(&newcomers), ["1", "2", "4"]);
        assert!(matches!(batcher.next(now), Next::End));
        assert!(join("5"), "somebody has to serve again");
        // Each tenant has a line, and the queue is one.
        (1_000..1_999).for_each(|job| assert!(!join(&job.to_string())));
        assert_eq!(next(now).len(), 255);
        // One that has been held up too often goes alone.
        let mut newcomers = newcomers;
        for _ in 0..ATTEMPTS {
            batcher.keep(std::mem::take(&mut newcomers), now);
            newcomers = std::mem::take(&mut batcher.newcomers.lock().held_up);
            batcher.newcomers.lock().again = None;
        }
        assert!(newcomers.is_empty(), "{newcomers:?}");
    }
}
