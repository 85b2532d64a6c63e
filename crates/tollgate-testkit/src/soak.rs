//! A soak: `tollgate serve` on Redis for minutes or hours, under mixed load, with reloads and faults.
//!
//! What is held to a bound is what only shows after a while: memory that grows and latency that creeps up. `schedule.rs` says when what
//! happens, by a seed; `load.rs` has the clients of the three faces; `stability.rs` judges the samples and starts nothing. The bench command
//! `soak` runs hours of it, and a test of the server three minutes.
//!
//! The server reaches Redis through a proxy, which cuts connections. The server itself is never disturbed, so every request
//! must be answered, whatever becomes of Redis: a hang-up or a malformed answer is a mistake and fails the run.

mod load;
mod schedule;
mod stability;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use parking_lot::Mutex;

pub use schedule::{Event, Kind};
pub use stability::{Bound, Stability};

use crate::hostile::Faces;
use crate::proxy::{FaultProxy, Mode};
use crate::redis::RedisServer;
use crate::tollgate::Tollgate;
use load::{Answer, CLIENTS, Record};

/// How many samples a run has, however long it is.
const SAMPLES: u32 = 180;

/// How long after a fault latency is not judged: connections are made anew, and Redis is asked again once a ping was answered.
const RECOVERY: Duration = Duration::from_secs(3);

/// Before the first interval the config is reloaded so many times under load. Threads and the memory allocator keep what a reload needs once it ran on
/// them, so single reloads would each make the heap a little larger for a long time.
const WARM_UP_RELOADS: u32 = 100;
const WARM_UP_GAP: Duration = Duration::from_millis(100);

/// How often connections are cut while that is the fault.
const CUT_EVERY: Duration = Duration::from_millis(250);

/// How many mistakes are kept word for word.
const MISTAKES_SHOWN: usize = 10;

/// What is to be run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How long the load lasts.
    pub duration: Duration,
    /// Requests a second, over all faces.
    pub rate: u32,
    /// Chooses the times of faults and reloads, and the load.
    pub seed: u64,
}

/// What was seen in one interval.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// When it ended, counted from the start of the load.
    pub at: Duration,
    /// Memory of the server that is its own and resident, at the end of the interval.
    pub heap_bytes: u64,
    /// Memory that Redis has allocated, at the end; `None` while it does not answer.
    pub redis_bytes: Option<u64>,
    /// CPU time of the server in this interval.
    pub cpu: Duration,
    /// Requests that were allowed.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
    /// Requests that could not be decided: their limit is closed while Redis is down.
    pub undecided: u64,
    /// Half of the requests were answered within this time.
    pub p50: Duration,
    /// Of a hundred requests, 95 were answered within this time.
    pub p95: Duration,
    /// Of a hundred requests, 99 were answered within this time.
    pub p99: Duration,
    /// Whether there was a fault in it, or one had just ended.
    pub is_disturbed: bool,
}

impl Sample {
    /// Requests that were answered.
    pub fn requests(&self) -> u64 {
        self.allowed + self.denied + self.undecided
    }
}

/// A run that is over.
#[derive(Debug)]
pub struct Soak {
    /// What was run.
    pub plan: Plan,
    /// What happened to Redis and to the config.
    pub events: Vec<Event>,
    /// What was seen.
    pub samples: Vec<Sample>,
    /// How many requests were not answered as they must be.
    pub mistakes: u64,
    /// The first of them.
    pub first_mistakes: Vec<String>,
}

impl Soak {
    /// Runs it with this binary. `seen` gets every sample when it is there.
    ///
    /// # Panics
    ///
    /// If Redis or the server cannot be started.
    pub fn run(plan: Plan, binary: &Path, mut seen: impl FnMut(&Sample)) -> Soak {
        let redis = RedisServer::start();
        let proxy = FaultProxy::start_seeded(redis.port(), plan.seed);
        let server = Tollgate::builder(binary).config(&config(proxy.port(), false)).start();
        let faces = Faces { http: server.http(), resp: server.resp(), grpc: server.grpc() };
        let events = schedule::events(&plan);
        let (record, is_over) = (Mutex::new(Record::new()), AtomicBool::new(false));
        let mut samples = Vec::new();
        let failed = std::thread::scope(|scope| {
            let share = plan.rate.max(1) as f64 / CLIENTS.len() as f64;
            let gap = Duration::from_secs_f64(1.0 / share);
            let clients: Vec<_> = CLIENTS
                .iter()
                .zip(1..)
                .map(|(client, number)| {
                    let load = load::Load { faces, gap, record: &record, is_over: &is_over };
                    let random =
                        crate::Random::seeded(plan.seed.wrapping_mul(1_000_003).wrapping_add(number));
                    scope.spawn(move || client(&load, random))
                })
                .collect();
            for number in 1..=WARM_UP_RELOADS {
                server.reload(&config(proxy.port(), number % 2 == 1));
                std::thread::sleep(WARM_UP_GAP);
            }
            let start = Instant::now();
            record.lock().current = load::Interval::default();
            let mut cpu_before = cpu(server.pid());
            let (events, server_, redis_, proxy_, is_over_) = (&events, &server, &redis, &proxy, &is_over);
            let faults = scope.spawn(move || disturb(start, events, server_, redis_, proxy_, is_over_));
            for number in 1..=SAMPLES {
                let at = plan.duration * number / SAMPLES;
                std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
                let from = plan.duration * (number - 1) / SAMPLES;
                let is_disturbed = events.iter().any(|event| event.disturbs(from, at, RECOVERY));
                let Some(heap_bytes) = heap(server.pid()) else { break };
                let (used, seen_before) = (cpu(server.pid()), std::mem::take(&mut record.lock().current));
                let redis_bytes = redis_memory(&redis, is_disturbed);
                let spent = used.saturating_sub(std::mem::replace(&mut cpu_before, used));
                let sample = sample(at, heap_bytes, redis_bytes, spent, &seen_before, is_disturbed);
                seen(&sample);
                samples.push(sample);
                // As an operator's Prometheus and page do.
                let mut connection = server.connect();
                for path in ["/metrics", "/v1/limits", "/v1/server"] {
                    let answered =
                        connection.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
                    let answered = answered.and_then(|()| connection.receive(false));
                    match answered {
                        Ok(answer) if answer.status == 200 => {}
                        other => record.lock().mistake(format!("GET {path}: {other:?}")),
                    }
                }
            }
            is_over.store(true, Ordering::Relaxed);
            let all = clients.into_iter().chain([faults]);
            all.filter_map(|thread| thread.join().err()).count()
        });
        let mut record = record.into_inner();
        if failed > 0 {
            record.mistake(format!("{failed} clients could not connect any more"));
        }
        if samples.len() < SAMPLES as usize {
            record.mistake(format!("the server ended by itself: {:?}", server.output().lines().last()));
        } else {
            let ended = server.stop();
            if ended.code != Some(0) {
                record.mistake(format!("the server ended with {:?}", ended.code));
            }
        }
        let Record { mistakes, first_mistakes, .. } = record;
        Soak { plan, events, samples, mistakes, first_mistakes }
    }

