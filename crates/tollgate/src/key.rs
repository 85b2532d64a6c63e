//! Keys: who is limited.
//!
//! A key has a namespace, a key and an optional version. As text it is `namespace:key[:version]`, where `:` and `%` inside a part
//! are written `%3A` and `%25`. Text without any `:` is a key in the namespace `default`. All later steps (the store's
//! fingerprints, the overrides of a policy) see only the *canonical* text. Canonical text and parts map one to one, so two
//! different keys never share a counter.
//!
//! Parsing is the first step of every charge, so plain ASCII is recognised eight bytes at a time (`plain.rs`) and borrowed; every
//! other text takes the slow path in this file. Unicode is not normalised: different bytes are different keys.
//!
//! Keys are personal data. `Debug` and the errors never contain their text; only [`Key::canonical`], the parts, `Display` and
//! [`KeyError::suggestion`] do. The next step is `policy.rs`: which limits apply.

pub(crate) mod address;
mod error;
mod plain;
pub(crate) mod reference;
#[cfg(feature = "http")]
mod room;
mod text;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr};

pub use self::error::KeyError;
use self::error::{Fault, Part};
use self::plain::Plain;
pub use self::reference::KeyRef;
#[cfg(feature = "http")]
pub(crate) use self::room::{KeyRoom, RoomKey};
use self::text::Text;

/// The longest part, in bytes before encoding.
const MAX_PART: usize = 1024;

/// The longest text that can hold three parts: each byte encoded as three, and two separators.
const MAX_TEXT: usize = 3 * (3 * MAX_PART) + 2;

/// The namespace of a key written without one.
const DEFAULT: &str = "default";

/// The key: a namespace, a key and an optional version.
///
/// ```
/// use tollgate::Key;
///
/// let user = Key::parse("user:42")?;
/// assert_eq!((&*user.namespace(), &*user.key(), user.version()), ("user", "42", None));
///
/// // Raw parts need no encoding; the text form has it.
/// let address = Key::new("ip", "2001:db8::1")?;
/// assert_eq!(address.canonical(), "ip:2001%3Adb8%3A%3A1");
/// assert_eq!(address, Key::parse("ip:2001%3adb8%3a%3a1")?);
///
/// // Text without a namespace is in `default`.
/// assert_eq!(Key::parse("42")?, Key::parse("default:42")?);
/// # Ok::<(), tollgate::key::KeyError>(())
/// ```
#[derive(Clone)]
pub struct Key<'a> {
    canonical: Text<'a>,
}

impl<'a> Key<'a> {
    /// Reads `namespace:key[:version]`, or a bare key of the namespace `default`.
    ///
    /// Allocates nothing unless an escape is written in lower case (`%3a`). Each part is 1 to 1,024 bytes of any text
    /// without control characters.
    ///
    /// ```
    /// use tollgate::Key;
    ///
    /// let error = Key::parse("ip:2001:db8::1").unwrap_err();
    /// assert!(error.to_string().contains("5 parts"));
    /// assert_eq!(error.suggestion(), Some("ip:2001%3Adb8%3A%3A1"));
    /// ```
    #[inline]
    pub fn parse(text: &'a str) -> Result<Key<'a>, KeyError> {
        #[cfg(test)]
        tests::count_parse();
        match Key::plain(text) {
            Some(canonical) => Ok(Key { canonical: canonical.into() }),
            None => parse_any(text),
        }
    }

    /// The canonical text of a plain key, which nearly every key is; `None` for all others, sound or not.
    #[inline]
    pub(crate) fn plain(text: &str) -> Option<&str> {
        match Plain::of(text.as_bytes()) {
            Plain::Canonical => Some(text),
            Plain::InDefault => Some(&text[DEFAULT.len() + 1..]),
            Plain::No => None,
        }
    }

    /// From a raw namespace and key: nothing in them needs encoding.
    pub fn new(namespace: &str, key: &str) -> Result<Key<'static>, KeyError> {
        // Nearly all keys are plain, and so already canonical.
        if Plain::is_one_part(key.as_bytes()) && Plain::is_one_part(namespace.as_bytes()) {
            let canonical =
                if namespace == DEFAULT { key.to_owned() } else { [namespace, ":", key].concat() };
            return Ok(Key { canonical: canonical.into() });
        }
        check_raw(Part::Namespace, namespace)?;
        check_raw(Part::Key, key)?;
        let mut canonical = String::with_capacity(namespace.len() + 1 + key.len());
        if namespace != DEFAULT {
            encode_into(&mut canonical, namespace);
            canonical.push(':');
        }
        encode_into(&mut canonical, key);
        Ok(Key { canonical: canonical.into() })
    }

