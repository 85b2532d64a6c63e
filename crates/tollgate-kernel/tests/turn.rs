//! When it is whose turn: the table of cases, and random lines against a plain model that charges the whole line unit by unit.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tollgate_kernel::{Cost, Limit, Micros, State, Strategy as Kind};

const CASES: &str = include_str!("../src/algorithm/turn.cases");

/// A Thursday 00:00 UTC, as in the other tables.
const ORIGIN: Micros = Micros::from_secs(2_811 * 7 * 86_400);

fn cost(units: u64) -> Cost {
    Cost::new(units).unwrap()
}

fn turn(limit: &Limit, state: &State, now: Micros, of: Cost, ahead: u64, start: Micros) -> Option<Micros> {
    let probe = limit.peek(state, limit.turn_probe(of, ahead), now);
    limit.turn(&probe, of, ahead, start)
}

#[test]
fn every_case_is_answered_as_written() {
    let mut key: Option<(Limit, State)> = None;
    let mut turns = 0;
    for (number, line) in (1..).zip(CASES.lines()) {
        let words: Vec<&str> = line.split('#').next().unwrap().split_whitespace().collect();
        let time = |word: &str| ORIGIN.saturating_add(word.parse().unwrap());
        match *words.as_slice() {
            [] => {}
            ["limit", ref fields @ ..] => {
                let limit = limit_of(fields);
                key = Some((limit, limit.fresh()));
            }
            ["at", at, "take", units] => {
                let (limit, state) = key.as_mut().unwrap();
                let units = cost(units.parse().unwrap());
                assert!(limit.charge(state, units, time(at)).allowed, "turn.cases:{number}");
            }
            ["at", at, "turn", units, "behind", ahead, ref rest @ ..] => {
                let (limit, state) = key.as_ref().unwrap();
                let (start, wait) = match *rest {
                    ["from", start, wait] => (start.parse().unwrap(), wait),
                    [wait] => (Micros::ZERO, wait),
                    _ => panic!("turn.cases:{number}: `{line}`"),
                };
                let expected = (wait != "never").then(|| wait.parse().unwrap());
                let (units, ahead) = (cost(units.parse().unwrap()), ahead.parse().unwrap());
                let found = turn(limit, state, time(at), units, ahead, start);
                assert_eq!(found, expected, "turn.cases:{number}: `{line}`");
                turns += 1;
            }
            _ => panic!("turn.cases:{number}: `{line}`"),
        }
    }
    assert!(turns > 50, "{turns}");
}

/// Seven a second is no whole number of µs for one: a turn is rounded up.
#[test]
fn a_turn_of_an_odd_rate_is_exact() {
    let limit = Limit::token_bucket("7/s", 14).unwrap();
    let mut state = limit.fresh();
    assert!(limit.charge(&mut state, cost(14), ORIGIN).allowed);
    for (ahead, us) in [(0, 142_858), (1, 285_715), (6, 1_000_000), (13, 2_000_000), (14, 2_142_858)] {
        let found = turn(&limit, &state, ORIGIN, Cost::ONE, ahead, Micros::ZERO);
        assert_eq!(found, Some(Micros::new(us)), "behind {ahead}");
    }
}

fn limit_of(fields: &[&str]) -> Limit {
    let field = |name: &str| fields[fields.iter().position(|field| *field == name).unwrap() + 1];
    let number = |name| field(name).parse::<u64>().unwrap();
    let span = |name| field(name).parse::<Micros>().unwrap();
    match fields[0] {
        "token_bucket" => Limit::token_bucket(field("rate"), number("burst")),
        "leaky_bucket" => Limit::leaky_bucket(field("rate"), number("capacity")),
        "fixed_window" if field("align") == "clock" => Limit::clock_window(number("limit"), span("window")),
        "fixed_window" => Limit::fixed_window(number("limit"), span("window")),
        "sliding_window" => Limit::sliding_window(number("limit"), span("window")),
        "sliding_window_counter" => Limit::sliding_window_counter(number("limit"), span("window")),
        _ => Limit::concurrency(number("limit"), span("lease")),
    }
    .unwrap()
}

/// A key with a history, and a line at it.
#[derive(Clone, Debug)]
struct Line {
    limit: Limit,
    /// Pauses in µs, each with what is tried after it.
    charges: Vec<(u64, u64)>,
    pause: u64,
    cost: u64,
    ahead: u64,
    start: u64,
}

