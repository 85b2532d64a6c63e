//! What nobody should send: it is refused, counted separately, and the next call is answered.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};

use tonic::Code;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::{self, StreamExt};

use crate::client::{
    RateLimitRequest, RateLimitResponse, ask, ask_slowly, call, channel, channel_from, descriptor, reported,
};
use crate::server;

const CONFIG: &str = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1d'\n\
                      [[envoy]]\ndomain = 'edge'\nentries = ['user']\nlimit = 'api'\n";

#[tokio::test]
async fn calls_that_make_no_sense_are_refused() {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    let many = vec![descriptor("user=a"); 65];
    let secret = "k".repeat(300 * 1024);
    for (request, code, said) in [
        (RateLimitRequest::default(), Code::InvalidArgument, "the domain is empty"),
        (
            RateLimitRequest { descriptors: vec![], ..call("user=a", 0) },
            Code::InvalidArgument,
            "no descriptors",
        ),
        (
            RateLimitRequest { descriptors: many, ..call("user=a", 0) },
            Code::InvalidArgument,
            "65 descriptors",
        ),
        (call(&"user=a ".repeat(17), 0), Code::InvalidArgument, "17 entries"),
        (call(&format!("user={secret}"), 0), Code::OutOfRange, "too large"),
    ] {
        let error = ask(&channel, request).await.expect_err("it is refused");
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(said), "{error}");
        assert!(!error.message().contains("kkkk"));
    }
    // Nothing of it was charged; and a long value is as good as any, each by itself.
    let long = "k".repeat(100 * 1024);
    for (user, expected) in [
        ("a".to_owned(), "OK: OK 0/1 DAY api"),
        ("\0\n\u{202e}:%&=".to_owned(), "OK: OK 0/1 DAY api"),
        (String::new(), "OK: OK 0/1 DAY api"),
        (long.clone(), "OK: OK 0/1 DAY api"),
        (format!("{long}1"), "OK: OK 0/1 DAY api"),
        (long, "OVER_LIMIT: OVER_LIMIT 0/1 DAY api"),
    ] {
        let mut request = call("user=", 0);
        request.descriptors[0].entries[0].value = user.into_bytes();
        assert_eq!(reported(&ask(&channel, request).await.expect("an answer")), expected);
    }
}

/// Envoy copies the bytes of a header into a descriptor. Such a call ended inside the decoder (INTERNAL), and Envoy lets pass what
/// is not answered, so a client that sent `x-user: \xff` had no limit.
#[tokio::test]
async fn what_is_not_text_is_decided_and_counted() {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    let of = |key: &[u8], value: &[u8]| {
        let mut request = call("user=", 0);
        let entry = &mut request.descriptors[0].entries[0];
        (entry.key, entry.value) = (key.to_vec(), value.to_vec());
        request
    };
    let long = [&[0xff; 5_000][..], b"1"].concat();
    // Each has a counter of its own: none is another's, and no text is any of theirs.
    let values: [&[u8]; 9] =
        [b"\xff", b"\xfe", b"%FF", b"\xc3\xbf", b"\xff\xff", b"\xff\0", b"a\xff", &long, &long[1..]];
    for value in values {
        let answer = reported(&ask(&channel, of(b"user", value)).await.expect("an answer"));
        assert_eq!(answer, "OK: OK 0/1 DAY api", "{}", value.escape_ascii());
    }
    for value in values {
        let answer = reported(&ask(&channel, of(b"user", value)).await.expect("an answer"));
        assert_eq!(answer, "OVER_LIMIT: OVER_LIMIT 0/1 DAY api", "{}", value.escape_ascii());
    }
    // A key that is not text meets no rule, as any key that is in none.
    let answer = reported(&ask(&channel, of(b"user\xff", b"a")).await.expect("an answer"));
    assert_eq!(answer, "OK: OK");
    let mut elsewhere = call("user=a", 0);
    elsewhere.domain = b"edge\xff".to_vec();
    let error = ask(&channel, elsewhere).await.expect_err("it is refused");
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let metrics = server.get("/metrics").body;
    for line in [
        "tollgate_envoy_calls_total{code=\"ok\"} 10",
        "tollgate_envoy_calls_total{code=\"over_limit\"} 9",
        "tollgate_envoy_calls_total{code=\"error\"} 1",
    ] {
        assert!(metrics.lines().any(|other| other == line), "{line}: {metrics}");
    }
    // It is found under the key that the docs say.
    let status = server.get("/v1/status?limit=api&key=edge:user=%2525FF").body;
    assert!(status.contains("\"used\":1"), "{status}");
}

#[tokio::test]
async fn there_is_nothing_at_other_addresses() {
    let server = server::start(CONFIG);
    let channel = channel(&server).await;
    for path in [
        "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        "/other",
    ] {
        let mut client = tonic::client::Grpc::new(channel.clone());
        client.ready().await.expect("it is there");
        let codec = tonic_prost::ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let request = tonic::Request::new(call("user=a", 0));
        let answered = client.unary(request, PathAndQuery::from_static(path), codec).await;
        assert_eq!(answered.expect_err("there is nothing").code(), Code::Unimplemented, "{path}");
    }
}

#[tokio::test]
async fn whoever_does_not_speak_http_2_is_hung_up_on() {
    let server = server::start(CONFIG);
    for bytes in [
        &b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"[..],
        &[0xff; 64 * 1024],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut stream = TcpStream::connect(server.grpc()).expect("it listens");
        // It may have hung up before all is written.
        let _ = stream.write_all(bytes);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.starts_with(b"HTTP/1"), "{rest:?}");
    }
    let response = ask(&channel(&server).await, call("user=a", 0)).await.expect("an answer");
    assert_eq!(reported(&response), "OK: OK 0/1 DAY api");
}

/// Calls that are never finished were held whole, a hundred for each connection.
#[tokio::test]
async fn unfinished_long_calls_end_where_the_memory_for_them_does_and_short_ones_go_on() {
    let server = server::start(CONFIG);
    let long = |user: usize| {
        let mut request = call("user=", 0);
        request.descriptors[0].entries[0].value = format!("{user}{}", "k".repeat(250 * 1024)).into_bytes();
        request
    };
    let mut calls = tokio::task::JoinSet::new();
    for connection in 0..3 {
        // Each is a peer of its own: one alone may not have so many unfinished.
        let peer = IpAddr::from([127, 0, 0, 2 + connection]);
        let (channel, connection) = (channel_from(&server, Some(peer)).await, usize::from(connection));
        for user in 0..100 {
            let (channel, request) = (channel.clone(), long(connection * 100 + user));
            let endless = tokio_stream::once(request).chain(tokio_stream::pending());
            calls.spawn(ask_slowly(channel, endless));
        }
    }
    let first = calls.join_next().await.expect("one").expect("no panic").expect_err("it is not finished");
    assert_eq!(first.code(), Code::ResourceExhausted, "{first}");
    assert!(first.message().contains("too many long calls"), "{first}");
    let other = channel(&server).await;
    let response = ask(&other, call("user=a", 0)).await.expect("an answer");
    assert_eq!(reported(&response), "OK: OK 0/1 DAY api");
    // A waiter that gives up releases its seat.
    calls.shutdown().await;
    let mut answered = ask(&other, long(1_000)).await;
    for _ in 0..100 {
        if answered.is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        answered = ask(&other, long(1_000)).await;
    }
    assert_eq!(reported(&answered.expect("there is room again")), "OK: OK 0/1 DAY api");
}
