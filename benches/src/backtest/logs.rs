//! The logs that are replayed, and the policy that they are replayed under. The same numbers give the same bytes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::workload::Random;

/// A limit per key that denies the busiest, in the shape of most policies.
pub(super) const POLICY: &str = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 20\n\n\
                                 [[routes]]\npath = \"/api/*\"\nlimit = \"api\"\nkey = \"ip\"\n";

/// The first second of each log, in the middle of November 2023.
const START: u64 = 1_700_000_000;

/// How many lines a second each log has.
const LINES_A_SECOND: u32 = 2_000;

/// A log in one of the formats.
pub(super) struct Log {
    pub(super) name: &'static str,
    pub(super) file: &'static str,
    /// Lines a second that are asked for.
    pub(super) goal: f64,
    /// Lines before the first request.
    pub(super) heads: u32,
    line: fn(&mut dyn Write, Line) -> io::Result<()>,
}

/// One request.
struct Line {
    second: u64,
    micros: u32,
    key: u32,
    number: u32,
}

pub(super) const ALL: [Log; 3] = [
    Log { name: "csv, UNIX seconds", file: "unix.csv", goal: 2e6, heads: 1, line: unix },
    Log { name: "csv, RFC 3339", file: "rfc3339.csv", goal: 2e6, heads: 1, line: rfc3339 },
    Log { name: "access log, combined", file: "access.log", goal: 1e6, heads: 0, line: combined },
];

impl Log {
    /// Writes so many requests of so many keys; how many bytes they have.
    pub(super) fn write(&self, path: &Path, lines: u32, keys: u32) -> io::Result<u64> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        if self.heads > 0 {
            file.write_all(b"time,limit,key,cost\n")?;
        }
        let mut random = Random(7);
        for number in 0..lines {
            let second = START + u64::from(number / LINES_A_SECOND);
            let micros = number % LINES_A_SECOND * (1_000_000 / LINES_A_SECOND) + random.below(400);
            (self.line)(&mut file, Line { second, micros, key: random.zipf_rank(keys), number })?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?.metadata().map(|about| about.len())
    }
}

fn unix(out: &mut dyn Write, line: Line) -> io::Result<()> {
    let Line { second, micros, key, .. } = line;
    writeln!(out, "{second}.{micros:06},api,user:{key:08},1")
}

/// The hour, minute and second of the day. All logs begin at 22:13:20 and are shorter than the rest of that day and the next.
fn clock(second: u64) -> (u64, [u64; 3]) {
    let of_day = second % 86_400;
    (14 + second / 86_400 - START / 86_400, [of_day / 3_600, of_day / 60 % 60, of_day % 60])
}

fn rfc3339(out: &mut dyn Write, line: Line) -> io::Result<()> {
    let Line { second, micros, key, .. } = line;
    let (day, [hour, minute, second]) = clock(second);
    writeln!(out, "2023-11-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z,api,user:{key:08},1")
}

fn combined(out: &mut dyn Write, line: Line) -> io::Result<()> {
    const METHODS: [&str; 4] = ["GET", "GET", "GET", "POST"];
    const AGENT: &str = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/119.0.0.0 Safari/537.36";
    let Line { second, key, number, .. } = line;
    let (day, [hour, minute, second]) = clock(second);
    let [_, a, b, c] = key.to_be_bytes();
    writeln!(
        out,
        "10.{a}.{b}.{c} - - [{day:02}/Nov/2023:{hour:02}:{minute:02}:{second:02} +0000] \"{} /api/v1/items/{}?page={} HTTP/1.1\" 200 {} \"https://shop.example.com/items\" \"{AGENT}\"",
        METHODS[number as usize % 4],
        number % 9_973,
        number % 7,
        300 + number % 5_000,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_logs_have_them() {
        let line = |log: &Log| {
            let mut text = Vec::new();
            let line = Line { second: START + 6_401, micros: 12, key: 70_000, number: 3 };
            (log.line)(&mut text, line).expect("memory takes any text");
            String::from_utf8(text).expect("text")
        };
        assert_eq!(line(&ALL[0]), "1700006401.000012,api,user:00070000,1\n");
        assert_eq!(line(&ALL[1]), "2023-11-15T00:00:01.000012Z,api,user:00070000,1\n");
        let access = line(&ALL[2]);
        assert!(
            access.starts_with(
                "10.1.17.112 - - [15/Nov/2023:00:00:01 +0000] \"POST /api/v1/items/3?page=3 HTTP/1.1\" 200 303 \"https"
            ),
            "{access}"
        );
    }
}
