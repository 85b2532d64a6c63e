//! Costs in the order of an instant, with sums by the block: the log of a sliding window, and leases by their end.
//!
//! What a charge asks of thousands of entries (what do those up to an instant come to, and which is the first that frees so
//! much) is answered by skipping whole blocks, from the nearer end, so that the work grows with n/128 + 64 additions and not with
//! n: at 30,000 entries some 300 steps of a nanosecond or two. Adding at the end and dropping from the front touch one block.

use std::collections::VecDeque;

use crate::time::Micros;

/// How many entries a block holds before it is split.
const BLOCK: usize = 64;

/// What has an instant to be ordered by, and a cost.
pub(crate) trait Entry: Copy {
    fn instant(&self) -> Micros;
    fn cost(&self) -> u64;
    fn cost_mut(&mut self) -> &mut u64;
}

#[derive(Clone, Debug)]
struct Block<E> {
    sum: u64,
    entries: VecDeque<E>,
}

/// Entries in the order of their instants; those of one instant in the order in which they came.
#[derive(Clone, Debug)]
pub(crate) struct Entries<E> {
    blocks: VecDeque<Block<E>>,
    len: usize,
    total: u64,
}

impl<E> Default for Entries<E> {
    fn default() -> Self {
        Entries { blocks: VecDeque::new(), len: 0, total: 0 }
    }
}

/// The same entries, however they are blocked.
impl<E: Entry + PartialEq> PartialEq for Entries<E> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.total == other.total && self.iter().eq(other.iter())
    }
}

impl<E: Entry + Eq> Eq for Entries<E> {}

