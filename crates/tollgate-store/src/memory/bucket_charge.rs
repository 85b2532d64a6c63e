//! A charge over two or three token buckets, the most common charge over several limits: its short path, without what other
//! strategies need.
//!
//! Callers meet in the limit that has the fewest keys, often one key for all. So that key is locked last, with the others locked already,
//! and only it is looked at again, a few times, where somebody was faster. Nobody waits for a lock while holding one.

use std::array;

use tollgate_kernel::{Cost, Fit, Micros};

use super::cell::Cell;
use super::charge::Missed;
use super::node::{Fingerprint, Guard, Node};
use super::shape::TokenTable;
use super::table::LOOKS;
use super::{ChargedBucket, Inner, MemoryCharge};

/// How often the key that all want is tried, with the others locked.
const TRIES: usize = 16;

/// A bucket as it was seen without its lock, and what the charge would make of it.
#[derive(Clone, Copy)]
struct SeenBucket<'a> {
    first: &'a Node<1, 5>,
    /// To be believed only as long as the first node has this version.
    version: u32,
    node: &'a Node<1, 5>,
    slot: usize,
    after: [u64; 1],
    fit: Fit,
}

impl<'a> SeenBucket<'a> {
    #[inline(always)]
    fn look(
        table: &'a TokenTable,
        first: &'a Node<1, 5>,
        key: Fingerprint,
        cost: Cost,
        now: Micros,
    ) -> Result<SeenBucket<'a>, Missed> {
        let Some(version) = first.version().or_else(|| look_again(first)) else {
            return Err(Missed::Disturbed);
        };
        let Some((node, _, slot)) = table.nodes.find(first, key) else { return Err(Missed::Unseen) };
        let mut after = node.words(slot);
        let (_, fit) = table.cell.decide(&mut after, cost, now);
        Ok(SeenBucket { first, version, node, slot, after, fit })
    }

    #[inline(always)]
    fn lock(&self) -> Option<Guard<'a>> {
        self.first.lock_if_unchanged(self.version)
    }

    /// With its lock.
    #[inline(always)]
    fn commit(&self) {
        if self.fit.allowed {
            self.node.set_words(self.slot, self.after);
        }
    }
}

/// A lock is held for some tens of nanoseconds; to be turned away by one would cost more.
#[cold]
fn look_again(first: &Node<1, 5>) -> Option<u32> {
    (0..LOOKS).find_map(|_| {
        std::hint::spin_loop();
        first.version()
    })
}

/// Which table has the fewest keys.
#[inline(always)]
fn fewest_keys<const N: usize>(tables: &[&TokenTable; N]) -> usize {
    let mut fewest = (tables[0].nodes.len(), 0);
    for (index, table) in tables.iter().enumerate().skip(1) {
        let keys = table.nodes.len();
        if keys < fewest.0 {
            fewest = (keys, index);
        }
    }
    fewest.1
}

/// The tables of all items, if all are token buckets.
#[inline(always)]
fn token_tables<'a, const N: usize>(items: &[MemoryCharge<'a>; N]) -> Option<[&'a TokenTable; N]> {
    let tables = items.each_ref().map(|item| item.limit.token_table.as_deref());
    tables.iter().all(Option::is_some).then(|| tables.map(|table| table.expect("all are there")))
}

impl Inner {
    /// Charges all items or none. `None` if they are not all token buckets.
    #[inline(always)]
    pub(super) fn charge_buckets<'a, const N: usize>(
        &self,
        items: &[MemoryCharge<'a>; N],
        now: Micros,
    ) -> Option<Result<(bool, [ChargedBucket<'a>; N]), Missed>> {
        let tables = token_tables(items)?;
        Some(self.charge_token_tables(items, tables, now))
    }

    #[inline(always)]
    fn charge_token_tables<'a, const N: usize>(
        &self,
        items: &[MemoryCharge<'a>; N],
        tables: [&'a TokenTable; N],
        now: Micros,
    ) -> Result<(bool, [ChargedBucket<'a>; N]), Missed> {
        let keys = items.each_ref().map(|item| self.seeds.fingerprint(item.key));
        let firsts: [&Node<1, 5>; N] = array::from_fn(|index| tables[index].nodes.first_of(keys[index]));
        // Two keys of one chain would need one lock, and one key asked twice has its costs added up.
        for (index, first) in firsts.iter().enumerate() {
            if firsts[..index].iter().any(|other| std::ptr::eq(*first, *other)) {
                return Err(Missed::Unseen);
            }
        }
        let wanted = fewest_keys(&tables);
        let look = |index: usize| {
            SeenBucket::look(tables[index], firsts[index], keys[index], items[index].cost, now)
        };
        let passes = |index: usize, seen: &SeenBucket<'_>| seen.fit.allowed || items[index].shadow;
        let last = look(wanted)?;
        let mut seen = [last; N];
        let mut is_allowed = passes(wanted, &last);
        for index in (0..N).filter(|index| *index != wanted) {
            seen[index] = look(index)?;
            is_allowed &= passes(index, &seen[index]);
        }
        let answer = |is_allowed: bool, seen: [SeenBucket<'_>; N]| {
            let charged = |index: usize| ChargedBucket {
                table: tables[index],
                fit: seen[index].fit,
                cost: items[index].cost,
            };
            Ok((is_allowed, array::from_fn(charged)))
        };
        if !is_allowed {
            let is_unchanged = seen.iter().all(|one| one.first.unchanged_since(one.version));
            return if is_unchanged { answer(false, seen) } else { Err(Missed::Disturbed) };
        }
        let mut guards: [Option<Guard<'_>>; N] = array::from_fn(|_| None);
        for index in (0..N).filter(|index| *index != wanted) {
            guards[index] = Some(seen[index].lock().ok_or(Missed::Disturbed)?);
        }
        for _ in 0..TRIES {
            if let Some(_guard) = seen[wanted].lock() {
                for one in &seen {
                    one.commit();
                }
                return answer(true, seen);
            }
            self.contention.note();
            seen[wanted] = look(wanted)?;
            if !passes(wanted, &seen[wanted]) {
                let is_unchanged = seen[wanted].first.unchanged_since(seen[wanted].version);
                return if is_unchanged { answer(false, seen) } else { Err(Missed::Disturbed) };
            }
        }
        Err(Missed::Disturbed)
    }
}