    /// Whether memory and latency stayed where they were, and every request was answered.
    pub fn stability(&self) -> Stability {
        stability::judge(&self.samples, self.mistakes)
    }
}

/// The policy; `other` is what a reload changes it to: other numbers, and one limit in place of another.
fn config(redis_port: u16, other: bool) -> String {
    let (rate, tight, extra) = if other { (60, 8, "evening") } else { (50, 5, "morning") };
    format!(
        "[server]\nlog = 'warn'\n\
         [store]\nmode = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{redis_port}'\n\
         [limits.api]\nstrategy = 'token_bucket'\nrate = '{rate}/s'\nburst = 100\n\
         [limits.tight]\nstrategy = 'fixed_window'\nlimit = {tight}\nwindow = '10s'\n\
         [limits.log]\nstrategy = 'sliding_window'\nlimit = 50\nwindow = '5s'\n\
         [limits.counter]\nstrategy = 'sliding_window_counter'\nlimit = 50\nwindow = '5s'\nfallback = 'open'\n\
         [limits.strict]\nstrategy = 'leaky_bucket'\nrate = '50/s'\ncapacity = 50\nfallback = 'closed'\n\
         [limits.seats]\nstrategy = 'concurrency'\nlimit = 5\nlease = '5s'\n\
         [limits.{extra}]\nstrategy = 'fixed_window'\nlimit = 10\nwindow = '1s'\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['api']\nlimit = 'api'\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['tight']\nlimit = 'tight'\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['strict']\nlimit = 'strict'\n"
    )
}

/// Does what is scheduled, until all of it is done or the run is over.
fn disturb(
    start: Instant,
    events: &[Event],
    server: &Tollgate,
    redis: &RedisServer,
    proxy: &FaultProxy,
    is_over: &AtomicBool,
) {
    let mut other = false;
    for event in events {
        wait_until(start + event.start, is_over);
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let end = start + event.end;
        match event.kind {
            Kind::Reload => {
                other = !other;
                server.reload(&config(proxy.port(), other));
            }
            Kind::Paused => {
                redis.stop();
                wait_until(end, is_over);
                redis.resume();
            }
            Kind::Killed => {
                redis.kill();
                wait_until(end, is_over);
                redis.restart();
            }
            Kind::Cut => {
                while Instant::now() < end && !is_over.load(Ordering::Relaxed) {
                    proxy.reset_connections();
                    wait_until((Instant::now() + CUT_EVERY).min(end), is_over);
                }
            }
            Kind::Silent => {
                proxy.set(Mode::Blackhole);
                wait_until(end, is_over);
                proxy.set(Mode::Pass);
                // Connections that lost bytes stay silent, as after a firewall forgot them.
            }
        }
    }
}

/// Sleeps until then, in steps that notice the end of the run.
fn wait_until(then: Instant, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        match then.saturating_duration_since(Instant::now()) {
            Duration::ZERO => return,
            left => std::thread::sleep(left.min(Duration::from_millis(100))),
        }
    }
}

fn sample(
    at: Duration,
    heap_bytes: u64,
    redis_bytes: Option<u64>,
    cpu: Duration,
    interval: &load::Interval,
    is_disturbed: bool,
) -> Sample {
    let quantile = |part: f64, waits: &Histogram<u64>| Duration::from_micros(waits.value_at_quantile(part));
    Sample {
        at,
        heap_bytes,
        redis_bytes,
        cpu,
        allowed: interval.count(Answer::Allowed),
        denied: interval.count(Answer::Denied),
        undecided: interval.count(Answer::Undecided),
        p50: quantile(0.50, &interval.waits),
        p95: quantile(0.95, &interval.waits),
        p99: quantile(0.99, &interval.waits),
        is_disturbed,
    }
}

/// What a process has in RAM that is backed by no file: its heap and its stacks. `None` if it is gone.
fn heap(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// CPU time that a process has used so far, all its threads.
fn cpu(pid: u32) -> Duration {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Duration::ZERO };
    let of_task = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    };
    tasks.filter_map(of_task).sum()
}

/// Asked only where nothing disturbs it, as an answer may be waited for.
fn redis_memory(redis: &RedisServer, is_disturbed: bool) -> Option<u64> {
    if is_disturbed { None } else { redis.info("memory", "used_memory")?.parse().ok() }
}
