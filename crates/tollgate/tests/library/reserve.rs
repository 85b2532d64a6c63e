//! Charges that are not the last word: reserved, then settled, cancelled, renewed or forgotten; and permits.

use std::time::Duration;

use tollgate::{Allowance, Key, Limiter, Reservation, Rule, Settled, Settlement};

use crate::crowd::ready;
use crate::scene::{Only, a_minute, at_once, bucket, every_strategy, gate, hands, limiter, on, secs};

const MINUTE: Duration = Duration::from_secs(60);

fn reserve(limiter: &Limiter, key: &str, cost: u64) -> Reservation {
    limiter.reserve(key, cost).unwrap().expect("it fits")
}

#[test]
fn a_reservation_is_corrected_to_what_it_cost() {
    // 10 are there and 6 are reserved; what is left after settling, and how long a charge of one then waits.
    for (settle, settled, remaining, wait) in [
        (Some(6), Settled::Done, 4, 0),
        (Some(2), Settled::Done, 8, 0),
        (Some(0), Settled::Done, 10, 0),
        (Some(9), Settled::Done, 1, 0),
        (Some(13), Settled::Done, 0, 4),
        (None, Settled::Done, 10, 0),
    ] {
        let tokens = limiter(&hands(), bucket("1/s", 10));
        let reservation = reserve(&tokens, "a", 6);
        assert_eq!(tokens.status("a").remaining(), 4);
        let answer = match settle {
            Some(actual) => ready(reservation.settle(actual)),
            None => ready(reservation.cancel()),
        };
        assert_eq!(answer.unwrap(), settled, "{settle:?}");
        let after = tokens.status("a");
        assert_eq!((after.remaining(), after.retry_after()), (remaining, Some(secs(wait))), "{settle:?}");
        // A second time changes nothing and says so.
        for again in [
            ready(reservation.settle(3)),
            ready(reservation.cancel()),
            ready(reservation.renew()),
            ready(reservation.settle_each(&[3])),
        ] {
            assert_eq!(again.unwrap(), Settled::Already, "{settle:?}");
        }
        assert_eq!(tokens.status("a"), after);
    }
}

#[test]
fn under_every_strategy_a_cancelled_reservation_leaves_nothing_behind() {
    for limit in every_strategy(5) {
        let hands = hands();
        let limiter = limiter(&hands, limit);
        let first = reserve(&limiter, "a", 2);
        hands.advance(Duration::from_micros(7));
        let second = reserve(&limiter, "a", 3);
        assert!(limiter.reserve("a", 1).unwrap().is_err(), "{limit}: full");
        for reservation in [first, second] {
            assert_eq!(ready(reservation.cancel()).unwrap(), Settled::Done, "{limit}");
        }
        assert_eq!(limiter.status("a").remaining(), 5, "{limit}");
    }
}

#[test]
fn what_is_given_back_late_is_not_given_to_a_later_window() {
    let hands = hands();
    let tokens = limiter(&hands, a_minute(10));
    let reserved = tokens.reserve_all(&[tokens.of("a").cost(10)], 10 * MINUTE).unwrap();
    hands.advance(secs(60));
    assert_eq!(tokens.charge("a", 4).unwrap().remaining(), 6, "a new window");
    assert_eq!(ready(reserved.unwrap().cancel()).unwrap(), Settled::Done);
    assert_eq!(tokens.status("a").remaining(), 6);
}

