//! Single checks that come at the same time, sent as one batch.
//!
//! A call costs a server, and the way to it, several times what a decision does: many in one call cost little more than one. So
//! while calls are in flight, the checks that come meanwhile wait for them, and then go together, each still decided for
//! itself; a check that finds a way free goes at once and alone. Nobody waits for company.
//!
//! What goes together is charged alike (the same limit at the same cost). Checks wait in lanes, one for each limit, and each
//! batch takes a share of the store like any other call (`shares.rs`): a lane has at most so many batches in flight, lanes are
//! served in turn, and a key may have only so many checks in a lane. A lane is as long as what can be served in time; what is
//! beyond that fails at once, for its own caller only. So a flood under one limit is no other limit's timeout, and a flood of
//! one key no other key's.
//!
//! How a batch is sent, and what comes back, the store knows ([`Carrier`]); who waits for what, and until when, is known here.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::smallvec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::shares::{ByClaim, Claim, Claims, Share, Shares, latest_start};
use crate::{Failure, StoreError};

/// A store that can carry many checks in one call.
pub(crate) trait Carrier: Clone + Send + Sync + 'static {
    /// What checks must have in common to go together.
    type Alike: Clone + PartialEq + Send + Sync;
    /// What tells them apart.
    type Key: Default + PartialEq + Send + Sync;
    /// What each is answered.
    type Answer: Send;

    /// How many go together at most.
    const MAX_BATCH: usize;

    /// Whether a key may be in one call only once. A key that has another call in flight then also goes alone: it may have to
    /// wait for that one, and nobody else is to wait with it.
    const ONCE: bool;

    fn queue(&self) -> &Queue<Self>;

    /// The shares of all calls to the store.
    fn shares(&self) -> &Arc<Shares>;

    /// How many batches of checks that are alike may be in flight before others of them wait.
    fn ways(&self) -> usize;

    /// How many batches of one limit may be in flight in all.
    fn lane_ways(&self) -> usize;

    /// Sends one call, and answers for each key, in their order. `sent` is called once it may have left.
    fn carry(
        &self,
        alike: &Self::Alike,
        keys: &[Self::Key],
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> impl Future<Output = Result<Vec<Result<Self::Answer, StoreError>>, StoreError>> + Send;
}

/// A check: what it charges, and the shares that it needs.
pub(crate) struct Check<C: Carrier> {
    pub(crate) alike: C::Alike,
    pub(crate) key: C::Key,
    /// The share of its key.
    pub(crate) of_key: Claim,
    /// Its lane: the claim of its limit, or one for all its limits together.
    pub(crate) lane: Claim,
    /// The shares of its limits and of the server that is asked, which a batch of the lane takes.
    pub(crate) of_batch: Claims,
}

/// Those who wait to be sent.
pub(crate) struct Queue<C: Carrier> {
    lanes: Mutex<ByClaim<Lane<C>>>,
    /// How long a batch has taken of late, in us.
    carry_us: AtomicU64,
}

/// The checks of one limit that wait. There is a lane while a batch of it is in flight, or about to be.
struct Lane<C: Carrier> {
    waiting: VecDeque<Waiting<C>>,
    /// How many tasks send what waits.
    senders: usize,
    /// How many batches are in flight of each kind of check.
    in_flight: Vec<(C::Alike, usize)>,
    /// When the last batch was taken.
    sent: Option<Instant>,
}

/// A check that waits to be sent, or for its answer.
struct Waiting<C: Carrier> {
    check: Check<C>,
    deadline: Instant,
    /// After this there is too little time left to be answered.
    latest: Instant,
    stage: Arc<AtomicU8>,
    answer: oneshot::Sender<Result<C::Answer, StoreError>>,
    _share: Share,
}

/// How far a check has come: it waits in its lane; it is part of a batch; it may have left.
const WAITS: u8 = 0;
const TAKEN: u8 = 1;
const SENT: u8 = 2;

/// How long after its deadline a check waits to be told what became of its batch.
const GRACE: Duration = Duration::from_millis(10);

/// A batch that has left within this is on its way to the store.
const JUST_SENT: Duration = Duration::from_micros(30);

/// How many checks of a lane are looked at for those that are alike, in batches.
const LOOK_AHEAD: usize = 4;

/// How long a lane may always be, in batches, and how long never.
const SHORTEST_LANE: usize = 4;
const LONGEST_LANE: usize = 65_536;

impl<C: Carrier> Default for Queue<C> {
    fn default() -> Queue<C> {
        Queue { lanes: Mutex::default(), carry_us: AtomicU64::new(0) }
    }
}

