//! A check of each server about once a second while there is traffic, in a background task: whether it lost counters, whether it
//! has room for new keys, and how long its scripts take (`commandstats.rs`).
//!
//! A restarted server is recognised by its `run_id` (`node.rs`). A server can also lose state without a restart: by FLUSHALL, by
//! eviction, and by loading the data of a peer that is behind. So each process writes a mark to each server: a key of its own
//! with a number that grows with every check. A mark that is missing, or that has an older number, means that other keys may be
//! missing or older too, and so does a grown count of evicted keys. A mark expires soon after its process has ended.
//!
//! On a cluster a mark must be in a slot of the server that it marks: names are tried until one is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, FromRedisValue, RedisResult, ServerErrorKind};
use tokio::time::timeout;

use super::commandstats::{CommandStats, ScriptSum};
use super::options::RedisOptions;
use super::slot::FORMAT;
use crate::{ChargeId, Clock};

/// How often a server is checked, in us.
const LOOK_EVERY_US: u64 = 1_000_000;

/// The time to live of a mark, in ms.
const MARK_STAYS_MS: u64 = 60_000;

/// Up to which age a mark is compared, in us: well before it expires.
const MARK_COUNTS_US: u64 = 30_000_000;

/// How many names are tried for a mark, in one check.
const NAMES: u32 = 32;

/// Above the high percentage of `maxmemory` new keys are refused; below the low one they are accepted again.
const HIGH_PERCENT: u64 = 80;
const LOW_PERCENT: u64 = 75;

pub(crate) struct Watch {
    /// The prefix of the mark's name.
    start: String,
    id: ChargeId,
    max_keys: Option<u64>,
    due_us: AtomicU64,
    is_looking: AtomicBool,
    seen: Mutex<Seen>,
    script_sum: ScriptSum,
    takes_new_keys: AtomicBool,
}

/// The result of the last check.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The number in the mark's name.
    name: u32,
    /// The number in the mark, and when it was written.
    mark: Option<(u64, u64)>,
    evicted_keys: Option<u64>,
    command_stats: CommandStats,
}

/// The fields of `INFO` that are used here.
#[derive(Debug, Default, PartialEq, Eq)]
struct ServerInfo {
    evicted_keys: Option<u64>,
    used_memory: u64,
    max_memory: u64,
    keys: u64,
}

impl Watch {
    pub(super) fn new(options: &RedisOptions, script_sum: ScriptSum) -> Watch {
        Watch {
            start: format!("{}{FORMAT}:mark:", options.prefix),
            id: ChargeId::random(),
            max_keys: options.max_keys,
            due_us: AtomicU64::new(now_us() + LOOK_EVERY_US),
            is_looking: AtomicBool::new(false),
            seen: Mutex::default(),
            script_sum,
            takes_new_keys: AtomicBool::new(true),
        }
    }

    /// Whether the server has room for new keys.
    pub(crate) fn takes_new_keys(&self) -> bool {
        self.takes_new_keys.load(Ordering::Relaxed)
    }

    /// Whether a check is due and none is running; the caller must then make it.
    pub(crate) fn is_due(&self, now_us: u64) -> bool {
        now_us >= self.due_us.load(Ordering::Relaxed) && !self.is_looking.swap(true, Ordering::Relaxed)
    }

    /// Makes the next call check the server, because a connection is new.
    pub(crate) fn look_soon(&self) {
        if self.seen.lock().mark.is_some() {
            self.due_us.store(0, Ordering::Relaxed);
        }
    }

    /// Forgets the last check: another server is at the address, or it restarted. That loss has been counted. What another server
    /// counted before is not added to the time of scripts.
    pub(crate) fn forget(&self) {
        let mut seen = self.seen.lock();
        *seen = Seen { name: seen.name, ..Seen::default() };
    }

