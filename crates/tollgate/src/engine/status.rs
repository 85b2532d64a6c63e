//! Reads the state of a key, and resets it.

use std::sync::Arc;

use tollgate_kernel::Cost;

use super::{Backend, Engine, conclude};
use crate::charge::LimitRef;
use crate::error::Error;
use crate::key::KeyRef;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Entry, EntryRef, KeyLimit};

impl Engine {
    /// What a key has used and has left. If a remote store fails, returns its error; there is no fallback.
    pub(crate) async fn status(&self, limit: LimitRef<'_>, key: KeyRef<'_>) -> Result<Outcome, Error> {
        let entry = self.find(&self.limits.read(), limit)?.clone();
        let Backend::Remote(remote) = &self.backend else { return Ok(self.status_local(&entry, key)) };
        let charge = [self.resolved(EntryRef::Borrowed(&entry), key.parse(), Cost::ONE)];
        let numbers = Box::pin(remote.status(&charge[0])).await?;
        let answers = numbers.map(|numbers| (numbers, Source::Store)).into_iter().collect();
        Ok(*conclude(&charge, answers).binding())
    }

    /// The same where the counters are in this process.
    pub(crate) fn status_local(&self, entry: &Arc<Entry>, key: KeyRef<'_>) -> Outcome {
        let charge = [self.resolved(EntryRef::Borrowed(entry.newest()), key.parse(), Cost::ONE)];
        let numbers = charge[0].memory_charge().map(|known| (known.limit.status(known.key), Source::Store));
        *conclude(&charge, numbers.into_iter().collect()).binding()
    }

    /// Forgets what a key was charged; false when nothing was remembered.
    pub(crate) async fn reset(&self, limit: LimitRef<'_>, key: KeyRef<'_>) -> Result<bool, Error> {
        let entry = self.find(&self.limits.read(), limit)?.clone();
        let key = key.parse()?;
        let started = self.operation_started();
        let forgotten = match (entry.key_limit(&key), &self.backend) {
            (KeyLimit::Counted { memory: Some(memory), .. }, _) => Ok(memory.forget(key.canonical())),
            (KeyLimit::Counted { stored, remote: Some(limit), .. }, Backend::Remote(remote)) => {
                Box::pin(remote.forget(stored, limit, key.canonical())).await
            }
            _ => Ok(false),
        };
        if forgotten.is_ok() {
            self.was_reset();
        }
        self.report_reset(&entry, &key, forgotten.as_ref().map(|forgotten| *forgotten), started);
        forgotten
    }

    /// The same where the counters are in this process. A malformed key was never charged.
    pub(crate) fn reset_local(&self, entry: &Arc<Entry>, key: KeyRef<'_>) -> bool {
        let Ok(key) = key.parse() else { return false };
        let started = self.operation_started();
        let forgotten = match entry.newest().key_limit(&key) {
            KeyLimit::Counted { memory: Some(memory), .. } => memory.forget(key.canonical()),
            _ => false,
        };
        self.was_reset();
        self.report_reset(entry, &key, Ok(forgotten), started);
        forgotten
    }

    fn was_reset(&self) {
        self.resets.notify();
        self.lines.nudge();
    }
}
