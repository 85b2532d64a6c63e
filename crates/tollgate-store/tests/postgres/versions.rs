//! A database of version 1 or 2 of the tables is brought up to date, and goes on counting what it held.

use std::collections::HashMap;

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Cost, Failure, Hold, Limit, ManualClock, Micros, PostgresOptions, PostgresStore, Settled,
    Settlement, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, item, options};

const VERSION_1: &str = include_str!("../../src/postgres/migrations/1.sql");
const VERSION_2: &str = include_str!("../../src/postgres/migrations/2.sql");
const VERSION_3: &str = include_str!("../../src/postgres/migrations/3.sql");
const VERSION_4: &str = include_str!("../../src/postgres/migrations/4.sql");

fn limits() -> HashMap<&'static str, StoredLimit> {
    let s = Micros::from_secs;
    [
        ("bucket", Limit::token_bucket("1/m", 10)),
        ("odd", Limit::leaky_bucket("7/h", 7)),
        ("window", Limit::fixed_window(10, s(60))),
        ("log", Limit::sliding_window(10, s(60))),
        ("long", Limit::sliding_window(1_000, s(60))),
        ("counter", Limit::sliding_window_counter(10, s(10))),
        ("leases", Limit::concurrency(5, s(60))),
    ]
    .into_iter()
    .map(|(name, limit)| (name, StoredLimit::new(name, limit.unwrap())))
    .collect()
}

/// A server with the tables of version 1, and in them what a program of that version wrote when it was charged at the suite's
/// instant of origin: see the comments.
async fn version_1(clock: &ManualClock) -> (PostgresServer, HashMap<&'static str, StoredLimit>) {
    let server = PostgresServer::start();
    let limits = limits();
    // The names of keys are the same in both versions.
    let store = by(clock, &server).await;
    for limit in limits.values() {
        assert!(store.charge(&[item(limit, "k")], None).await.unwrap().allowed);
    }
    drop(store);
    let key =
        |name: &str| server.psql(&format!("select key from tollgate_state where limit_name = '{name}'"));
    let keys: HashMap<&str, String> = limits.keys().map(|name| (*name, key(name))).collect();
    server.psql("drop schema public cascade");
    server.psql("create schema public; grant usage on schema public to public");
    server.psql(&VERSION_1.replace("{prefix}", "tollgate_"));
    server.psql(
        "create table tollgate_schema (one boolean primary key default true check (one), version integer not null,
           functions text not null);
         insert into tollgate_schema (version, functions) values (1, 'those of version 1');
         create function tollgate_charge(integer) returns integer language sql as 'select 1'",
    );
    let at = ORIGIN.get();
    let state = |name: &str, a: u64, b: u64, c: u64, tail: u64| {
        server.psql(&format!(
            "insert into tollgate_state values ('{}', '{name}', {a}, {b}, {c}, true, {at}, {tail}, {a})",
            keys[name]
        ));
    };
    // 4 of 10 taken; 3 of 7, which is 1542857142 and 6/7 us; 6 in a window; 2 before and 3 now.
    state("bucket", at + 240_000_000, 0, 0, 1);
    state("odd", at + 1_542_857_142, 6, 0, 1);
    state("window", at + 60_000_000, 6, 0, 0);
    state("counter", at, 2, 3, 20_000_000);
    // 2, 1 and 3 in a log; 200 in another, one every ms.
    state("log", at, 6, 0, 60_000_000);
    state("long", at, 200, 0, 60_000_000);
    server.psql(&format!(
        "insert into tollgate_execution select '{}', {at} - i * 500000, (array[3, 1, 2])[i + 1] from generate_series(0, 2) as i;
         insert into tollgate_execution select '{}', {at} - i * 1000, 1 from generate_series(0, 199) as i",
        keys["log"], keys["long"]
    ));
    // Two holders, of whom the second was renewed a second later: a held charge did not say so.
    state("leases", at + 61_000_000, 3, 0, 0);
    for (holder, end, cost) in [(1, 60_000_000, 1), (2, 61_000_000, 2)] {
        server.psql(&format!(
            "insert into tollgate_lease values ('{}', {}, '{}', {cost})",
            keys["leases"],
            at + end,
            id(holder)
        ));
    }
    let hold = |number: u128,
                names: &[&str],
                strategies: &str,
                parameters: &str,
                costs: &str,
                asked: &str| {
        let keys: Vec<&str> = names.iter().map(|name| &*keys[name]).collect();
        let times = vec![at.to_string(); names.len()].join(",");
        server.psql(&format!(
            "insert into tollgate_hold values ('{}', '{{{}}}', '{{{}}}', '{{{strategies}}}', '{{{parameters}}}', '{{{costs}}}', \
             '{{{times}}}', '{{{asked}}}', '{{0,0,0}}', {at}, 60000000, {}, false)",
            id(number),
            keys.join(","),
            names.join(","),
            at + 60_000_000
        ));
    };
    hold(1, &["leases"], "6", "5,60000000,0,0,0", "1", "6,5,60000000,0,1,0,0");
    hold(2, &["leases"], "6", "5,60000000,0,0,0", "2", "6,5,60000000,0,2,0,0");
    hold(3, &["bucket"], "1", "1,60000000,600000000,0,4503599627370496", "4", "1,1,60000000,10,4,0,0");
    hold(
        4,
        &["window", "long", "counter"],
        "3,4,5",
        "10,60000000,0,0,0,1000,60000000,0,0,0,10,10000000,0,0,0",
        "1,1,1",
        "",
    );
    (server, limits)
}

