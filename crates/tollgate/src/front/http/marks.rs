//! The header fields of an answer, rendered when the decision is made and written when the answer is there.

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tollgate_kernel::Micros;

use crate::headers::{self, Field, Format, Said};

/// The names of [`Field::ALL`], worked out when this is compiled.
static NAMES: [HeaderName; Field::ALL.len()] = [
    HeaderName::from_static(Field::Limit.name()),
    HeaderName::from_static(Field::Remaining.name()),
    HeaderName::from_static(Field::Reset.name()),
    RETRY_AFTER,
    HeaderName::from_static(Field::Policy.name()),
    HeaderName::from_static(Field::Quota.name()),
];

/// The fields that tell a caller how it stands: all values in one text. A request carries this all the way, so it is small.
#[derive(Default)]
pub(super) struct Marks {
    text: Vec<u8>,
    /// Where the value of each field ends; zero for one that is not told.
    ends: [u32; Field::ALL.len()],
}

impl Marks {
    pub(super) fn new(format: &Format, said: &[Said<'_>], now: Micros) -> Marks {
        let mut ends = [0; Field::ALL.len()];
        let line = headers::write(format, said.iter().copied(), now, |field, end| {
            // A layer has few tolls with short names; what could not be counted is not told.
            ends[field as usize] = u32::try_from(end).unwrap_or_default();
        });
        Marks { text: line.into_bytes(), ends }
    }

    /// Writes them on an answer. The lists of the draft are added to those that are there; the other fields have room for one
    /// limit, and that is the outermost's.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        if self.text.is_empty() {
            return;
        }
        headers.reserve(self.ends.iter().filter(|end| **end > 0).count());
        let mut start = 0;
        for (field, end) in Field::ALL.into_iter().zip(self.ends) {
            let (name, end) = (&NAMES[field as usize], end as usize);
            // What is rendered is visible ASCII.
            let Some(Ok(value)) = (end > start).then(|| HeaderValue::from_bytes(&self.text[start..end]))
            else {
                continue;
            };
            start = end;
            match field {
                Field::Policy | Field::Quota => drop(headers.append(name, value)),
                _ => drop(headers.insert(name, value)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_its_own_name() {
        for (field, name) in Field::ALL.into_iter().zip(&NAMES) {
            assert_eq!((name.as_str(), &NAMES[field as usize]), (field.name(), name));
        }
    }
}
