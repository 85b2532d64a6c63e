//! `[store]`: where the counters are, and what happens when they cannot be reached.
//!
//! `connection.rs` has the addresses of Redis and PostgreSQL. Nothing here shows a password.

use std::fmt;
use std::time::Duration;

use tollgate_kernel::Micros;
use tollgate_store::WhenFull;

use super::connection::{PostgresConfig, RedisConfig, read_postgres, read_redis};
use super::reader::{Field, Reader, Section};
use crate::builder::DENIAL_CACHE;
use crate::policy::Fallback;

/// The longest deadline of a call, and the longest use of a cached denial: both delay callers.
const LONGEST_WAIT: Micros = Micros::from_secs(10);

/// How many instances may share a limit.
const MOST_INSTANCES: u64 = 10_000;

/// The most connections to each server of a shared store.
const MOST_CONNECTIONS: usize = 64;

/// Where state lives, and what happens when it cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Which store; memory by default.
    pub mode: StoreMode,
    /// The fallback of limits that do not set their own; local by default.
    pub fallback: Fallback,
    /// Among how many instances a limit is divided while each counts locally; one by default.
    pub fallback_instances: u64,
    /// The deadline of one call; 100 ms by default.
    pub timeout: Duration,
    /// How long a cached denial is used; 100 ms by default, zero for not at all.
    pub denial_cache: Duration,
    /// The number of connections to each server; the store's default if `None`.
    pub connections: Option<usize>,
    /// How many keys the memory store holds at most, and from how many on a shared store begins none under numbers that come with
    /// the call; 10,000,000 by default.
    pub max_keys: usize,
    /// What happens to new keys when the memory store is full; they share counters by default.
    pub when_full: WhenFull,
    /// The clock for checks of token buckets in memory; exact by default.
    pub clock: ClockMode,
    /// How to reach Redis; always there in the mode `redis`.
    pub redis: Option<RedisConfig>,
    /// How to reach PostgreSQL; always there in the mode `postgres`.
    pub postgres: Option<PostgresConfig>,
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            mode: StoreMode::default(),
            fallback: Fallback::default(),
            fallback_instances: 1,
            timeout: Duration::from_millis(100),
            denial_cache: DENIAL_CACHE.into(),
            connections: None,
            max_keys: 10_000_000,
            when_full: WhenFull::default(),
            clock: ClockMode::default(),
            redis: None,
            postgres: None,
        }
    }
}

/// Which store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreMode {
    /// The memory of this process.
    #[default]
    Memory,
    /// Redis, one server or a cluster.
    Redis,
    /// PostgreSQL.
    Postgres,
}

impl StoreMode {
    /// All three, in the order of the documentation.
    pub const ALL: [StoreMode; 3] = [StoreMode::Memory, StoreMode::Redis, StoreMode::Postgres];

    /// The name used in configuration, metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            StoreMode::Memory => "memory",
            StoreMode::Redis => "redis",
            StoreMode::Postgres => "postgres",
        }
    }
}

impl fmt::Display for StoreMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The clock for checks of token buckets in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockMode {
    /// The clock, read for each check.
    #[default]
    Exact,
    /// A reading of it that may be a millisecond old: [`Clock::coarse`](crate::Clock::coarse).
    Coarse,
}

impl ClockMode {
    /// Both, in the order of the documentation.
    pub const ALL: [ClockMode; 2] = [ClockMode::Exact, ClockMode::Coarse];

    /// The name used in configuration and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            ClockMode::Exact => "exact",
            ClockMode::Coarse => "coarse",
        }
    }
}

/// The fields with nothing secret in them.
const PLAIN: [&str; 9] = [
    "mode",
    "fallback",
    "fallback_instances",
    "timeout",
    "denial_cache",
    "connections",
    "max_keys",
    "when_full",
    "clock",
];

