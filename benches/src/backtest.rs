//! How fast `tollgate backtest` replays logs, beside `wc -l` on the same files in the same rounds.
//!
//! `cargo run --release -p tollgate-benches -- backtest` writes logs (`backtest/logs.rs`), then runs `wc -l` and the release binary on each in
//! turn, both tied to one core, and takes the mean of the rounds. Lines a second are by the CPU time of the process, user and system, because
//! wall time on a shared machine mostly measures the neighbours. A replay is whole: the log is read, every line is decided by the library on
//! the log's clock, and the summary is printed as JSON, from which it is read that no line was left out. With `--strict` a
//! goal that was missed is an error.

mod logs;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;

use self::logs::Log;
use crate::machine::{Facts, cores};
use crate::report::print_table;
use crate::server::{build_tollgate, on, target};

#[derive(Args)]
pub(crate) struct Options {
    /// Lines of each log
    #[arg(long, default_value_t = 3_000_000, value_parser = clap::value_parser!(u32).range(1_000..=50_000_000))]
    lines: u32,
    /// Keys of each log, drawn by Zipf's law
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// How often each log is counted and replayed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=50))]
    rounds: u16,
    /// Logs whose names have one of these words: `csv`, `access`
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    only: Vec<String>,
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let program = build_tollgate()?;
    let folder = target()?.join("backtest-logs");
    fs::create_dir_all(&folder).map_err(|error| format!("making {}: {error}", folder.display()))?;
    let facts = Facts::read();
    println!("{}, {} cores, load {}", facts.processor, facts.cores, facts.load);
    println!(
        "{} lines and {} keys a log, {} rounds, one core, by CPU time\n",
        options.lines, options.keys, options.rounds
    );
    let is_chosen =
        |log: &Log| options.only.is_empty() || options.only.iter().any(|word| log.name.contains(&**word));
    let measured: Result<Vec<Measured>, String> = logs::ALL
        .iter()
        .filter(|log| is_chosen(log))
        .map(|log| measure(log, options, &program, &folder))
        .collect();
    // What was written is large, and made again in seconds.
    let _ = fs::remove_dir_all(&folder);
    let measured = measured?;
    let mut rows = vec![
        ["log", "bytes a line", "`wc -l`", "lines/s", "ns a line", "times `wc -l`", "goal", ""]
            .map(String::from)
            .to_vec(),
    ];
    rows.extend(measured.iter().map(Measured::row));
    print_table(&rows);
    let missed: Vec<&str> = measured.iter().filter(|one| !one.is_reached()).map(|one| one.log.name).collect();
    match is_strict && !missed.is_empty() {
        true => Err(format!("missed the goal: {}", missed.join(", "))),
        false => Ok(()),
    }
}

/// What was measured of one log.
struct Measured {
    log: &'static Log,
    lines: u32,
    bytes: u64,
    counted: Duration,
    replayed: Duration,
}

impl Measured {
    fn per_second(&self, time: Duration) -> f64 {
        f64::from(self.lines) / time.as_secs_f64().max(1e-9)
    }

    fn is_reached(&self) -> bool {
        self.per_second(self.replayed) >= self.log.goal
    }

    #[expect(clippy::cast_precision_loss, reason = "shown without decimals")]
    fn row(&self) -> Vec<String> {
        let lines = f64::from(self.lines);
        vec![
            self.log.name.to_owned(),
            format!("{:.0}", self.bytes as f64 / lines),
            millions(self.per_second(self.counted)),
            millions(self.per_second(self.replayed)),
            format!("{:.0}", self.replayed.as_secs_f64() * 1e9 / lines),
            format!("{:.1}", self.replayed.as_secs_f64() / self.counted.as_secs_f64().max(1e-9)),
            format!("≥ {}", millions(self.log.goal)),
            if self.is_reached() { "reached" } else { "missed" }.to_owned(),
        ]
    }
}

fn millions(count: f64) -> String {
    format!("{:.2} M", count / 1e6)
}

fn measure(log: &'static Log, options: &Options, program: &Path, folder: &Path) -> Result<Measured, String> {
    let path = folder.join(log.file);
    let config = folder.join("policy.toml");
    let failed = |error: std::io::Error| format!("writing {}: {error}", path.display());
    fs::write(&config, logs::POLICY).map_err(failed)?;
    let bytes = log.write(&path, options.lines, options.keys).map_err(failed)?;
    let (mut counted, mut replayed) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..options.rounds {
        let (time, printed) = timed(Command::new("wc").arg("-l").arg(&path))?;
        expect(&printed, &(options.lines + log.heads).to_string())?;
        counted += time;
        let mut backtest = Command::new(program);
        backtest.args(["backtest", "--json", "--config"]).args([&config, &path]);
        let (time, printed) = timed(&mut backtest)?;
        expect(&printed, &format!("{{\"requests\":{},", options.lines))?;
        replayed += time;
    }
    let lines = options.lines;
    // A mean, because `wc` takes few of the hundredths of a second that time is counted in.
    let rounds = u32::from(options.rounds);
    Ok(Measured { log, lines, bytes, counted: counted / rounds, replayed: replayed / rounds })
}

/// That every line was counted, or replayed.
fn expect(printed: &str, beginning: &str) -> Result<(), String> {
    match printed.starts_with(beginning) {
        true => Ok(()),
        false => Err(format!("expected '{beginning}…', and it printed '{:.200}'", printed)),
    }
}

/// The CPU time of a command on the first core, and what it prints.
fn timed(command: &mut Command) -> Result<(Duration, String), String> {
    let core = cores().first().copied();
    on(core, || {
        let before = waited_for()?;
        let name = command.get_program().to_string_lossy().into_owned();
        let output =
            command.stdin(Stdio::null()).output().map_err(|error| format!("starting {name}: {error}"))?;
        let time = waited_for()?.saturating_sub(before);
        match output.status.success() {
            true => Ok((time, String::from_utf8_lossy(&output.stdout).into_owned())),
            false => Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        }
    })
}

/// The CPU time of all processes that this one has started and waited for, to a hundredth of a second.
fn waited_for() -> Result<Duration, String> {
    let stat =
        fs::read_to_string("/proc/self/stat").map_err(|error| format!("reading /proc/self/stat: {error}"))?;
    children(&stat, rustix::param::clock_ticks_per_second())
        .ok_or_else(|| format!("/proc/self/stat is '{stat}'"))
}

/// The fields `cutime` and `cstime`. The name before them, in parentheses, may have blanks in it.
fn children(stat: &str, ticks_per_second: u64) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(13);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let ticks = ticks()? + ticks()?;
    Some(Duration::from_millis(ticks * 1_000 / ticks_per_second.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_children_is_read_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 11 12 150 25 20 0 1 0 99 0 0";
        assert_eq!(children(stat, 100), Some(Duration::from_millis(1_750)));
        assert_eq!(children("7 (a) S 1", 100), None);
        assert!(waited_for().is_ok());
    }

    #[test]
    fn a_goal_is_by_the_time_of_the_replay() {
        let at = |replayed| Measured {
            log: &logs::ALL[0],
            lines: 1_000_000,
            bytes: 40_000_000,
            counted: Duration::from_millis(50),
            replayed,
        };
        assert!(at(Duration::from_millis(500)).is_reached() && !at(Duration::from_millis(501)).is_reached());
        let row = at(Duration::from_millis(400)).row();
        assert_eq!(
            row[1..],
            ["40", "20.00 M", "2.50 M", "400", "8.0", "≥ 2.00 M", "reached"].map(String::from)
        );
    }
}
