//! Passes an answer on as it comes, and settles the call when it ends: in its own way, by a client that leaves, or broken off.
//!
//! A task of its own reads the upstream, so that a call is settled once whatever becomes of the client's connection. A client that
//! leaves closes the upstream's connection, and what was streamed until then is charged. No byte is changed or held back, but for the
//! usage of a stream that the gateway asked for and the client did not.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Either};
use hyper::body::{Frame, Incoming};
use tokio::sync::mpsc;
use tollgate_llm::{Admission, Api, Event, EventKind, EventReader, TrailLine, Usage, of_whole_answer};
use tracing::Instrument;

use super::super::json::Body;
use super::call::Named;
use super::{InFlight, Models};
use crate::serve::timeouts::Progress;

/// How many pieces may wait for a slow client.
const WAITING: usize = 8;

/// How much of an answer that is not streamed is kept to find its usage.
const MAX_BUFFERED: usize = 32 * 1024 * 1024;

/// An answer that has begun.
pub(super) struct Answer {
    pub(super) incoming: Incoming,
    /// Of a stream.
    pub(super) reader: Option<EventReader>,
    /// What has been read of it, and the events in it.
    pub(super) begun: Vec<(Bytes, Vec<Event>)>,
    /// Whether it has ended already.
    pub(super) end: Option<End>,
    pub(super) hides_usage: bool,
    pub(super) admission: Admission,
    pub(super) named: Named,
    pub(super) api: Api,
    pub(super) attempt: u32,
    /// When it was sent.
    pub(super) began: Instant,
    /// How long the upstream may be silent in the middle of it.
    pub(super) silence: Duration,
    pub(super) http_status: u16,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Whole,
    Left,
    Broken,
}

type Pieces = mpsc::Sender<Result<Bytes, io::Error>>;

/// The body that the client reads.
struct Passed {
    pieces: mpsc::Receiver<Result<Bytes, io::Error>>,
    /// Why it broke off, once that is known.
    broken: Option<io::Error>,
    progress: Progress,
}

impl hyper::body::Body for Passed {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match self.pieces.poll_recv(context) {
            // An error ends the connection at once. What came before it is written while this is pending.
            Poll::Ready(Some(Err(error))) => {
                self.broken = Some(error);
                context.waker().wake_by_ref();
                Poll::Pending
            }
            piece => piece.map(|piece| piece.map(|piece| piece.map(Frame::data))),
        }
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        self.progress.is_answered();
    }
}

/// Begins to pass an answer on.
pub(super) fn start(models: Arc<Models>, answer: Answer, progress: Progress, in_flight: InFlight) -> Body {
    let (sender, pieces) = mpsc::channel(WAITING);
    let pumping = async move {
        pump(&models, answer, sender).await;
        drop(in_flight);
    };
    tokio::spawn(pumping.in_current_span());
    Either::Right(BoxBody::new(Passed { pieces, broken: None, progress }))
}

async fn pump(models: &Models, mut answer: Answer, pieces: Pieces) {
    let mut whole = Vec::new();
    let mut end = answer.end;
    for (piece, events) in std::mem::take(&mut answer.begun) {
        if answer.reader.is_none() {
            whole.extend_from_slice(&piece);
        }
        if !pass(&pieces, &answer, piece, events).await {
            end = Some(End::Left);
            break;
        }
    }
    while end.is_none() {
        let frame = tokio::select! {
            biased;
            () = pieces.closed() => {
                end = Some(End::Left);
                break;
            }
            frame = tokio::time::timeout(answer.silence, answer.incoming.frame()) => frame,
        };
        match frame {
            Ok(None) => end = Some(End::Whole),
            Err(_) | Ok(Some(Err(_))) => end = Some(End::Broken),
            Ok(Some(Ok(frame))) => {
                let Ok(piece) = frame.into_data() else { continue };
                let events = match &mut answer.reader {
                    Some(reader) => reader.feed(&piece),
                    None => {
                        if whole.len() + piece.len() <= MAX_BUFFERED {
                            whole.extend_from_slice(&piece);
                        }
                        Vec::new()
                    }
                };
                if !pass(&pieces, &answer, piece, events).await {
                    end = Some(End::Left);
                }
                produced(&mut answer).await;
            }
        }
    }
    let end = end.unwrap_or(End::Whole);
    // Also where it is not passed on by event: what it says counts.
    if end == End::Whole
        && let Some(rest) = answer.reader.as_mut().and_then(EventReader::rest)
        && answer.hides_usage
        && rest.kind != EventKind::UsageOnly
    {
        let _ = pieces.send(Ok(rest.bytes.into())).await;
    }
    let Answer { incoming, reader, admission, named, api, attempt, began, http_status, .. } = answer;
    // Closes the upstream's connection if it has more to say.
    drop(incoming);
    let ended = Ended { end, reader, whole, named, api, attempt, began, http_status };
    // The answer ends where the upstream's did, however long its settlement takes.
    let ending = async move {
        if end == End::Broken {
            let _ = pieces.send(Err(io::Error::other("the upstream broke off"))).await;
        }
    };
    let settling = ended.settle(models, admission).instrument(tracing::info_span!("settle"));
    tokio::join!(ending, settling);
}

