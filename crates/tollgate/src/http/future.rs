//! The response future of the layer: decides, may delay, calls the inner service, settles.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use tollgate_kernel::Micros;
use tower_service::Service;

use super::after::{After, Answered as Settles};
use super::body::LimitedBody;
use super::charge::{Admission, Deciding};
use super::lease::Lease;
use super::rate_limit_headers::RateLimitHeaders;
use crate::route::ResponseHead;

type Settling = Pin<Box<dyn Future<Output = ()> + Send>>;

pin_project! {
    /// The answer to come of a [`LimitService`](super::LimitService).
    pub struct LimitFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future, S::Response>,
    }
}

pin_project! {
    #[project = Now]
    // Nearly every request only visits `Inside`; the parts for other states are boxed to keep this small.
    enum State<S, B, F, R> {
        /// The store decides.
        AwaitingStore { decision: Deciding, waiting: Option<Box<Waiting<S, B>>> },
        /// A leaky bucket holds it back.
        Delayed { sleep: Pin<Box<tokio::time::Sleep>>, waiting: Option<Box<Waiting<S, B>>>, on: Option<OnAnswer> },
        /// The inner service has the request.
        Inside { #[pin] answer: F, on: Option<OnAnswer> },
        /// The response is there, and the charge is being settled.
        Settling { settling: Settling, answer: Option<Box<R>>, rate_limit_headers: Option<RateLimitHeaders> },
        /// The request did not reach the inner service.
        Stopped { answer: Option<Box<Response<Bytes>>> },
    }
}

/// A service that is ready, and the request that it will get.
struct Waiting<S, B> {
    service: S,
    request: Request<B>,
}

/// What is done with the response.
pub(super) struct OnAnswer {
    rate_limit_headers: RateLimitHeaders,
    after: Option<Box<After>>,
    /// The handle that the inner service got, if the request holds a lease.
    lease: Option<Lease>,
}

impl OnAnswer {
    /// For a request that passes. If it holds a lease, its extensions get a handle on it.
    #[inline]
    pub(super) fn of<B>(
        request: &mut Request<B>,
        rate_limit_headers: RateLimitHeaders,
        after: Option<Box<After>>,
    ) -> OnAnswer {
        let lease = after.as_ref().filter(|after| after.has_lease()).map(|_| Lease::new());
        if let Some(lease) = &lease {
            request.extensions_mut().insert(lease.clone());
        }
        OnAnswer { rate_limit_headers, after, lease }
    }
}

impl<S, B> LimitFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn new(state: State<S, B, S::Future, S::Response>) -> Self {
        LimitFuture { state }
    }

    pub(super) fn awaiting_store(decision: Deciding, service: S, request: Request<B>) -> Self {
        LimitFuture::new(State::AwaitingStore {
            decision,
            waiting: Some(Box::new(Waiting { service, request })),
        })
    }

    pub(super) fn delayed(delay: Micros, service: S, request: Request<B>, on: OnAnswer) -> Self {
        let waiting = Some(Box::new(Waiting { service, request }));
        LimitFuture::new(State::Delayed { sleep: sleep(delay), waiting, on: Some(on) })
    }

    pub(super) fn inside(answer: S::Future, on: OnAnswer) -> Self {
        LimitFuture::new(State::Inside { answer, on: Some(on) })
    }

    pub(super) fn stopped(answer: Box<Response<Bytes>>) -> Self {
        LimitFuture::new(State::Stopped { answer: Some(answer) })
    }
}

fn sleep(delay: Micros) -> Pin<Box<tokio::time::Sleep>> {
    Box::pin(tokio::time::sleep(std::time::Duration::from_micros(delay.get())))
}

impl<S, B, R> Future for LimitFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: http_body::Body,
    R::Data: From<Bytes>,
{
    type Output = Result<Response<LimitedBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(match ready!(self.poll_answer(context))? {
            Answered::Inside(answer, after) => answer.map(|body| LimitedBody::passed(body, after)),
            Answered::Here(answer) => answer.map(LimitedBody::own),
        }))
    }
}

