//! Sends spans to a collector, over OTLP and gRPC.
//!
//! Separate threads collect spans and send them in batches: no decision waits for a collector, and spans that it does not accept
//! in time are dropped. The connection has its own small runtime, so that the program may have any runtime or none. Nothing is
//! traced in there, because sending spans would make spans.

use std::fmt;
use std::sync::mpsc;
use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tracing::Subscriber;
use tracing::subscriber::NoSubscriber;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;

use crate::error::Error;

/// How long one batch may take to be sent.
const EXPORT: Duration = Duration::from_secs(5);

/// How long the last batch is waited for when the program ends.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// How spans are sent; made by [`otlp`].
#[derive(Clone, Debug, Default)]
pub struct Otlp {
    endpoint: Option<String>,
    service_name: Option<String>,
}

/// Sends spans to an OTLP collector over gRPC: to `OTEL_EXPORTER_OTLP_ENDPOINT` or `http://localhost:4317`, as
/// `OTEL_SERVICE_NAME` by default.
///
/// ```no_run
/// use tracing_subscriber::layer::SubscriberExt;
/// use tracing_subscriber::util::SubscriberInitExt;
///
/// let (spans, _guard) = tollgate::telemetry::otlp().service_name("checkout").start()?;
/// tracing_subscriber::registry().with(spans).init();
/// // Registries built with `Telemetry::spans` are traced from here on.
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn otlp() -> Otlp {
    Otlp::default()
}

impl Otlp {
    /// Where the collector is, such as `http://localhost:4317`.
    #[must_use]
    pub fn endpoint(self, endpoint: impl Into<String>) -> Otlp {
        Otlp { endpoint: Some(endpoint.into()), ..self }
    }

    /// By which name this program is known there.
    #[must_use]
    pub fn service_name(self, service_name: impl Into<String>) -> Otlp {
        Otlp { service_name: Some(service_name.into()), ..self }
    }

    /// The layer that makes spans of `tracing` spans of OpenTelemetry, and a guard that sends the last of them when it is
    /// dropped. A collector that cannot be reached is no error: it may be there later.
    pub fn start<S>(self) -> Result<(OpenTelemetryLayer<S, SdkTracer>, OtlpGuard), Error>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let connection = Connection::start()?;
        let exporter = {
            let _within = connection.runtime.enter();
            let builder = SpanExporter::builder().with_tonic().with_timeout(EXPORT);
            let builder = match self.endpoint {
                Some(endpoint) => builder.with_endpoint(endpoint),
                None => builder,
            };
            builder.build().map_err(|error| {
                Error::call(format!(
                    "spans cannot be sent: {error}; an endpoint is written `http://host:4317`"
                ))
            })?
        };
        let resource = match self.service_name {
            Some(name) => Resource::builder().with_service_name(name),
            None => Resource::builder(),
        };
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tollgate"));
        Ok((layer, OtlpGuard { provider, _connection: connection }))
    }
}

/// Keeps the exporter running. Drop it at the end of the program: it sends the last spans and waits for that a few seconds at
/// most.
#[must_use = "spans are sent until this is dropped"]
pub struct OtlpGuard {
    provider: SdkTracerProvider,
    _connection: Connection,
}

impl OtlpGuard {
    /// Sends all collected spans and waits for that. False if the collector did not accept them.
    pub fn flush(&self) -> bool {
        self.provider.force_flush().is_ok()
    }
}

impl Drop for OtlpGuard {
    fn drop(&mut self) {
        // The result of the last batch no longer matters.
        let _ = self.provider.shutdown_with_timeout(SHUTDOWN);
    }
}

impl fmt::Debug for OtlpGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OtlpGuard").finish_non_exhaustive()
    }
}

/// The thread that speaks with the collector, until this is dropped.
struct Connection {
    runtime: tokio::runtime::Handle,
    _until: tokio::sync::oneshot::Sender<()>,
}

impl Connection {
    fn start() -> Result<Connection, Error> {
        let cannot =
            |error: std::io::Error| Error::call(format!("the thread that sends spans cannot start: {error}"));
        let (hand_over, runtime) = mpsc::sync_channel(1);
        let (until, dropped) = tokio::sync::oneshot::channel::<()>();
        let run = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                let _ = hand_over.send(Ok(runtime.handle().clone()));
                tracing::subscriber::with_default(NoSubscriber::default(), || {
                    let _ = runtime.block_on(dropped);
                });
            }
            Err(error) => drop(hand_over.send(Err(error))),
        };
        std::thread::Builder::new().name("tollgate-otlp".to_owned()).spawn(run).map_err(cannot)?;
        match runtime.recv() {
            Ok(runtime) => Ok(Connection { runtime: runtime.map_err(cannot)?, _until: until }),
            Err(_) => Err(Error::call("the thread that sends spans ended before it began")),
        }
    }
}
