//! A layer follows a reload of its gate: it applies each limit as it is now, whatever it was when the layer was built.

use std::time::Duration;

use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::{Limit, Policy, Rule, Tollgate};

use crate::scene::{BOTH, ask, gate, get, head_of, serve, statuses, window};

fn reload(gate: &Tollgate, limit: Limit) {
    let rule = Rule::new("api", limit).expect("a rule");
    gate.reload(Policy::new([rule]).expect("a policy")).expect("reloaded");
}

#[tokio::test]
async fn the_numbers_of_a_limit_may_change() {
    for on in BOTH {
        let (gate, _hands) = gate(on, |gate| gate.limit("api", window(2)));
        let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::ip())));
        assert_eq!(ask(&service, get("/")).await.field("ratelimit-policy"), "\"api\";q=2;w=60", "{on:?}");
        for limit in [5, 4] {
            reload(&gate, window(limit));
            let answer = ask(&service, get("/")).await;
            assert_eq!(answer.field("ratelimit-policy"), format!("\"api\";q={limit};w=60"), "{on:?}");
        }
        assert_eq!(
            statuses(&service, [get("/"), get("/")]).await,
            [200, 429],
            "{on:?}: three were used before"
        );
    }
}

/// The layer had settled when it was built that nothing is held, and every request was then refused with 503.
#[tokio::test]
async fn a_rate_limit_may_become_a_concurrency_limit_and_back() {
    for on in BOTH {
        let (gate, _hands) = gate(on, |gate| gate.limit("api", window(1)));
        let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("api", KeyExtractor::ip())));
        assert_eq!(statuses(&service, [get("/"), get("/")]).await, [200, 429], "{on:?}");
        reload(&gate, Limit::concurrency(1, Duration::from_secs(60)).expect("a limit"));
        let inside = head_of(&service, get("/")).await;
        assert_eq!(inside.status(), 200, "{on:?}");
        assert_eq!(ask(&service, get("/")).await.status, 429, "{on:?}: one is inside");
        drop(inside);
        gate.flush().await;
        assert_eq!(statuses(&service, [get("/")]).await, [200], "{on:?}: the lease was released");
        gate.flush().await;
        reload(&gate, window(9));
        assert_eq!(statuses(&service, [get("/"), get("/")]).await, [200, 200], "{on:?}");
    }
}
