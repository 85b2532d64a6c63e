//! What is still to be done for a request that was let through: correct what was reserved, and give leases back.
//!
//! A reservation is settled once. If anything depends on the body of the answer, all of it waits for the body; else it is
//! settled as soon as the head is there, before the answer goes out, so that the caller's next request finds it done. Whoever
//! goes away earlier leaves what was reserved, but gives leases back.

use std::future::Future;
use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_store::Settlement;

use super::charge::{self, Dues};
use super::layer::Inner;
use super::toll::{Answer, Post, Settle};
use crate::reservation::Reservation;

/// What is still to be done for a request.
pub(super) struct After {
    inner: Arc<Inner>,
    reservation: Reservation,
    /// The tolls that were charged, and what they truly cost if that is known.
    tolls: SmallVec<[(usize, Option<u64>); 4]>,
    bytes: u64,
    is_answered: bool,
    is_done: bool,
}

impl After {
    pub(super) fn new(inner: Arc<Inner>, reservation: Reservation, dues: &Dues) -> After {
        let tolls = dues.iter().map(|due| (due.post, None)).collect();
        After { inner, reservation, tolls, bytes: 0, is_answered: false, is_done: false }
    }

    /// The head of the answer is there. Returns what settles it, if there is anything to settle and it need not wait for the body.
    pub(super) fn answered(
        &mut self,
        answer: &Answer<'_>,
    ) -> Option<impl Future<Output = ()> + Send + 'static> {
        self.is_answered = true;
        for (post, actual) in &mut self.tolls {
            if let Settle::ByHead(by) = &self.inner.posts[*post].settle {
                *actual = by(answer);
            }
        }
        let waits = |post: &Post| post.is_lease || matches!(post.settle, Settle::ByBytes);
        if self.tolls.iter().any(|(post, _)| waits(&self.inner.posts[*post])) {
            return None;
        }
        self.settling()
    }

    /// So much of the body went out.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// Whether the counters are in this process, so that it is settled at once.
    pub(super) fn is_in_process(&self) -> bool {
        self.inner.gate.is_in_process()
    }

    /// What settles it, once and as far as the answer is known.
    fn settling(&mut self) -> Option<impl Future<Output = ()> + Send + 'static> {
        if std::mem::replace(&mut self.is_done, true) {
            return None;
        }
        let settlement = self.settlement()?;
        let (inner, id) = (self.inner.clone(), self.reservation.id());
        Some(async move { charge::settle(&inner, id, &settlement).await })
    }

    fn settlement(&self) -> Option<Settlement> {
        let mut actuals: SmallVec<[(&str, u64); 4]> = SmallVec::new();
        for (post, actual) in &self.tolls {
            let post = &self.inner.posts[*post];
            let actual = match &post.settle {
                Settle::Nothing => post.is_lease.then_some(0),
                Settle::ByHead(_) => *actual,
                Settle::ByBytes => self.is_answered.then_some(self.bytes),
            };
            actuals.extend(actual.map(|actual| (post.entry.rule.name(), actual)));
        }
        (!actuals.is_empty()).then(|| self.reservation.each(&actuals))
    }
}

impl Drop for After {
    /// The body is out, or somebody has gone away.
    fn drop(&mut self) {
        let is_in_process = self.is_in_process();
        let Some(settling) = self.settling() else { return };
        if is_in_process {
            charge::at_once(settling);
        } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(settling);
        }
    }
}
