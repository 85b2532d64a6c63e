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
    let mut most_chunks = 0;
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
        }
    }
    assert!(most_chunks >= 8, "{most_chunks} chunks are few");
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
