//! Many leases of one key, more than a chunk holds: the answers are those of the memory store, and chunks stay few.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Cost, Hold, Limit, ManualClock, MemoryOptions, MemoryStore, Micros, PostgresOptions,
    PostgresStore, Settled, Settlement, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::Random;
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, item, options};

/// A store on a server, by a clock. Nothing crashes here, so nothing need be on disk.
async fn start(clock: &ManualClock) -> (PostgresServer, PostgresStore) {
    let server = PostgresServer::builder().setting("fsync", "off").start();
    let of_clock = PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) };
    let store = connect(of_clock).await;
    (server, store)
}

fn leases(most: u64, lease: Micros) -> StoredLimit {
    StoredLimit::new("leases", Limit::concurrency(most, lease).unwrap())
}

/// How many chunks and states there are whose sums are not those of the leases that are kept, or whose leases are out of order.
pub(crate) const CONSISTENT: &str = "
    with lease as (
      select s.key, 0 as first_us, null::uuid as first_holder, u.at_us,
             coalesce(u.holder, '00000000-0000-0000-0000-000000000000') as holder, u.n,
             u.sum - lag(u.sum, 1, s.log_sums[cardinality(s.log_sums)] - s.b) over (partition by s.key order by u.n) as cost
      from tollgate_state as s, unnest(s.log_us, s.holders, s.log_sums) with ordinality as u (at_us, holder, sum, n)
      union all
      select e.key, e.first_us, e.first_holder, u.at_us, u.holder, u.n,
             u.sum - lag(u.sum, 1, 0::bigint) over (partition by e.key, e.first_us, e.first_holder order by u.n) as cost
      from tollgate_execution as e, unnest(e.at_us, e.holders, e.sums) with ordinality as u (at_us, holder, sum, n)),
    follows as (
      select l.*, lead(l.at_us) over w as next_us, lead(l.holder) over w as next_holder
      from lease as l window w as (partition by l.key order by l.first_us, l.first_holder, l.n)),
    live as (
      select s.key, coalesce(sum(l.cost), 0) as total, count(l.key) as leases, min(l.at_us) as first_us, max(l.at_us) as last_us
      from tollgate_state as s left join lease as l on l.key = s.key and l.at_us >= s.d group by s.key)
    select (select count(*) from tollgate_execution as e
            where e.total <> e.sums[cardinality(e.sums)] or e.last_us <> e.at_us[cardinality(e.at_us)]
              or cardinality(e.at_us) <> cardinality(e.sums) or cardinality(e.at_us) <> cardinality(e.holders)
              or cardinality(e.at_us) > 32 or (e.first_us, e.first_holder) > (e.at_us[1], e.holders[1]))
         + (select count(*) from tollgate_state as s
            where s.log_us is not null and exists (select from tollgate_execution as e where e.key = s.key)
              or cardinality(s.holders) > 56 or cardinality(s.log_us) > 100)
         + (select count(*) from lease as l where l.cost < 1)
         + (select count(*) from follows as f where (f.at_us, f.holder) >= (f.next_us, f.next_holder))
         + (select count(*) from tollgate_state as s join live as l on l.key = s.key
            where (s.b, s.c) <> (l.total, l.leases) or s.c > 0 and (s.a, s.d) <> (l.last_us, l.first_us))";

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_leases_answer_as_in_memory() {
    let clock = ManualClock::at(ORIGIN);
    let (server, store) = start(&clock).await;
    let memory = MemoryStore::new(MemoryOptions {
        clock: clock.clock(),
        sweep_every: None,
        ..MemoryOptions::default()
    });
    // Versions of one limit, so that leases are inserted before others, too.
    let limits = [
        leases(400, Micros::new(600)),
        leases(400, Micros::new(600)),
        leases(380, Micros::new(150)),
        leases(400, Micros::new(20)),
    ];
    let mut random = Random::seeded(10);
    let mut held: Vec<ChargeId> = Vec::new();
    let (mut most_chunks, mut in_state) = (0, 0);
    for step in 0..3_000_u32 {
        let limit = &limits[usize::try_from(random.below(4)).unwrap()];
        match random.below(20) {
            0..=11 => {
                let units = 1 + random.below(2);
                let asked = [StoredCharge { cost: Cost::new(units).unwrap(), ..item(limit, "k") }];
                let id = ChargeId::new(u128::from(random.next()) << 60 | u128::from(step)).unwrap();
                let hold = (random.below(8) > 0).then_some(Hold { id, ttl: Micros::from_secs(60) });
                let answer = store.charge(&asked, hold).await.unwrap();
                assert_eq!(answer, memory.charge(&asked, hold).await.unwrap(), "step {step}");
                if answer.allowed && hold.is_some() {
                    held.push(id);
                }
            }
            12..=15 if !held.is_empty() => {
                let place = usize::try_from(random.below(held.len() as u64)).unwrap();
                let settlement = if random.below(2) == 0 { Settlement::Cancel } else { Settlement::Renew };
                let settled = store.settle(held[place], &settlement).await.unwrap();
                let expected = Store::settle(&memory, held[place], &settlement).await.unwrap();
                assert_eq!(settled, expected, "step {step}: {settlement:?}");
                if settlement == Settlement::Cancel || settled != Settled::Done {
                    held.swap_remove(place);
                }
            }
            // Time stands still for most of them, and now and then many end at once.
            16 => clock.advance(Micros::new(random.below(12))),
            17 if random.below(40) == 0 => clock.advance(Micros::new(random.below(700))),
            _ => {
                let asked =
                    [StoredCharge { cost: Cost::new(1 + random.below(400)).unwrap(), ..item(limit, "k") }];
                let answer = store.peek(&asked).await.unwrap();
                assert_eq!(answer, memory.peek(&asked).await.unwrap(), "step {step}");
            }
        }
        if step % 50 == 0 {
            assert_eq!(server.psql(CONSISTENT), "0", "step {step}");
            let chunks = server.psql("select count(*) from tollgate_execution").parse().unwrap();
            most_chunks = most_chunks.max(chunks);
            in_state += u64::from(server.psql("select log_us is not null from tollgate_state") == "t");
        }
    }
    assert!(most_chunks >= 8, "{most_chunks} chunks are few");
    assert!(in_state > 0, "few leases were never in their state");
}

