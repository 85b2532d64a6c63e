//! What the library promises on every store, line by line: the keys that are taken, and the reasons that are given.

use std::error::Error as StdError;
use std::net::IpAddr;
use std::time::Duration;

use tollgate::{
    Allowance, Charge, ChargeId, Decision, Fallback, Key, KeyRef, Limit, Outcome, Reason, Rule, Settled,
    Tollgate,
};
use tollgate_testkit::redis::RedisServer;

use crate::On;

type Done = Result<(), Box<dyn StdError>>;

const MINUTE: Duration = Duration::from_secs(60);

/// Keys are taken as text, owned or not, as integers, as addresses and parsed; spellings of one key are one key.
#[tokio::test]
async fn keys_of_every_kind() -> Done {
    let address: IpAddr = "2001:db8::1".parse()?;
    for on in On::all() {
        let gate = on.connect(Tollgate::builder().limit("api", Limit::fixed_window(9, MINUTE)?)).await?;
        let owned = String::from("user:42");
        let parsed = Key::parse("user:42")?;
        let spellings: [(&str, Vec<KeyRef<'_>>); 3] = [
            ("text", vec!["user:42".into(), (&owned).into(), owned.clone().into(), (&parsed).into()]),
            ("integers", vec![7_u64.into(), 7_u32.into(), 7_i32.into(), 7_usize.into(), "7".into()]),
            ("addresses", vec![address.into(), "ip:2001%3Adb8%3A%3A1".into()]),
        ];
        for (kind, keys) in spellings {
            let count = keys.len() as u64;
            let last = keys.last().cloned().ok_or("a key")?;
            for key in keys {
                assert!(gate.check("api", key).await?.is_allowed(), "{} {kind}", on.name());
            }
            assert_eq!(gate.status("api", last.clone()).await?.used(), count, "{} {kind}", on.name());
            assert!(gate.reset("api", last.clone()).await?, "{} {kind}", on.name());
            assert_eq!(gate.status("api", last.clone()).await?.used(), 0, "{} {kind}", on.name());
            assert!(!gate.reset("api", last).await?, "{} {kind}: there is nothing more", on.name());
        }
    }
    Ok(())
}

/// An id is of one charge: with another key, cost or limit it is an error, and charges nothing.
#[tokio::test]
async fn an_id_passes_no_other_charge() -> Done {
    for on in On::all() {
        let builder = Tollgate::builder().limit("orders", Limit::fixed_window(9, MINUTE)?);
        let gate = on.connect(builder.limit("bytes", Limit::token_bucket("1/h", 100)?)).await?;
        let id = ChargeId::random();
        let first = [Charge::new("orders", "a"), Charge::new("bytes", "a").cost(10)];
        let answer = gate.charge(&first).id(id).await?;
        assert!(answer.is_allowed(), "{}", on.name());
        assert_eq!(gate.charge(&first).id(id).await?, answer, "{}", on.name());
        for others in [
            vec![Charge::new("orders", "a")],
            vec![Charge::new("orders", "a"), Charge::new("bytes", "a").cost(11)],
            vec![Charge::new("orders", "b"), Charge::new("bytes", "a").cost(10)],
            vec![Charge::new("bytes", "a").cost(10), Charge::new("orders", "a")],
        ] {
            let error = gate.charge(&others).id(id).await.map(drop).unwrap_err();
            assert!(error.to_string().contains("belongs to another charge"), "{}: {error}", on.name());
        }
        assert_eq!(gate.status("orders", "a").await?.used(), 1, "{}", on.name());
        assert_eq!(gate.status("orders", "b").await?.used(), 0, "{}", on.name());
        assert_eq!(gate.status("bytes", "a").await?.used(), 10, "{}", on.name());
    }
    Ok(())
}

/// Every refusal says why.
#[tokio::test]
async fn reasons_of_every_kind() -> Done {
    for on in On::all() {
        let builder = Tollgate::builder()
            .limit("api", Limit::fixed_window(2, MINUTE)?)
            .rule(Rule::blocked("shut")?)
            .rule(Rule::new("tried", Limit::fixed_window(1, MINUTE)?)?.shadow())
            .rule(
                Rule::new("mixed", Limit::fixed_window(2, MINUTE)?)?
                    .with_override(Key::parse("bad")?, Allowance::Blocked)?,
            )
            .limit("workers", Limit::concurrency(1, MINUTE)?);
        let gate = on.connect(builder).await?;
        let charge = async |limit: &str, key: &str, cost: u64| -> Result<Decision, tollgate::Error> {
            gate.charge(&[Charge::new(limit, key).cost(cost)]).await
        };
        let reason = |decision: &Decision| (decision.is_allowed(), decision.binding().reason().name());
        assert!(charge("api", "a", 2).await?.is_allowed());
        for (limit, key, cost, expected) in [
            ("api", "a", 1, (false, "limit")),
            ("api", "a", 3, (false, "too_large")),
            ("api", "", 1, (false, "malformed_key")),
            ("api", "a:b:c:d", 1, (false, "malformed_key")),
            ("shut", "a", 1, (false, "blocked")),
            ("mixed", "bad", 1, (false, "blocked")),
            ("tried", "a", 2, (true, "shadow")),
        ] {
            let decision = charge(limit, key, cost).await?;
            assert_eq!(reason(&decision), expected, "{}: {limit} {key} {cost}", on.name());
        }
        // A plain check of a concurrency limit is refused, with the call to use instead, and takes nothing.
        let error = charge("workers", "a", 1).await.map(drop).expect_err("nothing would be held");
        assert!(error.to_string().contains("acquire") && !error.is_transient(), "{}: {error}", on.name());
        assert!(gate.acquire("workers", "a").await?.is_ok());
        if let Ok(workers) = gate.local("workers") {
            assert_eq!(workers.check("b").reason(), Reason::NeedsPermit);
            assert_eq!(Reason::NeedsPermit.name(), "needs_permit");
        }
    }
    Ok(())
}

/// What is answered while the store is down says so, denied or allowed.
#[tokio::test]
async fn a_fallback_is_a_reason() -> Done {
    let server = RedisServer::start();
    let builder = Tollgate::builder()
        .rule(Rule::new("closed", Limit::fixed_window(2, MINUTE)?)?.fallback(Fallback::Closed))
        .rule(Rule::new("open", Limit::fixed_window(2, MINUTE)?)?.fallback(Fallback::Open));
    let gate = builder.redis(format!("redis://127.0.0.1:{}", server.port())).connect().await?;
    assert!(gate.check("closed", "a").await?.is_allowed());
    drop(server);
    let denied = gate.check("closed", "b").await?;
    assert_eq!((denied.is_allowed(), denied.binding().reason().name()), (false, "fallback"));
    assert!(denied.is_degraded());
    let allowed = gate.check("open", "b").await?;
    assert_eq!((allowed.is_allowed(), allowed.binding().reason().name()), (true, "fallback"));
    Ok(())
}

/// The same limit with two keys, settled each with its own amount.
#[tokio::test]
async fn each_charge_is_settled_by_its_position() -> Done {
    for on in On::all() {
        let gate =
            on.connect(Tollgate::builder().limit("tokens", Limit::sliding_window(1_000, MINUTE)?)).await?;
        let charges = [
            Charge::new("tokens", "one").cost(100),
            Charge::new("tokens", "two").cost(100),
            Charge::new("tokens", "one").cost(50),
        ];
        let reservation = gate.reserve(&charges, MINUTE).await??;
        assert!(reservation.settle_each(&[1, 2]).await.is_err(), "{}: three charges", on.name());
        assert_eq!(reservation.settle_each(&[10, 300, 5]).await?, Settled::Done);
        let used = [gate.status("tokens", "one").await?.used(), gate.status("tokens", "two").await?.used()];
        assert_eq!(used, [15, 300], "{}", on.name());
        assert_eq!(reservation.settle_each(&[0, 0, 0]).await?, Settled::Already);
    }
    Ok(())
}

/// Outcomes of one call, in the order of its charges.
#[tokio::test]
async fn outcomes_are_in_the_order_of_the_charges() -> Done {
    for on in On::all() {
        let builder = Tollgate::builder()
            .limit("wide", Limit::token_bucket("100/m", 100)?)
            .limit("narrow", Limit::token_bucket("1/m", 1)?);
        let gate = on.connect(builder).await?;
        let charges = [Charge::new("wide", "a"), Charge::new("narrow", "a")];
        let decision = gate.charge(&charges).await?;
        let names = |decision: &Decision| decision.outcomes().iter().map(Outcome::limit).collect::<Vec<_>>();
        assert_eq!(names(&decision), ["wide", "narrow"], "{}", on.name());
        assert_eq!(decision.binding().limit(), "narrow", "{}: the smallest share is left there", on.name());
        let denied = gate.charge(&charges).await?;
        assert_eq!((names(&denied), denied.binding().limit()), (vec!["wide", "narrow"], "narrow"));
    }
    Ok(())
}
