//! What an observer sees: an event for each limit of each decision, a warning for malformed keys, and no key.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{Allowance, Charge, Key, Limiter, ManualClock, Outcome, Rule, Strategy, Tollgate};
use tracing_subscriber::fmt::MakeWriter;

use crate::crowd::{Crowd, ready};
use crate::scene::{Dice, a_minute, at_once, bucket, hands, on};

const HOUR: Duration = Duration::from_secs(3_600);

/// Keeps every event.
#[derive(Default)]
struct Recorder(Mutex<Vec<Seen>>);

/// An event that borrows nothing.
#[derive(Clone, Debug)]
struct Seen {
    operation: &'static str,
    limiter: String,
    namespace: String,
    strategy: Option<Strategy>,
    cost: u64,
    allowed: bool,
    shadow: bool,
    outcome: Outcome,
    source: Source,
}

impl Observer for Recorder {
    fn decided(&self, event: &Event<'_>) {
        assert!(event.duration < HOUR);
        assert!(!format!("{event:?}").contains("alice"), "a key has leaked: {event:?}");
        assert_eq!(event.key.reveal().is_none(), event.source == Source::Malformed, "{event:?}");
        self.0.lock().unwrap().push(Seen {
            operation: event.operation,
            limiter: event.limiter.to_owned(),
            namespace: event.namespace.to_owned(),
            strategy: event.strategy,
            cost: event.cost,
            allowed: event.allowed,
            shadow: event.shadow,
            outcome: event.outcome,
            source: event.source,
        });
    }
}

