//! The denial cache: a key that the store has denied until some time is denied in this process until then, without a store call.
//!
//! A cached answer is the answer that the store would give. A denial counts from when its call was *sent*, which is before the
//! store decided, so it ends before the store would admit. It is used only for charges that it fully determines: the same cost,
//! if that was one more than was left (then the remaining amount cannot change before the denial ends), or, in a fixed window,
//! that cost or any higher one. Never cached: shadow limits, concurrency limits (a lease may be released at any time), costs that
//! can never fit, and charges over several limits, because the other limits are known only to the store.
//!
//! An admission, a refund or a settlement in this process removes the cached denials of its keys. A reset, and the settlement of
//! another process's reservation, remove all cached denials, but only after the store has carried them out: a client cannot clear
//! the cache with invented ids. Releases and renewals of leases remove nothing. What *other* processes give back or reset is not
//! seen, so no denial is used for longer than a cap. Memory is bounded: a fixed number of slots, where a new entry overwrites an
//! old one at the price of a round trip.
//!
//! While the store does not answer, a cached denial does more ([`Denials::last`]): local counters start empty, so a key that the
//! store denied would be admitted again. The fallback denies it until the store itself would have admitted it, regardless of the
//! cap.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};

use super::fingerprint::shard_of;

const SHARDS: usize = 256;
const SLOTS_IN_A_SHARD: usize = 64;

/// The denials that are still true.
pub(crate) struct Denials {
    /// How long a denial is used at most; zero disables the cache.
    cap: Micros,
    /// Counts events that may have ended any denial: resets, and settlements of other processes' reservations.
    epoch: AtomicU64,
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Default)]
struct Shard {
    /// Counts changes to the keys of the shard.
    version: u64,
    /// Empty until the first denial.
    slots: Vec<Option<Denial>>,
}

struct Denial {
    fingerprint: u128,
    epoch: u64,
    cost: Cost,
    /// Whether it answers higher costs too.
    and_above: bool,
    sent: Micros,
    /// Until when it replaces the store's answer.
    until: Micros,
    /// Until when the store would deny, as far as this process knows.
    ends: Micros,
    outcome: Outcome,
}

/// The state of the cache when a call was sent: its denial is cached only if its key has not changed since.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    fingerprint: u128,
    version: u64,
    epoch: u64,
    at: Micros,
}

impl Denials {
    pub(crate) fn new(cap: Micros) -> Denials {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Denials { cap, epoch: AtomicU64::new(0), shards }
    }

    /// Whether denials of a limit are cached at all.
    pub(crate) fn covers(&self, limit: &Limit) -> bool {
        self.cap > Micros::ZERO && limit.strategy() != Strategy::Concurrency
    }

