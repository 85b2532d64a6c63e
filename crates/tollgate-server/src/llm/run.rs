//! `tollgate llm run`: a file of requests through the executor, and a file of results.
//!
//! `input.rs` reads and checks all requests before the first is sent. `output.rs` keeps the results: a request is done when its line is
//! in the output, so a run that was killed goes on with those that have none. `transport.rs` sends, `progress.rs` shows how far it is.
//! Limits, waiting and retries are the library's.

mod input;
mod output;
mod progress;
mod transport;

use std::collections::VecDeque;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;
use tokio::task::JoinSet;
use tollgate::Tollgate;
use tollgate_llm::executor::{CallErrorKind, CallResult, Executor, ExecutorBuilder, RetryPolicy};
use tollgate_llm::{Caller, LlmConfig, ModelLimits};

use self::input::{Input, RequestLine};
use self::output::Output;
use self::progress::Progress;
use self::transport::Providers;
use crate::cli::LlmRunArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::{source, validate};

/// The exit code of a run that was stopped, as shells have it for ctrl-c.
const STOPPED: u8 = 130;

pub(super) fn run(args: &LlmRunArgs) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start the runtime: {error}")))?;
    let done = runtime.block_on(execute(args));
    runtime.shutdown_background();
    done
}

/// What a run came to.
#[derive(Default)]
struct Summary {
    answered: usize,
    failed: usize,
    tokens: u64,
}

async fn execute(args: &LlmRunArgs) -> Result<ExitCode, Failure> {
    let config = config(args)?;
    let llm = config.llm.clone().unwrap_or_default();
    if llm.log_dir.is_some() {
        eprintln!("llm.log_dir is the gateway's: a run writes no trail");
    }
    let providers = Providers::of(&llm).map_err(Failure::new)?;
    let input = Input::read(&args.file, |api, model| providers.serves(api, model))?;
    let mut output = Output::open(&args.out, &input, args.retry_failed)?;
    let gate = Tollgate::open(&config.gate).await;
    let gate = gate.map_err(|error| Failure::new(format!("cannot open the limits: {error}")))?;
    if output.done() < input.len()
        && let Some(wait) = wait_for_the_last_run(&output, &llm, &gate)
    {
        eprintln!(
            "a run was ended a moment ago; waiting {:.1} s, until its requests have left the window",
            wait.as_secs_f64()
        );
        tokio::time::sleep(wait).await;
    }
    let executor = ExecutorBuilder::default()
        .caller(Caller { client: args.client.clone() })
        .in_flight(args.in_flight.into())
        .retry(retry_policy(args.attempts))
        .build(ModelLimits::new(gate, llm), providers.noting(output.file()));
    let began = Instant::now();
    let mut progress = Progress::new(input.len(), output.done());
    let mut summary = Summary::default();
    let is_stopped =
        send_all(&executor, &input, &mut output, &mut progress, &mut summary, args.in_flight.into()).await?;
    drop(progress);
    output.finish().map_err(|error| Failure::writing(&source::name(&args.out), &error))?;
    report(args, &input, &output, &summary, began.elapsed()).map_err(Failure::answering)?;
    Ok(match (is_stopped, output.failed()) {
        (true, _) => ExitCode::from(STOPPED),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::from(1),
    })
}

/// Batches have time: they wait as long as a provider asks for, up to a day.
fn retry_policy(attempts: u32) -> RetryPolicy {
    RetryPolicy { attempts, longest_hint: Duration::from_secs(24 * 3_600), ..RetryPolicy::default() }
}

/// Sends what is not done, and writes each result as it comes; true if it was stopped.
async fn send_all(
    executor: &Executor<Providers>,
    input: &Input,
    output: &mut Output,
    progress: &mut Progress,
    summary: &mut Summary,
    in_flight: usize,
) -> Result<bool, Failure> {
    let mut left: VecDeque<&RequestLine> =
        input.items().iter().filter(|item| !output.has(&item.custom_id)).collect();
    let mut running: JoinSet<(usize, String, CallResult)> = JoinSet::new();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut signals = std::pin::pin!(signal());
    loop {
        while running.len() < in_flight && !*stop.borrow() {
            let Some(item) = left.pop_front() else { break };
            let call = input.call(item)?;
            let (executor, mut stopped) = (executor.clone(), stopped.clone());
            let (line, custom_id) = (item.line, item.custom_id.clone());
            running.spawn(async move {
                let pending = executor.submit(call);
                let stop = async move { drop(stopped.wait_for(|is_stopped| *is_stopped).await) };
                (line, custom_id, pending.result_or_cancel(stop).await)
            });
        }
        tokio::select! {
            ended = running.join_next() => {
                let Some(ended) = ended else { break };
                let (line, custom_id, result) =
                    ended.map_err(|error| Failure::new(format!("a request ended in a panic: {error}")))?;
                // What was stopped before it was sent is left to the next run.
                if matches!(&result, Err(error) if error.kind == CallErrorKind::Cancelled) {
                    continue;
                }
                output.add(line, &custom_id, &result)?;
                match &result {
                    Ok(completed) => {
                        summary.answered += 1;
                        summary.tokens = summary.tokens.saturating_add(completed.usage.total());
                        progress.done(completed.usage.total(), true);
                    }
                    Err(_) => {
                        summary.failed += 1;
                        progress.done(0, false);
                    }
                }
            }
            () = &mut signals, if !*stop.borrow() => {
                progress.stopping(running.len());
                stop.send_replace(true);
            }
            () = progress.tick() => {}
        }
    }
    let is_stopped = *stop.borrow() && output.done() < input.len();
    Ok(is_stopped)
}

