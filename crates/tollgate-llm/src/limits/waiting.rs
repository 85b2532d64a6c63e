//! Queued calls: a call waits for its turn, tries to reserve, and sleeps exactly as long as the limits return.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tollgate::store::Micros;
use tollgate::{Decision, Policy, Reservation};
use tracing::Instrument;

use super::feedback::parked;
use super::planning::capacity;
use super::{Caller, ModelLimits, Refusal, RefusalKind, TTL, reason, standing, undecided};
use crate::config::{Counts, LlmConfig, Priority};
use crate::line::{Ahead, Joining, Line, Ticket};
use crate::plan::{Plan, Planned, SHARED};

/// The longest sleep of the first in the queue before it tries a remote store again: another process may have given back.
const LOOK_AGAIN: Micros = Micros::from_millis(250);

/// How long a call pauses whose limits have just gone: a reload puts limits in place first, and a moment later the models that say which of them to
/// charge.
const RELOADING: Micros = Micros::from_millis(50);

/// How a call of so many tokens, and so many of them input, stands in line.
pub(super) fn joining(config: &LlmConfig, caller: &Caller, tokens: u64, input: u64) -> Joining {
    let client = caller.client.as_deref().unwrap_or("default");
    let known = config.clients.iter().find(|known| known.name == client);
    Joining {
        client: client.into(),
        weight: known.map_or(1, |known| known.weight),
        priority: known.map_or(Priority::Interactive, |known| known.priority),
        cost: tokens.max(1),
        input,
    }
}

impl ModelLimits {
    /// The refusal of the quota group that has room first; none if one has room now. Charges nothing.
    pub(super) async fn first_room(&self, plans: &[Plan]) -> Result<Option<Refusal>, Refusal> {
        let mut best: Option<Refusal> = None;
        for plan in plans {
            let refusal = match self.inner.parking.left(&plan.quota, &plan.group, self.inner.clock.now()) {
                Some((left, why)) => parked(left, why),
                None => {
                    let decision = self.inner.gate.peek(&plan.charges()).await.map_err(undecided)?;
                    if plan.reported_wait(&decision) == Some(Duration::ZERO) {
                        return Ok(None);
                    }
                    Denial::of(plan, &decision).refusal
                }
            };
            let wait = |refusal: &Refusal| refusal.retry_after.unwrap_or(Duration::MAX);
            if best.as_ref().is_none_or(|known| wait(&refusal) < wait(known)) {
                best = Some(refusal);
            }
        }
        Ok(best)
    }

    pub(super) fn line(&self, config: &LlmConfig, quota: &str) -> Arc<Line> {
        let mut lines = self.inner.lines.lock();
        let new =
            || Arc::new(Line::new(self.inner.clock.clone(), config.max_waiting, Micros::from(config.window)));
        lines.entry(quota.to_owned()).or_insert_with(new).clone()
    }

    /// The refusal of a call whose time is over before its client's earlier calls can all have been sent, so that it need not
    /// wait in vain. Requests are never given back, so this is the shortest time that they take.
    pub(super) fn too_long(
        &self,
        config: &LlmConfig,
        line: &Line,
        client: &str,
        plans: &[Plan],
        within: Duration,
    ) -> Option<Refusal> {
        let before = line.waiting_of(client) as u64;
        let policy = self.inner.gate.policy();
        let requests = |plan: &Plan| -> Option<u64> {
            let charge = plan.charges.iter().find(|charge| charge.unit == "RPM" && !charge.is_own)?;
            capacity(&policy, charge)
        };
        let of_all = plans.iter().map(requests).sum::<Option<u64>>()?;
        let windows = u32::try_from(before / of_all.max(1)).unwrap_or(u32::MAX);
        let wait = config.window.saturating_mul(windows);
        (wait > within).then(|| Refusal {
            retry_after: Some(wait),
            ..Refusal::new(
                RefusalKind::Limited,
                format!("Rate limit exceeded: {before} calls wait already / {of_all} RPM"),
            )
        })
    }

