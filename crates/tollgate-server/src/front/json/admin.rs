//! What only admins do: forget a key, read the config again.

use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;

use super::ask::{self, OfKey};
use super::body::Body;
use super::fault::Fault;
use super::{authorize, json, known_limit, posted};
use crate::app::App;

/// Forgets what a key was charged. Who asked is noted; the key is not.
pub(super) async fn reset(app: &App, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, &request)?;
    let body = posted(request).await?;
    let asked: OfKey<'_> = ask::read(&body)?;
    let key = asked.key.checked()?;
    let state = app.state();
    known_limit(&state, &asked.limit.0)?;
    match state.gate.reset(&asked.limit.0, key).await {
        Ok(forgotten) => {
            tracing::info!(limiter = &*asked.limit.0, forgotten, "a key was reset");
            Ok(json(format!("{{\"reset\":{forgotten}}}")))
        }
        Err(error) => Err(Fault::undecided(&error)),
    }
}

/// Reads the config file again, now.
pub(super) async fn reload(app: &Arc<App>, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, &request)?;
    match crate::reload::reload(app) {
        Ok(()) => Ok(json("{\"reloaded\":true}".to_owned())),
        Err(why) => Err(Fault::malformed(why)),
    }
}
