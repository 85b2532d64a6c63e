//! What is in the tables: keys apart, every row with an end, nothing left behind by a refusal, and a cleanup that deletes what
//! says nothing any more and nothing else.

use std::collections::BTreeSet;
use std::time::Duration;

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Cleaned, Cost, Hold, Limit, ManualClock, Micros, Outcome, PostgresOptions, PostgresStore,
    Settlement, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, hourly, item, items, options, start};

async fn by(clock: &ManualClock, server: &PostgresServer) -> PostgresStore {
    connect(PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) }).await
}

/// One of each strategy.
fn every_strategy() -> Vec<StoredLimit> {
    let (rate, window) = ("1/s", Micros::from_secs(10));
    [
        ("token", Limit::token_bucket(rate, 10)),
        ("leaky", Limit::leaky_bucket(rate, 10)),
        ("fixed", Limit::fixed_window(10, window)),
        ("clock", Limit::clock_window(10, window)),
        ("log", Limit::sliding_window(10, window)),
        ("counter", Limit::sliding_window_counter(10, window)),
        ("leases", Limit::concurrency(10, window)),
    ]
    .map(|(name, limit)| StoredLimit::new(name, limit.unwrap()))
    .into()
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_neither_collide_nor_do_harm() {
    let (server, store) = start().await;
    let long = "\u{1f9e8}".repeat(256);
    let keys = [
        "a",
        "A",
        "a ",
        "a'",
        "a\"",
        "a\\",
        "{a}",
        "{prefix}",
        "$1",
        "$$",
        "a;b",
        "--",
        "/*",
        "%s",
        "é",
        "e\u{301}",
        &long,
        "'; drop table tollgate_state; --",
        "\u{202e}a",
        "a:b",
        "a%3Ab",
        "0",
        "null",
        "\u{7f}",
    ];
    let names = ["api", "a", "'; drop table tollgate_hold; --", "{prefix}state", "ap", "\u{1f9e8}"];
    let mut seen = BTreeSet::new();
    for (place, name) in names.iter().enumerate() {
        let limits = [
            hourly(name, 1_000),
            StoredLimit::new(*name, Limit::sliding_window(1_000, Micros::from_secs(60)).unwrap()),
        ];
        for limit in &limits {
            for (index, key) in keys.iter().enumerate() {
                let units = 1 + (place * keys.len() + index) as u64;
                let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
                let asked = [StoredCharge { cost: Cost::new(units).unwrap(), ..item(limit, key) }];
                let charged = store.charge(&asked, (index % 2 == 0).then_some(hold)).await.unwrap();
                assert_eq!(charged.outcomes[0].used(), units, "{name:?} {key:?} is nobody else");
                seen.insert((place, limit.limit.strategy().name(), index));
            }
        }
    }
    let rows = server.psql("select count(*) from tollgate_state");
    assert_eq!(rows.parse::<usize>().unwrap(), seen.len());
    let texts = server.psql("select string_agg(s::text, '') from tollgate_state s");
    assert!(!texts.contains("\u{202e}a"), "no key is in the tables");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_leaves_nothing_behind() {
    let server = PostgresServer::start();
    let clock = ManualClock::at(ORIGIN);
    let store = by(&clock, &server).await;
    let full = hourly("full", 1);
    assert!(store.charge(&[item(&full, "k")], None).await.unwrap().allowed);
    let everything = "select (select array_agg(s order by key) from tollgate_state s)::text || \
        (select count(*) from tollgate_execution) || (select count(*) from tollgate_hold)";
    let before = server.psql(everything);
    for limit in every_strategy() {
        let held = Some(Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) });
        for hold in [None, held] {
            let never = StoredCharge { cost: Cost::new(11).unwrap(), ..item(&limit, "new") };
            assert!(!store.charge(&[never], hold).await.unwrap().allowed);
            let shadow = StoredCharge { shadow: true, ..never };
            assert!(!store.charge(&[item(&limit, "new"), item(&full, "k")], hold).await.unwrap().allowed);
            assert!(!store.charge(&[shadow, item(&full, "k")], hold).await.unwrap().allowed);
            store.peek(&[item(&limit, "new"), item(&full, "k")]).await.unwrap();
        }
        let watching = StoredCharge { shadow: true, cost: Cost::new(11).unwrap(), ..item(&limit, "new") };
        assert!(store.charge(&[watching], None).await.unwrap().allowed, "who only watches holds nobody up");
    }
    assert_eq!(server.psql(everything), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cleanup_deletes_what_says_nothing_and_nothing_else() {
    let server = PostgresServer::start();
    let clock = ManualClock::at(ORIGIN);
    let store = by(&clock, &server).await;
    let limits = every_strategy();
    for limit in &limits {
        for key in ["idle", "busy"] {
            let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(5) };
            let asked = [StoredCharge { cost: Cost::new(5).unwrap(), ..item(limit, key) }];
            assert!(store.charge(&asked, Some(hold)).await.unwrap().allowed);
        }
    }
    let ends = "select count(*) from tollgate_state where a + tail_us <= at_us or sweep_us > a + tail_us";
    assert_eq!(server.psql(ends), "0", "every row has an end, ahead, and will be looked at");
    assert_eq!(store.cleanup().await.unwrap(), Cleaned::default());
    clock.advance(Micros::new(4_999_999));
    assert_eq!(
        store.cleanup().await.unwrap(),
        Cleaned::default(),
        "a bucket is not full yet, a hold can be settled yet"
    );
    for limit in &limits {
        assert!(store.charge(&[item(limit, "busy")], None).await.unwrap().allowed);
    }
    clock.advance(Micros::new(2));
    let cleaned = store.cleanup().await.unwrap();
    assert_eq!(cleaned, Cleaned { states: 2, holds: 12, ..Cleaned::default() }, "two idle buckets are full");
    clock.advance(Micros::new(4_999_999));
    let before = standing(&store, &limits).await;
    let cleaned = store.cleanup().await.unwrap();
    assert_eq!(
        cleaned.states, 8,
        "idle windows, logs and leases are over (not the counter's), busy windows and buckets too"
    );
    assert_eq!(standing(&store, &limits).await, before, "nobody is answered otherwise");
    assert_eq!(
        (cleaned.executions, cleaned.leases),
        (0, 0),
        "a short log and few leases go with their state"
    );
    assert_eq!(store.cleaned_total().total(), 2 + 12 + cleaned.total());
    clock.advance(Micros::from_secs(20));
    store.cleanup().await.unwrap();
    for table in ["state", "execution", "hold"] {
        assert_eq!(server.psql(&format!("select count(*) from tollgate_{table}")), "0", "{table}");
    }
}

/// How the busy keys stand.
async fn standing(store: &PostgresStore, limits: &[StoredLimit]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for limit in limits {
        let most = StoredCharge { cost: Cost::MAX, ..item(limit, "busy") };
        outcomes.push(store.peek(&[most]).await.unwrap().outcomes[0]);
    }
    outcomes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_the_stores_own_cleans_up_and_waits_for_nobody() {
    let server = PostgresServer::start();
    let often = PostgresOptions {
        cleanup_every: Some(Duration::from_millis(50)),
        ..options(&server.url("postgres"))
    };
    let store = connect(often).await;
    let brief = StoredLimit::new("brief", Limit::fixed_window(5, Micros::from_millis(20)).unwrap());
    let keys: Vec<String> = (0..2_500).map(|key| format!("k:{key}")).collect();
    for outcome in store.charge_each(&items(&brief, &keys, Cost::ONE)).await {
        assert!(outcome.unwrap().allowed);
    }
    for _ in 0..100 {
        if store.cleaned_total().states == 2_500 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(store.cleaned_total().states, 2_500, "in three batches");
    assert_eq!(server.psql("select count(*) from tollgate_state"), "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_keys_in_one_statement_are_each_charged_by_themselves() {
    let server = PostgresServer::start();
    let clock = ManualClock::at(ORIGIN);
    let store = by(&clock, &server).await;
    for limit in every_strategy() {
        // Twelve times the same key among others: two too many for it, and for nobody else.
        let keys: Vec<String> =
            (0..24).map(|n| if n % 2 == 0 { "same".into() } else { format!("k:{n}") }).collect();
        let outcomes = store.charge_each(&items(&limit, &keys, Cost::ONE)).await;
        let outcomes: Vec<_> = outcomes.into_iter().collect::<Result<_, _>>().unwrap();
        let allowed = outcomes.iter().filter(|outcome| outcome.allowed).count();
        assert_eq!(allowed, 22, "{}", limit.name);
        assert_eq!(outcomes[2].remaining, 8, "{}: the second of its key", limit.name);
        for never in store.charge_each(&items(&limit, &keys[..2], Cost::new(11).unwrap())).await {
            assert!(never.unwrap().retry_after.is_none(), "{}", limit.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_limit_keeps_what_was_counted_and_another_strategy_starts_afresh() {
    let (_server, store) = start().await;
    let bucket = |rate: &str, burst| StoredLimit::new("api", Limit::token_bucket(rate, burst).unwrap());
    let (old, new) = (bucket("7/h", 10), bucket("1/h", 10));
    for _ in 0..4 {
        assert!(store.charge(&[item(&old, "k")], None).await.unwrap().allowed);
    }
    let after = store.charge(&[item(&new, "k")], None).await.unwrap().outcomes[0];
    assert_eq!((after.allowed, after.remaining), (true, 5), "{after}: what was taken stays taken");
    let window = hourly("api", 10);
    assert_eq!(store.charge(&[item(&window, "k")], None).await.unwrap().outcomes[0].remaining, 9);
    assert!(store.forget(&window, "k").await.unwrap());
    assert!(!store.forget(&window, "k").await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_charge_that_is_sent_by_many_at_once_is_charged_once_and_settled_once() {
    let (_server, store) = start().await;
    let (window, log) = (
        hourly("tokens", 1_000),
        StoredLimit::new("log", Limit::sliding_window(1_000, Micros::from_secs(60)).unwrap()),
    );
    for _ in 0..5 {
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (store, window, log) = (store.clone(), window.clone(), log.clone());
            tasks.spawn(async move {
                store.charge(&[item(&window, "k"), item(&log, "k")], Some(hold)).await.unwrap()
            });
        }
        let answers = tasks.join_all().await;
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let store = store.clone();
            tasks.spawn(async move { store.settle(hold.id, &Settlement::Actual(3)).await.unwrap() });
        }
        let settled = tasks.join_all().await;
        assert_eq!(
            settled.iter().filter(|settled| **settled == tollgate_store::Settled::Done).count(),
            1,
            "{settled:?}"
        );
    }
    let most = |limit| StoredCharge { cost: Cost::MAX, ..item(limit, "k") };
    let peeked = store.peek(&[most(&window), most(&log)]).await.unwrap();
    assert_eq!([peeked.outcomes[0].used(), peeked.outcomes[1].used()], [15, 15]);
}
