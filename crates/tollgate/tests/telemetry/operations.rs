//! What is done about charges and keys has its events and its counts; and what a host adds to all metrics.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate::store::Failure;
use tollgate::telemetry::{Event, Observer, Operation, Telemetry};
use tollgate::{Charge, ChargeId, Limit, Rule, Settlement, Tollgate, TollgateBuilder};

use crate::crowd::ready;
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{a_minute, hands, on};
use crate::scrape::Scrape;

const OPERATIONS: &str = "rate_limiter_operations_total";

/// Every operation, in a few words.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl Observer for Told {
    fn decided(&self, _: &Event<'_>) {}

    fn operated(&self, reported: &Operation<'_>) {
        let Operation { operation, limiter, namespace, cost, outcome, failure, is_ambiguous, .. } = reported;
        assert_eq!(limiter.is_some_and(|limiter| limiter == "api"), reported.strategy.is_some());
        let key = reported.key.reveal().unwrap_or("-");
        assert!(!format!("{reported:?}").contains("somebody"), "a key is shown only to those who ask for it");
        let (limiter, namespace) =
            (limiter.unwrap_or("-"), if namespace.is_empty() { "-" } else { namespace });
        let cost = cost.map_or("-".to_owned(), |cost| cost.to_string());
        let failure = failure.map(|failure| format!(" {failure} {is_ambiguous}")).unwrap_or_default();
        let line = format!("{operation} {limiter} {namespace} {key} {cost} {}{failure}", outcome.name());
        self.0.lock().unwrap().push(line);
    }
}

