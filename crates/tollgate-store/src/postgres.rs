//! The PostgreSQL store: counters in a database that many processes share.
//!
//! A charge on one limit is one statement (upsert/), decided on the locked row under read committed. A charge on several limits
//! without a hold is also one statement (several/). Everything else is one call of a function (charge.sql, settle.sql,
//! refund.sql). All of them call the SQL twins of the kernel to decide whether a charge fits; the values that they return become
//! outcomes in the kernel (`codec.rs`). There is no limiter arithmetic in this folder.
//!
//! `batch.rs`, `several.rs` and `shared_commit.rs` send several calls in one statement; `call.rs` sends a statement on a
//! connection of `pool.rs` before its deadline. The deadline is also sent to the server, in the server's time (`remote/skew.rs`), so
//! that a late call changes nothing. `fault.rs` classifies errors, `schema.rs` creates tables and functions, and `sweep.rs`
//! deletes expired rows.
//!
//! Durability: a charge is acknowledged before it is on disk, so a crash of the server may lose the last moments (at most about
//! 0.6 s with PostgreSQL's defaults). Held charges and settlements are on disk before they are acknowledged.

mod batch;
mod call;
mod codec;
mod fault;
mod options;
mod ping;
mod pool;
mod records;
mod room;
mod schema;
mod several;
mod shared_commit;
mod sick;
mod statement;
mod sweep;
mod tls;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_postgres::Row;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::ToSql;
use tollgate_kernel::{Cost, MAX_COUNT, Outcome};
use uuid::Uuid;

use self::batch::Alike;
use self::call::{Resend, Until};
use self::codec::{
    ChargeArrays, answer_again, column, instant, key_of, nonsense, parameters, price, reading, readings,
    remembered, whole,
};
use self::ping::PingLink;
use self::pool::Pool;
use self::room::{Room, no_room};
use self::shared_commit::{
    FunctionAnswer, FunctionCharge, FunctionCharges, HeldCharge, SameLimits, SettleCall, Settlements,
    is_lock_timeout,
};
use self::sick::{SickKeys, is_of_a_state};
use self::statement::{Keys, Plain, Verb};
use self::sweep::Totals;
use crate::remote::MergedCharges;
use crate::remote::batching::{self, Check, Locks, Queue};
use crate::remote::each;
use crate::remote::shares::{Claim, Shares};
use crate::{
    ChargeId, Charged, Clock, EachFuture, Failure, Hold, Micros, NodeId, Outcomes, PutRecord, Record,
    RecordKind, Records, Settled, Settlement, Store, StoreError, StoreFuture, StoreTask, StoredCharge,
    StoredLimit,
};

/// The answers of a statement, by key.
type AnsweredKeys = Vec<(Uuid, Result<Answered, StoreError>)>;

pub use self::options::{PostgresOptions, PostgresTls};
pub use self::sweep::Cleaned;

/// The most keys of a statement.
const MOST_KEYS: usize = 1_000;

/// Into how many statements the keys are divided after a statement met a locked row.
const LOCKED_PARTS: usize = 8;

/// Counters in PostgreSQL. Cheap to clone; clones share connections.
///
/// ```no_run
/// # async fn doc() -> Result<(), tollgate_store::StoreError> {
/// use tollgate_store::{Cost, StoredCharge, Limit, PostgresOptions, PostgresStore, Store, StoredLimit};
///
/// let store = PostgresStore::connect(PostgresOptions::new("postgres://app@localhost/app")).await?;
/// let api = StoredLimit::new("api", Limit::token_bucket("10/s", 20).unwrap());
/// let charge = StoredCharge { limit: &api, key: "user:42", cost: Cost::ONE, shadow: false };
/// assert!(store.charge(&[charge], None).await?.allowed);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Arc<Pool>,
    timeout: Duration,
    clock: Option<Clock>,
    cleanup_every: Option<Duration>,
    cleaned: Totals,
    queue: Queue<PostgresStore>,
    function_charges: Queue<FunctionCharges>,
    settlements: Queue<Settlements>,
    shares: Arc<Shares>,
    room: Arc<Room>,
    /// Keys whose stored state a statement recently could not process.
    sick: Mutex<SickKeys>,
    /// The connection for pings, once there was a ping.
    ping: Mutex<Option<PingLink>>,
}

impl Inner {
    /// The time of a test's clock, if there is one.
    fn clock_us(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| whole(clock.server_now().get()))
    }
}

