//! What the store asks of a table, whatever the strategy behind it.

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};

use super::cell::{Amended, Amendment};
use super::kin::{Kin, Movable, Moving};
use super::node::{Fingerprint, Guard};
use super::table::{Committed, Prepared, Seen};

/// The table of one limit.
pub(crate) trait Ledger: Movable + Send + Sync {
    /// Charges one key.
    fn charge(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome;

    /// Charges a key that is remembered, if that can be done without waiting, and leaves the answer in `outcome`; false if not.
    fn charge_known(&self, key: Fingerprint, cost: Cost, now: Micros, outcome: &mut Outcome) -> bool;

    /// The same, where the answer to a key that is not known is found `otherwise`. It is returned rather than left somewhere,
    /// because a copy of what was just written has to wait for it.
    fn charge_known_or(
        &self,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
        otherwise: &dyn Fn() -> Outcome,
    ) -> Outcome;

    /// Has the keys fetched from memory, all at once.
    fn fetch(&self, keys: &[Fingerprint]);

    /// Looks at a key without its lock and adds to `seen` what a charge would get and leave; false if that cannot be told.
    fn see<'a>(
        &'a self,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
        seen: &mut SmallVec<[Seen<'a>; 4]>,
    ) -> bool;

    /// The answer that a charge would get.
    fn peek(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome;

    /// Corrects what is remembered about a key, or what it shares.
    fn amend(&self, key: Fingerprint, in_shared: bool, amendment: Amendment, now: Micros) -> Amended;

    /// Forgets a key; false when nothing was remembered.
    fn forget(&self, key: Fingerprint) -> bool;

    /// Visits the next `nodes` nodes and forgets every key that is as good as new. Returns how many.
    fn sweep(&self, nodes: usize, now: Micros) -> usize;

    /// How many nodes one whole sweep visits.
    fn nodes(&self) -> usize;

    /// How many keys are remembered.
    fn len(&self) -> usize;

    /// What tells the nodes of one table from those of another: limits that share their nodes are one table.
    fn address(&self) -> usize;

    /// The other tables of the limit's name, if there are any and the key is not in this one.
    fn kin_to_ask(&self, key: Fingerprint) -> Option<&Kin>;

    /// The same, with the key's home locked.
    fn kin_to_ask_locked(&self, key: Fingerprint) -> Option<&Kin>;

    /// Takes over what kin know of a key, unless it is here. With no home locked.
    fn inherit(&self, key: Fingerprint, tables: &Moving<'_>);

    // A charge over several keys: lock the homes of all in order, prepare all, then commit or abandon each.

    /// The home of a key. It may change until it is locked.
    fn home(&self, key: Fingerprint) -> usize;

    /// Locks a home.
    fn lock(&self, home: usize) -> Guard<'_>;

    /// Finds where a key's charge would go and what it would get. With its home locked. `alone` says that no other key of this
    /// table is prepared: only then may the chain be tidied or the shared state be locked.
    fn prepare(&self, key: Fingerprint, cost: Cost, now: Micros, alone: bool) -> Prepared<'_>;

    /// Carries out a charge that was prepared and is allowed. `holder` names a lease.
    fn commit(
        &self,
        prepared: Prepared<'_>,
        key: Fingerprint,
        holder: u128,
        cost: Cost,
        now: Micros,
    ) -> Committed;

    /// Gives up a prepared charge.
    fn abandon(&self, prepared: Prepared<'_>);

    /// Grows the table if it should. With no home locked.
    fn grow_if_needed(&self);
}
