//! A request with remote counters: does everything that needs no store at once, and wraps the calls of `remote.rs` in a future.

use std::sync::Arc;

use tracing::Instrument;

use super::request::{Answer, Mode, Request, Step};
use super::{Backend, Engine, MOST_LIMITS, conclude};
use crate::decision::Decision;
use crate::error::Error;
use crate::policy::entry::{Resolved, ResolvedAll};
use crate::remote::{Answered, DenialCache, NextStep, Remote};

impl Engine {
    pub(super) fn charge_remote<'a>(
        self: &Arc<Engine>,
        remote: &Remote,
        request: &mut Request<'a>,
    ) -> Step<'a> {
        if let Err(error) = request.check_id() {
            return Step::Done(Err(error));
        }
        if request.mode == Mode::Each {
            return self.charge_each_remote(request);
        }
        let operation = request.operation();
        let started = self.started(operation);
        let (mode, take, id) = (request.mode, request.take, request.id);
        let holds_nothing = request.holds_nothing();
        let charges = {
            let limits = self.limits.read();
            self.resolve(&limits, request.charges.take(), holds_nothing)
        };
        let charges = match charges {
            Ok(charges) => charges,
            Err(error) => return Step::Done(Err(error)),
        };
        let identity = self.identity(&charges, take, id, false);
        let is_denied = charges.iter().any(Resolved::is_denied_outright);
        let mut sent = None;
        if mode == Mode::AllOrNone && !is_denied {
            match remote.next_step(&charges, identity.is_some(), DenialCache::of(id)) {
                NextStep::Answered(answered) => {
                    let answer = self.finish(operation, &charges, answered, identity, take, &started);
                    return Step::Done(Ok(answer));
                }
                NextStep::CallStore(to_remember) => sent = to_remember,
            }
        }
        let engine = self.clone();
        Step::Waits(Box::pin(async move {
            let Backend::Remote(remote) = &engine.backend else {
                return Err(Error::call("the counters are local"));
            };
            let span = started.span().clone();
            let answered = match mode {
                Mode::Refund => {
                    let refunded = remote.refund(&charges).instrument(span).await;
                    // What failed may have been given back, in part or whole.
                    engine.lines.nudge();
                    engine.report_refund(&charges, &refunded, started.took());
                    refunded?;
                    return Ok(Answer::of(Decision::empty()));
                }
                Mode::AllOrNone if !is_denied => {
                    remote.charge(&charges, identity, sent).instrument(span).await?
                }
                Mode::Peek | Mode::AllOrNone | Mode::Each => remote.peek(&charges).instrument(span).await?,
            };
            Ok(engine.finish(operation, &charges, answered, identity, take, &started))
        }))
    }

    /// Charges each charge separately, up to 64 in one store call. An invalid charge gets its own error.
    fn charge_each_remote<'a>(self: &Arc<Engine>, request: &mut Request<'a>) -> Step<'a> {
        let started = self.started(request.operation());
        let holds_nothing = request.holds_nothing();
        let (mut charges, mut wrong) = (ResolvedAll::new(), Vec::new());
        {
            let limits = self.limits.read();
            for resolved in self.resolve_each(&limits, request.charges.take(), holds_nothing) {
                wrong.push(match resolved {
                    Ok(charge) => {
                        charges.push(charge);
                        None
                    }
                    Err(error) => Some(error),
                });
            }
        }
        let engine = self.clone();
        Step::Waits(Box::pin(async move {
            let Backend::Remote(remote) = &engine.backend else {
                return Err(Error::call("the counters are local"));
            };
            started.span().record("keys", charges.len());
            if let Some(charge) = charges.first() {
                started.span().record("limiter", charge.entry.name);
            }
            let mut outcomes = Vec::with_capacity(charges.len());
            for batch in charges.chunks(MOST_LIMITS) {
                let answers = remote.charge_each(batch).instrument(started.span().clone()).await;
                let _within = started.enter();
                for (charge, answered) in batch.iter().zip(answers) {
                    outcomes.push(answered.map(|Answered { answers, trouble }| {
                        let charge = std::slice::from_ref(charge);
                        let decision = conclude(charge, answers);
                        engine.report("charge", charge, &decision, trouble, &started.of_one());
                        *decision.binding()
                    }));
                }
            }
            let mut outcomes = outcomes.into_iter();
            let unanswered = || Err(Error::call("the charge was left without an answer"));
            let answer = |wrong: Option<Error>| match wrong {
                Some(error) => Err(error),
                None => outcomes.next().unwrap_or_else(unanswered),
            };
            let each = wrong.into_iter().map(answer).collect();
            Ok(Answer { each, ..Answer::of(Decision::empty()) })
        }))
    }
}
