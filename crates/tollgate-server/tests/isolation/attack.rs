//! What hostile callers send. Each attack is one bounded round; the test repeats it as long as the bystander asks.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tollgate_testkit::tollgate::Tollgate;

pub(crate) type Attack = fn(&Tollgate, usize);

pub(crate) const ALL: [(&str, Attack); 11] = [
    ("a name that no text holds", nul_names),
    ("settlements of nothing", settlements),
    ("values that no store takes", bad_values),
    ("costs far too large under a full log", large_costs),
    ("reservations of one key, all at once", reservations),
    ("reservations under no limit", reservations_of_nothing),
    ("invented keys, pipelined", invented_keys),
    ("invented keys, pipelined over fifty connections", invented_keys_of_many),
    ("invented keys that live for a year", long_lived_keys),
    ("debts of 2^53", debts),
    ("a key whose value is foreign, three at a time", foreign_value),
];

/// An attacker may be refused, and may find its own share used up; it never finds a mistake of the server's.
fn post(server: &Tollgate, path: &str, body: &str) -> (u16, String) {
    let answer = server.post(path, body);
    assert_ne!(answer.status, 500, "{path} {body}: {}", answer.body);
    (answer.status, answer.body)
}

/// Settlements that are an error of the data in SQL, and nothing else, from several connections: the store seemed to fail.
fn nul_names(server: &Tollgate, _round: usize) {
    let line = ["content-type: application/json"];
    let body = format!(r#"{{"reservation":"{:032x}","actual":{{"a\u0000b":1}}}}"#, 0xabc);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut connection = server.connect();
                for _ in 0..25 {
                    let answer = connection.ask_with_body("POST", "/v1/settle", &line, &body);
                    assert_ne!(answer.status, 500, "{}", answer.body);
                }
            });
        }
    });
}

