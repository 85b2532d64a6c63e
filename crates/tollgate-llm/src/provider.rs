//! What a provider's answers say besides the answer: how long to wait, how its limits are, and why it refused.
//!
//! All of it is pure: headers and bodies in, values out. Whether an attempt is made again is decided by the caller, which is the executor or
//! the gateway.

mod errors;
mod hints;

pub use errors::{Failure, classify, classify_event};
pub use hints::{Hints, MOST_WAIT, ReportedLimit, ServerTime, parse_reset, parse_retry_after};
