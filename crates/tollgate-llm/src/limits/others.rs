//! What other clients use of the same quota: estimated from a provider's reports, and kept charged to the ordinary limit.
//!
//! A report shows how much is left at the provider; the limit here shows how much should be left. The difference was used by
//! others. Reports are late and overtake each other. Compared with what was left when the call was admitted, a report is right on
//! average, but off by the calls that have overtaken it or that it has overtaken. Compared with what is left now, it is too low
//! by the calls in flight. So others are assumed only if both comparisons show them, and their usage is the average of the first,
//! moment by moment: the calls of a burst overtake each other, and their errors cancel out.
//!
//! Others do not stop when their charge leaves the window. So the maximum of this window and the one before stays charged, plus a
//! headroom: twice what others use until the next report, in proportion to our own usage. So calls stop before the provider has
//! nothing left, and the next usage of others finds room. If there is no room for the charge, it gets the next units that become
//! free.
//!
//! If there are others and nothing was reported for a while, what is left is not known. Then one probing call goes first, and the
//! others follow once it is answered, so that a burst of waiting calls does not meet an exhausted provider.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use tollgate::store::Micros;

use crate::plan::Planned;

/// In how many pieces the charges of a window are kept.
const PIECES: u64 = 64;

/// After which part of a window without a report a call goes first, and how long it is waited for at most.
const SILENCE: u64 = 16;

/// Over how many reports an average is taken, down and up, and its parts of one.
const AVERAGED: i64 = 8;
const RAISED: i64 = 2;
const SCALE: i64 = 16;

/// Numbers of limits fit with their parts.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX).min(i64::MAX / (4 * SCALE))
}

/// The state of a limit: here when the call was admitted, here now, and at the provider.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report {
    /// What was left here when the call was admitted, including it, and what was charged for others by then.
    pub(super) then: u64,
    pub(super) others_then: u64,
    /// What is left here now, and what is charged for others.
    pub(super) now: u64,
    pub(super) others_now: u64,
    /// What is left at the provider, at most.
    pub(super) reported: u64,
    /// What the call was refused for: by how much more than that it asked.
    pub(super) beyond: u64,
    pub(super) capacity: u64,
    /// What the call was charged.
    pub(super) cost: u64,
}

/// The known usage of others, by limit and key.
#[derive(Debug, Default)]
pub(crate) struct Others {
    known: Mutex<HashMap<(String, String), OthersUse>>,
}

#[derive(Debug)]
struct OthersUse {
    /// What was charged for them in the last two windows, and when: oldest first.
    charged: VecDeque<(Micros, u64)>,
    /// The most that reports since then say; none if there was no report.
    seen: Option<u64>,
    since: Micros,
    /// What they use by the average of the last reports since then, and by that of the window before.
    average: Option<i64>,
    average_before: Option<i64>,
    /// The reports of a moment, which are not in the average yet: since when, their sum and how many.
    moment: (Micros, i64, i64),
    /// The most that reports of the window before said.
    before: u64,
    headroom: u64,
    capacity: u64,
    /// When a provider reported last.
    reported: Micros,
    /// When a call went first whose answer is waited for.
    first: Option<Micros>,
}

impl OthersUse {
    fn new(now: Micros) -> OthersUse {
        OthersUse {
            charged: VecDeque::new(),
            seen: None,
            since: now,
            average: None,
            average_before: None,
            moment: (now, 0, 0),
            before: 0,
            headroom: 0,
            capacity: 0,
            reported: now,
            first: None,
        }
    }

    /// Starts a new window if one is over. Without a report, the assumed usage of others decays.
    fn roll(&mut self, now: Micros, window: Micros) {
        while now >= self.since.saturating_add(window) {
            self.moment_ends();
            self.before = self.seen.take().unwrap_or(self.before / 2);
            self.average_before = self.average.take().or(self.average_before);
            self.since = match self.before {
                0 => now,
                _ => self.since.saturating_add(window),
            };
        }
        let is_past = |at: Micros| now >= at.saturating_add(window).saturating_add(window);
        while self.charged.front().is_some_and(|(at, _)| is_past(*at)) {
            self.charged.pop_front();
        }
    }

    /// Takes what others use by one report into the average, when its moment is over. Calls that are on their way together overtake each
    /// other, so each of their reports is off, but all of them together are not.
    fn hears(&mut self, used: i64, is_refusal: bool, now: Micros, window: Micros) {
        if now >= self.moment.0.saturating_add(Micros::new(window.get() / PIECES)) {
            self.moment_ends();
            self.moment.0 = now;
        }
        match is_refusal {
            // It says how much they use at least.
            true if self.average.is_some_and(|average| used * SCALE < average) => {}
            true => self.believes(used * SCALE, 1),
            false => self.moment = (self.moment.0, self.moment.1.saturating_add(used), self.moment.2 + 1),
        }
    }

    fn moment_ends(&mut self) {
        let (since, sum, count) = self.moment;
        if count > 0 {
            self.believes(sum * SCALE / count, count);
        }
        self.moment = (since, 0, 0);
    }

    /// Moves the average towards these reports: faster up than down, but never at once by a single report.
    fn believes(&mut self, used: i64, reports: i64) {
        for _ in 0..reports.min(2 * AVERAGED) {
            self.average = Some(match (self.average, self.average_before) {
                (Some(average), _) if used < average => average + (used - average) / AVERAGED,
                (Some(average), _) => average + (used - average) / RAISED,
                (None, Some(before)) if used > before => before + (used - before) / RAISED,
                (None, _) => used,
            });
        }
    }

    /// What is charged for them at a moment.
    fn charged(&self, at: Micros, window: Micros) -> u64 {
        let counts = |(since, _): &&(Micros, u64)| *since <= at && at < since.saturating_add(window);
        self.charged.iter().filter(counts).fold(0, |sum, (_, cost)| sum.saturating_add(*cost))
    }

