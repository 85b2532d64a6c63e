//! Each mode of the proxy does what it says, and not more.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tollgate_testkit::Random;
use tollgate_testkit::proxy::{FaultProxy, Mode};

/// How long a test listens to silence before it believes it.
const SILENCE: Duration = Duration::from_millis(80);

/// A server that answers every byte with the same byte, and counts them.
struct Echo {
    port: u16,
    received: Arc<AtomicUsize>,
}

impl Echo {
    fn start() -> Echo {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (port, received) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&received);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    stream.set_nodelay(true).unwrap();
                    let mut buffer = [0; 4096];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        count.fetch_add(length, Ordering::SeqCst);
                        if stream.write_all(&buffer[..length]).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Echo { port, received }
    }

    fn received(&self) -> usize {
        self.received.load(Ordering::SeqCst)
    }
}

fn connect(proxy: &FaultProxy) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends and waits for the echo.
fn echo(mut stream: &TcpStream, text: &[u8]) {
    stream.write_all(text).unwrap();
    expect(stream, text);
}

fn expect(mut stream: &TcpStream, text: &[u8]) {
    let mut reply = vec![0; text.len()];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply, text);
}

fn is_silent(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    let read = stream.read(&mut [0; 16]);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    matches!(read, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn passing_is_transparent_even_for_much_data_and_half_closed_connections() {
    let (server, mut random) = (Echo::start(), Random::seeded(3));
    let proxy = FaultProxy::start(server.port);
    let data: Vec<u8> = (0..1_000_000).map(|_| random.next().to_le_bytes()[0]).collect();
    let stream = connect(&proxy);
    let mut writer = stream.try_clone().unwrap();
    let sent = data.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    (&stream).read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received == data, "{} bytes came back", received.len());
    assert_eq!(proxy.accepted(), 1);
    eventually("the connection is forgotten", || proxy.connections() == 0);
}

#[test]
fn latency_is_added_each_way_and_keeps_the_order() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    let mut stream = connect(&proxy);
    echo(&stream, b"quick");
    proxy.set(Mode::Latency(Duration::from_millis(40)));
    let start = Instant::now();
    stream.write_all(b"one").unwrap();
    proxy.set(Mode::Pass);
    stream.write_all(b"two").unwrap();
    expect(&stream, b"onetwo");
    let took = start.elapsed();
    // The first write may have been read before or after the mode went back, so only the whole order is certain here.
    assert!(took < Duration::from_secs(5), "{took:?}");
    proxy.set(Mode::Latency(Duration::from_millis(40)));
    let start = Instant::now();
    echo(&stream, b"slow");
    assert!(start.elapsed() >= Duration::from_millis(80), "{:?}", start.elapsed());
    // Latency is not a queue: a hundred requests sent together come back together, and not one after the other in eight seconds.
    let start = Instant::now();
    for _ in 0..100 {
        stream.write_all(b"x").unwrap();
    }
    expect(&stream, &[b'x'; 100]);
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn what_is_sent_into_a_stall_arrives_after_it() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    let mut old = connect(&proxy);
    echo(&old, b"a");
    proxy.set(Mode::Stall);
    let mut new = connect(&proxy);
    old.write_all(b"old").unwrap();
    new.write_all(b"new").unwrap();
    assert!(is_silent(&old) && is_silent(&new));
    assert_eq!(server.received(), 1);
    proxy.set(Mode::Pass);
    expect(&old, b"old");
    expect(&new, b"new");
}

#[test]
fn a_blackhole_takes_everything_and_gives_nothing_back_even_afterwards() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    let mut old = connect(&proxy);
    let unused = connect(&proxy);
    echo(&old, b"a");
    echo(&unused, b"b");
    proxy.set(Mode::Blackhole);
    let mut new = connect(&proxy);
    old.write_all(b"lost").unwrap();
    new.write_all(b"lost").unwrap();
    assert!(is_silent(&old) && is_silent(&new));
    assert_eq!(server.received(), 2);
    assert_eq!(proxy.connections(), 3);
    proxy.set(Mode::Pass);
    // Bytes are missing, so nothing may follow them; a connection that lost nothing goes on, and so do new ones.
    old.write_all(b"more").unwrap();
    assert!(is_silent(&old));
    assert_eq!(server.received(), 2);
    echo(&unused, b"c");
    echo(&connect(&proxy), b"d");
    drop(old);
    eventually("the client's end is noticed", || proxy.connections() == 2);
}

