//! Limits whose numbers come with the call, as protocols have them that know no config (`CL.THROTTLE`) or let callers bring their
//! own (Envoy).
//!
//! All numbers of one name share their counters, as they do when a config changes: a key that is charged by other numbers than
//! before goes on from what was consumed, and a key's text means the same under all of them. What a limit needs in this process
//! (its way to the counters, or what is known of counters elsewhere) is made when it is first asked for and kept for the next who
//! asks. Of each name at most so many are kept; when that is reached those go that nobody holds, which loses no count, because
//! counters are the store's. If all are held, another is made for whoever asks and goes with its holder: numbers are a stranger's,
//! and nobody may take a name from others by holding many.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tollgate_kernel::{Outcome, Strategy};

use crate::decision::Decision;
use crate::error::Error;
use crate::gate::{Backend, Entry};
use crate::limiter::Limiter;
use crate::policy::{Allowance, Rule};
use crate::registry::{Ask, Tollgate};
use crate::report::watch::Meter;

/// How many of one name are kept at most.
const MOST: usize = 1_024;

/// A limit whose numbers came with the call. Cheap to clone, and worth keeping while the same numbers come.
///
/// ```
/// use tollgate::{Limit, Rate, Tollgate};
///
/// # async fn run() -> Result<(), tollgate::Error> {
/// let gate = Tollgate::builder().build()?;
/// let small = gate.ad_hoc("trial", Limit::token_bucket(Rate::per_minute(30)?, 16)?)?;
/// assert_eq!(small.charge("user:42", 10).await?.binding().outcome.remaining, 6);
///
/// // Other numbers, the same key: what was consumed stays consumed.
/// let large = gate.ad_hoc("trial", Limit::token_bucket(Rate::per_minute(30)?, 20)?)?;
/// assert_eq!(large.charge("user:42", 1).await?.binding().outcome.remaining, 9);
/// # Ok(())
/// # }
/// # use std::future::Future;
/// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
/// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
/// ```
#[derive(Clone)]
pub struct AdHoc {
    name: &'static str,
    gate: Tollgate,
    entry: Arc<Entry>,
    limiter: Option<Limiter>,
}

impl Tollgate {
    /// A limit by these numbers, counted under `name`, which no rule of the registry may have. The name is the program's, and
    /// the numbers may be a stranger's: however many others there are, these are served. Limits of one name should be of one
    /// strategy, and windows of one length, as what is counted by one says little under another.
    pub fn ad_hoc(&self, name: &'static str, allowance: impl Into<Allowance>) -> Result<AdHoc, Error> {
        let allowance = match allowance.into() {
            // A key that is charged by other numbers keeps the instant at which it is full, as redis-cell has it.
            Allowance::Limited(limit) => Allowance::Limited(limit.keeping_instant()),
            other => other,
        };
        let entry = self.gate.ad_hocs.find(name, allowance, || {
            if self.gate.by_name.contains_key(name) {
                return Err(Error::call(format!(
                    "`{name}` is a limit of the policy; give that another name"
                )));
            }
            let rule = Rule::ad_hoc(name, allowance)?;
            let mut numbering = match &self.gate.backend {
                // Never done with: its numbers are its own, and nobody continues it.
                Backend::Remote(remote) => Some(remote.numbering()),
                Backend::Memory(_) => None,
            };
            let gate = &*self.gate;
            let (otherwise, watch, observers) = (gate.otherwise, &gate.watch, &gate.observers);
            Entry::new(rule, &gate.backend, &mut numbering, otherwise, watch, observers)
        })?;
        let limiter = match self.gate.backend {
            Backend::Memory(_) => Some(Limiter::on(self.gate.clone(), entry.clone())),
            Backend::Remote(_) => None,
        };
        Ok(AdHoc { name, gate: self.clone(), entry, limiter })
    }

    /// The names under which limits have come with calls, to this registry or to those that it continues, sorted.
    pub fn ad_hoc_names(&self) -> Vec<&'static str> {
        let mut names: Vec<&'static str> = self.gate.ad_hocs.0.lock().keys().copied().collect();
        names.sort_unstable();
        names
    }
}

impl AdHoc {
    /// The name that it is counted under.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How much it lets through.
    pub fn allowance(&self) -> Allowance {
        *self.entry.rule.allowance()
    }

    /// One unit, paid by `key`: for a charge together with other limits of the same registry.
    pub fn ask<'a>(&'a self, key: &'a str) -> Ask<'a> {
        Ask::ad_hoc(self, key)
    }

