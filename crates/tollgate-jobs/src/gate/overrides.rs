//! Overrides that are set at run time for limits that jobs charge: read from the store, as servers do, and put over those of the policies.
//!
//! The store's revision is asked for twice a second, and the records are read when it has changed. One that ends is taken away at its
//! time by the store's clock. While the store does not answer, what is known stays in force and ends all the same. Where an override of a
//! limit that jobs charge has changed, waiting jobs are called, as after any other change of limits.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tollgate::Policy;
use tollgate::config::{StoredOverride, with_overrides};
use tollgate::store::{Micros, Record, RecordKind};

use super::{JobGate, WeakGate};
use crate::limits::JobsConfig;

/// How often the store is asked for the revision.
const LOOK: Duration = Duration::from_millis(500);

/// What is known of the overrides in the store.
#[derive(Debug, Default)]
pub(super) struct Overrides {
    known: Mutex<Known>,
    applied: Mutex<Applied>,
}

/// The policy without overrides, and the one that was put in place with them. Policies change only with its lock held.
pub(super) type Applied = Option<(Policy, Policy)>;

#[derive(Debug, Default)]
struct Known {
    revision: Option<u64>,
    all: Vec<(StoredOverride, Option<Micros>)>,
    /// What the store's clock showed, and when.
    clock: Option<(Micros, Instant)>,
    /// Whether the last look failed.
    is_stale: bool,
}

impl Known {
    /// Those that have not ended by the store's clock, with their ends.
    fn in_force(&self) -> impl Iterator<Item = (&StoredOverride, Option<Duration>)> {
        let (seen, at) = self.clock.unwrap_or((Micros::ZERO, Instant::now()));
        let now = seen.saturating_add(Micros::from(at.elapsed()));
        let left = move |ends: Micros| Duration::from(ends.saturating_sub(now));
        let all = self.all.iter().map(move |(one, ends)| (one, ends.map(left)));
        all.filter(|(_, left)| left.is_none_or(|left| !left.is_zero()))
    }
}

/// An override as the store has it; one that cannot be read is warned of and left out.
fn read(record: &Record) -> Option<(StoredOverride, Option<Micros>)> {
    match StoredOverride::read(&record.payload) {
        Ok(one) => Some((one, record.ends)),
        Err(why) => {
            tracing::warn!(id = record.id, "an override in the store is left out: {why}");
            None
        }
    }
}

impl Overrides {
    /// Leave to change policies.
    pub(super) fn lock(&self) -> parking_lot::MutexGuard<'_, Applied> {
        self.applied.lock()
    }

    /// A policy with what is in force over its own overrides.
    pub(super) fn over(&self, policy: &Policy) -> Policy {
        let known = self.known.lock();
        with_overrides(policy, known.in_force().map(|(one, _)| one))
    }

    /// How long nothing happens by itself.
    fn rest(&self) -> Duration {
        let next = self.known.lock().in_force().filter_map(|(_, left)| left).min();
        next.map_or(LOOK, |left| LOOK.min(left))
    }
}

impl JobGate {
    /// The policy without what was set at run time. Another that was put in place beside this gate counts as it is.
    pub(super) fn base(&self, applied: &Applied) -> Policy {
        let current = self.inner.tollgate.policy();
        match applied {
            Some((base, over)) if *over == *current => base.clone(),
            _ => (*current).clone(),
        }
    }

    /// Reads the overrides that were set at run time, and puts them in place. A gate that is connected does so by itself.
    pub async fn read_overrides(&self) {
        self.look_at_overrides().await;
    }

    /// Asks the store what has changed, and applies it.
    pub(super) async fn look_at_overrides(&self) {
        let revision = self.inner.overrides.known.lock().revision;
        let records = self.inner.tollgate.records(RecordKind::Override, revision).await;
        {
            let mut known = self.inner.overrides.known.lock();
            match &records {
                Ok(records) => {
                    known.clock = Some((records.now, Instant::now()));
                    known.revision = Some(records.revision);
                    if let Some(changed) = &records.changed {
                        known.all = changed.iter().filter_map(read).collect();
                    }
                    if std::mem::take(&mut known.is_stale) {
                        tracing::info!("overrides are followed again: the store answers");
                    }
                }
                Err(error) if !std::mem::replace(&mut known.is_stale, true) => match error.is_transient() {
                    true => tracing::warn!(
                        "overrides that are set now are not seen until the store answers: {error}"
                    ),
                    // A store without records.
                    false => tracing::debug!("overrides are not followed: {error}"),
                },
                Err(_) => {}
            }
        }
        if self.apply_overrides() {
            self.call_all().await;
        }
    }

    /// Puts what is in force in place; answers whether that changes what jobs may do.
    fn apply_overrides(&self) -> bool {
        let mut applied = self.inner.overrides.lock();
        let base = self.base(&applied);
        let over = self.inner.overrides.over(&base);
        let before = self.inner.tollgate.policy();
        if *before == over {
            return false;
        }
        if let Err(error) = self.inner.tollgate.reload(over.clone()) {
            tracing::error!("overrides could not be applied: {error}");
            return false;
        }
        tracing::info!("overrides that are set at run time have changed");
        let names = charged(self.inner.jobs.read().config());
        let differs = names.iter().any(|name| before.rule(name) != over.rule(name));
        *applied = Some((base, over));
        if differs {
            self.changed();
        }
        differs
    }
}

/// The limits that jobs charge.
pub(super) fn charged(jobs: &JobsConfig) -> BTreeSet<String> {
    let own = jobs.scopes().flat_map(|(scope, limits)| limits.named(scope)).map(|(name, _)| name);
    let shared = jobs.scopes().flat_map(|(_, limits)| limits.limits.iter().cloned());
    own.chain(shared).collect()
}

/// Follows what is set on any server, for as long as the gate is there.
pub(super) async fn follow(gate: WeakGate) {
    loop {
        let Some(rest) = gate.upgrade().map(|gate| gate.inner.overrides.rest()) else { return };
        tokio::time::sleep(rest).await;
        let Some(gate) = gate.upgrade() else { return };
        gate.look_at_overrides().await;
    }
}
