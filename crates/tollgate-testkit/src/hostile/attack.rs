//! What peers of ill will do, each by itself. All of them come from one address, which is not that of honest clients.
//!
//! An attack ends when the server has had enough of it, or when there is no more of it to send; where there is one thing that the
//! server must say, it is held to it. What the server uses and how others fare meanwhile is for the caller to look at.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::frames::{
    self, ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GO_AWAY, HEADERS, PING, RESET, SETTINGS,
};
use super::honest::Faces;

/// Whom all attacks come from.
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66));

/// How many connections an attack keeps open at once, where it lives by that.
const CROWD: usize = 200;

/// How long anything may take; only a hang does.
const HANGS: Duration = Duration::from_secs(120);

const HEAD: &str = "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";

/// Something that is done to a server.
pub struct Attack {
    /// What it is called.
    pub name: &'static str,
    /// Does it once.
    pub run: fn(&Faces),
}

/// All of them.
pub const ATTACKS: [Attack; 18] = [
    Attack { name: "heads, a byte at a time", run: slow_heads },
    Attack { name: "bodies, a byte at a time", run: slow_bodies },
    Attack { name: "bodies of 64 MiB", run: long_bodies },
    Attack { name: "JSON 100,000 deep", run: deep_json },
    Attack { name: "calls of models without end", run: long_calls },
    Attack { name: "gRPC messages of 10 MiB", run: long_messages },
    Attack { name: "HTTP/2: streams opened and reset", run: rapid_reset },
    Attack { name: "HTTP/2: streams and no end of them", run: many_streams },
    Attack { name: "HTTP/2: calls that do not come whole", run: unfinished_calls },
    Attack { name: "HTTP/2: headers and no end of them", run: endless_headers },
    Attack { name: "HTTP/2: a header list of 1 MiB", run: long_header_list },
    Attack { name: "HTTP/2: pings and settings", run: pings_and_settings },
    Attack { name: "RESP: 1 GiB announced", run: announced_bulk },
    Attack { name: "RESP: 1,000,000 arguments", run: many_arguments },
    Attack { name: "RESP: a line without end", run: endless_line },
    Attack { name: "RESP: answers that nobody reads", run: unread_answers },
    Attack { name: "connections that say nothing", run: silence },
    Attack { name: "100,000 connections opened and reset", run: opened_and_reset },
];

fn socket(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&SocketAddr::new(PEER, 0).into())?;
    socket.connect(&to.into())?;
    Ok(socket)
}

fn dial(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::from(socket(to).expect("it listens"));
    stream.set_read_timeout(Some(HANGS)).expect("an option");
    stream.set_write_timeout(Some(HANGS)).expect("an option");
    stream
}

