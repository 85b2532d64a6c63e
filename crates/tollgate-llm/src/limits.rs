//! Model limits: whether a call can proceed, its place in line, what is reserved for it and what it is settled with.
//!
//! All limits of a call are one charge of the library: all are reserved or none. A call that must wait stands in the fair line of its
//! quota. What is reserved is settled once with what was used: less gives the difference back where it was taken, more is charged
//! as debt, and what cannot be proven stays charged. `planning.rs` says what a call charges, `waiting.rs` waits for it, `admission.rs` is what
//! it gets, `settling.rs` settles it, `batch.rs` admits several calls at once, and `feedback.rs` takes in what providers say of their limits.

mod admission;
mod batch;
mod feedback;
mod others;
mod planning;
mod renewal;
mod settling;
mod waiting;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tollgate::store::Micros;
use tollgate::{Clock, Decision, Outcome, Tollgate};

pub use self::admission::Admission;
pub use self::feedback::ReportedLeft;
use self::feedback::parked;
use self::others::Others;
use self::renewal::Renewal;
use self::waiting::{PlannedBy, Planning, joining};
use crate::config::{Counts, LlmConfig};
use crate::count::{Counted, Counter};
use crate::learned::Learned;
use crate::line::Line;
use crate::parking::Parking;
use crate::plan::{Plan, Planned, SHARED};
use crate::request::{Api, ModelRequest};
use crate::seen::{Coming, Seen};

/// For how long a call can be settled. One that takes longer stays charged as reserved.
const TTL: Duration = Duration::from_secs(3_600);

/// How many unknown models are warned of.
const WARNED: usize = 100;

/// Who calls.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// The name of a configured client, which has its weight, its priority and its own limits.
    pub client: Option<String>,
}

/// Whether a call can proceed now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Whether it can.
    pub can_proceed: bool,
    /// Why it cannot.
    pub reason: Option<String>,
    /// How long until it can, if nothing else comes; `None` for never.
    pub wait: Option<Duration>,
    /// What its input is reckoned at.
    pub input_tokens: u64,
    /// What would be reserved for it, input and output.
    pub reserved_tokens: u64,
}

/// A call that is not admitted.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Why, for programs.
    pub kind: RefusalKind,
    /// Why, for people.
    pub reason: String,
    /// How long until the same call fits, if nothing else comes; `None` for never.
    pub retry_after: Option<Duration>,
    /// How its limits stand.
    pub standing: Vec<Standing>,
}

/// Why a call is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// There was no room in time.
    Limited,
    /// It can never fit.
    Never,
    /// Too many wait already.
    LineFull,
    /// The model is not configured, and such are refused.
    UnknownModel,
    /// The limits could not be asked.
    Undecided,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Refusal {}

/// How one limit of a call stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What it counts.
    pub counts: Counts,
    /// What it allows.
    pub limit: u64,
    /// What is left.
    pub remaining: u64,
    /// When all of it will be left.
    pub reset_after: Duration,
}

/// Limits of language models over a gate. Cheap to clone; clones are one.
#[derive(Clone)]
pub struct ModelLimits {
    inner: Arc<Inner>,
}

struct Inner {
    gate: Tollgate,
    clock: Clock,
    config: RwLock<Arc<LlmConfig>>,
    counter: Counter,
    /// By configured model.
    learned: Mutex<HashMap<String, Learned>>,
    /// By quota.
    lines: Mutex<HashMap<String, Arc<Line>>>,
    warned: Mutex<HashSet<String>>,
    seen: Seen,
    /// Which quota group is tried first.
    rotation: AtomicUsize,
    parking: Parking,
    others: Others,
    /// How many settlements wait for their store.
    unsettled: AtomicUsize,
}

impl ModelLimits {
    /// The models of a configuration whose limits this gate has.
    pub fn new(gate: Tollgate, config: LlmConfig) -> ModelLimits {
        ModelLimits::with_clock(gate, config, Clock::system())
    }

