//! A call takes a bounded number of steps however much is kept for its key: large logs and many leases are neither walked nor
//! fetched. And what a full server still answers.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Failure, Hold, Limit, ManualClock, Micros, RedisStore, Settled, Settlement, Store, StoredLimit,
};
use tollgate_testkit::redis::RedisServer;

use super::{HOUR, alone, beside_others, costing, item, keys, store_on, used};

/// How much is kept for a key.
const MANY: usize = 30_000;

/// The most commands that a script may call. A renewal takes 19, and some more where the block that it leaves is joined with the next.
/// Scripts that fetched entries in runs of 32 called about a thousand.
const MOST_COMMANDS: u64 = 32;

fn hold() -> Hold {
    Hold { id: ChargeId::random(), ttl: Micros::from_secs(3_600) }
}

/// How many commands the server ran for `call`, those of its script included, and how long the script took in us.
async fn commands<T>(server: &RedisServer, call: impl Future<Output = T>) -> (T, u64, u64) {
    server.command(&["CONFIG", "RESETSTAT"]).expect("resetstat");
    let result = call.await;
    let stats = server.command(&["INFO", "commandstats"]).expect("info").text();
    let number = |line: &str, field: &str| -> u64 {
        let value = line.split_once(field).map_or("0", |(_, rest)| rest.split(',').next().unwrap_or("0"));
        value.trim().parse().unwrap_or(0)
    };
    let is_ours = |line: &&str| !["config", "info", "evalsha"].iter().any(|name| line.contains(name));
    let calls = stats.lines().filter(|line| line.starts_with("cmdstat_")).filter(is_ours);
    let calls = calls.map(|line| number(line, "calls=")).sum();
    let script = stats.lines().find(|line| line.contains("evalsha")).unwrap_or_default();
    (result, calls, number(script, ",usec="))
}

/// Fills a key, and gives some of the holds that it was filled by.
async fn fill(store: &RedisStore, limit: &StoredLimit, clock: &ManualClock) -> Vec<ChargeId> {
    let mut ids = Vec::new();
    // Charges of one instant are one entry of a log, and those of one call are of one instant. So it is filled one by one.
    let (rounds, at_once) = if limit.name == "log" { (MANY, 1) } else { (MANY / 500, 500) };
    for round in 0..rounds {
        let calls = (0..at_once).map(|number| {
            let hold = ((round + number) % 100 == 0 || limit.name == "leases").then(hold);
            async move {
                let charged = store.charge(&[item(limit, "k")], hold).await.expect("a charge");
                assert!(charged.allowed, "{}, round {round}", limit.name);
                hold
            }
        });
        let held = futures_util::future::join_all(calls).await;
        ids.extend(held.into_iter().flatten().map(|hold| hold.id));
        clock.advance(Micros::new(1));
    }
    ids
}

/// How many scripts the server has run since its statistics were reset.
fn scripts(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).expect("info").text();
    let line = stats.lines().find(|line| line.contains("evalsha")).unwrap_or_default();
    let calls = line.split_once("calls=").and_then(|(_, rest)| rest.split(',').next());
    calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
}

