//! What the bench asks of the machine: its cores, the CPU time of a thread, and the facts a reader needs beside the numbers.
//!
//! Time here is thread CPU time, because wall time on a shared machine mostly measures the neighbours. Nothing here knows
//! what is being measured.

use std::fs;
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// A core that this process may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Core(usize);

/// The cores this process may run on, in order. Of hardware threads that share a core, only the first: two threads there
/// would measure each other.
pub(crate) fn cores() -> Vec<Core> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    let mut shared = Vec::new();
    let mut cores = Vec::new();
    for number in (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number)) {
        let siblings = format!("/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(siblings).unwrap_or_else(|_| number.to_string());
        if !shared.contains(&siblings) {
            shared.push(siblings);
            cores.push(Core(number));
        }
    }
    cores
}

/// Ties the calling thread to one core. Where the system refuses, the thread stays free, and rounds in which two threads had
/// to share a core are thrown away by the share they got of it.
pub(crate) fn pin_to(Core(core): Core) {
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only).ok();
}

/// Ties the main thread of another process to one core, if the system lets us.
pub(crate) fn pin_process_to(pid: u32, Core(core): Core) {
    let mut only = CpuSet::new();
    only.set(core);
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        sched_setaffinity(Some(pid), &only).ok();
    }
}

/// The CPU time that the calling thread has used so far.
pub(crate) fn thread_cpu_time() -> Duration {
    to_duration(clock_gettime(ClockId::ThreadCPUTime))
}

fn to_duration(time: Timespec) -> Duration {
    let seconds = u64::try_from(time.tv_sec).expect("CPU time counts up from zero");
    Duration::new(seconds, u32::try_from(time.tv_nsec).expect("nanoseconds of a second"))
}

/// The CPU time that this process has used so far, all its threads together.
pub(crate) fn process_cpu_time() -> Duration {
    to_duration(clock_gettime(ClockId::ProcessCPUTime))
}

/// The memory of this process that is in RAM, in bytes.
pub(crate) fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// What a reader has to know to compare numbers from two machines.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) processor: String,
    pub(crate) cache: String,
    pub(crate) cores: usize,
    pub(crate) memory: String,
    pub(crate) kernel: String,
    pub(crate) compiler: &'static str,
    /// Load averages over 1, 5 and 15 minutes before the run: above the number of idle cores, distrust the numbers.
    pub(crate) load: String,
}

impl Facts {
    pub(crate) fn read() -> Facts {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Facts {
            processor: field(&cpuinfo, "model name"),
            cache: field(&cpuinfo, "cache size"),
            cores: cores().len(),
            memory: field(&meminfo, "MemTotal"),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string(),
            compiler: env!("RUSTC_VERSION"),
            load: load_average(),
        }
    }
}

/// The load averages over 1, 5 and 15 minutes.
pub(crate) fn load_average() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// The value of the first line `name : value`.
fn field(text: &str, name: &str) -> String {
    let line = text.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, value)| value);
    value.trim().to_string()
}
