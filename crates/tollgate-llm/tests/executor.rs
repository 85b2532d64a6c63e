//! The executor against a provider that judges it (F5), and on a clock that is moved by hand.

#[path = "executor/retries.rs"]
mod retries;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{ManualClock, Tollgate};
use tollgate_llm::executor::{
    Admit, CallErrorKind, Executor, ExecutorBuilder, ModelCall, Outgoing, Reply, RetryPolicy, SendError,
    Transport,
};
use tollgate_llm::provider::Failure;
use tollgate_llm::{Api, Caller, LlmConfig, LlmSection, ModelLimits, ModelRequest, RefusalKind, Usage};
use tollgate_testkit::http::Connection;
use tollgate_testkit::provider::{self, Allowed, Provider};

use self::retries::refusal;

fn config(rest: &str) -> (Config, LlmConfig) {
    with_keys(rest, "api_key = 'x'")
}

fn with_keys(rest: &str, keys: &str) -> (Config, LlmConfig) {
    let text =
        format!("{rest}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n{keys}\n");
    let mut llm = LlmSection::default();
    let config =
        Config::parse_with(&text, [], &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    (config, llm.config.expect("a section"))
}

/// A call that reserves a hundred tokens, with a number that its answer has too.
fn call(number: usize) -> ModelCall {
    let body = json!({
        "model": "gpt-4o", "max_tokens": 92, "messages": [{ "role": "user", "content": "hi" }], "metadata": { "input_tokens": "8" },
        "seed": number,
    });
    ModelCall { api: Api::ChatCompletions, body: body.to_string().into_bytes() }
}

/// Sends calls over HTTP, each on a connection of its own.
struct Http(std::net::SocketAddr);

impl Transport for Http {
    async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
        let (address, body) = (self.0, String::from_utf8(outgoing.body).expect("text"));
        let path = outgoing.api.path();
        let asking = tokio::task::spawn_blocking(move || {
            Connection::open(address).ask_with_body("POST", path, &["content-type: application/json"], &body)
        });
        let answer = asking.await.map_err(|error| SendError::Lost(error.to_string()))?;
        let mut headers = http::HeaderMap::new();
        for line in &answer.lines {
            let (name, value) = line.split_once(':').expect("a header");
            let name = http::HeaderName::try_from(name.trim()).expect("a name");
            headers.append(name, value.trim().parse().expect("a value"));
        }
        Ok(Reply { status: answer.status, headers, body: answer.body.into_bytes() })
    }
}

/// An answer of a provider that has the number of its request.
fn numbered(arrival: &provider::Arrival) -> provider::Reply {
    if arrival.body["seed"] == 7 {
        let error = json!({ "error": { "message": "no", "type": "invalid_request_error", "code": null } });
        return provider::Reply::json(400, &error);
    }
    let usage = json!({ "prompt_tokens": 8, "completion_tokens": 92, "total_tokens": 100 });
    provider::Reply::json(200, &json!({ "id": arrival.body["seed"], "usage": usage }))
}

/// A hundred calls against ten in each window: judge clean, results in order, and the one that is wrong fails alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f5_a_batch_of_a_hundred_goes_as_capacity_allows() {
    let window = Duration::from_millis(500);
    let provider = Provider::judging(Allowed { requests: 10, tokens: 1_000, window }, numbered);
    let (config, llm) =
        config("llm.window = '500ms'\nllm.margin = '250ms'\n[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let gate = Tollgate::open(&config).await.expect("a gate");
    let limits = ModelLimits::new(gate, llm);
    let executor = Executor::new(limits, Http(provider.address()));
    let mut calls: Vec<ModelCall> = (0..99).map(call).collect();
    calls.insert(50, ModelCall { api: Api::ChatCompletions, body: b"{\"model\":\"gpt-4o\"}".to_vec() });
    let results = executor.submit_batch(calls, Admit::AsCapacityAllows).all().await;
    provider.assert_clean();
    assert_eq!((results.len(), provider.arrivals().len(), provider.refused()), (100, 99, 0));
    for (index, result) in results.iter().enumerate() {
        let number = if index < 50 { index } else { index.wrapping_sub(1) };
        match (index, result) {
            (50, Err(error)) => {
                assert_eq!((error.kind, error.attempts), (CallErrorKind::Invalid, 0), "{error}")
            }
            (7, Err(error)) => {
                assert_eq!(error.kind, CallErrorKind::Provider(Failure::Refused), "{error}");
                assert_eq!((error.attempts, error.reply.as_ref().map(|reply| reply.status)), (1, Some(400)));
            }
            (_, Ok(completed)) => {
                let body: serde_json::Value = serde_json::from_slice(&completed.reply.body).expect("JSON");
                assert_eq!((&body["id"], completed.usage.total()), (&json!(number), 100), "call {index}");
            }
            _ => panic!("call {index}: {result:?}"),
        }
    }
}

