//! What a provider says that a call has used.

use crate::config::UpstreamKind;
use serde::Deserialize;

/// More than any call uses. What claims more is not believed.
const MOST: u64 = 1_000_000_000;

/// The tokens of a call, as its provider reports them or as they were estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All input tokens, those read from a cache included.
    pub input: u64,
    /// Of those, the tokens that were read from a cache.
    pub cached: u64,
    /// All output tokens.
    pub output: u64,
}

impl Usage {
    /// From the `usage` of an answer, of either provider and any route; `None` where it says nothing, or nothing credible.
    ///
    /// ```
    /// use tollgate_llm::Usage;
    /// let openai = Usage::read(r#"{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21}"#).unwrap();
    /// assert_eq!((openai.input, openai.output), (9, 12));
    /// let anthropic = r#"{"input_tokens":3,"cache_read_input_tokens":90,"cache_creation_input_tokens":7,"output_tokens":5}"#;
    /// let anthropic = Usage::read(anthropic).unwrap();
    /// assert_eq!((anthropic.input, anthropic.cached, anthropic.output), (100, 90, 5));
    /// ```
    pub fn read(json: &str) -> Option<Usage> {
        serde_json::from_str::<Reported>(json).ok()?.usage()
    }

    /// Input and output together.
    pub fn total(&self) -> u64 {
        self.input.saturating_add(self.output)
    }

    /// The input tokens that count against a limit of this kind of upstream.
    pub fn charged_input(&self, kind: UpstreamKind, count_cache_reads: bool) -> u64 {
        match kind {
            UpstreamKind::Anthropic if !count_cache_reads => self.input.saturating_sub(self.cached),
            _ => self.input,
        }
    }
}

/// Every field in which either provider reports.
#[derive(Deserialize)]
pub(crate) struct Reported {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    total_tokens: Option<u64>,
    #[serde(default)]
    input_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
    #[serde(default)]
    cache_read_input_tokens: Option<u64>,
    #[serde(default)]
    cache_creation_input_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
    #[serde(default)]
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Reported {
    pub(crate) fn usage(&self) -> Option<Usage> {
        let details = self.prompt_tokens_details.as_ref().or(self.input_tokens_details.as_ref());
        let of_details = details.and_then(|details| details.cached_tokens);
        // Anthropic's input leaves out what a cache had to do with; OpenAI's has it in.
        let read = self.cache_read_input_tokens.unwrap_or(0);
        let beside = read.checked_add(self.cache_creation_input_tokens.unwrap_or(0))?;
        let output = self.output_tokens.or(self.completion_tokens);
        let input = match self.input_tokens.or(self.prompt_tokens) {
            Some(input) => Some(input.checked_add(beside)?),
            None => self.total_tokens.map(|total| total.saturating_sub(output.unwrap_or(0))),
        };
        if input.is_none() && output.is_none() {
            return None;
        }
        let (input, output) = (input.unwrap_or(0), output.unwrap_or(0));
        let cached = of_details.unwrap_or(read).min(input);
        (input <= MOST && output <= MOST).then_some(Usage { input, cached, output })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_of_usage_is_read() {
        let usage = |input, cached, output| Some(Usage { input, cached, output });
        for (json, expected) in [
            (
                r#"{"prompt_tokens":9,"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":4}}"#,
                usage(9, 4, 12),
            ),
            (
                r#"{"input_tokens":9,"output_tokens":1,"input_tokens_details":{"cached_tokens":4}}"#,
                usage(9, 4, 1),
            ),
            (r#"{"prompt_tokens":8,"total_tokens":8}"#, usage(8, 0, 0)),
            (r#"{"total_tokens":30,"completion_tokens":10}"#, usage(20, 0, 10)),
            (r#"{"output_tokens":3}"#, usage(0, 0, 3)),
            (
                r#"{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":99}}"#,
                usage(5, 5, 1),
            ),
            ("{}", None),
            ("null", None),
            (r#"{"prompt_tokens":-4}"#, None),
            (r#"{"prompt_tokens":1e99}"#, None),
            (r#"{"prompt_tokens":18446744073709551615,"completion_tokens":1}"#, None),
            (r#"{"input_tokens":18446744073709551615,"cache_read_input_tokens":5}"#, None),
        ] {
            assert_eq!(Usage::read(json), expected, "{json}");
        }
    }

    #[test]
    fn only_anthropic_exempts_what_a_cache_had() {
        let usage = Usage { input: 100, cached: 80, output: 1 };
        assert_eq!(usage.charged_input(UpstreamKind::OpenAi, false), 100);
        assert_eq!(usage.charged_input(UpstreamKind::Anthropic, false), 20);
        assert_eq!(usage.charged_input(UpstreamKind::Anthropic, true), 100);
    }
}
