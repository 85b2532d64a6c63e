//! Counters in Redis: one server or a cluster, one script call for each decision.
//!
//! The path of a call: `remote.rs` merges repeated pairs of limit and key. `codec.rs` and `shape.rs` encode the pairs as script
//! arguments. `batch.rs` sends several calls in one script. `route.rs` finds the server of the slot, and `node.rs` sends the
//! command. The script reads the state and calls the Lua twins; the kernel turns the values that it returns into outcomes. On a
//! cluster a charge may have keys in several slots (`spread.rs`). There is no limiter arithmetic in this folder.
//!
//! Every call has a deadline, which is checked here and again in the script. A call returns by its deadline. If it fails, the
//! error says whether nothing was charged or whether it may have been charged (`failure.rs`).

pub(crate) mod batch;
mod codec;
mod commandstats;
mod failure;
mod node;
mod options;
mod ping;
mod placed;
mod probe;
mod records;
mod route;
mod script;
mod shape;
mod slot;
mod spread;
mod watch;

use std::sync::Arc;

use redis::{Cmd, Value};
use smallvec::smallvec;
use tokio::time::Instant;

use self::batch::Settlements;
pub use self::options::RedisOptions;
pub use self::probe::RedisReport;
use self::route::{Named, Route};
use self::script::Script;
use self::shape::{Answer, ChargeKeys, HoldShape, Operation, Shape};
use self::slot::{Names, slot};
use crate::remote::MergedCharges;
use crate::remote::batching::{self, Queue};
use crate::remote::each;
use crate::remote::shares::Shares;
use crate::{
    ChargeId, Charged, EachFuture, Hold, NodeId, Nodes, Outcome, PutRecord, Record, RecordKind, Records,
    ScriptTime, Settled, Settlement, Store, StoreError, StoreFuture, StoreTask, StoredCharge, StoredLimit,
};

/// Counters in Redis. Cheap to clone; clones share their connections.
///
/// Creating a store sends nothing: the first call connects. Use it within a tokio runtime.
///
/// ```no_run
/// use tollgate_store::{RedisOptions, RedisStore};
///
/// # async fn run() -> Result<(), tollgate_store::StoreError> {
/// let store = RedisStore::new(RedisOptions::new("redis://127.0.0.1:6379"))?;
/// for warning in store.probe().await?.warnings {
///     eprintln!("{warning}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    route: Arc<Route>,
    names: Names,
    queue: Arc<Queue<RedisStore>>,
    settlements: Arc<Queue<Settlements>>,
    shares: Arc<Shares>,
}

impl RedisStore {
    /// Creates a store with these options; an error if they are invalid.
    pub fn new(options: RedisOptions) -> Result<RedisStore, StoreError> {
        let names = Names::new(&options.prefix);
        let shares = Shares::new(batch::CAPS);
        let (queue, settlements) = Default::default();
        Ok(RedisStore { route: Route::new(options)?, names, queue, settlements, shares })
    }

    /// The prefix of all key names.
    pub fn prefix(&self) -> &str {
        &self.route.options().prefix
    }

    /// How many times counters may have been lost, as far as this process noticed: a server restarted, was flushed, evicted keys
    /// or loaded older data, or slots moved to another server. Servers are checked about once a second while there is traffic.
    /// After f losses a limit may have admitted f + 1 times as much.
    pub fn losses_possible(&self) -> u64 {
        self.route.losses()
    }

    /// Whether all servers have room for new keys: each uses at most 80 % of its `maxmemory` and has fewer than
    /// [`RedisOptions::max_keys`] keys, as of the last check (about once a second while there is traffic).
    pub fn takes_new_keys(&self) -> bool {
        self.route.known_nodes().iter().all(|node| node.takes_new_keys())
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.route.options().timeout
    }

    /// Calls a script on the server that has the slot of the first key. `put` adds the arguments after the operation.
    async fn call(
        &self,
        script: &'static Script,
        operation: &'static str,
        keys: &[&str],
        named: Named,
        deadline: Instant,
        put: &(dyn Fn(&mut Cmd) + Send + Sync),
    ) -> Result<Value, StoreError> {
        let build = |not_after: &str| {
            let mut cmd = redis::cmd("EVALSHA");
            cmd.arg(&script.hash).arg(keys.len()).arg(keys).arg(not_after).arg(operation);
            put(&mut cmd);
            cmd
        };
        let slot = if self.route.is_cluster() { keys.first().map_or(0, |key| slot(key)) } else { 0 };
        self.route.call(slot, named, deadline, &build).await
    }

