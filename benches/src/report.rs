//! What the reader sees: a table per scene as it is measured, bytes per key, the goals, and the same as JSON.
//!
//! Ratios are to governor as it comes, by medians of the same rounds: 2.0x is twice as fast. Nothing is measured or judged
//! here.

use serde_json::{Value, json};

use crate::contestant::{BASELINE, Entrant};
use crate::goals::{Goal, Grade};
use crate::harness::{Measurement, Plan, Quartiles};
use crate::machine::Facts;
use crate::memory::BytesPerKey;

/// All that a run found out.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) measurements: Vec<Measurement>,
    pub(crate) memory: Vec<BytesPerKey>,
}

impl Results {
    /// How many times faster than the baseline in the same cell. `None` where either has too few rounds to tell.
    pub(crate) fn speed_up(&self, measurement: &Measurement) -> Option<f64> {
        let baseline = self.measurements.iter().find(|other| {
            other.contestant == BASELINE
                && other.scene == measurement.scene
                && other.threads == measurement.threads
        });
        Some(baseline?.reported_median()? / measurement.reported_median()?)
    }

    /// How many times the bytes of the baseline at the same number of keys.
    pub(crate) fn share_of_bytes(&self, memory: &BytesPerKey) -> Option<f64> {
        let baseline =
            self.memory.iter().find(|other| other.contestant == BASELINE && other.keys == memory.keys);
        Some(memory.bytes / baseline?.bytes)
    }
}

/// The machine.
pub(crate) fn print_machine(facts: &Facts) {
    println!("{}, {} cache, {} cores, {}", facts.processor, facts.cache, facts.cores, facts.memory);
    println!("Linux {}, {}, load {}", facts.kernel, facts.compiler, facts.load);
}

/// The machine, the settings and who takes part.
pub(crate) fn print_head(facts: &Facts, plan: &Plan, entrants: &[&Entrant]) {
    print_machine(facts);
    println!("{} rounds of {} checks per thread, thread CPU time", plan.rounds, plan.slice);
    println!("ns per check: median (Q1–Q3); ratio: times faster than {BASELINE}\n");
    for entrant in entrants {
        println!("  {:<16} {}", entrant.name, entrant.about);
    }
    println!();
}

/// One scene: a row per contestant, a group of columns per number of threads.
pub(crate) fn print_scene(results: &Results, scene: &[Measurement]) {
    let Some(first) = scene.first() else { return };
    let mut threads: Vec<usize> = scene.iter().map(|measurement| measurement.threads).collect();
    threads.sort_unstable();
    threads.dedup();

    let mut head = vec![first.scene.name()];
    for n in &threads {
        head.extend([format!("{n}T ns (Q1–Q3)"), "ratio".into(), "rounds".into()]);
    }
    let mut rows = vec![head];
    let mut contestants: Vec<&str> = scene.iter().map(|measurement| measurement.contestant).collect();
    contestants.dedup();
    for contestant in contestants {
        let mut row = vec![contestant.to_string()];
        for measurement in scene.iter().filter(|measurement| measurement.contestant == contestant) {
            row.push(measurement.ns.map_or("–".into(), spell_quartiles));
            row.push(spell_ratio(results.speed_up(measurement)));
            row.push(spell_rounds(measurement));
        }
        rows.push(row);
    }
    print_table(&rows);
    for stray in scene.iter().filter(|measurement| measurement.astray > 0) {
        let (contestant, cell) = (stray.contestant, stray.scene.cell(stray.threads));
        println!(
            "WARNING {contestant} {cell}: {} of {} answers were not the regime's",
            stray.astray, stray.checks
        );
    }
    println!();
}

/// Bytes per key: a row per contestant, two columns per key set.
pub(crate) fn print_memory(results: &Results) {
    let Some(first) = results.memory.first() else { return };
    let sizes = results.memory.iter().filter(|memory| memory.contestant == first.contestant);
    let mut head = vec!["bytes per key".to_string()];
    head.extend(sizes.flat_map(|memory| [memory.keys.word(), format!("of {BASELINE}'s")]));
    let mut rows = vec![head];
    let contestants = results.memory.iter().filter(|memory| memory.keys == first.keys);
    for contestant in contestants.map(|memory| memory.contestant) {
        let mut row = vec![contestant.to_string()];
        for memory in results.memory.iter().filter(|memory| memory.contestant == contestant) {
            row.push(format!("{:.1}", memory.bytes));
            row.push(spell_ratio(results.share_of_bytes(memory)));
        }
        rows.push(row);
    }
    print_table(&rows);
    println!();
}

