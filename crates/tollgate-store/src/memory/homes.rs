//! The home nodes of a table: an array that grows without moving, and a mapping from a hash to its node.
//!
//! Readers of the table hold no lock, so nothing they can reach is moved or freed while the table lives. Elements are in chunks,
//! the first 512 in chunks of 8 and the rest in chunks of 512, so growth allocates little more than is there, at any size.
//! Directories lead to the large chunks: one for every doubling, which shares the chunks of the one before. So one word has all
//! that a reader needs: the number of elements, and the directory with all of them. A reader with an old word finds what it found
//! before; node.rs shows how it notices that a key has moved. `model/` checks this very file, with its own `sync`.

use std::sync::Arc;

use super::sync::{AtomicU64, OnceLock, Ordering};

/// How many elements are in small chunks, and in each large one.
const LARGE: usize = 512;
const LARGE_BITS: usize = 9;

/// How many elements are in a small chunk.
const SMALL: usize = 8;
const SMALL_BITS: usize = 3;
const SMALL_CHUNKS: usize = LARGE / SMALL;

/// Indexes have at most so many bits.
const MOST_BITS: usize = 32;

type Directory<T> = Box<[OnceLock<Arc<[T; LARGE]>>]>;

pub(crate) struct Homes<T> {
    size: AtomicU64,
    small: [OnceLock<Box<[T; SMALL]>>; SMALL_CHUNKS],
    /// By the bits of the indexes that a directory leads to.
    directories: [OnceLock<Directory<T>>; MOST_BITS],
}

/// The number of elements, and the mask of their indexes, in one word.
#[derive(Clone, Copy)]
struct Size(u64);

impl Size {
    fn of(count: usize) -> Size {
        let mask = count.next_power_of_two() - 1;
        Size((count as u64) << 32 | mask as u64)
    }

    #[inline(always)]
    fn count(self) -> usize {
        low_bits(self.0 >> 32)
    }

    #[inline(always)]
    fn mask(self) -> usize {
        low_bits(self.0 & u64::from(u32::MAX))
    }

    /// How many bits the last index has.
    #[inline(always)]
    fn bits(self) -> usize {
        bits_of(self.mask())
    }

    /// The element of a hash: the hash modulo the next power of two, folded back where not yet split.
    #[inline(always)]
    fn index_of(self, hash: u32) -> usize {
        let wide = low_bits(hash.into()) & self.mask();
        if wide < self.count() { wide } else { wide & (self.mask() >> 1) }
    }
}

/// How many bits an index has.
#[inline(always)]
fn bits_of(index: usize) -> usize {
    (usize::BITS - index.leading_zeros()) as usize
}

/// As much of a hash as an index holds.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // Cutting off is the point.
fn low_bits(hash: u64) -> usize {
    hash as usize
}

impl<T: Default> Homes<T> {
    /// One element.
    pub(crate) fn new() -> Homes<T> {
        let homes = Homes {
            size: AtomicU64::new(Size::of(1).0),
            small: std::array::from_fn(|_| OnceLock::new()),
            directories: std::array::from_fn(|_| OnceLock::new()),
        };
        homes.ensure(0);
        homes
    }

    #[inline(always)]
    fn size(&self) -> Size {
        Size(self.size.load(Ordering::Acquire))
    }

