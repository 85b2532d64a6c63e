//! Batches of charges and settlements by the functions: concurrent calls share one transaction, and so one commit and one wait
//! for the disk. Each is still all or none.
//!
//! A transaction of several calls does not wait for locks: a call that needs a row that another transaction has locked is
//! skipped; it is sent again, with other calls for the same key, and then waits. So a row that another program locks delays only
//! the calls that need it. A transaction fails for all its calls or for none; if the state of one key is the reason, each call is
//! sent alone. `remote/batching.rs` forms the batches; `call.rs` sends the statements.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::smallvec;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::batch::caps;
use super::call::{Resend, Until};
use super::codec::{READING, column, instant, nonsense, parameters, reading, whole};
use super::sick::is_of_a_state;
use super::statement::{Plain, StrategySet, Verb};
use super::{Answered, PostgresStore, SettleReply, UpsertNumbers, found};
use crate::remote::batching::{self, Answers, Carrier, Check, Locks, Queue, Repeats};
use crate::remote::limit_codec;
use crate::remote::shares::{Claim, Claims, Shares};
use crate::{ChargeId, Cost, Failure, Micros, StoreError, StoredCharge, StoredLimit};

/// The most calls in a batch.
const MOST_IN_BATCH: usize = 32;

/// Which number of a remembered charge has the shadow flag, and what is added to it if it was charged.
const SHADOW_OF_ASKED: usize = 5;
const CHARGED: i64 = 2;

/// The most limits of a charge that may be batched.
const MOST_LIMITS: usize = 8;

/// How many tenths of its deadline a call may wait for a lock that it can skip, and for a lock that it needs.
const SHORT_WAIT_TENTHS: u128 = 1;
const LONG_WAIT_TENTHS: u128 = 8;

/// What the charges of one transaction have in common: their limits, in this order, and whether they have a hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SameLimits {
    pub(super) limits: Vec<StoredLimit>,
    pub(super) is_held: bool,
}

impl SameLimits {
    /// Whether one statement makes such charges, if no key occurs twice; see `charge_by_statement` and `reserve`.
    fn have_a_statement(&self) -> bool {
        let mut limits = self.limits.iter().map(|limit| &limit.limit);
        match (self.is_held, &self.limits[..]) {
            (false, _) => StrategySet::of(limits).is_some(),
            (true, [_]) => limits.all(|limit| Plain::of(limit).is_some()),
            (true, _) => false,
        }
    }
}

/// A charge by the function: a key, a cost and a shadow flag for each limit.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FunctionCharge {
    pub(super) keys: Vec<Uuid>,
    pub(super) costs: Vec<i64>,
    pub(super) shadows: Vec<bool>,
    pub(super) hold: Option<HeldCharge>,
}

/// The id of a held charge, its time to live, and its remembered request.
#[derive(Debug, PartialEq)]
pub(crate) struct HeldCharge {
    pub(super) id: Uuid,
    pub(super) ttl_us: i64,
    pub(super) asked: Vec<i64>,
}

/// The answer of the function.
#[derive(Debug)]
pub(crate) struct FunctionAnswer {
    pub(super) passed: bool,
    pub(super) at: Micros,
    pub(super) numbers: Vec<i64>,
    /// The request of the first call with this id, if it was held before.
    pub(super) asked_before: Option<Vec<i64>>,
}

/// A settlement, as parameters of the function.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct SettleCall {
    pub(super) id: Uuid,
    pub(super) kind: &'static str,
    pub(super) actual: Option<i64>,
    pub(super) names: Vec<String>,
    pub(super) actuals: Vec<i64>,
}

/// The parameters of the limits of a charge.
struct LimitArrays {
    names: Vec<String>,
    strategies: Vec<i16>,
    parameters: Vec<i64>,
}

impl LimitArrays {
    /// The number of parameters of a limit.
    const PARAMETERS: usize = 5;

    fn of(limits: &[StoredLimit]) -> LimitArrays {
        let padded = |limit: &StoredLimit| {
            let mut parameters = parameters(&limit.limit);
            parameters.resize(LimitArrays::PARAMETERS, 0);
            parameters
        };
        LimitArrays {
            names: limits.iter().map(|limit| limit.name.clone()).collect(),
            strategies: limits
                .iter()
                .map(|limit| limit_codec::number(limit.limit.strategy()).into())
                .collect(),
            parameters: limits.iter().flat_map(padded).collect(),
        }
    }
}

