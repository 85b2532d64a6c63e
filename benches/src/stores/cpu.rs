//! The CPU time of the server and of this process.
//!
//! Redis tells its own to the microsecond. PostgreSQL is many processes, of which some are gone by the end of a turn: theirs is
//! then in what the main process has collected. Its times come in ticks, of which a turn has some fifty for each core.

use std::path::Path;
use std::time::Duration;

use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

use crate::machine::process_cpu_time;

/// Whose time is taken.
pub(crate) enum Server<'a> {
    Redis(&'a RedisServer),
    Postgres(&'a PostgresServer),
}

impl Server<'_> {
    /// What the server has used so far.
    pub(crate) fn used(&self) -> Duration {
        match self {
            Server::Redis(server) => {
                let info = server.command(&["INFO", "cpu"]).map(|info| info.text()).unwrap_or_default();
                sum_of_redis(&info)
            }
            Server::Postgres(server) => server.pid().map(family).unwrap_or_default(),
        }
    }
}

/// What this process has used so far, with the programs that it has run to their end.
pub(crate) fn of_ourselves() -> Duration {
    let collected = read_stat("self").map(|stat| stat.collected).unwrap_or_default();
    process_cpu_time() + collected
}

fn sum_of_redis(info: &str) -> Duration {
    let field = |name: &str| {
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or(0.0)
    };
    Duration::from_secs_f64(field("used_cpu_sys") + field("used_cpu_user"))
}

/// A process, its children, and those of its children that it has collected.
fn family(parent: u32) -> Duration {
    let main = read_stat(&parent.to_string()).map(|stat| stat.own + stat.collected).unwrap_or_default();
    let Ok(entries) = std::fs::read_dir("/proc") else { return main };
    let children = entries.filter_map(|entry| {
        let stat = read_stat(entry.ok()?.file_name().to_str()?)?;
        (stat.parent == parent).then_some(stat.own)
    });
    main + children.sum::<Duration>()
}

#[derive(Debug, PartialEq)]
struct Stat {
    parent: u32,
    own: Duration,
    collected: Duration,
}

fn read_stat(process: &str) -> Option<Stat> {
    let text = std::fs::read_to_string(Path::new("/proc").join(process).join("stat")).ok()?;
    parse_stat(&text, rustix::param::clock_ticks_per_second())
}

/// From `pid (name) state parent …`, where the name may hold anything. User and system time are fields 14 and 15, those of
/// collected children 16 and 17.
fn parse_stat(text: &str, ticks_per_second: u64) -> Option<Stat> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let time = |ticks: u64| Duration::from_micros(ticks * 1_000_000 / ticks_per_second.max(1));
    Some(Stat {
        parent: u32::try_from(number(4)?).ok()?,
        own: time(number(14)? + number(15)?),
        collected: time(number(16)? + number(17)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_whatever_the_name() {
        let text = "42 (a) b) S 7 42 42 0 -1 4194560 1 2 3 4 150 50 30 20 20 0 1 0 9";
        let (own, collected) = (Duration::from_secs(2), Duration::from_millis(500));
        assert_eq!(parse_stat(text, 100), Some(Stat { parent: 7, own, collected }));
        assert_eq!(parse_stat("42 (a) S 7", 100), None);
        assert!(read_stat("self").is_some());
    }

    #[test]
    fn redis_tells_its_main_time() {
        let info =
            "# CPU\r\nused_cpu_sys:1.500000\r\nused_cpu_user:0.250000\r\nused_cpu_sys_children:9.0\r\n";
        assert_eq!(sum_of_redis(info), Duration::from_millis(1_750));
    }
}
