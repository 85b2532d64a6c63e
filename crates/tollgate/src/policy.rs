//! The limits and rules that apply.
//!
//! A [`Policy`] is a list of [`Rule`]s. A rule is a named limit, or allows or blocks everything. It may treat single keys
//! differently (overrides), decide without denying (shadow), and set the fallback for a failing store. Everything is checked when
//! it is built, so later code need not check again.
//!
//! Rules are data: nothing here counts, decides or reads a clock. A policy is built in code or, with the feature `config`, read
//! from a file by `config.rs`. The previous step is `key.rs`; the engine (`engine.rs`) charges the limits next.

#[cfg(feature = "config")]
pub mod config;
pub(crate) mod entry;
pub(crate) mod names;
mod nearest;
mod share;

use std::collections::BTreeSet;
use std::fmt;

use tollgate_kernel::Limit;
use tollgate_store::Subject;

use self::nearest::nearest;
use crate::error::Error;
use crate::key::Key;
pub use crate::outcome::Fallback;

/// How much a rule lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allowance {
    /// Limited by these numbers.
    Limited(Limit),
    /// Everything, uncounted.
    Unlimited,
    /// Nothing.
    Blocked,
}

impl From<Limit> for Allowance {
    fn from(limit: Limit) -> Allowance {
        Allowance::Limited(limit)
    }
}

/// The limit in words, `unlimited` or `blocked`.
impl fmt::Display for Allowance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Allowance::Limited(limit) => limit.fmt(f),
            Allowance::Unlimited => f.write_str("unlimited"),
            Allowance::Blocked => f.write_str("blocked"),
        }
    }
}

/// A named limit and how it is applied.
///
/// ```
/// use tollgate::{Allowance, Fallback, Key, Limit, Rate, Rule};
///
/// let api = Rule::new("api", Limit::token_bucket(Rate::per_second(10)?, 20)?)?
///     .fallback(Fallback::Closed)
///     .with_override(Key::parse("user:42")?, Limit::token_bucket(Rate::per_second(100)?, 200)?)?
///     .with_override(Key::parse("user:666")?, Allowance::Blocked)?;
/// assert_eq!(api.allowance_for(&Key::parse("user:42")?).to_string(), "100/s, bursts of 200");
/// assert_eq!(api.allowance_for(&Key::parse("user:43")?).to_string(), "10/s, bursts of 20");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    name: String,
    allowance: Allowance,
    shadow: bool,
    fallback: Option<Fallback>,
    subject: Subject,
    /// Sorted by key, no key twice.
    overrides: Vec<(Key<'static>, Allowance)>,
}

impl Rule {
    /// A limit with a name of 1 to 64 characters `a-z`, `0-9`, `_`, `.` and `-`.
    pub fn new(name: impl Into<String>, limit: impl Into<Limit>) -> Result<Rule, PolicyError> {
        Rule::named(name.into(), Allowance::Limited(limit.into()))
    }

    /// A rule that lets everything pass, uncounted.
    pub fn unlimited(name: impl Into<String>) -> Result<Rule, PolicyError> {
        Rule::named(name.into(), Allowance::Unlimited)
    }

    /// A rule that lets nothing pass.
    pub fn blocked(name: impl Into<String>) -> Result<Rule, PolicyError> {
        Rule::named(name.into(), Allowance::Blocked)
    }

