//! Names in Redis, and the slots of a cluster that they fall into.
//!
//! Every name begins with the prefix and the version of the stored format, and has one pair of braces, ours: `{…}` around 128
//! bits of a hash. No byte of a caller's key reaches Redis, so none can choose a slot, break out of a name or grow it.

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use tollgate_kernel::Strategy;

use crate::StoredCharge;
use crate::remote::name_of;
use crate::{ChargeId, Subject};

/// The version of the names. What is kept under them is of format 2, which says so itself, or of format 1, which is still read;
/// another number here would be a change that finds nothing of what was kept before.
pub(crate) const FORMAT: u32 = 1;

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;

/// Makes names.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    start: String,
}

impl Names {
    pub(crate) fn new(prefix: &str) -> Names {
        Names { start: format!("{prefix}{FORMAT}:") }
    }

    /// Where a part is kept. Limits of one key share a tag, and so do all keys of a namespace if that is the subject.
    pub(crate) fn part(&self, part: &StoredCharge<'_>) -> String {
        let tag = base64(name_of(&[subject(part)]));
        let (start, kind, limit) = (&self.start, kind(part), &part.limit.name);
        match part.limit.subject {
            Subject::Key => format!("{start}{{{tag}}}:{kind}:{limit}"),
            Subject::Namespace => format!("{start}{{{tag}}}:{kind}:{limit}:{}", base64(name_of(&[part.key]))),
        }
    }

    /// Where a hold is kept.
    pub(crate) fn hold(&self, id: ChargeId) -> String {
        format!("{}hold:{{{}}}", self.start, base64(id.get().to_be_bytes()))
    }

    /// What says where the parts of a hold are kept, on a cluster.
    pub(crate) fn place(&self, id: ChargeId) -> String {
        format!("{}place:{{{id}}}", self.start)
    }

    /// Where a hold is kept beside a part of it, on a cluster.
    pub(crate) fn hold_beside(&self, part_name: &str, id: ChargeId) -> String {
        format!("{}{{{}}}:hold:{}", self.start, tag(part_name), base64(id.get().to_be_bytes()))
    }

    /// What the names of all parts begin with: up to the brace, and with it.
    pub(crate) fn part_start(&self) -> String {
        format!("{}{{", self.start)
    }

    /// What all our names begin with.
    #[cfg(test)]
    pub(crate) fn start(&self) -> &str {
        &self.start
    }
}

/// The text that decides where a part is kept.
fn subject<'a>(part: &StoredCharge<'a>) -> &'a str {
    match part.limit.subject {
        Subject::Key => part.key,
        // Canonical text without a `:` is a key of the default namespace, whose name is as good a subject as any.
        Subject::Namespace => part.key.split_once(':').map_or("default", |(namespace, _)| namespace),
    }
}

/// What is kept for a part, as a letter of its name: a limit that is given another strategy begins afresh, and does not take
/// what was counted otherwise for its own. Both buckets keep the same.
fn kind(part: &StoredCharge<'_>) -> char {
    match part.limit.limit.strategy() {
        Strategy::TokenBucket | Strategy::LeakyBucket => 'b',
        Strategy::FixedWindow => 'w',
        Strategy::SlidingWindow => 'l',
        Strategy::SlidingWindowCounter => 'c',
        Strategy::Concurrency => 'h',
    }
}

