//! One charge over several limits: all are charged or none is, and the answer says who was in the way.

use std::time::Duration;
use tollgate::store::Outcome as Numbers;
use tollgate::{Allowance, Charge, Key, Limiter, ManualClock, Outcome, Rule, Settlement, Strategy, Tollgate};

use crate::crowd::ready;
use crate::scene::{
    Dice, Only, a_minute, at_once, bucket, every_strategy, gate, hands, is_by_the_clock, limiter, on, secs,
};

fn api_rule() -> Rule {
    Rule::new("api", bucket("1/s", 10)).unwrap()
}

/// A registry with a limit of every manner, and what each is for.
fn limits(hands: &ManualClock) -> Tollgate {
    let keyed = |text| Key::parse(text).unwrap();
    gate(
        hands,
        [
            api_rule().with_override(keyed("blocked"), Allowance::Blocked).unwrap(),
            Rule::new("tight", a_minute(2)).unwrap(),
            Rule::new("slow", bucket("1/h", 2)).unwrap(),
            Rule::new("watching", a_minute(2)).unwrap().shadow(),
            Rule::unlimited("free").unwrap(),
            Rule::blocked("shut").unwrap(),
            Rule::blocked("watched-shut").unwrap().shadow(),
            Rule::new("workers", at_once(2)).unwrap(),
        ],
    )
}

/// What is used of each limit that counts, by a key.
fn used(gate: &Tollgate, key: &str) -> [u64; 4] {
    ["api", "tight", "slow", "watching"].map(|limit| ready(gate.status(limit, key)).unwrap().used())
}

/// The limits of a charge as `(limit, key, cost)`, what is said in words, and what is used then of api, tight, slow, watching.
type Case = (&'static [(&'static str, &'static str, u64)], &'static str, [u64; 4]);

