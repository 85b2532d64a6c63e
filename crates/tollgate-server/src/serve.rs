//! `tollgate serve`: the server, from its config to its last response.
//!
//! `listen.rs` accepts connections, `timeouts.rs` closes slow ones, `front/` answers, `reload.rs` follows the config, `log.rs`
//! writes the log. This file starts them, announces their addresses, and stops them: on SIGTERM or ctrl-c the server reports that
//! it is not ready; after `drain_delay` it accepts no more connections, finishes the requests in progress, and exits with 0.

mod announce;
mod describe;
mod dropped;
pub(crate) mod listen;
mod log;
pub(crate) mod timeouts;

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinSet, unconstrained};
use tokio_util::task::TaskTracker;
use tollgate::config::{FileWatch, Password};
use tollgate::store::Micros;
use tollgate::telemetry::Telemetry;
use tollgate::{Clock, Tollgate};

use self::listen::{ConnectionLimit, Room};
use self::log::Log;
use self::timeouts::{TimedStream, Timeouts};
use crate::app::App;
use crate::cli::ServeArgs;
use crate::config::{Config, ServerConfig, address_fix};
use crate::failure::{Failure, print_line};
use crate::fleet;
use crate::front::{json, models, page, resp, rls};
use crate::overrides;
use crate::reload;
use crate::stats::{Settings, Stats};
use crate::token::Token;
use crate::validate;

/// The policy of a server that is started without one.
const EXAMPLE: &str = include_str!("../../../examples/tollgate.toml");

/// How long requests in progress may take to finish.
const GRACE: Duration = Duration::from_secs(10);

/// The same for calls of language models: as long as an answer takes.
const MODEL_GRACE: Duration = Duration::from_secs(600);

/// How long a peer may be silent between two requests.
const IDLE: Duration = Duration::from_secs(60);

/// The timeouts of HTTP connections. Bodies have a separate, shorter timeout (`front/json/body.rs`).
const TIMEOUTS: Timeouts = Timeouts {
    greeting: Duration::from_secs(5),
    head: Duration::from_secs(5),
    busy: Duration::from_secs(20),
    idle: IDLE,
};

/// The timeouts of RESP connections. Clients keep unused connections open, and a command has no head.
const RESP_TIMEOUTS: Timeouts =
    Timeouts { greeting: IDLE, head: Duration::from_secs(10), busy: Duration::from_secs(10), idle: IDLE };

/// Runs the command.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let Some(file) = &args.config else {
        validate::report(&validate::variable_warnings(EXAMPLE));
        let config = validate::parse(EXAMPLE).map_err(|mistakes| Failure::new(mistakes.to_string()))?;
        return start(args, config, |_| ());
    };
    // Before it is read, and long before it is watched: opening the store takes a while, and the file may change meanwhile.
    let watch = FileWatch::before_reading(file);
    let config = validate::load(file)?;
    start(args, config, |app| {
        app.history.follow(file.clone());
        tokio::spawn(reload::watch(app.clone(), watch));
    })
}

