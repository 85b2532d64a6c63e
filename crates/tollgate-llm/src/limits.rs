//! Model limits: whether a call can proceed, its place in line, what is reserved for it and what it is settled with.
//!
//! All limits of a call are one charge of the library: all are reserved or none. A call that must wait stands in the fair line of its
//! quota. What is reserved is settled once with what was used: less gives the difference back where it was taken, more is charged
//! as debt, and what cannot be proven stays charged. `batch.rs` admits several calls at once.

mod batch;
mod feedback;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::config::{Counts, LlmConfig, ModelConfig, Oversize, Priority, UnknownModel, UpstreamKind};
use parking_lot::{Mutex, RwLock};
use tollgate::store::Micros;
use tollgate::{Allowance, Clock, Decision, Key, Outcome, Policy, Reservation, Tollgate};
use tracing::Instrument;

use self::batch::Share;
use crate::count::{Counted, Counter, Encoding};
use crate::learned::Learned;
use crate::line::{Joining, Line, Ticket};
use crate::overview::{Coming, Seen, SeenOpen};
use crate::parking::Parking;
use crate::plan::{Plan, Planned, Tokens};
use crate::request::{Api, ModelRequest};
use crate::usage::Usage;

pub use self::feedback::ReportedLeft;
use self::feedback::{Others, groups, parked};

/// For how long a call can be settled. One that takes longer stays charged as reserved.
const TTL: Duration = Duration::from_secs(3_600);

