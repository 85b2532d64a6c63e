//! Chooses the server for a call: the only one, or on a cluster the server that has the slot.
//!
//! Redirections are followed here and not by the client, because the client would also repeat calls that may have been done. A
//! call that was surely not done is sent again a few times, with a short random pause, and never after the deadline. A call that
//! may have been done is sent again only if it has an id. The slot table comes from any server that answers; it is read at the
//! first call, after MOVED, and when a server cannot be reached.
//!
//! `redis.rs` calls [`Route::call`]; `node.rs` sends the command; `failure.rs` classifies the errors. What a command means does
//! not matter here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ConnectionAddr, ConnectionInfo, Value};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::commandstats::ScriptSum;
use super::failure::{CallError, Redirection, Remedy};
use super::node::Node;
use super::options::RedisOptions;
use super::slot::SLOTS;
use super::watch::Watch;
use crate::{Failure, NodeId, Nodes, ScriptTime, StoreError};

/// The most attempts of a call, redirections included.
const TRIES: usize = 5;

/// The time limit for reading the slot table.
const LEARN_WITHIN: Duration = Duration::from_millis(500);

/// The shortest time between two reads of the slot table.
const LEARN_PAUSE: Duration = Duration::from_millis(20);

/// Whether a call has an id, so that it may be sent again although it may have been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Yes,
    No,
}

pub(crate) struct Route {
    options: RedisOptions,
    seeds: Vec<ConnectionInfo>,
    nodes: Mutex<HashMap<String, Arc<Node>>>,
    /// The server of each slot; empty until it is known.
    owners: RwLock<Vec<Arc<Node>>>,
    is_learning: AtomicBool,
    learned: Notify,
    last_learned: Mutex<Option<Instant>>,
    /// Why the last read of the slot table failed, if it failed.
    learn_error: Mutex<Option<StoreError>>,
    losses: Arc<AtomicU64>,
    script_sum: ScriptSum,
    /// The addresses of a cluster's servers by number, from 1: see [`NodeId`].
    numbers: RwLock<Vec<String>>,
    /// For each pinged server, the connection that is used only for pings.
    pub(super) pings: Mutex<HashMap<String, MultiplexedConnection>>,
}

impl Route {
    pub(crate) fn new(options: RedisOptions) -> Result<Arc<Route>, StoreError> {
        options.check()?;
        let seeds = options.addresses()?;
        let route = Route {
            seeds,
            nodes: Mutex::default(),
            owners: RwLock::default(),
            is_learning: AtomicBool::new(false),
            learned: Notify::new(),
            last_learned: Mutex::new(None),
            learn_error: Mutex::new(None),
            losses: Arc::default(),
            script_sum: ScriptSum::default(),
            numbers: RwLock::default(),
            pings: Mutex::default(),
            options,
        };
        // Builds a client for each seed, so that invalid options are reported now.
        for seed in &route.seeds {
            route.node_at(seed.addr().clone())?;
        }
        Ok(Arc::new(route))
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.options.cluster
    }

    pub(crate) fn options(&self) -> &RedisOptions {
        &self.options
    }

    /// How many times state may have been lost: a server restarted, or slots moved to another server.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// How long scripts ran inside of the servers, once one has said so.
    pub(crate) fn script_time(&self) -> Option<ScriptTime> {
        self.script_sum.get()
    }