    /// The cached denial of this charge, or what is needed to cache the denial of its call. Only for limits that
    /// [`covers`](Self::covers) accepts.
    pub(crate) fn find(&self, fingerprint: u128, cost: Cost, now: Micros) -> Result<Outcome, Sent> {
        let (shard, slot) = self.place(fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        let sent = Sent { fingerprint, version: shard.version, epoch, at: now };
        let is_true = |denial: &&Denial| denial.is_of(fingerprint, epoch, now) && denial.answers(cost);
        let found = shard.slots.get(slot).and_then(Option::as_ref);
        found.filter(is_true).map(|denial| denial.outcome_at(now)).ok_or(sent)
    }

    /// The last denial of a key, for a call that the store does not answer: of this cost or a lower one, and not over yet. Other
    /// processes may have given something back meanwhile; the key is denied rather than admitted twice.
    pub(crate) fn last(&self, fingerprint: u128, cost: Cost, now: Micros) -> Option<Outcome> {
        let (shard, slot) = self.place(fingerprint);
        let denial = shard.slots.get(slot)?.as_ref()?;
        let is_true = denial.fingerprint == fingerprint && now < denial.ends && cost >= denial.cost;
        is_true.then(|| denial.outcome_at(now))
    }

    /// What is needed to cache the denial of a call that bypasses the cache.
    pub(crate) fn sent(&self, fingerprint: u128, now: Micros) -> Sent {
        let (shard, _) = self.place(fingerprint);
        Sent { fingerprint, version: shard.version, epoch: self.epoch.load(Ordering::Acquire), at: now }
    }

    /// Learns from the store's answer to a charge on one key: caches a denial if that is worthwhile; an admission removes one.
    pub(crate) fn learn(&self, sent: Sent, limit: &Limit, cost: Cost, outcome: &Outcome) {
        if outcome.allowed {
            return self.changed(sent.fingerprint);
        }
        let and_above = limit.strategy() == Strategy::FixedWindow;
        let leaves_one_less = cost.get() == outcome.remaining.saturating_add(1);
        let cached_for = if and_above || leaves_one_less { self.cap } else { Micros::ZERO };
        let (mut shard, slot) = self.place(sent.fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        if shard.version == sent.version && epoch == sent.epoch {
            shard.keep(slot, sent, cost, and_above, cached_for, outcome);
        }
    }

    /// Learns from the outcome of one of several limits, only for [`last`](Self::last).
    pub(crate) fn note(&self, fingerprint: u128, sent: Micros, cost: Cost, outcome: &Outcome) {
        let (mut shard, slot) = self.place(fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        let sent = Sent { fingerprint, version: shard.version, epoch, at: sent };
        shard.keep(slot, sent, cost, false, Micros::ZERO, outcome);
    }

    /// Removes the denial of a key: the key was charged or refunded, or may have been.
    pub(crate) fn changed(&self, fingerprint: u128) {
        let (mut shard, slot) = self.place(fingerprint);
        shard.version += 1;
        if let Some(found) = shard.slots.get_mut(slot) {
            found.take_if(|denial| denial.fingerprint == fingerprint);
        }
    }

    /// A call of this key is lost, so the store's next answer is not known. Its last denial stays, because a charge gives nothing
    /// back.
    pub(crate) fn doubted(&self, fingerprint: u128) {
        let (mut shard, slot) = self.place(fingerprint);
        shard.version += 1;
        if let Some(Some(denial)) = shard.slots.get_mut(slot)
            && denial.fingerprint == fingerprint
        {
            denial.until = Micros::ZERO;
        }
    }

    /// Removes the denials of these keys when the guard is dropped: they are getting something back.
    pub(crate) fn end(&self, keys: SmallVec<[u128; 2]>) -> End<'_> {
        End { denials: self, keys }
    }

    /// Removes all denials when the guard is dropped: some keys are getting something back, and it is not known which.
    pub(crate) fn end_all(&self) -> EndAll<'_> {
        EndAll(self)
    }

    fn place(&self, fingerprint: u128) -> (parking_lot::MutexGuard<'_, Shard>, usize) {
        let slot = shard_of(fingerprint >> 64, SLOTS_IN_A_SHARD);
        (self.shards[shard_of(fingerprint, SHARDS)].lock(), slot)
    }
}

/// Removes all denials when dropped, so that it happens however the call in between ends.
pub(crate) struct EndAll<'a>(&'a Denials);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// Removes the denials of some keys when dropped, so that it happens however the call in between ends. Their last denials stay,
/// unless something was [given back](Self::given_back).
pub(crate) struct End<'a> {
    denials: &'a Denials,
    keys: SmallVec<[u128; 2]>,
}

impl End<'_> {
    /// The store has given something back to these of the keys.
    pub(crate) fn given_back(self, keys: &[u128]) {
        keys.iter().for_each(|key| self.denials.changed(*key));
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.keys.iter().for_each(|key| self.denials.doubted(*key));
    }
}

