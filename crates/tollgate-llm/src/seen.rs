//! What `limits.rs` records about calls: sums of the last hour by configured model and client, ratios of the last calls, waiting
//! calls, and what calls in flight have reserved. Constant memory for each model, client and call.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::Clock;
use tollgate::store::Micros;

use crate::config::{LlmConfig, ModelConfig, Priority};
use crate::learned::Ring;
use crate::plan::Planned;
use crate::usage::Usage;

/// How many minutes sums are kept for, how many ratios and waits, and how many times at which a group was parked.
pub(crate) const MINUTES: usize = 60;
const REMEMBERED: usize = 128;
const PARKED: usize = 32;

/// One, in parts of a ratio.
const ONE: u64 = 1_000;

/// Sums of the last so many stretches of time, each of so many seconds.
#[derive(Clone, Debug)]
pub(crate) struct Sums<const SECONDS: u64, const N: usize>([(u64, u64); N]);

/// Of the last hour.
pub(crate) type Minutes = Sums<60, MINUTES>;

impl<const SECONDS: u64, const N: usize> Default for Sums<SECONDS, N> {
    fn default() -> Self {
        Sums([(0, 0); N])
    }
}

impl<const SECONDS: u64, const N: usize> Sums<SECONDS, N> {
    /// Which stretch this is, and where it is kept.
    fn stretch(now: Micros) -> u64 {
        now.get() / (SECONDS * 1_000_000)
    }

    fn place(stretch: u64) -> usize {
        usize::try_from(stretch % N as u64).unwrap_or(0)
    }

    pub(crate) fn add(&mut self, now: Micros, count: u64) {
        let stretch = Self::stretch(now);
        let place = &mut self.0[Self::place(stretch)];
        if place.0 != stretch {
            *place = (stretch, 0);
        }
        place.1 = place.1.saturating_add(count);
    }

    /// Each of the last stretches, the one that runs last.
    pub(crate) fn series(&self, now: Micros) -> Vec<u64> {
        let stretch = Self::stretch(now);
        let first = (stretch + 1).saturating_sub(N as u64);
        let of = |stretch: u64| {
            let place = self.0[Self::place(stretch)];
            if place.0 == stretch { place.1 } else { 0 }
        };
        (first..=stretch).map(of).collect()
    }

    pub(crate) fn sum(&self, now: Micros) -> u64 {
        self.series(now).into_iter().fold(0, u64::saturating_add)
    }
}

/// Tokens of the last five minutes, hour and day.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    recent: Sums<5, 60>,
    hour: Minutes,
    day: Sums<900, 96>,
}

impl Tokens {
    fn add(&mut self, now: Micros, count: u64) {
        self.recent.add(now, count);
        self.hour.add(now, count);
        self.day.add(now, count);
    }

    /// For each range the seconds of a stretch and the sums, oldest first.
    pub(crate) fn series(&self, now: Micros) -> [(u64, Vec<u64>); 3] {
        [(5, self.recent.series(now)), (60, self.hour.series(now)), (900, self.day.series(now))]
    }
}

pub(crate) type Newest = Ring<REMEMBERED>;

/// The values that so many of a hundred are not above, and how many there are.
pub(crate) fn percentiles<const N: usize>(
    newest: &Newest,
    of_hundred: [usize; N],
) -> Option<([u64; N], usize)> {
    let sorted = newest.sorted();
    let last = sorted.len().checked_sub(1)?;
    Some((of_hundred.map(|percent| sorted[(last * percent).div_ceil(100)]), sorted.len()))
}

#[derive(Debug, Default)]
pub(crate) struct OfModel {
    pub(crate) input: Tokens,
    pub(crate) output: Tokens,
    pub(crate) refused: Minutes,
    pub(crate) ratios: Newest,
    pub(crate) is_exact: bool,
}

#[derive(Debug, Default)]
pub(crate) struct OfGroup {
    pub(crate) limited: Minutes,
    /// Whether its provider has ever reported how its limits stand.
    pub(crate) has_reported: bool,
}

