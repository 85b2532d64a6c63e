//! Connections to the server: a few, opened when needed, lent for one call each.
//!
//! Whoever finds none idle waits, first come first served, for the next one that is given back or newly opened, whichever comes
//! first. A connection is opened by a task of its own, so that a caller whose deadline passes meanwhile leaves a connection
//! behind for the next and not half of one. Where no more can be opened (another program has the rest of `max_connections`),
//! callers make do with those that are open, and another one is tried after a pause; with none open the error is theirs.
//!
//! A connection whose answer was not waited for is never lent again: what it was doing is cancelled, and it is closed: the
//! driver would wait for the answer for ever, which keeps the server's side open as well.
//!
//! **Poolers.** A connection may lead to a pooler in transaction mode (pgbouncer), where two transactions may meet two sessions
//! of the server. It is recognised by a setting of the session that is made by the startup packet: a pooler refuses it or leaves
//! it out. Behind a pooler nothing is prepared and nothing is set but for one transaction: see `call.rs`.

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
use super::skew::Skew;
use super::statement::Verb;
use crate::Failure;

/// How long opening a connection may take, whoever waits for it.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a connection that nobody needs any more may wait for what it was last asked, at most.
const LINGER: Duration = Duration::from_secs(1);

/// How long after a connection could not be opened, while others are open, no other is tried.
const GROW_PAUSE: Duration = Duration::from_millis(250);

