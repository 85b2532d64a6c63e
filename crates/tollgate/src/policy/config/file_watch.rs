//! Notices when a config file has changed and is stable again, for programs that follow one: the server, and workers that run
//! jobs.
//!
//! A file's metadata is checked now and then; nothing is read here. The program decides what to do about a change.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What changes when a file does: when it was written, its length, and which file it is.
type Stamp = (SystemTime, u64, u64);

/// Of a file that can be read again: stdin and other pipes are not followed.
fn stamp(file: &Path) -> Option<Stamp> {
    let about = std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file)?;
    Some((about.modified().ok()?, about.len(), about.ino()))
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// There is nothing to do.
    Same,
    /// It is to be read.
    Read,
    /// The file is gone.
    Gone,
}

/// How a file was when it was looked at.
#[derive(Debug)]
pub struct FileWatch {
    file: PathBuf,
    /// When it was read.
    read: Option<Stamp>,
    /// The last time.
    seen: Option<Stamp>,
    /// When it was found that it cannot be read.
    unread: Option<Stamp>,
}

impl FileWatch {
    /// The first look. To be taken before the file is read for the start: what changes after that is seen at a later one.
    pub fn before_reading(file: impl Into<PathBuf>) -> FileWatch {
        let file = file.into();
        let now = stamp(&file);
        FileWatch { file, read: now, seen: now, unread: None }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Checks the file. Call it about once a second: a file that changed since the last check may be half written, or about to be
    /// replaced, and is left alone until two checks agree.
    ///
    /// A file that cannot be opened is reported once and tried again at every check: its permissions can change without a change
    /// of the file. A file that is gone is reported once, and read when it is back, even if it is the same.
    pub fn look(&mut self) -> FileChange {
        let now = stamp(&self.file);
        let file = self.file.clone();
        self.compare(now, || File::open(file).is_ok())
    }

    fn compare(&mut self, now: Option<Stamp>, can_be_read: impl FnOnce() -> bool) -> FileChange {
        let rests = std::mem::replace(&mut self.seen, now) == now;
        if !rests || now == self.read {
            return FileChange::Same;
        }
        if now.is_none() {
            (self.read, self.unread) = (None, None);
            return FileChange::Gone;
        }
        if can_be_read() {
            self.read = now;
            return FileChange::Read;
        }
        match std::mem::replace(&mut self.unread, now) == now {
            true => FileChange::Same,
            false => FileChange::Read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A letter is the state of the file at a check, `-` a missing file, a capital a check that reads it, and `=` a check that
    /// reports it gone; after `!` it cannot be read. The first letter is the state before it was read at start.
    #[test]
    fn a_file_is_read_when_it_has_changed_and_rests() {
        fn check(looks: &str) {
            let stamp = |letter: char| {
                letter
                    .is_alphabetic()
                    .then(|| (SystemTime::UNIX_EPOCH, u64::from(letter.to_ascii_lowercase()), 0))
            };
            let mut letters = looks.chars();
            let first = letters.next().and_then(stamp);
            let mut file = FileWatch { file: PathBuf::new(), read: first, seen: first, unread: None };
            while let Some(letter) = letters.next() {
                let (can_be_read, letter) = match letter {
                    '!' => (false, letters.next().expect("a letter")),
                    _ => (true, letter),
                };
                let expected = match letter {
                    '=' => FileChange::Gone,
                    _ if letter.is_uppercase() => FileChange::Read,
                    _ => FileChange::Same,
                };
                let look = file.compare(stamp(letter), || can_be_read);
                assert_eq!(look, expected, "{looks} before {:?}", letters.as_str());
            }
        }
        check("aaa");
        check("abBbb");
        check("abcdDd");
        // Half of it, and then as it was: nothing has changed.
        check("abaa");
        check("a-a-bBaA");
        check("-aA");
        // Reported once, and tried until it can be read; another one is reported again.
        check("a!b!B!b!bBb");
        check("a!b!B!b!c!C!c");
        check("a!a!aa");
        // Missing at one check, it is being replaced; missing at two, it is reported once, and read when it is back.
        check("a-aa");
        check("a-=--aAa");
        check("a-=-bBb-=-bBb");
        check("---");
        check("a!b!B-=!b!B!bBb");
    }

    /// Regression: the server checked for the first time only after its store was open, and took a change before that as already
    /// read.
    #[test]
    fn a_file_that_changes_while_a_program_starts_is_read() {
        let file = std::env::temp_dir().join(format!("tollgate-watch-{}.toml", std::process::id()));
        std::fs::write(&file, "limits.a.blocked = true").expect("written");
        let mut watch = FileWatch::before_reading(&file);
        std::fs::write(&file, "limits.another.blocked = true").expect("written");
        let looked: Vec<FileChange> = (0..3).map(|_| watch.look()).collect();
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(looked, [FileChange::Same, FileChange::Read, FileChange::Same]);
    }

    #[test]
    fn what_is_no_file_is_not_followed() {
        for path in ["-", "/dev/null", "/dev/zero", "no such file"] {
            assert_eq!(stamp(Path::new(path)), None, "{path}");
        }
        assert!(stamp(Path::new("Cargo.toml")).is_some());
    }
}
