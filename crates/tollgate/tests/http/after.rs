//! What is corrected once the answer is known: by its status, by a header, by its bytes; and leases, which end with it.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use tokio::sync::Semaphore;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::store::{
    Charged, Hold, MemoryOptions, MemoryStore, Store, StoreFuture, StoredCharge, StoredLimit,
};
use tollgate::{ChargeId, Limit, Settled, Settlement, Tollgate};

use crate::scene::{BOTH, On, ask, gate, get, head_of, post, serve, statuses, used, window};

/// Lets tasks that were started behind a caller's back finish.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn only_what_the_answer_says_counts() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("logins", window(3)));
        let (service, inside) = serve(&gate, |layer| {
            let logins = RouteLimit::new("logins", KeyExtractor::ip()).count_if(|status| status == 401);
            layer.limit(logins.on(Route::post("/login")))
        });
        let right = || post("/login");
        let wrong = || post("/login").with("want-status", "401");
        assert_eq!(
            statuses(&service, [right(), right(), right(), right(), right()]).await,
            [200; 5],
            "{on:?}"
        );
        assert_eq!(used(&gate, "logins", "ip:192.0.2.1").await, 0, "{on:?}");
        assert_eq!(statuses(&service, [wrong(), right(), wrong(), right(), wrong()]).await[4], 401, "{on:?}");
        // Three failures: now not even the right password is tried.
        assert_eq!(statuses(&service, [wrong(), right()]).await, [429, 429], "{on:?}");
        assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 10, "{on:?}");
    }
}

#[tokio::test]
async fn many_at_once_cannot_all_pass_before_the_first_is_answered() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("logins", window(3)));
        let (service, inside) = serve(&gate, |layer| {
            let logins = RouteLimit::new("logins", KeyExtractor::ip()).count_if(|status| status == 401);
            layer.limit(logins)
        });
        let guesses = (0..50).map(|_| {
            let service = service.clone();
            tokio::spawn(async move { ask(&service, post("/login").with("want-status", "401")).await.status })
        });
        let mut tried = 0;
        for guess in guesses.collect::<Vec<_>>() {
            tried += usize::from(guess.await.expect("a task") == 401);
        }
        assert_eq!((tried, inside.calls.load(std::sync::atomic::Ordering::Relaxed)), (3, 3), "{on:?}");
    }
}

#[tokio::test]
async fn a_header_of_the_answer_says_what_it_cost() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("units", window(100)).limit("requests", window(100)));
        let (service, _) = serve(&gate, |layer| {
            let units = RouteLimit::new("units", KeyExtractor::ip()).cost(10);
            let name = http::HeaderName::from_static("x-cost");
            layer.limit(units.settle_by_header(name)).limit(RouteLimit::new("requests", KeyExtractor::ip()))
        });
        let costing = |cost: &str| get("/").with("want-cost", cost);
        for (asked, total) in
            [(costing("3"), 3), (costing("25"), 28), (get("/"), 38), (costing("0"), 38), (costing("70"), 100)]
        {
            assert_eq!(ask(&service, asked).await.status, 200, "{on:?}");
            assert_eq!(used(&gate, "units", "ip:192.0.2.1").await, total, "{on:?}");
        }
        // It was more than there was: what is over is a debt, and nobody passes until the window ends.
        assert_eq!(ask(&service, get("/")).await.status, 429, "{on:?}");
        assert_eq!(used(&gate, "requests", "ip:192.0.2.1").await, 5, "{on:?}");
    }
}

#[tokio::test]
async fn bytes_are_charged_as_they_are_handed_on() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("bytes", window(10_000)));
        let (service, _) = serve(&gate, |layer| {
            layer.limit(RouteLimit::new("bytes", KeyExtractor::ip()).cost(1_000).settle_by_bytes_sent())
        });
        let answer = ask(&service, get("/").with("want-bytes", "4321")).await;
        assert_eq!(answer.field("ratelimit-policy"), "\"bytes\";q=10000;qu=\"content-bytes\";w=60");
        settle().await;
        assert_eq!(used(&gate, "bytes", "ip:192.0.2.1").await, 4_321, "{on:?}");
        // Nobody reads the body: nothing was handed on.
        drop(head_of(&service, get("/").with("want-bytes", "999")).await);
        settle().await;
        assert_eq!(used(&gate, "bytes", "ip:192.0.2.1").await, 4_321, "{on:?}");
        // Nobody waits for the answer: what was set aside stays.
        let given_up = head_of(&service, get("/").with("want-nothing", ""));
        assert!(tokio::time::timeout(Duration::from_millis(5), given_up).await.is_err());
        settle().await;
        assert_eq!(used(&gate, "bytes", "ip:192.0.2.1").await, 5_321, "{on:?}");
    }
}

