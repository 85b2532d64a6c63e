//! What was measured of everybody, round by round.
//!
//! In a round everybody has one turn, and each round begins with the next one. Ratios are worked out within a round, between
//! turns that are seconds apart; the result is the quartiles over the rounds.

use std::time::Duration;

use super::load::Client;
use super::process::used;
use crate::harness::Quartiles;
use crate::machine::thread_cpu_time;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) turn: Duration,
    pub(crate) keys: usize,
}

/// Who takes part: a server, and connections that ask it one thing.
pub(crate) struct Contestant {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) client: Client,
    pub(crate) process: u32,
    /// How many checks a request has.
    pub(crate) checks: u32,
}

/// What one turn gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Checks a second by the clock on the wall.
    pub(crate) per_second: f64,
    /// CPU time of the server for one check, in µs.
    pub(crate) server_us: f64,
    /// Which share of the time the server and the client had their cores.
    pub(crate) server_share: f64,
    pub(crate) client_share: f64,
}

/// What one contestant did in all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// One for each round.
    pub(crate) samples: Vec<Sample>,
    pub(crate) requests: u64,
    pub(crate) astray: u64,
}

impl Cell {
    pub(crate) fn quartiles(&self, of: impl Fn(&Sample) -> f64) -> Option<Quartiles> {
        Quartiles::of(self.samples.iter().map(of).collect())
    }

    /// How many times what the other had in the same rounds.
    pub(crate) fn over(&self, other: &Cell, of: impl Fn(&Sample) -> f64) -> Option<Quartiles> {
        let ratios = self.samples.iter().zip(&other.samples).map(|(one, other)| of(one) / of(other));
        Quartiles::of(ratios.filter(|ratio| ratio.is_finite()).collect())
    }
}

/// The cell of this name.
pub(crate) fn find<'a>(cells: &'a [Cell], name: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.name == name)
}

/// Runs everybody in every round. Before the first all keys are asked for, because a key that is new costs more.
pub(crate) fn run(plan: &Plan, contestants: &mut [Contestant]) -> Result<Vec<Cell>, String> {
    let empty = |one: &Contestant| Cell {
        name: one.name,
        about: one.about,
        samples: Vec::new(),
        requests: 0,
        astray: 0,
    };
    let mut cells: Vec<Cell> = contestants.iter().map(empty).collect();
    let named = |name: &'static str| move |why: String| format!("{name}: {why}");
    for one in contestants.iter_mut() {
        one.client.run_through(2 * plan.keys / one.checks as usize).map_err(named(one.name))?;
    }
    for round in 0..plan.rounds {
        for turn in 0..contestants.len() {
            let number = (round + turn) % contestants.len();
            let (one, cell) = (&mut contestants[number], &mut cells[number]);
            one.client.run(plan.turn / 8).map_err(named(one.name))?;
            let (server_before, client_before) = (used(one.process), thread_cpu_time());
            let (heard, wall) = one.client.run(plan.turn).map_err(named(one.name))?;
            let server = used(one.process).saturating_sub(server_before).as_secs_f64();
            let client = thread_cpu_time().saturating_sub(client_before).as_secs_f64();
            let (checks, wall) = (heard.answers as f64 * f64::from(one.checks), wall.as_secs_f64());
            cell.samples.push(Sample {
                per_second: checks / wall,
                server_us: server * 1e6 / checks,
                server_share: server / wall,
                client_share: client / wall,
            });
            cell.requests += heard.answers;
            cell.astray += heard.astray;
        }
    }
    Ok(cells)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A cell whose rounds gave these rates, at these costs.
    pub(crate) fn cell(name: &'static str, rounds: &[(f64, f64)]) -> Cell {
        let sample = |&(per_second, server_us): &(f64, f64)| Sample {
            per_second,
            server_us,
            server_share: 1.0,
            client_share: 0.5,
        };
        Cell { name, about: "", samples: rounds.iter().map(sample).collect(), requests: 1, astray: 0 }
    }

    #[test]
    fn ratios_are_made_within_a_round() {
        // The machine was ten times slower in the second round.
        let one = cell("one", &[(20.0, 1.0), (2.0, 10.0), (22.0, 1.0)]);
        let other = cell("other", &[(10.0, 2.0), (1.0, 20.0), (2.0, 2.0)]);
        let ratio = |of: fn(&Sample) -> f64| one.over(&other, of).map(|ratio| ratio.median);
        assert_eq!(ratio(|sample| sample.per_second), Some(2.0));
        assert_eq!(ratio(|sample| sample.server_us), Some(0.5));
        assert_eq!(one.over(&cell("idle", &[]), |sample| sample.per_second), None);
    }
}
