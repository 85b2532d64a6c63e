//! `--report`: the summary as one HTML file that needs nothing else.
//!
//! It looks like the live page, whose colours and shapes it has from the same style sheet. There is no script in it, and its own
//! policy lets none run and nothing be fetched: only the style that it was written with, by its hash. Pictures are drawn in
//! `chart.rs`, each with its numbers in words and in a table below. Every text from outside passes through [`Escaped`].

mod chart;
mod peaks;

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use sha2::{Digest, Sha256};
use tollgate::config::Config;
use tollgate::store::Micros;

use super::compare::{self, Replayed};
use super::peaks::Peaks;
use super::report::{KEY, SKIPPED, first_denied, span, stamp};
use super::shown::ShownKeys;
use super::summary::{LimitTally, Summary};
use crate::figures::{counted, grouped, share, shortened};
use crate::source;

/// That of the live page, and what only a report has.
const STYLE: &str = concat!(include_str!("../front/page/page.css"), include_str!("html/report.css"));

/// What was replayed, for people.
pub(super) struct Sources {
    /// The config's name without its directory, for headings.
    title: String,
    pub(super) config: String,
    logs: Vec<String>,
    /// (limit, words) of each rule for access logs.
    routes: Vec<(String, String)>,
    /// (limit, key, words) of each override.
    overrides: Vec<(String, String, String)>,
    has_hashes: bool,
}

/// How many overrides are shown.
const MOST_OVERRIDES: usize = 100;

/// How many logs are named.
const MOST_LOGS: usize = 100;

impl Sources {
    pub(super) fn of(path: &Path, logs: &[PathBuf], config: &Config, shown: &ShownKeys) -> Sources {
        let route = |route: &tollgate::route::RouteLimit| {
            (route.limit().unwrap_or_default().to_string(), route.to_string())
        };
        let overrides = config.policy.rules().iter().flat_map(|rule| {
            let shown = |(key, other): &(tollgate::Key<'_>, tollgate::Allowance)| {
                let key = shown.show(&key.to_string(), key.canonical()).into_owned();
                (rule.name().to_string(), key, other.to_string())
            };
            rule.overrides().iter().map(shown)
        });
        let title = path.file_name().filter(|_| !source::is_stdin(path));
        let title = title.map(|name| name.to_string_lossy().into_owned());
        Sources {
            title: title.unwrap_or_else(|| source::name(path)),
            config: source::name(path),
            logs: logs.iter().map(|path| source::name(path)).collect(),
            routes: config.routes.iter().map(route).collect(),
            overrides: overrides.collect(),
            has_hashes: shown.are_hashed(),
        }
    }
}

/// The whole file.
pub(super) fn page(replayed: &[Replayed]) -> String {
    let mut out = String::with_capacity(64 * 1024);
    // Writing to a string cannot fail.
    let _ = write_page(&mut out, replayed);
    out
}

fn write_page(out: &mut String, replayed: &[Replayed]) -> fmt::Result {
    let titles: Vec<&str> = replayed.iter().map(|one| one.sources.title.as_str()).collect();
    let title = titles.join(" and ");
    let title = Escaped(&title);
    write!(
        out,
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>Backtest of {title}</title>
<style>{STYLE}</style>
</head>
<body>
<header class="top">
<p class="brand"><svg viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d="M5 21V8h4v13zM9 10h13v3H9z"/></svg><span>Tollgate</span></p>
<p class="about">backtest, version {}</p>
</header>
<main>
<h1>What {title} would have done</h1>
"#,
        BASE64_STANDARD.encode(Sha256::digest(STYLE.as_bytes())),
        env!("CARGO_PKG_VERSION"),
    )?;
    match replayed {
        [only] => policy_sections(out, only, "")?,
        several => {
            comparison(out, several)?;
            for (number, one) in (1..).zip(several) {
                let title = Escaped(&one.sources.title);
                writeln!(out, "<h2 class=\"policy-name\" id=\"policy-{number}\"><bdi>{title}</bdi></h2>")?;
                policy_sections(out, one, &format!("-{number}"))?;
            }
        }
    }
    let keys = match replayed.iter().any(|one| one.sources.has_hashes) {
        true => "Keys are shown as hashes.",
        false => "Keys are shown as the log has them.",
    };
    write!(out, "</main>\n<footer class=\"foot\"><p>Times are UTC. {keys}</p></footer>\n</body>\n</html>\n")
}