    /// The same by another clock, which must be the gate's: for tests.
    pub fn with_clock(gate: Tollgate, config: LlmConfig, clock: Clock) -> ModelLimits {
        ModelLimits {
            inner: Arc::new(Inner {
                gate,
                seen: Seen::new(clock.clone()),
                clock,
                config: RwLock::new(Arc::new(config)),
                counter: Counter::default(),
                learned: Mutex::default(),
                lines: Mutex::default(),
                warned: Mutex::default(),
                rotation: AtomicUsize::new(0),
                parking: Parking::default(),
                others: Others::default(),
                unsettled: AtomicUsize::new(0),
            }),
        }
    }

    /// Puts another configuration in place. The gate is reloaded by its owner, before.
    pub fn reload(&self, config: LlmConfig) {
        let quotas: HashSet<&str> = config.models.iter().map(|model| model.quota.as_str()).collect();
        let mut lines = self.inner.lines.lock();
        // Waiting calls, and calls that may still give something back, keep their line, also if their quota is gone for now.
        lines.retain(|quota, line| quotas.contains(quota.as_str()) || line.waiting() > 0 || line.has_open());
        lines.values().for_each(|line| line.rebind(config.max_waiting, Micros::from(config.window)));
        drop(lines);
        let models: HashSet<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        self.inner.learned.lock().retain(|model, _| models.contains(model.as_str()));
        self.inner.seen.reload(&config);
        *self.inner.config.write() = Arc::new(config);
        self.inner.lines.lock().values().for_each(|line| line.nudge());
    }

    /// The configuration in place.
    pub fn config(&self) -> Arc<LlmConfig> {
        self.inner.config.read().clone()
    }

    pub(crate) fn seen(&self) -> &Seen {
        &self.inner.seen
    }

    pub(crate) fn gate(&self) -> &Tollgate {
        &self.inner.gate
    }

    /// By how much counts of a model are multiplied, in parts of a thousand.
    pub(crate) fn factor(&self, model: &str) -> u64 {
        self.inner.learned.lock().get(model).cloned().unwrap_or_default().factor() / 10
    }

    /// Whose calls of a quota go next.
    pub(crate) fn order(&self, quota: &str, most: usize) -> Vec<Arc<str>> {
        let line = self.inner.lines.lock().get(quota).cloned();
        line.map_or_else(Vec::new, |line| line.order(most))
    }

