//! Waits until a charge fits, under several limits at once.
//!
//! A waiter takes a ticket (`wait.rs`) and tries when its turn comes. After a denial it queues for the limits that denied it,
//! sleeps for the time they return, and tries again. With a remote store it tries at least every 250 ms, because other processes
//! may give something back. Each try looks the limits up again, so a waiter follows a reload. The keys are parsed before the
//! first try; every try has them in canonical form. Nothing is charged until a try succeeds. If the waiter leaves while a charge
//! is on its way to a remote store, the charge is cancelled there by its id. Every try has a new id, because a cancelled id stays
//! cancelled.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::Micros;
use tollgate_store::ChargeId;
use tracing::Instrument;

use super::held::held;
use super::local::run_local;
use super::request::{Answer, Charges, Mode, Request, Step, Take};
use super::{Backend, Engine, conclude};
use crate::charge::Charge;
use crate::decision::Decision;
use crate::error::Error;
use crate::key::KeyRef;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Resolved, ResolvedAll};
use crate::remote::{Answered, DenialCache, Identity, NextStep};
use crate::telemetry::{Started, Trouble};
use crate::wait::Pair;

/// The longest sleep before a waiter tries a remote store again, in µs. Jitter shortens it by up to two fifths, so that waiters
/// do not try in step.
const LOOK_AGAIN_US: u64 = 250_000;

/// What a waiter waits for. The keys are canonical, so that a try need not parse them.
struct Wanted<'a> {
    charges: &'a [Charge<'a>],
    take: Take,
    id: Option<ChargeId>,
    holds_nothing: Option<&'static str>,
}

/// One try.
struct Tried<'a> {
    charges: ResolvedAll<'static, 'a>,
    decision: Decision,
    identity: Option<Identity>,
    trouble: Trouble,
}

