//! The charge scripts. A charge of up to four parts, or a hold of up to three, has a script for exactly its strategies:
//! straight-line code that is built from the texts in quick/, without lookups and without tables. If a quick text finds a state
//! that it does not handle, it ends with `break`, and charge_any.lua, which is in the same script and defined on demand, makes
//! the charge.
//!
//! A quick text has sections: `constants` reads the arguments of a part, `look` reads its state, `found` are the numbers of the
//! answer, `answer` is the same in the encoding of the answer, and `make` is the new state. If there is a section `change`, it
//! first tries to change the stored state in place, which costs a server less than a `SET` with an expiry, and sets `is_changed`.
//! `_N` in a name is replaced by the number of the part. `shape.rs` picks a script by [`charging`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::Strategy;

use super::{
    BUCKET_TEXT, CLOCK, COUNTER_TEXT, ENTRIES, HOLD, KEEP, LEASES_TEXT, LOG_TEXT, Script, WINDOW_TEXT,
    joined, on_demand, twin,
};

/// The strategies with their own quick text: a leaky bucket uses that of a token bucket.
const CHARGED_APART: [Strategy; 5] = [
    Strategy::TokenBucket,
    Strategy::FixedWindow,
    Strategy::SlidingWindow,
    Strategy::SlidingWindowCounter,
    Strategy::Concurrency,
];

/// The texts of a strategy in a charge script.
struct StrategyText {
    /// The twins that the fast path calls.
    twins: &'static [&'static str],
    /// The fast path: see quick/.
    quick: &'static str,
    /// The numbers of its strategies in the arguments.
    numbers: &'static [u8],
    /// The code for all other states, defined on demand by a function with this name.
    others: String,
    any: &'static str,
}

fn text_of(strategy: Strategy) -> StrategyText {
    match strategy {
        Strategy::TokenBucket | Strategy::LeakyBucket => StrategyText {
            twins: &["token_bucket.lua"],
            quick: include_str!("../quick/bucket.lua"),
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
            any: include_str!("../any_bucket.lua"),
        },
        Strategy::FixedWindow => StrategyText {
            twins: &["fixed_window.lua"],
            quick: include_str!("../quick/window.lua"),
            numbers: &[3],
            others: on_demand(
                "others_of_window",
                &[WINDOW_TEXT],
                &[("read", "read_window"), ("write", "write_window")],
            ),
            any: include_str!("../any_window.lua"),
        },
        Strategy::SlidingWindowCounter => StrategyText {
            twins: &["sliding_window_counter.lua"],
            quick: include_str!("../quick/counter.lua"),
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
            any: include_str!("../any_counter.lua"),
        },
        Strategy::SlidingWindow => StrategyText {
            twins: &[],
            quick: include_str!("../quick/log.lua"),
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
            any: include_str!("../any_log.lua"),
        },
        Strategy::Concurrency => StrategyText {
            twins: &[],
            quick: include_str!("../quick/leases.lua"),
            numbers: &[6],
            others: on_demand(
                "others_of_leases",
                &[twin("entries.lua"), twin("concurrency.lua"), ENTRIES, LEASES_TEXT],
                &[("read", "read_leases"), ("take", "take_lease"), ("peek", "concurrency_peek")],
            ),
            any: include_str!("../any_leases.lua"),
        },
    }
}

/// A section of a quick text, with the names of one part.
fn section(text: &str, name: &str, part: &str) -> String {
    let after = text.split_once(&format!("\n--- {name}\n")).map_or("", |(_, after)| after);
    let section = after.split_once("\n--- ").map_or(after, |(section, _)| section);
    section.trim_end().replace("_N", &format!("_{part}"))
}

