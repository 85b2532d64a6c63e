//! The PostgreSQL store: in a database that many processes share, for as long as it lasts.
//!
//! A charge on one limit is one statement (upsert/), decided on the locked row under read committed; everything else is one
//! call of a function (charge.sql, settle.sql, refund.sql). Both ask the SQL twins of the kernel whether a charge fits, and what
//! they found comes back as numbers from which the kernel here works out the answer: codec.rs. Every call has a deadline that covers
//! all it waits for (pool.rs), and carries it to the server, in the server's time (skew.rs), so that a call that comes late
//! changes nothing there. What went wrong, and whether it may be sent again, is in fault.rs; tables and functions are made by
//! schema.rs, and what says nothing any more is deleted by sweep.rs.
//!
//! Durability: a charge is acknowledged before it is on disk, so a crash of the server may forget the last moments (some 0.6 s
//! at most with PostgreSQL's defaults); held charges and settlements are on disk before they are acknowledged.

mod batch;
mod call;
mod codec;
mod fault;
mod options;
mod ping;
mod pool;
mod room;
mod schema;
mod sick;
mod skew;
mod statement;
mod sweep;
mod tls;

use std::collections::{HashMap, HashSet};
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
use self::sick::{SickKeys, is_of_a_state};
use self::statement::{Keys, Plain, Verb};
use self::sweep::Totals;
use crate::remote::MergedCharges;
use crate::remote::batching::{self, Check, Queue};
use crate::remote::each;
use crate::remote::shares::{Claim, Shares};
use crate::{
    ChargeId, Charged, Clock, EachFuture, Failure, Hold, Micros, NodeId, Outcomes, Settled, Settlement,
    Store, StoreError, StoreFuture, StoreTask, StoredCharge, StoredLimit,
};

pub use self::options::{PostgresOptions, PostgresTls};
pub use self::sweep::Cleaned;

/// How many keys go into one statement at most.
const MOST_KEYS: usize = 1_000;

/// Remembers in PostgreSQL. Cheap to clone; clones share connections.
///
/// ```no_run
/// # async fn doc() -> Result<(), tollgate_store::StoreError> {
/// use tollgate_store::{Cost, StoredCharge, Limit, PostgresOptions, PostgresStore, Store, StoredLimit};
///
/// let store = PostgresStore::connect(PostgresOptions::new("postgres://app@localhost/app")).await?;
/// let api = StoredLimit::new("api", Limit::token_bucket("10/s", 20).unwrap());
/// let item = StoredCharge { limit: &api, key: "user:42", cost: Cost::ONE, shadow: false };
/// assert!(store.charge(&[item], None).await?.allowed);
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
    shares: Arc<Shares>,
    room: Arc<Room>,
    /// Keys whose stored state the statement could not make anything of, of late.
    sick: Mutex<SickKeys>,
    /// The connection that pings go over, once there was a reason to ping.
    ping: Mutex<Option<PingLink>>,
}

impl Inner {
    /// The time by a test's clock, if there is one.
    fn clock_us(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| whole(clock.server_now().get()))
    }
}