impl PostgresStore {
    /// A store with these options. Checks them and reads certificates, but sends nothing: the first call finds a missing schema.
    pub fn new(options: PostgresOptions) -> Result<PostgresStore, StoreError> {
        let config = options.checked()?;
        let tls = match config.get_ssl_mode() {
            SslMode::Require => Some(tls::connector(&options.tls)?),
            _ => None,
        };
        let PostgresOptions { prefix, timeout, connections, max_keys, cleanup_every, clock, .. } = options;
        let pool = Arc::new(Pool::new(config, tls, prefix, timeout, connections));
        let inner = Inner {
            pool,
            timeout,
            clock,
            cleanup_every,
            cleaned: Totals::default(),
            queue: Queue::default(),
            function_charges: Queue::default(),
            settlements: Queue::default(),
            shares: Shares::new(batch::caps(connections)),
            room: Arc::new(Room::new(max_keys)),
            sick: Mutex::default(),
            ping: Mutex::default(),
        };
        Ok(PostgresStore { inner: Arc::new(inner) })
    }

    /// [`new`](Self::new), then [`migrate`](Self::migrate) and [`probe`](Self::probe); logs the warnings of the probe, and starts
    /// the cleanup.
    pub async fn connect(options: PostgresOptions) -> Result<PostgresStore, StoreError> {
        let store = PostgresStore::new(options)?;
        store.migrate().await?;
        for warning in store.probe().await? {
            tracing::warn!("{warning}");
        }
        store.start_cleanup();
        Ok(store)
    }

