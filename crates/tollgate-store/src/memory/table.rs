//! The table of one limit: keys to states, millions of them, growing one node at a time.
//!
//! Linear hashing: a key's fingerprint names its home node; when the table is full enough, the next node in turn is split in
//! two, so growth never stops the world and never moves more than one chain of a few keys. A chain is a home node and, rarely,
//! spill nodes behind it. One lock, the home node's, covers a chain: charging a key takes that lock and no other. Nodes never
//! move and are never freed, so a reader without the lock is safe; node.rs says how it knows what to believe.
//!
//! What never enters: the arithmetic of limits (the cell asks the kernel) and text keys (the store makes fingerprints).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};

use super::budget::{Budget, WhenFull};
use super::cell::{Amendment, Cell};
use super::chunks::Chunks;
use super::contention::Contention;
use super::ledger::Ledger;
use super::node::{Fingerprint, Guard, Node, Sight};
use super::sync::AtomicU64;

/// Where a key's state is.
#[derive(Clone, Copy)]
struct Spot {
    home: usize,
    /// The spill node, if it is not in the home node itself.
    spill: Option<u32>,
    slot: usize,
}

/// A charge that was looked at without a lock.
pub(crate) struct Seen<'a> {
    /// To be believed only if this says so.
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
    /// What a charge leaves behind, where the words are the state; unused words are zero.
    after: [u64; 3],
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

/// How often a look at a chain whose lock is held is tried again.
const LOOKS: usize = 64;

type Entries<const W: usize> = SmallVec<[(Fingerprint, [u64; W]); 16]>;

pub(crate) struct Table<C, const W: usize, const S: usize> {
    cell: C,
    budget: Arc<Budget>,
    contention: Arc<Contention>,
    homes: Chunks<Node<W, S>>,
    home_count: AtomicUsize,
    spills: Chunks<Node<W, S>>,
    spill_count: AtomicU32,
    spill_free: Mutex<Vec<u32>>,
    len: AtomicUsize,
    growing: Mutex<()>,
    sweep_next: AtomicUsize,
    /// The state that newcomers share when there is no room, in the first slot.
    shared: Node<W, S>,
    shared_in_use: AtomicBool,
}

/// The home of a key among `homes` nodes: the hash modulo the next power of two, folded back where not yet split.
#[inline]
fn home_among(homes: usize, key: Fingerprint) -> usize {
    let mask = usize::MAX >> homes.leading_zeros();
    let wide = low_bits(key.hi) & mask;
    if wide < homes { wide } else { wide & (mask >> 1) }
}

/// As much of a hash as an index holds.
#[inline]
#[allow(clippy::cast_possible_truncation)] // Cutting off is the point.
fn low_bits(hash: u64) -> usize {
    hash as usize
}

impl<C: Cell<W>, const W: usize, const S: usize> Table<C, W, S> {
    pub(crate) fn new(cell: C, budget: Arc<Budget>, contention: Arc<Contention>) -> Self {
        let homes = Chunks::new();
        homes.ensure(0);
        Table {
            cell,
            budget,
            contention,
            homes,
            home_count: AtomicUsize::new(1),
            spills: Chunks::new(),
            spill_count: AtomicU32::new(0),
            spill_free: Mutex::new(Vec::new()),
            len: AtomicUsize::new(0),
            growing: Mutex::new(()),
            sweep_next: AtomicUsize::new(0),
            shared: Node::default(),
            shared_in_use: AtomicBool::new(false),
        }
    }

    #[inline]
    fn home_of(&self, key: Fingerprint) -> usize {
        home_among(self.home_count.load(Ordering::Acquire), key)
    }