#[test]
fn each_limit_of_a_reservation_is_settled_by_position_or_by_name() {
    let hands = hands();
    let gate = on(&hands)
        .limit("requests", a_minute(10))
        .limit("tokens", bucket("100/s", 1_000))
        .limit("workers", at_once(2))
        .build()
        .unwrap();
    let [requests, tokens, workers] = ["requests", "tokens", "workers"].map(|name| gate.local(name).unwrap());
    let reserve = || {
        let charges = [requests.of("gpt"), tokens.of("gpt").cost(600), workers.of("gpt")];
        tokens.reserve_all(&charges, MINUTE).unwrap().unwrap()
    };
    let remaining = || [&requests, &tokens, &workers].map(|limiter| limiter.status("gpt").remaining());

    let reservation = reserve();
    assert_eq!(reservation.decision().to_string(), "allowed by tokens, 400 of 1000 left");
    assert_eq!(remaining(), [9, 400, 1]);

    // What cannot be meant is refused, and the reservation stays as it is.
    let error = ready(reservation.settle(500)).unwrap_err();
    assert!(error.to_string().contains("give one for each limit"), "{error}");
    assert!(error.to_string().contains("requests 1, tokens 600"), "{error}");
    let error = ready(reservation.settle_each(&[1, 500])).unwrap_err();
    assert!(error.to_string().contains("has 3 charges, and 2 amounts were given"), "{error}");
    let by_name = |actuals: &[(&str, u64)]| {
        let actuals = actuals.iter().map(|(name, actual)| ((*name).to_owned(), *actual)).collect();
        ready(gate.settle(reservation.id(), &Settlement::Named(actuals)))
    };
    let error = by_name(&[("token", 500)]).unwrap_err();
    assert!(error.to_string().contains("holds nothing under the limit `token`"), "{error}");
    assert!(!error.is_transient());
    assert_eq!(remaining(), [9, 400, 1]);

    assert_eq!(by_name(&[("tokens", 250)]).unwrap(), Settled::Done);
    assert_eq!(remaining(), [9, 750, 2], "the request stays charged and the worker is free");

    // The next one does not fit the limit that has least, and then nothing is taken anywhere.
    let big = tokens.reserve_all(&[requests.of("gpt"), tokens.of("gpt").cost(751)], MINUTE).unwrap();
    assert!(big.is_err_and(|denied| !denied.decision().is_allowed()));
    assert_eq!(remaining(), [9, 750, 2]);

    let reservation = reserve();
    assert_eq!(ready(reservation.cancel()).unwrap(), Settled::Done);
    assert_eq!(remaining(), [9, 750, 2], "all of it is given back");

    // By position, in the order of the charges.
    let reservation = reserve();
    assert_eq!(ready(reservation.settle_each(&[2, 100, 0])).unwrap(), Settled::Done);
    assert_eq!(remaining(), [7, 650, 2]);
}

/// One limit with two keys was settled with the dearer amount for both.
#[test]
fn each_charge_is_settled_by_its_position() {
    let hands = hands();
    let rules = [Rule::new("tokens", a_minute(100)).unwrap(), Rule::unlimited("free").unwrap()];
    let gate = gate(&hands, rules);
    let (tokens, free) = (gate.local("tokens").unwrap(), gate.local("free").unwrap());
    let charges =
        [tokens.of("a").cost(30), free.of("a").cost(9), tokens.of("b").cost(30), tokens.of("a").cost(10)];
    let used = || (tokens.status("a").used(), tokens.status("b").used());
    let reservation = tokens.reserve_all(&charges, MINUTE).unwrap().unwrap();
    assert_eq!(used(), (40, 30));
    assert_eq!(ready(reservation.settle_each(&[5, 99, 50, 2])).unwrap(), Settled::Done);
    assert_eq!(used(), (7, 50));
    // By its id there is an amount for each charge that is counted.
    let reservation = tokens.reserve_all(&charges, MINUTE).unwrap().unwrap();
    let by_id = |amounts: &[u64]| ready(gate.settle(reservation.id(), &Settlement::Each(amounts.to_vec())));
    assert!(by_id(&[1; 4]).unwrap_err().to_string().contains("has 3 charges, and 4 amounts were given"));
    assert_eq!(by_id(&[1, 2, 3]).unwrap(), Settled::Done);
    assert_eq!(used(), (11, 52));
}

