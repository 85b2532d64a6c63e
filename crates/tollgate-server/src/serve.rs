//! `tollgate serve`: the server, from its config to its last answer.
//!
//! `listen.rs` accepts, `patience.rs` gives slow peers up, `front/` answers, `reload.rs` follows the config. Here it is put
//! together, told where it is, and brought to an end: on SIGTERM or ctrl-c nothing more is accepted, what has begun is finished,
//! and the process exits with 0.

pub(crate) mod listen;
pub(crate) mod patience;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::telemetry::{LogDecisions, Telemetry};

use self::listen::{Door, Room};
use self::patience::{Patience, Patient};
use crate::app::App;
use crate::cli::ServeArgs;
use crate::failure::{Failure, tell};
use crate::front::{json, rls};
use crate::reload;
use crate::token::Token;
use crate::validate;

/// The policy of a server that is started without one.
const EXAMPLE: &str = include_str!("serve/example.toml");

/// How long what has begun may take to finish.
const GRACE: Duration = Duration::from_secs(10);

const PATIENCE: Patience = Patience { idle: Duration::from_secs(60), busy: Duration::from_secs(15) };

/// How long the head of a request may take to come.
const HEAD: Duration = Duration::from_secs(60);

/// Does what was asked.
pub(crate) fn run(asked: &ServeArgs) -> Result<(), Failure> {
    let config = match &asked.config {
        Some(file) => validate::load(file)?,
        None => validate::parse(EXAMPLE).map_err(|mistakes| Failure::new(mistakes.to_string()))?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(serve(asked, config))
}

async fn serve(asked: &ServeArgs, config: Config) -> Result<(), Failure> {
    let named = asked.listen.as_deref().or(config.server.http.as_deref());
    let http = bind("http", "--listen", named, "127.0.0.1:8080").await?;
    let grpc = bind_grpc(asked, &config).await?;
    let address = http.local_addr().map_err(|error| Failure::new(format!("cannot listen: {error}")))?;
    let token = token(&config, &[address], asked.without_token)?;
    let metrics = metrics_exporter_prometheus::PrometheusBuilder::new()
        .set_buckets(&[0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0])
        .and_then(metrics_exporter_prometheus::PrometheusBuilder::install_recorder)
        .map_err(|error| Failure::new(format!("cannot count: {error}")))?;
    let telemetry = Telemetry::new().metrics().log(LogDecisions::Denials);
    let gate = Tollgate::opening(&config).await.map_err(|error| Failure::new(error.to_string()))?;
    let gate = gate.telemetry(telemetry).build().map_err(|error| Failure::new(error.to_string()))?;
    let app = Arc::new(App::new(gate, config, token, metrics));
    // Whoever reads where it is may end it at once.
    let signals = Signals::listen()?;
    announce(asked.config.as_ref(), address, grpc.as_ref(), &app);
    if let Some(file) = &asked.config {
        app.history.follow(file.clone());
        tokio::spawn(reload::watch(app.clone(), file.clone()));
    }
    let (close, closing) = watch::channel(false);
    let tasks = TaskTracker::new();
    let door = Door::new(Room { connections: 10_000, of_one_peer: 10_000 });
    let face = {
        let (app, closing) = (app.clone(), closing.clone());
        move |stream, _peer: SocketAddr| speak_http(app.clone(), stream, closing.clone())
    };
    let envoy = grpc.map(|grpc| rls::serve(grpc, app.clone(), tasks.clone(), closing.clone())).transpose()?;
    let envoy = envoy.map(tokio::spawn);
    let accepting = tokio::spawn(listen::accept(http, door, tasks.clone(), closing, face));
    signals.until_told_to_stop(&app).await;
    app.drain();
    let _ = close.send(true);
    let _ = accepting.await;
    if let Some(envoy) = envoy {
        let _ = envoy.await;
    }
    tasks.close();
    if tokio::time::timeout(GRACE, tasks.wait()).await.is_err() {
        tell(format_args!(
            "tollgate: some connections were still busy after {} s and are cut",
            GRACE.as_secs()
        ));
    }
    Ok(())
}

async fn bind(
    face: &str,
    option: &str,
    address: Option<&str>,
    otherwise: &str,
) -> Result<TcpListener, Failure> {
    let address = address.unwrap_or(otherwise);
    TcpListener::bind(address).await.map_err(|error| {
        let why = crate::failure::reason(&error);
        Failure::new(format!("cannot listen on {address} for {face}: {why}; name another with {option}"))
    })
}

/// Where Envoy asks. Whoever has not asked for it need not do without the rest because its usual port is taken.
async fn bind_grpc(asked: &ServeArgs, config: &Config) -> Result<Option<TcpListener>, Failure> {
    let named = asked.grpc.as_deref().or(config.server.grpc.as_deref());
    match bind("grpc", "--grpc", named, "127.0.0.1:8081").await {
        Ok(listener) => Ok(Some(listener)),
        Err(failure) if named.is_none() && config.envoy.rules().is_empty() => {
            tell(format_args!("tollgate: {failure}; Envoy is not served"));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// The admin token. Whoever listens beyond this machine needs one, or has to say that it is meant so.
fn token(config: &Config, addresses: &[SocketAddr], without: bool) -> Result<Option<Token>, Failure> {
    let lookup = |name: &str| std::env::var(name).ok();
    let token = config.server.admin_token.as_ref().map(|token| token.resolve(lookup)).transpose();
    let token = token.map_err(|why| Failure::new(format!("server.admin_token: {why}")))?;
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        Some(address) if token.is_none() && !without => Err(Failure::new(format!(
            "listening on {address} lets others reset keys: set server.admin_token (or TOLLGATE_SERVER_ADMIN_TOKEN), \
             or say --without-token"
        ))),
        _ => Ok(token.map(Token::new)),
    }
}

/// Says where it is, for people.
fn announce(file: Option<&PathBuf>, address: SocketAddr, grpc: Option<&TcpListener>, app: &App) {
    let state = app.state();
    let policy = match file {
        Some(file) => file.display().to_string(),
        None => "an example policy (name your own with --config)".to_owned(),
    };
    tell(format_args!("tollgate serves {policy}, counting in {}", state.config.store.mode.name()));
    tell(format_args!("  API    http://{address}/v1/check"));
    if let Some(grpc) = grpc.and_then(|grpc| grpc.local_addr().ok()) {
        tell(format_args!("  Envoy  grpc://{grpc}"));
    }
    tell(format_args!("  docs   http://{address}/openapi.json"));
    let limit = state.gate.rules().first().map_or("api", |rule| rule.name());
    tell(format_args!(
        "  try    curl -s http://{address}/v1/check -H 'content-type: application/json' -d '{{\"limit\":\"{limit}\",\"key\":\"user:42\"}}'"
    ));
}

/// The signals that a server follows, from when they are listened to.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn listen() -> Result<Signals, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::new(format!("cannot wait for signals: {error}")));
        let (term, int) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        Ok(Signals { term, int, hup: listen(SignalKind::hangup())? })
    }

    /// Waits for a signal to stop; others are followed meanwhile.
    async fn until_told_to_stop(mut self, app: &Arc<App>) {
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
async fn speak_http(app: Arc<App>, stream: TcpStream, mut closing: watch::Receiver<bool>) {
    let stream = TokioIo::new(Patient::new(stream, PATIENCE));
    let service = service_fn(|request| {
        let app = app.clone();
        async move { Ok::<_, Infallible>(json::answer(app, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD).max_headers(64).max_buf_size(64 * 1024);
    let mut connection = std::pin::pin!(builder.serve_connection(stream, service));
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closing| *closing) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
