//! A file that an answer is written to: it appears whole or not at all.
//!
//! It is written beside its place under another name and moved there when the last word of it is written, with the mode of what
//! stood there. A link is followed, also where its file is not there yet. What is not a plain file (a pipe, a device) is written
//! to directly, and `-` is stdout, as is whatever else names the same file. What the replay reads from is never overwritten.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::draft::Draft;
use crate::failure::Failure;
use crate::source;

/// Where an answer goes.
pub(super) struct Output {
    name: String,
    to: To,
    fills_stdout: bool,
}

enum To {
    /// To stdout, or to something that is not a plain file.
    Stream(Box<dyn Write>),
    /// To a plain file, which is not there yet.
    File(BufWriter<File>, Draft),
}

impl Output {
    /// Opens the place, before any work is done: a place that cannot be written to should cost nobody a long replay.
    pub(super) fn open(path: &Path, configs: &[PathBuf], logs: &[PathBuf]) -> Result<Output, Failure> {
        if source::is_stdin(path) {
            return Ok(Output::stdout("to stdout".to_string()));
        }
        let name = path.display().to_string();
        let failed = |error: io::Error| Failure::writing(&name, &error);
        let found = fs::metadata(path).ok();
        let is_target = |input: &Path| found.as_ref().is_some_and(|found| is_read_from(found, input));
        let input = match logs.iter().any(|log| is_target(log)) {
            true => Some("one of the logs"),
            false => configs.iter().any(|config| is_target(config)).then_some("the config"),
        };
        if let Some(input) = input {
            return Err(Failure::new(format!("cannot write {name}: it is {input}; name another file")));
        }
        let to = match found {
            _ if is_stdout(path) => return Ok(Output::stdout(name)),
            Some(found) if !found.is_file() && !found.is_dir() => {
                let out = OpenOptions::new().write(true).open(path).map_err(failed)?;
                To::Stream(Box::new(BufWriter::new(out)))
            }
            found if found.as_ref().is_some_and(Metadata::is_dir) || ends_in_slash(path) => {
                return Err(Failure::new(format!(
                    "cannot write {name}: it is a directory; name a file in it"
                )));
            }
            found => {
                let created = place(path).and_then(|target| Draft::create(target, found.as_ref()));
                let (draft, file) = created.map_err(failed)?;
                To::File(BufWriter::new(file), draft)
            }
        };
        Ok(Output { name, to, fills_stdout: false })
    }

    fn stdout(name: String) -> Output {
        Output { name, to: To::Stream(Box::new(BufWriter::new(io::stdout()))), fills_stdout: true }
    }

    /// Whether it is stdout, so that nothing else may go there.
    pub(super) fn fills_stdout(&self) -> bool {
        self.fills_stdout
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
                .and_then(|()| draft.publish()),
        };
        finished.map_err(|error| Failure::writing(&self.name, &error))
    }
}

/// Whether two names are one plain file, there or not there yet, or both stdout.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let is_special = |path: &Path| fs::metadata(path).is_ok_and(|found| !found.is_file());
    match (is_stdout(one), is_stdout(other)) {
        (false, false) => {
            !is_special(one) && place(one).is_ok_and(|one| place(other).is_ok_and(|other| one == other))
        }
        (one, other) => one && other,
    }
}

/// Whether a name means stdout. A device such as /dev/null is nobody's: what goes there twice disturbs nothing.
fn is_stdout(path: &Path) -> bool {
    let is_open_there = |named: Metadata| {
        opened(io::stdout()).is_ok_and(|stdout| {
            is_one(&stdout, &named) && (!stdout.file_type().is_char_device() || io::stdout().is_terminal())
        })
    };
    source::is_stdin(path) || fs::metadata(path).is_ok_and(is_open_there)
}

/// Whether an input is the file that was found. A terminal or a pipe at stdin loses nothing by being written to.
fn is_read_from(found: &Metadata, input: &Path) -> bool {
    if source::is_stdin(input) {
        found.is_file() && opened(io::stdin()).is_ok_and(|stdin| is_one(&stdin, found))
    } else {
        fs::metadata(input).is_ok_and(|input| is_one(&input, found))
    }
}

/// Whether both are one file, by whatever names.
fn is_one(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// What is known of a file that is open already.
fn opened(stream: impl AsFd) -> io::Result<Metadata> {
    File::from(stream.as_fd().try_clone_to_owned()?).metadata()
}

fn ends_in_slash(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// Where a file stands or will stand. A link is followed, so that it still stands afterwards and its file is the one that changes.
fn place(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    match fs::read_link(path) {
        // Links in a ring are an error of another kind, so this ends.
        Ok(next) => place(&directory.join(next)),
        Err(_) => {
            let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
            Ok(fs::canonicalize(directory)?.join(name))
        }
    }
}
