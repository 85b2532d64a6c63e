//! What each key needed at most, as bars with the limit drawn in, and sliding counters beside exact logs.
//!
//! As in `chart.rs` no text is in the picture, which is stretched to the width there is: its words stand below, with all numbers in a table.

use std::fmt::{self, Write};

use super::super::peaks::{CounterBesideLog, PeakStep, Peaks};
use super::{Escaped, begin_table, open_section};
use crate::figures::{counted, grouped};

/// How wide a bar is, and the room between two.
const WIDTH: u64 = 20;
const GAP: u64 = 4;

/// How high the highest is, and the least that still shows.
const HEIGHT: u64 = 1000;
const LEAST: u64 = 12;

/// A picture of the peaks of a limit.
pub(super) fn figure(out: &mut String, peaks: &Peaks) -> fmt::Result {
    let most = peaks.steps.iter().map(|step| step.keys).max().unwrap_or(0).max(1);
    let width = WIDTH * peaks.steps.len() as u64;
    let words = words(peaks);
    writeln!(
        out,
        "<figure class=\"peaks\">\n<svg class=\"chart bars\" viewBox=\"0 -{LEAST} {width} {}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
        HEIGHT + 2 * LEAST,
        Escaped(&words),
    )?;
    let mut limit_at = None;
    for (index, step) in (0u64..).zip(&peaks.steps) {
        let class = if step.from > peaks.capacity { "denied" } else { "allowed" };
        write!(out, "<g><title>{}: {}</title>", range(step), counted(step.keys, "key"))?;
        if step.keys > 0 {
            let high = (u128::from(step.keys) * u128::from(HEIGHT)).div_ceil(u128::from(most));
            let high = u64::try_from(high).unwrap_or(HEIGHT).max(LEAST);
            let (x, y) = (index * WIDTH + GAP / 2, HEIGHT.saturating_sub(high));
            write!(
                out,
                "<rect class=\"area-{class}\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{high}\"/>",
                WIDTH - GAP
            )?;
        }
        out.push_str("</g>\n");
        if step.to == peaks.capacity {
            limit_at = Some((index + 1) * WIDTH);
        }
    }
    writeln!(out, "<path class=\"base\" d=\"M0 {HEIGHT}H{width}\"/>")?;
    if let Some(at) = limit_at {
        writeln!(out, "<path class=\"limit-line\" d=\"M{at} 0V{HEIGHT}\"/>")?;
    }
    writeln!(
        out,
        "</svg>\n<figcaption>{}</figcaption>\n<details><summary>The numbers<span class=\"unseen\"> of the keys of {}</span></summary>\n<table class=\"numbers\"><thead><tr><th scope=\"col\">needed at most</th><th scope=\"col\">keys</th></tr></thead><tbody>",
        Escaped(&words),
        Escaped(&peaks.limit)
    )?;
    for step in &peaks.steps {
        writeln!(out, "<tr><th scope=\"row\">{}</th><td>{}</td></tr>", range(step), grouped(step.keys))?;
    }
    out.push_str("</tbody></table></details>\n</figure>\n");
    Ok(())
}

fn range(step: &PeakStep) -> String {
    match step.from == step.to {
        true => grouped(step.to),
        false => format!("{} to {}", grouped(step.from), grouped(step.to)),
    }
}

fn words(peaks: &Peaks) -> String {
    let left_out = match peaks.with_override {
        0 => String::new(),
        keys => format!("; {} with an override left out", counted(keys, "key")),
    };
    format!(
        "What each key needed at most: half of {} up to {}, 90 % up to {}, 99 % up to {}, all up to {}. The line is the limit, {}: {} above{left_out}.",
        counted(peaks.keys, "key"),
        grouped(peaks.p50),
        grouped(peaks.p90),
        grouped(peaks.p99),
        grouped(peaks.most),
        grouped(peaks.capacity),
        counted(peaks.above, "key"),
    )
}

/// What sliding counters did that exact logs would not; nothing where there are none.
pub(super) fn counters(out: &mut String, counters: &[CounterBesideLog], ids: &str) -> fmt::Result {
    if counters.is_empty() {
        return Ok(());
    }
    open_section(out, "panel", "counters", ids, "Sliding counter beside the exact log")?;
    let columns = [
        "limit",
        "denied by the log",
        "by the counter",
        "by the log alone",
        "by the counter alone",
        "keys decided in two ways",
        "most above the limit",
    ];
    begin_table(out, "words", &columns)?;
    for counter in counters {
        write!(out, "<tr><td>{}</td>", Escaped(&counter.limit))?;
        for number in [
            counter.denied_by_log,
            counter.denied_by_counter,
            counter.log_alone,
            counter.counter_alone,
            counter.keys,
            counter.most_above,
        ] {
            write!(out, "<td>{}</td>", grouped(number))?;
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n</section>\n");
    Ok(())
}
