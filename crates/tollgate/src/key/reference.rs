//! A key as a caller passes it: text, a number, an address, or a [`Key`] that was parsed before.
//!
//! Building it never fails. A call of the engine parses it once: not at all if the key already has local counters, and not again
//! if the call waits and tries several times.

use std::fmt;
use std::net::IpAddr;

use super::text::Text;
use super::{Key, KeyError};

/// A key as a caller gives it: made by `into()` from `&str`, `String`, integers, `IpAddr` or [`Key`].
///
/// Text is `namespace:key[:version]`. A number is a key of the namespace `default`, an address the whole address in the
/// namespace `ip`; [`Key::client`] groups IPv6 addresses. Text that is no key is denied when it is charged.
///
/// ```
/// use tollgate::{Limit, Limiter};
///
/// let limiter = Limiter::new(Limit::token_bucket("10/s", 20)?);
/// limiter.check("user:42");
/// limiter.check(format!("user:{}", 42));
/// limiter.check(42_u64);
/// limiter.check("203.0.113.7".parse::<std::net::IpAddr>()?);
/// assert_eq!(limiter.status("user:42").used(), 2);
/// assert_eq!(limiter.status("42").used(), 1);
/// assert_eq!(limiter.status("ip:203.0.113.7").used(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct KeyRef<'a>(Given<'a>);

#[derive(Clone)]
enum Given<'a> {
    Text(&'a str),
    Owned(Box<str>),
    Canonical(&'a str),
    CanonicalOwned(Box<str>),
    Unsigned(u64),
    Signed(i64),
    Address(IpAddr),
    NotFound,
}

/// The longest text of a number or an address: an IPv6 address written out, each `:` as three bytes, and its namespace.
const LONGEST: usize = 64;

/// Room on the stack for the text of a number or an address.
pub(crate) struct KeyText {
    bytes: [u8; LONGEST],
    length: usize,
}

impl KeyText {
    pub(crate) const fn new() -> KeyText {
        KeyText { bytes: [0; LONGEST], length: 0 }
    }
}

impl fmt::Write for KeyText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

impl<'a> KeyRef<'a> {
    /// No valid key, and that has been reported: the charge is denied as one with a malformed key is.
    pub(crate) fn not_found() -> KeyRef<'a> {
        KeyRef(Given::NotFound)
    }

    /// A text that is known to be canonical.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) fn canonical(text: &'a str) -> KeyRef<'a> {
        KeyRef(Given::Canonical(text))
    }

    /// The text of the key as it was passed; for a number or an address, the canonical text.
    #[inline]
    pub(crate) fn text<'t>(&'t self, room: &'t mut KeyText) -> &'t str {
        match &self.0 {
            Given::Text(text) | Given::Canonical(text) => text,
            Given::Owned(text) | Given::CanonicalOwned(text) => text,
            Given::Unsigned(_) | Given::Signed(_) | Given::Address(_) => self.write(room),
            Given::NotFound => "",
        }
    }

    /// The text of the key, if it was given as one.
    #[inline]
    pub(crate) fn as_text(&self) -> Option<&str> {
        match &self.0 {
            Given::Text(text) | Given::Canonical(text) => Some(text),
            Given::Owned(text) | Given::CanonicalOwned(text) => Some(text),
            _ => None,
        }
    }

    fn write<'t>(&self, room: &'t mut KeyText) -> &'t str {
        use fmt::Write;
        // All of these fit.
        let _ = match &self.0 {
            Given::Unsigned(number) => write!(room, "{number}"),
            Given::Signed(number) => write!(room, "{number}"),
            Given::Address(IpAddr::V4(address)) => write!(room, "ip:{address}"),
            Given::Address(IpAddr::V6(address)) => {
                let mut plain = KeyText::new();
                let _ = write!(plain, "{address}");
                let text = std::str::from_utf8(&plain.bytes[..plain.length]).unwrap_or_default();
                let _ = room.write_str("ip:");
                for (index, part) in text.split(':').enumerate() {
                    let _ = room.write_str(if index > 0 { "%3A" } else { "" });
                    let _ = room.write_str(part);
                }
                Ok(())
            }
            _ => Ok(()), // not covered: `text` and `parse` have only numbers and addresses written
        };
        std::str::from_utf8(&room.bytes[..room.length]).unwrap_or_default()
    }

    /// Parses the key, once.
    pub(crate) fn parse(self) -> Result<Key<'a>, KeyError> {
        match self.0 {
            Given::Text(text) => Key::parse(text),
            Given::Owned(text) => Key::parse(&text).map(Key::into_owned),
            Given::Canonical(text) => Ok(Key { canonical: text.into() }),
            Given::CanonicalOwned(text) => Ok(Key { canonical: String::from(text).into() }),
            Given::NotFound => Err(super::Fault::NotFound.into()),
            Given::Unsigned(_) | Given::Signed(_) | Given::Address(_) => {
                let mut room = KeyText::new();
                Ok(Key { canonical: self.write(&mut room).to_owned().into() })
            }
        }
    }

    /// The same for a stored key.
    pub(crate) fn parse_ref(&'a self) -> Result<Key<'a>, KeyError> {
        match &self.0 {
            Given::Owned(text) => Key::parse(text),
            Given::CanonicalOwned(text) => Ok(Key { canonical: (&**text).into() }),
            _ => self.clone().parse(),
        }
    }
}