/// Serves; `beside` is called once, before the first connection is accepted.
pub(crate) fn start(args: &ServeArgs, config: Config, beside: impl FnOnce(&Arc<App>)) -> Result<(), Failure> {
    // Before the runtime, and dropped after it: the last lines are written too.
    let (log, telemetry) = log::start(&config.server)?;
    // On one core a second thread would only be woken in vain.
    let mut runtime = match std::thread::available_parallelism() {
        Ok(cores) if cores.get() == 1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(serve(args, config, &log, telemetry, beside))
}

async fn serve(
    args: &ServeArgs,
    config: Config,
    log: &Log,
    telemetry: Telemetry,
    beside: impl FnOnce(&Arc<App>),
) -> Result<(), Failure> {
    // Before the address is announced: a program that knows it may stop the server at once.
    let mut signals = Signals::listen()?;
    let listeners = Listeners::open(args, &config).await?;
    let address =
        listeners.http.local_addr().map_err(|error| Failure::new(format!("cannot listen: {error}")))?;
    let token = secret("server.admin_token", config.server.admin_token.as_ref())?;
    let resp_password = secret("server.resp_password", config.server.resp_password.as_ref())?;
    if !args.without_token {
        listeners.check_reach(token.is_some(), resp_password.is_some())?;
    }
    let metrics = metrics_exporter_prometheus::PrometheusBuilder::new()
        .set_buckets(&tollgate::telemetry::BUCKETS_MS)
        .and_then(metrics_exporter_prometheus::PrometheusBuilder::install_recorder)
        .map_err(|error| Failure::new(format!("cannot count: {error}")))?;
    describe::describe();
    let telemetry = telemetry.namespaces(config.namespaces());
    let gate = Tollgate::opening(&config.gate).await.map_err(|error| Failure::new(error.to_string()))?;
    let stats = Stats::new(telemetry.clone(), Settings::of(&config), Clock::system().now().get() / 1_000_000);
    let gate = gate
        .telemetry(telemetry)
        .observer(stats.clone())
        .build()
        .map_err(|error| Failure::new(error.to_string()))?;
    let settings = config.server.clone();
    let models = models::Models::open(&config, gate.clone(), address).map_err(Failure::new)?;
    let app = Arc::new(App::new(gate, config, token, metrics, stats).with_log(log.dropped()));
    app.set_models(models);
    // Before the first request: earlier overrides apply from the start.
    app.overrides.look(&app).await;
    tokio::spawn(overrides::follow(app.clone()));
    app.fleet.listens_at(&app.state().config, address.port());
    tokio::spawn(fleet::take_part(app.clone()));
    announce::announce(args, address, &listeners, &app);
    let room = listeners.room(&settings);
    tokio::spawn(page::feed(app.clone()));
    beside(&app);
    let (close, closing) = watch::channel(false);
    let tasks = TaskTracker::new();
    let mut accepting = JoinSet::new();
    if let Some(grpc) = listeners.grpc {
        accepting.spawn(rls::serve(
            grpc,
            ConnectionLimit::new("grpc", room.multiplexed(&settings)),
            app.clone(),
            tasks.clone(),
            closing.clone(),
        )?);
    }
    if let Some(resp) = listeners.resp {
        let (face, closing) = (resp::Face::new(app.clone(), resp_password), closing.clone());
        let (connections, tasks, until) =
            (ConnectionLimit::new("resp", room), tasks.clone(), closing.clone());
        let app = app.clone();
        let speak = move |stream, peer: SocketAddr| {
            let (app, face, closing) = (app.clone(), face.clone(), closing.clone());
            async move {
                let speaking = face.speak(TimedStream::new(stream, RESP_TIMEOUTS), closing);
                app.serve_peer(peer.ip(), speaking).await;
            }
        };
        accepting.spawn(listen::accept(resp, connections, tasks, until, speak));
    }
    let speak = {
        let (app, closing) = (app.clone(), closing.clone());
        move |stream, peer: SocketAddr| {
            let (app, closing) = (app.clone(), closing.clone());
            async move {
                let speaking = speak_http(app.clone(), stream, peer.ip(), closing);
                app.serve_peer(peer.ip(), speaking).await;
            }
        }
    };
    accepting.spawn(listen::accept(
        listeners.http,
        ConnectionLimit::new("http", room),
        tasks.clone(),
        closing,
        speak,
    ));
    signals.until_stopped(&app).await;
    app.drain();
    let has_drained = signals.none_for(settings.drain_delay, &app).await;
    tracing::info!("stop signal: no new connections, requests in progress are finished");
    app.end();
    app.fleet.leave(&app).await;
    let _ = close.send(true);
    accepting.join_all().await;
    tasks.close();
    if !has_drained {
        tracing::warn!("a second stop signal: busy connections are closed");
        return Ok(());
    }
    tokio::select! {
        () = finished(&tasks, &app) => {}
        () = grace(&app) => {
            tracing::warn!("some connections were still busy after {} s and are cut", GRACE.as_secs());
        }
        // A second signal means: do not wait.
        () = signals.until_stopped(&app) => tracing::warn!("a second stop signal: busy connections are closed"),
    }
    tracing::info!("stopped");
    Ok(())
}

/// Waits until all connections are done, and all calls of language models are settled.
async fn finished(tasks: &TaskTracker, app: &App) {
    tasks.wait().await;
    until_settled(app).await;
}

/// The time for requests in progress: longer while calls of language models run.
async fn grace(app: &App) {
    tokio::time::sleep(GRACE).await;
    let _ = tokio::time::timeout(MODEL_GRACE, until_settled(app)).await;
}

async fn until_settled(app: &App) {
    while app.models().is_some_and(|models| models.in_flight() > 0) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The sockets that are listened on.
struct Listeners {
    http: TcpListener,
    resp: Option<TcpListener>,
    grpc: Option<TcpListener>,
}

impl Listeners {
    async fn open(args: &ServeArgs, config: &Config) -> Result<Listeners, Failure> {
        let named = args.listen.as_deref().or(config.server.http.as_deref());
        let http = bind("http", "--listen", named, "127.0.0.1:8080").await?;
        let named = args.resp.as_deref().or(config.server.resp.as_deref());
        let resp = bind_unless_taken("resp", "--resp", named, "127.0.0.1:6380", true).await?;
        let named = args.grpc.as_deref().or(config.server.grpc.as_deref());
        // A config with rules for Envoy needs this listener.
        let may_lack = config.envoy.rules().is_empty();
        let grpc = bind_unless_taken("grpc", "--grpc", named, "127.0.0.1:8081", may_lack).await?;
        Ok(Listeners { http, resp, grpc })
    }

    /// Refuses to be reached from beyond this machine through a connections at which callers show nothing.
    fn check_reach(&self, has_token: bool, has_password: bool) -> Result<(), Failure> {
        let listeners = [
            (
                Some(&self.http).filter(|_| !has_token),
                "reset keys: set server.admin_token (or TOLLGATE_SERVER_ADMIN_TOKEN), or say --without-token",
            ),
            (
                self.resp.as_ref().filter(|_| !has_password),
                "charge any key over RESP: set server.resp_password (or TOLLGATE_SERVER_RESP_PASSWORD), \
                 or say --without-token",
            ),
            (
                self.grpc.as_ref(),
                "give back what was charged, as gRPC asks nobody for a secret: let only your proxies reach it, \
                 and say --without-token",
            ),
        ];
        for (connections, what) in listeners {
            let address = connections.and_then(|connections| connections.local_addr().ok());
            if let Some(address) = address.filter(|address| !address.ip().is_loopback()) {
                return Err(Failure::new(format!("listening on {address} lets others {what}")));
            }
        }
        Ok(())
    }

    /// How many connections each of them has room for.
    fn room(&self, settings: &ServerConfig) -> Room {
        let wanted = Room::of(settings);
        let Some(files) = listen::files() else { return wanted };
        let faces = 1 + usize::from(self.resp.is_some()) + usize::from(self.grpc.is_some());
        let room = wanted.within(files, faces);
        if room.connections < wanted.connections {
            let (has, wanted) = (room.connections, wanted.connections);
            let words = "each listener takes fewer connections than server.max_connections, because this process may open few \
                         files: raise `ulimit -Hn` (LimitNOFILE), or lower server.max_connections";
            // Warns only if the config asks for this many.
            match settings.max_connections {
                Some(_) => tracing::warn!(files, has, wanted, "{words}"),
                None => tracing::info!(files, has, wanted, "{words}"),
            }
        }
        room
    }
}

async fn bind(
    face: &str,
    option: &str,
    address: Option<&str>,
    default_address: &str,
) -> Result<TcpListener, Failure> {
    let address = address.unwrap_or(default_address);
    if let Some(fix) = address_fix(address, default_address) {
        return Err(Failure::new(format!("cannot listen on {address:?} for {face}: it {fix} ({option})")));
    }
    TcpListener::bind(address).await.map_err(|error| {
        let why = crate::failure::reason(&error);
        Failure::new(format!("cannot listen on {address} for {face}: {why}; name another with {option}"))
    })
}

/// The same for an optional API: if the config does not name its address and the default port is taken, the server starts without
/// it.
async fn bind_unless_taken(
    face: &str,
    option: &str,
    address: Option<&str>,
    default_address: &str,
    may_lack: bool,
) -> Result<Option<TcpListener>, Failure> {
    match bind(face, option, address, default_address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(failure) if address.is_none() && may_lack => {
            print_line(format_args!("tollgate: {failure}; it is served without {face}"));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// The value of a secret in the config.
fn secret(field: &str, password: Option<&Password>) -> Result<Option<Token>, Failure> {
    let resolved = password.map(|password| password.resolve(|name| std::env::var(name).ok())).transpose();
    Ok(resolved.map_err(|why| Failure::new(format!("{field}: {why}")))?.map(Token::new))
}

/// The signals that are heeded.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn listen() -> Result<Signals, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::new(format!("cannot wait for signals: {error}")));
        Ok(Signals {
            term: listen(SignalKind::terminate())?,
            int: listen(SignalKind::interrupt())?,
            hup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for this long, unless a signal to stop comes first; true if none did.
    async fn none_for(&mut self, delay: Micros, app: &Arc<App>) -> bool {
        if delay == Micros::ZERO {
            return true;
        }
        tracing::info!(%delay, "stop signal: not ready any more, but still answering");
        tokio::select! {
            () = tokio::time::sleep(Duration::from_micros(delay.get())) => true,
            () = self.until_stopped(app) => false,
        }
    }

    /// Waits for a signal to stop; others are followed meanwhile.
    async fn until_stopped(&mut self, app: &Arc<App>) {
        loop {
            tokio::select! {
                _ = self.term.recv() => return,
                _ = self.int.recv() => return,
                _ = self.hup.recv() => drop(reload::reload(app)),
            }
        }
    }
}

/// Serves one connection until its peer is done, or the server is.
async fn speak_http(app: Arc<App>, stream: TcpStream, peer: IpAddr, mut closing: watch::Receiver<bool>) {
    let stream = TimedStream::new(stream, TIMEOUTS);
    let progress = stream.progress();
    let service = service_fn(|request: Request<Incoming>| {
        let (app, progress) = (app.clone(), progress.clone());
        progress.head_is_in();
        async move {
            let has_body = !request.body().is_end_stream();
            let model = models::route(request.uri().path()).and_then(|route| Some((route, app.models()?)));
            let response = match model {
                Some((route, models)) => {
                    Box::pin(models::answer(models, route, request, progress.clone())).await
                }
                None => json::answer(app, peer, request).await,
            };
            if has_body && response.status().is_client_error() {
                progress.leaves_unread();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = http1::Builder::new();
    // `TimedStream` times the heads: hyper's timer would also close idle connections. Responses are small: head and body are
    // copied into one write.
    builder.header_read_timeout(None).max_headers(64).max_buf_size(64 * 1024).writev(false);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    // The end is waited for once, and then only looked at: to wait for it again with every request would take a lock.
    let signs = closing.clone();
    let mut end = std::pin::pin!(unconstrained(closing.wait_for(|closing| *closing)));
    let mut is_awaited = false;
    let is_over = poll_fn(|context| {
        if connection.as_mut().poll(context).is_ready() {
            return Poll::Ready(true);
        }
        if is_awaited && matches!(signs.has_changed(), Ok(false)) {
            return Poll::Pending;
        }
        is_awaited = true;
        end.as_mut().poll(context).map(|_| false)
    });
    if !is_over.await {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}
