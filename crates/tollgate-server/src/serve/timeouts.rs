//! Timeouts of a connection.
//!
//! A peer may be silent between two requests for a while. Once it has started a request, it must finish it soon, however slowly
//! its bytes come: first its head, then all of it. A peer that does not read its response is closed too. Only the reader of
//! requests knows where a head ends, and reports it ([`Progress`]). HTTP's own timer for heads does not fit: it also runs between
//! two requests, and closes idle connections. There is one timer for a connection, set again when it fires, and brought forward
//! every few seconds at most: a request costs two readings of the clock and little else.
//!
//! A call of a language model takes as long as its model does, and is silent meanwhile. Its handler reports that, too: then only
//! a peer that does not read its response is closed.
//!
//! A request that is refused before all of it has come gets a lingering close: closing with unread bytes would make the peer's
//! system discard the response.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::unconstrained;
use tokio::time::{Instant, Sleep};

/// How long, and for how many bytes, a refused peer is listened to so that it gets to read why.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1024 * 1024;

/// How long a peer is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// For the first byte of all.
    pub(crate) greeting: Duration,
    /// From the first byte of a request to the end of its head.
    pub(crate) head: Duration,
    /// From the first byte of a request to the first byte of its answer.
    pub(crate) busy: Duration,
    /// Between requests, and for each byte of an answer to be taken.
    pub(crate) idle: Duration,
}

/// The progress of a request, reported by its reader.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<AtomicU8>);

const HEAD_IS_IN: u8 = 1;
const UNREAD: u8 = 2;
const LONG: u8 = 3;

impl Progress {
    /// The head of a request has come.
    pub(crate) fn head_is_in(&self) {
        self.0.store(HEAD_IS_IN, Ordering::Relaxed);
    }

    /// The answer may take long, in whole and between any two bytes of it.
    pub(crate) fn takes_long(&self) {
        self.0.store(LONG, Ordering::Relaxed);
    }

    /// An answer that takes long has ended.
    pub(crate) fn is_answered(&self) {
        let _ = self.0.compare_exchange(LONG, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// It is answered though there is more of it.
    pub(crate) fn leaves_unread(&self) {
        self.0.store(UNREAD, Ordering::Relaxed);
    }

    fn is(&self, state: u8) -> bool {
        self.0.load(Ordering::Relaxed) == state
    }

    fn answered(&self) {
        if self.is(HEAD_IS_IN) {
            self.0.store(0, Ordering::Relaxed);
        }
    }
}

/// A stream that ends with an error when its peer is too slow.
pub(crate) struct TimedStream<S> {
    stream: S,
    timeouts: Timeouts,
    progress: Progress,
    deadline: Instant,
    /// When the request began that is not answered yet, if its head has still to come.
    head_since: Option<Instant>,
    is_busy: bool,
    /// Since when the peer takes nothing of its answer.
    stalled_since: Option<Instant>,
    /// How many bytes more are read of a peer that was refused.
    linger_bytes_left: Option<usize>,
    timer: Pin<Box<Sleep>>,
    /// Whether the timer has a waker.
    is_awaited: bool,
}

impl<S> TimedStream<S> {
    pub(crate) fn new(stream: S, timeouts: Timeouts) -> TimedStream<S> {
        let deadline = Instant::now() + timeouts.greeting;
        TimedStream {
            stream,
            timeouts,
            progress: Progress::default(),
            deadline,
            head_since: None,
            is_busy: false,
            stalled_since: None,
            linger_bytes_left: None,
            timer: Box::pin(tokio::time::sleep_until(deadline)),
            is_awaited: false,
        }
    }

    /// The handle for reporting the progress of a request.
    pub(crate) fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Whether the peer's time is over. A connection stays with the task that it began in, so the waker is registered once.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        if self.is_awaited && !self.timer.is_elapsed() {
            return false;
        }
        // Polls outside tokio's cooperative budget: a task that has used up its budget gets `Pending` without a registered waker.
        while Pin::new(&mut unconstrained(self.timer.as_mut())).poll(context).is_ready() {
            if let Some(began) = self.head_since
                && self.progress.is(HEAD_IS_IN)
            {
                self.head_since = None;
                self.deadline = began + self.timeouts.busy;
            }
            let now = Instant::now();
            if self.progress.is(LONG) {
                self.head_since = None;
                self.deadline = self.stalled_since.unwrap_or(now) + self.timeouts.idle;
            }
            if now >= self.deadline {
                return true;
            }
            let deadline = self.deadline;
            self.timer.as_mut().reset(deadline);
        }
        self.is_awaited = true;
        false
    }

