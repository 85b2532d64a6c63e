//! Connections to the server: a few, opened when needed, lent for one call each.
//!
//! A connection is opened by a task of its own, so that a caller whose deadline passes meanwhile leaves a connection behind for
//! the next and not half of one. A connection whose answer was not waited for is never lent again: what it was doing is
//! cancelled, and it is closed: the driver would wait for the answer for ever, which keeps the server's side open as well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::fault::{Fault, Stage};
use super::skew::Skew;
use super::statement::Verb;
use crate::Failure;

/// How long opening a connection may take, whoever waits for it.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a connection that nobody needs any more may wait for what it was last asked, at most.
const LINGER: Duration = Duration::from_secs(1);

/// The server's clock, as it is asked for.
const CLOCK: &str = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Session {
    /// Calls with a deadline; the server gives up a little before the caller does, and then says so.
    Calls(Duration),
    /// Migrating, probing and cleaning up, which nobody waits for with a deadline.
    Chores,
}

pub(super) struct Pool {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    pub(super) place: String,
    pub(super) prefix: String,
    timeout: Duration,
    most_links: usize,
    permits: Arc<Semaphore>,
    /// Held by whoever asks for the server's time.
    asking: Arc<Semaphore>,
    idle: Mutex<Vec<Link>>,
    open: Arc<AtomicUsize>,
    pub(super) skew: Skew,
    /// The life that the server was last seen to live; see migrations/1.sql.
    life: Mutex<Option<String>>,
    losses: AtomicU64,
}

/// One connection, and what it has prepared.
pub(super) struct Link {
    pub(super) client: Client,
    statements: BTreeMap<Verb, Statement>,
    open: Arc<AtomicUsize>,
    driver: AbortHandle,
    linger: Duration,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        // The driver says goodbye once all that was asked is answered, and else never.
        let (driver, linger) = (self.driver.clone(), self.linger);
        match Handle::try_current() {
            Ok(runtime) if !driver.is_finished() => drop(runtime.spawn(async move {
                tokio::time::sleep(linger).await;
                driver.abort();
            })),
            _ => driver.abort(),
        }
    }
}

impl Link {
    /// The statement of a verb, prepared if it is the first time.
    pub(super) async fn statement(
        &mut self,
        verb: Verb,
        prefix: &str,
    ) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.statements.get(&verb) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(&verb.text(prefix)).await?;
        self.statements.insert(verb, statement.clone());
        Ok(statement)
    }
}

/// A connection on loan. It goes back when dropped, unless it was in the middle of something.
pub(super) struct Borrowed {
    link: Option<Link>,
    pool: Arc<Pool>,
    _permit: OwnedSemaphorePermit,
    /// Whether an answer is awaited, or the connection is of no use any more.
    pub(super) is_spent: bool,
}

impl Borrowed {
    pub(super) fn link(&mut self) -> Option<&mut Link> {
        self.link.as_mut()
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some(link) = self.link.take() else { return };
        if !self.is_spent && !link.client.is_closed() {
            self.pool.idle.lock().push(link);
            return;
        }
        // What was asked may still be waiting for a lock there; nobody waits for it here.
        let (token, tls) = (link.client.cancel_token(), self.pool.tls.clone());
        drop(link);
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(tokio::time::timeout(CONNECT, async move {
                let cancelled = match tls {
                    Some(tls) => token.cancel_query(tls).await,
                    None => token.cancel_query(NoTls).await,
                };
                if let Err(error) = cancelled {
                    tracing::debug!(%error, "could not cancel a statement that nobody waits for");
                }
            }));
        }
    }
}

impl Pool {
    pub(super) fn new(
        config: Config,
        tls: Option<MakeRustlsConnect>,
        prefix: String,
        timeout: Duration,
        connections: usize,
    ) -> Pool {
        Pool {
            place: super::options::place(&config),
            config,
            tls,
            prefix,
            timeout,
            most_links: connections,
            permits: Arc::new(Semaphore::new(connections)),
            asking: Arc::new(Semaphore::new(1)),
            idle: Mutex::new(Vec::new()),
            open: Arc::new(AtomicUsize::new(0)),
            skew: Skew::new(),
            life: Mutex::new(None),
            losses: AtomicU64::new(0),
        }
    }

    /// How many connections there may be.
    pub(super) fn most_links(&self) -> usize {
        self.most_links
    }

