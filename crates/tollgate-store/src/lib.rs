//! Stores: all the I/O of counting, none of its arithmetic.
//!
//! A [`Store`] holds the state of each key and lets the kernel decide whether a charge fits. Its operations are charge,
//! charge_each, settle, peek, status, refund and forget; a store may also keep [`Records`]. They mean the same on every store; the
//! suite in `conformance/` (a feature) checks that, and other authors' stores can run it too. The stores here: [`MemoryStore`], in this process; and behind features of the same
//! names, `RedisStore` for Redis and Redis Cluster, and `PostgresStore`.
//!
//! A refusal is an answer. [`StoreError`] means that the store could not decide. Only the library's `remote/fallback.rs` decides
//! what the caller gets then. The engine calls a store through `engine/local.rs` (memory) or `remote.rs`.

mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod memory;
mod pairs;
#[cfg(feature = "postgres")]
mod postgres;
mod random;
mod records;
#[cfg(feature = "redis")]
mod redis;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod remote;
mod script_time;
#[cfg(feature = "simulation")]
pub mod simulated;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;

use smallvec::SmallVec;

pub use clock::{Alarm, Clock, ManualClock};
pub use error::{Failure, Scope, StoreError};
pub use memory::{ChargedBucket, MemoryCharge, MemoryLimit, MemoryOptions, MemoryStore, WhenFull};
#[cfg(feature = "postgres")]
pub use postgres::{Cleaned, PostgresOptions, PostgresStore, PostgresTls};
pub use random::SecretHash;
pub use records::{PutRecord, Record, RecordKind, Records};
#[cfg(feature = "redis")]
pub use redis::{RedisOptions, RedisReport, RedisStore};
pub use script_time::ScriptTime;
pub use tollgate_kernel::{Cost, Limit, Micros, Outcome};

/// The answers of the limits of one charge, in their order; four fit without allocating.
pub type Outcomes = SmallVec<[Outcome; 4]>;

/// The result of a store's method: boxed, so that the store can be chosen at start.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The result of each of several charges: see [`Store::charge_each`].
pub type EachFuture<'a> = Pin<Box<dyn Future<Output = Vec<Result<Outcome, StoreError>>> + Send + 'a>>;

/// Work that a store runs beside its callers: see [`Store::spawn`].
pub type StoreTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The nodes of a store, few of them.
pub type Nodes = SmallVec<[NodeId; 4]>;

/// One node of a store: a server that can fail while others work. A store on one server has one node, [`NodeId::ONLY`]; a cluster
/// has one for each primary. Numbers are small, so that tables can be indexed by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(usize);

impl NodeId {
    /// The node of a store that has one.
    pub const ONLY: NodeId = NodeId(0);

    /// The most nodes that can be distinguished.
    pub const COUNT: usize = 1_024;

    /// The node of this number; above [`COUNT`](Self::COUNT), numbers are shared.
    pub const fn new(number: usize) -> NodeId {
        NodeId(number % NodeId::COUNT)
    }

    /// Its number, below [`COUNT`](Self::COUNT).
    pub const fn number(self) -> usize {
        self.0
    }
}

/// A limit as stores know it: its name identifies the counters, its parameters say how they count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLimit {
    /// The limit's name: `[a-z0-9_.-]{1,64}`.
    pub name: String,
    /// How much is allowed.
    pub limit: Limit,
    /// Which keys are placed on one server in stores on several servers.
    pub subject: Subject,
}

impl StoredLimit {
    /// A limit whose keys may be on any server.
    pub fn new(name: impl Into<String>, limit: Limit) -> StoredLimit {
        StoredLimit { name: name.into(), limit, subject: Subject::default() }
    }
}

/// What decides the server of a key in stores on several servers (Redis Cluster): keys with the same subject are on one server,
/// whatever their limits, so one charge over them is one step. It has no effect on other stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Subject {
    /// The whole key: the limits of one key are together.
    #[default]
    Key,
    /// The key's namespace: all keys of one namespace are on one server, such as those of a tenant.
    Namespace,
    /// All keys of all limits with this subject are together, such as those of background jobs. One server has all of them, so they should
    /// be few.
    All,
}

