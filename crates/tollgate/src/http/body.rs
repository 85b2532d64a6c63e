//! The body of a response: the service's own, passed on, or the body of a refusal.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::after::After;

pin_project! {
    /// The body of a limited service's answer: passed on as it comes, or the few lines of a refusal.
    pub struct LimitedBody<B> {
        #[pin]
        part: Part<B>,
    }
}

pin_project! {
    #[project = Which]
    enum Part<B> {
        Passed { #[pin] body: B, after: Option<Box<After>> },
        Own { bytes: Bytes },
    }
}

impl<B> LimitedBody<B> {
    /// Passes a body on. The work that is left for the request is done when the body ends or is dropped.
    pub(super) fn passed(body: B, after: Option<Box<After>>) -> LimitedBody<B> {
        LimitedBody { part: Part::Passed { body, after } }
    }

    pub(super) fn own(bytes: Bytes) -> LimitedBody<B> {
        LimitedBody { part: Part::Own { bytes } }
    }
}

impl<B: Body> Body for LimitedBody<B>
where
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().part.project() {
            Which::Passed { body, after } => {
                let frame = ready!(body.poll_frame(context));
                match &frame {
                    Some(Ok(frame)) => {
                        if let (Some(data), Some(after)) = (frame.data_ref(), after.as_mut()) {
                            after.sent(data.remaining());
                        }
                    }
                    Some(Err(_)) | None => *after = None,
                }
                Poll::Ready(frame)
            }
            Which::Own { bytes } if bytes.is_empty() => Poll::Ready(None),
            Which::Own { bytes } => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes).into())))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.part {
            Part::Passed { body, .. } => body.is_end_stream(),
            Part::Own { bytes } => bytes.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.part {
            Part::Passed { body, .. } => body.size_hint(),
            Part::Own { bytes } => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}

impl<B> std::fmt::Debug for LimitedBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LimitedBody").finish_non_exhaustive()
    }
}
