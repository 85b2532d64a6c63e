//! What must hold of every strategy, whatever is asked of it and when: one set of checks over random lives of a key.
//!
//! Each check runs over 10,000 lives of every kind of limit, or over as many as `PROPTEST_CASES` says. A failure prints the
//! smallest life found that still fails, as a table of the `*.cases` format: give it its answers and it is a regression test.
//! What differs between strategies is in two places only: their promises in `properties/bound.rs`, and the naive model in
//! `properties/model.rs`.

#[path = "properties/bound.rs"]
mod bound;
#[path = "properties/life.rs"]
mod life;
#[path = "properties/model.rs"]
mod model;

use std::collections::{HashMap, HashSet};

use bound::{Admission, Flow};
use life::{Ask, Call, KINDS, Kind, Life};
use model::Model;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tollgate_kernel::{Algorithm, Align, Cost, LeaseState, Limit, Micros, Outcome, State, Taken};

const MICROSECOND: Micros = Micros::new(1);

#[test]
fn every_answer_is_the_models() {
    in_every_life(life::settlements, answers_as_the_model);
    in_every_life(life::charges_whatever_the_clock, answers_as_the_model);
}

#[test]
fn never_more_is_admitted_than_the_bound() {
    in_every_life(life::charges_whatever_the_clock, |life| {
        bound::within_bound(&life.limit, &admissions(life))
    });
}

#[test]
fn waits_are_enough_and_not_a_microsecond_too_long() {
    in_every_life(life::settlements, waits_are_exact);
    in_every_life(life::charges_whatever_the_clock, waits_are_exact);
}

#[test]
fn buckets_hold_more_when_they_say_so_and_hardly_sooner() {
    for kind in KINDS.into_iter().filter(|kind| kind.is_bucket()) {
        in_lives_of(kind, life::settlements(kind), more_comes_when_it_says);
        in_lives_of(kind, life::charges_whatever_the_clock(kind), more_comes_when_it_says);
    }
}

#[test]
fn denials_and_peeks_are_free() {
    in_every_life(life::charges_whatever_the_clock, |life| {
        let all = play(life);
        let admitted: Vec<_> = all.iter().filter(|answer| answer.charged).cloned().collect();
        let calls = admitted.iter().map(|answer| answer.call).collect();
        let alone = play(&Life { limit: life.limit, calls });
        prop_assert_eq!(&alone, &admitted, "with the other calls, and without them");
        prop_assert_eq!(&play(life), &all, "played again");
        Ok(())
    });
}

#[test]
fn steady_polling_is_never_starved() {
    in_every_life(life::polls, |life| {
        let admitted = play(life).iter().filter(|answer| answer.charged).count();
        let expected = bound::owed_to_polls(life);
        prop_assert!(
            admitted >= expected,
            "{admitted} of {} polls admitted, {expected} owed",
            life.calls.len()
        );
        Ok(())
    });
}

#[test]
fn answers_are_well_formed() {
    in_every_life(life::settlements, |life| {
        play(life).iter().try_for_each(|answer| well_formed(life, answer))
    });
}

#[test]
fn a_reset_is_when_the_key_is_fresh_again_and_no_sooner() {
    in_every_life(life::settlements, |life| {
        let mut key = Key::new(life.limit);
        for call in &life.calls {
            // A peek that would be allowed tells of a state that is not there.
            let reported = key.play(*call).filter(|answer| answer.charged || !answer.outcome.allowed);
            if let Some(Answer { now, outcome, .. }) = reported {
                resets_when_it_says(&life.limit, key.state.clone(), now, outcome.reset_after)?;
            }
        }
        Ok(())
    });
}

/// A store may forget a key whose state is fresh, so nobody must be able to tell.
#[test]
fn forgetting_a_fresh_key_changes_no_answer() {
    in_every_life(life::settlements, |life| {
        let (mut keeping, mut forgetting) = (Key::new(life.limit), Key::new(life.limit));
        for call in &life.calls {
            if life.limit.is_fresh(&forgetting.state, call.at) {
                forgetting.state = life.limit.fresh();
            }
            prop_assert_eq!(keeping.play(*call), forgetting.play(*call));
        }
        Ok(())
    });
}

#[test]
fn settling_late_leaves_what_settling_at_once_would_have() {
    in_every_life(life::settlements, settles_into_its_own_state);
}

