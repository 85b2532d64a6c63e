//! Values that are there in two units, and costs that add up.

use std::time::Duration;

use tollgate_kernel::{Cost, Limit, Micros, Rate};

#[test]
fn times_are_the_same_in_both_units() {
    let rate: Rate = "3/250ms".parse().unwrap();
    assert_eq!((rate.period(), rate.period_us()), (Duration::from_millis(250), Micros::from_millis(250)));

    let limit = Limit::token_bucket("10/s", 20).unwrap();
    assert_eq!((limit.window(), limit.window_us()), (Duration::from_secs(2), Micros::from_secs(2)));
    let outcome = limit.charge(&mut limit.fresh(), Cost::new(15).unwrap(), Micros::from_secs(1));
    assert_eq!(limit.more_after_us(&outcome, 1), Some(Micros::from_millis(100)));
    assert_eq!(limit.more_after(&outcome, 1), Some(Duration::from_millis(100)));
    assert_eq!(limit.more_after(&outcome, 21), None);
}

#[test]
fn costs_add_up_to_the_largest() {
    let cost = |units| Cost::new(units).unwrap();
    assert_eq!(cost(2).saturating_add(cost(3)), cost(5));
    assert_eq!(Cost::MAX.saturating_add(Cost::ONE), Cost::MAX);
}