fn lines() -> impl Strategy<Value = Line> {
    let span = prop_oneof![1_u64..50, 50_u64..5_000, Just(1_000_000_u64)];
    let limit = (0_usize..7, 1_u64..8, span, 1_u64..12).prop_map(|(kind, count, span, tokens)| {
        let span = Micros::new(span);
        let rate = tollgate_kernel::Rate::new(tokens, span);
        match kind {
            0 => Limit::token_bucket(rate.unwrap(), count),
            1 => Limit::leaky_bucket(rate.unwrap(), count),
            2 => Limit::fixed_window(count, span),
            3 => Limit::clock_window(count, span),
            4 => Limit::sliding_window(count, span),
            // One unit of a window slides out in no less than a few µs.
            5 => Limit::sliding_window_counter(count, span.max(Micros::new(100))),
            _ => Limit::concurrency(count, span),
        }
        .unwrap()
    });
    let charges = prop::collection::vec((0_u64..3_000, 1_u64..5), 0..12);
    (limit, charges, 0_u64..3_000, 1_u64..9, 0_u64..40, prop_oneof![Just(0_u64), 0_u64..9_000]).prop_map(
        |(limit, charges, pause, cost, ahead, start)| Line { limit, charges, pause, cost, ahead, start },
    )
}

/// The key as it is when the line is asked about, and the time then.
fn key(line: &Line) -> (State, Micros) {
    let (mut state, mut now) = (line.limit.fresh(), ORIGIN);
    for (pause, units) in &line.charges {
        now = now.saturating_add(Micros::new(*pause));
        line.limit.charge(&mut state, cost(*units), now);
    }
    (state, now.saturating_add(Micros::new(line.pause)))
}

/// Charges the line: each unit when it first fits, then the cost.
fn model(line: &Line) -> Option<Micros> {
    let (mut state, begin) = key(line);
    let mut now = begin.saturating_add(Micros::new(line.start));
    let mut charge = |units: Cost| {
        now = now.saturating_add(line.limit.peek(&state, units, now).retry_after?);
        assert!(line.limit.charge(&mut state, units, now).allowed);
        Some(now)
    };
    for _ in 0..line.ahead {
        charge(Cost::ONE)?;
    }
    Some(charge(cost(line.cost))?.saturating_sub(begin))
}

fn found(line: &Line) -> Option<Micros> {
    let (state, now) = key(line);
    turn(&line.limit, &state, now, cost(line.cost), line.ahead, Micros::new(line.start))
}

fn check(test: impl Fn(&Line) -> Result<(), TestCaseError>) {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000);
    let mut runner = TestRunner::new(ProptestConfig { cases, ..ProptestConfig::default() });
    runner.run(&lines(), |line| test(&line)).unwrap();
}

#[test]
fn a_turn_is_when_the_line_before_has_gone() {
    check(|line| {
        let (found, model) = (found(line), model(line));
        match (found, model) {
            (None, None) => {}
            (Some(found), Some(model)) if line.limit.strategy() == Kind::SlidingWindowCounter => {
                // An estimate: at most two windows early or late, whatever the length of the line.
                let Limit::SlidingWindowCounter(window) = line.limit else { unreachable!() };
                let slack = 2 * window.window().get();
                prop_assert!(found.get().abs_diff(model.get()) <= slack, "{found} and {model}");
            }
            (Some(found), Some(model)) => {
                let is_bucket = matches!(line.limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_));
                let late = u64::from(is_bucket);
                // Charges are made at whole µs, and a bucket of one or two tokens that is full meanwhile loses the rest.
                let early = if is_bucket { line.ahead } else { 0 };
                prop_assert!(found.get() + early >= model.get(), "early: {found} and {model}");
                prop_assert!(found.get() <= model.get() + late, "late: {found} and {model}");
            }
            _ => prop_assert!(false, "{found:?} and {model:?}"),
        }
        Ok(())
    });
}

#[test]
fn a_longer_line_is_never_served_sooner() {
    check(|line| {
        if line.limit.strategy() == Kind::SlidingWindowCounter {
            return Ok(());
        }
        let longer = Line { ahead: line.ahead + 1, ..line.clone() };
        prop_assert!(found(&longer) >= found(line));
        Ok(())
    });
}

#[test]
fn a_line_beyond_all_bounds_saturates() {
    for limit in [
        Limit::token_bucket("1/d", 5).unwrap(),
        Limit::fixed_window(5, Micros::from_secs(86_400)).unwrap(),
        Limit::clock_window(5, Micros::from_secs(86_400)).unwrap(),
        Limit::sliding_window(5, Micros::from_secs(86_400)).unwrap(),
        Limit::sliding_window_counter(1, Micros::from_secs(86_400)).unwrap(),
        Limit::concurrency(5, Micros::from_secs(86_400)).unwrap(),
    ] {
        let wait = turn(&limit, &limit.fresh(), ORIGIN, Cost::ONE, u64::MAX, Micros::new(u64::MAX));
        assert_eq!(wait, Some(Micros::new(u64::MAX)), "{limit}");
    }
}
