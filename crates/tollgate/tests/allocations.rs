//! The fast path allocates nothing: a check of a known key by a limiter, by a named limit and by name, a check of many keys, and a
//! charge of two limits, allowed and denied.

use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate::{Charge, Limit, Tollgate};

fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("the counters are in this process"),
    }
}

/// How often `work` allocates, once it was done before.
fn allocations(mut work: impl FnMut()) -> u64 {
    work();
    allocation_counter::measure(|| (0..100).for_each(|_| work())).count_total
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(7)))), 100);
}

#[test]
fn a_check_of_a_known_key_allocates_nothing() -> Result<(), tollgate::Error> {
    let minute = Duration::from_secs(60);
    let gate = Tollgate::builder()
        .limit("wide", Limit::token_bucket("1000000/s", 1_000_000)?)
        .limit("tight", Limit::fixed_window(3, minute)?)
        .limit("counter", Limit::sliding_window_counter(1_000_000, minute)?)
        .build()?;
    let address: IpAddr = [10, 0, 0, 1].into();
    for name in ["wide", "tight", "counter"] {
        let (limiter, named) = (gate.local(name)?, gate.limit(name)?);
        assert_eq!(allocations(|| _ = limiter.check("user:42")), 0, "{name}: Limiter::check");
        assert_eq!(allocations(|| _ = limiter.check(7_u64)), 0, "{name}: a number");
        assert_eq!(allocations(|| _ = limiter.check(address)), 0, "{name}: an address");
        assert_eq!(allocations(|| _ = ready(gate.check(name, "user:42")).unwrap()), 0, "{name}: by name");
        assert_eq!(
            allocations(|| _ = ready(gate.check(&named, "user:42")).unwrap()),
            0,
            "{name}: by a handle"
        );
        let keys: Vec<String> = (0..40).map(|number| format!("user:{number}")).collect();
        let mut outcomes = Vec::new();
        let many = allocations(|| {
            outcomes.clear();
            limiter.check_many(&keys, &mut outcomes);
        });
        assert_eq!(many, 0, "{name}: many keys");
        let charges = [Charge::new("wide", "user:42"), Charge::new(&named, "user:42")];
        assert_eq!(allocations(|| _ = ready(gate.charge(&charges)).unwrap()), 0, "{name}: of two limits");
    }
    Ok(())
}
