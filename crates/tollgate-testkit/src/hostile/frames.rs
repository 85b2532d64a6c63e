//! HTTP/2 by hand: frames as a peer of any will writes them.

use std::io::{self, Read};

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RESET: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GO_AWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

/// Flags: of SETTINGS and PING, of DATA and HEADERS, of HEADERS.
pub(crate) const ACK: u8 = 1;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

pub(crate) fn read(stream: &mut impl Read) -> io::Result<Frame> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; usize::try_from(length).expect("three bytes")];
    stream.read_exact(&mut payload)?;
    let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    Ok(Frame { kind: head[3], flags: head[4], stream: id, payload })
}

/// What a connection begins with.
pub(crate) fn greeting() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// The header block of a call to the rate limit service.
pub(crate) fn head() -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x04];
    text(&mut block, "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    block.push(0x01);
    text(&mut block, "tollgate");
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers")] {
        field(&mut block, name, value);
    }
    block
}

/// A header field as it is, neither compressed nor remembered.
pub(crate) fn field(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    text(block, name);
    text(block, value);
}

fn text(block: &mut Vec<u8>, text: &str) {
    block.push(u8::try_from(text.len()).ok().filter(|length| *length < 127).expect("a short text"));
    block.extend_from_slice(text.as_bytes());
}

/// A gRPC message that says that it has so many bytes.
pub(crate) fn message(length: usize, bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![0];
    message.extend(u32::try_from(length).expect("a length").to_be_bytes());
    message.extend_from_slice(bytes);
    message
}

/// A call in the domain `edge` with one descriptor of one entry, in protobuf.
pub(crate) fn call(key: &str, value: &str) -> Vec<u8> {
    let entry = [of_field(1, key.as_bytes()), of_field(2, value.as_bytes())].concat();
    [of_field(1, b"edge"), of_field(2, &of_field(1, &entry))].concat()
}

fn of_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(bytes.len()).ok().filter(|length| *length < 128).expect("a short field");
    [&[number << 3 | 2, length], bytes].concat()
}
