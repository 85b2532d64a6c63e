//! A limit that another section names.

use tollgate_kernel::Strategy;

use super::reader::{Field, Reader};
use crate::policy::nearest::nearest;
use crate::policy::{Allowance, Rule};

/// Reads the name of a limit. `names` are all that the file has, `rules` those that could be read. `no_length`
/// says why it is not known there how long a request takes, where a concurrency limit makes no sense.
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
        let fix =
            format!("counts those who are there at once, and {no_length}; name a limit of another strategy");
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
