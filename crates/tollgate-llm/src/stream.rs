//! The events of a streamed answer: where they end, what they report, and what they have produced so far.
//!
//! Bytes go in as they come, in pieces of any size. Events come out as they were, byte for byte, so that a gateway that passes them on changes
//! nothing. What a stream reports of its usage is taken from it; what it does not report is counted from its text, which is what a
//! client that left early is charged for.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::count::{Encoding, Tokenizer};
use crate::usage::Usage;

/// The longest event that is looked into. A longer one is passed on unread.
const LONGEST_EVENT: usize = 4 * 1024 * 1024;

/// How much text is gathered before it is counted.
const GATHERED: usize = 4 * 1024;

/// One event of a stream, as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// All its bytes, the empty line at its end included.
    pub bytes: Vec<u8>,
    /// What it is.
    pub kind: EventKind,
}

impl Event {
    /// Its data, if it has some.
    pub fn data(&self) -> Option<Cow<'_, str>> {
        data(&self.bytes)
    }
}

/// The data of an event: its lines of data, joined.
fn data(event: &[u8]) -> Option<Cow<'_, str>> {
    // A stream may begin with a byte order mark.
    let text = std::str::from_utf8(event).ok()?.trim_start_matches('\u{feff}');
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start);
    match (lines.next()?, lines.next()) {
        (one, None) => Some(Cow::Borrowed(one)),
        (one, Some(two)) => {
            Some(Cow::Owned([one, two].into_iter().chain(lines).collect::<Vec<_>>().join("\n")))
        }
    }
}

/// What an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A part of the answer.
    Content,
    /// OpenAI's chunk without choices that has the usage of the whole stream.
    UsageOnly,
    /// An error, of either provider.
    Error,
    /// Anything else: comments, pings, beginnings and ends.
    Other,
}

/// What a stream has produced and reported so far.
#[derive(Clone, Debug)]
pub struct Streamed {
    encoding: Encoding,
    usage: Option<Usage>,
    has_final_output: bool,
    has_content: bool,
    has_unread: bool,
    text: String,
    counted: u64,
}

impl Streamed {
    /// Nothing yet.
    pub fn new(encoding: Encoding) -> Streamed {
        Streamed {
            encoding,
            usage: None,
            has_final_output: false,
            has_content: false,
            has_unread: false,
            text: String::new(),
            counted: 0,
        }
    }

    /// Whether a part of the answer has come.
    pub fn has_content(&self) -> bool {
        self.has_content
    }

    /// Whether something has come that could not be read, so that there may be more output than was counted.
    pub fn has_unread(&self) -> bool {
        self.has_unread
    }

    /// What the provider has reported, if it has reported the whole of it. An output of 0 is no report where a text has come.
    pub fn reported(&self) -> Option<Usage> {
        let usage = self.usage.filter(|_| self.has_final_output)?;
        Some(if usage.output == 0 { Usage { output: self.output(), ..usage } } else { usage })
    }

    /// The input that was reported, if it was.
    pub fn input(&self) -> Option<Usage> {
        self.usage.filter(|usage| usage.input > 0)
    }

    /// How many output tokens have come so far: as reported, else as counted, whichever is more.
    pub fn output(&self) -> u64 {
        let reported = self.usage.map_or(0, |usage| usage.output);
        reported.max(self.counted.saturating_add(self.encoding.count(&self.text)))
    }

    fn add(&mut self, text: &str) {
        self.has_content = true;
        self.text.push_str(text);
        if self.text.len() >= GATHERED {
            self.counted = self.counted.saturating_add(self.encoding.count(&self.text));
            self.text.clear();
        }
    }

    /// Anthropic reports input first and output again and again, cumulatively; OpenAI all of it once.
    fn report(&mut self, usage: Usage, is_first: bool) {
        let known = self.usage.get_or_insert(usage);
        if usage.input > 0 {
            (known.input, known.cached) = (usage.input, usage.cached);
        }
        known.output = known.output.max(usage.output);
        self.has_final_output |= !is_first;
    }
}

/// Splits a stream into events.
#[derive(Clone, Debug)]
pub struct EventReader {
    buffer: Vec<u8>,
    /// Up to where the buffer has been searched for the end of an event.
    searched: usize,
    streamed: Streamed,
}

#[derive(Deserialize)]
struct Data<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    /// Read apart, like the two below: one that is wrong must not hide the text beside it.
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
}