#[test]
fn reset_reaches_open_connections_and_new_ones() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    let mut old = connect(&proxy);
    echo(&old, b"a");
    proxy.set(Mode::Reset);
    assert_eq!(proxy.connections(), 0);
    assert_eq!(old.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    // A new one is accepted by the kernel and reset right after, perhaps before connecting has returned.
    let new =
        TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).and_then(|mut new| new.read(&mut [0; 1]));
    assert_eq!(new.unwrap_err().kind(), ErrorKind::ConnectionReset);
    proxy.set(Mode::Pass);
    let stream = connect(&proxy);
    echo(&stream, b"b");
    proxy.reset_connections();
    assert_eq!((&stream).read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(proxy.mode(), Mode::Pass);
    echo(&connect(&proxy), b"c");
}

#[test]
fn swallowed_replies_were_carried_out() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    let mut stream = connect(&proxy);
    proxy.set(Mode::SwallowReplies);
    stream.write_all(b"abc").unwrap();
    assert!(is_silent(&stream));
    assert_eq!((server.received(), proxy.swallowed(), proxy.connections()), (3, 1, 1));
    proxy.set(Mode::Pass);
    stream.write_all(b"def").unwrap();
    assert!(is_silent(&stream), "a later reply must not come in place of a lost one");
    assert_eq!(server.received(), 6);
    drop(stream);
    eventually("the client's end is noticed", || proxy.connections() == 0);

    proxy.swallow_next(1);
    let (first, second) = (connect(&proxy), connect(&proxy));
    (&first).write_all(b"x").unwrap();
    eventually("one reply is swallowed", || proxy.swallowed() == 2);
    echo(&second, b"y");
    assert!(is_silent(&first));
}

#[test]
fn a_cut_reply_ends_where_it_was_cut() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    for after_bytes in [0, 3, 8] {
        let mut old = connect(&proxy);
        echo(&old, b"whole");
        proxy.set(Mode::CutReply { after_bytes });
        let mut new = connect(&proxy);
        for stream in [&mut old, &mut new] {
            stream.write_all(b"12345678").unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            assert_eq!(received, b"12345678"[..after_bytes]);
        }
        proxy.set(Mode::Pass);
    }
    // A reply that is shorter than the cut passes, and counts.
    proxy.set(Mode::CutReply { after_bytes: 5 });
    let mut stream = connect(&proxy);
    echo(&stream, b"123");
    stream.write_all(b"456").unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"45");
}

#[test]
fn refusing_looks_like_a_dead_server_and_keeps_the_port() {
    let server = Echo::start();
    let proxy = FaultProxy::start(server.port);
    for _ in 0..20 {
        let mut old = connect(&proxy);
        echo(&old, b"a");
        proxy.set(Mode::Refuse);
        assert_eq!(old.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        let refused = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        TcpListener::bind((Ipv4Addr::LOCALHOST, proxy.port())).unwrap_err();
        proxy.set(Mode::Pass);
        echo(&connect(&proxy), b"b");
    }
}

#[test]
fn a_dead_server_behind_the_proxy_is_noticed() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap().port());
    let mut stream = connect(&proxy);
    drop(listener.accept().unwrap());
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "the server closed in good order");
    drop(listener);
    let mut stream = connect(&proxy);
    assert_eq!(stream.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn random_faults_come_as_often_as_asked_and_the_same_with_the_same_seed() {
    let server = Echo::start();
    let count = |seed| {
        let proxy = FaultProxy::start_seeded(server.port, seed);
        let delay = Duration::from_millis(20);
        proxy.set(Mode::Faulty { swallow_per_mille: 100, delay_per_mille: 100, delay });
        let (mut swallowed, mut delayed) = (Vec::new(), 0);
        for round in 0..300 {
            let mut stream = connect(&proxy);
            let start = Instant::now();
            stream.write_all(b"x").unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(3))).unwrap();
            let before = swallowed.len();
            // A reply that is late may be delayed or swallowed, and the proxy knows which.
            while stream.read(&mut [0; 1]).is_err() {
                if proxy.swallowed() > before {
                    swallowed.push(round);
                    break;
                }
            }
            delayed += usize::from(before == swallowed.len() && start.elapsed() >= delay);
        }
        assert_eq!(proxy.swallowed(), swallowed.len());
        (swallowed, delayed)
    };
    let (swallowed, delayed) = count(7);
    assert!((10..60).contains(&swallowed.len()), "{} of 300 swallowed", swallowed.len());
    assert!(delayed >= 10, "{delayed} of 300 delayed");
    assert_eq!(count(7).0, swallowed);
    assert_ne!(count(8).0, swallowed);
}