#[test]
fn nothing_overflows_at_the_bounds() {
    in_every_life(life::extremes, |life| {
        let mut key = Key::new(life.limit);
        let mut latest = Micros::ZERO;
        for call in &life.calls {
            latest = latest.max(call.at);
            let before = key.state.clone();
            let Some(answer) = key.play(*call) else { continue };
            well_formed(life, &answer)?;
            // A bucket does not know what time it has seen, so its waits are exact only while the clock does not step back.
            if call.at == latest {
                wait_is_exact(&life.limit, &before, answer.cost, answer.now, &answer.outcome)?;
            }
        }
        Ok(())
    });
}

#[test]
fn leases_are_held_released_renewed_and_run_out() {
    in_lives_of(Kind::Concurrency, life::leases(), holders_are_counted);
}

/// Runs `check` over random lives of every kind of limit.
fn in_every_life(lives: impl Fn(Kind) -> BoxedStrategy<Life>, check: impl Fn(&Life) -> TestCaseResult) {
    for kind in KINDS {
        in_lives_of(kind, lives(kind), &check);
    }
}

fn in_lives_of(kind: Kind, lives: BoxedStrategy<Life>, check: impl Fn(&Life) -> TestCaseResult) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 10_000;
    }
    if let Err(failure) = TestRunner::new(config).run(&lives, |life| check(&life)) {
        panic!("{kind:?}: {failure}");
    }
}

/// A key under test: its state, and what a store would remember beside it.
struct Key {
    limit: Limit,
    state: State,
    reserved: HashMap<usize, Taken>,
}

/// What was asked, the time it counted as, and what was answered.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    call: Call,
    cost: Cost,
    now: Micros,
    outcome: Outcome,
    /// Whether something was taken: allowed, and not a peek.
    charged: bool,
}

impl Key {
    fn new(limit: Limit) -> Key {
        Key { limit, state: limit.fresh(), reserved: HashMap::new() }
    }

    /// Does what is asked. A settlement has no outcome.
    fn play(&mut self, call: Call) -> Option<Answer> {
        let Call { at, ask } = call;
        let now = self.limit.charged_at(&self.state, at);
        let (outcome, cost) = match ask {
            Ask::Peek(cost) => (self.limit.peek(&self.state, cost, at), cost),
            Ask::Take(cost) => (self.limit.charge(&mut self.state, cost, at), cost),
            Ask::Reserve { id, cost } => {
                let outcome = self.limit.charge(&mut self.state, cost, at);
                if outcome.allowed {
                    let charged_at = self.limit.charged_at(&self.state, at);
                    self.reserved.insert(id, Taken { cost: cost.get(), at: charged_at });
                }
                (outcome, cost)
            }
            Ask::Settle { id, actual } => {
                if let Some(taken) = self.reserved.remove(&id) {
                    self.settle(taken, actual, at);
                }
                return None;
            }
            Ask::Hold { .. } | Ask::Release { .. } | Ask::Renew { .. } => {
                unreachable!("leases have a check of their own")
            }
        };
        let charged = outcome.allowed && !matches!(ask, Ask::Peek(_));
        Some(Answer { call, cost, now, outcome, charged })
    }

    fn settle(&mut self, taken: Taken, actual: u64, at: Micros) {
        if actual < taken.cost {
            self.limit.give_back(&mut self.state, taken, taken.cost - actual, at);
        } else {
            self.limit.debit(&mut self.state, actual - taken.cost, at);
        }
    }

    /// What is left as it stands.
    fn remaining(&self, at: Micros) -> u64 {
        self.limit.peek(&self.state, Cost::MAX, at).remaining
    }
}

impl Answer {
    fn admission(&self) -> Admission {
        Admission { at: self.now.get(), cost: self.cost.get(), delay: self.outcome.delay.get() }
    }
}

fn play(life: &Life) -> Vec<Answer> {
    let mut key = Key::new(life.limit);
    life.calls.iter().filter_map(|call| key.play(*call)).collect()
}

fn admissions(life: &Life) -> Vec<Admission> {
    play(life).iter().filter(|answer| answer.charged).map(Answer::admission).collect()
}

