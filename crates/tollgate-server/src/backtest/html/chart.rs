//! What was allowed and denied over time, as bars: drawn, described in words, and as a table below.
//!
//! The picture is stretched to the width there is, so no text is in it. All is whole numbers: a bar is at most a thousand high.

use std::fmt::{self, Write};

use super::super::report::{formatted, label};
use super::super::timeline::{Bucket, Timeline};
use super::{Escaped, a_bar};
use crate::figures::{counted, grouped};

/// How wide a bar is, and the room between two.
const WIDTH: usize = 20;
const GAP: usize = 4;

/// How high the highest is, and the least that still shows.
const HEIGHT: u64 = 1000;
const LEAST: u64 = 12;

/// A picture of a timeline, of what `title` names.
pub(super) fn figure(out: &mut String, line: &Timeline, title: &str) -> fmt::Result {
    let all = |bucket: &Bucket| bucket.allowed + bucket.denied;
    let most = line.buckets.iter().map(all).max().unwrap_or_default().max(1);
    let format = label(line);
    let at = |bucket: &Bucket| formatted(bucket.start_us, format);
    let (first, last) = (line.buckets.first().map(at), line.buckets.last().map(at));
    let width = line.buckets.len() * WIDTH;
    write!(
        out,
        "<figure>\n<svg class=\"chart bars\" viewBox=\"0 -{slack} {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">\n",
        Escaped(&words(line, title)),
        // What is too little to show is drawn a little too high.
        slack = 2 * LEAST,
        height = HEIGHT + 2 * LEAST,
    )?;
    for (index, bucket) in line.buckets.iter().enumerate() {
        write!(out, "<g><title>{}</title>", Escaped(&described(bucket, &at(bucket))))?;
        let mut top = HEIGHT;
        for (class, count) in [
            ("allowed", bucket.allowed - bucket.would_deny),
            ("would", bucket.would_deny),
            ("denied", bucket.denied),
        ] {
            let high = height(count, most);
            if high > 0 {
                top = top.saturating_sub(high);
                write!(
                    out,
                    "<rect class=\"area-{class}\" x=\"{}\" y=\"{top}\" width=\"{}\" height=\"{high}\"/>",
                    index * WIDTH + GAP / 2,
                    WIDTH - GAP
                )?;
            }
        }
        out.push_str("</g>\n");
    }
    write!(
        out,
        "<path class=\"base\" d=\"M0 {HEIGHT}H{width}\"/>\n</svg>\n<figcaption><span>{}</span><span>{} a bar, the highest {}</span><span>{}</span></figcaption>\n",
        first.unwrap_or_default(),
        a_bar(line.bucket_us),
        grouped(most),
        last.unwrap_or_default()
    )?;
    legend(out, line);
    table(out, line, title, at)?;
    out.push_str("</figure>\n");
    Ok(())
}

/// Whatever there is shows, be it ever so little.
fn height(count: u64, most: u64) -> u64 {
    let high = (u128::from(count) * u128::from(HEIGHT)).div_ceil(u128::from(most));
    match u64::try_from(high).unwrap_or(HEIGHT) {
        0 => 0,
        high => high.max(LEAST),
    }
}

/// What the colours mean, of those that are there.
fn legend(out: &mut String, line: &Timeline) {
    out.push_str("<p class=\"legend\">");
    let any = |count: fn(&Bucket) -> u64| line.buckets.iter().any(|bucket| count(bucket) > 0);
    for (class, word, is_there) in [
        ("allowed", "allowed", any(|bucket| bucket.allowed - bucket.would_deny)),
        ("would", "allowed, though a shadow limit would have denied", any(|bucket| bucket.would_deny)),
        ("denied", "denied", any(|bucket| bucket.denied)),
    ] {
        if is_there {
            out.push_str("<span><svg class=\"chart\" viewBox=\"0 0 1 1\" aria-hidden=\"true\" focusable=\"false\"><rect class=\"area-");
            out.push_str(class);
            out.push_str("\" width=\"1\" height=\"1\"/></svg>");
            out.push_str(word);
            out.push_str("</span> ");
        }
    }
    out.push_str("</p>\n");
}

