//! A limit per plan, chosen for each request: by the name of a limit, or with numbers from the application's database. What
//! becomes of every kind of request is in `routes/per_plan.rs`.

use std::error::Error;
use std::time::Duration;

use http::{Request, Response};
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RequestHead, RouteLimit};
use tollgate::{Limit, Rate, Tollgate};
use tower::{Layer, Service};

use crate::{On, service};

const HOUR: Duration = Duration::from_secs(3_600);

/// From the database, put into the request by the layer that authenticates.
#[derive(Clone)]
struct Account {
    plan: &'static str,
    per_hour: u64,
}

const ANN: Account = Account { plan: "plan-free", per_hour: 1 };
const BOB: Account = Account { plan: "plan-pro", per_hour: 2 };

/// What becomes of requests before a service with this limit.
async fn statuses(
    gate: &Tollgate,
    limit: RouteLimit,
    requests: &[(&str, Option<Account>)],
) -> Result<Vec<u16>, Box<dyn Error>> {
    let app = service::of(|_: &Request<()>| Response::new(String::from("hello")));
    let mut app = LimitLayer::new(gate, [limit])?.layer(app);
    let mut statuses = Vec::new();
    for (user, account) in requests {
        let mut request = Request::builder().header("x-user", *user).body(())?;
        if let Some(account) = account {
            request.extensions_mut().insert(account.clone());
        }
        statuses.push(app.call(request).await?.status().as_u16());
    }
    Ok(statuses)
}

/// The requests, and what becomes of each: a user without an account is denied.
fn requests() -> ([(&'static str, Option<Account>); 6], [u16; 6]) {
    let (ann, bob) = (("ann", Some(ANN)), ("bob", Some(BOB)));
    ([ann.clone(), ann, bob.clone(), bob.clone(), bob, ("eve", None)], [200, 429, 200, 200, 429, 429])
}

#[tokio::test]
async fn per_plan_by_name() -> Result<(), Box<dyn Error>> {
    for on in On::all() {
        let builder = Tollgate::builder()
            .limit("plan-free", Limit::fixed_window(1, HOUR)?)
            .limit("plan-pro", Limit::fixed_window(2, HOUR)?);
        let gate = on.connect(builder).await?;
        let plan = RouteLimit::choose(
            |request| Some(request.extension::<Account>()?.plan),
            KeyExtractor::header("x-user"),
        );
        let (requests, expected) = requests();
        assert_eq!(statuses(&gate, plan, &requests).await?, expected, "{}", on.name());
        assert_eq!(gate.status("plan-pro", "x-user:bob").await?.used(), 2, "{}", on.name());
        assert_eq!(gate.status("plan-pro", "x-user:ann").await?.used(), 0, "{}", on.name());
    }
    Ok(())
}

#[tokio::test]
async fn per_plan_with_numbers_of_the_application() -> Result<(), Box<dyn Error>> {
    for on in On::all() {
        let gate = on.connect(Tollgate::builder()).await?;
        let plans = gate.clone();
        let choose = move |request: &RequestHead<'_>| {
            let Account { per_hour, .. } = request.extension()?; // no account: denied
            let limit = Limit::token_bucket(Rate::new(*per_hour, HOUR).ok()?, *per_hour);
            plans.ad_hoc("plan", limit.ok()?).ok()
        };
        let plan = RouteLimit::choose(choose, KeyExtractor::header("x-user"));
        let (requests, expected) = requests();
        assert_eq!(statuses(&gate, plan, &requests).await?, expected, "{}", on.name());
    }
    Ok(())
}
