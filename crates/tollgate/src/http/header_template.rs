//! Prepared rate-limit headers for requests that pass: everything but the values that change with each charge.
//!
//! Most of the cost of a header is its slot in the map, which needs a hash of its name. So the fields are prepared in a map
//! ([`HeaderSlots`]): a copy of it has all slots, and only values are set. A [`HeaderTemplate`] also has the values that do not
//! change: the policy of a limit, alone or beside others.
//!
//! Templates are never dropped, so that a request can use one without a reference count, which all cores would write to in the
//! same cache line. Equal templates are built once, and their number is bounded ([`MOST_TEMPLATES`]); limits beyond it have their
//! headers written each time.

use std::sync::{LazyLock, OnceLock};

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Outcome};

use crate::headers::{Field, Format, Line, QuotaNumbers, ReportedLimit, policy_item, quota_start};

/// How many templates a process makes: some 2 KiB each.
const MOST_TEMPLATES: usize = 1_024;

/// How many sets of limits of one layer have a template.
const MOST_SETS: usize = 32;

/// The names of [`Field::ALL`], worked out when this is compiled.
pub(super) static NAMES: [HeaderName; Field::ALL.len()] = [
    HeaderName::from_static(Field::Limit.name()),
    HeaderName::from_static(Field::Remaining.name()),
    HeaderName::from_static(Field::Reset.name()),
    RETRY_AFTER,
    HeaderName::from_static(Field::Policy.name()),
    HeaderName::from_static(Field::Quota.name()),
];

/// Fields that nearly every response has. [`HeaderSlots`] reserves room for them in its copies.
pub(super) static USUAL: [HeaderName; 2] = [CONTENT_TYPE, CONTENT_LENGTH];

/// The fields of a response to a request that passes, each in its slot. A copy has room for exactly these.
#[derive(Clone)]
pub(super) struct HeaderSlots {
    fields: HeaderMap,
    /// Which of ours they are, as the map and all its copies have them.
    order: Vec<Option<Field>>,
}

/// The slots of a format: alone, for a response without other fields, and with room for the usual ones.
#[derive(Clone)]
pub(super) struct FormatSlots {
    pub(super) alone: HeaderSlots,
    pub(super) with_usual: HeaderSlots,
}

impl FormatSlots {
    /// For the fields of a format; `None` if it has none.
    pub(super) fn of(format: &Format) -> Option<&'static FormatSlots> {
        static ALL: LazyLock<[FormatSlots; 3]> =
            LazyLock::new(|| [(true, true), (true, false), (false, true)].map(FormatSlots::new));
        let [both, legacy, draft] = &*ALL;
        match (format.legacy, format.draft) {
            (true, true) => Some(both),
            (true, false) => Some(legacy),
            (false, true) => Some(draft),
            (false, false) => None,
        }
    }

    fn new((is_legacy, is_draft): (bool, bool)) -> FormatSlots {
        let legacy = [Field::Limit, Field::Remaining, Field::Reset].into_iter().filter(|_| is_legacy);
        let fields = || legacy.clone().chain([Field::Policy, Field::Quota].into_iter().filter(|_| is_draft));
        FormatSlots { alone: HeaderSlots::new(fields(), &[]), with_usual: HeaderSlots::new(fields(), &USUAL) }
    }

    /// Sets a value that all copies share.
    fn set(&mut self, field: Field, value: &HeaderValue) {
        for slots in [&mut self.alone, &mut self.with_usual] {
            if let Some(slot) = slots.fields.get_mut(&NAMES[field as usize]) {
                *slot = value.clone();
            }
        }
    }
}

