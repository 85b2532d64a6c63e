//! Key names in Redis, and their cluster slots.
//!
//! Every name starts with the prefix and the version of the stored format, and has one pair of braces: `{…}` around 128 bits of a
//! hash. No byte of a caller's key reaches Redis, so a key cannot choose a slot, break out of a name or make it longer. The names
//! are a stored format (docs/storage.md). What is stored under them is not decided here; `route.rs` maps slots to servers.

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use tollgate_kernel::Strategy;

use crate::StoredCharge;
use crate::remote::name_of;
use crate::{ChargeId, RecordKind, Subject};

/// The version of the names. The values are of format 2, which is marked in the value, or of format 1, which can still be read.
/// With another number here, existing counters would not be found.
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

    /// The name of a part. Limits of one key share a hash tag; all keys of a namespace share one if the namespace is the subject,
    /// and all keys if all is the subject.
    pub(crate) fn part(&self, part: &StoredCharge<'_>) -> String {
        let tag = base64(name_of(&[subject(part)]));
        let (start, kind, limit) = (&self.start, kind(part), &part.limit.name);
        match part.limit.subject {
            Subject::Key => format!("{start}{{{tag}}}:{kind}:{limit}"),
            Subject::Namespace | Subject::All => {
                format!("{start}{{{tag}}}:{kind}:{limit}:{}", base64(name_of(&[part.key])))
            }
        }
    }

    /// The name of a hold.
    pub(crate) fn hold(&self, id: ChargeId) -> String {
        format!("{}hold:{{{}}}", self.start, base64(id.get().to_be_bytes()))
    }

    /// The name of the value that says where the parts of a hold are, on a cluster.
    pub(crate) fn place(&self, id: ChargeId) -> String {
        format!("{}place:{{{id}}}", self.start)
    }

    /// The name of a hold in the slot of one of its parts, on a cluster.
    pub(crate) fn hold_beside(&self, part_name: &str, id: ChargeId) -> String {
        format!("{}{{{}}}:hold:{}", self.start, tag(part_name), base64(id.get().to_be_bytes()))
    }

    /// The names of the records of a kind and of their ends: one slot for both.
    pub(crate) fn records(&self, kind: RecordKind) -> [String; 2] {
        let records = format!("{}records:{{{}}}", self.start, kind.name());
        [records.clone(), records + ":ends"]
    }

    /// The prefix of all part names, up to and including the brace.
    pub(crate) fn part_start(&self) -> String {
        format!("{}{{", self.start)
    }

    /// The prefix of all names.
    #[cfg(test)]
    pub(crate) fn start(&self) -> &str {
        &self.start
    }
}

/// The text whose hash decides the slot of a part.
fn subject<'a>(part: &StoredCharge<'a>) -> &'a str {
    match part.limit.subject {
        Subject::Key => part.key,
        // Canonical text without a `:` is a key of the default namespace; its name is a valid subject too.
        Subject::Namespace => part.key.split_once(':').map_or("default", |(namespace, _)| namespace),
        Subject::All => "all",
    }
}

/// The kind of state, as a letter of the name: a limit whose strategy changes starts with empty counters instead of reading those
/// of the other strategy. Both buckets have the same state.
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

/// The hash tag of a name: the text between its braces.
fn tag(name: &str) -> &str {
    let inside = name.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    inside.map_or(name, |(tag, _)| tag)
}

/// The slot of a name.
pub(crate) fn slot(name: &str) -> u16 {
    crc16(tag(name).as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, the hash of Redis Cluster.
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
        // A change of these values is a new version of the stored state.
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
    fn the_subject_is_the_key_or_its_namespace_or_all() {
        let [by_key, by_namespace, all] =
            [Subject::Key, Subject::Namespace, Subject::All].map(|subject| limit("a", subject));
        for (limit, key, expected) in [
            (&by_key, "acme:alice", "acme:alice"),
            (&by_namespace, "acme:alice", "acme"),
            (&by_namespace, "acme:alice:v2", "acme"),
            (&by_namespace, "alice", "default"),
            (&all, "acme:alice", "all"),
            (&all, "alice", "all"),
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
        let (all, others) = (limit("d", Subject::All), limit("e", Subject::All));
        assert_eq!(slot(&name(&all, "job:x")), slot(&name(&others, "global")));
        assert_ne!(name(&all, "job:x"), name(&all, "global"));
    }

    /// No byte of a caller reaches a name, so braces in a key choose no slot; ten thousand keys are spread evenly.
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
