//! The text of one field, put together without allocating unless it is unusually long.
//!
//! Only visible ASCII and the space enter: numbers, texts of our own, and names that went through [`visible`].

use std::borrow::Cow;

/// Room for a list of some four limits with long names.
const ROOM: usize = 320;

/// One field's text.
pub(super) struct Line {
    stack: [u8; ROOM],
    len: usize,
    /// All of it, once it did not fit the stack.
    heap: Vec<u8>,
}

impl Line {
    pub(super) fn new() -> Line {
        Line { stack: [0; ROOM], len: 0, heap: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.heap.clear();
    }

    pub(super) fn as_str(&self) -> &str {
        let bytes = if self.heap.is_empty() { &self.stack[..self.len] } else { &self.heap[..] };
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Line {
        self.bytes(text.as_bytes())
    }

    pub(super) fn number(&mut self, mut number: u64) -> &mut Line {
        let mut digits = [b'0'; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] += (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return self.bytes(&digits[first..]);
            }
        }
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Line {
        let end = self.len + bytes.len();
        if self.heap.is_empty() && end <= ROOM {
            self.stack[self.len..end].copy_from_slice(bytes);
            self.len = end;
        } else {
            if self.heap.is_empty() {
                self.heap.extend_from_slice(&self.stack[..self.len]);
            }
            self.heap.extend_from_slice(bytes);
        }
        self
    }
}

/// A name as it may stand in a header and in quotes. Policies let through nothing else; whatever came another way has its
/// other characters replaced, so that no name can end a line or a string.
pub(in crate::report) fn visible(name: &str) -> Cow<'_, str> {
    let is_sound = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
    if name.chars().all(is_sound) {
        return Cow::Borrowed(name);
    }
    Cow::Owned(name.chars().map(|c| if is_sound(c) { c } else { '_' }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_what_was_written_however_long() {
        let mut line = Line::new();
        for number in [0, 7, 10, 1_234_567_890, u64::MAX] {
            line.clear();
            assert_eq!(line.text("q=").number(number).as_str(), format!("q={number}"));
        }
        for length in [ROOM - 1, ROOM, ROOM + 1, 3 * ROOM] {
            line.clear();
            let text = "x".repeat(length);
            assert_eq!(line.text(&text).number(42).text("!").as_str(), format!("{text}42!"));
            line.clear();
            assert_eq!(line.as_str(), "");
            assert_eq!(line.text("short again").as_str(), "short again");
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
