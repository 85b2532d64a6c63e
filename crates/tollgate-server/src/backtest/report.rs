//! The summary on a terminal (`html.rs` is the same as a page): a sentence, a table of limits, who was denied most, and a picture over time.

use std::io::{self, Write};

use jiff::Timestamp;
use tollgate::store::Micros;

use super::denied::DeniedKey;
use super::peaks::{CounterBesideLog, PeakStep, Peaks};
use super::summary::{LimitTally, Summary};
use super::timeline::Timeline;
use crate::figures::{counted, grouped, share, shortened};
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// How long the longest bar is.
const BAR: u64 = 40;

/// How many bad lines are shown.
pub(super) const SKIPPED: usize = 5;

/// How much of a key is shown.
pub(super) const KEY: usize = 48;

/// Prints all of it.
pub(super) fn print(summary: &Summary, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    sentence(summary, out, ink)?;
    if summary.requests > 0 {
        limits(summary, out, ink)?;
        most_denied(summary, out, ink)?;
    }
    if let Some(line) = &summary.over_time {
        over_time(line, out, ink)?;
    }
    for peaks in summary.peaks.iter().flatten() {
        print_peaks(peaks, out, ink)?;
    }
    match summary.counters.as_deref() {
        Some([]) | None => Ok(()),
        Some(counters) => print_counters(counters, out, ink),
    }
}

/// How the peaks of keys are spread, with the limit drawn in.
fn print_peaks(peaks: &Peaks, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let heading = format!("What each key of {} needed at most", peaks.limit);
    writeln!(out, "\n{}   {} keys", ink.paint(Tone::Strong, heading), ink.paint(Tone::Good, "█"))?;
    let label = |step: &PeakStep| match step.from == step.to {
        true => grouped(step.to),
        false => format!("{} to {}", grouped(step.from), grouped(step.to)),
    };
    let wide = peaks.steps.iter().map(|step| label(step).chars().count()).max().unwrap_or(0);
    let most = peaks.steps.iter().map(|step| step.keys).max().unwrap_or(0).max(1);
    for step in &peaks.steps {
        let length = usize::try_from((u128::from(step.keys) * u128::from(BAR)).div_ceil(u128::from(most)));
        let tone = if step.from > peaks.capacity { Tone::Bad } else { Tone::Good };
        let bar = ink.paint(tone, "█".repeat(length.unwrap_or(0)));
        let keys = if step.keys > 0 { format!(" {}", grouped(step.keys)) } else { String::new() };
        writeln!(out, "{}", format!("{:>wide$}  {bar}{keys}", label(step)).trim_end())?;
        if step.to == peaks.capacity {
            let (rule, above) = (&peaks.rule, counted(peaks.above, "key"));
            let line = format!("{}─ limit: {rule}; {above} above", "─".repeat(wide));
            writeln!(out, "{}", ink.paint(Tone::Strong, line))?;
        }
    }
    let most =
        |count: u64| if count == u64::MAX { "more than can be counted".to_owned() } else { grouped(count) };
    write!(out, "Half of {} needed at most {}", counted(peaks.keys, "key"), most(peaks.p50))?;
    writeln!(out, ", 90 % {}, 99 % {}, all {}", most(peaks.p90), most(peaks.p99), most(peaks.most))?;
    if peaks.with_override > 0 {
        writeln!(out, "{} with an override left out", counted(peaks.with_override, "key"))?;
    }
    Ok(())
}

/// What sliding counters did that exact logs would not.
fn print_counters(counters: &[CounterBesideLog], out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let mut table = Table::new(&[
        ("LIMIT", Side::Left),
        ("DENIED BY LOG", Side::Right),
        ("BY COUNTER", Side::Right),
        ("BY LOG ALONE", Side::Right),
        ("BY COUNTER ALONE", Side::Right),
        ("KEYS", Side::Right),
        ("MOST ABOVE LIMIT", Side::Right),
    ]);
    for counter in counters {
        table.row([
            Cell::toned(Tone::Strong, &counter.limit),
            grouped(counter.denied_by_log).into(),
            grouped(counter.denied_by_counter).into(),
            grouped(counter.log_alone).into(),
            grouped(counter.counter_alone).into(),
            grouped(counter.keys).into(),
            grouped(counter.most_above).into(),
        ]);
    }
    writeln!(
        out,
        "\n{}",
        ink.paint(Tone::Strong, "sliding_window_counter beside the exact log of sliding_window")
    )?;
    table.print(out, ink, 0)
}

/// The bad lines: how many, and the first few.
pub(super) fn skipped(summary: &Summary, out: &mut impl Write) -> io::Result<()> {
    if summary.skipped_lines == 0 {
        return Ok(());
    }
    writeln!(out, "{} left out:", counted(summary.skipped_lines, "bad line"))?;
    let shown = &summary.first_skipped[..summary.first_skipped.len().min(SKIPPED)];
    for line in shown {
        writeln!(out, "  {line}")?;
    }
    match summary.skipped_lines - shown.len() as u64 {
        0 => Ok(()),
        more => writeln!(out, "  and {} more", grouped(more)),
    }
}

