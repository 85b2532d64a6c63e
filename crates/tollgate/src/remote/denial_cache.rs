//! Denials that are still true: a key that the store has denied until some time is denied here until then, without asking.
//!
//! An answer from here is the answer that the store would give. A denial is believed from when its call was *sent*, which is
//! before the store decided, so it ends before the store would admit. It is believed only for charges whose answer it tells in
//! full: the same cost, where that was one more than was left (so that what is left cannot have changed before the denial ends),
//! or, in a fixed window, any cost from there up. And never under a limit that only watches, a concurrency limit (a lease may
//! be given back at any time), for a cost that can never fit, or for a charge over several limits, whose other limits the
//! store alone can tell.
//!
//! Whatever this process does to a key ends what is believed about it: an admission, a refund or a settlement. A reset, and the
//! settlement of a reservation that another process made, end what is believed about every key, but only once the store has
//! carried them out: nobody empties the cache with ids that they made up. A release of leases and a renewal end nothing. What *other* processes give back or reset is not seen,
//! so nothing is believed for longer than a cap. Memory is bounded: a fixed number of slots, where a newcomer overwrites what is
//! there, at the price of a round trip.
//!
//! While the store does not answer, a denial says more ([`Denials::last`]): counters of this process begin empty, so a key that
//! the store denied would be admitted again. Until the instant at which the store itself would have admitted it, the fallback
//! denies it, cap or no cap.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};

use super::fingerprint::shard_of;

const SHARDS: usize = 256;
const SLOTS_IN_A_SHARD: usize = 64;

/// The denials that are still true.
pub(crate) struct Denials {
    /// How long one is believed at most; zero believes none.
    cap: Micros,
    /// Counts what may have ended any denial: resets, and settlements of other processes' reservations.
    epoch: AtomicU64,
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Default)]
struct Shard {
    /// Counts what may have changed any key of the shard.
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
    /// Until when it stands for the store's answer.
    until: Micros,
    /// Until when the store would have denied, as far as this process knows.
    ends: Micros,
    outcome: Outcome,
}