/// A check, which may go together with others.
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
    let waiting = Waiting { check, deadline, latest, stage: stage.clone(), answer, _share: share };
    if let Some(of_batch) = carrier.queue().add(carrier, waiting, now)? {
        start_sender(carrier.clone(), lane, of_batch);
    }
    let mut answered = answered;
    let mut answer = timeout_at(deadline, &mut answered).await;
    if answer.is_err() && stage.load(Ordering::Relaxed) != WAITS {
        // The batch has the same deadline or an earlier one, so it ends now, and knows better what became of it.
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

/// Sends batches of a lane until nothing waits in it that others do not send.
async fn send_all<C: Carrier>(carrier: &C, lane: Claim, of_batch: Claims) {
    let mut answered: Option<Answered<C>> = None;
    loop {
        // Batches that leave together are answered together, and then the store waits for the callers and they for the store. So
        // one that would leave beside another lets its callers go on first.
        if C::ONCE {
            // A key goes alone until its last check is answered.
            give(answered.take());
        } else if carrier.queue().has_just_sent(lane) {
            give(answered.take());
            tokio::task::yield_now().await;
        }
        let mut claimed = pin!(carrier.shares().claim_patiently(of_batch.clone()));
        let share = match poll_once(claimed.as_mut()).await {
            Poll::Ready(share) => share,
            // Others are served meanwhile, so the answers are given now.
            Poll::Pending => {
                give(answered.take());
                claimed.await
            }
        };
        // What is in the batch is chosen once it can be sent, so that those who came meanwhile go with it.
        let Some(Batch { mut checks, alike, is_more }) = carrier.queue().take(carrier, lane) else {
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
            let mut carried = pin!(carrier.carry(&alike, &keys, deadline, &sent));
            // The answers to the last batch are given once the next is on its way: the store works on it while callers go on.
            let at_once = poll_once(carried.as_mut()).await;
            give(answered.take());
            match at_once {
                Poll::Ready(answers) => answers,
                Poll::Pending => carried.await,
            }
        };
        carrier.queue().took(now.elapsed());
        drop(share);
        carrier.queue().is_back(lane, &alike);
        answered = Some(Answered { checks, answers });
    }
}

/// Polls a future once, on behalf of this task.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}

/// What came back for a batch.
struct Answered<C: Carrier> {
    checks: Vec<Waiting<C>>,
    answers: Result<Vec<Result<C::Answer, StoreError>>, StoreError>,
}

/// Gives everybody the answer.
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

/// Checks that go together.
struct Batch<C: Carrier> {
    checks: Vec<Waiting<C>>,
    alike: C::Alike,
    /// Whether others wait that another sender can send meanwhile.
    is_more: bool,
}

impl<C: Carrier> Queue<C> {
    /// Adds a check to its lane; if the lane is to have another sender, the claims of its batches. A lane that is too long takes
    /// no more.
    fn add(&self, carrier: &C, waiting: Waiting<C>, now: Instant) -> Result<Option<Claims>, StoreError> {
        let longest = self.longest(carrier.ways(), waiting.latest, now);
        let mut lanes = self.lanes.lock();
        let empty = || Lane { waiting: VecDeque::new(), senders: 0, in_flight: Vec::new(), sent: None };
        let lane = lanes.entry(waiting.check.lane).or_insert_with(empty);
        if lane.waiting.len() >= longest {
            lane.waiting.retain(|waiting| !waiting.answer.is_closed());
            if lane.waiting.len() >= longest {
                // Its share is given back after the lock.
                drop(lanes);
                return Err(not_in_time());
            }
        }
        // Those who have yet to take a batch may take this one.
        let about_to = lane.senders.saturating_sub(lane.in_flight.iter().map(|(_, batches)| batches).sum());
        let of_its = lane.in_flight_of(&waiting.check.alike) + about_to;
        let is_free = of_its < carrier.ways() && lane.senders < carrier.lane_ways();
        let of_batch = is_free.then(|| waiting.check.of_batch.clone());
        lane.waiting.push_back(waiting);
        lane.senders += usize::from(is_free);
        Ok(of_batch)
    }

    /// Until when a check may wait to be sent: so that a batch that takes as long as of late is back before its deadline, if it
    /// can be at all.
    fn latest_start(&self, now: Instant, deadline: Instant) -> Instant {
        let left = deadline.saturating_duration_since(now);
        let carry = Duration::from_micros(self.carry_us.load(Ordering::Relaxed));
        let needed = (carry + carry / 4).min(left / 2);
        deadline.checked_sub(needed).unwrap_or(deadline).min(latest_start(now, deadline))
    }

    /// How many checks of one lane can be served before an instant.
    fn longest(&self, ways: usize, latest: Instant, now: Instant) -> usize {
        let left_us = latest.saturating_duration_since(now).as_micros();
        let carry_us = u128::from(self.carry_us.load(Ordering::Relaxed).max(1));
        let batches = usize::try_from(left_us / carry_us).unwrap_or(usize::MAX).saturating_mul(ways);
        batches.saturating_mul(C::MAX_BATCH).clamp(SHORTEST_LANE * C::MAX_BATCH, LONGEST_LANE)
    }

    /// Notes how long a batch took: an average in which the last counts an eighth.
    fn took(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / 8);
        let before_us = self.carry_us.load(Ordering::Relaxed);
        let after_us = if before_us == 0 { took_us } else { before_us - before_us / 8 + took_us / 8 };
        self.carry_us.store(after_us, Ordering::Relaxed);
    }

    /// The next batch of a lane, which has one sender fewer if there is none.
    fn take(&self, carrier: &C, lane_of: Claim) -> Option<Batch<C>> {
        // Those who are too late are told so after the lock.
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
                Some(Batch { checks, alike, is_more })
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

    /// Whether another batch of a lane has left too short a while ago to be worked on already.
    fn has_just_sent(&self, lane: Claim) -> bool {
        let sent = self.lanes.lock().get(&lane).and_then(|lane| lane.sent);
        sent.is_some_and(|sent| sent.elapsed() < JUST_SENT)
    }

    /// A batch has come back.
    fn is_back(&self, lane: Claim, alike: &C::Alike) {
        if let Some(lane) = self.lanes.lock().get_mut(&lane)
            && let Some(index) = lane.in_flight.iter().position(|(of, _)| of == alike)
        {
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

    /// The next checks to go together: the first that is not sent by others already, and of those that follow the ones that
    /// are charged alike. Who has stopped waiting, or has too little time left, is not asked for.
    fn take(&mut self, carrier: &C, late: &mut Vec<Waiting<C>>) -> Vec<Waiting<C>> {
        let mut batch: Vec<Waiting<C>> = Vec::new();
        let mut passed_over = Vec::new();
        let now = Instant::now();
        while batch.len() < C::MAX_BATCH
            && passed_over.len() < LOOK_AHEAD * C::MAX_BATCH
            && let Some(next) = self.waiting.pop_front()
        {
            if next.answer.is_closed() || now > next.latest {
                late.push(next);
                continue;
            }
            // A key that has another call in flight may have to wait for it.
            let is_alone = C::ONCE && carrier.shares().in_flight(next.check.of_key) > 1;
            let fits = match batch.first() {
                None => self.in_flight_of(&next.check.alike) < carrier.ways(),
                Some(first) => {
                    let is_twice = C::ONCE && batch.iter().any(|waiting| waiting.check.key == next.check.key);
                    first.check.alike == next.check.alike && !is_twice && !is_alone
                }
            };
            if !fits {
                passed_over.push(next);
                continue;
            }
            next.stage.store(TAKEN, Ordering::Relaxed);
            batch.push(next);
            if is_alone {
                break;
            }
        }
        // They keep their places.
        while let Some(waiting) = passed_over.pop() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::super::shares::Caps;
    use super::*;

    /// What was alike, and the keys.
    type Call = (u64, Vec<u64>);

    /// Keeps what it was asked, and answers a key with itself, as soon as it is let through or after a while.
    #[derive(Clone)]
    struct Notes<const ONCE: bool> {
        queue: Arc<Queue<Notes<ONCE>>>,
        shares: Arc<Shares>,
        calls: Arc<Mutex<Vec<Call>>>,
        gate: Arc<tokio::sync::Semaphore>,
        takes: Duration,
        ways: usize,
        lane_ways: usize,
    }

    const CAPS: Caps = Caps { key: 2, batched_key: 2, limit: 6, server: 8, waiting: 1_024 };

    impl<const ONCE: bool> Notes<ONCE> {
        /// Lets nothing through yet, and then one call of a limit at a time.
        fn closed() -> Notes<ONCE> {
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

        /// A store whose every call takes a while.
        fn slow(takes: Duration) -> Notes<ONCE> {
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

    impl<const IS_ONCE: bool> Carrier for Notes<IS_ONCE> {
        type Alike = u64;
        type Key = u64;
        type Answer = u64;
        const MAX_BATCH: usize = 4;
        const ONCE: bool = IS_ONCE;

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

        async fn carry(
            &self,
            alike: &u64,
            keys: &[u64],
            _deadline: Instant,
            sent: &(dyn Fn() + Send + Sync),
        ) -> Result<Vec<Result<u64, StoreError>>, StoreError> {
            self.gate.acquire().await.expect("open").forget();
            sent();
            tokio::time::sleep(self.takes).await;
            self.calls.lock().push((*alike, keys.to_vec()));
            match alike {
                9 => Err(StoreError::failed(Failure::Connection, "broken").ambiguous()),
                8 => Ok(Vec::new()),
                _ => Ok(keys.iter().map(|key| Ok(*key)).collect()),
            }
        }
    }

    async fn run<const ONCE: bool>(checks: &[(u64, u64)]) -> (Vec<Call>, Vec<Result<u64, StoreError>>) {
        let notes = Notes::<ONCE>::closed();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut asked: Vec<_> =
            checks.iter().map(|(alike, key)| Box::pin(notes.ask(0, *alike, *key, deadline))).collect();
        // All of them are in line before the first is let through.
        for check in &mut asked {
            assert!(futures_util::poll!(check.as_mut()).is_pending());
            tokio::task::yield_now().await;
        }
        notes.gate.add_permits(checks.len());
        let answers = futures_util::future::join_all(asked).await;
        // The task that brought the last answer has yet to find that there is nothing more.
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
        let (calls, answers) = run::<false>(&checks).await;
        let expected = [(1, vec![10]), (1, vec![11, 12, 14, 14]), (2, vec![13]), (1, vec![15, 16, 17, 18])];
        assert_eq!(calls, expected);
        let answers: Vec<u64> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
        assert_eq!(answers, checks.map(|(_, key)| key));
        let (calls, _) = run::<true>(&checks).await;
        let expected =
            [(1, vec![10]), (1, vec![11, 12, 15, 16]), (2, vec![13]), (1, vec![14]), (1, vec![14, 17, 18])];
        assert_eq!(calls, expected, "no key twice in one, and none with others while it has another call");
    }

    #[tokio::test]
    async fn an_error_is_everybodys_and_a_short_answer_nobodys() {
        let (_, answers) = run::<false>(&[(9, 1), (9, 2), (9, 3)]).await;
        assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(StoreError::is_ambiguous)));
        let (_, answers) = run::<false>(&[(8, 1)]).await;
        assert_eq!(answers[0].as_ref().unwrap_err().failure(), Some(Failure::Reply));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_sent_in_time_was_not_sent_at_all() {
        let notes = Notes::<false>::closed();
        let soon = Instant::now() + Duration::from_millis(100);
        let first = tokio::spawn({
            let notes = notes.clone();
            async move { notes.ask(1, 1, 1, soon).await }
        });
        // The first is on its way.
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
    async fn who_is_not_alike_does_not_wait_where_there_are_ways_enough() {
        let notes = Notes::<false> { lane_ways: 6, ..Notes::closed() };
        let deadline = Instant::now() + Duration::from_secs(60);
        let checks = [(1, 10), (1, 11), (2, 12), (3, 13), (1, 14), (2, 15)];
        let asked = checks.map(|(alike, key)| {
            let notes = notes.clone();
            tokio::spawn(async move { notes.ask(0, alike, key, deadline).await })
        });
        // One batch of each kind goes at once.
        let kinds = || notes.queue.lanes.lock().values().map(|lane| lane.in_flight.len()).sum::<usize>();
        while kinds() < 3 {
            tokio::task::yield_now().await;
        }
        notes.gate.add_permits(checks.len());
        for asked in asked {
            asked.await.unwrap().unwrap();
        }
        let mut calls = notes.calls.lock().clone();
        calls.sort_unstable();
        let keys: Vec<u64> = calls.iter().flat_map(|(_, keys)| keys.clone()).collect();
        assert_eq!(keys.len(), checks.len(), "{calls:?}");
        assert!(calls.len() < checks.len(), "those that are alike went together: {calls:?}");
    }

    /// How many of a flood's and of a bystander's checks were answered, and with what the others failed.
    async fn flood<const ONCE: bool>(
        limits: u64,
        key_of: fn(u64, u64) -> u64,
        bystander: (u64, u64),
    ) -> (u64, Vec<StoreError>) {
        const TIMEOUT: Duration = Duration::from_millis(100);
        // Six calls of four in 30 ms are 800 checks a second. 256 callers ask for more than three times as much.
        let notes = Notes::<ONCE>::slow(Duration::from_millis(30));
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

    /// What a flood fails with is its own doing, and says nothing about the store.
    fn assert_own(failed: &[StoreError]) {
        assert!(!failed.is_empty(), "there was more than could be served");
        for error in failed {
            assert!(error.failure() == Some(Failure::Overloaded) && !error.is_ambiguous(), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_fresh_keys_under_one_limit_is_no_other_limits_timeout() {
        let (served, failed) = flood::<true>(1, |caller, round| caller * 100_000 + round, (99, 7)).await;
        assert_own(&failed);
        assert!(served > 2_000, "{served} were served: what can be served still is");
        let (served, failed) = flood::<false>(1, |caller, round| caller * 100_000 + round, (99, 7)).await;
        assert_own(&failed);
        assert!(served > 2_000, "{served}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_one_key_is_no_other_keys_timeout_under_its_limit() {
        let (_, failed) = flood::<true>(1, |_, _| 1, (1, 7)).await;
        assert_own(&failed);
    }
}
