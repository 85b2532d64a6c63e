//! The numbers of a table as ordinary limits.

use std::collections::BTreeMap;
use std::time::Duration;

use tollgate::config::{Field, Reader};
use tollgate::store::{LimitError, Micros, Subject};
use tollgate::{Fallback, Limit, Rule};

use super::{Counts, LEASE, LlmConfig, ModelLimit};

const DAY: Micros = Micros::from_secs(24 * 3_600);

/// How much longer than its window a call counts by default, and the largest share of the window that this is. It is what two calls that
/// were charged one window apart may differ in the time that they take to the provider; beyond that, `margin` must be set.
const MARGIN: Micros = Micros::from_millis(250);
const MARGIN_SHARE: u64 = 40;

/// A number of a model or of a client: its field, what it counts, and over how long.
pub(super) struct Dimension {
    pub(super) field: &'static str,
    counts: Counts,
    unit: &'static str,
    is_daily: bool,
}

const fn dimension(field: &'static str, counts: Counts, unit: &'static str, is_daily: bool) -> Dimension {
    Dimension { field, counts, unit, is_daily }
}

pub(super) const DIMENSIONS: [Dimension; 7] = [
    dimension("rpm", Counts::Requests, "RPM", false),
    dimension("tpm", Counts::Tokens, "TPM", false),
    dimension("input_tpm", Counts::InputTokens, "input TPM", false),
    dimension("output_tpm", Counts::OutputTokens, "output TPM", false),
    dimension("rpd", Counts::Requests, "RPD", true),
    dimension("tpd", Counts::Tokens, "TPD", true),
    dimension("concurrency", Counts::Concurrency, "at once", false),
];

/// The numbers that one table gives, and the slice of a minute that a provider judges requests by.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) counts: [Option<u64>; DIMENSIONS.len()],
    pub(super) slice: Option<Micros>,
}

/// The limits that the section has made so far.
pub(super) struct Compiled {
    window: Micros,
    margin: Option<Micros>,
    /// The names that `[limits]` has.
    taken: Vec<String>,
    pub(super) rules: Vec<Rule>,
    /// The table that made each of them.
    made_by: Vec<String>,
    pub(super) quotas: BTreeMap<String, Quota>,
}

/// What models of one quota have in common.
pub(super) struct Quota {
    /// The model that gave the numbers, or the first of those that gave none.
    pub(super) model: String,
    pub(super) numbers: Numbers,
    pub(super) applied: Applied,
    /// Whether the models name it.
    pub(super) is_shared: bool,
    pub(super) limits: Vec<ModelLimit>,
}

impl Compiled {
    pub(super) fn of(config: &LlmConfig, rules: &[Rule]) -> Compiled {
        let taken = rules.iter().map(|rule| rule.name().to_owned()).collect();
        let (window, margin) = (config.window.into(), config.margin.map(Micros::from));
        Compiled { window, margin, taken, rules: Vec::new(), made_by: Vec::new(), quotas: BTreeMap::new() }
    }

    /// How much longer than a window of the provider a call counts.
    fn margin_of(&self, window: Micros) -> Micros {
        self.margin.unwrap_or(MARGIN.min(Micros::new(window.get() / MARGIN_SHARE)))
    }

    /// Makes the limits of one table of this name, under names that begin with `stem`.
    pub(super) fn add(
        &mut self,
        reader: &mut Reader<'_>,
        (field, table): (&Field<'_>, &str),
        stem: &str,
        numbers: Numbers,
        applied: Applied,
    ) -> Vec<ModelLimit> {
        let mut limits = Vec::new();
        for (dimension, count) in DIMENSIONS.iter().zip(numbers.counts) {
            let Some(count) = count else { continue };
            let margin = match dimension.counts {
                Counts::Concurrency => Micros::ZERO,
                _ if dimension.is_daily => Micros::ZERO,
                _ => self.margin_of(self.window),
            };
            let limit = match dimension.counts {
                Counts::Concurrency => Limit::concurrency(count, LEASE),
                _ if dimension.is_daily => Limit::sliding_window(count, DAY),
                _ => Limit::sliding_window(count, self.window.saturating_add(margin)),
            };
            let made = self.limit(reader, (field, table), stem, dimension, limit, applied);
            limits.extend(made.map(|limit| ModelLimit { margin: margin.into(), ..limit }));
        }
        if let (Some(slice), Some(rpm)) = (numbers.slice, numbers.counts[0]) {
            // What a minute allows, divided into slices and rounded down: never more than the provider allows.
            let share = u128::from(rpm) * u128::from(slice.get()) / u128::from(self.window.get().max(1));
            let share = u64::try_from(share).unwrap_or(u64::MAX).max(1);
            let each = dimension("slice", Counts::Requests, "requests a slice", false);
            let margin = self.margin_of(slice);
            let limit = Limit::sliding_window(share, slice.saturating_add(margin));
            let made = self.limit(reader, (field, table), stem, &each, limit, applied);
            limits.extend(made.map(|limit| ModelLimit { margin: margin.into(), ..limit }));
        }
        limits
    }

    fn limit(
        &mut self,
        reader: &mut Reader<'_>,
        (field, table): (&Field<'_>, &str),
        stem: &str,
        dimension: &Dimension,
        limit: Result<Limit, LimitError>,
        applied: Applied,
    ) -> Option<ModelLimit> {
        let name = format!("llm.{stem}.{}", dimension.field);
        let limit = match limit {
            Ok(limit) => limit,
            Err(error) => {
                reader.misnamed(field, format!("{}: {}", dimension.field, error.fix()));
                return None;
            }
        };
        if let Some(fix) = Rule::name_fault(&name) {
            reader.misnamed(
                field,
                format!("its limit would be called {name}, and {fix}; give it a shorter quota"),
            );
            return None;
        }
        if self.taken.contains(&name) {
            reader.misnamed(field, format!("its limit {name} is also in [limits]; remove it there"));
            return None;
        }
        let rule = Rule::new(name.clone(), limit).ok()?.with_subject(Subject::Namespace);
        let rule = if applied.shadow == Some(true) { rule.shadow() } else { rule };
        let rule = match applied.fallback {
            Some(fallback) => rule.fallback(fallback),
            None => rule,
        };
        match self.rules.iter().zip(&self.made_by).find(|(other, _)| other.name() == rule.name()) {
            None => {
                self.rules.push(rule);
                self.made_by.push(table.to_owned());
            }
            Some((other, _)) if *other == rule => {}
            // Two names would be one limit, and only one of the two numbers would hold.
            Some((_, made_by)) => {
                let fix = format!(
                    "its limit {name} has another number in {made_by}; write the same one, or give one of them another name or quota"
                );
                reader.misnamed(field, fix);
                return None;
            }
        }
        let margin = Duration::ZERO;
        Some(ModelLimit { name, counts: dimension.counts, unit: dimension.unit, margin })
    }
}

/// How the limits of a table are applied, as far as it says so.
#[derive(Clone, Copy, Default)]
pub(super) struct Applied {
    pub(super) shadow: Option<bool>,
    pub(super) fallback: Option<Fallback>,
}

pub(super) fn number_names() -> impl Iterator<Item = &'static str> {
    DIMENSIONS.iter().map(|dimension| dimension.field).chain(["slice"])
}
