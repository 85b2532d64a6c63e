//! The scripts: the kernel's twins, joined to what touches data. Their texts are constant; everything that callers send is in
//! KEYS and ARGV. Their hashes are computed, never written down.
//!
//! A server makes all the functions of a script anew for every call. So what the common charge needs stands at the top, and what
//! only other states need stands in a function of its own, which defines it when it is first asked for ([`on_demand`]).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use parking_lot::Mutex;
use smallvec::SmallVec;
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

/// The strategies that are charged each in a way of its own: a leaky bucket is charged as a token bucket is.
const CHARGED_APART: [Strategy; 5] = [
    Strategy::TokenBucket,
    Strategy::FixedWindow,
    Strategy::SlidingWindow,
    Strategy::SlidingWindowCounter,
    Strategy::Concurrency,
];

/// What a strategy has in a charging script.
struct StrategyText {
    /// The twins that the quick way asks.
    twins: &'static [&'static str],
    /// The quick way: see quick/.
    quick: &'static str,
    /// Which strategies it is for, by their numbers in the arguments.
    numbers: &'static [u8],
    /// What all states need, defined on demand: the function's name, texts, and what it answers.
    others: String,
    any: &'static str,
}

fn text_of(strategy: Strategy) -> StrategyText {
    match strategy {
        Strategy::TokenBucket | Strategy::LeakyBucket => StrategyText {
            twins: &["token_bucket.lua"],
            quick: include_str!("quick/bucket.lua"),
            numbers: &[1, 2],
            others: on_demand(
                "others_of_bucket",
                &[twin("token_bucket_change.lua"), BUCKET_TEXT],
                &[
                    ("read", "read_bucket"),
                    ("write", "write_bucket"),
                    ("charge", "token_bucket_charge"),
                    ("adopted", "token_bucket_adopted"),
                    ("fresh_at", "token_bucket_fresh_at"),
                ],
            ),
            any: include_str!("any_bucket.lua"),
        },
        Strategy::FixedWindow => StrategyText {
            twins: &["fixed_window.lua"],
            quick: include_str!("quick/window.lua"),
            numbers: &[3],
            others: on_demand(
                "others_of_window",
                &[WINDOW_TEXT],
                &[("read", "read_window"), ("write", "write_window")],
            ),
            any: include_str!("any_window.lua"),
        },
        Strategy::SlidingWindowCounter => StrategyText {
            twins: &["sliding_window_counter.lua"],
            quick: include_str!("quick/counter.lua"),
            numbers: &[5],
            others: on_demand(
                "others_of_counter",
                &[twin("sliding_window_counter_change.lua"), COUNTER_TEXT],
                &[
                    ("read", "read_counter"),
                    ("write", "write_counter"),
                    ("charge", "sliding_window_counter_charge"),
                    ("charged_at", "sliding_window_counter_charged_at"),
                    ("fresh_at", "sliding_window_counter_fresh_at"),
                ],
            ),
            any: include_str!("any_counter.lua"),
        },
        Strategy::SlidingWindow => StrategyText {
            twins: &[],
            quick: include_str!("quick/log.lua"),
            numbers: &[4],
            others: on_demand(
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
            ),
            any: include_str!("any_log.lua"),
        },
        Strategy::Concurrency => StrategyText {
            twins: &[],
            quick: include_str!("quick/leases.lua"),
            numbers: &[6],
            others: on_demand(
                "others_of_leases",
                &[twin("entries.lua"), twin("concurrency.lua"), ENTRIES, LEASES_TEXT],
                &[("read", "read_leases"), ("take", "take_lease"), ("peek", "concurrency_peek")],
            ),
            any: include_str!("any_leases.lua"),
        },
    }
}

/// A section of a text of quick/, with the names of one part.
fn section(text: &str, name: &str, part: &str) -> String {
    let after = text.split_once(&format!("\n--- {name}\n")).map_or("", |(_, after)| after);
    let section = after.split_once("\n--- ").map_or(after, |(section, _)| section);
    section.trim_end().replace("_N", &format!("_{part}"))
}

