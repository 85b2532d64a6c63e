//! The interface between the store and a table of any strategy.

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};

use super::cell::{Amended, Amendment, Holder};
use super::node::{Fingerprint, Guard};
use super::sibling_tables::{Movable, Moving, SiblingTables};
use super::table::{Committed, Prepared, Seen};

/// Where a key is.
pub(crate) enum Located<'a> {
    /// In this table, or new.
    Here,
    /// In that of whole states.
    Whole(Arc<dyn LimitTable>),
    /// Search all siblings.
    SearchSiblings(&'a SiblingTables),
}

/// The table of one limit.
pub(crate) trait LimitTable: Movable + Send + Sync {
    /// The table by its own type, for the type that nearly all charges use.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;

    /// Charges one key.
    fn charge(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome;

    /// Charges a key that is remembered, if that can be done without waiting, and leaves the answer in `outcome`; false if not.
    fn charge_known(&self, key: Fingerprint, cost: Cost, now: Micros, outcome: &mut Outcome) -> bool;

    /// Reads a key without its lock and adds the outcome of a charge and its next state to `seen`; false if that is not possible.
    fn see<'a>(
        &'a self,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
        seen: &mut SmallVec<[Seen<'a>; 4]>,
    ) -> bool;

    /// The answer that a charge would get.
    fn peek(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome;

    /// Corrects the state of a key, or the shared state.
    fn amend(&self, key: Fingerprint, in_shared: bool, amendment: Amendment, now: Micros) -> Amended;

    /// Forgets a key; false when nothing was remembered.
    fn forget(&self, key: Fingerprint) -> bool;

    /// Visits the next `nodes` nodes and forgets every key that is as good as new. Returns how many.
    fn sweep(&self, nodes: usize, now: Micros) -> usize;

    /// How many nodes one whole sweep visits.
    fn nodes(&self) -> usize;

    /// How many keys are remembered.
    fn len(&self) -> usize;

    /// Identifies the nodes of a table: limits that share their nodes are one table.
    fn address(&self) -> usize;

    /// The other tables of the limit's name, if there are any.
    fn siblings(&self) -> Option<&SiblingTables>;

    /// Where a key is, as far as known without the lock of all siblings. It may change until its home is locked.
    fn locate(&self, key: Fingerprint, now: Micros) -> Located<'_>;

    /// Whether a key is in this table. With its home locked.
    fn knows_locked(&self, key: Fingerprint) -> bool;

    /// Whether a key is in this table, which is that of whole states, and has to be.
    fn knows_whole(&self, key: Fingerprint, now: Micros) -> bool;

    /// Charges such a key.
    fn charge_whole(&self, key: Fingerprint, cost: Cost, now: Micros) -> Option<Outcome>;

    /// Takes over a sibling's state of a key, unless the key is here. Returns the table that it is in if it had to be stored
    /// whole. No home may be locked.
    fn inherit(&self, key: Fingerprint, tables: &Moving<'_>, now: Micros) -> Option<Arc<dyn LimitTable>>;

    /// Drops the table of whole states, which no longer exists.
    fn let_go_of_whole(&self);

    // A charge over several keys: lock the homes of all in order, prepare all, then commit or abandon each.

    /// The home of a key. It may change until it is locked.
    fn home(&self, key: Fingerprint) -> usize;

    /// Locks a home.
    fn lock(&self, home: usize) -> Guard<'_>;

    /// Finds the slot and the outcome of a key's charge, with its home locked. `alone` says that no other key of this table is
    /// prepared: only then may the chain be tidied or the shared state be locked.
    fn prepare(&self, key: Fingerprint, cost: Cost, now: Micros, alone: bool) -> Prepared<'_>;

    /// Carries out a charge that was prepared and is allowed. `holder` names a lease.
    fn commit(
        &self,
        prepared: Prepared<'_>,
        key: Fingerprint,
        holder: Holder,
        cost: Cost,
        now: Micros,
    ) -> Committed;

    /// Gives up a prepared charge, as a look does.
    fn abandon(&self, prepared: Prepared<'_>);

    /// Gives up a prepared charge: the existing state is adopted.
    fn refuse(&self, prepared: Prepared<'_>, now: Micros);

    /// Grows the table if it should. With no home locked.
    fn grow_if_needed(&self);
}
