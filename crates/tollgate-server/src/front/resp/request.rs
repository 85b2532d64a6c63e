//! The two commands that ask for a decision, and how their answers are written.
//!
//! `CL.THROTTLE` is redis-cell's: its limit comes with the call, its key is any bytes. Ours is a token bucket of `max_burst + 1`
//! that gains `count` every `period`, in a namespace of its own (`cl`). `TOLLGATE.CHECK` asks for a limit of the policy, and its
//! key is written as everywhere else.

use std::borrow::Cow;

use percent_encoding::percent_encode_byte;
use tollgate::store::{Micros, Outcome};
use tollgate::{Limit, Rate};

use super::parse::{Command, integer};
use super::reply::{Reply, shown};

/// The name under which all calls of `CL.THROTTLE` are counted, in the store and in metrics.
pub(super) const THROTTLE: &str = "cl.throttle";

/// How long a key of `CL.THROTTLE` may be once it is text: what one part of a key may have.
const MOST_TEXT: usize = 1_024;

/// What a decision is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Throttle { key: &'a [u8], bucket: Bucket, quantity: u64 },
    Check { limit: &'a str, key: &'a str, cost: u64 },
}

/// The numbers of `CL.THROTTLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pub(super) burst: u64,
    count: u64,
    period: u64,
}

/// Why a command asks for nothing.
pub(super) type Mistake = Cow<'static, str>;

impl Bucket {
    pub(super) fn limit(&self) -> Result<Limit, tollgate::Error> {
        let rate = Rate::new(self.count, Micros::new(self.period.saturating_mul(1_000_000)))?;
        Ok(Limit::token_bucket(rate, self.burst)?)
    }
}

impl<'a> Request<'a> {
    /// Reads a command, if it is one of the two.
    #[inline]
    pub(super) fn read(command: &Command<'a, '_>) -> Option<Result<Request<'a>, Mistake>> {
        let name = command.name();
        if name.eq_ignore_ascii_case(b"CL.THROTTLE") {
            Some(throttle(command))
        } else if name.eq_ignore_ascii_case(b"TOLLGATE.CHECK") {
            Some(check(command))
        } else {
            None
        }
    }

    /// How much it charges. Zero only looks.
    pub(super) fn cost(&self) -> u64 {
        match self {
            Request::Throttle { quantity, .. } => *quantity,
            Request::Check { cost, .. } => *cost,
        }
    }
}

fn throttle<'a>(command: &Command<'a, '_>) -> Result<Request<'a>, Mistake> {
    let quantity = command.get(4);
    let (Some(key), Some(burst), Some(count), Some(period), 4..=5) =
        (command.get(0), command.get(1), command.get(2), command.get(3), command.count())
    else {
        return Err(
            "ERR Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]".into()
        );
    };
    let bucket = Bucket {
        burst: number("max_burst", burst, 0)?.saturating_add(1),
        count: number("count", count, 1)?,
        period: number("period", period, 1)?,
    };
    let quantity = quantity.map_or(Ok(1), |quantity| number("quantity", quantity, 0))?;
    Ok(Request::Throttle { key, bucket, quantity })
}

fn check<'a>(command: &Command<'a, '_>) -> Result<Request<'a>, Mistake> {
    let (Some(limit), Some(key), 2..=3) = (command.get(0), command.get(1), command.count()) else {
        return Err("ERR Usage: tollgate.check <limit> <key> [<cost>]".into());
    };
    let text = |bytes: &'a [u8], name: &str| {
        std::str::from_utf8(bytes).map_err(|_| Mistake::from(format!("ERR the {name} is not text (UTF-8)")))
    };
    let cost = command.get(2).map_or(Ok(1), |cost| number("cost", cost, 1))?;
    Ok(Request::Check { limit: text(limit, "name of the limit")?, key: text(key, "key")?, cost })
}

