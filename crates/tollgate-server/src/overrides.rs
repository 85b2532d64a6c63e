//! Overrides that are set while servers run: one key is blocked, freed or given numbers of its own, until a time or until further notice.
//!
//! They are kept in the store, so that every server on it follows and a restart keeps them; on the memory store they last as long as the
//! process. Each server asks the store for their revision twice a second, reads them when it has changed, and puts them over the overrides
//! of its config: to the engine they are overrides like any other, applied by the same reload, so what a key has consumed stays
//! consumed. One that ends is taken away at its time by the store's clock. While the store does not answer, what is known stays in force and ends at its time all
//! the same.
//!
//! `written.rs` says how a change of one is written.

mod written;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use tollgate::config::{StoreMode, with_overrides};
use tollgate::store::{Micros, Record, RecordKind};
use tollgate::{Allowance, Key, Policy, Rule};

pub(crate) use self::written::{Change, Fields, Written, timestamp};
use crate::app::{App, State};

/// How often the store is asked for the revision.
const LOOK: Duration = Duration::from_millis(500);

/// How many failed looks in a row are reported: on a busy machine one may miss its deadline while the store is up.
const WARNED_AFTER: u32 = 3;

/// For how long a change is remembered.
const REMEMBERED: Micros = Micros::from_secs(30 * 86_400);

/// The longest key that may have an override at run time, by its canonical text.
pub(crate) const LONGEST_KEY: usize = 1_024;

/// What this server knows of the overrides in the store.
#[derive(Default)]
pub(crate) struct Overrides {
    known: Mutex<Known>,
    /// One look at a time, so that an older answer never replaces a newer one.
    looking: tokio::sync::Mutex<()>,
    look_now: Notify,
}

#[derive(Default)]
struct Known {
    revision: Option<u64>,
    all: Arc<Vec<SetOverride>>,
    /// What the store's clock showed, and when.
    clock: Option<(Micros, Instant)>,
    /// Whether the last look failed.
    is_stale: bool,
    /// How many looks failed one after the other.
    failures: u32,
    /// The ids of those that were applied last, so that nothing is reloaded in vain; `None` once anything else has changed.
    applied: Option<Vec<String>>,
}

/// An override that was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetOverride {
    pub(crate) id: String,
    pub(crate) written: Written,
    pub(crate) ends: Option<Micros>,
}

impl Known {
    /// What the store's clock shows, as far as it is known.
    fn now(&self) -> Micros {
        let (seen, at) = self.clock.unwrap_or((Micros::ZERO, Instant::now()));
        seen.saturating_add(Micros::from(at.elapsed()))
    }

    fn in_force(&self) -> impl Iterator<Item = &SetOverride> {
        let now = self.now();
        self.all.iter().filter(move |one| one.ends.is_none_or(|ends| ends > now))
    }
}

