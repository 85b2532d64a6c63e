//! Every decision is counted once, under labels that no client can make up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tollgate::store::{Failure, StoreState};
use tollgate::telemetry::Source;
use tollgate::{Allowance, Charge, Fallback, Key, Limit, ManualClock, Policy, Rule, Tollgate};

use crate::crowd::ready;
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{Dice, a_minute, at_once, bucket, hands, on, secs};
use crate::scrape::Scrape;

const DECISIONS: &str = "rate_limiter_decisions_total";
const HOUR: Duration = Duration::from_secs(3_600);

/// A rule of each kind.
fn rules() -> Vec<Rule> {
    let rule = |name: &str, limit: Limit| Rule::new(name, limit).unwrap();
    let key = |text: &'static str| Key::parse(text).unwrap();
    let api = rule("api", a_minute(3));
    let tiers = rule("tiers", a_minute(3))
        .with_override(key("user:vip"), a_minute(2))
        .and_then(|rule| rule.with_override(key("user:free"), Allowance::Unlimited))
        .and_then(|rule| rule.with_override(key("user:bad"), Allowance::Blocked));
    vec![
        api,
        tiers.unwrap(),
        rule("watching", a_minute(1)).shadow(),
        rule("workers", at_once(1)),
        Rule::unlimited("free").unwrap(),
        Rule::blocked("shut").unwrap(),
    ]
}

/// What is counted of some work on a memory store.
fn check(what: &str, work: impl FnOnce(&Tollgate), expected: &[&str]) {
    let scrape = Scrape::new();
    let builder = rules().into_iter().fold(on(&hands()), tollgate::TollgateBuilder::rule);
    let gate = builder.telemetry(scrape.telemetry()).build().unwrap();
    work(&gate);
    gate.publish_metrics();
    assert_eq!(scrape.samples(DECISIONS), expected, "{what}");
}

#[test]
fn every_way_to_be_charged_is_counted_once() {
    let limiter = |gate: &Tollgate, name: &str| gate.local(name).unwrap();
    check("nothing", |_| (), &[]);
    check(
        "check",
        |gate| (0..5).for_each(|_| drop(limiter(gate, "api").charge("user:1", 1))),
        &[
            "allow false store api fixed_window memory user 3",
            "deny false store api fixed_window memory user 2",
        ],
    );
    check(
        "check_many: known and new, malformed, and several namespaces",
        |gate| {
            let (api, mut outcomes) = (limiter(gate, "api"), Vec::new());
            let _ = api.check("a:1");
            api.check_many(&["a:1", "b:1", "a:1", "a:1", "", "1", "b:1"], &mut outcomes);
            assert_eq!(outcomes.len(), 7);
        },
        &[
            "allow false store api fixed_window memory a 3",
            "allow false store api fixed_window memory b 2",
            "allow false store api fixed_window memory default 1",
            "deny false malformed api fixed_window memory none 1",
            "deny false store api fixed_window memory a 1",
        ],
    );
    check(
        "charge_each",
        |gate| {
            let keys = ["user:vip", "user:1", "user:bad", "user:free"];
            drop(ready(gate.charge_each(&keys.map(|key| Charge::new("tiers", key)))).unwrap())
        },
        &[
            "allow false store tiers fixed_window memory user 2",
            "allow false unlimited tiers none memory user 1",
            "deny false blocked tiers none memory user 1",
        ],
    );
    check(
        "overrides of every kind",
        |gate| {
            for key in ["user:vip", "user:vip", "user:vip", "user:free", "user:bad", "user:1"] {
                let _ = limiter(gate, "tiers").check(key);
            }
        },
        &[
            "allow false store tiers fixed_window memory user 3",
            "allow false unlimited tiers none memory user 1",
            "deny false blocked tiers none memory user 1",
            "deny false store tiers fixed_window memory user 1",
        ],
    );
    check(
        "a limit in shadow mode",
        |gate| (0..3).for_each(|_| assert!(limiter(gate, "watching").check("k").is_allowed())),
        &[
            "allow true store watching fixed_window memory default 1",
            "deny true store watching fixed_window memory default 2",
        ],
    );
    check(
        "a charge over several limits, straight and around",
        |gate| {
            let (api, workers) = (limiter(gate, "api"), limiter(gate, "workers"));
            let tiers = limiter(gate, "tiers");
            for _ in 0..3 {
                assert!(api.charge_all(&[api.of("x:1"), tiers.of("x:2")]).unwrap().is_allowed());
            }
            assert!(api.reserve_all(&[api.of("x:1"), workers.of("x:2")], HOUR).unwrap().is_err());
        },
        &[
            "allow false store api fixed_window memory x 3",
            "allow false store tiers fixed_window memory x 3",
            "allow false store workers concurrency memory x 1",
            "deny false store api fixed_window memory x 1",
        ],
    );
    check(
        "the registry's own calls",
        |gate| {
            assert!(ready(gate.check("api", "k")).unwrap().is_allowed());
            assert!(
                !ready(gate.charge(&[Charge::new("shut", "k"), Charge::new("free", "k")]))
                    .unwrap()
                    .is_allowed()
            );
            assert!(ready(gate.reserve(&[Charge::new("api", "k")], HOUR)).unwrap().is_ok());
            assert!(ready(gate.wait(&[Charge::new("api", "k")], HOUR)).unwrap().is_allowed());
            assert!(!ready(gate.wait(&[Charge::new("shut", "k")], HOUR)).unwrap().is_allowed());
        },
        &[
            "allow false store api fixed_window memory default 3",
            "allow false unlimited free none memory default 1",
            "deny false blocked shut none memory default 2",
        ],
    );
    check(
        "permits",
        |gate| {
            let workers = limiter(gate, "workers");
            let permit = workers.acquire("pool").unwrap().unwrap();
            assert!(workers.acquire("pool").unwrap().is_err());
            drop(permit);
        },
        &[
            "allow false store workers concurrency memory default 1",
            "deny false store workers concurrency memory default 1",
        ],
    );
    check(
        "what decides nothing",
        |gate| {
            let api = limiter(gate, "api");
            let _ = (api.peek("k", 1).unwrap(), api.status("k"), api.reset("k"));
            let _ = ready(gate.peek(&[Charge::new("api", "k")])).unwrap();
            assert!(api.charge("k", 0).is_err() && ready(gate.check("nope", "k")).is_err());
        },
        &[],
    );
}