/// Calls that may be batched.
trait Calls: Sync {
    type Answer: Send;

    /// Whether a call must go alone.
    fn is_alone(&self, place: usize) -> bool;

    /// Runs several calls in one transaction. A call that met a locked row has no answer.
    fn send_batch(
        &self,
        places: &[usize],
        skips_locked: bool,
    ) -> impl Future<Output = Result<Vec<Option<Self::Answer>>, StoreError>> + Send;

    /// Runs one call alone.
    fn alone(&self, place: usize) -> impl Future<Output = Result<Self::Answer, StoreError>> + Send;
}

/// Runs this many calls, and answers in their order.
async fn carry_all<C: Calls>(
    calls: &C,
    count: usize,
    locks: Locks,
) -> Result<Answers<C::Answer>, StoreError> {
    let mut answers: Answers<C::Answer> = (0..count).map(|_| None).collect();
    let (mut alone, mut left): (Vec<usize>, Vec<usize>) =
        (0..count).partition(|place| calls.is_alone(*place));
    if left.len() > 1 {
        match calls.send_batch(&left, locks == Locks::Skip).await {
            Ok(found) => {
                for (place, answer) in left.drain(..).zip(found) {
                    match answer {
                        // No call is skipped twice.
                        None if locks == Locks::Wait => alone.push(place),
                        answer => answers[place] = answer.map(Ok),
                    }
                }
            }
            // Nothing was written, because of the state of one of the keys.
            Err(error) if is_of_a_state(&error) => {}
            // Nothing was written, because a lock was not free in time: each call is sent alone.
            Err(error) if locks == Locks::Skip && is_lock_timeout(&error) => left.clear(),
            Err(error) if left.len() == count => return Err(error),
            Err(error) => left.drain(..).for_each(|place| answers[place] = Some(Err(error.for_another()))),
        }
    }
    alone.extend(left);
    for place in alone {
        answers[place] = Some(calls.alone(place).await);
    }
    Ok(answers)
}

/// Whether the server gave up waiting for a lock, and so changed nothing.
pub(super) fn is_lock_timeout(error: &StoreError) -> bool {
    error.failure() == Some(Failure::Timeout) && !error.is_ambiguous()
}

impl PostgresStore {
    /// How long a transaction may wait for a lock: a short while if it carries calls that do not need the lock, or as long as any
    /// call.
    pub(super) fn lock_ms(&self, skips_locked: bool) -> i32 {
        let tenths = if skips_locked { SHORT_WAIT_TENTHS } else { LONG_WAIT_TENTHS };
        i32::try_from(self.inner.timeout.as_millis() * tenths / 10).unwrap_or(i32::MAX).max(1)
    }

