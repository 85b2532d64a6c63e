//! `[llm]`: upstreams, models with their limits, and clients.
//!
//! Every number of a model or a client becomes an ordinary limit: `llm.QUOTA.rpm`, `llm.QUOTA.tpm`, … and
//! `llm.client.CLIENT.QUOTA.tpm`. So reload, shadow, fallback, metrics and the page treat them as they treat any other. Which limits a
//! call charges, and how much, is for the crate `tollgate-llm`; nothing here counts.
//!
//! Keys are read as passwords are and never shown. Upstream addresses come from here alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tollgate::config::{Extension, Field, Limits, Password, Reader, Section, VariableKind};
use tollgate::store::{LimitError, Micros, Subject};
use tollgate::{Fallback, Limit, Rule};

/// The namespace of the keys that model limits are charged to. It is also what keeps them in one slot of a cluster.
const NAMESPACE: &str = "llm";

/// The lease of a call under a `concurrency` limit. It is renewed while the call runs and lapses with its process.
const LEASE: Micros = Micros::from_secs(60);

/// How long an upstream may be silent, by default: as long as SDKs wait.
const TIMEOUT: Duration = Duration::from_secs(600);

const DAY: Micros = Micros::from_secs(24 * 3_600);

/// How much longer than its window a call counts by default, and the largest share of the window that this is. It is what two calls that
/// were charged one window apart may differ in the time that they take to the provider; beyond that, `margin` must be set.
const MARGIN: Micros = Micros::from_millis(100);
const MARGIN_SHARE: u64 = 40;

/// How much of a call's text can be held back by those who wait, and other bounds that a file may change.
const MAX_WAITING: u64 = 10_000;
const MEMORY_MIB: u64 = 256;

/// The models, upstreams and clients of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LlmConfig {
    /// Under which directory the trail is written, as `gateway/rate_limits.jsonl`; none if not given.
    pub log_dir: Option<PathBuf>,
    /// The window of `rpm` and `tpm`; 60 s by default.
    pub window: Duration,
    /// How much longer than its window a call counts, because calls reach the provider later than they are charged, and not all by
    /// the same time; by default 100 ms, and at most a fortieth of the window.
    pub margin: Option<Duration>,
    /// How long a call waits at most; 60 s by default.
    pub max_wait: Duration,
    /// What an answer is reckoned at while nothing is known of it; 1,000 by default.
    pub default_output_tokens: u64,
    /// What becomes of a model that is not configured.
    pub unknown_model: UnknownModel,
    /// What becomes of a call that is larger than its limit.
    pub on_oversize: Oversize,
    /// How many calls may wait for one quota; 10,000 by default.
    pub max_waiting: usize,
    /// How many bytes of requests are held at once, over all calls; 256 MiB by default.
    pub memory: usize,
    /// Where calls go.
    pub upstreams: Vec<UpstreamConfig>,
    /// The models, in the order of the file.
    pub models: Vec<ModelConfig>,
    /// Who may call. Without any, the gateway serves this machine alone.
    pub clients: Vec<ClientConfig>,
}

impl Default for LlmConfig {
    fn default() -> LlmConfig {
        LlmConfig {
            log_dir: None,
            window: Duration::from_secs(60),
            margin: None,
            max_wait: Duration::from_secs(60),
            default_output_tokens: 1_000,
            unknown_model: UnknownModel::Pass,
            on_oversize: Oversize::Reject,
            max_waiting: usize::try_from(MAX_WAITING).unwrap_or(usize::MAX),
            memory: mebibytes(MEMORY_MIB),
            upstreams: Vec::new(),
            models: Vec::new(),
            clients: Vec::new(),
        }
    }
}

impl LlmConfig {
    /// The model of this name.
    pub fn model(&self, name: &str) -> Option<&ModelConfig> {
        self.models.iter().find(|model| model.name == name)
    }

    /// The upstream of this name.
    pub fn upstream(&self, name: &str) -> Option<&UpstreamConfig> {
        self.upstreams.iter().find(|upstream| upstream.name == name)
    }
}

/// What becomes of a model that is not configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownModel {
    /// Its calls pass without a limit; a warning is logged once.
    #[default]
    Pass,
    /// Its calls are refused.
    Refuse,
}

/// What becomes of a call that is larger than its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oversize {
    /// It is refused at once.
    #[default]
    Reject,
    /// It waits for an empty window, runs, and what it used beyond the limit is a debt that later calls wait for.
    Alone,
}

