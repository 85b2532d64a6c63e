//! A store and the model side by side: every call goes to both, and both must say the same.

use super::model::Model;
use super::{Subject, cost};
use crate::{
    ChargeId, Charged, Hold, ManualClock, Micros, Outcome, Settled, Settlement, StoredCharge, StoredLimit,
};

pub(super) struct Beside {
    pub(super) subject: Subject,
    pub(super) clock: ManualClock,
    model: Model,
    /// What is played, for a failure to name.
    what: String,
}

impl Beside {
    pub(super) async fn new(what: &str, make: &impl AsyncFn(ManualClock) -> Subject) -> Beside {
        let clock = super::clock();
        let subject = make(clock.clone()).await;
        Beside { subject, clock, model: Model::default(), what: what.to_owned() }
    }

    pub(super) async fn charge(
        &mut self,
        limit: &StoredLimit,
        key: &str,
        units: u64,
        hold: Option<Hold>,
    ) -> Charged {
        self.charge_all(&[StoredCharge { limit, key, cost: cost(units), shadow: false }], hold).await
    }

    /// All of them, or none.
    pub(super) async fn charge_all(&mut self, charges: &[StoredCharge<'_>], hold: Option<Hold>) -> Charged {
        let expected = self.model.charge(charges, hold, self.clock.now());
        let got = self.subject.store.charge(charges, hold).await;
        let named: Vec<String> =
            charges.iter().map(|charge| format!("{} of {}", charge.cost.get(), charge.limit.limit)).collect();
        self.equal(&named.join(", "), &expected, got.as_ref().ok());
        expected
    }

    pub(super) async fn charge_each(&mut self, charges: &[StoredCharge<'_>]) {
        let now = self.clock.now();
        let alone = |charge: &StoredCharge<'_>| {
            self.model.charge(&[StoredCharge { shadow: false, ..*charge }], None, now).outcomes[0]
        };
        let expected: Vec<Outcome> = charges.iter().map(alone).collect();
        let got: Result<Vec<Outcome>, _> =
            self.subject.store.charge_each(charges).await.into_iter().collect();
        self.equal(&format!("{charges:?}"), &expected, got.as_ref().ok());
    }

    pub(super) async fn status(&mut self, limit: &StoredLimit, key: &str) {
        let mut look = |cost| {
            let charges = [StoredCharge { limit, key, cost, shadow: false }];
            self.model.peek(&charges, self.clock.now()).outcomes[0]
        };
        let (current, one) = (look(crate::Cost::MAX), look(crate::Cost::ONE));
        let expected = Outcome { allowed: one.allowed, retry_after: one.retry_after, ..current };
        let got = self.subject.store.status(limit, key).await;
        self.equal(&format!("the status under {}", limit.limit), &expected, got.as_ref().ok());
    }

    /// Reserves for as long as a store keeps anything.
    pub(super) async fn reserve(&mut self, limit: &StoredLimit, key: &str, units: u64) -> Option<ChargeId> {
        let id = ChargeId::random();
        let hold = Hold { id, ttl: super::FOR_LONG };
        self.charge(limit, key, units, Some(hold)).await.allowed.then_some(id)
    }

    pub(super) async fn settle(&mut self, id: ChargeId, settlement: &Settlement) -> Option<Settled> {
        let expected = self.model.settle(id, settlement, self.clock.now());
        let got = match self.subject.store.settle(id, settlement).await {
            Ok(settled) => Some(Some(settled)),
            Err(error) => error.is_invalid().then_some(None),
        };
        self.equal(&format!("{settlement:?}"), &expected, got.as_ref());
        expected
    }

    /// What is left of a key, at this instant and one by one.
    pub(super) async fn remaining(&mut self, limit: &StoredLimit, key: &str) -> u64 {
        let charges = [StoredCharge { limit, key, cost: crate::Cost::MAX, shadow: false }];
        let expected = self.model.peek(&charges, self.clock.now());
        let got = self.subject.store.peek(&charges).await;
        self.equal(&format!("a look at {}", limit.limit), &expected, got.as_ref().ok());
        expected.outcomes[0].remaining
    }

    pub(super) fn advance_ms(&self, ms: u64) {
        self.clock.advance(Micros::from_millis(ms));
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&self, call: &str, expected: &T, got: Option<&T>) {
        let at = self.clock.now().saturating_sub(super::cases::ORIGIN);
        assert_eq!(Some(expected), got, "{}: {call} at {at}", self.what);
    }
}
