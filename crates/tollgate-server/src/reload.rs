//! Reloads the config while the server runs: reads it, checks all of it, and applies it as a whole or not at all.
//!
//! The file is checked once a second, and read when it has changed and is stable; `SIGHUP` and `POST /v1/reload` read it at once.
//! Counters stay: the new limits use the same ones. An invalid file changes nothing, and is reported in the log, in a metric and
//! on the page until a valid one comes. A missing file is reported in the same way, the last valid config stays, and the file is
//! read when it is back. The changes are logged (`reload/changes.rs`). `[server]` and `[store]` stay as they were at start, and so
//! does the presence of a gateway (`[llm]`): a file that changes them is applied without that, and the fields that need a restart
//! are named. A file without limits is refused, because it is most likely half written.

mod changes;
mod masked;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tollgate::config::{FileChange, FileWatch, Mistakes};
use tollgate::{Policy, Rule};

use crate::app::{App, State};
use crate::config::Config;
use crate::difference::Difference;
use crate::{source, validate};

/// How often the file is looked at; it has to rest for as long before it is read.
const LOOK: Duration = Duration::from_secs(1);

/// How many reloads are remembered.
const REMEMBERED: usize = 20;

/// How many limits that went away are named.
const NAMED: usize = 10;

/// What became of the reloads, newest last.
#[derive(Default)]
pub(crate) struct History {
    file: Mutex<Option<PathBuf>>,
    reloads: Mutex<VecDeque<Reload>>,
}

struct Reload {
    at: SystemTime,
    /// Why it was refused, if it was.
    refused: Option<String>,
    /// What changed, and which fields need a restart.
    difference: Difference,
}

/// How many changes of a reload are shown.
const SHOWN_CHANGES: usize = 20;

impl History {
    /// Which file is read.
    pub(crate) fn follow(&self, file: PathBuf) {
        *self.file.lock() = Some(file);
    }

    fn note(&self, refused: Option<String>, difference: Difference) {
        let outcome = if refused.is_some() { "refused" } else { "applied" };
        metrics::counter!("tollgate_reloads_total", "outcome" => outcome).increment(1);
        metrics::gauge!("tollgate_config_refused").set(f64::from(u8::from(refused.is_some())));
        let mut reloads = self.reloads.lock();
        if reloads.len() == REMEMBERED {
            reloads.pop_front();
        }
        reloads.push_back(Reload { at: SystemTime::now(), refused, difference });
    }

    pub(crate) fn to_json(&self) -> Vec<Value> {
        let seconds =
            |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let reloads = self.reloads.lock();
        let shown = |Reload { at, refused, difference }: &Reload| {
            let changes = &difference.changes[..difference.changes.len().min(SHOWN_CHANGES)];
            json!({
                "at": seconds(*at), "refused": refused, "restart": difference.restart,
                "changes": changes, "more_changes": difference.changes.len() - changes.len(),
            })
        };
        reloads.iter().map(shown).collect()
    }
}

/// Why a config is refused.
struct Refusal {
    /// For the caller, who may change the config.
    why: String,
    /// For everybody who may read the page.
    shown: String,
}

impl From<String> for Refusal {
    fn from(why: String) -> Refusal {
        Refusal { shown: why.clone(), why }
    }
}

impl From<Mistakes> for Refusal {
    fn from(mistakes: Mistakes) -> Refusal {
        Refusal { why: mistakes.to_string(), shown: masked::masked(&mistakes) }
    }
}

/// What a successful reload did not apply.
#[derive(Debug, Default, PartialEq, Eq)]
struct Applied {
    /// The names of limits that went away.
    gone: Vec<String>,
    /// What changed, and what needs a restart.
    difference: Difference,
}

/// Reads the config again and applies it. Returns the changes; the error says why nothing was changed.
pub(crate) fn reload(app: &App) -> Result<Difference, String> {
    // One reload at a time: of two concurrent ones, the one that read the file first must not win.
    let file = app.history.file.lock();
    let Some(file) = &*file else {
        return Err("the server was started without a config file".to_owned());
    };
    // No fault of a config, and nothing that another one mends: so it is not noted as a refusal.
    if !source::can_be_read_again(file) {
        let why = "the config was read from a pipe, and cannot be read again";
        tracing::error!("the config stays as it was: {why}");
        return Err(why.to_owned());
    }
    let outcome = try_reload(app, file);
    match &outcome {
        Ok(Applied { gone, difference }) => {
            let changes = (!difference.changes.is_empty()).then(|| difference.in_one_line());
            tracing::info!(changes, "the config was read again");
            let restart = &difference.restart;
            if !gone.is_empty() {
                tracing::warn!(limits = named(gone), "limits went away with the config that was read again");
            }
            if !restart.is_empty() {
                tracing::warn!(
                    fields = restart.join(", "),
                    "fields of the config have changed that need a restart"
                );
            }
        }
        Err(Refusal { shown, .. }) => tracing::error!("the config stays as it was: {shown}"),
    }
    match outcome {
        Ok(Applied { difference, .. }) => {
            app.history.note(None, difference.clone());
            Ok(difference)
        }
        Err(Refusal { why, shown }) => {
            app.history.note(Some(shown), Difference::default());
            Err(why)
        }
    }
}

