//! A provider of language models on loopback: it answers by a script, records every arrival, and judges whether its limits were kept.
//!
//! The script is a closure from an arrival to a reply, and a reply is a list of steps: bytes, pauses, an end before the end. The judge
//! keeps its own exact window over what arrived, with 50 ms of slack for the way between two clocks, and answers 429 where a
//! provider would. `provider/replies.rs` has what providers answer, `provider/stream.rs` a client's connection, plain or under TLS.

mod replies;
mod stream;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

pub use self::replies::{anthropic, any, openai, responses};
use self::stream::{Acceptor, Stream};
use crate::tls::Certificates;

/// How much two arrivals may be nearer to each other than they were sent.
const SLACK: Duration = Duration::from_millis(50);

/// A request that has arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When.
    pub at: Instant,
    /// Its number, from 0.
    pub number: usize,
    /// Its path, with its query.
    pub path: String,
    /// Its header lines, in lower case.
    pub headers: Vec<String>,
    /// Its body, as it was sent.
    pub raw: String,
    /// Its body.
    pub body: Value,
    /// The tokens that the judge counts for it.
    pub tokens: u64,
    /// Whether the judge refused it.
    pub is_refused: bool,
    /// What the judge has left with it, in requests and tokens.
    pub left: (u64, u64),
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
        Provider::with(None, Acceptor::Plain, script)
    }

    /// The same under TLS, with the server's certificate.
    pub fn start_tls(
        certificates: &Certificates,
        script: impl Fn(&Arrival) -> Reply + Send + Sync + 'static,
    ) -> Provider {
        Provider::with(None, Acceptor::tls(certificates), script)
    }

    /// One that judges.
    pub fn judging(allowed: Allowed, script: impl Fn(&Arrival) -> Reply + Send + Sync + 'static) -> Provider {
        Provider::with(Some(allowed), Acceptor::Plain, script)
    }

    fn with(
        allowed: Option<Allowed>,
        acceptor: Acceptor,
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
                let (state, stream) = (served.clone(), acceptor.accept(stream));
                std::thread::spawn(move || drop(stream.and_then(|stream| state.serve(stream))));
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
    fn serve(&self, stream: Stream) -> std::io::Result<()> {
        stream.socket().set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        loop {
            let Some(mut arrival) = self.read(&mut reader)? else { return Ok(()) };
            let reply = match self.judge(&mut arrival) {
                true => (self.script)(&arrival),
                false => {
                    let error = json!({ "error": { "message": "Rate limit reached", "type": "tokens", "code": "rate_limit_exceeded" } });
                    Reply::json(429, &error)
                        .header("retry-after-ms: 100")
                        .header(&format!("x-ratelimit-remaining-requests: {}", arrival.left.0))
                        .header(&format!("x-ratelimit-remaining-tokens: {}", arrival.left.1))
                }
            };
            if let Err(error) = send(reader.get_mut(), &reply) {
                self.cut.fetch_add(1, Ordering::Relaxed);
                return Err(error);
            }
        }
    }

    fn read(&self, reader: &mut BufReader<Stream>) -> std::io::Result<Option<Arrival>> {
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
        let (input, output) = usage_of(&body);
        let tokens = match path.split('?').next().unwrap_or_default() {
            "/v1/embeddings" => input,
            // Counting is free, and so is a list.
            "/v1/messages/count_tokens" | "/v1/models" => 0,
            // Anthropic's input is without what a cache has read, which counts for some of its models.
            "/v1/messages" if body["metadata"]["cache_reads_count"] == true => {
                input + output + cached_of(&body)
            }
            _ => input + output,
        };
        let at = Instant::now();
        let left = (u64::MAX, u64::MAX);
        Ok(Some(Arrival { at, number: 0, path, headers, raw, body, tokens, is_refused: false, left }))
    }

    /// Records an arrival; false if it exceeds a limit. What is refused counts as a request, as providers count it.
    fn judge(&self, arrival: &mut Arrival) -> bool {
        let mut arrivals = self.arrivals.lock();
        let now = Instant::now();
        (arrival.at, arrival.number) = (now, arrivals.len());
        arrivals.push(arrival.clone());
        let Some(allowed) = self.allowed else { return true };
        let (requests, tokens) = used(&arrivals, now, allowed.window);
        arrival.left = (allowed.requests.saturating_sub(requests), allowed.tokens.saturating_sub(tokens));
        arrival.is_refused = requests > allowed.requests || tokens > allowed.tokens;
        if arrival.is_refused {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        let number = arrival.number;
        arrivals[number] = arrival.clone();
        !arrival.is_refused
    }
}

/// What the answers of [`openai`] and [`anthropic`] report: `input_tokens` of the request's `metadata`, else 10, and its cap as output.
pub fn usage_of(body: &Value) -> (u64, u64) {
    let input = number(&body["metadata"]["input_tokens"]).unwrap_or(10);
    let caps = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
        .iter()
        .filter_map(|name| number(&body[*name]));
    let output = number(&body["metadata"]["output_tokens"]).or(caps.max()).unwrap_or(5);
    (input, output)
}

/// What they report as read from a cache: `cached_tokens` of the request's `metadata`, else nothing. It is a part of OpenAI's input, and beside
/// that of Anthropic.
pub fn cached_of(body: &Value) -> u64 {
    number(&body["metadata"]["cached_tokens"]).unwrap_or(0)
}

/// A number, also one that is written as a text, as OpenAI's metadata has it.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()))
}

fn send(stream: &mut Stream, reply: &Reply) -> std::io::Result<()> {
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
                stream.socket().shutdown(Shutdown::Both)?;
                return Ok(());
            }
        }
    }
    if !is_whole {
        stream.write_all(b"0\r\n\r\n")?;
    }
    Ok(())
}