/// How often the server is looked at behind a pooler, which hides its crashes from us.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The setting by which a session is known to be our own, from the first packet to the last.
const DIRECT: &str = "current_setting('tollgate.direct', true)";

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
    state: Mutex<State>,
    /// Held by whoever asks for the server's time.
    asking: Arc<Semaphore>,
    open: Arc<AtomicUsize>,
    pub(super) skew: Skew,
    /// The life that the server was last seen to live; see migrations/1.sql.
    life: Mutex<Option<String>>,
    losses: AtomicU64,
    /// Whether connections lead to a pooler.
    is_pooled: AtomicBool,
    /// The types of the parameters of each statement, as learned behind a pooler.
    types: Mutex<BTreeMap<Verb, Arc<[Type]>>>,
    looked: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct State {
    idle: Vec<Link>,
    waiting: VecDeque<oneshot::Sender<Result<Borrowed, Fault>>>,
    /// How many connections there are or are being opened.
    links: usize,
    /// How many of them are being opened.
    opening: usize,
    /// When opening one last failed while others were open.
    could_not_grow: Option<Instant>,
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
            return self.pool.give(link);
        }
        // What was asked may still be waiting for a lock there; nobody waits for it here.
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

    /// A sign of a pooler was seen.
    fn saw_pooler(&self, sign: &str) {
        if !self.is_pooled.swap(true, Ordering::Relaxed) {
            tracing::info!(place = %self.place, sign, "PostgreSQL is reached through a pooler");
        }
    }

    /// Whether an error is that of a pooler that mixed up the sessions: a statement that we prepared is not there, or one that
    /// we did not prepare is.
    pub(super) fn is_poolers(&self, error: &tokio_postgres::Error) -> bool {
        let codes = [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT];
        let is_poolers = codes.iter().any(|code| error.code() == Some(code));
        if is_poolers {
            self.saw_pooler("it mixes up prepared statements");
        }
        is_poolers
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

    /// Gives a connection to whoever waits longest, or keeps it.
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
            // Whoever stops waiting just now drops it, and so gives it to the next.
            match waiting.send(Ok(self.borrowed(link))) {
                Err(Ok(mut borrowed)) => match borrowed.link.take() {
                    Some(back) => link = back,
                    None => return,
                },
                _ => return,
            }
        }
    }

    /// There is a connection fewer.
    fn lost(self: &Arc<Self>) {
        self.state.lock().links -= 1;
        self.grow();
    }

    /// Opens a connection if somebody waits for one who has none on the way, and there may be more.
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

    /// A connection was opened, or could not be.
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
                    // There is no other to wait for.
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
        // The network may have swallowed the attempt: callers with short deadlines are better served by a new one soon.
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
        let said = link.client.simple_query(&hello(session, &self.prefix)).await?;
        self.greeted(&said);
        Ok(link)
    }

    /// Opens a connection that is none of the pool's, for pings. Whoever calls this sets the deadline.
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

    /// The types of a statement's parameters. They are learned from the server, within one transaction, because nothing that
    /// is prepared outlives one behind a pooler.
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

    /// What begins a transaction behind a pooler, where sessions have no settings of ours.
    pub(super) fn begin(&self) -> String {
        let settings = call_settings(self.timeout);
        let settings = settings.iter().map(|(name, value)| format!("; set local {name} = {value}"));
        format!("begin isolation level read committed{}", settings.collect::<String>())
    }

    /// Looks at the server now and then, if there is a pooler that hides what becomes of it.
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

    /// Asks for the server's time, unless somebody does already. For when a call was late by the server's clock: perhaps all
    /// that we know of that clock came by answers that took long to arrive, and a call that is turned away brings no other.
    pub(super) fn read_server_time(self: &Arc<Self>) {
        let Ok(asking) = self.asking.clone().try_acquire_owned() else { return };
        let pool = self.clone();
        tokio::spawn(async move {
            let asked = tokio::time::timeout(pool.timeout, async {
                let mut borrowed = pool.take().await.ok()?;
                borrowed.is_spent = true;
                let said = borrowed.link()?.client.simple_query(&who_are_you(&pool.prefix)).await.ok()?;
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
        // The last row: what comes before it only sets up the session.
        let row = said.iter().rev().find_map(|message| match message {
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

/// Whether a pooler refuses the startup packet for the setting that it holds.
fn is_poolers_refusal(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|said| {
        *said.code() == SqlState::PROTOCOL_VIOLATION && said.message().contains("startup parameter")
    })
}

/// What calls need of a session, or of a transaction: the server gives up a little before the caller does.
fn call_settings(timeout: Duration) -> [(&'static str, String); 4] {
    let ms = |percent: u128| (timeout.as_micros() * percent / 100_000).max(1).to_string();
    [
        ("lock_timeout", ms(80)),
        ("statement_timeout", ms(90)),
        ("synchronous_commit", "off".to_owned()),
        ("client_min_messages", "warning".to_owned()),
    ]
}

/// What a new session is set up with, and asked. All of it is one round trip. Behind a pooler nothing is set: it would stay with
/// a session that is not ours.
fn hello(session: Session, prefix: &str) -> String {
    let mut settings = vec![("default_transaction_isolation", "read committed".to_owned())];
    match session {
        Session::Calls(timeout) => {
            settings.extend(call_settings(timeout));
            // Plans are made once: what a plan for the very values would be better by is of no use here.
            settings.push(("plan_cache_mode", "force_generic_plan".to_owned()));
            settings.push(("jit", "off".to_owned()));
        }
        // Those set what they need for each transaction.
        Session::Chores => {}
    }
    let set: Vec<String> =
        settings.iter().map(|(name, value)| format!("set_config('{name}', '{value}', false)")).collect();
    let ask = match session {
        Session::Calls(_) => who_are_you(prefix),
        Session::Chores => format!("select {CLOCK}, null, {}", is_direct()),
    };
    format!("select {} where {DIRECT} = 'on'; {ask}", set.join(", "))
}

/// Asks for the server's clock, which life it lives, and whether the session is our own.
fn who_are_you(prefix: &str) -> String {
    format!(
        "insert into {prefix}life (id) values (gen_random_uuid()) on conflict do nothing; \
         select {CLOCK}, id, {} from {prefix}life",
        is_direct()
    )
}

fn is_direct() -> String {
    format!("case when {DIRECT} = 'on' then 'yes' else 'no' end")
}

/// A statement in a transaction of its own, in one round trip.
pub(super) async fn in_transaction(
    client: &Client,
    begin: &str,
    text: &str,
    values: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    // Each is sent when it is first polled, which is in this order.
    let begun = client.batch_execute(begin);
    let asked = client.query_typed(text, values);
    let (begun, answer, committed) = join3(begun, asked, client.batch_execute("commit")).await;
    begun?;
    let rows = answer?;
    committed?;
    Ok(rows)
}

/// What begins a transaction of a chore, which nobody waits for with a deadline.
pub(super) const BEGIN_CHORE: &str = "begin isolation level read committed; set local lock_timeout = '10s'; \
     set local statement_timeout = '5min'; set local client_min_messages = warning";
