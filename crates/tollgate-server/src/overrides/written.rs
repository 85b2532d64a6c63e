//! How a change of an override is written in the store and shown. How an override itself is, `tollgate` says: workers of jobs read it too.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
pub(crate) use tollgate::config::{OverrideFields as Fields, StoredOverride as Written};
use tollgate::store::Micros;

/// Who changed an override, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Change {
    limit: String,
    pub(super) key: String,
    /// `None` where it was removed.
    #[serde(rename = "override", default, skip_serializing_if = "Option::is_none")]
    fields: Option<Fields>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    by: Option<String>,
    at_us: u64,
}

impl Change {
    /// That an override was set.
    pub(super) fn set(written: &Written, ends: Option<Micros>) -> Change {
        let Written { limit, key, fields, reason, by, at_us } = written.clone();
        Change { limit, key, fields: Some(fields), until_us: ends.map(Micros::get), reason, by, at_us }
    }

    /// That the override of a key was removed.
    pub(crate) fn removed(limit: &str, key: &str, by: Option<String>) -> Change {
        let (limit, key) = (limit.to_owned(), key.to_owned());
        Change { limit, key, fields: None, until_us: None, reason: None, by, at_us: 0 }
    }

    pub(super) fn to_payload(&self, now: Micros) -> String {
        serde_json::to_string(&Change { at_us: now.get(), ..self.clone() }).unwrap_or_default()
    }

    /// When it was, and what.
    pub(super) fn read(payload: &str) -> Option<(Micros, Change)> {
        let change: Change = serde_json::from_str(payload).ok()?;
        Some((Micros::new(change.at_us), change))
    }

    pub(super) fn to_json(&self, at: Micros) -> Value {
        let Change { limit, fields, until_us, reason, by, .. } = self;
        let what = if fields.is_some() { "set" } else { "removed" };
        json!({
            "at": timestamp(at), "what": what, "limit": limit, "override": fields,
            "until": until_us.map(Micros::new).map(timestamp), "reason": reason, "by": by,
        })
    }
}

/// A time in RFC 3339 and UTC, to the second and rounded up.
pub(crate) fn timestamp(at: Micros) -> String {
    let second = i64::try_from(at.as_secs_ceil()).ok();
    let at = second.and_then(|second| jiff::Timestamp::from_second(second).ok());
    at.map(|at| at.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_utc() {
        assert_eq!(timestamp(Micros::new(1_700_000_000_000_001)), "2023-11-14T22:13:21Z");
    }
}
