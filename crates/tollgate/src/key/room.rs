//! A buffer for the keys of one request. Each key is the prefix of its namespace and a value from the request.
//!
//! A text is written where it is read later: moving a key right after it was written would stall on the write, which takes longer
//! than the write itself.

use arrayvec::ArrayString;

use super::plain::Plain;
use super::{Key, KeyError};

/// How many bytes the keys of a request have without an allocation.
const ROOM: usize = 192;

/// The keys of a request, one after the other.
pub(crate) struct KeyRoom {
    text: ArrayString<ROOM>,
}

/// A key of a request.
pub(crate) enum RoomKey<'a> {
    /// The same for many requests. Canonical, as all of them are.
    Whole(&'a str),
    /// The range of the text in the buffer.
    Written { start: u16, end: u16 },
    /// There was no room.
    Long(Box<str>),
}

impl KeyRoom {
    #[inline]
    pub(crate) const fn new() -> KeyRoom {
        KeyRoom { text: ArrayString::new_const() }
    }

    /// Makes a key from a prefix as [`Key::prefix`] makes it and a raw key.
    #[inline]
    pub(crate) fn write(&mut self, prefix: &str, raw: &str) -> Result<RoomKey<'static>, KeyError> {
        // Nearly every key is plain, and one part.
        if Plain::is_one_part(raw.as_bytes()) {
            return Ok(self.join(prefix, raw));
        }
        let canonical = Key::canonical_after(prefix, raw)?;
        Ok(self.join(&canonical, ""))
    }

    /// A text that is joined from two.
    #[inline]
    fn join(&mut self, one: &str, other: &str) -> RoomKey<'static> {
        let start = self.text.len();
        if one.len() + other.len() > self.text.remaining_capacity() {
            return RoomKey::Long([one, other].concat().into());
        }
        self.text.push_str(one);
        self.text.push_str(other);
        let offset = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        RoomKey::Written { start: offset(start), end: offset(self.text.len()) }
    }

    /// The canonical text of a key of this room.
    #[inline]
    pub(crate) fn text<'t>(&'t self, key: &'t RoomKey<'_>) -> &'t str {
        match key {
            RoomKey::Whole(text) => text,
            RoomKey::Written { start, end } => &self.text[usize::from(*start)..usize::from(*end)],
            RoomKey::Long(text) => text,
        }
    }

    /// The key itself.
    pub(crate) fn key<'a>(&self, key: RoomKey<'a>) -> Key<'a> {
        match key {
            RoomKey::Whole(text) => Key::from_canonical(text),
            other => Key::from_canonical(self.text(&other)).into_owned(),
        }
    }

    /// The same key, borrowing nothing.
    pub(crate) fn keep(&mut self, key: RoomKey<'_>) -> RoomKey<'static> {
        match key {
            RoomKey::Whole(text) => self.join(text, ""),
            RoomKey::Written { start, end } => RoomKey::Written { start, end },
            RoomKey::Long(text) => RoomKey::Long(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_and_a_raw_key_make_the_same_key() {
        let long = "x".repeat(1_024);
        let mut room = KeyRoom::new();
        let mut made = Vec::new();
        for (namespace, raw) in [
            ("user", "42"),
            ("default", "42"),
            ("ip", "2001:db8::1"),
            ("100%", "%:%3A::"),
            ("a:b", "ü%"),
            ("user", &long[..100]),
            ("user", &long[..100]),
            ("user", &long),
            ("user", "43"),
        ] {
            let key = room.write(&Key::prefix(namespace).unwrap(), raw).unwrap();
            made.push((key, Key::new(namespace, raw).unwrap()));
        }
        // All keys are there, including those that did not fit in the buffer.
        for (key, expected) in made {
            assert_eq!(room.text(&key), expected.canonical());
            assert_eq!(room.key(key), expected);
        }
        assert!(Key::prefix("").is_err() && Key::prefix("a\n").is_err());
        for raw in ["", "a\0", &"x".repeat(1025)] {
            assert_eq!(room.write("user:", raw).err(), Key::new("user", raw).err(), "{raw:?}");
        }
    }

    #[test]
    fn a_key_is_kept_without_what_it_was_borrowed_from() {
        let mut room = KeyRoom::new();
        let written = room.write("user:", "42").unwrap();
        for (key, expected) in [
            (RoomKey::Whole("all:all"), "all:all"),
            (written, "user:42"),
            (RoomKey::Long("a:b".into()), "a:b"),
            (RoomKey::Whole(&"x".repeat(ROOM)), &"x".repeat(ROOM)),
        ] {
            let key = room.keep(key);
            assert_eq!(room.text(&key), expected);
        }
    }
}
