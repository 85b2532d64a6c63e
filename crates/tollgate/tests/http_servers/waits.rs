//! `Retry-After` is enough: a client that waits for that long gets through. A property of random limits and random callers.

use std::time::Duration;
use tollgate::Limit;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RequestHead, RouteLimit};
use tollgate_testkit::Random;
use tollgate_testkit::http::Connection;

use crate::scene::{On, Scene, number};

/// The highest cost of a request; some limits can never admit it.
const MOST: u64 = 4;

fn limit(random: &mut Random) -> Limit {
    let window = Duration::from_millis(1 + random.below(20_000));
    let count = 1 + random.below(6);
    let rate = format!("{}/{}ms", 1 + random.below(5), 1 + random.below(20_000))
        .parse::<tollgate::Rate>()
        .expect("a rate");
    let limit = match random.below(6) {
        0 => Limit::token_bucket(rate, count),
        1 => Limit::leaky_bucket(rate, count),
        2 => Limit::fixed_window(count, window),
        3 => Limit::clock_window(count, window),
        4 => Limit::sliding_window(count, window),
        _ => Limit::sliding_window_counter(count, window),
    };
    limit.expect("a limit")
}

/// One random history under one to three random limits. Returns how often somebody waited.
fn check(seed: u64) -> usize {
    let mut random = Random::seeded(seed);
    let limits: Vec<Limit> = (0..=random.below(3)).map(|_| limit(&mut random)).collect();
    let most = limits.iter().map(Limit::capacity).min().expect("at least one");
    let names = ["a", "b", "c"];
    let scene = Scene::new(On::Memory, |gate| {
        names.into_iter().zip(&limits).fold(gate, |gate, (name, limit)| gate.limit(name, *limit))
    });
    let cost = |head: &RequestHead<'_>| head.header("x-cost").and_then(|cost| cost.parse().ok()).unwrap_or(1);
    // What a leaky bucket would hold back is refused, so that nothing waits but by the clock.
    let layer = LimitLayer::builder(&scene.gate).most_delay(std::time::Duration::ZERO);
    let layer = names.into_iter().zip(&limits).fold(layer, |layer, (name, _)| {
        layer.limit(RouteLimit::new(name, KeyExtractor::constant("all")).cost_by(cost))
    });
    let mut caller = Connection::open(scene.serve(layer.build().expect("a layer")));
    let mut waited = 0;
    for step in 0..40 {
        scene.hands.advance(Duration::from_micros(random.below(3_000_000)));
        let cost = 1 + random.below(MOST);
        let line = format!("x-cost: {cost}");
        let answer = caller.ask("GET", "/", &[&line]);
        let context = || format!("seed {seed}, step {step}, cost {cost}, {limits:?}: {answer:?}");
        assert!(
            number(&answer, "x-ratelimit-remaining") <= number(&answer, "x-ratelimit-limit"),
            "{}",
            context()
        );
        match (answer.status, number(&answer, "retry-after")) {
            (200, None) => assert!(cost <= most, "{}", context()),
            (429, None) => assert!(cost > most, "only what can never fit need not wait: {}", context()),
            (429, Some(seconds)) => {
                assert!(seconds >= 1 && cost <= most, "{}", context());
                if random.chance(500) {
                    scene.hands.advance(Duration::from_secs(seconds));
                    let again = caller.ask("GET", "/", &[&line]);
                    assert_eq!(again.status, 200, "{}, and after as long: {again:?}", context());
                    waited += 1;
                }
            }
            _ => panic!("{}", context()),
        }
    }
    waited
}

#[test]
fn waiting_as_long_as_was_said_is_enough() {
    let waited: usize = (0..150).map(check).sum();
    assert!(waited > 300, "only {waited} callers waited, too few to mean anything");
}
