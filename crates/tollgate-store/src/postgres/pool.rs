//! The connection pool: a few connections, opened when needed, each lent for one call.
//!
//! A call that finds no idle connection waits in order for the next one that is returned or opened. A separate task opens a
//! connection, so that a caller whose deadline passes meanwhile leaves a complete connection for the next caller. If no more can
//! be opened (other programs use the rest of `max_connections`), callers share the open ones, and another attempt is made after a
//! pause; if none is open, the callers get the error.
//!
//! A connection whose answer was not awaited is never lent again: its query is cancelled, and it is closed. The driver would wait
//! for the answer for ever, which would also keep the server's side open. `call.rs` borrows connections; retries do not belong
//! here.
//!
//! **Poolers.** A connection may lead to a pooler in transaction mode (pgbouncer), where two transactions may use two sessions of
//! the server. It is recognised by a session setting in the startup packet: a pooler rejects or omits it. Behind a pooler nothing
//! is prepared, and settings are made for one transaction only: see `call.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join3;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row, SimpleQueryMessage, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::fault::{Fault, Stage};
use super::statement::Verb;
use crate::Failure;
use crate::remote::skew::Skew;

/// The time limit for opening a connection, whichever call waits for it.
const CONNECT: Duration = Duration::from_secs(5);

/// The longest time that a discarded connection may wait for its last answer.
const LINGER: Duration = Duration::from_secs(1);

/// The pause after a failure to open a connection while others are open.
const GROW_PAUSE: Duration = Duration::from_millis(250);

/// How often the server is checked behind a pooler, which hides crashes of the server.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The setting that shows that a session is our own.
const DIRECT: &str = "current_setting('tollgate.direct', true)";

/// The SQL expression for the server's clock.
const CLOCK: &str = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

/// The purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Session {
    /// Calls with a deadline; the server gives up a little before the caller does, so that the caller gets its error.
    Calls(Duration),
    /// Migration, probe and cleanup, which have no caller with a deadline.
    Chores,
}

