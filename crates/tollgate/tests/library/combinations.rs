//! Every kind of rule with every kind of key under every call: the same answer in this process and on a remote store, and a look
//! foretells the charge.

use tollgate::{
    Allowance, Charge, Decision, Denied, Key, Limit, Outcome, Reason, Rule, Tollgate, TollgateBuilder,
};

use crate::crowd::ready;
use crate::faulty_store::FaultyStore;
use crate::scene::{a_minute, at_once, bucket, hands, on, secs};

const NAMES: [&str; 8] =
    ["window", "bucket", "leaky", "workers", "unlimited", "blocked", "shadow-unlimited", "shadow-workers"];
const KEYS: [&str; 6] = ["plain", "more", "free", "shut", "", "a:b:c:d"];

fn overridden(name: &str, limit: Limit, more: Limit) -> Rule {
    let key = |text| Key::parse(text).unwrap();
    Rule::new(name, limit)
        .and_then(|rule| rule.with_override(key("more"), more))
        .and_then(|rule| rule.with_override(key("free"), Allowance::Unlimited))
        .and_then(|rule| rule.with_override(key("shut"), Allowance::Blocked))
        .unwrap()
}

fn build(builder: TollgateBuilder) -> Tollgate {
    let leaky = |capacity| Limit::leaky_bucket("1/s", capacity).unwrap();
    let rules = [
        overridden("window", a_minute(2), a_minute(3)),
        overridden("bucket", bucket("1/s", 2), bucket("1/s", 3)),
        overridden("leaky", leaky(2), leaky(3)),
        overridden("workers", at_once(2), at_once(3)),
        overridden("shadow-window", a_minute(2), a_minute(3)).shadow(),
        overridden("shadow-workers", at_once(2), at_once(3)).shadow(),
        Rule::unlimited("unlimited").unwrap(),
        Rule::blocked("blocked").unwrap(),
        Rule::unlimited("shadow-unlimited").unwrap().shadow(),
        Rule::blocked("shadow-blocked").unwrap().shadow(),
    ];
    rules.into_iter().fold(builder, TollgateBuilder::rule).build().unwrap()
}

/// An outcome, whatever its source: a cached denial is the store's.
fn outcome(outcome: &Outcome) -> (bool, Reason, tollgate::store::Outcome) {
    (outcome.is_allowed(), outcome.reason(), *outcome.numbers())
}

fn decision(decision: &Decision) -> String {
    let outcomes: Vec<_> = decision.outcomes().iter().map(outcome).collect();
    format!("{} {outcomes:?} {:?}", decision.is_allowed(), decision.delay())
}

fn held<T>(answer: Result<Result<T, Denied>, tollgate::Error>, of: impl Fn(&T) -> String) -> String {
    match answer {
        Ok(Ok(held)) => of(&held),
        Ok(Err(denied)) => decision(denied.decision()),
        Err(error) => error.to_string(),
    }
}

/// What one call answers.
fn call(gate: &Tollgate, call: usize, limit: &str, key: &str, cost: u64) -> String {
    let charges = [
        Charge::new(limit, key).cost(cost),
        Charge::new("shadow-window", key),
        Charge::new("shadow-blocked", "x"),
    ];
    let one = &charges[..1];
    let decided = |answer: Result<Decision, tollgate::Error>| match answer {
        Ok(answer) => decision(&answer),
        Err(error) => error.to_string(),
    };
    match call {
        0 => decided(ready(gate.check(limit, key))),
        1 => decided(ready(gate.charge(one))),
        2 => decided(ready(gate.charge(&charges))),
        3 => match ready(gate.charge_each(one)).unwrap().remove(0) {
            Ok(answer) => format!("{:?}", outcome(&answer)),
            Err(error) => error.to_string(),
        },
        4 => held(ready(gate.reserve(&charges, secs(9))), |held| decision(held.decision())),
        5 => {
            let answer = held(ready(gate.acquire(limit, key)), |permit| decision(permit.decision()));
            // What was dropped is released.
            ready(gate.flush());
            answer
        }
        6 => decided(ready(gate.wait(one, secs(0)))),
        7 => held(ready(gate.reserve_within(one, secs(9), secs(0))), |held| decision(held.decision())),
        _ => match ready(gate.status(limit, key)) {
            Ok(answer) => format!("{:?} {}", outcome(&answer), answer.used()),
            Err(error) => error.to_string(),
        },
    }
}

#[test]
fn every_rule_and_key_and_call_is_answered_alike_near_and_far() {
    let hands = hands();
    let (near, far) = (build(on(&hands)), build(on(&hands).store(FaultyStore::new(&hands))));
    let all = NAMES.into_iter().chain(["shadow-window", "shadow-blocked"]);
    for limit in all {
        for key in KEYS {
            for cost in [1, 2, 4, u64::MAX] {
                for number in 0..9 {
                    let [one, other] = [&near, &far].map(|gate| call(gate, number, limit, key, cost));
                    assert_eq!(one, other, "{limit} {key:?} {cost}, call {number}");
                    let charges = [Charge::new(limit, key).cost(cost)];
                    let [one, other] =
                        [&near, &far].map(|gate| decision(&ready(gate.peek(&charges)).unwrap()));
                    assert_eq!(one, other, "a look at {limit} {key:?} {cost}");
                    // What was looked at is what is charged.
                    if !limit.ends_with("workers") {
                        let charged =
                            [&near, &far].map(|gate| decision(&ready(gate.charge(&charges)).unwrap()));
                        assert_eq!(
                            charged,
                            [one, other],
                            "{limit} {key:?} {cost}: the look, then the charge"
                        );
                    }
                }
                hands.advance(secs(1));
            }
            hands.advance(secs(120));
        }
    }
}

/// What a shadow limit and an unlimited or blocked key mean, in one place.
#[test]
fn malformed_beats_shadow_and_shadow_beats_blocked() {
    let gate = build(on(&hands()));
    for (limit, key, is_allowed, reason) in [
        ("window", "shut", false, Reason::Blocked),
        ("window", "free", true, Reason::Limit),
        ("shadow-window", "shut", true, Reason::Shadow),
        ("shadow-window", "", false, Reason::MalformedKey),
        ("shadow-blocked", "plain", true, Reason::Shadow),
        ("shadow-blocked", "a:b:c:d", false, Reason::MalformedKey),
        ("unlimited", "", false, Reason::MalformedKey),
        ("blocked", "plain", false, Reason::Blocked),
    ] {
        let answer = ready(gate.check(limit, key)).unwrap();
        assert_eq!((answer.is_allowed(), answer.binding().reason()), (is_allowed, reason), "{limit} {key:?}");
    }
}