/// Whether the server has hung up. What it received before is added to `received`.
fn is_over(stream: &mut TcpStream, received: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 1024];
    match stream.read(&mut bytes) {
        Ok(0) => true,
        Ok(size) => {
            received.extend_from_slice(&bytes[..size]);
            false
        }
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Sends a crowd's beginnings, then a byte to each now and then, until all are closed; returns what they received.
fn drip(to: SocketAddr, beginning: &str) -> Vec<String> {
    let mut crowd: Vec<(TcpStream, Vec<u8>)> = (0..CROWD).map(|_| (dial(to), Vec::new())).collect();
    for (stream, _) in &mut crowd {
        stream.write_all(beginning.as_bytes()).expect("room");
        stream.set_nonblocking(true).expect("an option");
    }
    let end = Instant::now() + HANGS;
    let mut reported = Vec::new();
    while !crowd.is_empty() {
        assert!(Instant::now() < end, "{} are still waited for", crowd.len());
        crowd.retain_mut(|(stream, received)| {
            let _ = stream.write(b"x");
            let is_over = is_over(stream, received);
            if is_over {
                reported.push(String::from_utf8_lossy(received).into_owned());
            }
            !is_over
        });
        // The attack itself: a byte now and then.
        std::thread::sleep(Duration::from_millis(50));
    }
    reported
}

fn slow_heads(faces: &Faces) {
    for reported in drip(faces.http, "GET /healthz HTTP/1.1\r\nhost: x\r\nx-padding: ") {
        assert_eq!(reported, "", "no head, no answer");
    }
}

fn slow_bodies(faces: &Faces) {
    for reported in drip(faces.http, &format!("{HEAD}content-length: 60000\r\n\r\n")) {
        assert!(reported.starts_with("HTTP/1.1 408 "), "{reported}");
    }
}

/// Sends until the server has had enough, and gives how much that was and what it received.
fn pour(mut stream: TcpStream, beginning: &[u8], piece: &[u8], most: usize) -> (usize, Vec<u8>) {
    let mut sent = 0;
    if stream.write_all(beginning).is_ok() {
        while sent < most && stream.write_all(piece).is_ok() {
            sent += piece.len();
        }
    }
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    (sent, received)
}

fn long_bodies(faces: &Faces) {
    const LONG: usize = 64 * 1024 * 1024;
    let chunk = [b"8000\r\n".as_slice(), &[b' '; 0x8000], b"\r\n"].concat();
    let announced = format!("{HEAD}content-length: {LONG}\r\n\r\n");
    let chunked = format!("{HEAD}transfer-encoding: chunked\r\n\r\n");
    for _ in 0..10 {
        for (head, piece) in [(&announced, &chunk[6..0x8006]), (&chunked, &chunk[..])] {
            let (sent, received) = pour(dial(faces.http), head.as_bytes(), piece, LONG);
            assert!(received.starts_with(b"HTTP/1.1 413 "), "{}", received.escape_ascii());
            assert!(sent < LONG, "all of it was read");
        }
    }
}

fn deep_json(faces: &Faces) {
    for (depth, status) in [(60_000, "400"), (100_000, "413")] {
        for opening in ["[", "{\"limit\":"] {
            let body = opening.repeat(depth / opening.len());
            let head = format!("{HEAD}connection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            for _ in 0..20 {
                let (_, received) = pour(dial(faces.http), head.as_bytes(), body.as_bytes(), 1);
                let expected = format!("HTTP/1.1 {status} ");
                assert!(received.starts_with(expected.as_bytes()), "{depth}: {}", received.escape_ascii());
            }
        }
    }
}

/// Many at once send a call of a language model that never ends: each gets an answer that there is no room for it, or that it is too long.
fn long_calls(faces: &Faces) {
    const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    const LONG: usize = 40 * 1024 * 1024;
    let chunk = [b"8000\r\n".as_slice(), &[b' '; 0x8000], b"\r\n"].concat();
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                for _ in 0..2 {
                    let (sent, received) = pour(dial(faces.http), HEAD.as_bytes(), &chunk, LONG);
                    let is_refused =
                        [b"HTTP/1.1 413 ", b"HTTP/1.1 503 "].iter().any(|start| received.starts_with(*start));
                    assert!(is_refused, "{}", received.escape_ascii());
                    assert!(sent < LONG, "all of it was read");
                }
            });
        }
    });
}

/// A connection that speaks HTTP/2.
fn dial_http2(faces: &Faces) -> TcpStream {
    let mut stream = dial(faces.grpc);
    stream.write_all(&frames::greeting()).expect("room");
    stream
}

/// Reads until the server hangs up or a frame is the last that is waited for.
fn read_until(stream: &mut TcpStream, mut is_last: impl FnMut(&frames::Frame) -> bool) {
    while let Ok(frame) = frames::read(stream) {
        if is_last(&frame) {
            return;
        }
    }
}

fn long_messages(faces: &Faces) {
    const LONG: usize = 10 * 1024 * 1024;
    for _ in 0..20 {
        let mut stream = dial_http2(faces);
        let streams = [1, 3, 5];
        for id in streams {
            stream.write_all(&frames::frame(HEADERS, END_HEADERS, id, &frames::head())).expect("room");
            let begun = frames::message(LONG, &[0; 16 * 1024 - 5]);
            stream.write_all(&frames::frame(DATA, 0, id, &begun)).expect("room");
        }
        // Each is answered though most of it has not come.
        let mut answered = 0;
        read_until(&mut stream, |frame| {
            answered += u32::from(frame.kind == HEADERS && frame.flags & END_STREAM != 0);
            answered == 3
        });
        assert_eq!(answered, 3, "it was hung up on first");
    }
}

