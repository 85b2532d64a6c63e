//! Dropped calls leave nothing charged, on a store that pauses before and after each operation.

use std::error::Error as StdError;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate::store::{
    Charged, Hold, MemoryOptions, MemoryStore, Store, StoreFuture, StoredCharge, StoredLimit,
};
use tollgate::{Charge, ChargeId, Limit, Settled, Settlement, Tollgate};

const HOUR: Duration = Duration::from_secs(3_600);

/// A memory store that answers as a remote one does: late, and only when it is polled again.
struct Pausing(MemoryStore);

async fn pause() {
    tokio::task::yield_now().await;
}

impl Store for Pausing {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            pause().await;
            let charged = Store::charge(&self.0, items, hold).await;
            pause().await;
            charged
        })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async move {
            pause().await;
            let settled = Store::settle(&self.0, id, settlement).await;
            pause().await;
            settled
        })
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Store::peek(&self.0, items)
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Store::forget(&self.0, limit, key)
    }
}

/// Polls a call so often and then drops it. Returns its answer, if it had one by then.
fn polled<T>(times: usize, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    (0..times).find_map(|_| match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    })
}

#[tokio::test]
async fn a_call_that_is_dropped_at_any_point_leaves_what_was_answered_and_nothing_else()
-> Result<(), Box<dyn StdError>> {
    for times in 0..12 {
        let store = Arc::new(Pausing(MemoryStore::new(MemoryOptions::default())));
        let gate = Tollgate::builder()
            .limit("api", Limit::fixed_window(100, HOUR)?)
            .limit("workers", Limit::concurrency(100, HOUR)?)
            .store(store)
            .connect()
            .await?;
        let charges = [Charge::new("api", "a").cost(2), Charge::new("workers", "a")];
        let one = [Charge::new("api", "a")];
        let (mut api, mut leases, mut permits) = (0, 0, Vec::new());
        if let Some(answer) = polled(times, gate.wait(&one, HOUR)) {
            api += u64::from(answer?.is_allowed());
        }
        if let Some(answer) = polled(times, gate.reserve(&charges, HOUR)) {
            (api, leases) = (api + 2 * u64::from(answer?.is_ok()), leases + 1);
        }
        if let Some(answer) = polled(times, gate.reserve_within(&charges, HOUR, HOUR)) {
            (api, leases) = (api + 2 * u64::from(answer?.is_ok()), leases + 1);
        }
        if let Some(answer) = polled(times, gate.acquire("workers", "a")) {
            permits.push(answer??);
            leases += 1;
        }
        if let Some(answer) = polled(times, gate.acquire_within("workers", "a", HOUR)) {
            permits.push(answer??);
            leases += 1;
        }
        if let Some(answer) = polled(times, gate.acquire_all_within(&charges, HOUR)) {
            permits.push(answer??);
            (api, leases) = (api + 2, leases + 1);
        }
        // These take nothing, however far they come.
        let _ = polled(times, gate.peek(&one));
        let _ = polled(times, gate.status("api", "a"));
        if let Some(answer) = polled(times, gate.acquire_all(&charges)) {
            permits.push(answer??);
            (api, leases) = (api + 2, leases + 1);
        }
        gate.flush().await;
        let used = async |limit: &str| gate.status(limit, "a").await.map(|status| status.used());
        assert_eq!(
            (used("api").await?, used("workers").await?),
            (api, leases),
            "dropped after {times} polls"
        );
        // A release that is dropped is a release all the same.
        for permit in permits {
            let _ = polled(times % 4, permit.release());
            leases -= 1;
        }
        gate.flush().await;
        assert_eq!(
            (used("api").await?, used("workers").await?),
            (api, leases),
            "released after {times} polls"
        );
    }
    Ok(())
}

/// A settlement that is dropped can be sent again: it is carried out once.
#[tokio::test]
async fn a_settlement_that_is_dropped_at_any_point_is_carried_out_once() -> Result<(), Box<dyn StdError>> {
    for times in 0..6 {
        let store = Arc::new(Pausing(MemoryStore::new(MemoryOptions::default())));
        let gate =
            Tollgate::builder().limit("api", Limit::fixed_window(100, HOUR)?).store(store).connect().await?;
        let charges = [Charge::new("api", "a").cost(10), Charge::new("api", "b").cost(10)];
        let used = async |key: &str| gate.status("api", key).await.map(|status| status.used());
        let reservation = gate.reserve(&charges, HOUR).await??;
        let first = polled(times, reservation.settle_each(&[3, 25])).transpose()?;
        let again = reservation.settle_each(&[3, 25]).await?;
        // One poll asks the store, and after the second it has done so.
        let expected = if times < 2 { Settled::Done } else { Settled::Already };
        assert_eq!(again, expected, "dropped after {times} polls, {first:?}");
        assert_eq!((used("a").await?, used("b").await?), (3, 25), "dropped after {times} polls");
        let _ = polled(times, gate.reset("api", "a"));
        assert!(used("a").await? <= 3);
    }
    Ok(())
}

/// A caller that chooses an id owns it: a call by it that was dropped is not cancelled by anybody else.
#[tokio::test]
async fn a_call_by_an_id_of_the_callers_is_left_alone() -> Result<(), Box<dyn StdError>> {
    let store = Arc::new(Pausing(MemoryStore::new(MemoryOptions::default())));
    let gate =
        Tollgate::builder().limit("api", Limit::fixed_window(100, HOUR)?).store(store).connect().await?;
    let (charges, id) = ([Charge::new("api", "a")], ChargeId::from(7_u128));
    assert!(polled(2, gate.charge(&charges).id(id)).is_none(), "charged, and its answer was not waited for");
    gate.flush().await;
    assert_eq!(gate.status("api", "a").await?.used(), 1);
    assert!(gate.charge(&charges).id(id).await?.is_allowed());
    assert_eq!(gate.status("api", "a").await?.used(), 1, "sent again, it is charged once");
    Ok(())
}
