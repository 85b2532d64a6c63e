//! Headers as clients see them: real limiters of every strategy step by step, and whatever outcomes there may be.

use std::time::Duration;

use proptest::prelude::*;
use tollgate::headers::{Field, Format, ReportedLimit, ResetAs, Unit, policy_item, render};
use tollgate::store::{Micros, Outcome};
use tollgate::{Limit, ManualClock, Tollgate};

/// A time that windows of ten seconds begin at.
const START: Micros = Micros::from_secs(1_700_000_000);

const SECOND: u64 = 1_000;

/// Charges a fresh key step by step: (at so many ms, cost, what is reported). The policy is the same at every step. What is reported
/// is limit, remaining, reset, `Retry-After` or `-`, and then `RateLimit`.
fn check(limit: Limit, policy: &str, steps: &[(u64, u64, &str)]) {
    let hands = ManualClock::at(START);
    let gate = Tollgate::builder().limit("api", limit).clock(hands.clock()).build().unwrap();
    let api = gate.local("api").unwrap();
    for &(at_ms, cost, expected) in steps {
        hands.set(START.saturating_add(Micros::from_millis(at_ms)));
        // A lease that is not given back ends by itself.
        let outcome = match limit {
            Limit::Concurrency(_) => {
                let reserved = api.reserve_all(&[api.of("user:42").cost(cost)], Duration::ZERO).unwrap();
                *reserved
                    .as_ref()
                    .map_or_else(|denied| denied.decision(), |held| held.decision())
                    .binding()
                    .numbers()
            }
            _ => *api.charge("user:42", cost).unwrap().numbers(),
        };
        let said =
            ReportedLimit { name: "api", limit: Some(&limit), cost, outcome, shadow: false, unit: None };
        let reported = reported(Format::default(), &[said], hands.now());
        let value =
            |field| reported.iter().find(|(other, _)| *other == field).map_or("-", |(_, value)| value);
        assert_eq!(value(Field::Policy), policy, "{limit}");
        let all_but_policy = Field::ALL.into_iter().filter(|field| *field != Field::Policy);
        let values: Vec<_> = all_but_policy.map(value).collect();
        assert_eq!(values.join(" "), expected, "{limit}, {cost} at {at_ms}ms: {outcome:?}");
    }
}

