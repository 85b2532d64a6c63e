//! The protocol of Redis, for programs that have a client of it already: `CL.THROTTLE` as redis-cell answers it, and
//! `TOLLGATE.CHECK` for limits of the policy.
//!
//! Everything that one read brought is answered in one write. Where the counters are in this process all of it is decided in one
//! go, without allocating; where they are elsewhere those that concern different keys are asked for together, a few at a time, and
//! told in order. `parse.rs` finds commands, `question.rs` reads the two that ask for a decision, `session.rs` answers all others,
//! `queue.rs` keeps those of a transaction, `reply.rs` writes. The limits that a connection used last are at hand (`ways.rs`).

#[cfg(test)]
mod in_flight;
mod parse;
mod question;
mod queue;
mod reply;
mod session;
mod ways;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tollgate::store::Micros;
use tollgate::{Charge, Key, Outcome, Reason, Tollgate};

use self::parse::Spans;
use self::question::{Mistake, Question, canonical, tell_check, tell_throttle};
use self::reply::Reply;
use self::session::{Session, Then};
use self::ways::Ways;
use super::peer;
use super::together::goes_along;
use super::undecided::words;
use crate::app::{App, Bounds};
use crate::token::Token;

/// How much is read at once: at first, and once a read has brought so much.
const LEAST_READ: usize = 4 * 1024;
const MOST_READ: usize = 64 * 1024;

/// How many bytes of answers are written together, at least while there are more.
const FULL: usize = 64 * 1024;

/// How long a peer may take to notice that the connection has ended, and how much it may send meanwhile.
const PARTING: Duration = Duration::from_secs(1);
const PARTING_BYTES: usize = 1024 * 1024;

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
    ways: Ways,
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
                let (answered, stop) = match self.app.with_state(|state| connection.here(&state.gate, &input))
                {
                    Some(done) => done,
                    None => connection.elsewhere(&self.app.state().gate, &input).await,
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
        part(stream, input).await;
    }
}

/// Ends a connection so that what was written last arrives: what the peer still sends is read, because closing on it would make
/// its machine throw away what it has not read yet.
async fn part<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, mut input: BytesMut) {
    let rest = async {
        if stream.shutdown().await.is_err() {
            return;
        }
        let mut read = 0;
        while read < PARTING_BYTES {
            input.clear();
            input.reserve(LEAST_READ);
            match stream.read_buf(&mut input).await {
                Ok(size @ 1..) => read += size,
                _ => return,
            }
        }
    };
    let _ = tokio::time::timeout(PARTING, rest).await;
}

impl Connection {
    fn new(id: u64, password: Option<Arc<Token>>, bounds: Bounds) -> Connection {
        Connection {
            session: Session::new(id, password),
            reply: Reply::new(),
            ways: Ways::new(bounds),
            spans: Spans::new(),
            text: Vec::new(),
        }
    }

    /// Answers the whole commands in `bytes`, whose counters are in this process, and says how many bytes they were.
    fn here(&mut self, gate: &Tollgate, bytes: &[u8]) -> (usize, Stop) {
        self.ways.lead_to(gate);
        let Connection { session, reply, ways, spans, text } = self;
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
            let question = if session.decides() { Question::read(&command) } else { None };
            match question {
                Some(Ok(question)) => tell_here(ways, text, &question, reply),
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

    /// The same where the counters are elsewhere.
    async fn elsewhere(&mut self, gate: &Tollgate, bytes: &[u8]) -> (usize, Stop) {
        let bounds = self.ways.bounds();
        let mut together: Vec<Question<'_>> = Vec::new();
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
                    decide_elsewhere(gate, bounds, &mut together, &mut self.reply).await;
                    let Err(fault) = found else { return (at, Stop::Done) };
                    self.reply.error(fault);
                    return (at, Stop::Ended);
                }
            };
            let Some(command) = command else { continue };
            let question = if self.session.decides() { Question::read(&command) } else { None };
            // What is told in order, or charged to one key in order, waits for those before it.
            let goes_along = match &question {
                Some(Ok(question)) => goes_along(&together, question, Question::is_of_one_key),
                _ => false,
            };
            if !goes_along {
                decide_elsewhere(gate, bounds, &mut together, &mut self.reply).await;
            }
            match question {
                Some(Ok(question)) => together.push(question),
                Some(Err(mistake)) => self.reply.error(mistake),
                None => match self.session.answer(&command, &mut self.reply) {
                    Then::GoesOn => {}
                    Then::Ends => return (at, Stop::Ended),
                    Then::Executes => return (at, Stop::Executes),
                },
            }
        }
        decide_elsewhere(gate, bounds, &mut together, &mut self.reply).await;
        (at, Stop::Full)
    }
}