    /// A refusal with how the limits stand, where it does not say.
    pub(super) async fn with_outcomes(&self, mut refusal: Refusal, plans: &[Plan]) -> Refusal {
        if refusal.standing.is_empty()
            && let Some(plan) = plans.first()
            && let Ok(decision) = self.inner.gate.peek(&plan.charges()).await
        {
            refusal.standing = standing(plan, &decision);
        }
        refusal
    }

    /// What calls are planned by now.
    pub(super) fn planned_by(&self) -> PlannedBy {
        PlannedBy { config: self.config(), policy: self.inner.gate.policy() }
    }

    /// Waits in the queue until one of the plans is reserved. A config or an override that changes meanwhile is planned by again, by
    /// `replan`, and the call keeps its place; `None` if it has to begin anew.
    pub(super) async fn wait(
        &self,
        line: &Line,
        joining: Joining,
        mut planned: Planning,
        on_wait: &mut Option<impl FnOnce(&Refusal) + Send>,
        replan: impl Fn(&PlannedBy) -> Result<Option<Vec<Plan>>, Refusal> + Send,
    ) -> Result<Option<Admitted>, Refusal> {
        let clock = &self.inner.clock;
        let margin = planned.plans.iter().map(Plan::margin).max().unwrap_or_default();
        let deadline = planned.started.saturating_add(Micros::from(planned.within.saturating_add(margin)));
        let priority = joining.priority;
        let Some(ticket) = line.join(joining) else {
            let reason = format!("too many calls wait for this model already ({})", line.waiting());
            // A shared store is not asked once for each charge by callers that a full line refuses.
            let turn = match self.is_remote(&planned.plans) {
                true => None,
                false => self.turn_behind(&planned.plans, line.ahead(priority)).await,
            };
            let retry_after = Some(turn.unwrap_or_default().max(Duration::from_secs(1)));
            return Err(Refusal { retry_after, ..Refusal::new(RefusalKind::LineFull, reason) });
        };
        let (mut tried, mut last, mut has_paused) = (None, None, false);
        loop {
            let turn = ticket.turn(tried, deadline).instrument(tracing::info_span!("wait"));
            let turn = turn.await;
            let by = self.planned_by();
            if !by.is(&planned.by) {
                let Some(plans) = replan(&by)? else { return Ok(None) };
                (planned.plans, planned.by, last) = (plans, by, None);
            }
            let plans = &planned.plans;
            if !has_paused && !planned.by.has_limits_of(plans) {
                has_paused = true;
                clock.alarm(clock.now().saturating_add(RELOADING)).await;
                continue;
            }
            let Some(nudges) = turn else {
                // The refusal of its last try is of that time, so the time since is subtracted.
                return Err(match last.and_then(|(refusal, at)| since(refusal, at, clock.now())) {
                    Some(refusal) => refusal,
                    None => self.refusal_in_line(&ticket, plans).await?,
                });
            };
            let reserving = self.try_each(plans).instrument(tracing::info_span!("reserve"));
            let refusal = match reserving.await? {
                Ok((plan, reservation, goes_first)) => {
                    ticket.admitted();
                    let at = clock.now();
                    let waited = Duration::from(at.saturating_sub(planned.started));
                    return Ok(Some(Admitted { plan, reservation, waited, at, goes_first }));
                }
                Err(refusal) => refusal,
            };
            let Some(wait) = refusal.wait else { return Err(refusal.refusal) };
            let now = clock.now();
            let until = now.saturating_add(wait);
            // A charge that cannot be given back in time is not waited for.
            let is_fixed =
                refusal.is_parked || (!line.has_open() && !refusal.is_own && !self.is_remote(plans));
            let is_in_vain = refusal.of_requests.is_some_and(|wait| now.saturating_add(wait) > deadline);
            if now >= deadline || is_in_vain || (until > deadline && is_fixed) {
                return Err(refusal.refusal);
            }
            // A wait for the margin alone is caused by no limit.
            let is_limited = refusal.refusal.retry_after != Some(Duration::ZERO);
            if let Some(on_wait) = on_wait.take_if(|_| is_limited) {
                on_wait(&refusal.refusal);
            }
            let until = if self.is_remote(plans) { until.min(now.saturating_add(LOOK_AGAIN)) } else { until };
            if refusal.is_own {
                ticket.step_aside(until);
            }
            (tried, last) = (Some((until, nudges)), Some((refusal.refusal, now)));
        }
    }

