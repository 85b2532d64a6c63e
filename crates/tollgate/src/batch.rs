//! Many keys at once under one limit, each charged by itself.
//!
//! In this process that is the limiter's own batch. Over a store elsewhere it is one call for up to 64 keys: every item is
//! marked as one that only watches, so a refusal holds none of the others up and is not charged. What is asked twice in one
//! call would be added up, so the second of a key goes in a further call.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate_kernel::Outcome;
use tracing::Instrument;

use crate::decision::LimitOutcome;
use crate::error::Error;
use crate::gate::{self, Answered, Backend, Entry, MOST_LIMITS, Place, Resolved};
use crate::limiter::Limiter;
use crate::registry::{Ask, Tollgate};
use crate::remote::Remote;
use crate::report::Source;

impl Tollgate {
    /// Charges each of many keys one unit under one limit, each by itself, and answers in their order. Over a store elsewhere
    /// this is one call for up to 64 keys; a key that is named more than once is charged as often, one call after the other. Slices are
    /// not used here.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// # use tollgate::{Limit, Tollgate};
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 1)?).build()?;
    /// let answers = gate.check_many("api", &["user:1", "user:2", "user:1"]).await?;
    /// let admitted: Vec<bool> = answers.iter().map(|answer| !answer.denies()).collect();
    /// assert_eq!(admitted, [true, true, false]);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn check_many<K: AsRef<str>>(
        &self,
        limit: &str,
        keys: &[K],
    ) -> Result<Vec<LimitOutcome<'_>>, Error> {
        let entry = self.entry(limit)?;
        match &self.gate.backend {
            Backend::Memory(_) => self.check_many_here(entry, keys).await,
            Backend::Remote(remote) => self.check_many_there(remote, entry, keys).await,
        }
    }

    /// The limiter's own way where all answers are alike, else one by one.
    async fn check_many_here<'a, K: AsRef<str>>(
        &'a self,
        entry: &'a Arc<Entry>,
        keys: &[K],
    ) -> Result<Vec<LimitOutcome<'a>>, Error> {
        let name = entry.rule.name();
        let is_plain = entry.overrides.is_empty() && !entry.rule.is_shadow();
        let mut limits = Vec::with_capacity(keys.len());
        if is_plain && matches!(entry.base, Place::Counted { .. }) {
            let mut outcomes = Vec::with_capacity(keys.len());
            Limiter::on(self.gate.clone(), entry.clone()).check_many(keys, &mut outcomes);
            limits.extend(outcomes.into_iter().map(|outcome| {
                // No counters hold nothing at all: the key was malformed.
                let is_malformed = outcome == Outcome::BLOCKED;
                let source = if is_malformed { Source::Malformed } else { Source::Store };
                LimitOutcome { name, outcome, shadow: false, source }
            }));
            return Ok(limits);
        }
        for key in keys {
            limits.extend(self.charge(&[Ask::new(name, key.as_ref())]).await?.limits());
        }
        Ok(limits)
    }

    async fn check_many_there<'a: 'k, 'k, K: AsRef<str>>(
        &'a self,
        remote: &Remote,
        entry: &'a Entry,
        keys: &'k [K],
    ) -> Result<Vec<LimitOutcome<'a>>, Error> {
        let started = self.gate.started("charge");
        started.span().record("limiter", entry.rule.name()).record("keys", keys.len());
        let resolve = |key: &'k K| Resolved::new(&self.gate, entry, key.as_ref(), 1).map(Some);
        let mut resolved: Vec<Option<Resolved<'a, 'k>>> =
            keys.iter().map(resolve).collect::<Result<_, _>>()?;
        let rounds = rounds(resolved.iter().flatten().map(Resolved::canonical));
        let mut limits: Vec<Option<LimitOutcome<'a>>> = vec![None; keys.len()];
        for indices in rounds.iter().flat_map(|round| round.chunks(MOST_LIMITS)) {
            let asks: Vec<Resolved<'a, 'k>> =
                indices.iter().filter_map(|index| resolved[*index].take()).collect();
            let call = remote.charge_each(&asks).instrument(started.span().clone());
            let answers = Box::pin(call).await?;
            for ((index, ask), Answered { answers, trouble }) in indices.iter().zip(&asks).zip(answers) {
                let decision = gate::conclude(std::slice::from_ref(ask), answers);
                let limit = *decision.binding();
                self.gate.tell_all(
                    "charge",
                    std::slice::from_ref(ask),
                    &decision,
                    trouble,
                    &started.of_one(),
                );
                limits[*index] = Some(limit);
            }
        }
        Ok(limits.into_iter().flatten().collect())
    }
}

/// In which order to ask for keys of which some are the same: the first of each together, then the second, and so on. What is
/// asked twice in one call would be added up.
fn rounds<'k>(keys: impl Iterator<Item = Option<&'k str>>) -> Vec<Vec<usize>> {
    let mut seen: HashMap<Option<&str>, usize> = HashMap::new();
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (index, key) in keys.enumerate() {
        let round = seen.entry(key).or_default();
        if rounds.len() == *round {
            rounds.push(Vec::new());
        }
        rounds[*round].push(index);
        *round += 1;
    }
    rounds
}
