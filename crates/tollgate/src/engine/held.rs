//! What the caller keeps of an admitted charge, and the id of the charge in the store.

use smallvec::SmallVec;
use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Hold, Settlement, StoreError};

use super::Engine;
use super::request::Take;
use crate::decision::Decision;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::policy::entry::Resolved;
use crate::remote::Identity;

/// How long the id of a plain charge is remembered.
const ID_TTL: Micros = Micros::from_secs(600);

/// How long the store remembers the id of a charge that the caller does not settle: long enough to cancel it if its answer is
/// lost.
const IN_FLIGHT_TTL: Micros = Micros::from_secs(10);

/// An admitted charge that the store remembers by its id.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) id: ChargeId,
    /// The length of its shortest lease, if it has leases.
    pub(crate) lease: Option<Micros>,
    /// For each charge of the call, whether it has counters: a charge of an unlimited key has none.
    pub(crate) is_counted: SmallVec<[bool; 8]>,
    /// Whether nothing was charged, so that there is nothing to settle: all keys are unlimited, or their shadow limits would have
    /// denied them.
    pub(crate) is_empty: bool,
}

impl Held {
    fn new(identity: Identity, charges: &[Resolved<'_, '_>], decision: &Decision) -> Held {
        let is_charged = |outcome: &Outcome| outcome.numbers().allowed && !outcome.is_unlimited();
        let is_empty = !decision.outcomes().iter().any(is_charged);
        let id = if is_empty && !identity.is_callers { ChargeId::of_nothing() } else { identity.hold.id };
        Held {
            id,
            lease: charges.iter().filter_map(Resolved::lease).min(),
            is_counted: charges.iter().map(|charge| charge.counted().is_some()).collect(),
            is_empty,
        }
    }

    /// The settlement of each charge with its actual cost, in the order of the charges.
    pub(crate) fn each(&self, actuals: &[u64]) -> Result<Settlement, Error> {
        if actuals.len() != self.is_counted.len() {
            return Err(StoreError::wrong_count(self.is_counted.len(), actuals.len()).into());
        }
        let counted = actuals.iter().zip(&self.is_counted).filter(|(_, is_counted)| **is_counted);
        Ok(Settlement::Each(counted.map(|(actual, _)| *actual).collect()))
    }
}

/// What the caller keeps of an admitted charge.
pub(super) fn held(
    charges: &[Resolved<'_, '_>],
    decision: &Decision,
    identity: Option<Identity>,
    take: Take,
) -> Option<Box<Held>> {
    if take == Take::Nothing || !decision.is_allowed() {
        return None;
    }
    // A permit of a rate limit holds no lease: the charge stays charged.
    let nothing = Identity {
        hold: Hold { id: ChargeId::of_nothing(), ttl: Micros::ZERO },
        is_held: false,
        is_callers: false,
    };
    Some(Box::new(Held::new(
        identity.filter(|identity| identity.is_held).unwrap_or(nothing),
        charges,
        decision,
    )))
}

impl Engine {
    /// The id of a charge in the store, if it has one.
    pub(super) fn identity(
        &self,
        charges: &[Resolved<'_, '_>],
        take: Take,
        id: Option<ChargeId>,
        is_waited: bool,
    ) -> Option<Identity> {
        let is_callers = id.is_some();
        let identity = |ttl, is_held| {
            let hold = Hold { id: id.unwrap_or_else(ChargeId::random), ttl };
            Some(Identity { hold, is_held, is_callers })
        };
        let longest_lease = charges.iter().filter_map(Resolved::lease).max();
        match (take, longest_lease) {
            (Take::Reservation(ttl), _) => identity(ttl, true),
            // A local permit releases its leases however it ends, so they need no expiry.
            (Take::Permit, Some(_)) if self.is_local() => identity(Hold::UNTIL_RELEASED, true),
            (Take::Permit, Some(lease)) => identity(lease, true),
            _ if is_callers => identity(ID_TTL, true),
            // The caller keeps nothing; the id lets a caller that leaves before the answer cancel the charge.
            _ if !self.is_local() && (is_waited || take == Take::Permit) => identity(IN_FLIGHT_TTL, false),
            _ => None,
        }
    }
}
