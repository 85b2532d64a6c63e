//! An array that grows without moving: what has been handed out stays where it is.
//!
//! Readers of the table hold no lock, so nothing under them may be moved or freed while the table lives. The array is made of
//! segments, eight to every doubling, so growth allocates at most an eighth more than is there, at any size.

use std::sync::OnceLock;

/// Segments enough for every index below 2^32.
const SEGMENTS: usize = 8 * 30;

pub(crate) struct Chunks<T> {
    segments: Box<[OnceLock<Box<[T]>>]>,
}

impl<T: Default> Chunks<T> {
    pub(crate) fn new() -> Self {
        Chunks { segments: (0..SEGMENTS).map(|_| OnceLock::new()).collect() }
    }

    /// Which segment holds an index, and where. Segment sizes are 1 eight times, 2 eight times, 4 eight times …
    #[inline]
    fn locate(index: usize) -> (usize, usize, usize) {
        let shifted = index + 8;
        let shift = shifted.ilog2() as usize - 3;
        (shift * 8 + (shifted >> shift) - 8, shifted & ((1 << shift) - 1), 1 << shift)
    }

    /// The element at `index`, which `ensure` must have been called for.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> &T {
        let (segment, offset, _) = Self::locate(index);
        match self.segments[segment].get() {
            Some(elements) => &elements[offset],
            None => unreachable!("element {index} is used before it was made"),
        }
    }

    /// Makes sure that `index` can be used, and returns it.
    pub(crate) fn ensure(&self, index: usize) -> &T {
        let (segment, offset, size) = Self::locate(index);
        &self.segments[segment].get_or_init(|| (0..size).map(|_| T::default()).collect())[offset]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for index in 0..100_000 {
            let (segment, offset, size) = Chunks::<u8>::locate(index);
            assert_eq!((segment, offset), expected, "index {index}");
            expected = if offset + 1 == size { (segment + 1, 0) } else { (segment, offset + 1) };
        }
        assert!(Chunks::<u8>::locate(u32::MAX as usize).0 < SEGMENTS);
    }

    #[test]
    fn elements_stay_where_they_are() {
        let chunks = Chunks::<u64>::new();
        let first = std::ptr::from_ref(chunks.ensure(0));
        for index in 0..1000 {
            chunks.ensure(index);
        }
        assert_eq!(first, std::ptr::from_ref(chunks.get(0)));
    }
}
