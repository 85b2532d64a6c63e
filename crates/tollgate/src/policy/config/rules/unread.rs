//! `[[rules]]` where the feature `http` is off: nobody here knows what a path or a method is, and nobody asks.
//!
//! They concern recorded requests alone, so a file that has them is not refused for it.

use super::reader::{Field, Reader, Section};
use crate::policy::Rule;

/// Which recorded requests meet which limit: known with the feature `http` only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestRules {}

/// Passes over them.
pub(super) fn read(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    _limits: Option<&Section<'_>>,
    _rules: &[Rule],
) -> RequestRules {
    reader.sections(field);
    RequestRules::default()
}
