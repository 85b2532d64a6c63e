//! A service behind a layer, on a clock that is moved by hand.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use std::time::Duration;
use tollgate::http::{LimitLayer, LimitLayerBuilder, LimitedBody, Peer};
use tollgate::store::{MemoryOptions, MemoryStore, Store};
use tollgate::{Limit, ManualClock, Tollgate, TollgateBuilder};
use tower::{Layer, Service, ServiceExt};

/// Where the counters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Memory,
    /// Asked, as a remote store is.
    FaultyStore,
}

pub(crate) const BOTH: [On; 2] = [On::Memory, On::FaultyStore];

/// A registry at the time 1,000 s, and the hands of its clock.
pub(crate) fn gate(
    on: On,
    rules: impl FnOnce(TollgateBuilder) -> TollgateBuilder,
) -> (Tollgate, ManualClock) {
    let hands = ManualClock::at(Duration::from_secs(1_000));
    let builder = Tollgate::builder().clock(hands.clock()).denial_cache(std::time::Duration::ZERO);
    let builder = match on {
        On::Memory => builder,
        On::FaultyStore => {
            let options = MemoryOptions { clock: hands.clock(), ..MemoryOptions::default() };
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new(options));
            builder.store(store)
        }
    };
    (rules(builder).build().expect("a sound registry"), hands)
}

pub(crate) fn window(limit: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60)).expect("a sound limit")
}

/// The service inside: what it answers is asked for in the request's own headers, and it counts its calls.
#[derive(Clone, Default)]
pub(crate) struct Inside {
    pub(crate) calls: Arc<AtomicU64>,
}

impl Service<Request<Full<Bytes>>> for Inside {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let wanted = |name: &str| {
            request.headers().get(name).and_then(|value| value.to_str().ok()?.parse::<u16>().ok())
        };
        let mut answer =
            Response::new(Full::from(vec![b'x'; usize::from(wanted("want-bytes").unwrap_or(2))]));
        if let Some(status) = wanted("want-status") {
            *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
        }
        if let Some(cost) = wanted("want-cost") {
            answer.headers_mut().insert("x-cost", cost.into());
        }
        let never = request.headers().contains_key("want-nothing");
        Box::pin(async move { if never { std::future::pending().await } else { Ok(answer) } })
    }
}

/// A request that is put together word by word.
pub(crate) struct Asked(Request<Full<Bytes>>);

pub(crate) fn get(path: &str) -> Asked {
    Asked(Request::builder().uri(path).body(Full::default()).expect("a request")).from("192.0.2.1:9")
}

pub(crate) fn post(path: &str) -> Asked {
    get(path).by(Method::POST)
}

impl Asked {
    pub(crate) fn by(mut self, method: Method) -> Asked {
        *self.0.method_mut() = method;
        self
    }

    pub(crate) fn over_http2(mut self) -> Asked {
        *self.0.version_mut() = http::Version::HTTP_2;
        self
    }

    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Asked {
        self.0.headers_mut().append(name, value.parse().expect("a value"));
        self
    }

    pub(crate) fn from(mut self, peer: &str) -> Asked {
        let peer: SocketAddr = peer.parse().expect("an address");
        self.0.extensions_mut().insert(Peer(peer));
        self
    }

    pub(crate) fn of_unknown_origin(mut self) -> Asked {
        self.0.extensions_mut().clear();
        self
    }

    pub(crate) fn knowing<T: Clone + Send + Sync + 'static>(mut self, what: T) -> Asked {
        self.0.extensions_mut().insert(what);
        self
    }
}

pub(crate) type Limited = tollgate::http::LimitService<Inside>;

/// The layer that `rules` build, before the service inside.
pub(crate) fn serve(
    gate: &Tollgate,
    rules: impl FnOnce(LimitLayerBuilder) -> LimitLayerBuilder,
) -> (Limited, Inside) {
    let inside = Inside::default();
    let layer = rules(LimitLayer::builder(gate)).build().expect("a sound layer");
    (layer.layer(inside.clone()), inside)
}

/// An answer, all of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn field(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }
}

/// The answer's head, its body unread.
pub(crate) async fn head_of(service: &Limited, asked: Asked) -> Response<LimitedBody<Full<Bytes>>> {
    service.clone().oneshot(asked.0).await.expect("the service inside never fails")
}

pub(crate) async fn ask(service: &Limited, asked: Asked) -> Answer {
    let (parts, body) = head_of(service, asked).await.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    let body = String::from_utf8(body.to_vec()).expect("text");
    Answer { status: parts.status.as_u16(), headers: parts.headers, body }
}

/// The statuses of as many requests as there are in `asked`.
pub(crate) async fn statuses(service: &Limited, asked: impl IntoIterator<Item = Asked>) -> Vec<u16> {
    let mut statuses = Vec::new();
    for asked in asked {
        statuses.push(ask(service, asked).await.status);
    }
    statuses
}

/// What a key has used.
pub(crate) async fn used(gate: &Tollgate, limit: &str, key: &str) -> u64 {
    gate.status(limit, key).await.expect("a status").used()
}