/// A transport by a script, on a clock that is moved by hand.
struct Scripted<F> {
    script: F,
    sent: Arc<Mutex<Vec<(Micros, u64)>>>,
    clock: tollgate::Clock,
}

impl<F: Fn(usize, &serde_json::Value) -> Result<Reply, SendError> + Send + Sync + 'static> Transport
    for Scripted<F>
{
    async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
        let body: serde_json::Value = serde_json::from_slice(&outgoing.body).expect("JSON");
        let number = {
            let mut sent = self.sent.lock();
            sent.push((self.clock.now(), body["seed"].as_u64().unwrap_or(0)));
            sent.len() - 1
        };
        (self.script)(number, &body)
    }
}

struct World {
    hands: ManualClock,
    gate: Tollgate,
    limits: ModelLimits,
    sent: Arc<Mutex<Vec<(Micros, u64)>>>,
}

const START: u64 = 1_700_000_000;

impl World {
    fn of(models: &str) -> World {
        World::from(config(&format!("llm.margin = '0s'\n{models}")))
    }

    fn from((config, llm): (Config, LlmConfig)) -> World {
        let hands = ManualClock::at(Micros::from_secs(START));
        let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
        let limits = ModelLimits::with_clock(gate.clone(), llm, hands.clock());
        World { hands, gate, limits, sent: Arc::default() }
    }

    fn executor<F>(&self, retry: RetryPolicy, script: F) -> Executor<Scripted<F>>
    where
        F: Fn(usize, &serde_json::Value) -> Result<Reply, SendError> + Send + Sync + 'static,
    {
        let transport = Scripted { script, sent: self.sent.clone(), clock: self.hands.clock() };
        ExecutorBuilder::default().retry(retry).build(self.limits.clone(), transport)
    }

    fn sent(&self) -> usize {
        self.sent.lock().len()
    }

    async fn left(&self, limit: &str) -> u64 {
        self.gate.status(limit, "llm:up").await.expect("a status").remaining()
    }

    fn advance(&self, seconds: u64) {
        self.hands.advance(Micros::from_secs(seconds));
    }
}

async fn settle_down() {
    for _ in 0..400 {
        tokio::task::yield_now().await;
    }
}

fn used(output: u64) -> Reply {
    let body = json!({ "usage": { "prompt_tokens": 8, "completion_tokens": output } }).to_string();
    Reply { status: 200, body: body.into_bytes(), ..Reply::default() }
}

#[tokio::test]
async fn f5_a_batch_is_checked_as_a_whole() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(92)));
    let calls: Vec<ModelCall> = (0..10).map(call).collect();
    let check = executor.check(&calls).await.expect("a check");
    assert_eq!((check.can_proceed, check.input_tokens, check.reserved_tokens), (true, 80, 1_000));
    executor.submit(call(0)).result().await.expect("an answer");
    world.advance(20);
    let check = executor.check(&calls).await.expect("a check");
    assert_eq!(check.reason.as_deref(), Some("Rate limit exceeded: 1 requests / 10 RPM"));
    assert_eq!((check.can_proceed, check.wait), (false, Some(Duration::from_secs(40))));
    let calls: Vec<ModelCall> = (0..11).map(call).collect();
    let check = executor.check(&calls).await.expect("a check");
    assert_eq!((check.can_proceed, check.wait), (false, None), "{:?}", check.reason);
    assert_eq!(world.sent(), 1, "a check sends nothing");
}

/// No call of the batch goes before there is room for all of them, and what is given back is given back by the last.
#[tokio::test]
async fn f5_all_or_nothing_waits_for_the_whole_batch() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(12)));
    executor.submit(call(0)).result().await.expect("an answer");
    assert_eq!(world.left("llm.gpt-4o.tpm").await, 980);
    world.advance(20);
    let calls: Vec<ModelCall> = (1..11).map(call).collect();
    let batch = executor.submit_batch(calls, Admit::AllOrNothing);
    settle_down().await;
    assert_eq!(world.sent(), 1, "nine would fit, and none goes");
    world.advance(39);
    settle_down().await;
    assert_eq!(world.sent(), 1);
    world.advance(1);
    let results = batch.all().await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert_eq!(world.sent(), 11);
    settle_down().await;
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (0, 800));

    // A batch that no empty window has room for ends at once, and so does one of more calls than may be in flight.
    let calls: Vec<ModelCall> = (0..11).map(call).collect();
    let results = executor.submit_batch(calls, Admit::AllOrNothing).all().await;
    let kinds = results.iter().map(|result| result.as_ref().expect_err("too large").kind);
    assert!(
        kinds.into_iter().all(|kind| kind == CallErrorKind::NotAdmitted(RefusalKind::Never)),
        "{results:?}"
    );
    // What is wrong fails alone, and does not count.
    world.advance(60);
    let mut calls: Vec<ModelCall> = (0..10).map(call).collect();
    calls.push(ModelCall { api: Api::ChatCompletions, body: b"[]".to_vec() });
    let results = executor.submit_batch(calls, Admit::AllOrNothing).all().await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 10);
    assert_eq!(results[10].as_ref().expect_err("it is no request").kind, CallErrorKind::Invalid);
}