/// 128 bits in 22 characters.
fn base64(bytes: [u8; 16]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

/// What is between the braces of a name.
fn tag(name: &str) -> &str {
    let inside = name.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    inside.map_or(name, |(tag, _)| tag)
}

/// The slot of a name.
pub(crate) fn slot(name: &str) -> u16 {
    crc16(tag(name).as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, which is what Redis Cluster hashes with.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cost, Limit, Micros, StoredLimit};
    use std::collections::BTreeSet;

    fn limit(name: &str, subject: Subject) -> StoredLimit {
        let limit = Limit::fixed_window(5, Micros::from_secs(60)).unwrap();
        StoredLimit { subject, ..StoredLimit::new(name, limit) }
    }

    fn name(limit: &StoredLimit, key: &str) -> String {
        Names::new("tollgate:").part(&StoredCharge { limit, key, cost: Cost::ONE, shadow: false })
    }

    #[test]
    fn slots_are_redis_own() {
        // From the cluster specification, and from `CLUSTER KEYSLOT`.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        for (text, expected) in [("foo", 12_182), ("{user1000}.following", 3_443), ("", 0)] {
            assert_eq!(slot(text), expected, "{text}");
        }
    }

    #[test]
    fn names_are_of_the_stored_format() {
        // A change of these is a new version of the stored state.
        let api = limit("api", Subject::Key);
        assert_eq!(name(&api, "user:42"), "tollgate:1:{-8NHhShsj_9IIQkVQFeVNA}:w:api");
        let id = ChargeId::new(0xabc).unwrap();
        let names = Names::new("tollgate:");
        assert_eq!(names.hold(id), "tollgate:1:hold:{AAAAAAAAAAAAAAAAAAAKvA}");
        let beside = names.hold_beside(&name(&api, "user:42"), id);
        assert_eq!(slot(&beside), slot(&name(&api, "user:42")));
        assert!(beside.starts_with(names.start()));
    }

    #[test]
    fn the_subject_is_the_key_or_its_namespace() {
        let (by_key, by_namespace) = (limit("a", Subject::Key), limit("a", Subject::Namespace));
        for (limit, key, expected) in [
            (&by_key, "acme:alice", "acme:alice"),
            (&by_namespace, "acme:alice", "acme"),
            (&by_namespace, "acme:alice:v2", "acme"),
            (&by_namespace, "alice", "default"),
        ] {
            assert_eq!(subject(&StoredCharge { limit, key, cost: Cost::ONE, shadow: false }), expected);
        }
    }

    #[test]
    fn another_strategy_is_another_name() {
        let window = limit("a", Subject::Key);
        let log = Limit::sliding_window(5, Micros::from_secs(60)).unwrap();
        assert_ne!(name(&window, "x"), name(&StoredLimit::new("a", log), "x"));
        let rate = "5/s";
        let [token, leaky] = [Limit::token_bucket(rate, 5), Limit::leaky_bucket(rate, 5)]
            .map(|limit| name(&StoredLimit::new("a", limit.unwrap()), "x"));
        assert_eq!(token, leaky);
    }

    #[test]
    fn a_subject_keeps_its_keys_together() {
        let (by_key, by_namespace) = (limit("a", Subject::Key), limit("b", Subject::Namespace));
        assert_eq!(slot(&name(&by_key, "acme:x")), slot(&name(&limit("c", Subject::Key), "acme:x")));
        assert_eq!(slot(&name(&by_namespace, "acme:x")), slot(&name(&by_namespace, "acme:y")));
        assert_ne!(name(&by_namespace, "acme:x"), name(&by_namespace, "acme:y"));
    }

    /// No caller's bytes reach a name, so braces in a key choose no slot; ten thousand keys spread.
    #[test]
    fn hostile_keys_neither_choose_slots_nor_collide() {
        let api = limit("api", Subject::Key);
        let mut names = BTreeSet::new();
        let mut slots = BTreeSet::new();
        for number in 0..10_000 {
            for key in [format!("{{same}}{number}"), format!("}}{{{number}"), format!("user:{number}")] {
                let name = name(&api, &key);
                assert!(name.len() < 64 && name.is_ascii());
                slots.insert(slot(&name));
                assert!(names.insert(name), "{key}");
            }
        }
        assert!(slots.len() > 13_000, "{} slots", slots.len());
        let long = name(&api, &"\u{1f600}".repeat(256));
        assert_eq!(long.len(), name(&api, "x").len());
        assert_ne!(name(&api, "a\0b"), name(&api, "a"));
    }
}