fn reported(format: Format, said: &[ReportedLimit<'_>], now: Micros) -> Vec<(Field, String)> {
    let mut reported = Vec::new();
    render(&format, said.iter().copied(), now.into(), |field, value| {
        reported.push((field, value.to_owned()))
    });
    reported
}

#[test]
fn buckets_count_down_to_the_next_token_that_makes_a_difference() {
    check(
        Limit::token_bucket("10/s", 20).unwrap(),
        r#""api";q=20;w=2"#,
        &[
            (0, 1, r#"20 19 1 - "api";r=19;t=1"#),
            (0, 18, r#"20 1 2 - "api";r=1;t=2"#), // 17 tokens until the same fits again
            (0, 5, r#"20 1 1 1 "api";r=1;t=1"#),  // 400 ms until this fits
            (0, 21, r#"20 1 2 - "api";r=1"#),     // never fits; full in 1.9 s
            (10 * SECOND, 1, r#"20 19 1 - "api";r=19;t=1"#),
        ],
    );
    check(
        Limit::leaky_bucket("1/s", 3).unwrap(),
        r#""api";q=3;w=3"#,
        &[
            (0, 2, r#"3 1 1 - "api";r=1;t=1"#),
            (0, 2, r#"3 1 1 1 "api";r=1;t=1"#),
            (0, 1, r#"3 0 1 - "api";r=0;t=1"#),
            (500, 3, r#"3 0 3 3 "api";r=0;t=3"#), // 2.5 s until all has drained
            (500, 4, r#"3 0 3 - "api";r=0"#),
        ],
    );
    check(
        Limit::token_bucket("1/h", 2).unwrap(),
        r#""api";q=2;w=7200"#,
        &[(0, 1, r#"2 1 3600 - "api";r=1;t=3600"#), (1, 2, r#"2 1 3600 3600 "api";r=1;t=3600"#)],
    );
}

#[test]
fn windows_count_down_to_their_reset() {
    check(
        Limit::fixed_window(5, Micros::from_secs(60)).unwrap(),
        r#""api";q=5;w=60"#,
        &[
            (0, 1, r#"5 4 60 - "api";r=4;t=60"#),
            (30_500, 4, r#"5 0 30 - "api";r=0;t=30"#),
            (31 * SECOND, 1, r#"5 0 29 29 "api";r=0;t=29"#),
            (31 * SECOND, 6, r#"5 0 29 - "api";r=0;t=29"#),
            (60 * SECOND, 1, r#"5 4 60 - "api";r=4;t=60"#),
        ],
    );
    check(
        Limit::clock_window(5, Micros::from_millis(100)).unwrap(),
        r#""api";q=5;w=1"#,
        &[(50, 5, r#"5 0 1 - "api";r=0;t=1"#), (99, 1, r#"5 0 1 1 "api";r=0;t=1"#)],
    );
    check(
        Limit::sliding_window(2, Micros::from_secs(10)).unwrap(),
        r#""api";q=2;w=10"#,
        &[
            (0, 1, r#"2 1 10 - "api";r=1;t=10"#),
            (4 * SECOND, 1, r#"2 0 10 - "api";r=0;t=10"#),
            (5 * SECOND, 1, r#"2 0 9 5 "api";r=0;t=5"#), // the first leaves in 5 s, the second in 9
        ],
    );
    check(
        Limit::sliding_window_counter(10, Micros::from_secs(10)).unwrap(),
        r#""api";q=10;w=10"#,
        &[
            (0, 10, r#"10 0 20 - "api";r=0;t=20"#),
            (10 * SECOND, 1, r#"10 0 10 1 "api";r=0;t=1"#), // a tenth of the window before has gone in 1 s
        ],
    );
}

#[test]
fn leases_have_a_unit_and_no_window() {
    check(
        Limit::concurrency(2, Micros::from_secs(30)).unwrap(),
        r#""api";q=2;qu="concurrent-requests""#,
        &[
            (0, 1, r#"2 1 30 - "api";r=1;t=30"#),
            (0, 1, r#"2 0 30 - "api";r=0;t=30"#),
            (10 * SECOND, 1, r#"2 0 20 20 "api";r=0;t=20"#),
            (30 * SECOND, 2, r#"2 0 30 - "api";r=0;t=30"#),
        ],
    );
}

/// An item of a structured field (RFC 9651) of the kind that is used here: a string and its parameters.
#[derive(Debug, PartialEq)]
struct Item {
    name: String,
    parameters: Vec<(String, Value)>,
}

#[derive(Debug, PartialEq)]
enum Value {
    Integer(u64),
    Text(String),
}

/// Reads a list of such items, strictly; `None` for anything else.
fn parse_list(text: &str) -> Option<Vec<Item>> {
    let (mut items, mut rest) = (Vec::new(), text);
    loop {
        let (name, mut tail) = parse_string(rest)?;
        let mut parameters = Vec::new();
        while let Some(parameter) = tail.strip_prefix(';') {
            let (key, value) = parameter.split_once('=')?;
            let is_key = |c: char| c.is_ascii_lowercase();
            if key.is_empty() || !key.chars().all(is_key) {
                return None;
            }
            let value = if value.starts_with('"') {
                let (text, after) = parse_string(value)?;
                tail = after;
                Value::Text(text)
            } else {
                let digits = value.len() - value.trim_start_matches(|c: char| c.is_ascii_digit()).len();
                tail = &value[digits..];
                Value::Integer(value[..digits].parse().ok().filter(|_| digits <= 15)?)
            };
            parameters.push((key.to_owned(), value));
        }
        items.push(Item { name, parameters });
        if tail.is_empty() {
            return Some(items);
        }
        rest = tail.strip_prefix(',')?.trim_start_matches(' ');
    }
}

/// Reads a string without escapes, and what comes after it.
fn parse_string(text: &str) -> Option<(String, &str)> {
    let (inside, rest) = text.strip_prefix('"')?.split_once('"')?;
    let is_plain = inside.bytes().all(|byte| matches!(byte, 0x20..=0x7e) && byte != b'\\');
    is_plain.then(|| (inside.to_owned(), rest))
}

/// Limits of every strategy, and none.
fn limits() -> impl Strategy<Value = Option<Limit>> {
    let span = (1..=1u64 << 40).prop_map(Micros::new);
    (0..=6u8, 1..=1_000_000u64, span).prop_map(|(strategy, count, span)| {
        let rate = tollgate::Rate::new(count, span).ok()?;
        let limit = match strategy {
            0 => return None,
            1 => Limit::token_bucket(rate, count),
            2 => Limit::leaky_bucket(rate, count),
            3 => Limit::fixed_window(count, span),
            4 => Limit::sliding_window(count, span),
            5 => Limit::sliding_window_counter(count, span),
            _ => Limit::concurrency(count, span),
        };
        Some(limit.unwrap())
    })
}

/// Any outcome at all, and more often one of a limit of this capacity.
fn outcomes() -> impl Strategy<Value = Outcome> {
    let number = || prop_oneof![Just(0u64), 1..=20u64, any::<u64>()];
    let micros = || number().prop_map(Micros::new);
    let any_outcome = (any::<bool>(), number(), number(), proptest::option::of(micros()), micros(), micros())
        .prop_map(|(allowed, capacity, remaining, retry_after, reset_after, delay)| Outcome {
            allowed,
            capacity,
            remaining,
            retry_after,
            reset_after,
            delay,
        });
    prop_oneof![6 => any_outcome, 1 => Just(Outcome::UNLIMITED), 1 => Just(Outcome::BLOCKED)]
}

#[derive(Clone, Debug)]
struct Drawn {
    name: String,
    limit: Option<Limit>,
    cost: u64,
    outcome: Outcome,
    fits: bool,
    shadow: bool,
    unit: Option<Unit>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let name = prop_oneof![3 => "[a-z0-9_.-]{1,64}", 1 => any::<String>()];
    let unit = prop_oneof![
        Just(None),
        Just(Some(Unit::Requests)),
        Just(Some(Unit::ContentBytes)),
        Just(Some(Unit::ConcurrentRequests))
    ];
    (name, limits(), any::<u64>(), outcomes(), any::<bool>(), proptest::bool::weighted(0.2), unit).prop_map(
        |(name, limit, cost, outcome, fits, shadow, unit)| Drawn {
            name,
            limit,
            cost,
            outcome,
            fits,
            shadow,
            unit,
        },
    )
}

impl Drawn {
    fn said(&self) -> ReportedLimit<'_> {
        let mut outcome = self.outcome;
        if let Some(limit) = self.limit.filter(|_| self.fits) {
            outcome.capacity = limit.capacity();
            outcome.remaining = outcome.remaining.min(outcome.capacity);
        }
        ReportedLimit {
            name: &self.name,
            limit: self.limit.as_ref(),
            cost: self.cost,
            outcome,
            shadow: self.shadow,
            unit: self.unit,
        }
    }
}

const MAX_INTEGER: u64 = 999_999_999_999_999;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_was_said_can_be_read(
        drawn in proptest::collection::vec(drawn(), 0..6),
        now in any::<u64>(),
        unix in any::<bool>(),
    ) {
        let said: Vec<ReportedLimit<'_>> = drawn.iter().map(Drawn::said).collect();
        let shown: Vec<_> = said.iter().filter(|said| !said.shadow && said.outcome != Outcome::UNLIMITED).collect();
        let reset = if unix { ResetAs::UnixTime } else { ResetAs::Seconds };
        let reported = reported(Format { reset, ..Format::default() }, &said, Micros::new(now));
        prop_assert_eq!(reported.is_empty(), shown.is_empty());
        for (field, value) in &reported {
            prop_assert!(!value.is_empty() && value.bytes().all(|byte| matches!(byte, 0x20..=0x7e)), "{value:?}");
            match field {
                Field::Limit | Field::Remaining | Field::Reset => prop_assert!(value.parse::<u64>().is_ok()),
                Field::RetryAfter => {
                    prop_assert!(value.parse::<u64>().unwrap() >= 1);
                    prop_assert!(shown.iter().any(|said| !said.outcome.allowed));
                }
                Field::Policy => reads_as_policy(value, &shown)?,
                Field::Quota => {
                    let wait = reported.iter().find(|(field, _)| *field == Field::RetryAfter);
                    reads_as_quota(value, &shown, wait.map(|(_, value)| value.parse().unwrap()))?;
                }
            }
        }
        let denying: Vec<_> = shown.iter().filter(|said| !said.outcome.allowed).collect();
        let can_wait = !denying.is_empty() && denying.iter().all(|said| said.outcome.retry_after.is_some());
        prop_assert_eq!(reported.iter().any(|(field, _)| *field == Field::RetryAfter), can_wait);
    }
}

fn reads_as_policy(value: &str, shown: &[&ReportedLimit<'_>]) -> Result<(), TestCaseError> {
    let items = parse_list(value).ok_or_else(|| TestCaseError::fail(value.to_owned()))?;
    prop_assert_eq!(items.len(), shown.len());
    for (item, said) in items.iter().zip(shown) {
        let get = |key| item.parameters.iter().find(|(other, _)| other == key).map(|(_, value)| value);
        prop_assert_eq!(get("q"), Some(&Value::Integer(said.outcome.capacity.min(MAX_INTEGER))));
        let leases = matches!(said.limit, Some(Limit::Concurrency(_)));
        let window = said
            .limit
            .filter(|_| !leases && said.outcome.capacity > 0)
            .map(|limit| Value::Integer(limit.window_us().as_secs_ceil().max(1)));
        prop_assert_eq!(get("w"), window.as_ref());
        let unit = said.unit.or(leases.then_some(Unit::ConcurrentRequests)).unwrap_or_default();
        let unit = (unit != Unit::Requests).then(|| Value::Text(unit.name().to_owned()));
        prop_assert_eq!(get("qu"), unit.as_ref());
        let alone = parse_list(&policy_item(said));
        prop_assert_eq!(alone.as_deref(), Some(std::slice::from_ref(item)));
    }
    Ok(())
}

fn reads_as_quota(value: &str, shown: &[&ReportedLimit<'_>], wait: Option<u64>) -> Result<(), TestCaseError> {
    let items = parse_list(value).ok_or_else(|| TestCaseError::fail(value.to_owned()))?;
    prop_assert_eq!(items.len(), shown.len());
    for (item, said) in items.iter().zip(shown) {
        let get = |key| item.parameters.iter().find(|(other, _)| other == key).map(|(_, value)| value);
        // Where any limit denies, none was charged.
        let is_denied = shown.iter().any(|said| !said.outcome.allowed);
        let remaining = match is_denied && said.outcome.allowed {
            true => said.outcome.remaining.saturating_add(said.cost).min(said.outcome.capacity),
            false => said.outcome.remaining,
        };
        prop_assert_eq!(get("r"), Some(&Value::Integer(remaining.min(MAX_INTEGER))));
        if said.name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-')) {
            prop_assert_eq!(&item.name, said.name);
        }
        match (get("t"), said.outcome.allowed) {
            (Some(Value::Integer(t)), false) => {
                prop_assert!(wait.is_none_or(|wait| *t <= wait), "{t} {wait:?}")
            }
            (Some(Value::Text(text)), _) => prop_assert!(false, "{text}"),
            _ => {}
        }
    }
    Ok(())
}