impl Recorder {
    fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn watched(hands: &ManualClock) -> (Tollgate, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let key = |text| Key::parse(text).unwrap();
    let api = Rule::new("api", bucket("1/s", 5))
        .and_then(|rule| rule.with_override(key("user:vip"), Allowance::Unlimited))
        .and_then(|rule| rule.with_override(key("user:bad"), Allowance::Blocked));
    let gate = on(hands)
        .observer(recorder.clone())
        .rule(api.unwrap())
        .rule(Rule::new("watching", a_minute(1)).unwrap().shadow())
        .rule(Rule::new("workers", at_once(1)).unwrap())
        .rule(Rule::unlimited("free").unwrap())
        .rule(Rule::blocked("shut").unwrap())
        .build()
        .unwrap();
    (gate, recorder)
}

/// An event in one line: the operation, the limiter, its strategy, the namespace, the cost, and how it went.
fn line(seen: &Seen) -> String {
    let Seen { operation, limiter, namespace, cost, source, .. } = seen;
    let strategy = seen.strategy.map_or("none", Strategy::name);
    let allowed = if seen.allowed { "allowed" } else { "denied" };
    let shadow = if seen.shadow { " watching" } else { "" };
    format!("{operation} {limiter} {strategy} [{namespace}] {cost} {allowed}{shadow} {source:?}")
}

#[test]
fn each_limit_of_each_decision_is_one_event() {
    let (gate, recorder) = watched(&hands());
    let [api, watching, workers, free, shut] =
        ["api", "watching", "workers", "free", "shut"].map(|name| gate.local(name).unwrap());
    // Does what it is reported and sees what is reported of it.
    macro_rules! reported {
        ($($call:expr => [$($line:literal),* $(,)?])*) => {$(
            let _ = $call;
            let seen: Vec<String> = recorder.take().iter().map(line).collect();
            let expected: &[&str] = &[$($line),*];
            assert_eq!(seen, expected, "{}", stringify!($call));
        )*};
    }
    reported! {
        api.check("user:alice") => ["charge api token_bucket [user] 1 allowed Store"]
        api.charge("alice", 3) => ["charge api token_bucket [default] 3 allowed Store"]
        api.charge("alice", 9) => ["charge api token_bucket [default] 9 denied Store"]
        api.peek("ip:alice:v2", 2) => ["peek api token_bucket [ip] 2 allowed Store"]
        api.reserve("user:alice", 2) => ["reserve api token_bucket [user] 2 allowed Store"]
        workers.acquire("alice") => ["acquire workers concurrency [default] 1 allowed Store"]
        ready(api.wait("user:alice", 1, HOUR)) => ["wait api token_bucket [user] 1 allowed Store"]
        ready(api.wait("user:alice", 6, HOUR)) => ["wait api token_bucket [user] 6 denied Store"]
    }
    reported! {
        api.check("user:vip") => ["charge api none [user] 1 allowed Unlimited"]
        api.check("user:bad") => ["charge api none [user] 1 denied Blocked"]
        free.check("alice") => ["charge free none [default] 1 allowed Unlimited"]
        shut.check("alice") => ["charge shut none [default] 1 denied Blocked"]
        ready(free.wait("alice", 1, HOUR)) => ["wait free none [default] 1 allowed Unlimited"]
        ready(shut.wait("alice", 1, HOUR)) => ["wait shut none [default] 1 denied Blocked"]
        watching.check("alice") => ["charge watching fixed_window [default] 1 allowed watching Store"]
        watching.check("alice") => ["charge watching fixed_window [default] 1 allowed watching Store"]
        ready(watching.wait("alice", 1, HOUR)) => ["wait watching fixed_window [default] 1 allowed watching Store"]
    }
    reported! {
        api.check("alice\n") => ["charge api none [] 1 denied Malformed"]
        api.charge("alice:", 4) => ["charge api none [] 4 denied Malformed"]
        watching.peek("alice\n", 1) => ["peek watching none [] 1 denied Malformed"]
        ready(api.wait("alice\n", 2, HOUR)) => ["wait api none [] 2 denied Malformed"]
        api.check_many(&["user:alice2", "", "user:vip"], &mut Vec::new()) => [
            "charge api token_bucket [user] 1 allowed Store",
            "charge api none [] 1 denied Malformed",
            "charge api none [user] 1 allowed Unlimited",
        ]
    }
    let several =
        [Charge::new("api", "new:alice"), Charge::new("shut", "alice").cost(7), Charge::new("watching", "")];
    reported! {
        free.charge_all(&[Charge::new(&free, "alice"), Charge::new(&watching, "a:alice").cost(2)]) => [
            "charge free none [default] 1 allowed Unlimited",
            "charge watching fixed_window [a] 2 allowed watching Store",
        ]
        ready(gate.charge(&several)) => [
            "charge api token_bucket [new] 1 allowed Store",
            "charge shut none [default] 7 denied Blocked",
            "charge watching none [] 1 denied Malformed",
        ]
        ready(gate.peek(&[Charge::new("api", "new:alice").cost(5)])) => ["peek api token_bucket [new] 5 allowed Store"]
        ready(gate.reserve(&[Charge::new("workers", "alice")], HOUR)) => [
            "reserve workers concurrency [default] 1 allowed Store",
        ]
        workers.check("alice") => ["charge workers concurrency [default] 1 denied NeedsPermit"]
        ready(gate.check("workers", "alice")) => []
    }
    // To look at a key, to forget it, and to be refused as an error are no decisions.
    reported! {
        api.status("user:alice") => []
        ready(gate.status("api", "user:alice")) => []
        api.reset("user:alice") => []
        api.charge("user:alice", 0) => []
        ready(gate.check("ap", "user:alice")) => []
    }
}

#[test]
fn an_event_has_what_the_limit_said_and_a_watching_one_what_it_would_have_done() {
    let (gate, recorder) = watched(&hands());
    let [api, watching] = ["api", "watching"].map(|name| gate.local(name).unwrap());
    let outcome = api.charge("a", 2).unwrap();
    assert_eq!(recorder.take()[0].outcome, outcome);
    let decision =
        ready(gate.charge(&[Charge::new("api", "a"), Charge::new("watching", "a").cost(2)])).unwrap();
    let said: Vec<Outcome> = recorder.take().iter().map(|seen| seen.outcome).collect();
    assert_eq!(said, decision.outcomes().to_vec());

    // However it is asked, the event of a watching limit shows the refusal that it did not make.
    for ask in [0, 1, 2] {
        let allowed = match ask {
            0 => watching.charge("a", 2).unwrap().is_allowed(),
            1 => watching.peek("a", 2).unwrap().is_allowed(),
            _ => ready(watching.wait("a", 2, HOUR)).unwrap().is_allowed(),
        };
        let seen = recorder.take();
        assert_eq!(
            (seen.len(), allowed, seen[0].allowed, seen[0].outcome.numbers().allowed),
            (1, true, true, false),
            "{ask}"
        );
    }
}

#[test]
fn a_waiter_is_one_event_when_it_is_done_and_none_if_it_gives_up() {
    let hands = hands();
    let (gate, recorder) = watched(&hands);
    let api = gate.local("api").unwrap();
    let _ = api.charge("a", 5).unwrap();
    recorder.take();
    let mut crowd = Crowd::new();
    let a_second = Duration::from_secs(1);
    let [_, quitter, _] = [HOUR, HOUR, a_second].map(|within| crowd.join(api.wait("a", 2, within)));
    crowd.leave(quitter);
    for (expected, why) in [
        (&["wait api token_bucket [default] 2 denied Store"][..], "the one that had a second"),
        (&["wait api token_bucket [default] 2 allowed Store"], "the one in front"),
        (&[], "nobody is left"),
    ] {
        hands.advance(Duration::from_secs(1));
        crowd.run();
        let seen: Vec<String> = recorder.take().iter().map(line).collect();
        assert_eq!(seen, expected, "{why}");
    }
}

#[test]
fn an_observer_changes_no_answer() {
    let hands = hands();
    let (watched, recorder) = watched(&hands);
    let policy = watched.policy();
    let rules = policy.rules().iter().cloned();
    let alone = rules.fold(on(&hands), tollgate::TollgateBuilder::rule).build().unwrap();
    let mut dice = Dice(3);
    for _ in 0..2_000 {
        hands.advance(Duration::from_millis(dice.below(500)));
        let limit = dice.pick(&["api", "watching", "workers", "free", "shut"]);
        let (key, cost) = (dice.pick(&["a", "user:vip", "user:bad", "user:b", ""]), 1 + dice.below(6));
        let charge = |gate: &Tollgate| gate.local(limit).unwrap().charge(key, cost).unwrap();
        assert_eq!(charge(&watched), charge(&alone), "{limit} {key} {cost}");
    }
    assert_eq!(recorder.take().len(), 2_000);
}

/// Panics at whatever it is reported.
struct Panics;

impl Observer for Panics {
    fn decided(&self, _: &Event<'_>) {
        panic!("as it is meant to, about alice");
    }

