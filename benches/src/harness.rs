//! How a scene is measured.
//!
//! All contestants are prepared and alive at once. A round gives each of them the same freshly drawn keys, first on one
//! thread, then on two, and the next round starts with the next contestant, so that a slow minute of the machine is shared by
//! all. A slice is some 64 thousand checks after a warm-up of an eighth; its cost is the CPU time of its threads divided by
//! their checks. With two threads, each on its own core, a round counts only if both had at least 85 % of their core: a
//! thread that waited did not contend. The result is the quartiles over the rounds, never a mean.
//!
//! Every slice is also held to its regime: all allowed, or all denied. Numbers go from here to `report.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::contestant::{Contestant, Entrant, Regime};
use crate::machine::{Core, pin_to, thread_cpu_time};
use crate::scene::{Group, Scene};
use crate::workload::Stream;

/// The share of its core that each of two threads must have had for a round to count.
const LEAST_SHARE: f64 = 0.85;

/// Rounds are repeated up to this many times the wanted number, to replace those that did not count.
const MOST_ATTEMPTS: usize = 3;

/// With fewer rounds than this a median stands in the table, but no ratio is made of it.
const FEWEST_ROUNDS: usize = 3;

/// How long a thread waits at the start for the other.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// How long and on what to measure.
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    /// Checks per thread in a round.
    pub(crate) slice: usize,
    pub(crate) cores: Vec<Core>,
}

/// The quartiles of ns per check over the rounds that counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quartiles {
    pub(crate) q1: f64,
    pub(crate) median: f64,
    pub(crate) q3: f64,
}

impl Quartiles {
    /// Between samples, a straight line. `None` without samples.
    pub(crate) fn of(mut samples: Vec<f64>) -> Option<Quartiles> {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().checked_sub(1)?;
        let at = |quarters: usize| {
            let (whole, part) = (quarters * last / 4, (quarters * last % 4) as f64 / 4.0);
            samples[whole] + (samples[(whole + 1).min(last)] - samples[whole]) * part
        };
        Some(Quartiles { q1: at(1), median: at(2), q3: at(3) })
    }
}

/// What one contestant did in one cell.
pub(crate) struct Measurement {
    pub(crate) scene: Scene,
    pub(crate) threads: usize,
    pub(crate) contestant: &'static str,
    /// `None` if no round counted.
    pub(crate) ns: Option<Quartiles>,
    /// Rounds that counted, of those that were run.
    pub(crate) rounds: usize,
    pub(crate) attempts: usize,
    /// Checks that were not answered as the regime says, of all that were measured.
    pub(crate) astray: usize,
    pub(crate) checks: usize,
}

impl Measurement {
    /// The median, if there are enough rounds to build a ratio on it.
    pub(crate) fn reported_median(&self) -> Option<f64> {
        self.ns.filter(|_| self.rounds >= FEWEST_ROUNDS).map(|ns| ns.median)
    }
}

/// An entrant, built and filled.
pub(crate) struct Prepared {
    entrant: &'static Entrant,
    contestant: Box<dyn Contestant>,
}

/// Builds and fills everyone who takes part in a scene of this group.
pub(crate) fn prepare(group: &Group, entrants: &[&'static Entrant]) -> Vec<Prepared> {
    let takes_part =
        |entrant: &Entrant| group.scenes.iter().any(|(scene, _)| entrant.calls.contains(&scene.call));
    let build = |entrant: &'static Entrant| {
        let contestant = (entrant.build)(group.regime);
        contestant.prepare(group.keys);
        Prepared { entrant, contestant }
    };
    entrants.iter().filter(|entrant| takes_part(entrant)).map(|&entrant| build(entrant)).collect()
}

/// Measures one scene with each of the numbers of threads.
pub(crate) fn run_scene(
    plan: &Plan,
    scene: Scene,
    threads: &[usize],
    prepared: &[Prepared],
) -> Vec<Measurement> {
    let mut lanes: Vec<Vec<Lane<'_>>> = prepared
        .iter()
        .filter(|prepared| prepared.entrant.calls.contains(&scene.call))
        .map(|prepared| threads.iter().map(|&threads| Lane::new(prepared, threads)).collect())
        .collect();
    let streams = threads.iter().max().copied().unwrap_or(0) as u64;
    let mut streams: Vec<Stream> =
        (0..streams).map(|thread| Stream::new(scene.keys, scene.spread, plan.slice, thread)).collect();

    for round in 0..plan.rounds * MOST_ATTEMPTS {
        if round >= plan.rounds && !is_worth_another(plan.rounds, &lanes) {
            break;
        }
        refill(&mut streams, &plan.cores);
        for turn in 0..lanes.len() {
            let contestant = (round + turn) % lanes.len();
            for lane in &mut lanes[contestant] {
                lane.run_round(plan, scene, &streams);
            }
        }
    }
    lanes.into_iter().flatten().map(|lane| lane.finish(scene)).collect()
}

