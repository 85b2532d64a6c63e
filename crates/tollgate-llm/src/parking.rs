//! Quota groups that the provider has asked not to use for a while.
//!
//! A provider that refuses a call, or reports that nothing is left, says when to come back. Until then no call of that quota is
//! sent with keys of that group; there are no probes. Other groups of keys and other quotas continue. A group is parked for an
//! hour at most, so a strange hint cannot disable it for good.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::store::Micros;

/// The longest time for which a group is parked.
const LONGEST: Micros = Micros::from_secs(3_600);

/// A quota group that is parked, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parked {
    /// The quota of the models that it is parked for.
    pub quota: String,
    /// The group.
    pub group: String,
    /// How much longer.
    pub left: Duration,
    /// Why.
    pub reason: &'static str,
}

/// A quota, and a group of keys.
type QuotaGroup = (String, String);

/// The parked groups of all quotas.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    until: Mutex<HashMap<QuotaGroup, (Micros, &'static str)>>,
}

impl Parking {
    /// Parks a group. Of two times the later counts.
    pub(crate) fn park(&self, quota: &str, group: &str, now: Micros, wait: Duration, reason: &'static str) {
        let until = now.saturating_add(Micros::from(wait).min(LONGEST));
        let mut parked = self.until.lock();
        parked.retain(|_, (until, _)| *until > now);
        let known = parked.entry((quota.to_owned(), group.to_owned())).or_insert((until, reason));
        if until > known.0 {
            *known = (until, reason);
        }
    }

    /// For how much longer a group is parked, and why.
    pub(crate) fn left(&self, quota: &str, group: &str, now: Micros) -> Option<(Micros, &'static str)> {
        let parked = self.until.lock();
        if parked.is_empty() {
            return None;
        }
        let (until, reason) = parked.get(&(quota.to_owned(), group.to_owned()))?;
        (*until > now).then(|| (until.saturating_sub(now), *reason))
    }

    /// All of them.
    pub(crate) fn all(&self, now: Micros) -> Vec<Parked> {
        let parked = self.until.lock();
        let mut all: Vec<Parked> = parked
            .iter()
            .filter(|(_, (until, _))| *until > now)
            .map(|((quota, group), (until, reason))| Parked {
                quota: quota.clone(),
                group: group.clone(),
                left: until.saturating_sub(now).into(),
                reason,
            })
            .collect();
        all.sort_by(|one, other| (&one.quota, &one.group).cmp(&(&other.quota, &other.group)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f1_a_group_is_parked_for_its_quota_until_the_later_time_and_an_hour_at_most() {
        let parking = Parking::default();
        let at = Micros::from_secs;
        parking.park("gpt", "a", at(0), Duration::from_secs(5), "refused");
        parking.park("gpt", "a", at(0), Duration::from_secs(2), "reported");
        assert_eq!(parking.left("gpt", "a", at(1)), Some((at(4), "refused")));
        assert_eq!(parking.left("gpt", "b", at(1)), None);
        assert_eq!(parking.left("mini", "a", at(1)), None);
        assert_eq!(parking.left("gpt", "a", at(5)), None);
        parking.park("gpt", "b", at(6), Duration::MAX, "refused");
        assert_eq!(parking.left("gpt", "b", at(6)), Some((LONGEST, "refused")));
        assert_eq!(parking.all(at(6)).len(), 1, "what has ended is forgotten");
    }
}