/// Names and ids that are nobody's.
fn settlements(server: &Tollgate, round: usize) {
    let id = format!("{:032x}", 0xabc_0000 + round);
    for body in [
        format!(r#"{{"reservation":"{id}","actual":{{"a\u0000b":1}}}}"#),
        format!(r#"{{"reservation":"{id}","actual":{{"bystander":1}}}}"#),
        format!(r#"{{"reservation":"{id}","actual":9007199254740991}}"#),
        r#"{"reservation":"'; drop table","actual":1}"#.to_owned(),
    ] {
        post(server, "/v1/settle", &body);
    }
    post(server, "/v1/cancel", &format!(r#"{{"reservation":"{id}"}}"#));
    post(server, "/v1/renew", &format!(r#"{{"reservation":"{id}"}}"#));
}

fn bad_values(server: &Tollgate, round: usize) {
    for key in [r"a\u0000b", r"\ud7ff", r"{}", r"a:b:c:d", &"x".repeat(1_024), r"%00", r"\u202e"] {
        for limit in ["log", "bucket", "leases", "no-such", r"a\u0000b"] {
            let body = format!(r#"{{"limit":"{limit}","key":"{key}{round}","cost":9007199254740991}}"#);
            post(server, "/v1/check", &body);
        }
    }
}

/// Fills a log once, and then asks for more than it has left, in one charge.
fn large_costs(server: &Tollgate, round: usize) {
    if round == 0 {
        let one = r#"{"limit":"log","key":"attacker"}"#;
        let checks = format!(r#"{{"checks":[{}]}}"#, vec![one; 100].join(","));
        for _ in 0..20 {
            post(server, "/v1/checks", &checks);
        }
    }
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for cost in [2_000, 1_999, 1_000, 2] {
                    post(
                        server,
                        "/v1/check",
                        &format!(r#"{{"limit":"log","key":"attacker","cost":{cost}}}"#),
                    );
                }
            });
        }
    });
}

/// The key whose log of [`DEEP`] entries the test has filled, and how its limit is named.
pub(crate) const DEEP_KEY: &str = "user:attacker";
pub(crate) const DEEP_LIMIT: &str = "deep";
pub(crate) const DEEP: u64 = 30_000;

/// Eight callers with sixteen connections each ask for much under a full log, again and again. The store walked the log for each of
/// them, for 65 to 93 ms: so many made everybody wait for longer than the test's timeout.
pub(crate) fn large_costs_under_a_deep_log(server: &Tollgate, _round: usize) {
    std::thread::scope(|scope| {
        for _ in 0..8 * 16 {
            scope.spawn(|| {
                let check = |number: usize| {
                    let cost = [DEEP, DEEP - 1, DEEP / 2, 2][number % 4];
                    vec!["TOLLGATE.CHECK".into(), DEEP_LIMIT.into(), DEEP_KEY.into(), cost.to_string()]
                };
                let commands: Vec<Vec<String>> = (0..8).map(check).collect();
                pipeline(server, &commands);
            });
        }
    });
}

fn reserve(server: &Tollgate, limit: &str, cost: u64) -> Option<String> {
    let body = format!(r#"{{"limit":"{limit}","key":"attacker","cost":{cost},"ttl_ms":60000}}"#);
    let (_, answer) = post(server, "/v1/reserve", &body);
    let (_, rest) = answer.split_once("\"reservation\":\"")?;
    Some(rest[..32].to_owned())
}

fn reservations(server: &Tollgate, round: usize) {
    std::thread::scope(|scope| {
        for number in 0..32 {
            scope.spawn(move || {
                let limit = if number % 2 == 0 { "leases" } else { "bucket" };
                let held = reserve(server, limit, 1);
                if let Some(id) = held.filter(|_| round.is_multiple_of(2)) {
                    post(server, "/v1/cancel", &format!(r#"{{"reservation":"{id}"}}"#));
                }
            });
        }
    });
}

fn reservations_of_nothing(server: &Tollgate, _round: usize) {
    for _ in 0..20 {
        reserve(server, "free", 1);
    }
}

/// Sends commands in one write and reads until as many answers came, or the server closed.
fn pipeline(server: &Tollgate, commands: &[Vec<String>]) {
    let Ok(mut stream) = TcpStream::connect(server.resp()) else { return };
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut bytes = Vec::new();
    for words in commands {
        bytes.extend(format!("*{}\r\n", words.len()).bytes());
        words.iter().for_each(|word| bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes()));
    }
    if stream.write_all(&bytes).is_err() {
        return;
    }
    // Every answer begins with an array of five or an error, one for each command.
    let (mut answers, mut buffer, mut left) = (0, [0; 65_536], Vec::new());
    while answers < commands.len() {
        let Ok(length) = stream.read(&mut buffer) else { return };
        if length == 0 {
            return;
        }
        left.extend_from_slice(&buffer[..length]);
        answers = left
            .split(|byte| *byte == b'\n')
            .filter(|line| matches!(line.first(), Some(b'*' | b'-')))
            .count();
    }
}

fn invented_keys(server: &Tollgate, round: usize) {
    let throttle = |number: usize| {
        let key = format!("invented-{round}-{number}");
        vec!["CL.THROTTLE".into(), key, "15".into(), "30".into(), "60".into(), "1".into()]
    };
    let commands: Vec<Vec<String>> = (0..500).map(throttle).collect();
    pipeline(server, &commands);
}

fn invented_keys_of_many(server: &Tollgate, round: usize) {
    invented_keys_of_fifty(server, round, 160);
}

/// More than the store takes in a timeout, where each call takes it 30 ms.
pub(crate) fn invented_keys_beyond_a_timeout(server: &Tollgate, round: usize) {
    invented_keys_of_fifty(server, round, 600);
}

/// Fifty connections that each send so many charges of new keys at once. All of them went to the store at the same time, and
/// everybody's waited until they were late.
fn invented_keys_of_fifty(server: &Tollgate, round: usize, of_each: usize) {
    std::thread::scope(|scope| {
        for connection in 0..50 {
            scope.spawn(move || {
                let throttle = |number: usize| {
                    let key = format!("invented-{round}-{connection}-{number}");
                    vec!["CL.THROTTLE".into(), key, "15".into(), "30".into(), "60".into(), "1".into()]
                };
                let commands: Vec<Vec<String>> = (0..of_each).map(throttle).collect();
                pipeline(server, &commands);
            });
        }
    });
}

fn long_lived_keys(server: &Tollgate, round: usize) {
    let throttle = |number: usize| {
        let key = format!("for-a-year-{round}-{number}");
        vec!["CL.THROTTLE".into(), key, "15".into(), "1".into(), "31536000".into(), "1".into()]
    };
    let commands: Vec<Vec<String>> = (0..200).map(throttle).collect();
    pipeline(server, &commands);
}

/// A key that the store cannot read, if the test has spoilt it there: only its own outcomes come from the fallback. All failures of the
/// store counted alike, so this switched every limit off.
pub(crate) const FOREIGN: &str = r#"{"limit":"bucket","key":"foreign"}"#;

fn foreign_value(server: &Tollgate, _round: usize) {
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..10 {
                    post(server, "/v1/check", FOREIGN);
                }
            });
        }
    });
}

fn debts(server: &Tollgate, _round: usize) {
    if let Some(id) = reserve(server, "bucket", 1) {
        post(server, "/v1/settle", &format!(r#"{{"reservation":"{id}","actual":9007199254740991}}"#));
    }
}