    /// All servers known now.
    pub(crate) fn known_nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.lock().values().cloned().collect()
    }

    /// The servers that have slots; the only server if this is not a cluster.
    pub(crate) fn primaries(&self) -> Vec<Arc<Node>> {
        if !self.is_cluster() {
            return self.known_nodes();
        }
        let mut primaries: Vec<Arc<Node>> = Vec::new();
        for owner in self.owners.read().iter() {
            if !primaries.iter().any(|known| Arc::ptr_eq(known, owner)) {
                primaries.push(owner.clone());
            }
        }
        primaries
    }

    /// A number for the server of a slot, as far as it is known.
    pub(crate) fn server_of(&self, slot: u16) -> u64 {
        let owners = self.owners.read();
        owners.get(usize::from(slot)).map_or(0, |owner| Arc::as_ptr(owner).addr() as u64)
    }

    /// The node that has a slot. Until the slot table is known, a cluster is one node, [`NodeId::ONLY`].
    pub(crate) fn node_of(&self, slot: u16) -> NodeId {
        match self.owners.read().get(usize::from(slot)) {
            Some(owner) if self.is_cluster() => self.number_of(&owner.address),
            _ => NodeId::ONLY,
        }
    }

    /// The nodes that have slots.
    pub(crate) fn node_ids(&self) -> Nodes {
        let primaries = if self.is_cluster() { self.primaries() } else { Vec::new() };
        match primaries.is_empty() {
            true => Nodes::from_slice(&[NodeId::ONLY]),
            false => primaries.iter().map(|node| self.number_of(&node.address)).collect(),
        }
    }

    /// The number of a cluster's server. Numbers of removed servers are reused, so that they stay small.
    fn number_of(&self, address: &str) -> NodeId {
        let place = |numbers: &[String]| numbers.iter().position(|known| known == address);
        if let Some(place) = place(&self.numbers.read()) {
            return NodeId::new(place + 1);
        }
        let nodes = self.nodes.lock();
        let mut numbers = self.numbers.write();
        let known = place(&numbers).or_else(|| numbers.iter().position(|known| !nodes.contains_key(known)));
        match known {
            Some(place) => address.clone_into(&mut numbers[place]),
            None => numbers.push(address.to_owned()),
        }
        NodeId::new(known.unwrap_or(numbers.len() - 1) + 1)
    }

    /// The server with a number, if it has slots.
    pub(super) fn primary(&self, node: NodeId) -> Option<Arc<Node>> {
        self.primaries()
            .into_iter()
            .find(|primary| !self.is_cluster() || self.number_of(&primary.address) == node)
    }

    /// Whether a server has a slot.
    pub(super) fn has(&self, node: &Arc<Node>, slot: u16) -> bool {
        !self.is_cluster()
            || self.owners.read().get(usize::from(slot)).is_some_and(|owner| Arc::ptr_eq(owner, node))
    }

    /// The server at an address, with its connections; one for each address.
    fn node_at(&self, addr: ConnectionAddr) -> Result<Arc<Node>, StoreError> {
        let address = addr.to_string();
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.get(&address) {
            return Ok(node.clone());
        }
        let RedisOptions { timeout, connections, clock, .. } = &self.options;
        let client = self.options.client(addr, &self.seeds[0])?;
        let (losses, watch) = (self.losses.clone(), Watch::new(&self.options, self.script_sum.clone()));
        let node = Node::new(address.clone(), client, *timeout, *connections, clock.clone(), losses, watch);
        nodes.insert(address, node.clone());
        Ok(node)
    }

    /// The server at `host:port`, with the connection settings of the first seed.
    fn node_named(&self, address: &str) -> Result<Arc<Node>, StoreError> {
        let wrong = || {
            StoreError::failed(
                Failure::Reply,
                "Redis named a server by what is no address: please report this",
            )
        };
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        let (seed_host, is_tls) = match self.seeds[0].addr() {
            ConnectionAddr::TcpTls { host, .. } => (host.as_str(), true),
            ConnectionAddr::Tcp(host, _) => (host.as_str(), false),
            _ => return Err(wrong()),
        };
        // A server that does not know its own address leaves it out.
        let host = if host.is_empty() { seed_host } else { host }.to_owned();
        let addr = match is_tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        };
        self.node_at(addr)
    }

    /// Sends a command to the server that has `slot`, following redirections, before `deadline`.
    pub(crate) async fn call(
        self: &Arc<Route>,
        slot: u16,
        named: Named,
        deadline: Instant,
        build: &(dyn Fn(&str) -> Cmd + Send + Sync),
    ) -> Result<Value, StoreError> {
        // If one attempt may have been done, the error is ambiguous even if the last attempt surely was not.
        let mut may_be_done = false;
        let result = self.call_until(slot, named, deadline, build, &mut may_be_done).await;
        result.map_err(|error| if may_be_done { error.ambiguous() } else { error })
    }

    async fn call_until(
        self: &Arc<Route>,
        slot: u16,
        named: Named,
        deadline: Instant,
        build: &(dyn Fn(&str) -> Cmd + Send + Sync),
        may_be_done: &mut bool,
    ) -> Result<Value, StoreError> {
        let mut redirection: Option<Redirection> = None;
        let mut tries = 0;
        loop {
            tries += 1;
            let node = match &redirection {
                Some(Redirection { address, .. }) => self.node_named(address)?,
                None => self.owner(slot, deadline).await?,
            };
            let is_asking = redirection.take().is_some_and(|redirection| redirection.is_asking);
            let call_error = match node.call(deadline, is_asking, build).await {
                Ok(Value::SimpleString(status)) if status == "LATE" => {
                    node.measure_again();
                    let error = "the call reached Redis after its deadline, and was turned away";
                    return Err(StoreError::failed(Failure::Late, error));
                }
                Ok(value) => return Ok(value),
                Err(call_error) => call_error,
            };
            *may_be_done |= call_error.remedy == Remedy::Ambiguous;
            let Some(again) = self.again(slot, &node, &call_error, named, deadline).await else {
                return Err(call_error.error);
            };
            if tries >= TRIES {
                return Err(call_error.error);
            }
            redirection = again;
        }
    }

    /// Whether to send the call again: `Some(None)` sends it to the owner of the slot, `Some(Some(_))` follows a redirection.
    async fn again(
        self: &Arc<Route>,
        slot: u16,
        node: &Arc<Node>,
        call_error: &CallError,
        named: Named,
        deadline: Instant,
    ) -> Option<Option<Redirection>> {
        match call_error.remedy {
            Remedy::LoadScripts => node.load_scripts(deadline).await.ok().map(|()| None),
            Remedy::Redirect if self.is_cluster() => {
                let redirection = call_error.redirection.clone()?;
                if !redirection.is_asking {
                    self.moved(slot, &redirection.address);
                    self.learn_soon();
                }
                Some(Some(redirection))
            }
            Remedy::Retry => {
                self.learn_soon();
                pause(deadline).await.then_some(None)
            }
            Remedy::Ambiguous => {
                self.learn_soon();
                // A call that timed out has no time left for another attempt.
                (named == Named::Yes && call_error.is_broken && pause(deadline).await).then_some(None)
            }
            Remedy::GiveUp if call_error.error.failure() == Some(Failure::Timeout) => {
                self.learn_soon();
                None
            }
            Remedy::GiveUp | Remedy::Redirect => None,
        }
    }

    /// The server that has a slot; waits for the slot table if necessary.
    pub(super) async fn owner(
        self: &Arc<Route>,
        slot: u16,
        deadline: Instant,
    ) -> Result<Arc<Node>, StoreError> {
        if !self.is_cluster() {
            return self.node_at(self.seeds[0].addr().clone());
        }
        loop {
            let learned = self.learned.notified();
            tokio::pin!(learned);
            learned.as_mut().enable();
            if let Some(owner) = self.owners.read().get(usize::from(slot)) {
                return Ok(owner.clone());
            }
            if let Some(error) =
                self.learn_error.lock().as_ref().filter(|error| error.failure() == Some(Failure::Refused))
            {
                // Another read does not help this call, but it may help the next one.
                self.learn_soon();
                return Err(error.for_another());
            }
            self.learn_soon();
            if timeout_at(deadline, learned).await.is_err() {
                return Err(StoreError::failed(
                    Failure::Timeout,
                    "no server of the Redis cluster said in time where the slots are",
                ));
            }
        }
    }

    /// Records the new owner of a slot after a redirection.
    fn moved(&self, slot: u16, address: &str) {
        let Ok(node) = self.node_named(address) else { return };
        if let Some(owner) = self.owners.write().get_mut(usize::from(slot)) {
            *owner = node;
        }
    }

    /// Reads the slot table in a background task, unless one is running; waits if the last read was just now.
    pub(crate) fn learn_soon(self: &Arc<Route>) {
        if !self.is_cluster() || self.is_learning.swap(true, Ordering::AcqRel) {
            return;
        }
        let route = self.clone();
        tokio::spawn(async move {
            let last = *route.last_learned.lock();
            if let Some(last) = last {
                sleep_until(last + LEARN_PAUSE).await;
            }
            let learned = route.learn().await;
            *route.learn_error.lock() = match learned {
                Ok(slots) => {
                    route.take_over(&slots);
                    None
                }
                Err(error) => error,
            };
            *route.last_learned.lock() = Some(Instant::now());
            route.is_learning.store(false, Ordering::Release);
            route.learned.notify_waiters();
        });
    }

    /// Asks every known server for the slot table, and takes the first valid answer. If there is none, the error is preferably a
    /// permanent one that needs a fix.
    async fn learn(self: &Arc<Route>) -> Result<Slots, Option<StoreError>> {
        let deadline = Instant::now() + LEARN_WITHIN;
        let mut calls = JoinSet::new();
        for node in self.known_nodes() {
            calls.spawn(async move {
                let build = |_: &str| {
                    let mut cmd = redis::cmd("CLUSTER");
                    cmd.arg("SLOTS");
                    cmd
                };
                let answer = node.call(deadline, false, &build).await;
                answer.map(|answer| read_slots(&answer, &node.address)).map_err(|call_error| call_error.error)
            });
        }
        let mut learn_error: Option<StoreError> = None;
        while let Some(answer) = calls.join_next().await {
            match answer {
                Ok(Ok(Some(slots))) => return Ok(slots),
                Ok(Err(error)) if learn_error.is_none() || error.failure() == Some(Failure::Refused) => {
                    learn_error = Some(error);
                }
                _ => {}
            }
        }
        Err(learn_error)
    }

    /// Replaces the slot table. Servers that are no longer in it are removed, except the seeds.
    fn take_over(&self, slots: &Slots) {
        let mut named: Vec<(u16, u16, Arc<Node>)> = Vec::new();
        for (first, last, address) in slots {
            match self.node_named(address) {
                Ok(node) => named.push((*first, *last, node)),
                Err(_) => return,
            }
        }
        // A slot without a server goes to the first server, which replies with an error.
        let Some((_, _, first_node)) = named.first() else { return };
        let mut owners = vec![first_node.clone(); usize::from(SLOTS)];
        for (first, last, node) in &named {
            owners[usize::from(*first)..=usize::from(*last)].fill(node.clone());
        }
        let before = std::mem::replace(&mut *self.owners.write(), owners.clone());
        let changed =
            before.iter().zip(&owners).filter(|(before, now)| before.address != now.address).count();
        if changed > 0 {
            self.losses.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                slots = changed,
                "slots of the Redis cluster have another server; what was counted last may be lost"
            );
        }
        let seeds: Vec<String> = self.seeds.iter().map(|seed| seed.addr().to_string()).collect();
        let is_named = |address: &String| named.iter().any(|(_, _, node)| node.address == *address);
        self.nodes.lock().retain(|address, _| is_named(address) || seeds.contains(address));
        self.pings.lock().retain(|address, _| is_named(address));
    }
}

