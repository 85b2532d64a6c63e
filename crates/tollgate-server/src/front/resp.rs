//! The protocol of Redis, for programs that have a client of it already: `CL.THROTTLE` as redis-cell answers it, and
//! `TOLLGATE.CHECK` for limits of the policy.
//!
//! Everything that one read brought is answered in one write. Where the counters are in this process all of it is decided in one
//! go, without allocating; where they are remote, a pipeline is charged by `charge_each`, many commands in one call of the store
//! (`pipeline.rs`). `parse.rs` finds commands, `request.rs` reads the two that ask for a decision, `session.rs` answers all others,
//! `queue.rs` keeps those of a transaction, `reply.rs` writes. The limits that a connection used last are at hand (`limiters.rs`).

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
#[cfg(test)]
mod in_flight;
mod limiters;
mod parse;
mod pipeline;
mod queue;
mod reply;
mod request;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tollgate::store::Micros;
use tollgate::{Key, Outcome, Reason, Tollgate};

use self::limiters::LimiterCache;
use self::parse::Spans;
use self::pipeline::Pipeline;
use self::reply::Reply;
use self::request::{Mistake, Request, canonical, write_check, write_throttle};
use self::session::{Session, Then};
use super::undecided::words;
use crate::app::{App, Bounds};
use crate::token::Token;

/// How much is read at once: at first, and once a read has brought so much.
const LEAST_READ: usize = 4 * 1024;
const MOST_READ: usize = 64 * 1024;

/// How many bytes of answers are written at once, at least while there are more.
const FULL: usize = 64 * 1024;

/// How long a peer may take to notice that the connection has ended, and how much it may send meanwhile.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1024 * 1024;

/// The face: what all its connections share.
pub(crate) struct Face {
    app: Arc<App>,
    password: Option<Arc<Token>>,
    connections: AtomicU64,
}

/// One connection, without its stream.
struct Connection {
    session: Session,
    reply: Reply,
    limiters: LimiterCache,
    spans: Spans,
    /// A key of `CL.THROTTLE`, as text.
    text: Vec<u8>,
}

/// Why answering stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// There is no further whole command.
    Done,
    /// There may be more, but it is time to write.
    Full,
    /// What was queued comes next.
    Executes,
    /// The connection ends.
    Ended,
}

impl Face {
    pub(crate) fn new(app: Arc<App>, password: Option<Token>) -> Arc<Face> {
        Arc::new(Face { app, password: password.map(Arc::new), connections: AtomicU64::new(0) })
    }

    /// Serves one connection until its peer is done, or the server is: what was read is answered first.
    pub(crate) async fn speak<S>(self: Arc<Self>, mut stream: S, mut closing: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let id = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let mut connection = Connection::new(id, self.password.clone(), self.app.bounds);
        let mut input = BytesMut::new();
        let mut read_size = LEAST_READ;
        loop {
            input.reserve(read_size);
            let read = tokio::select! {
                biased;
                _ = closing.wait_for(|closing| *closing) => break,
                read = stream.read_buf(&mut input) => read,
            };
            match read {
                Ok(0) | Err(_) => return,
                Ok(size) if size >= read_size => read_size = (2 * read_size).min(MOST_READ),
                Ok(_) => {}
            }
            let stop = loop {
                let state = self.app.state();
                let (answered, stop) = match state.is_local() {
                    true => connection.answer_local(&state.gate, &input),
                    false => connection.answer_remote(&state.gate, &input).await,
                };
                input.advance(answered);
                if stop == Stop::Executes {
                    // As if they came only now, and in one piece.
                    let rest = input.split();
                    input.extend_from_slice(&connection.session.take_queue());
                    input.extend_from_slice(&rest);
                }
                if !connection.reply.bytes.is_empty() {
                    if stream.write_all(&connection.reply.bytes).await.is_err() {
                        return;
                    }
                    connection.reply.bytes.clear();
                }
                if !matches!(stop, Stop::Full | Stop::Executes) {
                    break stop;
                }
            };
            if stop == Stop::Ended {
                break;
            }
        }
        lingering_close(stream, input).await;
    }
}

/// Ends a connection so that what was written last arrives: what the peer still sends is read, because closing on it would make
/// its machine throw away what it has not read yet.
async fn lingering_close<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, mut input: BytesMut) {
    let rest = async {
        if stream.shutdown().await.is_err() {
            return;
        }
        let mut read = 0;
        while read < LINGER_BYTES {
            input.clear();
            input.reserve(LEAST_READ);
            match stream.read_buf(&mut input).await {
                Ok(size @ 1..) => read += size,
                _ => return,
            }
        }
    };
    let _ = tokio::time::timeout(LINGER, rest).await;
}

impl Connection {
    fn new(id: u64, password: Option<Arc<Token>>, bounds: Bounds) -> Connection {
        Connection {
            session: Session::new(id, password),
            reply: Reply::new(),
            limiters: LimiterCache::new(bounds),
            spans: Spans::new(),
            text: Vec::new(),
        }
    }

