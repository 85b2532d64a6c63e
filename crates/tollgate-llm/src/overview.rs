//! What an operator sees of language models: how full each model is, who waits for what and why, and how good the estimates are.
//!
//! `limits.rs` notes in [`Seen`] what becomes of calls. It keeps sums of the last hour, in constant memory: it knows configured models and
//! clients and nothing else. What counts under a limit is asked of the gate, and when it is whose turn is the kernel's to say: nothing
//! here counts or decides. No text of a call and no key is kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::store::Cost;
use tollgate::store::Micros;
use tollgate::{Allowance, Charge, Clock, Key, Tollgate};

use crate::config::{Counts, LlmConfig, ModelConfig, Priority, llm_key};
use crate::limits::ModelLimits;
use crate::plan::Planned;
use crate::usage::Usage;

const MINUTE: u64 = 60_000_000;

/// How many minutes sums are kept for, and how many ratios and waits.
const MINUTES: usize = 60;
const REMEMBERED: usize = 128;

/// How many waiting calls are shown, of each quota.
const MOST_SHOWN: usize = 25;

/// One, in parts of a ratio.
const ONE: u64 = 1_000;

/// All there is to see at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelsOverview {
    /// The window of limits a minute.
    pub window: Duration,
    /// Each configured model.
    pub models: Vec<ModelView>,
    /// Those who wait, next first.
    pub line: Vec<WaitingCall>,
    /// How many wait in all.
    pub waiting: usize,
    /// The groups of upstream keys.
    pub groups: Vec<GroupView>,
    /// Who used how much, most first.
    pub clients: Vec<ClientView>,
    /// How long calls waited: the median of the last ones that had to.
    pub median_wait: Option<Duration>,
    /// What was reserved, and what came of it, in the last hour.
    pub settlement: Settlement,
}

/// How one model stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelView {
    /// Its name.
    pub model: String,
    /// Its upstream.
    pub upstream: String,
    /// The quota that it shares with others of the same quota.
    pub quota: String,
    /// Whether its limits are in shadow mode.
    pub shadow: bool,
    /// Its limits, all groups of keys together.
    pub limits: Vec<ModelLimitView>,
    /// How many calls wait for its quota.
    pub waiting: usize,
    /// How long the one has waited that has waited longest.
    pub longest_wait: Option<Duration>,
    /// How many calls were refused in the last hour.
    pub refused: u64,
    /// The tokens of each of the last minutes, oldest first.
    pub input: Vec<u64>,
    /// See `input`.
    pub output: Vec<u64>,
    /// How true estimates of the input were.
    pub estimates: Option<Estimates>,
}

/// How one limit of a model stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelLimitView {
    /// Its name.
    pub limit: String,
    /// `RPM`, `TPM` and so on.
    pub unit: &'static str,
    /// What is used, with what is reserved; missing where the store cannot be asked.
    pub used: Option<u64>,
    /// What of it is reserved by calls under way.
    pub reserved: u64,
    /// What it allows.
    pub capacity: u64,
}

/// True input ÷ estimated input, in parts of a thousand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimates {
    /// The ratio that 5, 50 and 95 of 100 calls are not above.
    pub p5: u64,
    /// See `p5`.
    pub p50: u64,
    /// See `p5`.
    pub p95: u64,
    /// Of how many calls.
    pub calls: usize,
    /// What counts are multiplied by; `None` where they are exact.
    pub factor: Option<u64>,
}

/// A call that waits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitingCall {
    /// The client's name, or `default`.
    pub client: String,
    /// Whether it is a batch call.
    pub is_batch: bool,
    /// Its model.
    pub model: String,
    /// What it may use.
    pub tokens: u64,
    /// Why it waits, in a sentence.
    pub reason: String,
    /// When it is expected to go; `None` if that cannot be said.
    pub goes_in: Option<Duration>,
    /// When it gives up.
    pub gives_up_in: Duration,
    /// For how long it has waited.
    pub waited: Duration,
}

/// A group of upstream keys.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupView {
    /// The upstream.
    pub upstream: String,
    /// The group.
    pub group: String,
    /// How many keys it has; none if callers bring their own.
    pub keys: usize,
    /// How often the provider refused one of its calls in the last hour because of a limit.
    pub limited: u64,
    /// For how long yet the provider asked to leave it alone.
    pub rest: Option<Duration>,
}

