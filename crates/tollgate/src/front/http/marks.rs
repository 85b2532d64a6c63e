//! The header fields of an answer, rendered when the decision is made and written when the answer is there.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tollgate_kernel::Micros;

use crate::headers::{self, Field, Format, Said};

/// The fields that tell a caller how it stands.
#[derive(Default)]
pub(super) struct Marks {
    values: [Option<HeaderValue>; Field::ALL.len()],
}

impl Marks {
    pub(super) fn new(format: &Format, said: &[Said<'_>], now: Micros) -> Marks {
        let mut marks = Marks::default();
        headers::render(format, said.iter().copied(), now, |field, value| {
            // What is rendered is visible ASCII.
            marks.values[field as usize] = HeaderValue::from_str(value).ok();
        });
        marks
    }

    /// Writes them on an answer. The lists of the draft are added to those that are there; the other fields have room for one
    /// limit, and that is the outermost's.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        headers.reserve(self.values.iter().flatten().count());
        for (field, value) in Field::ALL.into_iter().zip(self.values) {
            let Some(value) = value else { continue };
            let name = HeaderName::from_static(field.name());
            match field {
                Field::Policy | Field::Quota => drop(headers.append(name, value)),
                _ => drop(headers.insert(name, value)),
            }
        }
    }
}
