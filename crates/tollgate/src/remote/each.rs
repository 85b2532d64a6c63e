//! Charges that are each made by themselves, many in one call of the store. Each is denied, or falls back, without the others.

use smallvec::SmallVec;
use tollgate_store::{Charged, NodeId, Nodes, StoreError, StoredCharge};

use super::denial_cache::Sent;
use super::fallback::Act;
use super::in_flight::InFlight;
use super::store_call::Missed;
use super::{Answered, DenialCache, NextStep, Remote};
use crate::error::Error;
use crate::policy::entry::Resolved;

impl Remote {
    /// Charges each charge separately, in one call of the store. Each falls back separately, too.
    pub(crate) async fn charge_each(&self, charges: &[Resolved<'_, '_>]) -> Vec<Result<Answered, Error>> {
        let mut answers: Vec<Result<Answered, Error>> = Vec::with_capacity(charges.len());
        let mut asked: SmallVec<[(usize, Option<Sent>, NodeId); 4]> = SmallVec::new();
        let mut stored: SmallVec<[StoredCharge<'_>; 4]> = SmallVec::new();
        for (index, charge) in charges.iter().enumerate() {
            let answered = match (self.next_step_of_one(charge, DenialCache::Use), charge.stored_charge()) {
                (NextStep::CallStore(sent), Some(one)) => {
                    let node = self.shared.store.node_of(&one);
                    match self.admit(node).await {
                        Ok(()) => {
                            asked.push((index, sent, node));
                            stored.push(one);
                            Ok(Answered::default())
                        }
                        Err(missed) => self.fall_back_alone(charge, missed),
                    }
                }
                (NextStep::Answered(answered), _) => Ok(answered),
                (NextStep::CallStore(_), None) => Ok(Answered::default()),
            };
            answers.push(answered);
        }
        if stored.is_empty() {
            return answers;
        }
        let in_flight = InFlight::new(self, charges, None);
        let sent_at = self.shared.clock.now();
        let each = self.shared.store.charge_each(&stored);
        // For metrics a call fails as its first charge does that fails.
        let outcomes = self
            .send("charge", each, |outcomes| outcomes.iter().find_map(|outcome| outcome.as_ref().err()))
            .await;
        let is_any_ambiguous =
            outcomes.iter().any(|outcome| outcome.as_ref().is_err_and(StoreError::is_ambiguous));
        let mut nodes = Nodes::new();
        for ((index, sent, node), outcome) in asked.iter().zip(outcomes) {
            let charge = &charges[*index];
            answers[*index] = match outcome {
                Ok(outcome) => {
                    if !nodes.contains(node) {
                        nodes.push(*node);
                    }
                    let charged =
                        Charged { allowed: outcome.allowed, outcomes: SmallVec::from_elem(outcome, 1) };
                    self.learn(std::slice::from_ref(charge), *sent, sent_at, &charged);
                    Ok(Answered::by_store(&charged.outcomes))
                }
                Err(error) => {
                    let missed = self.failed(&Nodes::from_slice(&[*node]), error);
                    self.fall_back_alone(charge, missed)
                }
            };
        }
        if !nodes.is_empty() {
            self.succeeded(&nodes);
            self.answered().await;
        }
        if !is_any_ambiguous {
            in_flight.answered();
        }
        answers
    }

    /// The fallback's answer to one of several separate charges.
    fn fall_back_alone(&self, charge: &Resolved<'_, '_>, missed: Missed) -> Result<Answered, Error> {
        self.fall_back(std::slice::from_ref(charge), Act::Charge(None), missed)
    }
}