/// One limit of a charge.
#[derive(Clone, Copy)]
pub struct StoredCharge<'a> {
    /// Which limit.
    pub limit: &'a StoredLimit,
    /// The canonical text of the key.
    pub key: &'a str,
    /// How much.
    pub cost: Cost,
    /// Whether this is a shadow limit: its denial does not deny the charge, and then it is not charged.
    pub shadow: bool,
}

/// Without the key: `Debug` ends up in logs, and keys are personal data.
impl fmt::Debug for StoredCharge<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut charge = f.debug_struct("StoredCharge");
        charge.field("limit", self.limit).field("cost", &self.cost).field("shadow", &self.shadow);
        charge.finish_non_exhaustive()
    }
}

/// The answer to a charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charged {
    /// Whether all limits that are not shadow limits allow it; only then is anything charged.
    pub allowed: bool,
    /// The outcome of each limit, in the order of the charge.
    pub outcomes: Outcomes,
}

/// Makes the store remember a charge, so that it can be settled, cancelled or, for a lease, released and renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Names the charge. A charge that is sent again under the same name is answered as before and not charged again.
    pub id: ChargeId,
    /// How long it can be settled; a charge that is not settled by then stays as it is. A reservation lives at least as long as
    /// its leases. No store keeps a reservation for longer than [`MAX_TTL`](Self::MAX_TTL).
    pub ttl: Micros,
}

impl Hold {
    /// The longest time to live of a reservation: ten years. A longer one counts as this.
    pub const MAX_TTL: Micros = tollgate_kernel::MAX_SPAN;

    /// A time to live without an end, for holders in this process that release their leases when they go: in the memory store
    /// such leases do not expire while they are held. A store outside this process uses [`MAX_TTL`](Self::MAX_TTL).
    pub const UNTIL_RELEASED: Micros = Micros::new(u64::MAX);
}

/// The name of a held charge: 128 bits, written as 32 hexadecimal digits.
///
/// ```
/// use tollgate_store::ChargeId;
/// let id = ChargeId::random();
/// assert_eq!(id.to_string().parse::<ChargeId>().unwrap(), id);
/// assert_ne!(id, ChargeId::random());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChargeId(u128);

/// The upper half of every name of a reservation that charged nothing.
const NOTHING: u128 = !(u64::MAX as u128);

impl ChargeId {
    /// A name of one's own making; zero is not one.
    pub const fn new(id: u128) -> Option<ChargeId> {
        if id == 0 { None } else { Some(ChargeId(id)) }
    }

    /// An id that cannot be guessed: 128 random bits of the operating system.
    pub fn random() -> ChargeId {
        // Zero is as good as impossible, and then one is as good a name.
        ChargeId(u128::from_ne_bytes(random::bytes()).max(1))
    }

    /// An id for a reservation that charged nothing: no store has anything to settle under it.
    pub fn of_nothing() -> ChargeId {
        ChargeId(NOTHING | ChargeId::random().0 & u128::from(u64::MAX))
    }

    /// Whether this names a reservation that charged nothing.
    pub const fn is_of_nothing(self) -> bool {
        self.0 & NOTHING == NOTHING
    }

    /// The number.
    pub const fn get(self) -> u128 {
        self.0
    }
}

/// Any number names a charge; zero counts as one.
impl From<u128> for ChargeId {
    fn from(id: u128) -> ChargeId {
        ChargeId(id.max(1))
    }
}

impl fmt::Display for ChargeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for ChargeId {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<ChargeId, StoreError> {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let id = if digits { u128::from_str_radix(text, 16).ok() } else { None };
        let id = id.ok_or_else(|| {
            StoreError::invalid(
                "a reservation is named by 32 hexadecimal digits, as the reserve call returned it",
            )
        })?;
        ChargeId::new(id).ok_or_else(|| {
            StoreError::invalid(
                "no reservation is named by zeros alone; send the name that the reserve call returned",
            )
        })
    }
}

/// What became of a held charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// It cost this much, under every limit of the charge; only for charges that reserved the same under each.
    Actual(u64),
    /// The actual cost of each charge of the call, in order. Amounts of repeated pairs of limit and key add up, as their reserved
    /// costs do. A charge that took nothing (a shadow limit denied it) has nothing to correct, whatever its amount.
    Each(Vec<u64>),
    /// The actual cost under each named limit, for every key; the other limits keep their reserved cost.
    Named(Vec<(String, u64)>),
    /// Everything is given back.
    Cancel,
    /// The leases end; all other charges stay as reserved.
    Release,
    /// The leases are renewed, and the time to settle starts again.
    Renew,
}

