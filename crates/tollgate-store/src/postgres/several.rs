//! Charges of several limits in one statement (several/charge.sql), if each limit has its state in one row and there is no hold.
//!
//! Concurrent charges go in one statement, each all or none. A statement cannot write a row twice, so charges with a common key
//! wait for a later statement; only if most charges have one key they go to the function, one after the other
//! (`remote/batching.rs`). The function also makes the charges that the statement skips: states that were written under other
//! numbers, and logs in chunks. The statement waits for locked rows, but only a short while if it carries other charges.

use std::collections::HashMap;

use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::call::Resend;
use super::codec::{READING, column, instant, nonsense, parameters, price};
use super::shared_commit::{ChargeBatch, FunctionAnswer};
use super::statement::{StrategySet, Verb};
use crate::remote::batching::Locks;
use crate::remote::limit_codec;
use crate::{Cost, StoreError};

/// The answer of a statement for each charge; nothing for skipped ones.
type Decided = Vec<Option<FunctionAnswer>>;

/// The arrays of the statement: one element for each limit of each charge.
#[derive(Default)]
struct SeveralArrays<'a> {
    keys: Vec<Uuid>,
    charges: Vec<i32>,
    names: Vec<&'a str>,
    strategies: Vec<i16>,
    numbers: [Vec<i64>; 3],
    prices: Vec<i64>,
    price_rests: Vec<i64>,
    shadows: Vec<bool>,
}

impl ChargeBatch<'_> {
    /// Makes several charges with one statement; `None` if they must go to the function. A charge that was skipped before goes to
    /// the function too.
    pub(super) async fn charge_by_statement(&self, places: &[usize]) -> Result<Option<Decided>, StoreError> {
        if self.same.is_held || self.locks == Locks::Wait {
            return Ok(None);
        }
        let limits = self.same.limits.iter().map(|limit| &limit.limit);
        let Some(strategies) = StrategySet::of(limits) else { return Ok(None) };
        let arrays = self.arrays(places);
        let mut keys = arrays.keys.clone();
        keys.sort_unstable();
        if keys.windows(2).any(|two| two[0] == two[1]) {
            return Ok(None);
        }
        let store = self.store;
        let [first, second, third] = &arrays.numbers;
        let (clock_us, lock_ms) = (store.inner.clock_us(), store.lock_ms(places.len() > 1));
        let values: &[&(dyn ToSql + Sync)] = &[
            &arrays.keys,
            &arrays.charges,
            &arrays.names,
            &arrays.strategies,
            first,
            second,
            third,
            &arrays.prices,
            &arrays.price_rests,
            &arrays.shadows,
            &lock_ms,
            &clock_us,
        ];
        let rows = store.call(Verb::Several(strategies), Resend::Never, values, &self.until).await?;
        let parts = self.same.limits.len();
        let mut answers: HashMap<usize, FunctionAnswer> = HashMap::with_capacity(places.len());
        for row in &rows {
            let index = |number: i64| usize::try_from(number).map_err(|_| nonsense("a place below zero"));
            let (place, charge) = (index(column(row, 0)?)?, index(column::<i32>(row, 1)?.into())?);
            let (at_us, found): (i64, Vec<i64>) = (column(row, 3)?, column(row, 4)?);
            if store.inner.clock.is_none() {
                store.inner.pool.skew.saw(at_us);
            }
            let (passed, at) = (column(row, 2)?, instant(at_us)?);
            let empty =
                || FunctionAnswer { passed, at, numbers: vec![0; parts * READING], asked_before: None };
            let answer = answers.entry(charge).or_insert_with(empty);
            // Numbers of charges start at one.
            let from = (place + parts - 1) % parts * READING;
            let numbers = answer.numbers[from..].iter_mut().zip(found);
            numbers.for_each(|(number, found)| *number = found);
        }
        Ok(Some((0..places.len()).map(|charge| answers.remove(&charge)).collect()))
    }

    fn arrays(&self, places: &[usize]) -> SeveralArrays<'_> {
        let mut arrays = SeveralArrays::default();
        for (number, place) in (0..).zip(places) {
            let charge = &self.charges[*place];
            for (part, limit) in self.same.limits.iter().enumerate() {
                let cost = u64::try_from(charge.costs[part]).ok().and_then(Cost::new);
                let (price, rest) = cost.map_or((-1, 0), |cost| price(&limit.limit, cost));
                let parameters = parameters(&limit.limit);
                arrays.keys.push(charge.keys[part]);
                arrays.charges.push(number);
                arrays.names.push(&limit.name);
                arrays.strategies.push(limit_codec::number(limit.limit.strategy()).into());
                for (index, numbers) in arrays.numbers.iter_mut().enumerate() {
                    numbers.push(parameters.get(index).copied().unwrap_or(0));
                }
                arrays.prices.push(price);
                arrays.price_rests.push(rest);
                arrays.shadows.push(charge.shadows[part]);
            }
        }
        arrays
    }
}
