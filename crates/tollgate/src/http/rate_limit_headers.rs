//! The rate-limit headers of a response: the values are computed with the decision and written when the response is there.
//!
//! A request on the fast path uses a template of its limits (`header_template.rs`); all others have their headers written each
//! time.

use std::mem;

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tollgate_kernel::Micros;

use super::header_template::{FilledTemplate, FormatSlots, NAMES, USUAL, number_value, value};
use crate::headers::{Field, Format, HeaderFields, Line, ReportedLimit};

/// The rate-limit headers of one response.
#[derive(Default)]
pub(super) enum RateLimitHeaders {
    /// Nothing is reported.
    #[default]
    None,
    Template(FilledTemplate),
    /// Boxed, because requests with a template are moved with this type.
    Afresh(Box<FieldValues>),
}

/// The value of each field that is there, by its place in [`Field::ALL`].
pub(super) struct FieldValues {
    values: [Option<HeaderValue>; Field::ALL.len()],
    /// Of the format; `None` for a refusal, which has another field.
    slots: Option<&'static FormatSlots>,
}

impl RateLimitHeaders {
    /// From what each limit reported.
    pub(super) fn new(format: &Format, reported: &[ReportedLimit<'_>], now: Micros) -> RateLimitHeaders {
        let Some(fields) = HeaderFields::new(format, reported.iter().copied(), now) else {
            return RateLimitHeaders::None;
        };
        let mut values = [const { None }; Field::ALL.len()];
        for (field, number) in fields.numbers() {
            values[field as usize] = Some(number_value(number));
        }
        if format.draft {
            let (mut policy, mut quota) = (Line::default(), Line::default());
            fields.write_policy(&mut policy);
            fields.write_quota(&mut quota);
            values[Field::Policy as usize] = Some(value(&policy));
            values[Field::Quota as usize] = Some(value(&quota));
        }
        let slots = fields.retry_after().is_none().then(|| FormatSlots::of(format)).flatten();
        RateLimitHeaders::Afresh(Box::new(FieldValues { values, slots }))
    }

    /// Writes the headers on a response. The lists of the draft are appended to those that are there. The other fields have room
    /// for one limit: the outermost layer's, unless an inner layer refused.
    #[inline]
    pub(super) fn write(self, headers: &mut HeaderMap) {
        match self {
            RateLimitHeaders::None => {}
            RateLimitHeaders::Template(mut filled) => {
                write(headers, Some(filled.slots()), |field| filled.changed(field));
            }
            RateLimitHeaders::Afresh(mut all) => {
                write(headers, all.slots, |field| all.values[field as usize].take());
            }
        }
    }
}

fn write(
    headers: &mut HeaderMap,
    slots: Option<&'static FormatSlots>,
    value: impl FnMut(Field) -> Option<HeaderValue>,
) {
    // Nearly every response has few fields, each once, and none of ours. Then adding them to our map is faster than the reverse.
    let is_ours = |name: &HeaderName| !USUAL.contains(name) && NAMES.contains(name);
    match slots {
        Some(slots) if headers.is_empty() => *headers = slots.alone.filled(value),
        Some(slots)
            if headers.len() <= slots.with_usual.len()
                && headers.len() == headers.keys_len()
                && !headers.keys().any(is_ours) =>
        {
            let theirs = mem::replace(headers, slots.with_usual.filled(value));
            let mut is_empty = [true; USUAL.len()];
            for (name, value) in theirs {
                let Some(name) = name else { continue };
                if let Some(usual) = USUAL.iter().position(|usual| name == usual) {
                    is_empty[usual] = false;
                }
                headers.insert(name, value);
            }
            for (usual, _) in USUAL.iter().zip(is_empty).filter(|(_, is_empty)| *is_empty) {
                headers.remove(usual);
            }
        }
        // A template has a value for every field.
        Some(slots) => add(headers, slots.with_usual.filled(value)),
        None => {
            let mut value = value;
            let ours = Field::ALL.into_iter().filter_map(|field| {
                let value = value(field)?;
                Some((NAMES[field as usize].clone(), value))
            });
            let ours = ours.collect();
            add(headers, ours);
        }
    }
}

/// Adds our fields to those of a response, which may have some with the same names.
fn add(headers: &mut HeaderMap, ours: HeaderMap) {
    headers.reserve(ours.len());
    // If an inner layer refused, its numbers apply, and ours would contradict them.
    let is_refused_inside =
        headers.contains_key(&RETRY_AFTER) && headers.contains_key(&NAMES[Field::Limit as usize]);
    for (name, value) in ours {
        let Some(name) = name else { continue };
        if name == NAMES[Field::Policy as usize] || name == NAMES[Field::Quota as usize] {
            headers.append(name, value);
        } else if !is_refused_inside && !USUAL.contains(&name) {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Cost, Limit, Outcome};

    use super::super::header_template::{HeaderTemplate, TemplateSets};
    use super::*;
    use crate::headers::ResetAs;

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

    /// And back, sorted by name; fields of one name keep their order.
    fn lines(fields: &HeaderMap) -> Vec<String> {
        let line =
            |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let mut lines: Vec<String> = fields.iter().map(line).collect();
        lines.sort_by(|one, other| one.split(':').next().cmp(&other.split(':').next()));
        lines
    }

    /// A limit of ten in a minute that has admitted one charge, and what is left.
    fn reported(limit: &Limit, remaining: u64) -> ReportedLimit<'_> {
        let outcome = Outcome {
            capacity: limit.capacity(),
            remaining,
            reset_after: Micros::from_millis(41_001),
            ..Outcome::UNLIMITED
        };
        ReportedLimit { name: "api", limit: Some(limit), cost: 1, outcome, shadow: false, unit: None }
    }

    /// The final fields of a response; the template must give the same as fields written each time.
    fn check(format: Format, reported: &ReportedLimit<'_>, before: &[&str], after: &[&str]) {
        let now = Micros::from_secs(1_000);
        let template = HeaderTemplate::new(&format, reported).expect("something to tell");
        assert!(template.fits(&reported.outcome));
        for rate_limit_headers in [
            RateLimitHeaders::Template(template.filled(&reported.outcome, Cost::ONE, now)),
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
        let ours = ["x-ratelimit-limit: 10", "x-ratelimit-remaining: 9", "x-ratelimit-reset: 42"];
        check(old, &reported, &["x-ratelimit-limit: 3"], &ours);
        let refused = ["retry-after: 5", "x-ratelimit-limit: 3"];
        check(old, &reported, &refused, &refused);
        let inside = "ratelimit: \"in\";r=1";
        let quota = "ratelimit: \"api\";r=9;t=42";
        check(draft, &reported, &[inside], &[inside, quota, "ratelimit-policy: \"api\";q=10;w=60"]);
    }

    #[test]
    fn a_template_says_what_is_worked_out_afresh() {
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
    fn a_template_is_not_for_other_answers() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let reported = reported(&window, 9);
        assert!(HeaderTemplate::new(&Format::none(), &reported).is_none());
        let template = HeaderTemplate::new(&Format::default(), &reported).unwrap();
        assert!(!template.fits(&Outcome { allowed: false, ..reported.outcome }));
        assert!(!template.fits(&Outcome { capacity: 11, ..reported.outcome }));
        assert!(!template.fits(&Outcome::UNLIMITED));
    }

    /// What several limits report is the same by their template and written afresh, whichever binds.
    #[test]
    fn several_limits_say_by_template_what_is_worked_out_afresh() {
        let limits = [
            Limit::fixed_window(10, Micros::from_secs(60)).unwrap(),
            Limit::token_bucket("7/m", 5_000).unwrap(),
            Limit::sliding_window_counter(10, Micros::from_secs(1)).unwrap(),
        ];
        let sets = TemplateSets::default();
        for (legacy, draft) in [(true, true), (true, false), (false, true)] {
            for reset in [ResetAs::Seconds, ResetAs::UnixTime] {
                let format = Format { legacy, draft, reset };
                for remaining in [[9, 4_999, 9], [0, 4_999, 9], [9, 0, 9], [9, 4_999, 0], [5, 2_500, 5]] {
                    let now = Micros::from_secs(1_000);
                    let named = ["global", "route", "user"].into_iter().zip(&limits).zip(remaining);
                    let all: Vec<ReportedLimit<'_>> = named
                        .map(|((name, limit), remaining)| ReportedLimit {
                            name,
                            ..reported(limit, remaining)
                        })
                        .collect();
                    let templates: Vec<&HeaderTemplate> =
                        all.iter().map(|one| HeaderTemplate::new(&format, one).unwrap()).collect();
                    let template = sets.of(&templates).unwrap();
                    let outcomes: Vec<crate::Outcome> = all
                        .iter()
                        .map(|one| crate::Outcome::new("", one.outcome, crate::outcome::Source::Store))
                        .collect();
                    let bound = crate::decision::binding(&outcomes);
                    let charged = all.iter().map(|one| (&one.outcome, Cost::ONE));
                    let filled = template.filled_all(charged.clone(), bound, now).unwrap();
                    for before in [&[][..], &["content-type: a/b"], &["ratelimit: \"in\";r=1"]] {
                        let (mut by_template, mut afresh) = (fields(before), fields(before));
                        let filled = template.filled_all(charged.clone(), bound, now).unwrap();
                        RateLimitHeaders::Template(filled).write(&mut by_template);
                        RateLimitHeaders::new(&format, &all, now).write(&mut afresh);
                        assert_eq!(
                            lines(&by_template),
                            lines(&afresh),
                            "{format:?} {remaining:?} {before:?}"
                        );
                    }
                    drop(filled);
                    let denied = Outcome { allowed: false, ..all[1].outcome };
                    let charged =
                        [&all[0].outcome, &denied, &all[2].outcome].map(|outcome| (outcome, Cost::ONE));
                    assert!(template.filled_all(charged.into_iter(), 1, now).is_none());
                }
            }
        }
    }
}