    /// Counts a request. A large one is counted off the async threads.
    pub async fn count(&self, request: &ModelRequest<'_>) -> Counted {
        if request.is_large()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (counter, api, body) = (self.inner.counter.clone(), request.api(), request.bytes().to_vec());
            let counting = runtime.spawn_blocking(move || {
                let request = ModelRequest::read(api, &body).ok();
                request.map(|request| counter.count(&request))
            });
            if let Ok(Some(counted)) = counting.await {
                return counted;
            }
        }
        self.inner.counter.count(request)
    }

    /// How many calls wait for the quota of a model.
    pub fn waiting(&self, model: &str) -> usize {
        let config = self.config();
        let quota = config.model(model).map(|model| model.quota.as_str()).unwrap_or_default();
        self.inner.lines.lock().get(quota).map_or(0, |line| line.waiting())
    }

    /// Whether a call can proceed now, why not and how long until it can. Charges nothing.
    pub async fn check(&self, request: &ModelRequest<'_>, caller: &Caller) -> Result<Check, Refusal> {
        let config = self.config();
        let counted = self.count(request).await;
        // Providers count tokens for nothing, under a limit of its own that is none of the model's.
        let Some(model) = self.known(&config, request)?.filter(|_| request.api() != Api::CountTokens) else {
            let input = self.tokens(&config, None, request, counted).input;
            return Ok(Check {
                can_proceed: true,
                reason: None,
                wait: Some(Duration::ZERO),
                input_tokens: input,
                reserved_tokens: input,
            });
        };
        let tokens = self.tokens(&config, Some(model), request, counted);
        let plans = match self.plans(&config, model, caller, tokens) {
            Ok(plans) => plans,
            Err(refusal) => {
                let (input, reserved) = (tokens.input, tokens.input.saturating_add(tokens.output));
                return Ok(Check {
                    can_proceed: false,
                    reason: Some(refusal.reason),
                    wait: None,
                    input_tokens: input,
                    reserved_tokens: reserved,
                });
            }
        };
        let tokens = plans.first().map_or(tokens, |plan| plan.tokens);
        let best = match plans.is_empty() {
            true => self.a_free_group(&config, model).err().map(|(left, why)| parked(left, why)),
            false => self.first_room(&plans).await?,
        };
        Ok(Check {
            can_proceed: best.is_none(),
            wait: best.as_ref().map_or(Some(Duration::ZERO), |refusal| refusal.retry_after),
            reason: best.map(|refusal| refusal.reason),
            input_tokens: tokens.input,
            reserved_tokens: tokens.input.saturating_add(tokens.output),
        })
    }

    /// Reserves what a call may use. It waits in line for as long as it must, at most `within` (by default `max_wait`).
    ///
    /// Dropping the future leaves the line and charges nothing.
    pub async fn admit(
        &self,
        request: &ModelRequest<'_>,
        caller: &Caller,
        within: Option<Duration>,
    ) -> Result<Admission, Refusal> {
        let counted = self.count(request).await;
        self.admit_counted(request, counted, caller, within, |_| ()).await
    }

    /// The same for a request that was counted before. `on_wait` is called once if it has to wait, with what a refusal would say.
    pub async fn admit_counted(
        &self,
        request: &ModelRequest<'_>,
        counted: Counted,
        caller: &Caller,
        within: Option<Duration>,
        on_wait: impl FnOnce(&Refusal) + Send,
    ) -> Result<Admission, Refusal> {
        let (started, mut on_wait) = (self.inner.clock.now(), Some(on_wait));
        loop {
            let asked = Asked { request, counted, caller, within, started };
            if let Some(admission) = self.admit_planned(&asked, &mut on_wait).await? {
                return Ok(admission);
            }
        }
    }

    /// Admits a call by the config in place; `None` if another one has given its model other limits than it waited for.
    async fn admit_planned(
        &self,
        asked: &Asked<'_, '_>,
        on_wait: &mut Option<impl FnOnce(&Refusal) + Send>,
    ) -> Result<Option<Admission>, Refusal> {
        let Asked { request, counted, caller, started, .. } = *asked;
        let by = self.planned_by();
        let config = by.config.clone();
        let unlimited =
            |tokens| Admission::unlimited(self.inner.clone(), tokens, counted.encoding, request.model());
        let Some(model) = self.known(&config, request)? else {
            return Ok(Some(unlimited(self.tokens(&config, None, request, counted))));
        };
        let tokens = self.tokens(&config, Some(model), request, counted);
        // Providers count tokens for nothing, under a limit of its own that is none of the model's.
        if request.api() == Api::CountTokens {
            return Ok(Some(unlimited(tokens)));
        }
        let plans = self.plans(&config, model, caller, tokens)?;
        let within = asked.within.unwrap_or(config.max_wait);
        let waited = Duration::from(self.inner.clock.now().saturating_sub(started));
        let left = within.saturating_sub(waited);
        if plans.is_empty() {
            let group = self.free_group(&config, model, left).await?;
            let mut admission = unlimited(tokens);
            (admission.quota, admission.group) = (Some(model.quota.clone()), Some(group));
            return Ok(Some(admission));
        }
        let line = self.line(&config, &model.quota);
        let planned = plans[0].tokens;
        let joining = joining(&config, caller, planned.input.saturating_add(planned.output), planned.input);
        let client = joining.client.clone();
        let waits = self.inner.seen.waits(&Coming {
            model,
            client: &client,
            priority: joining.priority,
            tokens: joining.cost,
            charges: plans.first().map_or(&[], |plan| &plan.charges),
            within: left,
            is_exact: counted.is_exact,
        });
        if let Some(refusal) = self.too_long(&config, &line, &client, &plans, left) {
            waits.refused();
            return Err(self.with_outcomes(refusal, &plans).await);
        }
        let replan = |by: &PlannedBy| {
            let plans = self.plan_again(&by.config, asked, &model.quota)?;
            plans.iter().flatten().take(1).for_each(|plan| waits.planned(&plan.charges));
            Ok(plans)
        };
        let planning = Planning { plans: plans.clone(), by, started, within };
        let admitted = match self.wait(&line, joining, planning, on_wait, replan).await {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Ok(None),
            Err(refusal) => {
                waits.refused();
                return Err(self.with_outcomes(refusal, &plans).await);
            }
        };
        let tokens = admitted.plan.tokens;
        let mut admission = Admission::unlimited(self.inner.clone(), tokens, counted.encoding, &model.name);
        admission.left_out = ModelLimits::left_out(&config, model, &plans);
        admission.line = Some(line);
        admission.seen = Some(waits.admitted(&admitted.plan.charges, admitted.waited));
        (admission.quota, admission.group) = (Some(model.quota.clone()), Some(admitted.plan.group.clone()));
        admission.renewal = Renewal::of(&admitted.plan, &admitted.reservation, &self.inner.clock);
        (admission.plan, admission.held) = (Some(admitted.plan), Some(admitted.reservation));
        (admission.waited, admission.admitted_at) = (admitted.waited, admitted.at);
        (admission.window, admission.goes_first) = (config.window, admitted.goes_first);
        Ok(Some(admission))
    }

    /// The plans of a call that waits for this quota, by another config; `None` if its model has another quota now, or no limits.
    fn plan_again(
        &self,
        config: &LlmConfig,
        asked: &Asked<'_, '_>,
        quota: &str,
    ) -> Result<Option<Vec<Plan>>, Refusal> {
        let Some(model) = self.known(config, asked.request)?.filter(|model| model.quota == quota) else {
            return Ok(None);
        };
        let tokens = self.tokens(config, Some(model), asked.request, asked.counted);
        let plans = self.plans(config, model, asked.caller, tokens)?;
        Ok(Some(plans).filter(|plans| !plans.is_empty()))
    }
}

