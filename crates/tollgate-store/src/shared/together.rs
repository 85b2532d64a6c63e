//! Single checks that come at the same time, sent as one.
//!
//! A call costs a server, and the way to it, several times what a decision does: many in one call cost little more than one. So
//! while calls are on their way, the checks that come meanwhile wait for them, and then go together, each still decided for
//! itself; a check that finds a way free goes at once and alone. Nobody waits for company.
//!
//! What goes together is charged alike (the same limit at the same cost), in the order in which it came. How it is sent, and
//! what comes back, the store knows ([`Carrier`]); who waits for what, and until when, is known here.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::{Failure, StoreError};

/// A store that can carry many checks in one call.
pub(crate) trait Carrier: Clone + Send + Sync + 'static {
    /// What checks must have in common to go together.
    type Alike: Clone + PartialEq + Send + Sync;
    /// What tells them apart.
    type Key: Clone + PartialEq + Send + Sync;
    /// What each is answered.
    type Answer: Send;

    /// How many go together at most.
    const TOGETHER: usize;

    /// Whether a key may be in one call only once.
    const ONCE: bool;

    /// Whether those that are not alike have ways of their own. Otherwise they wait for each other, although they cannot go
    /// together: right where ways are few and dear, and wrong where they only keep a server from being asked one by one.
    const APART: bool;

    fn queue(&self) -> &Queue<Self>;

    /// How many calls may be on their way before checks wait for each other.
    fn ways(&self) -> usize;

    /// Sends one call, and answers for each key, in their order. `sent` is called once it may have left.
    fn carry(
        &self,
        alike: &Self::Alike,
        keys: &[Self::Key],
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> impl Future<Output = Result<Vec<Result<Self::Answer, StoreError>>, StoreError>> + Send;
}

/// Those who wait to be sent.
pub(crate) struct Queue<C: Carrier> {
    state: Mutex<State<C>>,
}

struct State<C: Carrier> {
    lanes: Vec<Lane<C>>,
    /// How many lanes there have been.
    count: u64,
}

/// Those who wait for each other. There is a lane while a call of it is on its way.
struct Lane<C: Carrier> {
    number: u64,
    /// What they have in common, if lanes are apart.
    alike: Option<C::Alike>,
    waiting: VecDeque<Waiting<C>>,
    on_the_way: usize,
}

/// A check that waits to be sent, or for its answer.
struct Waiting<C: Carrier> {
    alike: C::Alike,
    key: C::Key,
    deadline: Instant,
    /// Whether it may have left.
    is_sent: Arc<AtomicBool>,
    answer: oneshot::Sender<Result<C::Answer, StoreError>>,
}

impl<C: Carrier> Default for Queue<C> {
    fn default() -> Queue<C> {
        Queue { state: Mutex::new(State { lanes: Vec::new(), count: 0 }) }
    }
}

/// A check, which may go together with others.
pub(crate) async fn charge<C: Carrier>(
    carrier: &C,
    alike: C::Alike,
    key: C::Key,
    deadline: Instant,
) -> Result<C::Answer, StoreError> {
    let (answer, answered) = oneshot::channel();
    let is_sent = Arc::new(AtomicBool::new(false));
    let waiting = Waiting { alike, key, deadline, is_sent: is_sent.clone(), answer };
    let batch = carrier.queue().state.lock().add(waiting, carrier.ways());
    if let Some((lane, batch)) = batch {
        let carrier = carrier.clone();
        tokio::spawn(async move { send_all(&carrier, lane, batch).await });
    }
    match timeout_at(deadline, answered).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => {
            Err(StoreError::failed(Failure::Reply, "the task that asked the store is gone").ambiguous())
        }
        Err(_) if is_sent.load(Ordering::Relaxed) => {
            Err(StoreError::failed(Failure::Timeout, "the store did not answer in time").ambiguous())
        }
        Err(_) => Err(StoreError::failed(
            Failure::Timeout,
            "the call did not get to the store in time, and was not sent",
        )),
    }
}