    /// A charge by the function, batched with concurrent charges of the same limits.
    pub(super) async fn charge_by_function(
        &self,
        parts: &[StoredCharge<'_>],
        same: SameLimits,
        charge: FunctionCharge,
        until: &Until<'_>,
    ) -> Result<FunctionAnswer, StoreError> {
        if parts.is_empty() || parts.len() > MOST_LIMITS {
            let _share = self.share(parts, until).await?;
            return self.call_charge(&same, &charge, until).await;
        }
        let shares = &self.inner.shares;
        let names: Vec<&str> = parts.iter().map(|part| &*part.limit.name).collect();
        let keys: Vec<&str> = parts.iter().map(|part| part.key).collect();
        let mut of_batch = Claims::new();
        for part in parts {
            let claim = self.limit_claim(part.limit);
            if !of_batch.contains(&claim) {
                of_batch.push(claim);
            }
        }
        of_batch.push(Claim::Server(0));
        let check = Check {
            alike: same,
            key: charge,
            of_key: Claim::BatchedKey(shares.hash((&names, &keys))),
            lane: Claim::Limit(shares.hash(("function", &names))),
            of_batch,
        };
        let carrier = FunctionCharges { store: self.clone() };
        batching::charge(&carrier, check, until.deadline.into()).await
    }

    /// The same charge on several keys whose logs or leases are in chunks, each separately.
    pub(super) async fn charge_chunks(
        &self,
        limit: &StoredLimit,
        cost: Cost,
        keys: &[Uuid],
        until: &Until<'_>,
    ) -> Vec<(Uuid, Result<Answered, StoreError>)> {
        let same = SameLimits { limits: vec![limit.clone()], is_held: false };
        let charge = |key: &Uuid| FunctionCharge {
            keys: vec![*key],
            costs: vec![whole(cost.get())],
            shadows: vec![false],
            hold: None,
        };
        let charges: Vec<FunctionCharge> = keys.iter().map(charge).collect();
        let batch =
            ChargeBatch { store: self, same: &same, charges: &charges, locks: Locks::Wait, until: *until };
        let missing = || Err(nonsense("no row"));
        let answers: Vec<_> = match carry_all(&batch, charges.len(), Locks::Wait).await {
            Ok(answers) => answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect(),
            Err(error) => keys.iter().map(|_| Err(error.for_another())).collect(),
        };
        let answered = |answer: FunctionAnswer| {
            let outcome = limit.limit.answer(&reading(&limit.limit, &answer.numbers)?, cost, answer.at);
            Ok(Answered { outcome, admitted: answer.passed })
        };
        keys.iter().zip(answers).map(|(key, answer)| (*key, answer.and_then(answered))).collect()
    }

    /// A settlement, batched with concurrent ones. Only the server knows which keys it changes, so all settlements count as one
    /// limit.
    pub(super) async fn settle_by_function(
        &self,
        id: ChargeId,
        call: SettleCall,
        until: &Until<'_>,
    ) -> Result<SettleReply, StoreError> {
        let shares = &self.inner.shares;
        let lane = Claim::Limit(shares.hash(("settle", "")));
        let check = Check {
            alike: (),
            key: call,
            of_key: Claim::BatchedKey(shares.hash(id)),
            lane,
            of_batch: smallvec![lane, Claim::Server(0)],
        };
        let carrier = Settlements { store: self.clone() };
        batching::charge(&carrier, check, until.deadline.into()).await
    }

    /// One charge by the function.
    pub(super) async fn call_charge(
        &self,
        same: &SameLimits,
        charge: &FunctionCharge,
        until: &Until<'_>,
    ) -> Result<FunctionAnswer, StoreError> {
        let LimitArrays { names, strategies, parameters } = &LimitArrays::of(&same.limits);
        let FunctionCharge { keys, costs, shadows, hold } = charge;
        let id = hold.as_ref().map(|hold| hold.id);
        let ttl_us = hold.as_ref().map(|hold| hold.ttl_us);
        let asked = hold.as_ref().map(|hold| &hold.asked);
        let clock_us = self.inner.clock_us();
        let values: &[&(dyn ToSql + Sync)] =
            &[keys, names, strategies, parameters, costs, shadows, &id, &ttl_us, &asked, &clock_us];
        // A held charge has an id, so a repeated call gets the same answer.
        let resend = if hold.is_some() { Resend::Once } else { Resend::Never };
        let row = self.call_one(Verb::Charge, resend, values, until).await?;
        self.read_charge(&row)?.ok_or_else(|| nonsense("neither passed nor refused"))
    }

    /// The answer of the functions `charge` and `charge_each`.
    fn read_charge(&self, row: &Row) -> Result<Option<FunctionAnswer>, StoreError> {
        let Some(passed) = column(row, 0)? else { return Ok(None) };
        self.inner.pool.skew.saw(column(row, 2)?);
        let (at, numbers) = (instant(column(row, 1)?)?, column(row, 3)?);
        Ok(Some(FunctionAnswer { passed, at, numbers, asked_before: column(row, 4)? }))
    }

    /// One settlement.
    async fn call_settle(&self, call: &SettleCall, until: &Until<'_>) -> Result<SettleReply, StoreError> {
        let SettleCall { id, kind, actual, names, actuals } = call;
        let clock_us = self.inner.clock_us();
        let values: &[&(dyn ToSql + Sync)] = &[id, kind, actual, names, actuals, &clock_us];
        let row = self.call_one(Verb::Settle, Resend::Once, values, until).await?;
        self.read_settled(&row)?.ok_or_else(|| nonsense("no status"))
    }

    /// The answer of the functions `settle` and `settle_each`.
    fn read_settled(&self, row: &Row) -> Result<Option<SettleReply>, StoreError> {
        let Some(status) = column(row, 0)? else { return Ok(None) };
        self.inner.pool.skew.saw(column(row, 1)?);
        let held_names = column::<Option<Vec<String>>>(row, 2)?.unwrap_or_default();
        let held_costs = column::<Option<Vec<i64>>>(row, 3)?.unwrap_or_default();
        Ok(Some(SettleReply { status, held_names, held_costs }))
    }
}

/// The carrier of batched charges of the same limits.
#[derive(Clone)]
pub(super) struct FunctionCharges {
    store: PostgresStore,
}

impl Carrier for FunctionCharges {
    type Alike = SameLimits;
    type Key = FunctionCharge;
    type Answer = FunctionAnswer;

