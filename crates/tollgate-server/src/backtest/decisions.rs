//! `--decisions`: one JSON object for each charge, in the order of replay.
//!
//! The file appears whole or not at all: it is written beside its place under another name and moved there when the replay
//! is over. What is not a plain file (a pipe, a device) is written to directly, and `-` is stdout.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::failure::Failure;

/// What the policy said to one charge. The fields, and their order, are what other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Decision<'a> {
    pub(super) line: u64,
    pub(super) time_us: u64,
    pub(super) limit: &'a str,
    pub(super) key: &'a str,
    pub(super) cost: u64,
    pub(super) allowed: bool,
    /// `None` where there is no limit.
    pub(super) remaining: Option<u64>,
    /// `None` when it never fits.
    pub(super) retry_after_us: Option<u64>,
    pub(super) reset_after_us: u64,
    pub(super) delay_us: u64,
    /// Only where a shadow limit would have denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) would_deny: Option<bool>,
    /// Only where there are several files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<&'a str>,
}

/// What messages call stdout; no path reads so.
const STDOUT: &str = "to stdout";

/// Where decisions go.
pub(super) enum Decisions {
    /// Nobody asked for them.
    Nowhere,
    /// To stdout, or to something that is not a plain file.
    Stream { name: String, out: Box<dyn Write> },
    /// To a plain file, which is not there yet.
    File { name: String, out: BufWriter<File>, draft: Draft },
}

/// A file under another name. Unless it is published, it is removed.
pub(super) struct Draft {
    path: PathBuf,
    target: PathBuf,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After publishing there is nothing left here, and that is as it should be.
        let _ = fs::remove_file(&self.path);
    }
}

impl Decisions {
    /// Opens the place, before any work is done: a place that cannot be written to should cost nobody a long replay.
    pub(super) fn open(path: Option<&Path>, config: &Path, logs: &[PathBuf]) -> Result<Decisions, Failure> {
        let Some(path) = path else { return Ok(Decisions::Nowhere) };
        if path.as_os_str() == "-" {
            return Ok(Decisions::Stream {
                name: STDOUT.to_string(),
                out: Box::new(BufWriter::new(io::stdout())),
            });
        }
        let name = path.display().to_string();
        let failed = |error: io::Error| Failure::writing(&name, &error);
        // A link is followed, so that it still stands afterwards and its file is the one that changes.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let is_target = |input: &Path| fs::canonicalize(input).is_ok_and(|input| input == target);
        let input = match logs.iter().any(|log| is_target(log)) {
            true => Some("one of the logs"),
            false => is_target(config).then_some("the config"),
        };
        if let Some(input) = input {
            return Err(Failure::new(format!("cannot write {name}: it is {input}; name another file")));
        }
        match fs::metadata(&target) {
            Ok(found) if found.is_dir() => {
                Err(Failure::new(format!("cannot write {name}: it is a directory; name a file in it")))
            }
            Ok(found) if !found.is_file() => {
                let out = OpenOptions::new().write(true).open(&target).map_err(failed)?;
                Ok(Decisions::Stream { name, out: Box::new(BufWriter::new(out)) })
            }
            _ => {
                let (draft, file) = Draft::create(target).map_err(failed)?;
                Ok(Decisions::File { name, out: BufWriter::new(file), draft })
            }
        }
    }

    /// Whether they go to stdout, so that nothing else may.
    pub(super) fn fill_stdout(&self) -> bool {
        matches!(self, Decisions::Stream { name, .. } if name == STDOUT)
    }

    /// Whether nobody wants them.
    pub(super) fn unwanted(&self) -> bool {
        matches!(self, Decisions::Nowhere)
    }

    /// Writes one.
    pub(super) fn write(&mut self, decision: &Decision<'_>) -> Result<(), Failure> {
        let (name, out): (&str, &mut dyn Write) = match self {
            Decisions::Nowhere => return Ok(()),
            Decisions::Stream { name, out } => (name, out),
            Decisions::File { name, out, .. } => (name, out),
        };
        serde_json::to_writer(&mut *out, decision)
            .map_err(io::Error::from)
            .and_then(|()| out.write_all(b"\n"))
            .map_err(|error| Failure::writing(name, &error))
    }

    /// Says that the last one was written: now the file appears.
    pub(super) fn finish(self) -> Result<(), Failure> {
        match self {
            Decisions::Nowhere => Ok(()),
            Decisions::Stream { name, mut out } => {
                out.flush().map_err(|error| Failure::writing(&name, &error))
            }
            Decisions::File { name, out, draft } => out
                .into_inner()
                .map_err(io::IntoInnerError::into_error)
                .and_then(|file| file.sync_all())
                .and_then(|()| fs::rename(&draft.path, &draft.target))
                .map_err(|error| Failure::writing(&name, &error)),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_order_are_the_contract() {
        let mut decision = Decision {
            line: 7,
            time_us: 1_700_000_000_000_000,
            limit: "api",
            key: "user:42",
            cost: 1,
            allowed: false,
            remaining: Some(0),
            retry_after_us: Some(200_000),
            reset_after_us: 2_000_000,
            delay_us: 0,
            would_deny: None,
            file: None,
        };
        let contract = r#"{"line":7,"time_us":1700000000000000,"limit":"api","key":"user:42","cost":1,"allowed":false,"remaining":0,"retry_after_us":200000,"reset_after_us":2000000,"delay_us":0}"#;
        assert_eq!(serde_json::to_string(&decision).unwrap(), contract);
        decision.retry_after_us = None;
        (decision.would_deny, decision.file) = (Some(true), Some("a.csv"));
        let text = serde_json::to_string(&decision).unwrap();
        assert!(text.contains(r#""retry_after_us":null"#), "{text}");
        assert!(text.ends_with(r#""delay_us":0,"would_deny":true,"file":"a.csv"}"#), "{text}");
    }
}
