//! The requests: read and checked before the first one is sent.
//!
//! Only the place of each request in the file and its `custom_id` are kept; the request itself is read when it is its turn. So a file may be
//! larger than memory, and must not change while it is read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use tollgate_llm::executor::ModelCall;
use tollgate_llm::{Api, ModelRequest};

use crate::failure::Failure;
use crate::source;

/// The longest line: what one request may have.
const MOST_BYTES: usize = 32 * 1024 * 1024;

/// How many mistakes are named.
const MOST_MISTAKES: usize = 20;

/// The routes that a request may name.
const ROUTES: [Api; 4] = [Api::ChatCompletions, Api::Responses, Api::Embeddings, Api::Messages];

/// One request of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RequestLine {
    /// Its line, from 1.
    pub(super) line: usize,
    pub(super) custom_id: String,
    at: u64,
    length: usize,
}

/// All requests of a file.
#[derive(Debug)]
pub(super) struct Input {
    file: File,
    name: String,
    items: Vec<RequestLine>,
    lines: HashMap<String, usize>,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(default)]
    custom_id: Option<String>,
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    url: Option<String>,
    #[serde(borrow, default)]
    body: Option<&'a RawValue>,
}

impl Input {
    /// Reads a file. `serves` says whether some upstream answers this route and model, and if not, why.
    pub(super) fn read(
        path: &Path,
        serves: impl Fn(Api, &str) -> Result<(), String>,
    ) -> Result<Input, Failure> {
        let name = source::name(path);
        let failed = |error: std::io::Error| Failure::reading(&name, &error);
        if source::is_stdin(path) {
            return Err(Failure::new("requests must be in a file, so that a run that was ended can go on"));
        }
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(Failure::new(format!("cannot read {name}: it is a directory; name a file in it")));
        }
        let mut reader = BufReader::with_capacity(256 * 1024, file.try_clone().map_err(failed)?);
        let mut input = Input { file, name: name.clone(), items: Vec::new(), lines: HashMap::new() };
        let (mut at, mut number, mut wrong, mut mistakes) = (0_u64, 0_usize, 0_usize, Vec::new());
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let length = reader.read_until(b'\n', &mut bytes).map_err(failed)?;
            if length == 0 {
                break;
            }
            number += 1;
            if !bytes.trim_ascii().is_empty() {
                match input.item(&bytes, number, &serves) {
                    Ok(custom_id) => input.items.push(RequestLine { line: number, custom_id, at, length }),
                    Err(why) => {
                        wrong += 1;
                        if mistakes.len() < MOST_MISTAKES {
                            mistakes.push(format!("{name}:{number}: {why}"));
                        }
                    }
                }
            }
            at += length as u64;
        }
        if wrong > mistakes.len() {
            mistakes.push(format!("and {} more", wrong - mistakes.len()));
        }
        if wrong > 0 {
            let lines = if wrong == 1 { "line is" } else { "lines are" };
            return Err(Failure::with_details(
                mistakes,
                format!("{wrong} {lines} wrong in {name}; nothing was sent"),
            ));
        }
        if input.items.is_empty() {
            return Err(Failure::new(format!("{name} has no requests")));
        }
        Ok(input)
    }

    /// Checks a line, and remembers its `custom_id`.
    fn item(
        &mut self,
        bytes: &[u8],
        number: usize,
        serves: &impl Fn(Api, &str) -> Result<(), String>,
    ) -> Result<String, String> {
        let (custom_id, api, body) = parse(bytes)?;
        let request =
            ModelRequest::read(api, body.get().as_bytes()).map_err(|error| format!("body: {error}"))?;
        if request.is_stream() {
            return Err("body.stream: a result is one answer; leave stream out".to_owned());
        }
        serves(api, request.model())?;
        match self.lines.insert(custom_id.clone(), number) {
            None => Ok(custom_id),
            Some(first) => {
                self.lines.insert(custom_id.clone(), first);
                Err(format!("custom_id: {custom_id:?} is that of line {first} too; each must be there once"))
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn items(&self) -> &[RequestLine] {
        &self.items
    }

    pub(super) fn has(&self, custom_id: &str) -> bool {
        self.lines.contains_key(custom_id)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads a request again, which must be the one that was checked.
    pub(super) fn call(&self, item: &RequestLine) -> Result<ModelCall, Failure> {
        let mut bytes = vec![0; item.length];
        self.file.read_exact_at(&mut bytes, item.at).map_err(|error| Failure::reading(&self.name, &error))?;
        match parse(&bytes) {
            Ok((custom_id, api, body)) if custom_id == item.custom_id => {
                Ok(ModelCall { api, body: body.get().as_bytes().to_vec() })
            }
            _ => Err(Failure::new(format!(
                "line {} of {} has changed since it was checked; run the command again",
                item.line, self.name
            ))),
        }
    }
}

/// The parts of a line.
fn parse(bytes: &[u8]) -> Result<(String, Api, &RawValue), String> {
    if bytes.len() > MOST_BYTES {
        return Err("is longer than 32 MiB".to_owned());
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "is not text (UTF-8)".to_owned())?;
    if !text.trim_start().starts_with('{') {
        return Err("is not a JSON object".to_owned());
    }
    let line: Line<'_> =
        serde_json::from_str(text).map_err(|error| format!("is not a JSON object of a request: {error}"))?;
    let custom_id = match line.custom_id {
        Some(id) if (1..=512).contains(&id.len()) => id,
        Some(_) => return Err("custom_id: has 1 to 512 bytes".to_owned()),
        None => return Err("custom_id: is missing; it is the name of the request in the results".to_owned()),
    };
    if let Some(method) = line.method.filter(|method| method != "POST") {
        return Err(format!("method: is {method:?}; only \"POST\" is known"));
    }
    let url = line.url.ok_or_else(|| "url: is missing; such as \"/v1/chat/completions\"".to_owned())?;
    let Some(api) = Api::at(&url).filter(|api| ROUTES.contains(api)) else {
        let known: Vec<&str> = ROUTES.iter().map(|api| api.path()).collect();
        return Err(format!("url: {url:?} is not known; known: {}", known.join(", ")));
    };
    let body = line.body.ok_or_else(|| "body: is missing; it is the request".to_owned())?;
    Ok((custom_id, api, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Input, Failure> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("requests.jsonl");
        std::fs::write(&path, text).expect("written");
        Input::read(&path, |_, model| if model == "gone" { Err("no upstream".to_owned()) } else { Ok(()) })
    }

    fn line(id: &str, body: &str) -> String {
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/chat/completions","body":{body}}}"#)
    }

    #[test]
    fn requests_are_found_again() {
        let body = |text: &str| format!(r#"{{"model":"m","messages":[],"user":"{text}"}}"#);
        let text = format!(
            "{}\n\n  \r\n{}\r\n{}",
            line("a", &body("é")),
            line("b", &body("x")),
            line("c", &body("y"))
        );
        let input = read(&text).expect("sound");
        let found: Vec<(usize, &str)> =
            input.items().iter().map(|item| (item.line, item.custom_id.as_str())).collect();
        assert_eq!(found, [(1, "a"), (4, "b"), (5, "c")]);
        for (item, user) in input.items().iter().zip(["é", "x", "y"]) {
            assert_eq!(input.call(item).expect("a call").body, body(user).into_bytes());
        }
    }

    #[test]
    fn every_wrong_line_is_named_with_its_number() {
        let sound = r#"{"model":"m","messages":[]}"#;
        let cases = [
            ("x", "is not a JSON object"),
            ("{", "is not a JSON object of a request"),
            ("[1]", "is not a JSON object"),
            ("{}", "custom_id: is missing"),
            (r#"{"custom_id":"","url":"/v1/chat/completions","body":{}}"#, "custom_id: has 1 to 512 bytes"),
            (r#"{"custom_id":7,"url":"/v1/chat/completions","body":{}}"#, "invalid type: integer"),
            (r#"{"custom_id":"q","body":{}}"#, "url: is missing"),
            (r#"{"custom_id":"q","url":"/v1/images","body":{}}"#, "url: \"/v1/images\" is not known"),
            (r#"{"custom_id":"q","url":"/v1/messages/count_tokens","body":{}}"#, "is not known"),
            (
                r#"{"custom_id":"q","method":"GET","url":"/v1/chat/completions","body":{}}"#,
                "method: is \"GET\"",
            ),
            (r#"{"custom_id":"q","url":"/v1/chat/completions"}"#, "body: is missing"),
            (&line("q", "[]"), "body: the body is not a JSON object"),
            (&line("q", r#"{"messages":[]}"#), "body: you must provide a model parameter"),
            (&line("q", r#"{"model":"m"}"#), "body: messages is missing"),
            (&line("q", r#"{"model":"gone","messages":[]}"#), "no upstream"),
            (&line("q", r#"{"model":"m","messages":[],"stream":true}"#), "body.stream"),
            (&line("first", sound), "custom_id: \"first\" is that of line 1 too"),
        ];
        let wrong: Vec<&str> = cases.iter().map(|(text, _)| *text).collect();
        let Err(Failure::CouldNot { details, message }) =
            read(&format!("{}\n{}\n", line("first", sound), wrong.join("\n")))
        else {
            panic!("it was accepted")
        };
        assert_eq!(details.len(), cases.len());
        for (index, ((text, expected), detail)) in cases.iter().zip(&details).enumerate() {
            assert!(
                detail.contains(&format!("requests.jsonl:{}: ", index + 2)) && detail.contains(expected),
                "{text}: {detail}"
            );
        }
        assert!(message.contains("nothing was sent"), "{message}");
        let many: Vec<&str> = std::iter::repeat_n("{", 100).collect();
        let Err(Failure::CouldNot { details, .. }) = read(&many.join("\n")) else {
            panic!("it was accepted")
        };
        assert_eq!((details.len(), details.last().map(String::as_str)), (21, Some("and 80 more")));
        assert!(read("\n\n").is_err_and(|failure| failure.to_string().contains("has no requests")));
    }
}
