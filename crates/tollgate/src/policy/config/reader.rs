//! Reads single fields, and records what is wrong with them.
//!
//! A [`Section`] is a table of the file, a [`Field`] one entry of it. Every read returns a valid value, or records a mistake and
//! returns nothing, so that one run finds every mistake. The meaning of the fields is in `store.rs`, `limits.rs` and the other
//! readers of sections, in this crate and in others (`extension.rs`).
//!
//! Values are shown as the file has them, except those that could be secret. Where secrets live (the file's root, `[store]` and
//! below) only the values of known harmless fields are shown, so that a password under a misspelt name stays hidden too.

use std::fmt::Display;
use std::ops::Range;
use std::time::Duration;

use tollgate_kernel::{Limit, MAX_COUNT, Micros, Rate};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue, Error};

use super::mistake::{Mistake, Mistakes};
use crate::policy::Excerpt;
use crate::policy::nearest::nearest;

/// What is shown instead of a value that may be secret.
const HIDDEN: &str = "***";

/// The file that is being read, with the environment's values appended, and the mistakes so far.
pub struct Reader<'t> {
    text: &'t str,
    /// Where each line starts.
    lines: Vec<usize>,
    /// Where the value of each environment variable starts, after the end of the file.
    variables: Vec<(usize, String)>,
    mistakes: Vec<Mistake>,
}

/// A table of the file: its path, its offset and its fields in the order of the file.
pub struct Section<'d> {
    path: String,
    offset: usize,
    fields: Vec<Field<'d>>,
}

/// One entry of a section.
#[derive(Clone)]
pub struct Field<'d> {
    /// The last piece of the path, unquoted.
    pub name: &'d str,
    path: String,
    offset: usize,
    span: Range<usize>,
    value: &'d DeValue<'d>,
    hidden: bool,
}

impl<'d> Section<'d> {
    /// The whole file.
    pub(super) fn root(table: &'d DeTable<'d>) -> Section<'d> {
        Section::new("", 0, table, true)
    }

    fn new(path: &str, offset: usize, table: &'d DeTable<'d>, hidden: bool) -> Section<'d> {
        let field = |(name, value): (&'d Spanned<DeString<'d>>, &'d Spanned<DeValue<'d>>)| Field {
            name: name.get_ref(),
            path: joined(path, name.get_ref()),
            offset: name.span().start,
            span: value.span(),
            value: value.get_ref(),
            hidden,
        };
        let mut fields: Vec<_> = table.iter().map(field).collect();
        fields.sort_by_key(|field| field.offset);
        Section { path: path.to_owned(), offset, fields }
    }

    /// The field of this name, if the file has it.
    pub fn field(&self, name: &str) -> Option<&Field<'d>> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// All fields, in the order of the file.
    pub fn fields(&self) -> impl Iterator<Item = &Field<'d>> {
        self.fields.iter()
    }

    /// Whether it has no field at all.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// The same without some of its fields, which another reader handles.
    pub fn without(&self, names: &[&str]) -> Section<'d> {
        let fields = self.fields.iter().filter(|field| !names.contains(&field.name)).cloned().collect();
        Section { path: self.path.clone(), offset: self.offset, fields }
    }

    /// Shows the values of these fields in mistakes, although other fields here may be secret.
    pub fn showing(mut self, names: &[&str]) -> Self {
        for field in &mut self.fields {
            field.hidden &= !names.contains(&field.name);
        }
        self
    }

    /// Shows every value: nothing here or below can be secret.
    pub fn showing_all(mut self) -> Self {
        for field in &mut self.fields {
            field.hidden = false;
        }
        self
    }
}

impl<'d> Field<'d> {
    /// Whether the value is a table.
    fn is_table(&self) -> bool {
        self.value.is_table()
    }

    /// The value, if it is a text.
    #[cfg(feature = "http")]
    pub fn as_text(&self) -> Option<&'d str> {
        self.value.as_str()
    }
}

