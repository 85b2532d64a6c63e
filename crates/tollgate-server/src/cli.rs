//! The arguments of `tollgate`, and their help.
//!
//! Only the words of the command line live here; each command's room does the work. A call that clap refuses is reported in one
//! line like every other error, with clap's own tip when it has one.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};

mod logs;
mod overrides;

use crate::failure::Failure;

pub(crate) use self::logs::{BacktestArgs, Format, LogArgs, SuggestArgs};
pub(crate) use self::overrides::{
    AdminArgs, OverrideArgs, OverrideCommand, RemoveOverrideArgs, SetOverrideArgs,
};

/// Exact rate limiting: serve a policy, call a running server, replay recorded traffic, measure it on this machine.
#[derive(Parser)]
#[command(
    name = "tollgate",
    version,
    arg_required_else_help = true,
    after_help = "Try it on the example:\n  \
        tollgate serve\n  \
        tollgate check api user:42\n  \
        tollgate backtest --config examples/tollgate.toml examples/traffic.csv\n\n\
        Exit codes: 0 done or allowed, 1 denied, 2 could not (one clear line on stderr says why)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Answer checks over the network: JSON over HTTP, Envoy's protocol and Redis's, with a live page
    ///
    /// Without a config it serves an example policy, counting in its own memory. A changed config is read again, and
    /// counters stay. SIGTERM and ctrl-c finish the requests in progress and exit with code 0.
    Serve(ServeArgs),
    /// Serve an example policy with simulated traffic, so that the page has data
    ///
    /// Everything is real except the callers: a few tenants, some of them over their limits, a burst now and then, and one with a
    /// hostile name. Keys are shown, because they belong to nobody.
    Demo(DemoArgs),
    /// Charge a key on a running server: exit code 0 allowed, 1 denied, 2 could not decide
    Check(CheckArgs),
    /// Show the state of a key on a running server; nothing is charged
    Status(OfKeyArgs),
    /// Forget all charges of a key on a running server
    Reset(ResetArgs),
    /// Block a key on a running server, free it, or give it other numbers, until a time
    ///
    /// The override is in the store: every server on the store applies it within a second, also after a restart. The counters of the
    /// key stay. `tollgate override list` shows all, `tollgate override remove LIMIT KEY` takes one back.
    Override(Box<OverrideArgs>),
    /// The limits of a running server
    Limits(LimitsArgs),
    /// Watch a running server: its limits and what they decide, once a second, until q
    Top(TopArgs),
    /// Check a config file: every mistake with its line, field, value and fix
    ///
    /// For a valid file it prints a table of its limits and exits with code 0. Otherwise every mistake is reported on
    /// stderr with its line, field, value and fix, and the exit code is 2.
    ///
    /// What is missing on this machine is a warning on stderr: a secret whose environment variable is not set, a file of
    /// certificates that is not there, a variable TOLLGATE_… that sets nothing. A build machine need not have any of it;
    /// use --strict on a server.
    ///
    /// With --against a running server reports what the file would change. It reads the file with its own environment, and
    /// changes nothing.
    Validate(ValidateArgs),
    /// Show background jobs: the count of each limit, waiting jobs, when the backlog will be done
    ///
    /// Reads the database that the config names, so that all workers are included. Also closes a key, so that no job that is charged to it
    /// starts for a while, and opens it again.
    Jobs(JobsArgs),
    /// Replay recorded traffic through a policy: which keys would have been denied, and when
    ///
    /// Each line of a log is one charge: a time, the name of a limit, a key and, optionally, a cost. Lines are replayed in
    /// time order on a virtual clock, through the same code that decides in production, so the answers are the ones that
    /// production would have given.
    ///
    /// CSV has a header with the columns time, limit, key and optionally cost, in any order; JSONL has one object a line with
    /// the same names. A time is RFC 3339 (2024-05-01T12:00:00.5+02:00) or UNIX seconds with up to six decimals
    /// (1714557600.5).
    ///
    /// Access logs of Apache and nginx, common or combined, are read as they are, and so are those of nginx and Envoy that have a
    /// JSON object a line. The config's [[routes]] decide which requests are charged under which limit, by path, method, client, user and header, and by which
    /// key; all limits of one request are charged as one, all or none. The decision log of a server and the trail of its model gateway
    /// can be replayed too. Files in gzip and zstd are unpacked as they are read.
    ///
    /// A line that cannot be read is counted and skipped; the first few are shown with their number and the mistake.
    Backtest(BacktestArgs),
    /// Find limits for recorded traffic: the smallest that would have denied at most a given share of keys or requests
    ///
    /// For each limit of the config and each strategy, the smallest whole number is found by the kernel that decides in production, with
    /// what other shares would cost. Each limit is examined alone: if a request has several, the others are assumed to have
    /// room. The numbers of the config are not used; its routes select the requests of an access log.
    Suggest(SuggestArgs),
    /// Print the hash by which logs, traces and the page name a key
    ///
    /// The salt is RL_LOG_SALT, as the server has it. With it you can find a customer in a log without names.
    Hash(HashArgs),
    /// Language models: count the tokens of a request, run a file of requests within their limits
    Llm(LlmArgs),
    /// Measure throughput and latency of a store, and the memory of keys, on this machine
    ///
    /// In memory: a hot key, 1,000 keys and many keys, one check at a time and in groups of 16, on one thread and on several.
    /// Latency is sampled: one call in many is timed, so that measuring does not dominate what is measured.
    ///
    /// On Redis or PostgreSQL: a hot key and many keys, one check at a time and in groups of 16, from one caller and from many
    /// at once, through the library as a service would. The keys are under a limit with a random name, and
    /// are removed at the end. If the store fails meanwhile, the exit code is 2.
    Bench(BenchArgs),
    /// Make a config from that of another rate limiter
    ///
    /// The config goes to stdout, or to a file, and is valid for `tollgate validate`. What could not be
    /// converted is reported on stderr, each with its line; the config is still written, and the exit code is 2 unless --partial
    /// is given.
    Import(ImportArgs),
    /// Print tab completion for a shell
    ///
    /// For bash: tollgate completions bash > /etc/bash_completion.d/tollgate
    Completions(CompletionsArgs),
    /// Print the manual page, or that of one command
    ///
    /// To read it: tollgate man | man -l -
    Man(ManArgs),
}

