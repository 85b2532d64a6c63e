//! gRPC over HTTP/2, just enough of it to make unary calls: frames are written by hand and answers not decoded further than
//! their message, so that the client costs a fraction of any server.
//!
//! Header fields go the way real clients send them: in full with the first call of a connection, after that by their place in
//! the table that both sides keep (RFC 7541). What the server says in its own table is not looked at: a call that failed has no
//! message, and that is noticed.

use std::sync::Arc;

use super::load::{Heard, Speech};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const FAREWELL: u8 = 7;
const WINDOW: u8 = 8;

const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// How many bytes of messages the server may send before it is given leave for more.
const LEAVE: u32 = 1 << 20;

/// `:method: POST` and `:scheme: http` of the table that everybody has.
const ALWAYS: [u8; 2] = [0x83, 0x86];

/// The fields that the first call puts into the table.
const FIELDS: [(&str, &str); 5] = [
    (":path", "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("user-agent", "tollgate-benches"),
];

/// Where the first of them is once all are in the table: the last to come has place 62.
const PLACE_OF_FIRST: usize = 61 + FIELDS.len();

/// Calls, and how the message of an answer begins.
pub(crate) struct Http2 {
    /// Messages as gRPC frames them.
    messages: Arc<[Vec<u8>]>,
    /// How many calls are open at once.
    calls: usize,
    begins: &'static [u8],
    next_stream: u32,
    /// The fields of every call but the first.
    fields: Vec<u8>,
    /// Whether the message of the call that is being answered was as it should be; answers of several calls may come mixed,
    /// which differ by their number only.
    good: u64,
    taken: u32,
}

impl Http2 {
    pub(crate) fn new(messages: Arc<[Vec<u8>]>, calls: usize, begins: &'static [u8]) -> Http2 {
        Http2 { messages, calls, begins, next_stream: 1, fields: fields(false), good: 0, taken: 0 }
    }
}

/// A message with gRPC's five bytes before it: not compressed, and so long.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0], &length[..], message].concat()
}

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&[length[1], length[2], length[3], kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// The fields of a call.
fn fields(is_first: bool) -> Vec<u8> {
    let mut block = ALWAYS.to_vec();
    for (index, (name, value)) in FIELDS.into_iter().enumerate() {
        if is_first {
            // To be kept, with its name in full. All are shorter than the 127 bytes that one byte of length can say.
            block.push(0x40);
            for text in [name, value] {
                block.push(u8::try_from(text.len()).unwrap_or(0x7f) & 0x7f);
                block.extend_from_slice(text.as_bytes());
            }
        } else {
            block.push(0x80 | u8::try_from(PLACE_OF_FIRST - index).unwrap_or_default());
        }
    }
    block
}

impl Speech for Http2 {
    fn greet(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(PREFACE);
        frame(out, SETTINGS, 0, 0, &[]);
        frame(out, WINDOW, 0, 0, &LEAVE.to_be_bytes());
    }

    fn ask(&mut self, number: usize, out: &mut Vec<u8>) -> usize {
        for call in 0..self.calls {
            let message = &self.messages[(number * self.calls + call) % self.messages.len()];
            match self.next_stream {
                1 => frame(out, HEADERS, END_HEADERS, 1, &fields(true)),
                later => frame(out, HEADERS, END_HEADERS, later, &self.fields),
            }
            frame(out, DATA, END_STREAM, self.next_stream, message);
            self.next_stream += 2;
        }
        self.calls
    }

    fn hear(&mut self, bytes: &[u8], heard: &mut Heard, out: &mut Vec<u8>) -> usize {
        let mut at = 0;
        while let Some((kind, flags, payload)) = read(&bytes[at..]) {
            at += 9 + payload.len();
            match kind {
                DATA => {
                    // Past the five bytes of gRPC.
                    self.good +=
                        u64::from(payload.get(5..).is_some_and(|message| message.starts_with(self.begins)));
                    self.taken += u32::try_from(payload.len()).unwrap_or(LEAVE);
                    if self.taken > LEAVE / 2 {
                        frame(out, WINDOW, 0, 0, &self.taken.to_be_bytes());
                        self.taken = 0;
                    }
                    heard.first.get_or_insert_with(|| payload.get(5..).unwrap_or_default().to_vec());
                }
                SETTINGS if flags & ACK == 0 => frame(out, SETTINGS, ACK, 0, &[]),
                PING if flags & ACK == 0 => frame(out, PING, ACK, 0, payload),
                _ => {}
            }
            // A call that is given up, or a connection that is, has been answered badly.
            let is_end = matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0;
            if is_end || kind == RESET || kind == FAREWELL {
                let is_good = is_end && self.good > 0;
                self.good -= u64::from(is_good);
                heard.note(is_good, &[]);
            }
        }
        at
    }
}

/// The frame that `bytes` begin with; `None` if there is more of it to come.
fn read(bytes: &[u8]) -> Option<(u8, u8, &[u8])> {
    let &[high, middle, low, kind, flags, ..] = bytes.first_chunk::<9>()?;
    let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
    Some((kind, flags, bytes.get(9..9 + length)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_answered_when_its_stream_ends() {
        let mut speech = Http2::new(Arc::new([]), 1, &[8, 1]);
        let mut bytes = Vec::new();
        frame(&mut bytes, SETTINGS, 0, 0, &[]);
        frame(&mut bytes, HEADERS, END_HEADERS, 1, &[0x88]);
        frame(&mut bytes, DATA, 0, 1, &framed(&[8, 1, 9]));
        frame(&mut bytes, HEADERS, END_HEADERS | END_STREAM, 1, &[]);
        // A call without a message has failed.
        frame(&mut bytes, HEADERS, END_HEADERS | END_STREAM, 3, &[]);
        frame(&mut bytes, RESET, 0, 5, &[0; 4]);
        let whole = bytes.len();
        bytes.extend_from_slice(&[0, 0, 9]);
        let (mut heard, mut text) = (Heard::default(), Vec::new());
        assert_eq!(speech.hear(&bytes, &mut heard, &mut text), whole);
        assert_eq!((heard.answers, heard.astray, heard.first), (3, 2, Some(vec![8, 1, 9])));
        assert_eq!(text, [0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0]);
    }

    #[test]
    fn fields_go_in_full_once() {
        let (first, later) = (fields(true), fields(false));
        assert_eq!(later, [0x83, 0x86, 0xc2, 0xc1, 0xc0, 0xbf, 0xbe]);
        assert_eq!(first[..9], *b"\x83\x86\x40\x05:path");
    }
}
