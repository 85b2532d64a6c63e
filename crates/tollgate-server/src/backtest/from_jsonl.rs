//! Requests from JSONL: an object a line, with the names of the CSV columns.
//!
//! A number is taken as the digits that stand in the file, never as a float. A key is a text as in CSV, or an object with raw
//! parts (`{"namespace":"ip","key":"::1"}`), so that nothing needs encoding. Blank lines are skipped. What `--decisions` writes can be
//! read again: there the time is `time_us`, in whole microseconds. Lines of the gateway's trail are
//! read by `from_trail.rs`.

use std::borrow::Cow;
use std::fmt;
use std::io::BufRead;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use tollgate::Key;

use super::from_trail::Call;
use super::intake::{Entry, Intake};
use super::lines::{Line, Lines, TOO_LONG};
use super::mistake::Mistake;
use crate::failure::Failure;

/// Reads a whole file into `intake`.
pub(super) fn read<R: BufRead>(mut lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    let mut any = false;
    while let Some(line) = lines.next_line().map_err(|error| Failure::reading(name, &error))? {
        let (line, bytes) = match line {
            Line::Whole(line, bytes) => (line, bytes.trim_ascii()),
            Line::TooLong(line, start) => {
                any = true;
                intake.take(line, Err(Mistake::new("line", &String::from_utf8_lossy(start), TOO_LONG)))?;
                continue;
            }
        };
        if bytes.is_empty() {
            continue;
        }
        any = true;
        if let Some(call) = Call::read(bytes) {
            intake.take_call(line, &call)?;
            continue;
        }
        let object = object(bytes);
        if let Ok(Object { ignored: Some(name), .. }) = &object {
            intake.ignore(name);
        }
        intake.take(line, object.and_then(|object| object.entry()))?;
    }
    if any {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{name} is empty: JSONL has an object a line, such as {{\"time\":1700000000,\"limit\":\"api\",\"key\":\"user:42\"}}"
    )))
}

/// Whether an object is a charge, or a call of a language model.
pub(super) fn is_charge(line: &[u8]) -> bool {
    object(line).is_ok_and(|object| object.limit.is_some() || object.key.is_some())
        || Call::read(line).is_some()
}

/// A line, its values still as they are written.
#[derive(Debug, Default)]
struct Object<'a> {
    time: Option<&'a RawValue>,
    /// Whole microseconds since 1970, as `--decisions` writes them.
    time_us: Option<&'a RawValue>,
    limit: Option<&'a RawValue>,
    key: Option<&'a RawValue>,
    cost: Option<&'a RawValue>,
    /// The first field that a backtest does not read.
    ignored: Option<Cow<'a, str>>,
}

fn object(bytes: &[u8]) -> Result<Object<'_>, Mistake> {
    let text = str::from_utf8(bytes).map_err(|_| Mistake::not_utf8("line", bytes))?;
    serde_json::from_str(text).map_err(|error| invalid_json(text, &error))
}

/// For a line that is no object of the kind that is read.
pub(super) fn invalid_json(line: &str, error: &serde_json::Error) -> Mistake {
    // Each line is a text of its own, so the line that serde_json counts says nothing.
    let message = error.to_string().replace(" at line 1 column ", " at column ");
    Mistake::wrong_type("line", line, format!("write one JSON object a line ({message})"))
}

impl<'a> Object<'a> {
    fn entry(&self) -> Result<Entry<'a>, Mistake> {
        Ok(Entry {
            time: match (given(self.time), given(self.time_us)) {
                (None, Some(raw)) => Some(seconds(raw)?),
                (time, _) => time.map(|raw| text_or_number("time", raw)).transpose()?,
            },
            limit: given(self.limit).map(|raw| text("limit", raw)).transpose()?,
            key: given(self.key).map(key).transpose()?,
            cost: given(self.cost).map(|raw| text_or_number("cost", raw)).transpose()?,
        })
    }
}

/// Microseconds as seconds with six decimals: the same digits with a point between them.
fn seconds(raw: &str) -> Result<Cow<'_, str>, Mistake> {
    let digits = raw.trim_matches('"');
    if digits.is_empty() || digits.len() > 20 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(Mistake::wrong_type("time_us", raw, "write whole microseconds since 1970"));
    }
    let padded = format!("{digits:0>7}");
    let (whole, decimals) = padded.split_at(padded.len() - 6);
    Ok(Cow::Owned(format!("{whole}.{decimals}")))
}

/// A value that is there and is not `null`.
pub(super) fn given(raw: Option<&RawValue>) -> Option<&str> {
    raw.map(RawValue::get).filter(|raw| *raw != "null")
}

pub(super) fn text<'a>(field: &'static str, raw: &'a str) -> Result<Cow<'a, str>, Mistake> {
    match raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(plain) if !plain.contains('\\') => Ok(Cow::Borrowed(plain)),
        Some(_) => serde_json::from_str::<String>(raw)
            .map(Cow::Owned)
            .map_err(|error| Mistake::wrong_type(field, raw, error.to_string())),
        None => Err(Mistake::wrong_type(
            field,
            raw,
            format!("write a text in quotes, such as {}", example(field)),
        )),
    }
}

fn example(field: &str) -> &'static str {
    if field == "key" { "\"user:42\"" } else { "\"api\"" }
}

