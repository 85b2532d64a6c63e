//! Several calls of one quota at once: checked as a whole, and admitted all or none.
//!
//! What all of them may use is one charge, merged by limit and key, so it is reserved as a whole or not at all. Each call has a
//! share of that reservation. A reservation is settled once, so the usage of each call is added up, and the last one settles the
//! sum. So the refund of the first calls comes with the last.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::store::Micros;
use tollgate::{Clock, Reservation};

use super::feedback::parked;
use super::planning::too_small;
use super::renewal::Renewal;
use super::settling::Ending;
use super::waiting::{PlannedBy, Planning, joining};
use super::{Admission, Caller, Check, Inner, ModelLimits, Refusal, RefusalKind};
use crate::config::LlmConfig;
use crate::count::Counted;
use crate::line::Line;
use crate::plan::{Plan, Planned, Tokens};
use crate::request::{Api, ModelRequest};
use crate::seen::Coming;

/// The calls of a batch, planned.
struct PlannedBatch {
    calls: Vec<PlannedCall>,
    /// The quota in whose queue the batch waits; `None` if no call has limits.
    quota: Option<String>,
    /// For each quota group, the charges of all calls together.
    merged: Vec<Plan>,
}

/// One call of a batch.
struct PlannedCall {
    counted: Counted,
    tokens: Tokens,
    model: String,
    /// Its own plan for each quota group; empty if it has no limits.
    plans: Vec<Plan>,
    /// Whether it counts tokens, which providers do for nothing.
    is_free: bool,
}

impl PlannedCall {
    /// Whether its model has no limits.
    fn is_unlimited(&self) -> bool {
        self.plans.is_empty() && !self.is_free
    }
}

impl PlannedBatch {
    fn input(&self) -> u64 {
        self.calls.iter().fold(0, |sum, call| sum.saturating_add(call.tokens.input))
    }

    fn reserved(&self) -> u64 {
        self.calls.iter().fold(self.input(), |sum, call| sum.saturating_add(call.tokens.output))
    }
}

