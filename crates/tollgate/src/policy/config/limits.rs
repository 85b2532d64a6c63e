//! `[limits.NAME]`: a strategy with its parameters, or `unlimited`, or `blocked`; and overrides for single keys.
//!
//! The bounds of numbers are the kernel's and are not repeated here. This module decides which fields go together. A window
//! shorter than a second must be confirmed, because in a file it is most often a wrong unit.
//!
//! Reading never stops at a mistake. A field that could not be read counts as absent, and causes no second mistake.
//! `limits/overrides.rs` reads the overrides.

mod overrides;

use tollgate_kernel::{Align, Limit, LimitError, Micros, Rate, Strategy};
use tollgate_store::Subject;

use self::overrides::Base;
use super::environment::VariableKind;
use super::reader::{Field, Reader, Section};
use crate::key::Key;
use crate::policy::{Allowance, Fallback, Rule, name_fault};

/// The parameters of all strategies, each with an example.
const PARAMETERS: [(&str, &str); 8] = [
    ("rate", "\"10/s\""),
    ("burst", "20"),
    ("capacity", "20"),
    ("limit", "100"),
    ("window", "\"1m\""),
    ("align", "\"clock\""),
    ("lease", "\"30s\""),
    ("max_debt", "\"1d\""),
];

/// The parameters that may be left out.
const OPTIONAL: [&str; 2] = ["align", "max_debt"];

/// The other fields of a limit that make it one.
const OF_A_LIMIT: [&str; 2] = ["strategy", "subsecond"];

/// The fields that replace a limit.
const INSTEAD: [(&str, Allowance); 2] =
    [("unlimited", Allowance::Unlimited), ("blocked", Allowance::Blocked)];

/// The fields of a rule, for any strategy.
const OF_THE_RULE: [&str; 4] = ["shadow", "fallback", "subject", "overrides"];

/// The parameters that a strategy takes. All are required but the [`OPTIONAL`] ones.
pub(super) const fn parameters_of(strategy: Strategy) -> &'static [&'static str] {
    match strategy {
        Strategy::TokenBucket => &["rate", "burst", "max_debt"],
        Strategy::LeakyBucket => &["rate", "capacity", "max_debt"],
        Strategy::FixedWindow => &["limit", "window", "align"],
        Strategy::SlidingWindow | Strategy::SlidingWindowCounter => &["limit", "window"],
        Strategy::Concurrency => &["limit", "lease"],
    }
}

/// Reads every limit of the section.
pub(super) fn read(reader: &mut Reader<'_>, limits: &Section<'_>) -> Vec<Rule> {
    limits.fields().filter_map(|field| read_rule(reader, field)).collect()
}