/// The usage within a part of an event.
fn usage_within(part: &RawValue) -> Option<Usage> {
    #[derive(Deserialize)]
    struct WithUsage<'a> {
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    Usage::read(serde_json::from_str::<WithUsage<'_>>(part.get()).ok()?.usage?.get())
}

impl EventReader {
    /// Of a model whose texts are counted so.
    pub fn new(encoding: Encoding) -> EventReader {
        EventReader { buffer: Vec::new(), searched: 0, streamed: Streamed::new(encoding) }
    }

    /// What the stream has produced so far.
    pub fn streamed(&self) -> &Streamed {
        &self.streamed
    }

    /// Takes the next bytes, and gives the events that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Event> {
        self.buffer.extend_from_slice(bytes);
        let mut events = Vec::new();
        let mut begin = 0;
        while let Some(end) = self.end_of_event(begin) {
            let bytes = self.buffer[begin..end].to_vec();
            (begin, self.searched) = (end, end);
            let kind = self.look(&bytes);
            events.push(Event { bytes, kind });
        }
        // Once for all of them: a piece may have thousands.
        self.buffer.drain(..begin);
        self.searched = self.buffer.len();
        if self.buffer.len() > LONGEST_EVENT {
            (self.searched, self.streamed.has_unread) = (0, true);
            events.push(Event { bytes: std::mem::take(&mut self.buffer), kind: EventKind::Other });
        }
        events
    }

    /// What is left when the stream has ended: an event without its empty line.
    pub fn rest(&mut self) -> Option<Event> {
        let bytes = std::mem::take(&mut self.buffer);
        self.searched = 0;
        (!bytes.is_empty()).then(|| Event { kind: self.look(&bytes), bytes })
    }

    /// Where the event that begins here ends: behind an empty line.
    fn end_of_event(&self, begin: usize) -> Option<usize> {
        let start = self.searched.saturating_sub(3).max(begin);
        for at in start..self.buffer.len() {
            let before = &self.buffer[begin..=at];
            if before.ends_with(b"\n\n") || before.ends_with(b"\n\r\n") {
                return Some(at + 1);
            }
        }
        None
    }

    fn look(&mut self, event: &[u8]) -> EventKind {
        let Some(data) = data(event) else {
            // A comment, or a line of its own, has no data; what is no text may have.
            self.streamed.has_unread |= std::str::from_utf8(event).is_err();
            return EventKind::Other;
        };
        match serde_json::from_str::<Data<'_>>(&data) {
            Ok(decoded) if data.starts_with('{') => self.take(&decoded),
            _ => {
                self.streamed.has_unread |= data.trim() != "[DONE]";
                EventKind::Other
            }
        }
    }

    fn take(&mut self, data: &Data<'_>) -> EventKind {
        let kind = data.kind.as_deref().unwrap_or_default();
        if data.error.is_some() || kind == "error" {
            return EventKind::Error;
        }
        if let Some(usage) = data.message.and_then(usage_within) {
            self.streamed.report(usage, true);
        }
        let of_event = data.usage.and_then(|usage| Usage::read(usage.get()));
        if let Some(usage) = of_event.or_else(|| data.response.and_then(usage_within)) {
            self.streamed.report(usage, false);
        }
        let before = self.streamed.has_content;
        self.streamed.has_content = false;
        for delta in data.choices.iter().flatten().filter_map(|choice| choice.delta).chain(data.delta) {
            self.gather(delta.get());
        }
        let is_content = self.streamed.has_content;
        self.streamed.has_content |= before;
        match &data.choices {
            Some(choices) if choices.is_empty() && data.usage.is_some() => EventKind::UsageOnly,
            _ if is_content => EventKind::Content,
            _ => EventKind::Other,
        }
    }

    /// Gathers what a model has written: all texts of a delta but those that name or describe.
    fn gather(&mut self, delta: &str) {
        let Ok(delta) = serde_json::from_str::<serde_json::Value>(delta) else { return };
        let mut left = vec![delta];
        while let Some(value) = left.pop() {
            match value {
                serde_json::Value::String(text) => self.streamed.add(&text),
                serde_json::Value::Array(items) => left.extend(items),
                serde_json::Value::Object(fields) => {
                    let described =
                        ["role", "type", "id", "index", "signature", "stop_reason", "stop_sequence"];
                    let written = fields.into_iter().filter(|(name, _)| !described.contains(&name.as_str()));
                    left.extend(written.map(|(_, value)| value));
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPENAI: &str = concat!(
        ": a comment\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hé\"}}],\"x\":[1]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"llo\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\"total_tokens\":9}}\n\n",
        "data: [DONE]\n\n",
    );

    const ANTHROPIC: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\"cache_read_input_tokens\":90,\"output_tokens\":1}}}\n\n",
        "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hello world\"}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":5}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":12}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );

    fn feed(text: &str, piece: usize) -> (Vec<Event>, EventReader) {
        let mut reader = EventReader::new(Encoding::O200k);
        let mut events: Vec<Event> =
            text.as_bytes().chunks(piece).flat_map(|bytes| reader.feed(bytes)).collect();
        events.extend(reader.rest());
        (events, reader)
    }

    /// What is wrong in one field hides nothing of the others, and what cannot be read at all is noted.
    #[test]
    fn what_lies_or_cannot_be_read_gives_nothing_back() {
        let text = r#""choices":[{"delta":{"content":"hello world"}}]"#;
        for (stream, output, has_unread) in [
            (format!("data: {{{text},\"usage\":{{\"prompt_tokens\":-1}}}}\n\n"), 2, false),
            (format!("data: {{{text},\"usage\":7,\"message\":\"x\",\"response\":[]}}\n\n"), 2, false),
            (format!("data: {{{text}}}\n\ndata: [DONE]\n\n: comment\n\nevent: ping\n\n"), 2, false),
            (format!("\u{feff}data: {{{text}}}\n\n"), 2, false),
            (format!("data: {{{text},\"choices\":1}}\n\n"), 0, true),
            ("data: <html>\n\n".to_owned(), 0, true),
            ("data: {\"choices\":[{\"delta\"\n\n".to_owned(), 0, true),
            (format!("data: {{{text}}}\r\rdata: [DONE]\r\r"), 0, true),
        ] {
            let (_, reader) = feed(&stream, 7);
            let streamed = reader.streamed();
            assert_eq!((streamed.output(), streamed.has_unread()), (output, has_unread), "{stream}");
            assert_eq!(streamed.reported(), None, "{stream}");
        }
        let mut reader = EventReader::new(Encoding::O200k);
        reader.feed(b"data: \xff\n\n");
        assert!(reader.streamed().has_unread());
        let mut reader = EventReader::new(Encoding::O200k);
        reader.feed(&vec![b'x'; LONGEST_EVENT + 1]);
        assert!(reader.streamed().has_unread());
        let (events, _) = feed("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":-1}}\n\n", 9);
        assert_eq!(events[0].kind, EventKind::UsageOnly, "hidden from who has not asked for it");
    }

    #[test]
    fn c7_no_byte_changes_however_a_stream_is_cut() {
        for text in [OPENAI, ANTHROPIC, "data: {\"choices\":[]}", "\n\n\n", "garbage\u{0}\n\ndata: {{{\n\n"] {
            for piece in [1, 2, 3, 7, 64, 4_096] {
                let (events, _) = feed(text, piece);
                let bytes: Vec<u8> = events.into_iter().flat_map(|event| event.bytes).collect();
                assert_eq!(bytes, text.as_bytes(), "pieces of {piece}");
            }
        }
    }

    #[test]
    fn c1_the_chunk_without_choices_is_known() {
        let (events, reader) = feed(OPENAI, 5);
        let usage_only: Vec<usize> =
            (0..events.len()).filter(|at| events[*at].kind == EventKind::UsageOnly).collect();
        assert_eq!(usage_only, [4]);
        assert_eq!(reader.streamed().reported(), Some(Usage { input: 7, cached: 0, output: 2 }));
    }

    #[test]
    fn c2_the_last_cumulative_output_counts() {
        let (_, reader) = feed(ANTHROPIC, 9);
        assert_eq!(reader.streamed().reported(), Some(Usage { input: 93, cached: 90, output: 12 }));
    }

    #[test]
    fn b5_a_report_of_nothing_hides_no_text() {
        let text = r#"data: {"choices":[{"delta":{"content":"hello world"}}]}"#;
        let usage = |usage: &str| format!("{text}\n\ndata: {{\"choices\":[],\"usage\":{usage}}}\n\n");
        let (_, reader) = feed(&usage(r#"{"prompt_tokens":7,"completion_tokens":0}"#), 9);
        assert_eq!(reader.streamed().reported(), Some(Usage { input: 7, cached: 0, output: 2 }));
        let (_, reader) = feed(&usage(r#"{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}"#), 9);
        assert_eq!((reader.streamed().reported(), reader.streamed().output()), (None, 2));
        // A stream whose beginning is missing.
        let (_, reader) = feed(&ANTHROPIC[ANTHROPIC.find("event: ping").unwrap()..], 9);
        let streamed = reader.streamed();
        assert_eq!((streamed.reported().map(|usage| usage.output), streamed.input()), (Some(12), None));
    }

    #[test]
    fn c3_a_stream_that_is_left_is_counted_by_its_text() {
        let end = OPENAI.find("data: {\"choices\":[],").unwrap();
        let (_, reader) = feed(&OPENAI[..end], 11);
        let streamed = reader.streamed();
        assert_eq!(streamed.reported(), None);
        assert_eq!(streamed.output(), Encoding::O200k.count("Héllo"));
        let end = ANTHROPIC.find("event: message_delta").unwrap();
        let (_, reader) = feed(&ANTHROPIC[..end], 11);
        assert_eq!(reader.streamed().reported(), None);
        assert_eq!(reader.streamed().input().map(|usage| usage.input), Some(93));
        assert_eq!(reader.streamed().output(), 2);
    }

    #[test]
    fn c5_errors_are_known_in_both_shapes() {
        for text in [
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n",
            "data: {\"error\":{\"message\":\"gone\"}}\n\n",
        ] {
            assert_eq!(feed(text, 4).0[0].kind, EventKind::Error, "{text}");
        }
    }

    #[test]
    fn an_event_without_end_is_passed_on() {
        let mut reader = EventReader::new(Encoding::O200k);
        let piece = vec![b'x'; 1024 * 1024];
        let passed: usize = (0..9).flat_map(|_| reader.feed(&piece)).map(|event| event.bytes.len()).sum();
        assert!(passed >= LONGEST_EVENT && reader.buffer.len() <= LONGEST_EVENT);
    }
}
