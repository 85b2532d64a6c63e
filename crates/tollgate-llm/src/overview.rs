//! What an operator sees of language models: how full each model is, which calls wait and why, and how good the estimates are.
//!
//! `limits.rs` notes in `seen.rs` what becomes of calls. It keeps sums of the last hour, in constant memory: it knows configured models and
//! clients and nothing else. What counts under a limit is asked of the gate, and when it is whose turn is the kernel's to say: nothing
//! here counts or decides. No text of a call and no key is kept.

mod reason;

use std::collections::HashMap;
use std::time::Duration;

use tollgate::store::Micros;

use self::reason::{LimitState, why};
use crate::config::{LlmConfig, ModelConfig, Priority, llm_key};
use crate::limits::ModelLimits;
use crate::plan::Planned;
use crate::seen::{OfModel, Tokens, Waiter, percentiles};

/// How many waiting calls are shown, of each quota.
const MOST_SHOWN: usize = 25;

/// All there is to see at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelsOverview {
    /// The window of limits a minute.
    pub window: Duration,
    /// Each configured model.
    pub models: Vec<ModelView>,
    /// The waiting calls, next first.
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
    /// How many refusals of providers, for their limits, reached a caller in the last hour.
    pub passed_on: u64,
    /// When groups of keys were parked lately, oldest first.
    pub parked: Vec<ParkedTime>,
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
    /// Its tokens of the last five minutes, hour and day.
    pub tokens: [TokenSeries; 3],
    /// How true estimates of the input were.
    pub estimates: Option<Estimates>,
}

/// Tokens over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenSeries {
    /// How many seconds each sum is of.
    pub step: u64,
    /// Input, oldest first; the last sum is of the stretch that runs.
    pub input: Vec<u64>,
    /// Output likewise.
    pub output: Vec<u64>,
}

/// A time for which the provider asked to leave a group of keys alone.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkedTime {
    /// The group.
    pub group: String,
    /// From when, since 1970.
    pub from: Duration,
    /// Until when.
    pub to: Duration,
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
    /// Since when, from 1970.
    pub parked_since: Option<Duration>,
    /// The parked groups of the same upstream whose calls it takes.
    pub stands_in_for: Vec<String>,
    /// What the provider's reports say beside our own count.
    pub reports: Reports,
}

/// What reports of a provider say beside our own count.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reports {
    /// It has reported nothing so far.
    None,
    /// Both agree.
    Agree,
    /// Somebody else uses the same quota.
    Others {
        /// So much in a window, as it is charged here.
        used: u64,
        /// Of so much.
        capacity: u64,
        /// `RPM`, `TPM` and so on.
        unit: &'static str,
    },
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
        let parked = self.parked();
        let is_parked = |group: &String| parked.iter().any(|parked| parked.group == *group);
        let state = seen.state.lock();
        let mut groups = Vec::new();
        for upstream in &config.upstreams {
            let of_upstream = groups_of(&config, &upstream.name);
            for group in of_upstream.clone() {
                let others = of_upstream.iter().filter(|other| **other != group && is_parked(other));
                let stands_in_for = match is_parked(&group) {
                    true => Vec::new(),
                    false => others.cloned().collect(),
                };
                let keys = upstream.keys.iter().filter(|key| key.group == group).count();
                let known = state.groups.get(&group);
                let rest =
                    parked.iter().filter(|parked| parked.group == group).map(|parked| parked.left).max();
                let since = state.parked.iter().rev().find(|time| time.group == group && time.to > now);
                let reports = match known.is_some_and(|known| known.has_reported) {
                    true => self.used_by_others(&config, &upstream.name, &group).unwrap_or(Reports::Agree),
                    false => Reports::None,
                };
                groups.push(GroupView {
                    parked_since: rest.and(since).map(|time| Duration::from(time.from)),
                    stands_in_for,
                    reports,
                    upstream: upstream.name.clone(),
                    limited: known.map_or(0, |known| known.limited.sum(now)),
                    rest,
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
        let median = percentiles(&state.waits, [50]).map(|([wait], _)| Duration::from_micros(wait));
        ModelsOverview {
            window: config.window,
            waiting: waiting.len(),
            models,
            line,
            groups,
            clients,
            median_wait: median,
            settlement: Settlement { reserved, given_back, used, beyond, unreported, open: state.open.len() },
            passed_on: state.passed_on.sum(now),
            parked: state
                .parked
                .iter()
                .map(|time| ParkedTime {
                    group: time.group.clone(),
                    from: time.from.into(),
                    to: time.to.into(),
                })
                .collect(),
        }
    }

    /// What somebody else uses most of, of the limits of a group.
    fn used_by_others(&self, config: &LlmConfig, upstream: &str, group: &str) -> Option<Reports> {
        let of_upstream = config.models.iter().filter(|model| model.upstream == upstream);
        let limits = of_upstream.flat_map(|model| &model.limits);
        let used = limits.filter_map(|limit| {
            let (used, capacity) = self.others_use(&limit.name, &llm_key(group))?;
            Some((used, capacity, limit.unit))
        });
        let share = |used: u64, capacity: u64| u128::from(used) * 1_000 / u128::from(capacity.max(1));
        let (used, capacity, unit) = used.max_by_key(|(used, capacity, _)| share(*used, *capacity))?;
        Some(Reports::Others { used, capacity, unit })
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
        let nothing = Tokens::default();
        let series = |of: fn(&OfModel) -> &Tokens| known.map_or(&nothing, of).series(now);
        let (input, output) = (series(|known| &known.input), series(|known| &known.output));
        let mut tokens = input.into_iter().zip(output).map(|((step, input), (_, output))| TokenSeries {
            step,
            input,
            output,
        });
        let estimates = known.and_then(|known| {
            let ([p5, p50, p95], calls) = percentiles(&known.ratios, [5, 50, 95])?;
            let factor = (!known.is_exact).then_some(factor);
            Some(Estimates { p5, p50, p95, calls, factor })
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
            tokens: std::array::from_fn(|_| tokens.next().unwrap_or_default()),
            estimates,
        }
    }

    /// The waiting calls, next first, each with why.
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
                // Only the first in line tries, so no call overtakes the calls before it.
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
            let Some((wait, used, capacity)) = charge.turn(gate, before).await else { continue };
            let met = LimitState { used, capacity };
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