    /// Creates the tables and functions, or updates them. Does nothing if they are up to date.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        schema::migrate(&self.inner.pool).await
    }

    /// Checks the server and the schema. A setup that cannot work is an error that says what to do; dangerous settings are
    /// returned.
    pub async fn probe(&self) -> Result<Vec<String>, StoreError> {
        schema::probe(&self.inner.pool).await
    }

    /// Starts the task that cleans up at the interval of the options; [`connect`](Self::connect) has done so.
    pub fn start_cleanup(&self) {
        if let Some(every) = self.inner.cleanup_every {
            sweep::spawn(&self.inner, every);
        }
    }

    /// Deletes every key whose state equals no state and every expired hold. Returns how many rows.
    pub async fn cleanup(&self) -> Result<Cleaned, StoreError> {
        sweep::cleanup(&self.inner).await
    }

    /// How many rows this store has deleted.
    pub fn cleaned_total(&self) -> Cleaned {
        self.inner.cleaned.get()
    }

    /// How many times this store noticed that the server crashed or was replaced by another: each time, charges of the last
    /// moments may have been lost.
    pub fn losses_possible(&self) -> u64 {
        self.inner.pool.losses()
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.inner.pool.open_links()
    }

    /// Makes each charge separately. Equal charges go in one statement, up to a thousand. Charges that a statement cannot make go
    /// to the function, each key in its own call, because the function fails for all its keys or for none. All calls have one
    /// deadline.
    async fn charge_all_alone(&self, charges: &[StoredCharge<'_>]) -> Vec<Result<Outcome, StoreError>> {
        let until = self.until();
        let kind = |charge: &StoredCharge<'_>| match plain(charge.limit, charge.cost) {
            Some(plain) => Kind::Alike(plain, charge.limit.clone(), charge.cost),
            None => Kind::OfKey(key_of(charge.limit, charge.key)),
        };
        let groups = each::groups(charges, kind, |_| 0, true, MOST_KEYS);
        let call = |places| self.charge_group(charges, places, until);
        each::charge(charges.len(), groups, until.deadline.into(), call).await
    }

    /// Charges of one kind, on different pairs: one call.
    async fn charge_group(
        &self,
        charges: &[StoredCharge<'_>],
        places: Vec<usize>,
        until: Until<'_>,
    ) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        let charges: Vec<StoredCharge<'_>> = places.into_iter().map(|place| charges[place]).collect();
        let Some(first) = charges.first() else { return Ok(Vec::new()) };
        if let Some(plain) = plain(first.limit, first.cost) {
            let keys: Vec<&str> = charges.iter().map(|charge| charge.key).collect();
            return self.charge_alike(plain, first.limit, &keys, first.cost, &until).await;
        }
        // The function makes all charges of a call or none. Such a group has one charge: its kind is its key.
        let charged = self.charge_parts(&charges, &MergedCharges::of(&charges), None, &until).await?;
        Ok(charged.outcomes.into_iter().map(Ok).collect())
    }

    /// Charges different keys of one limit with one cost, each separately: one statement.
    async fn charge_alike(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        keys: &[&str],
        cost: Cost,
        until: &Until<'_>,
    ) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        let names: Vec<Uuid> = keys.iter().map(|key| key_of(limit, key)).collect();
        let mut batch = names.clone();
        batch.sort_unstable();
        let parts: Vec<StoredCharge<'_>> =
            keys.iter().map(|key| StoredCharge { limit, key, cost, shadow: false }).collect();
        let _share = self.share(&parts, until).await?;
        let is_known: Option<HashSet<Uuid>> = match self.refuses_new_keys(&limit.limit) {
            true => Some(self.known(&batch, until).await?.into_iter().collect()),
            false => None,
        };
        batch.retain(|name| is_known.as_ref().is_none_or(|known| known.contains(name)));
        let mut answers = self.upsert_each(plain, limit, cost, &batch, Locks::Wait, until).await?;
        let outcome = |name: &Uuid| match answers.remove(name) {
            Some(answered) => answered.map(|answered| answered.outcome),
            None if is_known.as_ref().is_some_and(|known| !known.contains(name)) => Err(no_room()),
            None => Err(self.late(1)),
        };
        Ok(names.iter().map(outcome).collect())
    }

    async fn charge_all(
        &self,
        charges: &[StoredCharge<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, StoreError> {
        if charges.is_empty() && hold.is_none() {
            return Ok(Charged { allowed: true, outcomes: Outcomes::new() });
        }
        let parts = MergedCharges::of(charges);
        match alone(&parts, hold) {
            Some((plain, part)) => {
                let key = key_of(part.limit, part.key);
                let alike = Alike { plain, limit: part.limit.clone(), cost: part.cost };
                let (of_key, of_limit) = (self.key_claim(part.limit, part.key), self.limit_claim(part.limit));
                let check = Check {
                    alike,
                    key,
                    of_key,
                    lane: of_limit,
                    of_batch: smallvec::smallvec![of_limit, Claim::Server(0)],
                };
                let answered = batching::charge(self, check, self.until().deadline.into()).await?;
                parts.conclude(&[answered.outcome], answered.admitted || part.shadow)
            }
            None => self.charge_parts(charges, &parts, hold, &self.until()).await,
        }
    }

    /// The same charge on several keys, sorted, each separately: one statement. Late keys have no answer, and were not charged.
    ///
    /// A statement fails for all its keys or for none. If it cannot process the state of one key, its halves are sent, and so on;
    /// a key that fails alone goes in its own statement for a while. If a row is locked, that is the answer, or the keys are
    /// divided into smaller statements until the locked key is alone; that statement is the last one.
    async fn upsert_each(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        cost: Cost,
        keys: &[Uuid],
        locks: Locks,
        until: &Until<'_>,
    ) -> Result<HashMap<Uuid, Result<Answered, StoreError>>, StoreError> {
        let (alone, together) = self.inner.sick.lock().split(keys);
        let mut groups: VecDeque<Vec<Uuid>> = alone.into_iter().map(|key| vec![key]).collect();
        groups.extend(Some(together).filter(|together| !together.is_empty()));
        let mut answers = HashMap::with_capacity(keys.len());
        while let Some(mut group) = groups.pop_back() {
            let error = match self.upsert(plain, limit, cost, &group, until).await {
                Ok(answered) => {
                    let is_left = plain.has_chunks() && answered.len() < group.len();
                    answers.extend(answered);
                    if is_left {
                        group.retain(|key| !answers.contains_key(key));
                        answers.extend(self.charge_chunks(limit, cost, &group, until).await);
                    }
                    continue;
                }
                Err(error) => error,
            };
            // Nothing of this statement was written.
            match (is_of_a_state(&error), &group[..]) {
                (true, [key]) => {
                    self.inner.sick.lock().note(*key);
                    answers.insert(*key, Err(error));
                }
                (true, _) => {
                    let half = group.split_off(group.len() / 2);
                    groups.extend([group, half]);
                }
                (false, [_, _, ..]) if locks == Locks::Wait && is_lock_timeout(&error) => {
                    for some in group.chunks(group.len().div_ceil(LOCKED_PARTS)) {
                        match some {
                            [alone] => groups.push_front(vec![*alone]),
                            some => groups.push_back(some.to_vec()),
                        }
                    }
                }
                // A failure of the server concerns all keys without an answer.
                (false, _) if answers.is_empty() => return Err(error),
                (false, _) => answers.extend(group.iter().map(|key| (*key, Err(error.for_another())))),
            }
        }
        Ok(answers)
    }

    /// One statement: the same charge on several keys, sorted, each separately. Late keys have no answer, and were not charged.
    async fn upsert(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        cost: Cost,
        keys: &[Uuid],
        until: &Until<'_>,
    ) -> Result<AnsweredKeys, StoreError> {
        let clock_us = self.inner.clock_us();
        let many = if keys.len() == 1 { Keys::One } else { Keys::Many };
        let one: &(dyn ToSql + Sync) = if many == Keys::One { &keys[0] } else { &keys };
        let numbers = UpsertNumbers::of(limit, cost, clock_us);
        let rows = self
            .call(Verb::Upsert(plain, many), Resend::Never, &numbers.values(plain, one, limit), until)
            .await?;
        self.read_upsert(plain, limit, cost, &rows)
    }

    /// Reads the answer of a statement for each key.
    fn read_upsert(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        cost: Cost,
        rows: &[Row],
    ) -> Result<AnsweredKeys, StoreError> {
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows {
            let at_us = column(row, 2)?;
            if self.inner.clock.is_none() {
                self.inner.pool.skew.saw(at_us);
            }
            // A row that cannot be read does not affect the others.
            let answered = || {
                let (found, at) = (found(plain, row)?, instant(at_us)?);
                let outcome = limit.limit.answer(&reading(&limit.limit, &found)?, cost, at);
                Ok(Answered { outcome, admitted: column(row, 1)? })
            };
            answers.push((column(row, 0)?, answered()));
        }
        Ok(answers)
    }

    fn late(&self, keys: usize) -> StoreError {
        self.inner.pool.read_server_time();
        let place = &self.inner.pool.place;
        StoreError::failed(
            Failure::Late,
            format!(
                "PostgreSQL at {place}: a charge of {keys} keys came after its deadline and changed nothing"
            ),
        )
    }

    /// A charge by the function: several limits, a hold, a log or leases.
    async fn charge_parts(
        &self,
        charges: &[StoredCharge<'_>],
        parts: &MergedCharges<'_>,
        hold: Option<Hold>,
        until: &Until<'_>,
    ) -> Result<Charged, StoreError> {
        let keys: Vec<Uuid> = parts.parts.iter().map(|part| key_of(part.limit, part.key)).collect();
        let invented =
            parts.parts.iter().zip(&keys).filter(|(part, _)| self.refuses_new_keys(&part.limit.limit));
        let invented: Vec<Uuid> = invented.map(|(_, key)| *key).collect();
        if !invented.is_empty() && self.known(&invented, until).await?.len() < invented.len() {
            return Err(no_room());
        }
        let limits = parts.parts.iter().map(|part| part.limit.clone()).collect();
        let same = SameLimits { limits, is_held: hold.is_some() };
        let held = |hold: Hold| HeldCharge {
            id: Uuid::from_u128(hold.id.get()),
            ttl_us: whole(hold.ttl.min(Hold::MAX_TTL).get()),
            asked: remembered(charges, parts),
        };
        let charge = FunctionCharge {
            keys,
            costs: parts.parts.iter().map(|part| whole(part.cost.get())).collect(),
            shadows: parts.parts.iter().map(|part| part.shadow).collect(),
            hold: hold.map(held),
        };
        let answer = match charges.len() == parts.parts.len() {
            true => self.charge_by_function(&parts.parts, same, charge, until).await?,
            // Its remembered request has another length than those of other charges.
            false => {
                let _share = self.share(&parts.parts, until).await?;
                self.call_charge(&same, &charge, until).await?
            }
        };
        let FunctionAnswer { passed, at, numbers, asked_before } = answer;
        match asked_before {
            Some(before) => answer_again(&remembered(charges, parts), &before, &numbers, at),
            None => parts.conclude(&parts.outcomes(readings(parts, &numbers)?, at), passed),
        }
    }

    async fn peek_parts(&self, parts: &MergedCharges<'_>) -> Result<Charged, StoreError> {
        let (row, numbers, at) = self.look(parts).await?;
        parts.conclude(&parts.outcomes(readings(parts, &numbers)?, at), column(&row, 0)?)
    }

    async fn status_of(&self, limit: &StoredLimit, key: &str) -> Result<Outcome, StoreError> {
        let parts = MergedCharges::of(&[StoredCharge { limit, key, cost: Cost::ONE, shadow: false }]);
        let (_, numbers, at) = self.look(&parts).await?;
        let reading = readings(&parts, &numbers)?.into_iter().next();
        reading.map(|reading| limit.limit.status(&reading, at)).ok_or_else(|| nonsense("no state of a key"))
    }

    /// The state of the parts, and the time.
    async fn look(&self, parts: &MergedCharges<'_>) -> Result<(Row, Vec<i64>, Micros), StoreError> {
        let arrays = ChargeArrays::of(parts);
        let clock_us = self.inner.clock_us();
        let ChargeArrays { keys, strategies, parameters, costs, shadows, .. } = &arrays;
        let values: &[&(dyn ToSql + Sync)] = &[keys, strategies, parameters, costs, shadows, &clock_us];
        let until = self.until();
        let _share = self.share(&parts.parts, &until).await?;
        let row = self.call_one(Verb::Peek, Resend::Once, values, &until).await?;
        self.inner.pool.skew.saw(column(&row, 2)?);
        let (numbers, at) = (column(&row, 3)?, instant(column(&row, 1)?)?);
        Ok((row, numbers, at))
    }

    async fn settle_hold(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let bounded = |actual: &u64| whole((*actual).min(MAX_COUNT));
        let (kind, actual): (&'static str, Option<i64>) = match settlement {
            Settlement::Actual(actual) => ("actual", Some(bounded(actual))),
            Settlement::Each(_) => ("positions", None),
            Settlement::Named(_) | Settlement::Release => ("each", None),
            Settlement::Cancel => ("cancel", None),
            Settlement::Renew => ("renew", None),
        };
        // No text in PostgreSQL contains a NUL, and no name of a limit does: such a value is a mistake of the caller, not a
        // failure of the store.
        let (names, actuals): (Vec<String>, Vec<i64>) = match settlement {
            Settlement::Each(actuals) => (Vec::new(), actuals.iter().map(bounded).collect()),
            Settlement::Named(actuals) => {
                let sound = |name: &String| name.replace('\0', "\u{fffd}");
                actuals.iter().map(|(name, actual)| (sound(name), bounded(actual))).unzip()
            }
            _ => Default::default(),
        };
        let call = SettleCall { id: Uuid::from_u128(id.get()), kind, actual, names, actuals };
        let (names, amounts) = (call.names.clone(), call.actuals.len());
        let SettleReply { status, held_names, held_costs } =
            self.settle_by_function(id, call, &self.until()).await?;
        match &*status {
            "done" => Ok(Settled::Done),
            "already" => Ok(Settled::Already),
            "unknown" => Ok(Settled::Unknown),
            "differ" => {
                let held = held_names.iter().zip(&held_costs);
                let held: Vec<String> = held.map(|(name, cost)| format!("{name} {cost}")).collect();
                Err(StoreError::invalid(format!(
                    "one actual amount cannot settle limits that reserved different amounts ({}); give one for each limit",
                    held.join(", ")
                )))
            }
            "unnamed" => {
                let other = names.iter().find(|name| !held_names.contains(name));
                Err(StoreError::invalid(format!(
                    "this reservation holds nothing under the limit `{}`; it holds {}",
                    other.map_or("", String::as_str),
                    held_names.join(", ")
                )))
            }
            "count" => {
                let charges = held_costs.first().copied().unwrap_or_default();
                Err(StoreError::wrong_count(usize::try_from(charges).unwrap_or_default(), amounts))
            }
            other => Err(nonsense(format!("the status {other}"))),
        }
    }

    async fn refund_all(&self, charges: &[StoredCharge<'_>]) -> Result<(), StoreError> {
        let parts = MergedCharges::to_refund(charges);
        if parts.parts.is_empty() {
            return Ok(());
        }
        let ChargeArrays { keys, strategies, parameters, costs, .. } = &ChargeArrays::of(&parts);
        let clock_us = self.inner.clock_us();
        let values: &[&(dyn ToSql + Sync)] = &[keys, strategies, parameters, costs, &clock_us];
        let until = self.until();
        let _share = self.share(&parts.parts, &until).await?;
        let row = self.call_one(Verb::Refund, Resend::Never, values, &until).await?;
        self.inner.pool.skew.saw(column(&row, 0)?);
        Ok(())
    }

    async fn forget_key(&self, limit: &StoredLimit, key: &str) -> Result<bool, StoreError> {
        let until = self.until();
        let _share =
            self.share(&[StoredCharge { limit, key, cost: Cost::ONE, shadow: false }], &until).await?;
        let key = key_of(limit, key);
        let row = self.call_one(Verb::Forget, Resend::Never, &[&key], &until).await?;
        self.inner.pool.skew.saw(column(&row, 1)?);
        column(&row, 0)
    }
}

/// The numeric parameters of a statement.
struct UpsertNumbers {
    numbers: Vec<i64>,
    price: (i64, i64),
    clock_us: Option<i64>,
}

impl UpsertNumbers {
    fn of(limit: &StoredLimit, cost: Cost, clock_us: Option<i64>) -> UpsertNumbers {
        UpsertNumbers { numbers: parameters(&limit.limit), price: price(&limit.limit, cost), clock_us }
    }

    /// All values of the statement except the last, in order.
    fn values<'a>(
        &'a self,
        plain: Plain,
        keys: &'a (dyn ToSql + Sync),
        limit: &'a StoredLimit,
    ) -> Vec<&'a (dyn ToSql + Sync)> {
        let number = |index: usize| -> &(dyn ToSql + Sync) { &self.numbers[index] };
        let (price_us, price_rest) = &self.price;
        let mut values: Vec<&(dyn ToSql + Sync)> = vec![keys, &limit.name];
        match plain {
            Plain::TokenBucket | Plain::LeakyBucket => {
                values.extend([number(0), number(1), number(2), number(4), price_us, price_rest]);
            }
            Plain::FixedWindow => values.extend([number(0), number(1), number(2), price_us]),
            Plain::SlidingWindow | Plain::SlidingWindowCounter | Plain::Concurrency => {
                values.extend([number(0), number(1), price_us]);
            }
        }
        values.push(&self.clock_us);
        values
    }
}

/// The reading of the twin, from a row of a statement.
fn found(plain: Plain, row: &Row) -> Result<Vec<i64>, StoreError> {
    match plain {
        Plain::SlidingWindow | Plain::Concurrency => column(row, 3),
        _ => (3..row.len()).map(|index| column(row, index)).collect(),
    }
}

/// The result of one key in a statement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    outcome: Outcome,
    admitted: bool,
}

