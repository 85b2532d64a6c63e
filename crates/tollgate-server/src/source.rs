//! Files that a person names on the command line, where `-` is stdin.
//!
//! Opening and naming only; what is in them is for the commands.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use crate::failure::Failure;

/// How much is read at once: logs are long.
const BUFFER: usize = 256 * 1024;

/// The longest text that is read whole: far more than any config, far less than a log named by mistake.
const MAX_TEXT: u64 = 16 * 1024 * 1024;

/// Whether this name means stdin.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Whether what was read once is there for a second time, as with a pipe it is not. A file that is missing may come back.
pub(crate) fn can_be_read_again(path: &Path) -> bool {
    let is_pipe = |about: std::fs::Metadata| !about.is_file() && !about.is_dir();
    !is_stdin(path) && !std::fs::metadata(path).is_ok_and(is_pipe)
}

/// The name that messages use.
pub(crate) fn name(path: &Path) -> String {
    if is_stdin(path) { "stdin".to_string() } else { path.display().to_string() }
}

/// How many bytes have been read, for a display of the progress.
pub(crate) type ReadBytes = Rc<Cell<u64>>;

/// Counts what is read, a buffer at a time.
struct Counted<R> {
    input: R,
    read: ReadBytes,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(into)?;
        self.read.set(self.read.get() + count as u64);
        Ok(count)
    }
}

/// How many bytes there are to read in all; `None` where one of them is no plain file.
pub(crate) fn total_bytes<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Option<u64> {
    let size = |path: &Path| {
        let about = (!is_stdin(path)).then(|| std::fs::metadata(path).ok())??;
        about.is_file().then_some(about.len())
    };
    paths.into_iter().map(size).sum()
}

/// Opens a file, or stdin.
pub(crate) fn open(path: &Path) -> Result<Box<dyn BufRead>, Failure> {
    open_counted(path, &ReadBytes::default())
}

/// The same, counting what is read.
pub(crate) fn open_counted(path: &Path, read: &ReadBytes) -> Result<Box<dyn BufRead>, Failure> {
    let read = Rc::clone(read);
    if is_stdin(path) {
        let input = Counted { input: io::stdin().lock(), read };
        return Ok(Box::new(BufReader::with_capacity(BUFFER, input)));
    }
    let failed = |error: io::Error| Failure::reading(&name(path), &error);
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(Failure::new(format!(
            "cannot read {}: it is a directory; name a file in it",
            name(path)
        )));
    }
    Ok(Box::new(BufReader::with_capacity(BUFFER, Counted { input: file, read })))
}

/// The whole text of a file.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let read = open(path)?.take(MAX_TEXT + 1).read_to_end(&mut bytes);
    if read.map_err(|error| Failure::reading(&name(path), &error))? as u64 > MAX_TEXT {
        return Err(Failure::new(format!(
            "cannot read {}: it is longer than 16 MiB and no config",
            name(path)
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..good].iter().filter(|&&byte| byte == b'\n').count();
        Failure::new(format!("cannot read {}: line {line} is not UTF-8; save the file as UTF-8", name(path)))
    })
}