/// A time for which the provider asked not to use a group.
#[derive(Clone, Debug)]
pub(crate) struct ParkedTime {
    pub(crate) group: String,
    pub(crate) from: Micros,
    pub(crate) to: Micros,
}

#[derive(Debug)]
pub(crate) struct Open {
    since: Micros,
    charges: Vec<(String, u64)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) model: String,
    pub(crate) quota: String,
    pub(crate) client: String,
    pub(crate) priority: Priority,
    pub(crate) joined: Micros,
    pub(crate) deadline: Micros,
    pub(crate) tokens: u64,
    pub(crate) charges: Vec<Planned>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) last: u64,
    pub(crate) models: HashMap<String, OfModel>,
    pub(crate) clients: HashMap<String, Minutes>,
    pub(crate) groups: HashMap<String, OfGroup>,
    pub(crate) open: HashMap<u64, Open>,
    pub(crate) waiting: BTreeMap<u64, Waiter>,
    pub(crate) waits: Newest,
    pub(crate) sums: [Minutes; 5],
    /// Refusals of providers, for their limits, that reached a caller.
    pub(crate) passed_on: Minutes,
    /// Oldest first.
    pub(crate) parked: VecDeque<ParkedTime>,
}

/// The record of all calls.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) clock: Clock,
    pub(crate) state: Arc<Mutex<State>>,
}

/// A call that comes in.
pub(crate) struct Coming<'a> {
    pub(crate) model: &'a ModelConfig,
    pub(crate) client: &'a str,
    pub(crate) priority: Priority,
    pub(crate) tokens: u64,
    pub(crate) charges: &'a [Planned],
    pub(crate) within: Duration,
    pub(crate) is_exact: bool,
}

/// A waiting call, recorded until it is dropped.
pub(crate) struct SeenWaiting {
    seen: Seen,
    number: u64,
    is_exact: bool,
}

/// A call in flight, recorded until it is dropped.
#[derive(Debug)]
pub(crate) struct SeenOpen {
    seen: Seen,
    number: u64,
    model: String,
    client: String,
    is_exact: bool,
}

impl Seen {
    pub(crate) fn new(clock: Clock) -> Seen {
        Seen { clock, state: Arc::default() }
    }

    /// A call is queued.
    pub(crate) fn waits(&self, coming: &Coming<'_>) -> SeenWaiting {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.last += 1;
        let number = state.last;
        let waiter = Waiter {
            model: coming.model.name.clone(),
            quota: coming.model.quota.clone(),
            client: coming.client.to_owned(),
            priority: coming.priority,
            joined: now,
            deadline: now.saturating_add(Micros::from(coming.within)),
            tokens: coming.tokens,
            charges: coming.charges.to_vec(),
        };
        state.waiting.insert(number, waiter);
        SeenWaiting { seen: self.clone(), number, is_exact: coming.is_exact }
    }

    /// The provider refused a call with a key of this group because of a limit.
    pub(crate) fn limited(&self, group: &str) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let group = state.groups.entry(group.to_owned()).or_default();
        group.limited.add(now, 1);
    }

    /// A refusal of a provider, for its limits, is passed on to the caller.
    pub(crate) fn passed_on(&self) {
        let now = self.clock.now();
        self.state.lock().passed_on.add(now, 1);
    }

    /// The provider has reported the state of this group's limits.
    pub(crate) fn reported(&self, group: &str) {
        let mut state = self.state.lock();
        match state.groups.get_mut(group) {
            Some(group) => group.has_reported = true,
            None => state.groups.entry(group.to_owned()).or_default().has_reported = true,
        }
    }

    /// A group is parked for so much longer.
    pub(crate) fn parked(&self, group: &str, left: Micros) {
        let now = self.clock.now();
        let to = now.saturating_add(left);
        let mut state = self.state.lock();
        let known = state.parked.iter_mut().rev().find(|known| known.group == group);
        match known.filter(|known| known.to >= now) {
            Some(known) => known.to = known.to.max(to),
            None => {
                if state.parked.len() == PARKED {
                    state.parked.pop_front();
                }
                state.parked.push_back(ParkedTime { group: group.to_owned(), from: now, to });
            }
        }
    }

    /// Forgets models and clients that the config no longer has.
    pub(crate) fn reload(&self, config: &LlmConfig) {
        let mut state = self.state.lock();
        state.models.retain(|name, _| config.model(name).is_some());
        state
            .clients
            .retain(|name, _| name == "default" || config.clients.iter().any(|one| one.name == *name));
        let groups = || config.upstreams.iter().flat_map(|upstream| &upstream.keys);
        let is_upstream = |name: &str| config.upstream(name).is_some();
        state.groups.retain(|name, _| is_upstream(name) || groups().any(|key| key.group == *name));
    }
}

