//! The text-book scripts that the benches run beside ours (benches/src/stores/redis/textbook): which of them admit more than their limit.
//!
//! Each script races for one key, and is then asked at the very instants at which its answer changes, by a clock of the test, beside our
//! memory store. Where the two first differ, both go on with a new key. What is found here stands beside the scripts in the benches
//! (`users.rs`) and in docs/benchmarks.md; a script that fares otherwise than it says there fails its test.

use tollgate_store::conformance::cases::ORIGIN;
use tollgate_store::{
    Limit, ManualClock, MemoryOptions, MemoryStore, Micros, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::redis::RedisServer;

use crate::item;

const WINDOW: &str = include_str!("../../../../benches/src/stores/redis/textbook/window.lua");
const COUNTER: &str = include_str!("../../../../benches/src/stores/redis/textbook/counter.lua");
const LOG: &str = include_str!("../../../../benches/src/stores/redis/textbook/log.lua");
const SEMAPHORE: &str = include_str!("../../../../benches/src/stores/redis/textbook/semaphore.lua");
const GCRA: &str = include_str!("../../../../benches/src/stores/redis/textbook/gcra.lua");
const THREE: &str = include_str!("../../../../benches/src/stores/redis/textbook/three.lua");

/// What a script says to one call: 1 if it is allowed, alone or first of several numbers.
fn ask(server: &RedisServer, script: &str, keys: &[String], arguments: &[String]) -> bool {
    let count = keys.len().to_string();
    let mut command = vec!["EVAL", script, &count];
    command.extend(keys.iter().chain(arguments).map(String::as_str));
    let answer = server.command(&command).unwrap_or_else(|error| panic!("{script}: {error:?}"));
    answer.items().first().unwrap_or(&answer).int() == Some(1)
}

/// The keys of a script, all of one name.
fn keys_of(name: &str, count: usize) -> Vec<String> {
    (0..count).map(|part| format!("{name}:{part}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_race_no_textbook_script_admits_more_than_its_limit() {
    let server = RedisServer::start();
    for (name, script, keys, arguments) in [
        ("window", WINDOW, 1, &["100", "6000"][..]),
        ("counter", COUNTER, 1, &["100", "8640000"]),
        ("log", LOG, 1, &["100", "6000"]),
        ("semaphore", SEMAPHORE, 1, &["100", "6000"]),
        ("gcra", GCRA, 1, &["100", "1", "3600", "1"]),
        ("three", THREE, 3, &["1000000", "6000", "0.0001", "100"]),
    ] {
        let keys = keys_of(name, keys);
        let mut racers = tokio::task::JoinSet::new();
        for racer in 0..8 {
            let client = redis::Client::open(server.url()).expect("an address");
            let keys = keys.clone();
            racers.spawn(async move {
                let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
                let mut admitted = 0;
                for number in 0..25 {
                    let mut call = redis::cmd("EVAL");
                    // Only those that give each call a name take the last argument.
                    call.arg(script)
                        .arg(keys.len())
                        .arg(&keys)
                        .arg(arguments)
                        .arg(format!("{racer}.{number}"));
                    let answer: redis::Value = call.query_async(&mut connection).await.expect("an answer");
                    let allowed = match &answer {
                        redis::Value::Array(numbers) => numbers.first() == Some(&redis::Value::Int(1)),
                        number => *number == redis::Value::Int(1),
                    };
                    admitted += u32::from(allowed);
                }
                admitted
            });
        }
        assert_eq!(racers.join_all().await.into_iter().sum::<u32>(), 100, "{name}");
    }
}

/// The expiry of a key as the script itself, by the clock of the test: Redis counts from the whole ms of its clock, and a key is there
/// up to and including the ms of its expiry. The last argument but one is the test's time in s, and the last the rest in us.
const EXPIRES: &str = "\
local now_ms = ARGV[#ARGV - 1] * 1000 + math.floor(ARGV[#ARGV] / 1000)
for _, key in ipairs(KEYS) do
  local until_ms = redis.call('GET', key .. ':until')
  if until_ms and now_ms > tonumber(until_ms) then redis.call('DEL', key, key .. ':until') end
end
local function expire(key, seconds)
  redis.call('SET', key .. ':until', string.format('%d', now_ms + seconds * 1000))
end
";

/// How often a script, asked at the instants at which its answer changes, said something else than our store: how often it admitted what
/// does not fit, and how often it refused what does.
async fn differences<const N: usize>(
    script: &str,
    keys: usize,
    arguments: &[&str],
    limits: [Limit; N],
) -> (u32, u32) {
    let server = RedisServer::start();
    // The server's clock is the test's: its two numbers are the last arguments.
    let script = script.replace("redis.call('TIME')", "{ARGV[#ARGV - 1], ARGV[#ARGV]}");
    let script = format!("{EXPIRES}{}", script.replace("redis.call('EXPIRE', ", "expire("));
    let limits: Vec<StoredLimit> = limits
        .into_iter()
        .enumerate()
        .map(|(number, limit)| StoredLimit::new(format!("textbook-{number}"), limit))
        .collect();
    let parts: Vec<StoredCharge<'_>> = limits.iter().map(|limit| item(limit, "k")).collect();
    let (mut over, mut under) = (0, 0);
    let mut name = 0;
    // Begins at many places within a second, and at none twice.
    for round in 0..40_u64 {
        name += 1;
        let clock = ManualClock::at(Micros::new(ORIGIN.get() + round * 7_770_077));
        let memory = MemoryStore::new(MemoryOptions {
            clock: clock.clock(),
            sweep_every: None,
            ..MemoryOptions::default()
        });
        for call in 0..40 {
            let now = clock.clock().server_now().get();
            let (seconds, rest) = (now / 1_000_000, now % 1_000_000);
            let mut arguments: Vec<String> = arguments.iter().map(|text| (*text).into()).collect();
            arguments.extend([format!("{name}.{call}"), seconds.to_string(), rest.to_string()]);
            let theirs = ask(&server, &script, &keys_of(&format!("k{name}"), keys), &arguments);
            let ours = memory.charge(&parts, None).await.unwrap();
            match (theirs, ours.allowed) {
                (true, false) => over += 1,
                (false, true) => under += 1,
                _ => {
                    // Refused, it is asked again a microsecond before there is room, and then when there is.
                    let waits = ours.outcomes.iter().filter_map(|outcome| outcome.retry_after);
                    match waits.max().map(Micros::get) {
                        Some(wait) if wait > 1 => clock.advance(Micros::new(wait - 1)),
                        Some(_) => clock.advance(Micros::new(1)),
                        None => clock.advance(Micros::new(round * 1_013)),
                    }
                    continue;
                }
            }
            break;
        }
    }
    (over, under)
}

#[tokio::test]
async fn textbook_scripts_beside_our_store_at_the_instants_that_matter() {
    let window = Micros::from_secs(600);
    let leases = Limit::concurrency(5, window).unwrap();
    let fixed = |limit| Limit::fixed_window(limit, window).unwrap();
    let counts = |limit| Limit::sliding_window_counter(limit, window).unwrap();
    let bucket = |rate: &str, burst| Limit::token_bucket(rate, burst).unwrap();
    let log = differences(LOG, 1, &["5", "600"], [Limit::sliding_window(5, window).unwrap()]).await;
    assert_eq!(log, (0, 0), "the sorted-set log is exact");
    let semaphore = differences(SEMAPHORE, 1, &["5", "600"], [leases]).await;
    assert_eq!(semaphore, (0, 0), "the semaphore is exact");
    let (over, under) = differences(WINDOW, 1, &["5", "600"], [fixed(5)]).await;
    assert!(over == 0 && under > 0, "a window lasts up to a ms too long: {over} over, {under} under");
    let three = differences(THREE, 3, &["1000000", "600", "0.25", "5"], [bucket("900/h", 5)]).await;
    assert_eq!(three, (0, 0), "the bucket of three limits is exact for an interval of whole seconds");
    // The window and the counter of three limits, which have one limit: the bucket has room.
    let all = [bucket("900/h", 1_000), fixed(5), counts(5)];
    let (over, under) = differences(THREE, 3, &["5", "600", "0.25", "1000"], all).await;
    assert!(over == 0 && under > 0, "three limits refuse as their parts do: {over} over, {under} under");
    let (over, under) = differences(COUNTER, 1, &["5", "600"], [counts(5)]).await;
    assert!(over == 0 && under > 0, "the counter's fractions refuse at the instant at which there is room");
    let (over, under) = differences(GCRA, 1, &["5", "7", "3600", "1"], [bucket("7/h", 5)]).await;
    assert!(over > 0 && under == 0, "an interval that is not of whole microseconds is admitted too early");
}