impl Told {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn watched(builder: TollgateBuilder, scrape: &Scrape) -> (Tollgate, Arc<Told>) {
    let reported = Arc::new(Told::default());
    let free = Rule::unlimited("free").unwrap();
    let builder = builder.limit("api", a_minute(9)).rule(free).observer(reported.clone());
    (builder.telemetry(scrape.telemetry()).build().unwrap(), reported)
}

/// The same operations in this process and in a remote store.
#[test]
fn settlements_cancels_resets_and_refunds_have_an_event_and_a_count_each() {
    for (mode, is_remote) in [("memory", false), ("custom", true)] {
        let (hands, scrape) = (hands(), Scrape::new());
        let mut builder = on(&hands);
        if is_remote {
            builder = builder.store(FaultyStore::new(&hands));
        }
        let (gate, reported) = watched(builder, &scrape);
        let charge = || [Charge::new("api", "user:somebody").cost(3)];
        let reserve = || ready(gate.reserve(&charge(), Duration::from_secs(60))).unwrap().unwrap().id();
        let settle = |id: ChargeId, settlement| ready(gate.settle(id, &settlement)).unwrap();
        let [one, other] = [reserve(), reserve()];
        assert_eq!(reported.take(), [""; 0], "a reservation is a decision");
        settle(one, Settlement::Actual(2));
        settle(one, Settlement::Actual(2));
        settle(other, Settlement::Renew);
        settle(other, Settlement::Cancel);
        settle(ChargeId::random(), Settlement::Cancel);
        let expected = ["settle - - - 2 done", "settle - - - 2 already", "renew - - - - done"];
        assert_eq!(
            reported.take(),
            [&expected[..], &["cancel - - - - done", "cancel - - - - nothing"]].concat()
        );

        let back = [Charge::new("api", "user:somebody"), Charge::new("free", "x:1").cost(5)];
        ready(gate.refund(&back)).unwrap();
        assert_eq!(
            reported.take(),
            ["refund api user user:somebody 1 done", "refund free x x:1 5 nothing"],
            "{mode}"
        );
        for expected in ["done", "nothing"] {
            let _ = ready(gate.reset("api", "user:somebody")).unwrap();
            assert_eq!(reported.take(), [format!("reset api user user:somebody - {expected}")], "{mode}");
        }
        if !is_remote {
            let _ = gate.local("api").unwrap().reset("user:somebody");
            assert_eq!(reported.take(), ["reset api user user:somebody - nothing"]);
        }
        let nothing_to_reset = if is_remote { 1 } else { 2 };
        let expected = [
            "already settle MODE 1".to_owned(),
            "done cancel MODE 1".to_owned(),
            "done refund api fixed_window MODE user 1".to_owned(),
            "done renew MODE 1".to_owned(),
            "done reset api fixed_window MODE user 1".to_owned(),
            "done settle MODE 1".to_owned(),
            "nothing cancel MODE 1".to_owned(),
            "nothing refund free none MODE x 1".to_owned(),
            format!("nothing reset api fixed_window MODE user {nothing_to_reset}"),
        ];
        let expected: Vec<String> = expected.iter().map(|line| line.replace("MODE", mode)).collect();
        assert_eq!(scrape.samples(OPERATIONS), expected);
    }
}

/// A permit that is dropped is released in the background, and so is a charge cancelled whose answer was lost.
#[test]
fn what_is_done_in_the_background_has_its_events() {
    let pool = || Limit::concurrency(2, Duration::from_secs(30)).unwrap();
    for is_remote in [false, true] {
        let (hands, scrape) = (hands(), Scrape::new());
        let store = FaultyStore::new(&hands);
        let builder = on(&hands).limit("pool", pool());
        let builder = if is_remote { builder.store(store.clone()) } else { builder };
        let (gate, reported) = watched(builder, &scrape);
        drop(ready(gate.acquire("pool", "user:somebody")).unwrap().unwrap());
        let expected = if is_remote { "release - - - - pending" } else { "release - - - - done" };
        assert_eq!(reported.take(), [expected], "remote: {is_remote}");
        ready(gate.flush());
        let expected: &[&str] = if is_remote { &["release - - - - done"] } else { &[] };
        assert_eq!(reported.take(), expected, "remote: {is_remote}");
        if !is_remote {
            continue;
        }
        store.answers_pings(true);
        store.fault(Fault::Loses(Failure::Timeout));
        let charge = [Charge::new("api", "user:somebody")];
        let _forgotten = ready(gate.reserve(&charge, Duration::from_secs(60))).unwrap().unwrap();
        assert_eq!(reported.take(), [""; 0]);
        store.fault(Fault::None);
        ready(gate.flush());
        assert_eq!(reported.take(), ["cancel - - - - done"], "the copy in the store");
        let expected = ["done cancel custom 1", "done release custom 1", "pending release custom 1"];
        assert_eq!(scrape.samples(OPERATIONS), expected);
    }
}

#[test]
fn what_the_store_could_not_do_is_reported_with_its_reason() {
    for (fault, words) in
        [(Fault::Fails(Failure::Timeout), "timeout false"), (Fault::Loses(Failure::Timeout), "timeout true")]
    {
        let (hands, scrape) = (hands(), Scrape::new());
        let store = FaultyStore::new(&hands);
        let (gate, reported) = watched(on(&hands).store(store.clone()), &scrape);
        let charge = [Charge::new("api", "user:somebody")];
        let id = ready(gate.reserve(&charge, Duration::from_secs(60))).unwrap().unwrap().id();
        // One node in a row may fail a few times before it is left alone.
        store.answers_pings(true);
        store.fault(fault);
        assert!(ready(gate.settle(id, &Settlement::Actual(1))).is_err());
        assert!(ready(gate.refund(&charge)).is_err());
        assert!(ready(gate.reset("api", "user:somebody")).is_err());
        let expected =
            ["settle - - - 1", "refund api user user:somebody 1", "reset api user user:somebody -"];
        assert_eq!(reported.take(), expected.map(|line| format!("{line} failed {words}")));
        let failed = scrape.samples(OPERATIONS).into_iter().filter(|line| line.starts_with("failed "));
        let of_key = |operation: &str| format!("failed {operation} api fixed_window custom user 1");
        let expected = [of_key("refund"), of_key("reset"), "failed settle custom 1".to_owned()];
        assert_eq!(failed.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn labels_of_the_host_are_on_every_metric() {
    let (hands, scrape) = (hands(), Scrape::new());
    let store = FaultyStore::new(&hands);
    let telemetry = scrape.telemetry().label("region", "eu-west").label("service", "shop");
    let gate = on(&hands).limit("api", a_minute(9)).store(store.clone()).telemetry(telemetry);
    let gate = gate.build().unwrap();
    let _ = ready(gate.check("api", "user:1")).unwrap();
    ready(gate.reset("api", "user:1")).unwrap();
    store.fault(Fault::Loses(Failure::Timeout));
    let _ = ready(gate.check("api", "user:1")).unwrap();
    gate.publish_metrics();
    let text = scrape.text();
    let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    assert!(samples.len() > 10, "{text}");
    for sample in samples {
        assert!(sample.contains("region=\"eu-west\",service=\"shop\""), "{sample}");
        // Whatever is shown is explained.
        let name = sample.split(['{', ' ']).next().unwrap();
        let is_of = |name: &str| text.contains(&format!("# HELP {name} "));
        let stem = ["_sum", "_count", "_bucket"].iter().find_map(|end| name.strip_suffix(end));
        assert!(is_of(name) || stem.is_some_and(is_of), "{name} has no HELP");
    }
}

#[test]
fn labels_that_cannot_be_are_refused_with_what_to_write() {
    let build =
        |telemetry: Telemetry| Tollgate::builder().limit("api", a_minute(1)).telemetry(telemetry).build();
    for (name, words) in [
        ("", "use letters, digits"),
        ("9lives", "use letters, digits"),
        ("__name", "use letters, digits"),
        ("data-centre", "use letters, digits"),
        ("ré", "use letters, digits"),
        ("limiter", "one of Tollgate's own"),
        ("le", "one of Tollgate's own"),
    ] {
        let error = build(Telemetry::new().metrics().label(name, "x")).unwrap_err().to_string();
        assert!(error.contains(words), "{name:?}: {error}");
    }
    let twice = Telemetry::new().label("region", "a").label("region", "b");
    assert!(build(twice).unwrap_err().to_string().contains("given twice"));
    let many =
        |count: u32| (0..count).fold(Telemetry::new(), |all, number| all.label(format!("l{number}"), "x"));
    assert!(build(many(16)).is_ok());
    assert!(build(many(17)).unwrap_err().to_string().contains("at most 16"));
}

/// A reload that takes a limit out of shadow mode counts it under the other label from then on.
#[test]
fn a_limit_that_leaves_shadow_mode_changes_its_label() {
    let (hands, scrape) = (hands(), Scrape::new());
    let rule = || Rule::new("api", a_minute(1)).unwrap();
    let gate = on(&hands).rule(rule().shadow()).telemetry(scrape.telemetry()).build().unwrap();
    let api = || gate.local("api").unwrap();
    (0..2).for_each(|_| assert!(api().check("user:1").is_allowed()));
    gate.reload(tollgate::Policy::new([rule()]).unwrap()).unwrap();
    assert!(!api().check("user:1").is_allowed());
    gate.publish_metrics();
    let expected = [
        "allow true store api fixed_window memory user 1",
        "deny false store api fixed_window memory user 1",
        "deny true store api fixed_window memory user 1",
    ];
    assert_eq!(scrape.samples("rate_limiter_decisions_total"), expected);
}