/// Sends pieces until the server hangs up or so many are sent, while all that it says is read; true if it hung up in words.
fn flood(faces: &Faces, count: u32, piece: impl Fn(u32) -> Vec<u8>) -> bool {
    let mut stream = dial_http2(faces);
    let mut reading = stream.try_clone().expect("a handle");
    let listening = std::thread::spawn(move || {
        let mut is_over = false;
        read_until(&mut reading, |frame| {
            is_over |= frame.kind == GO_AWAY;
            false
        });
        is_over
    });
    // In larger writes, as fast as it goes.
    for first in (0..count).step_by(64) {
        let pieces: Vec<u8> = (first..(first + 64).min(count)).flat_map(&piece).collect();
        if stream.write_all(&pieces).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    listening.join().expect("no panic")
}

fn rapid_reset(faces: &Faces) {
    for _ in 0..10 {
        let is_over = flood(faces, 20_000, |index| {
            let id = 2 * index + 1;
            let open = frames::frame(HEADERS, END_HEADERS, id, &frames::head());
            [open, frames::frame(RESET, 0, id, &8_u32.to_be_bytes())].concat()
        });
        assert!(is_over, "it was borne");
    }
}

fn many_streams(faces: &Faces) {
    let mut stream = dial_http2(faces);
    let (mut refused, mut is_over) = (0, false);
    for index in 0..1_000 {
        let open = frames::frame(HEADERS, END_HEADERS, 2 * index + 1, &frames::head());
        if stream.write_all(&open).is_err() {
            break;
        }
    }
    // A hundred are open, and all further ones refused; what is open is given up in ten seconds, and nobody waits for that here.
    read_until(&mut stream, |frame| {
        refused += u32::from(frame.kind == RESET && frame.payload == 7_u32.to_be_bytes());
        is_over |= frame.kind == GO_AWAY;
        refused == 900 || is_over
    });
    assert!(refused == 900 || is_over, "{refused} were refused");
}

/// As many connections as one peer may have, as many calls on each, and of each as much as a connection has room for, or more.
fn unfinished_calls(faces: &Faces) {
    let mut padding = Vec::new();
    (0..100).for_each(|_| frames::field(&mut padding, "x-padding", ""));
    let head = [frames::head(), padding].concat();
    for size in [500, 2_500] {
        let begun = frames::message(4_000, &vec![0; size]);
        let call = |id| {
            [frames::frame(HEADERS, END_HEADERS, id, &head), frames::frame(DATA, 0, id, &begun)].concat()
        };
        let calls: Vec<u8> = (0..100).flat_map(|index| call(2 * index + 1)).collect();
        let mut crowd: Vec<TcpStream> = (0..900).map(|_| dial(faces.grpc)).collect();
        for stream in &mut crowd {
            // Whom there is no room for is hung up on.
            let _ = stream.write_all(&[frames::greeting(), calls.clone()].concat());
        }
        // The last message is a ping: once it is answered, all before it was read.
        for stream in &mut crowd {
            let _ = stream.write_all(&frames::frame(PING, 0, 0, &[7; 8]));
            read_until(stream, |frame| frame.kind == PING && frame.flags & ACK != 0);
        }
    }
}

fn endless_headers(faces: &Faces) {
    let is_over = flood(faces, 10_000, |index| {
        let mut block = Vec::new();
        for _ in 0..80 {
            frames::field(&mut block, "x-padding", &"p".repeat(100));
        }
        match index {
            0 => frames::frame(HEADERS, 0, 1, &[frames::head(), block].concat()),
            _ => frames::frame(CONTINUATION, 0, 1, &block),
        }
    });
    assert!(is_over, "it was borne");
}

fn long_header_list(faces: &Faces) {
    for _ in 0..20 {
        let mut stream = dial_http2(faces);
        let mut block = Vec::new();
        (0..80).for_each(|_| frames::field(&mut block, "x-padding", &"p".repeat(100)));
        let mut all = frames::frame(HEADERS, END_STREAM, 1, &[frames::head(), block.clone()].concat());
        (0..120).for_each(|_| all.extend(frames::frame(CONTINUATION, 0, 1, &block)));
        all.extend(frames::frame(CONTINUATION, END_HEADERS, 1, &block));
        let _ = stream.write_all(&all);
        let mut is_refused = false;
        read_until(&mut stream, |frame| {
            // A status in a frame that ends the stream, or the end of all.
            let ends = frame.kind == HEADERS && frame.flags & END_STREAM != 0;
            is_refused |= ends || matches!(frame.kind, RESET | GO_AWAY);
            is_refused
        });
        assert!(is_refused, "it was served");
    }
}

/// Nobody reads the answers; the server must not keep them.
fn pings_and_settings(faces: &Faces) {
    let pieces = [frames::frame(PING, 0, 0, &[7; 8]), frames::frame(SETTINGS, 0, 0, &[])];
    for piece in pieces {
        let mut stream = dial_http2(faces);
        stream.set_write_timeout(Some(Duration::from_secs(1))).expect("an option");
        let many = piece.repeat(1_000);
        // It stops reading once its answers are not taken, or hangs up.
        let sent = (0..2_000).take_while(|_| stream.write_all(&many).is_ok()).count();
        assert!(sent < 2_000, "all of it was read");
    }
}

fn resp_refuses(faces: &Faces, beginning: &[u8], piece: &[u8]) {
    for _ in 0..20 {
        let (sent, received) = pour(dial(faces.resp), beginning, piece, 64 * 1024 * 1024);
        assert!(received.starts_with(b"-ERR Protocol error"), "{}", received.escape_ascii());
        assert!(sent < 64 * 1024 * 1024, "all of it was read");
    }
}

fn announced_bulk(faces: &Faces) {
    resp_refuses(faces, b"*2\r\n$4\r\nPING\r\n$1073741824\r\n", &[b'x'; 0x8000]);
}

fn many_arguments(faces: &Faces) {
    resp_refuses(faces, b"*1000000\r\n", &b"$1\r\na\r\n".repeat(4_096));
}

fn endless_line(faces: &Faces) {
    resp_refuses(faces, b"PING ", &[b'x'; 0x8000]);
}

/// Two hundred connections ask for long answers and read none; others have begun a command of 60 KB.
fn unread_answers(faces: &Faces) {
    let long = format!("*2\r\n$4\r\nECHO\r\n$60000\r\n{}\r\n", "x".repeat(60_000));
    let mut crowd = Vec::new();
    for index in 0..CROWD {
        let mut stream = dial(faces.resp);
        match index % 2 {
            0 => {
                stream.set_write_timeout(Some(Duration::from_millis(50))).expect("an option");
                while stream.write_all(long.as_bytes()).is_ok() {}
            }
            _ => stream.write_all(&long.as_bytes()[..60_000]).expect("room"),
        }
        crowd.push(stream);
    }
}

/// As many as one peer may have, at each face, some of them in the middle of a word.
fn silence(faces: &Faces) {
    let mut crowd = Vec::new();
    for (face, word) in [(faces.http, "GE"), (faces.resp, "*3\r\n$"), (faces.grpc, "PRI *")] {
        for index in 0..900 {
            let mut stream = dial(face);
            if index % 2 == 0 {
                // Over gRPC one peer has room for fewer.
                let _ = stream.write_all(word.as_bytes());
            }
            crowd.push(stream);
        }
    }
    assert_eq!(crowd.len(), 2_700);
}

fn opened_and_reset(faces: &Faces) {
    let faces = [faces.http, faces.resp, faces.grpc];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for index in 0..25_000 {
                    // The machine's own bounds, such as a full accept queue, are no fault of the server.
                    let Ok(socket) = socket(faces[index % 3]) else { continue };
                    let _ = socket.set_linger(Some(Duration::ZERO));
                }
            });
        }
    });
}
