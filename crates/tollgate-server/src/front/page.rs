//! The page for operators, and its data.
//!
//! `index.html`, `page.css` and `page.js` are plain files inside the binary: no build step, and nothing is loaded from another
//! origin. `feed.rs` sends a snapshot a second to its viewers, `snapshot.rs` writes it, `assets.rs` serves the files. Viewing
//! changes nothing: the page acts only through the API.

mod assets;
mod feed;
mod jobs;
mod key;
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
pub(crate) use self::key::key_view;
pub(crate) use self::models::ModelsView;
use super::json::{Body, Fault, full};
use crate::app::App;

/// The parts of the page.
#[derive(Clone, Copy)]
pub(crate) enum Shown {
    Events,
    Snapshot,
    Asset(&'static Asset),
}

/// The part at a path.
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

/// Live data must not be cached, nor be read as another type.
fn shown(headers: &mut HeaderMap, kind: &'static str) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    // Proxies that buffer a response would buffer this one for ever.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
}
