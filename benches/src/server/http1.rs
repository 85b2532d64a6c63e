//! HTTP/1.1: one POST at a time on a connection that is kept.

use std::sync::Arc;

use super::load::{Heard, Speech};

/// Requests, and how the body of an answer begins.
pub(crate) struct Http1 {
    requests: Arc<[Vec<u8>]>,
    begins: &'static [u8],
}

impl Http1 {
    pub(crate) fn new(requests: Arc<[Vec<u8>]>, begins: &'static [u8]) -> Http1 {
        Http1 { requests, begins }
    }
}

/// A POST of JSON.
pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

impl Speech for Http1 {
    fn ask(&mut self, number: usize, out: &mut Vec<u8>) -> usize {
        out.extend_from_slice(&self.requests[number % self.requests.len()]);
        1
    }

    fn hear(&mut self, bytes: &[u8], heard: &mut Heard, _out: &mut Vec<u8>) -> usize {
        let Some((is_ok, body, size)) = answer(bytes) else { return 0 };
        heard.note(is_ok && body.starts_with(self.begins), body);
        size
    }
}

/// Whether the answer is a 200, its body, and how long it is; `None` if there is more of it to come.
fn answer(bytes: &[u8]) -> Option<(bool, &[u8], usize)> {
    let head = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    // All servers here write names in lower case.
    let length =
        bytes[..head].split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"content-length:"));
    let length: usize = std::str::from_utf8(length?).ok()?.trim().parse().ok()?;
    let body = bytes.get(head + 4..head + 4 + length)?;
    Some((bytes.starts_with(b"HTTP/1.1 200 "), body, head + 4 + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_when_all_of_it_is_there() {
        let text = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ndate: x\r\n\r\nhello";
        for short in 0..text.len() {
            assert_eq!(answer(&text[..short]), None, "{short}");
        }
        assert_eq!(answer(text), Some((true, &b"hello"[..], text.len())));
        let mut heard = Heard::default();
        let mut speech = Http1::new(Arc::new([]), b"help");
        assert_eq!(speech.hear(text, &mut heard, &mut Vec::new()), text.len());
        assert_eq!((heard.answers, heard.astray), (1, 1));
        let refused = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(answer(refused).map(|(is_ok, ..)| is_ok), Some(false));
    }
}