/// Charge by charge, the kernel says what a model that remembers everything says; a peek says what a charge would; a denial
/// leaves the state as it was.
fn answers_as_the_model(life: &Life) -> TestCaseResult {
    let mut key = Key::new(life.limit);
    let mut model = Model::new(life.limit);
    let mut numbers = HashMap::new();
    for call in &life.calls {
        let (before, now) = (key.state.clone(), model.counted(call.at));
        let unsettled = match call.ask {
            Ask::Settle { id, .. } => key.reserved.get(&id).map(|reservation| reservation.cost),
            _ => None,
        };
        let Some(Answer { cost, outcome, charged, now: counted, .. }) = key.play(*call) else {
            if let (Ask::Settle { id, actual }, Some(cost)) = (call.ask, unsettled) {
                if actual < cost {
                    model.give_back(numbers[&id], cost - actual, now);
                } else if actual > cost {
                    model.charge(actual - cost, now);
                }
            }
            continue;
        };
        prop_assert_eq!(counted, now, "counted as, at {}us", call.at.get());
        prop_assert_eq!(outcome.allowed, model.fits(cost, now), "allowed, at {}us", call.at.get());
        let delay = if outcome.allowed { model.delay(now) } else { Micros::ZERO };
        prop_assert_eq!(outcome.delay, delay, "delay, at {}us", call.at.get());
        let mut charged_model = model.clone();
        if outcome.allowed {
            let number = charged_model.charge(cost.get(), now);
            if let Ask::Reserve { id, .. } = call.ask {
                numbers.insert(id, number);
            }
        }
        prop_assert_eq!(outcome.remaining, charged_model.remaining(now), "remaining, at {}us", call.at.get());
        prop_assert_eq!(life.limit.peek(&before, cost, call.at), outcome, "peek, at {}us", call.at.get());
        let wait = outcome.retry_after.unwrap_or(Micros::ZERO);
        if wait > Micros::ZERO {
            prop_assert!(model.fits(cost, now.saturating_add(wait)), "after {wait}, at {}us", call.at.get());
            let too_soon = now.saturating_add(wait).saturating_sub(MICROSECOND);
            prop_assert!(!model.fits(cost, too_soon), "before {wait}, at {}us", call.at.get());
        }
        let reset = now.saturating_add(outcome.reset_after);
        prop_assert!(charged_model.is_whole(reset), "whole after the reset, at {}us", call.at.get());
        // A fixed window lasts its time even when all that was in it has been given back.
        if outcome.reset_after > Micros::ZERO && !matches!(life.limit, Limit::FixedWindow(_)) {
            let too_soon = reset.saturating_sub(MICROSECOND);
            prop_assert!(!charged_model.is_whole(too_soon), "whole before the reset, at {}us", call.at.get());
        }
        if charged {
            model = charged_model;
        } else {
            prop_assert_eq!(&key.state, &before, "a denial or a peek, at {}us", call.at.get());
        }
    }
    Ok(())
}

/// 0 ≤ remaining ≤ capacity; allowed means no wait; never means that the cost is above the capacity, and the other way round.
fn well_formed(life: &Life, answer: &Answer) -> TestCaseResult {
    let Answer { cost, outcome, .. } = answer;
    prop_assert_eq!(outcome.capacity, life.limit.capacity());
    prop_assert!(outcome.remaining <= outcome.capacity, "{outcome:?}");
    prop_assert_eq!(outcome.retry_after.is_none(), cost.get() > outcome.capacity, "{:?}", outcome);
    prop_assert_eq!(outcome.allowed, outcome.retry_after == Some(Micros::ZERO), "{:?}", outcome);
    prop_assert!(outcome.allowed || outcome.delay == Micros::ZERO, "{outcome:?}");
    prop_assert!(outcome.delay == Micros::ZERO || matches!(life.limit, Limit::LeakyBucket(_)), "{outcome:?}");
    Ok(())
}

/// At every moment of a life, for costs small and large.
fn waits_are_exact(life: &Life) -> TestCaseResult {
    let limit = life.limit;
    let mut key = Key::new(limit);
    for call in &life.calls {
        let asked = key.play(*call).map(|answer| answer.cost);
        let now = limit.charged_at(&key.state, call.at);
        let capacity = Cost::new(limit.capacity());
        let half = Cost::new(limit.capacity() / 2);
        for cost in [Some(Cost::ONE), asked, half, capacity].into_iter().flatten() {
            let outcome = limit.peek(&key.state, cost, call.at);
            wait_is_exact(&limit, &key.state, cost, now, &outcome)?;
        }
    }
    Ok(())
}

