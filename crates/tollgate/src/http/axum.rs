//! The layer for axum: bodies stay axum's own type, so that axum need not box them again.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::LimitedBody;
use super::future::{Answered, LimitFuture};
use super::layer::LimitLayer;
use super::service::LimitService;

/// A [`LimitLayer`] that leaves axum's bodies as they are; made by [`LimitLayer::for_axum`].
#[derive(Clone, Debug)]
pub struct AxumLimitLayer(LimitLayer);

impl LimitLayer {
    /// The same layer for services that answer with axum's own body, as all of axum's routers do: it spares each answer an
    /// allocation.
    ///
    /// ```
    /// use axum::Router;
    /// use axum::routing::get;
    /// use tollgate::http::LimitLayer;
    /// use tollgate::route::{KeyExtractor, RouteLimit};
    /// use tollgate::{Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 20)?).build()?;
    /// let layer = LimitLayer::new(&gate, [RouteLimit::new("api", KeyExtractor::ip())])?;
    /// let router: Router = Router::new().route("/", get("hello")).layer(layer.for_axum());
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn for_axum(self) -> AxumLimitLayer {
        AxumLimitLayer(self)
    }
}

impl<S> Layer<S> for AxumLimitLayer {
    type Service = AxumLimitService<S>;

    fn layer(&self, service: S) -> AxumLimitService<S> {
        AxumLimitService(self.0.layer(service))
    }
}

/// A service with limits before it, made by an [`AxumLimitLayer`].
#[derive(Clone, Debug)]
pub struct AxumLimitService<S>(LimitService<S>);

impl<S, B> Service<Request<B>> for AxumLimitService<S>
where
    S: Service<Request<B>, Response = Response<Body>> + Clone,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = AxumLimitFuture<S, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> AxumLimitFuture<S, B> {
        AxumLimitFuture { answer: self.0.call(request) }
    }
}

pin_project! {
    /// The answer to come of an [`AxumLimitService`].
    pub struct AxumLimitFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        answer: LimitFuture<S, B>,
    }
}

impl<S, B> Future for AxumLimitFuture<S, B>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Output = Result<Response<Body>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(match ready!(self.project().answer.poll_answer(context))? {
            Answered::Inside(answer, None) => answer,
            Answered::Inside(answer, after) => answer.map(|body| Body::new(LimitedBody::passed(body, after))),
            Answered::Here(answer) => answer.map(Body::from),
        }))
    }
}
