//! Each strategy, step by step: the whole answer to every request. The numbers were worked out by hand from the rules.

use std::time::Duration;
use tollgate::headers::ResetAs;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::{Limit, Rate};
use tollgate_testkit::http::{Answer, Connection};

use crate::scene::{ALL, Scene, format, reported};

/// One limit: its name, what `RateLimit-Policy` and the words of a refusal say of it, and what happens.
struct Table {
    name: &'static str,
    limit: Limit,
    policy: &'static str,
    words: &'static str,
    /// How many ms later · what it costs · status · remaining · reset in seconds · reset in seconds since the table's start ·
    /// `Retry-After` · `t` of `RateLimit`. A dash is for what is not reported.
    steps: &'static [&'static str],
}

fn tables() -> [Table; 6] {
    let rate = |text: &str| text.parse::<Rate>().expect("a rate");
    let minute = Duration::from_secs(60);
    [
        Table {
            name: "tokens",
            limit: Limit::token_bucket(rate("3/m"), 3).expect("a limit"),
            policy: "q=3;w=60",
            words: "3/m, bursts of 3",
            steps: &[
                // A token comes every 20 s.
                "    0 1 200 2 20  20  - 20",
                " 5500 1 200 1 15  20  - 15",
                "    0 1 200 0 15  20  - 15",
                "    0 1 429 0 15  20 15 15",
                "14499 1 429 0  1  20  1  1",
                "    1 1 200 0 20  40  - 20",
                // Four never fit; the bucket is full again in a minute.
                "    0 4 429 0 60  80  -  -",
                // Full again, and all of it is taken.
                "100000 3 200 0 60 180  - 60",
                "    0 2 429 0 40 160 40 40",
            ],
        },
        Table {
            name: "even",
            limit: Limit::leaky_bucket(rate("100/s"), 3).expect("a limit"),
            policy: "q=3;w=1",
            words: "100/s evenly, up to 3 waiting",
            steps: &[
                // The second and third are held back for 10 and 20 ms.
                "0 1 200 2 1 1 - 1",
                "0 1 200 1 1 1 - 1",
                "0 1 200 0 1 1 - 1",
                "0 1 429 0 1 1 1 1",
                "10 1 200 0 1 1 - 1",
                "0 4 429 0 1 1 - -",
            ],
        },
        Table {
            name: "slow",
            limit: Limit::leaky_bucket(rate("1/m"), 3).expect("a limit"),
            policy: "q=3;w=180",
            words: "1/m evenly, up to 3 waiting",
            steps: &[
                "    0 1 200 2 60 60 - 60",
                // It would be held back for a minute, and five seconds is the most.
                "    0 1 429 2 55 55 55 55",
                "54999 1 429 2  1 55  1  1",
                " 5001 1 200 2 60 120 - 60",
            ],
        },
        Table {
            name: "window",
            limit: Limit::fixed_window(3, minute).expect("a limit"),
            policy: "q=3;w=60",
            words: "3 per 1m window",
            steps: &[
                "     0 1 200 2 60  60  - 60",
                " 10500 2 200 0 50  60  - 50",
                "     0 1 429 0 50  60 50 50",
                " 49499 1 429 0  1  60  1  1",
                "     1 1 200 2 60 120  - 60",
                "     0 4 429 2 60 120  - 60",
                "200000 1 200 2 60 320  - 60",
            ],
        },
        Table {
            name: "log",
            limit: Limit::sliding_window(3, minute).expect("a limit"),
            policy: "q=3;w=60",
            words: "3 in any 1m",
            steps: &[
                "    0 1 200 2 60  60  - 60",
                // It is empty a minute after the newest entry, at 80.5 s.
                "20500 2 200 0 60  81  - 60",
                // One fits when the first is gone, two when the second is.
                "    0 1 429 0 60  81 40 40",
                "    0 2 429 0 60  81 60 60",
                "39499 1 429 0 21  81  1  1",
                "    1 1 200 0 60 120  - 60",
            ],
        },
        Table {
            name: "counter",
            limit: Limit::sliding_window_counter(4, minute).expect("a limit"),
            policy: "q=4;w=60",
            words: "about 4 in any 1m",
            steps: &[
                // What is counted in one window is forgotten at the end of the next.
                "    0 3 200 1 120 120  - 120",
                // Two fit when the three weigh no more than two: 20 s into the next window.
                "    0 2 429 1 120 120 80  80",
                "70500 1 200 0 110 180  - 110",
                "    0 1 429 0 110 180 10  10",
                " 9499 1 429 0 101 180  1   1",
                "    1 1 200 0 100 180  - 100",
            ],
        },
    ]
}

