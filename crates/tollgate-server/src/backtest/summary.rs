//! What the policy would have done, counted: in all, for each limit, for each key, over time.
//!
//! Each charge leaves a record of eight bytes for each of its limits (the key, the limit, whether that denied). Sorted once at the
//! end, the records show how many keys there were and which were denied most, without a table that grows with the keys. A request
//! that matches several routes is one request, of each of its keys; it is denied by those of its limits that had no room.

use std::cmp::Reverse;

use serde::Serialize;
use tollgate::store::Outcome;

use super::denied::{DeniedBy, DeniedKey, DeniedKeys, FirstDenials};
use super::intake::{Harvest, NO_KEY};
use super::peaks::{CounterBesideLog, Peaks};
use super::shown::ShownKeys;
use super::timeline::Timeline;
use super::traffic::{Keys, Request};
use crate::failure::Failure;

/// How many of the keys that were denied most are shown.
const MOST_DENIED: usize = 10;

/// The whole answer, also as `--json` gives it.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) denied_share: f64,
    /// Keys of which at least one request was denied.
    pub(super) denied_keys: u64,
    /// What shadow limits let through and would have denied; part of `allowed`.
    pub(super) would_deny: u64,
    /// What was let through and told to wait; part of `allowed`.
    pub(super) delayed: u64,
    /// Requests of access logs that met no rule, and so no limit; not among `requests`.
    pub(super) unmet: u64,
    pub(super) skipped_lines: u64,
    /// The first few of them, with their place and what is wrong.
    pub(super) first_skipped: Vec<String>,
    /// The first instant and the last; `null` when there were no requests.
    pub(super) from_us: Option<u64>,
    pub(super) to_us: Option<u64>,
    pub(super) limits: Vec<LimitTally>,
    pub(super) most_denied: Vec<DeniedKey>,
    pub(super) over_time: Option<Timeline>,
    /// What each limit would have had to be, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peaks: Option<Vec<Peaks>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) counters: Option<Vec<CounterBesideLog>>,
}

/// One limit of the policy.
#[derive(Debug, Serialize)]
pub(super) struct LimitTally {
    pub(super) limit: String,
    /// The limit in words.
    pub(super) rule: String,
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) denied_share: f64,
    pub(super) would_deny: u64,
    pub(super) delayed: u64,
    /// What this limit had room for and another denied. With `allowed` and `denied` it makes up `requests`.
    pub(super) denied_by_others: u64,
    /// What it allowed and denied itself, for pictures.
    #[serde(skip)]
    pub(super) over_time: Option<Timeline>,
}

/// What one limit of a charge said.
pub(super) struct Answer {
    pub(super) outcome: Outcome,
    pub(super) ending: Ending,
    /// Whether the limit is in shadow mode.
    pub(super) shadow: bool,
}

/// How a charge ended for one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Allowed,
    /// Allowed by a shadow limit that would have denied it.
    WouldDeny,
    /// Denied by this limit, and perhaps by others.
    Denied,
    /// Denied, though not by this limit.
    DeniedByOther,
}

/// Counts while the replay goes on.
pub(super) struct Tally {
    limits: Vec<LimitTally>,
    records: Vec<ChargeRecord>,
    firsts: FirstDenials,
    sums: Sums,
    span: Option<(u64, u64)>,
    over_time: Option<Timeline>,
}

/// Requests, however many limits each meets.
#[derive(Default)]
struct Sums {
    requests: u64,
    allowed: u64,
    denied: u64,
    would_deny: u64,
    delayed: u64,
}

/// One limit of a charge in eight bytes that sort by key, then by limit: 32 bits, 16 bits, and three that count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ChargeRecord(u64);

/// The limit denied.
const DENIED: u64 = 1;
/// The first record of its request with this key: it counts the request.
const FIRST: u64 = 1 << 1;
/// The first of its request with this key whose limit denied: it counts the denial.
const FIRST_DENIED: u64 = 1 << 2;

impl ChargeRecord {
    fn new(key: u32, limit: u16, counts: u64) -> ChargeRecord {
        ChargeRecord(u64::from(key) << 19 | u64::from(limit) << 3 | counts)
    }

    fn key(self) -> u32 {
        u32::try_from(self.0 >> 19).unwrap_or(u32::MAX)
    }

