//! How much a call reads, however much is kept for its key: rows counted by the server, not time.
//!
//! The functions are called as the store calls them, in a transaction that is rolled back, because only within one does the server
//! tell at once how many rows were fetched.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    ChargeId, Cost, Hold, Limit, ManualClock, Micros, PostgresOptions, Settled, Settlement, Store,
    StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, item, options};

/// How many entries and leases, and how many of each a chunk holds.
const ENTRIES: i64 = 6_400;
const CHUNK: i64 = 64;
const LEASE_CHUNK: i64 = 32;

/// A key with a log, a key with leases, and a held charge that has one of each.
const LOG: &str = "11111111-1111-1111-1111-111111111111";
const LEASES: &str = "22222222-2222-2222-2222-222222222222";
const HOLD: &str = "33333333-3333-3333-3333-333333333333";

/// Both are charged once every millisecond from here on; leases end one after the other an hour later.
const START: i64 = 1_000_000_000_000;
const HOUR: i64 = 3_600_000_000;

struct Filled {
    server: PostgresServer,
}

impl Filled {
    async fn new() -> Filled {
        let server = PostgresServer::builder().setting("fsync", "off").start();
        connect(options(&server.url("postgres"))).await;
        let (half, parameters) = (ENTRIES / 2, format!("{ENTRIES}, {HOUR}, 0, 0, 0"));
        server.psql(&format!(
            "do $$ begin for i in 1 .. {ENTRIES} loop
               perform tollgate_charge('{{{LOG}, {LEASES}}}', '{{log, leases}}', '{{4, 6}}', '{{{parameters}, {parameters}}}',
                 '{{1, 1}}', '{{f, f}}', case when i = {half} then '{HOLD}'::uuid end, 2 * {HOUR}, '{{}}',
                 {START} + i * 1000, 'infinity');
               if i % 100 = 0 then commit; end if;
             end loop; end $$"
        ));
        Filled { server }
    }

    /// How many rows of logs and leases a call fetched.
    fn fetched(&self, call: &str) -> i64 {
        let rows = self.server.psql(&format!(
            "begin; select {call}; select 'fetched', sum(coalesce(idx_tup_fetch, 0) + seq_tup_read) \
             from pg_stat_xact_user_tables where relname not in ('tollgate_state', 'tollgate_hold'); rollback"
        ));
        let line = rows.lines().rfind(|line| line.contains("fetched")).unwrap_or_else(|| panic!("{rows}"));
        line.split('|').nth(1).unwrap().trim().parse().unwrap()
    }

