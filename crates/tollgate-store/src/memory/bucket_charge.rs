//! A charge over two or three token buckets, the most common charge over several limits: its fast path, without the parts that
//! other strategies need.
//!
//! Contention is highest in the limit with the fewest keys, often one key for all callers. So that key is read and locked last,
//! with the others locked already, and only it is read again, a few times, if another thread was faster. No thread waits for a
//! lock while it holds one. `model/` checks the order of locks under every interleaving.

use tollgate_kernel::{Cost, Fit, Micros};

use super::cell::Cell;
use super::charge::Missed;
use super::node::{Fingerprint, Guard, Node};
use super::shape::TokenTable;
use super::table::LOOKS;
use super::{ChargedBucket, Inner, MemoryCharge};

/// How often the key that all want is tried, with the others locked.
const TRIES: usize = 16;

/// A bucket as read without its lock, and its state after the charge.
#[derive(Clone, Copy)]
struct SeenBucket<'a> {
    first: &'a Node<1, 6>,
    /// Valid only as long as the first node has this version.
    version: u32,
    node: &'a Node<1, 6>,
    slot: usize,
    after: [u64; 1],
    fit: Fit,
}

impl<'a> SeenBucket<'a> {
    #[inline(always)]
    fn look(
        table: &'a TokenTable,
        first: &'a Node<1, 6>,
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
    fn is_unchanged(&self) -> bool {
        self.first.unchanged_since(self.version)
    }

    #[inline(always)]
    fn lock(&self) -> Option<Guard<'a>> {
        self.first.lock_if_unchanged(self.version)
    }

    /// With its lock.
    #[inline(always)]
    fn commit(&self) {
        if self.fit.is_allowed() {
            self.node.set_words(self.slot, self.after);
        }
    }
}

/// A lock is held for some tens of nanoseconds; to be turned away by one would cost more.
#[cold]
fn look_again(first: &Node<1, 6>) -> Option<u32> {
    (0..LOOKS).find_map(|_| {
        std::hint::spin_loop();
        first.version()
    })
}

/// A key of a charge, and where it is.
struct BucketKey<'a, 'i> {
    table: &'a TokenTable,
    first: &'a Node<1, 6>,
    key: Fingerprint,
    charge: &'i MemoryCharge<'a>,
}

impl<'a> BucketKey<'a, '_> {
    #[inline(always)]
    fn look(&self, now: Micros) -> Result<SeenBucket<'a>, Missed> {
        SeenBucket::look(self.table, self.first, self.key, self.charge.cost, now)
    }

    #[inline(always)]
    fn passes(&self, seen: &SeenBucket<'_>) -> bool {
        seen.fit.is_allowed() || self.charge.shadow
    }

    /// Two keys of one chain would need the same lock, and a repeated key needs the sum of its costs.
    #[inline(always)]
    fn shares_chain(&self, other: &BucketKey<'_, '_>) -> bool {
        std::ptr::eq(self.first, other.first)
    }

    #[inline(always)]
    fn table_len(&self) -> usize {
        self.table.nodes.len()
    }

    #[inline(always)]
    fn charged(&self, fit: Fit) -> ChargedBucket<'a> {
        ChargedBucket { table: self.table, fit, cost: self.charge.cost }
    }
}

/// Charges both keys or none: whether they were, and how each fits. `last` is looked at and locked last.
#[inline(always)]
fn charge_pair(
    other: &BucketKey<'_, '_>,
    last: &BucketKey<'_, '_>,
    now: Micros,
    disturbed: impl Fn(),
) -> Result<(bool, Fit, Fit), Missed> {
    let seen = other.look(now)?;
    if !other.passes(&seen) {
        let seen_last = last.look(now)?;
        let is_unchanged = seen.is_unchanged() && seen_last.is_unchanged();
        return if is_unchanged { Ok((false, seen.fit, seen_last.fit)) } else { Err(Missed::Disturbed) };
    }
    let _guard = seen.lock().ok_or(Missed::Disturbed)?;
    for _ in 0..TRIES {
        let seen_last = last.look(now)?;
        if !last.passes(&seen_last) {
            let is_unchanged = seen_last.is_unchanged();
            return if is_unchanged { Ok((false, seen.fit, seen_last.fit)) } else { Err(Missed::Disturbed) };
        }
        if let Some(_guard) = seen_last.lock() {
            seen.commit();
            seen_last.commit();
            return Ok((true, seen.fit, seen_last.fit));
        }
        disturbed();
    }
    Err(Missed::Disturbed)
}