#[test]
fn without_being_published_counts_are_at_most_sixty_three_behind_for_each_thread_and_none_is_lost() {
    let scrape = Scrape::new();
    let limit = bucket("1/h", 1_000_000);
    let gate = on(&hands()).limit("api", limit).telemetry(scrape.telemetry()).build().unwrap();
    let api = gate.local("api").unwrap();
    let counted = || {
        scrape.samples(DECISIONS).first().map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
    };
    for checks in 1..=300_u64 {
        let _ = api.check("k");
        assert!((checks.saturating_sub(63)..=checks).contains(&counted()), "{checks}: {}", counted());
    }
    drop((api, gate));
    assert_eq!(counted(), 300, "the last are counted when the registry goes");
}

#[test]
fn one_in_sixty_four_is_timed_in_memory_and_all_in_a_remote_store() {
    let count = |scrape: &Scrape| scrape.samples("rate_limiter_latency_ms_count");
    let scrape = Scrape::new();
    let gate = on(&hands()).limit("api", a_minute(9_999)).telemetry(scrape.telemetry()).build().unwrap();
    let api = gate.local("api").unwrap();
    // A thread of its own, because that is who counts to 64. The first check is of a new key and looks twice.
    std::thread::scope(|scope| drop(scope.spawn(|| (0..640).for_each(|_| drop(api.charge("k", 1))))));
    assert_eq!(count(&scrape), ["api fixed_window memory default 10"]);

    let (scrape, hands) = (Scrape::new(), hands());
    let store = FaultyStore::new(&hands);
    let builder = on(&hands).limit("api", a_minute(9_999)).store(store).telemetry(scrape.telemetry());
    let gate = builder.build().unwrap();
    (0..10).for_each(|_| drop(ready(gate.check("api", "k")).unwrap()));
    assert_eq!(count(&scrape), ["api fixed_window custom default 10"]);
}

/// A registry over a remote store, with a limit for each fallback and one without counters.
fn faulty(hands: &ManualClock, scrape: &Scrape) -> (Tollgate, Arc<FaultyStore>) {
    let store = FaultyStore::new(hands);
    let mut builder = on(hands).store(store.clone()).telemetry(scrape.telemetry());
    for fallback in Fallback::ALL {
        builder = builder.rule(Rule::new(fallback.name(), a_minute(2)).unwrap().fallback(fallback));
    }
    let gate = builder.rule(Rule::unlimited("free").unwrap());
    (gate.build().unwrap(), store)
}

