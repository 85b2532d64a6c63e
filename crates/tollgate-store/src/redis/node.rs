//! One Redis server: the connections to it, its clock, and calls with a deadline.
//!
//! A connection is multiplexed: it carries many calls at a time, in order, so there is no pool to wait for. A call that finds no
//! connection starts a task that makes one, so that no caller's deadline cuts it short, and waits for it until its own deadline.
//! A connection that breaks, or receives nothing during a whole call, is dropped, and the next call makes another one. This
//! module never sends a command twice; retries and redirections are in `route.rs`.
//!
//! A call carries its deadline by the server's clock. The offset to our clock is measured when a connection is made and about
//! every second after (`remote/skew.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::failure::{self, CallError, Remedy};
use super::script::{self, Script};
use super::watch::Watch;
use crate::remote::skew::Skew;
use crate::{Clock, Failure, ManualClock, StoreError};

/// The shortest time limit for making a connection, even if the deadlines of the waiting calls are shorter.
const CONNECT_AT_LEAST: Duration = Duration::from_secs(1);

/// The pause after a failed connection. Calls during the pause get the same failure.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// How often the server's clock is read, in us.
const MEASURE_EVERY_US: u64 = 1_000_000;

/// How many calls may wait to be written to a connection.
const CALLS_WAITING: usize = 8_192;

/// What tests add to every expiry, in ms: twenty years.
pub(super) const TEST_SHIFT_MS: u64 = 20 * 365 * 86_400 * 1_000;

pub(crate) struct Node {
    pub(crate) address: String,
    client: Client,
    timeout: Duration,
    clock: Option<ManualClock>,
    places: Vec<ConnectionSlot>,
    next: AtomicUsize,
    run: Mutex<Option<String>>,
    losses: Arc<AtomicU64>,
    watch: Watch,
    /// The latest server time in an answer to a charge.
    seen_us: AtomicU64,
    /// How many scripts were loaded into the server. There are more once limits of other strategies are charged.
    scripts: AtomicUsize,
}

/// A place for one connection, which is made at its first use.
#[derive(Default)]
struct ConnectionSlot {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    connection: Option<Arc<Connection>>,
    is_connecting: bool,
    /// The time and the reason of the last failure to connect.
    failed: Option<(Instant, Failed)>,
}

#[derive(Clone)]
struct Failed {
    remedy: Remedy,
    failure: Failure,
    message: String,
}

impl Failed {
    fn of(call_error: &CallError) -> Failed {
        let failure = call_error.error.failure().unwrap_or(Failure::Connection);
        Failed { remedy: call_error.remedy, failure, message: call_error.error.to_string() }
    }

    fn call_error(&self) -> CallError {
        let error = StoreError::failed(self.failure, self.message.clone());
        CallError { remedy: self.remedy, is_broken: true, redirection: None, error }
    }
}

pub(crate) struct Connection {
    multiplexed: MultiplexedConnection,
    skew: Skew,
    /// When that was measured, by our clock.
    measured_us: AtomicU64,
    is_measuring: AtomicBool,
    /// When the server last answered, by our clock.
    answered_us: AtomicU64,
}

/// If the server's clock steps back by up to this much, the time in scripts stands still: see clock.lua.
const STANDS_STILL_US: u64 = 10_000_000;

/// Our clock: it never goes back.
fn our_us() -> u64 {
    Clock::system().now().get()
}

impl Node {
    pub(crate) fn new(
        address: String,
        client: Client,
        timeout: Duration,
        connections: usize,
        clock: Option<ManualClock>,
        losses: Arc<AtomicU64>,
        watch: Watch,
    ) -> Arc<Node> {
        let places = (0..connections).map(|_| ConnectionSlot::default()).collect();
        let (next, run) = (AtomicUsize::new(0), Mutex::new(None));
        let (seen_us, scripts) = (AtomicU64::new(0), AtomicUsize::new(0));
        Arc::new(Node { address, client, timeout, clock, places, next, run, losses, watch, seen_us, scripts })
    }

    /// Whether the server has room for new keys, as of the last check.
    pub(crate) fn takes_new_keys(&self) -> bool {
        self.watch.takes_new_keys()
    }