fn try_reload(app: &App, file: &Path) -> Result<Applied, Refusal> {
    let text = source::read_text(file).map_err(|failure| failure.to_string())?;
    let mut config = validate::parse(&text)?;
    // If a gateway starts or ends with a restart, there is nothing to apply.
    let models = app.models().zip(config.llm.as_ref().filter(|llm| !llm.upstreams.is_empty()));
    let models = models.map(|(models, llm)| Ok((models.prepare(llm)?, models))).transpose();
    let models = models.map_err(|why: String| Refusal::from(why))?;
    let llm = config.llm.clone();
    let mut applied = Applied::default();
    app.change(|state| {
        has_limits(&state.config, &config)?;
        applied.difference = Difference::between(&state.config, &config);
        keep_fixed(&state.config, &mut config);
        let gate = state.gate.clone();
        let is_gone = |name: &&str| config.gate.policy.rule(name).is_none();
        applied.gone =
            gate.policy().rules().iter().map(Rule::name).filter(is_gone).map(str::to_owned).collect();
        gate.show_namespaces(config.namespaces());
        app.stats.show_namespaces(config.namespaces());
        gate.reload(app.overrides.over(&config.gate.policy)).map_err(|error| error.to_string())?;
        Ok::<_, String>(State::new(gate, config))
    })?;
    if let (Some((setup, models)), Some(llm)) = (models, llm) {
        models.reload(&llm, setup);
    }
    Ok(applied)
}

/// What a config text would change, or why it would be refused.
pub(crate) fn compare(app: &App, text: &str) -> Result<Difference, String> {
    let config = validate::parse(text).map_err(|mistakes| mistakes.to_string())?;
    let state = app.state();
    has_limits(&state.config, &config)?;
    Ok(Difference::between(&state.config, &config))
}

/// The first few names, and the number of the others.
fn named(names: &[String]) -> String {
    let more = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names[..names.len().min(NAMED)].join(", ") + &more
}

/// Keeps the fields that need a restart, and names those that differ. `server.namespaces` is applied.
fn keep_fixed(old: &Config, new: &mut Config) -> Vec<String> {
    let server = old.server.changed_fields(&new.server).into_iter().filter(|field| *field != "namespaces");
    let server = server.map(|field| format!("server.{field}"));
    let store =
        old.gate.store.changed_fields(&new.gate.store).into_iter().map(|field| format!("store.{field}"));
    let mut changed: Vec<String> = server.chain(store).collect();
    if has_gateway(old) != has_gateway(new) {
        changed.push("llm.upstreams".to_owned());
        keep_models(old, new);
    } else if let (Some(old), Some(new)) = (&old.llm, &mut new.llm) {
        if old.log_dir != new.log_dir {
            changed.push("llm.log_dir".to_owned());
            new.log_dir.clone_from(&old.log_dir);
        }
        if old.memory != new.memory {
            changed.push("llm.memory_mib".to_owned());
            new.memory = old.memory;
        }
    }
    let namespaces = std::mem::take(&mut new.server.namespaces);
    new.server = old.server.clone();
    new.server.namespaces = namespaces;
    new.gate.store = old.gate.store.clone();
    changed
}

/// Whether a config makes the server a gateway of language models.
fn has_gateway(config: &Config) -> bool {
    config.llm.as_ref().is_some_and(|llm| !llm.upstreams.is_empty())
}

/// Keeps `[llm]` and its limits: a running gateway uses them until the restart, and one that does not run yet has none.
fn keep_models(old: &Config, new: &mut Config) {
    let is_of = |config: &Config, name: &str| {
        config.llm.iter().flat_map(|llm| llm.limit_names()).any(|limit| limit == name)
    };
    let policy = |config: &Config| config.gate.policy.rules().to_vec();
    let others = policy(new).into_iter().filter(|rule| !is_of(new, rule.name()));
    let mut rules: Vec<Rule> = others.collect();
    for rule in policy(old).into_iter().filter(|rule| is_of(old, rule.name())) {
        // The file uses this name for its own limit now.
        rules.retain(|other| other.name() != rule.name());
        rules.push(rule);
    }
    // Names are sound and each is there once, so there is nothing to refuse.
    if let Ok(policy) = Policy::new(rules) {
        new.gate.policy = policy;
    }
    new.llm.clone_from(&old.llm);
}

/// An editor may leave an empty file for a moment before it writes; applied, it would let everything through.
fn has_limits(old: &Config, new: &Config) -> Result<(), String> {
    let is_empty = new.gate.policy.rules().is_empty() && new.envoy.rules().is_empty();
    match old.gate.policy.rules().len() {
        had @ 1.. if is_empty => Err(format!(
            "it has no limits; the one in force has {had}: write at least one, or restart to serve none"
        )),
        _ => Ok(()),
    }
}

