//! Encodes charges as parameters of statements, and decodes the answers into readings of the kernel.
//!
//! The names of keys and the request stored with a hold are stored formats (docs/storage.md). SQL texts are in `statement.rs`,
//! sending is in `call.rs`.

use tokio_postgres::Row;
use tollgate_kernel::{Cost, CounterState, Counts, EntriesReading, Limit, Reading, Strategy, WindowState};
use uuid::Uuid;

use crate::remote::limit_codec;
use crate::remote::{MergedCharges, name_of};
use crate::{Charged, Failure, Micros, Outcomes, StoreError, StoredCharge, StoredLimit};

/// The number of parameters of a limit, of numbers in a remembered charge, and of numbers in a reading.
const PARAMETERS: usize = 5;
const REMEMBERED: usize = 7;
pub(super) const READING: usize = 8;

/// The arrays of the functions `charge` and `peek`: one entry for each part, and five parameters for each.
#[derive(Default)]
pub(super) struct ChargeArrays {
    pub(super) keys: Vec<Uuid>,
    pub(super) limits: Vec<String>,
    pub(super) strategies: Vec<i16>,
    pub(super) parameters: Vec<i64>,
    pub(super) costs: Vec<i64>,
    pub(super) shadows: Vec<bool>,
}

impl ChargeArrays {
    pub(super) fn of(parts: &MergedCharges<'_>) -> ChargeArrays {
        let mut arrays = ChargeArrays::default();
        for part in &parts.parts {
            let limit = &part.limit.limit;
            let mut parameters = parameters(limit);
            parameters.resize(PARAMETERS, 0);
            arrays.keys.push(key_of(part.limit, part.key));
            arrays.limits.push(part.limit.name.clone());
            arrays.strategies.push(limit_codec::number(limit.strategy()).into());
            arrays.parameters.extend(parameters);
            arrays.costs.push(whole(part.cost.get()));
            arrays.shadows.push(part.shadow);
        }
        arrays
    }
}

/// The name of a key under a limit. The kind of state is part of the name: a limit whose strategy changes starts with empty
/// counters instead of reading those of the other strategy. Both buckets have the same state.
pub(super) fn key_of(limit: &StoredLimit, key: &str) -> Uuid {
    let kind = match limit.limit.strategy() {
        Strategy::TokenBucket | Strategy::LeakyBucket => "b",
        Strategy::FixedWindow => "w",
        Strategy::SlidingWindow => "l",
        Strategy::SlidingWindowCounter => "c",
        Strategy::Concurrency => "h",
    };
    Uuid::from_bytes(name_of(&[kind, &limit.name, key]))
}

/// The parameters of the limit for the twins.
pub(super) fn parameters(limit: &Limit) -> Vec<i64> {
    limit.parameters().into_iter().map(whole).collect()
}

/// The cost of a charge for the twins.
pub(super) fn price(limit: &Limit, cost: Cost) -> (i64, i64) {
    limit.price(cost).map_or((-1, 0), |(us, rest)| (whole(us), whole(rest)))
}

/// A number that the kernel keeps far below 2^63, or that is too large to matter.
pub(super) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A number from the server, which is never negative.
fn count(number: i64) -> Result<u64, StoreError> {
    u64::try_from(number).map_err(|_| nonsense("a number below zero"))
}

/// The answer of the server is invalid.
pub(super) fn nonsense(what: impl std::fmt::Display) -> StoreError {
    StoreError::failed(
        Failure::Reply,
        format!("PostgreSQL answered what makes no sense: {what}; please report this"),
    )
}

/// A column of an answer.
pub(super) fn column<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    index: usize,
) -> Result<T, StoreError> {
    row.try_get(index).map_err(|error| nonsense(format!("column {index}")).caused_by(error))
}

/// The reading of a limit, from the numbers of its twin; missing numbers are zero.
pub(super) fn reading(limit: &Limit, numbers: &[i64]) -> Result<Reading, StoreError> {
    let number = |index: usize| count(numbers.get(index).copied().unwrap_or(0));
    let us = |index| number(index).map(Micros::new);
    Ok(match limit.strategy() {
        Strategy::TokenBucket | Strategy::LeakyBucket => Reading::Bucket { us: us(0)?, rest: number(1)? },
        Strategy::FixedWindow => {
            Reading::Window(WindowState { end: us(0)?, count: number(1)?, start: us(2)? })
        }
        Strategy::SlidingWindow => {
            Reading::Log(EntriesReading { used: number(0)?, wait: us(1)?, last: us(2)? })
        }
        Strategy::SlidingWindowCounter => {
            // Counts of version 1 of the tables have no window length: it is that of the reader.
            let window = us(3)?;
            let window = if window == Micros::ZERO { limit.window_us() } else { window };
            Reading::Counter(CounterState {
                newer: Counts { window, start: us(0)?, prev: number(1)?, cur: number(2)? },
                older: Counts { window: us(4)?, start: us(5)?, prev: number(6)?, cur: number(7)? },
            })
        }
        Strategy::Concurrency => {
            Reading::Leases(EntriesReading { used: number(0)?, wait: us(1)?, last: us(2)? })
        }
    })
}

/// The readings of all parts, from eight numbers each.
pub(super) fn readings(parts: &MergedCharges<'_>, numbers: &[i64]) -> Result<Vec<Reading>, StoreError> {
    let limits = parts.parts.len();
    if limits * READING != numbers.len() {
        return Err(nonsense(format!("{} numbers for {limits} limits", numbers.len())));
    }
    let (chunks, _) = numbers.as_chunks::<READING>();
    parts.parts.iter().zip(chunks).map(|(part, numbers)| reading(&part.limit.limit, numbers)).collect()
}

