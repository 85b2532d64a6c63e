//! The directory of a server, and the promise that nothing outlives the test.
//!
//! Dropping a [`Home`] removes the directory. A test process that is killed drops nothing, and neither does one that keeps a
//! server in a `static`. So each home has a caretaker: a shell that reads from a pipe which only this process holds open. It
//! learns which server runs; when the pipe ends without a word of farewell, it ends that server and removes the directory.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use parking_lot::Mutex;
use tempfile::TempDir;

/// `$1` is the directory. PostgreSQL's children are in sessions of their own, hence the list of children; it is asked
/// politely first, because only then does it free its shared memory.
const CARETAKER: &str = r#"
pid=
while read -r word rest; do
  case $word in run) pid=$rest ;; gone) pid= ;; farewell) exit 0 ;; esac
done
if [ -n "$pid" ]; then
  children=$(cat "/proc/$pid/task/$pid/children")
  for one in $pid $children; do kill -s CONT "$one"; done
  kill -s QUIT "$pid"
  for moment in 1 2 3 4 5 6 7 8 9 10; do kill -s 0 "$pid" && sleep 0.1; done
  for one in $pid $children; do kill -s KILL "$one"; done
fi
rm -rf "$1"
"#;

/// A temporary directory with a caretaker.
pub(crate) struct Home {
    dir: Option<TempDir>,
    caretaker: Child,
    orders: Mutex<Option<ChildStdin>>,
}

impl Home {
    /// An empty directory. `kind` becomes part of its name.
    pub(crate) fn new(kind: &str) -> Home {
        let dir = tempfile::Builder::new()
            .prefix(&format!("tollgate-{kind}-"))
            .tempdir()
            .unwrap_or_else(|error| panic!("cannot make a temporary directory for {kind}: {error}"));
        let mut caretaker = Command::new("sh")
            .args(["-c", CARETAKER, "caretaker"])
            .arg(dir.path())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A group of its own: what interrupts the tests must not interrupt the one who tidies up after them.
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run sh: {error}"));
        let orders = Mutex::new(caretaker.stdin.take());
        Home { dir: Some(dir), caretaker, orders }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new("/"), TempDir::path)
    }

    /// From now on this process must not outlive us.
    pub(crate) fn server_runs(&self, pid: u32) {
        self.notify(&format!("run {pid}\n"));
    }

    /// The process has been waited for; its number may soon belong to another.
    pub(crate) fn server_is_gone(&self) {
        self.notify("gone\n");
    }

    fn notify(&self, order: &str) {
        if let Some(orders) = self.orders.lock().as_mut() {
            // A caretaker that somebody has ended leaves the tidying to `drop`.
            let _ = orders.write_all(order.as_bytes());
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(dir) = self.dir.take()
            && let Err(error) = dir.close()
        {
            eprintln!("cannot remove a temporary directory: {error}");
        }
        self.notify("farewell\n");
        *self.orders.lock() = None;
        let _ = self.caretaker.wait();
    }
}
