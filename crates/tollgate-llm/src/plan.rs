//! Which limits a call charges, and how much of each.
//!
//! A plan is made from the configured model, the caller and the tokens that the call may use. It holds names and amounts; the library
//! charges them, all or none. What the call has truly used becomes the amounts of a settlement in the same order.

use std::time::Duration;

use tollgate::store::{Cost, Micros};
use tollgate::{Allowance, Charge, Decision, Key, Tollgate};

use crate::config::{Counts, LlmConfig, ModelConfig, UpstreamKind, llm_key};
use crate::usage::Usage;

/// The tokens that a call may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// By the encoding, before anything learned.
    pub(crate) counted: u64,
    /// As the provider will report them.
    pub(crate) input: u64,
    /// Of those, what counts against limits.
    pub(crate) charged_input: u64,
    /// The largest output that is reckoned with.
    pub(crate) output: u64,
    /// Whether the output is a guess, which may be lowered to fit a limit.
    pub(crate) is_guess: bool,
    /// How many answers it asks for, which the output is of together.
    pub(crate) answers: u64,
}

/// One charge of a call.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) limit: String,
    pub(crate) key: String,
    pub(crate) counts: Counts,
    pub(crate) unit: &'static str,
    pub(crate) cost: u64,
    /// Whether only this client is charged, so that others may go on when it is out.
    pub(crate) is_own: bool,
    /// How much longer than the provider's window it counts.
    pub(crate) margin: Duration,
    /// What was charged for others before it.
    pub(crate) others: u64,
}

/// The unit of limits of `[limits]`, which are shared with what is no call of a model.
pub(crate) const SHARED: &str = "requests";

impl Planned {
    /// One request of a limit that is shared with what is no call of a model.
    fn shared(limit: &str, key: String, is_own: bool) -> Planned {
        let (limit, counts, margin) = (limit.to_owned(), Counts::Requests, Duration::ZERO);
        Planned { limit, key, counts, unit: SHARED, cost: 1, is_own, margin, others: 0 }
    }

    /// When it fits if so many units go before it (`None` within: never), and what its limit has used, and of how much; nothing where nothing is
    /// limited.
    pub(crate) async fn turn(&self, gate: &Tollgate, ahead: u64) -> Option<(Option<Micros>, u64, u64)> {
        let rule = gate.find(&self.limit).ok().filter(|rule| !rule.is_shadow())?;
        let Allowance::Limited(limit) = *rule.allowance_for(&Key::parse(self.key.as_str()).ok()?) else {
            return None;
        };
        let cost = Cost::new(self.cost).unwrap_or(Cost::ONE);
        let probe = Charge::new(&self.limit, self.key.as_str()).cost(limit.turn_probe(cost, ahead).get());
        let decision = gate.peek(&[probe]).await.ok()?;
        let outcome = decision.outcomes().first()?;
        let wait = limit.turn(outcome.numbers(), cost, ahead, Micros::ZERO);
        Some((wait, outcome.used(), outcome.capacity()))
    }

    /// What it counts, in words.
    pub(crate) const fn what(&self) -> &'static str {
        match self.counts {
            Counts::Requests => "requests",
            Counts::Concurrency => "calls",
            Counts::Tokens | Counts::InputTokens | Counts::OutputTokens => "tokens",
        }
    }
}

/// All charges of a call: never empty.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) charges: Vec<Planned>,
    pub(crate) quota: String,
    /// The group of upstream keys.
    pub(crate) group: String,
    pub(crate) kind: UpstreamKind,
    pub(crate) count_cache_reads: bool,
    /// What it may use with keys of this group: a guess is lowered to the group's limits.
    pub(crate) tokens: Tokens,
}

