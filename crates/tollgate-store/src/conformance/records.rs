//! What servers share beside counters: records are kept, replaced, removed, end by the store's clock, and are bounded in number and size;
//! who knows the revision is spared them. A store that keeps none says so, and is not held to this.

use super::Subject;
use crate::{ManualClock, Micros, PutRecord, Record, RecordKind, Records, Store};

const SECOND: Micros = Micros::from_secs(1);

fn record(id: impl ToString, payload: &str, ends: Option<Micros>) -> Record {
    Record { id: id.to_string(), payload: payload.to_owned(), ends }
}

async fn read(store: &dyn Store, kind: RecordKind, known: Option<u64>) -> Records {
    store.records(kind, known).await.expect("records")
}

async fn put(store: &dyn Store, kind: RecordKind, record: &Record) -> PutRecord {
    store.put_record(kind, record).await.expect("a record")
}

async fn all(store: &dyn Store, kind: RecordKind) -> Vec<Record> {
    read(store, kind, None).await.changed.expect("all records")
}

pub(super) async fn records(make: &impl AsyncFn(ManualClock) -> Subject) {
    let subject = make(super::clock()).await;
    if subject.store.records(RecordKind::Override, None).await.is_err_and(|error| error.is_invalid()) {
        return;
    }
    put_and_removed(make).await;
    ended(make).await;
    bounded(make).await;
    raced(make).await;
}

/// What is put is read, in the order of ids, by kind; what is known is not read again; and no key is remembered for it.
async fn put_and_removed(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let store = &*subject.store;
    let kind = RecordKind::Override;
    assert_eq!(all(store, kind).await, []);
    let none = read(store, kind, None).await;
    assert_eq!(none.now, clock.now(), "records end by the store's clock, which is the test's");
    assert_eq!(read(store, kind, Some(none.revision)).await.changed, None);

    // Whatever a payload has: the separators of every store's own format among it.
    let texts = ["", "plain", "a:b:c", "0:", "{\"é\":\"\\u0000\"}", "'; drop table x; --", "\n\t\u{1f6a7}"];
    let put_all: Vec<Record> =
        texts.iter().enumerate().map(|(number, text)| record(number, text, None)).collect();
    for one in put_all.iter().rev() {
        assert_eq!(put(store, kind, one).await, PutRecord { now: clock.now(), is_kept: true });
    }
    let seen = read(store, kind, Some(none.revision)).await;
    assert_eq!(seen.changed.as_deref(), Some(&put_all[..]));
    assert!(seen.revision > none.revision);
    assert_eq!(read(store, kind, Some(seen.revision)).await.changed, None);
    for other in [RecordKind::Change, RecordKind::Server] {
        assert_eq!(all(store, other).await, [], "kinds are apart");
    }

    let other = record(3, "other", Some(clock.now().saturating_add(SECOND)));
    put(store, kind, &other).await;
    let replaced = read(store, kind, Some(seen.revision)).await;
    assert!(replaced.revision > seen.revision, "a revision only grows");
    assert_eq!(replaced.changed.expect("a change")[3], other);
    // From one that ends back to one that does not.
    put(store, kind, &put_all[3]).await;
    clock.advance(SECOND);
    assert_eq!(all(store, kind).await, put_all);

    assert!(store.remove_record(kind, "3").await.expect("a removal"));
    assert!(!store.remove_record(kind, "3").await.expect("a removal"), "it is gone already");
    assert_eq!(all(store, kind).await.len(), put_all.len() - 1);
    assert!(read(store, kind, Some(replaced.revision)).await.changed.is_some());
    for one in &put_all {
        store.remove_record(kind, &one.id).await.expect("a removal");
    }
    let removed = read(store, kind, Some(replaced.revision)).await;
    assert_eq!((removed.changed, (subject.remembered)().await), (Some(Vec::new()), 0));
    // The next change has a revision that no reader has seen.
    put(store, kind, &put_all[1]).await;
    let again = read(store, kind, None).await.revision;
    assert!(![none.revision, seen.revision, replaced.revision, removed.revision].contains(&again));
}