impl SeenWaiting {
    /// It waits for other charges from now on.
    pub(crate) fn planned(&self, charges: &[Planned]) {
        if let Some(waiter) = self.seen.state.lock().waiting.get_mut(&self.number) {
            waiter.charges = charges.to_vec();
        }
    }

    /// It was admitted.
    pub(crate) fn admitted(self, charges: &[Planned], waited: Duration) -> SeenOpen {
        self.waited(waited);
        let model = self.seen.state.lock().waiting.get(&self.number).map(|waiter| waiter.model.clone());
        self.admitted_one(&model.unwrap_or_default(), charges, self.is_exact)
    }

    /// It has waited for so long, and is admitted.
    pub(crate) fn waited(&self, waited: Duration) {
        // A call that was admitted at once has not waited.
        if waited >= Duration::from_millis(1) {
            self.seen.state.lock().waits.push(Micros::from(waited).get());
        }
    }

    /// One call of a batch is in flight.
    pub(crate) fn admitted_one(&self, model: &str, charges: &[Planned], is_exact: bool) -> SeenOpen {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        let client = state.waiting.get(&self.number).map(|waiter| waiter.client.clone()).unwrap_or_default();
        let charges = charges.iter().map(|charge| (charge.limit.clone(), charge.cost)).collect();
        state.last += 1;
        let number = state.last;
        state.open.insert(number, Open { since: now, charges });
        drop(state);
        SeenOpen { seen: self.seen.clone(), number, model: model.to_owned(), client, is_exact }
    }

    /// It was refused.
    pub(crate) fn refused(self) {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        if let Some(model) = state.waiting.get(&self.number).map(|waiter| waiter.model.clone()) {
            state.models.entry(model).or_default().refused.add(now, 1);
        }
    }
}

impl Drop for SeenWaiting {
    fn drop(&mut self) {
        self.seen.state.lock().waiting.remove(&self.number);
    }
}

impl SeenOpen {
    /// It was settled with this usage. `estimated` is the estimate of its input, `reserved` the whole reservation; a value that
    /// is not reported is not compared.
    pub(crate) fn settled(&self, usage: &Usage, estimated: u64, reserved: u64, is_reported: bool) {
        let now = self.seen.clock.now();
        let mut state = self.seen.state.lock();
        let used = usage.input.saturating_add(usage.output);
        let model = state.models.entry(self.model.clone()).or_default();
        model.input.add(now, usage.input);
        model.output.add(now, usage.output);
        if is_reported && estimated > 0 && usage.input > 0 {
            let ratio = u128::from(usage.input) * u128::from(ONE) / u128::from(estimated);
            model.ratios.push(u64::try_from(ratio).unwrap_or(u64::MAX));
            model.is_exact = self.is_exact;
        }
        state.clients.entry(self.client.clone()).or_default().add(now, used);
        let sums = [
            reserved,
            reserved.saturating_sub(used),
            used,
            used.saturating_sub(reserved),
            u64::from(!is_reported),
        ];
        state.sums.iter_mut().zip(sums).for_each(|(minutes, sum)| minutes.add(now, sum));
    }
}