impl Engine {
    pub(super) fn wait<'a>(self: &Arc<Engine>, request: &mut Request<'a>, within: Duration) -> Step<'a> {
        let (engine, started) = (self.clone(), self.started("wait"));
        let (take, id, holds_nothing) = (request.take, request.id, request.holds_nothing());
        let charges = request.charges.take();
        Step::Waits(Box::pin(async move {
            let first = {
                let _within = started.enter();
                engine.find_all(charges.as_slice(), holds_nothing)?
            };
            let charges = canonical(charges.as_slice(), &first);
            let wanted = Wanted { charges: &charges, take, id, holds_nothing };
            let span = started.span().clone();
            let tried = engine.wait_for(&wanted, &first, within).instrument(span).await?;
            Ok(engine.finish_wait(tried, take, &started))
        }))
    }

    fn finish_wait(&self, tried: Tried<'_>, take: Take, started: &Started) -> Answer {
        let _within = started.enter();
        let Tried { charges, decision, identity, trouble } = tried;
        self.report("wait", &charges, &decision, trouble, started);
        let held = held(&charges, &decision, identity, take);
        Answer { held, ..Answer::of(decision) }
    }

    /// Tries until the charges fit or the time is over. `first` has the limits as they are before the first try.
    async fn wait_for<'a>(
        &self,
        wanted: &Wanted<'a>,
        first: &[Resolved<'_, '_>],
        within: Duration,
    ) -> Result<Tried<'a>, Error> {
        let deadline = self.clock.now().saturating_add(Micros::from(within));
        // A shadow limit never denies, so nothing queues for it. A charge that can never fit is denied at once.
        let waits = |charge: &&Resolved<'_, '_>| !charge.is_shadow() && charge.counted().is_some();
        let is_hopeless = |charge: &Resolved<'_, '_>| {
            !charge.is_shadow()
                && charge.key_limit().is_none_or(|key_limit| key_limit.is_hopeless_for(charge.cost))
        };
        let pairs: SmallVec<[(usize, Pair); 4]> = first
            .iter()
            .enumerate()
            .filter(|(_, charge)| waits(charge))
            .filter_map(|(index, charge)| Some((index, (charge.entry.name, charge.canonical()?.into()))))
            .collect();
        if pairs.is_empty() || first.iter().any(is_hopeless) {
            return self.try_once(wanted, DenialCache::of(wanted.id)).await;
        }
        let indexes: SmallVec<[usize; 4]> = pairs.iter().map(|(index, _)| *index).collect();
        let turn = self.lines.join(pairs.into_iter().map(|(_, pair)| pair).collect());
        let (mut cache, mut last) = (DenialCache::of(wanted.id), None);
        loop {
            let Some(nudges) = turn.or_alarm(None, self.clock.alarm(deadline)).await else {
                return match last {
                    Some(last) => Ok(last),
                    None => Ok(too_late(self.find_all(wanted.charges, wanted.holds_nothing)?)),
                };
            };
            let tried = self.try_once(wanted, cache).await?;
            let now = self.clock.now();
            let wait = match tried.decision.wait() {
                Some(wait) if !tried.decision.is_allowed() && now < deadline => wait,
                _ => return Ok(tried),
            };
            turn.stand_in(|index| !tried.decision.outcomes()[indexes[index]].is_allowed());
            let next = now.saturating_add(wait.min(self.look_again())).min(deadline);
            (cache, last) = (DenialCache::Bypass, Some(tried));
            turn.or_alarm(Some(nudges), self.clock.alarm(next)).await;
        }
    }

    fn find_all<'a>(
        &self,
        charges: &'a [Charge<'a>],
        holds_nothing: Option<&'static str>,
    ) -> Result<ResolvedAll<'static, 'a>, Error> {
        let limits = self.limits.read();
        self.resolve(&limits, Charges::All(charges), holds_nothing)
    }

    /// Charges the counters once, with the current limits.
    async fn try_once<'a>(&self, wanted: &Wanted<'a>, cache: DenialCache) -> Result<Tried<'a>, Error> {
        let remote = match &self.backend {
            Backend::Memory(_) => return self.try_local(wanted),
            Backend::Remote(remote) => remote,
        };
        let charges = self.find_all(wanted.charges, wanted.holds_nothing)?;
        let identity = self.identity(&charges, wanted.take, wanted.id, true);
        let answered = match charges.iter().any(Resolved::is_denied_outright) {
            true => Box::pin(remote.peek(&charges)).await?,
            false => match remote.next_step(&charges, wanted.take != Take::Nothing, cache) {
                NextStep::Answered(answered) => answered,
                NextStep::CallStore(sent) => Box::pin(remote.charge(&charges, identity, sent)).await?,
            },
        };
        Ok(tried(charges, answered, identity))
    }

    fn try_local<'a>(&self, wanted: &Wanted<'a>) -> Result<Tried<'a>, Error> {
        let Backend::Memory(store) = &self.backend else {
            return Err(Error::call("the counters are remote"));
        };
        // Held while the counters are charged: a reload waits.
        let limits = self.limits.read();
        let charges = self.resolve(&limits, Charges::All(wanted.charges), wanted.holds_nothing)?;
        let identity = self.identity(&charges, wanted.take, wanted.id, true);
        let answered = run_local(store, &charges, Mode::AllOrNone, identity)?;
        Ok(tried(charges, answered, identity))
    }

    /// After how long to look again at the latest: at a remote store other processes may give something back at any time.
    fn look_again(&self) -> Micros {
        match self.backend {
            Backend::Memory(_) => Micros::new(u64::MAX),
            Backend::Remote(_) => {
                let jitter = ChargeId::random().get() % u128::from(LOOK_AGAIN_US * 2 / 5);
                Micros::new(LOOK_AGAIN_US - u64::try_from(jitter).unwrap_or_default())
            }
        }
    }
}

/// The same charges with the keys that were parsed. A malformed key was reported when it was parsed, and stays denied.
fn canonical<'a>(charges: &'a [Charge<'_>], parsed: &'a [Resolved<'_, '_>]) -> SmallVec<[Charge<'a>; 4]> {
    let canonical = |(charge, resolved): (&'a Charge<'_>, &'a Resolved<'_, '_>)| Charge {
        limit: charge.limit,
        key: resolved.key.as_ref().map_or_else(KeyRef::not_found, KeyRef::from),
        cost: charge.cost,
    };
    charges.iter().zip(parsed).map(canonical).collect()
}

fn tried<'a>(charges: ResolvedAll<'static, 'a>, answered: Answered, identity: Option<Identity>) -> Tried<'a> {
    let decision = conclude(&charges, answered.answers);
    Tried { charges, decision, identity, trouble: answered.trouble }
}

/// The denial of a waiter whose turn never came: other waiters were first, and their waiting time is not known.
fn too_late<'a>(charges: ResolvedAll<'static, 'a>) -> Tried<'a> {
    let outcome = |charge: &Resolved<'_, '_>| {
        let (numbers, source) = match charge.counted() {
            Some((_, stored)) => {
                let retry_after = Some(Micros::new(LOOK_AGAIN_US));
                let capacity = stored.limit.capacity();
                (kernel::Outcome { capacity, retry_after, ..kernel::Outcome::BLOCKED }, Source::Store)
            }
            None => (kernel::Outcome::UNLIMITED, Source::Unlimited),
        };
        Outcome::new(charge.entry.name, numbers, source).shadowed(charge.is_shadow())
    };
    let decision = Decision::new(charges.iter().map(outcome).collect());
    Tried { charges, decision, identity: None, trouble: Trouble::default() }
}
