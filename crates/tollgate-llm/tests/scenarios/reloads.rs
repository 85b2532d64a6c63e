//! Configs that change while calls wait: they keep their place, and go by the new numbers.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tollgate::Policy;
use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate_llm::{
    Admission, Api, Caller, LlmConfig, LlmSection, ModelRequest, Refusal, RefusalKind, Usage,
};

use super::{INPUT, OPENAI, World, body, settle_down, used};

/// The limits and the models of a config.
fn parsed(rest: &str) -> (Policy, LlmConfig) {
    let text = format!("llm.margin = '0s'\n{rest}\n{OPENAI}");
    let mut llm = LlmSection::default();
    let config = Config::parse_with(&text, [], &mut [&mut llm]);
    (config.unwrap_or_else(|mistakes| panic!("{mistakes}")).policy, llm.config.expect("a section"))
}

impl World {
    /// Puts another config in place, as a server does: first the limits, then the models.
    fn reload(&self, rest: &str) {
        let (policy, models) = parsed(rest);
        self.gate.reload(policy).expect("in place");
        self.limits.reload(models);
    }

    /// A call that waits, with this body.
    async fn waits(&self, body: String) -> JoinHandle<Result<Admission, Refusal>> {
        let before = self.limits.waiting("gpt-4o");
        let world = self.clone();
        let waiting = tokio::spawn(async move {
            let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
            world.limits.admit(&request, &Caller::default(), None).await
        });
        settle_down().await;
        assert_eq!(self.limits.waiting("gpt-4o"), before + 1, "it waits");
        waiting
    }
}

async fn admitted(waiting: JoinHandle<Result<Admission, Refusal>>) -> Admission {
    settle_down().await;
    assert!(waiting.is_finished(), "it still waits");
    waiting.await.expect("no panic").expect("room")
}

/// A request without a cap, whose answer is guessed.
fn uncapped() -> String {
    r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}"#.to_owned()
}

#[tokio::test]
async fn a_limit_that_goes_away_holds_up_nobody() {
    for (rest, reserved) in [
        ("[llm.models.gpt-4o]\nrpm = 10", Some(9)),
        // Without any limit, and without the model.
        ("[llm.models.gpt-4o]", None),
        ("[llm.models.other]\nrpm = 1", None),
        // Another quota, which is a new one.
        ("[llm.models.gpt-4o]\nquota = 'family'\ntpm = 1000", None),
    ] {
        let world = World::openai("rpm = 10\ntpm = 1000");
        let open = world.admit(1_000).await.expect("room");
        let waiting = world.waits(body(500)).await;
        world.reload(rest);
        admitted(waiting).await.settle(used(500)).await.expect("settled");
        if let Some(left) = reserved {
            assert_eq!(world.left("llm.gpt-4o.rpm").await, left - 1, "{rest}");
        }
        open.settle(used(1_000)).await.expect("settled");
        assert_eq!(world.limits.waiting("gpt-4o"), 0, "{rest}");
    }
}

#[tokio::test]
async fn a_limit_that_is_lowered_is_waited_for_as_far_as_a_call_can_fit() {
    let with = |tpm: u64| format!("llm.default_output_tokens = 800\n[llm.models.gpt-4o]\ntpm = {tpm}");
    let world = World::of(OPENAI, &with(1_000));
    let open = world.admit(1_000).await.expect("room");
    let guessed = world.waits(uncapped()).await;
    let capped = world.waits(body(500)).await;
    world.reload(&with(300));
    // A cap is the caller's: it can never fit now, and says so once it is its turn.
    open.cancel().await.expect("cancelled");
    let guessed = admitted(guessed).await;
    assert_eq!(guessed.reserved(), 300, "a guess is lowered to what the limit allows");
    guessed.cancel().await.expect("cancelled");
    settle_down().await;
    let refusal = capped.await.expect("no panic").expect_err("it is larger than the limit");
    assert_eq!(refusal.kind, RefusalKind::Never);
    assert_eq!(
        refusal.reason,
        "Token limit exceeded: 500 tokens / 300 TPM; the request alone is larger than the limit"
    );
}

#[tokio::test]
async fn who_waits_keeps_its_place() {
    let world = World::openai("rpm = 1\ntpm = 1000");
    world.call(100).await;
    let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut calls = Vec::new();
    for number in 0..3 {
        let (world, order) = (world.clone(), order.clone());
        calls.push(tokio::spawn(async move {
            let admission = world.admit_within(100, Some(Duration::from_secs(600))).await.expect("it waits");
            order.lock().push((number, admission.waited().as_secs()));
            admission.settle(used(100)).await.expect("settled");
        }));
        settle_down().await;
    }
    world.advance(30);
    world.reload("[llm.models.gpt-4o]\nrpm = 1\ntpm = 500");
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 3, "nothing is free yet");
    for _ in 0..3 {
        world.advance(30);
        settle_down().await;
        world.advance(30);
        settle_down().await;
    }
    for call in calls {
        call.await.expect("no panic");
    }
    // Since when it waits is not forgotten either.
    assert_eq!(*order.lock(), [(0, 60), (1, 120), (2, 180)]);
}

