//! `gateway`: what the gateway of language models adds to a call, beside the upstream itself and, where asked for, LiteLLM's proxy.
//!
//! The upstream runs in this process and answers at once. The same calls go to it directly and through each gateway, in turns of a
//! second, at a steady rate; what is reported is how much later answers and the events of streams come. Then prompts of a megabyte go
//! through it (`large.rs`), it is saturated before a judge, filled with calls that wait, and asked how soon it acts (`wake.rs`). Servers,
//! clients and the upstream share the machine's cores.

mod large;
mod litellm;
mod upstream;
mod wake;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use tollgate_testkit::provider::{Allowed, Provider, openai};
use tollgate_testkit::tollgate::Tollgate;

use self::litellm::LiteLlm;
use self::upstream::Upstream;
use crate::goals::{Goal, Strict, Wanted, strictly};
use crate::machine::Facts;
use crate::report::print_goals;
use crate::server;

const CONNECTIONS: u32 = 50;
const WAITING: usize = 2_000;

#[derive(Args)]
pub(crate) struct Options {
    /// How many seconds each contestant is asked, in turns of one second
    #[arg(long, default_value_t = 20)]
    seconds: u32,
    /// How many calls a second; LiteLLM's proxy needs a rate that it can serve, such as 50
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// LiteLLM's proxy as well, installed from PyPI
    #[arg(long)]
    litellm: bool,
    /// One part only
    #[arg(long)]
    only: Option<Part>,
    /// A binary to measure instead of building one
    #[arg(long, value_name = "FILE")]
    server: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Latency,
    /// Prompts of a megabyte, and other calls beside them
    Large,
    Saturated,
    Waiting,
    /// How soon the gateway acts: scenarios A4, B1, C3 and C6
    Wake,
    /// Scenarios A2 and B2 beside LiteLLM's proxy, before a judge
    Judged,
}

/// Somebody who is asked.
struct Contestant {
    name: &'static str,
    address: SocketAddr,
    latency: Histogram<u64>,
    event: Histogram<u64>,
    /// Calls and streams that were not answered with 200.
    failed: usize,
}

impl Contestant {
    fn new(name: &'static str, address: SocketAddr) -> Contestant {
        let histogram = || Histogram::new_with_bounds(1, 60_000_000, 3).expect("bounds");
        Contestant { name, address, latency: histogram(), event: histogram(), failed: 0 }
    }
}

/// Runs the command.
pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let program = match &options.server {
        Some(program) => program.clone(),
        None => server::build_tollgate()?,
    };
    let Facts { processor, cores, kernel, load, .. } = Facts::read();
    println!("{processor}, {cores} cores, Linux {kernel}, load {load}\n");
    let wants = |part| options.only.is_none_or(|only| only == part);
    let upstream = Upstream::start()?;
    let mut goals = Vec::new();
    if wants(Part::Latency) {
        goals.extend(latency(options, &program, upstream.address())?);
    }
    if wants(Part::Large) {
        let time = Duration::from_secs(options.seconds.into());
        goals.extend(large::run(&program, upstream.address(), options.rate, time));
    }
    if wants(Part::Saturated) {
        // The judge counts 10 tokens for the question of each call, and 100 for its answer.
        let window = Duration::from_secs(8);
        let requests = Allowed { requests: CALLS_A_WINDOW, tokens: u64::MAX / 2, window };
        goals.extend(saturated(&program, "requests", requests, "rpm = 400"));
        let tokens = Allowed { requests: u64::MAX / 2, tokens: CALLS_A_WINDOW * 110, window };
        goals.extend(saturated(&program, "tokens", tokens, "tpm = 44000"));
    }
    if wants(Part::Waiting) {
        goals.extend(waiting(&program, upstream.address()));
    }
    if wants(Part::Wake) {
        goals.extend(wake::run(&program));
    }
    if wants(Part::Judged) && (options.litellm || options.only == Some(Part::Judged)) {
        goals.extend(litellm::judged(&program)?);
    }
    print_goals(&goals);
    strictly(Strict::of(is_strict, options.only.is_some()), &goals)
}

