//! A job as the gate sees it, whichever framework has it.

use std::cell::OnceCell;
use std::fmt;

use serde_json::Value;
use tollgate::Key;

/// A job that is about to run. Its arguments are turned to JSON only if a policy asks for one of their fields.
pub struct Job<'a> {
    /// Its id in the framework; the same for all its attempts.
    pub id: &'a str,
    /// Its type, such as `send_email`.
    pub job_type: &'a str,
    /// Its queue.
    pub queue: &'a str,
    arguments: OnceCell<Value>,
    to_json: &'a dyn Fn() -> Value,
    metadata: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Job<'a> {
    /// A job with neither arguments nor metadata.
    pub fn new(id: &'a str, job_type: &'a str, queue: &'a str) -> Job<'a> {
        Job { id, job_type, queue, arguments: OnceCell::new(), to_json: &|| Value::Null, metadata: &|_| None }
    }

    /// The same job with its arguments.
    #[must_use]
    pub fn with_arguments(self, to_json: &'a dyn Fn() -> Value) -> Job<'a> {
        Job { to_json, ..self }
    }

    /// The same job with its metadata, by name.
    #[must_use]
    pub fn with_metadata(self, metadata: &'a dyn Fn(&str) -> Option<String>) -> Job<'a> {
        Job { metadata, ..self }
    }

    /// Its arguments.
    pub fn arguments(&self) -> &Value {
        self.arguments.get_or_init(self.to_json)
    }

    /// A field of the arguments (`a.b` for one inside another), or else of the metadata, as text. Lists and tables have none.
    pub fn field(&self, name: &str) -> Option<String> {
        let found = name.split('.').try_fold(self.arguments(), |value, part| value.get(part));
        match found {
            Some(Value::String(text)) => Some(text.clone()),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Some(value.to_string()),
            _ => (self.metadata)(name),
        }
    }
}

/// Omits the arguments, which may be personal.
impl fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Job { id, job_type, queue, .. } = self;
        f.debug_struct("Job")
            .field("id", id)
            .field("job_type", job_type)
            .field("queue", queue)
            .finish_non_exhaustive()
    }
}

/// A template such as `tenant:{tenant}`, piece by piece: the text before a field, and its name, which the last piece lacks. Or what is wrong with
/// it.
fn pieces(template: &str) -> Result<Vec<(&str, Option<&str>)>, &'static str> {
    const STRAY: &str = "it has a `}` without a `{` before it";
    let (mut pieces, mut rest) = (Vec::new(), template);
    while let Some((before, after)) = rest.split_once('{') {
        let (name, behind) = after.split_once('}').ok_or("it has a `{` without a `}`")?;
        if before.contains('}') {
            return Err(STRAY);
        }
        if name.is_empty() || name.contains('{') {
            return Err("it has a `{` that no name of a field follows");
        }
        pieces.push((before, Some(name)));
        rest = behind;
    }
    if rest.contains('}') {
        return Err(STRAY);
    }
    pieces.push((rest, None));
    Ok(pieces)
}

/// What is wrong with a template of a key: a brace that lacks the other, or a text that is no key with whichever fields.
pub(crate) fn template_fault(template: &str) -> Option<String> {
    match pieces(template) {
        Err(fault) => Some(fault.to_owned()),
        Ok(pieces) => {
            let text: String =
                pieces.into_iter().flat_map(|(before, name)| [before, name.map_or("", |_| "x")]).collect();
            Key::parse(&text).err().map(|error| error.to_string())
        }
    }
}

/// Puts fields into a template such as `tenant:{tenant}`; `None` where one is missing, or where the text is no key with these.
pub(crate) fn filled(template: &str, job: &Job<'_>) -> Option<String> {
    let mut text = String::new();
    for (before, name) in pieces(template).ok()? {
        text.push_str(before);
        if let Some(name) = name {
            // A separator inside a value must not make another key of it.
            text.push_str(&job.field(name)?.replace('%', "%25").replace(':', "%3A"));
        }
    }
    Some(Key::parse(&text).ok()?.canonical().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_come_from_the_arguments_and_else_from_the_metadata() {
        let arguments = || json!({"tenant": "acme", "n": 7, "deep": {"er": true}, "list": [1], "empty": ""});
        let metadata = |name: &str| (name == "trace").then(|| "t-1".to_owned());
        let job = Job::new("1", "send_email", "mail").with_arguments(&arguments).with_metadata(&metadata);
        for (name, value) in [
            ("tenant", Some("acme")),
            ("n", Some("7")),
            ("deep.er", Some("true")),
            ("trace", Some("t-1")),
            ("list", None),
            ("nobody", None),
        ] {
            assert_eq!(job.field(name).as_deref(), value, "{name}");
        }
        assert_eq!(filled("account:{tenant}", &job).as_deref(), Some("account:acme"));
        assert_eq!(filled("global", &job).as_deref(), Some("global"));
        assert_eq!(filled("default:acme", &job).as_deref(), Some("acme"), "as `close` and `open` have it");
        assert_eq!(filled("account:{nobody}", &job), None);
        assert_eq!(filled("account:{empty}", &job), None, "no key can have this value");
        assert!(!format!("{job:?}").contains("acme"));
    }

    #[test]
    fn a_template_that_never_makes_a_key_is_found() {
        for template in ["global", "account:{tenant}", "{a}", "a:{b}-{c.d}", "a:{b}:{c}"] {
            assert_eq!(template_fault(template), None, "{template}");
        }
        for (template, fault) in [
            ("account:{tenant", "a `{` without a `}`"),
            ("account:tenant}", "a `}` without a `{`"),
            ("account:{tenant}}", "a `}` without a `{`"),
            ("account:{}", "that no name of a field follows"),
            ("account:{{tenant}}", "that no name of a field follows"),
            ("", ""),
            ("account:", ""),
            ("a:b:c:d", ""),
            ("a:{b}:{c}:{d}", ""),
            ("a\nb", ""),
        ] {
            let found = template_fault(template).unwrap_or_else(|| panic!("{template} is a key"));
            assert!(found.contains(fault), "{template}: {found}");
        }
    }
}
