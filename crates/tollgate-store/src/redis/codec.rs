//! Encodes charges as script arguments, and decodes the answers of scripts.
//!
//! A charge with a hold also sends its request as text, which is stored with the hold. A caller that sends the same id again gets
//! the answer to the charge that was made, even if its request differs; that answer is computed from the stored limits and costs.
//! The text is a stored format (docs/storage.md). `shape.rs` does the same for a whole batch; the order of calls and their
//! routing do not belong here.

use std::fmt::Write;

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tollgate_kernel::{
    Cost, CounterState, Counts, EntriesReading, Limit, Micros, Reading, Strategy, WindowState,
};

use crate::remote::MergedCharges;
use crate::remote::limit_codec::{self, number};
use crate::{Failure, Outcomes, StoreError, StoredCharge, StoredLimit};

/// Adds a part to the arguments of the charge script.
pub(super) fn put_charge(cmd: &mut Cmd, limit: &Limit, cost: Cost, shadow: bool) {
    cmd.arg(number(limit.strategy())).arg(u8::from(shadow));
    match limit.price(cost) {
        Some((price_us, price_rest)) => cmd.arg(cost.get()).arg(price_us).arg(price_rest),
        None => cmd.arg(-1).arg(-1).arg(0),
    };
    put_limit(cmd, limit);
}

/// Adds a part to the arguments of the refund script.
pub(super) fn put_refund(cmd: &mut Cmd, part: &StoredCharge<'_>) {
    let limit = &part.limit.limit;
    cmd.arg(number(limit.strategy())).arg(part.cost.get());
    put_limit(cmd, limit);
}

/// The limit's five numbers.
fn put_limit(cmd: &mut Cmd, limit: &Limit) {
    let parameters = limit.parameters();
    for index in 0..5 {
        cmd.arg(parameters.get(index).copied().unwrap_or(0));
    }
}

pub(super) fn no_answer(what: &str) -> StoreError {
    StoreError::failed(
        Failure::Reply,
        format!("Redis answered {what} with what is no answer to it: please report this"),
    )
    // The server answered, so the call may have been done.
    .ambiguous()
}

/// The values that the script found for one charge.
pub(crate) struct Found {
    pub(super) now: Micros,
    pub(super) passed: bool,
    pub(super) readings: SmallVec<[Reading; 1]>,
}

impl Found {
    /// Sorts the readings into the order of the charge: `order` has the part of each reading.
    pub(super) fn restore(&mut self, order: &[usize]) {
        if order.is_sorted() {
            return;
        }
        let found = std::mem::take(&mut self.readings);
        let mut restored: SmallVec<[(usize, Reading); 4]> = order.iter().copied().zip(found).collect();
        restored.sort_by_key(|(index, _)| *index);
        self.readings = restored.into_iter().map(|(_, reading)| reading).collect();
    }
}

/// The bytes of a number in an answer.
const NUMBER_BYTES: usize = 7;

/// Reads the answer for a charge of these limits: whether it passed, and for each limit its numbers, seven bytes each. The
/// numbers of a fixed window and of a counter follow two bytes that name their format.
pub(super) fn read_found(now: Micros, answer: &[u8], limits: impl Iterator<Item = Limit>) -> Option<Found> {
    let (passed, mut rest) = answer.split_first()?;
    let mut readings = SmallVec::new();
    for limit in limits {
        let (kind_bytes, count) = match limit.strategy() {
            Strategy::TokenBucket | Strategy::LeakyBucket => (0, 2),
            Strategy::SlidingWindow | Strategy::Concurrency => (0, 3),
            Strategy::FixedWindow => (2, 3),
            Strategy::SlidingWindowCounter if rest.starts_with(b"\x02C") => (2, 8),
            Strategy::SlidingWindowCounter => (2, 4),
        };
        let bytes;
        (bytes, rest) = rest.split_at_checked(kind_bytes + count * NUMBER_BYTES)?;
        // The counts of the second window length are zeros if there are none.
        let mut numbers = [0; 8];
        for (number, bytes) in numbers.iter_mut().zip(bytes[kind_bytes..].as_chunks::<NUMBER_BYTES>().0) {
            *number = bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        }
        let count = if limit.strategy() == Strategy::SlidingWindowCounter { 8 } else { count };
        readings.push(read_one(limit, &numbers[..count])?.0);
    }
    rest.is_empty().then_some(Found { now, passed: *passed == 1, readings })
}