#[test]
fn every_source_is_a_label() {
    let (hands, scrape) = (hands(), Scrape::new());
    let (gate, store) = faulty(&hands, &scrape);
    for (limit, key, times) in [("open", "k", 4), ("free", "k", 1), ("open", "", 1)] {
        (0..times).for_each(|_| drop(ready(gate.check(limit, key)).unwrap()));
    }
    store.fault(Fault::Fails(Failure::Timeout));
    for fallback in Fallback::ALL {
        drop(ready(gate.check(fallback.name(), "other")).unwrap());
    }
    let mut expected = vec![
        "allow false store open fixed_window custom default 2".to_owned(),
        "deny false store open fixed_window custom default 1".to_owned(),
        "deny false denial_cache open fixed_window custom default 1".to_owned(),
        "allow false unlimited free none custom default 1".to_owned(),
        "deny false malformed open fixed_window custom none 1".to_owned(),
        "fallback false fallback_open open fixed_window custom default 1".to_owned(),
        "fallback false fallback_closed closed fixed_window custom default 1".to_owned(),
        "fallback false fallback_local local fixed_window custom default 1".to_owned(),
    ];
    expected.sort();
    assert_eq!(scrape.samples(DECISIONS), expected);
    // `blocked` is in the test above, and `needs_permit` is only answered in this process.
    let text = scrape.text();
    let seen = Source::ALL.iter().filter(|source| text.contains(&format!("source=\"{}\"", source.name())));
    assert_eq!(seen.count(), Source::ALL.len() - 2);
}

#[test]
fn every_failure_is_a_label_of_errors_and_of_fallbacks() {
    for failure in Failure::ALL {
        for (fault, ambiguous) in [(Fault::Fails(failure), 0), (Fault::Loses(failure), 3)] {
            let (hands, scrape) = (hands(), Scrape::new());
            let (gate, store) = faulty(&hands, &scrape);
            store.answers_pings(true);
            store.fault(fault);
            for fallback in Fallback::ALL {
                drop(ready(gate.check(fallback.name(), "k")).unwrap());
            }
            let errors = scrape.samples("rate_limiter_backend_errors_total");
            assert_eq!(errors, [format!("{failure} custom 3")]);
            let line = |fallback: Fallback| {
                let decision = if fallback == Fallback::Closed { "deny" } else { "allow" };
                format!("{fallback} {failure} {decision} false {fallback} fixed_window custom default 1")
            };
            let mut expected = Fallback::ALL.map(line);
            expected.sort();
            assert_eq!(scrape.samples("rate_limiter_fallback_total"), expected);
            let lost = scrape.samples("rate_limiter_ambiguous_total");
            assert_eq!(lost.first().map_or("custom 0", |line| line), format!("custom {ambiguous}"));
        }
    }
}

#[test]
fn every_call_to_the_store_is_timed_by_what_it_asked() {
    let (hands, scrape) = (hands(), Scrape::new());
    let (gate, _) = faulty(&hands, &scrape);
    let asks = [Charge::new("open", "k")];
    (0..2).for_each(|_| drop(ready(gate.charge(&asks)).unwrap()));
    let _ = ready(gate.peek(&asks)).unwrap();
    let reserved = ready(gate.reserve(&[Charge::new("local", "k")], HOUR)).unwrap();
    let id = reserved.unwrap().id();
    ready(gate.settle(id, &tollgate::Settlement::Cancel)).unwrap();
    ready(gate.reset("open", "k")).unwrap();
    let counts = scrape.samples("rate_limiter_script_duration_ms_count");
    assert_eq!(counts, ["charge custom 3", "forget custom 1", "peek custom 1", "settle custom 1"]);
}

