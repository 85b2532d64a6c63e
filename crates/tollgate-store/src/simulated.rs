//! A remote store for simulations: its client half is real, its servers and its network are virtual.
//!
//! A process of the simulation uses a [`SimulatedStore`]. It batches concurrent charges with the same code and the same shares as
//! on Redis (`remote/batching.rs`, `remote/shares.rs`). Every call has a deadline, which is kept here and sent to the server; the
//! server's clock is measured as on Redis; a call whose reply is lost is ambiguous and not sent again. The simulation implements
//! [`Network`], which delays or loses calls. A [`SimulatedServer`] carries calls out on a memory store, so that the kernel
//! decides (`simulated/server.rs`).
//!
//! Everything runs on the caller's tokio runtime. A simulation pauses that runtime's clock and advances it with its
//! [`ManualClock`](crate::ManualClock).

mod server;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::smallvec;
use tokio::time::{Instant, timeout_at};

pub use self::server::{Answer, Call, Operation, OwnedCharge, Reply, SimulatedServer};
pub use crate::random::seeded::SeededThread;
use crate::redis::batch::{BATCHES_IN_FLIGHT, CAPS, MAX_BATCH};
use crate::remote::batching::{self, Answers, Carrier, Check, Locks, Queue, Repeats};
use crate::remote::shares::{Claim, Claims, Share, Shares, latest_start};
use crate::remote::skew::Skew;
use crate::{
    ChargeId, Charged, Clock, Cost, Failure, Hold, Micros, NodeId, Nodes, Settled, Settlement, Store,
    StoreError, StoreFuture, StoreTask, StoredCharge, StoredLimit,
};

/// How often a server's clock is measured, as on Redis.
const MEASURE_EVERY: Micros = Micros::from_secs(1);

/// For calls that change nothing.
const AT_ANY_TIME: Micros = Micros::new(u64::MAX);

/// The reply to a call, once it comes.
pub type Replied = Pin<Box<dyn Future<Output = Result<Reply, Broken>> + Send>>;

/// Why a call has no reply, if that is known before its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The server took no connection: the call was not sent.
    Refused,
    /// The connection broke: the call may have been carried out.
    Reset,
}

/// Carries calls to servers and their replies back.
pub trait Network: Send + Sync + 'static {
    /// Sends a call to a server. A caller stops waiting for the reply at its deadline; the call itself goes on.
    fn send(&self, server: usize, call: Call) -> Replied;

    /// How many servers share the keys.
    fn servers(&self) -> usize;

    /// Which of them has a key.
    fn server_of(&self, key: &str) -> usize;
}

/// The store of one process: see the [module](self).
#[derive(Clone)]
pub struct SimulatedStore {
    network: Arc<dyn Network>,
    clock: Clock,
    timeout: Duration,
    queue: Arc<Queue<SimulatedStore>>,
    shares: Arc<Shares>,
    connections: Arc<[Connection]>,
    losses: Arc<AtomicU64>,
}

/// The state of a process about a server.
#[derive(Default)]
struct Connection {
    state: Mutex<ConnectionState>,
    is_measuring: AtomicBool,
}

#[derive(Default)]
struct ConnectionState {
    /// How far the server's clock is ahead of ours, and when that was measured.
    skew: Option<(Arc<Skew>, Micros)>,
    /// When the server last answered, by our clock.
    answered: Micros,
    /// Which start of the server it was.
    run: Option<u64>,
}

