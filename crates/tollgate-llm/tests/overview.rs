//! What operators see of models, on a clock that is moved by hand: how full they are, who waits and why, what came of reservations.

use std::time::Duration;

use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{ManualClock, Tollgate};
use tollgate_llm::{Admission, Api, Caller, LlmSection, ModelLimits, ModelRequest, Refusal, Usage};

/// The input tokens of the request below.
const INPUT: u64 = 8;

const UPSTREAM: &str = "[llm]\nmax_wait = '10m'\nmargin = '0s'\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'x'\n\
    [llm.clients.docs]\nkey = 'a'\nmodels.gpt-4o = { tpm = 300 }\n[llm.clients.search]\nkey = 'b'\nweight = 3\n\
    [llm.clients.night]\nkey = 'c'\npriority = 'batch'\n";

#[derive(Clone)]
struct World {
    hands: ManualClock,
    limits: ModelLimits,
}

impl World {
    fn of(model: &str) -> World {
        let mut llm = LlmSection::default();
        let text = format!("{UPSTREAM}[llm.models.gpt-4o]\n{model}");
        let config = Config::parse_with(&text, [], &mut [&mut llm]);
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
        let limits = ModelLimits::with_clock(gate, llm.config.expect("a section"), hands.clock());
        World { hands, limits }
    }

    async fn admit(&self, client: &str, tokens: u64) -> Result<Admission, Refusal> {
        let cap = tokens - INPUT;
        let body = format!(
            r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap}}}"#
        );
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        self.limits.admit(&request, &Caller { client: Some(client.to_owned()) }, None).await
    }

    /// A call that waits, until it is aborted.
    async fn wait(&self, client: &'static str, tokens: u64) -> tokio::task::JoinHandle<()> {
        let world = self.clone();
        let waiting = tokio::spawn(async move { drop(world.admit(client, tokens).await) });
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        waiting
    }

    /// Who waits, why, and when it goes.
    async fn line(&self) -> Vec<(String, String, Option<u64>)> {
        let line = self.limits.overview().await.line;
        let seconds = |wait: Duration| u64::try_from(wait.as_millis()).unwrap().div_ceil(1_000);
        line.into_iter().map(|call| (call.client, call.reason, call.goes_in.map(seconds))).collect()
    }
}

fn used(input: u64, output: u64) -> Usage {
    Usage { input, cached: 0, output }
}

#[tokio::test]
async fn why_a_call_waits_is_a_sentence_and_when_it_goes_is_the_kernels_answer() {
    let world = World::of("tpm = 1000\nrpm = 5");
    let held = world.admit("search", 600).await.expect("room");
    world.hands.advance(Micros::from_secs(20));
    world.admit("search", 200).await.expect("room").settle(used(8, 192)).await.expect("settled");
    assert!(world.line().await.is_empty());

    let tokens = world.wait("search", 500).await;
    let behind = world.wait("search", 100).await;
    let batch = world.wait("night", 100).await;
    let line = world.line().await;
    let expected = [
        (
            "search",
            "It needs 500 tokens, and 800 of 1,000 TPM are used or reserved. Enough of them leaves the window in 40 s.",
            Some(40),
        ),
        ("search", "It waits for its turn: 1 call goes first.", Some(40)),
        (
            "night",
            "It is batch, so interactive calls go first; in 15 s it is treated as one of them.",
            Some(40),
        ),
    ];
    let expected = expected.map(|(client, why, wait)| (client.to_owned(), why.to_owned(), wait));
    assert_eq!(line, expected);
    // Those who leave are gone.
    for waiting in [tokens, behind, batch] {
        waiting.abort();
        let _ = waiting.await;
    }
    assert!(world.line().await.is_empty());
    drop(held);
}

#[tokio::test]
async fn a_client_that_is_out_of_its_own_share_is_named_and_requests_are_counted() {
    let world = World::of("rpm = 2");
    let world_tokens = World::of("tpm = 10000");
    let _first = world_tokens.admit("docs", 250).await.expect("room");
    let waiting = world_tokens.wait("docs", 100).await;
    let line = world_tokens.line().await;
    assert_eq!(line.len(), 1);
    assert_eq!(
        line[0].1,
        "It is out of its own share: docs has 300 TPM of this model and used 250. Nobody else is held up."
    );
    waiting.abort();

    for _ in 0..2 {
        world.admit("search", 20).await.expect("room").settle(used(8, 12)).await.expect("settled");
    }
    let waiting = world.wait("search", 20).await;
    let line = world.line().await;
    assert_eq!(line[0].1, "It needs a request, and 2 of 2 RPM are used. There is room in 60 s.");
    waiting.abort();
}

#[tokio::test]
async fn what_is_reserved_used_and_settled_adds_up() {
    let world = World::of("tpm = 1000");
    let view = async || world.limits.overview().await;
    let held = world.admit("search", 300).await.expect("room");
    let model = &view().await.models[0];
    assert_eq!(
        (model.limits[0].used, model.limits[0].reserved, model.limits[0].capacity),
        (Some(300), 300, 1_000)
    );
    assert_eq!(view().await.settlement.open, 1);

    // Less than was reserved is used, and more input than was estimated.
    held.settle(used(16, 84)).await.expect("settled");
    let seen = view().await;
    let model = &seen.models[0];
    assert_eq!((model.limits[0].used, model.limits[0].reserved), (Some(100), 0));
    for series in &model.tokens {
        let sums = (series.input.iter().sum::<u64>(), series.output.iter().sum::<u64>());
        assert_eq!(sums, (16, 84), "{series:?}");
    }
    let estimates = model.estimates.expect("one call");
    assert_eq!(
        (estimates.p50, estimates.calls, estimates.factor),
        (2_000, 1, None),
        "exact counts have no factor"
    );
    let settlement = seen.settlement;
    assert_eq!(
        (settlement.reserved, settlement.given_back, settlement.used, settlement.beyond, settlement.open),
        (300, 200, 100, 0, 0)
    );
    let shares: Vec<(&str, u64, u64)> =
        seen.clients.iter().map(|one| (one.client.as_str(), one.weight, one.tokens)).collect();
    assert_eq!(shares, [("search", 3, 100)]);

    // A refusal, a call without a report, and a provider that asks for a rest.
    assert!(world.admit("docs", 900).await.is_err(), "more than its own limit holds");
    world.admit("search", 100).await.expect("room").settle_estimated(20, true).await.expect("settled");
    world.limits.park("gpt-4o", "up", Duration::from_secs(30), "the provider asked to wait");
    world.hands.advance(Micros::from_secs(10));
    let seen = view().await;
    assert_eq!((seen.settlement.unreported, seen.groups[0].limited), (1, 1));
    assert_eq!(seen.groups[0].rest, Some(Duration::from_secs(20)));
    assert_eq!(seen.groups[0].parked_since, seen.parked.last().map(|time| time.from));
    assert!(seen.groups[0].parked_since.is_some(), "{:?}", seen.parked);
    world.hands.advance(Micros::from_secs(3_700));
    let seen = view().await;
    assert_eq!(
        (seen.clients.len(), seen.groups[0].rest, seen.groups[0].limited),
        (0, None, 0),
        "an hour has passed"
    );
}