/// Which provider's rules an upstream follows: what counts, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamKind {
    /// Input and the output cap count when a call arrives.
    OpenAi,
    /// Input that was not read from a cache counts when a call arrives, output as it is produced.
    Anthropic,
}

impl UpstreamKind {
    /// The name used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            UpstreamKind::OpenAi => "openai",
            UpstreamKind::Anthropic => "anthropic",
        }
    }
}

/// Where calls of some models go.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpstreamConfig {
    /// Its name in the file.
    pub name: String,
    /// Whose rules it follows.
    pub kind: UpstreamKind,
    /// Its address, as the provider's SDK has it.
    pub base_url: String,
    /// The certificates to trust it by, in place of the system's.
    pub ca_file: Option<PathBuf>,
    /// How long it may be silent: before the head of an answer, and between two pieces of it; 10 minutes by default.
    pub timeout: Duration,
    /// What it is shown. Without any, what the caller shows is passed on.
    pub keys: Vec<UpstreamKey>,
}

/// A key of a provider, and the quota group that it belongs to: keys of one group share their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpstreamKey {
    /// The key.
    pub key: Password,
    /// Its quota group; the upstream's name by default.
    pub group: String,
}

/// A model and the limits that its calls charge.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// Its name, as calls have it.
    pub name: String,
    /// The name of its upstream.
    pub upstream: String,
    /// The name of its quota in the names of limits; models of one quota share one.
    pub quota: String,
    /// Its limits.
    pub limits: Vec<ModelLimit>,
    /// Whether input that was read from a cache counts too.
    pub count_cache_reads: bool,
}

/// One limit of a model: an ordinary limit of the policy, and what of a call it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelLimit {
    /// The name of the limit in the policy.
    pub name: String,
    /// What of a call it counts.
    pub counts: Counts,
    /// What it is called in reasons: `RPM`, `TPM`, …
    pub unit: &'static str,
    /// How much longer than the provider's window a call counts.
    pub margin: Duration,
}

/// What of a call a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// One for each attempt.
    Requests,
    /// Input and output together.
    Tokens,
    /// Input alone.
    InputTokens,
    /// Output alone.
    OutputTokens,
    /// One while the call runs.
    Concurrency,
}

/// Who may call, and how its calls wait.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientConfig {
    /// Its name, which also is its key under its own limits.
    pub name: String,
    /// What it shows the gateway.
    pub key: Password,
    /// Its share of a quota that is short, against that of the others; 1 by default.
    pub weight: u64,
    /// Whether its calls go before those of others.
    pub priority: Priority,
    /// Its own limits on top of the models' own, by the name of the model.
    pub limits: BTreeMap<String, Vec<ModelLimit>>,
}

/// Whose calls go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for the answer.
    #[default]
    Interactive,
    /// Nobody does.
    Batch,
}

impl Priority {
    /// The name used in configuration and on the page.
    pub const fn name(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Batch => "batch",
        }
    }
}

/// A number of a model or of a client: its field, what it counts, and over how long.
struct Dimension {
    field: &'static str,
    counts: Counts,
    unit: &'static str,
    is_daily: bool,
}

const fn dimension(field: &'static str, counts: Counts, unit: &'static str, is_daily: bool) -> Dimension {
    Dimension { field, counts, unit, is_daily }
}

const DIMENSIONS: [Dimension; 7] = [
    dimension("rpm", Counts::Requests, "RPM", false),
    dimension("tpm", Counts::Tokens, "TPM", false),
    dimension("input_tpm", Counts::InputTokens, "input TPM", false),
    dimension("output_tpm", Counts::OutputTokens, "output TPM", false),
    dimension("rpd", Counts::Requests, "RPD", true),
    dimension("tpd", Counts::Tokens, "TPD", true),
    dimension("concurrency", Counts::Concurrency, "at once", false),
];

/// The numbers that one table gives, and the slice of a minute that a provider judges requests by.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Numbers {
    counts: [Option<u64>; DIMENSIONS.len()],
    slice: Option<Micros>,
}

const ROOT: [&str; 12] = [
    "log_dir",
    "window",
    "margin",
    "max_wait",
    "default_output_tokens",
    "unknown_model",
    "on_oversize",
    "max_waiting",
    "memory_mib",
    "models",
    "upstreams",
    "clients",
];