/// Passes a piece on as it is, or its events but for the usage that is hidden; false if the client has left.
async fn pass(pieces: &Pieces, answer: &Answer, piece: Bytes, events: Vec<Event>) -> bool {
    let piece = match answer.hides_usage && answer.reader.is_some() {
        false => piece,
        true => {
            let shown = events.into_iter().filter(|event| event.kind != EventKind::UsageOnly);
            shown.flat_map(|event| event.bytes).collect::<Vec<u8>>().into()
        }
    };
    piece.is_empty() || pieces.send(Ok(piece)).await.is_ok()
}

/// Charges what has been produced so far, for providers that count it so.
async fn produced(answer: &mut Answer) {
    let Some(reader) = &answer.reader else { return };
    if let Err(error) = answer.admission.produced(reader.streamed()).await {
        tracing::warn!(%error, "output could not be charged as it was produced");
    }
}

/// A call whose answer has ended.
struct Ended {
    end: End,
    reader: Option<EventReader>,
    whole: Vec<u8>,
    named: Named,
    api: Api,
    attempt: u32,
    began: Instant,
    http_status: u16,
}

impl Ended {
    /// Settles the call with what is known of it, and writes its line.
    async fn settle(mut self, models: &Models, admission: Admission) {
        let (estimated_input, reserved) = (admission.estimated_input(), admission.reserved());
        let group = admission.group().map(str::to_owned);
        let (usage, source) = match (&self.reader, self.end) {
            (Some(reader), _) => {
                let streamed = reader.streamed();
                match streamed.reported() {
                    Some(usage) => (Some(usage), "reported"),
                    // More may have come than was counted, so nothing is proven unused.
                    None if streamed.has_unread()
                        && estimated_input.saturating_add(streamed.output()) < reserved =>
                    {
                        (None, "estimated")
                    }
                    None => {
                        let input = streamed.input().unwrap_or_else(|| admission.estimate(0));
                        (Some(Usage { output: streamed.output(), ..input }), "estimated")
                    }
                }
            }
            (None, End::Whole) => {
                let whole = std::mem::take(&mut self.whole);
                match of_whole_answer(self.api, whole, admission.encoding()).await {
                    Some((usage, false)) => (Some(usage), "reported"),
                    Some((usage, true)) => (Some(admission.estimate(usage.output)), "estimated"),
                    None => (None, "estimated"),
                }
            }
            // It may have been written to its end at the provider.
            (None, End::Left | End::Broken) => (None, "estimated"),
        };
        let shown = usage.map(|usage| admission.completed(usage));
        let settled = match (usage, source) {
            (Some(usage), "reported") => admission.settle(usage).await,
            (Some(usage), _) => match self.reader.as_ref().and_then(|reader| reader.streamed().input()) {
                Some(input) => admission.settle_partial(Usage { output: usage.output, ..input }).await,
                None => admission.settle_estimated(usage.output, true).await,
            },
            (None, _) => admission.settle_estimated(0, false).await,
        };
        if let Err(error) = settled {
            tracing::warn!(%error, "a call could not be settled and stays charged as reserved");
        }
        let usage = shown.unwrap_or(Usage {
            input: estimated_input,
            cached: 0,
            output: reserved.saturating_sub(estimated_input),
        });
        let outcome = match self.end {
            End::Whole => "success",
            End::Left => "left",
            End::Broken => "broken",
        };
        let label = || self.named.label.clone();
        metrics::counter!("tollgate_llm_attempts_total", "model" => label(), "outcome" => outcome)
            .increment(1);
        metrics::counter!("tollgate_llm_tokens_total", "model" => label(), "kind" => "input")
            .increment(usage.input);
        metrics::counter!("tollgate_llm_tokens_total", "model" => label(), "kind" => "output")
            .increment(usage.output);
        models.write(&TrailLine {
            input_tokens: Some(usage.input),
            output_tokens: Some(usage.output),
            total_tokens: Some(usage.total()),
            attempt: Some(self.attempt),
            estimated_input: Some(estimated_input),
            reserved: Some(reserved),
            cached_tokens: Some(usage.cached),
            source: Some(source),
            http_status: Some(self.http_status),
            group,
            seconds: Some(self.began.elapsed().as_secs_f64()),
            reason: (self.end != End::Whole).then(|| format!("the answer ended early: {outcome}")),
            ..self.named.line(outcome)
        });
    }
}