impl Plan {
    /// What a call of this model charges for keys of one quota group; `None` if that is nothing.
    pub(crate) fn of(
        config: &LlmConfig,
        model: &ModelConfig,
        client: Option<&str>,
        group: &str,
        tokens: &Tokens,
    ) -> Option<Plan> {
        let kind = config.upstream(&model.upstream)?.kind;
        let planned = |limits: &[crate::config::ModelLimit], key: &str, is_own: bool| -> Vec<Planned> {
            let planned = limits.iter().map(|limit| Planned {
                limit: limit.name.clone(),
                key: llm_key(key),
                counts: limit.counts,
                unit: limit.unit,
                cost: amount(limit.counts, tokens.charged_input, tokens.output).max(1),
                is_own,
                margin: limit.margin,
                others: 0,
            });
            planned.collect()
        };
        let mut charges = planned(&model.limits, group, false);
        let known = client.and_then(|name| config.clients.iter().find(|client| client.name == name));
        if let Some(client) = known
            && let Some(limits) = client.limits.get(&model.name)
        {
            charges.extend(planned(limits, &client.name, true));
        }
        let of_client = known.map(|client| (&client.shared, true));
        for (shared, is_of_client) in [Some((&model.shared, false)), of_client].into_iter().flatten() {
            for limit in &shared.limits {
                let key = shared.key(&model.name, client);
                // One attempt is one request, also where model and client name the same limit.
                if !charges.iter().any(|charge| charge.limit == *limit && charge.key == key) {
                    // What only this client uses up must not hold up the others.
                    let is_own = is_of_client || shared.is_by_client();
                    charges.push(Planned::shared(limit, key, is_own));
                }
            }
        }
        let count_cache_reads = model.count_cache_reads;
        let (quota, group, tokens) = (model.quota.clone(), group.to_owned(), *tokens);
        (!charges.is_empty()).then_some(Plan { charges, quota, group, kind, count_cache_reads, tokens })
    }

    /// As the library takes them.
    pub(crate) fn charges(&self) -> Vec<Charge<'_>> {
        let charge = |planned| {
            let Planned { limit, key, cost, .. }: &Planned = planned;
            Charge::new(limit, key.as_str()).cost(*cost)
        };
        self.charges.iter().map(charge).collect()
    }

    /// What each charge truly cost, for a call that has ended: one for each request, and nothing for a place that is given up.
    pub(crate) fn actuals(&self, usage: &Usage) -> Vec<u64> {
        let input = usage.charged_input(self.kind, self.count_cache_reads);
        let actual = |planned: &Planned| match planned.counts {
            Counts::Concurrency => 0,
            counts => amount(counts, input, usage.output),
        };
        self.charges.iter().map(actual).collect()
    }

    /// How long a denied call waits as the provider's windows are; `None` for never. The margin is not in it: a call that comes that much
    /// later is let in, and sent when the margin is over.
    pub(crate) fn reported_wait(&self, decision: &Decision) -> Option<Duration> {
        let denied =
            decision.outcomes().iter().zip(&self.charges).filter(|(outcome, _)| !outcome.is_allowed());
        let waits =
            denied.map(|(outcome, charge)| Some(outcome.retry_after()?.saturating_sub(charge.margin)));
        waits.collect::<Option<Vec<_>>>().map(|waits| waits.into_iter().max().unwrap_or_default())
    }

    /// Whether it takes a place for as long as the call runs.
    pub(crate) fn has_place(&self) -> bool {
        self.charges.iter().any(|charge| charge.counts == Counts::Concurrency)
    }

    /// The largest margin of its limits.
    pub(crate) fn margin(&self) -> Duration {
        self.charges.iter().map(|charge| charge.margin).max().unwrap_or_default()
    }

    /// Adds the charges of another call, by limit and key.
    pub(crate) fn add(&mut self, other: &Plan) {
        for charge in &other.charges {
            let is_same = |known: &&mut Planned| known.limit == charge.limit && known.key == charge.key;
            match self.charges.iter_mut().find(is_same) {
                Some(known) => known.cost = known.cost.saturating_add(charge.cost),
                None => self.charges.push(charge.clone()),
            }
        }
    }

    /// What each charge cost for a call whose usage is not known: what was reserved, and nothing for a place that is given up.
    pub(crate) fn as_reserved(&self) -> Vec<u64> {
        let as_reserved =
            |planned: &Planned| if planned.counts == Counts::Concurrency { 0 } else { planned.cost };
        self.charges.iter().map(as_reserved).collect()
    }

    /// What is charged for output as it is produced.
    pub(crate) fn of_output(&self, expected: u64) -> Plan {
        let of_output = |planned: &&Planned| matches!(planned.counts, Counts::Tokens | Counts::OutputTokens);
        let charges = self.charges.iter().filter(of_output).cloned();
        let charges = charges.map(|planned| Planned { cost: expected.max(1), ..planned }).collect();
        let tokens = Tokens { output: expected.max(1), ..self.tokens };
        Plan { charges, tokens, ..self.clone() }
    }
}

fn amount(counts: Counts, input: u64, output: u64) -> u64 {
    match counts {
        Counts::Requests | Counts::Concurrency => 1,
        Counts::Tokens => input.saturating_add(output),
        Counts::InputTokens => input,
        Counts::OutputTokens => output,
    }
}
