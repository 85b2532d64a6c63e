//! The beginning of an answer, which is kept back until it is known whether it is one.
//!
//! As long as nothing has been passed on, an attempt that fails can be made again, or answered with an error in the provider's own shape. So the
//! head of an answer waits for the first event of its stream, or for its whole body if that is short. `call.rs` calls this before it decides;
//! `pump.rs` passes on what was read here, and then the rest.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use tollgate_llm::{Event, EventKind};

use super::pump::{Answer, End};

/// How many bytes of an answer are kept back: of a stream until its first event, of any other until its end.
const MOST_BEGUN: usize = 64 * 1024;

/// How long a stream of only comments and pings is held back.
const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// How an answer has begun.
pub(super) enum Begun {
    Well,
    /// With an error and nothing else: the error's data, and all that has come.
    Error {
        data: String,
        bytes: Bytes,
    },
    /// It was cut, or nothing came, before a single byte of it.
    Cut,
    Silent,
}

/// Reads a short answer that is no stream of events up to its end, so that one which breaks off can still be answered with an error. Of a long one only the
/// beginning is kept back, and of one that was to be streamed only the first bytes.
pub(super) async fn first_bytes(answer: &mut Answer, is_streamed: bool) -> Begun {
    let mut begun = 0;
    while begun == 0 || (begun <= MOST_BEGUN && !is_streamed) {
        match tokio::time::timeout(answer.silence, answer.incoming.frame()).await {
            Ok(Some(Ok(frame))) => {
                let Ok(piece) = frame.into_data() else { continue };
                begun += piece.len();
                answer.begun.push((piece, Vec::new()));
            }
            Ok(Some(Err(_))) => return Begun::Cut,
            Err(_) => return Begun::Silent,
            Ok(None) => {
                answer.end = Some(End::Whole);
                break;
            }
        }
    }
    Begun::Well
}

/// Whether an event is a comment or a ping.
fn says_nothing(event: &Event) -> bool {
    #[derive(serde::Deserialize)]
    struct Named<'a> {
        #[serde(borrow, rename = "type")]
        kind: Cow<'a, str>,
    }
    let data = event.data();
    event.kind == EventKind::Other
        && data.is_none_or(|data| {
            serde_json::from_str::<Named<'_>>(&data).is_ok_and(|named| named.kind == "ping")
        })
}

/// Reads up to the first event of a stream that says something.
pub(super) async fn first_event(answer: &mut Answer) -> Begun {
    let Some(reader) = answer.reader.as_mut() else { return Begun::Well };
    let until = Instant::now() + LONGEST_SILENCE;
    loop {
        let longest = match answer.begun.is_empty() {
            true => answer.silence,
            false => answer.silence.min(until.saturating_duration_since(Instant::now())),
        };
        let frame = match tokio::time::timeout(longest, answer.incoming.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => {
                answer.end = Some(End::Whole);
                return Begun::Well;
            }
            Err(_) if answer.begun.is_empty() => return Begun::Silent,
            Err(_) if longest < answer.silence => return Begun::Well,
            Ok(Some(Err(_))) if answer.begun.is_empty() => return Begun::Cut,
            Err(_) | Ok(Some(Err(_))) => {
                answer.end = Some(End::Broken);
                return Begun::Well;
            }
        };
        let Ok(piece) = frame.into_data() else { continue };
        let events = reader.feed(&piece);
        let error = events.iter().find(|event| event.kind == EventKind::Error);
        let error = error.map(|event| event.data().unwrap_or_default().into_owned());
        // Comments and pings are held back, because an error may follow them, but for `LONGEST_SILENCE` at most.
        let is_any = events.iter().any(|event| !says_nothing(event))
            || (!events.is_empty() && Instant::now() >= until);
        answer.begun.push((piece, events));
        if let Some(data) = error.filter(|_| !reader.streamed().has_content()) {
            let bytes: Vec<u8> = answer.begun.iter().flat_map(|(piece, _)| piece.iter().copied()).collect();
            return Begun::Error { data, bytes: bytes.into() };
        }
        let begun: usize = answer.begun.iter().map(|(piece, _)| piece.len()).sum();
        if is_any || begun > MOST_BEGUN {
            return Begun::Well;
        }
    }
}
