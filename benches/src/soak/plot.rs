//! Heap and p95 over time, as text for a terminal and as a small SVG.

use std::fmt::Write;

use tollgate_testkit::soak::{Event, Kind, Sample, Soak};

use super::{mib, ms};

/// How many columns the plot in text has at most.
const COLUMNS: usize = 90;

const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Of the SVG, in its own units.
const WIDTH: f64 = 900.0;
const PANEL: f64 = 170.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 30.0;

/// A quantity that is drawn.
struct Series {
    name: &'static str,
    unit: &'static str,
    value: fn(&Sample) -> f64,
}

const SERIES: [Series; 2] = [
    Series { name: "heap of the server", unit: "MiB", value: |sample| mib(sample.heap_bytes as f64) },
    Series { name: "p95 of all requests", unit: "ms", value: |sample| ms(sample.p95) },
];

/// The largest value that is drawn: in faults waits are as long as the deadline of a call, which is no matter here, so the scale is that
/// of undisturbed samples.
fn top(samples: &[Sample], value: fn(&Sample) -> f64) -> f64 {
    let undisturbed = samples.iter().filter(|sample| !sample.is_disturbed);
    undisturbed.map(value).fold(f64::MIN_POSITIVE, f64::max) * 1.1
}

/// One line for each series, and one that marks faults (`x`).
pub(super) fn text(soak: &Soak) -> String {
    let samples = &soak.samples;
    let group = samples.len().div_ceil(COLUMNS).max(1);
    let groups = || samples.chunks(group);
    let mut text = String::new();
    for Series { name, unit, value } in SERIES {
        let top = top(samples, value);
        let level = |samples: &[Sample]| {
            let mean = samples.iter().map(value).sum::<f64>() / samples.len() as f64;
            // From 0 to 1, and one below the number of levels.
            let level = (mean / top).clamp(0.0, 0.999) * LEVELS.len() as f64;
            LEVELS.iter().zip(1..).find(|(_, end)| level < f64::from(*end)).map_or(' ', |(shown, _)| *shown)
        };
        let line: String = groups().map(level).collect();
        let _ = writeln!(text, "{line}  {name}, 0 to {top:.2} {unit}");
    }
    let mark = |samples: &[Sample]| if samples.iter().any(|sample| sample.is_disturbed) { 'x' } else { ' ' };
    let _ = writeln!(text, "{}  x: Redis is disturbed", groups().map(mark).collect::<String>());
    text
}

/// Two panels over the same time: faults are grey bands, reloads dotted lines.
pub(super) fn svg(soak: &Soak) -> String {
    let seconds = soak.plan.duration.as_secs_f64();
    let x = |at: f64| LEFT + at / seconds * (WIDTH - LEFT - 20.0);
    let height = TOP + (PANEL + 50.0) * SERIES.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, Series { name, unit, value }) in SERIES.into_iter().enumerate() {
        let y0 = TOP + (PANEL + 50.0) * index as f64;
        let top = top(&soak.samples, value);
        let y = |value: f64| y0 + PANEL - (value / top).min(1.0) * PANEL;
        let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{}\">{name}, {unit}</text>", y0 - 8.0);
        for event in &soak.events {
            svg.push_str(&band(event, x, y0));
        }
        for part in [0.0, 0.5, 1.0] {
            let (at, shown) = (y(part * top), part * top);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ccc\"/>",
                WIDTH - 20.0
            );
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{shown:.1}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
        let points: Vec<String> = soak
            .samples
            .iter()
            .map(|sample| format!("{:.1},{:.1}", x(sample.at.as_secs_f64()), y(value(sample))))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.join(" ")
        );
        for part in [0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0] {
            let (at, minutes) = (x(part * seconds), part * seconds / 60.0);
            let _ = writeln!(
                svg,
                "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{minutes:.0} min</text>",
                y0 + PANEL + 16.0
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn band(event: &Event, x: impl Fn(f64) -> f64, y0: f64) -> String {
    let (start, end) = (x(event.start.as_secs_f64()), x(event.end.as_secs_f64()));
    if event.kind == Kind::Reload {
        return format!(
            "<line x1=\"{start:.1}\" x2=\"{start:.1}\" y1=\"{y0}\" y2=\"{:.1}\" stroke=\"#999\" stroke-dasharray=\"1 3\"><title>reload</title></line>\n",
            y0 + PANEL
        );
    }
    format!(
        "<rect x=\"{start:.1}\" y=\"{y0}\" width=\"{:.1}\" height=\"{PANEL}\" fill=\"#bbb\"><title>{:?}</title></rect>\n",
        (end - start).max(1.0),
        event.kind
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate_testkit::soak::Plan;

    use super::*;

    fn soak() -> Soak {
        let sample = |number: u64| Sample {
            at: Duration::from_secs(number + 1),
            heap_bytes: (number + 1) << 20,
            redis_bytes: None,
            cpu: Duration::ZERO,
            allowed: 1,
            denied: 0,
            undecided: 0,
            p50: Duration::ZERO,
            p95: Duration::from_millis(
                [4, 2, 2, 500, 2, 2, 2, 2][usize::try_from(number).expect("below eight")],
            ),
            p99: Duration::ZERO,
            is_disturbed: number == 3,
        };
        let event = |start, end, kind| Event {
            start: Duration::from_secs(start),
            end: Duration::from_secs(end),
            kind,
        };
        Soak {
            plan: Plan { duration: Duration::from_secs(8), rate: 1, seed: 1 },
            events: vec![event(3, 4, Kind::Cut), event(6, 6, Kind::Reload)],
            samples: (0..8).map(sample).collect(),
            mistakes: 0,
            first_mistakes: Vec::new(),
        }
    }

    #[test]
    fn growth_is_seen_and_a_fault_does_not_flatten_the_rest() {
        let text = text(&soak());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("▁▂▃▄▅▆▇█"), "{text}");
        // The wait in the fault is off the scale, and the others are not squeezed for it.
        assert!(lines[1].starts_with("█▄▄█▄▄▄▄"), "{text}");
        assert!(lines[2].starts_with("   x    "), "{text}");
    }

    #[test]
    fn the_picture_has_a_band_for_the_fault_and_a_line_for_the_reload() {
        let svg = svg(&soak());
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<title>Cut</title>").count(), 2);
        assert_eq!(svg.matches("<title>reload</title>").count(), 2);
        assert!(!svg.contains("NaN") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