    /// A request begins. The timer is brought forward if it is set for later: an idle peer has had longer.
    fn begins(&mut self) {
        let now = Instant::now();
        self.is_busy = true;
        self.head_since = Some(now);
        self.deadline = now + self.timeouts.head;
        if self.timer.deadline() > self.deadline {
            let deadline = self.deadline;
            self.timer.as_mut().reset(deadline);
            self.is_awaited = false;
        }
    }

    fn wrote(&mut self) {
        self.is_busy = false;
        self.stalled_since = None;
        self.head_since = None;
        self.progress.answered();
        self.deadline = Instant::now() + self.timeouts.idle;
    }
}

fn too_slow() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer is too slow")
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        match Pin::new(&mut this.stream).poll_read(context, buffer) {
            Poll::Ready(read) => {
                if !this.is_busy && buffer.filled().len() > before {
                    this.begins();
                }
                Poll::Ready(read)
            }
            Poll::Pending if this.is_over(context) => Poll::Ready(Err(too_slow())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.stream).poll_write(context, bytes) {
            Poll::Ready(wrote) => {
                this.wrote();
                Poll::Ready(wrote)
            }
            Poll::Pending => {
                this.stalled_since.get_or_insert_with(Instant::now);
                if this.is_over(context) { Poll::Ready(Err(too_slow())) } else { Poll::Pending }
            }
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.stream).poll_write_vectored(context, slices) {
            Poll::Ready(wrote) => {
                this.wrote();
                Poll::Ready(wrote)
            }
            Poll::Pending => {
                this.stalled_since.get_or_insert_with(Instant::now);
                if this.is_over(context) { Poll::Ready(Err(too_slow())) } else { Poll::Pending }
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.linger_bytes_left.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            if !this.progress.is(UNREAD) {
                return Poll::Ready(Ok(()));
            }
            this.linger_bytes_left = Some(LINGER_BYTES);
            this.timer.as_mut().reset(Instant::now() + LINGER);
        }
        let mut bytes = [0; 4 * 1024];
        while let Some(left @ 1..) = this.linger_bytes_left {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut this.stream).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    this.linger_bytes_left = Some(left.saturating_sub(buffer.filled().len()));
                }
                Poll::Pending if this.timer.as_mut().poll(context).is_pending() => return Poll::Pending,
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        greeting: Duration::from_secs(7),
        head: Duration::from_secs(5),
        busy: Duration::from_secs(15),
        idle: Duration::from_secs(60),
    };

    fn pair() -> (DuplexStream, TimedStream<DuplexStream>) {
        let (peer, stream) = tokio::io::duplex(64);
        (peer, TimedStream::new(stream, TIMEOUTS))
    }

    /// A request of three bytes and its answer, after which the connection is idle.
    async fn exchange(peer: &mut DuplexStream, stream: &mut TimedStream<DuplexStream>) {
        peer.write_all(b"ask").await.expect("room");
        stream.read_exact(&mut [0; 3]).await.expect("a request");
        stream.progress().head_is_in();
        stream.write_all(b"answer").await.expect("room");
        peer.read_exact(&mut [0; 6]).await.expect("an answer");
    }

    /// Seconds until a peer that sends one byte a second is closed; its head is complete after `head` bytes.
    async fn given_up_after(
        mut peer: DuplexStream,
        mut stream: TimedStream<DuplexStream>,
        head: usize,
    ) -> u64 {
        let dripping = tokio::spawn(async move {
            while peer.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let started = Instant::now();
        let mut count = 0;
        let error = loop {
            match stream.read_u8().await {
                Ok(_) => count += 1,
                Err(error) => break error,
            }
            if count == head {
                stream.progress().head_is_in();
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(stream);
        dripping.await.expect("it notices");
        started.elapsed().as_secs()
    }

    /// The peer of a call that takes long may be silent for an hour, between any two bytes, but has to read.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_takes_long_is_waited_for_and_a_peer_that_does_not_read_is_not() {
        let (mut peer, stream) = tokio::io::duplex(16);
        let mut stream = TimedStream::new(stream, TIMEOUTS);
        let progress = stream.progress();
        peer.write_all(b"POST /").await.expect("sent");
        let mut bytes = [0; 16];
        assert_eq!(stream.read(&mut bytes).await.expect("read"), 6);
        progress.head_is_in();
        progress.takes_long();
        let hour = Duration::from_secs(3_600);
        assert!(tokio::time::timeout(hour, stream.read(&mut bytes)).await.is_err(), "it is waited for");
        stream.write_all(b"first").await.expect("written");
        assert!(tokio::time::timeout(hour, stream.read(&mut bytes)).await.is_err(), "and so is the rest");
        let began = Instant::now();
        let error = stream.write_all(&[0; 64]).await.expect_err("nobody reads");
        assert_eq!((error.kind(), began.elapsed().as_secs()), (io::ErrorKind::TimedOut, 60));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_drips_is_given_up_in_time() {
        for (head, expected) in [(usize::MAX, 5), (3, 15), (5, 15), (6, 5)] {
            let (peer, stream) = pair();
            assert_eq!(given_up_after(peer, stream, head).await, expected, "a head of {head}");
        }
    }

    /// The timer was set for the end of its silence, and must not let it drip that long.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_drips_after_a_silence_is_given_up_as_soon() {
        for (silence, head, expected) in [(30, usize::MAX, 5), (59, usize::MAX, 5), (59, 3, 15), (0, 3, 15)] {
            let (mut peer, mut stream) = pair();
            exchange(&mut peer, &mut stream).await;
            let silent = tokio::time::timeout(Duration::from_secs(silence), stream.read_u8()).await;
            assert!(silent.is_err(), "it is waited for");
            let after = given_up_after(peer, stream, head).await;
            assert_eq!(after, expected, "{silence} s of silence, a head of {head}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_was_answered_may_be_silent_for_a_while() {
        let (mut peer, mut stream) = pair();
        for _ in 0..3 {
            exchange(&mut peer, &mut stream).await;
            tokio::time::sleep(Duration::from_secs(50)).await;
        }
        let started = Instant::now();
        let error = stream.read_u8().await.expect_err("it stays silent");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_given_up() {
        let (_peer, mut stream) = pair();
        let started = Instant::now();
        let error = stream.write_all(&[0; 1_000]).await.expect_err("nobody reads");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 60));
    }

    /// In a task that has used up its budget, timers return `Pending` without a waker.
    #[tokio::test(start_paused = true)]
    async fn a_busy_task_does_not_miss_that_a_peer_is_too_slow() {
        let (_peer, mut stream) = pair();
        let waiting = tokio::spawn(async move {
            std::future::poll_fn(|context| {
                while Box::pin(tokio::task::coop::consume_budget()).as_mut().poll(context).is_ready() {}
                let mut byte = [0];
                let read = Pin::new(&mut stream).poll_read(context, &mut ReadBuf::new(&mut byte));
                assert!(read.is_pending());
                Poll::Ready(())
            })
            .await;
            stream.read_u8().await.expect_err("silence").kind()
        });
        let ended = tokio::time::timeout(Duration::from_secs(3_600), waiting).await;
        assert_eq!(ended.expect("it ends").expect("it does not panic"), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_closed_soon() {
        let (_peer, mut stream) = pair();
        let started = Instant::now();
        let error = stream.read_u8().await.expect_err("silence");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 7));
    }

    /// How many bytes are read of a peer that was refused and sends so many more, if it then stays.
    async fn parted_after(is_refused: bool, more: usize) -> (usize, Duration) {
        let (mut peer, mut stream) = pair();
        peer.write_all(b"ask").await.expect("room");
        stream.read_exact(&mut [0; 3]).await.expect("a request");
        if is_refused {
            stream.progress().leaves_unread();
        }
        stream.write_all(b"no").await.expect("room");
        let sending = tokio::spawn(async move {
            let mut sent = 0;
            while sent < more && peer.write_all(&[0; 16]).await.is_ok() {
                sent += 16;
            }
            // It stays: it is not dropped before the end.
            (sent, peer)
        });
        let started = Instant::now();
        stream.shutdown().await.expect("an end");
        let took = started.elapsed();
        drop(stream);
        let (sent, _peer) = sending.await.expect("it ends");
        (sent, took)
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_peer_gets_to_read_why_but_is_not_listened_to_for_long() {
        assert_eq!(parted_after(false, 0).await, (0, Duration::ZERO));
        let (sent, took) = parted_after(true, 10_000).await;
        assert_eq!((sent, took.as_secs()), (10_000, 1));
        let (sent, took) = parted_after(true, 10 * LINGER_BYTES).await;
        assert!((LINGER_BYTES..2 * LINGER_BYTES).contains(&sent), "{sent}");
        assert_eq!(took, Duration::ZERO);
    }
}
