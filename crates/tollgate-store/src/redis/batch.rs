//! Everyday checks that come at the same time, in one script: what `shared/together.rs` is told about Redis.
//!
//! Single buckets of one server only: on a cluster keys are in different slots, and each goes alone.

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::question::{Short, no_answer};
use super::route::Named;
use super::{RedisStore, not_ours, script};
use crate::shared::together::{Carrier, Queue};
use crate::{Failure, StoreError};

impl Carrier for RedisStore {
    type Alike = Short;
    type Key = String;
    type Answer = i64;

    /// The server does nothing else meanwhile, so it is a small part of a millisecond's work.
    const TOGETHER: usize = 64;

    /// The script charges one key after the other, so it may be the same.
    const ONCE: bool = false;

    /// A connection carries any number of calls.
    const APART: bool = true;

    fn queue(&self) -> &Queue<RedisStore> {
        &self.queue
    }

    /// Enough that the server is never idle while answers are read and the next questions written.
    fn ways(&self) -> usize {
        4
    }

    async fn carry(
        &self,
        short: &Short,
        keys: &[String],
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Vec<Result<i64, StoreError>>, StoreError> {
        let put = |cmd: &mut Cmd| {
            // There is a connection now, and what is put to it is as good as sent.
            sent();
            short.put(cmd);
        };
        let answer = self.call(&script::BUCKETS, short.operation(), keys, Named::No, deadline, &put).await?;
        let found = read_each(&answer, keys.len()).ok_or_else(|| no_answer("a charge"))?;
        Ok(found.into_iter().map(|found| found.map_err(Unfound::error)).collect())
    }
}

/// Why nothing was found under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfound {
    /// What is kept there is not ours.
    Foreign,
    /// There is no room for a new key.
    Full,
}

impl Unfound {
    pub(super) fn error(self) -> StoreError {
        match self {
            Unfound::Foreign => not_ours(),
            Unfound::Full => StoreError::failed(Failure::Full, "Redis is out of memory (maxmemory)"),
        }
    }
}

/// What was found under each key.
pub(super) fn read_each(answer: &Value, keys: usize) -> Option<Vec<Result<i64, Unfound>>> {
    let Value::Array(answers) = answer else { return None };
    let read = |answer: &Value| match answer {
        Value::Int(found) => Some(Ok(*found)),
        Value::SimpleString(status) if status == "STATE" => Some(Err(Unfound::Foreign)),
        Value::SimpleString(status) if status == "FULL" => Some(Err(Unfound::Full)),
        _ => None,
    };
    (answers.len() == keys).then(|| answers.iter().map(read).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_one_for_each_key() {
        let state = Value::SimpleString("STATE".to_owned());
        let answer = Value::Array(vec![Value::Int(5), state, Value::Int(-1)]);
        assert_eq!(read_each(&answer, 3), Some(vec![Ok(5), Err(Unfound::Foreign), Ok(-1)]));
        assert_eq!(read_each(&answer, 2), None);
        let full = Value::Array(vec![Value::SimpleString("FULL".to_owned())]);
        assert_eq!(read_each(&full, 1), Some(vec![Err(Unfound::Full)]));
        assert_eq!(read_each(&Value::Array(vec![Value::Nil]), 1), None);
        assert_eq!(read_each(&Value::Nil, 0), None);
    }
}
