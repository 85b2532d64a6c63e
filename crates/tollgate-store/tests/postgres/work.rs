//! How much a call reads, however much is kept for its key: rows counted by the server, not time. With `--nocapture` it prints both:
//! the table of docs/operations.md.
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
const ENTRIES: i64 = 30_000;
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
        let parameters = format!("{ENTRIES}, {HOUR}, 0, 0, 0");
        let charge = |at: i64, hold: &str| {
            format!(
                "select tollgate_charge('{{{LOG}, {LEASES}}}', '{{log, leases}}', '{{4, 6}}', '{{{parameters}, {parameters}}}',
                   '{{1, 1}}', '{{f, f}}', {hold}, 2 * {HOUR}, '{{}}', {at}, 'infinity')"
            )
        };
        // The one in the middle and the last are charged; the others are put beside them as charges would have left them, which
        // takes a fraction of the time.
        let half = ENTRIES / 2;
        server.psql(&charge(START + half * 1_000, &format!("'{HOLD}'")));
        // More than are in a state.
        server.psql(&format!(
            "do $$
             declare
               moved tollgate_state;
             begin
               select s.* into moved from tollgate_state as s where s.key = '{LOG}';
               perform tollgate_write_state(tollgate_log_to_chunk(moved), 4::smallint, moved.at_us);
               select s.* into moved from tollgate_state as s where s.key = '{LEASES}';
               perform tollgate_write_state(tollgate_leases_to_chunks(moved), 6::smallint, moved.at_us);
             end
             $$"
        ));
        server.psql(&format!(
            "create function filled(chunk_key uuid, of_each bigint, after_us bigint, first bigint, last bigint) returns void
             language sql as $$
               insert into tollgate_execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
               select chunk_key, min(n.at_us), case when of_each = 64 then '00000000-0000-0000-0000-000000000000'::uuid
                        else (array_agg(n.holder order by n.i))[1] end,
                      max(n.at_us), count(*), array_agg(n.at_us order by n.i),
                      case when of_each = 32 then array_agg(n.holder order by n.i) end,
                      array_agg((n.i - first) % of_each + 1 order by n.i)
               from (select i, {START} + i * 1000 + after_us as at_us, gen_random_uuid() as holder
                     from generate_series(first, last) as i) as n
               group by (n.i - first) / of_each
             $$;
             select filled('{LOG}', {CHUNK}, 0, 1, {half} - 1), filled('{LOG}', {CHUNK}, 0, {half} + 1, {ENTRIES} - 1);
             select filled('{LEASES}', {LEASE_CHUNK}, {HOUR}, 1, {half} - 1),
                    filled('{LEASES}', {LEASE_CHUNK}, {HOUR}, {half} + 1, {ENTRIES} - 1);
             update tollgate_state as s set a = n.a, b = {ENTRIES} - 1, c = {ENTRIES} - 1, d = n.d,
               e = case when s.key = '{LOG}' then n.e end
             from (select key, max(last_us) as a, min(first_us) as d, max(first_us) as e from tollgate_execution group by key) as n
             where s.key = n.key"
        ));
        server.psql(&charge(START + ENTRIES * 1_000, "null"));
        let used = server.psql(&format!(
            "select p.readings[1], p.readings[9] from tollgate_peek('{{{LOG}, {LEASES}}}', '{{4, 6}}', '{{{parameters}, {parameters}}}',
               '{{1, 1}}', '{{f, f}}', {START} + {ENTRIES} * 1000) as p"
        ));
        assert_eq!(used, format!("{ENTRIES}|{ENTRIES}"));
        Filled { server }
    }

    /// How many rows of logs and leases a call fetched. Prints it, and the shortest time that the call took of six.
    fn fetched(&self, what: &str, call: &str) -> i64 {
        let now = "select 'time', (extract(epoch from clock_timestamp()) * 1000000)::bigint";
        let timed = format!("savepoint before; {now}; select {call}; {now}; rollback to before; ");
        let times = self.server.psql(&format!("begin; {}rollback", timed.repeat(6)));
        let times: Vec<i64> =
            times.lines().filter_map(|line| line.strip_prefix("time|")?.parse().ok()).collect();
        let took_us = times.chunks(2).map(|times| times[1] - times[0]).min();
        let rows = self.server.psql(&format!(
            "begin; select {call}; select 'fetched', sum(coalesce(idx_tup_fetch, 0) + seq_tup_read) \
             from pg_stat_xact_user_tables where relname not in ('tollgate_state', 'tollgate_hold'); rollback"
        ));
        let line = rows.lines().rfind(|line| line.contains("fetched")).unwrap_or_else(|| panic!("{rows}"));
        let rows = line.split('|').nth(1).unwrap().trim().parse().unwrap();
        println!("{what}: {rows} rows, {} us", took_us.unwrap());
        rows
    }

    fn charge(&self, key: &str, strategy: u8, window: i64, cost: i64, at: i64) -> i64 {
        let what = format!("{}, a charge of {cost}", if strategy == 4 { "log" } else { "leases" });
        self.fetched(&what, &format!(
            "tollgate_charge('{{{key}}}', '{{limit}}', '{{{strategy}}}', '{{{ENTRIES}, {window}, 0, 0, 0}}', '{{{cost}}}', '{{f}}', \
             null, null, null, {at}, 'infinity')"
        ))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_reads_a_row_for_64_entries_of_a_log_at_most() {
    let filled = Filled::new().await;
    let rows = |count: &str| filled.server.psql(count).parse::<i64>().unwrap();
    let chunks = rows(&format!("select count(*) from tollgate_execution where key = '{LOG}'"));
    assert!((ENTRIES / CHUNK..ENTRIES / CHUNK + 4).contains(&chunks), "{chunks} chunks");
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
    assert!(filled.fetched("log, a refund of all", &refund) <= 4 * most, "each chunk is deleted once");
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
        let both = filled.fetched(&format!("log and leases, a {kind} in the middle"), &settle);
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

/// Plans are made once, mostly while the tables are small. What was planned for an empty table read all of it, for every call, until
/// the server looked at its statistics again: callers that begin many keys made everybody slow.
#[tokio::test(flavor = "multi_thread")]
async fn no_call_reads_a_table_from_end_to_end_though_it_was_empty_when_the_plans_were_made() {
    let server = PostgresServer::builder().setting("fsync", "off").setting("autovacuum", "off").start();
    let store = connect(PostgresOptions { connections: 1, ..options(&server.url("postgres")) }).await;
    server.psql("vacuum analyze tollgate_state, tollgate_hold, tollgate_execution");
    let count = |column: &str| -> i64 {
        let tables = "('tollgate_state', 'tollgate_hold', 'tollgate_execution')";
        let text = format!("select sum({column}) from pg_stat_user_tables where relname in {tables}");
        server.psql(&text).trim().parse().unwrap()
    };
    let minute = Micros::from_secs(60);
    let limits = [
        StoredLimit::new("bucket", Limit::token_bucket("1/s", 1_000).unwrap()),
        StoredLimit::new("log", Limit::sliding_window(1_000, minute).unwrap()),
        StoredLimit::new("leases", Limit::concurrency(1_000, minute).unwrap()),
    ];
    let mut written = 0;
    for round in 0..60 {
        let key = format!("k{round}");
        let items: Vec<StoredCharge<'_>> = limits.iter().map(|limit| item(limit, &key)).collect();
        for cancel in [true, false] {
            let hold = Hold { id: ChargeId::random(), ttl: minute };
            assert!(store.charge(&items, Some(hold)).await.unwrap().allowed);
            let settlement = if cancel { Settlement::Cancel } else { Settlement::Renew };
            assert_eq!(store.settle(hold.id, &settlement).await.unwrap(), Settled::Done);
        }
        store.peek(&items).await.unwrap();
        store.refund(&items[..1]).await.unwrap();
        written += 8;
    }
    // The server's sessions tell what they did about once a second, at the end of a call.
    while count("n_tup_ins + n_tup_upd") < written {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        store.peek(&[item(&limits[0], "k0")]).await.unwrap();
    }
    assert_eq!(count("seq_tup_read"), 0, "tables were read from end to end");
}
