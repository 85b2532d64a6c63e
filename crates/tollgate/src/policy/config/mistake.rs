//! The mistakes of a file: each with its line, field, value and fix.
//!
//! A mistake can be fixed without opening the documentation. It never contains a secret: `reader.rs`, which makes it, writes
//! `***` for a value that could be one.

use std::fmt;

/// One mistake in a configuration: in its file, or in the environment that changes it.
///
/// Its `Display` is one line: `line 12, limits.api.burst = 0: must be at least 1; …`, or
/// `environment TOLLGATE_LIMITS_API_BURST, limits.api.burst = 0: must be at least 1; …`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mistake {
    /// The line, counted from 1; 0 for a value of the environment.
    pub line: usize,
    /// The column in characters, counted from 1; 0 for a value of the environment.
    pub column: usize,
    /// The environment variable with the mistake; `None` if it is in the file.
    pub variable: Option<String>,
    /// The field with its section, such as `limits.api.burst`; empty where the file is not even TOML.
    pub field: String,
    /// The value as written, cut when long, `***` if it may be a secret; empty if the field is missing or its name is the
    /// mistake.
    pub value: String,
    /// What to write instead.
    pub fix: String,
}

impl Mistake {
    /// What is wrong and what to write instead, without the position: `limits.api.burst = 0: must be at least 1; …`.
    pub fn message(&self) -> String {
        let Mistake { field, value, fix, .. } = self;
        match (field.as_str(), value.as_str()) {
            ("", _) => fix.clone(),
            (_, "") => format!("{field}: {fix}"),
            _ => format!("{field} = {value}: {fix}"),
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.variable, self.field.as_str()) {
            (Some(variable), "") => write!(f, "environment {variable}: ")?,
            (Some(variable), _) => write!(f, "environment {variable}, ")?,
            (None, "") => write!(f, "line {}, column {}: ", self.line, self.column)?,
            (None, _) => write!(f, "line {}, ", self.line)?,
        }
        f.write_str(&self.message())
    }
}

/// Every mistake in a configuration, in the order of its lines; never empty.
///
/// ```
/// use tollgate::config::Config;
///
/// let mistakes = Config::parse("[limits.api]\nstrategy = \"token_bucket\"\nrte = \"10/s\"\nburst = 0\n").unwrap_err();
/// let fields: Vec<_> = mistakes.iter().map(|mistake| (mistake.line, mistake.field.as_str())).collect();
/// assert_eq!(fields, [(1, "limits.api.rate"), (3, "limits.api.rte"), (4, "limits.api.burst")]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes(Vec<Mistake>);

impl Mistakes {
    /// Sorted by position in the file; those of the environment come last.
    pub(super) fn new(mut mistakes: Vec<Mistake>) -> Mistakes {
        mistakes.sort_by_key(|mistake| (mistake.variable.clone(), mistake.line, mistake.column));
        Mistakes(mistakes)
    }

    /// The mistakes in the order of their lines.
    pub fn iter(&self) -> std::slice::Iter<'_, Mistake> {
        self.0.iter()
    }
}

impl<'a> IntoIterator for &'a Mistakes {
    type Item = &'a Mistake;
    type IntoIter = std::slice::Iter<'a, Mistake>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// One line for each mistake.
impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            mistake.fmt(f)?;
        }
        Ok(())
    }
}

/// So that `?` works in a program with Tollgate's error type.
impl From<Mistakes> for crate::error::Error {
    fn from(mistakes: Mistakes) -> crate::error::Error {
        crate::error::Error::call(mistakes.to_string())
    }
}

impl std::error::Error for Mistakes {}
