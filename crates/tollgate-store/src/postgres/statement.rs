//! The SQL texts that are sent to the server. They contain no values from callers: values are parameters.
//!
//! `upsert/`, `several/` and the functions (`charge.sql` and its siblings) are joined here with the kernel's SQL twins.
//! `call.rs` and `pool.rs` prepare and send them; `schema.rs` creates the functions.

use tollgate_kernel::{Limit, SQL, Strategy};

use crate::remote::limit_codec;

/// The statements that a connection prepares, each at its first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Verb {
    /// A charge on one key or on many, under a strategy with its state in one row.
    Upsert(Plain, Keys),
    /// The same for many keys, with a hold for each admitted one.
    Reserve(Plain),
    /// Charges of several limits each, with these strategies, without a hold: one statement.
    Several(StrategySet),
    Charge,
    /// Many charges of the same limits, each separately.
    ChargeEach,
    Settle,
    /// Many settlements, each separately.
    SettleEach,
    Peek,
    Refund,
    Forget,
    /// Which of several keys exist.
    Known,
    /// Which of several charges are held.
    Held,
    ReadRecords,
    PutRecord,
    RemoveRecord,
}

/// The largest sliding window whose log is stored in the state: a row of this many entries is still stored inline, without
/// compression. short_log.sql and entries.sql have the same number.
const SHORT_LOG: u64 = 100;

/// The keys of a statement for many. Before it locks the first row it sets its lock timeout, for this statement alone: an eighth
/// of that of a single key, because all keys wait for the locked row.
const MANY_KEYS: &str = "(select unnest(many.keys) as key from (select $1::uuid[] as keys, \
     set_config('lock_timeout', \
       greatest(extract(epoch from current_setting('lock_timeout')::interval) * 125, 1)::integer::text, true) \
     offset 0) as many) as charged";

/// A strategy with all its state in one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Plain {
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    /// A short log. A log that is in chunks, because the limit was larger before, is charged by the function.
    SlidingWindow,
    SlidingWindowCounter,
    /// Few leases. Leases that are in chunks are charged by the function.
    Concurrency,
}

/// The set of strategies of a charge. There are 31 sets, so at most 31 statements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct StrategySet(u8);

impl StrategySet {
    /// The strategies of several limits, if each has its state in one row and none is a concurrency limit.
    pub(super) fn of<'a>(limits: impl IntoIterator<Item = &'a Limit>) -> Option<StrategySet> {
        let mut set = StrategySet::default();
        for limit in limits {
            set.0 |= 1 << Plain::of(limit).filter(|plain| *plain != Plain::Concurrency)? as u8;
        }
        Some(set)
    }

    /// One statement for charges of these strategies: the common text, with a query for each strategy inserted.
    fn charge(self) -> String {
        let is_in = |(plain, _): &&(Plain, &str)| self.0 & 1 << *plain as u8 != 0;
        let queries: Vec<String> =
            OUTCOMES.iter().filter(is_in).map(|(plain, text)| plain.outcome_query(text)).collect();
        include_str!("several/charge.sql").replace("{outcomes}", &queries.join("union all\n"))
    }
}

/// The outcome of a strategy for its parts of charges of several limits.
const OUTCOMES: [(Plain, &str); 5] = [
    (Plain::TokenBucket, include_str!("several/bucket.sql")),
    (Plain::LeakyBucket, include_str!("several/bucket.sql")),
    (Plain::FixedWindow, include_str!("several/fixed_window.sql")),
    (Plain::SlidingWindow, include_str!("several/sliding_window.sql")),
    (Plain::SlidingWindowCounter, include_str!("several/sliding_window_counter.sql")),
];

/// How many keys a statement takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Keys {
    One,
    Many,
}

impl Plain {
    /// The strategy, if its state is in one row.
    pub(super) fn of(limit: &Limit) -> Option<Plain> {
        match limit.strategy() {
            Strategy::TokenBucket => Some(Plain::TokenBucket),
            Strategy::LeakyBucket => Some(Plain::LeakyBucket),
            Strategy::FixedWindow => Some(Plain::FixedWindow),
            Strategy::SlidingWindowCounter => Some(Plain::SlidingWindowCounter),
            Strategy::SlidingWindow if limit.capacity() <= SHORT_LOG => Some(Plain::SlidingWindow),
            Strategy::SlidingWindow => None,
            Strategy::Concurrency => Some(Plain::Concurrency),
        }
    }