#[inline]
fn number(name: &str, text: &[u8], least: i64) -> Result<u64, Mistake> {
    match integer(text) {
        Some(number) if number >= least => Ok(number.unsigned_abs()),
        _ => Err(format!(
            "ERR {name} must be a whole number from {least} to {}, not '{}'",
            i64::MAX,
            shown(text)
        )
        .into()),
    }
}

/// The bytes that stand for themselves.
const IS_PLAIN: [bool; 256] = {
    let mut is_plain = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        is_plain[byte as usize] = byte != b'%' && byte != b':';
        byte += 1;
    }
    is_plain
};

/// The canonical text of a key of `CL.THROTTLE`, in the namespace `cl`; two keys never have the same. Printable ASCII stands for
/// itself; every other byte, and `%`, is `%` with two digits, which like every `%` in a key is written `%25`. The key of no
/// bytes is a lone `%`.
pub(super) fn canonical<'t>(key: &[u8], text: &'t mut Vec<u8>) -> Result<&'t str, Mistake> {
    text.clear();
    text.extend_from_slice(b"cl:");
    let mut size = key.len();
    let mut rest = key;
    while let Some(at) = rest.iter().position(|byte| !IS_PLAIN[usize::from(*byte)]) {
        text.extend_from_slice(&rest[..at]);
        match rest[at] {
            b':' => text.extend_from_slice(b"%3A"),
            other => {
                // Its `%` is encoded itself.
                text.extend_from_slice(b"%25");
                text.extend_from_slice(&percent_encode_byte(other).as_bytes()[1..]);
                size += 2;
            }
        }
        rest = &rest[at + 1..];
    }
    text.extend_from_slice(rest);
    if key.is_empty() {
        text.extend_from_slice(b"%25");
    }
    if size > MOST_TEXT {
        return Err(format!(
            "ERR the key is too long: at most {MOST_TEXT} bytes, of which those that are not printable ASCII count three times"
        )
        .into());
    }
    std::str::from_utf8(text).map_err(|_| "ERR the key cannot be written".into())
}

/// Limited or not, the limit, what remains, seconds to wait (-1 if there is nothing to wait for, or no wait would help), and
/// seconds until the key is full again. Parts of a second are whole ones: a caller that came back earlier would be denied.
#[inline]
pub(super) fn write_throttle(reply: &mut Reply, outcome: &Outcome, quantity: u64) {
    let is_limited = !outcome.allowed && quantity > 0;
    reply.integers(&[
        i64::from(is_limited),
        whole(outcome.capacity),
        whole(outcome.remaining),
        outcome.retry_after.filter(|_| is_limited).map_or(-1, |wait| rounded_up(wait, 1_000_000)),
        rounded_up(outcome.reset_after, 1_000_000),
    ]);
}

/// Allowed or not, what remains (-1 where there is no limit), milliseconds to wait (-1 if no wait would help), until the key is
/// full again, to hold an admitted one back, and the name of the limit.
#[inline]
pub(super) fn write_check(reply: &mut Reply, limit: &str, outcome: &Outcome) {
    let remaining = if *outcome == Outcome::UNLIMITED { -1 } else { whole(outcome.remaining) };
    reply.array(6);
    reply.integer(i64::from(outcome.allowed));
    reply.integer(remaining);
    reply.integer(outcome.retry_after.map_or(-1, |wait| rounded_up(wait, 1_000)));
    reply.integer(rounded_up(outcome.reset_after, 1_000));
    reply.integer(rounded_up(outcome.delay, 1_000));
    reply.bulk(limit.as_bytes());
}

