//! A call parses each of its keys once, in whatever way it is made and whatever the store.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate_store::{ManualClock, MemoryOptions, MemoryStore};

use crate::key::parsed;
use crate::{Charge, Limit, Tollgate};

const HOUR: Duration = Duration::from_secs(3600);

async fn gates(clock: &ManualClock) -> [(&'static str, Tollgate); 2] {
    let builder = || {
        Tollgate::builder()
            .clock(clock.clock())
            .sweep_every(None)
            .limit("bucket", Limit::token_bucket("1/h", 100).unwrap())
            .limit("window", Limit::sliding_window(100, HOUR).unwrap())
            .limit("counter", Limit::sliding_window_counter(100, HOUR).unwrap())
            .limit("places", Limit::concurrency(100, HOUR).unwrap())
    };
    let options = MemoryOptions { clock: clock.clock(), sweep_every: None, ..MemoryOptions::default() };
    let store = MemoryStore::new(options);
    let remote = builder().store(store).connect().await.unwrap();
    [("in this process", builder().build().unwrap()), ("in another store", remote)]
}

#[tokio::test]
async fn a_call_parses_each_of_its_keys_once() {
    for (place, gate) in gates(&ManualClock::new()).await {
        // Keys with an escape take the slow path, and so do keys that were not charged before.
        let mut calls: Vec<(&str, usize, usize)> = Vec::new();
        let three = ["user:a%3Ab", "user:c%3Ad", "user:e%3Af"];
        let [bucket, window, counter] = ["bucket", "window", "counter"];
        let charges: Vec<_> = [bucket, window, counter]
            .into_iter()
            .zip(three)
            .map(|(limit, key)| Charge::new(limit, key))
            .collect();
        let twice: Vec<_> = charges.iter().chain(&charges).cloned().collect();
        let mut seen = |call, keys| calls.push((call, keys, parsed()));

        parsed();
        assert!(gate.check("bucket", "user:42").await.unwrap().is_allowed());
        seen("check of a new key", 1);
        assert!(gate.check("window", "user:o%3Ao").await.unwrap().is_allowed());
        seen("check of a new key with an escape", 1);
        assert!(gate.charge(&charges).await.unwrap().is_allowed());
        seen("charge of three limits", 3);
        assert!(gate.charge(&charges).await.unwrap().is_allowed());
        seen("the same charge again", 3);
        assert!(gate.charge(&twice).await.unwrap().is_allowed());
        seen("charge of three pairs, each twice", 6);
        for outcome in gate.charge_each(&charges).await.unwrap() {
            assert!(outcome.unwrap().is_allowed());
        }
        seen("three charges, each by itself", 3);
        assert!(gate.peek(&charges).await.unwrap().is_allowed());
        seen("peek of three", 3);
        assert!(gate.wait(&charges, HOUR).await.unwrap().is_allowed());
        seen("wait for three", 3);
        gate.refund(&charges).await.unwrap();
        seen("refund of three", 3);
        assert!(gate.status("bucket", "user:42").await.unwrap().is_allowed());
        seen("status", 1);
        let reservation = gate.reserve(&charges, HOUR).await.unwrap().unwrap();
        seen("reservation of three", 3);
        reservation.settle(2).await.unwrap();
        seen("its settlement", 0);
        let permit = gate.acquire("places", "user:42").await.unwrap().unwrap();
        seen("permit", 1);
        permit.release().await.unwrap();
        seen("its release", 0);
        gate.reset("bucket", "user:42").await.unwrap();
        seen("reset", 1);

        for (call, keys, parses) in calls {
            assert!(parses <= keys, "{place}: {call} has {keys} keys and parsed {parses}");
            // A key that has local counters may go without a parse; a new key may not.
            if call.contains("new key") {
                assert_eq!(parses, keys, "{place}: {call}");
            }
        }
    }
}

/// Polls until the call is done, and advances the clock each time it waits. Returns its result and how often it waited.
fn run<T>(clock: &ManualClock, by: Duration, call: impl Future<Output = T>) -> (T, usize) {
    let mut call = pin!(call);
    for waits in 0..1_000 {
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => return (result, waits),
            Poll::Pending => clock.advance(by),
        }
    }
    panic!("the call is not done after a thousand steps of the clock");
}

/// Regression: each try of a waiting call parsed the keys again.
#[tokio::test]
async fn a_call_that_tries_several_times_parses_each_of_its_keys_once() {
    let clock = ManualClock::new();
    let minute = Duration::from_secs(60);
    for (place, gate) in gates(&clock).await {
        let charges = [Charge::new("bucket", "user:a%3Ab"), Charge::new("window", "user:c%3ad")];
        assert!(gate.charge(&[charges[0].clone().cost(100)]).await.unwrap().is_allowed());
        parsed();
        let (admitted, waits) = run(&clock, minute, gate.wait(&charges, 2 * HOUR));
        assert!(admitted.unwrap().is_allowed() && waits >= 2, "{place}: {waits}");
        assert_eq!(parsed(), 2, "{place}: wait");

        let charges = charges.map(|charge| charge.cost(2));
        let (reserved, waits) = run(&clock, minute, gate.reserve_within(&charges, HOUR, 3 * HOUR));
        assert!(reserved.unwrap().is_ok() && waits >= 2, "{place}: {waits}");
        assert_eq!(parsed(), 2, "{place}: reservation");

        let mut held = Vec::new();
        for _ in 0..100 {
            held.push(gate.acquire("places", "user:e%3Af").await.unwrap().unwrap());
        }
        parsed();
        let (late, waits) = run(&clock, minute, gate.acquire_within("places", "user:e%3Af", 2 * minute));
        assert!(late.unwrap().is_err() && waits >= 1, "{place}: {waits}");
        assert_eq!(parsed(), 1, "{place}: permit");
        for permit in held {
            permit.release().await.unwrap();
        }

        // A malformed key is denied at once, and not parsed for the denial either.
        parsed();
        let malformed = [Charge::new("bucket", "user:"), Charge::new("window", "user:42")];
        let (denied, _) = run(&clock, minute, gate.wait(&malformed, HOUR));
        assert_eq!(denied.unwrap().binding().reason(), crate::Reason::MalformedKey, "{place}");
        assert_eq!(parsed(), 2, "{place}: malformed");
    }
}