/// An instant from the server.
pub(super) fn instant(us: i64) -> Result<Micros, StoreError> {
    count(us).map(Micros::new)
}

/// The request of a held call, as it is stored with the hold: for each charge its limit, its cost and its part. If the charge is
/// sent again, the answer is computed from this and the readings.
pub(super) fn remembered(charges: &[StoredCharge<'_>], parts: &MergedCharges<'_>) -> Vec<i64> {
    let mut numbers = Vec::with_capacity(charges.len() * REMEMBERED);
    for charge in charges {
        let same = |part: &StoredCharge<'_>| part.limit.name == charge.limit.name && part.key == charge.key;
        let index = parts.parts.iter().position(same).unwrap_or(0);
        let part = &parts.parts[index];
        numbers.extend(limit_codec::write(&part.limit.limit).map(whole));
        // Costs above 2^63 are written as their bits.
        numbers.push(part.cost.get().cast_signed());
        numbers.push(i64::from(part.shadow));
        numbers.push(i64::try_from(index).unwrap_or(i64::MAX));
    }
    numbers
}

/// The answer of a held charge, from its stored request and readings; an error if it is not the charge that was `sent`.
pub(super) fn answer_again(
    sent: &[i64],
    remembered: &[i64],
    numbers: &[i64],
    at: Micros,
) -> Result<Charged, StoreError> {
    let (charges, rest) = remembered.as_chunks::<REMEMBERED>();
    let (found, _) = numbers.as_chunks::<READING>();
    if !rest.is_empty() {
        return Err(nonsense("a held charge of another version"));
    }
    // The costs, and which charges are of one pair. The function compares the keys, and leaves the request out if they differ.
    let request = |&[.., cost, _shadow, part]: &[i64; REMEMBERED]| (cost, part);
    if !sent.as_chunks().0.iter().map(request).eq(charges.iter().map(request)) {
        return Err(StoreError::id_taken());
    }
    let mut outcomes = Outcomes::new();
    for &[strategy, a, b, c, cost, _shadow, part] in charges {
        let limit = limit_codec::read([count(strategy)?, count(a)?, count(b)?, count(c)?])
            .ok_or_else(|| nonsense("a held charge under an impossible limit"))?;
        let cost = Cost::new(cost.cast_unsigned()).ok_or_else(|| nonsense("a held charge of nothing"))?;
        let found = usize::try_from(part).ok().and_then(|part| found.get(part));
        let found = found.ok_or_else(|| nonsense("a held charge without its readings"))?;
        outcomes.push(limit.answer(&reading(&limit, found)?, cost, at));
    }
    // Only an admitted charge is held.
    Ok(Charged { allowed: true, outcomes })
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::Rate;

    use super::*;

    #[test]
    fn a_held_charge_is_answered_from_what_was_remembered() {
        let second = Micros::from_secs(1);
        let rate: Rate = "7/s".parse().unwrap();
        let now = Micros::from_secs(100);
        for (limit, numbers) in [
            (Limit::token_bucket(rate, 9), [142_857, 1, 0, 0, 0, 0, 0, 0]),
            (Limit::leaky_bucket(rate, 9), [142_857, 1, 0, 0, 0, 0, 0, 0]),
            (Limit::fixed_window(9, second), [100_500_000, 3, 99_500_000, 0, 0, 0, 0, 0]),
            (Limit::clock_window(9, second), [101_000_000, 3, 100_000_000, 0, 0, 0, 0, 0]),
            (Limit::sliding_window(9, second), [3, 0, 400_000, 0, 0, 0, 0, 0]),
            (Limit::sliding_window_counter(9, second), [100_000_000, 2, 3, 0, 0, 0, 0, 0]),
            (
                Limit::sliding_window_counter(9, second),
                [100_000_000, 1, 1, 1_000_000, 3_000_000, 99_000_000, 2, 1],
            ),
            (Limit::concurrency(9, second), [3, 0, 400_000, 0, 0, 0, 0, 0]),
        ] {
            let stored = StoredLimit::new("api", limit.unwrap());
            let charge =
                StoredCharge { limit: &stored, key: "k", cost: Cost::new(2).unwrap(), shadow: false };
            let charges = [charge, charge];
            let parts = MergedCharges::of(&charges);
            let reading = reading(&stored.limit, &numbers).unwrap();
            let expected = parts.conclude(&parts.outcomes([reading], now), true).unwrap();
            let sent = remembered(&charges, &parts);
            assert_eq!(answer_again(&sent, &sent, &numbers, now).unwrap(), expected);
            for other in [&[][..], &charges[..1]] {
                let other = remembered(other, &MergedCharges::of(other));
                assert!(answer_again(&other, &sent, &numbers, now).unwrap_err().is_invalid());
                assert!(answer_again(&sent, &other, &numbers, now).unwrap_err().is_invalid());
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_an_error_and_never_an_answer() {
        let stored = StoredLimit::new("api", Limit::fixed_window(9, Micros::from_secs(1)).unwrap());
        let charge = StoredCharge { limit: &stored, key: "k", cost: Cost::ONE, shadow: false };
        assert!(reading(&stored.limit, &[-1, 0, 0]).is_err());
        assert!(readings(&MergedCharges::of(&[charge]), &[1, 2]).is_err());
        for remembered in [&[1, 2, 3][..], &[9, 1, 1, 1, 1, 0, 0], &[3, 1, 1, 1, 1, 0, 5]] {
            let error = answer_again(remembered, remembered, &[0; READING], Micros::ZERO).unwrap_err();
            assert_eq!(error.failure(), Some(Failure::Reply), "{error}");
        }
    }
}