/// A record ends at its time, to the microsecond, and its revision stays.
async fn ended(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let (store, kind) = (&*subject.store, RecordKind::Server);
    let at = |micros| Some(clock.now().saturating_add(Micros::new(micros)));
    let (soon, later) = (record("soon", "1", at(1_000_001)), record("later", "2", at(2_000_000)));
    put(store, kind, &soon).await;
    put(store, kind, &later).await;
    clock.advance(Micros::new(1_000_000));
    let seen = read(store, kind, None).await;
    assert_eq!(seen.changed, Some(vec![later.clone(), soon.clone()]));
    clock.advance(Micros::new(1));
    assert_eq!(read(store, kind, Some(seen.revision)).await.changed, None, "its end was known");
    assert_eq!(all(store, kind).await, std::slice::from_ref(&later));
    assert!(!store.remove_record(kind, "soon").await.expect("a removal"), "it had ended");
    clock.advance(SECOND);
    assert_eq!(all(store, kind).await, []);
    // A record that has ended before it is stored is not remembered.
    put(store, kind, &record("past", "3", Some(clock.now()))).await;
    assert_eq!(all(store, kind).await, []);
    put(store, kind, &record("next", "4", None)).await;
    assert_eq!(all(store, kind).await.len(), 1);
}

/// There is a most of records and of bytes. An override above it is turned away; of others, the one that ends first makes room.
async fn bounded(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let store = &*subject.store;
    let end_of = |number: usize| {
        let number = u64::try_from(number).expect("a small number");
        Some(clock.now().saturating_add(Micros::from_secs(10 + number)))
    };
    for kind in [RecordKind::Override, RecordKind::Change] {
        for number in 0..RecordKind::MOST {
            assert!(put(store, kind, &record(number, "x", end_of(number))).await.is_kept);
        }
        let full = read(store, kind, None).await;
        assert_eq!(full.changed.map(|all| all.len()), Some(RecordKind::MOST));
        assert!(put(store, kind, &record(7, "other", end_of(7))).await.is_kept, "it replaces one");
        let one_more = put(store, kind, &record("more", "y", end_of(RecordKind::MOST))).await;
        assert_eq!(one_more.is_kept, kind.makes_room(), "{kind:?}");
        let all = all(store, kind).await;
        let has = |id: &str| all.iter().any(|record| record.id == id);
        assert_eq!(all.len(), RecordKind::MOST);
        assert_eq!((has("more"), has("0")), (kind.makes_room(), !kind.makes_room()));
    }
    // What ends makes room for anybody.
    clock.advance(Micros::from_secs(10));
    assert!(put(store, RecordKind::Override, &record("more", "y", None)).await.is_kept);
    let most = "x".repeat(Record::MOST_BYTES);
    let kind = RecordKind::Change;
    assert!(put(store, kind, &record("long", &most, None)).await.is_kept);
    for wrong in [
        record("long", &(most + "x"), None),
        record("nul", "a\0b", None),
        record("", "x", None),
        record("a b", "x", None),
        record("É", "x", None),
        record("x".repeat(65), "x", None),
    ] {
        let error = store.put_record(kind, &wrong).await.expect_err("a bound");
        assert!(error.is_invalid(), "{error}");
    }
    assert!(store.remove_record(kind, "").await.expect_err("no id").is_invalid());
}

/// Of callers that put at once, none is lost, and the revision is of the last.
async fn raced(make: &impl AsyncFn(ManualClock) -> Subject) {
    let subject = make(super::clock()).await;
    let racers: Vec<_> = (0..8)
        .map(|racer| {
            let store = subject.store.clone();
            tokio::spawn(async move {
                for number in 0..10 {
                    let one = record(format!("{racer}-{number}"), "x", None);
                    assert!(put(&*store, RecordKind::Override, &one).await.is_kept);
                }
            })
        })
        .collect();
    for racer in racers {
        racer.await.expect("no racer panics");
    }
    let all = read(&*subject.store, RecordKind::Override, None).await;
    assert_eq!(all.changed.map(|all| all.len()), Some(80));
    let same = read(&*subject.store, RecordKind::Override, Some(all.revision)).await;
    assert_eq!(same.changed, None);
}