    /// Makes charges of one shape separately, in one script call.
    async fn charge_alike(
        &self,
        charges: &[StoredCharge<'_>],
        places: Vec<usize>,
        deadline: Instant,
    ) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        let part = |place: usize| {
            let StoredCharge { limit, key, cost, .. } = charges[place];
            // A separate charge reports the denial of a shadow limit like any other denial.
            StoredCharge { limit, key, cost, shadow: false }
        };
        let parts: Vec<StoredCharge<'_>> = places.into_iter().map(part).collect();
        let Some(first) = parts.first() else { return Ok(Vec::new()) };
        let shape = Shape::of(std::slice::from_ref(first), None);
        let charge =
            |part: &StoredCharge<'_>| ChargeKeys { parts: smallvec![self.names.part(part)], hold: None };
        let charges: Vec<ChargeKeys> = parts.iter().map(charge).collect();
        let _share = self.share(&parts, deadline).await?;
        let answers = self.send(&shape, Operation::Charge, &charges, deadline, &|| {}).await?;
        let outcome = |(part, answer): (&StoredCharge<'_>, Result<Answer, StoreError>)| match answer? {
            Answer::Found(found) => {
                let outcome = part.limit.limit.answer(&found.readings[0], part.cost, found.now);
                match outcome.allowed == found.passed {
                    true => Ok(outcome),
                    false => Err(crate::remote::disagreement(1, found.passed)),
                }
            }
            Answer::Held(_) => Err(codec::no_answer("a charge")),
        };
        Ok(parts.iter().zip(answers).map(outcome).collect())
    }

    /// Makes each charge separately. Charges of the same shape in the same slot go in one script call.
    async fn charge_all_alone(&self, charges: &[StoredCharge<'_>]) -> Vec<Result<Outcome, StoreError>> {
        let deadline = self.deadline();
        let kind = |charge: &StoredCharge<'_>| {
            let StoredCharge { limit, key, cost, .. } = *charge;
            let part = StoredCharge { limit, key, cost, shadow: false };
            let slot = if self.route.is_cluster() { slot(&self.names.part(&part)) } else { 0 };
            (Shape::of(&[part], None), slot)
        };
        let groups = each::groups(charges, kind, |charge| self.server_of(charge), false, batch::MAX_BATCH);
        each::charge(charges.len(), groups, deadline, |places| self.charge_alike(charges, places, deadline))
            .await
    }

