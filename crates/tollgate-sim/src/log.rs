//! The log of what happened, line by line, and its hash: two runs are the same if their hashes are.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

/// The log.
pub(crate) struct EventLog(Mutex<Inner>);

struct Inner {
    hash: Sha256,
    line: String,
    lines: u64,
    file: Option<BufWriter<File>>,
    failed: Option<io::Error>,
}

impl EventLog {
    /// A log that goes to a file, or is only hashed.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub(crate) fn new(file: Option<&Path>) -> io::Result<EventLog> {
        let file = file.map(File::create).transpose()?.map(BufWriter::new);
        let inner = Inner { hash: Sha256::new(), line: String::new(), lines: 0, file, failed: None };
        Ok(EventLog(Mutex::new(inner)))
    }

    /// Adds a line.
    pub(crate) fn write(&self, event: fmt::Arguments<'_>) {
        let Inner { hash, line, lines, file, failed } = &mut *self.0.lock();
        line.clear();
        // A string takes whatever is written.
        let _ = writeln!(line, "{event}");
        hash.update(line.as_bytes());
        *lines += 1;
        if let Some(file) = file
            && let Err(error) = file.write_all(line.as_bytes())
        {
            failed.get_or_insert(error);
        }
    }

    /// How many lines there are, and the SHA-256 of all of them, in hexadecimal.
    ///
    /// # Errors
    /// If a line could not be written.
    pub(crate) fn finish(&self) -> io::Result<(u64, String)> {
        let mut inner = self.0.lock();
        if let Some(file) = &mut inner.file {
            file.flush()?;
        }
        if let Some(error) = inner.failed.take() {
            return Err(error);
        }
        let digest = inner.hash.clone().finalize();
        Ok((inner.lines, digest.iter().map(|byte| format!("{byte:02x}")).collect()))
    }
}
