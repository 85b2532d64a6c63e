//! What of a request counts, and how much: texts by the encoding, all else by stated flat numbers.
//!
//! | part | tokens |
//! |---|---|
//! | a message | 3, its role, its content, its tool calls; 1 more with a name |
//! | the answer's beginning | 3 a request |
//! | tools, functions, a response format | the JSON that is sent |
//! | an image, a screenshot, a generated image that is sent back | 85 with `detail: low`, else 765; 1,600 for Anthropic |
//! | audio | 1,000 |
//! | a file or document | 3,000; its text where it is one |
//!
//! Parts of kinds that are not known count as the JSON that is sent.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::cache::Cache;
use super::{Encoding, Tokenizer};
use crate::request::{Api, ModelRequest};

const OF_A_MESSAGE: u64 = 3;
const OF_A_NAME: u64 = 1;
const OF_THE_ANSWER: u64 = 3;
const OF_AUDIO: u64 = 1_000;
const OF_A_FILE: u64 = 3_000;
const OF_A_SMALL_IMAGE: u64 = 85;
const OF_AN_IMAGE: u64 = 765;
const OF_AN_ANTHROPIC_IMAGE: u64 = 1_600;

/// How deep parts may stand in parts, as tool results do.
const DEEPEST: usize = 8;

pub(super) struct Content<'a> {
    pub(super) encoding: Encoding,
    pub(super) api: Api,
    pub(super) cache: &'a Cache,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    role: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
    /// Of the items of the Responses API that are no messages: what a tool has answered, and an image that was generated before.
    #[serde(borrow, default)]
    output: Option<&'a RawValue>,
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    image_url: Option<&'a RawValue>,
    #[serde(borrow, default)]
    detail: Option<&'a RawValue>,
    #[serde(borrow, default)]
    source: Option<&'a RawValue>,
}

/// Where a document comes from. That of a text has it in `data`, and one that is made of parts has them in `content`.
#[derive(Deserialize)]
struct Source<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

