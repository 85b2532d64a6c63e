//! Charges on a cluster, where keys may be in different slots and a hold is known by its id alone.
//!
//! Charges whose keys share a slot form a group, and a group is one script call. Groups are charged one after the other, in the
//! order of their slots, each under the id of the hold or under a random id. If one denies, the groups before it are undone. So a
//! concurrent charge may be denied for a moment without need, but never is too much admitted. If this process ends between two
//! groups, the charged groups stay charged until they expire.
//!
//! The list of a hold's groups is stored at its *place*, in the slot of its id: a reservation and its settlement take one call
//! more here than on a single server. `redis.rs` calls this module only on a cluster; `batch.rs` sends the scripts.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;
use tollgate_kernel::{Limit, MAX_SPAN, Micros};

use super::placed::Placed;
use super::route::Named;
use super::shape::{Answer, Operation};
use super::slot::slot;
use super::{Held, RedisStore, batch, codec, different_amounts, no_such_limit, script, words};
use crate::remote::MergedCharges;
use crate::{
    ChargeId, Charged, Failure, Hold, Outcome, Outcomes, Settled, Settlement, StoreError, StoredCharge,
};

/// The time to live of a hold that exists only to be undone: longer than any deadline.
const UNDO_WITHIN: Micros = Micros::from_secs(60);

/// Charges whose keys share a slot.
struct Group<'a> {
    slot: u16,
    /// The index in the charge of each part.
    indexes: Vec<usize>,
    parts: Vec<StoredCharge<'a>>,
    keys: Vec<String>,
}