/// The goals, each with its grade.
pub(crate) fn print_goals(goals: &[Goal]) {
    let head = ["goal", "wanted", "measured", "grade", "beside it"].map(str::to_string).to_vec();
    let rows = goals.iter().map(|goal| {
        let grade = goal.grade().word().to_string();
        vec![
            goal.what.clone(),
            goal.wanted.to_string(),
            goal.wanted.spell(goal.measured),
            grade,
            goal.beside.clone(),
        ]
    });
    print_table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    let count = |grade| goals.iter().filter(|goal| goal.grade() == grade).count();
    let (reached, missed) = (count(Grade::Reached), count(Grade::Missed));
    println!("\n{reached} reached, {missed} missed, {} not measured", count(Grade::NotMeasured));
}

/// The same for other programs.
pub(crate) fn to_json(
    facts: &Facts,
    load_after: &str,
    plan: &Plan,
    results: &Results,
    goals: &[Goal],
) -> Value {
    let cells = results.measurements.iter().map(|measurement| {
        json!({
            "cell": measurement.scene.cell(measurement.threads),
            "contestant": measurement.contestant,
            "median_ns": measurement.ns.map(|ns| ns.median),
            "q1_ns": measurement.ns.map(|ns| ns.q1),
            "q3_ns": measurement.ns.map(|ns| ns.q3),
            "times_faster": results.speed_up(measurement),
            "rounds": measurement.rounds,
            "attempts": measurement.attempts,
            "checks": measurement.checks,
            "astray": measurement.astray,
        })
    });
    let memory = results.memory.iter().map(|memory| {
        json!({
            "contestant": memory.contestant,
            "keys": memory.keys.count,
            "bytes_per_key": memory.bytes,
            "share": results.share_of_bytes(memory),
        })
    });
    json!({
        "machine": machine_to_json(facts, load_after),
        "settings": { "rounds": plan.rounds, "slice": plan.slice, "baseline": BASELINE },
        "cells": cells.collect::<Vec<_>>(),
        "memory": memory.collect::<Vec<_>>(),
        "goals": goals_to_json(goals),
    })
}

/// The facts of the machine, with the load when all was done.
pub(crate) fn machine_to_json(facts: &Facts, load_after: &str) -> Value {
    json!({
        "processor": facts.processor,
        "cache": facts.cache,
        "cores": facts.cores,
        "memory": facts.memory,
        "kernel": facts.kernel,
        "compiler": facts.compiler,
        "load_before": facts.load,
        "load_after": load_after,
    })
}

/// The goals, each with its grade.
pub(crate) fn goals_to_json(goals: &[Goal]) -> Value {
    let goals = goals.iter().map(|goal| {
        json!({
            "goal": goal.what,
            "wanted": goal.wanted.to_string(),
            "measured": goal.measured,
            "grade": goal.grade().word(),
        })
    });
    goals.collect()
}

fn spell_quartiles(ns: Quartiles) -> String {
    let digits = if ns.median < 100.0 { 1 } else { 0 };
    format!("{:.digits$} ({:.0}–{:.0})", ns.median, ns.q1, ns.q3)
}

fn spell_rounds(measurement: &Measurement) -> String {
    if measurement.rounds == measurement.attempts {
        measurement.rounds.to_string()
    } else {
        format!("{} of {}", measurement.rounds, measurement.attempts)
    }
}

/// Two digits that mean something: `0.38x`, `6.6x`, `25x`.
pub(crate) fn spell_ratio(ratio: Option<f64>) -> String {
    match ratio {
        None => "–".into(),
        Some(ratio) if ratio < 2.0 => format!("{ratio:.2}x"),
        Some(ratio) if ratio < 20.0 => format!("{ratio:.1}x"),
        Some(ratio) => format!("{ratio:.0}x"),
    }
}

/// A Markdown table that also reads well in a terminal: the first column to the left, the others to the right.
pub(crate) fn print_table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::from("|");
        for (column, &width) in widths.iter().enumerate() {
            let cell = row.get(column).map_or("", String::as_str);
            line += &if column == 0 { format!(" {cell:<width$} |") } else { format!(" {cell:>width$} |") };
        }
        println!("{line}");
        if number == 0 {
            let rule = |(column, &width): (usize, &usize)| {
                if column == 0 {
                    format!("{:-<1$}", ":", width + 2)
                } else {
                    format!("{:->1$}", ":", width + 2)
                }
            };
            println!("|{}|", widths.iter().enumerate().map(rule).collect::<Vec<_>>().join("|"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_keep_two_digits_that_mean_something() {
        let spelled = [0.376, 1.25, 6.61, 25.4].map(|ratio| spell_ratio(Some(ratio)));
        assert_eq!(spelled, ["0.38x", "1.25x", "6.6x", "25x"]);
        assert_eq!(spell_ratio(None), "–");
    }
}
