//! `tollgate top`: the limits of a running server and what they decide, once a second, until q.
//!
//! What is counted comes from `/metrics`, what there is from `/v1/limits`, how it fares from `/v1/server`, who is denied from `/v1/snapshot`. Rows are
//! sorted, those that deny first, and scroll where they do not fit. The terminal is put
//! back as it was however this ends, short of being killed. Where stdout is no terminal there is one table, with totals.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::Value;

use super::{number, text};
use crate::cli::TopArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::figures::{grouped, shortened};
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// How often it is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What a limit has decided so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Count {
    allowed: f64,
    denied: f64,
}

/// One look at a server.
struct Look {
    at: Instant,
    limits: Value,
    server: Value,
    counts: BTreeMap<String, Count>,
    /// By limit: who is denied most, and whether it is decided without the store now.
    lately: BTreeMap<String, Lately>,
}

/// What a limit did in the last seconds.
#[derive(Clone, Debug, Default, PartialEq)]
struct Lately {
    /// Who was denied most in the last minutes, and how often.
    offender: Option<(String, u64)>,
    falls_back: bool,
}

/// How rows are sorted, and from which on they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct View {
    sort: Sort,
    from: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Denied,
    Allowed,
    Share,
    Name,
}

/// What was pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Press {
    Quit,
    Sort(Sort),
    /// So many rows down, or up.
    Scroll(isize),
    Start,
    End,
}

impl View {
    const FIRST: View = View { sort: Sort::Denied, from: 0 };

    /// After a key, with so many rows of which so many are shown.
    fn after(self, press: Press, rows: usize, shown: usize) -> View {
        let last = rows.saturating_sub(shown);
        match press {
            Press::Quit => self,
            Press::Sort(sort) => View { sort, from: 0 },
            Press::Scroll(by) => View { from: self.from.saturating_add_signed(by).min(last), ..self },
            Press::Start => View { from: 0, ..self },
            Press::End => View { from: last, ..self },
        }
    }
}

/// What was pressed, from the bytes that a terminal sends.
fn presses(mut bytes: &[u8]) -> Vec<Press> {
    const SEQUENCES: [(&[u8], Press); 8] = [
        (b"\x1b[A", Press::Scroll(-1)),
        (b"\x1b[B", Press::Scroll(1)),
        (b"\x1b[5~", Press::Scroll(-10)),
        (b"\x1b[6~", Press::Scroll(10)),
        (b"\x1b[H", Press::Start),
        (b"\x1b[1~", Press::Start),
        (b"\x1b[F", Press::End),
        (b"\x1b[4~", Press::End),
    ];
    let mut all = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        if let Some((text, press)) = SEQUENCES.iter().find(|(text, _)| bytes.starts_with(text)) {
            all.push(*press);
            bytes = &bytes[text.len()..];
            continue;
        }
        bytes = rest;
        all.extend(match first {
            b'q' | b'Q' | 3 | 4 => Some(Press::Quit),
            // Alone it is the key; before others it begins a sequence that means nothing here.
            27 if rest.is_empty() => Some(Press::Quit),
            27 => {
                bytes = &[];
                None
            }
            b'd' => Some(Press::Sort(Sort::Denied)),
            b'a' => Some(Press::Sort(Sort::Allowed)),
            b's' => Some(Press::Sort(Sort::Share)),
            b'n' => Some(Press::Sort(Sort::Name)),
            b'j' => Some(Press::Scroll(1)),
            b'k' => Some(Press::Scroll(-1)),
            b' ' => Some(Press::Scroll(10)),
            b'g' => Some(Press::Start),
            b'G' => Some(Press::End),
            _ => None,
        });
    }
    all
}

/// One limit, as it is shown.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    name: String,
    rule: String,
    count: Count,
    /// A second; `None` with the first look.
    rate: Option<Count>,
    lately: Lately,
    fallback: String,
}

impl Line {
    fn share(&self) -> f64 {
        let of = self.rate.unwrap_or(self.count);
        let all = of.allowed + of.denied;
        if all > 0.0 { of.denied / all } else { 0.0 }
    }
}