/// What was known when a call was sent: its denial is believed only if nothing has happened to its key since.
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

    /// Whether denials of a limit are believed at all.
    pub(crate) fn covers(&self, limit: &Limit) -> bool {
        self.cap > Micros::ZERO && limit.strategy() != Strategy::Concurrency
    }

    /// The denial of this charge if one is known to be true, else what to remember of its call. Only for limits that
    /// [`covers`](Self::covers) names.
    pub(crate) fn find(&self, fingerprint: u128, cost: Cost, now: Micros) -> Result<Outcome, Sent> {
        let (shard, slot) = self.place(fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        let sent = Sent { fingerprint, version: shard.version, epoch, at: now };
        let is_true = |denial: &&Denial| denial.is_of(fingerprint, epoch, now) && denial.answers(cost);
        let found = shard.slots.get(slot).and_then(Option::as_ref);
        found.filter(is_true).map(|denial| denial.outcome_at(now)).ok_or(sent)
    }

    /// The last denial of a key, for a caller whom the store does not answer: of this cost or a lower one, and not over yet. What
    /// other processes may have given back meanwhile is not known; it is denied rather than admitted twice.
    pub(crate) fn last(&self, fingerprint: u128, cost: Cost, now: Micros) -> Option<Outcome> {
        let (shard, slot) = self.place(fingerprint);
        let denial = shard.slots.get(slot)?.as_ref()?;
        let is_true = denial.fingerprint == fingerprint && now < denial.ends && cost >= denial.cost;
        is_true.then(|| denial.outcome_at(now))
    }

    /// What to remember of a call that is sent whatever is believed.
    pub(crate) fn sent(&self, fingerprint: u128, now: Micros) -> Sent {
        let (shard, _) = self.place(fingerprint);
        Sent { fingerprint, version: shard.version, epoch: self.epoch.load(Ordering::Acquire), at: now }
    }

    /// Remembers what the store said of a charge on one key: a denial is kept if it is worth keeping, an admission ends one.
    pub(crate) fn learn(&self, sent: Sent, limit: &Limit, cost: Cost, outcome: &Outcome) {
        if outcome.allowed {
            return self.changed(sent.fingerprint);
        }
        let and_above = limit.strategy() == Strategy::FixedWindow;
        let leaves_one_less = cost.get() == outcome.remaining.saturating_add(1);
        let believed_for = if and_above || leaves_one_less { self.cap } else { Micros::ZERO };
        let (mut shard, slot) = self.place(sent.fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        if shard.version == sent.version && epoch == sent.epoch {
            shard.keep(slot, sent, cost, and_above, believed_for, outcome);
        }
    }

    /// Remembers what the store said of one of several limits, for [`last`](Self::last) alone.
    pub(crate) fn note(&self, fingerprint: u128, sent: Micros, cost: Cost, outcome: &Outcome) {
        let (mut shard, slot) = self.place(fingerprint);
        let epoch = self.epoch.load(Ordering::Acquire);
        let sent = Sent { fingerprint, version: shard.version, epoch, at: sent };
        shard.keep(slot, sent, cost, false, Micros::ZERO, outcome);
    }

    /// Ends what is believed about a key: it was charged or refunded, or may have been.
    pub(crate) fn changed(&self, fingerprint: u128) {
        let (mut shard, slot) = self.place(fingerprint);
        shard.version += 1;
        if let Some(found) = shard.slots.get_mut(slot) {
            found.take_if(|denial| denial.fingerprint == fingerprint);
        }
    }

    /// A call of this key is lost: what the store would answer now is not known. Its last denial stands, because a charge takes and
    /// gives nothing back.
    pub(crate) fn doubted(&self, fingerprint: u128) {
        let (mut shard, slot) = self.place(fingerprint);
        shard.version += 1;
        if let Some(Some(denial)) = shard.slots.get_mut(slot)
            && denial.fingerprint == fingerprint
        {
            denial.until = Micros::ZERO;
        }
    }

    /// Ends what is believed about these keys, once the guard is dropped: something is being given back to them.
    pub(crate) fn end(&self, keys: SmallVec<[u128; 2]>) -> End<'_> {
        End { denials: self, keys }
    }

    /// Ends all that is believed, once the guard is dropped: something is being given back, and nobody knows to whom.
    pub(crate) fn end_all(&self) -> EndAll<'_> {
        EndAll(self)
    }

    fn place(&self, fingerprint: u128) -> (parking_lot::MutexGuard<'_, Shard>, usize) {
        let slot = shard_of(fingerprint >> 64, SLOTS_IN_A_SHARD);
        (self.shards[shard_of(fingerprint, SHARDS)].lock(), slot)
    }
}

/// Ends all that is believed when dropped, so that it happens however the call in between ends.
pub(crate) struct EndAll<'a>(&'a Denials);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// Ends what is believed about some keys when dropped, so that it happens however the call in between ends. Their last denials
/// stand, unless something was [given back](Self::given_back).
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
    /// Keeps a denial that ends, unless one is known that says as much.
    fn keep(
        &mut self,
        slot: usize,
        Sent { fingerprint, epoch, at, .. }: Sent,
        cost: Cost,
        and_above: bool,
        believed_for: Micros,
        outcome: &Outcome,
    ) {
        let Some(wait) = outcome.retry_after else { return };
        if self.slots.is_empty() {
            self.slots.resize_with(SLOTS_IN_A_SHARD, || None);
        }
        let ends = at.saturating_add(wait);
        let says_as_much = |denial: &Denial| match believed_for > Micros::ZERO {
            true => denial.is_of(fingerprint, epoch, at) && denial.answers(cost),
            false => denial.fingerprint == fingerprint && at < denial.ends && denial.cost <= cost,
        };
        if !self.slots[slot].as_ref().is_some_and(says_as_much) {
            let (until, outcome) = (at.saturating_add(wait.min(believed_for)), *outcome);
            let denial = Denial { fingerprint, epoch, cost, and_above, sent: at, until, ends, outcome };
            self.slots[slot] = Some(denial);
        }
    }
}

impl Denial {
    fn is_of(&self, fingerprint: u128, epoch: u64, now: Micros) -> bool {
        self.fingerprint == fingerprint && self.epoch == epoch && now < self.until
    }

    /// What it says some time later.
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
    fn only_what_is_told_in_full_is_believed() {
        for (limit, units, remaining, asked, is_known) in [
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
            let found = denials.find(7, cost(asked), at(0)).is_ok();
            assert_eq!(found, is_known, "{limit}: {units} denied with {remaining} left, asked for {asked}");
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

        // What does not stand for the store's answer stands in for it, too, and takes the place of nothing that says more.
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
