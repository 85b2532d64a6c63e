//! What no client sends.

use crate::server::{self, command};

#[test]
fn what_is_no_command_is_answered_once_and_hung_up_on() {
    let server = server::start("");
    let long = |size: usize| command(["PING", &"x".repeat(size)]);
    let cases: &[(&[u8], &str)] = &[
        (b"PING\r\n", "-ERR Protocol error: expected '*'"),
        (b"POST / HTTP/1.1\r\nhost: x\r\n\r\n", "-ERR Protocol error: expected '*'"),
        (b"\0\0\0\0", "-ERR Protocol error: expected '*'"),
        (b"\x16\x03\x01\x02\x00", "-ERR Protocol error: expected '*'"),
        (b"*1000000000\r\n", "-ERR Protocol error: invalid multibulk length"),
        (b"*-7\r\n", "-ERR Protocol error: invalid multibulk length"),
        (b"*2\r\n*1\r\n*1\r\n*1\r\n", "-ERR Protocol error: expected '$'"),
        (b"*1\r\n$-1\r\n", "-ERR Protocol error: invalid bulk length"),
        (b"*1\r\n$536870912\r\n", "-ERR Protocol error: invalid bulk length"),
        (b"*1\r\n$1048576\r\n", "-ERR Protocol error: a command has at most 65536 bytes"),
        (b"*1\r\n$4\r\nPINGPING", "-ERR Protocol error: a bulk string does not end"),
        (&long(65_536), "-ERR Protocol error: a command has at most 65536 bytes"),
        // What came before it is answered first.
        (b"*0\r\n*-1\r\n*1\r\n$4\r\nPING\r\n!", "+PONG\r\n-ERR Protocol error: expected '*'"),
    ];
    for (sent, said) in cases {
        let mut client = server::client(&server);
        client.try_send(sent);
        let rest = client.rest();
        let shown = sent[..sent.len().min(60)].escape_ascii();
        assert!(rest.starts_with(said.as_bytes()), "{shown}: {}", rest.escape_ascii());
        assert!(rest.ends_with(b"\r\n"), "{shown}: {}", rest.escape_ascii());
    }
    let mut client = server::client(&server);
    client.send(&long(60_000));
    assert_eq!(client.line(), "$60000");
    assert_eq!(client.line().len(), 60_000);
    // Names are reported short, and cannot end a line.
    client.send(&command([b"A\r\n+OK\r\n\x1b[2J\xff".as_slice()]));
    assert_eq!(client.line(), r"-ERR unknown command 'A\r\n+OK\r\n\x1b[2J\xff'");
    client.send(&command(["B".repeat(50_000)]));
    assert!(client.line().len() < 100);
}

#[test]
fn half_a_command_and_no_more_costs_nothing() {
    let server = server::start("");
    let whole = command(["CL.THROTTLE", "half", "0", "1", "100000"]);
    for cut in 0..whole.len() {
        let mut client = server::client(&server);
        client.send(&whole[..cut]);
        client.finish();
        assert_eq!(client.rest(), b"", "{cut} bytes");
    }
    let mut client = server::client(&server);
    client.send(&whole);
    assert_eq!(client.take(11), b"*5\r\n:0\r\n:1\r", "nothing was charged");
}

#[test]
fn noise_is_no_end_of_it() {
    let server = server::start("");
    let mut seed: u64 = 0x2545_f491_4f6c_dd1d;
    let mut dice = |sides: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % sides
    };
    let words: [&[u8]; 10] = [
        b"*3\r\n",
        b"*5\r\n",
        b"$1\r\n1\r\n",
        b"$11\r\nCL.THROTTLE\r\n",
        b"$5\r\nHELLO\r\n",
        b"$7\r\nCOMMAND\r\n",
        b"\r\n",
        b"*",
        b"$",
        b"$4\r\nAUTH\r\n",
    ];
    for round in 0..300 {
        let mut bytes = Vec::new();
        for _ in 0..dice(60) {
            match dice(6) {
                0 => {
                    bytes.extend((0..dice(20)).map(|_| u8::try_from(dice(256)).unwrap()).collect::<Vec<u8>>())
                }
                _ => bytes.extend_from_slice(words[usize::try_from(dice(10)).unwrap()]),
            }
        }
        let mut client = server::client(&server);
        client.try_send(&bytes);
        client.finish();
        let rest = client.rest();
        assert!(rest.is_empty() || rest.ends_with(b"\r\n"), "round {round}: {}", bytes.escape_ascii());
    }
    let mut client = server::client(&server);
    client.send(&command(["PING"]));
    assert_eq!(client.line(), "+PONG");
}