    const MAX_BATCH: usize = MOST_IN_BATCH;

    /// The function makes one charge after the other. Another transaction with the same key would wait for the commit of this
    /// one.
    const REPEATS: Repeats = Repeats::InOneCall;

    fn queue(&self) -> &Queue<FunctionCharges> {
        &self.store.inner.function_charges
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.store.inner.shares
    }

    fn ways(&self) -> usize {
        caps(self.store.inner.pool.most_links()).limit
    }

    fn lane_ways(&self) -> usize {
        caps(self.store.inner.pool.most_links()).limit
    }

    /// A statement cannot write a row twice: with two charges of one key, all charges would go to the function.
    fn are_cheaper_apart(&self, same: &SameLimits, one: &FunctionCharge, other: &FunctionCharge) -> bool {
        one.keys.iter().any(|key| other.keys.contains(key)) && same.have_a_statement()
    }

    async fn carry(
        &self,
        same: &SameLimits,
        charges: &[FunctionCharge],
        locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<FunctionAnswer>, StoreError> {
        let until = Until { deadline: deadline.into_std(), sent };
        let batch = ChargeBatch { store: &self.store, same, charges, locks, until };
        carry_all(&batch, charges.len(), locks).await
    }
}

pub(super) struct ChargeBatch<'a> {
    pub(super) store: &'a PostgresStore,
    pub(super) same: &'a SameLimits,
    pub(super) charges: &'a [FunctionCharge],
    pub(super) locks: Locks,
    pub(super) until: Until<'a>,
}

impl Calls for ChargeBatch<'_> {
    type Answer = FunctionAnswer;

    fn is_alone(&self, place: usize) -> bool {
        self.charges.len() == 1 || self.store.inner.sick.lock().is_any(&self.charges[place].keys)
    }

    async fn send_batch(
        &self,
        places: &[usize],
        skips_locked: bool,
    ) -> Result<Vec<Option<FunctionAnswer>>, StoreError> {
        if let Some(answers) = self.reserve(places).await? {
            return Ok(answers);
        }
        // Skipped calls are sent again, alone.
        if let Some(answers) = self.charge_by_statement(places).await? {
            return Ok(answers);
        }
        let LimitArrays { names, strategies, parameters } = &LimitArrays::of(&self.same.limits);
        let charges = || places.iter().map(|place| &self.charges[*place]);
        let keys: Vec<Uuid> = charges().flat_map(|charge| charge.keys.iter().copied()).collect();
        let costs: Vec<i64> = charges().flat_map(|charge| charge.costs.iter().copied()).collect();
        let shadows: Vec<bool> = charges().flat_map(|charge| charge.shadows.iter().copied()).collect();
        let held = || charges().filter_map(|charge| charge.hold.as_ref());
        let is_held = self.same.is_held;
        let ids: Option<Vec<Uuid>> = is_held.then(|| held().map(|hold| hold.id).collect());
        let ttls: Option<Vec<i64>> = is_held.then(|| held().map(|hold| hold.ttl_us).collect());
        let asked: Option<Vec<i64>> =
            is_held.then(|| held().flat_map(|hold| hold.asked.iter().copied()).collect());
        let (clock_us, lock_ms) = (self.store.inner.clock_us(), self.store.lock_ms(skips_locked));
        let values: &[&(dyn ToSql + Sync)] = &[
            &keys,
            names,
            strategies,
            parameters,
            &costs,
            &shadows,
            &ids,
            &ttls,
            &asked,
            &clock_us,
            &skips_locked,
            &lock_ms,
        ];
        let resend = if is_held { Resend::Once } else { Resend::Never };
        let rows = self.store.call(Verb::ChargeEach, resend, values, &self.until).await?;
        rows.iter().map(|row| self.store.read_charge(row)).collect()
    }

