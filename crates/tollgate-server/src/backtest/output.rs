//! A file that an answer is written to: it appears whole or not at all.
//!
//! It is written beside its place under another name and moved there when the last word of it is written. What is not a plain
//! file (a pipe, a device) is written to directly, and `-` is stdout. What the replay reads from is never overwritten.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// What messages call stdout; no path reads so.
const STDOUT: &str = "to stdout";

/// Where an answer goes.
pub(super) struct Output {
    name: String,
    to: To,
}

enum To {
    /// To stdout, or to something that is not a plain file.
    Stream(Box<dyn Write>),
    /// To a plain file, which is not there yet.
    File(BufWriter<File>, Draft),
}

/// A file under another name. Unless it is published, it is removed.
struct Draft {
    path: PathBuf,
    target: PathBuf,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After publishing there is nothing left here, and that is as it should be.
        let _ = fs::remove_file(&self.path);
    }
}

impl Output {
    /// Opens the place, before any work is done: a place that cannot be written to should cost nobody a long replay.
    pub(super) fn open(path: &Path, config: &Path, logs: &[PathBuf]) -> Result<Output, Failure> {
        if path.as_os_str() == "-" {
            let to = To::Stream(Box::new(BufWriter::new(io::stdout())));
            return Ok(Output { name: STDOUT.to_string(), to });
        }
        let name = path.display().to_string();
        let failed = |error: io::Error| Failure::writing(&name, &error);
        let target = followed(path);
        let is_target = |input: &Path| fs::canonicalize(input).is_ok_and(|input| input == target);
        let input = match logs.iter().any(|log| is_target(log)) {
            true => Some("one of the logs"),
            false => is_target(config).then_some("the config"),
        };
        if let Some(input) = input {
            return Err(Failure::new(format!("cannot write {name}: it is {input}; name another file")));
        }
        let to = match fs::metadata(&target) {
            Ok(found) if found.is_dir() => {
                return Err(Failure::new(format!(
                    "cannot write {name}: it is a directory; name a file in it"
                )));
            }
            Ok(found) if !found.is_file() => {
                let out = OpenOptions::new().write(true).open(&target).map_err(failed)?;
                To::Stream(Box::new(BufWriter::new(out)))
            }
            _ => {
                let (draft, file) = Draft::create(target).map_err(failed)?;
                To::File(BufWriter::new(file), draft)
            }
        };
        Ok(Output { name, to })
    }

    /// Whether it is stdout, so that nothing else may go there.
    pub(super) fn fills_stdout(&self) -> bool {
        self.name == STDOUT
    }

    /// Writes a part.
    pub(super) fn write(
        &mut self,
        part: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let out: &mut dyn Write = match &mut self.to {
            To::Stream(out) => out,
            To::File(out, _) => out,
        };
        part(out).map_err(|error| Failure::writing(&self.name, &error))
    }

    /// Says that the last part was written: now the file appears.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let finished = match self.to {
            To::Stream(mut out) => out.flush(),
            To::File(out, draft) => out
                .into_inner()
                .map_err(io::IntoInnerError::into_error)
                .and_then(|file| file.sync_all())
                .and_then(|()| fs::rename(&draft.path, &draft.target)),
        };
        finished.map_err(|error| Failure::writing(&self.name, &error))
    }
}

/// Whether two names are one plain file, there or not there yet, or both stdout.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let is_special = |path: &Path| fs::metadata(path).is_ok_and(|found| !found.is_file());
    !is_special(one) && place(one) == place(other)
}

/// A path with its directory as the system names it, though the file may not be there.
fn place(path: &Path) -> PathBuf {
    let path = followed(path);
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    match (fs::canonicalize(directory), path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => path,
    }
}

/// A link is followed, so that it still stands afterwards and its file is the one that changes.
fn followed(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

impl Draft {
    fn create(target: PathBuf) -> io::Result<(Draft, File)> {
        let file_name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut name = std::ffi::OsString::from(".");
        name.push(file_name);
        name.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok((Draft { path, target }, file))
    }
}
