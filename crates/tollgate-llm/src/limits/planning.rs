//! The charges of a call: its model, the tokens that it may use, and a plan for each quota group.

use tollgate::{Allowance, Key, Policy};

use super::feedback::groups;
use super::{Caller, ModelLimits, Refusal, RefusalKind, WARNED};
use crate::config::{Counts, LlmConfig, ModelConfig, Oversize, UnknownModel, UpstreamKind};
use crate::count::Counted;
use crate::plan::{Plan, Planned, Tokens};
use crate::request::ModelRequest;

impl ModelLimits {
    /// The configured model; `None` for one that passes without limits.
    pub(super) fn known<'c>(
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
                    "the model `{}` does not exist or is not configured here; GET /v1/models lists the models",
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

    pub(super) fn tokens(
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

    /// The plans for each quota group, made to fit: a guessed output is lowered to the capacity of the limits. A call that is
    /// still larger than a limit is refused, or charged as the whole limit.
    pub(super) fn plans(
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
pub(super) fn capacity(policy: &Policy, charge: &Planned) -> Option<u64> {
    let rule = policy.rule(&charge.limit).filter(|rule| !rule.is_shadow())?;
    match rule.allowance_for(&Key::parse(charge.key.as_str()).ok()?) {
        Allowance::Limited(limit) => Some(limit.capacity()),
        Allowance::Unlimited | Allowance::Blocked => None,
    }
}