    /// Whether some states under this strategy are not in one row: a statement leaves these to the function.
    pub(super) fn has_chunks(self) -> bool {
        matches!(self, Plain::SlidingWindow | Plain::Concurrency)
    }

    fn upsert(self, keys: Keys) -> String {
        self.upsert_by(keys, "null::uuid[]")
    }

    /// The upsert, with an expression for the holders of a lease.
    fn upsert_by(self, keys: Keys, holders: &str) -> String {
        let text = match self {
            Plain::TokenBucket | Plain::LeakyBucket => include_str!("upsert/bucket.sql"),
            Plain::FixedWindow => include_str!("upsert/fixed_window.sql"),
            Plain::SlidingWindow => include_str!("upsert/sliding_window.sql"),
            Plain::SlidingWindowCounter => include_str!("upsert/sliding_window_counter.sql"),
            Plain::Concurrency => include_str!("upsert/concurrency.sql"),
        };
        let charged = match keys {
            Keys::One => "(select $1::uuid as key) as charged",
            Keys::Many => MANY_KEYS,
        };
        text.replace("{strategy}", self.name()).replace("{charged}", charged).replace("{holders}", holders)
    }

    /// The upsert of many keys, then an insert of a hold for each admitted one, in one statement. The parameters of the upsert
    /// are followed by the ids and the times to live, one for each key, and the common values: strategy, the limit's five
    /// numbers, cost, and the request.
    fn reserve(self) -> String {
        // The last parameter of the upsert, its columns, the eight numbers of the reading, and from when the charge counts.
        let (last, found, readings, charged_at) = match self {
            Plain::TokenBucket | Plain::LeakyBucket => {
                (10, "x1, x2", "array[decided.x1, decided.x2, 0, 0, 0, 0, 0, 0]", "s.at_us")
            }
            Plain::FixedWindow => (
                8,
                "x1, x2, x3",
                "array[decided.x1, decided.x2, decided.x3, 0, 0, 0, 0, 0]",
                "{prefix}fixed_window_charged_at(s.a, s.d, $4::bigint, s.at_us)",
            ),
            Plain::SlidingWindow => (7, "x1", "decided.x1 || array[0, 0, 0, 0, 0]::bigint[]", "s.a"),
            Plain::SlidingWindowCounter => (
                7,
                "x1, x2, x3, x4, x5, x6, x7, x8",
                "array[decided.x1, decided.x2, decided.x3, decided.x4, decided.x5, decided.x6, decided.x7, decided.x8]",
                "{prefix}sliding_window_counter_charged_at(s.a, s.extra, s.at_us)",
            ),
            // A lease has its end instead.
            Plain::Concurrency => (
                7,
                "x1",
                "decided.x1 || array[0, 0, 0, 0, 0]::bigint[]",
                "{prefix}concurrency_end($4::bigint, s.at_us)",
            ),
        };
        // A hold lives at least as long as its lease.
        let ttl = if self == Plain::Concurrency { "greatest(h.ttl_us, $4::bigint)" } else { "h.ttl_us" };
        let [ids, ttls, strategy, parameters, cost, asked, not_after] =
            std::array::from_fn(|place| format!("${}", last + place));
        let mut upsert = self
            .upsert_by(Keys::Many, "array[charged.holder]")
            .replace(&format!("${last}::timestamptz"), &format!("{not_after}::timestamptz"));
        if self == Plain::Concurrency {
            // The id of a hold is the holder of its lease.
            upsert = upsert
                .replace("unnest(many.keys) as key", "unnest(many.keys) as key, unnest(many.ids) as holder")
                .replace("$1::uuid[] as keys", &format!("$1::uuid[] as keys, {ids}::uuid[] as ids"));
        }
        let upsert = upsert.trim_end();
        format!(
            "with decided (key, admitted, at_us, {found}, charged_at_us) as ({upsert}, {charged_at}),
             held as (
               insert into {{prefix}}hold (id, keys, limit_names, strategies, parameters, costs, charged_at_us, asked, readings,
                                           at_us, ttl_us, end_us, settled)
               select h.id, array[decided.key], array[$2::text], array[{strategy}::smallint], {parameters}::bigint[], array[{cost}::bigint],
                      array[decided.charged_at_us], {asked}::bigint[], {readings},
                      decided.at_us, {ttl}, decided.at_us + {ttl}, false
               from decided join unnest($1::uuid[], {ids}::uuid[], {ttls}::bigint[]) as h (key, id, ttl_us) on h.key = decided.key
               -- On disk before it is acknowledged, if there is anything.
               where decided.admitted and set_config('synchronous_commit', 'on', true) is not null)
             select key, admitted, at_us, {found} from decided"
        )
    }

