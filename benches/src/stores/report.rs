//! What the reader sees of the stores: a table for each, latencies, bytes per key, and the same as JSON.

use serde_json::{Value, json};

use super::goals::{of_all, percentile};
use super::load::Tally;
use super::redis::{Bytes, Steady};
use super::rounds::{Cell, Plan, find};
use super::{Results, postgres, redis};
use crate::goals::Goal;
use crate::harness::Quartiles;
use crate::machine::Facts;
use crate::report::{goals_to_json, machine_to_json, print_machine, print_table, spell_ratio};

/// The machine and the settings.
pub(crate) fn print_head(facts: &Facts, plan: &Plan) {
    print_machine(facts);
    println!("{} rounds of {:?}, {} keys, client on one thread", plan.rounds, plan.turn, plan.keys);
    println!(
        "checks/s by the wall clock: median (Q1–Q3); CPU in µs per check: medians; ratios within rounds: medians\n"
    );
}

/// What Redis did.
pub(crate) fn print_redis(found: &redis::Found) {
    println!("Redis {}, 256 callers over one connection by default, each side on its core\n", found.version);
    print_cells(&found.cells, &[redis::INCR, redis::TEXTBOOK]);
    println!(
        "{}: the store was asked for one check in {:.0}\n",
        redis::DENIED_CACHED,
        1.0 / found.asked_share
    );
    print_latencies(&found.latencies);
    print_bytes(&found.bytes);
}

/// What PostgreSQL did.
pub(crate) fn print_postgres(found: &postgres::Found) {
    println!("PostgreSQL {}, 8 connections, synchronous_commit off but for what is held\n", found.version);
    print_cells(&found.cells, &[postgres::UPSERT, postgres::DURABLE_UPSERT]);
}

/// A row for each cell, with its ratios to the others named.
fn print_cells(cells: &[Cell], over: &[&str]) {
    let mut head = vec!["cell".to_string(), "checks/s (Q1–Q3)".into()];
    head.extend(over.iter().map(|name| format!("of {name}")));
    head.extend(["server µs".to_string(), "client µs".into()]);
    let mut rows = vec![head];
    for cell in cells {
        let mut row = vec![cell.name.to_string()];
        row.push(cell.quartiles(|sample| sample.per_second).map_or("–".into(), spell_rates));
        row.extend(over.iter().map(|name| {
            let ratio = find(cells, name).and_then(|other| cell.over(other));
            spell_ratio(ratio.map(|ratio| ratio.median))
        }));
        for used in [cell.quartiles(|sample| sample.server_us), cell.quartiles(|sample| sample.client_us)] {
            row.push(used.map_or("–".into(), |used| format!("{:.2}", used.median)));
        }
        rows.push(row);
    }
    print_table(&rows);
    println!();
    for cell in cells {
        println!("  {:<28} {}", cell.name, cell.about);
    }
    println!();
    cells.iter().for_each(|cell| warn(cell.name, &cell.tally));
}

fn print_latencies(latencies: &[Steady]) {
    let head = ["p50", "p95", "p99", "max", "p99 of all rounds", "made late: p99", "max"];
    let mut rows = vec![vec![format!("ms at {} checks/s", redis::STEADY)]];
    rows[0].extend(head.map(str::to_string));
    for steady in latencies {
        let mut row = vec![steady.name.to_string()];
        row.extend(
            [50.0, 95.0, 99.0].map(|percent| percentile(steady, percent).map_or("–".into(), spell_millis)),
        );
        row.push(format!("{:.2}", steady.all.max() as f64 / 1e3));
        row.push(format!("{:.2}", of_all(steady, 99.0)));
        row.push(format!("{:.2}", steady.late.value_at_percentile(99.0) as f64 / 1e3));
        row.push(format!("{:.2}", steady.late.max() as f64 / 1e3));
        rows.push(row);
    }
    print_table(&rows);
    println!();
    latencies.iter().for_each(|steady| warn(steady.name, &steady.tally));
}

fn print_bytes(bytes: &[Bytes]) {
    let head = ["bytes per key in Redis", "keys", "its state", "its holds", "memory grown"];
    let mut rows = vec![head.map(str::to_string).to_vec()];
    rows.extend(bytes.iter().map(|bytes| {
        let mut row = vec![bytes.what.clone(), bytes.keys.to_string()];
        row.extend([bytes.state, bytes.holds, bytes.grown].map(|bytes| format!("{bytes:.0}")));
        row
    }));
    print_table(&rows);
    println!();
}