fn read_rule(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Rule> {
    if let Some(fix) = name_fault(field.name) {
        reader.misnamed(field, fix);
    }
    let section = reader.section(field)?;
    reader.only(&section, &all_names());
    let base = match read_instead(reader, &section) {
        Instead::Of(allowance) => Base::Plain(allowance),
        instead => {
            let strategy = read_strategy(reader, &section, &instead);
            let parameters = read_parameters(reader, &section, strategy, Parameters::default());
            if let Some(strategy) = strategy {
                note_missing(reader, &section, strategy);
            }
            let allowance = strategy.and_then(|strategy| build(reader, &section, strategy, parameters));
            Base::Limit { strategy, parameters, allowance }
        }
    };
    let shadow = section.field("shadow").and_then(|field| reader.truth(field)).unwrap_or(false);
    let fallback = section.field("fallback").and_then(|field| reader.fallback(field));
    let subjects = [("key", Subject::Key), ("namespace", Subject::Namespace), ("all", Subject::All)];
    let subject = section.field("subject").and_then(|field| reader.choice(field, &subjects));
    let overrides = section.field("overrides").and_then(|field| reader.section(field));
    let overrides = overrides.map(|section| overrides::read(reader, &section, base)).unwrap_or_default();
    let overrides = overrides.into_iter().collect();
    // All that the constructors of `Rule` check has been checked above, to the last mistake and not only the first.
    let (name, subject) = (field.name.to_owned(), subject.unwrap_or_default());
    Some(Rule { name, allowance: base.allowance()?, shadow, fallback, subject, overrides })
}

impl Reader<'_> {
    /// Reads the limit of a section that has other fields too, and what differs from it for single keys. Its strategy is `default` if it
    /// names none. `None` if the section has no field of a limit, or if the limit could not be read.
    pub fn limit(
        &mut self,
        section: &Section<'_>,
        default: Strategy,
    ) -> Option<(Limit, Vec<(Key<'static>, Allowance)>)> {
        if !section.fields().any(|field| is_of_a_limit(field.name)) {
            return None;
        }
        let strategies = Strategy::ALL.map(|strategy| (strategy.name(), strategy));
        let strategy = match section.field("strategy") {
            Some(field) => self.choice(field, &strategies),
            None => Some(default),
        };
        if let (Some(Strategy::Concurrency), Some(field)) = (strategy, section.field("strategy")) {
            self.mistake(
                field,
                "how many run at once is written as concurrency = 5, beside the limit on starts",
            );
            return None;
        }
        let parameters = read_parameters(self, section, strategy, Parameters::default());
        note_missing(self, section, strategy?);
        let allowance = build(self, section, strategy?, parameters);
        let base = Base::Limit { strategy, parameters, allowance };
        let overrides = section.field("overrides").and_then(|field| self.section(field));
        let overrides = overrides.map(|section| overrides::read(self, &section, base)).unwrap_or_default();
        match allowance? {
            Allowance::Limited(limit) => Some((limit, overrides.into_iter().collect())),
            Allowance::Unlimited | Allowance::Blocked => None,
        }
    }

    /// Reads one of open, closed and local.
    pub fn fallback(&mut self, field: &Field<'_>) -> Option<Fallback> {
        self.choice(field, &Fallback::ALL.map(|fallback| (fallback.name(), fallback)))
    }
}

/// The names of all fields of a limit, for all strategies.
pub fn limit_fields() -> impl Iterator<Item = &'static str> {
    OF_A_LIMIT.into_iter().chain(PARAMETERS.iter().map(|(name, _)| *name))
}

/// The fields that an environment variable may set, and whether each is a number or a boolean.
pub(super) fn scalars() -> impl Iterator<Item = (&'static str, VariableKind)> {
    let kind = |name| match name {
        "burst" | "capacity" | "limit" => VariableKind::Number,
        "subsecond" | "unlimited" | "blocked" | "shadow" => VariableKind::Truth,
        _ => VariableKind::Text,
    };
    all_names().into_iter().filter(|name| *name != "overrides").map(move |name| (name, kind(name)))
}

/// Every field of a limit.
fn all_names() -> Vec<&'static str> {
    let parameters = PARAMETERS.iter().map(|(name, _)| *name);
    let instead = INSTEAD.iter().map(|(name, _)| *name);
    OF_A_LIMIT.into_iter().chain(parameters).chain(instead).chain(OF_THE_RULE).collect()
}

/// What replaces a limit.
enum Instead {
    Of(Allowance),
    No,
    /// It is ambiguous, and a mistake says why.
    Unclear,
}

/// Reads `unlimited` and `blocked`, and refuses what contradicts them.
fn read_instead(reader: &mut Reader<'_>, section: &Section<'_>) -> Instead {
    let mut instead = Instead::No;
    for (name, allowance) in INSTEAD {
        let Some(field) = section.field(name) else { continue };
        instead = match (reader.truth(field), instead) {
            (Some(false), instead) => instead,
            (Some(true), Instead::No) => Instead::Of(allowance),
            (Some(true), Instead::Of(other)) => {
                reader.mistake(field, format!("contradicts {other} = true; keep one of the two"));
                Instead::Unclear
            }
            _ => Instead::Unclear,
        };
    }
    if let Instead::Of(allowance) = instead {
        for field in section.fields().filter(|field| is_of_a_limit(field.name)) {
            reader.mistake(field, format!("does not go with {allowance} = true; remove one of the two"));
        }
    }
    instead
}

