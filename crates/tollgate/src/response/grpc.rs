//! The status of a refused gRPC call, as trailers.
//!
//! It has a code, a message for people, and the same for programs: `google.rpc.Status` with a `RetryInfo`, which clients use to
//! time their next try, and a `QuotaFailure` that names the limits. These are four small messages whose fields will not change,
//! so they are encoded by hand: a field is a tag (number and wire type), then a varint, or a length and bytes.

use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tollgate_kernel::Micros;

use super::headers::{ReportedLimit, visible};
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

/// The trailers of a refused call. All texts are visible ASCII.
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
/// use tollgate::headers::ReportedLimit;
/// use tollgate::problem::Reason;
/// use tollgate::{Limit, Limiter};
///
/// let limit = Limit::token_bucket("1/h", 1)?;
/// let outcome = *Limiter::new(limit).charge("user:42", 2)?.numbers();
/// let reported = ReportedLimit { name: "api", limit: Some(&limit), cost: 2, outcome, shadow: false, unit: None };
/// let status = grpc::status(Reason::QuotaExceeded, [reported].into_iter());
/// assert_eq!(status.code, 8);
/// assert_eq!(status.message, "api allows 1/h, bursts of 1; a cost of 2 can never fit");
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn status<'a>(reason: Reason, limits: impl Iterator<Item = ReportedLimit<'a>> + Clone) -> Status {
    let code = match reason {
        Reason::QuotaExceeded | Reason::NoKey => EXHAUSTED,
        Reason::ReducedCapacity => UNAVAILABLE,
    };
    let message = detail(reason, limits.clone());
    let mut details = Vec::new();
    put_number(&mut details, 1, code.into());
    put_bytes(&mut details, 2, message.as_bytes());
    if let Some(wait) = longest_wait(limits.clone()) {
        put_any(&mut details, "type.googleapis.com/google.rpc.RetryInfo", &retry_info(wait));
    }
    put_any(&mut details, "type.googleapis.com/google.rpc.QuotaFailure", &quota_failure(limits));
    Status { code, message: percent_encoded(&message), details: BASE64_STANDARD_NO_PAD.encode(&details) }
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
fn quota_failure<'a>(limits: impl Iterator<Item = ReportedLimit<'a>>) -> Vec<u8> {
    let mut failure = Vec::new();
    for limit in denying(limits) {
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

/// A field of wire type 0. Zero is the default and is left out.
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

/// What `grpc-message` has percent-encoded besides bytes above ASCII: control characters, and the percent sign itself.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// The encoding that `grpc-message` requires.
fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Limit, Outcome};

    use super::*;

    fn reported<'a>(name: &'a str, limit: Option<&'a Limit>, wait_us: Option<u64>) -> ReportedLimit<'a> {
        let capacity = limit.map_or(0, Limit::capacity);
        let outcome = Outcome { capacity, retry_after: wait_us.map(Micros::new), ..Outcome::BLOCKED };
        ReportedLimit { name, limit, cost: 9, outcome, shadow: false, unit: None }
    }

    /// Worked out by hand from the wire format.
    #[test]
    fn the_bytes_are_those_of_the_wire_format() {
        let words = b"a lets nothing through; retry after 2 s";
        let mut bytes = vec![0x08, 8, 0x12, 39];
        bytes.extend(words);
        bytes.extend([0x1a, 54, 0x0a, 40]);
        bytes.extend(b"type.googleapis.com/google.rpc.RetryInfo");
        bytes.extend([0x12, 10, 0x0a, 8, 0x08, 1, 0x10, 0x80, 0xca, 0xb5, 0xee, 0x01]); // 1 s, 500,000,000 ns
        bytes.extend([0x1a, 93, 0x0a, 43]);
        bytes.extend(b"type.googleapis.com/google.rpc.QuotaFailure");
        bytes.extend([0x12, 46, 0x0a, 44, 0x0a, 1, b'a', 0x12, 39]);
        bytes.extend(words);
        let status = status(Reason::QuotaExceeded, [reported("a", None, Some(1_500_000))].into_iter());
        assert_eq!(BASE64_STANDARD_NO_PAD.decode(&status.details).unwrap(), bytes);
    }

    #[test]
    fn a_client_decodes_the_status() {
        let window = Limit::fixed_window(5, Micros::from_secs(60)).unwrap();
        let never = "b allows 5 per 1m window; a cost of 9 can never fit";
        let soon = "a allows 5 per 1m window; retry after 1 s";
        let later = "b allows 5 per 1m window; retry after 8000 s";
        let limits = |a, b| vec![reported("a", Some(&window), a), reported("b", Some(&window), b)];
        let watching = ReportedLimit { shadow: true, ..reported("w", Some(&window), None) };
        let both =
            |one: &str, other: &str| vec![("a".to_owned(), one.into()), ("b".to_owned(), other.into())];
        for (reason, limits, code, message, wait, violations) in [
            (
                Reason::QuotaExceeded,
                limits(Some(1), Some(8_000_000_000)),
                8,
                format!("{soon}. {later}"),
                Some((8_000, 0)),
                both(soon, later),
            ),
            (
                Reason::QuotaExceeded,
                limits(Some(1), None),
                8,
                format!("{soon}. {never}"),
                None,
                both(soon, never),
            ),
            (
                Reason::ReducedCapacity,
                vec![reported("a", Some(&window), Some(7)), watching],
                14,
                "the counters cannot be reached at the moment; retry after 1 s".to_owned(),
                Some((0, 7_000)),
                vec![("a".to_owned(), soon.to_owned())],
            ),
            (
                Reason::NoKey,
                vec![reported("a", None, None)],
                8,
                "the request has no key, or a malformed one".to_owned(),
                None,
                vec![("a".to_owned(), "a lets nothing through".to_owned())],
            ),
        ] {
            let status = status(reason, limits.into_iter());
            assert_eq!((status.code, &status.message), (code, &message));
            let read = read(&BASE64_STANDARD_NO_PAD.decode(&status.details).unwrap());
            assert_eq!(read, Read { code: code.into(), message, wait, violations });
        }
    }

    #[test]
    fn messages_are_percent_encoded() {
        for (text, encoded) in [
            ("plain; words 1", "plain; words 1"),
            ("100%", "100%25"),
            ("a\r\nb~\u{7f}", "a%0D%0Ab~%7F"),
            ("é", "%C3%A9"),
        ] {
            assert_eq!(percent_encoded(text), encoded);
        }
    }

    /// The details as a client decodes them.
    #[derive(Debug, Default, PartialEq)]
    struct Read {
        code: u64,
        message: String,
        wait: Option<(u64, u64)>,
        violations: Vec<(String, String)>,
    }

    fn read(bytes: &[u8]) -> Read {
        let mut read = Read::default();
        for (field, number, bytes) in fields(bytes) {
            match field {
                1 => read.code = number,
                2 => read.message = text(bytes),
                _ => match fields(bytes)[..] {
                    [(1, _, b"type.googleapis.com/google.rpc.RetryInfo"), (2, _, info)] => {
                        let [(1, _, duration)] = fields(info)[..] else { panic!("{info:?}") };
                        let part = |wanted| {
                            fields(duration).iter().find(|part| part.0 == wanted).map_or(0, |part| part.1)
                        };
                        read.wait = Some((part(1), part(2)));
                    }
                    [(1, _, b"type.googleapis.com/google.rpc.QuotaFailure"), (2, _, failure)] => {
                        for (_, _, violation) in fields(failure) {
                            let [(1, _, subject), (2, _, words)] = fields(violation)[..] else {
                                panic!("{violation:?}")
                            };
                            read.violations.push((text(subject), text(words)));
                        }
                    }
                    _ => panic!("{bytes:?}"),
                },
            }
        }
        read
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    /// The fields of a message: number, and its varint or its bytes.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let number = varint(&mut bytes);
            if tag & 7 == 2 {
                let (inside, rest) = bytes.split_at(usize::try_from(number).unwrap());
                found.push((tag >> 3, 0, inside));
                bytes = rest;
            } else {
                assert_eq!(tag & 7, 0, "a wire type that is not used");
                found.push((tag >> 3, number, &[][..]));
            }
        }
        found
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let end = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
        let (number, rest) = bytes.split_at(end + 1);
        *bytes = rest;
        number.iter().rev().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f))
    }
}
