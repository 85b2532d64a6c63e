//! What a provider says of its own limits, taken into ours: groups that it asks to leave alone, and quota that others have used.
//!
//! Nothing that a provider says ever raises an allowance. It may report less than is left here, because somebody else uses the same
//! quota or because it counts otherwise: then the difference is charged to the ordinary limit, as if a call had used it. Reports are
//! late and cross each other, so a report counts only where it is below what was left when the call was admitted *and* below what is
//! left now. Others do not stop when their charge leaves the window, so it is charged again, as long as reports since then say so.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::Charge;
use tollgate::store::Micros;

use super::{Admission, ModelLimits, Refusal, RefusalKind};
use crate::config::{Counts, LlmConfig, ModelConfig};
use crate::parking::Parked;
use crate::plan::{Plan, Planned};
use crate::provider::Hints;

/// What a provider reports to be left of one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedLeft {
    /// What the limit counts.
    pub counts: Counts,
    /// How much is left.
    pub remaining: u64,
    /// When all of it will be left, if that is reported.
    pub reset: Option<Duration>,
    /// By how much the report may be too low, because it is rounded.
    pub rounding: u64,
}

/// By how much a number of tokens may be too low that Anthropic rounds to the nearest thousand.
const ROUNDING: u64 = 500;

impl ReportedLeft {
    /// All that an answer reports.
    pub fn all(hints: &Hints, is_anthropic: bool) -> Vec<ReportedLeft> {
        let rounding = if is_anthropic { ROUNDING } else { 0 };
        let limits = [
            (Counts::Requests, hints.requests, 0),
            (Counts::Tokens, hints.tokens, rounding),
            (Counts::InputTokens, hints.input_tokens, rounding),
            (Counts::OutputTokens, hints.output_tokens, rounding),
        ];
        let left = limits.into_iter().filter_map(|(counts, limit, rounding)| {
            let limit = limit?;
            Some(ReportedLeft { counts, remaining: limit.remaining?, reset: limit.reset_after, rounding })
        });
        left.collect()
    }
}

/// What is left of a limit: here when the call was admitted, here now, and as the provider reports.
#[derive(Clone, Copy)]
struct Left {
    then: u64,
    now: u64,
    reported: u64,
}

/// What others are known to use, by limit and key.
#[derive(Debug, Default)]
pub(crate) struct Others {
    known: Mutex<HashMap<(String, String), OthersUse>>,
}

#[derive(Clone, Copy, Debug)]
struct OthersUse {
    /// What is charged for them, and since when.
    charged: u64,
    since: Micros,
    /// The most that reports since then say; none if there was no report.
    seen: Option<u64>,
    /// When it was charged last.
    changed: Micros,
}

impl Others {
    fn key(charge: &Planned) -> (String, String) {
        (charge.limit.clone(), charge.key.clone())
    }

    /// Takes in a report on a call that was admitted at this time: how much more is to be charged for others.
    fn report(&self, charge: &Planned, now: Micros, window: Micros, admitted: Micros, left: Left) -> u64 {
        let mut known = self.known.lock();
        let entry = known.get_mut(&Others::key(charge));
        let Left { then, now: left_now, reported } = left;
        // What is left now is less by the calls that were sent since, which the provider may not have seen when it reported. So less than
        // that proves that there are others, and how many is seen against what was left then, unless that is older than their charge.
        let is_proof = reported < then.min(left_now);
        let is_older = entry.as_ref().is_some_and(|entry| entry.changed > admitted);
        let left = if is_proof && !is_older { then } else { then.min(left_now) };
        if entry.is_none() && !is_proof {
            return 0;
        }
        let charged = entry.as_ref().filter(|one| now < one.since.saturating_add(window));
        let charged = charged.map_or(0, |one| one.charged);
        let more = left.saturating_sub(reported);
        let used = charged.saturating_add(more).saturating_sub(reported.saturating_sub(left));
        match entry {
            Some(entry) => entry.seen = Some(entry.seen.unwrap_or(0).max(used)),
            None => {
                let new = OthersUse { charged: 0, since: now, seen: Some(used), changed: now };
                known.insert(Others::key(charge), new);
            }
        }
        // A little more than that, for what they use until the next report.
        if more > 0 { more.saturating_add(more.div_ceil(8)) } else { 0 }
    }

