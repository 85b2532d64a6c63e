//! A request to a model, read as far as limits need it and otherwise left as it was sent.
//!
//! The body is borrowed, and its parts stay raw JSON: a large body costs no tree of values, and the one rewrite there is (usage of a
//! stream, [`ModelRequest::body`]) changes no other byte. What is wrong with a request is said in a sentence that the caller can act on.

mod form;

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde_json::value::RawValue;

/// From how many bytes of text on counting leaves the async thread: some milliseconds of work.
pub const LARGE: usize = 64 * 1024;

/// The most output tokens that a request may ask for. More is a slip, and no provider grants it.
const MOST_OUTPUT: u64 = 100_000_000;

/// The most answers that a request may ask for.
const MOST_ANSWERS: u64 = 128;

/// A route of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI's `/v1/chat/completions`.
    ChatCompletions,
    /// OpenAI's `/v1/responses`.
    Responses,
    /// OpenAI's `/v1/embeddings`.
    Embeddings,
    /// Anthropic's `/v1/messages`.
    Messages,
    /// Anthropic's `/v1/messages/count_tokens`.
    CountTokens,
}

impl Api {
    /// All of them.
    pub const ALL: [Api; 5] =
        [Api::ChatCompletions, Api::Responses, Api::Embeddings, Api::Messages, Api::CountTokens];

    /// Its path, as callers have it.
    pub const fn path(self) -> &'static str {
        match self {
            Api::ChatCompletions => "/v1/chat/completions",
            Api::Responses => "/v1/responses",
            Api::Embeddings => "/v1/embeddings",
            Api::Messages => "/v1/messages",
            Api::CountTokens => "/v1/messages/count_tokens",
        }
    }

    /// The route of this path.
    pub fn at(path: &str) -> Option<Api> {
        Api::ALL.into_iter().find(|api| api.path() == path)
    }

    /// Whether it is Anthropic's.
    pub const fn is_anthropic(self) -> bool {
        matches!(self, Api::Messages | Api::CountTokens)
    }

    /// Whether calls of it have an answer that is generated.
    pub const fn generates(self) -> bool {
        !matches!(self, Api::Embeddings | Api::CountTokens)
    }
}

/// Why a request cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    message: String,
    field: Option<&'static str>,
}

impl RequestError {
    fn of(field: &'static str, message: impl Into<String>) -> RequestError {
        RequestError { message: message.into(), field: Some(field) }
    }

    /// The field that is wrong, if it is one.
    pub fn field(&self) -> Option<&'static str> {
        self.field
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RequestError {}

/// The fields that limits look at.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    system: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    functions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    response_format: Option<&'a RawValue>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    n: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    /// Also where it is null, so that the null can be replaced.
    #[serde(borrow, default, deserialize_with = "present")]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, default)]
    metadata: Option<&'a RawValue>,
    #[serde(borrow, default)]
    safety_identifier: Option<&'a RawValue>,
    #[serde(borrow, default)]
    user: Option<&'a RawValue>,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// A request to a model.
pub struct ModelRequest<'a> {
    api: Api,
    body: &'a [u8],
    fields: Fields<'a>,
    messages: Vec<&'a RawValue>,
    cap: Option<u64>,
    answers: u64,
    is_stream: bool,
    wants_usage: bool,
}

/// A body to send.
#[derive(Debug, PartialEq, Eq)]
pub enum Body {
    /// As the caller sent it.
    AsSent,
    /// With usage asked for at the end of the stream, which the caller has not asked for and must not see.
    AskingForUsage(Vec<u8>),
}

