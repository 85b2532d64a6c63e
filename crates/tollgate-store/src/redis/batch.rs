//! Batches of Redis calls: how concurrent calls go to the server in one script call.
//!
//! `remote/batching.rs` decides which calls form a batch; this module is its [`Carrier`] for Redis. Batches exist only on a
//! single server: on a cluster, keys are in different slots and each call goes alone. Charges of the same shape are batched, with
//! or without a hold, and so are equal settlements. The concurrency limits ([`CAPS`]) are here too. `shape.rs` encodes the
//! arguments, and `redis.rs` sends the script.

use std::sync::Arc;

use redis::{Cmd, Value};
use smallvec::smallvec;
use tokio::time::Instant;

use super::codec::no_answer;
use super::route::Named;
use super::shape::{self, Answer, ChargeKeys, Operation, ScriptCall, Shape};
use super::slot::slot;
use super::{RedisStore, script};
use crate::remote::batching::{Answers, Carrier, Check, Locks, Queue, Repeats};
use crate::remote::shares::{Caps, Claim, Claims, Share, Shares, latest_start};
use crate::{ChargeId, Settled, Settlement, StoreError, StoredCharge};

/// How many calls may be in flight to each server: one connection carries many calls, and the server runs one at a time. The
/// queue must be done well within a deadline even if each call takes the server a tenth of a millisecond.
pub(crate) const CAPS: Caps = Caps { key: 64, batched_key: 256, limit: 256, server: 1_024, waiting: 4_096 };

/// How many batches of one kind are in flight before others wait: enough to keep the server busy while answers are read and the
/// next calls are written.
pub(crate) const BATCHES_IN_FLIGHT: usize = 4;

/// The most charges or settlements in a batch. The server does nothing else meanwhile, so a batch must take only a small part of
/// a millisecond.
pub(crate) const MAX_BATCH: usize = 32;