/// All that there is to show of one policy. `ids` ends the ids of its headings, so that none is there twice.
fn policy_sections(out: &mut String, replayed: &Replayed, ids: &str) -> fmt::Result {
    let Replayed { summary, sources, .. } = replayed;
    sums(out, summary, ids)?;
    if let Some(line) = &summary.over_time {
        open_section(out, "limit all", "over-time", ids, "Over time")?;
        chart::figure(out, line, "All requests")?;
        out.push_str("</section>\n");
    }
    limits(out, summary, ids)?;
    peaks::counters(out, summary.counters.as_deref().unwrap_or_default(), ids)?;
    denied_most(out, summary, ids)?;
    policy(out, sources, ids)?;
    read(out, summary, sources, ids)
}

/// Begins a section with its heading. Beside other policies it is named by its policy too, so that no two sections have one name.
fn open_section(out: &mut String, class: &str, id: &str, ids: &str, heading: &str) -> fmt::Result {
    let policy = if ids.is_empty() { String::new() } else { format!("policy{ids} ") };
    let class = if class.is_empty() { String::new() } else { format!("class=\"{class}\" ") };
    write!(
        out,
        "<section {class}aria-labelledby=\"{policy}{id}{ids}\">\n<h2 id=\"{id}{ids}\">{heading}</h2>\n"
    )
}

