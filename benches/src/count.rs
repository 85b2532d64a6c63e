//! Counting tokens: megabytes a second beside tiktoken-rs, in one run and on one thread.
//!
//! `cargo run --release -p tollgate-benches -- count`. Both count the same texts with the same vocabulary, in turn, by the CPU time of the
//! thread, and each pass is of texts in messages of 4 KiB, as requests have them. The median of the passes is shown, and the quotient of
//! the two; a difference in a count ends the run. Texts are made of files of this repository and of sentences in other scripts, so anybody can
//! repeat it. A second table has whole requests, counted anew and with their messages known.

use std::time::Duration;

use clap::Args;
use rustix::time::{ClockId, clock_gettime};
use tollgate_llm::count::{Counter, Encoding, Tokenizer};
use tollgate_llm::{Api, ModelRequest};

use crate::goals::{Goal, Strict, Wanted, strictly};
use crate::report::print_goals;

/// The goal: how many times the speed of tiktoken-rs.
const GOAL: f64 = 3.0;

/// How long a message is, in bytes.
const MESSAGE: usize = 4 * 1024;

#[derive(Args)]
pub(crate) struct Options {
    /// How often each text is counted.
    #[arg(long, default_value_t = 9)]
    passes: usize,
    /// About how many bytes each text has.
    #[arg(long, default_value_t = 1_000_000)]
    bytes: usize,
}

/// A text, and what it is.
struct Corpus {
    name: &'static str,
    messages: Vec<String>,
    bytes: usize,
}

fn corpora(bytes: usize) -> Vec<Corpus> {
    let prose = include_str!("../../docs/storage.md").to_owned() + include_str!("../../docs/operations.md");
    let code = include_str!("../../crates/tollgate-llm/src/limits.rs").to_owned()
        + include_str!("../../crates/tollgate-llm/src/line.rs");
    let russian = "Съешь же ещё этих мягких французских булок, да выпей чаю. Широкая электрификация южных губерний даст мощный толчок подъёму сельского хозяйства. ";
    let chinese = "我能吞下玻璃而不伤身体。天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。私はガラスを食べられます。それは私を傷つけません。";
    let json = (0..2_000).map(|id| {
        format!(r#"{{"id":{id},"user":"user-{}","created":"2026-11-17T00:{:02}:00Z","score":{}.{},"tags":["a","b"],"ok":{}}}"#, id * 7919 % 1000, id % 60, id % 97, id % 10, id % 2 == 0)
    });
    let json: String = json.collect::<Vec<_>>().join("\n");
    let texts = [
        ("English", prose),
        ("code", code),
        ("Russian", russian.to_owned()),
        ("Chinese", chinese.to_owned()),
        ("JSON", json),
    ];
    texts.map(|(name, text)| corpus(name, &text, bytes)).into_iter().collect()
}

/// Repeats a text with a number in each repetition, so that no message is one that was counted before.
fn corpus(name: &'static str, text: &str, bytes: usize) -> Corpus {
    let mut whole = String::with_capacity(bytes + text.len());
    let mut repetition = 0;
    while whole.len() < bytes {
        whole.push_str(&format!("{repetition} "));
        whole.push_str(text);
        repetition += 1;
    }
    let mut messages = Vec::new();
    let mut rest = whole.as_str();
    while !rest.is_empty() {
        let mut end = rest.len().min(MESSAGE);
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let (message, behind) = rest.split_at(end);
        messages.push(message.to_owned());
        rest = behind;
    }
    Corpus { name, messages, bytes: whole.len() }
}

/// The CPU time of this thread.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let began = cpu();
    let done = work();
    (done, cpu().saturating_sub(began))
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
fn speed(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let oracles = [
        (Encoding::O200k, tiktoken_rs::o200k_base_singleton()),
        (Encoding::Cl100k, tiktoken_rs::cl100k_base_singleton()),
    ];
    println!("{:<12} {:<8} {:>12} {:>12} {:>8}", "encoding", "text", "ours MB/s", "tiktoken-rs", "times");
    let mut goals = Vec::new();
    for (encoding, oracle) in oracles {
        for corpus in corpora(options.bytes) {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..options.passes.max(1) {
                let count = || corpus.messages.iter().map(|text| encoding.count(text)).sum::<u64>();
                let (counted, time) = timed(count);
                ours.push(time);
                let count =
                    || corpus.messages.iter().map(|text| oracle.count_ordinary(text) as u64).sum::<u64>();
                let (expected, time) = timed(count);
                theirs.push(time);
                if counted != expected {
                    return Err(format!(
                        "{} of {}: {counted} tokens, and tiktoken-rs has {expected}",
                        encoding.name(),
                        corpus.name
                    ));
                }
            }
            let (ours, theirs) =
                (speed(corpus.bytes, median(&mut ours)), speed(corpus.bytes, median(&mut theirs)));
            let times = ours / theirs;
            println!("{:<12} {:<8} {ours:>12.1} {theirs:>12.1} {times:>8.1}", encoding.name(), corpus.name);
            goals.push(Goal {
                what: format!("{} of {}, over tiktoken-rs", encoding.name(), corpus.name),
                wanted: Wanted::AtLeast(GOAL),
                measured: Some(times),
                beside: String::new(),
            });
        }
    }
    requests(options.passes);
    print_goals(&goals);
    strictly(Strict::of(is_strict, false), &goals)
}

/// A chat of forty messages of 2 KiB: counted for the first time, and with one more message than the last time.
fn requests(passes: usize) {
    let english = corpora(200_000).swap_remove(0);
    let chat = |messages: usize, pass: usize| {
        let content =
            |at: usize| english.messages[at % english.messages.len()].chars().take(2_048).collect::<String>();
        let messages: Vec<_> = (0..messages)
            .map(|at| serde_json::json!({ "role": "user", "content": format!("{pass} {}", content(at)) }))
            .collect();
        serde_json::json!({ "model": "gpt-4o", "messages": messages }).to_string()
    };
    let (mut anew, mut known) = (Vec::new(), Vec::new());
    for pass in 0..passes.max(1) {
        let counter = Counter::default();
        for (messages, times) in [(40, &mut anew), (41, &mut known)] {
            let body = chat(messages, pass);
            let Ok(request) = ModelRequest::read(Api::ChatCompletions, body.as_bytes()) else { continue };
            times.push(timed(|| counter.count(&request)).1);
        }
    }
    let micros = |times: &mut [Duration]| median(times).as_micros();
    println!(
        "a chat of 40 messages of 2 KiB: {} us; the next turn: {} us",
        micros(&mut anew),
        micros(&mut known)
    );
}