    /// The key of a client's address, as the HTTP layer makes it: in the namespace `ip`, an IPv6 address grouped by its /64
    /// network, because one subscriber has all of it.
    ///
    /// ```
    /// use tollgate::Key;
    /// assert_eq!(Key::client("203.0.113.7".parse()?).canonical(), "ip:203.0.113.7");
    /// assert_eq!(Key::client("2001:db8:1:2:3:4:5:6".parse()?), Key::new("ip", "2001:db8:1:2::/64")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn client(address: IpAddr) -> Key<'static> {
        let text = match address::canonical(address) {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("{}/64", Ipv6Addr::from(u128::from(address) >> 64 << 64)),
        };
        Key { canonical: Text::joined("ip:", &encode(&text)) }
    }

    /// From a raw namespace, key and version.
    ///
    /// ```
    /// use tollgate::Key;
    /// assert_eq!(Key::with_version("user", "42", "v2")?.canonical(), "user:42:v2");
    /// # Ok::<(), tollgate::key::KeyError>(())
    /// ```
    pub fn with_version(namespace: &str, key: &str, version: &str) -> Result<Key<'static>, KeyError> {
        check_raw(Part::Namespace, namespace)?;
        check_raw(Part::Key, key)?;
        check_raw(Part::Version, version)?;
        Ok(Key { canonical: [encode(namespace), encode(key), encode(version)].join(":").into() })
    }

    /// From a text that is known to be canonical.
    #[cfg(feature = "http")]
    pub(crate) fn from_canonical(canonical: &'a str) -> Key<'a> {
        Key { canonical: canonical.into() }
    }

    /// The canonical text of a raw key after a prefix as [`Key::prefix`] makes it.
    #[cfg(feature = "http")]
    fn canonical_after(prefix: &str, raw: &str) -> Result<String, KeyError> {
        check_raw(Part::Key, raw)?;
        let mut canonical = String::with_capacity(prefix.len() + raw.len() + 16);
        canonical.push_str(prefix);
        encode_into(&mut canonical, raw);
        Ok(canonical)
    }

    /// The prefix of all keys of a namespace in their canonical text.
    #[cfg(any(feature = "http", feature = "telemetry"))]
    pub(crate) fn prefix(namespace: &str) -> Result<String, KeyError> {
        check_raw(Part::Namespace, namespace)?;
        Ok(if namespace == DEFAULT { String::new() } else { encode(namespace) + ":" })
    }

    /// The one text of this key: encoded, without `default:` where there is no version. Equal keys have equal canonical text.
    #[inline]
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// The canonical text, owned.
    pub fn into_canonical(self) -> String {
        self.canonical.into_string()
    }

    /// The namespace of a canonical text, decoded.
    pub(crate) fn namespace_of(canonical: &str) -> Cow<'_, str> {
        canonical.split_once(':').map_or(DEFAULT.into(), |(namespace, _)| decode(namespace))
    }

    /// The namespace, decoded.
    pub fn namespace(&self) -> Cow<'_, str> {
        decode(self.parts().0)
    }

    /// The key within its namespace, decoded.
    pub fn key(&self) -> Cow<'_, str> {
        decode(self.parts().1)
    }

    /// The version, decoded, if there is one.
    pub fn version(&self) -> Option<Cow<'_, str>> {
        self.parts().2.map(decode)
    }

    /// The same key, borrowing nothing.
    pub fn into_owned(self) -> Key<'static> {
        Key { canonical: self.canonical.into_static() }
    }

    /// The encoded parts.
    fn parts(&self) -> (&str, &str, Option<&str>) {
        match self.canonical.split_once(':') {
            None => (DEFAULT, &self.canonical, None),
            Some((namespace, rest)) => match rest.split_once(':') {
                None => (namespace, rest, None),
                Some((key, version)) => (namespace, key, Some(version)),
            },
        }
    }
}

