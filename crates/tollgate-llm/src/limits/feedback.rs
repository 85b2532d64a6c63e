//! Applies what a provider reports about its own limits: groups that must not be used for a while, and quota that others have
//! used.
//!
//! A report never raises an allowance. It may show less than is left here, because another client uses the same quota or because
//! the provider counts differently: then the difference is charged to the ordinary limit, as if a call had used it (`others.rs`).

use std::sync::atomic::Ordering;
use std::time::Duration;

use tollgate::Charge;
use tollgate::store::Micros;

use super::others::Report;
use super::{Admission, Inner, ModelLimits, Refusal, RefusalKind};
use crate::config::{Counts, LlmConfig, ModelConfig, UpstreamKind};
use crate::parking::Parked;
use crate::plan::{Plan, Planned};
use crate::provider::Hints;

/// What a provider reports to be left of one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedLeft {
    /// What the limit counts.
    pub counts: Counts,
    /// How much the provider allows, if it says so.
    pub limit: Option<u64>,
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
            let (remaining, reset) = (limit.remaining?, limit.reset_after);
            Some(ReportedLeft { counts, limit: limit.limit, remaining, reset, rounding })
        });
        left.collect()
    }
}

impl Inner {
    /// Parks a group of keys for a quota.
    fn park(&self, quota: &str, group: &str, wait: Duration, reason: &'static str) {
        let now = self.clock.now();
        self.parking.park(quota, group, now, wait, reason);
        if let Some((left, _)) = self.parking.left(quota, group, now) {
            self.seen.parked(group, left);
        }
    }

    /// Charges what others use and is not charged yet, as far as there is room.
    async fn charge_missing(&self, charge: &Planned, window: Micros) -> Result<(), tollgate::Error> {
        let Some(cost) = self.others.take_missing(charge, self.clock.now(), window) else { return Ok(()) };
        let of = |cost| [Charge::new(charge.limit.as_str(), charge.key.as_str()).cost(cost)];
        let mut charged = 0;
        let mut asked = cost;
        // All of it; else what there is room for, which may be used meanwhile.
        for _ in 0..2 {
            let decision = self.gate.charge(&of(asked)).await;
            let decision = decision.inspect_err(|_| self.others.not_charged(charge, cost))?;
            if decision.is_allowed() {
                charged = asked;
                break;
            }
            asked = decision.outcomes().first().map_or(0, |outcome| outcome.remaining()).min(cost);
            if asked == 0 {
                break;
            }
        }
        if charged < cost {
            self.others.not_charged(charge, cost - charged);
        }
        Ok(())
    }
}

impl ModelLimits {
    /// Charges what others go on using, before anything else is reserved.
    pub(super) async fn charge_others(&self, plan: &Plan) -> Result<(), tollgate::Error> {
        let config = self.config();
        let window = Micros::from(config.window.saturating_add(plan.margin()));
        for charge in plan.charges.iter().filter(|charge| !charge.is_own) {
            self.inner.charge_missing(charge, window).await?;
        }
        Ok(())
    }

    /// How long a call waits for the probing call, because others use this quota.
    pub(super) fn first_to_go(&self, plan: &Plan) -> Option<Micros> {
        let window = Micros::from(self.config().window.saturating_add(plan.margin()));
        let now = self.inner.clock.now();
        let charges = plan.charges.iter().filter(|charge| !charge.is_own);
        charges.filter_map(|charge| self.inner.others.wait(charge, now, window)).max()
    }

    /// A plan with what is charged for others, by which reports are read.
    pub(super) fn beside_others(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        let window = Micros::from(self.config().window.saturating_add(plan.margin()));
        let now = self.inner.clock.now();
        for charge in plan.charges.iter_mut().filter(|charge| !charge.is_own) {
            charge.others = self.inner.others.charged(charge, now, window);
        }
        plan
    }

    /// Records that a call is sent; true if others wait for its answer.
    pub(super) fn goes(&self, plan: &Plan) -> bool {
        let window = Micros::from(self.config().window.saturating_add(plan.margin()));
        let now = self.inner.clock.now();
        let charges = plan.charges.iter().filter(|charge| !charge.is_own);
        // All of them are noted.
        charges.filter(|charge| self.inner.others.goes(charge, now, window)).count() > 0
    }

    /// Sends no call of this model's quota with keys of this group for a while, because the provider asked for that.
    pub fn park(&self, model: &str, group: &str, wait: Duration, reason: &'static str) {
        let config = self.config();
        let Some(model) = config.model(model) else { return };
        self.inner.park(&model.quota, group, wait, reason);
        self.inner.seen.limited(group);
    }

    /// Notes that a refusal of a provider, for its limits, is passed on to the caller.
    pub fn passed_on(&self) {
        self.inner.seen.passed_on();
    }

