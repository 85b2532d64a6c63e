//! The fast path on local counters gives the same answers as the slow path, and is not taken with an observer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use std::time::Duration;
use tollgate::headers::{Format, ResetAs};
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::telemetry::{Event, Observer};
use tollgate::{Limit, TollgateBuilder};

use crate::scene::{Asked, On, ask, gate, get, serve, window};

/// Counts its events. With an observer no charge takes the fast path.
#[derive(Clone, Default)]
struct Seen(Arc<AtomicUsize>);

impl Observer for Seen {
    fn decided(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Everything that a caller is reported of some requests, each a second after the other, with and without somebody looking on.
async fn check(route_limits: &[RouteLimit], format: Format, asked: impl Fn() -> Vec<Asked>, events: usize) {
    let limits = |gate: TollgateBuilder| {
        let bucket = Limit::token_bucket("1/s", 3).expect("a limit");
        let leaky = Limit::leaky_bucket("10/s", 3).expect("a limit");
        let sliding = Limit::sliding_window(2, Duration::from_secs(5)).expect("a limit");
        let gate = gate.limit("bucket", bucket).limit("leaky", leaky).limit("sliding", sliding);
        gate.limit("window", window(2))
    };
    let seen = Seen::default();
    let mut reported = Vec::new();
    for looks_on in [false, true] {
        let observer = Arc::new(seen.clone());
        let (gate, hands) =
            gate(On::Memory, |gate| if looks_on { limits(gate).observer(observer) } else { limits(gate) });
        let (service, _) = serve(&gate, |layer| {
            route_limits
                .iter()
                .fold(layer.headers(format), |layer, route_limit| layer.limit(route_limit.clone()))
        });
        let mut answers = Vec::new();
        for asked in asked() {
            let answer = ask(&service, asked).await;
            answers.push(format!("{answer:?}"));
            hands.advance(Duration::from_millis(700));
        }
        reported.push(answers);
    }
    assert_eq!(reported[0], reported[1], "{route_limits:?} {format:?}");
    assert_eq!(seen.0.load(Ordering::Relaxed), events, "{route_limits:?}");
}

#[tokio::test(start_paused = true)]
async fn both_ways_tell_the_same() {
    let user = |limit: &str| RouteLimit::new(limit, KeyExtractor::header("x-user"));
    let all = |limit: &str| RouteLimit::new(limit, KeyExtractor::constant("all"));
    let asked = || {
        let by = |user: &str| get("/").with("x-user", user);
        vec![
            by("a"),
            by("a"),
            by("b"),
            by("a%:"),
            get("/"),
            by("a"),
            by("a").with("content-type", "application/grpc"),
        ]
    };
    let both = Format::default();
    let unix = Format { reset: ResetAs::UnixTime, ..both };
    for (route_limits, format) in [
        (vec![user("window")], both),
        (vec![user("bucket").cost(2)], both),
        (vec![user("bucket").cost(4)], both),
        (vec![user("window")], Format::none()),
        (vec![user("window")], unix),
        (vec![user("leaky")], both),
        (vec![all("bucket"), user("window"), user("sliding")], both),
        (vec![all("bucket"), user("leaky")], both),
        // The same twice.
        (vec![user("bucket"), user("bucket")], both),
    ] {
        check(&route_limits, format, asked, 7 * route_limits.len()).await;
    }
}