    fn limit(self) -> usize {
        usize::from(u16::try_from(self.0 >> 3 & 0xffff).unwrap_or(u16::MAX))
    }

    fn counts(self, what: u64) -> u64 {
        u64::from(self.0 & what != 0)
    }
}

impl Tally {
    /// For limits given as (name, words), and requests in the order of replay.
    pub(super) fn new(limits: impl IntoIterator<Item = (String, String)>, requests: &[Request]) -> Tally {
        let span = requests.first().zip(requests.last()).map(|(first, last)| (first.time_us, last.time_us));
        let over_time = span.map(|(first, last)| Timeline::over(first, last));
        let empty = |(limit, rule)| LimitTally {
            limit,
            rule,
            requests: 0,
            keys: 0,
            allowed: 0,
            denied: 0,
            denied_share: 0.0,
            would_deny: 0,
            delayed: 0,
            denied_by_others: 0,
            over_time: over_time.clone(),
        };
        Tally {
            limits: limits.into_iter().map(empty).collect(),
            records: Vec::with_capacity(requests.len()),
            firsts: FirstDenials::default(),
            sums: Sums::default(),
            span,
            over_time,
        }
    }

    /// Counts one request: what it owed under each of its limits, and what that limit said.
    pub(super) fn count(&mut self, request: &[Request], keys: &Keys, answers: &[Answer]) {
        let before = self.records.len();
        let (mut denied, mut would_deny, mut delayed) = (false, false, false);
        for (part, answer) in request.iter().zip(answers) {
            let is_denied = answer.ending == Ending::Denied;
            let is_through = matches!(answer.ending, Ending::Allowed | Ending::WouldDeny);
            let is_delayed = is_through && !answer.shadow && answer.outcome.delay.get() > 0;
            denied |= !is_through;
            would_deny |= answer.ending == Ending::WouldDeny;
            delayed |= is_delayed;
            let tally = &mut self.limits[usize::from(part.limit)];
            tally.requests += 1;
            tally.allowed += u64::from(is_through);
            tally.denied += u64::from(is_denied);
            tally.would_deny += u64::from(answer.ending == Ending::WouldDeny);
            tally.delayed += u64::from(is_delayed);
            tally.denied_by_others += u64::from(answer.ending == Ending::DeniedByOther);
            if let Some(line) = &mut tally.over_time {
                let bucket = line.at(part.time_us);
                bucket.allowed += u64::from(is_through);
                bucket.denied += u64::from(is_denied);
                bucket.would_deny += u64::from(answer.ending == Ending::WouldDeny);
            }
            let key = keys.normal(part.key).index();
            let mut counts = if is_denied { DENIED | FIRST_DENIED } else { 0 } | FIRST;
            for record in self.records[before..].iter().filter(|record| record.key() == key) {
                counts &= !FIRST;
                if record.counts(FIRST_DENIED) > 0 {
                    counts &= !FIRST_DENIED;
                }
            }
            if is_denied {
                self.firsts.note(key, part);
            }
            self.records.push(ChargeRecord::new(key, part.limit, counts));
        }
        self.sums.requests += 1;
        self.sums.allowed += u64::from(!denied);
        self.sums.denied += u64::from(denied);
        self.sums.would_deny += u64::from(would_deny);
        self.sums.delayed += u64::from(delayed);
        if let (Some(line), [part, ..]) = (&mut self.over_time, request) {
            let bucket = line.at(part.time_us);
            bucket.allowed += u64::from(!denied);
            bucket.denied += u64::from(denied);
            bucket.would_deny += u64::from(would_deny);
        }
    }

