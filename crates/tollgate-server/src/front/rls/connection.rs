//! HTTP/2, connection by connection: who is let in, how much one peer may ask at once, and when it has to come again.
//!
//! Envoy keeps a connection for as long as it lasts, mostly silent. So silence is no reason to hang up; a peer that does not
//! answer a ping is, and so is one that connects and does not say what it speaks. After an hour or so a connection is closed
//! in good order, so that a new instance of the server gets its share of callers.

use std::convert::Infallible;
use std::future::Future;
use std::io::Cursor;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_reflection::server::Builder as Reflection;

use super::Rls;
use super::budget::{Budget, Gathered};
use super::proto::DESCRIPTORS;
use super::proto::service::rate_limit_service_server::{RateLimitServiceServer, SERVICE_NAME};
use super::seats::{Row, Seated, Seats};
use crate::app::App;
use crate::failure::Failure;
use crate::serve::listen::{self, ConnectionLimit};

/// The longest message that is read.
const MOST_BYTES: usize = 256 * 1024;

/// The longest question to health and reflection; as short as what every call may gather (`budget.rs`).
const MOST_BYTES_ASIDE: usize = 4 * 1024;

/// How many calls of one connection may be open, and how long their headers may be.
const MOST_CALLS: u32 = 100;
const MOST_HEADERS: u32 = 16 * 1024;

/// How much of the calls of one connection, and of one of them, may be on its way and not looked at yet: who sends more is hung up on.
const MOST_BYTES_UNREAD: u32 = 64 * 1024;

/// How long a peer may take to say that it speaks HTTP/2, and a call to arrive and be answered.
const GREETING_WITHIN: Duration = Duration::from_secs(5);
const CALL_WITHIN: Duration = Duration::from_secs(10);

/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// How old a connection may become, and how much younger some end, lest all end at once.
const OLDEST: Duration = Duration::from_secs(3_600);
const SPREAD: Duration = Duration::from_secs(600);

/// How long open calls may take to finish once a connection is to end.
const FAREWELL: Duration = Duration::from_secs(5);