    /// Sends a command before `deadline`. `build` makes it once there is a connection, from the deadline by the server's clock.
    /// `is_asking` is for a slot that migrates.
    pub(crate) async fn call(
        self: &Arc<Node>,
        deadline: Instant,
        is_asking: bool,
        build: &(dyn Fn(&str) -> Cmd + Send + Sync),
    ) -> Result<Value, CallError> {
        let place = match self.places.len() {
            1 => 0,
            places => self.next.fetch_add(1, Ordering::Relaxed) % places,
        };
        let connection = self.connection(place, deadline).await?;
        // One call may send several scripts. A script that would be late is not sent, so its error is not ambiguous.
        if Instant::now() >= deadline {
            return Err(CallError::timeout(false));
        }
        let sent_us = our_us();
        let cmd = build(&self.not_after(&connection, deadline));
        let mut multiplexed = connection.multiplexed.clone();
        let answer = async {
            if is_asking {
                let mut both = redis::pipe();
                both.cmd("ASKING").ignore().add_command(cmd);
                let mut answers = multiplexed.send_packed_commands(&both, 1, 1).await?;
                return answers.pop().unwrap_or(Value::Nil).extract_error();
            }
            // The client returns an error reply as a value.
            multiplexed.send_packed_command(&cmd).await?.extract_error()
        };
        match timeout_at(deadline, answer).await {
            Ok(Ok(value)) => {
                let now_us = our_us();
                connection.answered_us.store(now_us, Ordering::Relaxed);
                self.note_time(&value);
                if now_us > connection.measured_us.load(Ordering::Relaxed) + MEASURE_EVERY_US {
                    self.measure_soon(place, &connection);
                }
                if self.watch.is_due(now_us) {
                    self.watch_soon(&connection);
                }
                Ok(value)
            }
            Ok(Err(error)) => {
                let call_error = failure::of_call(error);
                if call_error.is_broken {
                    self.places[place].drop_connection(&connection);
                } else {
                    connection.answered_us.store(our_us(), Ordering::Relaxed);
                }
                Err(call_error)
            }
            Err(_) => {
                if connection.answered_us.load(Ordering::Relaxed) < sent_us {
                    self.places[place].drop_connection(&connection);
                }
                Err(CallError::timeout(true))
            }
        }
    }

    /// Records the server time of an answer to a charge. If the clock was set back by more than the scripts tolerate, the new
    /// time is used.
    fn note_time(&self, answer: &Value) {
        let Value::Array(values) = answer else { return };
        let Some(Value::Int(now)) = values.first() else { return };
        let Ok(now_us) = u64::try_from(*now) else { return };
        // In other answers, a leading number is 0 or 1.
        if now_us <= 1 {
            return;
        }
        if now_us + STANDS_STILL_US < self.seen_us.load(Ordering::Relaxed) {
            self.seen_us.store(now_us, Ordering::Relaxed);
        } else {
            self.seen_us.fetch_max(now_us, Ordering::Relaxed);
        }
    }

    /// The deadline by the server's clock and the latest server time seen; with a manual clock, also the time to use.
    fn not_after(&self, connection: &Connection, deadline: Instant) -> String {
        let left = deadline.saturating_duration_since(Instant::now());
        let not_after = connection.skew.not_after_us(left);
        let seen_us = self.seen_us.load(Ordering::Relaxed);
        match &self.clock {
            None => format!("{not_after}:{seen_us}"),
            Some(clock) => format!("{not_after}:{seen_us}:{}:{TEST_SHIFT_MS}", clock.server_now().get()),
        }
    }

    /// The connection at an index; makes one if there is none.
    async fn connection(
        self: &Arc<Node>,
        place: usize,
        deadline: Instant,
    ) -> Result<Arc<Connection>, CallError> {
        loop {
            let changed = self.places[place].changed.notified();
            tokio::pin!(changed);
            {
                let mut state = self.places[place].state.lock();
                if let Some(connection) = &state.connection {
                    return Ok(connection.clone());
                }
                if let Some((_, failed)) = state
                    .failed
                    .as_ref()
                    .filter(|(at, _)| at.elapsed() < CONNECT_PAUSE && !state.is_connecting)
                {
                    return Err(failed.call_error());
                }
                // Registers before the lock is released, so that no notification is missed.
                changed.as_mut().enable();
                if !state.is_connecting {
                    state.is_connecting = true;
                    let node = self.clone();
                    tokio::spawn(async move { node.connect(place).await });
                }
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(CallError::unconnected(&self.address));
            }
        }
    }

    async fn connect(self: Arc<Node>, place: usize) {
        let limit = self.timeout.max(CONNECT_AT_LEAST);
        let made = match timeout(limit, self.make()).await {
            Ok(made) => made,
            Err(_) => Err(CallError::unconnected(&self.address)),
        };
        let mut state = self.places[place].state.lock();
        state.is_connecting = false;
        match made {
            Ok(connection) => (state.connection, state.failed) = (Some(Arc::new(connection)), None),
            Err(call_error) => state.failed = Some((Instant::now(), Failed::of(&call_error))),
        }
        drop(state);
        self.places[place].changed.notify_waiters();
    }

