//! Overrides at run time over HTTP: `GET` and `POST /v1/overrides`, `POST /v1/overrides/remove`. For admins only: they show keys
//! and change decisions. Each change is logged with its author and the hash of the key.

use std::net::IpAddr;

use http::{Method, Request, Response};
use hyper::body::Incoming;
use tollgate::store::{Micros, RecordKind};
use tollgate::{Key, Policy};

use super::admin::authorize;
use super::body::Body;
use super::fault::Fault;
use super::requests::{self, RemoveOverride, SetOverrideRequest, Text};
use super::{json, known_limit, posted};
use crate::app::App;
use crate::backtest::instant;
use crate::front::page;
use crate::overrides::{self, Change, LONGEST_KEY, SetOverride, Written, id_of};

/// The longest reason, and the longest name of an author.
const LONGEST_REASON: usize = 200;
const LONGEST_NAME: usize = 64;

/// How far ahead an end may lie: ten years.
const FARTHEST: Micros = tollgate::store::Hold::MAX_TTL;

/// Lists them, or sets one.
pub(super) async fn answer(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "GET, HEAD, POST", &[Method::GET, Method::HEAD, Method::POST])?;
    let is_look = request.method() != Method::POST;
    authorize(app, peer, if is_look { "override_list" } else { "override" }, &request)?;
    if is_look {
        if app.looks.are_logged("override_list", peer, "") {
            tracing::info!(audit = "override_list", %peer, "overrides were listed");
        }
        app.overrides.look(app).await;
        return Ok(page::json(app.overrides.to_json(app, None).to_string().into()));
    }
    let body = posted(request).await?;
    let call: SetOverrideRequest<'_> = requests::read(&body)?;
    let key = call.key.parsed()?;
    set(app, peer, &call, &key).await
}

async fn set(
    app: &App,
    peer: IpAddr,
    call: &SetOverrideRequest<'_>,
    key: &Key<'_>,
) -> Result<Response<Body>, Fault> {
    let state = app.state();
    let limit = &*call.limit.0;
    known_limit(&state, limit)?;
    if key.canonical().len() > LONGEST_KEY {
        return Err(Fault::malformed(format!(
            "`key` has {} bytes; one with an override at run time has at most {LONGEST_KEY}",
            key.canonical().len()
        )));
    }
    let reason = bounded("reason", call.reason.as_ref(), LONGEST_REASON)?;
    let by = bounded("by", call.by.as_ref(), LONGEST_NAME)?;
    let policy = &state.config.gate.policy;
    let allowance = allowance(policy, limit, call)?;
    let now = app.overrides.store_now(&state).await.map_err(|error| unavailable(&error))?;
    let ends = ends(call, now)?;
    let written = Written {
        limit: limit.to_owned(),
        key: key.canonical().to_owned(),
        fields: call.fields.0.clone(),
        reason,
        by,
        at_us: now.get(),
    };
    let one = SetOverride { id: id_of(limit, key), written, ends };
    let (key_hash, until) = (app.stats.key_hash(key.canonical()), ends.map(overrides::timestamp));
    match app.overrides.set(app, &one).await {
        Ok(true) => {
            let by = one.written.by.as_deref();
            tracing::info!(audit = "override", %peer, limiter = limit, key_hash, until, by, rule = %allowance, "an override was set");
            let mut shown = overrides::set_json(app, policy, &one, now);
            let mode = state.config.gate.store.mode;
            shown["kept"] = mode.name().into();
            shown["survives_restart"] = (mode != tollgate::config::StoreMode::Memory).into();
            Ok(json(shown.to_string()))
        }
        Ok(false) => Err(Fault::malformed(format!(
            "there are {} overrides at run time, which is as many as there may be; remove one, or write lasting ones into the config",
            RecordKind::MOST
        ))),
        Err(error) => {
            tracing::warn!(audit = "override", %peer, limiter = limit, key_hash, "an override could not be set: {error}");
            Err(unavailable(&error))
        }
    }
}

/// Removes an override: the config applies to the key again.
pub(super) async fn remove(
    app: &App,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[Method::POST])?;
    authorize(app, peer, "override", &request)?;
    let body = posted(request).await?;
    let call: RemoveOverride<'_> = requests::read(&body)?;
    let key = call.key.parsed()?;
    let limit = &*call.limit.0;
    // An override of a removed limit can be removed too.
    super::sound_name(limit)?;
    let by = bounded("by", call.by.as_ref(), LONGEST_NAME)?;
    let change = Change::removed(limit, key.canonical(), by.clone());
    let key_hash = app.stats.key_hash(key.canonical());
    match app.overrides.remove(app, &id_of(limit, &key), &change).await {
        Ok(removed) => {
            let by = by.as_deref();
            tracing::info!(audit = "override", %peer, limiter = limit, key_hash, removed, by, "an override was removed");
            let rule = app.state().gate.find(limit).ok().map(|rule| rule.allowance_for(&key).to_string());
            Ok(json(serde_json::json!({ "removed": removed, "rule": rule }).to_string()))
        }
        Err(error) => {
            tracing::warn!(audit = "override", %peer, limiter = limit, key_hash, "an override could not be removed: {error}");
            Err(unavailable(&error))
        }
    }
}

fn allowance(
    policy: &Policy,
    limit: &str,
    call: &SetOverrideRequest<'_>,
) -> Result<tollgate::Allowance, Fault> {
    // Ad hoc limits have a name, and no rule that could be overridden.
    let rule = policy.find(limit).map_err(|error| Fault::malformed(error.to_string()))?;
    call.fields.0.over(rule.allowance()).map_err(|why| match why.starts_with('`') {
        true => Fault::malformed(format!("`override.{}", &why[1..])),
        false => Fault::malformed(format!("`override` {why}")),
    })
}

/// When it ends, by the store's clock.
fn ends(call: &SetOverrideRequest<'_>, now: Micros) -> Result<Option<Micros>, Fault> {
    let ends = match (&call.until, call.for_ms.map(|ms| ms.0)) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => return Err(Fault::malformed("write `until` or `for_ms`, not both")),
        (None, Some(0)) => return Err(Fault::malformed("`for_ms` must be at least 1")),
        (None, Some(ms)) => now.saturating_add(Micros::new(ms.saturating_mul(1_000))),
        (Some(until), None) => {
            let at = instant::parse(&until.0).map_err(|fix| Fault::malformed(format!("`until`: {fix}")))?;
            Micros::new(at)
        }
    };
    if ends <= now {
        let now = overrides::timestamp(now);
        return Err(Fault::malformed(format!(
            "`until` is in the past: the store's clock shows {now}; write a later time, or remove the override"
        )));
    }
    match ends.saturating_sub(now) > FARTHEST {
        true => Err(Fault::malformed("it would end in more than ten years; leave `until` out for no end")),
        false => Ok(Some(ends)),
    }
}

fn bounded(field: &str, text: Option<&Text<'_>>, most: usize) -> Result<Option<String>, Fault> {
    let Some(Text(text)) = text else { return Ok(None) };
    if text.chars().count() > most || text.chars().any(char::is_control) {
        return Err(Fault::malformed(format!(
            "`{field}` has at most {most} characters, and none that controls a terminal"
        )));
    }
    Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty()))
}

fn unavailable(error: &tollgate::Error) -> Fault {
    match error.failure() {
        None => Fault::malformed(error.to_string()),
        Some(_) if error.is_ambiguous() => Fault::unavailable(
            "the store did not answer in time, and the change may have been made; ask again: it is made once",
        ),
        Some(_) => Fault::unavailable("the store did not answer, so nothing was changed; ask again"),
    }
}
