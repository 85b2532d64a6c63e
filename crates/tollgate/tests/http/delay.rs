//! Leaky buckets hold requests back, up to a bound.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::Limit;
use tollgate::http::{Payer, Route, Toll};

use crate::scene::{BOTH, ask, gate, get, serve, used};

/// One request a second, and up to ten that wait.
fn leaky() -> Limit {
    Limit::leaky_bucket("1/s".parse().expect("a rate"), 10).expect("a limit")
}

#[tokio::test(start_paused = true)]
async fn requests_leave_evenly() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("even", leaky()));
        let (service, _) = serve(&gate, |layer| {
            layer.toll(Route::any(), Toll::new("even", Payer::client())).most_delay(Duration::from_secs(60))
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
            layer.toll(Route::any(), Toll::new("even", Payer::client())).most_delay(Duration::from_secs(2))
        });
        for _ in 0..3 {
            assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
        }
        let denied = ask(&service, get("/")).await;
        assert_eq!((denied.status, denied.field("retry-after")), (429, "1"), "{on:?}");
        assert_eq!(used(&gate, "even", "ip:192.0.2.1").await, 3, "{on:?}: the fourth was given back");
        assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 3, "{on:?}");
        // After as long as it was told, it waits no longer than is allowed.
        hands.advance(tollgate::Micros::from_secs(1));
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
    }
}