    /// Charges that are on one server: one script call.
    async fn charge_batched(
        &self,
        parts: &[StoredCharge<'_>],
        operation: Operation,
        hold: Option<(&str, Hold, &str)>,
        deadline: Instant,
    ) -> Result<Answer, StoreError> {
        let (shape, charge) = self.charge_of(parts, operation, hold);
        let mut answers = self.send(&shape, operation, &[charge], deadline, &|| {}).await?;
        answers.pop().unwrap_or_else(|| Err(codec::no_answer("a charge")))
    }

    /// The shape and the keys of a charge, as the script gets them.
    fn charge_of(
        &self,
        parts: &[StoredCharge<'_>],
        operation: Operation,
        hold: Option<(&str, Hold, &str)>,
    ) -> (Shape, ChargeKeys) {
        let held = hold.map(|(_, hold, request)| HoldShape {
            operation,
            ttl: hold.ttl,
            request: request.to_owned(),
        });
        let order = shape::order_of(parts, hold.is_some());
        let keys = order.iter().map(|index| self.names.part(&parts[*index])).collect();
        let hold = hold.map(|(key, hold, _)| (key.to_owned(), hold.id));
        (Shape::of(parts, held), ChargeKeys { parts: keys, hold })
    }

    async fn charge_all(
        &self,
        charges: &[StoredCharge<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, StoreError> {
        let parts = MergedCharges::of(charges);
        let deadline = self.deadline();
        if self.route.is_cluster() {
            let spread = async {
                let _share = self.share(&parts.parts, deadline).await?;
                self.charge_spread(charges, &parts, hold, deadline).await
            };
            return Box::pin(spread).await;
        }
        let (shape, charge) = match hold {
            None => self.charge_of(&parts.parts, Operation::Charge, None),
            Some(hold) => {
                let (key, request) = (self.names.hold(hold.id), codec::remembered_request(charges, &parts));
                self.charge_of(&parts.parts, Operation::Hold, Some((&key, hold, &request)))
            }
        };
        let check = self.check(&parts.parts, shape, charge);
        match batching::charge(self, check, deadline).await? {
            Answer::Found(found) => parts.conclude(&codec::outcomes(&parts, &found), found.passed),
            Answer::Held(held) => held.answer(&parts),
        }
    }

    async fn peek_all(&self, charges: &[StoredCharge<'_>]) -> Result<Charged, StoreError> {
        let parts = MergedCharges::of(charges);
        let deadline = self.deadline();
        let _share = self.share(&parts.parts, deadline).await?;
        if self.route.is_cluster() {
            return self.peek_spread(&parts, deadline).await;
        }
        match self.charge_batched(&parts.parts, Operation::Peek, None, deadline).await? {
            Answer::Found(found) => parts.conclude(&codec::outcomes(&parts, &found), found.passed),
            Answer::Held(..) => Err(codec::no_answer("a peek")),
        }
    }

    async fn status_of(&self, limit: &StoredLimit, key: &str) -> Result<Outcome, StoreError> {
        let parts = [StoredCharge { limit, key, cost: crate::Cost::ONE, shadow: false }];
        let deadline = self.deadline();
        let _share = self.share(&parts, deadline).await?;
        match self.charge_batched(&parts, Operation::Peek, None, deadline).await? {
            Answer::Found(found) => Ok(limit.limit.status(&found.readings[0], found.now)),
            Answer::Held(..) => Err(codec::no_answer("a peek")),
        }
    }

    /// Settles the hold at `keys[0]`; on a cluster the keys of its parts follow.
    async fn settle_at(
        &self,
        keys: &[String],
        id: ChargeId,
        settlement: &Settlement,
        deadline: Instant,
    ) -> Result<Settled, StoreError> {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let answer = self.send_settlement(settlement, &keys, &[id], deadline, &|| {}).await?;
        batch::read_only(&answer, settlement)
    }

    async fn settle_one(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let deadline = self.deadline();
        if self.route.is_cluster() {
            let _share = self.settlement_share(id, deadline).await?;
            return Box::pin(self.settle_spread(id, settlement, deadline)).await;
        }
        self.settle_batched(id, settlement, deadline).await
    }

    async fn refund_all(&self, charges: &[StoredCharge<'_>]) -> Result<(), StoreError> {
        let parts = MergedCharges::to_refund(charges);
        let deadline = self.deadline();
        let _share = self.share(&parts.parts, deadline).await?;
        match parts.parts.is_empty() {
            true => Ok(()),
            false if self.route.is_cluster() => self.refund_spread(&parts, deadline).await,
            false => self.refund_batched(&parts.parts, deadline).await,
        }
    }

    /// Charges that are on one server: one script call. A refund has no id, so it is not sent again if it may have been done.
    async fn refund_batched(&self, parts: &[StoredCharge<'_>], deadline: Instant) -> Result<(), StoreError> {
        let keys: Vec<String> = parts.iter().map(|part| self.names.part(part)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let put = |cmd: &mut Cmd| parts.iter().for_each(|part| codec::put_refund(cmd, part));
        let answer = self.call(&script::REFUND, "refund", &keys, Named::No, deadline, &put).await?;
        match words(&answer).as_deref() {
            Some([word]) if word == "DONE" => Ok(()),
            _ => Err(codec::no_answer("a refund")),
        }
    }

    async fn forget_one(&self, limit: &StoredLimit, key: &str) -> Result<bool, StoreError> {
        let part = StoredCharge { limit, key, cost: crate::Cost::ONE, shadow: false };
        let (key, deadline) = (self.names.part(&part), self.deadline());
        let _share = self.share(&[part], deadline).await?;
        match self.send_hold("forget", &[&key], ChargeId::from(0), deadline).await? {
            Value::Int(forgotten) => Ok(forgotten > 0),
            _ => Err(codec::no_answer("a reset")),
        }
    }
}

/// A held charge that was made before: its request, and the values that the script found then.
pub(crate) struct Held {
    request: String,
    given: Value,
}

impl Held {
    fn read(answer: &Value) -> Option<Held> {
        let Value::Array(words) = answer else { return None };
        let [Value::BulkString(word), Value::BulkString(request), given] = &words[..] else { return None };
        let request = String::from_utf8(request.clone()).ok()?;
        (word == b"HELD").then(|| Held { request, given: given.clone() })
    }

    fn found(&self, parts: &[StoredCharge<'_>]) -> Option<codec::Found> {
        codec::read_remembered(&self.given, parts)
    }

    /// Whether the charge had other keys than the one that was sent.
    fn is_of_other_keys(&self) -> bool {
        self.request.is_empty()
    }

    /// The answer of the first call with this id, unless that was another charge than `sent`. The script returns an empty request
    /// if its keys were others.
    fn answer(&self, sent: &MergedCharges<'_>) -> Result<Charged, StoreError> {
        let wrong = || codec::no_answer("a hold");
        let remembered = codec::RememberedCharge::read(&self.request).ok_or_else(wrong)?;
        let charges = remembered.charges();
        let parts = MergedCharges::of(&charges);
        if !sent.is_same_request(&parts) {
            return Err(StoreError::id_taken());
        }
        let found = self.found(&parts.parts).ok_or_else(wrong)?;
        parts.conclude(&codec::outcomes(&parts, &found), found.passed)
    }
}

/// The strings of an answer that is a list of strings or one string.
fn words(answer: &Value) -> Option<Vec<String>> {
    let words = match answer {
        Value::Array(words) => &words[..],
        word => std::slice::from_ref(word),
    };
    let word = |word: &Value| match word {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    };
    words.iter().map(word).collect()
}

fn different_amounts(reserved: &[String]) -> StoreError {
    StoreError::invalid(format!(
        "one actual amount cannot settle limits that reserved different amounts ({}); give one for each limit",
        reserved.join(", ")
    ))
}

fn no_such_limit(name: &str, names: &[String]) -> StoreError {
    let names = names.join(", ");
    StoreError::invalid(format!("this reservation holds nothing under the limit `{name}`; it holds {names}"))
}

impl Store for RedisStore {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(self.charge_all(charges, hold))
    }

    fn charge_each<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(self.charge_all_alone(charges))
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(self.settle_one(id, settlement))
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(self.peek_all(charges))
    }

    fn status<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, Outcome> {
        Box::pin(self.status_of(limit, key))
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(self.refund_all(charges))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.forget_one(limit, key))
    }

    fn records(&self, kind: RecordKind, known: Option<u64>) -> StoreFuture<'_, Records> {
        Box::pin(self.read_records(kind, known))
    }

    fn put_record<'a>(&'a self, kind: RecordKind, record: &'a Record) -> StoreFuture<'a, PutRecord> {
        Box::pin(self.keep_record(kind, record))
    }

    fn remove_record<'a>(&'a self, kind: RecordKind, id: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.drop_record(kind, id))
    }

    fn mode(&self) -> &'static str {
        "redis"
    }

    fn node_of(&self, charge: &StoredCharge<'_>) -> NodeId {
        if !self.route.is_cluster() {
            return NodeId::ONLY;
        }
        let StoredCharge { limit, key, cost, shadow } = *charge;
        self.route.node_of(slot(&self.names.part(&StoredCharge { limit, key, cost, shadow })))
    }

    fn node_of_hold(&self, id: ChargeId) -> NodeId {
        match self.route.is_cluster() {
            true => self.route.node_of(slot(&self.names.place(id))),
            false => NodeId::ONLY,
        }
    }

    fn nodes(&self) -> Nodes {
        self.route.node_ids()
    }

    fn ping(&self, node: NodeId) -> StoreFuture<'_, ()> {
        Box::pin(self.ping_node(node))
    }

    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        crate::spawn_on_tokio(task)
    }

    fn losses_possible(&self) -> u64 {
        RedisStore::losses_possible(self)
    }

    fn script_time(&self) -> Option<ScriptTime> {
        self.route.script_time()
    }
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore").field("options", self.route.options()).finish_non_exhaustive()
    }
}