/// The fast path of a strategy as a function, for charge_any.lua.
fn quick_function(parts: &StrategyText) -> String {
    let of = |name: &str| section(parts.quick, name, "p");
    let (constants, look, found, make) = (of("constants"), of("look"), of("found"), of("make"));
    let answer = of("answer");
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
part.answer = {answer}
part.counts_from_us, part.fresh_at_us, part.slack_us = counts_from_us_p, fresh_at_us_p, slack_us_p
part.make = function()
{make}
set_until(key_p, new_p, ms_p)
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

/// The loop over charges with parts of these strategies, in this order, up to the text of charge_each.lua.
fn quick_loop(strategies: &[Strategy]) -> String {
    let parts: Vec<StrategyText> = strategies.iter().map(|strategy| text_of(*strategy)).collect();
    let of = |name: &str| -> Vec<String> {
        let one =
            |(index, parts): (usize, &StrategyText)| section(parts.quick, name, &(index + 1).to_string());
        parts.iter().enumerate().map(one).collect()
    };
    let (constants, looks, changes, makes) = (of("constants"), of("look"), of("change"), of("make"));
    let found = of("found").join(", ");
    let answers = of("answer").join(" .. ");
    let list = |each: &dyn Fn(usize) -> String, between: &str| {
        (1..=parts.len()).map(each).collect::<Vec<_>>().join(between)
    };
    // `next_ms` is the ms after the present one of the server's clock: PTTL plus this is above an instant in ms iff the key expires
    // no earlier than the whole ms of that instant, which is what a `SET` would write. PTTL goes by a clock that may advance while
    // the script runs; then a key seems to expire earlier than it does, and its state is written with its expiry.
    let mut text = "local lasts_us = ttl_us
local next_ms = time[1] * 1000 + math.floor(time[2] / 1000) + 1
"
    .to_owned();
    for (index, constants) in constants.iter().enumerate() {
        let (n, at) = (index + 1, 4 + 10 * index);
        let _ = write!(
            text,
            "local at_{n}, shadow_{n}, cost_{n} = {at}, ARGV[{at} + 1] == '1', ARGV[{at} + 2] + 0
local held_{n}, not_held_{n} = '', ''
if is_hold then held_{n}, not_held_{n} = hold_part(at_{n}, true), hold_part(at_{n}, false) end
{constants}
"
        );
    }
    let head_first = match parts.is_empty() {
        true => "",
        false => "held_1, not_held_1 = head .. held_1, head .. not_held_1\n",
    };
    let _ = write!(
        text,
        "local head, until_ms = '', ''
if is_hold then
head, until_ms = hold_head(lasts_us), hold_ms(lasts_us)
{head_first}end
"
    );
    text.push_str(
        "local answers, has_written = {now_us}, false
for charge = 1, #keys / stride do
local before, answer, passed = stride * (charge - 1), nil, false
if is_hold then holder = ARGV[first_after + 2 + charge] end
repeat
",
    );
    if parts.is_empty() {
        text.push_str("until true\n");
        return text;
    }
    text.push_str(
        "if operation == 'peek' then break end
if is_hold and has_room == false then break end
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
    let is_any = list(&|n| format!("allowed_{n}"), " or ");
    let is_known = list(&|n| format!("value_{n}"), " and ");
    let is_alone = parts.len() == 1;
    let _ = write!(
        text,
        "local fits = {fits}
local holds = is_hold and fits and ({is_any} or operation == 'hold-part')
if is_hold and not holds and each('GET', keys[before + stride]) then break end
if fits and has_room ~= true and not ({is_known}) and (has_room == false or not {is_alone}) then break end
"
    );
    for n in 1..=parts.len() {
        let _ =
            writeln!(text, "if not (fits and allowed_{n}) and each('PTTL', key_{n}) == -1 then break end");
    }
    // Values that all charges of the call share are packed once.
    let parts_held = list(
        &|n| {
            format!(
                "(allowed_{n} and held_{n} or not_held_{n}) .. pack_hold(counts_from_us_{n} - now_us, sub(key_{n}, name_at){answer})",
                answer = if n == parts.len() { format!(", {found}") } else { String::new() },
            )
        },
        " .. ",
    );
    let _ = write!(
        text,
        "local found, is_begun = (fits and '\\1' or '\\0') .. {answers}, false
if holds then
local text = {parts_held}
-- Nothing is written where there is a hold of this name.
local reply = each('SET', keys[before + stride], text, 'NX', 'PXAT', until_ms)
if not reply or reply.err then break end
has_room, is_begun = has_room == nil or has_room, true
end
"
    );
    for (index, (change, make)) in changes.iter().zip(&makes).enumerate() {
        let n = index + 1;
        let write = format!(
            "{make}
if each('SET', key_{n}, new_{n}, 'PXAT', ms_{n}).err then
if is_begun then answer = {{ok = 'FAILED'}} end
break
end
"
        );
        let write = match change.is_empty() {
            true => write,
            // What is refused in place, for whatever reason, is tried again whole.
            false => format!("local is_changed = false\n{change}\nif not is_changed then\n{write}end\n"),
        };
        let _ = write!(
            text,
            "if fits and allowed_{n} then
{write}is_begun = true
end
"
        );
    }
    text.push_str(
        "if is_begun and has_room == nil then has_room = true end
answer, passed = found, fits
until true
",
    );
    text
}

/// The script for charges with parts of these strategies, in this order; an empty list is the general script.
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
    any.push(include_str!("../charge_any.lua").to_owned());
    let any: Vec<&str> = any.iter().map(String::as_str).collect();
    let any = on_demand("others_of_charge", &any, &[("charge", "charge_any")]);
    let mut texts = vec![CLOCK, KEEP, twin("whole.lua")];
    texts.extend(all.iter().flat_map(|parts| parts.twins).map(|name| twin(name)));
    let quick = quick_loop(strategies);
    texts.extend([include_str!("../charge.lua"), &any, &quick, include_str!("../charge_each.lua")]);
    joined(&texts)
}

/// The general script: any number of parts, any strategies.
static CHARGE: LazyLock<Script> = LazyLock::new(|| charging_script(&[]));

/// The most parts of a charge with its own script. Callers choose what is charged together, and a server stores every script, so
/// their number must be bounded.
const MOST_QUICK: usize = 4;

/// The same for a hold, whose parts are in any order.
const MOST_QUICK_HELD: usize = 3;

/// The scripts for charges of up to [`MOST_QUICK`] parts, by their strategies, built at first use.
static QUICK: LazyLock<Mutex<BTreeMap<Vec<u8>, &'static Script>>> = LazyLock::new(Mutex::default);

/// The script for a charge with parts of these strategies, in this order.
pub(crate) fn charging(strategies: impl Iterator<Item = Strategy>, is_hold: bool) -> &'static Script {
    let alike = |strategy| match strategy {
        Strategy::LeakyBucket => Strategy::TokenBucket,
        other => other,
    };
    let strategies: SmallVec<[Strategy; MOST_QUICK]> = strategies.map(alike).take(MOST_QUICK + 1).collect();
    let most = if is_hold { MOST_QUICK_HELD } else { MOST_QUICK };
    if strategies.is_empty() || strategies.len() > most {
        return &CHARGE;
    }
    let names: SmallVec<[u8; MOST_QUICK]> = strategies.iter().map(|strategy| *strategy as u8).collect();
    let mut scripts = QUICK.lock();
    if let Some(script) = scripts.get(&names[..]) {
        return script;
    }
    // There are at most 225 of them (155 of up to three parts, 70 of four in order); they live as long as the process.
    let script: &'static Script = Box::leak(Box::new(charging_script(&strategies)));
    scripts.insert(names.to_vec(), script);
    script
}

/// All scripts in use: those for one strategy, and those that were built since.
pub(super) fn all() -> Vec<&'static Script> {
    for strategy in CHARGED_APART {
        charging(std::iter::once(strategy), false);
    }
    let mut all: Vec<&'static Script> = vec![&CHARGE];
    all.extend(QUICK.lock().values());
    all
}
