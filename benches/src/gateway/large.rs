//! What a prompt of a megabyte takes, and how other calls fare beside it.
//!
//! The prompt is a single run of one letter, which is the slowest to count. Each begins with another number, because the counts of
//! messages are kept.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::{ask, calls, connect, gateway, never, request};
use crate::goals::{Goal, Wanted};

const BYTES: usize = 1_000_000;

/// The longest that such a prompt may take, and the p99 of others beside it, in milliseconds.
const GOAL: f64 = 300.0;
const GOAL_BESIDE: f64 = 5.0;

/// Sends one prompt after the other, and other calls at a steady rate.
pub(super) fn run(program: &Path, upstream: SocketAddr, rate: u32, time: Duration) -> Vec<Goal> {
    let gateway = gateway(program, upstream, "rpm = 100000000\ntpm = 100000000000");
    let mut took = Histogram::<u64>::new_with_bounds(1, 60_000_000, 3).expect("bounds");
    let mut failed = 0_usize;
    let (beside, beside_failed) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| calls(gateway.http(), rate, time));
        let mut reader = connect(gateway.http());
        let (began, mut number) = (Instant::now(), 0_u32);
        while began.elapsed() < time {
            number += 1;
            let request = request(&body(number));
            let sent = Instant::now();
            match ask(&mut reader, &request) {
                Ok(200) => {
                    took.saturating_record(u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX))
                }
                _ => {
                    failed += 1;
                    reader = connect(gateway.http());
                }
            }
        }
        beside.join().expect("no panic")
    });
    let ms = |micros: u64| micros as f64 / 1_000.0;
    println!(
        "large: {} prompts of 1 MB, {failed} not answered, p50 {:.1} ms; beside them {rate} calls a second, {beside_failed} not answered\n",
        took.len(),
        ms(took.value_at_quantile(0.5)),
    );
    let goal = |what: &str, most, measured: &Histogram<u64>, at: u64| Goal {
        what: format!("gateway: {what}"),
        wanted: Wanted::AtMostMillis(most),
        measured: (!measured.is_empty()).then(|| ms(at)),
        beside: String::new(),
    };
    vec![
        goal("a prompt of 1 MB, the longest", GOAL, &took, took.max()),
        goal("calls beside such prompts, p99", GOAL_BESIDE, &beside, beside.value_at_quantile(0.99)),
        never(
            "gateway: large prompts and calls beside them that were not answered",
            (failed + beside_failed) as f64,
        ),
    ]
}

fn body(number: u32) -> String {
    let text = "a".repeat(BYTES);
    format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"{number} {text}"}}],"max_tokens":100,"stream":false}}"#
    )
}
