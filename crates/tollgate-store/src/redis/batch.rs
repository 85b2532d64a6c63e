//! Everyday checks that come at the same time, in one script: what `shared/together.rs` is told about Redis.
//!
//! Single buckets of one server only: on a cluster keys are in different slots, and each goes alone.

use std::sync::Arc;

use redis::{Cmd, Value};
use smallvec::smallvec;
use tokio::time::Instant;

use super::question::{Short, no_answer};
use super::route::Named;
use super::slot::slot;
use super::{RedisStore, failure, script};
use crate::shared::Part;
use crate::shared::shares::{Caps, Claim, Claims, Share, Shares, latest_start};
use crate::shared::together::{Carrier, Check, Queue};
use crate::{HoldId, StoreError};

/// How many calls may be in flight to each server: one connection carries many calls, and the server works on one at a time.
/// What waits in its line is to be done well within a deadline, also where each takes it a tenth of a millisecond.
pub(super) const CAPS: Caps = Caps { key: 64, batched_key: 256, limit: 256, server: 1_024, waiting: 4_096 };

impl RedisStore {
    /// The shares of a call of these parts, waited for until the call would be late. On a cluster every server has shares of its
    /// own, so that one that hangs holds up nobody else.
    pub(super) async fn share(&self, parts: &[Part<'_>], deadline: Instant) -> Result<Share, StoreError> {
        let mut claims = Claims::new();
        for part in parts {
            let server = self.server_of(&self.names.part(part));
            claims.push(Claim::Key(self.key_hash(part)));
            claims.push(Claim::Limit(self.shares.hash((server, &part.limit.name))));
            claims.push(Claim::Server(server));
        }
        self.shares.claim(claims, latest_start(deadline)).await
    }

    /// The shares of a settlement. Which keys it is about is known to the server alone; all settlements are to others like those
    /// of one limit.
    pub(super) async fn settlement_share(&self, id: HoldId, deadline: Instant) -> Result<Share, StoreError> {
        let server = self.server_of(&self.names.hold(id));
        let (id, all) = (self.shares.hash(id), self.shares.hash((server, "settle", "")));
        let claims = smallvec![Claim::Key(id), Claim::Limit(all), Claim::Server(server)];
        self.shares.claim(claims, latest_start(deadline)).await
    }

    /// A check that may go together with others; not on a cluster.
    pub(super) fn check(&self, part: &Part<'_>, alike: Short, key: String) -> Check<RedisStore> {
        let (of_key, of_server) = (Claim::BatchedKey(self.key_hash(part)), Claim::Server(0));
        let of_limit = Claim::Limit(self.shares.hash((0_u64, &part.limit.name)));
        Check { alike, key, of_key, of_limit, of_server }
    }

    fn key_hash(&self, part: &Part<'_>) -> u64 {
        self.shares.hash((&part.limit.name, part.key))
    }

    /// The server that has a key, as a number.
    fn server_of(&self, key: &str) -> u64 {
        if self.route.is_cluster() { self.route.server_of(slot(key)) } else { 0 }
    }
}

impl Carrier for RedisStore {
    type Alike = Short;
    type Key = String;
    type Answer = i64;

    /// The server does nothing else meanwhile, so it is a small part of a millisecond's work.
    const TOGETHER: usize = 64;

    /// The script charges one key after the other, so it may be the same.
    const ONCE: bool = false;

    fn queue(&self) -> &Queue<RedisStore> {
        &self.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    /// Enough that the server is never idle while answers are read and the next questions written.
    fn ways(&self) -> usize {
        4
    }

    fn lane_ways(&self) -> usize {
        CAPS.limit
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
        let answer =
            self.call(&script::BUCKETS, self.operation(short), keys, Named::No, deadline, &put).await?;
        let found = read_each(&answer, keys.len()).ok_or_else(|| no_answer("a charge"))?;
        Ok(found.into_iter().map(|found| found.map_err(Unkept::error)).collect())
    }
}

/// Why one key of several could not be charged; nothing was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unkept {
    /// What is kept under it is not ours.
    Foreign,
    /// It is new, and the server has no room.
    Full,
}

impl Unkept {
    pub(super) fn error(self) -> StoreError {
        match self {
            Unkept::Foreign => failure::not_ours(),
            Unkept::Full => failure::no_room(),
        }
    }
}

/// What was found under each key, or why that one could not be charged.
pub(super) fn read_each(answer: &Value, keys: usize) -> Option<Vec<Result<i64, Unkept>>> {
    let Value::Array(answers) = answer else { return None };
    let read = |answer: &Value| match answer {
        Value::Int(found) => Some(Ok(*found)),
        Value::SimpleString(status) if status == "STATE" => Some(Err(Unkept::Foreign)),
        Value::SimpleString(status) if status == "FULL" => Some(Err(Unkept::Full)),
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
        let full = Value::SimpleString("FULL".to_owned());
        let answer = Value::Array(vec![Value::Int(5), state, Value::Int(-1), full]);
        let expected = vec![Ok(5), Err(Unkept::Foreign), Ok(-1), Err(Unkept::Full)];
        assert_eq!(read_each(&answer, 4), Some(expected));
        assert_eq!(read_each(&answer, 2), None);
        let full = Value::Array(vec![Value::SimpleString("FULL".to_owned())]);
        assert_eq!(read_each(&full, 1), Some(vec![Err(Unkept::Full)]));
        assert_eq!(read_each(&Value::Array(vec![Value::Nil]), 1), None);
        assert_eq!(read_each(&Value::Nil, 0), None);
    }
}
