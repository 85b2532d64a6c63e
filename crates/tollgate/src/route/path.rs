//! The normalised path of a request, which routes are compared with.
//!
//! `/login`, `//login`, `/./login` and `/%6Cogin` reach the same handler behind many servers, so they must match the same route.
//! A path is decoded once, except for what would change its structure: `%25` could make a new escape; `%3F` and `%23` would end
//! the path. Slashes are merged while dots are resolved, as in nginx. Some servers take an encoded slash or backslash for a
//! separator and others for data, so such a path is refused unless [`EncodedSeparators::Keep`] says that it is data.
//!
//! Neither case nor Unicode is folded, and a trailing slash counts: routers distinguish such paths, and `pattern.rs` decides what
//! a route does with them. Decoding is by hand, because a `%` that encodes nothing must be refused; the crate `percent-encoding`
//! accepts it.

use std::borrow::Cow;
use std::fmt;

use percent_encoding::percent_encode_byte;

/// The meaning of an encoded slash (`%2F`), an encoded backslash (`%5C`) and a plain backslash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncodedSeparators {
    /// They are a [`BadPath`]: servers disagree about their meaning.
    #[default]
    Refuse,
    /// Data, as in `/packages/@scope%2Fname`. They stay encoded.
    Keep,
}

/// Why a path has no one spelling. Never contains the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadPath {
    /// It does not start with a slash.
    Relative,
    /// A `%` without two hexadecimal digits.
    Percent,
    /// Escapes that together are no UTF-8.
    Utf8,
    /// NUL, plain or encoded.
    Nul,
    /// An encoded slash, or a backslash, under [`EncodedSeparators::Refuse`].
    Separator,
    /// A plain `?` or `#`: this is more than a path.
    Query,
}

impl fmt::Display for BadPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BadPath::Relative => "the path does not start with `/`",
            BadPath::Percent => "the path has a `%` that encodes nothing; a percent sign is written `%25`",
            BadPath::Utf8 => "the path has escapes that are not UTF-8",
            BadPath::Nul => "the path has a NUL character",
            BadPath::Separator => {
                "the path has an encoded slash or a backslash, which servers take for different things"
            }
            BadPath::Query => {
                "the path has a `?` or `#`, where a query or fragment begins; give the path alone"
            }
        })
    }
}

impl std::error::Error for BadPath {}

/// The normalised path, or why it has none.
///
/// Borrowed if nothing changes, which is the usual case. An empty path is `/`; the `*` of `OPTIONS *` stays.
///
/// ```
/// use tollgate::route::{BadPath, EncodedSeparators, normalized};
///
/// assert_eq!(normalized("//users/./%34%32/../7", EncodedSeparators::Refuse)?, "/users/7");
/// assert_eq!(normalized("/users%2F7", EncodedSeparators::Refuse), Err(BadPath::Separator));
/// assert_eq!(normalized("/users%2f7", EncodedSeparators::Keep)?, "/users%2F7");
/// # Ok::<(), BadPath>(())
/// ```
pub fn normalized(raw: &str, separators: EncodedSeparators) -> Result<Cow<'_, str>, BadPath> {
    if is_plain(raw.as_bytes()) {
        return Ok(Cow::Borrowed(raw));
    }
    match raw.as_bytes() {
        [] => Ok(Cow::Borrowed("/")),
        b"*" => Ok(Cow::Borrowed(raw)),
        [b'/', ..] => {
            let text = rewritten(raw, separators)?;
            Ok(if text == raw { Cow::Borrowed(raw) } else { Cow::Owned(text) })
        }
        _ => Err(BadPath::Relative),
    }
}

/// Whether nothing in a path could need a change: ASCII without escapes, and no slash before a slash or a dot.
fn is_plain(path: &[u8]) -> bool {
    let mut last = 0;
    path.first() == Some(&b'/')
        && path.iter().all(|&byte| {
            let odd = matches!(byte, 0..=0x1f | b'%' | b'\\' | b'?' | b'#' | 0x7f..=0xff);
            let structure = last == b'/' && matches!(byte, b'/' | b'.');
            last = byte;
            !odd && !structure
        })
}

/// The slow path. Every character is decoded, then written plain or encoded, so each has one spelling; a segment is looked
/// at when it is complete.
fn rewritten(raw: &str, separators: EncodedSeparators) -> Result<String, BadPath> {
    let mut path = Spelling { text: String::with_capacity(raw.len()), segment: 0 };
    let mut characters = raw.chars();
    while let Some(character) = characters.next() {
        match character {
            '/' => path.slash(),
            '?' | '#' => return Err(BadPath::Query),
            '%' => {
                let (character, rest) = escaped(characters.as_str())?;
                characters = rest.chars();
                path.character(character, separators)?;
            }
            _ => path.character(character, separators)?,
        }
    }
    path.end_segment();
    Ok(path.text)
}