fn sentence(summary: &Summary, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let requests = ink.paint(Tone::Strong, counted(summary.requests, "request"));
    write!(out, "{requests} of {}", counted(summary.keys, "key"))?;
    if let (Some(from), Some(to)) = (summary.from_us, summary.to_us) {
        write!(out, ", {} to {} ({})", stamp(from), stamp(to), span(to - from))?;
    }
    writeln!(out)?;
    if summary.requests > 0 {
        let allowed = ink.paint(Tone::Good, format!("{} allowed", grouped(summary.allowed)));
        let tone = if summary.denied > 0 { Tone::Bad } else { Tone::Plain };
        let denied = ink.paint(tone, format!("{} denied", grouped(summary.denied)));
        write!(out, "{allowed}, {denied} ({})", share(summary.denied, summary.requests))?;
        if summary.would_deny > 0 {
            write!(out, "; shadow limits would have denied {} more", grouped(summary.would_deny))?;
        }
        if summary.delayed > 0 {
            write!(out, "; {} of those allowed had to wait", grouped(summary.delayed))?;
        }
        writeln!(out)?;
    }
    if summary.unmet > 0 {
        writeln!(out, "{} met no route", counted(summary.unmet, "request"))?;
    }
    skipped(summary, out)
}

fn limits(summary: &Summary, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let (charged, uncharged): (Vec<&LimitTally>, Vec<&LimitTally>) =
        summary.limits.iter().partition(|limit| limit.requests > 0);
    // Only where it happened: most tables do not need the column.
    let has_others = charged.iter().any(|limit| limit.denied_by_others > 0);
    let mut columns = vec![
        ("LIMIT", Side::Left),
        ("REQUESTS", Side::Right),
        ("KEYS", Side::Right),
        ("ALLOWED", Side::Right),
        ("DENIED", Side::Right),
        ("SHARE", Side::Right),
        ("RULE", Side::Left),
    ];
    if has_others {
        columns.insert(6, ("DENIED BY OTHERS", Side::Right));
    }
    let mut table = Table::new(&columns);
    for limit in charged {
        let denied_tone = if limit.denied > 0 { Tone::Bad } else { Tone::Plain };
        let rule = match limit.would_deny {
            0 => limit.rule.clone(),
            would => format!("{}: would deny {}", limit.rule, grouped(would)),
        };
        let mut cells = vec![
            Cell::toned(Tone::Strong, &limit.limit),
            grouped(limit.requests).into(),
            grouped(limit.keys).into(),
            grouped(limit.allowed).into(),
            Cell::toned(denied_tone, grouped(limit.denied)),
            share(limit.denied, limit.requests).into(),
            rule.into(),
        ];
        if has_others {
            cells.insert(6, grouped(limit.denied_by_others).into());
        }
        table.row(cells);
    }
    writeln!(out)?;
    table.print(out, ink, 0)?;
    if !uncharged.is_empty() {
        let names: Vec<&str> = uncharged.iter().map(|limit| limit.limit.as_str()).collect();
        writeln!(
            out,
            "{}",
            ink.paint(Tone::Faint, format!("Not met by this traffic: {}", names.join(", ")))
        )?;
    }
    Ok(())
}

fn most_denied(summary: &Summary, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    if summary.most_denied.is_empty() {
        return writeln!(out, "\nNobody was denied.");
    }
    let mut table = Table::new(&[
        ("KEY", Side::Left),
        ("DENIED", Side::Right),
        ("OF", Side::Right),
        ("SHARE", Side::Right),
        ("FIRST DENIED", Side::Left),
        ("BY", Side::Left),
    ]);
    for key in &summary.most_denied {
        let by: Vec<String> = match &key.by[..] {
            [only] => vec![only.limit.clone()],
            several => several.iter().map(|by| format!("{} {}", by.limit, grouped(by.denied))).collect(),
        };
        table.row([
            shortened(&key.key, KEY).into(),
            Cell::toned(Tone::Bad, grouped(key.denied)),
            grouped(key.requests).into(),
            share(key.denied, key.requests).into(),
            first_denied(key).into(),
            by.join(", ").into(),
        ]);
    }
    writeln!(out, "\n{}", ink.paint(Tone::Strong, "Denied most"))?;
    table.print(out, ink, 0)
}

/// When, and on which line.
pub(super) fn first_denied(key: &DeniedKey) -> String {
    let file = key.first_denied_file.as_ref().map(|file| format!(" of {file}")).unwrap_or_default();
    format!("{} (line {}{file})", stamp(key.first_denied_us), key.first_denied_line)
}