#[derive(Args, Default)]
#[command(
    after_help = "Examples:\n  tollgate serve\n  tollgate serve --config tollgate.toml --listen 127.0.0.1:9000 --grpc 127.0.0.1:9001"
)]
pub(crate) struct ServeArgs {
    /// The policy (TOML); without one, an example is served.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The address of the API and the page [default: from the config, or 127.0.0.1:8080].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// The address for Envoy, over gRPC [default: from the config, or 127.0.0.1:8081].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) grpc: Option<String>,
    /// The address for the Redis protocol [default: from the config, or 127.0.0.1:6380].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) resp: Option<String>,
    /// Listen beyond this machine without a secret: HTTP without an admin token, RESP without a password, gRPC.
    #[arg(long)]
    pub(crate) without_token: bool,
    /// Whether this is `tollgate demo`.
    #[arg(skip)]
    pub(crate) is_demo: bool,
}

/// Where the server is.
#[derive(Args)]
pub(crate) struct ServerArgs {
    /// The running server.
    #[arg(
        id = "server",
        long = "server",
        value_name = "URL",
        env = "TOLLGATE_SERVER",
        default_value = "http://127.0.0.1:8080"
    )]
    pub(crate) url: String,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  tollgate check api user:42\n  tollgate check api user:42 --cost 5 && ./send-it"
)]
pub(crate) struct CheckArgs {
    /// The name of the limit.
    pub(crate) limit: String,
    /// The key, as namespace:key[:version].
    pub(crate) key: String,
    /// How much to charge.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) cost: u64,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Print the server's JSON response.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct OfKeyArgs {
    /// The name of the limit.
    pub(crate) limit: String,
    /// The key, as namespace:key[:version].
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Print the server's JSON response.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    pub(crate) of: OfKeyArgs,
    /// The admin token, where the server has one; others see arguments, so prefer the variable.
    #[arg(long, value_name = "TOKEN", env = "TOLLGATE_ADMIN_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Do not ask first.
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Args)]
pub(crate) struct LimitsArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Print the server's JSON response.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
#[command(after_help = "Example:\n  RL_LOG_SALT=… tollgate hash user:42")]
pub(crate) struct HashArgs {
    /// The key, as namespace:key[:version].
    #[arg(value_name = "KEY", required = true)]
    pub(crate) keys: Vec<String>,
}

