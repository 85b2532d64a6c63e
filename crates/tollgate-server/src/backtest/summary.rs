//! What the policy would have done, counted: in all, for each limit, for each key, over time.
//!
//! Each charge leaves a mark of eight bytes (its key, its limit, whether it was denied). Sorted once at the end, the marks
//! tell how many keys there were and who was denied most, without a table that grows with the keys.

use std::cmp::Reverse;

use serde::Serialize;

use super::timeline::Timeline;
use super::traffic::{Keys, Request};

/// How many of the keys that were denied most are told.
const MOST_DENIED: usize = 10;

/// The whole answer, also as `--json` gives it.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) denied_share: f64,
    /// What shadow limits let through and would have denied; part of `allowed`.
    pub(super) would_deny: u64,
    pub(super) skipped_lines: u64,
    #[serde(skip)]
    pub(super) first_skipped: Option<String>,
    /// The first instant and the last; `null` when there were no requests.
    pub(super) from_us: Option<u64>,
    pub(super) to_us: Option<u64>,
    pub(super) limits: Vec<LimitTally>,
    pub(super) most_denied: Vec<DeniedKey>,
    pub(super) over_time: Option<Timeline>,
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
}

/// A key that was denied, and by which limits.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct DeniedKey {
    pub(super) key: String,
    pub(super) requests: u64,
    pub(super) denied: u64,
    pub(super) by: Vec<DeniedBy>,
}

/// One limit's part in it.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct DeniedBy {
    pub(super) limit: String,
    pub(super) denied: u64,
}

/// How a charge ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Allowed,
    /// Allowed by a shadow limit that would have denied it.
    WouldDeny,
    Denied,
}

/// Counts while the replay goes on.
pub(super) struct Tally {
    limits: Vec<LimitTally>,
    marks: Vec<Mark>,
    span: Option<(u64, u64)>,
    over_time: Option<Timeline>,
}

/// A charge in eight bytes that sort by key, then by limit: 32 bits, 16 bits, and one for a denial.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Mark(u64);

impl Mark {
    fn new(key: u32, limit: u16, denied: bool) -> Mark {
        Mark(u64::from(key) << 17 | u64::from(limit) << 1 | u64::from(denied))
    }

    fn key(self) -> u32 {
        u32::try_from(self.0 >> 17).unwrap_or(u32::MAX)
    }

    fn limit(self) -> usize {
        usize::from(u16::try_from(self.0 >> 1 & 0xffff).unwrap_or(u16::MAX))
    }

    fn denied(self) -> u64 {
        self.0 & 1
    }
}

impl Tally {
    /// For limits given as (name, words), and requests in the order of replay.
    pub(super) fn new(limits: impl IntoIterator<Item = (String, String)>, requests: &[Request]) -> Tally {
        let span = requests.first().zip(requests.last()).map(|(first, last)| (first.time_us, last.time_us));
        let empty = |(limit, rule)| LimitTally {
            limit,
            rule,
            requests: 0,
            keys: 0,
            allowed: 0,
            denied: 0,
            denied_share: 0.0,
            would_deny: 0,
        };
        Tally {
            limits: limits.into_iter().map(empty).collect(),
            marks: Vec::with_capacity(requests.len()),
            span,
            over_time: span.map(|(first, last)| Timeline::over(first, last)),
        }
    }

    /// Counts one charge.
    pub(super) fn count(&mut self, request: &Request, keys: &Keys, ending: Ending) {
        let denied = ending == Ending::Denied;
        let tally = &mut self.limits[usize::from(request.limit)];
        tally.requests += 1;
        tally.allowed += u64::from(!denied);
        tally.denied += u64::from(denied);
        tally.would_deny += u64::from(ending == Ending::WouldDeny);
        if let Some(line) = &mut self.over_time {
            let bucket = line.at(request.time_us);
            bucket.allowed += u64::from(!denied);
            bucket.denied += u64::from(denied);
        }
        self.marks.push(Mark::new(keys.normal(request.key).index(), request.limit, denied));
    }

