//! Limits whose numbers come with the call.

use tollgate::store::Micros;
use tollgate::{Allowance, Charge, Limit, ManualClock, Rate, Rule, Tollgate};

use crate::crowd::ready;
use crate::scene::{on, reload, secs};

fn gate() -> (ManualClock, Tollgate) {
    let hands = ManualClock::at(Micros::from_secs(1_000));
    let gate = on(&hands).build().unwrap();
    (hands, gate)
}

fn bucket(count: u64, burst: u64) -> Limit {
    Limit::token_bucket(Rate::per_minute(count).unwrap(), burst).unwrap()
}

fn charge(gate: &Tollgate, count: u64, burst: u64, cost: u64) -> (bool, u64) {
    let limit = gate.ad_hoc("cl", bucket(count, burst)).unwrap();
    let outcome = gate.local(&limit).unwrap().charge("user:42", cost).unwrap();
    (outcome.is_allowed(), outcome.remaining())
}

#[test]
fn one_key_has_one_state_whatever_numbers_it_is_charged_by() {
    let (hands, gate) = gate();
    assert_eq!(charge(&gate, 60, 10, 4), (true, 6));
    assert_eq!(charge(&gate, 60, 20, 1), (true, 15));
    assert_eq!(charge(&gate, 60, 5, 1), (false, 0), "five are used already");
    // What was consumed is an instant: the bucket is full again in five seconds, of which twice the rate makes ten units.
    assert_eq!(charge(&gate, 120, 10, 1), (false, 0));
    hands.advance(secs(1));
    assert_eq!(charge(&gate, 120, 10, 1), (true, 1));
    assert_eq!(gate.keys(), 1);
}

#[test]
fn names_of_the_policy_and_bad_ones_are_refused() {
    let gate = Tollgate::builder().limit("api", bucket(60, 1)).build().unwrap();
    for (name, said) in [("api", "`api` is a limit of the policy"), ("No", "limit name `No`")] {
        let error = gate.ad_hoc(name, bucket(60, 1)).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    assert_eq!(gate.ad_hoc_names(), [""; 0]);
    for name in ["b", "a", "b"] {
        gate.ad_hoc(name, bucket(60, 1)).unwrap();
    }
    assert_eq!(gate.ad_hoc_names(), ["a", "b"]);
}

/// The page had lost them after a reload until the next call.
#[test]
fn names_outlive_a_reload_unless_the_policy_has_them_then() {
    let (_hands, gate) = gate();
    for name in ["b", "a", "c"] {
        gate.ad_hoc(name, bucket(60, 1)).unwrap();
    }
    reload(&gate, [Rule::new("a", bucket(60, 1)).unwrap()]);
    assert_eq!(gate.ad_hoc_names(), ["b", "c"], "`a` is the policy's now");
    reload(&gate, []);
    assert_eq!(gate.ad_hoc_names(), ["b", "c"]);
}

#[test]
fn it_is_charged_together_with_limits_of_its_own_gate() {
    let new = || Tollgate::builder().limit("api", bucket(60, 1)).build().unwrap();
    let gate = new();
    let own = gate.ad_hoc("own", bucket(60, 5)).unwrap();
    let blocked = gate.ad_hoc("own", Allowance::Blocked).unwrap();
    let charge = |charges: &[Charge<'_>]| {
        ready(gate.charge(charges)).map(|decision| (decision.is_allowed(), decision.binding().limit()))
    };
    assert_eq!(charge(&[Charge::new("api", "a"), Charge::new(&own, "a").cost(2)]).unwrap(), (true, "api"));
    assert_eq!(charge(&[Charge::new("api", "a"), Charge::new(&own, "a")]).unwrap(), (false, "api"));
    assert_eq!(charge(&[Charge::new("api", "b"), Charge::new(&blocked, "a")]).unwrap(), (false, "own"));
    assert_eq!(charge(&[Charge::new(&own, "a").cost(3)]).unwrap(), (true, "own"), "no refusal took anything");
    let other = new().ad_hoc("own", bucket(60, 5)).unwrap();
    let error = charge(&[Charge::new(&other, "a")]).unwrap_err();
    assert!(error.to_string().contains("`own` is a limit of another gate"), "{error}");
    assert!(gate.local(&other).is_err());
}