/// How much later answers and events come through each gateway.
fn latency(options: &Options, program: &Path, upstream: SocketAddr) -> Result<Vec<Goal>, String> {
    let gateway = gateway(program, upstream, "rpm = 100000000\ntpm = 100000000000");
    let mut contestants =
        vec![Contestant::new("direct", upstream), Contestant::new("tollgate", gateway.http())];
    // Ours are measured all the same where it does not start.
    let litellm = options.litellm.then(|| LiteLlm::start(upstream, None)).transpose();
    let litellm = litellm.unwrap_or_else(|why| {
        eprintln!("LiteLLM's proxy is left out: {why}");
        None
    });
    contestants.extend(litellm.iter().map(|proxy| Contestant::new("LiteLLM", proxy.address())));
    for contestant in &contestants {
        calls(contestant.address, options.rate, Duration::from_secs(1));
    }
    for _ in 0..options.seconds {
        for contestant in &mut contestants {
            let (measured, failed) = calls(contestant.address, options.rate, Duration::from_secs(1));
            contestant.latency.add(&measured).map_err(|error| error.to_string())?;
            contestant.failed += failed;
        }
    }
    for _ in 0..options.seconds.div_ceil(4) {
        for contestant in &mut contestants {
            let (measured, failed) = streams(contestant.address);
            contestant.event.add(&measured).map_err(|error| error.to_string())?;
            contestant.failed += failed;
        }
    }
    drop(litellm);
    print_latency(&contestants, options.rate);
    Ok(judge_latency(&contestants))
}

fn gateway(program: &Path, upstream: SocketAddr, model: &str) -> Tollgate {
    let config = format!(
        "[server]\nlog = 'off'\nmax_connections_per_peer = 10000\n[llm]\nlog_dir = 'logs'\n[llm.models.gpt-4o]\n{model}\n\
         [llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{upstream}/v1'\napi_key = 'x'\n[limits.x]\nunlimited = true\n"
    );
    Tollgate::builder(program).config(&config).start()
}

/// A chat of an everyday size.
fn body(is_stream: bool) -> String {
    let text = "Say in a few words what a token bucket is, and why anybody would want one. ".repeat(12);
    format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"system","content":"You are terse."}},{{"role":"user","content":"{text}"}}],"max_tokens":100,"stream":{is_stream}}}"#
    )
}

pub(super) fn request(body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-any\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Reads the head of an answer: its status, and its length if it has one.
pub(super) fn head(reader: &mut impl BufRead) -> std::io::Result<(u16, Option<usize>)> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let mut length = None;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            return Ok((status, length));
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok();
        }
    }
}

/// Reads the next chunk of a body; `None` at its end.
fn chunk(reader: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let length = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
    let mut bytes = vec![0; length + 2];
    reader.read_exact(&mut bytes)?;
    bytes.truncate(length);
    Ok((length > 0).then_some(bytes))
}

/// One call: its status.
pub(super) fn ask(reader: &mut BufReader<TcpStream>, request: &[u8]) -> std::io::Result<u16> {
    reader.get_mut().write_all(request)?;
    let (status, length) = head(reader)?;
    match length {
        Some(length) => reader.read_exact(&mut vec![0; length])?,
        None => while chunk(reader)?.is_some() {},
    }
    Ok(status)
}

fn connect(address: SocketAddr) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_nodelay(true).expect("set");
    BufReader::new(stream)
}

/// Calls at a steady rate: latencies in microseconds of those that were answered with 200, and how many were not.
fn calls(address: SocketAddr, rate: u32, time: Duration) -> (Histogram<u64>, usize) {
    let failed = AtomicUsize::new(0);
    let all = parking_lot::Mutex::new(Histogram::new_with_bounds(1, 60_000_000, 3).expect("bounds"));
    let request = request(&body(false));
    let began = Instant::now() + Duration::from_millis(20);
    std::thread::scope(|scope| {
        for number in 0..CONNECTIONS {
            let (all, request, failed) = (&all, &request, &failed);
            scope.spawn(move || {
                let mut reader = connect(address);
                let mut own = Vec::new();
                let step = Duration::from_secs(1) * CONNECTIONS / rate;
                let mut next = began + step * number / CONNECTIONS;
                while next < began + time {
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                    let sent = Instant::now();
                    match ask(&mut reader, request) {
                        Ok(200) => own.push(sent.elapsed()),
                        answered => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            if answered.is_err() {
                                reader = connect(address);
                            }
                        }
                    }
                    next += step;
                }
                let mut all = all.lock();
                own.iter().for_each(|took| {
                    all.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1))
                });
            });
        }
    });
    (all.into_inner(), failed.into_inner())
}