#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Args)]
pub(crate) struct ManArgs {
    /// The command; without one, all of it.
    pub(crate) command: Option<String>,
}

#[derive(Args)]
#[command(after_help = "Example:\n  tollgate demo --listen 127.0.0.1:9000")]
pub(crate) struct DemoArgs {
    /// The address of the API and the page.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) listen: String,
    /// The address for Envoy, over gRPC [default: 127.0.0.1:8081].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) grpc: Option<String>,
    /// The address for the Redis protocol [default: 127.0.0.1:6380].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) resp: Option<String>,
    /// Listen beyond this machine without a secret.
    #[arg(long)]
    pub(crate) without_token: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate validate tollgate.toml\n  \
    tollgate validate tollgate.toml --against http://127.0.0.1:8080")]
pub(crate) struct ValidateArgs {
    /// The config (TOML); - reads stdin.
    #[arg(value_name = "FILE", required_unless_present = "config")]
    file: Option<PathBuf>,
    /// The same file, as in other commands.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
    /// Ask a running server what the file would change: limits that are added, removed and changed, and fields that need a restart.
    #[arg(long, value_name = "URL")]
    pub(crate) against: Option<String>,
    /// The admin token of that server, where it has one; others see arguments, so prefer the variable.
    #[arg(long, value_name = "TOKEN", env = "TOLLGATE_ADMIN_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Fail on warnings too: a secret that is not set, a file that is missing, a variable that sets nothing.
    #[arg(long)]
    pub(crate) strict: bool,
    /// Answer with one JSON object on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ValidateArgs {
    /// The file, by whichever of its two names; clap asks for one of them.
    pub(crate) fn file(&self) -> &Path {
        self.file.as_deref().or(self.config.as_deref()).unwrap_or(Path::new("-"))
    }
}

#[derive(Args)]
pub(crate) struct JobsArgs {
    #[command(subcommand)]
    pub(crate) command: JobsCommand,
}

#[derive(Subcommand)]
pub(crate) enum JobsCommand {
    /// Every key: its count, its limit, when it resets, waiting jobs, the next slot and when the backlog will be done
    #[command(after_help = "Example:\n  tollgate jobs status --config tollgate.toml")]
    Status {
        /// The config (TOML) with a section [jobs].
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Answer with one JSON object on stdout.
        #[arg(long)]
        json: bool,
    },
    /// Close a key for all workers: no job that is charged to it starts until then
    #[command(after_help = "Example:\n  tollgate jobs close job:send_email 10m --config tollgate.toml")]
    Close {
        /// `job:TYPE`, `queue:NAME`, `global`, or `job:TYPE:VALUE` where a field splits it.
        key: String,
        /// For how long, such as 30s or 10m.
        #[arg(value_name = "DURATION")]
        wait: String,
        /// The config (TOML) with a section [jobs].
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Open a key that was closed
    Open {
        /// The key, as it was closed or as `jobs status` shows it.
        key: String,
        /// The config (TOML) with a section [jobs].
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate bench --keys 100000 --seconds 5\n  \
    tollgate bench --store redis://127.0.0.1:6379\n  \
    tollgate bench --store postgres://127.0.0.1/app --callers 16\n  \
    tollgate bench --config tollgate.toml\n\n\
    Others on this machine see arguments: a password is better in a config or in REDIS_PASSWORD,\n\
    TOLLGATE_STORE_REDIS_PASSWORD or TOLLGATE_STORE_POSTGRES_PASSWORD.")]
pub(crate) struct BenchArgs {
    /// The store to measure: memory, or redis://…, rediss://…, postgres://… [default: memory].
    #[arg(long, value_name = "STORE", conflicts_with = "config")]
    pub(crate) store: Option<String>,
    /// A config whose [store] is measured, as `serve` would use it: a cluster, certificates, passwords; - reads stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How many distinct keys the largest run has [default: 1000000 in memory, else 10000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=50_000_000))]
    pub(crate) keys: Option<u32>,
    /// How many threads the parallel runs have, or serve the callers [default: the cores of this machine].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How many callers a shared store has at once [default: 64].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) callers: Option<u16>,
    /// How long to measure, all runs together.
    #[arg(long, value_name = "S", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) seconds: u32,
    /// Answer with one JSON object on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct LlmArgs {
    #[command(subcommand)]
    pub(crate) what: LlmCommand,
}

#[derive(Subcommand)]
pub(crate) enum LlmCommand {
    /// Count the tokens of a text or of a request body: exact for OpenAI's models, an estimate for others
    Count(LlmCountArgs),
    /// Run a file of requests within the limits of their models, and write a file of results
    ///
    /// The input is that of OpenAI's batches: one object a line with custom_id, method, url and body. Requests wait for their limits and are
    /// sent again where that may help. The output has one line for each custom_id, in the order in which they end. A run that was ended, in
    /// whatever way, goes on where it was: the same command sends nothing again whose result is in the output.
    ///
    /// Nothing is sent if a line of the input is wrong. The exit code is 0 if all requests were answered, 1 if some failed (their lines say
    /// why), 2 if the run could not be made and 130 if it was stopped.
    Run(LlmRunArgs),
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate llm run requests.jsonl --out results.jsonl --config tollgate.toml\n  \
    tollgate llm run requests.jsonl --out results.jsonl --base-url http://127.0.0.1:8080\n\n\
    A line of the input:\n  \
    {\"custom_id\":\"1\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"model\":\"gpt-4o\",\"messages\":[…]}}")]
pub(crate) struct LlmRunArgs {
    /// The requests, one JSON object a line.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Where results are added, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// The config whose [llm] has the upstreams and the limits.
    #[arg(long, value_name = "FILE", conflicts_with = "base_url")]
    pub(crate) config: Option<PathBuf>,
    /// A gateway that keeps the limits, in place of a config.
    #[arg(long, value_name = "URL")]
    pub(crate) base_url: Option<String>,
    /// What the gateway is shown: env:NAME, or the key itself.
    #[arg(long, value_name = "KEY", requires = "base_url")]
    pub(crate) api_key: Option<String>,
    /// The client of the config whose weight, priority and limits the requests have.
    #[arg(long, value_name = "NAME", conflicts_with = "base_url")]
    pub(crate) client: Option<String>,
    /// How many requests wait or are on their way at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) in_flight: u16,
    /// How often a request is sent at most. A 429 that says when to come back does not count.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) attempts: u32,
    /// Send the requests again that failed in an earlier run.
    #[arg(long)]
    pub(crate) retry_failed: bool,
    /// Answer with one JSON object on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    tollgate llm count prompt.txt --model gpt-4o\n  \
    tollgate llm count request.json --model claude-sonnet-4-5 --json\n\n\
    A file that is a JSON object with `messages` is counted as a request: messages with their overhead, system text and tools.\n  \
    The vocabularies of OpenAI's models are public, and their counts exact. All others are estimated as the gateway estimates them at first.")]
pub(crate) struct LlmCountArgs {
    /// The text or the request body; - reads stdin.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// The model whose tokens are counted.
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,
    /// Answer with one JSON object on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    pub(crate) from: ImportFrom,
}

#[derive(Subcommand)]
pub(crate) enum ImportFrom {
    /// From the YAML of envoyproxy/ratelimit: domain, nested descriptors and their limits
    #[command(after_help = "Example:\n  tollgate import envoy ratelimit.yaml --output tollgate.toml")]
    Envoy(ImportFileArgs),
    /// From Kong's declarative config (YAML): the plugins rate-limiting and rate-limiting-advanced, and the routes that they are on
    #[command(after_help = "Example:\n  tollgate import kong kong.yaml --output tollgate.toml")]
    Kong(ImportFileArgs),
    /// From the limits file of limitador (YAML): namespaces, conditions and variables
    #[command(after_help = "Example:\n  tollgate import limitador limits.yaml --output tollgate.toml")]
    Limitador(ImportFileArgs),
    /// From LiteLLM's config.yaml: models with their rpm, tpm and max_parallel_requests
    #[command(after_help = "Example:\n  tollgate import litellm config.yaml --output tollgate.toml")]
    Litellm(ImportFileArgs),
    /// From nginx: limit_req_zone and limit_req, in http, server and location
    #[command(after_help = "Example:\n  tollgate import nginx nginx.conf --output tollgate.toml")]
    Nginx(ImportFileArgs),
}

#[derive(Args)]
pub(crate) struct ImportFileArgs {
    /// The configuration; - reads stdin.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Where the config goes [default: stdout]; a file that is there already is left alone.
    #[arg(long, value_name = "OUT.toml")]
    pub(crate) output: Option<PathBuf>,
    /// Replace the file that --output names.
    #[arg(long, requires = "output")]
    pub(crate) force: bool,
    /// Exit with 0 though something could not be carried over.
    #[arg(long)]
    pub(crate) partial: bool,
}

/// The command, or the exit code if clap has answered already.
pub(crate) fn parse() -> Result<Command, ExitCode> {
    Cli::try_parse().map(|cli| cli.command).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A closed stdout or stderr is nobody's fault here either.
            let _ = error.print();
            u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
        }
        _ => Failure::new(one_line(&error.render().to_string())).report(),
    })
}

/// The environment variables that arguments are taken from.
pub(crate) fn variables() -> Vec<String> {
    fn collect(command: &clap::Command, names: &mut Vec<String>) {
        names.extend(command.get_arguments().filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned())));
        command.get_subcommands().for_each(|command| collect(command, names));
    }
    let mut names = Vec::new();
    collect(&Cli::command(), &mut names);
    names
}

