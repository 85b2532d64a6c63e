//! The routes for admins: reset a key, reload the config, close and open keys of jobs; `overrides.rs` has the overrides. Each
//! call is logged with its peer (`audit`), one that only looks at most once a minute (`looks.rs`), and one with a wrong token as a warning.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN};
use http::uri::Authority;
use http::{Request, Response};
use hyper::body::Incoming;
use tollgate::Key;
use tollgate_jobs::OpenedKey;

use super::body::Body;
use super::fault::{Fault, ShownToken};
use super::requests::{self, CloseKey, CompareConfig, OfKey, OneKey, OpenKey};
use super::{json, known_limit, posted};
use crate::app::App;
use crate::difference::Difference;
use crate::front::page;

/// Forgets all charges of a key. The log has the author and the hash of the key.
pub(super) async fn reset(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "reset", &request)?;
    let body = posted(request).await?;
    let call: OfKey<'_> = requests::read(&body)?;
    let key = call.key.parsed()?;
    let state = app.state();
    known_limit(&state, &call.limit.0)?;
    let reset = state.gate.reset(&call.limit.0, &key).await;
    let (limiter, key_hash) = (&*call.limit.0, app.stats.key_hash(key.canonical()));
    match reset {
        Ok(forgotten) => {
            tracing::info!(audit = "reset", %peer, limiter, key_hash, forgotten, "a key was reset");
            Ok(json(format!("{{\"reset\":{forgotten}}}")))
        }
        Err(error) => {
            tracing::warn!(audit = "reset", %peer, limiter, key_hash, "a key could not be reset: {error}");
            Err(Fault::undecided(&error))
        }
    }
}

/// Reads the config file again, now. The result has its own log line (`reload.rs`).
pub(super) async fn reload(
    app: &Arc<App>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "reload", &request)?;
    let reloaded = crate::reload::reload(app);
    tracing::info!(audit = "reload", %peer, applied = reloaded.is_ok(), "a reload was requested");
    match reloaded {
        Ok(Difference { changes, restart }) => Ok(json(
            serde_json::json!({ "reloaded": true, "changes": changes, "restart": restart }).to_string(),
        )),
        Err(why) => Err(Fault::malformed(why)),
    }
}

/// The longest config that is compared.
const LONGEST_CONFIG: usize = 1024 * 1024;

/// Returns what a config would change, and changes nothing. It shows only limits, which everybody may see; it is for admins
/// because it tests files against this machine's environment.
pub(super) async fn compare(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "compare", &request)?;
    let body = super::posted_up_to(request, LONGEST_CONFIG).await?;
    let call: CompareConfig<'_> = requests::read(&body)?;
    let compared = crate::reload::compare(app, &call.config.0);
    tracing::info!(audit = "compare", %peer, valid = compared.is_ok(), "a config was compared with the one in force");
    match compared {
        Ok(difference) => Ok(json(serde_json::json!(difference).to_string())),
        Err(why) => Err(Fault::malformed(why)),
    }
}

/// Everything about one key. The key is in the body: a key in a URL would be in histories and logs.
pub(super) async fn key(
    app: &Arc<App>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "key", &request)?;
    let body = posted(request).await?;
    let call: OneKey<'_> = requests::read(&body)?;
    let key = match (&call.key, &call.hash) {
        (Some(key), None) => key.parsed()?,
        (None, Some(hash)) => key_of(app, &hash.0)?,
        _ => return Err(Fault::malformed("write `key` or `hash`, and not both")),
    };
    let key_hash = app.stats.key_hash(key.canonical());
    if app.looks.are_logged("key", peer, &key_hash) {
        tracing::info!(audit = "key", %peer, key_hash, "a key was looked at");
    }
    Ok(page::json(page::key_view(app, &key).await))
}

