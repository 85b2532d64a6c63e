//! What a refusal promises, and what reports of a provider change, on a clock that is moved by hand.

use std::time::Duration;

use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{ManualClock, Tollgate};
use tollgate_llm::{
    Admission, Api, Caller, Counts, LlmSection, ModelLimits, ModelRequest, Refusal, ReportedLeft, Usage,
};

struct World {
    hands: ManualClock,
    gate: Tollgate,
    limits: ModelLimits,
}

impl World {
    fn of(model: &str) -> World {
        let text = format!(
            "[llm]\nmargin = '0s'\n[llm.models.gpt-4o]\n{model}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n\
             keys = [{{ key = 'a', group = 'one' }}, {{ key = 'b', group = 'two' }}]\n"
        );
        let mut llm = LlmSection::default();
        let config = Config::parse_with(&text, [], &mut [&mut llm]);
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
        let limits = ModelLimits::with_clock(gate.clone(), llm.config.expect("a section"), hands.clock());
        World { hands, gate, limits }
    }

    async fn admit(&self, tokens: u64) -> Result<Admission, Refusal> {
        let cap = tokens - 8;
        let body = format!(
            r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap}}}"#
        );
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        self.limits.admit(&request, &Caller::default(), Some(Duration::ZERO)).await
    }

    async fn left(&self, limit: &str, group: &str) -> u64 {
        let key = format!("llm:{group}");
        self.gate.status(limit, key.as_str()).await.expect("a status").remaining()
    }
}

/// A small generator: the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test]
async fn d5_a_retry_at_the_advertised_millisecond_succeeds_and_20_ms_earlier_it_does_not() {
    let world = World::of("rpm = 12\ntpm = 4000\nrpd = 100000\ntpd = 100000000");
    let mut numbers = Numbers(13);
    let mut refusals = 0;
    while refusals < 1_000 {
        let tokens = 10 + numbers.below(1_500);
        match world.admit(tokens).await {
            Ok(admission) => {
                let output = numbers.below(tokens - 8);
                admission.settle(Usage { input: 8, cached: 0, output }).await.expect("settled");
                world.hands.advance(Micros::from_millis(numbers.below(900)));
            }
            Err(refusal) => {
                refusals += 1;
                let wait = refusal.retry_after.expect("it fits later");
                assert!(wait <= Duration::from_secs(60), "{refusal}: {wait:?}");
                assert!(!refusal.standing.is_empty());
                let ms = u64::try_from(wait.as_micros().div_ceil(1_000)).expect("a wait");
                if ms > 20 {
                    world.hands.advance(Micros::from_millis(ms - 20));
                    assert!(world.admit(tokens).await.is_err(), "{refusal}: 20 ms before {ms}");
                    world.hands.advance(Micros::from_millis(20));
                } else {
                    world.hands.advance(Micros::from_millis(ms));
                }
                let admission = world.admit(tokens).await;
                let admission = admission.unwrap_or_else(|again| panic!("{refusal}, then {again}"));
                admission.settle(Usage { input: 8, cached: 0, output: tokens - 8 }).await.expect("settled");
            }
        }
    }
}

fn report(counts: Counts, remaining: u64, reset_s: u64, rounding: u64) -> ReportedLeft {
    ReportedLeft { counts, remaining, reset: Some(Duration::from_secs(reset_s)), rounding }
}

#[tokio::test]
async fn e1_a_group_with_nothing_left_is_parked_until_its_reset_and_a_window_at_most() {
    for (reset, parked) in [(2, 2), (7_200, 60)] {
        let world = World::of("rpm = 10");
        let admission = world.admit(100).await.expect("room");
        let group = admission.group().expect("a group").to_owned();
        admission.reported(&[report(Counts::Requests, 0, reset, 0)]).await.expect("taken in");
        let found = world.limits.parked();
        assert_eq!((found.len(), &found[0].group, found[0].quota.as_str()), (1, &group, "gpt-4o"));
        assert_eq!(found[0].left, Duration::from_secs(parked));
        for _ in 0..9 {
            let admission = world.admit(100).await.expect("the other group");
            assert_ne!(admission.group(), Some(group.as_str()));
        }
        world.hands.advance(Micros::from_secs(parked));
        assert!(world.limits.parked().is_empty() && world.admit(100).await.is_ok());
    }
}

