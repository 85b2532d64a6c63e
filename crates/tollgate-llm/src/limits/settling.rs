//! Settlements of calls. What a store does not take is tried again in the background, so that no excess is lost and nothing stays
//! charged that was not used.
//!
//! A settlement has the id of its reservation, so it is applied once however often it is sent. Calls in the background are bounded; beyond
//! that, and where there is no runtime, the caller gets the error and the call stays charged as reserved.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tollgate::Reservation;
use tollgate::store::Micros;
use tracing::Instrument;

use super::Inner;
use crate::line::Line;

/// The pauses between attempts: the first, and the longest.
const FIRST: Micros = Micros::from_millis(100);
const LONGEST: Micros = Micros::from_secs(5);

/// For how long it is tried.
const TRIED_FOR: Micros = Micros::from_secs(300);

/// How many settlements wait for their store at most.
const MOST: usize = 10_000;

/// What becomes of a reservation.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    /// What each of its charges truly cost.
    Actual(Vec<u64>),
    /// It was never used.
    Unused,
}

impl Inner {
    /// Settles a reservation. An error means that it stays as it was reserved.
    pub(super) async fn settle(
        self: &Arc<Inner>,
        held: &Reservation,
        ending: Ending,
        line: Option<&Arc<Line>>,
    ) -> Result<(), tollgate::Error> {
        let Err(error) = apply(held, &ending).await else { return Ok(()) };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return Err(error) };
        if !may_be_settled(&error) {
            return Err(error);
        }
        if !self.begin_unsettled() {
            return Err(error);
        }
        tracing::debug!(%error, "a call could not be settled, which is tried again");
        let (inner, held, line) = (self.clone(), held.clone(), line.cloned());
        let settling = async move {
            inner.settle_later(&held, &ending).await;
            inner.end_unsettled();
            line.iter().for_each(|line| line.nudge());
        };
        runtime.spawn(settling.in_current_span());
        Ok(())
    }

    /// Counts a call that is settled in the background; false if there are too many.
    pub(super) fn begin_unsettled(&self) -> bool {
        let has_room = self.unsettled.fetch_add(1, Ordering::AcqRel) < MOST;
        if !has_room {
            self.end_unsettled();
        }
        has_room
    }

    pub(super) fn end_unsettled(&self) {
        self.unsettled.fetch_sub(1, Ordering::AcqRel);
    }

    async fn settle_later(&self, held: &Reservation, ending: &Ending) {
        let until = self.clock.now().saturating_add(TRIED_FOR);
        let mut pause = FIRST;
        loop {
            self.clock.alarm(self.clock.now().saturating_add(pause)).await;
            pause = pause.saturating_add(pause).min(LONGEST);
            let error = match apply(held, ending).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if !may_be_settled(&error) || self.clock.now() >= until {
                tracing::warn!(%error, "a call could not be settled and stays charged as reserved");
                return;
            }
        }
    }
}

/// Whether the same settlement may be taken later. One whose answer was lost may be sent again.
fn may_be_settled(error: &tollgate::Error) -> bool {
    error.is_transient() || error.is_ambiguous()
}

async fn apply(held: &Reservation, ending: &Ending) -> Result<(), tollgate::Error> {
    match ending {
        Ending::Actual(actuals) => held.settle_each(actuals).await.map(drop),
        Ending::Unused => held.cancel().await.map(drop),
    }
}
