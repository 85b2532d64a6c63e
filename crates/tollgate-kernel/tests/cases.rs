//! Every table of expected answers, replayed against the pure kernels: the proof that the arithmetic does what the tables say.
//!
//! The stores replay the same tables through the conformance suite, whose reader is borrowed here.

#[path = "../../tollgate-store/src/conformance/cases.rs"]
pub mod cases;

use std::collections::HashMap;

use cases::{Case, Op, Step};
use tollgate_kernel::{CASES, Concurrency, Cost, LeaseState, Limit, Micros, Outcome, State, Taken};

#[test]
fn every_case_is_answered_as_written() {
    let mut wrong = Vec::new();
    for (file, text) in CASES {
        for case in cases::parse(file, text).unwrap() {
            let mut key = Key::new(&case);
            wrong.extend(case.steps.iter().filter_map(|step| {
                key.play(step).map(|wrong| format!("{}:{}: {wrong}", case.file, step.line))
            }));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// One key in the middle of its life, and what a store would remember beside its state.
struct Key<'a> {
    limit: Limit,
    state: State,
    /// Charges that are not settled yet.
    reserved: HashMap<&'a str, Taken>,
    /// Holders by name, each with the end of its last lease.
    holders: Vec<(&'a str, Micros)>,
}

impl<'a> Key<'a> {
    fn new(case: &Case) -> Key<'a> {
        let limit = case.limit;
        Key { limit, state: limit.fresh(), reserved: HashMap::new(), holders: Vec::new() }
    }

    /// What is wrong with the kernel's answer, if anything.
    fn play(&mut self, step: &'a Step) -> Option<String> {
        let at = step.at;
        let outcome = match &step.op {
            Op::Take(cost) => self.limit.charge(&mut self.state, *cost, at),
            Op::Peek(cost) => self.limit.peek(&self.state, *cost, at),
            Op::Reserve { id, cost } => self.reserve(id, *cost, at),
            Op::Hold { id, cost } => {
                let (algorithm, leases, id, end) = self.leases(id);
                let outcome = algorithm.acquire(leases, id, *cost, at);
                if outcome.allowed {
                    *end = algorithm.end(at);
                }
                outcome
            }
            Op::Refund(amount) => {
                self.limit.refund(&mut self.state, amount.get(), at);
                return None;
            }
            Op::Reset => {
                self.state = self.limit.fresh();
                return None;
            }
            Op::Settle { id, actual } => return receipt(step, self.settle(id, *actual, at)),
            Op::Cancel { id } => return receipt(step, self.settle(id, 0, at)),
            Op::Release { id } => {
                let (algorithm, leases, id, end) = self.leases(id);
                return receipt(step, algorithm.release(leases, id, *end, at));
            }
            Op::Renew { id } => {
                let (algorithm, leases, id, end) = self.leases(id);
                let renewed = algorithm.renew(leases, id, *end, at);
                *end = renewed.unwrap_or(*end);
                return receipt(step, renewed.is_some());
            }
        };
        step.expect.mismatch(&outcome)
    }

    fn reserve(&mut self, id: &'a str, cost: Cost, at: Micros) -> Outcome {
        let outcome = self.limit.charge(&mut self.state, cost, at);
        if outcome.allowed {
            let at = self.limit.charged_at(&self.state, at);
            self.reserved.insert(id, Taken { cost: cost.get(), at });
        }
        outcome
    }

    /// Whether there was such a reservation, not settled before.
    fn settle(&mut self, id: &str, actual: u64, at: Micros) -> bool {
        let Some(taken) = self.reserved.remove(id) else { return false };
        if actual < taken.cost {
            self.limit.give_back(&mut self.state, taken, taken.cost - actual, at);
        } else if actual > taken.cost {
            self.limit.debit(&mut self.state, actual - taken.cost, at);
        }
        true
    }

    /// The kernel's view of a holder: its id is its place among those named so far, counted from 1.
    fn leases(&mut self, id: &'a str) -> (Concurrency, &mut LeaseState, u128, &mut Micros) {
        let place = self.holders.iter().position(|(holder, _)| *holder == id).unwrap_or_else(|| {
            self.holders.push((id, Micros::ZERO));
            self.holders.len() - 1
        });
        let end = &mut self.holders[place].1;
        match (self.limit, &mut self.state) {
            (Limit::Concurrency(algorithm), State::Leases(leases)) => {
                (algorithm, leases, place as u128 + 1, end)
            }
            (limit, _) => unreachable!("the table's reader refuses leases of {limit}"),
        }
    }
}

fn receipt(step: &Step, done: bool) -> Option<String> {
    let word = |done: bool| if done { "done" } else { "gone" };
    (step.expect.done != Some(done)).then(|| format!("expected {}, not {}", word(!done), word(done)))
}
