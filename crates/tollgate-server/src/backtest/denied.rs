//! Keys that were denied: how often, by which limits, and when and where first.
//!
//! The summary has those that were denied most. All of them go to `--denied-keys`, one JSON object each, and are compared where there are several
//! policies.

use std::io;

use serde::Serialize;

use super::output::Output;
use super::traffic::Request;
use crate::failure::Failure;

/// A key that was denied, and by which limits.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct DeniedKey {
    pub(super) key: String,
    pub(super) requests: u64,
    pub(super) denied: u64,
    pub(super) first_denied_us: u64,
    pub(super) first_denied_line: u64,
    /// Only where there are several files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_denied_file: Option<String>,
    pub(super) by: Vec<DeniedBy>,
}

/// One limit's part in it.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct DeniedBy {
    pub(super) limit: String,
    pub(super) denied: u64,
}

/// When and where a key was denied first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FirstDenial {
    pub(super) time_us: u64,
    pub(super) line: u64,
    pub(super) file: u16,
}

/// The first denial of each key, by its index.
#[derive(Debug, Default)]
pub(super) struct FirstDenials {
    /// For each key, its place in `firsts`, from 1 on; 0 is none.
    places: Vec<u32>,
    firsts: Vec<FirstDenial>,
}

impl FirstDenials {
    /// Notes a denial; only the first of a key is kept.
    pub(super) fn note(&mut self, key: u32, denied: &Request) {
        let index = key as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, 0);
        }
        if self.places[index] == 0 {
            let Request { time_us, line, file, .. } = *denied;
            self.firsts.push(FirstDenial { time_us, line, file });
            self.places[index] = u32::try_from(self.firsts.len()).unwrap_or(0);
        }
    }

    /// The first denial of a key; of a key that was never denied, the beginning of time.
    pub(super) fn of(&self, key: u32) -> FirstDenial {
        let place = self.places.get(key as usize).copied().unwrap_or(0) as usize;
        place.checked_sub(1).and_then(|place| self.firsts.get(place)).copied().unwrap_or_default()
    }
}

/// Where all keys that were denied go, if anybody wants them.
#[derive(Default)]
pub(super) struct DeniedKeys {
    /// To a file.
    pub(super) output: Option<Output>,
    /// To be compared with those of another policy: the key as it is shown, and how often it was denied.
    pub(super) kept: Option<Vec<(String, u64)>>,
}

impl DeniedKeys {
    pub(super) fn are_wanted(&self) -> bool {
        self.output.is_some() || self.kept.is_some()
    }

    pub(super) fn take(&mut self, denied: &DeniedKey) -> Result<(), Failure> {
        if let Some(kept) = &mut self.kept {
            kept.push((denied.key.clone(), denied.denied));
        }
        let Some(output) = &mut self.output else { return Ok(()) };
        output.write(|out| {
            serde_json::to_writer(&mut *out, denied).map_err(io::Error::from)?;
            out.write_all(b"\n")
        })
    }

    /// Says that the last one was written. Returns what was kept.
    pub(super) fn finish(self) -> Result<Vec<(String, u64)>, Failure> {
        self.output.map_or(Ok(()), Output::finish)?;
        Ok(self.kept.unwrap_or_default())
    }
}