/// What one client used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientView {
    /// Its name, or `default`.
    pub client: String,
    /// Its weight.
    pub weight: u64,
    /// Its tokens of the last hour.
    pub tokens: u64,
}

/// What was reserved, and what came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settlement {
    /// What was reserved for calls that are settled, in tokens.
    pub reserved: u64,
    /// What of it was given back.
    pub given_back: u64,
    /// What was used.
    pub used: u64,
    /// What of it was beyond the reservation.
    pub beyond: u64,
    /// How many calls were settled without a report of their usage.
    pub unreported: u64,
    /// How many calls are under way.
    pub open: usize,
}

/// Sums of the last minutes.
#[derive(Clone, Debug)]
struct Minutes([(u64, u64); MINUTES]);

impl Default for Minutes {
    fn default() -> Minutes {
        Minutes([(0, 0); MINUTES])
    }
}

impl Minutes {
    fn add(&mut self, now: Micros, count: u64) {
        let minute = now.get() / MINUTE;
        let index = usize::try_from(minute % MINUTES as u64).unwrap_or(0);
        let place = &mut self.0[index];
        if place.0 != minute {
            *place = (minute, 0);
        }
        place.1 = place.1.saturating_add(count);
    }

    /// Each of the last minutes, the one that runs last.
    fn series(&self, now: Micros) -> Vec<u64> {
        let minute = now.get() / MINUTE;
        let first = (minute + 1).saturating_sub(MINUTES as u64);
        let of = |minute: u64| {
            let place = self.0[usize::try_from(minute % MINUTES as u64).unwrap_or(0)];
            if place.0 == minute { place.1 } else { 0 }
        };
        (first..=minute).map(of).collect()
    }

    fn sum(&self, now: Micros) -> u64 {
        self.series(now).into_iter().fold(0, u64::saturating_add)
    }
}

/// The newest values.
#[derive(Clone, Debug, Default)]
struct Newest {
    values: Vec<u64>,
    next: usize,
}

impl Newest {
    fn push(&mut self, value: u64) {
        if self.values.len() < REMEMBERED {
            self.values.push(value);
        } else {
            self.values[self.next] = value;
        }
        self.next = (self.next + 1) % REMEMBERED;
    }

    /// The values that so many of a hundred are not above.
    fn percentiles<const N: usize>(&self, of_hundred: [usize; N]) -> Option<[u64; N]> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        Some(of_hundred.map(|percent| sorted[(last * percent).div_ceil(100)]))
    }
}

#[derive(Debug, Default)]
struct OfModel {
    input: Minutes,
    output: Minutes,
    refused: Minutes,
    ratios: Newest,
    is_exact: bool,
}

#[derive(Debug, Default)]
struct OfGroup {
    limited: Minutes,
    /// Until when the provider asked to leave it alone.
    rests_until: Micros,
}

#[derive(Debug)]
struct Open {
    since: Micros,
    charges: Vec<(String, u64)>,
}

#[derive(Clone, Debug)]
struct Waiter {
    model: String,
    quota: String,
    client: String,
    priority: Priority,
    joined: Micros,
    deadline: Micros,
    tokens: u64,
    charges: Vec<Planned>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    models: HashMap<String, OfModel>,
    clients: HashMap<String, Minutes>,
    groups: HashMap<String, OfGroup>,
    open: HashMap<u64, Open>,
    waiting: BTreeMap<u64, Waiter>,
    waits: Newest,
    sums: [Minutes; 5],
}

/// What has been seen of calls.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    clock: Clock,
    state: Arc<Mutex<State>>,
}

/// A call that comes in.
pub(crate) struct Coming<'a> {
    pub(crate) model: &'a ModelConfig,
    pub(crate) client: &'a str,
    pub(crate) priority: Priority,
    pub(crate) tokens: u64,
    pub(crate) charges: &'a [Planned],
    pub(crate) within: Duration,
    pub(crate) is_exact: bool,
}

/// A call in line, seen until it is dropped.
pub(crate) struct SeenWaiting {
    seen: Seen,
    number: u64,
    is_exact: bool,
}

/// A call under way, seen until it is dropped.
#[derive(Debug)]
pub(crate) struct SeenOpen {
    seen: Seen,
    number: u64,
    model: String,
    client: String,
    is_exact: bool,
}

impl Seen {
    pub(crate) fn new(clock: Clock) -> Seen {
        Seen { clock, state: Arc::default() }
    }

