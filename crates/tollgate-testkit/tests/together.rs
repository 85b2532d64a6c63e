//! All parts together: a real Redis behind a faulty proxy, many clients, and the checker as judge. This is how the shared
//! stores are tested; here the limiters are small scripts, one right and one wrong.

use std::borrow::Cow;
use std::time::Duration;

use tollgate_testkit::history::{Bound, Call, Check, Outcome, Promises, Recorder, Report, now_us};
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{Client, RedisServer, Value};

const LIMIT: u64 = 50;
const WINDOW_US: u64 = 250_000;
const TIMEOUT: Duration = Duration::from_millis(60);

/// A sliding window in one script. Gives whether it fits, the version, and the store's time.
const ATOMIC: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ARGV[2]))
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return {0, 0, now} end
local version = redis.call('INCR', KEYS[2])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), version)
return {1, version, now}";

/// The same in two: looks, and writes later.
const LOOK: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ARGV[2]))
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return {0, 0, now} end
return {1, 0, now}";
const WRITE: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local version = redis.call('INCR', KEYS[2])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), version)
return {1, version, now}";

/// Runs scripts one after the other until one says no, and gives what the last one said.
fn ask(client: &mut Client, scripts: &[&str]) -> std::io::Result<Vec<u64>> {
    let (limit, window) = (LIMIT.to_string(), WINDOW_US.to_string());
    let mut answer = Vec::new();
    for script in scripts {
        let reply = client.call(&["EVAL", script, "2", "{k}log", "{k}version", &limit, &window])?;
        let items = reply.expect("the script runs");
        answer =
            items.items().iter().filter_map(Value::int).filter_map(|item| item.try_into().ok()).collect();
        if answer[0] == 0 {
            break;
        }
    }
    Ok(answer)
}

fn clients(port: u16, recorder: &Recorder, scripts: &[&str]) {
    let end = now_us() + 6 * WINDOW_US;
    let mut client = Client::connect(port, TIMEOUT).unwrap();
    while now_us() < end {
        let start_us = now_us();
        let answer = ask(&mut client, scripts);
        let end_us = now_us();
        let (outcome, version, store_time_us) = match answer.as_deref() {
            Ok([1, version, time]) => (Outcome::Admitted, Some(*version), Some(*time)),
            Ok([_, _, time]) => (Outcome::Denied, None, Some(*time)),
            Ok(other) => panic!("the script says {other:?}"),
            Err(_) => {
                // Nothing can be trusted on this connection any more.
                client = Client::connect(port, TIMEOUT).unwrap();
                (Outcome::Ambiguous, None, None)
            }
        };
        let label = Cow::Borrowed(if outcome == Outcome::Ambiguous { "fallback_open" } else { "store" });
        recorder.record(Call { key: 0, start_us, end_us, cost: 1, outcome, version, store_time_us, label });
    }
}

fn judge(scripts: &[&str]) -> Report {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    proxy.set(Mode::Faulty { swallow_per_mille: 10, delay_per_mille: 10, delay: Duration::from_millis(5) });
    let recorder = Recorder::new();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| clients(proxy.port(), &recorder, scripts));
        }
    });
    let stored = server.command(&["GET", "{k}version"]).unwrap().int().unwrap().try_into().unwrap();
    let bound = Bound::Window { limit: LIMIT, window_us: WINDOW_US };
    let report = recorder.take().check(&Promises::of(bound).at_rest(0, stored).deadline(60_000, 2_000_000));
    println!("{report}\n");
    report
}

#[test]
fn one_script_keeps_its_promises_through_lost_replies() {
    let report = judge(&[ATOMIC]);
    report.assert_clean();
    assert!(report.ambiguous > 0 && report.gaps <= report.ambiguous);
    assert_eq!(report.losses_seen, 0);
}

#[test]
fn two_scripts_do_not() {
    let flagged = (0..5).any(|_| {
        let flagged = judge(&[LOOK, WRITE]).flagged();
        flagged.contains(&Check::Exact) && flagged.contains(&Check::BlackBox)
    });
    assert!(flagged, "five runs, and none was flagged");
}
