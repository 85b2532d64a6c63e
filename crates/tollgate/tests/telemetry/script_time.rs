//! The time that scripts take inside of the store, as far as the store says it.

use std::sync::{Arc, Mutex};

use tollgate::store::{
    Charged, Hold, MemoryOptions, MemoryStore, ScriptTime, Store, StoreFuture, StoredCharge, StoredLimit,
};
use tollgate::{ChargeId, Settled, Settlement};

use crate::crowd::ready;
use crate::scene::{a_minute, hands, on};
use crate::scrape::Scrape;

const CALLS: &str = "rate_limiter_store_script_calls_total";
const TIME: &str = "rate_limiter_store_script_us_total";

/// A store that says what it is told to.
struct Counting {
    store: MemoryStore,
    script_time: Mutex<Option<ScriptTime>>,
}

impl Store for Counting {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Store::charge(&self.store, items, hold)
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Store::settle(&self.store, id, settlement)
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Store::peek(&self.store, items)
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Store::forget(&self.store, limit, key)
    }

    fn script_time(&self) -> Option<ScriptTime> {
        *self.script_time.lock().unwrap()
    }
}

#[test]
fn the_time_inside_of_the_store_is_published_once_the_store_says_it() {
    let (hands, scrape) = (hands(), Scrape::new());
    let store = MemoryStore::new(MemoryOptions::default());
    let store = Arc::new(Counting { store, script_time: Mutex::default() });
    let gate = on(&hands)
        .limit("api", a_minute(9))
        .telemetry(scrape.telemetry().label("region", "eu"))
        .store(store.clone())
        .build()
        .unwrap();
    let shown = |script_time: Option<ScriptTime>| {
        *store.script_time.lock().unwrap() = script_time;
        let _ = ready(gate.check("api", "user:1")).unwrap();
        gate.publish_metrics();
        [scrape.samples(CALLS), scrape.samples(TIME)].concat()
    };
    let says = |calls, us| Some(ScriptTime { calls, us });
    assert!(shown(None).is_empty(), "a store that says nothing has no series that stands at 0");
    // A rate needs a beginning.
    assert_eq!(shown(says(0, 0)), ["custom eu 0"; 2]);
    assert_eq!(shown(says(200, 5_000)), ["custom eu 200", "custom eu 5000"]);
    assert_eq!(shown(says(201, 5_017)), ["custom eu 201", "custom eu 5017"]);
    assert_eq!(shown(None), ["custom eu 201", "custom eu 5017"]);
    assert_eq!(
        shown(says(u64::MAX, 5_018)),
        [format!("custom eu {}", u64::MAX), "custom eu 5018".to_owned()]
    );
    let text = scrape.text();
    for (name, meaning) in [(CALLS, "since this process first looked, those of all programs"), (TIME, "mean")]
    {
        assert!(text.contains(&format!("# TYPE {name} counter")), "{text}");
        let help = text.lines().find_map(|line| line.strip_prefix(&format!("# HELP {name} ")));
        assert!(help.is_some_and(|help| help.contains(meaning)), "{help:?}");
    }
}

#[test]
fn memory_runs_no_scripts() {
    let scrape = Scrape::new();
    let gate = on(&hands()).limit("api", a_minute(9)).telemetry(scrape.telemetry()).build().unwrap();
    let _ = gate.local("api").unwrap().check("a");
    gate.publish_metrics();
    assert!(scrape.samples(CALLS).is_empty() && scrape.samples(TIME).is_empty());
}
