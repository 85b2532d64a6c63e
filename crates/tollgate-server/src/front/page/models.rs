//! What the page shows of language models, as this gateway sees them: `GET /v1/llm`.
//!
//! How full a limit is, is asked of the store, so it is that of all gateways that share it; who waits and what was settled is this
//! gateway's own. Made at most once a second, however many ask.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use tollgate::store::Micros;
use tollgate_llm::{
    ClientView, Estimates, GroupView, ModelLimitView, ModelView, ModelsOverview, Settlement, WaitingCall,
};

use crate::app::App;

const GOOD_FOR: Duration = Duration::from_secs(1);

/// What was answered last.
#[derive(Default)]
pub(crate) struct ModelsView {
    last: tokio::sync::Mutex<Option<(Instant, Bytes)>>,
}

#[derive(Default, Serialize)]
struct Answer {
    /// Whether this server is a gateway.
    configured: bool,
    /// Where the limits are counted.
    store: &'static str,
    /// The minute that is counted last, in seconds since 1970.
    minute: u64,
    window_ms: u64,
    waiting: usize,
    median_wait_ms: Option<u64>,
    models: Vec<Model>,
    line: Vec<Waiting>,
    groups: Vec<Group>,
    clients: Vec<Client>,
    settlement: Settled,
    /// The trail, if it is written.
    trail: Option<String>,
}

#[derive(Serialize)]
struct Model {
    model: String,
    upstream: String,
    quota: String,
    shadow: bool,
    limits: Vec<Limit>,
    waiting: usize,
    longest_wait_ms: Option<u64>,
    refused: u64,
    input: Vec<u64>,
    output: Vec<u64>,
    estimates: Option<Estimated>,
}

#[derive(Serialize)]
struct Limit {
    limit: String,
    unit: &'static str,
    used: Option<u64>,
    reserved: u64,
    capacity: u64,
}

#[derive(Serialize)]
struct Estimated {
    p5: u64,
    p50: u64,
    p95: u64,
    calls: usize,
    factor: Option<u64>,
}

#[derive(Serialize)]
struct Waiting {
    client: String,
    priority: &'static str,
    model: String,
    tokens: u64,
    reason: String,
    goes_in_ms: Option<u64>,
    gives_up_in_ms: u64,
    waited_ms: u64,
}

#[derive(Serialize)]
struct Group {
    upstream: String,
    group: String,
    keys: usize,
    limited: u64,
    rest_ms: Option<u64>,
}

#[derive(Serialize)]
struct Client {
    client: String,
    weight: u64,
    tokens: u64,
}

#[derive(Default, Serialize)]
struct Settled {
    reserved: u64,
    given_back: u64,
    used: u64,
    beyond: u64,
    unreported: u64,
    open: usize,
}

impl ModelsView {
    /// All there is to see, as JSON.
    pub(crate) async fn answer(&self, app: &App) -> Bytes {
        let Some(models) = app.models() else {
            return written(&Answer::default());
        };
        let mut last = self.last.lock().await;
        if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < GOOD_FOR) {
            return text.clone();
        }
        let overview = models.limits().overview().await;
        let state = app.state();
        let trail = state.config.llm.as_ref().and_then(|llm| llm.log_dir.as_ref());
        let answer = Answer {
            configured: true,
            store: state.config.gate.store.mode.name(),
            minute: app.stats.second() / 60 * 60,
            trail: trail.map(|dir| dir.join("gateway/rate_limits.jsonl").display().to_string()),
            ..Answer::of(overview)
        };
        let text = written(&answer);
        *last = Some((Instant::now(), text.clone()));
        text
    }
}

fn written(answer: &Answer) -> Bytes {
    serde_json::to_vec(answer).unwrap_or_default().into()
}

fn ms(span: Duration) -> u64 {
    Micros::from(span).get().div_ceil(1_000)
}

impl Answer {
    fn of(overview: ModelsOverview) -> Answer {
        Answer {
            window_ms: ms(overview.window),
            waiting: overview.waiting,
            median_wait_ms: overview.median_wait.map(ms),
            models: overview.models.into_iter().map(Model::of).collect(),
            line: overview.line.into_iter().map(Waiting::of).collect(),
            groups: overview.groups.into_iter().map(Group::of).collect(),
            clients: overview.clients.into_iter().map(Client::of).collect(),
            settlement: Settled::of(overview.settlement),
            ..Answer::default()
        }
    }
}

impl Model {
    fn of(view: ModelView) -> Model {
        Model {
            model: view.model,
            upstream: view.upstream,
            quota: view.quota,
            shadow: view.shadow,
            limits: view.limits.into_iter().map(Limit::of).collect(),
            waiting: view.waiting,
            longest_wait_ms: view.longest_wait.map(ms),
            refused: view.refused,
            input: view.input,
            output: view.output,
            estimates: view.estimates.map(Estimated::of),
        }
    }
}

impl Limit {
    fn of(view: ModelLimitView) -> Limit {
        Limit {
            limit: view.limit,
            unit: view.unit,
            used: view.used,
            reserved: view.reserved,
            capacity: view.capacity,
        }
    }
}

impl Estimated {
    fn of(view: Estimates) -> Estimated {
        Estimated { p5: view.p5, p50: view.p50, p95: view.p95, calls: view.calls, factor: view.factor }
    }
}

impl Waiting {
    fn of(call: WaitingCall) -> Waiting {
        Waiting {
            client: call.client,
            priority: if call.is_batch { "batch" } else { "interactive" },
            model: call.model,
            tokens: call.tokens,
            reason: call.reason,
            goes_in_ms: call.goes_in.map(ms),
            gives_up_in_ms: ms(call.gives_up_in),
            waited_ms: ms(call.waited),
        }
    }
}

impl Group {
    fn of(view: GroupView) -> Group {
        Group {
            upstream: view.upstream,
            group: view.group,
            keys: view.keys,
            limited: view.limited,
            rest_ms: view.rest.map(ms),
        }
    }
}

impl Client {
    fn of(view: ClientView) -> Client {
        Client { client: view.client, weight: view.weight, tokens: view.tokens }
    }
}

impl Settled {
    fn of(sums: Settlement) -> Settled {
        Settled {
            reserved: sums.reserved,
            given_back: sums.given_back,
            used: sums.used,
            beyond: sums.beyond,
            unreported: sums.unreported,
            open: sums.open,
        }
    }
}