    /// Charges a key.
    pub async fn charge(&self, key: &str, cost: u64) -> Result<Decision<'_>, Error> {
        self.gate.charge(&[self.ask(key).cost(cost)]).await
    }

    /// What a key has used and has left, as [`Tollgate::status`] says it.
    pub async fn status(&self, key: &str) -> Result<Outcome, Error> {
        self.gate.status_of(&self.entry, key).await
    }

    /// Its counters, if it is of this registry.
    pub(crate) fn entry(&self, gate: &Tollgate) -> Result<&Entry, Error> {
        match self.gate.is(gate) {
            true => Ok(&self.entry),
            false => Err(Error::call(format!("`{}` was made by another registry; ask this one", self.name))),
        }
    }

    /// The same, kept.
    #[cfg(feature = "http")]
    pub(crate) fn shared_entry(&self, gate: &Tollgate) -> Result<Arc<Entry>, Error> {
        self.entry(gate).map(|_| self.entry.clone())
    }

    /// The short way, where the counters are in this process.
    pub fn limiter(&self) -> Option<&Limiter> {
        self.limiter.as_ref()
    }
}

impl fmt::Debug for AdHoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdHoc").field("rule", &self.entry.rule).finish_non_exhaustive()
    }
}

/// The limits that are ready, by name.
#[derive(Default)]
pub(crate) struct AdHocs(Mutex<HashMap<&'static str, Named>>);

/// The limits of one name.
#[derive(Default)]
struct Named {
    /// Limits of one strategy are counted together.
    meters: Vec<(Option<Strategy>, Meter)>,
    entries: HashMap<Allowance, Arc<Entry>>,
}

impl AdHocs {
    fn find(
        &self,
        name: &'static str,
        numbers: Allowance,
        make: impl FnOnce() -> Result<Entry, Error>,
    ) -> Result<Arc<Entry>, Error> {
        let mut names = self.0.lock();
        if let Some(entry) = names.get(name).and_then(|named| named.entries.get(&numbers)) {
            return Ok(entry.clone());
        }
        let entry = make()?;
        Ok(names.entry(name).or_default().take_in(numbers, entry))
    }

    /// For a registry that continues this one: the names alone, as limits are found again by whoever asks for them. Names that
    /// its policy has now are the policy's.
    pub(crate) fn continued(&self, is_of_policy: impl Fn(&str) -> bool) -> AdHocs {
        let names = self.0.lock();
        let names = names.keys().filter(|name| !is_of_policy(name));
        AdHocs(Mutex::new(names.map(|name| (*name, Named::default())).collect()))
    }

    /// Brings the counts of decisions up to date.
    #[cfg(feature = "telemetry")]
    pub(crate) fn publish(&self) {
        let names = self.0.lock();
        names.values().flat_map(|named| &named.meters).for_each(|(_, meter)| meter.publish());
    }
}

impl Named {
    /// One more, which is kept if there is room for it.
    fn take_in(&mut self, numbers: Allowance, mut entry: Entry) -> Arc<Entry> {
        let strategy = entry.base.strategy();
        match self.meters.iter().find(|(of, _)| *of == strategy) {
            Some((_, meter)) => entry.meter = meter.clone(),
            None => self.meters.push((strategy, entry.meter.clone())),
        }
        let entry = Arc::new(entry);
        if self.entries.len() >= MOST {
            self.entries.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        if self.entries.len() < MOST {
            self.entries.insert(numbers, entry.clone());
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use tollgate_kernel::{Limit, Micros, Rate};
    use tollgate_store::ManualClock;

    use super::*;

    fn gate() -> (ManualClock, Tollgate) {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let gate = Tollgate::builder().clock(hands.clock()).build().unwrap();
        (hands, gate)
    }

    fn bucket(count: u64, burst: u64) -> Limit {
        Limit::token_bucket(Rate::per_minute(count).unwrap(), burst).unwrap()
    }

    fn charge(gate: &Tollgate, count: u64, burst: u64, cost: u64) -> (bool, u64) {
        let bucket = gate.ad_hoc("cl", bucket(count, burst)).unwrap();
        let outcome = bucket.limiter().unwrap().charge("user:42", cost).unwrap();
        (outcome.allowed, outcome.remaining)
    }

    #[test]
    fn one_key_has_one_state_whatever_numbers_it_is_charged_by() {
        let (hands, gate) = gate();
        assert_eq!(charge(&gate, 60, 10, 4), (true, 6));
        assert_eq!(charge(&gate, 60, 20, 1), (true, 15));
        assert_eq!(charge(&gate, 60, 5, 1), (false, 0), "five are used already");
        // What was consumed is an instant: the bucket is full again in five seconds, of which twice the rate makes ten units.
        assert_eq!(charge(&gate, 120, 10, 1), (false, 0));
        hands.advance(Micros::from_secs(1));
        assert_eq!(charge(&gate, 120, 10, 1), (true, 1));
        assert_eq!(gate.keys(), 1);
    }

    /// One peer that held many took the limits of all others: they were told that too many were in use.
    #[test]
    fn only_so_many_of_a_name_are_kept_and_nobody_is_refused() {
        let (_hands, gate) = gate();
        let of = |name, burst: u64| gate.ad_hoc(name, bucket(60, burst)).unwrap();
        let kept = |name| gate.gate.ad_hocs.0.lock()[name].entries.len();
        let most = MOST as u64;
        let mut held: Vec<AdHoc> = (1..=most).map(|burst| of("cl", burst)).collect();
        // Held by others, all of them: what comes now is counted as ever, and gone with its holder.
        assert_eq!(charge(&gate, 60, most + 1, 1), (true, most));
        assert_eq!(charge(&gate, 60, most + 1, 1), (true, most - 1));
        assert_eq!(charge(&gate, 60, 2, 1), (false, 0), "kept and unkept share their counters");
        let unkept = of("cl", most + 2);
        let gone = Arc::downgrade(&unkept.entry);
        drop(unkept);
        assert!(gone.upgrade().is_none());
        assert_eq!((kept("cl"), gate.keys()), (MOST, 1));
        // Another name has room of its own.
        assert!(Arc::ptr_eq(&of("envoy", 1).entry, &of("envoy", 1).entry));
        // What nobody holds makes room.
        held.pop();
        assert!(Arc::ptr_eq(&of("cl", most + 1).entry, &of("cl", most + 1).entry));
        drop(held);
        (1..=3 * most).for_each(|burst| drop(of("cl", burst)));
        assert!(kept("cl") <= MOST);
        assert_eq!(charge(&gate, 60, 2, 1), (false, 0), "counters outlive what was let go");
    }

    #[test]
    fn names_of_the_policy_and_bad_ones_are_refused() {
        let gate = Tollgate::builder().limit("api", bucket(60, 1)).build().unwrap();
        for (name, said) in [("api", "`api` is a limit of the policy"), ("No", "limit name `No`")] {
            let error = gate.ad_hoc(name, bucket(60, 1)).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        assert_eq!(gate.ad_hoc_names(), [""; 0]);
        for name in ["b", "a", "b"] {
            gate.ad_hoc(name, bucket(60, 1)).unwrap();
        }
        assert_eq!(gate.ad_hoc_names(), ["a", "b"]);
    }

    /// The page had lost them after a reload until the next call.
    #[test]
    fn names_last_when_a_registry_is_continued() {
        let (_hands, gate) = gate();
        for name in ["b", "a", "c"] {
            gate.ad_hoc(name, bucket(60, 1)).unwrap();
        }
        let next = Tollgate::builder().continuing(&gate).limit("a", bucket(60, 1)).build().unwrap();
        assert_eq!(next.ad_hoc_names(), ["b", "c"], "`a` is the policy's now");
        let last = Tollgate::builder().continuing(&next).build().unwrap();
        assert_eq!(last.ad_hoc_names(), ["b", "c"]);
    }

    #[test]
    fn it_is_charged_together_with_limits_of_its_own_registry() {
        let registry = || Tollgate::builder().limit("api", bucket(60, 1)).build().unwrap();
        let gate = registry();
        let own = gate.ad_hoc("own", bucket(60, 5)).unwrap();
        let blocked = gate.ad_hoc("own", Allowance::Blocked).unwrap();
        let charge = |asks: &[Ask<'_>]| {
            let decided = pin!(gate.charge(asks)).poll(&mut Context::from_waker(Waker::noop()));
            let Poll::Ready(decided) = decided else { panic!("it is in this process") };
            decided.map(|decision| (decision.allowed(), decision.binding().name))
        };
        assert_eq!(charge(&[Ask::new("api", "a"), own.ask("a").cost(2)]).unwrap(), (true, "api"));
        assert_eq!(charge(&[Ask::new("api", "a"), own.ask("a")]).unwrap(), (false, "api"));
        assert_eq!(charge(&[Ask::new("api", "b"), blocked.ask("a")]).unwrap(), (false, "own"));
        assert_eq!(charge(&[own.ask("a").cost(3)]).unwrap(), (true, "own"), "no refusal took anything");
        let elsewhere = registry().ad_hoc("own", bucket(60, 5)).unwrap();
        let error = charge(&[elsewhere.ask("a")]).unwrap_err();
        assert!(error.to_string().contains("`own` was made by another registry"), "{error}");
    }
}