/// Prints tab completion.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tollgate", &mut text);
    io::stdout().lock().write_all(&text).map_err(Failure::answering)
}

/// Prints the manual page.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let mut all = Cli::command();
    // Names the commands as they are called: `tollgate check`.
    all.build();
    let page = match &args.command {
        None => all,
        Some(name) => match all.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                return Err(Failure::new(format!(
                    "there is no command {name:?}; `tollgate help` lists them"
                )));
            }
        },
    };
    let mut text = Vec::new();
    let rendered = clap_mangen::Man::new(page).render(&mut text);
    rendered.and_then(|()| io::stdout().lock().write_all(&text)).map_err(Failure::answering)
}

/// Clap's message and tips in one line: what stands before the usage, joined.
fn one_line(rendered: &str) -> String {
    let mut line = String::new();
    for part in rendered.lines().map(str::trim).filter(|part| !part.is_empty()) {
        if part.starts_with("Usage:") || part.starts_with("For more information") {
            break;
        }
        let part = part.trim_start_matches("error: ").trim_start_matches("tip: ");
        match line.chars().last() {
            None => {}
            Some(':') => line.push(' '),
            Some(_) if part.starts_with('[') => line.push(' '),
            Some(_) => line.push_str("; "),
        }
        line.push_str(part);
    }
    line.push_str("; --help tells more");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_clap_refuses_is_one_line() {
        for (call, expected) in [
            ("tollgate backtest", "required arguments were not provided: --config <FILE>; <LOG>...;"),
            (
                "tollgate validat x",
                "unrecognized subcommand 'validat'; a similar subcommand exists: 'validate';",
            ),
            (
                "tollgate backtest --config c --format xml l",
                "'xml' for '--format <FORMAT>' [possible values: auto",
            ),
            ("tollgate bench --keys 0", "invalid value '0' for '--keys <N>': 0 is not in 1..=50000000;"),
        ] {
            let Err(error) = Cli::try_parse_from(call.split(' ')) else { panic!("{call} was accepted") };
            let line = one_line(&error.render().to_string());
            assert!(line.contains(expected), "{call}: {line}");
            assert!(!line.contains('\n'), "{call}: {line}");
        }
    }
}
