//! What may be asked of the commands that read recorded traffic.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// The recorded traffic, and how it is read.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// The recorded traffic, plain or in gzip or zstd; several files are one stream; - reads stdin.
    #[arg(value_name = "LOG", required = true)]
    pub(crate) logs: Vec<PathBuf>,
    /// How the logs are written; auto goes by the file's name, then by its first lines.
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub(crate) format: Format,
    /// Stop where a line cannot be read, instead of counting such lines and leaving them out.
    #[arg(long)]
    pub(crate) strict: bool,
    /// What is done by default.
    #[arg(long, hide = true, conflicts_with = "strict")]
    pub(crate) skip_bad: bool,
    /// Show hashes of keys in place of keys, everywhere: those of the log and the page, if RL_LOG_SALT is the same.
    #[arg(long)]
    pub(crate) hash_keys: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate backtest --config tollgate.toml traffic.csv\n  \
    tollgate backtest --config tollgate.toml --decisions out.jsonl monday.jsonl tuesday.jsonl\n  \
    tollgate backtest --config tollgate.toml --report out.html /var/log/nginx/access.log /var/log/nginx/access.log.2.gz\n  \
    tollgate backtest --config now.toml --config next.toml access.log\n  \
    kubectl logs deploy/envoy | tollgate backtest --config tollgate.toml -")]
pub(crate) struct BacktestArgs {
    /// The policy (TOML); - reads stdin. Several are shown side by side.
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) config: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Write one JSON object for each limit that a request meets, in the order of replay; - writes to stdout (and the summary to stderr).
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) decisions: Option<PathBuf>,
    /// Write one JSON object for each key that was denied: how often, by which limits, and when and where first; - writes to stdout.
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) denied_keys: Option<PathBuf>,
    /// Write the summary as one HTML file with pictures; - writes to stdout (and the summary to stderr).
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,
    /// Show how much each key needed at most, beside the limit, and sliding counters beside the exact log; the report has both.
    #[arg(long)]
    pub(crate) peaks: bool,
    /// Print the summary as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate suggest --config tollgate.toml access.log\n  \
    tollgate suggest --config tollgate.toml --limit api --window 1m --keys 0.5 traffic.csv\n  \
    tollgate suggest --config tollgate.toml --requests 0.1 access.log.1.gz access.log")]
pub(crate) struct SuggestArgs {
    /// The config (TOML) that names the limits and the routes; - reads stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Only these limits of the config.
    #[arg(long = "limit", value_name = "NAME")]
    pub(crate) limits: Vec<String>,
    /// The window that is counted in, such as 1s, 1m or 1h [default: that of each limit, and 1m where it has none].
    #[arg(long, value_name = "DURATION")]
    pub(crate) window: Option<String>,
    /// At most this share of keys, in per cent with up to three decimals, is denied anything [default: 1].
    #[arg(long, value_name = "PERCENT", conflicts_with = "requests")]
    pub(crate) keys: Option<String>,
    /// At most this share of requests, in per cent with up to three decimals, is denied.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) requests: Option<String>,
    /// Answer with one JSON object on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// By the file's name, then by its first lines.
    Auto,
    /// A header, then a line for each charge.
    Csv,
    /// A JSON object for each charge; also the trail of a model gateway.
    Jsonl,
    /// Access logs of web servers, common or combined; the config's [[routes]] say which requests meet which limit.
    Combined,
    /// Access logs that have a JSON object a line, as nginx and Envoy write them; with [[routes]] as well.
    Json,
    /// The decision log of a server; keys are hashes.
    Decisions,
}
