//! The table of one limit: a strategy over the nodes that hold its keys, which limits of the same name may share.
//!
//! A known key is charged on the fast path: an unlocked read decides, and the lock is taken only to write. A new key takes the
//! slow path, and only there siblings are searched for a state that was stored under other numbers of the same limit
//! (sibling_tables.rs). nodes.rs knows where keys are and how the table grows. This module has neither limiter arithmetic (the
//! cell calls the kernel) nor text keys (the store makes fingerprints).

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};

use super::budget::{Budget, WhenFull};
use super::cell::{Amended, Amendment, Cell, Holder};
use super::limit_table::{LimitTable, Located};
use super::node::{Fingerprint, Guard, Node, Sight};
use super::nodes::{Nodes, Spot};
use super::sibling_tables::{Change, Movable, Moving, SiblingTables};
use super::sync::AtomicU64;
use super::whole::Whole;

/// A charge that was looked at without a lock.
pub(crate) struct Seen<'a> {
    /// The read is valid only if this agrees.
    pub(crate) sight: Sight<'a>,
    pub(crate) outcome: Outcome,
    cells: &'a [AtomicU64],
    after: [u64; 3],
}

impl Seen<'_> {
    /// Carries the charge out. With the lock of the sight held.
    #[inline]
    pub(crate) fn commit(&self) {
        for (cell, word) in self.cells.iter().zip(self.after) {
            cell.store(word, Ordering::Relaxed);
        }
    }
}

/// Where a charge would go.
enum Staged<'a> {
    /// The key has a state.
    Own(Spot),
    /// The key has none yet, and room for one has been taken.
    New { home: usize },
    /// There is no room: the state that newcomers share, locked. Only where the words are the state: an entry needs room, too.
    Shared { _lock: Guard<'a> },
    /// There is no room.
    Refused,
}

/// A charge that has been looked at and not yet carried out.
pub(crate) struct Prepared<'a> {
    pub(crate) outcome: Outcome,
    staged: Staged<'a>,
    /// The state after a charge, if the words are the state; unused words are zero.
    after: Whole,
    /// Whether room was taken for the entry that a charge may add.
    has_room: bool,
}

/// A charge that was carried out.
pub(crate) struct Committed {
    /// When it counts from.
    pub(crate) charged_at: Micros,
    /// Whether it went to the state that newcomers share.
    pub(crate) in_shared: bool,
}

/// How often an unlocked read is repeated while the lock is held.
pub(super) const LOOKS: usize = 64;

pub(crate) struct Table<C, const W: usize, const S: usize> {
    pub(super) cell: C,
    pub(super) budget: Arc<Budget>,
    pub(super) nodes: Arc<Nodes<W, S>>,
    /// The other tables of the limit's name, whose states this one may take over.
    pub(super) siblings: Option<Arc<SiblingTables>>,
    /// The table of this limit over the states of all siblings that are written whole, once it was needed.
    whole: Mutex<Option<Arc<dyn LimitTable>>>,
}

impl<C: Cell<W>, const W: usize, const S: usize> Table<C, W, S> {
    pub(crate) fn new(
        cell: C,
        budget: Arc<Budget>,
        nodes: Arc<Nodes<W, S>>,
        siblings: Option<Arc<SiblingTables>>,
    ) -> Self {
        Table { cell, budget, nodes, siblings, whole: Mutex::default() }
    }

    /// Forgets the keys of a locked chain that `is_gone` picks, and returns how many.
    fn forget_where(&self, home: usize, is_gone: impl FnMut(Fingerprint, [u64; W]) -> bool) -> usize {
        let forgotten = self.nodes.take_out(home, is_gone, |_, words| self.cell.discard(words));
        self.budget.give_back(forgotten);
        forgotten
    }

    /// Passes on the initial state of a new key: empty, or the shared state while that is in use.
    fn with_newcomer_words<R>(&self, now: Micros, start: impl FnOnce([u64; W]) -> R) -> R {
        let nodes = &*self.nodes;
        if !nodes.shared_in_use.load(Ordering::Acquire) {
            return start([0; W]);
        }
        let _lock = nodes.shared.lock();
        if self.cell.is_fresh(nodes.shared.words(0), now) {
            nodes.shared.set_words(0, [0; W]);
            nodes.shared_in_use.store(false, Ordering::Release);
        }
        start(nodes.shared.words(0))
    }