    fn store_changed(&self, _: &tollgate::store::StoreChange) {
        panic!("as it is meant to, about alice");
    }
}

#[test]
fn all_observers_are_told_and_a_panic_of_one_neither_changes_a_decision_nor_loses_it_for_the_others() {
    let hands = hands();
    let [before, after] = [(); 2].map(|()| Arc::new(Recorder::default()));
    let builder = on(&hands).observer(before.clone()).observer(Arc::new(Panics)).observer(after.clone());
    let gate = builder.limit("api", a_minute(2)).limit("workers", at_once(1)).build().unwrap();
    let lines = logged(|| {
        let api = gate.local("api").unwrap();
        assert_eq!([(); 3].map(|()| api.check("user:alice").is_allowed()), [true, true, false]);
        let permit = gate.local("workers").unwrap().acquire("pool").unwrap().unwrap();
        assert!(ready(gate.acquire("workers", "pool")).unwrap().is_err());
        drop(permit);
        assert!(ready(gate.acquire_within("workers", "pool", HOUR)).unwrap().is_ok());
    });
    let [before, after] =
        [before, after].map(|recorder| recorder.take().iter().map(line).collect::<Vec<_>>());
    assert_eq!((before.len(), &before), (6, &after));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("an observer panicked") && !lines[0].contains("alice"), "{}", lines[0]);
}