/// The full encoded text, `namespace:key[:version]`, which parses back to the same key.
impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.canonical.contains(':') {
            write!(f, "{DEFAULT}:")?;
        }
        f.write_str(&self.canonical)
    }
}

/// Compares the canonical text, not its representation.
impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.canonical() == other.canonical()
    }
}

impl Eq for Key<'_> {}

impl PartialOrd for Key<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.canonical().cmp(other.canonical())
    }
}

impl Hash for Key<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.canonical().hash(state);
    }
}

/// Never the text: `Debug` ends up in logs, and keys are personal data.
impl fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Reads any text: escapes, other alphabets and everything malformed.
#[cold]
#[inline(never)]
fn parse_any(text: &str) -> Result<Key<'_>, KeyError> {
    read(text).map_err(|fault| KeyError::new(text, fault))
}

fn read(text: &str) -> Result<Key<'_>, Fault> {
    match text.len() {
        0 => return Err(Fault::NoText),
        // Refused before it is looked at, so that a megabyte costs nothing.
        bytes if bytes > MAX_TEXT => return Err(Fault::LongText { bytes }),
        _ => {}
    }
    let parts = text.split(':').count();
    if parts > 3 {
        return Err(Fault::ManyParts { parts });
    }
    for (&part, encoded) in Part::of_text(parts).iter().zip(text.split(':')) {
        check_encoded(part, encoded)?;
    }
    let text = match text.split_once(':') {
        Some((DEFAULT, key)) if parts == 2 => key,
        _ => text,
    };
    // Every `%` starts an escape here, so only the case of the hex digits is left to unify.
    let canonical =
        if text.contains("%3a") { Cow::Owned(text.replace("%3a", "%3A")) } else { Cow::Borrowed(text) };
    Ok(Key { canonical: canonical.into() })
}

/// Refuses an encoded part that is empty, too long once decoded, or holds a control character or a bare `%`.
fn check_encoded(part: Part, encoded: &str) -> Result<(), Fault> {
    let mut escapes = 0;
    for (at, character) in encoded.char_indices() {
        if character.is_control() {
            return Err(Fault::Control { part, at, character });
        }
        if character == '%' {
            if !is_escape(&encoded[at..]) {
                return Err(Fault::Percent { part, at });
            }
            escapes += 1;
        }
    }
    check_length(part, encoded.len() - 2 * escapes)
}

/// Refuses a raw part that is empty, too long or holds a control character.
fn check_raw(part: Part, raw: &str) -> Result<(), Fault> {
    check_length(part, raw.len())?;
    match raw.char_indices().find(|(_, character)| character.is_control()) {
        Some((at, character)) => Err(Fault::Control { part, at, character }),
        None => Ok(()),
    }
}

fn check_length(part: Part, bytes: usize) -> Result<(), Fault> {
    match bytes {
        0 => Err(Fault::EmptyPart(part)),
        1..=MAX_PART => Ok(()),
        _ => Err(Fault::LongPart { part, bytes }),
    }
}

/// Whether a text that starts with `%` starts with an escape.
fn is_escape(text: &str) -> bool {
    ["%3A", "%3a", "%25"].iter().any(|escape| text.starts_with(escape))
}