/// Reads the answer that is stored with a hold: the same numbers, separated by commas.
pub(super) fn read_remembered(answer: &Value, parts: &[StoredCharge<'_>]) -> Option<Found> {
    let Value::BulkString(text) = answer else { return None };
    let numbers = std::str::from_utf8(text).ok()?.split(',').map(|number| number.parse().ok());
    let numbers = numbers.collect::<Option<Vec<u64>>>()?;
    let [now, passed, numbers @ ..] = &numbers[..] else { return None };
    let limits = parts.iter().map(|part| part.limit.limit);
    read_numbers(Micros::new(*now), *passed == 1, numbers, limits)
}

fn read_numbers(
    now: Micros,
    passed: bool,
    numbers: &[u64],
    limits: impl Iterator<Item = Limit>,
) -> Option<Found> {
    let mut rest = numbers;
    let mut readings = SmallVec::new();
    for limit in limits {
        let reading;
        (reading, rest) = read_one(limit, rest)?;
        readings.push(reading);
    }
    rest.is_empty().then_some(Found { now, passed, readings })
}

/// Reads one part from the front of the numbers; also returns the remaining numbers.
fn read_one(limit: Limit, numbers: &[u64]) -> Option<(Reading, &[u64])> {
    let us = Micros::new;
    Some(match (limit.strategy(), numbers) {
        (Strategy::TokenBucket | Strategy::LeakyBucket, [full, part, rest @ ..]) => {
            (Reading::Bucket { us: us(*full), rest: *part }, rest)
        }
        (Strategy::FixedWindow, [end, count, start, rest @ ..]) => {
            (Reading::Window(WindowState { end: us(*end), count: *count, start: us(*start) }), rest)
        }
        (Strategy::SlidingWindow, [used, wait, last, rest @ ..]) => {
            (Reading::Log(EntriesReading { used: *used, wait: us(*wait), last: us(*last) }), rest)
        }
        (Strategy::Concurrency, [used, wait, last, rest @ ..]) => {
            (Reading::Leases(EntriesReading { used: *used, wait: us(*wait), last: us(*last) }), rest)
        }
        (Strategy::SlidingWindowCounter, [w, s, p, c, other_w, other_s, other_p, other_c, rest @ ..]) => {
            let counts = |window: &u64, start: &u64, prev: &u64, cur: &u64| Counts {
                window: us(*window),
                start: us(*start),
                prev: *prev,
                cur: *cur,
            };
            let (newer, older) = (counts(w, s, p, c), counts(other_w, other_s, other_p, other_c));
            (Reading::Counter(CounterState { newer, older }), rest)
        }
        _ => return None,
    })
}

/// The request of a held charge, as stored. Empty if the parts contain the same: no pair was merged, and each cost could fit.
pub(super) fn remembered_request(charges: &[StoredCharge<'_>], parts: &MergedCharges<'_>) -> String {
    let is_plain = charges.len() == parts.parts.len()
        && parts.parts.iter().all(|part| part.limit.limit.price(part.cost).is_some());
    if is_plain { String::new() } else { write(charges) }
}

/// A call as text: a line for each charge, with shadow mode, cost, key, name and limit. Keys are numbered, not written: the
/// answer depends only on which of them are equal.
pub(super) fn write(charges: &[StoredCharge<'_>]) -> String {
    let mut keys: Vec<&str> = Vec::new();
    let mut text = String::new();
    for charge in charges {
        let key = keys.iter().position(|key| *key == charge.key).unwrap_or_else(|| {
            keys.push(charge.key);
            keys.len() - 1
        });
        let _ =
            write!(text, "{} {} {key} {} ", u8::from(charge.shadow), charge.cost.get(), charge.limit.name);
        let [strategy, one, two, three] = limit_codec::write(&charge.limit.limit);
        let _ = writeln!(text, "{strategy} {one} {two} {three}");
    }
    text
}

/// A charge that was read back from text.
pub(super) struct RememberedCharge {
    charges: Vec<(StoredLimit, String, Cost, bool)>,
}

impl RememberedCharge {
    pub(super) fn read(text: &str) -> Option<RememberedCharge> {
        let charges = text.lines().map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [shadow, cost, key, name, strategy, one, two, three] = words[..] else { return None };
            let number = |word: &str| word.parse::<u64>().ok();
            let limit = limit_codec::read([number(strategy)?, number(one)?, number(two)?, number(three)?]);
            let limit = StoredLimit::new(name, limit?);
            Some((limit, key.to_owned(), Cost::new(number(cost)?)?, shadow == "1"))
        });
        charges.collect::<Option<Vec<_>>>().map(|charges| RememberedCharge { charges })
    }

    pub(super) fn charges(&self) -> Vec<StoredCharge<'_>> {
        let charges = self.charges.iter();
        charges
            .map(|(limit, key, cost, shadow)| StoredCharge { limit, key, cost: *cost, shadow: *shadow })
            .collect()
    }
}