#[test]
fn an_outage_is_seen_from_its_beginning_to_its_end() {
    let (hands, scrape) = (hands(), Scrape::new());
    let (gate, store) = faulty(&hands, &scrape);
    let charge = || drop(ready(gate.check("open", "k")).unwrap());
    let up = || scrape.samples("rate_limiter_store_up");
    assert!(up().is_empty());
    gate.publish_metrics();
    assert_eq!(up(), ["custom 1"]);
    store.fault(Fault::Fails(Failure::Connection));
    while gate.store_health().state == StoreState::Up {
        charge();
    }
    assert_eq!(up(), ["custom 0"], "at once, not only when it is published");
    let errors = gate.store_health().failures(Failure::Connection);
    (0..10).for_each(|_| charge());
    assert_eq!(scrape.samples("rate_limiter_backend_errors_total"), [format!("connection custom {errors}")]);
    let fallen_back = gate.store_health().fallen_back;
    let fallbacks = scrape.samples("rate_limiter_fallback_total");
    assert_eq!(
        fallbacks,
        [format!("open connection allow false open fixed_window custom default {fallen_back}")]
    );
    store.fault(Fault::None);
    while gate.store_health().state != StoreState::Up {
        hands.advance(secs(1));
        charge();
    }
    assert_eq!(up(), ["custom 1"]);
    gate.publish_metrics();
    assert_eq!(scrape.samples("rate_limiter_state_losses_total"), ["custom 0"]);
    assert_eq!(scrape.samples("rate_limiter_leases_lost_total"), ["custom 0"]);
    assert_eq!(scrape.samples("rate_limiter_pending_cancels"), ["custom 0"]);
    assert_eq!(scrape.samples("rate_limiter_abandoned_cancels_total"), ["custom 0"]);
    assert!(scrape.samples("rate_limiter_keys").is_empty(), "nobody counts the keys of a remote store");
}

#[test]
fn what_is_read_off_the_memory_store_is_published() {
    let scrape = Scrape::new();
    let gate = on(&hands()).limit("api", a_minute(9)).telemetry(scrape.telemetry()).build().unwrap();
    let api = gate.local("api").unwrap();
    let _ = ["a", "b", "c", "d", "e"].map(|key| api.check(key));
    for _ in 0..2 {
        gate.publish_metrics();
        assert_eq!(scrape.samples("rate_limiter_keys"), ["memory 5"]);
        assert_eq!(scrape.samples("rate_limiter_store_up"), ["memory 1"]);
        assert_eq!(scrape.samples("rate_limiter_lock_contention_total"), ["memory 0"]);
        assert_eq!(scrape.samples("rate_limiter_log_suppressed_total"), ["0"]);
    }
    for name in ["decisions_total", "keys", "store_up", "lock_contention_total", "log_suppressed_total"] {
        assert!(scrape.text().contains(&format!("# HELP rate_limiter_{name} ")), "{name} is described");
    }
}

#[test]
fn charges_that_met_on_a_lock_are_counted_in_what_is_scraped() {
    let scrape = Scrape::new();
    let log = Limit::sliding_window(1_000_000, HOUR).unwrap();
    let gate = on(&hands()).limit("log", log).telemetry(scrape.telemetry()).build().unwrap();
    let log = gate.local("log").unwrap();
    let count = || -> u64 {
        gate.publish_metrics();
        let [sample] = &scrape.samples("rate_limiter_lock_contention_total")[..] else {
            panic!("one sample")
        };
        sample.strip_prefix("memory ").unwrap().parse().unwrap()
    };
    assert_eq!(count(), 0, "who is alone meets nobody");
    // Threads that charge one key meet as soon as two of them run, or one is interrupted while it holds the lock.
    let (is_met, end) = (AtomicBool::new(false), Instant::now() + Duration::from_secs(120));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_met.load(Ordering::Relaxed) {
                    let _ = log.check("user:1");
                }
            });
        }
        while count() == 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        is_met.store(true, Ordering::Relaxed);
    });
    let met = count();
    assert!(met > 0, "four threads never met");
    assert_eq!(count(), met, "what was published is not added again");
}

#[test]
fn ten_thousand_namespaces_are_seventeen_series() {
    for is_remote in [false, true] {
        let (hands, scrape) = (hands(), Scrape::new());
        let mut builder = on(&hands).limit("api", bucket("1/h", 9)).telemetry(scrape.telemetry());
        if is_remote {
            builder = builder.store(FaultyStore::new(&hands));
        }
        let gate = builder.build().unwrap();
        for number in 0..10_000 {
            let _ = ready(gate.check("api", format!("n{number}:k"))).unwrap();
        }
        gate.publish_metrics();
        let samples = scrape.samples(DECISIONS);
        assert_eq!(samples.len(), 17);
        assert_eq!(samples.iter().filter(|line| line.ends_with(" 1")).count(), 16);
        assert!(samples.iter().any(|line| line.ends_with(" other 9984")), "{samples:?}");
    }
}