    /// Checks the server; returns a description of what it lost, if anything.
    pub(crate) async fn look(
        &self,
        multiplexed: &mut MultiplexedConnection,
        within: Duration,
    ) -> Option<&'static str> {
        let looked = timeout(within, async {
            let evicted = self.look_at_info(multiplexed).await;
            self.look_at_mark(multiplexed).await.or(evicted)
        });
        let lost = looked.await.ok().flatten();
        self.due_us.store(now_us() + LOOK_EVERY_US, Ordering::Relaxed);
        self.is_looking.store(false, Ordering::Relaxed);
        lost
    }

    /// What the server says about itself. A user without the privilege for INFO can still charge.
    ///
    /// The command statistics are a second INFO of the same round trip, and not `INFO everything`: from Redis 7 on that includes
    /// the latency percentiles of every command, and takes the server twice as long as both of these together.
    async fn look_at_info(&self, multiplexed: &mut MultiplexedConnection) -> Option<&'static str> {
        let mut both = redis::pipe();
        both.cmd("INFO").cmd("INFO").arg("commandstats");
        let answers = multiplexed.send_packed_commands(&both, 0, 2).await.ok()?;
        let mut texts =
            answers.into_iter().map(|answer| String::from_redis_value(answer.extract_error().ok()?).ok());
        let (info, command_stats) = (texts.next().flatten(), texts.next().flatten());
        if let Some(text) = command_stats {
            self.note_scripts(&text);
        }
        self.note_room(&ServerInfo::read(&info?))
    }

    fn note_scripts(&self, text: &str) {
        self.script_sum.add(&mut self.seen.lock().command_stats, CommandStats::read(text));
    }

    /// Whether keys were evicted, and whether there is room for more.
    fn note_room(&self, info: &ServerInfo) -> Option<&'static str> {
        let before = self.takes_new_keys();
        let after = info.takes_new_keys(before, self.max_keys);
        self.takes_new_keys.store(after, Ordering::Relaxed);
        match (before, after) {
            (true, false) => tracing::warn!(
                used_memory = info.used_memory,
                maxmemory = info.max_memory,
                keys = info.keys,
                "Redis is nearly full; keys that callers invent are refused until there is room"
            ),
            (false, true) => tracing::info!("Redis has room again"),
            _ => {}
        }
        let before = std::mem::replace(&mut self.seen.lock().evicted_keys, info.evicted_keys);
        let is_more = before.is_some() && info.evicted_keys > before;
        is_more.then_some("keys were evicted")
    }

    /// Whether the mark is there and not older than it was; renews it.
    async fn look_at_mark(&self, multiplexed: &mut MultiplexedConnection) -> Option<&'static str> {
        let mut name = self.seen.lock().name;
        let mut found: Option<Vec<u8>> = None;
        for tried in 0..NAMES {
            let get: RedisResult<Option<Vec<u8>>> =
                redis::cmd("GET").arg(self.name(name)).query_async(multiplexed).await;
            match get {
                Ok(value) => {
                    found = value;
                    break;
                }
                // Another server has the slot.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask)
                    ) && tried + 1 < NAMES =>
                {
                    name = name.wrapping_add(1);
                    let mut seen = self.seen.lock();
                    (seen.name, seen.mark) = (name, None);
                }
                Err(_) => return None,
            }
        }
        let found: Option<u64> = found.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
        let now_us = now_us();
        let mark = self.seen.lock().mark.filter(|(_, written_us)| now_us < written_us + MARK_COUNTS_US);
        let number = mark.map_or(0, |(number, _)| number).max(found.unwrap_or(0)) + 1;
        let mut set = redis::cmd("SET");
        set.arg(self.name(name)).arg(number).arg("PX").arg(MARK_STAYS_MS);
        let is_set = set.query_async::<()>(multiplexed).await.is_ok();
        let is_lost = mark.is_some_and(|(number, _)| found.is_none_or(|found| found < number));
        let mut seen = self.seen.lock();
        match is_set {
            true => seen.mark = Some((number, now_us)),
            // A loss is reported once.
            false if is_lost => seen.mark = None,
            false => {}
        }
        is_lost.then_some(match found {
            Some(_) => "the data are older than they were",
            None => "our keys are gone",
        })
    }

    fn name(&self, name: u32) -> String {
        format!("{}{{{}.{name}}}", self.start, self.id)
    }
}

