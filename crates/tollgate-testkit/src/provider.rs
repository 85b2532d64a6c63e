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
                        .header("retry-after-ms: 100")
                        .header(&format!("x-ratelimit-remaining-requests: {}", arrival.left.0))
                        .header(&format!("x-ratelimit-remaining-tokens: {}", arrival.left.1))
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
        let (input, output) = usage_of(&body);
        let tokens = match path.as_str() {
            "/v1/embeddings" => input,
            // Counting is free, and so is a list.
            "/v1/messages/count_tokens" | "/v1/models" => 0,
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
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
    let input = number(&body["metadata"]["input_tokens"]).unwrap_or(10);
    let caps = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
        .iter()
        .filter_map(|name| number(&body[*name]));
    let output = number(&body["metadata"]["output_tokens"]).or(caps.max()).unwrap_or(5);
    (input, output)
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

/// What a tool is called with.
const TOOL_INPUT: &str = "{\"city\":\"Riga\"}";

/// What either provider answers on all its routes, with a header of its own.
pub fn any(arrival: &Arrival) -> Reply {
    let reply = match arrival.path.split('?').next().unwrap_or_default() {
        "/v1/messages" => anthropic(arrival),
        "/v1/messages/count_tokens" => {
            Reply::json(200, &json!({ "input_tokens": usage_of(&arrival.body).0 }))
        }
        "/v1/responses" => responses(arrival),
        "/v1/embeddings" => embeddings(arrival),
        "/v1/models" => models(),
        _ => openai(arrival),
    };
    reply.header("x-custom: kept")
}

/// The list of models of either provider.
fn models() -> Reply {
    let model = |id: &str| {
        json!({
            "id": id, "object": "model", "type": "model", "created": 0, "owned_by": "up", "display_name": id,
            "created_at": "1970-01-01T00:00:00Z",
        })
    };
    let data: Vec<Value> = ["gpt-4o", "text-embedding-3-small"].into_iter().map(model).collect();
    Reply::json(200, &json!({ "object": "list", "data": data, "has_more": false }))
}

/// An answer of OpenAI's embeddings.
fn embeddings(arrival: &Arrival) -> Reply {
    let input = usage_of(&arrival.body).0;
    let count = arrival.body["input"].as_array().map_or(1, Vec::len);
    let one = |index: usize| json!({ "object": "embedding", "index": index, "embedding": [0.25, -0.5, 1.0] });
    let data: Vec<Value> = (0..count).map(one).collect();
    let usage = json!({ "prompt_tokens": input, "total_tokens": input });
    Reply::json(
        200,
        &json!({ "object": "list", "data": data, "model": arrival.body["model"], "usage": usage }),
    )
}

/// An answer of OpenAI's Responses API, streamed where that is asked for.
pub fn responses(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let usage = json!({
        "input_tokens": input, "input_tokens_details": { "cached_tokens": 0 }, "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": 0 }, "total_tokens": input + output,
    });
    let text = |text: &str| json!({ "type": "output_text", "text": text, "annotations": [] });
    let message = |status: &str, content: Value| json!({ "type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": content });
    let call = json!({
        "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": TOOL_INPUT,
        "status": "completed",
    });
    let output_items = match arrival.body["tools"].is_array() {
        true => json!([call]),
        false => json!([message("completed", json!([text("Hello there")]))]),
    };
    let response = |status: &str, output: &Value, usage: Value| {
        json!({
            "id": "resp_1", "object": "response", "created_at": 1, "model": arrival.body["model"], "status": status,
            "output": output, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "error": null,
            "incomplete_details": null, "instructions": null, "metadata": {}, "temperature": 1.0, "top_p": 1.0, "usage": usage,
        })
    };
    if !arrival.is_stream() {
        return Reply::json(200, &response("completed", &output_items, usage));
    }
    let mut number = 0;
    let mut event = |kind: &str, mut data: Value| {
        (data["type"], data["sequence_number"]) = (kind.into(), number.into());
        number += 1;
        format!("event: {kind}\ndata: {data}\n\n")
    };
    let started = response("in_progress", &json!([]), Value::Null);
    let mut events = vec![event("response.created", json!({ "response": started }))];
    if output_items[0]["type"] == "message" {
        let place = json!({ "item_id": "msg_1", "output_index": 0, "content_index": 0 });
        let at = |more: Value| {
            let mut data = place.clone();
            for (name, value) in more.as_object().into_iter().flatten() {
                data[name] = value.clone();
            }
            data
        };
        let item = message("in_progress", json!([]));
        events.push(event("response.output_item.added", json!({ "output_index": 0, "item": item })));
        events.push(event("response.content_part.added", at(json!({ "part": text("") }))));
        for word in ["Hel", "lo there"] {
            events.push(event("response.output_text.delta", at(json!({ "delta": word, "logprobs": [] }))));
        }
        events.push(event("response.output_text.done", at(json!({ "text": "Hello there", "logprobs": [] }))));
        events.push(event("response.content_part.done", at(json!({ "part": text("Hello there") }))));
    }
    let item = &output_items[0];
    events.push(event("response.output_item.done", json!({ "output_index": 0, "item": item })));
    let done = response("completed", &output_items, usage);
    events.push(event("response.completed", json!({ "response": done })));
    Reply::events(events)
}

