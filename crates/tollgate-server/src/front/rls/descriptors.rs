//! The charges of a call: the limit, the key and the cost of each descriptor.

use smallvec::SmallVec;
use tollgate::store::Micros;
use tollgate::{Allowance, Charge, Key, Limit, NamedLimit, Tollgate};
use tonic::Status;

use super::proto::RateLimitUnit;
use super::proto::common::RateLimitDescriptor;
use super::proto::common::rate_limit_descriptor::RateLimitOverride;
use super::proto::service::RateLimitRequest;
use super::undecided;
use crate::app::Bounds;
use crate::config::EnvoyRules;

/// How many descriptors a call and entries a descriptor may have.
const MOST_DESCRIPTORS: usize = 64;
const MOST_ENTRIES: usize = 16;

/// The rule that a descriptor matches.
#[derive(Debug)]
pub(super) enum Matched {
    /// No rule: it passes.
    Nothing,
    /// A rule that lets everything pass.
    Unlimited,
    Limit(DescriptorCharge),
}

/// The charge of a descriptor.
#[derive(Debug)]
pub(super) struct DescriptorCharge {
    /// Looked up once, for the charge and for the reply.
    pub(super) limit: NamedLimit,
    /// Whether the limit came with the call.
    pub(super) is_own: bool,
    pub(super) key: Key<'static>,
    pub(super) hits: Hits,
    /// Whether the caller gets the headers of this limit.
    pub(super) is_reported: bool,
}

/// What is done with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    Charge(u64),
    /// Only asks whether one more would fit.
    Look,
    GiveBack(u64),
}

impl Matched {
    pub(super) fn charge(&self) -> Option<&DescriptorCharge> {
        match self {
            Matched::Limit(charge) => Some(charge),
            Matched::Nothing | Matched::Unlimited => None,
        }
    }
}

impl DescriptorCharge {
    pub(super) fn with_cost(&self, cost: u64) -> Charge<'_> {
        Charge::new(&self.limit, &self.key).cost(cost)
    }
}

/// Reads a call, descriptor by descriptor, or says what is wrong with it.
pub(super) fn read(
    gate: &Tollgate,
    bounds: Bounds,
    rules: &EnvoyRules,
    request: &RateLimitRequest,
) -> Result<Vec<Matched>, Status> {
    let domain = match std::str::from_utf8(&request.domain) {
        Ok("") => return Err(Status::invalid_argument("the domain is empty; name it in Envoy's filter")),
        Ok(domain) => domain,
        Err(_) => return Err(Status::invalid_argument("the domain is not text (UTF-8)")),
    };
    match request.descriptors.len() {
        0 => return Err(Status::invalid_argument("there are no descriptors; a call has at least one")),
        1..=MOST_DESCRIPTORS => {}
        count => {
            let message = format!("there are {count} descriptors; a call has at most {MOST_DESCRIPTORS}");
            return Err(Status::invalid_argument(message));
        }
    }
    let mut call = Call { gate, bounds, domain, request, last: None, text: String::new() };
    // With room for all of them from the start: a collected `Result` grows from nothing.
    let mut all = Vec::with_capacity(request.descriptors.len());
    for descriptor in &request.descriptors {
        all.push(matched(&mut call, rules, descriptor)?);
    }
    Ok(all)
}

/// A call, and what it is read by.
struct Call<'r> {
    gate: &'r Tollgate,
    bounds: Bounds,
    domain: &'r str,
    request: &'r RateLimitRequest,
    /// The limit of the descriptor before: those of one call often have the same.
    last: Option<NamedLimit>,
    /// Memory for the text of a key.
    text: String,
}

impl Call<'_> {
    /// The limit of this name.
    fn limit(&mut self, name: &str) -> Result<NamedLimit, Status> {
        match &self.last {
            Some(last) if last.name() == name => Ok(last.clone()),
            _ => {
                let found = self.gate.limit(name).map_err(undecided)?;
                self.last = Some(found.clone());
                Ok(found)
            }
        }
    }
}

fn matched(
    call: &mut Call<'_>,
    rules: &EnvoyRules,
    descriptor: &RateLimitDescriptor,
) -> Result<Matched, Status> {
    let count = descriptor.entries.len();
    if count > MOST_ENTRIES {
        let message = format!("a descriptor has {count} entries; at most {MOST_ENTRIES}");
        return Err(Status::invalid_argument(message));
    }
    let entries: SmallVec<[(&[u8], &[u8]); 8]> =
        descriptor.entries.iter().map(|entry| (entry.key.as_slice(), entry.value.as_slice())).collect();
    let rule = rules.find(call.domain, &entries);
    let own =
        descriptor.limit.as_ref().filter(|_| count > 0).map(|limit| brought(call, limit)).transpose()?;
    let is_own = own.is_some();
    let (limit, shared, is_reported) = match (own, rule) {
        (Some(own), rule) => (own, &[][..], rule.is_none_or(|rule| rule.headers)),
        (None, None) => {
            metrics::counter!("tollgate_envoy_descriptors_unmatched_total").increment(1);
            return Ok(Matched::Nothing);
        }
        (None, Some(rule)) => match &rule.limit {
            Some(limit) => (call.limit(limit)?, &rule.entries[..], rule.headers),
            None => return Ok(Matched::Unlimited),
        },
    };
    // The key is not repeated: others may read this message.
    let key = super::key::key(&mut call.text, call.domain, &entries, shared);
    let key =
        key.map_err(|_| Status::invalid_argument("the domain has control characters, or is too long"))?;
    Ok(Matched::Limit(DescriptorCharge {
        limit,
        is_own,
        key,
        hits: hits(call.request, descriptor),
        is_reported,
    }))
}

fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Hits {
    let hits = descriptor.hits_addend.unwrap_or(u64::from(request.hits_addend.max(1)));
    match (hits, descriptor.is_negative_hits) {
        (0, _) => Hits::Look,
        (hits, false) => Hits::Charge(hits),
        (hits, true) => Hits::GiveBack(hits),
    }
}

/// The limit that came with a descriptor: so many in each second, minute, … of the clock.
fn brought(call: &Call<'_>, limit: &RateLimitOverride) -> Result<NamedLimit, Status> {
    let Some((name, window)) = unit(limit.unit()) else {
        return Err(Status::invalid_argument("the limit of a descriptor has no unit that is known here"));
    };
    let allowance = match u64::from(limit.requests_per_unit) {
        0 => Allowance::Blocked,
        count => match Limit::clock_window(count, window) {
            Ok(limit) => {
                let checked = call.bounds.check_override(&limit);
                checked
                    .map_err(|why| Status::invalid_argument(format!("the limit of a descriptor: {why}")))?;
                limit.into()
            }
            Err(error) => {
                return Err(Status::invalid_argument(format!("the limit of a descriptor: {error}")));
            }
        },
    };
    call.gate.ad_hoc(name, allowance).map_err(undecided)
}

const DAY: u64 = 24 * 3_600;

/// The units, how long they are, and what limits by them are called that come with a call: counted by each unit for itself, as
/// in envoyproxy/ratelimit, whose months and years these are.
pub(super) const UNITS: [(RateLimitUnit, Micros, &str); 7] = [
    (RateLimitUnit::Second, Micros::from_secs(1), "envoy.per_second"),
    (RateLimitUnit::Minute, Micros::from_secs(60), "envoy.per_minute"),
    (RateLimitUnit::Hour, Micros::from_secs(3_600), "envoy.per_hour"),
    (RateLimitUnit::Day, Micros::from_secs(DAY), "envoy.per_day"),
    (RateLimitUnit::Week, Micros::from_secs(7 * DAY), "envoy.per_week"),
    (RateLimitUnit::Month, Micros::from_secs(30 * DAY), "envoy.per_month"),
    (RateLimitUnit::Year, Micros::from_secs(365 * DAY), "envoy.per_year"),
];

