//! The header fields of an answer, rendered when the decision is made and written when the answer is there.

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tollgate_kernel::Micros;

use crate::headers::{Field, Format, Line, Said, Told};

/// The names of [`Field::ALL`], worked out when this is compiled.
static NAMES: [HeaderName; Field::ALL.len()] = [
    HeaderName::from_static(Field::Limit.name()),
    HeaderName::from_static(Field::Remaining.name()),
    HeaderName::from_static(Field::Reset.name()),
    RETRY_AFTER,
    HeaderName::from_static(Field::Policy.name()),
    HeaderName::from_static(Field::Quota.name()),
];

/// The fields that tell a caller how it stands. A request carries this all the way, so it is small.
#[derive(Default)]
pub(super) struct Marks {
    /// By [`Field`], as far as it is a number.
    numbers: [Option<u64>; 4],
    policy: Option<HeaderValue>,
    quota: Option<HeaderValue>,
}

impl Marks {
    /// From what each limit said; `policy` is the value of its field where that is known already.
    pub(super) fn new(
        format: &Format,
        said: &[Said<'_>],
        now: Micros,
        policy: Option<&HeaderValue>,
    ) -> Marks {
        let Some(told) = Told::new(format, said.iter().copied(), now) else { return Marks::default() };
        let mut marks = Marks::default();
        for (field, number) in told.numbers() {
            marks.numbers[field as usize] = Some(number);
        }
        if format.draft {
            let mut line = Line::default();
            told.write_quota(&mut line);
            marks.quota = value(&line);
            marks.policy = policy.cloned().or_else(|| {
                line = Line::default();
                told.write_policy(&mut line);
                value(&line)
            });
        }
        marks
    }

    /// Writes them on an answer. The lists of the draft are added to those that are there; the other fields have room for one
    /// limit, and that is the outermost's, unless one inside has refused.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        let lists = usize::from(self.policy.is_some()) + usize::from(self.quota.is_some());
        let count = self.numbers.iter().flatten().count() + lists;
        if count == 0 {
            return;
        }
        headers.reserve(count);
        // Where a layer inside has refused, its numbers say for how long, and ours would contradict them.
        let is_refused_inside =
            headers.contains_key(&RETRY_AFTER) && headers.contains_key(&NAMES[Field::Limit as usize]);
        for (name, number) in NAMES.iter().zip(self.numbers).filter(|_| !is_refused_inside) {
            if let Some(number) = number {
                headers.insert(name, number_value(number));
            }
        }
        for (field, value) in [(Field::Policy, self.policy), (Field::Quota, self.quota)] {
            if let Some(value) = value {
                headers.append(&NAMES[field as usize], value);
            }
        }
    }
}

/// A text that was rendered, which is visible ASCII.
pub(super) fn value(line: &Line) -> Option<HeaderValue> {
    HeaderValue::from_bytes(line.as_bytes()).ok()
}

/// A number; nearly all are small, and those need no allocation.
fn number_value(number: u64) -> HeaderValue {
    match usize::try_from(number) {
        Ok(number @ 0..1000) => {
            let leading = if number < 10 { 2 } else { usize::from(number < 100) };
            HeaderValue::from_static(&SMALL[number * 3 + leading..number * 3 + 3])
        }
        _ => HeaderValue::from(number),
    }
}

/// All numbers of three digits, one after the other.
static SMALL: &str = match std::str::from_utf8(&DIGITS) {
    Ok(digits) => digits,
    Err(_) => panic!("digits are text"),
};

static DIGITS: [u8; 3000] = digits();

/// Counted up digit by digit, as an odometer does.
const fn digits() -> [u8; 3000] {
    let mut digits = [b'0'; 3000];
    let mut number = 1;
    while number < 1000 {
        let (last, this) = (3 * (number - 1), 3 * number);
        let mut carry = 1;
        let mut place = 3;
        while place > 0 {
            place -= 1;
            let digit = digits[last + place] + carry;
            carry = (digit > b'9') as u8;
            digits[this + place] = if carry == 1 { b'0' } else { digit };
        }
        number += 1;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_they_are() {
        for number in (0..2_000).chain([9_999, 1_000_000, u64::MAX]) {
            assert_eq!(number_value(number), number.to_string().as_str());
        }
    }

    #[test]
    fn every_field_has_its_own_name() {
        for (field, name) in Field::ALL.into_iter().zip(&NAMES) {
            assert_eq!((name.as_str(), &NAMES[field as usize]), (field.name(), name));
        }
    }
}
