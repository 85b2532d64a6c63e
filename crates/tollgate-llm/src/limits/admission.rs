//! A call that may be sent: what is reserved for it, and how it is settled.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate::store::Micros;
use tollgate::{Decision, Outcome, Reservation};
use tracing::Instrument;

use super::batch::Share;
use super::renewal::Renewal;
use super::settling::Ending;
use super::{Inner, Standing, TTL, standing};
use crate::config::{Counts, UpstreamKind};
use crate::count::Encoding;
use crate::line::Line;
use crate::plan::{Plan, Tokens};
use crate::seen::SeenOpen;
use crate::stream::Streamed;
use crate::usage::Usage;

/// A call that may be sent, with its reservation. It is settled once; if it is dropped unsettled, the reserved amount stays
/// charged.
///
/// Its lease under a concurrency limit is kept until then: a task of the tokio runtime on which it was admitted renews it.
#[must_use = "an admission that is not settled stays charged as reserved"]
pub struct Admission {
    pub(super) inner: Arc<Inner>,
    pub(super) line: Option<Arc<Line>>,
    pub(super) seen: Option<SeenOpen>,
    pub(super) plan: Option<Plan>,
    pub(super) held: Option<Reservation>,
    /// Keeps its place, if it has one.
    pub(super) renewal: Option<Renewal>,
    pub(super) tokens: Tokens,
    pub(super) encoding: Encoding,
    pub(super) model: String,
    /// The quota and the group of keys; none for a model that is not configured.
    pub(super) quota: Option<String>,
    pub(super) group: Option<String>,
    /// The groups of keys that can never take it.
    pub(super) left_out: Vec<String>,
    pub(super) waited: Duration,
    pub(super) admitted_at: Micros,
    pub(super) window: Duration,
    /// Whether others wait until it is answered, because nobody knows what is left at the provider.
    pub(super) goes_first: bool,
    produced: Option<Produced>,
    /// When output was last looked at as it is produced.
    looked_at: Micros,
    /// Its share of what was reserved for a batch.
    pub(super) share: Option<Share>,
}

/// Output that has been charged as it was produced.
struct Produced {
    /// What is reserved for what comes next; `None` if others took the room of it.
    held: Option<Reservation>,
    plan: Plan,
    /// How much of the output was charged before that.
    settled: u64,
}

impl Admission {
    pub(super) fn unlimited(inner: Arc<Inner>, tokens: Tokens, encoding: Encoding, model: &str) -> Admission {
        Admission {
            inner,
            line: None,
            seen: None,
            plan: None,
            held: None,
            renewal: None,
            tokens,
            encoding,
            model: model.to_owned(),
            quota: None,
            group: None,
            left_out: Vec::new(),
            waited: Duration::ZERO,
            admitted_at: Micros::ZERO,
            window: Duration::ZERO,
            goes_first: false,
            produced: None,
            looked_at: Micros::ZERO,
            share: None,
        }
    }

    /// What its input was reckoned at.
    pub fn estimated_input(&self) -> u64 {
        self.tokens.input
    }

    /// What was reserved, input and output.
    pub fn reserved(&self) -> u64 {
        self.tokens.charged_input.saturating_add(self.tokens.output)
    }

    /// How long it waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The encoding that counts its texts.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The quota group that is charged, if any is.
    pub fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    /// The quota groups that can never take it, because a limit of theirs is smaller than the call.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// How its limits stand with it.
    pub fn standing(&self) -> Vec<Standing> {
        match (&self.plan, &self.held) {
            (Some(plan), Some(held)) => standing(plan, held.decision()),
            _ => Vec::new(),
        }
    }

    /// The usage of a call whose provider reports none: the estimate of its input, and the output so far.
    pub fn estimate(&self, output: u64) -> Usage {
        Usage { input: self.tokens.input, cached: 0, output }
    }

    /// A reported usage, with the estimate of its input where that was not reported. Nothing at all is of a call that generates nothing.
    pub fn completed(&self, usage: Usage) -> Usage {
        if usage.input == 0 && usage.output > 0 { self.estimate(usage.output) } else { usage }
    }

    /// Settles it with the reported usage, and learns from it. An input of 0 is none that was reported: it stays charged as reserved, and so
    /// does the output if that is 0, too.
    pub async fn settle(self, usage: Usage) -> Result<(), tollgate::Error> {
        if usage.input == 0 {
            return self.settle_estimated(usage.output, usage.output > 0).await;
        }
        if let Some(plan) = &self.plan {
            let charged = usage.charged_input(plan.kind, plan.count_cache_reads);
            let mut learned = self.inner.learned.lock();
            let learned = learned.entry(self.model.clone()).or_default();
            let answer = Some(usage.output.div_ceil(self.tokens.answers.max(1))).filter(|output| *output > 0);
            learned.learn(self.tokens.counted, usage.input, charged, answer);
        }
        self.note(&usage, true);
        self.apply(&usage).await
    }