/// Encodes only `:` and `%`. By hand, because the crate `percent-encoding` always encodes what is not ASCII, and keys keep it.
fn encode(raw: &str) -> String {
    let mut encoded = String::with_capacity(raw.len());
    encode_into(&mut encoded, raw);
    encoded
}

fn encode_into(out: &mut String, raw: &str) {
    let mut rest = raw;
    while let Some(at) = rest.bytes().position(|byte| matches!(byte, b'%' | b':')) {
        out.push_str(&rest[..at]);
        out.push_str(if rest.as_bytes()[at] == b'%' { "%25" } else { "%3A" });
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
}

fn decode(encoded: &str) -> Cow<'_, str> {
    match encoded.contains('%') {
        false => Cow::Borrowed(encoded),
        // In this order: `%253A` is the text `%3A` and no separator.
        true => Cow::Owned(encoded.replace("%3A", ":").replace("%25", "%")),
    }
}

#[cfg(test)]
pub(crate) use self::tests::parsed;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::error::MAX_SUGGESTION;
    use super::*;

    thread_local! {
        static PARSES: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn count_parse() {
        PARSES.with(|parses| parses.set(parses.get() + 1));
    }

    /// How many keys this thread parsed since the last call. `src/tollgate/tests.rs` compares it with the keys of a call.
    pub(crate) fn parsed() -> usize {
        PARSES.with(|parses| parses.replace(0))
    }

    #[test]
    fn a_client_is_its_address_or_its_network() {
        for (address, key) in [
            ("203.0.113.7", "ip:203.0.113.7"),
            ("::ffff:203.0.113.7", "ip:203.0.113.7"),
            ("2001:db8:1:2:3:4:5:6", "ip:2001%3Adb8%3A1%3A2%3A%3A/64"),
            ("2001:db8:1:2::ffff", "ip:2001%3Adb8%3A1%3A2%3A%3A/64"),
        ] {
            assert_eq!(Key::client(address.parse().unwrap()).canonical(), key);
        }
    }

    /// However a key is kept, it is one in a set and has one place in an order.
    #[test]
    fn keys_are_compared_by_their_canonical_text() {
        let [a, b] = ["user:1", "user:2"].map(|text| Key::parse(text).unwrap());
        let owned = Key::new("user", "1").unwrap();
        assert!(a < b && b > owned && a.partial_cmp(&owned) == Some(Ordering::Equal));
        assert_eq!(std::collections::HashSet::from([a.clone(), owned, b]).len(), 2);
        assert_eq!(std::collections::BTreeSet::from([a.clone(), a]).len(), 1);
    }

    #[cfg(feature = "http")]
    #[test]
    fn a_key_that_was_not_found_is_reported_as_missing() {
        assert_eq!(KeyError::from(Fault::NotFound).to_string(), "there is no key");
    }

    /// Whether parsing borrowed the text.
    fn is_borrowed(key: &Key<'_>) -> bool {
        matches!(key.canonical, Text::Borrowed(_))
    }

    #[test]
    fn text_is_read_into_parts() {
        for (text, namespace, key, version, canonical) in [
            ("foo", "default", "foo", None, "foo"),
            ("x", "default", "x", None, "x"),
            ("default:foo", "default", "foo", None, "foo"),
            ("default:foo:1", "default", "foo", Some("1"), "default:foo:1"),
            ("default:default", "default", "default", None, "default"),
            ("defaults:foo", "defaults", "foo", None, "defaults:foo"),
            ("user:42", "user", "42", None, "user:42"),
            ("user:42:v2", "user", "42", Some("v2"), "user:42:v2"),
            ("a:b:c", "a", "b", Some("c"), "a:b:c"),
            (
                "tenant:0000000000000042:v2",
                "tenant",
                "0000000000000042",
                Some("v2"),
                "tenant:0000000000000042:v2",
            ),
            ("ip:2001%3Adb8%3A%3A1", "ip", "2001:db8::1", None, "ip:2001%3Adb8%3A%3A1"),
            ("ip:%3a%3a1", "ip", "::1", None, "ip:%3A%3A1"),
            ("default:%3a%3a1", "default", "::1", None, "%3A%3A1"),
            ("%253A", "default", "%3A", None, "%253A"),
            ("100%25:%3A:%25", "100%", ":", Some("%"), "100%25:%3A:%25"),
            ("{tag}:a b", "{tag}", "a b", None, "{tag}:a b"),
            ("default:naïve", "default", "naïve", None, "naïve"),
            ("käse:🧀\u{202e}:é", "käse", "🧀\u{202e}", Some("é"), "käse:🧀\u{202e}:é"),
        ] {
            let parsed = Key::parse(text).unwrap();
            assert_eq!(parsed.canonical(), canonical, "{text}");
            assert_eq!((&*parsed.namespace(), &*parsed.key()), (namespace, key), "{text}");
            assert_eq!(parsed.version().as_deref(), version, "{text}");
            assert_eq!(is_borrowed(&parsed), !text.contains("%3a"), "{text}");
            assert_eq!(Key::parse(&parsed.to_string()).unwrap(), parsed, "{text}");
            let raw = match version {
                None => Key::new(namespace, key),
                Some(version) => Key::with_version(namespace, key, version),
            };
            assert_eq!(raw.unwrap(), parsed.into_owned(), "{text}");
        }
    }

    #[test]
    fn malformed_text_is_refused_with_a_fix() {
        let long = "x".repeat(1025);
        let no_fix = None::<&str>;
        for (text, message, suggestion) in [
            ("", "the key is empty; write `namespace:key[:version]`", no_fix),
            (":", "the namespace is empty; a part has 1 to 1024 bytes", Some("%3A")),
            (":a", "the namespace is empty", Some("%3Aa")),
            ("user:", "the key is empty", Some("user%3A")),
            ("user::v2", "the key is empty", Some("user:%3Av2")),
            ("user:42:", "the version is empty", Some("user:42%3A")),
            ("::1", "the namespace is empty", Some("ip:%3A%3A1")),
            ("2001:db8::1", "the key has 4 parts", Some("ip:2001%3Adb8%3A%3A1")),
            ("a:b:c:d", "the key has 4 parts", Some("a:b%3Ac%3Ad")),
            ("a:b:c:d:e:f:g:h:i:j", "the key has 10 parts", Some("a:b%3Ac%3Ad%3Ae%3Af%3Ag%3Ah%3Ai%3Aj")),
            ("ip:2001:db8::1", "write a `:` inside a part as `%3A`", Some("ip:2001%3Adb8%3A%3A1")),
            ("ip:2001%3adb8:0:5%:1", "the key has 5 parts", Some("ip:2001%3Adb8%3A0%3A5%25%3A1")),
            ("::ffff:1.2.3.4", "the key has 4 parts", Some("ip:1.2.3.4")),
            ("a:\0:b:c", "the key has 4 parts", no_fix),
            ("100%", "the key has a `%` at byte 4 that encodes nothing; write `%` as `%25`", Some("100%25")),
            ("disk:100%:v2", "the key has a `%` at byte 4", Some("disk:100%25:v2")),
            ("a%41:b", "the namespace has a `%` at byte 2", Some("a%2541:b")),
            ("a:b:%", "the version has a `%` at byte 1", Some("a:b:%25")),
            ("%::b", "the namespace has a `%` at byte 1", Some("%25:%3Ab")),
            ("%é", "the key has a `%` at byte 1", Some("%25é")),
            ("user:4\u{7}2", "the key has the control character U+0007 at byte 2; remove it", no_fix),
            ("user\u{7f}:42", "the namespace has the control character U+007F", no_fix),
            ("user:42:\u{85}", "the version has the control character U+0085", no_fix),
            (&long, "the key is 1025 bytes long", no_fix),
            (&format!("{long}:a"), "the namespace is 1025 bytes long; a part may have 1 to 1024", no_fix),
            (&format!("%{long}"), "the key has a `%` at byte 1", no_fix),
            (&"x".repeat(1 << 20), "the key is 1048576 bytes long; each part may have 1 to 1024", no_fix),
            (&":".repeat(1024), "the key has 1025 parts", no_fix),
        ] {
            let error = Key::parse(text).unwrap_err();
            assert!(error.to_string().contains(message), "{text:.40}: {error}");
            match suggestion {
                None if text.len() < 1024 => assert_eq!(error.suggestion(), None, "{text}"),
                None => {}
                Some(_) => assert_eq!(error.suggestion(), suggestion, "{text}"),
            }
        }
    }

    #[test]
    fn raw_parts_are_refused_alike() {
        let long = "é".repeat(513);
        for (namespace, key, version, message) in [
            ("", "a", "b", "the namespace is empty"),
            ("a", "", "b", "the key is empty"),
            ("a", "b", "", "the version is empty"),
            (&long, "a", "b", "the namespace is 1026 bytes long"),
            ("a", &long, "b", "the key is 1026 bytes long"),
            ("a", "b", &long, "the version is 1026 bytes long"),
            ("a", "b\n", "c", "the key has the control character U+000A at byte 2"),
        ] {
            let error = Key::with_version(namespace, key, version).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
            assert_eq!(error.suggestion(), None);
            if !version.is_empty() && version.len() <= MAX_PART {
                assert_eq!(Key::new(namespace, key).unwrap_err(), error);
            }
        }
    }

    #[test]
    fn a_part_has_up_to_1024_bytes_before_encoding() {
        for part in ["x", ":", "%", "é"] {
            let part = part.repeat(MAX_PART / part.len());
            let key = Key::with_version(&part, &part, &part).unwrap();
            assert!(key.to_string().len() <= MAX_TEXT);
            assert_eq!(Key::parse(&key.to_string()).unwrap(), key);
            assert!(Key::new(&part, &format!("{part}x")).is_err());
        }
    }

    #[test]
    fn a_long_suggestion_is_cut_between_characters_and_escapes() {
        for (text, end) in [
            (format!("a:{}", "b:".repeat(100)), "%3Ab…"),
            (format!("ab:{}:c:d", "é".repeat(300)), "é…"),
            (format!("a:b:c:d{}", ":".repeat(300)), "%3A%3A…"),
        ] {
            let error = Key::parse(&text).unwrap_err();
            let suggestion = error.suggestion().unwrap();
            assert!(suggestion.len() <= MAX_SUGGESTION + '…'.len_utf8(), "{suggestion}");
            assert!(suggestion.ends_with(end), "{suggestion}");
        }
    }

    #[test]
    fn logs_never_see_a_key() {
        let key = Key::parse("user:alice").unwrap();
        assert_eq!(format!("{key:?}"), "Key(..)");
        for text in ["user:alice%", "alice:alice:alice:alice", "alice:", "alice\n", &"alice".repeat(300)] {
            let error = Key::parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("alice"), "{error:?}");
            assert!(format!("{error:?}").contains("the "), "{error:?}");
        }
    }

    /// `PROPTEST_CASES` random texts, or 10,000.
    fn config() -> ProptestConfig {
        let cases = std::env::var("PROPTEST_CASES").unwrap_or_default().parse().unwrap_or(10_000);
        ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
    }

    /// A sound part, as hostile as parts come: few pieces, so that pairs often nearly collide.
    fn part() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            6 => proptest::sample::select(vec![
                ":", "%", "%3A", "%3a", "%25", "3A", "25", "{", "}", "{}", "default", "a", "v1", " ", "🧀", "\u{202e}", "\u{feff}",
                "e\u{301}", "é", "/", "\\", "\"",
            ])
            .prop_map(str::to_owned),
            1 => any::<char>().prop_map(|c| if c.is_control() { "?".to_owned() } else { c.to_string() }),
        ];
        prop_oneof![
            12 => proptest::collection::vec(piece, 1..5).prop_map(|pieces| pieces.concat()),
            1 => proptest::sample::select(vec![":", "%", "x", "é", "🧀"])
                .prop_map(|unit| unit.repeat(MAX_PART / unit.len())),
        ]
    }

    type Parts = (String, String, Option<String>);

    fn parts() -> impl Strategy<Value = Parts> {
        let namespace = prop_oneof![1 => Just("default".to_owned()), 3 => part()];
        (namespace, part(), proptest::option::of(part()))
    }

    fn key((namespace, key, version): &Parts) -> Key<'static> {
        match version {
            None => Key::new(namespace, key).unwrap(),
            Some(version) => Key::with_version(namespace, key, version).unwrap(),
        }
    }

    fn parts_of(key: &Key<'_>) -> Parts {
        (key.namespace().into_owned(), key.key().into_owned(), key.version().map(Cow::into_owned))
    }

    /// Any text: hostile pieces, control characters and noise.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            3 => Just(":".to_owned()),
            3 => part(),
            1 => any::<char>().prop_map(String::from),
            1 => proptest::sample::select(vec!["\0", "\u{7f}", "\u{85}", "%4", "%zz"]).prop_map(str::to_owned),
        ];
        proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn parts_come_back(parts in parts()) {
            let key = key(&parts);
            prop_assert_eq!(&parts_of(&key), &parts);
            for text in [key.canonical().to_owned(), key.to_string()] {
                let parsed = Key::parse(&text).unwrap();
                prop_assert_eq!(&parsed, &key);
                prop_assert_eq!(&parts_of(&parsed), &parts);
                prop_assert!(is_borrowed(&parsed));
            }
        }

        #[test]
        fn different_parts_are_different_keys(one in parts(), other in parts()) {
            prop_assert_eq!(key(&one) == key(&other), one == other);
            prop_assert_eq!(key(&one).canonical() == key(&other).canonical(), one == other);
        }

        /// Moving a separator from one part to the next is the classic way to reach the counter of another key.
        #[test]
        fn a_separator_moved_is_another_key(left in part(), middle in part(), right in part()) {
            let keys = [
                Key::new(&format!("{left}:{middle}"), &right),
                Key::new(&left, &format!("{middle}:{right}")),
                Key::with_version(&left, &middle, &right),
                Key::new("default", &format!("{left}:{middle}:{right}")),
            ];
            let keys: Vec<_> = keys.into_iter().flatten().collect();
            let distinct: std::collections::BTreeSet<_> = keys.iter().map(Key::canonical).collect();
            prop_assert_eq!(distinct.len(), keys.len());
        }

        #[test]
        fn any_text_is_one_key_or_a_clear_error(text in text()) {
            match Key::parse(&text) {
                Ok(key) => {
                    let again = Key::parse(key.canonical()).unwrap();
                    prop_assert_eq!(again.canonical(), key.canonical());
                    let full = key.to_string();
                    prop_assert_eq!(&Key::parse(&full).unwrap(), &key);
                    prop_assert!(key == self::key(&parts_of(&key)));
                    // The only spellings of a key: with or without `default:`, escapes in either case.
                    let upper = text.replace("%3a", "%3A");
                    prop_assert!(upper == full || upper == key.canonical());
                }
                Err(error) => {
                    if let Some(suggestion) = error.suggestion().filter(|text| !text.ends_with('…')) {
                        let mended = Key::parse(suggestion).unwrap();
                        prop_assert_eq!(mended.canonical(), suggestion);
                    }
                }
            }
        }
    }
}
