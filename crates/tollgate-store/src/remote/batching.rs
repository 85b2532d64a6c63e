//! Batches: sends concurrent checks to a remote store in one call.
//!
//! A call costs the server and the network several times as much as a decision, so many decisions in one call cost little more
//! than one. While calls are in flight, new checks wait; then they are sent as one batch, and each is still decided separately. A
//! check that finds a free slot is sent at once and alone. No check waits in the hope of others.
//!
//! All checks of a batch charge the same limit with the same cost. Checks wait in lanes, one for each limit, and each batch takes
//! a share of the store like any other call (`shares.rs`): a lane has a maximum of batches in flight, lanes are served in turn,
//! and a key has a maximum of checks in a lane. A lane is only as long as can be served in time; further checks fail at once, for
//! their own caller only. So a flood under one limit causes no timeout under another limit, and a flood of one key none for
//! another key.
//!
//! The store knows how to send a batch and read its answers ([`Carrier`]); this module decides which checks wait, which form a
//! batch, and until when. `redis/batch.rs`, `postgres/batch.rs` and `postgres/shared_commit.rs` are the carriers.

use std::collections::{HashSet, VecDeque};
use std::future::{Future, poll_fn};
use std::hash::BuildHasherDefault;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::smallvec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::shares::{ByClaim, Claim, ClaimHasher, Claims, Share, Shares, latest_start};
use crate::{Failure, StoreError};

/// A store that can carry many checks in one call.
pub(crate) trait Carrier: Clone + Send + Sync + 'static {
    /// What the checks of a batch have in common.
    type Alike: Clone + PartialEq + Send + Sync;
    /// What distinguishes the checks of a batch.
    type Key: Default + PartialEq + Send + Sync;
    /// The answer to one check.
    type Answer: Send;

    /// The most checks of a batch.
    const MAX_BATCH: usize;

    /// How often a key may be in a call, and in how many calls at a time.
    const REPEATS: Repeats;

    fn queue(&self) -> &Queue<Self>;

    /// The shares of all calls to the store.
    fn shares(&self) -> &Arc<Shares>;

    /// How many batches with the same `Alike` may be in flight before more of them wait.
    fn ways(&self) -> usize;

    /// How many batches of one limit may be in flight in all.
    fn lane_ways(&self) -> usize;

    /// Whether two checks with the same `Alike` are cheaper in two calls than in one, because both change the same row.
    fn are_cheaper_apart(&self, _alike: &Self::Alike, _one: &Self::Key, _other: &Self::Key) -> bool {
        false
    }

    /// Sends one call, and returns an answer for each key, in order. Calls `sent` once it may have been sent. A check that would
    /// have to wait for a lock of another transaction, and so was not charged, has no answer: it is sent again, alone, and then
    /// waits.
    fn carry(
        &self,
        alike: &Self::Alike,
        keys: &[Self::Key],
        locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> impl Future<Output = Result<Answers<Self::Answer>, StoreError>> + Send;
}

/// The answers for the checks of a batch, in order; see [`Carrier::carry`].
pub(crate) type Answers<A> = Vec<Option<Result<A, StoreError>>>;

/// What a call does if another transaction has locked a row that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locks {
    /// Skips the checks that need it.
    Skip,
    /// Waits. Then all checks are of one key.
    Wait,
}

/// How often a key may be in a call, and in how many calls at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeats {
    /// Any number of times in a call, in any number of calls.
    #[cfg_attr(
        not(any(feature = "redis", feature = "simulation")),
        allow(dead_code, reason = "only a server that works on one call at a time is so")
    )]
    Freely,
    /// Once in a call. A key with another call in flight is sent alone: it may have to wait for that call, and no other key
    /// should wait with it.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "a statement of PostgreSQL is so"))]
    Once,
    /// Any number of times in a call, but in one call at a time: checks of a key with a call in flight wait for its end, and then
    /// go in one batch.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "a function of PostgreSQL is so"))]
    InOneCall,
}

/// A check: what it charges, and the shares that it needs.
pub(crate) struct Check<C: Carrier> {
    pub(crate) alike: C::Alike,
    pub(crate) key: C::Key,
    /// The share of its key.
    pub(crate) of_key: Claim,
    /// Its lane: the claim of its limit, or one claim for all its limits.
    pub(crate) lane: Claim,
    /// The shares of its limits and its server, which a batch of the lane takes.
    pub(crate) of_batch: Claims,
}