impl SimulatedStore {
    /// The store of a process that has this clock and this deadline for each call.
    pub fn new(network: Arc<dyn Network>, clock: Clock, timeout: Duration) -> SimulatedStore {
        let connections = (0..network.servers()).map(|_| Connection::default()).collect();
        let (queue, losses) = Default::default();
        SimulatedStore { network, clock, timeout, queue, shares: Shares::new(CAPS), connections, losses }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Calls a server, before `deadline`. `sent` is called once the call may have left.
    async fn call(
        &self,
        server: usize,
        operation: Operation,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answer, StoreError> {
        let skew = self.connect(server, deadline).await?;
        let start = Instant::now();
        if start >= deadline {
            return Err(StoreError::failed(Failure::Timeout, "there was no time left to send the call"));
        }
        sent();
        let now = self.clock.now();
        let ours = now.saturating_add((deadline - start).into());
        let not_after = Micros::new(skew.not_after_us_at(ours.get().cast_signed()));
        let connection = &self.connections[server];
        match timeout_at(deadline, self.network.send(server, Call { operation, not_after })).await {
            Ok(Ok(reply)) => {
                connection.state.lock().answered = self.clock.now();
                self.measure_soon(server);
                match reply.answer {
                    Ok(Answer::Late) => {
                        // The clock may have been set.
                        connection.state.lock().skew = None;
                        let message = "the call reached the server after its deadline, and was turned away";
                        Err(StoreError::failed(Failure::Late, message))
                    }
                    answer => answer,
                }
            }
            Ok(Err(broken)) => {
                connection.state.lock().skew = None;
                Err(broken.error())
            }
            Err(_) => {
                let mut state = connection.state.lock();
                // A connection without an answer for a whole deadline is dropped.
                if state.answered < now {
                    state.skew = None;
                }
                Err(StoreError::failed(Failure::Timeout, "the server did not answer in time").ambiguous())
            }
        }
    }

    /// Connects to a server if there is no connection, which is when its clock is measured.
    async fn connect(&self, server: usize, deadline: Instant) -> Result<Arc<Skew>, StoreError> {
        if let Some((skew, _)) = &self.connections[server].state.lock().skew {
            return Ok(skew.clone());
        }
        let failed = || StoreError::failed(Failure::Timeout, "the server took no connection in time");
        timeout_at(deadline, self.measure(server)).await.map_err(|_| failed())?
    }

    /// Measures how far a server's clock is ahead of ours.
    async fn measure(&self, server: usize) -> Result<Arc<Skew>, StoreError> {
        let call = Call { operation: Operation::Time, not_after: AT_ANY_TIME };
        // Nothing is changed by it, so it does not matter whether it was carried out.
        let unconnected = |_| StoreError::failed(Failure::Connection, "the server took no connection");
        let reply = self.network.send(server, call).await.map_err(unconnected)?;
        let now = self.clock.now();
        let mut state = self.connections[server].state.lock();
        let skew = state.skew.take().map_or_else(|| Arc::new(Skew::new()), |(skew, _)| skew);
        skew.saw_at(reply.now.get().cast_signed(), now.get().cast_signed());
        (state.skew, state.answered) = (Some((skew.clone(), now)), now);
        if state.run.replace(reply.run).is_some_and(|before| before != reply.run) {
            self.losses.fetch_add(1, Ordering::Relaxed);
        }
        Ok(skew)
    }

    /// Measures a server's clock again in the background, if it is time.
    fn measure_soon(&self, server: usize) {
        let connection = &self.connections[server];
        let measured = connection.state.lock().skew.as_ref().map(|(_, measured)| *measured);
        let is_due = measured.is_some_and(|at| self.clock.now().saturating_sub(at) >= MEASURE_EVERY);
        if is_due && !connection.is_measuring.swap(true, Ordering::Relaxed) {
            let store = self.clone();
            tokio::spawn(async move {
                let measured = timeout_at(store.deadline(), store.measure(server)).await;
                let connection = &store.connections[server];
                if let Ok(Err(_)) = measured {
                    connection.state.lock().skew = None;
                }
                connection.is_measuring.store(false, Ordering::Relaxed);
            });
        }
    }

    fn server_of(&self, charge: &StoredCharge<'_>) -> usize {
        self.network.server_of(charge.key)
    }

    /// The server of a call over several keys. Charges over several servers are beyond this store: they need the steps of a cluster.
    fn only_server(&self, charges: &[StoredCharge<'_>]) -> Result<usize, StoreError> {
        let server = charges.first().map_or(0, |charge| self.server_of(charge));
        match charges.iter().all(|charge| self.server_of(charge) == server) {
            true => Ok(server),
            false => {
                Err(StoreError::invalid("a simulated charge is of keys on one server; charge them apart"))
            }
        }
    }

    fn server_of_hold(&self, id: ChargeId) -> usize {
        self.network.server_of(&id.to_string())
    }

    fn hash(&self, charge: &StoredCharge<'_>) -> u64 {
        self.shares.hash((&charge.limit.name, charge.key))
    }

    fn limit_claim(&self, server: usize, name: &str) -> Claim {
        Claim::Limit(self.shares.hash((server, name)))
    }

    async fn share(&self, charges: &[StoredCharge<'_>], deadline: Instant) -> Result<Share, StoreError> {
        let mut claims = Claims::new();
        for charge in charges {
            let server = self.server_of(charge);
            claims.push(Claim::Key(self.hash(charge)));
            claims.push(self.limit_claim(server, &charge.limit.name));
            claims.push(Claim::Server(server as u64));
        }
        self.shares.claim(claims, latest_start(Instant::now(), deadline)).await
    }

    async fn charge_all(
        &self,
        charges: &[StoredCharge<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, StoreError> {
        let deadline = self.deadline();
        if let ([charge], None, 1) = (charges, hold, self.network.servers()) {
            let lane = self.limit_claim(0, &charge.limit.name);
            let check = Check {
                alike: (charge.limit.clone(), charge.cost, charge.shadow),
                key: charge.key.to_owned(),
                of_key: Claim::BatchedKey(self.hash(charge)),
                lane,
                of_batch: smallvec![lane, Claim::Server(0)],
            };
            return batching::charge(self, check, deadline).await;
        }
        let server = match hold {
            // A reservation is found by its id alone, so it is all on one server.
            Some(hold) if self.network.servers() > 1 => {
                let server = self.only_server(charges)?;
                if server != self.server_of_hold(hold.id) {
                    return Err(StoreError::invalid("a simulated reservation needs a store of one server"));
                }
                server
            }
            _ => self.only_server(charges)?,
        };
        let _share = self.share(charges, deadline).await?;
        let operation = Operation::Charge { charges: owned(charges), hold };
        match self.call(server, operation, deadline, &|| {}).await? {
            Answer::Charged(charged) => Ok(charged),
            _ => Err(no_answer()),
        }
    }

    async fn peek_all(&self, charges: &[StoredCharge<'_>]) -> Result<Charged, StoreError> {
        let (deadline, server) = (self.deadline(), self.only_server(charges)?);
        let _share = self.share(charges, deadline).await?;
        match self.call(server, Operation::Peek(owned(charges)), deadline, &|| {}).await? {
            Answer::Charged(charged) => Ok(charged),
            _ => Err(no_answer()),
        }
    }

    async fn settle_one(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let (deadline, server) = (self.deadline(), self.server_of_hold(id));
        let claims = smallvec![
            Claim::Key(self.shares.hash(id)),
            self.limit_claim(server, ""),
            Claim::Server(server as u64)
        ];
        let _share = self.shares.claim(claims, latest_start(Instant::now(), deadline)).await?;
        let operation = Operation::Settle(id, settlement.clone());
        match self.call(server, operation, deadline, &|| {}).await? {
            Answer::Settled(settled) => Ok(settled),
            _ => Err(no_answer()),
        }
    }

    async fn refund_all(&self, charges: &[StoredCharge<'_>]) -> Result<(), StoreError> {
        let (deadline, server) = (self.deadline(), self.only_server(charges)?);
        let _share = self.share(charges, deadline).await?;
        self.call(server, Operation::Refund(owned(charges)), deadline, &|| {}).await.map(drop)
    }

    async fn forget_one(&self, limit: &StoredLimit, key: &str) -> Result<bool, StoreError> {
        let charge = StoredCharge { limit, key, cost: Cost::ONE, shadow: false };
        let (deadline, server) = (self.deadline(), self.server_of(&charge));
        let _share = self.share(&[charge], deadline).await?;
        match self.call(server, Operation::Forget(OwnedCharge::of(&charge)), deadline, &|| {}).await? {
            Answer::Forgotten(forgotten) => Ok(forgotten),
            _ => Err(no_answer()),
        }
    }

    /// As on Redis, a ping has twice a call's deadline and a separate connection.
    async fn ping_server(&self, server: usize) -> Result<(), StoreError> {
        let call = Call { operation: Operation::Time, not_after: AT_ANY_TIME };
        match timeout_at(self.deadline() + self.timeout, self.network.send(server, call)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(broken)) => Err(broken.error()),
            Err(_) => Err(StoreError::failed(Failure::Timeout, "the server did not answer a ping in time")),
        }
    }
}

impl Broken {
    fn error(self) -> StoreError {
        match self {
            Broken::Refused => StoreError::failed(Failure::Connection, "the server took no connection"),
            Broken::Reset => StoreError::failed(Failure::Connection, "the connection broke").ambiguous(),
        }
    }
}

fn owned(charges: &[StoredCharge<'_>]) -> Vec<OwnedCharge> {
    charges.iter().map(OwnedCharge::of).collect()
}

fn no_answer() -> StoreError {
    StoreError::failed(Failure::Reply, "the server answered something else than it was asked").ambiguous()
}

/// Checks of one limit at one cost, charged separately.
impl Carrier for SimulatedStore {
    type Alike = (StoredLimit, Cost, bool);
    type Key = String;
    type Answer = Charged;

    const MAX_BATCH: usize = MAX_BATCH;
    const REPEATS: Repeats = Repeats::Freely;

    fn queue(&self) -> &Queue<SimulatedStore> {
        &self.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    fn ways(&self) -> usize {
        BATCHES_IN_FLIGHT
    }

    fn lane_ways(&self) -> usize {
        CAPS.limit
    }

    async fn carry(
        &self,
        (limit, cost, shadow): &Self::Alike,
        keys: &[String],
        _locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<Charged>, StoreError> {
        let operation =
            Operation::Each { limit: limit.clone(), cost: *cost, shadow: *shadow, keys: keys.to_vec() };
        match self.call(0, operation, deadline, sent).await? {
            Answer::Each(charged) => Ok(charged.into_iter().map(|charged| Some(Ok(charged))).collect()),
            _ => Err(no_answer()),
        }
    }
}

impl Store for SimulatedStore {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(self.charge_all(charges, hold))
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(self.settle_one(id, settlement))
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(self.peek_all(charges))
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(self.refund_all(charges))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.forget_one(limit, key))
    }

    fn mode(&self) -> &'static str {
        "simulated"
    }

    fn node_of(&self, charge: &StoredCharge<'_>) -> NodeId {
        NodeId::new(self.server_of(charge))
    }

    fn node_of_hold(&self, id: ChargeId) -> NodeId {
        NodeId::new(self.server_of_hold(id))
    }

    fn nodes(&self) -> Nodes {
        (0..self.network.servers()).map(NodeId::new).collect()
    }

    fn ping(&self, node: NodeId) -> StoreFuture<'_, ()> {
        Box::pin(self.ping_server(node.number()))
    }

    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        crate::spawn_on_tokio(task)
    }

    fn losses_possible(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for SimulatedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedStore").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
