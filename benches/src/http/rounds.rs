//! What was measured of everybody, round by round.
//!
//! In a round everybody has one turn, and each round begins with the next one. What a layer adds, and which share it leaves,
//! are worked out within a round, between turns that are seconds apart; the result is the quartiles over the rounds.

use std::time::Duration;

use super::contestant::Contestant;
use crate::harness::Quartiles;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    /// Over loopback.
    pub(crate) turn: Duration,
    /// Without a network.
    pub(crate) calls: usize,
}

impl Plan {
    /// Whose turn it is: the round, and the place of the contestant.
    pub(crate) fn turns(&self, contestants: usize) -> impl Iterator<Item = usize> + use<> {
        let rounds = self.rounds;
        (0..rounds).flat_map(move |round| (0..contestants).map(move |turn| (round + turn) % contestants))
    }
}

/// What one contestant did in all rounds. Of each there is one for a round, or none if it was not measured.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) name: &'static str,
    /// Requests a second.
    pub(crate) rates: Vec<f64>,
    /// CPU time of a request, in ns.
    pub(crate) cpu_ns: Vec<f64>,
    pub(crate) requests: u64,
    /// Those that were not answered as they should.
    pub(crate) astray: u64,
}

impl Cell {
    pub(crate) fn new(contestant: &Contestant) -> Cell {
        Cell { name: contestant.name, rates: Vec::new(), cpu_ns: Vec::new(), requests: 0, astray: 0 }
    }

    /// How many times as many requests as the other in the same rounds.
    pub(crate) fn over(&self, other: &Cell) -> Option<Quartiles> {
        Quartiles::of(self.rates.iter().zip(&other.rates).map(|(one, other)| one / other).collect())
    }

    /// How much more CPU time than the other in the same rounds.
    pub(crate) fn added_to(&self, other: &Cell) -> Option<Quartiles> {
        Quartiles::of(self.cpu_ns.iter().zip(&other.cpu_ns).map(|(one, other)| one - other).collect())
    }
}

/// The cell of this name.
pub(crate) fn find<'a>(cells: &'a [Cell], name: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.name == name)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A cell whose rounds gave these rates, at these costs.
    pub(crate) fn cell(name: &'static str, rates: &[f64], cpu_ns: &[f64]) -> Cell {
        Cell { name, rates: rates.to_vec(), cpu_ns: cpu_ns.to_vec(), requests: 1, astray: 0 }
    }

    #[test]
    fn everybody_has_a_turn_in_each_round_and_comes_first_in_turn() {
        let plan = Plan { rounds: 3, turn: Duration::ZERO, calls: 0 };
        assert_eq!(plan.turns(3).collect::<Vec<_>>(), [0, 1, 2, 1, 2, 0, 2, 0, 1]);
    }

    #[test]
    fn costs_and_shares_are_worked_out_within_a_round() {
        // The machine was ten times slower in the second round.
        let none = cell("none", &[100.0, 10.0, 100.0], &[50.0, 500.0, 50.0]);
        let ours = cell("ours", &[90.0, 9.0, 90.0], &[52.0, 520.0, 52.0]);
        assert_eq!(ours.over(&none).map(|share| share.median), Some(0.9));
        assert_eq!(ours.added_to(&none).map(|added| added.median), Some(2.0));
        assert_eq!(cell("idle", &[], &[]).over(&none), None);
    }
}
