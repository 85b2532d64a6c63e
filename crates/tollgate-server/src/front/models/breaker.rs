//! Waits for an overloaded provider to recover.
//!
//! A 529 or a 503 speaks of the provider's capacity and says nothing of our limits: no group is parked and nothing is learned. Calls of
//! that model wait, then one goes first, and the others follow once it was answered.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long the first overload is waited out if the provider does not say. Each that follows doubles it.
const FIRST: Duration = Duration::from_millis(500);

/// The longest wait.
const LONGEST: Duration = Duration::from_secs(30);

/// How long those who wait for the first to be answered sleep before they look again.
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// The breakers of one upstream, by configured model.
#[derive(Default)]
pub(super) struct Breaker {
    models: Arc<Mutex<HashMap<String, State>>>,
}

#[derive(Clone, Copy)]
struct State {
    overloads: u32,
    closed_from: Instant,
    is_tried: bool,
}

/// Leave to send one call.
pub(super) struct Pass {
    models: Arc<Mutex<HashMap<String, State>>>,
    model: String,
    /// Whether all others wait for this one.
    is_first: bool,
}

impl State {
    fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.closed_from.saturating_duration_since(now);
        match left.is_zero() {
            false => Some(left),
            true => self.is_tried.then_some(LOOK_AGAIN),
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
        let mut is_first = false;
        if let Some(state) = models.get_mut(model) {
            if let Some(wait) = state.wait(now) {
                return Err(wait);
            }
            (state.is_tried, is_first) = (true, true);
        }
        drop(models);
        Ok(Pass { models: self.models.clone(), model: model.to_owned(), is_first })
    }
}

impl Pass {
    /// The provider is overloaded, and may have said for how long.
    pub(super) fn overloaded(self, now: Instant, hint: Option<Duration>) {
        let mut models = self.models.lock();
        let new = State { overloads: 0, closed_from: now, is_tried: false };
        let state = models.entry(self.model.clone()).or_insert(new);
        // Calls that were on their way together are one overload.
        if state.overloads == 0 || now >= state.closed_from {
            state.overloads = state.overloads.saturating_add(1);
        }
        let doubled = FIRST.saturating_mul(1 << (state.overloads - 1).min(16)).min(LONGEST);
        let wait = hint.map_or(doubled, |hint| hint.min(LONGEST));
        state.closed_from = state.closed_from.max(now + wait);
    }

    /// The provider answered.
    pub(super) fn answered(self) {
        let mut models = self.models.lock();
        // An old answer does not say that the provider has recovered since.
        if self.is_first {
            models.remove(&self.model);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.is_first
            && let Some(state) = self.models.lock().get_mut(&self.model)
        {
            state.is_tried = false;
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
    fn a_hint_is_heeded_and_bounded() {
        let breaker = Breaker::default();
        let now = Instant::now();
        breaker.enter("m", now).ok().unwrap().overloaded(now, Some(Duration::from_millis(150)));
        assert_eq!(breaker.enter("m", now).err(), Some(Duration::from_millis(150)));
        breaker.enter("n", now).ok().unwrap().overloaded(now, Some(Duration::MAX));
        assert_eq!(breaker.enter("n", now).err(), Some(LONGEST));
    }
}