/// The id of the override of a key under a limit: it has one.
pub(crate) fn id_of(limit: &str, key: &Key<'_>) -> String {
    let hash = Sha256::new().chain_update(limit).chain_update([0u8]).chain_update(key.canonical()).finalize();
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

impl Overrides {
    /// A policy with the overrides in force over its own. One that does not go with its limit, or whose limit is not there, is left out.
    pub(crate) fn over(&self, policy: &Policy) -> Policy {
        let known = self.known.lock();
        with_overrides(policy, known.in_force().map(|one| &one.written))
    }

    /// Asks the store what has changed, and applies it. False if the store did not answer.
    pub(crate) async fn look(&self, app: &App) -> bool {
        let _one = self.looking.lock().await;
        let gate = app.state().gate.clone();
        let revision = self.known.lock().revision;
        let read = gate.records(RecordKind::Override, revision).await;
        {
            let mut known = self.known.lock();
            match &read {
                Ok(records) => {
                    known.clock = Some((records.now, Instant::now()));
                    known.revision = Some(records.revision);
                    if let Some(changed) = &records.changed {
                        known.all = Arc::new(changed.iter().filter_map(read_record).collect());
                        // What is written under an id may have changed while the ids did not.
                        known.applied = None;
                    }
                    known.is_stale = false;
                    if std::mem::take(&mut known.failures) >= WARNED_AFTER {
                        tracing::info!("overrides are followed again: the store answers");
                    }
                }
                Err(error) => {
                    known.is_stale = true;
                    known.failures = known.failures.saturating_add(1);
                    if known.failures == WARNED_AFTER {
                        tracing::warn!(
                            "overrides that are set now are not seen until the store answers: {error}"
                        );
                    }
                }
            }
        }
        self.apply(app);
        read.is_ok()
    }

    /// Puts what is in force in place, if it is another than before.
    fn apply(&self, app: &App) {
        let ids: Vec<String> = {
            let known = self.known.lock();
            let ids = known.in_force().map(|one| one.id.clone()).collect();
            if known.applied.as_ref() == Some(&ids) {
                return;
            }
            ids
        };
        app.with_state_held(|state| {
            let policy = self.over(&state.config.gate.policy);
            if *state.gate.policy() == policy {
                return;
            }
            let overrides = ids.len();
            match state.gate.reload(policy) {
                Ok(()) => tracing::info!(overrides, "overrides that are set at run time have changed"),
                Err(error) => tracing::error!("overrides could not be applied: {error}"),
            }
        });
        self.known.lock().applied = Some(ids);
    }

    /// How long nothing happens by itself: until the next look, or until the next one ends.
    fn rest(&self) -> Duration {
        let known = self.known.lock();
        let now = known.now();
        let next = known.in_force().filter_map(|one| one.ends).min();
        next.map_or(LOOK, |ends| LOOK.min(Duration::from(ends.saturating_sub(now))))
    }

    /// The store's clock, asked for now.
    pub(crate) async fn store_now(&self, state: &State) -> Result<Micros, tollgate::Error> {
        let revision = self.known.lock().revision;
        Ok(state.gate.records(RecordKind::Override, revision).await?.now)
    }

    /// Sets one, and applies it here; false if there are too many. Other servers follow.
    pub(crate) async fn set(&self, app: &App, one: &SetOverride) -> Result<bool, tollgate::Error> {
        let record = Record { id: one.id.clone(), payload: one.written.to_payload(), ends: one.ends };
        let put = app.state().gate.put_record(RecordKind::Override, &record).await?;
        if put.is_kept {
            self.note(app, put.now, &Change::set(&one.written, one.ends)).await;
            self.look(app).await;
            self.look_now.notify_one();
        }
        Ok(put.is_kept)
    }

    /// Removes one, and applies that here; false if there was none.
    pub(crate) async fn remove(&self, app: &App, id: &str, change: &Change) -> Result<bool, tollgate::Error> {
        let state = app.state();
        let removed = state.gate.remove_record(RecordKind::Override, id).await?;
        if removed {
            let now = self.known.lock().now();
            self.note(app, now, change).await;
            self.look(app).await;
        }
        Ok(removed)
    }

    /// Remembers who changed what. What was changed stays changed if this fails.
    async fn note(&self, app: &App, now: Micros, change: &Change) {
        let id = format!("{:016x}-{}", now.get(), tollgate::ChargeId::random());
        let ends = Some(now.saturating_add(REMEMBERED));
        let record = Record { id: id.chars().take(64).collect(), payload: change.to_payload(now), ends };
        if let Err(error) = app.state().gate.put_record(RecordKind::Change, &record).await {
            tracing::warn!("a change of an override was made and could not be noted: {error}");
        }
    }

    /// Who changed the overrides of a key, newest first, or of all keys.
    pub(crate) async fn changes(&self, app: &App, key: Option<&Key<'_>>) -> Vec<Value> {
        let Ok(records) = app.state().gate.records(RecordKind::Change, None).await else { return Vec::new() };
        let mut changes: Vec<Record> = records.changed.unwrap_or_default();
        changes.sort_by(|one, other| other.id.cmp(&one.id));
        let shown = changes.iter().filter_map(|record| Change::read(&record.payload));
        let of_key = shown.filter(|(_, change)| key.is_none_or(|key| change.key == key.canonical()));
        of_key.map(|(at, change)| change.to_json(at)).collect()
    }

    /// All of them and those of the config, for admins: keys are shown as they are.
    pub(crate) fn to_json(&self, app: &App, of_key: Option<&Key<'_>>) -> Value {
        let state = app.state();
        let policy = &state.config.gate.policy;
        let known = self.known.lock();
        let is_asked = |key: &str| of_key.is_none_or(|asked| asked.canonical() == key);
        let set = known.in_force().filter(|one| is_asked(&one.written.key));
        let mut all: Vec<Value> = set.map(|one| set_json(app, policy, one, known.now())).collect();
        let is_set = |limit: &str, key: &str| {
            known.in_force().any(|one| one.written.limit == limit && one.written.key == key)
        };
        for rule in policy.rules() {
            for (key, allowance) in rule.overrides() {
                let text = key.canonical();
                if is_asked(text) && !is_set(rule.name(), text) {
                    all.push(config_json(app, rule, text, allowance));
                }
            }
        }
        let mode = state.config.gate.store.mode;
        json!({
            "overrides": all,
            "kept": mode.name(),
            "survives_restart": mode != StoreMode::Memory,
            "stale": known.is_stale,
        })
    }

    /// What is in force for a key under a limit, if it was set.
    pub(crate) fn of(&self, limit: &str, key: &str) -> Option<SetOverride> {
        let known = self.known.lock();
        known.in_force().find(|one| one.written.limit == limit && one.written.key == key).cloned()
    }
}

/// An override that was set, as the API shows it.
pub(crate) fn set_json(app: &App, policy: &Policy, one: &SetOverride, now: Micros) -> Value {
    let Written { limit, key, fields, reason, by, at_us } = &one.written;
    let applied = one.written.allowance(policy);
    let before =
        policy.rule(limit).zip(Key::parse(key).ok()).map(|(rule, key)| rule.allowance_for(&key).to_string());
    json!({
        "limit": limit,
        "key": key,
        "key_hash": app.stats.key_hash(key),
        "override": fields,
        "rule": applied.as_ref().map(|(_, allowance)| allowance.to_string()).ok(),
        "instead_of": before,
        "until": one.ends.map(timestamp),
        "ends_in_ms": one.ends.map(|ends| ends.saturating_sub(now).get().div_ceil(1_000)),
        "reason": reason,
        "by": by,
        "set_at": timestamp(Micros::new(*at_us)),
        "source": "set",
        "applied": applied.is_ok(),
        "why_not": applied.err(),
    })
}

fn config_json(app: &App, rule: &Rule, key: &str, allowance: &Allowance) -> Value {
    json!({
        "limit": rule.name(),
        "key": key,
        "key_hash": app.stats.key_hash(key),
        "override": null,
        "rule": allowance.to_string(),
        "instead_of": rule.allowance().to_string(),
        "until": null,
        "ends_in_ms": null,
        "reason": null,
        "by": null,
        "set_at": null,
        "source": "config",
        "applied": true,
        "why_not": null,
    })
}

/// An override as the store has it; one that cannot be read is warned of and left out.
fn read_record(record: &Record) -> Option<SetOverride> {
    match Written::read(&record.payload) {
        Ok(written) => Some(SetOverride { id: record.id.clone(), written, ends: record.ends }),
        Err(why) => {
            tracing::warn!(id = record.id, "an override in the store is left out: {why}");
            None
        }
    }
}

/// Follows what is set on any server, until the process ends.
pub(crate) async fn follow(app: Arc<App>) {
    loop {
        let rest = app.overrides.rest();
        let _ = tokio::time::timeout(rest, app.overrides.look_now.notified()).await;
        app.overrides.look(&app).await;
    }
}

#[cfg(test)]
mod tests {
    use tollgate::store::Micros;
    use tollgate::{Clock, ManualClock};

    use super::*;
    use crate::app::tests::app_of;

    const POLICY: &str = "[limits.api]\nstrategy = 'sliding_window'\nlimit = 2\nwindow = '1h'\n\
                          overrides = { 'user:vip' = { limit = 9 } }\n[limits.free]\nunlimited = true\n";

    fn written(limit: &str, key: &str, fields: &str) -> Written {
        let fields = serde_json::from_str(fields).expect("fields");
        Written { limit: limit.into(), key: key.into(), fields, reason: None, by: None, at_us: 7 }
    }

    async fn set(app: &App, written: Written, ends: Option<Micros>) {
        let id = id_of(&written.limit, &Key::parse(&written.key).expect("a key"));
        let one = SetOverride { id, written, ends };
        assert!(app.overrides.set(app, &one).await.expect("a store"));
    }

    fn rule(app: &App, limit: &str, key: &str) -> String {
        let rule = app.state().gate.find(limit).expect("a limit");
        rule.allowance_for(&Key::parse(key).expect("a key")).to_string()
    }

    #[tokio::test]
    async fn an_override_is_in_force_until_its_time_and_keeps_what_was_consumed() {
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let app = app_of(POLICY, hands.clock());
        let ask =
            async |key: &str| app.state().gate.check("api", key).await.expect("a decision").is_allowed();
        assert!(ask("user:1").await && ask("user:1").await && !ask("user:1").await);
        let in_a_minute = Some(hands.now().saturating_add(Micros::from_secs(60)));
        set(&app, written("api", "user:1", r#"{"limit":3}"#), in_a_minute).await;
        assert!(ask("user:1").await && !ask("user:1").await, "one more than before, and no two");
        set(&app, written("api", "user:vip", r#"{"blocked":true}"#), in_a_minute).await;
        assert!(!ask("user:vip").await, "over that of the config");
        assert_eq!(app.overrides.to_json(&app, None)["overrides"].as_array().map(Vec::len), Some(2));
        hands.advance(Micros::from_secs(60));
        assert!(app.overrides.look(&app).await);
        assert_eq!(
            (rule(&app, "api", "user:1"), rule(&app, "api", "user:vip")),
            ("2 in any 1h".into(), "9 in any 1h".into())
        );
        assert!(!ask("user:1").await, "what it consumed stays consumed");
        let shown = app.overrides.to_json(&app, None);
        assert_eq!(shown["overrides"][0]["source"], "config", "{shown}");
        assert_eq!(shown["survives_restart"], false);
    }

    #[tokio::test]
    async fn one_that_does_not_go_with_the_config_waits_until_it_does() {
        let app = app_of(POLICY, Clock::system());
        set(&app, written("api", "user:1", r#"{"burst":3}"#), None).await;
        set(&app, written("gone", "user:1", r#"{"blocked":true}"#), None).await;
        set(&app, written("free", "user:1", r#"{"blocked":true}"#), None).await;
        assert_eq!(
            (rule(&app, "api", "user:1"), rule(&app, "free", "user:1")),
            ("2 in any 1h".into(), "blocked".into())
        );
        let shown = app.overrides.to_json(&app, None);
        let mut why: Vec<String> = shown["overrides"]
            .as_array()
            .expect("a list")
            .iter()
            .filter(|one| one["applied"] == false)
            .map(|one| one["why_not"].to_string())
            .collect();
        why.sort();
        assert_eq!(why.len(), 2);
        assert!(why[0].contains("burst` does not belong to sliding_window"), "{why:?}");
        assert!(why[1].contains("unknown limit"), "{why:?}");
        // Another server, or a reload, reads the same over another config.
        let other = "[limits.api]\nstrategy = 'token_bucket'\nrate = '1/h'\nburst = 9\n[limits.gone]\nunlimited = true";
        let config = crate::config::Config::parse(other).expect("a config");
        let over = app.overrides.over(&config.gate.policy);
        let key = Key::parse("user:1").expect("a key");
        assert_eq!(over.find("api").expect("a limit").allowance_for(&key).to_string(), "1/h, bursts of 3");
        assert_eq!(over.find("gone").expect("a limit").allowance_for(&key), &Allowance::Blocked);
    }

    #[tokio::test]
    async fn changes_are_remembered_newest_first() {
        let app = app_of(POLICY, Clock::system());
        let by = Written {
            by: Some("dana".into()),
            reason: Some("ticket 7".into()),
            ..written("api", "user:1", r#"{"blocked":true}"#)
        };
        set(&app, by, None).await;
        let key = Key::parse("user:1").expect("a key");
        let removal = Change::removed("api", "user:1", None);
        assert!(app.overrides.remove(&app, &id_of("api", &key), &removal).await.expect("a store"));
        assert!(!app.overrides.remove(&app, &id_of("api", &key), &removal).await.expect("a store"));
        let changes = app.overrides.changes(&app, Some(&key)).await;
        assert_eq!(changes.len(), 2);
        assert_eq!((&changes[0]["what"], &changes[1]["by"]), (&json!("removed"), &json!("dana")));
        assert_eq!(changes[1]["override"], json!({ "blocked": true }));
        assert!(app.overrides.changes(&app, Some(&Key::parse("user:2").expect("a key"))).await.is_empty());
    }
}
