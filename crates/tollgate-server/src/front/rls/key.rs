//! The key of a descriptor, in the namespace of its domain.
//!
//! The key is the descriptor's text, `path=/login&remote_address=192.0.2.1`, so that operators can read it and ask for it.
//! What could be taken for a separator is percent-encoded, and so is every byte that is not text (UTF-8), so no two descriptors have
//! the same text; one that is too long for a key is known by its SHA-256 instead, which no text of a descriptor can be.

use std::fmt::Write;

use percent_encoding::percent_encode_byte;
use sha2::{Digest, Sha256};
use tollgate::Key;

use tollgate::key::KeyError;

use crate::config::envoy::{EnvoyEntry, EnvoyValue};

/// The longest text that is kept as it is: as long as a part of a key may be.
const LONGEST: usize = 1_024;

/// The key of a descriptor. Entries that a rule counts together are known by what the rule says of them. The text is written to `text`, whose
/// memory serves for all descriptors of a call.
pub(super) fn key(
    text: &mut String,
    domain: &str,
    entries: &[(&[u8], &[u8])],
    rule: &[EnvoyEntry],
) -> Result<Key<'static>, KeyError> {
    text.clear();
    text.reserve(entries.iter().map(|(key, value)| key.len() + value.len() + 2).sum());
    for (index, (key, value)) in entries.iter().enumerate() {
        if index > 0 {
            text.push('&');
        }
        escape(text, key, &['%', '&', '=', '*']);
        match rule.get(index).filter(|entry| entry.shared).map(|entry| &entry.value) {
            Some(EnvoyValue::Prefix(prefix)) => {
                text.push_str("*=");
                escape(text, prefix.as_bytes(), &['%', '&']);
            }
            Some(_) => text.push_str("*="),
            None => {
                text.push('=');
                escape(text, value, &['%', '&']);
            }
        }
    }
    if text.len() > LONGEST {
        let hash = Sha256::digest(text.as_bytes());
        text.clear();
        // Without `=`, which every other text has.
        text.push_str("sha256-");
        for byte in hash {
            let _ = write!(text, "{byte:02x}");
        }
    }
    Key::new(domain, text)
}