    async fn alone(&self, place: usize) -> Result<FunctionAnswer, StoreError> {
        let charge = &self.charges[place];
        let answer = match self.charge_by_statement(&[place]).await.map(|answers| answers?.pop()?) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => self.store.call_charge(self.same, charge, &self.until).await,
            Err(error) => Err(error),
        };
        if answer.as_ref().is_err_and(is_of_a_state) {
            let mut sick = self.store.inner.sick.lock();
            charge.keys.iter().for_each(|key| sick.note(*key));
        }
        answer
    }
}

impl ChargeBatch<'_> {
    /// Reservations of different keys under one limit with one cost: one statement, if the state is in one row. Returns nothing
    /// if they must go to the function.
    async fn reserve(&self, places: &[usize]) -> Result<Option<Vec<Option<FunctionAnswer>>>, StoreError> {
        let ([limit], Some(first)) = (&self.same.limits[..], places.first()) else { return Ok(None) };
        let first = &self.charges[*first];
        let (Some(hold), Some(plain)) = (&first.hold, Plain::of(&limit.limit)) else { return Ok(None) };
        let cost = u64::try_from(first.costs[0]).ok().and_then(Cost::new);
        let Some(cost) = cost.filter(|cost| limit.limit.price(*cost).is_some()) else { return Ok(None) };
        let mut held: Vec<(Uuid, &HeldCharge)> = Vec::with_capacity(places.len());
        for place in places {
            let charge = &self.charges[*place];
            match &charge.hold {
                Some(its) if charge.costs == first.costs && its.asked == hold.asked => {
                    held.push((charge.keys[0], its));
                }
                _ => return Ok(None),
            }
        }
        // Rows are locked in the order of their keys.
        held.sort_unstable_by_key(|(key, _)| *key);
        if held.windows(2).any(|two| two[0].0 == two[1].0) {
            return Ok(None);
        }
        let store = self.store;
        let keys: Vec<Uuid> = held.iter().map(|(key, _)| *key).collect();
        let ids: Vec<Uuid> = held.iter().map(|(_, hold)| hold.id).collect();
        let ttls: Vec<i64> = held.iter().map(|(_, hold)| hold.ttl_us).collect();
        let LimitArrays { strategies, parameters, .. } = &LimitArrays::of(&self.same.limits);
        // Only a charged part is held: see charge.sql.
        let mut asked = hold.asked.clone();
        asked[SHADOW_OF_ASKED] += CHARGED;
        let numbers = UpsertNumbers::of(limit, cost, store.inner.clock_us());
        let mut values = numbers.values(plain, &keys, limit);
        values.extend([
            &ids as &(dyn ToSql + Sync),
            &ttls,
            &strategies[0],
            parameters,
            &first.costs[0],
            &asked,
        ]);
        let rows = store.call(Verb::Reserve(plain), Resend::Once, &values, &self.until).await?;
        if rows.is_empty() {
            // All of them are late, or in chunks.
            return if plain.has_chunks() { Ok(None) } else { Err(store.late(keys.len())) };
        }
        let mut answers: HashMap<Uuid, FunctionAnswer> = HashMap::with_capacity(rows.len());
        for row in &rows {
            let at_us = column(row, 2)?;
            if store.inner.clock.is_none() {
                store.inner.pool.skew.saw(at_us);
            }
            let mut numbers = found(plain, row)?;
            numbers.resize(READING, 0);
            let (passed, at) = (column(row, 1)?, instant(at_us)?);
            answers.insert(column(row, 0)?, FunctionAnswer { passed, at, numbers, asked_before: None });
        }
        let is_refused = |key: &Uuid| answers.get(key).is_some_and(|answer| !answer.passed);
        let refused: Vec<(Uuid, Uuid)> =
            held.iter().filter(|(key, _)| is_refused(key)).map(|(key, hold)| (*key, hold.id)).collect();
        for key in self.held_before(&refused).await {
            answers.remove(&key);
        }
        answers.values_mut().for_each(|answer| answer.passed |= first.shadows[0]);
        Ok(Some(places.iter().map(|place| answers.remove(&self.charges[*place].keys[0])).collect()))
    }

    /// A denied charge may have been denied because of itself: sent before, and finished only now. Returns the keys of such
    /// charges, which go to the function. If that cannot be found out, returns all keys.
    async fn held_before(&self, refused: &[(Uuid, Uuid)]) -> Vec<Uuid> {
        if refused.is_empty() {
            return Vec::new();
        }
        let ids: Vec<Uuid> = refused.iter().map(|(_, id)| *id).collect();
        let looked = self.store.call(Verb::Held, Resend::Once, &[&ids], &self.until).await;
        let held: Option<Vec<Uuid>> =
            looked.ok().and_then(|rows| rows.iter().map(|row| column(row, 0).ok()).collect());
        let is_held = |id: &Uuid| held.as_ref().is_none_or(|held| held.contains(id));
        refused.iter().filter(|(_, id)| is_held(id)).map(|(key, _)| *key).collect()
    }
}