/// Charges and settlements that go in one call are as many calls as they take, where much is kept for each of their keys: the server
/// serves nobody else meanwhile. The key `k` is full.
async fn no_script_works_for_long(
    server: &RedisServer,
    store: &RedisStore,
    limit: &StoredLimit,
    held: &[ChargeId],
) {
    const TOGETHER: usize = 32;
    /// With 30,000 entries a script takes some seven charges; all of them were one script.
    const MOST_IN_A_SCRIPT: u64 = 10;
    let most = u64::try_from(MANY).expect("a count");
    let ours = || -> Vec<String> {
        let all = keys(server, store.prefix()).into_iter();
        all.filter(|key| key.ends_with(&limit.name)).collect()
    };
    let full = ours().remove(0);
    let others: Vec<String> = (0..TOGETHER).map(|number| format!("k{number}")).collect();
    let items: Vec<_> = others.iter().map(|key| item(limit, key)).collect();
    for charged in store.charge_each(&items).await {
        assert!(charged.expect("a charge").allowed);
    }
    for key in ours().iter().filter(|key| **key != full) {
        server.command(&["COPY", &full, key, "REPLACE"]).expect("copied");
    }
    let items: Vec<_> = others.iter().map(|key| costing(limit, key, most)).collect();
    let (denied, _, took_us) = commands(server, store.charge_each(&items)).await;
    let (count, name) = (scripts(server), &limit.name);
    println!("{name}, {TOGETHER} full keys denied: {count} scripts, {} us each", took_us / count.max(1));
    assert!(count >= TOGETHER as u64 / MOST_IN_A_SCRIPT, "{name}: {count} scripts");
    for outcome in denied {
        let outcome = outcome.expect("a charge");
        assert!(!outcome.allowed && outcome.used() == most, "{outcome:?}");
    }
    let settle = held.iter().map(|id| store.settle(*id, &Settlement::Cancel));
    let (settled, _, took_us) = commands(server, futures_util::future::join_all(settle)).await;
    let (count, all) = (scripts(server), settled.len() as u64);
    println!("{name}, {all} settled at once: {count} scripts, {} us each", took_us / count.max(1));
    assert!(all > 100 && count >= all / MOST_IN_A_SCRIPT, "{name}: {count} scripts for {all}");
    for settled in settled {
        assert_eq!(settled.expect("a settlement"), Settled::Done);
    }
    assert_eq!(used(store, limit, "k").await, most - all);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_call_walks_what_is_kept() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let most = u64::try_from(MANY).expect("a count");
    for (name, limit) in
        [("log", Limit::sliding_window(most, HOUR)), ("leases", Limit::concurrency(most, HOUR))]
    {
        let clock = ManualClock::at(ORIGIN);
        let store = store_on(&server, Some(&clock));
        let limit = StoredLimit::new(name, limit.expect("a sound limit"));
        let mut ids = fill(&store, &limit, &clock).await;
        no_script_works_for_long(&server, &store, &limit, &ids.split_off(ids.len() - 150)).await;
        for _ in 0..150 {
            assert!(store.charge(&[item(&limit, "k")], None).await.expect("a charge").allowed);
            clock.advance(Micros::new(1));
        }
        let all = [costing(&limit, "k", most)];
        let one = [item(&limit, "k")];
        let check = |what: &str, calls: u64, took_us: u64| {
            println!("{name}, {what}: {calls} commands, {took_us} us");
            assert!(calls <= MOST_COMMANDS, "{name}, {what}: {calls} commands");
        };
        let (denied, calls, took_us) = commands(&server, store.charge(&all, None)).await;
        let outcome = denied.expect("a charge").outcomes[0];
        assert!(!outcome.allowed && outcome.used() == most, "{outcome:?}");
        check("all of it, denied", calls, took_us);
        let (denied, calls, took_us) = commands(&server, store.charge(&one, None)).await;
        assert!(!denied.expect("a charge").allowed);
        check("one, denied", calls, took_us);
        let middle = ids[ids.len() / 2];
        let (renewed, calls, took_us) = commands(&server, store.settle(middle, &Settlement::Renew)).await;
        assert_eq!(renewed.expect("a renewal"), Settled::Done);
        check("a renewal in the middle", calls, took_us);
        let (settled, calls, took_us) = commands(&server, store.settle(middle, &Settlement::Cancel)).await;
        assert_eq!(settled.expect("a cancel"), Settled::Done);
        check("a give-back in the middle", calls, took_us);
        assert_eq!(used(&store, &limit, "k").await, most - 1);
        let (charged, calls, took_us) = commands(&server, store.charge(&one, Some(hold()))).await;
        assert!(charged.expect("a charge").allowed);
        check("one more, held", calls, took_us);
        let (refunded, calls, took_us) = commands(&server, store.refund(&all)).await;
        refunded.expect("a refund");
        check("a refund of all", calls, took_us);
        let left = if name == "log" { 0 } else { most };
        assert_eq!(used(&store, &limit, "k").await, left);
        server.command(&["FLUSHALL"]).expect("a fresh start");
    }
}

