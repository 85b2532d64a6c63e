//! Why a call waits, as a sentence.

use tollgate::store::Micros;

use crate::config::{Counts, LlmConfig, Priority};
use crate::plan::{Planned, SHARED};
use crate::seen::Waiter;

/// How a limit is that waiting calls are charged to.
pub(crate) struct LimitState {
    pub(super) used: u64,
    pub(super) capacity: u64,
}

/// Why a call waits.
pub(super) fn why(
    config: &LlmConfig,
    waiter: &Waiter,
    binding: Option<(Micros, &Planned, &LimitState)>,
    place: usize,
    now: Micros,
) -> String {
    let first = match place {
        0 => None,
        1 => Some("1 call goes first".to_owned()),
        more => Some(format!("{} calls go first", grouped(more as u64))),
    };
    let ages = waiter.joined.saturating_add(Micros::new(Micros::from(config.window).get() / 4));
    if let (Priority::Batch, Some(_)) = (waiter.priority, &first)
        && ages > now
    {
        let left = words(ages.saturating_sub(now));
        return format!(
            "It is batch, so interactive calls go first; in {left} it is treated as one of them."
        );
    }
    let Some((wait, charge, met)) = binding.filter(|(wait, ..)| *wait > Micros::ZERO) else {
        return match first {
            Some(first) => format!("It waits for its turn: {first}."),
            None => "It is its turn: it goes as soon as there is an answer.".to_owned(),
        };
    };
    let (used, capacity, unit) = (grouped(met.used), grouped(met.capacity), charge.unit);
    if unit == SHARED {
        let limit = &charge.limit;
        return format!("It needs a request of the limit {limit}, and {used} of {capacity} are used.");
    }
    if charge.is_own {
        let client = &waiter.client;
        return format!(
            "It is out of its own share: {client} has {capacity} {unit} of this model and used {used}. Nobody else is held up."
        );
    }
    // What is used leaves room for it, so it is those before it who take that.
    let fits_alone = met.used.saturating_add(charge.cost) <= met.capacity;
    if let (true, Some(first)) = (fits_alone, &first) {
        return format!("It waits for its turn: {first}.");
    }
    let turn = first.map_or_else(String::new, |first| format!(" {}, and", capitalised(&first)));
    let left = words(wait);
    match charge.counts {
        Counts::Requests => {
            let room = if turn.is_empty() {
                "There is room".to_owned()
            } else {
                format!("{turn} then there is room").trim_start().to_owned()
            };
            format!("It needs a request, and {used} of {capacity} {unit} are used. {room} in {left}.")
        }
        Counts::Concurrency => {
            format!("It needs a place, and {used} of {capacity} calls run. It goes when one of them ends.")
        }
        Counts::Tokens | Counts::InputTokens | Counts::OutputTokens => {
            let cost = grouped(charge.cost);
            let room = if turn.is_empty() {
                "Enough of them leaves the window".to_owned()
            } else {
                format!("{turn} enough leaves the window").trim_start().to_owned()
            };
            format!(
                "It needs {cost} tokens, and {used} of {capacity} {unit} are used or reserved. {room} in {left}."
            )
        }
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// With a comma between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A span as people say it, rounded up.
fn words(span: Micros) -> String {
    let tenths = span.get().div_ceil(100_000);
    let seconds = span.as_secs_ceil();
    match seconds {
        0..10 => format!("{}.{} s", tenths / 10, tenths % 10),
        10..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{} h", seconds.div_ceil(3_600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_spans_are_words() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        let of = |ms: u64| words(Micros::from_millis(ms));
        assert_eq!([of(2_010), of(14_000), of(90_000), of(601_000)], ["2.1 s", "14 s", "90 s", "11 min"]);
    }
}
