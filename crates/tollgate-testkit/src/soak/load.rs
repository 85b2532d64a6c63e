//! The clients of a soak: each asks one thing after another on its own connection, at its share of the rate.
//!
//! Most keys are known, some are invented for one request, a few are denied nearly always. Reservations are settled, cancelled or
//! forgotten; permits are renewed, released or forgotten. A wait is measured from the moment a request is sent until its answer was read.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use parking_lot::Mutex;

use super::MISTAKES_SHOWN;
use crate::Random;
use crate::hostile::frames;
use crate::hostile::honest::{Answered, Faces, Grpc, answered};
use crate::http::Connection;
use crate::redis::{Client as RespClient, Value};

/// How long a client waits for an answer of the server before that is a mistake.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Longer waits are counted as this one, in microseconds.
const LONGEST_US: u64 = 600_000_000;

/// A client that has fallen behind by more than this does not make up for it: a burst after a fault would be another load.
const BEHIND: Duration = Duration::from_secs(1);

/// How many reservations or permits a client has open at once.
const OPEN: usize = 20;

/// The clients, each on a thread of its own.
pub(crate) const CLIENTS: [fn(&Load<'_>, Random); 8] =
    [http_checks, http_checks, reservations, permits, resp, resp, grpc, grpc];

/// What a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Allowed,
    Denied,
    /// Nobody could decide: a limit is closed while its store is down.
    Undecided,
}

/// What was answered since the last sample.
pub(crate) struct Interval {
    /// In microseconds.
    pub(crate) waits: Histogram<u64>,
    answers: [u64; 3],
}

impl Interval {
    pub(crate) fn count(&self, answer: Answer) -> u64 {
        self.answers[answer as usize]
    }
}

impl Default for Interval {
    fn default() -> Interval {
        // With its bounds, as `saturating_record` makes no room for what is longer: it counts that as the shortest bound it has.
        let waits =
            Histogram::new_with_bounds(1, LONGEST_US, 3).expect("the bounds of the histogram are sound");
        Interval { waits, answers: [0; 3] }
    }
}

/// What all clients have seen.
pub(crate) struct Record {
    pub(crate) current: Interval,
    pub(crate) mistakes: u64,
    pub(crate) first_mistakes: Vec<String>,
}

impl Record {
    pub(crate) fn new() -> Record {
        Record { current: Interval::default(), mistakes: 0, first_mistakes: Vec::new() }
    }

    pub(crate) fn mistake(&mut self, what: String) {
        self.mistakes += 1;
        if self.first_mistakes.len() < MISTAKES_SHOWN {
            self.first_mistakes.push(what);
        }
    }

    fn answer(&mut self, answer: Answer, wait: Duration) {
        self.current.answers[answer as usize] += 1;
        self.current.waits.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
    }
}

/// What every client needs.
pub(crate) struct Load<'a> {
    pub(crate) faces: Faces,
    /// Between two requests of one client, on average.
    pub(crate) gap: Duration,
    pub(crate) record: &'a Mutex<Record>,
    pub(crate) is_over: &'a AtomicBool,
}