    /// A call stands in line.
    pub(crate) fn waits(&self, coming: &Coming<'_>) -> SeenWaiting {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.last += 1;
        let number = state.last;
        let waiter = Waiter {
            model: coming.model.name.clone(),
            quota: coming.model.quota.clone(),
            client: coming.client.to_owned(),
            priority: coming.priority,
            joined: now,
            deadline: now.saturating_add(Micros::from(coming.within)),
            tokens: coming.tokens,
            charges: coming.charges.to_vec(),
        };
        state.waiting.insert(number, waiter);
        SeenWaiting { seen: self.clone(), number, is_exact: coming.is_exact }
    }

    /// The provider refused a call with a key of this group because of a limit, and asked for a rest of so long.
    pub(crate) fn limited(&self, group: &str, rest: Duration) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let group = state.groups.entry(group.to_owned()).or_default();
        group.limited.add(now, 1);
        group.rests_until = group.rests_until.max(now.saturating_add(Micros::from(rest)));
    }

    /// Forgets models and clients that there are no longer.
    pub(crate) fn reload(&self, config: &LlmConfig) {
        let mut state = self.state.lock();
        state.models.retain(|name, _| config.model(name).is_some());
        state
            .clients
            .retain(|name, _| name == "default" || config.clients.iter().any(|one| one.name == *name));
        let groups = || config.upstreams.iter().flat_map(|upstream| &upstream.keys);
        let is_upstream = |name: &str| config.upstream(name).is_some();
        state.groups.retain(|name, _| is_upstream(name) || groups().any(|key| key.group == *name));
    }
}

impl SeenWaiting {
    /// It was admitted.
    pub(crate) fn admitted(self, charges: &[Planned], waited: Duration) -> SeenOpen {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        let (model, client) = match state.waiting.get(&self.number) {
            Some(waiter) => (waiter.model.clone(), waiter.client.clone()),
            None => Default::default(),
        };
        let charges = charges.iter().map(|charge| (charge.limit.clone(), charge.cost)).collect();
        state.open.insert(self.number, Open { since: now, charges });
        if !waited.is_zero() {
            state.waits.push(Micros::from(waited).get());
        }
        drop(state);
        let (seen, number, is_exact) = (self.seen.clone(), self.number, self.is_exact);
        SeenOpen { seen, number, model, client, is_exact }
    }

    /// It was refused.
    pub(crate) fn refused(self) {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        if let Some(model) = state.waiting.get(&self.number).map(|waiter| waiter.model.clone()) {
            state.models.entry(model).or_default().refused.add(now, 1);
        }
    }
}

impl Drop for SeenWaiting {
    fn drop(&mut self) {
        self.seen.state.lock().waiting.remove(&self.number);
    }
}

impl SeenOpen {
    /// It was settled with this usage. `estimated` is what its input was reckoned at, `reserved` what was reserved of all; what is not
    /// reported is not compared.
    pub(crate) fn settled(&self, usage: &Usage, estimated: u64, reserved: u64, is_reported: bool) {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        let used = usage.input.saturating_add(usage.output);
        let model = state.models.entry(self.model.clone()).or_default();
        model.input.add(now, usage.input);
        model.output.add(now, usage.output);
        if is_reported && estimated > 0 && usage.input > 0 {
            let ratio = u128::from(usage.input) * u128::from(ONE) / u128::from(estimated);
            model.ratios.push(u64::try_from(ratio).unwrap_or(u64::MAX));
            model.is_exact = self.is_exact;
        }
        state.clients.entry(self.client.clone()).or_default().add(now, used);
        let sums = [
            reserved,
            reserved.saturating_sub(used),
            used,
            used.saturating_sub(reserved),
            u64::from(!is_reported),
        ];
        state.sums.iter_mut().zip(sums).for_each(|(minutes, sum)| minutes.add(now, sum));
    }
}

impl Drop for SeenOpen {
    fn drop(&mut self) {
        self.seen.state.lock().open.remove(&self.number);
    }
}

/// How a limit is that waiting calls are charged to.
struct LimitState {
    used: u64,
    capacity: u64,
}

