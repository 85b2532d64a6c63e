//! Answers in bytes, all of one read in one buffer.

use std::fmt::Display;

/// How much of a stranger's text an error shows, and how long an error is.
const SHOWN: usize = 64;
const LONGEST: usize = 512;

/// Answers that are not sent yet.
pub(super) struct Reply {
    pub(super) bytes: Vec<u8>,
    /// Whether the peer asked for the third version of the protocol, which has maps and another nothing.
    pub(super) is_resp3: bool,
}

impl Reply {
    pub(super) fn new() -> Reply {
        Reply { bytes: Vec::new(), is_resp3: false }
    }

    pub(super) fn simple(&mut self, text: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(text.as_bytes());
        self.end();
    }

    /// An error, beginning with its kind. Whatever is in it, it stays one line.
    pub(super) fn error(&mut self, text: impl Display) {
        self.bytes.push(b'-');
        let text = text.to_string();
        for character in text.chars().take(LONGEST) {
            let mut buffer = [0; 4];
            match character.is_control() {
                true => self.bytes.push(b' '),
                false => self.bytes.extend_from_slice(character.encode_utf8(&mut buffer).as_bytes()),
            }
        }
        self.end();
    }

    #[inline]
    pub(super) fn integer(&mut self, number: i64) {
        self.head(b':', number);
    }

    /// An array of numbers.
    #[inline]
    pub(super) fn integers(&mut self, numbers: &[i64]) {
        self.array(numbers.len());
        for number in numbers {
            self.integer(*number);
        }
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.count(b'$', bytes.len());
        self.bytes.extend_from_slice(bytes);
        self.end();
    }

    pub(super) fn array(&mut self, count: usize) {
        self.count(b'*', count);
    }

    /// So many pairs follow.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.is_resp3 {
            true => self.count(b'%', pairs),
            false => self.count(b'*', 2 * pairs),
        }
    }

    pub(super) fn nothing(&mut self) {
        self.bytes.extend_from_slice(if self.is_resp3 { b"_\r\n" } else { b"$-1\r\n" });
    }

    fn count(&mut self, kind: u8, count: usize) {
        self.head(kind, i64::try_from(count).unwrap_or(i64::MAX));
    }

    #[inline]
    fn head(&mut self, kind: u8, number: i64) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        self.end();
    }

    fn end(&mut self) {
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// What a stranger sent, for an error: its beginning, with nothing in it that could break a line or a terminal.
pub(super) fn shown(bytes: &[u8]) -> String {
    let mut text = bytes[..bytes.len().min(SHOWN)].escape_ascii().to_string();
    if bytes.len() > SHOWN {
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(write: impl Fn(&mut Reply), resp2: &str, resp3: &str) {
        for (is_resp3, expected) in [(false, resp2), (true, resp3)] {
            let mut reply = Reply { is_resp3, ..Reply::new() };
            write(&mut reply);
            assert_eq!(reply.bytes.escape_ascii().to_string(), expected);
        }
    }

    #[test]
    fn answers_are_written_as_each_version_has_them() {
        check(|reply| reply.simple("OK"), r"+OK\r\n", r"+OK\r\n");
        check(|reply| reply.bulk(b"a\r\nb"), r"$4\r\na\r\nb\r\n", r"$4\r\na\r\nb\r\n");
        check(|reply| reply.array(5), r"*5\r\n", r"*5\r\n");
        check(|reply| reply.map(3), r"*6\r\n", r"%3\r\n");
        check(Reply::nothing, r"$-1\r\n", r"_\r\n");
        check(|reply| reply.error("ERR a\r\n+OK\r\n"), r"-ERR a  +OK  \r\n", r"-ERR a  +OK  \r\n");
        for number in [0, 9, 10, -1, 60, 123_456, i64::MAX, i64::MIN] {
            let expected = format!(r":{number}\r\n");
            check(|reply| reply.integer(number), &expected, &expected);
            let expected = format!(r"*2\r\n:{number}\r\n:7\r\n");
            check(|reply| reply.integers(&[number, 7]), &expected, &expected);
        }
        let longest = format!(r"*9\r\n{}", format!(r":{}\r\n", i64::MIN).repeat(9));
        check(|reply| reply.integers(&[i64::MIN; 9]), &longest, &longest);
    }

    #[test]
    fn what_strangers_send_is_shown_short_and_harmless() {
        assert_eq!(shown(b"FOO\r\n\x1b[2J\xff'"), r"FOO\r\n\x1b[2J\xff\'");
        assert_eq!(shown(&[b'x'; 1_000]).len(), SHOWN + 3);
        let mut reply = Reply::new();
        reply.error("x".repeat(100_000));
        assert_eq!(reply.bytes.len(), LONGEST + 3);
    }
}
