//! The scripts: the kernel's twins, joined to what touches data. Their texts are constant; everything that callers send is in
//! KEYS and ARGV. Their hashes are computed, never written down.

use std::sync::LazyLock;

use tollgate_kernel::LUA;

/// A script: its text, and the hash by which a server knows it.
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) hash: String,
}

/// The twins, in the order in which they use each other.
fn twin(name: &str) -> &'static str {
    let found = LUA.iter().find(|(file, _)| *file == name);
    found.map(|(_, text)| *text).unwrap_or_else(|| unreachable!("the kernel has no {name}"))
}

const OTHERS: [&str; 5] = [
    "leaky_bucket.lua",
    "fixed_window.lua",
    "sliding_window.lua",
    "sliding_window_counter.lua",
    "concurrency.lua",
];

fn joined(texts: &[&str]) -> Script {
    let text = texts.join("\n");
    let hash = redis::Script::new(&text).get_hash().to_owned();
    Script { text, hash }
}

/// Charges. What the everyday charge needs comes first, and it returns before the rest is even defined.
pub(crate) static CHARGE: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = vec![twin("whole.lua"), twin("token_bucket.lua")];
    texts.extend([include_str!("clock.lua"), include_str!("charge_buckets.lua")]);
    texts.extend(OTHERS.map(twin));
    texts.extend([include_str!("state.lua"), include_str!("charge.lua")]);
    joined(&texts)
});

/// Settles and forgets.
pub(crate) static SETTLE: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = vec![twin("whole.lua"), twin("token_bucket.lua")];
    texts.extend(OTHERS.map(twin));
    texts.extend([include_str!("clock.lua"), include_str!("state.lua"), include_str!("settle.lua")]);
    joined(&texts)
});

/// Refunds. A script of its own, so that no charge is the longer for it.
pub(crate) static REFUND: LazyLock<Script> = LazyLock::new(|| {
    let mut texts = vec![twin("whole.lua"), twin("token_bucket.lua")];
    texts.extend(OTHERS.map(twin));
    texts.extend([include_str!("clock.lua"), include_str!("state.lua"), include_str!("refund.lua")]);
    joined(&texts)
});

/// Remembers where the parts of a hold are, on a cluster.
pub(crate) static PLACE: LazyLock<Script> =
    LazyLock::new(|| joined(&[include_str!("clock.lua"), include_str!("place.lua")]));

/// All of them, to be loaded into a server that is new to us.
pub(crate) fn all() -> [&'static Script; 4] {
    [&CHARGE, &SETTLE, &REFUND, &PLACE]
}