/// Each registry knew sixteen of its own, so that every reload made room for as many more, and nothing ever takes one back.
#[test]
fn a_thousand_reloads_make_no_room_for_more_namespaces() {
    for is_changed in [false, true] {
        let (hands, scrape) = (hands(), Scrape::new());
        let gate = on(&hands).limit("api", bucket("1/h", 9)).telemetry(scrape.telemetry()).build().unwrap();
        for step in 0..1_000 {
            for number in 0..20 {
                let key = format!("n{step}-{number}:k");
                let _ = ready(gate.check("api", &key)).unwrap();
                let own = gate.ad_hoc("own", bucket("1/h", 1 + step)).unwrap();
                let _ = ready(gate.check(&own, &key)).unwrap();
            }
            // Who was met first keeps its place.
            let _ = ready(gate.check("api", "n0-0:k")).unwrap();
            // Another debt is another limit, and admits the same.
            let debt = Duration::from_secs(3_600 + if is_changed { step } else { 0 });
            let limit = bucket("1/h", 9).with_max_debt(debt).unwrap();
            gate.reload(Policy::new([Rule::new("api", limit).unwrap()]).unwrap()).unwrap();
        }
        gate.publish_metrics();
        let samples = scrape.samples(DECISIONS);
        assert_eq!(samples.len(), 2 * 17 + 1, "{samples:?}");
        for line in [
            "allow false store api token_bucket memory n0-0 9",
            "deny false store api token_bucket memory n0-0 992",
            "allow false store api token_bucket memory n0-15 1",
            "allow false store api token_bucket memory other 19984",
            "allow false store own token_bucket memory other 19984",
        ] {
            assert!(samples.iter().any(|sample| sample == line), "{line}: {samples:?}");
        }
    }
}

/// The labels add up to what was asked, whatever was asked of whomever and whatever became of it.
#[test]
fn sums_are_the_callers_own_count() {
    let (hands, scrape) = (hands(), Scrape::new());
    let (gate, store) = faulty(&hands, &scrape);
    let (mut dice, mut asked, mut allowed) = (Dice(7), 0, 0);
    for _ in 0..3_000 {
        hands.advance(Duration::from_millis(dice.below(300)));
        store.fault(dice.pick(&[
            Fault::None,
            Fault::None,
            Fault::None,
            Fault::Fails(Failure::Timeout),
            Fault::Loses(Failure::Connection),
        ]));
        let names = ["open", "closed", "local", "free"];
        let count = 1 + dice.below(3);
        let keys: Vec<String> =
            (0..count).map(|_| format!("{}:{}", dice.pick(&["a", "b"]), dice.below(9))).collect();
        let asks: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(dice.pick(&names), key)).collect();
        let decision = ready(gate.charge(&asks)).unwrap();
        asked += decision.outcomes().len();
        allowed += decision.outcomes().iter().filter(|limit| limit.is_allowed()).count();
    }
    let sum = |samples: Vec<String>| -> usize {
        samples.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
    };
    let samples = scrape.samples(DECISIONS);
    // What was said without the store is counted as a fallback, and there by what was said.
    let of_fallbacks = scrape.samples("rate_limiter_fallback_total");
    let of_allowed = samples.iter().filter(|line| line.starts_with("allow ")).cloned();
    let of_allowed = of_allowed.chain(of_fallbacks.iter().filter(|line| line.contains(" allow ")).cloned());
    let of_allowed = of_allowed.collect();
    let decided_so: usize =
        sum(samples.iter().filter(|line| line.starts_with("fallback ")).cloned().collect());
    assert_eq!(decided_so, sum(of_fallbacks));
    assert_eq!((sum(samples), sum(of_allowed)), (asked, allowed));
    let health = gate.store_health();
    let fallbacks: u64 = Fallback::ALL.map(|fallback| health.answers(fallback)).iter().sum();
    assert_eq!(sum(scrape.samples("rate_limiter_fallback_total")) as u64, fallbacks);
    let errors: u64 = Failure::ALL.map(|failure| health.failures(failure)).iter().sum();
    assert_eq!(sum(scrape.samples("rate_limiter_backend_errors_total")) as u64, errors);
    assert_eq!(scrape.samples("rate_limiter_ambiguous_total"), [format!("custom {}", health.ambiguous)]);
}

#[test]
fn the_recorder_that_the_host_has_installed_is_used() {
    let limit = Limit::token_bucket("1/h", 1).unwrap();
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    // Installed for this thread alone, and found as one for the whole process would be.
    ::metrics::with_local_recorder(&recorder, || {
        let telemetry = tollgate::telemetry::Telemetry::new().metrics();
        let gate = on(&hands()).limit("api", limit).telemetry(telemetry).build().unwrap();
        let _ = gate.local("api").unwrap().check("k");
        gate.publish_metrics();
    });
    assert!(handle.render().contains("rate_limiter_decisions_total{decision=\"allow\""));
}