    /// The outcome of this strategy for its parts of charges of several limits, from its text.
    fn outcome_query(self, text: &str) -> String {
        let number = limit_codec::number(self.strategy());
        text.replace("{strategy}", self.name()).replace("{number}", &number.to_string())
    }

    fn name(self) -> &'static str {
        self.strategy().name()
    }

    fn strategy(self) -> Strategy {
        match self {
            Plain::TokenBucket => Strategy::TokenBucket,
            Plain::LeakyBucket => Strategy::LeakyBucket,
            Plain::FixedWindow => Strategy::FixedWindow,
            Plain::SlidingWindow => Strategy::SlidingWindow,
            Plain::SlidingWindowCounter => Strategy::SlidingWindowCounter,
            Plain::Concurrency => Strategy::Concurrency,
        }
    }
}

impl Verb {
    /// The name of the operation, for messages.
    pub(super) fn doing(self) -> &'static str {
        match self {
            Verb::Upsert(..) | Verb::Reserve(_) | Verb::Several(_) | Verb::Charge | Verb::ChargeEach => {
                "charging"
            }
            Verb::Settle | Verb::SettleEach => "settling",
            Verb::Peek | Verb::Known | Verb::Held => "peeking",
            Verb::Refund => "refunding",
            Verb::Forget => "forgetting",
            Verb::ReadRecords => "reading records",
            Verb::PutRecord => "keeping a record",
            Verb::RemoveRecord => "removing a record",
        }
    }

    /// Whether it changes something; then its last parameter is the instant after which it must not.
    pub(super) fn is_change(self) -> bool {
        !matches!(self, Verb::Peek | Verb::Known | Verb::Held | Verb::ReadRecords)
    }

    /// The statement, for tables of a prefix.
    pub(super) fn text(self, prefix: &str) -> String {
        let text = match self {
            Verb::Upsert(strategy, keys) => strategy.upsert(keys),
            Verb::Reserve(strategy) => strategy.reserve(),
            Verb::Several(strategies) => strategies.charge(),
            Verb::Charge => {
                "select * from {prefix}charge($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)".into()
            }
            Verb::ChargeEach => {
                "select * from {prefix}charge_each($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
                    .into()
            }
            Verb::SettleEach => {
                "select * from {prefix}settle_each($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)".into()
            }
            Verb::Settle => "select * from {prefix}settle($1, $2, $3, $4, $5, $6, $7)".into(),
            Verb::Peek => "select * from {prefix}peek($1, $2, $3, $4, $5, $6)".into(),
            Verb::Refund => "select * from {prefix}refund($1, $2, $3, $4, $5, $6)".into(),
            Verb::Known => "select s.key from {prefix}state as s where s.key = any ($1::uuid[])".into(),
            Verb::Held => "select h.id from {prefix}hold as h where h.id = any ($1::uuid[])".into(),
            Verb::Forget => "select * from {prefix}forget($1, $2)".into(),
            Verb::ReadRecords => "select * from {prefix}read_records($1, $2, $3)".into(),
            Verb::PutRecord => "select * from {prefix}put_record($1, $2, $3, $4, $5, $6, $7, $8, $9)".into(),
            Verb::RemoveRecord => "select * from {prefix}remove_record($1, $2, $3, $4)".into(),
        };
        with_prefix(&text, prefix)
    }
}

/// The migrations, one text for each version, the oldest first.
pub(super) const MIGRATIONS: [&str; 5] = [
    include_str!("migrations/1.sql"),
    include_str!("migrations/2.sql"),
    include_str!("migrations/3.sql"),
    include_str!("migrations/4.sql"),
    include_str!("migrations/5.sql"),
];

/// All functions, each after those that it calls.
pub(super) fn functions(prefix: &str) -> String {
    let twins = SQL.iter().map(|(_, text)| *text);
    let own = [
        include_str!("short_log.sql"),
        include_str!("short_leases.sql"),
        include_str!("entries.sql"),
        include_str!("charge.sql"),
        include_str!("settle.sql"),
        include_str!("each.sql"),
        include_str!("refund.sql"),
        include_str!("cleanup.sql"),
        include_str!("records.sql"),
    ];
    with_prefix(&twins.chain(own).collect::<Vec<_>>().join("\n"), prefix)
}

/// A text with the prefix of the tables inserted. The prefix was checked before.
pub(super) fn with_prefix(text: &str, prefix: &str) -> String {
    text.replace("{prefix}", prefix)
}