#[tokio::test]
async fn a_function_that_panics_gives_nothing_back() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| {
            gate.limit("units", window(100)).limit("bytes", window(1_000)).limit("logins", window(5))
        });
        let (service, _) = serve(&gate, |layer| {
            let units = RouteLimit::new("units", KeyExtractor::ip()).cost(10);
            layer
                .limit(RouteLimit::new("bytes", KeyExtractor::ip()).cost(300).settle_by_bytes_sent())
                // Regression: what a function before it had said was given back.
                .limit(RouteLimit::new("logins", KeyExtractor::ip()).count_if(|status| status == 401))
                .limit(units.settle_by(|_| panic!("a mistake of the service's own")))
        });
        let asked = tokio::spawn(async move { head_of(&service, get("/")).await.status() });
        assert!(asked.await.expect_err("it panics").is_panic(), "{on:?}");
        settle().await;
        assert_eq!(used(&gate, "units", "ip:192.0.2.1").await, 10, "{on:?}");
        assert_eq!(used(&gate, "bytes", "ip:192.0.2.1").await, 300, "{on:?}");
        assert_eq!(used(&gate, "logins", "ip:192.0.2.1").await, 1, "{on:?}");
    }
}

#[tokio::test]
async fn a_function_that_panics_before_the_charge_charges_nothing() {
    for on in BOTH {
        for number in 0..3 {
            let (gate, _) = gate(on, |gate| gate.limit("first", window(9)).limit("second", window(9)));
            let (service, inside) = serve(&gate, |layer| {
                let fails = match number {
                    0 => RouteLimit::choose(
                        |_| -> Option<&'static str> { panic!("a mistake") },
                        KeyExtractor::ip(),
                    ),
                    1 => RouteLimit::new("second", KeyExtractor::ip()).cost_by(|_| panic!("a mistake")),
                    _ => RouteLimit::new("second", KeyExtractor::function("user", |_| panic!("a mistake"))),
                };
                layer.limit(RouteLimit::new("first", KeyExtractor::ip())).limit(fails)
            });
            let asked = tokio::spawn(async move { head_of(&service, get("/")).await.status() });
            assert!(asked.await.expect_err("it panics").is_panic(), "{on:?} {number}");
            settle().await;
            assert_eq!(used(&gate, "first", "ip:192.0.2.1").await, 0, "{on:?} {number}");
            assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 0, "it does not pass");
        }
    }
}

#[tokio::test]
async fn a_lease_lasts_until_the_body_is_out() {
    for on in BOTH {
        let at_once = Limit::concurrency(2, Duration::from_secs(60)).expect("a limit");
        let (gate, _) = gate(on, |gate| gate.limit("at-once", at_once));
        let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("at-once", KeyExtractor::ip())));
        let first = head_of(&service, get("/")).await;
        let second = head_of(&service, get("/")).await;
        let third = ask(&service, get("/")).await;
        assert_eq!(third.status, 429, "{on:?}");
        assert_eq!(third.field("ratelimit-policy"), "\"at-once\";q=2;qu=\"concurrent-requests\"");
        first.into_body().collect().await.expect("a body");
        settle().await;
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
        settle().await;
        drop(second);
        settle().await;
        assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0, "{on:?}");
        // One that goes away before its answer gives its lease back too.
        let given_up = head_of(&service, get("/").with("want-nothing", ""));
        assert!(tokio::time::timeout(Duration::from_millis(5), given_up).await.is_err());
        settle().await;
        assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0, "{on:?}");
    }
}

