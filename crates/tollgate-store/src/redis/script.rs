//! The scripts: the kernel's twins, joined to what touches data. Their texts are constant; everything that callers send is in
//! KEYS and ARGV. Their hashes are computed, never written down.
//!
//! A server makes all the functions of a script anew for every call. So what the common charge needs stands at the top, and what
//! only other states need stands in a function of its own, which defines it when it is first asked for ([`on_demand`]).

use std::sync::LazyLock;

use tollgate_kernel::{LUA, Strategy};

/// A script: its text, and the hash by which a server knows it.
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) hash: String,
}

/// A twin by the name of its file.
fn twin(name: &str) -> &'static str {
    let found = LUA.iter().find(|(file, _)| *file == name);
    found.map(|(_, text)| *text).unwrap_or_else(|| unreachable!("the kernel has no {name}"))
}

fn joined(texts: &[&str]) -> Script {
    let text = texts.join("\n");
    let hash = redis::Script::new(&text).get_hash().to_owned();
    Script { text, hash }
}

const CLOCK: &str = include_str!("clock.lua");
const KEEP: &str = include_str!("keep.lua");
const ENTRIES: &str = include_str!("entries_kept.lua");
const HOLD: &str = include_str!("hold.lua");
const BUCKET_TEXT: &str = include_str!("bucket.lua");
const WINDOW_TEXT: &str = include_str!("window.lua");
const COUNTER_TEXT: &str = include_str!("counter.lua");
const LOG_TEXT: &str = include_str!("log.lua");
const LEASES_TEXT: &str = include_str!("leases.lua");

/// A function `name`, which defines what these texts do when it is first called, and answers a table of it: pairs of a name in the table
/// and what it stands for.
fn on_demand(name: &str, texts: &[&str], table: &[(&str, &str)]) -> String {
    let fields: Vec<String> = table.iter().map(|(field, value)| format!("{field} = {value}")).collect();
    let (texts, fields) = (texts.join("\n"), fields.join(", "));
    format!(
        "local {name}_made\nlocal function {name}()\nif not {name}_made then\n{texts}\n{name}_made = {{{fields}}}\nend\nreturn {name}_made\nend\n"
    )
}

/// What a charging script has for a strategy: what comes before the rest, and what is defined on demand.
fn charging_text(strategy: Strategy) -> String {
    let (texts, look) = match strategy {
        Strategy::TokenBucket | Strategy::LeakyBucket => {
            let others = on_demand(
                "others_of_bucket",
                &[twin("token_bucket_change.lua"), BUCKET_TEXT],
                &[
                    ("read", "read_bucket"),
                    ("write", "write_bucket"),
                    ("charge", "token_bucket_charge"),
                    ("adopted", "token_bucket_adopted"),
                    ("fresh_at", "token_bucket_fresh_at"),
                ],
            );
            (vec![twin("token_bucket.lua").to_owned(), others], include_str!("look_bucket.lua"))
        }
        Strategy::FixedWindow => (
            vec![twin("fixed_window.lua").to_owned(), WINDOW_TEXT.to_owned()],
            include_str!("look_window.lua"),
        ),
        Strategy::SlidingWindowCounter => {
            let others = on_demand(
                "others_of_counter",
                &[twin("sliding_window_counter_change.lua"), COUNTER_TEXT],
                &[
                    ("read", "read_counter"),
                    ("write", "write_counter"),
                    ("charge", "sliding_window_counter_charge"),
                    ("charged_at", "sliding_window_counter_charged_at"),
                    ("fresh_at", "sliding_window_counter_fresh_at"),
                ],
            );
            (vec![twin("sliding_window_counter.lua").to_owned(), others], include_str!("look_counter.lua"))
        }
        Strategy::SlidingWindow => {
            let others = on_demand(
                "others_of_log",
                &[
                    twin("entries.lua"),
                    twin("entries_settle.lua"),
                    twin("sliding_window.lua"),
                    ENTRIES,
                    LOG_TEXT,
                ],
                &[
                    ("read", "read_log"),
                    ("write", "write_log"),
                    ("take", "take_log"),
                    ("peek", "sliding_window_peek"),
                    ("fresh_at", "sliding_window_fresh_at"),
                ],
            );
            (vec![others], include_str!("look_log.lua"))
        }
        Strategy::Concurrency => {
            let others = on_demand(
                "others_of_leases",
                &[twin("entries.lua"), twin("concurrency.lua"), ENTRIES, LEASES_TEXT],
                &[("read", "read_leases"), ("take", "take_lease"), ("peek", "concurrency_peek")],
            );
            (vec![others], include_str!("look_leases.lua"))
        }
    };
    format!("{}\n{look}", texts.join("\n"))
}

