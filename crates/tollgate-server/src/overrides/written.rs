//! How an override is written: in requests, in the store, and in what the API shows.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tollgate::config::OverrideNumbers;
use tollgate::store::Micros;
use tollgate::{Allowance, Key, Policy, Rate};

/// What an override says: `blocked`, `unlimited`, or numbers, by the names that the config has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fields {
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) blocked: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) unlimited: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) burst: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) capacity: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lease: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
fn is_false(value: &bool) -> bool {
    !value
}

impl Fields {
    /// The numbers, if it is of numbers; the error names the field.
    fn numbers(&self) -> Result<OverrideNumbers, String> {
        let span = |field: &str, text: &Option<String>| -> Result<Option<Duration>, String> {
            let read = |text: &String| {
                let wrong = |_| format!("`{field}` must be a duration such as \"1m\"");
                text.parse::<Micros>().map(Duration::from).map_err(wrong)
            };
            text.as_ref().map(read).transpose()
        };
        let rate = |text: &String| {
            let wrong = |_| "`rate` must be count/period, such as \"10/s\"".to_owned();
            Rate::try_from(text.as_str()).map_err(wrong)
        };
        Ok(OverrideNumbers {
            rate: self.rate.as_ref().map(rate).transpose()?,
            burst: self.burst,
            capacity: self.capacity,
            limit: self.limit,
            window: span("window", &self.window)?,
            lease: span("lease", &self.lease)?,
        })
    }

    /// What passes in place of `base`; the error says what to write.
    pub(crate) fn over(&self, base: &Allowance) -> Result<Allowance, String> {
        let numbers = self.numbers()?;
        let has_numbers = numbers != OverrideNumbers::default();
        match (self.blocked, self.unlimited, has_numbers) {
            (true, false, false) => Ok(Allowance::Blocked),
            (false, true, false) => Ok(Allowance::Unlimited),
            (false, false, true) => match base {
                Allowance::Limited(limit) => {
                    Ok(numbers.over(limit).map_err(|error| error.to_string())?.into())
                }
                _ => Err(format!(
                    "the limit is {base} and has no numbers to change; write `blocked` or `unlimited`"
                )),
            },
            (false, false, false) => {
                Err("says nothing; write numbers, \"blocked\": true or \"unlimited\": true".to_owned())
            }
            _ => Err("contradicts itself; write one of `blocked`, `unlimited` and numbers".to_owned()),
        }
    }
}

/// An override as it is written in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Written {
    pub(crate) limit: String,
    /// The canonical text of the key.
    pub(crate) key: String,
    #[serde(rename = "override")]
    pub(crate) fields: Fields,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) by: Option<String>,
    /// When it was set, by the store's clock.
    pub(crate) at_us: u64,
}

impl Written {
    /// What is written in the store. It is bounded, because its fields are.
    pub(super) fn to_payload(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From what is written in the store. A newer version may write what this one does not know.
    pub(super) fn read(payload: &str) -> Result<Written, String> {
        let read: Written = serde_json::from_str(payload).map_err(|error| error.to_string())?;
        Key::parse(&read.key).map_err(|error| error.to_string())?;
        Ok(read)
    }

    /// The key, and what passes for it under a limit of the policy, or why it cannot be applied.
    pub(crate) fn allowance(&self, policy: &Policy) -> Result<(Key<'_>, Allowance), String> {
        let rule = policy.find(&self.limit).map_err(|error| error.to_string())?;
        let key = Key::parse(&self.key).map_err(|error| error.to_string())?;
        Ok((key, self.fields.over(rule.allowance())?))
    }

    /// The same as a change, for the list of changes.
    pub(super) fn changed(&self, ends: Option<Micros>) -> Change {
        Change {
            limit: self.limit.clone(),
            key: self.key.clone(),
            fields: Some(self.fields.clone()),
            until_us: ends.map(Micros::get),
            reason: self.reason.clone(),
            by: self.by.clone(),
            at_us: self.at_us,
        }
    }
}

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
    fn what_an_override_says_is_read_or_refused_with_the_field() {
        let window = Allowance::from(tollgate::Limit::sliding_window(2, Micros::from_secs(60)).unwrap());
        let check = |base: &Allowance, text: &str, expected: Result<&str, &str>| {
            let read = serde_json::from_str::<Fields>(text).map_err(|error| error.to_string());
            let over = read.and_then(|fields| fields.over(base));
            match (over, expected) {
                (Ok(over), Ok(expected)) => assert_eq!(over.to_string(), expected, "{text}"),
                (Err(why), Err(expected)) => assert!(why.contains(expected), "{text}: {why}"),
                (over, _) => panic!("{text}: {over:?}"),
            }
        };
        check(&window, r#"{"limit":9}"#, Ok("9 in any 1m"));
        check(&window, r#"{"limit":9,"window":"1h"}"#, Ok("9 in any 1h"));
        check(&window, r#"{"blocked":true}"#, Ok("blocked"));
        check(&window, r#"{"unlimited":true,"blocked":false}"#, Ok("unlimited"));
        check(&Allowance::Unlimited, r#"{"blocked":true}"#, Ok("blocked"));
        check(&Allowance::Unlimited, r#"{"limit":9}"#, Err("the limit is unlimited and has no numbers"));
        check(&window, "{}", Err("says nothing"));
        check(&window, r#"{"blocked":false}"#, Err("says nothing"));
        check(&window, r#"{"blocked":true,"unlimited":true}"#, Err("contradicts itself"));
        check(&window, r#"{"blocked":true,"limit":5}"#, Err("contradicts itself"));
        check(
            &window,
            r#"{"rate":"5/s"}"#,
            Err("`rate` does not belong to sliding_window; it takes limit, window"),
        );
        check(&window, r#"{"rate":"fast"}"#, Err("`rate` must be count/period"));
        check(&window, r#"{"window":"soon"}"#, Err("`window` must be a duration"));
        check(&window, r#"{"limit":0}"#, Err("`limit` = 0: must be at least 1"));
        check(&window, r#"{"limt":5}"#, Err("unknown field"));
    }

    #[test]
    fn what_is_written_is_read_again_and_times_are_in_utc() {
        let fields = Fields { rate: Some("9/s".into()), burst: Some(3), ..Fields::default() };
        let written = Written {
            limit: "api".into(),
            key: "user:a%3Ab".into(),
            fields,
            reason: Some("ticket".into()),
            by: None,
            at_us: 5,
        };
        assert_eq!(Written::read(&written.to_payload()), Ok(written.clone()));
        assert!(Written::read(&written.to_payload().replace("burst", "bursts")).is_err());
        assert!(Written::read(&written.to_payload().replace("user:", "a:b:c:")).is_err());
        assert_eq!(timestamp(Micros::new(1_700_000_000_000_001)), "2023-11-14T22:13:21Z");
    }
}
