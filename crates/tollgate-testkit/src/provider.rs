//! A provider of language models on loopback: it answers by a script, records every arrival, and judges whether its limits were kept.
//!
//! The script is a closure from an arrival to a reply, and a reply is a list of steps: bytes, pauses, an end before the end. The judge
//! keeps its own exact window over what arrived, with 50 ms of slack for the way between two clocks, and answers 429 where a
//! provider would.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

/// How much two arrivals may be nearer to each other than they were sent.
const SLACK: Duration = Duration::from_millis(50);

/// A request that has arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When.
    pub at: Instant,
    /// Its number, from 0.
    pub number: usize,
    /// Its path.
    pub path: String,
    /// Its header lines, in lower case.
    pub headers: Vec<String>,
    /// Its body, as it was sent.
    pub raw: String,
    /// Its body.
    pub body: Value,
    /// The tokens that the judge counts for it.
    pub tokens: u64,
}

impl Arrival {
    /// Whether it asks for a stream.
    pub fn is_stream(&self) -> bool {
        self.body["stream"] == true
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// What is sent back.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// Header lines besides the length.
    pub headers: Vec<String>,
    /// The body, step by step.
    pub steps: Vec<Step>,
}

/// A step of a reply.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends bytes.
    Send(Vec<u8>),
    /// Waits.
    Pause(Duration),
    /// Closes the connection, whatever is missing.
    Cut,
}

impl Reply {
    /// A JSON answer.
    pub fn json(status: u16, body: &Value) -> Reply {
        let steps = vec![Step::Send(body.to_string().into_bytes())];
        Reply { status, headers: vec!["content-type: application/json".to_owned()], steps }
    }

    /// A stream of these events.
    pub fn events(events: impl IntoIterator<Item = String>) -> Reply {
        let steps = events.into_iter().map(|event| Step::Send(event.into_bytes())).collect();
        Reply { status: 200, headers: vec!["content-type: text/event-stream".to_owned()], steps }
    }

    /// The same with a pause before each step.
    #[must_use]
    pub fn paced(mut self, pause: Duration) -> Reply {
        self.steps = self.steps.into_iter().flat_map(|step| [Step::Pause(pause), step]).collect();
        self
    }

    /// The same, cut after so many steps.
    #[must_use]
    pub fn cut_after(mut self, steps: usize) -> Reply {
        self.steps.truncate(steps);
        self.steps.push(Step::Cut);
        self
    }

    /// The same with another header line.
    #[must_use]
    pub fn header(mut self, line: &str) -> Reply {
        self.headers.push(line.to_owned());
        self
    }
}

/// What the judge allows.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// Requests in any window.
    pub requests: u64,
    /// Tokens in any window.
    pub tokens: u64,
    /// The window.
    pub window: Duration,
}

type Script = Arc<dyn Fn(&Arrival) -> Reply + Send + Sync>;

/// A provider under test.
pub struct Provider {
    address: SocketAddr,
    state: Arc<State>,
}

struct State {
    script: Script,
    allowed: Option<Allowed>,
    arrivals: Mutex<Vec<Arrival>>,
    refused: AtomicUsize,
    cut: AtomicUsize,
}

impl Provider {
    /// One that answers by a script and allows everything.
    pub fn start(script: impl Fn(&Arrival) -> Reply + Send + Sync + 'static) -> Provider {
        Provider::with(None, script)
    }

    /// One that judges.
    pub fn judging(allowed: Allowed, script: impl Fn(&Arrival) -> Reply + Send + Sync + 'static) -> Provider {
        Provider::with(Some(allowed), script)
    }

    fn with(
        allowed: Option<Allowed>,
        script: impl Fn(&Arrival) -> Reply + Send + Sync + 'static,
    ) -> Provider {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            script: Arc::new(script),
            allowed,
            arrivals: Mutex::default(),
            refused: AtomicUsize::new(0),
            cut: AtomicUsize::new(0),
        });
        let served = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = served.clone();
                std::thread::spawn(move || drop(state.serve(&stream)));
            }
        });
        Provider { address, state }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All that has arrived.
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.state.arrivals.lock().clone()
    }

    /// How many arrivals it answered with 429, because a limit of its own was exceeded.
    pub fn refused(&self) -> usize {
        self.state.refused.load(Ordering::Relaxed)
    }

    /// How many of its answers were not read to their end.
    pub fn cut(&self) -> usize {
        self.state.cut.load(Ordering::Relaxed)
    }

    /// Panics unless its limits were kept in every window.
    pub fn assert_clean(&self) {
        assert_eq!(self.refused(), 0, "the judge refused some");
        let allowed = self.state.allowed.expect("a judge");
        let arrivals = self.arrivals();
        for last in &arrivals {
            let (requests, tokens) = used(&arrivals, last.at, allowed.window);
            assert!(requests <= allowed.requests, "{requests} requests in a window of {}", allowed.requests);
            assert!(tokens <= allowed.tokens, "{tokens} tokens in a window of {}", allowed.tokens);
        }
    }
}

/// What arrived in the window that ends now.
fn used(arrivals: &[Arrival], now: Instant, window: Duration) -> (u64, u64) {
    let counts = |arrival: &&Arrival| arrival.at <= now && now.duration_since(arrival.at) + SLACK < window;
    let counted = arrivals.iter().filter(counts);
    counted.fold((0, 0), |(requests, tokens), arrival| (requests + 1, tokens + arrival.tokens))
}

impl State {
    fn serve(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        loop {
            let Some(mut arrival) = self.read(&mut reader)? else { return Ok(()) };
            let reply = match self.judge(&mut arrival) {
                true => (self.script)(&arrival),
                false => {
                    let error = json!({ "error": { "message": "Rate limit reached", "type": "tokens", "code": "rate_limit_exceeded" } });
                    Reply::json(429, &error)
                }
            };
            if let Err(error) = send(stream, &reply) {
                self.cut.fetch_add(1, Ordering::Relaxed);
                return Err(error);
            }
        }
    }

