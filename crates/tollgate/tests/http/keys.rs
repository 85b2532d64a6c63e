//! Who pays, and what happens when nobody does.

use tollgate::route::{ClientAddress, KeyExtractor, MissingKey, Route, RouteLimit};

use crate::scene::{Asked, BOTH, On, ask, gate, get, serve, statuses, used, window};

/// The keys that requests are charged to: `""` for one that is denied because it has none.
async fn check(route: Route, extractor: KeyExtractor, asked: Vec<(Asked, &str)>) {
    for (asked, key) in asked {
        let (gate, _) = gate(On::Memory, |gate| gate.limit("api", window(10)));
        let (service, inside) =
            serve(&gate, |layer| layer.limit(RouteLimit::new("api", extractor.clone()).on(route.clone())));
        let answer = ask(&service, asked).await;
        let calls = inside.calls.load(std::sync::atomic::Ordering::Relaxed);
        if key.is_empty() {
            assert_eq!((answer.status, calls, gate.keys()), (429, 0, 0), "{extractor:?}");
            assert_eq!(answer.field("retry-after"), "", "waiting does not help");
            assert!(answer.body.contains("\"violated-policies\":[\"api\"]"), "{}", answer.body);
        } else {
            assert_eq!((answer.status, calls), (200, 1), "{extractor:?} {key}: {}", answer.body);
            assert_eq!(used(&gate, "api", key).await, 1, "{extractor:?} {key}");
        }
    }
}

#[tokio::test]
async fn each_source_gives_its_key() {
    check(
        Route::any(),
        KeyExtractor::constant("all"),
        vec![(get("/"), "all:all"), (get("/").of_unknown_origin(), "all:all")],
    )
    .await;
    check(
        Route::any(),
        KeyExtractor::ip(),
        vec![
            (get("/"), "ip:192.0.2.1"),
            (get("/").from("[2001:db8:1:2:3::4]:1"), "ip:2001%3Adb8%3A1%3A2%3A%3A/64"),
            (get("/").with("x-forwarded-for", "203.0.113.9"), "ip:192.0.2.1"),
            (get("/").of_unknown_origin(), ""),
        ],
    )
    .await;
    check(
        Route::any(),
        KeyExtractor::peer(),
        vec![(get("/"), "peer:192.0.2.1"), (get("/").of_unknown_origin(), "")],
    )
    .await;
    check(
        Route::any(),
        KeyExtractor::header("X-User").namespace("user"),
        vec![
            (get("/").with("x-user", "alice"), "user:alice"),
            (get("/").with("x-user", "a:b%c"), "user:a%3Ab%25c"),
            (get("/").with("x-user", " Alice "), "user: Alice "),
            (get("/").with("x-user", "käse"), "user:käse"),
            (get("/"), ""),
            (get("/").with("x-user", ""), ""),
            (get("/").with("x-user", "alice").with("x-user", "bob"), ""),
            (get("/").with("x-user", &"x".repeat(1025)), ""),
        ],
    )
    .await;
    check(
        Route::any(),
        KeyExtractor::bearer(),
        vec![
            (get("/").with("authorization", "Bearer t0k"), "bearer:t0k"),
            (get("/").with("authorization", "bearer t0k"), "bearer:t0k"),
            (get("/").with("authorization", "Basic dTpw"), ""),
            (get("/").with("authorization", "Bearer a").with("authorization", "Bearer b"), ""),
            (get("/"), ""),
        ],
    )
    .await;
    check(
        Route::at("/tenants/{tenant}/users/{user}"),
        KeyExtractor::path_parameter("tenant"),
        vec![
            (get("/tenants/acme/users/7"), "tenant:acme"),
            (get("/tenants/a%20b/users/7"), "tenant:a b"),
            (get("//tenants/./acme/users/8"), "tenant:acme"),
        ],
    )
    .await;
    #[derive(Clone)]
    struct User(u64);
    check(
        Route::any(),
        KeyExtractor::extension("user", |user: &User| user.0.to_string()),
        vec![(get("/").knowing(User(42)), "user:42"), (get("/"), "")],
    )
    .await;
    check(
        Route::at("/{shop}/buy"),
        KeyExtractor::function("cart", |head| {
            Some(format!("{}/{}", head.parameter("shop")?, head.header("cart")?))
        }),
        vec![(get("/s1/buy").with("cart", "c9"), "cart:s1/c9"), (get("/s1/buy"), "")],
    )
    .await;
}

#[tokio::test]
async fn a_request_without_a_key_is_charged_as_configured() {
    let extractor = |missing| KeyExtractor::header("x-user").if_missing(missing);
    check(
        Route::any(),
        extractor(MissingKey::Shared),
        vec![
            (get("/"), "x-user:missing:shared"),
            (get("/").with("x-user", "missing"), "x-user:missing"),
            // What is there and makes no sense is not the same as what is not there.
            (get("/").with("x-user", ""), ""),
        ],
    )
    .await;
    check(
        Route::any(),
        extractor(MissingKey::Ip),
        vec![
            (get("/"), "ip:192.0.2.1"),
            (get("/").of_unknown_origin(), ""),
            (get("/").with("x-user", "a"), "x-user:a"),
        ],
    )
    .await;
    check(Route::any(), extractor(MissingKey::Deny), vec![(get("/"), "")]).await;
}

#[tokio::test]
async fn names_are_folded_where_that_is_asked_for() {
    let folded = KeyExtractor::header("x-user").folded();
    check(
        Route::any(),
        folded,
        vec![
            (get("/").with("x-user", " Alice"), "x-user:alice"),
            (get("/").with("x-user", "ＡＬＩＣＥ"), "x-user:alice"),
            (get("/").with("x-user", "  "), ""),
        ],
    )
    .await;
}

#[tokio::test]
async fn proxies_are_believed_where_they_are_named() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("api", window(1)));
        let (service, _) = serve(&gate, |layer| {
            layer
                .limit(RouteLimit::new("api", KeyExtractor::ip()))
                .client(ClientAddress::behind(["192.0.2.0/24".parse().expect("a network")]))
        });
        let through = |chain: &str| get("/").with("x-forwarded-for", chain);
        // The left is the client's to invent, and does not make a fresh key.
        let chains = ["203.0.113.9", "1.1.1.1, 203.0.113.9", "2.2.2.2, 203.0.113.9", "203.0.113.10"];
        assert_eq!(statuses(&service, chains.map(through)).await, [200, 429, 429, 200], "{on:?}");
        assert_eq!(used(&gate, "api", "ip:203.0.113.9").await, 1);
    }
}

#[tokio::test]
async fn a_limit_in_shadow_mode_does_not_let_a_request_without_a_key_pass() {
    let (gate, _) =
        gate(On::Memory, |gate| gate.rule(tollgate::Rule::new("api", window(1)).expect("a rule").shadow()));
    let (service, _) =
        serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::header("x-user"))));
    assert_eq!(statuses(&service, [get("/")]).await, [429]);
    let user = || get("/").with("x-user", "a");
    assert_eq!(statuses(&service, [user(), user(), user()]).await, [200, 200, 200]);
    assert_eq!(ask(&service, user()).await.field("x-ratelimit-limit"), "");
}