fn over_time(line: &Timeline, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let most =
        line.buckets.iter().map(|bucket| bucket.allowed + bucket.denied).max().unwrap_or_default().max(1);
    // Whatever there is shows, be it ever so little.
    let length = |count: u64| match count {
        0 => 0,
        _ => usize::try_from((u128::from(count) * u128::from(BAR) + u128::from(most) / 2) / u128::from(most))
            .unwrap_or(0)
            .max(1),
    };
    let heading = format!("Over time, {} a row", Micros::new(line.bucket_us));
    let legend = format!("{} allowed  {} denied", ink.paint(Tone::Good, "█"), ink.paint(Tone::Bad, "░"));
    writeln!(out, "\n{} (UTC)   {legend}", ink.paint(Tone::Strong, heading))?;
    let format = label(line);
    for bucket in &line.buckets {
        let at = formatted(bucket.start_us, format);
        let (allowed, denied) = (length(bucket.allowed), length(bucket.denied));
        let bar = ink.paint(Tone::Good, "█".repeat(allowed)) + &ink.paint(Tone::Bad, "░".repeat(denied));
        let fill = usize::try_from(BAR + 1).unwrap_or_default().saturating_sub(allowed + denied);
        let figures = match (bucket.allowed, bucket.denied) {
            (0, 0) => String::new(),
            (allowed, 0) => grouped(allowed),
            (allowed, denied) => format!("{} + {} denied", grouped(allowed), grouped(denied)),
        };
        let row = format!("{at}  {bar}{:fill$} {figures}", "");
        writeln!(out, "{}", row.trim_end())?;
    }
    Ok(())
}

/// How to write the start of a bucket: as short as it stays distinct from the others.
pub(super) fn label(line: &Timeline) -> &'static str {
    const SECOND: u64 = 1_000_000;
    const DAY: u64 = 86_400 * SECOND;
    let first = line.buckets.first().map_or(0, |bucket| bucket.start_us / DAY);
    let last = line.buckets.last().map_or(0, |bucket| bucket.start_us / DAY);
    match (line.bucket_us, first == last) {
        (DAY.., _) => "%Y-%m-%d",
        (SECOND.., true) => "%H:%M:%S",
        (SECOND.., false) => "%m-%d %H:%M:%S",
        (_, true) => "%H:%M:%S.%3f",
        (_, false) => "%m-%d %H:%M:%S.%3f",
    }
}

/// With as many decimals as it needs.
pub(super) fn stamp(instant_us: u64) -> String {
    formatted(instant_us, "%Y-%m-%dT%H:%M:%S%.fZ")
}

/// A span in words; beyond a minute nobody asks for its microseconds.
pub(super) fn span(us: u64) -> Micros {
    const MINUTE: u64 = 60_000_000;
    Micros::new(if us < MINUTE { us } else { us - us % 1_000_000 })
}

/// Every time that was read fits; the number is the answer to one that would not.
pub(super) fn formatted(instant_us: u64, format: &str) -> String {
    i64::try_from(instant_us)
        .ok()
        .and_then(|us| Timestamp::from_microsecond(us).ok())
        .map_or_else(|| instant_us.to_string(), |instant| instant.strftime(format).to_string())
}

#[cfg(test)]
mod tests {
    use super::super::timeline::Bucket;
    use super::*;

    fn picture(buckets: &[(u64, u64)], bucket_us: u64) -> String {
        let start = 1_700_000_000_000_000;
        let buckets = (0..)
            .zip(buckets)
            .map(|(n, &(allowed, denied))| Bucket {
                start_us: start + n * bucket_us,
                allowed,
                denied,
                would_deny: 0,
            })
            .collect();
        let mut out = Vec::new();
        over_time(&Timeline { bucket_us, buckets }, &mut out, Ink::Plain).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn bars_are_to_scale_and_nothing_vanishes() {
        let text = picture(&[(4000, 0), (1000, 1000), (1, 1), (0, 0)], 10_000_000);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines[0], format!("22:13:20  {}  4,000", "█".repeat(40)));
        assert_eq!(
            lines[1],
            format!("22:13:30  {}{}{:22}1,000 + 1,000 denied", "█".repeat(10), "░".repeat(10), "")
        );
        assert_eq!(lines[2], format!("22:13:40  █░{:40}1 + 1 denied", ""));
        assert_eq!(lines[3], "22:13:50");
    }

    #[test]
    fn labels_are_as_long_as_they_must_be() {
        for (bucket_us, count, label) in [
            (1_000, 3, "22:13:20.001"),
            (3_600_000_000, 5, "11-14 23:13:20"),
            (86_400_000_000, 3, "2023-11-15"),
        ] {
            let text = picture(&vec![(1, 0); count], bucket_us);
            assert!(text.lines().nth(3).unwrap().starts_with(&format!("{label}  ")), "{text}");
        }
        assert_eq!(stamp(1_700_000_000_250_000), "2023-11-14T22:13:20.25Z");
        assert_eq!(stamp(1_700_000_000_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(span(59_999_999).to_string(), "59.999999s");
        assert_eq!(span(3_605_999_999).to_string(), "1h5s");
    }
}
