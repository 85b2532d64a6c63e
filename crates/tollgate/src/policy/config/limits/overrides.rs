//! `[limits.NAME.overrides]`: the fields that differ for single keys; the others come from the limit.
//!
//! An override has the fields of a limit, so `limits.rs` reads its parameters and builds it.

use std::collections::BTreeMap;

use tollgate_kernel::Strategy;

use super::{
    Instead, OF_THE_RULE, Parameters, all_names, build, is_of_a_limit, read_instead, read_parameters,
};
use crate::key::Key;
use crate::policy::Allowance;
use crate::policy::config::reader::{Reader, Section};

/// The defaults of a rule for its overrides.
#[derive(Clone, Copy)]
pub(super) enum Base {
    /// A strategy and its parameters as far as they could be read, and the limit if it could be built.
    Limit { strategy: Option<Strategy>, parameters: Parameters, allowance: Option<Allowance> },
    /// Everything or nothing passes, and there is no strategy.
    Plain(Allowance),
}

impl Base {
    pub(super) fn allowance(self) -> Option<Allowance> {
        match self {
            Base::Limit { allowance, .. } => allowance,
            Base::Plain(allowance) => Some(allowance),
        }
    }
}

/// Reads what differs for single keys.
pub(super) fn read(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    base: Base,
) -> BTreeMap<Key<'static>, Allowance> {
    let mut overrides = BTreeMap::new();
    for field in section.fields() {
        let allowance = reader.section(field).and_then(|section| read_one(reader, &section, base));
        match Key::parse(field.name) {
            Ok(key) => {
                // An override that could not be read still takes its key, so that a duplicate is noticed.
                if overrides.insert(key.into_owned(), allowance.unwrap_or(Allowance::Blocked)).is_some() {
                    reader.misnamed(field, "is the same key as another override; keep one of them");
                }
            }
            Err(error) => {
                let meant = error.suggestion().map(|text| format!("; did you mean \"{text}\"?"));
                reader.misnamed(field, format!("{error}{}", meant.unwrap_or_default()));
            }
        }
    }
    overrides
}

fn read_one(reader: &mut Reader<'_>, section: &Section<'_>, base: Base) -> Option<Allowance> {
    reader.only(section, &all_names());
    if section.is_empty() {
        reader.mistaken(section, "says nothing; write what differs, unlimited = true or blocked = true");
    }
    for field in section.fields().filter(|field| OF_THE_RULE.contains(&field.name)) {
        reader.mistake(field, "belongs to the limit and not to an override; move it there");
    }
    match (read_instead(reader, section), base) {
        (Instead::Of(allowance), _) => Some(allowance),
        (Instead::Unclear, _) => None,
        (Instead::No, Base::Limit { strategy, parameters, allowance }) => {
            if let Some(field) = section.field("strategy") {
                reader.mistake(field, "an override keeps the strategy of its limit; remove this");
            }
            let parameters = read_parameters(reader, section, strategy, parameters);
            // A limit that could not be built would be refused a second time here.
            allowance?;
            build(reader, section, strategy?, parameters)
        }
        (Instead::No, Base::Plain(allowance)) => {
            for field in section.fields().filter(|field| is_of_a_limit(field.name)) {
                let fix = "has no limit to change; an override here has unlimited = true or blocked = true";
                reader.mistake(field, format!("{allowance} = true {fix}"));
            }
            None
        }
    }
}