    /// Locks a node, and counts if that has to be waited for.
    #[inline]
    fn lock_node<'a>(&self, node: &'a Node<W, S>) -> Guard<'a> {
        node.version().and_then(|version| node.lock_if_unchanged(version)).unwrap_or_else(|| {
            self.contention.met();
            node.lock()
        })
    }

    /// Nothing, because others were in the way.
    #[cold]
    fn disturbed<T>(&self) -> Option<T> {
        self.contention.met();
        None
    }

    /// Locks the home of a key: by the time the lock is held the node may have been split and the key moved.
    #[inline]
    fn lock_home(&self, key: Fingerprint) -> (usize, &Node<W, S>, Guard<'_>) {
        loop {
            let home = self.home_of(key);
            let first = self.homes.get(home);
            let guard = self.lock_node(first);
            if self.home_of(key) == home {
                return (home, first, guard);
            }
        }
    }

    #[inline]
    fn node(&self, home: usize, spill: Option<u32>) -> &Node<W, S> {
        match spill {
            None => self.homes.get(home),
            Some(index) => self.spills.get(index as usize),
        }
    }

    /// Finds a key in the chain that starts at `first`: its node, which spill node that is, and the slot. With the chain's lock
    /// the answer is certain.
    #[inline(always)]
    fn find<'a>(
        &'a self,
        first: &'a Node<W, S>,
        key: Fingerprint,
    ) -> Option<(&'a Node<W, S>, Option<u32>, usize)> {
        let (mut node, mut spill) = (first, None);
        loop {
            if let Some(slot) = node.find(key) {
                return Some((node, spill, slot));
            }
            let next = node.next()?;
            (node, spill) = (self.spills.get(next as usize), Some(next));
        }
    }

    fn words(&self, spot: Spot) -> [u64; W] {
        self.node(spot.home, spot.spill).words(spot.slot)
    }

    fn set_words(&self, spot: Spot, words: [u64; W]) {
        self.node(spot.home, spot.spill).set_words(spot.slot, words);
    }

    /// Adds a key to a locked chain.
    fn insert(&self, home: usize, key: Fingerprint, words: [u64; W]) {
        self.append(home, key, words, &mut SmallVec::new());
        self.len.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts a key into the first vacant slot of a chain, lengthening the chain by one of `spare` or a new node if need be.
    fn append(&self, home: usize, key: Fingerprint, words: [u64; W], spare: &mut SmallVec<[u32; 8]>) {
        let mut node = self.homes.get(home);
        loop {
            if let Some(slot) = node.vacant() {
                return node.fill(slot, key, words);
            }
            node = match node.next() {
                Some(index) => self.spills.get(index as usize),
                None => {
                    let index = spare.pop().or_else(|| self.spill_free.lock().pop()).unwrap_or_else(|| {
                        let index = self.spill_count.fetch_add(1, Ordering::Relaxed);
                        self.spills.ensure(index as usize);
                        index
                    });
                    node.set_next(Some(index));
                    self.spills.get(index as usize)
                }
            };
        }
    }

    /// Empties a chain into `entries`, and its spill nodes into `spare`.
    fn drain(&self, home: usize, entries: &mut Entries<W>, spare: &mut SmallVec<[u32; 8]>) {
        let mut node = self.homes.get(home);
        loop {
            for slot in 0..S {
                if let Some(key) = node.key(slot) {
                    entries.push((key, node.words(slot)));
                    node.clear(slot);
                }
            }
            let next = node.next();
            node.set_next(None);
            let Some(index) = next else { return };
            spare.push(index);
            node = self.spills.get(index as usize);
        }
    }

    /// Splits the next node in turn into itself and a new one at the end.
    fn split(&self) {
        let count = self.home_count.load(Ordering::Acquire);
        let from = count - (1 << count.ilog2());
        self.homes.ensure(count);
        let (old, new) = (self.homes.get(from), self.homes.get(count));
        let (_old_lock, _new_lock) = (old.lock(), new.lock());
        let (mut entries, mut spare) = (Entries::<W>::new(), SmallVec::new());
        self.drain(from, &mut entries, &mut spare);
        for (key, words) in entries {
            self.append(home_among(count + 1, key), key, words, &mut spare);
        }
        self.home_count.store(count + 1, Ordering::Release);
        self.spill_free.lock().extend(spare);
    }

    /// Forgets the keys of a locked chain that `is_gone` picks, and returns how many.
    fn forget_where(&self, home: usize, mut is_gone: impl FnMut(Fingerprint, [u64; W]) -> bool) -> usize {
        let (mut entries, mut spare) = (Entries::<W>::new(), SmallVec::<[u32; 8]>::new());
        let mut any_gone = false;
        let mut spill = None;
        loop {
            let node = self.node(home, spill);
            any_gone |= (0..S).any(|slot| node.key(slot).is_some_and(|key| is_gone(key, node.words(slot))));
            match node.next() {
                Some(next) if !any_gone => spill = Some(next),
                _ => break,
            }
        }
        if !any_gone {
            return 0;
        }
        self.drain(home, &mut entries, &mut spare);
        let before = entries.len();
        entries.retain(|(key, words)| {
            let gone = is_gone(*key, *words);
            if gone {
                self.cell.discard(*words);
            }
            !gone
        });
        let forgotten = before - entries.len();
        for (key, words) in entries {
            self.append(home, key, words, &mut spare);
        }
        self.spill_free.lock().extend(spare);
        self.len.fetch_sub(forgotten, Ordering::Relaxed);
        self.budget.give_back(forgotten);
        forgotten
    }

    /// Hands over what a newcomer starts from: nothing, or what the shared state says while that is in use.
    fn with_newcomer_words<R>(&self, now: Micros, start: impl FnOnce([u64; W]) -> R) -> R {
        if !self.shared_in_use.load(Ordering::Acquire) {
            return start([0; W]);
        }
        let _lock = self.shared.lock();
        if self.cell.is_fresh(self.shared.words(0), now) {
            self.shared.set_words(0, [0; W]);
            self.shared_in_use.store(false, Ordering::Release);
        }
        start(self.shared.words(0))
    }

    /// The short path of a charge: decides on what can be seen without the lock, and takes the lock only to write. `None` if
    /// the key was not seen, or something changed meanwhile.
    #[inline(always)]
    fn charge_seen(&self, key: Fingerprint, cost: Cost, now: Micros) -> Option<Outcome> {
        let first = self.homes.get(self.home_of(key));
        let Some(version) = first.version() else { return self.disturbed() };
        let (node, _, slot) = self.find(first, key)?;
        let mut words = node.words(slot);
        let (allowed, decided) = self.cell.decide(&mut words, cost, now);
        if allowed {
            // The same version means that the key is still there, even if the table has grown, and that nobody charged it
            // since.
            let Some(lock) = first.lock_if_unchanged(version) else { return self.disturbed() };
            node.set_words(slot, words);
            drop(lock);
        } else if !first.unchanged_since(version) {
            return self.disturbed();
        }
        // The answer is worked out only now: an atomic exchange waits for all that was begun before it.
        Some(self.cell.outcome(decided, cost))
    }

    /// The long path of a charge: takes the lock first.
    fn charge_locked(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        let (home, first, lock) = self.lock_home(key);
        let Some((node, _, slot)) = self.find(first, key) else {
            return self.charge_newcomer(home, lock, key, cost, now);
        };
        let mut words = node.words(slot);
        if !self.cell.take_room() {
            let (_, decided) = self.cell.decide(&mut words, cost, now);
            drop(lock);
            self.sweep(2, now);
            return Budget::refusal(self.cell.outcome(decided, cost));
        }
        let outcome = self.cell.charge(&mut words, 0, cost, now);
        if outcome.allowed {
            node.set_words(slot, words);
        }
        outcome
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
            self.commit(prepared, key, 0, cost, now);
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

    /// What a charge would get where it is staged.
    #[inline]
    fn foresee<'a>(&self, staged: Staged<'a>, cost: Cost, now: Micros) -> Prepared<'a> {
        let mut after = [0; 3];
        let mut foresee = |mut words: [u64; W]| {
            let (_, decided) = self.cell.decide(&mut words, cost, now);
            after[..W].copy_from_slice(&words);
            self.cell.outcome(decided, cost)
        };
        // One who joins may have been charged elsewhere just before, which a window that is about to end would not tell.
        let mut foresee_joined = |words: [u64; W]| {
            let outcome = foresee(self.cell.joined(words, now));
            if outcome.allowed { outcome } else { foresee(words) }
        };
        let outcome = match staged {
            Staged::Own(spot) => foresee(self.words(spot)),
            Staged::New { .. } => self.with_newcomer_words(now, foresee_joined),
            Staged::Shared { .. } => foresee_joined(self.shared.words(0)),
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
            (false, WhenFull::Share) if alone && C::PLAIN => Staged::Shared { _lock: self.shared.lock() },
            _ => Staged::Refused,
        }
    }
}

