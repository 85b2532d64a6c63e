//! A page of the log: what the JSON lines say, read back.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tollgate::telemetry::json_lines_to;
use tracing_subscriber::layer::SubscriberExt;

/// Keeps what is written.
#[derive(Clone, Default)]
pub(crate) struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Page {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Each line is one object.
    pub(crate) fn lines(&self) -> Vec<Value> {
        let read =
            |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"));
        self.text().lines().map(read).collect()
    }
}

/// The lines that are written while `work` is done in this thread.
pub(crate) fn logged(work: impl FnOnce()) -> Vec<Value> {
    let page = Page::default();
    let (lines, guard) = json_lines_to(page.clone());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), work);
    drop(guard);
    page.lines()
}

/// The fields of a line in a few words, those that it has: `INFO denied user:1 retry=60000`.
pub(crate) fn brief(line: &Value) -> String {
    let word = |name: &str| match &line[name] {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    let words = ["level", "decision", "limiter", "source", "failure", "retry_after_ms", "suppressed"];
    words.map(word).join(" ")
}