impl<'a> ModelRequest<'a> {
    /// Reads a body.
    pub fn read(api: Api, body: &'a [u8]) -> Result<ModelRequest<'a>, RequestError> {
        // Derived readers would take a list for an object.
        if !body.trim_ascii_start().starts_with(b"{") {
            let message = "the body is not a JSON object".to_owned();
            return Err(RequestError { message, field: None });
        }
        let fields: Fields<'a> = serde_json::from_slice(body).map_err(|error| RequestError {
            message: format!("the body is not a JSON object of this route: {error}"),
            field: None,
        })?;
        if fields.model.as_ref().is_none_or(|model| model.is_empty()) {
            return Err(RequestError::of("model", "you must provide a model parameter"));
        }
        if fields.model.as_ref().is_some_and(|model| model.len() > 256 || model.chars().any(char::is_control))
        {
            return Err(RequestError::of(
                "model",
                "a model's name has at most 256 characters, none of them control characters",
            ));
        }
        let messages = match api {
            Api::ChatCompletions | Api::Messages | Api::CountTokens => list("messages", fields.messages)?,
            Api::Responses => match fields.input {
                Some(input) if input.get().starts_with('[') => list("input", fields.input)?,
                _ => Vec::new(),
            },
            Api::Embeddings => match fields.input {
                Some(_) => Vec::new(),
                None => return Err(RequestError::of("input", "input is missing")),
            },
        };
        let mut cap = None;
        for (name, json) in [
            ("max_tokens", fields.max_tokens),
            ("max_completion_tokens", fields.max_completion_tokens),
            ("max_output_tokens", fields.max_output_tokens),
        ] {
            cap = cap.max(json.map(|json| whole(name, json, MOST_OUTPUT)).transpose()?);
        }
        let answers = fields.n.map(|json| whole("n", json, MOST_ANSWERS)).transpose()?.unwrap_or(1);
        let is_stream = match fields.stream.map(RawValue::get) {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err(RequestError::of("stream", "stream must be true or false")),
        };
        let wants_usage = fields.stream_options.and_then(|json| {
            #[derive(Deserialize)]
            struct Options {
                #[serde(default)]
                include_usage: Option<bool>,
            }
            serde_json::from_str::<Options>(json.get()).ok()?.include_usage
        });
        let wants_usage = wants_usage == Some(true);
        Ok(ModelRequest { api, body, fields, messages, cap, answers, is_stream, wants_usage })
    }

    /// The route.
    pub fn api(&self) -> Api {
        self.api
    }

    /// The model that is asked.
    pub fn model(&self) -> &str {
        self.fields.model.as_deref().unwrap_or_default()
    }

    /// The most output tokens that it asks for: the largest of its caps, for each of its answers.
    pub fn cap(&self) -> Option<u64> {
        self.cap.map(|cap| cap.saturating_mul(self.answers))
    }

    /// How many answers it asks for.
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// Whether the answer is to be streamed.
    pub fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Whether it is so large that it should be counted off the async threads.
    pub fn is_large(&self) -> bool {
        self.body.len() >= LARGE
    }

    /// Who is behind the call, as the body says.
    pub fn agent(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Metadata<'a> {
            #[serde(borrow, default)]
            user_id: Option<Cow<'a, str>>,
        }
        let of_metadata = |json: &RawValue| {
            let metadata = serde_json::from_str::<Metadata<'_>>(json.get()).ok()?;
            metadata.user_id.map(Cow::into_owned)
        };
        let text = |json: &RawValue| serde_json::from_str::<String>(json.get()).ok();
        let found = self.fields.metadata.and_then(of_metadata);
        let found = found.or_else(|| self.fields.safety_identifier.and_then(text));
        found.or_else(|| self.fields.user.and_then(text)).filter(|agent| !agent.is_empty())
    }

    /// The body as it should be sent. OpenAI reports the usage of a stream only where it is asked to.
    pub fn body(&self) -> Body {
        if self.api != Api::ChatCompletions || !self.is_stream || self.wants_usage {
            return Body::AsSent;
        }
        let asked = |fields: &str| format!("{{\"include_usage\":true{fields}}}").into_bytes();
        let (range, new) = match self.fields.stream_options {
            Some(options) => {
                let kept = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(options.get());
                let mut kept = kept.unwrap_or_default();
                kept.remove("include_usage");
                let kept: String = kept
                    .iter()
                    .map(|(name, value)| format!(",{}:{value}", serde_json::Value::from(name.as_str())))
                    .collect();
                let start = options.get().as_ptr() as usize - self.body.as_ptr() as usize;
                (start..start + options.get().len(), asked(&kept))
            }
            None => {
                // Right behind the brace: there is a `model`, so a comma follows.
                let start = self.body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
                let new = [b"\"stream_options\":".to_vec(), asked(""), b",".to_vec()].concat();
                (start..start, new)
            }
        };
        let body = [&self.body[..range.start], &new, &self.body[range.end..]].concat();
        Body::AskingForUsage(body)
    }

    /// The whole body, as it was sent.
    pub fn bytes(&self) -> &'a [u8] {
        self.body
    }

    /// The messages, each as it was sent.
    pub(crate) fn messages(&self) -> &[&'a RawValue] {
        &self.messages
    }

    /// Texts besides messages.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &'a RawValue> + '_ {
        let input = self.fields.input.filter(|_| self.messages.is_empty());
        [self.fields.system, self.fields.instructions, input].into_iter().flatten()
    }

    /// What counts as the JSON that is sent.
    pub(crate) fn schemas(&self) -> impl Iterator<Item = &'a RawValue> + '_ {
        let format = self.fields.text.filter(|_| self.api == Api::Responses);
        [self.fields.tools, self.fields.functions, self.fields.response_format, format].into_iter().flatten()
    }
}

