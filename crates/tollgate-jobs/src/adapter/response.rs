//! What the ack writes as a job's result.

use serde::{Deserialize, Serialize};
use tollgate::ChargeId;

/// The handler's own response, or what the gate answered instead of calling it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum GateResponse<R> {
    /// The gate answered.
    Gated(Gated),
    /// The handler did.
    Ran(R),
}

/// What the gate answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gated {
    /// `delayed` or `skipped`.
    pub tollgate: String,
    /// The limit that held the job up.
    pub limit: String,
    /// Until when a delayed job waits, on the database's clock, in µs since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_us: Option<u64>,
    /// How long it waits from the ack on, where that clock could not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_us: Option<u64>,
    /// Makes each result another one, by which the trigger knows an ack from other updates.
    pub nonce: String,
}

impl Gated {
    pub(super) fn new(what: &str, limit: String, until_us: Option<u64>, wait_us: Option<u64>) -> Gated {
        let nonce = format!("{:032x}", ChargeId::random().get());
        Gated { tollgate: what.to_owned(), limit, until_us, wait_us, nonce }
    }
}

/// The result of a job that is put off without having been claimed.
pub(super) fn delayed_result(limit: &str, until_us: u64) -> serde_json::Value {
    serde_json::json!({ "Ok": Gated::new("delayed", limit.to_owned(), Some(until_us), None) })
}
