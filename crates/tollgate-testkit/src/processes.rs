//! One test in several processes at once, for races that threads of one process cannot show.
//!
//! The test runs its own binary again, asking for itself by name; an environment variable tells the child that it is one. So
//! parent and children are one function, and what the children do stands next to what is demanded of them:
//!
//! ```no_run
//! use tollgate_testkit::processes::{self, Child};
//!
//! # mod outer {
//! #[test]
//! fn four_processes_share_one_limit() {
//!     # use tollgate_testkit::processes::{self, Child};
//!     if let Some(child) = Child::here() {
//!         let url = child.parameters();
//!         child.wait_for_start();
//!         let admitted = 17; // of many calls to the store at `url`
//!         return child.report(&format!("admitted {admitted}"));
//!     }
//!     let reports = processes::run("four_processes_share_one_limit", 4, "redis://127.0.0.1:6379");
//!     assert_eq!(reports.len(), 4);
//! }
//! # }
//! ```

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const ROLE: &str = "TOLLGATE_TEST_CHILD";
const PARAMETERS: &str = "TOLLGATE_TEST_PARAMETERS";

/// Marks the lines that are meant for the parent, among whatever else the test harness prints.
const MARK: &str = "@tollgate-child@ ";
const READY: &str = "ready";

/// How long the children may take altogether.
const LIMIT: Duration = Duration::from_secs(300);

/// What a child process knows of itself.
#[derive(Clone, Debug)]
pub struct Child {
    index: usize,
    parameters: String,
}

impl Child {
    /// This process, if it is a child.
    pub fn here() -> Option<Child> {
        let index = std::env::var(ROLE).ok()?.parse().ok()?;
        Some(Child { index, parameters: std::env::var(PARAMETERS).unwrap_or_default() })
    }

    /// Which of the children it is, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// What the parent gave to [`run`].
    pub fn parameters(&self) -> &str {
        &self.parameters
    }

    /// Waits until every child has come this far, so that all start together. Each child must call it once, or end.
    pub fn wait_for_start(&self) {
        self.report(READY);
        let read = std::io::stdin().read_line(&mut String::new());
        assert!(matches!(read, Ok(1..)), "the parent is gone");
    }

    /// Sends a line to the parent.
    pub fn report(&self, line: &str) {
        // The harness may have begun a line of its own. `println!` could be captured, so the real output is written to.
        let mut out = std::io::stdout().lock();
        let written = writeln!(out, "\n{MARK}{line}").and_then(|()| out.flush());
        written.unwrap_or_else(|error| panic!("cannot report to the parent: {error}"));
    }
}

/// A child from the parent's side.
struct Running {
    child: std::process::Child,
    out: std::thread::JoinHandle<()>,
    errors: std::thread::JoinHandle<String>,
}

/// Runs a test of this binary, by its full name (`module::test`), in `count` child processes, and gives the lines that each
/// reported. Panics if a child fails, with what it printed, or if all together take longer than five minutes.
pub fn run(test: &str, count: usize, parameters: &str) -> Vec<Vec<String>> {
    let (lines, heard) = mpsc::channel();
    let mut children: Vec<Running> =
        (0..count).map(|index| spawn(test, index, parameters, lines.clone())).collect();
    drop(lines);
    let mut reports = vec![Vec::new(); count];
    let (mut outstanding, deadline) = (count, Instant::now() + LIMIT);
    // The line ends when every child has closed its output.
    loop {
        match heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Heard::Ready | Heard::End)) if outstanding > 0 => {
                outstanding -= 1;
                if outstanding == 0 {
                    children.iter_mut().for_each(release);
                }
            }
            Ok((_, Heard::Ready | Heard::End)) => {}
            Ok((index, Heard::Line(line))) => reports[index].push(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                for running in &mut children {
                    let _ = running.child.kill();
                    let _ = running.child.wait();
                }
                panic!(
                    "the {count} child processes of {test} took longer than {LIMIT:?}; so far: {reports:?}"
                );
            }
        }
    }
    for (index, running) in children.into_iter().enumerate() {
        let (status, errors) = finish(running);
        assert!(
            status.success(),
            "child {index} of {test} failed: {errors}\nit reported: {:?}",
            reports[index]
        );
    }
    reports
}

enum Heard {
    Ready,
    Line(String),
    End,
}

fn spawn(test: &str, index: usize, parameters: &str, lines: mpsc::Sender<(usize, Heard)>) -> Running {
    let binary = std::env::current_exe().unwrap_or_else(|error| panic!("where is this test? {error}"));
    let mut child = Command::new(binary)
        .args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(ROLE, index.to_string())
        .env(PARAMETERS, parameters)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run this test again: {error}"));
    let (out, errors) = (child.stdout.take(), child.stderr.take());
    let out = std::thread::spawn(move || {
        let mut was_ready = false;
        for line in out.into_iter().flat_map(|out| BufReader::new(out).lines()).map_while(Result::ok) {
            let Some((_, line)) = line.split_once(MARK) else { continue };
            was_ready |= line == READY;
            let heard = if line == READY { Heard::Ready } else { Heard::Line(line.to_owned()) };
            let _ = lines.send((index, heard));
        }
        // A child that ended without getting ready must not hold up the others.
        if !was_ready {
            let _ = lines.send((index, Heard::End));
        }
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.map(|mut errors| errors.read_to_string(&mut text));
        text
    });
    Running { child, out, errors }
}

fn release(running: &mut Running) {
    if let Some(mut stdin) = running.child.stdin.take() {
        // A child that has ended needs no start.
        let _ = stdin.write_all(b"start\n");
    }
}

fn finish(mut running: Running) -> (ExitStatus, String) {
    let status = running.child.wait().unwrap_or_else(|error| panic!("cannot wait for a child: {error}"));
    let _ = running.out.join();
    (status, running.errors.join().unwrap_or_default())
}