/// A path that is being written. Its current segment starts at `segment`, after a slash.
struct Spelling {
    text: String,
    segment: usize,
}

impl Spelling {
    fn slash(&mut self) {
        self.end_segment();
        if !self.text.ends_with('/') {
            self.text.push('/');
            self.segment = self.text.len();
        }
    }

    /// Takes away a segment of one dot, and one of two dots together with the segment before it, if there is one.
    fn end_segment(&mut self) {
        let dots = match &self.text[self.segment..] {
            "." => 1,
            ".." => 2,
            _ => return,
        };
        self.text.truncate(self.segment);
        if dots == 2 {
            let parent = self.text.trim_end_matches('/').rfind('/').unwrap_or(0);
            self.text.truncate(parent + 1);
            self.segment = self.text.len();
        }
    }

    /// A character of a segment. A slash here was encoded.
    fn character(&mut self, character: char, separators: EncodedSeparators) -> Result<(), BadPath> {
        match character {
            '\0' => return Err(BadPath::Nul),
            '/' | '\\' if separators == EncodedSeparators::Refuse => return Err(BadPath::Separator),
            '/' | '\\' | '%' | '?' | '#' => self.encoded(character),
            // They would forge lines in logs, and no key may have them.
            _ if character.is_control() => self.encoded(character),
            _ => self.text.push(character),
        }
        Ok(())
    }

    fn encoded(&mut self, character: char) {
        self.text.extend(character.encode_utf8(&mut [0; 4]).bytes().map(percent_encode_byte));
    }
}

/// The character whose escapes start here, after their first `%`, and the rest.
fn escaped(text: &str) -> Result<(char, &str), BadPath> {
    let (first, mut rest) = escaped_byte(text)?;
    let size = match first {
        ..=0x7f => 1,
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => return Err(BadPath::Utf8),
    };
    let mut bytes = [first, 0, 0, 0];
    for byte in &mut bytes[1..size] {
        (*byte, rest) = escaped_byte(rest.strip_prefix('%').ok_or(BadPath::Utf8)?)?;
    }
    let character = str::from_utf8(&bytes[..size]).ok().and_then(|text| text.chars().next());
    Ok((character.ok_or(BadPath::Utf8)?, rest))
}

fn escaped_byte(text: &str) -> Result<(u8, &str), BadPath> {
    let (digits, rest) = text.split_at_checked(2).ok_or(BadPath::Percent)?;
    // A number may have a sign, an escape may not.
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(BadPath::Percent);
    }
    Ok((u8::from_str_radix(digits, 16).map_err(|_| BadPath::Percent)?, rest))
}