fn id(number: u128) -> ChargeId {
    ChargeId::new(number).unwrap()
}

async fn by(clock: &ManualClock, server: &PostgresServer) -> PostgresStore {
    connect(PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_version_1_counted_is_counted_on() {
    let clock = ManualClock::at(ORIGIN);
    let (server, limits) = version_1(&clock).await;
    server.psql(
        "create role app login; grant select, insert, update, delete on all tables in schema public to app",
    );
    let store = by(&clock, &server).await;
    let app = format!("postgres://app@127.0.0.1:{}/postgres", server.port());
    PostgresStore::new(options(&app)).unwrap().probe().await.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        server.psql("select count(*) from tollgate_execution where holders is null"),
        "5",
        "one chunk, and four of 64 and less"
    );
    let remaining = async |name: &str| {
        let all = StoredCharge { cost: Cost::MAX, ..item(&limits[name], "k") };
        store.peek(&[all]).await.unwrap().outcomes[0].remaining
    };
    let charge = async |name: &str, units| {
        let asked = [StoredCharge { cost: Cost::new(units).unwrap(), ..item(&limits[name], "k") }];
        let charged = store.charge(&asked, None).await.unwrap();
        (charged.allowed, charged.outcomes[0].remaining)
    };
    for (name, left) in
        [("bucket", 6), ("odd", 4), ("window", 4), ("log", 4), ("long", 800), ("counter", 5), ("leases", 2)]
    {
        assert_eq!(remaining(name).await, left, "{name}");
    }

    // A held charge is answered as before, and settled by the numbers it was made under.
    let again = Hold { id: id(3), ttl: Micros::from_secs(60) };
    let asked = [StoredCharge { cost: Cost::new(4).unwrap(), ..item(&limits["bucket"], "k") }];
    assert_eq!(store.charge(&asked, Some(again)).await.unwrap().outcomes[0].remaining, 6);
    clock.advance(Micros::from_secs(2));
    assert_eq!(store.settle(id(3), &Settlement::Actual(1)).await.unwrap(), Settled::Done);
    assert_eq!(remaining("bucket").await, 9);
    assert_eq!(store.settle(id(4), &Settlement::Cancel).await.unwrap(), Settled::Done);
    for (name, left) in [("window", 5), ("long", 801), ("counter", 6)] {
        assert_eq!(remaining(name).await, left, "{name}");
    }
    assert_eq!(store.settle(id(1), &Settlement::Renew).await.unwrap(), Settled::Done);
    assert_eq!(store.settle(id(2), &Settlement::Cancel).await.unwrap(), Settled::Done);
    assert_eq!(remaining("leases").await, 4);

    // Each is charged on, and from then on under the numbers of that charge.
    for (name, units, left) in [
        ("bucket", 2, 7),
        ("odd", 1, 3),
        ("window", 5, 0),
        ("log", 4, 0),
        ("long", 801, 0),
        ("counter", 1, 5),
    ] {
        assert_eq!(charge(name, units).await, (true, left), "{name}");
    }
    let slower = StoredLimit::new("odd", Limit::leaky_bucket("1/h", 7).unwrap());
    let all = StoredCharge { cost: Cost::MAX, ..item(&slower, "k") };
    assert_eq!(store.peek(&[all]).await.unwrap().outcomes[0].remaining, 3, "what was taken stays taken");
    // The entries of the logs go when they would have.
    clock.advance(Micros::from_secs(58));
    assert_eq!(remaining("log").await, 6, "the newest charge counts");
    assert_eq!(remaining("long").await, 199);
}

/// A program of version 1 would write states in its own way, so it is told to be upgraded instead.
#[tokio::test(flavor = "multi_thread")]
async fn the_functions_of_version_1_are_gone() {
    let clock = ManualClock::at(ORIGIN);
    let (server, _) = version_1(&clock).await;
    let store = PostgresStore::new(options(&server.url("postgres"))).unwrap();
    let error = store.probe().await.unwrap_err();
    assert_eq!(error.failure(), Some(Failure::Refused));
    assert!(error.to_string().contains("of version 1, and this Tollgate needs 5; run migrate"), "{error}");
    store.migrate().await.unwrap();
    let of_charge = "select count(*) from pg_proc where proname = 'tollgate_charge'";
    assert_eq!(server.psql(of_charge), "1");
    assert_eq!(server.psql("select count(*) from pg_type where typname = 'tollgate_said'"), "0");
    assert_eq!(server.psql("select version from tollgate_schema"), "5");
}

/// Leases were rows of their own in version 2. A program of that version may be running while another migrates, and goes on: it calls the
/// same functions.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_version_2_are_held_on() {
    let clock = ManualClock::at(ORIGIN);
    let server = PostgresServer::start();
    let limit = StoredLimit::new("many", Limit::concurrency(200, Micros::from_secs(60)).unwrap());
    let running = by(&clock, &server).await;
    assert!(running.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    let key = server.psql("select key from tollgate_state");
    server.psql("drop schema public cascade");
    server.psql("create schema public; grant usage on schema public to public");
    server.psql(&format!("{VERSION_1}; {VERSION_2}").replace("{prefix}", "tollgate_"));
    // 100 leases, ten at each instant; the first twenty have ended. The last of them all was held for a caller.
    let (at, held) = (ORIGIN.get(), id(7));
    server.psql(&format!(
        "create table tollgate_schema (one boolean primary key default true check (one), version integer not null,
           functions text not null);
         insert into tollgate_schema (version, functions) values (2, 'those of version 2');
         create function tollgate_leases_take(tollgate_state, bigint, uuid) returns bigint language sql as 'select 1::bigint';
         insert into tollgate_lease select '{key}', {at} + (i / 10 - 1) * 1000000, gen_random_uuid(), 1 from generate_series(0, 98) as i;
         insert into tollgate_lease values ('{key}', {at} + 8000000, '{held}', 2);
         insert into tollgate_state (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us, d)
           values ('{key}', 'many', {at} + 8000000, 101, 0, true, {at}, 0, {at}, {at} - 5000000);
         insert into tollgate_hold values ('{held}', '{{{key}}}', '{{many}}', '{{6}}', '{{200,60000000,0,0,0}}', '{{2}}',
           '{{{}}}', '{{}}', '{{0,0,0,0,0,0,0,0}}', {at}, 60000000, {at} + 60000000, false)",
        at + 8_000_000,
    ));
    let store = by(&clock, &server).await;
    assert_eq!(server.psql("select count(*) from pg_proc where proname = 'tollgate_leases_take'"), "0");
    assert_eq!(server.psql("select to_regclass('tollgate_lease') is null"), "t");
    assert_eq!(server.psql(crate::leases::CONSISTENT), "0");
    assert_eq!(server.psql("select count(*) from tollgate_execution"), "4", "32 to a chunk");
    let used = async |store: &PostgresStore| {
        let all = StoredCharge { cost: Cost::MAX, ..item(&limit, "k") };
        store.peek(&[all]).await.unwrap().outcomes[0].used()
    };
    assert_eq!((used(&store).await, used(&running).await), (81, 81));
    // All but a full limit: what ends first has to.
    let most = [StoredCharge { cost: Cost::new(120).unwrap(), ..item(&limit, "k") }];
    let denied = running.charge(&most, None).await.unwrap();
    assert_eq!((denied.allowed, denied.outcomes[0].retry_after), (false, Some(Micros::from_secs(1))));
    assert_eq!(store.settle(held, &Settlement::Renew).await.unwrap(), Settled::Done);
    clock.advance(Micros::from_secs(8));
    assert_eq!(used(&store).await, 2, "the renewed one");
    assert_eq!(running.settle(held, &Settlement::Cancel).await.unwrap(), Settled::Done);
    assert_eq!(used(&store).await, 0);
    assert_eq!(server.psql(crate::leases::CONSISTENT), "0");
}

