//! What strangers send, and what clocks do: a defined answer or a clear error, no panic, and nothing charged.

use std::time::Duration;

use tollgate::store::LimitError;
use tollgate::store::Outcome as Numbers;
use tollgate::{Charge, Key, Limit, Limiter, ManualClock, Outcome, Rate, Rule, Settlement, Tollgate};

use crate::crowd::ready;
use crate::faulty_store::FaultyStore;
use crate::scene::{
    Only, a_minute, at_once, bucket, charged, every_strategy, gate, hands, is_by_the_clock, limiter, on,
    secs, waited,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// Keys that cannot be reported apart from others, or be written down.
fn malformed() -> Vec<String> {
    let mut keys: Vec<String> = [
        "",
        ":",
        "::",
        ":::",
        "a:",
        ":a",
        "a::b",
        "a:b:",
        "a:b:c:d",
        "2001:db8::1",
        "%",
        "a%",
        "%4",
        "%zz",
        "a:%:b",
        "\0",
        "a\0b",
        "a\nb",
        "a\r\nb",
        "\u{1b}[2J",
        "a\tb",
        "a\u{7f}",
        "a\u{85}",
        "user:4\u{9f}2",
    ]
    .map(str::to_owned)
    .into();
    keys.extend([
        "x".repeat(1 << 20),
        ":".repeat(1 << 20),
        "%".repeat(1 << 20),
        "{".repeat(1 << 20),
        "é".repeat(1 << 19),
        "\0".repeat(1 << 20),
        format!("user:{}", "x".repeat(1_025)),
        format!("{}:42", "x".repeat(1_025)),
        format!("user:42:{}", "x".repeat(1_025)),
    ]);
    keys
}

/// Every strategy but that of leases, which are not charged but acquired.
fn rates(capacity: u64) -> impl Iterator<Item = Limit> {
    every_strategy(capacity).into_iter().filter(|limit| limit.strategy() != tollgate::Strategy::Concurrency)
}

/// Every call that takes a key, under one limit; each says whether it was refused.
fn refused_by_all(gate: &Tollgate, name: &str, key: &str) -> Vec<(&'static str, bool)> {
    let limiter = gate.local(name).unwrap();
    let asks = [Charge::new(name, key)];
    let mut many = Vec::new();
    limiter.check_many(&[key, key], &mut many);
    let is_never = |answer: &Outcome| !answer.is_allowed() && answer.retry_after().is_none();
    let is_refused = |answer: Outcome| *answer.numbers() == Numbers::BLOCKED;
    vec![
        ("check", is_refused(limiter.check(key))),
        ("charge", is_refused(limiter.charge(key, 2).unwrap())),
        ("check many", many.len() == 2 && many.iter().all(|answer| is_refused(*answer))),
        ("peek", is_refused(limiter.peek(key, 1).unwrap())),
        ("status", is_refused(limiter.status(key))),
        ("reset", !limiter.reset(key)),
        ("reserve", limiter.reserve(key, 1).unwrap().is_err()),
        ("acquire", is_refused(*limiter.acquire(key).unwrap().unwrap_err().decision().binding())),
        ("wait", is_never(ready(waited(gate, limiter.of(key))).unwrap().binding())),
        ("charge several", !charged(gate, &[limiter.of("sound"), limiter.of(key)]).is_allowed()),
        ("charge by name", !charged(gate, &asks).is_allowed()),
        ("peek by name", !ready(gate.peek(&asks)).unwrap().is_allowed()),
        ("reserve by name", ready(gate.reserve(&asks, HOUR)).unwrap().is_err()),
        ("status by name", is_refused(ready(gate.status(name, key)).unwrap())),
        ("reset by name", ready(gate.reset(name, key)).is_err()),
        ("wait by name", is_never(ready(waited(gate, asks[0].clone())).unwrap().binding())),
    ]
}

#[test]
fn a_malformed_key_is_denied_by_every_call_and_charges_nothing() {
    let hands = hands();
    let gate = gate(
        &hands,
        [
            Rule::new("api", a_minute(5)).unwrap(),
            Rule::new("watching", a_minute(5)).unwrap().shadow(),
            Rule::new("workers", Limit::concurrency(5, secs(10)).unwrap()).unwrap(),
        ],
    );
    for key in malformed() {
        for name in ["api", "watching", "workers"] {
            for (call, refused) in refused_by_all(&gate, name, &key) {
                assert!(refused, "{call} under {name} with {:?}", key.chars().take(40).collect::<String>());
            }
        }
        let error = ready(gate.reset("api", &key)).unwrap_err();
        assert!(error.to_string().starts_with("the ") && error.to_string().len() < 200, "{error}");
    }
    assert_eq!(gate.keys(), 0);
}

#[test]
fn strange_keys_that_are_sound_each_have_their_own_counter() {
    let hands = hands();
    let api = limiter(&hands, a_minute(1));
    let mut keys: Vec<String> = [
        "a",
        "A",
        "a ",
        " a",
        "a:b",
        "a%3Ab",
        "a%253Ab",
        "a:b:c",
        "a:b%3Ac",
        "a%3Ab:c",
        "a%3Ab%3Ac",
        "{a}",
        "{a",
        "a}",
        "{}",
        "{a}:{b}",
        "a/b",
        "a\\b",
        "*",
        "?",
        "[a-z]",
        "$(a)",
        "`a`",
        "'a'",
        "\"a\"",
        "-",
        ".",
        "..",
        "default:default:v",
        "é",
        "e\u{301}",
        "🧀",
        "\u{202e}a",
        "\u{feff}a",
        "null",
        "0",
        "-1",
        "ｆｕｌｌ",
        "full",
    ]
    .map(str::to_owned)
    .into();
    keys.extend(["x".repeat(1_024), "é".repeat(512), format!("{0}:{0}:{0}", "%3A".repeat(1_024))]);
    keys.extend((0..500).map(|n| format!("user:{n}")));
    for key in &keys {
        assert!(api.check(key).is_allowed(), "{key:.40} shares a counter");
    }
    for key in &keys {
        assert!(!api.check(key).is_allowed(), "{key:.40}");
    }
    assert_eq!(api.keys(), keys.len());
}

#[test]
fn costs_at_the_ends_of_the_range_have_defined_answers() {
    for limit in rates(5) {
        let limiter = limiter(&hands(), limit);
        for cost in [6, 1 << 31, 1 << 32, 1 << 53, i64::MAX.unsigned_abs(), 1 << 63, u64::MAX] {
            let outcome = limiter.charge("a", cost).unwrap();
            assert_eq!((outcome.is_allowed(), outcome.retry_after()), (false, None), "{limit} {cost}");
            assert_eq!(limiter.peek("a", cost).unwrap(), outcome);
            let reserved = limiter.reserve("a", cost).unwrap();
            assert!(reserved.is_err_and(|denied| denied.retry_after().is_none()));
            let sum = limiter.charge_all(&[limiter.of("a").cost(cost), limiter.of("a").cost(cost)]).unwrap();
            assert_eq!((sum.is_allowed(), sum.retry_after()), (false, None), "{limit} {cost}");
        }
        assert_eq!(limiter.status("a").used(), 0, "{limit}");
        for error in [limiter.charge("a", 0).unwrap_err(), limiter.peek("a", 0).unwrap_err()] {
            assert!(error.to_string().contains("at least 1; to look without charging, peek"), "{error}");
        }
        assert!(limiter.charge("a", 5).unwrap().is_allowed(), "{limit}");
    }
}

#[test]
fn settling_with_more_than_there_ever_was_is_a_debt_and_no_overflow() {
    for limit in every_strategy(5) {
        let hands = hands();
        let gate = on(&hands).limit("limit", limit).build().unwrap();
        let limiter = gate.only();
        for actual in [6, 1 << 53, 1 << 63, u64::MAX] {
            let reserved = limiter.reserve("a", 1).unwrap();
            let id = reserved.ok().map(|reservation| reservation.id());
            if let Some(id) = id {
                ready(gate.settle(id, &Settlement::Actual(actual))).unwrap();
            }
            let status = limiter.status("a");
            assert!(status.remaining() <= 5, "{limit}");
            if limit.strategy() != tollgate::Strategy::Concurrency {
                assert!(!limiter.check("a").is_allowed(), "{limit}: owes {actual}");
            }
            assert!(limiter.reset("a") || status.used() == 0, "{limit}");
        }
    }
}

/// Uses up a limit of five, and says how it stands.
fn exhausted(hands: &ManualClock, limit: Limit) -> Limiter {
    let limiter = limiter(hands, limit);
    assert!(limiter.charge("a", 5).unwrap().is_allowed());
    assert!(!limiter.check("a").is_allowed());
    limiter
}

#[test]
fn a_clock_that_jumps_forward_a_year_forgives_what_is_over_and_no_more() {
    for limit in rates(5) {
        let hands = hands();
        let limiter = exhausted(&hands, limit);
        hands.advance(secs(365 * 86_400));
        let status = limiter.status("a");
        assert_eq!(status.used(), 0, "{limit}");
        assert_eq!(status.reset_after() > Duration::ZERO, is_by_the_clock(&limit), "{limit}");
        assert!(limiter.charge("a", 5).unwrap().is_allowed(), "{limit}");
        assert!(!limiter.check("a").is_allowed(), "{limit}: a year is no more than one window");
    }
}

/// As far as the year 292,000; where the numbers themselves end, a window that ends later cannot be reported from one that ends.
#[test]
fn a_clock_that_jumps_to_the_far_future_stays_a_clock() {
    for limit in rates(5) {
        let hands = hands();
        let limiter = exhausted(&hands, limit);
        let reservation = limiter.reserve("b", 3).unwrap().unwrap();
        for far in [1 << 51, 1 << 53, 1 << 62, 1 << 63] {
            hands.set(Duration::from_micros(far));
            let allowed: u64 = (0..20).map(|_| u64::from(limiter.check("a").is_allowed())).sum();
            assert!(allowed <= 5, "{limit} at {far}");
            assert!(limiter.status("a").remaining() <= 5);
            ready(reservation.renew()).unwrap();
            drop(limiter.acquire("c"));
        }
        ready(reservation.settle(2)).unwrap();
    }
}

#[test]
fn a_clock_that_jumps_back_a_day_neither_grants_nor_takes_away() {
    for limit in rates(5) {
        let hands = hands();
        let limiter = exhausted(&hands, limit);
        hands.advance(secs(1));
        let before = limiter.status("a");
        let day_before = Duration::from(hands.now()).saturating_sub(secs(86_400));
        hands.set(day_before);
        assert_eq!(limiter.status("a"), before, "{limit}: the clock has not gone back");
        hands.set(Duration::ZERO);
        assert_eq!(limiter.peek("a", 5).unwrap().is_allowed(), limiter.charge("a", 5).unwrap().is_allowed());
        assert_eq!(limiter.status("a"), before, "{limit}");
        hands.advance(before.reset_after());
        assert_eq!(limiter.status("a").used(), 0, "{limit}: and it goes on from where it was");
    }
}

#[test]
fn parameters_that_make_no_sense_are_refused_by_name_with_a_fix() {
    let rate = |text: &str| -> Result<Rate, LimitError> { text.parse() };
    let tens = rate("10/s").unwrap();
    let most = (1 << 53) - 1;
    for (refused, field, fix) in [
        (Limit::token_bucket(tens, 0), "burst", "at least 1"),
        (Limit::token_bucket(tens, u64::MAX), "burst", "at most 9007199254740991"),
        (rate("1/d").and_then(|rate| Limit::token_bucket(rate, most)), "burst", "could not be kept exact"),
        (Limit::leaky_bucket(tens, 0), "capacity", "at least 1"),
        (Limit::fixed_window(0, secs(60)), "limit", "say `unlimited` or `blocked`"),
        (Limit::fixed_window(5, Duration::ZERO), "window", "longer than zero"),
        (Limit::clock_window(5, Duration::from_micros(u64::MAX)), "window", "at most"),
        (Limit::sliding_window(1 << 63, secs(60)), "limit", "at most"),
        (Limit::sliding_window_counter(most, secs(86_400)), "limit", "could not be kept exact"),
        (Limit::concurrency(5, Duration::ZERO), "lease", "longer than zero"),
        (rate("0/s").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("-1/s").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("1.5/s").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("10").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("10/fortnight").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("99999999999999999999/s").map(|_| bucket("1/s", 1)), "rate", ""),
        (rate("").map(|_| bucket("1/s", 1)), "rate", ""),
    ] {
        let error = tollgate::Error::from(refused.unwrap_err());
        let message = error.to_string();
        assert!(message.starts_with(field) && message.contains(fix) && message.len() < 200, "{message}");
        assert!(!error.is_transient());
    }
}

#[test]
fn names_and_times_to_live_at_the_ends_of_the_range_have_defined_answers() {
    let hands = hands();
    let gate = on(&hands).limit("api", a_minute(5)).build().unwrap();
    for name in ["", "api\0", "API", &"a".repeat(1 << 20), "{api}", "api:"] {
        let error = ready(gate.check(name, "user:42")).unwrap_err().to_string();
        assert!(
            error.starts_with("unknown limit `") && error.contains("known: api") && error.len() < 300,
            "{error}"
        );
    }
    for ttl in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let reserved = ready(gate.reserve(&[Charge::new("api", "a")], ttl)).unwrap();
        let reservation = reserved.unwrap();
        hands.set(Duration::from_micros(u64::MAX / 2));
        ready(reservation.renew()).unwrap();
        ready(reservation.cancel()).unwrap();
    }
    assert!(Key::parse(&"a".repeat(1 << 20)).is_err());
}