impl PostgresStore {
    /// A store for these options. Checks them and reads certificates, and asks nothing of the server: a schema that is missing
    /// is found by the first call.
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
            shares: Shares::new(batch::caps(connections)),
            room: Arc::new(Room::new(max_keys)),
            sick: Mutex::default(),
            ping: Mutex::default(),
        };
        Ok(PostgresStore { inner: Arc::new(inner) })
    }

    /// [`new`](Self::new), and then [`migrate`](Self::migrate) and [`probe`](Self::probe); logs what the probe warns of, and
    /// starts the cleanup.
    pub async fn connect(options: PostgresOptions) -> Result<PostgresStore, StoreError> {
        let store = PostgresStore::new(options)?;
        store.migrate().await?;
        for warning in store.probe().await? {
            tracing::warn!("{warning}");
        }
        store.start_cleanup();
        Ok(store)
    }

    /// Makes the tables and functions, or brings them up to date. Changes nothing where they are.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        schema::migrate(&self.inner.pool).await
    }

    /// Looks the server and the schema over. What cannot work is an error that says what to do; what is dangerous is returned.
    pub async fn probe(&self) -> Result<Vec<String>, StoreError> {
        schema::probe(&self.inner.pool).await
    }

    /// Starts the task that cleans up as often as the options say; [`connect`](Self::connect) has done so.
    pub fn start_cleanup(&self) {
        if let Some(every) = self.inner.cleanup_every {
            sweep::spawn(&self.inner, every);
        }
    }

    /// Deletes every key that is as good as new and every held charge whose time has run out. Returns how many rows.
    pub async fn cleanup(&self) -> Result<Cleaned, StoreError> {
        sweep::cleanup(&self.inner).await
    }

    /// How many rows were deleted by this store since it was made.
    pub fn cleaned_total(&self) -> Cleaned {
        self.inner.cleaned.get()
    }

    /// How often the server was seen to have crashed, or to have been replaced by another, since this store first connected: each
    /// time it may have lost what was charged in its last moments.
    pub fn losses_possible(&self) -> u64 {
        self.inner.pool.losses()
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.inner.pool.open_links()
    }

    /// Each by itself: those that are alike in one statement, up to a thousand, and what one statement cannot carry out by the
    /// function, each key in a call of its own, because the function fails for all its keys or for none. All of them have one
    /// deadline.
    async fn charge_all_alone(&self, items: &[StoredCharge<'_>]) -> Vec<Result<Outcome, StoreError>> {
        let until = self.until();
        let kind = |item: &StoredCharge<'_>| match plain(item.limit, item.cost) {
            Some(plain) => Kind::Alike(plain, item.limit.clone(), item.cost),
            None => Kind::OfKey(key_of(item.limit, item.key)),
        };
        let groups = each::groups(items, kind, |_| 0, true, MOST_KEYS);
        let call = |places| self.charge_group(items, places, until);
        each::charge(items.len(), groups, until.deadline.into(), call).await
    }

    /// Charges of one kind, and of different pairs: one call.
    async fn charge_group(
        &self,
        items: &[StoredCharge<'_>],
        places: Vec<usize>,
        until: Until<'_>,
    ) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        let items: Vec<StoredCharge<'_>> = places.into_iter().map(|place| items[place]).collect();
        let Some(first) = items.first() else { return Ok(Vec::new()) };
        if let Some(plain) = plain(first.limit, first.cost) {
            let keys: Vec<&str> = items.iter().map(|item| item.key).collect();
            return self.charge_alike(plain, first.limit, &keys, first.cost, &until).await;
        }
        // To the function a charge by itself is one that refuses nobody else: a part in shadow.
        let alone: Vec<StoredCharge<'_>> =
            items.iter().map(|item| StoredCharge { shadow: true, ..*item }).collect();
        let charged = self.charge_parts(&alone, &MergedCharges::of(&alone), None, &until).await?;
        Ok(charged.outcomes.into_iter().map(Ok).collect())
    }

    /// Different keys of one limit at one cost, each by itself: one statement.
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
        let mut answers = self.upsert_each(plain, limit, cost, &batch, until).await?;
        let outcome = |name: &Uuid| match answers.remove(name) {
            Some(answered) => answered.map(|answered| answered.outcome),
            None if is_known.as_ref().is_some_and(|known| !known.contains(name)) => Err(no_room()),
            None => Err(self.late(1)),
        };
        Ok(names.iter().map(outcome).collect())
    }

    async fn charge_items(
        &self,
        items: &[StoredCharge<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, StoreError> {
        if items.is_empty() && hold.is_none() {
            return Ok(Charged { allowed: true, outcomes: Outcomes::new() });
        }
        let parts = MergedCharges::of(items);
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
            None => self.charge_parts(items, &parts, hold, &self.until()).await,
        }
    }

    /// The same charge of some keys, sorted, each by itself: one statement. Those that were late are not among the answers, and were
    /// not charged.
    ///
    /// A statement fails for all of its keys or for none. So where one of them has a state that the statement cannot make anything
    /// of, its halves are asked about, and so on; a key that fails alone does not go with others for a while.
    async fn upsert_each(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        cost: Cost,
        keys: &[Uuid],
        until: &Until<'_>,
    ) -> Result<HashMap<Uuid, Result<Answered, StoreError>>, StoreError> {
        let (alone, together) = self.inner.sick.lock().split(keys);
        let mut groups: Vec<Vec<Uuid>> = alone.into_iter().map(|key| vec![key]).collect();
        groups.extend(Some(together).filter(|together| !together.is_empty()));
        let mut answers = HashMap::with_capacity(keys.len());
        while let Some(mut group) = groups.pop() {
            let error = match self.upsert(plain, limit, cost, &group, until).await {
                Ok(answered) => {
                    answers.extend(answered);
                    continue;
                }
                Err(error) => error,
            };
            // Nothing of it was written.
            match (is_of_a_state(&error), &group[..]) {
                (true, [key]) => {
                    self.inner.sick.lock().note(*key);
                    answers.insert(*key, Err(error));
                }
                (true, _) => {
                    let half = group.split_off(group.len() / 2);
                    groups.extend([group, half]);
                }
                // What is wrong with the server is everybody's who was not answered before.
                (false, _) if answers.is_empty() => return Err(error),
                (false, _) => answers.extend(group.iter().map(|key| (*key, Err(error.for_another())))),
            }
        }
        Ok(answers)
    }

    /// A charge of one statement: the same for each of some keys, sorted, each by itself. Those that were late are not among
    /// the answers, and were not charged.
    async fn upsert(
        &self,
        plain: Plain,
        limit: &StoredLimit,
        cost: Cost,
        keys: &[Uuid],
        until: &Until<'_>,
    ) -> Result<Vec<(Uuid, Result<Answered, StoreError>)>, StoreError> {
        let numbers = parameters(&limit.limit);
        let (price_us, price_rest) = price(&limit.limit, cost);
        let clock_us = self.inner.clock_us();
        let many = if keys.len() == 1 { Keys::One } else { Keys::Many };
        let one: &(dyn ToSql + Sync) = if many == Keys::One { &keys[0] } else { &keys };
        let verb = Verb::Upsert(plain, many);
        let number = |index: usize| -> &(dyn ToSql + Sync) { &numbers[index] };
        let values: &[&(dyn ToSql + Sync)] = match plain {
            Plain::TokenBucket | Plain::LeakyBucket => &[
                one,
                &limit.name,
                number(0),
                number(1),
                number(2),
                number(4),
                &price_us,
                &price_rest,
                &clock_us,
            ],
            Plain::FixedWindow => &[one, &limit.name, number(0), number(1), number(2), &price_us, &clock_us],
            Plain::SlidingWindowCounter => &[one, &limit.name, number(0), number(1), &price_us, &clock_us],
        };
        let rows = self.call(verb, Resend::Never, values, until).await?;
        let mut answers = Vec::with_capacity(rows.len());
        for row in &rows {
            let at_us = column(row, 2)?;
            if clock_us.is_none() {
                self.inner.pool.skew.saw(at_us);
            }
            // What cannot be read of one row says nothing of the others.
            let answered = || {
                let found =
                    (3..row.len()).map(|index| column(row, index)).collect::<Result<Vec<i64>, _>>()?;
                let outcome = limit.limit.answer(&reading(&limit.limit, &found)?, cost, instant(at_us)?);
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
        items: &[StoredCharge<'_>],
        parts: &MergedCharges<'_>,
        hold: Option<Hold>,
        until: &Until<'_>,
    ) -> Result<Charged, StoreError> {
        let asked = ChargeArrays::of(parts);
        let hold_id = hold.map(|hold| Uuid::from_u128(hold.id.get()));
        let ttl_us = hold.map(|hold| whole(hold.ttl.min(Hold::MAX_TTL).get()));
        let kept = hold.map(|_| remembered(items, parts));
        let clock_us = self.inner.clock_us();
        // A held charge has a name, and a caller that sends it again is answered as before.
        let resend = if hold.is_some() { Resend::Once } else { Resend::Never };
        let ChargeArrays { keys, limits, strategies, parameters, costs, shadows } = &asked;
        let values: &[&(dyn ToSql + Sync)] =
            &[keys, limits, strategies, parameters, costs, shadows, &hold_id, &ttl_us, &kept, &clock_us];
        let _share = self.share(&parts.parts, until).await?;
        let invented =
            parts.parts.iter().zip(keys).filter(|(part, _)| self.refuses_new_keys(&part.limit.limit));
        let invented: Vec<Uuid> = invented.map(|(_, key)| *key).collect();
        if !invented.is_empty() && self.known(&invented, until).await?.len() < invented.len() {
            return Err(no_room());
        }
        let row = self.call_one(Verb::Charge, resend, values, until).await?;
        self.inner.pool.skew.saw(column(&row, 2)?);
        let at = instant(column(&row, 1)?)?;
        let numbers: Vec<i64> = column(&row, 3)?;
        if let Some(before) = column::<Option<Vec<i64>>>(&row, 4)? {
            return answer_again(&before, &numbers, at);
        }
        self.conclude(parts, &row, &numbers, at)
    }

    async fn peek_parts(&self, parts: &MergedCharges<'_>) -> Result<Charged, StoreError> {
        let (row, numbers, at) = self.look(parts).await?;
        self.conclude(parts, &row, &numbers, at)
    }

    async fn status_of(&self, limit: &StoredLimit, key: &str) -> Result<Outcome, StoreError> {
        let parts = MergedCharges::of(&[StoredCharge { limit, key, cost: Cost::ONE, shadow: false }]);
        let (_, numbers, at) = self.look(&parts).await?;
        let reading = readings(&parts, &numbers)?.into_iter().next();
        reading.map(|reading| limit.limit.status(&reading, at)).ok_or_else(|| nonsense("no state of a key"))
    }

    /// What is kept for the parts, and when.
    async fn look(&self, parts: &MergedCharges<'_>) -> Result<(Row, Vec<i64>, Micros), StoreError> {
        let asked = ChargeArrays::of(parts);
        let clock_us = self.inner.clock_us();
        let ChargeArrays { keys, strategies, parameters, costs, shadows, .. } = &asked;
        let values: &[&(dyn ToSql + Sync)] = &[keys, strategies, parameters, costs, shadows, &clock_us];
        let until = self.until();
        let _share = self.share(&parts.parts, &until).await?;
        let row = self.call_one(Verb::Peek, Resend::Once, values, &until).await?;
        self.inner.pool.skew.saw(column(&row, 2)?);
        let (numbers, at) = (column(&row, 3)?, instant(column(&row, 1)?)?);
        Ok((row, numbers, at))
    }

    /// The answer of the functions `charge` and `peek`.
    fn conclude(
        &self,
        parts: &MergedCharges<'_>,
        row: &Row,
        numbers: &[i64],
        at: Micros,
    ) -> Result<Charged, StoreError> {
        parts.conclude(&parts.outcomes(readings(parts, numbers)?, at), column(row, 0)?)
    }

    async fn settle_hold(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let bounded = |actual: &u64| whole((*actual).min(MAX_COUNT));
        let (kind, actual): (&str, Option<i64>) = match settlement {
            Settlement::Actual(actual) => ("actual", Some(bounded(actual))),
            Settlement::Each(_) => ("positions", None),
            Settlement::Named(_) | Settlement::Release => ("each", None),
            Settlement::Cancel => ("cancel", None),
            Settlement::Renew => ("renew", None),
        };
        // No text in PostgreSQL has a NUL, and no limit's name; what a caller sends is the caller's mistake, and not the store's.
        let (names, actuals): (Vec<String>, Vec<i64>) = match settlement {
            Settlement::Each(actuals) => (Vec::new(), actuals.iter().map(bounded).collect()),
            Settlement::Named(actuals) => {
                let sound = |name: &String| name.replace('\0', "\u{fffd}");
                actuals.iter().map(|(name, actual)| (sound(name), bounded(actual))).unzip()
            }
            _ => Default::default(),
        };
        let until = self.until();
        let _share = self.settlement_share(id, &until).await?;
        let id = Uuid::from_u128(id.get());
        let clock_us = self.inner.clock_us();
        let values: &[&(dyn ToSql + Sync)] = &[&id, &kind, &actual, &names, &actuals, &clock_us];
        let row = self.call_one(Verb::Settle, Resend::Once, values, &until).await?;
        self.inner.pool.skew.saw(column(&row, 1)?);
        let held = || -> Result<Vec<(String, i64)>, StoreError> {
            let (names, costs) = (column::<Vec<String>>(&row, 2)?, column::<Vec<i64>>(&row, 3)?);
            Ok(names.into_iter().zip(costs).collect())
        };
        match column::<&str>(&row, 0)? {
            "done" => Ok(Settled::Done),
            "already" => Ok(Settled::Already),
            "unknown" => Ok(Settled::Unknown),
            "differ" => {
                let held: Vec<String> = held()?.iter().map(|(name, cost)| format!("{name} {cost}")).collect();
                Err(StoreError::invalid(format!(
                    "one actual amount cannot settle limits that reserved different amounts ({}); give one for each limit",
                    held.join(", ")
                )))
            }
            "unnamed" => {
                let held: Vec<String> = held()?.into_iter().map(|(name, _)| name).collect();
                let other = names.iter().find(|name| !held.iter().any(|held| held == *name));
                Err(StoreError::invalid(format!(
                    "this reservation holds nothing under the limit `{}`; it holds {}",
                    other.map_or("", String::as_str),
                    held.join(", ")
                )))
            }
            "count" => {
                let charges = column::<Vec<i64>>(&row, 3)?.first().copied().unwrap_or_default();
                Err(StoreError::wrong_count(usize::try_from(charges).unwrap_or_default(), actuals.len()))
            }
            other => Err(nonsense(format!("the verdict {other}"))),
        }
    }

    async fn refund_items(&self, items: &[StoredCharge<'_>]) -> Result<(), StoreError> {
        let parts = MergedCharges::to_refund(items);
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

/// What one key of a charge of one statement came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    outcome: Outcome,
    admitted: bool,
}

/// Which charges, each made by itself, go in one call.
#[derive(PartialEq)]
enum Kind {
    /// Those of one limit at one cost: one statement.
    Alike(Plain, StoredLimit, Cost),
    /// Those of one key: one call of the function.
    OfKey(Uuid),
}

/// How one statement carries out a charge of a limit by itself, if it can: its state is in one row, and the cost can fit.
fn plain(limit: &StoredLimit, cost: Cost) -> Option<Plain> {
    Plain::of(limit.limit.strategy()).filter(|_| limit.limit.price(cost).is_some())
}

/// The only part of a charge, if one statement can carry it out and it is not held.
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
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(self.charge_items(items, hold))
    }

    fn charge_each<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(self.charge_all_alone(items))
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(self.settle_hold(id, settlement))
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async move { self.peek_parts(&MergedCharges::of(items)).await })
    }

    fn status<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, Outcome> {
        Box::pin(self.status_of(limit, key))
    }

    fn refund<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(self.refund_items(items))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.forget_key(limit, key))
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