/// The checks that wait to be sent.
pub(crate) struct Queue<C: Carrier> {
    lanes: Mutex<ByClaim<Lane<C>>>,
    /// The moving average of the time that a batch takes, in us.
    carry_us: AtomicU64,
}

/// The waiting checks of one limit. A lane exists while one of its batches is in flight, or about to be.
struct Lane<C: Carrier> {
    waiting: VecDeque<Waiting<C>>,
    /// How many tasks send batches of this lane.
    senders: usize,
    /// How many batches are in flight of each `Alike`.
    in_flight: Vec<(C::Alike, usize)>,
    /// The keys of the batches in flight, if a key may be in one batch at a time.
    keys_in_flight: HashSet<Claim, BuildHasherDefault<ClaimHasher>>,
    /// When the last batch was taken.
    sent: Option<Instant>,
}

/// A check that waits to be sent, or for its answer.
struct Waiting<C: Carrier> {
    check: Check<C>,
    deadline: Instant,
    /// The latest time at which it is worth sending.
    latest: Instant,
    stage: Arc<AtomicU8>,
    answer: oneshot::Sender<Result<C::Answer, StoreError>>,
    /// `Wait` if a batch has already skipped it.
    locks: Locks,
    _share: Share,
}

/// The progress of a check: it waits in its lane; it is in a batch; it may have been sent.
const WAITS: u8 = 0;
const TAKEN: u8 = 1;
const SENT: u8 = 2;

/// How long after its deadline a check waits for the result of its batch.
const GRACE: Duration = Duration::from_millis(10);

/// A batch that was sent within this time has probably not reached the store yet.
const JUST_SENT: Duration = Duration::from_micros(30);

/// How many checks of a lane are searched for those of the same `Alike`, in batches.
const LOOK_AHEAD: usize = 4;

/// The bounds of the length of a lane: the shortest in batches, the longest in checks.
const SHORTEST_LANE: usize = 4;
const LONGEST_LANE: usize = 65_536;

impl<C: Carrier> Default for Queue<C> {
    fn default() -> Queue<C> {
        Queue { lanes: Mutex::default(), carry_us: AtomicU64::new(0) }
    }
}

/// Makes a check, possibly in a batch with others.
pub(crate) async fn charge<C: Carrier>(
    carrier: &C,
    check: Check<C>,
    deadline: Instant,
) -> Result<C::Answer, StoreError> {
    let now = Instant::now();
    let latest = carrier.queue().latest_start(now, deadline);
    let share = carrier.shares().claim(smallvec![check.of_key], latest).await?;
    let (answer, answered) = oneshot::channel();
    let stage = Arc::new(AtomicU8::new(WAITS));
    let lane = check.lane;
    let waiting =
        Waiting { check, deadline, latest, stage: stage.clone(), answer, locks: Locks::Skip, _share: share };
    if let Some(of_batch) = carrier.queue().add(carrier, waiting, now)? {
        start_sender(carrier.clone(), lane, of_batch);
    }
    let mut answered = answered;
    let mut answer = timeout_at(deadline, &mut answered).await;
    if answer.is_err() && stage.load(Ordering::Relaxed) != WAITS {
        // The batch has the same deadline or an earlier one, so it ends now, and its result is more precise.
        answer = timeout_at(deadline + GRACE, answered).await;
    }
    match answer {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => {
            Err(StoreError::failed(Failure::Reply, "the task that asked the store is gone").ambiguous())
        }
        Err(_) => Err(match stage.load(Ordering::Relaxed) {
            WAITS => not_in_time(),
            TAKEN => StoreError::failed(
                Failure::Timeout,
                "the call did not get to the store in time, and was not sent",
            ),
            _ => StoreError::failed(Failure::Timeout, "the store did not answer in time").ambiguous(),
        }),
    }
}

fn not_in_time() -> StoreError {
    StoreError::own_share("more checks of this limit wait than can be served in time; this one was not sent")
}

fn start_sender<C: Carrier>(carrier: C, lane: Claim, of_batch: Claims) {
    tokio::spawn(async move { send_all(&carrier, lane, of_batch).await });
}

