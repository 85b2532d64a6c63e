//! The traffic in memory: requests in the order of replay, small enough that ten million of them fit.
//!
//! A request is 32 bytes: its key and its limit are numbers into tables that hold each text once. Two texts may name the same
//! key (`42` is `default:42`); the table knows, so that keys are counted as the limiter sees them and shown as they were
//! written. A line of an access log that meets several limits is as many requests, one after the other.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use foldhash::quality;

/// One line of a log, or what it owes under one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) time_us: u64,
    pub(super) cost: u64,
    /// The physical line in its file.
    pub(super) line: u64,
    pub(super) key: KeyId,
    /// An index into the limits of the policy.
    pub(super) limit: u16,
    /// An index into the files of the call.
    pub(super) file: u16,
}

/// A text that names a key: an index into [`Keys`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KeyId(u32);

impl KeyId {
    pub(super) const fn index(self) -> u32 {
        self.0
    }
}

/// Each text that names a key, once.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// By a hash with a random seed: a log may be made up to have keys that collide.
    ids: HashMap<Rc<str>, KeyId, quality::RandomState>,
    texts: Vec<Rc<str>>,
    /// For each text, the one that names the same key in its normal form.
    normal: Vec<KeyId>,
}

impl Keys {
    /// The id of a text that has been met before.
    pub(super) fn find(&self, text: &str) -> Option<KeyId> {
        self.ids.get(text).copied()
    }

    /// Enters a text and the normal form of the key it names; `None` when there are more than 2^32.
    pub(super) fn enter(&mut self, text: &str, normal: &str) -> Option<KeyId> {
        let normal = self.enter_text(normal)?;
        let id = self.enter_text(text)?;
        self.normal[id.0 as usize] = normal;
        Some(id)
    }

    fn enter_text(&mut self, text: &str) -> Option<KeyId> {
        if let Some(id) = self.find(text) {
            return Some(id);
        }
        let id = KeyId(u32::try_from(self.texts.len()).ok()?);
        let text: Rc<str> = text.into();
        self.ids.insert(Rc::clone(&text), id);
        self.texts.push(text);
        self.normal.push(id);
        Some(id)
    }

    /// As it was written.
    pub(super) fn text(&self, id: KeyId) -> &str {
        &self.texts[id.0 as usize]
    }

    /// The text that stands for the key: equal for all texts that name it.
    pub(super) fn normal(&self, id: KeyId) -> KeyId {
        self.normal[id.0 as usize]
    }

    /// The text at an index that came from [`KeyId::index`].
    pub(super) fn text_at(&self, index: u32) -> &str {
        &self.texts[index as usize]
    }

    /// Forgets how to find texts: the replay only asks for them by id.
    pub(super) fn close(&mut self) {
        self.ids = HashMap::default();
    }
}

/// All requests of all files.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) requests: Vec<Request>,
    pub(super) keys: Keys,
    /// The files whose lines are one charge each, however many limits it meets. In others every request is a charge of its own,
    /// and several may stand on one physical line.
    pub(super) whole_lines: BTreeSet<u16>,
}

impl Traffic {
    /// The charges, in the order of replay.
    pub(super) fn charges(&self) -> impl Iterator<Item = &[Request]> {
        self.requests.chunk_by(|one, next| {
            one.line == next.line && one.file == next.file && self.whole_lines.contains(&one.file)
        })
    }

    /// Puts the requests into the order of replay: by time, and those of the same instant as they came, file by file and line
    /// by line.
    pub(super) fn order(&mut self) {
        self.keys.close();
        if !self.requests.is_sorted_by_key(|request| request.time_us) {
            self.requests.sort_by_key(|request| request.time_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_million_requests_fit() {
        assert_eq!(size_of::<Request>(), 32);
    }

    #[test]
    fn texts_of_one_key_stand_together() {
        let mut keys = Keys::default();
        let short = keys.enter("42", "default:42").unwrap();
        let long = keys.enter("default:42", "default:42").unwrap();
        let other = keys.enter("user:42", "user:42").unwrap();
        assert_eq!((keys.text(short), keys.text(long)), ("42", "default:42"));
        assert_eq!(keys.normal(short), keys.normal(long));
        assert_ne!(keys.normal(short), keys.normal(other));
        assert_eq!(keys.find("42"), Some(short));
        assert_eq!(keys.find("43"), None);
    }

    #[test]
    fn order_is_by_time_and_keeps_ties() {
        let key = KeyId(0);
        let at = |time_us, line| Request { time_us, cost: 1, line, key, limit: 0, file: 0 };
        let mut traffic =
            Traffic { requests: vec![at(5, 1), at(3, 2), at(5, 3), at(3, 4)], ..Traffic::default() };
        let charges = |traffic: &Traffic| traffic.charges().map(<[Request]>::len).collect::<Vec<_>>();
        traffic.order();
        let lines: Vec<u64> = traffic.requests.iter().map(|request| request.line).collect();
        assert_eq!(lines, [2, 4, 1, 3]);
        assert_eq!(charges(&traffic), [1; 4]);
        // What stands on one line is one charge only where lines are.
        traffic.requests = vec![at(5, 1), at(5, 1), at(6, 2)];
        assert_eq!(charges(&traffic), [1; 3]);
        traffic.whole_lines.insert(0);
        assert_eq!(charges(&traffic), [2, 1]);
    }
}