impl<'t> Reader<'t> {
    /// A reader of a text with the variables, if any, at its end.
    pub(super) fn new(text: &'t str, variables: Vec<(usize, String)>) -> Reader<'t> {
        let starts = text.match_indices('\n').map(|(at, _)| at + 1);
        let lines = std::iter::once(0).chain(starts).collect();
        Reader { text, lines, variables, mistakes: Vec::new() }
    }

    /// Records a mistake in an environment variable that sets no field.
    pub(super) fn variable(&mut self, variable: &str, fix: impl Display) {
        let (field, value, fix) = (String::new(), String::new(), fix.to_string());
        let variable = Some(Excerpt(variable).to_string());
        self.mistakes.push(Mistake { line: 0, column: 0, variable, field, value, fix });
    }

    /// The value, if no mistake was found.
    pub(super) fn finish<T>(self, read: T) -> Result<T, Mistakes> {
        if self.mistakes.is_empty() { Ok(read) } else { Err(Mistakes::new(self.mistakes)) }
    }

    /// Notes that a field is wrong.
    pub fn mistake(&mut self, field: &Field<'_>, fix: impl Display) {
        let value = self.shown(field);
        self.note(field.offset, field.path.clone(), value, fix);
    }

    /// Notes that a field should not be there, or not under this name; its value does not matter.
    pub fn misnamed(&mut self, field: &Field<'_>, fix: impl Display) {
        self.note(field.offset, field.path.clone(), String::new(), fix);
    }

    /// Notes that a section lacks a field, with an example of it.
    pub fn missing(&mut self, section: &Section<'_>, name: &str, example: impl Display) {
        let fix = format!("is missing; write {name} = {example}");
        self.note(section.offset, joined(&section.path, name), String::new(), fix);
    }

    /// Notes that a section is wrong as a whole.
    pub fn mistaken(&mut self, section: &Section<'_>, fix: impl Display) {
        self.note(section.offset, section.path.clone(), String::new(), fix);
    }

    /// Records where the file is not TOML, once for each line. The line itself is not shown: it may hold a secret. The name of what is there twice
    /// is.
    pub(super) fn not_toml(&mut self, errors: &[Error]) {
        for error in errors {
            let offset = error.span().map_or(self.text.len(), |span| span.start);
            let (line, _) = self.position(offset);
            if self.mistakes.iter().all(|mistake| mistake.line != line) {
                let name = error.span().and_then(|span| self.text.get(span));
                let fix = match (error.message(), name) {
                    ("duplicate key", Some(name)) => format!(
                        "not valid TOML: duplicate key {}; keep one of the two, or give one of them another name",
                        Excerpt(name)
                    ),
                    (message, _) => format!("not valid TOML: {message}"),
                };
                self.note(offset, String::new(), String::new(), fix);
            }
        }
    }

    fn note(&mut self, offset: usize, field: String, value: String, fix: impl Display) {
        let set_by = self.variables.partition_point(|(start, _)| *start <= offset).checked_sub(1);
        let variable = set_by.map(|index| self.variables[index].1.clone());
        let (line, column) = if variable.is_some() { (0, 0) } else { self.position(offset) };
        self.mistakes.push(Mistake { line, column, variable, field, value, fix: fix.to_string() });
    }

    /// The line and the column of a byte, both from 1.
    fn position(&self, offset: usize) -> (usize, usize) {
        let line = self.lines.partition_point(|&start| start <= offset);
        let start = self.lines[line - 1];
        let before = self.text.get(start..offset).unwrap_or_default();
        (line, before.chars().count() + 1)
    }

    /// The value as the file has it, if it may be shown.
    fn shown(&self, field: &Field<'_>) -> String {
        match field.value {
            DeValue::Table(_) => "{…}".to_owned(),
            DeValue::Array(_) => "[…]".to_owned(),
            _ if field.hidden => HIDDEN.to_owned(),
            _ => Excerpt(self.text.get(field.span.clone()).unwrap_or_default()).to_string(),
        }
    }

    /// Notes every field that is not among the known ones, with the nearest of these.
    pub fn only(&mut self, section: &Section<'_>, known: &[&str]) {
        for field in section.fields().filter(|field| !known.contains(&field.name)) {
            let mut fix = "unknown field; ".to_owned();
            match nearest(field.name, known.iter().copied()) {
                Some(guess) => fix.push_str(&format!("did you mean `{guess}`?")),
                None => fix.push_str(&format!("known here: {}", known.join(", "))),
            }
            // `[limits.a.b]` is a field of the limit `a`; most often the limit `a.b` was meant.
            if field.is_table() && !section.path.is_empty() {
                fix.push_str(" (a name with a dot in it is written in quotes)");
            }
            self.mistake(field, fix);
        }
    }

    /// Reads a table.
    pub fn section<'d>(&mut self, field: &Field<'d>) -> Option<Section<'d>> {
        match field.value {
            DeValue::Table(table) => Some(Section::new(&field.path, field.offset, table, field.hidden)),
            _ => {
                self.mistake(field, format!("must be a table: write [{}] and its fields below", field.path));
                None
            }
        }
    }

    /// Reads a list of tables; each is named by its offset in the list, counted from 1.
    pub fn sections<'d>(&mut self, field: &Field<'d>) -> Vec<Section<'d>> {
        let mut sections = Vec::new();
        for (index, item) in field.value.as_array().into_iter().flatten().enumerate() {
            let path = format!("{}[{}]", field.path, index + 1);
            if let DeValue::Table(table) = item.get_ref() {
                sections.push(Section::new(&path, item.span().start, table, field.hidden));
            }
        }
        if field.value.as_array().is_none_or(|items| items.len() != sections.len()) {
            self.mistake(
                field,
                format!("must be a list of tables: write [[{}]] and its fields below", field.path),
            );
        }
        sections
    }

    /// Reads a text.
    pub fn text<'d>(&mut self, field: &Field<'d>, example: &str) -> Option<&'d str> {
        let text = field.value.as_str();
        if text.is_none() {
            self.mistake(field, format!("must be text in quotes, such as \"{example}\""));
        }
        text
    }

    /// Reads `true` or `false`.
    pub fn truth(&mut self, field: &Field<'_>) -> Option<bool> {
        let truth = field.value.as_bool();
        if truth.is_none() {
            self.mistake(field, "must be true or false, without quotes");
        }
        truth
    }

    /// Reads one of several words.
    pub fn choice<T: Copy>(&mut self, field: &Field<'_>, choices: &[(&str, T)]) -> Option<T> {
        let words = || choices.iter().map(|(word, _)| *word);
        let text = self.text(field, choices[0].0)?;
        let chosen = choices.iter().find(|(word, _)| *word == text).map(|&(_, choice)| choice);
        if chosen.is_none() {
            let known = words().collect::<Vec<_>>().join(", ");
            match nearest(text, words()) {
                Some(guess) => {
                    self.mistake(field, format!("must be one of {known}; did you mean \"{guess}\"?"))
                }
                None => self.mistake(field, format!("must be one of {known}")),
            }
        }
        chosen
    }

    /// Reads a whole number of at least 1; `zero` says what to write instead of 0.
    pub fn whole(&mut self, field: &Field<'_>, example: u64, zero: &str) -> Option<u64> {
        let fix = match field.value {
            DeValue::Integer(number) => {
                let (digits, radix) = (number.as_str(), number.radix());
                match u64::from_str_radix(digits, radix) {
                    Ok(0) => format!("must be at least 1{zero}"),
                    Ok(number) => return Some(number),
                    Err(_) if digits.starts_with('-') => format!("must be at least 1{zero}"),
                    Err(_) => format!("is too large; at most {MAX_COUNT}"),
                }
            }
            DeValue::Float(_) => format!("must be a whole number, such as {example}"),
            DeValue::String(text) if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
                format!("must be a number without quotes: {} = {text}", field.name)
            }
            _ => format!("must be a whole number, such as {example}"),
        };
        self.mistake(field, fix);
        None
    }

    /// Reads the count of a limit: its burst, capacity or limit.
    pub fn count(&mut self, field: &Field<'_>, example: u64) -> Option<u64> {
        let zero = "; for no limit or no passage write unlimited = true or blocked = true instead";
        let count = self.whole(field, example, zero)?;
        // A limit with no other constraint on its count, so that the kernel's bound applies.
        match Limit::concurrency(count, Micros::from_secs(1)) {
            Ok(_) => Some(count),
            Err(error) => {
                self.mistake(field, error.fix());
                None
            }
        }
    }

    /// Reads a duration that may be none.
    pub fn span_or_zero(&mut self, field: &Field<'_>, example: &str) -> Option<Duration> {
        match field.value.as_str().map(str::parse::<Micros>) {
            Some(Ok(Micros::ZERO)) => Some(Duration::ZERO),
            _ => self.span(field, example),
        }
    }

    /// Reads a list of texts, at least one.
    pub fn texts(&mut self, field: &Field<'_>, example: &str) -> Option<Vec<String>> {
        let items = field.value.as_array().map(|items| items.iter());
        let texts: Option<Vec<String>> = items.and_then(|mut items| {
            items.try_fold(Vec::new(), |mut texts, item| {
                texts.push(item.get_ref().as_str()?.to_owned());
                Some(texts)
            })
        });
        let texts = texts.filter(|texts| !texts.is_empty());
        if texts.is_none() {
            self.mistake(field, format!("must be a list of texts, such as {example}"));
        }
        texts
    }

    /// Reads a text, or a list of texts, at least one.
    #[cfg(feature = "http")]
    pub fn one_or_more(&mut self, field: &Field<'_>, example: &str) -> Option<Vec<String>> {
        match field.value.as_str() {
            Some(text) => Some(vec![text.to_owned()]),
            None => self.texts(field, example),
        }
    }

    /// Reads a list of whole numbers, at least one.
    #[cfg(feature = "http")]
    pub fn numbers(&mut self, field: &Field<'_>, example: &str) -> Option<Vec<u64>> {
        let number = |item: &Spanned<DeValue<'_>>| match item.get_ref() {
            DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        let items = field.value.as_array();
        let numbers: Option<Vec<u64>> = items.and_then(|items| items.iter().map(number).collect());
        let numbers = numbers.filter(|numbers| !numbers.is_empty());
        if numbers.is_none() {
            self.mistake(field, format!("must be a list of whole numbers, such as {example}"));
        }
        numbers
    }

    /// Reads a duration.
    pub fn span(&mut self, field: &Field<'_>, example: &str) -> Option<Duration> {
        self.span_us(field, example).map(Duration::from)
    }

    /// The same in the unit of decisions.
    pub(super) fn span_us(&mut self, field: &Field<'_>, example: &str) -> Option<Micros> {
        let text = match field.value {
            DeValue::String(text) => text,
            _ => {
                self.mistake(field, format!("must be a duration in quotes, such as \"{example}\""));
                return None;
            }
        };
        let span = text.parse::<Micros>();
        // As above, for the kernel's bounds of a span.
        match span.and_then(|span| Limit::concurrency(1, span).map(|_| span)) {
            Ok(span) => Some(span),
            Err(error) => {
                self.mistake(field, error.fix());
                None
            }
        }
    }

    /// Reads a rate.
    pub fn rate(&mut self, field: &Field<'_>) -> Option<Rate> {
        let DeValue::String(text) = field.value else {
            self.mistake(field, "must be count/period in quotes, such as \"10/s\" or \"100/m\"");
            return None;
        };
        match text.parse::<Rate>() {
            Ok(rate) => Some(rate),
            Err(error) => {
                self.mistake(field, error.fix());
                None
            }
        }
    }
}

/// A path and the next name, quoted where TOML would want it.
fn joined(path: &str, name: &str) -> String {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let name = match !name.is_empty() && name.bytes().all(bare) {
        true => Excerpt(name).to_string(),
        false => format!("\"{}\"", Excerpt(name)),
    };
    if path.is_empty() { name } else { format!("{path}.{name}") }
}
