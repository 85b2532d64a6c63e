//! Values of environment variables as TOML, and fields of a table by their path.
//!
//! Nothing here knows which variable sets which field: that is in `names.rs`.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::VariableKind;

/// The TOML of a value. A value of the wrong kind becomes a string, and is refused as such.
pub(super) fn toml_of(value: &str, kind: VariableKind) -> String {
    let is_number = || !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    match kind {
        VariableKind::Number if is_number() && DeValue::parse(value).is_ok() => value.to_owned(),
        VariableKind::Truth if matches!(value, "true" | "1") => "true".to_owned(),
        VariableKind::Truth if matches!(value, "false" | "0") => "false".to_owned(),
        VariableKind::Texts => {
            let texts: Vec<String> = value.split(',').map(|text| quoted(text.trim())).collect();
            format!("[{}]", texts.join(", "))
        }
        _ => quoted(value),
    }
}

/// A text as a basic string of TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            _ if character.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(character))),
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

pub(super) fn text_at<'t>(table: &'t DeTable<'_>, path: &[&str]) -> Option<&'t str> {
    let (last, sections) = path.split_last()?;
    let mut table = table;
    for name in sections {
        table = table.get(*name)?.get_ref().as_table()?;
    }
    table.get(*last)?.get_ref().as_str()
}

/// The Redis addresses of a file.
pub(super) fn urls_of(file: &DeTable<'_>) -> Vec<String> {
    if let Some(url) = text_at(file, &["store", "redis", "url"]) {
        return vec![url.to_owned()];
    }
    let redis = file.get("store").and_then(|store| store.get_ref().get("redis"));
    let urls = redis.and_then(|redis| redis.get_ref().get("urls")).and_then(|urls| urls.get_ref().as_array());
    urls.into_iter()
        .flat_map(|urls| urls.iter())
        .filter_map(|url| url.get_ref().as_str().map(str::to_owned))
        .collect()
}

/// Sets a field, and creates its section if there is none. If the file has another type there, that is the mistake.
pub(super) fn set_at<'t>(table: &mut DeTable<'t>, path: &[String], value: Spanned<DeValue<'t>>) {
    let offset = value.span();
    let key = |name: &str| Spanned::new(offset.clone(), Cow::Owned(name.to_owned()));
    match path {
        [] => {}
        [name] => {
            // `url` names one server, `urls` several: setting one replaces the other.
            let other = match name.as_str() {
                "url" => "urls",
                "urls" => "url",
                other => other,
            };
            table.remove(other);
            // Removed first, because the key has the position of the field.
            table.remove(name.as_str());
            table.insert(key(name), value);
        }
        [section, rest @ ..] => {
            if !table.contains_key(section.as_str()) {
                let empty = Spanned::new(offset.clone(), DeValue::Table(DeTable::new()));
                table.insert(key(section), empty);
            }
            if let Some(DeValue::Table(section)) = table.get_mut(section.as_str()).map(Spanned::get_mut) {
                set_at(section, rest, value);
            }
        }
    }
}
