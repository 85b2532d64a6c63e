//! The replay: each request charged at its own time, through the library, on the memory store.
//!
//! A request that meets several limits is one charge over all of them, as the HTTP layer makes it: all are charged, or none.
//!
//! The clock is moved by hand and never looks at the day it is, so the same traffic always gets the same answers. The store
//! has room for every key of the traffic, so that none is ever met by the overflow rules of a full one.

use std::time::Duration;

use smallvec::SmallVec;
use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{Allowance, Charge, Limit, Limiter, ManualClock, Tollgate};

use super::decisions::{Decision, Decisions};
use super::denied::DeniedKeys;
use super::intake::Harvest;
use super::peaks::{CounterBesideLog, Groups, Peaks};
use super::shown::ShownKeys;
use super::summary::{Answer, Ending, Summary, Tally};
use super::traffic::{Keys, Request};
use crate::failure::Failure;
use crate::screen::Progress;
use crate::validate;

/// The fewest keys that a store has room for, however short the log.
const LEAST_ROOM: usize = 1024;

/// What a lease takes beside its key, and the least room for all of them.
const LEASE_BYTES: usize = 1024;
const LEAST_LEASE_BYTES: usize = 1024 * 1024;

/// The policy, ready to be charged.
pub(super) struct Gate {
    clock: ManualClock,
    /// In the order of the names that the requests' limits are indices into.
    limits: Vec<Replayed>,
}

/// One limit of the policy.
struct Replayed {
    name: String,
    limiter: Limiter,
    /// Whether its answers count as they are: it is neither a shadow limit nor one of leases.
    is_plain: bool,
    is_lease: bool,
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
            .reservation_bytes(requests.len().saturating_mul(LEASE_BYTES).max(LEAST_LEASE_BYTES))
            .sweep_every(None)
            .build()
            .map_err(failed)?;
        let limits = names
            .iter()
            .map(|name| {
                let limiter = gate.local(name).map_err(failed)?;
                let rule = limiter.rule();
                let is_lease = matches!(rule.allowance(), Allowance::Limited(Limit::Concurrency(_)));
                let is_plain = !rule.is_shadow() && !is_lease;
                Ok(Replayed { name: name.clone(), limiter, is_plain, is_lease })
            })
            .collect::<Result<_, Failure>>()?;
        Ok(Gate { clock, limits })
    }

    /// Charges every request in order and counts the answers.
    pub(super) fn replay(
        &self,
        harvest: &Harvest,
        files: &[String],
        shown: &ShownKeys,
        mut decisions: Decisions,
        mut denied: DeniedKeys,
    ) -> Result<(Summary, Vec<(String, u64)>), Failure> {
        let (requests, keys) = (&harvest.traffic.requests, &harvest.traffic.keys);
        let words =
            self.limits.iter().map(|limit| (limit.name.clone(), validate::words(&limit.limiter.rule())));
        let mut tally = Tally::new(words, requests);
        let mut progress = Progress::of_steps(requests.len() as u64);
        let mut answers = Vec::new();
        for (count, request) in (0u64..).zip(harvest.traffic.charges()) {
            progress.at("replaying", count);
            self.clock.set(Micros::new(request[0].time_us));
            answers.clear();
            self.charge(request, keys, &mut answers)?;
            tally.count(request, keys, &answers);
            if decisions.unwanted() {
                continue;
            }
            for (part, answer) in request.iter().zip(&answers) {
                let outcome = &answer.outcome;
                let allowed = matches!(answer.ending, Ending::Allowed | Ending::WouldDeny);
                decisions.write(&Decision {
                    line: part.line,
                    time_us: part.time_us,
                    limit: &self.limits[usize::from(part.limit)].name,
                    key: &shown.show(keys.text(part.key), keys.text(keys.normal(part.key))),
                    cost: part.cost,
                    allowed,
                    remaining: (outcome.capacity != u64::MAX).then_some(outcome.remaining),
                    retry_after_us: outcome.retry_after.map(Micros::get),
                    reset_after_us: outcome.reset_after.get(),
                    delay_us: if allowed { outcome.delay.get() } else { 0 },
                    would_deny: (answer.shadow && !outcome.allowed).then_some(true),
                    file: (files.len() > 1).then(|| files[usize::from(part.file)].as_str()),
                })?;
            }
        }
        decisions.finish()?;
        drop(progress);
        let summary = tally.finish(harvest, files, shown, &mut denied)?;
        Ok((summary, denied.finish()?))
    }

    /// Adds what each limit would have had to be for each key, and what sliding counters did that exact logs would not.
    pub(super) fn add_peaks(&self, summary: &mut Summary, harvest: &Harvest) {
        let groups = Groups::of(&harvest.traffic);
        let rules = || (0u16..).zip(&self.limits).map(|(index, limit)| (index, limit.limiter.rule()));
        summary.peaks = Some(rules().filter_map(|(index, rule)| Peaks::of(&rule, index, &groups)).collect());
        summary.counters =
            Some(rules().filter_map(|(index, rule)| CounterBesideLog::of(&rule, index, &groups)).collect());
    }

    /// Charges what one request owes, all of it or nothing. A shadow limit lets everything through, and its answer is the one that
    /// it would have given.
    fn charge(&self, request: &[Request], keys: &Keys, answers: &mut Vec<Answer>) -> Result<(), Failure> {
        let failed = |error: tollgate::Error| Failure::new(error.to_string());
        let limit = |part: &Request| &self.limits[usize::from(part.limit)];
        let Some(first) = request.first().map(limit) else { return Ok(()) };
        if let [only] = request
            && first.is_plain
        {
            let outcome = first.limiter.charge(keys.text(only.key), only.cost).map_err(failed)?;
            let ending = if outcome.is_allowed() { Ending::Allowed } else { Ending::Denied };
            answers.push(Answer { outcome: *outcome.numbers(), ending, shadow: false });
            return Ok(());
        }
        let charges: SmallVec<[Charge<'_>; 8]> = request
            .iter()
            .map(|part| Charge::new(&limit(part).limiter, keys.text(part.key)).cost(part.cost))
            .collect();
        // A log does not say when a request ended: a lease is held for as long as it lasts.
        let decision = match request.iter().any(|part| limit(part).is_lease) {
            false => first.limiter.charge_all(&charges).map_err(failed)?,
            true => match first.limiter.reserve_all(&charges, Duration::ZERO).map_err(failed)? {
                Ok(reservation) => reservation.decision().clone(),
                Err(denied) => denied.into_decision(),
            },
        };
        for (part, answered) in request.iter().zip(decision.outcomes()) {
            let mut outcome = *answered.numbers();
            let ending = match (decision.is_allowed(), outcome.allowed) {
                (true, true) => Ending::Allowed,
                (true, false) => Ending::WouldDeny,
                (false, false) if !answered.is_shadow() => Ending::Denied,
                (false, _) => Ending::DeniedByOther,
            };
            if ending == Ending::DeniedByOther && outcome.allowed {
                // It answered as if charged, and was not.
                let stands = *limit(part).limiter.status(keys.text(part.key)).numbers();
                (outcome.remaining, outcome.reset_after) = (stands.remaining, stands.reset_after);
            }
            answers.push(Answer { outcome, ending, shadow: answered.is_shadow() });
        }
        Ok(())
    }
}
