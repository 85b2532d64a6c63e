//! From a configuration to a gate: the store and the limits that it names, and the database that has the jobs.

use std::str::FromStr;
use std::time::{Duration, Instant};

use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use tollgate::Tollgate;
use tollgate::config::Config;

use crate::error::Error;
use crate::gate::{JobGate, JobGateBuilder};
use crate::limits::JobsConfig;
use crate::policy::Jobs;

/// How long a connection to the database may take, and how long it is tried again where nobody answers.
const CONNECT: Duration = Duration::from_secs(10);
const REACH: Duration = Duration::from_secs(3);
const REACH_AGAIN: Duration = Duration::from_millis(250);

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
        let (options, prefix) = database(config, jobs)?;
        reach(&options).await?;
        let pool = PgPoolOptions::new().acquire_timeout(CONNECT).connect_with(options).await;
        let pool = pool.map_err(|error| Error::database("connecting to the jobs' database", error))?;
        let tollgate = Tollgate::open(config).await?;
        Ok(JobGate::builder(tollgate, pool).jobs(Jobs::from_config(jobs)).prefix(prefix))
    }
}

/// Connects once, to see whether the database answers. A pool would try again for as long as it may wait, and then say nothing of the cause.
pub(crate) async fn reach(options: &PgConnectOptions) -> Result<(), Error> {
    let failed = |why: String, source: Option<sqlx::Error>| {
        let message = format!(
            "cannot connect to the jobs' database at {}: {why}; see that PostgreSQL runs there, and the address in [jobs] database or \
             [store.postgres] url",
            address(options)
        );
        source.map_or_else(|| Error::new(message.clone()), |source| Error::caused(message.clone(), source))
    };
    let begun = Instant::now();
    loop {
        let left = REACH.saturating_sub(begun.elapsed());
        match tokio::time::timeout(left, PgConnection::connect_with(options)).await {
            Ok(Ok(connection)) => {
                // It has served its purpose, whether the farewell arrives or not.
                drop(connection.close().await);
                return Ok(());
            }
            // It may be about to start.
            Ok(Err(sqlx::Error::Io(_))) if begun.elapsed() + REACH_AGAIN < REACH => {
                tokio::time::sleep(REACH_AGAIN).await;
            }
            Ok(Err(error)) => return Err(failed(cause(&error), Some(error))),
            Err(_) => return Err(failed(format!("no answer within {} s", REACH.as_secs()), None)),
        }
    }
}

/// Why a connection failed, in the words of who refused it.
fn cause(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Io(error) => error.to_string(),
        sqlx::Error::Database(error) => error.message().to_owned(),
        error => error.to_string(),
    }
}

/// Where a database is, without a password.
fn address(options: &PgConnectOptions) -> String {
    let place = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    let database = options.get_database().unwrap_or(options.get_username());
    format!("{place}/{database} as {}", options.get_username())
}

/// How to connect to the database that has the jobs, and what the names of its tables begin with.
pub(crate) fn database<'a>(
    config: &'a Config,
    jobs: &JobsConfig,
) -> Result<(PgConnectOptions, &'a str), Error> {
    let postgres = config.store.postgres.as_ref();
    let own = jobs.database.as_deref();
    let Some(url) = own.or(postgres.map(|postgres| postgres.url.as_str())) else {
        return Err(Error::new(
            "no database for jobs is configured; write database = \"postgres://…\" in [jobs], or a url in [store.postgres]",
        ));
    };
    // The message does not show the address, which may have a password in it.
    let options = PgConnectOptions::from_str(url);
    let mut options = options.map_err(|_| Error::new("the address of the jobs' database cannot be read"))?;
    if let (None, Some(password)) = (own, postgres.and_then(|postgres| postgres.password.as_ref())) {
        let password = password.resolve(|name| std::env::var(name).ok()).map_err(Error::new)?;
        options = options.password(&password);
    }
    Ok((options, postgres.map_or("tollgate_", |postgres| &postgres.prefix)))
}