impl HeaderSlots {
    fn new(ours: impl Iterator<Item = Field>, usual: &[HeaderName]) -> HeaderSlots {
        let empty = || HeaderValue::from_static("");
        let mut fields = HeaderMap::with_capacity(Field::ALL.len() + usual.len());
        fields.extend(ours.map(|field| (NAMES[field as usize].clone(), empty())));
        fields.extend(usual.iter().map(|usual| (usual.clone(), empty())));
        let field = |name: &HeaderName| Field::ALL.into_iter().find(|field| NAMES[*field as usize] == name);
        let order = fields.keys().map(field).collect();
        HeaderSlots { fields, order }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// A copy, with the values that `value` has for its fields; the others stay.
    #[inline]
    pub(super) fn filled(&self, mut value: impl FnMut(Field) -> Option<HeaderValue>) -> HeaderMap {
        let mut fields = self.fields.clone();
        for (field, slot) in self.order.iter().zip(fields.values_mut()) {
            if let Some(new) = field.and_then(&mut value) {
                *slot = new;
            }
        }
        fields
    }
}

/// The fields of limits that are charged at once and let a charge through, written but for what changes from charge to charge.
pub(super) struct HeaderTemplate {
    format: Format,
    slots: FormatSlots,
    policy: &'static str,
    limits: Vec<TemplateLimit>,
}

#[derive(Clone, PartialEq, Eq)]
struct TemplateLimit {
    limit: Limit,
    quota_start: String,
    /// The value of `X-RateLimit-Limit`.
    capacity: HeaderValue,
}

/// The values that change with each charge, and the template for them.
pub(super) struct FilledTemplate {
    template: &'static HeaderTemplate,
    /// Which of the limits binds.
    bound: usize,
    remaining: u64,
    reset: u64,
    quota: Option<HeaderValue>,
}

impl HeaderTemplate {
    /// From what a limit reports before any charge; `None` if it reports nothing or there are too many templates.
    pub(super) fn new(format: &Format, fresh: &ReportedLimit<'_>) -> Option<&'static HeaderTemplate> {
        let limit = *fresh.limit?;
        let limits = vec![TemplateLimit {
            limit,
            quota_start: quota_start(fresh.name),
            capacity: number_value(limit.capacity()),
        }];
        HeaderTemplate::made_once(format, policy_item(fresh), limits)
    }

    /// Of several limits that are charged at once, in this order.
    fn joined(templates: &[&'static HeaderTemplate]) -> Option<&'static HeaderTemplate> {
        let format = templates.first()?.format;
        let policies: Vec<&str> = templates.iter().map(|template| template.policy).collect();
        let limits = templates.iter().flat_map(|template| template.limits.iter().cloned());
        HeaderTemplate::made_once(&format, policies.join(", "), limits.collect())
    }

    fn made_once(
        format: &Format,
        policy: String,
        mut limits: Vec<TemplateLimit>,
    ) -> Option<&'static HeaderTemplate> {
        static ALL: Mutex<Vec<&'static HeaderTemplate>> = Mutex::new(Vec::new());
        let mut slots = FormatSlots::of(format)?.clone();
        let mut all = ALL.lock();
        let is_same = |known: &&&'static HeaderTemplate| {
            known.format == *format && known.policy == policy && known.limits == limits
        };
        if let Some(known) = all.iter().find(is_same) {
            return Some(known);
        }
        let is_visible = HeaderValue::try_from(policy.as_str()).is_ok();
        if all.len() >= MOST_TEMPLATES || !is_visible {
            return None;
        }
        // Copies of a text that is never dropped are not counted.
        let policy: &'static str = policy.leak();
        slots.set(Field::Policy, &HeaderValue::from_static(policy));
        for limit in &mut limits {
            let capacity: &'static str = limit.limit.capacity().to_string().leak();
            limit.capacity = HeaderValue::from_static(capacity);
        }
        if let [limit] = &limits[..] {
            slots.set(Field::Limit, &limit.capacity);
        }
        let template: &'static HeaderTemplate =
            Box::leak(Box::new(HeaderTemplate { format: *format, slots, policy, limits }));
        all.push(template);
        Some(template)
    }

    /// Whether the template is correct for this outcome of its limit, charged alone.
    pub(super) fn fits(&self, outcome: &Outcome) -> bool {
        outcome.allowed && self.limits[0].limit.capacity() == outcome.capacity
    }

    /// The fields for an answer that it fits.
    pub(super) fn filled(&'static self, outcome: &Outcome, cost: Cost, now: Micros) -> FilledTemplate {
        let numbers = QuotaNumbers::new(&self.limits[0].limit, outcome, cost, self.format.reset, now);
        let quota = self.format.draft.then(|| {
            let mut line = Line::default();
            numbers.write_quota(line.text(&self.limits[0].quota_start));
            value(&line)
        });
        FilledTemplate { template: self, bound: 0, remaining: numbers.remaining, reset: numbers.reset, quota }
    }

    /// The same for the answers of all its limits, of which one binds; `None` if it does not fit them.
    pub(super) fn filled_all<'o>(
        &'static self,
        outcomes: impl Iterator<Item = (&'o Outcome, Cost)>,
        bound: usize,
        now: Micros,
    ) -> Option<FilledTemplate> {
        let mut line = Line::default();
        let mut of_bound = None;
        for (index, (of_limit, (outcome, cost))) in self.limits.iter().zip(outcomes).enumerate() {
            if !outcome.allowed || of_limit.limit.capacity() != outcome.capacity {
                return None;
            }
            let numbers = QuotaNumbers::new(&of_limit.limit, outcome, cost, self.format.reset, now);
            if self.format.draft {
                if index > 0 {
                    line.text(", ");
                }
                numbers.write_quota(line.text(&of_limit.quota_start));
            }
            if index == bound {
                of_bound = Some((numbers.remaining, numbers.reset));
            }
        }
        let (remaining, reset) = of_bound?;
        let quota = self.format.draft.then(|| value(&line));
        Some(FilledTemplate { template: self, bound, remaining, reset, quota })
    }
}

impl FilledTemplate {
    pub(super) fn slots(&self) -> &'static FormatSlots {
        &self.template.slots
    }