/// The fields that an environment variable may set.
const VARIABLES: [(&str, VariableKind); 9] = [
    ("log_dir", VariableKind::Text),
    ("window", VariableKind::Text),
    ("max_wait", VariableKind::Text),
    ("margin", VariableKind::Text),
    ("default_output_tokens", VariableKind::Number),
    ("unknown_model", VariableKind::Text),
    ("on_oversize", VariableKind::Text),
    ("max_waiting", VariableKind::Number),
    ("memory_mib", VariableKind::Number),
];

/// The section `[llm]` as [`Config::parse_with`](tollgate::config::Config::parse_with) reads it.
///
/// ```
/// use tollgate::config::Config;
/// use tollgate_llm::LlmSection;
///
/// let mut llm = LlmSection::default();
/// Config::parse_with("[llm]\nwindow = '10s'\n", [], &mut [&mut llm])?;
/// assert_eq!(llm.config.expect("a section").window.as_secs(), 10);
/// # Ok::<(), tollgate::config::Mistakes>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LlmSection {
    /// What the section says; `None` if the file has no section, or an empty one.
    pub config: Option<LlmConfig>,
}

impl Extension for LlmSection {
    fn name(&self) -> &'static str {
        "llm"
    }

    fn variables(&self) -> &'static [(&'static str, VariableKind)] {
        &VARIABLES
    }

    fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>) {
        self.config = read(reader, field, limits);
    }
}

/// Reads the section, and adds its limits to the others.
fn read(reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>) -> Option<LlmConfig> {
    // All but upstreams and clients, which have keys.
    let section = reader.section(field)?.showing(&ROOT[..10]);
    if section.is_empty() {
        return None;
    }
    reader.only(&section, &ROOT);
    let mut config = LlmConfig::default();
    let text = section.field("log_dir").and_then(|field| reader.text(field, "logs"));
    config.log_dir = text.map(PathBuf::from);
    let mut span = |name, into: &mut Duration| {
        if let Some(span) = section.field(name).and_then(|field| reader.span_or_zero(field, "60s")) {
            *into = span.into();
        }
    };
    span("window", &mut config.window);
    span("max_wait", &mut config.max_wait);
    let margin = section.field("margin").and_then(|field| reader.span_or_zero(field, "100ms"));
    config.margin = margin.map(Duration::from);
    let mut whole = |name, example| section.field(name).and_then(|field| reader.whole(field, example, ""));
    if let Some(tokens) = whole("default_output_tokens", 1_000) {
        config.default_output_tokens = tokens;
    }
    if let Some(waiting) = whole("max_waiting", MAX_WAITING) {
        config.max_waiting = usize::try_from(waiting).unwrap_or(usize::MAX);
    }
    if let Some(memory) = whole("memory_mib", MEMORY_MIB) {
        config.memory = mebibytes(memory);
    }
    let unknown = [("pass", UnknownModel::Pass), ("refuse", UnknownModel::Refuse)];
    let choice = section.field("unknown_model").and_then(|field| reader.choice(field, &unknown));
    config.unknown_model = choice.unwrap_or_default();
    let oversize = [("reject", Oversize::Reject), ("alone", Oversize::Alone)];
    let choice = section.field("on_oversize").and_then(|field| reader.choice(field, &oversize));
    config.on_oversize = choice.unwrap_or_default();
    for field in tables(reader, &section, "upstreams") {
        config.upstreams.extend(read_upstream(reader, &field));
    }
    let mut compiled = Compiled::of(&config, limits.rules());
    for field in tables(reader, &section, "models") {
        config.models.extend(read_model(reader, &field, &config.upstreams, &mut compiled));
    }
    let clients = tables(reader, &section, "clients");
    for field in &clients {
        config.clients.extend(read_client(reader, field, &config.models, &mut compiled));
    }
    for upstream in config.upstreams.iter().filter(|upstream| upstream.keys.is_empty()) {
        if let Some(field) = clients.first() {
            let fix = format!(
                "callers show keys of the gateway, and upstream {} has none of its own to show: give it an api_key",
                upstream.name
            );
            reader.misnamed(field, fix);
        }
    }
    limits.add(compiled.rules);
    Some(config)
}

/// The limits that the section has made so far.
struct Compiled {
    window: Micros,
    margin: Option<Micros>,
    /// The names that `[limits]` has.
    taken: Vec<String>,
    rules: Vec<Rule>,
    /// The numbers of each quota, and which model gave them.
    quotas: BTreeMap<String, (String, Numbers, bool)>,
}

