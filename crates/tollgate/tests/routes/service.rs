//! A tower service from a function: what axum's router is in a real program.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use http::{Request, Response};
use tower::Service;

#[derive(Clone)]
pub(crate) struct Of<F>(F);

pub(crate) fn of<F>(answer: F) -> Of<F> {
    Of(answer)
}

impl<F, B> Service<Request<B>> for Of<F>
where
    F: Fn(&Request<B>) -> Response<String>,
{
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        ready(Ok((self.0)(&request)))
    }
}