    /// Tries each quota group in turn, another one first each time.
    async fn try_each(&self, plans: &[Plan]) -> Result<Result<(Plan, Reservation, bool), Denial>, Refusal> {
        let first = if plans.len() > 1 { self.inner.rotation.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let mut best: Option<Denial> = None;
        let mut is_parked = true;
        for offset in 0..plans.len() {
            let index = (first + offset) % plans.len();
            let plan = &plans[index];
            let denial = match self.inner.parking.left(&plan.quota, &plan.group, self.inner.clock.now()) {
                Some((left, why)) => Denial::parked(left, why),
                None => {
                    is_parked = false;
                    self.charge_others(plan).await.map_err(undecided)?;
                    if let Some(wait) = self.first_to_go(plan) {
                        Denial::behind_the_first(wait)
                    } else {
                        let beside = self.beside_others(plan);
                        match self.inner.gate.reserve(&plan.charges(), TTL).await.map_err(undecided)? {
                            Ok(reservation) => {
                                let goes_first = self.goes(plan);
                                return Ok(Ok((beside, reservation, goes_first)));
                            }
                            Err(denied) => Denial::of(plan, denied.decision()),
                        }
                    }
                }
            };
            let wait = |denial: &Denial| denial.wait.map_or(u64::MAX, Micros::get);
            if best.as_ref().is_none_or(|known| wait(&denial) < wait(known)) {
                best = Some(denial);
            }
        }
        match best {
            Some(denial) => Ok(Err(Denial { is_parked, ..denial })),
            None => Err(Refusal::new(RefusalKind::Undecided, "the model has no upstream")),
        }
    }

    /// The refusal of a waiter whose turn never came.
    async fn refusal_in_line(&self, ticket: &Ticket<'_>, plans: &[Plan]) -> Result<Refusal, Refusal> {
        let plan = &plans[0];
        let decision = self.inner.gate.peek(&plan.charges()).await.map_err(undecided)?;
        let mut refusal = Denial::of(plan, &decision).refusal;
        if decision.is_allowed() {
            refusal.reason = format!("{} calls wait for this model", ticket.waiting());
        }
        // At least what it would wait for alone; and it would come back behind all who wait.
        let turn = self.turn_behind(plans, ticket.ahead()).await.unwrap_or_default();
        let alone = refusal.retry_after.unwrap_or_default().max(Duration::from_millis(100));
        refusal.retry_after = Some(alone.max(turn));
        Ok(refusal)
    }

    /// When a call has its turn if so much goes before it, with the group that has room first; `None` if that cannot be said. What those
    /// calls give back makes it sooner.
    async fn turn_behind(&self, plans: &[Plan], ahead: Ahead) -> Option<Duration> {
        let groups = plans.len().max(1) as u64;
        let mut soonest: Option<Duration> = None;
        for plan in plans {
            let mut latest = Duration::ZERO;
            for charge in &plan.charges {
                // Those before it share the groups, and are of all clients.
                // A limit of `[limits]` is one for all groups.
                let before = match charge {
                    Planned { is_own: true, .. } => 0,
                    Planned { unit: SHARED, .. } => ahead.of(charge.counts),
                    _ => ahead.of(charge.counts) / groups,
                };
                let Some((Some(wait), ..)) = charge.turn(&self.inner.gate, before).await else { continue };
                latest = latest.max(Duration::from(wait).saturating_sub(charge.margin));
            }
            soonest = Some(soonest.map_or(latest, |soonest| soonest.min(latest)));
        }
        soonest
    }

    fn is_remote(&self, plans: &[Plan]) -> bool {
        let limit = plans.first().and_then(|plan| plan.charges.first());
        limit.is_some_and(|charge| self.inner.gate.local(&charge.limit).is_err())
    }
}

/// A refusal as it stands some time after it was given; `None` once its time is over.
fn since(mut refusal: Refusal, given_at: Micros, now: Micros) -> Option<Refusal> {
    let past = Duration::from(now.saturating_sub(given_at));
    refusal.retry_after = refusal.retry_after.map(|wait| wait.saturating_sub(past));
    for standing in &mut refusal.standing {
        standing.reset_after = standing.reset_after.saturating_sub(past);
    }
    (refusal.retry_after != Some(Duration::ZERO)).then_some(refusal)
}

/// What a call was planned by.
pub(super) struct PlannedBy {
    pub(super) config: Arc<LlmConfig>,
    policy: Arc<Policy>,
}

impl PlannedBy {
    fn is(&self, other: &PlannedBy) -> bool {
        Arc::ptr_eq(&self.config, &other.config) && Arc::ptr_eq(&self.policy, &other.policy)
    }