/// The deadline of a call is that which it had when it came.
#[tokio::test]
async fn a_reload_moves_no_deadline() {
    let world = World::openai("tpm = 1000");
    let open = world.admit(1_000).await.expect("room");
    let waiting = world.waits(body(500)).await;
    world.advance(40);
    world.reload(
        "[llm.models.gpt-4o]\nquota = 'family'\ntpm = 1000\n[llm.models.other]\nquota = 'family'\ntpm = 1000",
    );
    let moved = admitted(waiting).await;
    assert_eq!(
        moved.waited(),
        Duration::from_secs(40),
        "it began anew in another line, and is as old as it was"
    );
    drop(moved);
    open.cancel().await.expect("cancelled");
}

/// A reload puts the limits in place before the models. A call that comes or wakes in between pauses until both are.
#[tokio::test]
async fn between_the_limits_and_the_models_of_a_reload_nobody_is_refused() {
    let world = World::openai("rpm = 1\ntpm = 1000");
    world.call(100).await;
    let waiting = world.waits(body(100)).await;
    let (policy, models) = parsed("[llm.models.gpt-4o]\nquota = 'family'\nrpm = 5");
    world.gate.reload(policy).expect("in place");
    // One wakes, and another one comes.
    world.advance(60);
    let coming = tokio::spawn({
        let world = world.clone();
        async move { world.admit(100).await }
    });
    settle_down().await;
    world.limits.reload(models);
    world.hands.advance(Micros::from_millis(50));
    for call in [waiting, coming] {
        admitted(call).await.settle(used(100)).await.expect("settled");
    }
    assert_eq!(world.left("llm.family.rpm").await, 3);
}

/// A batch that waits as a whole is planned again.
#[tokio::test]
async fn a_batch_that_waits_goes_by_the_new_numbers() {
    let world = World::openai("rpm = 2\ntpm = 1000");
    world.call(100).await;
    let waiting = tokio::spawn({
        let world = world.clone();
        async move {
            let bodies = [body(100), body(100)];
            let requests: Vec<ModelRequest<'_>> = bodies
                .iter()
                .map(|body| ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request"))
                .collect();
            world.limits.admit_batch(&requests, &Caller::default(), None).await.map(|all| all.len())
        }
    });
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 1);
    world.reload("[llm.models.gpt-4o]\nrpm = 3");
    settle_down().await;
    assert!(waiting.is_finished(), "there is room for both");
    assert_eq!(waiting.await.expect("no panic").expect("room"), 2);
    assert_eq!(world.left("llm.gpt-4o.rpm").await, 0);
}

/// What is learned of answers is of one answer, however many a request asks for.
#[tokio::test]
async fn b6_a_guess_is_of_one_answer() {
    let world = World::openai("tpm = 1000000");
    let reserved = async |more: &str| {
        let body = uncapped().replace("]}", &format!("]{more}}}"));
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        let admission = world.limits.admit(&request, &Caller::default(), None).await.expect("room");
        let reserved = admission.reserved();
        admission
            .settle(Usage { input: INPUT, cached: 0, output: if more.is_empty() { 40 } else { 200 } })
            .await
            .expect("settled");
        reserved - INPUT
    };
    for _ in 0..40 {
        reserved(",\"n\":5").await;
    }
    assert_eq!((reserved(",\"n\":5").await, reserved("").await), (200, 40));
}

/// Calls that are under way when the config is put in place again still make room for those who come later.
#[tokio::test]
async fn a_reload_keeps_the_line_of_open_calls() {
    let world = World::openai("tpm = 1000");
    let open = world.admit(900).await.expect("room");
    let config = (*world.limits.config()).clone();
    world.limits.reload(config.clone());
    let waiting = tokio::spawn({
        let world = world.clone();
        async move { world.admit(900).await }
    });
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 1);
    // Bounds that changed hold for a line that is in use.
    let mut smaller = config;
    smaller.max_waiting = 1;
    world.limits.reload(smaller);
    let refusal = world.admit(900).await.expect_err("the line is full");
    assert_eq!(refusal.kind, RefusalKind::LineFull);
    open.settle(used(100)).await.expect("settled");
    settle_down().await;
    assert!(waiting.is_finished(), "what was given back is seen at once");
    waiting.await.expect("no panic").expect("room").settle(used(900)).await.expect("settled");
}