fn unit(unit: RateLimitUnit) -> Option<(&'static str, Micros)> {
    UNITS.iter().find(|(other, ..)| *other == unit).map(|(_, window, name)| (*name, *window))
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use tonic::Code;

    use super::super::proto::common::rate_limit_descriptor::Entry;
    use super::*;

    const RULES: &str = "[limits]\napi = { unlimited = true }\n\
        [[envoy]]\ndomain = 'edge'\nentries = ['path', 'ip']\nlimit = 'api'\nheaders = false\n\
        [[envoy]]\ndomain = 'edge'\nentries = ['path=/health']\nunlimited = true\n";

    fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
        let entry = |(key, value): &(&str, &str)| Entry { key: (*key).into(), value: (*value).into() };
        RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..Default::default() }
    }

    fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
        RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 0 }
    }

    /// What one descriptor matches, in words, or the error.
    fn check(request: &RateLimitRequest, expected: Result<&str, &str>) {
        let config = Config::parse(RULES).expect("sound");
        let gate = Tollgate::builder().config(&config.gate).build().expect("sound");
        let read = read(&gate, Bounds::of(&config.server), &config.envoy, request);
        let messages = read.map(|matched| match &matched[0] {
            Matched::Limit(DescriptorCharge { limit, is_own, key, hits, is_reported }) => {
                let own = is_own.then(|| format!(" {}", limit.allowance())).unwrap_or_default();
                format!("{}{own} {} {hits:?} {is_reported}", limit.name(), key.canonical())
            }
            other => format!("{other:?}"),
        });
        match (messages, expected) {
            (Ok(messages), Ok(expected)) => assert_eq!(messages, expected, "{request:?}"),
            (Err(status), Err(expected)) => {
                assert!(status.message().contains(expected), "{request:?}: {status}");
                assert_eq!(status.code(), Code::InvalidArgument);
            }
            (messages, expected) => panic!("{request:?}: {messages:?} {expected:?}"),
        }
    }

    #[test]
    fn descriptors_meet_rules() {
        let known = descriptor(&[("path", "/"), ("ip", "::1")]);
        let one = |descriptor: RateLimitDescriptor| request(vec![descriptor]);
        check(&one(known.clone()), Ok("api edge:path=/&ip=%3A%3A1 Charge(1) false"));
        check(&one(descriptor(&[("path", "/health")])), Ok("Unlimited"));
        check(&one(descriptor(&[("path", "/")])), Ok("Nothing"));
        check(&one(descriptor(&[])), Ok("Nothing"));
        let other_domain = RateLimitRequest { domain: "other".into(), ..one(known.clone()) };
        check(&other_domain, Ok("Nothing"));
        for (of_all, of_one, negative, hits) in [
            (0, None, false, "Charge(1)"),
            (7, None, false, "Charge(7)"),
            (7, Some(3), false, "Charge(3)"),
            (7, Some(0), false, "Look"),
            (7, Some(0), true, "Look"),
            (0, None, true, "GiveBack(1)"),
            (7, None, true, "GiveBack(7)"),
            (7, Some(u64::MAX), true, "GiveBack(18446744073709551615)"),
        ] {
            let mut call = one(known.clone());
            call.hits_addend = of_all;
            call.descriptors[0].hits_addend = of_one;
            call.descriptors[0].is_negative_hits = negative;
            check(&call, Ok(&format!("api edge:path=/&ip=%3A%3A1 {hits} false")));
        }
    }

    #[test]
    fn a_limit_may_come_with_a_descriptor() {
        for (count, unit, expected) in [
            (5, RateLimitUnit::Minute, Ok(("per_minute", "5 per 1m window of the clock"))),
            (5, RateLimitUnit::Week, Ok(("per_week", "5 per 7d window of the clock"))),
            (u32::MAX, RateLimitUnit::Year, Ok(("per_year", "4294967295 per 365d window of the clock"))),
            (0, RateLimitUnit::Day, Ok(("per_day", "blocked"))),
            (5, RateLimitUnit::Unknown, Err("has no unit")),
        ] {
            let mut call = request(vec![descriptor(&[("a", "b")])]);
            let unit = i32::from(unit);
            call.descriptors[0].limit = Some(RateLimitOverride { requests_per_unit: count, unit });
            let messages =
                expected.map(|(name, words)| format!("envoy.{name} {words} edge:a=b Charge(1) true"));
            check(&call, messages.as_deref().map_err(|why| *why));
        }
        let mut strange = request(vec![descriptor(&[("a", "b")])]);
        strange.descriptors[0].limit = Some(RateLimitOverride { requests_per_unit: 1, unit: 99 });
        check(&strange, Err("has no unit"));
        strange.descriptors[0].limit = Some(RateLimitOverride { requests_per_unit: 1, unit: 1 });
        strange.domain = "a\nb".into();
        check(&strange, Err("the domain has control characters"));
        strange.domain = b"a\xff".to_vec();
        check(&strange, Err("the domain is not text"));
    }

    /// Envoy lets a call pass that is refused as invalid, so a month or a year is refused only where the operator says so.
    #[test]
    fn a_limit_that_comes_with_a_descriptor_is_bounded_only_if_that_was_set() {
        let gate = Tollgate::builder().build().expect("sound");
        let by_default = Bounds::of(&crate::config::ServerConfig::default());
        let week = Config::parse("server.max_period = '7d'").expect("sound").server;
        let week = Bounds::of(&week);
        for (bounds, unit, lasts) in [
            (by_default, RateLimitUnit::Month, None),
            (by_default, RateLimitUnit::Year, None),
            (week, RateLimitUnit::Second, None),
            (week, RateLimitUnit::Week, None),
            (week, RateLimitUnit::Month, Some("30d")),
            (week, RateLimitUnit::Year, Some("365d")),
        ] {
            let mut call = request(vec![descriptor(&[("a", "b")])]);
            call.descriptors[0].limit =
                Some(RateLimitOverride { requests_per_unit: 1, unit: i32::from(unit) });
            let messages = read(&gate, bounds, &EnvoyRules::default(), &call).err().map(|status| {
                assert_eq!(status.code(), Code::InvalidArgument);
                status.message().to_owned()
            });
            let expected = lasts.map(|lasts| {
                format!(
                    "the limit of a descriptor: its keys would be kept for {lasts}, and a limit that comes with a call may \
                     last 7d (server.max_period)"
                )
            });
            assert_eq!(messages, expected, "{unit:?}");
        }
    }

    #[test]
    fn there_is_an_end_to_what_is_read() {
        let one = descriptor(&[("a", "b")]);
        check(&request(vec![]), Err("there are no descriptors"));
        check(&request(vec![one.clone(); 64]), Ok("Nothing"));
        check(&request(vec![one.clone(); 65]), Err("there are 65 descriptors"));
        check(&request(vec![descriptor(&[("a", "b"); 16])]), Ok("Nothing"));
        check(&request(vec![descriptor(&[("a", "b"); 17])]), Err("has 17 entries"));
        check(&RateLimitRequest { domain: Vec::new(), ..request(vec![one]) }, Err("the domain is empty"));
    }
}