/// Ready at the first ctrl-c or SIGTERM.
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

/// How long limits in memory must wait for what an earlier run has sent and cannot remember. A shared store remembers by itself.
fn wait_for_the_last_run(output: &Output, llm: &LlmConfig, gate: &Tollgate) -> Option<Duration> {
    let is_local = |name: &str| gate.local(name).is_ok();
    let has_local = llm.models.iter().flat_map(|model| &model.limits).any(|limit| is_local(&limit.name));
    let last = output.last_sent().filter(|_| has_local)?;
    let window = llm.window.saturating_add(llm.margin.unwrap_or(Duration::from_millis(250)));
    // A time in the future is nobody's.
    let since = SystemTime::now().duration_since(last).ok()?;
    window.checked_sub(since).filter(|wait| !wait.is_zero())
}

fn config(args: &LlmRunArgs) -> Result<Config, Failure> {
    let Some(base_url) = &args.base_url else {
        let Some(path) = &args.config else {
            return Err(Failure::new(
                "nothing says where the requests go; write --config FILE, a config with [llm.upstreams.NAME], or --base-url URL, a \
                 gateway such as http://127.0.0.1:8080",
            ));
        };
        let config = validate::load(path)?;
        let has_upstreams = config.llm.as_ref().is_some_and(|llm| !llm.upstreams.is_empty());
        let name = source::name(path);
        if !has_upstreams {
            return Err(Failure::new(format!(
                "{name} has no upstreams; write [llm.upstreams.NAME] with kind and base_url"
            )));
        }
        let clients = config.llm.iter().flat_map(|llm| &llm.clients).map(|client| client.name.as_str());
        let clients: Vec<&str> = clients.collect();
        return match &args.client {
            Some(client) if !clients.contains(&client.as_str()) => {
                let known = if clients.is_empty() { "none".to_owned() } else { clients.join(", ") };
                Err(Failure::new(format!(
                    "{name} has no client {client:?} under [llm.clients]; known: {known}"
                )))
            }
            _ => Ok(config),
        };
    };
    // The same gateway for both kinds. It has the limits, so none are kept here.
    let base = base_url.trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base);
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let key = args.api_key.as_ref().map_or_else(String::new, |key| format!("api_key = {}\n", quoted(key)));
    let text = format!(
        "[llm.upstreams.openai]\nkind = \"openai\"\nbase_url = {}\n{key}\
         [llm.upstreams.anthropic]\nkind = \"anthropic\"\nbase_url = {}\n{key}",
        quoted(&format!("{base}/v1")),
        quoted(base)
    );
    Config::parse(&text).map_err(|_| {
        Failure::new(format!(
            "{base_url:?} is no address of a gateway; write it as http://127.0.0.1:8080, and a key as env:NAME"
        ))
    })
}

fn report(
    args: &LlmRunArgs,
    input: &Input,
    output: &Output,
    summary: &Summary,
    took: Duration,
) -> io::Result<()> {
    let left = input.len().saturating_sub(output.done());
    let mut stdout = io::stdout().lock();
    if args.json {
        let answer = json!({
            "requests": input.len(), "answered": output.done() - output.failed(), "failed": output.failed(), "left": left,
            "sent_now": summary.answered + summary.failed, "tokens_now": summary.tokens, "seconds": took.as_secs_f64(),
        });
        return writeln!(stdout, "{answer}");
    }
    let number = |count: usize| grouped(count as u64);
    write!(
        stdout,
        "{} of {} requests answered, {} failed; {} tokens in {:.1} s; results in {}",
        number(output.done() - output.failed()),
        number(input.len()),
        number(output.failed()),
        grouped(summary.tokens),
        took.as_secs_f64(),
        source::name(&args.out)
    )?;
    match left {
        0 => writeln!(stdout),
        left => writeln!(stdout, "; {} are left, and the same command goes on with them", number(left)),
    }
}

#[cfg(test)]
mod tests {
    use tollgate_llm::provider::{Failure, Hints};

    use super::*;

    #[test]
    fn a_run_waits_for_hours_where_the_provider_asks_for_it() {
        let wait = |hours: u64| {
            let retry_after = Some(Duration::from_secs(hours * 3_600));
            let hints = Hints { retry_after, ..Hints::default() };
            retry_policy(5).wait(1, Failure::Limited, &hints, 0)
        };
        assert_eq!(wait(1), Some(Duration::from_secs(3_600)));
        assert!(wait(24).is_some() && wait(25).is_none());
    }
}
