//! Why a line of a log cannot be replayed: its field, its value and what to write instead.

use tollgate::key::KeyError;

use crate::figures::shortened;

/// How much of a bad value is shown.
pub(super) const SHOWN: usize = 60;

/// Why a line cannot be replayed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    field: &'static str,
    /// As it stands in the file; `None` when the field is absent.
    value: Option<String>,
    fix: String,
}

impl Mistake {
    pub(super) fn new(field: &'static str, value: &str, fix: impl Into<String>) -> Self {
        Mistake { field, value: Some(format!("{:?}", shortened(value, SHOWN))), fix: fix.into() }
    }

    /// For a value that is not UTF-8, shown as far as it can be.
    pub(super) fn not_utf8(field: &'static str, value: &[u8]) -> Self {
        Mistake::new(field, &String::from_utf8_lossy(value), "is not UTF-8; save the log as UTF-8")
    }

    /// For a key that makes no sense, with the text that was probably meant.
    pub(super) fn malformed_key(value: &str, error: &KeyError) -> Self {
        let meant = error.suggestion().map(|meant| format!(", such as {meant:?}")).unwrap_or_default();
        Mistake::new("key", value, format!("{error}{meant}"))
    }

    /// For a value of JSON that is shown as it is written, without quotes around it. Control characters never reach a terminal.
    pub(super) fn wrong_type(field: &'static str, value: &str, fix: impl Into<String>) -> Self {
        let plain = |character: char| if character.is_control() { '\u{fffd}' } else { character };
        let value = shortened(value, SHOWN).chars().map(plain).collect();
        Mistake { field, value: Some(value), fix: fix.into() }
    }

    pub(super) fn absent(field: &'static str, fix: impl Into<String>) -> Self {
        Mistake { field, value: None, fix: fix.into() }
    }

    /// With its place, in one line.
    pub(super) fn in_words(&self, file: &str, line: u64) -> String {
        let Mistake { field, value, fix } = self;
        match value {
            Some(value) => format!("{file}:{line}: {field} = {value}: {fix}"),
            None => format!("{file}:{line}: {field} is missing: {fix}"),
        }
    }

    /// The same without the value and what repeats it: a line may have a key in it.
    pub(super) fn without_value(&self, file: &str, line: u64) -> String {
        match self.value {
            Some(_) => format!("{file}:{line}: {} is wrong (its value is not shown)", self.field),
            None => self.in_words(file, line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut() {
        let mistake = Mistake::new("key", &"k".repeat(5000), "fix");
        assert!(mistake.in_words("f", 1).len() < 100);
    }

    /// A log is written by strangers, and what it has is shown on a terminal.
    #[test]
    fn values_have_no_control_characters_and_can_be_left_out() {
        let mistake = Mistake::wrong_type("line", "{\u{1b}[31m", "fix");
        assert_eq!(mistake.in_words("f", 1), "f:1: line = {\u{fffd}[31m: fix");
        assert_eq!(mistake.without_value("f", 1), "f:1: line is wrong (its value is not shown)");
        assert_eq!(Mistake::absent("key", "fix").without_value("f", 2), "f:2: key is missing: fix");
    }
}
