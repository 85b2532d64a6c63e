//! The output of `tracing` as JSON, one object a line.
//!
//! The calling thread builds a line, and a separate thread writes it. If that thread falls behind, or the output blocks, fails or
//! panics, lines are dropped and counted ([`DroppedLines`]): no caller waits for a log. Text is escaped as JSON requires, control
//! characters included, so an entry is always exactly one line.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use opentelemetry::trace::TraceContextExt;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::Context;

/// How many lines wait to be written before further ones are dropped.
const WAITING_LINES: usize = 16_384;

/// The names of the fixed fields. A field with such a name gets the prefix `field_`.
const OWN_NAMES: [&str; 5] = ["timestamp", "level", "target", "trace_id", "span_id"];

/// A layer of `tracing-subscriber` that writes JSON lines; made by [`json_lines`].
pub struct JsonLines {
    writer: NonBlocking,
}

/// Keeps the writer running. Drop it at the end of the program: it waits a moment until the last lines are written.
#[must_use = "lines are written until this is dropped"]
pub struct JsonLinesGuard {
    dropped: DroppedLines,
    _worker: WorkerGuard,
}

impl JsonLinesGuard {
    /// The count of dropped lines, for a metric.
    pub fn dropped(&self) -> DroppedLines {
        self.dropped.clone()
    }
}

/// Counts the lines of a [`JsonLines`] that were not written.
#[derive(Clone)]
pub struct DroppedLines {
    /// Lines for which there was no room.
    no_room: ErrorCounter,
    /// Lines that the output did not take: it failed, or panicked.
    failed: Arc<AtomicU64>,
}

impl DroppedLines {
    /// How many lines were dropped so far: the output was too slow, failed or panicked.
    pub fn count(&self) -> u64 {
        self.no_room.dropped_lines() as u64 + self.failed.load(Ordering::Relaxed)
    }
}

/// The output, and how many lines it did not take. The writer thread writes each line in one call of `write_all`.
struct Output<W> {
    writer: W,
    /// Whether the output panicked. It is not called again.
    has_panicked: bool,
    failed: Arc<AtomicU64>,
}

impl<W: Write> Output<W> {
    /// Calls the output. A panic would end the writer thread, and with it the count of what is still to be written.
    fn call<T>(&mut self, work: impl FnOnce(&mut W) -> io::Result<T>) -> io::Result<T> {
        if self.has_panicked {
            return Err(io::Error::other("the output panicked"));
        }
        let writer = &mut self.writer;
        catch_unwind(AssertUnwindSafe(|| work(writer))).unwrap_or_else(|_| {
            self.has_panicked = true;
            Err(io::Error::other("the output panicked"))
        })
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.call(|writer| writer.write(bytes))
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        self.call(|writer| writer.write_all(line)).inspect_err(|_| {
            self.failed.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        // The writer thread would print an error of the last flush to stderr.
        let _ = self.call(W::flush);
        Ok(())
    }
}

impl fmt::Debug for JsonLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLines").finish_non_exhaustive()
    }
}

impl fmt::Debug for JsonLinesGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLinesGuard").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

impl fmt::Debug for DroppedLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DroppedLines").field(&self.count()).finish()
    }
}

/// JSON lines on standard output: `timestamp` (RFC 3339, UTC), `level`, `target`, `message`, the event's fields and, within an
/// OpenTelemetry span, its `trace_id` and `span_id`.
///
/// ```
/// use tollgate::telemetry::json_lines;
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let (lines, _guard) = json_lines();
/// let subscriber = tracing_subscriber::registry().with(lines);
/// tracing::subscriber::with_default(subscriber, || tracing::info!(answer = 42, "hello"));
/// // {"timestamp":"2026-01-31T12:00:00.123456Z","level":"INFO","target":"…","message":"hello","answer":42}
/// ```
pub fn json_lines() -> (JsonLines, JsonLinesGuard) {
    json_lines_to(std::io::stdout())
}

/// JSON lines to any writer.
pub fn json_lines_to(writer: impl Write + Send + 'static) -> (JsonLines, JsonLinesGuard) {
    let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(WAITING_LINES);
    let failed = Arc::new(AtomicU64::new(0));
    let output = Output { writer, has_panicked: false, failed: failed.clone() };
    let (writer, worker) = builder.thread_name("tollgate-log").finish(output);
    let dropped = DroppedLines { no_room: writer.error_counter(), failed };
    (JsonLines { writer }, JsonLinesGuard { dropped, _worker: worker })
}

impl<S: Subscriber> Layer<S> for JsonLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let line = Line::of(event).end();
        // This fails only if the writer has ended, and then there is no way to report it.
        let _ = self.writer.clone().write_all(line.as_bytes());
    }
}

/// A JSON object that is being written.
struct Line(String);

impl Line {
    fn of(event: &Event<'_>) -> Line {
        let mut timestamp = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
        let mut line = Line(String::with_capacity(512));
        line.text("timestamp", &timestamp);
        line.text("level", event.metadata().level().as_str());
        line.text("target", event.metadata().target());
        event.record(&mut line);
        let context = opentelemetry::Context::current();
        let span = context.span().span_context().clone();
        if span.is_valid() {
            line.text("trace_id", &span.trace_id().to_string());
            line.text("span_id", &span.span_id().to_string());
        }
        line
    }

    fn end(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }

    fn name(&mut self, name: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&quoted(name));
        self.0.push(':');
    }

    fn field_name(&mut self, field: &Field) {
        match OWN_NAMES.contains(&field.name()) {
            true => self.name(&format!("field_{}", field.name())),
            false => self.name(field.name()),
        }
    }

    fn text(&mut self, name: &str, text: &str) {
        self.name(name);
        self.0.push_str(&quoted(text));
    }

    fn number(&mut self, field: &Field, number: impl fmt::Display) {
        self.field_name(field);
        let _ = write!(self.0, "{number}");
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        // Numbers that JSON does not have become null.
        self.number(field, serde_json::Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.number(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.number(field, value);
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.number(field, value);
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.number(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.number(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.field_name(field);
        self.0.push_str(&quoted(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
