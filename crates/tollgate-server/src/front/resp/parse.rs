//! Commands out of bytes: an array of bulk strings, and nothing else. Empty lines between commands are passed over, as Redis does;
//! `redis-cli --pipe` sends one before its last command.
//!
//! Nothing is copied and nothing allocated: a command is where its arguments are in what was read. Every length is held to its
//! bound before anything waits for that many bytes. What came so far of a command is looked through again when more comes, but
//! only its lengths are, of which there are few; so a peer that sends byte by byte costs little more than one that does not.

use std::fmt;

/// How long a command may be, all of it.
pub(super) const MOST_BYTES: usize = 64 * 1024;

/// How many arguments a command may have, its name included.
pub(super) const MOST_ARGUMENTS: usize = 32;

/// How many digits a length may have.
const MOST_DIGITS: usize = 7;

/// Where the arguments of a command are.
pub(super) struct Spans {
    spans: [(u32, u32); MOST_ARGUMENTS],
    count: usize,
}

/// A command: its name, then its arguments.
#[derive(Clone, Copy)]
pub(super) struct Command<'a, 's> {
    bytes: &'a [u8],
    spans: &'s [(u32, u32)],
}

/// Why bytes are no command. The connection ends: where the next one would begin is anybody's guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Inline,
    Arguments,
    Length,
    NotBulk,
    Ending,
    TooLong,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ERR Protocol error: ")?;
        match self {
            Fault::Inline => f.write_str("expected '*': commands are arrays of bulk strings, not lines"),
            Fault::Arguments => {
                write!(f, "invalid multibulk length: a command has at most {MOST_ARGUMENTS} arguments")
            }
            Fault::Length => f.write_str("invalid bulk length"),
            Fault::NotBulk => f.write_str("expected '$': an argument is a bulk string"),
            Fault::Ending => f.write_str("a bulk string does not end where its length says"),
            Fault::TooLong => write!(f, "a command has at most {MOST_BYTES} bytes"),
        }
    }
}

/// An array that is not there, which is passed over like an empty one.
const NULL_ARRAY: &[u8] = b"*-1\r\n";

impl Spans {
    pub(super) fn new() -> Spans {
        Spans { spans: [(0, 0); MOST_ARGUMENTS], count: 0 }
    }

    /// Finds the command that `bytes` begin with, and says how long it is; `None` if there is more of it to come. An empty
    /// array, or an empty line, is a command without a name, which is passed over, as Redis does.
    #[inline]
    pub(super) fn find(&mut self, bytes: &[u8]) -> Result<Option<usize>, Fault> {
        self.count = 0;
        match bytes.first() {
            None => return Ok(None),
            Some(b'*') => {}
            Some(b'\r') => return empty_line(bytes),
            Some(_) => return Err(Fault::Inline),
        }
        if bytes.starts_with(NULL_ARRAY) {
            return Ok(Some(NULL_ARRAY.len()));
        }
        if NULL_ARRAY.starts_with(bytes) {
            return Ok(None);
        }
        let Some((count, mut at)) = length(bytes, 1, Fault::Arguments)? else { return Ok(None) };
        if count > MOST_ARGUMENTS {
            return Err(Fault::Arguments);
        }
        for span in &mut self.spans[..count] {
            let Some((start, end)) = bulk(bytes, at)? else { return Ok(None) };
            if end + 2 > MOST_BYTES {
                return Err(Fault::TooLong);
            }
            match bytes.get(end..end + 2) {
                Some(b"\r\n") => {}
                Some(_) => return Err(Fault::Ending),
                None => return Ok(None),
            }
            // Neither is above `MOST_BYTES`.
            #[allow(clippy::cast_possible_truncation)]
            {
                *span = (start as u32, end as u32);
            }
            at = end + 2;
        }
        self.count = count;
        Ok(Some(at))
    }

    /// The command that was found in `bytes`; `None` if it has no name.
    #[inline]
    pub(super) fn command<'a>(&self, bytes: &'a [u8]) -> Option<Command<'a, '_>> {
        (self.count > 0).then_some(Command { bytes, spans: &self.spans[..self.count] })
    }
}

