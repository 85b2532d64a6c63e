//! The Lua scripts: the kernel's twins, joined with the texts that read and write Redis.
//!
//! The texts are constant; everything that comes from callers is in KEYS and ARGV. The hashes are computed, never written down.
//! `script/charging.rs` builds the charge scripts; all others are here. No limiter arithmetic is in these texts except in the
//! twins.
//!
//! A server creates all functions of a script anew for every call. So the code of the common charge is at the top, and the code
//! for rare states is inside a function that defines it at its first call ([`on_demand`]).

mod charging;

use std::sync::LazyLock;

use tollgate_kernel::LUA;

pub(crate) use self::charging::charging;

/// A script: its text, and the hash for EVALSHA.
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) hash: String,
}

/// The twin with this file name.
fn twin(name: &str) -> &'static str {
    let found = LUA.iter().find(|(file, _)| *file == name);
    found.map(|(_, text)| *text).unwrap_or_else(|| unreachable!("the kernel has no {name}"))
}

/// Joins texts to a script. Servers store the text of a script, so comments and indentation are removed.
fn joined(texts: &[&str]) -> Script {
    let lines = texts.iter().flat_map(|text| text.lines()).map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with("--")).collect();
    let text = lines.join("\n");
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

/// The Lua text of a function `name` that runs these texts at its first call and returns a table of their definitions: pairs of a
/// field and its value.
fn on_demand(name: &str, texts: &[&str], table: &[(&str, &str)]) -> String {
    let fields: Vec<String> = table.iter().map(|(field, value)| format!("{field} = {value}")).collect();
    let (texts, fields) = (texts.join("\n"), fields.join(", "));
    format!(
        "local {name}_made\nlocal function {name}()\nif not {name}_made then\n{texts}\n{name}_made = {{{fields}}}\nend\nreturn {name}_made\nend\n"
    )
}

/// The common charge: buckets whose state is whole microseconds, each key separately.
pub(crate) static BUCKETS: LazyLock<Script> = LazyLock::new(|| {
    joined(&[
        twin("token_bucket.lua"),
        CLOCK,
        include_str!("charge_buckets.lua"),
        // The common charge does not reach the rest.
        twin("whole.lua"),
        twin("token_bucket_change.lua"),
        KEEP,
        BUCKET_TEXT,
        include_str!("charge_buckets_other.lua"),
    ])
});

/// All twins and the texts that read and write their states, for scripts of every strategy.
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

/// Refunds. A separate script, so that the charge scripts stay short.
pub(crate) static REFUND: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = vec![CLOCK, KEEP, twin("whole.lua")];
    texts.extend(all_texts());
    texts.push(include_str!("refund.lua"));
    joined(&texts)
});

/// Stores where the parts of a hold are, on a cluster.
pub(crate) static PLACE: LazyLock<Script> = LazyLock::new(|| joined(&[CLOCK, include_str!("place.lua")]));

/// Stores records; sent with EVAL (`records.rs`), so it is not loaded.
pub(crate) static RECORDS: LazyLock<Script> = LazyLock::new(|| joined(&[CLOCK, include_str!("records.lua")]));

/// All scripts in use, to be loaded into a new server.
pub(crate) fn all() -> Vec<&'static Script> {
    let mut all = charging::all();
    all.extend([&*BUCKETS, &*SETTLE, &*REFUND, &*PLACE]);
    all
}