/// Goes through a table, each step once with the reset in seconds and once as a time.
fn check(scene: &Scene, table: &Table) {
    let mut callers = [ResetAs::Seconds, ResetAs::UnixTime].map(|reset| {
        let cost = |head: &tollgate::route::RequestHead<'_>| {
            head.header("x-cost").and_then(|cost| cost.parse().ok()).unwrap_or(1)
        };
        let route_limit = RouteLimit::new(table.name, KeyExtractor::header("x-user")).cost_by(cost);
        let layer = LimitLayer::builder(&scene.gate).limit(route_limit).headers(format(reset));
        (reset, Connection::open(scene.serve(layer.build().expect("a layer"))))
    });
    let start = scene.next_hour();
    for step in table.steps {
        let columns: Vec<&str> = step.split_whitespace().collect();
        let [wait_ms, cost, status, left, reset, reset_at, retry, more] = columns[..] else {
            panic!("a step has eight columns: {step}")
        };
        scene.hands.advance(Duration::from_millis(wait_ms.parse().expect("ms")));
        for (format, caller) in &mut callers {
            // Each pays for itself, so that one table is true of both.
            let lines = [format!("x-user: {format:?}"), format!("x-cost: {cost}")];
            let answer = caller.ask("GET", "/", &lines.each_ref().map(String::as_str));
            let reset = match format {
                ResetAs::Seconds => reset.to_owned(),
                ResetAs::UnixTime => (start + reset_at.parse::<u64>().expect("seconds")).to_string(),
            };
            let Table { name, policy, .. } = table;
            let capacity = table.limit.capacity();
            let mut expected =
                format!("{status}\nx-ratelimit-limit: {capacity}\nx-ratelimit-remaining: {left}\n");
            expected += &format!("x-ratelimit-reset: {reset}\n");
            if retry != "-" {
                expected += &format!("retry-after: {retry}\n");
            }
            expected += &format!("ratelimit-policy: \"{name}\";{policy}\nratelimit: \"{name}\";r={left}");
            if more != "-" {
                expected += &format!(";t={more}");
            }
            assert_eq!(reported(&answer), expected, "{name}, {format:?}, at `{step}`");
            check_body(&answer, table, cost, retry);
        }
    }
}

/// What was let through has the service's own body, and what was not the layer's.
fn check_body(answer: &Answer, table: &Table, cost: &str, retry: &str) {
    if answer.status == 200 {
        assert_eq!((&*answer.body, answer.field("cache-control")), ("fine", None));
        return;
    }
    let until = match retry {
        "-" => format!("a cost of {cost} can never fit"),
        seconds => format!("retry after {seconds} s"),
    };
    let body = format!(
        "{{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\"title\":\"Quota exceeded\",\
         \"status\":429,\"detail\":\"{name} allows {words}; {until}\",\"violated-policies\":[\"{name}\"]}}",
        name = table.name,
        words = table.words,
    );
    assert_eq!(answer.body, body);
    assert_eq!(answer.field("content-type"), Some("application/problem+json"));
    assert_eq!(answer.field("cache-control"), Some("no-store"));
    assert_eq!(answer.field("content-length"), Some(&*body.len().to_string()));
}

#[test]
fn every_strategy_tells_its_callers_the_same_on_every_store() {
    let tables = tables();
    for on in ALL {
        let scene = Scene::new(on, |gate| {
            tables.iter().fold(gate, |gate, table| gate.limit(table.name, table.limit))
        });
        for table in &tables {
            println!("{on:?}: {}", table.name);
            check(&scene, table);
        }
    }
}
