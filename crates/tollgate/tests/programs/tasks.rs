//! The programs of one task each.

use std::error::Error as StdError;
use std::time::Duration;

use tollgate::{
    Charge, ChargeId, Limit, Limiter, ManualClock, Outcome, Reason, Settled, Settlement, Tollgate,
};

use crate::On;

type Done = Result<(), Box<dyn StdError>>;

const MINUTE: Duration = Duration::from_secs(60);

/// One limit in this process, without async.
#[test]
fn hello() -> Done {
    let limiter = Limiter::new(Limit::token_bucket("10/s", 2)?);
    let outcomes = [(); 3].map(|()| limiter.check("user:42"));
    assert_eq!(outcomes.map(|outcome| outcome.is_allowed()), [true, true, false]);
    assert!(outcomes[2].retry_after().is_some_and(|wait| wait <= Duration::from_millis(100)));
    assert_eq!(outcomes[2].reason().name(), "limit");
    assert!(limiter.check(7_u64).is_allowed());
    Ok(())
}

/// Several limits, all or none.
#[tokio::test]
async fn several_limits() -> Done {
    for on in On::all() {
        let builder = Tollgate::builder()
            .limit("global", Limit::token_bucket("100/m", 2000)?)
            .limit("per-user", Limit::sliding_window(3, MINUTE)?);
        let gate = on.connect(builder).await?;
        let charges = [Charge::new("global", "all"), Charge::new("per-user", "user:42").cost(3)];
        assert!(gate.charge(&charges).await?.is_allowed());
        let denied = gate.charge(&charges).await?;
        assert_eq!((denied.binding().limit(), denied.binding().reason()), ("per-user", Reason::Limit));
        assert!(denied.to_string().starts_with("denied by per-user, retry after"), "{denied}");
        assert_eq!(
            gate.status("global", "all").await?.used(),
            1,
            "{}: the refused charge took nothing",
            on.name()
        );
        assert!(gate.peek(&charges[..1]).await?.is_allowed());
    }
    Ok(())
}

/// Many, each by itself.
#[tokio::test]
async fn each_by_itself() -> Done {
    for on in On::all() {
        let gate = on.connect(Tollgate::builder().limit("api", Limit::fixed_window(2, MINUTE)?)).await?;
        let charges = ["a", "b", "a", "a", "default:b", ""].map(|key| Charge::new("api", key));
        let outcomes = gate.charge_each(&charges).await?.into_iter().collect::<Result<Vec<Outcome>, _>>()?;
        let allowed: Vec<bool> = outcomes.iter().map(Outcome::is_allowed).collect();
        assert_eq!(allowed, [true, true, true, false, true, false], "{}", on.name());
        assert_eq!(outcomes[5].reason(), Reason::MalformedKey);
        // What is wrong with one is no other's error.
        let on_c = |limit| Charge::new(limit, "c");
        let some_wrong = [on_c("api"), on_c("no-such"), on_c("api"), on_c("api").cost(0), on_c("api")];
        let outcomes = gate.charge_each(&some_wrong).await?;
        let allowed = outcomes.iter().map(|outcome| outcome.as_ref().ok().map(Outcome::is_allowed));
        let expected = [Some(true), None, Some(true), None, Some(false)];
        assert_eq!(allowed.collect::<Vec<_>>(), expected, "{}", on.name());
    }
    Ok(())
}

/// An estimate, corrected afterwards.
#[tokio::test]
async fn reserve_and_settle() -> Done {
    for on in On::all() {
        let gate =
            on.connect(Tollgate::builder().limit("tokens", Limit::sliding_window(1_000, MINUTE)?)).await?;
        let charges = [Charge::new("tokens", "model:gpt").cost(600)];
        let reservation = gate.reserve(&charges, MINUTE).await??;
        assert_eq!(gate.status("tokens", "model:gpt").await?.remaining(), 400);
        assert_eq!(reservation.renew().await?, Settled::Done);
        assert_eq!(reservation.settle(250).await?, Settled::Done);
        assert_eq!(reservation.settle(1).await?, Settled::Already);
        assert_eq!(gate.status("tokens", "model:gpt").await?.remaining(), 750, "{}", on.name());
        let too_large = [Charge::new("tokens", "model:gpt").cost(5_000)];
        let denied = gate.reserve(&too_large, MINUTE).await?.unwrap_err();
        assert_eq!((denied.retry_after(), denied.decision().binding().reason()), (None, Reason::TooLarge));
        // By position, and given back as a whole.
        let pair = [Charge::new("tokens", "a").cost(5), Charge::new("tokens", "b").cost(5)];
        gate.reserve(&pair, MINUTE).await??.cancel().await?;
        assert_eq!(gate.status("tokens", "a").await?.used(), 0, "{}", on.name());
    }
    Ok(())
}

