//! HTTP as it comes over the wire: many requests on a connection, one after another and all at once.

use crate::server;

#[test]
fn requests_in_a_pipeline_are_answered_in_order() {
    let server = server::start();
    let mut connection = server.connect();
    let body = r#"{"limit":"api","key":"user:1"}"#;
    let one = format!(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let all = format!("{}HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n{one}", one.repeat(3));
    connection.send(all.as_bytes()).unwrap();
    for remaining in [2, 1, 0] {
        let answer = connection.receive(false).unwrap();
        assert!(answer.body.contains(&format!("\"remaining\":{remaining},")), "{}", answer.body);
    }
    assert_eq!(connection.receive(true).unwrap().status, 200);
    assert!(connection.receive(false).unwrap().body.contains("\"allowed\":false"));
}

#[test]
fn a_request_in_pieces_is_one_request() {
    let server = server::start();
    let mut connection = server.connect();
    let body = r#"{"limit":"api","key":"user:1"}"#;
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    for byte in request.as_bytes() {
        connection.send(std::slice::from_ref(byte)).unwrap();
    }
    assert!(connection.receive(false).unwrap().body.contains("\"remaining\":2,"));
}

/// A client with another protocol is refused, and all others are still served.
#[test]
fn what_is_no_http_harms_nobody() {
    let server = server::start();
    let many = "x: y\r\n".repeat(100);
    let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(200_000));
    for sent in [
        "\r\n\r\n\r\n",
        "PING\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET /\0 HTTP/1.1\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        &format!("GET /healthz HTTP/1.1\r\n{many}\r\n"),
        &long,
    ] {
        let mut connection = server.connect();
        let _ = connection.send(sent.as_bytes());
        // Some are answered with a status of refusal, some only hung up on; none is served.
        if !sent.trim().is_empty()
            && let Ok(answer) = connection.receive(false)
        {
            assert!((400..600).contains(&answer.status), "{}: {answer:?}", &sent[..20.min(sent.len())]);
        }
        assert_eq!(server.get("/healthz").body, "ok\n");
    }
}

#[test]
fn many_at_once_are_admitted_exactly() {
    let server = server::start();
    let admitted: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut connection = server.connect();
                    let ask = |connection: &mut tollgate_testkit::http::Connection| {
                        let lines = ["content-type: application/json"];
                        connection
                            .ask_with_body("POST", "/v1/check", &lines, r#"{"limit":"api","key":"user:vip"}"#)
                            .body
                            .contains("\"allowed\":true")
                    };
                    (0..20).filter(|_| ask(&mut connection)).count()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(admitted, 30);
}
