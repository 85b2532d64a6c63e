//! `tollgate-sim`: runs scenarios, prints what came of them, and exits with 1 if a bound was broken.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tollgate_sim::scenario::{Sabotage, Scenario, StrategyName};
use tollgate_sim::{Report, simulate};

/// Tollgate's library in thousands of virtual processes: does it keep its bounds?
///
/// Without a scenario all of them are run, one after the other. A run depends on its scenario and its seed alone.
#[derive(Parser)]
#[command(name = "tollgate-sim")]
struct Arguments {
    /// Which scenarios; `--list` shows them
    scenarios: Vec<String>,
    /// Lists the scenarios
    #[arg(long)]
    list: bool,
    /// The seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// How many processes
    #[arg(long)]
    nodes: Option<usize>,
    /// For how many seconds there is traffic
    #[arg(long)]
    seconds: Option<u64>,
    /// How many keys
    #[arg(long)]
    keys: Option<usize>,
    /// How many requests a process has in a second
    #[arg(long)]
    rate: Option<u64>,
    /// How many servers share the keys
    #[arg(long)]
    primaries: Option<usize>,
    /// Another strategy, with the same numbers
    #[arg(long, value_enum)]
    strategy: Option<StrategyName>,
    /// Among how many processes the limit is divided while each counts locally
    #[arg(long)]
    instances: Option<u64>,
    /// For how many milliseconds a denial is believed
    #[arg(long)]
    denial_cache_ms: Option<u64>,
    /// How many packets in a million are lost
    #[arg(long)]
    loss_ppm: Option<u64>,
    /// Breaks a promise on purpose, to see the checks fail
    #[arg(long, value_enum)]
    sabotage: Option<Sabotage>,
    /// Writes every event to a file
    #[arg(long)]
    log: Option<PathBuf>,
    /// One JSON object for each run
    #[arg(long, conflicts_with = "table")]
    json: bool,
    /// The bounds as a table in Markdown
    #[arg(long)]
    table: bool,
}

impl Arguments {
    fn changed(&self, mut scenario: Scenario) -> Scenario {
        fn set<T: Copy>(field: &mut T, value: Option<T>) {
            *field = value.unwrap_or(*field);
        }
        if let Some(nodes) = self.nodes {
            // A limit that is divided among all processes stays so.
            if scenario.instances == scenario.nodes as u64 {
                scenario.instances = nodes.max(1) as u64;
            }
            scenario.nodes = nodes;
        }
        set(&mut scenario.seconds, self.seconds);
        set(&mut scenario.keys, self.keys.map(|keys| keys.max(1)));
        set(&mut scenario.primaries, self.primaries.map(|primaries| primaries.max(1)));
        set(&mut scenario.requests_per_1000s, self.rate.map(|rate| rate.max(1) * 1_000));
        set(&mut scenario.instances, self.instances.map(|instances| instances.max(1)));
        set(&mut scenario.denial_cache, self.denial_cache_ms.map(Duration::from_millis));
        set(&mut scenario.loss_ppm, self.loss_ppm.map(|ppm| ppm.min(500_000)));
        scenario.sabotage = self.sabotage;
        if let Some(strategy) = self.strategy {
            scenario.limit = scenario.limit.by(strategy);
        }
        scenario
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for scenario in Scenario::all() {
            println!("{:15} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(message) => {
            eprintln!("tollgate-sim: {message}");
            ExitCode::from(2)
        }
    }
}

/// Runs what was asked for; whether all bounds were kept.
fn run(arguments: &Arguments) -> Result<bool, String> {
    let named = |name: &String| {
        let unknown = || {
            let names: Vec<&str> = Scenario::all().iter().map(|scenario| scenario.name).collect();
            format!("there is no scenario `{name}`; there are {}", names.join(", "))
        };
        Scenario::named(name).ok_or_else(unknown)
    };
    let scenarios = match arguments.scenarios.is_empty() {
        true => Scenario::all(),
        false => arguments.scenarios.iter().map(named).collect::<Result<_, _>>()?,
    };
    if arguments.table {
        println!(
            "| scenario | admitted to the busiest key | measured | the limit alone | bound | formula |\n|---|---|--:|--:|--:|---|"
        );
    }
    let mut is_kept = true;
    for scenario in scenarios {
        let scenario = arguments.changed(scenario);
        for seed in arguments.seed..arguments.seed.saturating_add(arguments.seeds) {
            let report = simulate(&scenario, seed, arguments.log.as_deref())
                .map_err(|error| format!("scenario `{}`: {error}", scenario.name))?;
            is_kept &= report.is_clean();
            print(arguments, &report);
        }
    }
    Ok(is_kept)
}

fn print(arguments: &Arguments, report: &Report) {
    match (arguments.json, arguments.table) {
        (true, _) => println!("{}", report.json()),
        (_, true) => print!("{}", report.rows()),
        _ => println!("{report}\n"),
    }
}