/// Sends batches of a lane until no check is left for this task.
async fn send_all<C: Carrier>(carrier: &C, lane: Claim, of_batch: Claims) {
    let mut answered: Option<Answered<C>> = None;
    loop {
        // Batches that are sent together are answered together, and then the store waits for the callers and the callers for the
        // store. So a task that would send at the same time as another first delivers its answers.
        if C::REPEATS == Repeats::Once {
            // A key is sent alone until its last check is answered.
            give(answered.take());
        } else if carrier.queue().has_just_sent(lane) {
            give(answered.take());
            tokio::task::yield_now().await;
        }
        let mut claimed = pin!(carrier.shares().claim_without_deadline(of_batch.clone()));
        let share = match poll_once(claimed.as_mut()).await {
            Poll::Ready(share) => share,
            // Other lanes are served meanwhile, so the answers are delivered now.
            Poll::Pending => {
                give(answered.take());
                claimed.await
            }
        };
        // The batch is formed when it can be sent, so that it includes checks that came meanwhile.
        let Some(Batch { mut checks, alike, locks, is_more }) = carrier.queue().take(carrier, lane) else {
            give(answered);
            return;
        };
        if is_more {
            start_sender(carrier.clone(), lane, of_batch.clone());
        }
        let keys: Vec<C::Key> =
            checks.iter_mut().map(|waiting| std::mem::take(&mut waiting.check.key)).collect();
        let now = Instant::now();
        let deadline = checks.iter().map(|waiting| waiting.deadline).min().unwrap_or(now);
        let sent = || checks.iter().for_each(|waiting| waiting.stage.store(SENT, Ordering::Relaxed));
        let answers = {
            let mut carried = pin!(carrier.carry(&alike, &keys, locks, deadline, &sent));
            // The answers of the last batch are delivered once the next is sent: the store works on it while the callers
            // continue.
            let at_once = poll_once(carried.as_mut()).await;
            give(answered.take());
            match at_once {
                Poll::Ready(answers) => answers,
                Poll::Pending => carried.await,
            }
        };
        carrier.queue().took(now.elapsed());
        drop(share);
        carrier.queue().is_back(lane, &alike, &checks);
        if let Ok(answers) = &answers
            && answers.len() == checks.len()
            && answers.iter().any(Option::is_none)
        {
            let (mut done, mut left_out) = (Vec::with_capacity(checks.len()), Vec::new());
            for ((waiting, key), answer) in checks.into_iter().zip(keys).zip(answers) {
                if answer.is_some() { done.push(waiting) } else { left_out.push((waiting, key)) }
            }
            carrier.queue().put_back(lane, left_out);
            checks = done;
        }
        let answers = answers.map(|answers| answers.into_iter().flatten().collect());
        answered = Some(Answered { checks, answers });
    }
}

/// Polls a future once, with the waker of this task.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}

/// The result of a batch.
struct Answered<C: Carrier> {
    checks: Vec<Waiting<C>>,
    answers: Result<Vec<Result<C::Answer, StoreError>>, StoreError>,
}

/// Delivers the answers.
fn give<C: Carrier>(answered: Option<Answered<C>>) {
    let Some(Answered { checks, answers }) = answered else { return };
    let answers = answers.and_then(|answers| match answers.len() == checks.len() {
        true => Ok(answers),
        false => {
            let message = "the store answered more or fewer than it was asked";
            Err(StoreError::failed(Failure::Reply, message).ambiguous())
        }
    });
    match answers {
        Ok(answers) => {
            for (waiting, answer) in checks.into_iter().zip(answers) {
                let _ = waiting.answer.send(answer);
            }
        }
        Err(error) => {
            for waiting in checks {
                let _ = waiting.answer.send(Err(error.for_another()));
            }
        }
    }
}

/// The checks of one call.
struct Batch<C: Carrier> {
    checks: Vec<Waiting<C>>,
    alike: C::Alike,
    locks: Locks,
    /// Whether more checks wait that another task can send meanwhile.
    is_more: bool,
}

impl<C: Carrier> Queue<C> {
    /// Adds a check to its lane. Returns the claims of a batch if the lane needs another sender. A lane that is too long accepts
    /// no more.
    fn add(&self, carrier: &C, waiting: Waiting<C>, now: Instant) -> Result<Option<Claims>, StoreError> {
        let longest = self.longest(carrier.ways(), waiting.latest, now);
        let mut lanes = self.lanes.lock();
        let empty = || Lane {
            waiting: VecDeque::new(),
            senders: 0,
            in_flight: Vec::new(),
            keys_in_flight: HashSet::default(),
            sent: None,
        };
        let lane = lanes.entry(waiting.check.lane).or_insert_with(empty);
        if lane.waiting.len() >= longest {
            lane.waiting.retain(|waiting| !waiting.answer.is_closed());
            if lane.waiting.len() >= longest {
                // The share is returned after the lock is released.
                drop(lanes);
                return Err(not_in_time());
            }
        }
        // A sender that has not formed its batch yet may take this check.
        let about_to = lane.senders.saturating_sub(lane.in_flight.iter().map(|(_, batches)| batches).sum());
        let of_its = lane.in_flight_of(&waiting.check.alike) + about_to;
        let is_free = of_its < carrier.ways() && lane.senders < carrier.lane_ways();
        let of_batch = is_free.then(|| waiting.check.of_batch.clone());
        lane.waiting.push_back(waiting);
        lane.senders += usize::from(is_free);
        Ok(of_batch)
    }