    /// What others use of a limit in a window, as far as it is charged here, and of how much.
    pub(crate) fn others_use(&self, limit: &str, key: &str) -> Option<(u64, u64)> {
        let window = Micros::from(self.config().window);
        self.inner.others.uses(limit, key, self.inner.clock.now(), window)
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
    /// A call that went first has ended, with or without an answer.
    pub(super) fn ends_first(&mut self) {
        if !std::mem::take(&mut self.goes_first) {
            return;
        }
        for charge in self.plan.iter().flat_map(|plan| &plan.charges).filter(|charge| !charge.is_own) {
            self.inner.others.answered(charge, self.inner.clock.now(), true);
        }
    }

    /// Applies what the provider reports to be left. If nothing is left, the group is parked until the reported reset, for one
    /// window at most; if less is left than here, the difference is charged as used by others. Reports never raise anything.
    pub async fn reported(&self, reports: &[ReportedLeft]) -> Result<(), tollgate::Error> {
        self.take_in(reports, true).await
    }

    /// Applies what the provider reports with a refusal, which itself says how long the group must not be used.
    pub async fn reported_refusing(&self, reports: &[ReportedLeft]) -> Result<(), tollgate::Error> {
        self.take_in(reports, false).await
    }

    async fn take_in(&self, reports: &[ReportedLeft], may_park: bool) -> Result<(), tollgate::Error> {
        let (Some(plan), Some(held)) = (&self.plan, &self.held) else { return Ok(()) };
        if !reports.is_empty() {
            self.inner.seen.reported(&plan.group);
        }
        let config = self.inner.config.read().clone();
        let window = Micros::from(config.window.saturating_add(plan.margin()));
        for charge in plan.charges.iter().filter(|charge| !charge.is_own) {
            self.inner.others.answered(charge, self.inner.clock.now(), !may_park);
        }
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
            // Anthropic's `tokens` are of whichever limit is strictest, which mostly is that of output and none of ours.
            let is_of_any = plan.kind == UpstreamKind::Anthropic && report.counts == Counts::Tokens;
            if is_of_any && report.limit != Some(then.capacity()) {
                continue;
            }
            let reported = report.remaining.saturating_add(report.rounding);
            // A refused call is counted here. If this limit refused it, the provider had less left than the call asked for. Other
            // limits are corrected with the next answer.
            let is_refused_for_it = !may_park && reported < charge.cost;
            if !may_park && !is_refused_for_it {
                continue;
            }
            let beyond = if is_refused_for_it { charge.cost - reported } else { 0 };
            let reported = if is_refused_for_it { 0 } else { reported };
            if reported >= then.remaining().saturating_add(beyond) && self.inner.others.is_empty() {
                continue;
            }
            // Before what is left now: what is charged in between is then missed, and not counted twice.
            let others_now = self.inner.others.charged(charge, self.inner.clock.now(), window);
            let now = self.inner.gate.status(charge.limit.as_str(), charge.key.as_str()).await?;
            let at = self.inner.clock.now();
            let taken = Report {
                then: then.remaining(),
                others_then: charge.others,
                now: now.remaining(),
                others_now,
                reported,
                beyond,
                capacity: now.capacity(),
                cost: charge.cost,
            };
            let left = then.remaining().min(now.remaining());
            // Where nearly nothing is left here either, there is nothing to learn from it.
            let is_out = report.remaining == 0 && left.saturating_sub(report.rounding) > now.capacity() / 10;
            if is_out && may_park {
                let wait = report.reset.unwrap_or(self.window).min(self.window);
                // All of it returns then. Only if that takes most of a window, it is known how much others use in one.
                if wait > self.window / 2 {
                    self.inner.others.report(charge, at, window, &taken);
                }
                let reason = "the provider reports that nothing is left of this quota";
                self.inner.park(&plan.quota, &plan.group, wait, reason);
                self.nudge();
                continue;
            }
            // A refusal where much is left here, and of which it is not known that it lasts for most of a window, may be of a short moment.
            let is_lasting = report.reset.is_some_and(|reset| reset > self.window / 2);
            if !may_park && left > now.capacity() / 10 && !is_lasting {
                continue;
            }
            self.inner.others.report(charge, at, window, &taken);
            self.inner.charge_missing(charge, window).await?;
        }
        if !self.inner.others.is_empty() {
            self.nudge();
        }
        Ok(())
    }

    /// Asks that no call of this quota is sent with keys of this group for a while.
    pub fn park(&self, wait: Duration, reason: &'static str) {
        if let (Some(quota), Some(group)) = (&self.quota, &self.group) {
            self.inner.park(quota, group, wait, reason);
            self.inner.seen.limited(group);
            self.nudge();
        }
    }
}
