//! The text of a key, without an allocation in nearly all cases.

use std::borrow::Cow;
use std::ops::Deref;

use arrayvec::ArrayString;

/// The longest text that is stored inline. It makes a key 56 bytes.
const SHORT: usize = 44;

/// The canonical text of a key: borrowed, short and inline, or on the heap. The same text can have any of these forms.
#[derive(Clone)]
pub(super) enum Text<'a> {
    Borrowed(&'a str),
    Short(ArrayString<SHORT>),
    Owned(String),
}

impl<'a> Text<'a> {
    /// A text that is joined from two.
    #[inline]
    pub(super) fn joined(start: &str, end: &str) -> Text<'a> {
        let mut short = ArrayString::new();
        match short.try_push_str(start).and_then(|()| short.try_push_str(end)) {
            Ok(()) => Text::Short(short),
            Err(_) => Text::Owned([start, end].concat()),
        }
    }

    /// The same text, which borrows nothing.
    pub(super) fn into_static(self) -> Text<'static> {
        match self {
            Text::Borrowed(text) => Text::joined(text, ""),
            Text::Short(text) => Text::Short(text),
            Text::Owned(text) => Text::Owned(text),
        }
    }

    pub(super) fn into_string(self) -> String {
        match self {
            Text::Owned(text) => text,
            text => (*text).to_owned(),
        }
    }
}

impl Deref for Text<'_> {
    type Target = str;

    #[inline]
    fn deref(&self) -> &str {
        match self {
            Text::Borrowed(text) => text,
            Text::Short(text) => text,
            Text::Owned(text) => text,
        }
    }
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Text<'a> {
        Text::Borrowed(text)
    }
}

impl From<String> for Text<'_> {
    fn from(text: String) -> Self {
        Text::Owned(text)
    }
}

impl<'a> From<Cow<'a, str>> for Text<'a> {
    fn from(text: Cow<'a, str>) -> Text<'a> {
        match text {
            Cow::Borrowed(text) => Text::Borrowed(text),
            Cow::Owned(text) => Text::Owned(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_the_same_however_it_is_kept() {
        for length in [0, 1, SHORT - 1, SHORT, SHORT + 1, 1_000] {
            let text = "é".repeat(length / 2) + &"x".repeat(length % 2);
            for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                let joined = Text::joined(&text[..at], &text[at..]);
                assert_eq!(matches!(joined, Text::Short(_)), length <= SHORT, "{length}");
                assert_eq!((&*joined, joined.clone().into_string()), (&*text, text.clone()));
            }
            for copy in [Text::from(&*text), Text::from(text.clone()), Text::joined(&text, "")] {
                assert_eq!(&*copy.clone().into_static(), text);
                assert_eq!(copy.into_string(), text);
            }
        }
    }
}
