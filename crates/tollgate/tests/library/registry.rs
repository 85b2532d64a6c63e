//! Limits by name: registered, looked up, charged, and described in code or in a file alike.

use std::error::Error as _;
use std::time::Duration;

use tollgate::store::WhenFull;
use tollgate::{Allowance, Charge, Fallback, Key, Limiter, Policy, Rule, Settlement, Tollgate};

use crate::crowd::ready;
use crate::scene::{a_minute, at_once, bucket, charged, gate, hands, limiter, on};

#[test]
fn limits_are_registered_looked_up_and_charged_by_name() {
    let hands = hands();
    let gate = on(&hands).limit("api", bucket("1/s", 2)).limit("login", a_minute(5)).build().unwrap();
    assert_eq!(gate.policy().rules().iter().map(Rule::name).collect::<Vec<_>>(), ["api", "login"]);

    // One set of counters, however it is reached: by name, by handle, by a clone.
    let api = gate.local("api").unwrap();
    let [gate, clone] = [gate.clone(), gate];
    assert!(ready(gate.check("api", "user:42")).unwrap().is_allowed());
    assert_eq!(api.check("user:42").remaining(), 0);
    let denied = ready(clone.check("api", "user:42")).unwrap();
    assert_eq!(denied.to_string(), "denied by api, retry after 1s");
    assert_eq!(ready(gate.status("api", "user:42")).unwrap().used(), 2);
    assert_eq!(ready(gate.status("login", "user:42")).unwrap().used(), 0);

    assert_eq!((api.name(), api.rule().allowance()), ("api", &Allowance::Limited(bucket("1/s", 2))));
    assert_eq!((api.keys(), gate.local("login").unwrap().keys(), gate.keys()), (1, 0, 1));
}

#[test]
fn a_limiter_of_its_own_is_called_default() {
    let own = Limiter::new(a_minute(1));
    assert_eq!(own.name(), "default");
    assert!(own.check("user:42").is_allowed());
    assert!(!own.check("user:42").is_allowed());
    assert!(limiter(&hands(), a_minute(1)).check("user:42").is_allowed(), "another limiter, other counters");
}

#[test]
fn an_unknown_name_is_an_error_that_lists_the_known_ones_and_guesses() {
    let hands = hands();
    let gate = on(&hands).limit("api", a_minute(5)).limit("login", a_minute(5)).build().unwrap();
    let asks = [Charge::new("api", "user:42"), Charge::new("logn", "user:42")];
    let a_second = Duration::from_secs(1);
    let waiting = ready(gate.wait(&asks[1..], a_second)).unwrap_err();
    for (call, error) in [
        ("limiter", gate.local("logn").unwrap_err()),
        ("acquire", ready(gate.check("logn", "user:42")).unwrap_err()),
        ("charge", ready(gate.charge(&asks)).unwrap_err()),
        ("peek", ready(gate.peek(&asks)).unwrap_err()),
        ("reserve", ready(gate.reserve(&asks, a_second)).unwrap_err()),
        ("status", ready(gate.status("logn", "user:42")).unwrap_err()),
        ("reset", ready(gate.reset("logn", "user:42")).unwrap_err()),
        ("wait", waiting),
    ] {
        assert_eq!(
            error.to_string(),
            "unknown limit `logn`; known: api, login (did you mean `login`?)",
            "{call}"
        );
        assert!(!error.is_transient() && error.source().is_none(), "{call}");
    }
    assert_eq!(gate.keys(), 0, "nothing is charged under the limit that is known");
}

