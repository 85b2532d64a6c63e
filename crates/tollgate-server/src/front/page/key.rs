//! Everything about one key: its state under each limit, the last decisions, and the changes of its overrides. For admins,
//! because it shows overrides with their reasons; the key comes in the body of a request and never in a URL.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tollgate::config::StoreMode;
use tollgate::{Allowance, Key, Limit, Outcome, Rule};

use super::super::json::described;
use crate::app::{App, State};
use crate::overrides::timestamp;
use crate::stats::recent::{DECISIONS, Recent};
use crate::stats::ring::Counted;

/// How many limits are looked at, and how many at once.
const LIMITS: usize = 200;
const AT_ONCE: usize = 8;

/// All of it.
pub(crate) async fn key_view(app: &Arc<App>, key: &Key<'_>) -> Bytes {
    app.overrides.look(app).await;
    let state = app.state();
    let text = key.canonical();
    let retained = app.stats.retained(text);
    let recent = &retained.decisions;
    let policy = state.gate.policy();
    let rules = &policy.rules()[..policy.rules().len().min(LIMITS)];
    let outcomes = outcomes(&state, rules, key).await;
    let limits: Vec<Value> = rules
        .iter()
        .zip(outcomes)
        .map(|(rule, outcome)| limit(app, &state, rule, key, outcome, recent))
        .collect();
    let mode = state.config.gate.store.mode;
    let view = json!({
        "key": text,
        "key_hash": app.stats.key_hash(text),
        "second": app.stats.second(),
        "limits": limits,
        "more_limits": policy.rules().len().saturating_sub(LIMITS),
        "most_decisions": DECISIONS,
        "kept_since_ms": retained.since_us.div_ceil(1_000),
        "decisions": recent.iter().map(decision).collect::<Vec<Value>>(),
        "troubles": app.feed.troubles(),
        "changes": app.overrides.changes(app, Some(key)).await,
        "kept": mode.name(),
        "survives_restart": mode != StoreMode::Memory,
    });
    view.to_string().into()
}

/// How the key stands under each rule, in their order; `None` where the store did not answer.
async fn outcomes(state: &Arc<State>, rules: &[Rule], key: &Key<'_>) -> Vec<Option<Outcome>> {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = JoinSet::new();
    let key = Arc::new(key.clone().into_owned());
    for (index, rule) in rules.iter().enumerate() {
        let (state, room, limit, key) = (state.clone(), room.clone(), rule.name().to_owned(), key.clone());
        tasks.spawn(async move {
            let _room = room.acquire().await;
            (index, state.gate.status(limit.as_str(), &*key).await.ok())
        });
    }
    let mut all = vec![None; rules.len()];
    while let Some(answered) = tasks.join_next().await {
        if let Ok((index, outcome)) = answered {
            all[index] = outcome;
        }
    }
    all
}

/// How the key stands under one limit.
fn limit(
    app: &App,
    state: &State,
    rule: &Rule,
    key: &Key<'_>,
    outcome: Option<Outcome>,
    recent: &[Recent],
) -> Value {
    let allowance = rule.allowance_for(key);
    let set = app.overrides.of(rule.name(), key.canonical());
    let is_overridden = rule.overrides().iter().any(|(other, _)| other.canonical() == key.canonical());
    let source = match (&set, is_overridden) {
        (Some(_), _) => "set",
        (None, true) => "config",
        (None, false) => "default",
    };
    let count = |what: Counted| -> u64 {
        let ones = recent.iter().filter(|one| &*one.limit == rule.name() && one.what == what);
        ones.map(|one| u64::from(one.times)).sum()
    };
    let mut shown = described(state, rule);
    let numbers = outcome.as_ref().map(|outcome| *outcome.numbers());
    let is_counted = matches!(allowance, Allowance::Limited(_));
    shown["rule"] = allowance.to_string().into();
    if let Allowance::Limited(limit) = allowance {
        shown["window_ms"] = limit.window_us().get().div_ceil(1_000).into();
    }
    shown["instead_of"] = (source != "default").then(|| rule.allowance().to_string()).into();
    shown["source"] = source.into();
    shown["numbers"] = numbers_of(rule.allowance());
    shown["until"] = set.as_ref().and_then(|set| set.ends).map(timestamp).into();
    shown["reason"] = set.as_ref().and_then(|set| set.written.reason.clone()).into();
    shown["blocked"] = matches!(allowance, Allowance::Blocked).into();
    shown["unlimited"] = matches!(allowance, Allowance::Unlimited).into();
    shown["answered"] = outcome.is_some().into();
    shown["capacity"] = numbers.filter(|_| is_counted).map(|numbers| numbers.capacity).into();
    shown["used"] = outcome.as_ref().filter(|_| is_counted).map(Outcome::used).into();
    shown["remaining"] = numbers.filter(|_| is_counted).map(|numbers| numbers.remaining).into();
    shown["reset_after_ms"] = numbers.map(|numbers| numbers.reset_after.get().div_ceil(1_000)).into();
    let wait = numbers.and_then(|numbers| numbers.retry_after);
    shown["retry_after_ms"] = wait.map(|wait| wait.get().div_ceil(1_000)).into();
    shown["allowed"] = numbers.map(|numbers| numbers.allowed).into();
    shown["denied_lately"] = count(Counted::Denied).into();
    shown["would_deny_lately"] = count(Counted::WouldDeny).into();
    shown["allowed_lately"] = count(Counted::Allowed).into();
    shown
}

/// The numbers of the config that an override may change, by their names there; `null` where there are none.
fn numbers_of(allowance: &Allowance) -> Value {
    match allowance {
        Allowance::Limited(Limit::TokenBucket(bucket)) => {
            json!({ "rate": bucket.rate().to_string(), "burst": bucket.burst() })
        }
        Allowance::Limited(Limit::LeakyBucket(bucket)) => {
            json!({ "rate": bucket.rate().to_string(), "capacity": bucket.capacity() })
        }
        Allowance::Limited(limit) => json!({ "limit": limit.capacity() }),
        _ => Value::Null,
    }
}

fn decision(recent: &Recent) -> Value {
    let Recent { at_us, limit, what, cost, left, retry_after_us, why, times, .. } = recent;
    let what = match what {
        Counted::Denied => "denied",
        Counted::WouldDeny => "would_deny",
        Counted::Allowed | Counted::FellBack => "allowed",
    };
    json!({
        "at_ms": at_us / 1_000, "limit": &**limit, "what": what, "cost": cost, "left": left,
        "retry_after_ms": retry_after_us.map(|wait| wait.div_ceil(1_000)), "why": why, "times": times,
    })
}