    /// What is wrong with a name, as the rule to follow; `None` for a valid name.
    ///
    /// ```
    /// use tollgate::Rule;
    /// assert_eq!(Rule::name_fault("api"), None);
    /// assert_eq!(Rule::name_fault("a b"), Some("a name has only the characters a-z, 0-9, `_`, `.` and `-`"));
    /// ```
    pub fn name_fault(name: &str) -> Option<&'static str> {
        name_fault(name)
    }

    fn named(name: String, allowance: Allowance) -> Result<Rule, PolicyError> {
        match name_fault(&name) {
            None => Ok(Rule {
                name,
                allowance,
                shadow: false,
                fallback: None,
                subject: Subject::default(),
                overrides: Vec::new(),
            }),
            Some(fix) => Err(PolicyError(format!("limit name `{}`: {fix}", Excerpt(&name)))),
        }
    }

    /// A rule that comes with a call.
    pub(crate) fn ad_hoc(name: &str, allowance: Allowance) -> Result<Rule, PolicyError> {
        Rule::named(name.to_owned(), allowance)
    }

    /// The same rule in shadow mode: it decides and counts, but never denies.
    #[must_use]
    pub fn shadow(self) -> Rule {
        Rule { shadow: true, ..self }
    }

    /// The same rule with its own answer to a failing store.
    #[must_use]
    pub fn fallback(self, fallback: Fallback) -> Rule {
        Rule { fallback: Some(fallback), ..self }
    }

    /// The same rule with another unit of placement for stores on several servers: keys are placed one by one, a whole
    /// namespace on one server, or all keys of all limits with that subject on one server.
    #[must_use]
    pub fn with_subject(self, subject: Subject) -> Rule {
        Rule { subject, ..self }
    }

    /// The same rule, treating one key differently: another limit of the same strategy, unlimited or blocked.
    pub fn with_override(
        mut self,
        key: Key<'_>,
        allowance: impl Into<Allowance>,
    ) -> Result<Rule, PolicyError> {
        let allowance = allowance.into();
        let name = &self.name;
        match (&self.allowance, &allowance) {
            (Allowance::Limited(rule), Allowance::Limited(limit)) if rule.strategy() != limit.strategy() => {
                return Err(PolicyError(format!(
                    "limit `{name}`: an override has the strategy {}, and the limit {}; use the limit's strategy, unlimited \
                     or blocked",
                    limit.strategy(),
                    rule.strategy(),
                )));
            }
            (Allowance::Unlimited | Allowance::Blocked, Allowance::Limited(_)) => {
                return Err(PolicyError(format!(
                    "limit `{name}`: is {} and has no strategy for an override to keep; an override here is unlimited or \
                     blocked",
                    self.allowance,
                )));
            }
            _ => {}
        }
        match self.position(&key) {
            Ok(_) => Err(PolicyError(format!("limit `{name}`: a key has two overrides; keep one of them"))),
            Err(position) => {
                self.overrides.insert(position, (key.into_owned(), allowance));
                Ok(self)
            }
        }
    }

    /// The same with another override for a key that may have one already, such as one that is set at run time over one of the
    /// config.
    ///
    /// ```
    /// use tollgate::{Allowance, Key, Limit, Rule};
    ///
    /// let key = || Key::parse("user:42");
    /// let api = Rule::new("api", Limit::token_bucket("10/s", 20)?)?.with_override(key()?, Allowance::Unlimited)?;
    /// assert!(api.clone().with_override(key()?, Allowance::Blocked).is_err());
    /// assert_eq!(api.overriding(key()?, Allowance::Blocked)?.allowance_for(&key()?), &Allowance::Blocked);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn overriding(mut self, key: Key<'_>, allowance: impl Into<Allowance>) -> Result<Rule, PolicyError> {
        if let Ok(position) = self.position(&key) {
            self.overrides.remove(position);
        }
        self.with_override(key, allowance)
    }

    /// Where the override of a key is, or where it would go.
    fn position(&self, key: &Key<'_>) -> Result<usize, usize> {
        self.overrides.binary_search_by(|(other, _)| other.canonical().cmp(key.canonical()))
    }

    /// The name of the limit.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How much passes, for every key without an override.
    pub fn allowance(&self) -> &Allowance {
        &self.allowance
    }

    /// How much passes for this key.
    pub fn allowance_for(&self, key: &Key<'_>) -> &Allowance {
        self.position(key).map_or(&self.allowance, |position| &self.overrides[position].1)
    }

    /// Whether the rule is in shadow mode.
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// The rule's own answer to a failing store, if it does not follow the store's.
    pub fn own_fallback(&self) -> Option<Fallback> {
        self.fallback
    }

    /// Which keys are placed on one server in stores on several servers.
    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// The keys that are treated differently, in the order of their canonical text.
    pub fn overrides(&self) -> &[(Key<'static>, Allowance)] {
        &self.overrides
    }
}

