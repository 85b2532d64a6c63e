//! The header fields of an answer, rendered when the decision is made and written when the answer is there.
//!
//! Most of what a field costs is finding its place in a map, which hashes its name byte by byte. So the fields of a request that passes
//! stand in a map already ([`HeaderSlots`]): a copy of it has all the slots, and only values are put into it. Where one limit is charged
//! alone, some values are known too ([`HeaderTemplate`]).

use std::mem;
use std::sync::LazyLock;

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tollgate_kernel::{Cost, Limit, Micros, Outcome};

use crate::headers::{
    Field, Format, HeaderFields, Line, QuotaNumbers, ReportedLimit, ResetAs, policy_item, quota_start,
};

/// The names of [`Field::ALL`], worked out when this is compiled.
static NAMES: [HeaderName; Field::ALL.len()] = [
    HeaderName::from_static(Field::Limit.name()),
    HeaderName::from_static(Field::Remaining.name()),
    HeaderName::from_static(Field::Reset.name()),
    RETRY_AFTER,
    HeaderName::from_static(Field::Policy.name()),
    HeaderName::from_static(Field::Quota.name()),
];

/// What nearly every answer has by itself. Named in [`HeaderSlots`], so that a copy of them has room for these.
static USUAL: [HeaderName; 2] = [CONTENT_TYPE, CONTENT_LENGTH];

/// The fields that tell a caller how it stands.
#[derive(Default)]
pub(super) struct RateLimitHeaders {
    /// Each once; none, if nothing is reported.
    fields: Option<HeaderMap>,
    /// Which of [`USUAL`] stand among them with nothing in them.
    is_empty: [bool; USUAL.len()],
}

impl RateLimitHeaders {
    /// From what each limit reported.
    pub(super) fn new(format: &Format, reported: &[ReportedLimit<'_>], now: Micros) -> RateLimitHeaders {
        let Some(told) = HeaderFields::new(format, reported.iter().copied(), now) else {
            return RateLimitHeaders::default();
        };
        let (mut policy, mut quota) = (Line::default(), Line::default());
        if format.draft {
            told.write_policy(&mut policy);
            told.write_quota(&mut quota);
        }
        let Some(slots) = told.retry_after().is_none().then(|| HeaderSlots::of(format)).flatten() else {
            let mut fields = HeaderMap::with_capacity(Field::ALL.len() + USUAL.len());
            for (field, number) in told.numbers() {
                fields.insert(&NAMES[field as usize], number_value(number));
            }
            if format.draft {
                fields.insert(&NAMES[Field::Policy as usize], value(&policy));
                fields.insert(&NAMES[Field::Quota as usize], value(&quota));
            }
            return RateLimitHeaders { fields: Some(fields), is_empty: [false; USUAL.len()] };
        };
        let [limit, remaining, reset] = told.legacy().unwrap_or_default();
        slots.filled(|field, place| match field {
            Field::Limit => *place = number_value(limit),
            Field::Remaining => *place = number_value(remaining),
            Field::Reset => *place = number_value(reset),
            Field::Policy => *place = value(&policy),
            Field::Quota => *place = value(&quota),
            Field::RetryAfter => {}
        })
    }

    /// Writes them on an answer. The lists of the draft are added to those that are there; the other fields have room for one
    /// limit, and that is the outermost's, unless one inside has refused.
    pub(super) fn write(mut self, headers: &mut HeaderMap) {
        let Some(mut fields) = self.fields.take() else { return };
        // Nearly every answer has few fields, each once and none of them ours. Then they are sooner put to ours than ours to them.
        let is_ours = |name: &HeaderName| !USUAL.contains(name) && NAMES.contains(name);
        let is_each_once = headers.len() == headers.keys_len();
        if is_each_once && headers.len() <= fields.len() && !headers.keys().any(is_ours) {
            for (name, value) in mem::take(headers) {
                let Some(name) = name else { continue };
                if let Some(usual) = USUAL.iter().position(|usual| name == usual) {
                    self.is_empty[usual] = false;
                }
                fields.insert(name, value);
            }
            for (usual, _) in USUAL.iter().zip(self.is_empty).filter(|(_, is_empty)| *is_empty) {
                fields.remove(usual);
            }
            *headers = fields;
            return;
        }
        headers.reserve(fields.len());
        // Where a layer inside has refused, its numbers say for how long, and ours would contradict them.
        let is_refused_inside =
            headers.contains_key(&RETRY_AFTER) && headers.contains_key(&NAMES[Field::Limit as usize]);
        for (name, value) in fields {
            let Some(name) = name else { continue };
            if name == NAMES[Field::Policy as usize] || name == NAMES[Field::Quota as usize] {
                headers.append(name, value);
            } else if !is_refused_inside && !USUAL.contains(&name) {
                headers.insert(name, value);
            }
        }
    }
}

/// The fields of an answer to a request that passes, each in its place with nothing in it: ours, and those that nearly every answer has. A
/// copy has room for what it holds and no more.
#[derive(Clone)]
struct HeaderSlots {
    fields: HeaderMap,
    /// Which of ours they are, as the map and all its copies have them.
    order: Vec<Option<Field>>,
}

impl HeaderSlots {
    /// For the fields that a format has; `None` if there are none.
    fn of(format: &Format) -> Option<&'static HeaderSlots> {
        static ALL: LazyLock<[HeaderSlots; 3]> =
            LazyLock::new(|| [(true, true), (true, false), (false, true)].map(HeaderSlots::new));
        let [both, legacy, draft] = &*ALL;
        match (format.legacy, format.draft) {
            (true, true) => Some(both),
            (true, false) => Some(legacy),
            (false, true) => Some(draft),
            (false, false) => None,
        }
    }