/// Draws the keys of a round, each stream on the core that will read it: the first one in a round would otherwise
/// fetch the texts from another core's cache.
fn refill(streams: &mut [Stream], cores: &[Core]) {
    std::thread::scope(|scope| {
        for (stream, &core) in std::iter::zip(streams, cores) {
            scope.spawn(move || {
                pin_to(core);
                stream.refill();
            });
        }
    });
}

/// One contestant on one number of threads.
struct Lane<'a> {
    prepared: &'a Prepared,
    threads: usize,
    samples: Vec<f64>,
    attempts: usize,
    astray: usize,
    checks: usize,
}

impl<'a> Lane<'a> {
    fn new(prepared: &'a Prepared, threads: usize) -> Lane<'a> {
        Lane { prepared, threads, samples: Vec::new(), attempts: 0, astray: 0, checks: 0 }
    }

    fn run_round(&mut self, plan: &Plan, scene: Scene, streams: &[Stream]) {
        let (contestant, start) = (&*self.prepared.contestant, &StartLine::new(self.threads));
        let slices: Vec<Slice> = std::thread::scope(|scope| {
            let runners: Vec<_> = std::iter::zip(&streams[..self.threads], &plan.cores)
                .map(|(stream, &core)| scope.spawn(move || run_slice(contestant, scene, stream, core, start)))
                .collect();
            runners.into_iter().map(|runner| runner.join().expect("a contestant does not panic")).collect()
        });

        let checks = plan.slice * self.threads;
        let allowed: usize = slices.iter().map(|slice| slice.allowed).sum();
        self.attempts += 1;
        self.checks += checks;
        self.astray += match scene.regime {
            Regime::Allow => checks - allowed,
            Regime::Deny => allowed,
        };
        if self.threads == 1 || slices.iter().all(|slice| slice.share_of_core() >= LEAST_SHARE) {
            let cpu: Duration = slices.iter().map(|slice| slice.cpu).sum();
            self.samples.push(cpu.as_nanos() as f64 / checks as f64);
        }
    }

    fn finish(self, scene: Scene) -> Measurement {
        Measurement {
            scene,
            threads: self.threads,
            contestant: self.prepared.entrant.name,
            rounds: self.samples.len(),
            ns: Quartiles::of(self.samples),
            attempts: self.attempts,
            astray: self.astray,
            checks: self.checks,
        }
    }
}

/// Whether someone is short of rounds because the machine was busy. Who is short while others are not blocks by design, and
/// more rounds do not help.
fn is_worth_another(rounds: usize, lanes: &[Vec<Lane<'_>>]) -> bool {
    lanes.iter().flatten().any(|lane| {
        let rivals = lanes.iter().flatten().filter(|rival| rival.threads == lane.threads);
        let best = rivals.map(|rival| rival.samples.len()).max().unwrap_or(0);
        lane.samples.len() < rounds && lane.samples.len() * 4 >= best
    })
}

/// What one thread used for its slice.
struct Slice {
    cpu: Duration,
    wall: Duration,
    allowed: usize,
}

impl Slice {
    fn share_of_core(&self) -> f64 {
        self.cpu.as_secs_f64() / self.wall.as_secs_f64()
    }
}

fn run_slice(
    contestant: &dyn Contestant,
    scene: Scene,
    stream: &Stream,
    core: Core,
    start: &StartLine,
) -> Slice {
    pin_to(core);
    scene.call.run(contestant, stream.warm_up());
    start.wait();
    let (wall, cpu) = (Instant::now(), thread_cpu_time());
    let allowed = scene.call.run(contestant, stream.measured());
    Slice { cpu: thread_cpu_time() - cpu, wall: wall.elapsed(), allowed }
}

/// Lets the threads of a round start together. It spins, because waking a sleeper takes a good part of a short slice; and not
/// for ever, because a partner that panicked never comes.
struct StartLine {
    missing: AtomicUsize,
}

impl StartLine {
    fn new(threads: usize) -> StartLine {
        StartLine { missing: AtomicUsize::new(threads) }
    }

    fn wait(&self) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        let deadline = Instant::now() + LONGEST_WAIT;
        while self.missing.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_on_or_between_samples() {
        let check = |samples: &[f64], q1, median, q3| {
            assert_eq!(Quartiles::of(samples.to_vec()), Some(Quartiles { q1, median, q3 }));
        };
        check(&[5.0], 5.0, 5.0, 5.0);
        check(&[3.0, 1.0, 2.0, 5.0, 4.0], 2.0, 3.0, 4.0);
        check(&[4.0, 1.0, 2.0, 3.0], 1.75, 2.5, 3.25);
        assert_eq!(Quartiles::of(Vec::new()), None);
    }
}
