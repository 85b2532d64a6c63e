//! Keys whose stored state was not written by us, or is broken: for a while they do not share statements with other keys.
//!
//! Only another program can write such a state, so there are few. If there are more than fit here, batches with the others fail
//! once and are divided into halves, as at the first time (`postgres.rs`).

use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::{Failure, StoreError};

/// How many keys are remembered, and for how long.
const MOST: usize = 64;
const LASTS: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct SickKeys {
    /// The oldest first.
    noted: Vec<(Uuid, Instant)>,
}

impl SickKeys {
    pub(super) fn note(&mut self, key: Uuid) {
        self.noted.retain(|(other, at)| *other != key && at.elapsed() < LASTS);
        if self.noted.len() >= MOST {
            self.noted.remove(0);
        }
        self.noted.push((key, Instant::now()));
    }

    /// Whether any of these must go alone.
    pub(super) fn is_any(&self, keys: &[Uuid]) -> bool {
        self.noted.iter().any(|(other, at)| keys.contains(other) && at.elapsed() < LASTS)
    }

    /// Divides keys into those that go alone, and those that can be batched.
    pub(super) fn split(&self, keys: &[Uuid]) -> (Vec<Uuid>, Vec<Uuid>) {
        if self.noted.is_empty() {
            return (Vec::new(), keys.to_vec());
        }
        let is_sick = |key: &Uuid| self.noted.iter().any(|(other, at)| other == key && at.elapsed() < LASTS);
        keys.iter().partition(|key| is_sick(key))
    }
}

/// Whether a statement failed because of the state of one of its keys: the server rejected the whole statement.
pub(super) fn is_of_a_state(error: &StoreError) -> bool {
    error.failure() == Some(Failure::State) && !error.is_ambiguous()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sick_keys_go_alone_and_are_few() {
        let key = |number: usize| Uuid::from_u128(number as u128);
        let mut sick = SickKeys::default();
        assert_eq!(sick.split(&[key(1), key(2)]), (vec![], vec![key(1), key(2)]));
        sick.note(key(2));
        sick.note(key(2));
        assert_eq!(sick.split(&[key(1), key(2)]), (vec![key(2)], vec![key(1)]));
        (0..1_000).for_each(|number| sick.note(key(number)));
        assert_eq!(sick.noted.len(), MOST);
    }
}
