//! The fast path: keys that already have counters in this process are charged without parsing, locking or allocating.
//!
//! Whatever is not as simple as that is left to the slow path (`engine/local.rs`), with nothing charged. Answers are written in
//! place: a copy of what was just written has to wait for it.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::Cost;
use tollgate_store::{MemoryCharge, MemoryLimit, MemoryStore};

use super::request::{Charges, Mode, Request};
use super::{Backend, Engine, MOST_LIMITS};
use crate::charge::{Charge, Given};
use crate::decision::Decision;
use crate::error::Error;
use crate::key::KeyRef;
use crate::key::reference::KeyText;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Entry, Path};
use crate::telemetry::{DecisionMeter, Recorder, is_sampled};

/// Texts longer than this are parsed before they are hashed: a hostile one may be of any length.
const KNOWN_BYTES: usize = 1_024;

impl Engine {
    /// Fast path of one plain charge: the key already has counters in this process, so it is valid and need not be parsed. The
    /// numbers are written into `outcome`, which is of this limit and by the store: a copy of what was just written has to wait for
    /// it. False, and nothing is charged, if it has to take the slow path.
    #[inline]
    pub(crate) fn charge_known(&self, entry: &Entry, text: &str, cost: Cost, outcome: &mut Outcome) -> bool {
        let Some(memory) = entry.memory().filter(|_| text.len() <= KNOWN_BYTES) else { return false };
        match entry.path {
            Path::Fast => memory.charge_known(text, cost, outcome.numbers_mut()),
            Path::FastCounted => {
                let started = is_sampled().then(Instant::now);
                let is_known = memory.charge_known(text, cost, outcome.numbers_mut());
                if is_known {
                    let took = started.map(|started| started.elapsed());
                    entry.meter.count_fast_path(text, outcome.is_allowed(), took);
                }
                is_known
            }
            Path::FastDenials => self.charge_known_reported(entry, memory, text, cost, outcome),
            Path::Slow => false,
        }
    }

    /// The same where denials are reported.
    fn charge_known_reported(
        &self,
        entry: &Entry,
        memory: &MemoryLimit,
        text: &str,
        cost: Cost,
        outcome: &mut Outcome,
    ) -> bool {
        let is_sampled = is_sampled();
        let started = (is_sampled || self.watch.times_all(false)).then(Instant::now);
        if !memory.charge_known(text, cost, outcome.numbers_mut()) {
            return false;
        }
        let is_denied = !outcome.is_allowed();
        // Reading the clock costs about as much as finding the key: an admission that is not sampled is not timed.
        let took = started.filter(|_| is_sampled || is_denied).map(|started| started.elapsed());
        entry.meter.count_fast_path(text, !is_denied, took.filter(|_| is_sampled));
        if is_denied {
            self.report_denial(entry, text, cost, outcome.numbers(), took);
        }
        true
    }

    /// One plain charge on a limit that is looked up already, in this process: the whole path of `Limiter::check`, in one function.
    #[inline(never)]
    pub(crate) fn charge_one(self: &Arc<Engine>, entry: &Arc<Entry>, key: KeyRef<'_>, cost: Cost) -> Outcome {
        let entry = entry.newest();
        // What nearly all calls are, up to the answer, which is written where the caller wants it: a copy would have to wait for it.
        if entry.path == Path::Fast
            && let Some(memory) = entry.memory()
            && let Some(text) = key.as_text().filter(|text| text.len() <= KNOWN_BYTES)
            && let Some(charged) = memory.charge_known_bucket(text, cost)
        {
            return Outcome::new(entry.name, charged.outcome(), Source::Store);
        }
        self.charge_one_otherwise(entry, key, cost)
    }

    /// The same for other strategies, keys that are not text or not known, and limits that count or report.
    #[inline(never)]
    fn charge_one_otherwise(self: &Arc<Engine>, entry: &Arc<Entry>, key: KeyRef<'_>, cost: Cost) -> Outcome {
        let mut outcome = Outcome::new(entry.name, kernel::Outcome::BLOCKED, Source::Store);
        let is_known = match key.as_text() {
            Some(text) => self.charge_known(entry, text, cost, &mut outcome),
            None => self.charge_known(entry, key.text(&mut KeyText::new()), cost, &mut outcome),
        };
        if !is_known {
            outcome = self.charge_one_slowly(entry, key, cost);
        }
        outcome
    }

