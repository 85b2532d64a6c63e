//! Reads the name of a limit in another section.

use tollgate_kernel::Strategy;

use super::reader::{Field, Reader};
use crate::policy::nearest::nearest;
use crate::policy::{Allowance, Rule};

/// Reads the name of a limit. `names` are all names of the file, `rules` the limits without mistakes. `no_length` is set where a
/// concurrency limit makes no sense, and says why the length of a request is not known there.
pub(super) fn read(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    names: &[&str],
    rules: &[Rule],
    no_length: Option<&str>,
) -> Option<String> {
    let name = reader.text(field, names.first().copied().unwrap_or("api"))?;
    if !names.contains(&name) {
        match nearest(name, names.iter().copied()) {
            Some(guess) => {
                reader.mistake(field, format!("there is no such limit; did you mean \"{guess}\"?"))
            }
            None if names.is_empty() => {
                reader.mistake(field, format!("there are no limits; write [limits.{name}]"))
            }
            None => reader.mistake(field, format!("there is no such limit; known: {}", names.join(", "))),
        }
        return None;
    }
    if let Some(no_length) = no_length.filter(|_| is_concurrency(name, rules)) {
        let fix = format!("counts concurrent holders, and {no_length}; name a limit of another strategy");
        reader.mistake(field, fix);
        return None;
    }
    Some(name.to_owned())
}

/// Whether this is a concurrency limit.
pub(super) fn is_concurrency(name: &str, rules: &[Rule]) -> bool {
    let allowance = rules.iter().find(|rule| rule.name() == name).map(Rule::allowance);
    matches!(allowance, Some(Allowance::Limited(limit)) if limit.strategy() == Strategy::Concurrency)
}