/// The key of a hash. A hash cannot be turned back, so it is one of the keys whose texts are known.
fn key_of(app: &App, hash: &str) -> Result<Key<'static>, Fault> {
    if hash.len() != 32 || !hash.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
        return Err(Fault::malformed(
            "`hash` has 32 digits from 0 to f, as the log and `tollgate hash` write them",
        ));
    }
    let state = app.state();
    let policy = state.gate.policy();
    let overridden =
        policy.rules().iter().flat_map(tollgate::Rule::overrides).map(|(key, _)| key.canonical());
    let known = overridden.map(str::to_owned).find(|key| app.stats.key_hash(key) == hash);
    let key =
        known.or_else(|| app.stats.key_of(hash)).and_then(|text| Key::parse(&text).ok().map(Key::into_owned));
    key.ok_or_else(|| {
        Fault::not_found(
            "no key with this hash was denied in the last five minutes or has an override, and a hash cannot be turned back; \
             name the key itself",
        )
    })
}

/// The state of language models. It shows clients and their usage, so it is for admins.
pub(super) async fn models(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "GET, HEAD", &[http::Method::GET, http::Method::HEAD])?;
    authorize(app, peer, "llm", &request)?;
    if app.looks.are_logged("llm", peer, "") {
        tracing::info!(audit = "llm", %peer, "the clients of language models were looked at");
    }
    Ok(page::json(app.models_view.answer(app).await))
}

/// The state of background jobs. Everybody may see how many wait and until when; ids of jobs and reasons of closed keys are for
/// admins.
pub(super) async fn jobs(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "GET, HEAD", &[http::Method::GET, http::Method::HEAD])?;
    let shows_ids = match (&app.token, request.headers().contains_key(AUTHORIZATION)) {
        (Some(_), false) => false,
        (Some(_), true) => authorize(app, peer, "jobs", &request).map(|()| true)?,
        (None, _) => authorize(app, peer, "jobs", &request).is_ok(),
    };
    // What everybody may see is no admin call.
    if shows_ids && app.token.is_some() && app.looks.are_logged("jobs", peer, "") {
        tracing::info!(audit = "jobs", %peer, "ids of jobs were looked at");
    }
    Ok(page::json(app.jobs.answer(app, shows_ids).await))
}

/// For how long a key of jobs is closed at most.
const LONGEST_CLOSED_MS: u64 = 30 * 86_400_000;

/// The longest reason.
const LONGEST_REASON: usize = 120;

/// Closes a key of jobs for some time, for all workers.
pub(super) async fn close_job_key(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "jobs_close", &request)?;
    let body = posted(request).await?;
    let call: CloseKey<'_> = requests::read(&body)?;
    let for_ms = call.for_ms.0;
    if !(1..=LONGEST_CLOSED_MS).contains(&for_ms) {
        return Err(Fault::malformed(format!("`for_ms` must be from 1 to {LONGEST_CLOSED_MS} (30 days)")));
    }
    let reason = call.reason.as_ref().map_or("", |reason| &*reason.0);
    if reason.chars().count() > LONGEST_REASON || reason.chars().any(char::is_control) {
        return Err(Fault::malformed(format!(
            "`reason` has at most {LONGEST_REASON} characters, and none that controls a terminal"
        )));
    }
    let by = if reason.is_empty() { "by an admin".to_owned() } else { format!("by an admin: {reason}") };
    let key = call.key.parsed()?;
    let reader = job_reader(app, &key)?;
    let closed = reader.close(key.canonical(), std::time::Duration::from_millis(for_ms), &by).await;
    let key_hash = app.stats.key_hash(key.canonical());
    match closed {
        Ok(label) => {
            tracing::info!(audit = "jobs_close", %peer, key = label, key_hash, for_ms, "a key of jobs was closed");
            app.jobs.changed().await;
            Ok(json(format!("{{\"closed\":true,\"for_ms\":{for_ms}}}")))
        }
        Err(error) => {
            tracing::warn!(audit = "jobs_close", %peer, key_hash, "a key of jobs could not be closed: {error}");
            Err(Fault::unavailable("the jobs' database could not be written, so nothing is closed"))
        }
    }
}

