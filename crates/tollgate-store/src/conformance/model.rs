//! A store as plain as can be: a map of kernel states and a list of holds, one caller at a time. What a store must agree with.

use std::collections::HashMap;

use tollgate_kernel::{Limit, Outcome, State, Taken};

use crate::{ChargeId, Charged, Cost, Hold, Micros, Outcomes, Settled, Settlement, StoredCharge};

#[derive(Default)]
pub(super) struct Model {
    /// With the limit that it was asked by first: whether a state is fresh does not depend on the numbers.
    states: HashMap<StateKey, (Limit, State)>,
    holds: HashMap<ChargeId, Held>,
}

/// The name of a limit, and a key.
type Name = (String, String);

/// A key's state under a name: one for each strategy, and one for both kinds of bucket.
type StateKey = (Name, std::mem::Discriminant<State>);

/// From a pair of limit and key, and what was reserved under it, to what it truly cost.
type ActualOf = Box<dyn Fn(&Name, u64) -> u64>;

struct Held {
    /// What was charged: where, under which limit, how much, and when; of a lease, when it ends.
    parts: Vec<(Name, Limit, Taken)>,
    /// The pairs of all charges, in their order.
    charges: Vec<Name>,
    /// Each pair once, with its cost.
    request: Vec<(Name, Cost)>,
    answer: Charged,
    ttl: Micros,
    end: Micros,
    is_settled: bool,
}

impl Model {
    fn state(&mut self, name: &Name, limit: Limit) -> &mut State {
        let fresh = limit.fresh();
        let name_and_kind = (name.clone(), std::mem::discriminant(&fresh));
        &mut self.states.entry(name_and_kind).or_insert((limit, fresh)).1
    }

    /// How many keys have a state that says more than none would.
    pub(super) fn keys(&self, now: Micros) -> usize {
        self.states.values().filter(|(limit, state)| !limit.is_fresh(state, now)).count()
    }