#[test]
fn limits_that_took_nothing_can_be_named_when_the_others_are_settled() {
    let hands = hands();
    let gate = gate(
        &hands,
        [
            Rule::new("tokens", a_minute(100)).unwrap(),
            Rule::unlimited("free").unwrap(),
            Rule::new("watching", a_minute(5)).unwrap().shadow(),
            Rule::blocked("watched-shut").unwrap().shadow(),
            Rule::new("mixed", a_minute(100))
                .and_then(|rule| rule.with_override(Key::parse("vip").unwrap(), Allowance::Unlimited))
                .unwrap(),
        ],
    );
    let all = ["tokens", "free", "watching", "watched-shut", "mixed"].map(|name| gate.local(name).unwrap());
    let [tokens, free, watching, shut, mixed] = &all;
    let charges = [
        tokens.of("a").cost(50),
        free.of("a").cost(50),
        watching.of("a").cost(50),
        shut.of("a").cost(50),
        mixed.of("a").cost(50),
        mixed.of("vip").cost(50),
    ];
    let reservation = tokens.reserve_all(&charges, MINUTE).unwrap().unwrap();
    assert_eq!(ready(reservation.settle_each(&[20; 6])).unwrap(), Settled::Done);
    assert_eq!(tokens.status("a").used(), 20);
    assert_eq!(mixed.status("a").used(), 20);
    assert_eq!(watching.status("a").used(), 0);
}

#[test]
fn a_reservation_that_took_nothing_anywhere_is_settled_like_any_other() {
    let hands = hands();
    let free = gate(&hands, [Rule::unlimited("free").unwrap()]).only();
    let watching = gate(&hands, [Rule::new("watching", a_minute(5)).unwrap().shadow()]).only();
    for limiter in [free, watching] {
        let reserve = || reserve(&limiter, "a", 6);
        for settled in [
            ready(reserve().settle(2)),
            ready(reserve().cancel()),
            ready(reserve().renew()),
            ready(reserve().settle_each(&[2])),
        ] {
            assert_eq!(settled.unwrap(), Settled::Done, "{limiter:?}");
        }
        let reservation = reserve();
        assert_eq!(ready(reservation.settle(2)).unwrap(), Settled::Done);
        assert_eq!(ready(reservation.settle(2)).unwrap(), Settled::Done, "there is never anything to settle");
    }
}

#[test]
fn a_forgotten_reservation_stays_charged_and_cannot_be_settled_late() {
    let hands = hands();
    let tokens = limiter(&hands, bucket("1/h", 10));
    for (ttl, after, settled, remaining) in [
        (5, secs(5).saturating_sub(Duration::from_micros(1)), Settled::Done, 10),
        (5, secs(5), Settled::Unknown, 4),
        (0, Duration::ZERO, Settled::Unknown, 4),
    ] {
        tokens.reset("a");
        let reserved = tokens.reserve_all(&[tokens.of("a").cost(6)], Duration::from_secs(ttl)).unwrap();
        hands.advance(after);
        assert_eq!(ready(reserved.unwrap().cancel()).unwrap(), settled);
        assert_eq!(tokens.status("a").remaining(), remaining);
    }
}