/// All limits: rules with distinct names.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limit, Policy, Rule};
///
/// let policy = Policy::new([
///     Rule::new("login", Limit::fixed_window(5, Duration::from_secs(60))?)?,
///     Rule::unlimited("health")?,
/// ])?;
/// assert_eq!(policy.find("login")?.allowance().to_string(), "5 per 1m window");
/// assert_eq!(
///     policy.find("logn").unwrap_err().to_string(),
///     "unknown limit `logn`; known: login, health (did you mean `login`?)",
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// The rules in the order given; no two may have the same name.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Result<Policy, PolicyError> {
        let rules: Vec<Rule> = rules.into_iter().collect();
        let mut names = BTreeSet::new();
        match rules.iter().find(|rule| !names.insert(rule.name())) {
            None => Ok(Policy { rules }),
            Some(rule) => {
                Err(PolicyError(format!("two limits are called `{}`; give each its own name", rule.name())))
            }
        }
    }

    /// All rules, in the order given.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The rule of this name, if there is one. Looks through the list: for start-up and reports, not for each charge.
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.name == name)
    }

    /// The rule of this name, or an error that lists all names.
    pub fn find(&self, name: &str) -> Result<&Rule, PolicyError> {
        self.rule(name).ok_or_else(|| self.unknown(name))
    }

    /// The error for an unknown name: it lists all names.
    pub(crate) fn unknown(&self, name: &str) -> PolicyError {
        /// How many names are listed at most.
        const LISTED: usize = 50;
        let known = || self.rules.iter().map(Rule::name);
        let listed = known().take(LISTED).collect::<Vec<_>>().join(", ");
        let mut message = format!("unknown limit `{}`; ", Excerpt(name));
        message.push_str(&match self.rules.len() {
            0 => "no limit is registered".to_owned(),
            1..=LISTED => format!("known: {listed}"),
            all => format!("known: {listed} and {} more", all - LISTED),
        });
        if let Some(guess) = nearest(name, known()) {
            message.push_str(&format!(" (did you mean `{guess}`?)"));
        }
        PolicyError(message)
    }
}

/// Why a policy was refused, or a limit was not found in it. The message says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError(String);

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PolicyError {}

impl From<PolicyError> for Error {
    fn from(error: PolicyError) -> Error {
        Error::call(error.0)
    }
}

/// What is wrong with the name of a limit, as the rule to follow.
fn name_fault(name: &str) -> Option<&'static str> {
    let sound = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-');
    let fix = match name.len() {
        0 => "a name has 1 to 64 characters",
        65.. => "a name has at most 64 characters",
        _ if name.bytes().all(sound) => return None,
        _ => "a name has only the characters a-z, 0-9, `_`, `.` and `-`",
    };
    Some(fix)
}