impl Compiled {
    fn of(config: &LlmConfig, rules: &[Rule]) -> Compiled {
        let taken = rules.iter().map(|rule| rule.name().to_owned()).collect();
        let (window, margin) = (config.window.into(), config.margin.map(Micros::from));
        Compiled { window, margin, taken, rules: Vec::new(), quotas: BTreeMap::new() }
    }

    /// How much longer than a window of the provider a call counts.
    fn margin_of(&self, window: Micros) -> Micros {
        self.margin.unwrap_or(MARGIN.min(Micros::new(window.get() / MARGIN_SHARE)))
    }

    /// Makes the limits of one table, under names that begin with `stem`.
    fn add(
        &mut self,
        reader: &mut Reader<'_>,
        field: &Field<'_>,
        stem: &str,
        numbers: Numbers,
        applied: Applied,
    ) -> Vec<ModelLimit> {
        let mut limits = Vec::new();
        for (dimension, count) in DIMENSIONS.iter().zip(numbers.counts) {
            let Some(count) = count else { continue };
            let margin = match dimension.counts {
                Counts::Concurrency => Micros::ZERO,
                _ if dimension.is_daily => Micros::ZERO,
                _ => self.margin_of(self.window),
            };
            let limit = match dimension.counts {
                Counts::Concurrency => Limit::concurrency(count, LEASE),
                _ if dimension.is_daily => Limit::sliding_window(count, DAY),
                _ => Limit::sliding_window(count, self.window.saturating_add(margin)),
            };
            let made = self.limit(reader, field, stem, dimension, limit, applied);
            limits.extend(made.map(|limit| ModelLimit { margin: margin.into(), ..limit }));
        }
        if let (Some(slice), Some(rpm)) = (numbers.slice, numbers.counts[0]) {
            // What a minute allows, divided into slices and rounded down: never more than the provider allows.
            let share = u128::from(rpm) * u128::from(slice.get()) / u128::from(self.window.get().max(1));
            let share = u64::try_from(share).unwrap_or(u64::MAX).max(1);
            let each = dimension("slice", Counts::Requests, "requests a slice", false);
            let margin = self.margin_of(slice);
            let limit = Limit::sliding_window(share, slice.saturating_add(margin));
            let made = self.limit(reader, field, stem, &each, limit, applied);
            limits.extend(made.map(|limit| ModelLimit { margin: margin.into(), ..limit }));
        }
        limits
    }

    fn limit(
        &mut self,
        reader: &mut Reader<'_>,
        field: &Field<'_>,
        stem: &str,
        dimension: &Dimension,
        limit: Result<Limit, LimitError>,
        applied: Applied,
    ) -> Option<ModelLimit> {
        let name = format!("llm.{stem}.{}", dimension.field);
        let limit = match limit {
            Ok(limit) => limit,
            Err(error) => {
                reader.misnamed(field, format!("{}: {}", dimension.field, error.fix()));
                return None;
            }
        };
        if let Some(fix) = Rule::name_fault(&name) {
            reader.misnamed(
                field,
                format!("its limit would be called {name}, and {fix}; give it a shorter quota"),
            );
            return None;
        }
        if self.taken.contains(&name) {
            reader.misnamed(field, format!("its limit {name} is also in [limits]; remove it there"));
            return None;
        }
        let rule = Rule::new(name.clone(), limit).ok()?.with_subject(Subject::Namespace);
        let rule = if applied.shadow { rule.shadow() } else { rule };
        let rule = match applied.fallback {
            Some(fallback) => rule.fallback(fallback),
            None => rule,
        };
        if !self.rules.iter().any(|other| other.name() == rule.name()) {
            self.rules.push(rule);
        }
        let margin = Duration::ZERO;
        Some(ModelLimit { name, counts: dimension.counts, unit: dimension.unit, margin })
    }
}

/// How the limits of a table are applied.
#[derive(Clone, Copy, Default)]
struct Applied {
    shadow: bool,
    fallback: Option<Fallback>,
}

fn mebibytes(count: u64) -> usize {
    usize::try_from(count.saturating_mul(1024 * 1024)).unwrap_or(usize::MAX)
}

/// The tables below a field, each a field of its own.
fn tables<'d>(reader: &mut Reader<'_>, section: &Section<'d>, name: &str) -> Vec<Field<'d>> {
    let below = section.field(name).and_then(|field| reader.section(field));
    below.map(|section| section.fields().cloned().collect()).unwrap_or_default()
}