/// Alone on the key, waiting it out admits, and a microsecond less does not.
fn wait_is_exact(limit: &Limit, state: &State, cost: Cost, now: Micros, outcome: &Outcome) -> TestCaseResult {
    let Some(wait) = outcome.retry_after.filter(|wait| *wait > Micros::ZERO) else { return Ok(()) };
    let then = now.saturating_add(wait);
    let too_soon = then.saturating_sub(MICROSECOND);
    prop_assert!(limit.peek(state, cost, then).allowed, "{cost:?} does not fit after {wait:?} from {now:?}");
    prop_assert!(!limit.peek(state, cost, too_soon).allowed, "{cost:?} fits before {wait:?} from {now:?}");
    Ok(())
}

/// After every charge, for costs small and large: waiting it out brings what was promised, and 2 µs less do not.
fn more_comes_when_it_says(life: &Life) -> TestCaseResult {
    let (limit, capacity) = (life.limit, life.limit.capacity());
    let mut key = Key::new(limit);
    for call in &life.calls {
        let Some(Answer { now, outcome, cost, charged, .. }) = key.play(*call) else { continue };
        if !outcome.allowed {
            prop_assert_eq!(limit.more_after_us(&outcome, cost.get()), outcome.retry_after);
        }
        for cost in [1, cost.get(), capacity / 2, capacity, capacity + 1].into_iter().filter(|_| charged) {
            let promised = if outcome.remaining < cost { cost } else { outcome.remaining + 1 };
            let Some(wait) = limit.more_after_us(&outcome, cost) else {
                prop_assert!(cost > capacity, "never, for {cost} after {outcome:?}");
                continue;
            };
            let then = now.saturating_add(wait);
            prop_assert!(key.remaining(then) >= promised.min(capacity), "{cost} after {outcome:?}: {wait}");
            if wait > MICROSECOND {
                let too_soon = then.saturating_sub(Micros::new(2));
                prop_assert!(key.remaining(too_soon) < promised, "{cost} after {outcome:?}: {wait}");
            }
        }
    }
    Ok(())
}

/// After the reset the state answers as a fresh one, to charge after charge. A microsecond before it, something is still
/// remembered, except that windows of the clock end whether anything is in them or not.
fn resets_when_it_says(limit: &Limit, mut state: State, now: Micros, reset_after: Micros) -> TestCaseResult {
    let then = now.saturating_add(reset_after);
    prop_assert!(limit.is_fresh(&state, then), "not fresh after {reset_after} from {now:?}");
    if limit.is_fresh(&state, now) {
        let clock = matches!(limit, Limit::FixedWindow(window) if window.align() == Align::Clock);
        prop_assert!(reset_after == Micros::ZERO || clock, "fresh at {now:?}, and yet {reset_after}");
    } else {
        let too_soon = then.saturating_sub(MICROSECOND);
        prop_assert!(!limit.is_fresh(&state, too_soon), "fresh before {reset_after} from {now:?}");
    }
    let mut fresh = limit.fresh();
    let capacity = limit.capacity();
    for (cost, later) in [(capacity + 1, 0), (1, 0), (capacity / 2, 0), (capacity, 1), (1, 7)] {
        let cost = Cost::new(cost).unwrap_or(Cost::ONE);
        let at = then.saturating_add(Micros::new(later));
        prop_assert_eq!(limit.charge(&mut state, cost, at), limit.charge(&mut fresh, cost, at));
    }
    Ok(())
}

/// What is given back goes where it was taken from. For windows and logs that means: once all is settled, what is left is
/// what it would be had every reservation been settled the moment it was made; before, it is never more. A bucket has but one
/// state, so there what was given back may be spent again as long as it has not refilled, and nothing beyond it.
fn settles_into_its_own_state(life: &Life) -> TestCaseResult {
    let limit = life.limit;
    let is_bucket = matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_));
    let actuals: HashMap<usize, u64> = life.calls.iter().filter_map(|call| call.settles()).collect();
    let (mut late, mut prompt) = (Key::new(limit), Key::new(limit));
    let mut unsettled = HashSet::new();
    let (mut flow, mut numbers) = (Flow::default(), HashMap::new());
    for call in &life.calls {
        let before = late.state.clone();
        match call.ask {
            Ask::Settle { id, .. } if unsettled.remove(&id) => {
                flow.given_back(numbers[&id], late.reserved[&id].cost - actuals[&id]);
                late.play(*call);
            }
            Ask::Settle { .. } => {
                late.play(*call);
                prompt.play(*call);
            }
            _ => {
                let Some(answer) = late.play(*call).filter(|answer| answer.charged) else { continue };
                let number = flow.admitted(answer.admission());
                if is_bucket {
                    flow.stays_within_bucket(&limit)?;
                } else {
                    let charged = prompt.play(*call).is_some_and(|answer| answer.charged);
                    prop_assert!(
                        charged,
                        "what fits beside an estimate fits beside less, at {}us",
                        call.at.get()
                    );
                }
                let Ask::Reserve { id, cost } = call.ask else { continue };
                let Some(&actual) = actuals.get(&id).filter(|actual| **actual < cost.get()) else { continue };
                let reservation = prompt.reserved.remove(&id);
                unsettled.insert(id);
                numbers.insert(id, number);
                settled_at_once_is_charged(&limit, before, cost, actual, call.at)?;
                if let Some(taken) = reservation {
                    prompt.settle(taken, actual, call.at);
                }
            }
        }
        if !is_bucket {
            let (left, promptly_left) = (late.remaining(call.at), prompt.remaining(call.at));
            prop_assert!(left <= promptly_left, "{left} left, not {promptly_left}, at {}us", call.at.get());
            prop_assert!(left == promptly_left || !unsettled.is_empty(), "{left} left, not {promptly_left}");
        }
    }
    Ok(())
}

