//! Who goes first when a quota is short, on a clock that is moved by hand: F2, F3 and F4.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{ManualClock, Tollgate};
use tollgate_llm::{Api, Caller, LlmSection, ModelLimits, ModelRequest, Usage};

/// The input tokens of every request here.
const INPUT: u64 = 8;

const WINDOW: u64 = 60;

/// What was admitted: by whom, when it joined, when it was admitted, and its tokens.
#[derive(Clone, Debug)]
struct Admitted {
    client: &'static str,
    at: u64,
    waited: Duration,
    tokens: u64,
}

#[derive(Clone)]
struct World {
    hands: ManualClock,
    limits: ModelLimits,
    admitted: Arc<Mutex<Vec<Admitted>>>,
    began: Micros,
}

impl World {
    fn of(model: &str, clients: &str) -> World {
        let text = format!(
            "llm.margin = '0s'\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'x'\n\
             [llm.models.gpt-4o]\n{model}\n{clients}"
        );
        let mut llm = LlmSection::default();
        let config =
            Config::parse_with(&text, [], &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let began = Micros::from_secs(1_700_000_000);
        let hands = ManualClock::at(began);
        let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
        let limits = ModelLimits::with_clock(gate, llm.config.expect("a section"), hands.clock());
        World { hands, limits, admitted: Arc::default(), began }
    }

    /// Makes one call that uses what it reserves.
    async fn call(&self, client: &'static str, tokens: u64) {
        let cap = tokens - INPUT;
        let body = format!(
            r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap}}}"#
        );
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        let caller = Caller { client: Some(client.to_owned()) };
        let admission =
            self.limits.admit(&request, &caller, Some(Duration::from_secs(86_400))).await.expect("it waits");
        let at = self.hands.clock().now().saturating_sub(self.began).get() / 1_000_000;
        self.admitted.lock().push(Admitted { client, at, waited: admission.waited(), tokens });
        admission.settle(Usage { input: INPUT, cached: 0, output: cap }).await.expect("settled");
    }

    /// Has a client call without end, with so many calls at once.
    fn saturate(&self, client: &'static str, tokens: u64, at_once: usize) {
        for _ in 0..at_once {
            let world = self.clone();
            tokio::spawn(async move {
                loop {
                    world.call(client, tokens).await;
                }
            });
        }
    }

    fn spawn(&self, client: &'static str, tokens: u64) {
        let world = self.clone();
        tokio::spawn(async move { world.call(client, tokens).await });
    }

    /// Lets everything run that can, until nothing more is admitted.
    async fn settle_down(&self) {
        let mut before = usize::MAX;
        while before != self.admitted.lock().len() {
            before = self.admitted.lock().len();
            for _ in 0..300 {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Moves the clock second by second.
    async fn advance(&self, seconds: u64) {
        for _ in 0..seconds {
            self.hands.advance(Micros::from_secs(1));
            self.settle_down().await;
        }
    }

    /// The tokens of each client from this second on.
    fn tokens_since(&self, since: u64) -> HashMap<&'static str, u64> {
        let mut tokens = HashMap::new();
        for admitted in self.admitted.lock().iter().filter(|admitted| admitted.at >= since) {
            *tokens.entry(admitted.client).or_insert(0) += admitted.tokens;
        }
        tokens
    }

    fn waits(&self, client: &str) -> Vec<Duration> {
        let admitted = self.admitted.lock();
        let mut waits: Vec<Duration> = admitted
            .iter()
            .filter(|admitted| admitted.client == client)
            .map(|admitted| admitted.waited)
            .collect();
        waits.sort_unstable();
        waits
    }
}

/// Jain's index of what each got for its weight: 1 where all got the same.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    #[expect(clippy::cast_precision_loss, reason = "a few clients")]
    let count = shares.len() as f64;
    sum * sum / (count * squares)
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
#[tokio::test]
async fn f2_saturating_clients_share_tokens_by_weight() {
    let clients = "[llm.clients.three]\nkey = 'a'\nweight = 3\n[llm.clients.one]\nkey = 'b'\nweight = 1";
    // Calls of the same size, of other sizes, and where requests are what is short.
    for (three, one, limits) in
        [(100, 100, "tpm = 10000"), (400, 100, "tpm = 10000"), (50, 350, "tpm = 10000\nrpm = 1000")]
    {
        let (world, largest) = (World::of(limits, clients), three.max(one));
        world.saturate("three", three, 20);
        world.saturate("one", one, 20);
        world.settle_down().await;
        for _ in 0..20 {
            world.advance(WINDOW).await;
        }
        // The first window went to those who came first: nobody was waiting.
        let tokens = world.tokens_since(1);
        let (three, one) = (tokens["three"] as f64, tokens["one"] as f64);
        let share = three / (three + one);
        assert!((share - 0.75).abs() <= 0.03, "{share}: {tokens:?}");
        assert!(jain(&[three / 3.0, one]) >= 0.99, "{tokens:?}");
        // All of it is used, but for what is smaller than a call.
        let most = 20 * (10_000 - largest);
        assert!(tokens["three"] + tokens["one"] >= most, "{tokens:?}");
    }
}

#[tokio::test]
async fn f2_a_client_alone_has_all_of_the_quota() {
    let clients = "[llm.clients.three]\nkey = 'a'\nweight = 3\n[llm.clients.one]\nkey = 'b'\nweight = 1";
    let world = World::of("tpm = 10000", clients);
    world.saturate("one", 100, 20);
    world.settle_down().await;
    for _ in 0..10 {
        world.advance(WINDOW).await;
    }
    let tokens = world.tokens_since(1)["one"];
    assert!(tokens >= 98_000, "{tokens} of 100000");
}

#[tokio::test]
async fn f3_interactive_calls_go_before_a_batch_that_still_moves() {
    let clients = "[llm.clients.day]\nkey = 'a'\n[llm.clients.night]\nkey = 'b'\npriority = 'batch'";
    let world = World::of("rpm = 60", clients);
    // Ten windows of work at once, and then an interactive call every two seconds: half of what there is.
    (0..600).for_each(|_| world.spawn("night", 100));
    world.settle_down().await;
    for _ in 0..10 * WINDOW / 2 {
        world.spawn("day", 100);
        world.advance(2).await;
    }
    let waits = world.waits("day");
    let p95 = waits[waits.len() * 95 / 100];
    assert!(waits.len() >= 270, "{} interactive calls were made", waits.len());
    assert!(p95 <= Duration::from_secs(WINDOW), "{p95:?}");
    let moved = world.waits("night").len();
    assert!(moved >= 60 + 9 * 30 - 30, "the batch has the rest: {moved}");
}

/// Interactive calls that alone are more than the quota: batch calls go by their age, one in a quarter of a window.
#[tokio::test]
async fn f3_a_batch_moves_by_its_age_under_any_load() {
    let clients = "[llm.clients.day]\nkey = 'a'\n[llm.clients.night]\nkey = 'b'\npriority = 'batch'";
    let world = World::of("rpm = 60", clients);
    world.saturate("day", 100, 80);
    world.settle_down().await;
    (0..10).for_each(|_| world.spawn("night", 100));
    for _ in 0..11 {
        world.advance(WINDOW).await;
    }
    let waits = world.waits("night");
    // All slots of a window come free at once, so one batch call goes with each of them.
    assert_eq!(waits.len(), 10, "{waits:?}");
    assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(10 * WINDOW)), "{waits:?}");
}

#[tokio::test]
async fn f4_a_huge_call_and_small_ones_do_not_block_each_other() {
    let clients = "[llm.clients.small]\nkey = 'a'\n[llm.clients.huge]\nkey = 'b'";
    // The huge call of another client, and one of the same.
    for huge in ["huge", "small"] {
        let world = World::of("tpm = 10000", clients);
        world.saturate("small", 100, 10);
        world.settle_down().await;
        world.advance(30).await;
        world.spawn(huge, 9_000);
        for _ in 0..6 {
            world.advance(WINDOW).await;
        }
        let admitted = world.admitted.lock().clone();
        let of_huge: Vec<_> = admitted.iter().filter(|admitted| admitted.tokens == 9_000).collect();
        assert_eq!(of_huge.len(), 1, "{huge}");
        assert!(of_huge[0].waited <= Duration::from_secs(2 * WINDOW), "{huge}: {of_huge:?}");
        let longest =
            admitted.iter().filter(|admitted| admitted.tokens == 100).map(|admitted| admitted.waited).max();
        assert!(longest <= Some(Duration::from_secs(2 * WINDOW)), "{huge}: {longest:?}");
        assert!(world.tokens_since(5 * WINDOW)["small"] >= 10_000, "small calls go on");
    }
}