/// Few leases were in chunks in version 4. They stay there, are counted and released there, and move into the state with the next
/// lease that is taken.
#[tokio::test(flavor = "multi_thread")]
async fn few_leases_of_version_4_move_into_their_state() {
    let clock = ManualClock::at(ORIGIN);
    let server = PostgresServer::start();
    let limit = StoredLimit::new("few", Limit::concurrency(20, Micros::from_secs(60)).unwrap());
    let running = by(&clock, &server).await;
    assert!(running.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    let key = server.psql("select key from tollgate_state");
    server.psql("drop schema public cascade");
    server.psql("create schema public; grant usage on schema public to public");
    let tables = format!("begin; {VERSION_1}; {VERSION_2}; {VERSION_3}; {VERSION_4}; commit");
    server.psql(&tables.replace("{prefix}", "tollgate_"));
    // 12 leases, one each second, of which the first two have ended and the last two are held for callers.
    let at = ORIGIN.get();
    server.psql(&format!(
        "create table tollgate_schema (one boolean primary key default true check (one), version integer not null,
           functions text not null);
         insert into tollgate_schema (version, functions) values (4, 'those of version 4');
         insert into tollgate_execution (key, first_us, last_us, total, at_us, sums, first_holder, holders)
           select '{key}', {at} - 1000000, {at} + 10000000, 12, array_agg({at} + (i - 1) * 1000000 order by i), array_agg(i + 1 order by i),
             '{zero}', array_agg(case i when 10 then '{first}' when 11 then '{second}' else '{zero}' end::uuid order by i)
           from generate_series(0::bigint, 11) as i;
         insert into tollgate_state (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us, d)
           values ('{key}', 'few', {at} + 10000000, 12, 12, true, {at} - 2000000, 0, {at}, {at} - 1000000);
         insert into tollgate_hold
           select h.id, '{{{key}}}', '{{few}}', '{{6}}', '{{20,60000000,0,0,0}}', '{{1}}', array[h.end_us], '{{}}', '{{0,0,0,0,0,0,0,0}}',
             {at}, 60000000, {at} + 60000000, false
           from (values ('{first}'::uuid, {at} + 9000000), ('{second}', {at} + 10000000)) as h (id, end_us)",
        zero = uuid::Uuid::nil(),
        first = uuid::Uuid::from_u128(7),
        second = uuid::Uuid::from_u128(8),
    ));
    let store = by(&clock, &server).await;
    let used = async || store.status(&limit, "k").await.unwrap().used();
    assert_eq!(used().await, 10);
    assert_eq!(store.settle(id(7), &Settlement::Cancel).await.unwrap(), Settled::Done);
    assert_eq!((used().await, server.psql("select log_us is null from tollgate_state")), (9, "t".into()));
    assert!(running.charge(&[item(&limit, "k")], None).await.unwrap().allowed);
    assert_eq!(used().await, 10);
    assert_eq!(server.psql("select cardinality(log_us) from tollgate_state"), "10");
    assert_eq!(server.psql("select count(*) from tollgate_execution"), "0");
    assert_eq!(server.psql(crate::leases::CONSISTENT), "0");
    assert_eq!(store.settle(id(8), &Settlement::Renew).await.unwrap(), Settled::Done);
    clock.advance(Micros::from_secs(59));
    assert_eq!(used().await, 2, "the renewed one, and the one that was taken");
    assert_eq!(store.settle(id(8), &Settlement::Cancel).await.unwrap(), Settled::Done);
    assert_eq!(used().await, 1);
    assert_eq!(server.psql(crate::leases::CONSISTENT), "0");
}