    /// What is to be charged for them.
    fn wanted(&self) -> u64 {
        match self.before.max(self.seen.unwrap_or(0)) {
            0 => 0,
            used => used.saturating_add(self.headroom).min(self.capacity),
        }
    }

    fn charge(&mut self, now: Micros, window: Micros, cost: u64) {
        let piece = Micros::new(window.get() / PIECES);
        match self.charged.back_mut().filter(|(at, _)| now < at.saturating_add(piece)) {
            Some((_, known)) => *known = known.saturating_add(cost),
            None => self.charged.push_back((now, cost)),
        }
    }
}

impl Others {
    fn key(charge: &Planned) -> (String, String) {
        (charge.limit.clone(), charge.key.clone())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.known.lock().is_empty()
    }

    /// Takes in a report.
    pub(super) fn report(&self, charge: &Planned, now: Micros, window: Micros, report: &Report) {
        let mut known = self.known.lock();
        let key = Others::key(charge);
        let is_lower = report.reported < report.then.min(report.now).saturating_add(report.beyond);
        if !is_lower && !known.contains_key(&key) {
            return;
        }
        let entry = known.entry(key).or_insert_with(|| OthersUse::new(now));
        entry.roll(now, window);
        let missing = |left: u64, others: u64| {
            let expected = left.saturating_add(others).saturating_add(report.beyond);
            signed(expected).saturating_sub(signed(report.reported))
        };
        let then = missing(report.then, report.others_then);
        let least = then.min(missing(report.now, report.others_now));
        entry.hears(then, report.beyond > 0, now, window);
        let average = entry.average.unwrap_or(0);
        let used = least.max(average.saturating_add(SCALE / 2) / SCALE);
        let used = u64::try_from(used).unwrap_or(0).min(report.capacity);
        entry.seen = Some(entry.seen.unwrap_or(0).max(used));
        entry.capacity = report.capacity;
        (entry.reported, entry.first) = (now, None);
        // What they use beside one call of ours, by what both use in a window.
        let own = report.capacity.saturating_sub(report.now).saturating_sub(report.others_now).max(1);
        let beside = u128::from(used).saturating_mul(report.cost.into()).div_ceil(own.into());
        let beside = u64::try_from(beside).unwrap_or(u64::MAX);
        entry.headroom = beside.saturating_mul(2).saturating_add(1).min((report.capacity / 10).max(1));
    }

    /// What is charged for them.
    pub(super) fn charged(&self, charge: &Planned, now: Micros, window: Micros) -> u64 {
        let known = self.known.lock();
        if known.is_empty() {
            return 0;
        }
        known.get(&Others::key(charge)).map_or(0, |entry| entry.charged(now, window))
    }

    /// What is charged for them under a limit and key, and of how much; none if nothing is.
    pub(super) fn uses(&self, limit: &str, key: &str, now: Micros, window: Micros) -> Option<(u64, u64)> {
        let known = self.known.lock();
        let entry = known.get(&(limit.to_owned(), key.to_owned()))?;
        Some((entry.charged(now, window), entry.capacity)).filter(|(used, _)| *used > 0)
    }

    /// What is to be charged for them now, which counts as charged from here on.
    pub(super) fn take_missing(&self, charge: &Planned, now: Micros, window: Micros) -> Option<u64> {
        let mut known = self.known.lock();
        if known.is_empty() {
            return None;
        }
        let key = Others::key(charge);
        let entry = known.get_mut(&key)?;
        entry.roll(now, window);
        let wanted = entry.wanted();
        if wanted == 0 && entry.charged.is_empty() {
            known.remove(&key);
            return None;
        }
        let missing = wanted.saturating_sub(entry.charged(now, window));
        if missing == 0 {
            return None;
        }
        entry.charge(now, window, missing);
        Some(missing)
    }

    /// How long a call is to wait for one that went first.
    pub(super) fn wait(&self, charge: &Planned, now: Micros, window: Micros) -> Option<Micros> {
        let known = self.known.lock();
        if known.is_empty() {
            return None;
        }
        let entry = known.get(&Others::key(charge))?;
        let until = entry.first?.saturating_add(Micros::new(window.get() / SILENCE));
        (now < until).then(|| until.saturating_sub(now))
    }

    /// Notes that a call goes, which others wait for if nothing was reported for a while; true if they do.
    pub(super) fn goes(&self, charge: &Planned, now: Micros, window: Micros) -> bool {
        let mut known = self.known.lock();
        if known.is_empty() {
            return false;
        }
        let Some(entry) = known.get_mut(&Others::key(charge)) else { return false };
        let goes_first = now >= entry.reported.saturating_add(Micros::new(window.get() / SILENCE));
        if goes_first {
            entry.first = Some(now);
        }
        goes_first
    }

    /// Notes an answer. One that is no refusal and reports nothing says that reports need not be waited for.
    pub(super) fn answered(&self, charge: &Planned, now: Micros, is_refusal: bool) {
        let mut known = self.known.lock();
        if known.is_empty() {
            return;
        }
        let Some(entry) = known.get_mut(&Others::key(charge)) else { return };
        entry.first = None;
        if !is_refusal {
            entry.reported = now;
        }
    }

    /// So much of what was taken could not be charged.
    pub(super) fn not_charged(&self, charge: &Planned, mut cost: u64) {
        let mut known = self.known.lock();
        let Some(entry) = known.get_mut(&Others::key(charge)) else { return };
        while let Some((at, last)) = entry.charged.pop_back() {
            if last > cost {
                entry.charged.push_back((at, last - cost));
                return;
            }
            cost -= last;
        }
    }
}
