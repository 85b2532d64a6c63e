//! The slow path for local counters: new keys, overrides, shadow limits, reservations, peeks and refunds.
//!
//! The limits stay locked for reading while the counters are charged. A reload waits for that, so a key never starts under old
//! and new numbers at once. The lock is released before a decision is reported: an observer may charge or reload.

use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::Cost;
use tollgate_store::{MemoryCharge, MemoryStore};

use super::request::{Answer, Mode, Request, Take};
use super::{Backend, Engine, conclude};
use crate::decision::Decision;
use crate::error::Error;
use crate::key::KeyRef;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Entry, EntryRef, Resolved};
use crate::remote::{Answered, Identity};
use crate::telemetry::Trouble;

impl Engine {
    /// Slow path: a new key, a key that is not canonical, an override, a shadow limit, or a decision that must be reported.
    #[cold]
    pub(super) fn charge_one_slowly(&self, entry: &Arc<Entry>, key: &KeyRef<'_>, cost: Cost) -> Outcome {
        let started = self.started("charge");
        let _within = started.enter();
        let limits = self.limits.read();
        let entry = entry.newest();
        let charge = [self.resolved(EntryRef::Borrowed(entry), key.parse_ref(), cost)];
        let answered = match (&self.backend, charge[0].memory_charge()) {
            _ if entry.is_concurrency() && charge[0].key.is_some() => {
                if let Some(count) = self.needs_permit.count() {
                    let limit = entry.name;
                    tracing::warn!(
                        target: "tollgate::engine",
                        limit,
                        count,
                        "denied a check of a concurrency limit: use acquire instead"
                    );
                }
                let answers = [(kernel::Outcome::BLOCKED, Source::NeedsPermit)].into_iter().collect();
                Answered { answers, trouble: Trouble::default() }
            }
            (Backend::Memory(_), Some(known)) => Answered::by_store(&[known.limit.charge(known.key, cost)]),
            _ => Answered::default(),
        };
        drop(limits);
        let decision = conclude(&charge, answered.answers);
        self.report("charge", &charge, &decision, answered.trouble, &started);
        *decision.binding()
    }

    pub(super) fn charge_local(
        self: &Arc<Engine>,
        store: &MemoryStore,
        request: &mut Request<'_>,
    ) -> Result<Answer, Error> {
        let is_plain = request.take == Take::Nothing && request.id.is_none();
        match request.mode {
            Mode::AllOrNone if is_plain => {
                let mut answer = Answer::of(Decision::empty());
                if !self.charge_all_known(store, request.charges.as_slice(), &mut answer.decision) {
                    answer = self.charge_local_slowly(store, request)?;
                }
                Ok(answer)
            }
            Mode::Each => request.check_id().map(|()| self.charge_each_local(request)),
            _ => self.charge_local_slowly(store, request),
        }
    }

    /// Slow path in this process.
    pub(super) fn charge_local_slowly(
        &self,
        store: &MemoryStore,
        request: &mut Request<'_>,
    ) -> Result<Answer, Error> {
        request.check_id()?;
        let operation = request.operation();
        let started = self.started(operation);
        let _within = started.enter();
        // Held while the counters are charged: a reload waits, so that no key is begun under old numbers and new ones at once. Not
        // while the decision is reported: an observer may charge, or reload.
        let limits = self.limits.read();
        let holds_nothing = request.holds_nothing();
        let charges = self.resolve(&limits, request.charges.take(), holds_nothing)?;
        if request.mode == Mode::Refund {
            for known in charges.iter().filter_map(Resolved::memory_charge) {
                known.limit.refund(known.key, known.cost);
            }
            drop(limits);
            self.lines.nudge();
            self.report_refund(&charges, &Ok(()), started.took());
            return Ok(Answer::of(Decision::empty()));
        }
        let identity = self.identity(&charges, request.take, request.id, false);
        let answered = run_local(store, &charges, request.mode, identity)?;
        drop(limits);
        Ok(self.finish(operation, &charges, answered, identity, request.take, &started))
    }

    /// Charges each charge separately, in order, on local counters.
    pub(super) fn charge_each_local(self: &Arc<Engine>, request: &mut Request<'_>) -> Answer {
        let one = |charge| self.charge_all(std::slice::from_ref(charge)).map(|decision| *decision.binding());
        let each = request.charges.as_slice().iter().map(one).collect();
        Answer { each, ..Answer::of(Decision::empty()) }
    }
}

/// Charges the local counters. If the charge is denied already, it only peeks.
pub(super) fn run_local(
    store: &MemoryStore,
    charges: &[Resolved<'_, '_>],
    mode: Mode,
    identity: Option<Identity>,
) -> Result<Answered, Error> {
    let in_memory: SmallVec<[MemoryCharge<'_>; 4]> =
        charges.iter().filter_map(Resolved::memory_charge).collect();
    let is_look = mode == Mode::Peek || charges.iter().any(Resolved::is_denied_outright);
    let counted = match is_look {
        true => store.peek_all(&in_memory),
        false => store.charge_all(&in_memory, identity.map(|identity| identity.hold))?,
    };
    Ok(Answered::by_store(&counted.outcomes))
}