fn read_upstream(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<UpstreamConfig> {
    sound_name(reader, field)?;
    let section = reader.section(field)?.showing(&["kind", "base_url", "ca_file", "timeout"]);
    reader.only(&section, &["kind", "base_url", "ca_file", "timeout", "api_key", "keys"]);
    let kinds = [("openai", UpstreamKind::OpenAi), ("anthropic", UpstreamKind::Anthropic)];
    let kind = match section.field("kind") {
        Some(field) => reader.choice(field, &kinds),
        None => {
            reader.missing(&section, "kind", "\"openai\"");
            None
        }
    };
    let base_url = match section.field("base_url") {
        Some(field) => read_url(reader, field),
        None => {
            reader.missing(&section, "base_url", "\"https://api.openai.com/v1\"");
            None
        }
    };
    let ca_file = section.field("ca_file").and_then(|field| reader.text(field, "ca.pem")).map(PathBuf::from);
    let timeout = section.field("timeout").and_then(|field| reader.span(field, "600s"));
    let timeout = timeout.map_or(TIMEOUT, Duration::from);
    let name = field.name.to_owned();
    let mut keys = Vec::new();
    match (section.field("api_key"), section.field("keys")) {
        (Some(_), Some(keys)) => reader.misnamed(keys, "stands beside api_key; keep one of the two"),
        (Some(field), None) => {
            let key = reader.password(field, "OPENAI_API_KEY")?;
            keys.push(UpstreamKey { key, group: name.clone() });
        }
        (None, Some(field)) => {
            for section in reader.sections(field) {
                reader.only(&section, &["key", "group"]);
                let Some(field) = section.field("key") else {
                    reader.missing(&section, "key", "\"env:OPENAI_API_KEY\"");
                    continue;
                };
                let key = reader.password(field, "OPENAI_API_KEY");
                let group = section.field("group").and_then(|field| read_group(reader, field));
                keys.extend(key.map(|key| UpstreamKey { key, group: group.unwrap_or_else(|| name.clone()) }));
            }
        }
        (None, None) => {}
    }
    Some(UpstreamConfig { name, kind: kind?, base_url: base_url?, ca_file, timeout, keys })
}

fn read_group(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let group = reader.text(field, "org-1")?;
    match Rule::name_fault(group) {
        None => Some(group.to_owned()),
        Some(fix) => {
            reader.misnamed(field, fix);
            None
        }
    }
}

fn read_url(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let example = "https://api.openai.com/v1";
    let text = reader.text(field, example)?;
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_sound = rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && rest.bytes().all(|byte| byte.is_ascii_graphic())
            && !rest.contains(['@', '?', '#', '"', '<', '>', '\\'])
    });
    if !is_sound {
        reader
            .mistake(field, format!("must be an address such as \"{example}\", without a login or a query"));
        return None;
    }
    Some(text.trim_end_matches('/').to_owned())
}

fn read_numbers(reader: &mut Reader<'_>, section: &Section<'_>) -> Numbers {
    let mut numbers = Numbers::default();
    for (dimension, count) in DIMENSIONS.iter().zip(&mut numbers.counts) {
        let field = section.field(dimension.field);
        *count = field.and_then(|field| reader.whole(field, 500, "; leave it out for no such limit"));
    }
    numbers.slice = section.field("slice").and_then(|field| reader.span(field, "1s"));
    if let (Some(field), None) = (section.field("slice"), numbers.counts[0]) {
        reader.misnamed(field, "divides rpm, which is missing");
    }
    numbers
}

fn number_names() -> impl Iterator<Item = &'static str> {
    DIMENSIONS.iter().map(|dimension| dimension.field).chain(["slice"])
}

