//! Which route of OpenAI's a body is for, by its form: for callers that have a body and no route.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Api;

/// The fields that tell bodies apart.
#[derive(Default, Deserialize)]
struct Form<'a> {
    #[serde(borrow, default)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    previous_response_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    dimensions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    encoding_format: Option<&'a RawValue>,
}

impl Api {
    /// The route of OpenAI's that takes a body of this form. `messages` is of chat completions, `input` of embeddings or responses: of embeddings if it is a
    /// list of texts or tokens, if there is a field that only embeddings have, or if the model is called so. A body of none of these
    /// forms is read as one of chat completions, which says what is missing.
    ///
    /// ```
    /// use tollgate_llm::Api;
    /// assert_eq!(Api::of_body(br#"{"model":"gpt-4o","messages":[]}"#), Api::ChatCompletions);
    /// assert_eq!(Api::of_body(br#"{"model":"gpt-4o","input":"hi"}"#), Api::Responses);
    /// assert_eq!(Api::of_body(br#"{"model":"text-embedding-3-small","input":"hi"}"#), Api::Embeddings);
    /// ```
    pub fn of_body(body: &[u8]) -> Api {
        let form: Form<'_> = serde_json::from_slice(body).unwrap_or_default();
        if form.messages.is_some() {
            return Api::ChatCompletions;
        }
        let Some(input) = form.input else {
            let is_response = form.instructions.is_some() || form.previous_response_id.is_some();
            return if is_response { Api::Responses } else { Api::ChatCompletions };
        };
        // Items of responses are objects.
        let of_list = input.get().strip_prefix('[').and_then(|items| items.trim_start().bytes().next());
        let is_embedding = match of_list {
            Some(first) => matches!(first, b'"' | b'[' | b'0'..=b'9'),
            None => {
                form.dimensions.is_some()
                    || form.encoding_format.is_some()
                    || form.model.is_some_and(|model| model.to_ascii_lowercase().contains("embed"))
            }
        };
        if is_embedding { Api::Embeddings } else { Api::Responses }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_distinguished_by_their_form() {
        for (body, expected) in [
            (r#"{"messages":[{"role":"user","content":"hi"}]}"#, Api::ChatCompletions),
            (r#"{"messages":[],"input":"hi"}"#, Api::ChatCompletions),
            (r#"{"model":"gpt-4o","input":"hi","max_output_tokens":5}"#, Api::Responses),
            (r#"{"model":"gpt-4o","input":[ {"role":"user","content":"hi"}]}"#, Api::Responses),
            (r#"{"model":"gpt-4o","input":[]}"#, Api::Responses),
            (r#"{"model":"gpt-4o","instructions":"x"}"#, Api::Responses),
            (r#"{"model":"gpt-4o","previous_response_id":"resp_1"}"#, Api::Responses),
            (r#"{"model":"mine","input":["a","b"]}"#, Api::Embeddings),
            (r#"{"model":"mine","input":[ 12, 13]}"#, Api::Embeddings),
            (r#"{"model":"mine","input":[[12],[13]]}"#, Api::Embeddings),
            (r#"{"model":"mine","input":"hi","dimensions":256}"#, Api::Embeddings),
            (r#"{"model":"mine","input":"hi","encoding_format":"float"}"#, Api::Embeddings),
            (r#"{"model":"Nomic-Embed","input":"hi"}"#, Api::Embeddings),
            (r#"{"model":"mine","input":"hi"}"#, Api::Responses),
            (r#"{"model":"gpt-4o"}"#, Api::ChatCompletions),
            ("{", Api::ChatCompletions),
        ] {
            assert_eq!(Api::of_body(body.as_bytes()), expected, "{body}");
        }
    }
}