/// Numbers of a cell in which not all went as it should mean little, and say so.
fn warn(name: &str, tally: &Tally) {
    if tally.astray > 0 {
        println!(
            "WARNING {name}: {} of {} checks were not answered as the cell says\n",
            tally.astray, tally.checks
        );
    }
    if let Some(failure) = &tally.failure {
        println!("WARNING {name}: {} calls failed, the first: {failure}\n", tally.failed);
    }
}

/// The same for other programs.
pub(crate) fn to_json(
    facts: &Facts,
    load_after: &str,
    plan: &Plan,
    results: &Results,
    goals: &[Goal],
) -> Value {
    json!({
        "machine": machine_to_json(facts, load_after),
        "settings": { "rounds": plan.rounds, "turn_ms": plan.turn.as_secs_f64() * 1e3, "keys": plan.keys },
        "redis": results.redis.as_ref().map(|found| json!({
            "version": found.version,
            "cells": found.cells.iter().map(|cell| cell_to_json(cell, &found.cells, redis::INCR)).collect::<Value>(),
            "store_calls_for_each_denied_check": found.asked_share,
            "latencies_ms": found.latencies.iter().map(steady_to_json).collect::<Value>(),
            "bytes_per_key": found.bytes.iter().map(bytes_to_json).collect::<Value>(),
        })),
        "postgres": results.postgres.as_ref().map(|found| json!({
            "version": found.version,
            "cells": found.cells.iter().map(|cell| cell_to_json(cell, &found.cells, postgres::UPSERT)).collect::<Value>(),
        })),
        "goals": goals_to_json(goals),
    })
}

fn cell_to_json(cell: &Cell, cells: &[Cell], ceiling: &str) -> Value {
    let of_ceiling = find(cells, ceiling).and_then(|ceiling| cell.over(ceiling));
    json!({
        "cell": cell.name,
        "about": cell.about,
        "checks_per_second": cell.quartiles(|sample| sample.per_second).map(quartiles_to_json),
        "of_ceiling": of_ceiling.map(quartiles_to_json),
        "server_us": cell.quartiles(|sample| sample.server_us).map(quartiles_to_json),
        "client_us": cell.quartiles(|sample| sample.client_us).map(quartiles_to_json),
        "checks": cell.tally.checks,
        "astray": cell.tally.astray,
        "failed": cell.tally.failed,
    })
}

fn steady_to_json(steady: &Steady) -> Value {
    let percentiles = |percent| percentile(steady, percent).map(quartiles_to_json);
    json!({
        "cell": steady.name,
        "p50": percentiles(50.0),
        "p95": percentiles(95.0),
        "p99": percentiles(99.0),
        "max": steady.all.max() as f64 / 1e3,
        "p99_of_all_rounds": of_all(steady, 99.0),
        "made_late_p99": steady.late.value_at_percentile(99.0) as f64 / 1e3,
        "made_late_max": steady.late.max() as f64 / 1e3,
        "checks": steady.tally.checks,
        "failed": steady.tally.failed,
    })
}

fn bytes_to_json(bytes: &Bytes) -> Value {
    let Bytes { what, keys, state, holds, grown } = bytes;
    json!({ "what": what, "keys": keys, "state": state, "holds": holds, "grown": grown })
}

pub(crate) fn quartiles_to_json(quartiles: Quartiles) -> Value {
    json!({ "q1": quartiles.q1, "median": quartiles.median, "q3": quartiles.q3 })
}

pub(crate) fn spell_rates(rates: Quartiles) -> String {
    format!("{} ({}–{})", spell_rate(rates.median), spell_rate(rates.q1), spell_rate(rates.q3))
}

/// Three digits that mean something: `950`, `3.46k`, `144k`, `1.20M`.
fn spell_rate(rate: f64) -> String {
    let (scaled, unit) = match rate {
        rate if rate >= 1e6 => (rate / 1e6, "M"),
        rate if rate >= 1e3 => (rate / 1e3, "k"),
        rate => (rate, ""),
    };
    match scaled {
        scaled if scaled < 10.0 && !unit.is_empty() => format!("{scaled:.2}{unit}"),
        scaled if scaled < 100.0 && !unit.is_empty() => format!("{scaled:.1}{unit}"),
        scaled => format!("{scaled:.0}{unit}"),
    }
}

fn spell_millis(millis: Quartiles) -> String {
    format!("{:.2} ({:.2}–{:.2})", millis.median, millis.q1, millis.q3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_keep_three_digits_that_mean_something() {
        let spelled = [950.0, 3_456.0, 12_345.0, 144_000.0, 1_204_000.0].map(spell_rate);
        assert_eq!(spelled, ["950", "3.46k", "12.3k", "144k", "1.20M"]);
    }
}
