//! What the reader sees of the server under load: a table for each protocol, and the same as JSON.

use serde_json::{Value, json};

use super::goals::{cpu, rate, ratio};
use super::rounds::{Cell, Plan};
use crate::goals::Goal;
use crate::harness::Quartiles;
use crate::machine::Facts;
use crate::report::{goals_to_json, machine_to_json, print_machine, print_table, spell_ratio};
use crate::stores::{quartiles_to_json, spell_rates};

/// The machine and the settings.
pub(crate) fn print_head(facts: &Facts, plan: &Plan) {
    print_machine(facts);
    println!(
        "{} rounds of {:?}, {} keys, servers on one core, the load on another",
        plan.rounds, plan.turn, plan.keys
    );
    println!(
        "checks/s by the wall clock, CPU of the server for a check: median (Q1–Q3); ratios within rounds: medians;\n\
         busy: which share of its core each side had\n"
    );
}

/// One protocol: a row for each cell, with its ratios to the first.
pub(crate) fn print_cells(title: &str, cells: &[Cell]) {
    let Some(first) = cells.first() else { return };
    let head = ["checks/s", "of the first", "server CPU µs", "of the first", "server busy", "client busy"];
    let mut rows = vec![std::iter::once(title).chain(head).map(str::to_string).collect::<Vec<_>>()];
    rows.extend(cells.iter().map(|cell| {
        let of_first = |of: fn(&super::rounds::Sample) -> f64| {
            spell_ratio(ratio(cells, cell.name, first.name, of).map(|ratio| ratio.median))
        };
        let share = |of: fn(&super::rounds::Sample) -> f64| {
            cell.quartiles(of).map_or("–".into(), |share| format!("{:.0} %", 100.0 * share.median))
        };
        vec![
            cell.name.to_string(),
            cell.quartiles(rate).map_or("–".into(), spell_rates),
            of_first(rate),
            cell.quartiles(cpu).map_or("–".into(), spell_micros),
            of_first(cpu),
            share(|sample| sample.server_share),
            share(|sample| sample.client_share),
        ]
    }));
    print_table(&rows);
    println!();
    for cell in cells {
        println!("  {:<28} {}", cell.name, cell.about);
    }
    println!();
    for stray in cells.iter().filter(|cell| cell.astray > 0) {
        println!(
            "WARNING {}: {} of {} requests were not answered as they should be\n",
            stray.name, stray.astray, stray.requests
        );
    }
}

fn spell_micros(us: Quartiles) -> String {
    format!("{:.2} ({:.2}–{:.2})", us.median, us.q1, us.q3)
}

/// The same for other programs.
pub(crate) fn to_json(facts: &Facts, load_after: &str, plan: &Plan, cells: &[Cell], goals: &[Goal]) -> Value {
    json!({
        "machine": machine_to_json(facts, load_after),
        "settings": { "rounds": plan.rounds, "turn_ms": plan.turn.as_secs_f64() * 1e3, "keys": plan.keys },
        "cells": cells.iter().map(cell_to_json).collect::<Value>(),
        "goals": goals_to_json(goals),
    })
}

fn cell_to_json(cell: &Cell) -> Value {
    json!({
        "cell": cell.name,
        "about": cell.about,
        "checks_per_second": cell.quartiles(rate).map(quartiles_to_json),
        "server_us": cell.quartiles(cpu).map(quartiles_to_json),
        "server_share": cell.quartiles(|sample| sample.server_share).map(quartiles_to_json),
        "client_share": cell.quartiles(|sample| sample.client_share).map(quartiles_to_json),
        "rounds": cell.samples.iter().map(|sample| json!([sample.per_second, sample.server_us])).collect::<Value>(),
        "requests": cell.requests,
        "astray": cell.astray,
    })
}
