//! One (limit, key, cost) of a call. Every caller and every API uses this type.
//!
//! Building a charge costs nothing: the engine finds the limit and parses the key, once.

use std::fmt;
use std::sync::Arc;

use crate::key::KeyRef;
use crate::policy::entry::Entry;
use crate::policy::{Allowance, Rule};

/// One limit of a call, the key that it is charged to, and the cost; one unit by default.
///
/// ```
/// use tollgate::Charge;
/// let charge = Charge::new("tokens", "model:gpt").cost(1500);
/// ```
#[derive(Clone)]
pub struct Charge<'a> {
    pub(crate) limit: LimitRef<'a>,
    pub(crate) key: KeyRef<'a>,
    pub(crate) cost: u64,
}

impl<'a> Charge<'a> {
    /// One unit under `limit`, charged to `key`.
    #[inline]
    pub fn new(limit: impl Into<LimitRef<'a>>, key: impl Into<KeyRef<'a>>) -> Charge<'a> {
        Charge { limit: limit.into(), key: key.into(), cost: 1 }
    }

    /// How much to charge. Zero is refused when the charge is made: to look without charging, peek.
    #[inline]
    #[must_use]
    pub fn cost(self, cost: u64) -> Charge<'a> {
        Charge { cost, ..self }
    }

    /// The name of the limit.
    pub fn limit(&self) -> &str {
        self.limit.name()
    }
}

/// Omits the key, which must not appear in logs.
impl fmt::Debug for Charge<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut charge = f.debug_struct("Charge");
        charge.field("limit", &self.limit()).field("cost", &self.cost).finish_non_exhaustive()
    }
}

/// Which limit is charged: its name, or a [`NamedLimit`] that was looked up before.
#[derive(Clone, Copy)]
pub struct LimitRef<'a>(pub(crate) Given<'a>);

#[derive(Clone, Copy)]
pub(crate) enum Given<'a> {
    Name(&'a str),
    Handle(&'a NamedLimit),
}

impl LimitRef<'_> {
    /// The name of the limit.
    pub fn name(&self) -> &str {
        match self.0 {
            Given::Name(name) => name,
            Given::Handle(limit) => limit.name(),
        }
    }
}

impl<'a> From<&'a str> for LimitRef<'a> {
    #[inline]
    fn from(name: &'a str) -> LimitRef<'a> {
        LimitRef(Given::Name(name))
    }
}

impl<'a> From<&&'a str> for LimitRef<'a> {
    fn from(name: &&'a str) -> LimitRef<'a> {
        LimitRef(Given::Name(name))
    }
}

impl<'a> From<&'a String> for LimitRef<'a> {
    fn from(name: &'a String) -> LimitRef<'a> {
        LimitRef(Given::Name(name))
    }
}

impl<'a> From<&'a std::borrow::Cow<'_, str>> for LimitRef<'a> {
    fn from(name: &'a std::borrow::Cow<'_, str>) -> LimitRef<'a> {
        LimitRef(Given::Name(name))
    }
}

impl<'a> From<&'a NamedLimit> for LimitRef<'a> {
    #[inline]
    fn from(limit: &'a NamedLimit) -> LimitRef<'a> {
        LimitRef(Given::Handle(limit))
    }
}

impl fmt::Debug for LimitRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LimitRef({})", self.name())
    }
}

/// A limit that was looked up by name, or made from numbers. Cheap to clone; keep it for limits that are charged often. It
/// follows reloads. A limit that the new policy removes keeps its last numbers.
///
/// [`Tollgate::limit`](crate::Tollgate::limit) looks one up, [`Tollgate::ad_hoc`](crate::Tollgate::ad_hoc) makes one from
/// numbers.
#[derive(Clone)]
pub struct NamedLimit {
    pub(crate) entry: Arc<Entry>,
}

impl NamedLimit {
    /// The limit's name.
    pub fn name(&self) -> &'static str {
        self.entry.name
    }

    /// How much it lets through, for every key without an override.
    pub fn allowance(&self) -> Allowance {
        *self.entry.newest().rule.allowance()
    }

    /// How much it lets through for one key: its override, or what every key without one has.
    ///
    /// ```
    /// use tollgate::{Key, Limit, Rule, Tollgate};
    ///
    /// let (usual, large) = (Limit::token_bucket("10/s", 10)?, Limit::token_bucket("10/s", 99)?);
    /// let rule = Rule::new("api", usual)?.with_override(Key::parse("user:42")?, large)?;
    /// let api = Tollgate::builder().rule(rule).build()?.limit("api")?;
    /// assert_eq!((api.allowance_for("user:42"), api.allowance_for("user:7")), (large.into(), usual.into()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allowance_for<'k>(&self, key: impl Into<KeyRef<'k>>) -> Allowance {
        let rule = &self.entry.newest().rule;
        match rule.overrides() {
            [] => *rule.allowance(),
            _ => key.into().parse().map_or(*rule.allowance(), |key| *rule.allowance_for(&key)),
        }
    }

    /// The rule that it follows now.
    pub fn rule(&self) -> Rule {
        self.entry.newest().rule.clone()
    }
}

impl fmt::Debug for NamedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedLimit").field("rule", &self.entry.newest().rule).finish_non_exhaustive()
    }
}