fn read_model(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    upstreams: &[UpstreamConfig],
    compiled: &mut Compiled,
) -> Option<ModelConfig> {
    let section = reader.section(field)?;
    let own = ["upstream", "quota", "count_cache_reads", "shadow", "fallback"];
    reader.only(&section, &own.into_iter().chain(number_names()).collect::<Vec<_>>());
    let upstream = match (section.field("upstream"), upstreams) {
        (Some(field), _) => read_named(reader, field, upstreams),
        // With one upstream there is nothing to choose.
        (None, [only]) => Some(only.name.clone()),
        (None, _) => {
            reader.missing(&section, "upstream", "\"openai\"");
            None
        }
    };
    let numbers = read_numbers(reader, &section);
    let quota = match section.field("quota") {
        Some(field) => Some((read_group(reader, field)?, true)),
        None => Some((slug(field.name), false)),
    };
    let (quota, is_shared) = quota?;
    let shadow = section.field("shadow").and_then(|field| reader.truth(field)).unwrap_or(false);
    let fallback = section.field("fallback").and_then(|field| reader.fallback(field));
    let cache = section.field("count_cache_reads").and_then(|field| reader.truth(field)).unwrap_or(false);
    let numbers = match compiled.quotas.get(&quota) {
        Some((other, _, false)) => {
            let fix = format!(
                "shares the limit {quota} with {other} by its name; say so with quota = \"{quota}\" in both"
            );
            reader.misnamed(field, fix);
            return None;
        }
        Some((other, _, true)) if !is_shared => {
            let fix = format!("has the name of the quota of {other}; say quota = \"{quota}\" to share it");
            reader.misnamed(field, fix);
            return None;
        }
        // One model of a quota gives the numbers, and others may leave them out.
        Some((_, first, true)) if numbers == Numbers::default() => *first,
        Some((other, first, true)) if *first != numbers => {
            let fix = format!("has other numbers than {other} of the same quota; write them once");
            reader.misnamed(field, fix);
            return None;
        }
        _ => numbers,
    };
    compiled.quotas.entry(quota.clone()).or_insert_with(|| (field.name.to_owned(), numbers, is_shared));
    let limits = compiled.add(reader, field, &quota, numbers, Applied { shadow, fallback });
    Some(ModelConfig {
        name: field.name.to_owned(),
        upstream: upstream?,
        quota,
        limits,
        count_cache_reads: cache,
    })
}

fn read_named(reader: &mut Reader<'_>, field: &Field<'_>, upstreams: &[UpstreamConfig]) -> Option<String> {
    let name = reader.text(field, "openai")?;
    if upstreams.iter().any(|upstream| upstream.name == name) {
        return Some(name.to_owned());
    }
    let known: Vec<&str> = upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
    let known = if known.is_empty() { "none is sound".to_owned() } else { known.join(", ") };
    reader.mistake(field, format!("there is no such upstream under [llm.upstreams]; known: {known}"));
    None
}

fn read_client(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    models: &[ModelConfig],
    compiled: &mut Compiled,
) -> Option<ClientConfig> {
    sound_name(reader, field)?;
    let section = reader.section(field)?.showing(&["weight", "priority", "models"]);
    reader.only(&section, &["key", "weight", "priority", "models"]);
    let key = match section.field("key") {
        Some(field) => reader.password(field, "SEARCH_KEY"),
        None => {
            reader.missing(&section, "key", "\"env:SEARCH_KEY\"");
            None
        }
    };
    let weight = section.field("weight").and_then(|field| reader.whole(field, 1, ""));
    if let (Some(field), Some(1_001..)) = (section.field("weight"), weight) {
        reader.mistake(field, "is too large; at most 1000");
    }
    let priorities = [Priority::Interactive, Priority::Batch].map(|priority| (priority.name(), priority));
    let priority = section.field("priority").and_then(|field| reader.choice(field, &priorities));
    let mut limits = BTreeMap::new();
    for model in tables(reader, &section, "models") {
        let Some(known) = models.iter().find(|known| known.name == model.name) else {
            reader.misnamed(&model, "there is no such model under [llm.models]");
            continue;
        };
        let Some(section) = reader.section(&model) else { continue };
        reader.only(&section, &number_names().collect::<Vec<_>>());
        let numbers = read_numbers(reader, &section);
        let stem = format!("client.{}.{}", field.name, known.quota);
        limits
            .insert(model.name.to_owned(), compiled.add(reader, &model, &stem, numbers, Applied::default()));
    }
    Some(ClientConfig {
        name: field.name.to_owned(),
        key: key?,
        weight: weight.unwrap_or(1),
        priority: priority.unwrap_or_default(),
        limits,
    })
}

