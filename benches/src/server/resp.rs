//! The protocol of Redis, as many commands at once as pipelines have.

use std::sync::Arc;

use super::load::{Heard, Speech};

/// How many commands are sent at once.
pub(crate) const DEPTH: usize = 64;

/// Commands of one kind over all keys, and what their answers look like.
pub(crate) struct Resp {
    pipelines: Arc<[Vec<u8>]>,
    answer: Answer,
}

/// How answers are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    /// How many lines one has.
    pub(crate) lines: usize,
    pub(crate) begins: &'static [u8],
}

impl Resp {
    pub(crate) fn new(pipelines: Arc<[Vec<u8>]>, answer: Answer) -> Resp {
        Resp { pipelines, answer }
    }
}

/// All commands in the order of the keys, in pipelines.
pub(crate) fn pipelines<'k>(keys: &'k [String], command: impl Fn(&'k str) -> Vec<&'k str>) -> Arc<[Vec<u8>]> {
    let write = |keys: &'k [String]| {
        let mut bytes = Vec::new();
        for key in keys {
            let parts = command(key);
            bytes.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
            for part in parts {
                bytes.extend_from_slice(format!("${}\r\n{part}\r\n", part.len()).as_bytes());
            }
        }
        bytes
    };
    keys.chunks_exact(DEPTH).map(write).collect()
}

impl Speech for Resp {
    fn ask(&mut self, number: usize, out: &mut Vec<u8>) -> usize {
        out.extend_from_slice(&self.pipelines[number % self.pipelines.len()]);
        DEPTH
    }

    fn hear(&mut self, bytes: &[u8], heard: &mut Heard, _out: &mut Vec<u8>) -> usize {
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            // An error is a line, whatever was asked.
            let lines = if rest.first() == Some(&b'-') { 1 } else { self.answer.lines };
            let mut ends = rest.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            let Some((end, _)) = ends.nth(lines - 1) else { return at };
            heard.note(rest.starts_with(self.answer.begins), &rest[..=end]);
            at += end + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_and_looked_at() {
        let answer = Answer { lines: 3, begins: b"*2\r\n:0" };
        let mut speech = Resp::new(Arc::new([]), answer);
        let bytes = b"*2\r\n:0\r\n:7\r\n-ERR no\r\n*2\r\n:1\r\n:7\r\n*2\r\n:0\r\n:";
        let mut heard = Heard::default();
        assert_eq!(speech.hear(bytes, &mut heard, &mut Vec::new()), bytes.len() - 9);
        assert_eq!((heard.answers, heard.astray), (3, 2));
        assert_eq!(heard.first.as_deref(), Some(&bytes[..12]));
    }

    #[test]
    fn commands_are_written_as_arrays() {
        let keys = vec!["k".to_string(); DEPTH + 1];
        let pipelines = pipelines(&keys, |key| vec!["INCR", key]);
        assert_eq!(pipelines.len(), 1);
        assert_eq!(pipelines[0], b"*2\r\n$4\r\nINCR\r\n$1\r\nk\r\n".repeat(DEPTH));
    }
}