/// The limits in the order of a view.
fn lines(look: &Look, before: Option<&Look>, sort: Sort) -> Vec<Line> {
    let mut all: Vec<Line> = look.limits["limits"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|limit| {
            let name = text(&limit["limit"]);
            let count = look.counts.get(&name).copied().unwrap_or_default();
            let rate = before.map(|before| {
                let then = before.counts.get(&name).copied().unwrap_or_default();
                let seconds = look.at.duration_since(before.at).as_secs_f64().max(0.001);
                // A server that was started anew counts from zero.
                let a_second = |now: f64, then: f64| (now - then).max(0.0) / seconds;
                Count {
                    allowed: a_second(count.allowed, then.allowed),
                    denied: a_second(count.denied, then.denied),
                }
            });
            let shadow = if limit["shadow"] == true { " (shadow)" } else { "" };
            Line {
                rule: format!("{}{shadow}", text(&limit["rule"])),
                lately: look.lately.get(&name).cloned().unwrap_or_default(),
                fallback: text(&limit["fallback"]),
                name,
                count,
                rate,
            }
        })
        .collect();
    // What is rare is not lost among what is not: by rate first, then by all that was counted.
    let by = |line: &Line| match sort {
        Sort::Denied => (line.rate.map_or(0.0, |rate| rate.denied), line.count.denied),
        Sort::Allowed => (line.rate.map_or(0.0, |rate| rate.allowed), line.count.allowed),
        Sort::Share => (line.share(), line.count.denied),
        Sort::Name => (0.0, 0.0),
    };
    all.sort_by(|one, other| {
        let (a, b) = (by(one), by(other));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)).then_with(|| one.name.cmp(&other.name))
    });
    all
}

/// Who is denied most under each limit, and which limits are decided without the store, from `/v1/snapshot`.
fn lately(snapshot: &Value) -> BTreeMap<String, Lately> {
    let of = |limit: &Value| {
        let offender = limit["offenders"].as_array().and_then(|all| all.first()).map(|one| {
            let who = match one["key"].as_str() {
                Some(key) => super::visible(key),
                None => text(&one["hash"]).chars().take(12).collect::<String>() + "…",
            };
            (who, one["denials"].as_u64().unwrap_or_default())
        });
        let fell_back = limit["seconds"]["fell_back"].as_array();
        let falls_back =
            fell_back.is_some_and(|all| all.iter().rev().take(5).any(|count| count.as_u64() > Some(0)));
        (text(&limit["limit"]), Lately { offender, falls_back })
    };
    snapshot["limits"].as_array().into_iter().flatten().map(of).collect()
}

impl Look {
    fn take(client: &Client) -> Result<Look, Failure> {
        let (limits, server) = (client.get_json("/v1/limits")?, client.get_json("/v1/server")?);
        let counts = counts(&client.get("/metrics")?.body);
        let lately = lately(&client.get_json("/v1/snapshot")?);
        Ok(Look { at: Instant::now(), limits, server, counts, lately })
    }
}

/// Runs the command.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    let client = Client::new(&args.server.url)?;
    let first = Look::take(&client)?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let mut out = io::stdout().lock();
        let ink = Ink::of(&io::stdout());
        return show(&mut out, ink, &client, (&first, None), View::FIRST, None).map_err(Failure::answering);
    }
    let screen = Screen::open().map_err(|error| Failure::new(format!("cannot use the terminal: {error}")))?;
    let ended = live(&client, first);
    drop(screen);
    ended
}

