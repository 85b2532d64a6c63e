//! The binary, serving on a free port, as browsers see it.

use std::io::{Read, Write};
use std::net::TcpStream;

pub(crate) use tollgate_testkit::tollgate::Tollgate;

/// Serves a policy of its own.
pub(crate) fn with_config(policy: &str) -> Tollgate {
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(policy).start()
}

/// With traffic of its own.
pub(crate) fn demo() -> Tollgate {
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).command("demo").start()
}

/// A viewer who has been let in.
pub(crate) fn view(server: &Tollgate) -> TcpStream {
    let mut stream = TcpStream::connect(server.http()).expect("it listens");
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").expect("it reads");
    let mut start = [0; 15];
    stream.read_exact(&mut start).expect("an answer");
    assert_eq!(&start, b"HTTP/1.1 200 OK");
    stream
}