fn read_strategy(reader: &mut Reader<'_>, section: &Section<'_>, instead: &Instead) -> Option<Strategy> {
    match (section.field("strategy"), instead) {
        (Some(field), _) => reader.choice(field, &Strategy::ALL.map(|strategy| (strategy.name(), strategy))),
        (None, Instead::No) => {
            let [first, others @ ..] = Strategy::ALL.map(Strategy::name);
            let others = others.join(", ");
            let example = format!("\"{first}\" (or {others}), unlimited = true or blocked = true");
            reader.missing(section, "strategy", example);
            None
        }
        (None, _) => None,
    }
}

/// The parameters as far as they could be read.
#[derive(Clone, Copy, Default)]
pub(super) struct Parameters {
    pub(super) rate: Option<Rate>,
    pub(super) burst: Option<u64>,
    pub(super) capacity: Option<u64>,
    pub(super) limit: Option<u64>,
    pub(super) window: Option<Micros>,
    pub(super) align: Option<Align>,
    pub(super) lease: Option<Micros>,
    pub(super) max_debt: Option<Micros>,
    pub(super) subsecond: Option<bool>,
}

fn is_parameter(name: &str) -> bool {
    PARAMETERS.iter().any(|(parameter, _)| *parameter == name)
}

/// Whether a field makes sense only where there is a limit.
fn is_of_a_limit(name: &str) -> bool {
    OF_A_LIMIT.contains(&name) || is_parameter(name)
}

/// Reads the parameters that are written, over those inherited; one of another strategy is refused.
fn read_parameters(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    strategy: Option<Strategy>,
    inherited: Parameters,
) -> Parameters {
    let mut read = inherited;
    for field in section.fields() {
        if let Some(strategy) = strategy.filter(|strategy| !has_use_for(*strategy, field.name)) {
            let own = parameters_of(strategy).join(", ");
            reader.mistake(field, format!("`{}` does not belong to {strategy}; it takes {own}", field.name));
            continue;
        }
        match field.name {
            "rate" => read.rate = reader.rate(field),
            "burst" => read.burst = reader.count(field, 20),
            "capacity" => read.capacity = reader.count(field, 20),
            "limit" => read.limit = reader.count(field, 100),
            "window" => read.window = reader.span_us(field, "1m"),
            "align" => read.align = reader.choice(field, &[("first", Align::First), ("clock", Align::Clock)]),
            "lease" => read.lease = reader.span_us(field, "30s"),
            "max_debt" => read.max_debt = reader.span_us(field, "1d"),
            "subsecond" => read.subsecond = reader.truth(field),
            _ => {}
        }
    }
    if let (Some(field), Some(window)) = (section.field("window"), read.window)
        && window < Micros::from_secs(1)
        && read.subsecond != Some(true)
    {
        reader
            .mistake(field, "is shorter than 1s; write a longer window, or subsecond = true if it is meant");
    }
    read
}

/// Whether a field applies to a strategy; a field that is no parameter applies to all.
fn has_use_for(strategy: Strategy, name: &str) -> bool {
    match name {
        "subsecond" => parameters_of(strategy).contains(&"window"),
        _ => !is_parameter(name) || parameters_of(strategy).contains(&name),
    }
}

/// Notes the parameters that the strategy requires and the section does not have.
fn note_missing(reader: &mut Reader<'_>, section: &Section<'_>, strategy: Strategy) {
    for (name, example) in PARAMETERS {
        if !OPTIONAL.contains(&name)
            && parameters_of(strategy).contains(&name)
            && section.field(name).is_none()
        {
            reader.missing(section, name, example);
        }
    }
}

/// Builds the limit, unless a parameter is missing. A refusal of the kernel is recorded at the field that it names, or at the
/// section if that field is inherited.
fn build(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    strategy: Strategy,
    parameters: Parameters,
) -> Option<Allowance> {
    match limit_of(strategy, parameters)? {
        Ok(limit) => Some(Allowance::Limited(limit)),
        Err(error) => {
            match section.field(error.field()) {
                Some(field) => reader.mistake(field, error.fix()),
                None => reader.mistaken(section, format!("with {error}")),
            }
            None
        }
    }
}