#[test]
fn all_are_charged_or_none_is_and_the_answer_names_the_limit_that_bound() {
    let cases: &[Case] = &[
        (&[("api", "a", 1)], "allowed by api, 9 of 10 left", [1, 0, 0, 0]),
        // The smallest share that is left binds.
        (&[("api", "a", 1), ("tight", "a", 1)], "allowed by tight, 1 of 2 left", [1, 1, 0, 0]),
        (&[("api", "a", 9), ("tight", "a", 1)], "allowed by api, 1 of 10 left", [9, 1, 0, 0]),
        (&[("api", "a", 5), ("tight", "a", 1)], "allowed by api, 5 of 10 left", [5, 1, 0, 0]),
        (&[("api", "a", 1), ("free", "a", 1)], "allowed by api, 9 of 10 left", [1, 0, 0, 0]),
        (&[("free", "a", 7)], "allowed by free, unlimited", [0, 0, 0, 0]),
        // One refusal, and no key is charged; of two, the longer wait binds, and `never` is the longest.
        (
            &[("api", "a", 1), ("tight", "a", 3)],
            "denied by tight, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
        (
            &[("tight", "a", 3), ("slow", "a", 1), ("api", "a", 1)],
            "denied by tight, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
        // Repeated pairs add up, however the key is spelled.
        (&[("tight", "a", 1), ("tight", "a", 1)], "allowed by tight, 0 of 2 left", [0, 2, 0, 0]),
        (&[("tight", "a", 1), ("tight", "default:a", 1)], "allowed by tight, 0 of 2 left", [0, 2, 0, 0]),
        (
            &[("tight", "a", 2), ("api", "a", 1), ("tight", "a", 1)],
            "denied by tight, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
        (
            &[("tight", "a", 1 << 63), ("tight", "a", 1 << 63)],
            "denied by tight, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
        // The same limit for another key, and the same key under another limit, are other counters.
        (&[("tight", "a", 2), ("tight", "b", 2)], "allowed by tight, 0 of 2 left", [0, 2, 0, 0]),
        // A limit in shadow mode is charged what fits, and never holds anybody up.
        (&[("watching", "a", 2), ("api", "a", 1)], "allowed by api, 9 of 10 left", [1, 0, 0, 2]),
        (
            &[("api", "a", 1), ("watching", "a", 3), ("tight", "a", 1)],
            "allowed by tight, 1 of 2 left",
            [1, 1, 0, 0],
        ),
        (
            &[("watching", "a", 3)],
            "allowed by watching, shadow limit: would be denied, can never fit",
            [0, 0, 0, 0],
        ),
        (
            &[("watching", "a", 1), ("tight", "a", 3)],
            "denied by tight, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
        (&[("watched-shut", "a", 1), ("api", "a", 1)], "allowed by api, 9 of 10 left", [1, 0, 0, 0]),
        // What is blocked or malformed denies the whole, and nothing is charged.
        (&[("api", "a", 1), ("shut", "a", 1)], "denied by shut, blocked", [0, 0, 0, 0]),
        (&[("shut", "a", 1), ("watching", "a", 1)], "denied by shut, blocked", [0, 0, 0, 0]),
        (&[("api", "blocked", 1), ("tight", "a", 1)], "denied by api, blocked", [0, 0, 0, 0]),
        (&[("api", "a", 1), ("tight", "", 1)], "denied by tight, the key is malformed", [0, 0, 0, 0]),
        (&[("api", "a", 1), ("free", "a:b:c:d", 1)], "denied by free, the key is malformed", [0, 0, 0, 0]),
        (
            &[("api", "a", 1), ("watching", "a\n", 1)],
            "denied by watching, the key is malformed",
            [0, 0, 0, 0],
        ),
        // A cost that no limit holds.
        (&[("api", "a", 1 << 63)], "denied by api, the cost is more than the limit ever holds", [0, 0, 0, 0]),
        (
            &[("api", "a", u64::MAX), ("tight", "a", 1)],
            "denied by api, the cost is more than the limit ever holds",
            [0, 0, 0, 0],
        ),
    ];
    for (case, words, expected) in cases {
        // Asked in plain code, by name, and only looked at, each of a registry of its own.
        let [plain, named, looked_at] = [(); 3].map(|()| limits(&hands()));
        let asks: Vec<Charge<'_>> =
            case.iter().map(|&(limit, key, cost)| Charge::new(limit, key).cost(cost)).collect();
        let handles = |gate: &Tollgate| -> Vec<Limiter> {
            case.iter().map(|(limit, ..)| gate.local(limit).unwrap()).collect()
        };
        let (of_plain, of_looked_at) = (handles(&plain), handles(&looked_at));
        fn charges<'a>(handles: &'a [Limiter], case: &[(&str, &'static str, u64)]) -> Vec<Charge<'a>> {
            handles.iter().zip(case).map(|(limiter, &(_, key, cost))| limiter.of(key).cost(cost)).collect()
        }
        let decision = of_plain[0].charge_all(&charges(&of_plain, case)).unwrap();
        assert_eq!(decision.to_string(), *words, "{case:?}");
        assert_eq!(decision.outcomes().len(), case.len());
        assert_eq!(used(&plain, "a"), *expected, "{case:?}");
        assert_eq!(ready(named.charge(&asks)).unwrap(), decision);
        assert_eq!(used(&named, "a"), *expected, "{case:?}");
        assert_eq!(ready(looked_at.peek(&charges(&of_looked_at, case))).unwrap(), decision);
        assert_eq!(ready(looked_at.peek(&asks)).unwrap(), decision);
        assert_eq!(looked_at.keys(), 0, "looking changes nothing");
    }
}

#[test]
fn of_two_refusals_the_longer_wait_binds() {
    let hands = hands();
    let gate = limits(&hands);
    let both = [Charge::new("tight", "a").cost(2), Charge::new("slow", "a").cost(2)];
    assert!(ready(gate.charge(&both)).unwrap().is_allowed());
    hands.advance(secs(10));
    let [tight, slow] = both.clone();
    for asks in [both.clone(), [slow, tight]] {
        let denied = ready(gate.charge(&asks)).unwrap();
        assert_eq!(denied.binding().limit(), "slow");
        assert_eq!(denied.retry_after(), Some(secs(7_190)));
        assert_eq!(denied.delay(), Duration::ZERO);
        // Each limit says what it says for itself.
        let waits = denied.outcomes().iter().map(|limit| limit.retry_after().unwrap());
        assert_eq!(waits.max(), Some(secs(7_190)));
        assert!(denied.outcomes().iter().all(|limit| !limit.is_allowed() && !limit.is_shadow()));
    }
    hands.advance(secs(50));
    let denied = ready(gate.charge(&both)).unwrap();
    assert_eq!(denied.outcomes()[0].to_string(), "allowed, 0 of 2 left", "the window is over");
    assert_eq!((denied.is_allowed(), denied.binding().limit()), (false, "slow"));
    assert_eq!(ready(gate.status("tight", "a")).unwrap().used(), 0, "and yet nothing is charged there");
}

#[test]
fn an_admitted_charge_is_held_back_as_long_as_the_slowest_leaky_bucket_says() {
    let hands = hands();
    let leaky = |rate: &str| tollgate::Limit::leaky_bucket(rate, 5).unwrap();
    let gate = on(&hands).limit("fast", leaky("10/s")).limit("slow", leaky("1/s")).build().unwrap();
    let asks = [Charge::new("slow", "a"), Charge::new("fast", "a")];
    for delay in 0..5 {
        let decision = ready(gate.charge(&asks)).unwrap();
        assert_eq!((decision.is_allowed(), decision.delay()), (true, secs(delay)));
    }
    assert_eq!(ready(gate.charge(&asks)).unwrap().to_string(), "denied by slow, retry after 1s");
}

#[test]
fn what_cannot_be_a_charge_is_an_error_and_charges_nothing() {
    let hands = hands();
    let (gate, other) = (limits(&hands), limits(&hands));
    let (api, tight, foreign) =
        (gate.local("api").unwrap(), gate.local("tight").unwrap(), other.local("api").unwrap());
    let empty = "a charge needs at least one limit";
    let zero = "a cost must be at least 1; to look without charging, peek";
    let apart = "`api` is a limit of another gate; look it up in this one";
    let a_minute = std::time::Duration::from_secs(60);

    let too_many = "a charge may name at most 64 limits, and this one names 65";
    let many = |count: usize| vec![api.of("a"); count];
    assert!(ready(gate.peek(&many(64))).is_ok());
    for (charges, message) in [
        (&[][..], empty),
        (&many(65)[..], too_many),
        (&[api.of("a").cost(0)][..], zero),
        (&[tight.of("a"), api.of("a").cost(0)][..], zero),
        (&[api.of("a"), foreign.of("a")][..], apart),
    ] {
        let reserved =
            api.reserve_all(charges, a_minute).map(|reserved| reserved.unwrap_err().into_decision());
        for answer in [api.charge_all(charges), ready(gate.peek(charges)), reserved] {
            assert_eq!(answer.unwrap_err().to_string(), message);
        }
    }
    let named = |count: usize| vec![Charge::new("api", "a"); count];
    assert!(ready(gate.peek(&named(64))).is_ok());
    for (asks, message) in [
        (&[][..], empty),
        (&named(65)[..], too_many),
        (&[Charge::new("api", "a").cost(0)][..], zero),
        (&[Charge::new("api", "a"), Charge::new("free", "a").cost(0)][..], zero),
    ] {
        let reserved =
            ready(gate.reserve(asks, a_minute)).map(|reserved| reserved.unwrap_err().into_decision());
        for answer in [ready(gate.charge(asks)), ready(gate.peek(asks)), reserved] {
            let error = answer.unwrap_err();
            assert_eq!((error.to_string().as_str(), error.is_transient()), (message, false));
        }
    }
    for error in
        [api.charge("a", 0).unwrap_err(), api.peek("a", 0).unwrap_err(), api.reserve("a", 0).unwrap_err()]
    {
        assert_eq!(error.to_string(), zero);
    }
    assert_eq!(gate.keys() + other.keys(), 0);
}

#[test]
fn plain_and_async_calls_agree_and_a_look_foretells_both() {
    let hands = hands();
    let (plain, named) = (limits(&hands), limits(&hands));
    let policy = plain.policy();
    let names = policy.rules().iter().map(Rule::name).filter(|name| *name != "workers");
    let handles: Vec<Limiter> = names.map(|name| plain.local(name).unwrap()).collect();
    let mut dice = Dice(7);
    let (mut allowed, mut denied) = (0, 0);
    for _ in 0..5_000 {
        hands.advance(Duration::from_millis(dice.below(3_000)));
        let count = 1 + dice.below(3);
        let parts: Vec<(&Limiter, &str, u64)> = (0..count)
            .map(|_| {
                let handle = &handles[usize::try_from(dice.below(handles.len() as u64)).unwrap()];
                let key = dice.pick(&["a", "b", "default:a", "user:c:v1", "blocked", "", "x:y:z:w"]);
                (handle, key, 1 + dice.below(3))
            })
            .collect();
        let asks: Vec<Charge<'_>> =
            parts.iter().map(|(handle, key, cost)| Charge::new(handle.name(), *key).cost(*cost)).collect();
        let charges: Vec<Charge<'_>> =
            parts.iter().map(|(handle, key, cost)| handle.of(*key).cost(*cost)).collect();

        let foretold = ready(named.peek(&asks)).unwrap();
        let decision = ready(named.charge(&asks)).unwrap();
        assert_eq!(foretold, decision, "{asks:?}");
        assert_eq!(handles[0].charge_all(&charges).unwrap(), decision, "{asks:?}");
        for (handle, key, _) in &parts {
            assert_eq!(handle.status(*key), ready(named.status(handle.name(), *key)).unwrap());
        }
        *(if decision.is_allowed() { &mut allowed } else { &mut denied }) += 1;
    }
    assert!(allowed > 1_000 && denied > 1_000, "{allowed} allowed, {denied} denied");
}

#[test]
fn under_every_strategy_a_look_foretells_a_charge_and_a_key_can_be_looked_at_and_forgotten() {
    for limit in every_strategy(3).into_iter().filter(|limit| limit.strategy() != Strategy::Concurrency) {
        let hands = hands();
        let limiter = limiter(&hands, limit);
        let fresh = limiter.status("a");
        assert_eq!(
            (fresh.is_allowed(), fresh.used(), fresh.remaining(), fresh.capacity()),
            (true, 0, 3, 3),
            "{limit}"
        );
        assert_eq!(fresh.retry_after(), Some(Duration::ZERO), "{limit}");
        assert_eq!(fresh.reset_after() > Duration::ZERO, is_by_the_clock(&limit), "{limit}");

        for cost in [1, 2, 1, 4] {
            let foretold = limiter.peek("a", cost).unwrap();
            let before = limiter.status("a");
            assert_eq!(limiter.charge("a", cost).unwrap(), foretold, "{limit}");
            if !foretold.is_allowed() {
                assert_eq!(limiter.status("a"), before, "{limit}: a refusal changes nothing");
            }
        }
        let full = limiter.status("a");
        assert_eq!((full.is_allowed(), full.used(), full.remaining()), (false, 3, 0), "{limit}");
        assert!(
            full.retry_after().unwrap() > Duration::ZERO && full.reset_after() >= full.retry_after().unwrap(),
            "{limit}"
        );
        assert_eq!(limiter.peek("a", 4).unwrap().retry_after(), None, "{limit}: never");
        assert_eq!(limiter.status("b"), fresh, "{limit}: another key");

        assert!(limiter.reset("a"), "{limit}");
        assert_eq!(limiter.status("a"), fresh, "{limit}");
        assert!(!limiter.reset("a"), "{limit}: nothing is left to forget");
    }
}

#[test]
fn a_reset_forgets_one_key_under_one_limit() {
    let hands = hands();
    let gate = limits(&hands);
    let all = ["api", "tight", "slow", "watching"].map(|limit| Charge::new(limit, "a"));
    let _ = ready(gate.charge(&all)).unwrap();
    let _ = ready(gate.charge(&[Charge::new("tight", "b")])).unwrap();
    assert!(ready(gate.reset("tight", "default:a")).unwrap());
    assert_eq!(used(&gate, "a"), [1, 0, 1, 1]);
    assert_eq!(used(&gate, "b"), [0, 1, 0, 0]);
    for (limit, key) in [("tight", "a"), ("free", "a"), ("shut", "a"), ("api", "blocked")] {
        assert!(!ready(gate.reset(limit, key)).unwrap(), "{limit} {key}");
        assert!(!gate.local(limit).unwrap().reset(key), "{limit} {key}");
    }
    for (limit, expected) in
        [("free", Numbers::UNLIMITED), ("shut", Numbers::BLOCKED), ("watched-shut", Numbers::BLOCKED)]
    {
        assert_eq!(*ready(gate.status(limit, "a")).unwrap().numbers(), expected);
    }
}

#[test]
fn a_watching_limit_says_what_it_would_have_said_and_lets_pass() {
    let hands = hands();
    let gate = limits(&hands);
    let watching = gate.local("watching").unwrap();
    for (remaining, would) in [(1, true), (0, true), (0, false), (0, false)] {
        let decision = ready(gate.peek(&[Charge::new("watching", "a")])).unwrap();
        let said = decision.binding();
        assert_eq!((said.numbers().allowed, said.is_shadow(), said.is_allowed()), (would, true, true));
        assert_eq!(said.would_deny(), !would);
        assert_eq!((decision.is_allowed(), decision.retry_after()), (true, Some(Duration::ZERO)));
        assert!(watching.peek("a", 1).unwrap().is_allowed());
        let outcome = watching.check("a");
        assert_eq!(
            (outcome.is_allowed(), outcome.remaining(), outcome.retry_after()),
            (true, remaining, Some(Duration::ZERO))
        );
    }
    assert!(watching.status("a").would_deny(), "the status shows the key as it stands");
}

/// Batches of every size, on limits of every manner: the same answers as one by one, in order.
#[test]
fn many_keys_at_once_are_answered_as_one_by_one() {
    let key = |text| Key::parse(text).unwrap();
    let plain = || Rule::new("limit", bucket("1/s", 3)).unwrap();
    let mut rules = vec![
        ("overrides", plain().with_override(key("user:3"), bucket("1/s", 1)).unwrap()),
        ("overrides of other kinds", {
            let rule = plain().with_override(key("user:3"), Allowance::Unlimited).unwrap();
            rule.with_override(key("user:4"), Allowance::Blocked).unwrap()
        }),
        ("watching", plain().shadow()),
        ("unlimited", Rule::unlimited("limit").unwrap()),
        ("blocked", Rule::blocked("limit").unwrap()),
    ];
    rules.extend(
        every_strategy(3).into_iter().map(|limit| ("a strategy", Rule::new("limit", limit).unwrap())),
    );
    for (what, rule) in rules {
        for size in [0, 1, 15, 16, 17, 1_000] {
            let hands = hands();
            let [one_by_one, at_once] = [(); 2].map(|()| gate(&hands, [rule.clone()]).only());
            let mut dice = Dice(size);
            let keys: Vec<String> = (0..size)
                .map(|n| match dice.below(20) {
                    0 => String::new(),
                    1 => format!("user:{n}:v1:"),
                    // Some keys again and again, the others once.
                    2..12 => format!("user:{}", dice.below(6)),
                    _ => format!("user:{n}"),
                })
                .collect();
            for round in 0..3 {
                let expected: Vec<Outcome> = keys.iter().map(|key| one_by_one.check(key)).collect();
                let there = one_by_one.status("there");
                let mut outcomes = vec![there];
                at_once.check_many(&keys, &mut outcomes);
                assert_eq!(outcomes[0], there, "what is there stays");
                assert_eq!(outcomes[1..], expected, "{what}, {size} keys, round {round}");
                hands.advance(secs(1));
            }
            assert_eq!(one_by_one.keys(), at_once.keys(), "{what}");
        }
    }
}

#[test]
fn clean_batches_are_answered_as_one_by_one() {
    for size in [1, 15, 16, 17, 64, 65, 1_000] {
        for repeated in [1, 4, 1_000_000] {
            let hands = hands();
            let [one_by_one, at_once] = [(); 2].map(|()| limiter(&hands, bucket("1/s", 3)));
            let keys: Vec<String> = (0..size).map(|n| format!("user:{}", n % repeated)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            for _ in 0..5 {
                let expected: Vec<Outcome> = keys.iter().map(|key| one_by_one.check(key)).collect();
                let mut outcomes = Vec::new();
                at_once.check_many(&keys, &mut outcomes);
                assert_eq!(outcomes, expected, "{size} keys, {repeated} of them different");
                hands.advance(Duration::from_millis(300));
            }
        }
    }
}

#[test]
fn a_settlement_by_name_is_a_settlement() {
    let hands = hands();
    let gate = limits(&hands);
    let asks = [Charge::new("api", "a").cost(4)];
    let reserved = ready(gate.reserve(&asks, std::time::Duration::from_secs(9))).unwrap();
    let id = reserved.unwrap().id();
    assert_eq!(ready(gate.settle(id, &Settlement::Renew)).unwrap(), tollgate::Settled::Done);
    assert_eq!(ready(gate.settle(id, &Settlement::Actual(1))).unwrap(), tollgate::Settled::Done);
    assert_eq!(ready(gate.settle(id, &Settlement::Cancel)).unwrap(), tollgate::Settled::Already);
    assert_eq!(used(&gate, "a"), [1, 0, 0, 0]);
}

/// Many keys at once take the fast path only where a single check may: under a limit in shadow mode nothing is denied, and what it would have
/// denied is said.
#[test]
fn many_keys_are_answered_like_each_by_itself() {
    let keys = ["a", "b", "a", "a", "blocked"];
    let one_by_one = |gate: &Tollgate, name: &str| -> Vec<Outcome> {
        keys.iter().map(|key| gate.local(name).unwrap().check(*key)).collect()
    };
    for name in ["api", "tight", "slow", "watching", "free", "shut", "watched-shut"] {
        let [alone, together] = [limits(&hands()), limits(&hands())];
        let mut outcomes = Vec::new();
        for round in 0..3 {
            outcomes.clear();
            together.local(name).unwrap().check_many(&keys, &mut outcomes);
            assert_eq!(outcomes, one_by_one(&alone, name), "{name}, round {round}");
        }
    }
}