/// The result of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The charge, and it was corrected, released or renewed.
    Done,
    /// A charge that was settled before; nothing changed.
    Already,
    /// No such charge, or its time has run out; nothing changed.
    Unknown,
    /// The charge, corrected, released or renewed where it counts, in this process. The store may hold a copy of it, because the
    /// reply to the charge was lost; that copy is cancelled as soon as the store answers. No store answers this: the library does.
    Pending,
}

/// Holds the counters. Works as `dyn Store`, because a server picks its store at start.
pub trait Store: Send + Sync + 'static {
    /// Makes all charges, or none: none if any limit that is not a shadow limit denies.
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged>;

    /// Makes each charge separately, in order: a refusal or a failure of one does not affect the others, and a repeated pair is
    /// charged again. The answer has one result for each charge, in order; an allowed outcome was charged.
    ///
    /// The default makes one call for each charge.
    fn charge_each<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(async move {
            let mut outcomes = Vec::with_capacity(charges.len());
            for charge in charges {
                outcomes.push(only_outcome(self.charge(std::slice::from_ref(charge), None).await));
            }
            outcomes
        })
    }

    /// Corrects, releases or renews a held charge.
    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled>;

    /// Answers as `charge` would, and changes nothing.
    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged>;

    /// The state of a key under a limit: what is left, and whether one more unit would fit. Changes nothing.
    ///
    /// The default peeks twice.
    fn status<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, Outcome> {
        Box::pin(async move {
            let charge = |cost| [StoredCharge { limit, key, cost, shadow: false }];
            // A cost that never fits is refused and changes nothing, so its outcome shows the current state.
            let current = only_outcome(self.peek(&charge(Cost::MAX)).await)?;
            let one = only_outcome(self.peek(&charge(Cost::ONE)).await)?;
            Ok(Outcome { allowed: one.allowed, retry_after: one.retry_after, ..current })
        })
    }

    /// Gives each charge's cost back, whichever caller was charged: the newest charge first, never more than is charged now,
    /// nothing of leases, and nothing to a key that is not remembered. Charges are refunded one after the other; shadow limits are
    /// refunded too. In a store on several servers, some charges may be given back and others not: the error is then
    /// [ambiguous](StoreError::is_ambiguous).
    ///
    /// A refund has no id, so a refund that may have taken effect must not be sent again. The default is an error.
    fn refund<'a>(&'a self, _charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(async { Err(StoreError::invalid("this store cannot refund; reserve and settle instead")) })
    }

    /// Forgets all charges of a key under a limit; false if it has none.
    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool>;

    /// The records of a kind, unless their revision is `known`: what servers share beside counters.
    ///
    /// The default of this and the next two methods is a store without records.
    fn records(&self, _kind: RecordKind, _known: Option<u64>) -> StoreFuture<'_, Records> {
        Box::pin(async { Err(no_records()) })
    }

    /// Stores a record. It replaces a record with the same id, so it can be sent again.
    fn put_record<'a>(&'a self, _kind: RecordKind, _record: &'a Record) -> StoreFuture<'a, PutRecord> {
        Box::pin(async { Err(no_records()) })
    }

    /// Removes a record; false when there was none.
    fn remove_record<'a>(&'a self, _kind: RecordKind, _id: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async { Err(no_records()) })
    }

    /// What kind of store this is, for metrics, logs and traces: one short word that never changes.
    fn mode(&self) -> &'static str {
        "custom"
    }

    /// The node that holds the counters of a charge. Called for every charge of every call: no I/O.
    fn node_of(&self, _item: &StoredCharge<'_>) -> NodeId {
        NodeId::ONLY
    }

    /// The node that holds a reservation, or knows where its parts are.
    fn node_of_hold(&self, _id: ChargeId) -> NodeId {
        NodeId::ONLY
    }

    /// The current nodes.
    fn nodes(&self) -> Nodes {
        Nodes::from_slice(&[NodeId::ONLY])
    }

    /// Checks whether a node can serve calls at all: a cheap round trip with a separate deadline on a separate connection, so
    /// that no caller can delay it. An error means that no call to this node can succeed now. A problem of one key, limit or
    /// privilege is no error here, nor is a store without room for new keys. A node that is no longer part of the store succeeds.
    ///
    /// The default peeks with no charges.
    fn ping(&self, _node: NodeId) -> StoreFuture<'_, ()> {
        Box::pin(async move { self.peek(&[]).await.map(drop) })
    }

    /// Runs a task beside the callers, or hands it back if this store has nothing to run it on. A task that is handed back is
    /// run by a caller, which waits for it.
    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        Some(task)
    }

    /// How often the counters may have been lost, as far as the store can notice.
    fn losses_possible(&self) -> u64 {
        0
    }

    /// How long scripts ran inside of the store since this process first looked, those of other programs included; `None` if the
    /// store does not say.
    fn script_time(&self) -> Option<ScriptTime> {
        None
    }
}