impl ServerInfo {
    /// Reads the fields of `INFO` that are used here.
    fn read(text: &str) -> ServerInfo {
        let mut info = ServerInfo::default();
        for line in text.lines() {
            let Some((field, value)) = line.trim_end().split_once(':') else { continue };
            match field {
                "evicted_keys" => info.evicted_keys = value.parse().ok(),
                "used_memory" => info.used_memory = value.parse().unwrap_or(0),
                "maxmemory" => info.max_memory = value.parse().unwrap_or(0),
                // db0:keys=12,expires=3,avg_ttl=0
                field if field.strip_prefix("db").is_some_and(|db| db.parse::<u32>().is_ok()) => {
                    let keys = value.strip_prefix("keys=").and_then(|rest| rest.split(',').next());
                    info.keys += keys.and_then(|keys| keys.parse::<u64>().ok()).unwrap_or(0);
                }
                _ => {}
            }
        }
        info
    }

    fn takes_new_keys(&self, takes: bool, max_keys: Option<u64>) -> bool {
        let percent = u128::from(if takes { HIGH_PERCENT } else { LOW_PERCENT });
        let memory = self.max_memory == 0
            || u128::from(self.used_memory) * 100 <= u128::from(self.max_memory) * percent;
        memory && max_keys.is_none_or(|max_keys| self.keys < max_keys)
    }
}

fn now_us() -> u64 {
    Clock::system().now().get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_read() {
        let text = "# Memory\r\nused_memory:900\r\nmaxmemory:1000\r\n# Stats\r\nevicted_keys:7\r\n# Keyspace\r\n\
                    db0:keys=12,expires=3,avg_ttl=0\r\ndb15:keys=5,expires=0,avg_ttl=0\r\ndbx:keys=9\r\n";
        let info = ServerInfo::read(text);
        assert_eq!(info, ServerInfo { evicted_keys: Some(7), used_memory: 900, max_memory: 1_000, keys: 17 });
        assert_eq!(ServerInfo::read("nonsense"), ServerInfo::default());
    }

    /// What another server counted in its whole life is not what scripts took since the last check.
    #[test]
    fn the_counts_of_another_server_are_not_compared_with_those_of_the_last() {
        let script_sum = ScriptSum::default();
        let watch = Watch::new(&RedisOptions::new("redis://127.0.0.1:6379"), script_sum.clone());
        let look = |calls: u64| {
            let text = format!("# Commandstats\ncmdstat_evalsha:calls={calls},usec={calls}\n");
            watch.note_scripts(&text);
            script_sum.get().map(|script_time| (script_time.calls, script_time.us))
        };
        watch.seen.lock().name = 7;
        assert_eq!([look(10), look(12)], [Some((0, 0)), Some((2, 2))]);
        watch.forget();
        assert_eq!(watch.seen.lock().name, 7, "the mark of this server keeps its name");
        assert_eq!([look(9_000), look(9_001)], [Some((2, 2)), Some((3, 3))]);
    }

    #[test]
    fn new_keys_are_refused_above_the_high_mark_until_below_the_low_one() {
        let with =
            |used_memory, max_memory, keys| ServerInfo { evicted_keys: None, used_memory, max_memory, keys };
        for (info, takes, max_keys, expected) in [
            (with(800, 1_000, 0), true, None, true),
            (with(801, 1_000, 0), true, None, false),
            (with(751, 1_000, 0), false, None, false),
            (with(750, 1_000, 0), false, None, true),
            (with(u64::MAX, 0, 0), true, None, true),
            (with(0, 0, 9), true, Some(10), true),
            (with(0, 0, 10), true, Some(10), false),
            (with(0, 0, u64::MAX), true, None, true),
        ] {
            assert_eq!(info.takes_new_keys(takes, max_keys), expected, "{info:?}, {max_keys:?}");
        }
    }
}