/// The quick way of a strategy as a function, for charge_any.lua.
fn quick_function(parts: &StrategyText) -> String {
    let of = |name: &str| section(parts.quick, name, "p");
    let (constants, look, found, make) = (of("constants"), of("look"), of("found"), of("make"));
    let places: Vec<String> =
        (1..=found.split(',').count()).map(|number| format!("part[{number}]")).collect();
    let places = places.join(", ");
    let function = format!(
        "function(at_p)
local cost_p, lasts_us = ARGV[at_p + 2] + 0, 0
{constants}
return function(part)
local key_p = part.key
local value_p = each('GET', key_p)
part.is_new = not value_p
repeat
{look}
{places} = {found}
part.counts_from_us, part.fresh_at_us, part.slack_us = counts_from_us_p, fresh_at_us_p, slack_us_p
part.make = function()
{make}
set(key_p, new_p, until_us_p, spare_us_p)
end
return allowed_p
until true
return look_any[part.strategy](part)
end
end"
    );
    let assign = |number: &u8| format!("quick[{number}] = {function}\n");
    parts.numbers.iter().map(assign).collect()
}

/// The loop over charges of parts of these strategies, in this order, up to where charge_each.lua goes on.
fn quick_loop(strategies: &[Strategy]) -> String {
    use std::fmt::Write;
    let parts: Vec<StrategyText> = strategies.iter().map(|strategy| text_of(*strategy)).collect();
    let of = |name: &str| -> Vec<String> {
        let one =
            |(index, parts): (usize, &StrategyText)| section(parts.quick, name, &(index + 1).to_string());
        parts.iter().enumerate().map(one).collect()
    };
    let (constants, looks, makes) = (of("constants"), of("look"), of("make"));
    let found = of("found").join(", ");
    let count = found.split(',').count() + 1;
    let (packed, said) = ("I7".repeat(count), "%d,".repeat(count));
    let list = |each: &dyn Fn(usize) -> String, between: &str| {
        (1..=parts.len()).map(each).collect::<Vec<_>>().join(between)
    };
    let mut text = "local lasts_us = ttl_us\n".to_owned();
    for (index, constants) in constants.iter().enumerate() {
        let (n, at) = (index + 1, 4 + 10 * index);
        let _ = write!(
            text,
            "local at_{n}, shadow_{n}, cost_{n} = {at}, ARGV[{at} + 1] == '1', ARGV[{at} + 2] + 0
local line_{n} = is_hold and hold_line({n}) or ''
{constants}
"
        );
    }
    text.push_str(
        "local answers, has_written = {now_us}, false
for charge = 1, #keys / stride do
local before, answer, passed = stride * (charge - 1), nil, false
if is_hold then holder = ARGV[first_after + 1 + charge] end
repeat
",
    );
    if parts.is_empty() {
        text.push_str("until true\n");
        return text;
    }
    text.push_str(
        "if operation == 'peek' then break end
if is_hold and (has_room == false or each('GET', keys[before + stride])) then break end
",
    );
    for (index, look) in looks.iter().enumerate() {
        let n = index + 1;
        let _ = write!(
            text,
            "local key_{n} = keys[before + {n}]\nlocal value_{n} = each('GET', key_{n})\n{look}\n"
        );
    }
    let fits = list(&|n| format!("(allowed_{n} or shadow_{n})"), " and ");
    let is_known = list(&|n| format!("value_{n}"), " and ");
    let is_alone = parts.len() == 1;
    let _ = write!(
        text,
        "local fits = {fits}
if fits and has_room ~= true and not ({is_known}) and (has_room == false or not {is_alone}) then break end
"
    );
    for n in 1..=parts.len() {
        let _ =
            writeln!(text, "if not (fits and allowed_{n}) and each('PTTL', key_{n}) == -1 then break end");
    }
    let lines = list(
        &|n| format!("(allowed_{n} and format(line_{n}, cost_{n}, counts_from_us_{n}, key_{n}) or '')"),
        " .. ",
    );
    let _ = write!(
        text,
        "local found, is_begun = pack('>{packed}', fits and 1 or 0, {found}), false
if fits and is_hold then
local lines = {lines}
if lines ~= '' or operation == 'hold-part' then
local said = format('{said}%d', now_us, 1, {found})
if each('SET', keys[before + stride], hold_head(said, lasts_us) .. lines .. hold_tail, 'PXAT', hold_ms(lasts_us)).err then break end
has_room, is_begun = has_room == nil or has_room, true
end
end
"
    );
    for (index, make) in makes.iter().enumerate() {
        let n = index + 1;
        let _ = write!(
            text,
            "if fits and allowed_{n} then
{make}
if put(key_{n}, new_{n}, until_us_{n}, spare_us_{n}) then
if is_begun then answer = {{ok = 'FAILED'}} end
break
end
is_begun = true
end
"
        );
    }
    text.push_str("answer, passed = found, fits\nuntil true\n");
    text
}

