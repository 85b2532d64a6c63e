//! Fair shares of a shared store: how many calls may be in flight for one key, for one limit, and to one server.
//!
//! A call claims its shares before it takes a connection. If a share is used up, the call waits for it in order and holds nothing
//! meanwhile: all claims are granted at once, or none. So a call waits only for calls of its own key, its own limit or its own
//! server. If its deadline passes while it waits, the error concerns only this call and not the store
//! ([`StoreError::own_share`]).
//!
//! The table has an entry for each claim that is in flight or waited for: it is bounded by the calls in flight, and those are
//! bounded by the caps and by the length of the queues.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::{SecretHash, StoreError};

/// Something that a call needs a share of. The number is a hash under a random key, which callers cannot predict; two keys with
/// the same hash share one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Claim {
    /// A key under a limit.
    Key(u64),
    /// A key under a limit whose checks are batched; only the batches count as calls.
    BatchedKey(u64),
    /// A limit.
    Limit(u64),
    /// All calls to one server.
    Server(u64),
}

/// A map by claims. They are hashes already, so they are not hashed again.
pub(crate) type ByClaim<T> = HashMap<Claim, T, BuildHasherDefault<ClaimHasher>>;

/// Uses the hash in a claim, with the kind of the claim mixed in.
#[derive(Default)]
pub(crate) struct ClaimHasher(u64);

impl Hasher for ClaimHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = self.0.rotate_left(5) ^ number;
    }

    fn write_isize(&mut self, kind: isize) {
        self.write_u64((kind as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
}

/// The claims of one call.
pub(crate) type Claims = SmallVec<[Claim; 4]>;

/// How many calls may be in flight for each claim of a kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caps {
    pub(crate) key: usize,
    pub(crate) batched_key: usize,
    pub(crate) limit: usize,
    pub(crate) server: usize,
    /// How many calls may wait for one claim.
    pub(crate) waiting: usize,
}

impl Caps {
    fn of(&self, claim: Claim) -> usize {
        match claim {
            Claim::Key(_) => self.key,
            Claim::BatchedKey(_) => self.batched_key,
            Claim::Limit(_) => self.limit,
            Claim::Server(_) => self.server,
        }
    }
}

/// The shares of one store.
pub(crate) struct Shares {
    caps: Caps,
    hasher: SecretHash,
    table: Mutex<ByClaim<Entry>>,
}

#[derive(Default)]
struct Entry {
    in_flight: usize,
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    claims: Claims,
    granted: oneshot::Sender<Share>,
}

/// The shares of a call in flight. Dropping it gives them back.
pub(crate) struct Share {
    shares: Arc<Shares>,
    claims: Claims,
}

impl Shares {
    pub(crate) fn new(caps: Caps) -> Arc<Shares> {
        Arc::new(Shares { caps, hasher: SecretHash::random(), table: Mutex::default() })
    }

    /// The hash of a name, for a claim.
    pub(crate) fn hash(&self, name: impl std::hash::Hash) -> u64 {
        self.hasher.hash_one(name)
    }

    /// How many calls are in flight for a claim.
    pub(crate) fn in_flight(&self, claim: Claim) -> usize {
        self.table.lock().get(&claim).map_or(0, |entry| entry.in_flight)
    }

    /// Claims all of these, waiting for them until an instant.
    pub(crate) async fn claim(
        self: &Arc<Shares>,
        mut claims: Claims,
        until: Instant,
    ) -> Result<Share, StoreError> {
        if claims.len() > 1 {
            claims.sort_unstable_by_key(|claim| match claim {
                Claim::Key(hash) | Claim::BatchedKey(hash) => (0, *hash),
                Claim::Limit(hash) => (1, *hash),
                Claim::Server(hash) => (2, *hash),
            });
            claims.dedup();
        }
        let granted = match self.claim_or_wait(claims, self.caps.waiting)? {
            Claimed::Now(share) => return Ok(share),
            Claimed::Later(granted) => granted,
        };
        match timeout_at(until, granted).await {
            Ok(Ok(share)) => Ok(share),
            _ => Err(StoreError::own_share(
                "the calls of this key or limit use up its share of the store; this one was not sent in time",
            )),
        }
    }

    /// Claims all of these without a deadline. For a bounded number of callers per limit.
    pub(crate) async fn claim_without_deadline(
        self: &Arc<Shares>,
        claims: Claims,
    ) -> Result<Share, StoreError> {
        match self.claim_or_wait(claims, usize::MAX)? {
            Claimed::Now(share) => Ok(share),
            Claimed::Later(granted) => {
                granted.await.map_err(|_| StoreError::own_share("the shares of the store are gone"))
            }
        }
    }

    fn claim_or_wait(self: &Arc<Shares>, claims: Claims, most_waiting: usize) -> Result<Claimed, StoreError> {
        let mut table = self.table.lock();
        let Some(blocked) = take(&mut table, &self.caps, &claims) else {
            return Ok(Claimed::Now(Share { shares: self.clone(), claims }));
        };
        let waiting = &mut table.entry(blocked).or_default().waiting;
        if waiting.len() >= most_waiting {
            waiting.retain(|waiter| !waiter.granted.is_closed());
        }
        if waiting.len() >= most_waiting {
            return Err(StoreError::own_share(
                "more calls wait for the share of this key or limit than can be served in time; this one was not sent",
            ));
        }
        let (granted, receiver) = oneshot::channel();
        waiting.push_back(Waiter { claims, granted });
        Ok(Claimed::Later(receiver))
    }

    /// Gives claims back, and grants them to waiting calls.
    fn release(self: &Arc<Shares>, claims: &Claims) {
        let mut granted: SmallVec<[Waiter; 4]> = SmallVec::new();
        let mut table = self.table.lock();
        let mut is_waited_for = false;
        for claim in claims {
            let MapEntry::Occupied(mut entry) = table.entry(*claim) else { continue };
            entry.get_mut().in_flight = entry.get().in_flight.saturating_sub(1);
            if !entry.get().waiting.is_empty() {
                is_waited_for = true;
            } else if entry.get().in_flight == 0 {
                entry.remove();
            }
        }
        // In most cases no call waits.
        for claim in claims.iter().filter(|_| is_waited_for) {
            let cap = self.caps.of(*claim);
            while let Some(entry) = table.get_mut(claim)
                && entry.in_flight < cap
                && let Some(waiter) = entry.waiting.pop_front()
            {
                if waiter.granted.is_closed() {
                    continue;
                }
                match take(&mut table, &self.caps, &waiter.claims) {
                    None => granted.push(waiter),
                    // It has to wait for another claim too.
                    Some(blocked) => table.entry(blocked).or_default().waiting.push_back(waiter),
                }
            }
            if table.get(claim).is_some_and(|entry| entry.in_flight == 0 && entry.waiting.is_empty()) {
                table.remove(claim);
            }
        }
        drop(table);
        for Waiter { claims, granted } in granted {
            // A call that has just stopped waiting gives the share back at once.
            let _ = granted.send(Share { shares: self.clone(), claims });
        }
    }
}

enum Claimed {
    Now(Share),
    Later(oneshot::Receiver<Share>),
}

/// Takes all claims, or none; then returns the first that is used up.
fn take(table: &mut ByClaim<Entry>, caps: &Caps, claims: &Claims) -> Option<Claim> {
    if let [only] = claims[..] {
        let entry = table.entry(only).or_default();
        let is_used_up = entry.in_flight >= caps.of(only);
        entry.in_flight += usize::from(!is_used_up);
        return is_used_up.then_some(only);
    }
    let is_used_up =
        |claim: &&Claim| table.get(claim).is_some_and(|entry| entry.in_flight >= caps.of(**claim));
    if let Some(blocked) = claims.iter().find(is_used_up) {
        return Some(*blocked);
    }
    for claim in claims {
        table.entry(*claim).or_default().in_flight += 1;
    }
    None
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shares.release(&self.claims);
    }
}