    /// The answer, once the last request is counted. Every key that was denied goes to `all_denied`, if that wants them.
    pub(super) fn finish(
        mut self,
        harvest: &Harvest,
        files: &[String],
        shown: &ShownKeys,
        all_denied: &mut DeniedKeys,
    ) -> Result<Summary, Failure> {
        let keys = &harvest.traffic.keys;
        self.records.sort_unstable();
        let (mut distinct, mut distinct_denied) = (0, 0);
        // (times denied, records of the key), cut back to the foremost now and then, so that it stays short.
        let mut denied_keys: Vec<(u64, &[ChargeRecord])> = Vec::new();
        let name = |records: &[ChargeRecord]| keys.text_at(records[0].key());
        let cut = |denied_keys: &mut Vec<(u64, &[ChargeRecord])>| {
            denied_keys.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| name(a.1).cmp(name(b.1))));
            denied_keys.truncate(MOST_DENIED);
        };
        for of_key in self.records.chunk_by(|one, next| one.key() == next.key()) {
            // A request without a key has none that could be counted.
            let counts = u64::from(name(of_key) != NO_KEY);
            distinct += counts;
            for of_limit in of_key.chunk_by(|one, next| one.limit() == next.limit()) {
                self.limits[of_limit[0].limit()].keys += counts;
            }
            let denied = counted(of_key, FIRST_DENIED);
            if denied > 0 {
                distinct_denied += counts;
                denied_keys.push((denied, of_key));
                if all_denied.are_wanted() {
                    all_denied.take(&denied_key(of_key, &self.limits, &self.firsts, keys, files, shown))?;
                }
            }
            if denied_keys.len() > 100 * MOST_DENIED {
                cut(&mut denied_keys);
            }
        }
        cut(&mut denied_keys);
        let most_denied = denied_keys
            .into_iter()
            .map(|(_, records)| denied_key(records, &self.limits, &self.firsts, keys, files, shown))
            .collect();
        for tally in &mut self.limits {
            tally.denied_share = fraction(tally.denied, tally.requests);
        }
        let Sums { requests, allowed, denied, would_deny, delayed } = self.sums;
        Ok(Summary {
            requests,
            keys: distinct,
            allowed,
            denied,
            denied_share: fraction(denied, requests),
            denied_keys: distinct_denied,
            would_deny,
            delayed,
            unmet: harvest.unmet,
            skipped_lines: harvest.skipped,
            first_skipped: harvest.first_skipped.clone(),
            from_us: self.span.map(|(first, _)| first),
            to_us: self.span.map(|(_, last)| last),
            most_denied,
            over_time: self.over_time,
            limits: self.limits,
            peaks: None,
            counters: None,
        })
    }
}

/// A key that was denied, by its records.
fn denied_key(
    records: &[ChargeRecord],
    limits: &[LimitTally],
    firsts: &FirstDenials,
    keys: &Keys,
    files: &[String],
    shown: &ShownKeys,
) -> DeniedKey {
    let key = records[0].key();
    let first = firsts.of(key);
    let text = keys.text_at(key);
    DeniedKey {
        key: if text == NO_KEY { "(no key)".to_owned() } else { shown.show(text, text).into_owned() },
        requests: counted(records, FIRST),
        denied: counted(records, FIRST_DENIED),
        first_denied_us: first.time_us,
        first_denied_line: first.line,
        first_denied_file: (files.len() > 1).then(|| files[usize::from(first.file)].clone()),
        by: denied_by(records, limits),
    }
}

fn counted(records: &[ChargeRecord], what: u64) -> u64 {
    records.iter().map(|record| record.counts(what)).sum()
}

/// Which limits denied a key, the one that did so most first.
fn denied_by(records: &[ChargeRecord], limits: &[LimitTally]) -> Vec<DeniedBy> {
    let mut by: Vec<DeniedBy> = records
        .chunk_by(|one, next| one.limit() == next.limit())
        .map(|records| DeniedBy {
            limit: limits[records[0].limit()].limit.clone(),
            denied: counted(records, DENIED),
        })
        .filter(|by| by.denied > 0)
        .collect();
    by.sort_by_key(|by| Reverse(by.denied));
    by
}