/// The text of a piece of a path, with the escapes that normalising kept also decoded.
///
/// Only for keys and comparisons of single parameters: in a longer piece, `a%2Fb` and `a/b` become the same. Text with an invalid
/// escape is returned unchanged.
///
/// ```
/// use tollgate::route::decoded;
/// assert_eq!(decoded("100%25"), "100%");
/// assert_eq!(decoded("plain"), "plain");
/// ```
pub fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let mut whole = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, escape)) = rest.split_once('%') {
        let Ok((character, after)) = escaped(escape) else { return Cow::Borrowed(text) };
        whole.push_str(before);
        whole.push(character);
        rest = after;
    }
    whole.push_str(rest);
    Cow::Owned(whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The spelling of a path, `=` if it is the same and borrowed.
    fn check(raw: &str, separators: EncodedSeparators, expected: Result<&str, BadPath>) {
        match (normalized(raw, separators), expected) {
            (Ok(Cow::Borrowed(text)), Ok("=")) => assert_eq!(text, raw),
            (found, expected) => assert_eq!(found.as_deref(), expected.as_ref().map(|text| *text), "{raw:?}"),
        }
    }

    #[test]
    fn a_path_has_one_spelling() {
        for (raw, expected) in [
            ("/", Ok("=")),
            ("/users/42", Ok("=")),
            ("/users/42/", Ok("=")),
            ("/a.b/c..d/e...", Ok("=")),
            ("/.well-known/x", Ok("=")),
            ("/...", Ok("=")),
            ("/a~b!$&'()*+,;=:@|{}\"<>^` c", Ok("=")),
            ("/caf\u{e9}", Ok("=")),
            ("/100%25", Ok("=")),
            ("*", Ok("=")),
            ("", Ok("/")),
            ("//", Ok("/")),
            ("///a////b//", Ok("/a/b/")),
            ("/.", Ok("/")),
            ("/..", Ok("/")),
            ("/../../a", Ok("/a")),
            ("/a/.", Ok("/a/")),
            ("/a/..", Ok("/")),
            ("/a/../", Ok("/")),
            ("/a/b/..", Ok("/a/")),
            ("/a/b/../c", Ok("/a/c")),
            ("/a/./b", Ok("/a/b")),
            ("/a//../b", Ok("/b")),
            ("/a/%2e/b", Ok("/a/b")),
            ("/a/%2E./b", Ok("/b")),
            ("/a/.%2e", Ok("/")),
            ("/%61%7E%2d", Ok("/a~-")),
            ("/%3b%3B;", Ok("/;;;")),
            ("/a%20b", Ok("/a b")),
            ("/caf%C3%A9", Ok("/caf\u{e9}")),
            ("/%f0%9f%a6%80", Ok("/\u{1f980}")),
            ("/%252f", Ok("/%252f")),
            ("/%25%32%65", Ok("/%252e")),
            ("/%3f%23", Ok("/%3F%23")),
            ("/%0d%0a%7f%c2%85", Ok("/%0D%0A%7F%C2%85")),
            ("/a\nb", Ok("/a%0Ab")),
            ("a", Err(BadPath::Relative)),
            ("**", Err(BadPath::Relative)),
            ("%2fa", Err(BadPath::Relative)),
            ("http://host/", Err(BadPath::Relative)),
            ("/%", Err(BadPath::Percent)),
            ("/%4", Err(BadPath::Percent)),
            ("/%zz", Err(BadPath::Percent)),
            ("/%+1", Err(BadPath::Percent)),
            ("/%\u{e9}", Err(BadPath::Percent)),
            ("/%c3%", Err(BadPath::Percent)),
            ("/%ff", Err(BadPath::Utf8)),
            ("/%c3", Err(BadPath::Utf8)),
            ("/%c3\u{a9}", Err(BadPath::Utf8)),
            ("/%c0%ae", Err(BadPath::Utf8)),
            ("/%e0%80%af", Err(BadPath::Utf8)),
            ("/%ed%a0%80", Err(BadPath::Utf8)),
            ("/%f5%80%80%80", Err(BadPath::Utf8)),
            ("/%00", Err(BadPath::Nul)),
            ("/a\0", Err(BadPath::Nul)),
            ("/a?b", Err(BadPath::Query)),
            ("/a#b", Err(BadPath::Query)),
        ] {
            check(raw, EncodedSeparators::Refuse, expected);
            check(raw, EncodedSeparators::Keep, expected);
        }
    }

    #[test]
    fn encoded_separators_are_refused_or_data() {
        for (raw, kept) in [
            ("/a%2fb", "/a%2Fb"),
            ("/a%2Fb", "="),
            ("/a%5cb", "/a%5Cb"),
            ("/a\\b", "/a%5Cb"),
            ("/a/..%2f..%5C..", "/a/..%2F..%5C.."),
            ("/%2e%2e%2fa", "/..%2Fa"),
        ] {
            check(raw, EncodedSeparators::Refuse, Err(BadPath::Separator));
            check(raw, EncodedSeparators::Keep, Ok(kept));
        }
    }

    #[test]
    fn a_piece_is_decoded_or_left() {
        for (text, expected) in [
            ("", ""),
            ("42", "42"),
            ("a%2Fb%5C%25", "a/b\\%"),
            ("%C2%85", "\u{85}"),
            ("%2525", "%25"),
            ("50%", "50%"),
            ("%ff%41", "%ff%41"),
        ] {
            assert_eq!(decoded(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_spelling_is_its_own_spelling(
            raw in "(/|[./%?#a\\\\é\u{85}\n]|%[0-9a-fA-F]{2}|%2[eEfF5]|%[cC]3%[aA]9){0,24}",
        ) {
            for separators in [EncodedSeparators::Refuse, EncodedSeparators::Keep] {
                let Ok(once) = normalized(&raw, separators) else { continue };
                prop_assert_eq!(normalized(&once, separators), Ok(Cow::Borrowed(&*once)));
                prop_assert!(!once.contains("//") && !once.contains('\\'));
                prop_assert!(once.split('/').all(|segment| segment != "." && segment != ".."));
                prop_assert!(!once.chars().any(char::is_control));
            }
        }
    }
}