    /// The other tables that may have a key, if there are any.
    fn siblings_in_use(&self) -> Option<&SiblingTables> {
        self.siblings.as_deref().filter(|siblings| siblings.are_several())
    }

    /// Whether a key is in this table.
    fn knows(&self, key: Fingerprint) -> bool {
        let (_, first, _lock) = self.nodes.lock_home(key);
        self.nodes.find(first, key).is_some()
    }

    /// The table of this limit over whole states, unless it is this one.
    fn whole_table(&self, siblings: &SiblingTables) -> Option<Arc<dyn LimitTable>> {
        let nodes = siblings.whole()?;
        let address = Arc::as_ptr(&nodes).cast::<()>() as usize;
        if address == self.address() {
            return None;
        }
        let mut whole = self.whole.lock();
        if whole.as_ref().is_none_or(|table| table.address() != address) {
            *whole = self.cell.whole_table(&self.budget, nodes);
        }
        whole.clone()
    }

    /// Stores a key that came from another table: here if these words can describe it completely, whole if not.
    fn keep(
        &self,
        key: Fingerprint,
        state: &Whole,
        siblings: &SiblingTables,
        now: Micros,
    ) -> Option<Arc<dyn LimitTable>> {
        if let Some(words) = self.cell.receive(state, now) {
            self.put_words(key, words, now);
            return None;
        }
        let whole = self.whole_table(siblings);
        match &whole {
            Some(table) => table.put(key, state, now),
            // It exists whenever there are several tables.
            None => self.put(key, state, now),
        }
        whole
    }

    /// Corrects a state in this table.
    fn amend_here(&self, key: Fingerprint, in_shared: bool, amendment: Amendment, now: Micros) -> Amended {
        let nodes = &*self.nodes;
        let (home, first, _lock) = nodes.lock_home(key);
        // A debt goes to where the key is charged next. Charges of the shared state are not given back: one number does not show
        // what other keys have used since.
        let is_debt = matches!(amendment, Amendment::Debit { .. });
        if let Some((node, _, slot)) = nodes.find(first, key).filter(|_| is_debt || !in_shared) {
            let mut words = node.words(slot);
            let applied = self.cell.amend(&mut words, amendment, now);
            node.set_words(slot, words);
            return applied;
        }
        // Nothing is remembered: only a debt changes that, and a debt is never refused.
        if is_debt && in_shared {
            let _shared = nodes.shared.lock();
            let mut words = nodes.shared.words(0);
            self.cell.amend(&mut words, amendment, now);
            nodes.shared.set_words(0, words);
            nodes.shared_in_use.store(true, Ordering::Release);
        } else if is_debt {
            let mut words = self.with_newcomer_words(now, |words| self.cell.joined(words, now));
            self.cell.amend(&mut words, amendment, now);
            self.budget.take_anyway(1);
            nodes.insert(home, key, words);
        }
        if is_debt { Amended::Done } else { Amended::NotFound }
    }

    /// The fast path of a charge: an unlocked read decides, and the lock is taken only to write. `None` if the key was not found,
    /// or something changed meanwhile. The caller computes the whole outcome later: an atomic exchange waits for all earlier
    /// instructions.
    #[inline(always)]
    pub(super) fn charge_seen(&self, key: Fingerprint, cost: Cost, now: Micros) -> Option<C::Decided> {
        self.charge_seen_from(self.nodes.first_of(key), key, cost, now)
    }

    /// The same with the first node of the key's chain, as it was found a moment ago.
    #[inline(always)]
    fn charge_seen_from(
        &self,
        first: &Node<W, S>,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
    ) -> Option<C::Decided> {
        let nodes = &*self.nodes;
        let Some(version) = first.version() else { return nodes.disturbed() };
        let (node, _, slot) = nodes.find(first, key)?;
        let mut words = node.words(slot);
        let (is_changed, decided) = self.cell.decide(&mut words, cost, now);
        if is_changed {
            // The same version means that the key is still there, even if the table has grown, and that it was not charged since.
            let Some(lock) = first.lock_if_unchanged(version) else { return nodes.disturbed() };
            node.set_words(slot, words);
            drop(lock);
        } else if !first.unchanged_since(version) {
            return nodes.disturbed();
        }
        Some(decided)
    }