    /// How many connections are open.
    pub(super) fn open_links(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// How often the server was seen to have come back from something after which it may have lost its last moments.
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// A connection for one call. Whoever calls this sets the deadline.
    pub(super) async fn take(self: &Arc<Self>) -> Result<Borrowed, Fault> {
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|_| Fault::new(Failure::Connection, "the store was closed"))?;
        loop {
            let idle = self.idle.lock().pop();
            match idle {
                Some(link) if link.client.is_closed() => {}
                Some(link) => {
                    let pool = self.clone();
                    return Ok(Borrowed { link: Some(link), pool, _permit: permit, is_spent: false });
                }
                None => break,
            }
        }
        let (send, receive) = oneshot::channel();
        let pool = self.clone();
        tokio::spawn(async move {
            let opened = pool.open(Session::Calls(pool.timeout)).await.map(|link| Borrowed {
                link: Some(link),
                pool,
                _permit: permit,
                is_spent: false,
            });
            // If nobody waits any more, dropping it puts it among the idle ones.
            drop(send.send(opened));
        });
        let gone = || Fault::new(Failure::Connection, "the task that opens a connection was stopped");
        receive.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Opens a connection.
    pub(super) async fn open(&self, session: Session) -> Result<Link, Fault> {
        let doing = "connecting";
        // Who connects holds a place among the connections, and the network may have swallowed the attempt: callers with short
        // deadlines are better served by a new one soon.
        let limit = match session {
            Session::Calls(timeout) => (20 * timeout).clamp(Duration::from_secs(1), CONNECT),
            Session::Chores => CONNECT,
        };
        match tokio::time::timeout(limit, self.open_now(session)).await {
            Ok(opened) => opened.map_err(|error| Fault::of(error, Stage::Before, doing, &self.place)),
            Err(_) => Err(Fault::timeout(Stage::Before, doing, &self.place)),
        }
    }

    async fn open_now(&self, session: Session) -> Result<Link, tokio_postgres::Error> {
        let (client, driver) = self.open_apart().await?;
        self.open.fetch_add(1, Ordering::Relaxed);
        let (open, linger) = (self.open.clone(), self.timeout.min(LINGER));
        let link = Link { client, statements: BTreeMap::new(), open, driver, linger };
        let said = link.client.simple_query(&hello(session, &self.prefix)).await?;
        self.greeted(&said);
        Ok(link)
    }

    /// Opens a connection that is none of the pool's, for pings. Whoever calls this sets the deadline.
    pub(super) async fn open_apart(&self) -> Result<(Client, AbortHandle), tokio_postgres::Error> {
        Ok(match &self.tls {
            Some(tls) => {
                let (client, connection) = self.config.connect(tls.clone()).await?;
                (client, drive(connection))
            }
            None => {
                let (client, connection) = self.config.connect(NoTls).await?;
                (client, drive(connection))
            }
        })
    }

    /// Asks for the server's time, unless somebody does already. For when a call was late by the server's clock: perhaps all
    /// that we know of that clock came by answers that took long to arrive, and a call that is turned away brings no other.
    pub(super) fn ask_the_time(self: &Arc<Self>) {
        let Ok(asking) = self.asking.clone().try_acquire_owned() else { return };
        let pool = self.clone();
        tokio::spawn(async move {
            let asked = tokio::time::timeout(pool.timeout, async {
                let mut borrowed = pool.take().await.ok()?;
                borrowed.is_spent = true;
                let said = borrowed.link()?.client.simple_query(&format!("select {CLOCK}")).await.ok()?;
                borrowed.is_spent = false;
                pool.greeted(&said);
                Some(())
            });
            if !matches!(asked.await, Ok(Some(()))) {
                tracing::debug!(place = %pool.place, "could not ask PostgreSQL for its time");
            }
            drop(asking);
        });
    }

    /// Notes what a new connection says about the server: its clock, and whether it lives the life that we knew.
    fn greeted(&self, said: &[SimpleQueryMessage]) {
        let row = said.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let Some(row) = row else { return };
        if let Some(server_us) = row.try_get(0).ok().flatten().and_then(|text| text.parse().ok()) {
            self.skew.saw(server_us);
        }
        let Ok(Some(life)) = row.try_get(1) else { return };
        let before = self.life.lock().replace(life.to_owned());
        if before.is_some_and(|before| before != life) {
            self.losses.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                place = %self.place,
                "PostgreSQL crashed, or another has taken its place: what was charged in its last moments may be lost"
            );
        }
    }
}

/// Drives a connection until it ends.
fn drive(
    connection: impl Future<Output = Result<(), tokio_postgres::Error>> + Send + 'static,
) -> AbortHandle {
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to PostgreSQL ended");
        }
    });
    driver.abort_handle()
}

/// What a new session is told, and asked: the server's clock, and which life it lives. All of it is one round trip.
fn hello(session: Session, prefix: &str) -> String {
    let always = "set default_transaction_isolation = 'read committed'; set client_min_messages = warning;";
    match session {
        Session::Calls(timeout) => {
            let ms = |percent: u128| (timeout.as_micros() * percent / 100_000).max(1);
            // Plans are made once: what a plan for the very values would be better by is of no use here.
            format!(
                "{always} set lock_timeout = {}; set statement_timeout = {}; set synchronous_commit = off; \
                 set plan_cache_mode = force_generic_plan; set jit = off; \
                 insert into {prefix}life (id) values (gen_random_uuid()) on conflict do nothing; \
                 select {CLOCK}, id from {prefix}life",
                ms(80),
                ms(90),
            )
        }
        Session::Chores => format!(
            "{always} set lock_timeout = '10s'; set statement_timeout = '5min'; set synchronous_commit = on; select {CLOCK}"
        ),
    }
}
