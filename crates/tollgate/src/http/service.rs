//! The service: charges a request before the inner service sees it.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use tower_service::Service;

use super::body::LimitedBody;
use super::charge::{self, Admission, Deciding};
use super::charges::{self, RouteCharges};
use super::future::{LimitFuture, OnAnswer};
use super::layer::Inner;
use super::refusal::Protocol;

/// A service with limits before it, made by a [`LimitLayer`](super::LimitLayer).
#[derive(Clone)]
pub struct LimitService<S> {
    service: S,
    inner: Arc<Inner>,
}

impl<S> LimitService<S> {
    pub(super) fn new(service: S, inner: Arc<Inner>) -> LimitService<S> {
        LimitService { service, inner }
    }
}

impl<S: std::fmt::Debug> std::fmt::Debug for LimitService<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LimitService").field("service", &self.service).finish_non_exhaustive()
    }
}

impl<S, B, R> Service<Request<B>> for LimitService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: http_body::Body,
    R::Data: From<Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = LimitFuture<S, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> LimitFuture<S, B> {
        let progress = {
            let mut route_charges = RouteCharges::new();
            if let Err(response) = charges::find(&self.inner, &request, &mut route_charges) {
                return LimitFuture::stopped(response);
            }
            if route_charges.is_empty() {
                Progress::Done(Admission::free())
            } else if self.inner.gate.engine.is_local() {
                Progress::Done(charge::decide_local(&self.inner, &route_charges, &request))
            } else {
                let protocol = Protocol::of(&request);
                Progress::Remote(charge::decide_remote(self.inner.clone(), route_charges, protocol))
            }
        };
        match progress {
            Progress::Done(admission) => self.go(admission, request),
            Progress::Remote(deciding) => {
                LimitFuture::awaiting_store(deciding, self.ready_service(), request)
            }
        }
    }
}

/// Whether a request may pass: known already, or pending in a remote store.
enum Progress {
    Done(Admission),
    Remote(Deciding),
}

impl<S: Clone> LimitService<S> {
    /// The service that was found ready; the next call gets a clone.
    fn ready_service(&mut self) -> S {
        let clone = self.service.clone();
        mem::replace(&mut self.service, clone)
    }

    #[inline]
    fn go<B, R>(&mut self, admission: Admission, mut request: Request<B>) -> LimitFuture<S, B>
    where
        S: Service<Request<B>, Response = Response<R>>,
    {
        match admission {
            Admission::Stop(answer) => LimitFuture::stopped(answer),
            Admission::Pass { delay, rate_limit_headers, after } => {
                let on = OnAnswer::of(&mut request, rate_limit_headers, after);
                if delay.get() == 0 {
                    LimitFuture::inside(self.service.call(request), on)
                } else {
                    LimitFuture::delayed(delay, self.ready_service(), request, on)
                }
            }
        }
    }
}
