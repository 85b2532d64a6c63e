//! A buffer for the text of a header value, on the stack unless it is long.
//!
//! It holds only visible ASCII and spaces: numbers, fixed texts, and names that went through [`visible`].

use std::borrow::Cow;

/// Room for the list of some five limits.
const ROOM: usize = 128;

/// The text so far. By hand, because in a profile of the layer a `SmallVec` of bytes took as long as the charge itself.
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

    /// The text so far.
    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        if self.long.is_empty() { &self.room[..self.filled] } else { &self.long }
    }

    pub(super) fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn text(&mut self, text: &str) -> &mut Line {
        let text = text.as_bytes();
        match self.room.get_mut(self.filled..self.filled + text.len()) {
            Some(room) if self.long.is_empty() => {
                room.copy_from_slice(text);
                self.filled += text.len();
            }
            _ => self.text_on_the_heap(text),
        }
        self
    }

    #[cold]
    fn text_on_the_heap(&mut self, text: &[u8]) {
        if self.long.is_empty() {
            self.long.extend_from_slice(&self.room[..self.filled]);
        }
        self.long.extend_from_slice(text);
    }

    #[inline]
    pub(crate) fn number(&mut self, number: u64) -> &mut Line {
        self.text(itoa::Buffer::new().format(number))
    }
}

/// A name as it may appear in a header and in quotes. Policies accept only such names; in any other text the remaining characters
/// are replaced, so that no name can end a line or a string.
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