    /// What each pair of limit and key is asked for, repeated pairs added up, in order of first mention.
    fn parts(charges: &[StoredCharge<'_>]) -> Vec<(Name, Limit, Cost, bool)> {
        let mut parts: Vec<(Name, Limit, Cost, bool)> = Vec::new();
        for charge in charges {
            let name = (charge.limit.name.clone(), charge.key.to_owned());
            match parts.iter_mut().find(|(other, ..)| *other == name) {
                Some((_, _, cost, _)) => {
                    let sum = cost.get().saturating_add(charge.cost.get());
                    *cost = Cost::new(sum).unwrap_or(charge.cost);
                }
                None => parts.push((name, charge.limit.limit, charge.cost, charge.shadow)),
            }
        }
        parts
    }

    fn answer(charges: &[StoredCharge<'_>], answers: &HashMap<Name, Outcome>) -> Charged {
        let outcome =
            |charge: &StoredCharge<'_>| answers[&(charge.limit.name.clone(), charge.key.to_owned())];
        let outcomes: Outcomes = charges.iter().map(outcome).collect();
        let allowed = charges.iter().all(|charge| charge.shadow || outcome(charge).allowed);
        Charged { allowed, outcomes }
    }

    pub(super) fn peek(&mut self, charges: &[StoredCharge<'_>], now: Micros) -> Charged {
        let parts = Self::parts(charges);
        let answers = parts.into_iter().map(|(name, limit, cost, _)| {
            let outcome = limit.peek(self.state(&name, limit), cost, now);
            (name, outcome)
        });
        Self::answer(charges, &answers.collect())
    }

    /// Whether a charge by this id must be refused, because the id belongs to another one.
    pub(super) fn is_id_taken(&self, charges: &[StoredCharge<'_>], hold: Option<Hold>, now: Micros) -> bool {
        let held = hold.and_then(|hold| self.holds.get(&hold.id)).filter(|held| now < held.end);
        held.is_some_and(|held| {
            held.charges != Self::names(charges) || held.request != Self::request(charges)
        })
    }

    /// The pair of each charge.
    fn names(charges: &[StoredCharge<'_>]) -> Vec<Name> {
        charges.iter().map(|charge| (charge.limit.name.clone(), charge.key.to_owned())).collect()
    }

    /// Each pair once, with its cost.
    fn request(charges: &[StoredCharge<'_>]) -> Vec<(Name, Cost)> {
        Self::parts(charges).into_iter().map(|(name, _, cost, _)| (name, cost)).collect()
    }

    pub(super) fn charge(
        &mut self,
        charges: &[StoredCharge<'_>],
        hold: Option<Hold>,
        now: Micros,
    ) -> Charged {
        if let Some(held) = hold.and_then(|hold| self.holds.get(&hold.id)).filter(|held| now < held.end) {
            return held.answer.clone();
        }
        let answer = self.peek(charges, now);
        if !answer.allowed {
            for (name, limit, ..) in Self::parts(charges) {
                limit.adopt(self.state(&name, limit), now);
            }
            return answer;
        }
        let holder = hold.map_or(0, |hold| hold.id.get());
        let mut charged = Vec::new();
        for (name, limit, cost, _) in Self::parts(charges) {
            let state = self.state(&name, limit);
            let outcome = match (limit, &mut *state) {
                (Limit::Concurrency(limit), State::Leases(leases)) => {
                    limit.acquire(leases, holder, cost, now)
                }
                _ => limit.charge(state, cost, now),
            };
            if outcome.allowed {
                let at = match limit {
                    Limit::Concurrency(leases) => leases.end(now),
                    _ => limit.charged_at(state, now),
                };
                charged.push((name, limit, Taken { cost: cost.get(), at }));
            }
        }
        // Where nothing was charged there is nothing to settle, and a store may keep nothing.
        if let Some(hold) = hold.filter(|_| !charged.is_empty()) {
            let leases = charged.iter().filter_map(|(_, limit, ..)| match limit {
                Limit::Concurrency(limit) => Some(limit.lease()),
                _ => None,
            });
            let ttl = leases.max().unwrap_or_default().max(hold.ttl);
            let end = now.saturating_add(ttl);
            let (charges, request) = (Self::names(charges), Self::request(charges));
            let held = Held {
                parts: charged,
                charges,
                request,
                answer: answer.clone(),
                ttl,
                end,
                is_settled: false,
            };
            self.holds.insert(hold.id, held);
        }
        answer
    }

    /// `None` where a store must refuse the settlement as wrong.
    pub(super) fn settle(&mut self, id: ChargeId, settlement: &Settlement, now: Micros) -> Option<Settled> {
        let Some(held) = self.holds.get_mut(&id).filter(|held| now < held.end) else {
            return Some(Settled::Unknown);
        };
        if held.is_settled {
            return Some(Settled::Already);
        }
        let is_lease = |limit: &Limit| matches!(limit, Limit::Concurrency(_));
        let actual_of: ActualOf = match settlement {
            Settlement::Renew => return Some(self.renew(id, now)),
            Settlement::Cancel => Box::new(|_, _| 0),
            Settlement::Actual(actual) => {
                let mut costs =
                    held.parts.iter().filter(|(_, limit, _)| !is_lease(limit)).map(|part| part.2.cost);
                let first = costs.next();
                if !costs.all(|cost| Some(cost) == first) {
                    return None;
                }
                let actual = *actual;
                Box::new(move |_, _| actual)
            }
            Settlement::Release => Box::new(|_, reserved| reserved),
            Settlement::Each(actuals) => {
                if actuals.len() != held.charges.len() {
                    return None;
                }
                let mut totals: HashMap<Name, u64> = HashMap::new();
                for (name, actual) in held.charges.iter().zip(actuals) {
                    let total = totals.entry(name.clone()).or_default();
                    *total = total.saturating_add(*actual);
                }
                Box::new(move |name, reserved| totals.get(name).copied().unwrap_or(reserved))
            }
            Settlement::Named(actuals) => {
                if actuals.iter().any(|(name, _)| held.parts.iter().all(|((limit, _), ..)| limit != name)) {
                    return None;
                }
                let actuals = actuals.clone();
                Box::new(move |name, reserved| {
                    actuals.iter().find(|(other, _)| *other == name.0).map_or(reserved, |(_, actual)| *actual)
                })
            }
        };
        held.is_settled = true;
        let parts = held.parts.clone();
        let mut found = parts.is_empty();
        for (name, limit, taken) in parts {
            let reserved = taken.cost;
            let actual = actual_of(&name, reserved).min(tollgate_kernel::MAX_COUNT);
            let state = self.state(&name, limit);
            found |= !is_lease(&limit);
            match (limit, &mut *state) {
                (Limit::Concurrency(limit), State::Leases(leases)) => {
                    found |= limit.release(leases, id.get(), taken.at, now);
                }
                _ if actual < reserved => limit.give_back(state, taken, reserved - actual, now),
                _ if actual > reserved => limit.debit(state, actual - reserved, now),
                _ => {}
            }
        }
        Some(if found { Settled::Done } else { Settled::Unknown })
    }

    /// Every lease of the hold, or none: a holder that is refused keeps the ends that it knows, and can release by them.
    fn renew(&mut self, id: ChargeId, now: Micros) -> Settled {
        let mut parts = self.holds[&id].parts.clone();
        for (name, limit, taken) in &parts {
            if let (Limit::Concurrency(_), State::Leases(leases)) = (*limit, self.state(name, *limit)) {
                let is_kept = leases.leases().any(|lease| lease.id == id.get() && lease.end == taken.at);
                if taken.at <= now || !is_kept {
                    return Settled::Unknown;
                }
            }
        }
        for (name, limit, taken) in &mut parts {
            if let (Limit::Concurrency(limit), State::Leases(leases)) = (*limit, self.state(name, *limit)) {
                match limit.renew(leases, id.get(), taken.at, now) {
                    Some(end) => taken.at = end,
                    None => return Settled::Unknown,
                }
            }
        }
        if let Some(held) = self.holds.get_mut(&id) {
            (held.parts, held.end) = (parts, now.saturating_add(held.ttl));
        }
        Settled::Done
    }

    pub(super) fn refund(&mut self, charges: &[StoredCharge<'_>], now: Micros) {
        for charge in charges {
            let name = (charge.limit.name.clone(), charge.key.to_owned());
            let amount = charge.cost.get().min(tollgate_kernel::MAX_COUNT);
            charge.limit.limit.refund(self.state(&name, charge.limit.limit), amount, now);
        }
    }

    /// Whether anything was remembered.
    pub(super) fn forget(&mut self, limit: &str, key: &str) -> bool {
        let name = (limit.to_owned(), key.to_owned());
        let before = self.states.len();
        self.states.retain(|(other, _), _| *other != name);
        self.states.len() < before
    }

    /// Whether a hold is name_and_kind under this name.
    pub(super) fn is_held(&self, id: ChargeId, now: Micros) -> bool {
        self.holds.get(&id).is_some_and(|held| now < held.end)
    }
}