/// Holds that do not say which parts of the charge were charged: limits in shadow mode refused the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_does_not_say_what_was_charged_gives_back_no_more_than_that() {
    let (server, store) = crate::start().await;
    let (watch, count) = (crate::hourly("watch", 5), crate::hourly("count", 9));
    let bucket = StoredLimit::new("bucket", Limit::token_bucket("1/h", 9).unwrap());
    let costing = |limit, key, cost| StoredCharge { cost: Cost::new(cost).unwrap(), ..item(limit, key) };
    let shadow = |key| StoredCharge { shadow: true, ..costing(&watch, key, 4) };
    let others = [costing(&count, "a", 4), costing(&bucket, "a", 4)];
    for (items, actuals, expected) in [
        ([shadow("a"), others[0]], [0, 4], 4),
        ([shadow("a"), others[0]], [4, 1], 1),
        ([shadow("a"), others[0]], [0, 6], 6),
        ([shadow("a"), others[1]], [0, 4], 4),
        ([shadow("a"), others[1]], [4, 1], 1),
        // Which of the two was charged is not known.
        ([shadow("a"), shadow("b")], [0, 3], 3),
        ([shadow("a"), shadow("b")], [3, 0], 3),
    ] {
        assert!(store.charge(&[costing(&watch, "a", 5)], None).await.unwrap().allowed);
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
        assert!(store.charge(&items, Some(hold)).await.unwrap().allowed);
        assert_eq!(server.psql("select asked[6] || ' ' || (asked[13] & 2) from tollgate_hold"), "1 2");
        server.psql("update tollgate_hold set asked[13] = asked[13] - 2");
        let settled = store.settle(hold.id, &Settlement::Each(actuals.to_vec())).await;
        assert_eq!(settled.unwrap(), Settled::Done);
        let used = async |limit, key| store.status(limit, key).await.unwrap().used();
        assert_eq!(used(items[1].limit, items[1].key).await, expected, "{actuals:?}");
        assert_eq!(used(&watch, "a").await, 5);
        server.psql("truncate tollgate_state, tollgate_hold");
    }
}