    /// The latest time to send a check: a batch of average duration then returns before the deadline, if that is possible at all.
    fn latest_start(&self, now: Instant, deadline: Instant) -> Instant {
        let left = deadline.saturating_duration_since(now);
        let carry = Duration::from_micros(self.carry_us.load(Ordering::Relaxed));
        let needed = (carry + carry / 4).min(left / 2);
        deadline.checked_sub(needed).unwrap_or(deadline).min(latest_start(now, deadline))
    }

    /// How many checks of one lane can be served before an instant.
    fn longest(&self, ways: usize, latest: Instant, now: Instant) -> usize {
        let left_us = u64::try_from(latest.saturating_duration_since(now).as_micros()).unwrap_or(u64::MAX);
        let carry_us = self.carry_us.load(Ordering::Relaxed).max(1);
        let batches = usize::try_from(left_us / carry_us).unwrap_or(usize::MAX).saturating_mul(ways);
        batches.saturating_mul(C::MAX_BATCH).clamp(SHORTEST_LANE * C::MAX_BATCH, LONGEST_LANE)
    }

    /// Records the duration of a batch in the moving average, with a weight of an eighth.
    fn took(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / 8);
        let before_us = self.carry_us.load(Ordering::Relaxed);
        let after_us = if before_us == 0 { took_us } else { before_us - before_us / 8 + took_us / 8 };
        self.carry_us.store(after_us, Ordering::Relaxed);
    }

    /// Forms the next batch of a lane. If there is none, the lane loses this sender.
    fn take(&self, carrier: &C, lane_of: Claim) -> Option<Batch<C>> {
        // Late checks are answered after the lock is released.
        let mut late = Vec::new();
        let mut lanes = self.lanes.lock();
        let lane = lanes.get_mut(&lane_of)?;
        let checks = lane.take(carrier, &mut late);
        let batch = match checks.first().map(|first| first.check.alike.clone()) {
            Some(alike) => {
                lane.goes(&alike);
                let is_free = |waiting: &Waiting<C>| lane.in_flight_of(&waiting.check.alike) < carrier.ways();
                let is_more = lane.senders < carrier.lane_ways() && lane.waiting.front().is_some_and(is_free);
                lane.senders += usize::from(is_more);
                let locks = checks.first().map_or(Locks::Skip, |first| first.locks);
                Some(Batch { checks, alike, locks, is_more })
            }
            None => {
                lane.senders -= 1;
                if lane.senders == 0 {
                    lanes.remove(&lane_of);
                }
                None
            }
        };
        drop(lanes);
        for waiting in late {
            let _ = waiting.answer.send(Err(not_in_time()));
        }
        batch
    }

    /// Whether another batch of the lane was sent so recently that the store has probably not started it.
    fn has_just_sent(&self, lane: Claim) -> bool {
        let sent = self.lanes.lock().get(&lane).and_then(|lane| lane.sent);
        sent.is_some_and(|sent| sent.elapsed() < JUST_SENT)
    }

    /// Puts skipped checks back to the front of the lane, to be sent alone and wait for the lock.
    fn put_back(&self, lane: Claim, checks: Vec<(Waiting<C>, C::Key)>) {
        let mut lanes = self.lanes.lock();
        // The calling task is a sender of the lane, so the lane exists.
        let Some(lane) = lanes.get_mut(&lane) else { return };
        for (mut waiting, key) in checks.into_iter().rev() {
            waiting.check.key = key;
            waiting.locks = Locks::Wait;
            waiting.stage.store(WAITS, Ordering::Relaxed);
            lane.waiting.push_front(waiting);
        }
    }

    /// Records that a batch has returned.
    fn is_back(&self, lane: Claim, alike: &C::Alike, checks: &[Waiting<C>]) {
        let mut lanes = self.lanes.lock();
        let Some(lane) = lanes.get_mut(&lane) else { return };
        if C::REPEATS == Repeats::InOneCall {
            for waiting in checks {
                lane.keys_in_flight.remove(&waiting.check.of_key);
            }
        }
        if let Some(index) = lane.in_flight.iter().position(|(of, _)| of == alike) {
            lane.in_flight[index].1 -= 1;
            if lane.in_flight[index].1 == 0 {
                lane.in_flight.swap_remove(index);
            }
        }
    }
}