impl Shard {
    /// Caches a denial that ends, unless a cached one covers at least as much.
    fn keep(
        &mut self,
        slot: usize,
        Sent { fingerprint, epoch, at, .. }: Sent,
        cost: Cost,
        and_above: bool,
        cached_for: Micros,
        outcome: &Outcome,
    ) {
        let Some(wait) = outcome.retry_after else { return };
        if self.slots.is_empty() {
            self.slots.resize_with(SLOTS_IN_A_SHARD, || None);
        }
        let ends = at.saturating_add(wait);
        let covers_as_much = |denial: &Denial| match cached_for > Micros::ZERO {
            true => denial.is_of(fingerprint, epoch, at) && denial.answers(cost),
            false => denial.fingerprint == fingerprint && at < denial.ends && denial.cost <= cost,
        };
        if !self.slots[slot].as_ref().is_some_and(covers_as_much) {
            let (until, outcome) = (at.saturating_add(wait.min(cached_for)), *outcome);
            let denial = Denial { fingerprint, epoch, cost, and_above, sent: at, until, ends, outcome };
            self.slots[slot] = Some(denial);
        }
    }
}

impl Denial {
    fn is_of(&self, fingerprint: u128, epoch: u64, now: Micros) -> bool {
        self.fingerprint == fingerprint && self.epoch == epoch && now < self.until
    }

    /// The outcome at a later time.
    fn outcome_at(&self, now: Micros) -> Outcome {
        let passed = now.saturating_sub(self.sent);
        Outcome {
            retry_after: self.outcome.retry_after.map(|wait| wait.saturating_sub(passed)),
            reset_after: self.outcome.reset_after.saturating_sub(passed),
            ..self.outcome
        }
    }

