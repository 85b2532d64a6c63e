//! Language models on the page, as this gateway sees them: `GET /v1/llm`.
//!
//! The usage of a limit is read from the store, so it includes all gateways that share it; waiting and settled calls are this
//! gateway's own. Made at most once a second for all viewers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use tollgate::config::StoreMode;
use tollgate::store::{Micros, StoreState};
use tollgate_llm::{
    ClientView, Estimates, GroupView, ModelLimitView, ModelView, ModelsOverview, Reports, Settlement,
    TokenSeries, WaitingCall,
};

use super::feed::Trouble;
use crate::app::{App, State};

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
    /// The minute that is counted last, in seconds since 1970, and the second.
    minute: u64,
    second: u64,
    window_ms: u64,
    waiting: usize,
    median_wait_ms: Option<u64>,
    models: Vec<Model>,
    line: Vec<Waiting>,
    groups: Vec<Group>,
    clients: Vec<Client>,
    settlement: Settled,
    /// Refusals of providers, for their limits, that reached a caller in the last hour.
    passed_on: u64,
    /// When groups of keys were parked.
    parked: Vec<Parked>,
    /// When the store was down.
    troubles: Vec<Trouble>,
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
    /// Where its limits are counted: `here`, `remote`, or by a fallback.
    counted: String,
    /// Tokens of each of the last minutes.
    input: Vec<u64>,
    output: Vec<u64>,
    /// Of the last five minutes and of the last day.
    recent: Series,
    day: Series,
    estimates: Option<Estimated>,
}

#[derive(Serialize)]
struct Series {
    step: u64,
    input: Vec<u64>,
    output: Vec<u64>,
}

#[derive(Serialize)]
struct Parked {
    group: String,
    from: u64,
    to: u64,
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
    /// In seconds since 1970.
    parked_since: Option<u64>,
    stands_in_for: Vec<String>,
    /// What the provider's reports say beside our own count: nothing yet, `agree`, or how much others use.
    reports: Option<&'static str>,
    others: Option<Others>,
}

#[derive(Serialize)]
struct Others {
    used: u64,
    capacity: u64,
    unit: &'static str,
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
        let mut answer = Answer {
            configured: true,
            store: state.config.gate.store.mode.name(),
            minute: app.stats.second() / 60 * 60,
            second: app.stats.second(),
            troubles: app.feed.troubles(),
            trail: trail.map(|dir| dir.join("gateway/rate_limits.jsonl").display().to_string()),
            ..Answer::of(overview)
        };
        for model in &mut answer.models {
            model.counted = counted(&state, model.limits.first().map(|limit| limit.limit.as_str()));
        }
        let text = written(&answer);
        *last = Some((Instant::now(), text.clone()));
        text
    }
}

/// Where the limits of a model are counted now, by one of them.
fn counted(state: &State, limit: Option<&str>) -> String {
    let health = state.gate.store_health().state;
    match (state.config.gate.store.mode, health) {
        (StoreMode::Memory, _) => "here".to_owned(),
        (_, StoreState::Up) => "remote".to_owned(),
        _ => {
            let policy = state.gate.policy();
            let own = limit.and_then(|limit| policy.rule(limit)?.own_fallback());
            format!("fallback: {}", own.unwrap_or(state.config.gate.store.fallback).name())
        }
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
            passed_on: overview.passed_on,
            parked: overview
                .parked
                .into_iter()
                .map(|time| Parked { group: time.group, from: time.from.as_secs(), to: time.to.as_secs() })
                .collect(),
            ..Answer::default()
        }
    }
}

impl Model {
    fn of(view: ModelView) -> Model {
        let [recent, hour, day] = view.tokens;
        Model {
            model: view.model,
            upstream: view.upstream,
            quota: view.quota,
            shadow: view.shadow,
            limits: view.limits.into_iter().map(Limit::of).collect(),
            waiting: view.waiting,
            longest_wait_ms: view.longest_wait.map(ms),
            refused: view.refused,
            counted: String::new(),
            input: hour.input,
            output: hour.output,
            recent: Series::of(recent),
            day: Series::of(day),
            estimates: view.estimates.map(Estimated::of),
        }
    }
}

impl Series {
    fn of(series: TokenSeries) -> Series {
        Series { step: series.step, input: series.input, output: series.output }
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
        let (reports, others) = match view.reports {
            Reports::None => (None, None),
            Reports::Others { used, capacity, unit } => {
                (Some("others"), Some(Others { used, capacity, unit }))
            }
            _ => (Some("agree"), None),
        };
        Group {
            parked_since: view.parked_since.map(|since| since.as_secs()),
            stands_in_for: view.stands_in_for,
            reports,
            others,
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