/// The outcomes of the parts, from the values that the script found.
pub(super) fn outcomes(parts: &MergedCharges<'_>, found: &Found) -> Outcomes {
    parts.outcomes(found.readings.iter().copied(), found.now)
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::Rate;

    use super::*;

    #[test]
    fn a_charge_is_read_as_it_was_written() {
        let second = Micros::from_secs(1);
        let rate: Rate = "7/s".parse().unwrap();
        let limits = [
            Limit::token_bucket(rate, 9),
            Limit::leaky_bucket(rate, 9),
            Limit::fixed_window(5, second),
            Limit::clock_window(5, second),
            Limit::sliding_window(5, second),
            Limit::sliding_window_counter(5, second),
            Limit::concurrency(5, second),
        ]
        .map(|limit| StoredLimit::new("a.b-c_1", limit.unwrap()));
        let mut charges = Vec::new();
        for (index, limit) in limits.iter().enumerate() {
            let key = if index % 2 == 0 { "x y\n z" } else { "other" };
            charges.push(StoredCharge {
                limit,
                key,
                cost: Cost::new(index as u64 + 1).unwrap(),
                shadow: index == 3,
            });
        }
        let text = write(&charges);
        assert!(!text.contains("x y"), "no key is kept");
        let remembered = RememberedCharge::read(&text).unwrap();
        let back = remembered.charges();
        assert_eq!(back.len(), charges.len());
        for (one, other) in back.iter().zip(&charges) {
            assert_eq!((one.limit, one.cost, one.shadow), (other.limit, other.cost, other.shadow));
        }
        assert_eq!((back[0].key, back[1].key, back[2].key), ("0", "1", "0"));
        for wrong in ["1", "1 2 3 n 7 1 1 1\n", "0 0 0 n 3 5 1000 0\n", "0 1 0 n 3 0 1000 0\n"] {
            assert!(RememberedCharge::read(wrong).is_none(), "{wrong}");
        }
        assert_eq!(RememberedCharge::read("").unwrap().charges().len(), 0);
    }

    #[test]
    fn answers_that_make_no_sense_are_none() {
        let limit = StoredLimit::new("a", Limit::fixed_window(5, Micros::from_secs(1)).unwrap());
        let parts = [StoredCharge { limit: &limit, key: "k", cost: Cost::ONE, shadow: false }];
        let packed = |kind: &[u8], numbers: &[u64]| -> Vec<u8> {
            let numbers = numbers.iter().flat_map(|number| number.to_be_bytes()[1..].to_vec());
            kind.iter().copied().chain(numbers).collect()
        };
        let read =
            |answer: &[u8]| read_found(Micros::new(9), answer, parts.iter().map(|part| part.limit.limit));
        assert!(read(&packed(b"\x01\x02w", &[5, 2, 0])).unwrap().passed);
        assert!(!read(&packed(b"\x00\x00\x00", &[0, 0, 0])).unwrap().passed);
        let kept = |text: &str| read_remembered(&Value::BulkString(text.into()), &parts);
        let Reading::Window(state) = kept("9,1,2000000,2,7").unwrap().readings[0] else { panic!("a window") };
        assert_eq!((state.start.get(), state.count), (7, 2));
        assert!(kept("9,1,5,2").is_none() && kept("9,1,5,x,0").is_none());
        for wrong in [
            Vec::new(),
            packed(b"\x01\x02w", &[5, 2]),
            packed(b"\x01\x02w", &[5, 2, 0, 0]),
            packed(b"\x01", &[5, 2, 0]),
        ] {
            assert!(read(&wrong).is_none(), "{wrong:?}");
        }
    }
}