fn live(client: &Client, first: Look) -> Result<(), Failure> {
    let ink = Ink::of(&io::stdout());
    let (mut last, mut before, mut trouble) = (first, None, None);
    let mut view = View::FIRST;
    let mut next = Instant::now() + LOOK;
    loop {
        let mut page = Vec::new();
        let room = Room::of_terminal();
        show(&mut page, ink, client, (&last, before.as_ref()), view, Some(room))
            .map_err(Failure::answering)?;
        // A server that restarts comes back; until then the last page stands, with what is wrong below it.
        if let Some(trouble) = &trouble {
            page.extend_from_slice(format!("\n{}", ink.paint(Tone::Bad, trouble)).as_bytes());
        }
        draw(&page).map_err(Failure::answering)?;
        let left = next.saturating_duration_since(Instant::now());
        let pressed = pressed(left).map_err(|error| Failure::reading("stdin", &error))?;
        if pressed.contains(&Press::Quit) {
            return Ok(());
        }
        if !pressed.is_empty() {
            // What was pressed is seen at once, and not with the next look.
            let rows = last.limits["limits"].as_array().map_or(0, Vec::len);
            view = pressed.into_iter().fold(view, |view, press| view.after(press, rows, room.rows));
            continue;
        }
        next = Instant::now() + LOOK;
        match Look::take(client) {
            Ok(look) => {
                before = Some(std::mem::replace(&mut last, look));
                trouble = None;
            }
            Err(failure) => trouble = Some(failure.to_string()),
        }
    }
}

/// How many lines the table leaves to what stands above and below it: the server, an empty line, the head, what there is besides, the help and a line for
/// what is wrong.
const HEAD_AND_FOOT: usize = 6;

/// What the table has on a terminal.
#[derive(Clone, Copy, Debug)]
struct Room {
    rows: usize,
    columns: usize,
}

/// From how many columns on the table has all of its own, and from how many it has the rule beside what must be seen.
const WIDE: usize = 140;
const MIDDLE: usize = 112;

impl Room {
    fn of_terminal() -> Room {
        let (rows, columns) = tcgetwinsize(io::stdout()).map_or((24, 80), |size| (size.ws_row, size.ws_col));
        Room { rows: usize::from(rows).saturating_sub(HEAD_AND_FOOT).max(1), columns: usize::from(columns) }
    }
}

fn rows_of_terminal() -> usize {
    tcgetwinsize(io::stdout()).map_or(24, |size| usize::from(size.ws_row))
}

/// Overwrites what is there, line by line, so that nothing flickers; lines that do not fit are left out.
fn draw(page: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let rows = rows_of_terminal();
    out.write_all(b"\x1b[H")?;
    for line in page.split(|byte| *byte == b'\n').take(rows.saturating_sub(1).max(1)) {
        out.write_all(line)?;
        out.write_all(b"\x1b[K\n")?;
    }
    out.write_all(b"\x1b[J")?;
    out.flush()
}

fn show(
    out: &mut impl Write,
    ink: Ink,
    client: &Client,
    (look, before): (&Look, Option<&Look>),
    view: View,
    room: Option<Room>,
) -> io::Result<()> {
    let store = &look.server["store"];
    let tone = if store["state"] == "up" { Tone::Good } else { Tone::Bad };
    // Nobody counts the keys of a shared store, and a store in this process does not fail.
    let more = match store["mode"] == "memory" {
        true => format!("keys {}", number(&look.server["keys"])),
        false => format!("fallen back {}", number(&store["fallen_back"])),
    };
    writeln!(
        out,
        "{}  store {} {}  {more}  version {}",
        ink.paint(Tone::Strong, client.url()),
        text(&store["mode"]),
        ink.paint(tone, text(&store["state"])),
        text(&look.server["version"]),
    )?;
    let mut notices = 0;
    if let Some(why) = look.server["reloads"].as_array().and_then(|all| all.last()?["refused"].as_str()) {
        writeln!(
            out,
            "{}",
            ink.paint(Tone::Bad, format!("the changed config was refused: {}", super::visible(why)))
        )?;
        notices += 1;
    }
    let restart = look.server["reloads"].as_array().and_then(|all| all.last()?["restart"].as_array());
    let restart: Vec<String> = restart.into_iter().flatten().map(text).collect();
    if !restart.is_empty() {
        writeln!(out, "changed in the config, and needs a restart: {}", restart.join(", "))?;
        notices += 1;
    }
    writeln!(out)?;
    let room = room.map(|room| Room { rows: room.rows.saturating_sub(notices).max(1), ..room });
    table(out, ink, &lines(look, before, view.sort), view, room)
}

