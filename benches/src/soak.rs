//! `soak`: a server on Redis for minutes or hours, and whether it is the same at the end as in the middle.
//!
//! What is run and what is asked for is in `tollgate_testkit::soak`; here is the command line and what a reader sees: a line for every
//! interval as it comes, the stability, a plot (`soak/plot.rs`) and JSON. The command fails where the stability is not met.

mod plot;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tollgate_testkit::soak::{Bound, Event, Plan, Sample, Soak, Stability};

use crate::machine::{Facts, load_average};
use crate::{server, unwritable};

#[derive(Args)]
pub(crate) struct Options {
    /// How long, in hours [default: 3 minutes]
    #[arg(long, conflicts_with = "minutes", value_parser = clap::value_parser!(u32).range(1..=168))]
    hours: Option<u32>,
    /// How long, in minutes
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_080))]
    minutes: Option<u32>,
    /// Requests a second, over all faces together
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: u32,
    /// Chooses the times of faults and reloads, and the load
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use this server instead of building the one of this tree
    #[arg(long, value_name = "PROGRAM")]
    server: Option<PathBuf>,
    /// Also write the samples, the stability and the facts of the machine to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also draw heap and p95 over time into this file
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let minutes = options.hours.map(|hours| hours * 60).or(options.minutes).unwrap_or(3);
    let duration = Duration::from_secs(u64::from(minutes) * 60);
    let plan = Plan { duration, rate: options.rate, seed: options.seed };
    // Found out before hours of waiting, not after.
    for path in options.json.iter().chain(&options.svg) {
        std::fs::write(path, "").map_err(|error| unwritable(path, &error))?;
    }
    let program = match &options.server {
        Some(program) => program.clone(),
        None => server::build_tollgate()?,
    };
    let facts = Facts::read();
    println!("{}, {} cores, Linux {}, load {}", facts.processor, facts.cores, facts.kernel, facts.load);
    println!(
        "{minutes} minutes at {} requests/s over HTTP, RESP and gRPC on Redis, seed {}.\n",
        plan.rate, plan.seed
    );
    println!(
        "{:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8} {:>7}",
        "time", "heap MiB", "redis MiB", "requests", "p50 ms", "p95 ms", "p99 ms", "CPU us"
    );
    let soak = Soak::run(plan, &program, print);
    let stability = soak.stability();
    println!("\n{}", plot::text(&soak));
    println!("{}", summary(&soak, &stability));
    if let Some(path) = &options.json {
        let text = format!("{:#}\n", to_json(&facts, &soak, &stability));
        std::fs::write(path, text).map_err(|error| unwritable(path, &error))?;
    }
    if let Some(path) = &options.svg {
        std::fs::write(path, plot::svg(&soak)).map_err(|error| unwritable(path, &error))?;
    }
    match stability.failures() {
        failures if failures.is_empty() => Ok(()),
        failures => Err(failures.join("; ")),
    }
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// CPU time of the server for one request, in microseconds.
fn cpu_per_request(sample: &Sample) -> f64 {
    sample.cpu.as_secs_f64() * 1e6 / sample.requests().max(1) as f64
}

fn print(sample: &Sample) {
    println!(
        "{:>8.0}s {:>9.2} {:>9} {:>9} {:>8.2} {:>8.2} {:>8.2} {:>7.0}{}",
        sample.at.as_secs_f64(),
        mib(sample.heap_bytes as f64),
        sample.redis_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{:.2}", mib(bytes as f64))),
        sample.requests(),
        ms(sample.p50),
        ms(sample.p95),
        ms(sample.p99),
        cpu_per_request(sample),
        if sample.is_disturbed { "  fault" } else { "" }
    );
}

fn summary(soak: &Soak, stability: &Stability) -> String {
    let met = |is_reached: bool| if is_reached { "met" } else { "MISSED" };
    let sum = |count: fn(&Sample) -> u64| soak.samples.iter().map(count).sum::<u64>();
    let row = |name: &str, bound: &Bound, shown: fn(f64) -> String| {
        let [plateau, last, limit] = [bound.plateau, bound.last, bound.limit].map(shown);
        format!("| {name} | {plateau} | {last} | {limit} | {} |\n", met(bound.holds()))
    };
    let mut text = format!(
        "{} requests: {} allowed, {} denied, {} undecided; {} events.\n\n",
        sum(Sample::requests),
        sum(|sample| sample.allowed),
        sum(|sample| sample.denied),
        sum(|sample| sample.undecided),
        soak.events.len()
    );
    text.push_str("| | middle third | last third | at most | |\n|---|--:|--:|--:|---|\n");
    text.push_str(&row("heap, MiB", &stability.heap, |bytes| format!("{:.2}", mib(bytes))));
    text.push_str(&row("p95 outside of faults, ms", &stability.p95, |us| format!("{:.2}", us / 1e3)));
    text.push_str(&row("undecided outside of faults, %", &stability.undecided, |share| {
        format!("{:.3}", share * 100.0)
    }));
    text.push_str(&format!(
        "| wrong or missing answers | | {} | 0 | {} |\n",
        stability.mistakes,
        met(stability.mistakes == 0)
    ));
    for mistake in &soak.first_mistakes {
        text.push_str(&format!("  {mistake}\n"));
    }
    text
}

fn to_json(facts: &Facts, soak: &Soak, stability: &Stability) -> Value {
    let bound = |bound: &Bound| json!({"middle_third": bound.plateau, "last_third": bound.last, "at_most": bound.limit, "met": bound.holds()});
    let sample = |sample: &Sample| {
        json!({
            "at_s": sample.at.as_secs_f64(),
            "heap_bytes": sample.heap_bytes,
            "redis_bytes": sample.redis_bytes,
            "cpu_us_per_request": cpu_per_request(sample),
            "allowed": sample.allowed,
            "denied": sample.denied,
            "undecided": sample.undecided,
            "p50_ms": ms(sample.p50),
            "p95_ms": ms(sample.p95),
            "p99_ms": ms(sample.p99),
            "disturbed": sample.is_disturbed,
        })
    };
    let event = |event: &Event| json!({"start_s": event.start.as_secs_f64(), "end_s": event.end.as_secs_f64(), "kind": format!("{:?}", event.kind)});
    json!({
        "processor": facts.processor,
        "cores": facts.cores,
        "kernel": facts.kernel,
        "load_before": facts.load,
        "load_after": load_average(),
        "seconds": soak.plan.duration.as_secs(),
        "rate": soak.plan.rate,
        "seed": soak.plan.seed,
        "stability": {
            "met": stability.holds(),
            "heap_bytes": bound(&stability.heap),
            "p95_us": bound(&stability.p95),
            "undecided": bound(&stability.undecided),
            "mistakes": stability.mistakes,
            "first_mistakes": soak.first_mistakes,
        },
        "events": soak.events.iter().map(event).collect::<Vec<_>>(),
        "samples": soak.samples.iter().map(sample).collect::<Vec<_>>(),
    })
}