    /// The value of a field that the template does not have already.
    #[inline]
    pub(super) fn changed(&mut self, field: Field) -> Option<HeaderValue> {
        match field {
            Field::Limit if self.template.limits.len() > 1 => {
                Some(self.template.limits[self.bound].capacity.clone())
            }
            Field::Remaining => Some(number_value(self.remaining)),
            Field::Reset => Some(number_value(self.reset)),
            Field::Quota => self.quota.take(),
            Field::Limit | Field::Policy | Field::RetryAfter => None,
        }
    }
}

/// The templates of the sets of limits that a layer charges at once, each made when it is first needed.
#[derive(Default)]
pub(super) struct TemplateSets([OnceLock<TemplateSet>; MOST_SETS]);

struct TemplateSet {
    limits: SmallVec<[&'static HeaderTemplate; 4]>,
    joined: Option<&'static HeaderTemplate>,
}

impl TemplateSets {
    /// The template of limits that are charged at once, from that of each.
    pub(super) fn of(&self, limits: &[&'static HeaderTemplate]) -> Option<&'static HeaderTemplate> {
        let is_same = |set: &TemplateSet| {
            set.limits.len() == limits.len()
                && set.limits.iter().zip(limits).all(|(one, other)| std::ptr::eq(*one, *other))
        };
        let make = || TemplateSet { limits: limits.into(), joined: HeaderTemplate::joined(limits) };
        self.0.iter().map(|slot| slot.get_or_init(make)).find(|set| is_same(set))?.joined
    }
}

/// A text that was rendered, which is visible ASCII.
pub(super) fn value(line: &Line) -> HeaderValue {
    HeaderValue::from_bytes(line.as_bytes()).unwrap_or(HeaderValue::from_static(""))
}

/// Texts of the numbers below 1,000, which nearly all are: a value of such a text needs no allocation. That takes 8 ns instead of
/// 29, twice for each response, of the some 450 that the layer adds.
static SMALL: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| (0..1_000).map(|number: u16| &*number.to_string().leak()).collect());

pub(super) fn number_value(number: u64) -> HeaderValue {
    let small = usize::try_from(number).ok().and_then(|number| SMALL.get(number));
    small.map_or_else(|| HeaderValue::from(number), |text| HeaderValue::from_static(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh<'a>(name: &'a str, limit: &'a Limit) -> ReportedLimit<'a> {
        let outcome = Outcome { capacity: limit.capacity(), ..Outcome::UNLIMITED };
        ReportedLimit { name, limit: Some(limit), cost: 1, outcome, shadow: false, unit: None }
    }

    #[test]
    fn equal_templates_are_made_once() {
        let window = |count| Limit::fixed_window(count, Micros::from_secs(60)).unwrap();
        let of = |name, limit: &Limit, format| HeaderTemplate::new(&format, &fresh(name, limit)).unwrap();
        let both = Format::default();
        let first = of("once", &window(10), both);
        assert!(std::ptr::eq(first, of("once", &window(10), both)));
        for other in [
            of("once", &window(11), both),
            of("twice", &window(10), both),
            of("once", &window(10), Format { draft: false, ..both }),
        ] {
            assert!(!std::ptr::eq(first, other));
        }
        assert!(HeaderTemplate::new(&Format::none(), &fresh("once", &window(10))).is_none());
    }

    #[test]
    fn a_set_of_limits_is_found_again_and_there_is_an_end_to_them() {
        let window = |count| Limit::fixed_window(count, Micros::from_secs(60)).unwrap();
        let of = |count| HeaderTemplate::new(&Format::default(), &fresh("set", &window(count))).unwrap();
        let all: Vec<&HeaderTemplate> = (1..=2 * MOST_SETS as u64).map(of).collect();
        let sets = TemplateSets::default();
        for pair in all.chunks(2) {
            let joined = sets.of(pair).expect("there is room");
            assert_eq!(joined.policy, format!("{}, {}", pair[0].policy, pair[1].policy));
            assert!(std::ptr::eq(joined, sets.of(pair).unwrap()));
        }
        assert!(sets.of(&[all[1], all[0]]).is_none(), "no room for another set");
        assert!(sets.of(&[all[0], all[1]]).is_some());
        assert!(sets.of(&all[..3]).is_none());
    }

    #[test]
    fn what_no_header_can_hold_has_no_template() {
        let made =
            |policy: &str| HeaderTemplate::made_once(&Format::default(), policy.to_owned(), Vec::new());
        assert!(made("\"a\\nb\";q=1").is_some());
        assert!(made("\"a\nb\";q=1").is_none());
    }

    #[test]
    fn numbers_are_written_as_they_are() {
        for number in (0..2_000).chain([9_999, 1_000_000, u64::MAX]) {
            assert_eq!(number_value(number), number.to_string().as_str());
        }
    }

    #[test]
    fn every_field_has_its_own_name() {
        for (field, name) in Field::ALL.into_iter().zip(&NAMES) {
            assert_eq!((name.as_str(), &NAMES[field as usize]), (field.name(), name));
        }
    }
}