/// Charges of parts of these strategies, in this order; of none means of any.
fn charging_script(strategies: &[Strategy]) -> Script {
    let all: Vec<Strategy> = match strategies {
        [] => CHARGED_APART.to_vec(),
        some => CHARGED_APART.into_iter().filter(|strategy| some.contains(strategy)).collect(),
    };
    let all: Vec<StrategyText> = all.into_iter().map(text_of).collect();
    let holds = on_demand("others_of_hold", &[HOLD], &[("parse", "parse_hold"), ("answer", "answer_held")]);
    let mut any = vec!["local quick, look_any = {}, {}".to_owned(), holds];
    for parts in &all {
        any.extend([parts.others.clone(), parts.any.to_owned(), quick_function(parts)]);
    }
    any.push(include_str!("charge_any.lua").to_owned());
    let any: Vec<&str> = any.iter().map(String::as_str).collect();
    let any = on_demand("others_of_charge", &any, &[("charge", "charge_any")]);
    let mut texts = vec![CLOCK, KEEP, twin("whole.lua")];
    texts.extend(all.iter().flat_map(|parts| parts.twins).map(|name| twin(name)));
    let quick = quick_loop(strategies);
    texts.extend([include_str!("charge.lua"), &any, &quick, include_str!("charge_each.lua")]);
    joined(&texts)
}

/// Charges of any number of parts, of whatever strategies.
pub(crate) static CHARGE: LazyLock<Script> = LazyLock::new(|| charging_script(&[]));

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

/// How many parts a charge has at most whose script is written for just its strategies. Callers choose what is charged together, and a
/// server keeps every script that it was sent, so there must be an end to them.
const MOST_QUICK: usize = 3;

/// The scripts for charges of up to [`MOST_QUICK`] parts, by their strategies, as they are first asked for.
static QUICK: LazyLock<Mutex<BTreeMap<Vec<u8>, &'static Script>>> = LazyLock::new(Mutex::default);

/// The script for a charge of parts of these strategies, in this order.
pub(crate) fn charging(strategies: impl Iterator<Item = Strategy>) -> &'static Script {
    let alike = |strategy| match strategy {
        Strategy::LeakyBucket => Strategy::TokenBucket,
        other => other,
    };
    let strategies: SmallVec<[Strategy; MOST_QUICK]> = strategies.map(alike).take(MOST_QUICK + 1).collect();
    if strategies.is_empty() || strategies.len() > MOST_QUICK {
        return &CHARGE;
    }
    let names: SmallVec<[u8; MOST_QUICK]> = strategies.iter().map(|strategy| *strategy as u8).collect();
    let mut scripts = QUICK.lock();
    if let Some(script) = scripts.get(&names[..]) {
        return script;
    }
    // There are at most 155 of them, and they stay as long as the process does.
    let script: &'static Script = Box::leak(Box::new(charging_script(&strategies)));
    scripts.insert(names.to_vec(), script);
    script
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

/// All that are in use, to be loaded into a server that is new to us: those for one strategy, and those that were asked for since.
pub(crate) fn all() -> Vec<&'static Script> {
    for strategy in CHARGED_APART {
        charging(std::iter::once(strategy));
    }
    let mut all: Vec<&'static Script> = vec![&CHARGE, &BUCKETS, &SETTLE, &REFUND, &PLACE];
    all.extend(QUICK.lock().values());
    all
}