impl ModelLimits {
    /// All there is to see now. Asks the gate for each limit and for each of the first waiting calls.
    pub async fn overview(&self) -> ModelsOverview {
        let config = self.config();
        let seen = self.seen();
        let now = seen.clock.now();
        let waiting: Vec<Waiter> = seen.state.lock().waiting.values().cloned().collect();
        let mut models = Vec::new();
        for model in &config.models {
            models.push(self.model_view(&config, model, &waiting, now).await);
        }
        let line = self.line_view(&config, &waiting, now).await;
        let state = seen.state.lock();
        let mut groups = Vec::new();
        for upstream in &config.upstreams {
            for group in groups_of(&config, &upstream.name) {
                let keys = upstream.keys.iter().filter(|key| key.group == group).count();
                let known = state.groups.get(&group);
                let rest = known.map(|known| known.rests_until.saturating_sub(now));
                groups.push(GroupView {
                    upstream: upstream.name.clone(),
                    limited: known.map_or(0, |known| known.limited.sum(now)),
                    rest: rest.filter(|rest| *rest > Micros::ZERO).map(Duration::from),
                    keys,
                    group,
                });
            }
        }
        let weight =
            |name: &str| config.clients.iter().find(|client| client.name == name).map_or(1, |c| c.weight);
        let mut clients: Vec<ClientView> = state
            .clients
            .iter()
            .map(|(name, minutes)| ClientView {
                client: name.clone(),
                weight: weight(name),
                tokens: minutes.sum(now),
            })
            .filter(|client| client.tokens > 0)
            .collect();
        clients.sort_by(|one, other| other.tokens.cmp(&one.tokens).then(one.client.cmp(&other.client)));
        let [reserved, given_back, used, beyond, unreported] =
            [0, 1, 2, 3, 4].map(|index| state.sums[index].sum(now));
        let median = state.waits.percentiles([50]).map(|[wait]| Duration::from_micros(wait));
        ModelsOverview {
            window: config.window,
            waiting: waiting.len(),
            models,
            line,
            groups,
            clients,
            median_wait: median,
            settlement: Settlement { reserved, given_back, used, beyond, unreported, open: state.open.len() },
        }
    }

    async fn model_view(
        &self,
        config: &LlmConfig,
        model: &ModelConfig,
        waiting: &[Waiter],
        now: Micros,
    ) -> ModelView {
        let (seen, gate) = (self.seen(), self.gate());
        let policy = gate.policy();
        let mut limits = Vec::new();
        for limit in &model.limits {
            let (mut used, mut capacity) = (Some(0_u64), 0_u64);
            for group in groups_of(config, &model.upstream) {
                let outcome = gate.status(limit.name.as_str(), llm_key(&group).as_str()).await.ok();
                used = used.zip(outcome.as_ref()).map(|(sum, outcome)| sum.saturating_add(outcome.used()));
                capacity = capacity.saturating_add(outcome.map_or(0, |outcome| outcome.capacity()));
            }
            let reserved = seen.reserved(&limit.name, Micros::from(config.window), now);
            let reserved = reserved.min(used.unwrap_or(0));
            limits.push(ModelLimitView {
                limit: limit.name.clone(),
                unit: limit.unit,
                used,
                reserved,
                capacity,
            });
        }
        let shadow = model.limits.first().and_then(|limit| policy.rule(&limit.name));
        let of_quota = || waiting.iter().filter(|waiter| waiter.quota == model.quota);
        let longest =
            of_quota().filter(|waiter| waiter.model == model.name).map(|waiter| waiter.joined).min();
        let factor = self.factor(&model.name);
        let state = seen.state.lock();
        let known = state.models.get(&model.name);
        let series = |of: fn(&OfModel) -> &Minutes| match known {
            Some(known) => of(known).series(now),
            None => vec![0; MINUTES],
        };
        let estimates = known.and_then(|known| {
            let [p5, p50, p95] = known.ratios.percentiles([5, 50, 95])?;
            let factor = (!known.is_exact).then_some(factor);
            Some(Estimates { p5, p50, p95, calls: known.ratios.values.len(), factor })
        });
        ModelView {
            model: model.name.clone(),
            upstream: model.upstream.clone(),
            quota: model.quota.clone(),
            shadow: shadow.is_some_and(tollgate::Rule::is_shadow),
            limits,
            waiting: of_quota().filter(|waiter| waiter.model == model.name).count(),
            longest_wait: longest.map(|joined| now.saturating_sub(joined).into()),
            refused: known.map_or(0, |known| known.refused.sum(now)),
            input: series(|known| &known.input),
            output: series(|known| &known.output),
            estimates,
        }
    }