/// Adds a text, with these characters, all control characters and what is not text percent-encoded. `%` is always among the
/// characters, so the bytes can be recovered from the text.
fn escape(out: &mut String, text: &[u8], special: &[char]) {
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !special.contains(&char::from(*byte));
    let encode = |out: &mut String, bytes: &[u8]| {
        out.extend(bytes.iter().map(|byte| percent_encode_byte(*byte)));
    };
    for chunk in text.utf8_chunks() {
        match chunk.valid().bytes().all(|byte| is_plain(&byte)) {
            true => out.push_str(chunk.valid()),
            false => {
                for character in chunk.valid().chars() {
                    if special.contains(&character) || character.is_control() {
                        encode(out, character.encode_utf8(&mut [0; 4]).as_bytes());
                    } else {
                        out.push(character);
                    }
                }
            }
        }
        encode(out, chunk.invalid());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use crate::config::Config;

    use super::*;

    /// A key of entries that are text.
    fn key_of(entries: &[(&str, &str)], rule: &[EnvoyEntry]) -> String {
        let entries: Vec<(&[u8], &[u8])> =
            entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
        key(&mut String::new(), "edge", &entries, rule).expect("a key").into_canonical()
    }

    fn check(entries: &[(&str, &str)], expected: &str) {
        let found = key_of(entries, &[]);
        let (namespace, text) = {
            let parsed = Key::parse(&found).expect("it can be read");
            (parsed.namespace().into_owned(), parsed.key().into_owned())
        };
        assert_eq!((&*namespace, &*text), ("edge", expected), "{entries:?}");
    }

    #[test]
    fn a_key_can_be_read() {
        check(&[("remote_address", "192.0.2.1")], "remote_address=192.0.2.1");
        check(&[("path", "/a=b"), ("ip", "::1")], "path=/a=b&ip=::1");
        check(&[("a&b", "c&d=%")], "a%26b=c%26d=%25");
        check(&[("a", "")], "a=");
        check(&[("a", "x\n\u{85}y")], "a=x%0A%C2%85y");
        check(&[("a*", "*")], "a%2A=*");
    }

    #[test]
    fn no_two_descriptors_share_a_key() {
        let long = "x".repeat(2_000);
        let longer = "x".repeat(2_001);
        let mut known: HashMap<String, Vec<(&str, &str)>> = HashMap::new();
        for entries in [
            vec![("a", "b_c")],
            vec![("a_b", "c")],
            vec![("a", "b"), ("c", "d")],
            vec![("a", "b&c=d")],
            vec![("a=b&c", "d")],
            vec![("a", "b%26c=d")],
            vec![("a", "b"), ("c", "d"), ("", "")],
            vec![("a", "b"), ("c", "d&=")],
            vec![("", "a"), ("b", "")],
            vec![("", ""), ("a", "b")],
            vec![("a", &long)],
            vec![("a", &longer)],
            vec![("ax", &long[1..])],
            vec![("sha256-", "")],
            vec![("a*", "")],
        ] {
            let key = key_of(&entries, &[]);
            if let Some(other) = known.insert(key, entries.clone()) {
                panic!("{other:?} and {entries:?} share a key");
            }
        }
        assert!(known.keys().all(|key| key.len() <= 3 * LONGEST + 10));
    }

    /// Every byte string has a key of its own, and can be recovered from it.
    #[test]
    fn what_is_not_text_has_a_key_of_its_own() {
        let mut values: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        values.extend((0..=255).map(|byte| vec![b'%', byte]));
        for text in ["%FF", "%ff", "%25FF", "\u{ff}", "\u{fffd}", "\u{85}", "é", "a\u{301}"] {
            values.push(text.as_bytes().to_vec());
        }
        for bytes in [
            &b"\xff\xff"[..],
            b"\xc3",
            b"\xc3\x28",
            b"\xed\xa0\x80",
            b"a\xffb",
            b"\xf0\x9f\x92",
            b"\xff%FF",
            b"%FF\xff",
        ] {
            values.push(bytes.to_vec());
        }
        let mut known: HashMap<String, Vec<u8>> = HashMap::new();
        for value in values {
            let key =
                key(&mut String::new(), "edge", &[(b"x-user", &value)], &[]).expect("a key").into_canonical();
            assert!(Key::parse(&key).is_ok_and(|parsed| parsed.canonical() == key), "{key}");
            if let Some(other) = known.insert(key, value.clone()) {
                assert_eq!(other, value, "two values share a key");
            }
        }
        let of = |key: &[u8], value: &[u8]| {
            super::key(&mut String::new(), "edge", &[(key, value)], &[]).expect("a key")
        };
        assert_eq!(of(b"x-user", b"\xff").canonical(), "edge:x-user=%25FF");
        assert_ne!(of(b"a\xff", b""), of(b"a", b"\xff"));
        assert_ne!(of(b"a", &[0xff; 2_000]), of(b"a", &[0xff; 2_001]));
    }

    #[test]
    fn what_is_shared_is_one_key() {
        let rules =
            "[[envoy]]\ndomain = 'edge'\nentries = ['a', 'b=c*', 'd']\nunlimited = true\nshared = ['a', 'b']";
        let config = Config::parse(rules).expect("sound");
        let rule = &config.envoy.rules()[0].entries;
        let of = |a, b, d| key_of(&[("a", a), ("b", b), ("d", d)], rule);
        assert_eq!(of("1", "c2", "3"), "edge:a*=&b*=c&d=3");
        assert_eq!(of("1", "c2", "3"), of("9", "c9", "3"));
        assert_ne!(of("1", "c2", "3"), of("1", "c2", "4"));
        assert_ne!(of("1", "c2", "3"), key_of(&[("a*", ""), ("b*", "c"), ("d", "3")], &[]));
    }

    #[test]
    fn a_domain_must_be_fit_for_a_key() {
        assert!(key(&mut String::new(), "", &[(b"a", b"b")], &[]).is_err());
        assert!(key(&mut String::new(), "a\0", &[(b"a", b"b")], &[]).is_err());
    }
}
