//! Single checks that come at the same time, sent as one.
//!
//! A script costs Redis several times what it does: two or three in one cost little more than one. So while some calls are on
//! their way, the checks that come meanwhile wait for them, and then go together, each still decided for itself; a check that
//! finds nothing on its way goes at once and alone. Nobody waits for company. Only everyday charges are sent like this: single
//! buckets of one server. On a cluster keys are in different slots, and each goes alone.

use std::collections::VecDeque;

use parking_lot::Mutex;
use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::question::{Short, no_answer};
use super::route::Named;
use super::{RedisStore, not_ours, script};
use crate::{Failure, StoreError};

/// How many calls may be on their way before checks wait for each other. Two keep the server busy while one is read.
const ON_THE_WAY: usize = 2;

/// How many checks go together at most. The server does nothing else meanwhile, so it is a small part of a millisecond's work.
const TOGETHER: usize = 64;

#[derive(Default)]
pub(super) struct Batches {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    on_the_way: usize,
}

/// A check that waits to be sent, or for its answer.
struct Waiting {
    key: String,
    short: Short,
    deadline: Instant,
    answer: oneshot::Sender<Result<i64, StoreError>>,
}

impl RedisStore {
    /// A check that may go together with others.
    pub(super) async fn charge_with_others(&self, key: String, short: Short) -> Result<i64, StoreError> {
        let deadline = self.deadline();
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting { key, short, deadline, answer };
        let sent = {
            let mut state = self.batches.state.lock();
            state.waiting.push_back(waiting);
            (state.on_the_way < ON_THE_WAY).then(|| {
                state.on_the_way += 1;
                state.take()
            })
        };
        if let Some(batch) = sent {
            let store = self.clone();
            tokio::spawn(async move { store.send_batches(batch).await });
        }
        match timeout_at(deadline, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => {
                Err(StoreError::failed(Failure::Reply, "the task that asked Redis is gone").ambiguous())
            }
            // It may have been sent by then, with others or alone.
            Err(_) => Err(StoreError::failed(Failure::Timeout, "Redis did not answer in time").ambiguous()),
        }
    }

    /// Sends a batch, and what has come meanwhile, until nothing has.
    async fn send_batches(self, mut batch: Vec<Waiting>) {
        loop {
            self.send_batch(batch).await;
            let mut state = self.batches.state.lock();
            batch = state.take();
            if batch.is_empty() {
                state.on_the_way -= 1;
                return;
            }
        }
    }

    async fn send_batch(&self, batch: Vec<Waiting>) {
        // Who is not waiting any more is not asked for.
        let batch: Vec<Waiting> = batch.into_iter().filter(|waiting| !waiting.answer.is_closed()).collect();
        let Some(first) = batch.first() else { return };
        let deadline = batch.iter().map(|waiting| waiting.deadline).min().unwrap_or(first.deadline);
        let keys: Vec<String> = batch.iter().map(|waiting| waiting.key.clone()).collect();
        let put = |cmd: &mut Cmd| first.short.put(cmd);
        let asked = self.call(&script::CHARGE, "each", &keys, Named::No, deadline, &put).await;
        let answers =
            asked.and_then(|answer| read_each(&answer, keys.len()).ok_or_else(|| no_answer("a charge")));
        match answers {
            Ok(answers) => {
                for (waiting, found) in batch.into_iter().zip(answers) {
                    let _ = waiting.answer.send(found.ok_or_else(not_ours));
                }
            }
            Err(error) => {
                for waiting in batch {
                    let _ = waiting.answer.send(Err(error.for_another()));
                }
            }
        }
    }
}

impl State {
    /// The next checks to go together: from the first, those that are charged alike.
    fn take(&mut self) -> Vec<Waiting> {
        let mut batch: Vec<Waiting> = Vec::new();
        while batch.len() < TOGETHER
            && let Some(next) = self.waiting.front()
            && batch.first().is_none_or(|first| first.short == next.short)
        {
            batch.extend(self.waiting.pop_front());
        }
        batch
    }
}

/// What was found under each key; `None` where what is kept there is not ours.
pub(super) fn read_each(answer: &Value, keys: usize) -> Option<Vec<Option<i64>>> {
    let Value::Array(answers) = answer else { return None };
    let read = |answer: &Value| match answer {
        Value::Int(found) => Some(Some(*found)),
        Value::SimpleString(status) if status == "STATE" => Some(None),
        _ => None,
    };
    (answers.len() == keys).then(|| answers.iter().map(read).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_charged_alike_goes_together_and_in_order() {
        let mut state = State::default();
        let add = |state: &mut State, key: &str, price_us| {
            let (answer, answered) = oneshot::channel();
            // The other end must stay, or nobody would be waiting.
            std::mem::forget(answered);
            let short = Short { price_us, span_us: 9, how: "PX", stay: "1".to_owned() };
            state.waiting.push_back(Waiting { key: key.to_owned(), short, deadline: Instant::now(), answer });
        };
        for (key, price_us) in [("a", 1), ("b", 1), ("c", 2), ("d", 1)] {
            add(&mut state, key, price_us);
        }
        for number in 0..TOGETHER + 1 {
            add(&mut state, &number.to_string(), 3);
        }
        let keys = |batch: Vec<Waiting>| batch.iter().map(|waiting| waiting.key.clone()).collect::<Vec<_>>();
        assert_eq!(keys(state.take()), ["a", "b"]);
        assert_eq!(keys(state.take()), ["c"]);
        assert_eq!(keys(state.take()), ["d"]);
        assert_eq!(state.take().len(), TOGETHER);
        assert_eq!(state.take().len(), 1);
        assert!(state.take().is_empty());
    }

    #[test]
    fn answers_are_read_one_for_each_key() {
        let state = Value::SimpleString("STATE".to_owned());
        let answer = Value::Array(vec![Value::Int(5), state, Value::Int(-1)]);
        assert_eq!(read_each(&answer, 3), Some(vec![Some(5), None, Some(-1)]));
        assert_eq!(read_each(&answer, 2), None);
        assert_eq!(read_each(&Value::Array(vec![Value::Nil]), 1), None);
        assert_eq!(read_each(&Value::Nil, 0), None);
    }
}