    /// Answers the whole commands in `bytes`, whose counters are in this process, and says how many bytes they were.
    fn answer_local(&mut self, gate: &Tollgate, bytes: &[u8]) -> (usize, Stop) {
        self.limiters.follow(gate);
        let Connection { session, reply, limiters, spans, text } = self;
        let mut at = 0;
        while reply.bytes.len() < FULL {
            let rest = &bytes[at..];
            match spans.find(rest) {
                Ok(Some(size)) => at += size,
                Ok(None) => return (at, Stop::Done),
                Err(fault) => {
                    reply.error(fault);
                    return (at, Stop::Ended);
                }
            }
            let Some(command) = spans.command(rest) else { continue };
            let request = if session.decides() { Request::read(&command) } else { None };
            match request {
                Some(Ok(request)) => write_local(limiters, text, &request, reply),
                Some(Err(mistake)) => reply.error(mistake),
                None => match session.answer(&command, reply) {
                    Then::GoesOn => {}
                    Then::Ends => return (at, Stop::Ended),
                    Then::Executes => return (at, Stop::Executes),
                },
            }
        }
        (at, Stop::Full)
    }

    /// The same where the counters are remote. What is not charged waits for the charges before it.
    async fn answer_remote(&mut self, gate: &Tollgate, bytes: &[u8]) -> (usize, Stop) {
        let mut pipeline = Pipeline::new(gate, self.limiters.bounds());
        let mut at = 0;
        while self.reply.bytes.len() < FULL {
            let rest = &bytes[at..];
            let found = self.spans.find(rest);
            let command = match found {
                Ok(Some(size)) => {
                    at += size;
                    self.spans.command(rest)
                }
                Ok(None) | Err(_) => {
                    pipeline.decide(&mut self.reply).await;
                    let Err(fault) = found else { return (at, Stop::Done) };
                    self.reply.error(fault);
                    return (at, Stop::Ended);
                }
            };
            let Some(command) = command else { continue };
            let request = if self.session.decides() { Request::read(&command) } else { None };
            if let Some(Ok(request)) = request {
                pipeline.add(request);
                if pipeline.is_full() {
                    pipeline.decide(&mut self.reply).await;
                }
                continue;
            }
            pipeline.decide(&mut self.reply).await;
            match request {
                Some(Ok(_)) => {}
                Some(Err(mistake)) => self.reply.error(mistake),
                None => match self.session.answer(&command, &mut self.reply) {
                    Then::GoesOn => {}
                    Then::Ends => return (at, Stop::Ended),
                    Then::Executes => return (at, Stop::Executes),
                },
            }
        }
        pipeline.decide(&mut self.reply).await;
        (at, Stop::Full)
    }
}

#[inline]
fn write_local(limiters: &mut LimiterCache, text: &mut Vec<u8>, request: &Request<'_>, reply: &mut Reply) {
    if let Err(mistake) = decide_local(limiters, text, request, reply) {
        reply.error(mistake);
    }
}

#[inline]
fn decide_local(
    limiters: &mut LimiterCache,
    text: &mut Vec<u8>,
    request: &Request<'_>,
    reply: &mut Reply,
) -> Result<(), Mistake> {
    match request {
        Request::Throttle { key, bucket, quantity } => {
            let limiter = limiters.bucket(bucket)?;
            let key = canonical(key, text)?;
            let outcome = match quantity {
                0 => limiter.status(key),
                _ => limiter.charge(key, *quantity).map_err(undecided)?,
            };
            write_throttle(reply, outcome.numbers(), *quantity);
        }
        Request::Check { limit, key, cost } => {
            let limiter = limiters.limit(limit)?;
            let outcome = limiter.charge(key, *cost).map_err(undecided)?;
            match outcome.reason() {
                Reason::MalformedKey => drop(parsed(key)?),
                Reason::NeedsPermit => return Err(needs_permit(limit)),
                _ => {}
            }
            write_check(reply, limit, &counted(&outcome));
        }
    }
    Ok(())
}

/// The numbers of an answer as it counts: a shadow limit lets pass what it would deny.
fn counted(outcome: &Outcome) -> tollgate::store::Outcome {
    let numbers = *outcome.numbers();
    match outcome.would_deny() {
        true => tollgate::store::Outcome { allowed: true, retry_after: Some(Micros::ZERO), ..numbers },
        false => numbers,
    }
}

/// A concurrency limit cannot be checked: nothing would be held that could be released.
fn needs_permit(limit: &str) -> Mistake {
    format!("ERR `{limit}` is a concurrency limit, and a check would hold nothing that could be released; reserve it over HTTP").into()
}

/// Parses a key, and refuses a malformed one, as the other faces do. The message omits the key, which must not appear in logs.
fn parsed(key: &str) -> Result<Key<'_>, Mistake> {
    Key::parse(key).map_err(|error| format!("ERR malformed key: {error}").into())
}

fn undecided(error: tollgate::Error) -> Mistake {
    let kind = if error.is_transient() { "TRYAGAIN" } else { "ERR" };
    format!("{kind} {}", words(&error)).into()
}