    fn new((is_legacy, is_draft): (bool, bool)) -> HeaderSlots {
        let empty = || HeaderValue::from_static("");
        let mut fields = HeaderMap::with_capacity(Field::ALL.len() + USUAL.len());
        let legacy = [Field::Limit, Field::Remaining, Field::Reset].into_iter().filter(|_| is_legacy);
        for field in legacy.chain([Field::Policy, Field::Quota].into_iter().filter(|_| is_draft)) {
            fields.insert(&NAMES[field as usize], empty());
        }
        fields.extend(USUAL.iter().map(|usual| (usual.clone(), empty())));
        let field = |name: &HeaderName| Field::ALL.into_iter().find(|field| NAMES[*field as usize] == name);
        let order = fields.keys().map(field).collect();
        HeaderSlots { fields, order }
    }

    /// A copy, with the values that `fill` writes into it.
    #[inline]
    fn filled(&self, fill: impl Fn(Field, &mut HeaderValue)) -> RateLimitHeaders {
        let mut fields = self.fields.clone();
        for (field, value) in self.order.iter().zip(fields.values_mut()) {
            if let Some(field) = field {
                fill(*field, value);
            }
        }
        RateLimitHeaders { fields: Some(fields), is_empty: [true; USUAL.len()] }
    }
}

/// The fields of a limit that is charged alone and lets a charge through, written but for what changes from charge to charge.
pub(super) struct HeaderTemplate {
    slots: HeaderSlots,
    quota_start: String,
    limit: Limit,
    reset: ResetAs,
}

impl HeaderTemplate {
    /// From what the limit says before anything was charged; `None` if it tells nothing.
    pub(super) fn new(format: &Format, fresh: &ReportedLimit<'_>) -> Option<HeaderTemplate> {
        let mut slots = HeaderSlots::of(format)?.clone();
        let limit = *fresh.limit?;
        let policy = HeaderValue::try_from(policy_item(fresh)).ok()?;
        let known = [(Field::Limit, number_value(limit.capacity())), (Field::Policy, policy)];
        for (field, value) in known {
            if let Some(place) = slots.fields.get_mut(&NAMES[field as usize]) {
                *place = value;
            }
        }
        Some(HeaderTemplate { slots, quota_start: quota_start(fresh.name), limit, reset: format.reset })
    }

    /// Whether it tells the truth of such an answer.
    pub(super) fn fits(&self, outcome: &Outcome) -> bool {
        outcome.allowed && outcome.capacity == self.limit.capacity()
    }

    /// The fields for an answer that it fits.
    pub(super) fn filled(&self, outcome: &Outcome, cost: Cost, now: Micros) -> RateLimitHeaders {
        let standing = QuotaNumbers::new(&self.limit, outcome, cost, self.reset, now);
        self.slots.filled(|field, value| match field {
            Field::Remaining => *value = number_value(standing.remaining),
            Field::Reset => *value = number_value(standing.reset),
            Field::Quota => *value = self.quota(&standing),
            _ => {}
        })
    }

    fn quota(&self, standing: &QuotaNumbers) -> HeaderValue {
        let mut line = Line::default();
        standing.write_quota(line.text(&self.quota_start));
        value(&line)
    }
}

/// A text that was rendered, which is visible ASCII.
fn value(line: &Line) -> HeaderValue {
    HeaderValue::from_bytes(line.as_bytes()).unwrap_or(HeaderValue::from_static(""))
}

/// Texts of the numbers below 1,000, which nearly all are: a value of such a text needs no allocation. That takes 8 ns instead of
/// 29, twice for each response, of the some 450 that the layer adds.
static SMALL: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| (0..1_000).map(|number: u16| &*number.to_string().leak()).collect());