/// Streams side by side: how late each event is when it is read, in microseconds, and how many streams failed.
fn streams(address: SocketAddr) -> (Histogram<u64>, usize) {
    let failed = AtomicUsize::new(0);
    let all = parking_lot::Mutex::new(Histogram::new_with_bounds(1, 60_000_000, 3).expect("bounds"));
    let request = request(&body(true));
    std::thread::scope(|scope| {
        for _ in 0..10 {
            let (all, request, failed) = (&all, &request, &failed);
            scope.spawn(move || {
                let Ok(own) = stream(address, request) else {
                    failed.fetch_add(1, Ordering::Relaxed);
                    return;
                };
                // The first event waits for the head to be passed on, which the calls above have in them.
                let mut all = all.lock();
                own.iter().skip(1).for_each(|late| all.saturating_record((*late).max(1)));
            });
        }
    });
    (all.into_inner(), failed.into_inner())
}

/// One stream: how late each of its events is.
fn stream(address: SocketAddr, request: &[u8]) -> std::io::Result<Vec<u64>> {
    let mut reader = connect(address);
    reader.get_mut().write_all(request)?;
    let (status, _) = head(&mut reader)?;
    if status != 200 {
        return Err(std::io::Error::other(format!("status {status}")));
    }
    let mut late = Vec::new();
    while let Some(event) = chunk(&mut reader)? {
        late.extend(upstream::late(&event));
    }
    Ok(late)
}

fn print_latency(contestants: &[Contestant], rate: u32) {
    let ms = |micros: u64| micros as f64 / 1_000.0;
    let direct = &contestants[0];
    println!("{rate} calls a second on {CONNECTIONS} connections, and 10 streams of 50 events, ms:\n");
    println!(
        "| | p50 | p99 | added p50 | added p99 | event p50 | event p99 | added p99 of an event | not answered |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for one in contestants {
        let at = |histogram: &Histogram<u64>, quantile: f64| ms(histogram.value_at_quantile(quantile));
        let added = |of: fn(&Contestant) -> &Histogram<u64>, quantile| {
            at(of(one), quantile) - at(of(direct), quantile)
        };
        println!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {} |",
            one.name,
            at(&one.latency, 0.5),
            at(&one.latency, 0.99),
            added(|one| &one.latency, 0.5),
            added(|one| &one.latency, 0.99),
            at(&one.event, 0.5),
            at(&one.event, 0.99),
            added(|one| &one.event, 0.99),
            one.failed,
        );
    }
    println!();
}

/// What the gateway adds to a call and to an event of a stream.
fn judge_latency(contestants: &[Contestant]) -> Vec<Goal> {
    let find = |name| contestants.iter().find(|one| one.name == name);
    let Some((direct, ours)) = find("direct").zip(find("tollgate")) else { return Vec::new() };
    let at = |of: &Histogram<u64>, quantile| of.value_at_quantile(quantile) as f64 / 1e3;
    let goal = |what, most, of: fn(&Contestant) -> &Histogram<u64>, quantile| Goal {
        what: format!("gateway: added {what}"),
        wanted: Wanted::AtMostMillis(most),
        measured: (!of(ours).is_empty()).then(|| at(of(ours), quantile) - at(of(direct), quantile)),
        beside: String::new(),
    };
    vec![
        goal("p50 of a call", 1.0, |one| &one.latency, 0.5),
        goal("p99 of a call", 5.0, |one| &one.latency, 0.99),
        goal("p99 of an event", 1.0, |one| &one.event, 0.99),
        never("gateway: calls and streams that were not answered", ours.failed as f64),
    ]
}

/// A goal that something never happens.
fn never(what: &str, measured: f64) -> Goal {
    Goal { what: what.to_owned(), wanted: Wanted::Never, measured: Some(measured), beside: String::new() }
}

/// What a saturated limit admits in a window.
const CALLS_A_WINDOW: u64 = 400;

