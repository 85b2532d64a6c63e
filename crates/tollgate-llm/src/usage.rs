//! The usage of a call, as a provider reports it.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::config::UpstreamKind;
use crate::count::{Encoding, LARGE, Tokenizer};
use crate::request::Api;

/// More than any call uses. A higher number is ignored.
const MOST: u64 = 1_000_000_000;

/// The tokens of a call, as its provider reports them or as they were estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All input tokens, those read from a cache included; 0 if they were not reported, because no call has none.
    pub input: u64,
    /// Of those, the tokens that were read from a cache.
    pub cached: u64,
    /// All output tokens; 0 if they were not reported, or if there are none.
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

/// What an answer of this route that was not streamed has used, and whether that is an estimate: as reported, else its texts counted with this
/// encoding and no input. `None` if it says nothing.
pub fn of_answer(api: Api, body: &[u8], encoding: Encoding) -> Option<(Usage, bool)> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
        #[serde(default)]
        choices: Value,
        #[serde(default)]
        content: Value,
        #[serde(default)]
        output: Value,
        #[serde(default)]
        input_tokens: Option<u64>,
    }
    let answer: Answer<'_> = serde_json::from_slice(body).ok()?;
    let reported = answer.usage.and_then(|usage| Usage::read(usage.get()));
    if let Some(usage) = reported.filter(|usage| usage.output > 0) {
        return Some((usage, false));
    }
    // Nothing was generated. Of any other route the same field is no report of what was.
    if api == Api::CountTokens && answer.input_tokens.is_some() {
        return Some((Usage::default(), false));
    }
    let mut output = 0_u64;
    let mut left = vec![answer.choices, answer.content, answer.output];
    let mut has_text = false;
    while let Some(value) = left.pop() {
        match value {
            Value::String(text) => {
                has_text = true;
                output = output.saturating_add(encoding.count(&text));
            }
            Value::Array(items) => left.extend(items),
            Value::Object(fields) => {
                let is_text = |name: &str| !NO_TEXT.contains(&name);
                left.extend(fields.into_iter().filter(|(name, _)| is_text(name)).map(|(_, value)| value));
            }
            _ => {}
        }
    }
    match reported {
        // Texts that were generated are some output, whatever is reported beside them.
        Some(usage) => Some((Usage { output, ..usage }, false)),
        None => has_text.then_some((Usage { output, ..Usage::default() }, true)),
    }
}

/// The same for a body that may be large: that is read, and its texts are counted, off the async threads.
pub async fn of_whole_answer(api: Api, body: Vec<u8>, encoding: Encoding) -> Option<(Usage, bool)> {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) if body.len() >= LARGE => {
            runtime.spawn_blocking(move || of_answer(api, &body, encoding)).await.ok().flatten()
        }
        _ => of_answer(api, &body, encoding),
    }
}

/// Fields of answers that describe and were not generated.
const NO_TEXT: [&str; 8] =
    ["role", "type", "id", "index", "finish_reason", "object", "stop_reason", "status"];

/// Every field in which either provider reports.
#[derive(Deserialize)]
struct Reported {
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
    fn usage(&self) -> Option<Usage> {
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
        let (input, output) = (input.unwrap_or(0), output.unwrap_or(0));
        if input == 0 && output == 0 {
            return None;
        }
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
            (r#"{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}"#, None),
            (r#"{"prompt_tokens":-4}"#, None),
            (r#"{"prompt_tokens":1e99}"#, None),
            (r#"{"prompt_tokens":18446744073709551615,"completion_tokens":1}"#, None),
            (r#"{"input_tokens":18446744073709551615,"cache_read_input_tokens":5}"#, None),
        ] {
            assert_eq!(Usage::read(json), expected, "{json}");
        }
    }

    #[test]
    fn b5_an_answer_without_usage_is_counted_by_its_texts() {
        let of = |body: &str| of_answer(Api::ChatCompletions, body.as_bytes(), Encoding::O200k);
        let counted = |output| Some((Usage { input: 0, cached: 0, output }, true));
        for (body, expected) in [
            (
                r#"{"usage":{"prompt_tokens":9,"completion_tokens":1}}"#,
                Some((Usage { input: 9, cached: 0, output: 1 }, false)),
            ),
            (
                r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"hello world"},"finish_reason":"stop"}]}"#,
                counted(2),
            ),
            (r#"{"content":[{"type":"text","text":"hello world"}],"stop_reason":"end_turn"}"#, counted(2)),
            (
                r#"{"output":[{"type":"message","id":"msg_1","content":[{"type":"output_text","text":"hello world"}]}]}"#,
                counted(2),
            ),
            (r#"{"input_tokens":7,"content":[{"type":"text","text":"hello world"}]}"#, counted(2)),
            (
                r#"{"usage":{"prompt_tokens":9,"completion_tokens":0},"choices":[{"message":{"content":"hello world"}}]}"#,
                Some((Usage { input: 9, cached: 0, output: 2 }, false)),
            ),
            (
                r#"{"usage":{"prompt_tokens":9,"total_tokens":9},"data":[{"embedding":[0.5]}]}"#,
                Some((Usage { input: 9, cached: 0, output: 0 }, false)),
            ),
            (
                r#"{"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0},"choices":[{"message":{"content":"hello world"}}]}"#,
                counted(2),
            ),
            (r#"{"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}"#, None),
            (r#"{"input_tokens":7}"#, None),
            (r#"{"usage":null}"#, None),
            ("not json", None),
        ] {
            assert_eq!(of(body), expected, "{body}");
        }
        let counting = of_answer(Api::CountTokens, br#"{"input_tokens":7}"#, Encoding::O200k);
        assert_eq!(counting, Some((Usage::default(), false)), "counting generates nothing");
    }

    #[test]
    fn only_anthropic_exempts_what_a_cache_had() {
        let usage = Usage { input: 100, cached: 80, output: 1 };
        assert_eq!(usage.charged_input(UpstreamKind::OpenAi, false), 100);
        assert_eq!(usage.charged_input(UpstreamKind::Anthropic, false), 20);
        assert_eq!(usage.charged_input(UpstreamKind::Anthropic, true), 100);
    }
}