/// Looks at the file now and then, and reads it when it has changed.
pub(crate) async fn watch(app: Arc<App>, mut file: FileWatch) {
    loop {
        tokio::time::sleep(LOOK).await;
        match file.look() {
            FileChange::Same => {}
            FileChange::Read => drop(reload(&app)),
            FileChange::Gone => gone(&app),
        }
    }
}

/// The file is gone. A restart would fail now, so this is reported until the file is back.
fn gone(app: &App) {
    let why = "the config file is gone; put it back, as a restart would not find it";
    tracing::warn!("the config stays as it was: {why}");
    app.history.note(Some(why.to_owned()), Difference::default());
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_needs_a_restart_is_named_and_stays() {
        let old = Config::parse("server.http = 'a:1'\nstore.timeout = '1s'").expect("a config");
        let new =
            "server.http = 'b:2'\nserver.namespaces = ['user']\nstore.max_keys = 7\nlimits.a.blocked = true";
        let mut new = Config::parse(new).expect("a config");
        assert_eq!(keep_fixed(&old, &mut new), ["server.http", "store.timeout", "store.max_keys"]);
        assert_eq!((new.server.http.as_deref(), &new.gate.store), (Some("a:1"), &old.gate.store));
        assert_eq!(new.server.namespaces, ["user"]);
        assert_eq!(new.gate.policy.rules().len(), 1);
        assert!(keep_fixed(&old, &mut old.clone()).is_empty());
        let old = Config::parse("llm.log_dir = 'a'\nllm.max_wait = '1s'").expect("a config");
        let mut new =
            Config::parse("llm.log_dir = 'b'\nllm.max_wait = '2s'\nllm.memory_mib = 9").expect("a config");
        assert_eq!(keep_fixed(&old, &mut new), ["llm.log_dir", "llm.memory_mib"]);
        let (old, new) = (old.llm.expect("a section"), new.llm.expect("a section"));
        assert_eq!((&new.log_dir, new.memory, new.max_wait.as_secs()), (&old.log_dir, old.memory, 2));
    }

    /// The gateway begins and ends with a restart. Until then it has the limits that it had, and the rest of the file is applied.
    #[test]
    fn a_section_of_models_that_comes_or_goes_waits_for_a_restart() {
        let names = |config: &Config| -> BTreeSet<String> {
            config.gate.policy.rules().iter().map(|rule| rule.name().to_owned()).collect()
        };
        let gateway = "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'k'\n[llm.models.m]\nrpm = 5\n\
                       [llm.clients.c]\nkey = 'd'\nmodels.m = { tpm = 9 }\n";
        let with = Config::parse(&format!("{gateway}[limits.a]\nblocked = true")).expect("a config");
        let without = Config::parse("limits.b.blocked = true").expect("a config");
        let mut new = with.clone();
        assert_eq!(keep_fixed(&without, &mut new), ["llm.upstreams"]);
        assert_eq!((new.llm, names(&with).len()), (None, 3));
        assert_eq!(new.gate.policy.rules(), [with.gate.policy.find("a").expect("a limit").clone()]);
        let mut new = without.clone();
        assert_eq!(keep_fixed(&with, &mut new), ["llm.upstreams"]);
        let kept = ["b", "llm.m.rpm", "llm.client.c.m.tpm"].map(str::to_owned);
        assert_eq!((&new.llm, names(&new)), (&with.llm, BTreeSet::from(kept)));
        let difference = Difference::between(&with, &without);
        assert_eq!(difference.restart, ["llm.upstreams"]);
        let changes: Vec<&str> = difference.changes.iter().map(|line| &line[..9]).collect();
        assert_eq!(changes, ["- limit a", "+ limit b"], "{difference:?}");
    }

    #[test]
    fn a_file_without_limits_is_refused_where_there_are_some() {
        let limit = "limits.a.blocked = true\nlimits.b.blocked = true\n";
        let envoy = "[[envoy]]\ndomain = 'edge'\nentries = ['x']\nunlimited = true\n";
        let refused =
            "it has no limits; the one in force has 2: write at least one, or restart to serve none";
        for (old, new, expected) in [
            (limit, "", Err(refused)),
            (limit, "[limits]", Err(refused)),
            (limit, envoy, Ok(())),
            (limit, "limits.c.blocked = true", Ok(())),
            ("", "", Ok(())),
            (envoy, "", Ok(())),
            ("", limit, Ok(())),
        ] {
            let parsed = |text| Config::parse(text).expect("a config");
            let result = has_limits(&parsed(old), &parsed(new));
            assert_eq!(
                result.as_ref().map_err(|why| &**why),
                expected.as_ref().map_err(|why| *why),
                "{old} -> {new}"
            );
        }
    }

    #[test]
    fn limits_that_went_away_are_named_up_to_ten() {
        let names = |count| (1..=count).map(|name: u32| name.to_string()).collect::<Vec<_>>();
        assert_eq!(named(&names(1)), "1");
        assert_eq!(named(&names(10)), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10");
        assert_eq!(named(&names(12)), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more");
    }
}
