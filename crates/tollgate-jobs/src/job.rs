//! A job as the gate sees it, whichever framework has it.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;

use serde_json::Value;

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

/// Puts fields into a template such as `tenant:{tenant}`; `None` where one is missing.
pub(crate) fn filled<'t>(template: &'t str, job: &Job<'_>) -> Option<Cow<'t, str>> {
    if !template.contains('{') {
        return Some(Cow::Borrowed(template));
    }
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once('{') {
        let (name, behind) = after.split_once('}')?;
        text.push_str(before);
        // A separator inside a value must not make another key of it.
        let value = job.field(name)?;
        text.push_str(&value.replace('%', "%25").replace(':', "%3A"));
        rest = behind;
    }
    text.push_str(rest);
    Some(Cow::Owned(text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_come_from_the_arguments_and_else_from_the_metadata() {
        let arguments = || json!({"tenant": "acme", "n": 7, "deep": {"er": true}, "list": [1]});
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
        assert_eq!(filled("account:{nobody}", &job), None);
        assert!(!format!("{job:?}").contains("acme"));
    }
}
