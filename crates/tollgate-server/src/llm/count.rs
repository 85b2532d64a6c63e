//! `tollgate llm count`: the tokens of a text or of a request, counted as the gateway counts them.

use std::io::{self, Write};

use serde_json::{Value, json};
use tollgate_llm::count::{Counter, Encoding, Tokenizer, encoding_of, first_estimate};
use tollgate_llm::{Api, ModelRequest};

use crate::cli::LlmCountArgs;
use crate::failure::Failure;
use crate::source;

/// Counts, and prints the count.
pub(super) fn run(args: &LlmCountArgs) -> Result<(), Failure> {
    let text = source::read_text(&args.file)?;
    let found = encoding_of(&args.model);
    let encoding = found.unwrap_or(Encoding::O200k);
    let (tokens, kind) = match request(&text, &args.model) {
        Some(body) => {
            let api = if found.is_some() { Api::ChatCompletions } else { Api::Messages };
            let request =
                ModelRequest::read(api, body.as_bytes()).map_err(|error| Failure::new(error.to_string()))?;
            (Counter::default().count(&request).tokens, "request")
        }
        None => (encoding.count(&text), "text"),
    };
    let is_exact = found.is_some();
    let (counted, tokens) = (tokens, if is_exact { tokens } else { first_estimate(tokens) });
    let report = match args.json {
        true => json!({
            "model": args.model, "tokens": tokens, "encoding": encoding.name(), "exact": is_exact, "counted": kind,
            "counted_tokens": counted,
        })
        .to_string(),
        false if is_exact => format!("{tokens} tokens ({}, {kind})", encoding.name()),
        false => format!(
            "about {tokens} tokens ({counted} by {}, {kind}, times 1.2): the vocabulary of {} is not public, so this is what the gateway \
             estimates before it has learned from reported usage",
            encoding.name(),
            args.model
        ),
    };
    writeln!(io::stdout().lock(), "{report}").map_err(Failure::answering)
}

/// A file with one request to this model.
fn request(text: &str, model: &str) -> Option<String> {
    let mut body: serde_json::Map<String, Value> = serde_json::from_str(text).ok()?;
    body.get("messages")?;
    body.insert("model".to_owned(), model.into());
    Some(Value::Object(body).to_string())
}