/// Sends a batch, and what has come meanwhile in its lane, until nothing has.
async fn send_all<C: Carrier>(carrier: &C, lane: u64, mut batch: Vec<Waiting<C>>) {
    loop {
        send(carrier, batch).await;
        match carrier.queue().state.lock().next(lane) {
            Some(next) => batch = next,
            None => return,
        }
    }
}

async fn send<C: Carrier>(carrier: &C, batch: Vec<Waiting<C>>) {
    // Who is not waiting any more is not asked for.
    let batch: Vec<Waiting<C>> = batch.into_iter().filter(|waiting| !waiting.answer.is_closed()).collect();
    let Some(first) = batch.first() else { return };
    let deadline = batch.iter().map(|waiting| waiting.deadline).min().unwrap_or(first.deadline);
    let keys: Vec<C::Key> = batch.iter().map(|waiting| waiting.key.clone()).collect();
    let sent = || batch.iter().for_each(|waiting| waiting.is_sent.store(true, Ordering::Relaxed));
    let answers = carrier.carry(&first.alike, &keys, deadline, &sent).await;
    let answers = answers.and_then(|answers| match answers.len() == batch.len() {
        true => Ok(answers),
        false => {
            let message = "the store answered more or fewer than it was asked";
            Err(StoreError::failed(Failure::Reply, message).ambiguous())
        }
    });
    match answers {
        Ok(answers) => {
            for (waiting, answer) in batch.into_iter().zip(answers) {
                let _ = waiting.answer.send(answer);
            }
        }
        Err(error) => {
            for waiting in batch {
                let _ = waiting.answer.send(Err(error.for_another()));
            }
        }
    }
}