pub(super) fn limit_of(strategy: Strategy, with: Parameters) -> Option<Result<Limit, LimitError>> {
    let with_debt = |limit: Limit| match with.max_debt {
        Some(max_debt) => limit.with_max_debt(max_debt),
        None => Ok(limit),
    };
    Some(match strategy {
        Strategy::TokenBucket => Limit::token_bucket(with.rate?, with.burst?).and_then(with_debt),
        Strategy::LeakyBucket => Limit::leaky_bucket(with.rate?, with.capacity?).and_then(with_debt),
        Strategy::FixedWindow => match with.align {
            Some(Align::Clock) => Limit::clock_window(with.limit?, with.window?),
            _ => Limit::fixed_window(with.limit?, with.window?),
        },
        Strategy::SlidingWindow => Limit::sliding_window(with.limit?, with.window?),
        Strategy::SlidingWindowCounter => Limit::sliding_window_counter(with.limit?, with.window?),
        Strategy::Concurrency => Limit::concurrency(with.limit?, with.lease?),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, check_limit, parse};
    use crate::key::Key;

    #[test]
    fn wrong_numbers_are_refused_with_line_field_value_and_fix() {
        for (burst, fix) in [
            ("0", "must be at least 1; for no limit or no passage write unlimited = true or blocked = true"),
            ("-5", "must be at least 1"),
            ("-0", "must be at least 1"),
            ("5.0", "must be a whole number, such as 20"),
            ("1e3", "must be a whole number"),
            ("inf", "must be a whole number"),
            ("\"20\"", "must be a number without quotes: burst = 20"),
            ("\"many\"", "must be a whole number"),
            ("\"\"", "must be a whole number"),
            ("true", "must be a whole number"),
            ("1979-05-27", "must be a whole number"),
            ("9007199254740992", "must be at most 9007199254740991"),
            ("99999999999999999999", "is too large; at most 9007199254740991"),
            ("0xfffffffffffffffff", "is too large"),
        ] {
            let expected = (4, "limits.a.burst", burst, fix);
            check_limit("token_bucket", &format!("rate = '1/s'\nburst = {burst}"), &[expected]);
        }
        for (value, shown) in [("[20]", "[…]"), ("{ of = 20 }", "{…}")] {
            let expected = (4, "limits.a.burst", shown, "must be a whole number");
            check_limit("token_bucket", &format!("rate = '1/s'\nburst = {value}"), &[expected]);
        }
        for (rate, fix) in [
            ("10", "must be count/period in quotes, such as \"10/s\""),
            ("'10'", "write count/period, such as 10/s"),
            ("'10/fortnight'", "write count/period"),
            ("'-1/s'", "write count/period"),
            ("'0/s'", "the count must be at least 1"),
            ("'1/0s'", "the period must be longer than zero"),
            ("'8589934591/s'", "2^32"),
        ] {
            let expected = (3, "limits.a.rate", rate, fix);
            check_limit("token_bucket", &format!("rate = {rate}\nburst = 20"), &[expected]);
        }
        for (window, fix) in [
            ("60", "must be a duration in quotes, such as \"1m\""),
            ("''", "whole number and a unit"),
            ("'60'", "use one of the units"),
            ("'-1s'", "whole number and a unit"),
            ("'0s'", "must be longer than zero"),
            ("'9999w'", "must be at most"),
            ("'250ms'", "is shorter than 1s; write a longer window, or subsecond = true if it is meant"),
            ("'999999us'", "subsecond = true"),
        ] {
            let expected = (4, "limits.a.window", window, fix);
            check_limit("sliding_window", &format!("limit = 5\nwindow = {window}"), &[expected]);
            check_limit(
                "sliding_window",
                &format!("limit = 5\nwindow = {window}\nsubsecond = false"),
                &[expected],
            );
        }
        // Each number is sound, and their product is not.
        let expected = (3, "limits.a.limit", "9007199254740991", "2^62");
        check_limit("sliding_window_counter", "limit = 9007199254740991\nwindow = '1m'", &[expected]);
    }

    #[test]
    fn fields_that_do_not_go_together_are_refused() {
        check_limit(
            "fixed_window",
            "limit = 5\nwindow = '1m'\nburst = 0",
            &[(
                5,
                "limits.a.burst",
                "0",
                "`burst` does not belong to fixed_window; it takes limit, window, align",
            )],
        );
        check_limit(
            "token_bucket",
            "rate = '1/s'\nburst = 1\nsubsecond = true\nalign = 'clock'",
            &[
                (5, "limits.a.subsecond", "true", "does not belong to token_bucket; it takes rate, burst"),
                (6, "limits.a.align", "'clock'", "does not belong to token_bucket"),
            ],
        );
        check(
            "[limits.a]\nunlimited = true\nblocked = true",
            &[(3, "limits.a.blocked", "true", "contradicts unlimited = true; keep one of the two")],
        );
        check(
            "[limits.a]\nunlimited = true\nstrategy = 'token_bucket'\nburst = 0\nsubsecond = 1",
            &[
                (3, "limits.a.strategy", "'token_bucket'", "does not go with unlimited = true"),
                (4, "limits.a.burst", "0", "does not go with unlimited = true; remove one of the two"),
                (5, "limits.a.subsecond", "1", "does not go with unlimited = true"),
            ],
        );
        check(
            "[limits.a]\nunlimited = 'yes'\nblocked = true\nburst = 0",
            &[
                (2, "limits.a.unlimited", "'yes'", "must be true or false, without quotes"),
                (4, "limits.a.burst", "0", "must be at least 1"),
            ],
        );
        check_limit(
            "concurrency",
            "limit = 5\nlease = '1s'\nalign = 'day'\nshadow = 1\nfallback = 'opne'\noverrides = 7",
            &[
                (5, "limits.a.align", "'day'", "does not belong"),
                (6, "limits.a.shadow", "1", "must be true or false"),
                (
                    7,
                    "limits.a.fallback",
                    "'opne'",
                    "must be one of open, closed, local; did you mean \"open\"?",
                ),
                (8, "limits.a.overrides", "7", "must be a table: write [limits.a.overrides]"),
            ],
        );
        check_limit(
            "fixed_window",
            "limit = 5\nwindow = '1m'\nalign = 'day'",
            &[(5, "limits.a.align", "'day'", "must be one of first, clock")],
        );
    }

    #[test]
    fn subjects_are_read_and_checked() {
        use tollgate_store::Subject;
        let fields = "rate = '1/s'\nburst = 20\n";
        let bucket = |more: &str| format!("[limits.a]\nstrategy = 'token_bucket'\n{fields}{more}");
        for (more, subject) in [
            ("", Subject::Key),
            ("subject = 'key'", Subject::Key),
            ("subject = 'namespace'", Subject::Namespace),
            ("subject = 'all'", Subject::All),
        ] {
            let policy = parse(&bucket(more)).policy;
            assert_eq!(policy.find("a").unwrap().subject(), subject, "{more}");
        }
        for (more, field, value, fix) in [
            ("subject = 'tenant'", "subject", "'tenant'", "must be one of key, namespace, all"),
            (
                "overrides.x = { burst = 5, subject = 'key' }",
                "overrides.x.subject",
                "'key'",
                "belongs to the limit",
            ),
        ] {
            check(&bucket(more), &[(5, &format!("limits.a.{field}"), value, fix)]);
        }
    }

    #[test]
    fn an_override_has_the_rest_from_its_limit() {
        let policy = parse(
            r#"
            [limits.a]
            strategy = "fixed_window"
            limit = 5
            window = "250ms"
            subsecond = true
            align = "clock"
            [limits.a.overrides]
            bare = { limit = 6 }
            "user:slow" = { window = "500ms" }
            "user:%3A" = { align = "first" }
            "user:in:v2" = { unlimited = true }
            "user:out" = { blocked = true, unlimited = false }
            [limits.a.overrides."user:own"]
            limit = 7
            window = "1m"
            subsecond = false
            [limits.b]
            unlimited = true
            overrides.x.blocked = true
            "#,
        )
        .policy;
        for (limit, key, words) in [
            ("a", "other", "5 per 250ms window of the clock"),
            ("a", "default:bare", "6 per 250ms window of the clock"),
            ("a", "user:slow", "5 per 500ms window of the clock"),
            ("a", "user:%3a", "5 per 250ms window"),
            ("a", "user:in:v2", "unlimited"),
            ("a", "user:out", "blocked"),
            ("a", "user:own", "7 per 1m window of the clock"),
            ("b", "x", "blocked"),
            ("b", "y", "unlimited"),
        ] {
            let allowance = policy.find(limit).unwrap().allowance_for(&Key::parse(key).unwrap());
            assert_eq!(allowance.to_string(), words, "{limit} {key}");
        }
    }

    #[test]
    fn wrong_overrides_are_refused() {
        let limit = "[limits.a]\nstrategy = 'fixed_window'\nlimit = 5\nwindow = '1m'\n[limits.a.overrides]\n";
        for (line, field, value, fix) in [
            ("a = { limit = 0 }", "a.limit", "0", "must be at least 1"),
            ("a = { burst = 5 }", "a.burst", "5", "`burst` does not belong to fixed_window"),
            ("a = { limt = 5 }", "a.limt", "5", "did you mean `limit`?"),
            ("a = { window = '1ms' }", "a.window", "'1ms'", "subsecond = true"),
            (
                "a = { strategy = 'fixed_window' }",
                "a.strategy",
                "'fixed_window'",
                "keeps the strategy of its limit",
            ),
            (
                "a = { limit = 9, shadow = true }",
                "a.shadow",
                "true",
                "belongs to the limit and not to an override",
            ),
            ("a = { limit = 9, fallback = 'open' }", "a.fallback", "'open'", "belongs to the limit"),
            ("a = { limit = 9, overrides = {} }", "a.overrides", "{…}", "belongs to the limit"),
            ("a = {}", "a", "", "says nothing; write what differs, unlimited = true or blocked = true"),
            ("a = 5", "a", "5", "must be a table"),
            ("a = { unlimited = true, limit = 5 }", "a.limit", "5", "does not go with unlimited = true"),
            (
                "a = { unlimited = true, strategy = 'x' }",
                "a.strategy",
                "'x'",
                "does not go with unlimited = true",
            ),
            ("a = { unlimited = true, blocked = true }", "a.blocked", "true", "contradicts unlimited = true"),
            ("a = { blocked = 1 }", "a.blocked", "1", "must be true or false"),
            ("'' = { limit = 9 }", "\"\"", "", "the key is empty"),
            ("'a:b:c:d' = { limit = 9 }", "\"a:b:c:d\"", "", "did you mean \"a:b%3Ac%3Ad\"?"),
            ("\"a\\n\" = { limit = 9 }", "\"a\\n\"", "", "control character U+000A"),
        ] {
            let field = format!("limits.a.overrides.{field}");
            check(&format!("{limit}{line}\n"), &[(6, &field, value, fix)]);
        }
        check(
            &format!("{limit}'default:x' = {{ limit = 9 }}\nx = {{ limit = 0 }}\n"),
            &[
                (7, "limits.a.overrides.x", "", "is the same key as another override; keep one of them"),
                (7, "limits.a.overrides.x.limit", "0", "must be at least 1"),
            ],
        );
        // Valid alone, but not with the inherited fields.
        check_limit(
            "sliding_window_counter",
            "limit = 4_000_000_000_000\nwindow = '1s'\noverrides.x.window = '1d'",
            &[(5, "limits.a.overrides.x", "", "with limit = 4000000000000: times")],
        );
        check(
            "[limits.a]\nblocked = true\noverrides.x = { rate = '1/s' }\noverrides.y = {}",
            &[
                (3, "limits.a.overrides.x.rate", "'1/s'", "blocked = true has no limit to change"),
                (4, "limits.a.overrides.y", "", "says nothing"),
            ],
        );
        check(
            "[limits.a]\nstrategy = 'x'\noverrides.x = { burst = 0, limit = 5 }",
            &[
                (2, "limits.a.strategy", "'x'", "must be one of"),
                (3, "limits.a.overrides.x.burst", "0", "must be at least 1"),
            ],
        );
    }
}
