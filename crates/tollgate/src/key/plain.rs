//! Whether a text is plain, and so already canonical.
//!
//! Answers this for nearly every key in one pass over its bytes, eight at a time in ordinary registers: no allocation, no branch
//! per byte, no `unsafe`. It never refuses a text and never accepts a malformed one. A text that is not plain takes the slow path
//! in `key.rs`, which has all the rules.

use super::MAX_PART;

/// The result of the fast pass.
pub(super) enum Plain {
    /// Plain ASCII in one to three parts: already canonical.
    Canonical,
    /// The same, but `default:` is to be left out.
    InDefault,
    /// Anything else, valid or not.
    No,
}

/// One of each byte of a word, to be multiplied.
const EACH: u64 = 0x0101_0101_0101_0101;

/// The top bit of each byte: where the tests below leave their answers.
const TOP: u64 = 0x80 * EACH;

impl Plain {
    /// Looks at eight bytes at a time, once. The answers are the top bits of the bytes. Only a byte that is not plain carries
    /// or borrows, and the lowest such byte of a word is answered rightly: no word with one passes (0xff alone is found by
    /// `below_space`), and in a word without one every answer is exact, the count of separators too.
    #[inline]
    pub(super) fn of(bytes: &[u8]) -> Plain {
        let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return Plain::No };
        // No more than one part's worth of bytes, so that no part can be too long.
        if bytes.len() > MAX_PART || *first == b':' || *last == b':' {
            return Plain::No;
        }
        let seen = Seen::of(bytes);
        // Four separators in one lane are too many anyway; without them the sum below fits its byte.
        if (seen.odd & TOP) | (seen.separators & (0xfc * EACH)) != 0 {
            return Plain::No;
        }
        match seen.separators.wrapping_mul(EACH) >> 56 {
            0 => Plain::Canonical,
            1 if bytes.starts_with(b"default:") => Plain::InDefault,
            1 => Plain::Canonical,
            // Of two, the second must not follow at once: that part would be empty.
            2 if bytes.iter().position(|&byte| byte == b':').is_some_and(|at| bytes[at + 1] != b':') => {
                Plain::Canonical
            }
            _ => Plain::No,
        }
    }

    /// Whether this is plain, and one part: canonical after any prefix.
    #[inline]
    pub(super) fn is_one_part(bytes: &[u8]) -> bool {
        if bytes.is_empty() || bytes.len() > MAX_PART {
            return false;
        }
        let seen = Seen::of(bytes);
        (seen.odd & TOP) | seen.separators == 0
    }
}

/// What the pass has found so far.
#[derive(Clone, Copy)]
struct Seen {
    /// The top bit of a byte is set if any byte in its place is not plain.
    odd: u64,
    /// One count in each byte, over at most 128 words.
    separators: u64,
}

impl Seen {
    #[inline(always)]
    fn of(bytes: &[u8]) -> Seen {
        match (bytes.len(), bytes.first_chunk(), bytes.last_chunk()) {
            (17..=32, Some(start), Some(end)) => Seen::two_pairs(*start, *end, bytes.len()),
            _ => Seen::words(bytes),
        }
    }

    /// The common case, without a loop: seventeen to thirty-two bytes are two overlapping reads of sixteen. A byte may be found
    /// odd twice, but a separator must be counted once, so the separators of `start` are shifted out of `end`.
    #[inline(always)]
    fn two_pairs(start: [u8; 16], end: [u8; 16], size: usize) -> Seen {
        let (start, end) = (u128::from_le_bytes(start), u128::from_le_bytes(end));
        let after = end >> (8 * (32 - size));
        let [a, b] = halves(start);
        let [c, d] = halves(end);
        let [e, f] = halves(after);
        Seen {
            odd: odd(a) | odd(b) | odd(c) | odd(d),
            separators: separators(a) + separators(b) + separators(e) + separators(f),
        }
    }

    /// Any text, a word at a time.
    #[inline]
    fn words(bytes: &[u8]) -> Seen {
        let mut seen = Seen { odd: 0, separators: 0 };
        let mut look = |word: u64| {
            seen.odd |= odd(word);
            seen.separators += separators(word);
        };
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| look(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let bits = 8 * rest.len();
            let word = match bytes.last_chunk() {
                Some(end) => u64::from_le_bytes(*end) >> (64 - bits),
                None => short_word(rest),
            };
            // Filled up with letters, which change no answer.
            look(word | (u64::from(b'a') * EACH) << bits);
        }
        seen
    }
}

/// Sets the top bit of bytes below space, from delete on, or equal to `%`.
#[inline(always)]
fn odd(word: u64) -> u64 {
    let below_space = word.wrapping_sub(0x20 * EACH);
    let from_delete_on = word.wrapping_add(EACH);
    let percent = (word ^ (0x25 * EACH)).wrapping_sub(EACH);
    below_space | from_delete_on | percent
}

/// One in each byte that is a separator. A byte of zero is none.
#[inline(always)]
fn separators(word: u64) -> u64 {
    let other = (word ^ (0x3a * EACH)).wrapping_add(0x7f * EACH);
    (!other & TOP) >> 7
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // Cutting in two is the point.
fn halves(pair: u128) -> [u64; 2] {
    [pair as u64, (pair >> 64) as u64]
}

/// One to seven bytes as the low end of a word, without a loop: two reads that overlap, or three single bytes.
#[inline]
fn short_word(bytes: &[u8]) -> u64 {
    let at = |index: usize| u64::from(bytes[index]) << (8 * index);
    let size = bytes.len();
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(start), Some(end)) => {
            u64::from(u32::from_le_bytes(*start)) | u64::from(u32::from_le_bytes(*end)) << (8 * (size - 4))
        }
        _ => at(0) | at(size / 2) | at(size - 1),
    }
}

#[cfg(test)]
mod tests {
    use crate::key::{Key, read};

    /// The fast look must agree with the slow road on every text.
    #[test]
    fn the_fast_look_agrees_with_the_slow_road() {
        for text in &texts() {
            assert_eq!(Key::parse(text).ok(), read(text).ok(), "{text:?}");
        }
    }

    #[cfg(feature = "http")]
    #[test]
    fn one_part_is_plain_text_without_a_separator() {
        let is_plain = |byte| matches!(byte, b' '..=b'~') && !matches!(byte, b':' | b'%');
        for text in &texts() {
            let is_one_part = (1..=1024).contains(&text.len()) && text.bytes().all(is_plain);
            assert_eq!(super::Plain::is_one_part(text.as_bytes()), is_one_part, "{text:?}");
        }
    }

    /// Each character at each place, and each length.
    fn texts() -> Vec<String> {
        let mut texts = vec![String::new()];
        for size in 1..=34 {
            for at in 0..size {
                for character in (0..=0x2ff).filter_map(char::from_u32) {
                    let mut text: Vec<char> = vec!['x'; size];
                    text[at] = character;
                    texts.push(text.into_iter().collect());
                }
                for other in 0..size {
                    let mut text = vec![b'x'; size];
                    (text[at], text[other], text[size / 2]) = (b':', b':', b':');
                    texts.push(String::from_utf8(text).unwrap());
                }
            }
        }
        for size in [1023, 1024, 1025, 1026] {
            texts.push("y".repeat(size));
            texts.push(format!("default:{}", "y".repeat(size)));
            texts.push(":y".repeat(size / 2)[1..].to_owned());
        }
        texts
    }
}
