//! A config that changes while the server runs: read again, checked whole, and put in the place of the old one, or not at all.
//!
//! The file is looked at once a second, and read when it has changed; `SIGHUP` and `POST /v1/reload` read it at once. What was
//! consumed stays consumed: the new registry stands on the same store. A file with a mistake in it changes nothing, and is told
//! in the log, in a metric and on the page until a better one comes. `[server]` and `[store]` are settled at start; a file that
//! changes them is refused with that reason.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tollgate::Tollgate;
use tollgate::config::Config;

use crate::app::{App, State};
use crate::{source, validate};

/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// How many reloads are remembered.
const REMEMBERED: usize = 20;

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
}

impl History {
    /// Which file is read.
    pub(crate) fn follow(&self, file: PathBuf) {
        *self.file.lock() = Some(file);
    }

    fn note(&self, refused: Option<String>) {
        let outcome = if refused.is_some() { "refused" } else { "applied" };
        metrics::counter!("tollgate_reloads_total", "outcome" => outcome).increment(1);
        metrics::gauge!("tollgate_config_refused").set(f64::from(u8::from(refused.is_some())));
        let mut reloads = self.reloads.lock();
        if reloads.len() == REMEMBERED {
            reloads.pop_front();
        }
        reloads.push_back(Reload { at: SystemTime::now(), refused });
    }

    pub(crate) fn told(&self) -> Vec<Value> {
        let seconds =
            |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let reloads = self.reloads.lock();
        reloads.iter().map(|reload| json!({ "at": seconds(reload.at), "refused": reload.refused })).collect()
    }
}

/// Reads the config again and puts it in place; the error says why not.
pub(crate) fn reload(app: &App) -> Result<(), String> {
    // One after the other: of two that read the file at once, the one that read it first must not have the last word.
    let file = app.history.file.lock();
    let Some(file) = &*file else {
        return Err("the server was started without a config file".to_owned());
    };
    let outcome = try_reload(app, file);
    match &outcome {
        Ok(()) => tracing::info!("the config was read again"),
        Err(why) => tracing::error!("the config stays as it was: {why}"),
    }
    app.history.note(outcome.as_ref().err().cloned());
    outcome
}

fn try_reload(app: &App, file: &Path) -> Result<(), String> {
    let text = source::read_text(file).map_err(|failure| failure.to_string())?;
    let config = validate::parse(&text).map_err(|mistakes| mistakes.to_string())?;
    app.change(|state| {
        fixed(&state.config, &config)?;
        let gate = Tollgate::builder().config(&config).continuing(&state.gate).build();
        Ok(State { gate: gate.map_err(|error| error.to_string())?, config })
    })
}

/// What only a restart changes.
fn fixed(old: &Config, new: &Config) -> Result<(), String> {
    if old.server != new.server {
        return Err("[server] has changed: that takes a restart".to_owned());
    }
    if old.store != new.store {
        return Err("[store] has changed: another store takes a restart".to_owned());
    }
    Ok(())
}

/// Looks at the file now and then, and reads it when it has changed.
pub(crate) async fn watch(app: Arc<App>, file: PathBuf) {
    let mut last = stamp(&file);
    loop {
        tokio::time::sleep(LOOK).await;
        let now = stamp(&file);
        if now != last && now.is_some() {
            last = now;
            let _ = reload(&app);
        }
    }
}

/// What changes when a file does: when it was written, its length, and which file it is.
fn stamp(file: &Path) -> Option<(SystemTime, u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let about = std::fs::metadata(file).ok()?;
    Some((about.modified().ok()?, about.len(), about.ino()))
}