/// Charges of parts of these strategies.
fn charging_script(strategies: &[Strategy]) -> Script {
    let holds = on_demand("others_of_hold", &[HOLD], &[("parse", "parse_hold"), ("answer", "answer_held")]);
    let texts: Vec<String> = strategies.iter().map(|strategy| charging_text(*strategy)).collect();
    let mut all = vec![
        CLOCK,
        KEEP,
        twin("whole.lua"),
        "local look, make, adopt, pack = {}, {}, {}, struct.pack",
        &holds,
    ];
    all.extend(texts.iter().map(String::as_str));
    all.push(include_str!("charge.lua"));
    joined(&all)
}

/// Charges of any number of parts, of whatever strategies.
pub(crate) static CHARGE: LazyLock<Script> = LazyLock::new(|| {
    charging_script(&[
        Strategy::TokenBucket,
        Strategy::FixedWindow,
        Strategy::SlidingWindow,
        Strategy::SlidingWindowCounter,
        Strategy::Concurrency,
    ])
});

/// The everyday charge: buckets whose state is whole microseconds, each key for itself.
pub(crate) static BUCKETS: LazyLock<Script> = LazyLock::new(|| {
    joined(&[
        twin("token_bucket.lua"),
        CLOCK,
        include_str!("charge_buckets.lua"),
        // Not reached by a charge that finds what it mostly does.
        twin("whole.lua"),
        twin("token_bucket_change.lua"),
        KEEP,
        BUCKET_TEXT,
        include_str!("charge_buckets_other.lua"),
    ])
});

// Charges of parts of one strategy: the same as [`CHARGE`] with nothing else in it.
static BUCKET: LazyLock<Script> = LazyLock::new(|| charging_script(&[Strategy::TokenBucket]));
static WINDOW: LazyLock<Script> = LazyLock::new(|| charging_script(&[Strategy::FixedWindow]));
static LOG: LazyLock<Script> = LazyLock::new(|| charging_script(&[Strategy::SlidingWindow]));
static COUNTER: LazyLock<Script> = LazyLock::new(|| charging_script(&[Strategy::SlidingWindowCounter]));
static LEASES: LazyLock<Script> = LazyLock::new(|| charging_script(&[Strategy::Concurrency]));

/// The script for a charge of these strategies.
pub(crate) fn charging(mut strategies: impl Iterator<Item = Strategy>) -> &'static Script {
    let first = strategies.next();
    let is_same = |other: Strategy| first == Some(other);
    match first {
        Some(first) if strategies.all(is_same) => match first {
            Strategy::TokenBucket | Strategy::LeakyBucket => &BUCKET,
            Strategy::FixedWindow => &WINDOW,
            Strategy::SlidingWindow => &LOG,
            Strategy::SlidingWindowCounter => &COUNTER,
            Strategy::Concurrency => &LEASES,
        },
        _ => &CHARGE,
    }
}

/// All twins and what keeps their states, for scripts that know every strategy.
fn all_texts() -> Vec<&'static str> {
    let mut all: Vec<&str> =
        LUA.iter().map(|(_, text)| *text).filter(|text| *text != twin("whole.lua")).collect();
    all.extend([BUCKET_TEXT, WINDOW_TEXT, COUNTER_TEXT, ENTRIES, LOG_TEXT, LEASES_TEXT, HOLD]);
    all
}

/// Settles and forgets.
pub(crate) static SETTLE: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = all_texts();
    texts.push(include_str!("settle.lua"));
    let others = on_demand("others_of_settlement", &texts, &[("settle", "settle_one")]);
    let (short, all) = (include_str!("short_settle.lua"), include_str!("settle_all.lua"));
    joined(&[CLOCK, short, KEEP, twin("whole.lua"), &others, all])
});

/// Refunds. A script of its own, so that no charge is the longer for it.
pub(crate) static REFUND: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = vec![CLOCK, KEEP, twin("whole.lua")];
    texts.extend(all_texts());
    texts.push(include_str!("refund.lua"));
    joined(&texts)
});

/// Remembers where the parts of a hold are, on a cluster.
pub(crate) static PLACE: LazyLock<Script> = LazyLock::new(|| joined(&[CLOCK, include_str!("place.lua")]));

/// All of them, to be loaded into a server that is new to us.
pub(crate) fn all() -> [&'static Script; 10] {
    [&CHARGE, &BUCKETS, &BUCKET, &WINDOW, &LOG, &COUNTER, &LEASES, &SETTLE, &REFUND, &PLACE]
}