/// Untrusted text inside a message: its start, without characters that could break a line or a terminal.
struct Excerpt<'a>(&'a str);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 64;
        for character in self.0.chars().take(LONGEST) {
            match character {
                '"' | '\'' | '\\' => write!(f, "{character}")?,
                _ => write!(f, "{}", character.escape_debug())?,
            }
        }
        match self.0.chars().nth(LONGEST) {
            Some(_) => f.write_str("…"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Micros, Rate};

    use super::*;

    fn bucket(per_second: u64) -> Limit {
        Limit::token_bucket(Rate::per_second(per_second).unwrap(), 20).unwrap()
    }

    fn window() -> Limit {
        Limit::fixed_window(5, Micros::from_secs(60)).unwrap()
    }

    fn key(text: &str) -> Key<'_> {
        Key::parse(text).unwrap()
    }

    #[test]
    fn a_rule_returns_what_it_was_built_with() {
        let rule = Rule::new("api", bucket(10)).unwrap();
        assert_eq!((rule.name(), rule.allowance()), ("api", &Allowance::Limited(bucket(10))));
        assert_eq!((rule.is_shadow(), rule.own_fallback(), rule.overrides().len()), (false, None, 0));

        let rule = rule.shadow().fallback(Fallback::Local);
        let rule = rule.with_override(key("user:42"), bucket(100)).unwrap();
        let rule = rule.with_override(key("user:1"), Allowance::Unlimited).unwrap();
        let rule = rule.with_override(key("default:bad"), Allowance::Blocked).unwrap();
        assert!(rule.is_shadow());
        assert_eq!(rule.own_fallback(), Some(Fallback::Local));
        let shown: Vec<_> = rule.overrides().iter().map(|(key, how)| format!("{key} {how}")).collect();
        assert_eq!(shown, ["default:bad blocked", "user:1 unlimited", "user:42 100/s, bursts of 20"]);
        for (text, allowance) in [
            ("bad", Allowance::Blocked),
            ("user:1", Allowance::Unlimited),
            ("user:42", bucket(100).into()),
            ("user:42:v2", bucket(10).into()),
            ("42", bucket(10).into()),
        ] {
            assert_eq!(rule.allowance_for(&key(text)), &allowance, "{text}");
        }

        assert_eq!(Rule::unlimited("a.b").unwrap().allowance(), &Allowance::Unlimited);
        assert_eq!(Rule::blocked("a-b_0").unwrap().allowance(), &Allowance::Blocked);
        for fallback in Fallback::ALL {
            assert_eq!(fallback.to_string(), fallback.name());
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_a_fix() {
        let long = "x".repeat(65);
        let rule = || Rule::new("api", bucket(10)).unwrap();
        for (error, message) in [
            (Rule::new("", bucket(1)).err(), "limit name ``: a name has 1 to 64 characters"),
            (Rule::new(&long, bucket(1)).err(), "…`: a name has at most 64 characters"),
            (Rule::new("Api", bucket(1)).err(), "limit name `Api`: a name has only the characters a-z, 0-9"),
            (Rule::unlimited("a\nb").err(), "limit name `a\\nb`: a name has only"),
            (Rule::blocked("a'é").err(), "limit name `a'é`: a name has only"),
            (
                rule().with_override(key("a"), window()).err(),
                "limit `api`: an override has the strategy fixed_window, and the limit token_bucket",
            ),
            (
                Rule::unlimited("free").unwrap().with_override(key("a"), window()).err(),
                "limit `free`: is unlimited and has no strategy for an override to keep",
            ),
            (
                Rule::blocked("shut").unwrap().with_override(key("a"), window()).err(),
                "limit `shut`: is blocked and has no strategy",
            ),
            (
                rule()
                    .with_override(key("a"), bucket(1))
                    .and_then(|rule| rule.with_override(key("default:a"), Allowance::Blocked))
                    .err(),
                "limit `api`: a key has two overrides; keep one of them",
            ),
            (Policy::new([rule(), rule()]).err(), "two limits are called `api`; give each its own name"),
        ] {
            let error = error.expect(message).to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn an_unknown_limit_lists_the_known_ones() {
        let policy =
            |names: &[&str]| Policy::new(names.iter().map(|name| Rule::unlimited(*name).unwrap())).unwrap();
        let many: Vec<String> = (0..60).map(|n| format!("limit-{n:02}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        for (names, name, message) in [
            (&[][..], "api", "unknown limit `api`; no limit is registered"),
            (&["a", "b"], "login", "unknown limit `login`; known: a, b"),
            (&["api", "login"], "apis", "unknown limit `apis`; known: api, login (did you mean `api`?)"),
            (&["api"], "a\u{1b}[2J", "unknown limit `a\\u{1b}[2J`; known: api"),
            (&many, "limit-5x", "limit-48, limit-49 and 10 more (did you mean `limit-50`?)"),
        ] {
            let policy = policy(names);
            let error = policy.find(name).unwrap_err().to_string();
            assert!(error.ends_with(message), "{error}");
            assert_eq!(policy.rule(name), None);
        }
        let policy = policy(&["api", "login"]);
        assert_eq!(policy.find("login").unwrap(), &policy.rules()[1]);
        assert!(policy.find(&"x".repeat(1 << 20)).unwrap_err().to_string().len() < 200);
    }
}
