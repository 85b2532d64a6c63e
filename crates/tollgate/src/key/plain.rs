//! Is this text plain, and canonical as it stands?
//!
//! The answer for nearly every key there is, in one look at its bytes, eight at a time in ordinary registers: no allocation,
//! no branch per byte, no `unsafe`. It never refuses a text and never takes a malformed one; what is not plain goes to the
//! slow road in `key.rs`, which knows the rules.

use super::MAX_PART;

/// What the fast look at a text found.
pub(super) enum Plain {
    /// Plain ASCII in one to three parts: canonical as it stands.
    Canonical,
    /// The same, but `default:` is to be left out.
    InDefault,
    /// Anything else, sound or not.
    No,
}

/// One of each byte of a word, to be multiplied.
const EACH: u64 = 0x0101_0101_0101_0101;

/// The top bit of each byte: where the tests below leave their answers.
const TOP: u64 = 0x80 * EACH;

impl Plain {
    /// Looks at eight bytes at a time, once. The answers are the top bits of the bytes. Only a byte that is not plain carries
    /// or borrows, and the lowest such byte of a word is answered rightly: no word with one passes (0xff alone is told by
    /// `below_space`), and in a word without one every answer is exact, the count of separators too.
    #[inline]
    pub(super) fn of(bytes: &[u8]) -> Plain {
        let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return Plain::No };
        // No more than one part's worth of bytes, so that no part can be too long.
        if bytes.len() > MAX_PART || *first == b':' || *last == b':' {
            return Plain::No;
        }
        let mut odd = 0;
        // One count in each byte, over at most 128 words.
        let mut separators = 0;
        let mut look = |word: u64| {
            let below_space = word.wrapping_sub(0x20 * EACH);
            let from_delete_on = word.wrapping_add(EACH);
            let percent = (word ^ (0x25 * EACH)).wrapping_sub(EACH);
            odd |= below_space | from_delete_on | percent;
            let other = (word ^ (0x3a * EACH)).wrapping_add(0x7f * EACH);
            separators += (!other & TOP) >> 7;
        };
        let mut rest = bytes;
        while let Some((word, after)) = rest.split_first_chunk() {
            look(u64::from_le_bytes(*word));
            rest = after;
        }
        if !rest.is_empty() {
            let bits = 8 * rest.len();
            let word = match bytes.last_chunk() {
                Some(end) => u64::from_le_bytes(*end) >> (64 - bits),
                None => short_word(rest),
            };
            // Filled up with letters, which change no answer.
            look(word | (u64::from(b'a') * EACH) << bits);
        }
        // Four separators in one lane are too many anyway; without them the sum below fits its byte.
        if (odd & TOP) | (separators & (0xfc * EACH)) != 0 {
            return Plain::No;
        }
        match separators.wrapping_mul(EACH) >> 56 {
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

    /// The fast look must agree with the slow road on every text: each character at each place, and each length.
    #[test]
    fn the_fast_look_agrees_with_the_slow_road() {
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
        for text in &texts {
            assert_eq!(Key::parse(text).ok(), read(text).ok(), "{text:?}");
        }
    }
}