/// A name that a caller made up, as messages may show it.
pub(crate) fn shown(name: &str) -> &str {
    let end = name.char_indices().nth(64).map_or(name.len(), |(at, _)| at);
    &name[..end]
}

fn list<'a>(name: &'static str, json: Option<&'a RawValue>) -> Result<Vec<&'a RawValue>, RequestError> {
    let Some(json) = json else {
        return Err(RequestError::of(name, format!("{name} is missing")));
    };
    serde_json::from_str(json.get()).map_err(|_| RequestError::of(name, format!("{name} must be a list")))
}

fn whole(name: &'static str, json: &RawValue, most: u64) -> Result<u64, RequestError> {
    match json.get().parse::<u64>() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(RequestError::of(name, format!("{name} must be a whole number from 1 to {most}"))),
    }
}

impl fmt::Debug for ModelRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut request = f.debug_struct("ModelRequest");
        request.field("api", &self.api).field("model", &self.model()).field("cap", &self.cap());
        request.field("is_stream", &self.is_stream).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<ModelRequest<'_>, RequestError> {
        ModelRequest::read(Api::ChatCompletions, body.as_bytes())
    }

    fn field(body: &str) -> Option<&'static str> {
        read(body).err().unwrap_or_else(|| panic!("{body} was accepted")).field()
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, expected) in [
            ("", None),
            ("[]", None),
            ("{", None),
            (r#"{"messages":[]}"#, Some("model")),
            (r#"{"model":"","messages":[]}"#, Some("model")),
            (r#"{"model":"m"}"#, Some("messages")),
            (r#"{"model":"m","messages":null}"#, Some("messages")),
            (r#"{"model":"m","messages":"x"}"#, Some("messages")),
            (r#"{"model":"m","messages":[],"max_tokens":-1}"#, Some("max_tokens")),
            (r#"{"model":"m","messages":[],"max_tokens":1.5}"#, Some("max_tokens")),
            (r#"{"model":"m","messages":[],"max_tokens":0}"#, Some("max_tokens")),
            (r#"{"model":"m","messages":[],"max_tokens":1e30}"#, Some("max_tokens")),
            (r#"{"model":"m","messages":[],"max_completion_tokens":"x"}"#, Some("max_completion_tokens")),
            (r#"{"model":"m","messages":[],"n":0}"#, Some("n")),
            (r#"{"model":"m","messages":[],"stream":"yes"}"#, Some("stream")),
        ] {
            assert_eq!(field(body), expected, "{body}");
        }
    }

    #[test]
    fn b6_the_largest_cap_counts_for_every_answer() {
        for (fields, expected) in [
            ("", None),
            (r#","max_tokens":null"#, None),
            (r#","max_tokens":1,"max_completion_tokens":10000"#, Some(10_000)),
            (r#","max_tokens":100,"n":5"#, Some(500)),
            (r#","max_output_tokens":77"#, Some(77)),
        ] {
            let body = format!(r#"{{"model":"m","messages":[]{fields}}}"#);
            assert_eq!(read(&body).unwrap().cap(), expected, "{fields}");
        }
    }

    #[test]
    fn c1_usage_is_asked_for_and_no_other_byte_changes() {
        let body = |text: &str| match read(text).unwrap().body() {
            Body::AsSent => None,
            Body::AskingForUsage(body) => Some(String::from_utf8(body).unwrap()),
        };
        assert_eq!(body(r#"{"model":"m","messages":[]}"#), None);
        assert_eq!(
            body(r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#),
            None
        );
        assert_eq!(
            body("{ \"model\":\"m\", \"x\" : 1.0e5, \"messages\":[],\"stream\":true}").unwrap(),
            "{\"stream_options\":{\"include_usage\":true}, \"model\":\"m\", \"x\" : 1.0e5, \"messages\":[],\"stream\":true}"
        );
        assert_eq!(
            body(r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":false,"a":"é"},"z":0}"#).unwrap(),
            r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true,"a":"é"},"z":0}"#
        );
        assert_eq!(
            body(r#"{"model":"m","messages":[],"stream":true,"stream_options":null}"#).unwrap(),
            r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#
        );
    }

    #[test]
    fn who_is_behind_a_call() {
        for (fields, expected) in [
            (r#""metadata":{"user_id":"a"},"user":"b""#, Some("a")),
            (r#""safety_identifier":"s","user":"b""#, Some("s")),
            (r#""user":"b""#, Some("b")),
            (r#""user":5"#, None),
            (r#""user":"""#, None),
        ] {
            let body = format!(r#"{{"model":"m","messages":[],{fields}}}"#);
            assert_eq!(read(&body).unwrap().agent().as_deref(), expected, "{fields}");
        }
    }
}