    /// Settles it with an estimate: nothing is given back without proof. Input is charged as reserved; output as produced if the
    /// answer has ended, else as reserved or as produced, whichever is more.
    pub async fn settle_estimated(self, output: u64, has_ended: bool) -> Result<(), tollgate::Error> {
        let output = if has_ended { output } else { output.max(self.tokens.output) };
        let charged = self.tokens.charged_input;
        let usage = Usage { input: charged, cached: 0, output };
        self.note(&usage, false);
        self.apply(&usage).await
    }

    /// Settles it with what is known of an answer that ended early. Nothing is learned from it.
    pub async fn settle_partial(self, usage: Usage) -> Result<(), tollgate::Error> {
        self.note(&usage, false);
        self.apply(&usage).await
    }

    /// The provider refused the call before it ran: it counts as a request and used no tokens.
    pub async fn refused(self) -> Result<(), tollgate::Error> {
        self.apply(&Usage::default()).await
    }

    /// The call was never sent: all is given back.
    pub async fn cancel(mut self) -> Result<(), tollgate::Error> {
        self.ends_first();
        self.renewal = None;
        if let Some(share) = self.share.take() {
            return share.cancel().await;
        }
        match self.held.take() {
            Some(held) => self.inner.settle(&held, Ending::Unused, self.line.as_ref()).await,
            None => Ok(()),
        }
    }

    /// Charges output as it is produced, for providers that count it so: what has come so far is settled where it was reserved, and
    /// what is still expected is reserved anew, so that a long answer counts in the minutes in which it was written. It may be called
    /// after every event: output is counted only when it is to be charged, which is sixty times a window at most.
    pub async fn produced(&mut self, streamed: &Streamed) -> Result<(), tollgate::Error> {
        let (Some(plan), Some(input)) = (&self.plan, streamed.input()) else { return Ok(()) };
        // A place that is held for the whole call cannot be settled before its end.
        let counts = |wanted: Counts| plan.charges.iter().any(|charge| charge.counts == wanted);
        let is_counted =
            plan.kind == UpstreamKind::Anthropic && !counts(Counts::Concurrency) && self.share.is_none();
        if !is_counted || !(counts(Counts::OutputTokens) || counts(Counts::Tokens)) {
            return Ok(());
        }
        let now = self.inner.clock.now();
        let step = Micros::new(Micros::from(self.window).get() / 60);
        if now < self.looked_at.saturating_add(step) {
            return Ok(());
        }
        let output = streamed.output();
        let settled = self.produced.as_ref().map_or(0, |produced| produced.settled);
        if output <= settled {
            return Ok(());
        }
        // Also where the store does not answer: it is asked again after a while, and not after every event.
        self.looked_at = now;
        let plan = plan.clone();
        let next = plan.of_output(self.tokens.output.saturating_sub(output));
        // What comes next is reserved before what has come is settled, so that nobody takes the room in between. Where there is not enough
        // room beside the old reservation, there is for a part of it, and for the whole once the old one is settled.
        let (all, part) = match self.inner.gate.reserve(&next.charges(), TTL).await? {
            Ok(all) => (Some(all), None),
            Err(denied) => (None, self.reserve_part(&plan, &next, denied.decision()).await?),
        };
        let held = self.produced.as_ref().map_or(self.held.as_ref(), |produced| produced.held.as_ref());
        let reserved =
            self.produced.as_ref().map_or(self.tokens.output, |produced| produced.plan.tokens.output);
        if all.is_none() && part.is_none() && held.is_some() && output.saturating_sub(settled) >= reserved {
            // Its settlement would make no room, and without a reservation nothing could be charged.
            return Ok(());
        }
        let taken = match &mut self.produced {
            Some(produced) => {
                produced.held.take().map(|held| (held, vec![output - settled; next.charges.len()]))
            }
            None => self.held.take().map(|held| (held, plan.actuals(&Usage { output, ..input }))),
        };
        // What nothing is held for is charged with what comes next.
        let charged = if taken.is_some() { output } else { settled };
        let applied = match taken {
            Some((held, actuals)) => {
                self.inner.settle(&held, Ending::Actual(actuals), self.line.as_ref()).await
            }
            None => Ok(()),
        };
        let all = match all {
            Some(all) => Ok(Some(all)),
            None => self.inner.gate.reserve(&next.charges(), TTL).await.map(Result::ok),
        };
        let (held, failed) = match all {
            Ok(Some(all)) => {
                let given_back = match &part {
                    Some((part, _)) => self.inner.settle(part, Ending::Unused, self.line.as_ref()).await,
                    None => Ok(()),
                };
                (Some((all, next)), given_back.err())
            }
            Ok(None) => (part, None),
            Err(error) => (part, Some(error)),
        };
        let (held, plan) = match held {
            Some((held, plan)) => (Some(held), plan),
            None => (None, plan.of_output(1)),
        };
        self.produced = Some(Produced { held, plan, settled: charged });
        self.nudge();
        failed.map_or(applied, Err)
    }