#[tokio::test]
async fn e4_reports_only_ever_lower_what_is_left() {
    let world = World::of("rpm = 10\ntpm = 10000");
    let admission = world.admit(1_000).await.expect("room");
    let group = admission.group().expect("a group").to_owned();
    let lefts =
        async || (world.left("llm.gpt-4o.rpm", &group).await, world.left("llm.gpt-4o.tpm", &group).await);
    assert_eq!(lefts().await, (9, 9_000));
    for (reports, expected) in [
        (vec![report(Counts::Requests, 500, 1, 0), report(Counts::Tokens, 1_000_000, 1, 0)], (9, 9_000)),
        (vec![report(Counts::Tokens, 8_500, 1, 500)], (9, 9_000)),
        (vec![report(Counts::OutputTokens, 1, 1, 0), report(Counts::Concurrency, 0, 1, 0)], (9, 9_000)),
        // What others have used, and an eighth more.
        (vec![report(Counts::Tokens, 8_900, 1, 0)], (9, 8_887)),
        (vec![report(Counts::Tokens, 8_900, 1, 0)], (9, 8_887)),
        (vec![report(Counts::Requests, 8, 1, 0)], (7, 8_887)),
        (vec![report(Counts::Tokens, 100, 1, 0)], (7, 0)),
    ] {
        admission.reported(&reports).await.expect("taken in");
        assert_eq!(lefts().await, expected, "{reports:?}");
    }
    world.hands.advance(Micros::from_secs(60));
    assert_eq!(lefts().await, (10, 10_000), "what others used leaves the window too");
}

#[tokio::test]
async fn e2_others_are_expected_to_go_on_until_reports_say_that_they_stopped() {
    let world = World::of("rpm = 40");
    world.limits.park("gpt-4o", "two", Duration::from_secs(3_600), "parked");
    let left = async || world.left("llm.gpt-4o.rpm", "one").await;
    let admission = world.admit(100).await.expect("room");
    admission.reported(&[report(Counts::Requests, 23, 60, 0)]).await.expect("taken in");
    assert_eq!(left().await, 39 - 16 - 2, "others have used sixteen");
    world.hands.advance(Micros::from_secs(60));
    assert_eq!(left().await, 40);
    let admission = world.admit(100).await.expect("room");
    assert_eq!(left().await, 39 - 16, "charged again before the next call");
    // They have stopped: what is charged for them stays for its window, and no longer.
    admission.reported(&[report(Counts::Requests, 39, 60, 0)]).await.expect("taken in");
    assert_eq!(left().await, 39 - 16);
    world.hands.advance(Micros::from_secs(60));
    assert!(world.admit(100).await.is_ok());
    assert_eq!(left().await, 39);
    world.hands.advance(Micros::from_secs(60));
    assert!(world.admit(100).await.is_ok());
    assert_eq!(left().await, 39);
}

#[tokio::test]
async fn f1_a_refusal_of_all_groups_says_when_the_first_returns() {
    let world = World::of("rpm = 10");
    world.limits.park("gpt-4o", "one", Duration::from_secs(9), "parked");
    assert!(world.limits.has_free_group("gpt-4o", &[]));
    world.limits.park("gpt-4o", "two", Duration::from_secs(4), "parked");
    assert!(!world.limits.has_free_group("gpt-4o", &[]));
    let refusal = world.admit(100).await.expect_err("both are parked");
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(4)), "{refusal}");
    assert!(!refusal.standing.is_empty(), "it says how the limits stand");
    world.hands.advance(Micros::from_secs(4));
    assert_eq!(world.admit(100).await.expect("room").group(), Some("two"));
}
