//! The fast path: charges keys that already have local counters, without parsing, locking or allocating.
//!
//! Every other case goes to the slow path (`engine/local.rs`), with nothing charged. Answers are written in place: copying a
//! value right after it was written would stall until the write completes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::Cost;
use tollgate_store::{MemoryCharge, MemoryLimit, MemoryStore};

use super::limits::Limits;
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

/// Longer keys are parsed before they are hashed, because a hostile key can have any length.
const KNOWN_BYTES: usize = 1_024;

impl Engine {
    /// Fast path of one plain charge: the key already has local counters, so it is valid and need not be parsed. Writes the
    /// numbers into `outcome`, which belongs to this limit and has the store as its source; writing in place avoids a stall on a
    /// copy. Returns false, with nothing charged, if the charge must take the slow path.
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

    /// The same, for limits whose denials are reported.
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
        // Reading the clock costs about as much as finding the key: calls that are not sampled are timed only for a log line.
        let took = started.filter(|_| is_sampled).map(|started| started.elapsed());
        entry.meter.count_fast_path(text, !is_denied, took);
        if is_denied {
            self.show_denial(entry, text, cost, outcome.numbers(), took);
            self.log_denial(entry, text, cost, outcome.numbers(), 1, started);
        }
        true
    }

    /// One plain charge on a local limit that was looked up before: the whole path of `Limiter::check`.
    #[inline]
    pub(crate) fn charge_one(
        self: &Arc<Engine>,
        entry: &Arc<Entry>,
        key: &KeyRef<'_>,
        cost: Cost,
    ) -> Outcome {
        match key.as_text() {
            Some(text) => self.charge_text(entry, text, key, cost),
            None => self.charge_one_general(entry.newest(), key, cost),
        }
    }

    /// The common case, in one function up to the answer. The answer is written where the caller wants it, because a copy would
    /// stall on the write.
    #[inline(never)]
    fn charge_text(
        self: &Arc<Engine>,
        entry: &Arc<Entry>,
        text: &str,
        key: &KeyRef<'_>,
        cost: Cost,
    ) -> Outcome {
        let entry = entry.newest();
        if entry.path == Path::Fast
            && let Some(memory) = entry.memory()
            && text.len() <= KNOWN_BYTES
            && let Some(charged) = memory.charge_known_bucket(text, cost)
        {
            return Outcome::new(entry.name, charged.outcome(), Source::Store);
        }
        self.charge_one_general(entry, key, cost)
    }

    /// The same for other strategies, keys that are not text or have no counters yet, and limits that count or report.
    #[inline(never)]
    fn charge_one_general(self: &Arc<Engine>, entry: &Arc<Entry>, key: &KeyRef<'_>, cost: Cost) -> Outcome {
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

    /// Charges one unit to each of many keys of one local limit, each separately: the whole path of `Limiter::check_many`. A key
    /// that cannot take the fast path takes the path of [`charge_one`](Self::charge_one), in its turn.
    pub(crate) fn charge_many<K: AsRef<str>>(
        self: &Arc<Engine>,
        entry: &Arc<Entry>,
        keys: &[K],
        outcomes: &mut Vec<Outcome>,
    ) {
        let entry = entry.newest();
        let charge = |key: &K| self.charge_one(entry, &KeyRef::from(key.as_ref()), Cost::ONE);
        let is_fast = matches!(entry.path, Path::Fast | Path::FastCounted);
        let is_short = |key: &K| key.as_ref().len() <= KNOWN_BYTES;
        let Some(memory) = entry.memory().filter(|_| is_fast && keys.iter().all(is_short)) else {
            return outcomes.extend(keys.iter().map(charge));
        };
        let is_counted = entry.path == Path::FastCounted;
        let started = (is_counted && is_sampled()).then(Instant::now);
        let start = outcomes.len();
        let unanswered = Outcome::new(entry.name, kernel::Outcome::BLOCKED, Source::Store);
        outcomes.resize(start + keys.len(), unanswered);
        let mut slow = SmallVec::<[usize; 16]>::new();
        memory.charge_known_many(
            keys,
            Cost::ONE,
            &mut outcomes[start..],
            Outcome::numbers_mut,
            |index, outcome| {
                *outcome = charge(&keys[index]);
                slow.push(index);
            },
        );
        if is_counted {
            // The keys of the slow path were counted there, in order.
            let mut slow = slow.into_iter().peekable();
            let answers = keys.iter().zip(&outcomes[start..]).enumerate();
            let fast = answers.filter(|(index, _)| slow.next_if_eq(index).is_none());
            let fast = fast.map(|(_, (key, outcome))| (key.as_ref(), outcome.is_allowed()));
            entry.meter.count_fast_path_many(fast, started.map(|started| started.elapsed()));
        }
    }

    /// A plain charge of several local limits: the whole path of `Limiter::charge_all`. The decision is written where the caller
    /// wants it.
    #[inline]
    pub(crate) fn charge_all(self: &Arc<Engine>, charges: &[Charge<'_>]) -> Result<Decision, Error> {
        let Backend::Memory(store) = &self.backend else { return Err(Error::not_local()) };
        if let [one, two] = charges
            && let Some(decision) = self.charge_two_known(store, one, two)
        {
            return Ok(decision);
        }
        self.charge_all_general(store, charges)
    }

    /// The same for limits other than two token buckets.
    #[inline(never)]
    fn charge_all_general(
        self: &Arc<Engine>,
        store: &MemoryStore,
        charges: &[Charge<'_>],
    ) -> Result<Decision, Error> {
        let mut answer = Ok(Decision::empty());
        let is_known = match &mut answer {
            Ok(decision) => self.charge_all_known(store, charges, decision),
            Err(_) => false,
        };
        if !is_known {
            answer = self.charge_all_slowly(store, charges);
        }
        answer
    }

    #[cold]
    fn charge_all_slowly(
        self: &Arc<Engine>,
        store: &MemoryStore,
        charges: &[Charge<'_>],
    ) -> Result<Decision, Error> {
        let mut request = Request::new(Charges::All(charges), Mode::AllOrNone);
        Ok(self.charge_local_slowly(store, &mut request)?.decision)
    }

    /// Fast path of a plain local charge, into an empty decision. Returns false, with nothing charged, if it must take the slow
    /// path.
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

    /// Charges two token buckets whose limits were looked up before, without the extra work of [other
    /// charges](Self::charge_several_known).
    #[inline(always)]
    fn charge_two_known(&self, store: &MemoryStore, one: &Charge<'_>, two: &Charge<'_>) -> Option<Decision> {
        let (first, one) = self.find_known(None, one)?;
        let (second, two) = self.find_known(None, two)?;
        if (first.path, second.path) != (Path::Fast, Path::Fast) {
            return None;
        }
        let [one, two] = store.charge_two_known(&one, &two)?;
        let one = Outcome::new(first.name, one.outcome(), Source::Store);
        Some(Decision::of_two(one, Outcome::new(second.name, two.outcome(), Source::Store)))
    }

    /// The counters of a charge, if it may take the fast path. `limits` are the limits by name.
    #[inline(always)]
    fn find_known<'c>(
        &self,
        limits: Option<&'c Limits>,
        charge: &'c Charge<'_>,
    ) -> Option<(&'c Arc<Entry>, MemoryCharge<'c>)> {
        let entry = match charge.limit.0 {
            Given::Handle(limit) => self.own(limit.entry.newest())?,
            Given::Name(name) => limits?.get(name)?,
        };
        let (key, cost) = (charge.key.as_text()?, Cost::new(charge.cost)?);
        if entry.path == Path::Slow || key.len() > KNOWN_BYTES {
            return None;
        }
        Some((entry, MemoryCharge { limit: entry.memory()?, key, cost, shadow: false }))
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
                    // Reports a denial. The lock is released first: an observer may charge or reload.
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
        let mut in_memory: SmallVec<[MemoryCharge<'_>; 16]> = SmallVec::new();
        let mut entries: SmallVec<[&Arc<Entry>; 16]> = SmallVec::new();
        let (mut is_counted, mut is_reported) = (false, false);
        for charge in charges {
            let (entry, known) = self.find_known(limits.as_deref(), charge)?;
            is_counted |= entry.path != Path::Fast;
            is_reported |= entry.path == Path::FastDenials;
            in_memory.push(known);
            entries.push(entry);
        }
        let is_sampled = is_counted && is_sampled();
        let started = (is_sampled || (is_reported && self.watch.times_all(false))).then(Instant::now);
        decision.reserve(charges.len());
        let mut names = entries.iter().map(|entry| entry.name);
        store.charge_known(&in_memory, |numbers| {
            decision.push(Outcome::new(names.next().unwrap_or_default(), numbers, Source::Store));
        })?;
        decision.bind();
        if is_counted {
            let took = started.filter(|_| is_sampled).map(|started| started.elapsed());
            for ((entry, charge), outcome) in entries.iter().zip(&in_memory).zip(decision.outcomes()) {
                entry.meter.count_fast_path(charge.key, outcome.is_allowed(), took);
            }
            if is_reported && !decision.is_allowed() {
                let entries: SmallVec<[Arc<Entry>; 16]> = entries.into_iter().cloned().collect();
                // An observer may charge, or reload.
                drop(in_memory);
                drop(limits);
                self.report_several_denied(&entries, charges, decision, started, took);
            }
        }
        Some(())
    }

    /// Reports the limits that denied a charge over several limits. They are counted already.
    #[cold]
    fn report_several_denied(
        &self,
        entries: &[Arc<Entry>],
        charges: &[Charge<'_>],
        decision: &Decision,
        started: Option<Instant>,
        took: Option<Duration>,
    ) {
        let limits = entries.iter().zip(charges).zip(decision.outcomes());
        for (index, ((entry, charge), outcome)) in limits.enumerate() {
            let (Some(key), Some(cost), false) =
                (charge.key.as_text(), Cost::new(charge.cost), outcome.is_allowed())
            else {
                continue;
            };
            self.show_denial(entry, key, cost, outcome.numbers(), took);
            if index == decision.binding_index() {
                self.log_denial(entry, key, cost, outcome.numbers(), charges.len(), started);
            }
        }
    }
}
