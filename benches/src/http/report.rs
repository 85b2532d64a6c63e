//! What the reader sees of the layers: a table for each part, and the same as JSON.

use serde_json::{Value, json};

use super::Results;
use super::client::CONNECTIONS;
use super::contestant::{Contestant, GOVERNOR, KEYS, NONE};
use super::goals::{added_over, rate_over};
use super::rounds::{Cell, Plan, find};
use crate::goals::Goal;
use crate::harness::Quartiles;
use crate::machine::Facts;
use crate::report::{goals_to_json, machine_to_json, print_machine, print_table, spell_ratio};
use crate::stores::{quartiles_to_json, spell_rates};

/// The machine, the settings and who takes part.
pub(crate) fn print_head(facts: &Facts, plan: &Plan, contestants: &[Contestant]) {
    print_machine(facts);
    println!("{} rounds of {:?} over {CONNECTIONS} connections, {KEYS} keys", plan.rounds, plan.turn);
    println!(
        "and of {} calls without a network: median (Q1–Q3); added: to `{NONE}`, within rounds\n",
        plan.calls
    );
    for contestant in contestants {
        println!("  {:<26} {}", contestant.name, contestant.about);
    }
    println!();
}

/// Over loopback.
pub(crate) fn print_network(cells: &[Cell]) {
    let head = ["over loopback", "requests/s", "of none", "of tower_governor", "server CPU µs", "added µs"];
    let mut rows = vec![head.map(str::to_string).to_vec()];
    rows[0].push("of tower_governor's".into());
    rows.extend(cells.iter().map(|cell| {
        vec![
            cell.name.to_string(),
            spell(Quartiles::of(cell.rates.clone()), spell_rates),
            spell_ratio(rate_over(cells, cell.name, NONE)),
            spell_ratio(rate_over(cells, cell.name, GOVERNOR)),
            spell(Quartiles::of(cell.cpu_ns.clone()), spell_micros),
            spell(added(cells, cell), spell_micros),
            spell_ratio(added_over(cells, cell.name, GOVERNOR)),
        ]
    }));
    print_rows(&rows, cells);
}

/// Without a network.
pub(crate) fn print_direct(cells: &[Cell]) {
    let head = ["without a network", "ns a call", "added ns", "of tower_governor's"];
    let mut rows = vec![head.map(str::to_string).to_vec()];
    rows.extend(cells.iter().map(|cell| {
        vec![
            cell.name.to_string(),
            spell(Quartiles::of(cell.cpu_ns.clone()), spell_nanos),
            spell(added(cells, cell), spell_nanos),
            spell_ratio(added_over(cells, cell.name, GOVERNOR)),
        ]
    }));
    print_rows(&rows, cells);
}

fn print_rows(rows: &[Vec<String>], cells: &[Cell]) {
    print_table(rows);
    println!();
    for stray in cells.iter().filter(|cell| cell.astray > 0) {
        println!(
            "WARNING {}: {} of {} answers were not a 200 with the fields that it promises\n",
            stray.name, stray.astray, stray.requests
        );
    }
}

/// What a layer adds to none.
fn added(cells: &[Cell], cell: &Cell) -> Option<Quartiles> {
    let none = find(cells, NONE)?;
    if cell.name == NONE { None } else { cell.added_to(none) }
}

fn spell(quartiles: Option<Quartiles>, spell: fn(Quartiles) -> String) -> String {
    quartiles.map_or("–".into(), spell)
}

fn spell_micros(ns: Quartiles) -> String {
    format!("{:.2} ({:.2}–{:.2})", ns.median / 1e3, ns.q1 / 1e3, ns.q3 / 1e3)
}

fn spell_nanos(ns: Quartiles) -> String {
    format!("{:.0} ({:.0}–{:.0})", ns.median, ns.q1, ns.q3)
}

/// The same for other programs.
pub(crate) fn to_json(
    facts: &Facts,
    load_after: &str,
    plan: &Plan,
    results: &Results,
    goals: &[Goal],
) -> Value {
    let all = |cells: &[Cell]| cells.iter().map(|cell| cell_to_json(cells, cell)).collect::<Value>();
    json!({
        "machine": machine_to_json(facts, load_after),
        "settings": {
            "rounds": plan.rounds,
            "turn_ms": plan.turn.as_secs_f64() * 1e3,
            "calls": plan.calls,
            "connections": CONNECTIONS,
            "keys": KEYS,
        },
        "network": all(&results.network),
        "direct": all(&results.direct),
        "goals": goals_to_json(goals),
    })
}

fn cell_to_json(cells: &[Cell], cell: &Cell) -> Value {
    json!({
        "contestant": cell.name,
        "requests_per_second": Quartiles::of(cell.rates.clone()).map(quartiles_to_json),
        "cpu_ns": Quartiles::of(cell.cpu_ns.clone()).map(quartiles_to_json),
        "added_ns": added(cells, cell).map(quartiles_to_json),
        "rate_over_none": rate_over(cells, cell.name, NONE),
        "rate_over_tower_governor": rate_over(cells, cell.name, GOVERNOR),
        "added_over_tower_governor": added_over(cells, cell.name, GOVERNOR),
        "requests": cell.requests,
        "astray": cell.astray,
    })
}