fn number_value(number: u64) -> HeaderValue {
    let small = usize::try_from(number).ok().and_then(|number| SMALL.get(number));
    small.map_or_else(|| HeaderValue::from(number), |text| HeaderValue::from_static(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Header fields from lines of text.
    fn fields(lines: &[&str]) -> HeaderMap {
        let mut fields = HeaderMap::new();
        for line in lines {
            let (name, value) = line.split_once(": ").expect("a name and a value");
            let name = HeaderName::try_from(name).expect("a name");
            fields.append(name, HeaderValue::try_from(value).expect("a value"));
        }
        fields
    }

    /// And back, in an order of their own: those of one name as they stand, names as the alphabet has them.
    fn lines(fields: &HeaderMap) -> Vec<String> {
        let line =
            |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let mut lines: Vec<String> = fields.iter().map(line).collect();
        lines.sort_by(|one, other| one.split(':').next().cmp(&other.split(':').next()));
        lines
    }

    /// A limit of ten in a minute that has let one charge through, and what is left.
    fn reported(limit: &Limit, remaining: u64) -> ReportedLimit<'_> {
        let outcome = Outcome {
            capacity: limit.capacity(),
            remaining,
            reset_after: Micros::from_millis(41_001),
            ..Outcome::UNLIMITED
        };
        ReportedLimit { name: "api", limit: Some(limit), cost: 1, outcome, shadow: false, unit: None }
    }

    /// What an answer has at last; the template must say the same as what is worked out afresh.
    fn check(format: Format, reported: &ReportedLimit<'_>, before: &[&str], after: &[&str]) {
        let now = Micros::from_secs(1_000);
        let template = HeaderTemplate::new(&format, reported).expect("something to tell");
        assert!(template.fits(&reported.outcome));
        for rate_limit_headers in [
            template.filled(&reported.outcome, Cost::ONE, now),
            RateLimitHeaders::new(&format, &[*reported], now),
        ] {
            let mut headers = fields(before);
            rate_limit_headers.write(&mut headers);
            assert_eq!(lines(&headers), after, "{format:?} {before:?}");
        }
    }

    #[test]
    fn an_answer_keeps_its_fields_and_has_ours() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let reported = reported(&window, 9);
        let policy = "ratelimit-policy: \"api\";q=10;w=60";
        let quota = "ratelimit: \"api\";r=9;t=42";
        let ours =
            [quota, policy, "x-ratelimit-limit: 10", "x-ratelimit-remaining: 9", "x-ratelimit-reset: 42"];
        let with = |theirs: &[&'static str]| {
            let mut all = lines(&fields(theirs));
            all.extend(ours.map(str::to_owned));
            all.sort_by(|one, other| one.split(':').next().cmp(&other.split(':').next()));
            all
        };
        for theirs in [
            &[][..],
            &["content-type: text/plain"],
            &["content-length: 5"],
            &["content-type: text/plain", "content-length: 5"],
            &["etag: 7", "content-type: a/b", "vary: *", "x-key: 1", "age: 2"],
            &["a: 1", "b: 2", "c: 3", "d: 4", "e: 5", "f: 6", "g: 7", "h: 8", "content-type: a/b"],
            // One name twice, in the order of the service.
            &["set-cookie: b", "set-cookie: a"],
            &["retry-after: 7"],
        ] {
            let all = with(theirs);
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            check(Format::default(), &reported, theirs, &all);
        }
    }

    #[test]
    fn what_a_layer_inside_tells_is_added_to_or_replaced_and_its_refusal_kept() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let reported = reported(&window, 9);
        let old = Format { draft: false, ..Format::default() };
        let draft = Format { legacy: false, ..Format::default() };
        let told = ["x-ratelimit-limit: 10", "x-ratelimit-remaining: 9", "x-ratelimit-reset: 42"];
        check(old, &reported, &["x-ratelimit-limit: 3"], &told);
        let refused = ["retry-after: 5", "x-ratelimit-limit: 3"];
        check(old, &reported, &refused, &refused);
        let inside = "ratelimit: \"in\";r=1";
        let quota = "ratelimit: \"api\";r=9;t=42";
        check(draft, &reported, &[inside], &[inside, quota, "ratelimit-policy: \"api\";q=10;w=60"]);
    }

    #[test]
    fn a_sheet_says_what_is_worked_out_afresh() {
        for limit in [
            Limit::fixed_window(2_000, Micros::from_secs(60)),
            Limit::sliding_window_counter(1_000, Micros::from_secs(60)),
            Limit::token_bucket("1/s", 100),
            Limit::token_bucket("7/m", 500_000_000),
        ] {
            let limit = limit.unwrap();
            for format in
                [(true, true), (true, false), (false, true)].into_iter().flat_map(|(legacy, draft)| {
                    [ResetAs::Seconds, ResetAs::UnixTime].map(|reset| Format { legacy, draft, reset })
                })
            {
                for remaining in [0, 1, 9, 10, 99, 100, 999, 1_000, limit.capacity() - 1, limit.capacity()] {
                    let reported = reported(&limit, remaining.min(limit.capacity()));
                    let mut fresh = HeaderMap::new();
                    RateLimitHeaders::new(&format, &[reported], Micros::from_secs(1_000)).write(&mut fresh);
                    let fresh = lines(&fresh);
                    let fresh: Vec<&str> = fresh.iter().map(String::as_str).collect();
                    check(format, &reported, &[], &fresh);
                }
            }
        }
    }

    #[test]
    fn a_sheet_is_not_for_other_answers() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let reported = reported(&window, 9);
        assert!(HeaderTemplate::new(&Format::none(), &reported).is_none());
        let template = HeaderTemplate::new(&Format::default(), &reported).unwrap();
        assert!(!template.fits(&Outcome { allowed: false, ..reported.outcome }));
        assert!(!template.fits(&Outcome { capacity: 11, ..reported.outcome }));
        assert!(!template.fits(&Outcome::UNLIMITED));
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