    /// A plain charge of several limits in this process: the whole path of `Limiter::charge_all`.
    #[inline]
    pub(crate) fn charge_all(self: &Arc<Engine>, charges: &[Charge<'_>]) -> Result<Decision, Error> {
        let Backend::Memory(store) = &self.backend else { return Err(Error::not_local()) };
        let mut decision = Decision::empty();
        if !self.charge_all_known(store, charges, &mut decision) {
            let mut request = Request::new(Charges::All(charges), Mode::AllOrNone);
            decision = self.charge_local_slowly(store, &mut request)?.decision;
        }
        Ok(decision)
    }

    /// Fast path of a plain charge in this process, into an empty decision. False, and nothing is charged, if it has to take the
    /// slow path.
    #[inline]
    pub(super) fn charge_all_known(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        decision: &mut Decision,
    ) -> bool {
        match charges {
            [charge] => self.charge_one_known(charge, decision).is_some(),
            _ => self.charge_several_known(store, charges, decision).is_some(),
        }
    }

    #[inline]
    fn charge_one_known(&self, charge: &Charge<'_>, decision: &mut Decision) -> Option<()> {
        let cost = Cost::new(charge.cost)?;
        let mut room = KeyText::new();
        let text = charge.key.as_text().unwrap_or_else(|| charge.key.text(&mut room));
        let mut known = |entry: &Entry| {
            let mut outcome = Outcome::new(entry.name, kernel::Outcome::BLOCKED, Source::Store);
            self.charge_known(entry, text, cost, &mut outcome).then(|| decision.push(outcome))
        };
        match charge.limit.0 {
            Given::Handle(limit) => known(self.own(limit.entry.newest())?),
            Given::Name(name) => {
                let limits = self.limits.read();
                let entry = limits.get(name)?;
                match entry.path {
                    // A denial is reported: an observer may charge, or reload.
                    Path::FastDenials => {
                        let entry = entry.clone();
                        drop(limits);
                        known(&entry)
                    }
                    _ => known(entry),
                }
            }
        }
    }

    #[inline]
    fn charge_several_known(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        decision: &mut Decision,
    ) -> Option<()> {
        if charges.is_empty() || charges.len() > MOST_LIMITS {
            return None;
        }
        let is_named = |charge: &Charge<'_>| matches!(charge.limit.0, Given::Name(_));
        let limits = charges.iter().any(is_named).then(|| self.limits.read());
        let mut items: SmallVec<[MemoryCharge<'_>; 4]> = SmallVec::new();
        let mut entries: SmallVec<[&Entry; 4]> = SmallVec::new();
        let mut is_counted = false;
        for charge in charges {
            let entry = match charge.limit.0 {
                Given::Handle(limit) => self.own(limit.entry.newest())?,
                Given::Name(name) => limits.as_ref()?.get(name)?,
            };
            let (text, cost) = (charge.key.as_text()?, Cost::new(charge.cost)?);
            if !matches!(entry.path, Path::Fast | Path::FastCounted) || text.len() > KNOWN_BYTES {
                return None;
            }
            is_counted |= entry.path == Path::FastCounted;
            items.push(MemoryCharge { limit: entry.memory()?, key: text, cost, shadow: false });
            entries.push(entry);
        }
        let started = (is_counted && is_sampled()).then(Instant::now);
        let mut names = entries.iter().map(|entry| entry.name);
        store.charge_known(&items, |numbers| {
            decision.push(Outcome::new(names.next().unwrap_or_default(), numbers, Source::Store));
        })?;
        if is_counted {
            let took = started.map(|started| started.elapsed());
            for ((entry, item), outcome) in entries.iter().zip(&items).zip(decision.outcomes()) {
                entry.meter.count_fast_path(item.key, outcome.is_allowed(), took);
            }
        }
        decision.bind();
        Some(())
    }
}
