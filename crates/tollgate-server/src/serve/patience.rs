//! A connection that is given up when nothing comes of it.
//!
//! A peer that is silent between two requests may stay a while; one that has begun a request must finish it soon, however
//! slowly its bytes come, and one that does not read its answer is not waited for either. There is one timer for a connection,
//! set again only when it fires: a request costs two readings of the clock and nothing else.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// How long a peer is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Between requests.
    pub(crate) idle: Duration,
    /// From the first byte of a request to the first byte of its answer, and for each byte of the answer to be taken.
    pub(crate) busy: Duration,
}

/// A stream that ends with an error when its peer is too slow.
pub(crate) struct Patient<S> {
    stream: S,
    patience: Patience,
    deadline: Instant,
    is_busy: bool,
    timer: Pin<Box<Sleep>>,
}

impl<S> Patient<S> {
    pub(crate) fn new(stream: S, patience: Patience) -> Patient<S> {
        // Whoever connects and says nothing has not begun a request, and has not been served either.
        let deadline = Instant::now() + patience.busy;
        Patient {
            stream,
            patience,
            deadline,
            is_busy: false,
            timer: Box::pin(tokio::time::sleep_until(deadline)),
        }
    }

    /// Whether the peer's time is over.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        while self.timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= self.deadline {
                return true;
            }
            let deadline = self.deadline;
            self.timer.as_mut().reset(deadline);
        }
        false
    }

    fn wrote(&mut self) {
        self.is_busy = false;
        self.deadline = Instant::now() + self.patience.idle;
    }
}

fn too_slow() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer is too slow")
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
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
                    this.is_busy = true;
                    this.deadline = Instant::now() + this.patience.busy;
                }
                Poll::Ready(read)
            }
            Poll::Pending if this.is_over(context) => Poll::Ready(Err(too_slow())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.stream).poll_write(context, bytes) {
            Poll::Ready(wrote) => {
                this.wrote();
                Poll::Ready(wrote)
            }
            Poll::Pending if this.is_over(context) => Poll::Ready(Err(too_slow())),
            Poll::Pending => Poll::Pending,
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
            Poll::Pending if this.is_over(context) => Poll::Ready(Err(too_slow())),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const PATIENCE: Patience = Patience { idle: Duration::from_secs(60), busy: Duration::from_secs(10) };

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_drips_is_given_up_in_time() {
        let (mut peer, stream) = tokio::io::duplex(64);
        let mut stream = Patient::new(stream, PATIENCE);
        let dripping = tokio::spawn(async move {
            while peer.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let started = Instant::now();
        let mut all = Vec::new();
        let error = stream.read_to_end(&mut all).await.expect_err("it is never finished");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 10));
        drop(stream);
        dripping.await.expect("it notices");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_was_answered_may_be_silent_for_a_while() {
        let (mut peer, stream) = tokio::io::duplex(64);
        let mut stream = Patient::new(stream, PATIENCE);
        for _ in 0..3 {
            peer.write_all(b"ask").await.expect("room");
            let mut asked = [0; 3];
            stream.read_exact(&mut asked).await.expect("a request");
            tokio::time::sleep(Duration::from_secs(5)).await;
            stream.write_all(b"answer").await.expect("room");
            peer.read_exact(&mut [0; 6]).await.expect("an answer");
            tokio::time::sleep(Duration::from_secs(50)).await;
        }
        let started = Instant::now();
        let error = stream.read_u8().await.expect_err("it stays silent");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_given_up() {
        let (_peer, stream) = tokio::io::duplex(64);
        let mut stream = Patient::new(stream, PATIENCE);
        let error = stream.write_all(&[0; 1_000]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_connects_and_says_nothing_is_not_waited_for_long() {
        let (_peer, stream) = tokio::io::duplex(64);
        let started = Instant::now();
        let error = Patient::new(stream, PATIENCE).read_u8().await.expect_err("silence");
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 10));
    }
}