/// Reservations of many keys that come together are one statement, as are charges without a hold; they are answered as in memory, and
/// the functions for charges are not called as long as a key has few leases.
#[tokio::test(flavor = "multi_thread")]
async fn few_leases_of_many_keys_are_taken_by_a_statement() {
    const KEYS: usize = 32;
    let clock = ManualClock::at(ORIGIN);
    let server = PostgresServer::builder().setting("fsync", "off").setting("track_functions", "all").start();
    // One call at a time, so that what comes during the first goes together.
    let of_clock =
        PostgresOptions { clock: Some(clock.clock()), connections: 2, ..options(&server.url("postgres")) };
    let store = connect(of_clock.clone()).await;
    let memory = MemoryStore::new(MemoryOptions { clock: clock.clock(), ..MemoryOptions::default() });
    let limits = [leases(5, Micros::from_secs(60)), leases(5, Micros::from_secs(20))];
    let keys: Vec<String> = (0..KEYS).map(|number| format!("k{number}")).collect();
    let mut held: Vec<ChargeId> = Vec::new();
    for round in 0..12 {
        let limit = &limits[round % 3 / 2];
        let is_held = round % 4 != 3;
        let holds: Vec<Option<Hold>> = keys
            .iter()
            .map(|_| is_held.then(|| Hold { id: ChargeId::random(), ttl: Micros::from_secs(30) }))
            .collect();
        // The same call sent again is answered as before.
        for _ in 0..1 + usize::from(is_held) {
            let calls = keys.iter().zip(&holds).map(|(key, hold)| {
                let store = &store;
                async move { store.charge(&[item(limit, key)], *hold).await }
            });
            let answers = futures_util::future::join_all(calls).await;
            for ((key, hold), answer) in keys.iter().zip(&holds).zip(answers) {
                let expected = memory.charge(&[item(limit, key)], *hold).await.unwrap();
                assert_eq!(answer.unwrap_or_else(|error| panic!("{error}")), expected, "round {round}");
            }
        }
        assert_eq!(server.psql(CONSISTENT), "0", "round {round}");
        held.extend(holds.into_iter().flatten().map(|hold| hold.id));
        clock.advance(Micros::from_millis(6_500));
        if round % 5 == 4 {
            for (number, id) in held.drain(..).enumerate() {
                let settlement = if number % 2 == 0 { Settlement::Cancel } else { Settlement::Renew };
                let expected = Store::settle(&memory, id, &settlement).await.unwrap();
                assert_eq!(store.settle(id, &settlement).await.unwrap(), expected, "round {round}");
            }
            assert_eq!(server.psql(CONSISTENT), "0", "round {round}");
        }
    }
    assert_eq!(server.psql("select count(*) from tollgate_execution"), "0");
    let before = calls_of_functions(&server, store).await;
    let store = connect(of_clock).await;
    clock.advance(Micros::from_secs(600));
    for _ in 0..3 {
        for charged in futures_util::future::join_all(keys.iter().map(|key| {
            let (store, limit) = (&store, &limits[0]);
            async move { store.charge(&[item(limit, key)], None).await }
        }))
        .await
        {
            assert!(charged.unwrap_or_else(|error| panic!("{error}")).allowed);
        }
    }
    assert_eq!(calls_of_functions(&server, store).await, before);
}