    /// Charges each of many keys, and passes on the result of each as [`charge_seen`](Self::charge_seen) would. All nodes are
    /// prefetched before the first is read, so that the processor waits for them at once.
    #[inline(always)]
    pub(super) fn charge_seen_many<const N: usize>(
        &self,
        keys: &[Fingerprint; N],
        cost: Cost,
        now: Micros,
        mut each: impl FnMut(usize, Option<C::Decided>),
    ) {
        let firsts = keys.map(|key| self.nodes.first_of(key));
        // Something of either line of a node.
        let touch = |first: &Node<W, S>| {
            u64::from(first.version().unwrap_or_default()) ^ first.cells(S - 1)[W - 1].load(Ordering::Relaxed)
        };
        std::hint::black_box(firsts.iter().fold(0, |sum, first| sum ^ touch(first)));
        for (index, (first, key)) in firsts.into_iter().zip(*keys).enumerate() {
            each(index, self.charge_seen_from(first, key, cost, now));
        }
    }

    /// The long path of a charge: takes the lock first.
    fn charge_locked(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        let mut moving = None;
        loop {
            let (home, first, lock) = self.nodes.lock_home(key);
            let Some((node, _, slot)) = self.nodes.find(first, key) else {
                let Some(siblings) = self.siblings_in_use().filter(|_| moving.is_none()) else {
                    return self.charge_newcomer(home, lock, key, cost, now);
                };
                // Not here, but maybe in a sibling: no key is new before all siblings were searched, and none of them changes
                // during the search.
                drop(lock);
                let charged = self.whole_table(siblings).and_then(|whole| whole.charge_whole(key, cost, now));
                if let Some(outcome) = charged {
                    return outcome;
                }
                let tables = siblings.moving();
                // Other threads may charge it there meanwhile, until it need not be stored whole any more.
                while let Some(whole) = self.inherit(key, &tables, now) {
                    if let Some(outcome) = whole.charge_whole(key, cost, now) {
                        return outcome;
                    }
                }
                moving = Some(tables);
                continue;
            };
            let mut words = node.words(slot);
            if !self.cell.take_room() {
                let (_, decided) = self.cell.decide(&mut words, cost, now);
                drop(lock);
                self.sweep(2, now);
                return Budget::refusal(self.cell.outcome(decided, cost));
            }
            let outcome = self.cell.charge(&mut words, Holder::default(), cost, now);
            node.set_words(slot, words);
            return outcome;
        }
    }

    #[cold]
    fn charge_newcomer(
        &self,
        home: usize,
        lock: Guard<'_>,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
    ) -> Outcome {
        let staged = self.stage_newcomer(home, now, true);
        let is_new = matches!(staged, Staged::New { .. });
        let prepared = self.foresee(staged, cost, now);
        let found_room = is_new && prepared.has_room;
        let outcome = prepared.outcome;
        if outcome.allowed {
            self.commit(prepared, key, Holder::default(), cost, now);
        } else {
            self.abandon(prepared);
        }
        drop(lock);
        if found_room {
            self.grow_if_needed();
        } else {
            // Every newcomer that finds no room looks for some.
            self.sweep(2, now);
        }
        outcome
    }

    /// The outcome of a staged charge.
    #[inline]
    fn foresee<'a>(&self, staged: Staged<'a>, cost: Cost, now: Micros) -> Prepared<'a> {
        let mut after = Whole::default();
        let mut foresee = |mut words: [u64; W]| {
            let (_, decided) = self.cell.decide(&mut words, cost, now);
            after[..W].copy_from_slice(&words);
            self.cell.outcome(decided, cost)
        };
        // A key that joins a shared state may have been charged under another state just before, which a window that is about to
        // end would not show.
        let mut foresee_joined = |words: [u64; W]| {
            let outcome = foresee(self.cell.joined(words, now));
            if outcome.allowed { outcome } else { foresee(words) }
        };
        let outcome = match staged {
            Staged::Own(spot) => foresee(self.nodes.words(spot)),
            Staged::New { .. } => self.with_newcomer_words(now, foresee_joined),
            Staged::Shared { .. } => foresee_joined(self.nodes.shared.words(0)),
            Staged::Refused => Budget::refusal(foresee([0; W])),
        };
        let has_room = self.cell.take_room();
        let outcome = if has_room { outcome } else { Budget::refusal(outcome) };
        Prepared { outcome, staged, after, has_room }
    }

    /// Finds a place for a key that has none.
    fn stage_newcomer(&self, home: usize, now: Micros, alone: bool) -> Staged<'_> {
        let mut room = self.budget.take(1);
        if !room && alone && self.forget_where(home, |_, words| self.cell.is_fresh(words, now)) > 0 {
            room = self.budget.take(1);
        }
        match (room, self.budget.when_full()) {
            (true, _) => Staged::New { home },
            (false, WhenFull::Share) if alone && C::PLAIN => {
                Staged::Shared { _lock: self.nodes.shared.lock() }
            }
            _ => Staged::Refused,
        }
    }
}

