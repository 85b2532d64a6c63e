//! Permits on every store: held, renewed, released by drop and by call, and what a plain check says instead.

use std::error::Error as StdError;
use std::time::Duration;

use tollgate::{Charge, ChargeId, Limit, Reason, Tollgate};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;

use crate::On;

type Done = Result<(), Box<dyn StdError>>;

const SECOND: Duration = Duration::from_secs(1);

fn workers(count: u64, lease: Duration) -> Result<tollgate::TollgateBuilder, tollgate::Error> {
    Ok(Tollgate::builder().limit("workers", Limit::concurrency(count, lease)?))
}

/// At most one worker at a time: renewed while held, released on drop.
#[tokio::test]
async fn a_permit_is_renewed_while_it_is_held_and_released_when_it_is_dropped() -> Done {
    for on in On::all() {
        let gate = on.connect(workers(1, SECOND)?).await?;
        let permit = gate.acquire("workers", "pool").await??;
        tokio::time::sleep(3 * SECOND).await; // three leases long
        assert!(!permit.is_lost(), "{}", on.name());
        assert!(gate.acquire("workers", "pool").await?.is_err(), "{}: still held", on.name());
        drop(permit); // released in the background
        let permit = gate.acquire_within("workers", "pool", 10 * SECOND).await??;
        permit.release().await?; // released, and the store knows
        let permit = gate.acquire("workers", "pool").await?;
        assert!(permit.is_ok(), "{}", on.name());
        drop(permit);
        gate.flush().await;
        assert_eq!(gate.status("workers", "pool").await?.used(), 0, "{}", on.name());
    }
    Ok(())
}

#[tokio::test]
async fn a_plain_charge_of_a_concurrency_limit_is_refused_with_the_call_to_use() -> Done {
    for on in On::all() {
        let gate = on.connect(workers(1, 30 * SECOND)?).await?;
        let charges = [Charge::new("workers", "pool")];
        for error in [
            gate.check("workers", "pool").await.unwrap_err(),
            gate.charge(&charges).id(ChargeId::random()).await.unwrap_err(),
            gate.charge_each(&charges).await?.remove(0).map(drop).unwrap_err(),
            gate.wait(&charges, SECOND).await.unwrap_err(),
        ] {
            let words = error.to_string();
            assert!(words.starts_with("`workers` is a concurrency limit"), "{}: {words}", on.name());
            assert!(words.ends_with("use acquire, or reserve"), "{words}");
            assert!(!error.is_transient());
        }
        assert!(gate.peek(&charges).await?.is_allowed());
        assert_eq!(gate.status("workers", "pool").await?.used(), 0, "{}: nothing was taken", on.name());
        if let Ok(workers) = gate.local("workers") {
            assert_eq!(workers.check("pool").reason(), Reason::NeedsPermit);
        }
    }
    Ok(())
}

/// One permit over a lease and a rate: releasing it ends the lease, and what was charged stays charged.
#[tokio::test]
async fn one_permit_holds_all_leases_of_a_charge() -> Done {
    for on in On::all() {
        let builder = workers(1, 30 * SECOND)?.limit("starts", Limit::fixed_window(3, 60 * SECOND)?);
        let gate = on.connect(builder).await?;
        let run = [Charge::new("workers", "pool"), Charge::new("starts", "pool")];
        for starts in 1..=3 {
            let permit = gate.acquire_all(&run).id(ChargeId::random()).await??;
            assert_eq!(permit.decision().outcomes().len(), 2);
            let denied = gate.acquire_all(&run).await?.unwrap_err();
            assert!(!denied.decision().outcomes()[0].is_allowed(), "{denied}");
            permit.release().await?;
            assert_eq!(gate.status("workers", "pool").await?.used(), 0, "{}", on.name());
            assert_eq!(gate.status("starts", "pool").await?.used(), starts, "{}", on.name());
        }
        let late = gate.acquire_all_within(&run, Duration::from_millis(10)).await?.unwrap_err();
        assert_eq!(late.decision().binding().limit(), "starts");
        // A permit of a rate limit alone holds nothing.
        assert!(gate.acquire("starts", "other").await?.is_ok());
        assert_eq!(gate.status("starts", "other").await?.used(), 1);
    }
    Ok(())
}

/// A waiter for a permit in this process gets it as soon as another is dropped, and not when its lease would have ended.
#[tokio::test]
async fn a_dropped_permit_wakes_whoever_waits() -> Done {
    for on in On::all() {
        let gate = on.connect(workers(1, 3_600 * SECOND)?).await?;
        let permit = gate.acquire("workers", "pool").await??;
        let waiting = {
            let gate = gate.clone();
            tokio::spawn(async move { gate.acquire_within("workers", "pool", 60 * SECOND).await })
        };
        tokio::task::yield_now().await;
        drop(permit);
        let permit = waiting.await???;
        assert!(!permit.is_lost(), "{}", on.name());
    }
    Ok(())
}

/// Another process may have it by then.
#[tokio::test]
async fn a_permit_says_that_it_is_lost() -> Done {
    for on in On::all() {
        let gate = on.connect(workers(1, SECOND)?).await?;
        let permit = gate.acquire("workers", "pool").await??;
        assert!(gate.reset("workers", "pool").await?);
        tokio::time::timeout(20 * SECOND, permit.lost()).await?;
        assert!(permit.is_lost(), "{}", on.name());
        assert_eq!(gate.store_health().leases_lost, 1, "{}", on.name());
        let after = gate.acquire("workers", "pool").await??;
        drop(permit);
        gate.flush().await;
        assert!(
            gate.acquire("workers", "pool").await?.is_err(),
            "{}: it gives nobody else's back",
            on.name()
        );
        drop(after);
    }
    Ok(())
}

/// A permit outlives the runtime that it was made in; it is released wherever it is dropped.
#[test]
fn a_permit_may_be_dropped_in_another_runtime_or_outside_any() -> Done {
    let server = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}", server.port());
    let own = tokio::runtime::Runtime::new()?;
    let gate = own.block_on(workers(1, 3_600 * SECOND)?.redis(url).connect())?;
    let acquire = || async { gate.acquire_within("workers", "pool", 20 * SECOND).await };
    // Outside any runtime: the one that the gate was connected in releases it.
    let permit = own.block_on(acquire())??;
    drop(permit);
    let permit = own.block_on(acquire())??;
    // In another runtime.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        drop(permit);
        gate.flush().await;
    });
    let permit = own.block_on(acquire())??;
    // When its runtime is gone, the next call starts another task.
    own.shutdown_timeout(5 * SECOND);
    drop(permit);
    let other = tokio::runtime::Runtime::new()?;
    other.block_on(async {
        gate.flush().await;
        assert_eq!(gate.status("workers", "pool").await?.used(), 0);
        Ok(())
    })
}

/// A store that cannot be reached for longer than a lease has given it to another caller.
#[tokio::test]
async fn a_lease_that_cannot_be_renewed_is_lost() -> Done {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let gate = workers(1, SECOND)?.redis(format!("redis://127.0.0.1:{}", proxy.port())).connect().await?;
    let permit = gate.acquire("workers", "pool").await??;
    proxy.set(Mode::Refuse);
    tokio::time::timeout(20 * SECOND, permit.lost()).await?;
    assert!(permit.is_lost());
    Ok(())
}