/// A state holds some leases; more are in chunks, and they return once they are few again.
#[tokio::test(flavor = "multi_thread")]
async fn leases_leave_their_state_when_they_are_many_and_return_when_they_are_few() {
    let clock = ManualClock::at(ORIGIN);
    let (server, store) = start(&clock).await;
    let limit = leases(1_000, Micros::from_secs(60));
    for (is_held, most) in [(true, 56), (false, 100)] {
        let key = if is_held { "named" } else { "nameless" };
        for number in 1..=most + 1 {
            clock.advance(Micros::new(1));
            let hold = is_held.then(|| Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) });
            let charged = store.charge(&[item(&limit, key)], hold).await.unwrap();
            assert_eq!(charged.outcomes[0].used(), number);
            let in_chunks = server.psql("select count(*) from tollgate_execution") != "0";
            assert_eq!(in_chunks, number > most, "{key}: {number}");
        }
        assert_eq!(server.psql(CONSISTENT), "0");
        let bytes = server.psql("select max(pg_column_size(s.*)) from tollgate_state as s");
        assert!(bytes.parse::<u64>().unwrap() < 2_000, "{bytes} bytes");
        // All but the last ten have ended.
        clock.advance(Micros::new(60_000_000 - 10));
        assert_eq!(store.charge(&[item(&limit, key)], None).await.unwrap().outcomes[0].used(), 11);
        clock.advance(Micros::new(1));
        assert_eq!(store.charge(&[item(&limit, key)], None).await.unwrap().outcomes[0].used(), 11);
        assert_eq!(server.psql("select count(*) from tollgate_execution"), "0", "{key}");
        assert_eq!(server.psql(CONSISTENT), "0");
        clock.advance(Micros::from_secs(60));
    }
}

/// How often the functions for charges were called. A session reports what it called when it ends, if not before.
async fn calls_of_functions(server: &PostgresServer, store: PostgresStore) -> String {
    drop(store);
    let sessions = "select count(*) from pg_stat_activity \
                    where backend_type = 'client backend' and pid <> pg_backend_pid()";
    while server.psql(sessions) != "0" {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    server.psql(
        "select coalesce(sum(calls), 0) from pg_stat_user_functions where funcname in ('tollgate_charge', 'tollgate_charge_each')",
    )
}

/// The server's clock stands still, so that all leases end at one instant.
#[tokio::test(flavor = "multi_thread")]
async fn leases_that_end_together_are_found_by_their_holder() {
    let clock = ManualClock::at(ORIGIN);
    let (server, store) = start(&clock).await;
    let limit = leases(1_000, Micros::from_secs(60));
    let mut held = Vec::new();
    for _ in 0..640 {
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
        assert!(store.charge(&[item(&limit, "k")], Some(hold)).await.unwrap().allowed);
        held.push(hold.id);
    }
    let chunks = || server.psql("select count(*) from tollgate_execution").parse::<u64>().unwrap();
    assert!(chunks() <= 640 / 16, "{} chunks: each is at least half full", chunks());
    assert_eq!(server.psql(CONSISTENT), "0");
    let last = held.split_off(630);
    for id in held {
        assert_eq!(store.settle(id, &Settlement::Cancel).await.unwrap(), Settled::Done);
    }
    assert_eq!(server.psql(CONSISTENT), "0");
    assert_eq!(chunks(), 1, "chunks that became small were joined");
    let most = StoredCharge { cost: Cost::MAX, ..item(&limit, "k") };
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 10);
    for id in last {
        assert_eq!(store.settle(id, &Settlement::Renew).await.unwrap(), Settled::Done);
    }
    clock.advance(Micros::from_secs(60));
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 0);
}