impl RedisStore {
    fn groups<'a>(&self, parts: &MergedCharges<'a>) -> Vec<Group<'a>> {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for (index, part) in parts.parts.iter().enumerate() {
            let key = self.names.part(part);
            let slot = slot(&key);
            let position = groups.iter().position(|group| group.slot == slot).unwrap_or_else(|| {
                groups.push(Group { slot, indexes: Vec::new(), parts: Vec::new(), keys: Vec::new() });
                groups.len() - 1
            });
            let group = &mut groups[position];
            group.indexes.push(index);
            group.parts.push(*part);
            group.keys.push(key);
        }
        // Leases first, because they decide how long the hold of the others lasts; then by slot, in the same order for every
        // caller.
        groups
            .sort_by_key(|group| (group.parts.iter().all(|part| lease_of(part) == Micros::ZERO), group.slot));
        groups
    }

    /// The key of a group's part of a hold.
    fn hold_key(&self, group: &Group<'_>, id: ChargeId) -> String {
        match group.keys.first() {
            Some(key) => self.names.hold_beside(key, id),
            None => self.names.hold(id),
        }
    }

    pub(super) async fn peek_spread(
        &self,
        parts: &MergedCharges<'_>,
        deadline: Instant,
    ) -> Result<Charged, StoreError> {
        let mut outcomes = blank(parts);
        let mut passed = true;
        for group in self.groups(parts) {
            passed &= self.look(&group, &mut outcomes, deadline).await?;
        }
        parts.conclude(&outcomes, passed)
    }

    /// Peeks at a group.
    async fn look(
        &self,
        group: &Group<'_>,
        outcomes: &mut Outcomes,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        match self.charge_batched(&group.parts, Operation::Peek, None, deadline).await? {
            Answer::Found(found) => {
                fill(outcomes, group, &found);
                Ok(found.passed)
            }
            Answer::Held(..) => Err(codec::no_answer("a peek")),
        }
    }

    pub(super) async fn charge_spread(
        &self,
        charges: &[StoredCharge<'_>],
        parts: &MergedCharges<'_>,
        hold: Option<Hold>,
        deadline: Instant,
    ) -> Result<Charged, StoreError> {
        let mut groups = self.groups(parts);
        match hold {
            None if groups.len() == 1 => {
                let mut outcomes = blank(parts);
                match self.charge_batched(&groups[0].parts, Operation::Charge, None, deadline).await? {
                    Answer::Found(found) => {
                        fill(&mut outcomes, &groups[0], &found);
                        parts.conclude(&outcomes, found.passed)
                    }
                    Answer::Held(..) => Err(codec::no_answer("a charge")),
                }
            }
            // Shadow parts deny nothing, so each is charged separately, in whatever slot.
            None if parts.parts.iter().all(|part| part.shadow) => {
                self.charge_apart(parts, &groups, deadline).await
            }
            None => {
                let hold = Hold { id: ChargeId::random(), ttl: UNDO_WITHIN };
                self.charge_in_turn(parts, &groups, hold, None, deadline).await
            }
            Some(hold) => {
                if groups.is_empty() {
                    groups.push(Group { slot: 0, indexes: Vec::new(), parts: Vec::new(), keys: Vec::new() });
                }
                self.charge_held(charges, parts, &groups, hold, deadline).await
            }
        }
    }

    /// Charges groups of shadow parts: one script call each, all concurrently.
    async fn charge_apart(
        &self,
        parts: &MergedCharges<'_>,
        groups: &[Group<'_>],
        deadline: Instant,
    ) -> Result<Charged, StoreError> {
        let mut outcomes = blank(parts);
        let calls =
            groups.iter().map(|group| self.charge_batched(&group.parts, Operation::Charge, None, deadline));
        for (group, answer) in groups.iter().zip(futures_util::future::join_all(calls).await) {
            match answer? {
                Answer::Found(found) => fill(&mut outcomes, group, &found),
                Answer::Held(..) => return Err(codec::no_answer("a charge")),
            }
        }
        parts.conclude(&outcomes, true)
    }

    /// Charges group after group under one id, and undoes the earlier groups if one denies. A hold comes with its request;
    /// without one, the id is random and no other caller knows it.
    async fn charge_in_turn(
        &self,
        parts: &MergedCharges<'_>,
        groups: &[Group<'_>],
        mut hold: Hold,
        request: Option<&str>,
        deadline: Instant,
    ) -> Result<Charged, StoreError> {
        let mut outcomes = blank(parts);
        for (turn, group) in groups.iter().enumerate() {
            let key = self.hold_key(group, hold.id);
            let held = Some((&*key, hold, request.unwrap_or_default()));
            let operation = if groups.len() > 1 { Operation::HoldPart } else { Operation::Hold };
            let answer = self.charge_batched(&group.parts, operation, held, deadline).await;
            let found = match answer {
                Ok(Answer::Found(found)) => found,
                Ok(Answer::Held(held)) if held.is_of_other_keys() => return Err(StoreError::id_taken()),
                Ok(Answer::Held(held)) => {
                    // Charged before, under the same id: the same call was sent again.
                    held.found(&group.parts).ok_or_else(|| codec::no_answer("a hold"))?
                }
                Err(error) => {
                    // The group itself may have been charged; undoing a group that was not charged does nothing. If the caller
                    // chose the id, nothing is undone, because the caller may be sending it again.
                    let charged = if error.is_ambiguous() { turn + 1 } else { turn };
                    if request.is_none() {
                        self.undo(&groups[..charged], hold.id);
                    }
                    // Until the undo is done, some groups are charged.
                    return Err(if charged > 0 { error.ambiguous() } else { error });
                }
            };
            fill(&mut outcomes, group, &found);
            // The hold lasts as long as its longest lease. A shadow part takes a lease if it can.
            let taken = group.indexes.iter().zip(&group.parts).filter(|(index, _)| outcomes[**index].allowed);
            hold.ttl = taken.map(|(_, part)| lease_of(part)).max().unwrap_or_default().max(hold.ttl);
            if !found.passed {
                if let Err(error) = self.undo_now(&groups[..turn], hold.id, deadline).await {
                    if request.is_some() {
                        return Err(error);
                    }
                    self.undo(&groups[..turn], hold.id);
                }
                for later in &groups[turn + 1..] {
                    self.look(later, &mut outcomes, deadline).await?;
                }
                return parts.conclude(&outcomes, false);
            }
        }
        parts.conclude(&outcomes, true)
    }

    /// Refunds each group separately: one script call each, all concurrently. If some fail, the others stay refunded.
    pub(super) async fn refund_spread(
        &self,
        parts: &MergedCharges<'_>,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let groups = self.groups(parts);
        let refunds = groups.iter().map(|group| self.refund_batched(&group.parts, deadline));
        let refunded = futures_util::future::join_all(refunds).await;
        let may_be_done = |refunded: &Result<(), StoreError>| match refunded {
            Ok(()) => true,
            Err(error) => error.is_ambiguous(),
        };
        let is_any = refunded.iter().any(may_be_done);
        let all: Result<(), StoreError> = refunded.into_iter().collect();
        all.map_err(|error| if is_any { error.ambiguous() } else { error })
    }

    /// Undoes groups before the answer is returned, so that the caller finds them undone.
    async fn undo_now(
        &self,
        groups: &[Group<'_>],
        id: ChargeId,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let undone = groups.iter().map(|group| self.undo_one(self.undo_keys(group, id), id, deadline));
        futures_util::future::join_all(undone).await.into_iter().collect()
    }

    /// Undoes groups in a background task: the deadline of this call has passed, or nearly so.
    fn undo(&self, groups: &[Group<'_>], id: ChargeId) {
        for group in groups {
            let (store, keys) = (self.clone(), self.undo_keys(group, id));
            tokio::spawn(async move {
                // Long enough for a fail-over, with growing pauses.
                for pause_ms in [0, 50, 100, 200, 400, 800, 1_600, 3_200, 6_400] {
                    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                    if store.undo_one(keys.clone(), id, store.deadline()).await.is_ok() {
                        return;
                    }
                }
                tracing::warn!("part of a charge over several slots could not be undone and stays charged");
            });
        }
    }

    fn undo_keys(&self, group: &Group<'_>, id: ChargeId) -> Vec<String> {
        let mut keys = vec![self.hold_key(group, id)];
        keys.extend(group.keys.iter().cloned());
        keys
    }

    async fn undo_one(&self, keys: Vec<String>, id: ChargeId, deadline: Instant) -> Result<(), StoreError> {
        self.send_hold("undo", &texts(&keys), id, deadline).await.map(drop)
    }

    /// A charge with a hold: claims the hold's place first, and returns the earlier answer if it was charged before.
    async fn charge_held(
        &self,
        charges: &[StoredCharge<'_>],
        parts: &MergedCharges<'_>,
        groups: &[Group<'_>],
        hold: Hold,
        deadline: Instant,
    ) -> Result<Charged, StoreError> {
        let certain = parts.parts.iter().filter(|part| !part.shadow).map(lease_of).max();
        let ttl = certain.unwrap_or_default().max(hold.ttl);
        let hold = Hold { ttl, ..hold };
        let request = codec::write(charges);
        let place = Placed {
            request: request.clone(),
            groups: groups
                .iter()
                .map(|group| (group.indexes.clone(), self.undo_keys(group, hold.id)))
                .collect(),
        };
        if let Some(before) = self.place(hold, "claim", &place, deadline).await?
            && before != place
        {
            if let Some(charged) = self.answer_placed(&before, hold.id, deadline).await? {
                if before.groups != place.groups
                    || !parts.is_same_request(&MergedCharges::of(&before.charges()?.charges()))
                {
                    return Err(StoreError::id_taken());
                }
                return Ok(charged);
            }
            self.place(hold, "set", &place, deadline).await?;
        }
        // The request is stored at the place. A hold with a single group also stores it, because its settlement needs it.
        let remembered =
            if groups.len() == 1 { codec::remembered_request(charges, parts) } else { String::new() };
        self.charge_in_turn(parts, groups, hold, Some(&remembered), deadline).await
    }

    /// The earlier answer of a hold with this place, if it still exists.
    async fn answer_placed(
        &self,
        place: &Placed,
        id: ChargeId,
        deadline: Instant,
    ) -> Result<Option<Charged>, StoreError> {
        let wrong = || codec::no_answer("a hold");
        let remembered = place.charges()?;
        let charges = remembered.charges();
        let parts = MergedCharges::of(&charges);
        let mut outcomes = blank(&parts);
        for (indexes, keys) in &place.groups {
            let answer = self.send_hold("answer", &texts(keys), id, deadline).await?;
            if words(&answer).is_some_and(|words| words == ["UNKNOWN"]) {
                return Ok(None);
            }
            let held = Held::read(&answer).ok_or_else(wrong)?;
            let of_group: Option<Vec<StoredCharge<'_>>> =
                indexes.iter().map(|index| parts.parts.get(*index).copied()).collect();
            let of_group = of_group.ok_or_else(wrong)?;
            if place.groups.len() == 1 {
                return Held { request: place.request.clone(), ..held }.answer(&parts).map(Some);
            }
            let found = held.found(&of_group).ok_or_else(wrong)?;
            fill_at(&mut outcomes, indexes, &of_group, &found);
        }
        parts.conclude(&outcomes, true).map(Some)
    }

    /// Claims, sets or gets the place of a hold; returns the value that was there.
    async fn place(
        &self,
        hold: Hold,
        operation: &'static str,
        place: &Placed,
        deadline: Instant,
    ) -> Result<Option<Placed>, StoreError> {
        let (key, text) = (self.names.place(hold.id), place.write());
        let put = |cmd: &mut Cmd| {
            if operation != "get" {
                cmd.arg(&text).arg(hold.ttl.min(MAX_SPAN).get());
            }
        };
        match self.call(&script::PLACE, operation, &[&key], Named::Yes, deadline, &put).await? {
            Value::Nil => Ok(None),
            Value::BulkString(text) => {
                let read = std::str::from_utf8(&text).ok().and_then(Placed::read);
                read.map(Some).ok_or_else(|| {
                    StoreError::failed(
                        Failure::State,
                        "what Redis keeps at the place of a hold is not ours; give Tollgate a prefix of its own",
                    )
                })
            }
            _ => Err(codec::no_answer("a hold")),
        }
    }

    pub(super) async fn settle_spread(
        &self,
        id: ChargeId,
        settlement: &Settlement,
        deadline: Instant,
    ) -> Result<Settled, StoreError> {
        let hold = Hold { id, ttl: Micros::ZERO };
        let Some(place) = self.place(hold, "get", &Placed::default(), deadline).await? else {
            return Ok(Settled::Unknown);
        };
        let settled = match &place.groups[..] {
            [(_, keys)] => self.settle_at(keys, id, settlement, deadline).await?,
            _ => self.settle_groups(&place, id, settlement, deadline).await?,
        };
        if settled == Settled::Done && *settlement == Settlement::Renew {
            // Only the groups know the end of the renewed hold; the place may outlive it.
            let hold = Hold { id, ttl: Micros::from_secs(7 * 86_400) };
            self.place(hold, "set", &place, deadline).await?;
        }
        Ok(settled)
    }

    /// Settles a hold with several groups: queries all of them first, because whether one amount is valid depends on all.
    async fn settle_groups(
        &self,
        place: &Placed,
        id: ChargeId,
        settlement: &Settlement,
        deadline: Instant,
    ) -> Result<Settled, StoreError> {
        let mut open = Vec::new();
        let mut parts: Vec<(String, String, bool)> = Vec::new();
        let (mut is_settled, mut has_ended) = (false, false);
        for (indexes, keys) in &place.groups {
            let answer = self.send_hold("query", &texts(keys), id, deadline).await?;
            let words = words(&answer).ok_or_else(|| codec::no_answer("a settlement"))?;
            let mut names = Vec::new();
            for part in words[1..].chunks_exact(3) {
                parts.push((part[0].clone(), part[1].clone(), part[2] != "count"));
                has_ended |= part[2] == "ended";
                names.push(part[0].clone());
            }
            match words[0].as_str() {
                "OPEN" => open.push((indexes, keys, names)),
                "ALREADY" => is_settled = true,
                _ => {}
            }
        }
        if open.is_empty() {
            return Ok(if is_settled { Settled::Already } else { Settled::Unknown });
        }
        // All leases are renewed, or none.
        if has_ended && *settlement == Settlement::Renew {
            return Ok(Settled::Unknown);
        }
        check_settlement(settlement, &parts)?;
        let totals = match settlement {
            Settlement::Each(actuals) => place.totals(actuals)?,
            _ => Vec::new(),
        };
        let mut found = false;
        for (indexes, keys, names) in open {
            let settled = match settlement {
                Settlement::Each(_) => {
                    let of_group =
                        indexes.iter().map(|index| totals.get(*index).copied().unwrap_or_default());
                    let of_group: Vec<u64> = of_group.collect();
                    batch::read_only(
                        &self.settle_pairs(&texts(keys), id, &of_group, deadline).await?,
                        settlement,
                    )?
                }
                Settlement::Named(actuals) => {
                    let here = actuals.iter().filter(|(name, _)| names.contains(name));
                    self.settle_at(keys, id, &Settlement::Named(here.cloned().collect()), deadline).await?
                }
                other => self.settle_at(keys, id, other, deadline).await?,
            };
            match settled {
                // A group without a charged part counts as found and says nothing about the rest.
                Settled::Done => found |= !names.is_empty() || parts.is_empty(),
                Settled::Unknown if *settlement == Settlement::Renew => return Ok(Settled::Unknown),
                Settled::Already | Settled::Unknown | Settled::Pending => {}
            }
        }
        Ok(if found { Settled::Done } else { Settled::Unknown })
    }
}

fn texts(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

/// The duration of a part's lease; zero if it is not a lease.
fn lease_of(part: &StoredCharge<'_>) -> Micros {
    match part.limit.limit {
        Limit::Concurrency(leases) => leases.lease(),
        _ => Micros::ZERO,
    }
}

/// The same check that the script makes for a hold in one slot.
fn check_settlement(settlement: &Settlement, parts: &[(String, String, bool)]) -> Result<(), StoreError> {
    match settlement {
        Settlement::Actual(_) => {
            let mut costs = parts.iter().filter(|(_, _, is_lease)| !is_lease).map(|(_, cost, _)| cost);
            let first = costs.next();
            if costs.all(|cost| Some(cost) == first) {
                return Ok(());
            }
            let reserved: Vec<String> =
                parts.iter().map(|(name, cost, _)| format!("{name} {cost}")).collect();
            Err(different_amounts(&reserved))
        }
        Settlement::Named(actuals) => {
            let names: Vec<String> = parts.iter().map(|(name, ..)| name.clone()).collect();
            match actuals.iter().find(|(name, _)| !names.contains(name)) {
                None => Ok(()),
                Some((name, _)) => Err(no_such_limit(name, &names)),
            }
        }
        // The number of amounts is checked against the request.
        Settlement::Each(_) | Settlement::Cancel | Settlement::Release | Settlement::Renew => Ok(()),
    }
}

fn blank(parts: &MergedCharges<'_>) -> Outcomes {
    Outcomes::from_elem(Outcome::BLOCKED, parts.parts.len())
}

/// Writes a group's outcomes at their indexes.
fn fill(outcomes: &mut Outcomes, group: &Group<'_>, found: &codec::Found) {
    fill_at(outcomes, &group.indexes, &group.parts, found);
}

fn fill_at(outcomes: &mut Outcomes, indexes: &[usize], parts: &[StoredCharge<'_>], found: &codec::Found) {
    for ((index, part), reading) in indexes.iter().zip(parts).zip(&found.readings) {
        outcomes[*index] = part.limit.limit.answer(reading, part.cost, found.now);
    }
}