#[tokio::test]
async fn f5_a_cancelled_batch_frees_the_rest() {
    for admit in [Admit::AsCapacityAllows, Admit::AllOrNothing] {
        let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 100000");
        let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(92)));
        let first = if admit == Admit::AllOrNothing { 1 } else { 0 };
        if first == 1 {
            executor.submit(call(0)).result().await.expect("an answer");
        }
        let count = if first == 1 { 10 } else { 100 };
        let batch = executor.submit_batch((0..count).map(call).collect(), admit);
        settle_down().await;
        let sent = world.sent();
        assert_eq!(sent, if first == 1 { 1 } else { 10 }, "{admit:?}");
        batch.cancel();
        let results = batch.all().await;
        let cancelled = results
            .iter()
            .filter(|result| matches!(result, Err(error) if error.kind == CallErrorKind::Cancelled));
        assert_eq!(cancelled.count(), count - (sent - first), "{admit:?}");
        assert_eq!(world.limits.waiting("gpt-4o"), 0);
        world.advance(60);
        settle_down().await;
        assert_eq!(world.sent(), sent, "{admit:?}: nothing more is sent");
        assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (10, 100_000));
    }
    // Dropping it is cancelling it.
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10");
    let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(92)));
    let batch = executor.submit_batch((0..100).map(call).collect(), Admit::AsCapacityAllows);
    settle_down().await;
    drop(batch);
    settle_down().await;
    assert_eq!((world.sent(), world.limits.waiting("gpt-4o")), (10, 0));
}

/// A batch that has all places gives each up between two attempts, so that its calls can be sent again.
#[tokio::test]
async fn f5_a_whole_batch_can_be_sent_again() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 8");
    let transport = Scripted {
        script: |number: usize, _: &serde_json::Value| match number {
            0..4 => Ok(refusal(500, "server_error", None)),
            _ => Ok(used(92)),
        },
        sent: world.sent.clone(),
        clock: world.hands.clock(),
    };
    let executor = ExecutorBuilder::default().in_flight(4).build(world.limits.clone(), transport);
    let batch = executor.submit_batch((0..4).map(call).collect(), Admit::AllOrNothing);
    settle_down().await;
    world.advance(1);
    let results = batch.all().await;
    assert!(
        results.iter().all(|result| result.as_ref().is_ok_and(|completed| completed.attempts == 2)),
        "{results:?}"
    );
    assert_eq!(world.left("llm.gpt-4o.rpm").await, 0, "each attempt is a request");
}

/// A transport that panics costs its own call an answer, and nobody else.
#[tokio::test]
async fn f5_a_transport_that_panics_fails_one_call_alone() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10");
    let executor = world.executor(RetryPolicy::default(), |_, body| {
        assert!(body["seed"] != 1, "this transport panics on purpose");
        Ok(used(92))
    });
    let results = executor.submit_batch((0..3).map(call).collect(), Admit::AsCapacityAllows).all().await;
    let kinds: Vec<_> = results.iter().map(|result| result.as_ref().err().map(|error| error.kind)).collect();
    assert_eq!(kinds, [None, Some(CallErrorKind::Unreachable), None]);
}

/// Places bound what is on its way, and all calls go in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_calls_are_in_flight_than_there_are_places() {
    struct Slow(AtomicUsize, Arc<AtomicUsize>);
    impl Transport for Slow {
        async fn send(&self, _: Outgoing<'_>) -> Result<Reply, SendError> {
            let now = self.0.fetch_add(1, Ordering::SeqCst) + 1;
            self.1.fetch_max(now, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(2)).await;
            self.0.fetch_sub(1, Ordering::SeqCst);
            Ok(used(1))
        }
    }
    let world = World::of("[llm.models.gpt-4o]\nrpm = 1000");
    let most = Arc::new(AtomicUsize::new(0));
    let executor = ExecutorBuilder::default()
        .in_flight(4)
        .build(world.limits.clone(), Slow(AtomicUsize::new(0), most.clone()));
    let results = executor.submit_batch((0..100).map(call).collect(), Admit::AsCapacityAllows).all().await;
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(most.load(Ordering::SeqCst), 4);
    let results = executor.submit_batch((0..5).map(call).collect(), Admit::AllOrNothing).all().await;
    assert!(
        results.iter().all(|result| result.as_ref().is_err_and(|error| error.reason.contains("at most 4")))
    );
}