/// How long the first in line sleeps at most before it looks at a remote store again: another process may have given back.
const LOOK_AGAIN: Micros = Micros::from_millis(250);

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
            }),
        }
    }

    /// Puts another configuration in place. The gate is reloaded by its owner, before.
    pub fn reload(&self, config: LlmConfig) {
        let quotas: HashSet<&str> = config.models.iter().map(|model| model.quota.as_str()).collect();
        let mut lines = self.inner.lines.lock();
        // Those who wait keep their line; a bound or a window that changed is that of new lines.
        lines.retain(|quota, line| quotas.contains(quota.as_str()) && line.waiting() > 0);
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
        let Some(model) = self.known(&config, request)? else {
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
        let (plans, tokens) = match self.plans(&config, model, caller, tokens) {
            Ok(planned) => planned,
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
        // The refusal of the group that has room first; none if one has room now.
        let mut best: Option<Refusal> = None;
        for plan in plans {
            let refusal = match self.inner.parking.left(&plan.quota, &plan.group, self.inner.clock.now()) {
                Some((left, why)) => parked(left, why),
                None => {
                    let decision = self.inner.gate.peek(&plan.charges()).await.map_err(undecided)?;
                    if plan.reported_wait(&decision) == Some(Duration::ZERO) {
                        best = None;
                        break;
                    }
                    Denial::of(&plan, &decision).refusal
                }
            };
            let wait = |refusal: &Refusal| refusal.retry_after.unwrap_or(Duration::MAX);
            if best.as_ref().is_none_or(|known| wait(&refusal) < wait(known)) {
                best = Some(refusal);
            }
        }
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
        let config = self.config();
        let Some(model) = self.known(&config, request)? else {
            let tokens = self.tokens(&config, None, request, counted);
            return Ok(Admission::unlimited(self.inner.clone(), tokens, counted.encoding, request.model()));
        };
        let tokens = self.tokens(&config, Some(model), request, counted);
        // Providers count tokens for nothing, under a limit of its own that is none of the model's.
        if request.api() == Api::CountTokens {
            return Ok(Admission::unlimited(self.inner.clone(), tokens, counted.encoding, request.model()));
        }
        let (plans, tokens) = self.plans(&config, model, caller, tokens)?;
        let within = within.unwrap_or(config.max_wait);
        if plans.is_empty() {
            let group = self.free_group(&config, model, within).await?;
            let mut admission =
                Admission::unlimited(self.inner.clone(), tokens, counted.encoding, request.model());
            (admission.quota, admission.group) = (Some(model.quota.clone()), Some(group));
            return Ok(admission);
        }
        let line = self.line(&config, &model.quota);
        let client = caller.client.as_deref().unwrap_or("default");
        let known = config.clients.iter().find(|known| known.name == client);
        let joining = Joining {
            client: client.into(),
            weight: known.map_or(1, |known| known.weight),
            priority: known.map_or(Priority::Interactive, |known| known.priority),
            cost: tokens.input.saturating_add(tokens.output).max(1),
        };
        let waits = self.inner.seen.waits(&Coming {
            model,
            client,
            priority: joining.priority,
            tokens: joining.cost,
            charges: plans.first().map_or(&[], |plan| &plan.charges),
            within,
            is_exact: counted.is_exact,
        });
        if let Some(refusal) = self.too_long(&config, &line, client, &plans, within) {
            waits.refused();
            return Err(self.with_outcomes(refusal, &plans).await);
        }
        let admitted = match self.wait(&line, joining, &plans, within, on_wait).await {
            Ok(admitted) => admitted,
            Err(refusal) => {
                waits.refused();
                return Err(self.with_outcomes(refusal, &plans).await);
            }
        };
        Ok(Admission {
            inner: self.inner.clone(),
            line: Some(line.clone()),
            seen: Some(waits.admitted(&admitted.plan.charges, admitted.waited)),
            quota: Some(model.quota.clone()),
            group: Some(admitted.plan.group.clone()),
            plan: Some(admitted.plan),
            held: Some(admitted.reservation),
            tokens,
            encoding: counted.encoding,
            model: model.name.clone(),
            waited: admitted.waited,
            admitted_at: admitted.at,
            window: config.window,
            produced: None,
            share: None,
        })
    }

    /// The refusal of a call whose time is over before its client's earlier calls can all have been sent, so that it need not wait in
    /// vain. Requests are never given back, so this is the least time that they take.
    fn too_long(
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
    async fn with_outcomes(&self, mut refusal: Refusal, plans: &[Plan]) -> Refusal {
        if refusal.standing.is_empty()
            && let Some(plan) = plans.first()
            && let Ok(decision) = self.inner.gate.peek(&plan.charges()).await
        {
            refusal.standing = standing(plan, &decision);
        }
        refusal
    }

    /// Stands in line until one of the plans is reserved.
    async fn wait(
        &self,
        line: &Line,
        joining: Joining,
        plans: &[Plan],
        within: Duration,
        on_wait: impl FnOnce(&Refusal) + Send,
    ) -> Result<Admitted, Refusal> {
        let clock = &self.inner.clock;
        let started = clock.now();
        let margin = plans.iter().map(Plan::margin).max().unwrap_or_default();
        let deadline = started.saturating_add(Micros::from(within.saturating_add(margin)));
        let Some(ticket) = line.join(joining) else {
            let reason = format!("too many calls wait for this model already ({})", line.waiting());
            return Err(Refusal {
                kind: RefusalKind::LineFull,
                reason,
                retry_after: Some(Duration::from_secs(1)),
                standing: Vec::new(),
            });
        };
        let mut on_wait = Some(on_wait);
        let (mut tried, mut last) = (None, None);
        loop {
            let turn = ticket.turn(tried, deadline).instrument(tracing::info_span!("wait"));
            let Some(nudges) = turn.await else {
                return Err(match last {
                    Some(refusal) => refusal,
                    None => self.refusal_in_line(&ticket, plans).await?,
                });
            };
            let reserving = self.try_each(plans).instrument(tracing::info_span!("reserve"));
            let refusal = match reserving.await? {
                Ok((index, reservation)) => {
                    let plan = plans[index].clone();
                    ticket.admitted();
                    let at = clock.now();
                    let waited = Duration::from(at.saturating_sub(started));
                    return Ok(Admitted { plan, reservation, waited, at });
                }
                Err(refusal) => refusal,
            };
            let Some(wait) = refusal.wait else { return Err(refusal.refusal) };
            let now = clock.now();
            let until = now.saturating_add(wait);
            // What nobody can give back in time is not waited for.
            let is_fixed =
                refusal.is_parked || (!line.has_open() && !refusal.is_own && !self.is_remote(plans));
            let is_in_vain = refusal.of_requests.is_some_and(|wait| now.saturating_add(wait) > deadline);
            if now >= deadline || is_in_vain || (until > deadline && is_fixed) {
                return Err(refusal.refusal);
            }
            // A wait for the margin alone is nobody's limit.
            let is_limited = refusal.refusal.retry_after != Some(Duration::ZERO);
            if let Some(on_wait) = on_wait.take_if(|_| is_limited) {
                on_wait(&refusal.refusal);
            }
            let until = if self.is_remote(plans) { until.min(now.saturating_add(LOOK_AGAIN)) } else { until };
            if refusal.is_own {
                ticket.step_aside(until);
            }
            (tried, last) = (Some((until, nudges)), Some(refusal.refusal));
        }
    }

    /// Tries each quota group in turn, another one first each time.
    async fn try_each(&self, plans: &[Plan]) -> Result<Result<(usize, Reservation), Denial>, Refusal> {
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
                    match self.inner.gate.reserve(&plan.charges(), TTL).await.map_err(undecided)? {
                        Ok(reservation) => return Ok(Ok((index, reservation))),
                        Err(denied) => Denial::of(plan, denied.decision()),
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

    /// The answer to a waiter whose turn never came.
    async fn refusal_in_line(&self, ticket: &Ticket<'_>, plans: &[Plan]) -> Result<Refusal, Refusal> {
        let plan = &plans[0];
        let decision = self.inner.gate.peek(&plan.charges()).await.map_err(undecided)?;
        let mut refusal = Denial::of(plan, &decision).refusal;
        if decision.is_allowed() {
            refusal.reason = format!("{} calls wait for this model", ticket.waiting());
        }
        // At least what it would wait for alone.
        refusal.retry_after = Some(refusal.retry_after.unwrap_or_default().max(Duration::from_millis(100)));
        Ok(refusal)
    }

    fn is_remote(&self, plans: &[Plan]) -> bool {
        let limit = plans.first().and_then(|plan| plan.charges.first());
        limit.is_some_and(|charge| self.inner.gate.local(&charge.limit).is_err())
    }

    /// The configured model; `None` for one that passes without limits.
    fn known<'c>(
        &self,
        config: &'c LlmConfig,
        request: &ModelRequest<'_>,
    ) -> Result<Option<&'c ModelConfig>, Refusal> {
        let name = request.model();
        let found = config.model(name);
        match (found, config.unknown_model) {
            (Some(model), _) => Ok(Some(model)),
            (None, UnknownModel::Refuse) => Err(Refusal::new(
                RefusalKind::UnknownModel,
                format!(
                    "the model `{}` does not exist or is not configured here",
                    crate::request::shown(name)
                ),
            )),
            (None, UnknownModel::Pass) => {
                let mut warned = self.inner.warned.lock();
                if warned.len() < WARNED && warned.insert(name.to_owned()) {
                    let model = crate::request::shown(name);
                    tracing::warn!(
                        model,
                        "a model is called that has no limits; add it to [llm.models], or set unknown_model"
                    );
                }
                Ok(None)
            }
        }
    }

    fn line(&self, config: &LlmConfig, quota: &str) -> Arc<Line> {
        let mut lines = self.inner.lines.lock();
        let new =
            || Arc::new(Line::new(self.inner.clock.clone(), config.max_waiting, Micros::from(config.window)));
        lines.entry(quota.to_owned()).or_insert_with(new).clone()
    }

    fn tokens(
        &self,
        config: &LlmConfig,
        model: Option<&ModelConfig>,
        request: &ModelRequest<'_>,
        counted: Counted,
    ) -> Tokens {
        let learned = self.inner.learned.lock().get(request.model()).cloned().unwrap_or_default();
        let input = learned.input(counted.tokens, counted.is_exact);
        let kind = model.and_then(|model| config.upstream(&model.upstream)).map(|upstream| upstream.kind);
        let is_anthropic = kind.map_or(request.api().is_anthropic(), |kind| kind == UpstreamKind::Anthropic);
        let exempts = is_anthropic && !model.is_some_and(|model| model.count_cache_reads);
        let charged_input = if exempts { learned.charged(input) } else { input };
        let guess =
            learned.output().unwrap_or(config.default_output_tokens).saturating_mul(request.answers());
        let (output, is_guess) = match request.cap() {
            _ if !request.api().generates() => (0, true),
            // The provider counts output as it is produced, so the cap is no more than a bound of the guess.
            Some(cap) if is_anthropic => (guess.min(cap), true),
            Some(cap) => (cap, false),
            None => (guess, true),
        };
        Tokens { counted: counted.tokens, input, charged_input, output, is_guess }
    }

    /// The plans for each quota group, made to fit: a guessed output is lowered to what the limits hold. What is larger than a limit
    /// all the same is refused, or charged as all of the limit.
    fn plans(
        &self,
        config: &LlmConfig,
        model: &ModelConfig,
        caller: &Caller,
        mut tokens: Tokens,
    ) -> Result<(Vec<Plan>, Tokens), Refusal> {
        let groups = groups(config, model);
        let client = caller.client.as_deref();
        let policy = self.inner.gate.policy();
        let capacity = |charge: &Planned| capacity(&policy, charge);
        let plan = |tokens: &Tokens, group: &str| Plan::of(config, model, client, group, tokens);
        if tokens.is_guess {
            for charge in plan(&tokens, groups[0]).iter().flat_map(|plan| &plan.charges) {
                let Some(capacity) = capacity(charge) else { continue };
                let most = match charge.counts {
                    Counts::Tokens => capacity.saturating_sub(tokens.charged_input),
                    Counts::OutputTokens => capacity,
                    _ => continue,
                };
                tokens.output = tokens.output.min(most);
            }
        }
        let mut plans = Vec::new();
        for group in groups {
            let Some(mut plan) = plan(&tokens, group) else { continue };
            for charge in &mut plan.charges {
                let Some(capacity) = capacity(charge).filter(|capacity| charge.cost > *capacity) else {
                    continue;
                };
                if config.on_oversize == Oversize::Reject {
                    let reason = format!(
                        "Token limit exceeded: {} tokens / {capacity} {}; the request alone is larger than the limit",
                        charge.cost, charge.unit
                    );
                    return Err(Refusal::new(RefusalKind::Never, reason));
                }
                charge.cost = capacity;
            }
            plans.push(plan);
        }
        Ok((plans, tokens))
    }
}

/// What a charge can hold at most; `None` where nothing denies it.
fn capacity(policy: &Policy, charge: &Planned) -> Option<u64> {
    let rule = policy.rule(&charge.limit).filter(|rule| !rule.is_shadow())?;
    match rule.allowance_for(&Key::parse(charge.key.as_str()).ok()?) {
        Allowance::Limited(limit) => Some(limit.capacity()),
        Allowance::Unlimited | Allowance::Blocked => None,
    }
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

/// A denial, and what to do about it.
struct Denial {
    refusal: Refusal,
    wait: Option<Micros>,
    /// Whether only limits of the client itself deny.
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
        let is_own = denied().next().is_some() && denied().all(|(_, charge)| charge.is_own);
        let requests = denied().filter(|(_, charge)| charge.counts == Counts::Requests);
        let of_requests = requests.filter_map(|(outcome, _)| outcome.retry_after()).max().map(Micros::from);
        Denial { refusal, wait: retry_after.map(Micros::from), is_own, is_parked: false, of_requests }
    }

    fn parked(left: Micros, why: &str) -> Denial {
        let refusal = parked(left, why);
        Denial { refusal, wait: Some(left), is_own: false, is_parked: true, of_requests: None }
    }
}

/// What an admission has reserved.
struct Admitted {
    plan: Plan,
    reservation: Reservation,
    waited: Duration,
    at: Micros,
}

fn reason(plan: &Plan, decision: &Decision) -> String {
    let binding = decision.binding();
    let found =
        decision.outcomes().iter().zip(&plan.charges).find(|(outcome, _)| std::ptr::eq(*outcome, binding));
    let Some((outcome, charge)) = found else { return decision.to_string() };
    let (used, capacity, unit) = (outcome.used(), outcome.capacity(), charge.unit);
    match charge.counts {
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

/// A call that may be sent, with what is reserved for it. It is settled once; dropped unsettled, it stays charged as reserved.
#[must_use = "an admission that is not settled stays charged as reserved"]
pub struct Admission {
    inner: Arc<Inner>,
    line: Option<Arc<Line>>,
    seen: Option<SeenOpen>,
    plan: Option<Plan>,
    held: Option<Reservation>,
    tokens: Tokens,
    encoding: Encoding,
    model: String,
    /// The quota and the group of keys; none for a model that is not configured.
    quota: Option<String>,
    group: Option<String>,
    waited: Duration,
    admitted_at: Micros,
    window: Duration,
    produced: Option<Produced>,
    /// Its share of what was reserved for a batch.
    share: Option<Share>,
}

/// Output that has been charged as it was produced.
struct Produced {
    /// What is reserved for what comes next, if there was room.
    held: Option<Reservation>,
    plan: Plan,
    /// How much of the output was charged before that.
    settled: u64,
    since: Micros,
}

impl Admission {
    fn unlimited(inner: Arc<Inner>, tokens: Tokens, encoding: Encoding, model: &str) -> Admission {
        Admission {
            inner,
            line: None,
            seen: None,
            plan: None,
            held: None,
            tokens,
            encoding,
            model: model.to_owned(),
            quota: None,
            group: None,
            waited: Duration::ZERO,
            admitted_at: Micros::ZERO,
            window: Duration::ZERO,
            produced: None,
            share: None,
        }
    }

    /// What its input was reckoned at.
    pub fn estimated_input(&self) -> u64 {
        self.tokens.input
    }

    /// What was reserved, input and output.
    pub fn reserved(&self) -> u64 {
        self.tokens.charged_input.saturating_add(self.tokens.output)
    }

    /// How long it waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The encoding that counts its texts.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The quota group that is charged, if any is.
    pub fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    /// How its limits stand with it.
    pub fn standing(&self) -> Vec<Standing> {
        match (&self.plan, &self.held) {
            (Some(plan), Some(held)) => standing(plan, held.decision()),
            _ => Vec::new(),
        }
    }

    /// What a call is reckoned at whose provider reports nothing: the estimate of its input, and what was produced.
    pub fn estimate(&self, output: u64) -> Usage {
        Usage { input: self.tokens.input, cached: 0, output }
    }

    /// Settles it with what the provider has reported, and learns from it.
    pub async fn settle(self, usage: Usage) -> Result<(), tollgate::Error> {
        if let Some(plan) = &self.plan {
            let charged = usage.charged_input(plan.kind, plan.count_cache_reads);
            let mut learned = self.inner.learned.lock();
            let learned = learned.entry(self.model.clone()).or_default();
            learned.learn(self.tokens.counted, usage.input, charged, Some(usage.output));
        }
        self.note(&usage, true);
        self.apply(&usage).await
    }

    /// Settles it with an estimate: nothing that cannot be proven is given back. Input is charged as reserved, output as produced where
    /// the answer has ended, else as reserved or as produced, whichever is more.
    pub async fn settle_estimated(self, output: u64, has_ended: bool) -> Result<(), tollgate::Error> {
        let output = if has_ended { output } else { output.max(self.tokens.output) };
        let charged = self.tokens.charged_input;
        let usage = Usage { input: charged, cached: 0, output };
        self.note(&usage, false);
        self.apply(&usage).await
    }

    /// Settles it with what is known of an answer that ended early. Nothing is learned from it.
    pub async fn settle_partial(self, usage: Usage) -> Result<(), tollgate::Error> {
        self.note(&usage, false);
        self.apply(&usage).await
    }

    /// The provider refused the call before it ran: it counts as a request and used no tokens.
    pub async fn refused(self) -> Result<(), tollgate::Error> {
        self.apply(&Usage::default()).await
    }

    /// The call was never sent: all is given back.
    pub async fn cancel(mut self) -> Result<(), tollgate::Error> {
        if let Some(share) = self.share.take() {
            return share.cancel().await;
        }
        match self.held.take() {
            Some(held) => held.cancel().await.map(drop),
            None => Ok(()),
        }
    }

    /// Keeps the places under concurrency limits. To be called every 20 seconds while the call runs.
    pub async fn renew(&self) -> Result<(), tollgate::Error> {
        let has_place = |plan: &Plan| plan.charges.iter().any(|charge| charge.counts == Counts::Concurrency);
        if let (Some(plan), Some(share)) = (&self.plan, &self.share)
            && has_place(plan)
        {
            return share.renew().await;
        }
        match (&self.plan, &self.held) {
            (Some(plan), Some(held)) if has_place(plan) => held.renew().await.map(drop),
            _ => Ok(()),
        }
    }

    /// Charges output as it is produced, for providers that count it so: what has come so far is settled where it was reserved, and
    /// what is still expected is reserved anew, so that a long answer counts in the minutes in which it was written. `input` is what
    /// was reported of the input.
    pub async fn produced(&mut self, input: Option<Usage>, output: u64) -> Result<(), tollgate::Error> {
        let (Some(plan), Some(input)) = (&self.plan, input) else { return Ok(()) };
        // A place that is held for the whole call cannot be settled before its end.
        let counts = |wanted: Counts| plan.charges.iter().any(|charge| charge.counts == wanted);
        let is_counted =
            plan.kind == UpstreamKind::Anthropic && !counts(Counts::Concurrency) && self.share.is_none();
        if !is_counted || !(counts(Counts::OutputTokens) || counts(Counts::Tokens)) {
            return Ok(());
        }
        let now = self.inner.clock.now();
        let since = self.produced.as_ref().map_or(Micros::ZERO, |produced| produced.since);
        let settled = self.produced.as_ref().map_or(0, |produced| produced.settled);
        let plan = plan.clone();
        let step = Micros::new(Micros::from(self.window).get() / 60);
        if output <= settled || now < since.saturating_add(step) {
            return Ok(());
        }
        // What has come is settled first, which makes the room that the rest needs.
        match &self.produced {
            Some(Produced { held: Some(held), plan, settled, .. }) => {
                let actuals = vec![output.saturating_sub(*settled); plan.charges.len()];
                held.settle_each(&actuals).await?;
            }
            // Nothing is held that could take it: it is charged with what comes next.
            Some(Produced { held: None, .. }) => {}
            None => {
                if let Some(held) = self.held.take() {
                    held.settle_each(&plan.actuals(&Usage { output, ..input })).await?;
                }
            }
        }
        let has_settled = self.produced.as_ref().is_none_or(|produced| produced.held.is_some());
        let settled = if has_settled { output } else { settled };
        let next = plan.of_output(self.tokens.output.saturating_sub(output));
        let held = match self.inner.gate.reserve(&next.charges(), TTL).await? {
            Ok(held) => Some(held),
            // The answer goes on all the same. One token is enough to charge the rest to, as debt.
            Err(_) => self.inner.gate.reserve(&plan.of_output(1).charges(), TTL).await?.ok(),
        };
        self.produced = Some(Produced { held, plan: next, settled, since: now });
        self.nudge();
        Ok(())
    }

    async fn apply(mut self, usage: &Usage) -> Result<(), tollgate::Error> {
        let plan = self.plan.take();
        if let (Some(plan), Some(share)) = (&plan, self.share.take()) {
            return share.settle(&plan.actuals(usage)).await;
        }
        if let Some(produced) = self.produced.take() {
            // The rest was settled as it was produced.
            return self.settle_rest(&produced, usage.output).await;
        }
        match (plan, self.held.take()) {
            (Some(plan), Some(held)) => held.settle_each(&plan.actuals(usage)).await.map(drop),
            _ => Ok(()),
        }
    }

    /// Charges the output that is not charged yet. If nothing is held for it, it is charged as soon as there is room for one token.
    async fn settle_rest(&self, produced: &Produced, output: u64) -> Result<(), tollgate::Error> {
        let more = output.saturating_sub(produced.settled);
        let actuals = vec![more; produced.plan.charges.len()];
        if let Some(held) = &produced.held {
            return held.settle_each(&actuals).await.map(drop);
        }
        if more == 0 {
            return Ok(());
        }
        let one = produced.plan.of_output(1);
        match self.inner.gate.reserve_within(&one.charges(), TTL, self.window.saturating_mul(2)).await? {
            Ok(held) => held.settle_each(&actuals).await.map(drop),
            Err(_) => Ok(()),
        }
    }

    /// For those who look.
    fn note(&self, usage: &Usage, is_reported: bool) {
        if let Some(seen) = &self.seen {
            seen.settled(usage, self.tokens.input, self.reserved(), is_reported);
        }
    }

    fn nudge(&self) {
        self.line.iter().for_each(|line| line.nudge());
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        // What was reserved stays charged, but nobody needs its place under a concurrency limit any more.
        if let (Some(plan), Some(held)) = (self.plan.take(), self.held.take())
            && plan.charges.iter().any(|charge| charge.counts == Counts::Concurrency)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let actuals = plan.as_reserved();
            runtime.spawn(async move { held.settle_each(&actuals).await.map(drop) });
        }
        self.line.iter().for_each(|line| line.settled());
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission")
            .field("model", &self.model)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}
