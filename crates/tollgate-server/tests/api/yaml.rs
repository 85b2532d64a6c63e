//! YAML as JSON, for looking into files of the packaging: all scalars are texts.

use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};

/// A list or a map that is not finished; a map has the key that waits for its value.
enum Open {
    List(Vec<Value>),
    Map(Map<String, Value>, Option<String>),
}

/// The first document.
pub(crate) fn read(text: &str) -> Value {
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, _) = event.unwrap_or_else(|error| panic!("{error}"));
        let done = match event {
            Event::SequenceStart(..) => {
                open.push(Open::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Map(Map::new(), None));
                continue;
            }
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::List(items)) => Value::Array(items),
                Some(Open::Map(fields, None)) => Value::Object(fields),
                _ => panic!("an end without a start"),
            },
            _ => continue,
        };
        match open.last_mut() {
            None => return done,
            Some(Open::List(items)) => items.push(done),
            Some(Open::Map(fields, key)) => match (key.take(), done) {
                (None, Value::String(name)) => *key = Some(name),
                (Some(name), value) => assert!(fields.insert(name.clone(), value).is_none(), "{name} twice"),
                (None, other) => panic!("{other} is no key"),
            },
        }
    }
    panic!("no document")
}
