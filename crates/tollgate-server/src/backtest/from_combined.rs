//! Requests from access logs of web servers: the common and the combined format of Apache and nginx.
//!
//! `host ident user [10/Oct/2000:13:55:36 -0700] "GET /path HTTP/1.1" 200 2326 "referer" "agent"`. A `-` is nothing. Quoted
//! texts have their quotes and odd bytes escaped, and a user may have blanks in it, so a line is read from its first `] "`, which no
//! escaped text can hold. What somebody sent that was no request (`"-"`, the bytes of a TLS handshake) is a request all the
//! same, without a method and a path. Which limits it meets, the config's `[[routes]]` say.

use std::borrow::Cow;
use std::io::BufRead;

use memchr::{memchr_iter, memchr2, memrchr};
use tollgate::route::{RequestHead, RequestReader};

use super::instant;
use super::intake::Intake;
use super::lines::Lines;
use super::mistake::Mistake;
use crate::failure::Failure;

/// What a line should have been.
const SHAPE: &str = "write host ident user [10/Oct/2000:13:55:36 -0700] \"GET /path HTTP/1.1\" 200 2326 \"referer\" \"agent\"";

/// Reads a whole file into `intake`.
pub(super) fn read<R: BufRead>(mut lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    intake.begin_access_log();
    // Many requests come in the same second, and a calendar is slower than a comparison.
    let mut last: (Vec<u8>, u64) = (Vec::new(), 0);
    while let Some(line) = lines.next_line().map_err(|error| Failure::reading(name, &error))? {
        let Some((line, bytes)) = intake.whole_line(&line)? else { continue };
        let access = match Access::of(bytes) {
            Ok(access) => access,
            Err(mistake) => {
                intake.refuse_request(line, &mistake)?;
                continue;
            }
        };
        if last.0 != access.time {
            match instant::parse_access_time(access.time) {
                Ok(time_us) => {
                    last.0.clear();
                    last.0.extend_from_slice(access.time);
                    last.1 = time_us;
                }
                Err(fix) => {
                    let time = String::from_utf8_lossy(access.time);
                    intake.refuse_request(line, &Mistake::new("time", &time, fix))?;
                    continue;
                }
            }
        }
        intake.take_request(line, last.1, &access)?;
    }
    Ok(())
}

/// Whether a line reads as one of an access log.
pub(super) fn is_access(line: &[u8]) -> bool {
    Access::of(line.trim_ascii_end()).is_ok_and(|access| instant::parse_access_time(access.time).is_ok())
}

/// The fields of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Access<'a> {
    client: Cow<'a, str>,
    user: Option<Cow<'a, str>>,
    time: &'a [u8],
    requested: Requested<'a>,
    bytes: u64,
    referer: Option<Cow<'a, str>>,
    agent: Option<Cow<'a, str>>,
}

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Requested<'a> {
    /// The request line, as in `GET /path HTTP/1.1`.
    Line(Cow<'a, str>),
    /// The method and the target, of which a log may have neither.
    Parts(Cow<'a, str>, Cow<'a, str>),
}

impl Requested<'_> {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Requested::Line(line) => split_request(line),
            Requested::Parts(method, target) => (!target.is_empty()).then_some((method, target)),
        }
    }
}

impl<'a> Access<'a> {
    /// A request of a log that has other forms for the same. `bytes` are digits; `headers` are the referer and the user agent.
    pub(super) fn recorded(
        client: Cow<'a, str>,
        user: Option<Cow<'a, str>>,
        requested: Requested<'a>,
        bytes: &str,
        headers: [Option<Cow<'a, str>>; 2],
    ) -> Access<'a> {
        let [referer, agent] = headers;
        Access { client, user, time: b"", requested, bytes: number(bytes.as_bytes()), referer, agent }
    }

