//! A server process: starting it, signalling it, and waiting until it is gone.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::home::Home;

/// How often the state of a real server is looked at.
const POLL: Duration = Duration::from_millis(3);

/// Polls until `ready` gives something, or until the time is over. Real servers tell nobody when they are ready.
pub(crate) fn poll<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(POLL);
    }
}

/// A running server, child of this process.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    /// Where this run begins in the log: a restarted server appends.
    log_start: u64,
}

/// How waiting for a server's readiness ended.
pub(crate) enum Readiness {
    Ready,
    /// Somebody else was faster to the port.
    PortTaken,
    /// The server ended, or took too long; with its log.
    Failed(String),
}

impl Daemon {
    /// Starts the command with its output going to `log` in the home.
    pub(crate) fn spawn(command: &mut Command, home: &Home) -> Daemon {
        let log = home.path().join("log");
        let name = command.get_program().to_string_lossy().into_owned();
        let open = || -> std::io::Result<(File, File, u64)> {
            let file = OpenOptions::new().create(true).append(true).open(&log)?;
            Ok((file.try_clone()?, file.try_clone()?, file.metadata()?.len()))
        };
        let (out, err, log_start) =
            open().unwrap_or_else(|error| panic!("cannot open {}: {error}", log.display()));
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {name}: {error}"));
        home.server_runs(child.id());
        Daemon { child, log, log_start }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What this run has logged so far.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let start = usize::try_from(self.log_start).unwrap_or(0).min(bytes.len());
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }

    /// Waits until this very process says in its log that it is ready: an answer on the port could be another's.
    pub(crate) fn wait_until_ready(
        &mut self,
        ready: &str,
        port_taken: &[&str],
        limit: Duration,
    ) -> Readiness {
        let seen = poll(limit, || {
            // Asked before the log is read, so that the log of an ended server is complete.
            let ended = self.has_ended();
            let log = self.log();
            if log.contains(ready) {
                Some(Readiness::Ready)
            } else if port_taken.iter().any(|text| log.contains(text)) {
                Some(Readiness::PortTaken)
            } else if ended {
                Some(Readiness::Failed(format!("it ended; its log:\n{log}")))
            } else {
                None
            }
        });
        seen.unwrap_or_else(|| {
            Readiness::Failed(format!("not ready after {limit:?}; its log:\n{}", self.log()))
        })
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)) | Err(_))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// Asks with `signal`, waits, and ends the process by force if that did not help.
    pub(crate) fn end(mut self, signal: Signal, timeout: Duration, home: &Home) {
        self.signal(signal);
        if poll(timeout, || self.has_ended().then_some(())).is_none() {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
        home.server_is_gone();
    }
}

/// Sends a signal; a process that is gone already is as good as one that got it.
pub(crate) fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Freezes a process and waits until it stands still.
pub(crate) fn freeze(pid: u32) {
    send(pid, Signal::STOP);
    poll(Duration::from_secs(1), || (state_and_parent(pid)?.0 == 'T').then_some(()));
}

/// The processes whose parent is `parent`.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| state_and_parent(pid).is_some_and(|(_, its_parent)| its_parent == parent)).collect()
}

/// Whether a process is there and not merely waiting to be collected.
pub(crate) fn is_alive(pid: u32) -> bool {
    state_and_parent(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

/// From `/proc/PID/stat`: `pid (name) state parent …`, where the name may hold anything, even brackets.
fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
