//! The page: what an operator leaves open on a wall, and what feeds it.
//!
//! `index.html`, `page.css` and `page.js` are plain files that are part of the binary: no build step, and nothing is loaded
//! of another origin. `feed.rs` sends a snapshot a second to those who look, `snapshot.rs` writes it, `assets.rs` hands the files
//! out. Looking changes nothing: what the page does, it does through the API as everybody else.

mod assets;
mod feed;
mod jobs;
mod models;
mod snapshot;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, Response};
use hyper::body::Incoming;

use self::assets::Asset;
pub(crate) use self::feed::{Feed, feed};
pub(crate) use self::jobs::JobsView;
pub(crate) use self::models::ModelsView;
use super::json::{Body, Fault, full};
use crate::app::App;

/// What the page consists of.
#[derive(Clone, Copy)]
pub(crate) enum Shown {
    Events,
    Snapshot,
    Asset(&'static Asset),
}

/// What there is at an address.
pub(crate) fn find(path: &str) -> Option<Shown> {
    match path {
        "/v1/events" => Some(Shown::Events),
        "/v1/snapshot" => Some(Shown::Snapshot),
        path => assets::find(path).map(Shown::Asset),
    }
}

impl Shown {
    pub(crate) fn answer(self, app: &Arc<App>, request: &Request<Incoming>) -> Result<Response<Body>, Fault> {
        match self {
            Shown::Events if request.method() == Method::HEAD => Ok(event_stream(full(""))),
            Shown::Events => match app.feed.view(app) {
                Some(events) => Ok(event_stream(events)),
                None => Err(Fault::unavailable(
                    "there are as many viewers as there is room for; /v1/snapshot answers still",
                )),
            },
            Shown::Snapshot => Ok(json(app.feed.whole(app))),
            Shown::Asset(asset) => Ok(asset.answer(request.headers())),
        }
    }
}

pub(super) fn json(text: Bytes) -> Response<Body> {
    let mut response = Response::new(full(text));
    shown(response.headers_mut(), "application/json");
    response
}

fn event_stream(events: Body) -> Response<Body> {
    let mut response = Response::new(events);
    shown(response.headers_mut(), "text/event-stream");
    response
}

/// What is true of now is kept by nobody, and read as nothing else than it is.
fn shown(headers: &mut HeaderMap, kind: &'static str) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    // Proxies that gather an answer before they pass it on would gather this one for ever.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
}
