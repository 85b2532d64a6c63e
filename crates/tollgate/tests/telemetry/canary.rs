//! A secret in every place where a caller or an operator may put one, and a look at everything that comes out.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tollgate::config::Config;
use tollgate::store::Failure;
use tollgate::telemetry::{Event, Observer};
use tollgate::telemetry::{LogDecisions, json_lines_to, otlp};
use tollgate::{Charge, Fallback, Key, Limit, Rule, Settlement, Tollgate};
use tollgate_testkit::redis::RedisServer;
use tracing_subscriber::layer::SubscriberExt;

use crate::collector::Collector;
use crate::faulty_store::{Fault, FaultyStore};
use crate::page::Page;
use crate::scene::{a_minute, at_once, hands, on};
use crate::scrape::Scrape;

const SECRET: &str = "canary4711";

/// Everything that was said anywhere.
struct ReportedLimit(String);

impl ReportedLimit {
    fn hear(&mut self, what: &impl std::fmt::Debug) {
        let _ = writeln!(self.0, "{what:?} {what:#?}");
    }

    fn hear_error(&mut self, error: &(dyn Error + 'static)) {
        let mut next = Some(error);
        while let Some(error) = next {
            let _ = writeln!(self.0, "{error} {error:?} {error:#?}");
            next = error.source();
        }
    }
}

/// Panics with what it should keep to itself.
struct Indiscreet;

impl Observer for Indiscreet {
    fn decided(&self, _: &Event<'_>) {
        std::panic::panic_any(SECRET);
    }
}

/// Keeps what observers are reported.
#[derive(Default)]
struct Told(std::sync::Mutex<String>);

impl Observer for Told {
    fn decided(&self, event: &Event<'_>) {
        let _ = write!(self.0.lock().unwrap(), "{event:?}");
    }
}

/// Keys that hold the secret, sound and malformed.
fn keys() -> Vec<String> {
    let mut keys = vec![
        SECRET.to_owned(),
        format!("user:{SECRET}"),
        format!("user:{SECRET}:v2"),
        format!("user:1:{SECRET}"),
        format!("default:{SECRET}"),
        format!("user:{SECRET}%3A7"),
        format!("{SECRET}\u{7}\u{1b}[31m\r\n"),
        format!("user:{SECRET}%"),
        format!("a:b:c:{SECRET}"),
        format!("user:{SECRET}:"),
        format!(":{SECRET}"),
    ];
    keys.push(SECRET.repeat(200));
    keys.push(SECRET.repeat(2_000));
    keys
}

/// Every call there is, with this key.
async fn use_everywhere(gate: &Tollgate, key: &str, said: &mut ReportedLimit) {
    let ttl = Duration::from_millis(10);
    for limit in ["api", "workers", "watching", "shut", "free"] {
        let ask = [Charge::new(limit, key)];
        match gate.charge(&ask).await {
            Ok(decision) => said.hear(&decision),
            Err(error) => said.hear_error(&error),
        }
        said.hear(&gate.charge(&[Charge::new("api", "other"), Charge::new(limit, key).cost(2)]).await);
        said.hear(&gate.peek(&ask).await);
        said.hear(&gate.charge_each(&[Charge::new(limit, key), Charge::new(limit, key)]).await);
        said.hear(&gate.wait(&ask, Duration::ZERO).await);
        said.hear(&gate.status(limit, key).await);
        match gate.reserve(&ask, ttl).await {
            Ok(reserved) => {
                said.hear(&reserved);
                if let Ok(reservation) = reserved {
                    said.hear(&reservation.settle_each(&[1]).await);
                    said.hear(&gate.settle(reservation.id(), &Settlement::Actual(1)).await);
                }
            }
            Err(error) => said.hear_error(&error),
        }
        match gate.reset(limit, key).await {
            Ok(was_there) => said.hear(&was_there),
            Err(error) => said.hear_error(&error),
        }
        if let Ok(limiter) = gate.local(limit) {
            said.hear(&limiter);
            said.hear(&(limiter.check(key), limiter.peek(key, 1), limiter.acquire(key)));
            said.hear(&limiter.charge_all(&[limiter.of(key), limiter.of("other")]));
            said.hear(&(limiter.of(key).cost(0), Charge::new(limit, key)));
            said.hear(&limiter.charge(key, 0));
        }
    }
    said.hear(&gate.acquire("no such limit", key).await);
    match Key::parse(key) {
        Ok(key) => said.hear(&key),
        Err(error) => said.hear_error(&error),
    }
    let limit = tollgate::store::StoredLimit::new("api", a_minute(1));
    said.hear(&tollgate::store::StoredCharge {
        limit: &limit,
        key,
        cost: tollgate::store::Cost::ONE,
        shadow: false,
    });
}

/// Stores whose address or password holds the secret, and which cannot be used.
async fn open_badly(server: &RedisServer, said: &mut ReportedLimit) {
    let limits = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 2\nwindow = '1h'\n";
    let redis = format!("127.0.0.1:{}", server.port());
    for store in [
        format!("mode = 'redis'\nredis = {{ url = 'redis://:{SECRET}@127.0.0.1:1' }}"),
        format!("mode = 'redis'\nredis = {{ url = 'redis://:{SECRET}@{redis}' }}"),
        format!("mode = 'redis'\nredis = {{ url = 'redis://{redis}', password = '{SECRET}' }}"),
        format!("mode = 'redis'\nredis = {{ url = 'rediss://:{SECRET}@{redis}' }}"),
        format!("mode = 'redis'\nredis = {{ url = 'redis://user:{SECRET}@:no:port' }}"),
        format!("mode = 'postgres'\npostgres = {{ url = 'postgres://u:{SECRET}@127.0.0.1:1/db' }}"),
        format!("mode = 'postgres'\npostgres = {{ url = 'postgres://u:{SECRET}@{redis}/db' }}"),
        format!("mode = 'postgres'\npostgres = {{ url = 'postgres://u:{SECRET}@host:port/db' }}"),
    ] {
        match Config::parse(&format!("[store]\ntimeout = '200ms'\n{store}\n{limits}")) {
            Err(mistakes) => said.hear_error(&mistakes),
            Ok(config) => {
                said.hear(&config);
                match Tollgate::open(&config).await {
                    Err(error) => said.hear_error(&error),
                    Ok(gate) => {
                        said.hear(&gate);
                        said.hear(&gate.check("api", "user:1").await);
                        said.hear(&gate.store_health());
                        if let Err(error) = gate.status("api", "user:1").await {
                            said.hear_error(&error);
                        }
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn nothing_of_a_secret_comes_out_anywhere() {
    let server = RedisServer::builder().password("another").start();
    let (scrape, page, collector, reported) =
        (Scrape::new(), Page::default(), Collector::start(), Arc::new(Told::default()));
    let mut said = ReportedLimit(String::new());
    // Every target at every level, dependencies included.
    let (lines, lines_guard) = json_lines_to(page.clone());
    let (layer, guard) = otlp().endpoint(collector.endpoint()).start().unwrap();
    let default = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines).with(layer));
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));

    let telemetry = scrape.telemetry().salt(SECRET).log(LogDecisions::All).spans();
    said.hear(&telemetry);
    let hands = hands();
    let store = FaultyStore::new(&hands);
    for is_remote in [false, true] {
        let workers = Rule::new("workers", at_once(1)).unwrap().fallback(Fallback::Local);
        let api: Limit = a_minute(3);
        let builder = on(&hands)
            .rule(
                Rule::new("api", api)
                    .unwrap()
                    .with_override(Key::parse("user:vip").unwrap(), a_minute(9))
                    .unwrap(),
            )
            .rule(workers)
            .rule(Rule::new("watching", api).unwrap().shadow())
            .rule(Rule::blocked("shut").unwrap())
            .rule(Rule::unlimited("free").unwrap())
            .observer(Arc::new(Indiscreet))
            .observer(reported.clone())
            .telemetry(telemetry.clone());
        let builder = if is_remote { builder.store(store.clone()) } else { builder };
        let gate = builder.build().unwrap();
        said.hear(&gate);
        for fault in [Fault::None, Fault::Loses(Failure::Timeout), Fault::Fails(Failure::Connection)] {
            store.fault(fault);
            for key in keys() {
                // A second each, so that the cap on lines hides nothing.
                hands.advance(Duration::from_secs(1));
                use_everywhere(&gate, &key, &mut said).await;
            }
        }
        gate.publish_metrics();
        said.hear(&gate.store_health());
    }
    open_badly(&server, &mut said).await;

    std::panic::set_hook(hook);
    assert!(guard.flush());
    drop((default, guard, lines_guard));
    said.0.push_str(&reported.0.lock().unwrap());
    for (what, text, least) in [
        ("lines", page.text(), 500),
        ("metrics", scrape.text(), 50),
        ("spans", collector.spans().iter().map(|span| format!("{span:?}\n")).collect(), 1_000),
        ("errors, Debug and events", said.0, 1_000),
    ] {
        assert!(
            text.lines().count() > least,
            "{what}: {} lines are too few to mean anything",
            text.lines().count()
        );
        let leaks: Vec<&str> = text.lines().filter(|line| line.contains(SECRET)).take(3).collect();
        assert!(leaks.is_empty(), "{what} show the secret: {leaks:#?}");
        assert!(!text.contains('\u{7}') && !text.contains('\u{1b}'), "{what} have control characters");
    }
}