#[inline]
fn tell_here(ways: &mut Ways, text: &mut Vec<u8>, question: &Question<'_>, reply: &mut Reply) {
    if let Err(mistake) = decide_here(ways, text, question, reply) {
        reply.error(mistake);
    }
}

#[inline]
fn decide_here(
    ways: &mut Ways,
    text: &mut Vec<u8>,
    question: &Question<'_>,
    reply: &mut Reply,
) -> Result<(), Mistake> {
    match question {
        Question::Throttle { key, bucket, quantity } => {
            let limiter = ways.bucket(bucket)?;
            let key = canonical(key, text)?;
            let outcome = match quantity {
                0 => limiter.status(key),
                _ => limiter.charge(key, *quantity).map_err(undecided)?,
            };
            tell_throttle(reply, outcome.numbers(), *quantity);
        }
        Question::Check { limit, key, cost } => {
            let limiter = ways.limit(limit)?;
            let outcome = limiter.charge(key, *cost).map_err(undecided)?;
            match outcome.reason() {
                Reason::MalformedKey => sound(key)?,
                Reason::NeedsPermit => return Err(needs_permit(limit)),
                _ => {}
            }
            tell_check(reply, limit, &counted(&outcome));
        }
    }
    Ok(())
}

/// Decides what was gathered, and tells it in order.
async fn decide_elsewhere(
    gate: &Tollgate,
    bounds: Bounds,
    together: &mut Vec<Question<'_>>,
    reply: &mut Reply,
) {
    if together.is_empty() {
        return;
    }
    let decided = join_all(together.iter().map(|question| ask(gate, bounds, question))).await;
    for (question, decided) in together.drain(..).zip(decided) {
        match (question, decided) {
            (Question::Throttle { quantity, .. }, Ok(outcome)) => {
                tell_throttle(reply, outcome.numbers(), quantity);
            }
            (Question::Check { limit, .. }, Ok(outcome)) => tell_check(reply, limit, &counted(&outcome)),
            (_, Err(mistake)) => reply.error(mistake),
        }
    }
}

async fn ask(gate: &Tollgate, bounds: Bounds, question: &Question<'_>) -> Result<Outcome, Mistake> {
    let _share = peer::share().await;
    match question {
        Question::Throttle { key, bucket, quantity } => {
            let bucket = ways::open(gate, bounds, bucket)?;
            let mut text = Vec::new();
            let key = canonical(key, &mut text)?;
            match quantity {
                0 => gate.status(&bucket, key).await.map_err(undecided),
                _ => {
                    let charge = [Charge::new(&bucket, key).cost(*quantity)];
                    Ok(*gate.charge(&charge).await.map_err(undecided)?.binding())
                }
            }
        }
        Question::Check { limit, key, cost } => {
            sound(key)?;
            let charge = [Charge::new(*limit, *key).cost(*cost)];
            Ok(*gate.charge(&charge).await.map_err(undecided)?.binding())
        }
    }
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

/// Refuses a key that makes no sense, as the other faces do. The key itself is not told.
fn sound(key: &str) -> Result<(), Mistake> {
    Key::parse(key).map(drop).map_err(|error| format!("ERR malformed key: {error}").into())
}

fn undecided(error: tollgate::Error) -> Mistake {
    let kind = if error.is_transient() { "TRYAGAIN" } else { "ERR" };
    format!("{kind} {}", words(&error)).into()
}