impl RedisStore {
    /// Takes the shares of a call with these parts, and waits for them until the call would be late. On a cluster every server
    /// has its own shares, so that a server that hangs does not delay calls to the others.
    pub(super) async fn share(
        &self,
        parts: &[StoredCharge<'_>],
        deadline: Instant,
    ) -> Result<Share, StoreError> {
        let mut claims = Claims::new();
        for part in parts {
            let server = self.server_of(part);
            claims.push(Claim::Key(self.key_hash(part)));
            for claim in [Claim::Limit(self.shares.hash((server, &part.limit.name))), Claim::Server(server)] {
                // Most calls have parts of one limit only.
                if !claims.iter().take(4).any(|other| *other == claim) {
                    claims.push(claim);
                }
            }
        }
        self.shares.claim(claims, latest_start(Instant::now(), deadline)).await
    }

    /// The shares of a settlement. Only the server knows which keys it changes, so all settlements count as one limit.
    pub(super) async fn settlement_share(
        &self,
        id: ChargeId,
        deadline: Instant,
    ) -> Result<Share, StoreError> {
        let server = self.route.server_of(slot(&self.names.hold(id)));
        let (id, all) = (self.shares.hash(id), self.shares.hash((server, "settle", "")));
        let claims = smallvec![Claim::Key(id), Claim::Limit(all), Claim::Server(server)];
        self.shares.claim(claims, latest_start(Instant::now(), deadline)).await
    }

    /// A charge that may be batched; not on a cluster.
    pub(super) fn check(
        &self,
        parts: &[StoredCharge<'_>],
        alike: Shape,
        key: ChargeKeys,
    ) -> Check<RedisStore> {
        let limit = |part: &StoredCharge<'_>| Claim::Limit(self.shares.hash((0_u64, &part.limit.name)));
        if let [part] = parts {
            let (of_key, lane) = (Claim::BatchedKey(self.key_hash(part)), limit(part));
            return Check { alike, key, of_key, lane, of_batch: smallvec![lane, Claim::Server(0)] };
        }
        let mut of_batch = Claims::new();
        for part in parts {
            let claim = limit(part);
            if !of_batch.contains(&claim) {
                of_batch.push(claim);
            }
        }
        of_batch.push(Claim::Server(0));
        let names: Vec<&str> = parts.iter().map(|part| &*part.limit.name).collect();
        let keys: Vec<&str> = parts.iter().map(|part| part.key).collect();
        let lane = Claim::Limit(self.shares.hash(("several", &names)));
        Check { alike, key, of_key: Claim::BatchedKey(self.shares.hash((names, keys))), lane, of_batch }
    }

    fn key_hash(&self, part: &StoredCharge<'_>) -> u64 {
        self.shares.hash((&part.limit.name, part.key))
    }

    /// The number of the server that has the key of a part.
    pub(super) fn server_of(&self, part: &StoredCharge<'_>) -> u64 {
        if self.route.is_cluster() { self.route.server_of(slot(&self.names.part(part))) } else { 0 }
    }

    /// Sends charges of one shape in one call. If the state of their keys is large, the script answers only the first charges,
    /// and the rest go in further calls, so that no call blocks the server for long.
    pub(super) async fn send(
        &self,
        shape: &Shape,
        operation: Operation,
        charges: &[ChargeKeys],
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Vec<Result<Answer, StoreError>>, StoreError> {
        // If the servers are nearly full, limits whose numbers come with the call create no new keys: clients can invent such
        // keys, and the room is for the keys of others.
        let operation = match operation {
            Operation::Charge if shape.keeps_instant() && !self.takes_new_keys() => Operation::Known,
            operation => operation,
        };
        let script_call = shape.script_call(operation, self.route.options().clock.as_ref());
        let named = if shape.has_hold() { Named::Yes } else { Named::No };
        let mut answers: Vec<Result<Answer, StoreError>> = Vec::new();
        loop {
            let rest = &charges[answers.len()..];
            let put = |cmd: &mut Cmd| {
                // There is a connection now, so the command counts as sent.
                sent();
                script_call.put(cmd, rest, self.names.part_start().len());
            };
            let keys = ScriptCall::keys(rest);
            let answer =
                self.call(script_call.script, script_call.operation(), &keys, named, deadline, &put).await;
            let read = |answer| script_call.read(&answer, rest.len()).ok_or_else(|| no_answer("a charge"));
            match answer.and_then(read) {
                Ok(first) if answers.is_empty() && first.len() == charges.len() => return Ok(first),
                read => add(&mut answers, read, charges.len())?,
            }
            if answers.len() == charges.len() {
                return Ok(answers);
            }
        }
    }
}

/// Adds the answers of a call for the remaining charges. An error applies to all remaining charges.
fn add<T>(
    answers: &mut Vec<Result<T, StoreError>>,
    read: Result<Vec<Result<T, StoreError>>, StoreError>,
    all: usize,
) -> Result<(), StoreError> {
    match read {
        Ok(more) => answers.extend(more),
        Err(error) if answers.is_empty() => return Err(error),
        Err(error) => answers.resize_with(all, || Err(error.for_another())),
    }
    Ok(())
}

impl Carrier for RedisStore {
    type Alike = Shape;
    type Key = ChargeKeys;
    type Answer = Answer;

    const MAX_BATCH: usize = MAX_BATCH;

    /// The script makes one charge after the other, so a batch may repeat a key.
    const REPEATS: Repeats = Repeats::Freely;

    fn queue(&self) -> &Queue<RedisStore> {
        &self.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    fn ways(&self) -> usize {
        BATCHES_IN_FLIGHT
    }

    fn lane_ways(&self) -> usize {
        CAPS.limit
    }

    async fn carry(
        &self,
        shape: &Shape,
        charges: &[ChargeKeys],
        _locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<Answer>, StoreError> {
        let answers = self.send(shape, Operation::Charge, charges, deadline, sent).await?;
        Ok(answers.into_iter().map(Some).collect())
    }
}

/// The carrier of batched settlements.
#[derive(Clone)]
pub(super) struct Settlements {
    store: RedisStore,
    queue: Arc<Queue<Settlements>>,
}

impl RedisStore {
    /// A settlement that may be batched; not on a cluster.
    pub(super) async fn settle_batched(
        &self,
        id: ChargeId,
        settlement: &Settlement,
        deadline: Instant,
    ) -> Result<Settled, StoreError> {
        let lane = Claim::Limit(self.shares.hash((0_u64, "settle", "")));
        let check = Check {
            alike: settlement.clone(),
            key: id.get(),
            of_key: Claim::BatchedKey(self.shares.hash(id)),
            lane,
            of_batch: smallvec![lane, Claim::Server(0)],
        };
        let carrier = Settlements { store: self.clone(), queue: self.settlements.clone() };
        crate::remote::batching::charge(&carrier, check, deadline).await
    }
}

impl Carrier for Settlements {
    type Alike = Settlement;
    /// The number of the charge id.
    type Key = u128;
    type Answer = Settled;

    const MAX_BATCH: usize = MAX_BATCH;
    const REPEATS: Repeats = Repeats::Freely;

    fn queue(&self) -> &Queue<Settlements> {
        &self.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.store.shares
    }

    fn ways(&self) -> usize {
        BATCHES_IN_FLIGHT
    }

    fn lane_ways(&self) -> usize {
        CAPS.limit
    }

    async fn carry(
        &self,
        settlement: &Settlement,
        ids: &[u128],
        _locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<Settled>, StoreError> {
        let ids: Vec<ChargeId> = ids.iter().map(|id| ChargeId::from(*id)).collect();
        let keys: Vec<String> = ids.iter().map(|id| self.store.names.hold(*id)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut answers: Vec<Result<Settled, StoreError>> = Vec::new();
        while answers.len() < keys.len() {
            let (rest, ids) = (&keys[answers.len()..], &ids[answers.len()..]);
            let answer = self.store.send_settlement(settlement, rest, ids, deadline, sent).await;
            let read = |answer: Value| match answer {
                Value::Array(first) if (1..=rest.len()).contains(&first.len()) => {
                    Ok(first.iter().map(|answer| read_settled(answer, settlement)).collect())
                }
                _ => Err(no_answer("a settlement")),
            };
            add(&mut answers, answer.and_then(read), keys.len())?;
        }
        Ok(answers.into_iter().map(Some).collect())
    }
}

/// Reads the answer to one settlement.
pub(super) fn read_settled(answer: &Value, settlement: &Settlement) -> Result<Settled, StoreError> {
    if let Value::SimpleString(status) = answer {
        return Err(shape::unkept(status).unwrap_or_else(|| no_answer("a settlement")));
    }
    let words = super::words(answer).ok_or_else(|| no_answer("a settlement"))?;
    let amounts = match settlement {
        Settlement::Each(actuals) => actuals.len(),
        _ => 0,
    };
    match &words[..] {
        [word] if word == "DONE" => Ok(Settled::Done),
        [word] if word == "ALREADY" => Ok(Settled::Already),
        [word] if word == "UNKNOWN" => Ok(Settled::Unknown),
        [word, reserved @ ..] if word == "DIFFERENT" => Err(super::different_amounts(reserved)),
        [word, count] if word == "COUNT" => {
            Err(StoreError::wrong_count(count.parse().unwrap_or_default(), amounts))
        }
        [word, name, names @ ..] if word == "NAMES" => Err(super::no_such_limit(name, names)),
        _ => Err(no_answer("a settlement")),
    }
}

/// Reads the answer to the settlement of one hold.
pub(super) fn read_only(answer: &Value, settlement: &Settlement) -> Result<Settled, StoreError> {
    match answer {
        Value::Array(answers) if answers.len() == 1 => read_settled(&answers[0], settlement),
        _ => Err(no_answer("a settlement")),
    }
}

/// Caps the amount at the largest count, which no limit exceeds.
fn put_amount(cmd: &mut Cmd, actual: u64) {
    cmd.arg(actual.min(tollgate_kernel::MAX_COUNT));
}

impl RedisStore {
    /// Adds the number of holds, the prefix of the part names, and the id of each hold.
    fn put_holders(&self, cmd: &mut Cmd, ids: &[ChargeId]) {
        cmd.arg(ids.len()).arg(self.names.part_start());
        for id in ids {
            cmd.arg(&id.get().to_be_bytes()[..]);
        }
    }

    /// Settles these holds, all in the same way. Their keys are the first of `keys`.
    pub(super) async fn send_settlement(
        &self,
        settlement: &Settlement,
        keys: &[&str],
        ids: &[ChargeId],
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Value, StoreError> {
        let operation = match settlement {
            Settlement::Actual(_) => "actual",
            Settlement::Each(_) => "each",
            Settlement::Named(_) => "named",
            Settlement::Cancel => "cancel",
            Settlement::Release => "release",
            Settlement::Renew => "renew",
        };
        let put = |cmd: &mut Cmd| {
            sent();
            self.put_holders(cmd, ids);
            match settlement {
                Settlement::Actual(actual) => put_amount(cmd, *actual),
                Settlement::Each(actuals) => actuals.iter().for_each(|actual| put_amount(cmd, *actual)),
                Settlement::Named(actuals) => {
                    for (name, actual) in actuals {
                        put_amount(cmd.arg(name), *actual);
                    }
                }
                Settlement::Cancel | Settlement::Release | Settlement::Renew => {}
            }
        };
        self.call(&script::SETTLE, operation, keys, Named::Yes, deadline, &put).await
    }

    /// Settles one hold with these actual costs, in the order of its parts in the slot.
    pub(super) async fn settle_pairs(
        &self,
        keys: &[&str],
        id: ChargeId,
        actuals: &[u64],
        deadline: Instant,
    ) -> Result<Value, StoreError> {
        let put = |cmd: &mut Cmd| {
            self.put_holders(cmd, &[id]);
            actuals.iter().for_each(|actual| put_amount(cmd, *actual));
        };
        self.call(&script::SETTLE, "pairs", keys, Named::Yes, deadline, &put).await
    }

    /// Runs another operation of the settlement script on one hold or one key, and returns its answer.
    pub(super) async fn send_hold(
        &self,
        operation: &'static str,
        keys: &[&str],
        id: ChargeId,
        deadline: Instant,
    ) -> Result<Value, StoreError> {
        let put = |cmd: &mut Cmd| self.put_holders(cmd, &[id]);
        match self.call(&script::SETTLE, operation, keys, Named::Yes, deadline, &put).await? {
            Value::Array(mut answers) if answers.len() == 1 => match answers.remove(0) {
                Value::SimpleString(status) => {
                    Err(shape::unkept(&status).unwrap_or_else(|| no_answer("a settlement")))
                }
                answer => Ok(answer),
            },
            _ => Err(no_answer("a settlement")),
        }
    }
}
