//! The scripts: the kernel's twins, joined to what touches data. Their texts are constant; everything that callers send is in
//! KEYS and ARGV. Their hashes are computed, never written down.
//!
//! A server makes all the functions of a script anew for every call. So what the common charge needs stands at the top, and what
//! only other states need stands in a function of its own, which defines it when it is first asked for ([`on_demand`]).

mod charging;

use std::sync::LazyLock;

use tollgate_kernel::LUA;

pub(crate) use self::charging::charging;

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

/// A script of these texts. Servers keep the text of a script, so comments and indents are left out.
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

/// A function `name`, which defines what these texts do when it is first called, and answers a table of it: pairs of a name in the table
/// and what it stands for.
fn on_demand(name: &str, texts: &[&str], table: &[(&str, &str)]) -> String {
    let fields: Vec<String> = table.iter().map(|(field, value)| format!("{field} = {value}")).collect();
    let (texts, fields) = (texts.join("\n"), fields.join(", "));
    format!(
        "local {name}_made\nlocal function {name}()\nif not {name}_made then\n{texts}\n{name}_made = {{{fields}}}\nend\nreturn {name}_made\nend\n"
    )
}

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

/// All that are in use, to be loaded into a server that is new to us.
pub(crate) fn all() -> Vec<&'static Script> {
    let mut all = charging::all();
    all.extend([&*BUCKETS, &*SETTLE, &*REFUND, &*PLACE]);
    all
}