    /// The answer, once the last charge is counted.
    pub(super) fn finish(mut self, keys: &Keys, skipped: u64, first_skipped: Option<String>) -> Summary {
        self.marks.sort_unstable();
        let mut distinct = 0;
        // (times denied, marks of the key), cut back to the foremost now and then, so that it stays short.
        let mut denied_keys: Vec<(u64, &[Mark])> = Vec::new();
        let name = |marks: &[Mark]| keys.text_at(marks[0].key());
        let cut = |denied_keys: &mut Vec<(u64, &[Mark])>| {
            denied_keys.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| name(a.1).cmp(name(b.1))));
            denied_keys.truncate(MOST_DENIED);
        };
        for of_key in self.marks.chunk_by(|one, next| one.key() == next.key()) {
            distinct += 1;
            for of_limit in of_key.chunk_by(|one, next| one.limit() == next.limit()) {
                self.limits[of_limit[0].limit()].keys += 1;
            }
            let denied: u64 = of_key.iter().map(|mark| mark.denied()).sum();
            if denied > 0 {
                denied_keys.push((denied, of_key));
            }
            if denied_keys.len() > 100 * MOST_DENIED {
                cut(&mut denied_keys);
            }
        }
        cut(&mut denied_keys);
        let most_denied = denied_keys
            .into_iter()
            .map(|(denied, marks)| DeniedKey {
                key: name(marks).to_string(),
                requests: marks.len() as u64,
                denied,
                by: denied_by(marks, &self.limits),
            })
            .collect();
        for tally in &mut self.limits {
            tally.denied_share = fraction(tally.denied, tally.requests);
        }
        let sum = |part: fn(&LimitTally) -> u64| self.limits.iter().map(part).sum();
        let (requests, denied) = (sum(|tally| tally.requests), sum(|tally| tally.denied));
        Summary {
            requests,
            keys: distinct,
            allowed: sum(|tally| tally.allowed),
            denied,
            denied_share: fraction(denied, requests),
            would_deny: sum(|tally| tally.would_deny),
            skipped_lines: skipped,
            first_skipped,
            from_us: self.span.map(|(first, _)| first),
            to_us: self.span.map(|(_, last)| last),
            most_denied,
            over_time: self.over_time,
            limits: self.limits,
        }
    }
}

/// Which limits denied a key, the one that did so most first.
fn denied_by(marks: &[Mark], limits: &[LimitTally]) -> Vec<DeniedBy> {
    let mut by: Vec<DeniedBy> = marks
        .chunk_by(|one, next| one.limit() == next.limit())
        .map(|marks| DeniedBy {
            limit: limits[marks[0].limit()].limit.clone(),
            denied: marks.iter().map(|mark| mark.denied()).sum(),
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
    use super::*;

    #[test]
    fn marks_keep_what_they_are_given() {
        for (key, limit, denied) in [(0, 0, false), (u32::MAX, u16::MAX, true), (7, 3, true)] {
            let mark = Mark::new(key, limit, denied);
            assert_eq!(
                (mark.key(), mark.limit(), mark.denied()),
                (key, usize::from(limit), u64::from(denied))
            );
        }
    }

    #[test]
    fn keys_are_counted_once_and_the_most_denied_come_first() {
        let mut keys = Keys::default();
        let ids = [("b", "default:b"), ("default:b", "default:b"), ("a:1", "a:1"), ("c:1", "c:1")]
            .map(|(text, normal)| keys.enter(text, normal).unwrap());
        let traffic = [
            (0, 0, Ending::Denied),
            (1, 1, Ending::Denied),
            (1, 1, Ending::Denied),
            (2, 0, Ending::Denied),
            (2, 0, Ending::Allowed),
            (3, 1, Ending::WouldDeny),
        ];
        let requests: Vec<Request> = (0u64..)
            .zip(traffic)
            .map(|(n, (key, limit, _))| Request {
                time_us: n,
                cost: 1,
                line: n,
                key: ids[key],
                limit,
                file: 0,
            })
            .collect();
        let limits = ["api", "login"].map(|name| (name.to_string(), String::new()));
        let mut tally = Tally::new(limits, &requests);
        for (request, (_, _, ending)) in requests.iter().zip(traffic) {
            tally.count(request, &keys, ending);
        }
        let summary = tally.finish(&keys, 0, None);
        assert_eq!((summary.requests, summary.keys, summary.allowed, summary.denied), (6, 3, 2, 4));
        assert_eq!(summary.would_deny, 1);
        assert_eq!(summary.limits.iter().map(|limit| limit.keys).collect::<Vec<_>>(), [2, 2]);
        let by = |limit: &str, denied| DeniedBy { limit: limit.to_string(), denied };
        assert_eq!(
            summary.most_denied,
            [
                DeniedKey {
                    key: "default:b".to_string(),
                    requests: 3,
                    denied: 3,
                    by: vec![by("login", 2), by("api", 1)]
                },
                DeniedKey { key: "a:1".to_string(), requests: 2, denied: 1, by: vec![by("api", 1)] },
            ]
        );
        let line = summary.over_time.unwrap();
        assert_eq!(line.buckets.iter().map(|b| (b.allowed, b.denied)).collect::<Vec<_>>(), [(2, 4)]);
    }
}
