//! What a caller is reported.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use tollgate::headers::{Format, ResetAs};
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::store::{Charged, Failure, Hold, Store, StoreError, StoreFuture, StoredCharge, StoredLimit};
use tollgate::{ChargeId, Fallback, Limit, Settled, Settlement, Tollgate};
use tower::{Layer, ServiceExt};

use crate::scene::{Answer, BOTH, On, ask, gate, get, post, serve, window};

fn bucket() -> Limit {
    Limit::token_bucket("10/s", 2).expect("a limit")
}

#[tokio::test]
async fn every_answer_says_how_the_caller_stands() {
    for on in BOTH {
        let (gate, hands) = gate(on, |gate| gate.limit("api", bucket()).limit("day", window(1_000)));
        let (service, _) = serve(&gate, |layer| {
            layer
                .limit(RouteLimit::new("api", KeyExtractor::ip()))
                .limit(RouteLimit::new("day", KeyExtractor::constant("all")))
        });
        let fields = |answer: &Answer| {
            [
                "x-ratelimit-limit",
                "x-ratelimit-remaining",
                "x-ratelimit-reset",
                "retry-after",
                "ratelimit-policy",
                "ratelimit",
            ]
            .map(|name| answer.field(name).to_owned())
        };
        let policy = r#""api";q=2;w=1, "day";q=1000;w=60"#;
        let first = ask(&service, get("/")).await;
        assert_eq!(
            fields(&first),
            ["2", "1", "1", "", policy, r#""api";r=1;t=1, "day";r=999;t=60"#],
            "{on:?}"
        );
        // A failure inside is an answer like any other.
        let second = ask(&service, get("/").with("want-status", "500")).await;
        assert_eq!(second.status, 500);
        assert_eq!(
            fields(&second),
            ["2", "0", "1", "", policy, r#""api";r=0;t=1, "day";r=998;t=60"#],
            "{on:?}"
        );
        let third = ask(&service, get("/")).await;
        assert_eq!(third.status, 429);
        assert_eq!(
            fields(&third),
            ["2", "0", "1", "1", policy, r#""api";r=0;t=1, "day";r=998;t=60"#],
            "{on:?}"
        );
        assert_eq!(third.field("content-type"), "application/problem+json");
        assert_eq!(third.field("cache-control"), "no-store");
        assert!(
            third.body.contains("#quota-exceeded\"")
                && third.body.contains("\"violated-policies\":[\"api\"]")
        );
        // Waiting as long as was said is enough.
        hands.advance(Duration::from_secs(1));
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
    }
}

#[tokio::test]
async fn the_fields_are_the_callers_choice() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("login", window(5)));
    for (format, expected) in [
        (Format { legacy: true, draft: false, reset: ResetAs::UnixTime }, ["5", "1060", ""]),
        (Format { legacy: false, draft: true, reset: ResetAs::Seconds }, ["", "", "\"login\";r=3;t=60"]),
        (Format { legacy: false, draft: false, reset: ResetAs::Seconds }, ["", "", ""]),
    ] {
        let (service, _) =
            serve(&gate, |layer| layer.limit(RouteLimit::new("login", KeyExtractor::ip())).headers(format));
        let answer = ask(&service, get("/")).await;
        let fields = ["x-ratelimit-limit", "x-ratelimit-reset", "ratelimit"].map(|name| answer.field(name));
        assert_eq!(fields, expected);
    }
}

#[tokio::test]
async fn a_service_writes_refusals_in_its_own_way() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("api", window(1)));
    let (service, _) = serve(&gate, |layer| {
        layer.limit(RouteLimit::new("api", KeyExtractor::ip())).responder(|refusal| {
            let wait = refusal.retry_after().expect("it passes").as_secs();
            let names: Vec<&str> = refusal.limits().iter().map(|limit| limit.name).collect();
            let body = format!("{} {wait} s {}", names.join(" "), refusal.is_grpc());
            Response::builder().status(420).body(Bytes::from(body)).expect("an answer")
        })
    });
    ask(&service, get("/")).await;
    let denied = ask(&service, get("/")).await;
    assert_eq!((denied.status, &*denied.body), (420, "api 60 s false"));
    assert_eq!((denied.field("retry-after"), denied.field("x-ratelimit-limit")), ("60", "1"));
}

#[tokio::test]
async fn a_grpc_call_is_answered_in_its_own_protocol() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("api", window(1)));
    let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::ip())));
    let call = || post("/pkg.Service/Method").over_http2().with("content-type", "application/grpc+proto");
    ask(&service, call()).await;
    let denied = ask(&service, call()).await;
    assert_eq!((denied.status, denied.field("content-type"), &*denied.body), (200, "application/grpc", ""));
    assert_eq!((denied.field("grpc-status"), denied.field("retry-after")), ("8", "60"));
    assert!(denied.field("grpc-message").starts_with("api allows 1 per 1m"), "{denied:?}");
    assert!(!denied.field("grpc-status-details-bin").is_empty());
    assert_eq!(denied.field("cache-control"), "no-store");
    // A client that only claims so gets the usual response: a refusal must not look like a page.
    for kind in
        ["application/grpc", "application/grpc+proto", "application/grpc-web+proto", "application/grpcfoo"]
    {
        let pretended = ask(&service, get("/").with("content-type", kind)).await;
        assert_eq!((pretended.status, pretended.field("cache-control")), (429, "no-store"), "{kind}");
    }
    for kind in ["application/grpc-web+proto", "application/grpcfoo"] {
        let pretended = ask(&service, post("/").over_http2().with("content-type", kind)).await;
        assert_eq!(pretended.status, 429, "{kind}");
    }
}

