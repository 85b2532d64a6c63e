//! Leased quota: a server in each region takes units from one central store, many at a time, and hands them out by itself.
//!
//! It is made of what the library has: a lease is a reservation of so many units ([`Tollgate::reserve`]), what is not handed out by
//! its end is given back (`settle`), and while the store is out of reach a region has what it leased before, and no more (`fallback =
//! "closed"`). Nothing is handed out that was not charged centrally first. So all regions admit at most the limit, plus what
//! they hold at one time: a unit that is leased now may be handed out later.
//!
//! The library has no such mode of its own yet; docs/scale.md says what it would need.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tollgate::Clock;
use tollgate::store::{Micros, StoreHealth};
use tollgate::telemetry::Source;
use tollgate::{Charge, Reservation, Tollgate};

use crate::server::key_name;

/// The name of the limit.
pub(crate) const LIMIT: &str = "api";

/// The quota that a region has leased.
pub(crate) struct LeasedQuota {
    gate: Arc<Tollgate>,
    clock: Clock,
    units: u64,
    ttl: Duration,
    leases: Vec<Mutex<KeyLeases>>,
}

/// The lease of one key.
#[derive(Default)]
struct KeyLeases {
    lease: Option<Lease>,
    /// The tasks that wait for a pending lease.
    pending: Option<Arc<Notify>>,
    /// Until when no lease is asked for, because none would be granted.
    denied_until: Micros,
}

impl KeyLeases {
    /// Takes one unit, if there is one.
    fn take(&mut self, now: Micros) -> bool {
        match &mut self.lease {
            Some(lease) if lease.left > 0 && now < lease.ends => {
                lease.left -= 1;
                true
            }
            _ => false,
        }
    }
}

struct Lease {
    reservation: Reservation,
    size: u64,
    left: u64,
    ends: Micros,
}

impl LeasedQuota {
    pub(crate) fn new(
        gate: Arc<Tollgate>,
        clock: Clock,
        units: u64,
        ttl: Duration,
        keys: usize,
    ) -> LeasedQuota {
        let leases = (0..keys).map(|_| Mutex::default()).collect();
        LeasedQuota { gate, clock, units, ttl, leases }
    }

    pub(crate) fn health(&self) -> StoreHealth {
        self.gate.store_health()
    }

    /// Takes one unit of a key.
    pub(crate) async fn take(self: &Arc<Self>, key: usize) -> Result<(bool, Source), String> {
        let pending = {
            let mut leases = self.leases[key].lock();
            let now = self.clock.now();
            if leases.take(now) {
                return Ok((true, Source::Store));
            }
            if now < leases.denied_until {
                return Ok((false, Source::DenialCache));
            }
            leases.pending.clone()
        };
        // One lease is waited for, and no other: where units are few, earlier tasks may have taken all of it.
        match pending {
            Some(pending) => pending.notified().await,
            None => self.lease(key).await?,
        }
        Ok((self.leases[key].lock().take(self.clock.now()), Source::Store))
    }

    /// Leases units of a key, and gives back what is left of the last lease.
    async fn lease(self: &Arc<Self>, key: usize) -> Result<(), String> {
        let pending = Arc::new(Notify::new());
        let old = {
            let mut leases = self.leases[key].lock();
            leases.pending = Some(pending.clone());
            leases.lease.take()
        };
        if let Some(old) = old {
            self.give_back(old);
        }
        let name = key_name(key);
        let mut size = self.units;
        let granted = loop {
            let charge = Charge::new(LIMIT, &*name).cost(size);
            // It can be settled for a while after it has ended.
            match self.gate.reserve(&[charge], self.ttl * 4).await {
                Ok(Ok(reservation)) => break Ok(Ok(reservation)),
                // What is left may be less than a whole lease.
                Ok(Err(denied)) => match denied.decision().binding().remaining() {
                    0 => break Ok(Err(denied.retry_after())),
                    _ if denied.decision().is_degraded() => break Ok(Err(denied.retry_after())),
                    remaining if remaining < size => size = remaining,
                    _ => break Ok(Err(denied.retry_after())),
                },
                Err(error) => break Err(error.to_string()),
            }
        };
        let now = self.clock.now();
        let mut leases = self.leases[key].lock();
        leases.pending = None;
        let answer = match granted {
            Ok(Ok(reservation)) => {
                let ends = now.saturating_add(Micros::from(self.ttl));
                leases.lease = Some(Lease { reservation, size, left: size, ends });
                Ok(())
            }
            Ok(Err(retry_after)) => {
                // At least a hundredth of a second, so that a key that is used up costs few calls.
                let wait = retry_after.unwrap_or(self.ttl).clamp(Duration::from_millis(10), self.ttl);
                leases.denied_until = now.saturating_add(Micros::from(wait));
                Ok(())
            }
            Err(error) => Err(error),
        };
        drop(leases);
        pending.notify_waiters();
        answer
    }

    /// Gives back what is left of a lease, in the background. If that fails, it stays charged.
    fn give_back(&self, lease: Lease) {
        if lease.left == 0 {
            return;
        }
        let spent = lease.size - lease.left;
        tokio::spawn(async move {
            let _ = lease.reservation.settle(spent).await;
        });
    }
}