/// Until when a call may wait for its share: a quarter of its time is reserved for the call itself, so that no call is sent that
/// is bound to be late.
pub(crate) fn latest_start(now: Instant, deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(now);
    deadline.checked_sub(left / 4).unwrap_or(deadline)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;
    use smallvec::smallvec;

    use super::*;
    use crate::Failure;

    const CAPS: Caps = Caps { key: 2, batched_key: 4, limit: 3, server: 4, waiting: 5 };

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(100)
    }

    fn claims(key: u64, limit: u64) -> Claims {
        smallvec![Claim::Key(key), Claim::Limit(limit), Claim::Server(0)]
    }

    #[tokio::test(start_paused = true)]
    async fn each_key_limit_and_server_has_its_cap() {
        let shares = Shares::new(CAPS);
        let mut held = Vec::new();
        held.push(shares.claim(claims(1, 1), soon()).await.unwrap());
        held.push(shares.claim(claims(1, 1), soon()).await.unwrap());
        let error = shares.claim(claims(1, 1), soon()).await.err().unwrap();
        assert_eq!(error.failure(), Some(Failure::Overloaded));
        assert!(!error.is_ambiguous());
        held.push(shares.claim(claims(2, 1), soon()).await.unwrap());
        assert!(shares.claim(claims(3, 1), soon()).await.is_err(), "the limit's share is used up");
        held.push(shares.claim(claims(3, 2), soon()).await.unwrap());
        assert!(shares.claim(claims(4, 3), soon()).await.is_err(), "the server's is");
        held.remove(0);
        held.push(shares.claim(claims(4, 3), soon()).await.unwrap());
        drop(held);
        assert!(shares.table.lock().is_empty(), "nothing is kept of what is over");
    }

    /// A call that waits for its key holds nothing of its limit meanwhile.
    #[tokio::test(start_paused = true)]
    async fn who_waits_holds_nothing_and_is_served_in_order() {
        let shares = Shares::new(CAPS);
        let first = shares.claim(claims(1, 1), soon()).await.unwrap();
        let second = shares.claim(claims(1, 1), soon()).await.unwrap();
        let wait = |name: &'static str| {
            let shares = shares.clone();
            tokio::spawn(async move { shares.claim(claims(1, 1), soon()).await.map(|share| (name, share)) })
        };
        let (third, fourth) = (wait("third"), wait("fourth"));
        tokio::task::yield_now().await;
        assert_eq!(shares.in_flight(Claim::Limit(1)), 2);
        drop(shares.claim(claims(2, 1), soon()).await.unwrap());
        drop(first);
        let (name, third) = third.await.unwrap().unwrap();
        assert_eq!(name, "third");
        assert!(!fourth.is_finished());
        drop((second, third));
        assert!(fourth.await.unwrap().is_ok());
        assert!(shares.table.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_stops_waiting_is_passed_over() {
        let shares = Shares::new(CAPS);
        let held = [
            shares.claim(claims(1, 1), soon()).await.unwrap(),
            shares.claim(claims(1, 1), soon()).await.unwrap(),
        ];
        let gone = tokio::spawn({
            let shares = shares.clone();
            async move { shares.claim(claims(1, 1), soon()).await }
        });
        tokio::task::yield_now().await;
        gone.abort();
        let stays = tokio::spawn({
            let shares = shares.clone();
            async move { shares.claim(claims(1, 1), soon()).await.map(drop) }
        });
        tokio::task::yield_now().await;
        drop(held);
        stays.await.unwrap().unwrap();
        assert!(shares.table.lock().is_empty());
    }

    /// A call that needs two keys waits for both, and gets both at once.
    #[tokio::test(start_paused = true)]
    async fn several_claims_are_granted_together() {
        let shares = Shares::new(Caps { key: 1, ..CAPS });
        let [one, two] = [Claim::Key(1), Claim::Key(2)];
        let first = shares.claim(smallvec![one], soon()).await.unwrap();
        let second = shares.claim(smallvec![two], soon()).await.unwrap();
        let both = tokio::spawn({
            let shares = shares.clone();
            async move { shares.claim(smallvec![two, one, two], soon()).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        tokio::task::yield_now().await;
        drop(shares.claim(smallvec![one], soon()).await.unwrap());
        drop(second);
        let both = both.await.unwrap().unwrap();
        assert_eq!((shares.in_flight(one), shares.in_flight(two)), (1, 1));
        drop(both);
        assert!(shares.table.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_turns_the_next_away_at_once() {
        let shares = Shares::new(CAPS);
        let _held = [
            shares.claim(claims(1, 1), soon()).await.unwrap(),
            shares.claim(claims(1, 1), soon()).await.unwrap(),
        ];
        let far = Instant::now() + Duration::from_secs(3_600);
        let mut waiting: Vec<_> =
            (0..CAPS.waiting).map(|_| Box::pin(shares.claim(claims(1, 1), far))).collect();
        for waiter in &mut waiting {
            assert!(waiter.as_mut().now_or_never().is_none());
        }
        let start = Instant::now();
        assert!(shares.claim(claims(1, 1), far).await.is_err());
        assert_eq!(Instant::now(), start, "it did not wait");
        waiting.pop();
        let mut next = Box::pin(shares.claim(claims(1, 1), far));
        assert!(next.as_mut().now_or_never().is_none(), "there is room for one again");
    }

    /// Random claims and random ends: no cap is ever exceeded, every call is served, and nothing is left.
    #[tokio::test(start_paused = true)]
    async fn no_cap_is_passed_whatever_comes_and_goes() {
        let shares = Shares::new(Caps { waiting: 10_000, ..CAPS });
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..2_000_u64 {
            let shares = shares.clone();
            tasks.spawn(async move {
                let random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                tokio::time::sleep(Duration::from_micros(random % 50_000)).await;
                let mut claims = claims(random % 7, random % 3);
                if random % 5 == 0 {
                    claims.push(Claim::Key(random % 11));
                }
                let far = Instant::now() + Duration::from_secs(3_600);
                let share = shares.claim(claims.clone(), far).await.unwrap();
                for claim in &claims {
                    let in_flight = shares.in_flight(*claim);
                    assert!((1..=shares.caps.of(*claim)).contains(&in_flight), "{claim:?}: {in_flight}");
                }
                tokio::time::sleep(Duration::from_micros(random % 900)).await;
                drop(share);
            });
        }
        tasks.join_all().await;
        assert!(shares.table.lock().is_empty());
    }
}