/// The columns whose texts others choose, of any length.
const NAME: usize = 0;
const RULE: usize = 1;
const DENIED_MOST: usize = 7;

/// What a line says, column by column, before anything is shortened.
fn texts(line: &Line) -> [String; 9] {
    let rate =
        |of: fn(Count) -> f64| line.rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.1}", of(rate)));
    let offender = line.lately.offender.as_ref();
    [
        line.name.clone(),
        line.rule.clone(),
        rate(|count| count.allowed),
        rate(|count| count.denied),
        format!("{:.1} %", 100.0 * line.share()),
        whole(line.count.allowed),
        whole(line.count.denied),
        offender.map_or_else(|| "-".to_owned(), |(who, times)| format!("{who} {}", grouped(*times))),
        if line.lately.falls_back { format!("now: {}", line.fallback) } else { line.fallback.clone() },
    ]
}

/// How wide each column is, so that a row fits: the widest of the names, the rules and the keys gives way first, each down to a width of which something is
/// left to read. Numbers and the fallback are never shortened.
fn fitted(
    heads: &[&str; 9],
    rows: &[[String; 9]],
    wanted: impl Fn(usize) -> bool,
    columns: usize,
) -> [usize; 9] {
    const LEAST: [(usize, usize); 3] = [(NAME, 12), (RULE, 12), (DENIED_MOST, 16)];
    let mut widths = [0; 9];
    for (index, width) in widths.iter_mut().enumerate() {
        let texts = rows.iter().map(|row| row[index].chars().count());
        *width = texts.chain([heads[index].len()]).max().unwrap_or(0);
    }
    let shown: Vec<usize> = (0..widths.len()).filter(|index| wanted(*index)).collect();
    let gaps = 2 * shown.len().saturating_sub(1);
    let needed = shown.iter().map(|&index| widths[index]).sum::<usize>() + gaps;
    for _ in columns..needed {
        let long = LEAST.iter().filter(|(index, least)| wanted(*index) && widths[*index] > *least);
        let Some((index, _)) = long.max_by_key(|(index, _)| widths[*index]) else { break };
        widths[*index] -= 1;
    }
    widths
}

/// The limits that there is room for, and how many there are besides; with help where there is somebody to press keys.
fn table(out: &mut impl Write, ink: Ink, all: &[Line], view: View, room: Option<Room>) -> io::Result<()> {
    let is_live = room.is_some();
    let columns = room.map_or(usize::MAX, |room| room.columns);
    let (has_rules, has_sums) = (columns >= MIDDLE, columns >= WIDE);
    let room = room.map_or(all.len(), |room| room.rows);
    let from = view.from.min(all.len().saturating_sub(room));
    let shown = &all[from..(from + room).min(all.len())];
    let wanted = |index: usize| match index {
        1 => has_rules,
        5 | 6 => has_sums,
        _ => true,
    };
    let heads = [
        ("LIMIT", Side::Left),
        ("RULE", Side::Left),
        ("ALLOWED/S", Side::Right),
        ("DENIED/S", Side::Right),
        ("SHARE", Side::Right),
        ("ALLOWED", Side::Right),
        ("DENIED", Side::Right),
        ("DENIED MOST", Side::Left),
        ("FALLBACK", Side::Left),
    ];
    let texts: Vec<[String; 9]> = shown.iter().map(texts).collect();
    let widths = fitted(&heads.map(|(head, _)| head), &texts, wanted, columns);
    let heads: Vec<(&str, Side)> =
        heads.into_iter().enumerate().filter(|(index, _)| wanted(*index)).map(|(_, head)| head).collect();
    let mut table = Table::new(&heads);
    for (line, mut texts) in shown.iter().zip(texts) {
        for index in [NAME, RULE] {
            texts[index] = shortened(&texts[index], widths[index]);
        }
        if let Some((who, times)) = &line.lately.offender {
            let times = grouped(*times);
            let who = shortened(who, widths[DENIED_MOST].saturating_sub(times.len() + 1));
            texts[DENIED_MOST] = format!("{who} {times}");
        }
        let denied = if line.count.denied > 0.0 { Tone::Bad } else { Tone::Plain };
        let fallback = if line.lately.falls_back { Tone::Bad } else { Tone::Faint };
        let plain = Tone::Plain;
        let tones = [Tone::Strong, plain, plain, plain, plain, plain, denied, plain, fallback];
        let cells = texts.into_iter().zip(tones).map(|(text, tone)| Cell::toned(tone, text));
        table.row(cells.enumerate().filter(|(index, _)| wanted(*index)).map(|(_, cell)| cell));
    }
    table.print(out, ink, 0)?;
    let more = all.len() - shown.len();
    if more > 0 {
        let (above, below) = (from, all.len() - from - shown.len());
        writeln!(out, "{}", ink.paint(Tone::Faint, format!("{more} more: {above} above, {below} below")))?;
    }
    if is_live {
        let by = match view.sort {
            Sort::Denied => "denials first",
            Sort::Allowed => "allowed first",
            Sort::Share => "share first",
            Sort::Name => "by name",
        };
        let help = match has_rules {
            true => "sort: d denied  a allowed  s share  n name   scroll: arrows, space, g, G   q quit",
            false => "d denied a allowed s share n name   ↑ ↓ g G scroll   q quit",
        };
        let help = format!("{by}   {help}");
        writeln!(out, "{}", ink.paint(Tone::Faint, help))?;
    }
    Ok(())
}