fn whole(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

fn rounded_up(span: Micros, unit: u64) -> i64 {
    whole(span.get().div_ceil(unit))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tollgate::Key;

    use super::super::parse::Spans;
    use super::*;

    #[test]
    fn every_key_has_a_canonical_text_of_its_own() {
        let mut keys: Vec<Vec<u8>> = vec![
            b"".to_vec(),
            b"user123".to_vec(),
            b"cl:x".to_vec(),
            b"%".to_vec(),
            b"%25".to_vec(),
            b"%2525".to_vec(),
            b"%3A".to_vec(),
            b":".to_vec(),
            b"%FF".to_vec(),
            b"default:x".to_vec(),
            "ключ".as_bytes().to_vec(),
            vec![b'a'; 1_024],
            vec![0xff; 341],
        ];
        keys.extend((0..=255).map(|byte| vec![byte]));
        keys.extend((0..=255).map(|byte| vec![b'%', byte]));
        let mut texts: HashMap<String, Vec<u8>> = HashMap::new();
        let mut text = Vec::new();
        for key in keys {
            let text = canonical(&key, &mut text).expect("it is short enough");
            let parsed = Key::parse(text).unwrap_or_else(|error| panic!("{}: {error}", key.escape_ascii()));
            assert_eq!((parsed.canonical(), &*parsed.namespace()), (text, "cl"), "{}", key.escape_ascii());
            if let Some(other) = texts.insert(text.to_owned(), key.clone()) {
                assert_eq!(other, key, "{text}");
            }
        }
        for long in [vec![b'a'; 1_025], vec![0xff; 342], vec![b':'; 1_025]] {
            let mistake = canonical(&long, &mut text).expect_err("it is too long");
            assert!(mistake.contains("at most 1024 bytes"), "{mistake}");
        }
    }

    #[test]
    fn a_command_is_read_or_refused() {
        let of = |arguments: &[&str]| {
            let arguments: String =
                arguments.iter().map(|argument| format!("${}\r\n{argument}\r\n", argument.len())).collect();
            format!("*{}\r\n{arguments}", arguments.matches("$").count())
        };
        for (arguments, expected) in [
            (&["CL.THROTTLE", "a", "9", "5", "1"][..], Ok((10, 1))),
            (&["cl.throttle", "", "9", "5", "1"], Ok((10, 1))),
            (&["CL.THROTTLE", "b", "9", "5", "1", "2"], Ok((10, 2))),
            (&["CL.THROTTLE", "b", "x", "5", "1"], Err("max_burst")),
            (&["CL.THROTTLE", "b", "9", "0", "1"], Err("count must be a whole number from 1")),
            (&["CL.THROTTLE", "b", "9\r\n5\r\n1"], Err("Usage")),
            (&["CL.THROTTLE", "b"], Err("Usage")),
        ] {
            let bytes = of(arguments).into_bytes();
            let mut spans = Spans::new();
            assert_eq!(spans.find(&bytes), Ok(Some(bytes.len())), "{arguments:?}");
            let command = spans.command(&bytes).expect("a command");
            match (Request::read(&command).expect("it asks for a decision"), expected) {
                (Ok(Request::Throttle { bucket, quantity, .. }), Ok(numbers)) => {
                    assert_eq!((bucket.burst, quantity), numbers);
                }
                (Err(mistake), Err(expected)) => assert!(mistake.contains(expected), "{mistake}"),
                (read, _) => panic!("{arguments:?}: {read:?}"),
            }
        }
    }

    #[test]
    fn waits_are_whole_and_never_too_short() {
        let denied = Outcome { allowed: false, capacity: 16, remaining: 0, ..Outcome::UNLIMITED };
        let wait =
            |us| Outcome { retry_after: Some(Micros::new(us)), reset_after: Micros::new(us + 1), ..denied };
        for (outcome, quantity, expected) in [
            (wait(2_000_000), 1, r"*5\r\n:1\r\n:16\r\n:0\r\n:2\r\n:3\r\n"),
            (wait(1), 1, r"*5\r\n:1\r\n:16\r\n:0\r\n:1\r\n:1\r\n"),
            (wait(1), 0, r"*5\r\n:0\r\n:16\r\n:0\r\n:-1\r\n:1\r\n"),
            (Outcome { retry_after: None, ..wait(0) }, 99, r"*5\r\n:1\r\n:16\r\n:0\r\n:-1\r\n:1\r\n"),
        ] {
            let mut reply = Reply::new();
            write_throttle(&mut reply, &outcome, quantity);
            assert_eq!(reply.bytes.escape_ascii().to_string(), expected);
        }
    }
}