/// Who answered the request.
pub(super) enum Answered<R> {
    /// The service inside; something may be left to do when its body ends.
    Inside(Response<R>, Option<Box<After>>),
    /// We have.
    Here(Box<Response<Bytes>>),
}

impl<S, B, R> LimitFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    /// The response, before its body is wrapped.
    #[inline]
    pub(super) fn poll_answer(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<Answered<R>, S::Error>> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                Now::AwaitingStore { decision, waiting } => {
                    let admission = ready!(decision.as_mut().poll(context));
                    match (admission, waiting.take()) {
                        (Admission::Stop(answer), _) => State::Stopped { answer: Some(answer) },
                        (Admission::Pass { delay, rate_limit_headers, after }, Some(mut waiting)) => {
                            let on = Some(OnAnswer::of(&mut waiting.request, rate_limit_headers, after));
                            if delay.get() == 0 {
                                State::Inside { answer: waiting.service.call(waiting.request), on }
                            } else {
                                State::Delayed { sleep: sleep(delay), waiting: Some(waiting), on }
                            }
                        }
                        (_, None) => panic!("{POLLED_AGAIN}"),
                    }
                }
                Now::Delayed { sleep, waiting, on } => {
                    ready!(sleep.as_mut().poll(context));
                    let mut waiting = waiting.take().expect(POLLED_AGAIN);
                    State::Inside { answer: waiting.service.call(waiting.request), on: on.take() }
                }
                Now::Inside { answer, on } => {
                    let answer = ready!(answer.poll(context))?;
                    let OnAnswer { rate_limit_headers, after, lease } = on.take().expect(POLLED_AGAIN);
                    let Some(mut after) = after else {
                        return Poll::Ready(Ok(passed(answer, rate_limit_headers, None)));
                    };
                    let head = ResponseHead {
                        status: answer.status(),
                        headers: answer.headers(),
                        extensions: answer.extensions(),
                    };
                    let is_upgraded = head.status == StatusCode::SWITCHING_PROTOCOLS;
                    let settling = match after.answered(&head) {
                        Settles::Settling(settling) => settling,
                        Settles::Settled => return Poll::Ready(Ok(passed(answer, rate_limit_headers, None))),
                        Settles::Waits => {
                            let after = match lease.filter(|_| is_upgraded) {
                                // The body is over at once, and the connection is not.
                                Some(lease) => {
                                    lease.hold(after);
                                    None
                                }
                                None => Some(after),
                            };
                            return Poll::Ready(Ok(passed(answer, rate_limit_headers, after)));
                        }
                    };
                    // Completed even if the client disconnects meanwhile.
                    let settling = tokio::spawn(settling);
                    State::Settling {
                        settling: Box::pin(async move { settling.await.unwrap_or_default() }),
                        answer: Some(Box::new(answer)),
                        rate_limit_headers: Some(rate_limit_headers),
                    }
                }
                Now::Settling { settling, answer, rate_limit_headers } => {
                    ready!(settling.as_mut().poll(context));
                    let answer = *answer.take().expect(POLLED_AGAIN);
                    return Poll::Ready(Ok(passed(
                        answer,
                        rate_limit_headers.take().unwrap_or_default(),
                        None,
                    )));
                }
                Now::Stopped { answer } => {
                    let answer = answer.take().expect(POLLED_AGAIN);
                    return Poll::Ready(Ok(Answered::Here(answer)));
                }
            };
            state.set(next);
        }
    }
}

/// The one mistake that a future cannot answer.
const POLLED_AGAIN: &str = "a future is not polled again after it was ready";

/// The response of the inner service, with the rate-limit headers.
#[inline(always)]
fn passed<R>(
    mut answer: Response<R>,
    rate_limit_headers: RateLimitHeaders,
    after: Option<Box<After>>,
) -> Answered<R> {
    rate_limit_headers.write(answer.headers_mut());
    Answered::Inside(answer, after)
}