pub(super) struct Pool {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    pub(super) place: String,
    pub(super) prefix: String,
    timeout: Duration,
    most_links: usize,
    state: Mutex<State>,
    /// Held by the task that reads the server's time.
    asking: Arc<Semaphore>,
    open: Arc<AtomicUsize>,
    pub(super) skew: Skew,
    /// The id of the server's current life: see migrations/1.sql.
    life: Mutex<Option<String>>,
    losses: AtomicU64,
    /// Whether connections lead to a pooler.
    is_pooled: AtomicBool,
    /// The types of the parameters of each statement, learned behind a pooler.
    types: Mutex<BTreeMap<Verb, Arc<[Type]>>>,
    looked: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct State {
    idle: Vec<Link>,
    waiting: VecDeque<oneshot::Sender<Result<Borrowed, Fault>>>,
    /// How many connections are open or being opened.
    links: usize,
    /// How many of them are being opened.
    opening: usize,
    /// When the last attempt to open one failed while others were open.
    could_not_grow: Option<Instant>,
}

/// One connection, and its prepared statements.
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
        // The driver closes the connection only after all answers have arrived, possibly never.
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
    /// The prepared statement of a verb; prepares it at its first use.
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

/// A lent connection. It returns to the pool when dropped, unless a query is in progress.
pub(super) struct Borrowed {
    link: Option<Link>,
    pool: Arc<Pool>,
    /// Whether an answer is awaited, or the connection is broken.
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
            return self.pool.give(link);
        }
        // The query may still wait for a lock in the server, but has no caller any more.
        let (token, tls) = (link.client.cancel_token(), self.pool.tls.clone());
        drop(link);
        self.pool.lost();
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
            state: Mutex::default(),
            asking: Arc::new(Semaphore::new(1)),
            open: Arc::new(AtomicUsize::new(0)),
            skew: Skew::new(),
            life: Mutex::new(None),
            losses: AtomicU64::new(0),
            is_pooled: AtomicBool::new(false),
            types: Mutex::default(),
            looked: Mutex::new(None),
        }
    }

    /// Whether connections lead to a pooler, as far as that is known.
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Records a sign of a pooler.
    fn saw_pooler(&self, sign: &str) {
        if !self.is_pooled.swap(true, Ordering::Relaxed) {
            tracing::info!(place = %self.place, sign, "PostgreSQL is reached through a pooler");
        }
    }

    /// Whether an error comes from a pooler that mixed up the sessions: a statement that we prepared is missing, or one exists
    /// that we did not prepare.
    pub(super) fn is_poolers(&self, error: &tokio_postgres::Error) -> bool {
        let codes = [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT];
        let is_poolers = codes.iter().any(|code| error.code() == Some(code));
        if is_poolers {
            self.saw_pooler("it mixes up prepared statements");
        }
        is_poolers
    }

    /// The most connections.
    pub(super) fn most_links(&self) -> usize {
        self.most_links
    }

    /// How many connections are open.
    pub(super) fn open_links(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// How many times the server came back from an event after which charges of the last moments may be lost.
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Borrows a connection for one call. The caller sets the deadline.
    pub(super) async fn take(self: &Arc<Self>) -> Result<Borrowed, Fault> {
        let (waiting, given) = oneshot::channel();
        let mut closed = Vec::new();
        {
            let mut state = self.state.lock();
            while let Some(link) = state.idle.pop() {
                if !link.client.is_closed() {
                    return Ok(self.borrowed(link));
                }
                state.links -= 1;
                closed.push(link);
            }
            state.waiting.push_back(waiting);
        }
        drop(closed);
        self.grow();
        let gone = || Fault::new(Failure::Connection, "the task that opens a connection was stopped");
        given.await.unwrap_or_else(|_| Err(gone()))
    }

    fn borrowed(self: &Arc<Self>, link: Link) -> Borrowed {
        Borrowed { link: Some(link), pool: self.clone(), is_spent: false }
    }

    /// Gives a connection to the call that has waited longest, or adds it to the idle ones.
    fn give(self: &Arc<Self>, link: Link) {
        let mut link = link;
        loop {
            let waiting = {
                let mut state = self.state.lock();
                match state.waiting.pop_front() {
                    Some(waiting) => waiting,
                    None => return state.idle.push(link),
                }
            };
            // A call that stops waiting at this moment drops it, which gives it to the next.
            match waiting.send(Ok(self.borrowed(link))) {
                Err(Ok(mut borrowed)) => match borrowed.link.take() {
                    Some(back) => link = back,
                    None => return,
                },
                _ => return,
            }
        }
    }

    /// Counts a closed connection.
    fn lost(self: &Arc<Self>) {
        self.state.lock().links -= 1;
        self.grow();
    }

    /// Opens a connection if there are more waiting calls than connections being opened, and the maximum is not reached.
    fn grow(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = self.state.lock();
        state.waiting.retain(|waiting| !waiting.is_closed());
        let may_open = |state: &State| {
            let is_open = state.links > state.opening;
            let is_pause = state.could_not_grow.is_some_and(|at| is_open && at.elapsed() < GROW_PAUSE);
            state.links < self.most_links && state.waiting.len() > state.opening && !is_pause
        };
        while may_open(&state) {
            state.links += 1;
            state.opening += 1;
            let pool = self.clone();
            runtime.spawn(async move {
                let opened = pool.open(Session::Calls(pool.timeout)).await;
                pool.opened(opened);
            });
        }
    }

    /// Handles an opened connection, or the failure to open one.
    fn opened(self: &Arc<Self>, opened: Result<Link, Fault>) {
        match opened {
            Ok(link) => {
                let mut state = self.state.lock();
                state.opening -= 1;
                state.could_not_grow = None;
                drop(state);
                self.give(link);
            }
            Err(fault) => {
                let mut state = self.state.lock();
                state.opening -= 1;
                state.links -= 1;
                let is_open = state.links > state.opening;
                let waiting = match is_open {
                    true => {
                        state.could_not_grow = Some(Instant::now());
                        tracing::debug!(error = %fault.error, "no more connections; waiting for those that are open");
                        None
                    }
                    // There is no other connection to wait for.
                    false => state.waiting.pop_front(),
                };
                drop(state);
                if let Some(waiting) = waiting {
                    let _ = waiting.send(Err(fault));
                }
            }
        }
        self.grow();
    }

    /// Opens a connection.
    pub(super) async fn open(&self, session: Session) -> Result<Link, Fault> {
        let doing = "connecting";
        // The network may have lost the attempt: for callers with short deadlines a new attempt soon is better.
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
        let made = match self.is_pooled() {
            true => self.connect(&self.config).await,
            false => {
                let mut config = self.config.clone();
                let options = config.get_options().map(|options| format!("{options} ")).unwrap_or_default();
                config.options(format!("{options}-c tollgate.direct=on"));
                match self.connect(&config).await {
                    Err(error) if is_poolers_refusal(&error) => {
                        self.saw_pooler("it refuses startup options");
                        self.connect(&self.config).await
                    }
                    made => made,
                }
            }
        };
        let (client, driver) = made?;
        self.open.fetch_add(1, Ordering::Relaxed);
        let (open, linger) = (self.open.clone(), self.timeout.min(LINGER));
        let link = Link { client, statements: BTreeMap::new(), open, driver, linger };
        let messages = link.client.simple_query(&session_setup(session, &self.prefix)).await?;
        self.record_identity(&messages);
        Ok(link)
    }

    /// Opens a connection outside the pool, for pings. The caller sets the deadline.
    pub(super) async fn open_apart(&self) -> Result<(Client, AbortHandle), tokio_postgres::Error> {
        self.connect(&self.config).await
    }

    async fn connect(&self, config: &Config) -> Result<(Client, AbortHandle), tokio_postgres::Error> {
        Ok(match &self.tls {
            Some(tls) => {
                let (client, connection) = config.connect(tls.clone()).await?;
                (client, drive(connection))
            }
            None => {
                let (client, connection) = config.connect(NoTls).await?;
                (client, drive(connection))
            }
        })
    }

    /// The types of a statement's parameters. They are read from the server within one transaction, because behind a pooler no
    /// prepared statement outlives a transaction.
    pub(super) async fn types(
        &self,
        verb: Verb,
        client: &Client,
    ) -> Result<Arc<[Type]>, tokio_postgres::Error> {
        if let Some(types) = self.types.lock().get(&verb) {
            return Ok(types.clone());
        }
        client.batch_execute("begin").await?;
        // Closed before the transaction ends, on the same session.
        let types = client.prepare(&verb.text(&self.prefix)).await.map(|statement| statement.params().into());
        client.batch_execute("rollback").await?;
        let types: Arc<[Type]> = types?;
        self.types.lock().insert(verb, types.clone());
        Ok(types)
    }

    /// The start of a transaction behind a pooler, where sessions do not have our settings.
    pub(super) fn begin(&self) -> String {
        let settings = call_settings(self.timeout);
        let settings = settings.iter().map(|(name, value)| format!("; set local {name} = {value}"));
        format!("begin isolation level read committed{}", settings.collect::<String>())
    }

    /// Checks the server from time to time, if a pooler hides its crashes.
    pub(super) fn look_now_and_then(self: &Arc<Self>) {
        if !self.is_pooled() {
            return;
        }
        let is_due = {
            let mut looked = self.looked.lock();
            let is_due = looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY);
            if is_due {
                *looked = Some(Instant::now());
            }
            is_due
        };
        if is_due {
            self.read_server_time();
        }
    }

    /// Reads the server's time, unless a task already does. Used when a call was late by the server's clock: perhaps all known
    /// answers took long to arrive, and a rejected call brings no new one.
    pub(super) fn read_server_time(self: &Arc<Self>) {
        let Ok(asking) = self.asking.clone().try_acquire_owned() else { return };
        let pool = self.clone();
        tokio::spawn(async move {
            let reading = tokio::time::timeout(pool.timeout, async {
                let mut borrowed = pool.take().await.ok()?;
                borrowed.is_spent = true;
                let messages =
                    borrowed.link()?.client.simple_query(&identity_query(&pool.prefix)).await.ok()?;
                borrowed.is_spent = false;
                pool.record_identity(&messages);
                Some(())
            });
            if !matches!(reading.await, Ok(Some(()))) {
                tracing::debug!(place = %pool.place, "could not ask PostgreSQL for its time");
            }
            drop(asking);
        });
    }

    /// Records what a new connection reports about the server: its clock, and whether its life id has changed.
    fn record_identity(&self, messages: &[SimpleQueryMessage]) {
        // The last row: those before it only set up the session.
        let row = messages.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let Some(row) = row else { return };
        if let Some(server_us) = row.try_get(0).ok().flatten().and_then(|text| text.parse().ok()) {
            self.skew.saw(server_us);
        }
        if row.try_get(2).ok().flatten() == Some("no") {
            self.saw_pooler("it leaves out startup options");
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

/// Whether a pooler rejected the startup packet because of our setting.
fn is_poolers_refusal(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db_error| {
        *db_error.code() == SqlState::PROTOCOL_VIOLATION && db_error.message().contains("startup parameter")
    })
}

/// The settings of a session, or of a transaction, for calls: the server gives up a little before the caller does.
fn call_settings(timeout: Duration) -> [(&'static str, String); 5] {
    let ms = |percent: u128| (timeout.as_micros() * percent / 100_000).max(1).to_string();
    [
        ("lock_timeout", ms(80)),
        ("statement_timeout", ms(90)),
        ("synchronous_commit", "off".to_owned()),
        ("client_min_messages", "warning".to_owned()),
        // Every call finds its rows by their keys. A plan that was made while a table was empty would scan the whole table until
        // the statistics are updated, which is long after a flood of new keys.
        ("enable_seqscan", "off".to_owned()),
    ]
}

/// The setup of a new session and its first query, in one round trip. Behind a pooler nothing is set, because it would stay in a
/// session that is not ours.
fn session_setup(session: Session, prefix: &str) -> String {
    let mut settings = vec![("default_transaction_isolation", "read committed".to_owned())];
    match session {
        Session::Calls(timeout) => {
            settings.extend(call_settings(timeout));
            // Generic plans: a plan for the actual values would not be better here.
            settings.push(("plan_cache_mode", "force_generic_plan".to_owned()));
            settings.push(("jit", "off".to_owned()));
        }
        // Chores set what they need in each transaction.
        Session::Chores => {}
    }
    let set: Vec<String> =
        settings.iter().map(|(name, value)| format!("set_config('{name}', '{value}', false)")).collect();
    let ask = match session {
        Session::Calls(_) => identity_query(prefix),
        Session::Chores => format!("select {CLOCK}, null, {}", is_direct()),
    };
    format!("select {} where {DIRECT} = 'on'; {ask}", set.join(", "))
}

/// Reads the server's clock, its life id, and whether the session is our own.
fn identity_query(prefix: &str) -> String {
    format!(
        "insert into {prefix}life (id) values (gen_random_uuid()) on conflict do nothing; \
         select {CLOCK}, id, {} from {prefix}life",
        is_direct()
    )
}

fn is_direct() -> String {
    format!("case when {DIRECT} = 'on' then 'yes' else 'no' end")
}

/// Runs a statement in its own transaction, in one round trip.
pub(super) async fn in_transaction(
    client: &Client,
    begin: &str,
    text: &str,
    values: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    // Each is sent when it is first polled, in this order.
    let begun = client.batch_execute(begin);
    let rows = client.query_typed(text, values);
    let (begun, answer, committed) = join3(begun, rows, client.batch_execute("commit")).await;
    begun?;
    let rows = answer?;
    committed?;
    Ok(rows)
}

/// The start of a chore's transaction, which has no caller with a deadline.
pub(super) const BEGIN_CHORE: &str = "begin isolation level read committed; set local lock_timeout = '10s'; \
     set local statement_timeout = '5min'; set local client_min_messages = warning";