/// The result of a settlement, with the contents of the hold if they matter.
#[derive(Debug)]
pub(crate) struct SettleReply {
    status: String,
    held_names: Vec<String>,
    held_costs: Vec<i64>,
}

/// Which separate charges go in one call.
#[derive(PartialEq)]
enum Kind {
    /// Charges of one limit with one cost: one statement.
    Alike(Plain, StoredLimit, Cost),
    /// Charges of one key: one call of the function.
    OfKey(Uuid),
}

/// The statement for a charge of one limit, if there is one: the state is in one row, and the cost can fit.
fn plain(limit: &StoredLimit, cost: Cost) -> Option<Plain> {
    Plain::of(&limit.limit).filter(|_| limit.limit.price(cost).is_some())
}

/// The only part of a charge, if one statement can make it and it has no hold.
fn alone<'a>(parts: &MergedCharges<'a>, hold: Option<Hold>) -> Option<(Plain, StoredCharge<'a>)> {
    let [part] = parts.parts[..] else { return None };
    let plain = plain(part.limit, part.cost)?;
    hold.is_none().then_some((plain, part))
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("place", &self.inner.pool.place)
            .field("prefix", &self.inner.pool.prefix)
            .field("connections", &self.connections())
            .finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(self.charge_all(charges, hold))
    }

    fn charge_each<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(self.charge_all_alone(charges))
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(self.settle_hold(id, settlement))
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async move { self.peek_parts(&MergedCharges::of(charges)).await })
    }

    fn status<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, Outcome> {
        Box::pin(self.status_of(limit, key))
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(self.refund_all(charges))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.forget_key(limit, key))
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
        "postgres"
    }

    fn ping(&self, _node: NodeId) -> StoreFuture<'_, ()> {
        Box::pin(self.ping_server())
    }

    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        crate::spawn_on_tokio(task)
    }

    fn losses_possible(&self) -> u64 {
        PostgresStore::losses_possible(self)
    }
}