impl<'a> From<&'a str> for KeyRef<'a> {
    #[inline]
    fn from(text: &'a str) -> KeyRef<'a> {
        KeyRef(Given::Text(text))
    }
}

impl<'a> From<&&'a str> for KeyRef<'a> {
    #[inline]
    fn from(text: &&'a str) -> KeyRef<'a> {
        KeyRef(Given::Text(text))
    }
}

impl<'a> From<&'a String> for KeyRef<'a> {
    #[inline]
    fn from(text: &'a String) -> KeyRef<'a> {
        KeyRef(Given::Text(text))
    }
}

impl<'a> From<&'a std::borrow::Cow<'_, str>> for KeyRef<'a> {
    fn from(text: &'a std::borrow::Cow<'_, str>) -> KeyRef<'a> {
        KeyRef(Given::Text(text))
    }
}

impl From<String> for KeyRef<'_> {
    fn from(text: String) -> Self {
        KeyRef(Given::Owned(text.into()))
    }
}

impl<'a> From<Key<'a>> for KeyRef<'a> {
    fn from(key: Key<'a>) -> KeyRef<'a> {
        match key.canonical {
            Text::Borrowed(text) => KeyRef(Given::Canonical(text)),
            text => KeyRef(Given::CanonicalOwned(text.into_string().into())),
        }
    }
}

impl<'a> From<&'a Key<'_>> for KeyRef<'a> {
    #[inline]
    fn from(key: &'a Key<'_>) -> KeyRef<'a> {
        KeyRef(Given::Canonical(key.canonical()))
    }
}

impl From<IpAddr> for KeyRef<'_> {
    fn from(address: IpAddr) -> Self {
        KeyRef(Given::Address(super::address::canonical(address)))
    }
}

macro_rules! from_integers {
    ($given:ident: $($integer:ty),*) => { $(
        impl From<$integer> for KeyRef<'_> {
            fn from(number: $integer) -> Self {
                KeyRef(Given::$given(number.into()))
            }
        }
    )* };
}

from_integers!(Unsigned: u8, u16, u32, u64);
from_integers!(Signed: i8, i16, i32, i64);

impl From<usize> for KeyRef<'_> {
    fn from(number: usize) -> Self {
        KeyRef(Given::Unsigned(number as u64))
    }
}

/// Omits the key, which must not appear in logs.
impl fmt::Debug for KeyRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyRef(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_given_has_one_text() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        for (key, expected) in [
            (KeyRef::from("user:42"), "user:42"),
            (KeyRef::from(&"user:42"), "user:42"),
            (KeyRef::from(&"user:42".to_owned()), "user:42"),
            (KeyRef::from(&std::borrow::Cow::Borrowed("user:42")), "user:42"),
            (KeyRef::from(Key::parse("user:42").unwrap()), "user:42"),
            (KeyRef::from("user:42".to_owned()), "user:42"),
            (KeyRef::from(7_u8), "7"),
            (KeyRef::from(u64::MAX), "18446744073709551615"),
            (KeyRef::from(-7_i32), "-7"),
            (KeyRef::from(address("203.0.113.7")), "ip:203.0.113.7"),
            (KeyRef::from(address("::ffff:203.0.113.7")), "ip:203.0.113.7"),
            (KeyRef::from(address("64:ff9b::203.0.113.7")), "ip:203.0.113.7"),
            (KeyRef::from(address("2001:db8::1")), "ip:2001%3Adb8%3A%3A1"),
            (
                KeyRef::from(address("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")),
                "ip:ffff%3Affff%3Affff%3Affff%3Affff%3Affff%3Affff%3Affff",
            ),
            (KeyRef::from(Key::new("ip", "2001:db8::1").unwrap()), "ip:2001%3Adb8%3A%3A1"),
        ] {
            assert_eq!(key.text(&mut KeyText::new()), expected);
            assert_eq!(key.parse_ref().unwrap().canonical(), expected);
            assert_eq!(key.parse().unwrap().canonical(), expected);
        }
        assert!(KeyRef::from("").parse().is_err());
        assert_eq!(KeyRef::from("default:a").parse().unwrap().canonical(), "a");
        assert!(size_of::<KeyRef<'_>>() <= 24);
        assert_eq!(format!("{:?}", KeyRef::from("secret")), "KeyRef(..)");
    }
}