/// A call that wants to be admitted.
struct Asked<'a, 'b> {
    request: &'a ModelRequest<'b>,
    counted: Counted,
    caller: &'a Caller,
    /// For how long it waits at most, and since when.
    within: Option<Duration>,
    started: Micros,
}

impl fmt::Debug for ModelLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelLimits").finish_non_exhaustive()
    }
}

impl Refusal {
    fn new(kind: RefusalKind, reason: impl Into<String>) -> Refusal {
        Refusal { kind, reason: reason.into(), retry_after: None, standing: Vec::new() }
    }
}

fn undecided(error: tollgate::Error) -> Refusal {
    Refusal {
        retry_after: Some(Duration::from_secs(1)),
        ..Refusal::new(RefusalKind::Undecided, format!("the limits could not be asked: {error}"))
    }
}

fn reason(plan: &Plan, decision: &Decision) -> String {
    let binding = decision.binding();
    let found =
        decision.outcomes().iter().zip(&plan.charges).find(|(outcome, _)| std::ptr::eq(*outcome, binding));
    let Some((outcome, charge)) = found else { return decision.to_string() };
    let (used, capacity, unit) = (outcome.used(), outcome.capacity(), charge.unit);
    match charge.counts {
        Counts::Requests if unit == SHARED => {
            format!("Rate limit exceeded: {used} {unit} / {capacity} of the limit {}", charge.limit)
        }
        Counts::Requests => format!("Rate limit exceeded: {used} requests / {capacity} {unit}"),
        Counts::Concurrency => format!("Concurrency limit exceeded: {used} calls / {capacity} {unit}"),
        _ => format!("Token limit exceeded: {used} tokens / {capacity} {unit}"),
    }
}

fn standing(plan: &Plan, decision: &Decision) -> Vec<Standing> {
    let stands = |(outcome, charge): (&Outcome, &Planned)| Standing {
        counts: charge.counts,
        limit: outcome.capacity(),
        remaining: outcome.remaining(),
        reset_after: outcome.reset_after().saturating_sub(charge.margin),
    };
    decision.outcomes().iter().zip(&plan.charges).map(stands).collect()
}