    /// Makes a connection: logs in, loads the scripts, and reads the server's clock and its run id.
    async fn make(&self) -> Result<Connection, CallError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(CALLS_WAITING);
        let failed = |error| failure::of_connect(error, &self.address);
        let made = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let mut multiplexed = made.map_err(failed)?;
        // Reads the time first: a server that wants a password says so in the reply, but closes the connection of an
        // unauthenticated client that sends a whole script.
        let skew = Skew::new();
        measure(&mut multiplexed, &skew).await.map_err(failed)?;
        let scripts = script::all();
        for script in &scripts {
            let loaded = load(script).query_async::<()>(&mut multiplexed).await;
            loaded.map_err(failed)?;
        }
        self.scripts.store(scripts.len(), Ordering::Relaxed);
        self.recognise(&mut multiplexed).await;
        let now_us = our_us();
        Ok(Connection {
            multiplexed,
            skew,
            measured_us: AtomicU64::new(now_us),
            is_measuring: AtomicBool::new(false),
            answered_us: AtomicU64::new(now_us),
        })
    }

    /// Makes a connection that carries no calls, for pings. The caller sets the deadline.
    pub(crate) async fn connect_apart(&self) -> Result<MultiplexedConnection, CallError> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let made = self.client.get_multiplexed_async_connection_with_config(&config).await;
        made.map_err(|error| failure::of_connect(error, &self.address))
    }

    /// Checks whether the server restarted since the last connection: then counters may be lost.
    async fn recognise(&self, multiplexed: &mut MultiplexedConnection) {
        let mut info = redis::cmd("INFO");
        info.arg("server");
        // A user without the privilege for INFO can still charge.
        self.watch.look_soon();
        let Ok(text) = info.query_async::<String>(multiplexed).await else { return };
        let Some(run) = text.lines().find_map(|line| line.strip_prefix("run_id:")) else { return };
        let before = self.run.lock().replace(run.trim().to_owned());
        if before.is_some_and(|before| before != run.trim()) {
            self.losses.fetch_add(1, Ordering::Relaxed);
            self.watch.forget();
            tracing::warn!(server = self.address, "Redis was started anew; what was counted may be lost");
        }
    }

    /// Reads the server's clock again, in a background task.
    fn measure_soon(self: &Arc<Node>, place: usize, connection: &Arc<Connection>) {
        if connection.is_measuring.swap(true, Ordering::Relaxed) {
            return;
        }
        let (node, connection) = (self.clone(), connection.clone());
        tokio::spawn(async move {
            let mut multiplexed = connection.multiplexed.clone();
            match timeout(node.timeout, measure(&mut multiplexed, &connection.skew)).await {
                Ok(Ok(())) => connection.measured_us.store(our_us(), Ordering::Relaxed),
                Ok(Err(_)) => node.places[place].drop_connection(&connection),
                Err(_) => {}
            }
            connection.is_measuring.store(false, Ordering::Relaxed);
        });
    }

    /// Checks whether the server lost state, in a background task.
    fn watch_soon(self: &Arc<Node>, connection: &Arc<Connection>) {
        let (node, connection) = (self.clone(), connection.clone());
        tokio::spawn(async move {
            let within = node.timeout.max(CONNECT_AT_LEAST);
            if let Some(what) = node.watch.look(&mut connection.multiplexed.clone(), within).await {
                node.losses.fetch_add(1, Ordering::Relaxed);
                let server = &node.address;
                tracing::warn!(server, "Redis lost state ({what}); what was counted may be lost");
            }
        });
    }

    /// Marks the clock offset as outdated, because the server rejected a call as late.
    pub(crate) fn measure_again(&self) {
        for place in &self.places {
            if let Some(connection) = &place.state.lock().connection {
                connection.measured_us.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Loads the scripts into a server that lost them, or that does not have the newest yet.
    pub(crate) async fn load_scripts(self: &Arc<Node>, deadline: Instant) -> Result<(), CallError> {
        let scripts = script::all();
        if self.scripts.swap(scripts.len(), Ordering::Relaxed) == scripts.len() {
            tracing::warn!(server = self.address, "Redis lost our scripts; loading them again");
        }
        for script in scripts {
            self.call(deadline, false, &|_: &str| load(script)).await?;
        }
        Ok(())
    }
}

impl ConnectionSlot {
    /// Drops a broken connection, unless it was already replaced.
    fn drop_connection(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            state.connection = None;
        }
    }
}

/// The command that loads a script.
fn load(script: &Script) -> Cmd {
    let mut load = redis::cmd("SCRIPT");
    load.arg("LOAD").arg(&script.text);
    load
}

/// Reads the server's clock.
async fn measure(multiplexed: &mut MultiplexedConnection, skew: &Skew) -> redis::RedisResult<()> {
    let (seconds, micros): (i64, i64) = redis::cmd("TIME").query_async(multiplexed).await?;
    skew.saw(seconds * 1_000_000 + micros);
    Ok(())
}