impl<'a> Command<'a, '_> {
    /// All of it, as it was sent.
    pub(super) fn bytes(&self) -> &'a [u8] {
        let (_, end) = self.spans[self.spans.len() - 1];
        // The last line ends with two bytes.
        self.part((0, end + 2))
    }

    pub(super) fn name(&self) -> &'a [u8] {
        self.part(self.spans[0])
    }

    /// How many arguments follow the name.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.spans.len() - 1
    }

    /// An argument, from zero on.
    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.spans.get(index + 1).map(|span| self.part(*span))
    }

    #[inline]
    fn part(&self, (start, end): (u32, u32)) -> &'a [u8] {
        &self.bytes[start as usize..end as usize]
    }
}

/// A line that begins with CR: nothing else may be in it.
#[cold]
fn empty_line(bytes: &[u8]) -> Result<Option<usize>, Fault> {
    match bytes.get(1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some(2)),
        Some(_) => Err(Fault::Inline),
    }
}

/// Where the bulk string begins and ends whose head stands at `at`, before all of it has come or its end is looked at; `None` if
/// there is more of its head to come.
#[inline]
fn bulk(bytes: &[u8], at: usize) -> Result<Option<(usize, usize)>, Fault> {
    match bytes.get(at) {
        None => return Ok(None),
        Some(b'$') => {}
        Some(_) => return Err(Fault::NotBulk),
    }
    let found = length(bytes, at + 1, Fault::Length)?;
    Ok(found.map(|(size, start)| (start, start + size)))
}

/// The length that stands at `at`, and where its line ends; `None` if there is more of it to come.
#[inline]
fn length(bytes: &[u8], at: usize, fault: Fault) -> Result<Option<(usize, usize)>, Fault> {
    let mut length = 0;
    for (index, byte) in bytes[at..].iter().take(MOST_DIGITS + 1).enumerate() {
        match byte {
            b'0'..=b'9' if index < MOST_DIGITS => length = 10 * length + usize::from(byte - b'0'),
            b'\r' if index > 0 => {
                return match bytes.get(at + index + 1) {
                    Some(b'\n') => Ok(Some((length, at + index + 2))),
                    Some(_) => Err(fault),
                    None => Ok(None),
                };
            }
            _ => return Err(fault),
        }
    }
    Ok(None)
}