/// Out of memory, a key that is known is counted as ever, and only a new one has no room.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_still_counts_the_keys_that_it_has() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in super::one_of_each(9) {
        let store = store_on(&server, None);
        assert!(store.charge(&[costing(&limit, "k", 5)], None).await.expect("a charge").allowed);
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).expect("config");
        let denied = store.charge(&[costing(&limit, "k", 5)], None).await;
        assert!(!denied.unwrap_or_else(|error| panic!("{}: {error}", limit.name)).allowed);
        let charged = store.charge(&[costing(&limit, "k", 4)], None).await;
        assert!(charged.unwrap_or_else(|error| panic!("{}: {error}", limit.name)).allowed);
        for new in
            [store.charge(&[item(&limit, "new")], None), store.charge(&[item(&limit, "k")], Some(hold()))]
        {
            match new.await {
                Ok(charged) => assert!(!charged.allowed, "{}", limit.name),
                Err(error) => {
                    assert_eq!(error.failure(), Some(Failure::Full), "{}: {error:?}", limit.name);
                    assert!(!error.is_ambiguous(), "{error:?}");
                }
            }
        }
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).expect("config");
        assert_eq!(used(&store, &limit, "k").await, 9, "{}", limit.name);
        assert_eq!(used(&store, &limit, "new").await, 0, "{}", limit.name);
        assert_eq!(keys(&server, store.prefix()).len(), 1, "{}", limit.name);
    }
}

/// Charges that go to a full server together: what is written for a known key makes no room for a new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_takes_no_new_key_beside_those_that_it_has() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    for limit in super::one_of_each(90) {
        for is_held in [false, true] {
            let store = store_on(&server, None);
            for known in ["known", "beside"] {
                assert!(store.charge(&[item(&limit, known)], None).await.expect("a charge").allowed);
            }
            // A spent key that lost its expiry gets it back with a denial, whatever there is room for.
            assert!(store.charge(&[costing(&limit, "spent", 90)], None).await.expect("a charge").allowed);
            let all = keys(&server, store.prefix());
            server.command(&["CONFIG", "SET", "maxmemory", "1"]).expect("config");
            for key in &all {
                server.command(&["PERSIST", key]).expect("persist");
            }
            let charges = (0..64).map(|number| {
                let (store, limit) = (&store, &limit);
                async move {
                    let new = format!("new{number}");
                    let charged = if number % 4 == 3 {
                        store.charge(&[item(limit, "beside"), item(limit, &new)], None).await
                    } else if number % 8 == 0 {
                        store.charge(&[item(limit, "spent")], None).await
                    } else if number % 2 == 0 {
                        store.charge(&[item(limit, "known")], None).await
                    } else {
                        store.charge(&[item(limit, &new)], is_held.then(hold)).await
                    };
                    (number, charged)
                }
            });
            let mut charges: Vec<_> = charges.collect();
            charges.rotate_left(usize::from(is_held));
            for (number, charged) in futures_util::future::join_all(charges).await {
                let what = format!("{}, charge {number}, held: {is_held}", limit.name);
                match charged {
                    Ok(charged) => {
                        assert!(number % 2 == 0, "{what}: a new key is begun");
                        assert_eq!(charged.allowed, number % 8 != 0, "{what}");
                    }
                    Err(error) => {
                        assert!(number % 2 == 1, "{what}: {error}");
                        assert_eq!(error.failure(), Some(Failure::Full), "{what}: {error:?}");
                    }
                }
            }
            server.command(&["CONFIG", "SET", "maxmemory", "0"]).expect("config");
            assert_eq!(used(&store, &limit, "known").await, 25, "{}", limit.name);
            assert_eq!(used(&store, &limit, "beside").await, 1, "{}: all or nothing", limit.name);
            assert_eq!(keys(&server, store.prefix()).len(), 3, "{}", limit.name);
            server.command(&["FLUSHALL"]).expect("a fresh start");
        }
    }
}