    fn read(&self, reader: &mut BufReader<&TcpStream>) -> std::io::Result<Option<Arrival>> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_owned());
        }
        let path = lines.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
        let lower = |line: &String| match line.split_once(':') {
            Some((name, value)) => format!("{}:{value}", name.to_ascii_lowercase()),
            None => line.clone(),
        };
        let headers: Vec<String> = lines.iter().skip(1).map(lower).collect();
        let length =
            headers.iter().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let raw = String::from_utf8_lossy(&body).into_owned();
        let body: Value = serde_json::from_str(&raw).unwrap_or_default();
        let tokens = tokens_of(&body);
        Ok(Some(Arrival { at: Instant::now(), number: 0, path, headers, raw, body, tokens }))
    }

    /// Records an arrival; false if it exceeds a limit. What is refused counts as a request, as providers count it.
    fn judge(&self, arrival: &mut Arrival) -> bool {
        let mut arrivals = self.arrivals.lock();
        let now = Instant::now();
        (arrival.at, arrival.number) = (now, arrivals.len());
        arrivals.push(arrival.clone());
        let Some(allowed) = self.allowed else { return true };
        let (requests, tokens) = used(&arrivals, now, allowed.window);
        let is_kept = requests <= allowed.requests && tokens <= allowed.tokens;
        if !is_kept {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        is_kept
    }
}

/// What the answers of [`openai`] and [`anthropic`] report: `input_tokens` of the request's `metadata`, else 10, and its cap as output.
pub fn usage_of(body: &Value) -> (u64, u64) {
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
    let input = number(&body["metadata"]["input_tokens"]).unwrap_or(10);
    let caps = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
        .iter()
        .filter_map(|name| number(&body[*name]));
    let output = number(&body["metadata"]["output_tokens"]).or(caps.max()).unwrap_or(5);
    (input, output)
}

fn tokens_of(body: &Value) -> u64 {
    let (input, output) = usage_of(body);
    input + output
}

fn send(mut stream: &TcpStream, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Scripted\r\n", reply.status);
    for line in &reply.headers {
        head.push_str(&format!("{line}\r\n"));
    }
    let is_whole = matches!(reply.steps[..], [Step::Send(_)] | []);
    match (&reply.steps[..], is_whole) {
        ([Step::Send(body)], _) => head.push_str(&format!("content-length: {}\r\n\r\n", body.len())),
        ([], _) => head.push_str("content-length: 0\r\n\r\n"),
        _ => head.push_str("transfer-encoding: chunked\r\n\r\n"),
    }
    stream.write_all(head.as_bytes())?;
    for step in &reply.steps {
        match step {
            Step::Send(bytes) if is_whole => stream.write_all(bytes)?,
            Step::Send(bytes) if bytes.is_empty() => {}
            Step::Send(bytes) => {
                let chunk = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
                stream.write_all(&chunk)?;
            }
            Step::Pause(pause) => std::thread::sleep(*pause),
            Step::Cut => {
                stream.shutdown(Shutdown::Both)?;
                return Ok(());
            }
        }
    }
    if !is_whole {
        stream.write_all(b"0\r\n\r\n")?;
    }
    Ok(())
}

/// An answer of OpenAI's chat completions, streamed where that is asked for, with usage where that is.
pub fn openai(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let usage =
        json!({ "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output });
    let model = &arrival.body["model"];
    if !arrival.is_stream() {
        return Reply::json(
            200,
            &json!({
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "usage": usage,
                "choices": [{ "index": 0, "finish_reason": "stop", "message": { "role": "assistant", "content": "Hello there" } }],
            }),
        );
    }
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let asks = arrival.body["stream_options"]["include_usage"] == true;
    let word = |text: &str| {
        chunk(json!([{ "index": 0, "delta": { "content": text }, "finish_reason": null }]), Value::Null)
    };
    let mut events = vec![word("Hel"), word("lo"), word(" there")];
    events.push(chunk(json!([{ "index": 0, "delta": {}, "finish_reason": "stop" }]), Value::Null));
    if asks {
        events.push(chunk(json!([]), usage));
    }
    events.push("data: [DONE]\n\n".to_owned());
    Reply::events(events)
}

/// An answer of Anthropic's messages, streamed where that is asked for.
pub fn anthropic(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let model = &arrival.body["model"];
    let message = |content: Value, output: u64| {
        json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": null,
            "stop_sequence": null, "usage": { "input_tokens": input, "output_tokens": output },
        })
    };
    if !arrival.is_stream() {
        return Reply::json(200, &message(json!([{ "type": "text", "text": "Hello there" }]), output));
    }
    let event = |kind: &str, data: Value| format!("event: {kind}\ndata: {data}\n\n");
    let text = |text: &str| {
        let delta = json!({ "type": "text_delta", "text": text });
        event("content_block_delta", json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
    };
    Reply::events([
        event("message_start", json!({ "type": "message_start", "message": message(json!([]), 1) })),
        event(
            "content_block_start",
            json!({ "type": "content_block_start", "index": 0, "content_block": { "type": "text", "text": "" } }),
        ),
        event("ping", json!({ "type": "ping" })),
        text("Hel"),
        text("lo there"),
        event("content_block_stop", json!({ "type": "content_block_stop", "index": 0 })),
        event(
            "message_delta",
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn", "stop_sequence": null }, "usage": { "output_tokens": output } }),
        ),
        event("message_stop", json!({ "type": "message_stop" })),
    ])
}