    /// Those who wait, next first, each with why.
    async fn line_view(&self, config: &LlmConfig, waiting: &[Waiter], now: Micros) -> Vec<WaitingCall> {
        let mut quotas: Vec<&str> = waiting.iter().map(|waiter| waiter.quota.as_str()).collect();
        quotas.sort_unstable();
        quotas.dedup();
        let mut line = Vec::new();
        for quota in quotas {
            let mut of_quota: Vec<&Waiter> = waiting.iter().filter(|waiter| waiter.quota == quota).collect();
            let mut ahead: HashMap<String, u64> = HashMap::new();
            let (mut place, mut before) = (0, Some(Duration::ZERO));
            for client in self.order(quota, MOST_SHOWN) {
                // Within a client they go in the order in which they came.
                let Some(index) = of_quota.iter().position(|waiter| *waiter.client == *client) else {
                    continue;
                };
                let waiter = of_quota.remove(index);
                let mut call = self.waiting_call(config, waiter, &ahead, place, now).await;
                // Only the first in line tries, so nobody goes before those who stand before it.
                call.goes_in = call.goes_in.zip(before).map(|(own, before)| own.max(before));
                before = call.goes_in;
                line.push(call);
                for charge in &waiter.charges {
                    *ahead.entry(charge.limit.clone()).or_default() += charge.cost;
                }
                place += 1;
            }
        }
        line.sort_by_key(|call| call.goes_in.unwrap_or(Duration::MAX));
        line
    }

    async fn waiting_call(
        &self,
        config: &LlmConfig,
        waiter: &Waiter,
        ahead: &HashMap<String, u64>,
        place: usize,
        now: Micros,
    ) -> WaitingCall {
        let gate = self.gate();
        let mut goes_in = Some(Micros::ZERO);
        let mut binding: Option<(Micros, &Planned, LimitState)> = None;
        for charge in &waiter.charges {
            let before = if charge.is_own { 0 } else { ahead.get(&charge.limit).copied().unwrap_or(0) };
            let Some((wait, met)) = turn(gate, charge, before).await else { continue };
            match wait {
                None => goes_in = None,
                Some(wait) => {
                    goes_in = goes_in.map(|known| known.max(wait));
                    if binding.as_ref().is_none_or(|known| wait > known.0) {
                        binding = Some((wait, charge, met));
                    }
                }
            }
        }
        WaitingCall {
            client: waiter.client.clone(),
            is_batch: waiter.priority == Priority::Batch,
            model: waiter.model.clone(),
            tokens: waiter.tokens,
            reason: why(
                config,
                waiter,
                binding.as_ref().map(|(wait, charge, met)| (*wait, *charge, met)),
                place,
                now,
            ),
            goes_in: goes_in.map(Duration::from),
            gives_up_in: waiter.deadline.saturating_sub(now).into(),
            waited: now.saturating_sub(waiter.joined).into(),
        }
    }
}

impl Seen {
    /// What calls under way have reserved of a limit within its window.
    fn reserved(&self, limit: &str, window: Micros, now: Micros) -> u64 {
        let state = self.state.lock();
        let fresh = state.open.values().filter(|open| now.saturating_sub(open.since) < window);
        let of_limit = fresh.flat_map(|open| &open.charges).filter(|(name, _)| name == limit);
        of_limit.fold(0, |sum, (_, cost)| sum.saturating_add(*cost))
    }
}

/// The groups of keys of an upstream; the upstream itself where callers bring their own.
fn groups_of(config: &LlmConfig, upstream: &str) -> Vec<String> {
    let keys = config.upstream(upstream).into_iter().flat_map(|upstream| &upstream.keys);
    let mut groups: Vec<String> = Vec::new();
    for key in keys {
        if !groups.contains(&key.group) {
            groups.push(key.group.clone());
        }
    }
    if groups.is_empty() {
        groups.push(upstream.to_owned());
    }
    groups
}

/// When a charge fits if so many units go before it, and how its limit stands; nothing where nothing is limited.
async fn turn(gate: &Tollgate, charge: &Planned, ahead: u64) -> Option<(Option<Micros>, LimitState)> {
    let rule = gate.find(&charge.limit).ok().filter(|rule| !rule.is_shadow())?;
    let Allowance::Limited(limit) = *rule.allowance_for(&Key::parse(charge.key.as_str()).ok()?) else {
        return None;
    };
    let cost = Cost::new(charge.cost).unwrap_or(Cost::ONE);
    let probe = Charge::new(&charge.limit, charge.key.as_str()).cost(limit.turn_probe(cost, ahead).get());
    let decision = gate.peek(&[probe]).await.ok()?;
    let outcome = decision.outcomes().first()?;
    let met = LimitState { used: outcome.used(), capacity: outcome.capacity() };
    Some((limit.turn(outcome.numbers(), cost, ahead, Micros::ZERO), met))
}

