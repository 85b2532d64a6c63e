//! What the store logs, kept for tests to read. All tests of the process share it: look for what only yours can have said.

use std::fmt::{self, Write};
use std::sync::{LazyLock, Once};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static LINES: LazyLock<Mutex<Vec<String>>> = LazyLock::new(Mutex::default);

/// Begins to listen, if nobody has before.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Log).expect("nobody else listens"));
}

/// The warnings so far that contain all of these.
pub(crate) fn warnings(parts: &[&str]) -> Vec<String> {
    let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
    LINES.lock().iter().filter(has_all).cloned().collect()
}

struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        LINES.lock().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}
