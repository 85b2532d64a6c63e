//! The status of a refused gRPC call, as trailers.
//!
//! A code, a message for people, and the same for programs: `google.rpc.Status` with a `RetryInfo`, by which clients time their
//! next try, and a `QuotaFailure` that names the limits. These are four small messages whose fields will not change, so they
//! are written by hand: a field is a tag (number and wire type), then a varint, or a length and bytes.

use tollgate_kernel::Micros;

use super::headers::{Said, visible};
use super::problem::{Reason, denying, detail, longest_wait, violation};

/// The trailer of the code.
pub const STATUS: &str = "grpc-status";

/// The trailer of the message.
pub const MESSAGE: &str = "grpc-message";

/// The trailer of the details.
pub const DETAILS: &str = "grpc-status-details-bin";

/// RESOURCE_EXHAUSTED.
const EXHAUSTED: u32 = 8;

/// UNAVAILABLE: clients may try again.
const UNAVAILABLE: u32 = 14;

/// What a refused call ends with. All texts are visible ASCII, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The value of [`STATUS`].
    pub code: u32,
    /// The value of [`MESSAGE`], percent-encoded.
    pub message: String,
    /// The value of [`DETAILS`], in base64.
    pub details: String,
}

/// The status of a call that is refused.
///
/// ```
/// use tollgate::grpc;
/// use tollgate::headers::Said;
/// use tollgate::problem::Reason;
/// use tollgate::{Limit, Limiter};
///
/// let limit = Limit::token_bucket("1/h".parse()?, 1)?;
/// let outcome = Limiter::new(limit).charge("user:42", 2)?;
/// let said = Said { name: "api", limit: Some(&limit), cost: 2, outcome, shadow: false, unit: None };
/// let status = grpc::status(Reason::QuotaExceeded, [said].into_iter());
/// assert_eq!(status.code, 8);
/// assert_eq!(status.message, "api allows 1/h, bursts of 1; a cost of 2 can never fit");
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn status<'a>(reason: Reason, said: impl Iterator<Item = Said<'a>> + Clone) -> Status {
    let code = match reason {
        Reason::QuotaExceeded | Reason::NoPayer => EXHAUSTED,
        Reason::ReducedCapacity => UNAVAILABLE,
    };
    let message = detail(reason, said.clone());
    let mut details = Vec::new();
    put_number(&mut details, 1, code.into());
    put_bytes(&mut details, 2, message.as_bytes());
    if let Some(wait) = longest_wait(said.clone()) {
        put_any(&mut details, "type.googleapis.com/google.rpc.RetryInfo", &retry_info(wait));
    }
    put_any(&mut details, "type.googleapis.com/google.rpc.QuotaFailure", &quota_failure(said));
    Status { code, message: percent_encoded(&message), details: base64(&details) }
}

/// RetryInfo { retry_delay: Duration { seconds, nanos } }, to the microsecond.
fn retry_info(wait: Micros) -> Vec<u8> {
    let mut duration = Vec::new();
    put_number(&mut duration, 1, wait.get() / 1_000_000);
    put_number(&mut duration, 2, wait.get() % 1_000_000 * 1_000);
    let mut info = Vec::new();
    put_bytes(&mut info, 1, &duration);
    info
}

/// QuotaFailure { violations: Violation { subject, description } … }.
fn quota_failure<'a>(said: impl Iterator<Item = Said<'a>>) -> Vec<u8> {
    let mut failure = Vec::new();
    for limit in denying(said) {
        let mut one = Vec::new();
        put_bytes(&mut one, 1, visible(limit.name).as_bytes());
        put_bytes(&mut one, 2, violation(&limit).as_bytes());
        put_bytes(&mut failure, 1, &one);
    }
    failure
}

/// Status.details: Any { type_url, value }.
fn put_any(out: &mut Vec<u8>, type_url: &str, value: &[u8]) {
    let mut any = Vec::new();
    put_bytes(&mut any, 1, type_url.as_bytes());
    put_bytes(&mut any, 2, value);
    put_bytes(out, 3, &any);
}

/// A field of wire type 0. Zero is what a missing number says.
fn put_number(out: &mut Vec<u8>, field: u8, number: u64) {
    if number != 0 {
        out.push(field << 3);
        put_varint(out, number);
    }
}

/// A field of wire type 2.
fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Seven bits a byte, the lowest first; all but the last have the top bit set.
fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push((number & 0x7f) as u8);
}

/// As `grpc-message` asks for: every byte but visible ASCII and the space, and the percent sign itself, as `%XX`.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' | ..0x20 | 0x7f.. => {
                encoded.push('%');
                encoded.push(HEX[usize::from(byte >> 4)].into());
                encoded.push(HEX[usize::from(byte & 15)].into());
            }
            _ => encoded.push(byte.into()),
        }
    }
    encoded
}

const HEX: &[u8; 16] = b"0123456789ABCDEF";

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The standard alphabet, without padding, as gRPC prefers.
fn base64(bytes: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |index| u32::from(three.get(index).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        // n bytes fill n + 1 characters.
        for character in 0..=three.len() {
            encoded.push(BASE64[(bits >> (18 - 6 * character) & 63) as usize].into());
        }
    }
    encoded
}