    /// Notes what was charged.
    fn charged(&self, charge: &Planned, now: Micros, window: Micros, cost: u64) {
        if let Some(entry) = self.known.lock().get_mut(&Others::key(charge)) {
            if now >= entry.since.saturating_add(window) {
                (entry.charged, entry.since) = (0, now);
            }
            entry.charged = entry.charged.saturating_add(cost);
            entry.changed = now;
        }
    }

    /// What is to be charged again, because the last charge has left the window and others have not stopped.
    fn again(&self, charge: &Planned, now: Micros, window: Micros) -> Option<u64> {
        let mut known = self.known.lock();
        if known.is_empty() {
            return None;
        }
        let key = Others::key(charge);
        let entry = known.get_mut(&key).filter(|entry| now >= entry.since.saturating_add(window))?;
        // Without a report since, they are believed to use less and less.
        let used = entry.seen.unwrap_or(entry.charged / 2);
        if used == 0 {
            known.remove(&key);
            return None;
        }
        *entry = OthersUse { charged: used, since: now, seen: None, changed: now };
        Some(used)
    }
}

impl ModelLimits {
    /// Charges what others go on using, before anything else is reserved.
    pub(super) async fn charge_others(&self, plan: &Plan) -> Result<(), tollgate::Error> {
        let config = self.config();
        let window = Micros::from(config.window.saturating_add(plan.margin()));
        for charge in plan.charges.iter().filter(|charge| !charge.is_own) {
            let Some(cost) = self.inner.others.again(charge, self.inner.clock.now(), window) else {
                continue;
            };
            let all = [Charge::new(charge.limit.as_str(), charge.key.as_str()).cost(cost)];
            let decision = self.inner.gate.charge(&all).await?;
            let rest = decision.outcomes().first().map_or(0, |outcome| outcome.remaining());
            if !decision.is_allowed() && rest > 0 {
                let rest = [Charge::new(charge.limit.as_str(), charge.key.as_str()).cost(rest)];
                let _ = self.inner.gate.charge(&rest).await?;
            }
        }
        Ok(())
    }

    /// Sends no call of this model's quota with keys of this group for a while, because the provider asked for that.
    pub fn park(&self, model: &str, group: &str, wait: Duration, reason: &'static str) {
        let config = self.config();
        let Some(model) = config.model(model) else { return };
        self.inner.parking.park(&model.quota, group, self.inner.clock.now(), wait, reason);
        self.inner.seen.limited(group);
    }

    /// The groups that are parked.
    pub fn parked(&self) -> Vec<Parked> {
        self.inner.parking.all(self.inner.clock.now())
    }

    /// Whether a group of keys of this model, other than these, is not parked.
    pub fn has_free_group(&self, model: &str, other_than: &[String]) -> bool {
        let config = self.config();
        let Some(model) = config.model(model) else { return false };
        let now = self.inner.clock.now();
        groups(&config, model)
            .into_iter()
            .filter(|group| !other_than.iter().any(|other| other == group))
            .any(|group| self.inner.parking.left(&model.quota, group, now).is_none())
    }