impl Content<'_> {
    pub(super) fn count(&self, request: &ModelRequest<'_>) -> u64 {
        let mut total = 0_u64;
        let mut add = |tokens: u64| total = total.saturating_add(tokens);
        for message in request.messages() {
            add(self.cached(message, || self.message(message)));
        }
        for text in request.texts() {
            add(self.cached(text, || self.content(text, 0)));
        }
        for json in request.schemas() {
            add(self.cached(json, || self.encoding.count(json.get())));
        }
        if self.api != Api::Embeddings {
            add(OF_THE_ANSWER);
        }
        total
    }

    fn cached(&self, json: &RawValue, count: impl FnOnce() -> u64) -> u64 {
        self.cache.count(json.get(), self.encoding, count)
    }

    fn message(&self, json: &RawValue) -> u64 {
        let is_object = json.get().starts_with('{');
        let message = serde_json::from_str::<Message<'_>>(json.get()).ok().filter(|_| is_object);
        let Some(message) = message else {
            // An item that is no object, or not of this shape.
            return OF_A_MESSAGE.saturating_add(self.content(json, 0));
        };
        let mut total = OF_A_MESSAGE;
        for (text, extra) in [(message.role, 0), (message.refusal, 0), (message.name, OF_A_NAME)] {
            if let Some(text) = text {
                total = total.saturating_add(extra).saturating_add(self.text(text));
            }
        }
        if let Some(content) = message.content {
            total = total.saturating_add(self.content(content, 0));
        }
        for calls in [message.tool_calls, message.function_call].into_iter().flatten() {
            total = total.saturating_add(self.encoding.count(calls.get()));
        }
        if message.role.is_none() && message.content.is_none() {
            total = total.saturating_add(self.item(&message, json));
        }
        total
    }

    /// An item of the Responses API that is no message: what is sent, but for images in it.
    fn item(&self, item: &Message<'_>, json: &RawValue) -> u64 {
        let kind = item.kind.map(|kind| kind.get().trim_matches('"')).unwrap_or_default();
        match (item.output, item.result) {
            (_, Some(_)) if kind == "image_generation_call" => OF_AN_IMAGE,
            // Texts, images and files, or a screenshot. An output that is a text is counted with its item.
            (Some(output), _) if output.get().starts_with(['[', '{']) => self.content(output, 0),
            _ => self.encoding.count(json.get()),
        }
    }

    /// A text, or a list of parts; null is nothing.
    fn content(&self, json: &RawValue, depth: usize) -> u64 {
        match json.get().as_bytes().first() {
            Some(b'[') if depth < DEEPEST => match serde_json::from_str::<Vec<&RawValue>>(json.get()) {
                Ok(parts) => {
                    parts.iter().fold(0, |sum: u64, part| sum.saturating_add(self.part(part, depth)))
                }
                Err(_) => self.encoding.count(json.get()),
            },
            Some(b'{') => self.part(json, depth),
            Some(b'n') => 0,
            _ => self.text(json),
        }
    }

    fn part(&self, json: &RawValue, depth: usize) -> u64 {
        let part = match json.get().as_bytes().first() {
            Some(b'{') => serde_json::from_str::<Part<'_>>(json.get()).ok(),
            // A list of tokens, or of texts, as embeddings take.
            Some(b'[') => {
                let numbers = serde_json::from_str::<Vec<u64>>(json.get());
                return numbers.map_or_else(|_| self.text(json), |tokens| tokens.len() as u64);
            }
            Some(b'0'..=b'9') => return 1,
            _ => return self.text(json),
        };
        let Some(part) = part else { return self.encoding.count(json.get()) };
        let kind = part.kind.map(|kind| kind.get().trim_matches('"')).unwrap_or_default();
        let is_small = |json: Option<&RawValue>| json.is_some_and(|json| json.get().contains("\"low\""));
        match (kind, part.text.or(part.thinking), part.content) {
            ("image_url" | "input_image" | "computer_screenshot", ..)
                if is_small(part.image_url) || is_small(part.detail) =>
            {
                OF_A_SMALL_IMAGE
            }
            ("image_url" | "input_image" | "computer_screenshot", ..) => OF_AN_IMAGE,
            ("image", ..) => OF_AN_ANTHROPIC_IMAGE,
            ("input_audio" | "audio", ..) => OF_AUDIO,
            ("document", ..) => part.source.map_or(OF_A_FILE, |source| self.document(source, depth)),
            ("file" | "input_file", ..) => OF_A_FILE,
            (_, Some(text), _) => self.text(text),
            (_, None, Some(content)) => OF_A_MESSAGE.saturating_add(self.content(content, depth + 1)),
            (_, None, None) => self.encoding.count(json.get()),
        }
    }

    /// A document of Anthropic's: a text as such, its parts, or a file of which nothing is known.
    fn document(&self, source: &RawValue, depth: usize) -> u64 {
        let Ok(source) = serde_json::from_str::<Source<'_>>(source.get()) else { return OF_A_FILE };
        let kind = source.kind.map(|kind| kind.get().trim_matches('"')).unwrap_or_default();
        match (kind, source.data, source.content) {
            ("text", Some(text), _) => OF_A_MESSAGE.saturating_add(self.text(text)),
            ("content", _, Some(content)) => OF_A_MESSAGE.saturating_add(self.content(content, depth + 1)),
            _ => OF_A_FILE,
        }
    }

    /// A JSON string as its text, anything else as it is written.
    fn text(&self, json: &RawValue) -> u64 {
        match serde_json::from_str::<std::borrow::Cow<'_, str>>(json.get()) {
            Ok(text) => self.encoding.count(&text),
            Err(_) => self.encoding.count(json.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Counter;
    use super::*;

    fn count(api: Api, body: &str) -> u64 {
        let request =
            ModelRequest::read(api, body.as_bytes()).unwrap_or_else(|error| panic!("{body}: {error}"));
        Counter::default().count(&request).tokens
    }

    /// The oracle counts messages of texts and names.
    #[test]
    fn plain_messages_count_as_the_oracle_counts_them() {
        let messages =
            [("system", "You are terse.", None), ("user", "Привет, мир! 你好 <b>&amp;</b>", Some("ann"))];
        let mut json = Vec::new();
        let mut oracle = Vec::new();
        for (role, content, name) in messages {
            let mut message = serde_json::json!({ "role": role, "content": content });
            if let Some(name) = name {
                message["name"] = name.into();
            }
            json.push(message);
            oracle.push(tiktoken_rs::ChatCompletionRequestMessage {
                role: role.to_owned(),
                content: Some(content.to_owned()),
                name: name.map(str::to_owned),
                ..Default::default()
            });
        }
        for model in ["gpt-4o", "gpt-4"] {
            let body = serde_json::json!({ "model": model, "messages": json }).to_string();
            let expected = tiktoken_rs::num_tokens_from_messages(model, &oracle).expect("a known model");
            assert_eq!(count(Api::ChatCompletions, &body), expected as u64, "{model}");
        }
    }

    #[test]
    fn every_kind_of_content_counts() {
        let chat = |content: &str| {
            let body = format!(r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":{content}}}]}}"#);
            count(Api::ChatCompletions, &body)
        };
        let nothing = chat("null");
        assert_eq!(nothing, 3 + 1 + 3);
        for (content, more) in [
            (r#""hello world""#, 2),
            (r#"[{"type":"text","text":"hello world"}]"#, 2),
            (r#"[]"#, 0),
            (r#"[{"type":"image_url","image_url":{"url":"data:…"}}]"#, 765),
            (r#"[{"type":"image_url","image_url":{"url":"data:…","detail":"low"}}]"#, 85),
            (r#"[{"type":"input_audio","input_audio":{"data":"…"}}]"#, 1_000),
            (r#"[{"type":"file","file":{}}]"#, 3_000),
            (
                r#"[{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"…"}}]"#,
                3_000,
            ),
            (
                r#"[{"type":"document","source":{"type":"text","media_type":"text/plain","data":"hello world"}}]"#,
                5,
            ),
            (r#"[{"type":"document","source":{"type":"content","content":"hello world"}}]"#, 5),
            (
                r#"[{"type":"document","source":{"type":"content","content":[{"type":"text","text":"hello world"},{"type":"image"}]}}]"#,
                3 + 2 + 1_600,
            ),
            (r#"[{"type":"tool_result","content":[{"type":"text","text":"hello world"}]}]"#, 5),
        ] {
            assert_eq!(chat(content) - nothing, more, "{content}");
        }
        let items = |items: &str| {
            count(Api::Responses, &format!(r#"{{"model":"gpt-4o","input":[{items}]}}"#)) - OF_THE_ANSWER
        };
        let image = "A".repeat(200_000);
        for (item, expected) in [
            (
                format!(
                    r#"{{"type":"function_call_output","call_id":"c","output":[{{"type":"input_image","image_url":"data:image/png;base64,{image}"}},{{"type":"input_text","text":"hello world"}}]}}"#
                ),
                3 + 765 + 2,
            ),
            (
                format!(
                    r#"{{"type":"computer_call_output","call_id":"c","output":{{"type":"computer_screenshot","image_url":"data:image/png;base64,{image}"}}}}"#
                ),
                3 + 765,
            ),
            (
                format!(
                    r#"{{"type":"image_generation_call","id":"i","status":"completed","result":"{image}"}}"#
                ),
                3 + 765,
            ),
        ] {
            assert_eq!(items(&item), expected, "{}", &item[..60]);
        }
        let text = r#"{"type":"function_call_output","call_id":"c","output":"hello world"}"#;
        assert_eq!(items(text), 3 + Encoding::O200k.count(text), "a text is what is sent");
        // What is nested without end is counted as it is written, and ends.
        let deep =
            format!("{}{}", r#"[{"type":"x","content":"#.repeat(60), "1".to_owned() + &"}]".repeat(60));
        assert!(chat(&deep) > 0);
    }

    #[test]
    fn tools_count_as_the_json_that_is_sent() {
        let tools = r#"[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]"#;
        let body = |tools: &str| format!(r#"{{"model":"gpt-4o","messages":[],"tools":{tools}}}"#);
        let expected = Encoding::O200k.count(tools);
        assert_eq!(
            count(Api::ChatCompletions, &body(tools)) - count(Api::ChatCompletions, &body("null")),
            expected
        );
    }

    #[test]
    fn other_routes_count_their_own_fields() {
        assert_eq!(count(Api::Embeddings, r#"{"model":"text-embedding-3-small","input":"hello world"}"#), 2);
        assert_eq!(
            count(Api::Embeddings, r#"{"model":"text-embedding-3-small","input":["hello world","hello"]}"#),
            3
        );
        assert_eq!(count(Api::Embeddings, r#"{"model":"text-embedding-3-small","input":[1,2,3]}"#), 3);
        assert_eq!(count(Api::Embeddings, r#"{"model":"text-embedding-3-small","input":[[1,2,3],[4]]}"#), 4);
        let anthropic = |rest: &str| {
            format!(
                r#"{{"model":"claude-x","max_tokens":5,"messages":[{{"role":"user","content":"hello world"}}]{rest}}}"#
            )
        };
        let plain = count(Api::Messages, &anthropic(""));
        assert_eq!(count(Api::Messages, &anthropic(r#","system":"hello world""#)), plain + 2);
        assert_eq!(
            count(Api::Messages, &anthropic(r#","system":[{"type":"text","text":"hello world"}]"#)),
            plain + 2
        );
    }
}
