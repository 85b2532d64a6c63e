//! Who pays for a descriptor: a key in the namespace of its domain.
//!
//! The key is the descriptor's text, `path=/login&remote_address=192.0.2.1`, so that operators can read it and ask for it.
//! What could be taken for a separator is percent-encoded, so no two descriptors have the same text; one that is too long
//! for a key is known by its SHA-256 instead, which no text of a descriptor can be.

use std::fmt::Write;

use sha2::{Digest, Sha256};
use tollgate::config::{EnvoyEntry, EnvoyValue};
use tollgate::{Key, KeyError};

/// The longest text that is kept as it is: as long as a part of a key may be.
const LONGEST: usize = 1_024;

/// The key of a descriptor. Entries that a rule counts together are known by what the rule says of them.
pub(super) fn key(domain: &str, entries: &[(&str, &str)], rule: &[EnvoyEntry]) -> Result<String, KeyError> {
    let mut text =
        String::with_capacity(entries.iter().map(|(key, value)| key.len() + value.len() + 2).sum());
    for (index, (key, value)) in entries.iter().enumerate() {
        if index > 0 {
            text.push('&');
        }
        escape(&mut text, key, &['%', '&', '=', '*']);
        match rule.get(index).filter(|entry| entry.shared).map(|entry| &entry.value) {
            Some(EnvoyValue::Prefix(prefix)) => {
                text.push_str("*=");
                escape(&mut text, prefix, &['%', '&']);
            }
            Some(_) => text.push_str("*="),
            None => {
                text.push('=');
                escape(&mut text, value, &['%', '&']);
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
    Ok(Key::new(domain, &text)?.into_canonical())
}

/// Adds a text, with these characters and all control characters percent-encoded.
fn escape(out: &mut String, text: &str, special: &[char]) {
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !special.contains(&char::from(*byte));
    if text.as_bytes().iter().all(is_plain) {
        return out.push_str(text);
    }
    for character in text.chars() {
        if special.contains(&character) || character.is_control() {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                let _ = write!(out, "%{byte:02X}");
            }
        } else {
            out.push(character);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tollgate::config::Config;

    use super::*;

    fn check(entries: &[(&str, &str)], expected: &str) {
        let found = key("edge", entries, &[]).expect("a key");
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
            let key = key("edge", &entries, &[]).expect("a key");
            if let Some(other) = known.insert(key, entries.clone()) {
                panic!("{other:?} and {entries:?} share a key");
            }
        }
        assert!(known.keys().all(|key| key.len() <= 3 * LONGEST + 10));
    }

    #[test]
    fn what_is_shared_is_one_payer() {
        let rules =
            "[[envoy]]\ndomain = 'edge'\nentries = ['a', 'b=c*', 'd']\nunlimited = true\nshared = ['a', 'b']";
        let config = Config::parse(rules).expect("sound");
        let rule = &config.envoy.rules()[0].entries;
        let of = |a, b, d| key("edge", &[("a", a), ("b", b), ("d", d)], rule).expect("a key");
        assert_eq!(of("1", "c2", "3"), "edge:a*=&b*=c&d=3");
        assert_eq!(of("1", "c2", "3"), of("9", "c9", "3"));
        assert_ne!(of("1", "c2", "3"), of("1", "c2", "4"));
        assert_ne!(
            of("1", "c2", "3"),
            key("edge", &[("a*", ""), ("b*", "c"), ("d", "3")], &[]).expect("a key")
        );
    }

    #[test]
    fn a_domain_must_be_fit_for_a_key() {
        assert!(key("", &[("a", "b")], &[]).is_err());
        assert!(key("a\0", &[("a", "b")], &[]).is_err());
    }
}
