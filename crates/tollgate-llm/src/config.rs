//! `[llm]`: upstreams, models with their limits, and clients.
//!
//! Every number of a model or a client becomes an ordinary limit: `llm.QUOTA.rpm`, `llm.QUOTA.tpm`, … and
//! `llm.client.CLIENT.QUOTA.tpm`. So reload, shadow, fallback, metrics and the page treat them as they treat any other. Which limits a
//! call charges, and how much, is for `limits.rs`; nothing here counts. `read.rs` reads the section, `compiled.rs` makes the limits.
//!
//! Keys are read as passwords are and never shown. Upstream addresses come from here alone.

mod compiled;
mod read;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tollgate::Key;
use tollgate::config::{Extension, Field, Limits, Password, Reader, VariableKind};
use tollgate::store::Micros;

/// The namespace of the keys that model limits are charged to. It is also what keeps them in one slot of a cluster.
const NAMESPACE: &str = "llm";

/// The lease of a call under a `concurrency` limit. It is renewed while the call runs and lapses with its process.
pub(crate) const LEASE: Micros = Micros::from_secs(60);

/// How long an upstream may be silent, by default: as long as SDKs wait.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How much of a call's text waiting calls may hold, and other bounds that a file may change.
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
    /// the same time; by default 250 ms, and at most a fortieth of the window.
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

    /// The names of all limits that the section makes, of models and of clients; those of a shared quota more than once.
    pub fn limit_names(&self) -> impl Iterator<Item = &str> {
        let of_models = self.models.iter().flat_map(|model| &model.limits);
        let of_clients = self.clients.iter().flat_map(|client| client.limits.values().flatten());
        of_models.chain(of_clients).map(|limit| limit.name.as_str())
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
    /// Limits of `[limits]` that its calls charge too.
    pub shared: SharedLimits,
    /// Whether input that was read from a cache counts too.
    pub count_cache_reads: bool,
}

/// Limits of `[limits]` that every attempt of a call charges, one each, in the same charge as its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedLimits {
    /// Their names.
    pub limits: Vec<String>,
    /// The key that they are charged to; `{client}` and `{model}` stand for the names of both. By default `global`.
    pub key: Option<String>,
}

impl SharedLimits {
    /// The key for a call of this model by this client.
    ///
    /// ```
    /// let mut shared = tollgate_llm::SharedLimits::default();
    /// assert_eq!(shared.key("gpt-4o", None), "global");
    /// shared.key = Some("team:{client}".to_owned());
    /// assert_eq!(shared.key("gpt-4o", Some("search")), "team:search");
    /// ```
    pub fn key(&self, model: &str, client: Option<&str>) -> String {
        // A separator inside a name must not make another key of it.
        let part = |name: &str| name.replace('%', "%25").replace(':', "%3A");
        let template = self.key.as_deref().unwrap_or("global");
        template.replace("{client}", &part(client.unwrap_or("default"))).replace("{model}", &part(model))
    }

    /// Whether each client is charged by itself.
    pub fn is_by_client(&self) -> bool {
        self.key.as_deref().is_some_and(|key| key.contains("{client}"))
    }
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
    /// Limits of `[limits]` that its calls charge too, of whichever model.
    pub shared: SharedLimits,
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
        self.config = read::read(reader, field, limits);
    }
}

fn mebibytes(count: u64) -> usize {
    usize::try_from(count.saturating_mul(1024 * 1024)).unwrap_or(usize::MAX)
}

/// The key that model limits are charged to: a quota group of upstream keys, or a client.
///
/// ```
/// assert_eq!(tollgate_llm::llm_key("org-1"), "llm:org-1");
/// assert_eq!(tollgate_llm::llm_key("org:1"), "llm:org%3A1");
/// ```
pub fn llm_key(name: &str) -> String {
    // What no key can have, such as a control character, is denied as it stands.
    Key::new(NAMESPACE, name).map_or_else(|_| format!("{NAMESPACE}:{name}"), |key| key.canonical().to_owned())
}

#[cfg(test)]
mod tests;