/// A whole number as Redis reads one: digits, maybe a minus before them, nothing else.
#[inline]
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    let (digits, is_negative) = match text {
        [b'-', digits @ ..] => (digits, true),
        digits => (digits, false),
    };
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    let mut number: i64 = 0;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        let digit = i64::from(byte - b'0');
        // Counted downwards, because there is one more negative number than positive ones.
        number = number.checked_mul(10)?.checked_sub(digit)?;
    }
    if is_negative { Some(number) } else { number.checked_neg() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator of its own: the same bytes in every run.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 % sides as u64).expect("a side")
        }
    }

    /// How long a command is, and its parts.
    type Found = Option<(usize, Vec<Vec<u8>>)>;

    fn check(bytes: &[u8]) -> Result<Found, Fault> {
        let mut spans = Spans::new();
        let found = spans.find(bytes)?;
        let parts = spans.command(bytes).map_or_else(Vec::new, |command| {
            let arguments = (0..command.count()).filter_map(|index| command.get(index));
            std::iter::once(command.name()).chain(arguments).map(<[u8]>::to_vec).collect()
        });
        Ok(found.map(|size| (size, parts)))
    }

    #[test]
    fn whole_commands_are_found_and_all_others_refused() {
        type Expected = Result<Option<(usize, &'static [&'static [u8]])>, Fault>;
        let cases: &[(&[u8], Expected)] = &[
            (b"", Ok(None)),
            (b"*1\r\n$4\r\nPING\r\n", Ok(Some((14, &[b"PING"])))),
            (b"*1\r\n$4\r\nPING\r\n*1", Ok(Some((14, &[b"PING"])))),
            (b"*2\r\n$4\r\nPING\r\n$0\r\n\r\n", Ok(Some((20, &[b"PING", b""])))),
            (b"*2\r\n$1\r\na\r\n$2\r\n\r\n\r\n", Ok(Some((19, &[b"a", b"\r\n"])))),
            (b"*0\r\n", Ok(Some((4, &[])))),
            (b"*-1\r\n", Ok(Some((5, &[])))),
            // Cut by the network, it was a protocol error.
            (b"*", Ok(None)),
            (b"*-", Ok(None)),
            (b"*-1\r", Ok(None)),
            (b"PING\r\n", Err(Fault::Inline)),
            (b"\r\n", Ok(Some((2, &[])))),
            (b"\r\n*1\r\n$4\r\nPING\r\n", Ok(Some((2, &[])))),
            (b"\r", Ok(None)),
            (b"\rPING\r\n", Err(Fault::Inline)),
            (b"\n", Err(Fault::Inline)),
            (b"POST / HTTP/1.1\r\n", Err(Fault::Inline)),
            (b"*-2\r\n", Err(Fault::Arguments)),
            (b"*33\r\n", Err(Fault::Arguments)),
            (b"*2147483648\r\n", Err(Fault::Arguments)),
            (b"*99999999999999999999", Err(Fault::Arguments)),
            (b"*\r\n", Err(Fault::Arguments)),
            (b"*1\rx", Err(Fault::Arguments)),
            (b"*+1\r\n", Err(Fault::Arguments)),
            (b"*1\r\n*1\r\n$4\r\nPING\r\n", Err(Fault::NotBulk)),
            (b"*1\r\n:1\r\n", Err(Fault::NotBulk)),
            (b"*1\r\n$-1\r\n", Err(Fault::Length)),
            (b"*1\r\n$x\r\n", Err(Fault::Length)),
            (b"*1\r\n$9223372036854775807\r\n", Err(Fault::Length)),
            (b"*1\r\n$65536\r\n", Err(Fault::TooLong)),
            (b"*1\r\n$9999999\r\n", Err(Fault::TooLong)),
            (b"*1\r\n$4\r\nPINGxx", Err(Fault::Ending)),
            (b"*1\r\n$3\r\nPING\r\n", Err(Fault::Ending)),
            (b"*32\r\n$1\r\n", Ok(None)),
        ];
        for (bytes, found) in cases {
            let found = found.map(|found| {
                found.map(|(size, parts)| (size, parts.iter().map(|part| part.to_vec()).collect()))
            });
            assert_eq!(check(bytes), found, "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_command_that_is_not_whole_is_waited_for_and_never_read_otherwise() {
        let whole = b"*3\r\n$3\r\nSET\r\n$12\r\nwith \r\n *1\r\n\r\n$0\r\n\r\n";
        for size in 0..whole.len() {
            assert_eq!(check(&whole[..size]), Ok(None), "{size} bytes");
        }
        assert_eq!(check(whole).map(|found| found.map(|(size, _)| size)), Ok(Some(whole.len())));
    }

    #[test]
    fn whatever_comes_is_a_command_or_a_fault_or_waited_for() {
        let pieces: [&[u8]; 14] = [
            b"*",
            b"$",
            b"\r\n",
            b"1",
            b"2",
            b"3",
            b"65535",
            b"-1",
            b"PING",
            b"\0",
            b"\xff",
            b":",
            b"*2\r\n",
            b"$1\r\na\r\n",
        ];
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        let mut spans = Spans::new();
        let mut found = 0;
        for _ in 0..200_000 {
            let mut bytes = if dice.roll(2) == 0 { b"*2\r\n".to_vec() } else { Vec::new() };
            for _ in 0..dice.roll(10) {
                match dice.roll(8) {
                    0 => bytes.push(u8::try_from(dice.roll(256)).expect("a byte")),
                    _ => bytes.extend_from_slice(pieces[dice.roll(pieces.len())]),
                }
            }
            if let Ok(Some(size)) = spans.find(&bytes) {
                assert!(size <= bytes.len() && size > 0, "{}", bytes.escape_ascii());
                let Some(command) = spans.command(&bytes) else { continue };
                found += 1;
                let total: usize =
                    (0..command.count()).filter_map(|index| command.get(index)).map(<[u8]>::len).sum();
                assert!(total + command.name().len() < size);
                // Less of it is not yet a command, and never a fault.
                assert_eq!(
                    Spans::new().find(&bytes[..dice.roll(size)]),
                    Ok(None),
                    "{}",
                    bytes.escape_ascii()
                );
            }
        }
        assert!(found > 100, "only {found} were commands");
    }

    #[test]
    fn integers_are_digits_and_nothing_else() {
        for (text, number) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("60", Some(60)),
            ("-7", Some(-7)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("99999999999999999999", None),
            ("", None),
            ("-", None),
            ("+1", None),
            (" 1", None),
            ("1.0", None),
            ("1e3", None),
        ] {
            assert_eq!(integer(text.as_bytes()), number, "{text}");
        }
    }
}
