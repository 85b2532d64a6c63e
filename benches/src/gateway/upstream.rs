//! A provider that answers at once, and whose streams say in every event when it was sent.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Between two events of a stream.
const PACE: Duration = Duration::from_millis(10);
const EVENTS: usize = 50;

/// When this process began: what events count from.
static BEGAN: OnceLock<Instant> = OnceLock::new();

pub(super) struct Upstream {
    address: SocketAddr,
}

impl Upstream {
    pub(super) fn start() -> Result<Upstream, String> {
        BEGAN.get_or_init(Instant::now);
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || drop(serve(stream)));
            }
        });
        Ok(Upstream { address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

fn serve(stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    loop {
        // A request's head has a line and fields, as an answer's has.
        let (_, length) = super::head(&mut reader)?;
        let Some(length) = length else { return Ok(()) };
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let wants_stream = b"\"stream\":true";
        let stream = reader.get_mut();
        let compact: Vec<u8> = body.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
        match compact.windows(wants_stream.len()).any(|window| window == wants_stream) {
            true => events(stream)?,
            false => {
                let answer = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"gpt-4o","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"Hello there"}}],"usage":{"prompt_tokens":230,"completion_tokens":2,"total_tokens":232}}"#;
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{answer}",
                    answer.len()
                );
                stream.write_all(head.as_bytes())?;
            }
        }
    }
}

fn events(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    )?;
    let mut send = |data: &str| {
        let event = format!("data: {data}\n\n");
        stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes())
    };
    for _ in 0..EVENTS {
        std::thread::sleep(PACE);
        let micros = BEGAN.get_or_init(Instant::now).elapsed().as_micros();
        send(&format!(
            r#"{{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt-4o","choices":[{{"index":0,"delta":{{"content":"at={micros}."}},"finish_reason":null}}]}}"#
        ))?;
    }
    send(
        r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt-4o","choices":[],"usage":{"prompt_tokens":230,"completion_tokens":50,"total_tokens":280}}"#,
    )?;
    send("[DONE]")?;
    stream.write_all(b"0\r\n\r\n")
}

/// How late the events in these bytes are, in microseconds.
pub(super) fn late(bytes: &[u8]) -> Vec<u64> {
    let now = u64::try_from(BEGAN.get_or_init(Instant::now).elapsed().as_micros()).unwrap_or(u64::MAX);
    let text = String::from_utf8_lossy(bytes);
    let sent = text.split("at=").skip(1).filter_map(|rest| rest.split('.').next()?.parse::<u64>().ok());
    sent.map(|sent| now.saturating_sub(sent)).collect()
}
