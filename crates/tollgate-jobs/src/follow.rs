//! Workers follow their config file: what changes in it is put in place while jobs run, as the server does.
//!
//! The file is looked at once a second. `[limits]` and `[jobs]` are applied: a raised limit calls waiting jobs forward, a lowered one holds.
//! A file with a mistake, or one that is gone, changes nothing and is reported; `[store]` and `jobs.database` need a restart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tollgate::config::{Config, FileChange, FileWatch};

use crate::error::Error;
use crate::gate::JobGate;
use crate::limits::JobsConfig;

/// How often the file is looked at; it has to rest for as long before it is read.
const LOOK: Duration = Duration::from_secs(1);

/// The longest file that is read.
const LONGEST: u64 = 16 * 1024 * 1024;

impl JobGate {
    /// The gate of a config file, connected, which follows the file from then on. The environment goes before what the file says, as in
    /// the server (`docs/config.md`).
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), tollgate_jobs::Error> {
    /// let gate = tollgate_jobs::JobGate::open_file("tollgate.toml").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open_file(file: impl Into<PathBuf>) -> Result<JobGate, Error> {
        let watch = FileWatch::before_reading(file);
        let (config, jobs) = read(watch.file())?;
        let gate = JobGate::from_config(&config, &jobs).await?.connect().await?;
        gate.follow(watch, config, jobs);
        Ok(gate)
    }

    /// Follows a config file for as long as the gate is there. `config` and `jobs` are what the gate was made from, and `watch` was made
    /// before they were read.
    pub fn follow(&self, mut watch: FileWatch, mut config: Config, mut jobs: JobsConfig) {
        let gate = self.downgrade();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(gate) = gate.upgrade() else { return };
                let applied = match watch.look() {
                    FileChange::Same => continue,
                    FileChange::Gone => {
                        Err("the config file is gone; put it back, as a restart would not find it".to_owned())
                    }
                    FileChange::Read => gate.read_again(watch.file(), &config, &jobs).await,
                };
                let outcome = if applied.is_ok() { "applied" } else { "refused" };
                metrics::counter!("tollgate_reloads_total", "outcome" => outcome).increment(1);
                metrics::gauge!("tollgate_config_refused").set(f64::from(u8::from(applied.is_err())));
                match applied {
                    Ok(new) => {
                        tracing::info!("the config was read again");
                        (config, jobs) = new;
                    }
                    Err(why) => tracing::error!("the config stays as it was: {why}"),
                }
            }
        });
    }

    /// Puts what the file says in place; the error says why nothing was changed.
    async fn read_again(
        &self,
        file: &Path,
        old: &Config,
        old_jobs: &JobsConfig,
    ) -> Result<(Config, JobsConfig), String> {
        let (mut new, mut jobs) = read(file).map_err(|error| error.to_string())?;
        if new.policy.rules().is_empty() && !old.policy.rules().is_empty() {
            // What an editor leaves for a moment before it writes, and would let everything through.
            return Err("it has no limits; write at least one, or restart to run jobs without".to_owned());
        }
        let store = old.store.changed_fields(&new.store).into_iter().map(|field| format!("store.{field}"));
        let database = (old_jobs.database != jobs.database).then(|| "jobs.database".to_owned());
        let fields: Vec<String> = store.chain(database).collect();
        if !fields.is_empty() {
            tracing::warn!(
                fields = fields.join(", "),
                "fields of the config have changed that need a restart"
            );
        }
        new.store = old.store.clone();
        jobs.database.clone_from(&old_jobs.database);
        self.reload_config(&new, &jobs).await.map_err(|error| error.to_string())?;
        Ok((new, jobs))
    }
}

/// Reads a config. Its mistakes are counted and not shown: a key of an override may stand in them.
fn read(file: &Path) -> Result<(Config, JobsConfig), Error> {
    let name = file.display();
    let failed = |error| Error::caused(format!("cannot read {name}: {error}"), error);
    let length = std::fs::metadata(file).map_err(failed)?.len();
    if length > LONGEST {
        return Err(Error::new(format!("cannot read {name}: it is longer than 16 MiB and no config")));
    }
    let text = std::fs::read_to_string(file).map_err(failed)?;
    // A variable that is no text is none of ours.
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut jobs = JobsConfig::default();
    let config = Config::parse_with(&text, variables, &mut [&mut jobs]).map_err(|mistakes| {
        let (count, first) = (mistakes.iter().count(), mistakes.iter().next().map_or(0, |first| first.line));
        let s = if count == 1 { "" } else { "s" };
        Error::new(format!(
            "{count} mistake{s} in {name}, the first in line {first}; `tollgate validate {name}` shows them"
        ))
    })?;
    Ok((config, jobs))
}