/// Waiting for two limits with a deadline.
#[tokio::test]
async fn wait() -> Done {
    for on in On::all() {
        let builder = Tollgate::builder()
            .limit("second", Limit::token_bucket("20/s", 2)?)
            .limit("minute", Limit::sliding_window(50, MINUTE)?);
        let gate = on.connect(builder).await?;
        let charges = [Charge::new("second", "api"), Charge::new("minute", "api")];
        for _ in 0..4 {
            assert!(gate.wait(&charges, Duration::from_secs(10)).await?.is_allowed(), "{}", on.name());
        }
        assert_eq!(gate.status("minute", "api").await?.used(), 4);
        let never = gate.wait(&[Charge::new("second", "api").cost(3)], MINUTE).await?;
        assert_eq!((never.is_allowed(), never.retry_after()), (false, None));
        let all = [Charge::new("minute", "api").cost(46)];
        assert!(gate.reserve_within(&all, MINUTE, MINUTE).await?.is_ok());
        let late = gate.wait(&all[..1], Duration::ZERO).await?;
        assert!(!late.is_allowed() && late.retry_after().is_some(), "{late}");
        assert!(gate.reserve_within(&all, MINUTE, Duration::from_millis(10)).await?.is_err());
    }
    Ok(())
}

/// A test with a clock that is moved by hand.
#[test]
fn fake_clock() -> Done {
    let clock = ManualClock::new();
    let gate =
        Tollgate::builder().limit("api", Limit::token_bucket("2/s", 1)?).clock(clock.clock()).build()?;
    let api = gate.local("api")?;
    assert!(api.check("user:42").is_allowed());
    assert_eq!(api.check("user:42").retry_after(), Some(Duration::from_millis(500)));
    clock.advance(Duration::from_millis(499));
    assert!(!api.check("user:42").is_allowed());
    clock.advance(Duration::from_millis(1));
    assert!(api.check("user:42").is_allowed());
    Ok(())
}

/// A charge with an id of the caller's, sent twice, is charged once.
#[tokio::test]
async fn idempotent() -> Done {
    for on in On::all() {
        let gate =
            on.connect(Tollgate::builder().limit("e-mails", Limit::fixed_window(5, 60 * MINUTE)?)).await?;
        let order_id = ChargeId::from(0x1234_u128); // an order's UUID
        let charges = [Charge::new("e-mails", "customer:7").cost(3)];
        let first = gate.charge(&charges).id(order_id).await?;
        let again = gate.charge(&charges).id(order_id).await?; // after a crash, or a lost answer
        assert!(first.is_allowed() && again.is_allowed());
        assert_eq!(gate.status("e-mails", "customer:7").await?.used(), 3, "{}", on.name());
        assert!(!gate.charge(&charges).id(ChargeId::from(9_u128)).await?.is_allowed());
        // The caller that chose the id may cancel by it; it stays cancelled.
        assert_eq!(gate.settle(order_id, &Settlement::Cancel).await?, Settled::Done);
        assert_eq!(gate.status("e-mails", "customer:7").await?.used(), 0, "{}", on.name());
        let _ = gate.charge(&charges).id(order_id).await?;
        assert_eq!(gate.status("e-mails", "customer:7").await?.used(), 0, "{}", on.name());
        // A call that is never polled charges nothing.
        drop(gate.check("e-mails", "customer:8"));
        assert_eq!(gate.status("e-mails", "customer:8").await?.used(), 0);
    }
    Ok(())
}

/// Numbers from the application's database, and a limit looked up once.
#[tokio::test]
async fn numbers_with_the_call() -> Done {
    for on in On::all() {
        let gate = on.connect(Tollgate::builder().limit("api", Limit::fixed_window(9, MINUTE)?)).await?;
        let api = gate.limit("api")?;
        assert!(gate.check(&api, "user:1").await?.is_allowed());
        let small = gate.ad_hoc("plan", Limit::token_bucket("1/h", 2)?)?;
        assert!(
            gate.charge(&[Charge::new(&small, "user:1").cost(2), Charge::new(&api, "user:1")])
                .await?
                .is_allowed()
        );
        assert!(!gate.check(&small, "user:1").await?.is_allowed());
        let large = gate.ad_hoc("plan", Limit::token_bucket("1/h", 5)?)?;
        assert_eq!(gate.check(&large, "user:1").await?.binding().remaining(), 2, "{}", on.name());
        assert_eq!(gate.status("api", "user:1").await?.used(), 2);
    }
    Ok(())
}

/// Another policy over the same counters.
#[tokio::test]
async fn reload() -> Done {
    for on in On::all() {
        let gate = on.connect(Tollgate::builder().limit("login", Limit::fixed_window(5, MINUTE)?)).await?;
        let login = gate.limit("login")?;
        assert!(gate.charge(&[Charge::new(&login, "user:42").cost(4)]).await?.is_allowed());
        let policy = tollgate::Policy::new([tollgate::Rule::new("login", Limit::fixed_window(9, MINUTE)?)?])?;
        gate.reload(policy)?;
        assert_eq!(gate.status("login", "user:42").await?.remaining(), 5, "{}", on.name());
        assert_eq!(gate.check(&login, "user:42").await?.binding().capacity(), 9);
    }
    Ok(())
}