impl<C: Carrier> Lane<C> {
    fn in_flight_of(&self, alike: &C::Alike) -> usize {
        self.in_flight.iter().find(|(of, _)| of == alike).map_or(0, |(_, batches)| *batches)
    }

    fn goes(&mut self, alike: &C::Alike) {
        self.sent = Some(Instant::now());
        match self.in_flight.iter_mut().find(|(of, _)| of == alike) {
            Some((_, batches)) => *batches += 1,
            None => self.in_flight.push((alike.clone(), 1)),
        }
    }

    /// Forms the next batch: the first check that can be sent now, and the following ones of the same `Alike`. Checks whose
    /// caller has gone, or that are too late, are removed.
    ///
    /// A check that is cheaper apart from an earlier one waits for a later batch. Checks keep their order, and the first of them
    /// is always sent, so each waits for as many batches as there are such checks before it. If most are like this, they are sent
    /// in one batch all the same: in batches of their own they would wait for longer than that costs.
    fn take(&mut self, carrier: &C, late: &mut Vec<Waiting<C>>) -> Vec<Waiting<C>> {
        let mut batch: Vec<Waiting<C>> = Vec::new();
        let mut passed_over = Vec::new();
        // The places in `passed_over` of those that are cheaper apart.
        let mut apart: Vec<usize> = Vec::new();
        let now = Instant::now();
        while batch.len() < C::MAX_BATCH
            && passed_over.len() < LOOK_AHEAD * C::MAX_BATCH
            && let Some(next) = self.waiting.pop_front()
        {
            if next.answer.is_closed() || now > next.latest {
                late.push(next);
                continue;
            }
            // A key with another call in flight may have to wait for it.
            let is_once = C::REPEATS == Repeats::Once;
            let is_alone = is_once && carrier.shares().in_flight(next.check.of_key) > 1;
            let is_in_flight =
                C::REPEATS == Repeats::InOneCall && self.keys_in_flight.contains(&next.check.of_key);
            let fits = match batch.first() {
                _ if is_in_flight => false,
                None => self.in_flight_of(&next.check.alike) < carrier.ways(),
                Some(first) if first.locks != next.locks => false,
                Some(first) if next.locks == Locks::Wait => {
                    !is_once
                        && first.check.of_key == next.check.of_key
                        && first.check.alike == next.check.alike
                }
                Some(first) => {
                    let is_twice = is_once && batch.iter().any(|waiting| waiting.check.key == next.check.key);
                    first.check.alike == next.check.alike && !is_twice && !is_alone
                }
            };
            if !fits {
                passed_over.push(next);
                continue;
            }
            let is_apart = |other: &Waiting<C>| {
                carrier.are_cheaper_apart(&next.check.alike, &other.check.key, &next.check.key)
            };
            if next.locks == Locks::Skip
                && (batch.iter().any(is_apart) || apart.iter().any(|place| is_apart(&passed_over[*place])))
            {
                apart.push(passed_over.len());
                passed_over.push(next);
                continue;
            }
            batch.push(next);
            if is_alone {
                break;
            }
        }
        if apart.len() > batch.len() {
            apart.truncate(C::MAX_BATCH - batch.len());
            let removed = apart.iter().rev().map(|place| passed_over.remove(*place));
            let mut joined: Vec<Waiting<C>> = removed.collect();
            joined.reverse();
            batch.append(&mut joined);
        }
        batch.iter().for_each(|waiting| waiting.stage.store(TAKEN, Ordering::Relaxed));
        if C::REPEATS == Repeats::InOneCall {
            self.keys_in_flight.extend(batch.iter().map(|waiting| waiting.check.of_key));
        }
        // The skipped ones keep their order.
        while let Some(waiting) = passed_over.pop() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::super::shares::Caps;
    use super::*;

    const FREELY: u8 = 0;
    const ONCE: u8 = 1;
    const IN_ONE_CALL: u8 = 2;
    /// As the one before; keys with the same last two digits are cheaper apart.
    const APART: u8 = 3;

    /// A call that was made: its `Alike`, and its keys.
    type Call = (u64, Vec<u64>);

    /// Records its calls, and answers each key with itself, at once or after a delay.
    #[derive(Clone)]
    struct Notes<const REPEATS: u8> {
        queue: Arc<Queue<Notes<REPEATS>>>,
        shares: Arc<Shares>,
        calls: Arc<Mutex<Vec<Call>>>,
        gate: Arc<tokio::sync::Semaphore>,
        takes: Duration,
        ways: usize,
        lane_ways: usize,
    }

    const CAPS: Caps = Caps { key: 2, batched_key: 2, limit: 6, server: 8, waiting: 1_024 };

    impl<const REPEATS: u8> Notes<REPEATS> {
        /// Blocks all calls at first, then allows one call of a limit at a time.
        fn closed() -> Notes<REPEATS> {
            Notes {
                queue: Arc::default(),
                shares: Shares::new(Caps { key: 100, ..CAPS }),
                calls: Arc::default(),
                gate: Arc::new(tokio::sync::Semaphore::new(0)),
                takes: Duration::ZERO,
                ways: 1,
                lane_ways: 1,
            }
        }

        /// A store whose every call takes some time.
        fn slow(takes: Duration) -> Notes<REPEATS> {
            let gate = Arc::new(tokio::sync::Semaphore::new(usize::MAX >> 4));
            Notes {
                shares: Shares::new(CAPS),
                takes,
                gate,
                ways: 4,
                lane_ways: CAPS.limit,
                ..Notes::closed()
            }
        }

        async fn ask(&self, limit: u64, alike: u64, key: u64, deadline: Instant) -> Result<u64, StoreError> {
            let (of_key, of_limit) = (Claim::Key(key), Claim::Limit(limit));
            let of_batch = smallvec![of_limit, Claim::Server(0)];
            charge(self, Check { alike, key, of_key, lane: of_limit, of_batch }, deadline).await
        }
    }

    impl<const REPEATS: u8> Carrier for Notes<REPEATS> {
        type Alike = u64;
        type Key = u64;
        type Answer = u64;
        const MAX_BATCH: usize = 4;
        const REPEATS: Repeats = match REPEATS {
            FREELY => Repeats::Freely,
            ONCE => Repeats::Once,
            _ => Repeats::InOneCall,
        };

        fn queue(&self) -> &Queue<Self> {
            &self.queue
        }

        fn shares(&self) -> &Arc<Shares> {
            &self.shares
        }

        fn ways(&self) -> usize {
            self.ways
        }

        fn lane_ways(&self) -> usize {
            self.lane_ways
        }

        fn are_cheaper_apart(&self, _alike: &u64, one: &u64, other: &u64) -> bool {
            REPEATS == APART && one % 100 == other % 100
        }

        async fn carry(
            &self,
            alike: &u64,
            keys: &[u64],
            locks: Locks,
            _deadline: Instant,
            sent: &(dyn Fn() + Send + Sync),
        ) -> Result<Answers<u64>, StoreError> {
            self.gate.acquire().await.expect("open").forget();
            sent();
            tokio::time::sleep(self.takes).await;
            self.calls.lock().push((*alike, keys.to_vec()));
            match alike {
                9 => Err(StoreError::failed(Failure::Connection, "broken").ambiguous()),
                8 => Ok(Vec::new()),
                // Keys from 100 on are locked by another transaction.
                7 if locks == Locks::Skip && keys.len() > 1 => {
                    Ok(keys.iter().map(|key| (*key < 100).then_some(Ok(*key))).collect())
                }
                _ => Ok(keys.iter().map(|key| Some(Ok(*key))).collect()),
            }
        }
    }

    async fn run<const REPEATS: u8>(checks: &[(u64, u64)]) -> (Vec<Call>, Vec<Result<u64, StoreError>>) {
        let notes = Notes::<REPEATS>::closed();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut pending: Vec<_> =
            checks.iter().map(|(alike, key)| Box::pin(notes.ask(0, *alike, *key, deadline))).collect();
        // All checks wait before the first call is allowed.
        for check in &mut pending {
            assert!(check.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        notes.gate.add_permits(checks.len());
        let answers = futures_util::future::join_all(pending).await;
        // The task that delivered the last answer has yet to find that nothing waits.
        while !notes.queue.lanes.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let calls = notes.calls.lock().clone();
        (calls, answers)
    }

    #[tokio::test]
    async fn what_waits_goes_together_if_it_is_alike() {
        let checks =
            [(1, 10), (1, 11), (1, 12), (2, 13), (1, 14), (1, 14), (1, 15), (1, 16), (1, 17), (1, 18)];
        let (calls, answers) = run::<FREELY>(&checks).await;
        let expected = [(1, vec![10]), (1, vec![11, 12, 14, 14]), (2, vec![13]), (1, vec![15, 16, 17, 18])];
        assert_eq!(calls, expected);
        let answers: Vec<u64> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
        assert_eq!(answers, checks.map(|(_, key)| key));
        let (calls, _) = run::<ONCE>(&checks).await;
        let expected =
            [(1, vec![10]), (1, vec![11, 12, 15, 16]), (2, vec![13]), (1, vec![14]), (1, vec![14, 17, 18])];
        assert_eq!(calls, expected, "no key twice in one, and none with others while it has another call");
    }

    #[tokio::test]
    async fn a_key_that_goes_in_one_call_at_a_time_goes_with_all_that_waits_for_it() {
        let checks = [(1, 10), (1, 10), (1, 11), (1, 10), (1, 12), (1, 10)];
        let notes = Notes::<IN_ONE_CALL> { lane_ways: 6, ways: 6, ..Notes::closed() };
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut pending: Vec<_> =
            checks.iter().map(|(alike, key)| Box::pin(notes.ask(0, *alike, *key, deadline))).collect();
        for check in &mut pending {
            assert!(check.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        notes.gate.add_permits(checks.len());
        for answer in futures_util::future::join_all(pending).await {
            answer.expect("answered");
        }
        let mut calls = notes.calls.lock().clone();
        calls.sort_unstable();
        // There are free slots, but none is used for a key with a call in flight.
        assert_eq!(calls, [(1, vec![10]), (1, vec![10, 10, 10]), (1, vec![11]), (1, vec![12])]);
    }

    #[tokio::test]
    async fn what_is_cheaper_apart_waits_in_order_unless_most_are_so() {
        let checks = [(1, 1), (1, 10), (1, 110), (1, 11), (1, 12), (1, 210), (1, 13)];
        let (calls, answers) = run::<APART>(&checks).await;
        let expected = [(1, vec![1]), (1, vec![10, 11, 12, 13]), (1, vec![110]), (1, vec![210])];
        assert_eq!(calls, expected);
        let answers: Vec<u64> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
        assert_eq!(answers, checks.map(|(_, key)| key));
        let checks = [(1, 1), (1, 10), (1, 110), (1, 210), (1, 11), (1, 310), (1, 410)];
        let (calls, _) = run::<APART>(&checks).await;
        assert_eq!(calls, [(1, vec![1]), (1, vec![10, 11, 110, 210]), (1, vec![310]), (1, vec![410])]);
    }

    #[tokio::test]
    async fn what_was_left_out_for_a_lock_goes_by_itself_and_is_answered() {
        let checks = [(7, 1), (7, 2), (7, 100), (7, 3), (7, 101), (7, 100)];
        let (calls, answers) = run::<IN_ONE_CALL>(&checks).await;
        // Later checks of the locked key go after it.
        let expected =
            [(7, vec![1]), (7, vec![2, 100, 3, 101]), (7, vec![100]), (7, vec![101]), (7, vec![100])];
        assert_eq!(calls, expected);
        let answers: Vec<u64> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
        assert_eq!(answers, checks.map(|(_, key)| key));
        let (calls, _) = run::<ONCE>(&checks[..5]).await;
        assert_eq!(calls, [(7, vec![1]), (7, vec![2, 100, 3, 101]), (7, vec![100]), (7, vec![101])]);
    }

    #[tokio::test]
    async fn an_error_is_everybodys_and_a_short_answer_nobodys() {
        let (_, answers) = run::<FREELY>(&[(9, 1), (9, 2), (9, 3)]).await;
        assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(StoreError::is_ambiguous)));
        let (_, answers) = run::<FREELY>(&[(8, 1)]).await;
        assert_eq!(answers[0].as_ref().unwrap_err().failure(), Some(Failure::Reply));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_sent_in_time_was_not_sent_at_all() {
        let notes = Notes::<FREELY>::closed();
        let soon = Instant::now() + Duration::from_millis(100);
        let first = tokio::spawn({
            let notes = notes.clone();
            async move { notes.ask(1, 1, 1, soon).await }
        });
        // The first is in flight.
        while !notes.queue.lanes.lock().values().any(|lane| lane.senders == 1 && lane.waiting.is_empty()) {
            tokio::task::yield_now().await;
        }
        let second = notes.ask(1, 1, 2, soon).await.unwrap_err();
        let first = first.await.unwrap().unwrap_err();
        assert!(first.failure() == Some(Failure::Timeout) && !first.is_ambiguous(), "{first}");
        assert_eq!(second.failure(), Some(Failure::Overloaded), "it waited for its own limit: {second}");
        assert!(!second.is_ambiguous());
    }

    #[tokio::test]
    async fn checks_that_are_not_alike_do_not_wait_while_ways_are_free() {
        let notes = Notes::<FREELY> { lane_ways: 6, ..Notes::closed() };
        let deadline = Instant::now() + Duration::from_secs(60);
        let checks = [(1, 10), (1, 11), (2, 12), (3, 13), (1, 14), (2, 15)];
        let tasks = checks.map(|(alike, key)| {
            let notes = notes.clone();
            tokio::spawn(async move { notes.ask(0, alike, key, deadline).await })
        });
        // One batch of each kind is sent at once.
        let kinds = || notes.queue.lanes.lock().values().map(|lane| lane.in_flight.len()).sum::<usize>();
        while kinds() < 3 {
            tokio::task::yield_now().await;
        }
        notes.gate.add_permits(checks.len());
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let mut calls = notes.calls.lock().clone();
        calls.sort_unstable();
        let keys: Vec<u64> = calls.iter().flat_map(|(_, keys)| keys.clone()).collect();
        assert_eq!(keys.len(), checks.len(), "{calls:?}");
        assert!(calls.len() < checks.len(), "those that are alike went together: {calls:?}");
    }

    /// How many checks of a flood and of a bystander were answered, and the errors of the others.
    async fn flood<const REPEATS: u8>(
        limits: u64,
        key_of: fn(u64, u64) -> u64,
        bystander: (u64, u64),
    ) -> (u64, Vec<StoreError>) {
        const TIMEOUT: Duration = Duration::from_millis(100);
        // Six calls of four in 30 ms are 800 checks a second. 256 callers make more than three times as many.
        let notes = Notes::<REPEATS>::slow(Duration::from_millis(30));
        let end = Instant::now() + Duration::from_secs(5);
        let mut attack = tokio::task::JoinSet::new();
        for caller in 0..256_u64 {
            let notes = notes.clone();
            attack.spawn(async move {
                let (mut served, mut failed) = (0, Vec::new());
                for round in 0.. {
                    if Instant::now() >= end {
                        break;
                    }
                    let key = 1_000 + key_of(caller, round);
                    match notes.ask(1 + caller % limits, 1 + caller % 3, key, Instant::now() + TIMEOUT).await
                    {
                        Ok(_) => served += 1,
                        Err(error) => failed.push(error),
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                (served, failed)
            });
        }
        let (limit, key) = bystander;
        while Instant::now() < end {
            let answer = notes.ask(limit, 1, key, Instant::now() + TIMEOUT).await;
            answer.unwrap_or_else(|error| panic!("the bystander was not answered: {error}"));
            tokio::time::sleep(Duration::from_millis(7)).await;
        }
        let (mut served, mut failed) = (0, Vec::new());
        for (its_served, its_failed) in attack.join_all().await {
            served += its_served;
            failed.extend(its_failed);
        }
        while !notes.queue.lanes.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(notes.shares.in_flight(Claim::Server(0)), 0);
        (served, failed)
    }

    /// A flood fails because of itself, and its errors say nothing about the store.
    fn assert_own(failed: &[StoreError]) {
        assert!(!failed.is_empty(), "there was more than could be served");
        for error in failed {
            assert!(error.failure() == Some(Failure::Overloaded) && !error.is_ambiguous(), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_fresh_keys_under_one_limit_is_no_other_limits_timeout() {
        let (served, failed) = flood::<ONCE>(1, |caller, round| caller * 100_000 + round, (99, 7)).await;
        assert_own(&failed);
        assert!(served > 2_000, "{served} were served: what can be served still is");
        let (served, failed) = flood::<FREELY>(1, |caller, round| caller * 100_000 + round, (99, 7)).await;
        assert_own(&failed);
        assert!(served > 2_000, "{served}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_one_key_is_no_other_keys_timeout_under_its_limit() {
        let (_, failed) = flood::<ONCE>(1, |_, _| 1, (1, 7)).await;
        assert_own(&failed);
    }
}