impl<C: Cell<W>, const W: usize, const S: usize> Ledger for Table<C, W, S> {
    #[inline]
    fn charge(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        if C::PLAIN
            && let Some(outcome) = self.charge_seen(key, cost, now)
        {
            return outcome;
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
        if !C::PLAIN {
            return false;
        }
        let first = self.homes.get(self.home_of(key));
        // A lock is held for some tens of nanoseconds; to be turned away by one would cost more.
        let look_again = || {
            std::hint::spin_loop();
            first.version()
        };
        let free =
            first.version().or_else(|| self.disturbed()).or_else(|| (1..LOOKS).find_map(|_| look_again()));
        let (Some(version), Some((node, _, slot))) = (free, self.find(first, key)) else { return false };
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
            && let Some(answer) = self.charge_seen(key, cost, now)
        {
            *outcome = answer;
            return true;
        }
        false
    }

    #[inline]
    fn charge_known_or(
        &self,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
        otherwise: &dyn Fn() -> Outcome,
    ) -> Outcome {
        if C::PLAIN
            && let Some(outcome) = self.charge_seen(key, cost, now)
        {
            return outcome;
        }
        otherwise()
    }

    fn fetch(&self, keys: &[Fingerprint]) {
        // Looking at all nodes first lets the processor wait for them together.
        let found = keys.iter().fold(0, |found, &key| {
            let node = self.homes.get(self.home_of(key));
            found + usize::from(node.find(key).is_some())
        });
        std::hint::black_box(found);
    }

    fn peek(&self, key: Fingerprint, cost: Cost, now: Micros) -> Outcome {
        let _lock = self.lock_home(key);
        let prepared = self.prepare(key, cost, now, true);
        let outcome = prepared.outcome;
        self.abandon(prepared);
        outcome
    }

    fn amend(&self, key: Fingerprint, in_shared: bool, amendment: Amendment, now: Micros) -> bool {
        let (home, first, _lock) = self.lock_home(key);
        // A debt goes to where the key is charged next. What was charged in the shared state is not given back: one number may
        // not tell what others have used since.
        let is_debt = matches!(amendment, Amendment::Debit { .. });
        if let Some((node, _, slot)) = self.find(first, key).filter(|_| is_debt || !in_shared) {
            let mut words = node.words(slot);
            let applied = self.cell.amend(&mut words, amendment, now);
            node.set_words(slot, words);
            return applied;
        }
        // Nothing is remembered: only a debt changes that, and a debt is never refused.
        if is_debt && in_shared {
            let _shared = self.shared.lock();
            let mut words = self.shared.words(0);
            self.cell.amend(&mut words, amendment, now);
            self.shared.set_words(0, words);
            self.shared_in_use.store(true, Ordering::Release);
        } else if is_debt {
            let mut words = self.with_newcomer_words(now, |words| self.cell.joined(words, now));
            self.cell.amend(&mut words, amendment, now);
            self.budget.take_anyway(1);
            self.insert(home, key, words);
        }
        is_debt
    }

    fn forget(&self, key: Fingerprint) -> bool {
        let (home, _, _lock) = self.lock_home(key);
        self.forget_where(home, |other, _| other == key) > 0
    }

    fn sweep(&self, nodes: usize, now: Micros) -> usize {
        let count = self.home_count.load(Ordering::Acquire);
        let start = self.sweep_next.fetch_add(nodes, Ordering::Relaxed);
        let mut forgotten = 0;
        for home in (start..start.saturating_add(nodes.min(count))).map(|next| next % count) {
            let node = self.homes.get(home);
            if (0..S).all(|slot| node.key(slot).is_none()) && node.next().is_none() {
                continue;
            }
            let _lock = node.lock();
            forgotten += self.forget_where(home, |_, words| self.cell.is_fresh(words, now));
        }
        forgotten
    }

    fn nodes(&self) -> usize {
        self.home_count.load(Ordering::Relaxed)
    }

    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    fn home(&self, key: Fingerprint) -> usize {
        self.home_of(key)
    }

    fn lock(&self, home: usize) -> Guard<'_> {
        self.lock_node(self.homes.get(home))
    }

    #[inline]
    fn prepare(&self, key: Fingerprint, cost: Cost, now: Micros, alone: bool) -> Prepared<'_> {
        let home = self.home_of(key);
        let staged = match self.find(self.homes.get(home), key) {
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
        holder: u128,
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
                let words = charge(self.words(spot));
                self.set_words(spot, words);
                words
            }
            Staged::New { home } => {
                let words = charge([0; W]);
                self.insert(home, key, words);
                words
            }
            Staged::Shared { .. } => {
                let words = charge(self.shared.words(0));
                self.shared.set_words(0, words);
                self.shared_in_use.store(true, Ordering::Release);
                words
            }
            // What is refused is never allowed, so it is never committed.
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

    fn grow_if_needed(&self) {
        // A chain holds half a key less than a node's slots on average: what spills over is little, and so is what is empty.
        let wants_more = || self.len() * 2 > self.nodes() * (2 * S - 1);
        if wants_more()
            && let Some(_growing) = self.growing.try_lock()
        {
            for _ in 0..2 {
                if wants_more() {
                    self.split();
                }
            }
        }
    }
}
