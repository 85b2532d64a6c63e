//! The replay: each request charged at its own time, through the library, on the memory store.
//!
//! The clock is moved by hand and never looks at the day it is, so the same traffic always gets the same answers. The store
//! has room for every key of the traffic, so that none is ever met by the overflow rules of a full one.

use tollgate::config::Config;
use tollgate::{Limiter, ManualClock, Micros, Outcome, Tollgate};

use super::decisions::{Decision, Decisions};
use super::intake::Harvest;
use super::summary::{Ending, Summary, Tally};
use super::traffic::Request;
use crate::failure::Failure;
use crate::screen::Progress;
use crate::validate;

/// The fewest keys that a store has room for, however short the log.
const LEAST_ROOM: usize = 1024;

/// The policy, ready to be charged.
pub(super) struct Gate {
    clock: ManualClock,
    /// In the order of the names that the requests' limits are indices into.
    limiters: Vec<(String, Limiter)>,
}

impl Gate {
    /// With room for as many keys as there are requests, and for as many entries of logs and leases.
    pub(super) fn new(config: Config, names: &[String], requests: &[Request]) -> Result<Gate, Failure> {
        let failed = |error: tollgate::Error| Failure::new(error.to_string());
        let start = requests.first().map_or(0, |request| request.time_us);
        let clock = ManualClock::at(Micros::new(start));
        let gate = Tollgate::builder()
            .policy(config.policy)
            .clock(clock.clock())
            .max_keys(requests.len().saturating_mul(2).max(LEAST_ROOM))
            .sweep_every(None)
            .build()
            .map_err(failed)?;
        let limiters = names
            .iter()
            .map(|name| Ok((name.clone(), gate.limiter(name).map_err(failed)?)))
            .collect::<Result<_, Failure>>()?;
        Ok(Gate { clock, limiters })
    }

    /// Charges every request in order and counts the answers.
    pub(super) fn replay(
        &self,
        harvest: &Harvest,
        files: &[String],
        mut decisions: Decisions,
    ) -> Result<Summary, Failure> {
        let (requests, keys) = (&harvest.traffic.requests, &harvest.traffic.keys);
        let words =
            self.limiters.iter().map(|(name, limiter)| (name.clone(), validate::words(limiter.rule())));
        let mut tally = Tally::new(words, requests);
        let mut progress = Progress::new();
        for (count, request) in (0u64..).zip(requests) {
            progress.at("replaying", count);
            self.clock.set(Micros::new(request.time_us));
            let (name, limiter) = &self.limiters[usize::from(request.limit)];
            let key = keys.text(request.key);
            let (outcome, ending) = charge(limiter, key, request.cost)?;
            tally.count(request, keys, ending);
            if decisions.unwanted() {
                continue;
            }
            decisions.write(&Decision {
                line: request.line,
                time_us: request.time_us,
                limit: name,
                key,
                cost: request.cost,
                allowed: ending != Ending::Denied,
                remaining: (outcome.capacity != u64::MAX).then_some(outcome.remaining),
                retry_after_us: outcome.retry_after.map(Micros::get),
                reset_after_us: outcome.reset_after.get(),
                delay_us: outcome.delay.get(),
                would_deny: (ending == Ending::WouldDeny).then_some(true),
                file: (files.len() > 1).then(|| files[usize::from(request.file)].as_str()),
            })?;
        }
        decisions.finish()?;
        drop(progress);
        Ok(tally.finish(keys, harvest.skipped, harvest.first_skipped.clone()))
    }
}

/// Charges one request. A shadow limit lets everything through, and the answer is the one that it would have given.
fn charge(limiter: &Limiter, key: &str, cost: u64) -> Result<(Outcome, Ending), Failure> {
    let failed = |error: tollgate::Error| Failure::new(error.to_string());
    if !limiter.rule().is_shadow() {
        let outcome = limiter.charge(key, cost).map_err(failed)?;
        return Ok((outcome, if outcome.allowed { Ending::Allowed } else { Ending::Denied }));
    }
    let outcome = tollgate::charge(&[limiter.of(key).cost(cost)]).map_err(failed)?.binding().outcome;
    Ok((outcome, if outcome.allowed { Ending::Allowed } else { Ending::WouldDeny }))
}
