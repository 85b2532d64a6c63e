//! The results: one line for each request, added in one write when the request has ended.
//!
//! A request is done when its line is there, so a run can be killed at any time. What a killed run has left of a line is cut off by the next
//! one. The file is locked while a run writes it. Its time of change is that of the last request that was sent or has ended, so that the
//! next run knows how long limits in memory must wait for it.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tollgate_llm::executor::{CallErrorKind, CallResult, Reply};

use super::input::Input;
use crate::failure::Failure;
use crate::source;

/// How every line begins.
const START: &str = "{\"id\":\"line_";

/// A line, in the form that OpenAI's batches have.
#[derive(Serialize)]
struct Line<'a> {
    id: String,
    custom_id: &'a str,
    response: Option<Response<'a>>,
    error: Option<Error<'a>>,
    attempts: u32,
}

#[derive(Serialize)]
struct Response<'a> {
    status_code: u16,
    request_id: Option<&'a str>,
    body: Body<'a>,
}

/// A body as it came, or as text where it is no JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Json(&'a RawValue),
    Text(String),
}

#[derive(Serialize)]
struct Error<'a> {
    code: &'static str,
    message: &'a str,
}

/// What is read of a line again.
#[derive(Deserialize)]
struct Known {
    custom_id: String,
    #[serde(default)]
    error: Option<serde::de::IgnoredAny>,
}

/// The file of results.
pub(super) struct Output {
    file: Arc<File>,
    path: PathBuf,
    done: HashSet<String>,
    failed: usize,
    last_sent: Option<SystemTime>,
}

impl Output {
    /// Opens the results of an input, those of an earlier run too. With `retry_failed`, those that failed are taken out.
    pub(super) fn open(path: &Path, input: &Input, retry_failed: bool) -> Result<Output, Failure> {
        let name = source::name(path);
        let failed = |error: io::Error| Failure::writing(&name, &error);
        let is_there = path.exists();
        let in_use = || {
            Failure::new(format!("another run writes {name}; wait until it has ended, or name another --out"))
        };
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Failure::new(format!(
                "cannot write {name}: it is not a file, and results must be found again"
            )));
        }
        // Another run may have replaced the file before it was locked here, and then writes the new one.
        if file.try_lock().is_err() || !is_at(&file, path).map_err(failed)? {
            return Err(in_use());
        }
        // A file that was not there is that of no earlier run.
        let last_sent = file.metadata().and_then(|about| about.modified()).ok().filter(|_| is_there);
        let mut output = Output {
            file: Arc::new(file),
            path: path.to_owned(),
            done: HashSet::new(),
            failed: 0,
            last_sent,
        };
        let (whole, failed_lines) = output.read_again(input)?;
        output.file.set_len(whole).map_err(failed)?;
        if retry_failed && !failed_lines.is_empty() {
            output.take_out(&failed_lines).map_err(failed)?;
        }
        Ok(output)
    }

    /// Reads what is there. The length of the whole lines, and the lines that failed.
    fn read_again(&mut self, input: &Input) -> Result<(u64, HashSet<String>), Failure> {
        let name = source::name(&self.path);
        let unreadable = |error: io::Error| Failure::reading(&name, &error);
        let mut file = &*self.file;
        file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        let mut reader = BufReader::with_capacity(256 * 1024, file);
        let (mut whole, mut number, mut bytes) = (0_u64, 0_usize, Vec::new());
        let mut failed = HashSet::new();
        loop {
            bytes.clear();
            if reader.read_until(b'\n', &mut bytes).map_err(unreadable)? == 0 {
                return Ok((whole, failed));
            }
            number += 1;
            let is_ours = bytes.iter().zip(START.as_bytes()).all(|(one, other)| one == other);
            let known = match bytes.strip_suffix(b"\n") {
                // A run was killed while it wrote this.
                None if is_ours => return Ok((whole, failed)),
                None => None,
                Some(line) => serde_json::from_slice::<Known>(line).ok().filter(|_| is_ours),
            };
            let Some(known) = known else {
                return Err(Failure::new(format!(
                    "line {number} of {name} is not a result of a run, and the file is left as it is; name another --out"
                )));
            };
            if !input.has(&known.custom_id) {
                return Err(Failure::new(format!(
                    "line {number} of {name} is the result of {:?}, which is not in {}; name another --out",
                    known.custom_id,
                    input.name()
                )));
            }
            if known.error.is_some() {
                self.failed += 1;
                failed.insert(known.custom_id.clone());
            }
            if !self.done.insert(known.custom_id.clone()) {
                return Err(Failure::new(format!(
                    "line {number} of {name} is a second result of {:?}; name another --out",
                    known.custom_id
                )));
            }
            whole += bytes.len() as u64;
        }
    }

    /// Takes the results of these requests out, by a new file that replaces the old one.
    fn take_out(&mut self, failed: &HashSet<String>) -> io::Result<()> {
        let mut draft = self.path.clone().into_os_string();
        draft.push(".tollgate-draft");
        let draft = PathBuf::from(draft);
        // What a killed run has left. No other run is at it, because the results are locked.
        match std::fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let new = OpenOptions::new().read(true).append(true).create_new(true).open(&draft)?;
        let written = (|| {
            let mut file = &*self.file;
            file.seek(SeekFrom::Start(0))?;
            let mut writer = io::BufWriter::new(&new);
            for line in BufReader::new(file).split(b'\n') {
                let line = line?;
                let known = serde_json::from_slice::<Known>(&line).map_err(io::Error::other)?;
                if !failed.contains(&known.custom_id) {
                    writer.write_all(&line)?;
                    writer.write_all(b"\n")?;
                }
            }
            writer.flush()?;
            new.set_permissions(self.file.metadata()?.permissions())?;
            new.sync_all()?;
            new.lock()?;
            std::fs::rename(&draft, &self.path)
        })();
        if let Err(error) = written {
            let _ = std::fs::remove_file(&draft);
            return Err(error);
        }
        self.file = Arc::new(new);
        self.done.retain(|id| !failed.contains(id));
        self.failed = 0;
        Ok(())
    }

    /// Adds a result.
    pub(super) fn add(&mut self, line: usize, custom_id: &str, result: &CallResult) -> Result<(), Failure> {
        let mut text = written(line, custom_id, result);
        text.push(b'\n');
        let mut file = &*self.file;
        file.write_all(&text).map_err(|error| Failure::writing(&source::name(&self.path), &error))?;
        self.done.insert(custom_id.to_owned());
        self.failed += usize::from(result.is_err());
        Ok(())
    }

    /// Notes that requests are being sent.
    pub(super) fn touch(file: &File) {
        let _ = file.set_modified(SystemTime::now());
    }

    /// The file, for senders.
    pub(super) fn file(&self) -> Arc<File> {
        self.file.clone()
    }

    pub(super) fn has(&self, custom_id: &str) -> bool {
        self.done.contains(custom_id)
    }

    pub(super) fn done(&self) -> usize {
        self.done.len()
    }

    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    /// When an earlier run sent something last, if there was one.
    pub(super) fn last_sent(&self) -> Option<SystemTime> {
        self.last_sent
    }

    /// All of it is on the disk.
    pub(super) fn finish(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

/// Whether this is the file at the path, and not one that was there before.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let there = match std::fs::metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let open = file.metadata()?;
    Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
}

