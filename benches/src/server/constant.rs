//! Servers that decide nothing: axum and tonic with one answer for everybody, which is the least that a server on them can cost.
//!
//! Each is this program, started again, so it is built as ours is. The answer is given on the command line, in hexadecimal
//! digits: it is our response to the first request, so that both write as much. On one core they have the runtime of one
//! thread that ours has there.

use std::net::Ipv4Addr;

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use axum::serve::ListenerExt;
use clap::{Args, ValueEnum};
use http::header::CONTENT_TYPE;
use prost::Message;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

use super::proto::service::rate_limit_service_server::{RateLimitService, RateLimitServiceServer};
use super::proto::service::{RateLimitRequest, RateLimitResponse};

/// The name of the hidden command.
pub(crate) const COMMAND: &str = "constant";

#[derive(Args)]
pub(crate) struct Options {
    face: Face,
    answer: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Face {
    Axum,
    Tonic,
}

impl Face {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Face::Axum => "axum",
            Face::Tonic => "tonic",
        }
    }
}

/// Serves until it is ended.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let answer = from_hex(&options.answer).ok_or("the answer must be hexadecimal digits")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| format!("starting the runtime: {error}"))?.block_on(async {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(|error| error.to_string())?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        println!("listening on {address}");
        match options.face {
            Face::Axum => axum(listener, answer.into()).await,
            Face::Tonic => tonic(listener, &answer).await,
        }
    })
}

async fn axum(listener: TcpListener, answer: Bytes) -> Result<(), String> {
    // The body is read, as every server that decides has to.
    let answering = move |_body: Bytes| async move { ([(CONTENT_TYPE, "application/json")], answer) };
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).ok();
    });
    let router = Router::new().route("/v1/check", post(answering));
    axum::serve(listener, router).await.map_err(|error| error.to_string())
}

struct Constant(RateLimitResponse);

#[tonic::async_trait]
impl RateLimitService for Constant {
    async fn should_rate_limit(
        &self,
        _request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        Ok(Response::new(self.0.clone()))
    }
}

async fn tonic(listener: TcpListener, answer: &[u8]) -> Result<(), String> {
    let answer = RateLimitResponse::decode(answer).map_err(|error| error.to_string())?;
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let router =
        tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(Constant(answer)));
    router.serve_with_incoming(incoming).await.map_err(|error| error.to_string())
}

/// Bytes as the command line can carry them.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_command_line() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)), Some(bytes));
        assert_eq!(from_hex("0g"), None);
    }
}