#[tokio::test]
async fn what_only_the_body_knows_keeps_the_rest_waiting_and_all_is_settled_once() {
    for on in BOTH {
        let at_once = Limit::concurrency(1, Duration::from_secs(60)).expect("a limit");
        let (gate, _) = gate(on, |gate| gate.limit("at-once", at_once).limit("failures", window(9)));
        let (service, _) = serve(&gate, |layer| {
            let failures = RouteLimit::new("failures", KeyExtractor::ip()).cost(2);
            layer
                .limit(RouteLimit::new("at-once", KeyExtractor::ip()))
                .limit(failures.count_if(|status| status.is_server_error()))
        });
        let answer = head_of(&service, get("/")).await;
        settle().await;
        assert_eq!(used(&gate, "failures", "ip:192.0.2.1").await, 2, "{on:?}: not yet");
        drop(answer);
        settle().await;
        assert_eq!(used(&gate, "failures", "ip:192.0.2.1").await, 0, "{on:?}");
        assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0, "{on:?}");
        assert_eq!(ask(&service, get("/").with("want-status", "500")).await.status, 500);
        settle().await;
        assert_eq!(used(&gate, "failures", "ip:192.0.2.1").await, 2, "{on:?}");
    }
}

#[tokio::test]
async fn a_cost_is_what_the_request_asks_for() {
    let (gate, _) = gate(On::Memory, |gate| gate.limit("units", window(10)));
    let (service, _) = serve(&gate, |layer| {
        let cost = |head: &tollgate::route::RequestHead<'_>| {
            head.header("units").map_or(1, |n| n.parse().unwrap_or(1))
        };
        layer.limit(RouteLimit::new("units", KeyExtractor::ip()).cost_by(cost))
    });
    let costing = |cost: &str| get("/").with("units", cost);
    assert_eq!(ask(&service, costing("7")).await.field("x-ratelimit-remaining"), "3");
    // What costs nothing is not asked about.
    let free = ask(&service, costing("0")).await;
    assert_eq!((free.status, free.field("x-ratelimit-remaining")), (200, ""));
    let denied = ask(&service, costing("4")).await;
    assert_eq!((denied.status, denied.field("retry-after")), (429, "60"));
    let never = ask(&service, costing("11")).await;
    assert_eq!((never.status, never.field("retry-after")), (429, ""));
    assert_eq!(ask(&service, costing("3")).await.field("x-ratelimit-remaining"), "0");
}

/// A store that charges at once and answers only when it is reported to.
struct Slow {
    store: MemoryStore,
    go: Semaphore,
}

impl Store for Slow {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            let charged = Store::charge(&self.store, items, hold).await;
            self.go.acquire().await.expect("it stays open").forget();
            charged
        })
    }
    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Store::settle(&self.store, id, settlement)
    }
    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Store::peek(&self.store, items)
    }
    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Store::forget(&self.store, limit, key)
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_while_the_store_is_asked_leaves_no_lease() {
    let at_once = Limit::concurrency(1, Duration::from_secs(3_600)).expect("a limit");
    let slow = Arc::new(Slow { store: MemoryStore::new(MemoryOptions::default()), go: Semaphore::new(0) });
    let gate = Tollgate::builder().limit("at-once", at_once).store(slow.clone()).build().expect("a registry");
    let (service, inside) = serve(&gate, |layer| layer.limit(RouteLimit::new("at-once", KeyExtractor::ip())));
    let asked = head_of(&service, get("/"));
    assert!(tokio::time::timeout(Duration::from_millis(5), asked).await.is_err());
    slow.go.add_permits(1);
    settle().await;
    assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0);
    slow.go.add_permits(1);
    assert_eq!(ask(&service, get("/")).await.status, 200);
    assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[tokio::test]
async fn of_two_tolls_under_one_limit_neither_gives_back_what_the_other_paid() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| gate.limit("both", window(2)));
        let (service, _) = serve(&gate, |layer| {
            let failures =
                RouteLimit::new("both", KeyExtractor::header("x-user")).count_if(|status| status == 401);
            layer.limit(RouteLimit::new("both", KeyExtractor::ip())).limit(failures)
        });
        let asked = |user: &str| get("/").with("x-user", user);
        let five = statuses(&service, ["a", "b", "c", "d", "e"].map(asked)).await;
        assert_eq!(five, [200, 200, 429, 429, 429], "{on:?}");
    }
}

/// A store whose settlements wait until they are reported to go on.
struct SlowToSettle(Slow);