fn written(line: usize, custom_id: &str, result: &CallResult) -> Vec<u8> {
    let response = |reply: &'_ Reply| -> (u16, Option<String>, Option<Box<RawValue>>, String) {
        let id = reply.headers.get("x-request-id").or_else(|| reply.headers.get("request-id"));
        let id = id.and_then(|id| id.to_str().ok()).map(str::to_owned);
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // One line: a body may have its own line ends.
        let json = serde_json::from_str::<Box<RawValue>>(&text).ok();
        let json = match json {
            Some(json) if json.get().contains(['\n', '\r']) => {
                let value = serde_json::from_str::<serde_json::Value>(json.get()).ok();
                value.and_then(|value| RawValue::from_string(value.to_string()).ok())
            }
            json => json,
        };
        (reply.status, id, json, text)
    };
    let (reply, error, attempts) = match result {
        Ok(completed) => (Some(&completed.reply), None, completed.attempts),
        Err(error) => {
            let code = match error.kind {
                CallErrorKind::Invalid => "invalid",
                CallErrorKind::NotAdmitted(_) => "not_admitted",
                CallErrorKind::Provider(failure) => failure.name(),
                CallErrorKind::Unreachable => "unreachable",
                CallErrorKind::Cancelled => "cancelled",
            };
            (error.reply.as_deref(), Some(Error { code, message: &error.reason }), error.attempts)
        }
    };
    let parts = reply.map(response);
    let response = parts.as_ref().map(|(status, id, json, text)| Response {
        status_code: *status,
        request_id: id.as_deref(),
        body: json.as_deref().map_or_else(|| Body::Text(text.clone()), Body::Json),
    });
    let line = Line { id: format!("line_{line}"), custom_id, response, error, attempts };
    serde_json::to_vec(&line).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_replaced_is_not_the_one_at_its_path() {
        let home = tempfile::tempdir().expect("a directory");
        let (path, other) = (home.path().join("out"), home.path().join("other"));
        let (file, new) = (File::create(&path).expect("a file"), File::create(&other).expect("a file"));
        assert!(is_at(&file, &path).expect("a path"));
        std::fs::rename(&other, &path).expect("renamed");
        assert!(!is_at(&file, &path).expect("a path") && is_at(&new, &path).expect("a path"));
        std::fs::remove_file(&path).expect("removed");
        assert!(!is_at(&new, &path).expect("no path"));
    }
}
