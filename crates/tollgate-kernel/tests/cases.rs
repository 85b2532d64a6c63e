//! Every table of expected answers, replayed against the pure kernels: the proof that the arithmetic does what the tables say.
//!
//! The stores replay the same tables through the conformance suite, whose reader is borrowed here.

#[path = "../../tollgate-store/src/conformance/cases.rs"]
pub mod cases;

use std::collections::HashMap;

use cases::{Case, Op, Step};
use tollgate_kernel::{CASES, Concurrency, Cost, LeaseState, Limit, Micros, Outcome, State};

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
    reserved: HashMap<&'a str, Reservation>,
    holders: Vec<&'a str>,
}

/// A charge that is not settled yet.
struct Reservation {
    cost: u64,
    charged_at: Micros,
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
                let (algorithm, leases, id) = self.leases(id);
                algorithm.acquire(leases, id, *cost, at)
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
                let (algorithm, leases, id) = self.leases(id);
                return receipt(step, algorithm.release(leases, id, at));
            }
            Op::Renew { id } => {
                let (algorithm, leases, id) = self.leases(id);
                return receipt(step, algorithm.renew(leases, id, at));
            }
        };
        step.expect.mismatch(&outcome)
    }

    fn reserve(&mut self, id: &'a str, cost: Cost, at: Micros) -> Outcome {
        let outcome = self.limit.charge(&mut self.state, cost, at);
        if outcome.allowed {
            let charged_at = self.limit.charged_at(&self.state, at);
            self.reserved.insert(id, Reservation { cost: cost.get(), charged_at });
        }
        outcome
    }

    /// Whether there was such a reservation, not settled before.
    fn settle(&mut self, id: &str, actual: u64, at: Micros) -> bool {
        let Some(Reservation { cost, charged_at }) = self.reserved.remove(id) else { return false };
        if actual < cost {
            self.limit.give_back(&mut self.state, cost - actual, charged_at, at);
        } else if actual > cost {
            self.limit.debit(&mut self.state, actual - cost, at);
        }
        true
    }

    /// The kernel's view of a holder: its id is its place among those named so far, counted from 1.
    fn leases(&mut self, id: &'a str) -> (Concurrency, &mut LeaseState, u128) {
        let place = self.holders.iter().position(|holder| *holder == id).unwrap_or_else(|| {
            self.holders.push(id);
            self.holders.len() - 1
        });
        match (self.limit, &mut self.state) {
            (Limit::Concurrency(algorithm), State::Leases(leases)) => (algorithm, leases, place as u128 + 1),
            (limit, _) => unreachable!("the table's reader refuses leases of {limit}"),
        }
    }
}

fn receipt(step: &Step, done: bool) -> Option<String> {
    let word = |done: bool| if done { "done" } else { "gone" };
    (step.expect.done != Some(done)).then(|| format!("expected {}, not {}", word(!done), word(done)))
}
