//! Which limits a call charges, and how much of each.
//!
//! A plan is made from the configured model, the caller and the tokens that the call may use. It holds names and amounts; the library
//! charges them, all or none. What the call has truly used becomes the amounts of a settlement in the same order.

use crate::config::{Counts, LlmConfig, ModelConfig, UpstreamKind, llm_key};
use tollgate::Charge;

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
}

/// All charges of a call: never empty.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) charges: Vec<Planned>,
    pub(crate) kind: UpstreamKind,
    pub(crate) count_cache_reads: bool,
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
            });
            planned.collect()
        };
        let mut charges = planned(&model.limits, group, false);
        if let Some(name) = client
            && let Some(client) = config.clients.iter().find(|client| client.name == name)
            && let Some(limits) = client.limits.get(&model.name)
        {
            charges.extend(planned(limits, name, true));
        }
        let count_cache_reads = model.count_cache_reads;
        (!charges.is_empty()).then_some(Plan { charges, kind, count_cache_reads })
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

    /// What is charged for output as it is produced.
    pub(crate) fn of_output(&self, expected: u64) -> Plan {
        let of_output = |planned: &&Planned| matches!(planned.counts, Counts::Tokens | Counts::OutputTokens);
        let charges = self.charges.iter().filter(of_output).cloned();
        let charges = charges.map(|planned| Planned { cost: expected.max(1), ..planned }).collect();
        Plan { charges, ..self.clone() }
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