/// What every HTTP/2 connection begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serves Envoy until `closing` says so.
pub(crate) fn serve(
    listener: TcpListener,
    connections: Arc<ConnectionLimit>,
    app: Arc<App>,
    tasks: TaskTracker,
    closing: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send, Failure> {
    let mut health = HealthReporter::new();
    let services = services(app.clone(), health.clone())?;
    Ok(async move {
        send_health(&health, ServingStatus::Serving).await;
        let face = {
            let (closing, calls, aside) = (closing.clone(), Seats::of_calls(), Seats::aside());
            move |stream, peer: SocketAddr| {
                let rows = Rows { peer: peer.ip(), calls: calls.row(peer), aside: aside.row(peer) };
                speak(stream, peer, rows, services.clone(), closing.clone())
            }
        };
        let mut accepting = std::pin::pin!(listen::accept(listener, connections, tasks, closing, face));
        // A call that came before the end is answered.
        let has_ended = tokio::select! {
            () = accepting.as_mut() => true,
            () = app.until_draining() => false,
        };
        send_health(&health, ServingStatus::NotServing).await;
        if !has_ended {
            accepting.await;
        }
        // A health stream has had its last answer, and would delay the end.
        for name in NAMES {
            health.clear_service_status(name).await;
        }
    })
}

/// The server as a whole, and its service: they are there or not together.
const NAMES: [&str; 2] = ["", SERVICE_NAME];

async fn send_health(health: &HealthReporter, status: ServingStatus) {
    for name in NAMES {
        health.set_service_status(name, status).await;
    }
}

/// The seats of a connection: for its calls, and for calls of health or reflection.
struct Rows {
    peer: IpAddr,
    calls: Arc<Row>,
    aside: Arc<Row>,
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// All services, by the first piece of a call's path, for calls of a connection that has these seats.
fn services(
    app: Arc<App>,
    health: HealthReporter,
) -> Result<impl Fn(Request<Incoming>, &Rows) -> Answering + Clone + Send + Sync + 'static, Failure> {
    let reflection = || {
        Reflection::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error| Failure::new(format!("cannot offer reflection: {error}"));
    let v1 = reflection().build_v1().map_err(failed)?.max_decoding_message_size(MOST_BYTES_ASIDE);
    let v1alpha = reflection().build_v1alpha().map_err(failed)?.max_decoding_message_size(MOST_BYTES_ASIDE);
    let health = HealthServer::new(HealthService::from_health_reporter(health))
        .max_decoding_message_size(MOST_BYTES_ASIDE);
    let rls = RateLimitServiceServer::new(Rls::new(app.clone())).max_decoding_message_size(MOST_BYTES);
    let budget = Budget::new();
    Ok(move |mut request: Request<Incoming>, rows: &Rows| -> Answering {
        let name = request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        if name == SERVICE_NAME {
            forget_headers(&mut request);
            let (drawn, row) = (budget.begin(), rows.calls.clone());
            let body = |body| Gathered::new(body, drawn.clone(), MOST_BYTES, row);
            let answering = in_time(rls.clone().call(request.map(body)));
            let (app, peer) = (app.clone(), rows.peer);
            return Box::pin(async move {
                let _until_answered = drawn;
                app.serve_peer(peer, answering).await
            });
        }
        let answering: Answering = match name {
            "grpc.health.v1.Health" => health.clone().call(request),
            "grpc.reflection.v1.ServerReflection" => v1.clone().call(request),
            "grpc.reflection.v1alpha.ServerReflection" => v1alpha.clone().call(request),
            _ => {
                return Box::pin(async { Ok(Status::unimplemented("there is no such service").into_http()) });
            }
        };
        match rows.aside.take() {
            Ok(_seat) => Box::pin(async move {
                let answered = in_time(answering).await?;
                Ok(answered.map(|body| Body::new(Seated { body, _seat })))
            }),
            Err(status) => Box::pin(async move { Ok(status.into_http()) }),
        }
    })
}

/// Lets go of the headers of a call, but for the one that says how its message is written: a peer may send many, and then be
/// waited for.
fn forget_headers(request: &mut Request<Incoming>) {
    const ENCODING: &str = "grpc-encoding";
    let encoding = request.headers_mut().remove(ENCODING);
    *request.headers_mut() =
        encoding.map(|encoding| (HeaderName::from_static(ENCODING), encoding)).into_iter().collect();
}

async fn in_time(answering: Answering) -> Result<Response<Body>, Infallible> {
    match tokio::time::timeout(CALL_WITHIN, answering).await {
        Ok(answered) => answered,
        Err(_) => Ok(Status::deadline_exceeded("the call did not come in time").into_http()),
    }
}

/// Serves one connection until its peer is done, it is old, or the server ends.
async fn speak(
    stream: TcpStream,
    peer: SocketAddr,
    rows: Rows,
    services: impl Fn(Request<Incoming>, &Rows) -> Answering + Clone + Send + Sync + 'static,
    mut closing: watch::Receiver<bool>,
) {
    let Ok(Some(stream)) = tokio::time::timeout(GREETING_WITHIN, greeted(stream)).await else { return };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_CALLS)
        .max_header_list_size(MOST_HEADERS)
        .initial_stream_window_size(MOST_BYTES_UNREAD)
        .initial_connection_window_size(MOST_BYTES_UNREAD)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WITHIN);
    let services = service_fn(|request| services(request, &rows));
    let connection = builder.serve_connection(TokioIo::new(stream), services);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closing| *closing) => {}
        () = tokio::time::sleep(age(peer)) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(FAREWELL, connection).await;
}

/// How old the connection of a peer becomes. Ports are as good as drawn by lot.
fn age(peer: SocketAddr) -> Duration {
    OLDEST - SPREAD * u32::from(peer.port()) / u32::from(u16::MAX)
}

/// The stream of a peer that speaks HTTP/2, as if nothing had been read of it.
async fn greeted(stream: TcpStream) -> Option<impl AsyncRead + AsyncWrite + Unpin + Send> {
    let (mut reading, writing) = stream.into_split();
    let mut greeting = [0; PREFACE.len()];
    reading.read_exact(&mut greeting).await.ok()?;
    (greeting == *PREFACE).then(|| tokio::io::join(Cursor::new(greeting).chain(reading), writing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_end_at_different_times() {
        let ages = [0, 1_000, 40_000, u16::MAX].map(|port| age(SocketAddr::from(([127, 0, 0, 1], port))));
        assert!(ages.is_sorted_by(|one, other| one > other), "{ages:?}");
        assert_eq!((ages[0], ages[3]), (OLDEST, OLDEST - SPREAD));
    }
}