/// How much of a limit is used when more is asked for, before a judge.
fn saturated(program: &Path, of: &str, allowed: Allowed, limit: &str) -> Vec<Goal> {
    let window = allowed.window;
    let provider = Provider::judging(allowed, openai);
    let config = format!(
        "[server]\nlog = 'off'\n[llm]\nwindow = '8s'\n[llm.models.gpt-4o]\n{limit}\n\
         [llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\napi_key = 'x'\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let server = Tollgate::builder(program).config(&config).start();
    let request = request(&body(false));
    let sent = Arc::new(AtomicUsize::new(0));
    let a_window = usize::try_from(CALLS_A_WINDOW).unwrap_or(0);
    let calls = a_window * 4;
    std::thread::scope(|scope| {
        for _ in 0..64 {
            let (sent, request) = (sent.clone(), &request);
            let address = server.http();
            scope.spawn(move || {
                let mut reader = connect(address);
                while sent.fetch_add(1, Ordering::Relaxed) < calls {
                    assert_eq!(ask(&mut reader, request).expect("an answer"), 200);
                }
            });
        }
    });
    let refused = provider.refused();
    let arrivals = provider.arrivals();
    // From the first call to the first of the last window, three windows were used.
    let last = &arrivals[arrivals.len() - a_window];
    let took = last.at - arrivals[0].at;
    let share = 3.0 * window.as_secs_f64() / took.as_secs_f64();
    println!("saturated: {limit} in {} s, {CALLS_A_WINDOW} calls, the default margin\n", window.as_secs());
    vec![
        Goal {
            what: format!("gateway: saturated, of the limit of {of}"),
            wanted: Wanted::AtLeast(0.95),
            measured: Some(share),
            beside: String::new(),
        },
        never(&format!("gateway: saturated by {of}, refused by the judge"), refused as f64),
    ]
}

fn resident(server: &Tollgate) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// What calls that wait take of memory.
fn waiting(program: &Path, upstream: SocketAddr) -> Vec<Goal> {
    // All wait for the tokens of the first: calls that no limit of requests can let in within `max_wait` would be refused at once.
    let server = gateway(program, upstream, "tpm = 400");
    let request = request(&body(false));
    let mut first = connect(server.http());
    assert_eq!(ask(&mut first, &request).expect("an answer"), 200);
    let before = resident(&server);
    let mut connections = Vec::new();
    for _ in 0..WAITING {
        let mut reader = connect(server.http());
        reader.get_mut().write_all(&request).expect("sent");
        connections.push(reader);
    }
    let in_line = format!("tollgate_llm_queue{{model=\"gpt-4o\"}} {WAITING}");
    let began = Instant::now();
    while !server.get("/metrics").body.contains(&in_line) {
        if began.elapsed() > Duration::from_secs(20) {
            let metrics = server.get("/metrics").body;
            let found = metrics.lines().find(|line| line.starts_with("tollgate_llm_queue{"));
            panic!("not all of {WAITING} wait: {found:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = resident(&server);
    println!("{WAITING} waiting calls: {before} MiB before, {after} MiB with them\n");
    let goal = |what: &str, mib: u64| Goal {
        what: format!("gateway: {WAITING} waiting calls, {what}"),
        wanted: Wanted::AtMostMib(100.0),
        measured: Some(mib as f64),
        beside: String::new(),
    };
    vec![goal("the calls", after.saturating_sub(before)), goal("the whole process", after)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Grade;

    #[test]
    fn latency_is_judged_by_what_is_added() {
        let contestant = |name, call_us: u64, event_us: u64, failed| {
            let mut one = Contestant::new(name, SocketAddr::from(([127, 0, 0, 1], 1)));
            one.latency.record(call_us).unwrap();
            one.event.record(event_us).unwrap();
            Contestant { failed, ..one }
        };
        let direct = contestant("direct", 4_000, 5_000, 0);
        let goals = judge_latency(&[direct, contestant("tollgate", 5_500, 5_500, 1)]);
        let grades: Vec<Grade> = goals.iter().map(Goal::grade).collect();
        assert_eq!(grades, [Grade::Missed, Grade::Reached, Grade::Reached, Grade::Missed]);
        assert!(
            strictly(Strict::MissedOrNotMeasured, &goals)
                .is_err_and(|missed| missed.contains("p50") && missed.contains("not answered"))
        );
    }
}