/// Ranges of slots, and `host:port` of their primary.
type Slots = Vec<(u16, u16, String)>;

fn read_slots(answer: &Value, address: &str) -> Option<Slots> {
    let Value::Array(ranges) = answer else { return None };
    let own_host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let range = |range: &Value| {
        let Value::Array(fields) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &fields[..] else {
            return None;
        };
        let [host, Value::Int(port), ..] = &primary[..] else { return None };
        let host = match host {
            Value::BulkString(host) => String::from_utf8(host.clone()).ok().filter(|host| !host.is_empty()),
            _ => None,
        };
        let slot = |slot: i64| u16::try_from(slot).ok().filter(|slot| *slot < SLOTS);
        let host = host.unwrap_or_else(|| own_host.to_owned());
        let (first, last) = (slot(*first)?, slot(*last)?);
        (first <= last).then(|| (first, last, format!("{host}:{port}")))
    };
    let slots: Option<Slots> = ranges.iter().map(range).collect();
    slots.filter(|slots| !slots.is_empty())
}

/// Waits a short random time; false if the deadline would come first.
async fn pause(deadline: Instant) -> bool {
    let random = crate::ChargeId::random().get() % 25_000;
    let pause = Duration::from_micros(5_000 + u64::try_from(random).unwrap_or(0));
    if Instant::now() + pause >= deadline {
        return false;
    }
    sleep(pause).await;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn slots_are_read_or_refused() {
        let node = |host, port| Value::Array(vec![host, Value::Int(port), bulk("id")]);
        let range = |first, last, node| Value::Array(vec![Value::Int(first), Value::Int(last), node]);
        let sound = Value::Array(vec![
            range(0, 5_460, node(bulk("10.0.0.1"), 7_000)),
            range(5_461, 16_383, node(Value::Nil, 7_001)),
        ]);
        let slots = read_slots(&sound, "127.0.0.1:7001").unwrap();
        assert_eq!(slots[0], (0, 5_460, "10.0.0.1:7000".to_owned()));
        assert_eq!(
            slots[1],
            (5_461, 16_383, "127.0.0.1:7001".to_owned()),
            "a server that does not know its address"
        );
        for wrong in [
            Value::Nil,
            Value::Array(vec![]),
            Value::Array(vec![range(0, 16_384, node(bulk("h"), 1))]),
            Value::Array(vec![range(-1, 5, node(bulk("h"), 1))]),
            Value::Array(vec![range(9, 5, node(bulk("h"), 1))]),
            Value::Array(vec![range(0, 5, Value::Nil)]),
        ] {
            assert!(read_slots(&wrong, "h:1").is_none(), "{wrong:?}");
        }
    }
}