impl Load<'_> {
    /// Calls `ask` at the rate until the run is over. After a mistake `ask` begins on a new connection.
    fn keep_up<C, A>(&self, random: &mut Random, connect: impl Fn(&Load<'_>) -> C, mut ask: A)
    where
        A: FnMut(&mut C, &mut Random) -> io::Result<Answer>,
    {
        let mut connection = connect(self);
        let mut next = Instant::now();
        while !self.is_over.load(Ordering::Relaxed) {
            // Between half and one and a half of the gap, so that clients do not march in step.
            next += self.gap / 2 + self.gap.mul_f64(random.below(1000) as f64 / 1000.0);
            let now = Instant::now();
            match next.checked_duration_since(now) {
                Some(rest) => std::thread::sleep(rest),
                None if now - next > BEHIND => next = now,
                None => {}
            }
            let start = Instant::now();
            let asked = ask(&mut connection, random);
            let wait = start.elapsed();
            match asked {
                Ok(answer) => self.record.lock().answer(answer, wait),
                Err(error) => {
                    self.record.lock().mistake(error.to_string());
                    if !self.is_over.load(Ordering::Relaxed) {
                        connection = connect(self);
                    }
                }
            }
        }
    }
}

/// A limit and a key to charge to it, as clients of all faces choose them.
fn charge(random: &mut Random) -> (&'static str, String) {
    match random.below(100) {
        0..50 => ("api", format!("user:{}", random.below(2000).min(random.below(2000)))),
        50..65 => ("api", format!("guest:{:016x}", random.next())),
        65..85 => ("tight", format!("user:greedy-{}", random.below(8))),
        85..90 => ("tight", format!("guest:{:016x}", random.next())),
        _ => ("strict", format!("user:{}", random.below(200))),
    }
}

fn pick(random: &mut Random, texts: &[&'static str]) -> &'static str {
    let index = usize::try_from(random.below(texts.len() as u64));
    texts[index.expect("below the number of texts")]
}

fn wrong(what: &str, received: impl std::fmt::Debug) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what}: {received:?}"))
}

/// A POST to the API. The answer, and its body.
fn post(connection: &mut Connection, path: &str, body: &str) -> io::Result<(Answer, String)> {
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.send(request.as_bytes())?;
    let answer = connection.receive(false)?;
    let kind = match answer.status {
        503 => Answer::Undecided,
        200 if answer.body.starts_with(r#"{"allowed":false"#) => Answer::Denied,
        200 => Answer::Allowed,
        _ => return Err(wrong(path, (answer.status, answer.body))),
    };
    Ok((kind, answer.body))
}

fn connect(load: &Load<'_>) -> Connection {
    Connection::open(load.faces.http)
}

fn http_checks(load: &Load<'_>, mut random: Random) {
    load.keep_up(&mut random, connect, |connection, random| {
        let (limit, key) = charge(random);
        let (path, body) = match random.below(20) {
            0 => {
                let user = random.below(2000);
                let one = |limit| format!(r#"{{"limit":"{limit}","key":"user:{user}"}}"#);
                ("/v1/check", format!(r#"{{"charges":[{},{},{}]}}"#, one("api"), one("log"), one("counter")))
            }
            1 => {
                let one = |(limit, key)| format!(r#"{{"limit":"{limit}","key":"{key}"}}"#);
                let checks: Vec<String> = (0..16).map(|_| one(charge(random))).collect();
                ("/v1/checks", format!(r#"{{"checks":[{}]}}"#, checks.join(",")))
            }
            2 => ("/v1/peek", format!(r#"{{"limit":"{limit}","key":"{key}"}}"#)),
            _ => ("/v1/check", format!(r#"{{"limit":"{limit}","key":"{key}"}}"#)),
        };
        Ok(post(connection, path, &body)?.0)
    });
}

/// The name of the reservation in an answer; it has one if it was allowed.
fn reservation(body: &str) -> Option<String> {
    let (_, rest) = body.split_once(r#""reservation":""#)?;
    Some(rest.split('"').next()?.to_owned())
}

fn reservations(load: &Load<'_>, mut random: Random) {
    let mut open = VecDeque::new();
    load.keep_up(&mut random, connect, |connection, random| {
        if open.len() < OPEN || random.chance(500) {
            let limit = pick(random, &["api", "log", "counter"]);
            let (user, cost) = (random.below(500), 1 + random.below(5));
            let body = format!(r#"{{"limit":"{limit}","key":"user:{user}","cost":{cost},"ttl_ms":5000}}"#);
            let (answer, body) = post(connection, "/v1/reserve", &body)?;
            // One in five is forgotten, and runs out.
            open.extend(reservation(&body).filter(|_| random.chance(800)));
            return Ok(answer);
        }
        let name = open.pop_front().unwrap_or_default();
        let (path, body) = if random.chance(800) {
            ("/v1/settle", format!(r#"{{"reservation":"{name}","actual":{}}}"#, random.below(8)))
        } else {
            ("/v1/cancel", format!(r#"{{"reservation":"{name}"}}"#))
        };
        Ok(post(connection, path, &body)?.0)
    });
}

fn permits(load: &Load<'_>, mut random: Random) {
    let mut open = VecDeque::new();
    load.keep_up(&mut random, connect, |connection, random| {
        if open.len() < OPEN || random.chance(400) {
            let body = format!(r#"{{"limit":"seats","key":"room:{}","ttl_ms":5000}}"#, random.below(20));
            let (answer, body) = post(connection, "/v1/reserve", &body)?;
            open.extend(reservation(&body).filter(|_| random.chance(800)));
            return Ok(answer);
        }
        let name: String = open.pop_front().unwrap_or_default();
        if random.chance(300) {
            let answer = post(connection, "/v1/renew", &format!(r#"{{"reservation":"{name}"}}"#))?.0;
            open.push_back(name);
            return Ok(answer);
        }
        Ok(post(connection, "/v1/cancel", &format!(r#"{{"reservation":"{name}"}}"#))?.0)
    });
}

fn resp(load: &Load<'_>, mut random: Random) {
    let connect = |load: &Load<'_>| {
        RespClient::connect(load.faces.resp.port(), ANSWER_TIMEOUT).expect("the server listens")
    };
    load.keep_up(&mut random, connect, |client, random| {
        let (limit, key) = charge(random);
        let is_throttle = random.chance(500);
        let reply = if is_throttle {
            // Three plans, whose numbers come with the call.
            let burst = pick(random, &["15", "30", "100"]);
            client.call(&["CL.THROTTLE", &key, burst, "30", "1"])?
        } else {
            client.call(&["TOLLGATE.CHECK", limit, &key])?
        };
        match reply {
            Ok(Value::Array(values)) => match values.first() {
                Some(Value::Int(first @ (0 | 1))) if (*first == 0) == is_throttle => Ok(Answer::Allowed),
                Some(Value::Int(0 | 1)) => Ok(Answer::Denied),
                other => Err(wrong("RESP", other)),
            },
            Err(text) if text.starts_with("TRYAGAIN") => Ok(Answer::Undecided),
            other => Err(wrong("RESP", other)),
        }
    });
}

fn grpc(load: &Load<'_>, mut random: Random) {
    load.keep_up(
        &mut random,
        |load| Grpc::connect(load.faces.grpc),
        |connection, random| {
            let (limit, key) = charge(random);
            let call = frames::call(limit, &key);
            let mut message = connection.call(&call)?;
            if message.is_none() {
                // The server closes a connection in good order after about an hour. The call was not looked at, and clients make it again.
                *connection = Grpc::connect(load.faces.grpc);
                message = connection.call(&call)?;
            }
            match message {
                Some(message) if message.is_empty() => Ok(Answer::Undecided),
                Some(message) => match answered(&message)? {
                    Answered::Allowed => Ok(Answer::Allowed),
                    Answered::Denied => Ok(Answer::Denied),
                    Answered::HungUp => Err(wrong("gRPC", "hung up")),
                },
                None => Err(wrong("gRPC", "the server hung up")),
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_found_in_an_answer() {
        let body = r#"{"allowed":true,"degraded":false,"reservation":"371997d6","limits":[]}"#;
        assert_eq!(reservation(body).as_deref(), Some("371997d6"));
        assert_eq!(reservation(r#"{"allowed":false,"limits":[]}"#), None);
    }

    #[test]
    fn mistakes_are_counted_and_the_first_are_kept() {
        let mut record = Record::new();
        for number in 0..25 {
            record.mistake(number.to_string());
        }
        assert_eq!((record.mistakes, record.first_mistakes.len()), (25, MISTAKES_SHOWN));
        record.answer(Answer::Denied, Duration::from_millis(2));
        assert_eq!(record.current.count(Answer::Denied), 1);
        assert_eq!(record.current.waits.value_at_quantile(0.95) / 100, 20);
        // Long waits are as long as they were, also when they are most of all.
        (0..50).for_each(|_| record.answer(Answer::Denied, Duration::from_secs(5)));
        assert_eq!(record.current.waits.value_at_quantile(0.5) / 100_000, 50);
    }
}