/// Why a call waits.
fn why(
    config: &LlmConfig,
    waiter: &Waiter,
    binding: Option<(Micros, &Planned, &LimitState)>,
    place: usize,
    now: Micros,
) -> String {
    let first = match place {
        0 => None,
        1 => Some("1 call goes first".to_owned()),
        more => Some(format!("{} calls go first", grouped(more as u64))),
    };
    let ages = waiter.joined.saturating_add(Micros::new(Micros::from(config.window).get() / 4));
    if let (Priority::Batch, Some(_)) = (waiter.priority, &first)
        && ages > now
    {
        let left = words(ages.saturating_sub(now));
        return format!(
            "It is batch, so interactive calls go first; in {left} it is treated as one of them."
        );
    }
    let Some((wait, charge, met)) = binding.filter(|(wait, ..)| *wait > Micros::ZERO) else {
        return match first {
            Some(first) => format!("It waits for its turn: {first}."),
            None => "It is its turn: it goes as soon as there is an answer.".to_owned(),
        };
    };
    let (used, capacity, unit) = (grouped(met.used), grouped(met.capacity), charge.unit);
    if charge.is_own {
        let client = &waiter.client;
        return format!(
            "It is out of its own share: {client} has {capacity} {unit} of this model and used {used}. Nobody else is held up."
        );
    }
    // What is used leaves room for it, so it is those before it who take that.
    let fits_alone = met.used.saturating_add(charge.cost) <= met.capacity;
    if let (true, Some(first)) = (fits_alone, &first) {
        return format!("It waits for its turn: {first}.");
    }
    let turn = first.map_or_else(String::new, |first| format!(" {}, and", capitalised(&first)));
    let left = words(wait);
    match charge.counts {
        Counts::Requests => {
            let room = if turn.is_empty() {
                "There is room".to_owned()
            } else {
                format!("{turn} then there is room").trim_start().to_owned()
            };
            format!("It needs a request, and {used} of {capacity} {unit} are used. {room} in {left}.")
        }
        Counts::Concurrency => {
            format!("It needs a place, and {used} of {capacity} calls run. It goes when one of them ends.")
        }
        Counts::Tokens | Counts::InputTokens | Counts::OutputTokens => {
            let cost = grouped(charge.cost);
            let room = if turn.is_empty() {
                "Enough of them leaves the window".to_owned()
            } else {
                format!("{turn} enough leaves the window").trim_start().to_owned()
            };
            format!(
                "It needs {cost} tokens, and {used} of {capacity} {unit} are used or reserved. {room} in {left}."
            )
        }
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// With a comma between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A span as people say it, rounded up.
fn words(span: Micros) -> String {
    let tenths = span.get().div_ceil(100_000);
    let seconds = span.as_secs_ceil();
    match seconds {
        0..10 => format!("{}.{} s", tenths / 10, tenths % 10),
        10..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{} h", seconds.div_ceil(3_600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_add_up_and_pass() {
        let at = |minute: u64| Micros::new(minute * MINUTE + 1);
        let mut minutes = Minutes::default();
        minutes.add(at(100), 5);
        minutes.add(at(100), 2);
        minutes.add(at(159), 1);
        assert_eq!((minutes.sum(at(159)), minutes.series(at(159)).first()), (8, Some(&7)));
        assert_eq!((minutes.sum(at(160)), minutes.sum(at(1_000))), (1, 0));
        minutes.add(at(160), 3);
        assert_eq!(minutes.series(at(160))[MINUTES - 2..], [1, 3]);
    }

    #[test]
    fn percentiles_are_of_the_newest() {
        let mut newest = Newest::default();
        assert_eq!(newest.percentiles([50]), None);
        (1..=100).for_each(|value| newest.push(value));
        assert_eq!(newest.percentiles([5, 50, 95]), Some([6, 51, 96]));
        (0..REMEMBERED).for_each(|_| newest.push(7));
        assert_eq!(newest.percentiles([0, 100]), Some([7, 7]));
    }

    #[test]
    fn numbers_and_spans_are_words() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        let of = |ms: u64| words(Micros::from_millis(ms));
        assert_eq!([of(2_010), of(14_000), of(90_000), of(601_000)], ["2.1 s", "14 s", "90 s", "11 min"]);
    }
}