/// The name of an upstream or a client, which becomes a part of names of limits and of keys.
fn sound_name(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<()> {
    match Rule::name_fault(field.name) {
        None => Some(()),
        Some(fix) => {
            reader.misnamed(field, fix);
            None
        }
    }
}

/// A model's name as the names of limits can have it.
fn slug(model: &str) -> String {
    let sound = |character: char| match character.to_ascii_lowercase() {
        lower @ ('a'..='z' | '0'..='9' | '_' | '.' | '-') => lower,
        _ => '-',
    };
    model.chars().map(sound).collect()
}

/// The key that model limits are charged to: a quota group of upstream keys, or a client.
///
/// ```
/// assert_eq!(tollgate_llm::llm_key("org-1"), "llm:org-1");
/// ```
pub fn llm_key(name: &str) -> String {
    format!("{NAMESPACE}:{name}")
}

#[cfg(test)]
mod tests {
    use tollgate::config::{Config, Mistakes};

    use super::*;

    fn read(text: &str) -> Result<(Config, Option<LlmConfig>), Mistakes> {
        let mut llm = LlmSection::default();
        Ok((Config::parse_with(text, [], &mut [&mut llm])?, llm.config))
    }

    fn parse(text: &str) -> (Config, LlmConfig) {
        let (config, llm) = read(text).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{text}"));
        (config, llm.expect("a section"))
    }

    /// All mistakes of a file, each by line, field, value and a part of the fix.
    fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
        let mistakes = read(text).expect_err(text);
        for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
            let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
            assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
            assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
        }
        assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
    }

    #[test]
    fn every_variable_sets_its_field() {
        let values = [
            ("LOG_DIR", "logs"),
            ("WINDOW", "10s"),
            ("MAX_WAIT", "30s"),
            ("MARGIN", "50ms"),
            ("DEFAULT_OUTPUT_TOKENS", "500"),
            ("UNKNOWN_MODEL", "refuse"),
            ("ON_OVERSIZE", "alone"),
            ("MAX_WAITING", "7"),
            ("MEMORY_MIB", "64"),
        ];
        let names: Vec<String> = VARIABLES.iter().map(|(field, _)| field.to_uppercase()).collect();
        assert_eq!(values.map(|(name, _)| name.to_owned()).to_vec(), names, "all there are");
        let variables = values.map(|(name, value)| (format!("TOLLGATE_LLM_{name}"), value.to_owned()));
        let mut llm = LlmSection::default();
        Config::parse_with("", variables, &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let llm = llm.config.expect("a section");
        assert_eq!((llm.window.as_secs(), llm.max_wait.as_secs(), llm.default_output_tokens), (10, 30, 500));
        assert_eq!(
            (llm.max_waiting, llm.memory, llm.margin.map(|margin| margin.as_millis())),
            (7, 64 << 20, Some(50))
        );
        assert_eq!((llm.unknown_model, llm.on_oversize), (UnknownModel::Refuse, Oversize::Alone));
        assert_eq!(llm.log_dir, Some(PathBuf::from("logs")));
        let misspelt = [("TOLLGATE_LLM_WINDW".to_owned(), "10s".to_owned())];
        let mistakes = Config::parse_with("", misspelt, &mut [&mut LlmSection::default()]).unwrap_err();
        assert!(mistakes.to_string().contains("did you mean `TOLLGATE_LLM_WINDOW`?"), "{mistakes}");
    }

    /// As the documentation has it.
    const EXAMPLE: &str = r#"
[llm]
log_dir = "logs"
window = "60s"
max_wait = "60s"
default_output_tokens = 1000
unknown_model = "pass"
on_oversize = "reject"
[llm.upstreams.openai]
kind = "openai"
base_url = "https://api.openai.com/v1"
keys = [{ key = "env:OPENAI_API_KEY", group = "org-1" }]
[llm.models."gpt-4o"]
upstream = "openai"
rpm = 500
tpm = 30_000
quota = "gpt-4o-family"
[llm.clients.search-team]
key = "env:SEARCH_KEY"
weight = 3
priority = "interactive"
models."gpt-4o" = { tpm = 10_000 }
"#;

    #[test]
    fn the_documented_section_becomes_ordinary_limits() {
        let (config, llm) = parse(EXAMPLE);
        let rules: Vec<(&str, String)> =
            config.policy.rules().iter().map(|rule| (rule.name(), rule.allowance().to_string())).collect();
        let expected = [
            ("llm.gpt-4o-family.rpm", "500 in any 1m0.1s"),
            ("llm.gpt-4o-family.tpm", "30000 in any 1m0.1s"),
            ("llm.client.search-team.gpt-4o-family.tpm", "10000 in any 1m0.1s"),
        ];
        assert_eq!(rules.len(), expected.len(), "{rules:?}");
        for ((name, _), (expected, _)) in rules.iter().zip(expected) {
            assert_eq!(*name, expected);
        }
        assert_eq!(llm.models[0].limits.iter().map(|limit| limit.unit).collect::<Vec<_>>(), ["RPM", "TPM"]);
        assert_eq!(llm.clients[0].limits["gpt-4o"][0].counts, Counts::Tokens);
        assert_eq!(llm.upstreams[0].keys[0].group, "org-1");
        let shown = format!("{llm:?}");
        assert!(!shown.contains("sk-"), "{shown}");
    }

    /// The margin is a share of short windows, and what the file says wherever it says something.
    #[test]
    fn a_call_counts_a_little_longer_than_its_window() {
        let counted = |rest: &str, model: &str| {
            let text = format!(
                "{rest}\n[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n[llm.models.x]\n{model}"
            );
            let limits: Vec<Limit> = parse(&text)
                .0
                .policy
                .rules()
                .iter()
                .filter_map(|rule| match rule.allowance() {
                    tollgate::Allowance::Limited(limit) => Some(*limit),
                    _ => None,
                })
                .collect();
            limits
        };
        let window =
            |count: u64, millis: u64| Limit::sliding_window(count, Micros::from_millis(millis)).unwrap();
        assert_eq!(counted("", "rpm = 5"), [window(5, 60_100)]);
        assert_eq!(counted("llm.window = '2s'", "rpm = 5"), [window(5, 2_050)]);
        assert_eq!(counted("llm.margin = '0s'", "rpm = 5"), [window(5, 60_000)]);
        assert_eq!(counted("llm.margin = '300ms'\nllm.window = '2s'", "rpm = 5"), [window(5, 2_300)]);
        assert_eq!(counted("", "rpm = 600\nslice = '1s'"), [window(600, 60_100), window(10, 1_025)]);
        assert_eq!(counted("", "rpd = 7"), [window(7, 86_400_000)], "a day is long enough");
    }

    #[test]
    fn models_share_a_quota_only_where_they_say_so() {
        let base = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n[llm.models]\n";
        let (shared, llm) = parse(&format!("{base}x = {{ rpm = 5, quota = 'q' }}\ny = {{ quota = 'q' }}"));
        assert_eq!(llm.models[0].limits, llm.models[1].limits);
        assert_eq!(shared.policy.rules().len(), 1);
        for (models, field, fix) in [
            (
                "'GPT/4' = { rpm = 5 }\n'gpt-4' = { rpm = 5 }",
                "llm.models.gpt-4",
                "shares the limit gpt-4 with GPT/4",
            ),
            (
                "x = { rpm = 5, quota = 'y' }\ny = { rpm = 5 }",
                "llm.models.y",
                "has the name of the quota of x",
            ),
            (
                "x = { rpm = 5, quota = 'q' }\ny = { rpm = 6, quota = 'q' }",
                "llm.models.y",
                "other numbers than x",
            ),
        ] {
            check(&format!("{base}{models}"), &[(6, field, "", fix)]);
        }
    }

    #[test]
    fn mistakes_are_named_by_field_and_line() {
        let base = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n";
        for (text, line, field, value, fix) in [
            ("[llm.models.x]\nrpm = 0", 5, "llm.models.x.rpm", "0", "leave it out for no such limit"),
            ("[llm.models.x]\ntmp = 5", 5, "llm.models.x.tmp", "5", "did you mean `tpm`?"),
            ("[llm.models.x]\nupstream = 'b'", 5, "llm.models.x.upstream", "'b'", "no such upstream"),
            ("[llm.models.x]\nslice = '1s'", 5, "llm.models.x.slice", "", "divides rpm"),
            ("[llm]\nwindow = 60", 5, "llm.window", "60", "must be a duration in quotes"),
            ("[llm.clients.c]\nweight = 2", 4, "llm.clients.c.key", "", "is missing"),
        ] {
            let text = format!("{base}{text}");
            let Err(mistakes) = read(&text) else { panic!("{text} was accepted") };
            let found = mistakes.iter().any(|mistake| {
                mistake.line == line
                    && mistake.field == field
                    && (value.is_empty() || mistake.value == value)
                    && mistake.fix.contains(fix)
            });
            assert!(found, "{text}:\n{mistakes}");
        }
        check(
            "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'ftp://x'",
            &[(3, "llm.upstreams.a.base_url", "'ftp://x'", "must be an address such as")],
        );
    }

    #[test]
    fn keys_are_never_shown() {
        let text =
            "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'sk-secret'\n";
        assert!(!format!("{:?}", parse(text)).contains("sk-secret"));
        let mistakes = read(&text.replace("api_key", "apikey")).unwrap_err().to_string();
        assert!(!mistakes.contains("sk-secret"), "{mistakes}");
    }
}