/// Regression: `max_keys(usize::MAX)`, which is how one writes "no bound", panicked where overflows are checked.
#[test]
fn settings_at_the_ends_of_the_range_make_a_gate_that_works() {
    let hands = hands();
    let here = || on(&hands).limit("api", a_minute(2)).limit("workers", at_once(2));
    let there = || here().store(FaultyStore::new(&hands));
    let most = Duration::MAX;
    for (name, builder, has_room) in [
        ("unbounded keys", here().max_keys(usize::MAX), true),
        ("no keys", here().max_keys(0), true),
        ("unbounded reservations", here().reservation_bytes(usize::MAX), true),
        ("no reservations", here().reservation_bytes(0), false),
        ("a sweep without rest", here().sweep_every(Some(Duration::ZERO)), true),
        ("a sweep in the far future", here().sweep_every(Some(most)), true),
        ("denials cached for ever", there().denial_cache(most), true),
        ("no denials cached", there().denial_cache(Duration::ZERO), true),
        ("many instances", there().instances(u64::MAX).max_keys(usize::MAX), true),
        ("unbounded names", here().max_names(usize::MAX), true),
    ] {
        let gate = builder.build().unwrap_or_else(|error| panic!("{name}: {error}"));
        let check = |key: &str| ready(gate.check("api", key)).unwrap().is_allowed();
        assert_eq!([check("a"), check("a"), check("a")], [true, true, false], "{name}");
        let reserved = ready(gate.reserve(&[Charge::new("api", "b")], most));
        match has_room {
            // Without room for keys all share one state, and that is used up.
            true if name == "no keys" => assert!(reserved.unwrap().is_err(), "{name}"),
            true => assert!(reserved.unwrap().is_ok(), "{name}"),
            false => assert!(reserved.unwrap_err().to_string().contains("no room"), "{name}"),
        }
    }
}
