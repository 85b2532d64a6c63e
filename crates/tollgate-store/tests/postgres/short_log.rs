//! Logs that are kept in their state, and those that have grown out of it: the same answers as from memory, whichever a log is.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Charged, Cost, Hold, Limit, ManualClock, MemoryOptions, MemoryStore, Micros, PostgresOptions,
    PostgresStore, Settlement, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, options};

/// States whose own account of the log is not what their entries come to, in the state or in chunks.
const CONSISTENT: &str = "
    select count(*) from tollgate_state as s,
      lateral (select count(*) as entries, sum(n.cost) as total, min(n.at_us) as oldest, max(n.at_us) as newest
               from (select l.at_us, l.sum - coalesce(lag(l.sum) over (order by l.n),
                              s.log_sums[cardinality(s.log_sums)] - s.b) as cost
                     from unnest(s.log_us, s.log_sums) with ordinality as l (at_us, sum, n)
                     union all
                     select entry.at_us, e.sums[entry.n] - coalesce(e.sums[entry.n - 1], 0)
                     from tollgate_execution as e, unnest(e.at_us) with ordinality as entry (at_us, n)
                     where e.key = s.key and entry.at_us >= s.d) as n) as log
    where s.limit_name = 'log' and s.c > 0
      and (s.c, s.b, s.d, s.a) is distinct from (log.entries, log.total, log.oldest, log.newest)
      or s.log_us is not null and exists (select from tollgate_execution as e where e.key = s.key)";

struct Both {
    clock: ManualClock,
    _server: PostgresServer,
    /// Looks at the tables.
    client: tokio_postgres::Client,
    memory: MemoryStore,
    postgres: PostgresStore,
    random: u64,
}

impl Both {
    async fn new(seed: u64) -> Both {
        let clock = ManualClock::at(ORIGIN);
        let server = PostgresServer::builder().setting("fsync", "off").start();
        let (client, connection) =
            tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let of_clock = PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) };
        let postgres = connect(of_clock).await;
        let memory = MemoryStore::new(MemoryOptions { clock: clock.clock(), ..MemoryOptions::default() });
        Both { clock, _server: server, client, memory, postgres, random: seed }
    }

    /// Below a bound. Splitmix64.
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    async fn count(&self, text: &str) -> i64 {
        self.client.query_one(text, &[]).await.unwrap().get(0)
    }

    async fn charge(&self, limit: &StoredLimit, cost: u64, hold: Option<Hold>) -> Charged {
        let items = [StoredCharge { limit, key: "k", cost: Cost::new(cost).unwrap(), shadow: false }];
        let (of_memory, of_postgres) =
            (Store::charge(&self.memory, &items, hold).await, self.postgres.charge(&items, hold).await);
        let charged = of_postgres.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(of_memory.unwrap(), charged, "a charge of {cost} under {}", limit.limit);
        charged
    }

    async fn agree(&self, limit: &StoredLimit, after: &str) {
        let of_memory = Store::status(&self.memory, limit, "k").await.unwrap();
        let of_postgres = self.postgres.status(limit, "k").await.unwrap();
        assert_eq!(of_memory, of_postgres, "after {after}, under {}", limit.limit);
        let most = [StoredCharge { limit, key: "k", cost: Cost::new(5).unwrap(), shadow: false }];
        let of_memory = Store::peek(&self.memory, &most).await.unwrap();
        assert_eq!(of_memory, self.postgres.peek(&most).await.unwrap(), "after {after}");
        assert_eq!(self.count(CONSISTENT).await, 0, "after {after}");
    }
}

fn log(limit: u64, window_ms: u64) -> StoredLimit {
    StoredLimit::new("log", Limit::sliding_window(limit, Micros::from_millis(window_ms)).unwrap())
}

/// Versions of one limit: in the state, at its edge, and too large for it; with windows that keep entries for each other.
async fn trace(seed: u64, steps: usize) {
    let mut both = Both::new(seed).await;
    let versions = [log(3, 200), log(60, 500), log(100, 300), log(101, 400), log(2_000, 900)];
    let mut held: Vec<ChargeId> = Vec::new();
    let mut shapes = [0, 0];
    let mut version = 0;
    for step in 0..steps {
        let passed = [0, 1, 300, 1_000, 4_000, 30_000][usize::try_from(both.below(6)).unwrap()];
        both.clock.advance(Micros::new(passed));
        // A version is asked for a while, so that logs grow under it.
        if both.below(40) == 0 {
            version = usize::try_from(both.below(5)).unwrap();
        }
        let limit = &versions[version];
        let cost = 1 + both.below(3);
        let what = match both.below(16) {
            0 if !held.is_empty() => {
                let id = held.swap_remove(usize::try_from(both.below(held.len() as u64)).unwrap());
                let settlement = match both.below(3) {
                    0 => Settlement::Cancel,
                    1 => Settlement::Actual(1),
                    _ => Settlement::Actual(4),
                };
                let of_postgres = both.postgres.settle(id, &settlement).await.unwrap();
                assert_eq!(both.memory.settle(id, &settlement).unwrap(), of_postgres);
                format!("{settlement:?}")
            }
            1 | 2 => {
                let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
                if both.charge(limit, cost, Some(hold)).await.allowed {
                    held.push(hold.id);
                }
                "a reservation".into()
            }
            3 => {
                let cost = Cost::new(1 + both.below(5)).unwrap();
                let items = [StoredCharge { limit, key: "k", cost, shadow: false }];
                Store::refund(&both.memory, &items).await.unwrap();
                both.postgres.refund(&items).await.unwrap();
                format!("a refund of {cost:?}")
            }
            _ => {
                both.charge(limit, cost, None).await;
                "a charge".into()
            }
        };
        both.agree(limit, &format!("step {step} of seed {seed}: {what}")).await;
        let is_short = both.count("select count(*) from tollgate_execution").await == 0;
        shapes[usize::from(is_short)] += 1;
    }
    assert!(shapes.iter().all(|steps| *steps > 20), "seed {seed}: in chunks and in the state: {shapes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_in_its_state_and_one_in_chunks_answer_as_memory_does() {
    for seed in 1..=2 {
        trace(seed, 1_000).await;
    }
}

/// A charge of a short log is one statement on one row, and a full one is still one row.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_log_has_no_rows_of_its_own() {
    let both = Both::new(0).await;
    let limit = log(100, 1_000);
    for _ in 0..150 {
        both.clock.advance(Micros::from_millis(7));
        both.charge(&limit, 1, None).await;
    }
    both.agree(&limit, "150 charges").await;
    assert_eq!(both.count("select count(*) from tollgate_execution").await, 0);
    assert_eq!(both.count("select c from tollgate_state").await, 100);
    let bytes = both.count("select pg_column_size(s.*)::bigint from tollgate_state as s").await;
    assert!(bytes < 2_000, "{bytes} bytes: none is compressed or moved out of the table");
}