    /// How many there are.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.size().count()
    }

    /// The index of a hash.
    #[inline]
    pub(crate) fn index_of(&self, hash: u32) -> usize {
        self.size().index_of(hash)
    }

    /// The index of a hash when there are this many.
    pub(crate) fn index_among(count: usize, hash: u32) -> usize {
        Size::of(count).index_of(hash)
    }

    /// The element of a hash.
    #[inline(always)]
    pub(crate) fn of(&self, hash: u32) -> &T {
        let size = self.size();
        self.at(size.index_of(hash), || size.bits())
    }

    /// The element at `index`, which `ensure` must have been called for.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> &T {
        self.at(index, || bits_of(index))
    }

    /// The element at `index`, which a directory of indexes of so many bits leads to.
    #[inline(always)]
    fn at(&self, index: usize, bits: impl FnOnce() -> usize) -> &T {
        if index < LARGE {
            let Some(chunk) = self.small[index >> SMALL_BITS].get() else { missing(index) };
            return &chunk[index & (SMALL - 1)];
        }
        let directory = self.directories[bits() & (MOST_BITS - 1)].get();
        let chunk = directory.and_then(|chunks| chunks.get(index >> LARGE_BITS)).and_then(OnceLock::get);
        let Some(chunk) = chunk else { missing(index) };
        &chunk[index & (LARGE - 1)]
    }

    /// Makes sure that `index` can be used. Only the single thread that grows the array may call this, for one index after the
    /// other.
    pub(crate) fn ensure(&self, index: usize) {
        if index < LARGE {
            self.small[index >> SMALL_BITS].get_or_init(|| Box::new(std::array::from_fn(|_| T::default())));
            return;
        }
        let bits = bits_of(index);
        let directory = self.directories[bits & (MOST_BITS - 1)].get_or_init(|| {
            let chunks: Directory<T> = (0..(1 << bits) >> LARGE_BITS).map(|_| OnceLock::new()).collect();
            let before = self.directories[(bits - 1) & (MOST_BITS - 1)].get();
            for (chunk, known) in chunks.iter().zip(before.into_iter().flatten()) {
                if let Some(known) = known.get() {
                    let _ = chunk.set(known.clone());
                }
            }
            chunks
        });
        directory[index >> LARGE_BITS].get_or_init(|| {
            let elements: Box<[T]> = (0..LARGE).map(|_| T::default()).collect();
            let elements: Box<[T; LARGE]> =
                elements.try_into().unwrap_or_else(|_| unreachable!("{LARGE} were made"));
            Arc::from(elements)
        });
    }

    /// Has readers find `count` elements from now on, all of which `ensure` was called for.
    pub(crate) fn set_count(&self, count: usize) {
        self.size.store(Size::of(count).0, Ordering::Release);
    }
}

#[cold]
#[inline(never)]
fn missing(index: usize) -> ! {
    unreachable!("element {index} is used before it was made")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Over several doublings: every index has an element of its own, which stays where it is, also for a reader that knows of fewer.
    #[test]
    fn elements_stay_where_they_are_and_are_found_by_every_directory() {
        const MOST: usize = 5_000;
        let homes = Homes::<AtomicU64>::new();
        let mut places: Vec<*const AtomicU64> = Vec::new();
        for index in 0..MOST {
            homes.ensure(index);
            homes.get(index).store(index as u64, Ordering::Relaxed);
            places.push(homes.get(index));
            homes.set_count(index + 1);
            let hash = u32::try_from(index).unwrap();
            assert_eq!((homes.count(), homes.index_of(hash)), (index + 1, index));
            // By the word as it is now, and not only by what will be there later.
            assert!(std::ptr::eq(homes.of(hash / 2), places[index / 2]), "{index}");
        }
        for (index, place) in places.iter().enumerate() {
            assert!(std::ptr::eq(homes.get(index), *place));
            assert_eq!(homes.get(index).load(Ordering::Relaxed), index as u64);
            for count in [index + 1, (2 * index + 1).min(MOST), MOST] {
                assert!(
                    std::ptr::eq(homes.at(index, || Size::of(count).bits()), *place),
                    "{index} of {count}"
                );
            }
        }
    }

    /// An element that is split keeps a hash or hands it to the new one, and no other hash moves.
    #[test]
    fn growing_by_one_moves_hashes_of_one_element_alone() {
        for count in 1..2_000_usize {
            let from = count - (1 << count.ilog2());
            for hash in (0..4_096).map(|hash: u32| hash.wrapping_mul(0x9E37_79B9)) {
                let (before, after) = (Size::of(count).index_of(hash), Size::of(count + 1).index_of(hash));
                assert!(before < count && (after == before || (before == from && after == count)));
            }
        }
    }
}
