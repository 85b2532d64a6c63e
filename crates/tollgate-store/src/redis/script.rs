//! The scripts: the kernel's twins, joined to what touches data. Their texts are constant; everything that callers send is in
//! KEYS and ARGV. Their hashes are computed, never written down.

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
const CHARGE_TEXT: &str = include_str!("charge.lua");
const BUCKET_TEXT: &str = include_str!("bucket.lua");
const WINDOW_TEXT: &str = include_str!("window.lua");
const COUNTER_TEXT: &str = include_str!("counter.lua");
const LOG_TEXT: &str = include_str!("log.lua");
const LEASES_TEXT: &str = include_str!("leases.lua");

/// All twins and what keeps their states, for scripts that know every strategy.
fn with_all(short: &[&str], texts: &[&str]) -> Script {
    let mut all = vec![CLOCK];
    all.extend(short);
    all.extend(LUA.iter().map(|(_, text)| *text));
    all.extend([KEEP, BUCKET_TEXT, WINDOW_TEXT, COUNTER_TEXT, ENTRIES, LOG_TEXT, LEASES_TEXT, HOLD]);
    all.extend(texts);
    joined(&all)
}

/// Charges of any number of parts, of whatever strategies.
pub(crate) static CHARGE: LazyLock<Script> = LazyLock::new(|| {
    let look = "local look = {look_bucket, look_bucket, look_window, look_log, look_counter, look_leases}";
    with_all(&[], &[look, CHARGE_TEXT])
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

/// Charges of parts of one strategy: the same as [`CHARGE`] with nothing else in it, because a server makes all the functions of a
/// script anew for every call.
fn of_one(short: &[&str], twins: &[&str], kept: &[&str], look: &str) -> Script {
    // What is common comes first, and returns before the rest is even defined.
    let mut texts = vec![CLOCK];
    texts.extend(short);
    texts.push(twin("whole.lua"));
    texts.extend(twins.iter().map(|name| twin(name)));
    texts.push(KEEP);
    texts.extend(kept);
    texts.extend([HOLD, look, CHARGE_TEXT]);
    joined(&texts)
}

static BUCKET: LazyLock<Script> = LazyLock::new(|| {
    let twins = ["token_bucket.lua", "token_bucket_change.lua"];
    of_one(&[], &twins, &[BUCKET_TEXT], "local look = {look_bucket, look_bucket}")
});

static WINDOW: LazyLock<Script> =
    LazyLock::new(|| of_one(&[], &["fixed_window.lua"], &[WINDOW_TEXT], "local look = {[3] = look_window}"));

static LOG: LazyLock<Script> = LazyLock::new(|| {
    let twins = ["entries.lua", "entries_settle.lua", "sliding_window.lua"];
    of_one(&[include_str!("short_log.lua")], &twins, &[ENTRIES, LOG_TEXT], "local look = {[4] = look_log}")
});

static COUNTER: LazyLock<Script> = LazyLock::new(|| {
    of_one(&[], &["sliding_window_counter.lua"], &[COUNTER_TEXT], "local look = {[5] = look_counter}")
});

static LEASES: LazyLock<Script> = LazyLock::new(|| {
    of_one(
        &[include_str!("short_leases.lua")],
        &["entries.lua", "concurrency.lua"],
        &[ENTRIES, LEASES_TEXT],
        "local look = {[6] = look_leases}",
    )
});

/// The script for a charge of these strategies.
pub(crate) fn charging(mut strategies: impl Iterator<Item = Strategy>) -> &'static Script {
    match (strategies.next(), strategies.next()) {
        (Some(Strategy::TokenBucket | Strategy::LeakyBucket), None) => &BUCKET,
        (Some(Strategy::FixedWindow), None) => &WINDOW,
        (Some(Strategy::SlidingWindow), None) => &LOG,
        (Some(Strategy::SlidingWindowCounter), None) => &COUNTER,
        (Some(Strategy::Concurrency), None) => &LEASES,
        _ => &CHARGE,
    }
}

/// Settles and forgets.
pub(crate) static SETTLE: LazyLock<Script> =
    LazyLock::new(|| with_all(&[include_str!("short_settle.lua")], &[include_str!("settle.lua")]));

/// Refunds. A script of its own, so that no charge is the longer for it.
pub(crate) static REFUND: LazyLock<Script> = LazyLock::new(|| with_all(&[], &[include_str!("refund.lua")]));

/// Remembers where the parts of a hold are, on a cluster.
pub(crate) static PLACE: LazyLock<Script> = LazyLock::new(|| joined(&[CLOCK, include_str!("place.lua")]));

/// All of them, to be loaded into a server that is new to us.
pub(crate) fn all() -> [&'static Script; 10] {
    [&CHARGE, &BUCKETS, &BUCKET, &WINDOW, &LOG, &COUNTER, &LEASES, &SETTLE, &REFUND, &PLACE]
}