    /// A group of a model that is not parked; else the least time that one is parked for, and why.
    pub(super) fn a_free_group(
        &self,
        config: &LlmConfig,
        model: &ModelConfig,
    ) -> Result<String, (Micros, &'static str)> {
        let now = self.inner.clock.now();
        let groups = groups(config, model);
        let first = self.inner.rotation.fetch_add(1, Ordering::Relaxed);
        let mut least: Option<(Micros, &'static str)> = None;
        for offset in 0..groups.len() {
            let group = groups[first.wrapping_add(offset) % groups.len()];
            match self.inner.parking.left(&model.quota, group, now) {
                None => return Ok(group.to_owned()),
                Some(left) => least = Some(least.map_or(left, |least| least.min(left))),
            }
        }
        Err(least.unwrap_or((Micros::ZERO, "the model has no upstream")))
    }

    /// The group of a model without limits: one that is not parked, waited for if it must be.
    pub(super) async fn free_group(
        &self,
        config: &LlmConfig,
        model: &ModelConfig,
        within: Duration,
    ) -> Result<String, Refusal> {
        let clock = &self.inner.clock;
        let deadline = clock.now().saturating_add(Micros::from(within));
        loop {
            let (left, why) = match self.a_free_group(config, model) {
                Ok(group) => return Ok(group),
                Err(parked) => parked,
            };
            let until = clock.now().saturating_add(left);
            if left == Micros::ZERO || until > deadline {
                return Err(parked(left, why));
            }
            clock.alarm(until).await;
        }
    }
}

/// The refusal of a call all of whose groups are parked.
pub(super) fn parked(left: Micros, why: &str) -> Refusal {
    let left = Duration::from(left);
    Refusal {
        retry_after: Some(left),
        ..Refusal::new(RefusalKind::Limited, format!("{why}: {:.1} s left", left.as_secs_f64()))
    }
}

/// The quota groups of a model's upstream, each once.
pub(super) fn groups<'c>(config: &'c LlmConfig, model: &'c ModelConfig) -> Vec<&'c str> {
    let mut groups: Vec<&str> = Vec::new();
    for key in config.upstream(&model.upstream).iter().flat_map(|upstream| &upstream.keys) {
        if !groups.contains(&key.group.as_str()) {
            groups.push(&key.group);
        }
    }
    if groups.is_empty() {
        groups.push(&model.upstream);
    }
    groups
}

impl Admission {
    /// Takes in what the provider reports to be left. Nothing left parks the group until the reset that is reported, for one window
    /// at most; less than is left here is charged as used by others. Reports never raise anything.
    pub async fn reported(&self, reports: &[ReportedLeft]) -> Result<(), tollgate::Error> {
        let (Some(plan), Some(held)) = (&self.plan, &self.held) else { return Ok(()) };
        let config = self.inner.config.read().clone();
        let window = Micros::from(config.window.saturating_add(plan.margin()));
        for report in reports {
            // A provider reports by the minute; limits by the day are ours alone.
            let unit = match report.counts {
                Counts::Requests => "RPM",
                Counts::Tokens => "TPM",
                Counts::InputTokens => "input TPM",
                Counts::OutputTokens => "output TPM",
                Counts::Concurrency => continue,
            };
            let found = plan.charges.iter().zip(held.decision().outcomes());
            let Some((charge, then)) = found
                .filter(|(charge, _)| charge.unit == unit && !charge.is_own)
                .find(|(_, outcome)| !outcome.is_shadow() && !outcome.is_unlimited())
            else {
                continue;
            };
            let at_most = report.remaining.saturating_add(report.rounding);
            let is_lower = at_most < then.remaining();
            if !is_lower && self.inner.others.known.lock().is_empty() {
                continue;
            }
            let now = self.inner.gate.status(charge.limit.as_str(), charge.key.as_str()).await?;
            let left = then.remaining().min(now.remaining());
            // Where nearly nothing is left here either, there is nothing to learn from it.
            if report.remaining == 0 && left.saturating_sub(report.rounding) > now.capacity() / 10 {
                let wait = report.reset.unwrap_or(self.window).min(self.window);
                let reason = "the provider reports that nothing is left of this quota";
                let now = self.inner.clock.now();
                self.inner.parking.park(&plan.quota, &plan.group, now, wait, reason);
                self.nudge();
                continue;
            }
            let at = self.inner.clock.now();
            let left = Left { then: then.remaining(), now: now.remaining(), reported: at_most };
            let more = self.inner.others.report(charge, at, window, self.admitted_at, left);
            let more = more.min(now.remaining());
            if more == 0 {
                continue;
            }
            self.inner.others.charged(charge, at, window, more);
            let used = [Charge::new(charge.limit.as_str(), charge.key.as_str()).cost(more)];
            // Denied only if it has been used meanwhile, which is as good.
            let _ = self.inner.gate.charge(&used).await?;
        }
        Ok(())
    }

    /// Asks that no call of this quota is sent with keys of this group for a while.
    pub fn park(&self, wait: Duration, reason: &'static str) {
        if let (Some(quota), Some(group)) = (&self.quota, &self.group) {
            self.inner.parking.park(quota, group, self.inner.clock.now(), wait, reason);
            self.inner.seen.limited(group);
            self.nudge();
        }
    }
}