/// A reservation settled at the same instant answers from then on as a charge of the true cost does.
fn settled_at_once_is_charged(
    limit: &Limit,
    before: State,
    cost: Cost,
    actual: u64,
    at: Micros,
) -> TestCaseResult {
    let Some(actual) = Cost::new(actual) else { return Ok(()) };
    let (mut settled, mut charged) = (before.clone(), before);
    limit.charge(&mut settled, cost, at);
    let taken = Taken { cost: cost.get(), at: limit.charged_at(&settled, at) };
    limit.give_back(&mut settled, taken, cost.get() - actual.get(), at);
    limit.charge(&mut charged, actual, at);
    for ask in [Cost::ONE, cost, Cost::MAX] {
        for later in [at, at.saturating_add(limit.window_us())] {
            prop_assert_eq!(limit.peek(&settled, ask, later), limit.peek(&charged, ask, later));
        }
    }
    Ok(())
}

/// Leases against the plainest account of them: who holds how much until when.
fn holders_are_counted(life: &Life) -> TestCaseResult {
    struct Holder {
        id: u128,
        cost: u64,
        end: Micros,
    }
    let Limit::Concurrency(limit) = life.limit else { unreachable!("only leases are held") };
    let mut state = LeaseState::default();
    let mut holders: Vec<Holder> = Vec::new();
    for call in &life.calls {
        let now = call.at;
        let lasts = |holder: &Holder| now < holder.end;
        let held =
            |holders: &[Holder]| holders.iter().filter(|holder| lasts(holder)).map(|h| h.cost).sum::<u64>();
        let mine = |id: u128| holders.iter().position(|holder| holder.id == id && lasts(holder));
        match call.ask {
            Ask::Hold { id, cost } if mine(id).is_none() => {
                let outcome = limit.acquire(&mut state, id, cost, now);
                prop_assert_eq!(outcome.allowed, held(&holders) + cost.get() <= limit.limit());
                if outcome.allowed {
                    holders.retain(lasts);
                    holders.push(Holder { id, cost: cost.get(), end: limit.end(now) });
                }
            }
            Ask::Release { id } => {
                let place = mine(id);
                let end = place.map_or(limit.end(now), |place| holders[place].end);
                prop_assert_eq!(limit.release(&mut state, id, end, now), place.is_some());
                place.map(|place| holders.remove(place));
                prop_assert!(!limit.release(&mut state, id, end, now), "released twice");
            }
            Ask::Renew { id } => {
                let place = mine(id);
                let end = place.map_or(limit.end(now), |place| holders[place].end);
                let renewed = limit.renew(&mut state, id, end, now);
                prop_assert_eq!(renewed, place.map(|_| limit.end(now).max(end)));
                if let (Some(place), Some(end)) = (place, renewed) {
                    holders[place].end = end;
                    holders.retain(lasts);
                }
            }
            _ => continue,
        }
        let held = held(&holders);
        prop_assert!(held <= limit.limit(), "{held} held at {}us", call.at.get());
        let left = limit.peek(&state, Cost::MAX, call.at).remaining;
        prop_assert_eq!(left, limit.limit() - held, "left at {}us", call.at.get());
        let whole = Limit::from(limit);
        for cost in [Cost::ONE, Cost::new(limit.limit()).unwrap()] {
            let outcome = limit.peek(&state, cost, call.at);
            wait_is_exact(&whole, &State::Leases(state.clone()), cost, now, &outcome)?;
        }
    }
    Ok(())
}