    fn of(line: &'a [u8]) -> Result<Access<'a>, Mistake> {
        let wrong = |fix: &str| Mistake::new("line", &String::from_utf8_lossy(line), fix);
        let (who, request) = at_request(line).ok_or_else(|| wrong(SHAPE))?;
        let opened = memrchr(b'[', who).ok_or_else(|| wrong(SHAPE))?;
        let (who, time) = (&who[..opened], &who[opened + 1..]);
        let mut fields = who.trim_ascii_end().splitn(3, |&byte| byte == b' ');
        let (Some(client @ [_, ..]), Some(ident), Some(user)) = (fields.next(), fields.next(), fields.next())
        else {
            return Err(wrong(SHAPE));
        };
        // A client has no blank in it, so of `name:port client ident user` the last two look like one user.
        let one_too_many = is_name_and_port(client) && ident != b"-" && user.contains(&b' ');
        if one_too_many || tollgate::route::address(ident).is_some() {
            return Err(wrong("has a field before the client's address, as vhost_combined does; cut it off"));
        }
        let open = || wrong("has a quote that is never closed; is the line cut off?");
        let (line, rest) = quoted(request).ok_or_else(open)?;
        let mut numbers = rest.trim_ascii_start().splitn(3, |&byte| byte == b' ');
        let (status, bytes) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        let whole = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        for (field, text) in [("status", status), ("bytes", bytes)] {
            if text != b"-" && !whole(text) {
                let fix = "write a whole number, or - for none";
                return Err(Mistake::new(field, &String::from_utf8_lossy(text), fix));
            }
        }
        // What follows is optional, and what follows that is of no use here.
        let mut rest = numbers.next().unwrap_or_default();
        let mut optional = || match rest.strip_prefix(b"\"") {
            None => Ok(None),
            Some(inside) => {
                let (text, after) = quoted(inside).ok_or_else(open)?;
                rest = after.strip_prefix(b" ").unwrap_or(after);
                Ok(given(text))
            }
        };
        Ok(Access {
            client: text(client),
            user: given(text(user)),
            time,
            requested: Requested::Line(line),
            bytes: number(bytes),
            referer: optional()?,
            agent: optional()?,
        })
    }

    /// As route limits see it.
    pub(super) fn request(&'a self, reader: &'a RequestReader) -> RequestHead<'a> {
        let request = reader
            .recorded(&self.client)
            .logged_user(self.user.as_deref())
            .logged_headers(self.referer.as_deref(), self.agent.as_deref())
            .bytes_sent(self.bytes);
        match self.requested.parts() {
            Some((method, target)) => request.target(method, target),
            None => request,
        }
    }
}

/// Whether a field reads `name:port`, which an IPv6 address does not.
fn is_name_and_port(field: &[u8]) -> bool {
    let Some(colon) = field.iter().rposition(|&byte| byte == b':') else { return false };
    let (name, port) = (&field[..colon], &field[colon + 1..]);
    let is_name = name.starts_with(b"[") || !name.is_empty() && !name.contains(&b':');
    is_name && !port.is_empty() && port.iter().all(u8::is_ascii_digit)
}

/// The method and the target of a request line; `None` if it is none. A target may have blanks in it, as some clients send.
fn split_request(line: &str) -> Option<(&str, &str)> {
    let (method, rest) = line.split_once(' ')?;
    http::Method::from_bytes(method.as_bytes()).ok()?;
    match rest.rsplit_once(' ') {
        Some((target, version)) if version.starts_with("HTTP/") => Some((method, target)),
        _ => Some((method, rest)),
    }
}

/// Digits as a number, however many; a `-` is none.
fn number(digits: &[u8]) -> u64 {
    let digit = |byte: u8| u64::from(byte.wrapping_sub(b'0'));
    digits
        .iter()
        .filter(|byte| byte.is_ascii_digit())
        .fold(0, |sum: u64, &byte| sum.saturating_mul(10).saturating_add(digit(byte)))
}

