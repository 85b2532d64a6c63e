//! `hostile`: how long honest clients wait while others attack.
//!
//! A real `tollgate serve` for each attack, and beside it one client of each face that asks a thousand
//! times a second at most. The attackers run on the same cores, so what is shown is the server's share and theirs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use hdrhistogram::Histogram;

use tollgate_testkit::hostile::{ATTACKS, Answered, CLIENTS, Client, Faces};
use tollgate_testkit::tollgate::Tollgate;

use crate::goals::{Goal, Strict, Wanted, strictly};
use crate::machine::Facts;
use crate::report::print_goals;
use crate::server;

/// What nobody honest should wait for longer, but one in a hundred times.
const GOAL: Duration = Duration::from_millis(50);

/// How long an honest client rests between two requests.
const REST: Duration = Duration::from_millis(1);

const POLICY: &str = "[server]\nlog = 'off'\n\
    [limits.free]\nstrategy = 'fixed_window'\nlimit = 1_000_000_000\nwindow = '1d'\n\
    [[envoy]]\ndomain = 'edge'\nentries = ['free']\nlimit = 'free'\n\
    [llm]\nmemory_mib = 32\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://127.0.0.1:9/v1'\napi_key = 'x'\n";

#[derive(Args)]
pub(crate) struct Options {
    /// How long each attack is kept up, at least, in seconds
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Attacks whose names have this in them
    #[arg(long, value_name = "WORD")]
    only: Option<String>,
}

/// The most memory that a server ever had resident, in MiB.
fn peak(server: &Tollgate) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? / 1024)
}

/// Runs the command.
pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let program = server::build_tollgate()?;
    let Facts { processor, cores, kernel, load, .. } = Facts::read();
    println!("{processor}, {cores} cores, Linux {kernel}, load {load}\n");
    println!(
        "Honest clients beside attackers on the same cores: p99 of each face in ms, goal {} ms.\n",
        GOAL.as_millis()
    );
    println!("| attack | HTTP | RESP | gRPC | asked | peak MiB |");
    println!("|---|--:|--:|--:|--:|--:|");
    let mut goals = Vec::new();
    let time = Duration::from_secs(options.seconds);
    let nobody: (&str, fn(&Faces)) = ("nobody attacks", |_| std::thread::sleep(Duration::from_secs(1)));
    for (name, attack) in
        std::iter::once(nobody).chain(ATTACKS.iter().map(|attack| (attack.name, attack.run)))
    {
        if options.only.as_ref().is_none_or(|word| name.contains(word.as_str())) {
            goals.push(measure(&program, name, attack, time)?);
        }
    }
    println!();
    print_goals(&goals);
    strictly(Strict::of(is_strict, options.only.is_some()), &goals)
}

fn measure(program: &Path, name: &str, attack: fn(&Faces), time: Duration) -> Result<Goal, String> {
    let server = Tollgate::builder(program).config(POLICY).start();
    let faces = Faces { http: server.http(), resp: server.resp(), grpc: server.grpc() };
    let is_over = AtomicBool::new(false);
    let waits = std::thread::scope(|scope| {
        let honest = CLIENTS.map(|(face, make)| {
            let (faces, is_over) = (&faces, &is_over);
            scope.spawn(move || honest(make(faces, "free", "user:honest").as_mut(), is_over, face))
        });
        let start = Instant::now();
        while start.elapsed() < time {
            attack(&faces);
        }
        is_over.store(true, Ordering::Relaxed);
        honest.map(|client| client.join().map_err(|_| "a client failed".to_owned()).and_then(|waits| waits))
    });
    let mut waited = Vec::new();
    for waits in waits {
        waited.push(waits?);
    }
    let shown: Vec<String> = waited.iter().map(|waits| format!("{:.1}", p99(waits))).collect();
    let asked: u64 = waited.iter().map(Histogram::len).sum();
    let peak = peak(&server).map_or_else(|| "?".to_owned(), |peak| peak.to_string());
    println!("| {name} | {} | {asked} | {peak} |", shown.join(" | "));
    Ok(judge(name, &waited))
}

/// In milliseconds.
fn p99(waits: &Histogram<u64>) -> f64 {
    Duration::from_micros(waits.value_at_quantile(0.99)).as_secs_f64() * 1e3
}

/// The face that has its clients wait longest is judged; one that was never answered is not measured.
fn judge(name: &str, waited: &[Histogram<u64>]) -> Goal {
    let is_measured = waited.iter().all(|waits| !waits.is_empty());
    Goal {
        what: format!("honest clients while: {name}, p99"),
        wanted: Wanted::AtMostMillis(GOAL.as_secs_f64() * 1e3),
        measured: waited.iter().map(p99).max_by(f64::total_cmp).filter(|_| is_measured),
        beside: String::new(),
    }
}

/// For waits of up to ten minutes, in microseconds. `saturating_record` makes no room for longer ones.
fn waits() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 600_000_000, 3).expect("bounds that a histogram takes")
}

fn record(waits: &mut Histogram<u64>, wait: Duration) {
    waits.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
}

/// Asks until it is over; how long each answer took, in microseconds.
fn honest(client: &mut dyn Client, is_over: &AtomicBool, face: &str) -> Result<Histogram<u64>, String> {
    let mut waits = waits();
    while !is_over.load(Ordering::Relaxed) {
        let start = Instant::now();
        match client.charge() {
            Ok(Answered::Allowed) => {}
            other => return Err(format!("{face}: {other:?} after {} answers", waits.len())),
        }
        record(&mut waits, start.elapsed());
        std::thread::sleep(REST);
    }
    Ok(waits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Grade;

    /// Waits of more than two milliseconds were counted as two microseconds, so that no attack could miss the goal.
    #[test]
    fn a_long_wait_is_counted_as_one() {
        let mut waits = waits();
        for wait in [1, 3, 80, 700] {
            record(&mut waits, Duration::from_millis(wait));
        }
        assert_eq!(waits.value_at_quantile(0.75) / 1000, 80);
        assert_eq!(waits.max() / 1000, 700);
    }

    #[test]
    fn one_slow_face_misses_the_goal() {
        let face = |slow: u64| {
            let mut waits = waits();
            (0..100).for_each(|_| record(&mut waits, Duration::from_millis(1)));
            (0..slow).for_each(|_| record(&mut waits, Duration::from_millis(80)));
            waits
        };
        let grade = |waited: &[Histogram<u64>]| judge("nobody", waited).grade();
        assert_eq!(grade(&[face(0), face(1), face(0)]), Grade::Reached, "one in a hundred");
        assert_eq!(grade(&[face(0), face(5), face(0)]), Grade::Missed);
        assert_eq!(grade(&[face(0), waits()]), Grade::NotMeasured);
        assert!(
            strictly(Strict::MissedOrNotMeasured, &[judge("nobody", &[face(5)])])
                .is_err_and(|missed| missed.contains("nobody"))
        );
    }
}
