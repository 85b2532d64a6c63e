//! Renews the leases of a call under concurrency limits, from its charge to its end.
//!
//! A lease lasts a minute, so that the leases of a killed process become free. A call may take longer than that to its first
//! byte, so a separate task renews its leases, whatever the call waits for.

use tollgate::store::Micros;
use tollgate::{Clock, Reservation, Settled};
use tracing::Instrument;

use crate::config::LEASE;
use crate::plan::Plan;

/// How often leases are renewed.
const EVERY: Micros = Micros::new(LEASE.get() / 3);

/// After how long a renewal that failed is tried again.
const AGAIN: Micros = Micros::new(LEASE.get() / 12);

/// Renews the leases of a reservation until it is dropped.
pub(super) struct Renewal(tokio::task::AbortHandle);

impl Renewal {
    /// `None` if the plan takes no place, or if there is no runtime that could renew it.
    pub(super) fn of(plan: &Plan, reservation: &Reservation, clock: &Clock) -> Option<Renewal> {
        if !plan.has_place() {
            return None;
        }
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        let renewing = renew(reservation.clone(), clock.clone()).in_current_span();
        Some(Renewal(runtime.spawn(renewing).abort_handle()))
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn renew(reservation: Reservation, clock: Clock) {
    let mut wait = EVERY;
    loop {
        clock.alarm(clock.now().saturating_add(wait)).await;
        wait = match reservation.renew().await {
            Ok(Settled::Done | Settled::Pending) => EVERY,
            Ok(Settled::Already) => return,
            Ok(Settled::Unknown) => {
                tracing::warn!("the place of a running call is lost; another call may run beside it");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "the place of a running call could not be renewed");
                AGAIN
            }
        };
    }
}
