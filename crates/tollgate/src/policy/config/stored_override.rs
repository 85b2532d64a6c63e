//! Overrides that are set while servers and workers run, as the store keeps them: all who share the store read them, and put them over
//! those of their config.
//!
//! A record has one override as JSON. The server writes them (`POST /v1/overrides`); it and the workers of jobs follow them. Asking the store is
//! left to them.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate_kernel::{Micros, Rate};

use super::OverrideNumbers;
use crate::key::Key;
use crate::policy::{Allowance, Policy};

/// What an override says: `blocked`, `unlimited`, or numbers, by the names that the config has.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Allowance, Limit};
/// use tollgate::config::OverrideFields;
///
/// let base = Allowance::from(Limit::sliding_window(2, Duration::from_secs(60))?);
/// let fields = OverrideFields { limit: Some(9), ..OverrideFields::default() };
/// assert_eq!(fields.over(&base).unwrap().to_string(), "9 in any 1m");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideFields {
    #[serde(default, skip_serializing_if = "is_false")]
    /// Nothing passes.
    pub blocked: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    /// Everything passes.
    pub unlimited: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub rate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub burst: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub capacity: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub limit: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub window: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// See [`OverrideNumbers`].
    pub lease: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
fn is_false(value: &bool) -> bool {
    !value
}

impl OverrideFields {
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
    pub fn over(&self, base: &Allowance) -> Result<Allowance, String> {
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

/// An override as the store has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredOverride {
    /// The limit.
    pub limit: String,
    /// The canonical text of the key.
    pub key: String,
    #[serde(rename = "override")]
    /// What passes instead.
    pub fields: OverrideFields,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// Why it was set.
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// Who set it.
    pub by: Option<String>,
    /// When it was set, by the store's clock.
    pub at_us: u64,
}

impl StoredOverride {
    /// What is written in the store. It is bounded, because its fields are.
    pub fn to_payload(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From what is written in the store. A newer version may write what this one does not know.
    pub fn read(payload: &str) -> Result<StoredOverride, String> {
        let read: StoredOverride = serde_json::from_str(payload).map_err(|error| error.to_string())?;
        Key::parse(&read.key).map_err(|error| error.to_string())?;
        Ok(read)
    }

    /// The key, and what passes for it under a limit of the policy, or why it cannot be applied.
    pub fn allowance(&self, policy: &Policy) -> Result<(Key<'_>, Allowance), String> {
        let rule = policy.find(&self.limit).map_err(|error| error.to_string())?;
        let key = Key::parse(&self.key).map_err(|error| error.to_string())?;
        Ok((key, self.fields.over(rule.allowance())?))
    }
}

/// A policy with these overrides over its own. One that does not go with its limit, or whose limit is not there, is left out.
pub fn with_overrides<'a>(policy: &Policy, set: impl IntoIterator<Item = &'a StoredOverride>) -> Policy {
    let mut by_limit: HashMap<&str, Vec<&StoredOverride>> = HashMap::new();
    set.into_iter().for_each(|one| by_limit.entry(&one.limit).or_default().push(one));
    if by_limit.is_empty() {
        return policy.clone();
    }
    let rules = policy.rules().iter().map(|rule| {
        let mut over = rule.clone();
        for one in by_limit.get(rule.name()).into_iter().flatten() {
            let Ok((key, allowance)) = one.allowance(policy) else { continue };
            match over.overriding(key, allowance) {
                Ok(next) => over = next,
                // What goes with the limit is never refused.
                Err(_) => return rule.clone(),
            }
        }
        over
    });
    // Names are as distinct as they were.
    Policy::new(rules).unwrap_or_else(|_| policy.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_override_says_is_read_or_refused_with_the_field() {
        let window =
            Allowance::from(tollgate_kernel::Limit::sliding_window(2, Micros::from_secs(60)).unwrap());
        let check = |base: &Allowance, text: &str, expected: Result<&str, &str>| {
            let read = serde_json::from_str::<OverrideFields>(text).map_err(|error| error.to_string());
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
    fn what_is_written_is_read_again() {
        let fields = OverrideFields { rate: Some("9/s".into()), burst: Some(3), ..OverrideFields::default() };
        let written = StoredOverride {
            limit: "api".into(),
            key: "user:a%3Ab".into(),
            fields,
            reason: Some("ticket".into()),
            by: None,
            at_us: 5,
        };
        assert_eq!(StoredOverride::read(&written.to_payload()), Ok(written.clone()));
        assert!(StoredOverride::read(&written.to_payload().replace("burst", "bursts")).is_err());
        assert!(StoredOverride::read(&written.to_payload().replace("user:", "a:b:c:")).is_err());
    }
}
