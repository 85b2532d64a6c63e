//! The text of a field of an answer, on the stack unless it is long.
//!
//! Only visible ASCII and the space enter: numbers, texts of our own, and names that went through [`visible`].

use std::borrow::Cow;

/// Room for the list of some five limits.
const ROOM: usize = 128;

/// All numbers of two digits, one after the other.
const PAIRS: &[u8; 200] = b"00010203040506070809101112131415161718192021222324252627282930313233343536373839\
4041424344454647484950515253545556575859606162636465666768697071727374757677787980818283848586878889\
90919293949596979899";

/// The text, as far as it is written.
pub(crate) struct Line {
    room: [u8; ROOM],
    filled: usize,
    /// All of it, once there is no more room.
    long: Vec<u8>,
}

impl Default for Line {
    #[inline]
    fn default() -> Line {
        Line { room: [0; ROOM], filled: 0, long: Vec::new() }
    }
}

impl Line {
    pub(super) fn clear(&mut self) {
        self.filled = 0;
        self.long.clear();
    }

    /// What is written so far.
    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        if self.long.is_empty() { &self.room[..self.filled] } else { &self.long }
    }

    pub(super) fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn text(&mut self, text: &str) -> &mut Line {
        self.bytes(text.as_bytes());
        self
    }

    #[inline]
    fn bytes(&mut self, more: &[u8]) {
        match self.room.get_mut(self.filled..self.filled + more.len()) {
            Some(room) if self.long.is_empty() => {
                room.copy_from_slice(more);
                self.filled += more.len();
            }
            _ => self.bytes_on_the_heap(more),
        }
    }

    #[cold]
    fn bytes_on_the_heap(&mut self, more: &[u8]) {
        if self.long.is_empty() {
            self.long.extend_from_slice(&self.room[..self.filled]);
        }
        self.long.extend_from_slice(more);
    }

    #[inline]
    pub(crate) fn number(&mut self, number: u64) -> &mut Line {
        if number < 10 {
            self.bytes(&[b'0' + (number % 10) as u8]);
            return self;
        }
        self.long_number(number)
    }

    fn long_number(&mut self, mut number: u64) -> &mut Line {
        // Two digits at a time from the right: dividing is what takes the time.
        let mut digits = [0; 20];
        let mut first = digits.len();
        while number >= 10 {
            let pair = (number % 100) as usize * 2;
            number /= 100;
            first -= 2;
            digits[first..first + 2].copy_from_slice(&PAIRS[pair..pair + 2]);
        }
        // A last digit alone.
        if number > 0 {
            first -= 1;
            digits[first] = b'0' + (number % 10) as u8;
        }
        self.bytes(&digits[first..]);
        self
    }
}

/// A name as it may stand in a header and in quotes. Policies let through nothing else; whatever came another way has its
/// other characters replaced, so that no name can end a line or a string.
pub(in crate::response) fn visible(name: &str) -> Cow<'_, str> {
    let is_sound = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
    if name.bytes().all(|byte| is_sound(byte.into())) {
        return Cow::Borrowed(name);
    }
    Cow::Owned(name.chars().map(|c| if is_sound(c) { c } else { '_' }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_what_was_written_however_long() {
        for number in [0, 7, 9, 10, 19, 99, 100, 101, 110, 999, 1_000, 1_234_567_890, u64::MAX - 1, u64::MAX]
        {
            assert_eq!(Line::default().text("q=").number(number).as_str(), format!("q={number}"));
        }
        let tens = std::iter::successors(Some(1_u64), |ten| ten.checked_mul(10));
        for number in tens.flat_map(|ten| [ten - 1, ten, ten + 1]) {
            assert_eq!(Line::default().number(number).as_str(), number.to_string());
        }
        for length in [ROOM - 1, ROOM, ROOM + 1, 3 * ROOM] {
            let text = "x".repeat(length);
            let mut line = Line::default();
            assert_eq!(line.text(&text).number(42).text("!").as_str(), format!("{text}42!"));
        }
    }

    #[test]
    fn a_name_cannot_leave_its_quotes() {
        for (name, shown) in [
            ("per-user.v2_x", "per-user.v2_x"),
            ("a\r\nset-cookie: x", "a__set-cookie:_x"),
            ("a\"b\\c", "a_b_c"),
            ("é\u{7f}\0", "___"),
            ("", ""),
        ] {
            assert_eq!(visible(name), shown);
        }
    }
}