#[tokio::test]
async fn two_layers_tell_of_both() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("outer", window(5)).limit("inner", window(9)));
    let layer = |limit: &str| {
        LimitLayer::builder(&gate)
            .limit(RouteLimit::new(limit, KeyExtractor::constant("all")))
            .build()
            .expect("a layer")
    };
    let service = tower::service_fn(|_: http::Request<Full<Bytes>>| async {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let service = layer("outer").layer(layer("inner").layer(service));
    let request = http::Request::new(Full::default());
    let answer = service.oneshot(request).await.expect("an answer");
    let policies: Vec<_> = answer.headers().get_all("ratelimit-policy").iter().collect();
    assert_eq!(policies, [r#""inner";q=9;w=60"#, r#""outer";q=5;w=60"#]);
    assert_eq!(answer.headers()["x-ratelimit-limit"], "5");
}

#[tokio::test]
async fn a_refusal_inside_keeps_its_numbers() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("outer", window(99)).limit("inner", window(1)));
    let layer = |limit: &str| {
        let route_limit = RouteLimit::new(limit, KeyExtractor::constant("all"));
        LimitLayer::builder(&gate).limit(route_limit).build().expect("a layer")
    };
    let service = tower::service_fn(|_: http::Request<Full<Bytes>>| async {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let service = layer("outer").layer(layer("inner").layer(service));
    for (status, remaining) in [(200, "98"), (429, "0")] {
        let answer = service.clone().oneshot(http::Request::new(Full::default())).await.expect("an answer");
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["x-ratelimit-remaining"]),
            (status, &remaining.parse().expect("a value"))
        );
    }
}

#[tokio::test]
async fn an_error_of_the_service_inside_stays_its_own() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("api", window(5)));
    let layer =
        LimitLayer::builder(&gate).limit(RouteLimit::new("api", KeyExtractor::constant("all"))).build();
    let service = layer.expect("a layer").layer(tower::service_fn(|_: http::Request<Full<Bytes>>| async {
        Err::<Response<Full<Bytes>>, _>("broken inside")
    }));
    assert_eq!(service.oneshot(http::Request::new(Full::default())).await.err(), Some("broken inside"));
}

/// A store that fails each call in this way.
struct Failing(fn() -> StoreError);

impl Store for Failing {
    fn charge<'a>(&'a self, _: &'a [StoredCharge<'a>], _: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async { Err((self.0)()) })
    }
    fn settle<'a>(&'a self, _: ChargeId, _: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async { Err((self.0)()) })
    }
    fn peek<'a>(&'a self, _: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async { Err((self.0)()) })
    }
    fn forget<'a>(&'a self, _: &'a StoredLimit, _: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async { Err((self.0)()) })
    }
}

/// The answer where the store fails in this way and the limit falls back so.
async fn failing(error: fn() -> StoreError, fallback: Fallback, grpc: bool) -> Answer {
    let gate = Tollgate::builder().limit("api", window(5)).fallback(fallback).store(Arc::new(Failing(error)));
    let gate = gate.build().expect("a registry");
    let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::ip())));
    let call = || post("/").over_http2().with("content-type", "application/grpc");
    ask(&service, if grpc { call() } else { get("/") }).await
}

#[tokio::test]
async fn a_store_that_fails_is_answered_as_the_limit_says() {
    let down = || StoreError::failed(Failure::Connection, "there is nothing there");
    assert_eq!(failing(down, Fallback::Open, false).await.status, 200);
    let local = failing(down, Fallback::Local, false).await;
    assert_eq!((local.status, local.field("x-ratelimit-remaining")), (200, "4"));
    let closed = failing(down, Fallback::Closed, false).await;
    assert_eq!((closed.status, closed.field("content-type")), (503, "application/problem+json"));
    assert!(closed.body.contains("#temporary-reduced-capacity"), "{}", closed.body);
    assert!(closed.field("retry-after").parse::<u64>().expect("a wait") >= 1);
    let call = failing(down, Fallback::Closed, true).await;
    assert_eq!((call.status, call.field("grpc-status")), (200, "14"));
}

#[tokio::test]
async fn what_nobody_can_decide_is_not_let_through() {
    let wrong = || StoreError::invalid("this call makes no sense");
    for fallback in Fallback::ALL {
        let answer = failing(wrong, fallback, false).await;
        assert_eq!((answer.status, answer.field("retry-after")), (503, "1"), "{fallback}");
        assert!(!answer.body.contains("makes no sense"), "{}", answer.body);
    }
}

#[tokio::test]
async fn the_body_of_a_refusal_has_its_length() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("api", window(1)));
    let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::ip())));
    ask(&service, get("/")).await;
    let body = crate::scene::head_of(&service, get("/")).await.into_body();
    let length = http_body::Body::size_hint(&body).exact().expect("a known length");
    assert!(!http_body::Body::is_end_stream(&body));
    assert_eq!(body.collect().await.expect("a body").to_bytes().len() as u64, length);
}