/// What would have been logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

/// The lines that are logged while `work` is done in this thread.
pub(crate) fn logged(work: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    tracing::subscriber::with_default(subscriber, work);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// Malformed in every way, and personal.
const MALFORMED: [&str; 5] =
    ["alice\u{7}", "user:alice%", "alice:alice:alice:alice", "user:alice:", ":alice"];

#[test]
fn every_way_to_use_a_malformed_key_is_warned_of_without_showing_it() {
    type Way = fn(&Limiter, &Tollgate, &str) -> bool;
    let ways: [(&str, Way); 10] = [
        ("check", |limiter, _, key| limiter.check(key).is_allowed()),
        ("charge", |limiter, _, key| limiter.charge(key, 2).unwrap().is_allowed()),
        ("check many", |limiter, _, key| {
            let mut outcomes = Vec::new();
            limiter.check_many(&[key], &mut outcomes);
            outcomes[0].is_allowed()
        }),
        ("peek", |limiter, _, key| limiter.peek(key, 1).unwrap().is_allowed()),
        ("reserve", |limiter, _, key| limiter.reserve(key, 1).unwrap().is_ok()),
        ("acquire", |limiter, _, key| limiter.acquire(key).unwrap().is_ok()),
        ("wait", |limiter, _, key| ready(limiter.wait(key, 1, HOUR)).unwrap().is_allowed()),
        ("charge by name", |_, gate, key| ready(gate.check("api", key)).unwrap().is_allowed()),
        ("peek by name", |_, gate, key| ready(gate.peek(&[Charge::new("api", key)])).unwrap().is_allowed()),
        ("wait by name", |_, gate, key| {
            ready(gate.wait(&[Charge::new("api", key)], HOUR)).unwrap().is_allowed()
        }),
    ];
    for (what, way) in ways {
        for key in MALFORMED {
            // A registry of its own has warned of nothing yet.
            let gate = on(&hands()).limit("api", a_minute(5)).build().unwrap();
            let limiter = gate.local("api").unwrap();
            let lines = logged(|| assert!(!way(&limiter, &gate, key), "{what}"));
            assert_eq!(lines.len(), 1, "{what}: {lines:?}");
            let expected = ["WARN", "denied a malformed key: the ", "limiter=\"api\"", "count=1"];
            assert!(expected.iter().all(|part| lines[0].contains(part)), "{what}: {}", lines[0]);
            assert!(!lines[0].contains("alice"), "{what}: {}", lines[0]);
            assert_eq!(gate.keys(), 0);
        }
    }
}

#[test]
fn a_flood_of_malformed_keys_is_at_most_a_line_a_second() {
    let gate = on(&hands()).limit("api", a_minute(5)).build().unwrap();
    let api = gate.local("api").unwrap();
    let started = Instant::now();
    let lines = logged(|| {
        for number in 0..50_000 {
            let _ = api.check(MALFORMED[number % MALFORMED.len()]);
        }
    });
    let most = 1 + started.elapsed().as_secs();
    assert!((1..=most).contains(&(lines.len() as u64)), "{} lines", lines.len());
    assert!(!lines.concat().contains("alice"));
}

#[test]
fn sound_keys_are_not_logged() {
    let gate = on(&hands()).limit("api", a_minute(5)).build().unwrap();
    let lines = logged(|| {
        for _ in 0..10 {
            let _ = gate.local("api").unwrap().check("user:alice");
        }
    });
    assert_eq!(lines, [""; 0]);
}