/// Digits as they stand in the file; in quotes they mean the same, because some programs write large numbers so.
pub(super) fn text_or_number<'a>(field: &'static str, raw: &'a str) -> Result<Cow<'a, str>, Mistake> {
    match raw.as_bytes().first() {
        Some(b'-' | b'0'..=b'9') => Ok(Cow::Borrowed(raw)),
        Some(b'"') => text(field, raw),
        _ => Err(Mistake::wrong_type(field, raw, "write a number or a text")),
    }
}

/// The raw parts of a key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts<'a> {
    #[serde(borrow)]
    namespace: Option<Cow<'a, str>>,
    #[serde(borrow)]
    key: Cow<'a, str>,
    #[serde(borrow)]
    version: Option<Cow<'a, str>>,
}

fn key(raw: &str) -> Result<Cow<'_, str>, Mistake> {
    if !raw.starts_with('{') {
        return text("key", raw);
    }
    let wrong = |message: String| Mistake::wrong_type("key", raw, message);
    let parts: Parts<'_> = serde_json::from_str(raw).map_err(|_| {
        wrong("an object key has the texts namespace, key and, optionally, version".to_string())
    })?;
    let namespace = parts.namespace.as_deref().unwrap_or("default");
    let key = match parts.version.as_deref() {
        Some(version) => Key::with_version(namespace, &parts.key, version),
        None => Key::new(namespace, &parts.key),
    };
    key.map(|key| Cow::Owned(key.canonical().to_string())).map_err(|error| wrong(error.to_string()))
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

/// Keeps the four fields as they are written and passes over the others. Derived code would not tell which were others.
struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
        let mut object = Object::default();
        while let Some(Name(name)) = map.next_key()? {
            let (field, place) = match &*name {
                "time" => ("time", &mut object.time),
                "time_us" => ("time_us", &mut object.time_us),
                "limit" => ("limit", &mut object.limit),
                "key" => ("key", &mut object.key),
                "cost" => ("cost", &mut object.cost),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    object.ignored.get_or_insert(name);
                    continue;
                }
            };
            if place.is_some() {
                return Err(serde::de::Error::duplicate_field(field));
            }
            *place = Some(map.next_value()?);
        }
        Ok(object)
    }
}

/// The name of a field, borrowed from the line unless it has escapes in it.
#[derive(Deserialize)]
pub(super) struct Name<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(line: &str) -> Result<[Option<String>; 4], Mistake> {
        let object = object(line.as_bytes())?;
        let entry = object.entry()?;
        Ok([entry.time, entry.limit, entry.key, entry.cost].map(|field| field.map(Cow::into_owned)))
    }

    #[test]
    fn values_are_taken_as_they_are_written() {
        for (line, expected) in [
            (
                r#"{"time":1700000000.123456,"limit":"api","key":"user:42"}"#,
                ["1700000000.123456", "api", "user:42", "-"],
            ),
            (
                r#"{ "cost" : 5 , "key":"u", "limit":"api", "time" : "2024-05-01T12:00:00Z" }"#,
                ["2024-05-01T12:00:00Z", "api", "u", "5"],
            ),
            (
                r#"{"time":1.10,"limit":"a\u0070i","key":"\u00e9\"x","cost":"7","path":"/"}"#,
                ["1.10", "api", "é\"x", "7"],
            ),
            (r#"{"time":-1,"limit":null,"key":null,"cost":null}"#, ["-1", "-", "-", "-"]),
            (r#"{"time":1e3,"limit":"","key":"","cost":1.0}"#, ["1e3", "", "", "1.0"]),
            (
                r#"{"time":1,"limit":"api","key":{"namespace":"ip","key":"::1"}}"#,
                ["1", "api", "ip:%3A%3A1", "-"],
            ),
            (
                r#"{"time":1,"limit":"api","key":{"key":"a%b","version":"2"}}"#,
                ["1", "api", "default:a%25b:2", "-"],
            ),
            (
                r#"{"time_us":1700000000123456,"limit":"api","key":"u"}"#,
                ["1700000000.123456", "api", "u", "-"],
            ),
            (r#"{"time_us":7,"limit":"api","key":"u"}"#, ["0.000007", "api", "u", "-"]),
            (r#"{"time_us":7,"time":8}"#, ["8", "-", "-", "-"]),
            ("{}", ["-", "-", "-", "-"]),
        ] {
            let found = entry(line).unwrap().map(|field| field.unwrap_or("-".to_string()));
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for line in [
            "{",
            "[1]",
            "7",
            "null",
            "\"x\"",
            "{\"time\":1}}",
            "{\"time\":1,}",
            "{'time':1}",
            "{\"time\":1",
            "time,limit",
            "{\"time\":1,\"time\":2}",
            "{\"time\":NaN}",
            "{\"time\":01}",
            "{\"key\":\"\\x\"}",
            "{\"key\":\"\\ud800\"}",
            "{\"limit\":7}",
            "{\"key\":42}",
            "{\"key\":{}}",
            "{\"key\":{\"key\":\"\"}}",
            "{\"key\":{\"key\":\"a\",\"user\":1}}",
            "{\"time\":true}",
            "{\"time_us\":1.5}",
            "{\"time_us\":-1}",
            "{\"cost\":[1]}",
        ] {
            assert!(entry(line).is_err(), "{line}: {:?}", entry(line));
        }
        assert!(object(b"{\"key\":\"\xff\"}").is_err());
        let deep = "[".repeat(100_000);
        assert!(entry(&deep).is_err() && entry(&format!("{{\"x\":{deep}")).is_err());
    }
}