impl StoreConfig {
    /// The fields in which two differ, by name.
    pub fn changed_fields(&self, other: &StoreConfig) -> Vec<&'static str> {
        changed_fields!(
            self,
            other,
            StoreConfig {
                mode,
                fallback,
                fallback_instances,
                timeout,
                denial_cache,
                connections,
                max_keys,
                when_full,
                clock,
                redis,
                postgres,
            }
        )
    }

    pub(super) fn read(reader: &mut Reader<'_>, section: Section<'_>) -> StoreConfig {
        let section = section.showing(&PLAIN);
        let known: Vec<&str> = PLAIN.into_iter().chain(["redis", "postgres"]).collect();
        reader.only(&section, &known);
        let modes = StoreMode::ALL.map(|mode| (mode.name(), mode));
        let clocks = ClockMode::ALL.map(|clock| (clock.name(), clock));
        let fulls = [("share", WhenFull::Share), ("deny", WhenFull::Deny)];
        let default = StoreConfig::default();
        let mode = section.field("mode").and_then(|field| reader.choice(field, &modes));
        let mode = mode.unwrap_or(default.mode);
        let wants = |wanted, name| mode == wanted && section.field(name).is_none();
        if wants(StoreMode::Redis, "redis") {
            reader.missing(&section, "redis", "{ url = \"redis://127.0.0.1:6379\" }, or set REDIS_ADDR");
        }
        if wants(StoreMode::Postgres, "postgres") {
            reader.missing(
                &section,
                "postgres",
                "{ url = \"postgres://localhost/app\" }, or set DATABASE_URL",
            );
        }
        let read = |name| section.field(name);
        StoreConfig {
            mode,
            fallback: read("fallback").and_then(|f| reader.fallback(f)).unwrap_or(default.fallback),
            fallback_instances: read("fallback_instances")
                .and_then(|f| read_instances(reader, f))
                .unwrap_or(default.fallback_instances),
            timeout: read("timeout").and_then(|f| read_timeout(reader, f)).unwrap_or(default.timeout),
            denial_cache: read("denial_cache")
                .and_then(|f| read_denial_cache(reader, f))
                .unwrap_or(default.denial_cache),
            connections: read("connections").and_then(|f| reader.connections(f, MOST_CONNECTIONS)),
            max_keys: read("max_keys").and_then(|f| read_max_keys(reader, f)).unwrap_or(default.max_keys),
            when_full: read("when_full").and_then(|f| reader.choice(f, &fulls)).unwrap_or(default.when_full),
            clock: read("clock").and_then(|f| reader.choice(f, &clocks)).unwrap_or(default.clock),
            redis: read("redis").and_then(|f| read_redis(reader, f)),
            postgres: read("postgres").and_then(|f| read_postgres(reader, f)),
        }
    }
}

fn read_instances(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<u64> {
    let instances = reader.whole(field, 3, "; 1 divides nothing")?;
    if instances > MOST_INSTANCES {
        reader.mistake(field, format!("must be at most {MOST_INSTANCES}"));
        return None;
    }
    Some(instances)
}

fn read_timeout(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Duration> {
    let timeout = reader.span(field, "100ms")?;
    if !(Duration::from_millis(1)..=Duration::from(LONGEST_WAIT)).contains(&timeout) {
        reader.mistake(field, format!("must be from 1ms to {LONGEST_WAIT}: callers wait that long"));
        return None;
    }
    Some(timeout)
}

fn read_denial_cache(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Duration> {
    let span = reader.span_or_zero(field, "100ms")?;
    if span > Duration::from(LONGEST_WAIT) {
        reader.mistake(
            field,
            format!("must be at most {LONGEST_WAIT}: what others give back is not seen for so long"),
        );
        return None;
    }
    Some(span)
}

fn read_max_keys(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<usize> {
    let keys = reader.whole(field, 10_000_000, "")?;
    let keys = usize::try_from(keys).ok().filter(|keys| *keys <= 1 << 40);
    if keys.is_none() {
        reader.mistake(
            field,
            "is more than any memory holds; write the most keys to remember, such as 10_000_000",
        );
    }
    keys
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{check, parse};

    #[test]
    fn the_store_is_checked() {
        for (field, value, fix) in [
            ("mode", "'redsi'", "must be one of memory, redis, postgres; did you mean \"redis\"?"),
            ("fallback", "'none'", "must be one of open, closed, local"),
            ("timeout", "100", "must be a duration in quotes, such as \"100ms\""),
            ("timeout", "'0ms'", "must be longer than zero"),
            ("timeout", "'1us'", "must be from 1ms to 10s"),
            ("timeout", "'10s1us'", "must be from 1ms to 10s: callers wait that long"),
            ("fallback_instances", "0", "must be at least 1; 1 divides nothing"),
            ("fallback_instances", "10001", "must be at most 10000"),
            ("fallback_instances", "'3'", "must be a number without quotes: fallback_instances = 3"),
            ("denial_cache", "100", "must be a duration in quotes, such as \"100ms\""),
            ("denial_cache", "'11s'", "must be at most 10s: what others give back is not seen for so long"),
            ("denial_cache", "'-1s'", "whole number and a unit"),
            ("connections", "0", "must be at least 1"),
            ("connections", "65", "must be at most 64"),
            ("max_keys", "0", "must be at least 1"),
            ("max_keys", "1_000.5", "must be a whole number, such as 10000000"),
            ("max_keys", "9007199254740991", "is more than any memory holds"),
            ("when_full", "'drop'", "must be one of share, deny"),
            ("clock", "'fast'", "must be one of exact, coarse"),
            ("when_full", "true", "must be text in quotes, such as \"share\""),
        ] {
            check(&format!("[store]\n{field} = {value}"), &[(2, &format!("store.{field}"), value, fix)]);
        }
        let store =
            parse("[store]\nfallback_instances = 3\ndenial_cache = '0s'\nconnections = 8\ntimeout = '10s'")
                .store;
        assert_eq!((store.fallback_instances, store.connections), (3, Some(8)));
        assert_eq!((store.denial_cache, store.timeout), (Duration::ZERO, Duration::from_secs(10)));
    }
}