/// Counters are whole numbers, and exact as floats far beyond what anybody counts.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a counter is whole and never negative"
)]
fn whole(count: f64) -> String {
    grouped(count as u64)
}

/// What each limit decided, from the text of `/metrics`.
fn counts(metrics: &str) -> BTreeMap<String, Count> {
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    for line in metrics.lines() {
        // A fallback is counted there by what it said, and among decisions only as one.
        let decisions = line.strip_prefix("rate_limiter_decisions_total{");
        let Some(rest) = decisions.or_else(|| line.strip_prefix("rate_limiter_fallback_total{")) else {
            continue;
        };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let Ok(value) = value.trim().parse::<f64>() else { continue };
        let label = |name: &str| {
            let (_, rest) = labels.split_once(&format!("{name}=\""))?;
            rest.split('"').next()
        };
        let Some(limit) = label("limiter") else { continue };
        let count = counts.entry(limit.to_owned()).or_default();
        match (label("decision"), label("shadow")) {
            (Some("fallback") | None, _) => {}
            (Some("deny"), Some("false") | None) => count.denied += value,
            (Some(_), _) => count.allowed += value,
        }
    }
    counts
}

/// What is pressed within a time; the end of the input counts as q.
fn pressed(wait: Duration) -> io::Result<Vec<Press>> {
    let end = Instant::now() + wait;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let stdin = io::stdin();
        let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut ready, Some(&timeout)) {
            Ok(0) => return Ok(Vec::new()),
            Ok(_) => {
                let mut bytes = [0; 64];
                let length = rustix::io::read(&stdin, &mut bytes)?;
                let pressed = if length == 0 { vec![Press::Quit] } else { presses(&bytes[..length]) };
                if !pressed.is_empty() {
                    return Ok(pressed);
                }
            }
            // A window that changes its size interrupts the wait.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The terminal's other screen, with keys as they are pressed; the one before comes back when this is dropped.
struct Screen {
    before: Termios,
}

impl Screen {
    fn open() -> io::Result<Screen> {
        let before = tcgetattr(io::stdin())?;
        let mut keys = before.clone();
        keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        tcsetattr(io::stdin(), OptionalActions::Now, &keys)?;
        let screen = Screen { before };
        write!(io::stdout(), "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J")?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write!(io::stdout(), "\x1b[?7h\x1b[?25h\x1b[?1049l");
        let _ = io::stdout().flush();
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(counts: &[(&str, f64, f64)], at: Instant) -> Look {
        let limits: Vec<Value> = counts
            .iter()
            .map(|(name, ..)| serde_json::json!({ "limit": name, "rule": "5 per 1m window", "fallback": "local", "shadow": false }))
            .collect();
        let of = |(name, allowed, denied): &(&str, f64, f64)| {
            ((*name).to_owned(), Count { allowed: *allowed, denied: *denied })
        };
        Look {
            at,
            limits: serde_json::json!({ "limits": limits }),
            server: Value::Null,
            counts: counts.iter().map(of).collect(),
            lately: BTreeMap::new(),
        }
    }

    #[test]
    fn rows_are_sorted_and_scroll() {
        let start = Instant::now();
        let before = look(&[("quiet", 9.0, 9.0), ("api", 100.0, 0.0), ("login", 1.0, 1.0)], start);
        let now = look(
            &[("quiet", 9.0, 9.0), ("api", 300.0, 1.0), ("login", 1.0, 21.0)],
            start + Duration::from_secs(2),
        );
        let names = |sort| -> Vec<String> {
            lines(&now, Some(&before), sort).into_iter().map(|line| line.name).collect()
        };
        assert_eq!(names(Sort::Denied), ["login", "api", "quiet"]);
        assert_eq!(names(Sort::Allowed), ["api", "quiet", "login"]);
        assert_eq!(names(Sort::Share), ["login", "api", "quiet"]);
        assert_eq!(names(Sort::Name), ["api", "login", "quiet"]);
        let all = lines(&now, Some(&before), Sort::Denied);
        assert_eq!(all[0].rate, Some(Count { allowed: 0.0, denied: 10.0 }));
        let shown_on = |view: View, room: Option<usize>, columns| {
            let mut text = Vec::new();
            let room = room.map(|rows| Room { rows, columns });
            table(&mut text, Ink::Plain, &all, view, room).expect("memory");
            String::from_utf8(text).expect("text")
        };
        let shown = |view: View, room: Option<usize>| shown_on(view, room, 200);
        let first = shown(View::FIRST, Some(1));
        assert!(first.contains("login") && !first.contains("quiet"), "{first}");
        assert!(first.contains("2 more: 0 above, 2 below\ndenials first   sort: d denied"), "{first}");
        let last = shown(View { from: 99, ..View::FIRST }, Some(1));
        assert!(last.contains("quiet") && last.contains("2 more: 2 above, 0 below"), "{last}");
        // On a usual terminal nothing is cut off: not who is denied, not the fallback, not the help.
        let narrow = shown_on(View { sort: Sort::Share, from: 0 }, Some(1), 80);
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        for words in ["DENIED MOST", "FALLBACK", "q quit", "2 more"] {
            assert!(narrow.contains(words), "{words}: {narrow}");
        }
        assert!(!narrow.contains("RULE") && shown_on(View::FIRST, Some(1), 120).contains("RULE"));
        let whole = shown(View::FIRST, None);
        assert!(whole.contains("quiet") && !whole.contains("more") && !whole.contains("sort:"), "{whole}");
        let view = View::FIRST.after(Press::Scroll(5), 60, 20).after(Press::Scroll(-2), 60, 20);
        assert_eq!(view.from, 3);
        assert_eq!(view.after(Press::End, 60, 20).from, 40);
        assert_eq!(view.after(Press::Scroll(1_000), 60, 20).from, 40);
        assert_eq!(view.after(Press::Sort(Sort::Name), 60, 20), View { sort: Sort::Name, from: 0 });
        assert_eq!(view.after(Press::Scroll(9), 5, 20).from, 0, "what fits does not scroll");
    }

    /// Regression: a name of 24 characters, four digits of denials and a fallback that answers were 85 columns of 80, and wider screens shortened nothing.
    #[test]
    fn a_row_fits_however_long_its_names_are() {
        let line = |name: usize, key: usize, denials: u64| Line {
            name: "n".repeat(name),
            rule: "1,000 per 1m window of the clock (shadow)".to_owned(),
            count: Count { allowed: 1_234_567.0, denied: 12_345.0 },
            rate: Some(Count { allowed: 1_234.5, denied: 123.4 }),
            lately: Lately { offender: Some(("k".repeat(key), denials)), falls_back: true },
            fallback: "closed".to_owned(),
        };
        for (name, key, denials) in
            [(24, 10, 1_234), (64, 256, 1_234_567), (64, 3, 1), (3, 256, 12), (3, 3, 3)]
        {
            for columns in [80, 100, 112, 139, 140, 200] {
                let all = [line(name, key, denials), line(3, 3, 1)];
                let mut text = Vec::new();
                let room = Some(Room { rows: 10, columns });
                table(&mut text, Ink::Plain, &all, View::FIRST, room).expect("memory");
                let text = String::from_utf8(text).expect("text");
                let widest = text.lines().map(|line| line.chars().count()).max().expect("lines");
                assert!(widest <= columns, "{widest} of {columns}:\n{text}");
                let row = text.lines().nth(1).expect("a row");
                assert!(row.contains(&format!(" {} ", grouped(denials))), "{row}");
                assert!(row.ends_with("now: closed") && row.starts_with(&"n".repeat(name.min(11))), "{row}");
                // Nothing is shortened without need.
                assert!(name + key > 6 || !row.contains('…'), "{row}");
            }
        }
    }

    #[test]
    fn keys_are_read_as_terminals_send_them() {
        for (bytes, expected) in [
            (&b"q"[..], &[Press::Quit][..]),
            (b"\x1b", &[Press::Quit]),
            (b"\x1b[A\x1b[B", &[Press::Scroll(-1), Press::Scroll(1)]),
            (b"\x1b[6~d", &[Press::Scroll(10), Press::Sort(Sort::Denied)]),
            (b"\x1b[31;5u", &[]),
            (b"xyz", &[]),
            (b"jG", &[Press::Scroll(1), Press::End]),
        ] {
            assert_eq!(presses(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn who_is_denied_and_what_falls_back_is_taken_from_the_snapshot() {
        let snapshot = serde_json::json!({ "limits": [
            { "limit": "api", "offenders": [{ "hash": "0123456789abcdef", "key": null, "denials": 7 }], "seconds": { "fell_back": [9, 0, 0, 0, 0, 0] } },
            { "limit": "login", "offenders": [{ "hash": "ff", "key": "user:1", "denials": 2 }], "seconds": { "fell_back": [0, 0, 1] } },
            { "limit": "idle", "offenders": [], "seconds": { "fell_back": [] } },
        ] });
        let seen = lately(&snapshot);
        assert_eq!(seen["api"], Lately { offender: Some(("0123456789ab…".into(), 7)), falls_back: false });
        assert_eq!(seen["login"], Lately { offender: Some(("user:1".into(), 2)), falls_back: true });
        assert_eq!(seen["idle"], Lately::default());
    }

    #[test]
    fn counts_are_added_up_by_limit() {
        let metrics = "# TYPE rate_limiter_decisions_total counter\n\
            rate_limiter_decisions_total{decision=\"allow\",shadow=\"false\",limiter=\"api\",namespace=\"a\"} 2\n\
            rate_limiter_decisions_total{decision=\"deny\",shadow=\"true\",limiter=\"api\",namespace=\"b\"} 3\n\
            rate_limiter_decisions_total{decision=\"deny\",shadow=\"false\",limiter=\"api\",namespace=\"b\"} 7\n\
            rate_limiter_decisions_total{decision=\"fallback\",shadow=\"false\",limiter=\"api\",namespace=\"b\"} 30\n\
            rate_limiter_fallback_total{fallback=\"local\",decision=\"allow\",shadow=\"false\",limiter=\"api\"} 10\n\
            rate_limiter_fallback_total{fallback=\"local\",decision=\"deny\",shadow=\"false\",limiter=\"api\"} 20\n\
            rate_limiter_decisions_total{decision=\"deny\"} 7\n\
            rate_limiter_decisions_total{decision=\"deny\",limiter=\"x\"} many\n\
            rate_limiter_keys 9\n";
        let expected = BTreeMap::from([("api".to_owned(), Count { allowed: 15.0, denied: 27.0 })]);
        assert_eq!(counts(metrics), expected);
    }
}