    /// Whether there still are all limits of these plans.
    pub(super) fn has_limits_of(&self, plans: &[Plan]) -> bool {
        plans.iter().flat_map(|plan| &plan.charges).all(|charge| self.policy.rule(&charge.limit).is_some())
    }
}

/// The plans of a call that waits.
pub(super) struct Planning {
    /// One for each quota group that can take it; never empty.
    pub(super) plans: Vec<Plan>,
    pub(super) by: PlannedBy,
    /// Since when it waits, and for how long at most.
    pub(super) started: Micros,
    pub(super) within: Duration,
}

/// A denial, and what to do about it.
struct Denial {
    refusal: Refusal,
    wait: Option<Micros>,
    /// Whether a limit of the client itself denies for longer than all that others share.
    is_own: bool,
    /// Whether all groups are parked, so that nothing that is given back helps.
    is_parked: bool,
    /// How long limits of requests alone deny, of which nothing is given back.
    of_requests: Option<Micros>,
}

impl Denial {
    fn of(plan: &Plan, decision: &Decision) -> Denial {
        let denied =
            || decision.outcomes().iter().zip(&plan.charges).filter(|(outcome, _)| !outcome.is_allowed());
        let retry_after = decision.retry_after();
        let refusal = Refusal {
            kind: if retry_after.is_some() { RefusalKind::Limited } else { RefusalKind::Never },
            reason: reason(plan, decision),
            retry_after: plan.reported_wait(decision),
            standing: standing(plan, decision),
        };
        // Where a limit that all share denies for a shorter time, the next may go when that is over.
        let longest = |is_own: bool| {
            let of_kind = denied().filter(|(_, charge)| charge.is_own == is_own);
            of_kind.map(|(outcome, _)| outcome.retry_after().unwrap_or(Duration::MAX)).max()
        };
        let is_own = longest(true) > longest(false);
        let requests = denied().filter(|(_, charge)| charge.counts == Counts::Requests);
        let of_requests = requests.filter_map(|(outcome, _)| outcome.retry_after()).max().map(Micros::from);
        Denial { refusal, wait: retry_after.map(Micros::from), is_own, is_parked: false, of_requests }
    }

    /// The denial of a call that waits for the probing call.
    fn behind_the_first(wait: Micros) -> Denial {
        Denial {
            is_parked: false,
            ..Denial::parked(wait, "a call goes first to see what others have left of this quota")
        }
    }

    fn parked(left: Micros, why: &str) -> Denial {
        let refusal = parked(left, why);
        Denial { refusal, wait: Some(left), is_own: false, is_parked: true, of_requests: None }
    }
}

/// What an admission has reserved.
pub(super) struct Admitted {
    pub(super) plan: Plan,
    pub(super) reservation: Reservation,
    pub(super) waited: Duration,
    pub(super) at: Micros,
    /// Whether others wait until it is answered.
    pub(super) goes_first: bool,
}