    /// Reserves as much of what is still expected as there is room for; `None` if there is no room.
    async fn reserve_part(
        &self,
        plan: &Plan,
        next: &Plan,
        denied: &Decision,
    ) -> Result<Option<(Reservation, Plan)>, tollgate::Error> {
        let room = denied.outcomes().iter().filter(|outcome| !outcome.is_allowed()).map(Outcome::remaining);
        let room = room.min().unwrap_or(0);
        if room == 0 || room >= next.tokens.output {
            return Ok(None);
        }
        let part = plan.of_output(room);
        Ok(self.inner.gate.reserve(&part.charges(), TTL).await?.ok().map(|held| (held, part)))
    }

    async fn apply(mut self, usage: &Usage) -> Result<(), tollgate::Error> {
        self.ends_first();
        self.renewal = None;
        let plan = self.plan.take();
        if let (Some(plan), Some(share)) = (&plan, self.share.take()) {
            return share.settle(&plan.actuals(usage)).await;
        }
        if let Some(produced) = self.produced.take() {
            // The rest was settled as it was produced.
            return self.settle_rest(produced, usage.output).await;
        }
        match (plan, self.held.take()) {
            (Some(plan), Some(held)) => {
                let actuals = Ending::Actual(plan.actuals(usage));
                self.inner.settle(&held, actuals, self.line.as_ref()).await
            }
            _ => Ok(()),
        }
    }

    /// Charges the output that is not charged yet. If nothing is held for it, it is charged as soon as there is room for one token, in the
    /// background where there is a runtime: no answer ends later for it.
    async fn settle_rest(&self, produced: Produced, output: u64) -> Result<(), tollgate::Error> {
        let more = output.saturating_sub(produced.settled);
        let actuals = Ending::Actual(vec![more; produced.plan.charges.len()]);
        if let Some(held) = &produced.held {
            return self.inner.settle(held, actuals, self.line.as_ref()).await;
        }
        if more == 0 {
            return Ok(());
        }
        let (inner, line, within) = (self.inner.clone(), self.line.clone(), self.window.saturating_mul(5));
        let owed = async move {
            let one = produced.plan.of_output(1);
            match inner.gate.reserve_within(&one.charges(), TTL, within).await? {
                Ok(held) => inner.settle(&held, actuals, line.as_ref()).await,
                Err(denied) => {
                    tracing::warn!(tokens = more, %denied, "output beyond its reservation could not be charged");
                    Ok(())
                }
            }
        };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return owed.await };
        let inner = self.inner.clone();
        if !inner.begin_unsettled() {
            tracing::warn!(
                tokens = more,
                "output beyond its reservation could not be charged: too many calls owe some"
            );
            return Ok(());
        }
        let owed = async move {
            if let Err(error) = owed.await {
                tracing::warn!(tokens = more, %error, "output beyond its reservation could not be charged");
            }
            inner.end_unsettled();
        };
        runtime.spawn(owed.in_current_span());
        Ok(())
    }

    /// For the overview.
    fn note(&self, usage: &Usage, is_reported: bool) {
        if let Some(seen) = &self.seen {
            seen.settled(usage, self.tokens.input, self.reserved(), is_reported);
        }
    }

    pub(super) fn nudge(&self) {
        self.line.iter().for_each(|line| line.nudge());
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.ends_first();
        // The reserved amount stays charged, but the lease under a concurrency limit is no longer needed.
        if let (Some(plan), Some(held)) = (self.plan.take(), self.held.take())
            && plan.has_place()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (inner, actuals) = (self.inner.clone(), Ending::Actual(plan.as_reserved()));
            runtime.spawn(async move { inner.settle(&held, actuals, None).await });
        }
        self.line.iter().for_each(|line| line.settled());
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission")
            .field("model", &self.model)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}
