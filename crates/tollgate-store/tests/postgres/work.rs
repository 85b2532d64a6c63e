//! How much a call reads, however much is kept for its key: rows counted by the server, not time.
//!
//! The functions are called as the store calls them, in a transaction that is rolled back, because only within one does the server
//! tell at once how many rows were fetched.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    Cost, Hold, HoldId, Item, Limit, ManualClock, Micros, PostgresOptions, Settled, Settlement, Store,
    StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;

use crate::{connect, item, options};

/// How many entries and leases, and how many of them a chunk holds.
const ENTRIES: i64 = 6_400;
const CHUNK: i64 = 64;

/// A key with a log, a key with leases, and a held charge that has one of each.
const LOG: &str = "11111111-1111-1111-1111-111111111111";
const LEASES: &str = "22222222-2222-2222-2222-222222222222";
const HOLD: &str = "33333333-3333-3333-3333-333333333333";

/// The log is charged once every millisecond from here on; leases end one after the other an hour later.
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
               perform tollgate_charge('{{{LOG}}}', '{{log}}', '{{4}}', '{{{parameters}}}', '{{1}}', '{{f}}',
                 case when i = {half} then '{HOLD}'::uuid end, {HOUR}, '{{}}', {START} + i * 1000, 'infinity');
               if i % 100 = 0 then commit; end if;
             end loop; end $$"
        ));
        // One that was held is among them.
        server.psql(&format!(
            "insert into tollgate_lease select '{LEASES}', {START} + {HOUR} + i * 1000,
               case when i = {half} then '{HOLD}' else gen_random_uuid() end, 1 from generate_series(1, {ENTRIES}) as i;
             insert into tollgate_state (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us)
               values ('{LEASES}', 'leases', {START} + {HOUR} + {ENTRIES} * 1000, {ENTRIES}, 0, true, 0, 0, 0);
             update tollgate_hold set keys = keys || '{LEASES}'::uuid, limit_names = limit_names || 'leases'::text,
               strategies = strategies || 6::smallint, parameters = parameters || array[{parameters}]::bigint[],
               costs = costs || 1::bigint, charged_at_us = charged_at_us || {START} + {HOUR} + {half} * 1000"
        ));
        Filled { server }
    }

    /// How many rows of logs and leases a call fetched.
    fn fetched(&self, call: &str) -> (i64, i64) {
        let rows = self.server.psql(&format!(
            "begin; select {call}; select 'fetched', (select coalesce(idx_tup_fetch, 0) + seq_tup_read \
             from pg_stat_xact_user_tables where relname = 'tollgate_execution'), (select coalesce(idx_tup_fetch, 0) + seq_tup_read \
             from pg_stat_xact_user_tables where relname = 'tollgate_lease'); rollback"
        ));
        let line = rows.lines().rfind(|line| line.contains("fetched")).unwrap_or_else(|| panic!("{rows}"));
        let mut numbers = line.split('|').skip(1).map(|number| number.trim().parse().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }

    fn charge(&self, key: &str, strategy: u8, window: i64, cost: i64, at: i64) -> (i64, i64) {
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
    assert_eq!(rows("select count(*) from tollgate_execution"), ENTRIES / CHUNK);
    let full = START + ENTRIES * 1_000;
    let most = ENTRIES / CHUNK + 8;
    // A charge is denied, whatever it costs; the whole log counts.
    for cost in [1, 2, ENTRIES / 4, ENTRIES / 2, ENTRIES / 2 + 1, ENTRIES - 1, ENTRIES] {
        let (log, leases) = filled.charge(LOG, 4, HOUR, cost, full);
        assert!(log <= most && leases == 0, "{log} rows for a denied charge of {cost}");
    }
    // The next charge is admitted, when one entry, half of them or all have run out.
    assert!(filled.charge(LOG, 4, HOUR, 1, START + HOUR + 1_000).0 <= 4, "the oldest chunk and the newest");
    for gone in [ENTRIES / 2, ENTRIES] {
        let (log, _) = filled.charge(LOG, 4, HOUR, 1, START + HOUR + gone * 1_000);
        assert!(log <= 2 * most, "{log} rows where {gone} have run out, of which each chunk is deleted once");
    }
    // Another version of the limit, of half the window.
    let (log, _) = filled.charge(LOG, 4, ENTRIES * 500, ENTRIES, full);
    assert!(log <= 2 * most, "{log} rows for another window");
    for kind in ["cancel", "renew"] {
        let settle = format!("tollgate_settle('{HOLD}', '{kind}', null, '{{}}', '{{}}', {full}, 'infinity')");
        let (log, leases) = filled.fetched(&settle);
        assert!(log <= 4 && leases <= 4, "{log} and {leases} rows for a {kind}");
    }
    let parameters = format!("'{{4}}', '{{{ENTRIES}, {HOUR}, 0, 0, 0}}', '{{{}}}'", ENTRIES - 1);
    let refund = format!("tollgate_refund('{{{LOG}}}', {parameters}, {full}, 'infinity')");
    assert!(filled.fetched(&refund).0 <= 4 * most, "each chunk is deleted once");
}

/// The wait of a denied charge is the end of some lease in the middle, at worst; from there on they are summed to the nearer end.
#[tokio::test(flavor = "multi_thread")]
async fn a_denied_charge_walks_leases_from_the_nearer_end_and_no_further_than_needed() {
    let filled = Filled::new().await;
    let all_held = START + HOUR;
    for (cost, most) in [
        (1, 1),
        (100, 100),
        (ENTRIES / 2, ENTRIES / 2),
        (ENTRIES / 2 + 1, ENTRIES / 2),
        (ENTRIES - 100, 101),
        (ENTRIES, 1),
    ] {
        let (_, leases) = filled.charge(LEASES, 6, HOUR, cost, all_held);
        // A loop fetches ten rows and then fifty at a time.
        assert!(leases <= most + 60, "{leases} rows for a denied charge of {cost}");
    }
    let (_, leases) = filled.charge(LEASES, 6, HOUR, ENTRIES, all_held + 1_000);
    assert!(leases <= 20, "{leases} rows where one has ended");
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
        let hold = Hold { id: HoldId::random(), ttl: Micros::from_secs(60) };
        assert!(store.charge(&[item(&log, "k")], Some(hold)).await.unwrap().allowed);
        held.push(hold.id);
        clock.advance(Micros::new(1));
    }
    let chunks = || server.psql("select count(*) from tollgate_execution");
    assert_eq!(chunks(), "10");
    for id in held.iter().enumerate().filter(|(place, _)| place % 64 != 9).map(|(_, id)| *id) {
        assert_eq!(store.settle(id, &Settlement::Cancel).await.unwrap(), Settled::Done);
    }
    let most = Item { cost: Cost::MAX, ..item(&log, "k") };
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 10);
    assert_eq!(chunks(), "1", "chunks that became small were joined");
    for id in held.into_iter().step_by(64) {
        assert_eq!(store.settle(id, &Settlement::Cancel).await.unwrap(), Settled::Already);
    }
    clock.advance(Micros::from_secs(60));
    assert_eq!(store.peek(&[most]).await.unwrap().outcomes[0].used(), 0);
}
