//! A collector of our own: it speaks OTLP over gRPC, as a real one does, and keeps the spans that it receives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// A span as it was received.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) name: String,
    pub(crate) trace_id: String,
    pub(crate) span_id: String,
    pub(crate) parent_id: String,
    pub(crate) service: String,
    /// In nanoseconds since 1970.
    pub(crate) starts: u64,
    pub(crate) ends: u64,
    attributes: BTreeMap<String, String>,
}

impl Span {
    /// An attribute as text; empty if there is none.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }

    /// The attributes of these names, in a few words.
    pub(crate) fn brief(&self, names: &[&str]) -> String {
        names.iter().map(|name| self.get(name)).collect::<Vec<_>>().join(" ")
    }
}

#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<Span>>>);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(value: Option<&Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let of_resource = resource.resource.unwrap_or_default().attributes;
            let service = of_resource.iter().find(|attribute| attribute.key == "service.name");
            let service = text(service.and_then(|name| name.value.as_ref()?.value.as_ref()));
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let attribute = |value: opentelemetry_proto::tonic::common::v1::KeyValue| {
                    (value.key, text(value.value.and_then(|any| any.value).as_ref()))
                };
                self.0.lock().unwrap().push(Span {
                    name: span.name,
                    trace_id: hex(&span.trace_id),
                    span_id: hex(&span.span_id),
                    parent_id: hex(&span.parent_span_id),
                    service: service.clone(),
                    starts: span.start_time_unix_nano,
                    ends: span.end_time_unix_nano,
                    attributes: span.attributes.into_iter().map(attribute).collect(),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A running collector, with threads of its own.
pub(crate) struct Collector {
    runtime: Option<tokio::runtime::Runtime>,
    endpoint: String,
    received: Received,
}

impl Collector {
    pub(crate) fn start() -> Collector {
        let builder = &mut tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let received = Received::default();
        let incoming = {
            let _within = runtime.enter();
            TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap()
        };
        let endpoint = format!("http://{}", incoming.local_addr().unwrap());
        let service = TraceServiceServer::new(received.clone());
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        Collector { runtime: Some(runtime), endpoint, received }
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What was received, in the order in which spans ended.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.received.0.lock().unwrap().clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        // A test may be async, and there one may not wait for a runtime.
        self.runtime.take().into_iter().for_each(tokio::runtime::Runtime::shutdown_background);
    }
}
