//! Instructions of one operation, counted by callgrind: a figure that a busy machine does not change.
//!
//! `cargo run --release -p tollgate-benches -- instructions` runs this program again under `valgrind --tool=callgrind`, once for each
//! operation, with a hidden command that warms up and then makes its calls in [`count_calls`]; callgrind counts while that function runs, in
//! its thread alone. The operations are the checks in process (`contestant.rs`) and the calls of a layer without a network
//! (`http/direct.rs`). A count says nothing of waiting for memory or for another core: `in-process` and `http` measure time. It moves by
//! some 2 % from run to run, because fingerprints have random keys and so do hash maps.

use std::process::Command;

use clap::Args;

use crate::contestant::{BATCH, Call, Contestant, Regime};
use crate::find;
use crate::http::{contestant as layers, direct};
use crate::report::print_table;
use crate::workload::{KeySet, Spread, Stream};

/// The hidden command.
pub(crate) const COMMAND: &str = "count-instructions";

/// Calls that are counted: whole batches, and each of 1,000 keys many times.
const CALLS: usize = BATCH * 1_000;

/// Contestants in process that are counted: ourselves, and whom we are compared with.
const IN_PROCESS: [&str; 4] = ["tollgate", "tollgate-metrics", "governor", "governor-tuned"];

/// What is asked of each of them: its name in the table, the call, the keys and whether they are allowed.
const CHECKS: [(&str, Call, u32, Regime); 6] = [
    ("check hot", Call::Check, 1, Regime::Allow),
    ("check 1k", Call::Check, 1_000, Regime::Allow),
    ("check 1k denied", Call::Check, 1_000, Regime::Deny),
    ("check_many 1k, a key", Call::Many, 1_000, Regime::Allow),
    ("two limits 1k", Call::Pair, 1_000, Regime::Allow),
    ("two limits 1k denied", Call::Pair, 1_000, Regime::Deny),
];

/// The calls of a layer without a network.
const LAYER: &str = "layer";

#[derive(Args)]
pub(crate) struct Options {
    /// Operations and contestants whose names have one of these words: `tollgate`, `layer`, `check_many`
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    only: Vec<String>,
    /// Also write what callgrind found, function by function, to this folder; `callgrind_annotate` reads it
    #[arg(long, value_name = "FOLDER")]
    profiles: Option<std::path::PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<(), String> {
    let checks = CHECKS.iter().flat_map(|check| IN_PROCESS.map(|contestant| (check.0, contestant)));
    let layers = layers::all()?;
    let all = checks.chain(layers.iter().map(|layer| (LAYER, layer.name)));
    let is_chosen = |(operation, contestant): &(&str, &str)| {
        let name = format!("{operation} {contestant}");
        options.only.is_empty() || options.only.iter().any(|word| name.contains(word.as_str()))
    };
    let head = ["operation", "contestant", "instructions"].map(String::from).to_vec();
    let mut rows = vec![head];
    for (operation, contestant) in all.filter(is_chosen) {
        let count = count(options, operation, contestant)?;
        rows.push(vec![operation.into(), contestant.into(), format!("{count:.0}")]);
    }
    print_table(&rows);
    Ok(())
}

/// The instructions of one call, from a process of its own.
#[expect(clippy::cast_precision_loss, reason = "shown without decimals")]
fn count(options: &Options, operation: &str, contestant: &str) -> Result<f64, String> {
    let failed = |why: String| format!("counting the instructions of `{operation}` of {contestant}: {why}");
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let profile = match &options.profiles {
        Some(folder) => folder.join(format!("{operation}-{contestant}").replace([' ', ','], "_")),
        None => "/dev/null".into(),
    };
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*instructions::count_calls*"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(program)
        .args([COMMAND, operation, contestant])
        .output()
        .map_err(|error| failed(format!("starting valgrind: {error}; Debian's package `valgrind` has it")))?;
    let printed = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(failed(printed.trim().to_string()));
    }
    let collected = collected(&printed).ok_or_else(|| failed(format!("callgrind printed '{printed}'")))?;
    Ok(collected as f64 / CALLS as f64)
}

/// The sum that callgrind prints at its end; `None` if nothing was counted.
fn collected(printed: &str) -> Option<u64> {
    let line = printed.lines().find_map(|line| line.split_once("Collected :"))?.1;
    line.trim().parse().ok().filter(|&count| count > 0)
}

/// The hidden command's work: one operation, first uncounted and then counted.
pub(crate) fn run_operation(operation: &str, contestant: &str) -> Result<(), String> {
    if operation == LAYER {
        let layers = layers::all()?;
        let layer = layers.iter().find(|layer| layer.name == contestant).ok_or("no such layer")?;
        let keys = direct::Keys::new()?;
        layer.call(&keys, CALLS);
        count_calls(&|| _ = layer.call(&keys, CALLS));
        return Ok(());
    }
    let check = CHECKS.iter().find(|check| check.0 == operation).ok_or("no such operation")?;
    let (_, call, keys, regime) = *check;
    let (entrant, keys) = (find(contestant)?, KeySet { count: keys });
    let contestant: Box<dyn Contestant> = (entrant.build)(regime);
    contestant.prepare(keys);
    let mut stream = Stream::new(keys, Spread::Uniform, CALLS, 1);
    stream.refill();
    call.run(&*contestant, stream.warm_up());
    count_calls(&|| _ = call.run(&*contestant, stream.measured()));
    Ok(())
}

/// Counted from its first instruction to its last. Callgrind knows it by its name.
#[inline(never)]
fn count_calls(calls: &dyn Fn()) {
    calls();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_read_from_what_callgrind_prints() {
        let printed = "==7== Callgrind, a call-graph profiler\n==7== \n==7== Collected : 4800000\n==7== \n";
        assert_eq!(collected(printed), Some(4_800_000));
        assert_eq!(collected("==7== Collected : 0\n"), None, "the function was not found");
        assert_eq!(collected("valgrind: failed to start tool"), None);
    }

    #[test]
    fn every_operation_can_be_run() {
        let _turn = crate::contestant::tests::turn();
        for (operation, _, _, _) in CHECKS {
            for contestant in IN_PROCESS {
                assert_eq!(run_operation(operation, contestant), Ok(()), "{operation} {contestant}");
            }
        }
        assert_eq!(run_operation(LAYER, layers::TOLLGATE), Ok(()));
        assert_eq!(run_operation(LAYER, "nobody"), Err("no such layer".into()));
    }
}
