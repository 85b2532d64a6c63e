//! The numbers that a limit may have, so that the arithmetic is exact on every store.
//!
//! Lua numbers are exact to 2^53, SQL and Rust integers to 2^63. A count or a cost is below 2^53; a product of a count and a span
//! (`burst * period`, `limit * window`) is at most 2^62, which the Lua twins keep in two parts; a bucket is full again within 2^52 us
//! and a debt paid within ten years, so that the instant of being full stays below 2^53.

use crate::error::LimitError;
use crate::time::Micros;

/// The largest count, limit, burst or capacity: 2^53 − 1, the largest whole number that every store holds exactly.
pub const MAX_COUNT: u64 = (1 << 53) - 1;

/// The largest product of a count and a span in µs: 2^62.
pub const MAX_PRODUCT: u64 = 1 << 62;

/// The largest numerator of a rate once `count / period` is reduced: 2^32.
pub const MAX_RATE_NUMERATOR: u64 = 1 << 32;

/// The longest time that a bucket may take to fill: 2^52 µs, some 142 years.
pub const MAX_FILL: Micros = Micros::new(1 << 52);

/// The longest window, period or lease: 3,660 days, some ten years.
pub const MAX_SPAN: Micros = Micros::from_secs(3660 * 86_400);

/// Refuses a count that is zero or too large to be exact.
pub(crate) fn checked_count(field: &'static str, count: u64) -> Result<u64, LimitError> {
    match count {
        0 => Err(LimitError::new(
            field,
            0,
            "must be at least 1; say `unlimited` or `blocked` for no limit or no passage",
        )),
        1..=MAX_COUNT => Ok(count),
        _ => Err(LimitError::new(
            field,
            count,
            format!("must be at most {MAX_COUNT} (2^53 - 1) to stay exact"),
        )),
    }
}

/// Refuses a span that is empty or longer than ten years.
pub(crate) fn checked_span(field: &'static str, span: Micros) -> Result<Micros, LimitError> {
    if span == Micros::ZERO {
        return Err(LimitError::new(field, span, "must be longer than zero"));
    }
    if span > MAX_SPAN {
        return Err(LimitError::new(field, span, format!("must be at most {MAX_SPAN}")));
    }
    Ok(span)
}

/// Refuses a count and a span whose product no store could keep exact.
pub(crate) fn checked_product(field: &'static str, count: u64, span_us: u64) -> Result<u64, LimitError> {
    match count.checked_mul(span_us) {
        Some(product) if product <= MAX_PRODUCT => Ok(product),
        _ => Err(LimitError::new(
            field,
            count,
            format!(
                "times {span_us} us passes 2^62 and could not be kept exact; at most {} fits here",
                MAX_PRODUCT / span_us
            ),
        )),
    }
}