/// A share for programs; decisions never see it.
fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Traffic;
    use super::*;

    #[test]
    fn records_keep_what_they_are_given() {
        for (key, limit, counts) in [(0, 0, 0), (u32::MAX, u16::MAX, DENIED), (7, 3, FIRST | FIRST_DENIED)] {
            let record = ChargeRecord::new(key, limit, counts);
            assert_eq!((record.key(), record.limit()), (key, usize::from(limit)));
            for what in [DENIED, FIRST, FIRST_DENIED] {
                assert_eq!(record.counts(what), u64::from(counts & what != 0));
            }
        }
    }

    /// The summary of requests given as a list of (key, limit, ending) each.
    fn tallied(traffic: &[&[(usize, u16, Ending)]]) -> Summary {
        let mut keys = Keys::default();
        let ids = [("b", "default:b"), ("default:b", "default:b"), ("a:1", "a:1"), ("c:1", "c:1")]
            .map(|(text, normal)| keys.enter(text, normal).unwrap());
        let parts: Vec<Vec<Request>> = (0u64..)
            .zip(traffic)
            .map(|(n, parts)| {
                let part = |&(key, limit, _): &(usize, u16, Ending)| Request {
                    time_us: n,
                    cost: 1,
                    line: n,
                    key: ids[key],
                    limit,
                    file: 0,
                };
                parts.iter().map(part).collect()
            })
            .collect();
        let limits = ["api", "login"].map(|name| (name.to_string(), String::new()));
        let mut tally = Tally::new(limits, &parts.concat());
        for (request, ends) in parts.iter().zip(traffic) {
            let answer = |&(_, _, ending): &(usize, u16, Ending)| Answer {
                outcome: Outcome::UNLIMITED,
                ending,
                shadow: ending == Ending::WouldDeny,
            };
            tally.count(request, &keys, &ends.iter().map(answer).collect::<Vec<_>>());
        }
        let traffic = Traffic { requests: parts.concat(), keys, ..Traffic::default() };
        let harvest = Harvest { traffic, skipped: 0, first_skipped: Vec::new(), unmet: 0 };
        let mut all = DeniedKeys { output: None, kept: Some(Vec::new()) };
        let summary = tally.finish(&harvest, &[], &ShownKeys::AsWritten, &mut all).unwrap();
        assert_eq!(all.finish().unwrap().len() as u64, summary.denied_keys);
        summary
    }

    fn denied_key(key: &str, requests: u64, denied: u64, first: u64, by: &[(&str, u64)]) -> DeniedKey {
        let by = by.iter().map(|&(limit, denied)| DeniedBy { limit: limit.to_string(), denied }).collect();
        let (first_denied_us, first_denied_line, first_denied_file) = (first, first, None);
        DeniedKey {
            key: key.to_string(),
            requests,
            denied,
            first_denied_us,
            first_denied_line,
            first_denied_file,
            by,
        }
    }

    #[test]
    fn keys_are_counted_once_and_the_most_denied_come_first() {
        let summary = tallied(&[
            &[(0, 0, Ending::Denied)],
            &[(1, 1, Ending::Denied)],
            &[(1, 1, Ending::Denied)],
            &[(2, 0, Ending::Denied)],
            &[(2, 0, Ending::Allowed)],
            &[(3, 1, Ending::WouldDeny)],
        ]);
        assert_eq!((summary.requests, summary.keys, summary.allowed, summary.denied), (6, 3, 2, 4));
        assert_eq!((summary.would_deny, summary.denied_keys), (1, 2));
        assert_eq!(summary.limits.iter().map(|limit| limit.keys).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(
            summary.most_denied,
            [
                denied_key("default:b", 3, 3, 0, &[("login", 2), ("api", 1)]),
                denied_key("a:1", 2, 1, 3, &[("api", 1)])
            ]
        );
        let line = summary.over_time.unwrap();
        assert_eq!(line.buckets.iter().map(|b| (b.allowed, b.denied)).collect::<Vec<_>>(), [(2, 4)]);
    }

    #[test]
    fn a_request_of_several_limits_is_one_request() {
        let summary = tallied(&[
            // One key under both limits, denied by both, then by one.
            &[(0, 0, Ending::Denied), (0, 1, Ending::Denied)],
            &[(0, 0, Ending::DeniedByOther), (0, 1, Ending::Denied)],
            // Two keys; only the one whose limit denies is denied.
            &[(2, 0, Ending::Denied), (3, 1, Ending::DeniedByOther)],
            &[(2, 0, Ending::Allowed), (3, 1, Ending::WouldDeny)],
        ]);
        assert_eq!((summary.requests, summary.keys, summary.allowed, summary.denied), (4, 3, 1, 3));
        assert_eq!((summary.would_deny, summary.denied_keys), (1, 2));
        let limits: Vec<_> = summary
            .limits
            .iter()
            .map(|limit| (limit.requests, limit.allowed, limit.denied, limit.denied_by_others))
            .collect();
        assert_eq!(limits, [(4, 1, 2, 1), (4, 1, 2, 1)]);
        assert_eq!(
            summary.most_denied,
            [
                denied_key("default:b", 2, 2, 0, &[("login", 2), ("api", 1)]),
                denied_key("a:1", 2, 1, 2, &[("api", 1)])
            ]
        );
    }
}
