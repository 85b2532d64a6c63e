//! A limit per plan, chosen for each request: by the name of a limit, or with numbers from the application's database.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RequestHead, RouteLimit};
use tollgate::store::{MemoryOptions, MemoryStore, Store};
use tollgate::{Error, Limit, ManualClock, Rate, Tollgate, TollgateBuilder};
use tower::{Layer, Service};

use crate::service;

/// From the database, put there by the layer that authenticates.
#[derive(Clone)]
struct Account {
    per_minute: u64,
}

/// Counters in this process, and a store that is asked as a remote one is.
fn gates(limits: impl Fn(TollgateBuilder) -> TollgateBuilder) -> Vec<Tollgate> {
    let clock = ManualClock::at(Duration::from_secs(1_000));
    let builder = || limits(Tollgate::builder().clock(clock.clock()).denial_cache(Duration::ZERO));
    let options = MemoryOptions { clock: clock.clock(), ..MemoryOptions::default() };
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(options));
    vec![builder().build().unwrap(), builder().store(store).build().unwrap()]
}

async fn status(gate: &Tollgate, limit: RouteLimit, asked: Vec<(Request<()>, u16)>) -> Vec<http::HeaderMap> {
    let app = service::of(|_: &Request<()>| Response::new(String::from("hello")));
    let mut app = LimitLayer::new(gate, [limit]).unwrap().layer(app);
    let mut headers = Vec::new();
    for (number, (request, status)) in asked.into_iter().enumerate() {
        let response = app.call(request).await.unwrap();
        assert_eq!(response.status(), status, "request {number}");
        headers.push(response.headers().clone());
    }
    headers
}

#[tokio::test]
async fn per_plan_with_numbers_of_the_application() -> Result<(), Error> {
    for gate in gates(|gate| gate) {
        let plans = gate.clone();
        let choose = move |request: &RequestHead<'_>| {
            let Account { per_minute } = request.extension()?; // no account: denied
            let limit =
                Limit::token_bucket(Rate::new(*per_minute, Duration::from_secs(60)).ok()?, *per_minute);
            plans.ad_hoc("plan", limit.ok()?).ok()
        };
        let plan = RouteLimit::choose(choose, KeyExtractor::header("x-user"));
        let asked = |user: &str, plan: Option<u64>| {
            let request = Request::builder().header("x-user", user);
            let request = plan
                .into_iter()
                .fold(request, |request, per_minute| request.extension(Account { per_minute }));
            request.body(()).unwrap()
        };
        let headers = status(
            &gate,
            plan,
            vec![
                (asked("ann", Some(1)), 200),
                (asked("ann", Some(1)), 429),
                (asked("bob", Some(2)), 200),
                (asked("bob", Some(2)), 200),
                (asked("eve", None), 429),
                // Other numbers keep the instant at which the bucket is full, as all limits do that come with a call.
                (asked("ann", Some(3)), 429),
            ],
        )
        .await;
        assert_eq!(headers[2]["ratelimit-policy"], "\"plan\";q=2;w=60");
        assert_eq!(headers[1]["retry-after"], "60");
        assert!(!headers[4].contains_key("retry-after"), "waiting does not help");
        assert_eq!(headers[4]["content-type"], "application/problem+json");
    }
    Ok(())
}

fn window(limit: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60)).unwrap()
}

#[derive(Clone, Copy)]
struct Plan(&'static str);

fn named(user: &str, plan: Option<&'static str>) -> Request<()> {
    let request = Request::builder().header("x-user", user);
    let request = plan.into_iter().fold(request, |request, plan| request.extension(Plan(plan)));
    request.body(()).unwrap()
}

#[tokio::test]
async fn per_plan_by_name() {
    for gate in gates(|gate| gate.limit("plan-free", window(1)).limit("plan-pro", window(2))) {
        let plan = RouteLimit::choose(
            |request| Some(request.extension::<Plan>()?.0),
            KeyExtractor::header("x-user"),
        );
        let headers = status(
            &gate,
            plan,
            vec![
                (named("ann", Some("plan-free")), 200),
                (named("ann", Some("plan-free")), 429),
                (named("ann", Some("plan-pro")), 200),
                (named("bob", Some("plan-pro")), 200),
                (named("bob", None), 429),
                // A mistake of the program is not let through, and is no denial.
                (named("bob", Some("plan-gold")), 503),
                (named("", Some("plan-pro")), 429),
                (named("bob", Some("plan-pro")), 200),
                (named("bob", Some("plan-pro")), 429),
            ],
        )
        .await;
        assert_eq!(headers[2]["ratelimit-policy"], "\"plan-pro\";q=2;w=60");
        assert_eq!(headers[5]["retry-after"], "1");
        assert_eq!(gate.status("plan-pro", "x-user:bob").await.unwrap().used(), 2);
        assert_eq!(gate.status("plan-free", "x-user:bob").await.unwrap().used(), 0);
    }
}

/// What a chosen limit needs is done as for a named one: only failures count, and leases are released.
#[tokio::test]
async fn a_chosen_limit_is_settled_and_released() {
    let lease = || Limit::concurrency(1, Duration::from_secs(60)).unwrap();
    for gate in gates(|gate| gate.limit("failures", window(1)).limit("pool", lease())) {
        let by_plan = |request: &RequestHead<'_>| Some(request.extension::<Plan>()?.0);
        let user = || KeyExtractor::header("x-user");
        let twice = |plan| vec![(named("ann", Some(plan)), 200), (named("ann", Some(plan)), 200)];
        status(
            &gate,
            RouteLimit::choose(by_plan, user()).count_if(|status| status == 401),
            twice("failures"),
        )
        .await;
        assert_eq!(gate.status("failures", "x-user:ann").await.unwrap().used(), 0);
        status(&gate, RouteLimit::choose(by_plan, user()), twice("pool")).await;
        // A concurrency limit cannot be settled, so choosing it there is a mistake of the program.
        let settled = RouteLimit::choose(by_plan, user()).count_if(|status| status == 401);
        status(&gate, settled, vec![(named("ann", Some("pool")), 503)]).await;
        let faulty = Tollgate::builder().build().unwrap();
        let foreign = move |_: &RequestHead<'_>| faulty.ad_hoc("plan", window(1)).ok();
        status(&gate, RouteLimit::choose(foreign, user()), vec![(named("ann", None), 503)]).await;
    }
}

/// A limit that does not apply is not asked for: `None` denies only the requests of its route.
#[tokio::test]
async fn none_denies_only_where_the_route_applies() {
    let gate = Tollgate::builder().limit("plan", window(9)).build().unwrap();
    let nobody = |_: &RequestHead<'_>| None::<&'static str>;
    let limit =
        RouteLimit::choose(nobody, KeyExtractor::constant("all")).on(tollgate::route::Route::below("/api"));
    let get = |path: &str| Request::get(path).body(()).unwrap();
    status(&gate, limit, vec![(get("/"), 200), (get("/api/x"), 429)]).await;
}
