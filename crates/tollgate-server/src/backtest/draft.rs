//! A file under another name, beside the place that it will take when it is whole.
//!
//! A draft that is not published is removed: when the replay fails, and when ctrl-c or SIGTERM ends it, for which a thread
//! waits from the first draft on. A run that is killed leaves its drafts behind, as `.NAME.PID.part`.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;
use tokio::signal::unix::{SignalKind, signal};

/// The drafts of this process, which are deleted if it ends early.
static DRAFTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Unless it is published, it is removed.
pub(super) struct Draft {
    path: PathBuf,
    target: PathBuf,
}

impl Draft {
    /// With the mode of what it will replace, from before its first word on.
    pub(super) fn create(target: PathBuf, replaced: Option<&Metadata>) -> io::Result<(Draft, File)> {
        remove_on_signal()?;
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or(io::ErrorKind::InvalidInput)?);
        name.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(name);
        let mode = if replaced.is_some() { 0o600 } else { 0o666 };
        // Held until it is entered: a signal finds it in the list or finds no file.
        let mut drafts = DRAFTS.lock();
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        drafts.push(path.clone());
        drop(drafts);
        let draft = Draft { path, target };
        if let Some(replaced) = replaced {
            file.set_permissions(replaced.permissions())?;
        }
        Ok((draft, file))
    }

    /// Moves it to its place.
    pub(super) fn publish(self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After publishing there is nothing left here, and that is as it should be.
        let _ = fs::remove_file(&self.path);
        DRAFTS.lock().retain(|path| *path != self.path);
    }
}

/// Has ctrl-c and SIGTERM end the process as ever, but without drafts.
fn remove_on_signal() -> io::Result<()> {
    static WAITING: OnceLock<()> = OnceLock::new();
    if WAITING.set(()).is_err() {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let entered = runtime.enter();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    drop(entered);
    let wait = move || {
        let signal = runtime.block_on(async {
            tokio::select! {
                _ = term.recv() => SignalKind::terminate(),
                _ = int.recv() => SignalKind::interrupt(),
            }
        });
        // Not given back: no draft is to come after these.
        let drafts = DRAFTS.lock();
        for path in drafts.iter() {
            let _ = fs::remove_file(path);
        }
        // What a shell says of a command that a signal ended.
        std::process::exit(128 + signal.as_raw_value())
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(wait)?;
    Ok(())
}
