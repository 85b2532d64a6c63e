//! Why a limit, a rate or a duration was refused.

use std::fmt;

/// Why a limit was refused: the field, its value and what to write instead.
///
/// ```
/// use tollgate_kernel::{Limit, Rate};
/// let error = Limit::token_bucket(Rate::per_second(10)?, 0).unwrap_err();
/// assert_eq!(error.field(), "burst");
/// assert!(error.to_string().starts_with("burst = 0: must be at least 1"));
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    field: &'static str,
    value: String,
    fix: String,
}

impl LimitError {
    pub(crate) fn new(field: &'static str, value: impl ToString, fix: impl ToString) -> Self {
        LimitError { field, value: value.to_string(), fix: fix.to_string() }
    }

    /// The field that is wrong.
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// The value it had.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What to write instead.
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}", self.field, self.value, self.fix)
    }
}

impl std::error::Error for LimitError {}

/// A [`Rate`](crate::Rate) that is a rate already is never refused.
impl From<std::convert::Infallible> for LimitError {
    fn from(never: std::convert::Infallible) -> LimitError {
        match never {}
    }
}