impl Drop for SeenOpen {
    fn drop(&mut self) {
        self.seen.state.lock().open.remove(&self.number);
    }
}

impl Seen {
    /// What calls in flight have reserved of a limit within its window.
    pub(crate) fn reserved(&self, limit: &str, window: Micros, now: Micros) -> u64 {
        let state = self.state.lock();
        let fresh = state.open.values().filter(|open| now.saturating_sub(open.since) < window);
        let of_limit = fresh.flat_map(|open| &open.charges).filter(|(name, _)| name == limit);
        of_limit.fold(0, |sum, (_, cost)| sum.saturating_add(*cost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_add_up_and_pass() {
        let at = |minute: u64| Micros::new(minute * 60_000_000 + 1);
        let mut minutes = Minutes::default();
        minutes.add(at(100), 5);
        minutes.add(at(100), 2);
        minutes.add(at(159), 1);
        assert_eq!((minutes.sum(at(159)), minutes.series(at(159)).first()), (8, Some(&7)));
        assert_eq!((minutes.sum(at(160)), minutes.sum(at(1_000))), (1, 0));
        minutes.add(at(160), 3);
        assert_eq!(minutes.series(at(160))[MINUTES - 2..], [1, 3]);
    }

    #[test]
    fn a_group_that_is_parked_again_has_one_time() {
        let hands = tollgate::ManualClock::at(Micros::from_secs(100));
        let seen = Seen::new(hands.clock());
        let times = || -> Vec<(String, u64, u64)> {
            let seconds = |at: Micros| at.get() / 1_000_000;
            let of = |time: &ParkedTime| (time.group.clone(), seconds(time.from), seconds(time.to));
            seen.state.lock().parked.iter().map(of).collect()
        };
        seen.parked("a", Micros::from_secs(5));
        seen.parked("b", Micros::from_secs(1));
        hands.advance(Micros::from_secs(3));
        seen.parked("a", Micros::from_secs(5));
        assert_eq!(times(), [("a".to_owned(), 100, 108), ("b".to_owned(), 100, 101)]);
        hands.advance(Micros::from_secs(60));
        seen.parked("a", Micros::from_secs(2));
        assert_eq!(times()[2..], [("a".to_owned(), 163, 165)]);
        for number in 0..100 {
            seen.parked(&number.to_string(), Micros::from_secs(2));
        }
        assert_eq!(times().len(), PARKED);
    }

    #[test]
    fn tokens_are_kept_for_three_ranges() {
        let at = |seconds: u64| Micros::from_secs(90_000 + seconds);
        let mut tokens = Tokens::default();
        tokens.add(at(0), 7);
        tokens.add(at(61), 3);
        let sums =
            |now| tokens.series(now).map(|(step, values)| (step, values.len(), values.iter().sum::<u64>()));
        assert_eq!(sums(at(62)), [(5, 60, 10), (60, 60, 10), (900, 96, 10)]);
        assert_eq!(sums(at(302)), [(5, 60, 3), (60, 60, 10), (900, 96, 10)]);
        assert_eq!(sums(at(7_200)), [(5, 60, 0), (60, 60, 0), (900, 96, 10)]);
        assert_eq!(sums(at(96 * 900)), [(5, 60, 0), (60, 60, 0), (900, 96, 0)]);
    }

    #[test]
    fn percentiles_are_of_the_newest() {
        let mut newest = Newest::default();
        assert_eq!(percentiles(&newest, [50]), None);
        (1..=100).for_each(|value| newest.push(value));
        assert_eq!(percentiles(&newest, [5, 50, 95]), Some(([6, 51, 96], 100)));
        (0..REMEMBERED).for_each(|_| newest.push(7));
        assert_eq!(percentiles(&newest, [0, 100]), Some(([7, 7], REMEMBERED)));
    }
}