impl<C: Cell<W>, const W: usize, const S: usize> LimitTable for Table<C, W, S> {
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    #[inline]
    fn charge(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        if C::PLAIN
            && let Some(decided) = self.charge_seen(key, cost, now)
        {
            return self.cell.outcome(decided, cost);
        }
        self.charge_locked(key, cost, now)
    }

    fn see<'a>(
        &'a self,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
        seen: &mut SmallVec<[Seen<'a>; 4]>,
    ) -> bool {
        // A whole state is charged under its lock.
        if !C::PLAIN || W > 3 {
            return false;
        }
        let nodes = &*self.nodes;
        let first = nodes.first_of(key);
        // A lock is held for some tens of nanoseconds; to be turned away by one would cost more.
        let look_again = || {
            std::hint::spin_loop();
            first.version()
        };
        let free =
            first.version().or_else(|| nodes.disturbed()).or_else(|| (1..LOOKS).find_map(|_| look_again()));
        let (Some(version), Some((node, _, slot))) = (free, nodes.find(first, key)) else { return false };
        let mut words = node.words(slot);
        let (_, decided) = self.cell.decide(&mut words, cost, now);
        let mut after = [0; 3];
        after[..W].copy_from_slice(&words);
        let outcome = self.cell.outcome(decided, cost);
        seen.push(Seen { sight: first.sight(version), outcome, cells: node.cells(slot), after });
        true
    }

    #[inline]
    fn charge_known(&self, key: Fingerprint, cost: Cost, now: Micros, outcome: &mut Outcome) -> bool {
        if C::PLAIN
            && let Some(decided) = self.charge_seen(key, cost, now)
        {
            *outcome = self.cell.outcome(decided, cost);
            return true;
        }
        false
    }

    fn peek(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        let tables = self.siblings_in_use().filter(|_| !self.knows(key)).map(SiblingTables::moving);
        if let Some(state) = tables.as_ref().and_then(|tables| tables.look(key, self.address())) {
            return self.cell.peek_whole(&state, cost, now);
        }
        let _lock = self.nodes.lock_home(key);
        let prepared = self.prepare(key, cost, now, true);
        let outcome = prepared.outcome;
        self.abandon(prepared);
        outcome
    }

    fn amend(&self, key: Fingerprint, in_shared: bool, amendment: Amendment, now: Micros) -> Amended {
        let Some(siblings) = self.siblings_in_use() else {
            return self.amend_here(key, in_shared, amendment, now);
        };
        let tables = siblings.moving();
        // Corrected where it is by now, by the numbers that it was charged under.
        let mut amended = Amended::NotFound;
        let mut amend = |state: &mut Whole| amended = self.cell.amend_whole(state, amendment, now);
        match tables.change(key, self.address(), now, &mut amend) {
            Change::NotHere => {}
            Change::Done => return amended,
            Change::Left(state) => {
                self.keep(key, &state, siblings, now);
                return amended;
            }
        }
        // A debt of an unknown key is stored under its own fingerprint: siblings search for that.
        let in_shared = in_shared && !matches!(amendment, Amendment::Debit { .. });
        self.amend_here(key, in_shared, amendment, now)
    }

    fn forget(&self, key: Fingerprint) -> bool {
        let tables = self.siblings_in_use().map(SiblingTables::moving);
        let in_sibling = tables.is_some_and(|tables| tables.forget(key));
        self.forget_here(key) || in_sibling
    }

    fn sweep(&self, nodes: usize, now: Micros) -> usize {
        let mut forgotten = 0;
        for home in self.nodes.next_homes(nodes) {
            let _lock = self.nodes.home(home).lock();
            forgotten += self.forget_where(home, |_, words| self.cell.is_fresh(words, now));
        }
        forgotten
    }

    fn nodes(&self) -> usize {
        self.nodes.count()
    }

    fn len(&self) -> usize {
        self.nodes.len()
    }

    fn address(&self) -> usize {
        Arc::as_ptr(&self.nodes).cast::<()>() as usize
    }

