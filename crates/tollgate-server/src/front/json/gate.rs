//! `/v1/gate/{limit}/{key}`: 200 or 429 with the rate-limit headers, for proxies that ask before they pass a request on: nginx
//! `auth_request`, Caddy and Traefik forward-auth. `gate_routes.rs` is the gate that applies the config's `[[routes]]`.
//!
//! A request whose header has no key, or a malformed one, is denied as a route limit denies it. What the proxy's operator writes in
//! the address is different: a mistake there is a fault with status 400.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use tollgate::headers::{self, Format, ReportedLimit};
use tollgate::problem::{self, Reason};
use tollgate::route::{ClientAddress, address, decoded};
use tollgate::{Allowance, Charge, Clock, Decision, Key};

use super::body::{Body, full};
use super::fault::Fault;
use super::requests::key_of_url;
use super::undecided;
use crate::app::{App, State};
use crate::front::peer;

/// Charges the limit and key of the path, or the key that the proxy writes in a header.
pub(crate) async fn answer(
    app: &App,
    path: &str,
    query: Option<&str>,
    headers: &HeaderMap,
) -> Result<Response<Body>, Fault> {
    let GateRequest { cost, deny, kind, header } = read_query(query)?;
    let (limit, key) = match (path.split_once('/'), header, &kind) {
        (Some((limit, key)), None, _) => (decoded(limit), Some(key_of_path(&decoded(key), &kind)?)),
        // The value of a header is raw: a client cannot choose a namespace with it.
        (None, Some(header), Kind::Raw(namespace)) => {
            // The namespace is of the address: where no key is valid in it, that is a fault.
            key_of_url(Some(namespace), "-")?;
            let text = last_entry(headers, &header);
            (decoded(path), text.and_then(|text| Key::new(namespace, text).ok()))
        }
        (None, Some(header), Kind::Address) => {
            (decoded(path), last_entry(headers, &header).and_then(key_of_client))
        }
        _ => {
            return Err(Fault::malformed(
                "write /v1/gate/{limit}/{key}, the key percent-encoded, or \
                 /v1/gate/{limit}?header=x-forwarded-for&as=ip",
            ));
        }
    };
    let charge = match &key {
        Some(key) => Charge::new(&limit, key),
        // The engine denies it as a malformed key.
        None => Charge::new(&limit, ""),
    };
    let charges = [charge.cost(cost)];
    let (state, _share) = (app.state(), peer::share().await);
    match state.gate.charge(&charges).await {
        Ok(decision) => Ok(response(&state, &decision, &[(key.as_ref(), cost)], deny)),
        Err(error) => Err(undecided(&state, None, &charges, &error)),
    }
}

/// The key in the path, whose mistakes are faults.
fn key_of_path(text: &str, kind: &Kind) -> Result<Key<'static>, Fault> {
    match kind {
        Kind::Whole => Ok(key_of_url(None, text)?.into_owned()),
        Kind::Raw(namespace) => Ok(key_of_url(Some(namespace), text)?.into_owned()),
        Kind::Address => {
            let key = key_of_client(text);
            key.ok_or_else(|| Fault::malformed("a key read `as=ip` must be an IPv4 or IPv6 address"))
        }
    }
}

/// The last entry of a header that the proxy sets, which the proxy itself has added.
fn last_entry<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let last = headers.get_all(name).iter().next_back()?.to_str().ok()?;
    last.rsplit(',').next().map(str::trim)
}

/// The key of a client by its address: one for all of its spellings, and for all of its /64, as before services.
fn key_of_client(text: &str) -> Option<Key<'static>> {
    let group = ClientAddress::peer().group(address(text.as_bytes())?);
    Key::new("ip", &group).ok()
}

/// How the text of the key is read.
enum Kind {
    /// A whole key.
    Whole,
    /// Raw, in this namespace.
    Raw(String),
    /// The address of a client.
    Address,
}

/// The parameters of the query.
struct GateRequest {
    cost: u64,
    deny: StatusCode,
    kind: Kind,
    /// The header with the key, if the path does not have it.
    header: Option<HeaderName>,
}