    fn charge(&self, key: &str, strategy: u8, window: i64, cost: i64, at: i64) -> i64 {
        self.fetched(&format!(
            "tollgate_charge('{{{key}}}', '{{limit}}', '{{{strategy}}}', '{{{ENTRIES}, {window}, 0, 0, 0}}', '{{{cost}}}', '{{f}}', \
             null, null, null, {at}, 'infinity')"
        ))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_reads_a_row_for_64_entries_of_a_log_at_most() {
    let filled = Filled::new().await;
    let rows = |count: &str| filled.server.psql(count).parse::<i64>().unwrap();
    assert_eq!(
        rows(&format!("select count(*) from tollgate_execution where key = '{LOG}'")),
        ENTRIES / CHUNK
    );
    let full = START + ENTRIES * 1_000;
    let most = ENTRIES / CHUNK + 8;
    // A charge is denied, whatever it costs; the whole log counts.
    for cost in [1, 2, ENTRIES / 4, ENTRIES / 2, ENTRIES / 2 + 1, ENTRIES - 1, ENTRIES] {
        let log = filled.charge(LOG, 4, HOUR, cost, full);
        assert!(log <= most, "{log} rows for a denied charge of {cost}");
    }
    // The next charge is admitted, when one entry, half of them or all have run out.
    assert!(filled.charge(LOG, 4, HOUR, 1, START + HOUR + 1_000) <= 4, "the oldest chunk and the newest");
    for gone in [ENTRIES / 2, ENTRIES] {
        let log = filled.charge(LOG, 4, HOUR, 1, START + HOUR + gone * 1_000);
        assert!(log <= 2 * most, "{log} rows where {gone} have run out, of which each chunk is deleted once");
    }
    // Another version of the limit, of half the window.
    let log = filled.charge(LOG, 4, ENTRIES * 500, ENTRIES, full);
    assert!(log <= 2 * most, "{log} rows for another window");
    let parameters = format!("'{{4}}', '{{{ENTRIES}, {HOUR}, 0, 0, 0}}', '{{{}}}'", ENTRIES - 1);
    let refund = format!("tollgate_refund('{{{LOG}}}', {parameters}, {full}, 'infinity')");
    assert!(filled.fetched(&refund) <= 4 * most, "each chunk is deleted once");
}

/// The wait of a denied charge is the end of some lease in the middle, at worst: half of the leases were walked to it, and all that have
/// ended were summed one by one.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_reads_a_row_for_32_leases_at_most() {
    let filled = Filled::new().await;
    // A loop fetches ten rows and then fifty at a time.
    let chunks = ENTRIES / LEASE_CHUNK;
    let (half, all) = (chunks / 2 + 60, chunks + 8);
    let held = START + HOUR;
    for cost in [1, 2, 100, ENTRIES / 4, ENTRIES / 2, ENTRIES / 2 + 1, ENTRIES - 100, ENTRIES - 1, ENTRIES] {
        let leases = filled.charge(LEASES, 6, HOUR, cost, held);
        assert!(leases <= half, "{leases} rows for a denied charge of {cost}");
    }
    // Some have ended, and the charge is denied all the same, or admitted.
    for ended in [1, ENTRIES / 2, ENTRIES - 1] {
        let leases = filled.charge(LEASES, 6, HOUR, ENTRIES, held + ended * 1_000);
        assert!(leases <= half + all, "{leases} rows for a denied charge where {ended} have ended");
    }
    let leases = filled.charge(LEASES, 6, HOUR, 1, held + 1_000);
    assert!(leases <= 8, "{leases} rows where one has ended: the oldest chunk and the newest");
    for ended in [ENTRIES / 2, ENTRIES] {
        let leases = filled.charge(LEASES, 6, HOUR, 1, held + ended * 1_000);
        assert!(
            leases <= 2 * all,
            "{leases} rows where {ended} have ended, of which each chunk is deleted once"
        );
    }
    // Another version of the limit, by which a lease ends sooner than half of those that are held.
    let leases = filled.charge(LEASES, 6, ENTRIES * 500, 1, held + 1_000);
    assert!(leases <= 12, "{leases} rows for a lease in the middle");
    // Both of what is held go by one name, so these find an entry of the log and a lease.
    for kind in ["cancel", "renew"] {
        let settle = format!("tollgate_settle('{HOLD}', '{kind}', null, '{{}}', '{{}}', {held}, 'infinity')");
        let both = filled.fetched(&settle);
        assert!(both <= 12, "{both} rows for a {kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_which_most_was_given_back_is_small() {
    let server = PostgresServer::builder().setting("fsync", "off").start();
    let clock = ManualClock::at(ORIGIN);
    let store =
        connect(PostgresOptions { clock: Some(clock.clock()), ..options(&server.url("postgres")) }).await;
    let log = StoredLimit::new("log", Limit::sliding_window(1_000, Micros::from_secs(60)).unwrap());
    let mut held = Vec::new();
    for _ in 0..10 * CHUNK {
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(60) };
        assert!(store.charge(&[item(&log, "k")], Some(hold)).await.unwrap().allowed);
        held.push(hold.id);
        clock.advance(Micros::new(1));
    }
    let chunks = || server.psql("select count(*) from tollgate_execution");
    assert_eq!(chunks(), "10");
    for id in held.iter().enumerate().filter(|(place, _)| place % 64 != 9).map(|(_, id)| *id) {
        assert_eq!(store.settle(id, &Settlement::Cancel).await.unwrap(), Settled::Done);
    }
    let most = StoredCharge { cost: Cost::MAX, ..item(&log, "k") };
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 10);
    assert_eq!(chunks(), "1", "chunks that became small were joined");
    for id in held.into_iter().step_by(64) {
        assert_eq!(store.settle(id, &Settlement::Cancel).await.unwrap(), Settled::Already);
    }
    clock.advance(Micros::from_secs(60));
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 0);
}
