//! Records in PostgreSQL: two tables, and one function for each operation (`records.sql`).
//!
//! Records are what servers share beside counters (`Store::records`). This module encodes and decodes them; the functions keep
//! their number bounded and remove ended ones.

use tokio_postgres::types::ToSql;

use super::PostgresStore;
use super::call::Resend;
use super::codec::{column, instant, nonsense, whole};
use super::statement::Verb;
use crate::records::{check_id, in_force};
use crate::{Micros, PutRecord, Record, RecordKind, Records, StoreError};

impl PostgresStore {
    pub(super) async fn read_records(
        &self,
        kind: RecordKind,
        known: Option<u64>,
    ) -> Result<Records, StoreError> {
        let (kind, known, clock_us) = (kind.name(), known.map(whole), self.inner.clock_us());
        let values: &[&(dyn ToSql + Sync)] = &[&kind, &known, &clock_us];
        let row = self.call_one(Verb::ReadRecords, Resend::Once, values, &self.until()).await?;
        let now = instant(column(&row, 0)?)?;
        let revision = u64::try_from(column::<i64>(&row, 1)?).map_err(|_| nonsense("a revision below 0"))?;
        let Some(ids) = column::<Option<Vec<String>>>(&row, 2)? else {
            return Ok(Records { now, revision, changed: None });
        };
        let payloads: Vec<String> = column(&row, 3)?;
        let ends: Vec<i64> = column(&row, 4)?;
        let record = |((id, payload), ends): ((String, String), i64)| {
            let ends = u64::try_from(ends).ok().filter(|ends| *ends > 0).map(Micros::new);
            Record { id, payload, ends }
        };
        let records = ids.into_iter().zip(payloads).zip(ends).map(record).collect();
        Ok(Records { now, revision, changed: Some(in_force(records, now)) })
    }

    pub(super) async fn keep_record(
        &self,
        kind: RecordKind,
        record: &Record,
    ) -> Result<PutRecord, StoreError> {
        record.check()?;
        let most = i32::try_from(RecordKind::MOST).unwrap_or(i32::MAX);
        let (room, durable) = (kind.makes_room(), kind != RecordKind::Server);
        let (ends, clock_us, kind) =
            (record.ends.map(|ends| whole(ends.get())), self.inner.clock_us(), kind.name());
        let values: &[&(dyn ToSql + Sync)] =
            &[&kind, &record.id, &record.payload, &ends, &most, &room, &durable, &clock_us];
        let row = self.call_one(Verb::PutRecord, Resend::Once, values, &self.until()).await?;
        Ok(PutRecord { now: instant(column(&row, 0)?)?, is_kept: column(&row, 1)? })
    }

    pub(super) async fn drop_record(&self, kind: RecordKind, id: &str) -> Result<bool, StoreError> {
        check_id(id)?;
        let (kind, clock_us) = (kind.name(), self.inner.clock_us());
        let values: &[&(dyn ToSql + Sync)] = &[&kind, &id, &clock_us];
        let row = self.call_one(Verb::RemoveRecord, Resend::Once, values, &self.until()).await?;
        column(&row, 1)
    }
}