/// A text that is there.
fn given(text: Cow<'_, str>) -> Option<Cow<'_, str>> {
    (text != "-").then_some(text)
}

/// What stands before the first `] "`, and behind it.
fn at_request(line: &[u8]) -> Option<(&[u8], &[u8])> {
    const MARK: &[u8] = b"] \"";
    let at = memchr_iter(b']', line).find(|&at| line[at..].starts_with(MARK))?;
    Some((&line[..at], &line[at + MARK.len()..]))
}

/// A text up to its closing quote, and what follows.
fn quoted(bytes: &[u8]) -> Option<(Cow<'_, str>, &[u8])> {
    let mut end = 0;
    loop {
        end += memchr2(b'"', b'\\', bytes.get(end..)?)?;
        if bytes[end] == b'"' {
            return Some((text(&bytes[..end]), &bytes[end + 1..]));
        }
        // Whatever it escapes is no end.
        end += 2;
    }
}

/// A text without its escapes. What is not UTF-8 then is shown as far as it can be.
fn text(bytes: &[u8]) -> Cow<'_, str> {
    if !bytes.contains(&b'\\') {
        return String::from_utf8_lossy(bytes);
    }
    let mut plain = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [byte, after @ ..] = rest {
        let (byte, after) = match rest {
            [b'\\', b'x', high, low, after @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (hex(*high) << 4 | hex(*low), after)
            }
            [b'\\', sign @ (b'"' | b'\\'), after @ ..] => (*sign, after),
            [b'\\', b'n', after @ ..] => (b'\n', after),
            [b'\\', b'r', after @ ..] => (b'\r', after),
            [b'\\', b't', after @ ..] => (b'\t', after),
            // No escape that anybody writes: a backslash.
            _ => (*byte, after),
        };
        plain.push(byte);
        rest = after;
    }
    Cow::Owned(String::from_utf8_lossy(&plain).into_owned())
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20).wrapping_sub(b'a').wrapping_add(10),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever stands in a log is read or refused.
        #[test]
        fn no_line_is_too_strange(
            who in "(?s).{0,20}|\\PC{0,9} - \\PC{0,9} ",
            time in "[0-9]{2}/(Jan|Feb|Oct|xxx)/[0-9]{4}:[0-9]{2}:[0-9]{2}:[0-9]{2} [+-][0-9]{4}|\\PC{0,9}",
            line in proptest::collection::vec(any::<u8>(), 0..40),
            rest in "( [0-9-]{1,30}){0,3}( \"[^\"]{0,9}\"){0,3}",
        ) {
            let bytes = [who.as_bytes(), b"[", time.as_bytes(), b"] \"", &line, b"\"", rest.as_bytes()].concat();
            for end in 0..=bytes.len() {
                let bytes = &bytes[..end];
                if let Ok(access) = Access::of(bytes) {
                    let _ = instant::parse_access_time(access.time);
                    let reader = RequestReader::new();
                    let request = access.request(&reader);
                    prop_assert!(request.path().is_empty() || request.path().starts_with(['/', '*']));
                }
            }
        }
    }

    /// The fields of a line: client, user, method, path, bytes, referer and agent, with `-` for what is not there.
    fn check(line: &str, expected: [&str; 7]) {
        let access = Access::of(line.as_bytes()).unwrap_or_else(|mistake| panic!("{line}: {mistake:?}"));
        let (method, target) = access.requested.parts().unwrap_or(("-", "-"));
        let or_dash = |text: &Option<Cow<'_, str>>| text.as_deref().unwrap_or("-").to_string();
        let found = [
            access.client.to_string(),
            or_dash(&access.user),
            method.to_string(),
            target.to_string(),
            access.bytes.to_string(),
            or_dash(&access.referer),
            or_dash(&access.agent),
        ];
        assert_eq!(found, expected, "{line}");
        assert_eq!(access.time, b"10/Oct/2000:13:55:36 -0700", "{line}");
    }

    #[test]
    fn lines_are_read_into_fields() {
        const AT: &str = "[10/Oct/2000:13:55:36 -0700]";
        for (who, rest, expected) in [
            (
                "127.0.0.1 - frank",
                r#""GET /apache_pb.gif HTTP/1.0" 200 2326"#,
                ["127.0.0.1", "frank", "GET", "/apache_pb.gif", "2326", "-", "-"],
            ),
            (
                "203.0.113.7 - -",
                r#""POST /login?next=%2F HTTP/1.1" 302 - "https://example.com/" "Mozilla/5.0 (X11)""#,
                [
                    "203.0.113.7",
                    "-",
                    "POST",
                    "/login?next=%2F",
                    "0",
                    "https://example.com/",
                    "Mozilla/5.0 (X11)",
                ],
            ),
            (
                "2001:db8::7 - -",
                r#""GET / HTTP/2.0" 200 5 "-" "-""#,
                ["2001:db8::7", "-", "GET", "/", "5", "-", "-"],
            ),
            (
                "crawler.example.com - -",
                r#""HEAD /robots.txt HTTP/1.1" 200 0 "-" "bot \"1\" \\o/""#,
                ["crawler.example.com", "-", "HEAD", "/robots.txt", "0", "-", r#"bot "1" \o/"#],
            ),
            // nginx writes quotes as \x22, and adds what people like to know.
            (
                "10.0.0.1 - -",
                r#""GET /a\x22b HTTP/1.1" 200 1 "-" "\xC3\xA9" "198.51.100.7" 0.003"#,
                ["10.0.0.1", "-", "GET", "/a\"b", "1", "-", "é"],
            ),
            ("10.0.0.1 - -", r#""-" 408 0 "-" "-""#, ["10.0.0.1", "-", "-", "-", "0", "-", "-"]),
            ("10.0.0.1 - -", r#""" 400 0 "-" """#, ["10.0.0.1", "-", "-", "-", "0", "-", ""]),
            (
                "10.0.0.1 - -",
                r#""\x16\x03\x01\x02\x00\x01 \xFC\x03" 400 157 "-" "-""#,
                ["10.0.0.1", "-", "-", "-", "157", "-", "-"],
            ),
            (
                "10.0.0.1 - -",
                r#""GET /two words HTTP/1.1" 400 0"#,
                ["10.0.0.1", "-", "GET", "/two words", "0", "-", "-"],
            ),
            ("10.0.0.1 - -", r#""GET /old" 200 7"#, ["10.0.0.1", "-", "GET", "/old", "7", "-", "-"]),
            (
                "10.0.0.1 - -",
                r#""CONNECT example.com:443 HTTP/1.1" - 7"#,
                ["10.0.0.1", "-", "CONNECT", "example.com:443", "7", "-", "-"],
            ),
            // The user name is unverified: without a password a client may send any.
            (
                "10.0.0.1 - John [x] Smith\\x22] \\x22GET",
                r#""GET / HTTP/1.1" 401 99999999999999999999999"#,
                ["10.0.0.1", "John [x] Smith\"] \"GET", "GET", "/", "18446744073709551615", "-", "-"],
            ),
            // What has a port is a client all the same, where no field is too many.
            (
                "client.example.net:5000 - John Smith",
                r#""GET / HTTP/1.1" 200 1"#,
                ["client.example.net:5000", "John Smith", "GET", "/", "1", "-", "-"],
            ),
            (
                "client.example.net:5000 bob bob",
                r#""GET / HTTP/1.1" 200 1"#,
                ["client.example.net:5000", "bob", "GET", "/", "1", "-", "-"],
            ),
            (
                "2001:db8::7 bob John Smith",
                r#""GET / HTTP/1.1" 200 1"#,
                ["2001:db8::7", "John Smith", "GET", "/", "1", "-", "-"],
            ),
            ("unix: - -", r#""GET / HTTP/1.1" 200 1"#, ["unix:", "-", "GET", "/", "1", "-", "-"]),
            ("- - -", r#""GET / HTTP/1.1" 200 1 referer"#, ["-", "-", "GET", "/", "1", "-", "-"]),
            (
                "10.0.0.1 - -",
                r#""GET \d\x4 HTTP/1.1" 200 1 "\t\n" "a\\""#,
                ["10.0.0.1", "-", "GET", "\\d\\x4", "1", "\t\n", "a\\"],
            ),
        ] {
            check(&format!("{who} {AT} {rest}"), expected);
        }
    }

    #[test]
    fn what_is_no_line_of_an_access_log_is_refused() {
        const HEAD: &str = "::1 - - [10/Oct/2000:13:55:36 -0700]";
        for (line, fix) in [
            ("time,limit,key".to_string(), "write host ident user"),
            (HEAD.to_string(), "write host ident user"),
            ("::1 - [10/Oct/2000:13:55:36 -0700] \"GET\" 200 1".to_string(), "write host ident user"),
            (" - - [10/Oct/2000:13:55:36 -0700] \"GET\" 200 1".to_string(), "write host ident user"),
            ("::1 - - 10/Oct/2000:13:55:36] \"GET\" 200 1".to_string(), "write host ident user"),
            (format!("{HEAD} \"GET / HTTP/1.1"), "never closed"),
            (format!("{HEAD} \"GET / HTTP/1.1\\\""), "never closed"),
            (format!("{HEAD} \"GET /\" 200 1 \"-"), "never closed"),
            (format!("{HEAD} \"GET /\" OK 1"), "write a whole number"),
            (format!("{HEAD} \"GET /\" 200 1.5"), "write a whole number"),
            (format!("{HEAD} \"GET /\" 200"), "write a whole number"),
            (
                "www.example.com:443 client.example.net - - [10/Oct/2000:13:55:36 -0700] \"GET /\" 200 1"
                    .to_string(),
                "vhost_combined does; cut it off",
            ),
            (
                "[::1]:80 localhost - John Smith [10/Oct/2000:13:55:36 -0700] \"GET /\" 200 1".to_string(),
                "vhost_combined does; cut it off",
            ),
            (
                "example.com:443 ::1 - - [10/Oct/2000:13:55:36 -0700] \"GET /\" 200 1".to_string(),
                "vhost_combined does; cut it off",
            ),
        ] {
            let mistake = Access::of(line.as_bytes()).expect_err(&line);
            assert!(format!("{mistake:?}").contains(fix), "{line}: {mistake:?}");
            assert!(!is_access(line.as_bytes()));
        }
    }
}