/// An answer of OpenAI's chat completions, streamed where that is asked for, with usage where that is.
pub fn openai(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let usage =
        json!({ "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output });
    let model = &arrival.body["model"];
    let has_tools = arrival.body["tools"].is_array();
    if !arrival.is_stream() {
        let message = match has_tools {
            false => json!({ "role": "assistant", "content": "Hello there" }),
            true => json!({ "role": "assistant", "content": null, "tool_calls": [{
                "id": "call_1", "type": "function", "function": { "name": "weather", "arguments": TOOL_INPUT },
            }] }),
        };
        return Reply::json(
            200,
            &json!({
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "usage": usage,
                "choices": [{ "index": 0, "finish_reason": "stop", "message": message }],
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
    let call = |function: Value| {
        let call = json!({ "index": 0, "id": "call_1", "type": "function", "function": function });
        chunk(json!([{ "index": 0, "delta": { "tool_calls": [call] }, "finish_reason": null }]), Value::Null)
    };
    let mut events = match has_tools {
        false => vec![word("Hel"), word("lo"), word(" there")],
        true => vec![
            call(json!({ "name": "weather", "arguments": "" })),
            call(json!({ "arguments": &TOOL_INPUT[..5] })),
            call(json!({ "arguments": &TOOL_INPUT[5..] })),
        ],
    };
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
    let has_tools = arrival.body["tools"].is_array();
    let tool =
        |input: Value| json!({ "type": "tool_use", "id": "toolu_1", "name": "weather", "input": input });
    if !arrival.is_stream() {
        let content = match has_tools {
            false => json!([{ "type": "text", "text": "Hello there" }]),
            true => json!([tool(json!({ "city": "Riga" }))]),
        };
        return Reply::json(200, &message(content, output));
    }
    let event = |kind: &str, data: Value| format!("event: {kind}\ndata: {data}\n\n");
    let delta = |delta: Value| {
        event("content_block_delta", json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
    };
    let part = |text: &str| match has_tools {
        false => delta(json!({ "type": "text_delta", "text": text })),
        true => delta(json!({ "type": "input_json_delta", "partial_json": text })),
    };
    let (block, parts) = match has_tools {
        false => (json!({ "type": "text", "text": "" }), ["Hel", "lo there"]),
        true => (tool(json!({})), [&TOOL_INPUT[..5], &TOOL_INPUT[5..]]),
    };
    Reply::events([
        event("message_start", json!({ "type": "message_start", "message": message(json!([]), 1) })),
        event(
            "content_block_start",
            json!({ "type": "content_block_start", "index": 0, "content_block": block }),
        ),
        event("ping", json!({ "type": "ping" })),
        part(parts[0]),
        part(parts[1]),
        event("content_block_stop", json!({ "type": "content_block_stop", "index": 0 })),
        event(
            "message_delta",
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn", "stop_sequence": null }, "usage": { "output_tokens": output } }),
        ),
        event("message_stop", json!({ "type": "message_stop" })),
    ])
}
