//! Observers that take counts: admissions come as numbers, all else as events, and nothing is observed twice or not at all.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use tollgate::telemetry::{Admissions, Event, Observer};
use tollgate::{Allowance, Charge, Key, Policy, Rule, Tollgate};

use crate::crowd::ready;
use crate::scene::{bucket, hands, on};
use crate::scrape::Scrape;

/// What was observed under each limit: admissions as numbers, and events that were allowed and denied.
#[derive(Default)]
struct Tallies {
    observed: Mutex<Vec<(String, [u64; 3])>>,
    takes_counts: bool,
}

impl Tallies {
    fn add(&self, limiter: &str, kind: usize, count: u64) {
        let mut observed = self.observed.lock().unwrap();
        let at = observed.iter().position(|(name, _)| name == limiter).unwrap_or_else(|| {
            observed.push((limiter.to_owned(), [0; 3]));
            observed.len() - 1
        });
        observed[at].1[kind] += count;
    }

    fn of(&self, limiter: &str) -> [u64; 3] {
        let observed = self.observed.lock().unwrap();
        observed.iter().find(|(name, _)| name == limiter).map(|(_, observed)| *observed).unwrap_or_default()
    }
}

impl Observer for Tallies {
    fn decided(&self, event: &Event<'_>) {
        self.add(event.limiter, if event.allowed { 1 } else { 2 }, 1);
    }

    fn takes_counts(&self) -> bool {
        self.takes_counts
    }

    fn admitted(&self, admissions: &Admissions<'_>) {
        self.add(admissions.limiter, 0, admissions.count);
    }
}

/// Charges 200 times by each road, of which the bucket of `api` has room for 150 in all.
fn check(takes_counts: bool, is_counted: bool, expected: [u64; 3]) {
    let (hands, scrape) = (hands(), Scrape::new());
    let tallies = Arc::new(Tallies { takes_counts, ..Tallies::default() });
    let watching = Rule::new("watching", bucket("1/s", 1)).unwrap().shadow();
    let vip = Rule::new("vip", bucket("1/s", 1_000)).unwrap();
    let vip = vip.with_override(Key::parse("user:1").unwrap(), Allowance::Unlimited).unwrap();
    let builder = on(&hands).limit("api", bucket("1/s", 150)).rule(watching).rule(vip);
    let builder = builder.observer(tallies.clone());
    let builder = if is_counted { builder.telemetry(scrape.telemetry()) } else { builder };
    let gate: Tollgate = builder.build().unwrap();
    let api = gate.local("api").unwrap();
    for _ in 0..100 {
        let _ = api.check("user:1");
        let _ = ready(gate.charge(&[Charge::new("api", "user:1")])).unwrap();
    }
    for _ in 0..3 {
        let _ =
            ready(gate.charge(&[Charge::new("watching", "user:1"), Charge::new("vip", "user:1")])).unwrap();
    }
    let _ = ready(gate.peek(&[Charge::new("api", "user:2")])).unwrap();
    gate.hand_over_counts();
    let observed = tallies.of("api");
    assert_eq!(observed, expected, "takes counts: {takes_counts}, counted: {is_counted}");
    assert_eq!(observed.iter().sum::<u64>(), 201, "every decision and the peek are reported once");
    // Shadow limits, and decisions without counters, are reported one by one.
    let counts = u64::from(takes_counts && is_counted);
    assert_eq!(tallies.of("watching"), [counts, 3 - counts, 0]);
    assert_eq!(tallies.of("vip"), [0, 3, 0]);
}

#[test]
fn admissions_are_numbers_only_for_whoever_takes_them_and_where_they_are_counted() {
    check(true, true, [150, 1, 50]);
    check(true, false, [0, 151, 50]);
    check(false, true, [0, 151, 50]);
}

/// Charges and reloads the gate whenever it sees a denial.
struct Meddles {
    gate: OnceLock<Tollgate>,
    takes_counts: bool,
    seen: AtomicUsize,
}

impl Observer for Meddles {
    fn decided(&self, event: &Event<'_>) {
        if event.allowed || self.seen.fetch_add(1, Ordering::SeqCst) > 2 {
            return;
        }
        let gate = self.gate.get().expect("set before the first charge");
        let _ = ready(gate.check("api", "user:2")).unwrap();
        gate.reload(Policy::new([Rule::new("api", bucket("1/s", 5)).unwrap()]).unwrap()).unwrap();
    }

    fn takes_counts(&self) -> bool {
        self.takes_counts
    }
}

/// Nothing is locked while a decision is reported, by whichever path it was made.
#[test]
fn an_observer_may_charge_and_reload() {
    for takes_counts in [false, true] {
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let (hands, scrape) = (hands(), Scrape::new());
            let meddles =
                Arc::new(Meddles { gate: OnceLock::new(), takes_counts, seen: AtomicUsize::new(0) });
            let builder = on(&hands).limit("api", bucket("1/s", 1)).observer(meddles.clone());
            let gate = builder.telemetry(scrape.telemetry()).build().unwrap();
            meddles.gate.set(gate.clone()).unwrap();
            for _ in 0..3 {
                let _ = ready(gate.check("api", "user:1")).unwrap();
            }
            let _ =
                ready(gate.charge(&[Charge::new("api", "user:1").cost(9), Charge::new("api", "x")])).unwrap();
            let _ = ready(gate.charge_each(&[Charge::new("api", "user:1").cost(9)])).unwrap();
            let _ = gate.local("api").unwrap().charge("user:1", 9).unwrap();
            done.send(meddles.seen.load(Ordering::SeqCst)).unwrap();
        });
        let seen = is_done.recv_timeout(Duration::from_secs(60)).expect("nobody waits for anybody");
        assert!(seen >= 3, "{seen}");
    }
}