impl<C: Carrier> State<C> {
    /// Adds a check; answers what is to go now, and in which lane, if it need not wait.
    fn add(&mut self, waiting: Waiting<C>, ways: usize) -> Option<(u64, Vec<Waiting<C>>)> {
        let is_its = |lane: &Lane<C>| !C::APART || lane.alike.as_ref() == Some(&waiting.alike);
        let index = self.lanes.iter().position(is_its).unwrap_or_else(|| {
            self.count += 1;
            let (number, alike) = (self.count, C::APART.then(|| waiting.alike.clone()));
            self.lanes.push(Lane { number, alike, waiting: VecDeque::new(), on_the_way: 0 });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[index];
        lane.waiting.push_back(waiting);
        if lane.on_the_way >= ways {
            return None;
        }
        lane.on_the_way += 1;
        Some((lane.number, lane.take()))
    }

    /// What is to go next in a lane, a call of which has come back.
    fn next(&mut self, number: u64) -> Option<Vec<Waiting<C>>> {
        let index = self.lanes.iter().position(|lane| lane.number == number)?;
        let lane = &mut self.lanes[index];
        if !lane.waiting.is_empty() {
            return Some(lane.take());
        }
        lane.on_the_way -= 1;
        if lane.on_the_way == 0 {
            self.lanes.swap_remove(index);
        }
        None
    }
}

impl<C: Carrier> Lane<C> {
    /// The next checks to go together: from the first, those that are charged alike, up to one that must go by itself.
    fn take(&mut self) -> Vec<Waiting<C>> {
        let mut batch: Vec<Waiting<C>> = Vec::new();
        while batch.len() < C::TOGETHER
            && let Some(next) = self.waiting.front()
            && batch.first().is_none_or(|first| first.alike == next.alike)
            && !(C::ONCE && batch.iter().any(|waiting| waiting.key == next.key))
        {
            batch.extend(self.waiting.pop_front());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was alike, and the keys.
    type Call = (u64, Vec<u64>);

    /// Keeps what it was asked, and answers a key with itself.
    #[derive(Clone)]
    struct Notes<const ONCE: bool, const APART: bool = false> {
        queue: Arc<Queue<Notes<ONCE, APART>>>,
        calls: Arc<Mutex<Vec<Call>>>,
        gate: Arc<tokio::sync::Semaphore>,
    }

    impl<const ONCE: bool, const APART: bool> Notes<ONCE, APART> {
        /// Lets nothing through yet.
        fn closed() -> Notes<ONCE, APART> {
            Notes {
                queue: Arc::default(),
                calls: Arc::default(),
                gate: Arc::new(tokio::sync::Semaphore::new(0)),
            }
        }
    }

    impl<const IS_ONCE: bool, const IS_APART: bool> Carrier for Notes<IS_ONCE, IS_APART> {
        type Alike = u64;
        type Key = u64;
        type Answer = u64;
        const TOGETHER: usize = 4;
        const ONCE: bool = IS_ONCE;
        const APART: bool = IS_APART;

        fn queue(&self) -> &Queue<Self> {
            &self.queue
        }

        fn ways(&self) -> usize {
            1
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
            self.calls.lock().push((*alike, keys.to_vec()));
            match alike {
                9 => Err(StoreError::failed(Failure::Connection, "broken").ambiguous()),
                8 => Ok(Vec::new()),
                _ => Ok(keys.iter().map(|key| Ok(*key)).collect()),
            }
        }
    }

    async fn run<const ONCE: bool>(checks: &[(u64, u64)]) -> (Vec<Call>, Vec<Result<u64, StoreError>>) {
        run_apart::<ONCE, false>(checks).await
    }

    async fn run_apart<const ONCE: bool, const APART: bool>(
        checks: &[(u64, u64)],
    ) -> (Vec<Call>, Vec<Result<u64, StoreError>>) {
        let notes = Notes::<ONCE, APART>::closed();
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        let mut asked: Vec<_> =
            checks.iter().map(|(alike, key)| Box::pin(charge(&notes, *alike, *key, deadline))).collect();
        // All of them are in line before the first is let through.
        for check in &mut asked {
            let polled = std::future::poll_fn(|context| {
                std::task::Poll::Ready(check.as_mut().poll(context).is_pending())
            });
            assert!(polled.await);
        }
        notes.gate.add_permits(checks.len());
        let answers = futures_util::future::join_all(asked).await;
        // The task that brought the last answer has yet to find that there is nothing more.
        while !notes.queue.state.lock().lanes.is_empty() {
            tokio::task::yield_now().await;
        }
        let calls = notes.calls.lock().clone();
        (calls, answers)
    }

    #[tokio::test]
    async fn what_waits_goes_together_if_it_is_alike_and_in_order() {
        let checks =
            [(1, 10), (1, 11), (1, 12), (2, 13), (1, 14), (1, 14), (1, 15), (1, 16), (1, 17), (1, 18)];
        let (calls, answers) = run::<false>(&checks).await;
        let expected =
            [(1, vec![10]), (1, vec![11, 12]), (2, vec![13]), (1, vec![14, 14, 15, 16]), (1, vec![17, 18])];
        assert_eq!(calls, expected);
        let answers: Vec<u64> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
        assert_eq!(answers, checks.map(|(_, key)| key));
        let (calls, _) = run::<true>(&checks).await;
        assert_eq!(
            calls[3..],
            [(1, vec![14]), (1, vec![14, 15, 16, 17]), (1, vec![18])],
            "no key twice in one"
        );
    }

    #[tokio::test]
    async fn who_is_not_alike_does_not_wait_where_there_are_ways_enough() {
        let checks = [(1, 10), (1, 11), (2, 12), (3, 13), (1, 14), (2, 15)];
        let (mut calls, _) = run_apart::<false, true>(&checks).await;
        calls.sort_unstable();
        let expected = [(1, vec![10]), (1, vec![11, 14]), (2, vec![12]), (2, vec![15]), (3, vec![13])];
        assert_eq!(calls, expected, "each finds a way free, and waits for its like alone");
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
        let soon = Instant::now() + std::time::Duration::from_millis(100);
        let error = charge(&notes, 1, 1, soon).await.unwrap_err();
        assert!(error.failure() == Some(Failure::Timeout) && !error.is_ambiguous(), "{error}");
    }
}
