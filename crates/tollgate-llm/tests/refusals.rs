//! What a refusal promises, and what reports of a provider change, on a clock that is moved by hand.

use std::collections::VecDeque;
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
        World::with("margin = '0s'", model)
    }

    fn with(settings: &str, model: &str) -> World {
        let text = format!(
            "[llm]\n{settings}\n[llm.models.gpt-4o]\n{model}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n\
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
    ReportedLeft { counts, limit: None, remaining, reset: Some(Duration::from_secs(reset_s)), rounding }
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
        // What others have used, and twice what they use beside one of our calls, and one.
        (vec![report(Counts::Tokens, 8_900, 1, 0)], (9, 8_699)),
        (vec![report(Counts::Tokens, 8_900, 1, 0)], (9, 8_699)),
        (vec![report(Counts::Requests, 8, 1, 0)], (7, 8_699)),
        (vec![report(Counts::Tokens, 100, 1, 0)], (7, 0)),
    ] {
        admission.reported(&reports).await.expect("taken in");
        assert_eq!(lefts().await, expected, "{reports:?}");
    }
    world.hands.advance(Micros::from_secs(60));
    assert_eq!(lefts().await, (10, 10_000), "what others used leaves the window too");
}

/// Anthropic reports as `tokens` what is left of its strictest limit, mostly that of output: that is none of what others have used of ours.
#[tokio::test]
async fn e4_the_tokens_of_anthropic_count_only_where_they_are_of_our_limit() {
    let text = "llm.margin = '0s'\n[llm.models.claude-x]\ntpm = 10000\n[llm.upstreams.up]\nkind = 'anthropic'\n\
                base_url = 'http://localhost'\napi_key = 'x'\n";
    let mut llm = LlmSection::default();
    let config =
        Config::parse_with(text, [], &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
    let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
    let limits = ModelLimits::with_clock(gate.clone(), llm.config.expect("a section"), hands.clock());
    let body = r#"{"model":"claude-x","max_tokens":100,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = ModelRequest::read(Api::Messages, body.as_bytes()).expect("a request");
    let admission = limits.admit(&request, &Caller::default(), None).await.expect("room");
    let left = async || gate.status("llm.claude-x.tpm", "llm:up").await.expect("a status").remaining();
    let before = left().await;
    for (limit, remaining) in [(Some(2_000), 0), (None, 1_000), (Some(2_000), 1_000)] {
        let report = ReportedLeft { limit, ..report(Counts::Tokens, remaining, 60, 500) };
        admission.reported(&[report]).await.expect("taken in");
        assert_eq!((left().await, limits.parked().len()), (before, 0), "{report:?}");
    }
    let report = ReportedLeft { limit: Some(10_000), ..report(Counts::Tokens, 5_000, 60, 500) };
    admission.reported(&[report]).await.expect("taken in");
    assert!(left().await < 5_501, "{}", left().await);
}

#[tokio::test]
async fn e2_others_are_expected_to_go_on_until_reports_say_that_they_stopped() {
    let world = World::of("rpm = 40");
    world.limits.park("gpt-4o", "two", Duration::from_secs(3_600), "parked");
    let left = async || world.left("llm.gpt-4o.rpm", "one").await;
    let admission = world.admit(100).await.expect("room");
    admission.reported(&[report(Counts::Requests, 23, 60, 0)]).await.expect("taken in");
    assert_eq!(left().await, 39 - 16 - 4, "others have used sixteen, and a tenth of the limit is headroom");
    world.hands.advance(Micros::from_secs(60));
    assert_eq!(left().await, 40);
    let admission = world.admit(100).await.expect("room");
    assert_eq!(left().await, 39 - 16 - 4, "charged again before the next call");
    // They have stopped: what is charged for them stays for its window, and no longer.
    admission.reported(&[report(Counts::Requests, 39, 60, 0)]).await.expect("taken in");
    assert_eq!(left().await, 39 - 16 - 4);
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

/// A provider with an exact window, which another client uses too.
struct Shared {
    arrived: VecDeque<Micros>,
    limit: usize,
}

impl Shared {
    const WINDOW: Micros = Micros::from_secs(60);

    /// What is left with this arrival; none if it is refused, which counts as well.
    fn arrives(&mut self, now: Micros) -> Option<u64> {
        while self.arrived.front().is_some_and(|at| now >= at.saturating_add(Shared::WINDOW)) {
            self.arrived.pop_front();
        }
        self.arrived.push_back(now);
        u64::try_from(self.limit.checked_sub(self.arrived.len())?).ok()
    }
}

/// How another client spends half of the quota.
#[derive(Clone, Copy, Debug)]
enum Spends {
    Evenly,
    AtRandom,
    /// All of it at once, every window.
    AtOnce,
    /// Evenly in every other stretch of three windows.
    OnAndOff,
}

/// Our own calls.
#[derive(Clone, Copy, Debug)]
struct Callers {
    /// How many ask for room in a step of 50 ms.
    a_step: usize,
    /// How many have a call on its way at most.
    most: usize,
    /// How many steps an answer takes at most.
    longest_answer: u64,
}

/// What came of the calls from some window on.
#[derive(Debug, Default)]
struct Counted {
    sent: u64,
    refused: u64,
    foreign: u64,
}

const LIMIT: u64 = 200;
const WINDOWS: u64 = 12;

/// Somebody else spends half of the provider's quota, and we take all that we can.
async fn beside_others(spends: Spends, callers: Callers, from: u64) -> Counted {
    const STEP_MS: u64 = 50;
    let world = World::with("", &format!("rpm = {LIMIT}"));
    world.limits.park("gpt-4o", "two", Duration::from_secs(3_600), "parked");
    let mut provider = Shared { arrived: VecDeque::new(), limit: 200 };
    let mut numbers = Numbers(7);
    let mut counted = Counted::default();
    // A call is on its way for up to two steps, and so is its answer, or longer.
    let mut on_their_way: Vec<(u64, Admission)> = Vec::new();
    let mut answers: Vec<(u64, Option<u64>, Admission)> = Vec::new();
    for step in 0..WINDOWS * 60_000 / STEP_MS {
        let now = world.hands.clock().now();
        let (window, of_window) = (step * STEP_MS / 60_000, step * STEP_MS % 60_000);
        let a_call = 60_000 / (LIMIT / 2);
        let theirs = match spends {
            Spends::Evenly => u64::from(of_window % a_call == 0),
            Spends::AtRandom => u64::from(numbers.below(a_call) < STEP_MS),
            Spends::AtOnce => {
                if of_window == 30_000 {
                    LIMIT / 2
                } else {
                    0
                }
            }
            Spends::OnAndOff => u64::from(window / 3 % 2 == 0 && of_window % a_call == 0),
        };
        let is_counted = window >= from;
        for _ in 0..theirs {
            let _ = provider.arrives(now);
            counted.foreign += u64::from(is_counted);
        }
        for index in (0..on_their_way.len()).rev() {
            if on_their_way[index].0 <= step {
                let (_, admission) = on_their_way.swap_remove(index);
                let left = provider.arrives(now);
                counted.sent += u64::from(is_counted);
                counted.refused += u64::from(is_counted && left.is_none());
                answers.push((step + 1 + numbers.below(callers.longest_answer), left, admission));
            }
        }
        for index in (0..answers.len()).rev() {
            if answers[index].0 <= step {
                let (_, left, admission) = answers.swap_remove(index);
                let taken = match left {
                    Some(left) => admission.reported(&[report(Counts::Requests, left, 60, 0)]).await,
                    None => admission.reported_refusing(&[report(Counts::Requests, 0, 60, 0)]).await,
                };
                taken.expect("taken in");
                if left.is_none() {
                    admission.park(Duration::from_secs(1), "refused");
                }
                admission.settle(Usage { input: 8, cached: 0, output: 1 }).await.expect("settled");
            }
        }
        // As many as there is room for.
        for _ in 0..callers.a_step.min(callers.most.saturating_sub(on_their_way.len() + answers.len())) {
            // One that would wait for the margin is asked again in the next step.
            let admission = tokio::select! {
                biased;
                admitted = world.admit(100) => admitted.ok(),
                () = std::future::ready(()) => None,
            };
            let Some(admission) = admission else { break };
            on_their_way.push((step + numbers.below(2), admission));
        }
        world.hands.advance(Micros::from_millis(STEP_MS));
    }
    counted
}

/// Of our calls less than 1 of 100 is refused after the first window, or after the second where others come mostly when all of ours were
/// sent in the first; and most of what others leave is used.
#[tokio::test]
async fn e2_a_foreign_client_spends_half_of_the_quota() {
    let callers = Callers { a_step: 4, most: usize::MAX, longest_answer: 2 };
    for (spends, from, percent, least_used) in [
        (Spends::Evenly, 1, 1, 90),
        (Spends::AtRandom, 2, 1, 80),
        (Spends::AtOnce, 2, 1, 90),
        // Nobody knows that they have come back before the first report of it.
        (Spends::OnAndOff, 1, 2, 60),
    ] {
        let counted = beside_others(spends, callers, from).await;
        eprintln!("{spends:?}: {counted:?}");
        let Counted { sent, refused, foreign } = counted;
        let left_for_us = LIMIT * (WINDOWS - from) - foreign;
        assert!(refused * 100 < sent * percent, "{spends:?}: {refused} of {sent} refused");
        assert!(sent * 100 >= left_for_us * least_used, "{spends:?}: {sent} of {left_for_us} sent");
    }
}

/// The same with 64 clients that all ask again as soon as they are answered, after up to 400 ms: a third of the quota may be on its way
/// before the first answer reports what is left. The headroom is a tenth of the limit then, so a fifth of what others leave is not used.
#[tokio::test]
async fn e2_sixty_four_clients_beside_a_foreign_one() {
    let callers = Callers { a_step: 64, most: 64, longest_answer: 8 };
    for (spends, from, percent, least_used) in [
        (Spends::Evenly, 1, 1, 75),
        (Spends::AtRandom, 2, 1, 70),
        (Spends::AtOnce, 2, 1, 75),
        // All that are on their way when they come back may be refused.
        (Spends::OnAndOff, 1, 3, 50),
    ] {
        let counted = beside_others(spends, callers, from).await;
        eprintln!("{spends:?}: {counted:?}");
        let Counted { sent, refused, foreign } = counted;
        let left_for_us = LIMIT * (WINDOWS - from) - foreign;
        assert!(refused * 100 < sent * percent, "{spends:?}: {refused} of {sent} refused");
        assert!(sent * 100 >= left_for_us * least_used, "{spends:?}: {sent} of {left_for_us} sent");
    }
}