/// Opens a key of jobs.
pub(super) async fn open_job_key(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, peer, "jobs_open", &request)?;
    let body = posted(request).await?;
    let call: OpenKey<'_> = requests::read(&body)?;
    let key = call.key.parsed()?;
    let reader = job_reader(app, &key)?;
    let opened = reader.open(key.canonical(), call.values, &app.state().config.jobs).await;
    let key_hash = app.stats.key_hash(key.canonical());
    match opened {
        Ok(OpenedKey { label, opened, called, .. }) => {
            tracing::info!(audit = "jobs_open", %peer, key = label, key_hash, opened, called, "a key of jobs was opened");
            app.jobs.changed().await;
            Ok(json(serde_json::json!({ "opened": opened > 0, "called": called }).to_string()))
        }
        Err(error) => {
            tracing::warn!(audit = "jobs_open", %peer, key_hash, "a key of jobs could not be opened: {error}");
            Err(Fault::unavailable("the jobs' database could not be written, so nothing is opened"))
        }
    }
}

/// The reader of the jobs' database, for a key that jobs may have. A type or a queue that no policy names is a mistake.
fn job_reader(app: &App, key: &Key<'_>) -> Result<tollgate_jobs::JobsReader, Fault> {
    let state = app.state();
    let jobs = &state.config.jobs;
    if jobs.is_empty() {
        return Err(Fault::not_found(
            "the config says nothing of jobs; write [jobs.types.NAME] with limit and window",
        ));
    }
    if jobs.check_key(key.canonical()).is_err() {
        let known = jobs.scopes().filter_map(|(scope, _)| scope.key().ok()).map(Key::into_canonical);
        return Err(Fault::unknown_limit("no policy of jobs has this key", known.collect()));
    }
    app.jobs.reader(&state).map_err(Fault::unavailable)
}

/// Whether the caller may do what admins do. A peer that has shown too many wrong tokens is not listened to for a while.
pub(super) fn authorize(
    app: &App,
    peer: IpAddr,
    call: &'static str,
    request: &Request<Incoming>,
) -> Result<(), Fault> {
    let Some(token) = &app.token else { return from_here(request.headers()) };
    if let Some(wait) = app.guesses.wait(peer) {
        metrics::counter!("tollgate_admin_refused_total", "reason" => "slowed").increment(1);
        return Err(Fault::too_many_guesses(wait));
    }
    let header = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let shown = match header.split_at_checked("Bearer ".len()) {
        // Schemes are written in any case.
        Some((scheme, shown)) if scheme.eq_ignore_ascii_case(b"Bearer ") => {
            if token.is(shown) {
                return Ok(());
            }
            ShownToken::Wrong
        }
        _ if header.is_empty() => ShownToken::None,
        _ => ShownToken::OtherScheme,
    };
    metrics::counter!("tollgate_admin_refused_total", "reason" => "token").increment(1);
    // A call without a token is no guess. The number of lines is bounded like the number of guesses.
    if !matches!(shown, ShownToken::None) {
        let more = app.guesses.wrong(peer);
        tracing::warn!(audit = call, %peer, more, "an admin call showed a wrong token");
    }
    Err(Fault::no_token(shown))
}

/// Without a token every peer that reaches the server is an admin, except for web pages in a browser on such a machine: neither a
/// page of another origin (`Origin`), nor one whose host name was made to resolve to this address (`Host`), may act for its
/// reader.
fn from_here(headers: &HeaderMap) -> Result<(), Fault> {
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    if host.is_some_and(|host| !is_address(host)) {
        return Err(Fault::forbidden(
            "without a token, admin calls are answered at an IP address or at localhost, not at another name; \
             set server.admin_token",
        ));
    }
    let asked_for = |origin: &HeaderValue| {
        let (_, place) = origin.to_str().ok()?.split_once("://")?;
        host.filter(|host| host.eq_ignore_ascii_case(place.as_bytes()))
    };
    if headers.get_all(ORIGIN).iter().any(|origin| asked_for(origin).is_none()) {
        return Err(Fault::forbidden(
            "without a token, admin calls are not answered to pages of other origins; set server.admin_token",
        ));
    }
    Ok(())
}

/// Whether a `Host` cannot be made to resolve to another address.
fn is_address(host: &[u8]) -> bool {
    let Ok(host) = Authority::try_from(host) else { return false };
    let name = host.host();
    name.eq_ignore_ascii_case("localhost") || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}