    fn answers(&self, cost: Cost) -> bool {
        cost == self.cost || self.and_above && cost > self.cost && cost.get() <= self.outcome.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: Micros = Micros::from_millis(100);

    fn at(us: u64) -> Micros {
        Micros::new(1_000_000 + us)
    }

    fn cost(units: u64) -> Cost {
        Cost::new(units).unwrap()
    }

    fn denied(remaining: u64, retry_us: u64) -> Outcome {
        let (retry_after, reset_after) = (Some(Micros::new(retry_us)), Micros::new(retry_us + 10));
        Outcome { capacity: 5, remaining, retry_after, reset_after, ..Outcome::BLOCKED }
    }

    fn bucket() -> Limit {
        Limit::token_bucket("1/s", 5).unwrap()
    }

    fn window() -> Limit {
        Limit::fixed_window(5, Micros::from_secs(1)).unwrap()
    }

    fn learnt(limit: &Limit, units: u64, outcome: &Outcome) -> Denials {
        let denials = Denials::new(CAP);
        let sent = denials.find(7, cost(units), at(0)).unwrap_err();
        denials.learn(sent, limit, cost(units), outcome);
        denials
    }

    #[test]
    fn a_denial_is_believed_until_it_ends_or_the_cap() {
        for (retry_us, last) in [(300, 299), (99_999_999, CAP.get() - 1)] {
            let denials = learnt(&bucket(), 1, &denied(0, retry_us));
            for us in [0, 1, last] {
                let outcome = denials.find(7, Cost::ONE, at(us)).expect("known");
                assert_eq!(outcome, denied(0, retry_us - us), "after {us} us");
            }
            assert!(denials.find(7, Cost::ONE, at(last + 1)).is_err());
            assert!(denials.find(8, Cost::ONE, at(0)).is_err(), "another key");
            assert!(denials.find(7 + (1 << 127), Cost::ONE, at(0)).is_err(), "another key of the same place");
        }
    }

    #[test]
    fn only_denials_that_determine_the_answer_are_cached() {
        for (limit, units, remaining, cost_later, is_known) in [
            (bucket(), 1, 0, 1, true),
            (bucket(), 3, 2, 3, true),
            (bucket(), 3, 2, 4, false),
            (bucket(), 3, 2, 2, false),
            (bucket(), 3, 1, 3, false),
            (window(), 3, 1, 3, true),
            (window(), 3, 1, 5, true),
            (window(), 3, 1, 6, false),
            (window(), 3, 1, 2, false),
        ] {
            let denials = learnt(&limit, units, &denied(remaining, 300));
            let found = denials.find(7, cost(cost_later), at(0)).is_ok();
            assert_eq!(
                found, is_known,
                "{limit}: {units} denied with {remaining} left, cost_later for {cost_later}"
            );
        }
        let never = Outcome { retry_after: None, ..denied(5, 0) };
        assert!(learnt(&bucket(), 6, &never).find(7, cost(6), at(0)).is_err());
        assert!(!Denials::new(CAP).covers(&Limit::concurrency(5, Micros::from_secs(1)).unwrap()));
        assert!(!Denials::new(Micros::ZERO).covers(&bucket()));
    }

    #[test]
    fn whatever_happens_meanwhile_ends_it() {
        let ways: [fn(&Denials); 3] =
            [|denials| denials.changed(7), |denials| denials.doubted(7), |denials| drop(denials.end_all())];
        for happens in ways {
            let denials = learnt(&bucket(), 1, &denied(0, 300));
            assert!(denials.find(7, Cost::ONE, at(1)).is_ok());
            happens(&denials);
            let sent = denials.find(7, Cost::ONE, at(1)).unwrap_err();
            happens(&denials);
            denials.learn(sent, &bucket(), Cost::ONE, &denied(0, 300));
            assert!(denials.find(7, Cost::ONE, at(1)).is_err(), "the call was on its way meanwhile");
        }
    }

    #[test]
    fn the_last_denial_stands_in_for_a_silent_store_until_it_ends() {
        let denials = learnt(&bucket(), 2, &denied(1, 5_000_000));
        let past_the_cap = at(4_999_999);
        assert!(denials.find(7, cost(2), past_the_cap).is_err());
        for units in [2, 3] {
            assert_eq!(denials.last(7, cost(units), past_the_cap), Some(denied(1, 1)));
        }
        assert_eq!(denials.last(7, Cost::ONE, past_the_cap), None, "one was left");
        assert_eq!(denials.last(7, cost(2), at(5_000_000)), None, "the store would admit it");
        assert_eq!(denials.last(8, cost(2), past_the_cap), None, "another key");
        drop(denials.end_all());
        denials.doubted(7);
        drop(denials.end([7].into_iter().collect()));
        assert!(denials.last(7, cost(2), past_the_cap).is_some(), "what is not known ends nothing here");
        denials.end([7].into_iter().collect()).given_back(&[]);
        assert!(denials.last(7, cost(2), past_the_cap).is_some(), "nothing was given back");
        denials.end([7].into_iter().collect()).given_back(&[7]);
        assert_eq!(denials.last(7, cost(2), past_the_cap), None);

        // A denial that does not replace the store's answer still serves the fallback, and replaces no denial that covers more.
        let denials = learnt(&bucket(), 4, &denied(2, 5_000_000));
        assert!(denials.find(7, cost(4), at(1)).is_err());
        assert!(denials.last(7, cost(4), at(1)).is_some() && denials.last(7, cost(3), at(1)).is_none());
        denials.note(7, at(0), cost(3), &denied(2, 3_000_000));
        denials.note(7, at(0), cost(5), &denied(2, 6_000_000));
        assert_eq!(denials.last(7, cost(4), at(0)), Some(denied(2, 3_000_000)));
    }

    #[test]
    fn a_window_keeps_the_lowest_denied_cost() {
        let denials = learnt(&window(), 2, &denied(1, 300));
        let sent = denials.find(9, cost(4), at(5)).unwrap_err();
        denials.learn(Sent { fingerprint: 7, ..sent }, &window(), cost(4), &denied(1, 295));
        assert!(denials.find(7, cost(2), at(6)).is_ok());
    }
}