fn table(out: &mut String, line: &Timeline, title: &str, at: impl Fn(&Bucket) -> String) -> fmt::Result {
    let would = line.buckets.iter().any(|bucket| bucket.would_deny > 0);
    write!(
        out,
        "<details><summary>The numbers<span class=\"unseen\"> of {}</span></summary>\n<table class=\"numbers\"><thead><tr><th scope=\"col\">from (UTC)</th><th scope=\"col\">allowed</th>{}<th scope=\"col\">denied</th></tr></thead><tbody>\n",
        Escaped(title),
        if would { "<th scope=\"col\">of these, shadow would deny</th>" } else { "" }
    )?;
    for bucket in &line.buckets {
        write!(out, "<tr><th scope=\"row\">{}</th><td>{}</td>", at(bucket), grouped(bucket.allowed))?;
        if would {
            write!(out, "<td>{}</td>", grouped(bucket.would_deny))?;
        }
        writeln!(out, "<td>{}</td></tr>", grouped(bucket.denied))?;
    }
    out.push_str("</tbody></table></details>\n");
    Ok(())
}

/// One bar in words.
fn described(bucket: &Bucket, at: &str) -> String {
    let mut words = format!("{at}: {} allowed, {} denied", grouped(bucket.allowed), grouped(bucket.denied));
    if bucket.would_deny > 0 {
        let _ = write!(words, ", {} would have been denied", grouped(bucket.would_deny));
    }
    words
}

/// The picture in words.
fn words(line: &Timeline, title: &str) -> String {
    let format = label(line);
    let bars = counted(line.buckets.len() as u64, "bar");
    let (allowed, denied) = line
        .buckets
        .iter()
        .fold((0, 0), |(allowed, denied), bucket| (allowed + bucket.allowed, denied + bucket.denied));
    let mut words = format!(
        "{title} over time, {bars} of {}: {} allowed, {} denied",
        a_bar(line.bucket_us),
        grouped(allowed),
        grouped(denied)
    );
    // Of several that are as bad, the first.
    let worst = line.buckets.iter().rev().max_by_key(|bucket| bucket.denied).filter(|worst| worst.denied > 0);
    if let Some(worst) = worst {
        let at = formatted(worst.start_us, format);
        let _ = write!(words, ", at worst {} from {at} on", grouped(worst.denied));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_to_scale_and_nothing_vanishes() {
        for (count, most, high) in [
            (0, 1, 0),
            (1, 1, HEIGHT),
            (1, 2, HEIGHT / 2),
            (1, 1_000_000, LEAST),
            (u64::MAX, u64::MAX, HEIGHT),
            (1, u64::MAX, LEAST),
        ] {
            assert_eq!(height(count, most), high, "{count} of {most}");
        }
    }

    #[test]
    fn the_picture_has_a_text() {
        let bucket = |n: u64, allowed, denied, would_deny| Bucket {
            start_us: 1_700_000_000_000_000 + n * 60_000_000,
            allowed,
            denied,
            would_deny,
        };
        let buckets = vec![bucket(0, 5, 0, 0), bucket(1, 1000, 20, 7), bucket(2, 0, 3, 0)];
        let line = Timeline { bucket_us: 60_000_000, buckets };
        assert_eq!(
            words(&line, "api"),
            "api over time, 3 bars of 1m: 1,005 allowed, 23 denied, at worst 20 from 22:14:20 on"
        );
        let mut out = String::new();
        figure(&mut out, &line, "\"<api>").unwrap();
        assert!(out.contains("aria-label=\"&quot;&lt;api&gt; over time"), "{out}");
        assert!(
            out.contains("<title>22:14:20: 1,000 allowed, 20 denied, 7 would have been denied</title>"),
            "{out}"
        );
        assert!(out.contains("<td>1,000</td><td>7</td><td>20</td>"), "{out}");
        assert_eq!(out.matches("<rect").count(), 5 + 3, "{out}");
    }
}
