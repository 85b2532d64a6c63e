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
        Tokens { counted: counted.tokens, input, charged_input, output, is_guess, answers: request.answers() }
    }

    /// A plan for each quota group that can take the call, made to fit: a guessed output is lowered to the capacity of the group's
    /// limits. A group with a limit that is smaller than the call is left out. If that is so for all of them, the call is refused, or
    /// charged as the whole limit. Without charges there is no plan.
    pub(super) fn plans(
        &self,
        config: &LlmConfig,
        model: &ModelConfig,
        caller: &Caller,
        tokens: Tokens,
    ) -> Result<Vec<Plan>, Refusal> {
        let client = caller.client.as_deref();
        let policy = self.inner.gate.policy();
        let plan = |tokens: &Tokens, group: &str| Plan::of(config, model, client, group, tokens);
        let (mut fitting, mut oversized) = (Vec::new(), Vec::new());
        for group in groups(config, model) {
            let Some(mut planned) = plan(&tokens, group) else { continue };
            if tokens.is_guess
                && let Some(lowered) = lowered(&policy, &planned)
            {
                let Some(smaller) = plan(&lowered, group) else { continue };
                planned = smaller;
            }
            match too_small(&policy, &planned) {
                None => fitting.push(planned),
                Some(limit) => oversized.push((limit, planned)),
            }
        }
        if !fitting.is_empty() || oversized.is_empty() {
            return Ok(fitting);
        }
        if config.on_oversize == Oversize::Reject {
            let largest = oversized.iter().max_by_key(|((_, capacity), _)| *capacity);
            let Some(((at, capacity), planned)) = largest else { return Ok(fitting) };
            let Planned { cost, unit, .. } = &planned.charges[*at];
            let reason = format!(
                "Token limit exceeded: {cost} tokens / {capacity} {unit}; the request alone is larger than the limit"
            );
            return Err(Refusal::new(RefusalKind::Never, reason));
        }
        let alone = oversized.into_iter().map(|(_, mut planned)| {
            for charge in &mut planned.charges {
                charge.cost = capacity(&policy, charge).map_or(charge.cost, |most| charge.cost.min(most));
            }
            planned
        });
        Ok(alone.collect())
    }

    /// The groups of a model's keys that can never take a call which was planned so.
    pub(super) fn left_out(config: &LlmConfig, model: &ModelConfig, plans: &[Plan]) -> Vec<String> {
        let is_out = |group: &&str| !plans.iter().any(|plan| plan.group == *group);
        groups(config, model).into_iter().filter(is_out).map(str::to_owned).collect()
    }
}

/// The tokens of a plan with a smaller output, as far as that helps; `None` if it fits.
fn lowered(policy: &Policy, plan: &Plan) -> Option<Tokens> {
    let tokens = plan.tokens;
    let most = plan.charges.iter().filter_map(|charge| match charge.counts {
        Counts::Tokens => Some(capacity(policy, charge)?.saturating_sub(tokens.charged_input)),
        Counts::OutputTokens => capacity(policy, charge),
        _ => None,
    });
    let output = most.min().filter(|most| *most < tokens.output)?;
    Some(Tokens { output, ..tokens })
}

/// The first charge that is larger than its limit, and how large that is.
pub(super) fn too_small(policy: &Policy, plan: &Plan) -> Option<(usize, u64)> {
    plan.charges.iter().enumerate().find_map(|(at, charge)| {
        let most = capacity(policy, charge).filter(|most| charge.cost > *most)?;
        Some((at, most))
    })
}

/// What a charge can hold at most; `None` where nothing denies it.
pub(super) fn capacity(policy: &Policy, charge: &Planned) -> Option<u64> {
    let rule = policy.rule(&charge.limit).filter(|rule| !rule.is_shadow())?;
    match rule.allowance_for(&Key::parse(charge.key.as_str()).ok()?) {
        Allowance::Limited(limit) => Some(limit.capacity()),
        Allowance::Unlimited | Allowance::Blocked => None,
    }
}