#[test]
fn names_that_will_not_do_are_refused_when_the_registry_is_built() {
    let long = "x".repeat(65);
    let one = || Tollgate::builder().limit("api", a_minute(5));
    let policy = |name: &str| Policy::new([Rule::new(name, a_minute(5)).unwrap()]).unwrap();
    for (builder, message) in [
        (one().limit("", a_minute(5)), "limit name ``: a name has 1 to 64 characters"),
        (one().limit("Login", a_minute(5)), "limit name `Login`: a name has only the characters a-z, 0-9"),
        (one().limit("log:in", a_minute(5)), "limit name `log:in`: a name has only the characters"),
        (one().limit("{login}", a_minute(5)), "limit name `{login}`: a name has only the characters"),
        (one().limit("log\nin", a_minute(5)), "limit name `log\\nin`: a name has only the characters"),
        (one().limit(&long, a_minute(5)), "…`: a name has at most 64 characters"),
        (one().limit("api", bucket("1/s", 1)), "two limits are called `api`; give each its own name"),
        (one().rule(Rule::blocked("api").unwrap()), "two limits are called `api`"),
        (one().policy(policy("api")), "two limits are called `api`"),
    ] {
        let error = builder.build().unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    assert!(
        one()
            .policy(policy("login"))
            .limit(&long[..64], a_minute(1))
            .limit("a_0.-", a_minute(1))
            .build()
            .is_ok()
    );
}

/// Overrides of every kind, and limits that watch, let everything pass, or nothing.
fn rules_in_code() -> [Rule; 5] {
    let key = |text| Key::parse(text).unwrap();
    [
        Rule::new("api", bucket("1/s", 2))
            .and_then(|rule| rule.with_override(key("user:42"), bucket("10/s", 4)))
            .and_then(|rule| rule.with_override(key("user:1"), Allowance::Unlimited))
            .and_then(|rule| rule.with_override(key("user:666"), Allowance::Blocked))
            .unwrap(),
        Rule::new("login", a_minute(1)).unwrap().shadow().fallback(Fallback::Closed),
        Rule::new("workers", at_once(1)).unwrap(),
        Rule::unlimited("health").unwrap().with_override(key("bot"), Allowance::Blocked).unwrap(),
        Rule::blocked("legacy").unwrap().with_override(key("bot"), Allowance::Unlimited).unwrap(),
    ]
}

#[test]
fn overrides_and_rules_without_a_limit_answer_as_they_are_set() {
    let hands = hands();
    let gate = gate(&hands, rules_in_code());
    for (limit, key, answers) in [
        ("api", "user:43", &["allowed, 1 of 2 left", "allowed, 0 of 2 left", "denied, retry after 1s"][..]),
        ("api", "user:42", &["allowed, 3 of 4 left", "allowed, 2 of 4 left"]),
        ("api", "user:1", &["allowed, unlimited", "allowed, unlimited"]),
        ("api", "user:666", &["denied, blocked", "denied, blocked"]),
        ("login", "a", &["allowed, 0 of 1 left", "allowed, shadow limit: would be denied, retry after 1m"]),
        ("workers", "a", &["denied, a concurrency limit needs a permit: use acquire"]),
        ("health", "a", &["allowed, unlimited"]),
        ("health", "bot", &["denied, blocked"]),
        ("legacy", "a", &["denied, blocked"]),
        ("legacy", "default:bot", &["allowed, unlimited"]),
    ] {
        let limiter = gate.local(limit).unwrap();
        for answer in answers {
            assert_eq!(limiter.check(key).to_string(), *answer, "{limit} {key}");
        }
    }
    assert_eq!(gate.local("api").unwrap().keys(), 2, "with or without an override");
    assert_eq!((gate.local("health").unwrap().keys(), gate.keys()), (0, 3));
}

#[test]
#[cfg(feature = "config")]
fn a_policy_from_a_file_is_the_policy_in_code() {
    let config = tollgate::config::Config::parse(
        r#"
        [limits.api]
        strategy = "token_bucket"
        rate = "1/s"
        burst = 2
        [limits.api.overrides]
        "user:42" = { rate = "10/s", burst = 4 }
        "user:1" = { unlimited = true }
        "user:666" = { blocked = true }

        [limits.login]
        strategy = "fixed_window"
        limit = 1
        window = "1m"
        shadow = true
        fallback = "closed"

        [limits.workers]
        strategy = "concurrency"
        limit = 1
        lease = "10s"

        [limits.health]
        unlimited = true
        overrides = { bot = { blocked = true } }

        [limits.legacy]
        blocked = true
        overrides = { bot = { unlimited = true } }
        "#,
    )
    .unwrap();
    let by_name = |policy: &Policy| {
        let mut rules = policy.rules().to_vec();
        rules.sort_by(|one, other| one.name().cmp(other.name()));
        rules
    };
    assert_eq!(by_name(&config.policy), by_name(&Policy::new(rules_in_code()).unwrap()));

    let hands = hands();
    let in_code = gate(&hands, rules_in_code());
    let from_file = on(&hands).policy(config.policy).build().unwrap();
    let mut dice = crate::scene::Dice(1);
    for _ in 0..2_000 {
        hands.advance(Duration::from_millis(dice.below(700)));
        let asks = [0; 2].map(|_| {
            let key =
                dice.pick(&["user:42", "user:1", "user:666", "user:7", "bot", "default:bot", "no:such:key:"]);
            Charge::new(dice.pick(&["api", "login", "workers", "health", "legacy"]), key)
                .cost(1 + dice.below(3))
        });
        assert_eq!(charged(&in_code, &asks), charged(&from_file, &asks), "{asks:?}");
    }
    assert_eq!(in_code.keys(), from_file.keys());
}

#[test]
fn what_is_printed_for_debugging_has_no_keys_in_it() {
    let hands = hands();
    let key = Key::parse("user:alice").unwrap();
    let rule = Rule::new("api", a_minute(5)).unwrap().with_override(key, Allowance::Blocked).unwrap();
    let gate = gate(&hands, [rule]);
    let api = gate.local("api").unwrap();
    let reservation = api.reserve("user:bob", 1).unwrap().unwrap();
    let permit = api.acquire("user:bob").unwrap();
    let printed = format!("{gate:?} {api:?} {reservation:?} {permit:?}");
    assert!(!printed.contains("alice") && !printed.contains("bob"), "{printed}");
    assert!(printed.contains("api"), "{printed}");
}

#[test]
fn a_registry_remembers_as_many_keys_as_it_is_told_to() {
    for (when_full, last) in
        [(WhenFull::Share, "allowed, 4 of 5 left"), (WhenFull::Deny, "denied, retry after 1s")]
    {
        let gate = on(&hands()).limit("api", a_minute(5)).max_keys(10).when_full(when_full).build().unwrap();
        let api = gate.local("api").unwrap();
        for user in 0..10 {
            assert!(api.check(format!("user:{user}")).is_allowed());
        }
        assert_eq!(api.check("user:10").to_string(), last);
        assert_eq!(gate.keys(), 10);
    }
}

#[test]
fn a_settlement_of_nothing_is_unknown() {
    let hands = hands();
    let gate = gate(&hands, rules_in_code());
    let stranger = tollgate::ChargeId::random();
    assert_eq!(ready(gate.settle(stranger, &Settlement::Cancel)).unwrap(), tollgate::Settled::Unknown);
}