/// Several policies side by side.
fn comparison(out: &mut String, replayed: &[Replayed]) -> fmt::Result {
    out.push_str(
        "<section class=\"panel\" aria-labelledby=\"compared\">\n<h2 id=\"compared\">Side by side</h2>\n",
    );
    out.push_str("<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"Table: policies side by side\"><table class=\"words\"><thead><tr><th scope=\"col\"><span class=\"unseen\">what</span></th>");
    for one in replayed {
        write!(out, "<th scope=\"col\"><bdi>{}</bdi></th>", Escaped(&one.sources.config))?;
    }
    out.push_str("</tr></thead><tbody>\n");
    for (name, values) in compare::rows(replayed) {
        write!(out, "<tr><th scope=\"row\">{}</th>", Escaped(&name))?;
        for value in values {
            write!(out, "<td>{}</td>", Escaped(&value))?;
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    if let [first, others @ ..] = replayed {
        for other in others {
            writeln!(
                out,
                "<p class=\"faint\"><bdi>{}</bdi> beside <bdi>{}</bdi>:</p>\n<ul class=\"plain\">",
                Escaped(&other.sources.config),
                Escaped(&first.sources.config)
            )?;
            for line in compare::differences(first, other) {
                writeln!(out, "<li><bdi>{}</bdi></li>", Escaped(&line))?;
            }
            out.push_str("</ul>\n");
        }
    }
    out.push_str("</section>\n");
    Ok(())
}

/// The numbers that everybody asks for first.
fn sums(out: &mut String, summary: &Summary, ids: &str) -> fmt::Result {
    match ids {
        "" => out.push_str("<section class=\"sums\" aria-label=\"In all\">\n<p>"),
        ids => write!(out, "<section class=\"sums\" aria-labelledby=\"policy{ids}\">\n<p>")?,
    }
    match (summary.from_us, summary.to_us) {
        (Some(from), Some(to)) => write!(out, "{} to {} ({})", stamp(from), stamp(to), span(to - from))?,
        _ => out.push_str("Nothing in the log met a limit."),
    }
    out.push_str("</p>\n<dl>\n");
    let of_all = |part: u64| format!("{} ({})", grouped(part), share(part, summary.requests));
    sum(out, "", "requests", &grouped(summary.requests))?;
    sum(out, "", "keys", &grouped(summary.keys))?;
    sum(out, "", "allowed", &of_all(summary.allowed))?;
    sum(out, if summary.denied > 0 { "some" } else { "" }, "denied", &of_all(summary.denied))?;
    for (word, count) in [
        ("of those allowed, had to wait", summary.delayed),
        ("of those allowed, a shadow limit would have denied", summary.would_deny),
        ("met no route, and so no limit", summary.unmet),
        (
            if summary.skipped_lines == 1 { "bad line left out" } else { "bad lines left out" },
            summary.skipped_lines,
        ),
    ] {
        if count > 0 {
            sum(out, "", word, &grouped(count))?;
        }
    }
    out.push_str("</dl>\n</section>\n");
    Ok(())
}

fn sum(out: &mut String, class: &str, word: &str, number: &str) -> fmt::Result {
    let of = if class.is_empty() { "" } else { " class=\"is-denied\"" };
    let (figure, rest) = number.split_once(' ').unwrap_or((number, ""));
    write!(out, "<div{of}><dt>{word}</dt><dd class=\"{class}\">{}", Escaped(figure))?;
    if !rest.is_empty() {
        write!(out, " <small>{}</small>", Escaped(rest))?;
    }
    out.push_str("</dd></div>\n");
    Ok(())
}

fn limits(out: &mut String, summary: &Summary, ids: &str) -> fmt::Result {
    let (met, unmet): (Vec<&LimitTally>, Vec<&LimitTally>) =
        summary.limits.iter().partition(|limit| limit.requests > 0);
    open_section(out, "", "limits", ids, "Limits")?;
    if !met.is_empty() {
        out.push_str("<div class=\"limits\">\n");
        for limit in met {
            let of_limit = summary.peaks.iter().flatten().find(|peaks| peaks.limit == limit.limit);
            card(out, limit, of_limit)?;
        }
        out.push_str("</div>\n");
    }
    if !unmet.is_empty() {
        out.push_str("<p class=\"faint\">Not met by this traffic:</p>\n<ul class=\"plain\">\n");
        for limit in unmet {
            writeln!(out, "<li><code>{}</code>: {}</li>", Escaped(&limit.limit), Escaped(&limit.rule))?;
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</section>\n");
    Ok(())
}

fn card(out: &mut String, limit: &LimitTally, of_keys: Option<&Peaks>) -> fmt::Result {
    write!(
        out,
        "<article class=\"limit\">\n<header><h3>{}</h3><p class=\"policy\">{}</p></header>\n<dl class=\"rates\">\n",
        Escaped(&limit.limit),
        Escaped(&limit.rule)
    )?;
    let denied = if limit.denied > 0 { " class=\"some\"" } else { "" };
    let mut rate = |word: &str, count: u64, class: &str| {
        writeln!(out, "<div{}><dt>{word}</dt><dd{class}>{}</dd></div>", is_denied(class), grouped(count))
    };
    rate("allowed", limit.allowed, "")?;
    rate("denied", limit.denied, denied)?;
    rate(if limit.keys == 1 { "key" } else { "keys" }, limit.keys, "")?;
    for (word, count) in [
        ("would have been denied", limit.would_deny),
        ("had to wait", limit.delayed),
        ("denied by other limits", limit.denied_by_others),
    ] {
        if count > 0 {
            rate(word, count, "")?;
        }
    }
    out.push_str("</dl>\n");
    if let Some(line) = &limit.over_time {
        chart::figure(out, line, &limit.limit)?;
    }
    if let Some(of_keys) = of_keys {
        peaks::figure(out, of_keys)?;
    }
    out.push_str("</article>\n");
    Ok(())
}

fn is_denied(class: &str) -> &'static str {
    if class.is_empty() { "" } else { " class=\"is-denied\"" }
}

fn denied_most(out: &mut String, summary: &Summary, ids: &str) -> fmt::Result {
    open_section(out, "panel", "denied-most", ids, "Denied most")?;
    if summary.most_denied.is_empty() {
        out.push_str("<p>Nobody was denied.</p>\n</section>\n");
        return Ok(());
    }
    begin_table(out, "offenders", &["key", "denied", "of", "share", "by", "first denied"])?;
    for key in &summary.most_denied {
        let by: Vec<String> = match &key.by[..] {
            [only] => vec![only.limit.clone()],
            several => several.iter().map(|by| format!("{} {}", by.limit, grouped(by.denied))).collect(),
        };
        writeln!(
            out,
            "<tr><td><bdi>{}</bdi></td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            Escaped(&shortened(&key.key, KEY)),
            grouped(key.denied),
            grouped(key.requests),
            Escaped(&share(key.denied, key.requests)),
            Escaped(&by.join(", ")),
            Escaped(&first_denied(key))
        )?;
    }
    out.push_str("</tbody></table></div>\n</section>\n");
    Ok(())
}

/// The routes and the overrides, where there are any.
fn policy(out: &mut String, sources: &Sources, ids: &str) -> fmt::Result {
    if !sources.routes.is_empty() {
        open_section(out, "panel", "routes", ids, "Which requests of access logs meet which limit")?;
        begin_table(out, "words", &["limit", "requests"])?;
        for (limit, words) in &sources.routes {
            writeln!(out, "<tr><td>{}</td><td><bdi>{}</bdi></td></tr>", Escaped(limit), Escaped(words))?;
        }
        out.push_str("</tbody></table></div>\n</section>\n");
    }
    if !sources.overrides.is_empty() {
        open_section(out, "panel", "overrides", ids, "Keys with a limit of their own")?;
        begin_table(out, "words", &["limit", "key", "instead"])?;
        for (limit, key, words) in sources.overrides.iter().take(MOST_OVERRIDES) {
            writeln!(
                out,
                "<tr><td>{}</td><td><bdi>{}</bdi></td><td>{}</td></tr>",
                Escaped(limit),
                Escaped(&shortened(key, KEY)),
                Escaped(words)
            )?;
        }
        out.push_str("</tbody></table></div>\n");
        more(out, sources.overrides.len(), MOST_OVERRIDES)?;
        out.push_str("</section>\n");
    }
    Ok(())
}

fn more(out: &mut String, all: usize, shown: usize) -> fmt::Result {
    match all.saturating_sub(shown) {
        0 => Ok(()),
        left => writeln!(out, "<p class=\"faint\">And {} more.</p>", grouped(left as u64)),
    }
}

/// What was read.
fn read(out: &mut String, summary: &Summary, sources: &Sources, ids: &str) -> fmt::Result {
    open_section(out, "panel", "read", ids, "What was read")?;
    out.push_str("<dl class=\"sources\">\n");
    writeln!(out, "<div><dt>config</dt><dd><bdi>{}</bdi></dd></div>", Escaped(&sources.config))?;
    writeln!(out, "<div><dt>{}</dt>", if sources.logs.len() == 1 { "log" } else { "logs" })?;
    for log in sources.logs.iter().take(MOST_LOGS) {
        writeln!(out, "<dd><bdi>{}</bdi></dd>", Escaped(log))?;
    }
    out.push_str("</div>\n");
    if summary.skipped_lines > 0 {
        let bad = counted(summary.skipped_lines, "bad line");
        writeln!(out, "<div><dt>{bad} left out, first</dt>")?;
        for line in summary.first_skipped.iter().take(SKIPPED) {
            writeln!(out, "<dd><bdi>{}</bdi></dd>", Escaped(line))?;
        }
        out.push_str("</div>\n");
    }
    out.push_str("</dl>\n");
    more(out, sources.logs.len(), MOST_LOGS)?;
    out.push_str("</section>\n");
    Ok(())
}

/// A table up to its first row; on a narrow screen it scrolls by itself, with the keyboard too.
fn begin_table(out: &mut String, class: &str, columns: &[&str]) -> fmt::Result {
    let label = columns.join(", ");
    write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"Table: {label}\"><table class=\"{class}\"><thead><tr>"
    )?;
    for column in columns {
        write!(out, "<th scope=\"col\">{column}</th>")?;
    }
    out.push_str("</tr></thead><tbody>\n");
    Ok(())
}

/// A length of time in words.
fn a_bar(bucket_us: u64) -> String {
    Micros::new(bucket_us).to_string()
}

/// A text that is only a text, wherever it stands in the page.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // No page may have them, and a file's name can.
                _ if character.is_control() => f.write_char('\u{fffd}')?,
                _ => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_only_a_text() {
        let text = "<a href=\"x\">'&amp;'\0\u{1b}[31m\n</a>";
        let escaped = "&lt;a href=&quot;x&quot;&gt;&#39;&amp;amp;&#39;\u{fffd}\u{fffd}[31m\u{fffd}&lt;/a&gt;";
        assert_eq!(Escaped(text).to_string(), escaped);
    }

    /// The style ends where it should, so that what follows is the page.
    #[test]
    fn the_style_does_not_end_itself() {
        assert!(!STYLE.contains('<'));
    }
}
