//! A config that changes while the server runs: read again, checked whole, and put in the place of the old one, or not at all.
//!
//! The file is looked at once a second, and read when it has changed and rests; `SIGHUP` and `POST /v1/reload` read it at once.
//! What was consumed stays consumed: the new limits stand on the same counters. A file with a mistake in it changes nothing, and
//! is shown in the log, in a metric and on the page until a better one comes, and so is a file that is gone: the last good config
//! stays, and the file is read when it is back. What changed is in the log (`difference.rs`). `[server]` and `[store]` stay as they were at start: a file that changes them is applied
//! without that, and the fields that need a restart are named. A file without limits is refused: most likely somebody is still
//! writing it.

mod difference;
mod masked;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tollgate::Rule;
use tollgate::config::{FileChange, FileWatch, Mistakes};

use crate::app::{App, State};
use crate::config::Config;
use crate::front::models::Setup;
use crate::{source, validate};

pub(crate) use self::difference::Difference;

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
    /// Fields that changed and need a restart.
    restart: Vec<String>,
}

impl History {
    /// Which file is read.
    pub(crate) fn follow(&self, file: PathBuf) {
        *self.file.lock() = Some(file);
    }

    fn note(&self, refused: Option<String>, restart: Vec<String>) {
        let outcome = if refused.is_some() { "refused" } else { "applied" };
        metrics::counter!("tollgate_reloads_total", "outcome" => outcome).increment(1);
        metrics::gauge!("tollgate_config_refused").set(f64::from(u8::from(refused.is_some())));
        let mut reloads = self.reloads.lock();
        if reloads.len() == REMEMBERED {
            reloads.pop_front();
        }
        reloads.push_back(Reload { at: SystemTime::now(), refused, restart });
    }

    pub(crate) fn to_json(&self) -> Vec<Value> {
        let seconds =
            |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let reloads = self.reloads.lock();
        let shown = |reload: &Reload| json!({ "at": seconds(reload.at), "refused": reload.refused, "restart": reload.restart });
        reloads.iter().map(shown).collect()
    }
}

/// Why a config is refused.
struct Refusal {
    /// For who asked, and may change the config.
    why: String,
    /// For everybody who may look.
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

/// What a reload that worked has left out.
#[derive(Debug, Default, PartialEq, Eq)]
struct Applied {
    /// The names of limits that went away.
    gone: Vec<String>,
    /// What changed, and what needs a restart.
    difference: Difference,
}

/// Reads the config again and puts it in place. Returns what changed; the error says why nothing was changed.
pub(crate) fn reload(app: &App) -> Result<Difference, String> {
    // One after the other: of two that read the file at once, the one that read it first must not have the last word.
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
            app.history.note(None, difference.restart.clone());
            Ok(difference)
        }
        Err(Refusal { why, shown }) => {
            app.history.note(Some(shown), Vec::new());
            Err(why)
        }
    }
}

fn try_reload(app: &App, file: &Path) -> Result<Applied, Refusal> {
    let text = source::read_text(file).map_err(|failure| failure.to_string())?;
    let mut config = validate::parse(&text)?;
    let models = match (&config.llm, app.models()) {
        (Some(llm), Some(models)) => Some((models, Setup::of(llm)?)),
        (Some(llm), None) if !llm.upstreams.is_empty() => {
            return Err("[llm] is new: the gateway begins with a restart".to_owned().into());
        }
        (None, Some(_)) => return Err("[llm] is gone: the gateway ends with a restart".to_owned().into()),
        _ => None,
    };
    let llm = config.llm.clone();
    let mut applied = Applied::default();
    app.change(|state| {
        applied.difference = Difference::between(&state.config, &config);
        keep_fixed(&state.config, &mut config);
        has_limits(&state.config, &config)?;
        let gate = state.gate.clone();
        let is_gone = |name: &&str| config.gate.policy.rule(name).is_none();
        applied.gone =
            gate.policy().rules().iter().map(Rule::name).filter(is_gone).map(str::to_owned).collect();
        gate.show_namespaces(config.namespaces());
        gate.reload(config.gate.policy.clone()).map_err(|error| error.to_string())?;
        Ok::<_, String>(State::new(gate, config))
    })?;
    if let (Some((models, setup)), Some(llm)) = (models, llm) {
        models.reload(&llm, setup);
    }
    Ok(applied)
}

/// What a text would change as the config, or why it would be refused.
pub(crate) fn compare(app: &App, text: &str) -> Result<Difference, String> {
    let config = validate::parse(text).map_err(|mistakes| mistakes.to_string())?;
    let state = app.state();
    has_limits(&state.config, &config)?;
    Ok(Difference::between(&state.config, &config))
}

/// The first few names, and how many there are besides.
fn named(names: &[String]) -> String {
    let more = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names[..names.len().min(NAMED)].join(", ") + &more
}

/// Keeps what only a restart changes, and names the fields that differ. `server.namespaces` is applied.
fn keep_fixed(old: &Config, new: &mut Config) -> Vec<String> {
    let server = old.server.changed_fields(&new.server).into_iter().filter(|field| *field != "namespaces");
    let server = server.map(|field| format!("server.{field}"));
    let store =
        old.gate.store.changed_fields(&new.gate.store).into_iter().map(|field| format!("store.{field}"));
    let mut changed: Vec<String> = server.chain(store).collect();
    if let (Some(old), Some(new)) = (&old.llm, &mut new.llm) {
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

/// An empty file is what an editor leaves for a moment before it writes, and would let everything through.
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

/// The file is not there any more. A restart would fail now, so it is shown until the file is back.
fn gone(app: &App) {
    let why = "the config file is gone; put it back, as a restart would not find it";
    tracing::warn!("the config stays as it was: {why}");
    app.history.note(Some(why.to_owned()), Vec::new());
}

#[cfg(test)]
mod tests {
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
            let told = has_limits(&parsed(old), &parsed(new));
            assert_eq!(
                told.as_ref().map_err(|why| &**why),
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