/// The error of a store without records.
fn no_records() -> StoreError {
    StoreError::invalid(
        "this store keeps no records, so there are no overrides at run time and no list of servers",
    )
}

/// The outcome of a call with one charge.
fn only_outcome(charged: Result<Charged, StoreError>) -> Result<Outcome, StoreError> {
    let missing = || StoreError::failed(Failure::Reply, "the store answered a charge without an outcome");
    charged?.outcomes.first().copied().ok_or_else(missing)
}

/// A store that is shared is a store.
impl<S: Store + ?Sized> Store for std::sync::Arc<S> {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        (**self).charge(charges, hold)
    }

    fn charge_each<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        (**self).charge_each(charges)
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        (**self).settle(id, settlement)
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        (**self).peek(charges)
    }

    fn status<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, Outcome> {
        (**self).status(limit, key)
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        (**self).refund(charges)
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        (**self).forget(limit, key)
    }

    fn records(&self, kind: RecordKind, known: Option<u64>) -> StoreFuture<'_, Records> {
        (**self).records(kind, known)
    }

    fn put_record<'a>(&'a self, kind: RecordKind, record: &'a Record) -> StoreFuture<'a, PutRecord> {
        (**self).put_record(kind, record)
    }

    fn remove_record<'a>(&'a self, kind: RecordKind, id: &'a str) -> StoreFuture<'a, bool> {
        (**self).remove_record(kind, id)
    }

    fn mode(&self) -> &'static str {
        (**self).mode()
    }

    fn node_of(&self, charge: &StoredCharge<'_>) -> NodeId {
        (**self).node_of(charge)
    }

    fn node_of_hold(&self, id: ChargeId) -> NodeId {
        (**self).node_of_hold(id)
    }

    fn nodes(&self) -> Nodes {
        (**self).nodes()
    }

    fn ping(&self, node: NodeId) -> StoreFuture<'_, ()> {
        (**self).ping(node)
    }

    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        (**self).spawn(task)
    }

    fn losses_possible(&self) -> u64 {
        (**self).losses_possible()
    }

    fn script_time(&self) -> Option<ScriptTime> {
        (**self).script_time()
    }
}

/// Spawns a task on the tokio runtime of the caller; hands it back where there is none.
#[cfg(any(feature = "redis", feature = "postgres"))]
fn spawn_on_tokio(task: StoreTask) -> Option<StoreTask> {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => {
            runtime.spawn(task);
            None
        }
        Err(_) => Some(task),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hold_ids_are_read_as_written_or_refused() {
        let id = ChargeId::new(0xabc).unwrap();
        assert_eq!(id.to_string(), "00000000000000000000000000000abc");
        assert_eq!(id.to_string().parse::<ChargeId>().unwrap(), id);
        let zeros = "0".repeat(32).parse::<ChargeId>().unwrap_err();
        assert!(
            zeros.is_invalid() && zeros.to_string().starts_with("no reservation is named by zeros alone")
        );
        for text in ["", "abc", &"g".repeat(32), &"+".repeat(32), &"a".repeat(33)] {
            let error = text.parse::<ChargeId>().unwrap_err();
            assert!(error.to_string().contains("32 hexadecimal digits"), "{text}");
            assert!(error.is_invalid());
        }
        assert!(ChargeId::new(0).is_none());
        let nothing = ChargeId::of_nothing();
        assert!(
            nothing.is_of_nothing()
                && !ChargeId::random().is_of_nothing()
                && nothing != ChargeId::of_nothing()
        );
    }
}