/// The carrier of batched settlements.
#[derive(Clone)]
pub(super) struct Settlements {
    store: PostgresStore,
}

impl Carrier for Settlements {
    type Alike = ();
    type Key = SettleCall;
    type Answer = SettleReply;

    const MAX_BATCH: usize = MOST_IN_BATCH;

    const REPEATS: Repeats = Repeats::InOneCall;

    fn queue(&self) -> &Queue<Settlements> {
        &self.store.inner.settlements
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.store.inner.shares
    }

    fn ways(&self) -> usize {
        caps(self.store.inner.pool.most_links()).limit
    }

    fn lane_ways(&self) -> usize {
        caps(self.store.inner.pool.most_links()).limit
    }

    async fn carry(
        &self,
        _alike: &(),
        calls: &[SettleCall],
        locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<SettleReply>, StoreError> {
        let until = Until { deadline: deadline.into_std(), sent };
        let batch = SettleBatch { store: &self.store, calls, until };
        carry_all(&batch, calls.len(), locks).await
    }
}

struct SettleBatch<'a> {
    store: &'a PostgresStore,
    calls: &'a [SettleCall],
    until: Until<'a>,
}

impl Calls for SettleBatch<'_> {
    type Answer = SettleReply;

    fn is_alone(&self, _place: usize) -> bool {
        self.calls.len() == 1
    }

    async fn send_batch(
        &self,
        places: &[usize],
        skips_locked: bool,
    ) -> Result<Vec<Option<SettleReply>>, StoreError> {
        let calls = || places.iter().map(|place| &self.calls[*place]);
        let count = |length: usize| i32::try_from(length).unwrap_or(i32::MAX);
        let ids: Vec<Uuid> = calls().map(|call| call.id).collect();
        let kinds: Vec<&str> = calls().map(|call| call.kind).collect();
        let one_actuals: Vec<Option<i64>> = calls().map(|call| call.actual).collect();
        let names: Vec<&str> = calls().flat_map(|call| call.names.iter().map(String::as_str)).collect();
        let names_counts: Vec<i32> = calls().map(|call| count(call.names.len())).collect();
        let actuals: Vec<i64> = calls().flat_map(|call| call.actuals.iter().copied()).collect();
        let actuals_counts: Vec<i32> = calls().map(|call| count(call.actuals.len())).collect();
        let (clock_us, lock_ms) = (self.store.inner.clock_us(), self.store.lock_ms(skips_locked));
        let values: &[&(dyn ToSql + Sync)] = &[
            &ids,
            &kinds,
            &one_actuals,
            &names,
            &names_counts,
            &actuals,
            &actuals_counts,
            &clock_us,
            &skips_locked,
            &lock_ms,
        ];
        let rows = self.store.call(Verb::SettleEach, Resend::Once, values, &self.until).await?;
        rows.iter().map(|row| self.store.read_settled(row)).collect()
    }

    async fn alone(&self, place: usize) -> Result<SettleReply, StoreError> {
        self.store.call_settle(&self.calls[place], &self.until).await
    }
}
