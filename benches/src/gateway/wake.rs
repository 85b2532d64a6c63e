//! How soon the gateway acts: on room that frees up (A4), on what a call gives back (B1), on a client that closes its stream (C3) and on one
//! that leaves the line (C6). Each is done some times, and the longest counts.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use tollgate_testkit::provider::{Provider, Reply, openai};
use tollgate_testkit::tollgate::Tollgate;

use super::{ask, chunk, connect, gateway, head, request};
use crate::goals::{Goal, Wanted};

const TIMES: usize = 5;

/// Measures a case with a server of its own, and answers the longest time.
type Measure = fn(&Path) -> Duration;

/// Does all of it.
pub(super) fn run(program: &Path) -> Vec<Goal> {
    let parts: [(&str, Measure, f64); 4] = [
        ("A4, a call is sent after room is free", after_room, 20.0),
        ("B1, a call is sent after another gave back", after_settlement, 50.0),
        ("C3, the upstream is closed after its client has left", after_close, 1_000.0),
        ("C6, a place is free after its client has left the line", after_leaving, 100.0),
    ];
    let judged = parts.map(|(name, measure, most)| Goal {
        what: format!("gateway: {name}, the longest of {TIMES}"),
        wanted: Wanted::AtMostMillis(most),
        measured: Some(measure(program).as_secs_f64() * 1_000.0),
        beside: String::new(),
    });
    judged.into()
}

/// A chat that reserves so many tokens and uses 20 of them.
fn chat(reserved: u64, is_stream: bool) -> Vec<u8> {
    let cap = reserved - 8;
    let body = format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap},"stream":{is_stream},"metadata":{{"input_tokens":"8","output_tokens":"12"}}}}"#
    );
    request(&body)
}

/// One call after the other, of which a window has room for one: how much later than a window they arrive.
fn after_room(program: &Path) -> Duration {
    let window = Duration::from_secs(2);
    let provider = Provider::start(openai);
    let config = format!(
        "[server]\nlog = 'off'\n[llm]\nwindow = '2s'\nmargin = '0s'\n[llm.models.gpt-4o]\nrpm = 1\n[llm.upstreams.up]\nkind = 'openai'\n\
         base_url = 'http://{}/v1'\napi_key = 'x'\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let server = Tollgate::builder(program).config(&config).start();
    let mut reader = connect(server.http());
    for _ in 0..=TIMES {
        assert_eq!(ask(&mut reader, &chat(20, false)).expect("an answer"), 200);
    }
    let arrivals = provider.arrivals();
    let late = arrivals.windows(2).map(|pair| (pair[1].at - pair[0].at).saturating_sub(window));
    late.max().unwrap_or_default()
}

/// A call that waits for what another has reserved and does not use.
fn after_settlement(program: &Path) -> Duration {
    let provider = Provider::start(|arrival| openai(arrival).paced(Duration::from_millis(200)));
    let server = gateway(program, provider.address(), "tpm = 1500");
    let mut longest = Duration::ZERO;
    for _ in 0..TIMES {
        let (mut first, mut second) = (connect(server.http()), connect(server.http()));
        let before = provider.arrivals().len();
        first.get_mut().write_all(&chat(900, false)).expect("sent");
        wait_until(|| provider.arrivals().len() == before + 1);
        second.get_mut().write_all(&chat(900, false)).expect("sent");
        assert_eq!(ask(&mut first, b"").expect("an answer"), 200);
        let ended = Instant::now();
        assert_eq!(ask(&mut second, b"").expect("an answer"), 200);
        longest = longest.max(provider.arrivals()[before + 1].at.saturating_duration_since(ended));
    }
    longest
}

/// A client that closes its stream after the first word.
fn after_close(program: &Path) -> Duration {
    let provider = Provider::start(|_| {
        let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n".to_owned();
        Reply::events(std::iter::repeat_n(word, 1_000)).paced(Duration::from_millis(10))
    });
    let server = gateway(program, provider.address(), "rpm = 1000");
    let mut longest = Duration::ZERO;
    for times in 1..=TIMES {
        let mut reader = connect(server.http());
        reader.get_mut().write_all(&chat(100, true)).expect("sent");
        assert_eq!(head(&mut reader).expect("a head").0, 200);
        assert!(chunk(&mut reader).expect("a word").is_some());
        longest = longest.max(leave(reader, || provider.cut() == times));
    }
    longest
}

/// A client that leaves while it waits in line.
fn after_leaving(program: &Path) -> Duration {
    let provider = Provider::start(openai);
    let server = gateway(program, provider.address(), "tpm = 110");
    let mut first = connect(server.http());
    assert_eq!(ask(&mut first, &chat(100, false)).expect("an answer"), 200);
    let in_line = |count: usize| {
        server.get("/metrics").body.contains(&format!("tollgate_llm_queue{{model=\"gpt-4o\"}} {count}"))
    };
    let mut longest = Duration::ZERO;
    for _ in 0..TIMES {
        let mut reader = connect(server.http());
        reader.get_mut().write_all(&chat(100, false)).expect("sent");
        wait_until(|| in_line(1));
        longest = longest.max(leave(reader, || in_line(0)));
    }
    longest
}

/// How long something takes after a client has closed its connection.
fn leave(reader: BufReader<TcpStream>, is_so: impl FnMut() -> bool) -> Duration {
    drop(reader);
    let left = Instant::now();
    wait_until(is_so);
    left.elapsed()
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}