#[test]
fn dropping_a_reservation_settles_nothing() {
    let hands = hands();
    let gate = on(&hands).limit("tokens", bucket("1/h", 10)).build().unwrap();
    let tokens = gate.local("tokens").unwrap();
    let id = reserve(&tokens, "a", 6).id();
    assert_eq!(tokens.status("a").remaining(), 4);
    // Its name is enough to settle it, here or in another part of the program.
    assert_eq!(ready(gate.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
    assert_eq!(tokens.status("a").remaining(), 10);
}

#[test]
fn a_renewed_reservation_can_be_settled_for_as_long_again() {
    let hands = hands();
    let tokens = limiter(&hands, bucket("1/h", 10));
    let reservation = reserve(&tokens, "a", 6);
    for _ in 0..5 {
        hands.advance(secs(59));
        assert_eq!(ready(reservation.clone().renew()).unwrap(), Settled::Done);
    }
    hands.advance(secs(60));
    assert_eq!(ready(reservation.renew()).unwrap(), Settled::Unknown);
    assert_eq!(ready(reservation.settle(0)).unwrap(), Settled::Unknown);
}

#[test]
fn a_refused_reservation_is_none_and_says_why() {
    let hands = hands();
    let gate = gate(
        &hands,
        [
            Rule::new("tokens", a_minute(5)).unwrap(),
            Rule::blocked("shut").unwrap(),
            Rule::new("watching", a_minute(5)).unwrap().shadow(),
        ],
    );
    let [tokens, shut, watching] = ["tokens", "shut", "watching"].map(|name| gate.local(name).unwrap());
    let _ = reserve(&tokens, "full", 5);
    for (charges, words) in [
        (&[tokens.of("a").cost(6)][..], "denied by tokens, the cost is more than the limit ever holds"),
        (&[tokens.of("full")][..], "denied by tokens, retry after 1m"),
        (&[tokens.of("a"), shut.of("a")][..], "denied by shut, blocked"),
        (&[tokens.of("a"), watching.of("")][..], "denied by watching, the key is malformed"),
    ] {
        let denied = tokens.reserve_all(charges, MINUTE).unwrap().unwrap_err();
        assert_eq!(denied.to_string(), words);
        assert_eq!(tokens.status("a").used(), 0);
    }
}

#[test]
fn a_permit_is_given_back_when_it_is_dropped() {
    let hands = hands();
    let workers = limiter(&hands, at_once(2));
    let one = workers.acquire("pool").unwrap().unwrap();
    let two = workers.acquire("pool").unwrap().unwrap();
    assert_eq!((one.decision().binding().remaining(), two.decision().binding().remaining()), (1, 0));
    assert_eq!(workers.acquire("pool").unwrap().unwrap_err().to_string(), "denied by limit, retry after 10s");
    assert!(workers.acquire("other").unwrap().is_ok(), "and given back at once");
    drop(one);
    assert_eq!(workers.status("pool").remaining(), 1);
    let three = workers.acquire("pool").unwrap().unwrap();
    drop((two, three));
    assert_eq!((workers.status("pool").used(), workers.status("other").used()), (0, 0));
}

/// A process that was stopped for longer than its leases gave each place away again while its first holder was still at work.
#[test]
fn a_lease_does_not_end_while_its_permit_lives() {
    let hands = hands();
    let workers = limiter(&hands, at_once(2));
    let permits = [
        workers.acquire("pool").unwrap().unwrap(),
        ready(workers.acquire_within("pool", MINUTE)).unwrap().unwrap(),
    ];
    for _ in 0..5 {
        hands.advance(secs(1_000));
        let refusal = workers.acquire("pool").unwrap().unwrap_err();
        assert_eq!(
            refusal.retry_after(),
            Some(secs(10)),
            "it may be given back at any time; a lease is a fair guess"
        );
        assert!(permits.iter().all(|permit| !permit.is_lost()));
    }
    let [first, second] = permits;
    drop(first);
    assert_eq!(workers.status("pool").used(), 1);
    drop(second);
    assert_eq!(workers.status("pool").used(), 0);
}

/// It may have been reserved by another process: its lease ends unless it is renewed.
#[test]
fn a_reserved_lease_dies_by_itself_and_its_reservation_then_means_nothing() {
    let hands = hands();
    let workers = limiter(&hands, at_once(1));
    let reserve = || workers.reserve_all(&[workers.of("pool")], Duration::ZERO).unwrap().ok();
    let crashed = reserve().unwrap();
    hands.advance(secs(9));
    assert_eq!(ready(crashed.renew()).unwrap(), Settled::Done, "renewed in time, it lasts ten seconds more");
    hands.advance(secs(9));
    assert!(reserve().is_none());
    hands.advance(secs(1));
    let successor = reserve().expect("the lease has run out");
    assert_eq!(ready(crashed.renew()).unwrap(), Settled::Unknown);
    assert_eq!(ready(crashed.cancel()).unwrap(), Settled::Unknown);
    assert!(reserve().is_none(), "a reservation that has run out gives nobody else's lease back");
    assert_eq!(ready(successor.cancel()).unwrap(), Settled::Done);
    assert!(reserve().is_some());
}

#[test]
fn a_permit_outlived_by_a_reset_gives_nothing_back_and_says_that_it_is_lost() {
    let gate = on(&hands()).limit("workers", at_once(1)).build().unwrap();
    let workers = gate.only();
    let before = workers.acquire("pool").unwrap().unwrap();
    assert!(!before.is_lost());
    assert!(workers.reset("pool"));
    let after = workers.acquire("pool").unwrap().unwrap();
    for _ in 0..3 {
        assert!(before.is_lost());
    }
    assert!(!after.is_lost());
    assert_eq!(gate.store_health().leases_lost, 1, "counted once for each holder");
    drop(before);
    assert!(workers.acquire("pool").unwrap().is_err());
    drop(after);
    assert!(workers.acquire("pool").unwrap().is_ok());
}

#[test]
fn under_other_limits_a_permit_leaves_the_charge_as_it_is() {
    for limit in
        every_strategy(3).into_iter().filter(|limit| limit.strategy() != tollgate::Strategy::Concurrency)
    {
        let limiter = limiter(&hands(), limit);
        drop(limiter.acquire("a").unwrap().unwrap());
        assert_eq!(limiter.status("a").used(), 1, "{limit}");
        let permits = [limiter.acquire("a").unwrap(), limiter.acquire("a").unwrap()];
        assert!(permits.iter().all(Result::is_ok));
        assert!(limiter.acquire("a").unwrap().is_err(), "{limit}");
    }
}

#[test]
fn a_permit_refused_for_its_key_is_refused_even_by_a_limit_that_only_watches() {
    let hands = hands();
    for rule in
        [Rule::new("workers", at_once(1)).unwrap(), Rule::new("workers", at_once(1)).unwrap().shadow()]
    {
        let workers = gate(&hands, [rule]).only();
        for key in ["", "a:b:c:d", "a\n"] {
            let refusal = *workers.acquire(key).unwrap().unwrap_err().decision().binding();
            assert_eq!(refusal.reason(), tollgate::Reason::MalformedKey);
            assert_eq!(workers.peek(key, 1).unwrap(), refusal);
            assert_eq!(workers.check(key), refusal);
        }
    }
}

#[test]
fn a_watching_limit_gives_permits_to_all() {
    let hands = hands();
    let workers = gate(&hands, [Rule::new("workers", at_once(1)).unwrap().shadow()]).only();
    let permits: Vec<_> = (0..3).map(|_| workers.acquire("pool").unwrap().unwrap()).collect();
    assert!(permits.iter().all(|permit| permit.decision().is_allowed()));
    assert_eq!(workers.status("pool").used(), 1, "and counts those that fit");
    drop(permits);
    assert_eq!(workers.status("pool").used(), 0);
}

/// However many come and go, nothing is left of a permit that was given back, long before its lease would have ended.
#[test]
fn permits_that_were_given_back_take_no_room() {
    for limit in [at_once(1), bucket("1000000/s", 1_000_000)] {
        let gate = on(&hands()).limit("limit", limit).max_keys(10).build().unwrap();
        let limiter = gate.only();
        for round in 0..100 {
            assert!(limiter.acquire("pool").unwrap().is_ok(), "{limit}, round {round}");
        }
    }
}

#[test]
fn where_there_is_no_room_for_another_reservation_it_is_refused_for_now() {
    // A key, and one for each lease.
    for max_keys in [9, 10] {
        let gate = on(&hands()).limit("workers", at_once(100)).max_keys(max_keys).build().unwrap();
        let workers = gate.only();
        let permits: Vec<_> = (0..100).map_while(|_| workers.acquire("pool").unwrap().ok()).collect();
        assert_eq!(permits.len(), max_keys - 1);
        let refusal = workers.acquire("pool").unwrap().unwrap_err();
        assert!(refusal.retry_after().is_some(), "{refusal}");
        drop(permits);
        assert!(workers.acquire("pool").unwrap().is_ok());
    }

    // Few keys, and a megabyte of reservations, of which the first key has half and the next one half of the rest.
    let gate = on(&hands()).limit("tokens", a_minute(100_000)).max_keys(3).build().unwrap();
    let tokens = gate.only();
    for (key, expected) in [("a", 500..2_000), ("b", 250..1_000)] {
        let made = (0..10_000).map_while(|_| tokens.reserve(key, 1).ok()).count();
        assert!(expected.contains(&made), "{key}: {made}");
        let error = tokens.reserve(key, 1).unwrap_err();
        assert!(error.is_transient() && error.to_string().contains("reservation"), "{error}");
        let used = usize::try_from(tokens.status(key).used()).unwrap();
        assert_eq!(used, made, "nothing is charged that could not be remembered");
    }
    assert!(tokens.check("c").is_allowed(), "keys have room of their own");
}