impl Kind {
    fn once(&self, kind: Kind) -> Result<Kind, Fault> {
        match self {
            Kind::Whole => Ok(kind),
            _ => Err(Fault::malformed("say once how the key is read: `as=ip` or `namespace=…`")),
        }
    }
}

fn read_query(query: Option<&str>) -> Result<GateRequest, Fault> {
    let mut gate_request =
        GateRequest { cost: 1, deny: StatusCode::TOO_MANY_REQUESTS, kind: Kind::Whole, header: None };
    let mut seen = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let parts = pair.split_once('=');
        if let Some((name @ ("cost" | "deny" | "header"), _)) = parts {
            if seen.contains(&name) {
                return Err(Fault::malformed(format!("`{name}` is there twice")));
            }
            seen.push(name);
        }
        match parts {
            Some(("cost", cost)) => {
                let cost = cost.parse().ok().filter(|cost| *cost > 0);
                gate_request.cost =
                    cost.ok_or_else(|| Fault::malformed("`cost` must be a whole number, at least 1"))?;
            }
            Some(("deny", status)) => gate_request.deny = read_deny(status)?,
            Some(("namespace", namespace)) => {
                gate_request.kind = gate_request.kind.once(Kind::Raw(decoded(namespace).into_owned()))?
            }
            Some(("as", "ip")) => gate_request.kind = gate_request.kind.once(Kind::Address)?,
            Some(("as", _)) => return Err(Fault::malformed("`as` must be `ip`")),
            Some(("header", name)) => {
                let name =
                    name.parse().map_err(|_| Fault::malformed("`header` must be the name of a header"));
                gate_request.header = Some(name?);
            }
            _ => {
                return Err(Fault::malformed(
                    "the query may say `cost`, `deny`, `as`, `namespace` and `header`, as in ?cost=2&deny=403&as=ip",
                ));
            }
        }
    }
    Ok(gate_request)
}

/// The status of a denial.
pub(super) fn read_deny(status: &str) -> Result<StatusCode, Fault> {
    let status = status.parse().ok().and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.filter(|status| status.is_client_error() || status.is_server_error());
    status.ok_or_else(|| Fault::malformed("`deny` must be a status from 400 to 599"))
}

/// The response to a decision about these charges: for each its key, if it has one, and its cost.
pub(super) fn response(
    state: &State,
    decision: &Decision,
    charges: &[(Option<&Key<'_>>, u64)],
    deny: StatusCode,
) -> Response<Body> {
    let policy = state.gate.policy();
    let reported: Vec<ReportedLimit<'_>> = decision
        .outcomes()
        .iter()
        .zip(charges)
        .map(|(outcome, &(key, cost))| ReportedLimit {
            name: outcome.limit(),
            limit: key.zip(policy.rule(outcome.limit())).and_then(|(key, rule)| {
                match rule.allowance_for(key) {
                    Allowance::Limited(limit) => Some(limit),
                    Allowance::Unlimited | Allowance::Blocked => None,
                }
            }),
            cost,
            outcome: *outcome.numbers(),
            shadow: outcome.is_shadow(),
            unit: None,
        })
        .collect();
    let mut response = match Reason::of(decision) {
        None => Response::new(full(Bytes::new())),
        Some(reason) => {
            let plain = StatusCode::from_u16(reason.status()).unwrap_or(deny);
            let status = if deny == StatusCode::TOO_MANY_REQUESTS { plain } else { deny };
            let body = problem::body_of(status.as_u16(), reason, reported.iter().copied());
            let mut response = Response::new(full(body));
            *response.status_mut() = status;
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
            response
        }
    };
    let fields = response.headers_mut();
    fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let now = Clock::system().now().into();
    headers::render(&Format::default(), reported.iter().copied(), now, |field, value| {
        // Rendered values are visible ASCII.
        if let Ok(value) = HeaderValue::from_str(value) {
            fields.insert(HeaderName::from_static(field.name()), value);
        }
    });
    response
}