/// A transport whose calls take as long as the test wants.
struct Slow {
    sent: Arc<AtomicUsize>,
    ended: Arc<tokio::sync::Notify>,
}

impl Transport for Slow {
    async fn send(&self, _: Outgoing<'_>) -> Result<Reply, SendError> {
        self.sent.fetch_add(1, Ordering::SeqCst);
        self.ended.notified().await;
        Ok(used(12))
    }
}

/// A lease ends after a minute that nobody renews. A call that has no byte of its answer by then still has its place.
#[tokio::test]
async fn a_place_is_kept_until_the_call_ends_however_long_it_takes() {
    for admit in [Admit::AsCapacityAllows, Admit::AllOrNothing] {
        let world = World::of("[llm.models.gpt-4o]\nconcurrency = 2");
        let (sent, ended) = (Arc::<AtomicUsize>::default(), Arc::<tokio::sync::Notify>::default());
        let slow = Slow { sent: sent.clone(), ended: ended.clone() };
        let executor = Executor::new(world.limits.clone(), slow);
        let first = executor.submit_batch((0..2).map(call).collect(), admit);
        settle_down().await;
        let second = executor.submit(call(2));
        for _ in 0..30 {
            world.advance(10);
            settle_down().await;
            assert_eq!(world.left("llm.gpt-4o.concurrency").await, 0, "{admit:?}");
        }
        assert_eq!(sent.load(Ordering::SeqCst), 2, "{admit:?}: the third waits for a place");
        ended.notify_waiters();
        assert!(first.all().await.iter().all(Result::is_ok));
        settle_down().await;
        assert_eq!(sent.load(Ordering::SeqCst), 3, "{admit:?}");
        ended.notify_waiters();
        second.result().await.expect("an answer");
        assert_eq!(world.left("llm.gpt-4o.concurrency").await, 2, "{admit:?}");
    }
}

/// A batch has no group that the provider asked to leave alone, charges nothing for counting, and is seen.
#[tokio::test]
async fn f5_a_batch_is_admitted_as_its_calls_would_be() {
    for model in ["rpm = 10", ""] {
        let world = World::of(&format!("[llm.models.gpt-4o]\n{model}"));
        let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(12)));
        world.limits.park("gpt-4o", "up", Duration::from_secs(10), "parked by the test");
        let calls: Vec<ModelCall> = (0..3).map(call).collect();
        let check = executor.check(&calls).await.expect("a check");
        assert_eq!((check.can_proceed, check.wait), (false, Some(Duration::from_secs(10))), "{model:?}");
        assert!(check.reason.as_ref().is_some_and(|reason| reason.contains("parked")), "{check:?}");
        let batch = executor.submit_batch(calls, Admit::AllOrNothing);
        settle_down().await;
        world.advance(9);
        settle_down().await;
        assert_eq!(world.sent(), 0, "{model:?}");
        assert_eq!(world.limits.overview().await.waiting, usize::from(!model.is_empty()), "{model:?}");
        world.advance(1);
        assert!(batch.all().await.iter().all(Result::is_ok), "{model:?}");
        assert_eq!(world.sent(), 3, "{model:?}");
    }
}

#[tokio::test]
async fn f5_a_batch_is_seen_while_it_runs_and_counting_costs_nothing() {
    let text = "[llm.upstreams.claude]\nkind = 'anthropic'\nbase_url = 'http://localhost'\napi_key = 'x'\n\
                [llm.models.claude-x]\nupstream = 'claude'\nrpm = 3\n[llm.models.gpt-4o]\nupstream = 'up'";
    let world = World::of(text);
    let body = r#"{"model":"claude-x","max_tokens":50,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = |api| ModelRequest::read(api, body.as_bytes()).expect("a request");
    let requests = [Api::Messages, Api::CountTokens, Api::CountTokens, Api::Messages].map(request);
    let admissions = world.limits.admit_batch(&requests, &Caller::default(), None).await.expect("room");
    let left = world.gate.status("llm.claude-x.rpm", "llm:claude").await.expect("a status").remaining();
    assert_eq!(left, 1, "two are requests of the limit");
    let overview = world.limits.overview().await;
    assert_eq!((overview.settlement.open, overview.waiting), (2, 0));
    let reserved = overview.models.iter().flat_map(|model| &model.limits).map(|limit| limit.reserved);
    assert_eq!(reserved.collect::<Vec<_>>(), [2]);
    for admission in admissions {
        admission.settle(Usage { input: 8, cached: 0, output: 5 }).await.expect("settled");
    }
    let overview = world.limits.overview().await;
    assert_eq!((overview.settlement.open, overview.settlement.used), (0, 26));
}
