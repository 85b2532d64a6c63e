//! Records in Redis: a hash and a sorted set for each kind, in one slot, and one script (`records.lua`).
//!
//! Records are what servers share beside counters (`Store::records`). This module encodes and decodes them; the script keeps
//! their number bounded and removes ended ones.

use redis::{Cmd, Value};

use super::codec::no_answer;
use super::route::Named;
use super::slot::slot;
use super::{RedisStore, script};
use crate::records::{check_id, in_force};
use crate::{Micros, PutRecord, Record, RecordKind, Records, StoreError};

impl RedisStore {
    pub(super) async fn read_records(
        &self,
        kind: RecordKind,
        known: Option<u64>,
    ) -> Result<Records, StoreError> {
        let known = known.map(|known| known.to_string()).unwrap_or_default();
        let answer = self
            .call_records(kind, "read", &|cmd| {
                cmd.arg(&known);
            })
            .await?;
        read(&answer).ok_or_else(|| no_answer("a reading of records"))
    }

    pub(super) async fn keep_record(
        &self,
        kind: RecordKind,
        record: &Record,
    ) -> Result<PutRecord, StoreError> {
        record.check()?;
        let put = |cmd: &mut Cmd| {
            let ends = record.ends.map_or(0, Micros::get);
            cmd.arg(&record.id).arg(&record.payload).arg(ends).arg(RecordKind::MOST);
            cmd.arg(u8::from(kind.makes_room()));
        };
        let answer = self.call_records(kind, "put", &put).await?;
        match &words(&answer)[..] {
            [Some(now), Some(word @ ("KEPT" | "FULL"))] => {
                let now = now.parse().map_err(|_| no_answer("a record"))?;
                Ok(PutRecord { now: Micros::new(now), is_kept: *word == "KEPT" })
            }
            _ => Err(no_answer("a record")),
        }
    }

    pub(super) async fn drop_record(&self, kind: RecordKind, id: &str) -> Result<bool, StoreError> {
        check_id(id)?;
        let answer = self
            .call_records(kind, "remove", &|cmd| {
                cmd.arg(id);
            })
            .await?;
        match &words(&answer)[..] {
            [Some(_), Some(removed)] => Ok(*removed != "0"),
            _ => Err(no_answer("a removed record")),
        }
    }

    /// Calls the script. It is idempotent, so it may be sent again. It is sent with EVAL: it is short and rare, and so the
    /// EVALSHA count of a server is the number of decisions.
    async fn call_records(
        &self,
        kind: RecordKind,
        operation: &'static str,
        put: &(dyn Fn(&mut Cmd) + Send + Sync),
    ) -> Result<Value, StoreError> {
        let keys = self.names.records(kind);
        let build = |not_after: &str| {
            let mut cmd = redis::cmd("EVAL");
            cmd.arg(&script::RECORDS.text).arg(keys.len()).arg(&keys[..]).arg(not_after).arg(operation);
            put(&mut cmd);
            cmd
        };
        let slot = if self.route.is_cluster() { slot(&keys[0]) } else { 0 };
        self.route.call(slot, Named::Yes, self.deadline(), &build).await
    }
}

/// The strings of a list; `None` if an element is not a string.
fn words(answer: &Value) -> Vec<Option<&str>> {
    let Value::Array(answer) = answer else { return Vec::new() };
    answer.iter().map(text).collect()
}

fn text(word: &Value) -> Option<&str> {
    match word {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn read(answer: &Value) -> Option<Records> {
    let Value::Array(parts) = answer else { return None };
    let now = Micros::new(text(parts.first()?)?.parse().ok()?);
    let revision = text(parts.get(1)?)?.parse().ok()?;
    let changed = match parts.get(2) {
        None => None,
        Some(Value::Array(fields)) => {
            let (pairs, _) = fields.as_chunks::<2>();
            let pairs = pairs.iter().filter(|[id, _]| text(id) != Some(""));
            Some(in_force(pairs.map(|[id, value]| record(id, value)).collect::<Option<_>>()?, now))
        }
        Some(_) => return None,
    };
    Some(Records { now, revision, changed })
}

fn record(id: &Value, value: &Value) -> Option<Record> {
    let (ends, payload) = text(value)?.split_once(':')?;
    let ends = Some(ends.parse().ok()?).filter(|ends| *ends > 0).map(Micros::new);
    Some(Record { id: text(id)?.to_owned(), payload: payload.to_owned(), ends })
}
