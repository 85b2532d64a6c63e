//! What is wrong with a key, and a suggestion for the text that was probably meant.
//!
//! A message never contains the key, because it may be logged. The suggestion does, and is shown only to the caller.

use std::fmt;
use std::net::IpAddr;

use super::reference::KeyRef;
use super::{MAX_PART, is_escape, read};
use crate::error::Error;

/// A longer suggestion is cut: an error message is no place for a kilobyte.
pub(super) const MAX_SUGGESTION: usize = 256;

/// Why a key is malformed: which part, what is wrong with it and what to write instead.
///
/// The message never contains the key, so it may be logged; the text to use instead is [`KeyError::suggestion`].
///
/// ```
/// use tollgate::Key;
/// let error = Key::parse("disk:100%").unwrap_err();
/// assert_eq!(error.to_string(), "the key has a `%` at byte 4 that encodes nothing; write `%` as `%25` and `:` as `%3A`");
/// assert_eq!(error.suggestion(), Some("disk:100%25"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct KeyError(Box<Malformed>);

#[derive(Clone, PartialEq, Eq)]
struct Malformed {
    fault: Fault,
    suggestion: Option<String>,
}

impl KeyError {
    pub(super) fn new(text: &str, fault: Fault) -> KeyError {
        KeyError(Box::new(Malformed { fault, suggestion: suggest(text, fault) }))
    }

    /// The text that was probably meant, where there is one: bare `%` encoded and, where the parts are too many or empty,
    /// everything after the first `:` taken as one part. It contains the caller's key; a long one is cut and ends in `…`.
    pub fn suggestion(&self) -> Option<&str> {
        self.0.suggestion.as_deref()
    }

    /// Whether the charge has been reported already.
    pub(crate) fn is_reported(&self) -> bool {
        self.0.fault == Fault::NotFound
    }
}

impl From<Fault> for KeyError {
    fn from(fault: Fault) -> KeyError {
        KeyError(Box::new(Malformed { fault, suggestion: None }))
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fault.fmt(f)
    }
}

/// Like `Display`: the suggestion holds the caller's key and stays out.
impl fmt::Debug for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyError({:?})", self.to_string())
    }
}

impl std::error::Error for KeyError {}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Error {
        Error::call(error.to_string())
    }
}

/// Which part of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Namespace,
    Key,
    Version,
}

impl Part {
    /// The parts as a text of so many holds them.
    pub(super) fn of_text(parts: usize) -> &'static [Part] {
        match parts {
            1 => &[Part::Key],
            _ => &[Part::Namespace, Part::Key, Part::Version],
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Namespace => "the namespace",
            Part::Key => "the key",
            Part::Version => "the version",
        })
    }
}

/// What is wrong with a key. Positions are bytes from the start of the part, shown counted from 1.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    NoText,
    /// There is no valid key, and that has been reported: by an API that found none, or by an earlier try of the same call.
    NotFound,
    LongText {
        bytes: usize,
    },
    ManyParts {
        parts: usize,
    },
    EmptyPart(Part),
    LongPart {
        part: Part,
        bytes: usize,
    },
    Control {
        part: Part,
        at: usize,
        character: char,
    },
    Percent {
        part: Part,
        at: usize,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Fault::NoText => {
                write!(
                    f,
                    "the key is empty; write `namespace:key[:version]` or a key of 1 to {MAX_PART} bytes"
                )
            }
            Fault::NotFound => f.write_str("there is no key"),
            Fault::LongText { bytes } => {
                write!(
                    f,
                    "the key is {bytes} bytes long; each part may have 1 to {MAX_PART}: shorten it or hash it"
                )
            }
            Fault::ManyParts { parts } => write!(
                f,
                "the key has {parts} parts and `namespace:key[:version]` at most 3; write a `:` inside a part as `%3A`"
            ),
            Fault::EmptyPart(part) => {
                write!(
                    f,
                    "{part} is empty; a part has 1 to {MAX_PART} bytes, and a `:` inside one is written `%3A`"
                )
            }
            Fault::LongPart { part, bytes } => {
                write!(
                    f,
                    "{part} is {bytes} bytes long; a part may have 1 to {MAX_PART}: shorten it or hash it"
                )
            }
            Fault::Control { part, at, character } => write!(
                f,
                "{part} has the control character U+{:04X} at byte {}; remove it",
                u32::from(character),
                at + 1
            ),
            Fault::Percent { part, at } => write!(
                f,
                "{part} has a `%` at byte {} that encodes nothing; write `%` as `%25` and `:` as `%3A`",
                at + 1
            ),
        }
    }
}

/// The sound text nearest to a malformed one, if mending separators and percent signs is enough.
fn suggest(text: &str, fault: Fault) -> Option<String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return KeyRef::from(address).parse().ok().map(|key| key.into_canonical());
    }
    let mended = match fault {
        Fault::Percent { .. } if !text.split(':').any(str::is_empty) => {
            text.split(':').map(mend).collect::<Vec<_>>().join(":")
        }
        Fault::ManyParts { .. } | Fault::EmptyPart(_) | Fault::Percent { .. } => match text.split_once(':') {
            Some((namespace, rest)) if !namespace.is_empty() && !rest.is_empty() => {
                [mend(namespace), mend(rest)].join(":")
            }
            _ => mend(text),
        },
        _ => return None,
    };
    read(&mended).ok().map(|key| cut(key.into_canonical()))
}

/// Encodes what should have been encoded and leaves escapes alone.
fn mend(part: &str) -> String {
    let mut mended = String::with_capacity(part.len() + 16);
    for (at, character) in part.char_indices() {
        match character {
            ':' => mended.push_str("%3A"),
            '%' if !is_escape(&part[at..]) => mended.push_str("%25"),
            _ => mended.push(character),
        }
    }
    mended
}

/// Cuts a long suggestion between characters and between escapes.
fn cut(mut suggestion: String) -> String {
    if suggestion.len() > MAX_SUGGESTION {
        let mut end = MAX_SUGGESTION;
        while !suggestion.is_char_boundary(end) {
            end -= 1;
        }
        if let Some(escape) = suggestion[..end].rfind('%').filter(|at| end - at < 3) {
            end = escape;
        }
        suggestion.truncate(end);
        suggestion.push('…');
    }
    suggestion
}