impl Store for SlowToSettle {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Store::charge(&self.0.store, items, hold)
    }
    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async move {
            self.0.go.acquire().await.expect("it stays open").forget();
            Store::settle(&self.0.store, id, settlement).await
        })
    }
    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Store::peek(&self.0.store, items)
    }
    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Store::forget(&self.0.store, limit, key)
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_while_it_is_settled_pays_what_it_cost() {
    let slow = Slow { store: MemoryStore::new(MemoryOptions::default()), go: Semaphore::new(0) };
    let slow = Arc::new(SlowToSettle(slow));
    let gate =
        Tollgate::builder().limit("units", window(1_000)).store(slow.clone()).build().expect("a registry");
    let (service, _) = serve(&gate, |layer| {
        layer.limit(RouteLimit::new("units", KeyExtractor::ip()).settle_by(|_| Some(500)))
    });
    let asked = head_of(&service, get("/"));
    assert!(tokio::time::timeout(Duration::from_millis(5), asked).await.is_err());
    slow.0.go.add_permits(1);
    settle().await;
    assert_eq!(used(&gate, "units", "ip:192.0.2.1").await, 500);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_for_as_long_as_its_request_takes() {
    for on in BOTH {
        let at_once = Limit::concurrency(1, Duration::from_secs(3)).expect("a limit");
        let (gate, hands) = gate(on, |gate| gate.limit("at-once", at_once));
        let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("at-once", KeyExtractor::ip())));
        let first = head_of(&service, get("/")).await;
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            settle().await;
            hands.advance(Duration::from_secs(1));
            assert_eq!(ask(&service, get("/")).await.status, 429, "{on:?}: the first is still inside");
        }
        drop(first);
        settle().await;
        assert_eq!(ask(&service, get("/")).await.status, 200, "{on:?}");
    }
}

/// What is logged, as text.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("a lock").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A process that stood still for longer than its lease went on beside its successor, and nobody was reported.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_gone_when_it_is_renewed_is_logged_and_counted_once() {
    let log = Log::default();
    let lines = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || lines.clone()).with_ansi(false).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    let at_once = Limit::concurrency(1, Duration::from_secs(3)).expect("a limit");
    let (gate, hands) = gate(On::FaultyStore, |gate| gate.limit("at-once", at_once));
    let (service, _) = serve(&gate, |layer| layer.limit(RouteLimit::new("at-once", KeyExtractor::ip())));
    let first = head_of(&service, get("/")).await;
    hands.advance(Duration::from_secs(5));
    let second = head_of(&service, get("/")).await;
    assert_eq!(second.status(), 200, "the lease has run out, and the place is taken by another");
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        settle().await;
    }
    assert_eq!(gate.store_health().leases_lost, 1);
    let text = String::from_utf8(log.0.lock().expect("a lock").clone()).expect("text");
    let lost: Vec<&str> = text.lines().filter(|line| line.contains("lease was gone")).collect();
    assert!(lost.len() == 1 && lost[0].contains("WARN") && !lost[0].contains("192.0.2.1"), "{text}");
    drop(first);
    settle().await;
    assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 1, "the successor's place is its own");
    drop(second);
    settle().await;
    assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0);
}

/// The request that holds it is in the same process as the counters, and gives it back however it ends.
#[tokio::test(start_paused = true)]
async fn in_one_process_a_lease_does_not_end_while_its_request_is_inside() {
    let at_once = Limit::concurrency(1, Duration::from_secs(3)).expect("a limit");
    let (gate, hands) =
        gate(On::Memory, |gate| gate.limit("at-once", at_once).limit("units", window(10)).max_keys(20));
    let (service, _) = serve(&gate, |layer| {
        let units = RouteLimit::new("units", KeyExtractor::ip()).count_if(|status| status == 500);
        layer.limit(RouteLimit::new("at-once", KeyExtractor::ip())).limit(units)
    });
    let first = head_of(&service, get("/")).await;
    hands.advance(Duration::from_secs(1_000));
    assert_eq!(ask(&service, get("/")).await.status, 429, "no time for a renewal, and still inside");
    assert_eq!(gate.store_health().leases_lost, 0);
    drop(first);
    settle().await;
    assert_eq!(used(&gate, "at-once", "ip:192.0.2.1").await, 0);
    // Nothing is left of the reservations either, whose time to live had no end: there is room for only a few.
    for _ in 0..1_000 {
        assert_eq!(ask(&service, get("/")).await.status, 200);
        settle().await;
    }
}
