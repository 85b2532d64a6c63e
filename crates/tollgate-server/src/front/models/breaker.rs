//! Waits for an overloaded provider to recover.
//!
//! A 529 or a 503 speaks of the provider's capacity and says nothing of our limits: no group is parked and nothing is learned. Calls of
//! that model wait, then one goes first, and the others follow once it was answered, or was not refused for two seconds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long the first overload is waited out if the provider does not say. Each that follows doubles it.
const FIRST: Duration = Duration::from_millis(500);

/// The longest wait.
const LONGEST: Duration = Duration::from_secs(30);

/// How long the others wait for the first to be answered. A provider that is still overloaded refuses sooner than that, and an answer may take
/// minutes.
const TRIED: Duration = Duration::from_secs(2);

/// How long a call that waits for the answer of the first one sleeps before it checks again.
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// The breakers of one upstream, by configured model.
#[derive(Default)]
pub(super) struct Breaker {
    models: Arc<Mutex<HashMap<String, State>>>,
}

#[derive(Clone, Copy)]
struct State {
    overloads: u32,
    closed_until: Instant,
    /// Until when the others wait for the one that goes first, once one has gone.
    tried_until: Option<Instant>,
}

/// Leave to send one call.
pub(super) struct Pass {
    models: Arc<Mutex<HashMap<String, State>>>,
    model: String,
    /// How many overloads there had been when it went, if there had been some.
    after: Option<u32>,
    /// Until when all others wait for this one, if it is the first.
    tried_until: Option<Instant>,
}

impl State {
    fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.closed_until.saturating_duration_since(now);
        match left.is_zero() {
            false => Some(left),
            true => self.tried_until.is_some_and(|until| now < until).then_some(LOOK_AGAIN),
        }
    }
}

impl Breaker {
    /// How long to wait before asking again, if calls of this model wait.
    pub(super) fn wait(&self, model: &str, now: Instant) -> Option<Duration> {
        self.models.lock().get(model)?.wait(now)
    }

    /// Leave to send a call now, or how long to wait before asking again.
    pub(super) fn enter(&self, model: &str, now: Instant) -> Result<Pass, Duration> {
        let mut models = self.models.lock();
        let (mut after, mut tried_until) = (None, None);
        if let Some(state) = models.get_mut(model) {
            if let Some(wait) = state.wait(now) {
                return Err(wait);
            }
            after = Some(state.overloads);
            if state.tried_until.is_none() {
                tried_until = Some(now + TRIED);
                state.tried_until = tried_until;
            }
        }
        drop(models);
        Ok(Pass { models: self.models.clone(), model: model.to_owned(), after, tried_until })
    }
}

impl Pass {
    /// The provider is overloaded, and may have said for how long.
    pub(super) fn overloaded(self, now: Instant, hint: Option<Duration>) {
        let mut models = self.models.lock();
        let new = State { overloads: 0, closed_until: now, tried_until: None };
        let state = models.entry(self.model.clone()).or_insert(new);
        // Calls that were on their way together are one overload.
        if state.overloads == 0 || now >= state.closed_until {
            state.overloads = state.overloads.saturating_add(1);
        }
        let doubled = FIRST.saturating_mul(1 << (state.overloads - 1).min(16)).min(LONGEST);
        let wait = hint.map_or(doubled, |hint| hint.min(LONGEST));
        state.closed_until = state.closed_until.max(now + wait);
        // One goes first again.
        state.tried_until = None;
    }

    /// The provider answered.
    pub(super) fn answered(self) {
        let mut models = self.models.lock();
        // An old answer does not say that the provider has recovered since.
        if self.after.is_some() && models.get(&self.model).map(|state| state.overloads) == self.after {
            models.remove(&self.model);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.tried_until.is_some()
            && let Some(state) = self.models.lock().get_mut(&self.model)
            && state.tried_until == self.tried_until
        {
            state.tried_until = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d3_one_goes_first_after_an_overload_and_the_others_follow_its_answer() {
        let breaker = Breaker::default();
        let now = Instant::now();
        let enter = |at: Duration| breaker.enter("m", now + at);
        let (one, two) = (enter(Duration::ZERO).ok().unwrap(), enter(Duration::ZERO).ok().unwrap());
        one.overloaded(now, None);
        two.overloaded(now, None);
        assert_eq!(enter(Duration::ZERO).err(), Some(FIRST), "two at once are one overload");
        assert!(breaker.enter("other", now).is_ok(), "other models go on");
        let first = enter(FIRST).ok().unwrap();
        assert_eq!(enter(FIRST).err(), Some(LOOK_AGAIN));
        first.overloaded(now + FIRST, None);
        assert_eq!(enter(FIRST).err(), Some(FIRST * 2));
        let left = enter(FIRST * 3).ok().unwrap();
        drop(left);
        let first = enter(FIRST * 3).ok().unwrap();
        first.answered();
        assert!(enter(FIRST * 3).is_ok() && enter(FIRST * 3).is_ok());
    }

    #[test]
    fn d3_the_others_follow_a_first_that_is_not_refused_and_a_late_refusal_holds_them_again() {
        let breaker = Breaker::default();
        let now = Instant::now();
        let enter = |at: Duration| breaker.enter("m", now + at);
        enter(Duration::ZERO).ok().unwrap().overloaded(now, None);
        let slow = enter(FIRST).ok().unwrap();
        assert_eq!(enter(FIRST + TRIED - Duration::from_millis(1)).err(), Some(LOOK_AGAIN));
        let (second, third) = (enter(FIRST + TRIED).ok().unwrap(), enter(FIRST + TRIED).ok().unwrap());
        second.overloaded(now + FIRST + TRIED, None);
        let closed = FIRST + TRIED + FIRST * 2;
        assert_eq!(enter(FIRST + TRIED).err(), Some(FIRST * 2), "it has not recovered");
        third.answered();
        assert!(enter(FIRST + TRIED).is_err(), "an answer to an older call says nothing of that");
        let next = enter(closed).ok().unwrap();
        drop(slow);
        assert_eq!(enter(closed).err(), Some(LOOK_AGAIN), "one goes first again, whatever the older ones do");
        next.answered();
        assert!(enter(closed).is_ok() && enter(closed).is_ok());
    }

    #[test]
    fn a_hint_is_heeded_and_bounded() {
        let breaker = Breaker::default();
        let now = Instant::now();
        breaker.enter("m", now).ok().unwrap().overloaded(now, Some(Duration::from_millis(150)));
        assert_eq!(breaker.enter("m", now).err(), Some(Duration::from_millis(150)));
        breaker.enter("n", now).ok().unwrap().overloaded(now, Some(Duration::MAX));
        assert_eq!(breaker.enter("n", now).err(), Some(LONGEST));
    }
}
