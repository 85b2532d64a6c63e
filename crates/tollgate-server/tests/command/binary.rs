//! Runs the binary in a directory of its own.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use tollgate_testkit::tollgate::program;

/// A directory for one test, with the files that it needs. Gone when the test is over.
pub(crate) struct Scratch {
    dir: PathBuf,
}

/// How a call ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Scratch {
    /// `name` is for people who look into it.
    pub(crate) fn new(name: &str) -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}-{count}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Scratch { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// The names of all files here, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The binary, to be started here; nothing of the caller's terminal and environment shows.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = program(Path::new(env!("CARGO_BIN_EXE_tollgate")), &self.dir);
        command.args(args).env_remove("NO_COLOR");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        self.run_with(args, b"")
    }

    /// With `input` on stdin.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Ended {
        let mut command = self.command(args);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A call that fails early does not read its stdin.
        let _ = child.stdin.take().unwrap().write_all(input);
        let output = child.wait_with_output().unwrap();
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Ended {
    /// Could not: exit code 2, nothing on stdout, no panic, and a last line that begins as errors do.
    pub(crate) fn could_not(&self, what: &str) {
        assert_eq!(self.code, Some(2), "{what}: {self:?}");
        assert_eq!(self.stdout, "", "{what}: {self:?}");
        assert!(!self.stderr.contains("panicked"), "{what}: {self:?}");
        let last = self.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("tollgate: error: "), "{what}: {self:?}");
    }

    /// Exit code 0 and nothing to complain about.
    pub(crate) fn done(&self, what: &str) {
        assert_eq!(self.code, Some(0), "{what}: {self:?}");
        assert!(!self.stderr.contains("error"), "{what}: {self:?}");
    }
}
