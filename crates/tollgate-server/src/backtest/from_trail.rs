//! Calls of language models from the gateway's trail (`rate_limits.jsonl`): what each attempt charged.
//!
//! A line of an attempt becomes one charge of all limits of its model, at the time at which it was sent, for the tokens that it has used.
//! Lines of requests that waited or were refused charged nothing and are passed over: the attempt that followed has a line of its own.
//! Limits of clients are left out, because the trail does not say which client it was; concurrency is, as for access logs.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use tollgate_llm::{Counts, LlmConfig, ModelLimit, Usage, llm_key};

use super::instant;
use super::mistake::Mistake;

/// A line of the trail, as far as a backtest reads it.
#[derive(Deserialize)]
pub(super) struct Call<'a> {
    #[serde(borrow)]
    timestamp: Cow<'a, str>,
    #[serde(borrow)]
    model: Cow<'a, str>,
    #[serde(borrow)]
    #[serde(rename = "status")]
    _status: Cow<'a, str>,
    #[serde(default)]
    attempt: Option<u32>,
    #[serde(default)]
    input_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
    #[serde(default)]
    cached_tokens: Option<u64>,
    #[serde(default)]
    reserved: Option<u64>,
    #[serde(borrow, default)]
    group: Option<Cow<'a, str>>,
    #[serde(default)]
    seconds: Option<f64>,
    #[serde(default)]
    limit: Option<IgnoredAny>,
}

/// One charge of a call: a limit, a key and a cost.
pub(super) type Charged = (String, String, u64);

impl<'a> Call<'a> {
    /// A line of the trail; `None` for any other line.
    pub(super) fn read(line: &'a [u8]) -> Option<Call<'a>> {
        let name = b"\"timestamp\"";
        if !line.windows(name.len()).any(|window| window == name) {
            return None;
        }
        serde_json::from_slice::<Call<'_>>(line).ok().filter(|call| call.limit.is_none())
    }

    /// When it was sent, in microseconds.
    pub(super) fn sent(&self) -> Result<u64, Mistake> {
        let ended =
            instant::parse(&self.timestamp).map_err(|fix| Mistake::new("timestamp", &self.timestamp, fix))?;
        let took = std::time::Duration::try_from_secs_f64(self.seconds.unwrap_or(0.0)).unwrap_or_default();
        Ok(ended.saturating_sub(u64::try_from(took.as_micros()).unwrap_or(u64::MAX)))
    }

    /// What it charged; nothing for a model that is not configured, and for a line that is not of an attempt.
    pub(super) fn charges(&self, config: Option<&LlmConfig>) -> Vec<Charged> {
        let known = config.and_then(|config| Some((config, config.model(&self.model)?)));
        let (Some((config, model)), Some(_)) = (known, self.attempt) else { return Vec::new() };
        let usage = Usage {
            input: self.input_tokens.unwrap_or(0),
            cached: self.cached_tokens.unwrap_or(0),
            output: self.output_tokens.unwrap_or(0),
        };
        let kind = config.upstream(&model.upstream).map(|upstream| upstream.kind);
        let input = kind.map_or(usage.input, |kind| usage.charged_input(kind, model.count_cache_reads));
        // Of an attempt whose fate is unknown, what was reserved stays charged.
        let lost = if self.input_tokens.is_none() { self.reserved.unwrap_or(0) } else { 0 };
        let key = llm_key(self.group.as_deref().unwrap_or(&model.upstream));
        let charge = |limit: &ModelLimit| {
            let cost = match limit.counts {
                Counts::Requests => 1,
                Counts::Tokens => input.saturating_add(usage.output).saturating_add(lost),
                Counts::InputTokens => input,
                Counts::OutputTokens => usage.output,
                Counts::Concurrency => 0,
            };
            (cost > 0).then(|| (limit.name.clone(), key.clone(), cost))
        };
        // The trail does not say which client it was, so neither does a key that is by client.
        let shared = Some(&model.shared).filter(|shared| !shared.is_by_client());
        let shared = shared.into_iter().flat_map(|shared| {
            shared.limits.iter().map(|limit| (limit.clone(), shared.key(&model.name, None), 1))
        });
        model.limits.iter().filter_map(charge).chain(shared).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn an_attempt_charges_what_it_shares_with_others() {
        let config = Config::parse(
            "[limits.company]\nstrategy = 'sliding_window'\nlimit = 5\nwindow = '1m'\n\
             [llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost'\n\
             [llm.models.m]\nlimits = ['company']\nlimit_key = 'all:{model}'\n\
             [llm.models.n]\nlimits = ['company']\nlimit_key = 'all:{client}'\n",
        );
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let charges = |model: &str| {
            let line = format!(
                r#"{{"timestamp":"1970-01-01T00:00:09Z","model":"{model}","status":"left","input_tokens":3,"output_tokens":5,"attempt":1}}"#
            );
            Call::read(line.as_bytes()).expect("a call").charges(config.llm.as_ref())
        };
        assert_eq!(charges("m"), [("company".to_owned(), "all:m".to_owned(), 1)]);
        assert!(charges("n").is_empty(), "nobody knows whose call it was");
    }

    #[test]
    fn an_attempt_charges_the_limits_of_its_model_when_it_was_sent() {
        let config = Config::parse(
            "[llm.upstreams.up]\nkind = 'anthropic'\nbase_url = 'http://localhost'\n\
             [llm.models.m]\nrpm = 5\ntpm = 100\ninput_tpm = 50\nconcurrency = 2\n",
        );
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let charges = |line: &str| {
            let call = Call::read(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            (call.sent().expect("a time"), call.charges(config.llm.as_ref()))
        };
        let charge = |limit: &str, key: &str, cost| (format!("llm.m.{limit}"), key.to_owned(), cost);
        let line = r#"{"timestamp":"1970-01-01T00:00:09.5Z","model":"m","agent_id":"a","request_id":"r","input_tokens":30,"output_tokens":5,"status":"success","attempt":1,"cached_tokens":20,"group":"g","seconds":2.25}"#;
        let expected =
            vec![charge("rpm", "llm:g", 1), charge("tpm", "llm:g", 15), charge("input_tpm", "llm:g", 10)];
        assert_eq!(charges(line), (7_250_000, expected));
        let line =
            r#"{"timestamp":"1970-01-01T00:00:09Z","model":"m","status":"error","attempt":2,"reserved":40}"#;
        let expected = vec![charge("rpm", "llm:up", 1), charge("tpm", "llm:up", 40)];
        assert_eq!(charges(line), (9_000_000, expected));
        let line =
            r#"{"timestamp":"1970-01-01T00:00:09Z","model":"m","status":"rate_limited","wait_seconds":1.5}"#;
        assert!(charges(line).1.is_empty());
        let line = r#"{"timestamp":"1970-01-01T00:00:09Z","model":"other","status":"success","attempt":1}"#;
        assert!(charges(line).1.is_empty());
        for line in [
            r#"{"time":1,"limit":"api","key":"u"}"#,
            r#"{"timestamp":"x","model":"m","status":"s","limit":"api"}"#,
            r#"{"timestamp":5}"#,
            "{",
        ] {
            assert!(Call::read(line.as_bytes()).is_none(), "{line}");
        }
    }
}
