//! Every table of cases, replayed through a store. Cases in which the clock steps back are for the kernels alone: a store's
//! clock does not.

use std::collections::HashMap;

use tollgate_kernel::{CASES, Cost, Outcome};

use super::cases::{self, Case, Op, Step};
use super::{FOR_LONG, Subject};
use crate::{ChargeId, Hold, ManualClock, Micros, Settled, Settlement, StoredCharge, StoredLimit};

pub(super) async fn cases(make: &impl AsyncFn(ManualClock) -> Subject) {
    let mut wrong = Vec::new();
    let mut steps = 0;
    for (file, text) in CASES {
        let cases = match cases::parse(file, text) {
            Ok(cases) => cases,
            Err(error) => panic!("{error}"),
        };
        for case in cases.iter().filter(|case| case.steps.is_sorted_by_key(|step| step.at)) {
            let clock = super::clock();
            let subject = make(clock.clone()).await;
            let mut player = Player::new(&subject, case);
            for step in &case.steps {
                clock.set(step.at);
                steps += 1;
                if let Some(mistake) = player.play(step).await {
                    wrong.push(format!("{file}:{}: {mistake}", step.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(steps > 100, "only {steps} steps were replayed");
}

/// Plays a case on one key.
struct Player<'a> {
    subject: &'a Subject,
    limit: StoredLimit,
    holds: HashMap<&'a str, ChargeId>,
}

const KEY: &str = "case:key";

impl<'a> Player<'a> {
    fn new(subject: &'a Subject, case: &Case) -> Self {
        let limit = StoredLimit::new("case", case.limit);
        Player { subject, limit, holds: HashMap::new() }
    }

    /// What is wrong with the store's answer, if anything.
    async fn play(&mut self, step: &'a Step) -> Option<String> {
        let outcome = match &step.op {
            Op::Take(cost) => self.charge(*cost, None).await,
            Op::Reserve { id, cost } => self.hold(id, *cost, FOR_LONG).await,
            Op::Hold { id, cost } => self.hold(id, *cost, Micros::ZERO).await,
            Op::Peek(cost) => {
                let peeked = self.subject.store.peek(&[self.stored(*cost)]).await;
                peeked.unwrap_or_else(|error| panic!("peek: {error}")).outcomes[0]
            }
            Op::Refund(amount) => {
                let refunded = self.subject.store.refund(&[self.stored(*amount)]).await;
                return refunded.err().map(|error| error.to_string());
            }
            Op::Reset => {
                let forgotten = self.subject.store.forget(&self.limit, KEY).await;
                return forgotten.err().map(|error| error.to_string());
            }
            Op::Settle { id, actual } => return self.settle(step, id, Settlement::Actual(*actual)).await,
            Op::Cancel { id } | Op::Release { id } => return self.settle(step, id, Settlement::Cancel).await,
            Op::Renew { id } => return self.settle(step, id, Settlement::Renew).await,
        };
        step.expect.mismatch(&outcome)
    }

    fn stored(&self, cost: Cost) -> StoredCharge<'_> {
        StoredCharge { limit: &self.limit, key: KEY, cost, shadow: false }
    }

    async fn charge(&self, cost: Cost, hold: Option<Hold>) -> Outcome {
        let charged = self.subject.store.charge(&[self.stored(cost)], hold).await;
        charged.unwrap_or_else(|error| panic!("charge: {error}")).outcomes[0]
    }

    /// A held charge. Every line is a charge of its own, so each gets a name of its own, and the case's name means the last.
    async fn hold(&mut self, id: &'a str, cost: Cost, ttl: Micros) -> Outcome {
        let hold = Hold { id: ChargeId::random(), ttl };
        let outcome = self.charge(cost, Some(hold)).await;
        if outcome.allowed {
            self.holds.insert(id, hold.id);
        }
        outcome
    }

    async fn settle(&self, step: &Step, id: &str, settlement: Settlement) -> Option<String> {
        let id = self.holds.get(id).copied().unwrap_or_else(ChargeId::random);
        let settled = self.subject.store.settle(id, &settlement).await;
        let settled = settled.unwrap_or_else(|error| panic!("settle: {error}"));
        let expected = step.expect.done == Some(true);
        ((settled == Settled::Done) != expected).then(|| format!("expected done {expected}, not {settled:?}"))
    }
}
