//! Records: the data that servers share beside counters, such as overrides that were set at run time, and which servers are up.
//!
//! A record is a short text with an id and an optional end, in the time of the store. The records of a kind have one revision,
//! which changes with every change: a reader that knows the revision need not read them again. The number and the size of records
//! are bounded, so reading all of a kind is one call of bounded cost. No record takes part in a decision. The memory store keeps
//! them in a [`RecordTable`]; the other stores have their own code in their folders.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tollgate_kernel::Micros;

use crate::StoreError;

/// The subject of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RecordKind {
    /// What differs from the limits of the config for one key.
    Override,
    /// An entry of the change log.
    Change,
    /// A server that is up.
    Server,
}

impl RecordKind {
    /// All kinds.
    pub const ALL: [RecordKind; 3] = [RecordKind::Override, RecordKind::Change, RecordKind::Server];

    /// The most records of one kind.
    pub const MOST: usize = 1_000;

    /// Its name in stores.
    pub const fn name(self) -> &'static str {
        match self {
            RecordKind::Override => "override",
            RecordKind::Change => "change",
            RecordKind::Server => "server",
        }
    }

    /// Whether a new record replaces the one that ends first when the table is full. A new override is refused instead, because
    /// no active override may be lost.
    pub const fn makes_room(self) -> bool {
        !matches!(self, RecordKind::Override)
    }
}

/// A short text that servers share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Identifies it among those of its kind: 1 to 64 characters `a-z`, `0-9` and `-`.
    pub id: String,
    /// Its text: at most [`MOST_BYTES`](Self::MOST_BYTES), without NUL.
    pub payload: String,
    /// When it ends, by the store's clock; `None` is never.
    pub ends: Option<Micros>,
}

impl Record {
    /// How long a payload is at most.
    pub const MOST_BYTES: usize = 4_096;

    /// What is wrong with it, if anything is.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        check_id(&self.id)?;
        if self.payload.len() > Record::MOST_BYTES || self.payload.contains('\0') {
            return Err(StoreError::invalid(format!(
                "a record has at most {} bytes and no NUL; this one has {} bytes",
                Record::MOST_BYTES,
                self.payload.len()
            )));
        }
        Ok(())
    }

    fn has_ended(&self, now: Micros) -> bool {
        self.ends.is_some_and(|ends| ends <= now)
    }
}

/// What is wrong with an id, if anything is.
pub(crate) fn check_id(id: &str) -> Result<(), StoreError> {
    let is_sound = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    match (1..=64).contains(&id.len()) && id.bytes().all(is_sound) {
        true => Ok(()),
        false => Err(StoreError::invalid("the id of a record has 1 to 64 characters a-z, 0-9 and `-`")),
    }
}

/// The records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Records {
    /// The time of the store's clock.
    pub now: Micros,
    /// Changes with every record that is put or removed. An expiry does not change it, because its time is known.
    pub revision: u64,
    /// The records that have not ended, by id; `None` if the caller knows the revision.
    pub changed: Option<Vec<Record>>,
}

/// The result of putting a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutRecord {
    /// The time of the store's clock.
    pub now: Micros,
    /// False if the table of its kind is full; then nothing was changed.
    pub is_kept: bool,
}

/// Records in this process, for as long as it lives.
#[derive(Default)]
pub(crate) struct RecordTable {
    kinds: Mutex<BTreeMap<RecordKind, Kind>>,
}

#[derive(Default)]
struct Kind {
    revision: u64,
    records: BTreeMap<String, Record>,
}

impl Kind {
    fn changes(&mut self, now: Micros) {
        self.revision = now.get().max(self.revision + 1);
    }
}

impl RecordTable {
    pub(crate) fn read(&self, kind: RecordKind, known: Option<u64>, now: Micros) -> Records {
        let kinds = self.kinds.lock();
        let Some(kind) = kinds.get(&kind) else {
            return Records { now, revision: 0, changed: (known != Some(0)).then(Vec::new) };
        };
        let all = || kind.records.values().filter(|record| !record.has_ended(now)).cloned().collect();
        Records { now, revision: kind.revision, changed: (known != Some(kind.revision)).then(all) }
    }

    pub(crate) fn put(
        &self,
        kind: RecordKind,
        record: &Record,
        now: Micros,
    ) -> Result<PutRecord, StoreError> {
        record.check()?;
        let mut kinds = self.kinds.lock();
        let of_kind = kinds.entry(kind).or_default();
        of_kind.records.retain(|_, record| !record.has_ended(now));
        if of_kind.records.len() >= RecordKind::MOST && !of_kind.records.contains_key(&record.id) {
            let ending = of_kind.records.values().filter(|record| record.ends.is_some());
            let first = ending.min_by_key(|record| record.ends).map(|record| record.id.clone());
            let Some(first) = first.filter(|_| kind.makes_room()) else {
                return Ok(PutRecord { now, is_kept: false });
            };
            of_kind.records.remove(&first);
        }
        of_kind.records.insert(record.id.clone(), record.clone());
        of_kind.changes(now);
        Ok(PutRecord { now, is_kept: true })
    }

    pub(crate) fn remove(&self, kind: RecordKind, id: &str, now: Micros) -> Result<bool, StoreError> {
        check_id(id)?;
        let mut kinds = self.kinds.lock();
        let of_kind = kinds.entry(kind).or_default();
        let removed = of_kind.records.remove(id);
        if removed.is_some() {
            of_kind.changes(now);
        }
        Ok(removed.is_some_and(|record| !record.has_ended(now)))
    }
}

/// The records that have not ended, by id: for stores that also return expired ones.
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) fn in_force(mut records: Vec<Record>, now: Micros) -> Vec<Record> {
    records.retain(|record| !record.has_ended(now));
    records.sort_by(|one, other| one.id.cmp(&other.id));
    records
}
