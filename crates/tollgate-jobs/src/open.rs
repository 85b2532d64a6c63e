//! From a configuration to a gate: the store and the limits that it names, and the database that has the jobs.

use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tollgate::Tollgate;
use tollgate::config::Config;

use crate::error::Error;
use crate::gate::{JobGate, JobGateBuilder};
use crate::limits::JobsConfig;
use crate::policy::Jobs;

/// How long a connection to the database may take.
const CONNECT: Duration = Duration::from_secs(10);

impl JobGate {
    /// The gate of a configuration: `[jobs]`, over the limits of `[limits]` and the store of `[store]`. The line is in
    /// `jobs.database` or, without it, in the database of the store.
    ///
    /// ```no_run
    /// # async fn run(text: &str) -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::config::Config;
    /// use tollgate_jobs::{JobGate, JobsConfig};
    ///
    /// let mut jobs = JobsConfig::default();
    /// let config = Config::parse_with(text, std::env::vars(), &mut [&mut jobs])?;
    /// let gate = JobGate::from_config(&config, &jobs).await?.connect().await?;
    /// # drop(gate);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn from_config(config: &Config, jobs: &JobsConfig) -> Result<JobGateBuilder, Error> {
        let postgres = config.store.postgres.as_ref();
        let own = jobs.database.as_deref();
        let Some(url) = own.or(postgres.map(|postgres| postgres.url.as_str())) else {
            return Err(Error::new(
                "no database for jobs is configured; write database = \"postgres://…\" in [jobs], or a url in [store.postgres]",
            ));
        };
        // The message does not show the address, which may have a password in it.
        let options = PgConnectOptions::from_str(url);
        let mut options =
            options.map_err(|_| Error::new("the address of the jobs' database cannot be read"))?;
        if let (None, Some(password)) = (own, postgres.and_then(|postgres| postgres.password.as_ref())) {
            let password = password.resolve(|name| std::env::var(name).ok()).map_err(Error::new)?;
            options = options.password(&password);
        }
        let pool = PgPoolOptions::new().acquire_timeout(CONNECT).connect_with(options).await;
        let pool = pool.map_err(|error| Error::database("connecting to the jobs' database", error))?;
        let tollgate = Tollgate::open(config).await?;
        let prefix = postgres.map_or("tollgate_", |postgres| &postgres.prefix);
        Ok(JobGate::builder(tollgate, pool).jobs(Jobs::from_config(jobs)).prefix(prefix))
    }
}
