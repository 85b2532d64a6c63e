//! Leaky buckets hold requests back, up to a bound.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::{Limit, Rule};

use crate::scene::{BOTH, ask, gate, get, serve, used};

/// One request a second, and up to ten that wait.
fn leaky() -> Limit {
    Limit::leaky_bucket("1/s", 10).expect("a limit")
}

#[tokio::test(start_paused = true)]
async fn requests_leave_evenly() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("even", leaky()));
        let (service, _) = serve(&gate, |layer| {
            layer.limit(RouteLimit::new("even", KeyExtractor::ip())).most_delay(Duration::from_secs(60))
        });
        let started = Instant::now();
        let asked: Vec<_> = (0..4)
            .map(|_| {
                let service = service.clone();
                tokio::spawn(async move {
                    let status = ask(&service, get("/")).await.status;
                    (status, started.elapsed().as_secs())
                })
            })
            .collect();
        let mut left = Vec::new();
        for asked in asked {
            left.push(asked.await.expect("a task"));
        }
        left.sort_unstable();
        assert_eq!(left, [(200, 0), (200, 1), (200, 2), (200, 3)], "{on:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_would_wait_too_long_is_given_back_and_denied() {
    for on in BOTH {
        let (gate, hands) = gate(on, |gate| gate.limit("even", leaky()));
        let (service, inside) = serve(&gate, |layer| {
            layer.limit(RouteLimit::new("even", KeyExtractor::ip())).most_delay(Duration::from_secs(2))
        });
        for _ in 0..3 {
            assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
        }
        let denied = ask(&service, get("/")).await;
        assert_eq!((denied.status, denied.field("retry-after")), (429, "1"), "{on:?}");
        assert_eq!(used(&gate, "even", "ip:192.0.2.1").await, 3, "{on:?}: the fourth was given back");
        assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 3, "{on:?}");
        // After as long as it was reported, it waits no longer than is allowed.
        hands.advance(Duration::from_secs(1));
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
    }
}

/// A full bucket reported its caller to come back when there would be room, where the request was then refused again, because it
/// would have had to wait in it for too long.
#[tokio::test(start_paused = true)]
async fn who_meets_a_full_bucket_is_told_when_the_wait_in_it_is_short_enough() {
    for on in BOTH {
        let (gate, hands) = gate(on, |gate| gate.limit("even", leaky()));
        let (service, _) = serve(&gate, |layer| {
            let cost = |head: &tollgate::route::RequestHead<'_>| if head.path() == "/all" { 10 } else { 1 };
            let route_limit = RouteLimit::new("even", KeyExtractor::ip()).cost_by(cost);
            layer.limit(route_limit).most_delay(Duration::from_secs(2))
        });
        assert_eq!(ask(&service, get("/all")).await.status, 200, "{on:?}");
        let denied = ask(&service, get("/")).await;
        let fields = ["retry-after", "x-ratelimit-remaining", "ratelimit"].map(|name| denied.field(name));
        assert_eq!(fields, ["8", "0", "\"even\";r=0;t=8"], "{on:?}");
        hands.advance(Duration::from_secs(8));
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bucket_that_only_watches_holds_nobody_back() {
    for on in BOTH {
        let watching = Rule::new("even", leaky()).expect("a rule").shadow();
        let (gate, _) = gate(on, |gate| gate.rule(watching));
        let (service, _) = serve(&gate, |layer| {
            layer.limit(RouteLimit::new("even", KeyExtractor::ip())).most_delay(Duration::from_secs(2))
        });
        let started = Instant::now();
        for _ in 0..12 {
            assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
        }
        assert_eq!(started.elapsed(), Duration::ZERO, "{on:?}");
    }
}