/// The same for more than one other key.
#[inline(always)]
fn charge_several<const M: usize>(
    others: [&BucketKey<'_, '_>; M],
    last: &BucketKey<'_, '_>,
    now: Micros,
    disturbed: impl Fn(),
) -> Result<(bool, [Fit; M], Fit), Missed> {
    let mut seen = [others[0].look(now)?; M];
    let mut is_allowed = others[0].passes(&seen[0]);
    for index in 1..M {
        seen[index] = others[index].look(now)?;
        is_allowed &= others[index].passes(&seen[index]);
    }
    let mut fits = [seen[0].fit; M];
    for index in 1..M {
        fits[index] = seen[index].fit;
    }
    if !is_allowed {
        let seen_last = last.look(now)?;
        let is_unchanged = seen_last.is_unchanged() && seen.iter().all(SeenBucket::is_unchanged);
        return if is_unchanged { Ok((false, fits, seen_last.fit)) } else { Err(Missed::Disturbed) };
    }
    let mut guards: [Option<Guard<'_>>; M] = [const { None }; M];
    for index in 0..M {
        guards[index] = Some(seen[index].lock().ok_or(Missed::Disturbed)?);
    }
    for _ in 0..TRIES {
        let seen_last = last.look(now)?;
        if !last.passes(&seen_last) {
            let is_unchanged = seen_last.is_unchanged();
            return if is_unchanged { Ok((false, fits, seen_last.fit)) } else { Err(Missed::Disturbed) };
        }
        if let Some(_guard) = seen_last.lock() {
            seen.iter().for_each(SeenBucket::commit);
            seen_last.commit();
            return Ok((true, fits, seen_last.fit));
        }
        disturbed();
    }
    Err(Missed::Disturbed)
}

impl Inner {
    /// Where a key is, if its limit is a token bucket.
    #[inline(always)]
    fn bucket_key<'a, 'i>(&self, charge: &'i MemoryCharge<'a>) -> Option<BucketKey<'a, 'i>> {
        let table = charge.limit.token_table.as_deref()?;
        let key = self.seeds.fingerprint(charge.key);
        Some(BucketKey { table, first: table.nodes.first_of(key), key, charge })
    }

    /// Charges both or none. `None` if they are not both token buckets.
    #[inline(always)]
    pub(super) fn charge_two_buckets(
        &self,
        one: &MemoryCharge<'_>,
        two: &MemoryCharge<'_>,
        now: Micros,
    ) -> Option<Result<(bool, Fit, Fit), Missed>> {
        let (one, two) = (self.bucket_key(one)?, self.bucket_key(two)?);
        if one.shares_chain(&two) {
            return Some(Err(Missed::Unseen));
        }
        let disturbed = || self.contention.note();
        if one.table_len() <= two.table_len() {
            let charged = charge_pair(&two, &one, now, disturbed);
            Some(charged.map(|(is_allowed, two, one)| (is_allowed, one, two)))
        } else {
            Some(charge_pair(&one, &two, now, disturbed))
        }
    }

    /// The same for three.
    #[inline(never)]
    pub(super) fn charge_three_buckets<'a>(
        &self,
        charges: &[MemoryCharge<'a>; 3],
        now: Micros,
    ) -> Option<Result<(bool, [ChargedBucket<'a>; 3]), Missed>> {
        let [one, two, three] = charges;
        let all = [self.bucket_key(one)?, self.bucket_key(two)?, self.bucket_key(three)?];
        let [one, two, three] = &all;
        if one.shares_chain(two) || one.shares_chain(three) || two.shares_chain(three) {
            return Some(Err(Missed::Unseen));
        }
        let last = (0..3).min_by_key(|&index| all[index].table_len()).unwrap_or_default();
        let others = [(last + 1) % 3, (last + 2) % 3];
        let disturbed = || self.contention.note();
        let charged = charge_several(others.map(|index| &all[index]), &all[last], now, disturbed);
        Some(charged.map(|(allowed, fits, fit_last)| {
            let mut charged = [all[last].charged(fit_last); 3];
            for (index, fit) in others.into_iter().zip(fits) {
                charged[index] = all[index].charged(fit);
            }
            (allowed, charged)
        }))
    }
}