impl<E: Entry> Entries<E> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What all of them come to.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = E> + '_ {
        self.blocks.iter().flat_map(|block| block.entries.iter().copied())
    }

    pub(crate) fn last(&self) -> Option<E> {
        self.blocks.back().and_then(|block| block.entries.back().copied())
    }

    /// What the entries up to and with an instant come to.
    pub(crate) fn sum_until(&self, instant: Micros) -> u64 {
        let is_before = |block: &Block<E>| block.entries.back().is_some_and(|last| last.instant() <= instant);
        let at = self.blocks.partition_point(is_before);
        let sum = match 2 * at < self.blocks.len() {
            true => self.blocks.iter().take(at).map(|block| block.sum).sum::<u64>(),
            false => self.total - self.blocks.iter().skip(at).map(|block| block.sum).sum::<u64>(),
        };
        let Some(block) = self.blocks.get(at) else { return sum };
        let until = block.entries.iter().take_while(|entry| entry.instant() <= instant);
        sum + until.map(Entry::cost).sum::<u64>()
    }

    /// The instant of the first entry with which the entries from the oldest on come to at least `sum`.
    pub(crate) fn first_to_sum(&self, sum: u64) -> Option<Micros> {
        // What comes after it.
        let mut rest = self.total.checked_sub(sum)?;
        let (block, mut left) = if sum <= rest {
            let mut left = sum;
            let block = self.blocks.iter().find(|block| {
                let is_it = block.sum >= left;
                left -= if is_it { 0 } else { block.sum };
                is_it
            })?;
            (block, left)
        } else {
            let block = self.blocks.iter().rev().find(|block| {
                let is_it = block.sum > rest;
                rest -= if is_it { 0 } else { block.sum };
                is_it
            })?;
            (block, block.sum - rest)
        };
        let first = block.entries.iter().find(|entry| match left.checked_sub(entry.cost()) {
            Some(rest) if rest > 0 => {
                left = rest;
                false
            }
            _ => true,
        });
        first.map(Entry::instant)
    }

    /// Adds an entry behind all that are not later.
    pub(crate) fn insert(&mut self, entry: E) {
        self.len += 1;
        self.total += entry.cost();
        let at = self.block_of(entry.instant());
        let is_new = match self.blocks.get(at) {
            None => true,
            // At the very end a full block is left as it is, so that blocks are full where entries come in order.
            Some(block) => {
                at + 1 == self.blocks.len()
                    && block.entries.len() >= BLOCK
                    && block.entries.back().is_none_or(|last| last.instant() <= entry.instant())
            }
        };
        if is_new {
            self.blocks.push_back(Block { sum: entry.cost(), entries: VecDeque::from([entry]) });
            return;
        }
        let block = &mut self.blocks[at];
        let place = block.entries.partition_point(|other| other.instant() <= entry.instant());
        block.entries.insert(place, entry);
        block.sum += entry.cost();
        if block.entries.len() > 2 * BLOCK {
            let entries = block.entries.split_off(BLOCK);
            let sum = entries.iter().map(Entry::cost).sum();
            block.sum -= sum;
            self.blocks.insert(at + 1, Block { sum, entries });
        }
    }

    /// Drops the entries up to and with an instant.
    pub(crate) fn drop_until(&mut self, instant: Micros) {
        while let Some(block) = self.blocks.front_mut() {
            while block.entries.front().is_some_and(|entry| entry.instant() <= instant) {
                if let Some(entry) = block.entries.pop_front() {
                    block.sum -= entry.cost();
                    self.total -= entry.cost();
                    self.len -= 1;
                }
            }
            if !block.entries.is_empty() {
                return;
            }
            self.blocks.pop_front();
        }
    }

    /// Merges the oldest entry into the one after it, if that is not later than `instant`.
    pub(crate) fn merge_oldest_until(&mut self, instant: Micros) -> bool {
        let mut oldest = self.blocks.iter().flat_map(|block| &block.entries);
        let (Some(first), Some(second)) = (oldest.next().copied(), oldest.next().copied()) else {
            return false;
        };
        if second.instant() > instant {
            return false;
        }
        self.drop_first();
        if let Some(block) = self.blocks.front_mut()
            && let Some(entry) = block.entries.front_mut()
        {
            *entry.cost_mut() += first.cost();
            block.sum += first.cost();
            self.total += first.cost();
        }
        true
    }

    fn drop_first(&mut self) {
        let Some(block) = self.blocks.front_mut() else { return };
        if let Some(entry) = block.entries.pop_front() {
            block.sum -= entry.cost();
            self.total -= entry.cost();
            self.len -= 1;
        }
        if block.entries.is_empty() {
            self.blocks.pop_front();
        }
    }

    /// Takes `amount` off the cost of the entry of an instant that `is_it` picks, and drops the entry if nothing is left of it.
    /// Answers how much was taken off.
    pub(crate) fn reduce(&mut self, instant: Micros, amount: u64, is_it: impl Fn(&E) -> bool) -> u64 {
        let Some((at, place)) = self.find(instant, is_it) else { return 0 };
        let block = &mut self.blocks[at];
        let entry = &mut block.entries[place];
        let taken = amount.min(entry.cost());
        *entry.cost_mut() -= taken;
        block.sum -= taken;
        self.total -= taken;
        if block.entries[place].cost() == 0 {
            self.remove_at(at, place);
        }
        taken
    }

    /// Removes the entry of an instant that `is_it` picks.
    pub(crate) fn remove(&mut self, instant: Micros, is_it: impl Fn(&E) -> bool) -> Option<E> {
        let (at, place) = self.find(instant, is_it)?;
        self.remove_at(at, place)
    }

    fn remove_at(&mut self, at: usize, place: usize) -> Option<E> {
        let block = &mut self.blocks[at];
        let entry = block.entries.remove(place)?;
        block.sum -= entry.cost();
        self.total -= entry.cost();
        self.len -= 1;
        if block.entries.is_empty() {
            self.blocks.remove(at);
        }
        Some(entry)
    }

    fn find(&self, instant: Micros, is_it: impl Fn(&E) -> bool) -> Option<(usize, usize)> {
        // Entries of one instant may be in several blocks.
        let first = self
            .blocks
            .partition_point(|block| block.entries.back().is_some_and(|last| last.instant() < instant));
        for (at, block) in self.blocks.iter().enumerate().skip(first) {
            let from = block.entries.partition_point(|entry| entry.instant() < instant);
            for (place, entry) in block.entries.iter().enumerate().skip(from) {
                if entry.instant() > instant {
                    return None;
                }
                if is_it(entry) {
                    return Some((at, place));
                }
            }
        }
        None
    }

    /// The block that an entry of an instant goes into: the first whose last entry is later, or the last one.
    fn block_of(&self, instant: Micros) -> usize {
        let first_later = self
            .blocks
            .partition_point(|block| block.entries.back().is_some_and(|last| last.instant() <= instant));
        first_later.min(self.blocks.len().saturating_sub(1))
    }

    /// Adds to the cost of the last entry.
    pub(crate) fn add_to_last(&mut self, cost: u64) {
        if let Some(block) = self.blocks.back_mut()
            && let Some(entry) = block.entries.back_mut()
        {
            *entry.cost_mut() += cost;
            block.sum += cost;
            self.total += cost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Plain {
        at: u64,
        id: u64,
        cost: u64,
    }

    impl Entry for Plain {
        fn instant(&self) -> Micros {
            Micros::new(self.at)
        }
        fn cost(&self) -> u64 {
            self.cost
        }
        fn cost_mut(&mut self) -> &mut u64 {
            &mut self.cost
        }
    }

    /// Everything that blocks can do, beside a list that is walked from end to end.
    #[test]
    fn blocks_answer_as_a_plain_list() {
        let (mut entries, mut list) = (Entries::default(), Vec::<Plain>::new());
        let mut random = 1u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for step in 0..20_000 {
            let (at, cost) = (step / 8 + draw(300), 1 + draw(5));
            match draw(20) {
                0..=11 => {
                    let entry = Plain { at, id: step, cost };
                    entries.insert(entry);
                    let place = list.partition_point(|other| other.at <= at);
                    list.insert(place, entry);
                }
                12 => {
                    let until = at.saturating_sub(200 + draw(500));
                    entries.drop_until(Micros::new(until));
                    list.retain(|entry| entry.at > until);
                }
                13..=15 if !list.is_empty() => {
                    let place = usize::try_from(draw(list.len() as u64)).unwrap();
                    let Plain { at, id, .. } = list[place];
                    let taken = entries.reduce(Micros::new(at), cost, |entry| entry.id == id);
                    assert_eq!(taken, cost.min(list[place].cost));
                    list[place].cost -= taken;
                    list.retain(|entry| entry.cost > 0);
                }
                16..=18 if !list.is_empty() => {
                    let place = usize::try_from(draw(list.len() as u64)).unwrap();
                    let Plain { at, id, .. } = list.remove(place);
                    assert!(entries.remove(Micros::new(at), |entry| entry.id == id).is_some());
                    assert!(entries.remove(Micros::new(at), |entry| entry.id == id).is_none());
                }
                _ if list.len() > 1 => {
                    let until = list[0].at + draw(3);
                    let merges = list[1].at <= until;
                    assert_eq!(entries.merge_oldest_until(Micros::new(until)), merges);
                    if merges {
                        let oldest = list.remove(0);
                        list[0].cost += oldest.cost;
                    }
                }
                _ => {}
            }
            let until =
                |instant: u64| list.iter().filter(|entry| entry.at <= instant).map(|e| e.cost).sum::<u64>();
            assert_eq!((entries.len(), entries.total()), (list.len(), until(u64::MAX)));
            assert_eq!(entries.sum_until(Micros::new(at)), until(at));
            let wanted = 1 + draw(entries.total() + 3);
            let mut sum = 0;
            let first = list.iter().find(|entry| {
                sum += entry.cost;
                sum >= wanted
            });
            assert_eq!(entries.first_to_sum(wanted), first.map(|entry| Micros::new(entry.at)), "{wanted}");
            if step % 512 == 0 {
                assert!(entries.iter().eq(list.iter().copied()));
                assert_eq!(entries.last(), list.last().copied());
            }
        }
        assert!(list.len() > 500, "{} entries are enough for several blocks", list.len());
    }

    #[test]
    fn one_entry_has_none_to_merge_with() {
        let mut entries = Entries::default();
        assert!(!entries.merge_oldest_until(Micros::new(9)));
        entries.insert(Plain { at: 1, id: 1, cost: 2 });
        assert!(!entries.merge_oldest_until(Micros::new(9)));
        assert_eq!((entries.len(), entries.total()), (1, 2));
    }
}
