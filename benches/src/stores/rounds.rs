//! How cells are measured: in rounds, everybody once in each, and each round begins with the next one.
//!
//! A turn is a warm-up of an eighth and then the part that counts: checks by the clock on the wall, and the CPU time that the
//! server and this process used for them. Ratios are made within a round, between turns that are seconds apart, and the result
//! is the quartiles over the rounds, so a slow minute of the machine is shared by all. Nothing here knows a store.

use std::io::IsTerminal;
use std::pin::Pin;
use std::time::Duration;

use super::cpu::{self, Server};
use super::load::{Caller, Keys, Tally, closed_loop};
use crate::harness::Quartiles;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) turn: Duration,
    /// How many keys are charged.
    pub(crate) keys: u32,
}

type Turn<'a> = Pin<Box<dyn Future<Output = Tally> + 'a>>;

type Prepared = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// Who takes part.
pub(crate) struct Contestant {
    pub(crate) name: &'static str,
    pub(crate) about: String,
    warms_up: bool,
    /// Before each turn, and not measured.
    prepare: Option<Box<dyn Fn() -> Prepared>>,
    run: Box<dyn Fn(Duration) -> Turn<'static>>,
}

impl Contestant {
    /// Some callers of a kind.
    pub(crate) fn new<C: Caller>(
        name: &'static str,
        about: impl Into<String>,
        callers: usize,
        keys: &Keys,
        make: impl Fn() -> C + 'static,
    ) -> Contestant {
        let keys = keys.clone();
        let run = move |duration| -> Turn<'static> {
            let (callers, keys) = ((0..callers).map(|_| make()).collect(), keys.clone());
            Box::pin(async move { closed_loop(callers, &keys, duration).await })
        };
        Contestant { name, about: about.into(), warms_up: true, prepare: None, run: Box::new(run) }
    }

    /// Does this before each turn: for a state that a turn would change.
    pub(crate) fn prepared<F>(self, prepare: impl Fn() -> F + 'static) -> Contestant
    where
        F: Future<Output = Result<(), String>> + 'static,
    {
        Contestant { prepare: Some(Box::new(move || Box::pin(prepare()))), ..self }
    }

    /// Another program, which brings its own callers and says how it went. It starts afresh in each turn.
    pub(crate) fn program(
        name: &'static str,
        about: impl Into<String>,
        run: impl Fn() -> Result<(u64, Duration), String> + 'static,
    ) -> Contestant {
        let run = move |_| -> Turn<'static> {
            let tally = match run() {
                Ok((checks, wall)) => Tally { checks, wall, ..Tally::default() },
                Err(failure) => Tally { failed: 1, failure: Some(failure), ..Tally::default() },
            };
            Box::pin(std::future::ready(tally))
        };
        Contestant { name, about: about.into(), warms_up: false, prepare: None, run: Box::new(run) }
    }
}

/// What one turn gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) per_second: f64,
    pub(crate) server_us: f64,
    pub(crate) client_us: f64,
}

/// What one contestant did in all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) name: &'static str,
    pub(crate) about: String,
    /// One for each round.
    pub(crate) samples: Vec<Sample>,
    /// Of the turns that count.
    pub(crate) tally: Tally,
    /// All checks, those of warm-ups too.
    pub(crate) asked: u64,
}

impl Cell {
    pub(crate) fn quartiles(&self, of: impl Fn(&Sample) -> f64) -> Option<Quartiles> {
        Quartiles::of(self.samples.iter().map(of).collect())
    }

    /// How many times as much as the other did in the same rounds.
    pub(crate) fn over(&self, other: &Cell) -> Option<Quartiles> {
        let ratios =
            self.samples.iter().zip(&other.samples).map(|(one, other)| one.per_second / other.per_second);
        Quartiles::of(ratios.filter(|ratio| ratio.is_finite()).collect())
    }
}

/// The cell of this name.
pub(crate) fn find<'a>(cells: &'a [Cell], name: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.name == name)
}

/// The median ratio of two cells, by name.
pub(crate) fn ratio(cells: &[Cell], name: &str, over: &str) -> Option<f64> {
    Some(find(cells, name)?.over(find(cells, over)?)?.median)
}

/// Runs everybody in every round.
pub(crate) async fn run(plan: &Plan, contestants: Vec<Contestant>, server: &Server<'_>) -> Vec<Cell> {
    let empty = |contestant: &Contestant| Cell {
        name: contestant.name,
        about: contestant.about.clone(),
        samples: Vec::new(),
        tally: Tally::default(),
        asked: 0,
    };
    let mut cells: Vec<Cell> = contestants.iter().map(empty).collect();
    for round in 0..plan.rounds {
        for turn in 0..contestants.len() {
            let number = (round + turn) % contestants.len();
            let (contestant, cell) = (&contestants[number], &mut cells[number]);
            if let Some(prepare) = &contestant.prepare
                && let Err(failure) = prepare().await
            {
                let failure = Some(format!("preparing the turn: {failure}"));
                cell.tally.join(Tally { failed: 1, failure, ..Tally::default() });
            }
            if contestant.warms_up {
                cell.asked += (contestant.run)(plan.turn / 8).await.checks;
            }
            let (server_before, client_before) = (server.used(), cpu::of_ourselves());
            let tally = (contestant.run)(plan.turn).await;
            let (server_after, client_after) = (server.used(), cpu::of_ourselves());
            let each_us = |from: Duration, to: Duration| {
                to.saturating_sub(from).as_secs_f64() * 1e6 / tally.checks.max(1) as f64
            };
            cell.samples.push(Sample {
                per_second: tally.checks as f64 / tally.wall.as_secs_f64().max(1e-9),
                server_us: each_us(server_before, server_after),
                client_us: each_us(client_before, client_after),
            });
            cell.asked += tally.checks;
            cell.tally.join(tally);
        }
        print_progress(round + 1, plan.rounds);
    }
    cells
}

/// For who looks on; nothing where the output is kept.
fn print_progress(done: usize, rounds: usize) {
    if std::io::stderr().is_terminal() {
        let end = if done == rounds { "\r                    \r" } else { "" };
        eprint!("\r{done} of {rounds} rounds{end}");
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A cell whose rounds gave these rates.
    pub(crate) fn cell(name: &'static str, rates: &[f64]) -> Cell {
        let sample = |&per_second| Sample { per_second, server_us: 1.0, client_us: 1.0 };
        let samples = rates.iter().map(sample).collect();
        Cell { name, about: String::new(), samples, tally: Tally::default(), asked: 100 }
    }

    #[test]
    fn ratios_are_made_within_a_round() {
        // The machine was ten times slower in the second round; the ratio of the medians would be 11.
        let cells = [cell("a", &[20.0, 2.0, 22.0]), cell("b", &[10.0, 1.0, 2.0]), cell("c", &[0.0])];
        assert_eq!(ratio(&cells, "a", "b"), Some(2.0));
        assert_eq!(ratio(&cells, "a", "c"), None);
        assert_eq!(ratio(&cells, "a", "d"), None);
    }
}