impl ModelLimits {
    /// The clock that it goes by.
    pub(crate) fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// Whether all of these calls could proceed now, why not and how long until they can. Charges nothing. They must be of one quota.
    pub async fn check_batch(
        &self,
        requests: &[ModelRequest<'_>],
        caller: &Caller,
    ) -> Result<Check, Refusal> {
        let config = self.config();
        let mut batch = self.plan_batch(&config, requests, caller).await?;
        let refusal = match self.leave_out(&mut batch) {
            Some(refusal) => Some(refusal),
            None => self.first_room_of(&config, &batch).await?,
        };
        Ok(Check {
            can_proceed: refusal.is_none(),
            wait: refusal.as_ref().map_or(Some(Duration::ZERO), |refusal| refusal.retry_after),
            reason: refusal.map(|refusal| refusal.reason),
            input_tokens: batch.input(),
            reserved_tokens: batch.reserved(),
        })
    }

    /// The refusal of a batch that has no room now. Models without limits wait only for a group that is not parked.
    async fn first_room_of(
        &self,
        config: &LlmConfig,
        batch: &PlannedBatch,
    ) -> Result<Option<Refusal>, Refusal> {
        for call in batch.calls.iter().filter(|call| call.is_unlimited()) {
            if let Some(model) = config.model(&call.model)
                && let Err((left, why)) = self.a_free_group(config, model)
            {
                return Ok(Some(parked(left, why)));
            }
        }
        self.first_room(&batch.merged).await
    }

    /// Reserves what all of these calls may use, all or nothing. It waits in the queue until there is room for all of them, at
    /// most `within` (by default `max_wait`). They must be of one quota.
    pub async fn admit_batch(
        &self,
        requests: &[ModelRequest<'_>],
        caller: &Caller,
        within: Option<Duration>,
    ) -> Result<Vec<Admission>, Refusal> {
        let started = self.inner.clock.now();
        loop {
            if let Some(admitted) = self.admit_planned_batch(requests, caller, within, started).await? {
                return Ok(admitted);
            }
        }
    }

    /// Admits a batch by the config in place; `None` if another one has come while it waited.
    async fn admit_planned_batch(
        &self,
        requests: &[ModelRequest<'_>],
        caller: &Caller,
        within: Option<Duration>,
        started: Micros,
    ) -> Result<Option<Vec<Admission>>, Refusal> {
        let by = self.planned_by();
        let config = by.config.clone();
        let mut batch = self.plan_batch(&config, requests, caller).await?;
        if let Some(refusal) = self.leave_out(&mut batch) {
            return Err(refusal);
        }
        let clock = &self.inner.clock;
        let within = within.unwrap_or(config.max_wait);
        let deadline = started.saturating_add(Micros::from(within));
        // Those without limits need a group that is not parked. They come first, because nothing is reserved yet that would have to wait.
        let mut unlimited = Vec::with_capacity(batch.calls.len());
        for call in &batch.calls {
            let mut admission =
                Admission::unlimited(self.inner.clone(), call.tokens, call.counted.encoding, &call.model);
            if call.is_unlimited()
                && let Some(model) = config.model(&call.model)
            {
                let left = deadline.saturating_sub(clock.now());
                let group = self.free_group(&config, model, left.into()).await?;
                (admission.quota, admission.group) = (Some(model.quota.clone()), Some(group));
            }
            unlimited.push(admission);
        }
        let limited = batch.calls.iter().filter(|call| !call.plans.is_empty()).count();
        let first = batch.calls.iter().find(|call| !call.plans.is_empty());
        let Some(model) = first.and_then(|call| config.model(&call.model)) else {
            return Ok(Some(unlimited));
        };
        let line = self.line(&config, &model.quota);
        let joining = joining(&config, caller, batch.reserved(), batch.input());
        let client = joining.client.clone();
        let left = Duration::from(deadline.saturating_sub(clock.now()));
        let waits = self.inner.seen.waits(&Coming {
            model,
            client: &client,
            priority: joining.priority,
            tokens: joining.cost,
            charges: batch.merged.first().map_or(&[], |plan| &plan.charges),
            within: left,
            is_exact: batch.calls.iter().all(|call| call.counted.is_exact),
        });
        // Where nothing but other limits has changed, it keeps its place.
        let replan = |by: &PlannedBy| {
            let is_same = Arc::ptr_eq(&by.config, &config) && by.has_limits_of(&batch.merged);
            Ok(is_same.then(|| batch.merged.clone()))
        };
        let planning = Planning { plans: batch.merged.clone(), by, started, within };
        let admitted = match self.wait(&line, joining, planning, &mut None::<fn(&Refusal)>, replan).await {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Ok(None),
            Err(refusal) => {
                waits.refused();
                return Err(self.with_outcomes(refusal, &batch.merged).await);
            }
        };
        let shared = Arc::new(Shared {
            inner: self.inner.clone(),
            _renewal: Renewal::of(&admitted.plan, &admitted.reservation, clock),
            reservation: admitted.reservation,
            line,
            state: Mutex::new(State { actuals: vec![0; admitted.plan.charges.len()], open: limited }),
        });
        waits.waited(admitted.waited);
        let mut admission = |(call, mut admission): (&PlannedCall, Admission)| {
            let of_group = |plan: &&Plan| plan.group == admitted.plan.group;
            let Some(plan) = call.plans.iter().find(of_group) else { return admission };
            admission.tokens = plan.tokens;
            admission.left_out = ModelLimits::left_out(&config, model, &call.plans);
            let slot = |charge: &Planned| {
                let is_same = |merged: &Planned| merged.limit == charge.limit && merged.key == charge.key;
                admitted.plan.charges.iter().position(is_same).unwrap_or(0)
            };
            let slots = plan.charges.iter().map(slot).collect();
            let as_reserved = plan.as_reserved();
            admission.share = Some(Share { shared: shared.clone(), slots, as_reserved, is_settled: false });
            admission.quota = Some(admitted.plan.quota.clone());
            admission.group = Some(admitted.plan.group.clone());
            admission.admitted_at = admitted.at;
            admission.waited = admitted.waited;
            admission.window = config.window;
            admission.plan = Some(plan.clone());
            admission.seen = Some(waits.admitted_one(&call.model, &plan.charges, call.counted.is_exact));
            admission
        };
        Ok(Some(batch.calls.iter().zip(unlimited).map(&mut admission).collect()))
    }

    async fn plan_batch(
        &self,
        config: &LlmConfig,
        requests: &[ModelRequest<'_>],
        caller: &Caller,
    ) -> Result<PlannedBatch, Refusal> {
        let mut batch = PlannedBatch { calls: Vec::new(), quota: None, merged: Vec::new() };
        let mut upstream: Option<&str> = None;
        for request in requests {
            let counted = self.count(request).await;
            let model = self.known(config, request)?;
            let mut tokens = self.tokens(config, model, request, counted);
            let mut plans = Vec::new();
            let is_free = request.api() == Api::CountTokens;
            if let Some(model) = model.filter(|_| !is_free) {
                plans = self.plans(config, model, caller, tokens)?;
                tokens = plans.first().map_or(tokens, |plan| plan.tokens);
            }
            if let Some(model) = model.filter(|_| !plans.is_empty()) {
                let quota = batch.quota.get_or_insert_with(|| model.quota.clone());
                let upstream = upstream.get_or_insert(&model.upstream);
                if *quota != model.quota || *upstream != model.upstream {
                    let reason =
                        "the calls of a batch that is looked at as a whole must be of models of one quota";
                    return Err(Refusal::new(RefusalKind::Never, reason));
                }
            }
            let is_first = batch.calls.iter().all(|call: &PlannedCall| call.plans.is_empty());
            if is_first {
                batch.merged.clone_from(&plans);
            } else if !plans.is_empty() {
                // A group takes all of them or none.
                batch.merged.retain_mut(|merged| {
                    let same = plans.iter().find(|plan| plan.group == merged.group);
                    same.inspect(|plan| merged.add(plan)).is_some()
                });
                if batch.merged.is_empty() {
                    let reason = "no group of keys has limits that all calls of the batch fit";
                    return Err(Refusal::new(RefusalKind::Never, reason));
                }
            }
            batch.calls.push(PlannedCall {
                counted,
                tokens,
                model: request.model().to_owned(),
                plans,
                is_free,
            });
        }
        Ok(batch)
    }

    /// Leaves out the groups whose limits are smaller than all calls together; the refusal, if that is all of them. Where one call
    /// alone is larger than a limit, `plans` has decided.
    fn leave_out(&self, batch: &mut PlannedBatch) -> Option<Refusal> {
        let policy = self.inner.gate.policy();
        let (fitting, mut oversized): (Vec<_>, Vec<_>) = std::mem::take(&mut batch.merged)
            .into_iter()
            .partition(|plan| too_small(&policy, plan).is_none());
        batch.merged = fitting;
        if !batch.merged.is_empty() {
            return None;
        }
        oversized.sort_by_key(|plan| too_small(&policy, plan).map(|(_, most)| std::cmp::Reverse(most)));
        let plan = oversized.first()?;
        let (at, most) = too_small(&policy, plan)?;
        let (charge, what, unit) = (&plan.charges[at], plan.charges[at].what(), plan.charges[at].unit);
        let reason = format!(
            "{} limit exceeded: {} {what} / {most} {unit}; the batch alone is larger than the limit",
            if what == "requests" { "Rate" } else { "Token" },
            charge.cost
        );
        Some(Refusal::new(RefusalKind::Never, reason))
    }
}

/// A reservation of several calls.
struct Shared {
    inner: Arc<Inner>,
    reservation: Reservation,
    /// Keeps its places, if it has some.
    _renewal: Option<Renewal>,
    line: Arc<Line>,
    state: Mutex<State>,
}

struct State {
    /// What the calls that have ended have used, for each charge.
    actuals: Vec<u64>,
    /// The calls that have not ended.
    open: usize,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.line.settled();
    }
}

impl Shared {
    async fn settle(&self, actuals: Vec<u64>) -> Result<(), tollgate::Error> {
        self.inner.settle(&self.reservation, Ending::Actual(actuals), Some(&self.line)).await
    }

    /// Adds what a call has used. The amounts of all, if it was the last.
    fn add(&self, slots: &[usize], used: &[u64]) -> Option<Vec<u64>> {
        let mut state = self.state.lock();
        for (slot, used) in slots.iter().zip(used) {
            state.actuals[*slot] = state.actuals[*slot].saturating_add(*used);
        }
        state.open = state.open.saturating_sub(1);
        (state.open == 0).then(|| state.actuals.clone())
    }
}

/// A call's share of a reservation of several. It is settled once; dropped unsettled, it stays charged as reserved.
pub(super) struct Share {
    shared: Arc<Shared>,
    /// For each charge of the call, its place in the reservation.
    slots: Vec<usize>,
    as_reserved: Vec<u64>,
    is_settled: bool,
}

impl Share {
    pub(super) async fn settle(mut self, used: &[u64]) -> Result<(), tollgate::Error> {
        self.is_settled = true;
        match self.shared.add(&self.slots, used) {
            Some(actuals) => self.shared.settle(actuals).await,
            None => Ok(()),
        }
    }

    /// The call was never sent.
    pub(super) async fn cancel(self) -> Result<(), tollgate::Error> {
        let nothing = vec![0; self.slots.len()];
        self.settle(&nothing).await
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.is_settled {
            return;
        }
        if let Some(actuals) = self.shared.add(&self.slots, &self.as_reserved)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let shared = self.shared.clone();
            runtime.spawn(async move { shared.settle(actuals).await });
        }
    }
}
