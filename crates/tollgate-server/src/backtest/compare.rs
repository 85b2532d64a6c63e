//! Several policies side by side, on the same traffic: the numbers of each, limit by limit, and whose keys fare better or worse than under the first.

use std::io::{self, Write};

use super::html::Sources;
use super::report::{KEY, skipped};
use super::summary::{LimitTally, Summary};
use crate::figures::{counted, grouped, share, shortened};
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// One policy, replayed.
pub(super) struct Replayed {
    pub(super) summary: Summary,
    pub(super) sources: Sources,
    /// All keys that were denied, and how often, sorted by key. Only where there are several policies.
    denied: Vec<(String, u64)>,
}

/// How many keys are named that fare otherwise.
const NAMED: usize = 5;

/// Keys that are denied under one policy and not under another, those that were denied most first.
pub(super) struct OnlyHere<'a> {
    pub(super) keys: u64,
    pub(super) most: Vec<&'a str>,
}

impl Replayed {
    pub(super) fn new(summary: Summary, sources: Sources, mut denied: Vec<(String, u64)>) -> Replayed {
        denied.sort_unstable();
        Replayed { summary, sources, denied }
    }

    /// The keys that this policy denies and the other does not.
    pub(super) fn denied_only_here(&self, other: &Replayed) -> OnlyHere<'_> {
        let is_there = |key: &str| other.denied.binary_search_by(|(there, _)| (**there).cmp(key)).is_ok();
        let mut only: Vec<&(String, u64)> = self.denied.iter().filter(|(key, _)| !is_there(key)).collect();
        only.sort_by(|one, next| next.1.cmp(&one.1).then_with(|| one.0.cmp(&next.0)));
        OnlyHere { keys: only.len() as u64, most: only.iter().take(NAMED).map(|(key, _)| &**key).collect() }
    }
}

/// The rows of the comparison: a name, and what each policy has for it.
pub(super) fn rows(replayed: &[Replayed]) -> Vec<(String, Vec<String>)> {
    let of_all = |name: &str, value: &dyn Fn(&Summary) -> String| {
        (name.to_owned(), replayed.iter().map(|one| value(&one.summary)).collect::<Vec<String>>())
    };
    let part = |part: u64, whole: u64| format!("{} ({})", grouped(part), share(part, whole));
    let mut rows = vec![
        of_all("requests", &|summary| grouped(summary.requests)),
        of_all("keys", &|summary| grouped(summary.keys)),
        of_all("allowed", &|summary| grouped(summary.allowed)),
        of_all("denied", &|summary| part(summary.denied, summary.requests)),
        of_all("keys denied", &|summary| part(summary.denied_keys, summary.keys)),
    ];
    for (name, count) in [
        ("had to wait", (|summary| summary.delayed) as fn(&Summary) -> u64),
        ("shadow would deny", |summary| summary.would_deny),
        ("met no route", |summary| summary.unmet),
        ("bad lines", |summary| summary.skipped_lines),
    ] {
        if replayed.iter().any(|one| count(&one.summary) > 0) {
            rows.push(of_all(name, &|summary| grouped(count(summary))));
        }
    }
    let mut names: Vec<&str> = Vec::new();
    for limit in replayed.iter().flat_map(|one| &one.summary.limits) {
        if !names.contains(&&*limit.limit) {
            names.push(&limit.limit);
        }
    }
    for name in names {
        let found = |summary: &Summary| {
            let limit = summary.limits.iter().find(|limit| limit.limit == name);
            limit.map_or("-".to_owned(), in_words)
        };
        rows.push(of_all(name, &found));
    }
    rows
}

/// What a limit is and what it denied.
fn in_words(limit: &LimitTally) -> String {
    match limit.requests {
        0 => format!("{}: not met", limit.rule),
        requests => {
            format!("{}: {} denied ({})", limit.rule, grouped(limit.denied), share(limit.denied, requests))
        }
    }
}

/// The difference between a policy and the first, as sentences.
pub(super) fn differences(first: &Replayed, other: &Replayed) -> Vec<String> {
    let sentence = |only: &OnlyHere<'_>, what: &str| {
        let shown: Vec<String> = only.most.iter().map(|key| shortened(key, KEY)).collect();
        match only.keys {
            0 => format!("No key is {what}."),
            keys => {
                let more = keys - shown.len() as u64;
                let more = if more > 0 { format!(" and {} more", grouped(more)) } else { String::new() };
                let is = if keys == 1 { "is" } else { "are" };
                format!("{} {is} {what}: {}{more}", counted(keys, "key"), shown.join(", "))
            }
        }
    };
    vec![
        sentence(&other.denied_only_here(first), "newly denied"),
        sentence(&first.denied_only_here(other), "no longer denied"),
    ]
}

/// Prints all of it.
pub(super) fn print(replayed: &[Replayed], out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let names: Vec<&str> = replayed.iter().map(|one| one.sources.config.as_str()).collect();
    let columns: Vec<(&str, Side)> =
        std::iter::once("").chain(names.iter().copied()).map(|name| (name, Side::Left)).collect();
    let mut table = Table::new(&columns);
    for (name, values) in rows(replayed) {
        let cells = values.into_iter().map(Cell::from);
        table.row(std::iter::once(Cell::toned(Tone::Strong, name)).chain(cells));
    }
    table.print(out, ink, 0)?;
    if let [first, others @ ..] = replayed {
        for other in others {
            let heading = format!("{} beside {}", other.sources.config, first.sources.config);
            writeln!(out, "\n{}", ink.paint(Tone::Strong, heading))?;
            for line in differences(first, other) {
                writeln!(out, "{line}")?;
            }
        }
    }
    for one in replayed.iter().filter(|one| one.summary.skipped_lines > 0) {
        writeln!(out, "\n{}", ink.paint(Tone::Strong, &one.sources.config))?;
        skipped(&one.summary, out)?;
    }
    Ok(())
}