    fn siblings(&self) -> Option<&SiblingTables> {
        self.siblings_in_use()
    }

    fn locate(&self, key: Fingerprint, now: Micros) -> Located<'_> {
        let Some(siblings) = self.siblings_in_use().filter(|_| !self.knows(key)) else {
            return Located::Here;
        };
        match self.whole_table(siblings).filter(|whole| whole.knows_whole(key, now)) {
            Some(whole) => Located::Whole(whole),
            None => Located::SearchSiblings(siblings),
        }
    }

    fn knows_locked(&self, key: Fingerprint) -> bool {
        self.nodes.find(self.nodes.first_of(key), key).is_some()
    }

    fn knows_whole(&self, key: Fingerprint, now: Micros) -> bool {
        let (_, first, _lock) = self.nodes.lock_home(key);
        self.nodes.find(first, key).is_some_and(|(node, _, slot)| !self.cell.is_plain(node.words(slot), now))
    }

    fn charge_whole(&self, key: Fingerprint, cost: Cost, now: Micros) -> Option<Outcome> {
        let (_, first, _lock) = self.nodes.lock_home(key);
        let (node, _, slot) = self.nodes.find(first, key)?;
        let mut words = node.words(slot);
        if self.cell.is_plain(words, now) {
            return None;
        }
        let outcome = self.cell.charge(&mut words, Holder::default(), cost, now);
        node.set_words(slot, words);
        Some(outcome)
    }

    fn inherit(&self, key: Fingerprint, tables: &Moving<'_>, now: Micros) -> Option<Arc<dyn LimitTable>> {
        let siblings = self.siblings_in_use().filter(|_| !self.knows(key))?;
        let mut state = tables.take(key, self.address())?;
        self.cell.adopt_whole(&mut state, now);
        self.keep(key, &state, siblings, now)
    }

    fn let_go_of_whole(&self) {
        *self.whole.lock() = None;
    }

    fn home(&self, key: Fingerprint) -> usize {
        self.nodes.home_of(key)
    }

    fn lock(&self, home: usize) -> Guard<'_> {
        self.nodes.lock_node(self.nodes.home(home))
    }

    #[inline]
    fn prepare(&self, key: Fingerprint, cost: Cost, now: Micros, alone: bool) -> Prepared<'_> {
        let home = self.nodes.home_of(key);
        let staged = match self.nodes.find(self.nodes.home(home), key) {
            Some((_, spill, slot)) => Staged::Own(Spot { home, spill, slot }),
            None => self.stage_newcomer(home, now, alone),
        };
        self.foresee(staged, cost, now)
    }

    #[inline]
    fn commit(
        &self,
        prepared: Prepared<'_>,
        key: Fingerprint,
        holder: Holder,
        cost: Cost,
        now: Micros,
    ) -> Committed {
        let in_shared = matches!(prepared.staged, Staged::Shared { .. });
        let charge = |mut words: [u64; W]| {
            if C::PLAIN {
                words.copy_from_slice(&prepared.after[..W]);
            } else {
                self.cell.charge(&mut words, holder, cost, now);
            }
            words
        };
        let words = match prepared.staged {
            Staged::Own(spot) => {
                let words = charge(self.nodes.words(spot));
                self.nodes.set_words(spot, words);
                words
            }
            Staged::New { home } => {
                let words = charge([0; W]);
                self.nodes.insert(home, key, words);
                words
            }
            Staged::Shared { .. } => {
                let words = charge(self.nodes.shared.words(0));
                self.nodes.shared.set_words(0, words);
                self.nodes.shared_in_use.store(true, Ordering::Release);
                words
            }
            // A refused charge is never committed.
            Staged::Refused => [0; W],
        };
        Committed { charged_at: self.cell.charged_at(words, now), in_shared }
    }

    fn abandon(&self, prepared: Prepared<'_>) {
        if prepared.has_room {
            self.cell.leave_room();
        }
        if let Staged::New { .. } = prepared.staged {
            self.budget.give_back(1);
        }
    }

    fn refuse(&self, prepared: Prepared<'_>, now: Micros) {
        if let Staged::Own(spot) = prepared.staged {
            let mut words = self.nodes.words(spot);
            self.cell.adopt(&mut words, now);
            self.nodes.set_words(spot, words);
        }
        self.abandon(prepared);
    }

    fn grow_if_needed(&self) {
        self.nodes.grow_if_needed();
    }
}
